"""What ``decomposed`` and ``ring`` are made of: the library's matmul (``torch.matmul``), chunk by chunk, beside the
copy engine, and in between kernels of one program that wait for data from peers.

The decomposition is that of Wang et al., Overlap Communication with Dependent Computation via Decomposition in Large
Deep Learning Models, ASPLOS 2023.

:func:`reduce_in_ring` sums products over ranks without a kernel that sums. The sum of a chunk of rows travels from rank
to rank, and ends at the rank that owns the rows; each rank's matmul adds its product to it, in the library's epilogue.
While one chunk's sum is on its way, the next one's is computed. Each rank rounds the sum, as in NCCL's ring, and cuBLAS
mostly rounds a 16-bit product, too, before it adds it; a bias is rounded once more. The order of the sum is always the
same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from iris.context import Iris
from iris.device import handle as handles
from iris.device.sync import COPIED, others, signal_all, wait, wait_all
from iris.device.turnstile import NEXT_EPOCH, coming_epoch, enter, leave, wait_entered
from iris.engine import CopyEngine
from iris.ops.config import flagged_one_by_one
from iris.ops.problem import QUANTISED
from iris.ops.rows import MAX_CHUNKS, Rows
from iris.ops.workspace import FusedWorkspace


@triton.jit
def entry_kernel(handle, turnstile):
    """Begin a call that is made of several kernels: peers may write to this rank from now on."""
    enter(turnstile, handle)


@triton.jit(do_not_specialize=["first", "count"])
def entered_kernel(handle, turnstile, first, count, SITE: tl.constexpr):
    """Wait until ``count`` ranks, from ``first`` on, have entered the call."""
    epoch = coming_epoch(turnstile)
    for step in range(count):
        wait_entered(turnstile, epoch, (first + step) % handles.world_size(handle), handle, SITE)


@triton.jit(do_not_specialize=["slot", "source"])
def arrival_kernel(handle, turnstile, ready, slot, source, SITE: tl.constexpr):
    """Wait until rank ``source`` has set flag ``slot``. What runs after this kernel on its stream sees what was
    sent."""
    wait(ready + slot, coming_epoch(turnstile), source, handle, SITE)


@triton.jit
def wait_landed(handle, ready, sent, chunk, epoch, SITE: tl.constexpr):
    """Wait until all other ranks' parts of chunk number ``chunk`` have landed and are flagged.

    Without ``sent``, the copy engine flags each part. With ``sent``, it only sets the chunk's word in it after all
    parts that this rank sends; program 0 of this rank clears that word, and flags the parts at the peers. Called by
    every program of the kernel.
    """
    me, world = handles.rank(handle), handles.world_size(handle)
    peers, valid = others(handle)
    flags = ready + chunk * world
    if sent is not None:
        if tl.program_id(0) == 0:
            wait(sent + chunk, COPIED, me, handle, SITE)
            tl.store(sent + chunk, 0)
            signal_all(flags + me, epoch, peers, valid, handle)
    wait_all(flags + peers, epoch, peers, valid, handle, SITE)


@triton.jit(do_not_specialize=["chunk"])
def landing_kernel(handle, turnstile, ready, sent, chunk, SITE: tl.constexpr):
    """:func:`wait_landed` for what runs after this kernel on its stream."""
    wait_landed(handle, ready, sent, chunk, coming_epoch(turnstile), SITE)


@triton.jit
def exit_kernel(handle, turnstile, SITE: tl.constexpr, MEET: tl.constexpr):
    """End the call; see :func:`iris.device.turnstile.leave`."""
    leave(turnstile, coming_epoch(turnstile), handle, SITE, MEET)


def lanes_for(dtype: torch.dtype) -> int:
    """The number of lanes that matmuls alternate between: two, but one for 8-bit dtypes. Some products of these are
    computed by Iris's kernel, whose calls share one set of flags."""
    return 1 if dtype in QUANTISED else 2


@dataclass(frozen=True)
class Decomposition:
    """The small kernels and copies of one call. ``site``: the op's number, for errors of waits."""

    ctx: Iris
    workspace: FusedWorkspace
    site: int

    @property
    def engine(self) -> CopyEngine:
        return self.workspace.engine

    def enter(self) -> None:
        """Tell peers that they may write to this rank from now on."""
        entry_kernel[(1,)](self.ctx.handle, self.workspace.turnstile, num_warps=1)

    def wait_entered(self, first: int, count: int) -> None:
        """Hold up the current lane until ``count`` ranks, from ``first`` on, may be written to."""
        entered_kernel[(1,)](
            self.ctx.handle, self.workspace.turnstile, first % self.ctx.world_size, count, SITE=self.site, num_warps=1
        )

    def wait_arrival(self, slot: int, source: int) -> None:
        """Hold up the current lane until rank ``source`` has flagged ``slot``."""
        arrival_kernel[(1,)](
            self.ctx.handle, self.workspace.turnstile, self.workspace.ready, slot, source, SITE=self.site, num_warps=1
        )

    def landings(self, count: int) -> list[Landing]:
        """The landings of ``count`` chunks, of which every rank sends parts to all others. Call it before the engine is
        running, as the engine's streams do not wait for the kernel that zeroes new words."""
        flagged = flagged_one_by_one(self.ctx.world_size)
        sent = None if flagged else self.workspace.scratch("sent", MAX_CHUNKS, torch.int32)
        return [Landing(self, chunk, sent) for chunk in range(count)]

    def flag(self, slot: int, peer: int) -> None:
        """Set flag ``slot`` at ``peer``, after the copies so far."""
        epoch = self.workspace.turnstile[NEXT_EPOCH.value :][:1]
        self.engine.put(epoch, self.workspace.ready[slot:][:1], peer)

    def keep_level(self, chunk: int) -> None:
        """Hold up the current lane, and the copies that follow it, until the next rank's copies have come as far as
        this rank's. ``chunk``: another one each time.

        Ranks copy to one peer after the other, next rank first. Only ranks that are level never copy to the same peer
        at once: one that is ahead reaches a peer to which the next rank is still copying. The two then share that
        peer's links, and are late at all further peers (4 and 8 × H200, 2026-11-26)."""
        rank, world = self.ctx.rank, self.ctx.world_size
        if world <= 2:  # no two ranks copy to the same peer
            return
        before = (rank - 1) % world
        self.flag(chunk * world + before, before)  # a slot in which no peer flags a part
        self.wait_arrival(chunk * world + rank, (rank + 1) % world)

    def meet(self) -> None:
        """After a kernel that left without meeting, and copies: wait until all ranks have come so far."""
        turnstile = self.workspace.second_turnstile
        exit_kernel[(1,)](self.ctx.handle, turnstile, SITE=self.site, MEET=True, num_warps=1)

    def leave(self, *, meet: bool) -> None:
        """End the call; with ``meet``, on no rank before all ranks have come so far."""
        exit_kernel[(1,)](self.ctx.handle, self.workspace.turnstile, SITE=self.site, MEET=meet, num_warps=1)


@dataclass(frozen=True)
class Landing:
    """The parts of chunk number ``chunk`` that each rank sends to every other rank; they are waited for all together.

    A copy takes 2 µs longer with a flag after it. So with many ranks, one word in this rank's memory, in ``sent``, is
    set after all copies of this rank; the kernel that waits for the others' parts then flags this rank's.
    """

    parts: Decomposition
    chunk: int
    sent: torch.Tensor | None

    def copied(self, peer: int) -> None:
        """The last copy was this rank's part for ``peer``."""
        if self.sent is None:
            ctx = self.parts.ctx
            self.parts.flag(self.chunk * ctx.world_size + ctx.rank, peer)

    def copied_all(self) -> None:
        """The copies to all peers have been asked for."""
        if self.sent is not None:
            self.parts.engine.set(self.sent[self.chunk :][:1], COPIED.value)

    def wait(self) -> None:
        """Hold up the current lane until all others' parts have landed."""
        parts, workspace = self.parts, self.parts.workspace
        landing_kernel[(1,)](
            parts.ctx.handle, workspace.turnstile, workspace.ready, self.sent, self.chunk, SITE=parts.site, num_warps=1
        )


def reduce_in_ring(
    parts: Decomposition,
    sums: torch.Tensor,
    chunks: list[Rows],
    rows_per_rank: int,
    multiply: Callable[[Rows, bool, bool], None],
    *,
    everywhere: bool,
) -> None:
    """Sum products over ranks, and leave the sum of each rank's rows at that rank, or with ``everywhere`` at all ranks.

    Args:
        sums: [M, N], symmetric: where sums arrive from the rank before, and from where they are sent on.
        chunks: how each rank's rows are cut; the last rank may have fewer rows.
        multiply: ``multiply(rows, begun, last)`` computes the product of these rows, of all M, and adds it, if
            ``begun``, to what has arrived in ``sums``. ``last``: the sum is then complete, and this rank owns its rows.
        everywhere: ``multiply`` leaves this rank's own sums in ``sums``, too; they are sent to all ranks, which then
            meet.

    Sync: on the current stream. Waits for the next rank to have entered.
    """
    engine, rank, world = parts.engine, parts.ctx.rank, parts.ctx.world_size
    following, before = (rank + 1) % world, (rank - 1) % world
    asked = world == 1
    with engine.running(last=lambda: parts.leave(meet=everywhere), announced=world > 1):
        parts.enter()
        for step, chunk in itertools.product(range(world), range(len(chunks))):
            owner, last = (rank - 1 - step) % world, step == world - 1
            rows = Rows(owner * rows_per_rank + chunks[chunk].first, chunks[chunk].count)
            if rows.first >= sums.shape[0]:
                continue
            slot, moving = owner * len(chunks) + chunk, rows.of(sums)
            if step > 0:
                parts.wait_arrival(slot, before)
            multiply(rows, step > 0, last)
            if not asked:
                parts.wait_entered(following, 1)
                asked = True
            engine.follow()
            if not last:
                engine.put(moving, moving, following)
                parts.flag(slot, following)
            elif everywhere:
                engine.put_to_all(moving)
