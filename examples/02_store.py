"""Store into another rank's memory inside a Triton kernel.

The mirror of 01_load.py: the kernel reads its own buffer and writes a peer's.

    iris.store(target + offsets, data, here, peer, heap_bases, mask=mask)

A store does not tell the peer that data has come. Here ``ctx.barrier()`` does: what any rank wrote before it, all
ranks see after it. 06_message_passing.py shows how kernels tell each other without the host.

    python examples/02_store.py
    python examples/02_store.py --num_ranks 8 --buffer_size 1048576

It checks that every rank receives every peer's bytes exactly, then measures one pair of ranks at a time while
the others are idle, and prints GB/s: rows are the writing rank, columns the rank that is written. Between GPUs
a store needs no answer, so it is often a little faster than a load.
"""

import triton
import triton.language as tl

import iris
from iris.bench.draws import random_bits, require, same_bits
from iris.bench.matrix import Options, measure_pairs, parse_options, report


@triton.jit
def store_kernel(source, target, count, here, peer, heap_bases, BLOCK: tl.constexpr):
    """Write this rank's ``source`` into ``target`` of rank ``peer``, BLOCK elements per step."""
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, count, step):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < count
        data = tl.load(source + offsets, mask=mask)
        iris.store(target + offsets, data, here, peer, heap_bases, mask=mask)


def main(options: Options) -> None:
    """What each rank runs."""
    with iris.iris(options.heap_size) as ctx:
        source = random_bits(ctx, ctx.rank, options.count, options.dtype)
        target = ctx.zeros(options.count, dtype=options.dtype)
        ctx.barrier()

        def store_to(peer: int) -> None:
            store_kernel[options.grid(ctx)](
                source, target, options.count, ctx.rank, peer, ctx.heap_bases, options.block_size, num_warps=8
            )

        for shift in range(ctx.world_size):
            store_to((ctx.rank + shift) % ctx.world_size)
            ctx.barrier()
            sender = (ctx.rank - shift) % ctx.world_size
            expected = random_bits(ctx, sender, options.count, options.dtype)
            require(ctx, same_bits(target, expected), f"store over {shift} ranks")
        if ctx.rank == 0:
            print("validation passed: every rank stored into every peer's buffer")
        if not options.validate:
            report(ctx, "store", measure_pairs(ctx, store_to, options.buffer_size), options.plot)


if __name__ == "__main__":
    chosen = parse_options(__doc__, "store")
    iris.launch(main, chosen.num_ranks, (chosen,))
