"""Tuned rows: configs that were measured, and where, when and for which shape; see ``python -m iris tune``.

A file is a JSON object ``{"schema": 1, "rows": […]}``. A row has

* ``hardware``, ``world_size``, ``op``, ``gather_dim`` (null except for a gather), ``dtype``: what it counts for.
  float16 and bfloat16 count as one, because they move as many bytes and are multiplied as fast;
* ``m``, ``n``, ``k``, ``transposed_b``: the local matmul that was measured, as in :class:`iris.ops.Problem`; rows for a
  row-major B may leave out the last field;
* ``config``: the fastest config, without fields that have their default;
* ``measured_ms``, ``predicted_ms``: its time, and the time that the model expected; ``untuned_ms``: the measured time
  of the config that is picked without rows;
* ``versions``, ``date``: the versions with which it was measured, and when;
* ``library_ms``: in rows of ``matmul``, the time of ``torch.matmul``, measured at the same time;
* ``unfinished``: true if the search was stopped early; ``--resume`` continues it. Such a row never replaces a finished
  one;
* ``emulated``: true if two GPUs stood for all ranks (benchmark/mirrored.py).

A row counts for shapes whose m, n and k are each within a factor √2 of its own, so that rows for powers of two count
for everything between. Further off, the number of waves changes by more than half, and another tile is often better. A
row that gained less than 5 % over ``untuned_ms`` counts for its own shape only. If several rows count, the nearest is
taken, by the sum of the squared logarithms of the three factors.

A row with Iris's own matmul of few rows (``own_matmul``, and ``one_shot``) counts, whatever it gained, only for weights
of exactly its n, k and layout of B (row-major or transposed), because the library's choice of kernels is erratic. It
counts for its m, and for fewer rows down to more than half of that. For all other rows the layout of B does not matter.

Whether ``low_latency`` and ``low_latency_two_shot`` use Iris's matmul or the library's (``own_matmul``) depends on the
local matmul only. So if there is no row for the op and number of ranks, a row for another op or number of ranks
decides. So does a row of ``matmul``, which a single GPU can measure, for weights of exactly its size and layout and the
same number of rows of tiles.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from iris import files
from iris.errors import ArgumentError
from iris.ops.algorithms import LOCAL, OPS, algorithms
from iris.ops.config import FusedConfig
from iris.ops.hardware import hardware
from iris.ops.problem import DTYPES, Problem

SCHEMA = 1
SIMULATED = "simulated"
"""The name of the simulator's hardware: rows measured there count nowhere else."""
ENVIRONMENT_VARIABLE = "IRIS_TUNED"
SHIPPED = Path(__file__).parent / "tuned"
OWN_GAINS = 1.03
"""The factor that Iris's matmul, measured alone, must gain over the library's to be taken beside an exchange."""
REACH = 0.5
"""How far from its own shape a row counts, in powers of two: a factor of √2."""
_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
}
_ALIKE = {"fp16": "bf16"}
"""Dtypes whose rows count for each other: with the rows of bf16, 71 problems of fp16 took 3 % less time than without
rows, in the geometric mean (4 × H200, 2026-11-29)."""
DTYPE_NAMES = {_NAMES[dtype]: dtype for dtype in DTYPES}
"""Dtypes by their names in rows."""


@dataclass(frozen=True)
class Row:
    """One measured problem and the fastest config; the module's docstring describes the fields."""

    hardware: str
    world_size: int
    op: str
    gather_dim: int | None
    dtype: str
    m: int
    n: int
    k: int
    transposed_b: bool
    config: FusedConfig
    measured_ms: float
    predicted_ms: float | None = None
    untuned_ms: float | None = None
    library_ms: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
    unfinished: bool = False
    emulated: bool = False

    @property
    def kind(self) -> tuple[Any, ...]:
        """What the row has in common with every problem for which it can count, but for dtypes that are alike."""
        return self.hardware, self.world_size, self.op, self.gather_dim, self.dtype

    @property
    def key(self) -> tuple[Any, ...]:
        """What two rows for the same problem have in common."""
        return (*self.kind, *self.shape)

    @property
    def shape(self) -> tuple[int, int, int, bool]:
        """The local matmul that was measured."""
        return self.m, self.n, self.k, self.transposed_b

    @property
    def own(self) -> bool:
        """Whether the row says that Iris's own matmul of few rows is faster than the library's."""
        return self.config.own_matmul or self.config.algorithm == "one_shot"

    @property
    def beats_library(self) -> bool:
        """Whether the row says that Iris's matmul is faster than the library's by :data:`OWN_GAINS`, compared to a
        thousandth, since its times are rounded."""
        return self.library_ms is not None and round(self.library_ms / self.measured_ms, 3) >= OWN_GAINS

    def exact(self, problem: Problem) -> bool:
        """Whether exactly this shape was measured."""
        return self.shape == (problem.m, problem.n, problem.k, problem.transposed_b)

    def counts_for(self, problem: Problem) -> bool:
        """Whether the row counts for a problem of its kind, or for the local matmul of a problem of another op."""
        beside_another = self.op == LOCAL != problem.op
        if beside_another and self.block_rows(problem.m) != self.block_rows(self.m):
            return False
        if self.own or beside_another:
            return self.exact(replace(problem, m=self.m)) and self.m < 2 * problem.m <= 2 * self.m
        return max(self.distances(problem)) <= REACH

    def block_rows(self, m: int) -> int:
        """The number of rows of tiles in ``m`` rows."""
        return -(-m // self.config.block_size_m)

    def distances(self, problem: Problem) -> tuple[float, float, float]:
        """How far m, n and k of the problem are from the row's, in powers of two."""
        sizes = ((self.m, problem.m), (self.n, problem.n), (self.k, problem.k))
        first, second, third = (abs(math.log2(mine / asked)) for mine, asked in sizes)
        return first, second, third

    def as_json(self) -> dict[str, Any]:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        for name in ("library_ms", "unfinished", "emulated", "transposed_b"):
            if not values[name]:
                del values[name]  # so that earlier versions can read files without such rows
        return values | {"config": changed_fields(self.config), "versions": dict(self.versions)}


def changed_fields(config: FusedConfig) -> dict[str, Any]:
    """The fields of ``config`` that differ from their default, and the algorithm."""
    default = FusedConfig().__dict__
    return {name: value for name, value in config.__dict__.items() if name == "algorithm" or value != default[name]}


def row_kind(problem: Problem, device_name: str) -> tuple[Any, ...]:
    """The :attr:`Row.kind` of a row for ``problem`` on a device."""
    known = hardware(device_name)
    name = known.name if known is not None else device_name  # as in iris.ops.hardware, else PyTorch's
    return name, problem.world_size, problem.op, problem.gather_dim, _NAMES[problem.dtype]


def row_key(problem: Problem, device_name: str) -> tuple[Any, ...]:
    """The :attr:`Row.key` of a row for ``problem`` on a device."""
    return (*row_kind(problem, device_name), problem.m, problem.n, problem.k, problem.transposed_b)


class TunedRows:
    """Tuned rows, to look a problem up in."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._by_kind: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            kind = _alike(row.kind)
            for one in (kind, _local(kind)):
                self._by_kind.setdefault(one, []).append(row)

    def near(self, problem: Problem, device_name: str, *, local: bool = False) -> list[Row]:
        """The rows that count for ``problem``, the nearest first; among equals, first those of its dtype, then those of
        its layout of B. ``local``: those of any op and number of ranks, for choices that depend on the local matmul
        alone."""
        kind = _alike(row_kind(problem, device_name))
        if local:
            kind = _local(kind)
        found = [row for row in self._by_kind.get(kind, ()) if row.counts_for(problem)]

        def far(row: Row) -> tuple[float, bool, bool]:
            others = row.dtype != _NAMES[problem.dtype], row.transposed_b != problem.transposed_b
            return sum(one * one for one in row.distances(problem)), *others

        return sorted(found, key=far)


def _alike(kind: tuple[Any, ...]) -> tuple[Any, ...]:
    """``kind`` with one dtype for all that are alike."""
    return (*kind[:-1], _ALIKE.get(kind[-1], kind[-1]))


def _local(kind: tuple[Any, ...]) -> tuple[Any, ...]:
    """The part of a kind that matters for the local matmul alone."""
    return kind[0], kind[-1]


def user_path() -> Path | None:
    """The path of the user's file, whether it exists or not; None if the user has no home, or names ``/dev/null``."""
    return _path(os.environ.get(ENVIRONMENT_VARIABLE), os.environ.get("HOME"))


@lru_cache(maxsize=8)
def _path(named: str | None, home: str | None) -> Path | None:
    """:func:`user_path` for these values of the variables, remembered: finding a home takes longer than the rest of a
    pick."""
    if named:
        return None if named == os.devnull else Path(named)
    try:
        return Path.home() / ".cache" / "iris" / "tuned.json"
    except RuntimeError:
        return None


def misnamed() -> Path | None:
    """The file that the user names, if it does not exist: a mistake, unless the caller is about to write it."""
    path = user_path()
    return path if path is not None and os.environ.get(ENVIRONMENT_VARIABLE) and not path.exists() else None


@lru_cache(maxsize=8)
def user_rows(path: Path | None) -> TunedRows:
    """The rows in ``path``, read once per process; none if there is no such file.

    Raises:
        ArgumentError: the file is broken.
    """
    return TunedRows(read(path)) if path is not None else TunedRows()


@lru_cache(maxsize=1)
def shipped_rows() -> TunedRows:
    """The rows that come with Iris."""
    return TunedRows(row for path in sorted(SHIPPED.glob("*.json")) for row in read(path))


def forget() -> None:
    """Forget all rows, so that files are read again."""
    _path.cache_clear()
    user_rows.cache_clear()
    shipped_rows.cache_clear()


def read(path: Path) -> list[Row]:
    """The rows in ``path``; none if there is no such file, or it is empty.

    Raises:
        ArgumentError: the file cannot be read, or is no file of rows; the error names file, row and field.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # reading a device or a pipe may never end
        got = "a folder" if os.path.isdir(path) else "a pipe or device"
        raise ArgumentError("tuned rows", str(path), "a file", got, f"Have {ENVIRONMENT_VARIABLE} name a file.")
    try:
        written = path.read_bytes()  # UTF-8, whatever the locale
        content = json.loads(written) if written.strip() else {"schema": SCHEMA, "rows": []}
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _wrong(path, "a file that can be read", error.strerror) from error
    except (ValueError, RecursionError) as error:
        raise _refused(path, "JSON", files.no_json(error)) from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or not isinstance(content.get("rows"), list):
        raise _wrong(path, f'an object with "schema": {SCHEMA} and a list "rows"', content)
    return [_row(f"{path}, row {number}", one) for number, one in enumerate(content["rows"], 1)]


def write(path: Path, rows: Sequence[Row]) -> list[Row]:
    """Add ``rows`` to the file ``path``. A row replaces one for the same problem, unless it is unfinished and the old
    one is finished, or is as fast and of the same versions. The file is replaced whole, so that a reader sees either
    the old or the new one; other writers wait. A link stays a link, and the file keeps its mode. Returns the rows that
    the file then has for the problems of ``rows``.

    Raises:
        ArgumentError: the existing file is broken, or the file cannot be written.
    """
    folder = Path(os.path.realpath(path)).parent
    with write_errors("tuned rows", path):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            merged = _merged(read(path), rows)
            files.replace(path, _as_text(merged.values()))
    return [merged[row.key] for row in rows]


@contextmanager
def write_errors(program: str, path: Path) -> Iterator[None]:
    """Raise an error of the file system, met while a file of rows or one beside it is written, as an ArgumentError."""
    try:
        yield
    except OSError as error:
        fix = f"Have {ENVIRONMENT_VARIABLE} name another file."
        raise ArgumentError(program, str(path), "a file that can be written", error.strerror, fix) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process writes into ``folder``. (A lock on the file would not do, since it is replaced.)"""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _as_good(old: Row, row: Row) -> bool:
    """Whether the ``old`` row is at least as fast as ``row``, with the same versions."""
    return old.versions == row.versions and old.measured_ms <= row.measured_ms


def _merged(before: Sequence[Row], rows: Sequence[Row]) -> dict[tuple[Any, ...], Row]:
    """The rows of a file that has had ``before`` when ``rows`` have been added, by their keys."""
    kept: dict[tuple[Any, ...], Row] = {}
    for row in [*before, *rows]:
        old = kept.get(row.key)
        if old is None or not row.unfinished or (old.unfinished and not _as_good(old, row)):
            kept[row.key] = row
    return kept


def _as_text(rows: Iterable[Row]) -> str:
    ordered = sorted(rows, key=lambda row: [str(part).rjust(12) for part in row.key])
    lines = ",\n".join(json.dumps(row.as_json(), allow_nan=False) for row in ordered)
    return f'{{"schema": {SCHEMA}, "rows": [\n{lines}\n]}}\n'


_MAX_MS = 1e30
"""More than any call takes, and within the range of floats, which a whole number in JSON may exceed."""


def _positive(value: object) -> bool:
    return type(value) is int and 0 < value <= sys.maxsize


def is_time(value: object) -> bool:
    """Whether ``value`` may be a time in milliseconds."""
    return type(value) in (int, float) and 0 < value < _MAX_MS  # type: ignore[operator]


_COUNT = f"a positive whole number, at most {sys.maxsize}"
_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "hardware": ("the name of a device", lambda value: isinstance(value, str) and value != ""),
    "world_size": (_COUNT, _positive),
    "op": ("an op with algorithms", lambda value: isinstance(value, str) and value in OPS),
    "gather_dim": ("0, 1 or null", lambda value: value is None or (type(value) is int and value in (0, 1))),
    "dtype": (f"one of {', '.join(DTYPE_NAMES)}", lambda value: isinstance(value, str) and value in DTYPE_NAMES),
    "m": (_COUNT, _positive),
    "n": (_COUNT, _positive),
    "k": (_COUNT, _positive),
    "config": ("an object", lambda value: isinstance(value, dict)),
    "measured_ms": ("a positive number", is_time),
    "predicted_ms": ("a positive number or null", lambda value: value is None or is_time(value)),
    "untuned_ms": ("a positive number or null", lambda value: value is None or is_time(value)),
    "library_ms": ("a positive number or null", lambda value: value is None or is_time(value)),
    "versions": ("an object", lambda value: isinstance(value, dict)),
    "date": ("text", lambda value: isinstance(value, str)),
    **dict.fromkeys(
        ("unfinished", "emulated", "transposed_b"), ("true or false", lambda value: isinstance(value, bool))
    ),
}
"""For every field of a row, what is expected, and the test of a value."""
_MAY_LACK: dict[str, Any] = {
    "gather_dim": None, "predicted_ms": None, "untuned_ms": None, "library_ms": None, "versions": {}, "date": "",
    "unfinished": False, "emulated": False, "transposed_b": False,
}  # fmt: skip


def _row(where: str, content: object) -> Row:
    if not isinstance(content, dict):
        raise _wrong(where, "an object", content)
    for name in content:
        if name not in _RULES:
            raise _wrong(f"{where}, {name}", f"no other fields than {', '.join(_RULES)}", content[name])
    whole = {**_MAY_LACK, **content}
    for name, (expected, right) in _RULES.items():
        if name not in whole or not right(whole[name]):
            raise _wrong(f"{where}, {name}", expected, whole[name] if name in whole else "nothing")
    if whole["library_ms"] is not None and whole["op"] != LOCAL:
        raise _wrong(f"{where}, library_ms", f"a time in rows of {LOCAL} only", whole["library_ms"])
    config = config_of(f"{where}, config", whole["op"], whole["config"], DTYPE_NAMES[whole["dtype"]])
    return Row(**{**whole, "config": config})


def config_of(where: str, op: str, content: Mapping[str, Any], dtype: torch.dtype | None = None) -> FusedConfig:
    """The config of ``op``, for ``dtype``, with ``content`` as its :func:`changed_fields`. ``where``: the place that
    ``content`` comes from, for errors.

    Raises:
        ArgumentError: a field does not exist, or cannot have its value.
    """
    default = FusedConfig()
    for name, value in content.items():
        if name not in default.__dict__:
            raise _wrong(f"{where}, {name}", f"one of {', '.join(default.__dict__)}", value)
        usual = default.__dict__[name]
        kinds = {type(None): (int, type(None)), float: (float, int)}.get(type(usual), (type(usual),))
        if type(value) not in kinds:
            kind = "int or null" if usual is None else type(usual).__name__
            raise _wrong(f"{where}, {name}", kind, value)
    config = FusedConfig(**content)
    try:
        config.check(op, algorithms(op), sys.maxsize, dtype)
    except ArgumentError as error:
        place = f"{where}, {error.argument.removeprefix('config.')}"
        raise _refused(place, error.expected, str(error.got)) from error
    return config


def _wrong(where: Path | str, expected: str, got: object) -> ArgumentError:
    return _refused(where, expected, got if isinstance(got, str) and got == "nothing" else repr(got))


def _refused(where: Path | str, expected: str, text: str) -> ArgumentError:
    fix = f"Have {ENVIRONMENT_VARIABLE} name another file, or delete this one if it is a damaged file of tuned rows."
    return ArgumentError("tuned rows", str(where), expected, text if len(text) < 80 else f"{text[:79]}…", fix)
