"""Comparison of two sets of results: what got faster or slower beyond noise, what is new, what is gone."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from iris.console import counted, print_table
from iris.errors import ArgumentError
from iris.report.study import describe, in_words, period, time_of
from iris.results import COMPARATORS, OPPONENTS, Result, newest, without_sizes

REGRESSIONS = ("slower", "broken", "gone")
MIN_CALLS = 3
"""With fewer calls the noise is unknown."""
_HALF = 0.5
_HEADINGS = ("", "op", "ranks", "parameters", "hardware", "before ms", "after ms", "change", *OPPONENTS, "why")
_NUMERIC = (2, *range(5, len(_HEADINGS) - 1))
_STYLES = {"broken": "bold red", "slower": "red", "faster": "green", "mended": "green"}
_ALONE = ("new", "gone")
"""Kinds of changes of cases that only one of the sets has."""
_ORDER = ("broken", "slower", "faster", "mended", *_ALONE)


@dataclass(frozen=True)
class Change:
    """One case in both sets, or in one of them.

    ``kind`` is ``slower``, ``faster``, ``same``, ``new``, ``gone``, ``broken`` (had a time, and now has none),
    ``mended`` (the reverse), ``untimed`` (neither has one), ``unsure`` (timed too few times for a verdict) or
    ``simulated`` (its times mean nothing).
    """

    kind: str
    before: Result | None
    after: Result | None

    @property
    def result(self) -> Result:
        known = self.after or self.before
        assert known is not None
        return known

    @property
    def ours(self) -> bool:
        """Whether this is a case of Iris, not of a comparator."""
        return self.result.algorithm not in COMPARATORS

    @property
    def regression(self) -> bool:
        return self.ours and self.kind in REGRESSIONS

    @property
    def ratio(self) -> float | None:
        """The time after over the time before."""
        if self.before is None or self.after is None or self.before.time is None or self.after.time is None:
            return None
        return time_of(self.after) / time_of(self.before)


class Rivals:
    """How times of the opponents have changed: if theirs and ours changed alike, the machine is the likely cause."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self._ratios = {
            change.result.key: change.ratio
            for change in changes
            if change.result.algorithm in OPPONENTS and change.ratio and change.kind != "unsure"
        }

    def ratio(self, change: Change, rival: str) -> float | None:
        """The time after over the time before of ``rival`` on the same problem; None if the change is an opponent's."""
        params = change.result.params
        if "algorithm" not in params or change.result.algorithm in OPPONENTS:
            return None
        return self._ratios.get(change.result.key_of({**params, "algorithm": rival}))

    def as_much(self, change: Change, rival: str) -> bool:
        """Whether the time of ``rival`` has changed in the same direction, and at least half as much."""
        other = self.ratio(change, rival)
        if other is None or change.ratio is None or change.kind not in ("slower", "faster"):
            return False
        return math.log(other) / math.log(change.ratio) >= _HALF


def compare(before: Sequence[Result], after: Sequence[Result], threshold_percent: float) -> list[Change]:
    """The change of every case in ``before`` or ``after``.

    Times differ if their p10 to p90 ranges do not overlap and their medians differ by more than ``threshold_percent``.

    Raises:
        ArgumentError: the sets have no case in common.
    """
    old, new = newest(before), newest(after)
    if not old.keys() & new.keys():
        fix = "Cases are the same if op, parameters, ranks and hardware are."
        raise ArgumentError("report", "--compare", "a case that is in both sets", "none", fix)
    pairs = [(old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new])]
    return [Change(_kind(one, other, threshold_percent), one, other) for one, other in pairs]


def _kind(before: Result | None, after: Result | None, threshold_percent: float) -> str:
    if before is None:
        return "new"
    if after is None:
        return "gone"
    if before.time is None or after.time is None:
        return "broken" if before.time else "mended" if after.time else "untimed"
    if after.simulated:
        return "simulated"
    if any(time.calls is not None and time.calls < MIN_CALLS for time in (before.time, after.time)):
        return "unsure"
    ratio = after.time.median / before.time.median
    if after.time.p10 > before.time.p90 and 100 * (ratio - 1) > threshold_percent:
        return "slower"
    if after.time.p90 < before.time.p10 and 100 * (1 - ratio) > threshold_percent:
        return "faster"
    return "same"


def show(changes: Sequence[Change], before: Sequence[Result], after: Sequence[Result], each: bool = False) -> None:
    """Print the changes, the worst first, with the opponents' changes. Only the numbers of new and gone cases are
    printed, unless ``each`` is set."""
    names = ["hardware", "iris", "commit", "torch", "triton", "cuda", "nccl"]
    if _values(before, "variables") != _values(after, "variables"):
        names.append("variables")
    print(f"before: {_origin(before, names)}\nafter:  {_origin(after, names)}\n")
    changed = sorted((change for change in changes if change.kind in _ORDER), key=_badness)
    rivals = Rivals(changes)
    if changed:
        several = len({change.result.hardware for change in changed}) > 1
        rows = [_row(change, rivals, several) for change in changed if each or change.kind not in _ALONE]
        rows += [] if each else _counts(changed)
        print_table(_HEADINGS, rows, right=_NUMERIC, used=True, styles=_STYLES)
    for kind, rival in itertools.product(("slower", "faster"), OPPONENTS):
        mine = [one for one in changed if one.kind == kind and one.ours]
        moved = sum(rivals.as_much(one, rival) for one in mine)
        if moved:
            print(
                f"{moved} of {len(mine)} {kind}: so is {rival}, by half as much or more; the machine may have changed"
            )
    kinds = [change.kind for change in changes]
    counts = [f"{kinds.count(kind)} {kind}" for kind in (*_ORDER, "untimed") if kind in kinds]
    if "unsure" in kinds:
        counts.append(f"{kinds.count('unsure')} timed less than {MIN_CALLS} times")
    if "simulated" in kinds:
        counts.append(f"{kinds.count('simulated')} of simulated ranks, whose wall times tell nothing")
    print(", ".join([*counts, f"{kinds.count('same')} the same within noise"]))


def _badness(change: Change) -> tuple[int, float]:
    ratio = change.ratio
    return _ORDER.index(change.kind), 0.0 if ratio is None else -max(ratio, 1 / ratio)


def _values(results: Sequence[Result], name: str) -> list[str]:
    """The values that the environments of ``results`` have under ``name``."""
    return sorted({result.environment[name] for result in results if name in result.environment})


def _origin(results: Sequence[Result], names: Sequence[str]) -> str:
    """When, where and with which versions a set was measured."""
    told = []
    for name in names:
        values = _values(results, name)
        told += [f"{'' if name == 'hardware' else f'{name} '}{' and '.join(values)}"] if values else []
    return ", ".join([*told, period(results)])


def _row(change: Change, rivals: Rivals, with_hardware: bool) -> list[str]:
    result = change.result
    times = [_time(change.before), _time(change.after)]
    moved = [_percent(rivals.ratio(change, rival)) for rival in OPPONENTS]
    told = {name: result.params[name] for name in without_sizes(result.params)}
    where = [change.kind, result.case, str(result.world_size), describe(told)]
    failed = {"broken": change.after, "mended": change.before}.get(change.kind)
    why = failed.failure or "" if failed is not None else ""
    return [*where, result.hardware if with_hardware else "", *times, _percent(change.ratio), *moved, why]


def _counts(changed: Sequence[Change]) -> list[list[str]]:
    """For each op and number of ranks, how many cases are new, and how many are gone."""
    found = Counter((one.kind, one.result.case, one.result.world_size) for one in changed if one.kind in _ALONE)
    ordered = sorted(found.items(), key=lambda item: (_ALONE.index(item[0][0]), *item[0][1:]))
    blank = [""] * (len(_HEADINGS) - 4)
    return [[kind, case, str(size), counted(count, "case"), *blank] for (kind, case, size), count in ordered]


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


def _time(result: Result | None) -> str:
    """The median, or why there is none."""
    if result is None:
        return ""
    return result.outcome if result.time is None else in_words(result.time.median)
