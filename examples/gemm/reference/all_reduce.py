"""Matmul, then all-reduce, by torch.matmul and NCCL or RCCL (gloo without GPUs): what matmul_all_reduce is measured by.

    torchrun --nproc_per_node 8 examples/gemm/reference/all_reduce.py --validate --benchmark --datatype bf16
    python examples/gemm/reference/all_reduce.py --validate --num_ranks 2

Each rank has K / ranks columns of A and rows of B; the products are summed, and all ranks end with the whole sum.
"""

import sys

import torch
import torch.distributed as dist
from common import Job, Steps, main

from iris.bench.accuracy import roundings_of_sum
from iris.bench.distributed import multiply


def build(job: Job) -> Steps:
    depth = job.k // job.world_size
    a, b = job.empty(job.m, depth), job.right(depth, job.n)
    output = job.empty(job.m, job.n, job.product_dtype)

    def load(all_of_a: torch.Tensor, all_of_b: torch.Tensor) -> None:
        a.copy_(job.part(all_of_a, 1))
        b.copy_(job.part(all_of_b, 0))

    return Steps(
        load,
        {
            "matmul": lambda: multiply(a, b, output),
            "communication": lambda: dist.all_reduce(output),
        },
        output,
        expected=lambda c: c,
        roundings=2 + roundings_of_sum(job.world_size),  # as in a matmul, and at each rank on the way
    )


if __name__ == "__main__":
    sys.exit(main(__doc__, "all_reduce", build, cut="k"))
