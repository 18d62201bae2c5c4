"""The host's half of :mod:`iris.device.matmul`: launch the one kernel."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton.language as tl

from iris.context import Iris
from iris.device import matmul as kernels
from iris.device import tile, turnstile
from iris.device.tile import Matrix
from iris.ops.config import FusedConfig
from iris.ops.copies import column_major, row_major
from iris.ops.descriptors import Descriptors, descriptors_of
from iris.ops.hardware import allows_tf32
from iris.ops.plan import Plan, check_launch
from iris.ops.problem import Problem
from iris.ops.rows import columns_in_vectors
from iris.ops.scales import NO_SCALES, Scales
from iris.ops.stream_k import strip_stages, strips_of
from iris.ops.target import target_of
from iris.ops.workspace import FusedWorkspace
from iris.trace import Trace

DEFER_FROM_TILES = 8
"""From so many tiles per program on, a tile is announced one tile later: on 4 × H200, 2026-11-21, matmul +
reduce-scatter by ``push`` thus took 10 % less time with 57 tiles per program, all-reduce 10 % more with 4."""

start_kernel: ContextVar[Callable[[Any, tuple[int, ...]], Callable[..., object]]] = ContextVar(
    "start_kernel", default=operator.getitem
)
"""How :func:`run` launches, given the kernel and its grid; ``iris tune`` replaces it, to compile without launching."""


def run(
    ctx: Iris,
    problem: Problem,
    plan: Plan,
    output: torch.Tensor,
    own: torch.Tensor,
    b: torch.Tensor,
    *,
    config: FusedConfig,
    workspace: FusedWorkspace,
    bias: torch.Tensor | None = None,
    bias_is: int = 0,
    trace: Trace | None = None,
    gathered: torch.Tensor | None = None,
    slots: Any = None,
    scales: Scales = NO_SCALES,
) -> None:
    """Launch the matmul kernel for ``problem`` as ``plan`` and ``config`` say.

    Args:
        own: this rank's part of A; all of A's rows if the plan's source is ``local_source`` and nothing is gathered.
        bias: added by ``tile.finished``, in a sink; in ``output``'s dtype.
        bias_is: 0: there is none; 1: it is [M], a number for each row; 2: it is [N], a number for each column.
        workspace: made for this op alone, by ``iris.ops.new_workspace``.
        trace: where to record what the programs do.
        gathered: the memory that holds all of A once it has arrived, with both halves if there are two; None: the
            source knows where A is. It may be read by TMA, so a source of your own that waits must then call
            ``iris.device.arch.fence_async_proxy``.
        slots: passed to ``source``, ``sink`` and ``after`` under this name: a tensor, a NamedTuple of tensors, or None.
        scales: what the product is multiplied by before a sink gets it: an ``iris.ops.scales.Scales``.

    Raises:
        ShapeError, DTypeError, ArgumentError: in an op of your own (``plan.site`` is 0), an operand does not agree with
            ``problem``, or ``config`` cannot run. Nothing checks where a sink of your own writes.
        CaptureError: the call needs new memory, but a graph is being captured.
    """
    if plan.site == 0:
        check_launch(ctx, problem, plan, output, own, gathered, b, bias, bias_is, scales, config, workspace, trace)
    if config.stream_k and problem.k <= config.block_size_k:  # nothing to split, and Triton 3.6 fails at K = 1
        config = replace(config, stream_k=False)
    target = target_of(ctx)
    waits = plan.source is not kernels.local_source  # it may wait, for parts of A that arrive
    if not waits:
        own = row_major(workspace, own)
    b = column_major(workspace, problem, b)
    whole = own if gathered is None else gathered
    tiling = _tiling(problem, plan, config, ctx.num_sms, gathered is not None)
    desc = Descriptors()
    if target.tma:
        # TMA faults at blocks that do not begin at a multiple of 16 bytes, as a rank's columns may not (seen on H200,
        # CUDA 13.0).
        between = plan.segments > 1 and not tiling.even_k and tiling.k * own.element_size() % 16 != 0
        read = None if waits and gathered is None else whole
        desc = descriptors_of(None if waits and not plan.own else own, read, b, config, tiling.strips, between)
    epochs, turnstile = _epochs(ctx, plan, config, workspace)
    counters = _counters(plan, workspace)
    partials, split = _split_memory(problem, config, tiling, workspace)
    if trace is not None:
        (trace._make_room if plan.site else trace.begin)(ctx, tiling.programs)  # an op of one's own has no name
    few = tiling.tiles < DEFER_FROM_TILES * tiling.programs
    courier_m, courier_n = (config.comm_block_m, config.comm_block_n) if plan.courier is not None else (0, 0)
    start_kernel.get()(kernels.matmul_kernel, (tiling.programs,))(
        ctx.alone if plan.alone else ctx.handle, turnstile, workspace.ready, split, counters,
        Matrix(own, *own.stride()), desc.own, Matrix(whole, *whole.stride()), desc.whole,
        Matrix(b, *b.stride()), desc.b, desc.bt, desc.b_strip, desc.bt_strip,
        Matrix(output, *output.stride()), scales.for_kernel, bias, slots, partials,
        trace.buffer if trace is not None else None,
        tiling.rows, problem.n, tiling.k, tiling.per_shard, tiling.per_round,
        plan.chunks, plan.blocks_per_chunk, plan.chunk_rows, plan.pieces, plan.piece_k or tiling.k,
        plan.couriers, plan.dedicated, plan.first_units, plan.abreast, plan.half_rows,
        SCHEDULE=plan.schedule, SOURCE=plan.source, SINK=plan.sink, AFTER=plan.after, COURIER=plan.courier,
        SLICED=tiling.sliced, EAGER=waits or few if plan.eager is None else plan.eager, GATE=plan.gate, MEET=plan.meet,
        SHARDS=plan.shards, SHARDED=plan.sharded, SEGMENTS=plan.segments, OWN=plan.own,
        PIECEWISE=waits if plan.piecewise is None else plan.piecewise,
        HALF_FLAGS=plan.half_flags, EPOCHS=epochs, SITE=plan.site, BIAS=bias_is,
        M_IN_VECTORS=columns_in_vectors(tiling.rows, own, output),
        BLOCK_M=config.block_size_m, BLOCK_N=config.block_size_n, BLOCK_K=config.block_size_k,
        GROUP_M=config.group_size_m, EVEN_K=tiling.even_k,
        STREAM_K=config.stream_k, TWO_TILES=config.two_tiles,
        STRIPS=tiling.strips, STRIP_STAGES=strip_stages(config, tiling.strips, target),
        COURIER_M=courier_m, COURIER_N=courier_n,
        PRECISION=_precision(problem.dtype, output.dtype),
        ACC_DTYPE=tl.float32 if problem.dtype.is_floating_point else tl.int32,
        TRACE=trace is not None, **config.launch_options(target),
    )  # fmt: skip


class _Tiling(NamedTuple):
    """How the output is cut into tiles, and how many programs share them.

    Attributes:
        rows, k: A's rows and columns as the kernel counts them: of one rank's part, if A is sharded by them.
        per_shard, per_round, tiles: tiles that belong to one rank, those of them in a round, and all ranks' tiles.
        programs: how many are launched.
        sliced: programs which share a split tile may each hand the sink the rows that they have summed.
        strips: the number of narrower tiles into which each split tile is cut.
        even_k: no block of K reaches beyond the memory that it is read from.
    """

    rows: int
    k: int
    per_shard: int
    per_round: int
    tiles: int
    programs: int
    sliced: bool
    strips: int
    even_k: bool


def _tiling(problem: Problem, plan: Plan, config: FusedConfig, num_sms: int, gathered: bool) -> _Tiling:
    """Cut the output into tiles. ``gathered``: all of A is gathered in one place, so its columns are not cut."""
    k, per_shard = problem.k // plan.segments, plan.tiles_per_shard(problem, config)
    tiles = plan.shards * per_shard
    units = tiles * -(-problem.k // config.block_size_k) if config.stream_k else tiles
    programs = min(max(units + plan.dedicated, plan.couriers), config.num_sms or num_sms)
    sliced = plan.after is None and (plan.sink is tile.local_sink if plan.sliced is None else plan.sliced)
    dealt = tiles - per_shard if plan.own else tiles
    strips = strips_of(dealt, programs - plan.dedicated, config) if config.stream_k and sliced else 1
    even_k = (problem.k if gathered else k) % config.block_size_k == 0
    per_round = plan.per_round or -(-per_shard // plan.rounds)
    return _Tiling(plan.rows(problem), k, per_shard, per_round, tiles, programs, sliced, strips, even_k)


def _epochs(ctx: Iris, plan: Plan, config: FusedConfig, workspace: FusedWorkspace) -> tuple[int, torch.Tensor]:
    """How the kernel counts calls (its ``EPOCHS``), and where."""
    if plan.alone and not config.stream_k:
        return turnstile.NO_EPOCHS.value, workspace.turnstile
    if plan.own_epochs or plan.alone:
        return ctx.num_sms, workspace.scratch("epochs", ctx.num_sms, torch.int32)
    return turnstile.TURNSTILE.value, workspace.turnstile


def _counters(plan: Plan, workspace: FusedWorkspace) -> torch.Tensor | None:
    """The counters of ``after`` and of a courier."""
    counts = max(plan.counts, plan.chunks if plan.courier is not None else 0)
    return workspace.scratch("counters", counts, torch.int32) if counts else None


def _split_memory(
    problem: Problem, config: FusedConfig, tiling: _Tiling, workspace: FusedWorkspace
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Stream-K's memory: for each program, room for two parts of tiles, or of strips, to hand over; and its flags."""
    if not config.stream_k:
        return None, None
    parts = 2 * tiling.programs * config.tile_elements // tiling.strips
    partials = workspace.scratch("partials", parts, accumulator_of(problem.dtype))
    return partials, workspace.scratch("split", 3 * tiling.programs, torch.int32)


def accumulator_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which matrices of ``dtype``, or their products, are summed."""
    return torch.float32 if dtype.is_floating_point else torch.int32


def _precision(dtype: torch.dtype, made: torch.dtype) -> str:
    """For float32, what torch.matmul would use: full precision, unless the user allows TF32. For fp8, full precision of
    the sums if the output's dtype, ``made``, is float32; else what they lose is small beside rounding to 16 bits
    (docs/performance-matmul.md)."""
    if dtype == torch.float32:
        return "tf32" if allows_tf32() else "ieee"
    return "tf32" if dtype == torch.float8_e4m3fn and made != torch.float32 else "ieee"
