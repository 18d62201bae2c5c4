"""Matmul + all-reduce, or matmul + all-scatter, checked and timed.

    mpirun -np 4 python examples/gemm/benchmark.py --benchmark --validate --algorithm one_shot
    torchrun --nproc_per_node 4 examples/gemm/benchmark.py --benchmark --datatype bf16 --algorithm all_scatter
    python examples/gemm/benchmark.py --validate --num_ranks 4 -m 256 -n 192 -k 128

  all_reduce   each rank has K / ranks columns of A and rows of B; tiles are added at the rank that sums them as they
               are finished (matmul_all_reduce, "atomic": in no fixed order)
  one_shot     the same operands; every rank gets all ranks' finished tiles and sums them ("one_shot")
  all_scatter  each rank has N / ranks columns of B and sends its columns of C to all (matmul_all_scatter): "split"
               between programs that multiply and total_sms - gemm_sms that communicate, or if gemm_sms is total_sms,
               "push", each tile by the program that made it

Every run is checked against float64 before it is timed, and exits with 1 if the result is wrong. Arguments that are too
large for the device are reduced, with a line for each. Tiles are computed whole, one by one (data-parallel);
examples/stream-k/benchmark.py does the same with Stream-K.
"""

import sys

from iris.bench.programs.gemm_cli import main

if __name__ == "__main__":
    sys.exit(main(__doc__, stream_k=False))
