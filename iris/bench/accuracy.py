"""How far a product of random matrices is off, and how far a right one may be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

_ROWS_AT_A_TIME = 1024
_MOST = 10
"""Standard deviations that no element is off by, beside half a unit in its last place."""


class Accuracy(NamedTuple):
    """``error``: relative, in the Frobenius norm, infinite if there is a NaN or an infinity; ``allowed``: what it may
    be; ``wrong``: elements, of ``total``, that are further off than rounding takes them."""

    error: float
    allowed: float
    wrong: int
    total: int

    @property
    def right(self) -> bool:
        return not self.wrong and self.error <= self.allowed

    def record(self) -> dict[str, float | bool | None]:
        """For JSON, which has no infinity."""
        error = self.error if math.isfinite(self.error) else None
        return {"error": error, "tolerance": self.allowed, "wrong_elements": self.wrong, "success": self.right}

    def __str__(self) -> str:
        off = f", {self.wrong} of {self.total} elements too far off" if self.wrong else ""
        return f"relative error {self.error:.2e}, at most {self.allowed:.2e}{off}"


def accuracy(
    output: torch.Tensor, reference: torch.Tensor, k: int, roundings: float, dtype: torch.dtype | None = None
) -> Accuracy:
    """That of ``output``, sums of ``k`` products of numbers of ``dtype`` (None: of output's own), beside ``reference``,
    which has its shape. Integers must be equal.

    ``roundings``: how often values as large as the result are rounded to output's dtype on the way to it, and with it;
    of parts, the squares of what they are of it count. One is off by no more than eps / √12 in the mean, eps being what
    numbers of the dtype differ by at least. Together, and with what float32 loses in sums, they go as in a random walk.
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
    """What is told of all of them."""
    errors, allowed, wrong, totals = zip(*found, strict=True)
    return Accuracy(max(errors), max(allowed), sum(wrong), sum(totals))


def row_blocks(matrix: torch.Tensor) -> Iterator[slice]:
    """A few rows at a time, so that float64 copies stay small."""
    return (slice(first, first + _ROWS_AT_A_TIME) for first in range(0, matrix.shape[0], _ROWS_AT_A_TIME))


def lost_in_sums(dtype: torch.dtype, k: int) -> float:
    """What sums of ``k`` products of ``dtype`` may be off by, beside such a sum: in float32, and those of fp8 on Hopper
    in some 14 bits by twice what they are on H200 (docs/performance-matmul.md)."""
    lost = math.sqrt(k) * torch.finfo(torch.float32).eps
    return lost + (math.sqrt(k / 32) * 2**-12 if dtype == torch.float8_e4m3fn else 0.0)


def roundings_of_sum(ranks: int) -> float:
    """Those of a sum over ``ranks`` that is passed on from rank to rank, rounded each time, the worst way there is."""
    return (ranks + 1) / 2
