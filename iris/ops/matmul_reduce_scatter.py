"""Matmul + reduce-scatter: each rank has a part of K; the products are summed, and each rank ends with some rows.

Unfused::

    partial = A @ B
    torch.distributed.reduce_scatter_tensor(output, partial)
    output += bias

Algorithms (:mod:`iris.ops.reduction` has the signals):

**push**: the epilogue stores every finished tile into a slot at the rank that owns its rows, in the output's dtype,
next rank's rows first; each rank computes its own rows last and adds the others' tiles from its slots, in float32 and
in rank order: the result does not depend on timing. When it wins: small outputs.

**copy_engine**: the same, but finished tiles are handed over by the copy engine, in ``num_chunks`` chunks for each
rank: no SM waits for the link. When it wins: outputs of a few MiB per rank and more.

**decomposed**: the library's matmul (``torch.matmul``), once per owner of rows, next rank's first; behind each, the
copy engine hands the product over. A kernel of its own adds up the own rows, once all have come. When it wins: where
the library's matmul is faster than this one, and one rank's rows are enough to fill the device. The own part, too, is
rounded before the sum.

**low_latency**: ``torch.matmul``, then a kernel that exchanges the parts through inboxes and sums
(:mod:`iris.ops.exchange`). When it wins: few rows, as in decoding.

**atomic**: the epilogue adds every tile to one float32 sum at its owner. Less memory, twice the bytes on the link for
16-bit outputs. **Not deterministic**: the order of the sum depends on timing.

**baseline**: ``torch.matmul``, then the collective.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from iris.context import Iris
from iris.device import handle as handles
from iris.device import schedule
from iris.device.sync import NEXT_EPOCH, SITE_MATMUL_REDUCE_SCATTER
from iris.device.tile import local_sink, within_shard
from iris.errors import ShapeError
from iris.ops.config import FusedConfig
from iris.ops.exchange import FLAGS, blocks_of, exchange
from iris.ops.local_matmul import plain_matmul
from iris.ops.matmul import Plan, bias_kind, check_operands, check_shape, resolve, run
from iris.ops.problem import Problem
from iris.ops.reduction import (
    added_after,
    collected,
    collected_sum,
    deliver,
    deliver_add,
    delivered_after,
    keep,
    kept_after,
    reduction_for,
    send_chunk,
    sum_partials,
)
from iris.ops.replay import replayed
from iris.ops.workspace import FusedWorkspace, workspace_for
from iris.trace import Trace, trace_of

OP = "matmul_reduce_scatter"
ALGORITHMS = ("push", "copy_engine", "decomposed", "low_latency", "atomic", "baseline")


@triton.jit
def scatter_rows_sink(handle, c, slots, acc, bias_ptr, tile, flags, epoch, SITE: tl.constexpr, BIAS: tl.constexpr):
    """To the owner of the rows; the own tiles are summed up and stored."""
    if tile.shard == handles.rank(handle):
        _store_rows(handle, c, collected(handle, slots, acc, tile, flags, epoch, SITE), bias_ptr, tile, BIAS)
    else:
        deliver(handle, slots, acc.to(c.ptr.dtype.element_ty), tile)


@triton.jit
def keep_rows_sink(handle, c, slots, acc, bias_ptr, tile, flags, epoch, SITE: tl.constexpr, BIAS: tl.constexpr):
    """As :func:`scatter_rows_sink`, but left for the copy engine to hand over."""
    if tile.shard == handles.rank(handle):
        _store_rows(handle, c, collected(handle, slots, acc, tile, flags, epoch, SITE), bias_ptr, tile, BIAS)
    else:
        keep(handle, slots, acc.to(c.ptr.dtype.element_ty), tile)


@triton.jit
def add_rows_sink(handle, c, slots, acc, bias_ptr, tile, flags, epoch, SITE: tl.constexpr, BIAS: tl.constexpr):
    """As :func:`scatter_rows_sink`, but added up on the way."""
    if tile.shard == handles.rank(handle):
        _store_rows(handle, c, collected_sum(handle, slots, acc, tile, flags, epoch, SITE), bias_ptr, tile, BIAS)
    else:
        deliver_add(handle, slots, acc, tile)


@triton.jit
def _store_rows(handle, c, acc, bias_ptr, tile, BIAS: tl.constexpr):
    local_sink(handle, c, None, acc, bias_ptr, within_shard(tile), None, 0, 0, BIAS)


SINKS = {
    "push": (scatter_rows_sink, delivered_after),
    "copy_engine": (keep_rows_sink, kept_after),
    "atomic": (add_rows_sink, added_after),
}
"""What happens to a finished tile, and what announces it."""


@replayed
def matmul_reduce_scatter(
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
    """``output = (sum over ranks of A @ B)[r * rows : (r + 1) * rows] + bias`` on rank r; rows = M / world_size.

    Args:
        output: [M / world_size, N], any strides; int32 if A is int8, else A's dtype.
        A: [M, K / world_size], this rank's columns; M a multiple of the number of ranks; any strides.
        B: [K / world_size, N], this rank's rows, in A's dtype; any strides.
        bias: [N] per column, or [M / world_size, 1] per row of the own output, in output's dtype; added once, to the
            sum.
        config, workspace, trace: as for :func:`iris.ops.all_gather_matmul`.

    Returns:
        ``output``.

    Raises:
        ShapeError, DTypeError, PlacementError, ArgumentError: before anything is launched.
        WaitTimeout, PeerDied: from an earlier kernel of this context.

    Sync: on the current stream. All ranks must call it, in the same order; no barrier is needed between calls.
    """
    ctx.check()
    check_operands(ctx, OP, output, ("A", A), B, bias)
    world, (m, k), n = ctx.world_size, A.shape, B.shape[1]
    check_shape(OP, "B", B, (k, n), "rows of B = columns of A")
    if m % world:
        raise ShapeError(OP, "A", f"rows that {world} ranks can share evenly", tuple(A.shape), "Pad A with zero rows.")
    check_shape(OP, "output", output, (m // world, n), "rows of A / number of ranks, columns of B")
    bias_is = bias_kind(OP, bias, m // world, n)
    received = (m - m // world) * n * output.element_size()
    problem = Problem(OP, m, n, k, A.dtype, world, received)
    chosen = resolve(ctx, problem, config, ALGORITHMS)
    recorded = trace_of(ctx, OP, trace)
    if chosen.algorithm in BY_LIBRARY:
        BY_LIBRARY[chosen.algorithm](ctx, problem, output, A, B, bias, bias_is, chosen, workspace, recorded)
        return output
    sink, after = SINKS[chosen.algorithm]
    plan = Plan(
        SITE_MATMUL_REDUCE_SCATTER.value, schedule.own_last, sink=sink, after=after,
        eager=True if chosen.algorithm == "copy_engine" else None, gate=True, shards=world, sharded=True, meet=False,
    )  # fmt: skip
    per_shard = plan.tiles_per_shard(problem, chosen)
    copying = chosen.algorithm == "copy_engine"
    chunk = -(-per_shard // min(chosen.num_chunks, per_shard)) if copying else 1
    sums = reduction_for(ctx, problem, plan, chosen, workspace, chunk)

    def kernel() -> None:
        run(ctx, problem, sums.plan, output, A, B, bias, bias_is, chosen, sums.workspace, recorded, slots=sums.slots)

    def copies() -> None:
        for step in range(1, world):
            for chunk in range(sums.plan.chunks):
                send_chunk(ctx, sums, chosen.tile_elements, per_shard, (ctx.rank + step) % world, chunk)

    if copying:
        sums.workspace.engine.beside(kernel, copies)
    else:
        kernel()
    return output


def _decomposed(
    ctx: Iris,
    problem: Problem,
    output: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    bias_is: int,
    config: FusedConfig,
    workspace: FusedWorkspace | None,
    trace: Trace | None,
) -> None:
    rank, world, rows = ctx.rank, ctx.world_size, problem.m // ctx.world_size
    count = problem.m * problem.n
    ours = workspace_for(ctx, OP, "decomposed", workspace, count * output.element_size())
    incoming = ours.staged(problem.m, problem.n, output.dtype)
    outgoing = ours.scratch("outgoing", count, output.dtype)[:count].view(problem.m, problem.n)
    epoch = ours.turnstile[NEXT_EPOCH.value :][:1]
    here = incoming[rank * rows :][:rows]
    with ours.engine.running():
        for step in range(1, world + 1):
            owner = (rank + step) % world
            product = here if owner == rank else outgoing[owner * rows :][:rows]
            plain_matmul(ctx, product, a[owner * rows :][:rows], b, None, config, trace)
            if owner != rank:
                ours.engine.follow()
                ours.engine.put(product, here, owner)
                ours.engine.put(epoch, ours.ready[rank:][:1], owner)
        site = SITE_MATMUL_REDUCE_SCATTER.value
        sum_partials(ctx, problem, ours, incoming, output, bias, bias_is, site, config, landed=True)


def _low_latency(
    ctx: Iris,
    problem: Problem,
    output: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    bias_is: int,
    config: FusedConfig,
    workspace: FusedWorkspace | None,
    trace: Trace | None,
) -> None:
    blocks, count = blocks_of(output.shape, ctx.num_sms), problem.m * problem.n
    room = blocks.inbox_nbytes(ctx.world_size, output.dtype)
    ours = workspace_for(ctx, OP, "low_latency", workspace, room, FLAGS)
    partial = ours.scratch("partial", count, output.dtype)[:count].view(problem.m, problem.n)
    plain_matmul(ctx, partial, a, b, None, config, trace)
    site = SITE_MATMUL_REDUCE_SCATTER.value
    exchange(ctx, ours, blocks, partial, output, site, split=True, total=True, bias=bias, bias_is=bias_is)


def _baseline(
    ctx: Iris,
    problem: Problem,
    output: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    bias_is: int,
    config: FusedConfig,
    workspace: FusedWorkspace | None,
    trace: Trace | None,
) -> None:
    nbytes = problem.m * problem.n * output.element_size()
    ours = workspace_for(ctx, OP, "baseline", workspace, nbytes)
    partial = ours.staged(problem.m, problem.n, output.dtype)
    plain_matmul(ctx, partial, a, b, None, config, trace)
    site = SITE_MATMUL_REDUCE_SCATTER.value
    sum_partials(ctx, problem, ours, partial, output, bias, bias_is, site, config)


BY_LIBRARY = {"decomposed": _decomposed, "low_latency": _low_latency, "baseline": _baseline}
"""Algorithms whose matmul is the library's."""
