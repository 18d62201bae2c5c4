"""Axes of a case: the values that its parameters take, given in code or on the command line."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from iris.errors import ArgumentError

Value = str | int | float
Params = dict[str, Value]
Function = TypeVar("Function", bound=Callable[..., object])

FORMS = "pow2:LO:HI, linear:START:STOP:STEP, or values with commas between them"
MAX_VALUES = 100_000
"""The most values of an axis, and points of a case: nobody measures more."""
_ATTRIBUTE = "_bench_axes"


@dataclass(frozen=True)
class Axis:
    """One parameter, or several that change together, and their values.

    Attributes:
        names: the parameters.
        rows: for each point, a value for each name.
        variant: whether the values are ways of doing the same thing, which are timed in turns.
        closed: whether there are no other values.
        also: further values that the command line may name.
        extended: if the command line may add something to a word, after a ``+``: a function of the word and the
            addition that raises an error if the two do not go together.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    variant: bool = False
    closed: bool = False
    also: tuple[Value, ...] = ()
    extended: Callable[[str, str], object] | None = None

    def known(self, value: Value) -> Value:
        """The part of a value on the command line that must be one of the axis: if extended, what precedes ``+``."""
        return value.partition("+")[0] if self.extended and isinstance(value, str) else value

    def check(self, value: Value) -> None:
        """Refuse a value on the command line if the case says that its addition is wrong."""
        if self.extended and isinstance(value, str) and "+" in value:
            word, _, added = value.partition("+")
            self.extended(word, added)

    def overridden(self, overrides: Mapping[str, Sequence[Value]]) -> Axis:
        """The axis with the values that ``overrides`` has for its names; no point occurs twice."""
        given = {name: overrides[name] for name in self.names if name in overrides}
        rows: dict[tuple[Value, ...], None] = {}
        for row in self.rows:
            choices = [given.get(name, [value]) for name, value in zip(self.names, row, strict=True)]
            _check_count(",".join(self.names), math.prod(map(len, choices)))
            rows |= dict.fromkeys(itertools.product(*choices))
        return replace(self, rows=tuple(rows))

    def values_of(self, name: str) -> list[Value]:
        """The values of one of the names, point by point."""
        place = self.names.index(name)
        return [row[place] for row in self.rows]


def axis(
    name: str,
    values: Iterable[object],
    *,
    variant: bool = False,
    closed: bool = False,
    also: Iterable[Value] = (),
    extended: Callable[[str, str], object] | None = None,
) -> Callable[[Function], Function]:
    """A parameter of a case and its values; a decorator.

    Args:
        name: the parameter's name, or several with commas between them, e.g. ``"M,N,K"``; then each value is a tuple.
        values: words, numbers, True or False, in the order in which they are measured; the axis written first changes
            slowest. If none is a number, the command line can name no other values (except any dtype on an axis
            ``dtype``); if all are whole numbers, it can name other whole numbers.
        variant: the values are ways of doing the same thing. They are timed in turns, A B C A B C …, so that drifting
            clocks favour none of them. They may share data: see :meth:`iris.bench.State.share`.
        closed: the command line can name no other values, even if they are numbers.
        also: words that the command line can name in addition to ``values``.
        extended: if the command line can add something that the case interprets to a word, after a ``+``:
            ``push+num_sms=64``. A function of the word and the addition, which is called before anything runs and may
            raise an ``ArgumentError``.
    """
    names = tuple(part.strip() for part in name.split(","))
    if isinstance(values, str):
        raise ArgumentError("bench.axis", name, "several values, such as a tuple", repr(values), "One is (value,).")
    if "num_ranks" in names:
        raise ArgumentError(
            "bench.axis", name, "another name", "num_ranks", "Choose it by --num_ranks N, a run for each."
        )
    rows: tuple[tuple[Any, ...], ...] = tuple(value if isinstance(value, tuple) else (value,) for value in values)
    if not rows or any(len(row) != len(names) for row in rows):
        raise ArgumentError("bench.axis", name, f"values, each with {len(names)} parts", list(rows))
    for value in itertools.chain(*rows):
        require_value("bench.axis", name, value)

    def add(fn: Function) -> Function:
        if again := set(names) & {one for each in axes_of(fn) for one in each.names}:
            raise ArgumentError("bench.axis", name, "a name that no other axis has", ", ".join(sorted(again)))
        setattr(fn, _ATTRIBUTE, [Axis(names, rows, variant, closed, tuple(also), extended), *axes_of(fn)])
        return fn

    return add


def require_value(function: str, name: str, value: object) -> None:
    """Raise ArgumentError if no parameter can have ``value``."""
    if not isinstance(value, Value) or (isinstance(value, float) and not math.isfinite(value)):
        fix = "Let the case look up what they stand for, as dtypes in bench.DTYPES."
        raise ArgumentError(function, name, "words or finite numbers, which a record can hold", repr(value), fix)


def linear(name: str, start: int, stop: int, step: int) -> Callable[[Function], Function]:
    """An axis with the values ``start``, ``start + step``, … up to and including ``stop``, if a step ends there."""
    return axis(name, _linear(name, start, stop, step))


def pow2(name: str, lo: int, hi: int) -> Callable[[Function], Function]:
    """An axis with the values 2**lo, 2**(lo + 1), … 2**hi."""
    return axis(name, _pow2(name, lo, hi))


def axes_of(fn: Callable[..., object]) -> list[Axis]:
    """The axes that decorators have given ``fn``, in the order of the source."""
    return list(getattr(fn, _ATTRIBUTE, ()))


def parse_values(name: str, text: str, words: Collection[Value] = ()) -> list[Value]:
    """The values that ``--axis_<name>=<text>`` stands for; see FORMS. Whole numbers become int, other numbers float,
    True and False bool, except that ``words`` stay text.

    Raises:
        ArgumentError: ``text`` has none of the forms.
    """
    option, (kind, *rest) = f"--axis_{name}", text.split(":")
    try:
        if kind == "pow2":
            lo, hi = map(int, rest)
            return list(_pow2(option, lo, hi))
        if kind == "linear":
            start, stop, step = map(int, rest)
            return list(_linear(option, start, stop, step))
    except ValueError as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError("bench", option, FORMS, repr(text)) from error
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ArgumentError("bench", option, FORMS, repr(text))
    return [part if part in words else _number_or_text(part) for part in parts]


def expand(axes: Sequence[Axis], overrides: Mapping[str, Sequence[Value]]) -> list[Params]:
    """All points of ``axes``, the last axis changing fastest."""
    taken = [one.overridden(overrides).rows for one in axes]
    _check_count("axes", math.prod(map(len, taken)))
    rows = itertools.product(*taken)
    names = [name for one in axes for name in one.names]
    return [dict(zip(names, itertools.chain.from_iterable(row), strict=True)) for row in rows]


def _pow2(name: str, lo: int, hi: int) -> Sequence[int]:
    if not 0 <= lo <= hi <= 62:
        raise ArgumentError("bench", name, "pow2:LO:HI with 0 <= LO <= HI <= 62, exponents of two", f"{lo}:{hi}")
    return [1 << exponent for exponent in range(lo, hi + 1)]


def _linear(name: str, start: int, stop: int, step: int) -> Sequence[int]:
    if step < 1 or stop < start:
        expected = "linear:START:STOP:STEP with START <= STOP and STEP >= 1"
        raise ArgumentError("bench", name, expected, f"{start}:{stop}:{step}")
    _check_count(name, (stop - start) // step + 1)
    return range(start, stop + 1, step)


def _check_count(name: str, count: int) -> None:
    if count > MAX_VALUES:
        raise ArgumentError("bench", name, f"at most {MAX_VALUES} values or points", count)


def _number_or_text(text: str) -> Value:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
