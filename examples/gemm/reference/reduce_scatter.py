"""Matmul, then reduce-scatter, by torch.matmul and NCCL or RCCL (gloo without GPUs): what matmul_reduce_scatter is
measured by.

    torchrun --nproc_per_node 8 examples/gemm/reference/reduce_scatter.py --validate --benchmark --datatype bf16
    python examples/gemm/reference/reduce_scatter.py --validate --num_ranks 2

Each rank has K / ranks columns of A and rows of B; the products are summed, and each rank ends with M / ranks rows of
the sum.
"""

import sys

import torch
from common import Job, Steps, main

from iris.bench.accuracy import roundings_of_sum
from iris.bench.distributed import multiply, reduce_scatter


def build(job: Job) -> Steps:
    rows, depth = job.m // job.world_size, job.k // job.world_size
    a, b = job.empty(job.m, depth), job.right(depth, job.n)
    product, output = job.empty(job.m, job.n, job.product_dtype), job.empty(rows, job.n, job.product_dtype)

    def load(all_of_a: torch.Tensor, all_of_b: torch.Tensor) -> None:
        a.copy_(job.part(all_of_a, 1))
        b.copy_(job.part(all_of_b, 0))

    return Steps(
        load,
        {
            "matmul": lambda: multiply(a, b, product),
            "communication": lambda: reduce_scatter(output, product),
        },
        output,
        expected=lambda c: job.part(c, 0),
        roundings=2 + roundings_of_sum(job.world_size),  # as in a matmul, and at each rank on the way
    )


if __name__ == "__main__":
    sys.exit(main(__doc__, "reduce_scatter", build, cut="mk"))
