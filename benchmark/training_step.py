"""Forward and backward pass of an MLP with tensor and sequence parallelism: by Iris's ops, and by NCCL + torch.matmul.

    python benchmark/training_step.py --num_ranks 8
    python benchmark/training_step.py --axis_tokens=4096 --axis_hidden=8192 --axis_inner=28672

The MLP is ``x + down(gelu(up(x)))`` without biases; each rank has a part of the weights and a share of the tokens. The
layers are those of docs/training.md. ``auto`` uses Iris; ``nccl`` has a collective of torch.distributed before or after
each matmul; ``nccl_overlapped`` overlaps those of the backward pass of ``up`` with its matmuls, as Megatron-LM does
(Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023). Gradients of all three
are compared with those of the block on one rank in float64. Options are those of `python -m iris bench`; --help
describes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

import iris
from iris import bench
from iris.bench.distributed import all_gather, process_group, reduce_scatter
from iris.bench.draws import normal_draws

SIZES = ((2048, 4096, 14336), (8192, 4096, 14336), (8192, 8192, 28672), (16384, 5120, 25600))
SMALL = ((32, 24, 64),)
"""Sizes in the simulator."""
PASSES, MATMULS = 3, 2
"""Products of each layer, one forward and two backward; and layers."""


class IrisColumns(torch.autograd.Function):
    """``F.linear`` of all ranks' tokens: x [M / W, K], weight [own N, K] → [M, own N]."""

    @staticmethod
    def forward(call: Any, ctx: iris.Iris, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        call.ctx = ctx
        call.save_for_backward(x, weight)
        output = x.new_empty(ctx.world_size * x.shape[0], weight.shape[0])
        ctx.ops.all_gather_matmul(output, x, weight.t(), gather_dim=0)
        return output

    @staticmethod
    def backward(call: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        ops, (x, weight) = call.ctx.ops, call.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        ops.matmul_reduce_scatter(grad_x, grad, weight)
        ops.all_gather_matmul(grad_weight.t(), x.t(), grad, gather_dim=1)
        return None, grad_x, grad_weight


class IrisRows(torch.autograd.Function):
    """``F.linear``, summed over ranks: x [M, own K], weight [N, own K] → [M / W, N]."""

    @staticmethod
    def forward(call: Any, ctx: iris.Iris, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        call.ctx = ctx
        call.save_for_backward(x, weight)
        output = x.new_empty(x.shape[0] // ctx.world_size, weight.shape[0])
        ctx.ops.matmul_reduce_scatter(output, x, weight.t())
        return output

    @staticmethod
    def backward(call: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        ops, (x, weight) = call.ctx.ops, call.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        ops.all_gather_matmul(grad_x, grad, weight, gather_dim=0)
        ops.all_gather_matmul(grad_weight, grad.t(), x, gather_dim=1)
        return None, grad_x, grad_weight


def gathered(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    """All ranks' rows, and the work to wait for before they are complete."""
    whole = x.new_empty(group.size() * x.shape[0], x.shape[1])
    return whole, all_gather(whole, x.contiguous(), group=group, async_op=True)


def scattered(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    """This rank's rows of the sum over ranks, and the work to wait for before they are complete."""
    part = x.new_empty(x.shape[0] // group.size(), x.shape[1])
    return part, reduce_scatter(part, x.contiguous(), group=group, async_op=True)


def now(begun: tuple[torch.Tensor, Any]) -> torch.Tensor:
    result, work = begun
    work.wait()
    return result


class NcclColumns(torch.autograd.Function):
    """As :class:`IrisColumns`."""

    @staticmethod
    def forward(
        call: Any, group: dist.ProcessGroup, overlapped: bool, x: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        call.group, call.overlapped = group, overlapped
        call.save_for_backward(x, weight)
        return now(gathered(x, group)) @ weight.t()

    @staticmethod
    def backward(call: Any, grad: torch.Tensor) -> tuple[None, None, torch.Tensor, torch.Tensor]:
        x, weight = call.saved_tensors
        if not call.overlapped:
            grad_x = now(scattered(grad @ weight, call.group))
            return None, None, grad_x, grad.t() @ now(gathered(x, call.group))
        gathering = gathered(x, call.group)
        product = grad @ weight
        whole = now(gathering)
        scattering = scattered(product, call.group)
        grad_weight = grad.t() @ whole
        return None, None, now(scattering), grad_weight


class NcclRows(torch.autograd.Function):
    """As :class:`IrisRows`."""

    @staticmethod
    def forward(call: Any, group: dist.ProcessGroup, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        call.group = group
        call.save_for_backward(x, weight)
        return now(scattered(x @ weight.t(), group))

    @staticmethod
    def backward(call: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        x, weight = call.saved_tensors
        whole = now(gathered(grad, call.group))
        return None, whole @ weight, whole.t() @ x


class Step:
    """The block on one rank: its tokens ``x``, its parts of the weights, and the gradient ``goal`` of its output."""

    def __init__(self, ctx: iris.Iris, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
        tokens, hidden, inner = sizes
        drawn = normal_draws(ctx, dtype)
        self.ctx = ctx
        self.whole = (
            drawn(tokens, hidden, 1), drawn(inner, hidden, hidden**-0.5), drawn(hidden, inner, inner**-0.5),
            drawn(tokens, hidden, 1),
        )  # fmt: skip
        parts = [
            matrix.chunk(ctx.world_size, dim)[ctx.rank] for matrix, dim in zip(self.whole, (0, 0, 1, 0), strict=True)
        ]
        self.x, self.up, self.down = (part.clone().contiguous().requires_grad_() for part in parts[:3])
        self.goal = parts[3].contiguous()
        self.right: list[torch.Tensor] = []

    def run(
        self,
        up: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        down: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        for leaf in (self.x, self.up, self.down):
            leaf.grad = None
        output = self.x + down(functional.gelu(up(self.x, self.up)), self.down)
        output.backward(self.goal)

    def complaint(self) -> str:
        """How wrong the gradients are, if they are off by more than one rounding of each value that they are sums of,
        and a few roundings of float32 sums; else empty text."""
        if not self.right:
            x, up, down = (matrix.double().requires_grad_() for matrix in self.whole[:3])
            (x + functional.gelu(x @ up.t()) @ down.t()).backward(self.whole[3].double())
            for matrix, dim in ((x, 0), (up, 0), (down, 1)):
                assert matrix.grad is not None
                self.right.append(matrix.grad.chunk(self.ctx.world_size, dim)[self.ctx.rank].float())
        errors = {}
        for name, leaf, right in zip(("x", "up", "down"), (self.x, self.up, self.down), self.right, strict=True):
            assert leaf.grad is not None
            errors[name] = float((leaf.grad.float() - right).norm() / right.norm())
        limit = torch.finfo(self.x.dtype).eps + 8 * torch.finfo(torch.float32).eps
        wrong = [
            f"gradient of {name}: relative error {error:.1e}" for name, error in errors.items() if not error <= limit
        ]
        return ", ".join(wrong)


@bench.register
@bench.axis("tokens,hidden,inner", SMALL if iris.backends.detect().name == "sim" else SIZES)
@bench.axis("dtype", ("bf16",))
@bench.axis("algorithm", ("auto", "nccl", "nccl_overlapped"), variant=True)
def training_step(state: bench.State, ctx: iris.Iris) -> None:
    """Forward and backward pass of an MLP, its weights and its tokens sharded over the ranks."""
    sizes = state["tokens"], state["hidden"], state["inner"]
    for name in ("tokens", "inner"):
        if state[name] % ctx.world_size:
            state.skip(f"{name}={state[name]}: no multiple of {ctx.world_size} ranks")
    step: Step = state.share("step", lambda: Step(ctx, sizes, bench.DTYPES[state["dtype"]]))
    group = process_group(ctx)
    ways: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
        "auto": (lambda *of: IrisColumns.apply(ctx, *of), lambda *of: IrisRows.apply(ctx, *of)),
        "nccl": (lambda *of: NcclColumns.apply(group, False, *of), lambda *of: NcclRows.apply(group, *of)),
        "nccl_overlapped": (lambda *of: NcclColumns.apply(group, True, *of), lambda *of: NcclRows.apply(group, *of)),
    }
    if state["algorithm"] not in ways:
        state.skip(f"there is no {state['algorithm']}; there are {', '.join(ways)}")
    tokens, hidden, inner = sizes
    state.set_flops(PASSES * MATMULS * 2 * tokens * hidden * inner // ctx.world_size)
    up, down = ways[state["algorithm"]]
    state.exec(lambda: step.run(up, down), validate_fn=step.complaint)


if __name__ == "__main__":
    import sys

    raise SystemExit(bench.main(["training_step", *sys.argv[1:]], "training_step.py"))
