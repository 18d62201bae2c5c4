"""Parts are sent or fetched in the order in which they are waited for."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ops_inputs import ALL_REDUCE, GATHER, REDUCE_SCATTER, SCATTER, SMALL, Way, columns_at_once, some, trial
from ranks import Ranks, context, worlds

from iris.backends.sim import SideStream
from iris.ops.call import OpCall
from iris.ops.decomposed import Decomposition
from iris.ops.plan import Plan

LANDING = (Way(REDUCE_SCATTER, "decomposed"), Way(ALL_REDUCE, "decomposed"), Way(GATHER, "decomposed", 1))
"""Ways that wait for all parts together."""


def order(way: Way, rows: int, num_chunks: int, seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The flags that this rank sets, with the rank where it sets them, and those that it waits for, with the rank that
    sets them, in the order in which it issues them."""
    sent, awaited = [], []
    flag, wait_arrival = Decomposition.flag, Decomposition.wait_arrival

    def flags(parts: Decomposition, slot: int, peer: int) -> None:
        sent.append((slot, peer))
        flag(parts, slot, peer)

    def waits(parts: Decomposition, slot: int, first: int, *rest: Any, **given: Any) -> None:
        awaited.append((slot, first))
        wait_arrival(parts, slot, first, *rest, **given)

    one = trial(context(), way, (rows, 16, 32), torch.float16, seed)
    with mock.patch.object(Decomposition, "flag", flags), mock.patch.object(Decomposition, "wait_arrival", waits):
        one.run(replace(SMALL, num_chunks=num_chunks))
    assert one.excess() <= 1
    return sent, awaited


@pytest.mark.parametrize("ranks", worlds(2, 8), indirect=True)
@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("gather_dim", [0, 1])
def test_chunks_are_awaited_in_the_order_of_their_copies(
    ranks: Ranks, gather_dim: int, num_chunks: int, seed: int
) -> None:
    """Copies to several ranks take turns: a part that is sent last arrives long after all others."""
    orders = ranks.run(order, Way(GATHER, "decomposed", gather_dim), 32, num_chunks, seed)
    for rank, (_, awaited) in enumerate(orders):
        turns = [orders[owner][0].index((slot, rank)) for slot, owner in awaited]
        assert turns == list(range(ranks.world_size - 2 + num_chunks))  # the part that arrives last is cut


@pytest.mark.parametrize("ranks", worlds(2, 8), indirect=True)
@pytest.mark.parametrize(
    ("way", "times"), [(Way(SCATTER, "decomposed"), 2), (Way(ALL_REDUCE, "decomposed"), 3)], ids=str
)
def test_ranks_are_level_before_they_copy_to_all(ranks: Ranks, way: Way, times: int, seed: int) -> None:
    """Each rank waits until the next one has come as far, except before its first copies; with two ranks there is no
    other to meet."""
    world = ranks.world_size
    orders = ranks.run(order, way, 64 * world, 4, seed)
    for rank, (_, awaited) in enumerate(orders):
        following = (rank + 1) % world
        told = [slot for slot, peer in orders[following][0] if peer == rank and slot % world == rank]
        assert awaited == [(slot, following) for slot in told]
        assert len(awaited) == len(set(awaited)) == (times if world > 2 else 0)


def results(way: Way, flagged_ranks: int, seed: int) -> list[float]:
    """Errors of calls in a row with one chunk and with two; ranks are late in turns."""
    ctx, excesses = context(), []
    with mock.patch("iris.ops.config.FLAGGED_RANKS", flagged_ranks):
        for turn, num_chunks in enumerate((1, 2, 2, 1)):
            one = trial(ctx, way, (40, 16, 32), torch.float32, seed + turn)
            time.sleep(0.005 * (ctx.rank == turn % ctx.world_size))
            one.run(columns_at_once(replace(SMALL, num_chunks=num_chunks), way))
            excesses.append(one.excess())
    return excesses


@pytest.mark.parametrize("ranks", worlds(2, 8), indirect=True)
@pytest.mark.parametrize(("flagged_ranks", "way"), some([(flags, way) for way in LANDING for flags in (1, 8)]), ids=str)
def test_flags_of_copies_or_one_word_behind_them(ranks: Ranks, way: Way, flagged_ranks: int, seed: int) -> None:
    """Parts that are waited for together may each have a flag or not, whichever is faster."""
    for excesses in ranks.run(results, way, flagged_ranks, seed):
        assert max(excesses) <= 1


def fetched_abreast(sizes: tuple[int, int, int], seed: int) -> int:
    """Chunks of rows that ``hbm_buffer`` fetches side by side, with one fetcher and three more programs."""
    one, found = trial(context(), Way(GATHER, "hbm_buffer"), sizes, torch.float16, seed), []

    def launch(call: OpCall, plan: Plan, **given: Any) -> None:
        found.append(plan.abreast)
        launched(call, plan, **given)

    launched = OpCall.launch
    with mock.patch.object(OpCall, "launch", launch):
        one.run(replace(SMALL, num_sms=4, comm_sms=1, group_size_m=1))
    assert one.excess() <= 1
    return found[0]


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_all_rows_are_fetched_side_by_side_if_all_tiles_begin_at_once(ranks: Ranks, seed: int) -> None:
    """Otherwise the tiles of the last rows, which wait from the beginning, end late. Tiles hold rows of one rank only,
    however few it has."""
    tiles_m, tiles_n = SMALL.block_size_m, SMALL.block_size_n
    assert set(ranks.run(fetched_abreast, (1, tiles_n, 64), seed)) == {2}
    assert set(ranks.run(fetched_abreast, (tiles_m, tiles_n, 64), seed)) == {2}
    assert set(ranks.run(fetched_abreast, (4 * tiles_m, tiles_n, 64), seed)) == {1}


def test_a_simulated_copy_that_fails_is_told_and_the_next_launch_is_none_the_worse() -> None:
    stream, done = SideStream(), list[str]()

    def fails() -> None:
        raise MemoryError("of the copy")

    stream.add(lambda: done.append("before"))
    stream.add(fails)
    stream.add(lambda: done.append("behind"))
    with pytest.raises(MemoryError, match="of the copy"), stream:
        pass
    stream.add(lambda: done.append("next"))
    with stream:
        pass
    assert done == ["before", "next"]
