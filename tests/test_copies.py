"""What the copy engine sends first is what is waited for first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ops_inputs import GATHER, SMALL, Way, trial
from ranks import Ranks, context, worlds

from iris.ops.decomposed import Decomposition


def order(num_chunks: int, seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The flags that this rank sets, with the rank at which, and those it waits for, with the rank from which, in the
    order in which it asks for them."""
    sent, awaited = [], []
    flag, wait_arrival = Decomposition.flag, Decomposition.wait_arrival

    def flags(parts: Decomposition, slot: int, peer: int) -> None:
        sent.append((slot, peer))
        flag(parts, slot, peer)

    def waits(parts: Decomposition, slot: int, first: int, *rest: Any, **given: Any) -> None:
        awaited.append((slot, first))
        wait_arrival(parts, slot, first, *rest, **given)

    one = trial(context(), Way(GATHER, "decomposed"), (32, 16, 32), torch.float16, seed)
    with mock.patch.object(Decomposition, "flag", flags), mock.patch.object(Decomposition, "wait_arrival", waits):
        one.run(replace(SMALL, num_chunks=num_chunks))
    assert one.excess() <= 1
    return sent, awaited


@pytest.mark.parametrize("ranks", worlds(2, 8), indirect=True)
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_chunks_are_awaited_in_the_order_of_their_copies(ranks: Ranks, num_chunks: int, seed: int) -> None:
    """Copies to several ranks take turns: one that is sent last comes when all others have long been there."""
    orders = ranks.run(order, num_chunks, seed)
    for rank, (_, awaited) in enumerate(orders):
        turns = [orders[owner][0].index((slot, rank)) for slot, owner in awaited]
        assert turns == list(range((ranks.world_size - 1) * num_chunks))
