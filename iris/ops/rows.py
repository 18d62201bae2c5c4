"""Rows of a matrix, and the chunks that they travel in. Pure, as the model cuts them in the same way as the ops."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

MAX_CHUNKS = 64
"""The most chunks that one rank's part travels in; each has a flag."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a matrix: ``count`` from ``first`` on."""

    first: int
    count: int

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix[self.first :][: self.count]


def columns_in_vectors(rows: int, *matrices: torch.Tensor) -> bool:
    """Whether a kernel for any number of rows should know that ``rows`` is a multiple of 16: yes, if the columns of one
    of ``matrices`` are contiguous, as the kernel can then load and store wide vectors there."""
    return rows % 16 == 0 and any(one.stride(0) == 1 for one in matrices)


def chunks_of(rows: int, wanted: int, block: int, growth: float = 1.0) -> list[Rows]:
    """``rows`` in at most ``wanted`` chunks: each is ``growth`` times as long as the one before, rounded up to whole
    blocks; the last has the rest."""
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
    """The number of chunks, at most ``wanted``, into which ``count`` tiles, or rows of tiles, are cut, and their
    length, which all but the last have."""
    length = -(-count // min(wanted, count))
    return -(-count // length), length


def owner_groups(rank: int, world_size: int, size: int) -> list[list[int]]:
    """All ranks in groups of ``size`` neighbours, in the order in which ``rank`` computes their parts: the next group
    first, its own group last, and itself at the very end. Every other group begins with the rank that has the same
    place in its group as ``rank`` has, so that no two ranks of one group send to the same rank at the same time."""
    groups, mine, place = -(-world_size // size), rank // size, rank % size
    ordered = []
    for step in range(1, groups + 1):
        first = (mine + step) % groups * size
        members = range(first, min(first + size, world_size))
        at = place + (1 if step == groups else 0)
        ordered.append([members[(at + index) % len(members)] for index in range(len(members))])
    return ordered


def arriving_groups(rank: int, world_size: int, size: int) -> list[list[int]]:
    """The other ranks in the order in which their parts reach ``rank``, in groups of at most ``size`` neighbours."""
    groups = []
    for ranks in (range(rank + 1, world_size), range(rank)):
        groups += [list(ranks[first : first + size]) for first in range(0, len(ranks), size)]
    return groups


def owned_from(chunk: Rows, owner: int, rows_per_rank: int, world_size: int, *, everywhere: bool) -> int:
    """The first row that rank ``owner`` owns in ``chunk``, of the chunks into which each rank's rows are cut. If sums
    go ``everywhere``, the rows of a chunk that belong to successive ranks are adjacent, so that those of several ranks
    can be computed at once."""
    return world_size * chunk.first + owner * chunk.count if everywhere else owner * rows_per_rank + chunk.first


def summing_step(matmuls: int, *, everywhere: bool) -> int:
    """After which of a chunk's ``matmuls`` the previous chunk is summed: after the last, so that the copies of this
    chunk's parts run meanwhile; or after the first, if the sums go on ``everywhere``, which should begin early."""
    return 1 if everywhere else matmuls


def abreast(chunks: int, tiles: int, workers: int, columns: int, rounds: int, group_size_m: int) -> int:
    """How many of ``chunks`` chunks of rows are carried at the same time to ``workers`` that multiply. All, if the
    workers begin with all ``tiles`` at once. Else about half as many as there are rows of tiles that the workers begin
    with: then all of these rows get columns of A before long, and the first ones do not wait for the last. A row of
    tiles has ``columns`` tiles, dealt out over ``rounds`` rounds."""
    if tiles <= workers:
        return chunks
    return min(chunks, max(1, -(-workers // (group_size_m * -(-columns // rounds))) * group_size_m // 2))
