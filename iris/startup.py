"""Ctrl-C while ``python -m iris`` imports PyTorch and Triton, before :mod:`iris.console` can handle it.

Python imports the package before ``__main__``, so the package imports this module first.
"""

from __future__ import annotations

import os
import signal
import sys

_STOPPED = 130  # also in iris.console, which is not imported yet


def guard() -> None:
    """Until :func:`started`, Ctrl-C ends this process without a traceback, if it is ``python -m iris``."""
    if _is_the_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def started() -> None:
    """Ctrl-C is a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_the_command() -> bool:
    """Whether Python is looking for ``-m iris``, and not for another program that imports Iris."""
    given = sys.orig_argv
    return sys.argv[:1] == ["-m"] and "-m" in given and given[given.index("-m") + 1 :][:1] == ["iris"]


def _stop(number: int, frame: object) -> None:
    """End the process at once: nothing is open yet, and an exception might be swallowed by an import."""
    try:
        os.write(2, b"stopped\n")
    finally:
        os._exit(_STOPPED)
