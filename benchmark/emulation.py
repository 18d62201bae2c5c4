"""Emulation of one rank of a job with more ranks than there are GPUs: of its context, and of its peers' heaps.

With :class:`Emulated` alone, any addresses can be the peers' heaps. :func:`mirror` is for two processes that are both
rank 0, and stand for each other's peers. As all ranks do the same, the data that one sends to rank j are the data that
the other receives from rank -j, and belong in the place of that rank. Kernels and the copy engine put them there, by a
table of :class:`Region`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import iris
from iris.context import MAX_RANKS
from iris.device import rma
from iris.device.handle import RANK, WORLD_SIZE, Handle
from iris.engine import CopyEngine

RANKS = tuple(range(2, MAX_RANKS + 1))
"""Numbers of ranks that can be emulated."""
_TABLE: tl.constexpr = tl.constexpr(MAX_RANKS)
"""The place of the table, after the heaps' addresses: the number of ranks, then begin, end and stride of each
region."""
_REGIONS: tl.constexpr = tl.constexpr(4)


class Region(NamedTuple):
    """Memory that has a place of ``stride`` bytes for every rank; ``period``: bytes from one row of such places to the
    next; 0: there is one row."""

    tensor: torch.Tensor
    stride: int
    period: int = 0

    @property
    def span(self) -> tuple[int, int]:
        begin = self.tensor.data_ptr()
        return begin, begin + self.tensor.numel() * self.tensor.element_size()

    def turned(self, address: int, places: int, world_size: int) -> int:
        """``address``, moved from the place of one rank to that of the rank ``places`` further on."""
        begin, period = self.span[0], self.period or world_size * self.stride
        row, within = divmod(address - begin, period)
        place, rest = divmod(within, self.stride)
        return begin + row * period + (place + places) % world_size * self.stride + rest


class Emulated(iris.Iris):
    """The context of rank 0 of ``len(bases)`` ranks, whose heaps begin at ``bases``; all else is that of ``ctx``.

    Barriers and broadcasts are those of the real ranks. Data that arrive in ``regions`` are put in the place of the
    rank that they come from.
    """

    def __init__(self, ctx: iris.Iris, bases: Sequence[int]) -> None:
        self.__dict__.update(ctx.__dict__)
        self._ctx = ctx
        self.regions: list[Region] = []
        self.rank, self.world_size = 0, len(bases)
        info = ctx.handle.info.clone()
        info[RANK.value], info[WORLD_SIZE.value] = 0, self.world_size
        self._backend: Any = _Backend(ctx._backend, list(bases))
        self._heap_bases = torch.zeros(_TABLE.value + 1 + 3 * _REGIONS.value, dtype=torch.int64, device=ctx.device)
        self._heap_bases[: len(bases)] = torch.tensor(bases)
        self._handle = Handle(self._heap_bases, info)
        self._workspaces: dict[Hashable, Any] = {}
        self._kept: dict[Hashable, Any] = {}

    def turn(self, regions: Sequence[Region]) -> None:
        """Use these ``regions`` from now on: the copy engine takes the first that contains an address, kernels know the
        last four only."""
        self.regions = list(regions)
        known = regions[-_REGIONS.value :]
        table = [self.world_size, *(number for one in known for number in (*one.span, one.stride))]
        self._heap_bases[_TABLE.value :][: len(table)] = torch.tensor(table)

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        return super().kept(key, (lambda: _Engine(self)) if key is CopyEngine else make)

    def barrier(self, stream: Any = None, group: Any = None) -> None:
        self._ctx.barrier(stream, group)


class _Backend:
    """``backend``, with other addresses of heaps."""

    def __init__(self, backend: Any, bases: list[int]) -> None:
        self._backend, self.bases = backend, bases

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class _Engine(CopyEngine):
    """A copy engine whose copies arrive in the place of the rank that they come from."""

    def put(self, source: torch.Tensor, target: torch.Tensor, peer: int) -> None:
        ctx: Any = self._ctx
        address, bases = target.data_ptr(), self._backend.bases
        region = next((one for one in ctx.regions if one.span[0] <= address < one.span[1] and one.stride), None)
        moved = 0 if region is None else region.turned(address, -peer, ctx.world_size) - address
        bases[peer] += moved
        super().put(source, target, peer)
        bases[peer] -= moved


@triton.jit
def _translate_turned(ptr, from_rank, to_rank, heap_bases):
    """As :func:`iris.device.rma.translate`, and to the place of the rank that ``to_rank`` takes this one for. Handles
    without a table, such as those of the two real contexts, have no region."""
    ITEMSIZE: tl.constexpr = (ptr.dtype.element_ty.primitive_bitwidth + 7) // 8
    address, each = ptr.to(tl.int64), ptr.to(tl.int64) * 0
    for region in tl.static_range(_REGIONS):
        row = heap_bases + _TABLE + 1 + 3 * region
        begin, end, stride = tl.load(row), tl.load(row + 1), tl.load(row + 2)
        each = tl.where((address >= begin) & (address < end), stride, each)
    turns = tl.where(to_rank == from_rank, 0, tl.load(heap_bases + _TABLE) - to_rank)
    distance = rma._distance(from_rank, to_rank, heap_bases) + turns * each
    if ITEMSIZE == 4:  # flags lie side by side
        return ptr + distance // ITEMSIZE
    return ptr + distance // 16 * (16 // ITEMSIZE)


def mirror() -> None:
    """Make all kernels of this process put data where :class:`Region` says; call it before the first kernel."""
    for name, module in list(sys.modules.items()):
        if name.startswith("iris.") and getattr(module, "translate", None) is original:
            module.translate = _translate_turned  # type: ignore[attr-defined]


original = rma.translate
