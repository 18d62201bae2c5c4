"""Fused matmul + communication ops. Each takes a context first; ``ctx.ops.<name>`` is the same, bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from iris.context import Iris
from iris.ops.all_gather_matmul import all_gather_matmul
from iris.ops.config import FusedConfig, Target
from iris.ops.hbm_buffer import all_gather_matmul_hbm_buffer, all_gather_matmul_hbm_buffer_preamble
from iris.ops.local_matmul import matmul
from iris.ops.matmul_all_reduce import matmul_all_reduce
from iris.ops.matmul_all_scatter import matmul_all_scatter
from iris.ops.matmul_reduce_scatter import matmul_reduce_scatter
from iris.ops.model import OPS, algorithms
from iris.ops.pick import pick_config
from iris.ops.problem import Problem
from iris.ops.workspace import FusedWorkspace, new_workspace

__all__ = [
    "ALGORITHMS",
    "FusedConfig",
    "FusedWorkspace",
    "Problem",
    "Target",
    "all_gather_matmul",
    "all_gather_matmul_hbm_buffer",
    "all_gather_matmul_hbm_buffer_preamble",
    "matmul",
    "matmul_all_reduce",
    "matmul_all_scatter",
    "matmul_reduce_scatter",
    "new_workspace",
    "pick_config",
]

ALGORITHMS: dict[str, tuple[str, ...]] = {op: algorithms(op) for op in OPS}
"""The algorithms of each op; ``"auto"`` is one more for all."""


class BoundOps:
    """The ops with their context filled in."""

    def __init__(self, ctx: Iris) -> None:
        self.all_gather_matmul: Callable[..., torch.Tensor] = partial(all_gather_matmul, ctx)
        self.all_gather_matmul_hbm_buffer: Callable[..., torch.Tensor] = partial(all_gather_matmul_hbm_buffer, ctx)
        self.all_gather_matmul_hbm_buffer_preamble: Callable[..., FusedWorkspace] = partial(
            all_gather_matmul_hbm_buffer_preamble, ctx
        )
        self.matmul_all_scatter: Callable[..., torch.Tensor] = partial(matmul_all_scatter, ctx)
        self.matmul_reduce_scatter: Callable[..., torch.Tensor] = partial(matmul_reduce_scatter, ctx)
        self.matmul_all_reduce: Callable[..., torch.Tensor] = partial(matmul_all_reduce, ctx)
        self.matmul: Callable[..., torch.Tensor] = partial(matmul, ctx)


Iris._ops_factory = BoundOps
