"""Rows of a matrix, and the chunks that they travel in. Pure: the model cuts as the ops do."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

MAX_CHUNKS = 64
"""Chunks that one rank's part may travel in; each has a flag."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a matrix: ``count`` from ``first`` on."""

    first: int
    count: int

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix[self.first :][: self.count]


def columns_in_vectors(rows: int, *matrices: torch.Tensor) -> bool:
    """Whether a kernel that works with any number of rows is to know that ``rows`` is a multiple of 16: the columns of
    one of ``matrices`` are contiguous, and the width of what it loads and stores there depends on that."""
    return rows % 16 == 0 and any(one.stride(0) == 1 for one in matrices)


def chunks_of(rows: int, wanted: int, block: int, growth: float = 1.0) -> list[Rows]:
    """``rows`` in at most ``wanted`` chunks: each is ``growth`` times as long as the one before, rounded up to whole
    blocks, and the last has what is left."""
    *lengths, last = (growth**chunk for chunk in range(min(wanted, MAX_CHUNKS)))
    per_length = -(-rows // block) / sum(lengths, last)
    chunks, first = [], 0
    for size in (*(math.ceil(length * per_length) * block for length in lengths), rows):
        count = min(size, rows - first)
        if count > 0:
            chunks.append(Rows(first, count))
        first += count
    return chunks


def evenly(count: int, wanted: int) -> tuple[int, int]:
    """In how many chunks, at most ``wanted``, so many tiles, or rows of tiles, are cut, all of one length but the last;
    and that length."""
    length = -(-count // min(wanted, count))
    return -(-count // length), length


def owner_groups(rank: int, world_size: int, size: int) -> list[list[int]]:
    """All ranks in groups of ``size`` neighbours, in the order in which ``rank`` computes what they own: the next group
    first, the own one last, and itself at its end. Others begin with the rank that has the same place in its group, so
    that no two of one group send to the same rank at the same time."""
    groups, mine, place = -(-world_size // size), rank // size, rank % size
    ordered = []
    for step in range(1, groups + 1):
        first = (mine + step) % groups * size
        members = range(first, min(first + size, world_size))
        at = place + (1 if step == groups else 0)
        ordered.append([members[(at + index) % len(members)] for index in range(len(members))])
    return ordered


def arriving_groups(rank: int, world_size: int, size: int) -> list[list[int]]:
    """The other ranks in the order in which their parts come to ``rank``, in groups of ``size`` neighbours at most."""
    groups = []
    for ranks in (range(rank + 1, world_size), range(rank)):
        groups += [list(ranks[first : first + size]) for first in range(0, len(ranks), size)]
    return groups


def owned_from(chunk: Rows, owner: int, rows_per_rank: int, world_size: int, *, everywhere: bool) -> int:
    """The first of all rows that rank ``owner`` has of a ``chunk`` of each rank's. Where sums go ``everywhere``, a
    rank's chunk stands below that of the rank before, so that several can be computed at once."""
    return world_size * chunk.first + owner * chunk.count if everywhere else owner * rows_per_rank + chunk.first


def summing_step(matmuls: int, *, everywhere: bool) -> int:
    """Behind which of a chunk's ``matmuls`` the chunk before is summed: behind the last, as the copies of the chunk's
    parts run beside that; behind the first, if the sums have to go on ``everywhere``, for which early is better."""
    return 1 if everywhere else matmuls


def abreast(chunks: int, tiles: int, workers: int, columns: int, rounds: int, group_size_m: int) -> int:
    """How many of ``chunks`` chunks of rows are carried side by side to ``workers`` that multiply: all, if they begin
    with all ``tiles`` at once; else about half of the rows of tiles that they begin with, ``columns`` in each, shared
    out to ``rounds``, so that all of these get columns before long, and the first do not wait for the last."""
    if tiles <= workers:
        return chunks
    return min(chunks, max(1, -(-workers // (group_size_m * -(-columns // rounds))) * group_size_m // 2))
