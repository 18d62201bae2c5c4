"""What commands print: tables, drawn by rich where it is installed, and errors."""

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
"""Exit status after an argument that cannot work: as argparse has it."""
STOPPED = 130
"""Exit status after Ctrl-C, as shells have it."""
UNREAD = 141
"""Exit status where nobody reads on, such as behind ``| head``: as shells have it of SIGPIPE."""


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong with a command line, and where to read on, but not all of its usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: error: {message}\n`{self.prog} --help` says what it takes\n")


def exit_status(program: str, run: Callable[[], int]) -> int:
    """What ``run()`` returns. Without a traceback: ``USAGE`` if it raises an ArgumentError, 1 if another Iris error, or
    if what it prints cannot be written, and ``STOPPED`` after Ctrl-C, which is said; ``UNREAD`` if the reader of what
    it prints has gone. Characters that standard output has no code for are printed as question marks."""
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


def error_line(program: str, error: IrisError) -> str:
    """What ``program`` prints of ``error``: of an ArgumentError as argparse has it, without an op that is the program
    itself; of others with their class, which tells what happened."""
    if not isinstance(error, ArgumentError):
        return f"{program}: {type(error).__name__}: {error}"
    itself = program.partition(",")[0].split()[-1] == error.op
    return f"{program}: error: {str(error).removeprefix(f'{error.op}: ' if itself else '')}"


def _drop_what_is_left(*streams: TextIO) -> None:
    """What the interpreter would write there when it ends."""
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
    """Whether what looks like a terminal gets plain text: where NO_COLOR is set, and on ranks that a launcher started,
    unless FORCE_COLOR is. Open MPI gives each rank a terminal, whatever becomes of what they print."""
    if os.environ.get("NO_COLOR"):
        return True
    try:
        who = identity()
    except LaunchError:  # which it is not for the console to say
        return True
    return who is not None and who.source != "iris.launch" and not os.environ.get("FORCE_COLOR")


def console(file: TextIO) -> Console:
    """rich's console, but where nobody reads on it raises what the stream does, for :func:`exit_status` to see. No
    file is a terminal to it where text is to be plain.

    Raises:
        ImportError: rich is not installed.
    """
    from rich.console import Console

    class Raising(Console):
        def on_broken_pipe(self) -> NoReturn:
            raise  # what rich has caught

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
    """Print a table: with rich where it is installed, else as aligned text.

    Args:
        headings: of the columns; if all are empty, none are shown.
        rows: as many cells each.
        title: a line above the table.
        right: numbers of the columns that are aligned to the right.
        whole: a cell is never cut in two, however narrow the terminal; where there is no terminal none is anyway.
        used: columns without a word in any row are left out.
        styles: rich's styles of first cells, by their text.
        file: standard output if None.
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


def aligned(lines: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Each line's cells in columns, two spaces apart, those numbered ``right`` aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        (cell.rjust(width) if number in right else cell.ljust(width) for number, (cell, width) in enumerate(pairs))
        for pairs in (zip(line, widths, strict=True) for line in lines)
    )
    return ["  ".join(cells).rstrip() for cells in padded]
