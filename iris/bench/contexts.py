"""The contexts that a rank measures with, one after the other."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from iris.backends import chosen
from iris.context import Iris

GPU_HEAP_LIMIT, SIM_HEAP_SIZE = 32 << 30, 256 << 20


def default_heap_size() -> int:
    """A quarter of the GPU's memory, 32 GiB at most; simulated 256 MiB."""
    if chosen().name == "sim":
        return SIM_HEAP_SIZE
    return min(GPU_HEAP_LIMIT, torch.cuda.get_device_properties(0).total_memory // 4 >> 30 << 30)


def roomy(ctx: Iris | None, open_new: Callable[[], Iris]) -> Iris:
    """``ctx``, or a new one if there is none yet or if no free block has half of its heap, as ops keep workspaces from
    one shape to the next. Collective."""
    gc.collect()
    if ctx is not None:
        ctx.free(ctx.empty(1, dtype=torch.uint8))  # an allocation frees what all ranks have let go of
        if 2 * ctx.heap_largest_free_bytes >= ctx.heap_size:
            return ctx
        ctx.close()
        if ctx.backend_name != "sim":
            torch.cuda.empty_cache()
    return open_new()
