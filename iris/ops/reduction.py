"""How the tiles of a sum over ranks come together: what matmul + reduce-scatter and matmul + all-reduce share.

Every tile has an owner, which adds up all ranks' parts of it. The other ranks hand their parts over in one of two
ways:

- ``deliver``: the program stores the finished tile into its rank's slot at the owner, and flags it. Or it leaves the
  tile in an outgoing slot in its own rank's memory: the copy engine waits until a chunk of tiles is complete, copies it
  into the slots at the owner, and flags it, so that no SM waits for the link.
- ``deliver_add``: the program adds the tile to the one sum at the owner.

In each round the owner computes its own tiles last. It adds what the others have sent to its own part in registers, and
finishes the tile.

Signals: a rank writes to others only when all have entered the call (``GATE``), and so have finished the call before.
Flags of arrived chunks take the call's epoch; a chunk is one tile, or, of the copy engine, several. For ``deliver_add``
each tile has a count of the sources that have added to it; when the owner takes the sum, it resets both to zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from iris.device import handle as handles
from iris.device.arch import copy_stages, store_own
from iris.device.chunk import counted_after
from iris.device.peer import translate
from iris.device.sync import others, signal, signal_add, wait, wait_all
from iris.device.tile import (
    Matrix,
    Slots,
    Tile,
    block_at,
    finished,
    slot_pointers,
    store_everywhere,
    tile_mask,
    tile_pointers,
    within_shard,
)
from iris.device.turnstile import coming_epoch, enter, leave, wait_all_entered
from iris.ops.call import OpCall
from iris.ops.decomposed import Landing, reduce_in_ring, wait_landed
from iris.ops.exchange import exchange
from iris.ops.launching import accumulator_of
from iris.ops.plan import Plan
from iris.ops.rows import Rows, chunks_of, owned_from, owner_groups, summing_step
from iris.ops.words import tiles_sent

_SUM_PROGRAMS = 4
"""Programs per SM of a kernel that only sums: enough loads at a time to keep the memory busy."""
_SUM_STAGES: tl.constexpr = tl.constexpr(3)
"""Stages of its loop over the parts, at most: more would need more shared memory than so many programs per SM have."""
_ADDED: tl.constexpr = tl.constexpr(2)
"""How much each added tile counts. Not 1: a wait for 1 has the longer time limit of a flag's first use, but every call
waits for these counts."""


@triton.jit
def deliver(handle, slots, value, tile):
    """Store ``value``, this rank's part of a tile, into its slot at the tile's owner, or, if there are outgoing slots,
    into the owner's of these, for the copy engine."""
    if slots.outgoing is None:
        there, slot = translate(handle, slots.incoming, tile.shard), handles.rank(handle)
    else:
        there, slot = slots.outgoing, tile.shard
    tl.store(slot_pointers(there, slot, tile, value.shape[0], value.shape[1]), value)


@triton.jit
def delivered_after(handle, slots, shard, index, per_shard, flags, epoch, SITE: tl.constexpr):
    """Flag a delivered tile at its owner."""
    me = handles.rank(handle)
    if shard != me:
        signal(flags.ready + me * flags.chunks + index, epoch, shard, handle)


@triton.jit
def kept_after(handle, slots, shard, index, per_shard, flags, epoch, SITE: tl.constexpr):
    """Count a tile that belongs to another rank and was left for the copy engine."""
    if shard != handles.rank(handle):
        counted_after(handle, slots, shard, index, per_shard, flags, epoch, SITE)


@triton.jit
def collected(handle, slots, acc, tile, flags, epoch, SITE: tl.constexpr):
    """``acc``, this rank's part of a tile that it owns, plus all other ranks' in rank order, once all have arrived."""
    me, world = handles.rank(handle), handles.world_size(handle)
    sources, valid = others(handle)
    ready = flags.ready + sources * flags.chunks + tile.index // flags.blocks_per_chunk
    wait_all(ready, epoch, sources, valid, handle, SITE)
    stages: tl.constexpr = copy_stages(slots.incoming.dtype.element_ty, acc.numel)
    for other in tl.range(world - 1, num_stages=stages):
        source = other + tl.where(other < me, 0, 1)
        acc += tl.load(slot_pointers(slots.incoming, source, tile, acc.shape[0], acc.shape[1])).to(acc.dtype)
    return acc


@triton.jit
def deliver_add(handle, slots, acc, tile):
    """Add ``acc``, this rank's part of a tile, to the sum at the tile's owner."""
    there = translate(handle, slots.incoming, tile.shard)
    tl.atomic_add(slot_pointers(there, 0, tile, acc.shape[0], acc.shape[1]), acc, sem="relaxed", scope="sys")


@triton.jit
def added_after(handle, slots, shard, index, per_shard, flags, epoch, SITE: tl.constexpr):
    """Count a tile that was added to the sum at its owner."""
    if shard != handles.rank(handle):
        signal_add(flags.ready + index, _ADDED, shard, handle)


@triton.jit
def collected_sum(handle, slots, acc, tile, flags, SITE: tl.constexpr):
    """``acc`` plus the sum of the other ranks' parts of a tile that this rank owns; resets that sum to zero."""
    me, world = handles.rank(handle), handles.world_size(handle)
    wait(flags.ready + tile.index, (world - 1) * _ADDED, (me + 1) % world, handle, SITE, counted=True)
    pointers = slot_pointers(slots.incoming, 0, tile, acc.shape[0], acc.shape[1])
    total = acc + tl.load(pointers)
    tl.debug_barrier()
    store_own(pointers, tl.zeros_like(acc))
    store_own(flags.ready + tile.index, 0)
    return total


@dataclass(frozen=True)
class Reduction:
    """How the tiles of one call are cut into chunks, and their memory. ``plan`` is the op's, with chunks filled in."""

    plan: Plan
    slots: Slots


@triton.jit(do_not_specialize=["chunk", "top", "first", "row_end", "rows_per_rank"])
def sum_kernel(
    handle, turnstile, ready, sent, chunk, own, partial, output, bias_ptr, top, first, row_end, N, rows_per_rank,
    SITE: tl.constexpr, LANDED: tl.constexpr, LAST: tl.constexpr, WHOLE: tl.constexpr, EVERYWHERE: tl.constexpr,
    BIAS: tl.constexpr, ACC_DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum rows ``first`` to ``row_end``, of the ``rows_per_rank`` that this rank owns, of all ranks' products, in rank
    order from this rank on.

    ``own`` is this rank's product, of all rows. ``partial`` is every rank's product, read at that rank. If ``LANDED``,
    it is this rank's memory with the others' parts for this rank, one below the other. ``LAST``: the call ends with
    this kernel, which waits for the others' products, or for their parts of ``chunk`` (:func:`wait_landed`); else they
    are there before it runs. ``top``: the first row of such a part, and of an output that has only this rank's rows.
    ``WHOLE``: the output has the rows of all ranks. ``EVERYWHERE``: the sum is stored into every rank's output, at the
    same rows; else only into this rank's.
    """
    me, world = handles.rank(handle), handles.world_size(handle)
    if LAST:
        if LANDED:
            epoch = coming_epoch(turnstile)
            wait_landed(handle, ready, sent, chunk, epoch, SITE)
        else:
            epoch = enter(turnstile, handle)
            wait_all_entered(turnstile, epoch, handle, SITE)
    across = tl.cdiv(N, BLOCK_N)
    for block in range(tl.program_id(0), tl.cdiv(max(row_end - first, 0), BLOCK_M) * across, tl.num_programs(0)):
        rows, cols, row_mask, col_mask = block_at(block, first, row_end, N, BLOCK_M, BLOCK_N)
        tile = Tile(me, block, 0, top, rows, cols, row_mask, col_mask)
        acc = tl.load(tile_pointers(own, own.ptr, rows, cols), mask=tile_mask(tile), other=0).to(ACC_DTYPE)
        stages: tl.constexpr = min(copy_stages(partial.ptr.dtype.element_ty, BLOCK_M * BLOCK_N), _SUM_STAGES)
        for step in tl.range(1, world, num_stages=stages):
            source = (me + step) % world  # ranks that are level load from different peers
            if LANDED:
                part = tile_pointers(partial, partial.ptr, rows - top + source * rows_per_rank, cols)
            else:
                part = tile_pointers(partial, translate(handle, partial.ptr, source), rows, cols)
            acc += tl.load(part, mask=tile_mask(tile), other=0).to(ACC_DTYPE)
        if not WHOLE:
            tile = within_shard(tile)
        value = finished(acc, bias_ptr, tile, output.ptr.dtype.element_ty, BIAS)
        if EVERYWHERE:
            store_everywhere(handle, output, value, tile)
        else:
            tl.store(tile_pointers(output, output.ptr, tile.rows, cols), value, mask=tile_mask(tile))
    if LAST:
        leave(turnstile, epoch, handle, SITE)


class SumCall(OpCall):
    """A call of an op that sums products over ranks: what the algorithms of both such ops need."""

    @property
    def rows_per_rank(self) -> int:
        """Rows that each rank owns; the last ones may have fewer."""
        return -(-self.problem.m // self.ctx.world_size)

    def reduction(self, plan: Plan, tiles_per_chunk: int = 1) -> Reduction:
        """Room for the tiles that others send and, for ``copy_engine``, for those that are still to be sent."""
        world = self.ctx.world_size
        summing, copying = self.config.algorithm == "atomic", self.config.algorithm == "copy_engine"
        dtype = accumulator_of(self.problem.output_dtype) if summing else self.problem.output_dtype
        slots, tiles = tiles_sent(self.problem, self.config)
        count, chunks = slots * tiles * self.config.tile_elements, -(-tiles // tiles_per_chunk)
        ours = self.workspace
        incoming = ours.staging[: count * dtype.itemsize].view(dtype)
        outgoing = ours.scratch("outgoing", count, dtype) if copying else None
        done = ours.scratch("done", world * chunks, torch.int32) if copying else None
        counts = world * chunks if copying else 0
        chunked = replace(plan, chunks=chunks, blocks_per_chunk=tiles_per_chunk, counts=counts)
        return Reduction(chunked, Slots(incoming, outgoing, done))

    def launch_reduction(self, plan: Plan) -> None:
        """The matmul kernel, with room for the tiles that others send."""
        sums = self.reduction(plan)
        self.launch(sums.plan, slots=sums.slots)

    def send_chunk(self, sums: Reduction, owner: int, chunk: int) -> None:
        """Let the copy engine hand a chunk of tiles over to its owner, once the chunk is complete."""
        plan, slots, engine, rank = sums.plan, sums.slots, self.workspace.engine, self.ctx.rank
        per_shard, tile = plan.tiles_per_shard(self.problem, self.config), self.config.tile_elements
        first = chunk * plan.blocks_per_chunk
        start, length = first * tile, min(plan.blocks_per_chunk, per_shard - first) * tile
        done, whole = slots.done[owner * plan.chunks + chunk :][:1], per_shard * tile
        engine.wait(done)
        engine.put(
            slots.outgoing[owner * whole + start :][:length], slots.incoming[rank * whole + start :][:length], owner
        )
        engine.put(done, self.workspace.ready[rank * plan.chunks + chunk :][:1], owner)
        engine.clear(done)

    def sum_in_ring(self, sums: torch.Tensor, *, everywhere: bool) -> None:
        """Multiply chunk by chunk, while sums travel through ``sums``, symmetric, to the rank that owns their rows
        (:func:`iris.ops.decomposed.reduce_in_ring`). ``everywhere``: ``sums`` is the whole output."""
        per_rank = self.rows_per_rank
        top = 0 if everywhere else self.ctx.rank * per_rank

        def multiply(rows: Rows, begun: bool, last: bool) -> None:
            mine = Rows(rows.first - top, rows.count)
            total, a = mine.of(self.output) if last else rows.of(sums), rows.of(self.a)
            bias = self.bias_of(mine) if last else None
            if not begun:
                self.multiply(total, a, bias, rows)
                return
            if bias is not None:
                torch.add(rows.of(sums), bias, out=total)
            elif last and not everywhere:
                total.copy_(rows.of(sums))
            self.add(total, a, rows)

        chunks = chunks_of(per_rank, self.config.num_chunks, self.config.block_size_m)
        reduce_in_ring(self.decomposition(), sums, chunks, per_rank, multiply, everywhere=everywhere)

    def sum_by_chunks(self, chunks: list[Rows], *, everywhere: bool) -> None:
        """Multiply by ``chunks`` of each rank's rows, and put each product to the rank that owns its rows. The owner
        sums a chunk beside the copies of the next one. A matmul computes the rows of ``owners_per_matmul`` ranks, where
        these rows are adjacent. ``everywhere``: sums go to all ranks in the end, so any rank may own any rows."""
        m, n, rank, world, rows = self.problem.m, self.problem.n, self.ctx.rank, self.ctx.world_size, self.rows_per_rank
        engine, parts = self.workspace.engine, self.decomposition()
        landings = parts.landings(len(chunks))
        incoming = self.workspace.staged(world * rows, n, self.output.dtype)
        product = self.workspace.scratch_matrix("product", m, n, self.output.dtype)

        def owned(owner: int, chunk: int) -> Rows:
            """The rows of a chunk that ``owner`` owns; the last ranks may have fewer rows, or none."""
            first = owned_from(chunks[chunk], owner, rows, world, everywhere=everywhere)
            return Rows(first, min(chunks[chunk].count, m - first))

        def compute(group: list[int], chunk: int) -> None:
            each = [owned(owner, chunk) for owner in group]
            first = min(those.first for those in each)
            together = Rows(first, sum(max(0, those.count) for those in each))
            if together.count > 0:
                self.multiply(together.of(product), together.of(self.a), None, together)
                engine.follow()
            for owner, those in zip(group, each, strict=True):
                if owner == rank:
                    continue
                if those.count > 0:
                    top = rank * rows + chunks[chunk].first
                    engine.put(those.of(product), Rows(top, those.count).of(incoming), owner)
                landings[chunk].copied(owner)  # even without rows: the owner waits for all ranks

        def finish_chunk(chunk: int) -> None:
            those = owned(rank, chunk)
            landing, top = landings[chunk], those.first - chunks[chunk].first
            landing.wait()
            if those.count > 0:
                self.sum(product, incoming, those, top, landing=landing, last=False, whole=everywhere)
            if everywhere:
                parts.keep_level(chunk)
                engine.follow()
                if those.count > 0:
                    engine.put_to_all(those.of(self.output))

        def finish() -> None:
            mine = owned(rank, len(chunks) - 1)
            top = mine.first - chunks[-1].first
            self.sum(product, incoming, mine, top, landing=landings[-1], everywhere=everywhere)

        # A peer whose part has arrived has entered the call, so its output may be written. Sums that are copied to
        # peers must have arrived there before any rank leaves.
        behind = everywhere and len(chunks) > 1
        with engine.running(last=finish if behind else None):
            for chunk in range(len(chunks)):
                groups = owner_groups(rank, world, self.config.owners(chunks, chunk, everywhere=everywhere))
                for step, group in enumerate(groups, 1):
                    compute(group, chunk)
                    if chunk > 0 and step == summing_step(len(groups), everywhere=everywhere):
                        finish_chunk(chunk - 1)
                landings[chunk].copied_all()
            if not behind:
                finish()

    def exchanged(self, *, split: bool) -> None:
        """Multiply, then exchange the products. ``split``: each rank gets its part of them, and sums it; with two hops
        the sum goes to all ranks. Else each rank gets and sums whole products."""
        m, n, blocks = self.problem.m, self.problem.n, self.blocks()
        product = self.workspace.scratch_matrix("product", m, n, self.output.dtype)
        self.multiply(product, self.a)
        exchange(
            self.ctx, self.workspace, blocks, product, self.output, self.site, split=split, total=True,
            bias=self.bias, bias_is=self.bias_is,
        )  # fmt: skip

    def summed(self, *, everywhere: bool) -> None:
        """Multiply, then sum by a collective: what the fused algorithms are measured against."""
        product = self.workspace.staged(self.problem.m, self.problem.n, self.output.dtype)
        self.multiply(product, self.a)
        top = self.ctx.rank * self.rows_per_rank
        mine = Rows(top, min(self.rows_per_rank, self.problem.m - top))
        self.sum(product, product, mine, top, everywhere=everywhere)

    def sum(
        self,
        own: torch.Tensor,
        partial: torch.Tensor,
        rows: Rows,
        top: int,
        *,
        landing: Landing | None = None,
        last: bool = True,
        whole: bool = False,
        everywhere: bool = False,
    ) -> None:
        """Sum ``rows``, which this rank owns, into the output: of this rank's product, ``own``, and the others' in
        ``partial``, symmetric, or, with ``landing``, their parts that land there. ``last``, ``whole``, ``everywhere``:
        see :func:`sum_kernel`."""
        blocks = -(-max(1, rows.count) // self.config.comm_block_m) * -(-self.problem.n // self.config.comm_block_n)
        # No program waits for a later one, so they need not all be resident.
        sum_kernel[(min(blocks, _SUM_PROGRAMS * self.programs),)](
            self.ctx.handle, self.workspace.turnstile, self.workspace.ready, landing and landing.sent,
            landing.chunk if landing else 0, Matrix(own, *own.stride()), Matrix(partial, *partial.stride()),
            Matrix(self.output, *self.output.stride()), self.bias, top, rows.first, rows.first + rows.count,
            self.problem.n, self.rows_per_rank, SITE=self.site, LANDED=landing is not None, LAST=last,
            WHOLE=whole or everywhere, EVERYWHERE=everywhere, BIAS=self.bias_is,
            ACC_DTYPE=tl.int32 if self.output.dtype == torch.int32 else tl.float32,
            BLOCK_M=self.config.comm_block_m, BLOCK_N=self.config.comm_block_n, num_warps=8,
        )  # fmt: skip
