"""Records: the results of a run, each appended to a file when it is finished; a resumed run reads them again."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from iris.bench.axes import Params
from iris.bench.state import Outcome
from iris.errors import ArgumentError
from iris.results import PICKED, SCHEMA, SIMULATOR, half, parsed

Record = dict[str, Any]
_OPTIONAL = (
    *("validated", "skipped", "error", "batch", "time_ms", "back_to_back_ms", "host_us", "flops", "nbytes"),
    *("floor_ms", "floor_share", "tflops_per_gpu", "gbytes_per_s"),
)
"""Fields that a line may leave out instead of giving null."""


def record(
    case: str,
    params: Params,
    outcomes: Sequence[Outcome],
    environment: Mapping[str, str | int | None],
    world_size: int,
    batch: str | None = None,
) -> Record:
    """The record of one point, made from the outcomes of all ranks, in rank order.

    ``batch`` is common to all points that were timed in turns; None is for a point that was timed alone.
    """
    first = outcomes[0]
    time_ms = _time_ms([outcome.seconds for outcome in outcomes])
    seconds = time_ms["median"] / 1e3 if time_ms is not None else None
    return {
        "schema": SCHEMA,
        "case": case,
        "params": params,
        "world_size": world_size,
        "batch": batch or new_batch(),
        "validated": first.validated,
        "skipped": first.skipped,
        "error": first.error,
        "time_ms": time_ms,
        "back_to_back_ms": _slowest([one.back_to_back_s for one in outcomes], 1e3),
        "host_us": _slowest([one.host_s for one in outcomes], 1e6),
        "flops": first.flops,
        "nbytes": first.nbytes,
        "floor_ms": first.floor_s * 1e3 if first.floor_s else None,
        "floor_share": first.floor_s / seconds if first.floor_s and seconds else None,
        "tflops_per_gpu": first.flops / seconds / 1e12 if first.flops and seconds else None,
        "gbytes_per_s": first.nbytes / seconds / 1e9 if first.nbytes and seconds else None,
        "predicted_ms": first.predicted_s * 1e3 if first.predicted_s else None,
        "config": first.config,
        "deterministic": first.deterministic,
        "counters": first.counters,
        "environment": dict(environment),
    }


def new_batch() -> str:
    """A name that no other batch has."""
    return secrets.token_hex(8)


def succeeded(one: Record) -> bool:
    """Whether a record tells of no failure; a skipped point is no failure."""
    return one["error"] is None and one["validated"] is not False


def key(case: str, params: Mapping[str, Any], world_size: int) -> str:
    """The identity of a point: records of the same point have the same key."""
    return json.dumps([case, dict(params), world_size], sort_keys=True)


def key_of(one: Record) -> str:
    return key(one["case"], one["params"], one["world_size"])


def simulated(one: Mapping[str, Any]) -> bool:
    """Whether a record is of simulated ranks: its times are wall time; rates and speed-ups from them mean nothing."""
    return bool(one["environment"].get("backend") == SIMULATOR)


def place_of(one: Record) -> tuple[Any, Any]:
    """Hardware and backend that a record comes from."""
    environment = one["environment"]
    return environment.get("hardware"), environment.get("backend")


def picked(one: Record) -> str | None:
    """The algorithm that ``auto`` or ``untuned`` took, or was to take; None for others, or if the record has none."""
    config = one.get("config")
    if one["params"].get("algorithm") not in PICKED or not isinstance(config, dict) or "algorithm" not in config:
        return None
    return str(config["algorithm"])


def _time_ms(seconds: Sequence[Sequence[float]]) -> dict[str, float | int] | None:
    """Statistics over calls of each call's time on its slowest rank, from the times of all ranks."""
    if not all(seconds):
        return None
    slowest = sorted(1e3 * max(call) for call in zip(*seconds, strict=True))
    medians = [1e3 * statistics.median(rank) for rank in seconds]
    tenths = statistics.quantiles(slowest, n=10, method="inclusive") if len(slowest) > 1 else slowest * 9
    return {
        "median": statistics.median(slowest),
        "min": slowest[0],
        "p10": tenths[0],
        "p90": tenths[-1],
        "rank_skew": max(medians) - min(medians),
        "calls": len(slowest),
    }


def _slowest(seconds: Sequence[float | None], scale: float) -> float | None:
    known = [value for value in seconds if value is not None]
    return scale * max(known) if known else None


@contextmanager
def appending(path: Path) -> Iterator[Callable[[Sequence[Record]], None]]:
    """Open a file for appending, make it if it is missing, and lock it against other runs. Yields a function that
    appends records. A partial last line, of a run that was killed, is removed first. A pipe or device is only written.

    Raises:
        ArgumentError: the file cannot be written, holds something other than results, or is in use by another run.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError as error:
        got = "a folder" if path.is_dir() else error.strerror
        raise ArgumentError("bench", str(path), "a file that can be written", got) from error
    try:
        if stat.S_ISREG(os.fstat(file).st_mode):
            if not sole(file):
                fix = "Wait for the other run, or name another file."
                raise ArgumentError("bench", str(path), "a file that no other run writes", "one that is in use", fix)
            _mend(path, file)
        yield partial(_append, path, file)
    finally:
        os.close(file)


def sole(file: int) -> bool:
    """Lock an open file until it is closed; False if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def line_of(one: Record) -> str:
    """A record as a line. Lone surrogates, which names of files may contain, become question marks: no reader of
    records accepts them."""
    whole = json.dumps(one, allow_nan=False, ensure_ascii=False).encode(errors="replace")
    return json.dumps(json.loads(whole)) + "\n"


def _append(path: Path, file: int, records: Sequence[Record]) -> None:
    lines = "".join(map(line_of, records)).encode()
    try:
        written = os.write(file, lines)
    except OSError as error:
        raise ArgumentError("bench", str(path), "a file that can be written", error.strerror) from error
    if written < len(lines):
        raise ArgumentError("bench", str(path), "room for a line", f"room for {written} of {len(lines)} bytes")


def _mend(path: Path, file: int) -> None:
    """Make a file end with a whole line."""
    content = _read(path)
    tail = half(content)
    whole = content.removesuffix(tail)
    _records(path, whole)
    try:
        if tail:
            os.truncate(file, len(whole))
        elif content and not content.endswith(b"\n"):
            os.write(file, b"\n")
    except OSError as error:
        raise ArgumentError("bench", str(path), "a file that can be written", error.strerror) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArgumentError("bench", str(path), "a file that can be read", error.strerror) from error


def load(path: Path) -> list[Record]:
    """All records in a file, without an unfinished last line.

    Raises:
        ArgumentError: there is no such file, it cannot be read, or a line in it is no record of this schema; the text
            names the line.
    """
    if not os.path.isfile(path):
        got = f"{path}, which is none" if os.path.exists(path) else f"{path}: there is no such file"
        raise ArgumentError("bench", "--resume", "a file of results", got, "Start a run with --benchmark_out first.")
    content = _read(path)
    return _records(path, content.removesuffix(half(content)))


def newest(records: Iterable[Record]) -> dict[str, Record]:
    """The last record of each point, by :func:`key`."""
    return {key_of(one): one for one in records}


def _records(path: Path, content: bytes) -> list[Record]:
    """The records that ``content`` of a file holds."""
    empty = dict.fromkeys(_OPTIONAL)
    return [empty | fields | {"counters": fields.get("counters") or {}} for fields, _ in parsed("bench", path, content)]
