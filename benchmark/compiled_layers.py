"""Layers of a tensor-parallel model under ``torch.compile``: with Iris's ops in the graph, and with NCCL's.

    python benchmark/compiled_layers.py --num_ranks 2
    python benchmark/compiled_layers.py --axis_rows=1 --axis_way=eager,compiled

There are ``LAYERS`` layers ``x + all_reduce(gelu(x @ up.t()) @ down.t())``; each rank has a part of the weights.
``eager`` uses ``matmul_all_reduce`` without compilation, and ``compiled`` the same as one graph. With ``broken`` a
graph ends before each op, and the next one begins after it. ``nccl`` is one graph with PyTorch's functional all-reduce
after each matmul. ``+graphs`` adds CUDA graphs (``mode="reduce-overhead"``). All results are compared with those of the
layers on one rank in float64. Options are those of `python -m iris bench`; --help describes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import _functional_collectives as functional_collectives
from torch.nn import functional

import iris
from iris import bench
from iris.bench.distributed import process_group
from iris.bench.draws import normal_draws

SIMULATED = iris.backends.detect().name == "sim"
LAYERS = 2 if SIMULATED else 4
SIZES = ((6, 24, 64),) if SIMULATED else tuple((rows, 8192, 28672) for rows in (1, 64, 512, 4096))
WAYS = ("eager", "compiled", "broken", "nccl", "compiled+graphs", "nccl+graphs")

Sum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Sums ``a @ weight.t()`` over all ranks; the last argument is memory that the sum may be put into."""


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

    def complaint(self, found: torch.Tensor) -> str:
        """How wrong ``found`` is, if it is off by more than a rounding of what each layer adds; else empty text."""
        error = float((found.double() - self.right).norm() / self.right.norm())
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


@bench.register
@bench.axis("rows,hidden,inner", SIZES)
@bench.axis("dtype", ("fp32" if SIMULATED else "bf16",))
@bench.axis("way", WAYS, variant=True)
def compiled_layers(state: bench.State, ctx: iris.Iris) -> None:
    """Layers of a tensor-parallel model under torch.compile."""
    sizes = state["rows"], state["hidden"], state["inner"]
    if state["inner"] % ctx.world_size:
        state.skip(f"inner={state['inner']}: no multiple of {ctx.world_size} ranks")
    layers: Layers = state.share("layers", lambda: Layers(ctx, sizes, bench.DTYPES[state["dtype"]]))
    way, summed = state["way"], sum_by(state["way"], ctx)
    graphs = way.endswith("+graphs")

    def layer(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return x + summed(functional.gelu(x @ up.t()), down, layers.shared)

    def model(x: torch.Tensor) -> torch.Tensor:
        for up, down in layers.weights:
            x = layer(x, up, down)
        return x

    if way != "eager":
        for one in (layer, model):  # the compiler keeps its results by code object
            one.__code__ = one.__code__.replace(co_name=f"{one.__name__}_{way}")
        options: dict[str, Any] = {"fullgraph": way != "broken"}
        if SIMULATED:
            options["backend"] = "aot_eager"  # TorchInductor needs a compiler of C++ on CPUs
        elif graphs:
            options["mode"] = "reduce-overhead"
        model = torch.compile(model, **options)
    found: list[torch.Tensor] = []

    def call() -> None:
        found.clear()
        with torch.no_grad():
            found.append(model(layers.x))

    for _ in range(3 if graphs else 1):  # the second call is captured
        call()
    state.set_flops(4 * state["rows"] * state["hidden"] * state["inner"] * LAYERS // ctx.world_size)
    state.exec(call, validate_fn=lambda: layers.complaint(found[0]))


if __name__ == "__main__":
    import sys

    raise SystemExit(bench.main(["compiled_layers", *sys.argv[1:]], "compiled_layers.py"))
