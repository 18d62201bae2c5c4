"""Scales: the factors that turn products of 8-bit matrices into the numbers that these stand for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from iris.device import tile
from iris.errors import DTypeError, ShapeError
from iris.ops.config import OF_TILE, FusedConfig
from iris.ops.rows import Rows

BLOCK: int = tile.SCALE_BLOCK.value
_TILE_OF_BLOCKS = FusedConfig("local", block_size_m=64, block_size_n=128, block_size_k=BLOCK, num_warps=4, num_stages=4)
"""The fastest of eight tiles, with more than 64 rows; larger tiles take 1.2 to 2.4 times as long (H200, 2026-11-27)."""


@dataclass(frozen=True)
class Scales:
    """The scales of one rank's matmul, in float32. ``a``: one for all of A, or one for each row; ``b``: one for all of
    B, or one for each column; both are one-dimensional, and None means 1. Scales of blocks are two-dimensional, of any
    strides: ``a`` is [M, K / 128] and ``b`` [K / 128, N / 128], rounded up."""

    a: torch.Tensor | None = None
    b: torch.Tensor | None = None

    @property
    def of_blocks(self) -> bool:
        return self.a is not None and self.a.dim() == 2

    def of(self, rows: Rows) -> Scales:
        """The scales for some rows of A."""
        if self.a is None or (self.a.numel() == 1 and not self.of_blocks):
            return self
        return Scales(rows.of(self.a), self.b)

    def fitting(self, config: FusedConfig, *, picked: bool) -> FusedConfig:
        """``config`` for scales of blocks, if these are such: with blocks of K that have one scale each, and if it was
        ``picked`` for an NVIDIA GPU, with a tile so small that its product and its sum both fit into registers."""
        if not self.of_blocks:
            return config
        if picked and config.tile_elements > _TILE_OF_BLOCKS.tile_elements:
            return replace(config, **{name: getattr(_TILE_OF_BLOCKS, name) for name in OF_TILE})
        return replace(config, block_size_k=min(config.block_size_k, BLOCK))

    @property
    def for_kernel(self) -> tile.ScalePointers:
        """The scales in the form that the matmul kernel takes."""
        if self.of_blocks and self.a is not None and self.b is not None:
            (down, across), (along, beside) = self.a.stride(), self.b.stride()
            return tile.ScalePointers(None, 0, None, 0, self.a, down, across, self.b, along, beside)
        return tile.ScalePointers(self.a, _stride(self.a), self.b, _stride(self.b))


NO_SCALES = Scales()


def shapes_of_blocks(m: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of the scales of blocks, ``a`` and ``b``, for a product [m, k] @ [k, n]."""
    deep, across = -(-k // BLOCK), -(-n // BLOCK)
    return (m, deep), (deep, across)


def scales_of(
    op: str, a: tuple[str, torch.Tensor], b: torch.Tensor, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None
) -> Scales:
    """The scales of a product of ``a``, given with its name, and ``b``, which has all rows of B.

    Raises:
        ShapeError: a scale is neither one number, nor one for each row or column, nor one for each block; or the blocks
            of one matrix have scales, but those of the other do not.
        DTypeError: blocks have scales, but the matrices are not fp8.
    """
    (name, matrix), (k, n) = a, b.shape
    m = matrix.shape[0]
    of_a, of_b = shapes_of_blocks(m, n, k)
    takes_blocks = matrix.dtype == torch.float8_e4m3fn
    a_has = scale_a is not None and tuple(scale_a.shape) == of_a != (m, 1)
    b_has = scale_b is not None and tuple(scale_b.shape) == of_b and of_b not in ((1, n), (1, 1))
    if not a_has and not b_has:
        blocks = (of_a, of_b) if takes_blocks else (None, None)
        return Scales(
            None if scale_a is None else _numbers_of(op, "scale_a", scale_a, (m, 1), f"row of {name}", blocks[0]),
            None if scale_b is None else _numbers_of(op, "scale_b", scale_b, (1, n), "column of B", blocks[1]),
        )
    if not takes_blocks:
        raise DTypeError(op, name, "torch.float8_e4m3fn, as blocks have scales", matrix.dtype)
    for argument, scale, shape in (("scale_a", scale_a, of_a), ("scale_b", scale_b, of_b)):
        if scale is None or tuple(scale.shape) != shape:
            expected = f"{list(shape)}, as the other matrix has a scale for each block of {BLOCK}"
            got = "None" if scale is None else tuple(scale.shape)
            raise ShapeError(op, argument, expected, got, _turned(argument, scale, shape))
    return Scales(scale_a, scale_b)


def _numbers_of(
    op: str, argument: str, scale: torch.Tensor, shape: tuple[int, int], one: str, of_blocks: tuple[int, int] | None
) -> torch.Tensor:
    """``scale`` in one dimension; ``of_blocks``: the shape of scales of blocks; None: blocks may have none."""
    if scale.numel() != 1 and tuple(scale.shape) not in ((max(shape),), shape):
        expected = f"one number, or one for each {one}: [{max(shape)}] or {list(shape)}"
        if of_blocks is not None:
            expected += f", or block: {list(of_blocks)}"
        raise ShapeError(op, argument, expected, tuple(scale.shape), _turned(argument, scale, shape, of_blocks))
    if tuple(scale.shape) != of_blocks:  # a single row or column of blocks: scales of blocks may have any strides
        check_contiguous(op, argument, scale)
    return scale.view(-1)


def _turned(argument: str, scale: torch.Tensor | None, *shapes: tuple[int, int] | None) -> str:
    """What to do, if the transpose of ``scale`` has one of the ``shapes``; else empty text."""
    return f"Pass {argument}.t()." if scale is not None and tuple(scale.shape)[::-1] in shapes else ""


def check_contiguous(op: str, argument: str, given: torch.Tensor) -> None:
    """Raise ShapeError unless ``given`` is contiguous."""
    if not given.is_contiguous():
        fix = f"Pass {argument}.contiguous()."
        raise ShapeError(op, argument, "a contiguous tensor", f"strides {given.stride()}", fix)


def _stride(numbers: torch.Tensor | None) -> int:
    return 0 if numbers is None or numbers.numel() == 1 else numbers.stride(0)
