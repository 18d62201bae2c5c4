"""Load while all ranks load: what the links carry when everybody uses them.

The same work as 01_load.py, now on all ranks at once. In turn ``shift`` every rank reads from the peer ``shift``
places further on, so no two ranks read from the same one. Ring algorithms visit their peers in this order.

The kernel also shows the shorter form of the device functions. ``ctx.handle`` holds the heap bases and this
rank's number, so only the peer must be named:

    data = iris.peer.load(handle, source + offsets, peer, mask=mask)

Run it, and compare with the matrix of 01_load.py:

    python examples/03_all_load.py
    python examples/03_all_load.py --num_ranks 8 --dtype bf16

It checks every buffer exactly, then prints GB/s: rows are the reading rank, columns the rank that is read. With
a switch between the GPUs the rates are those of 01_load.py; if pairs share links, they are lower.
"""

import torch
import triton
import triton.language as tl

import iris
from iris.bench.draws import random_bits, require, same_bits
from iris.bench.matrix import Options, measure_all, parse_options, report


@triton.jit
def all_load_kernel(handle, source, target, count, peer, BLOCK: tl.constexpr):
    """Read ``source`` of rank ``peer``, BLOCK elements per step, and keep it in this rank's ``target``."""
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, count, step):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < count
        data = iris.peer.load(handle, source + offsets, peer, mask=mask)
        tl.store(target + offsets, data, mask=mask)


def main(options: Options) -> None:
    """What each rank runs."""
    with iris.iris(options.heap_size) as ctx:
        source = ctx.empty(options.count, dtype=options.dtype)
        target = torch.empty(options.count, dtype=options.dtype, device=ctx.device)
        source.copy_(random_bits(ctx, ctx.rank, options.count, options.dtype))
        ctx.barrier()

        def load_from(peer: int) -> None:
            all_load_kernel[options.grid(ctx)](
                ctx.handle, source, target, options.count, peer, options.block_size, num_warps=8
            )

        for shift in range(ctx.world_size):
            peer = (ctx.rank + shift) % ctx.world_size
            load_from(peer)
            expected = random_bits(ctx, peer, options.count, options.dtype)
            require(ctx, same_bits(target, expected), f"all-load over {shift} ranks")
        if ctx.rank == 0:
            print("validation passed: all ranks loaded at once, from every peer")
        if not options.validate:
            report(ctx, "all-load", measure_all(ctx, load_from, options.buffer_size), options.plot)


if __name__ == "__main__":
    chosen = parse_options(__doc__, "all_load")
    iris.launch(main, chosen.num_ranks, (chosen,))
