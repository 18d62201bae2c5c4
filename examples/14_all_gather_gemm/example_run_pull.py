"""All-gather + matmul by pull: the matmul kernel loads every tile of A from the rank that has it.

There is no second kernel and no copy of A: a load of Iris takes the rank to load from. Each tile crosses the link once
for every column of output tiles that needs it, so this is for cases where no memory can be spared.

Every rank has its own columns of B, and needs all of A, of which it has some columns (--gather_dim 1) or rows (0).
Unfused:

    torch.distributed.all_gather(parts, A_sharded)
    output = torch.cat(parts, dim=gather_dim) @ B

Run it, or start the ranks with torchrun or mpirun:

    python examples/14_all_gather_gemm/example_run_pull.py --num_ranks 8
    torchrun --nproc_per_node 8 examples/14_all_gather_gemm/example_run_pull.py -m 4096 -n 28672 -k 8192 --datatype bf16

m, n and k are the sizes of the whole problem; the usual ones are rounded up for the number of ranks. The result is
compared with a float64 reference before it is timed.
"""

import torch

import iris
from iris.bench.draws import require
from iris.bench.options import DTYPES, positive, rank_parser, ranks_to_start, share_evenly
from iris.bench.timing import median_seconds, slowest
from iris.ops import FusedConfig

GPU_SHAPE, SIM_SHAPE = (4096, 8192, 8192), (64, 96, 128)


def relative_error(ctx: iris.Iris, output: torch.Tensor, A_sharded: torch.Tensor, B: torch.Tensor, dim: int) -> float:
    """The largest error against the unfused op in float64, relative to the largest value."""
    A = torch.cat([ctx.broadcast(A_sharded, rank) for rank in range(ctx.world_size)], dim)
    reference = A.double() @ B.double()
    return float((output.double() - reference).abs().max() / reference.abs().max())


def main(sizes: tuple[int | None, ...], dtype: torch.dtype, gather_dim: int) -> None:
    """What each rank runs."""
    torch.seed()  # else every rank draws the same numbers, in every run
    a_nbytes = (sizes[0] or GPU_SHAPE[0]) * (sizes[2] or GPU_SHAPE[2]) * dtype.itemsize
    with iris.iris(max(1 << 30, 2 * a_nbytes)) as ctx:  # room for this rank's part of A
        default = SIM_SHAPE if ctx.backend_name == "sim" else GPU_SHAPE
        usual = [-(-size // ctx.world_size) * ctx.world_size for size in default]  # what the ranks can share evenly
        m, n, k = (size if given is None else given for given, size in zip(sizes, usual, strict=True))
        part = [m, k]
        part[gather_dim] //= ctx.world_size
        A_sharded = ctx.randn(part, dtype=dtype)  # on the symmetric heap: peers read it
        B = torch.randn(k, n // ctx.world_size, dtype=dtype, device=ctx.device)
        output = torch.empty(m, n // ctx.world_size, dtype=dtype, device=ctx.device)
        config = FusedConfig(algorithm="pull")

        def call() -> None:
            ctx.ops.all_gather_matmul(output, A_sharded, B, gather_dim=gather_dim, config=config)

        call()
        error = relative_error(ctx, output, A_sharded, B, gather_dim)
        bound = torch.finfo(dtype).eps / 2 + k**0.5 * torch.finfo(torch.float32).eps  # a rounding, and float32 sums
        require(ctx, error <= bound, f"all_gather_matmul (relative error {error:.1e}, at most {bound:.1e} is right)")
        seconds = slowest(ctx, median_seconds(ctx, call, together=True))
        if ctx.rank == 0:
            print(f"all_gather_matmul by {config.algorithm}, {ctx.world_size} ranks, backend {ctx.backend_name}")
            print(f"shape {m} x {n} x {k}, {dtype}, gather_dim {gather_dim}")
            print(f"validation passed: relative error {error:.1e}, at most {bound:.1e} is right")
            print(
                f"median {seconds * 1e3:.3f} ms, {2 * m * n * k / ctx.world_size / seconds / 1e12:.3g} TFLOP/s per rank"
            )


if __name__ == "__main__":
    parser = rank_parser(__doc__)
    parser.add_argument("-m", type=positive, help="rows of A (default: 4096, simulated 64)")
    parser.add_argument("-n", type=positive, help="columns of B, over all ranks (default: 8192, simulated 96)")
    parser.add_argument("-k", type=positive, help="columns of A, rows of B (default: 8192, simulated 128)")
    parser.add_argument("--datatype", choices=("fp16", "bf16", "fp32"), default="fp16", help="default: %(default)s")
    parser.add_argument("--gather_dim", type=int, choices=(0, 1), default=1, help="default: %(default)s")
    given = parser.parse_args()
    num_ranks = ranks_to_start(given.num_ranks)
    share_evenly(parser, given, "n" + "mk"[given.gather_dim], num_ranks)
    iris.launch(main, num_ranks, ((given.m, given.n, given.k), DTYPES[given.datatype], given.gather_dim))
