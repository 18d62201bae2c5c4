"""The unfused all-gather + matmul: NCCL (RCCL on AMD GPUs, gloo where ranks are simulated), then torch.matmul.

What the fused programs in benchmark/examples are measured against, with their flags, data set and files. Sharded by
rows (--gather_dim 0), the parts of A arrive in place. Sharded by columns (1) they arrive one below the other, since a
collective puts only rows together, and one more copy puts them side by side:

    torch.distributed.all_gather_into_tensor(A, A_sharded)    torch.distributed.all_gather_into_tensor(below, A_sharded)
                                                              torch.cat(below.split(len(A_sharded)), dim=1, out=A)
    torch.matmul(A, B, out=output)                            torch.matmul(A, B, out=output)

A and what is below are made once, outside the timed calls. Matrices of int8 are multiplied by torch._int_mm, which
takes more than 16 rows, and other sizes in multiples of 8, on GPUs. It is the way "nccl" of `iris bench
all_gather_matmul`.

    python examples/benchmark/reference/all_gather_gemm/benchmark_rccl_torch.py --num_ranks 8 -b
    torchrun --nproc_per_node 8 examples/benchmark/reference/all_gather_gemm/benchmark_rccl_torch.py -v --gather_dim 0
    mpirun -n 8 python examples/benchmark/reference/all_gather_gemm/benchmark_rccl_torch.py -b -m 4096 -n 4096 -k 14336

torch.matmul chooses its own blocks: --BLK_M and the other kernel options are taken, so that one command line serves all
programs, and not used.
"""

import sys
from pathlib import Path

from iris.bench.programs.gather_options import parse_options
from iris.bench.programs.gather_sweep import run

DATA_SET = Path(__file__).parents[4] / "dataset" / "ag_gemm.json"

if __name__ == "__main__":
    options = parse_options(__doc__, "nccl", DATA_SET)
    sys.exit(run(options))
