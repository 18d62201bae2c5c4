"""The command line: ``python -m iris COMMAND``; :data:`COMMANDS` lists them.

Each command is a module with ``main(arguments) -> exit status`` and parses its own arguments, so that it is
imported only when asked for.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import iris
from iris.console import STOPPED, UNREAD, USAGE, Parser, exit_status

STATUSES = {
    0: "all went well",
    1: "an error, a result that is wrong or missing, or a regression that is to fail",
    USAGE: "a command line that makes no sense, or names a file that cannot be read or written",
    STOPPED: "stopped by Ctrl-C",
    UNREAD: "nobody reads on, as with `| head`",
}
"""What exit statuses mean."""
COMMANDS = {
    "info": ("iris.info", "what Iris sees: GPUs, links, versions, the backend and why, what is missing"),
    "demo": ("iris.demo", "run two fused ops over several ranks, check them, draw who waited when"),
    "bench": ("iris.bench", "measure links and ops against what the hardware and other libraries reach"),
    "tune": ("iris.tune", "measure configs of ops on this machine and keep the fastest for algorithm auto"),
    "report": ("iris.report", "draw results into one HTML page, write them as Markdown tables, compare two sets"),
}


def parser() -> argparse.ArgumentParser:
    """The parser of everything up to the command's own arguments."""
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:{width}}  {about}" for name, (_, about) in COMMANDS.items())
    statuses = "\n".join(f"  {status:<{width}}  {about}" for status, about in STATUSES.items())
    made = Parser(
        prog="iris",
        description="Triton kernels that read, write and signal the memory of every GPU of the job.",
        epilog=f"commands:\n{listed}\n\n`iris COMMAND --help` says what a command takes.\n\nexit status:\n{statuses}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"iris {iris.__version__}")
    made.add_argument("command", choices=tuple(COMMANDS), metavar="COMMAND", help=", ".join(COMMANDS))
    made.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help="the command's own arguments")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status, as :func:`iris.console.exit_status` says."""
    return exit_status("iris", lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        parser().print_help(sys.stderr)
        return USAGE
    given = parser().parse_args(words)
    module, _ = COMMANDS[given.command]
    return exit_status(f"iris {given.command}", lambda: int(importlib.import_module(module).main(given.arguments) or 0))
