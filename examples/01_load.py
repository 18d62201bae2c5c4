"""Load from another rank's memory inside a Triton kernel.

Every rank puts a buffer on its symmetric heap: memory that all ranks of the job can reach, at the same offset
on each. A kernel names an address in its own heap, and the rank whose memory it means at that offset:

    data = iris.load(source + offsets, here, peer, heap_bases, mask=mask)

Run it (4 simulated ranks where there are no GPUs; torchrun, mpirun and srun work too):

    python examples/01_load.py
    python examples/01_load.py --num_ranks 8 --dtype fp32 --plot load.png

It checks that every rank reads every peer's bytes exactly, then measures one pair of ranks at a time while the
others are idle, and prints GB/s: rows are the reading rank, columns the rank that is read. The diagonal is a
rank's own memory; the rest is the link between the two.
"""

import torch
import triton
import triton.language as tl

import iris
from iris.bench.draws import random_bits, require, same_bits
from iris.bench.matrix import Options, measure_pairs, parse_options, report


@triton.jit
def load_kernel(source, target, count, here, peer, heap_bases, BLOCK: tl.constexpr):
    """Read ``source`` of rank ``peer``, BLOCK elements per step, and keep it in this rank's ``target``."""
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, count, step):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < count
        data = iris.load(source + offsets, here, peer, heap_bases, mask=mask)
        tl.store(target + offsets, data, mask=mask)


def main(options: Options) -> None:
    """What each rank runs."""
    with iris.iris(options.heap_size) as ctx:
        source = ctx.empty(options.count, dtype=options.dtype)
        target = torch.empty(options.count, dtype=options.dtype, device=ctx.device)
        source.copy_(random_bits(ctx, ctx.rank, options.count, options.dtype))
        ctx.barrier()

        def load_from(peer: int) -> None:
            load_kernel[options.grid(ctx)](
                source, target, options.count, ctx.rank, peer, ctx.heap_bases, options.block_size, num_warps=8
            )

        for peer in range(ctx.world_size):
            load_from(peer)
            expected = random_bits(ctx, peer, options.count, options.dtype)
            require(ctx, same_bits(target, expected), f"load from rank {peer}")
        if ctx.rank == 0:
            print("validation passed: every rank loaded every peer's buffer")
        if not options.validate:
            report(ctx, "load", measure_pairs(ctx, load_from, options.buffer_size), options.plot)


if __name__ == "__main__":
    chosen = parse_options(__doc__, "load")
    iris.launch(main, chosen.num_ranks, (chosen,))
