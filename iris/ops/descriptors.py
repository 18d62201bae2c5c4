"""Descriptors of the operands, by which the matmul kernel loads blocks through the tensor memory accelerator (TMA)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from iris.ops.config import FusedConfig
from iris.ops.copies import has_aligned_rows


class Descriptors(NamedTuple):
    """A descriptor of each matrix; None: the kernel reads it by pointers, or not at all.

    Attributes:
        own, whole: this rank's part of A, and all of A.
        b, bt: B, or if TMA cannot read B, its transpose.
        b_strip, bt_strip: the same in blocks as narrow as the strips of a split tile.
    """

    own: Any = None
    whole: Any = None
    b: Any = None
    bt: Any = None
    b_strip: Any = None
    bt_strip: Any = None


def descriptors_of(
    own: torch.Tensor | None,
    whole: torch.Tensor | None,
    b: torch.Tensor,
    config: FusedConfig,
    strips: int,
    between: bool,
) -> Descriptors:
    """Descriptors of the operands in blocks of ``config``; ``own``, ``whole``: None if the kernel does not read them.
    ``between``: blocks of columns of ``whole`` and of B's transpose do not all begin at multiples of 16 bytes."""
    m, n, k = config.block_size_m, config.block_size_n, config.block_size_k
    own_desc = None if own is None else describe(own, [m, k])
    whole_desc = None
    if whole is not None and not between:
        whole_desc = own_desc if whole is own else describe(whole, [m, k])
    b_strips = _of_b(b, n // strips, k, between) if strips > 1 else (None, None)
    return Descriptors(own_desc, whole_desc, *_of_b(b, n, k, between), *b_strips)


def _of_b(b: torch.Tensor, n: int, k: int, between: bool) -> tuple[Any, Any]:
    """A descriptor of B, or, if TMA cannot read B, one of its transpose."""
    desc = describe(b, [k, n])
    return desc, describe(b.T, [n, k]) if desc is None and not between else None


def describe(matrix: torch.Tensor, block: list[int]) -> Any:
    """A descriptor, or None if TMA cannot read the matrix."""
    if not has_aligned_rows(matrix):
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, block)
