"""All-gather, then matmul, by NCCL or RCCL (gloo without GPUs) and torch.matmul: what all_gather_matmul is measured by.

    torchrun --nproc_per_node 8 examples/gemm/reference/all_gather.py --validate --benchmark --datatype bf16
    python examples/gemm/reference/all_gather.py --validate --num_ranks 2

Each rank has M / ranks rows of A and N / ranks columns of B, gathers all of A and multiplies it with its own B.
"""

import sys

import torch
from common import Job, Steps, main

from iris.bench.distributed import all_gather, multiply


def build(job: Job) -> Steps:
    rows, columns = job.m // job.world_size, job.n // job.world_size
    shard, a, b = job.empty(rows, job.k), job.empty(job.m, job.k), job.right(job.k, columns)
    output = job.empty(job.m, columns, job.product_dtype)

    def load(all_of_a: torch.Tensor, all_of_b: torch.Tensor) -> None:
        shard.copy_(job.part(all_of_a, 0))
        b.copy_(job.part(all_of_b, 1))

    return Steps(
        load,
        {
            "communication": lambda: all_gather(a, shard),
            "matmul": lambda: multiply(a, b, output),
        },
        output,
        expected=lambda c: job.part(c, 1),
        roundings=2,  # of the result, and of what a split of K left
    )


if __name__ == "__main__":
    sys.exit(main(__doc__, "all_gather", build, cut="mn"))
