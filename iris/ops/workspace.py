"""What an op keeps between calls: flags, and where peers' data arrives. Made once, reused, never zeroed again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from iris.context import MAX_RANKS, Iris
from iris.device import sync
from iris.device.matmul import Flags
from iris.engine import CopyEngine
from iris.errors import ArgumentError
from iris.heap import format_bytes

MAX_CHUNKS = 64
"""Chunks in which a rank's part may arrive, each with a flag of its own."""
_FLAGS_NBYTES = 16 << 10
"""Room for a workspace's flags, rounded up."""


@dataclass(frozen=True)
class FusedWorkspace:
    """Flags and staging memory of one op on one context; see :func:`new_workspace`.

    Attributes:
        op: the op that it is for.
        turnstile: where ranks meet; see :func:`iris.device.sync.enter`.
        ready: one epoch per (rank, chunk) that has arrived.
        staging: bytes on the symmetric heap that peers write into; empty where the algorithm needs none.
        engine: the copy engine's stream.
    """

    op: str
    ctx: Iris
    turnstile: torch.Tensor
    ready: torch.Tensor
    staging: torch.Tensor
    engine: CopyEngine

    def flags(self, chunks: int = 1, blocks_per_chunk: int = 1) -> Flags:
        """The flags as the kernel takes them, for parts that arrive in ``chunks`` chunks."""
        return Flags(self.turnstile, self.ready, chunks, blocks_per_chunk)

    def staged(self, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """The start of the staging memory as a matrix."""
        return self.staging[: rows * cols * dtype.itemsize].view(dtype).view(rows, cols)


def workspace_for(
    ctx: Iris, op: str, workspace: FusedWorkspace | None = None, staging_nbytes: int = 0
) -> FusedWorkspace:
    """``workspace`` if it fits, or the context's own for ``op``. Collective the first time.

    The context's own are kept by size, in powers of two, so that calls of changing shape make few.

    Raises:
        ArgumentError: ``workspace`` was made for another op or context, or is too small.
    """
    if workspace is None:
        size = _staging_size(staging_nbytes)
        return ctx.workspace((op, size), lambda: new_workspace(ctx, op, size))
    if workspace.op != op or workspace.ctx is not ctx:
        raise ArgumentError(
            op, "workspace", f"one made for {op} on this context", f"one for {workspace.op}",
            f'Make it with iris.ops.new_workspace(ctx, "{op}").',
        )  # fmt: skip
    if workspace.staging.numel() < staging_nbytes:
        raise ArgumentError(
            op, "workspace", f"{format_bytes(staging_nbytes)} of staging memory",
            format_bytes(workspace.staging.numel()),
            f'Make it with iris.ops.new_workspace(ctx, "{op}", {staging_nbytes}).',
        )  # fmt: skip
    return workspace


def staging_fits(ctx: Iris, op: str, workspace: FusedWorkspace | None, staging_nbytes: int) -> bool:
    """Whether :func:`workspace_for` would find or make so much staging memory; the same on all ranks."""
    if workspace is not None:
        return workspace.staging.numel() >= staging_nbytes
    size = _staging_size(staging_nbytes)
    return ctx.has_workspace((op, size)) or ctx.heap_largest_free_bytes >= size + _FLAGS_NBYTES


def _staging_size(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def new_workspace(ctx: Iris, op: str, staging_nbytes: int = 0) -> FusedWorkspace:
    """A workspace of its own, for calls of ``op`` that run at the same time on several streams. Collective."""
    turnstile = ctx.zeros(sync.TURNSTILE_WORDS.value, dtype=torch.int32)
    turnstile[sync.NEXT_EPOCH.value] = 1
    ready = ctx.zeros(MAX_RANKS * MAX_CHUNKS, dtype=torch.int32)
    staging = ctx.empty(staging_nbytes, dtype=torch.uint8)
    ctx.barrier()
    return FusedWorkspace(op, ctx, turnstile, ready, staging, CopyEngine(ctx))
