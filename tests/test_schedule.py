"""Tile orders: every tile of every shard occurs once, in the promised order; parts of split tiles are consecutive."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from ranks import Ranks, context, worlds

from iris.device import schedule, stream_k, tile
from iris.ops.config import FusedConfig
from iris.ops.stream_k import sharers_of, split_tiles

SPLIT = ((1, 1), (1, 2), (3, 7), (5, 1), (1, 131), (4, 33), (8, 125), (64, 5), (78, 9), (80, 9), (140, 7))
"""Numbers of tiles, and of blocks of K in each."""
Place = tuple[int, int, int, int]
"""Shard, number in the shard, block row, block column."""


@triton.jit
def order_kernel(
    places, me, items, per_shard, per_round, m_blocks, n_blocks,
    SCHEDULE: tl.constexpr, GROUP_M: tl.constexpr, SHARDS: tl.constexpr,
):  # fmt: skip
    for item in range(items):
        shard, index, block_m, block_n = SCHEDULE(
            item, me, per_shard, per_round, m_blocks, n_blocks, GROUP_M, SHARDS
        )  # fmt: skip
        tl.store(places + 4 * item, shard)
        tl.store(places + 4 * item + 1, index)
        tl.store(places + 4 * item + 2, block_m)
        tl.store(places + 4 * item + 3, block_n)


@triton.jit
def parts_kernel(starts, owners, workers, tiles, per_tile, BLOCK: tl.constexpr):
    worker = tl.arange(0, BLOCK)
    sharers = schedule.split_sharers(tiles, per_tile, workers)
    tl.store(starts + worker, schedule.split_start(worker, sharers, tiles * per_tile))
    tl.store(owners + worker, schedule.split_worker(worker, sharers, tiles * per_tile))


@triton.jit
def whole_kernel(out, tiles, workers):
    tl.store(out, schedule.whole_tiles(tiles, workers, True, False))
    tl.store(out + 1, schedule.whole_tiles(tiles, workers, True, True))


@triton.jit
def slots_kernel(out, base, source, index, per_shard, workers, BLOCK: tl.constexpr):
    """How many elements after ``base`` a slot begins, and the part of a split tile that the last worker leaves."""
    lanes = tl.arange(0, BLOCK)
    place = tile.Tile(source, index, per_shard, 0, lanes, lanes, lanes >= 0, lanes >= 0)
    slot = tile.slot_pointers(base, source, place, BLOCK, BLOCK)
    part = stream_k._partial_pointers(base, workers, BLOCK, BLOCK)
    tl.store(out, (tl.min(slot.to(tl.int64)) - base.to(tl.int64)) // 4)
    tl.store(out + 1, (tl.min(part.to(tl.int64)) - base.to(tl.int64)) // 4)


def order(
    which: Any, me: int, m_blocks: int, n_blocks: int, group: int, shards: int, rounds: int, items: int | None = None
) -> list[Place]:
    """The places of the first ``items`` tiles, or of all."""
    tiles = m_blocks * n_blocks
    per_shard = -(-tiles // shards) if which is schedule.dealt else tiles
    count = shards * per_shard if items is None else items
    places = torch.zeros(count, 4, dtype=torch.int32, device=context().device)
    order_kernel[(1,)](
        places, me, count, per_shard, -(-per_shard // rounds), m_blocks, n_blocks,
        SCHEDULE=which, GROUP_M=group, SHARDS=shards,
    )  # fmt: skip
    return [(a, b, c, d) for a, b, c, d in places.tolist()]


def orders(which_name: str) -> list[tuple[tuple[int, ...], list[Place]]]:
    which = getattr(schedule, which_name)
    grids = ((1, 1, 8), (5, 3, 2), (4, 2, 4))
    cases = [(shards - 1, *grid, shards, rounds) for grid in grids for shards in (1, 3, 4) for rounds in (1, 3)]
    return [(case, order(which, *case)) for case in cases]


@pytest.mark.parametrize("ranks", worlds(1, 2), indirect=True)
@pytest.mark.parametrize("which", ["own_first", "own_last", "dealt"])
def test_every_tile_once_and_the_own_ones_in_their_turn(ranks: Ranks, which: str) -> None:
    for (me, m_blocks, n_blocks, _, shards, rounds), places in ranks.run(orders, which)[0]:
        grid = list(itertools.product(range(m_blocks), range(n_blocks)))
        if which == "dealt":
            inside = [(m, n) for _, _, m, n in places if m < m_blocks and n < n_blocks]
            assert sorted(inside) == grid
        else:
            for shard in range(shards):
                assert sorted((m, n) for owner, _, m, n in places if owner == shard) == grid
        assert [place[:2] for place in places] == expected_order(which, me, shards, len(places) // shards, rounds)


def expected_order(which: str, me: int, shards: int, per_shard: int, rounds: int) -> list[tuple[int, int]]:
    """The owner and the number of each tile: those of the next ranks by rounds; the own ones before all others, after
    those of their round, or after those of the next round."""
    per_round = -(-per_shard // rounds)
    cut = [range(start, min(start + per_round, per_shard)) for start in range(0, per_shard, per_round)]
    own = [[(me, index) for index in those] for those in cut]
    others = [[((me + step) % shards, index) for step in range(1, shards) for index in those] for those in cut]
    if which == "own_first":
        turns = own + others
    elif which == "own_last":
        turns = [part for pair in zip(others, own, strict=True) for part in pair]
    else:
        late = zip(others[1:], own[:-1], strict=True)
        turns = [others[0], *(part for pair in late for part in pair), own[-1]]
    return list(itertools.chain(*turns))


def order_of_wide_rows() -> list[Place]:
    return order(schedule.own_first, 0, 2, 1 << 20, 4096, 1, 1, items=5)


@pytest.mark.parametrize("ranks", worlds(1, 2), indirect=True)
def test_a_group_of_more_rows_than_there_are_is_counted_in_32_bits(ranks: Ranks) -> None:
    expected = [(0, index, index % 2, index // 2) for index in range(5)]
    assert ranks.run(order_of_wide_rows) == [expected] * ranks.world_size


def parts(workers: int, tiles: int, per_tile: int) -> tuple[list[int], list[int]]:
    size = triton.next_power_of_2(max(workers + 1, tiles * per_tile))
    starts, owners = torch.zeros(2, size, dtype=torch.int32, device=context().device)
    parts_kernel[(1,)](starts, owners, workers, tiles, per_tile, BLOCK=size)
    return starts[: workers + 1].tolist(), owners[: tiles * per_tile].tolist()


def all_parts() -> list[tuple[tuple[int, int, int], list[int], list[int]]]:
    return [
        ((workers, tiles, per_tile), *parts(workers, tiles, per_tile))
        for workers in (1, 3, 4, 5, 132)
        for tiles, per_tile in SPLIT
    ]


def all_whole() -> dict[tuple[int, int], list[int]]:
    found = {}
    for workers, tiles in itertools.product((1, 4, 132), (1, 3, 4, 5, 9, 132, 140, 300)):
        out = torch.zeros(2, dtype=torch.int32, device=context().device)
        whole_kernel[(1,)](out, tiles, workers)
        found[workers, tiles] = out.tolist()
    return found


@pytest.mark.parametrize("ranks", worlds(1, 2), indirect=True)
def test_the_host_splits_as_many_tiles(ranks: Ranks) -> None:
    for (workers, tiles), whole in ranks.run(all_whole)[0].items():
        configs = [FusedConfig(stream_k=True, two_tiles=two) for two in (False, True)]
        assert [tiles - split_tiles(tiles, workers, config) for config in configs] == whole


@pytest.mark.parametrize("ranks", worlds(1, 2), indirect=True)
def test_parts_of_split_tiles_follow_each_other(ranks: Ranks) -> None:
    for (workers, tiles, per_tile), starts, owners in ranks.run(all_parts)[0]:
        assert starts[0] == 0 and starts[-1] == len(owners) and starts == sorted(starts)
        lengths = [end - begin for begin, end in itertools.pairwise(starts)]
        busy = [length for length in lengths if length > 0]
        assert max(busy) - min(busy) <= 1 and lengths[: len(busy)] == busy
        assert all(len(set(owners[at : at + per_tile])) <= 16 for at in range(0, len(owners), per_tile))
        assert owners == [worker for worker, length in enumerate(lengths) for _ in range(length)]
        assert len(busy) == sharers_of(tiles, per_tile, workers)
        if tiles <= workers and not (2 * tiles > workers and 5 * tiles <= 3 * workers):
            shares = [owners[at : at + per_tile] for at in range(0, len(owners), per_tile)]
            assert not any(set(one) & set(other) for one, other in itertools.pairwise(shares))
            assert len({len(set(share)) for share in shares}) == 1


def places_of_slots() -> list[int]:
    ctx = context()
    out = torch.zeros(2, dtype=torch.int64, device=ctx.device)
    slots_kernel[(1,)](out, torch.zeros(1, dtype=torch.float32, device=ctx.device), 3, 5, 1 << 23, 1 << 24, BLOCK=16)
    return [int(place) for place in out.cpu()]


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_slots_lie_further_than_32_bits_count(ranks: Ranks) -> None:
    assert ranks.run(places_of_slots) == [[(3 * (1 << 23) + 5) * 256, (1 << 24) * 256]]
