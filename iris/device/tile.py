"""A finished tile of the output, and what sources and sinks say about it.

Sinks, and what comes after them, are ``@triton.jit`` functions passed to the matmul kernel as constexpr, and may be the
user's own:

    SINK(handle, c, slots, acc, bias_ptr, tile, flags, epoch, SITE, BIAS)

    AFTER(handle, slots, shard, index, per_shard, flags, epoch, SITE)

``AFTER``, if given, announces a tile that the sink has stored: it is called when the program has computed its next
tile, so that the stores are through by then and no program stands waiting for them; or, if ``EAGER``, at once.
``GATE``: no sink is called before all ranks have entered the call, so it may write peers' memory.

``acc`` is the product, scaled, without the bias, in float32 (int32 for int8 without scales); ``tile`` a :class:`Tile`;
``slots`` the memory that the op set aside for tiles on their way between ranks, or None.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from iris.device.handle import rank, world_size
from iris.device.peer import translate

BIAS_NONE: tl.constexpr = tl.constexpr(0)
BIAS_ROW: tl.constexpr = tl.constexpr(1)
BIAS_COLUMN: tl.constexpr = tl.constexpr(2)


class Matrix(NamedTuple):
    """A matrix in memory: where it starts, and its strides in elements."""

    ptr: Any
    row_stride: Any
    col_stride: Any


class Tile(NamedTuple):
    """A tile of the output. ``shard``, ``index``: whose it is, and its number among that rank's ``per_shard`` tiles;
    ``top``: the first row of that rank's rows, where they are sharded by rows, else 0; ``rows``, ``cols``: the tile's
    place in the output; ``row_mask``, ``col_mask``: what of that lies inside."""

    shard: Any
    index: Any
    per_shard: Any
    top: Any
    rows: Any
    cols: Any
    row_mask: Any
    col_mask: Any


SCALE_BLOCK: tl.constexpr = tl.constexpr(128)
"""Columns of A, and rows and columns of B, that share a scale, where blocks have scales."""


class ScalePointers(NamedTuple):
    """What a product is multiplied by, in float32: ``rows``, a number for each row, and ``cols``, one for each column.
    None: nothing; a stride of 0: one number for all. Or what the product of each block is multiplied by before it is
    added up, two matrices: ``left``, a number for each row of A and :data:`SCALE_BLOCK` of its columns, and ``right``,
    one for each square of as many rows and columns of B."""

    rows: Any
    row_stride: Any
    cols: Any
    col_stride: Any
    left: Any = None
    left_row_stride: Any = 0
    left_col_stride: Any = 0
    right: Any = None
    right_row_stride: Any = 0
    right_col_stride: Any = 0


class Flags(NamedTuple):
    """What programs and ranks tell each other with, where there is need of it.

    ``turnstile``: see :func:`iris.device.turnstile.enter`; or epochs, see :func:`iris.device.turnstile.own_epoch`.
    ``ready``: parts of A, or tiles, that have arrived: epochs, or of what is added up counts. ``split``: partial sums
    of split tiles, three epochs per program. ``counters``: see :func:`iris.device.sync.arrive`. Parts of A arrive in
    ``chunks`` chunks of ``blocks_per_chunk`` block rows, times ``pieces`` pieces of ``piece_k`` columns.
    """

    turnstile: Any
    ready: Any
    split: Any
    counters: Any
    chunks: Any
    blocks_per_chunk: Any
    pieces: Any
    piece_k: Any


class Slots(NamedTuple):
    """Room for tiles on their way between ranks. ``incoming``: at the owner, per source and tile, or one sum per tile;
    ``outgoing``: per owner and tile; ``done``: words that hold the epoch when a chunk of outgoing or finished tiles is
    complete."""

    incoming: Any = None
    outgoing: Any = None
    done: Any = None


@triton.jit
def tile_pointers(matrix, ptr, rows, cols):
    """Pointers to the elements at ``rows`` × ``cols`` of a matrix that starts at ``ptr``."""
    return ptr + (rows.to(tl.int64) * matrix.row_stride)[:, None] + (cols.to(tl.int64) * matrix.col_stride)[None, :]


@triton.jit
def tile_mask(tile):
    """Which elements of the tile lie inside the output."""
    return tile.row_mask[:, None] & tile.col_mask[None, :]


@triton.jit
def block_at(block, first, row_end, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where block number ``block`` lies of the rows from ``first`` to ``row_end`` of a matrix with ``N`` columns, those
    of a row of blocks first: its rows and columns, and which of each are inside."""
    across = tl.cdiv(N, BLOCK_N)
    rows = first + block // across * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = block % across * BLOCK_N + tl.arange(0, BLOCK_N)
    return rows, cols, rows < row_end, cols < N


@triton.jit
def slot_pointers(slots, source, tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers into the slot for ``tile`` of rank ``source``: tiles lie there whole, one behind the other."""
    slot = (source * tile.per_shard + tile.index).to(tl.int64) * (BLOCK_M * BLOCK_N)
    return slots + slot + tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]


@triton.jit
def within_shard(tile):
    """The tile with its rows counted from the top of its shard."""
    rows = tile.rows - tile.top
    return Tile(tile.shard, tile.index, tile.per_shard, 0, rows, tile.cols, tile.row_mask, tile.col_mask)


@triton.jit
def scaled(acc, scales, tile):
    """``acc`` times the ``scales``, in float32, if there are any."""
    if scales.rows is not None or scales.cols is not None:
        acc = acc.to(tl.float32)
    if scales.rows is not None:
        acc *= tl.load(scales.rows + tile.rows.to(tl.int64) * scales.row_stride, mask=tile.row_mask, other=0)[:, None]
    if scales.cols is not None:
        acc *= tl.load(scales.cols + tile.cols.to(tl.int64) * scales.col_stride, mask=tile.col_mask, other=0)[None, :]
    return acc


@triton.jit
def finished(acc, bias_ptr, tile, dtype: tl.constexpr, BIAS: tl.constexpr):
    """The tile in the output's dtype, bias added."""
    if BIAS == BIAS_ROW:
        acc += tl.load(bias_ptr + tile.rows, mask=tile.row_mask, other=0).to(acc.dtype)[:, None]
    if BIAS == BIAS_COLUMN:
        acc += tl.load(bias_ptr + tile.cols, mask=tile.col_mask, other=0).to(acc.dtype)[None, :]
    return acc.to(dtype)


@triton.jit
def local_sink(handle, c, slots, acc, bias_ptr, tile, flags, epoch, SITE: tl.constexpr, BIAS: tl.constexpr):
    """The tile is stored in this rank's own output."""
    value = finished(acc, bias_ptr, tile, c.ptr.dtype.element_ty, BIAS)
    tl.store(tile_pointers(c, c.ptr, tile.rows, tile.cols), value, mask=tile_mask(tile))


@triton.jit
def store_everywhere(handle, c, value, tile):
    """Store a finished tile into every rank's output, this rank's own first."""
    mask = tile_mask(tile)
    tl.store(tile_pointers(c, c.ptr, tile.rows, tile.cols), value, mask=mask)
    for step in range(1, world_size(handle)):
        there = translate(handle, c.ptr, peer_at(handle, step, tile.index))
        tl.store(tile_pointers(c, there, tile.rows, tile.cols), value, mask=mask)


@triton.jit
def peer_at(handle, step, turn):
    """The peer that comes at ``step``, 1 to world_size - 1, for the tile or block whose number is ``turn``: each begins
    with another one. If all began with the next rank, ranks that are not level would meet at one peer, and share its
    links, while another's are idle (8 × H200, 2026-11-26)."""
    me, world = rank(handle), world_size(handle)
    return (me + 1 + (step - 1 + turn) % (world - 1)) % world
