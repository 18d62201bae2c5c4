"""The host's half of :mod:`iris.device.matmul`: launch the one kernel."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton import KernelInterface

from iris.context import Iris
from iris.device import matmul as kernels
from iris.device import schedule, sync, tile
from iris.device.tile import BIAS_COLUMN, BIAS_NONE, BIAS_ROW, Flags, Matrix
from iris.errors import ArgumentError, DTypeError, ShapeError
from iris.ops.config import FusedConfig
from iris.ops.descriptors import Descriptors, descriptors_of
from iris.ops.hardware import allows_tf32
from iris.ops.operands import check_no_gradient, check_shape
from iris.ops.problem import Problem
from iris.ops.row_major import row_major
from iris.ops.scales import BLOCK, NO_SCALES, Scales, check_contiguous, shapes_of_blocks
from iris.ops.split import strip_stages, strips_of
from iris.ops.target import target_of
from iris.ops.workspace import FusedWorkspace
from iris.trace import Trace

DEFER_FROM_TILES = 8
"""Tiles per program from which on it pays to announce a tile one tile later: on 4 × H200, 2026-11-21, matmul +
reduce-scatter by ``push`` took 10 % less time with 57 tiles per program, all-reduce 10 % more with 4."""

start_kernel: ContextVar[Callable[[Any, tuple[int, ...]], Callable[..., object]]] = ContextVar(
    "start_kernel", default=operator.getitem
)
"""How :func:`run` launches, given the kernel and its grid; ``iris tune`` has it compile, and launch nothing."""

_PARTS = "schedule", "source", "sink", "after", "courier"
_NEEDED = _PARTS[:3]


@dataclass(frozen=True)
class Plan:
    """Everything about a launch that the op decides; see :mod:`iris.device.matmul` for the parts.

    Attributes:
        site: the op's number, for errors of waits (:mod:`iris.device.sync`); 0 for one of your own.
        schedule, source, sink, after, courier: the parts; None: there is none.
        sliced: the sink takes some rows of a tile as it does a whole one, and nothing comes after, so that programs
            which share a split tile may each hand it what they have summed; None: if it is ``tile.local_sink``.
        eager: ``after`` follows its own tile, not the next one; None: with few tiles per program, and where the source
            may wait, as for what another rank's ``after`` announces: two programs that each owe the other a tile
            would wait for ever.
        gate: programs wait before their first sink until all ranks have entered the call.
        shards: ranks among which tiles are dealt; ``sharded``: by rows, each rank having its own.
        segments: ranks among which A is cut by columns; 1 if it is not.
        own: the own shard of rows comes first, and is read where it lies.
        piecewise: the source is asked again until K is through; False, which is faster, if it always has all of K.
            None: unless A is all here.
        meet: on leaving, ranks wait until all have come so far.
        alone: no other rank takes part.
        own_epochs: programs count calls for themselves (:func:`iris.device.sync.own_epoch`), as nothing that they do,
            the parts included, waits for a peer to enter or leave; for workspaces whose calls all do so. ``alone`` they
            do, too, if they count at all.
        chunks, blocks_per_chunk, chunk_rows: chunks of rows in which parts of A arrive, or the output leaves; block
            rows, and rows, in each.
        pieces, piece_k: pieces of columns in which each chunk arrives, and columns in each; 0 for all.
        couriers, dedicated, first_units, abreast: as in :class:`iris.device.matmul.Crew`.
        half_rows, half_flags: where A arrives in two halves of its memory by turns: rows, and flags, from the first to
            the second; 0: there is one.
        counts: counters that ``after`` needs; a courier that counts has the first ``chunks`` of the same.
        rounds: rounds in which each shard's tiles are divided, where shards take turns.
        per_round: tiles of each shard in a round, where not all rounds are alike but the last; None: as ``rounds``
            divide them.
    """

    site: int
    schedule: Any = schedule.own_first
    source: Any = kernels.local_source
    sink: Any = tile.local_sink
    after: Any = None
    sliced: bool | None = None
    eager: bool | None = None
    gate: bool = False
    courier: Any = None
    shards: int = 1
    sharded: bool = False
    segments: int = 1
    own: bool = False
    piecewise: bool | None = None
    meet: bool = True
    alone: bool = False
    own_epochs: bool = False
    chunks: int = 1
    blocks_per_chunk: int = 1
    chunk_rows: int = 0
    pieces: int = 1
    piece_k: int = 0
    couriers: int = 0
    dedicated: int = 0
    first_units: int = 0
    abreast: int = 1
    half_rows: int = 0
    half_flags: int = 0
    counts: int = 0
    rounds: int = 1
    per_round: int | None = None

    def rows(self, problem: Problem) -> int:
        """Rows of A as the kernel counts them: of one shard where A is sharded by rows, else all."""
        return problem.m // self.shards if self.sharded else problem.m

    def tiles_per_shard(self, problem: Problem, config: FusedConfig) -> int:
        """Tiles of the output that belong to one rank."""
        tiles = -(-self.rows(problem) // config.block_size_m) * -(-problem.n // config.block_size_n)
        return tiles if self.sharded else -(-tiles // self.shards)


def run(
    ctx: Iris,
    problem: Problem,
    plan: Plan,
    output: torch.Tensor,
    own: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    bias_is: int,
    config: FusedConfig,
    workspace: FusedWorkspace,
    trace: Trace | None,
    gathered: torch.Tensor | None = None,
    slots: Any = None,
    scales: Scales = NO_SCALES,
) -> None:
    """Launch the matmul kernel for ``problem`` as ``plan`` and ``config`` say.

    Args:
        own: this rank's part of A; all rows of it where the plan's source is ``local_source`` and nothing is gathered.
        bias: added by ``tile.finished``, in a sink; in ``output``'s dtype.
        bias_is: 0: there is none; 1: it is [M], a number for each row; 2: it is [N], a number for each column.
        workspace: made for this op alone, by ``iris.ops.new_workspace``.
        trace: records into it what the programs do.
        gathered: where all of A is once it has arrived, with both halves if there are two; None: the source finds it.
            It may be read by TMA: a source of your own that waits calls ``iris.device.arch.fence_async_proxy`` then.
        slots: what ``sink`` and ``after`` are given under this name.
        scales: what the product is multiplied by before a sink has it: an ``iris.ops.scales.Scales``.

    Raises:
        ShapeError, DTypeError, ArgumentError: of an op of your own (``plan.site`` is 0), what does not agree with
            ``problem``, or a ``config`` that cannot run. Where a sink of your own writes nobody checks.
        CaptureError: the call needs new memory, which no capture may make.
    """
    if plan.site == 0:
        _check(ctx, problem, plan, output, own, gathered, b, bias, bias_is, scales, config, workspace, trace)
    if config.stream_k and problem.k <= config.block_size_k:  # nothing to split, and Triton 3.6 fails at K = 1
        config = replace(config, stream_k=False)
    target = target_of(ctx)
    waits = plan.source is not kernels.local_source  # or may, for what arrives
    if not waits:
        own = row_major(workspace, own)
    whole = own if gathered is None else gathered
    tiling = _tiling(problem, plan, config, ctx.num_sms, gathered is not None)
    desc = Descriptors()
    if target.tma:
        # TMA faults at blocks that begin between 16 bytes, as a rank's columns may (seen on H200, CUDA 13.0).
        between = plan.segments > 1 and not tiling.even_k and tiling.k * own.element_size() % 16 != 0
        read = None if waits and gathered is None else whole
        desc = descriptors_of(None if waits and not plan.own else own, read, b, config, tiling.strips, between)
    epochs, turnstile = _epochs(ctx, plan, config, workspace)
    counters = _counters(plan, workspace)
    partials, split = _split_memory(problem, config, tiling, workspace)
    if trace is not None:
        trace.begin(ctx, tiling.programs)
    flags = Flags(
        turnstile, workspace.ready, split, counters,
        plan.chunks, plan.blocks_per_chunk, plan.pieces, plan.piece_k or tiling.k,
    )  # fmt: skip
    few = tiling.tiles < DEFER_FROM_TILES * tiling.programs
    courier_m, courier_n = (config.comm_block_m, config.comm_block_n) if plan.courier is not None else (0, 0)
    start_kernel.get()(kernels.matmul_kernel, (tiling.programs,))(
        ctx.alone if plan.alone else ctx.handle, flags,
        Matrix(own, *own.stride()), desc.own, Matrix(whole, *whole.stride()), desc.whole,
        Matrix(b, *b.stride()), desc.b, desc.bt, desc.b_strip, desc.bt_strip,
        Matrix(output, *output.stride()), scales.for_kernel, bias, slots, partials,
        trace.buffer if trace is not None else None,
        tiling.rows, problem.n, tiling.k, tiling.per_shard, tiling.per_round,
        kernels.Crew(plan.couriers, plan.dedicated, plan.first_units, plan.abreast), plan.chunk_rows, plan.half_rows,
        SCHEDULE=plan.schedule, SOURCE=plan.source, SINK=plan.sink, AFTER=plan.after, COURIER=plan.courier,
        SLICED=tiling.sliced, EAGER=waits or few if plan.eager is None else plan.eager, GATE=plan.gate, MEET=plan.meet,
        SHARDS=plan.shards, SHARDED=plan.sharded, SEGMENTS=plan.segments, OWN=plan.own,
        PIECEWISE=waits if plan.piecewise is None else plan.piecewise,
        HALF_FLAGS=plan.half_flags, EPOCHS=epochs, SITE=plan.site, BIAS=bias_is,
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
        rows, k: of A as the kernel counts them: of one rank's part, where A is cut so.
        per_shard, per_round, tiles: tiles that belong to one rank, those of them in a round, and all ranks' tiles.
        programs: how many are launched.
        sliced: programs which share a split tile may each hand the sink what they have summed.
        strips: narrower tiles into which each split tile is cut.
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
    """``gathered``: all of A is in one place, not cut by columns."""
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
    """How the kernel counts calls, its ``EPOCHS``, and where."""
    if plan.alone and not config.stream_k:
        return sync.NO_EPOCHS.value, workspace.turnstile
    if plan.own_epochs or plan.alone:
        return ctx.num_sms, workspace.scratch("epochs", ctx.num_sms, torch.int32)
    return sync.TURNSTILE.value, workspace.turnstile


def _counters(plan: Plan, workspace: FusedWorkspace) -> torch.Tensor | None:
    """What ``after`` and a courier count in."""
    counts = max(plan.counts, plan.chunks if plan.courier is not None else 0)
    return workspace.scratch("counters", counts, torch.int32) if counts else None


def _split_memory(
    problem: Problem, config: FusedConfig, tiling: _Tiling, workspace: FusedWorkspace
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What Stream-K needs: two parts of tiles, or of strips, for each program to hand over, and its flags."""
    if not config.stream_k:
        return None, None
    parts = 2 * tiling.programs * config.tile_elements // tiling.strips
    partials = workspace.scratch("partials", parts, accumulator_of(problem.dtype))
    return partials, workspace.scratch("split", 3 * tiling.programs, torch.int32)


def _check(
    ctx: Iris,
    problem: Problem,
    plan: Plan,
    output: torch.Tensor,
    own: torch.Tensor,
    gathered: torch.Tensor | None,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    bias_is: int,
    scales: Scales,
    config: FusedConfig,
    workspace: FusedWorkspace,
    trace: Trace | None,
) -> None:
    """Raise if a user's op gives what does not belong together; the ops of Iris have checked theirs."""
    op = problem.op
    for name in _PARTS:
        part = getattr(plan, name)
        if not isinstance(part, KernelInterface) and (part is not None or name in _NEEDED):
            raise ArgumentError(op, f"plan.{name}", "a @triton.jit function", getattr(part, "__name__", repr(part)))
    kinds = (("config", config, FusedConfig), ("workspace", workspace, FusedWorkspace), ("scales", scales, Scales))
    for name, value, kind in kinds:
        if not isinstance(value, kind):
            raise ArgumentError(op, name, f"a {kind.__name__}", repr(value))
    if not (trace is None or isinstance(trace, Trace)):
        raise ArgumentError(op, "trace", "None, or an iris.Trace of one's own", repr(trace))
    config.check(op, (config.algorithm,), ctx.num_sms, problem.dtype)
    if workspace.ctx is not ctx or workspace.op != op:
        raise ArgumentError(op, "workspace", f"one made for {op} on this context", repr(workspace))
    if scales.of_blocks:
        why = "as blocks have scales"
        if BLOCK % config.block_size_k:
            raise ArgumentError(op, "config.block_size_k", f"at most {BLOCK}, {why}", config.block_size_k)
        if problem.dtype != torch.float8_e4m3fn:
            raise DTypeError(op, "problem.dtype", f"torch.float8_e4m3fn, {why}", problem.dtype)
        if plan.segments > 1 and problem.k // plan.segments % BLOCK:
            of_each = f"a multiple of {BLOCK} columns for each of {plan.segments} ranks, {why}"
            raise ShapeError(op, "problem.k", of_each, problem.k)
    for name, size, parts in (
        ("problem.m", problem.m, plan.shards if plan.sharded else 1), ("problem.k", problem.k, plan.segments),
    ):  # fmt: skip
        if size % parts:
            raise ShapeError(op, name, f"a multiple of {parts}, as ranks share it by plan", size)
    all_here = plan.source is kernels.local_source and gathered is None and not plan.own
    rows, part = (problem.m, "all rows of A") if all_here else (plan.rows(problem), "this rank's part of A")
    check_shape(op, "own", own, (rows, problem.k // plan.segments), f"{part}, by problem")
    check_shape(op, "b", b, (problem.k, problem.n), "by problem")
    if plan.sink is tile.local_sink:
        check_shape(op, "output", output, (problem.m, problem.n), "by problem")
    for name, tensor in (("own", own), ("b", b)):
        if tensor.dtype != problem.dtype:
            raise DTypeError(op, name, f"{problem.dtype}, as problem says", tensor.dtype)
        check_no_gradient(op, name, tensor)
    if plan.own_epochs and plan.gate:
        raise ArgumentError(op, "plan.own_epochs", "False with gate, which waits at the turnstile of all ranks", "True")
    expected = {BIAS_NONE.value: None, BIAS_ROW.value: problem.m, BIAS_COLUMN.value: problem.n}
    if bias_is not in expected:
        raise ArgumentError(op, "bias_is", "0, 1 or 2", repr(bias_is))
    numbers = None if bias is None else bias.numel()
    if numbers != expected[bias_is]:
        wanted = "None" if expected[bias_is] is None else f"{expected[bias_is]} numbers"
        raise ShapeError(op, "bias", f"{wanted}, as bias_is = {bias_is}", numbers)
    if bias is not None:
        check_contiguous(op, "bias", bias)
        if bias.dtype != output.dtype:
            raise DTypeError(op, "bias", f"{output.dtype}, as output has", bias.dtype)
    of_a, of_b = shapes_of_blocks(problem.m, problem.n, problem.k)
    for name, given, count, of_blocks in (
        ("scales.a", scales.a, problem.m, of_a), ("scales.b", scales.b, problem.n, of_b),
    ):  # fmt: skip
        if given is not None and given.dtype != torch.float32:
            raise DTypeError(op, name, str(torch.float32), given.dtype)
        if scales.of_blocks:
            if given is None or tuple(given.shape) != of_blocks:
                got = "None" if given is None else tuple(given.shape)
                raise ShapeError(op, name, f"{list(of_blocks)}, as blocks have scales, by problem", got)
        elif given is not None and (given.numel() not in (1, count) or not given.is_contiguous()):
            got = f"{tuple(given.shape)} with strides {given.stride()}"
            raise ShapeError(op, name, f"one number, or {count} that are contiguous, by problem", got)


def accumulator_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which matrices of ``dtype``, or their products, are summed."""
    return torch.float32 if dtype.is_floating_point else torch.int32


def _precision(dtype: torch.dtype, made: torch.dtype) -> str:
    """Of float32, what torch.matmul would use: all of it unless the user allows TF32. Sums of fp8 are kept in all of it
    where the output is, ``made``; what they lose else is little beside rounding to 16 bits
    (docs/performance-matmul.md)."""
    if dtype == torch.float32:
        return "tf32" if allows_tf32() else "ieee"
    return "tf32" if dtype == torch.float8_e4m3fn and made != torch.float32 else "ieee"
