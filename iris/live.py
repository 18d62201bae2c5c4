"""Objects that cannot be duplicated, such as the context; which of them are open; and how they are closed when a
function or the process ends."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, TypeVar

from iris.errors import ContextError
from iris.processes import let_culprits_go_first

T = TypeVar("T")


class Live:
    """An object that stands for memory and connections shared with peers. Copying it, or a module that holds it, yields
    the same object; pickling it raises, because a copy would be of no use in another process."""

    def __copy__(self: T) -> T:
        return self

    def __deepcopy__(self: T, memo: dict[int, Any]) -> T:
        return self

    def __reduce__(self) -> NoReturn:
        raise ContextError(
            f"{type(self).__name__} cannot be pickled: its memory and peers are those of this process. Save a "
            "module's state_dict(), not the module."
        )


class Opened(NamedTuple):
    """How to end an open object: ``close`` together with the peers, or ``give_up`` for an error, of which they are
    told."""

    name: str
    close: Callable[[], None]
    give_up: Callable[[BaseException], None]


OPEN: dict[Live, Opened] = {}
"""The open objects of this process, in the order in which they were made."""
_ending = False
_FIRST = 1000
"""The priority of the exit handler in processes of multiprocessing: before all others."""
_hooked = False


def hold(one: Live, opened: Opened) -> None:
    """Note that ``one`` is open, so that it is ended with the process."""
    global _hooked
    OPEN[one] = opened
    if not _hooked and multiprocessing.parent_process() is not None:
        # Forked processes skip atexit handlers; in spawned ones the error is forgotten before these run.
        multiprocessing.util.Finalize(None, end_all, exitpriority=_FIRST)
        _hooked = True


def real_error(error: BaseException | None) -> BaseException | None:
    """``error``, or None if it only ends a program that has succeeded, as ``sys.exit()`` does. For ``sys.exit(1)`` in
    an exception handler, the exception that was handled there."""
    if not isinstance(error, SystemExit):
        return error
    return None if error.code in (None, 0) else error.__context__ or error


def ending() -> bool:
    """Whether the interpreter is about to exit: no thread can be started any more, and the process's end frees
    memory."""
    return _ending


def _since(before: set[Live]) -> list[Opened]:
    """What was opened since ``before``."""
    return [OPEN[one] for one in OPEN if one not in before]


def close(before: set[Live]) -> None:
    """Close what a function opened (since ``before``) and left open when it returned, as ``with`` would."""
    for opened in _since(before):
        opened.close()


def give_up(before: set[Live], error: BaseException) -> None:
    """Give up what a function opened (since ``before``) and left open when it raised, as ``with`` would."""
    for opened in _since(before):
        with suppress(Exception):  # only the first error counts
            opened.give_up(error)


def end_all() -> None:
    """When the process ends: close what the program forgot, in the order in which it was made, which is the same on all
    ranks; or give it up, if the program ends on an error, and let the processes that caused the error end first. The
    last error of an interactive session does not count, since it may be long ago."""
    global _ending
    _ending = True
    interactive = sys.flags.interactive or hasattr(sys, "ps1")
    error = None if interactive else real_error(sys.exc_info()[1] or _last_error())
    for opened in list(OPEN.values()):
        try:
            if error is None:
                opened.close()
            else:
                opened.give_up(error)
        except Exception as late:  # noqa: BLE001 (the other objects must be ended, too)
            if sys.stderr is not None:
                sys.stderr.write(f"iris: {opened.name} was not closed cleanly: {late}\n")
    if error is not None:
        let_culprits_go_first()


def _last_error() -> BaseException | None:
    """The uncaught error that the interpreter has reported, if there is one."""
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error


def forget_all() -> None:
    """In a forked child: the open objects are the parent's."""
    global _hooked
    _hooked = False
    OPEN.clear()
