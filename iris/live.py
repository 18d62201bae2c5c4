"""What there can be one of only."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from iris.errors import ContextError

T = TypeVar("T")


class Live:
    """Stands for memory that peers know, and connections to them. A copy, also as a part of a module that is copied, is
    the same one; pickled it would be of no use."""

    def __copy__(self: T) -> T:
        return self

    def __deepcopy__(self: T, memo: dict[int, Any]) -> T:
        return self

    def __reduce__(self) -> NoReturn:
        raise ContextError(
            f"an {type(self).__name__} cannot be pickled: its memory and peers are those of this process. Save a "
            "module's state_dict(), not the module."
        )
