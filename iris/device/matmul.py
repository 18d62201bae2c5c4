"""The one persistent matmul kernel. Every fused op is this kernel with a schedule, a source and a sink.

    for each tile, or part of a tile, that the schedule gives this program:
        until K is through:
            SOURCE(…)                  waits for some more of A, and says where it is
            acc += A tile @ B tile     over that much of K, pipelined
        SINK(…, acc)                   what happens to the finished tile

All are ``@triton.jit`` functions passed as constexpr arguments, and may be the user's own; schedules are described in
:mod:`iris.device.schedule`, sinks in :mod:`iris.device.tile`.

    SOURCE(handle, a, flags, epoch, shard, block_m, k, M, K, SITE, SEGMENTS, BLOCK_K, EVEN_K)
        -> (pointer, k up to which A is here)

A is cut in one of two ways, or not at all. ``SHARDED``: by rows, M of them per rank, and a tile lies in one ``shard``.
``SEGMENTS`` > 1: by columns, K of them per rank, and a tile needs all of them, beginning with this rank's own: ``k``
counts columns in that order, from :func:`ring_start` on. The pointer is to where row 0, column 0 of the gathered A
would be, so rows and columns are those of the whole; it need only be good for the part just waited for. If it is told
where all of A is gathered, the kernel may read it by TMA, so a source that waits then calls
:func:`iris.device.arch.fence_async_proxy` behind its waits. ``EVEN_K``: K in all is a multiple of ``BLOCK_K``, and
blocks may reach from one rank's segment into the next.

``OWN``: the shard of rows that needs no transfer comes first, and is read where it lies (``own``).

``HALF_FLAGS``, if not 0: A arrives in one of two halves of its memory, which calls take in turns by their epoch. The
second half begins ``half_rows`` rows, and its flags ``HALF_FLAGS`` flags, behind the first.

``COURIER``, if given, is run by the first programs, the ``crew``, before they compute, and moves data for the others:

    COURIER(handle, own, a, c, flags, epoch, program, crew, M, N, K, chunk_rows, SITE, SEGMENTS, COURIER_M, COURIER_N)

The first ``dedicated`` programs of the ``crew`` compute nothing. The waits of a source stand outside the pipelined
loop, so no load is moved above them.

Stream-K: ``STREAM_K`` splits the tiles of the last waves evenly over the programs, along K. Partial sums lie in
``partials`` and are added up in a fixed order: results do not depend on timing. If few programs share a tile, the one
with its first part gets the others'; if many do, each adds up some of it, and, if ``SLICED``, hands that to the sink.
Each of these tiles may first be cut into ``STRIPS`` of some columns: fewer programs then share one, and hand over less.

M, and the numbers of tiles that follow from it, are not compiled into the kernel, as a server meets any; numbers of
chunks are. ``M_IN_VECTORS``: M is a multiple of 16, and the columns of A or C are contiguous: the width of loads and
stores depends on that.

All programs are resident. Each part of a tile but the first is the first thing that its program does of the split
tiles. Few wait only for programs further on in the tile, the last of which waits for nobody; many only when they have
left their own part: so no two wait for each other.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from iris.device import trace
from iris.device.arch import clock_ns, dot_precision
from iris.device.handle import rank
from iris.device.schedule import split_sharers, split_start, whole_tiles
from iris.device.split import SLICE_ELEMENTS, combined, handed_over, slice_sum, wait_parts
from iris.device.tile import SCALE_BLOCK, Flags, Matrix, Tile, scaled, tile_pointers
from iris.device.turnstile import NO_EPOCHS, TURNSTILE, end_own_epoch, enter, leave, own_epoch, wait_all_entered


class Crew(NamedTuple):
    """The programs that move data: how many; how many of them compute nothing; how many units of data all of them
    share, the rest being left to the dedicated ones; and how many chunks of rows are carried side by side."""

    couriers: Any
    dedicated: Any
    first_units: Any
    abreast: Any


class Operand(NamedTuple):
    """A matrix as the inner loop reads it, whose first row is row number ``row`` of the whole: by a TMA descriptor of
    it, by one of its transpose (B alone), or, if both are None, by pointers."""

    matrix: Any
    desc: Any
    transposed_desc: Any
    row: Any


class _Launch(NamedTuple):
    """What is the same for every tile, by the names of :func:`matmul_kernel`; ``own`` and ``a`` each an
    :class:`Operand`. From ``SCHEDULE`` on all are constexpr."""

    # Constants last: Triton 3.6 keeps those in a tuple within this one, as a stride of 1, only if one stands behind it.
    handle: Any
    flags: Any
    epoch: Any
    own: Any
    a: Any
    c: Any
    scales: Any
    bias_ptr: Any
    slots: Any
    partials: Any
    trace_ptr: Any
    M: Any
    N: Any
    K: Any
    per_shard: Any
    per_round: Any
    SCHEDULE: Any
    SOURCE: Any
    SINK: Any
    SLICED: Any
    AFTER: Any
    EAGER: Any
    GATE: Any
    SITE: Any
    SHARDS: Any
    SHARDED: Any
    SEGMENTS: Any
    PIECEWISE: Any
    BIAS: Any
    BLOCK_M: Any
    BLOCK_K: Any
    GROUP_M: Any
    EVEN_K: Any
    PRECISION: Any
    ACC_DTYPE: Any
    TRACE: Any


class _Place(NamedTuple):
    """Where a tile lies. ``item``: its number, of which the schedule made ``shard``, ``index`` and ``block_m``;
    ``row``, ``col``: its first; ``top``, ``row_end``: the first row of its shard, and that behind the last, where A is
    cut by rows, else of the whole; ``first_k``: the column of A with which it begins."""

    item: Any
    shard: Any
    index: Any
    block_m: Any
    top: Any
    row: Any
    row_end: Any
    col: Any
    first_k: Any


@triton.jit
def ring_start(me, K, SEGMENTS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """The column of A with which this rank begins: the first of its own, or, so that all blocks are whole ones, the
    first block boundary behind it; the block before that comes last."""
    if SEGMENTS == 1:
        return me * 0
    elif EVEN_K:
        return tl.cdiv(me * K, BLOCK_K) * BLOCK_K
    else:
        return me * K


@triton.jit
def local_source(
    handle,
    a,
    flags,
    epoch,
    shard,
    block_m,
    k,
    M,
    K,
    SITE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """A is whole, and here."""
    return a.ptr, K


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b``. Hopper's tensor cores keep sums of fp8 in some 14 bits; with full ``PRECISION`` those of each
    block of K are added up in float32."""
    STEP: tl.constexpr = a.shape[1] if a.dtype.is_fp8() and PRECISION == "ieee" else None
    TAKEN: tl.constexpr = dot_precision(PRECISION)
    return tl.dot(a, b, acc, input_precision=TAKEN, max_num_imprecise_acc=STEP, out_dtype=acc.dtype)


@triton.jit
def _plus(acc, a, b, scales, rows, cols, k, PRECISION: tl.constexpr):
    """``acc + a @ b``, of ``rows`` and ``cols`` and of columns of A from ``k`` on, which share their scales, if blocks
    have any."""
    if scales.left is None:
        return _dot(a, b, acc, PRECISION)
    else:
        block = (k // SCALE_BLOCK).to(tl.int64)
        left = tl.load(scales.left + rows.to(tl.int64) * scales.left_row_stride + block * scales.left_col_stride)
        across = (cols // SCALE_BLOCK).to(tl.int64)
        right = tl.load(scales.right + block * scales.right_row_stride + across * scales.right_col_stride)
        return acc + tl.dot(a, b, out_dtype=acc.dtype) * left[:, None] * right[None, :]


@triton.jit
def _multiply(acc, launch, a, a_ptr, b, place, k_begin, k_end, BLOCK_N: tl.constexpr, STAGES: tl.constexpr):
    """``acc`` plus one tile of A times one of B, over ``k_begin``, …, ``k_end`` counted from the tile's ``first_k``.

    What is left of K behind the last whole block is added apart, so that the loop needs no masks.
    """
    K_TOTAL = launch.K * launch.SEGMENTS
    ks = tl.arange(0, launch.BLOCK_K)
    rows = place.row + tl.arange(0, launch.BLOCK_M)
    rows = tl.where(rows < place.row_end, rows, place.row_end - 1)
    cols = (place.col + tl.arange(0, BLOCK_N)) % launch.N
    if a.desc is None or not launch.EVEN_K:
        a_rows = tile_pointers(a.matrix, a_ptr, rows - a.row, ks)
    if (b.desc is None and b.transposed_desc is None) or not launch.EVEN_K:
        b_cols = tile_pointers(b.matrix, b.matrix.ptr, ks, cols)
    whole = k_end if launch.EVEN_K else k_begin + (k_end - k_begin) // launch.BLOCK_K * launch.BLOCK_K
    for position in tl.range(k_begin, whole, launch.BLOCK_K, num_stages=STAGES):
        k = position + place.first_k
        if launch.SEGMENTS > 1:
            k = tl.where(k < K_TOTAL, k, k - K_TOTAL)
        if a.desc is None:
            a_tile = tl.load(a_rows + k.to(tl.int64) * a.matrix.col_stride)
        else:
            a_tile = a.desc.load([place.row - a.row, k])
        if b.desc is not None:
            b_tile = b.desc.load([k, place.col])
        elif b.transposed_desc is not None:
            b_tile = b.transposed_desc.load([place.col, k]).T
        else:
            b_tile = tl.load(b_cols + k.to(tl.int64) * b.matrix.row_stride)
        acc = _plus(acc, a_tile, b_tile, launch.scales, rows, cols, k, launch.PRECISION)
    if not launch.EVEN_K:
        if whole < k_end:
            k = whole + place.first_k
            if launch.SEGMENTS > 1:
                k = tl.where(k < K_TOTAL, k, k - K_TOTAL)
            left = ks < k_end - whole
            a_ptrs = a_rows + k.to(tl.int64) * a.matrix.col_stride
            b_ptrs = b_cols + k.to(tl.int64) * b.matrix.row_stride
            a_tile = tl.load(a_ptrs, mask=left[None, :], other=0.0)
            b_tile = tl.load(b_ptrs, mask=left[:, None], other=0.0)
            acc = _plus(acc, a_tile, b_tile, launch.scales, rows, cols, k, launch.PRECISION)
    return acc


@triton.jit
def _continue(acc, launch, b, place, k, k_end, BLOCK_N: tl.constexpr, STAGES: tl.constexpr):
    """``acc`` carried on from column ``k`` as far as the source has A, and that column."""
    if launch.TRACE:
        asked = clock_ns()
    a_ptr, ready = launch.SOURCE(
        launch.handle, launch.a.matrix, launch.flags, launch.epoch, place.shard, place.block_m, k, launch.M, launch.K,
        launch.SITE, launch.SEGMENTS, launch.BLOCK_K, launch.EVEN_K,
    )  # fmt: skip
    stop = min(ready, k_end)
    if launch.TRACE:
        started = clock_ns()
        trace.record(launch.trace_ptr, trace.WAIT, asked, started, place.item)
    acc = _multiply(acc, launch, launch.a, a_ptr, b, place, k, stop, BLOCK_N, STAGES)
    if launch.TRACE:
        trace.record(launch.trace_ptr, trace.GEMM, started, clock_ns(), place.item)
    return acc, stop


@triton.jit
def _pass_gate(gated, launch):
    """Before a program's first sink: wait until all ranks have entered, if it is to. Returns 1, or 0 without a gate."""
    if launch.GATE:
        if gated == 0:
            wait_all_entered(launch.flags.turnstile, launch.epoch, launch.handle, launch.SITE)
            gated = 1
    return gated


@triton.jit
def _tile(launch, place, rows, cols):
    """The tile at a place, or some rows of it, as sinks know it."""
    return Tile(
        place.shard, place.index, launch.per_shard, place.top, rows, cols, rows < place.row_end, cols < launch.N
    )


@triton.jit
def _sink(acc, launch, tile):
    """Hand the sum ``acc`` of a tile, or of some rows of it, to the sink."""
    launch.SINK(
        launch.handle, launch.c, launch.slots, scaled(acc, launch.scales, tile), launch.bias_ptr, tile, launch.flags,
        launch.epoch, launch.SITE, launch.BIAS,
    )  # fmt: skip


@triton.jit
def _announce(launch, shard, index):
    """Announce a tile that has been stored."""
    launch.AFTER(launch.handle, launch.slots, shard, index, launch.per_shard, launch.flags, launch.epoch, launch.SITE)


@triton.jit
def _sink_slices(launch, place, share, BLOCK_N: tl.constexpr):
    """Each program that shares a tile with many, or all but the last of them, if so many are to add it up, sums some of
    its rows, and hands them to the sink."""
    ROWS: tl.constexpr = min(launch.BLOCK_M, max(1, SLICE_ELEMENTS // BLOCK_N))
    cols = tl.arange(0, BLOCK_N)
    if share.worker < share.first + share.adders:
        wait_parts(launch.handle, launch.flags, launch.epoch, share, launch.SITE)
        for number in range(share.worker - share.first, launch.BLOCK_M // ROWS, share.adders):
            down = number * ROWS + tl.arange(0, ROWS)
            within = down[:, None] * BLOCK_N + cols[None, :]
            total, _ = slice_sum(launch.partials, share, within, launch.BLOCK_M * BLOCK_N)
            _sink(total, launch, _tile(launch, place, place.row + down, place.col + cols))


@triton.jit
def _tiles(
    launch,
    b,
    begin,
    end,
    worker,
    workers,
    OWN: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRIPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """This program's part of the tiles ``begin``, …, ``end``. ``OWN``: they are of the own shard of rows. ``SPLIT``:
    they are shared out along K. The schedule's tiles are ``STRIPS`` times as wide as these."""
    me = rank(launch.handle)
    m_blocks = tl.cdiv(launch.M, launch.BLOCK_M)
    n_blocks = tl.cdiv(launch.N, BLOCK_N * STRIPS)
    begin *= STRIPS
    end *= STRIPS
    K_TOTAL = launch.K * launch.SEGMENTS
    per_tile = tl.cdiv(K_TOTAL, launch.BLOCK_K)
    if SPLIT:
        iterations = (end - begin) * per_tile
        sharers = split_sharers(end - begin, per_tile, workers)
        split_begin = split_start(worker, sharers, iterations)
        split_end = split_start(worker + 1, sharers, iterations)
        first = begin + split_begin // per_tile
        units = tl.where(split_begin < split_end, begin + (split_end - 1) // per_tile + 1 - first, 0)
        step = 1
    else:
        first, step = begin + worker, workers
        units = tl.cdiv(max(end - first, 0), step)
    gated = 0
    pending_shard = me * 0
    pending_index = me * 0 - 1
    for unit in range(units):
        strip = first + unit * step
        k_begin, k_end = 0, K_TOTAL
        if SPLIT:
            k_begin = max(split_begin - (strip - begin) * per_tile, 0) * launch.BLOCK_K
            k_end = min(min(split_end - (strip - begin) * per_tile, per_tile) * launch.BLOCK_K, K_TOTAL)
        item = strip // STRIPS
        shard, index, block_m, block_n = launch.SCHEDULE(
            item, me, launch.per_shard, launch.per_round, m_blocks, n_blocks, launch.GROUP_M, launch.SHARDS
        )
        top = shard * launch.M if launch.SHARDED else 0
        row, row_end = top + block_m * launch.BLOCK_M, top + launch.M
        col = (block_n * STRIPS + strip % STRIPS) * BLOCK_N
        first_k = ring_start(me, launch.K, launch.SEGMENTS, launch.BLOCK_K, launch.EVEN_K)
        place = _Place(item, shard, index, block_m, top, row, row_end, col, first_k)
        acc = tl.zeros((launch.BLOCK_M, BLOCK_N), dtype=launch.ACC_DTYPE)
        k = k_begin
        if OWN:
            if launch.TRACE:
                started = clock_ns()
            a_ptr = launch.own.matrix.ptr
            acc = _multiply(acc, launch, launch.own, a_ptr, b, place, k, k_end, BLOCK_N, STAGES)
            if launch.TRACE:
                trace.record(launch.trace_ptr, trace.GEMM, started, clock_ns(), item)
        elif launch.PIECEWISE:
            while k < k_end:
                acc, k = _continue(acc, launch, b, place, k, k_end, BLOCK_N, STAGES)
        else:
            acc, k = _continue(acc, launch, b, place, k, k_end, BLOCK_N, STAGES)
        if launch.AFTER is not None:
            if pending_index >= 0:
                _announce(launch, pending_shard, pending_index)
                pending_index = me * 0 - 1
        whole = True
        if SPLIT:
            whole = k_begin == 0
            if (k_begin > 0) | (k_end < K_TOTAL):
                acc, many, share = handed_over(
                    acc, launch.handle, launch.flags, launch.epoch, launch.partials, worker, sharers, strip - begin,
                    per_tile, iterations, launch.SITE, launch.BLOCK_M, BLOCK_N,
                )  # fmt: skip
                if many:
                    if launch.SLICED:
                        whole = False
                        if launch.TRACE:
                            asked = clock_ns()
                        gated = _pass_gate(gated, launch)
                        _sink_slices(launch, place, share, BLOCK_N)
                        if launch.TRACE:
                            trace.record(launch.trace_ptr, trace.FETCH, asked, clock_ns(), item)
                    else:
                        acc = combined(
                            acc, launch.handle, launch.flags, launch.epoch, launch.partials, share,
                            launch.SITE, launch.BLOCK_M, BLOCK_N,
                        )  # fmt: skip
        if whole:
            if launch.TRACE:
                asked = clock_ns()
            gated = _pass_gate(gated, launch)
            rows, cols = row + tl.arange(0, launch.BLOCK_M), col + tl.arange(0, BLOCK_N)
            _sink(acc, launch, _tile(launch, place, rows, cols))
            if launch.EAGER:
                if launch.AFTER is not None:
                    _announce(launch, shard, index)
            else:
                pending_shard, pending_index = shard, index
            if launch.TRACE:
                trace.record(launch.trace_ptr, trace.FETCH, asked, clock_ns(), item)
    if launch.AFTER is not None:
        if pending_index >= 0:
            _announce(launch, pending_shard, pending_index)


def work_of(grid: Any, metadata: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """What profilers, as Triton's Proton, are told of a launch: its sizes, its operations, under the number of bits of
    A, and the bytes that must pass this GPU's memory."""
    m = arguments["M"] * (arguments["SHARDS"] if arguments["SHARDED"] else 1)
    n, k = arguments["N"], arguments["K"] * arguments["SEGMENTS"]
    item, made = arguments["own"].ptr.element_size(), arguments["c"].ptr.element_size()
    return {
        "name": f"{metadata.name}_{m}x{n}x{k}",
        f"flops{8 * item}": 2 * m * n * k,
        "bytes": (m + n) * k * item + m * n * made,
    }


@triton.jit(do_not_specialize=["M", "per_shard", "per_round", "half_rows"], launch_metadata=work_of)
def matmul_kernel(
    handle,
    flags,
    own,
    own_desc,
    a,
    a_desc,
    b,
    b_desc,
    bt_desc,
    b_strip_desc,
    bt_strip_desc,
    c,
    scales,
    bias_ptr,
    slots,
    partials,
    trace_ptr,
    M,
    N,
    K,
    per_shard,
    per_round,
    crew,
    chunk_rows,
    half_rows,
    SCHEDULE: tl.constexpr,
    SOURCE: tl.constexpr,
    SINK: tl.constexpr,
    SLICED: tl.constexpr,
    AFTER: tl.constexpr,
    EAGER: tl.constexpr,
    GATE: tl.constexpr,
    COURIER: tl.constexpr,
    HALF_FLAGS: tl.constexpr,
    EPOCHS: tl.constexpr,
    SITE: tl.constexpr,
    SHARDS: tl.constexpr,
    SHARDED: tl.constexpr,
    SEGMENTS: tl.constexpr,
    OWN: tl.constexpr,
    PIECEWISE: tl.constexpr,
    MEET: tl.constexpr,
    BIAS: tl.constexpr,
    M_IN_VECTORS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    STREAM_K: tl.constexpr,
    TWO_TILES: tl.constexpr,
    STRIPS: tl.constexpr,
    STRIP_STAGES: tl.constexpr,
    COURIER_M: tl.constexpr,
    COURIER_N: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    TRACE: tl.constexpr,
):
    """C = A @ B · scales + bias, where A comes from ``SOURCE`` and C goes to ``SINK``. See the module's docstring."""
    if M_IN_VECTORS:
        M = M // 16 * 16  # which it is, and Triton knows that then
    program = tl.program_id(0)
    if EPOCHS == TURNSTILE:
        epoch = enter(flags.turnstile, handle)
    elif EPOCHS == NO_EPOCHS:
        epoch = program * 0
    else:
        epoch = own_epoch(flags.turnstile)
    me = rank(handle)
    landing, top = a, 0
    if HALF_FLAGS > 0:
        half = epoch & 1
        top = half * half_rows
        landing = Matrix(a.ptr + top.to(tl.int64) * a.row_stride, a.row_stride, a.col_stride)
        flags = Flags(
            flags.turnstile, flags.ready + half * HALF_FLAGS, flags.split, flags.counters, flags.chunks,
            flags.blocks_per_chunk, flags.pieces, flags.piece_k,
        )  # fmt: skip
    if COURIER is not None:
        if program < crew.couriers:
            if TRACE:
                asked = clock_ns()
            COURIER(
                handle, own, landing, c, flags, epoch, program, crew, M, N, K, chunk_rows,
                SITE, SEGMENTS, COURIER_M, COURIER_N,
            )  # fmt: skip
            if TRACE:
                trace.record(trace_ptr, trace.FETCH, asked, clock_ns(), -1)
    own_shard = Operand(own, own_desc, None, me * M if SHARDED else 0)
    gathered = Operand(a, a_desc, None, 0 - top)
    right = Operand(b, b_desc, bt_desc, 0)
    right_of_strips = Operand(b, b_strip_desc, bt_strip_desc, 0) if STRIPS > 1 else right
    if program >= crew.dedicated:
        worker, workers = program - crew.dedicated, tl.num_programs(0) - crew.dedicated
        tiles = SHARDS * per_shard
        begin = per_shard if OWN else 0
        dealt_out = begin + whole_tiles(tiles - begin, workers, STREAM_K, TWO_TILES)
        for phase in tl.static_range(0 if OWN else 1, 3 if STREAM_K else 2):
            start = 0 if phase == 0 else begin if phase == 1 else dealt_out
            end = begin if phase == 0 else dealt_out if phase == 1 else tiles
            # Split tiles have a loop of their own: what brings their parts together costs the others a microsecond.
            # _Launch is not assigned to a variable: Triton would make tensors of the constants in it.
            _tiles(
                _Launch(
                    handle, flags, epoch, own_shard, gathered, c, scales, bias_ptr, slots, partials, trace_ptr,
                    M, N, K, per_shard, per_round, SCHEDULE, SOURCE, SINK, SLICED, AFTER, EAGER, GATE, SITE, SHARDS,
                    SHARDED, SEGMENTS, PIECEWISE, BIAS, BLOCK_M, BLOCK_K, GROUP_M, EVEN_K, PRECISION, ACC_DTYPE, TRACE,
                ),
                right_of_strips if phase == 2 else right, start, end, worker, workers, phase == 0, phase == 2,
                BLOCK_N // STRIPS if phase == 2 else BLOCK_N, STRIPS if phase == 2 else 1,
                STRIP_STAGES if phase == 2 else None,
            )  # fmt: skip
            if phase == 0:  # the program behind the one with the last own tile goes on first
                worker = (worker + workers - per_shard % workers) % workers
    if EPOCHS == TURNSTILE:
        if TRACE:
            asked = clock_ns()
        leave(flags.turnstile, epoch, handle, SITE, MEET)
        if TRACE:
            trace.record(trace_ptr, trace.WAIT, asked, clock_ns(), -1)
    elif EPOCHS != NO_EPOCHS:
        end_own_epoch(flags.turnstile, epoch, EPOCHS)
