"""Every fused op by every algorithm, compared with NCCL + matmul, ``torch.ops.symm_mem`` and the matmul alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from iris.bench.axes import Function, Params, axis
from iris.bench.case import SHAPE_AXIS, register
from iris.bench.cases.l2 import COLD, L2_STATES, WARM, evict
from iris.bench.cases.operands import B_LAYOUTS, CUT, ROW_MAJOR, Operands
from iris.bench.cases.ways import AUTO, UNTUNED, check_options, way, ways_of
from iris.bench.options import several_gpus
from iris.bench.state import FATAL, State, one_line
from iris.context import Iris
from iris.ops import FusedConfig, Problem
from iris.ops.algorithms import ALL_REDUCE, GATHER, LOCAL, REDUCE_SCATTER, SCATTER, TRAITS
from iris.ops.choice import settled
from iris.ops.hardware import HARDWARE, Hardware, floor_s, hardware
from iris.ops.model import predict_ms
from iris.ops.pick import expected_ms
from iris.ops.target import target_of
from iris.ops.tuned import DTYPE_NAMES, changed_fields
from iris.results import COMPARATORS, MATMUL

GPU_SHAPES = (
    (8192, 8192, 29568),
    (8192, 29568, 8192),
    (16384, 28672, 8192),
    (4096, 4096, 14336),
    (1024, 28672, 8192),
    (512, 8192, 8192),
)
SIM_SHAPES = ((128, 192, 256), (60, 84, 72))
SHAPES = GPU_SHAPES if several_gpus() else SIM_SHAPES


def local_params(params: Params, world_size: int, *, op: str) -> Params:
    """``params`` with the sizes of the local matmul as m, n, k, and of the whole problem as ``shape``, instead of M, N,
    K. The layout of B is left out if it is row-major, the state of L2 if it is warm.

    Sizes that the ranks cannot share evenly are rounded up, also in the record, which says that the point was skipped.
    """
    sizes = {name: int(params[name]) for name in SHAPE_AXIS}
    shape = "x".join(str(size) for size in sizes.values())
    if CUT[op]:
        sizes[CUT[op].upper()] = -(-sizes[CUT[op].upper()] // world_size)
    local = {name.lower(): size for name, size in sizes.items()}
    others = {
        name: value for name, value in params.items() if name not in SHAPE_AXIS and value not in (ROW_MAJOR, WARM)
    }
    return {"shape": shape, **local, **others}


def uneven(op: str, shape: str, gather_dim: int, world_size: int) -> str | None:
    """Why ``world_size`` ranks cannot share the whole problem ``shape``, or None if they can."""
    m, n, k = map(int, shape.split("x"))
    sizes = {"M": m, "N": n, "K": k}
    shared = {CUT[op].upper()} - {""}
    if op == GATHER:
        shared.add("M" if gather_dim == 0 else "K")
    if op == REDUCE_SCATTER:
        shared.add("M")
    wrong = [f"{name}={sizes[name]}" for name in sorted(shared) if sizes[name] % world_size]
    return f"{' and '.join(wrong)}: no multiple of {world_size} ranks" if wrong else None


def run(state: State, ctx: Iris, op: str, gather_dim: int = 0) -> None:
    """Check one way to compute ``op``, and hand it to ``state`` for timing."""
    reason = uneven(op, state["shape"], gather_dim, ctx.world_size)
    if reason is not None:
        state.skip(reason)
    sizes, dtype = (state["m"], state["n"], state["k"]), DTYPE_NAMES.get(state["dtype"])
    if dtype is None:
        state.skip(f"no op takes dtype {state['dtype']}")
    b_layout = str(state.params.get("b_layout", ROW_MAJOR))
    operands = state.share("operands", lambda: Operands(ctx, op, sizes, dtype, gather_dim, b_layout))
    chosen = way(state, operands, state["algorithm"])
    problem = operands.problem
    if state["algorithm"] == MATMUL:
        problem = Problem(LOCAL, *sizes, dtype, ctx.world_size)
    state.set_flops(problem.flops)
    state.set_bytes(problem.received_bytes)
    known = hardware(target_of(ctx).hardware)
    cold = state.params.get("l2") == COLD
    state.set_floor(floor_s(problem, known, cold=cold))
    if chosen.config is not None:
        _tell(state, ctx, problem, chosen.config, known)
    # First a call on other numbers: buffers then hold results that must not pass for those of the checked call.
    operands.fill(decoy=True)
    chosen.refresh()
    try:
        chosen.call()
    except FATAL:
        raise
    except Exception as error:
        operands.fill()  # which other variants share
        lacking = isinstance(error, (torch.OutOfMemoryError, dist.DistError))  # not what the way takes
        if state["algorithm"] not in COMPARATORS or not isinstance(error, RuntimeError) or lacking:
            raise
        state.skip(f"{state['algorithm']} does not take this: {one_line(error)}")
    ran = settled(ctx, problem) if state["algorithm"] == AUTO else None
    if ran is not None and ran != chosen.config:
        chosen = replace(chosen, config=ran, roundings=operands.roundings_by(ran))
        _tell(state, ctx, problem, ran, known)
    operands.fill()
    chosen.refresh()
    state.exec(
        chosen.call,
        evict(ctx, [operands.a if chosen.a is None else chosen.a]) if cold else None,
        lambda: operands.complaint(chosen.result(), chosen.roundings, local=chosen.local),
        operands.spoil,
    )


def _tell(state: State, ctx: Iris, problem: Problem, config: FusedConfig, known: Hardware | None) -> None:
    """Record the config that an op of Iris runs with, and what follows from it."""
    state.set_config(changed_fields(config))
    state.set_deterministic(not TRAITS[problem.op][config.algorithm].atomic or not problem.dtype.is_floating_point)
    if problem.op == LOCAL:
        state.add_counter("waves", config.tiles(problem.m, problem.n) / ctx.num_sms)
    if known is not None:
        state.set_predicted(predict_ms(problem, config, known) / 1e3)
        state.add_counter("mi300x_predicted_ms", expected_ms(problem, HARDWARE["MI300X"]))


def _problems(fn: Function) -> Function:
    """The axes that all cases share."""
    fn = axis("l2", (WARM,), also=L2_STATES)(fn)
    fn = axis("b_layout", (ROW_MAJOR,), also=B_LAYOUTS)(fn)
    fn = axis("dtype", ("bf16",), closed=True, also=DTYPE_NAMES)(fn)
    return axis("M,N,K", SHAPES)(fn)


def _algorithms(op: str) -> Callable[[Function], Function]:
    """The axis of all ways to compute ``op``."""
    return axis("algorithm", ways_of(op), variant=True, also=(UNTUNED,), extended=partial(check_options, op=op))


@register(localize=partial(local_params, op=GATHER))
@_problems
@axis("gather_dim", (0, 1), closed=True)
@_algorithms(GATHER)
def all_gather_matmul(state: State, ctx: Iris) -> None:
    """A, sharded by rows (gather_dim 0) or columns (1), is gathered; every rank multiplies it with its columns of B."""
    run(state, ctx, GATHER, state["gather_dim"])


@register(localize=partial(local_params, op=SCATTER))
@_problems
@_algorithms(SCATTER)
def matmul_all_scatter(state: State, ctx: Iris) -> None:
    """Every rank computes its columns of A @ B; all ranks end with all columns."""
    run(state, ctx, SCATTER)


@register(localize=partial(local_params, op=REDUCE_SCATTER))
@_problems
@_algorithms(REDUCE_SCATTER)
def matmul_reduce_scatter(state: State, ctx: Iris) -> None:
    """A and B are sharded by K; the products are summed over ranks, and every rank ends with its rows of the sum."""
    run(state, ctx, REDUCE_SCATTER)


@register(localize=partial(local_params, op=ALL_REDUCE))
@_problems
@_algorithms(ALL_REDUCE)
def matmul_all_reduce(state: State, ctx: Iris) -> None:
    """A and B are sharded by K; the products are summed over ranks, and all ranks end with the sum."""
    run(state, ctx, ALL_REDUCE)


@register(localize=partial(local_params, op=LOCAL))
@_problems
@_algorithms(LOCAL)
def matmul(state: State, ctx: Iris) -> None:
    """A @ B on every rank for itself, data-parallel over tiles and with Stream-K, beside torch.matmul."""
    run(state, ctx, LOCAL)
