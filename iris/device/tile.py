"""A finished tile of the output, and what sinks do with it.

``SINK`` and ``AFTER`` are ``@triton.jit`` functions passed to the matmul kernel as constexpr, and users may write their
own:

    SINK(handle, c, slots, acc, bias_ptr, tile, flags, epoch, SITE, BIAS)

    AFTER(handle, slots, shard, index, per_shard, flags, epoch, SITE)

``AFTER``, if given, announces a tile that the sink has stored. With ``EAGER`` it is called at once, else when the
program has computed its next tile: the stores are complete by then, and no program waits for them. ``GATE``: no sink is
called before all ranks have entered the call, so a sink may write peers' memory.

``acc`` is the product, scaled, without the bias, in float32 (int32 for int8 without scales); ``tile`` is a
:class:`Tile`; ``slots`` is what the launch was given under this name: for Iris's own ops the memory for tiles on their
way between ranks, for an op of your own any tensor, or NamedTuple of tensors, that its parts need, or None.
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
    """A tile of the output. ``shard``, ``index``: the rank it belongs to, and its number among that rank's
    ``per_shard`` tiles; ``top``: the first of that rank's rows, if tiles are sharded by rows, else 0; ``rows``,
    ``cols``: the rows and columns of the output that the tile covers; ``row_mask``, ``col_mask``: which of these lie
    inside the output."""

    shard: Any
    index: Any
    per_shard: Any
    top: Any
    rows: Any
    cols: Any
    row_mask: Any
    col_mask: Any


SCALE_BLOCK: tl.constexpr = tl.constexpr(128)
"""The size of a block with a scale of its own: so many columns of A, or rows and columns of B."""


class ScalePointers(NamedTuple):
    """Scales, in float32. Of the whole product: ``rows`` has a number for each row, ``cols`` one for each column; None
    means no scale, a stride of 0 one number for all. Or of each block's product before it is accumulated, two
    matrices: ``left`` has a number for each row of A and :data:`SCALE_BLOCK` of its columns, ``right`` one for each
    square of :data:`SCALE_BLOCK` rows and columns of B."""

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
    """The flags and counters by which programs and ranks synchronise; those that a kernel does not need may be None.

    ``turnstile``: see :func:`iris.device.turnstile.enter`; or epochs, see :func:`iris.device.turnstile.own_epoch`.
    ``ready``: which parts of A, or which tiles, have arrived: epochs, or counts where tiles are added up. ``split``:
    which partial sums of split tiles are there, three epochs per program. ``counters``: see
    :func:`iris.device.sync.arrive`. Parts of A arrive in ``chunks`` chunks of ``blocks_per_chunk`` block rows, each in
    ``pieces`` pieces of ``piece_k`` columns; finished tiles leave in ``chunks`` chunks of ``blocks_per_chunk`` tiles.
    """

    turnstile: Any
    ready: Any = None
    split: Any = None
    counters: Any = None
    chunks: Any = 1
    blocks_per_chunk: Any = 1
    pieces: Any = 1
    piece_k: Any = 1


class Slots(NamedTuple):
    """Room for tiles on their way between ranks. ``incoming``: at the owner, a slot per source and tile, or one sum per
    tile; ``outgoing``: a slot per owner and tile; ``done``: a word per chunk of outgoing or finished tiles, which holds
    the epoch once the chunk is complete."""

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
    """The rows and columns of block number ``block``, and masks of those inside the matrix. Blocks are numbered along
    each block row; they cover the rows from ``first`` to ``row_end`` of a matrix with ``N`` columns."""
    across = tl.cdiv(N, BLOCK_N)
    rows = first + block // across * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = block % across * BLOCK_N + tl.arange(0, BLOCK_N)
    return rows, cols, rows < row_end, cols < N


@triton.jit
def slot_pointers(slots, source, tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers into the slot for ``tile`` of rank ``source``. Slots are contiguous, each for a whole tile."""
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
    """The tile in the output's dtype, bias added; to whole numbers, too, a bias of floats as floats."""
    if BIAS != BIAS_NONE:
        if bias_ptr.dtype.element_ty.is_floating():
            acc = acc.to(tl.float32)
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
    """The peer that a rank turns to at ``step``, 1 to world_size - 1, for tile or block number ``turn``. Successive
    tiles begin with different peers: if all began with the next rank, ranks that are not level would send to the same
    peer and share its links, while another peer's links are idle (8 × H200, 2026-11-26)."""
    me, world = rank(handle), world_size(handle)
    return (me + 1 + (step - 1 + turn) % (world - 1)) % world
