"""All-gather + matmul: A is sharded over the ranks, and every rank multiplies the whole A by its own B.

Unfused, with A sharded by rows (``gather_dim=0``)::

    torch.distributed.all_gather_into_tensor(A, A_sharded)
    output = A @ B + bias

and with A sharded by columns (``gather_dim=1``)::

    torch.distributed.all_gather(shards, A_sharded)
    output = torch.cat(shards, dim=1) @ B + bias

By rows, a rank computes the tiles of its own rows first. The other ranks' rows follow, and take turns in ``num_rounds``
rounds, so that tiles computed at the same time share columns of B. That is faster where B is larger than L2 and each
rank has few rows.

Algorithms. "When it wins" was measured in bf16 on 2, 4 and 8 × H200 and on two H100s, 2026-11-21 to 30.

**pull**: the matmul kernel loads each tile of A from the rank that owns it, beginning with its own. On entry every
rank flags "my A is ready" at all peers; a tile's source waits for its owner's flag. When it wins: where no memory can
be spared to gather A. Each tile of A crosses the link once per column of output tiles, so the link bounds it.

**push**: programs store this rank's part into the staging memory of all peers, and flag what is complete; the matmul
waits for what a tile needs. With ``comm_sms``, that many programs only store, one group of K after the other, in the
order in which peers use them, while the others compute. Without it, every program stores its share, in ``num_chunks``
chunks of rows, before it computes. When it wins: with ``comm_sms``, 512 to 4096 rows on 8 ranks where tiles make few
waves and the transfer takes little more than 0.1 ms; some gathers of 512 to 2048 rows on 4 ranks.

**hbm_buffer**: some programs only fetch: they load the other ranks' parts into this rank's staging memory, one group of
K after the other, and flag each; the others compute as groups arrive. Every remote byte crosses the link once. When it
wins: where the copy engines are busy with other work; on 8 ranks, some gathers.

**copy_engine**: every rank's copy engine puts the rank's part into the staging memory of all peers, previous rank
first, in ``num_chunks`` chunks, and after each chunk the call's epoch into a flag. The matmul reads its own rows in
place, then each chunk as it arrives. (By columns, its programs first copy its own part to the staging memory, which
takes 10 to 30 µs.) No SM moves data over the links. When it wins: by columns, on 4 and 8 ranks, from 1024 rows on, if
the output is wide for its K; by rows, parts of a few MiB and more, cut into chunks too small for the library's tiles to
fill the device.

**decomposed**: the same copies, but the library's matmul (``torch.matmul``), once per chunk (by rows alternately on two
lanes), each time after a kernel of one program that waits for the chunk (:mod:`iris.ops.decomposed`). Only the part
that arrives last is cut into ``num_chunks``: while any other part is computed, the next one is on its way. With
``owners_per_matmul``, one matmul computes the parts of several ranks. By columns, each product is added to those
before, and the sum is rounded, as in PyTorch's fused op; with all ranks' columns in one matmul, and for 8-bit dtypes,
nothing is added up, and each chunk of rows waits for all its columns. When it wins: by rows, mostly, from 1024 rows on
(4096 on 8 ranks), where the library's matmul is faster than this one; by columns on 2 and 4 ranks, mostly.

**low_latency**: a kernel that exchanges the parts through inboxes (:mod:`iris.ops.exchange`), then ``torch.matmul``.
When it wins: few rows, as in decoding, where flags and launches take the time, and bytes do not.

**baseline**: gather, then ``torch.matmul``: what the others are measured against, and what "auto" picks where they
lose.

In ``pull``, ``hbm_buffer`` and ``baseline``, programs wait until a peer has entered the call, and the ranks meet on
exit. Where the copy engine writes the staging memory, ranks meet on exit, too. ``push`` and ``low_latency`` do neither:
the memory they write has two halves, between which calls alternate. A rank that has ended a call has received all
peers' parts in it, so all peers had begun that call, and ended the one before it. The half that peers read in the call
before may therefore be overwritten in the next call.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from iris.context import Iris
from iris.device import schedule
from iris.device.tile import Flags, Matrix
from iris.errors import ArgumentError, ShapeError
from iris.ops.algorithms import GATHER, TRAITS
from iris.ops.call import OpCall
from iris.ops.choice import resolve
from iris.ops.config import FusedConfig
from iris.ops.copies import aligned, column_major, copy_to, row_major
from iris.ops.decomposed import Decomposition, Landing, lanes_for
from iris.ops.exchange import exchange
from iris.ops.gathering import (
    arrived_source,
    fetch_courier,
    gather_kernel,
    keep_courier,
    pull_source,
    push_courier,
    put_courier,
)
from iris.ops.operands import (
    bias_kind,
    check_gathered,
    check_operands,
    check_rows_of_b,
    check_shape,
    has_contiguous_rows,
    not_symmetric,
    place_of,
)
from iris.ops.plan import Plan
from iris.ops.problem import Problem
from iris.ops.replay import replayed
from iris.ops.room import GATHER_FLAGS, memory_of, scales_blocks, scales_matrix, scales_nbytes
from iris.ops.rows import MAX_CHUNKS, Rows, abreast, arriving_groups, chunks_of, evenly
from iris.ops.scales import BLOCK
from iris.ops.workspace import FusedWorkspace
from iris.trace import Trace, trace_of

OP = GATHER


@replayed
def all_gather_matmul(
    ctx: Iris,
    output: torch.Tensor,
    A_sharded: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gather_dim: int | None = None,
    gathered: torch.Tensor | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    config: FusedConfig | str | None = None,
    workspace: FusedWorkspace | None = None,
    trace: bool | Trace = False,
) -> torch.Tensor:
    """``output = all_gather(A_sharded) @ B + bias``; see the module for the unfused lines.

    Args:
        output: [M, N], any strides, not in memory of another operand; in A's dtype. For int8 it is int32, or with
            scales bfloat16, float16 or float32; for float8_e4m3fn (fp8) one of these three.
        A_sharded: [M / world_size, K] for ``gather_dim=0``, [M, K / world_size] for 1; any strides, copied first where
            an algorithm needs contiguous rows. For ``pull`` and ``hbm_buffer``, in which peers read it: on the
            symmetric heap, with the same strides on all ranks.
        B: [K, N] in A's dtype; any strides, its rows contiguous on all ranks or on none. With 8 bits calls are the
            fastest if its columns are contiguous.
        bias: [N] per column, or [M, 1] per row; in output's dtype, added in float32 (in int32 to an int32 output).
        scale_a: for int8 and fp8: float32; the product is multiplied by it in float32, before bias is added. One
            number, equal on all ranks. Or one for each row: for ``gather_dim=0`` of A_sharded, [M / world_size] or
            [M / world_size, 1], and the op gathers them, too; for ``gather_dim=1`` [M], equal on all ranks. Or, for fp8
            with a scale_b per block, one for each row and 128 columns of K: [rows, K / 128], rounded up; with
            ``gather_dim=1``, K / world_size must then be a multiple of 128.
        scale_b: the same for this rank's columns of B: one number, or [N], or [1, N]; or one for each block of 128 rows
            and 128 columns, [K / 128, N / 128], rounded up. Scales of blocks may have any strides.
        gather_dim: which dimension of A is sharded; None: inferred from the shapes.
        gathered: [M, K] in A's dtype, any strides, not in memory of an operand: where to leave all of A, too, for
            another matmul with it; on all ranks or on none. It takes a copy within this GPU's memory, and by
            ``copy_engine`` and ``decomposed`` the ranks meet once more. Not by ``pull``, which gathers nothing.
        config: None picks one, see :func:`iris.ops.pick_config`. All algorithms but ``pull`` need staging memory for
            all of A on the symmetric heap, ``push`` twice that, and ``low_latency`` two to four times. If the heap
            lacks that, "auto" takes ``pull``, provided that A_sharded is on the heap.
        workspace: needed only if other ops run at the same time, on another stream; see ``iris.ops.new_workspace``.
        trace: record per-program intervals, in this Trace or in a new one; it is then ``ctx.last_trace``. With "auto",
            trace on all ranks or on none, as "auto" then takes an algorithm that can be traced.

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
        all ranks have finished reading A_sharded, so it may be overwritten; no barrier is needed between calls.
    """
    ctx.check(OP)
    scales = check_operands(ctx, OP, output, ("A_sharded", A_sharded), B, bias, scale_a, scale_b)
    world = ctx.world_size
    by_rows = _gather_dim(A_sharded, B, world, gather_dim) == 0
    (rows, cols), (k, n) = A_sharded.shape, B.shape
    m = rows * world if by_rows else rows
    check_rows_of_b(OP, B, cols if by_rows else cols * world, output.shape[1], "the gathered A")
    guessed = "" if by_rows or gather_dim is not None else ", A_sharded being taken as sharded by columns"
    check_shape(OP, "output", output, (m, n), f"rows of the gathered A, columns of B{guessed}")
    bias_is = bias_kind(OP, bias, m, n)
    dim = 0 if by_rows else 1
    problem = Problem(OP, m, n, k, A_sharded.dtype, world, dim, not has_contiguous_rows(B), output.dtype)
    if gathered is not None:
        others = {"A_sharded": A_sharded, "B": B, "bias": bias, "scale_a": scale_a, "scale_b": scale_b}
        check_gathered(ctx, OP, gathered, A_sharded, (m, k), others | {"output": output})
    traits = TRAITS[OP]
    if scales.of_blocks and not by_rows and world > 1 and cols % BLOCK:
        expected, fix = f"a multiple of {BLOCK} columns, as blocks have scales", "Cut A between blocks, or add zeros."
        raise ShapeError(OP, "A_sharded", expected, (rows, cols), fix)
    # One number may be the scale of the only row of A_sharded.
    of_rows = scales.a if by_rows and world > 1 and scales.a is not None and scales.a.shape[0] == rows else None
    beside = 0 if of_rows is None else scales_nbytes(of_rows, world, ctx.num_sms)

    def refused(algorithm: str) -> ArgumentError | None:
        if gathered is not None and world > 1 and algorithm == "pull":
            got, fix = f"a matrix {tuple(gathered.shape)}", "Take config=None, and a heap that has room for all of A."
            return ArgumentError(OP, "gathered", "None, as pull gathers nothing", got, fix)
        fix = "Peers read it: make it with ctx.empty, or ctx.as_symmetric(A)."
        return not_symmetric(ctx, OP, "A_sharded", A_sharded, fix) if traits[algorithm].reads_peers else None

    chosen = resolve(ctx, problem, config, workspace, trace, refused=refused, scales=scales, scales_nbytes=beside)
    if traits[chosen.algorithm].reads_peers and world > 1:
        ctx.agree(OP, (problem, chosen, place_of(ctx, "A_sharded", A_sharded)))
    ours, recorded = memory_of(ctx, problem, chosen, workspace, beside), trace_of(ctx, OP, trace)
    call = _Call(
        ctx, problem, output, A_sharded, column_major(ours, problem, B), bias, bias_is, scales, chosen, recorded, ours
    )
    launch = getattr(_Call, chosen.algorithm if world > 1 else "local")
    if of_rows is None:
        launch(call)
    else:
        call = replace(call, scales=replace(scales, a=call.all_scales(of_rows)))
        with ours.engine.unbroken(announced=True):  # peers take this rank's scales
            launch(call)
    if gathered is not None:
        call.leave_gathered(gathered)
    return output


class _Call(OpCall):
    """A method per algorithm."""

    @property
    def by_rows(self) -> bool:
        return self.problem.gather_dim == 0

    def all_scales(self, own: torch.Tensor) -> torch.Tensor:
        """The scales of all ranks' rows of A, gathered; ``own``: those of this rank's rows."""
        ctx, world, dtype = self.ctx, self.ctx.world_size, own.dtype
        blocks = scales_blocks(own, world, ctx.num_sms)
        beside = self.workspace.beside("scales", blocks.inbox_nbytes(world, dtype), blocks.num_flags)
        gathered = self.workspace.scratch_matrix("scales", world * blocks.rows, blocks.cols, dtype)
        exchange(ctx, beside, blocks, scales_matrix(own), gathered, self.site, by_rows=True)
        return gathered if own.dim() == 2 else gathered.view(-1)

    def local(self) -> None:
        """One rank: nothing to gather."""
        self.launch(Plan(self.site, alone=True))

    def leave_gathered(self, gathered: torch.Tensor) -> None:
        """Copy what the call has gathered to ``gathered``.

        Mostly no peer writes to this rank's staging memory again before this rank has entered the next call. Copy
        engines do not wait for that, but for the ranks to meet at the end: so the ranks meet once more after the copy.
        """
        ctx, algorithm = self.ctx, self.config.algorithm
        with self.workspace.engine.unbroken(announced=ctx.world_size > 1):
            if ctx.world_size > 1:
                self._copy_gathered(gathered)
            if algorithm not in ("low_latency", "baseline") or ctx.world_size == 1:  # most read it in place
                copy_to(ctx, self.a, self._part(gathered))
            if algorithm in ("copy_engine", "decomposed") and ctx.world_size > 1:
                self.decomposition().meet()

    def _copy_gathered(self, gathered: torch.Tensor) -> None:
        """Copy what has arrived, and with it whatever lies where this rank's part would."""
        (m, k), config = gathered.shape, self.config
        if config.algorithm == "push":
            staged, half_rows = self.workspace.stacked(m, k, self.a.dtype)
            epochs = self.workspace.scratch("epochs", self.ctx.num_sms, torch.int32)
            copy_to(self.ctx, staged, gathered, epochs, half_rows)
        elif config.algorithm == "low_latency":
            copy_to(self.ctx, self._scratch(), gathered)
        else:
            layout = config.staged_a_layout if config.algorithm == "hbm_buffer" else "k_contiguous"
            copy_to(self.ctx, self._staged(layout), gathered)

    def pull(self) -> None:
        self.launch(self._plan(pull_source))

    def push(self) -> None:
        config = self.config
        if config.comm_sms is None:
            plan = replace(self._plan(arrived_source, config.num_chunks), courier=push_courier, couriers=self.programs)
        else:
            plan = self._carried(put_courier, GATHER_FLAGS // 2)
        staged, half_rows = self.workspace.stacked(self.problem.m, self.problem.k, self.a.dtype)
        plan = replace(plan, own_epochs=True, half_rows=half_rows, half_flags=GATHER_FLAGS // 2)
        own = row_major(self.workspace, self.a) if self.by_rows else self.a
        self.launch(plan, a=own, gathered=staged)

    def hbm_buffer(self) -> None:
        plan = self._carried(fetch_courier, GATHER_FLAGS)
        self.launch(plan, gathered=self._staged(self.config.staged_a_layout))

    def _carried(self, courier: Any, num_flags: int) -> Plan:
        """The plan in which some programs only carry pieces of A, and flag each, while the others compute."""
        config, (rows, cols) = self.config, self.a.shape
        plan = self._plan(arrived_source, -(-rows // config.block_size_m))
        most = num_flags // (self.ctx.world_size * plan.chunks)
        k_blocks = -(-cols // config.block_size_k)
        k_per_flag = min(max(config.k_per_flag, -(-k_blocks // most)), k_blocks)
        pieces = -(-k_blocks // k_per_flag)
        dedicated = self.comm_programs
        first_couriers = max(dedicated, config.first_stage_fetch_sms or 0)
        units = (self.ctx.world_size - self.by_rows) * plan.chunks * pieces
        tiles = plan.shards * plan.tiles_per_shard(self.problem, config)
        computing, across = self.programs - dedicated, -(-self.problem.n // config.block_size_n)
        return replace(
            plan, courier=courier, piecewise=True, pieces=pieces, piece_k=k_per_flag * config.block_size_k,
            couriers=first_couriers, dedicated=dedicated, first_units=-(-units // config.num_fetch_stages),
            abreast=abreast(plan.shards * plan.chunks, tiles, computing, across, plan.rounds, config.group_size_m),
        )  # fmt: skip

    def copy_engine(self) -> None:
        own = row_major(self.workspace, self.a)
        plan = replace(
            self._plan(arrived_source, self.config.num_chunks), courier=None if self.by_rows else keep_courier,
            couriers=0 if self.by_rows else self.programs,
        )  # fmt: skip
        with self.workspace.engine.running():
            chunks = chunks_of(own.shape[0], plan.chunks, self.config.block_size_m)
            self._put(own, [chunks] * self.ctx.world_size, by_peer=self.by_rows)
            self.launch(plan, a=own, gathered=self._staged())

    def decomposed(self) -> None:
        own, parts = row_major(self.workspace, self.a), self.decomposition()
        chunks, adds = self.config.cut(own.shape[0]), self.config.adds_columns(self.problem)
        if self.by_rows or adds:
            multiply = partial(self._multiply_by_rank, own, parts, chunks)
        else:
            multiply = partial(self._multiply_gathered_rows, own, chunks, parts.landings(len(chunks)))
        with parts.engine.running(1 if adds else lanes_for(own.dtype), last=lambda: parts.leave(meet=True)):
            multiply()

    def _multiply_by_rank(self, own: torch.Tensor, parts: Decomposition, chunks: list[Rows]) -> None:
        """Multiply one rank's part at a time, or some ranks' together: by rows, for as many rows of the output; by
        columns, products are added up in the output, in one lane. Only the part that arrives last is cut into
        ``chunks``: while any other part arrives, there are earlier ones to compute."""
        rank, world, (rows, cols), staged = self.ctx.rank, self.ctx.world_size, own.shape, self._staged()
        lane = itertools.count()
        with parts.engine.lane(next(lane)):  # first: the GPU then computes while the host is still asking for copies
            if self.by_rows:
                self.fill(own, Rows(rank * rows, rows))
            else:
                self.multiply(self.output, own, self.bias, b=Rows(rank * cols, cols).of(self.b))
        cuts = [[Rows(0, rows)]] * (world - 1) + [chunks]
        self._put(own, cuts, by_peer=True)
        for group in arriving_groups(rank, world, self.config.owners(chunks)):
            for chunk, part in enumerate(cuts[(group[-1] - rank) % world]):
                with parts.engine.lane(next(lane)):
                    for owner in group:
                        parts.wait_arrival(owner * len(chunks) + chunk, owner)
                    if self.by_rows:
                        those = Rows(group[0] * rows + part.first, (len(group) - 1) * rows + part.count)
                        self.fill(those.of(staged), those)
                    else:
                        those = Rows(group[0] * cols, len(group) * cols)
                        self.add(part.of(self.output), those.of(part.of(staged).T).T, part, those.of(self.b))

    def _multiply_gathered_rows(self, own: torch.Tensor, chunks: list[Rows], landings: list[Landing]) -> None:
        """Multiply one chunk of rows at a time, once all ranks' columns of these rows have arrived."""
        rank, world, staged, here = self.ctx.rank, self.ctx.world_size, self._staged(), self._part(self._staged())
        engine = self.workspace.engine
        for rows, landing in zip(chunks, landings, strict=True):
            for step in range(1, world):
                peer = (rank - step) % world
                engine.put(rows.of(own), rows.of(here), peer)
                landing.copied(peer)
            landing.copied_all()
            with engine.lane(landing.chunk):
                rows.of(here).copy_(rows.of(own))
                landing.wait()
                self.fill(rows.of(staged), rows)

    def low_latency(self) -> None:
        gathered = self._scratch()
        mine, result = self.a, gathered
        moved = self.problem.exchanged_dtype
        if moved != mine.dtype:
            mine, result = aligned(self.workspace, mine, 4).view(moved), gathered.view(moved)
        exchange(self.ctx, self.workspace, self.blocks(), mine, result, self.site, by_rows=self.by_rows)
        with self.workspace.engine.unbroken(announced=True):  # peers take their parts
            self.fill(gathered)

    def baseline(self) -> None:
        (rows, cols), staged, config = self.a.shape, self._staged(), self.config
        blocks = -(-rows // config.comm_block_m) * -(-cols // config.comm_block_n)
        gather_kernel[(min(blocks, self.programs),)](
            self.ctx.handle, Flags(self.workspace.turnstile), Matrix(self.a, *self.a.stride()),
            Matrix(staged, *staged.stride()), rows, cols, SITE=self.site,
            SEGMENTS=1 if self.by_rows else self.ctx.world_size, COURIER_M=config.comm_block_m,
            COURIER_N=config.comm_block_n, num_warps=8,
        )  # fmt: skip
        with self.workspace.engine.unbroken(announced=True):
            self.fill(staged)

    def _plan(self, source: Any, wanted_chunks: int = 0) -> Plan:
        """What the plans of all algorithms have in common. ``wanted_chunks``: the most chunks of rows in which a part
        arrives; 0: parts do not arrive in chunks."""
        world, blocks = self.ctx.world_size, -(-self.a.shape[0] // self.config.block_size_m)
        chunks, per_chunk = evenly(blocks, min(wanted_chunks, MAX_CHUNKS)) if wanted_chunks else (1, 1)
        return Plan(
            self.site, schedule.own_first, source, shards=world if self.by_rows else 1, sharded=self.by_rows,
            segments=1 if self.by_rows else world, own=self.by_rows, piecewise=not self.by_rows,
            chunks=chunks, blocks_per_chunk=per_chunk, chunk_rows=per_chunk * self.config.block_size_m,
            rounds=self.config.num_rounds if self.by_rows else 1,
        )  # fmt: skip

    def _put(self, own: torch.Tensor, cuts: list[list[Rows]], *, by_peer: bool) -> None:
        """Ask for copies of this rank's part to all peers, previous rank first, and of the epoch after each chunk.
        ``cuts``: the chunks for each peer, indexed by its place in this order, from 1 on. ``by_peer``: all chunks for
        one peer, then those for the next one, as peers need one rank's part first; else chunk by chunk, as they need
        all ranks' columns of its rows."""
        parts, here, rank, world = self.decomposition(), self._part(self._staged()), self.ctx.rank, self.ctx.world_size
        chunks = max(map(len, cuts))
        pairs = [(step, chunk) for step in range(1, world) for chunk in range(len(cuts[step]))]
        for step, chunk in pairs if by_peer else sorted(pairs, key=lambda pair: pair[1]):
            peer, part = (rank - step) % world, cuts[step][chunk]
            parts.engine.put(part.of(own), part.of(here), peer)
            parts.flag(rank * chunks + chunk, peer)

    def _part(self, staged: torch.Tensor) -> torch.Tensor:
        """This rank's rows or columns of the gathered A."""
        rows, cols = self.a.shape
        return staged[self.ctx.rank * rows :][:rows] if self.by_rows else staged[:, self.ctx.rank * cols :][:, :cols]

    def _scratch(self) -> torch.Tensor:
        """Where ``low_latency`` leaves all of A."""
        return self.workspace.scratch_matrix("gathered", self.problem.m, self.problem.k, self.a.dtype)

    def _staged(self, layout: str = "k_contiguous") -> torch.Tensor:
        """The staging memory as the gathered A."""
        m, k = self.problem.m, self.problem.k
        if layout == "k_contiguous":
            return self.workspace.staged(m, k, self.a.dtype)
        return self.workspace.staged(k, m, self.a.dtype).T


def _gather_dim(a: torch.Tensor, b: torch.Tensor, world: int, given: int | None) -> int:
    if given is not None and (type(given) is not int or given not in (0, 1)):
        raise ArgumentError(OP, "gather_dim", "0, 1 or None", repr(given))
    if given is not None:
        return given
    if a.shape[1] == b.shape[0]:
        return 0
    if a.shape[1] * world == b.shape[0]:
        return 1
    rows = b.shape[0]
    or_part = "" if rows % world else f", or {rows // world} (sharded by columns)"
    raise ShapeError(
        OP, "A_sharded", f"{rows} columns (sharded by rows){or_part}, as B has {rows} rows", tuple(a.shape)
    )
