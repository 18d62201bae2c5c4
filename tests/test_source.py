"""How far a matmul may read A while it arrives: never beyond the pieces that are there, in any order of arrival."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from ranks import BACKEND, Failure, Ranks, context, failure_of, fresh, worlds

import iris
from iris.device.handle import TIMEOUT_NS, rank, world_size
from iris.device.sync import signal, wait
from iris.device.tile import Flags, Matrix
from iris.ops import FusedConfig, Problem, new_workspace
from iris.ops.gathering import arrived_source, pull_source
from iris.ops.launching import DEFER_FROM_TILES, run
from iris.ops.plan import Plan

EPOCH = 3
CASES = [
    (k, block_k, blocks_per_piece) for k, block_k in ((24, 32), (40, 16), (33, 16)) for blocks_per_piece in (1, 2, 100)
]
"""Columns per rank, columns of a block, blocks that one flag announces."""


@triton.jit
def source_kernel(
    handle, flags, a, starts, ends, count, K,
    SEGMENTS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, EPOCH: tl.constexpr,
):  # fmt: skip
    for index in range(count):
        k = tl.load(starts + index)
        _, ready = arrived_source(handle, a, flags, EPOCH, None, 0, 0, k, 16, K, 2, SEGMENTS, 16, BLOCK_K, EVEN_K)
        tl.store(ends + index, ready)


class Arrivals:
    """A gathered A, some of whose pieces have arrived. Columns and pieces are numbered from the rank's own on, round
    the ring; if there are only whole blocks, the first column is that of the first block."""

    def __init__(
        self, ctx: iris.Iris, k_per_rank: int, block_k: int, blocks_per_piece: int, here: Callable[[int, int], bool]
    ) -> None:
        self.ctx, self.k_per_rank, self.block_k = ctx, k_per_rank, block_k
        self.total = k_per_rank * ctx.world_size
        self.piece_k = min(blocks_per_piece * block_k, k_per_rank)
        self.pieces = -(-k_per_rank // self.piece_k)
        self.even = self.total % block_k == 0
        own = ctx.rank * k_per_rank
        self.skipped = -own % block_k if self.even else 0
        count = ctx.world_size * self.pieces
        self.here = [here(piece, count) for piece in range(count)]

    def piece(self, column: int) -> int:
        """The piece that ``column`` is in."""
        place = (column + self.skipped) % self.total
        return place // self.k_per_rank * self.pieces + place % self.k_per_rank // self.piece_k

    def blocks(self) -> list[tuple[int, int]]:
        """The first column and the end of each block; a rank's last block is short if not all are whole."""
        if self.even:
            return [(start, start + self.block_k) for start in range(0, self.total, self.block_k)]
        return [
            (segment + start, segment + min(start + self.block_k, self.k_per_rank))
            for segment in range(0, self.total, self.k_per_rank)
            for start in range(0, self.k_per_rank, self.block_k)
        ]

    def ends(self, starts: list[int]) -> list[int]:
        """How far the source allows reading, from each of ``starts``."""
        ready = torch.zeros(len(self.here), dtype=torch.int32)
        for piece, here in enumerate(self.here):
            owner = (self.ctx.rank + piece // self.pieces) % self.ctx.world_size
            ready[owner * self.pieces + piece % self.pieces] = EPOCH if here else EPOCH - 1
        device = self.ctx.device
        ends = torch.zeros(len(starts), dtype=torch.int32, device=device)
        flags = Flags(None, ready.to(device), None, None, 1, 1, self.pieces, self.piece_k)
        source_kernel[(1,)](
            self.ctx.handle, flags, Matrix(torch.zeros(16, device=device), 1, 1),
            torch.tensor(starts, dtype=torch.int32, device=device), ends, len(starts), self.k_per_rank,
            SEGMENTS=self.ctx.world_size, BLOCK_K=self.block_k, EVEN_K=self.even, EPOCH=EPOCH,
        )  # fmt: skip
        self.ctx.synchronize()
        return ends.tolist()


def every_case(seed: int) -> list[str]:
    """All errors found. In each case the first pieces are there, the next is not, and some of the others are."""
    ctx = context()
    chance = random.Random(seed + ctx.rank)
    wrong = []
    for case in CASES:
        gap = chance.random()
        there = Arrivals(ctx, *case, lambda piece, count: piece <= gap * count or chance.random() < 0.5)  # noqa: B023
        first_gap = (*there.here, False).index(False)
        blocks = there.blocks()
        starts = [start for start, end in blocks if all(there.piece(c) < first_gap for c in range(start, end))]
        starts = chance.sample(starts[:-1], min(len(starts[:-1]), 3)) + starts[-1:]
        for start, end in zip(starts, there.ends(starts) if starts else [], strict=True):
            if not start < end <= there.total:
                wrong.append(f"{case}: {start} to {end} of {there.total}")
            early = [column for column in range(start, end) if not there.here[there.piece(column)]]
            if early:
                wrong.append(f"{case}: {start} to {end}, without {early}")
    return wrong


@pytest.mark.parametrize("ranks", worlds(4, 4), indirect=True)
def test_nothing_is_read_before_it_is_there(ranks: Ranks, seed: int) -> None:
    assert ranks.run(every_case, seed) == [[]] * ranks.world_size


def reach_round(blocks_per_piece: int) -> Failure:
    """Wait for the block that ends in the own first columns; only these columns are missing."""

    def attempt() -> None:
        with fresh() as ctx:
            ctx.handle.info[TIMEOUT_NS.value] = 300_000_000
            there = Arrivals(ctx, 40, 16, blocks_per_piece, lambda piece, _: piece > 0)
            assert there.skipped == 8 * (ctx.rank % 2)
            there.ends([there.total - 16])

    return failure_of(attempt)


@pytest.mark.parametrize("blocks_per_piece", [1, 100])
@pytest.mark.parametrize("ranks", worlds(4, 4), indirect=True)
def test_a_block_that_reaches_round_waits_for_the_columns_there(ranks: Ranks, blocks_per_piece: int) -> None:
    """The ranks that wait give up; the others, which have all that they need, only notice that those leave."""
    failures = ranks.run(reach_round, blocks_per_piece)
    assert {failure.kind for failure in failures[1::2]} <= {"WaitTimeout", "PeerDied"}
    assert any(failure.kind == "WaitTimeout" for failure in failures[1::2])


def own_plan(seed: int) -> float:
    """The largest error of a user's launch whose A is cut by columns, each rank's part being read in place."""
    with fresh(1 << 20) as ctx:
        world, (m, n, k) = ctx.world_size, (24, 16, 40)
        generator = torch.Generator().manual_seed(seed)
        whole, b = torch.randn(m, k * world, generator=generator), torch.randn(k * world, n, generator=generator)
        a = ctx.as_symmetric(whole[:, ctx.rank * k :][:, :k].to(ctx.device))
        output = torch.empty(m, n, device=ctx.device)
        problem = Problem("mine", m, n, k * world, a.dtype, world)
        config = FusedConfig(block_size_m=16, block_size_n=16, block_size_k=16)
        workspace = new_workspace(ctx, "mine", "pull")
        plan = Plan(0, source=pull_source, segments=world)
        run(ctx, problem, plan, output, a, b.to(ctx.device), config=config, workspace=workspace)
        ctx.synchronize()
        return float((output.cpu().double() - whole.double() @ b.double()).abs().max())


@pytest.mark.parametrize("ranks", worlds(2, 3), indirect=True)
def test_a_source_is_asked_until_k_is_through(ranks: Ranks, seed: int) -> None:
    assert max(ranks.run(own_plan, seed)) < 1e-4


@triton.jit
def partial_source(
    handle, a, flags, epoch, slots, shard, block_m, k, M, K,
    SITE: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """As many more columns of A are here as ``slots`` say for blocks of so many rows."""
    return a.ptr, k + tl.load(slots + BLOCK_M)


def said_by_a_source(columns: int, piecewise: bool) -> tuple[Failure, float]:
    """What becomes of a launch whose source always says that ``columns`` more are here, and the error of the result."""
    with fresh(1 << 20) as ctx:
        a, b = torch.ones(16, 64, device=ctx.device), torch.ones(64, 16, device=ctx.device)
        output = torch.zeros(16, 16, device=ctx.device)
        problem = Problem("mine", 16, 16, 64, a.dtype, 1)
        config = FusedConfig(block_size_m=16, block_size_n=16, block_size_k=16)
        workspace = new_workspace(ctx, "mine", "here")
        said = torch.full((17,), -1, dtype=torch.int32, device=ctx.device)
        said[16] = columns
        plan = Plan(0, source=partial_source, alone=True, piecewise=piecewise)
        call = partial(run, ctx, problem, plan, output, a, b, config=config, workspace=workspace, slots=said)
        failure = failure_of(call)
        return failure, float((output - 64).abs().max())


@pytest.mark.skipif(BACKEND != "sim", reason="compiled kernels do not check it")
@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
@pytest.mark.parametrize(
    ("columns", "piecewise", "words"),
    [
        (16, True, ""),
        (64, False, ""),
        (16, False, "SOURCE says that only a part of K is here: Plan(piecewise=True)"),
        (0, True, "SOURCE must wait for at least one column after k"),
        (5, True, "SOURCE stops within a block of K"),
    ],
)
def test_a_source_that_says_what_cannot_be_is_told(ranks: Ranks, columns: int, piecewise: bool, words: str) -> None:
    ((failure, excess),) = ranks.run(said_by_a_source, columns, piecewise)
    assert words in failure.message and failure.kind == ("InterpreterError" if words else "nothing")
    assert words or excess == 0


@triton.jit
def behind_the_next_rank(
    handle, a, flags, epoch, slots, shard, block_m, k, M, K,
    SITE: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """A source: a block of rows may be read when the next rank has announced the previous one."""
    if block_m > 0:
        wait(flags.ready + block_m - 1, epoch, (rank(handle) + 1) % world_size(handle), handle, SITE)
    return a.ptr, K


@triton.jit
def announced_after(handle, slots, shard, index, per_shard, flags, epoch, SITE: tl.constexpr):
    """Tell the previous rank that a tile is stored."""
    signal(flags.ready + index, epoch, (rank(handle) + world_size(handle) - 1) % world_size(handle), handle)


def tile_by_tile(tiles: int, seed: int) -> float:
    """The largest error if ranks with one program each wait for each other's tiles, one after the other."""
    with fresh(1 << 22, timeout_s=5) as ctx:
        generator = torch.Generator().manual_seed(seed)
        a, b = torch.randn(16 * tiles, 32, generator=generator), torch.randn(32, 16, generator=generator)
        output = torch.empty(16 * tiles, 16, device=ctx.device)
        problem = Problem("mine", 16 * tiles, 16, 32, a.dtype, ctx.world_size)
        config = FusedConfig(block_size_m=16, block_size_n=16, block_size_k=32, num_sms=1, group_size_m=1)
        plan = Plan(0, source=behind_the_next_rank, after=announced_after, piecewise=False)
        workspace = new_workspace(ctx, "mine", "chained", num_flags=tiles)
        run(ctx, problem, plan, output, a.to(ctx.device), b.to(ctx.device), config=config, workspace=workspace)
        ctx.synchronize()
        return float((output.cpu().double() - a.double() @ b.double()).abs().max())


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_tiles_that_a_source_waits_for_are_announced_at_once(ranks: Ranks, seed: int) -> None:
    assert max(ranks.run(tile_by_tile, DEFER_FROM_TILES + 1, seed)) < 1e-4


def biased_by_a_fraction() -> list[float]:
    """A product of int8, without scales, plus a bias of floats, as an op of one's own may have it."""
    with fresh() as ctx:
        a, b = (torch.zeros(shape, dtype=torch.int8, device=ctx.device) for shape in ((16, 32), (32, 16)))
        output, bias = torch.empty(16, 16, device=ctx.device), torch.full((16,), 0.75, device=ctx.device)
        run(
            ctx, Problem("mine", 16, 16, 32, torch.int8, ctx.world_size), Plan(0, alone=True), output, a, b,
            config=FusedConfig(block_size_m=16, block_size_n=16, block_size_k=32),
            workspace=new_workspace(ctx, "mine", "local"), bias=bias, bias_is=2,
        )  # fmt: skip
        ctx.synchronize()
        return [float(one) for one in output.unique()]


@pytest.mark.parametrize("ranks", worlds(1, 2)[:1], indirect=True)
def test_a_bias_of_floats_is_added_to_whole_numbers_as_it_is(ranks: Ranks) -> None:
    assert ranks.run(biased_by_a_fraction) == [[0.75]] * ranks.world_size
