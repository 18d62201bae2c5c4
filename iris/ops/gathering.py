"""How the parts of a gathered A come together: the sources and couriers of all-gather + matmul, and its collective.

A *source* says where A is and waits for it, a *courier* moves it (:mod:`iris.device.matmul`). Parts arrive in the
staging memory in chunks of rows, each cut into pieces of columns. Each piece has a flag, which takes the call's epoch.

- ``push_courier``: all programs store this rank's part at every peer; the last one to finish a chunk flags it.
- ``fetch_courier``, ``put_courier``: each program carries whole pieces, to this rank or to a peer, and flags them.
- ``keep_courier``: programs store this rank's part at this rank; the copy engine brings the peers' parts.
"""

import triton
import triton.language as tl

from iris.device import handle as handles
from iris.device import peer as peers
from iris.device.arch import copy_stages, fence_async_proxy
from iris.device.handle import MAX_RANKS
from iris.device.matmul import Crew, ring_start
from iris.device.sync import arrive, signal, signal_all, wait_leading
from iris.device.tile import block_at, tile_pointers
from iris.device.turnstile import enter, leave, wait_all_entered, wait_entered


@triton.jit
def pull_source(
    handle, a, flags, epoch, slots, shard, block_m, k, M, K,
    SITE: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Read a part of A in place, in its owner's memory, once that rank has entered the op."""
    if SEGMENTS == 1:
        owner = shard
        missing = (owner * M).to(tl.int64) * a.row_stride
        ready = K
    else:
        owner = (handles.rank(handle) + k // K) % SEGMENTS
        missing = (owner * K).to(tl.int64) * a.col_stride
        ready = (k // K + 1) * K
    wait_entered(flags.turnstile, epoch, owner, handle, SITE)
    return peers.translate(handle, a.ptr, owner) - missing, ready


@triton.jit
def arrived_source(
    handle, a, flags, epoch, slots, shard, block_m, k, M, K,
    SITE: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Read the staging memory, from column ``k`` on as far as pieces have arrived without a gap; wait for at least one
    block."""
    lanes = tl.arange(0, MAX_RANKS)
    home = shard if SEGMENTS == 1 else handles.rank(handle)
    total, end = SEGMENTS * flags.pieces, SEGMENTS * K
    skipped = ring_start(home, K, SEGMENTS, BLOCK_K, EVEN_K) - home * K if SEGMENTS > 1 else 0
    segment = (k + skipped) // K
    piece = segment * flags.pieces + (k + skipped - segment * K) // flags.piece_k
    if EVEN_K and SEGMENTS > 1:
        # Blocks count from ring_start: the last one wraps round to the columns before ring_start, and needs all pieces.
        if (skipped > 0) & ((total <= MAX_RANKS) | (k + BLOCK_K >= end)):
            piece = piece * 0
        limit = tl.where((skipped == 0) | (piece == 0), end, end - BLOCK_K)
    ready = k
    while ready <= k:
        pieces = piece + lanes
        owners = (home + pieces // flags.pieces) % handles.world_size(handle)
        valid = pieces < total
        if not EVEN_K:
            valid &= pieces // flags.pieces == segment
        numbers = owners * flags.pieces + pieces % flags.pieces
        arrived = flags.ready + numbers * flags.chunks + block_m // flags.blocks_per_chunk
        piece += wait_leading(arrived, epoch, owners, valid, handle, SITE)
        ready = piece // flags.pieces * K + min(piece % flags.pieces * flags.piece_k, K)
        if EVEN_K and SEGMENTS > 1:
            whole = max(ready - skipped, 0) // BLOCK_K * BLOCK_K
            ready = min(tl.where(piece == total, end, whole), limit)
    fence_async_proxy()
    return a.ptr, ready


@triton.jit
def push_courier(
    handle, own, a, c, flags, epoch, program, crew, M, N, K, chunk_rows,
    SITE: tl.constexpr, SEGMENTS: tl.constexpr, COURIER_M: tl.constexpr, COURIER_N: tl.constexpr,
):  # fmt: skip
    """Store this rank's part into all peers' staging memory, and where A is sharded by columns into its own, too."""
    first = 1 if SEGMENTS == 1 else 0
    last = handles.world_size(handle)
    _spread(handle, own, a, flags, epoch, program, crew, M, K, chunk_rows, first, last, SEGMENTS, COURIER_M, COURIER_N)


@triton.jit
def keep_courier(
    handle, own, a, c, flags, epoch, program, crew, M, N, K, chunk_rows,
    SITE: tl.constexpr, SEGMENTS: tl.constexpr, COURIER_M: tl.constexpr, COURIER_N: tl.constexpr,
):  # fmt: skip
    """Store this rank's part into its own staging memory, so that A is whole there; copies bring the peers' parts."""
    _spread(handle, own, a, flags, epoch, program, crew, M, K, chunk_rows, 0, 1, SEGMENTS, COURIER_M, COURIER_N)


@triton.jit
def _spread(
    handle, own, a, flags, epoch, program, crew, M, K, chunk_rows, first_step, last_step,
    SEGMENTS: tl.constexpr, COURIER_M: tl.constexpr, COURIER_N: tl.constexpr,
):  # fmt: skip
    """Store this rank's part, chunk by chunk, into the staging memory of the ranks ``first_step``, …,
    ``last_step`` - 1 places further on; if there are counters, the last program to finish a chunk flags it there."""
    me, world = handles.rank(handle), handles.world_size(handle)
    top = me * M if SEGMENTS == 1 else 0
    left = me * K if SEGMENTS > 1 else 0
    steps = first_step + tl.arange(0, MAX_RANKS)
    targets = steps < last_step
    across = tl.cdiv(K, COURIER_N)
    for chunk in range(flags.chunks):
        row_begin = chunk * chunk_rows
        row_end = min(row_begin + chunk_rows, M)
        blocks = tl.cdiv(row_end - row_begin, COURIER_M) * across
        # Each chunk begins at another program, so that chunks of few blocks keep all programs busy.
        for block in range((program + chunk * blocks) % crew.couriers, blocks, crew.couriers):
            rows, cols, row_mask, col_mask = block_at(block, row_begin, row_end, K, COURIER_M, COURIER_N)
            mask = row_mask[:, None] & col_mask[None, :]
            value = tl.load(tile_pointers(own, own.ptr, rows, cols), mask=mask)
            for step in range(first_step, last_step):
                there = peers.translate(handle, a.ptr, (me + step) % world)
                tl.store(tile_pointers(a, there, top + rows, left + cols), value, mask=mask)
        if flags.counters is not None:
            if arrive(flags.counters + chunk, crew.couriers):
                flag = flags.ready + me * flags.chunks + chunk
                signal_all(flag, epoch, tl.where(targets, (me + steps) % world, me), targets, handle)


@triton.jit
def fetch_courier(
    handle, own, a, c, flags, epoch, program, crew, M, N, K, chunk_rows,
    SITE: tl.constexpr, SEGMENTS: tl.constexpr, COURIER_M: tl.constexpr, COURIER_N: tl.constexpr,
):  # fmt: skip
    """Load the peers' parts into this rank's staging memory, piece by piece in the order of use, and flag each piece;
    where A is sharded by columns, this rank's own part, too."""
    wait_all_entered(flags.turnstile, epoch, handle, SITE)
    _carry(
        handle, own, a, flags, epoch, program, crew, M, K, chunk_rows, False, SEGMENTS, COURIER_M, COURIER_N
    )  # fmt: skip


@triton.jit
def put_courier(
    handle, own, a, c, flags, epoch, program, crew, M, N, K, chunk_rows,
    SITE: tl.constexpr, SEGMENTS: tl.constexpr, COURIER_M: tl.constexpr, COURIER_N: tl.constexpr,
):  # fmt: skip
    """As :func:`fetch_courier`, but store this rank's part at the peers, in the order in which they use it."""
    _carry(
        handle, own, a, flags, epoch, program, crew, M, K, chunk_rows, True, SEGMENTS, COURIER_M, COURIER_N
    )  # fmt: skip


@triton.jit
def _carry(
    handle, own, a, flags, epoch, program, crew, M, K, chunk_rows,
    SENT: tl.constexpr, SEGMENTS: tl.constexpr, COURIER_M: tl.constexpr, COURIER_N: tl.constexpr,
):  # fmt: skip
    """Carry this program's share of all pieces."""
    others = handles.world_size(handle) - (1 if SEGMENTS == 1 else 0)
    total = others * flags.chunks * flags.pieces
    first = min(crew.first_units, total)
    for unit in range(program, first, crew.couriers):
        _carry_piece(handle, own, a, flags, epoch, unit, crew, M, K, chunk_rows, SENT, SEGMENTS, COURIER_M, COURIER_N)
    if program < crew.dedicated:
        for unit in range(first + program, total, crew.dedicated):
            _carry_piece(
                handle, own, a, flags, epoch, unit, crew, M, K, chunk_rows, SENT, SEGMENTS, COURIER_M, COURIER_N
            )


@triton.jit
def _carry_piece(
    handle, own, a, flags, epoch, unit, crew, M, K, chunk_rows,
    SENT: tl.constexpr, SEGMENTS: tl.constexpr, COURIER_M: tl.constexpr, COURIER_N: tl.constexpr,
):  # fmt: skip
    """Carry piece number ``unit`` in the order of use: some chunks of rows side by side, then the next ones. ``SENT``:
    from this rank to a peer; else from a peer to this rank. ``unit`` also determines the peer: it lies ``away`` ranks
    before this one if ``SENT``, else after it."""
    me, world = handles.rank(handle), handles.world_size(handle)
    if SEGMENTS == 1:
        number, piece = _abreast(unit, flags.pieces, (world - 1) * flags.chunks, crew)
        away, chunk = 1 + number // flags.chunks, number % flags.chunks
    else:
        chunk, turn = _abreast(unit, flags.pieces * world, flags.chunks, crew)
        away, piece = turn // flags.pieces, turn % flags.pieces
    peer = (me + world - away) % world if SENT else (me + away) % world
    owner = me if SENT else peer
    top = owner * M if SEGMENTS == 1 else 0
    left = owner * K if SEGMENTS > 1 else 0
    source = own.ptr if SENT else peers.translate(handle, own.ptr, peer)
    target = peers.translate(handle, a.ptr, peer) if SENT else a.ptr
    first_row, first_col = chunk * chunk_rows, piece * flags.piece_k
    row_end = min(first_row + chunk_rows, M)
    col_end = min(first_col + flags.piece_k, K)
    across = tl.cdiv(col_end - first_col, COURIER_N)
    blocks = tl.cdiv(row_end - first_row, COURIER_M) * across
    stages: tl.constexpr = copy_stages(own.ptr.dtype.element_ty, COURIER_M * COURIER_N)
    i, j = me * 0, me * 0
    for _ in tl.range(blocks, num_stages=stages):
        rows = first_row + i * COURIER_M + tl.arange(0, COURIER_M)
        cols = first_col + j * COURIER_N + tl.arange(0, COURIER_N)
        mask = (rows < row_end)[:, None] & (cols < col_end)[None, :]
        value = tl.load(tile_pointers(own, source, rows, cols), mask=mask)
        tl.store(tile_pointers(a, target, top + rows, left + cols), value, mask=mask)
        j += 1
        i += tl.where(j == across, 1, 0)
        j = tl.where(j == across, 0, j)
    signal(
        flags.ready + (owner * flags.pieces + piece) * flags.chunks + chunk, epoch, peer if SENT else me, handle
    )  # fmt: skip


@triton.jit
def _abreast(unit, turns, chunks, crew):
    """The chunk, of ``chunks``, and the piece of it, of ``turns``, that ``unit`` stands for. ``crew.abreast`` chunks
    are carried side by side: a piece of each, then the next piece of each."""
    first = unit // (crew.abreast * turns) * crew.abreast
    beside = min(chunks - first, crew.abreast)
    left = unit - first * turns
    return first + left % beside, left // beside


@triton.jit
def gather_kernel(
    handle, flags, own, a, M, K,
    SITE: tl.constexpr, SEGMENTS: tl.constexpr, COURIER_M: tl.constexpr, COURIER_N: tl.constexpr,
):  # fmt: skip
    """The collective alone: store this rank's part of A into every rank's staging memory."""
    epoch = enter(flags.turnstile, handle)
    program, crew = tl.program_id(0), Crew(tl.num_programs(0), 0, 0, 1)
    last = handles.world_size(handle)
    wait_all_entered(flags.turnstile, epoch, handle, SITE)
    _spread(handle, own, a, flags, epoch, program, crew, M, K, M, 0, last, SEGMENTS, COURIER_M, COURIER_N)
    leave(flags.turnstile, epoch, handle, SITE)
