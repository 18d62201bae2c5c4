"""What an op decides about a launch of the one kernel, and the checks of what a user's own op passes for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton import KernelInterface

from iris.context import Iris
from iris.device import matmul as kernels
from iris.device import schedule, tile
from iris.device.tile import BIAS_COLUMN, BIAS_NONE, BIAS_ROW
from iris.errors import ArgumentError, DTypeError, ShapeError
from iris.ops.config import FusedConfig
from iris.ops.gathering import pull_source
from iris.ops.operands import check_matrix, check_shape
from iris.ops.problem import Problem
from iris.ops.scales import BLOCK, Scales, check_contiguous, shapes_of_blocks
from iris.ops.workspace import FusedWorkspace
from iris.trace import Trace

_PARTS = "schedule", "source", "sink", "after", "courier"
_NEEDED = _PARTS[:3]


@dataclass(frozen=True)
class Plan:
    """Everything about a launch that the op decides; see :mod:`iris.device.matmul` for the parts.

    Attributes:
        site: the op's number, for errors of waits (:data:`iris.device.control.SITES`); 0 for one of your own.
        schedule, source, sink, after, courier: the parts; None: there is none.
        sliced: the sink takes some rows of a tile as well as a whole tile, and nothing comes after, so that programs
            which share a split tile may each hand it the rows that they have summed. None: only ``tile.local_sink``.
        eager: ``after`` is called right after the tile's sink, not after the next tile. None: True if programs have few
            tiles, or if the source may wait: it may wait for what another rank's ``after`` announces, and two programs
            that each defer the announcement which the other waits for would wait for ever.
        gate: programs wait before their first sink until all ranks have entered the call.
        shards: the number of ranks to which tiles are dealt; ``sharded``: by rows, each rank having its own.
        segments: the number of ranks among which A is sharded by columns; 1 if it is not.
        own: this rank's own shard of rows comes first, and is read in place.
        piecewise: the source is asked again until all of K is done. False is faster; it needs a source that always has
            all of K. None: True, unless the source is ``local_source``.
        meet: on leaving, ranks wait until all have come so far.
        alone: no other rank takes part.
        own_epochs: programs count calls for themselves (:func:`iris.device.turnstile.own_epoch`). That requires that
            nothing they do, the parts included, waits for a peer to enter or leave, and that all calls with the
            workspace do the same. With ``alone`` programs always count so, if they count at all.
        chunks, blocks_per_chunk, chunk_rows: the number of chunks of rows in which parts of A arrive, or the output
            leaves; block rows of A, or tiles of the output, in each; and rows in each.
        pieces, piece_k: pieces of columns in which each chunk arrives, and columns in each; 0 for all.
        couriers, dedicated, first_units, abreast: as in :class:`iris.device.matmul.Crew`.
        half_rows, half_flags: if A arrives alternately in two halves of its memory: rows, and flags, from the first
            half to the second. 0: there is one half.
        counts: counters that ``after`` needs; a courier that counts uses the first ``chunks`` of the same counters.
        rounds: rounds into which each shard's tiles are divided, where shards take turns.
        per_round: tiles of each shard in a round; the last round may have fewer. None: as ``rounds`` divide them.
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
        """Rows of A as the kernel counts them: of one shard if A is sharded by rows, else all."""
        return problem.m // self.shards if self.sharded else problem.m

    def tiles_per_shard(self, problem: Problem, config: FusedConfig) -> int:
        """Tiles of the output that belong to one rank."""
        tiles = config.tiles(self.rows(problem), problem.n)
        return tiles if self.sharded else -(-tiles // self.shards)


def check_launch(
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
    """Raise if what a user's op passes does not fit together; Iris's own ops have checked theirs."""
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
    if problem.world_size not in (1, ctx.world_size):
        raise ArgumentError(op, "problem.world_size", f"{ctx.world_size}, or 1 alone", problem.world_size)
    if plan.source is pull_source and (plan.own_epochs or plan.alone):
        without = "own_epochs" if plan.own_epochs else "alone"
        waits = "False with pull_source, which waits at the turnstile of all ranks"
        raise ArgumentError(op, f"plan.{without}", waits, "True")
    for name, tensor in (("output", output), ("own", own), ("b", b)):
        check_matrix(ctx, op, name, tensor)
    all_here = plan.source is kernels.local_source and gathered is None and not plan.own
    rows, part = (problem.m, "all rows of A") if all_here else (plan.rows(problem), "this rank's part of A")
    check_shape(op, "own", own, (rows, problem.k // plan.segments), f"{part}, by problem")
    check_shape(op, "b", b, (problem.k, problem.n), "by problem")
    if plan.sink is tile.local_sink:
        check_shape(op, "output", output, (problem.m, problem.n), "by problem")
    for name, tensor in (("own", own), ("b", b)):
        if tensor.dtype != problem.dtype:
            raise DTypeError(op, name, f"{problem.dtype}, as problem says", tensor.dtype)
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
