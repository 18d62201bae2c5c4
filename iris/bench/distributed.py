"""The libraries that Iris is compared with: their matmul, and a ``torch.distributed`` process group over the ranks of a
context."""

from __future__ import annotations

import gc
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from iris.context import Iris

all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""These have new names in PyTorch 2.13."""
_TIMEOUT = timedelta(seconds=300)


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """``out = a @ b``; int8 matrices are summed in int32 (on CUDA their extents must be multiples of 8)."""
    if a.dtype == torch.int8:
        torch._int_mm(a, b, out=out)
    else:
        torch.matmul(a, b, out=out)


def process_group(ctx: Iris) -> dist.ProcessGroup:
    """The group of all ranks: NCCL (RCCL) on GPUs, gloo in the simulator. The first call makes it and is collective.

    Ranks meet at a store on loopback, at a port that the system chose.
    """
    if not dist.is_initialized():
        store = None
        if ctx.rank == 0:
            store = TCPStore("127.0.0.1", 0, ctx.world_size, True, _TIMEOUT, wait_for_workers=False)
        port = int(ctx.broadcast(store.port if store is not None else 0, 0))
        if store is None:
            store = TCPStore("127.0.0.1", port, ctx.world_size, False, _TIMEOUT)
        if ctx.backend_name == "sim":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.world_size, timeout=_TIMEOUT)
        else:
            dist.init_process_group(
                "nccl",
                store=store,
                rank=ctx.rank,
                world_size=ctx.world_size,
                timeout=_TIMEOUT,
                device_id=ctx.device,
            )
    group = dist.group.WORLD
    assert group is not None
    return group


def leave() -> None:
    """End the group, if there is one. CUDA graphs of compiled functions are dropped first: NCCL waits until no graph is
    left that has captured its calls."""
    if dist.is_initialized():
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        gc.collect()
        dist.destroy_process_group()
