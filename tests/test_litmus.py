"""Litmus tests of the memory model: what one rank stores before a signal, another one sees after its wait.

On GPUs a control shows that the test can fail: without the release, and the barrier of threads before it, some of the
stored data arrives late.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from ranks import BACKEND, Ranks, context, worlds

import iris
from iris import backends

TURNS = BACKEND == "sim" or backends.oversubscribed()
"""Whether ranks take turns: then a round takes long, and all stored data is there when another rank looks."""
ROUNDS = 20 if TURNS else 20_000
PROGRAMS = 2 if BACKEND == "sim" else 16
BLOCK = 64 if BACKEND == "sim" else 4096


@triton.jit
def pass_on(handle, data, flag, taken, wrong, rounds, SIGNALLED: tl.constexpr, BLOCK: tl.constexpr):
    """In every round, send a block to the next rank and then a flag; read the block of the previous rank once its flag
    is there, and signal that it may be overwritten. Counts elements that are not of this round."""
    me, world, program = iris.rank(handle), iris.world_size(handle), tl.program_id(0)
    following, before = (me + 1) % world, (me + world - 1) % world
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    seen = tl.zeros((BLOCK,), dtype=tl.int32)
    for number in range(1, rounds + 1):
        iris.peer.store(handle, data + offsets, offsets * 0 + number, following)
        if SIGNALLED:
            iris.signal(flag + program, number, following, handle)
        else:
            iris.peer.store(handle, flag + program, number, following)
        iris.wait(flag + program, number, before, handle)
        seen += (tl.load(data + offsets) != number).to(tl.int32)
        iris.signal(taken + program, number, before, handle)
        iris.wait(taken + program, number, following, handle)
    tl.store(wrong + program, tl.sum(seen, 0))


def late_elements(signalled: bool) -> int:
    ctx = context()
    data = ctx.zeros(PROGRAMS * BLOCK, dtype=torch.int32)
    flag, taken = (ctx.zeros(PROGRAMS, dtype=torch.int32) for _ in range(2))
    wrong = torch.full((PROGRAMS,), -1, dtype=torch.int32, device=ctx.device)
    ctx.barrier()
    pass_on[(PROGRAMS,)](
        ctx.handle, data, flag, taken, wrong, ROUNDS, SIGNALLED=signalled, BLOCK=BLOCK, num_warps=8
    )  # fmt: skip
    ctx.synchronize()
    ctx.barrier()
    counted = wrong.tolist()
    assert min(counted) >= 0
    return sum(counted)


@pytest.mark.parametrize("ranks", worlds(2, 8) if BACKEND != "sim" else worlds(2, 3), indirect=True)
def test_what_is_signalled_has_arrived(ranks: Ranks) -> None:
    assert ranks.run(late_elements, True) == [0] * ranks.world_size


if not TURNS:

    @pytest.mark.parametrize("ranks", worlds(2, 8), indirect=True)
    def test_what_is_not_signalled_may_come_late(ranks: Ranks) -> None:
        """This is rare while other programs use the same GPUs."""
        assert any(sum(ranks.run(late_elements, False)) for _ in range(20))
