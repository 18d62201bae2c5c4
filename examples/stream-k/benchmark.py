"""Matmul + all-reduce, or matmul + all-scatter, with the Stream-K schedule, checked and timed.

    mpirun -np 4 python examples/stream-k/benchmark.py --benchmark --validate --algorithm one_shot
    torchrun --nproc_per_node 4 examples/stream-k/benchmark.py --benchmark --two_tiles False --gemm_sms 100

If the number of tiles is no multiple of the programs, some programs of a data-parallel schedule idle in the last
round. Stream-K splits the last tiles along K, evenly over all programs, which then hand over partial sums. With
--two_tiles True each program does between one and two tiles' worth of such work, with False less than one.

Algorithms, operands and flags are those of examples/gemm/benchmark.py, for comparison.
"""

import sys

from iris.bench.programs.gemm_cli import main

if __name__ == "__main__":
    sys.exit(main(__doc__, stream_k=True))
