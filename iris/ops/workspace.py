"""What an op keeps between calls: the flags of its turnstile. Made once, never zeroed again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from iris.context import Iris
from iris.device import sync
from iris.errors import ArgumentError


@dataclass(frozen=True)
class FusedWorkspace:
    """Flags of one op on one context; see :func:`workspace_for`."""

    op: str
    ctx: Iris
    turnstile: torch.Tensor


def workspace_for(ctx: Iris, op: str, workspace: FusedWorkspace | None = None) -> FusedWorkspace:
    """``workspace`` if it fits, or the context's own for ``op``. Collective the first time.

    Raises:
        ArgumentError: ``workspace`` was made for another op or context.
    """
    if workspace is None:
        return ctx.workspace(op, lambda: new_workspace(ctx, op))
    if workspace.op != op or workspace.ctx is not ctx:
        raise ArgumentError(
            op, "workspace", f"one made for {op} on this context", f"one for {workspace.op}",
            f'Make it with iris.ops.new_workspace(ctx, "{op}").',
        )  # fmt: skip
    return workspace


def new_workspace(ctx: Iris, op: str) -> FusedWorkspace:
    """A workspace of its own, for calls of ``op`` that run at the same time on several streams. Collective."""
    turnstile = ctx.zeros(sync.TURNSTILE_WORDS.value, dtype=torch.int32)
    ctx.barrier()
    return FusedWorkspace(op, ctx, turnstile)
