"""The fused ops against float64 references: every dtype, cut and remainder, delayed ranks, repeated calls, errors."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import BACKEND, Failure, Ranks, context, failure_of, fresh, poison, worlds

import iris
from iris.ops import FusedConfig, new_workspace
from iris.ops.all_gather_matmul import ALGORITHMS as GATHER_ALGORITHMS
from iris.ops.problem import output_dtype

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8)
SMALL = FusedConfig(block_size_m=16, block_size_n=16, block_size_k=32, num_warps=4, num_stages=2)
OP = "all_gather_matmul"
BIASES = (None, "column", "row")
# Rows, columns and depth per rank: one less and one more than a block of SMALL, far below it, and primes.
SHAPES = ((15, 17, 31), (17, 15, 33), (1, 1, 1), (16, 16, 32), (37, 29, 71))


def shapes_for(dtype: torch.dtype, turn: int) -> list[tuple[int, int, int]]:
    """Three of the shapes; over dtypes and turns, all of them with each."""
    first = DTYPES.index(dtype) + 3 * turn
    return [SHAPES[(first + index) % len(SHAPES)] for index in range(3)] if BACKEND == "sim" else list(SHAPES)


def tolerance(dtype: torch.dtype, k: int) -> float:
    """Relative error (Frobenius) of a right result: half an ulp of the output, and float32 sums of ``k`` products."""
    if dtype == torch.int8:
        return 0.0
    return float(torch.finfo(dtype).eps / 2 + k**0.5 * torch.finfo(torch.float32).eps)


class Inputs:
    """The same random matrices on every rank, drawn from ``seed``."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        if dtype in (torch.int8, torch.int32):
            return torch.randint(-128, 128, (rows, cols), generator=self.generator).to(dtype)
        return torch.randn(rows, cols, generator=self.generator, dtype=torch.float64).to(dtype)

    def bias(self, kind: str | None, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor | None:
        if kind is None:
            return None
        return self.matrix(rows, 1, dtype) if kind == "row" else self.matrix(1, cols, dtype)[0]


def unwritten(ctx: iris.Iris, rows: int, cols: int, dtype: torch.dtype, symmetric: bool) -> torch.Tensor:
    """An output that holds values no right result has."""
    make = ctx.empty if symmetric else torch.empty
    output = make(rows, cols, dtype=dtype, device=ctx.device)
    return output.fill_(float("nan") if dtype.is_floating_point else -(2**31))


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    return float((output.cpu().double() - reference).norm() / reference.norm().clamp(min=1e-300))


def gather_once(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    gather_dim: int,
    bias_kind: str | None,
    transposed: bool,
    config: FusedConfig | None,
    seed: int,
) -> tuple[float, torch.Tensor]:
    ctx, inputs, (rows, n, depth) = context(), Inputs(seed), shape
    world = ctx.world_size
    m, k = (rows * world, depth) if gather_dim == 0 else (rows, depth * world)
    a, b = inputs.matrix(m, k, dtype), inputs.matrix(k, n, dtype)
    bias = inputs.bias(bias_kind, m, n, output_dtype(dtype))
    reference = a.double() @ b.double() + (0 if bias is None else bias.double())
    shard = ctx.as_symmetric(a.chunk(world, gather_dim)[ctx.rank].contiguous().to(ctx.device))
    b = b.to(ctx.device)
    b = b.T.contiguous().T if transposed else b
    output = unwritten(ctx, m, n, output_dtype(dtype), symmetric=False)
    on_device = None if bias is None else bias.to(ctx.device)
    iris.ops.all_gather_matmul(ctx, output, shard, b, on_device, gather_dim=gather_dim, config=config)
    ctx.synchronize()
    return relative_error(output, reference), output.cpu()


def scatter_once(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    bias_kind: str | None,
    transposed: bool,
    config: FusedConfig | None,
    seed: int,
) -> tuple[float, torch.Tensor]:
    ctx, inputs, (m, n, k) = context(), Inputs(seed), shape
    world, rank = ctx.world_size, ctx.rank
    a, b = inputs.matrix(m, k, dtype), inputs.matrix(k, n * world, dtype)
    bias = inputs.bias(bias_kind, m, n * world, output_dtype(dtype))
    reference = a.double() @ b.double() + (0 if bias is None else bias.double())
    mine = b[:, rank * n : (rank + 1) * n].to(ctx.device)
    mine = mine.T.contiguous().T if transposed else mine
    if bias is not None and bias_kind == "column":
        bias = bias[rank * n : (rank + 1) * n]
    output = unwritten(ctx, m, n * world, output_dtype(dtype), symmetric=True)
    ctx.barrier()
    on_device = None if bias is None else bias.to(ctx.device).contiguous()
    iris.ops.matmul_all_scatter(ctx, output, a.to(ctx.device), mine, on_device, config=config)
    ctx.synchronize()
    return relative_error(output, reference), output.cpu()


def every_gather(algorithm: str, dtype: torch.dtype, gather_dim: int, seed: int) -> list[tuple[Any, float]]:
    poison(context())
    config = replace(SMALL, algorithm=algorithm, num_chunks=2)
    errors = []
    for index, shape in enumerate(shapes_for(dtype, gather_dim + GATHER_ALGORITHMS.index(algorithm))):
        bias, transposed = BIASES[index % 3], index % 2 == 1
        error, _ = gather_once(shape, dtype, gather_dim, bias, transposed, config, seed + index)
        errors.append((shape, error))
    return errors


def every_scatter(dtype: torch.dtype, seed: int) -> list[tuple[Any, float]]:
    poison(context())
    errors = []
    for index, shape in enumerate(shapes_for(dtype, 0)):
        bias, transposed = BIASES[index % 3], index % 2 == 1
        error, _ = scatter_once(shape, dtype, bias, transposed, SMALL, seed + index)
        errors.append((shape, error))
    return errors


@pytest.mark.parametrize("gather_dim", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", GATHER_ALGORITHMS)
def test_all_gather_matmul(ranks: Ranks, algorithm: str, dtype: torch.dtype, gather_dim: int, seed: int) -> None:
    for errors in ranks.run(every_gather, algorithm, dtype, gather_dim, seed):
        for shape, error in errors:
            assert error <= tolerance(dtype, shape[2] * ranks.world_size), shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matmul_all_scatter(ranks: Ranks, dtype: torch.dtype, seed: int) -> None:
    for errors in ranks.run(every_scatter, dtype, seed):
        for shape, error in errors:
            assert error <= tolerance(dtype, shape[2]), shape


def picked(seed: int) -> tuple[float, float, float]:
    """With ``config=None``, on a shape that fills several of the picked tiles, and B by TMA where there is TMA."""
    shape = (160, 144, 256)
    return (
        gather_once(shape, torch.float16, 0, None, False, None, seed)[0],
        gather_once(shape, torch.float16, 1, None, False, None, seed)[0],
        scatter_once(shape, torch.float16, None, False, None, seed)[0],
    )


def test_picked_config(ranks: Ranks, seed: int) -> None:
    for errors in ranks.run(picked, seed):
        assert max(errors) <= tolerance(torch.float16, 256 * ranks.world_size)


def same_everywhere(seed: int) -> bool:
    """Ranks that compute the same thing agree bit for bit, and so do two calls."""
    ctx = context()
    outputs = [scatter_once((37, 29, 71), torch.bfloat16, None, False, SMALL, seed)[1] for _ in range(2)]
    first = ctx.broadcast(outputs[0].view(torch.int16), 0).cpu()
    return all(torch.equal(output.view(torch.int16), first) for output in outputs)


def test_bitwise_equal_on_all_ranks_and_calls(ranks: Ranks, seed: int) -> None:
    assert all(ranks.run(same_everywhere, seed))


def back_to_back(algorithm: str, seed: int, late_rank: int) -> list[float]:
    """Three calls in a row with other shapes and no barrier, one rank always late; inputs overwritten in between."""
    ctx = context()
    shard = ctx.empty(24, 32, dtype=torch.float32)
    ctx.barrier()
    errors = []
    for index, (rows, n, k) in enumerate(((7, 5, 32), (24, 33, 31), (16, 16, 1))):
        inputs = Inputs(seed + index)
        a, b = inputs.matrix(rows * ctx.world_size, k, torch.float32), inputs.matrix(k, n, torch.float32)
        here = shard.view(-1)[: rows * k].view(rows, k)
        here.copy_(a.chunk(ctx.world_size)[ctx.rank])
        output = unwritten(ctx, rows * ctx.world_size, n, torch.float32, symmetric=False)
        if ctx.rank == late_rank:
            time.sleep(0.005)
        config = replace(SMALL, algorithm=algorithm)
        iris.ops.all_gather_matmul(ctx, output, here, b.to(ctx.device), gather_dim=0, config=config)
        here.fill_(float("nan"))
        ctx.synchronize()
        errors.append(relative_error(output, a.double() @ b.double()))
    return errors


@pytest.mark.parametrize("ranks", worlds(2, 4), indirect=True)
@pytest.mark.parametrize("algorithm", GATHER_ALGORITHMS)
def test_back_to_back_with_a_late_rank(ranks: Ranks, algorithm: str, seed: int) -> None:
    for late_rank in range(ranks.world_size):
        for errors in ranks.run(back_to_back, algorithm, seed, late_rank):
            assert max(errors) <= tolerance(torch.float32, 32)


def chunks_that_arrived(num_chunks: int) -> tuple[int, bool]:
    """How many flags peers set, and whether each holds the epoch of the second call."""
    ctx = context()
    config = replace(SMALL, algorithm="copy_engine", num_chunks=num_chunks)
    workspace = new_workspace(ctx, "all_gather_matmul", 1 << 16)
    shard, b = ctx.zeros(64, 16, dtype=torch.float16), torch.zeros(16, 16, dtype=torch.float16, device=ctx.device)
    output = torch.zeros(64 * ctx.world_size, 16, dtype=torch.float16, device=ctx.device)
    for _ in range(2):
        ctx.ops.all_gather_matmul(output, shard, b, gather_dim=0, config=config, workspace=workspace)
    ctx.synchronize()
    epochs = workspace.ready[workspace.ready != 0]
    return epochs.numel(), bool((epochs == 2).all())


@pytest.mark.parametrize("num_chunks", [1, 3, 4])
@pytest.mark.parametrize("ranks", worlds(2, 3), indirect=True)
def test_num_chunks(ranks: Ranks, num_chunks: int) -> None:
    arrived = {1: 1, 3: 2, 4: 4}[num_chunks] * (ranks.world_size - 1)  # four block rows: two to a chunk for three
    assert ranks.run(chunks_that_arrived, num_chunks) == [(arrived, True)] * ranks.world_size


def gather_dim_from_shapes(seed: int) -> tuple[float, float]:
    ctx, inputs = context(), Inputs(seed)
    a, b = inputs.matrix(8, 12 * ctx.world_size, torch.float32), inputs.matrix(12 * ctx.world_size, 8, torch.float32)
    by_columns = ctx.as_symmetric(a.chunk(ctx.world_size, 1)[ctx.rank].contiguous().to(ctx.device))
    output = torch.empty(8, 8, device=ctx.device)
    ctx.ops.all_gather_matmul(output, by_columns, b.to(ctx.device), config=SMALL)
    ctx.synchronize()
    first = relative_error(output, a.double() @ b.double())
    by_rows = ctx.as_symmetric(b.chunk(ctx.world_size)[ctx.rank].contiguous().to(ctx.device))
    output = torch.empty(b.shape[0], 8, device=ctx.device)
    ctx.ops.all_gather_matmul(output, by_rows, a[:8, :8].contiguous().to(ctx.device), config=SMALL)
    ctx.synchronize()
    return first, relative_error(output, b.double() @ a[:8, :8].double())


@pytest.mark.parametrize("ranks", worlds(2, 4), indirect=True)
def test_gather_dim_is_told_from_the_shapes(ranks: Ranks, seed: int) -> None:
    for errors in ranks.run(gather_dim_from_shapes, seed):
        assert max(errors) <= tolerance(torch.float32, 48)


def traced(seed: int) -> tuple[set[str], bool, float]:
    ctx, inputs = context(), Inputs(seed)
    shard = ctx.as_symmetric(inputs.matrix(32, 32, torch.float32).to(ctx.device))
    output = torch.empty(32 * ctx.world_size, 32, device=ctx.device)
    ctx.ops.all_gather_matmul(output, shard, shard.clone(), gather_dim=0, config=SMALL, trace=True)
    trace = ctx.last_trace
    events = trace.events(ctx)
    ordered = all(event.start_ns <= event.end_ns for event in events)
    everyone = trace.gather(ctx)
    assert {event.rank for event in everyone} == set(range(ctx.world_size))
    return {event.kind for event in events}, ordered, trace.waited_s(ctx)


def test_trace(ranks: Ranks, seed: int) -> None:
    for kinds, ordered, waited_s in ranks.run(traced, seed):
        assert {"wg_gemm", "wg_gemm_wait"} <= kinds
        assert ordered
        assert 0 <= waited_s < 60


def bad_calls() -> dict[str, Failure]:
    """Every error path; nothing is launched by any of them, so the ranks need not agree."""
    ctx = context()
    world = ctx.world_size
    shard = ctx.zeros(8, 16)
    b, wide = torch.zeros(16, 8, device=ctx.device), torch.zeros(8 * world, 8, device=ctx.device)
    columns = ctx.zeros(8, 8 * world)
    a, ops = torch.zeros(8, 16, device=ctx.device), ctx.ops

    def gather(output: Any = wide, shard: Any = shard, b: Any = b, bias: Any = None, **options: Any) -> Failure:
        return failure_of(lambda: ops.all_gather_matmul(output, shard, b, bias, **{"gather_dim": 0, **options}))

    def scatter(output: Any = columns, a: Any = a, b: Any = b, bias: Any = None, **options: Any) -> Failure:
        return failure_of(lambda: ops.matmul_all_scatter(output, a, b, bias, **options))

    failures = {
        "off heap": gather(shard=a),
        "output off heap": scatter(output=torch.zeros(8, 8 * world, device=ctx.device)),
        "dtype": gather(shard=ctx.zeros(8, 16, dtype=torch.float64), b=b.double()),
        "dtypes differ": gather(b=b.half()),
        "output dtype": gather(output=wide.half()),
        "three dimensions": gather(b=b[None]),
        "depth": scatter(b=b[:15]),
        "output shape": gather(output=wide[:-1]),
        "bias shape": scatter(bias=torch.zeros(5, device=ctx.device)),
        "bias dtype": scatter(bias=torch.zeros(8, dtype=torch.float16, device=ctx.device)),
        "gather_dim": gather(gather_dim=2),
        "algorithm": gather(config=FusedConfig(algorithm="magic")),
        "block size": scatter(config=FusedConfig(block_size_m=48)),
        "too many programs": scatter(config=FusedConfig(num_sms=ctx.num_sms + 1)),
        "workspace": gather(workspace=new_workspace(ctx, "matmul_all_scatter")),
        "small workspace": gather(workspace=new_workspace(ctx, OP, 64), config=replace(SMALL, algorithm="copy_engine")),
        "not a tensor": gather(b=[[1.0]]),
    }
    if ctx.device.type == "cuda":
        failures["device"] = gather(b=b.cpu())
    return failures


EXPECTED = {
    "off heap": ("PlacementError", "A_sharded", "ctx.as_symmetric"),
    "output off heap": ("PlacementError", "output", "ctx.empty"),
    "dtype": ("DTypeError", "A_sharded", "float64"),
    "dtypes differ": ("DTypeError", "B", "float16"),
    "output dtype": ("DTypeError", "output", "float16"),
    "three dimensions": ("ShapeError", "B", "2 dimensions"),
    "depth": ("ShapeError", "B", "(16, 8)"),
    "output shape": ("ShapeError", "output", "8"),
    "bias shape": ("ShapeError", "bias", "(5,)"),
    "bias dtype": ("DTypeError", "bias", "float16"),
    "gather_dim": ("ArgumentError", "gather_dim", "0, 1 or None"),
    "algorithm": ("ArgumentError", "config.algorithm", "magic"),
    "block size": ("ArgumentError", "config.block_size_m", "power of two"),
    "too many programs": ("ArgumentError", "config.num_sms", "resident"),
    "workspace": ("ArgumentError", "workspace", "new_workspace"),
    "small workspace": ("ArgumentError", "workspace", "new_workspace"),
    "not a tensor": ("DTypeError", "B", "list"),
    "device": ("PlacementError", "B", "cpu"),
}


def test_bad_arguments(ranks: Ranks) -> None:
    for failures in ranks.run(bad_calls):
        for case, failure in failures.items():
            if case == "small workspace" and ranks.world_size == 1:
                continue  # one rank stages nothing
            kind, argument, words = EXPECTED[case]
            assert failure.kind == kind, (case, failure)
            assert argument in failure.message and words in failure.message, (case, failure)
            assert failure.message.startswith(("all_gather_matmul: ", "matmul_all_scatter: "))
            assert failure.took_s < 2


def one_rank_missing() -> Failure:
    with fresh(timeout_s=0.5) as ctx:
        shard = ctx.zeros(16, 32)
        output = torch.zeros(16 * ctx.world_size, 16, device=ctx.device)
        b = torch.zeros(32, 16, device=ctx.device)
        ctx.ops.all_gather_matmul(output, shard, b, gather_dim=0, config=SMALL)
        ctx.barrier()

        def call_alone() -> None:
            if ctx.rank != 1:
                ctx.ops.all_gather_matmul(output, shard, b, gather_dim=0, config=SMALL)
                ctx.synchronize()
            else:
                time.sleep(1.2)
                ctx.synchronize()

        failure = failure_of(call_alone)
        ctx.check = lambda: None  # type: ignore[method-assign]
        return failure


@pytest.mark.parametrize("ranks", worlds(2, 4), indirect=True)
def test_op_that_one_rank_does_not_call(ranks: Ranks) -> None:
    failures = ranks.run(one_rank_missing)
    for rank, failure in enumerate(failures):
        assert failure.kind == "WaitTimeout", (rank, failure)
        if rank != 1:
            assert "all_gather_matmul" in failure.message and "rank 1" in failure.message
            assert failure.took_s < 1.5 + (10 if BACKEND == "sim" else 0)


def captured(seed: int, replays: int) -> list[float]:
    """A graph of both ops, replayed with fresh inputs."""
    ctx, inputs = context(), Inputs(seed)
    world, (m, n, k) = ctx.world_size, (48, 40, 64)
    shard, b = ctx.empty(m, k, dtype=torch.float16), torch.empty(k, n, dtype=torch.float16, device=ctx.device)
    gathered = torch.empty(m * world, n, dtype=torch.float16, device=ctx.device)
    scattered = ctx.empty(m * world, n * world, dtype=torch.float16)
    full = torch.empty(m * world, k, dtype=torch.float16, device=ctx.device)

    staged = replace(SMALL, algorithm="copy_engine", num_chunks=2)

    def both() -> None:
        ctx.ops.all_gather_matmul(gathered, shard, b, gather_dim=0, config=staged)
        ctx.ops.matmul_all_scatter(scattered, full, b, config=SMALL)
        ctx.device_barrier()

    both()
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    errors = [0.0]
    for replay in range(replays):
        a = inputs.matrix(m * world, k, torch.float16).to(ctx.device)
        columns = inputs.matrix(k, n * world, torch.float16).to(ctx.device)
        full.copy_(a)
        shard.copy_(a.chunk(world)[ctx.rank])
        b.copy_(columns.chunk(world, 1)[ctx.rank])
        gathered.fill_(float("nan"))
        graph.replay()
        if replay % 50 == 0:
            reference = (a.double() @ columns.double()).cpu()
            errors.append(relative_error(scattered, reference))
            errors.append(relative_error(gathered, reference.chunk(world, 1)[ctx.rank]))
    ctx.synchronize()
    return errors


@pytest.mark.skipif(BACKEND == "sim", reason="graphs are captured on GPUs only")
def test_graph_replay(ranks: Ranks, seed: int) -> None:
    for errors in ranks.run(captured, seed, 1000):
        assert max(errors) <= tolerance(torch.float16, 64)
