"""All-gather + matmul through a buffer in this rank's memory, under the names and options that users of Iris know.

:func:`all_gather_matmul_hbm_buffer` is :func:`iris.ops.all_gather_matmul` with ``algorithm="hbm_buffer"``;
:func:`all_gather_matmul_hbm_buffer_preamble` makes its workspace beforehand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from iris.context import Iris, require_context
from iris.errors import ArgumentError, ShapeError
from iris.ops.algorithms import GATHER
from iris.ops.all_gather_matmul import all_gather_matmul
from iris.ops.choice import Adjusted
from iris.ops.config import FusedConfig
from iris.ops.operands import check_operands
from iris.ops.problem import Problem, output_dtype
from iris.ops.room import memory_of
from iris.ops.workspace import FusedWorkspace
from iris.trace import Trace

_ALGORITHM = "hbm_buffer"


def all_gather_matmul_hbm_buffer(
    ctx: Iris,
    output: torch.Tensor,
    A_sharded: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None = None,
    config: FusedConfig | None = None,
    workspace: FusedWorkspace | None = None,
    *,
    gather_dim: int | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    num_fetch_sms: int | None = None,
    k_per_flag: int | None = None,
    fetch_block_m: int | None = None,
    fetch_block_k: int | None = None,
    staged_a_layout: str | None = None,
    num_fetch_stages: int | None = None,
    first_stage_fetch_sms: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    trace: bool | Trace = False,
) -> torch.Tensor:
    """``output = all_gather(A_sharded) @ B + bias``: some programs fetch A into a buffer, the others compute.

    Args:
        output, A_sharded, B, bias, gather_dim, scale_a, scale_b, workspace, trace: as for
            :func:`iris.ops.all_gather_matmul`.
        config: the tile and launch options; None: the best known for ``hbm_buffer``. The arguments below replace its
            fields if they are given.
        num_fetch_sms: programs that only fetch (``config.comm_sms``).
        k_per_flag: blocks of K that one ready flag announces.
        fetch_block_m, fetch_block_k: the tile that a fetcher moves at a time (``comm_block_m``, ``comm_block_n``).
        staged_a_layout: ``"k_contiguous"`` or ``"m_contiguous"``.
        num_fetch_stages, first_stage_fetch_sms: the number of fetching stages, and of programs that fetch the first.
        num_warps, num_stages: as in Triton.

    Returns:
        ``output``.

    Raises:
        As :func:`iris.ops.all_gather_matmul`.

    Sync: as :func:`iris.ops.all_gather_matmul`.
    """
    options = _given(
        comm_sms=num_fetch_sms,
        k_per_flag=k_per_flag,
        comm_block_m=fetch_block_m,
        comm_block_n=fetch_block_k,
        staged_a_layout=staged_a_layout,
        num_fetch_stages=num_fetch_stages,
        first_stage_fetch_sms=first_stage_fetch_sms,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    op = "all_gather_matmul_hbm_buffer"
    chosen: Any = Adjusted(_ALGORITHM, tuple(options.items())) if config is None else _config(op, config, options)
    return all_gather_matmul(
        ctx, output, A_sharded, B, bias, gather_dim=gather_dim, scale_a=scale_a, scale_b=scale_b, config=chosen,
        workspace=workspace, trace=trace,
    )  # fmt: skip


def all_gather_matmul_hbm_buffer_preamble(
    ctx: Iris,
    A_sharded: torch.Tensor,
    B: torch.Tensor,
    config: FusedConfig | None = None,
    *,
    k_per_flag: int | None = None,
    staged_a_layout: str | None = None,
) -> FusedWorkspace:
    """Make the buffer and flags that :func:`all_gather_matmul_hbm_buffer` needs for operands like these. Collective.

    Without it, the op makes them in its first call. The buffer and flags suffice for any config: ``config``,
    ``k_per_flag`` and ``staged_a_layout`` are checked, but change nothing. The memory in which a ``scale_a`` for each
    row is gathered is made by the first call that has one.

    Args:
        A_sharded, B: operands like those of the calls.
        config, k_per_flag, staged_a_layout: as in the calls.

    Returns:
        The workspace to pass as ``workspace``.

    Raises:
        ContextError: the context is closed, or belongs to a parent process.
        ShapeError, DTypeError, PlacementError, ArgumentError: before anything is made.
        HeapError, CaptureError: the heap has no room for it, or a graph is being captured.
        RankMismatch, WaitTimeout, PeerDied: ranks ask for different sizes, or a rank does not take part.
    """
    op = "all_gather_matmul_hbm_buffer_preamble"
    require_context(op, ctx)
    ctx.check(op)  # first: in a forked child nothing can be asked of CUDA
    made = output_dtype(A_sharded.dtype) if isinstance(A_sharded, torch.Tensor) else torch.float32
    output = torch.empty(1, 1, dtype=made, device=ctx.device)  # a stand-in that passes the checks
    check_operands(ctx, op, output, ("A_sharded", A_sharded), B, None)
    (rows, columns), (k, n), world = A_sharded.shape, B.shape, ctx.world_size
    if k not in (columns, columns * world):
        expected = f"{columns} rows, or {columns * world} (rows of B = columns of the gathered A)"
        raise ShapeError(op, "B", expected, tuple(B.shape))
    options = _given(k_per_flag=k_per_flag, staged_a_layout=staged_a_layout)
    chosen = _config(op, FusedConfig() if config is None else config, options)
    chosen.check(op, (_ALGORITHM,), ctx.num_sms, A_sharded.dtype)
    m, dim = (rows * world, 0) if k == columns else (rows, 1)
    return memory_of(ctx, Problem(GATHER, m, n, k, A_sharded.dtype, world, dim), chosen, None)


def _given(**options: int | str | None) -> dict[str, int | str]:
    """The ``options`` that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _config(op: str, config: FusedConfig, options: dict[str, int | str]) -> FusedConfig:
    """``config`` for this algorithm, with the ``options``."""
    if not isinstance(config, FusedConfig):
        raise ArgumentError(op, "config", "a FusedConfig or None", repr(config))
    return replace(config, algorithm=_ALGORITHM, **options)  # type: ignore[arg-type]
