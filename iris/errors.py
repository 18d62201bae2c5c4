"""Every error that Iris raises on purpose.

::

    IrisError
    ├── ArgumentError (ValueError)      a bad argument: op, argument, expected, got
    │   ├── ShapeError                  … because of its shape or strides
    │   ├── DTypeError (TypeError)      … because of its dtype
    │   └── PlacementError              … because it is on the wrong device or off the heap
    ├── HeapError (MemoryError)         the symmetric heap is full, or misused
    ├── RankMismatch                    ranks made different collective calls
    ├── BackendError                    the machine lacks something Iris needs
    ├── ContextError                    use after close, in a forked child, or after a call that broke off
    ├── CaptureError                    what cannot be captured in a graph, such as a call that needs memory
    ├── AddressError                    a simulated kernel reached for memory that is not there
    ├── LaunchError                     ranks could not be started, or one failed
    ├── WaitTimeout (TimeoutError)      a bounded wait ran out; names the rank waited for
    └── PeerDied                        a peer is gone, left on an error, or closed its context; names it

Some also derive from a built-in that a caller would guess, the one in brackets and those of the class above, so that
``except ValueError`` catches a bad shape, too.
"""

from __future__ import annotations

import contextlib
import errno
import operator
from collections.abc import Iterable, Iterator


class IrisError(Exception):
    """Base of all errors raised by Iris."""


class ArgumentError(IrisError, ValueError):
    """An argument that cannot work, found before anything was launched."""

    def __init__(self, op: str, argument: str, expected: str, got: object, fix: str = "") -> None:
        self.op, self.argument, self.expected, self.got, self.fix = op, argument, expected, got, fix
        text = f"{op}: {argument}: expected {expected}, got {got}"
        super().__init__(f"{text}. {fix}" if fix else text)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.op, self.argument, self.expected, str(self.got), self.fix)


class ShapeError(ArgumentError):
    """A tensor whose shape or strides do not fit."""


class DTypeError(ArgumentError, TypeError):
    """A tensor whose dtype does not fit."""


class PlacementError(ArgumentError):
    """A tensor on the wrong device, or not on the symmetric heap."""


class HeapError(IrisError, MemoryError):
    """The symmetric heap cannot satisfy a request."""


class RankMismatch(IrisError):
    """Ranks that should have made the same collective call did not. ``calls``: those that they made, if known."""

    def __init__(self, message: str, calls: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.calls = tuple(calls)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.calls)


class BackendError(IrisError):
    """The chosen backend cannot run here; the message says what is missing and how to get it."""


class ContextError(IrisError):
    """A context used after ``close()``, in a forked child, or after a call that broke off."""


class CaptureError(IrisError):
    """A call that a CUDA graph cannot capture: one that needs new memory (call it once before), or whose copies wait
    for words where a graph cannot do that (leave the choice of the algorithm to "auto")."""


class AddressError(IrisError):
    """A simulated kernel's load, store or atomic at an address where there is no memory."""


class LaunchError(IrisError):
    """Ranks could not be started, or one of them failed."""


class _AboutRanks(Exception):
    """What errors share that name ``ranks``."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.ranks)


class WaitTimeout(_AboutRanks, IrisError, TimeoutError):
    """A wait that reached its bound. ``ranks`` are the ranks that were waited for."""


class PeerDied(_AboutRanks, IrisError):
    """A peer's process is gone, or the peer closed its context while this rank still waited for it, or left it on an
    error. The message quotes that error, unless a message that the peer was sending to this rank was cut off.
    ``ranks`` are the ranks that have left."""


def whole_number(value: object) -> int:
    """A rank, a count or a size as a number, from a whole number of Python or NumPy; -1, which is never valid, for
    anything else."""
    if isinstance(value, bool) or hasattr(value, "data_ptr"):  # a tensor of one element would pass for a number
        return -1
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return -1


def words_of(error: BaseException) -> str:
    """What ``error`` says. An exception of the user's may fail to say it, which must not hide that there is one."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 (its __str__ runs any code)
        return "its words cannot be had"


@contextlib.contextmanager
def explaining_too_many_files(doing: str) -> Iterator[None]:
    """Surrounds what opens files: a process that may open no more of them is told what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise too_many_files(doing) from error
        raise


def too_many_files(doing: str) -> BackendError:
    """What to say of a process that may open no more."""
    return BackendError(f"{doing}: this process has too many open files. Raise the limit, as with ulimit -n 4096.")


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 1, 3``."""
    ordered = sorted(ranks)
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(map(str, ordered))}"
