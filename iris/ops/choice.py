"""The config with which a call runs: the caller's, or the picked one that fits; the same on all ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch

from iris.context import Iris
from iris.errors import ArgumentError, CaptureError, ranks_text
from iris.ops import tuned
from iris.ops.algorithms import TRAITS, algorithms
from iris.ops.config import FusedConfig, most_warps
from iris.ops.obstacles import has_no_tile, min_comm_programs, obstacle
from iris.ops.operands import BIAS_KINDS, place_of
from iris.ops.pick import can_run, has_row, pick_config
from iris.ops.problem import QUANTISED, Problem
from iris.ops.room import has_room_for, needed_nbytes
from iris.ops.scales import NO_SCALES, Scales
from iris.ops.target import target_of
from iris.ops.workspace import FusedWorkspace
from iris.trace import is_wanted

_BLOCKING = ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL")
"""Debugging variables that make a launch return only when the kernel has finished."""


class Adjusted(NamedTuple):
    """The best options known for ``algorithm``, except for the given ``options``; for :func:`resolve`."""

    algorithm: str
    options: tuple[tuple[str, int | str], ...]


def resolve(
    ctx: Iris,
    problem: Problem,
    config: FusedConfig | Adjusted | str | None,
    workspace: FusedWorkspace | None,
    trace: object,
    refused: Callable[[str], ArgumentError | None] = lambda _: None,
    shared: Mapping[str, torch.Tensor] = MappingProxyType({}),
    bias_is: int | None = None,
    scales: Scales = NO_SCALES,
    scales_nbytes: int = 0,
) -> FusedConfig:
    """The config to run with, its algorithm settled: the caller's, checked, or the picked one; the same on all ranks.

    "auto" leaves out algorithms that need more memory than there is, on the heap or in ``workspace``, those that do not
    take the operands, and, for a call with a ``trace``, those that cannot be traced.

    Args:
        refused: the error with which an algorithm refuses the operands, or None.
        shared: the operands, by name, that peers touch; they must lie in the same place on all ranks.
        bias_is: the kind of a bias that is added to a sum over ranks, whichever rank adds it.
        scales: the scales of the call; the config is adapted to them.
        scales_nbytes: heap bytes, beside the workspace, for gathering the scales of rows; 0: none are gathered.

    Raises:
        ArgumentError: ``config`` cannot run, or cannot be traced; ``trace`` is no trace.
        RankMismatch: other ranks call the op with another problem, config, kind of bias, or workspace, or with
            ``shared`` operands of other strides or at another place of the heap. Checked in the first call with these.
    """
    by_library = scales.of_blocks and ctx.backend_name == "cuda"  # where it takes half as long as Iris's kernel
    traced = is_wanted(problem.op, trace)
    chosen, key = _chosen(ctx, problem, config, workspace, traced, refused, by_library, scales_nbytes)
    if error := refused(chosen.algorithm):
        raise error
    picked = ctx.backend_name == "cuda" and not isinstance(config, FusedConfig)
    fitting = scales.fitting(chosen, picked=picked)
    if isinstance(config, Adjusted):
        fitting = scales.fitting(replace(fitting, **dict(config.options)), picked=False)  # type: ignore[arg-type]
    traits = TRAITS[problem.op]
    if traced and has_no_tile(chosen):
        others = [name for name, one in traits.items() if not one.library]
        expected = f"none of {chosen.algorithm}, whose matmul is torch.matmul's"
        raise ArgumentError(problem.op, "trace", expected, "one", f"These have traces: {', '.join(others)}.")
    if traits[chosen.algorithm].atomic:
        _check_atomic(ctx, problem)
    if traits[chosen.algorithm].library and problem.dtype in QUANTISED:
        tuned.user_rows(tuned.user_path())  # read now: a matmul within the call picks a tile when peers count on it
    if problem.world_size > 1:
        if traits[chosen.algorithm].comm_programs:
            fitting.comm_programs(problem.op, ctx.num_sms)  # raises if none is left to compute
        if traits[chosen.algorithm].async_launch and (blocking := _blocking(ctx)):
            expected = f"an algorithm whose kernel waits for no copy, as {blocking} is set"
            raise ArgumentError(problem.op, "config.algorithm", expected, chosen.algorithm, "Unset it, or take None.")
        if traits[chosen.algorithm].stream_waits and _in_one_queue(ctx):
            raise CaptureError(
                f"{problem.op} by {chosen.algorithm} cannot be captured where CUDA_DEVICE_MAX_CONNECTIONS=1: in one "
                "queue its copies could wait in front of the kernel that they wait for. Unset it, or take config=None."
            )
        bias = () if bias_is is None else (BIAS_KINDS[bias_is],)
        kind = f"scale_a for each {'block' if scales.of_blocks else 'row'}" if scales_nbytes else "no scale_a to gather"
        gathered = (kind,) if problem.dtype in QUANTISED else ()
        places = (place_of(ctx, argument, tensor) for argument, tensor in shared.items())
        ctx.agree(problem.op, (problem, fitting, *bias, *gathered, *places, _memory(ctx, workspace)))
    if key is not None and key not in (known := _settled(ctx)):
        # Settled only after the ranks have agreed: a rank that did not make this call would choose later, with another
        # heap. A call that finds no memory for any algorithm settles nothing: the next one may find more.
        if problem.world_size == 1 or has_room_for(ctx, problem, chosen, workspace, scales_nbytes):
            known[key] = chosen
            if ctx.rank == 0:
                _tell(ctx, problem, chosen, fitting, key, workspace)
    return fitting


def _check_atomic(ctx: Iris, problem: Problem) -> None:
    """Raise ArgumentError if atomics on a peer's memory may lose sums, or the order of sums must not vary."""
    expected = ""
    if ctx._backend.without_atomics:
        expected = f"another algorithm, as the link to {ranks_text(ctx._backend.without_atomics)} has no native atomics"
    elif problem.output_dtype.is_floating_point and torch.are_deterministic_algorithms_enabled():
        expected = "a deterministic algorithm, as torch.use_deterministic_algorithms asks for"
        if torch.is_deterministic_algorithms_warn_only_enabled():
            warnings.warn(f"{problem.op}: atomic sums floats in any order; expected {expected}", stacklevel=2)
            return
    if expected:
        raise ArgumentError(problem.op, "config.algorithm", expected, "atomic", "Take config=None.")


def _tell(
    ctx: Iris,
    problem: Problem,
    chosen: FusedConfig,
    fitting: FusedConfig,
    key: _Choice,
    workspace: FusedWorkspace | None,
) -> None:
    """Log what "auto" took for a new problem, and why: at level debug, except that the first time a context's heap is
    too small is a warning. ``fitting``: the config as it runs."""
    tile = f", tile {fitting.block_size_m} x {fitting.block_size_n} x {fitting.block_size_k}"
    sizes = f"{problem.op}: m={problem.m}, n={problem.n}, k={problem.k}, {problem.dtype}"
    taken = f"{sizes}: auto takes {chosen.algorithm}{'' if has_no_tile(chosen) else tile}"
    best = key.first if key.given is None else replace(key.given, algorithm=key.first.algorithm)
    if chosen.algorithm == best.algorithm:
        measured = has_row(problem, target_of(ctx), chosen)
        why = "a tuned row" if measured else "the simulator's list" if ctx.backend_name == "sim" else "the model"
        ctx.debug(f"{taken}, by {why if key.given is None else 'what is given'}")
    elif best.algorithm in key.beyond:
        ctx.debug(f"{taken}, as blocks have scales, with which the library's matmul is faster than {best.algorithm}'s")
    elif best.algorithm not in key.may:
        ctx.debug(f"{taken}, as this call's operands, trace or workspace rule out {best.algorithm}")
    elif has_room_for(ctx, problem, best, workspace, key.scales_nbytes):
        ctx.debug(f"{taken}, as {best.algorithm} would leave no program to compute")
    elif workspace is not None:
        ctx.debug(f"{taken}, as the workspace has no room for {best.algorithm}")
    else:
        enough = ctx.heap_size_for(needed_nbytes(ctx, problem, best) + key.scales_nbytes)
        told = ctx.kept("short heaps", list[str])
        log = ctx.debug if told else ctx.warning
        told.append(sizes)
        log(f"{taken}, as the heap has no room for {best.algorithm}: heap_size={enough} would have for this call")


def _memory(ctx: Iris, workspace: FusedWorkspace | None) -> str:
    """Whose workspace a call has, and where it lies, in words."""
    if type(workspace) is not FusedWorkspace or workspace.ctx is not ctx:  # anything else is refused later
        return "workspace of the context"
    return f"workspace given at heap offset {place_of(ctx, 'workspace', workspace.turnstile).heap_offset}"


def _tell_of_missing_rows(ctx: Iris) -> None:
    if ctx.rank == 0 and (path := tuned.misnamed()) is not None:
        ctx.warning(
            f"{tuned.ENVIRONMENT_VARIABLE}: there is no file {path}, so no rows of yours are used. Name the one that "
            "iris tune has written, or /dev/null for none."
        )


class _Choice(NamedTuple):
    """Everything that a choice of "auto" depends on, except the room on the heap. ``may``: algorithms that it may take;
    ``beyond``: those that it may take if there is no room for any of these."""

    problem: Problem
    first: FusedConfig
    given: FusedConfig | None
    may: tuple[str, ...]
    beyond: tuple[str, ...]
    made: object
    scales_nbytes: int

    @property
    def plain(self) -> bool:
        """Whether the caller gave neither options nor a workspace."""
        return self.given is None and not self.made


def settled(ctx: Iris, problem: Problem) -> FusedConfig | None:
    """What "auto" took for ``problem`` in calls without options or a workspace of the caller's; None if there were
    none."""
    plain = (config for asked, config in _settled(ctx).items() if asked.plain and asked.problem == problem)
    return next(plain, None)


def _settled(ctx: Iris) -> dict[_Choice, FusedConfig]:
    """What "auto" has chosen for calls on which all ranks agree, by what the choice depends on."""
    return ctx.kept("settled choices", dict)


def _chosen(
    ctx: Iris,
    problem: Problem,
    config: FusedConfig | Adjusted | str | None,
    workspace: FusedWorkspace | None,
    traced: bool,
    refused: Callable[[str], ArgumentError | None],
    by_library: bool,
    scales_nbytes: int,
) -> tuple[FusedConfig, _Choice | None]:
    """The config, and the key of the choice if "auto" chose by what fits."""
    known, given = algorithms(problem.op), config if isinstance(config, FusedConfig) else None
    if given is None or given.algorithm == "auto":
        ctx.kept("a missing file was told of", lambda: _tell_of_missing_rows(ctx))
    if given is not None:
        given.check(problem.op, ("auto", *known), ctx.num_sms, problem.dtype)
        if given.num_warps > (most := most_warps(ctx.backend_name)):  # AMD has fewer than a config may have
            raise ArgumentError(problem.op, "config.num_warps", f"at most {most} on AMD", given.num_warps)
        if given.algorithm != "auto":
            return given, None
    elif isinstance(config, Adjusted):
        return _adjusted(ctx, problem, config), None
    elif isinstance(config, str) and config != "auto":
        if config not in known:
            expected = f"a FusedConfig, or one of {', '.join(('auto', *known))}"
            raise ArgumentError(problem.op, "config", expected, repr(config))
        return pick_config(problem, target_of(ctx), config), None
    elif config is not None and not isinstance(config, str):
        raise ArgumentError(problem.op, "config", "a FusedConfig, an algorithm's name, or None", type(config).__name__)
    traits = TRAITS[problem.op]
    may = tuple(one for one in _allowed(ctx, problem.op, traced) if refused(one) is None)
    fits = isinstance(workspace, FusedWorkspace) and workspace.op == problem.op and workspace.ctx is ctx
    mine = workspace if fits else None  # one that does not fit is refused later, when the algorithm is known
    if mine is not None:
        may = tuple(one for one in may if one == mine.algorithm)
    preferred = tuple(one for one in may if by_library and traits[one].library and not traits[one].accumulates)
    beyond = tuple(one for one in may if one not in preferred) if preferred else ()
    first = pick_config(problem, target_of(ctx))
    made = mine is not None and (mine.algorithm, mine.staging.shape, mine.ready.shape)
    key = _Choice(problem, first, given, preferred or may, beyond, made, scales_nbytes)
    return _settled(ctx).get(key) or _that_fits(ctx, key, mine), key


def _allowed(ctx: Iris, op: str, traced: bool) -> tuple[str, ...]:
    """The algorithms that "auto" may take in the current environment, and for a call with or without a trace."""
    left_out = {"library"} if traced else set()
    if _blocking(ctx):
        left_out.add("async_launch")
    if _in_one_queue(ctx):
        left_out.add("stream_waits")
    if ctx.backend_name == "hip":  # there streams share queues, and small copies are kernels
        left_out.add("beside")
    return tuple(name for name, one in TRAITS[op].items() if not any(getattr(one, trait) for trait in left_out))


def _adjusted(ctx: Iris, problem: Problem, wanted: Adjusted) -> FusedConfig:
    """The config for ``wanted``, with the default tile if the best one does not go with the given options."""
    target, options = target_of(ctx), dict(wanted.options)
    for base in (pick_config(problem, target, wanted.algorithm), FusedConfig(wanted.algorithm)):
        config = replace(base, **options)  # type: ignore[arg-type]
        config.check(problem.op, algorithms(problem.op), ctx.num_sms, problem.dtype)
        if obstacle(problem, config, target) is None:
            break
    return config


def _blocking(ctx: Iris) -> str:
    """The variable that makes launches block on this GPU, or ""."""
    set_ = (name for name in _BLOCKING if ctx.backend_name != "sim" and os.environ.get(name) not in (None, "", "0"))
    return next(set_, "")


def _in_one_queue(ctx: Iris) -> bool:
    """Whether a graph is being captured for a GPU with a single queue."""
    single = ctx.backend_name != "sim" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    return single and torch.cuda.is_current_stream_capturing()


def _that_fits(ctx: Iris, key: _Choice, workspace: FusedWorkspace | None) -> FusedConfig:
    """The best config, beginning with ``first``, that may be taken and for which there is room. If options are
    ``given``, those options with its algorithm. The first call with this key decides, which all ranks make with the
    same heap; later calls keep to the choice, because one rank may replay a graph where others choose."""
    problem, first, given, may = key.problem, key.first, key.given, key.may

    def completed(picked: FusedConfig) -> FusedConfig:
        return picked if given is None else replace(given, algorithm=picked.algorithm)

    if problem.world_size == 1:  # all fit
        if first.algorithm in may or not may:
            return completed(first)
        other = next((one for one in may if not TRAITS[problem.op][one].atomic), may[0])
        return completed(pick_config(problem, target_of(ctx), other))
    picked = first
    too_large: list[FusedConfig] = []
    excluded: tuple[str, ...] = ()
    while True:
        config = completed(picked)
        if picked.algorithm in may and min_comm_programs(problem.op, config) < (config.num_sms or ctx.num_sms):
            fits = has_room_for(ctx, problem, config, workspace, key.scales_nbytes)
            if not fits and not too_large and workspace is None:
                ctx.collect(problem.op)  # memory that all ranks have released meanwhile may be enough
                fits = has_room_for(ctx, problem, config, workspace, key.scales_nbytes)
            if fits:
                return config
            too_large.append(picked)
        excluded += (picked.algorithm,)
        if not can_run(problem, target_of(ctx, excluded)):
            if key.beyond:
                return _that_fits(ctx, key._replace(may=may + key.beyond, beyond=()), workspace)
            return _nearest(ctx, problem, [completed(one) for one in too_large or [first]], workspace)
        picked = pick_config(problem, target_of(ctx, excluded))


def _nearest(
    ctx: Iris, problem: Problem, too_large: list[FusedConfig], workspace: FusedWorkspace | None
) -> FusedConfig:
    """The config whose error is to say what is missing: the one that needs least of the heap, or, if the caller gave a
    workspace, the best one."""
    if workspace is not None:
        return too_large[0]
    return min(too_large, key=lambda config: needed_nbytes(ctx, problem, config))
