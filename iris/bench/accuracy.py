"""How far a product of random matrices is off, and how far a right one may be."""

from __future__ import annotations

import math

import torch


def tolerance(dtype: torch.dtype, k: int, roundings: int = 1) -> float:
    """Relative error (Frobenius) that a right result may have: ``roundings`` of half an ulp each to ``dtype``, and
    float32 sums of ``k`` products, whose errors grow as in a random walk. int8 sums are exact."""
    if not dtype.is_floating_point:
        return 0.0
    return float(roundings * torch.finfo(dtype).eps / 2 + lost_in_sums(dtype, k))


def lost_in_sums(dtype: torch.dtype, k: int) -> float:
    """What sums of ``k`` products of ``dtype`` may be off by, beside such a sum: in float32, and those of fp8 on Hopper
    in some 14 bits by twice what they are on H200 (docs/performance.md)."""
    lost = math.sqrt(k) * torch.finfo(torch.float32).eps
    return lost + (math.sqrt(k / 32) * 2**-12 if dtype == torch.float8_e4m3fn else 0.0)


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """In the Frobenius norm; infinite if ``output`` holds a NaN or an infinity."""
    error = float((output.double() - reference).norm() / reference.norm().clamp(min=1e-300))
    return error if math.isfinite(error) else math.inf
