"""Products of 8-bit matrices with scales; those of fp8 without are in ``tests/test_ops.py``."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from ops_inputs import ALL_REDUCE, GATHER, LAYOUTS, SCATTER, SMALL, Trial, Way, some, trial, ways
from ranks import BACKEND, Failure, Ranks, context, failure_of, fresh, worlds

from iris.device.tile import ScalePointers, Tile, scaled
from iris.errors import ArgumentError
from iris.ops import FusedConfig, Problem, Target, new_workspace
from iris.ops.algorithms import LIBRARY, TRAITS
from iris.ops.choice import Adjusted, resolve
from iris.ops.launching import run, start_kernel
from iris.ops.plan import Plan
from iris.ops.room import needed_nbytes, scales_blocks
from iris.ops.scaled_mm import _takes_blocks
from iris.ops.scales import Scales

FP8 = torch.float8_e4m3fn
TWO = pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
OF_LIBRARY = [
    way for way in ways()
    if way.algorithm in LIBRARY and way.algorithm != "ring" and (way.op != SCATTER or BACKEND != "sim")
]  # fmt: skip
"""Ways that leave products of fp8 to the library; on CPUs none whose output is some columns of a matrix, as the library
overwrites the others there."""
GATHERS = [way for way in ways(GATHER) if way.gather_dim == 0]


def scaled_int8(way: Way, seed: int) -> list[float]:
    """Errors of two calls on GPUs; two simulated ranks make only the first one, and more ranks only the second."""
    ctx, found = context(), []
    for turn in (0, 1) if BACKEND != "sim" else (ctx.world_size % 2,):
        bias, layout = (None, "column")[turn], LAYOUTS[turn]
        one = trial(ctx, way, (19, 29, 37), torch.int8, seed + turn, bias, layout, scaled=True)
        one.run(replace(SMALL, stream_k=turn == 1 and way.algorithm != "relay"))
        found.append(one.excess())
    return found


@pytest.mark.parametrize("ranks", worlds(1, 3), indirect=True)
@pytest.mark.parametrize("way", some(ways(), 5), ids=str)
def test_int8_with_scales_makes_floats(ranks: Ranks, way: Way, seed: int) -> None:
    for found in ranks.run(scaled_int8, way, seed):
        assert max(found) <= 1


def by_library(way: Way, shape: tuple[int, int, int], seed: int, bias: str | None, transposed: bool) -> list[float]:
    one = trial(context(), way, shape, FP8, seed, bias)
    return called_thrice(replace(one, b=_by_columns(one.b)) if transposed else one, "_scaled_mm")


def called_thrice(one: Trial, function: str) -> list[float]:
    """The errors of three calls, the last of which is a replay on a GPU, and how often the library multiplied by
    PyTorch's ``function``."""
    found = []
    with mock.patch.object(torch, function, wraps=getattr(torch, function)) as library:
        for _ in range(3):
            one.spoil()
            one.ctx.barrier()
            one.run()
            found.append(one.excess())
    return [max(found), float(library.call_count)]


@pytest.mark.parametrize("ranks", worlds(2, 3), indirect=True)
@pytest.mark.parametrize("way", some(OF_LIBRARY), ids=str)
def test_the_library_multiplies_what_it_takes(ranks: Ranks, way: Way, seed: int) -> None:
    """With float32 outputs it adds up sums after every four steps of tensor cores, not after each one as the tests'
    tile does: it may lose the square root of four times as much."""
    one_each = 3 + seed % 3  # one scale for each matrix, and an output of each dtype
    shape, bias = (16, 32, 48), None if one_each == 5 or way.op == ALL_REDUCE else "column"
    for error, calls in ranks.run(by_library, way, shape, one_each, bias, True):
        assert error <= (2 if one_each == 5 else 1) and calls > 0


def unscaled() -> list[torch.dtype]:
    """Dtypes of the scales that the library gets if a call has none, and PyTorch's default dtype is not float32."""
    with fresh(1 << 20) as ctx, mock.patch("torch._scaled_mm", wraps=torch._scaled_mm) as library:
        one = trial(ctx, Way(GATHER, "baseline"), (16, 32, 48), FP8, 1, scaled=False)
        one = replace(one, b=one.b.T.contiguous().T)
        torch.set_default_dtype(torch.bfloat16)
        try:
            one.run()
        finally:
            torch.set_default_dtype(torch.float32)
    return [scale.dtype for call in library.call_args_list for scale in call.args[2:4]]


@TWO
def test_the_library_gets_scales_in_float32_whatever_the_default(ranks: Ranks) -> None:
    """On GPUs it takes no scales of another dtype."""
    for found in ranks.run(unscaled):
        assert found and set(found) == {torch.float32}


def with_a_bias_in_a_row(seed: int) -> list[tuple[float, set[int]]]:
    """Errors in bfloat16 and in fp8, and with how many dimensions the library gets a bias of one row."""
    found = []
    for dtype, function, place in ((torch.bfloat16, "addmm", 0), (FP8, "_scaled_mm", 4)):
        one = trial(context(), Way(GATHER, "baseline"), (16, 32, 48), dtype, 3 + seed % 2, "column")
        assert one.bias is not None
        one = replace(one, b=_by_columns(one.b), bias=one.bias[None])
        with mock.patch.object(torch, function, wraps=getattr(torch, function)) as library:
            one.run()
        found.append((one.excess(), {call.args[place].dim() for call in library.call_args_list}))
    return found


@TWO
def test_the_library_gets_a_bias_of_one_dimension(ranks: Ranks, seed: int) -> None:
    """It adds no other while it stores the product; one of two dimensions once was copied into the output first."""
    for found in ranks.run(with_a_bias_in_a_row, seed):
        for error, dimensions in found:
            assert error <= 1 and dimensions == {1}


REFUSED = {
    "row-major B": ((16, 32, 48), 3, None, False),
    "K": ((16, 32, 40), 3, None, True),
    "N": ((16, 24, 48), 3, None, True),
    "scales of rows": ((16, 32, 48), 0, None, True),
    "bias of rows": ((16, 32, 48), 3, "row", True),
    "bias in float32": ((16, 32, 48), 5, "column", True),
}


@TWO
@pytest.mark.parametrize("refused", REFUSED)
def test_iris_multiplies_what_the_library_does_not_take(ranks: Ranks, refused: str) -> None:
    for error, calls in ranks.run(by_library, Way(GATHER, "baseline"), *REFUSED[refused]):
        assert error <= 1 and calls == 0


def scaled_by_block(way: Way, seed: int) -> list[float]:
    """Errors with blocks that are cut off at the ends of N and K, and tiles that reach into the next block's columns;
    ``stream_k`` also splits K between blocks."""
    ctx, found = context(), []
    for turn, shape in enumerate(((17, 140, 200), (3, 37, 256))):
        if way.op == GATHER and way.gather_dim == 1:
            shape = (*shape[:2], 128)
        one = trial(ctx, way, shape, FP8, seed + turn, (None, "column")[turn], blocks=True)
        if turn == 1:  # the layout of weights, and of some kernels that quantise
            one = replace(one, b=_by_columns(one.b), scale_a=_by_columns(one.scale_a), scale_b=_by_columns(one.scale_b))
        stream_k = turn == 0 and way.algorithm != "relay"
        one.run(replace(SMALL, stream_k=stream_k, block_size_n=(256, 16)[turn], block_size_k=(64, 256)[turn]))
        found.append(one.excess())
    return found


def _by_columns(matrix: torch.Tensor | None) -> torch.Tensor:
    """``matrix`` with contiguous columns."""
    assert matrix is not None
    return matrix.T.contiguous().T


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", worlds(1, 4), indirect=True)
@pytest.mark.parametrize("way", some(ways(), 8), ids=str)
def test_blocks_have_scales(ranks: Ranks, way: Way, seed: int) -> None:
    """Some take 20 s to compile, and far longer while other tests run."""
    for found in ranks.run(scaled_by_block, way, seed, limit_s=240):
        assert max(found) <= 1


def few_strided_blocks(seed: int) -> list[float]:
    """Errors with blocks as large as the matrix, whose scales are far apart: each is one of a row, or of all."""
    ctx, found = context(), []
    for way in (Way(GATHER, "push"), Way(ALL_REDUCE, "two_shot"), Way(ALL_REDUCE, "baseline")):
        one = trial(ctx, way, (17, 37, 100), FP8, seed, blocks=True)
        assert one.scale_a is not None and one.scale_b is not None
        apart = one.scale_a.new_full((len(one.scale_a), 3), float("nan"))
        apart[:, 1:2] = one.scale_a
        replace(one, scale_a=apart[:, 1:2], scale_b=one.scale_b.expand(2, 1)[::2]).run()
        found.append(one.excess())
    return found


@TWO
def test_scales_of_few_blocks_may_have_any_strides(ranks: Ranks, seed: int) -> None:
    """Once they were refused, although scales of more blocks were not."""
    for found in ranks.run(few_strided_blocks, seed):
        assert max(found) <= 1


def blocks_by_library(way: Way, seed: int, by_columns: bool) -> list[float]:
    one = trial(context(), way, (16, 256, 512), FP8, seed, blocks=True)
    of_a = _by_columns(one.scale_a) if by_columns else one.scale_a
    one = replace(one, b=_by_columns(one.b), scale_a=of_a, scale_b=_by_columns(one.scale_b))
    return called_thrice(one, "_scaled_mm_v2")


@pytest.mark.parametrize("ranks", worlds(2, 4), indirect=True)
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("way", OF_LIBRARY if BACKEND != "sim" else [], ids=str)  # the CPU's has no scales of blocks
def test_the_library_multiplies_blocks(ranks: Ranks, way: Way, by_columns: bool, seed: int) -> None:
    seed += (1 - seed) % 3  # whose output is bfloat16
    for error, calls in ranks.run(blocks_by_library, way, seed, by_columns):
        assert error <= 1 and (calls > 0 or torch.cuda.get_device_capability()[0] != 9)


@pytest.mark.parametrize(
    ("cuda", "capability", "offset", "n", "k", "takes"),
    [
        ("13.0", 9, 0, 384, 512, True),
        ("12.9", 9, 0, 384, 512, True),
        ("12.8", 9, 0, 384, 512, False),
        ("13.0", 10, 0, 384, 512, False),
        ("13.0", 9, 1, 384, 512, False),
        ("13.0", 9, 0, 368, 512, False),
        ("13.0", 9, 0, 384, 496, False),
    ],
)
def test_the_library_takes_blocks_where_it_has_kernels_for_them(
    cuda: str, capability: int, offset: int, n: int, k: int, takes: bool
) -> None:
    """PyTorch for CUDA 12.8 or older raises; cuBLAS requires scales that begin at a multiple of 16 bytes; blocks that
    are cut off have not been tried."""
    output = mock.Mock(device=mock.Mock(type="cuda"), shape=(16, n), dtype=torch.bfloat16)
    of_b = torch.ones(13)[offset:][:12].view(3, 4).t()
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=(capability, 0)),
        mock.patch("torch.version.cuda", cuda),
    ):
        assert _takes_blocks(output, torch.empty(16, k), Scales(torch.ones(16, 4), of_b)) == takes


def taken_for_blocks() -> list[str]:
    """The algorithms that "auto" takes with 2048 rows and scales of blocks."""
    ctx, log = context(), mock.Mock()
    a, b = torch.zeros(2048, 256, device=ctx.device).to(FP8), torch.zeros(384, 256, device=ctx.device).to(FP8).T
    output = torch.empty(2048 // ctx.world_size, 384, device=ctx.device, dtype=torch.bfloat16)
    of_a, of_b = torch.ones(2048, 2, device=ctx.device), torch.ones(3, 2, device=ctx.device).T
    with mock.patch("iris.ops.choice._tell", log):
        ctx.ops.matmul_reduce_scatter(output, a, b, scale_a=of_a, scale_b=of_b)
    ctx.synchronize()
    return [call.args[2].algorithm for call in log.call_args_list]


@pytest.mark.skipif(BACKEND == "sim", reason="in the simulator no way is the faster one")
@TWO
def test_auto_leaves_blocks_to_the_library(ranks: Ranks) -> None:
    taken, _ = ranks.run(taken_for_blocks)
    assert taken[0] in (
        "decomposed",
        "low_latency",
        "baseline",
    )  # then the matmul: with K = 256 Iris's kernel


def resolved(
    config: Any = None, *, least_room: bool = False, taken_by: Collection[str] = TRAITS[GATHER], **options: Any
) -> FusedConfig:
    """The config of a gather on two GPUs with scales of blocks. ``least_room``: the heap has room for ``pull`` only.
    ``taken_by``: the algorithms that take the operands."""

    def refused(algorithm: str) -> ArgumentError | None:
        return None if algorithm in taken_by else ArgumentError(GATHER, "A_sharded", "another one", "this")

    kept: dict[Any, Any] = {}
    ctx = mock.Mock(
        backend_name="cuda", num_sms=132, rank=1, heap_largest_free_bytes=0 if least_room else 1 << 40,
        has_workspace=lambda key: least_room and key[1] == "pull", kept=lambda key, make: kept.setdefault(key, make()),
    )  # fmt: skip
    target = Target("cuda", 132, tma=True, hardware="NVIDIA H200")
    problem = Problem(GATHER, 8192, 4096, 4096, FP8, 2, 0, True, torch.bfloat16)
    scales = Scales(torch.ones(4096, 32), torch.ones(32, 32))
    with mock.patch("iris.ops.choice.target_of", lambda _, excluded=(): replace(target, excluded=excluded)):
        return resolve(ctx, problem, config, None, refused=refused, scales=scales, **{"trace": False, **options})


def test_auto_takes_other_algorithms_where_none_of_the_library_may_be_taken() -> None:
    """Once a call with a trace had none left, and ran by one that cannot be traced, or does not take the operands."""
    assert resolved().algorithm in LIBRARY
    traced = resolved(trace=True, taken_by=TRAITS[GATHER].keys() - {"copy_engine", "pull"})
    assert traced.algorithm in ("push", "hbm_buffer")


def test_auto_takes_other_algorithms_where_there_is_no_room_for_those_of_the_library() -> None:
    assert resolved(least_room=True).algorithm == "pull"


def test_where_there_is_no_room_for_any_the_least_that_is_missing_is_told() -> None:
    """It is told although those of the library were left out in favour of others."""
    assert resolved(least_room=True, taken_by=("decomposed", "push")).algorithm == "decomposed"


def test_an_algorithm_by_name_that_does_not_take_the_operands_is_refused() -> None:
    with pytest.raises(ArgumentError, match="A_sharded: expected another one, got this"):
        resolved("push", taken_by=("pull",))


def test_what_is_given_of_a_config_is_kept_where_blocks_have_scales() -> None:
    """The tile for scales of blocks has 4 warps."""
    config = resolved(Adjusted("hbm_buffer", (("num_warps", 8), ("num_stages", 3))))
    assert (config.num_warps, config.num_stages, config.block_size_m, config.block_size_k) == (8, 3, 64, 128)


def refused_blocks() -> dict[str, Failure]:
    """Failures with an A [8, 256] and a B [256, 300], and with the parts that they are gathered from."""
    ctx = context()
    a, b = ctx.ones(8, 256, dtype=FP8), torch.ones(256, 300, device=ctx.device).to(FP8)
    output = torch.empty(8, 300, device=ctx.device)
    of_a, of_b = torch.ones(8, 2, device=ctx.device), torch.ones(2, 3, device=ctx.device)
    whole, int8 = ctx.world_size * 192, (a.view(torch.int8), b.view(torch.int8))

    def failure(a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any) -> Failure:
        return failure_of(lambda: ctx.ops.matmul(output, a, b, scale_a=scale_a, scale_b=scale_b))

    return {
        "no scale_b": failure(a, b, of_a, None),
        "no scale_a": failure(a, b, None, of_b),
        "columns": failure(a, b, of_a, of_b.new_ones(300)),
        "shape": failure(a, b, of_a, of_b.new_ones(2, 2)),
        "turned": failure(a, b, of_a, of_b.new_ones(3, 2)),
        "neither": failure(a, b, of_a.new_ones(8, 3), of_b),
        "int8": failure(*int8, of_a, of_b),
        "int8, one": failure(*int8, of_a, None),
        "int8, turned": failure(*int8, of_a.new_ones(2, 8), None),
        "cut": failure_of(
            lambda: ctx.ops.all_gather_matmul(
                output, ctx.ones(8, 192, dtype=FP8), b[:1].expand(whole, 300), gather_dim=1,
                scale_a=of_a.new_ones(8, -(-whole // 128)), scale_b=of_b.new_ones(-(-whole // 128), 3),
            )
        ),
    }  # fmt: skip


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_scales_of_blocks_come_in_pairs_and_shapes(ranks: Ranks) -> None:
    for found in ranks.run(refused_blocks):
        kinds = {name: failure.kind for name, failure in found.items()}
        of_dtype = dict.fromkeys(("int8", "int8, one"), "DTypeError")
        assert kinds == dict.fromkeys(found, "ShapeError") | of_dtype, found
        assert found["int8, turned"].message.endswith("row of A: [8] or [8, 1], got (2, 8)")
        assert "scale_b: expected [2, 3], as the other matrix has" in found["no scale_b"].message
        assert found["turned"].message.endswith("got (3, 2). Pass scale_b.t().")
        assert "scale_a: expected [8, 2], as the other matrix has" in found["no scale_a"].message
        assert "got (300,)" in found["columns"].message and "got (2, 2)" in found["shape"].message
        assert "scale_a: expected [8, 2]" in found["neither"].message
        assert "a multiple of 128 columns, as blocks have scales" in found["cut"].message


def test_an_inbox_for_scales_of_blocks_has_little_room_beside_them() -> None:
    """Once, with 65536 tokens of 16 scales each, it was 32 times as large: 2 GiB on 8 ranks."""
    for rows, cols in ((65536, 16), (8192, 56), (1000, 3)):
        own = torch.empty(rows, cols, device="meta")
        blocks = scales_blocks(own, 8, 132)
        halves = 2 * 8 * own.nbytes * (2 if blocks.words else 1)
        assert blocks.inbox_nbytes(8, own.dtype) <= 1.5 * halves


def many_scales(seed: int) -> float:
    """The error of a gather of so many rows that their scales are exchanged in tall blocks."""
    one = trial(context(), Way(GATHER, "baseline"), (300, 16, 257), FP8, seed, blocks=True)
    one.run()
    return one.excess()


@TWO
def test_scales_of_many_rows_are_gathered(ranks: Ranks, seed: int) -> None:
    assert max(ranks.run(many_scales, seed)) <= 1


def blocks_for_one_rank_only(seed: int) -> Failure:
    """The failure if rank 0 has scales of blocks, and the other rank scales of rows."""
    with fresh(1 << 20, timeout_s=5) as ctx:
        one = trial(ctx, Way(GATHER, "push"), (8, 8, 256), FP8, seed, blocks=True)
        if ctx.rank:
            one = replace(one, scale_a=torch.ones(8, device=ctx.device), scale_b=None)
        return failure_of(one.run)


@TWO
def test_ranks_that_scale_other_blocks_are_told(ranks: Ranks, seed: int) -> None:
    for failure in ranks.run(blocks_for_one_rank_only, seed):
        assert failure.kind == "RankMismatch" and "scale_a for each block" in failure.message, failure


TURNS = 4 if BACKEND != "sim" else 2
"""The number of calls; on a GPU the third is a replay."""


def one_row_each(way: Way) -> list[float]:
    """Errors of gathers of one row of each rank, with a scale for each row, and new numbers in the same memory each
    time."""
    ctx = context()
    a, b = ctx.ones(1, 32, dtype=FP8), torch.ones(32, 16, device=ctx.device).to(FP8)
    output, scale = torch.empty(ctx.world_size, 16, device=ctx.device), torch.empty(1, device=ctx.device)
    found = []
    for turn in range(TURNS):
        scale.fill_(1.0 + ctx.rank + turn)
        ctx.ops.all_gather_matmul(
            output, a, b, gather_dim=0, scale_a=scale, config=replace(SMALL, algorithm=way.algorithm)
        )
        ctx.synchronize()
        found.append([float(row[0]) / 32 for row in output])
        assert bool((output == output[:, :1]).all())
    return [value for row in found for value in row]


@pytest.mark.parametrize("ranks", worlds(2, 3), indirect=True)
@pytest.mark.parametrize("way", GATHERS, ids=str)
def test_one_number_for_one_row_is_that_rows_own(ranks: Ranks, way: Way) -> None:
    expected = [1.0 + rank + turn for turn in range(TURNS) for rank in range(ranks.world_size)]
    assert ranks.run(one_row_each, way) == [expected] * ranks.world_size


def other_scales(seed: int) -> Failure:
    """The failure if rank 0 has a scale for each row, and the other rank one for all."""
    with fresh(1 << 20, timeout_s=5) as ctx:
        one = trial(ctx, Way(GATHER, "push"), (8, 8, 16), FP8, seed, scaled=False)
        scale = torch.ones(1 if ctx.rank else 8, device=ctx.device)
        return failure_of(replace(one, scale_a=scale).run)


@TWO
def test_ranks_that_scale_otherwise_are_told(ranks: Ranks, seed: int) -> None:
    for failure in ranks.run(other_scales, seed):
        assert failure.kind == "RankMismatch" and "scale_a for each row" in failure.message


def exact_sums(depth: int) -> float:
    """The error of sums of fp8 in float32, of numbers that do not fit into 14 bits, relative to float32's loss."""
    ctx = context()
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.rand(64, depth, generator=generator).to(FP8).to(ctx.device) for _ in range(2))
    output = torch.empty(64, 64, device=ctx.device)
    ctx.ops.matmul(output, a, b.T, config=FusedConfig("local", block_size_m=64, block_size_n=64, block_size_k=128))
    ctx.synchronize()
    right = a.double() @ b.double().T
    return float(((output.double() - right) / right).abs().max())


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_a_float32_output_has_sums_in_float32(ranks: Ranks) -> None:
    """With 8192 numbers of the same sign, tensor cores alone lose 1e-2 on Hopper, as they cut sums off at 14 bits;
    within a block of 128, which is four steps of 32, they lose at most 2^-11."""
    assert ranks.run(exact_sums, 8192)[0] <= 2**-11


def room_for_one_workspace() -> tuple[list[str], list[float]]:
    """The algorithms that "auto" takes if the heap has room for its first choice, but not also for gathering the
    scales; and the errors."""
    log, found = mock.Mock(), []
    with fresh(1 << 20) as ctx, mock.patch.multiple(ctx, debug=log, warning=log):
        a, b = ctx.ones(16, 256, dtype=FP8), torch.ones(256, 16, device=ctx.device).to(FP8)
        problem = Problem(GATHER, 16 * ctx.world_size, 16, 256, FP8, ctx.world_size, 0)
        output = torch.empty(problem.m, problem.n, device=ctx.device)
        with mock.patch("iris.ops.choice.pick_config", lambda problem, target: next(
            replace(SMALL, algorithm=one) for one in ("hbm_buffer", "pull") if one not in target.excluded
        )):  # fmt: skip
            needed = needed_nbytes(ctx, problem, replace(SMALL, algorithm="hbm_buffer"))
            filler = ctx.empty(ctx.heap_largest_free_bytes - needed - 4096, dtype=torch.uint8)
            ctx.ops.all_gather_matmul(
                output, a, b, gather_dim=0, scale_a=torch.full((16,), 1.0 + ctx.rank, device=ctx.device)
            )
        ctx.synchronize()
        ctx.free(filler)
        found = [float(row[0]) / 256 for row in output[::16]]
    return [call.args[0] for call in log.call_args_list], found


@TWO
def test_auto_leaves_room_for_gathering_scales(ranks: Ranks) -> None:
    (told, first), (_, second) = ranks.run(room_for_one_workspace)
    assert "auto takes pull" in told[-1] and "as the heap has no room for hbm_buffer" in told[-1]
    assert first == second == [1.0, 2.0]


def grown_heap() -> Failure:
    """The failure of a gather on a heap as large as the error about one that is too small says."""
    rows, k = 6553, 160
    a, b = torch.zeros(rows, k).to(FP8), torch.zeros(k, 16).to(FP8)
    of_a, of_b = torch.ones(rows, 2), torch.ones(2, 1)

    def gather(heap_size: int) -> Failure:
        with fresh(heap_size) as ctx:
            output = torch.empty(rows * ctx.world_size, 16, device=ctx.device)
            operands = (one.to(ctx.device) for one in (a, b))
            scales: dict[str, Any] = {"scale_a": of_a.to(ctx.device), "scale_b": of_b.to(ctx.device)}
            return failure_of(
                lambda: ctx.ops.all_gather_matmul(output, *operands, gather_dim=0, config="baseline", **scales)
            )

    short = gather(1 << 20)
    assert short.kind == "HeapError"
    return gather(int(re.findall(r"heap_size=(\d+)", short.message)[-1]))


@TWO
def test_the_heap_size_that_an_error_names_is_enough_for_scales_too(ranks: Ranks) -> None:
    """Once it was the size without scales."""
    for failure in ranks.run(grown_heap):
        assert failure.kind == "nothing", failure


def with_another_default_device() -> tuple[list[float], int]:
    ctx = context()
    operands = torch.full((16, 32), 0.5, device=ctx.device).to(FP8), torch.ones(32, 16, device=ctx.device).to(FP8)
    output = torch.empty(16, 16, device=ctx.device)
    with torch.device("meta"):
        ctx.ops.matmul(output, *operands, config=replace(SMALL, algorithm="local"))
        received = ctx.broadcast(torch.empty(0, device=ctx.device), 0)
    return output.unique().tolist(), received.numel()


@pytest.mark.skipif(BACKEND != "sim", reason="what the simulator makes of numbers by PyTorch")
@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_pytorchs_default_device_makes_no_difference(ranks: Ranks) -> None:
    assert ranks.run(with_another_default_device) == [([16.0], 0)] * 2


@triton.jit
def far_scales_kernel(out, numbers, first, stride, BLOCK: tl.constexpr):
    rows, cols = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    inside = cols < BLOCK
    begin = numbers - first.to(tl.int64) * stride
    scales = ScalePointers(begin, stride, begin, stride, None, 0, 0, None, 0, 0)
    product = scaled(tl.full((BLOCK, BLOCK), 3, tl.int32), scales, Tile(0, 0, 1, 0, rows, rows, inside, inside))
    tl.store(out + cols[:, None] * BLOCK + cols[None, :], product)


def far_scales() -> bool:
    """Whether scales work whose distance needs more than 32 bits, as in a column of a wide matrix."""
    ctx, stride = context(), 5
    numbers = torch.arange(1.0, 1 + 16 * stride, device=ctx.device)
    out = torch.empty(16, 16, device=ctx.device)
    far_scales_kernel[(1,)](out, numbers, (1 << 30) + 7, stride, BLOCK=16)
    ctx.synchronize()
    each = numbers[::stride]
    return torch.equal(out, 3 * each[:, None] * each[None, :])


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_scales_may_lie_far_apart(ranks: Ranks) -> None:
    assert ranks.run(far_scales) == [True]


def precisions_of_an_own_op() -> list[str]:
    """How sums are kept in a user's op whose problem does not give the dtype of its output, bfloat16 or float32."""
    ctx, found = context(), []
    problem, workspace = Problem("mine", 16, 16, 32, FP8, ctx.world_size), new_workspace(ctx, "mine", "local")
    a, b = (torch.ones(shape, device=ctx.device).to(FP8) for shape in ((16, 32), (32, 16)))
    for made in (torch.bfloat16, torch.float32):
        output = torch.empty(16, 16, dtype=made, device=ctx.device)
        token = start_kernel.set(lambda *_: lambda *_, PRECISION, **__: found.append(PRECISION))
        try:
            run(ctx, problem, Plan(0, meet=False, alone=True), output, a, b, config=SMALL, workspace=workspace)
        finally:
            start_kernel.reset(token)
    return found


@pytest.mark.parametrize("ranks", worlds(1, 2), indirect=True)
def test_the_output_alone_says_how_sums_are_kept(ranks: Ranks) -> None:
    assert ranks.run(precisions_of_an_own_op) == [["tf32", "ieee"]] * ranks.world_size


def after_a_mistake(tmp: str) -> list[str]:
    """What two calls each say: with one program left where some must move data, and with a broken file of rows."""
    said = []
    with mock.patch.dict(os.environ, IRIS_TUNED=tmp):
        for config in (FusedConfig("hbm_buffer", num_sms=1), FusedConfig("decomposed"), FusedConfig("low_latency")):
            with fresh() as ctx:
                one = trial(ctx, Way(GATHER, config.algorithm), (16, 32, 48), torch.int8, 0, scaled=True)
                one = replace(one, scale_a=torch.ones(one.a.shape[0], device=ctx.device))
                said.append(failure_of(lambda: one.run(config)).message)  # noqa: B023
                said.append(failure_of(lambda: one.run(replace(config, num_sms=4))).message)  # noqa: B023
    return said


@TWO
def test_mistakes_are_told_before_scales_are_gathered(ranks: Ranks, tmp_path: Path) -> None:
    """They used to end the context."""
    (tmp_path / "rows.json").write_text("{")
    for programs, *others in ranks.run(after_a_mistake, str(tmp_path / "rows.json")):
        assert "config.num_sms: expected at least 2 for hbm_buffer, got 1" in programs
        assert others[0] == "" and all("rows.json" in one and "broke off" not in one for one in others[1:])
