"""Check and time all-gather + matmul by **pull**, over the shapes of dataset/ag_gemm.json.

The matmul kernel itself loads every tile of A from the rank that has it; see ``iris.ops.all_gather_matmul``.

    python benchmark/examples/benchmark_all_gather_gemm_pull.py --num_ranks 8 -v
    python benchmark/examples/benchmark_all_gather_gemm_pull.py --num_ranks 8 -b --datatype fp16
    python benchmark/examples/benchmark_all_gather_gemm_pull.py -b -m 4096 -n 4096 -k 14336 --gather_dim 0

m, n and k are the sizes of the whole problem; every rank multiplies all of A by n / num_ranks columns of B. Each shape
is compared with a float64 reference before it is timed, and again behind that. The times are of the slowest rank. The
file of a shape holds one line of JSON, so that ``cat`` joins files. Without a GPU ranks are simulated, the data set's
sizes divided by 128; times then say nothing.
"""

import sys
from pathlib import Path

from iris.bench.programs.gather_options import parse_options
from iris.bench.programs.gather_sweep import run

DATA_SET = Path(__file__).parents[2] / "dataset" / "ag_gemm.json"

if __name__ == "__main__":
    options = parse_options(__doc__, "pull", DATA_SET)
    sys.exit(run(options))
