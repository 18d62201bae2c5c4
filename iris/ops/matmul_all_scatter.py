"""Matmul + all-scatter: each rank computes its own columns of C, and all ranks end with all of C.

Unfused::

    columns = A @ B + bias
    torch.distributed.all_gather(parts, columns)
    output = torch.cat(parts, dim=1)

Algorithm **push**: the epilogue stores every finished tile into the output of every rank.

Signals: on entry every rank flags "my output may be written" at all peers, and the first store to a peer waits for
that; on exit the ranks meet, and then each output is whole. Flags carry the call's epoch.

When it wins: where the matmul is long against (world_size - 1) × the output's bytes over the link.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from iris.context import Iris
from iris.device import handle as handles
from iris.device.peer import translate
from iris.device.sync import SITE_MATMUL_ALL_SCATTER, wait_all_entered
from iris.device.tile import finished, tile_mask, tile_pointers
from iris.ops.config import FusedConfig
from iris.ops.matmul import Plan, bias_kind, check_operands, check_shape, check_symmetric, resolve, run
from iris.ops.problem import Problem
from iris.ops.workspace import FusedWorkspace, workspace_for
from iris.trace import Trace, trace_of

OP = "matmul_all_scatter"
ALGORITHMS = ("push",)


@triton.jit
def push_sink(handle, c, slots, acc, bias_ptr, tile, flags, epoch, SITE: tl.constexpr, BIAS: tl.constexpr):
    """The tile is stored into every rank's output, this rank's own first, once all ranks allow it."""
    value = finished(acc, bias_ptr, tile, c.ptr.dtype.element_ty, BIAS)
    mask = tile_mask(tile)
    wait_all_entered(flags.turnstile, epoch, handle, SITE)
    me, world = handles.rank(handle), handles.world_size(handle)
    for step in range(world):
        peer = (me + step) % world
        tl.store(tile_pointers(c, translate(handle, c.ptr, peer), tile.rows, tile.cols), value, mask=mask)


def matmul_all_scatter(
    ctx: Iris,
    output: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    config: FusedConfig | None = None,
    workspace: FusedWorkspace | None = None,
    trace: bool | Trace = False,
) -> torch.Tensor:
    """``output[:, r * n : (r + 1) * n] = A @ B_r + bias_r`` for every rank r, on all ranks.

    Args:
        output: [M, N] on the symmetric heap, the same strides on all ranks; int32 if A is int8, else A's dtype.
        A: [M, K], equal on all ranks; any strides.
        B: [K, N / world_size], this rank's columns, in A's dtype; any strides.
        bias: [N / world_size] per column, or [M, 1] per row, in output's dtype; this rank's own.
        config, workspace, trace: as for :func:`iris.ops.all_gather_matmul`.

    Returns:
        ``output``.

    Raises:
        ShapeError, DTypeError, PlacementError, ArgumentError: before anything is launched.
        WaitTimeout, PeerDied: from an earlier kernel of this context.

    Sync: on the current stream. All ranks must call it, in the same order. When it is done on this rank's stream,
        this rank's output is whole; no barrier is needed between calls.
    """
    ctx.check()
    check_operands(ctx, OP, output, ("A", A), B, bias)
    world, (m, k), n = ctx.world_size, A.shape, B.shape[1]
    check_shape(OP, "B", B, (k, n), "rows of B = columns of A")
    check_shape(OP, "output", output, (m, n * world), "rows of A, columns of B times the number of ranks")
    check_symmetric(ctx, OP, "output", output, "Peers write it: make it with ctx.empty.")
    bias_is = bias_kind(OP, bias, m, n)
    received = m * n * output.element_size() * (world - 1)
    problem = Problem(OP, m, n, k, A.dtype, world, received)
    chosen = resolve(ctx, problem, config, ALGORITHMS)
    plan = Plan(SITE_MATMUL_ALL_SCATTER.value, sink=push_sink)
    flags = workspace_for(ctx, OP, chosen.algorithm, workspace)
    columns = output[:, ctx.rank * n : (ctx.rank + 1) * n]
    run(ctx, problem, plan, columns, A, B, bias, bias_is, chosen, flags, trace_of(ctx, OP, trace))
    return output
