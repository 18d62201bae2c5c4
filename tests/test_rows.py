"""How rows are cut into chunks, and that ``decomposed`` cuts them so."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ops_inputs import ALL_REDUCE, GATHER, REDUCE_SCATTER, SCATTER, SMALL, Way, trial
from ranks import Ranks, context, worlds

from iris.ops.call import OpCall
from iris.ops.rows import MAX_CHUNKS, Rows, chunks_of

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


def multiplied(way: Way, growth: float, seed: int) -> tuple[list[int], float]:
    """The rows of each product of the library's, in order, and how wrong the result is."""
    one, found, multiply = trial(context(), way, (96, 16, 32), torch.float16, seed), [], OpCall.multiply

    def multiplies(call: OpCall, product: torch.Tensor, a: torch.Tensor, *rest: Any) -> None:
        found.append(a.shape[0])
        multiply(call, product, a, *rest)

    with mock.patch.object(OpCall, "multiply", multiplies):
        one.run(replace(SMALL, num_chunks=2, chunk_growth=growth))
    return found, one.excess()


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize(
    ("way", "growth", "counts"),
    [
        (Way(SCATTER, "decomposed"), 0.5, [64, 32]),
        (Way(SCATTER, "decomposed"), 2.0, [32, 64]),
        (Way(GATHER, "decomposed", 1), 2.0, [32, 64]),
        (Way(GATHER, "decomposed", 0), 0.5, [96, 64, 32]),  # the own part, and that of the peer in chunks
        (Way(ALL_REDUCE, "decomposed"), 2.0, [16, 16, 32, 32]),
        (Way(REDUCE_SCATTER, "decomposed"), 2.0, [32, 32, 64, 64]),
    ],
)
def test_chunk_growth(ranks: Ranks, way: Way, growth: float, counts: list[int], seed: int) -> None:
    for found, excess in ranks.run(multiplied, way, growth, seed):
        assert found == counts
        assert excess <= 1
