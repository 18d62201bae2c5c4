"""Products of fp8 matrices by the library, as far as ``torch._scaled_mm`` takes them."""

from __future__ import annotations

import torch

from iris.ops.copies import has_aligned_rows
from iris.ops.scales import BLOCK, Scales
from iris.ops.workspace import FusedWorkspace

_NBYTES = 16
"""The library's operands, and scales of blocks, begin at multiples of this many bytes."""
_ELEMENTS = 16
"""All sizes of operands except the number of rows are multiples of this."""
_ALIGNED_SCALES = 4
"""The numbers of scales of blocks in a column of A's, and in a column of B's, are multiples of this."""


def library_takes(
    output: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, scales: Scales
) -> bool:
    """Whether the library multiplies these: fp8 with scales of blocks, or with at most one scale for each matrix (its
    kernels for scales of rows and columns are slower); B must be transposed, and all must be aligned."""
    if a.dtype != torch.float8_e4m3fn or torch.version.hip is not None:
        return False
    if not all(has_aligned_rows(one) and one.shape[1] % _ELEMENTS == 0 for one in (output, a, b.t())):
        return False
    if scales.of_blocks:
        return bias is None and _takes_blocks(output, a, scales)
    if any(scale is not None and scale.numel() != 1 for scale in (scales.a, scales.b)):
        return False
    if bias is not None and (bias.dim() != 1 or output.dtype == torch.float32 or bias.data_ptr() % _NBYTES):
        return False
    return output.device.type != "cpu" or output.is_contiguous()  # on CPUs PyTorch 2.13 ignores output's strides


def scaled_mm(
    workspace: FusedWorkspace,
    output: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    scales: Scales,
) -> None:
    """``output = a @ b * scales + bias``. Sums are as precise as in Iris's kernel: for a 16-bit output tensor cores
    accumulate them; for a float32 output, and with scales of blocks, they are accumulated in float32."""
    if scales.of_blocks:
        _scaled_by_block(workspace, output, a, b, scales)
        return
    scale_a, scale_b = (workspace.one if scale is None else scale for scale in (scales.a, scales.b))
    fast = output.dtype != torch.float32
    torch._scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=output.dtype, use_fast_accum=fast, out=output)


def _takes_blocks(output: torch.Tensor, a: torch.Tensor, scales: Scales) -> bool:
    """Whether the library takes these scales of blocks; cuBLAS has kernels for Hopper, from CUDA 12.9 on. The
    conditions are those found on H200."""
    if output.device.type == "cpu" or torch.cuda.get_device_capability(output.device)[0] != 9 or scales.b is None:
        return False
    if tuple(map(int, (torch.version.cuda or "0").split("."))) < (12, 9) or scales.b.data_ptr() % _NBYTES:
        return False
    (deep, _), (rows, cols), k = scales.b.shape, output.shape, a.shape[1]
    laid_out = scales.b.stride() == (1, deep) and not (deep % _ALIGNED_SCALES or rows % _ALIGNED_SCALES)
    return laid_out and not (k % BLOCK or cols % BLOCK) and output.dtype == torch.bfloat16


def _scaled_by_block(
    workspace: FusedWorkspace, output: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scales: Scales
) -> None:
    from torch.nn.functional import ScalingType

    scale_a, scale_b = scales.a, scales.b
    assert scale_a is not None and scale_b is not None
    rows, deep = scale_a.shape
    if scale_a.stride() != (1, rows) or scale_a.data_ptr() % _NBYTES:  # else they have the library's layout
        scale_a = workspace.scratch_matrix("scales by columns", deep, rows, torch.float32).t().copy_(scale_a)
    of_rows, of_squares = ScalingType.BlockWise1x128.value, ScalingType.BlockWise128x128.value
    torch._scaled_mm_v2(a, b, [scale_a], [of_rows], [], [scale_b], [of_squares], [], None, output.dtype, out=output)
