"""How the tiles of a sum over ranks come together: what matmul + reduce-scatter and matmul + all-reduce share.

Every tile has an owner, who adds it up. A rank delivers its part of a tile to the owner's memory, where it has a slot of
its own (``push``), or adds it to the one sum that lies there (``add``). The owner computes its tiles last in each round,
adds what the others have sent to what it has in registers, and finishes the tile.

Signals: before a rank writes to an owner it waits until that one has entered the call, and so has finished the one before.
For ``push`` each (source, tile) has a flag that takes the call's epoch; for ``add`` each tile has a count of the sources
that have added to it, which the owner sets back to zero, and the sum with it, when it takes the sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from iris.context import Iris
from iris.device import handle as handles
from iris.device.peer import translate
from iris.device.sync import (
    MAX_RANKS,
    enter,
    leave,
    signal,
    signal_add,
    wait,
    wait_all,
    wait_all_entered,
    wait_entered,
)
from iris.device.tile import Matrix, Tile, finished, slot_pointers, tile_mask, tile_pointers, within_shard
from iris.ops.config import FusedConfig
from iris.ops.matmul import Plan, accumulator_of
from iris.ops.problem import Problem, output_dtype
from iris.ops.workspace import FusedWorkspace, workspace_for


@triton.jit
def deliver(handle, slots, value, tile, flags, epoch, SITE: tl.constexpr):
    """Store ``value``, this rank's part of a tile, into its slot at the tile's owner."""
    me = handles.rank(handle)
    wait_entered(flags.turnstile, epoch, tile.shard, handle, SITE)
    there = translate(handle, slots, tile.shard)
    tl.store(slot_pointers(there, me, tile, value.shape[0], value.shape[1]), value)
    signal(flags.ready + me * tile.per_shard + tile.index, epoch, tile.shard, handle)


@triton.jit
def collected(handle, slots, acc, tile, flags, epoch, SITE: tl.constexpr):
    """``acc`` plus all other ranks' parts of a tile that this rank owns, in rank order, each once it has come."""
    me, world = handles.rank(handle), handles.world_size(handle)
    lanes = tl.arange(0, MAX_RANKS)
    others = (lanes < world) & (lanes != me)
    sources = tl.where(others, lanes, me)
    ready = flags.ready + sources * tile.per_shard + tile.index
    wait_all(ready, epoch + lanes * 0, sources, others, handle, SITE)
    for source in range(world):
        if source != me:
            acc += tl.load(slot_pointers(slots, source, tile, acc.shape[0], acc.shape[1])).to(acc.dtype)
    return acc


@triton.jit
def deliver_add(handle, slots, acc, tile, flags, epoch, SITE: tl.constexpr):
    """Add ``acc``, this rank's part of a tile, to the sum at the tile's owner."""
    wait_entered(flags.turnstile, epoch, tile.shard, handle, SITE)
    there = translate(handle, slots, tile.shard)
    tl.atomic_add(slot_pointers(there, 0, tile, acc.shape[0], acc.shape[1]), acc, sem="relaxed", scope="sys")
    signal_add(flags.ready + tile.index, 1, tile.shard, handle)


@triton.jit
def collected_sum(handle, slots, acc, tile, flags, epoch, SITE: tl.constexpr):
    """``acc`` plus the sum that the others have left for a tile of this rank's; zero is left in its place."""
    me, world = handles.rank(handle), handles.world_size(handle)
    wait(flags.ready + tile.index, world - 1, (me + 1) % world, handle, SITE)
    pointers = slot_pointers(slots, 0, tile, acc.shape[0], acc.shape[1])
    total = acc + tl.load(pointers)
    tl.debug_barrier()
    tl.store(pointers, tl.zeros_like(acc))
    tl.store(flags.ready + tile.index, 0)
    return total


def reduction_slots(
    ctx: Iris, problem: Problem, plan: Plan, config: FusedConfig, workspace: FusedWorkspace | None
) -> tuple[FusedWorkspace, torch.Tensor]:
    """The workspace of a reduction, and in it room for the tiles that others send: one slot per source and own tile, or
    one sum per own tile."""
    tiles = plan.tiles_per_shard(problem, config)
    sources = 1 if config.algorithm == "atomic" else problem.world_size
    dtype = accumulator_of(problem.dtype) if config.algorithm == "atomic" else output_dtype(problem.dtype)
    count = sources * tiles * config.block_size_m * config.block_size_n
    ours = workspace_for(ctx, problem.op, config.algorithm, workspace, count * dtype.itemsize, sources * tiles)
    return ours, ours.staging[: count * dtype.itemsize].view(dtype)


@triton.jit
def sum_kernel(
    handle,
    turnstile,
    partial,
    output,
    bias_ptr,
    M,
    N,
    rows_per_rank,
    SITE: tl.constexpr,
    EVERYWHERE: tl.constexpr,
    BIAS: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The collective alone: this rank's rows, ``rows_per_rank`` of the M, of the sum of all ranks'
    ``partial``, in rank order. ``EVERYWHERE``: stored into every rank's output, at the same rows, else into the own."""
    epoch = enter(turnstile, handle)
    me, world = handles.rank(handle), handles.world_size(handle)
    wait_all_entered(turnstile, epoch, handle, SITE)
    top = me * rows_per_rank
    row_end = min(top + rows_per_rank, M)
    across = tl.cdiv(N, BLOCK_N)
    for block in range(tl.program_id(0), tl.cdiv(max(row_end - top, 0), BLOCK_M) * across, tl.num_programs(0)):
        rows = top + block // across * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = block % across * BLOCK_N + tl.arange(0, BLOCK_N)
        tile = Tile(me, block, 0, top, rows, cols, rows < row_end, cols < N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC_DTYPE)
        for source in range(world):
            there = tile_pointers(partial, translate(handle, partial.ptr, source), rows, cols)
            acc += tl.load(there, mask=tile_mask(tile), other=0).to(ACC_DTYPE)
        if EVERYWHERE:
            value = finished(acc, bias_ptr, tile, output.ptr.dtype.element_ty, BIAS)
            for step in range(world):
                there = translate(handle, output.ptr, (me + step) % world)
                tl.store(tile_pointers(output, there, rows, cols), value, mask=tile_mask(tile))
        else:
            tile = within_shard(tile)
            value = finished(acc, bias_ptr, tile, output.ptr.dtype.element_ty, BIAS)
            tl.store(tile_pointers(output, output.ptr, tile.rows, cols), value, mask=tile_mask(tile))
    leave(turnstile, epoch, handle, SITE)


def sum_partials(
    ctx: Iris,
    problem: Problem,
    workspace: FusedWorkspace,
    partial: torch.Tensor,
    output: torch.Tensor,
    bias: torch.Tensor | None,
    bias_is: int,
    site: int,
    config: FusedConfig,
    everywhere: bool,
) -> None:
    """The second half of the baselines: ``partial``, symmetric, summed over ranks into ``output``."""
    sum_kernel[(config.num_sms or ctx.num_sms,)](
        ctx.handle, workspace.turnstile, Matrix(partial, *partial.stride()), Matrix(output, *output.stride()), bias,
        problem.m, problem.n, -(-problem.m // problem.world_size), SITE=site, EVERYWHERE=everywhere, BIAS=bias_is,
        ACC_DTYPE=tl.int32 if problem.dtype == torch.int8 else tl.float32,
        BLOCK_M=config.comm_block_m, BLOCK_N=config.comm_block_n, num_warps=8,
    )  # fmt: skip
