"""Processes: whether those of other ranks have ended, waiting for those at fault to end first, and what a forked child
drops."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

_FLAGS_FIELD, _EXITING = 6, 0x4
"""The number of the flags field in ``/proc/<pid>/stat``, counted after the name, and Linux's PF_EXITING in it."""
_LEAVING_S, _NOTICED_S = 5.0, 0.3
"""How long this process waits for others to end first, and then for their launcher to notice that: torchrun looks
every 0.1 s."""

_culprits: set[int] = set()
_dropped_by: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()


def _stat(pid: int) -> list[str]:
    """The fields after the name in ``/proc/<pid>/stat``; the first is the state."""
    with open(f"/proc/{pid}/stat", errors="replace") as file:  # names may be cut off within a character
        return file.read().rpartition(")")[2].split()


def is_ending(pid: int) -> bool:
    """Whether a process has ended, or is ending."""
    if pid == 0:  # of another namespace
        return False
    try:
        flags = int(_stat(pid)[_FLAGS_FIELD])
    except OSError:  # it is gone, or /proc hides it
        return _is_gone(pid)
    return bool(flags & _EXITING)


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


def _has_ended(pid: int) -> bool:
    """Whether the launcher of a process can see that it has ended; True if nothing is known about it."""
    try:
        return _stat(pid)[0] == "Z"
    except OSError:
        return True


def blame(pid: int) -> None:
    """Note that this process has left a job because the process ``pid`` failed."""
    _culprits.add(pid)


def let_culprits_go_first() -> None:
    """For a process that is about to end with an error: wait a short time until the processes at fault have ended.
    Launchers report the first failed process that they see as the cause, and end all others."""
    deadline = time.monotonic() + _LEAVING_S
    while not all(map(_has_ended, _culprits)):
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)
    if _culprits:
        time.sleep(_NOTICED_S)


def in_children(one: T, drop: Callable[[T], None]) -> None:
    """Have every child that is forked while ``one`` exists call ``drop(one)``: what ``one`` holds is the parent's."""
    _dropped_by[one] = drop


def _drop_all() -> None:
    for one, drop in list(_dropped_by.items()):
        drop(one)


os.register_at_fork(after_in_child=_drop_all)
