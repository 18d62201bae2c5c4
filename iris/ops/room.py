"""What a call needs on the symmetric heap beside its operands: memory that peers write into, and flags. "auto" uses
this to find what fits, and the ops to get their workspace."""

from __future__ import annotations

from typing import NamedTuple

import torch

from iris.context import Iris
from iris.errors import HeapError
from iris.heap import align_up
from iris.ops.algorithms import ALL_REDUCE, GATHER, REDUCE_SCATTER, SCATTER, TRAITS
from iris.ops.config import FusedConfig
from iris.ops.exchange import Blocks, blocks_of
from iris.ops.problem import Problem
from iris.ops.words import sent_in_words, tiles_sent, words_nbytes
from iris.ops.workspace import (
    MIN_FLAGS,
    FusedWorkspace,
    size_class,
    stacked_nbytes,
    workspace_for,
    workspace_nbytes,
)

GATHER_FLAGS = 1 << 16
"""Flags of a gather: at most so many parts of A are announced separately."""


class Room(NamedTuple):
    """The bytes of memory that peers write into, and the number of flags."""

    staging_nbytes: int
    num_flags: int


def room(problem: Problem, config: FusedConfig, num_sms: int, workspace: FusedWorkspace | None = None) -> Room:
    """What a call of ``problem`` with ``config`` needs on a device with ``num_sms`` SMs, in the context's own workspace
    or in the given one. In a workspace with flags for all data, nothing travels as words."""
    by_flags = workspace is not None and workspace.flagged
    if problem.op == GATHER and (problem.world_size == 1 or config.algorithm == "pull"):
        return Room(0, 0)
    traits = TRAITS[problem.op][config.algorithm]
    if traits.exchange:
        blocks = exchanged_blocks(problem, config.algorithm, num_sms, by_flags)
        return Room(blocks.inbox_nbytes(problem.world_size, problem.exchanged_dtype), blocks.num_flags)
    if problem.op == GATHER and config.algorithm == "push":
        return Room(stacked_nbytes(problem.m, problem.k, problem.dtype, workspace), GATHER_FLAGS)
    if problem.op == GATHER:
        return Room(problem.m * problem.k * problem.dtype.itemsize, GATHER_FLAGS)
    if problem.op == SCATTER:
        if not traits.comm_programs:
            return Room(0, 0)
        each = 1  # a flag for each chunk, which is a group of tiles or more
        if config.algorithm == "relay":  # a flag for each sender and each peer that the chunk comes from
            each = max(1, problem.world_size - 1) * config.comm_programs(problem.op, num_sms)
        return Room(0, each * config.groups(problem.m))
    if not traits.library:  # peers send tiles
        slots, tiles = tiles_sent(problem, config)
        itemsize = 4 if config.algorithm == "atomic" else problem.output_dtype.itemsize
        nbytes, flags = tiles * config.tile_elements * itemsize, problem.world_size * tiles
        if traits.words:
            if sent_in_words(problem, config) and not by_flags:
                kept = problem.world_size if config.algorithm == "one_shot" else 2 * slots
                sent = words_nbytes(tiles * config.tile_elements, problem.output_dtype)
                return Room(2 * kept * sent, 0)  # in two halves
            flags = max(flags, MIN_FLAGS + 1)
        return Room(slots * nbytes, flags)
    if problem.op == ALL_REDUCE and config.algorithm == "ring":
        return Room(0, 0)
    rows = -(-problem.m // problem.world_size) * problem.world_size
    return Room(rows * problem.n * problem.output_dtype.itemsize, 0)


def memory_of(
    ctx: Iris, problem: Problem, config: FusedConfig, workspace: FusedWorkspace | None, scales_nbytes: int = 0
) -> FusedWorkspace:
    """``workspace``, if it has room for the call, or the context's own; see :func:`iris.ops.workspace.workspace_for`.
    ``scales_nbytes``: bytes that the call needs besides, which an error takes into account."""
    needed = _room_in(ctx, problem, config, workspace)
    try:
        return workspace_for(ctx, problem.op, config.algorithm, workspace, *needed)
    except HeapError as error:
        if not scales_nbytes:
            raise
        enough = ctx.heap_size_for(needed_nbytes(ctx, problem, config) + scales_nbytes)
        raise HeapError(f"{error} With room for the scales that it gathers: heap_size={enough}.") from error


def has_room_for(
    ctx: Iris, problem: Problem, config: FusedConfig, workspace: FusedWorkspace | None, scales_nbytes: int
) -> bool:
    """Whether :func:`memory_of` would find a workspace, or could make one and leave room for ``scales_nbytes``; the
    same on all ranks."""
    needed = _room_in(ctx, problem, config, workspace)
    if workspace is not None:  # memory_of refuses what is no workspace
        return not isinstance(workspace, FusedWorkspace) or workspace.has_room(*needed)
    sizes = size_class(*needed)
    there = ctx.has_workspace((problem.op, config.algorithm, *sizes))
    return there or ctx.heap_largest_free_bytes >= workspace_nbytes(*sizes) + scales_nbytes


def needed_nbytes(ctx: Iris, problem: Problem, config: FusedConfig) -> int:
    """Bytes of the heap that a call needs if the caller passes no workspace."""
    return workspace_nbytes(*size_class(*room(problem, config, ctx.num_sms)))


def _room_in(ctx: Iris, problem: Problem, config: FusedConfig, workspace: FusedWorkspace | None) -> Room:
    """:func:`room` in ``workspace``, or in the context's own if the caller has passed something else."""
    return room(problem, config, ctx.num_sms, workspace if isinstance(workspace, FusedWorkspace) else None)


def exchanged_blocks(problem: Problem, algorithm: str, num_sms: int, by_flags: bool) -> Blocks:
    """The blocks into which a rank's part, of A or of the product, is cut for an exchange
    (:mod:`iris.ops.exchange`)."""
    m, n, k, world = problem.m, problem.n, problem.k, problem.world_size
    twice = algorithm == "low_latency_two_shot"
    if problem.op == GATHER:
        rows, cols = (m, k // world) if problem.gather_dim == 1 else (m // world, k)
        part = rows, cols * problem.dtype.itemsize // problem.exchanged_dtype.itemsize
    else:
        part = (-(-m // world) if problem.op == REDUCE_SCATTER or twice else m, n)
    return blocks_of(part, problem.exchanged_dtype, world, num_sms, 2 if twice else 1, by_flags)


def scales_matrix(own: torch.Tensor) -> torch.Tensor:
    """The scales of a rank's rows of A as a matrix, for the exchange that gathers them."""
    return own if own.dim() == 2 else own.view(1, -1)


def scales_blocks(own: torch.Tensor, world_size: int, num_sms: int) -> Blocks:
    """The blocks into which these scales are cut for that exchange."""
    return blocks_of(scales_matrix(own).shape, torch.float32, world_size, num_sms)


def scales_nbytes(own: torch.Tensor, world_size: int, num_sms: int) -> int:
    """Bytes of the heap that the exchange of scales needs beside the call's own workspace."""
    blocks = scales_blocks(own, world_size, num_sms)
    return align_up(workspace_nbytes(*size_class(blocks.inbox_nbytes(world_size, torch.float32), blocks.num_flags)))
