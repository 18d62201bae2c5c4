"""What makes of products of 8-bit matrices the numbers that they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from iris.device import tile
from iris.errors import ShapeError
from iris.ops.rows import Rows


@dataclass(frozen=True)
class Scales:
    """Of one rank's matmul: ``a``, one float32 for all of A, or one for each row; ``b``, one for all of B, or one for
    each column; both in one dimension. None: 1."""

    a: torch.Tensor | None = None
    b: torch.Tensor | None = None

    def of(self, rows: Rows) -> Scales:
        """Those of some rows of A."""
        return self if self.a is None or self.a.numel() == 1 else Scales(rows.of(self.a), self.b)

    @property
    def for_kernel(self) -> tile.Scales:
        """As the matmul kernel takes them."""
        return tile.Scales(self.a, _stride(self.a), self.b, _stride(self.b))


NO_SCALES = Scales()


def numbers_of(op: str, argument: str, scale: torch.Tensor, shape: tuple[int, int], one: str) -> torch.Tensor:
    """``scale`` in one dimension.

    Raises:
        ShapeError: it is neither one number, nor of this ``shape``, nor, in one dimension, one number for each ``one``.
    """
    if scale.numel() != 1 and tuple(scale.shape) not in ((max(shape),), shape):
        expected = f"one number, or one for each {one}: [{max(shape)}] or {list(shape)}"
        raise ShapeError(op, argument, expected, tuple(scale.shape))
    return scale.view(-1)


def _stride(numbers: torch.Tensor | None) -> int:
    return 0 if numbers is None or numbers.numel() == 1 else 1
