"""What a backend gives the context: peer-mapped memory, tensors over it, and waiting that ends."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

Surroundings = Callable[[], AbstractContextManager[None]]

NOWHERE = 1 << 62
"""Around this address no process has memory, and no GPU."""
_BEYOND, _APART = 4096, 1 << 47


def between_traps(bases: list[int], device: torch.device) -> torch.Tensor:
    """``bases``, by rank; ranks just outside of them, too small or too large, find heaps that are :data:`NOWHERE`."""
    traps = NOWHERE + _APART * torch.arange(-_BEYOND, len(bases) + _BEYOND, device="cpu")
    traps[_BEYOND : _BEYOND + len(bases)] = torch.tensor(bases, device="cpu")
    return traps.to(device)[_BEYOND : _BEYOND + len(bases)]


class Backend(ABC):
    """One rank's memory, mapped on all ranks of the job, and the device that works on it.

    Attributes:
        name: ``"cuda"``, ``"hip"`` or ``"sim"``.
        device: the torch device of tensors on the heap.
        bases: address of every rank's heap *in this process*, in rank order.
        num_sms: streaming multiprocessors (compute units) that kernels may count on being co-resident.
        without_atomics: ranks whose memory is written by a link that makes a read and a write of an atomic.
    """

    name: str
    device: torch.device
    bases: list[int]
    num_sms: int
    without_atomics: tuple[int, ...] = ()

    @abstractmethod
    def bytes_at(self, offset: int, nbytes: int, on_release: Callable[[], None] | None) -> torch.Tensor:
        """A uint8 tensor over ``nbytes`` of the own heap; ``on_release`` runs when its storage is let go."""

    @abstractmethod
    def peer_bytes(self, rank: int, offset: int, nbytes: int) -> torch.Tensor:
        """A uint8 tensor over ``nbytes`` of ``rank``'s heap, for copies by the host or the copy engine."""

    @abstractmethod
    def poke(self, offset: int, value: int) -> None:
        """Write an int64 into the own heap, while kernels run; from any thread."""

    @abstractmethod
    def peek(self, offset: int) -> int:
        """The int64 at ``offset`` of the own heap, while kernels run."""

    @abstractmethod
    def side_stream(self) -> Any:
        """A stream for copies, which nothing else uses."""

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Copy between addresses of any heaps without a kernel, behind what ``stream`` holds."""

    @abstractmethod
    def copy_rows(self, target: int, source: int, pitches: tuple[int, int], width: int, rows: int, stream: Any) -> None:
        """As ``copy``, but ``rows`` rows of ``width`` bytes that start ``pitches`` bytes apart in target and source."""

    @abstractmethod
    def wait_word(self, address: int, stream: Any) -> None:
        """Let ``stream`` wait until the int32 at ``address`` of the own memory is not zero."""

    @abstractmethod
    def write_word(self, address: int, value: int, stream: Any) -> None:
        """Set the int32 at ``address`` of the own memory, without a kernel, behind what ``stream`` holds."""

    @abstractmethod
    def status_words(self, count: int) -> torch.Tensor:
        """``count`` int64 words that the host reads without waiting while kernels write them."""

    @abstractmethod
    def synchronize(self, stream: Any, check: Callable[[], None]) -> None:
        """Wait for ``stream`` (None: the current one), calling ``check`` again and again meanwhile."""

    @abstractmethod
    def finish(self, check: Callable[[], None]) -> None:
        """Wait until the device is done with all that it was given, calling ``check`` again and again meanwhile."""

    @abstractmethod
    def surround_launches(self, given: Iterable[torch.Tensor], around: Surroundings) -> None:
        """Where a kernel has run when its launch returns, as in the simulator, run every one that gets a tensor of
        ``given`` inside of ``around()``, until :meth:`close`."""

    @abstractmethod
    def close(self, limit_s: float | None) -> bool:
        """Let go of all memory, once the device is done with what it was given. Tensors that the user still holds keep
        their memory until they go. False if it is not done within ``limit_s`` (None: whenever it is; 0: nobody looks):
        then nothing has been let go of."""


def call_on_release(owner: object, on_release: Callable[[], None] | None) -> None:
    """Run ``on_release`` once ``owner`` is collected; not at interpreter exit."""
    if on_release is not None:
        weakref.finalize(owner, on_release).atexit = False
