"""The one persistent matmul kernel. Every fused op is this kernel with a source, a sink and a schedule.

    for each tile of the schedule:
        for each segment of K:
            a_ptr = SOURCE(…)          where this part of A is, once it may be read
            acc += A tile @ B tile      over the segment, pipelined
        SINK(…, acc)                   what happens to the finished tile

``SOURCE`` and ``SINK`` are ``@triton.jit`` functions passed as constexpr arguments, and may be the user's own:

    SOURCE(handle, a_ptr, peer, block_m, flags, epoch, SITE) -> pointer to row 0, column 0 of A as the kernel shall
        index it. It waits for whatever must be waited for before block row ``block_m`` of ``peer``'s part is read.
    SINK(handle, c, value, rows, cols, mask, flags, epoch, SITE): ``value`` is the finished tile in the output's
        dtype, bias added; ``rows`` and ``cols`` are its place in this rank's part of the output.

A is cut in one of two ways, or not at all. ``SHARDS`` > 1: by rows, one shard of M rows per rank, and a tile lies
in one shard. ``SEGMENTS`` > 1: by columns, one segment of K columns per rank, and a tile needs all of them. M is
the rows of one shard, K the columns of one segment. ``peer`` is the rank that the shard or segment belongs to;
ranks are visited in ring order from this one on, upwards (``RING`` 1) or downwards (-1).

Where parts are gathered into one buffer, ``STACKED`` says that they lie there one below the other, M rows each; the
own part, which needs no transfer, is then read where it lies (``own``) and comes first.

The waits of a source stand outside the pipelined loop, so no load is moved above them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from iris.device import trace
from iris.device.arch import clock_ns
from iris.device.handle import rank
from iris.device.schedule import sharded
from iris.device.sync import enter, leave

BIAS_NONE: tl.constexpr = tl.constexpr(0)
BIAS_ROW: tl.constexpr = tl.constexpr(1)
BIAS_COLUMN: tl.constexpr = tl.constexpr(2)


class Matrix(NamedTuple):
    """A matrix in memory: where it starts, and its strides in elements."""

    ptr: Any
    row_stride: Any
    col_stride: Any


class Flags(NamedTuple):
    """What ranks tell each other with. ``turnstile``: see :func:`iris.device.sync.enter`. ``ready``: one epoch per
    (rank, chunk), for parts of A that arrive in ``chunks`` chunks of ``blocks_per_chunk`` block rows."""

    turnstile: Any
    ready: Any
    chunks: Any
    blocks_per_chunk: Any


@triton.jit
def local_source(handle, a_ptr, peer, block_m, flags, epoch, SITE: tl.constexpr):
    """A is whole, and here."""
    return a_ptr


@triton.jit
def local_sink(handle, c, value, rows, cols, mask, flags, epoch, SITE: tl.constexpr):
    """The tile is stored in this rank's own output."""
    tl.store(tile_pointers(c, c.ptr, rows, cols), value, mask=mask)


@triton.jit
def tile_pointers(matrix, ptr, rows, cols):
    """Pointers to the elements at ``rows`` × ``cols`` of a matrix that starts at ``ptr``."""
    return ptr + (rows.to(tl.int64) * matrix.row_stride)[:, None] + (cols.to(tl.int64) * matrix.col_stride)[None, :]


@triton.jit
def _multiply(
    acc,
    a,
    a_desc,
    a_ptr,
    b,
    b_desc,
    first_row,
    desc_row,
    first_col,
    b_row,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``acc`` plus A[first_row :, 0 : K] @ B[b_row : b_row + K, first_col :], one tile of each.

    ``desc_row`` is ``first_row`` as ``a_desc`` counts. What is left of K behind the last whole block is added apart, so
    that the loop needs no masks.
    """
    ks = tl.arange(0, BLOCK_K)
    if a_desc is None:
        rows = first_row + tl.arange(0, BLOCK_M)
        a_ptrs = tile_pointers(a, a_ptr, tl.where(rows < M, rows, 0), ks)
    if b_desc is None:
        cols = first_col + tl.arange(0, BLOCK_N)
        b_start = b.ptr + b_row.to(tl.int64) * b.row_stride
        b_ptrs = tile_pointers(b, b_start, ks, tl.where(cols < N, cols, 0))
    whole = K if EVEN_K else K // BLOCK_K * BLOCK_K
    for k in range(0, whole, BLOCK_K):
        a_tile = tl.load(a_ptrs) if a_desc is None else a_desc.load([desc_row, k])
        b_tile = tl.load(b_ptrs) if b_desc is None else b_desc.load([b_row + k, first_col])
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION, out_dtype=acc.dtype)
        if a_desc is None:
            a_ptrs += BLOCK_K * a.col_stride
        if b_desc is None:
            b_ptrs += BLOCK_K * b.row_stride
    if not EVEN_K:
        ks = whole + tl.arange(0, BLOCK_K)
        rows = first_row + tl.arange(0, BLOCK_M)
        cols = first_col + tl.arange(0, BLOCK_N)
        a_ptrs = tile_pointers(a, a_ptr, tl.where(rows < M, rows, 0), ks)
        b_ptrs = tile_pointers(b, b.ptr + b_row.to(tl.int64) * b.row_stride, ks, tl.where(cols < N, cols, 0))
        a_tile = tl.load(a_ptrs, mask=(ks < K)[None, :], other=0)
        b_tile = tl.load(b_ptrs, mask=(ks < K)[:, None], other=0)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    return acc


@triton.jit
def _tiles(
    handle,
    flags,
    epoch,
    own,
    own_desc,
    a,
    a_desc,
    b,
    b_desc,
    c,
    bias_ptr,
    trace_ptr,
    M,
    N,
    K,
    begin,
    end,
    SOURCE: tl.constexpr,
    SINK: tl.constexpr,
    SITE: tl.constexpr,
    SHARDS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    RING: tl.constexpr,
    STACKED: tl.constexpr,
    OWN: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    TRACE: tl.constexpr,
):
    """This program's tiles among ``begin``, …, ``end``. ``OWN``: all of them are of the own shard of rows, or their
    first segment is the own one."""
    me = rank(handle)
    m_blocks = tl.cdiv(M, BLOCK_M)
    n_blocks = tl.cdiv(N, BLOCK_N)
    for tile in range(begin, end, tl.num_programs(0)):
        turn, block_m, block_n = sharded(tile, m_blocks, n_blocks, GROUP_M)
        shard = (me + RING * turn + SHARDS) % SHARDS
        first_row, first_col = block_m * BLOCK_M, block_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC_DTYPE)
        if OWN:
            if TRACE:
                started = clock_ns()
            b_row = (me % SEGMENTS) * K
            acc = _multiply(
                acc,
                own,
                own_desc,
                own.ptr,
                b,
                b_desc,
                first_row,
                first_row,
                first_col,
                b_row,
                M,
                N,
                K,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                EVEN_K,
                PRECISION,
            )
            if TRACE:
                trace.record(trace_ptr, trace.GEMM, started, clock_ns(), tile)
        for step in range(1 if OWN else 0, SEGMENTS):
            segment = (me + RING * step + SEGMENTS) % SEGMENTS
            if TRACE:
                asked = clock_ns()
            a_ptr = SOURCE(handle, a.ptr, shard + segment, block_m, flags, epoch, SITE)
            if TRACE:
                started = clock_ns()
                trace.record(trace_ptr, trace.WAIT, asked, started, shard + segment)
            if STACKED:
                top = (shard + segment) * M
                a_ptr += top.to(tl.int64) * a.row_stride
                desc_row = top + first_row
            else:
                desc_row = first_row
            acc = _multiply(
                acc,
                a,
                a_desc,
                a_ptr,
                b,
                b_desc,
                first_row,
                desc_row,
                first_col,
                segment * K,
                M,
                N,
                K,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                EVEN_K,
                PRECISION,
            )
            if TRACE:
                trace.record(trace_ptr, trace.GEMM, started, clock_ns(), tile)
        rows = first_row + tl.arange(0, BLOCK_M)
        cols = first_col + tl.arange(0, BLOCK_N)
        row_mask = rows < M
        rows += shard * M
        if BIAS == BIAS_ROW:
            acc += tl.load(bias_ptr + rows, mask=row_mask, other=0).to(ACC_DTYPE)[:, None]
        if BIAS == BIAS_COLUMN:
            acc += tl.load(bias_ptr + cols, mask=cols < N, other=0).to(ACC_DTYPE)[None, :]
        mask = row_mask[:, None] & (cols < N)[None, :]
        value = acc.to(c.ptr.dtype.element_ty)
        if TRACE:
            asked = clock_ns()
        SINK(handle, c, value, rows, cols, mask, flags, epoch, SITE)
        if TRACE:
            trace.record(trace_ptr, trace.FETCH, asked, clock_ns(), tile)


@triton.jit
def matmul_kernel(
    handle,
    flags,
    own,
    own_desc,
    a,
    a_desc,
    b,
    b_desc,
    c,
    bias_ptr,
    trace_ptr,
    M,
    N,
    K,
    SOURCE: tl.constexpr,
    SINK: tl.constexpr,
    SITE: tl.constexpr,
    SHARDS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    RING: tl.constexpr,
    STACKED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    TRACE: tl.constexpr,
):
    """C = A @ B + bias, where A comes from ``SOURCE`` and C goes to ``SINK``. See the module's docstring."""
    epoch = enter(flags.turnstile, handle)
    per_shard = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    APART: tl.constexpr = STACKED and SHARDS > 1
    begin = tl.program_id(0)
    for phase in tl.static_range(2 if APART else 1):
        end = per_shard if APART and phase == 0 else SHARDS * per_shard
        _tiles(
            handle,
            flags,
            epoch,
            own,
            own_desc,
            a,
            a_desc,
            b,
            b_desc,
            c,
            bias_ptr,
            trace_ptr,
            M,
            N,
            K,
            begin,
            end,
            SOURCE,
            SINK,
            SITE,
            SHARDS,
            SEGMENTS,
            RING,
            STACKED,
            STACKED and phase == 0,
            BIAS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            GROUP_M,
            EVEN_K,
            PRECISION,
            ACC_DTYPE,
            TRACE,
        )
        if APART:
            begin += tl.cdiv(max(per_shard - begin, 0), tl.num_programs(0)) * tl.num_programs(0)
    if TRACE:
        asked = clock_ns()
    leave(flags.turnstile, epoch, handle, SITE)
    if TRACE:
        trace.record(trace_ptr, trace.WAIT, asked, clock_ns(), -1)
