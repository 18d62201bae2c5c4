"""Objects that cannot be duplicated, as the context and what belongs to it; which of these are open; and how they end
with a function, or with the process."""

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
    """An object that stands for memory and connections shared with peers. Copying it, or a module that holds it, gives
    the same object again; pickling it raises, as the copy would be of no use in another process."""

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
    """How to end what is open: with the peers; for an error, of which they are told; or in a forked child, without a
    word."""

    name: str
    close: Callable[[], None]
    give_up: Callable[[BaseException], None]
    abandon: Callable[[], None]


OPEN: dict[Live, Opened] = {}
"""What is open in this process, in the order in which it was made."""
_ending = False
_FIRST = 1000
"""Before all else that ends with a process of multiprocessing."""
_hooked = False


def hold(one: Live, opened: Opened) -> None:
    """Note that ``one`` is open, and have it end with the process."""
    global _hooked
    OPEN[one] = opened
    if not _hooked and multiprocessing.parent_process() is not None:
        # Forked ones leave without the handlers of atexit, and spawned ones come to these when an error is forgotten.
        multiprocessing.util.Finalize(None, end_all, exitpriority=_FIRST)
        _hooked = True


def failure(error: BaseException | None) -> BaseException | None:
    """``error``, or None if it only ends a program that has succeeded, as ``sys.exit()`` does. That of ``sys.exit(1)``
    in a handler is what was handled there."""
    if not isinstance(error, SystemExit):
        return error
    return None if error.code in (None, 0) else error.__context__ or error


def ending() -> bool:
    """Whether the interpreter is about to exit: no thread can be started any more, and memory goes with the process."""
    return _ending


def _since(before: set[Live]) -> list[Opened]:
    """What was opened since ``before``."""
    return [OPEN[one] for one in OPEN if one not in before]


def close(before: set[Live]) -> None:
    """Close what a function has opened since ``before``, and left open when it returned, as ``with`` would."""
    for opened in _since(before):
        opened.close()


def give_up(before: set[Live], error: BaseException) -> None:
    """Give up what a function has opened since ``before``, and left open when it raised, as ``with`` would."""
    for opened in _since(before):
        with suppress(Exception):  # what counts is the error that there is
            opened.give_up(error)


def end_all() -> None:
    """When the process ends: close what the program forgot, in the order in which it was made, which is the same on all
    ranks; or give it up, if the program ends on an error. Processes that are to blame for it end first. An interactive
    session does not end on its last error, which may be long ago."""
    global _ending
    _ending = True
    interactive = sys.flags.interactive or hasattr(sys, "ps1")
    error = None if interactive else failure(sys.exc_info()[1] or _last_error())
    for opened in list(OPEN.values()):
        try:
            if error is None:
                opened.close()
            else:
                opened.give_up(error)
        except Exception as late:  # noqa: BLE001 (the others are to end, too)
            if sys.stderr is not None:
                sys.stderr.write(f"iris: {opened.name} was not closed cleanly: {late}\n")
    if error is not None:
        let_culprits_go_first()


def _last_error() -> BaseException | None:
    """What the interpreter has reported, as nobody caught it."""
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error


def abandon_all() -> None:
    """In a forked child: close inherited sockets, so that the parent's death stays visible to its peers."""
    global _hooked
    _hooked = False
    for opened in OPEN.values():
        opened.abandon()
    OPEN.clear()
