"""Sums over ranks are taken in float32 and rounded once, save where it is said; the same bits on all ranks, also where
parts are rounded."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from ops_inputs import ALL_REDUCE, GATHER, IN_WORDS, LOCAL, REDUCE_SCATTER, SCATTER, SMALL, Way, some, trial, ways
from ranks import BACKEND, Ranks, context, worlds

import iris
from iris.ops.exchange import FLAGS

THREE = pytest.mark.parametrize("ranks", worlds(3, 8) if BACKEND != "sim" else worlds(3, 3), indirect=True)
HALVES = (torch.float16, torch.bfloat16)
SUMS = [(way, False) for way in ways(REDUCE_SCATTER, ALL_REDUCE) if not way.ring]
SUMS += [(way, True) for way in IN_WORDS if (way, False) in SUMS]


def just_above(way: Way, by_flags: bool, dtype: torch.dtype) -> list[float]:
    """A sum of 2/eps from rank 0, 1 from rank 1, nothing from the others, and a bias of 1: ``dtype`` holds it, but no
    sum before it that ends with a single 1."""
    ctx = context()
    world, large = ctx.world_size, 2 / torch.finfo(dtype).eps
    rows = 32 * world
    a = torch.zeros(rows, 32, dtype=dtype, device=ctx.device)
    a[:, 5] = (large, 1.0)[ctx.rank] if ctx.rank < 2 else 0.0
    b, bias = (torch.ones(shape, dtype=dtype, device=ctx.device) for shape in ((32, 48), (48,)))
    output = ctx.zeros(32 if way.op == REDUCE_SCATTER else rows, 48, dtype=dtype)
    workspace = iris.ops.new_workspace(ctx, way.op, way.algorithm, 1 << 20, FLAGS) if by_flags else None
    getattr(iris.ops, way.op)(
        ctx, output, a, b, bias, config=replace(SMALL, algorithm=way.algorithm), workspace=workspace
    )
    ctx.synchronize()
    return [float(one) - large for one in output.unique()]


@THREE
@pytest.mark.parametrize(
    ("way", "by_flags", "dtype"), some([(*one, dtype) for one in SUMS for dtype in HALVES], 3), ids=str
)
def test_sums_over_ranks_are_rounded_once(ranks: Ranks, way: Way, by_flags: bool, dtype: torch.dtype) -> None:
    assert ranks.run(just_above, way, by_flags, dtype) == [[2.0]] * ranks.world_size


def rounded_bits(way: Way, by_flags: bool, seed: int) -> str:
    ctx = context()
    workspace = iris.ops.new_workspace(ctx, way.op, way.algorithm, 1 << 20, FLAGS) if by_flags else None
    one = trial(ctx, way, (18, 20, 40), torch.bfloat16, seed, "column")
    one.run(SMALL, workspace)
    assert one.excess() <= 1
    return one.digest()


@THREE
@pytest.mark.parametrize("by_flags", [False, True])
@pytest.mark.parametrize("way", ways(ALL_REDUCE, SCATTER), ids=str)
def test_the_same_bits_of_rounded_parts(ranks: Ranks, way: Way, by_flags: bool, seed: int) -> None:
    if by_flags and way not in IN_WORDS:
        pytest.skip("has no words")
    assert len(set(ranks.run(rounded_bits, way, by_flags, seed))) == 1


def around_the_ring(way: Way, dtype: torch.dtype) -> list[list[float]]:
    """Sums of 1 from rank 0, 257 from rank 1 and zeros in bfloat16, which rounds 257 to 256. Those of rank 0 begin with
    257; the others do not."""
    ctx = context()
    rows = 16 * ctx.world_size
    a, b = (torch.zeros(shape, device=ctx.device) for shape in ((rows, 32), (32, 16)))
    a[:, 0], a[:, 1], b[:2] = 256.0 * (ctx.rank == 1), 1.0 * (ctx.rank < 2), 1.0
    output = ctx.zeros(16 if way.op == REDUCE_SCATTER else rows, 16, dtype=torch.bfloat16)
    config = replace(SMALL, algorithm="ring", num_sms=2)
    getattr(iris.ops, way.op)(ctx, output, a.to(dtype), b.to(dtype), config=config)
    ctx.synchronize()
    return [[float(one) for one in rows_of.unique()] for rows_of in output.split(16)]


@THREE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("way", [way for way in ways() if way.ring], ids=str)
def test_a_ring_rounds_sums_not_products(ranks: Ranks, way: Way, dtype: torch.dtype) -> None:
    """On GPUs the library may round 16-bit products, too: cuBLAS does, Iris's kernel does not."""
    found = ranks.run(around_the_ring, way, dtype)
    by_library = BACKEND != "sim" and dtype.itemsize == 2
    possible = []
    for later in (258.0, 256.0)[: 1 + by_library]:
        expected = [[256.0], *([later] for _ in range(1, ranks.world_size))]
        possible.append([expected] * ranks.world_size if way.op == ALL_REDUCE else [[one] for one in expected])
    assert found in possible


def along_k(way: Way, dtype: torch.dtype, stream_k: bool, owners: int = 1) -> list[float]:
    """A sum of 2/eps, 1 and 1, each in another block of K, and if columns are gathered of another rank."""
    ctx = context()
    world, large = ctx.world_size, 2 / torch.finfo(dtype).eps
    a = torch.zeros(16, 32 * world, dtype=dtype)
    a[:, ::32] = torch.tensor([large, 1.0, 1.0] + [0.0] * (world - 3), dtype=dtype)
    columns = way.op == GATHER and way.gather_dim == 1
    own = ctx.empty(*((16, 32) if columns else a.shape), dtype=dtype)
    own.copy_(a.chunk(world, 1)[ctx.rank] if columns else a)
    b = torch.ones(32 * world, 16, dtype=dtype, device=ctx.device)
    rows, cols = 16 * (world if way.op == GATHER and not columns else 1), 16 * (world if way.op == SCATTER else 1)
    output = ctx.zeros(rows, cols, dtype=dtype)
    options: dict[str, Any] = {"gather_dim": way.gather_dim} if way.op == GATHER else {}
    config = replace(SMALL, algorithm=way.algorithm, stream_k=stream_k and way.algorithm != "relay", num_sms=4)
    config = replace(config, owners_per_matmul=owners)
    ctx.barrier()
    getattr(iris.ops, way.op)(ctx, output, own, b, config=config, **options)
    ctx.synchronize()
    return [float(one) - large for one in output.unique()]


@pytest.mark.parametrize("ranks", worlds(3, 4) if BACKEND != "sim" else worlds(3, 3), indirect=True)
@pytest.mark.parametrize(
    ("way", "dtype", "stream_k"), some([*product(ways(GATHER, SCATTER, LOCAL), HALVES, (False, True))], 3), ids=str
)
def test_sums_along_k_are_rounded_once(ranks: Ranks, way: Way, dtype: torch.dtype, stream_k: bool) -> None:
    owners = ranks.world_size if way.adds_columns else 1
    assert ranks.run(along_k, way, dtype, stream_k, owners) == [[2.0]] * ranks.world_size


@pytest.mark.parametrize("ranks", worlds(3, 4) if BACKEND != "sim" else worlds(3, 3), indirect=True)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_columns_that_are_added_up_are_rounded_after_each_rank(ranks: Ranks, dtype: torch.dtype) -> None:
    """Each rank begins with its own columns, so rank 1 adds 1 and 1 first, and the others lose one or both."""
    found = ranks.run(along_k, Way(GATHER, "decomposed", 1), dtype, False)
    assert found == [[2.0 if rank == 1 else 0.0] for rank in range(ranks.world_size)]
