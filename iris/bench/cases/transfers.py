"""Bulk transfers: between all ranks at once in a ring, timed like other cases, and then between every two ranks.

In the ring every rank moves a buffer to (put) or from (get) the next one, so every link direction is busy. Buffers are
moved by persistent kernels that call :func:`iris.peer.put` or ``get``, and in turns with these by the copy engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from iris.bench import records
from iris.bench.axes import axis
from iris.bench.case import register
from iris.bench.draws import random_bits, same_bits
from iris.bench.matrix import measure_pairs, print_matrix
from iris.bench.options import several_gpus
from iris.bench.state import State
from iris.context import Iris
from iris.device import peer as peers
from iris.ops.hardware import hardware
from iris.ops.target import target_of

BUFFER_BYTES = 256 << 20 if several_gpus() else 64 << 10
BLOCK = 16384
"""4-byte elements that a program moves per step: 64 KiB. Rates are flat from 16 to 64 KiB (H200, 2026-11-21)."""
PROGRAMS_PER_SM = 2
_PAIR = "GB/s rank {} peer {}"


@triton.jit
def move_kernel(source_ptr, target_ptr, count, peer, handle, PUT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy ``count`` elements from ``source_ptr`` to ``target_ptr``: if ``PUT``, from this rank to ``peer``, else from
    ``peer`` to this rank."""
    offsets = tl.arange(0, BLOCK)
    # In 64 bits, as a step past a count just below 2**31 would wrap around.
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + offsets
        if PUT:
            peers.put(handle, source_ptr + at, target_ptr + at, peer, mask=at < count)
        else:
            peers.get(handle, source_ptr + at, target_ptr + at, peer, mask=at < count)


def show(results: Sequence[Mapping[str, Any]]) -> None:
    """Print a rank × rank matrix for each record that has one, unless its ranks were simulated."""
    for one in results:
        world, counters = range(one["world_size"]), one["counters"]
        if counters and not records.simulated(one):
            heading = " ".join(str(value) for value in one["params"].values())
            matrix = [[counters[_PAIR.format(rank, peer)] for peer in world] for rank in world]
            print_matrix(f"{heading}: GB/s of each pair while all others are idle", matrix)


@register(show=show)
@axis("direction", ("put", "get"))
@axis("buffer_size", (BUFFER_BYTES,))
@axis("way", ("copy_engine", "kernel"), variant=True)
def rma(state: State, ctx: Iris) -> None:
    """put and get of a buffer: timed with all ranks in a ring, then every two ranks alone (rank × rank matrix)."""
    nbytes, put = state["buffer_size"], state["direction"] == "put"
    count = nbytes // 4
    if not count or nbytes % 4:
        state.skip(f"{nbytes} bytes: not a multiple of 4, or nothing")
    source, target = state.share(
        "buffers", lambda: (ctx.empty(count, dtype=torch.int32), ctx.empty(count, dtype=torch.int32))
    )
    source.copy_(random_bits(ctx, ctx.rank, count, torch.int32))
    programs = min(PROGRAMS_PER_SM * ctx.num_sms, -(-count // BLOCK))
    views = [(ctx.peer_view(source, peer), ctx.peer_view(target, peer)) for peer in range(ctx.world_size)]

    def by_engine(peer: int) -> None:
        source_there, target_there = views[peer]
        if put:
            target_there.copy_(source)
        else:
            target.copy_(source_there)

    def by_kernel(peer: int) -> None:
        move_kernel[(programs,)](source, target, count, peer, ctx.handle, PUT=put, BLOCK=BLOCK, num_warps=16)

    moves: dict[str, Callable[[int], None]] = {"copy_engine": by_engine, "kernel": by_kernel}
    if state["way"] not in moves:
        state.skip(f"no way {state['way']}; there are {', '.join(moves)}")
    move = moves[state["way"]]
    following, giver = (ctx.rank + 1) % ctx.world_size, (ctx.rank + (-1 if put else 1)) % ctx.world_size
    expected = random_bits(ctx, giver, count, torch.int32)
    known = hardware(target_of(ctx).hardware)
    if ctx.world_size > 1:
        state.set_bytes(nbytes)
        state.set_floor(nbytes / known.received_bytes_per_s(2) if known is not None else None)
    state.exec(
        partial(move, following),
        validate_fn=lambda: "" if same_bits(target, expected) else "other bits",
        spoil_fn=lambda: target.fill_(-1),
    )
    if state.outcome.validated:
        matrix = measure_pairs(ctx, move, nbytes)
        for rank, row in enumerate(matrix):
            for peer, rate in enumerate(row):
                state.add_counter(_PAIR.format(rank, peer), rate)
