"""What an op is asked to compute, and what that costs at least. Pure: no GPU, no context."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from iris.ops.algorithms import ALL_REDUCE, GATHER, REDUCE_SCATTER, SCATTER

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
QUANTISED = (torch.int8, torch.float8_e4m3fn)
"""Input dtypes of 8 bits, whose products may be scaled."""
DTYPES = (*FLOATS, *QUANTISED)
"""Input dtypes that every op takes."""


def output_dtypes(dtype: torch.dtype, *, scaled: bool = False) -> tuple[torch.dtype, ...]:
    """What a product of ``dtype`` matrices may be kept in, the usual one first: 16 and 32 bits give themselves, int8
    gives int32, and fp8, or int8 that is ``scaled``, any float."""
    if dtype == torch.int8 and not scaled:
        return (torch.int32,)
    return (torch.bfloat16, torch.float16, torch.float32) if dtype in QUANTISED else (dtype,)


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """The usual one of :func:`output_dtypes`."""
    return output_dtypes(dtype)[0]


@dataclass(frozen=True)
class Problem:
    """One call of an op, by its sizes on one rank.

    Attributes:
        op: the op's name.
        m, n, k: the local matmul, A[m, k] @ B[k, n]: for a gather of rows, ``m`` counts all ranks' rows.
        dtype: of A and B.
        world_size: the number of ranks.
        gather_dim: for a gather of A, the dimension in which A is sharded; None for the other ops.
        transposed_b: whether the rows of B are not contiguous, as in the ``weight.t()`` of a ``torch.nn.Linear``.
        asked: the dtype of the output where there is a choice (:func:`output_dtypes`); None: the usual one.
    """

    op: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    world_size: int
    gather_dim: int | None = None
    transposed_b: bool = False
    asked: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.asked == output_dtype(self.dtype):  # as if it had not been told: the problem is the same
            object.__setattr__(self, "asked", None)

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype of the product."""
        return self.asked or output_dtype(self.dtype)

    @property
    def exchanged_dtype(self) -> torch.dtype:
        """What an exchange (:mod:`iris.ops.exchange`) moves elements of: of A for a gather, else of the product. Four
        neighbours in a row of A of 8 bits are moved as one element of 32 bits, if rows can be cut so: one by one they
        take as long as so many of 32. The floats among them stay floats, as words of these are shorter."""
        if self.op != GATHER:
            return self.output_dtype
        cols = self.k // self.world_size if self.gather_dim == 1 else self.k
        if self.dtype not in QUANTISED or cols % 4:
            return self.dtype
        return torch.float32 if self.dtype.is_floating_point else torch.int32

    @property
    def flops(self) -> int:
        """Floating-point (or integer) operations on this rank."""
        return 2 * self.m * self.n * self.k

    @property
    def received_bytes(self) -> int:
        """Bytes that must reach this rank from its peers; 0 for an op of your own, of which nobody knows."""
        world, product = self.world_size, self.m * self.n
        item, out_item = self.dtype.itemsize, self.output_dtype.itemsize
        if self.op == GATHER:
            return self.m * self.k * (world - 1) // world * item
        if self.op == SCATTER:
            return product * (world - 1) * out_item
        once = (product - product // world) * out_item  # each rank's part of the sum, or those of all
        return {REDUCE_SCATTER: once, ALL_REDUCE: 2 * once}.get(self.op, 0)

    @property
    def hbm_bytes(self) -> int:
        """Bytes that must pass this rank's memory: each input read once, the output written once."""
        item, out_item = self.dtype.itemsize, self.output_dtype.itemsize
        return (self.m * self.k + self.k * self.n) * item + self.m * self.n * out_item
