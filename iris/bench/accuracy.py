"""The error of a product of random matrices, and the error that a correct product may have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

_ROWS_AT_A_TIME = 1024
_MOST = 10
"""A correct element is off by at most this many standard deviations plus half a unit in its last place."""


class Accuracy(NamedTuple):
    """``error``: relative, in the Frobenius norm, infinite if there is a NaN or an infinity; ``allowed``: the most that
    it may be; ``wrong``: how many of ``total`` elements are further off than rounding explains."""

    error: float
    allowed: float
    wrong: int
    total: int

    @property
    def right(self) -> bool:
        return not self.wrong and self.error <= self.allowed

    def record(self) -> dict[str, float | bool | None]:
        """The fields of a JSON record; JSON has no infinity, so that ``error`` becomes None."""
        error = self.error if math.isfinite(self.error) else None
        return {"error": error, "tolerance": self.allowed, "wrong_elements": self.wrong, "success": self.right}

    def __str__(self) -> str:
        off = f", {self.wrong} of {self.total} elements too far off" if self.wrong else ""
        return f"relative error {self.error:.2e}, at most {self.allowed:.2e}{off}"


def accuracy(
    output: torch.Tensor, reference: torch.Tensor, k: int, roundings: float, dtype: torch.dtype | None = None
) -> Accuracy:
    """Compare ``output`` with ``reference``, of the same shape. Its elements are sums of ``k`` products of numbers of
    ``dtype`` (None: of output's own). Integers must be equal.

    ``roundings``: how many times a value as large as the result is rounded to output's dtype, the result itself
    included; rounding a smaller value counts as the square of its share of the result. The root mean square error of
    one rounding is at most eps / √12, eps being the distance from 1 to the dtype's next number. Errors of several
    roundings add up as in a random walk; what sums in float32 lose is added to them.
    """
    unit, lost = 0.0, 0.0
    if output.is_floating_point():
        unit, lost = torch.finfo(output.dtype).eps, lost_in_sums(dtype or output.dtype, k)
    typical = math.sqrt(sum(float(reference[rows].double().square().sum()) for rows in row_blocks(reference)))
    typical /= math.sqrt(reference.numel())
    deviation = unit * math.sqrt(roundings / 12) + lost
    off, wrong = 0.0, 0
    for rows in row_blocks(reference):
        right = reference[rows].double()
        distance = (output[rows].double() - right).abs()
        wrong += int((~(distance <= unit / 2 * right.abs() + _MOST * deviation * typical)).sum())  # NaN, too, is wrong
        off += float(distance.square().sum())
    error = math.sqrt(off / reference.numel()) / max(typical, 1e-300) if math.isfinite(off) else math.inf
    return Accuracy(error, deviation * (1.25 + 4 / math.sqrt(reference.numel())), wrong, reference.numel())


def worst(found: Iterable[Accuracy]) -> Accuracy:
    """One verdict on all of ``found``: the largest errors, and the sums of the counts."""
    errors, allowed, wrong, totals = zip(*found, strict=True)
    return Accuracy(max(errors), max(allowed), sum(wrong), sum(totals))


def row_blocks(matrix: torch.Tensor) -> Iterator[slice]:
    """Slices of a few rows each, so that float64 copies stay small."""
    return (slice(first, first + _ROWS_AT_A_TIME) for first in range(0, matrix.shape[0], _ROWS_AT_A_TIME))


def lost_in_sums(dtype: torch.dtype, k: int) -> float:
    """The relative error that a sum of ``k`` products of ``dtype`` may have: that of float32, and for fp8, which Hopper
    sums in some 14 bits, twice what was measured on H200 (docs/performance-matmul.md)."""
    lost = math.sqrt(k) * torch.finfo(torch.float32).eps
    return lost + (math.sqrt(k / 32) * 2**-12 if dtype == torch.float8_e4m3fn else 0.0)


def roundings_of_sum(ranks: int) -> float:
    """The ``roundings`` (see :func:`accuracy`) of a sum that passes from rank to rank and is rounded on each; no other
    order of summation has more."""
    return (ranks + 1) / 2
