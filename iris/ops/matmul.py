"""The host's half of :mod:`iris.device.matmul`: choose a config, launch the one kernel."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton.language as tl

from iris.context import Iris
from iris.device import matmul as kernels
from iris.device import schedule, tile
from iris.device.tile import Flags, Matrix
from iris.errors import ArgumentError
from iris.ops.candidates import LIBRARY, has_no_tile
from iris.ops.config import FusedConfig, Target
from iris.ops.hardware import allows_tf32
from iris.ops.operands import BIAS_KINDS, place_of
from iris.ops.pick import can_run, pick_config
from iris.ops.problem import Problem
from iris.ops.room import has_memory
from iris.ops.row_major import row_major
from iris.ops.tuned import SIMULATED
from iris.ops.workspace import FusedWorkspace
from iris.trace import Trace

DEFER_FROM_TILES = 8
"""Tiles per program from which on it pays to announce a tile one tile later: on 4 × H200, 2026-11-21, matmul +
reduce-scatter by ``push`` took 10 % less time with 57 tiles per program, all-reduce 10 % more with 4."""

_BLOCKING = ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL")
"""Variables for debugging, with which a launch returns when the kernel has run."""
_NEEDS_LAUNCHES_THAT_RETURN = {("matmul_reduce_scatter", "copy_engine"), ("matmul_all_reduce", "copy_engine")}
"""Whose kernel waits for copies that peers ask for when their own kernel's launch has returned."""

_device_name = cache(torch.cuda.get_device_name)


@cache
def _shared_nbytes(device: torch.device) -> int | None:
    """Shared memory that a program may have, if PyTorch knows."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", None) or None


start_kernel: ContextVar[Callable[[Any, tuple[int, ...]], Callable[..., object]]] = ContextVar(
    "start_kernel", default=operator.getitem
)
"""How :func:`run` launches, given the kernel and its grid; ``iris tune`` has it compile, and launch nothing."""


@dataclass(frozen=True)
class Plan:
    """Everything about a launch that the op decides; see :mod:`iris.device.matmul` for the parts.

    Attributes:
        site: the op's number, for errors of waits (:mod:`iris.device.sync`); 0 for one of your own.
        schedule, source, sink, after, courier: the parts; None: there is none.
        eager: ``after`` follows its own tile, not the next one; None: with few tiles per program.
        gate: programs wait before their first sink until all ranks have entered the call.
        shards: ranks among which tiles are dealt; ``sharded``: by rows, each rank having its own.
        segments: ranks among which A is cut by columns; 1 if it is not.
        own: the own shard of rows comes first, and is read where it lies.
        piecewise: the source is asked again until K is through; False, which is faster, if it always has all of K.
            None: unless A is all here.
        meet: on leaving, ranks wait until all have come so far.
        alone: no other rank takes part.
        chunks, blocks_per_chunk, chunk_rows: chunks of rows in which parts of A arrive, or the output leaves; block
            rows, and rows, in each.
        pieces, piece_k: pieces of columns in which each chunk arrives, and columns in each; 0 for all.
        couriers, dedicated, first_units: as in :class:`iris.device.matmul.Crew`.
        counts: counters that ``after`` needs beside those of the couriers' chunks.
        rounds: rounds in which each shard's tiles are divided, where shards take turns.
        per_round: tiles of each shard in a round, where not all rounds are alike but the last; None: as ``rounds``
            divide them.
    """

    site: int
    schedule: Any = schedule.own_first
    source: Any = kernels.local_source
    sink: Any = tile.local_sink
    after: Any = None
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
    chunks: int = 1
    blocks_per_chunk: int = 1
    chunk_rows: int = 0
    pieces: int = 1
    piece_k: int = 0
    couriers: int = 0
    dedicated: int = 0
    first_units: int = 0
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


def target_of(ctx: Iris, excluded: tuple[str, ...] = ()) -> Target:
    """The hardware under ``ctx``, as configs are picked for; ``excluded``: algorithms that cannot run."""
    if ctx.backend_name == "sim":
        return Target("sim", ctx.num_sms, excluded=excluded, hardware=SIMULATED)
    tma = ctx.backend_name == "cuda" and torch.cuda.get_device_capability(ctx.device) >= (9, 0)
    return Target(ctx.backend_name, ctx.num_sms, tma, excluded, _device_name(ctx.device), _shared_nbytes(ctx.device))


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
) -> None:
    """Launch the matmul kernel for ``problem`` as ``plan`` and ``config`` say.

    ``own`` is this rank's part of A; all of it is in ``gathered`` once it has arrived, if that is given, else the
    source finds it.
    """
    target = target_of(ctx)
    if plan.source is kernels.local_source:
        own = row_major(workspace, own)
    rows, k = plan.rows(problem), problem.k // plan.segments
    per_shard = plan.tiles_per_shard(problem, config)
    tiles = plan.shards * per_shard
    even_k = (problem.k if gathered is not None else k) % config.block_size_k == 0
    own_desc = whole_desc = b_desc = bt_desc = None
    if target.tma:
        # TMA faults at blocks that begin between 16 bytes, as a rank's columns may (seen on H200, CUDA 13.0).
        between = plan.segments > 1 and not even_k and k * own.element_size() % 16 != 0
        own_desc, whole_desc, b_desc, bt_desc = _descriptors(plan, config, own, gathered, b, between)
    whole = own if gathered is None else gathered
    units = tiles * -(-problem.k // config.block_size_k) if config.stream_k else tiles
    programs = min(max(units + plan.dedicated, plan.couriers), config.num_sms or ctx.num_sms)
    partials = split = None
    counts = max(plan.counts, plan.chunks if plan.courier is not None else 0)
    counters = workspace.scratch("counters", counts, torch.int32) if counts else None
    if config.stream_k:
        partials = workspace.scratch(
            "partials", 2 * programs * config.block_size_m * config.block_size_n, accumulator_of(problem.dtype)
        )
        split = workspace.scratch("split", 3 * programs, torch.int32)
    if trace is not None:
        trace.begin(ctx, programs)
    flags = Flags(
        workspace.turnstile, workspace.ready, split, counters,
        plan.chunks, plan.blocks_per_chunk, plan.pieces, plan.piece_k or k,
    )  # fmt: skip
    start_kernel.get()(kernels.matmul_kernel, (programs,))(
        ctx.alone if plan.alone else ctx.handle,
        flags,
        Matrix(own, *own.stride()),
        own_desc,
        Matrix(whole, *whole.stride()),
        whole_desc,
        Matrix(b, *b.stride()),
        b_desc,
        bt_desc,
        Matrix(output, *output.stride()),
        bias,
        slots,
        partials,
        trace.buffer if trace is not None else None,
        rows,
        problem.n,
        k,
        per_shard,
        plan.per_round or -(-per_shard // plan.rounds),
        kernels.Crew(plan.couriers, plan.dedicated, plan.first_units),
        plan.chunk_rows,
        SCHEDULE=plan.schedule,
        SOURCE=plan.source,
        SINK=plan.sink,
        AFTER=plan.after,
        EAGER=plan.eager if plan.eager is not None else tiles < DEFER_FROM_TILES * programs,
        GATE=plan.gate,
        COURIER=plan.courier,
        SITE=plan.site,
        SHARDS=plan.shards,
        SHARDED=plan.sharded,
        SEGMENTS=plan.segments,
        OWN=plan.own,
        PIECEWISE=plan.source is not kernels.local_source if plan.piecewise is None else plan.piecewise,
        MEET=plan.meet,
        BIAS=bias_is,
        BLOCK_M=config.block_size_m,
        BLOCK_N=config.block_size_n,
        BLOCK_K=config.block_size_k,
        GROUP_M=config.group_size_m,
        EVEN_K=even_k,
        STREAM_K=config.stream_k,
        TWO_TILES=config.two_tiles,
        COURIER_M=config.comm_block_m,
        COURIER_N=config.comm_block_n,
        PRECISION=_precision(problem.dtype),
        ACC_DTYPE=tl.int32 if problem.dtype == torch.int8 else tl.float32,
        TRACE=trace is not None,
        **config.launch_options(target),
    )


def resolve(
    ctx: Iris,
    problem: Problem,
    config: FusedConfig | str | None,
    algorithms: tuple[str, ...],
    workspace: FusedWorkspace | None,
    trace: object,
    takes: Callable[[str], bool] = lambda _: True,
    shared: Sequence[torch.Tensor] = (),
    bias_is: int | None = None,
) -> FusedConfig:
    """The config to run with, its algorithm settled: the caller's, checked, or the picked one; the same on all ranks.

    "auto" leaves out algorithms that need more memory than there is, on the heap or in ``workspace``, those that do not
    take the operands (``takes``), and, for a call with a ``trace``, those that cannot be traced. ``shared``: operands
    that peers touch, which must lie alike on all ranks. ``bias_is``: the kind of a bias that is added to a sum over
    ranks, by any of them.

    Raises:
        ArgumentError: ``config`` cannot run, or cannot be traced.
        RankMismatch: other ranks call the op with another problem, config or kind of bias, or with ``shared`` operands
            of other strides or at another place of the heap. Found in the first call with these.
    """
    chosen = _chosen(ctx, problem, config, algorithms, workspace, bool(trace), takes)
    if trace and config is not None and has_no_tile(chosen):
        expected = "none, or an algorithm that is not made of torch.matmul"
        raise ArgumentError(problem.op, "trace", expected, f"one of {chosen.algorithm}")
    if problem.world_size > 1:
        if (problem.op, chosen.algorithm) in _NEEDS_LAUNCHES_THAT_RETURN and (blocking := _blocking(ctx)):
            expected = f"an algorithm whose kernel waits for no copy, as {blocking} is set"
            raise ArgumentError(problem.op, "config.algorithm", expected, chosen.algorithm, "Unset it, or take None.")
        bias = () if bias_is is None else (BIAS_KINDS[bias_is],)
        ctx.agree(problem.op, (problem, chosen, *bias, *(place_of(ctx, tensor) for tensor in shared)))
    return chosen


def _chosen(
    ctx: Iris,
    problem: Problem,
    config: FusedConfig | str | None,
    algorithms: tuple[str, ...],
    workspace: FusedWorkspace | None,
    traced: bool,
    takes: Callable[[str], bool],
) -> FusedConfig:
    given = config if isinstance(config, FusedConfig) else None
    if given is not None:
        given.check(problem.op, ("auto", *algorithms), ctx.num_sms, problem.dtype)
        if given.algorithm != "auto":
            return given
    elif isinstance(config, str) and config != "auto":
        if config not in algorithms:
            raise ArgumentError(problem.op, "config", f"a FusedConfig, or one of {', '.join(algorithms)}", repr(config))
        return pick_config(problem, target_of(ctx), config)
    elif config is not None and config != "auto":
        raise ArgumentError(problem.op, "config", "a FusedConfig, an algorithm's name, or None", type(config).__name__)
    may = tuple(one for one in algorithms if takes(one) and not (traced and one in LIBRARY))
    if _blocking(ctx):
        may = tuple(one for one in may if (problem.op, one) not in _NEEDS_LAUNCHES_THAT_RETURN)
    first = pick_config(problem, target_of(ctx))
    settled: dict[Any, FusedConfig] = ctx.kept("settled choices", dict)
    made = isinstance(workspace, FusedWorkspace) and (
        workspace.algorithm,
        workspace.staging.shape,
        workspace.ready.shape,
    )
    key = problem, first, given, may, made
    if key not in settled:
        settled[key] = _that_fits(ctx, problem, workspace, first, given, may)
    return settled[key]


def _blocking(ctx: Iris) -> str:
    """The variable that has launches block on this GPU, if any."""
    set_ = (name for name in _BLOCKING if ctx.backend_name != "sim" and os.environ.get(name, "0") != "0")
    return next(set_, "")


def _that_fits(
    ctx: Iris,
    problem: Problem,
    workspace: FusedWorkspace | None,
    first: FusedConfig,
    given: FusedConfig | None,
    may: tuple[str, ...],
) -> FusedConfig:
    """``first``, or the best of those that may be taken and for which there is room, or what is ``given``, with the
    algorithm of one of these: as of the first such call, which all ranks make with the same heap. Later ones keep to
    it, as a rank may replay its graph where others choose."""

    def completed(picked: FusedConfig) -> FusedConfig:
        return picked if given is None else replace(given, algorithm=picked.algorithm)

    picked = first
    excluded: tuple[str, ...] = ()
    while problem.world_size > 1:
        if picked.algorithm in may and has_memory(ctx, problem, completed(picked), workspace):
            break
        excluded += (picked.algorithm,)
        if not can_run(problem, target_of(ctx, excluded)):
            return completed(first)  # to say what is missing
        picked = pick_config(problem, target_of(ctx, excluded))
    return completed(picked)


def accumulator_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products of ``dtype`` matrices are summed."""
    return torch.int32 if dtype == torch.int8 else torch.float32


def _descriptors(
    plan: Plan, config: FusedConfig, own: torch.Tensor, gathered: torch.Tensor | None, b: torch.Tensor, between: bool
) -> tuple[Any, Any, Any, Any]:
    """TMA descriptors of this rank's part of A, of all of A, of B, and of B's transpose where there is none of B; None
    for what is read by pointers. ``between``: blocks of columns of A, and of B's transpose, begin between 16 bytes."""
    m, n, k = config.block_size_m, config.block_size_n, config.block_size_k
    here = plan.source is kernels.local_source
    b_desc = _describe(b, [k, n])
    bt_desc = _describe(b.T, [n, k]) if b_desc is None and not between else None
    own_desc = _describe(own, [m, k]) if plan.own or here else None
    if between or (gathered is None and not here):
        return own_desc, None, b_desc, bt_desc
    return own_desc, own_desc if gathered is None else _describe(gathered, [m, k]), b_desc, bt_desc


def _describe(matrix: torch.Tensor, block: list[int]) -> Any:
    """A TMA descriptor, or None where TMA cannot read the matrix: it needs unit column stride, and rows that begin at
    multiples of 16 bytes and do not overlap, as those of an expanded tensor do."""
    row = matrix.stride(0)
    if matrix.stride(1) != 1 or matrix.data_ptr() % 16 or row * matrix.element_size() % 16 or row < matrix.shape[1]:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, block)


def _precision(dtype: torch.dtype) -> str:
    """What torch.matmul would use: full float32 unless the user allows TF32."""
    return "tf32" if dtype == torch.float32 and allows_tf32() else "ieee"
