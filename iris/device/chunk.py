"""Chunks of finished tiles, for those who carry them on: the copy engine, or programs that only move data."""

import triton
import triton.language as tl

from iris.device.handle import rank
from iris.device.sync import arrive, signal, wait_all_entered


@triton.jit
def complete_chunk(handle, done, tile, flags, epoch, SITE: tl.constexpr):
    """Count a tile that this program has stored. When it is the last one of its chunk, and all ranks have entered the
    call, the chunk's word in ``done`` takes the epoch: peers' memory may then be written.

    A chunk is ``flags.blocks_per_chunk`` tiles of one shard that follow each other; ``flags.counters`` has a counter and
    ``done`` a word for each of the ``flags.chunks`` chunks of each shard.
    """
    chunk = tile.index // flags.blocks_per_chunk
    tiles = min(tile.per_shard - chunk * flags.blocks_per_chunk, flags.blocks_per_chunk)
    which = tile.shard * flags.chunks + chunk
    if arrive(flags.counters + which, tiles):
        wait_all_entered(flags.turnstile, epoch, handle, SITE)
        signal(done + which, epoch, rank(handle), handle)
