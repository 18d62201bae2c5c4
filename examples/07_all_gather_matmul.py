"""A first fused op: all-gather and matmul.

A is too tall for one rank, so each rank holds some of its rows; B differs from rank to rank, as the columns of a
layer's weight do under tensor parallelism. Every rank needs all of A times its own B. Unfused, in two steps:

    torch.distributed.all_gather_into_tensor(A, A_sharded)
    output = A @ B

Fused, each rank multiplies the rows that it has while others arrive. The algorithm is chosen by size, or named:
config="pull" is one kernel, which reads the rows that it needs from the rank that has them. For that A_sharded
must be on the symmetric heap:

    ctx.ops.all_gather_matmul(output, A_sharded, B)

    python examples/07_all_gather_matmul.py
    python examples/07_all_gather_matmul.py --rows 40 --n 72 --k 96 --dtype bf16
    python examples/07_all_gather_matmul.py --num_ranks 8 --rows 512 --n 4096 --k 8192  # too much for simulated ranks

It compares with a float64 reference, overwrites A and calls again (no barrier is needed between calls), and
prints the error and the median time of a call.
"""

import torch

import iris
from iris.bench.draws import require
from iris.bench.options import DTYPES, positive, rank_parser, ranks_to_start
from iris.bench.timing import median_seconds

CALLS = 3


def relative_error(ctx: iris.Iris, output: torch.Tensor, A_sharded: torch.Tensor, B: torch.Tensor) -> float:
    """The largest error against the unfused op in float64, relative to the largest value."""
    A = torch.cat([ctx.broadcast(A_sharded, rank) for rank in range(ctx.world_size)])
    reference = A.double() @ B.double()
    return float((output.double() - reference).abs().max() / reference.abs().max())


def main(dtype: torch.dtype, rows: int | None, n: int | None, k: int | None) -> None:
    """What each rank runs."""
    torch.seed()  # else every rank draws the same numbers, in every run
    with iris.iris(256 << 20) as ctx:
        few = ctx.backend_name == "sim"
        rows, n, k = rows or (64 if few else 1024), n or (96 if few else 4096), k or (128 if few else 4096)
        M = rows * ctx.world_size
        A_sharded = ctx.empty(rows, k, dtype=dtype)
        B = torch.randn(k, n, dtype=dtype, device=ctx.device)
        output = torch.empty(M, n, dtype=dtype, device=ctx.device)

        def call() -> None:
            ctx.ops.all_gather_matmul(output, A_sharded, B)

        errors = []
        for _ in range(CALLS):
            A_sharded.normal_()
            call()
            errors.append(relative_error(ctx, output, A_sharded, B))
            require(ctx, errors[-1] <= torch.finfo(dtype).eps, f"all_gather_matmul (relative error {errors[-1]:.1e})")
        seconds = median_seconds(ctx, call, together=True)
        if ctx.rank == 0:
            print(f"validation passed: {CALLS} calls, relative error at most {max(errors):.1e}")
            print(f"all_gather_matmul, {ctx.world_size} ranks ({ctx.backend_name}): {M} x {n} x {k} {dtype}")
            print(f"median {seconds * 1e3:.3f} ms, {2 * M * n * k / seconds / 1e12:.3g} TFLOP/s per rank")


if __name__ == "__main__":
    parser = rank_parser(__doc__)
    parser.add_argument("--rows", type=positive, help="rows of A on each rank (default: 1024, simulated 64)")
    parser.add_argument("--n", type=positive, help="columns of B (default: 4096, simulated 96)")
    parser.add_argument("--k", type=positive, help="columns of A (default: 4096, simulated 128)")
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16", help="default: %(default)s")
    given = parser.parse_args()
    iris.launch(main, ranks_to_start(given.num_ranks), (DTYPES[given.dtype], given.rows, given.n, given.k))
