"""What a call of an op computes, and what it costs at least. Pure: no GPU, no context."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from iris.ops.algorithms import ALL_REDUCE, GATHER, REDUCE_SCATTER, SCATTER

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
QUANTISED = (torch.int8, torch.float8_e4m3fn)
"""Input dtypes of 8 bits, whose products may be scaled."""
DTYPES = (*FLOATS, *QUANTISED)
"""Input dtypes that every op takes."""
TRANSPOSED_FROM_ROWS = 128
"""From so many rows of A on, a row-major B of 8 bits is transposed first (H200, 2026-12-01)."""
MAX_EXTENT = 1 << 30
"""Kernels count rows and columns in 32 bits, and add up to twice as many."""


def output_dtypes(dtype: torch.dtype, *, scaled: bool = False) -> tuple[torch.dtype, ...]:
    """The possible dtypes of a product of ``dtype`` matrices, the default first: for 16 and 32 bits the same dtype, for
    int8 int32, and for fp8, or ``scaled`` int8, any float."""
    if dtype == torch.int8 and not scaled:
        return (torch.int32,)
    return (torch.bfloat16, torch.float16, torch.float32) if dtype in QUANTISED else (dtype,)


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """The default one of :func:`output_dtypes`."""
    return output_dtypes(dtype)[0]


@dataclass(frozen=True)
class Problem:
    """One call of an op, described by its sizes on one rank.

    Attributes:
        op: the op's name.
        m, n, k: the local matmul, A[m, k] @ B[k, n]: for a gather of rows, ``m`` counts all ranks' rows.
        dtype: of A and B.
        world_size: the number of ranks.
        gather_dim: for a gather of A, the dimension in which A is sharded; None for the other ops.
        transposed_b: whether the rows of B are not contiguous, as in the ``weight.t()`` of a ``torch.nn.Linear``.
        asked: the dtype of the output where there is a choice (:func:`output_dtypes`); None: the default.
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
        if self.asked == output_dtype(self.dtype):  # the same problem as without it
            object.__setattr__(self, "asked", None)

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype of the product."""
        return self.asked or output_dtype(self.dtype)

    @property
    def exchanged_dtype(self) -> torch.dtype:
        """The dtype of the elements that an exchange (:mod:`iris.ops.exchange`) moves: A's for a gather, else the
        product's. If A has 8 bits and the length of its rows allows it, four neighbours in a row are moved as one
        element of 32 bits, because moving an element takes as long with 8 bits as with 32. For fp8 this is float32, not
        int32, because words that carry floats are shorter."""
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
        """Bytes that must reach this rank from its peers; 0 for a user-written op, for which this is unknown."""
        world, product = self.world_size, self.m * self.n
        item, out_item = self.dtype.itemsize, self.output_dtype.itemsize
        if self.op == GATHER:
            return self.m * self.k * (world - 1) // world * item
        if self.op == SCATTER:
            return product * (world - 1) * out_item
        once = (product - product // world) * out_item  # the peers' parts of this rank's sum, or the peers' sums
        return {REDUCE_SCATTER: once, ALL_REDUCE: 2 * once}.get(self.op, 0)

    @property
    def wants_transposed_b(self) -> bool:
        """Whether B is worth a copy with contiguous columns, if tensor cores take it only so: with 8 bits, and enough
        rows of A."""
        return self.dtype in QUANTISED and not self.transposed_b and self.m >= TRANSPOSED_FROM_ROWS

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's B."""
        return self.k * self.n * self.dtype.itemsize

    @property
    def hbm_bytes(self) -> int:
        """Bytes that this rank's memory must read or write: each input is read once, the output written once."""
        item, out_item = self.dtype.itemsize, self.output_dtype.itemsize
        return self.m * self.k * item + self.weight_bytes + self.m * self.n * out_item
