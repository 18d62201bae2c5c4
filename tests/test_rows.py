"""Cutting rows into chunks, and that ``decomposed`` cuts them in this way."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ops_inputs import ALL_REDUCE, GATHER, REDUCE_SCATTER, SCATTER, SMALL, Way, some, trial
from ranks import Ranks, context, worlds

from iris.ops.call import OpCall
from iris.ops.decomposed import lanes_for
from iris.ops.problem import DTYPES
from iris.ops.rows import MAX_CHUNKS, Rows, arriving_groups, chunks_of, evenly, owner_groups

ROWS, WANTED, BLOCKS = (1, 15, 16, 17, 100, 1000, 8192, 29568), (1, 2, 3, 4, 7, 64, 100), (16, 128)
GROWTH = (1 / 16, 1 / 3, 0.5, 0.9, 1.0, 1.1, 2.0, 16.0)


@pytest.mark.parametrize("growth", GROWTH)
def test_every_row_is_in_one_chunk_of_whole_blocks(growth: float) -> None:
    for rows, wanted, block in itertools.product(ROWS, WANTED, BLOCKS):
        chunks = chunks_of(rows, wanted, block, growth)
        assert 1 <= len(chunks) <= min(wanted, MAX_CHUNKS)
        assert [chunk.first for chunk in chunks] == [0, *itertools.accumulate(chunk.count for chunk in chunks[:-1])]
        assert sum(chunk.count for chunk in chunks) == rows
        assert all(chunk.count > 0 for chunk in chunks)
        assert all(chunk.count % block == 0 for chunk in chunks[:-1])


@pytest.mark.parametrize(
    ("growth", "counts"), [(1.0, [2048] * 4), (2.0, [640, 1152, 2304, 4096]), (0.5, [4480, 2304, 1152, 256])]
)
def test_chunks_grow(growth: float, counts: list[int]) -> None:
    assert [chunk.count for chunk in chunks_of(8192, 4, 128, growth)] == counts


def test_equal_chunks_are_rounded_up_to_blocks() -> None:
    assert chunks_of(5 * 16, 4, 16) == [Rows(0, 32), Rows(32, 32), Rows(64, 16)]


@pytest.mark.parametrize("wanted", [1, 2, 3, 7, 64])
def test_equal_lengths_are_no_more_than_are_wanted(wanted: int) -> None:
    """All tiles are in a chunk, and no chunk is longer than it must be for that."""
    for count in range(1, 200):
        number, length = evenly(count, wanted)
        assert 1 <= number <= wanted and (number - 1) * length < count <= number * length
        assert (length - 1) * wanted < count


def multiplied(way: Way, options: dict[str, Any], m: int, seed: int) -> tuple[list[int], float]:
    """The rows of each product of the library, in order, and the error of the result."""
    shapes, excess = products(way, options, m, seed)
    return [rows for rows, _ in shapes], excess


def products(
    way: Way, options: dict[str, Any], m: int, seed: int, dtype: torch.dtype = torch.float16, bias: str | None = None
) -> tuple[list[tuple[int, int]], float]:
    """The rows and columns of A in each product, in order, and the error of the result."""
    one = trial(context(), way, (m, 16, 32), dtype, seed, bias)
    found: list[tuple[int, int]] = []

    def noting(method: Callable[..., None]) -> Callable[..., None]:
        def noted(call: OpCall, product: torch.Tensor, a: torch.Tensor, *rest: Any, **named: Any) -> None:
            found.append((a.shape[0], a.shape[1]))
            method(call, product, a, *rest, **named)

        return noted

    with ExitStack() as patched:
        for name in ("multiply", "add"):
            patched.enter_context(mock.patch.object(OpCall, name, noting(getattr(OpCall, name))))
        one.run(replace(SMALL, **options))
    return found, one.excess()


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize(
    ("way", "growth", "counts"),
    [
        (Way(SCATTER, "decomposed"), 0.5, [64, 32]),
        (Way(SCATTER, "decomposed"), 2.0, [32, 64]),
        (Way(GATHER, "decomposed", 1), 2.0, [96, 32, 64]),  # the own columns, then the peer's in chunks
        (Way(GATHER, "decomposed", 0), 0.5, [96, 64, 32]),  # the own part, then that of the peer in chunks
        (Way(ALL_REDUCE, "decomposed"), 2.0, [16, 16, 32, 32]),
        (Way(REDUCE_SCATTER, "decomposed"), 2.0, [32, 32, 64, 64]),
    ],
)
def test_chunk_growth(ranks: Ranks, way: Way, growth: float, counts: list[int], seed: int) -> None:
    for found, excess in ranks.run(multiplied, way, {"num_chunks": 2, "chunk_growth": growth}, 96, seed):
        assert found == counts
        assert excess <= 1


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("size", range(1, 10))
def test_owners_are_computed_together(world_size: int, size: int) -> None:
    """Each rank occurs once, groups are of neighbours, the own group comes last, and the own rank last in it. If groups
    have the same size, no two ranks send to the same one at the same place in their order."""
    orders = [owner_groups(rank, world_size, size) for rank in range(world_size)]
    for rank, groups in enumerate(orders):
        assert sorted(itertools.chain(*groups)) == list(range(world_size))
        assert all(max(group) - min(group) + 1 == len(group) <= size for group in groups)
        assert groups[-1][-1] == rank
    assert [owner_groups(rank, world_size, 1) for rank in range(world_size)] == [
        [[(rank + step) % world_size] for step in range(1, world_size + 1)] for rank in range(world_size)
    ]
    if world_size % size == 0:
        for at_once in zip(*(itertools.chain(*groups) for groups in orders), strict=True):
            assert sorted(at_once) == list(range(world_size))


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmuls_of_8_bits_take_one_lane(dtype: torch.dtype) -> None:
    """They share one set of flags."""
    assert lanes_for(dtype) == (1 if dtype.itemsize == 1 else 2)


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("size", range(1, 10))
def test_parts_that_have_come_are_computed_together(world_size: int, size: int) -> None:
    """Those of all other ranks occur once, in the order in which they arrive; only neighbours are computed together."""
    for rank in range(world_size):
        groups = arriving_groups(rank, world_size, size)
        assert list(itertools.chain(*groups)) == [(rank + step) % world_size for step in range(1, world_size)]
        assert all(group == list(range(group[0], group[0] + len(group))) for group in groups)
        assert all(0 < len(group) <= size for group in groups)
        assert len(groups) <= -(-(world_size - 1) // size) + 1


@pytest.mark.parametrize("ranks", worlds(3, 4), indirect=True)
def test_a_matmul_for_the_rows_of_several_ranks(ranks: Ranks, seed: int) -> None:
    """The own rows come first, then those of two ranks at a time, except the last rank's and the first's; by chunks,
    those of one."""
    way, world = Way(GATHER, "decomposed", 0), ranks.world_size
    for rank, (counts, excess) in enumerate(ranks.run(multiplied, way, {"owners_per_matmul": 2}, 20, seed)):
        assert excess <= 1
        assert counts == [20, *(20 * len(group) for group in arriving_groups(rank, world, 2))]
    for counts, excess in ranks.run(multiplied, way, {"owners_per_matmul": 2, "num_chunks": 2}, 20, seed):
        assert excess <= 1
        assert counts == [*[20] * (world - 1), 16, 4]


@pytest.mark.parametrize("ranks", worlds(3, 4), indirect=True)
@pytest.mark.parametrize(("dtype", "bias"), some([*itertools.product(DTYPES, (None, "row", "column"))]), ids=str)
def test_columns_of_several_ranks_are_added_up(ranks: Ranks, dtype: torch.dtype, bias: str | None, seed: int) -> None:
    """The own columns come first, then those of some ranks at a time, the last in chunks of rows. With all ranks'
    columns at once, and in 8 bits, chunks of rows are multiplied whole."""
    way, world = Way(GATHER, "decomposed", 1), ranks.world_size
    for owners, chunks in ((1, [16, 4]), (2, [20]), (world, [16, 4])):
        options = {"owners_per_matmul": owners, "num_chunks": len(chunks)}
        for rank, (shapes, excess) in enumerate(ranks.run(products, way, options, 20, seed, dtype, bias)):
            *others, last = (32 * len(group) for group in arriving_groups(rank, world, owners))
            one_by_one = [(20, 32), *((20, cols) for cols in others), *((rows, last) for rows in chunks)]
            adds = owners < world and dtype.itemsize > 1
            assert shapes == (one_by_one if adds else [(rows, 32 * world) for rows in chunks])
            assert excess <= 1


@pytest.mark.parametrize("ranks", worlds(3, 4), indirect=True)
@pytest.mark.parametrize("way", [Way(ALL_REDUCE, "decomposed"), Way(REDUCE_SCATTER, "decomposed")], ids=str)
def test_a_matmul_for_several_owners(ranks: Ranks, way: Way, seed: int) -> None:
    """Their rows are multiplied at once, fewer for the last ranks, which may have none; not if they are in chunks."""
    scattered = way.op == REDUCE_SCATTER
    world, found = ranks.world_size, {}
    for m, options in ((40, {"owners_per_matmul": 2}), (1, {"owners_per_matmul": 2})):
        per_rank = m if scattered else -(-m // world)
        owned = [per_rank if scattered else max(0, min(per_rank, m - rank * per_rank)) for rank in range(world)]
        for rank, (counts, excess) in enumerate(ranks.run(multiplied, way, options, m, seed)):
            assert excess <= 1
            groups = owner_groups(rank, world, 2)
            together = [sum(owned[owner] for owner in group) for group in groups]
            assert counts == [count for count in together if count > 0]
            found[rank, m] = counts
    assert any(len(counts) < world for counts in found.values())
    chunked = ranks.run(multiplied, way, {"owners_per_matmul": 2, "num_chunks": 2}, 160, seed)
    assert all(excess <= 1 for _, excess in chunked)
    if scattered:  # 160 rows of each rank, in separate chunks
        assert all(len(counts) == 2 * world for counts, _ in chunked)


@pytest.mark.parametrize("ranks", worlds(3, 4), indirect=True)
def test_a_matmul_for_several_owners_of_a_chunk(ranks: Ranks, seed: int) -> None:
    """In an all-reduce the ranks' rows of a chunk are adjacent, and with a short chunk those of more ranks are
    multiplied at once."""
    world = ranks.world_size
    rows, options = 96, {"owners_per_matmul": 2, "num_chunks": 2, "chunk_growth": 0.5, "block_size_m": 16}
    first, last = (chunk.count for chunk in chunks_of(rows, 2, 16, 0.5))
    assert first == 2 * last
    m = rows * world - 1  # the last rank has one row less
    for rank, (counts, excess) in enumerate(ranks.run(multiplied, Way(ALL_REDUCE, "decomposed"), options, m, seed)):
        assert excess <= 1
        groups = [owner_groups(rank, world, size) for size in (2, 4)]
        lengths = [[count * len(group) for group in one] for count, one in zip((first, last), groups, strict=True)]
        lengths[1] = [count - (world - 1 in group) for count, group in zip(lengths[1], groups[1], strict=True)]
        assert counts == lengths[0] + lengths[1]
