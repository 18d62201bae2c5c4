"""Progress of a run, on stderr: a bar with the time left; without rich or a terminal, a line per step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from iris.console import console

Advance = Callable[[str, int], None]
"""Takes a description of what comes next, and the number of points just finished."""
_BAR_WIDTH = 20
"""With this width half of 80 columns are left for the description."""


def redrawn() -> bool:
    """Whether progress is a bar, whose description may change often, not lines."""
    try:
        return console(sys.stderr).is_terminal
    except ImportError:
        return False


@contextmanager
def progress(total: int, first: str = "starting ranks") -> Iterator[Advance]:
    """Show progress over ``total`` points while the block runs; ``first`` is the first description."""
    if not redrawn():
        yield _lines(total)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    columns = (  # the description takes the rest of the line, cut with an ellipsis
        BarColumn(_BAR_WIDTH, table_column=Column(no_wrap=True)),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
    )
    with Progress(*columns, console=console(sys.stderr), transient=True, expand=True) as bar:
        task = bar.add_task(first, total=total)

        def advance(following: str, finished: int) -> None:
            bar.update(task, description=following or None, advance=finished)

        yield advance


def _lines(total: int) -> Advance:
    started, done = time.monotonic(), 0

    def advance(following: str, finished: int) -> None:
        nonlocal done
        done += finished
        left = f", {_duration((time.monotonic() - started) / done * (total - done))} left" if done else ""
        if following:
            print(f"[{done}/{total}{left}] {following}", file=sys.stderr, flush=True)

    return advance


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
