"""The one persistent matmul kernel. A fused op is this kernel with a schedule, a source and a sink, unless the op's
algorithm calls the library's matmul.

    for each tile, or part of a tile, that the schedule gives this program:
        until all of K is done:
            SOURCE(…)                  waits for the next part of A, and says where it is
            acc += A tile @ B tile     over that part of K, pipelined
        SINK(…, acc)                   stores, sends or adds up the finished tile

All three are ``@triton.jit`` functions passed as constexpr arguments, and users may write their own. Schedules are
described in :mod:`iris.device.schedule`, sinks in :mod:`iris.device.tile`.

    SOURCE(handle, a, flags, epoch, slots, shard, block_m, k, M, K, SITE, SEGMENTS, BLOCK_M, BLOCK_K, EVEN_K)
        -> (pointer, k up to which A is here)

A is sharded by rows, by columns, or not at all. ``SHARDED``: by rows, M per rank, and a tile needs the rows of one
``shard`` only. ``SEGMENTS`` > 1: by columns, K per rank, and a tile needs the columns of all ranks, beginning with this
rank's own: ``k`` counts columns in that order, from :func:`ring_start` on. The pointer is to where row 0, column 0 of
the gathered A would be, and is indexed with rows and columns of the gathered A; it need only be valid for the part just
waited for. ``block_m`` counts within the shard. The second result is greater than ``k``: all of K if not
``PIECEWISE``; with ``EVEN_K`` all of K, or a multiple of ``BLOCK_K`` (the simulator checks that). The kernel may read a
gathered A by TMA, so a source that waits for one calls :func:`iris.device.arch.fence_async_proxy` after its waits.
``EVEN_K``: no block of K reaches beyond the memory that it is read from; where A is gathered, a block may then span two
ranks' segments.

``OWN``: this rank's own shard of rows, which needs no transfer, is computed first, and read in place (``own``).

``HALF_FLAGS``, if not 0: A's memory has two halves, and calls alternate between them by the parity of their epoch. The
second half begins ``half_rows`` rows after the first, and its flags begin ``HALF_FLAGS`` flags after the first's.

``COURIER``, if given, moves data for all programs. The first programs, the ``crew``, run it before they compute:

    COURIER(handle, own, a, c, flags, epoch, program, crew, M, N, K, chunk_rows, SITE, SEGMENTS, COURIER_M, COURIER_N)

``own`` and ``a`` are this rank's part of A and where A is gathered, ``c`` is the output; ``program`` is the courier's
number. Rows travel in chunks of ``chunk_rows``, and a program moves ``COURIER_M`` × ``COURIER_N`` elements at a time.
The first ``dedicated`` programs of the ``crew`` compute nothing. A source waits outside the pipelined loop, so no load
is hoisted above its wait.

Stream-K: ``STREAM_K`` splits the tiles of the last waves evenly over the programs, along K. Partial sums lie in
``partials`` and are added up in a fixed order, so results do not depend on timing. If few programs share a tile, the
program with the first part collects the other parts. If many do, each adds up slices of the tile, and hands them to
the sink if ``SLICED``, else to the program with the first part. These tiles may first be cut into ``STRIPS`` strips of
columns: fewer programs then share a strip, and each hands over less.

M, and the numbers of tiles, chunks and couriers that follow from it, are not compiled into the kernel, as a server
meets many values of M. ``M_IN_VECTORS``: M is a multiple of 16, and the columns of A or C are contiguous; the width of
loads and stores depends on that.

Waits for partial sums cannot deadlock. All programs are resident. A program begins its split tiles with the one part
that is not the first of its tile, if it has such a part. Where few programs share a tile, each waits only for programs
with later parts, and the last waits for none; where many do, each waits only after it has left all its own parts.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from iris.device import trace
from iris.device.arch import clock_ns, dot_precision
from iris.device.handle import rank
from iris.device.schedule import split_sharers, split_start, whole_tiles
from iris.device.stream_k import SLICE_ELEMENTS, combined, handed_over, slice_sum, wait_parts
from iris.device.tile import SCALE_BLOCK, Flags, Matrix, Tile, scaled, tile_pointers
from iris.device.turnstile import NO_EPOCHS, TURNSTILE, end_own_epoch, enter, leave, own_epoch, wait_all_entered


class Crew(NamedTuple):
    """The programs that move data. ``couriers``: their number; ``dedicated``: how many of them compute nothing;
    ``first_units``: how many units of data all couriers share (the dedicated ones move the rest); ``abreast``: how many
    chunks of rows are carried side by side."""

    couriers: Any
    dedicated: Any
    first_units: Any
    abreast: Any


class Operand(NamedTuple):
    """A matrix as the inner loop reads it: by its TMA descriptor, by that of its transpose (B only), or, if both are
    None, by pointers. ``row``: the row of the whole matrix that its row 0 is."""

    matrix: Any
    desc: Any
    transposed_desc: Any
    row: Any


class _Launch(NamedTuple):
    """What is the same for every tile, under the names of :func:`matmul_kernel`; ``own`` and ``a`` are each an
    :class:`Operand`. All fields from ``SCHEDULE`` on are constexpr."""

    # Constexprs last: Triton 3.6 keeps one in a nested tuple (a stride of 1, say) only if another one follows here.
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
    """Where a tile lies. ``item``: its number, from which the schedule made ``shard``, ``index`` and ``block_m``;
    ``row``, ``col``: its first row and column; ``top``, ``row_end``: the first row of its shard and the one after the
    last, or of the whole matrix where A is not sharded by rows; ``first_k``: the column of A it begins with."""

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
    """The column of A with which this rank begins: its own first one, or with ``EVEN_K``, so that no block is cut, the
    first block boundary at or after it; the block that ends there then comes last."""
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
    slots,
    shard,
    block_m,
    k,
    M,
    K,
    SITE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """All of A is in this rank's memory."""
    return a.ptr, K


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b``. Hopper's tensor cores accumulate fp8 products in some 14 bits; with ``PRECISION`` "ieee", the
    sum of each block of K is added to ``acc`` in float32."""
    STEP: tl.constexpr = a.shape[1] if a.dtype.is_fp8() and PRECISION == "ieee" else None
    TAKEN: tl.constexpr = dot_precision(PRECISION)
    return tl.dot(a, b, acc, input_precision=TAKEN, max_num_imprecise_acc=STEP, out_dtype=acc.dtype)


@triton.jit
def _plus(acc, a, b, scales, rows, cols, k, PRECISION: tl.constexpr):
    """``acc + a @ b``, for ``rows`` and ``cols`` and a block of K from ``k`` on; scaled if blocks have scales, each of
    which covers the whole block of K."""
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

    The rest of K after the last whole block is added separately, so that the loop needs no masks.
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
    """Accumulate from column ``k`` on as far as the source has A. Returns ``acc``, and the column reached."""
    if launch.TRACE:
        asked = clock_ns()
    a_ptr, ready = launch.SOURCE(
        launch.handle, launch.a.matrix, launch.flags, launch.epoch, launch.slots, place.shard, place.block_m, k,
        launch.M, launch.K, launch.SITE, launch.SEGMENTS, launch.BLOCK_M, launch.BLOCK_K, launch.EVEN_K,
    )  # fmt: skip
    tl.device_assert(ready > k, "SOURCE must wait for at least one column after k, and say up to which one")
    tl.device_assert(
        (ready >= k_end) | launch.PIECEWISE, "SOURCE says that only a part of K is here: Plan(piecewise=True)"
    )
    tl.device_assert(
        (ready >= k_end) | (not launch.EVEN_K) | (ready % launch.BLOCK_K == 0),
        "SOURCE stops within a block of K: expected all of K, or a multiple of BLOCK_K",
    )
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
    """With a ``GATE``, wait before a program's first sink until all ranks have entered. Returns the new ``gated``."""
    if launch.GATE:
        if gated == 0:
            wait_all_entered(launch.flags.turnstile, launch.epoch, launch.handle, launch.SITE)
            gated = 1
    return gated


@triton.jit
def _tile(launch, place, rows, cols):
    """The tile at ``place``, or some of its rows, as sinks take it."""
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
    """Of the programs that share a tile, the first ``share.adders`` each sum some rows, and hand them to the sink."""
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
    """This program's part of the tiles ``begin``, …, ``end``. ``OWN``: they belong to this rank's shard of rows.
    ``SPLIT``: they are split along K. The schedule's tiles are ``STRIPS`` times as wide as those computed here."""
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
        if launch.TRACE:
            asked = clock_ns()
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
                        gated = _pass_gate(gated, launch)
                        _sink_slices(launch, place, share, BLOCK_N)
                    else:
                        acc = combined(
                            acc, launch.handle, launch.flags, launch.epoch, launch.partials, share,
                            launch.SITE, launch.BLOCK_M, BLOCK_N,
                        )  # fmt: skip
        if whole:
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
    """What profilers such as Triton's Proton are told about a launch: its sizes, its operations (under a name with the
    bit width of A's dtype), and the bytes that this GPU's memory must transfer."""
    m = arguments["M"] * (arguments["SHARDS"] if arguments["SHARDED"] else 1)
    n, k = arguments["N"], arguments["K"] * arguments["SEGMENTS"]
    item, made = arguments["own"].ptr.element_size(), arguments["c"].ptr.element_size()
    return {
        "name": f"{metadata.name}_{m}x{n}x{k}",
        f"flops{8 * item}": 2 * m * n * k,
        "bytes": (m + n) * k * item + m * n * made,
    }


_BY_ROWS = "M per_shard per_round half_rows chunks blocks_per_chunk couriers first_units abreast".split()
"""Arguments that change with the number of rows."""


@triton.jit(do_not_specialize=_BY_ROWS, launch_metadata=work_of)
def matmul_kernel(
    handle,
    turnstile,
    ready,
    split,
    counters,
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
    chunks,
    blocks_per_chunk,
    chunk_rows,
    pieces,
    piece_k,
    couriers,
    dedicated,
    first_units,
    abreast,
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
        M = M // 16 * 16  # changes nothing, but tells Triton that M is a multiple of 16
    program = tl.program_id(0)
    if EPOCHS == TURNSTILE:
        epoch = enter(turnstile, handle)
    elif EPOCHS == NO_EPOCHS:
        epoch = program * 0
    else:
        epoch = own_epoch(turnstile)
    me = rank(handle)
    landing, top = a, 0
    if HALF_FLAGS > 0:
        half = epoch & 1
        top = half * half_rows
        landing = Matrix(a.ptr + top.to(tl.int64) * a.row_stride, a.row_stride, a.col_stride)
        ready += half * HALF_FLAGS
    flags = Flags(turnstile, ready, split, counters, chunks, blocks_per_chunk, pieces, piece_k)
    if COURIER is not None:
        if program < couriers:
            if TRACE:
                asked = clock_ns()
            COURIER(
                handle, own, landing, c, flags, epoch, program, Crew(couriers, dedicated, first_units, abreast),
                M, N, K, chunk_rows, SITE, SEGMENTS, COURIER_M, COURIER_N,
            )  # fmt: skip
            if TRACE:
                trace.record(trace_ptr, trace.FETCH, asked, clock_ns(), -1)
    own_shard = Operand(own, own_desc, None, me * M if SHARDED else 0)
    gathered = Operand(a, a_desc, None, 0 - top)
    right = Operand(b, b_desc, bt_desc, 0)
    right_of_strips = Operand(b, b_strip_desc, bt_strip_desc, 0) if STRIPS > 1 else right
    if program >= dedicated:
        worker, workers = program - dedicated, tl.num_programs(0) - dedicated
        tiles = SHARDS * per_shard
        begin = per_shard if OWN else 0
        dealt_out = begin + whole_tiles(tiles - begin, workers, STREAM_K, TWO_TILES)
        for phase in tl.static_range(0 if OWN else 1, 3 if STREAM_K else 2):
            start = 0 if phase == 0 else begin if phase == 1 else dealt_out
            end = begin if phase == 0 else dealt_out if phase == 1 else tiles
            # Split tiles have their own loop: the code that joins their parts would cost whole tiles a microsecond.
            # _Launch is not assigned to a variable: Triton would turn its constants into tensors.
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
            if phase == 0:  # the program after the one with the last own tile takes the first of the next tiles
                worker = (worker + workers - per_shard % workers) % workers
    if EPOCHS == TURNSTILE:
        if TRACE:
            asked = clock_ns()
        leave(turnstile, epoch, handle, SITE, MEET)
        if TRACE:
            trace.record(trace_ptr, trace.WAIT, asked, clock_ns(), -1)
    elif EPOCHS != NO_EPOCHS:
        end_own_epoch(turnstile, epoch, EPOCHS)
