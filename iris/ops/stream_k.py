"""The host's half of :mod:`iris.device.stream_k`: what Stream-K splits, into what, and among how many programs."""

from __future__ import annotations

from iris.device.schedule import MOST_PARTS
from iris.ops.config import FusedConfig, Target

_MIN_STRIP = 64
"""The fewest columns of a strip: a narrower strip is bound by reading A."""


def split_tiles(tiles: int, workers: int, config: FusedConfig) -> int:
    """How many of ``tiles`` Stream-K splits: those that :func:`iris.device.schedule.whole_tiles` leaves over."""
    left = tiles % workers
    return left + workers if config.two_tiles and left and tiles > workers else left


def strips_of(tiles: int, workers: int, config: FusedConfig) -> int:
    """How many strips of columns each split tile is cut into, if the sink accepts strips.

    Fewer programs share a narrower tile, so they hand over fewer partial sums. On an H200, 2026-11-23, 8 tiles of
    128 × 256 took 5 to 8 µs less in 4 strips, and 12 to 64 tiles up to 10 µs less in 2 (44 tiles: 1 µs more).
    """
    left = split_tiles(tiles, workers, config)
    for strips, sharing in ((4, 4), (2, 1)):
        if 0 < left * strips * sharing <= workers and config.block_size_n // strips >= _MIN_STRIP:
            return strips
    return 1


def strip_stages(config: FusedConfig, strips: int, target: Target) -> int:
    """Stages of the loop over a strip's K: as many as fit into the shared memory that those of a whole tile take."""
    m, n, others = config.block_size_m, config.block_size_n, target.stages_in_registers
    return others + (config.num_stages - others) * (m + n) // (m + n // strips)


def sharers_of(tiles: int, per_tile: int, workers: int) -> int:
    """How many programs share ``tiles``: :func:`iris.device.schedule.split_sharers` on the host."""
    straddling = tiles > workers or (2 * tiles > workers and 5 * tiles <= 3 * workers)
    sharers = workers if straddling else workers // tiles * tiles
    return min(sharers, tiles * min(per_tile, int(MOST_PARTS.value)))
