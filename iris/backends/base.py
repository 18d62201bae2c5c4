"""The interface of a backend: peer-mapped memory, tensors over it, and waits that end."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

Surroundings = Callable[[], AbstractContextManager[None]]

NOWHERE = 1 << 62
"""No process and no GPU has memory around this address."""
_BEYOND, _APART = 4096, 1 << 47


def between_traps(bases: list[int], device: torch.device) -> torch.Tensor:
    """``bases``, by rank, with traps on both sides: a rank that is somewhat too small or too large finds a heap that is
    :data:`NOWHERE`."""
    traps = NOWHERE + _APART * torch.arange(-_BEYOND, len(bases) + _BEYOND, device="cpu")
    traps[_BEYOND : _BEYOND + len(bases)] = torch.tensor(bases, device="cpu")
    return traps.to(device)[_BEYOND : _BEYOND + len(bases)]


class Backend(ABC):
    """One rank's memory, mapped on all ranks of the job, and the device that works on it.

    Attributes:
        name: ``"cuda"``, ``"hip"`` or ``"sim"``.
        device: the torch device of tensors on the heap.
        bases: address of every rank's heap *in this process*, in rank order.
        num_sms: streaming multiprocessors (compute units): as many programs of a kernel are resident together.
        without_atomics: ranks behind a link that splits an atomic into a read and a write.
    """

    name: str
    device: torch.device
    bases: list[int]
    num_sms: int
    without_atomics: tuple[int, ...] = ()

    @abstractmethod
    def bytes_at(self, offset: int, nbytes: int, on_release: Callable[[], None] | None) -> torch.Tensor:
        """A uint8 tensor over ``nbytes`` of this rank's heap; ``on_release`` runs when its storage is released."""

    @abstractmethod
    def peer_bytes(self, rank: int, offset: int, nbytes: int) -> torch.Tensor:
        """A uint8 tensor over ``nbytes`` of ``rank``'s heap, for copies by the host or the copy engine."""

    @abstractmethod
    def poke(self, offset: int, value: int) -> None:
        """Write an int64 into this rank's heap while kernels run; any thread may call this."""

    @abstractmethod
    def peek(self, offset: int) -> int:
        """Read the int64 at ``offset`` of this rank's heap while kernels run."""

    @abstractmethod
    def side_stream(self) -> Any:
        """A stream for copies, which nothing else uses."""

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Copy between addresses in any heaps, without a kernel, behind the work in ``stream``."""

    @abstractmethod
    def copy_rows(self, target: int, source: int, pitches: tuple[int, int], width: int, rows: int, stream: Any) -> None:
        """As ``copy``, for ``rows`` rows of ``width`` bytes; ``pitches``: bytes between the starts of two rows, in
        target and in source."""

    @abstractmethod
    def wait_word(self, address: int, stream: Any) -> None:
        """Make ``stream`` wait until the int32 at ``address``, in this rank's memory, is not zero."""

    @abstractmethod
    def write_word(self, address: int, value: int, stream: Any) -> None:
        """Set the int32 at ``address``, in this rank's memory, without a kernel, behind the work in ``stream``."""

    @abstractmethod
    def status_words(self, count: int) -> torch.Tensor:
        """``count`` int64 words that kernels write, and that the host can read meanwhile without waiting."""

    @abstractmethod
    def synchronize(self, stream: Any, check: Callable[[], None]) -> None:
        """Wait for ``stream`` (None: the current one), calling ``check`` repeatedly meanwhile."""

    @abstractmethod
    def finish(self, check: Callable[[], None]) -> None:
        """Wait until the device has finished all its work, calling ``check`` repeatedly meanwhile."""

    @abstractmethod
    def surround_launches(self, given: Iterable[torch.Tensor], around: Surroundings, limit_s: float) -> None:
        """Run every kernel that gets a tensor of ``given`` inside ``around()``, until :meth:`close`. ``limit_s``: how
        long waits in it may take. Only the simulator does so, where a kernel has finished when its launch returns."""

    @abstractmethod
    def close(self, limit_s: float | None) -> bool:
        """Release all memory once the device has finished its work; tensors that the user still holds keep theirs.

        Waits up to ``limit_s`` (None: without limit; 0: not at all, and then a GPU counts as not done). False if the
        device is not done by then: nothing has been released."""


def call_on_release(owner: object, on_release: Callable[[], None] | None) -> None:
    """Run ``on_release`` once ``owner`` is collected; not at interpreter exit."""
    if on_release is not None:
        weakref.finalize(owner, on_release).atexit = False
