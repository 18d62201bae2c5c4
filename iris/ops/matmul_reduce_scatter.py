"""Matmul + reduce-scatter: each rank has a part of K; the products are summed, and each rank ends up with some rows.

Unfused::

    partial = A @ B
    torch.distributed.reduce_scatter_tensor(output, partial)
    output += bias

Algorithms (:mod:`iris.ops.reduction` has the signals). "When it wins" was measured in bf16 on 2, 4 and 8 × H200 and on
two H100s, 2026-11-21 to 30.

**push**: the epilogue stores every finished tile into a slot at the rank that owns its rows, in the output's dtype,
next rank's rows first. Each rank computes its own rows last and adds the others' tiles from its slots, in float32 and
in rank order: the result does not depend on timing. With ``num_rounds``, a rank's own rows come last in each round,
which spreads the sums over the matmul. When it wins: small outputs, and larger ones of a short K on 8 ranks, where the
links take longer than the matmul.

**copy_engine**: the same, but finished tiles are handed over by the copy engine, in ``num_chunks`` chunks for each
rank: no SM waits for the link. When it wins: outputs of a few MiB per rank and more.

**decomposed**: the library's matmul (``torch.matmul``), once per owner of rows, next rank's first; after each, the copy
engine hands the product over. A separate kernel adds up a rank's own rows once all parts have arrived. With
``num_chunks``, every owner's rows are cut into so many chunks, and each chunk is added up beside the copies of the
next; with ``chunk_growth`` below 1, later chunks are smaller. In one chunk, a matmul may compute several owners' rows
(``owners_per_matmul``). A rank's own part, too, is rounded before the sum. When it wins: where the library's matmul is
faster than this one, and the rows of one owner, or of several, are enough to fill the device; in chunks, where the
links take longer than the matmul and a chunk's rows are still enough.

**ring**: the library's matmul, once per chunk of an owner's rows. Each adds to the sum that has come from the rank
before, and the copy engine carries the new sum to the next rank (:mod:`iris.ops.decomposed`). Each rank rounds the
sum, and cuBLAS mostly a 16-bit product, too. When it wins: where the links take far longer than the matmul, or chunks
of ``decomposed`` would be too small. ``num_chunks=2`` lets one chunk travel while the other is computed; with 1 nothing
overlaps.

**low_latency**: ``torch.matmul``, then a kernel that exchanges the parts through inboxes and sums
(:mod:`iris.ops.exchange`). When it wins: few rows, as in decoding.

**atomic**: the epilogue adds every tile to one float32 sum at its owner. It takes less memory, but moves twice the
bytes over the link for 16-bit outputs. **Not deterministic**: the order of the sum depends on timing. When it wins:
memory is short.

**baseline**: ``torch.matmul``, then the collective: what the others are measured against, and what "auto" picks where
they lose.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from iris.context import Iris
from iris.device import handle as handles
from iris.device import schedule
from iris.device.tile import local_sink, within_shard
from iris.errors import ShapeError
from iris.ops.algorithms import REDUCE_SCATTER
from iris.ops.choice import resolve
from iris.ops.config import FusedConfig
from iris.ops.copies import column_major
from iris.ops.operands import bias_kind, check_operands, check_rows_of_b, check_shape, has_contiguous_rows
from iris.ops.plan import Plan
from iris.ops.problem import Problem
from iris.ops.reduction import (
    SumCall,
    added_after,
    collected,
    collected_sum,
    deliver,
    deliver_add,
    delivered_after,
    kept_after,
)
from iris.ops.replay import replayed
from iris.ops.room import memory_of
from iris.ops.rows import evenly
from iris.ops.workspace import FusedWorkspace
from iris.trace import Trace, trace_of

OP = REDUCE_SCATTER


@triton.jit
def scatter_rows_sink(handle, c, slots, acc, bias_ptr, tile, flags, epoch, SITE: tl.constexpr, BIAS: tl.constexpr):
    """Send a tile to the owner of its rows, or leave it to be copied; sum up and store this rank's own tiles."""
    if tile.shard == handles.rank(handle):
        _store_rows(handle, c, collected(handle, slots, acc, tile, flags, epoch, SITE), bias_ptr, tile, BIAS)
    else:
        deliver(handle, slots, acc.to(c.ptr.dtype.element_ty), tile)


@triton.jit
def add_rows_sink(handle, c, slots, acc, bias_ptr, tile, flags, epoch, SITE: tl.constexpr, BIAS: tl.constexpr):
    """As :func:`scatter_rows_sink`, but add a tile to the one sum at its owner."""
    if tile.shard == handles.rank(handle):
        _store_rows(handle, c, collected_sum(handle, slots, acc, tile, flags, SITE), bias_ptr, tile, BIAS)
    else:
        deliver_add(handle, slots, acc, tile)


@triton.jit
def _store_rows(handle, c, acc, bias_ptr, tile, BIAS: tl.constexpr):
    local_sink(handle, c, None, acc, bias_ptr, within_shard(tile), None, 0, 0, BIAS)


@replayed
def matmul_reduce_scatter(
    ctx: Iris,
    output: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    config: FusedConfig | str | None = None,
    workspace: FusedWorkspace | None = None,
    trace: bool | Trace = False,
) -> torch.Tensor:
    """``output = (sum over ranks of A @ B)[r * rows : (r + 1) * rows] + bias`` on rank r; rows = M / world_size.

    Args:
        output: [M / world_size, N], any strides, not in memory of another operand; in A's dtype, or for 8-bit A as for
            :func:`iris.ops.all_gather_matmul`.
        A: [M, K / world_size], this rank's columns; M a multiple of the number of ranks; any strides; Iris's own kernel
            copies it first if its rows are not contiguous.
        B: [K / world_size, N], this rank's rows, in A's dtype; any strides, its rows contiguous on all
            ranks or on none.
        bias: [N] per column, or [M / world_size, 1] per row of this rank's output; in output's dtype, added once, to
            the sum.
        scale_a, scale_b: for int8 and fp8: of this rank's product, applied before the sum; float32, one number, or one
            for each row of A, [M] or [M, 1], and for each column of B, [N] or [1, N]; or for fp8 one for each block of
            128, counted from this rank's first column of A on, as for :func:`iris.ops.all_gather_matmul`.
        config, workspace, trace: as for :func:`iris.ops.all_gather_matmul`.

    Returns:
        ``output``.

    Raises:
        ShapeError, DTypeError, PlacementError, ArgumentError: before anything is launched.
        ContextError: the context is closed, belongs to a parent process, or a call on it broke off.
        RankMismatch: in a call that is new to all ranks, the ranks differ in problem, config, workspace, or the place
            of an operand that peers touch.
        HeapError, CaptureError: the call needs new memory, but the heap has no room, or a graph is being captured.
        WaitTimeout, PeerDied: from an earlier kernel of this context, or while ranks compare a new call.

    Sync: on the current stream. All ranks must call it, in the same order; no barrier is needed between calls.
    """
    ctx.check(OP)
    scales = check_operands(ctx, OP, output, ("A", A), B, bias, scale_a, scale_b)
    world, (m, k), n = ctx.world_size, A.shape, B.shape[1]
    check_rows_of_b(OP, B, k, output.shape[1])
    if m % world:
        raise ShapeError(OP, "A", f"rows that {world} ranks can share evenly", tuple(A.shape), "Pad A with zero rows.")
    check_shape(OP, "output", output, (m // world, n), "rows of A / number of ranks, columns of B")
    bias_is = bias_kind(OP, bias, m // world, n)
    problem = Problem(OP, m, n, k, A.dtype, world, None, not has_contiguous_rows(B), output.dtype)
    chosen = resolve(ctx, problem, config, workspace, trace, bias_is=bias_is, scales=scales)
    ours, recorded = memory_of(ctx, problem, chosen, workspace), trace_of(ctx, OP, trace)
    call = _Call(ctx, problem, output, A, column_major(ours, problem, B), bias, bias_is, scales, chosen, recorded, ours)
    getattr(call, chosen.algorithm)()
    return output


class _Call(SumCall):
    """A method per algorithm."""

    def push(self) -> None:
        self.launch_reduction(self._plan(scatter_rows_sink, delivered_after, self.config.num_rounds))

    def atomic(self) -> None:
        self.launch_reduction(self._plan(add_rows_sink, added_after, self.config.num_rounds))

    def copy_engine(self) -> None:
        plan = replace(self._plan(scatter_rows_sink, kept_after, 1), eager=True)
        per_shard, rank, world = plan.tiles_per_shard(self.problem, self.config), self.ctx.rank, self.ctx.world_size
        sums = self.reduction(plan, evenly(per_shard, self.config.num_chunks)[1])

        def copies() -> None:
            for step in range(1, world):
                for chunk in range(sums.plan.chunks):
                    self.send_chunk(sums, (rank + step) % world, chunk)

        self.workspace.engine.beside(lambda: self.launch(sums.plan, slots=sums.slots), copies)

    def decomposed(self) -> None:
        self.sum_by_chunks(self.config.cut(self.rows_per_rank), everywhere=False)

    def ring(self) -> None:
        self.sum_in_ring(self.workspace.staged(self.problem.m, self.problem.n, self.output.dtype), everywhere=False)

    def low_latency(self) -> None:
        self.exchanged(split=True)

    def baseline(self) -> None:
        self.summed(everywhere=False)

    def _plan(self, sink: Any, after: Any, rounds: int) -> Plan:
        return Plan(
            self.site, schedule.own_last, sink=sink, after=after, gate=True, shards=self.ctx.world_size, sharded=True,
            meet=False, rounds=rounds,
        )  # fmt: skip
