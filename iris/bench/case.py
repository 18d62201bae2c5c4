"""Cases: functions ``fn(state, ctx)`` that set something up and say what is to be timed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from iris.bench.axes import Axis, Params, Value, axes_of, expand, require_value
from iris.bench.state import State
from iris.context import Iris
from iris.errors import ArgumentError

CaseFunction = Callable[[State, Iris], None]
Localize = Callable[[Params, int], Params]
Show = Callable[[Sequence[Mapping[str, Any]]], None]

SHAPE_AXIS = ("M", "N", "K")
"""The axis whose points a data set replaces."""


@dataclass(frozen=True)
class Case:
    """A registered function.

    Attributes:
        name: its name on the command line and in records.
        fn: the function, which runs on every rank for every point.
        localize: turns a point's parameters into those for a given number of ranks; None leaves them unchanged.
        show: prints more about the case's records, below the table.
    """

    name: str
    fn: CaseFunction
    localize: Localize | None = None
    show: Show | None = None

    @property
    def axes(self) -> list[Axis]:
        return axes_of(self.fn)

    @property
    def about(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.fn) or "").partition("\n")[0]

    @property
    def variant_names(self) -> set[str]:
        return {name for axis in self.axes if axis.variant for name in axis.names}

    @property
    def takes_shapes(self) -> bool:
        """Whether a data set's shapes can be its points."""
        return any(axis.names == SHAPE_AXIS for axis in self.axes)

    def points(
        self, overrides: Mapping[str, Sequence[Value]], shapes: Sequence[Params] | None, world_size: int
    ) -> list[Params]:
        """The parameters of all points, in the form that State and records have.

        Args:
            overrides: values for some axes, which replace the case's own and those of a data set.
            shapes: points of a data set, with M, N, K and labels; names that are axes replace the values of these axes.
            world_size: the number of ranks.
        """
        points: dict[tuple[tuple[str, Value], ...], Params] = {}
        for shape in shapes if shapes is not None else [{}]:
            given = {name: [value] for name, value in shape.items()} | dict(overrides)
            labels = {name: value for name, value in shape.items() if not any(name in one.names for one in self.axes)}
            for point in expand(self.axes, given):
                whole = {**labels, **point}
                points[tuple(sorted(whole.items()))] = whole
        found = points.values()
        if self.localize is None:
            return list(found)
        localized = [self.localize(point, world_size) for point in found]
        for name, value in (item for point in localized for item in point.items()):
            require_value("bench.register", f"localize: {name}", value)
        return localized


_cases: dict[str, Case] = {}


@overload
def register(fn: CaseFunction) -> CaseFunction: ...
@overload
def register(
    *, localize: Localize | None = None, show: Show | None = None
) -> Callable[[CaseFunction], CaseFunction]: ...
def register(
    fn: CaseFunction | None = None, *, localize: Localize | None = None, show: Show | None = None
) -> CaseFunction | Callable[[CaseFunction], CaseFunction]:
    """Make ``fn(state, ctx)`` a case that ``iris bench`` can run; a decorator, with or without arguments.

    The function must be defined at the top level of a module or script: ranks import it by name. The case gets the
    function's name.

    Args:
        fn: the function.
        localize: takes a point's parameters and the number of ranks, and returns the parameters to use and record.
        show: prints more about the case's records, below the table.
    """
    if fn is None:
        return lambda late: _add(late, localize, show)
    return _add(fn, localize, show)


def _add(fn: CaseFunction, localize: Localize | None, show: Show | None) -> CaseFunction:
    name = fn.__name__
    known = _cases.get(name)
    if known is not None and _place(known.fn) != _place(fn):
        one, other = (":".join(map(str, _place(each))) for each in (known.fn, fn))
        raise ArgumentError("bench.register", name, "a name that one case has", f"one in {one}, one in {other}")
    _cases[name] = Case(name, fn, localize, show)
    return fn


def _place(fn: CaseFunction) -> tuple[str, int]:
    """Where ``fn`` is defined. A script that ranks import is executed twice, with its cases in the same place."""
    return inspect.getfile(fn), inspect.unwrap(fn).__code__.co_firstlineno


def registered() -> dict[str, Case]:
    """All cases, by name."""
    return dict(_cases)
