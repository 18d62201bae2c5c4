"""Random matrices for a fused op, the result that it should give, and the error of the result that it gives.

Numbers are drawn anew in every run, from one seed that the ranks agree on. So a rank can also draw those of any other
rank, and compute the right result without communication.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from typing import Any

import torch

from iris import ops
from iris.bench.accuracy import Accuracy, accuracy, roundings_of_sum, row_blocks
from iris.bench.distributed import multiply
from iris.context import MAX_RANKS, Iris
from iris.ops import FusedConfig, Problem
from iris.ops.algorithms import ALL_REDUCE, GATHER, LOCAL, REDUCE_SCATTER, SCATTER
from iris.ops.problem import output_dtype

ROW_MAJOR, TRANSPOSED = B_LAYOUTS = "row_major", "transposed"
CUT = {GATHER: "n", SCATTER: "n", REDUCE_SCATTER: "k", ALL_REDUCE: "k", LOCAL: ""}
"""The size of B that each op divides among ranks."""
ROUNDINGS_OF_A_MATMUL = 2
"""cuBLAS may split a sum over K and round the parts, or round a product before it adds it to a sum."""
_A, _B, _SCALES = 0, 1, 4


def problem_of(
    op: str, sizes: tuple[int, int, int], dtype: torch.dtype, world: int, gather_dim: int, b_layout: str = ROW_MAJOR
) -> Problem:
    """The problem of ``op`` on ``world`` ranks whose local matmul has ``sizes``."""
    dim = gather_dim if op == GATHER else None
    return Problem(op, *sizes, dtype, 1 if op == LOCAL else world, dim, transposed_b=b_layout == TRANSPOSED)


class Operands:
    """A, B and output of one op on one rank.

    References are kept in dtype ``exact``, those of int8 in int32.

    Attributes:
        a: this rank's part of A: [m / world_size, k] or [m, k / world_size] for a gather, else [m, k]. On the symmetric
            heap for a gather.
        b: this rank's part of B, [k, n]; if transposed, its columns are contiguous.
        output: the op's output; on the symmetric heap if peers write it.
        problem: the problem, with the sizes of the local matmul.
        local_output: [m, n], for the local matmul alone; made on first use.
        scales: scale_a and scale_b for fp8, one number each, the same on all ranks; empty for other dtypes.
    """

    def __init__(
        self,
        ctx: Iris,
        op: str,
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        gather_dim: int,
        b_layout: str = ROW_MAJOR,
        exact: torch.dtype = torch.float32,
    ) -> None:
        (m, n, k), world = sizes, ctx.world_size
        self.ctx, self.op, self.dtype, self.gather_dim = ctx, op, dtype, gather_dim
        self.m, self.n, self.k = sizes
        self.problem = problem_of(op, sizes, dtype, world, gather_dim, b_layout)
        self._exact = torch.int32 if dtype == torch.int8 else exact
        self._seed = self._agreed_seed()
        self._kept: dict[str, torch.Tensor] = {}
        part = (m, k)
        if op == GATHER:
            part = (m // world, k) if gather_dim == 0 else (m, k // world)
        whole = {SCATTER: (m, n * world), REDUCE_SCATTER: (m // world, n)}.get(op, (m, n))
        symmetric = op in (SCATTER, ALL_REDUCE)
        self.a = ctx.empty(*part, dtype=dtype) if op == GATHER else torch.empty(part, dtype=dtype, device=ctx.device)
        b = torch.empty((n, k) if self.problem.transposed_b else (k, n), dtype=dtype, device=ctx.device)
        self.b = b.t() if self.problem.transposed_b else b
        self.scales: dict[str, torch.Tensor] = {}
        if dtype == torch.float8_e4m3fn:
            generator = torch.Generator().manual_seed(self._seed + _SCALES * MAX_RANKS)
            numbers = 0.5 + torch.rand(2, 1, generator=generator)
            self.scales = {"scale_a": numbers[0].to(ctx.device), "scale_b": numbers[1].to(ctx.device)}
        made = output_dtype(dtype)
        self.output = ctx.empty(*whole, dtype=made) if symmetric else torch.empty(whole, dtype=made, device=ctx.device)

    @property
    def local_output(self) -> torch.Tensor:
        return self._keep(
            "local output", lambda: torch.empty(self.m, self.n, dtype=self.output.dtype, device=self.ctx.device)
        )

    def gathered(self) -> torch.Tensor:
        """All of the A that the local matmul reads, [m, k]."""
        if self.op != GATHER:
            return self.a
        return self._keep("gathered", lambda: torch.cat(list(self._parts_of_a()), dim=self.gather_dim))

    @property
    def roundings(self) -> float:
        """The roundings (:func:`iris.bench.accuracy.accuracy`) that the op may have, by any algorithm: those of its
        matmul, and those of ranks' parts of a sum. Some ways to gather columns have more: :meth:`roundings_by`."""
        return ROUNDINGS_OF_A_MATMUL + (roundings_of_sum(self.ctx.world_size) if CUT[self.op] == "k" else 0)

    def roundings_by(self, config: FusedConfig) -> float:
        """:attr:`roundings` by ``config``, which may add up products of ranks' columns."""
        adds = config.adds_columns(self.problem)
        return self.roundings + (roundings_of_sum(self.ctx.world_size) if adds else 0)

    def call(self, config: FusedConfig | None = None, ctx: Any = None, **options: Any) -> None:
        """Call the op; ``ctx``, if given, replaces the context."""
        if self.op == GATHER:
            options["gather_dim"] = self.gather_dim
        getattr(ops, self.op)(ctx or self.ctx, self.output, self.a, self.b, config=config, **self.scales, **options)

    def multiply(self, a: torch.Tensor, out: torch.Tensor) -> None:
        """``out = a @ b``, scaled, by the library; RuntimeError if it does not take these operands."""
        if self.scales:
            scale_a, scale_b = self.scales.values()
            torch._scaled_mm(a, self.b, scale_a, scale_b, out_dtype=out.dtype, use_fast_accum=True, out=out)
        else:
            multiply(a, self.b, out)

    def redraw(self) -> None:
        """Fill A and B with new numbers; from now on references are for these. Collective."""
        self._seed = self._agreed_seed()
        self._kept = {name: kept for name, kept in self._kept.items() if name == "local output"}
        self.fill()

    def fill(self, *, decoy: bool = False) -> None:
        """Fill A and B with their numbers, or as a ``decoy`` with others, which results must not come from.
        Collective."""
        self.ctx.barrier()
        self.a.copy_(self._random(_A, self._owner_of_a(self.ctx.rank), decoy))
        self.b.copy_(self._random(_B, self.ctx.rank, decoy))
        self.ctx.barrier()

    def spoil(self) -> None:
        """Fill the outputs with a value that no right result contains. Collective."""
        nothing = float("nan") if self.output.is_floating_point() else -(2**31)
        self.output.fill_(nothing)
        if "local output" in self._kept:
            self._kept["local output"].fill_(nothing)
        self.ctx.barrier()

    def complaint(self, result: torch.Tensor, roundings: float, *, local: bool = False) -> str:
        """How wrong ``result`` is as the op's output (``local``: as the local matmul's); empty if it is right.
        ``roundings``: see :func:`iris.bench.accuracy.accuracy`."""
        expected = self._local_reference() if local else self.reference()
        if result.shape != expected.shape:
            return f"shape {tuple(result.shape)} instead of {tuple(expected.shape)}"
        found = self.accuracy_of(result, roundings, local=local)
        return "" if found.right else str(found)

    def accuracy_of(self, result: torch.Tensor, roundings: float, *, local: bool = False) -> Accuracy:
        """The accuracy of ``result``, whose shape must be right; arguments as for :meth:`complaint`."""
        depth = self.k * (self.ctx.world_size if CUT[self.op] == "k" and not local else 1)
        expected = self._local_reference() if local else self.reference()
        return accuracy(result, expected, depth, roundings, self.dtype)

    def reference(self) -> torch.Tensor:
        """The op's right output, by float64 matmuls."""
        if self.op in (GATHER, LOCAL):
            return self._local_reference()
        rows = slice(None)
        if self.op == REDUCE_SCATTER:
            share = self.m // self.ctx.world_size
            rows = slice(self.ctx.rank * share, (self.ctx.rank + 1) * share)

        def make() -> torch.Tensor:
            if self.op == SCATTER:
                parts = [self._random(_B, rank) for rank in range(self.ctx.world_size)]
                return self._product([(self.a, torch.cat(parts, dim=1))])
            ranks = range(self.ctx.world_size)
            return self._product([(self._random(_A, rank)[rows], self._random(_B, rank)) for rank in ranks])

        return self._keep("reference", make)

    def _local_reference(self) -> torch.Tensor:
        return self._keep("local reference", lambda: self._product([(self.gathered(), self.b)]))

    def _product(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """The sum of the matrix products, computed in float64 and stored in the dtype of references."""
        first, second = pairs[0]
        factor = math.prod(float(scale) for scale in self.scales.values())
        total = torch.empty(first.shape[0], second.shape[1], dtype=self._exact, device=first.device)
        right = [b.double() for _, b in pairs]
        for rows in row_blocks(total):
            products = [factor * (a[rows].double() @ b) for (a, _), b in zip(pairs, right, strict=True)]
            total[rows] = (torch.stack(products).sum(0) if len(products) > 1 else products[0]).to(self._exact)
        return total

    def _agreed_seed(self) -> int:
        """A new random seed, the same on all ranks. Collective."""
        return int(self.ctx.broadcast(secrets.randbelow(1 << 31), 0))

    def _owner_of_a(self, rank: int) -> int:
        """The rank whose numbers ``rank`` has in A: for a scatter all ranks have the same A."""
        return 0 if self.op == SCATTER else rank

    def _parts_of_a(self) -> Iterator[torch.Tensor]:
        return (self._random(_A, rank) for rank in range(self.ctx.world_size))

    def _random(self, which: int, rank: int, decoy: bool = False) -> torch.Tensor:
        """``rank``'s A or B, the same on every rank that draws it."""
        stream = (2 * decoy + which) * MAX_RANKS + rank
        generator = torch.Generator(self.ctx.device).manual_seed(self._seed + stream)
        shape, device = (self.a if which == _A else self.b).shape, self.ctx.device
        if self.dtype == torch.int8:
            return torch.randint(-128, 128, shape, dtype=torch.int8, device=device, generator=generator)
        if self.scales:
            return torch.randn(shape, device=device, generator=generator).to(self.dtype)
        return torch.randn(shape, dtype=self.dtype, device=device, generator=generator)

    def _keep(self, name: str, make: Any) -> torch.Tensor:
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]
