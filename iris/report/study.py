"""Results grouped by problem: what was computed where, by which algorithms, and how these compare."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from iris.results import COMPARATORS, MATMUL, MAX_NUMBER, Result, Value, newest

Shape = tuple[int, int, int]
T = TypeVar("T")
K = TypeVar("K")

_SHAPE = re.compile(r"(\d{1,15})[x×](\d{1,15})[x×](\d{1,15})")
_NAMES = ("model", "layer")
_EXTENTS = ("m", "n", "k", "shape")
SWEEP = 4
"""The number of values of M from which problems are a sweep."""


@dataclass(frozen=True, order=True)
class Section:
    """Results that may be shown in one chart: of GPUs of one kind, or of simulated ranks."""

    simulated: bool
    hardware: str

    @property
    def title(self) -> str:
        if not self.simulated:
            return self.hardware
        return "Simulated ranks" if self.hardware == "simulated" else f"Simulated ranks ({self.hardware})"


@dataclass(frozen=True)
class Problem:
    """One piece of work, and its results by algorithm.

    ``shape`` is the global M, N, K if the results have it; ``setting`` names the other parameters of the problem.
    """

    section: Section
    case: str
    world_size: int
    shape: Shape | None
    label: str
    setting: str
    names: str
    results: Mapping[str, Result]

    @property
    def kind(self) -> str:
        """The case; and of L2, if calls found it cold, as speed-ups with a warm one say nothing about that."""
        cold = any(result.params.get("l2") == "cold" for result in self.results.values())
        return f"{self.case}, l2 cold" if cold else self.case

    @property
    def timed(self) -> dict[str, Result]:
        return {algorithm: result for algorithm, result in self.results.items() if result.time is not None}

    @property
    def complete(self) -> dict[str, Result]:
        """The timed results of the algorithms that do the whole work."""
        return {name: result for name, result in self.timed.items() if name != MATMUL or self.case == MATMUL}

    @property
    def floor_ms(self) -> float | None:
        """The floor of the whole work; the matmul alone has another."""
        return next((result.floor_ms for result in self.complete.values() if result.floor_ms is not None), None)

    @property
    def best_ms(self) -> float | None:
        """The shortest time of several ``complete`` results; None for simulated ranks, whose times do not compare."""
        times = [time_of(result) for result in self.complete.values()]
        return min(times) if len(times) > 1 and not self.section.simulated else None

    @property
    def representative(self) -> Result | None:
        """The result that stands for Iris: that of ``auto``, or if that was not measured, of Iris's fastest."""
        ours = {algorithm: time_of(result) for algorithm, result in self.timed.items() if algorithm not in COMPARATORS}
        if "auto" in self.results:
            return self.results["auto"] if "auto" in ours else None
        return self.results[min(ours, key=lambda algorithm: ours[algorithm])] if ours else None


@dataclass(frozen=True)
class Mean:
    """The geometric mean of speed-ups, over ``count`` problems of ``of`` that were measured; how many are ``faster``
    and ``slower``; and the worst."""

    speedup: float
    count: int
    of: int
    faster: int
    slower: int
    worst: float


class Study:
    """The results, only the newest of each case, and their problems."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = list(newest(results).values())
        self.replaced = len(results) - len(self.results)
        self._opponents = {
            (result.file, result.batch, result.key): result
            for result in results
            if result.algorithm in COMPARATORS and result.time
        }

    def speedup(self, result: Result, opponent: str) -> float | None:
        """How many times as fast ``result`` is as ``opponent``, if they were timed in turns: in the same file and
        batch.

        In the case ``matmul``, which has no communication, PyTorch's opponent is torch.matmul. Simulated ranks have no
        speed-up.
        """
        if result.simulated:
            return None
        rival = MATMUL if result.case == MATMUL and opponent == "torch_symm_mem" else opponent
        if result.time is None or result.algorithm in (rival, MATMUL) or "algorithm" not in result.params:
            return None
        key = result.key_of({**result.params, "algorithm": rival})
        other = self._opponents.get((result.file, result.batch, key))
        return None if other is None else time_of(other) / time_of(result)

    @cached_property
    def sections(self) -> list[Section]:
        return sorted({section_of(result) for result in self.results})

    @cached_property
    def problems(self) -> list[Problem]:
        """The problems by section and case, from few ranks to many; those that differ only in M are adjacent."""
        groups = grouped(self.results, lambda result: result.key_of(result.of_problem))
        return sorted(map(_problem, groups.values()), key=_order)

    def of(self, section: Section, case: str) -> list[Problem]:
        return [problem for problem in self.problems if (problem.section, problem.case) == (section, case)]

    @cached_property
    def sweeps(self) -> list[list[Problem]]:
        """Groups of problems that differ only in M and were timed at ``SWEEP`` or more values of M, sorted by M."""
        shaped = [problem for problem in self.problems if problem.shape is not None and problem.timed]
        groups = grouped(
            shaped, lambda p: (p.section, p.case, p.world_size, p.setting, p.names, p.shape and p.shape[1:])
        )
        sorts = [sorted(group, key=_rows) for group in groups.values()]
        return [group for group in sorts if len({_rows(problem) for problem in group}) >= SWEEP]

    @cached_property
    def outstanding(self) -> list[Problem]:
        """The problems that are in no sweep, and the largest of each sweep."""
        swept = {id(problem) for sweep in self.sweeps for problem in sweep[:-1]}
        return [problem for problem in self.problems if id(problem) not in swept]

    @cached_property
    def scalings(self) -> list[list[Problem]]:
        """Groups of the same problem on different numbers of ranks, sorted by that number."""
        groups = grouped(
            (problem for problem in self.outstanding if problem.timed),
            lambda p: (p.section, p.case, p.setting, p.names, p.label),
        )
        return [group for group in groups.values() if len({problem.world_size for problem in group}) > 1]

    def means(self, results: Sequence[Result], opponent: str) -> Mean | None:
        """The geometric mean of the speed-ups of ``results`` over ``opponent``; None if none has a speed-up."""
        found = [self.speedup(result, opponent) for result in results]
        ratios = [ratio for ratio in found if ratio is not None]
        if not ratios:
            return None
        verdicts = list(map(verdict, ratios))
        return Mean(
            math.exp(math.fsum(map(math.log, ratios)) / len(ratios)),
            len(ratios),
            len(results),
            verdicts.count("faster"),
            verdicts.count("slower"),
            min(ratios),
        )


def time_of(result: Result) -> float:
    """The median in milliseconds of a result with a time."""
    assert result.time is not None
    return result.time.median


def in_words(ms: float) -> str:
    """Milliseconds with three decimals; short times with three significant digits."""
    return f"{ms:.{max(3, 2 - math.floor(math.log10(ms)))}f}" if ms > 0 else f"{ms:.3f}"


def verdict(speedup: float) -> str:
    """``faster``, ``slower`` or ``even``, by the speed-up rounded to two decimals."""
    shown = round(speedup, 2)
    return "faster" if shown > 1 else "slower" if shown < 1 else "even"


def section_of(result: Result) -> Section:
    return Section(result.simulated, result.hardware)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by key; keys and items stay in the order in which they come."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def describe(params: Mapping[str, Value]) -> str:
    """Parameters in words: ``bf16, gather_dim 0``."""
    return ", ".join(str(value) if name == "dtype" else f"{name} {value}" for name, value in params.items())


def _problem(results: Sequence[Result]) -> Problem:
    first = results[0]
    params = first.of_problem
    shape = _shape(params)
    left_out = (*(_EXTENTS if shape else ("shape",)), *_NAMES)
    setting = describe({name: value for name, value in params.items() if name not in left_out})
    given = params.get("shape")
    label = "×".join(map(str, shape)) if shape else str(given) if given is not None else setting or first.case
    return Problem(
        section_of(first),
        first.case,
        first.world_size,
        shape,
        label,
        setting if setting != label else "",
        " ".join(str(params[name]) for name in _NAMES if params.get(name) is not None),
        {result.algorithm: result for result in results},
    )


def _shape(params: Mapping[str, Value]) -> Shape | None:
    given = params.get("shape")
    if given is not None:
        match = _SHAPE.fullmatch(str(given))
        m, n, k = map(int, match.groups()) if match else (0, 0, 0)
    else:
        m, n, k = (value if type(value) is int else 0 for value in map(params.get, ("m", "n", "k")))
    return (m, n, k) if all(0 < extent <= MAX_NUMBER for extent in (m, n, k)) else None


def period(results: Iterable[Result]) -> str:
    """The day on which ``results`` were measured, or the first and the last."""
    dates = sorted({result.date[:10] for result in results})
    return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def _rows(problem: Problem) -> int:
    return problem.shape[0] if problem.shape else 0


def _order(problem: Problem) -> tuple[object, ...]:
    m, n, k = problem.shape or (0, 0, 0)
    label = [int(part) if part.isdecimal() else part for part in re.split(r"(\d{1,15})", problem.label)]
    return problem.section, problem.case, problem.world_size, problem.setting, problem.names, n, k, m, label
