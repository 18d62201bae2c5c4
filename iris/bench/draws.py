"""Random data that is the same on all ranks, and checks of results made from it."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import torch

from iris.bench.timing import of_all
from iris.context import Iris
from iris.errors import IrisError, ranks_text

_SEED_STEP = 0x9E3779B1  # odd, so streams differ; PyTorch's CPU generator uses no more than 32 bits of a seed


def shared_generator(ctx: Iris, stream: int) -> torch.Generator:
    """A CPU generator of numbers that differ from run to run and from ``stream`` to ``stream``, but not between ranks.

    Collective when first called: the ranks agree on a seed.
    """
    seed = ctx.workspace("random seed", lambda: ctx.broadcast(secrets.randbelow(1 << 32), 0))
    return torch.Generator().manual_seed((int(seed) + stream * _SEED_STEP) % (1 << 32))


def normal_draws(ctx: Iris, dtype: torch.dtype) -> Callable[[int, int, float], torch.Tensor]:
    """A function of rows, columns and standard deviation that draws a new matrix on this rank's device at each call,
    the same on all ranks: in float32, then rounded to ``dtype``. Collective."""
    generator = torch.Generator(ctx.device).manual_seed(int(ctx.broadcast(torch.seed() % (1 << 31), 0)))

    def drawn(rows: int, cols: int, scale: float) -> torch.Tensor:
        whole = torch.randn(rows, cols, device=ctx.device, dtype=torch.float32, generator=generator)
        return (whole * scale).to(dtype)

    return drawn


def random_bits(ctx: Iris, stream: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """``count`` elements of random bits on this rank's device, the same on all ranks: see :func:`shared_generator`."""
    words = -(-count * dtype.itemsize // 8)
    bits = torch.randint(-(1 << 63), (1 << 63) - 1, (words,), generator=shared_generator(ctx, stream))
    return bits.view(dtype)[:count].to(ctx.device)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits, NaNs included."""
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def require(ctx: Iris, correct: bool, what: str) -> None:
    """Raise the same error on every rank unless all ranks found their result correct. Collective.

    Raises:
        IrisError: ``what``, and the ranks where it is wrong.
    """
    wrong = [rank for rank, right in enumerate(of_all(ctx, correct)) if not right]
    if wrong:
        raise IrisError(f"{what}: wrong result on {ranks_text(wrong)} of {ctx.world_size}")
