"""In every op, signals order all that ranks do to the same memory: within a call, and between successive calls. See
:mod:`ordering`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import triton.language as tl
from ops_inputs import (
    ALL_REDUCE,
    GATHER,
    LOCAL,
    REDUCE_SCATTER,
    SCATTER,
    SMALL,
    Shape,
    Way,
    columns_at_once,
    some,
    trial,
    ways,
)
from ordering import Watch, notes_nbytes
from ranks import BACKEND, Ranks, fresh, worlds

from iris.engine import CopyEngine
from iris.ops.algorithms import LIBRARY, TRAITS
from iris.ops.call import OpCall
from iris.ops.config import FusedConfig
from iris.ops.decomposed import Decomposition, Landing
from iris.ops.exchange import FLAGS
from iris.ops.room import GATHER_FLAGS
from iris.ops.workspace import FusedWorkspace, new_workspace

pytestmark = [
    pytest.mark.skipif(BACKEND != "sim", reason="looks into the simulator"),
    pytest.mark.parametrize("ranks", worlds(3, 3), indirect=True),
]
Call = tuple[Shape, FusedConfig]
HEAP_SIZE = 1 << 20
STAGING_NBYTES = 5 << 16
SHAPES = ((60, 9, 17), (1, 3, 5), (50, 9, 17))
"""With the first and the last, owners have two chunks of rows; with the second, some own no rows."""
CHUNKED = replace(SMALL, num_chunks=2)
SENT = replace(SMALL, comm_sms=1, k_per_flag=1)
EACH: tuple[Call, ...] = tuple((shape, CHUNKED) for shape in SHAPES)
ONE = replace(CHUNKED, stream_k=True, two_tiles=False)
TWO, WIDE = replace(ONE, two_tiles=True), replace(ONE, block_size_n=128)
SPLIT: tuple[Call, ...] = (((5, 40, 150), TWO), ((5, 9, 120), ONE), ((5, 100, 150), WIDE), ((5, 300, 120), WIDE))
"""Three tiles or one for each rank, or in all, for four programs. Two or four programs share a tile, or some have parts
of two tiles, or tiles are cut into strips, each for one or two programs."""

Flaw = Callable[[], AbstractContextManager[Any]]


def no_follow() -> AbstractContextManager[Any]:
    """Copies do not wait for the data that they copy."""
    return mock.patch.object(CopyEngine, "follow")


def no_wait_for_copies() -> AbstractContextManager[Any]:
    """Ranks go on before all parts have landed."""
    return mock.patch.object(Landing, "wait")


def no_wait_for_arrivals() -> AbstractContextManager[Any]:
    """Ranks compute with a part before it has come."""
    return mock.patch.object(Decomposition, "wait_arrival")


def no_meeting() -> AbstractContextManager[Any]:
    """Ranks leave while others may still read what copies of the next call overwrite."""
    leave = Decomposition.leave
    return mock.patch.object(Decomposition, "leave", lambda parts, meet: leave(parts, meet=False))


def no_gate() -> AbstractContextManager[Any]:
    """Tiles are sent to ranks that may still be in the previous call."""
    launch = OpCall.launch
    return mock.patch.object(
        OpCall, "launch", lambda call, plan, **given: launch(call, replace(plan, gate=False), **given)
    )


def one_half() -> AbstractContextManager[Any]:
    """All calls send to the same half of the inbox."""
    return mock.patch.object(FusedWorkspace, "inbox", lambda ours, dtype: (ours.staging.view(dtype), 0))


def one_stack() -> AbstractContextManager[Any]:
    """All calls send to the same half of the staging memory."""
    whole = FusedWorkspace.staged
    return mock.patch.object(FusedWorkspace, "stacked", lambda ours, *sizes: (whole(ours, *sizes), 0))


def no_wait_for_parts() -> AbstractContextManager[Any]:
    """Programs that share a tile add up its parts before these are there."""
    return mock.patch("iris.device.matmul.wait_parts", return_value=None)


def unordered(way: Way, num_flags: int, flaw: Flaw, seed: int, calls: tuple[Call, ...] = EACH) -> list[str]:
    """The unordered accesses in calls of one workspace, with only new inputs in the same memory in between."""
    with fresh(HEAP_SIZE) as ctx, fresh(notes_nbytes(HEAP_SIZE, ctx.world_size)) as notes:
        trials = [trial(ctx, way, shape, torch.float32, seed + turn) for turn, (shape, _) in enumerate(calls)]
        with Watch(ctx, notes) as watch, flaw():
            workspace = new_workspace(ctx, way.op, way.algorithm, STAGING_NBYTES, num_flags)
            for one, (_, config) in zip(trials, calls, strict=True):
                one.output.fill_(float("nan"))  # peers may write there only when this rank has come
                one.run(config, workspace)
                one.a.fill_(float("nan"))
                one.output.clone()
        assert flaw is not nullcontext or max(one.excess() for one in trials) <= 1
        return sorted(watch.unordered)


def numbers_of_flags(way: Way) -> tuple[int, ...]:
    """Numbers of flags for workspaces in which small amounts travel as words, and in which nothing does; for other ways
    a number for which all fits."""
    return (0, FLAGS) if TRAITS[way.op][way.algorithm].words else (GATHER_FLAGS,)


@pytest.mark.parametrize(
    ("way", "num_flags"),
    some([(way, number) for way in ways() if way.op != LOCAL for number in numbers_of_flags(way)], 7),
    ids=str,
)
def test_all_is_ordered(ranks: Ranks, way: Way, num_flags: int, seed: int) -> None:
    assert ranks.run(unordered, way, num_flags, nullcontext, seed) == [[]] * ranks.world_size


@pytest.mark.parametrize("way", some([way for way in ways() if way.algorithm not in LIBRARY], 4), ids=str)
def test_split_tiles_are_ordered(ranks: Ranks, way: Way, seed: int) -> None:
    num_flags = 0 if way.op == LOCAL else numbers_of_flags(way)[0]
    found = ranks.run(unordered, way, num_flags, nullcontext, seed, SPLIT)
    assert found == [[]] * ranks.world_size


def in_slices(seed: int) -> list[str]:
    """Unordered accesses if four programs each add up a slice of a rank's only tile, and the first one sends it."""
    slices = mock.patch("iris.device.stream_k.SLICE_ELEMENTS", tl.constexpr(64))
    with mock.patch.dict(os.environ, IRIS_SIM_SMS="12"), slices:
        return unordered(Way(ALL_REDUCE, "two_shot"), FLAGS, nullcontext, seed, (((40, 9, 150), ONE),))


def test_slices_of_a_tile_are_there_when_it_is_sent(ranks: Ranks, seed: int) -> None:
    assert ranks.run(in_slices, seed) == [[]] * ranks.world_size


def test_a_missing_wait_for_parts_is_found(ranks: Ranks, seed: int) -> None:
    assert any(ranks.run(unordered, Way(LOCAL, "local"), 0, no_wait_for_parts, seed, SPLIT))


@pytest.mark.parametrize(
    ("way", "flaw"),
    [
        (Way(REDUCE_SCATTER, "decomposed"), no_follow),
        (Way(ALL_REDUCE, "decomposed"), no_follow),
        (Way(GATHER, "decomposed"), no_wait_for_arrivals),
    ],
    ids=["reduce_scatter", "all_reduce", "gather"],
)
def test_matmuls_for_several_ranks_are_ordered(ranks: Ranks, way: Way, flaw: Flaw, seed: int) -> None:
    calls = tuple((shape, replace(SMALL, owners_per_matmul=2)) for shape in SHAPES)
    assert ranks.run(unordered, way, numbers_of_flags(way)[0], nullcontext, seed, calls) == [[]] * ranks.world_size
    assert any(ranks.run(unordered, way, numbers_of_flags(way)[0], flaw, seed, calls))


def together(way: Way) -> tuple[Call, ...]:
    """Calls that wait for all ranks' parts of a chunk together."""
    config = columns_at_once(replace(SMALL, num_chunks=2), way)
    return tuple((shape, config) for shape in SHAPES)


def test_a_missing_wait_for_all_columns_is_found(ranks: Ranks, seed: int) -> None:
    way = Way(GATHER, "decomposed", 1)
    assert any(ranks.run(unordered, way, GATHER_FLAGS, no_wait_for_copies, seed, together(way)))


def one_word() -> AbstractContextManager[Any]:
    """As with many ranks: there is no flag after each copy, but one word after all copies."""
    return mock.patch("iris.ops.config.FLAGGED_RANKS", 1)


@pytest.mark.parametrize(
    "way",
    [Way(REDUCE_SCATTER, "decomposed"), Way(ALL_REDUCE, "decomposed"), Way(GATHER, "decomposed", 1)],
    ids=str,
)
def test_copies_behind_which_there_is_one_word_are_ordered(ranks: Ranks, way: Way, seed: int) -> None:
    num_flags = numbers_of_flags(way)[0]
    assert ranks.run(unordered, way, num_flags, one_word, seed, together(way)) == [[]] * ranks.world_size


@pytest.mark.parametrize("gather_dim", [0, 1])
def test_programs_that_only_send_are_ordered(ranks: Ranks, gather_dim: int, seed: int) -> None:
    calls = tuple((shape, SENT) for shape in SHAPES)
    found = ranks.run(unordered, Way(GATHER, "push", gather_dim), GATHER_FLAGS, nullcontext, seed, calls)
    assert found == [[]] * ranks.world_size


def test_the_block_that_reaches_round_waits_for_all_pieces(ranks: Ranks, pools: dict[int, Ranks], seed: int) -> None:
    """There are more pieces than one wait looks at, and the own columns of rank 1 begin within a block of K."""
    two = pools.setdefault(2, Ranks(2))
    calls = (((20, 9, 304), replace(SENT, comm_sms=2)),)
    found = two.run(unordered, Way(GATHER, "push", 1), GATHER_FLAGS, nullcontext, seed, calls)
    assert found == [[]] * 2


def teams_of(programs: int) -> AbstractContextManager[Any]:
    """Make ``programs`` programs carry a chunk together."""
    return mock.patch.object(sys.modules["iris.ops.matmul_all_scatter"], "_TEAM", programs)


@pytest.mark.parametrize("team", [1, 2, 8], ids=lambda team: f"{team} in a team")
def test_relays_of_several_senders_are_ordered(ranks: Ranks, team: int, seed: int) -> None:
    relayed = replace(SMALL, comm_sms=3, group_size_m=1, comm_block_n=16)
    calls = tuple((shape, relayed) for shape in ((60, 40, 17), (1, 3, 5), (50, 40, 17)))
    found = ranks.run(unordered, Way(SCATTER, "relay"), GATHER_FLAGS, partial(teams_of, team), seed, calls)
    assert found == [[]] * ranks.world_size


@pytest.mark.parametrize(
    ("way", "num_flags", "flaw"),
    [
        (Way(REDUCE_SCATTER, "decomposed"), 0, no_follow),
        (Way(ALL_REDUCE, "decomposed"), GATHER_FLAGS, no_wait_for_copies),
        (Way(GATHER, "decomposed", 1), GATHER_FLAGS, no_wait_for_arrivals),
        (Way(GATHER, "decomposed"), GATHER_FLAGS, no_meeting),
        (Way(REDUCE_SCATTER, "push"), 0, no_gate),
        (Way(ALL_REDUCE, "low_latency"), FLAGS, one_half),
        (Way(ALL_REDUCE, "low_latency_two_shot"), 0, one_half),
        (Way(ALL_REDUCE, "one_shot"), 0, one_half),
        (Way(ALL_REDUCE, "two_shot"), 0, one_half),
        (Way(GATHER, "push"), GATHER_FLAGS, one_stack),
    ],
    ids=[
        "no_follow",
        "no_wait_in_sum",
        "no_wait_in_gather",
        "no_meeting",
        "no_gate",
        "one_half",
        "words",
        "tiles",
        "sums",
        "one_stack",
    ],
)
def test_what_is_not_ordered_is_found(ranks: Ranks, way: Way, num_flags: int, flaw: Flaw, seed: int) -> None:
    assert any(ranks.run(unordered, way, num_flags, flaw, seed))
