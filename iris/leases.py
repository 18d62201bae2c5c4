"""Who still holds which block of the symmetric heap: a block is free once all ranks have let go of it.

A rank lets go of a block when a tensor's last reference goes, which is at another moment on each rank. All must free
it at the same one, as their tables of the heap have to stay equal: at the next allocation, which they make together,
they tell each other what they have let go of since the one before.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable

import torch

from iris.errors import HeapError
from iris.heap import HeapTable

Exchange = Callable[[str, bytes], dict[int, bytes]]
"""Sends bytes to all ranks, under a tag on which they must agree; returns each rank's."""


class Lease:
    """This rank's hold on the block at ``offset``; released once, by ``free`` or by the end of the tensor's storage,
    which ``storage`` tells from that of a tensor that had the block before."""

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
    """The blocks of ``table``, which is equal on all ranks."""

    def __init__(self, table: HeapTable, world_size: int) -> None:
        self._table, self._world_size = table, world_size
        self._leases: dict[int, Lease] = {}
        self._released: list[int] = []
        self._released_by: dict[int, set[int]] = {}

    def take(self, nbytes: int, op: str, tag: str, exchange: Exchange) -> Lease:
        """A block of at least ``nbytes``, for ``op``. Collective; ``tag`` is what the ranks must agree on.

        Raises:
            HeapError: there is none, not even when all ranks that may have collected Python's garbage.
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
        """Free what all ranks have let go of, Python's garbage included. Collective, as :meth:`take`.

        A rank that captures a graph collects no garbage: that may hold graphs or streams, which no capture lets go of.
        It meets the others all the same, and what it has not let go of is kept by all.
        """
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            gc.collect()
        self._free_what_all_released(tag, exchange)

    def at(self, offset: int) -> Lease | None:
        """The lease of the block that begins at ``offset``, if this rank holds it."""
        lease = self._leases.get(offset)
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
