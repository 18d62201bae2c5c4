"""The hardware that a context runs on, for picking configs."""

from __future__ import annotations

from functools import cache

import torch

from iris.context import Iris
from iris.ops.config import MI350_SHARED_NBYTES, Target
from iris.ops.tuned import SIMULATED

_device_name = cache(torch.cuda.get_device_name)
_capability = cache(torch.cuda.get_device_capability)


@cache
def _shared_nbytes(device: torch.device) -> int | None:
    """Bytes of shared memory that a program may have; None if PyTorch does not say, as on AMD (2.13)."""
    properties = torch.cuda.get_device_properties(device)
    if getattr(properties, "gcnArchName", "").startswith("gfx950"):
        return MI350_SHARED_NBYTES
    return getattr(properties, "shared_memory_per_block_optin", None) or None


def target_of(ctx: Iris, excluded: tuple[str, ...] = ()) -> Target:
    """The hardware that ``ctx`` runs on, for picking configs; ``excluded``: algorithms that cannot run."""
    if ctx.backend_name == "sim":
        return Target("sim", ctx.num_sms, excluded=excluded, hardware=SIMULATED)
    tma = ctx.backend_name == "cuda" and _capability(ctx.device) >= (9, 0)
    return Target(ctx.backend_name, ctx.num_sms, tma, excluded, _device_name(ctx.device), _shared_nbytes(ctx.device))


def takes_columns_only(ctx: Iris) -> bool:
    """Whether tensor cores take a B of 8 bits only with contiguous columns, so that programs must transpose any other:
    on NVIDIA, except for tcgen05 of compute capability 10. AMD's take both, as the assembly shows (Triton 3.9)."""
    return ctx.backend_name == "sim" or (ctx.backend_name == "cuda" and _capability(ctx.device)[0] != 10)


def multiplies_fp8(ctx: Iris) -> bool:
    """Whether the GPU of ``ctx`` can multiply fp8; Triton does not emulate it on older NVIDIA GPUs."""
    return ctx.backend_name != "cuda" or _capability(ctx.device) >= (8, 9)
