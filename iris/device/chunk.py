"""Chunks of finished tiles, for what moves them on: the copy engine, or programs that only move data."""

import triton
import triton.language as tl

from iris.device.handle import rank
from iris.device.sync import arrive, signal


@triton.jit
def counted_after(handle, slots, shard, index, per_shard, flags, epoch, SITE: tl.constexpr):
    """Count a tile that this program has stored in its rank's memory. The last tile of a chunk sets the chunk's word in
    ``slots.done`` to the epoch.

    A chunk is ``flags.blocks_per_chunk`` consecutive tiles of one shard. For each of the ``flags.chunks`` chunks of
    each shard, ``flags.counters`` has a counter and ``slots.done`` a word.
    """
    chunk = index // flags.blocks_per_chunk
    tiles = min(per_shard - chunk * flags.blocks_per_chunk, flags.blocks_per_chunk)
    which = shard * flags.chunks + chunk
    if arrive(flags.counters + which, tiles):
        signal(slots.done + which, epoch, rank(handle), handle)
