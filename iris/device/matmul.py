"""The one persistent matmul kernel. Every fused op is this kernel with a source, a sink and a schedule.

    for each tile of the schedule:
        for each segment of K:
            a_ptr = SOURCE(…)          where this part of A is, once it may be read
            acc += A tile @ B tile      over the segment, pipelined
        SINK(…, acc)                   what happens to the finished tile

``SOURCE`` and ``SINK`` are ``@triton.jit`` functions passed as constexpr arguments, and may be the user's own:

    SOURCE(handle, a_ptr, peer, turnstile_ptr, epoch, SITE) -> pointer to row 0, column 0 of the shard of A that
        belongs to ``peer``. It waits for whatever must be waited for.
    SINK(handle, c, value, rows, cols, mask, turnstile_ptr, epoch, SITE): ``value`` is the finished tile in the
        output's dtype, bias added; ``rows`` and ``cols`` are its place in this rank's part of the output.

A is cut in one of two ways, or not at all. ``SHARDS`` > 1: by rows, one shard of M rows per rank, and a tile lies
in one shard. ``SEGMENTS`` > 1: by columns, one segment of K columns per rank, and a tile needs all of them. M is
the rows of one shard, K the columns of one segment.

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


@triton.jit
def local_source(handle, a_ptr, peer, turnstile_ptr, epoch, SITE: tl.constexpr):
    """A is whole, and here."""
    return a_ptr


@triton.jit
def local_sink(handle, c, value, rows, cols, mask, turnstile_ptr, epoch, SITE: tl.constexpr):
    """The tile is stored in this rank's own output."""
    tl.store(tile_pointers(c, c.ptr, rows, cols), value, mask=mask)


@triton.jit
def tile_pointers(matrix, ptr, rows, cols):
    """Pointers to the elements at ``rows`` × ``cols`` of a matrix that starts at ``ptr``."""
    return ptr + (rows.to(tl.int64) * matrix.row_stride)[:, None] + (cols.to(tl.int64) * matrix.col_stride)[None, :]


@triton.jit
def _multiply_segment(
    acc,
    a,
    a_ptr,
    b,
    b_desc,
    rows,
    cols,
    first_col,
    k_begin,
    K,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA_B: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``acc`` plus A[rows, 0:K] @ B[k_begin : k_begin + K, cols]."""
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = tile_pointers(a, a_ptr, rows, ks)
    b_ptrs = tile_pointers(b, b.ptr + k_begin.to(tl.int64) * b.row_stride, ks, cols)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a_tile = tl.load(a_ptrs)
        else:
            a_tile = tl.load(a_ptrs, mask=(ks < K - k)[None, :], other=0)
        if TMA_B:
            b_tile = b_desc.load([k_begin + k, first_col])
        elif EVEN_K:
            b_tile = tl.load(b_ptrs)
        else:
            b_tile = tl.load(b_ptrs, mask=(ks < K - k)[:, None], other=0)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION, out_dtype=acc.dtype)
        a_ptrs += BLOCK_K * a.col_stride
        b_ptrs += BLOCK_K * b.row_stride
    return acc


@triton.jit
def matmul_kernel(
    handle,
    turnstile_ptr,
    a,
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
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA_B: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    TRACE: tl.constexpr,
):
    """C = A @ B + bias, where A comes from ``SOURCE`` and C goes to ``SINK``. See the module's docstring."""
    epoch = enter(turnstile_ptr, handle)
    me = rank(handle)
    m_blocks = tl.cdiv(M, BLOCK_M)
    n_blocks = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), SHARDS * m_blocks * n_blocks, tl.num_programs(0)):
        shard, block_m, block_n = sharded(tile, SHARDS, m_blocks, n_blocks, me, GROUP_M)
        rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        safe_rows = tl.where(rows < M, rows, 0)
        safe_cols = tl.where(cols < N, cols, 0)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC_DTYPE)
        for step in range(SEGMENTS):
            segment = (me + step) % SEGMENTS
            if TRACE:
                asked = clock_ns()
            a_ptr = SOURCE(handle, a.ptr, shard + segment, turnstile_ptr, epoch, SITE)
            if TRACE:
                started = clock_ns()
                trace.record(trace_ptr, trace.WAIT, asked, started, shard + segment)
            acc = _multiply_segment(
                acc,
                a,
                a_ptr,
                b,
                b_desc,
                safe_rows,
                safe_cols,
                block_n * BLOCK_N,
                segment * K,
                K,
                BLOCK_K,
                BLOCK_N,
                EVEN_K,
                TMA_B,
                PRECISION,
            )
            if TRACE:
                trace.record(trace_ptr, trace.GEMM, started, clock_ns(), tile)
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
        SINK(handle, c, value, rows, cols, mask, turnstile_ptr, epoch, SITE)
        if TRACE:
            trace.record(trace_ptr, trace.FETCH, asked, clock_ns(), tile)
    if TRACE:
        asked = clock_ns()
    leave(turnstile_ptr, epoch, handle, SITE)
    if TRACE:
        trace.record(trace_ptr, trace.WAIT, asked, clock_ns(), -1)
