"""The hardware under a context, as configs are picked for it."""

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
    """Shared memory that a program may have, if PyTorch knows. On AMD it does not say (2.13)."""
    properties = torch.cuda.get_device_properties(device)
    if getattr(properties, "gcnArchName", "").startswith("gfx950"):
        return MI350_SHARED_NBYTES
    return getattr(properties, "shared_memory_per_block_optin", None) or None


def target_of(ctx: Iris, excluded: tuple[str, ...] = ()) -> Target:
    """The hardware under ``ctx``, as configs are picked for; ``excluded``: algorithms that cannot run."""
    if ctx.backend_name == "sim":
        return Target("sim", ctx.num_sms, excluded=excluded, hardware=SIMULATED)
    tma = ctx.backend_name == "cuda" and _capability(ctx.device) >= (9, 0)
    return Target(ctx.backend_name, ctx.num_sms, tma, excluded, _device_name(ctx.device), _shared_nbytes(ctx.device))


def multiplies_fp8(ctx: Iris) -> bool:
    """Whether the GPU under ``ctx`` does; Triton knows no way around it on NVIDIA's older ones."""
    return ctx.backend_name != "cuda" or _capability(ctx.device) >= (8, 9)
