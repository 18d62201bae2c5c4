"""Processes of other ranks: whether they have ended, and letting those end first that are to blame."""

from __future__ import annotations

import os
import time

_FLAGS_FIELD, _EXITING = 6, 0x4
"""Of ``/proc/<pid>/stat``, counted behind the name, and Linux's PF_EXITING in it."""
_LEAVING_S, _NOTICED_S = 5.0, 0.3
"""How long this process leaves others to end first, and then their launcher to see that: torchrun looks every 0.1 s."""

_culprits: set[int] = set()


def _stat(pid: int) -> list[str]:
    """What Linux says of a process behind its name; the state comes first."""
    with open(f"/proc/{pid}/stat", errors="replace") as file:  # names may be cut off within a character
        return file.read().rpartition(")")[2].split()


def is_ending(pid: int) -> bool:
    """Whether a process is gone, or going."""
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
    """Whether its launcher can see that a process has ended; also if nothing is known of it."""
    try:
        return _stat(pid)[0] == "Z"
    except OSError:
        return True


def blame(pid: int) -> None:
    """Note that this process has left a job because the process ``pid`` failed."""
    _culprits.add(pid)


def let_culprits_go_first() -> None:
    """For a process that is about to end on an error: wait, not for long, until those have ended that are to blame.
    Launchers take the first process that they see failed for the cause, and end all others."""
    deadline = time.monotonic() + _LEAVING_S
    while not all(map(_has_ended, _culprits)):
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)
    if _culprits:
        time.sleep(_NOTICED_S)
