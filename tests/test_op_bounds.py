"""Ops read and write nothing beyond their operands: these end where memory ends, or begin where it begins."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace

import numpy as np
import pytest
import torch
from ops_inputs import GATHER, LOCAL, REDUCE_SCATTER, SMALL, Way, each_way, trial
from ranks import BACKEND, Ranks, context, worlds

_LIBC = ctypes.CDLL(None, use_errno=True)
_PROT_NONE = 0


def fenced(matrix: torch.Tensor, at_end: bool) -> torch.Tensor:
    """A contiguous copy of ``matrix`` with pages before and behind it that nobody may touch, right at one of them."""
    nbytes, page = matrix.numel() * matrix.element_size(), mmap.PAGESIZE
    pages = -(-nbytes // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for fence in (start, start + (pages + 1) * page):
        if _LIBC.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = page + (pages * page - nbytes if at_end else 0)
    inside = np.frombuffer(memory, dtype=np.uint8, count=nbytes, offset=offset)
    return torch.from_numpy(inside).view(matrix.dtype).view(matrix.shape).copy_(matrix)


def between_fences(way: Way, seed: int) -> list[float]:
    ctx, excesses = context(), []
    # Two block rows, one column: with three ranks a tile order may have room for more tiles than there are.
    for index, at_end in enumerate((False, True)):
        one = trial(ctx, way, (17, 5, 35), torch.float32, seed + index, ("column", "row")[index])
        # What is on the symmetric heap has to stay there.
        if way.op != GATHER:
            one.a = fenced(one.a, at_end)
        one.b = fenced(one.b, at_end)
        one.bias = None if one.bias is None else fenced(one.bias, at_end)
        if way.op in (GATHER, REDUCE_SCATTER, LOCAL):
            one.output = one.frame = fenced(one.output, at_end)
        one.run(replace(SMALL, group_size_m=2, stream_k=at_end))
        excesses.append(one.excess())
    return excesses


@pytest.mark.skipif(BACKEND != "sim", reason="pages can be fenced off in the simulator only")
@pytest.mark.parametrize("ranks", worlds(3, 3), indirect=True)
@each_way
def test_nothing_beyond_the_operands(ranks: Ranks, way: Way, seed: int) -> None:
    for excesses in ranks.run(between_fences, way, seed):
        assert max(excesses) <= 1
