"""Which ranks still hold which block of the symmetric heap: a block is free once all ranks have released it.

A rank releases a block when the last reference to its tensor goes, at a different moment on each rank. But all ranks
must free the block at the same moment, because their heap tables have to stay equal. So at each allocation, which is
collective, the ranks tell each other which blocks they have released since the last one.
"""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Callable

import torch

from iris.errors import HeapError
from iris.heap import HeapTable

_WAIT_S, _WAITS = 0.01, 100
"""How long a rank waits for another thread that collects garbage, and how often."""
Exchange = Callable[[str, bytes], dict[int, bytes]]
"""Sends bytes to all ranks, under a tag that must be the same on all; returns every rank's bytes."""


class Lease:
    """This rank's hold on the block at ``offset``. It is released once, by ``free`` or when the tensor's storage ends.
    ``storage`` identifies that storage: an earlier tensor in the same block had another one."""

    def __init__(self, offset: int, released: list[int]) -> None:
        self.offset = offset
        self.storage = 0
        self._released: list[int] | None = released

    @property
    def held(self) -> bool:
        return self._released is not None

    def release(self) -> None:
        released, self._released = self._released, None
        if released is not None:
            released.append(self.offset)


class Leases:
    """The leases of the blocks of ``table``, which is equal on all ranks."""

    def __init__(self, table: HeapTable, world_size: int) -> None:
        self._table, self._world_size = table, world_size
        self._leases: dict[int, Lease] = {}
        self._released: list[int] = []
        self._released_by: dict[int, set[int]] = {}

    def take(self, nbytes: int, op: str, tag: str, exchange: Exchange) -> Lease:
        """Lease a block of at least ``nbytes``, for ``op``. Collective; ``tag`` must be the same on all ranks.

        Raises:
            HeapError: there is no such block, even after all ranks that may collect Python's garbage have done so.
        """
        self._free_what_all_released(tag, exchange)
        try:
            block = self._table.allocate(nbytes, op)
        except HeapError:
            self.collect(f"{tag} again", exchange)
            block = self._table.allocate(nbytes, op)
        lease = self._leases[block.offset] = Lease(block.offset, self._released)
        return lease

    def collect(self, tag: str, exchange: Exchange) -> None:
        """Collect Python's garbage, and free the blocks that all ranks have released. Collective, as :meth:`take`.

        A rank that captures a graph collects no garbage, because garbage may hold graphs or streams, which cannot be
        destroyed during a capture. It still meets the others; blocks that it has not released stay in use on all ranks.
        """
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            _collect_garbage()
        self._free_what_all_released(tag, exchange)

    def holding(self, offset: int) -> Lease | None:
        """The lease of the block that ``offset`` lies in, if this rank holds it."""
        lease = self._leases.get(offset)  # mostly a block begins there
        if lease is None and 0 <= offset < self._table.size and (block := self._table.holding(offset)) is not None:
            lease = self._leases.get(block.offset)
        return lease if lease is not None and lease.held else None

    def _free_what_all_released(self, tag: str, exchange: Exchange) -> None:
        mine = list(self._released)
        answers = exchange(tag, json.dumps(mine).encode())
        del self._released[: len(mine)]
        for peer in sorted(answers):
            for offset in json.loads(answers[peer]):
                self._released_by.setdefault(offset, set()).add(peer)
        for offset in sorted(self._released_by):
            if len(self._released_by[offset]) == self._world_size:
                del self._released_by[offset], self._leases[offset]
                self._table.free(offset)


def _collect_garbage() -> None:
    """Collect Python's garbage, even if another thread is about it: ``gc.collect`` then returns at once."""
    garbage = _Cycle()
    left = weakref.ref(garbage)
    del garbage
    for _ in range(_WAITS):
        gc.collect()
        if left() is None:
            return
        time.sleep(_WAIT_S)


class _Cycle:
    """Garbage, once nobody refers to it any more."""

    def __init__(self) -> None:
        self.me = self
