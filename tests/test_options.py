"""The fields of a config other than the algorithm change how an op runs, never its result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ops_inputs import GATHER, SCATTER, SMALL, Way, some, trial, ways
from ranks import BACKEND, Ranks, context, fresh, poison, worlds

import iris
from iris.device.turnstile import NEXT_EPOCH
from iris.ops import new_workspace
from iris.ops.algorithms import EXCHANGING, LIBRARY
from iris.ops.config import min_block_size_k
from iris.ops.problem import DTYPES
from iris.ops.room import GATHER_FLAGS

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "hbm_buffer": [
        {"k_per_flag": 1, "num_fetch_stages": 2, "comm_sms": 1, "first_stage_fetch_sms": 3},
        {"k_per_flag": 2, "staged_a_layout": "m_contiguous", "comm_sms": 3},
        {"k_per_flag": 3, "num_fetch_stages": 3, "comm_sms": 2, "first_stage_fetch_sms": 4, "comm_block_n": 16},
        {"k_per_flag": 1 << 70, "num_fetch_stages": 100, "first_stage_fetch_sms": 1, "num_sms": 2},
        {"k_per_flag": 2, "staged_a_layout": "m_contiguous", "num_fetch_stages": 2, "stream_k": True, "num_rounds": 2},
    ],
    "copy_engine": [
        {"num_chunks": 1},
        {"num_chunks": 2},
        {"num_chunks": 3, "num_sms": 1, "num_rounds": 3},
        {"num_chunks": 100, "num_rounds": 100},
    ],
    "decomposed": [
        {"num_chunks": 2},
        {"num_chunks": 100},
        {"num_chunks": 3, "chunk_growth": 0.25},
        {"num_chunks": 2, "chunk_growth": 2.0},
        {"owners_per_matmul": 2},
        {"owners_per_matmul": 3, "num_chunks": 2},
        {"owners_per_matmul": 100},
    ],
    "ring": [{"num_chunks": 2}, {"num_chunks": 100}, {"num_chunks": 2, "chunk_growth": 3}],
    "push": [
        {"num_chunks": 2, "comm_block_m": 32},
        {"num_chunks": 3, "num_sms": 1, "num_rounds": 3},
        {"num_chunks": 100},
        {"comm_sms": 1, "k_per_flag": 1, "num_rounds": 100},
        {"comm_sms": 2, "k_per_flag": 3, "num_fetch_stages": 3, "first_stage_fetch_sms": 4, "comm_block_n": 16},
        {"comm_sms": 3, "k_per_flag": 2, "stream_k": True, "num_rounds": 2},
    ],
    "split": [{"comm_sms": 1, "num_sms": 2}, {"comm_sms": 3}, {"group_size_m": 2, "comm_block_m": 32}],
    "streams": [{"comm_sms": 1, "num_sms": 2}, {"comm_sms": 3}, {"group_size_m": 2, "comm_block_n": 64}],
    "relay": [{"comm_sms": 1, "num_sms": 2}, {"comm_sms": 3}, {"group_size_m": 2, "comm_block_m": 32}],
    "two_shot": [{"num_rounds": 2}, {"num_rounds": 3, "num_sms": 1}, {"num_rounds": 100, "group_size_m": 2}],
    "low_latency": [{"own_matmul": True, "num_sms": 3}, {"own_matmul": True, "stream_k": True, "num_sms": 3}],
    "low_latency_two_shot": [{}, {"own_matmul": True, "stream_k": True, "num_sms": 3}],
    "atomic": [{"num_rounds": 2}, {"num_rounds": 3, "num_sms": 1}, {"num_rounds": 100, "group_size_m": 2}],
}
"""Options by algorithm, in addition to those below; other algorithms run with few programs and a group of rows."""
OTHERS: list[dict[str, Any]] = [{"num_sms": 1}, {"group_size_m": 2}]
LARGE = (33, 17, 55)
"""Three block rows, two block columns and four blocks of K per rank, the last of each ragged."""


def with_options(way: Way, options: dict[str, Any], turn: int, seed: int) -> float:
    ctx = context()
    poison(ctx)
    dtype = DTYPES[turn % len(DTYPES)]
    one = trial(ctx, way, LARGE, dtype, seed, "row")
    one.run(replace(SMALL, **{"block_size_k": min_block_size_k(dtype), "group_size_m": 1, **options}))
    return one.excess()


VARIANTS = [
    pytest.param(way, options, turn, id=f"{way}-{turn}")
    for way in ways()
    if way.algorithm != "baseline"
    for turn, options in enumerate(OPTIONS.get(way.algorithm, OTHERS))
]


@pytest.mark.parametrize("ranks", worlds(2, 8) if BACKEND != "sim" else worlds(2, 2), indirect=True)
@pytest.mark.parametrize(("way", "options", "turn"), some(VARIANTS, 3))
def test_options(ranks: Ranks, way: Way, options: dict[str, Any], turn: int, seed: int) -> None:
    assert max(ranks.run(with_options, way, options, turn, seed)) <= 1


def with_one_column(way: Way, seed: int) -> float:
    one = trial(context(), way, (17, 33, 1), torch.float16, seed, "column")
    one.run(replace(SMALL, stream_k=True, two_tiles=True, own_matmul=way.algorithm in EXCHANGING))
    return one.excess()


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize(
    "way", [way for way in ways() if way.algorithm in EXCHANGING or way.algorithm not in LIBRARY], ids=str
)
def test_stream_k_of_one_column(ranks: Ranks, way: Way, seed: int) -> None:
    """There is nothing to split in it; Triton 3.6 does not compile a loop that would."""
    assert max(ranks.run(with_one_column, way, seed)) <= 1


@pytest.fixture
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Ranks that run twenty programs each, if they are simulated."""
    monkeypatch.setenv("IRIS_SIM_SMS", "20")
    ranks = Ranks(request.param)
    yield ranks
    ranks.end()


def relayed(senders: int, seed: int) -> list[float]:
    ctx, excesses = context(), []
    for turn, shape in enumerate(((60, 40, 24), (3, 8, 16), (20, 150, 40))):
        one = trial(ctx, Way(SCATTER, "relay"), shape, DTYPES[turn], seed + turn, "column")
        config = replace(SMALL, comm_sms=senders, num_sms=senders + 2, group_size_m=1, comm_block_n=16)
        for _ in range(1 + (turn == 0) if BACKEND == "sim" else 3):
            poison(ctx)
            one.spoil()
            one.run(replace(config, block_size_k=min_block_size_k(DTYPES[turn])))
            excesses.append(one.excess())
    return excesses


@pytest.mark.parametrize("senders", [8, 17], ids=["one team", "teams of nine and eight"])
@pytest.mark.parametrize("many", worlds(2, 8) if BACKEND != "sim" else worlds(3, 3), indirect=True)
def test_teams_of_a_relay(many: Ranks, senders: int, seed: int) -> None:
    """There are four chunks, one, and two. Programs of one team carry a chunk round the ring, each up to two blocks of
    it."""
    for excesses in many.run(relayed, senders, seed):
        assert max(excesses) <= 1


def by_the_workspace_alone(way: Way, seed: int) -> float:
    """The error of a call without a config, which runs the algorithm that the workspace was made for."""
    ctx = context()
    workspace = new_workspace(ctx, way.op, way.algorithm, 1 << 17, GATHER_FLAGS)
    one = trial(ctx, way, LARGE, torch.float32, seed)
    one.run(None, workspace)
    return one.excess()


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize(
    "way", [one for one in ways() if one.algorithm in ("one_shot", "low_latency", "ring", "split", "push")], ids=str
)
def test_a_workspace_says_the_algorithm(ranks: Ranks, way: Way, seed: int) -> None:
    assert max(ranks.run(by_the_workspace_alone, way, seed)) <= 1


def chunks_that_arrived(num_chunks: int) -> tuple[int, bool]:
    """How many flags peers set, and whether each holds the epoch of the second call."""
    ctx = context()
    workspace = new_workspace(ctx, GATHER, "copy_engine", 1 << 16, GATHER_FLAGS)
    one = trial(ctx, Way(GATHER, "copy_engine"), (64, 16, 16), torch.float16, num_chunks)
    for _ in range(2):
        one.run(replace(SMALL, num_chunks=num_chunks), workspace)
    ctx.synchronize()
    assert int(workspace.turnstile[NEXT_EPOCH.value]) == 3
    epochs = workspace.ready[workspace.ready != 0]
    return epochs.numel(), bool((epochs == 2).all())


@pytest.mark.parametrize("num_chunks", [1, 3, 4])
@pytest.mark.parametrize("ranks", worlds(2, 3), indirect=True)
def test_num_chunks(ranks: Ranks, num_chunks: int) -> None:
    arrived = {1: 1, 3: 2, 4: 4}[num_chunks] * (ranks.world_size - 1)  # four block rows: for three chunks, two in each
    assert ranks.run(chunks_that_arrived, num_chunks) == [(arrived, True)] * ranks.world_size


def by_its_own_name(gather_dim: int, seed: int) -> tuple[float, float, bool]:
    """The op that is named after its buffer, with all of its own options, and in the workspace of its preamble."""
    ctx = context()
    one = trial(ctx, Way(GATHER, "hbm_buffer", gather_dim), LARGE, torch.bfloat16, seed)
    workspace = iris.ops.all_gather_matmul_hbm_buffer_preamble(ctx, one.a, one.b, SMALL)
    iris.ops.all_gather_matmul_hbm_buffer(
        ctx, one.output, one.a, one.b, None, SMALL, workspace, gather_dim=gather_dim, num_fetch_sms=2, k_per_flag=2,
        fetch_block_m=32, fetch_block_k=16, staged_a_layout="m_contiguous", num_fetch_stages=2, first_stage_fetch_sms=3,
    )  # fmt: skip
    first = one.excess()
    one.spoil()
    free = ctx.heap_free_bytes
    ctx.ops.all_gather_matmul_hbm_buffer(one.output, one.a, one.b, config=SMALL, gather_dim=gather_dim)
    return first, one.excess(), ctx.heap_free_bytes == free


def prepared_for_one(seed: int) -> tuple[int, int]:
    """The bytes that the preamble allocates if there is nothing to gather, and the bytes that the op adds."""
    with fresh(1 << 20) as ctx:
        one = trial(ctx, Way(GATHER, "hbm_buffer", 0), LARGE, torch.bfloat16, seed)
        workspace = iris.ops.all_gather_matmul_hbm_buffer_preamble(ctx, one.a, one.b, SMALL)
        free = ctx.heap_free_bytes
        ctx.ops.all_gather_matmul_hbm_buffer(one.output, one.a, one.b, config=SMALL, gather_dim=0)
        ctx.synchronize()
        return workspace.staging.numel(), free - ctx.heap_free_bytes


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_a_preamble_makes_no_more_than_the_op(ranks: Ranks, seed: int) -> None:
    assert ranks.run(prepared_for_one, seed) == [(0, 0)]


def test_the_names_of_hbm_buffers_options() -> None:
    """Each name is a field of the config."""
    with mock.patch("iris.ops.hbm_buffer.all_gather_matmul") as called:
        iris.ops.all_gather_matmul_hbm_buffer(
            mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock(), config=SMALL, num_fetch_sms=1, k_per_flag=2,
            fetch_block_m=16, fetch_block_k=32, staged_a_layout="m_contiguous", num_fetch_stages=3,
            first_stage_fetch_sms=4, num_warps=2, num_stages=5,
        )  # fmt: skip
    assert called.call_args.kwargs["config"] == replace(
        SMALL, algorithm="hbm_buffer", comm_sms=1, k_per_flag=2, comm_block_m=16, comm_block_n=32,
        staged_a_layout="m_contiguous", num_fetch_stages=3, first_stage_fetch_sms=4, num_warps=2, num_stages=5,
    )  # fmt: skip


@pytest.mark.parametrize("gather_dim", [0, 1])
@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_hbm_buffer_by_its_own_name(ranks: Ranks, gather_dim: int, seed: int) -> None:
    for first, second, kept in ranks.run(by_its_own_name, gather_dim, seed):
        assert max(first, second) <= 1
        assert kept


def one_workspace(way: Way, seed: int) -> list[float]:
    """Errors of calls of different shapes and dtypes, one after the other, in the same workspace."""
    ctx = context()
    workspace = new_workspace(ctx, way.op, way.algorithm, 1 << 18, GATHER_FLAGS)
    shapes = ((17, 16, 40), (9, 5, 70), (17, 16, 40))
    dtypes = (torch.float32, torch.int8, torch.int8)
    excesses = []
    for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        one = trial(ctx, way, shape, dtype, seed + index)
        one.run(replace(SMALL, stream_k=index % 2 == 1, num_chunks=index + 1), workspace)
        excesses.append(one.excess())
    return excesses


@pytest.mark.parametrize("ranks", worlds(2, 4) if BACKEND != "sim" else worlds(2, 2), indirect=True)
@pytest.mark.parametrize("way", some(ways()), ids=str)
def test_one_workspace_for_any_shape_and_dtype(ranks: Ranks, way: Way, seed: int) -> None:
    for excesses in ranks.run(one_workspace, way, seed):
        assert max(excesses) <= 1


def grown_scratch() -> tuple[bool, bool]:
    """Whether memory that a captured call uses still belongs to it after a larger call."""
    ctx = context()
    workspace = new_workspace(ctx, "matmul", "local")
    small = workspace.scratch("partials", 100, torch.float32)
    large = workspace.scratch("partials", 1000, torch.float32)
    again = workspace.scratch("partials", 90, torch.float32)
    return again.data_ptr() == small.data_ptr(), large.numel() >= 1000


@pytest.mark.parametrize("ranks", worlds(1, 2), indirect=True)
def test_scratch_memory_stays_where_it_is(ranks: Ranks) -> None:
    assert ranks.run(grown_scratch) == [(True, True)] * ranks.world_size
