"""Whether L2 holds the operands when a call begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from iris.context import Iris

WARM, COLD = L2_STATES = "warm", "cold"
"""``warm``: L2 is as the previous call, on the same operands, has left it; ``cold``: as the layers of a model find it,
each with weights of its own."""
_EVICTING_NBYTES = 512 << 20
"""Several times the size of any L2, and twice that of AMD's Infinity Cache (256 MiB on MI300X)."""
_scratch: dict[torch.device, torch.Tensor] = {}


def evict(ctx: Iris, kept: Sequence[torch.Tensor]) -> Callable[[], None] | None:
    """A function that empties L2 before a call, except for ``kept``; None in the simulator, which has no L2.

    It reads other memory and then ``kept``. It does not write: L2 would write the data back while the call runs.
    """
    if ctx.backend_name == "sim":
        return None
    if ctx.device not in _scratch:
        _scratch[ctx.device] = torch.zeros(_EVICTING_NBYTES // 4, dtype=torch.int32, device=ctx.device)
    read = [_scratch[ctx.device], *(one.view(torch.uint8) for one in kept)]

    def run() -> None:
        for one in read:
            one.amax()

    return run
