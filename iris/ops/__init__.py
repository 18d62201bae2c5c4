"""Fused matmul + communication ops. Each takes a context first; ``ctx.ops.<name>`` is the same, bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Concatenate, Generic, ParamSpec, TypeVar, overload

import torch

from iris.context import Iris
from iris.ops.algorithms import OPS, algorithms
from iris.ops.all_gather_matmul import all_gather_matmul
from iris.ops.config import FusedConfig, Target
from iris.ops.hbm_buffer import all_gather_matmul_hbm_buffer, all_gather_matmul_hbm_buffer_preamble
from iris.ops.local_matmul import matmul
from iris.ops.matmul_all_reduce import matmul_all_reduce
from iris.ops.matmul_all_scatter import matmul_all_scatter
from iris.ops.matmul_reduce_scatter import matmul_reduce_scatter
from iris.ops.pick import pick_config
from iris.ops.problem import Problem
from iris.ops.symm_mem import replace_symm_mem
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
    "replace_symm_mem",
]

P = ParamSpec("P")
T = TypeVar("T")

ALGORITHMS: dict[str, tuple[str, ...]] = {op: algorithms(op) for op in OPS}
"""The algorithms of each op; ``"auto"`` is one more for all."""


class _Bound(Generic[P, T]):
    """An op of :class:`BoundOps`, as a method of the context: with its name, docstring and signature, less ``ctx``."""

    def __init__(self, op: Callable[Concatenate[Iris, P], T]) -> None:
        self._op = op

    @overload
    def __get__(self, ops: None, owner: type[BoundOps]) -> Callable[Concatenate[Iris, P], T]: ...
    @overload
    def __get__(self, ops: BoundOps, owner: type[BoundOps]) -> Callable[P, T]: ...
    def __get__(self, ops: BoundOps | None, owner: type[BoundOps]) -> Callable[..., T]:
        if ops is None:
            return self._op
        if torch.compiler.is_dynamo_compiling():  # which knows no MethodType
            return partial(self._op, ops._ctx)
        return MethodType(self._op, ops._ctx)


class BoundOps:
    """The ops with their context filled in."""

    def __init__(self, ctx: Iris) -> None:
        self._ctx = ctx

    all_gather_matmul = _Bound(all_gather_matmul)
    all_gather_matmul_hbm_buffer = _Bound(all_gather_matmul_hbm_buffer)
    all_gather_matmul_hbm_buffer_preamble = _Bound(all_gather_matmul_hbm_buffer_preamble)
    matmul_all_scatter = _Bound(matmul_all_scatter)
    matmul_reduce_scatter = _Bound(matmul_reduce_scatter)
    matmul_all_reduce = _Bound(matmul_all_reduce)
    matmul = _Bound(matmul)


Iris._ops_factory = BoundOps
