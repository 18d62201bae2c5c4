"""Parts that travel as words, and parts that travel with flags: in the exchange of ``low_latency``, and from the matmul
of ``one_shot`` itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from ops_inputs import ALL_REDUCE, IN_WORDS, SMALL, Shape, Way, some, trial
from ranks import BACKEND, Ranks, context, fresh, worlds

from iris.ops import new_workspace
from iris.ops.algorithms import EXCHANGING
from iris.ops.config import FusedConfig
from iris.ops.exchange import FLAGS, blocks_of
from iris.ops.problem import DTYPES, Problem, output_dtype
from iris.ops.room import room
from iris.ops.words import TILE_WORDS_NBYTES, WORDS_NBYTES, in_words, tiles_in_words, word_dtype
from iris.ops.workspace import MIN_FLAGS

SHAPES: tuple[Shape, ...] = ((17, 33, 24), (3, 31, 8), (20, 70, 8), (1, 1, 1))
STAGING_NBYTES = 1 << 20
LATE_S = 0.005


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 8, 16])
@pytest.mark.parametrize(
    "part",
    [(1, 1), (1, 4096), (16, 2048), (24, 5000), (300, 7168), (400, 2304), (16, 4096), (8192, 128), (3000, 3)],
    ids=str,
)
@pytest.mark.parametrize("hops", [1, 2])
def test_blocks_cover_a_part(hops: int, part: tuple[int, int], world_size: int, dtype: torch.dtype) -> None:
    blocks = blocks_of(part, dtype, world_size, 132, hops)
    rows, cols = part
    assert blocks.words == in_words(rows * cols * dtype.itemsize * (world_size - 1), dtype, world_size, hops)
    assert blocks.num_flags == (0 if blocks.words else FLAGS)
    assert -(-rows // blocks.block_m) * -(-cols // blocks.block_n) == blocks.count
    assert blocks.block_m & (blocks.block_m - 1) == blocks.block_n & (blocks.block_n - 1) == 0
    assert blocks.block_n * dtype.itemsize >= 4, "a word holds neighbours in a row"
    whole = -(-rows // blocks.block_m) * blocks.block_m * max(cols, 16 // dtype.itemsize)
    assert blocks.count * blocks.block_m * blocks.block_n <= max(4 * whole, 2048), "an inbox is of blocks"
    if blocks.words:
        words, width = blocks.words_n(dtype), blocks.block_n * dtype.itemsize // 4
        assert words % min(16, width) == 0 and 0 <= 4 * words - cols * dtype.itemsize < 4 * min(16, width)
        assert -(-words // width) == -(-cols // blocks.block_n), "a row has as many blocks of words as of elements"
    nbytes = 2 * world_size * blocks.count * blocks.block_m * blocks.block_n * dtype.itemsize
    carried = nbytes * (hops * word_dtype(dtype).itemsize // 4 if blocks.words else 1)
    assert blocks.inbox_nbytes(world_size, dtype) == carried


def test_words_are_for_little() -> None:
    """Bytes cost the same for any number of ranks that they go to."""
    for world_size in (2, 4, 8, 16):
        for (hops, size), most in WORDS_NBYTES.items():
            dtype = torch.int32 if size == 8 else torch.bfloat16
            if size == 4 and world_size <= 8:
                most = (8 << 20) // world_size * (world_size - 1)
            assert in_words(most, dtype, world_size, hops) and not in_words(most + 1, dtype, world_size, hops)
    assert not in_words(0, torch.bfloat16, 1, 1), "one rank sends nothing: its inbox need not be larger"


@pytest.mark.parametrize(
    ("part", "elements"),
    [
        ((1, 256), 512),
        ((4, 8192), 512),
        ((32, 8192), 512),
        ((64, 8192), 1024),
        ((128, 7168), 1024),
        ((256, 5120), 1024),
    ],
    ids=str,
)
def test_blocks_of_words_are_as_large_as_was_fastest(part: tuple[int, int], elements: int) -> None:
    """Measured on 2 × H200, in bf16: results/2026-11-27/programs-alone-h200-x2.txt."""
    blocks = blocks_of(part, torch.bfloat16, 2, 132, hops=2)
    assert blocks.words and (blocks.block_m, blocks.block_n) == (1, elements)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
@pytest.mark.parametrize("part", [(1, 1), (1, 4096), (16, 2048), (5, 8192), (300, 24)], ids=str)
def test_no_two_threads_share_a_word_and_none_has_those_of_fewer_ranks(
    part: tuple[int, int], world_size: int, dtype: torch.dtype
) -> None:
    """With at least as many vectors as threads, each thread has all ranks' words for its places, and sums them."""
    blocks = blocks_of(part, dtype, world_size, 132)
    words = blocks.block_m * blocks.block_n * dtype.itemsize // 4
    assert 128 <= words and blocks.num_warps in (2, 4)
    assert not blocks.words or words >= 4 * 32 * blocks.num_warps


def test_tiles_in_words_are_for_little() -> None:
    for world_size in (2, 4, 8):
        for dtype, most in ((torch.float16, TILE_WORDS_NBYTES), (torch.int32, TILE_WORDS_NBYTES // 2)):
            most //= world_size - 1
            assert tiles_in_words(most, dtype, world_size) and not tiles_in_words(most + 1, dtype, world_size)
    assert not tiles_in_words(0, torch.float16, 1)


def in_turns(way: Way, dtype: torch.dtype, seed: int) -> tuple[list[float], bool, bool]:
    """Errors of calls of changing shapes with one rank late, by words and by flags, each in its own workspace; and
    whether they used words, and flags."""
    ctx = context()
    by_words, by_flags = (new_workspace(ctx, way.op, way.algorithm, STAGING_NBYTES, count) for count in (0, FLAGS))
    excesses = []
    for call, shape in enumerate(SHAPES):
        one = trial(ctx, way, shape, dtype, seed + call, "column")
        for workspace in (by_words, by_flags):
            if ctx.rank == call % ctx.world_size:
                time.sleep(LATE_S)
            one.run(workspace=workspace)
            excesses.append(one.excess())
            one.spoil()
    # All words that have arrived have been taken: nothing is left where the next ones are expected.
    only_words = bool((by_words.staging == 0xFF).all()) and not bool(by_words.ready.any())
    ctx.barrier()
    return excesses, only_words, bool(by_flags.ready.any())


@pytest.mark.parametrize("ranks", worlds(2) if BACKEND != "sim" else worlds(3, 3), indirect=True)
@pytest.mark.parametrize(
    ("way", "dtype"),
    [(way, dtype) for way in IN_WORDS for dtype in (DTYPES if BACKEND != "sim" else some((torch.float16, torch.int8)))],
    ids=str,
)
def test_words_and_flags(ranks: Ranks, way: Way, dtype: torch.dtype, seed: int) -> None:
    for excesses, only_words, flags_set in ranks.run(in_turns, way, dtype, seed):
        assert max(excesses) <= 1
        assert only_words and flags_set


def numbers_that_are_none(dtype: torch.dtype, seed: int) -> tuple[list[bool], list[float]]:
    """Whether gathers of data with all bits set give only NaNs, which floats with all bits set are, or for int8 the
    result for -1, by both halves of the inbox; and the errors of calls after each."""
    ctx = context()
    found, excesses = [], []
    for call in range(2):
        one = trial(ctx, Way("all_gather_matmul", "low_latency"), (5, 33, 24), dtype, seed + call)
        usual = one.a.view(torch.uint8).clone()
        one.a.view(torch.uint8).fill_(0xFF)
        one.run()
        ctx.synchronize()
        minus_one = -one.b.double().sum(0).expand_as(one.output)
        expected = torch.full_like(minus_one, math.nan) if dtype.is_floating_point else minus_one
        found.append(torch.equal(torch.nan_to_num(one.output.double(), 1e9), torch.nan_to_num(expected, 1e9)))
        one.spoil()
        one.a.view(torch.uint8).copy_(usual)
        one.run()
        excesses.append(one.excess())
    return found, excesses


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_looks_as_if_nothing_had_come_is_sent_all_the_same(ranks: Ranks, dtype: torch.dtype, seed: int) -> None:
    for found, excesses in ranks.run(numbers_that_are_none, dtype, seed):
        assert all(found) and max(excesses) <= 1


FEW = {(1, 4): 32 << 10, (2, 4): 48 << 10}
"""Limits of bytes in words for these tests: with them even small parts are too large for words."""
LARGE = {1: (40, 230), 2: (56, 230)}
"""By hops, the shape of a part of A, or of the product, in fp32, that is then too large between 2 ranks."""


def hops_of(way: Way) -> int:
    return 2 if way.algorithm == "low_latency_two_shot" else 1


def in_any_order(way: Way, seed: int) -> tuple[list[float], set[bool]]:
    """Errors of small and large calls in turns, in the context's own workspaces and in one made for the large ones; and
    the answers to the ops' question whether to use words."""
    hops, excesses, kinds = hops_of(way), [], set()
    rows, cols = LARGE[hops]
    shapes: tuple[Shape, ...] = ((4, 32, 32), (rows * hops, cols, cols), (9, 40, 32), (rows * hops, cols, cols))

    def asked(whether: Callable[..., bool]) -> Callable[..., bool]:
        def answer(*of: Any) -> bool:
            kinds.add(whether(*of))
            return whether(*of)

        return answer

    with (
        fresh(1 << 25) as ctx,
        mock.patch.dict(WORDS_NBYTES, FEW),
        mock.patch("iris.ops.words._GATHERED_NBYTES", 2 * FEW[1, 4]),
        mock.patch("iris.ops.words.TILE_WORDS_NBYTES", FEW[1, 4]),
        mock.patch("iris.ops.exchange.in_words", asked(in_words)),
        mock.patch("iris.ops.words.tiles_in_words", asked(tiles_in_words)),
    ):
        made = new_workspace(ctx, way.op, way.algorithm, 5 << 20, FLAGS)
        for call, shape in enumerate(shapes):
            one = trial(ctx, way, shape, torch.float32, seed + call)
            for workspace in (None, made):
                one.run(workspace=workspace)
                excesses.append(one.excess())
                one.spoil()
    return excesses, kinds


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("way", some(IN_WORDS), ids=str)
def test_parts_that_are_too_large_for_words(ranks: Ranks, way: Way, seed: int) -> None:
    for excesses, kinds in ranks.run(in_any_order, way, seed):
        assert max(excesses) <= 1
        assert kinds == {True, False}


def rows_of_the_inbox(way: Way, dtype: torch.dtype, seed: int) -> tuple[float, int]:
    """The error of calls of three rows, with tiles of ``SMALL``; and how many words of other rows arrived meanwhile."""
    nothing, rows = 77, 3
    with fresh(1 << 23) as ctx:
        words = word_dtype(output_dtype(dtype))
        per_row = SMALL.block_size_n * output_dtype(dtype).itemsize // 4
        slots = 2 * 2 * ctx.world_size * 8  # halves; ways; sources; the most tiles of a call
        workspace = new_workspace(ctx, way.op, way.algorithm, slots * SMALL.block_size_m * per_row * words.itemsize, 0)
        inbox, _ = workspace.inbox(words)
        others = inbox.view(-1, SMALL.block_size_m, per_row)[:, rows:]
        others.fill_(nothing)
        ctx.barrier()
        excesses = []
        for call in range(3):
            one = trial(ctx, way, (rows, 32, 32), dtype, seed + call)
            one.run(workspace=workspace)
            excesses.append(one.excess())
        ctx.barrier()
        return max(excesses), int((others != nothing).sum())


@pytest.mark.parametrize("ranks", worlds(2, 3), indirect=True)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_only_rows_that_there_are_are_sent(ranks: Ranks, algorithm: str, dtype: torch.dtype, seed: int) -> None:
    for excess, others in ranks.run(rows_of_the_inbox, Way(ALL_REDUCE, algorithm), dtype, seed):
        assert excess <= 1 and others == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("world_size", [2, 8])
def test_an_inbox_has_room_for_the_tiles_of_all_ranks_as_words(world_size: int, dtype: torch.dtype) -> None:
    """It has room in each of its halves: otherwise other memory, or the other half, would be overwritten."""
    problem = Problem("matmul_all_reduce", 100, 500, 64, dtype, world_size)
    config = FusedConfig("one_shot", block_size_m=64, block_size_n=64)
    nbytes = 2 * 8 * 64 * 64 * dtype.itemsize
    assert room(problem, config, 132) == (2 * world_size * nbytes, 0)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_each_sender_of_a_relay_has_a_flag_for_each_chunk_of_each_peer(world_size: int) -> None:
    """It sends its own columns, and those of all other peers except the rank that it sends to."""
    problem = Problem("matmul_all_scatter", 16384, 1024, 1024, torch.float16, world_size)
    config = FusedConfig("relay", block_size_m=128, group_size_m=2, comm_sms=48)
    assert room(problem, config, 132).num_flags == (world_size - 1) * 48 * 64


def test_rows_that_ranks_do_not_share_evenly_have_room_for_as_many_each() -> None:
    problem = Problem("matmul_all_reduce", 10, 16, 64, torch.float16, 4)
    assert room(problem, FusedConfig("decomposed"), 132) == (4 * 3 * 16 * 2, 0)


@pytest.mark.parametrize("algorithm", [*EXCHANGING, "one_shot", "two_shot"])
@pytest.mark.parametrize("rows", [1, 16, 64, 128, 512])
def test_a_workspace_for_flags_serves_what_would_go_by_words(algorithm: str, rows: int) -> None:
    """A workspace for the largest batch is large enough for all others."""
    flagged = mock.Mock(flagged=True)
    most, asked = (
        room(Problem("matmul_all_reduce", m, 8192, 2048, torch.bfloat16, 4), FusedConfig(algorithm), 132, flagged)
        for m in (512, rows)
    )
    assert asked.staging_nbytes <= most.staging_nbytes
    assert MIN_FLAGS < asked.num_flags <= most.num_flags
    if algorithm in EXCHANGING:
        assert asked.num_flags == most.num_flags == FLAGS


@pytest.mark.parametrize("hops", [1, 2])
def test_little_by_flags_is_cut_as_much_by_flags_is(hops: int) -> None:
    """In a workspace with flags it is not cut as for words, whose blocks are smaller."""
    words, flags = (blocks_of((8, 2048), torch.float32, 4, 132, hops, by_flags) for by_flags in (False, True))
    assert words.words and words.num_flags == 0
    assert not flags.words and flags.num_flags == FLAGS
    assert flags.block_m * flags.block_n == 512 > words.block_m * words.block_n and flags.block_m > words.block_m
