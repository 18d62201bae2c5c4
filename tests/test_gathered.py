"""An all-gather + matmul that also leaves all of A."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ops_inputs import GATHER, SMALL, Inputs, Way, some, trial, ways
from ranks import BACKEND, Failure, Ranks, context, failure_of, fresh, in_worlds, poison, worlds

from iris.ops.all_gather_matmul import _Call
from iris.ops.problem import DTYPES

GATHERS = [way for way in ways(GATHER) if way.algorithm != "pull"]


def everyone(a: torch.Tensor, way: Way) -> torch.Tensor:
    """All ranks' parts of A, gathered. Collective."""
    parts = [context().broadcast(a.cpu(), rank) for rank in range(context().world_size)]
    return torch.cat([part.cpu().double() for part in parts], way.gather_dim)


def wrong(way: Way, dtype: torch.dtype, seed: int) -> list[str]:
    """What is wrong after each of three calls in a row, each with new operands, of other sizes, and another layout of
    ``gathered``."""
    ctx, found = context(), []
    poison(ctx)
    for call, shape in enumerate([(19, 17, 40), (7, 16, 33), (35, 33, 72)]):
        one = trial(ctx, way, shape, dtype, seed + call)
        whole = everyone(one.a, way)
        frame = torch.full((2 * whole.shape[0], whole.shape[1] + 3), 7, device=ctx.device).to(dtype)
        gathered = [frame[::2, 1:-2], torch.empty_like(whole, dtype=dtype, device=ctx.device)][call % 2]
        config = replace(SMALL, algorithm=way.algorithm, num_chunks=1 + call % 2)
        scales: dict[str, Any] = {"scale_a": one.scale_a, "scale_b": one.scale_b}
        ctx.ops.all_gather_matmul(
            one.output, one.a, one.b, gather_dim=way.gather_dim, gathered=gathered, config=config, **scales
        )  # fmt: skip
        ctx.synchronize()
        if one.excess() > 1:
            found.append(f"call {call}: the product")
        if not torch.equal(gathered.cpu().double(), whole):
            found.append(f"call {call}: {(gathered.cpu().double() != whole).sum()} elements of A")
        if not (torch.equal(frame[1::2].double(), torch.full_like(frame[1::2], 7, dtype=torch.float64))):
            found.append(f"call {call}: memory beside it")
    return found


@pytest.mark.parametrize(
    ("ranks", "way", "dtype"),
    some(in_worlds([(way, dtype) for way in GATHERS for dtype in DTYPES]), 13),
    indirect=["ranks"],
)
def test_all_of_a_is_left(ranks: Ranks, way: Way, dtype: torch.dtype, seed: int) -> None:
    assert ranks.run(wrong, way, dtype, seed) == [[]] * ranks.world_size


def again_and_again(seed: int) -> list[bool]:
    """Whether A is right after each of some calls with the same memory and new numbers, which may be replayed."""
    ctx, right = context(), []
    made = Inputs(seed + ctx.rank)
    for algorithm in ("push", "low_latency", "decomposed"):
        a, b = torch.empty(9, 40, device=ctx.device), made.matrix(40, 16, torch.float32).to(ctx.device)
        output, gathered = (a.new_empty(9 * ctx.world_size, cols) for cols in (16, 40))
        for _ in range(4):
            a.copy_(made.matrix(9, 40, torch.float32))
            config = replace(SMALL, algorithm=algorithm)
            ctx.ops.all_gather_matmul(output, a, b, gather_dim=0, gathered=gathered, config=config)
            right.append(torch.equal(gathered.cpu().double(), everyone(a, Way(GATHER, algorithm))))
    return right


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_is_left_by_calls_that_repeat(ranks: Ranks, seed: int) -> None:
    assert ranks.run(again_and_again, seed) == [[True] * 12] * 2


def a_call_behind_a_late_copy(way: Way) -> list[list[float]]:
    """The numbers in A as two calls in a row have left it, if the first rank copies late what the first call has
    gathered; with ranks 0 and 1 these are 1 and 2, then 11 and 12."""
    ctx, late = context(), _Call.leave_gathered

    def leave(call: _Call, gathered: torch.Tensor) -> None:
        if BACKEND == "sim" and ctx.rank == 0:
            time.sleep(0.3)
        elif ctx.rank == 0:
            torch.cuda._sleep(10**8)
        late(call, gathered)

    rows, cols = (8 * ctx.world_size, 16) if way.gather_dim == 0 else (8, 16 * ctx.world_size)
    parts = [ctx.full((8, 16), first + ctx.rank) for first in (1.0, 11.0)]
    left, output = ctx.zeros(2, rows, cols), torch.zeros(rows, 8, device=ctx.device)
    b, config = torch.ones(cols, 8, device=ctx.device), replace(SMALL, algorithm=way.algorithm)
    ctx.barrier()
    with mock.patch.object(_Call, "leave_gathered", leave):
        for part, gathered in zip(parts, left, strict=True):
            ctx.ops.all_gather_matmul(output, part, b, gather_dim=way.gather_dim, gathered=gathered, config=config)
    ctx.synchronize()
    return [sorted(gathered.unique().tolist()) for gathered in left]


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("way", GATHERS, ids=str)
def test_no_peer_overwrites_what_is_still_to_be_copied(ranks: Ranks, way: Way) -> None:
    assert ranks.run(a_call_behind_a_late_copy, way) == [[[1.0, 2.0], [11.0, 12.0]]] * 2


def failures() -> dict[str, Failure]:
    with fresh(4 << 20) as ctx:
        a, b = ctx.zeros(4, 8), torch.zeros(8, 8, device=ctx.device)
        output, whole = (torch.zeros(4 * ctx.world_size, 8, device=ctx.device) for _ in range(2))
        given: dict[str, Any] = {
            "shape": whole[:3], "dtype": whole.half(), "kind": 3, "output": output, "itself": whole[:1].expand(8, 8),
            "B": b.expand(8, 8),
        }  # fmt: skip
        found = {
            name: failure_of(lambda one=one: ctx.ops.all_gather_matmul(output, a, b, gather_dim=0, gathered=one))
            for name, one in given.items()
        }
        found["pull"] = failure_of(
            lambda: ctx.ops.all_gather_matmul(output, a, b, gather_dim=0, gathered=whole, config="pull")
        )
    return found


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_what_is_no_place_for_a_is_refused(ranks: Ranks) -> None:
    for found in ranks.run(failures):
        kinds = {name: failure.kind for name, failure in found.items()}
        assert kinds == {
            "shape": "ShapeError", "dtype": "DTypeError", "kind": "DTypeError", "output": "ArgumentError",
            "itself": "ShapeError", "B": "ArgumentError", "pull": "ArgumentError",
        }  # fmt: skip
        assert all(failure.message.startswith(f"{GATHER}: gathered: expected ") for failure in found.values())


def broken_graph() -> bool:
    """Whether a compiled call with ``gathered`` is right, which no node can make."""
    ctx = context()
    a, b = torch.full((4, 8), ctx.rank + 1.0, device=ctx.device), torch.ones(8, 8, device=ctx.device)
    output, gathered = torch.zeros(4 * ctx.world_size, 8, device=ctx.device), a.new_zeros(4 * ctx.world_size, 8)

    def layer(x: torch.Tensor) -> torch.Tensor:
        ctx.ops.all_gather_matmul(output, x, b, gather_dim=0, gathered=gathered)
        return gathered + 0

    found = torch.compile(layer, backend="eager")(a)
    return torch.equal(found.cpu().double(), everyone(a, Way(GATHER, "push")))


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_is_left_by_compiled_calls(ranks: Ranks) -> None:
    assert ranks.run(broken_graph) == [True, True]
