"""How Stream-K's partial sums come together: tiles that several programs share, each with a part of K."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from iris.device.handle import rank
from iris.device.schedule import MOST_PARTS, split_start, split_worker
from iris.device.sync import signal, wait, wait_all

_MANY: tl.constexpr = tl.constexpr(3)
"""If a tile's first program shares it with at least so many others, its parts are added up in slices."""
SLICE_ELEMENTS: tl.constexpr = tl.constexpr(2048)
"""Elements of a slice of a tile."""
_LANES: tl.constexpr = tl.constexpr(16)
"""The most programs that can share a tile: :data:`MOST_PARTS`, or one more."""


class Share(NamedTuple):
    """A program's part in a split tile. ``worker``: the program's number among the ``sharers`` of all split tiles;
    ``first``, ``last``: the numbers of the first and last program that share this tile; ``adders``: how many of these,
    from the first on, add up its parts: all, or all but the last if that one has another tile to go on with."""

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
    """Bring the parts of a split tile together. Returns ``acc``, which is the tile's sum in the first of the programs
    that share it, if they are few; whether they are many; and this program's :class:`Share`.

    Few programs add up along a binary tree: each adds what higher ones have left in ``partials``, leaves its sum there
    for a lower one, and goes on. Many programs all leave their parts there, for :func:`slice_sum`.
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
        # A program may be the last of one tile and the first of the next, so it has two places in partials.
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
    """The sum of a tile's parts, in the order of the programs, at the elements ``within``. Also returns pointers to
    these elements in the first program's part."""
    slices = partials + share.first.to(tl.int64) * SIZE + within
    start = slices + share.sharers.to(tl.int64) * SIZE
    total = tl.load(start)
    for helper in tl.static_range(1, MOST_PARTS + 1):
        # Masked and unrolled, so that all loads are in flight together: a loop to share.last would wait for each.
        total += tl.load(slices + helper * SIZE, mask=within * 0 + helper <= share.last - share.first, other=0)
    return total, start


@triton.jit
def combined(
    acc, handle, flags, epoch, partials, share, SITE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Sum the parts of a tile that many programs share: each adder sums some slices, and the first program collects
    them. Returns the sum there, and ``acc`` elsewhere."""
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
