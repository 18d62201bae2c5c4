"""Compile the matmul that an op would launch, without launching it, so that each rank can compile some of the configs.

The op itself runs, but with a context whose copy engine copies nothing, and its kernel is compiled, not launched.
Kernels are the same on all ranks, so all ranks then find them in Triton's cache on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from iris.context import Iris
from iris.ops import FusedWorkspace
from iris.ops.launching import start_kernel


class _IdleEngine:
    """A copy engine, as far as algorithms with Iris's own kernel use it, that launches kernels but copies nothing."""

    def beside(
        self, kernel: Callable[[], None], copies: Callable[[], None], last: Callable[[], None] | None = None
    ) -> None:
        kernel()
        if last is not None:
            last()

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def unbroken(self, announced: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def put(self, source: torch.Tensor, target: torch.Tensor, peer: int) -> None: ...

    def then(self, producer: Callable[[], None], consumer: Callable[[], None]) -> None:
        producer()


class _Bystander:
    """``ctx``, but workspaces have idle copy engines."""

    def __init__(self, ctx: Iris) -> None:
        self._ctx = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def workspace(self, key: Hashable, make: Callable[[], Any]) -> Any:
        def owned() -> Any:
            made = make()
            return replace(made, ctx=self._ctx) if isinstance(made, FusedWorkspace) else made

        made = self._ctx.workspace(key, owned)
        idle: Any = _IdleEngine()
        return replace(made, engine=idle) if isinstance(made, FusedWorkspace) else made


def compile_only(ctx: Iris, call: Callable[[Any], object], mine: bool) -> None:
    """Compile the matmul kernel that ``call``, given a context, would launch, if it is ``mine`` to compile. All ranks
    call this together: workspaces are made on the way, and small kernels other than the matmul run. Errors of the
    compiler are raised after these kernels, as those of different ranks may wait for each other."""
    raised: list[Exception] = []

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
        def compiled(*arguments: Any, **constants: Any) -> None:
            try:
                kernel.warmup(*arguments, grid=grid, **constants)
            except Exception as error:  # noqa: BLE001 (whatever it is, peers wait)
                raised.append(error)

        return compiled if mine else _nothing

    token = start_kernel.set(launcher)
    try:
        call(_Bystander(ctx))
    finally:
        start_kernel.reset(token)
    if raised:
        raise raised[0]


def _nothing(*_: Any, **__: Any) -> None:
    """Replaces a kernel that another rank compiles."""
