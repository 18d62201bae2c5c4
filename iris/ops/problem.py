"""What an op is asked to compute, and what that costs at least. Pure: no GPU, no context."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8)
"""Input dtypes that every op takes."""


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a product of ``dtype`` matrices: int8 gives int32, all others themselves."""
    return torch.int32 if dtype == torch.int8 else dtype


@dataclass(frozen=True)
class Problem:
    """One call of an op, by its sizes on one rank.

    Attributes:
        op: the op's name.
        m, n, k: the local matmul, A[m, k] @ B[k, n]: for a gather of rows, ``m`` counts all ranks' rows.
        dtype: of A and B.
        world_size: the number of ranks.
        received_bytes: bytes that must reach this rank from its peers.
        gather_dim: for a gather of A, the dimension in which A is sharded; None for the other ops.
        transposed_b: whether the rows of B are not contiguous, as in the ``weight.t()`` of a ``torch.nn.Linear``.
    """

    op: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    world_size: int
    received_bytes: int = field(repr=False)  # follows from the others
    gather_dim: int | None = None
    transposed_b: bool = False

    @property
    def flops(self) -> int:
        """Floating-point (or integer) operations on this rank."""
        return 2 * self.m * self.n * self.k

    @property
    def hbm_bytes(self) -> int:
        """Bytes that must pass this rank's memory: each input read once, the output written once."""
        item, out_item = self.dtype.itemsize, output_dtype(self.dtype).itemsize
        return (self.m * self.k + self.k * self.n) * item + self.m * self.n * out_item
