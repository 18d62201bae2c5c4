"""Whether L2 holds the operands when a call begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from iris.context import Iris

WARM, COLD = L2_STATES = "warm", "cold"
"""``warm``: as the call before has left it, on the same operands; ``cold``: as a model's layers find it, each of which
has weights of its own."""
_EVICTING_NBYTES = 512 << 20
"""Several times what any L2 holds, and twice AMD's Infinity Cache (256 MiB on MI300X)."""
_scratch: dict[torch.device, torch.Tensor] = {}


def evict(ctx: Iris, kept: Sequence[torch.Tensor]) -> Callable[[], None] | None:
    """What empties L2 before a call, but for ``kept``; None in the simulator, which has none.

    Other memory is read, not written: what is written would have to leave L2 while the call runs. Then ``kept`` is
    read.
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
