"""Workspaces: the flags, and the memory for peers' data, that an op keeps between calls. Made once, reused, never
zeroed again."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from triton import next_power_of_2

from iris.context import MAX_RANKS, Iris, require_context
from iris.device import turnstile
from iris.engine import CopyEngine
from iris.errors import ArgumentError, CaptureError, HeapError, whole_number
from iris.heap import align_up, format_bytes
from iris.live import Live
from iris.ops.algorithms import LOCAL, TRAITS, algorithms
from iris.ops.rows import MAX_CHUNKS

MIN_FLAGS = MAX_RANKS * MAX_CHUNKS
"""The least number of flags of a workspace. One whose data could travel as words has more if it travels behind
flags."""
_TURNSTILES_NBYTES = 2 * 4 * turnstile.TURNSTILE_WORDS.value


@dataclass(frozen=True, eq=False)
class FusedWorkspace(Live):
    """Flags and staging memory of one op on one context; see :func:`new_workspace`.

    Attributes:
        op, algorithm: what it is for. Algorithms differ in when peers may write into it, so they do not share one.
        turnstile: where ranks meet; see :func:`iris.device.turnstile.enter`.
        second_turnstile: the same, for a second kernel that runs beside the first.
        ready: the flags: one epoch for each part or tile that has arrived.
        staging: bytes on the symmetric heap that peers write into; empty if the algorithm needs none.
        engine: the copy engine; the context's own workspaces share one.
        local: memory of this rank alone, by purpose; made when first needed.
        others: workspaces for exchanges that are part of its calls; made when first needed.
    """

    op: str
    algorithm: str
    ctx: Iris
    turnstile: torch.Tensor
    second_turnstile: torch.Tensor
    ready: torch.Tensor
    staging: torch.Tensor
    engine: CopyEngine
    local: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    others: dict[Hashable, FusedWorkspace] = field(default_factory=dict)

    def __repr__(self) -> str:
        room = f"{format_bytes(self.staging.numel())} of staging memory, {self.ready.numel()} flags"
        return f"FusedWorkspace({self.op}, {self.algorithm}, {room}, {self.ctx!r})"

    @property
    def flagged(self) -> bool:
        """Whether there are flags for all that its algorithm sends. If so, nothing travels as words: in memory where
        words are awaited, nothing else must ever be stored."""
        return bool(self.ready.numel() > MIN_FLAGS)

    def has_room(self, staging_nbytes: int, num_flags: int) -> bool:
        """Whether it has this much staging memory and so many flags."""
        return bool(self.staging.numel() >= staging_nbytes and self.ready.numel() >= num_flags)

    def staged(self, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """The start of the staging memory as a matrix."""
        return self.staging[: rows * cols * dtype.itemsize].view(dtype).view(rows, cols)

    def stacked(self, rows: int, cols: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """One matrix over the staging memory that holds two, which calls use in turn, and the row with which the second
        begins. That is the first row that lies wholly in the second half, so that no matrix, however wide, reaches into
        the other half. Both fit into :func:`stacked_nbytes`.
        """
        second = -(-(self.staging.numel() // 2) // (cols * dtype.itemsize))
        return self.staged(second + rows, cols, dtype), second

    def inbox(self, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """The staging memory as two halves, which calls use in turn, and the number of elements in each."""
        half = self.staging.numel() // 2 // 16 * 16
        return self.staging[: 2 * half].view(dtype), half // dtype.itemsize

    def scratch(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        """At least ``count`` elements of memory of this rank alone, zero when first made, kept under ``name``.

        There is one such memory for each power of two. None is ever freed, because captured calls go on using it.
        """
        key = (name, next_power_of_2(count), dtype)
        if key not in self.local:
            _refuse_in_capture(self.ctx, self.op)
            with _outlasting_inference():
                self.local[key] = torch.zeros(key[1], dtype=dtype, device=self.ctx.device)
        return self.local[key]

    def scratch_matrix(self, name: str, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """The start of :meth:`scratch` memory as a matrix."""
        return self.scratch(name, rows * cols, dtype)[: rows * cols].view(rows, cols)

    def beside(self, name: str, staging_nbytes: int, num_flags: int) -> FusedWorkspace:
        """The workspace of the exchange ``name``, which is part of this op's calls; kept by size, as by
        :func:`workspace_for`. Collective the first time."""
        sizes = size_class(staging_nbytes, num_flags)
        key = name, *sizes
        if key not in self.others:
            _refuse_in_capture(self.ctx, self.op)
            self.others[key] = _made(self.ctx, self.op, self.algorithm, *sizes, self.engine, True)
        return self.others[key]

    @cached_property
    def alone(self) -> FusedWorkspace:
        """The workspace of what this rank computes or copies alone in this op's calls: one for all of the context's own
        workspaces, whose calls are on one stream at a time and share an engine."""
        return kept_local_workspace(self.ctx) if self.engine is _engine_of(self.ctx) else local_workspace(self.ctx)

    @cached_property
    def one(self) -> torch.Tensor:
        """The number 1, a scale."""
        _refuse_in_capture(self.ctx, self.op)
        with _outlasting_inference():
            return torch.ones(1, dtype=torch.float32, device=self.ctx.device)


def local_workspace(ctx: Iris) -> FusedWorkspace:
    """A workspace for matmuls of this rank alone. It has no memory that ranks share, so no other rank takes part."""
    _refuse_in_capture(ctx, LOCAL)
    flags, staging = (torch.zeros(0, dtype=dtype, device=ctx.device) for dtype in (torch.int32, torch.uint8))
    return FusedWorkspace(LOCAL, "local", ctx, flags, flags, flags, staging, _engine_of(ctx))


def kept_local_workspace(ctx: Iris) -> FusedWorkspace:
    """The context's own workspace for matmuls of this rank alone."""
    return ctx.kept(LOCAL, lambda: local_workspace(ctx))


def _engine_of(ctx: Iris) -> CopyEngine:
    """The engine that the context's own workspaces share."""
    return ctx.kept(CopyEngine, lambda: CopyEngine(ctx))


def _outlasting_inference() -> AbstractContextManager[object]:
    """Within this block, tensors are made so that they can also be written outside of ``torch.inference_mode()``."""
    return torch.inference_mode(False)


def _refuse_in_capture(ctx: Iris, op: str) -> None:
    """Raise CaptureError if the stream is being captured, before memory is made that a call keeps: zeroing it would be
    recorded, not done, and the ranks could not meet."""
    if ctx.backend_name != "sim" and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"{op}: a call that needs new memory cannot be captured in a graph. Call it once with operands of these "
            "sizes and this config before you capture it."
        )


def workspace_for(
    ctx: Iris,
    op: str,
    algorithm: str,
    workspace: FusedWorkspace | None = None,
    staging_nbytes: int = 0,
    num_flags: int = 0,
) -> FusedWorkspace:
    """``workspace`` if it fits, or the context's own for ``op`` and ``algorithm``. Collective the first time.

    The context's own workspaces are kept by size, in powers of two, so that calls of changing shape make few.

    Raises:
        ArgumentError: ``workspace`` was made for another op, algorithm or context, or is too small.
        CaptureError: a workspace would have to be made while a graph is captured.
        HeapError: the heap has no room for it.
    """
    call = _call_for(op, algorithm)
    if workspace is None:
        sizes = size_class(staging_nbytes, num_flags)
        key = op, algorithm, *sizes
        if not ctx.has_workspace(key):
            _refuse_in_capture(ctx, op)
        engine = _engine_of(ctx)
        return ctx.workspace(key, lambda: _made(ctx, op, algorithm, *sizes, engine, _in_words(op, algorithm)))
    if type(workspace) is not FusedWorkspace:
        raise ArgumentError(op, "workspace", f"None, or one made with {call}, …)", type(workspace).__name__)
    if (workspace.op, workspace.algorithm) != (op, algorithm) or workspace.ctx is not ctx:
        raise ArgumentError(
            op, "workspace", f"one made for {op}, {algorithm}, on this context",
            f"one for {workspace.op}, {workspace.algorithm}" + ("" if workspace.ctx is ctx else ", on another context"),
            f"Make it with {call}, {staging_nbytes}, {num_flags}).",
        )  # fmt: skip
    if not workspace.has_room(staging_nbytes, num_flags):
        raise ArgumentError(
            op, "workspace", f"{format_bytes(staging_nbytes)} of staging memory and {num_flags} flags",
            f"{format_bytes(workspace.staging.numel())} and {workspace.ready.numel()}",
            f"Make it with {call}, {staging_nbytes}, {num_flags}).",
        )  # fmt: skip
    return workspace


def _call_for(op: str, algorithm: str) -> str:
    """The start of the call that makes a workspace."""
    return f'iris.ops.new_workspace(ctx, "{op}", "{algorithm}"'


def workspace_nbytes(staging_nbytes: int, num_flags: int) -> int:
    """Bytes of the heap that a workspace takes, in one piece; ``num_flags``: :data:`MIN_FLAGS` or more."""
    return _staging_offset(num_flags) + staging_nbytes


def _staging_offset(num_flags: int) -> int:
    """Where the staging memory begins in the workspace's piece of the heap: behind turnstiles and flags."""
    return align_up(_TURNSTILES_NBYTES + 4 * num_flags)


def size_class(staging_nbytes: int, num_flags: int) -> tuple[int, int]:
    """The sizes of the workspace that is made for calls with these needs: powers of two."""
    return next_power_of_2(staging_nbytes), max(MIN_FLAGS, next_power_of_2(num_flags))


def stacked_nbytes(rows: int, cols: int, dtype: torch.dtype, workspace: FusedWorkspace | None) -> int:
    """Bytes of staging memory in which two such matrices fit, each in its own half (:meth:`FusedWorkspace.stacked`).
    Each takes one more row if the middle of the context's own workspace may lie within a row, or if ``workspace`` is
    too small for both."""
    row_nbytes = cols * dtype.itemsize
    if workspace is None:
        return 2 * row_nbytes * (rows if row_nbytes == next_power_of_2(row_nbytes) else rows + 1)
    staging_nbytes = workspace.staging.numel()
    needed = 2 * (rows * row_nbytes + -(staging_nbytes // 2) % row_nbytes)
    return needed if needed <= staging_nbytes else 2 * row_nbytes * (rows + 1)


def new_workspace(ctx: Iris, op: str, algorithm: str, staging_nbytes: int = 0, num_flags: int = 0) -> FusedWorkspace:
    """Make a separate workspace, for calls of ``op`` that run at the same time as other ops, on another stream.
    Collective.

    If a workspace is too small for a call, the call's error says how large it must be. Release it like any memory of
    the heap: when the calls that use it are done on all ranks, behind a barrier, and graphs that you captured with it
    are not replayed any more. An op of your own may have any name that no op of Iris has, and algorithms of any name.

    Args:
        op, algorithm: what the workspace is for; calls of other ops or algorithms refuse it.
        staging_nbytes, num_flags: the bytes of staging memory and the number of flags, for ops of your own, or if you
            know what a call needs. If they are too few for an op of Iris, its error says so.

    Returns:
        A workspace to pass as ``workspace``.

    Raises:
        ArgumentError: a name is no string, the op does not have the algorithm, or a size is no whole number of bytes or
            flags.
        ContextError: the context is closed, or belongs to a parent process.
        HeapError, CaptureError: the heap has no room for it, or a capture is under way.
        RankMismatch, WaitTimeout, PeerDied: the ranks ask for different sizes, or one does not come.
    """
    require_context("new_workspace", ctx)
    ctx.check("new_workspace")
    for name, given in {"op": op, "algorithm": algorithm}.items():
        if not isinstance(given, str):
            raise ArgumentError("new_workspace", name, "a name", repr(given))
    known = algorithms(op)  # of an op of the user's: none
    if known and algorithm not in known:
        raise ArgumentError("new_workspace", "algorithm", f"one of {op}: {', '.join(known)}", repr(algorithm))
    for name, count in {"staging_nbytes": staging_nbytes, "num_flags": num_flags}.items():
        if whole_number(count) < 0:
            raise ArgumentError("new_workspace", name, "a whole number, 0 or more", repr(count))
    _refuse_in_capture(ctx, op)
    return _made(ctx, op, algorithm, staging_nbytes, num_flags, CopyEngine(ctx), _in_words(op, algorithm))


def _in_words(op: str, algorithm: str) -> bool:
    return op in TRAITS and TRAITS[op][algorithm].words


def _made(
    ctx: Iris, op: str, algorithm: str, staging_nbytes: int, num_flags: int, engine: CopyEngine, words: bool
) -> FusedWorkspace:
    """Make a workspace. ``words``: the algorithm sends words, unless there are flags for all that it sends."""
    num_flags = max(num_flags, MIN_FLAGS)
    try:
        with _outlasting_inference():
            memory = ctx.zeros(workspace_nbytes(staging_nbytes, num_flags), dtype=torch.uint8)
            turnstiles = memory[:_TURNSTILES_NBYTES].view(torch.int32).view(2, -1)
            turnstiles[:, turnstile.NEXT_EPOCH.value] = 1
            ready = memory[_TURNSTILES_NBYTES:][: 4 * num_flags].view(torch.int32)
            staging = memory[_staging_offset(num_flags) :]
            if words and num_flags == MIN_FLAGS:
                staging.fill_(0xFF)  # no word: iris.device.words.NO_WORD
    except HeapError as error:
        kept = f"{format_bytes(staging_nbytes)} for staging, {format_bytes(4 * num_flags)} for flags"
        raise HeapError(f"{op} by {algorithm} keeps {kept}. {error}") from error
    ctx.barrier()
    return FusedWorkspace(op, algorithm, ctx, turnstiles[0], turnstiles[1], ready, staging, engine)
