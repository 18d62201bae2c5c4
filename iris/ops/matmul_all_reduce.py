"""Matmul + all-reduce: each rank has a part of K; the products are summed, and all ranks end up with the whole sum.

Unfused::

    output = A @ B
    torch.distributed.all_reduce(output)
    output += bias

Algorithms (:mod:`iris.ops.reduction` has the signals of ``two_shot``, ``copy_engine`` and ``atomic``). "When it wins"
was measured in bf16 on 2, 4 and 8 × H200 and on two H100s, 2026-11-21 to 30.

**two_shot**: the tiles are dealt to the ranks. The epilogue stores every finished tile into a slot at its owner. The
owner adds the others' parts to its own, in float32 and in rank order, and stores the sum into every rank's output.
``num_rounds`` rounds spread these stores over the matmul; a rank's own tiles come one round later than the others'.
When it wins: outputs of more than a few hundred KiB; each rank receives about twice the output. In one round, few tiles
and their sums travel as words to inboxes, as in ``one_shot``; it then wins from 32 rows on 4 ranks, or 16 rows of wide
matrices.

**copy_engine**: as ``two_shot``, but ranks own rows, and the copy engine moves tiles and results, in ``num_chunks``
chunks for each rank. M must be a multiple of the number of ranks. When it wins: outputs of a few MiB per rank and more,
whose matmul is long compared with the transfer (8192×8192×29568 on 4 × H200, 2026-11-21).

**ring**: the library's matmul, once per chunk of an owner's rows. Each adds to the sum that has come from the rank
before, and the new sum goes to the next rank; the owner's sum goes to all. The copy engine carries the sums
(:mod:`iris.ops.decomposed`); they travel in the output itself, and need no other memory. Each rank rounds the sum, and
cuBLAS mostly a 16-bit product, too. When it wins: where the links take far longer than the matmul. ``num_chunks=2``
lets one chunk travel while the other is computed; with 1 nothing overlaps.

**decomposed**: the library's matmul, once per chunk of an owner's rows, or, with ``owners_per_matmul``, once for the
rows of so many owners, which are adjacent in a chunk. The copy engine carries each product to its owner. There, a
kernel sums the parts of a chunk after the first matmul of the next chunk, and the copy engine carries the sum to all;
ranks are brought level before it does. The sum of the last chunk is stored at all ranks by the kernel that computes it.
When it wins: the matmul takes about as long as the transfer, or longer; in chunks, where one is enough to fill the
device.

**one_shot**: the epilogue stores every finished tile as words into an inbox at every peer, and sums all ranks' parts as
they arrive; a word itself shows that it has arrived. This takes one kernel, and one trip over the link. When it wins:
few rows, where these two count, and the library's matmul reads B no faster. Larger outputs, for which words would take
longer than flags, stay in slots in their own rank's memory; the rank flags them at all peers, which read them.

**atomic**: as ``two_shot``, but tiles are added to one float32 sum at the owner. **Not deterministic**: the order of
the sum depends on timing. All ranks still end up with the same bits. When it wins: memory is short.

**low_latency**: ``torch.matmul``, then a kernel that exchanges the parts through inboxes (:mod:`iris.ops.exchange`).
When it wins: few rows, as in decoding.

**low_latency_two_shot**: the same in two hops: each rank sums a part of the rows, and sends the sum to every rank.
Each rank receives about twice the output, not (world_size - 1) times, and sums a part of the rows, not all.
When it wins: about 512 rows on 2 ranks, 64 to 1024 on 4, up to 1024 on 8.

**baseline**: ``torch.matmul``, then the collective: what the others are measured against, and what "auto" picks where
they lose.

On exit the ranks meet, and every output is complete. In ``one_shot`` and ``two_shot`` by words, ``low_latency`` and
``low_latency_two_shot`` they do not meet: each rank waits for all that its own output needs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from iris.context import Iris
from iris.device import handle as handles
from iris.device import schedule
from iris.device.chunk import counted_after
from iris.device.packing import packed, unpacked
from iris.device.peer import translate
from iris.device.sync import everyone, signal_all, wait_all
from iris.device.tile import (
    Tile,
    finished,
    local_sink,
    peer_at,
    slot_pointers,
    store_everywhere,
    tile_mask,
    tile_pointers,
)
from iris.device.words import store_words, take_words
from iris.errors import ArgumentError, ShapeError
from iris.ops.algorithms import ALL_REDUCE
from iris.ops.choice import resolve
from iris.ops.config import FusedConfig
from iris.ops.copies import column_major
from iris.ops.operands import (
    bias_kind,
    check_operands,
    check_rows_of_b,
    check_shape,
    check_symmetric,
    has_contiguous_rows,
    without_rows,
)
from iris.ops.plan import Plan
from iris.ops.problem import Problem
from iris.ops.reduction import (
    SumCall,
    added_after,
    collected,
    collected_sum,
    deliver,
    deliver_add,
    delivered_after,
)
from iris.ops.replay import replayed
from iris.ops.room import memory_of
from iris.ops.words import sent_in_words, word_dtype
from iris.ops.workspace import FusedWorkspace
from iris.trace import Trace, trace_of

OP = ALL_REDUCE


@triton.jit
def two_shot_sink(handle, c, slots, acc, bias_ptr, tile, flags, epoch, SITE: tl.constexpr, BIAS: tl.constexpr):
    """Send a tile to its owner; sum up this rank's own tiles, and store them at all ranks."""
    if tile.shard == handles.rank(handle):
        total = collected(handle, slots, acc, tile, flags, epoch, SITE)
        value = finished(total, bias_ptr, tile, c.ptr.dtype.element_ty, BIAS)
        store_everywhere(handle, c, value, tile)
    else:
        deliver(handle, slots, acc.to(c.ptr.dtype.element_ty), tile)


@triton.jit
def atomic_sink(handle, c, slots, acc, bias_ptr, tile, flags, epoch, SITE: tl.constexpr, BIAS: tl.constexpr):
    """As :func:`two_shot_sink`, but add a tile to the one sum at its owner."""
    if tile.shard == handles.rank(handle):
        total = collected_sum(handle, slots, acc, tile, flags, SITE)
        value = finished(total, bias_ptr, tile, c.ptr.dtype.element_ty, BIAS)
        store_everywhere(handle, c, value, tile)
    else:
        deliver_add(handle, slots, acc, tile)


@triton.jit
def one_shot_sink(handle, c, slots, acc, bias_ptr, tile, flags, epoch, SITE: tl.constexpr, BIAS: tl.constexpr):
    """Store the tile into a slot in this rank's memory, and flag it at all ranks; then store the sum of all ranks'
    tiles into this rank's output.

    For one tile, all ranks begin the sum with the same rank's part, so that they get the same bits. For the next tile
    they begin with another rank's, so that not all programs load from one rank at the same time."""
    me, world = handles.rank(handle), handles.world_size(handle)
    peers, valid = everyone(handle)
    mine = slot_pointers(slots.incoming, 0, tile, acc.shape[0], acc.shape[1])
    tl.store(mine, acc.to(slots.incoming.dtype.element_ty))
    signal_all(flags.ready + me * flags.chunks + tile.index, epoch, peers, valid, handle)
    wait_all(flags.ready + peers * flags.chunks + tile.index, epoch, peers, valid, handle, SITE)
    total = tl.zeros_like(acc)
    for step in range(world):
        total += tl.load(translate(handle, mine, (tile.index + step) % world)).to(acc.dtype)
    local_sink(handle, c, slots, total, bias_ptr, tile, flags, epoch, SITE, BIAS)


class Inbox(NamedTuple):
    """Room for every rank's tiles as words, in two halves of ``half`` words. Calls alternate between the halves, for
    the reason given in :mod:`iris.ops.exchange`."""

    words: Any
    half: Any


@triton.jit
def _inbox_words(inbox, ptr, slot, tile, epoch, BLOCK_M: tl.constexpr, WORDS_N: tl.constexpr):
    """Pointers to the words of slot number ``slot`` for a tile, in the inbox at ``ptr``."""
    return slot_pointers(ptr + (epoch & 1).to(tl.int64) * inbox.half, slot, tile, BLOCK_M, WORDS_N)


@triton.jit
def _send(handle, inbox, peer, slot, tile, data, epoch):
    """Store ``data``, already :func:`packed`, into a slot of a peer's inbox."""
    there = translate(handle, inbox.words, peer)
    words = _inbox_words(inbox, there, slot, tile, epoch, data.shape[0], data.shape[1])
    store_words(words, data, tile.row_mask[:, None])


@triton.jit
def _take(
    handle, inbox, peer, slot, tile, epoch, dtype: tl.constexpr, SITE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Wait for what ``peer`` sends into a slot of this rank's inbox, and return it."""
    WORDS_N: tl.constexpr = BLOCK_N * dtype.primitive_bitwidth // 32
    words = _inbox_words(inbox, inbox.words, slot, tile, epoch, BLOCK_M, WORDS_N)[None, :, :]
    peers = tl.full((1,), 0, tl.int32) + peer
    return tl.reshape(
        unpacked(take_words(words, epoch, peers, tile.row_mask[None, :, None], handle, SITE), dtype), (BLOCK_M, BLOCK_N)
    )


@triton.jit
def one_shot_words_sink(handle, c, slots, acc, bias_ptr, tile, flags, epoch, SITE: tl.constexpr, BIAS: tl.constexpr):
    """As :func:`one_shot_sink`, but tiles travel as words into an inbox at every peer; the sum is in rank order."""
    me, world = handles.rank(handle), handles.world_size(handle)
    dtype: tl.constexpr = c.ptr.dtype.element_ty
    value = acc.to(dtype)
    data = packed(value)
    for step in range(1, world):
        _send(handle, slots, (me + step) % world, me, tile, data, epoch)
    total = tl.zeros_like(acc)
    for source in range(world):
        if source == me:
            total += value.to(acc.dtype)
        else:
            part = _take(handle, slots, source, source, tile, epoch, dtype, SITE, acc.shape[0], acc.shape[1])
            total += part.to(acc.dtype)
    local_sink(handle, c, slots, total, bias_ptr, tile, flags, epoch, SITE, BIAS)


@triton.jit
def two_shot_words_sink(handle, c, slots, acc, bias_ptr, tile, flags, epoch, SITE: tl.constexpr, BIAS: tl.constexpr):
    """As :func:`two_shot_sink`, but parts and sums travel as words: parts to the owner's inbox, then sums to every
    rank's inbox, in the slots after those of the parts.

    A program waits for the sum of its tile before it goes on. This cannot deadlock, as all ranks compute the same tiles
    in the same order: the first tile whose sum is missing needs only parts that programs are computing now."""
    me, world = handles.rank(handle), handles.world_size(handle)
    dtype: tl.constexpr = c.ptr.dtype.element_ty
    owner, index, each = tile.index % world, tile.index // world, tl.cdiv(tile.per_shard, world)
    owned = Tile(owner, index, each, tile.top, tile.rows, tile.cols, tile.row_mask, tile.col_mask)
    if owner == me:
        for other in range(world - 1):
            source = other + tl.where(other < me, 0, 1)
            part = _take(handle, slots, source, source, owned, epoch, dtype, SITE, acc.shape[0], acc.shape[1])
            acc += part.to(acc.dtype)
        value = finished(acc, bias_ptr, tile, dtype, BIAS)
        data = packed(value)
        for step in range(1, world):
            _send(handle, slots, peer_at(handle, step, index), world + owner, owned, data, epoch)
    else:
        _send(handle, slots, owner, me, owned, packed(acc.to(dtype)), epoch)
        value = _take(handle, slots, owner, world + owner, owned, epoch, dtype, SITE, acc.shape[0], acc.shape[1])
    tl.store(tile_pointers(c, c.ptr, tile.rows, tile.cols), value, mask=tile_mask(tile))


@triton.jit
def copied_sink(handle, c, slots, acc, bias_ptr, tile, flags, epoch, SITE: tl.constexpr, BIAS: tl.constexpr):
    """As :func:`two_shot_sink`, but the copy engine carries parts to the owner, and sums to all ranks."""
    if tile.shard == handles.rank(handle):
        total = collected(handle, slots, acc, tile, flags, epoch, SITE)
        local_sink(handle, c, slots, total, bias_ptr, tile, flags, epoch, SITE, BIAS)
    else:
        deliver(handle, slots, acc.to(c.ptr.dtype.element_ty), tile)


@replayed
def matmul_all_reduce(
    ctx: Iris,
    output: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    config: FusedConfig | str | None = None,
    workspace: FusedWorkspace | None = None,
    trace: bool | Trace = False,
) -> torch.Tensor:
    """``output = sum over ranks of A @ B, + bias`` on all ranks, the same bits on each, except for the bits of NaNs.

    Args:
        output: [M, N] on the symmetric heap, at one place and with the same strides on all ranks, rows contiguous for
            ``copy_engine``, ``decomposed`` and ``ring``; not in memory of another operand; in A's dtype, or for 8-bit A
            as for :func:`iris.ops.all_gather_matmul`.
        A: [M, K / world_size], this rank's columns; any strides; Iris's own kernel copies it first if its rows are not
            contiguous.
        B: [K / world_size, N], this rank's rows, in A's dtype; any strides, its rows contiguous on all
            ranks or on none.
        bias: [N] per column, or [M, 1] per row; in output's dtype, equal on all ranks, added once, to the sum.
        scale_a, scale_b: for int8 and fp8: of this rank's product, applied before the sum; float32, one number, or one
            for each row of A, [M] or [M, 1], and for each column of B, [N] or [1, N]; or for fp8 one for each block of
            128, counted from this rank's first column of A on, as for :func:`iris.ops.all_gather_matmul`.
        config, workspace, trace: as for :func:`iris.ops.all_gather_matmul`.

    Returns:
        ``output``.

    Raises:
        ShapeError, DTypeError, PlacementError, ArgumentError: before anything is launched.
        ContextError: the context is closed, belongs to a parent process, or a call on it broke off.
        RankMismatch: in a call that is new to all ranks, the ranks differ in problem, config, workspace, or the place
            of an operand that peers touch.
        HeapError, CaptureError: the call needs new memory, but the heap has no room, or a graph is being captured.
        WaitTimeout, PeerDied: from an earlier kernel of this context, or while ranks compare a new call.

    Sync: on the current stream. All ranks must call it, in the same order. When it is done on this rank's stream,
        this rank's output is complete; no barrier is needed between calls.
    """
    ctx.check(OP)
    scales = check_operands(ctx, OP, output, ("A", A), B, bias, scale_a, scale_b)
    world, (m, k), n = ctx.world_size, A.shape, B.shape[1]
    check_rows_of_b(OP, B, k, output.shape[1])
    check_shape(OP, "output", output, (m, n), "rows of A, columns of B")
    check_symmetric(ctx, OP, "output", output, "Peers write it: make it with ctx.empty.")
    bias_is = bias_kind(OP, bias, m, n)
    problem = Problem(OP, m, n, k, A.dtype, world, None, not has_contiguous_rows(B), output.dtype)

    def refused(algorithm: str) -> ArgumentError | None:
        if algorithm == "copy_engine" and m % world:
            expected = f"rows that {world} ranks can share evenly, for copy_engine"
            return ShapeError(OP, "A", expected, (m, k), 'Take algorithm "two_shot", or pad A with zero rows.')
        return without_rows(OP, algorithm, output)

    chosen = resolve(
        ctx, problem, config, workspace, trace, refused=refused, shared={"output": output}, bias_is=bias_is,
        scales=scales,
    )  # fmt: skip
    ours, recorded = memory_of(ctx, problem, chosen, workspace), trace_of(ctx, OP, trace)
    call = _Call(ctx, problem, output, A, column_major(ours, problem, B), bias, bias_is, scales, chosen, recorded, ours)
    getattr(call, chosen.algorithm)()
    return output


class _Call(SumCall):
    """A method per algorithm."""

    def one_shot(self) -> None:
        if not self._sent_in_words(one_shot_words_sink):
            self.launch_reduction(Plan(self.site, sink=one_shot_sink))

    def two_shot(self) -> None:
        if not self._sent_in_words(two_shot_words_sink):
            self.launch_reduction(self._plan(two_shot_sink, delivered_after))

    def _sent_in_words(self, sink: Any) -> bool:
        """Launch the matmul with ``sink`` if tiles are to travel as words. Returns whether they are."""
        words = sent_in_words(self.problem, self.config) and not self.workspace.flagged
        if words:
            inbox, half = self.workspace.inbox(word_dtype(self.problem.output_dtype))
            self.launch(Plan(self.site, sink=sink, own_epochs=True), slots=Inbox(inbox, half))
        return words

    def atomic(self) -> None:
        self.launch_reduction(self._plan(atomic_sink, added_after))

    def copy_engine(self) -> None:
        config, world, rank, engine = self.config, self.ctx.world_size, self.ctx.rank, self.workspace.engine
        rows = self.problem.m // world
        _, chunk_blocks = config.cut_in_groups(rows, config.num_chunks)
        chunk_rows = chunk_blocks * config.block_size_m
        # A round is a chunk: this rank's tiles in it wait for whole chunks from the peers, which must compute them
        # before they wait themselves.
        chunk_tiles = config.tiles(min(chunk_rows, rows), self.problem.n)
        plan = Plan(
            self.site, schedule.own_last, sink=copied_sink, after=counted_after, eager=True, gate=True,
            shards=world, sharded=True, meet=False, per_round=chunk_tiles,
        )  # fmt: skip
        sums, mine = self.reduction(plan, chunk_tiles), self.output[rank * rows :][:rows]

        def spread(chunk: int) -> None:
            done = sums.slots.done[rank * sums.plan.chunks + chunk :][:1]
            engine.wait(done)
            engine.put_to_all(mine[chunk * chunk_rows :][:chunk_rows])
            engine.clear(done)

        def copies() -> None:
            for chunk in range(sums.plan.chunks + 1):
                if chunk < sums.plan.chunks:
                    for step in range(1, world):
                        self.send_chunk(sums, (rank + step) % world, chunk)
                if chunk > 0:
                    spread(chunk - 1)

        engine.beside(lambda: self.launch(sums.plan, slots=sums.slots), copies, self.decomposition().meet)

    def decomposed(self) -> None:
        self.sum_by_chunks(self.config.cut(self.rows_per_rank), everywhere=True)

    def ring(self) -> None:
        self.sum_in_ring(self.output, everywhere=True)

    def low_latency(self) -> None:
        self.exchanged(split=False)

    def low_latency_two_shot(self) -> None:
        self.exchanged(split=True)

    def baseline(self) -> None:
        self.summed(everywhere=True)

    def _plan(self, sink: Any, after: Any) -> Plan:
        return Plan(
            self.site, schedule.dealt, sink=sink, after=after, gate=True, shards=self.ctx.world_size,
            rounds=self.config.num_rounds,
        )  # fmt: skip
