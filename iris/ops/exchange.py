"""Collectives of a few microseconds, for the small matrices of decoding: what ``low_latency`` runs before or after the
library's matmul.

A program stores its share of this rank's part into an *inbox* at every peer, and takes what has come into its own.
There is no handshake before and no barrier after, so data crosses the link once: the one-shot scheme of NCCL's LL
protocols and of the custom all-reduces of serving engines. There are two ways to know what has come:

* *words* (:func:`iris.device.words.store_words`), for little: each says that it has come, so nothing is waited for
  between data and flag, 2 µs of 6. A word has four bytes of data; of floats it is no larger than that, else twice.
* *flags*, one per program, which are set behind the data.

The two-shot scheme sends fewer bytes, in two hops: each rank sums a part of the rows, and sends the sum to every rank.

An inbox has two halves, which calls take in turns. A rank that is in call n has had data from every peer in call
n - 1; each peer had by then finished call n - 2, the last to read the half that is now written. Behind flags a sum goes
straight to a peer's output, when that peer's part of it has come: the peer is then in the same call, and what read its
output is over. In words it goes to the inbox, which has room for parts and for sums.

In words there may be more programs than are resident at once. Each sends all it has before it waits, and waits only for
what programs of its own number send. GPUs start programs in order (no vendor promises it): of those that have not ended
the first has begun on every rank, and it ends, as its peers have sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from iris.context import Iris
from iris.device import handle as handles
from iris.device.handle import MAX_RANKS
from iris.device.packing import packed, unpacked
from iris.device.peer import translate
from iris.device.sync import signal_all, wait_all
from iris.device.tile import Matrix, Tile, block_at, finished, slot_pointers, tile_mask, tile_pointers
from iris.device.turnstile import end_own_epoch, own_epoch
from iris.device.words import store_words, take_words
from iris.ops.rows import columns_in_vectors
from iris.ops.words import in_words, word_dtype, words_nbytes
from iris.ops.workspace import FusedWorkspace

MAX_PROGRAMS = 512
FLAGS = 2 * MAX_RANKS.value * MAX_PROGRAMS
"""Flags of a workspace: one per rank and program, and as many for sums."""
_MIN_ELEMENTS, _MAX_ELEMENTS = 512, 8192
"""Elements that a program moves at a time, behind flags."""
_MIN_WORDS, _MAX_WORDS = 256, 512
"""Words of a block: the shorter one, until that makes more than one block for each program, or two where an SM has one
program. Of 128 to 4096 words the fastest on 2 × H200, 2026-11-27."""
_VECTOR_NBYTES, _WORDS_PER_WARP, _WARPS = 16, 128, 4
"""A thread takes four words at a time, and a program has no more threads (of NVIDIA's warps) than take a block once.
Then each has the words of all ranks in the same place, and sums them by itself; else threads exchange them through
shared memory, which takes up to 2 µs."""
_MAX_WORDS_AWAITED = 4096
"""Words that a program waits for at a time, from all ranks."""
_PROGRAMS_PER_SM = {2: 6, 4: 3, 8: 2}
"""By ranks, or the next power of two: with the registers that the words of all ranks take, programs then leave room for
one of another call, on another stream, which they might have to wait for."""
_PROGRAMS_PER_CU = {2: 4, 4: 2}
"""The same on AMD, where registers are not bounded."""
FREE_RANKS = 4
"""Of so few the words need no bound to leave that room, if rows have vectors."""
_REGISTERS = 1 << 16
"""Of an SM of any NVIDIA GPU since 2014."""
_MAX_ROWS = 16
"""Of a block behind flags; one of words is a part of one row, or a row of no less than a quarter of a block."""
_WORDS_AT_A_TIME = 16
"""A row is a multiple of so many words, or whole blocks: that lets Triton store and load vectors."""


@dataclass(frozen=True)
class Blocks:
    """How a part of ``rows`` × ``cols`` is cut: ``count`` blocks of ``block_m`` × ``block_n``; ``words``: these travel
    as words, not behind flags; ``hops``: parts to all (1), or parts to owners, and their sums to all (2);
    ``num_warps``: of a program that moves them."""

    rows: int
    cols: int
    block_m: int
    block_n: int
    words: bool
    hops: int
    num_warps: int

    @property
    def count(self) -> int:
        return -(-self.rows // self.block_m) * -(-self.cols // self.block_n)

    def words_n(self, dtype: torch.dtype) -> int:
        """Words that carry a row: of its last block no others are sent."""
        words = -(-self.cols * dtype.itemsize // (4 * _WORDS_AT_A_TIME)) * _WORDS_AT_A_TIME
        return min(words, -(-self.cols // self.block_n) * self.block_n * dtype.itemsize // 4)

    @property
    def num_flags(self) -> int:
        """Flags of the workspace. So a workspace that has them is for flags, and nothing but words is ever stored where
        words are waited for."""
        return 0 if self.words else FLAGS

    def nbytes(self, dtype: torch.dtype) -> int:
        """Room for one rank's blocks, as they travel."""
        elements = self.count * self.block_m * self.block_n
        return words_nbytes(elements, dtype) if self.words else elements * dtype.itemsize

    def inbox_nbytes(self, world_size: int, dtype: torch.dtype) -> int:
        """Both halves, each with room for every rank's blocks, in words for their sums, too."""
        return 2 * world_size * (self.hops if self.words else 1) * self.nbytes(dtype)


def blocks_of(
    part: Sequence[int], dtype: torch.dtype, world_size: int, num_sms: int, hops: int = 1, by_flags: bool = False
) -> Blocks:
    """A part of this shape in few blocks per program, of whole vectors; in words if it is small enough, unless it is to
    go ``by_flags``."""
    rows, cols = part
    nbytes = rows * cols * dtype.itemsize
    wide = max(_VECTOR_NBYTES // dtype.itemsize, triton.next_power_of_2(cols))
    if not by_flags and in_words(nbytes * (world_size - 1), dtype, world_size, hops):
        each = 4 // dtype.itemsize
        most = min(_MAX_WORDS, _MAX_WORDS_AWAITED // triton.next_power_of_2(world_size)) * each
        share = _share(rows * cols, num_sms * max(2, _programs_per_sm(world_size)), _MIN_WORDS * each, most)
        block_n = share if 2 * wide >= share else wide
        num_warps = max(1, min(_WARPS, share // each // _WORDS_PER_WARP))
        return Blocks(rows, cols, share // block_n, block_n, True, hops, num_warps)
    share = _share(rows * cols, num_sms, _MIN_ELEMENTS, _MAX_ELEMENTS)
    block_n = min(share // min(_MAX_ROWS, triton.next_power_of_2(rows)), wide)
    return Blocks(rows, cols, share // block_n, block_n, False, hops, _WARPS)


def _programs_per_sm(world_size: int, backend: str = "cuda") -> int:
    """At most, of a kernel that exchanges words: while some wait, others send or sum."""
    most = _PROGRAMS_PER_CU if backend == "hip" else _PROGRAMS_PER_SM
    return most.get(triton.next_power_of_2(world_size), 1)


def registers(num_warps: int, world_size: int) -> int:
    """The most that a thread of an exchange in words may take, for an SM to have room for one program more."""
    threads = 32 * num_warps * (_programs_per_sm(world_size) + 1)
    return min(255, _REGISTERS // threads // 8 * 8)


def _in_vectors(blocks: Blocks, *matrices: torch.Tensor) -> bool:
    """Whether Triton knows that rows are made of whole vectors."""
    return blocks.cols % 16 == 0 and all(one.stride(0) % 16 == 0 and one.stride(1) == 1 for one in matrices)


def _share(elements: int, blocks: int, least: int, most: int) -> int:
    """Of so many elements what each of ``blocks`` blocks gets: a power of two, within bounds."""
    share: int = triton.next_power_of_2(math.ceil(elements / blocks))
    return min(most, max(least, share))


@triton.jit
def _block(me, block, blocks, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block number ``block`` of a part, as a tile."""
    r, c, row_mask, col_mask = block_at(block, 0, rows, cols, BLOCK_M, BLOCK_N)
    return Tile(me, block, blocks, 0, r, c, row_mask, col_mask)


@triton.jit
def _block_below(tile, top, all_rows):
    """The block ``tile`` of a part that begins at row ``top``, as a tile of the whole."""
    rows = tile.rows + top
    here = tile.row_mask & (rows < all_rows)
    return Tile(tile.shard, tile.index, tile.per_shard, 0, rows, tile.cols, here, tile.col_mask)


@triton.jit
def _part_for(peer, mine, tile, rows, all_rows, SPLIT: tl.constexpr):
    """What ``peer`` is to get of the block ``tile``; nothing but zeros lies outside."""
    r = tile.rows + peer * rows if SPLIT else tile.rows
    here = tile_mask(tile) & (r < all_rows)[:, None]
    return tl.load(tile_pointers(mine, mine.ptr, r, tile.cols), mask=here, other=0.0)


@triton.jit(do_not_specialize=["rows", "blocks", "all_rows"])
def exchange_kernel(
    handle,
    epochs,
    ready,
    inbox,
    half,
    mine,
    result,
    bias_ptr,
    rows,
    cols,
    blocks,
    all_rows,
    SITE: tl.constexpr,
    WORLD: tl.constexpr,
    SPLIT: tl.constexpr,
    TOTAL: tl.constexpr,
    EVERYWHERE: tl.constexpr,
    BY_ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    FLAGS_EACH: tl.constexpr,
    ROWS_IN_VECTORS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Every rank's part of ``rows`` × ``cols`` to every rank, in ``blocks`` blocks.

    ``SPLIT``: ``mine`` holds a part for each rank, one below the other, ``all_rows`` in all, so that the last may be
    shorter; else the same part goes to all. ``TOTAL``: the parts are summed in rank order, and the bias added; else
    they stand below (``BY_ROWS``) or beside each other. ``EVERYWHERE``: the sum goes to every rank's ``result``,
    symmetric, at the rows that the part has there. ``ROWS_IN_VECTORS``: rows are multiples of 16, which matters where
    columns are contiguous.
    """
    if ROWS_IN_VECTORS:  # Triton knows it then
        rows, all_rows = rows // 16 * 16, all_rows // 16 * 16
    epoch = own_epoch(epochs)
    me, program = handles.rank(handle), tl.program_id(0)
    inbox += (epoch & 1).to(tl.int64) * half
    for block in range(program, blocks, tl.num_programs(0)):
        tile = _block(me, block, blocks, rows, cols, BLOCK_M, BLOCK_N)
        for step in tl.static_range(WORLD):
            peer = (me + step) % WORLD
            part = _part_for(peer, mine, tile, rows, all_rows, SPLIT)
            tl.store(slot_pointers(translate(handle, inbox, peer), me, tile, BLOCK_M, BLOCK_N), part)
    if program < blocks:
        lanes = tl.arange(0, MAX_RANKS)
        others = (lanes < WORLD) & (lanes != me)
        peers = tl.where(others, lanes, me)
        signal_all(ready + me * FLAGS_EACH + program, epoch, peers, others, handle)
        wait_all(ready + peers * FLAGS_EACH + program, epoch, peers, others, handle, SITE)
        for block in range(program, blocks, tl.num_programs(0)):
            tile = _block(me, block, blocks, rows, cols, BLOCK_M, BLOCK_N)
            if TOTAL:
                below = _block_below(tile, me * rows, all_rows) if EVERYWHERE else tile
                acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC_DTYPE)
                for source in tl.static_range(WORLD):
                    part = tl.load(slot_pointers(inbox, source, tile, BLOCK_M, BLOCK_N))
                    acc += part.to(ACC_DTYPE)
                value = finished(acc, bias_ptr, below, result.ptr.dtype.element_ty, BIAS)
                for step in tl.static_range(WORLD if EVERYWHERE else 1):
                    there = translate(handle, result.ptr, (me + step) % WORLD) if EVERYWHERE else result.ptr
                    tl.store(tile_pointers(result, there, below.rows, below.cols), value, mask=tile_mask(below))
            else:
                for source in tl.static_range(WORLD):
                    value = tl.load(slot_pointers(inbox, source, tile, BLOCK_M, BLOCK_N))
                    r = tile.rows + source * rows if BY_ROWS else tile.rows
                    c = tile.cols if BY_ROWS else tile.cols + source * cols
                    tl.store(tile_pointers(result, result.ptr, r, c), value, mask=tile_mask(tile))
        if EVERYWHERE:
            sums = ready + WORLD * FLAGS_EACH
            signal_all(sums + me * FLAGS_EACH + program, epoch, peers, others, handle)
            wait_all(sums + peers * FLAGS_EACH + program, epoch, peers, others, handle, SITE)
    end_own_epoch(epochs, epoch, tl.num_programs(0))


@triton.jit
def _words_of(
    inbox, first, tile, epoch, handle, SITE: tl.constexpr, WORLD: tl.constexpr, SOURCES: tl.constexpr,
    BLOCK_M: tl.constexpr, WORDS_N: tl.constexpr,
):  # fmt: skip
    """What every rank has sent of a block of words, by rank, when it has come; from slot ``first`` of the inbox on."""
    sources = tl.arange(0, SOURCES)
    slots = slot_pointers(inbox, first, tile, BLOCK_M, WORDS_N)
    slots = slots[None, :, :] + (sources * tile.per_shard).to(tl.int64)[:, None, None] * (BLOCK_M * WORDS_N)
    here = tile_mask(tile)[None, :, :] & (sources < WORLD)[:, None, None]
    return take_words(slots, epoch, sources, here, handle, SITE)


@triton.jit
def _store_parts(result, parts, tile, rows, cols, all_rows, WORLD: tl.constexpr, BY_ROWS: tl.constexpr):
    """Every rank's part of a block, below (``BY_ROWS``) or beside each other, ``all_rows`` at most."""
    sources = tl.arange(0, parts.shape[0])
    r, c = tile.rows[None, :, None].to(tl.int64), tile.cols[None, None, :].to(tl.int64)
    if BY_ROWS:
        r += (sources * rows)[:, None, None]
    else:
        c += (sources * cols)[:, None, None]
    mask = tile_mask(tile)[None, :, :] & (sources < WORLD)[:, None, None] & (r < all_rows)
    tl.store(result.ptr + r * result.row_stride + c * result.col_stride, parts, mask=mask)


@triton.jit(do_not_specialize=["rows", "blocks", "all_rows"])
def exchange_words_kernel(
    handle,
    epochs,
    inbox,
    half,
    mine,
    result,
    bias_ptr,
    rows,
    cols,
    blocks,
    all_rows,
    words_n,
    programs,
    SITE: tl.constexpr,
    WORLD: tl.constexpr,
    SPLIT: tl.constexpr,
    TOTAL: tl.constexpr,
    EVERYWHERE: tl.constexpr,
    BY_ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    SOURCES: tl.constexpr,
    PACK: tl.constexpr,
    ROWS_IN_VECTORS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """As :func:`exchange_kernel`, but the parts travel as words, with ``PACK`` elements in each, ``words_n`` for a row,
    and are summed in an order of the compiler's, the same on all ranks. ``SOURCES``: the power of two from ``WORLD``
    on. Sums for every rank travel as words, too, to the slots behind those of the parts. A call has up to ``programs``
    programs."""
    if ROWS_IN_VECTORS:
        rows, all_rows = rows // 16 * 16, all_rows // 16 * 16
    epoch = own_epoch(epochs)
    me, program = handles.rank(handle), tl.program_id(0)
    inbox += (epoch & 1).to(tl.int64) * half
    dtype: tl.constexpr = mine.ptr.dtype.element_ty
    WORDS_N: tl.constexpr = BLOCK_N // PACK
    for block in range(program, blocks, tl.num_programs(0)):
        tile = _block(me, block, blocks, rows, cols, BLOCK_M, BLOCK_N)
        words = _block(me, block, blocks, rows, words_n, BLOCK_M, WORDS_N)
        here = tile_mask(words)
        for step in tl.static_range(WORLD):
            peer = (me + step) % WORLD
            part = packed(_part_for(peer, mine, tile, rows, all_rows, SPLIT))
            store_words(slot_pointers(translate(handle, inbox, peer), me, words, BLOCK_M, WORDS_N), part, here)
    for block in range(program, blocks, tl.num_programs(0)):
        tile = _block(me, block, blocks, rows, cols, BLOCK_M, BLOCK_N)
        words = _block(me, block, blocks, rows, words_n, BLOCK_M, WORDS_N)
        came = _words_of(inbox, 0, words, epoch, handle, SITE, WORLD, SOURCES, BLOCK_M, WORDS_N)
        parts = unpacked(came, dtype)
        if TOTAL:
            acc = tl.sum(parts.to(ACC_DTYPE), 0)
            if EVERYWHERE:
                below = _block_below(tile, me * rows, all_rows)
                value = packed(finished(acc, bias_ptr, below, result.ptr.dtype.element_ty, BIAS))
                for step in tl.static_range(WORLD):
                    there = translate(handle, inbox, (me + step) % WORLD)
                    store_words(slot_pointers(there, WORLD + me, words, BLOCK_M, WORDS_N), value, tile_mask(words))
            else:
                value = finished(acc, bias_ptr, tile, result.ptr.dtype.element_ty, BIAS)
                tl.store(tile_pointers(result, result.ptr, tile.rows, tile.cols), value, mask=tile_mask(tile))
        else:
            _store_parts(result, parts, tile, rows, cols, rows * WORLD, WORLD, BY_ROWS)
    if EVERYWHERE:
        for block in range(program, blocks, tl.num_programs(0)):
            tile = _block(me, block, blocks, rows, cols, BLOCK_M, BLOCK_N)
            words = _block(me, block, blocks, rows, words_n, BLOCK_M, WORDS_N)
            came = _words_of(inbox, WORLD, words, epoch, handle, SITE, WORLD, SOURCES, BLOCK_M, WORDS_N)
            _store_parts(result, unpacked(came, dtype), tile, rows, cols, all_rows, WORLD, True)
    end_own_epoch(epochs, epoch, programs)


def exchange(
    ctx: Iris,
    workspace: FusedWorkspace,
    blocks: Blocks,
    mine: torch.Tensor,
    result: torch.Tensor,
    site: int,
    *,
    split: bool = False,
    total: bool = False,
    by_rows: bool = False,
    bias: torch.Tensor | None = None,
    bias_is: int = 0,
) -> None:
    """Launch :func:`exchange_kernel`, or :func:`exchange_words_kernel`. The workspace has staging memory for both
    halves of the inbox, and the flags that ``blocks`` need. Of two hops ``split`` and ``total`` are part.

    Sync: on the current stream; ``result`` is complete behind it, and ``mine`` may be overwritten.
    """
    operands = (
        Matrix(mine, *mine.stride()), Matrix(result, *result.stride()), bias, blocks.rows, blocks.cols, blocks.count,
        mine.shape[0],
    )  # fmt: skip
    constants: dict[str, Any] = {
        "SITE": site, "WORLD": ctx.world_size, "SPLIT": split, "TOTAL": total, "BY_ROWS": by_rows, "BIAS": bias_is,
        "EVERYWHERE": blocks.hops == 2, "ACC_DTYPE": tl.int32 if mine.dtype == torch.int32 else tl.float32,
        "ROWS_IN_VECTORS": mine.shape[0] % 16 == 0 and columns_in_vectors(blocks.rows, mine, result),
        "BLOCK_M": blocks.block_m, "BLOCK_N": blocks.block_n, "num_warps": blocks.num_warps,
    }  # fmt: skip
    inbox, half = workspace.inbox(word_dtype(mine.dtype) if blocks.words else mine.dtype)
    programs = (
        ctx.num_sms * _programs_per_sm(ctx.world_size, ctx.backend_name)
        if blocks.words
        else min(ctx.num_sms, MAX_PROGRAMS)
    )
    epochs = workspace.scratch("epochs", programs, torch.int32)
    if blocks.words:
        if ctx.backend_name == "cuda" and not (ctx.world_size <= FREE_RANKS and _in_vectors(blocks, mine, result)):
            constants["maxnreg"] = registers(blocks.num_warps, ctx.world_size)
        grid = (min(programs, max(ctx.num_sms, blocks.count)),)
        exchange_words_kernel[grid](
            ctx.handle, epochs, inbox, half, *operands, blocks.words_n(mine.dtype), programs,
            SOURCES=triton.next_power_of_2(ctx.world_size), PACK=4 // mine.element_size(), **constants,
        )  # fmt: skip
    else:
        exchange_kernel[(programs,)](
            ctx.handle, epochs, workspace.ready, inbox, half, *operands, FLAGS_EACH=MAX_PROGRAMS, **constants,
        )  # fmt: skip
