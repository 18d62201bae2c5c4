"""Layers of a tensor-parallel model under ``torch.compile``: with Iris's ops in the graph, and with NCCL's.

    python benchmark/compiled_layers.py --num_ranks 2
    python benchmark/compiled_layers.py --axis_rows=1 --axis_way=eager,compiled

There are ``LAYERS`` layers ``x + all_reduce(gelu(x @ up.t()) @ down.t())``; each rank has a part of the weights.
``eager`` uses ``matmul_all_reduce`` without compilation, and ``compiled`` the same as one graph. With ``broken`` a
graph ends before each op, and the next one begins after it. ``nccl`` is one graph with PyTorch's functional all-reduce
after each matmul. ``+graphs`` adds CUDA graphs (``mode="reduce-overhead"``).

With ``sequence`` each rank has a part of the rows, and the layers are ``x + reduce_scatter(gelu(all_gather(x) @ up.t())
@ down.t())`` by PyTorch's functional collectives (sequence parallelism). ``sequence+torch`` and ``sequence+iris`` are
the same code, in which TorchInductor fuses collectives and matmuls (async tensor parallelism): the first with PyTorch's
kernels, the second with Iris's (``iris.ops.replace_symm_mem``).

All results are compared with those of the layers on one rank in float64. Options are those of `python -m iris bench`;
--help describes them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._inductor import config as inductor
from torch.distributed import _functional_collectives as functional_collectives
from torch.nn import functional

import iris
from iris import bench
from iris.bench.distributed import process_group
from iris.bench.draws import normal_draws
from iris.bench.inductor import without_code
from iris.ops.symm_mem import enable_symm_mem

SIMULATED = iris.backends.detect().name == "sim"
LAYERS = 2 if SIMULATED else 4
SIZES = ((6, 24, 64),) if SIMULATED else tuple((rows, 8192, 28672) for rows in (1, 64, 512, 4096))
WAYS = ("eager", "compiled", "broken", "nccl", "compiled+graphs", "nccl+graphs")
SEQUENCE = ("sequence", "sequence+torch", "sequence+iris")

Sum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Sums ``a @ weight.t()`` over all ranks; the last argument is memory that the sum may be put into."""
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A layer of x and two weights."""


class Layers:
    """This rank's part of the layers, their input, and their right output."""

    def __init__(self, ctx: iris.Iris, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
        rows, hidden, inner = sizes
        drawn = normal_draws(ctx, dtype)
        self.x = drawn(rows, hidden, 1)
        self.shared = ctx.empty(rows, hidden, dtype=dtype)
        self.weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        right = self.x.double()
        for _ in range(LAYERS):
            up, down = drawn(inner, hidden, hidden**-0.5), drawn(hidden, inner, inner**-0.5)
            right += functional.gelu(right @ up.double().t()) @ down.double().t()
            own = up.chunk(ctx.world_size)[ctx.rank], down.chunk(ctx.world_size, 1)[ctx.rank]
            self.weights.append((own[0].clone(), own[1].clone()))
            for weight in self.weights[-1]:
                torch._dynamo.mark_static_address(weight)  # like a module's parameters; CUDA graphs copy others
        self.right = right

    def complaint(self, found: torch.Tensor, ctx: iris.Iris) -> str:
        """How wrong ``found`` is, all rows or this rank's, if it is off by more than a rounding of what each layer
        adds; else empty text."""
        right = self.right if len(found) == len(self.right) else self.right.chunk(ctx.world_size)[ctx.rank]
        error = float((found.double() - right).norm() / right.norm())
        limit = torch.finfo(found.dtype).eps + 8 * torch.finfo(torch.float32).eps
        return "" if error <= limit else f"relative error {error:.1e}, more than {limit:.1e}"


def sum_by(way: str, ctx: iris.Iris) -> Sum:
    """The function by which ``way`` multiplies and sums."""
    group = process_group(ctx)

    def by_nccl(a: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = functional_collectives.all_reduce(a @ weight.t(), "sum", group)
        return total

    def by_iris(a: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        return ctx.ops.matmul_all_reduce(shared, a, weight.t())

    def into_new(a: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        return ctx.ops.matmul_all_reduce(a.new_empty(a.shape[0], weight.shape[0]), a, weight.t())

    by: dict[str, Sum] = {
        "nccl": by_nccl, "nccl+graphs": by_nccl, "compiled+graphs": into_new, "broken": torch.compiler.disable(by_iris),
    }  # fmt: skip
    return by.get(way, by_iris)


def group_for(way: str, ctx: iris.Iris) -> Any:
    """The name of a group of all ranks: one that Iris serves, or one that it does not."""
    whole = process_group(ctx)
    if way == "sequence+iris":
        heap_size = ctx.heap_free_bytes // 2 // (2 << 20) * (2 << 20)
        served = ctx.kept("context of the process group", lambda: iris.iris(heap_size, group=whole))
        iris.ops.replace_symm_mem(served)
        return whole.group_name
    other: Any = ctx.kept("another group", lambda: dist.new_group(list(range(ctx.world_size))))
    enable_symm_mem(other.group_name)
    return other.group_name


def layer_on(group: Any) -> Layer:
    """A layer with sequence parallelism, by PyTorch's functional collectives."""

    def layer(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        inner = functional.gelu(functional_collectives.all_gather_tensor(x, 0, group) @ up.t())
        total: torch.Tensor = functional_collectives.reduce_scatter_tensor(inner @ down.t(), "sum", 0, group)
        return x + total

    return layer


@bench.register
@bench.axis("rows,hidden,inner", SIZES)
@bench.axis("dtype", ("fp32" if SIMULATED else "bf16",))
@bench.axis("way", WAYS + SEQUENCE, variant=True)
def compiled_layers(state: bench.State, ctx: iris.Iris) -> None:
    """Layers of a tensor-parallel model under torch.compile."""
    sizes = state["rows"], state["hidden"], state["inner"]
    if state["inner"] % ctx.world_size:
        state.skip(f"inner={state['inner']}: no multiple of {ctx.world_size} ranks")
    layers: Layers = state.share("layers", lambda: Layers(ctx, sizes, bench.DTYPES[state["dtype"]]))
    if state["way"] in SEQUENCE and state["rows"] % ctx.world_size:
        state.skip(f"rows={state['rows']}: no multiple of {ctx.world_size} ranks")
    if state["way"] == "sequence+torch" and SIMULATED:
        state.skip("PyTorch has no fused kernels for CPUs")
    way, summed = state["way"], sum_by(state["way"], ctx)
    graphs = way.endswith("+graphs")
    rows = layers.x.chunk(ctx.world_size)[ctx.rank] if way in SEQUENCE else layers.x

    def whole_layer(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return x + summed(functional.gelu(x @ up.t()), down, layers.shared)

    layer = layer_on(group_for(way, ctx)) if way in SEQUENCE else whole_layer

    def model(x: torch.Tensor) -> torch.Tensor:
        for up, down in layers.weights:
            x = layer(x, up, down)
        return x

    if way != "eager":
        for one in (layer, model):  # the compiler keeps its results by code object
            one.__code__ = one.__code__.replace(co_name=f"{one.__name__}_{way}")
        options: dict[str, Any] = {"fullgraph": way != "broken"}
        if SIMULATED and way in SEQUENCE:
            options["backend"] = without_code
        elif SIMULATED:
            options["backend"] = "aot_eager"  # TorchInductor needs a compiler of C++ on CPUs
        elif graphs:
            options["mode"] = "reduce-overhead"
        model = torch.compile(model, **options)
    found: list[torch.Tensor] = []

    def call() -> None:
        found.clear()
        with torch.no_grad():
            found.append(model(rows))

    with warnings.catch_warnings(), inductor.patch(_micro_pipeline_tp=way in SEQUENCE[1:]):
        warnings.filterwarnings("ignore", "torch.ops.symm_mem on the process group", UserWarning)  # "sequence+torch"
        for _ in range(3 if graphs else 1):  # the second call is captured
            call()
    state.set_flops(4 * state["rows"] * state["hidden"] * state["inner"] * LAYERS // ctx.world_size)
    state.exec(call, validate_fn=lambda: layers.complaint(found[0], ctx))


if __name__ == "__main__":
    import sys

    raise SystemExit(bench.main(["compiled_layers", *sys.argv[1:]], "compiled_layers.py"))
