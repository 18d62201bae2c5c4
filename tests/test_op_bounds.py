"""Ops read and write nothing beyond their operands, which end where accessible memory ends."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from ops_inputs import ALL_REDUCE, GATHER, LOCAL, REDUCE_SCATTER, SCATTER, SMALL, Way, each_way, trial
from ranks import BACKEND, Ranks, context, fresh, worlds

from iris.ops import FusedWorkspace, matmul_all_scatter, new_workspace
from iris.ops.exchange import FLAGS

_LIBC = ctypes.CDLL(None, use_errno=True)
_PROT_NONE = 0


def fenced(matrix: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of ``matrix`` that ends at the beginning of a page without access; the page before its first
    page has no access, either."""
    nbytes, page = matrix.numel() * matrix.element_size(), mmap.PAGESIZE
    pages = -(-nbytes // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for fence in (start, start + (pages + 1) * page):
        if _LIBC.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    inside = np.frombuffer(memory, dtype=np.uint8, count=nbytes, offset=(pages + 1) * page - nbytes)
    return torch.from_numpy(inside).view(matrix.dtype).view(matrix.shape).copy_(matrix)


def fenced_scratch(workspace: FusedWorkspace, name: str, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Replaces ``scratch_matrix``, whose memory mostly goes on after the matrix."""
    key = (f"fenced {name}", rows * cols, dtype)
    if key not in workspace.local:
        workspace.local[key] = fenced(torch.zeros(rows, cols, dtype=dtype))
    return workspace.local[key].view(rows, cols)


def before_a_fence(way: Way, seed: int) -> float:
    # Two block rows, one column: with three ranks a tile order may have room for more tiles than there are.
    one = trial(context(), way, (17, 5, 35), torch.float32, seed, "column")
    # Operands on the symmetric heap must stay there.
    if way.op != GATHER:
        one.a = fenced(one.a)
    one.b, one.bias = fenced(one.b), fenced(one.bias) if one.bias is not None else None
    if way.op in (GATHER, REDUCE_SCATTER, LOCAL):
        one.output = one.frame = fenced(one.output)
    with mock.patch.object(FusedWorkspace, "scratch_matrix", fenced_scratch):
        one.run(replace(SMALL, group_size_m=2))
    return one.excess()


@pytest.mark.skipif(BACKEND != "sim", reason="pages can be fenced off in the simulator only")
@pytest.mark.parametrize("ranks", worlds(3, 3), indirect=True)
@each_way
def test_nothing_beyond_the_operands(ranks: Ranks, way: Way, seed: int) -> None:
    assert max(ranks.run(before_a_fence, way, seed)) <= 1


def rows_below(num_flags: int, seed: int) -> list[float]:
    """The values below the output of a sum in two hops, of which the last rank has fewer rows than the others; and the
    error of the sum."""
    ctx = context()
    one = trial(ctx, Way(ALL_REDUCE, "low_latency_two_shot"), (17, 5, 35), torch.float32, seed)
    whole = ctx.full((24, 5), 7.0)
    one.output = one.frame = whole[:17]
    workspace = new_workspace(ctx, ALL_REDUCE, "low_latency_two_shot", 1 << 20, num_flags)
    one.run(workspace=workspace)
    ctx.barrier()
    return [float(whole[17:].min()), float(whole[17:].max()), one.excess()]


@pytest.mark.skipif(BACKEND != "sim", reason="three ranks share 17 rows")
@pytest.mark.parametrize("ranks", worlds(3, 3), indirect=True)
@pytest.mark.parametrize("num_flags", [0, FLAGS], ids=["words", "flags"])
def test_nothing_below_a_sum_in_two_hops(ranks: Ranks, num_flags: int, seed: int) -> None:
    for least, most, excess in ranks.run(rows_below, num_flags, seed):
        assert (least, most) == (7, 7) and excess <= 1


def flags_of_a_relay(seed: int) -> list[int]:
    """The values of the flags that a call has room for, and of those after them."""
    ctx = context()
    way, config = Way(SCATTER, "relay"), replace(SMALL, comm_sms=1, group_size_m=1)
    workspace = new_workspace(ctx, way.op, way.algorithm)
    trial(ctx, way, (60, 16, 16), torch.float32, seed).run(config, workspace)
    ctx.barrier()
    count = (ctx.world_size - 1) * config.groups(60)
    return [int(flags.sum()) for flags in (workspace.ready[:count], workspace.ready[count:])]


@pytest.mark.parametrize("ranks", worlds(3, 3), indirect=True)
def test_a_relay_sets_the_flags_that_it_has_room_for(ranks: Ranks, seed: int) -> None:
    assert ranks.run(flags_of_a_relay, seed) == [[8, 0]] * 3


def relayed_far_apart() -> list[list[float]]:
    """Columns of an output that are 2 GiB apart, on three ranks."""
    stride = (1 << 30) + 1024
    with fresh(5 << 30) as ctx:
        frame = ctx.empty(2 * stride + 1, dtype=torch.float16)
        output = torch.as_strided(frame, (1, 3), (1, stride))
        a, b = torch.ones(1, 16, dtype=torch.float16), torch.full((16, 1), ctx.rank + 1, dtype=torch.float16)
        matmul_all_scatter(ctx, output, a, b, config=replace(SMALL, algorithm="relay", comm_sms=1))
        ctx.synchronize()
        found: list[list[float]] = output.tolist()
        return found


@pytest.mark.skipif(BACKEND != "sim", reason="simulated memory is promised, not taken")
@pytest.mark.parametrize("ranks", worlds(3, 3), indirect=True)
def test_columns_may_lie_far_apart(ranks: Ranks) -> None:
    """Their distance needs more than 32 bits."""
    assert ranks.run(relayed_far_apart) == [[[16, 32, 48]]] * 3
