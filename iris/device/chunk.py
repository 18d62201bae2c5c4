"""Chunks of finished tiles, for those who carry them on: the copy engine, or programs that only move data."""

import triton
import triton.language as tl

from iris.device.handle import rank
from iris.device.sync import arrive, signal


@triton.jit
def counted_after(handle, slots, shard, index, per_shard, flags, epoch, SITE: tl.constexpr):
    """Count a tile that this program has stored in its rank's memory. With the last one of its chunk, the chunk's word
    in ``slots.done`` takes the epoch.

    A chunk is ``flags.blocks_per_chunk`` tiles of one shard that follow each other; ``flags.counters`` has a counter
    and ``slots.done`` a word for each of the ``flags.chunks`` chunks of each shard.
    """
    chunk = index // flags.blocks_per_chunk
    tiles = min(per_shard - chunk * flags.blocks_per_chunk, flags.blocks_per_chunk)
    which = shard * flags.chunks + chunk
    if arrive(flags.counters + which, tiles):
        signal(slots.done + which, epoch, rank(handle), handle)
