"""Change another rank's memory without losing what others change there at the same time.

Iris has the atomics add, sub, xchg, cas, and, or, xor, min and max. Sub is an add of the negative, so this program uses
the other eight. They take the arguments of a store, and return the old value:

    old = iris.atomic_add(counter, value, here, peer, heap_bases)

They order memory as their ``sem`` says (default "acq_rel"), at ``sys`` scope, the one that includes other GPUs.

    python examples/05_atomic_add.py
    python examples/05_atomic_add.py --num_ranks 8 --dtype fp32

First all ranks apply all eight kinds to the same words of every rank, with random values. Then every rank adds a
buffer into every peer's, all at once, and the sums are checked. Last it measures atomic_add between one pair of
ranks at a time, and prints GB/s: rows are the rank that adds, columns the rank whose memory changes.
"""

from functools import reduce
from operator import and_, or_, xor

import torch
import triton
import triton.language as tl

import iris
from iris.bench.draws import require, shared_generator
from iris.bench.matrix import Options, measure_pairs, parse_options, report


@triton.jit
def all_kinds_kernel(words, values, here, world_size, heap_bases):
    """Apply each kind of atomic, with this rank's value, to one word of every rank."""
    value = tl.load(values + here)
    for peer in range(world_size):
        iris.atomic_add(words + 0, value, here, peer, heap_bases)
        iris.atomic_and(words + 1, value, here, peer, heap_bases)
        iris.atomic_or(words + 2, value, here, peer, heap_bases)
        iris.atomic_xor(words + 3, value, here, peer, heap_bases)
        iris.atomic_min(words + 4, value, here, peer, heap_bases)
        iris.atomic_max(words + 5, value, here, peer, heap_bases)
        iris.atomic_xchg(words + 6, value, here, peer, heap_bases)  # the last value stays
        iris.atomic_cas(words + 7, value * 0, value, here, peer, heap_bases)  # the first value stays


@triton.jit
def add_kernel(source, target, count, here, peer, heap_bases, BLOCK: tl.constexpr):
    """Add this rank's ``source`` to ``target`` of rank ``peer``; the order does not matter, so adds are relaxed."""
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < count
        data = tl.load(source + offsets, mask=mask)
        iris.atomic_add(target + offsets, data, here, peer, heap_bases, mask=mask, sem="relaxed")


def check_all_kinds(ctx: iris.Iris) -> None:
    """Check eight words of each rank, at first 0 (``and``: all bits set), after one random value from every rank."""
    generator = shared_generator(ctx, ctx.world_size)
    values = torch.randint(-(1 << 24), 1 << 24, (ctx.world_size,), generator=generator, dtype=torch.int32)
    words = ctx.zeros(8, dtype=torch.int32)
    words[1] = -1
    ctx.barrier()
    all_kinds_kernel[(1,)](words, values.to(ctx.device), ctx.rank, ctx.world_size, ctx.heap_bases)
    ctx.barrier()
    found, all_values = words.tolist(), values.tolist()
    bits = [reduce(and_, all_values), reduce(or_, all_values), reduce(xor, all_values)]
    exact = found[:6] == [sum(all_values), *bits, min(0, *all_values), max(0, *all_values)]
    require(ctx, exact and found[6] in all_values and found[7] in all_values, "eight kinds of atomics")


def main(options: Options) -> None:
    """What each rank runs."""
    with iris.iris(options.heap_size) as ctx:
        check_all_kinds(ctx)
        shape, ranks = (options.count,), range(ctx.world_size)
        digits = [
            torch.randint(-8, 9, shape, generator=shared_generator(ctx, rank), dtype=torch.int8) for rank in ranks
        ]
        parts = torch.stack(digits).to(ctx.device, options.dtype)
        source, target = parts[ctx.rank], ctx.zeros(options.count, dtype=options.dtype)
        ctx.barrier()

        def add_to(peer: int) -> None:
            add_kernel[options.grid(ctx)](
                source, target, options.count, ctx.rank, peer, ctx.heap_bases, options.block_size, num_warps=8
            )

        for peer in ranks:
            add_to(peer)
        ctx.barrier()
        require(ctx, torch.equal(target, parts.sum(0, dtype=options.dtype)), "atomic_add of all ranks")
        if ctx.rank == 0:
            print("validation passed: eight kinds of atomics, and the sums of atomic_add")
        if not options.validate:
            report(ctx, "atomic_add", measure_pairs(ctx, add_to, options.buffer_size), options.plot)


if __name__ == "__main__":
    chosen = parse_options(__doc__, "atomic_add", "int32", ("int32", "int64", "fp16", "bf16", "fp32", "fp64"))
    iris.launch(main, chosen.num_ranks, (chosen,))
