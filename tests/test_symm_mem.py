"""PyTorch's fused ops, ``torch.ops.symm_mem.fused_*``, computed by Iris."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ops_inputs import Inputs
from ranks import BACKEND, Failure, Ranks, context, failure_of, worlds
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch._subclasses import FakeTensorMode
from torch.distributed import _symmetric_memory  # defines the ops

import iris
from iris.ops import all_gather_matmul, matmul_reduce_scatter, replace_symm_mem, symm_mem
from iris.ops.symm_mem import _context_of

FP8 = torch.float8_e4m3fn
LIBRARY = torch.ops.symm_mem


@contextmanager
def replaced(path: str) -> Iterator[tuple[iris.Iris, Any]]:
    """A context that serves a process group, and the group's name. Collective."""
    rank, size = context().rank, context().world_size
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    try:
        with iris.iris(4 << 20, timeout_s=30, first_timeout_s=90) as ctx:
            replace_symm_mem(ctx)
            yield ctx, dist.group.WORLD.group_name  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()


def drawn(ctx: iris.Iris, seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers, the same for the same seed."""
    return Inputs(seed).matrix(1, torch.Size(shape).numel(), torch.float32).view(shape).to(dtype).to(ctx.device)


def close(found: torch.Tensor, expected: torch.Tensor, rounding: float) -> bool:
    error = (found.double() - expected).norm() / expected.norm()
    return found.shape == expected.shape and float(error) <= rounding


def fake_strides(name: str, *args: Any, **kwargs: Any) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    """Shapes, strides and dtypes of the results as PyTorch's compilers expect them."""
    with FakeTensorMode() as mode:
        fake = [
            mode.from_tensor(one) if isinstance(one, torch.Tensor)
            else [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in one]
            if isinstance(one, list) else one
            for one in args
        ]  # fmt: skip
        return described(getattr(LIBRARY, name)(*fake, **kwargs))


def described(result: Any) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    flat = [result] if isinstance(result, torch.Tensor) else [result[0], *result[1]]
    return [(one.shape, one.stride(), one.dtype) for one in flat if one is not None]


def gathers(path: str, seed: int) -> list[str]:
    """What is wrong with gathers along each dimension, with one and with two matrices B."""
    wrong = []
    with replaced(path) as (ctx, group):
        shape = (3, 4, 8)
        for dim, count, return_a, dtype in itertools.product(
            range(3), (1, 2), (False, True), (torch.float32, torch.bfloat16)
        ):
            parts = [drawn(ctx, seed + rank, *shape, dtype=dtype) for rank in range(ctx.world_size)]
            whole = torch.cat(parts, dim)
            k = whole.shape[-1]
            bs = [drawn(ctx, seed + 50 + ctx.rank + i, k, 16 + 8 * i, dtype=dtype) for i in range(count)]
            bs[0].requires_grad_()  # as a model's weight
            args = (parts[ctx.rank], bs, dim, group)
            with torch.inference_mode(count == 2):
                a, products = LIBRARY.fused_all_gather_matmul(*args, return_A=return_a)
            ctx.synchronize()
            name = f"dim {dim}, {count}, {return_a}, {dtype}"
            if (a is None) == return_a or (a is not None and not torch.equal(a, whole)):
                wrong.append(f"{name}: A")
            for b, product in zip(bs, products, strict=True):
                if not close(product, whole.double() @ b.double(), torch.finfo(dtype).eps * (1 + (dim == 2) * 2)):
                    wrong.append(f"{name}: product")
            expected = fake_strides("fused_all_gather_matmul", *args, return_A=return_a)
            if described((a, products)) != expected:
                wrong.append(f"{name}: {described((a, products))}, not {expected}")
    return wrong


def scatters(path: str, seed: int) -> list[str]:
    """What is wrong with reduce-scatters along each dimension."""
    wrong = []
    with replaced(path) as (ctx, group):
        world = ctx.world_size
        for dim, op, dtype in itertools.product(range(2), ("sum", "avg"), (torch.float32, torch.bfloat16)):
            shape = (3 * world, 4 * world, 8)
            pairs = [
                (drawn(ctx, seed + r, *shape, dtype=dtype), drawn(ctx, seed + 50 + r, 8, 16, dtype=dtype))
                for r in range(world)
            ]
            total = sum(a.double() @ b.double() for a, b in pairs) / (world if op == "avg" else 1)
            args = (*pairs[ctx.rank], op, dim, group)
            found = LIBRARY.fused_matmul_reduce_scatter(*args)
            ctx.synchronize()
            assert isinstance(total, torch.Tensor)
            if not close(found, total.chunk(world, dim)[ctx.rank], 2 * torch.finfo(dtype).eps):
                wrong.append(f"dim {dim}, {op}, {dtype}")
            if described(found) != (expected := fake_strides("fused_matmul_reduce_scatter", *args)):
                wrong.append(f"dim {dim}, {op}, {dtype}: {described(found)}, not {expected}")
    return wrong


def scaled(path: str, seed: int) -> list[str]:
    """What is wrong with fp8, by kinds of scales: one, one for each row on its rank, or all rows' on all ranks."""
    wrong = []
    with replaced(path) as (ctx, group):
        world, rank = ctx.world_size, ctx.rank
        for kind, made in itertools.product(("one", "sharded", "all"), (torch.bfloat16, torch.float32)):
            parts = [drawn(ctx, seed + r, 4, 5, 32, dtype=FP8) for r in range(world)]
            whole, count = torch.cat(parts).double(), 2 if kind != "sharded" else 1
            rows = drawn(ctx, seed + 20, 4 * world, 5, 1).abs() + 0.5
            scale = torch.full((), 0.25, device=ctx.device) if kind == "one" else rows
            given = rows.chunk(world)[rank] if kind == "sharded" else scale
            bs = [drawn(ctx, seed + 50 + rank + i, 16 + 16 * i, 32, dtype=FP8).t() for i in range(count)]
            of_b = [drawn(ctx, seed + 70 + i, 1, b.shape[1]).abs() + 0.5 for i, b in enumerate(bs)]
            biases = [drawn(ctx, seed + 80, 16, dtype=made), None][:count]
            a, products = LIBRARY.fused_all_gather_scaled_matmul(
                parts[rank], bs, given, of_b, 0, group, biases, [None] * count, [made] * count, [True] * count
            )
            ctx.synchronize()
            if not torch.equal(a.double(), whole):
                wrong.append(f"{kind}, {made}: A")
            for b, by_b, bias, product in zip(bs, of_b, biases, products, strict=True):
                expected = (whole * scale.double()) @ (b.double() * by_b.double())
                expected = expected if bias is None else expected + bias.double()
                if not close(product, expected, max(torch.finfo(made).eps, 2e-3 if BACKEND != "sim" else 1e-5)):
                    wrong.append(f"{kind}, {made}: product")
            if kind == "all":  # scales of a reduce-scatter are those of this rank's product
                continue
            pairs = [
                (drawn(ctx, seed + r, 4 * world, 5, 32, dtype=FP8), drawn(ctx, seed + 30 + r, 16, 32, dtype=FP8).t())
                for r in range(world)
            ]
            total = sum((left.double() * scale.double()) @ right.double() * 0.5 for left, right in pairs)
            half = torch.full((1,), 0.5, device=ctx.device)
            left, right = pairs[rank]
            found = LIBRARY.fused_scaled_matmul_reduce_scatter(
                left, right, scale, half, "sum", 0, 0, group, [4 * world, 5, 16], out_dtype=made
            )
            ctx.synchronize()
            assert isinstance(total, torch.Tensor)
            if not close(found, total.chunk(world)[rank], 2 * max(torch.finfo(made).eps, 2e-3)):
                wrong.append(f"{kind}, {made}: reduce-scatter")
    return wrong


@pytest.mark.parametrize("ranks", worlds(2, 3), indirect=True)
@pytest.mark.parametrize("check", [gathers, scatters, scaled])
def test_results_shapes_and_strides(ranks: Ranks, check: Any, seed: int, tmp_path: Path) -> None:
    assert ranks.run(check, str(tmp_path / "store"), seed) == [[]] * ranks.world_size


def odd_scales(path: str) -> list[str]:
    """What is wrong with fp8 where a scale is easily taken for another one."""
    wrong = []
    with replaced(path) as (ctx, group):
        world, rank, made = ctx.world_size, ctx.rank, torch.bfloat16
        one = torch.ones(1, device=ctx.device)

        def ones(*shape: int) -> torch.Tensor:
            return torch.ones(shape, device=ctx.device).to(FP8)

        row, b = torch.full((1, 1), 1.0 + rank, device=ctx.device), ones(16, 32).t()
        _, (product,) = LIBRARY.fused_all_gather_scaled_matmul(
            ones(1, 32), [b], row, [one], 0, group, [None], [None], [made], [True]
        )
        ctx.synchronize()
        if not torch.equal(product[:, 0].double().cpu(), 32 * torch.arange(1.0, 1 + world).double()):
            wrong.append("a scale of the only row")
        wide = torch.full((4 * world, 2), 0.5, device=ctx.device)[:, :1]  # not contiguous
        found = LIBRARY.fused_scaled_matmul_reduce_scatter(
            ones(4 * world, 32), b, wide, one, "avg", 0, 0, group, [4 * world, 16], out_dtype=torch.float16
        )
        ctx.synchronize()
        if found.unique().tolist() != [16.0]:
            wrong.append(f"strided scales: {found.unique().tolist()}")
        big = torch.full((1,), 1500.0, device=ctx.device)  # 48000 on each rank
        found = LIBRARY.fused_scaled_matmul_reduce_scatter(
            ones(4 * world, 32), b, one, big, "avg", 0, 0, group, [4 * world, 16], out_dtype=torch.float16
        )
        ctx.synchronize()
        if found.unique().tolist() != [48000.0]:
            wrong.append(f"a large average: {found.unique().tolist()}")
    return wrong


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_scales_that_are_easily_mistaken(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(odd_scales, str(tmp_path / "store")) == [[], []]


def another_group_of_the_name(path: str) -> tuple[list[float], bool, bool]:
    """Gathered numbers of ranks by a group of the same name as one that was destroyed, whose ranks are numbered the
    other way round; and whether the older context serves the group, before the younger one does, and after."""
    with replaced(path) as (old, group):
        dist.destroy_process_group()
        rank, size = context().rank, context().world_size
        dist.init_process_group("gloo", init_method=f"file://{path}2", rank=size - 1 - rank, world_size=size)
        before = _context_of(group) is old
        with iris.iris(4 << 20, timeout_s=30) as new:
            replace_symm_mem(new)
            a = torch.full((1, 8), float(dist.get_rank()), device=new.device)
            whole, _ = LIBRARY.fused_all_gather_matmul(a, [torch.ones(8, 8, device=new.device)], 0, group)
            new.synchronize()
            return whole[:, 0].tolist(), before, _context_of(group) is old


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_group_of_the_same_name_is_another_one(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(another_group_of_the_name, str(tmp_path / "store")) == [([0.0, 1.0], False, False)] * 2


def left(path: str) -> dict[str, Failure]:
    """Failures of calls that Iris leaves to PyTorch, which has no kernels for CPUs."""
    found = {}
    with replaced(path) as (ctx, group):
        world = ctx.world_size
        a, b = (torch.ones(4 * world, 4 * world, device=ctx.device) for _ in range(2))
        gather, scatter = LIBRARY.fused_all_gather_matmul, LIBRARY.fused_matmul_reduce_scatter
        found["dtype"] = failure_of(lambda: gather(a.int(), [b.int()], 0, group))
        found["shape"] = failure_of(lambda: gather(a, [b[1:]], 0, group))
        found["columns"] = failure_of(lambda: scatter(a, b, "sum", 1, group))
        found["rows"] = failure_of(lambda: scatter(a[1:], b, "sum", 0, group))
        found["average"] = failure_of(lambda: scatter(a.half(), b.half(), "avg", 0, group))
        found["op"] = failure_of(lambda: scatter(a, b, "max", 0, group))
        other = dist.new_group(list(range(world)))
        found["group"] = failure_of(lambda: gather(a, [b], 0, other.group_name))
    found["closed"] = failure_of(lambda: gather(a, [b], 0, group))
    return found


if BACKEND == "sim":

    @pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
    def test_what_is_left_to_pytorch_says_why(ranks: Ranks, tmp_path: Path) -> None:
        for found in ranks.run(left, str(tmp_path / "store")):
            assert {failure.kind for failure in found.values()} == {"NotImplementedError"}
            why = {name: failure.message.partition(", and ")[2] for name, failure in found.items()}
            assert why["dtype"] == "Iris leaves it to PyTorch: a dtype: torch.int32"
            assert why["shape"].startswith("Iris leaves it to PyTorch: operands: A (8, 8) and B (7, 8)")
            assert why["columns"].endswith("a scatter of columns") and why["rows"].endswith("a dimension of 7")
            assert why["op"].endswith("reduce_op 'max' over a dimension of 8") and "float16" in why["average"]
            assert why["group"].startswith("no open context of Iris serves the group ") and why["closed"]


def refusals(path: str) -> tuple[list[Failure], bool]:
    """Failures of :func:`replace_symm_mem`; whether one that is closed is forgotten."""
    ctx, found = context(), []
    found.append(failure_of(lambda: replace_symm_mem(ctx)))
    found.append(failure_of(lambda: replace_symm_mem(None)))  # type: ignore[arg-type]
    with replaced(path) as (served, group):
        with iris.iris(1 << 20, timeout_s=30) as second:
            replace_symm_mem(second)
            mine = _context_of(group) is second  # the last one
        mine &= _context_of(group) is None
        replace_symm_mem(served)  # again
        mine &= _context_of(group) is served
    closed = _context_of(group) is None
    found.append(failure_of(lambda: replace_symm_mem(served)))
    return found, mine and closed


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_what_serves_no_group_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for found, forgotten in ranks.run(refusals, str(tmp_path / "store")):
        assert [failure.kind for failure in found] == ["ArgumentError"] * 2 + ["ContextError"]
        assert "init_process_group" in found[0].message and found[1].message.startswith("replace_symm_mem: ctx: ")
        assert forgotten


def fused(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
    """What TorchInductor's pass makes of a graph."""
    micro_pipeline_tp_pass(graph.graph)
    graph.recompile()
    return graph


def compiled(path: str) -> tuple[bool, list[int]]:
    """Whether the layers of an MLP with sequence parallelism, which TorchInductor has compiled, are right, and how
    often they called each of Iris's ops."""
    with warnings.catch_warnings(), replaced(path) as (ctx, group):
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch 2.13 has other names, which 2.11 lacks
        _symmetric_memory.enable_symm_mem_for_group(group)
        world, rank = ctx.world_size, ctx.rank
        x = [drawn(ctx, r, 16, 128, dtype=torch.bfloat16) for r in range(world)]
        up = [drawn(ctx, 10 + r, 128, 256, dtype=torch.bfloat16) for r in range(world)]
        down = [drawn(ctx, 20 + r, 256, 128, dtype=torch.bfloat16) for r in range(world)]

        def mlp(own: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            hidden = funcol.all_gather_tensor(own, 0, group) @ up
            total: torch.Tensor = funcol.reduce_scatter_tensor(hidden.relu() @ down, "sum", 0, group)
            return total

        ops = [mock.patch.object(symm_mem, op.__name__, wraps=op) for op in (all_gather_matmul, matmul_reduce_scatter)]
        there = mock.patch("torch.distributed.is_nccl_available", return_value=True)  # else the pass does nothing
        backend = "inductor" if BACKEND != "sim" else aot_autograd(fw_compiler=fused)  # without a C++ compiler
        with (
            inductor.patch(_micro_pipeline_tp=True, force_disable_caches=True),
            torch.no_grad(),
            there,
            ops[0] as gather,
            ops[1] as scatter,
        ):
            found = torch.compile(mlp, backend=backend)(x[rank], up[rank], down[rank])
            ctx.synchronize()
        whole = torch.cat(x).double()
        total = sum((whole @ a.double()).relu() @ b.double() for a, b in zip(up, down, strict=True))
        assert isinstance(total, torch.Tensor)
        return close(found, total.chunk(world)[rank], 1e-2), [gather.call_count, scatter.call_count]


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_what_torchinductor_fuses_runs_on_iris(ranks: Ranks, tmp_path: Path) -> None:
    for right, called in ranks.run(compiled, str(tmp_path / "store")):
        assert right and called == [1, 1]
