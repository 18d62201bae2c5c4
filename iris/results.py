"""Results on disk: JSON lines, one object for each measured point.

A line says what was measured (``case``, ``params``, ``world_size``), whether the result was right (``validated``), why
there are no figures (``skipped``, ``error``), the figures, and the ``environment``. ``time_ms`` is of the slowest rank:
the longest time of any rank is taken for each call, and the line has the median, the smallest, and the 10th and 90th
percentile of these; ``rank_skew`` is the slowest rank's median minus the fastest's. ``back_to_back_ms`` is the time per
call of many in a row, host included, once these have warmed the device; ``host_us`` is the host's time for one call.
``flops`` and ``nbytes`` are per rank and call. ``deterministic`` says whether two calls on the same data give the same
bits; null: unknown. Results of one ``batch`` were timed in turns; only their times are divided by each other, and those
of older results, which have no batch.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from iris import files
from iris.errors import ArgumentError

SCHEMA = 1
_BEGIN = b'{"schema":'
"""The beginning of every line."""
SIMULATOR = "sim"
_RATE = "GB/s"
"""The beginning of the names of counters that are rates."""
_HASH = re.compile(r"\b([0-9a-f]{7})[0-9a-f]{33}\b")
"""The full hash of a commit; only its first part is kept, as git shows it."""
SERIES = ("algorithm", "way")
"""Parameters that say how something was computed or moved, not what."""
PICKED = ("auto", "untuned")
"""Algorithms that stand for the one that was picked."""
OPPONENTS = ("nccl", "torch_symm_mem")
"""Algorithms that do an op's whole work without Iris; speed-ups are relative to them."""
MATMUL = "matmul"
"""As an algorithm, torch.matmul alone: a part of an op's work, but all of the work of the case of this name."""
COMPARATORS = (*OPPONENTS, MATMUL)
"""All algorithms that are not Iris's."""

MIN_MS, MAX_NUMBER = 1e-9, 1e30
"""The smallest time and the largest number that a result may have: far beyond any measurement, but small enough to
compute with and to draw."""

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Time:
    """One call on the slowest rank, in milliseconds: the median of all calls, the range of 80 % of them, and their
    number, if the line has it."""

    median: float
    p10: float
    p90: float
    rank_skew: float
    calls: float | None = None


@dataclass(frozen=True)
class Result:
    """The meaning of a line. A result that is wrong, failed or was skipped has no time and no figure made from one. A
    result of simulated ranks has a time, which is wall time, but no rate and no floor."""

    case: str
    params: Mapping[str, Value]
    world_size: int
    validated: bool | None
    skipped: str | None
    error: str | None
    time: Time | None
    back_to_back_ms: float | None
    host_us: float | None
    floor_ms: float | None
    floor_share: float | None
    tflops_per_gpu: float | None
    gbytes_per_s: float | None
    predicted_ms: float | None
    picked: str | None
    counters: Mapping[str, float]
    environment: Mapping[str, str]
    batch: str | None
    file: Path

    @property
    def hardware(self) -> str:
        return self.environment["hardware"]

    @property
    def simulated(self) -> bool:
        return self.environment["backend"] == SIMULATOR

    @property
    def date(self) -> str:
        return self.environment["date"]

    @property
    def series(self) -> str | None:
        """The parameter in which the results of a problem differ; None if they have no such parameter."""
        return next((name for name in SERIES if name in self.params), None)

    @property
    def algorithm(self) -> str:
        return self.case if self.series is None else str(self.params[self.series])

    @property
    def of_problem(self) -> dict[str, Value]:
        """The parameters of the problem, without the series."""
        return {name: value for name, value in self.params.items() if name != self.series}

    @property
    def way(self) -> str:
        """The algorithm; after ``auto`` or ``untuned`` the one that it took, if that is known."""
        return f"{self.algorithm}: {self.picked}" if self.algorithm in PICKED and self.picked else self.algorithm

    @cached_property
    def key(self) -> str:
        """The key that measurements of the same thing share."""
        return self.key_of(self.params)

    def key_of(self, params: Mapping[str, Value]) -> str:
        """The key that this result would have with other parameters."""
        return json.dumps([self.case, params, self.world_size, self.hardware, self.simulated], sort_keys=True)

    @property
    def wrong(self) -> bool:
        """Whether it was checked and found wrong; ``error`` may say how."""
        return self.validated is False and self.skipped is None

    @property
    def failure(self) -> str | None:
        """Why there is no time, in a few words; None if there is one."""
        if self.skipped is not None:
            return f"skipped: {self.skipped}"
        if self.wrong:
            return self.error or "wrong result"
        if self.error is not None:
            return f"failed: {self.error}"
        return None if self.time is not None else "failed: no time was recorded"

    @property
    def outcome(self) -> str:
        """What happened to a result without a time, in a word or two."""
        return "wrong result" if self.wrong else "skipped" if self.skipped is not None else "failed"


def without_sizes(names: Collection[str]) -> list[str]:
    """``names`` without m, n and k if they include ``shape``, which tells the same."""
    return [name for name in names if name not in ("m", "n", "k") or "shape" not in names]


def read(path: Path) -> list[Result]:
    """The results of a file, or of all ``*.jsonl`` and ``*.jsonl.gz`` files below a folder, in the order of names and
    lines.

    Raises:
        ArgumentError: there is no such file; one cannot be read; there is no result; or a line is no result: the text
            names file and line.
    """
    with files.argument_errors("report", "results", "a file or folder that can be read", path):
        if not path.exists():
            raise ArgumentError("report", "results", "a file or folder of results", path, f"There is no {path}.")
        below = (file for pattern in ("*.jsonl", "*.jsonl.gz") for file in path.rglob(pattern) if not file.is_dir())
        found = sorted(below) if path.is_dir() else [path]
    results = [result for file in found for result in _read_file(file)]
    if not results:
        raise ArgumentError("report", "results", "results in *.jsonl files", f"none in {path}")
    return results


def _read_file(file: Path) -> list[Result]:
    content = _content(file)
    if tail := half(content):
        number = content.count(b"\n") + 1
        print(f"{file}:{number} is left out: a run that was stopped did not finish the line", file=sys.stderr)
        content = content.removesuffix(tail)
    return [result for _, result in parsed("report", file, content)]


def _content(file: Path) -> bytes:
    """All of ``file``; of one that is named ``.gz``, what it holds compressed."""
    with files.argument_errors("report", "results", "a file that can be read", file):
        content = file.read_bytes()
    try:
        return gzip.decompress(content) if file.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise ArgumentError("report", "results", "a file compressed by gzip", f"{file}: {error}") from error


def half(content: bytes) -> bytes:
    """The part of a line that a stopped run has written at the end of a file's ``content``; empty if there is none."""
    tail = content.rpartition(b"\n")[2]
    if tail.startswith(_BEGIN) or _BEGIN.startswith(tail):
        try:
            json.loads(tail)
        except RecursionError:  # cannot tell, so it stays
            pass
        except ValueError:
            return tail
    return b""


def parsed(program: str, file: Path, content: bytes) -> Iterator[tuple[dict[str, Any], Result]]:
    """The lines in the ``content`` of a file: the fields of each, and the result that they stand for.

    Raises:
        ArgumentError: a line is no result; the text names ``program``, file and line.
    """
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            fields = json.loads(line, parse_constant=_no_number)
            if b"\\u" in line:
                json.dumps(fields, ensure_ascii=False).encode()  # lone surrogates cannot be written
        except (ValueError, RecursionError) as error:
            fix = (
                f"The line is broken ({error}); if a run was stopped while it wrote the line, delete it. "
                "If the file is to hold something else, name another."
            )
            raise ArgumentError(
                program, where, "a JSON object", _shortened(line.decode(errors="replace")), fix
            ) from error
        yield fields, _parse(_Fields(program, where, "", fields), file)


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _parse(line: _Fields, file: Path) -> Result:
    if line.fields.get("schema") != SCHEMA:
        got = line.fields.get("schema", "none")
        fix = "The file comes from another version of Iris, or is no file of results."
        raise ArgumentError(line.program, line.where, f"schema {SCHEMA}", f"schema {got}", fix)
    environment = line.inner("environment")
    for name in ("hardware", "backend", "date"):
        environment.text(name)
    params, counters = line.inner("params"), line.inner("counters", optional=True)
    config = line.inner("config", optional=True)
    validated, skipped, error = (
        line.optional_flag("validated"),
        line.optional_text("skipped"),
        line.optional_text("error"),
    )
    counts = skipped is None and error is None and validated is not False

    on_gpus = environment.text("backend") != SIMULATOR
    rated = counts and on_gpus

    def figure(name: str, wanted: bool = counts) -> float | None:
        value = line.optional_number(name)
        return value if wanted else None

    for name in ("flops", "nbytes"):
        line.optional_number(name)
    time = _time(line.inner("time_ms")) if line.fields.get("time_ms") is not None else None
    counted = {name: counters.number(name, -MAX_NUMBER) for name in counters.fields}
    return Result(
        case=line.text("case"),
        params={name: params.plain(name) for name in params.fields},
        world_size=line.count("world_size"),
        validated=validated,
        skipped=skipped,
        error=error,
        time=time if counts else None,
        back_to_back_ms=figure("back_to_back_ms"),
        host_us=figure("host_us"),
        floor_ms=figure("floor_ms", on_gpus),
        floor_share=figure("floor_share", rated),
        tflops_per_gpu=figure("tflops_per_gpu", rated),
        gbytes_per_s=figure("gbytes_per_s", rated),
        predicted_ms=line.optional_number("predicted_ms"),
        picked=str(algorithm) if (algorithm := config.fields.get("algorithm")) is not None else None,
        counters={name: value for name, value in counted.items() if counts and (on_gpus or not name.startswith(_RATE))},
        environment={
            name: _HASH.sub(r"\1", str(value)) if name == "commit" else str(value)
            for name, value in environment.fields.items()
            if value is not None
        },
        batch=line.optional_text("batch"),
        file=file,
    )


def _time(fields: _Fields) -> Time:
    median, p10, p90, rank_skew = (fields.number(name) for name in ("median", "p10", "p90", "rank_skew"))
    time = Time(median, p10, p90, rank_skew, fields.optional_number("calls"))
    if time.median < MIN_MS:
        raise fields.wrong("median", f"{MIN_MS:g} or more", time.median)
    return time


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}…"


@dataclass(frozen=True)
class _Fields:
    """The fields of one object of a line, checked when they are read."""

    program: str
    where: str
    path: str
    fields: Any

    def __post_init__(self) -> None:
        if not isinstance(self.fields, dict):
            expected = f"a JSON object{f' as {self.path}' if self.path else ''}"
            raise ArgumentError(self.program, self.where, expected, _shortened(repr(self.fields)))

    def wrong(self, name: str, expected: str, got: object) -> ArgumentError:
        path = f"{self.path}.{name}" if self.path else name
        shown = "nothing" if got is None else _shortened(repr(got))
        return ArgumentError(self.program, self.where, f"{path}: {expected}", shown)

    def inner(self, name: str, optional: bool = False) -> _Fields:
        value = self.fields.get(name)
        return _Fields(self.program, self.where, name, {} if value is None and optional else value)

    def text(self, name: str) -> str:
        value = self.optional_text(name)
        if value is None:
            raise self.wrong(name, "text", value)
        return value

    def optional_text(self, name: str) -> str | None:
        value = self.fields.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "text", value)
        return value

    def number(self, name: str, least: float = 0.0) -> float:
        value = self.optional_number(name, least)
        if value is None:
            raise self.wrong(name, "a number", value)
        return value

    def optional_number(self, name: str, least: float = 0.0) -> float | None:
        value = self.fields.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= MAX_NUMBER:
            raise self.wrong(name, f"a number from {least:g} to {MAX_NUMBER:g}", value)
        return float(value)

    def count(self, name: str) -> int:
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_NUMBER:
            raise self.wrong(name, f"a whole number from 1 to {MAX_NUMBER:g}", value)
        return value

    def plain(self, name: str) -> Value:
        value: object = self.fields[name]
        if isinstance(value, str | int | None) or (isinstance(value, float) and math.isfinite(value)):
            return value
        raise self.wrong(name, "text, a number, a flag or null", value)

    def optional_flag(self, name: str) -> bool | None:
        value = self.fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true, false or null", value)
        return value


def newest(results: Sequence[Result]) -> dict[str, Result]:
    """The newest result of each key, in the order in which the keys first appear."""
    found: dict[str, Result] = {}
    for result in results:
        known = found.get(result.key)
        if known is None or result.date >= known.date:
            found[result.key] = result
    return found
