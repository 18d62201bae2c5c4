"""Ops in the graphs that ``torch.compile`` makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import BACKEND, Failure, Ranks, failure_of, fresh, worlds

import iris
from iris.ops import FusedConfig, new_workspace
from iris.ops.graphed import _Buffer, _config_of, _text_of

TWO = pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
COMPILERS = ["aot_eager"] if BACKEND == "sim" else ["aot_eager", "inductor"]
"""Without TorchInductor on CPUs, where it needs a C++ compiler."""
TILE = FusedConfig("two_shot", block_size_m=16, block_size_n=16, block_size_k=16, num_sms=2, num_warps=4)
ROWS, INNER = 12, 32
BOUND = 1e-5
"""The largest error in float32, relative to the largest expected number."""


def compiled(function: Callable[..., Any], compiler: Any, **options: Any) -> Callable[..., Any]:
    """``function`` compiled as one graph, without anything that was compiled before."""
    torch._dynamo.reset()
    made: Callable[..., Any] = torch.compile(function, backend=compiler, fullgraph=True, **options)
    return made


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def drawn(ctx: iris.Iris, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers, equal on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(ctx.device)


def of_each_op(compiler: str) -> list[float]:
    """The errors of each op in one graph, with and without a bias, against plain PyTorch."""
    with fresh(1 << 20) as ctx, torch.no_grad():
        x, weight, bias = drawn(ctx, ROWS, INNER), drawn(ctx, INNER, INNER, seed=1), drawn(ctx, INNER, seed=2)
        heap, matmul = ctx.empty(2, ROWS, INNER, dtype=torch.float32), ctx.ops.matmul

        def own(tensor: torch.Tensor, dim: int) -> torch.Tensor:
            return tensor.chunk(ctx.world_size, dim)[ctx.rank]

        def layers(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            rows = iris.ops.all_gather_matmul(
                ctx, torch.empty_like(x), A_sharded=own(x, 0), B=weight, bias=bias, gather_dim=0
            )
            columns = ctx.ops.all_gather_matmul(torch.empty_like(x), own(x, 1), weight, gather_dim=1, config="push")
            scattered = ctx.ops.matmul_reduce_scatter(torch.empty_like(own(x, 0)), own(x, 1), own(weight, 0), bias)
            everywhere = ctx.ops.matmul_all_scatter(heap[0], x, own(weight, 1))
            reduced = ctx.ops.matmul_all_reduce(heap[1], own(x, 1), own(weight, 0), config=TILE)
            alone = torch.empty_like(x)
            matmul(alone, x * 2, weight)
            return rows, columns, scattered, everywhere + 1, reduced + 1, alone

        found = compiled(layers, compiler)(x)
        ctx.synchronize()
        product = x @ weight
        expected = product + bias, product, own(product + bias, 0), product + 1, product + 1, product * 2
        written = [error(one, product) for one in heap]
        return written + [error(one, other) for one, other in zip(found, expected, strict=True)]


@TWO
@pytest.mark.parametrize("compiler", COMPILERS)
def test_each_op_in_one_graph(ranks: Ranks, compiler: str) -> None:
    for errors in ranks.run(of_each_op, compiler):
        assert len(errors) == 8 and max(errors) < BOUND, errors


def two_nodes() -> list[float]:
    """The errors of the results of two nodes after the second one, which uses the same buffer, has run."""
    node = torch.ops.iris.matmul_all_reduce.default
    with fresh(1 << 20) as ctx, torch.no_grad():
        x, weight, others = drawn(ctx, ROWS, INNER), drawn(ctx, INNER, INNER, seed=1), [None] * 4
        made = [node(ctx._key, x.shape, x.dtype, factor * x, weight, *others, "two_shot") for factor in (1, 2)]
        ctx.synchronize()
        return [error(one, factor * ctx.world_size * x @ weight) for factor, one in enumerate(made, 1)]


@TWO
def test_what_a_node_has_made_outlasts_the_next(ranks: Ranks) -> None:
    for errors in ranks.run(two_nodes):
        assert max(errors) < BOUND, errors


def layers_that_share(compiler: str) -> tuple[list[float], int]:
    """Errors of three calls in a row of layers that write one output, with numbers of rows that the graph does not
    know; and the number of graphs."""
    with fresh(1 << 20) as ctx, torch.no_grad():
        shared = ctx.empty(ROWS + 8, INNER, dtype=torch.float32)
        weights = [drawn(ctx, INNER, INNER, seed=seed) / INNER for seed in range(3)]

        def layers(x: torch.Tensor) -> torch.Tensor:
            for weight in weights:
                own, part = (one.chunk(ctx.world_size, dim)[ctx.rank] for one, dim in ((x, 1), (weight, 0)))
                x = x + ctx.ops.matmul_all_reduce(shared[: x.shape[0]], own, part, config="two_shot")
            return x

        torch._dynamo.utils.counters.clear()
        model, found = compiled(layers, compiler, dynamic=True), []
        for rows in (ROWS, ROWS // 2, ROWS):
            x = drawn(ctx, rows, INNER, seed=rows)
            result = model(x)
            ctx.synchronize()
            for weight in weights:
                product = x @ weight
                x = x + product
            found += [error(result, x), error(shared[:rows], product)]
        return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@TWO
@pytest.mark.parametrize("compiler", COMPILERS)
def test_layers_may_share_an_output(ranks: Ranks, compiler: str) -> None:
    """A graph reads the result of each layer, although the next one writes to the same memory."""
    for errors, graphs in ranks.run(layers_that_share, compiler):
        assert graphs == 1 and max(errors) < BOUND, errors


def nodes_of_calls() -> list[str]:
    """The configs of the nodes that calls become."""
    seen: list[str] = []

    def note(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        seen.extend(str(node.args[-1]) for node in graph.graph.nodes if str(node.target).startswith("iris."))
        return graph.forward

    with fresh(1 << 20) as ctx, torch.no_grad():
        x = drawn(ctx, ROWS, INNER)
        for config in (None, "auto", "local", replace(TILE, algorithm="local")):
            compiled(lambda config=config: ctx.ops.matmul(x.new_empty(ROWS, ROWS), x, x.t(), config=config), note)()
    return seen


@TWO
def test_a_call_is_one_node(ranks: Ranks) -> None:
    for *named, tile in ranks.run(nodes_of_calls):
        assert named == ["auto", "auto", "local"]
        assert _config_of(tile) == replace(TILE, algorithm="local")


def test_every_field_of_a_config_is_in_its_node() -> None:
    numbers = iter(range(16, 1 << 10))
    kinds: dict[type, Callable[[Any], Any]] = {
        str: lambda value: value[::-1], bool: lambda value: not value, float: lambda value: value / 2,
    }  # fmt: skip
    default = FusedConfig("ring")
    changed = {name: kinds.get(type(value), lambda _: next(numbers))(value) for name, value in vars(default).items()}
    other = FusedConfig(**changed)
    assert not vars(other).items() & vars(default).items()
    for config in (default, other):
        assert _config_of(_text_of(config)) == config


def mistakes() -> list[Failure]:
    """The errors of graphs: when they run, when they are made (PyTorch then reports what was raised), and when their
    context is gone."""
    with fresh(1 << 20) as ctx, torch.no_grad():
        x, few = drawn(ctx, ROWS, INNER), drawn(ctx, INNER - 1, INNER)
        layer = compiled(lambda a, b: ctx.ops.matmul(torch.empty_like(a), a, b), "eager")
        found = [failure_of(layer, x, few)]
        with torch.enable_grad():
            found.append(failure_of(layer, x, drawn(ctx, INNER, INNER).requires_grad_()))
            a, b = x.clone().requires_grad_(), drawn(ctx, INNER, INNER)
            gather = compiled(lambda: iris.ops.all_gather_matmul(ctx, ctx.rank + x, a, b, gather_dim=1), "eager")
            found.append(failure_of(gather))
        wrong: dict[str, Any] = {"gather_dim": 0}
        loose = torch.compile(lambda: ctx.ops.matmul(torch.empty_like(x), x, x, **wrong), backend="eager")
        found.append(failure_of(loose))
        flat = torch.compile(lambda: ctx.ops.matmul(x[0], x, x.t()), backend="eager")
        found.append(failure_of(flat))
        option = torch.compile(lambda: ctx.ops.matmul(x @ x.t(), x, x.t(), config="local=1"), backend="eager")
        found.append(failure_of(option))
        odd = replace(TILE, algorithm="local", chunk_growth=float("nan"))
        growth = torch.compile(lambda: ctx.ops.matmul(x @ x.t(), x, x.t(), config=odd), backend="eager")
        found.append(failure_of(growth))
        node = torch.ops.iris.matmul.default
        operands = x.shape, x.dtype, x, x.t().contiguous(), None, None, None, None, "auto"
    return [*found, failure_of(layer, x, x.t()), failure_of(node, "none", *operands)]


@TWO
def test_mistakes_in_graphs_are_typed(ranks: Ranks) -> None:
    for shape, gradient, named, unknown, flat, option, growth, closed, gone in ranks.run(mistakes):
        assert shape.kind == "ShapeError" and "matmul: B" in shape.message, shape
        for failure, argument in ((gradient, "matmul: B"), (named, "all_gather_matmul: A_sharded")):
            assert "RuntimeError" in failure.bases and f"{argument}: expected a tensor that" in failure.message, failure
        assert unknown.kind == "TypeError" and "gather_dim" in unknown.message, unknown
        assert "ShapeError" in flat.bases and "matmul: output" in flat.message, flat
        for failure, argument in ((option, "local=1"), (growth, "chunk_growth")):
            assert "ArgumentError" in failure.bases and argument in failure.message, failure
        assert closed.kind == "ContextError" and "closed" in closed.message, closed
        assert gone.kind == "ContextError" and "compile again" in gone.message, gone


def of_another_context() -> list[float]:
    """Errors of one compiled function, called with a context, and then with another one."""
    found = []
    torch._dynamo.reset()
    layer = torch.compile(
        lambda ctx, output, a, b: ctx.ops.matmul_all_reduce(output, a, b), backend="eager", fullgraph=True
    )
    for turn in range(2):
        with fresh(1 << 20) as ctx, torch.no_grad():
            output, a, b = ctx.empty(8, 8), drawn(ctx, 8, 8, seed=turn), torch.eye(8, device=ctx.device)
            layer(ctx, output, a, b)
            ctx.synchronize()
            found.append(error(output, ctx.world_size * a))
    return found


@TWO
def test_another_context_has_a_graph_of_its_own(ranks: Ranks) -> None:
    for errors in ranks.run(of_another_context):
        assert max(errors) < BOUND


def with_a_trace() -> tuple[str, bool]:
    """The op of a trace that was given to a compiled call, and whether the trace has events."""
    with fresh(1 << 20) as ctx, torch.no_grad():
        output, a, b, trace = ctx.empty(8, 8), drawn(ctx, 8, 8), torch.eye(8, device=ctx.device), iris.Trace()
        torch._dynamo.reset()
        torch.compile(lambda: ctx.ops.matmul_all_reduce(output, a, b, config=TILE, trace=trace) + 1, backend="eager")()
        return trace.op, len(trace.events(ctx)) > 0


@TWO
def test_a_call_in_a_graph_is_traced(ranks: Ranks) -> None:
    assert ranks.run(with_a_trace) == [("matmul_all_reduce", True)] * ranks.world_size


def test_a_buffer_grows_no_more_than_it_must() -> None:
    made: list[int] = []

    def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
        made.append(count)
        return torch.empty(count, dtype=dtype)

    ctx: Any = SimpleNamespace(empty=empty)
    buffer = _Buffer(ctx)
    for rows in (3, 4, 5, 8, 1, 8):
        matrix = buffer.matrix([rows, 8], torch.float32)
        assert (matrix.shape, matrix.dtype) == ((rows, 8), torch.float32)
    assert made == [128, 256]


def with_a_workspace(whole: bool) -> tuple[Failure, bool]:
    """A call with a workspace, which no node can make; ``whole``: compiled as one graph."""
    with fresh(1 << 20) as ctx, torch.no_grad():
        output, a, b = ctx.empty(8, 8), drawn(ctx, 8, 8), torch.eye(8, device=ctx.device)
        workspace = new_workspace(ctx, "matmul_all_reduce", "two_shot", 1 << 17)

        def layer() -> torch.Tensor:
            return ctx.ops.matmul_all_reduce(output, a, b, config="two_shot", workspace=workspace) + 1

        torch._dynamo.reset()
        failure = failure_of(torch.compile(layer, backend="eager", fullgraph=whole))
        ctx.synchronize()
        return failure, not whole and error(output, ctx.world_size * a) < BOUND


@TWO
def test_calls_with_a_workspace_break_a_graph(ranks: Ranks) -> None:
    for failure, right in ranks.run(with_a_workspace, False):
        assert right and failure.kind == "nothing", failure
    for failure, _ in ranks.run(with_a_workspace, True):
        assert failure.kind == "Unsupported" and "leave out fullgraph=True" in failure.message, failure


class Gathered(torch.autograd.Function):
    """``all_gather(x) @ weight.t()``, with its gradients."""

    @staticmethod
    def forward(call: Any, ctx: iris.Iris, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        call.save_for_backward(x, weight)
        call.iris = ctx
        output = x.new_empty(ctx.world_size * x.shape[0], weight.shape[0])
        return ctx.ops.all_gather_matmul(output, x, weight.t(), gather_dim=0)

    @staticmethod
    def backward(call: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        (x, weight), ops = call.saved_tensors, call.iris.ops
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        ops.matmul_reduce_scatter(grad_x, grads[0], weight)
        ops.all_gather_matmul(grad_weight.t(), x.t(), grads[0], gather_dim=1)
        return None, grad_x, grad_weight


def trained(compiler: str) -> list[float]:
    """Errors of forward and backward pass of a layer in graphs, against the same layer on one rank."""
    with fresh(1 << 20) as ctx:
        whole, weight = (drawn(ctx, ROWS, INNER, seed=seed).requires_grad_() for seed in range(2))
        (whole @ weight.t()).sin().sum().backward()

        def loss(x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
            return Gathered.apply(ctx, x * 1, own).sin().sum()  # type: ignore[no-any-return]

        x, own = (one.detach().chunk(ctx.world_size)[ctx.rank].clone().requires_grad_() for one in (whole, weight))
        compiled(loss, compiler)(x, own).backward()
        ctx.synchronize()
        grads = [one.grad.chunk(ctx.world_size)[ctx.rank] for one in (whole, weight) if one.grad is not None]
        return [error(found.grad, grad) for found, grad in zip((x, own), grads, strict=True) if found.grad is not None]


@TWO
@pytest.mark.parametrize("compiler", COMPILERS)
def test_layers_are_trained_in_graphs(ranks: Ranks, compiler: str) -> None:
    for errors in ranks.run(trained, compiler):
        assert len(errors) == 2 and max(errors) < BOUND, errors


def summed(ctx: iris.Iris, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ctx.ops.matmul_all_reduce(a.new_empty(a.shape[0], b.shape[1]), a, b)


class Columns(torch.autograd.Function):
    """``x @ weight.t()``, whose gradient of x is summed over ranks."""

    @staticmethod
    def forward(call: Any, ctx: iris.Iris, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        call.save_for_backward(x, weight)
        call.iris = ctx
        return x @ weight.t()

    @staticmethod
    def backward(call: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        x, weight = call.saved_tensors
        return None, summed(call.iris, grads[0], weight), grads[0].t() @ x


class Rows(torch.autograd.Function):
    """``all_reduce(x @ weight.t())``, with its gradients."""

    @staticmethod
    def forward(call: Any, ctx: iris.Iris, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        call.save_for_backward(x, weight)
        return summed(ctx, x, weight.t())

    @staticmethod
    def backward(call: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        x, weight = call.saved_tensors
        return None, grads[0] @ weight, grads[0].t() @ x


def trained_twice(compiler: str) -> list[float]:
    """Errors of two layers whose sums are made in the graph, against the same layers on one rank."""
    with fresh(1 << 20) as ctx:
        x, up, down = (drawn(ctx, *shape).requires_grad_() for shape in ((ROWS, 16), (INNER, 16), (16, INNER)))
        own = [
            one.detach().chunk(ctx.world_size, dim)[ctx.rank].clone().requires_grad_()
            for one, dim in ((up, 0), (down, 1))
        ]

        def layer(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            return x + Rows.apply(ctx, Columns.apply(ctx, x, up).sin(), down)  # type: ignore[no-any-return]

        one, own_x = compiled(layer, compiler), x.detach().clone().requires_grad_()
        found = torch.autograd.grad(one(one(own_x, *own), *own).square().sum(), (own_x, *own))
        ctx.synchronize()
        whole = x + (x @ up.t()).sin() @ down.t()
        whole = whole + (whole @ up.t()).sin() @ down.t()
        grad_x, grad_up, grad_down = torch.autograd.grad(whole.square().sum(), (x, up, down))
        right = grad_x, grad_up.chunk(ctx.world_size, 0)[ctx.rank], grad_down.chunk(ctx.world_size, 1)[ctx.rank]
        return [error(mine, grad) for mine, grad in zip(found, right, strict=True)]


@TWO
@pytest.mark.parametrize("compiler", [*COMPILERS, "aot_eager_decomp_partition"])
def test_layers_of_sums_are_trained_in_graphs(ranks: Ranks, compiler: str) -> None:
    for errors in ranks.run(trained_twice, compiler):
        assert len(errors) == 3 and max(errors) < BOUND, errors
