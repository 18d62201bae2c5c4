"""Matmul + all-scatter: each rank computes its own columns of C, and all ranks end up with the whole C.

Unfused::

    columns = A @ B + bias
    torch.distributed.all_gather(parts, columns)
    output = torch.cat(parts, dim=1)

Algorithms. "When it wins" was measured in bf16 on 2, 4 and 8 × H200 and on two H100s, 2026-11-21 to 30.

**push**: the epilogue stores every finished tile into the output of every rank. When it wins: small outputs. (In larger
ones all programs push at the same time and wait for the link together.)

**split**: ``comm_sms`` programs only send. The others store finished tiles in this rank's output; as soon as a chunk is
complete, the senders store it, in tiles of ``comm_block_m`` × ``comm_block_n``, into the outputs of all peers. When it
wins: the links need about as long for the output as the SMs for the matmul (8192×29568×8192 on 4 × H200, 2026-11-21).

**streams**: as ``split``, but the senders are a kernel of their own on a second stream. When it wins: as ``split``.

**relay**: as ``split``, but round the ring: the senders store a chunk only at the rank before, which stores it at the
rank before that, and so on. So no two ranks ever send to the same rank. When it wins: the links need longer for the
output than the SMs for the matmul (8192×29568×4096 on 4 × H200, 8192×29568×8192 on 8; 2026-11-26).

**copy_engine**: as ``split``, but the copy engine sends, in ``num_chunks`` chunks; all SMs compute. When it wins:
outputs of a few MiB per rank and more.

**decomposed**: the library's matmul (``torch.matmul``) of ``num_chunks`` chunks of rows, one after the other. After
each, the copy engine sends it (:mod:`iris.ops.decomposed`); only the last is stored by a kernel, as the SMs then have
nothing else to do. Ranks are brought level before the copies of each chunk but the first. When it wins: where the
library's matmul is faster than this one, and chunks are large enough to fill the device.

**low_latency**: ``torch.matmul``, then a kernel that exchanges the parts through inboxes (:mod:`iris.ops.exchange`).
When it wins: few rows, as in decoding.

**baseline**: ``torch.matmul``, then the collective: what the others are measured against, and what "auto" picks where
they lose.

Signals: on entry every rank flags "my output may be written" at all peers, and the first store to a peer waits for
that; on exit the ranks meet, and every output is complete. Flags carry the call's epoch. ``low_latency`` does neither:
peers write to an inbox, not to the output, and each rank waits for all parts (:mod:`iris.ops.exchange`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from iris.context import Iris
from iris.device import handle as handles
from iris.device.arch import beyond, copy_stages
from iris.device.chunk import counted_after
from iris.device.peer import translate
from iris.device.sync import signal, wait
from iris.device.tile import Flags, Matrix, Slots, block_at, finished, peer_at, store_everywhere, tile_pointers
from iris.device.turnstile import enter, leave, wait_all_entered
from iris.ops.algorithms import SCATTER
from iris.ops.call import OpCall
from iris.ops.choice import resolve
from iris.ops.config import RELAY_TEAM, FusedConfig
from iris.ops.copies import column_major
from iris.ops.exchange import exchange
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
from iris.ops.replay import replayed
from iris.ops.room import memory_of
from iris.ops.workspace import FusedWorkspace
from iris.trace import Trace, trace_of

OP = SCATTER
_TEAM: tl.constexpr = tl.constexpr(RELAY_TEAM)


@triton.jit
def push_sink(handle, c, slots, acc, bias_ptr, tile, flags, epoch, SITE: tl.constexpr, BIAS: tl.constexpr):
    """The tile is stored into every rank's output, this rank's own first."""
    store_everywhere(handle, c, finished(acc, bias_ptr, tile, c.ptr.dtype.element_ty, BIAS), tile)


@triton.jit
def send_courier(
    handle, own, a, c, flags, epoch, program, crew, M, N, K, chunk_rows,
    SITE: tl.constexpr, SEGMENTS: tl.constexpr, COURIER_M: tl.constexpr, COURIER_N: tl.constexpr,
):  # fmt: skip
    """Store this rank's columns into all peers' outputs, chunk by chunk as they are complete."""
    _send_chunks(handle, c, flags, epoch, program, crew.couriers, M, N, chunk_rows, SITE, COURIER_M, COURIER_N)


@triton.jit
def relay_courier(
    handle, own, a, c, flags, epoch, program, crew, M, N, K, chunk_rows,
    SITE: tl.constexpr, SEGMENTS: tl.constexpr, COURIER_M: tl.constexpr, COURIER_N: tl.constexpr,
):  # fmt: skip
    """Store into the output of the rank before: this rank's columns, chunk by chunk as they are complete, and those of
    the next ranks as they arrive. Teams of programs take turns at the chunks, so that one team can send while another
    waits for the next rank.

    ``flags.ready``: which chunks have arrived, indexed by how many ranks away their owner is, by program and by chunk.
    The flags at distance 0 and program 0 say which chunks of this rank's own columns are complete.
    """
    me, world, chunks, senders = handles.rank(handle), handles.world_size(handle), tl.cdiv(M, chunk_rows), crew.couriers
    before, following = (me + world - 1) % world, (me + 1) % world
    teams = max(1, senders // _TEAM)
    team, member = program % teams, program // teams
    members = tl.cdiv(senders - team, teams)
    across = tl.cdiv(N, COURIER_N)
    stages: tl.constexpr = copy_stages(c.ptr.dtype.element_ty, COURIER_M * COURIER_N)
    ITEM: tl.constexpr = c.ptr.dtype.element_ty.primitive_bitwidth // 8
    wait_all_entered(flags.turnstile, epoch, handle, SITE)
    for chunk in range(team, chunks, teams):
        wait(flags.ready + chunk, epoch, me, handle, SITE)
        first = chunk * chunk_rows
        row_end = min(first + chunk_rows, M)
        blocks = tl.cdiv(row_end - first, COURIER_M) * across
        for away in range(world - 1):
            arrived = flags.ready + (away * senders + program) * chunks + chunk
            if away > 0:
                wait(arrived, epoch, following, handle, SITE)
            here = beyond(c.ptr, ((me + away) % world - me).to(tl.int64) * N * c.col_stride, ITEM)
            there = translate(handle, here, before)
            for turn in tl.range(tl.cdiv(max(blocks - member, 0), members), num_stages=stages):
                block = member + turn * members
                rows, cols, row_mask, col_mask = block_at(block, first, row_end, N, COURIER_M, COURIER_N)
                mask = row_mask[:, None] & col_mask[None, :]
                value = tl.load(tile_pointers(c, here, rows, cols), mask=mask)
                tl.store(tile_pointers(c, there, rows, cols), value, mask=mask)
            if away < world - 2:  # the last rank to receive a chunk passes it no further
                signal(arrived + senders * chunks, epoch, before, handle)  # seen from there, its owner is one further


@triton.jit
def _send_chunks(
    handle, c, flags, epoch, program, senders, M, N, chunk_rows,
    SITE: tl.constexpr, COURIER_M: tl.constexpr, COURIER_N: tl.constexpr,
):  # fmt: skip
    """Send this program's share, as one of ``senders``, of all chunks of this rank's columns."""
    # Chunks may be complete before peers may be written to: programs that compute do not wait for this.
    wait_all_entered(flags.turnstile, epoch, handle, SITE)
    for chunk in range(tl.cdiv(M, chunk_rows)):
        wait(flags.ready + chunk, epoch, handles.rank(handle), handle, SITE)
        first = chunk * chunk_rows
        _send(handle, c, program, senders, first, min(first + chunk_rows, M), N, COURIER_M, COURIER_N)


@triton.jit
def _send(handle, c, program, senders, row_begin, row_end, N, COURIER_M: tl.constexpr, COURIER_N: tl.constexpr):
    """Store this program's share, as one of ``senders``, of some rows of this rank's columns at all peers."""
    across = tl.cdiv(N, COURIER_N)
    for block in range(program, tl.cdiv(row_end - row_begin, COURIER_M) * across, senders):
        rows, cols, row_mask, col_mask = block_at(block, row_begin, row_end, N, COURIER_M, COURIER_N)
        mask = row_mask[:, None] & col_mask[None, :]
        value = tl.load(tile_pointers(c, c.ptr, rows, cols), mask=mask)
        for step in range(1, handles.world_size(handle)):
            there = translate(handle, c.ptr, peer_at(handle, step, block))
            tl.store(tile_pointers(c, there, rows, cols), value, mask=mask)


@triton.jit(do_not_specialize=["first"])
def send_kernel(
    handle, flags, c, first, M, N, chunk_rows,
    SITE: tl.constexpr, BESIDE: tl.constexpr, COURIER_M: tl.constexpr, COURIER_N: tl.constexpr,
):  # fmt: skip
    """The collective alone. ``BESIDE``: beside the matmul, all rows chunk by chunk as they are complete; else the rows
    from ``first`` on, at once."""
    epoch = enter(flags.turnstile, handle)
    program, senders = tl.program_id(0), tl.num_programs(0)
    if BESIDE:
        _send_chunks(handle, c, flags, epoch, program, senders, M, N, chunk_rows, SITE, COURIER_M, COURIER_N)
    else:
        wait_all_entered(flags.turnstile, epoch, handle, SITE)
        _send(handle, c, program, senders, first, M, N, COURIER_M, COURIER_N)
    leave(flags.turnstile, epoch, handle, SITE)


@replayed
def matmul_all_scatter(
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
    """``output[:, r * n : (r + 1) * n] = A @ B_r + bias_r`` for every rank r, on all ranks.

    Args:
        output: [M, N] on the symmetric heap, at one place and with the same strides on all ranks, rows contiguous for
            ``copy_engine`` and ``decomposed``; not in memory of another operand; in A's dtype, or for 8-bit A as for
            :func:`iris.ops.all_gather_matmul`.
        A: [M, K], equal on all ranks; any strides; Iris's own kernel copies it first if its rows are not contiguous.
        B: [K, N / world_size], this rank's columns, in A's dtype; any strides, its rows contiguous on
            all ranks or on none.
        bias: [N / world_size] per column, or [M, 1] per row; in output's dtype, this rank's own.
        scale_a, scale_b: for int8 and fp8: float32, one number, or one for each row of A, [M] or [M, 1], and for each
            of this rank's columns of B; or for fp8 one for each block of 128, as for
            :func:`iris.ops.all_gather_matmul`.
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
    check_rows_of_b(OP, B, k, output.shape[1] // world)
    check_shape(OP, "output", output, (m, n * world), "rows of A, columns of B times the number of ranks")
    check_symmetric(ctx, OP, "output", output, "Peers write it: make it with ctx.empty.")
    bias_is = bias_kind(OP, bias, m, n)
    problem = Problem(OP, m, n, k, A.dtype, world, None, not has_contiguous_rows(B), output.dtype)
    columns = output[:, ctx.rank * n : (ctx.rank + 1) * n]
    chosen = resolve(
        ctx, problem, config, workspace, trace, refused=lambda one: without_rows(OP, one, columns),
        shared={"output": output}, scales=scales,
    )  # fmt: skip
    ours, recorded = memory_of(ctx, problem, chosen, workspace), trace_of(ctx, OP, trace)
    call = _Call(
        ctx, problem, columns, A, column_major(ours, problem, B), bias, bias_is, scales, chosen, recorded, ours, output
    )
    getattr(call, chosen.algorithm)()
    return output


@dataclass(frozen=True)
class _Call(OpCall):
    """A method per algorithm. ``output``: this rank's columns of ``whole``, the caller's output."""

    whole: torch.Tensor

    def push(self) -> None:
        self.launch(Plan(self.site, sink=push_sink, sliced=True, gate=True))

    def split(self) -> None:
        self._launch_with(send_courier)

    def relay(self) -> None:
        self._launch_with(relay_courier)

    def streams(self) -> None:
        senders = self.comm_programs
        plan = replace(self._plan(), meet=False)
        computing = replace(self.config, num_sms=self.programs - senders)
        self.workspace.engine.then(
            lambda: self.launch(plan, slots=Slots(done=self.workspace.ready), config=computing),
            # The second kernel has a turnstile of its own, which counts the same calls.
            lambda: self._send(self.workspace.second_turnstile, senders, chunk_rows=plan.chunk_rows),
        )

    def copy_engine(self) -> None:
        # The copies start when a chunk is complete, so the matmul waits for all ranks; they meet after the copies.
        plan = replace(self._plan(self.config.num_chunks), gate=True, meet=False)
        engine = self.workspace.engine
        done = self.workspace.scratch("done", plan.chunks, torch.int32)

        def copies() -> None:
            for chunk in range(plan.chunks):
                engine.wait(done[chunk:][:1])
                engine.put_to_all(self.output[chunk * plan.chunk_rows :][: plan.chunk_rows])
                engine.clear(done[chunk:][:1])

        engine.beside(lambda: self.launch(plan, slots=Slots(done=done)), copies, self.decomposition().meet)

    def decomposed(self) -> None:
        rank, world, engine, parts = self.ctx.rank, self.ctx.world_size, self.workspace.engine, self.decomposition()
        *others, last = self.config.cut(self.problem.m)
        with engine.running(last=lambda: self._send_all(last.first), announced=world > 1):
            parts.enter()
            for chunk, rows in enumerate((*others, last)):
                self.fill(rows.of(self.a), rows)
                if rows is last:
                    break
                if chunk == 0:
                    parts.wait_entered(rank + 1, world - 1)
                else:
                    parts.keep_level(chunk)
                engine.follow()
                engine.put_to_all(rows.of(self.output))

    def low_latency(self) -> None:
        self.fill(self.a)
        exchange(self.ctx, self.workspace, self.blocks(), self.output, self.whole, self.site)

    def baseline(self) -> None:
        self.fill(self.a)
        self._send_all()

    def _launch_with(self, courier: Any) -> None:
        """Launch the matmul; some of its programs only send, by ``courier``."""
        senders = self.comm_programs
        plan = replace(self._plan(), courier=courier, couriers=senders, dedicated=senders)
        self.launch(plan, slots=Slots(done=self.workspace.ready))

    def _plan(self, wanted_chunks: int | None = None) -> Plan:
        """What the plans of all algorithms that send chunks have in common; None: as many chunks as possible."""
        count, blocks = self.config.cut_in_groups(self.problem.m, wanted_chunks)
        rows = blocks * self.config.block_size_m
        return Plan(
            self.site, after=counted_after, eager=True, chunks=count, counts=count, chunk_rows=rows,
            blocks_per_chunk=self.config.tiles(rows, self.problem.n),
        )  # fmt: skip

    def _send_all(self, first: int = 0) -> None:
        """Store the rows from ``first`` on at all peers, with all programs, and meet the peers."""
        self._send(self.workspace.turnstile, self.programs, first)

    def _send(self, turnstile: torch.Tensor, programs: int, first: int = 0, chunk_rows: int | None = None) -> None:
        """Launch :func:`send_kernel`. ``chunk_rows``: beside the matmul, in chunks of so many rows."""
        flags = Flags(turnstile, self.workspace.ready)
        send_kernel[(programs,)](
            self.ctx.handle, flags, Matrix(self.output, *self.output.stride()), first, self.problem.m, self.problem.n,
            chunk_rows or self.problem.m, SITE=self.site, BESIDE=chunk_rows is not None,
            COURIER_M=self.config.comm_block_m, COURIER_N=self.config.comm_block_n, num_warps=8,
        )  # fmt: skip
