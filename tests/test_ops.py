"""Every op by every algorithm: right results for every dtype and remainder, in any order of calls, whichever rank is
late; the same bits on all ranks."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from ops_inputs import (
    ALL_REDUCE,
    BIASES,
    GATHER,
    IN_WORDS,
    LAYOUTS,
    LOCAL,
    REDUCE_SCATTER,
    SCATTER,
    SHAPES,
    SMALL,
    Shape,
    Way,
    each_way,
    some,
    trial,
    ways,
)
from ranks import BACKEND, Failure, Ranks, context, failure_of, fresh, in_worlds, poison, worlds

import iris
from iris.ops.algorithms import LIBRARY
from iris.ops.exchange import FLAGS
from iris.ops.problem import DTYPES

ALL_WAYS = ways()


def turns(way: Way, dtype: torch.dtype, world_size: int) -> list[int]:
    """The combinations of shapes, biases and layouts to test: two on GPUs, one on simulated ranks."""
    count = 1 if BACKEND == "sim" else 2
    first = ALL_WAYS.index(way) + count * (len(DTYPES) * world_size + DTYPES.index(dtype))
    return list(range(first, first + count))


def results(way: Way, dtype: torch.dtype, seed: int) -> list[tuple[Shape, str, float]]:
    """Errors for some shapes, each with another bias and layout, in memory that holds NaN where nothing was written."""
    ctx = context()
    poison(ctx)
    found = []
    for index in turns(way, dtype, ctx.world_size):
        shape, bias, layout = SHAPES[index % len(SHAPES)], BIASES[index % 3], LAYOUTS[index // 3 % 3]
        one = trial(ctx, way, shape, dtype, seed + index, bias, layout)
        returned = one.run(replace(SMALL, num_chunks=1 + index % 2, num_rounds=1 + index // 2 % 2))
        assert returned is one.output
        found.append((shape, f"bias {bias}, {layout}", one.excess()))
    return found


@pytest.mark.parametrize(
    ("ranks", "way", "dtype"),
    [
        *some(in_worlds([(way, dtype) for dtype in DTYPES if dtype != torch.float8_e4m3fn for way in ALL_WAYS]), 5),
        *some(in_worlds([(way, torch.float8_e4m3fn) for way in ALL_WAYS]), 7),  # see tests/test_scales.py
    ],
    indirect=["ranks"],
)
def test_result(ranks: Ranks, way: Way, dtype: torch.dtype, seed: int) -> None:
    for rank, found in enumerate(ranks.run(results, way, dtype, seed)):
        for shape, options, excess in found:
            assert excess <= 1, (rank, shape, options)


@each_way
def test_each_way_meets_everything(way: Way) -> None:
    always = [dtype for dtype in DTYPES if dtype != torch.float8_e4m3fn]
    met = [index for size in (1, 2, 3, 4) for dtype in always for index in turns(way, dtype, size)]
    assert {index % len(SHAPES) for index in met} == set(range(len(SHAPES)))
    assert {(index % 3, index // 3 % 3) for index in met} == {
        (bias, layout) for bias in range(3) for layout in range(3)
    }


DEPTHS = {torch.float32: 38, torch.float16: 36, torch.int8: 40}
"""Depths for which a rank's columns do not end at a multiple of 16 bytes, but those of two or four ranks do; they are
more than a block."""


def between_16_bytes(way: Way, dtype: torch.dtype, seed: int) -> list[float]:
    """Errors with blocks of K at addresses that TMA does not accept, in matrices whose rows and columns it accepts."""
    ctx, found = context(), []
    for layout in ("plain", "transposed"):
        one = trial(ctx, way, (19, 29, DEPTHS[dtype]), dtype, seed, "row", layout)
        one.run(replace(SMALL, num_chunks=2))
        found.append(one.excess())
    return found


@pytest.mark.parametrize("ranks", worlds(2, 4) if BACKEND != "sim" else worlds(2, 2), indirect=True)
@pytest.mark.parametrize(
    "dtype", DEPTHS if BACKEND != "sim" else [torch.float32], ids=lambda dtype: str(dtype).removeprefix("torch.")
)
@pytest.mark.parametrize("way", [way for way in ALL_WAYS if way.gather_dim == 1], ids=str)
def test_columns_that_end_between_16_bytes(ranks: Ranks, way: Way, dtype: torch.dtype, seed: int) -> None:
    for excesses in ranks.run(between_16_bytes, way, dtype, seed):
        assert max(excesses) <= 1


def back_to_back(way: Way, seed: int) -> list[float]:
    """Errors of calls in a row with other shapes, each with another rank late, and only new inputs in the same memory
    in between."""
    ctx = context()
    shapes = ((7, 5, 32), (18, 20, 31), (16, 16, 1))
    trials = [trial(ctx, way, shape, torch.float32, seed + index) for index, shape in enumerate(shapes)]
    for index, one in enumerate(trials):
        if ctx.rank == index % ctx.world_size:
            time.sleep(0.005)
        one.run()
        one.a.fill_(float("nan"))
        one.b.fill_(float("nan"))
    return [one.excess() for one in trials]


@pytest.mark.parametrize("ranks", worlds(4, 8) if BACKEND != "sim" else worlds(3, 3), indirect=True)
@pytest.mark.parametrize("way", some(ALL_WAYS), ids=str)
def test_back_to_back_with_a_late_rank(ranks: Ranks, way: Way, seed: int) -> None:
    for excesses in ranks.run(back_to_back, way, seed):
        assert max(excesses) <= 1


def bits(way: Way, seed: int, by_flags: bool = False) -> tuple[str, str]:
    """Digests of two results of the same call, with ranks late by different times and tiles split over programs.
    ``by_flags``: nothing is sent by words. In float32, where the order of a sum shows."""
    ctx = context()
    workspace = iris.ops.new_workspace(ctx, way.op, way.algorithm, 1 << 20, FLAGS) if by_flags else None
    found = []
    for late in (ctx.rank, ctx.world_size - 1 - ctx.rank):
        one = trial(ctx, way, (18, 20, 40), torch.float32, seed)
        time.sleep(0.003 * late)
        one.run(replace(SMALL, stream_k=True, two_tiles=True, block_size_k=16, num_sms=3), workspace)
        assert one.excess() <= 1
        found.append(one.digest())
    return found[0], found[1]


@pytest.mark.parametrize("ranks", worlds(3, 8) if BACKEND != "sim" else worlds(3, 3), indirect=True)
@pytest.mark.parametrize("way", some(ALL_WAYS), ids=str)
def test_the_same_bits(ranks: Ranks, way: Way, seed: int) -> None:
    """In each call if timing does not matter, and on all ranks if these have the same result."""
    assert_same_bits(way, ranks.run(bits, way, seed))


@pytest.mark.parametrize("ranks", worlds(3, 8) if BACKEND != "sim" else worlds(3, 3), indirect=True)
@pytest.mark.parametrize("way", IN_WORDS, ids=str)
def test_the_same_bits_by_flags(ranks: Ranks, way: Way, seed: int) -> None:
    """This is how large amounts, too large for words, are sent."""
    assert_same_bits(way, ranks.run(bits, way, seed, True))


def judged(seed: int) -> tuple[str, str]:
    """Digests of a result before and after it was judged."""
    one = trial(context(), Way(LOCAL, "local"), (18, 20, 40), torch.float32, seed)
    one.run()
    before = one.digest()
    assert one.excess() <= 1
    return before, one.digest()


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_a_result_that_was_judged_is_as_before(ranks: Ranks, seed: int) -> None:
    """Otherwise digests could not be compared."""
    for before, behind in ranks.run(judged, seed):
        assert before == behind


def assert_same_bits(way: Way, found: list[tuple[str, str]]) -> None:
    if way.deterministic:
        assert all(first == second for first, second in found)
    if way.op in (SCATTER, ALL_REDUCE, LOCAL):
        assert len({first for first, _ in found}) == 1
        assert len({second for _, second in found}) == 1


LOADING = Way(REDUCE_SCATTER, "baseline"), Way(ALL_REDUCE, "baseline"), Way(ALL_REDUCE, "one_shot")
"""Ways whose kernels load from all peers in turns; the last does so if it uses no words."""


def begun_with(way: Way) -> list[float]:
    """Errors of sums of 16 rows for each rank. For rank r its own part and that of the next rank are large and cancel;
    the others add 1 each, which is lost unless these two come first."""
    ctx = context()
    world = ctx.world_size
    first = torch.arange(world).repeat_interleave(16)
    place = (ctx.rank - first) % world
    values = torch.ones(16 * world).where(place > 0, 2.0**30).where(place != 1, -(2.0**30))
    a, b = values[:, None].to(ctx.device), torch.ones(1, 16, device=ctx.device)
    output = ctx.zeros(16 if way.op == REDUCE_SCATTER else 16 * world, 16)
    workspace = iris.ops.new_workspace(ctx, way.op, way.algorithm, 1 << 17, FLAGS)
    getattr(iris.ops, way.op)(ctx, output, a, b, config=replace(SMALL, algorithm=way.algorithm), workspace=workspace)
    ctx.barrier()
    return [float(one) for one in output.unique()]


@pytest.mark.parametrize("ranks", worlds(3, 8) if BACKEND != "sim" else worlds(3, 3), indirect=True)
@pytest.mark.parametrize("way", LOADING, ids=str)
def test_no_two_ranks_load_from_the_same_one_first(ranks: Ranks, way: Way) -> None:
    """Otherwise all wait for one rank's link, then for that of the next."""
    assert ranks.run(begun_with, way) == [[ranks.world_size - 2.0]] * ranks.world_size


def picked(seed: int) -> list[float]:
    """Errors with ``config=None``, on a shape of several of the picked tiles, and by TMA if there is TMA."""
    ctx, found = context(), []
    for index, way in enumerate(one for one in ALL_WAYS if one.algorithm == "baseline" or one.op == LOCAL):
        one = trial(ctx, way, (160, 144, 256), torch.float16, seed + index)
        one.run(None)
        found.append(one.excess())
    return found


@pytest.mark.parametrize("ranks", worlds(1, 2), indirect=True)
def test_picked_config(ranks: Ranks, seed: int) -> None:
    for excesses in ranks.run(picked, seed):
        assert max(excesses) <= 1


CARRYING = {(GATHER, "push"), (GATHER, "hbm_buffer"), (SCATTER, "split"), (SCATTER, "relay")}
"""Ways in which all or some programs move data that is not a tile of their own. So do those of gathers of columns by
the copy engine, which keep a rank's own columns."""


def traced(way: Way, seed: int) -> tuple[set[str], bool, bool, set[int], float, float]:
    ctx = context()
    one = trial(ctx, way, (32, 32, 32), torch.float16, seed)
    one.run(trace=True)
    excess = one.excess()
    trace = ctx.last_trace
    events = trace.events(ctx)
    ordered = all(event.start_ns <= event.end_ns for event in events)
    everyone = {event.rank for event in trace.gather(ctx)}
    carried = any(event.kind == "wg_fetch" and event.detail == -1 for event in events)
    return {event.kind for event in events}, carried, ordered, everyone, trace.waited_s(ctx), excess


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("way", [way for way in ALL_WAYS if way.algorithm not in LIBRARY], ids=str)
def test_trace(ranks: Ranks, way: Way, seed: int) -> None:
    keeps = (way.op, way.algorithm, way.gather_dim) == (GATHER, "copy_engine", 1)
    for kinds, carried, ordered, everyone, waited_s, excess in ranks.run(traced, way, seed):
        assert carried == (keeps or (way.op, way.algorithm) in CARRYING)
        assert {"wg_gemm", "wg_gemm_wait", "wg_fetch"} <= kinds
        assert everyone == {0, 1}
        assert ordered and excess <= 1
        assert 0 <= waited_s < 60


def one_rank_missing(way: Way, seed: int) -> Failure:
    """All ranks call the op once; then rank 1 does not."""
    trial(context(), way, (16, 16, 32), torch.float32, seed).run()  # compile first, which may take one rank longer
    context().barrier()
    with fresh(1 << 21, timeout_s=0.6) as ctx:
        one = trial(ctx, way, (16, 16, 32), torch.float32, seed)
        one.run()
        ctx.barrier()

        def call_alone() -> None:
            if ctx.rank != 1:
                one.run()
                ctx.synchronize()
            else:
                for _ in range(200):  # until the others have given up and reported it
                    ctx.synchronize()
                    time.sleep(0.05)

        failure = failure_of(call_alone)
        ctx.check = lambda *_: None  # type: ignore[method-assign]
        return failure


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("way", some([way for way in ALL_WAYS if way.op != LOCAL and way.gather_dim == 0], 3), ids=str)
def test_op_that_one_rank_does_not_call(ranks: Ranks, way: Way, seed: int) -> None:
    for rank, failure in enumerate(ranks.run(one_rank_missing, way, seed)):
        assert failure.kind == "WaitTimeout", (rank, failure)
        if rank != 1:
            assert way.op in failure.message and "rank 1" in failure.message
            assert failure.took_s < 2.5 + (10 if BACKEND == "sim" else 0)


def gather_dims(seed: int) -> list[float]:
    """Errors of calls that leave it to the op to find out which dimension is sharded."""
    ctx, excesses = context(), []
    for gather_dim in (0, 1):
        one = trial(ctx, Way(GATHER, "auto", gather_dim), (8, 8, 12), torch.float32, seed)
        iris.ops.all_gather_matmul(ctx, one.output, one.a, one.b, config=SMALL)
        excesses.append(one.excess())
    return excesses


@pytest.mark.parametrize("ranks", worlds(2, 4), indirect=True)
def test_gather_dim_is_told_from_the_shapes(ranks: Ranks, seed: int) -> None:
    for excesses in ranks.run(gather_dims, seed):
        assert max(excesses) <= 1


def large_whole_sums(way: Way, by_flags: bool) -> list[int]:
    """Sums of int8 products that float32 cannot hold: odd, and more than 2**24 on each rank."""
    ctx = context()
    rows = 4 * ctx.world_size
    a, b = (torch.full(shape, 127, dtype=torch.int8, device=ctx.device) for shape in ((rows, 1041), (1041, 16)))
    output = ctx.zeros(4 if way.op == REDUCE_SCATTER else rows, 16, dtype=torch.int32)
    workspace = iris.ops.new_workspace(ctx, way.op, way.algorithm, 1 << 17, FLAGS) if by_flags else None
    getattr(iris.ops, way.op)(ctx, output, a, b, config=replace(SMALL, algorithm=way.algorithm), workspace=workspace)
    ctx.barrier()
    return [int(one) for one in output.unique()]


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("by_flags", (False, True))
@pytest.mark.parametrize("way", ways(REDUCE_SCATTER, ALL_REDUCE), ids=str)
def test_int8_sums_are_exact(ranks: Ranks, way: Way, by_flags: bool) -> None:
    assert ranks.run(large_whole_sums, way, by_flags) == [[127 * 127 * 1041 * ranks.world_size]] * ranks.world_size


def abreast_left(gather_dim: int, seed: int) -> list[float]:
    """Errors if chunks are carried side by side, and fewer are left at the end."""
    ctx, found = context(), []
    for algorithm in ("hbm_buffer", "push"):
        one = trial(
            ctx, Way(GATHER, algorithm, gather_dim), (88, 15 if BACKEND == "sim" else 40, 70), torch.float32, seed
        )
        one.run(replace(SMALL, comm_sms=1, k_per_flag=1))
        found.append(one.excess())
    return found


@pytest.mark.parametrize("ranks", worlds(2, 3) if BACKEND != "sim" else worlds(3, 3), indirect=True)
@pytest.mark.parametrize("gather_dim", some((0, 1)))
def test_the_last_chunks_side_by_side_are_fewer(ranks: Ranks, gather_dim: int, seed: int) -> None:
    for found in ranks.run(abreast_left, gather_dim, seed):
        assert max(found) <= 1


def run_some_ways(seed: int) -> dict[str, float]:
    """Errors of every thirteenth way, once: a gather, one that sends or sums, and one that sums. The seed decides
    which."""
    ctx, found = context(), {}
    for turn, way in enumerate(ALL_WAYS):
        if (turn + seed) % 13:
            continue
        shape, dtype = ((1, 1, 1), (3, 5, 7))[turn // 2 % 2], DTYPES[turn // 2 % len(DTYPES)]
        one = trial(ctx, way, shape, dtype, seed + turn, BIASES[turn % 3])
        one.run()
        found[str(way)] = one.excess()
    return found


@pytest.mark.skipif(BACKEND != "sim", reason="there are never so many GPUs")
@pytest.mark.parametrize("ranks", [16], indirect=True)
def test_as_many_ranks_as_there_can_be(ranks: Ranks, seed: int) -> None:
    for found in ranks.run(run_some_ways, seed):
        assert max(found.values()) <= 1, found
    ranks.end()
