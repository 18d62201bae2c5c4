"""Collectives of a few microseconds, for the small matrices of decoding: what ``low_latency`` runs before or after a
matmul.

A program stores its share of this rank's part into an *inbox* at every peer, and takes what has arrived in this rank's
inbox. There is no handshake before and no barrier after, so a call takes one trip over the link: the one-shot scheme of
NCCL's LL protocols and of the custom all-reduces of serving engines. There are two ways to know what has arrived:

* *words* (:func:`iris.device.words.store_words`), for small parts: a word itself shows that it has arrived, which saves
  the wait between data and flag, 2 µs of 6. A word carries four bytes of data; for floats it takes four, else eight.
* *flags*, one per program, which are set after the data.

The two-shot scheme sends fewer bytes, in two hops: each rank sums a part of the rows, and sends the sum to every rank.

An inbox has two halves, between which calls alternate. A rank in call n has received data from every peer in call
n - 1, before which each peer had finished call n - 2, the last to read the half that call n writes. With flags, a rank
stores a sum straight into a peer's output, once that peer's part has arrived: the peer is then in the same call, so
whatever read its output has finished. With words, the sum goes to the inbox, which has room for parts and for sums.

With words, there may be more programs than are resident at once. Each sends its parts before it waits, and waits only
for programs of the same number on other ranks. GPUs start programs in order (though no vendor promises it). So the
first program that has not ended on all ranks has begun on every rank, where it sends its parts: it ends.
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
from iris.device.sync import others, signal_all, wait_all
from iris.device.tile import Matrix, Tile, block_at, finished, slot_pointers, tile_mask, tile_pointers
from iris.device.turnstile import end_own_epoch, own_epoch
from iris.device.words import store_words, take_words
from iris.ops.rows import columns_in_vectors
from iris.ops.words import in_words, word_dtype, words_nbytes
from iris.ops.workspace import FusedWorkspace

MAX_PROGRAMS: tl.constexpr = tl.constexpr(512)
FLAGS = 2 * MAX_RANKS.value * MAX_PROGRAMS.value
"""Flags of a workspace: one per rank and program for parts, and as many for sums."""
_MIN_ELEMENTS, _MAX_ELEMENTS = 512, 8192
"""Elements that a program moves at a time, with flags: the fewest and the most."""
_MIN_WORDS, _MAX_WORDS = 256, 512
"""Words of a block: the fewest as long as that makes no more than one block per program, or two where an SM has one
program; else up to the most. The fastest of 128 to 4096 words on 2 × H200, 2026-11-27."""
_VECTOR_NBYTES, _WORDS_PER_WARP, _WARPS = 16, 128, 4
"""A thread takes four words at a time, and a program has no more threads (in NVIDIA's warps) than take a block in one
pass. Each thread then holds the words of all ranks for the same place, and sums them by itself; otherwise threads would
exchange words through shared memory, which takes up to 2 µs."""
_MAX_WORDS_AWAITED = 4096
"""Words that a program waits for at a time, from all ranks together."""
_PROGRAMS_PER_SM = {2: 6, 4: 3, 8: 2}
"""By the number of ranks, or the next power of two. Given the registers that the words of all ranks take, an SM then
has room for one more program, of a call on another stream, for which these programs might have to wait."""
_PROGRAMS_PER_CU = {2: 4, 4: 2}
"""The same on AMD, where the registers of a thread are not bounded."""
_REGISTERS = 1 << 16
"""Registers of an SM of any NVIDIA GPU since 2014."""
_MAX_ROWS = 16
"""Rows of a block with flags, at most. A block of words has one row, or part of one, if a row is longer than a quarter
of a block; else several."""
_WORDS_AT_A_TIME = 16
"""The words sent for a row are a multiple of this, or whole blocks, so that Triton can store and load vectors."""


@dataclass(frozen=True)
class Blocks:
    """How a part of ``rows`` × ``cols`` is cut: into ``count`` blocks of ``block_m`` × ``block_n``. ``words``: they
    travel as words, not with flags; ``hops``: 1, or 2 if owners then send their sums to all ranks; ``num_warps``: of a
    program that moves blocks."""

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
        """Words that carry a row; the rest of the row's last block is not sent."""
        words = -(-self.cols * dtype.itemsize // (4 * _WORDS_AT_A_TIME)) * _WORDS_AT_A_TIME
        return min(words, -(-self.cols // self.block_n) * self.block_n * dtype.itemsize // 4)

    @property
    def num_flags(self) -> int:
        """Flags of the workspace; none for words. So words and flags never share a workspace, and nothing but words is
        ever stored where words are waited for."""
        return 0 if self.words else FLAGS

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of one rank's blocks, as they travel."""
        elements = self.count * self.block_m * self.block_n
        return words_nbytes(elements, dtype) if self.words else elements * dtype.itemsize

    def inbox_nbytes(self, world_size: int, dtype: torch.dtype) -> int:
        """Bytes of both halves, each with room for every rank's blocks, and with words in two hops for sums, too."""
        return 2 * world_size * (self.hops if self.words else 1) * self.nbytes(dtype)


def blocks_of(
    part: Sequence[int], dtype: torch.dtype, world_size: int, num_sms: int, hops: int = 1, by_flags: bool = False
) -> Blocks:
    """Cut a part of this shape into few blocks per program, of whole vectors. It travels as words if it is small
    enough, unless ``by_flags`` is set."""
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
    """Programs per SM of a kernel that exchanges words, at most: while some wait, others send or sum."""
    most = _PROGRAMS_PER_CU if backend == "hip" else _PROGRAMS_PER_SM
    return most.get(triton.next_power_of_2(world_size), 1)


def registers(num_warps: int, world_size: int) -> int:
    """The most registers that a thread of an exchange in words may take, if an SM is to have room for one program
    more."""
    threads = 32 * num_warps * (_programs_per_sm(world_size) + 1)
    return min(255, _REGISTERS // threads // 8 * 8)


def _share(elements: int, blocks: int, least: int, most: int) -> int:
    """How many of ``elements`` each of ``blocks`` blocks gets: a power of two, from ``least`` to ``most``."""
    share: int = triton.next_power_of_2(math.ceil(elements / blocks))
    return min(most, max(least, share))


@triton.jit
def _block(me, block, blocks, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block number ``block`` of a part, as a tile."""
    r, c, row_mask, col_mask = block_at(block, 0, rows, cols, BLOCK_M, BLOCK_N)
    return Tile(me, block, blocks, 0, r, c, row_mask, col_mask)


@triton.jit
def _block_below(tile, top, all_rows):
    """The block ``tile`` of a part that begins at row ``top``, as a tile of the whole matrix."""
    rows = tile.rows + top
    here = tile.row_mask & (rows < all_rows)
    return Tile(tile.shard, tile.index, tile.per_shard, 0, rows, tile.cols, here, tile.col_mask)


@triton.jit
def _part_for(peer, mine, tile, rows, all_rows, SPLIT: tl.constexpr):
    """The data of the block ``tile`` for ``peer``; zeros outside the matrix."""
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
    ROWS_IN_VECTORS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Send every rank's part of ``rows`` × ``cols`` to every rank, in ``blocks`` blocks.

    ``SPLIT``: ``mine`` holds a part for each rank, one below the other, ``all_rows`` in all, so the last part may be
    shorter; else the same part goes to all. ``TOTAL``: the parts are summed in rank order, and the bias is added; else
    they are placed below (``BY_ROWS``) or beside each other. ``EVERYWHERE``: each rank's sum goes to every rank's
    ``result``, symmetric, at the rows of that rank's part. ``ROWS_IN_VECTORS``: ``rows`` and ``all_rows`` are multiples
    of 16, which matters where columns are contiguous.
    """
    if ROWS_IN_VECTORS:  # changes nothing, but tells Triton that they are multiples of 16
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
        peers, valid = others(handle)
        signal_all(ready + me * MAX_PROGRAMS + program, epoch, peers, valid, handle)
        wait_all(ready + peers * MAX_PROGRAMS + program, epoch, peers, valid, handle, SITE)
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
            sums = ready + WORLD * MAX_PROGRAMS
            signal_all(sums + me * MAX_PROGRAMS + program, epoch, peers, valid, handle)
            wait_all(sums + peers * MAX_PROGRAMS + program, epoch, peers, valid, handle, SITE)
    end_own_epoch(epochs, epoch, tl.num_programs(0))


@triton.jit
def _words_of(
    inbox, first, tile, epoch, handle, SITE: tl.constexpr, WORLD: tl.constexpr, SOURCES: tl.constexpr,
    BLOCK_M: tl.constexpr, WORDS_N: tl.constexpr,
):  # fmt: skip
    """Wait for the words of a block from every rank, in the inbox's slots from ``first`` on. Returns them by rank."""
    sources = tl.arange(0, SOURCES)
    slots = slot_pointers(inbox, first, tile, BLOCK_M, WORDS_N)
    slots = slots[None, :, :] + (sources * tile.per_shard).to(tl.int64)[:, None, None] * (BLOCK_M * WORDS_N)
    here = tile_mask(tile)[None, :, :] & (sources < WORLD)[:, None, None]
    return take_words(slots, epoch, sources, here, handle, SITE)


@triton.jit
def _store_parts(result, parts, tile, rows, cols, all_rows, WORLD: tl.constexpr, BY_ROWS: tl.constexpr):
    """Store every rank's part of a block, below (``BY_ROWS``) or beside each other; nothing from ``all_rows`` on."""
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
    """As :func:`exchange_kernel`, but the parts travel as words, with ``PACK`` elements in each and ``words_n`` for a
    row. The compiler chooses the order of the sum, the same on all ranks. ``SOURCES``: ``WORLD``, rounded up to a power
    of two. With ``EVERYWHERE``, sums travel as words, too, to the slots after those of the parts. ``programs``: the
    most that any call has."""
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
    """Launch :func:`exchange_kernel`, or :func:`exchange_words_kernel`. The workspace must have staging memory for both
    halves of the inbox, and the flags that ``blocks`` need. Two hops need ``split`` and ``total``.

    Sync: on the current stream. After it, ``result`` is complete, and ``mine`` may be overwritten.
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
        else min(ctx.num_sms, MAX_PROGRAMS.value)
    )
    epochs = workspace.scratch("epochs", programs, torch.int32)
    if blocks.words:
        if ctx.backend_name == "cuda":
            constants["maxnreg"] = registers(blocks.num_warps, ctx.world_size)
        grid = (min(programs, max(ctx.num_sms, blocks.count)),)
        exchange_words_kernel[grid](
            ctx.handle, epochs, inbox, half, *operands, blocks.words_n(mine.dtype), programs,
            SOURCES=triton.next_power_of_2(ctx.world_size), PACK=4 // mine.element_size(), **constants,
        )  # fmt: skip
    else:
        exchange_kernel[(programs,)](
            ctx.handle, epochs, workspace.ready, inbox, half, *operands, **constants,
        )  # fmt: skip
