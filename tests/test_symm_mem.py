"""PyTorch's fused ops, ``torch.ops.symm_mem.fused_*``, computed by Iris."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ops_inputs import Inputs
from ranks import BACKEND, Failure, Ranks, context, failure_of, worlds
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import iris
from iris.bench.inductor import without_code
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
        cases = itertools.product(range(2), ("sum", "avg"), (torch.float32, torch.bfloat16), (1, 3))
        for dim, op, dtype, each in cases:
            shape = (each * world, 4 * world, 8) if dim == 0 else (5, each * world, 8)
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
                wrong.append(f"dim {dim}, {op}, {dtype}, {shape}")
            if described(found) != (expected := fake_strides("fused_matmul_reduce_scatter", *args)):
                wrong.append(f"dim {dim}, {op}, {dtype}, {shape}: {described(found)}, not {expected}")
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
            turned = [(a.movedim(0, 1).contiguous().flatten(0, 1), b) for a, b in pairs]  # [5, 4 * world], flattened
            by_row = scale if kind == "one" else scale.movedim(0, 1).reshape(-1, 1)
            halves = half if kind == "one" else half.repeat(1, 16)  # PyTorch wants scales of both, or of neither
            args = (*turned[rank], by_row, halves, "sum", 1, 0, group, [5, 4 * world, 16])
            found = LIBRARY.fused_scaled_matmul_reduce_scatter(*args, out_dtype=made)
            ctx.synchronize()
            if not close(found, total.chunk(world)[rank].movedim(0, 1), 2 * max(torch.finfo(made).eps, 2e-3)):
                wrong.append(f"{kind}, {made}: reduce-scatter along the second dimension")
            if described(found) != fake_strides("fused_scaled_matmul_reduce_scatter", *args, out_dtype=made):
                wrong.append(f"{kind}, {made}: {described(found)}")
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


def left(path: str) -> tuple[list[bool], list[str], list[str]]:
    """Whether calls that Iris leaves to PyTorch are right, of which each kind comes twice; what is logged of them; and
    what is warned of."""
    with replaced(path) as (ctx, group), mock.patch.object(ctx, "info") as info:
        world, rank = ctx.world_size, ctx.rank
        parts = [drawn(ctx, r, 2 * world, 4 * world, dtype=torch.float64) for r in range(world)]
        b = drawn(ctx, 9, 4 * world, 4 * world, dtype=torch.float64)
        total, whole = sum(parts), torch.cat(parts)
        assert isinstance(total, torch.Tensor)
        gather, scatter = LIBRARY.fused_all_gather_matmul, LIBRARY.fused_matmul_reduce_scatter
        right = []
        for _ in range(2):
            a, (product,) = gather(parts[rank], [b], 0, group)
            right.append(torch.equal(a, whole) and torch.allclose(product, whole @ b))
            found = scatter(parts[rank].float(), b.float(), "sum", 1, group)
            right.append(torch.allclose(found.double(), (total @ b).chunk(world, 1)[rank], atol=1e-4))
            others = dist.new_group(list(range(world)))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(2):
                a, (product,) = gather(parts[rank], [b], 0, others.group_name)
                right.append(torch.equal(a, whole) and torch.allclose(product, whole @ b))
        return right, [call.args[0] for call in info.call_args_list], [str(one.message) for one in warned]


def reasons(path: str) -> dict[str, str]:
    """Why each of some calls is left to PyTorch."""
    found: dict[str, str] = {}
    with replaced(path) as (ctx, _):
        a = torch.ones(4, 8, device=ctx.device)
        eight, one = a.to(FP8), a[0, :1]
        lists: Any = ([None], [None], [torch.bfloat16], [True])

        def note(name: str, call: Callable[[], object]) -> None:
            with pytest.raises(symm_mem._Left) as reason:
                call()
            found[name] = str(reason.value)

        gather, scatter = symm_mem.fused_all_gather_matmul, symm_mem.fused_matmul_reduce_scatter
        of_fp8, summed = symm_mem.fused_all_gather_scaled_matmul, symm_mem.fused_scaled_matmul_reduce_scatter
        note("dtype", lambda: gather(ctx, a.int(), [a.int()], 0, ""))
        note("no B", lambda: gather(ctx, a, [], 0, ""))
        note("dim", lambda: gather(ctx, a, [a.t()], -1, ""))
        note("shape", lambda: gather(ctx, a, [a], 0, ""))
        note("mixed", lambda: gather(ctx, a, [a.t().half()], 0, ""))
        note("rows", lambda: scatter(ctx, a[1:], a.t(), "sum", 0, ""))
        note("max", lambda: scatter(ctx, a, a.t(), "max", 0, ""))
        note("columns", lambda: scatter(ctx, a, a.t(), "sum", 1, ""))
        note("avg", lambda: scatter(ctx, a.half(), a.t().half(), "avg", 0, ""))
        note("fp8 columns", lambda: of_fp8(ctx, eight, [eight.t()], one, [one], 1, "", *lists))
        note("rows of scales", lambda: of_fp8(ctx, eight, [eight.t()] * 2, a[:, :1], [one] * 2, 0, "", *(
            one * 2 for one in lists
        )))  # fmt: skip
        note("A_scale", lambda: of_fp8(ctx, eight, [eight.t()], a, [one], 0, "", *lists))
        note("out_dtype", lambda: summed(ctx, eight, eight.t(), one, one, "sum", 0, 0, "", [4, 4]))
        note("bias", lambda: summed(ctx, eight, eight.t(), one, one, "sum", 0, 0, "", [4, 4], one))
        note("result", lambda: summed(ctx, eight, eight.t(), one, one, "sum", 0, 0, "", [4, 4], None, one))
        note("scatter", lambda: summed(ctx, eight, eight.t(), one, one, "sum", 2, 0, "", [4, 4], out_dtype=a.dtype))
        note("output", lambda: summed(ctx, eight, eight.t(), one, one, "sum", 0, 0, "", [5, 4], out_dtype=a.dtype))
    return found


if BACKEND == "sim":

    @pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
    def test_what_is_left_to_pytorch_is_right_and_told_once(ranks: Ranks, tmp_path: Path) -> None:
        for right, told, warned in ranks.run(left, str(tmp_path / "store")):
            assert all(right) and len(right) == 6
            assert told == [
                "torch.ops.symm_mem.fused_all_gather_matmul is left to PyTorch: a dtype: torch.float64",
                "torch.ops.symm_mem.fused_matmul_reduce_scatter is left to PyTorch: a scatter of columns",
            ]
            (text,) = [one for one in warned if "symm_mem" in one]
            assert "no open context of Iris serves it ('0' served). Make one by iris.iris(heap_size, group)" in text

    @pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
    def test_why_calls_are_left_to_pytorch(ranks: Ranks, tmp_path: Path) -> None:
        for found in ranks.run(reasons, str(tmp_path / "store")):
            assert found == {
                "dtype": "a dtype: torch.int32", "no B": "no B", "dim": "a dimension: -1 of A (4, 8)",
                "shape": "operands: A (4, 8) and B (4, 8), torch.float32 and torch.float32",
                "mixed": "operands: A (4, 8) and B (8, 4), torch.float32 and torch.float16",
                "rows": "rows that the ranks cannot share evenly: dimension 0 of (3, 8), 2 ranks",
                "max": "a reduction: reduce_op 'max'", "columns": "a scatter of columns",
                "avg": "an average in float16, whose sum may not be finite",
                "fp8 columns": "a scaled gather of columns",
                "rows of scales": "several matrices B, and scales of this rank's rows of A",
                "A_scale": "A_scale of shape (4, 8)",
                "out_dtype": "dtypes: a product of torch.float8_e4m3fn with out_dtype None",
                "bias": "a bias, which PyTorch adds once for each rank", "result": "a result_scale",
                "scatter": "a dimension: 2 of A (4, 8)", "output": "output_shape (5, 4) of A (4, 8)",
            }  # fmt: skip


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


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(2, (-1, 8)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """A block of a Llama-like model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = Attention(width)
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((width, 48), (width, 48), (48, width))
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        inner = self.norms[1](x)
        result: torch.Tensor = x + self.down(nn.functional.silu(self.gate(inner)) * self.up(inner))
        return result


def parallel(block: Block, mesh: DeviceMesh) -> nn.Module:
    """``block`` with tensor and sequence parallelism."""
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    gathering = ColwiseParallel(input_layouts=Shard(1))
    scattered = RowwiseParallel(output_layouts=Shard(1))
    plan: dict[str, ParallelStyle] = {
        "norms.0": SequenceParallel(), "norms.1": SequenceParallel(), "attention": whole, "attention.wo": scattered,
        "gate": gathering, "up": gathering, "down": scattered,
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
    }  # fmt: skip
    return parallelize_module(block, mesh, plan)


def compiled(path: str, seed: int) -> tuple[dict[str, float], list[int]]:
    """Relative errors of a compiled block's output and gradients, and how often its forward and backward passes called
    each of Iris's ops."""
    from torch._inductor import config as inductor

    with replaced(path) as (ctx, _):
        world, rank, device = ctx.world_size, ctx.rank, ctx.device
        torch.manual_seed(seed)
        right = Block(32).to(device)
        mesh = DeviceMesh(device.type, list(range(world)))
        block = parallel(copy.deepcopy(right), mesh)
        x, goal = drawn(ctx, seed, 2, 8 * world, 32), drawn(ctx, seed + 1, 2, 8 * world, 32)
        own, whole = x.chunk(world, 1)[rank].clone().requires_grad_(), x.clone().requires_grad_()
        ops = [mock.patch.object(symm_mem, op.__name__, wraps=op) for op in (all_gather_matmul, matmul_reduce_scatter)]
        with inductor.patch(_micro_pipeline_tp=True, force_disable_caches=True), ops[0] as gather, ops[1] as sums:
            layer = torch.compile(block, backend=without_code)
            found = layer(own)
            counts = [gather.call_count, sums.call_count]
            (found - goal.chunk(world, 1)[rank]).square().sum().backward()
            counts += [gather.call_count - counts[0], sums.call_count - counts[1]]
        expected = right(whole)
        (expected - goal).square().sum().backward()
        ctx.synchronize()
        assert own.grad is not None and whole.grad is not None
        pairs = {"output": (found, expected.chunk(world, 1)[rank]), "x": (own.grad, whole.grad.chunk(world, 1)[rank])}
        for (name, one), other in zip(block.named_parameters(), right.parameters(), strict=True):
            pairs[name] = (cast(DTensor, one.grad).full_tensor(), cast(torch.Tensor, other.grad))
        return {name: float((a - b).norm() / b.norm()) for name, (a, b) in pairs.items()}, counts


def compiled_mlp(path: str) -> tuple[bool, list[int]]:
    """Whether two layers that TorchInductor has compiled are right, and how often they called each of Iris's ops. All
    collectives are fused, as gloo, which ranks that share a GPU need, has none for GPUs."""
    from torch._inductor import config as inductor

    with warnings.catch_warnings(), replaced(path) as (ctx, group):
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch 2.13 has other names, which 2.11 lacks
        from torch.distributed import _functional_collectives as funcol

        world, rank = ctx.world_size, ctx.rank
        x, up, down = (
            [drawn(ctx, first + r, *shape, dtype=torch.bfloat16) for r in range(world)]
            for first, shape in ((0, (16, 128)), (10, (128, 256)), (20, (256, 128)))
        )

        def mlp(own: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            hidden = funcol.all_gather_tensor(own, 0, group) @ up
            total: torch.Tensor = funcol.reduce_scatter_tensor(hidden.relu() @ down, "sum", 0, group)
            return total

        ops = [mock.patch.object(symm_mem, op.__name__, wraps=op) for op in (all_gather_matmul, matmul_reduce_scatter)]
        with inductor.patch(_micro_pipeline_tp=True), torch.no_grad(), ops[0] as gather, ops[1] as sums:
            found = torch.compile(mlp)(x[rank], up[rank], down[rank])
            ctx.synchronize()
        whole = torch.cat(x).double()
        total = sum((whole @ a.double()).relu() @ b.double() for a, b in zip(up, down, strict=True))
        assert isinstance(total, torch.Tensor)
        return close(found, total.chunk(world)[rank], 1e-2), [gather.call_count, sums.call_count]


if BACKEND == "sim":

    @pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
    def test_a_block_that_torchinductor_has_fused_runs_on_iris(ranks: Ranks, seed: int, tmp_path: Path) -> None:
        """In the backward pass TorchInductor does not fuse the sum of what q, k and v have received. In the forward
        pass it fuses both gathers in PyTorch 2.13, and one in 2.14."""
        gathers = 1 if torch.__version__.startswith("2.14.") else 2
        for errors, counts in ranks.run(compiled, str(tmp_path / "store"), seed):
            assert max(errors.values()) < 1e-5, errors
            assert counts == [gathers, 2, 2, 2]

else:

    @pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
    def test_what_torchinductor_has_fused_runs_on_iris(ranks: Ranks, tmp_path: Path) -> None:
        for right, counts in ranks.run(compiled_mlp, str(tmp_path / "store")):
            assert right and counts == [1, 1]
