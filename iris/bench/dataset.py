"""Data sets: files of matmul shapes, for ``iris bench CASE --dataset FILE``.

A data set is a JSON list of entries, or an object with the fields

* ``entries``: the list;
* ``description``: what it is, for people;
* ``models``: names of models, each with the source of its figures;
* ``m``, ``world_sizes``: defaults for entries that have none of their own.

An entry is an object with the fields

* ``m``, ``n``, ``k``: sizes of the whole problem, over all ranks: A is [m, k], B is [k, n]. ``m`` may be a list;
* ``op``: the op, or a list of ops, that the shape is for; without it, every op;
* ``world_sizes``: the numbers of ranks that it is meant for; without it, any;
* ``dtype``, ``gather_dim``: if the entry is for one dtype, or one ``gather_dim``, only;
* ``model`` (one of ``models``, if the data set has that field), ``layer``: kept with the results;
* ``source``, ``note``: where the sizes come from, for people.

In results ``shape`` is the whole problem, and ``m``, ``n``, ``k`` are the sizes of the local matmul.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from iris import files
from iris.bench.axes import Params, Value
from iris.bench.case import registered
from iris.bench.options import DTYPES
from iris.errors import ArgumentError
from iris.ops.algorithms import OPS

_ALIKE = 0.8
"""How similar a name must be to that of an op to count as a misspelling of it."""
_TEXTS = ("model", "layer", "source", "note", "dtype")
_ENTRY = {"m", "n", "k", "op", "world_sizes", "gather_dim", *_TEXTS}
_DATASET = {"entries", "description", "models", "m", "world_sizes"}


@dataclass(frozen=True)
class Entry:
    """One entry; ``labels`` are the parameters that its points have in addition to M, N and K."""

    m: tuple[int, ...]
    n: int
    k: int
    ops: tuple[str, ...] = ()
    world_sizes: tuple[int, ...] = ()
    labels: Params = field(default_factory=dict)

    def meant_for(self, op: str, world_size: int) -> bool:
        return (not self.ops or op in self.ops) and (not self.world_sizes or world_size in self.world_sizes)


@dataclass(frozen=True)
class Dataset:
    """A file's entries."""

    path: Path
    entries: tuple[Entry, ...]

    @classmethod
    def read(cls, path: Path) -> Dataset:
        """The data set in ``path``.

        Raises:
            ArgumentError: there is no such file, or it is no data set; the text names file, entry and field.
        """
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise ArgumentError("dataset", str(path), "a file that can be read", error.strerror) from error
        except (ValueError, RecursionError) as error:
            raise ArgumentError("dataset", str(path), "JSON", files.no_json(error)) from error
        whole = _Fields(path, "", {"entries": content} if isinstance(content, list) else content, _DATASET)
        models = whole.get("models")
        if models is not None and not isinstance(models, dict):
            raise whole.wrong("models", "an object: the source of each model's figures", models)
        items = whole.get("entries")
        if not isinstance(items, list) or not items:
            raise whole.wrong("entries", "a list of at least one entry", items)
        entries = [_entry(_Fields(path, f"entry {n}", item, _ENTRY), whole) for n, item in enumerate(items, 1)]
        return cls(path, tuple(entries))

    def has(self, op: str, world_size: int) -> bool:
        """Whether there is an entry for ``op`` on ``world_size`` ranks."""
        return any(entry.meant_for(op, world_size) for entry in self.entries)

    def shapes(self, op: str, world_size: int) -> list[Params]:
        """M, N, K and the labels of each entry for a case of ``op`` on ``world_size`` ranks.

        Raises:
            ArgumentError: there is none.
        """
        found: list[Params] = [
            {**entry.labels, "M": m, "N": entry.n, "K": entry.k}
            for entry in self.entries
            if entry.meant_for(op, world_size)
            for m in entry.m
        ]
        if not found:
            has = sorted({f"{one} at {sizes or 'any'} ranks" for one, sizes in map(_meaning, self.entries)})
            expected = f"an entry for {op} at {world_size} ranks"
            raise ArgumentError("dataset", str(self.path), expected, f"entries for {'; '.join(has)}")
        return found


def _meaning(entry: Entry) -> tuple[str, str]:
    return "/".join(entry.ops) or "any op", ", ".join(map(str, entry.world_sizes))


def _entry(fields: _Fields, whole: _Fields) -> Entry:
    m = fields.sizes("m") if "m" in fields.fields or "m" not in whole.fields else whole.sizes("m")
    worlds = fields if "world_sizes" in fields.fields else whole
    ops = fields.get("op", [])
    ops = [ops] if isinstance(ops, str) else ops
    if not isinstance(ops, list) or not all(isinstance(op, str) for op in ops) or ("op" in fields.fields and not ops):
        raise fields.wrong("op", "the name of an op, or a list of names", ops)
    cases = registered()  # includes the user's own; empty if no cases are loaded
    for op in ops:
        if op in OPS or op in cases:
            continue
        if meant := difflib.get_close_matches(op, OPS, 1, _ALIKE):
            raise fields.wrong("op", f"{meant[0]}?", op)
        if cases:
            raise fields.wrong("op", f"one of {', '.join(sorted({*OPS, *cases}))}", op)
    for name in _TEXTS:
        if not isinstance(fields.get(name, ""), str):
            raise fields.wrong(name, "text", fields.get(name))
    if fields.get("dtype", "bf16") not in DTYPES:
        raise fields.wrong("dtype", f"one of {', '.join(DTYPES)}", fields.get("dtype"))
    if fields.get("gather_dim", 0) not in (0, 1) or type(fields.get("gather_dim", 0)) is not int:
        raise fields.wrong("gather_dim", "0 or 1", fields.get("gather_dim"))
    models = whole.get("models")
    if models is not None and "model" in fields.fields and fields.get("model") not in models:
        raise fields.wrong("model", f"one of {', '.join(models)}", fields.get("model"))
    labels: dict[str, Value] = {
        name: fields.get(name) for name in ("model", "layer", "dtype", "gather_dim") if name in fields.fields
    }
    world_sizes = worlds.sizes("world_sizes") if "world_sizes" in worlds.fields else ()
    return Entry(m, fields.size("n"), fields.size("k"), tuple(ops), world_sizes, labels)


@dataclass(frozen=True)
class _Fields:
    """The fields of one object of a data set."""

    path: Path
    where: str
    fields: Mapping[str, Any]
    allowed: set[str]

    def __post_init__(self) -> None:
        if not isinstance(self.fields, dict):
            raise ArgumentError("dataset", f"{self.path}, {self.where or 'top level'}", "an object", repr(self.fields))
        for name in self.fields:
            if name not in self.allowed:
                raise self.wrong(name, f"no other fields than {', '.join(sorted(self.allowed))}", self.fields[name])

    def wrong(self, name: str, expected: str, got: object) -> ArgumentError:
        place = ", ".join(part for part in (str(self.path), self.where, f"field {name!r}") if part)
        return ArgumentError("dataset", place, expected, "nothing" if got is None else repr(got))

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)

    def size(self, name: str) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(name, "a positive whole number", value)
        return value

    def sizes(self, name: str) -> tuple[int, ...]:
        """A size, or a list of at least one."""
        value = self.get(name)
        values = value if isinstance(value, list) else [value]
        for one in values or [None]:
            if isinstance(one, bool) or not isinstance(one, int) or one < 1:
                raise self.wrong(name, "a positive whole number, or a list of them", value)
        return tuple(values)
