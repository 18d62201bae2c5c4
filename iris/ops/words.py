"""What travels as words (:func:`iris.device.words.store_words`): little, whose flags would cost more. Pure: no GPU."""

from __future__ import annotations

import torch

from iris.ops.algorithms import REDUCE_SCATTER, TRAITS
from iris.ops.config import FusedConfig
from iris.ops.problem import Problem

WORDS_NBYTES = {(1, 4): 3 << 20, (2, 4): 3 << 20, (1, 8): 512 << 10, (2, 8): 768 << 10}
"""By number of hops, and bytes of a word: the most that a rank sends as words in each hop, to all peers together.
Beyond that programs, which wait for all words of a block before the next, lose more than the flags cost that are saved,
and words of eight bytes more links (2 and 4 × H200, 2026-11-22 and 27)."""
_GATHERED_NBYTES, _FEW_RANKS = 8 << 20, 8
"""Of so few ranks, in words of four bytes: the most that the parts of all are together, in each hop (2, 4 and 8 × H200,
2026-11-27)."""
TILE_WORDS_NBYTES = 4 << 20
"""The most that a matmul kernel's tiles send as words of four bytes, to all peers together, while other tiles are
computed; of words of eight bytes half as much (2 × H200, 2026-11-22)."""


def word_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the words that carry ``dtype``, four bytes each (:func:`iris.device.words.store_words`)."""
    return torch.int32 if dtype.is_floating_point else torch.int64


def words_nbytes(elements: int, dtype: torch.dtype) -> int:
    """Bytes of the words that carry so many elements."""
    return elements * dtype.itemsize // 4 * word_dtype(dtype).itemsize


def in_words(sent_nbytes: float, dtype: torch.dtype, world_size: int, hops: int) -> bool:
    """Whether an exchange goes by words, of ``hops`` hops in each of which a rank sends ``sent_nbytes`` of ``dtype`` to
    all peers together."""
    if world_size == 1:
        return False
    nbytes = word_dtype(dtype).itemsize
    if nbytes == 4 and world_size <= _FEW_RANKS:
        return sent_nbytes * world_size <= _GATHERED_NBYTES * (world_size - 1)
    return sent_nbytes <= WORDS_NBYTES[hops, nbytes]


def tiles_in_words(nbytes: int, dtype: torch.dtype, world_size: int) -> bool:
    """Whether tiles of so many bytes of ``dtype`` in all, which a matmul kernel sends to each peer, travel as words."""
    return world_size > 1 and (world_size - 1) * nbytes * word_dtype(dtype).itemsize <= 4 * TILE_WORDS_NBYTES


def sent_in_words(problem: Problem, config: FusedConfig) -> bool:
    """Whether the tiles of ``one_shot``, or of ``two_shot`` in one round, travel as words, where the workspace has no
    flags for them."""
    traits = TRAITS[problem.op][config.algorithm]
    if traits.exchange or not traits.words:
        return False
    nbytes = tiles_sent(problem, config)[1] * config.tile_elements * problem.output_dtype.itemsize
    if config.algorithm == "two_shot":  # what one rank owns: parts of it go there, and its sum to all
        return config.num_rounds == 1 and tiles_in_words(2 * nbytes, problem.output_dtype, problem.world_size)
    return tiles_in_words(nbytes, problem.output_dtype, problem.world_size)


def tiles_sent(problem: Problem, config: FusedConfig) -> tuple[int, int]:
    """Slots for each tile that a rank sums, and the number of these tiles."""
    world = problem.world_size
    by_rows = problem.op == REDUCE_SCATTER or config.algorithm == "copy_engine"
    rows = -(-problem.m // world) if by_rows else problem.m
    tiles = -(-rows // config.block_size_m) * -(-problem.n // config.block_size_n)
    if config.algorithm == "one_shot":
        return 1, tiles
    return 1 if config.algorithm == "atomic" else world, tiles if by_rows else -(-tiles // world)
