"""All-gather + matmul through a buffer in this rank's memory, under the names and with the options that it is known by.

:func:`all_gather_matmul_hbm_buffer` is :func:`iris.ops.all_gather_matmul` with ``algorithm="hbm_buffer"``;
:func:`all_gather_matmul_hbm_buffer_preamble` makes its workspace beforehand.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from iris.context import Iris
from iris.ops.all_gather_matmul import MAX_FLAGS, all_gather_matmul
from iris.ops.config import FusedConfig
from iris.ops.workspace import FusedWorkspace, workspace_for
from iris.trace import Trace

_OP, _ALGORITHM = "all_gather_matmul", "hbm_buffer"


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
    num_fetch_sms: int | None = None,
    k_per_flag: int | None = None,
    fetch_block_m: int | None = None,
    fetch_block_k: int | None = None,
    staged_a_layout: str | None = None,
    num_fetch_stages: int | None = None,
    first_stage_fetch_sms: int | None = None,
    trace: bool | Trace = False,
) -> torch.Tensor:
    """``output = all_gather(A_sharded) @ B + bias``: some programs fetch A into a buffer, the others compute.

    Args:
        output, A_sharded, B, bias, gather_dim, workspace, trace: as for :func:`iris.ops.all_gather_matmul`.
        config: the tile and launch options; what is given below replaces its fields.
        num_fetch_sms: programs that only fetch (``config.comm_sms``).
        k_per_flag: blocks of K that one ready flag announces.
        fetch_block_m, fetch_block_k: the tile that a fetcher moves at a time (``comm_block_m``, ``comm_block_n``).
        staged_a_layout: ``"k_contiguous"`` or ``"m_contiguous"``.
        num_fetch_stages, first_stage_fetch_sms: stages of fetching, and the programs that fetch the first.

    Returns:
        ``output``.

    Raises:
        As :func:`iris.ops.all_gather_matmul`.

    Sync: as :func:`iris.ops.all_gather_matmul`.
    """
    given = {
        "comm_sms": num_fetch_sms,
        "k_per_flag": k_per_flag,
        "comm_block_m": fetch_block_m,
        "comm_block_n": fetch_block_k,
        "staged_a_layout": staged_a_layout,
        "num_fetch_stages": num_fetch_stages,
        "first_stage_fetch_sms": first_stage_fetch_sms,
    }
    base = config if config is not None else FusedConfig()
    options = {name: value for name, value in given.items() if value is not None}
    chosen = replace(base, algorithm=_ALGORITHM, **options)  # type: ignore[arg-type]
    return all_gather_matmul(
        ctx, output, A_sharded, B, bias, gather_dim=gather_dim, config=chosen, workspace=workspace, trace=trace
    )


def all_gather_matmul_hbm_buffer_preamble(
    ctx: Iris, A_sharded: torch.Tensor, B: torch.Tensor, config: FusedConfig | None = None
) -> FusedWorkspace:
    """Make the buffer and flags that :func:`all_gather_matmul_hbm_buffer` needs for operands like these. Collective.

    The op would make them in its first call. ``config`` is accepted for its place in the call; any will do.
    """
    gathered = A_sharded.numel() * ctx.world_size * A_sharded.element_size()
    return workspace_for(ctx, _OP, _ALGORITHM, None, gathered, MAX_FLAGS)
