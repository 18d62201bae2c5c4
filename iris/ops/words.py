"""What travels as words (:func:`iris.device.words.store_words`): amounts so small that flags would cost more. Pure: no
GPU."""

from __future__ import annotations

import torch

from iris.ops.algorithms import REDUCE_SCATTER, TRAITS
from iris.ops.config import FusedConfig
from iris.ops.problem import Problem

WORDS_NBYTES = {(1, 4): 3 << 20, (2, 4): 3 << 20, (1, 8): 512 << 10, (2, 8): 768 << 10}
"""By number of hops and bytes of a word: the most bytes that a rank sends as words in each hop, to all peers together.
With more, programs lose more by waiting for all words of a block before the next block than they save by not using
flags, and words of eight bytes take more of the links (2 and 4 × H200, 2026-11-22 and 27)."""
_GATHERED_NBYTES, _FEW_RANKS = 8 << 20, 8
"""With at most _FEW_RANKS ranks and words of four bytes, instead of that: the most bytes that the parts of all ranks
have together, in each hop (2, 4 and 8 × H200, 2026-11-27)."""
TILE_WORDS_NBYTES = 4 << 20
"""The most bytes that the tiles of a matmul kernel send as words of four bytes, to all peers together, while other
tiles are computed; in words of eight bytes half as many (2 × H200, 2026-11-22)."""


def word_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the words that carry ``dtype``: each carries four bytes (:func:`iris.device.words.store_words`)."""
    return torch.int32 if dtype.is_floating_point else torch.int64


def words_nbytes(elements: int, dtype: torch.dtype) -> int:
    """Bytes of the words that carry ``elements`` elements."""
    return elements * dtype.itemsize // 4 * word_dtype(dtype).itemsize


def in_words(sent_nbytes: float, dtype: torch.dtype, world_size: int, hops: int) -> bool:
    """Whether an exchange uses words; it has ``hops`` hops, and in each a rank sends ``sent_nbytes`` bytes of ``dtype``
    to all peers together."""
    if world_size == 1:
        return False
    nbytes = word_dtype(dtype).itemsize
    if nbytes == 4 and world_size <= _FEW_RANKS:
        return sent_nbytes * world_size <= _GATHERED_NBYTES * (world_size - 1)
    return sent_nbytes <= WORDS_NBYTES[hops, nbytes]


def tiles_in_words(nbytes: int, dtype: torch.dtype, world_size: int) -> bool:
    """Whether a matmul kernel sends tiles as words; it sends ``nbytes`` bytes of ``dtype`` in all to each peer."""
    return world_size > 1 and (world_size - 1) * nbytes * word_dtype(dtype).itemsize <= 4 * TILE_WORDS_NBYTES


def sent_in_words(problem: Problem, config: FusedConfig) -> bool:
    """Whether the tiles of ``one_shot``, or of ``two_shot`` in one round, travel as words; the workspace then has no
    flags for them."""
    traits = TRAITS[problem.op][config.algorithm]
    if traits.exchange or not traits.words:
        return False
    nbytes = tiles_sent(problem, config)[1] * config.tile_elements * problem.output_dtype.itemsize
    if config.algorithm == "two_shot":  # twice what one rank owns: parts of it go there, and its sum goes to all
        return config.num_rounds == 1 and tiles_in_words(2 * nbytes, problem.output_dtype, problem.world_size)
    return tiles_in_words(nbytes, problem.output_dtype, problem.world_size)


def tiles_sent(problem: Problem, config: FusedConfig) -> tuple[int, int]:
    """The number of slots for each tile that a rank sums, and the number of these tiles."""
    world = problem.world_size
    by_rows = problem.op == REDUCE_SCATTER or config.algorithm == "copy_engine"
    rows = -(-problem.m // world) if by_rows else problem.m
    tiles = config.tiles(rows, problem.n)
    if config.algorithm == "one_shot":
        return 1, tiles
    return 1 if config.algorithm == "atomic" else world, tiles if by_rows else -(-tiles // world)
