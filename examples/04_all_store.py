"""Store while all ranks store: what the links carry when everybody uses them.

The same work as 02_store.py, now on all ranks at once. In turn ``shift`` every rank writes to the peer ``shift``
places further on, so that exactly one rank writes to each.

The kernel uses the shorter form of the device functions, as 03_all_load.py does:

    iris.peer.store(handle, target + offsets, data, peer, mask=mask)

Run it, and compare with the matrix of 02_store.py:

    python examples/04_all_store.py
    python examples/04_all_store.py --num_ranks 8 --dtype bf16

It checks every buffer exactly, then prints GB/s: rows are the writing rank, columns the rank that is written.
A fused matmul and all-scatter does this with every finished tile: it pushes data while others push to it.
"""

import triton
import triton.language as tl

import iris
from iris.bench.draws import random_bits, require, same_bits
from iris.bench.matrix import Options, measure_all, parse_options, report


@triton.jit
def all_store_kernel(handle, source, target, count, peer, BLOCK: tl.constexpr):
    """Write this rank's ``source`` into ``target`` of rank ``peer``, BLOCK elements per step."""
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, count, step):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < count
        data = tl.load(source + offsets, mask=mask)
        iris.peer.store(handle, target + offsets, data, peer, mask=mask)


def main(options: Options) -> None:
    """What each rank runs."""
    with iris.iris(options.heap_size) as ctx:
        source = random_bits(ctx, ctx.rank, options.count, options.dtype)
        target = ctx.zeros(options.count, dtype=options.dtype)
        ctx.barrier()

        def store_to(peer: int) -> None:
            all_store_kernel[options.grid(ctx)](
                ctx.handle, source, target, options.count, peer, options.block_size, num_warps=8
            )

        for shift in range(ctx.world_size):
            store_to((ctx.rank + shift) % ctx.world_size)
            ctx.barrier()
            sender = (ctx.rank - shift) % ctx.world_size
            expected = random_bits(ctx, sender, options.count, options.dtype)
            require(ctx, same_bits(target, expected), f"all-store over {shift} ranks")
        if ctx.rank == 0:
            print("validation passed: all ranks stored at once, into every peer")
        if not options.validate:
            report(ctx, "all-store", measure_all(ctx, store_to, options.buffer_size), options.plot)


if __name__ == "__main__":
    chosen = parse_options(__doc__, "all_store")
    iris.launch(main, chosen.num_ranks, (chosen,))
