"""All-gather + matmul: A is sharded over the ranks, every rank multiplies all of it with its own B.

Unfused, with A sharded by rows (``gather_dim=0``)::

    torch.distributed.all_gather_into_tensor(A, A_sharded)
    output = A @ B + bias

and with A sharded by columns (``gather_dim=1``)::

    torch.distributed.all_gather(shards, A_sharded)
    output = torch.cat(shards, dim=1) @ B + bias

Algorithms:

**pull**: the matmul kernel loads each tile of A from the rank that owns it, beginning with its own. On entry every
rank flags "my A is ready" at all peers; a tile's source waits for its owner's flag. When it wins: where no memory can
be spared to gather A. Each tile of A crosses the link once per column of output tiles, so the link bounds it.

**copy_engine**: every rank's copy engine puts its part into the staging memory of all peers, next rank first, in
``num_chunks`` chunks, and behind each chunk the call's epoch into a flag. The matmul reads its own part in place, then
each chunk as it arrives. No SM moves data. When it wins: parts of a few MiB and more.

On exit the ranks meet, since a peer may be reading A, or what was staged, until then. Flags carry the call's epoch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from iris.context import Iris
from iris.device.arch import fence_async_proxy
from iris.device.matmul import local_sink
from iris.device.peer import translate
from iris.device.sync import NEXT_EPOCH, SITE_ALL_GATHER_MATMUL, wait, wait_entered
from iris.errors import ArgumentError, ShapeError
from iris.ops.config import FusedConfig
from iris.ops.matmul import Plan, bias_kind, check_operands, check_shape, check_symmetric, resolve, run
from iris.ops.problem import Problem
from iris.ops.workspace import MAX_CHUNKS, FusedWorkspace, staging_fits, workspace_for
from iris.trace import Trace, trace_of

OP = "all_gather_matmul"
ALGORITHMS = ("pull", "copy_engine")


@triton.jit
def pull_source(handle, a_ptr, peer, block_m, flags, epoch, SITE: tl.constexpr):
    """A's shard where it lies, in the memory of ``peer``, once that rank has entered the op."""
    wait_entered(flags.turnstile, epoch, peer, handle, SITE)
    return translate(handle, a_ptr, peer)


@triton.jit
def arrived_source(handle, a_ptr, peer, block_m, flags, epoch, SITE: tl.constexpr):
    """The staging memory, once the chunk of ``peer``'s part that holds block row ``block_m`` has arrived."""
    chunk = block_m // flags.blocks_per_chunk
    wait(flags.ready + peer * flags.chunks + chunk, epoch, peer, handle, SITE)
    fence_async_proxy()
    return a_ptr


def all_gather_matmul(
    ctx: Iris,
    output: torch.Tensor,
    A_sharded: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gather_dim: int | None = None,
    config: FusedConfig | None = None,
    workspace: FusedWorkspace | None = None,
    trace: bool | Trace = False,
) -> torch.Tensor:
    """``output = all_gather(A_sharded) @ B + bias``; see the module for the unfused lines.

    Args:
        output: [M, N], any strides; int32 if A is int8, else A's dtype.
        A_sharded: on the symmetric heap; [M / world_size, K] for ``gather_dim=0``, [M, K / world_size] for 1.
        B: [K, N] in A's dtype, any strides.
        bias: [N] per column or [M, 1] per row, in output's dtype; added in float32 (int32 for int8).
        gather_dim: which dimension of A is sharded; None tells it from the shapes.
        config: None picks one: ``copy_engine`` on GPUs for parts of 4 MiB and more if the staging memory, all of A,
            fits in what is free of the symmetric heap; else ``pull``.
        workspace: needed only to run the op on several streams at once; see ``iris.ops.new_workspace``.
        trace: record per-program intervals, kept as ``ctx.last_trace`` or in the Trace given.

    Returns:
        ``output``.

    Raises:
        ShapeError, DTypeError, PlacementError, ArgumentError: before anything is launched.
        WaitTimeout, PeerDied: from an earlier kernel of this context.

    Sync: on the current stream. All ranks must call it, in the same order. When it is done on this rank's stream,
        all ranks have finished reading A_sharded, so it may be overwritten; no barrier is needed between calls.
    """
    ctx.check()
    check_operands(ctx, OP, output, ("A_sharded", A_sharded), B, bias)
    world = ctx.world_size
    by_rows = _gather_dim(A_sharded, B, world, gather_dim) == 0
    (rows, cols), (k, n) = A_sharded.shape, B.shape
    m = rows * world if by_rows else rows
    check_shape(OP, "B", B, (cols if by_rows else cols * world, n), "rows of B = columns of the gathered A")
    check_shape(OP, "output", output, (m, n), "rows of the gathered A, columns of B")
    check_symmetric(ctx, OP, "A_sharded", A_sharded, "Peers read it: make it with ctx.empty, or ctx.as_symmetric(A).")
    bias_is = bias_kind(OP, bias, m, n)
    received = rows * cols * A_sharded.element_size() * (world - 1)
    problem = Problem(OP, m, n, k, A_sharded.dtype, world, received)
    fits = staging_fits(ctx, OP, workspace, received + rows * cols * A_sharded.element_size())
    chosen = resolve(ctx, problem, config, ALGORITHMS, fits)
    recorded = trace_of(ctx, OP, trace)
    cut = (world, 1) if by_rows else (1, world)
    if chosen.algorithm == "copy_engine" and world > 1:
        _run_copy_engine(ctx, problem, cut, output, A_sharded, B, bias, bias_is, chosen, workspace, recorded)
    else:
        plan = Plan(SITE_ALL_GATHER_MATMUL.value, pull_source, local_sink, *cut)
        flags = workspace_for(ctx, OP, workspace)
        run(ctx, problem, plan, output, A_sharded, B, bias, bias_is, chosen, flags, recorded)
    return output


def _run_copy_engine(
    ctx: Iris,
    problem: Problem,
    cut: tuple[int, int],
    output: torch.Tensor,
    own: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    bias_is: int,
    config: FusedConfig,
    workspace: FusedWorkspace | None,
    trace: Trace | None,
) -> None:
    own = own.contiguous()
    (rows, cols), world = own.shape, ctx.world_size
    ours = workspace_for(ctx, OP, workspace, world * own.numel() * own.element_size())
    staged = ours.staged(world * rows, cols, own.dtype)
    blocks = -(-rows // config.block_size_m)
    chunks = min(config.num_chunks, blocks, MAX_CHUNKS)
    blocks_per_chunk = -(-blocks // chunks)
    chunk_rows = blocks_per_chunk * config.block_size_m
    epoch = ours.turnstile[NEXT_EPOCH.value :][:1]
    here = staged[ctx.rank * rows :][:rows]
    ours.engine.begin()
    for step in range(1, world):
        peer = (ctx.rank + step) % world
        for chunk, first in enumerate(range(0, rows, chunk_rows)):
            ours.engine.put(own[first : first + chunk_rows], here[first : first + chunk_rows], peer)
            ours.engine.put(epoch, ours.ready[ctx.rank * chunks + chunk :][:1], peer)
    plan = Plan(SITE_ALL_GATHER_MATMUL.value, arrived_source, local_sink, *cut, -1, chunks, blocks_per_chunk)
    run(ctx, problem, plan, output, own, b, bias, bias_is, config, ours, trace, staged)
    ours.engine.end()


def _gather_dim(a: torch.Tensor, b: torch.Tensor, world: int, given: int | None) -> int:
    if given not in (None, 0, 1):
        raise ArgumentError(OP, "gather_dim", "0, 1 or None", given)
    if given is not None:
        return given
    if a.shape[1] == b.shape[0]:
        return 0
    if a.shape[1] * world == b.shape[0]:
        return 1
    raise ShapeError(
        OP,
        "A_sharded",
        f"{b.shape[0]} columns (sharded by rows) or {b.shape[0]} / {world} columns (sharded by columns), as B has "
        f"{b.shape[0]} rows",
        tuple(a.shape),
    )
