"""The tensor memory accelerator, as far as the simulator can imitate it: ops read their operands by descriptors
wherever GPUs would, and every block is at an address that TMA accepts. On GPUs another address would end the
process."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ops_inputs import SMALL, Shape, Way, some, trial, ways
from ranks import BACKEND, Ranks, context, worlds
from triton.runtime import interpreter

from iris.ops.algorithms import LIBRARY
from iris.ops.config import min_block_size_k

pytestmark = pytest.mark.skipif(BACKEND != "sim", reason="looks into the simulator")

BYTES = 16
WHOLE, RAGGED, BETWEEN = (16, 32, 64), (19, 48, 48), (19, 29, 38)
CALLS: tuple[tuple[Shape, str, torch.dtype], ...] = (
    (WHOLE, "plain", torch.int8),
    (WHOLE, "transposed", torch.bfloat16),
    (RAGGED, "plain", torch.float32),
    (BETWEEN, "transposed", torch.float32),
)
"""With the last one, a rank's columns do not end at a multiple of 16 bytes: they are 152 bytes, and those of two ranks
304."""


@contextmanager
def by_tma() -> Iterator[list[int]]:
    """Make ops describe their operands as on GPUs with TMA. Yields the byte in its row at which each block begins."""
    launches = importlib.import_module("iris.ops.launching")
    target_of, load = launches.target_of, interpreter.InterpreterBuilder.create_descriptor_load
    begins: list[int] = []

    def checked(builder: Any, descriptor: Any, indices: Any, *options: Any) -> Any:
        item = descriptor.base.dtype.element_ty.primitive_bitwidth // 8
        begins.append(int(indices[-1].data.item()) * item)
        assert begins[-1] % BYTES == 0, f"a block that begins at byte {begins[-1]} of its row"
        assert int(descriptor.base.data.item()) % BYTES == 0
        return load(builder, descriptor, indices, *options)

    with (
        mock.patch.object(launches, "target_of", lambda *args: replace(target_of(*args), tma=True)),
        mock.patch.object(interpreter.InterpreterBuilder, "create_descriptor_load", checked),
    ):
        yield begins


def excesses(way: Way, seed: int) -> tuple[list[float], list[int]]:
    """The error of each call, and the number of blocks that it has read by TMA."""
    ctx, found, read = context(), [], []
    for shape, layout, dtype in CALLS:
        config = replace(SMALL, num_chunks=2, stream_k=shape == RAGGED, block_size_k=min_block_size_k(dtype))
        with by_tma() as begins:
            one = trial(ctx, way, shape, dtype, seed, "column", layout)
            one.run(config)
        found.append(one.excess())
        read.append(len(begins))
    return found, read


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("way", some([way for way in ways() if way.algorithm not in LIBRARY]), ids=str)
def test_blocks_are_where_tma_takes_them_from(ranks: Ranks, way: Way, seed: int) -> None:
    for errors, read in ranks.run(excesses, way, seed):
        assert max(errors) <= 1
        assert min(read[:2]) > 0
        assert way.gather_dim == 0 or read[-1] == 0


def test_what_tma_does_not_read_is_not_described() -> None:
    describe = importlib.import_module("iris.ops.descriptors").describe
    matrix = torch.empty(32, 64, dtype=torch.bfloat16)
    assert describe(matrix, [16, 32]) is not None and describe(matrix[:, :40], [16, 32]) is not None
    for other in (matrix.T, matrix[:, 1:], matrix[:, ::2], torch.empty(32, 63), matrix[:1].expand(32, 64)):
        assert describe(other, [16, 32]) is None
