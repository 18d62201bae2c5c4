"""Copies of matrices with contiguous rows, or columns, for the matmul kernel, the library or the copy engine to read.

A transposition tile by tile takes a small part of the time of the matmul after it: on H200, 2026-11-21, 0.022 ms for
4096×4096 in bf16. The copy that ``Tensor.contiguous`` makes takes 0.119 ms, and a matmul kernel that loads tiles of a
transposed A by pointers takes three times as long as one that loads rows by TMA.

A row-major B of 8 bits is transposed because most tensor cores take no other: a program that does it with each tile
that it loads needs five times as long for 1024 rows and more (docs/performance-matmul.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from iris.context import Iris
from iris.device.tile import Matrix, block_at, tile_pointers
from iris.ops.operands import has_contiguous_rows
from iris.ops.problem import Problem
from iris.ops.target import takes_columns_only
from iris.ops.workspace import FusedWorkspace

_LARGEST_BLOCK, _BLOCK_NBYTES, _PROGRAMS_PER_SM = 128, 256, 16
"""Squares have rows of so many elements, and bytes, at most (H200, 2026-12-01)."""
_ALIGNMENT = 16
"""Rows begin at multiples of this many bytes, as TMA requires."""


@triton.jit
def copy_kernel(source, target, rows, cols, epochs, half_rows, BLOCK: tl.constexpr):
    """Copy ``source`` into ``target``, square by square. ``epochs``: of the call that has filled ``source``, which has
    two halves, used in turn, of ``half_rows`` each; None: there is one."""
    top = 0 if epochs is None else (tl.load(epochs) & 1) * half_rows
    across = tl.cdiv(cols, BLOCK)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK) * across, tl.num_programs(0)):
        r, c, row_mask, col_mask = block_at(block, 0, rows, cols, BLOCK, BLOCK)
        mask = row_mask[:, None] & col_mask[None, :]
        value = tl.load(tile_pointers(source, source.ptr, top + r, c), mask=mask)
        tl.store(tile_pointers(target, target.ptr, r, c), value, mask=mask)


def row_major(workspace: FusedWorkspace, matrix: torch.Tensor) -> torch.Tensor:
    """``matrix``, or, if its rows are not contiguous or overlap, a copy in memory that ``workspace`` keeps.

    Sync: on the current stream. The next copy in the same workspace may reuse the memory.
    """
    rows, cols = matrix.shape
    if has_contiguous_rows(matrix) and (matrix.stride(0) >= cols or rows == 1):
        return matrix
    return _copy(workspace, matrix, "rows")


def column_major(workspace: FusedWorkspace, problem: Problem, b: torch.Tensor) -> torch.Tensor:
    """``b``, or, if it has 8 bits and the tensor cores would need it transposed for many rows of A, a copy with
    contiguous columns. Ops call this once, before they cut A; the launch of a kernel calls it for all others.

    Sync: on the current stream. The next copy for a call on the same stream may reuse the memory.
    """
    if not problem.wants_transposed_b or has_contiguous_rows(b.t()) or not takes_columns_only(workspace.ctx):
        return b
    return _copy(workspace.alone, b.t(), "columns").t()


def has_aligned_rows(matrix: torch.Tensor) -> bool:
    """Whether TMA, or the library in 8 bits, can read ``matrix``: the stride between columns is 1, and rows begin at
    multiples of 16 bytes and do not overlap, as those of an expanded tensor do."""
    row = matrix.stride(0)
    if matrix.stride(1) != 1 or row < matrix.shape[1]:
        return False
    return not (matrix.data_ptr() % _ALIGNMENT or row * matrix.element_size() % _ALIGNMENT)


def aligned(workspace: FusedWorkspace, matrix: torch.Tensor, nbytes: int) -> torch.Tensor:
    """As :func:`row_major`, but rows also begin at multiples of ``nbytes``, 16 at most, so that the matrix can be
    viewed as elements of ``nbytes`` each."""
    matrix = row_major(workspace, matrix)
    item = matrix.element_size()
    # For such a view PyTorch wants aligned offsets in the storage, too; the storage may begin at any address.
    begins = (matrix.data_ptr(), matrix.storage_offset() * item, matrix.stride(0) * item)
    if all(begin % nbytes == 0 for begin in begins) and matrix.stride(1) == 1:
        return matrix
    return _copy(workspace, matrix, "rows")


def _copy(workspace: FusedWorkspace, matrix: torch.Tensor, name: str) -> torch.Tensor:
    """A copy whose rows are contiguous, and begin at multiples of 16 bytes, in memory that is kept under ``name``."""
    rows, cols = matrix.shape
    vector = _ALIGNMENT // matrix.element_size()
    pitch = -(-cols // vector) * vector
    copy = workspace.scratch_matrix(name, rows, pitch, matrix.dtype)[:, :cols]
    copy_to(workspace.ctx, matrix, copy)
    return copy


def copy_to(
    ctx: Iris, source: torch.Tensor, target: torch.Tensor, epochs: torch.Tensor | None = None, half_rows: int = 0
) -> None:
    """Copy a matrix of the size of ``target``, on the current stream; both may have any strides. ``epochs``,
    ``half_rows``: see :func:`copy_kernel`."""
    rows, cols = target.shape
    block = min(_LARGEST_BLOCK, _BLOCK_NBYTES // target.element_size())
    programs = min(-(-rows // block) * -(-cols // block), _PROGRAMS_PER_SM * ctx.num_sms)
    copy_kernel[(programs,)](
        Matrix(source, *source.stride()), Matrix(target, *target.stride()), rows, cols, epochs, half_rows,
        BLOCK=block, num_warps=4,
    )  # fmt: skip
