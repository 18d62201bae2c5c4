"""Output of commands: tables, drawn by rich if it is installed, and errors."""

from __future__ import annotations

import argparse
import io
import os
import select
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TextIO

from iris.errors import ArgumentError, IrisError, LaunchError
from iris.identity import identity

if TYPE_CHECKING:
    from rich.console import Console

USAGE = 2
"""Exit status after an invalid argument, as of argparse."""
STOPPED = 130
"""Exit status after Ctrl-C, as of shells."""
UNREAD = 141
"""Exit status if the reader of the output has gone, as after ``| head``: that of shells for SIGPIPE."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors say what is wrong and name ``--help``, without printing the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: error: {message}\n`{self.prog} --help` says what it takes\n")


def exit_status(program: str, run: Callable[[], int]) -> int:
    """The result of ``run()``, or, without a traceback: ``USAGE`` if it raises an ArgumentError; 1 if it raises another
    Iris error or its output cannot be written; ``STOPPED``, with a message, after Ctrl-C; and ``UNREAD`` if the reader
    of its output has gone. Characters that standard output cannot encode are printed as question marks; what is printed
    while it is closed, is lost."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  for as long as the process lives
    try:
        try:
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="replace")
            return run()
        except IrisError as error:
            print(error_line(program, error), file=sys.stderr)
            return USAGE if isinstance(error, ArgumentError) else 1
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return STOPPED
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        unread = [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream)]
        if not unread:
            raise
        _drop_what_is_left(*unread)
        return UNREAD
    except OSError:
        try:
            print(flush=True)  # a write that failed may have left nothing to flush
        except OSError as error:
            _drop_what_is_left(sys.stdout)
            print(f"{program}: standard output: {error.strerror}", file=sys.stderr)
            return 1
        raise


def tell(text: str, end: str = "\n") -> None:
    """Print ``text`` at once, and go on if nobody reads it any more: what is being measured is not lost."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        _drop_what_is_left(sys.stdout)


def error_line(program: str, error: IrisError) -> str:
    """The line that ``program`` prints for ``error``: an ArgumentError in the form of argparse, without its op if that
    is the program itself; other errors with their class, which says what happened."""
    if not isinstance(error, ArgumentError):
        return f"{program}: {type(error).__name__}: {error}"
    itself = program.partition(",")[0].split()[-1] == error.op
    return f"{program}: error: {str(error).removeprefix(f'{error.op}: ' if itself else '')}"


def _drop_what_is_left(*streams: TextIO) -> None:
    """Send to /dev/null what the interpreter would still write to ``streams`` when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _has_no_reader(stream: TextIO) -> bool:
    poll = select.poll()
    poll.register(stream, 0)
    return bool(poll.poll(0))


def counted(number: int, thing: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _plain() -> bool:
    """Whether even a terminal gets plain text: if NO_COLOR is set; and on ranks that a launcher started, unless
    FORCE_COLOR is set. Open MPI gives each rank a terminal, wherever the output goes in the end."""
    if os.environ.get("NO_COLOR"):
        return True
    try:
        who = identity()
    except LaunchError:  # others report it
        return True
    return who is not None and who.source != "iris.launch" and not os.environ.get("FORCE_COLOR")


def console(file: TextIO) -> Console:
    """A console of rich that raises the stream's error if the reader has gone, for :func:`exit_status` to handle. If
    text is to be plain, it takes no file for a terminal.

    Raises:
        ImportError: rich is not installed.
    """
    from rich.console import Console

    class Raising(Console):
        def on_broken_pipe(self) -> NoReturn:
            raise  # the error that rich has caught

    return Raising(file=file, force_terminal=False if _plain() else None)


def print_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    right: Collection[int] = (),
    whole: bool = False,
    used: bool = False,
    styles: Mapping[str, str] | None = None,
    file: TextIO | None = None,
) -> None:
    """Print a table: with rich if it is installed, else as aligned text.

    Args:
        headings: one for each column; if all are empty, none are shown.
        rows: the cells of each row, one for each column.
        title: a line above the table.
        right: numbers of the columns that are aligned to the right.
        whole: never break a cell over lines, however narrow the terminal; without a terminal none is broken anyway.
        used: leave out columns that are empty in all rows.
        styles: rich's styles of first cells, by their text.
        file: where to print; None: standard output.
    """
    out = sys.stdout if file is None else file
    if used:
        kept = [number for number, column in enumerate(zip(*rows, strict=True)) if any(column)]
        headings, *rows = [[row[number] for number in kept] for row in (headings, *rows)]
        right = [place for place, number in enumerate(kept) if number in right]
    try:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        paper = console(out)
    except ImportError:
        lines = [headings, *rows] if any(headings) else rows
        out.write("\n".join([*([title] if title else []), *aligned(lines, right), "", ""]))
        return
    table = Table(box=box.SIMPLE, show_header=any(headings))
    for number, heading in enumerate(headings):
        justify = "right" if number in right else "left"
        table.add_column(Text(heading), justify=justify, no_wrap=whole, overflow="fold")  # type: ignore[arg-type]
    for first, *others in rows:
        table.add_row(Text(first, style=(styles or {}).get(first, "")), *map(Text, others))
    if title:
        paper.print(Text(title, style="italic"), soft_wrap=True)
    if whole or not paper.is_terminal:
        wide = paper.options.update(max_width=1 << 16)
        paper.width = max(paper.width, paper.measure(table, options=wide).maximum)
    paper.print(table)


def aligned(lines: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Each line's cells in columns, two spaces apart, those numbered ``right`` aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        (cell.rjust(width) if number in right else cell.ljust(width) for number, (cell, width) in enumerate(pairs))
        for pairs in (zip(line, widths, strict=True) for line in lines)
    )
    return ["  ".join(cells).rstrip() for cells in padded]
