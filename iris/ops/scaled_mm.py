"""Products of fp8 by PyTorch's library, which takes some of them, as ``torch._scaled_mm``."""

from __future__ import annotations

import torch

from iris.ops.scales import Scales
from iris.ops.workspace import FusedWorkspace

_ALIGNED = 16
"""Of its operands: bytes, and elements of each size but the number of rows."""


def library_takes(
    output: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, scales: Scales
) -> bool:
    """Whether the library multiplies these: fp8 with at most one scale for each matrix, as for each row and column it
    has slower kernels; B transposed, and all of them aligned."""
    if a.dtype != torch.float8_e4m3fn or torch.version.hip is not None:
        return False
    if scales.of_blocks or any(scale is not None and scale.numel() != 1 for scale in (scales.a, scales.b)):
        return False
    if bias is not None and (bias.dim() != 1 or output.dtype == torch.float32 or bias.data_ptr() % _ALIGNED):
        return False
    if output.device.type == "cpu" and not output.is_contiguous():  # PyTorch 2.13 fills it as if it were
        return False
    return all(map(_has_aligned_rows, (output, a, b.t())))


def scaled_mm(
    workspace: FusedWorkspace,
    output: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    scales: Scales,
) -> None:
    """``output = a @ b * scales + bias``. Sums are kept as Iris's kernel keeps them: for an output of 16 bits as tensor
    cores do, else added up in float32."""
    scale_a, scale_b = (workspace.one if scale is None else scale for scale in (scales.a, scales.b))
    fast = output.dtype != torch.float32
    torch._scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=output.dtype, use_fast_accum=fast, out=output)


def _has_aligned_rows(matrix: torch.Tensor) -> bool:
    cols, pitch = matrix.shape[1], matrix.stride(0)
    if matrix.stride(1) != 1 or pitch < cols:
        return False
    return not (cols % _ALIGNED or pitch * matrix.element_size() % _ALIGNED or matrix.data_ptr() % _ALIGNED)
