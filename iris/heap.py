"""The symmetric heap's bookkeeping: offsets only, no memory, no GPU.

All ranks make the same calls in the same order and therefore hold the same table, so an offset is all that a peer needs
to find a block. Allocation is first fit, lowest offset first; adjoining free blocks are merged.
"""

from __future__ import annotations

from dataclasses import dataclass

from iris.errors import HeapError

ALIGNMENT = 1024
"""Bytes. Every block starts and ends on this boundary, so TMA and 16-byte accesses are always legal."""


def align_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """``nbytes`` rounded up to a multiple of ``alignment``."""
    return -(-nbytes // alignment) * alignment


def format_bytes(nbytes: int) -> str:
    """``nbytes`` in a readable unit: ``3.0 MiB``."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size, unit = nbytes / 1024, "KiB"
    for larger in ("MiB", "GiB"):
        if size >= 1024:
            size, unit = size / 1024, larger
    return f"{size:.1f} {unit}"


@dataclass(frozen=True)
class Block:
    """A range of the heap."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class HeapTable:
    """Which ranges of a heap of ``size`` bytes are in use."""

    def __init__(self, size: int) -> None:
        self.size = align_up(size)
        self._free: list[Block] = [Block(0, self.size)]
        self._used: dict[int, Block] = {}

    @property
    def free_bytes(self) -> int:
        return sum(block.nbytes for block in self._free)

    @property
    def largest_free(self) -> int:
        return max((block.nbytes for block in self._free), default=0)

    def allocate(self, nbytes: int, what: str = "allocate") -> Block:
        """The lowest free block of at least ``nbytes``.

        Raises:
            HeapError: no free block is large enough; the error says what was asked for, what is free, and which
                ``heap_size`` would be enough.
        """
        wanted = max(align_up(nbytes), ALIGNMENT)
        for index, hole in enumerate(self._free):
            if hole.nbytes >= wanted:
                block = Block(hole.offset, wanted)
                rest = Block(block.end, hole.nbytes - wanted)
                self._free[index : index + 1] = [rest] if rest.nbytes else []
                self._used[block.offset] = block
                return block
        raise HeapError(
            f"{what}: symmetric heap exhausted: requested {format_bytes(wanted)} ({wanted} bytes), "
            f"free {format_bytes(self.free_bytes)} of {format_bytes(self.size)}, "
            f"largest free block {format_bytes(self.largest_free)} ({self.largest_free} bytes). "
            f"Free tensors you no longer need, or create the context with heap_size={self.would_do(wanted)}."
        )

    def would_do(self, nbytes: int) -> int:
        """The size of a heap that would hold a block of ``nbytes`` in addition to what is in use now."""
        used = max((block.end for block in self._used.values()), default=0)  # the larger heap would have these holes
        return align_up(used + align_up(nbytes), 1 << 20)

    def holding(self, offset: int) -> Block | None:
        """The block in use that ``offset`` lies in."""
        return next((block for block in self._used.values() if block.offset <= offset < block.end), None)

    def free(self, offset: int) -> None:
        """Return the block at ``offset``; adjoining free blocks become one."""
        block = self._used.pop(offset, None)
        if block is None:
            raise HeapError(f"free: no block starts at offset {offset}")
        index = next((i for i, hole in enumerate(self._free) if hole.offset > offset), len(self._free))
        self._free.insert(index, block)
        for left in (index, index - 1):
            if 0 <= left < len(self._free) - 1 and self._free[left].end == self._free[left + 1].offset:
                a, b = self._free[left], self._free[left + 1]
                self._free[left : left + 2] = [Block(a.offset, a.nbytes + b.nbytes)]
