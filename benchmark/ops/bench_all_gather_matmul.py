"""All-gather + matmul by every algorithm, beside NCCL + torch.matmul, torch.ops.symm_mem and the matmul alone.

    python benchmark/ops/bench_all_gather_matmul.py --num_ranks 8 --dataset dataset/ag_gemm.json
    python benchmark/ops/bench_all_gather_matmul.py --axis_algorithm=push,copy_engine,nccl --axis_M=pow2:9:13
    python benchmark/ops/bench_all_gather_matmul.py --benchmark_filter gather_dim=1 --benchmark_out ag.jsonl
    torchrun --nproc_per_node 8 benchmark/ops/bench_all_gather_matmul.py --benchmark_format csv

Axes: M, N, K of the whole problem, dtype, gather_dim (A sharded by rows, or by columns) and algorithm. The algorithms
of one problem work on the same fresh random numbers and are timed in turns. Each result is compared with the unfused op
in float64, A's parts put together as they were cut, before it is timed and again behind that. It is the case
all_gather_matmul of `python -m iris bench`, with that command's options; --help describes them.
"""

import os
import sys
from collections.abc import Sequence

from iris.cli import main
from iris.identity import identity

CASE = "all_gather_matmul"
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables by which a launcher tells a process that it is a rank."""


def run(arguments: Sequence[str]) -> int:
    """The whole program; returns its exit status.

    The benchmark starts ranks itself, so that it can replace one that dies. Under torchrun, mpirun or srun the first
    process starts as many as the launcher did, and the others leave.
    """
    if not arguments:
        print(
            "bench_all_gather_matmul.py: nothing to do: give at least one option, such as --num_ranks 8, "
            "--axis_algorithm=pull,push or --dataset dataset/ag_gemm.json; --benchmark_list lists what is measured, "
            "--help all options",
            file=sys.stderr,
        )
        return 1
    who = identity()
    if who is None:
        return main(["bench", CASE, *arguments])
    if who.rank > 0:
        return 0
    for name in OF_A_RANK:
        os.environ.pop(name, None)
    return main(["bench", CASE, *arguments, "--num_ranks", str(who.world_size)])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
