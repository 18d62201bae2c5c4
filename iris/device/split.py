"""Tiles that several programs share, each with a part of K: how Stream-K's partial sums come together."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from iris.device.handle import rank
from iris.device.schedule import MOST_PARTS, split_start, split_worker
from iris.device.sync import signal, wait, wait_all

_MANY: tl.constexpr = tl.constexpr(3)
"""Programs besides the first from which on the parts of a split tile are added up in slices."""
SLICE_ELEMENTS: tl.constexpr = tl.constexpr(2048)
"""Of a slice of a tile."""
_LANES: tl.constexpr = tl.constexpr(16)
"""At least as many as programs can share a tile."""


class Share(NamedTuple):
    """A program's part in a split tile. ``worker``: its number, among the ``sharers`` of all split tiles; ``first``,
    ``last``: of those that share the tile; ``adders``: how many of these, the first ones, are to add up its parts: all
    but a last one that has another tile to go on with."""

    worker: Any
    sharers: Any
    first: Any
    last: Any
    adders: Any


@triton.jit
def _partial_pointers(partials, worker, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where ``worker`` leaves its part of a split tile."""
    start = partials + worker.to(tl.int64) * (BLOCK_M * BLOCK_N)
    return start + tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]


@triton.jit
def handed_over(
    acc,
    handle,
    flags,
    epoch,
    partials,
    worker,
    sharers,
    split_tile,
    per_tile,
    split_iterations,
    SITE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The parts of a split tile, brought together: returns the sum, if this is the first of the programs that share it
    and they are few; whether they are many; and the :class:`Share` of this one.

    Few programs add up along a binary tree: each leaves its part in ``partials`` for the one below it and goes on. Many
    all leave their parts there, for :func:`slice_sum`.
    """
    first = split_worker(split_tile * per_tile, sharers, split_iterations)
    last = split_worker((split_tile + 1) * per_tile - 1, sharers, split_iterations)
    place = worker - first
    many = last - first >= _MANY
    if not many:
        step = 1
        while (step <= last - first) & (place % (2 * step) == 0):
            helper = worker + step
            if helper <= last:
                wait(flags.split + helper, epoch, rank(handle), handle, SITE)
                acc += tl.load(_partial_pointers(partials, helper, BLOCK_M, BLOCK_N))
            step *= 2
    if many | (place > 0):
        # A program may be the last of one tile and the first of the next, so it has two places.
        mine = worker if place > 0 else sharers + worker
        tl.store(_partial_pointers(partials, mine, BLOCK_M, BLOCK_N), acc)
        signal(flags.split + mine, epoch, rank(handle), handle)
    goes_on = split_start(last + 1, sharers, split_iterations) > (split_tile + 1) * per_tile
    adders = last - first + tl.where(goes_on, 0, 1)
    return acc, many, Share(worker, sharers, first, last, adders)


@triton.jit
def wait_parts(handle, flags, epoch, share, SITE: tl.constexpr):
    """Wait until all programs that share a tile have left their parts of it."""
    lanes = tl.arange(0, _LANES)
    parts = tl.where(lanes == 0, share.sharers + share.first, share.first + lanes)
    wait_all(flags.split + parts, epoch, rank(handle), share.first + lanes <= share.last, handle, SITE)


@triton.jit
def slice_sum(partials, share, within, SIZE: tl.constexpr):
    """The sum of the parts of a tile, in the order of the programs, at the elements ``within``; and where the first
    program's part of it is."""
    slices = partials + share.first.to(tl.int64) * SIZE + within
    start = slices + share.sharers.to(tl.int64) * SIZE
    total = tl.load(start)
    for helper in tl.static_range(1, MOST_PARTS + 1):
        # All loads at once: one after the other, each would be waited for.
        total += tl.load(slices + helper * SIZE, mask=within * 0 + helper <= share.last - share.first, other=0)
    return total, start


@triton.jit
def combined(
    acc, handle, flags, epoch, partials, share, SITE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Sum the parts that many programs have left of a tile: each adds up some slices, and the first gets them all."""
    place = share.worker - share.first
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    SLICE: tl.constexpr = min(SIZE, SLICE_ELEMENTS)
    if place < share.adders:
        wait_parts(handle, flags, epoch, share, SITE)
        for number in range(place, SIZE // SLICE, share.adders):
            total, start = slice_sum(partials, share, number * SLICE + tl.arange(0, SLICE), SIZE)
            tl.store(start, total)
        signal(flags.split + 2 * share.sharers + share.first + place, epoch, rank(handle), handle)
    if place == 0:
        lanes = tl.arange(0, _LANES)
        done = flags.split + 2 * share.sharers + share.first + lanes
        wait_all(done, epoch, rank(handle), lanes < share.adders, handle, SITE)
        acc = tl.load(_partial_pointers(partials, share.sharers + share.first, BLOCK_M, BLOCK_N))
    return acc
