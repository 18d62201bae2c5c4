"""Fused matmul + communication ops. Each takes a context first; ``ctx.ops.<name>`` is the same, bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from iris.context import Iris
from iris.ops.all_gather_matmul import all_gather_matmul
from iris.ops.config import FusedConfig, Target, pick_config
from iris.ops.matmul_all_scatter import matmul_all_scatter
from iris.ops.problem import Problem
from iris.ops.workspace import FusedWorkspace, new_workspace

__all__ = [
    "FusedConfig",
    "FusedWorkspace",
    "Problem",
    "Target",
    "all_gather_matmul",
    "matmul_all_scatter",
    "new_workspace",
    "pick_config",
]


class BoundOps:
    """The ops with their context filled in."""

    def __init__(self, ctx: Iris) -> None:
        self.all_gather_matmul: Callable[..., torch.Tensor] = partial(all_gather_matmul, ctx)
        self.matmul_all_scatter: Callable[..., torch.Tensor] = partial(matmul_all_scatter, ctx)


Iris._ops_factory = BoundOps
