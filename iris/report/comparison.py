"""Two sets of results beside each other: what got faster or slower beyond noise, what is new, what is gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from iris.report.records import Result, newest
from iris.report.study import describe, time_of

REGRESSIONS = ("slower", "broken")
_HEADINGS = ("", "op", "ranks", "parameters", "hardware", "before ms", "after ms", "change")
_ORDER = ("broken", "slower", "faster", "mended", "new", "gone")


@dataclass(frozen=True)
class Change:
    """One case in both sets, or in one of them.

    ``kind`` is ``slower``, ``faster``, ``same``, ``new``, ``gone``, ``broken`` (had a time, has none),
    ``mended`` (the reverse) or ``untimed`` (never had one).
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
    def ratio(self) -> float | None:
        """The time after over the time before."""
        if self.before is None or self.after is None or self.before.time is None or self.after.time is None:
            return None
        return time_of(self.after) / time_of(self.before)


def compare(before: Sequence[Result], after: Sequence[Result], threshold_percent: float) -> list[Change]:
    """The change of every case in ``before`` or ``after``.

    Times differ if their p10 to p90 ranges do not overlap and their medians differ by more than ``threshold_percent``.
    """
    old, new = newest(before), newest(after)
    pairs = [(old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new])]
    return [Change(_kind(one, other, threshold_percent), one, other) for one, other in pairs]


def _kind(before: Result | None, after: Result | None, threshold_percent: float) -> str:
    if before is None:
        return "new"
    if after is None:
        return "gone"
    if before.time is None or after.time is None:
        return "broken" if before.time else "mended" if after.time else "untimed"
    ratio = after.time.median / before.time.median
    if after.time.p10 > before.time.p90 and 100 * (ratio - 1) > threshold_percent:
        return "slower"
    if after.time.p90 < before.time.p10 and 100 * (1 - ratio) > threshold_percent:
        return "faster"
    return "same"


def show(changes: Sequence[Change], before: Sequence[Result], after: Sequence[Result]) -> None:
    """Print what changed, the worst first: as a table if rich is installed, else as aligned text."""
    print(f"before: {_origin(before)}\nafter:  {_origin(after)}\n")
    changed = sorted((change for change in changes if change.kind in _ORDER), key=_badness)
    if changed:
        _print_table([_row(change) for change in changed])
    kinds = [change.kind for change in changes]
    counts = [f"{kinds.count(kind)} {kind}" for kind in (*_ORDER, "untimed") if kind in kinds]
    print(", ".join([*counts, f"{kinds.count('same')} the same within noise"]))


def _badness(change: Change) -> tuple[int, float]:
    ratio = change.ratio
    return _ORDER.index(change.kind), 0.0 if ratio is None else -max(ratio, 1 / ratio)


def _origin(results: Sequence[Result]) -> str:
    """When, where and with which versions a set was measured."""
    names = ("hardware", "iris", "commit", "torch", "triton", "cuda", "nccl")
    told = []
    for name in names:
        values = sorted({result.environment[name] for result in results if name in result.environment})
        told += [f"{'' if name == 'hardware' else f'{name} '}{' and '.join(values)}"] if values else []
    dates = sorted({result.date[:10] for result in results})
    return ", ".join([*told, dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"])


def _row(change: Change) -> list[str]:
    result, ratio = change.result, change.ratio
    percent = "" if ratio is None else f"{100 * (ratio - 1):+.1f} %"
    times = [_time(change.before), _time(change.after)]
    return [change.kind, result.case, str(result.world_size), describe(result.params), result.hardware, *times, percent]


def _time(result: Result | None) -> str:
    if result is None:
        return ""
    return (result.failure or "") if result.time is None else f"{result.time.median:.3f}"


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        lines = [_HEADINGS, *rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())
        print()
        return
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 200)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in _HEADINGS:
        numeric = heading in ("ranks", "before ms", "after ms", "change")
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    styles = {"broken": "bold red", "slower": "red", "faster": "green", "mended": "green"}
    for row in rows:
        table.add_row(Text(row[0], style=styles.get(row[0], "")), *map(Text, row[1:]))
    console.print(table)
