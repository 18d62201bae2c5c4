"""Objects that cannot be duplicated, as the context and what belongs to it; and which of these are open."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, TypeVar

from iris.errors import ContextError

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
            f"an {type(self).__name__} cannot be pickled: its memory and peers are those of this process. Save a "
            "module's state_dict(), not the module."
        )


class Opened(NamedTuple):
    """How to end what is open: with the peers, or for an error, of which they are told."""

    close: Callable[[], None]
    give_up: Callable[[BaseException], None]


OPEN: dict[Live, Opened] = {}
"""What is open in this process, in the order in which it was made."""


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
