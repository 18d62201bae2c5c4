"""Many calls in a row, on GPUs from a captured graph: with new whole numbers in the same memory each time, and ranks
that are late by chance, every element of every result must be right.

Products and sums of small whole numbers are exact in every dtype and in any order, so results are compared bit by bit,
on the device, without waiting for it. ``IRIS_REPLAYS=<number>`` sets how many calls each way is replayed, and
``IRIS_SOAK=<number>`` how many the mixed run makes.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from ops_inputs import (
    ALL_REDUCE,
    GATHER,
    IN_WORDS,
    LAYOUTS,
    LOCAL,
    REDUCE_SCATTER,
    SMALL,
    Shape,
    Trial,
    Way,
    trial,
    ways,
)
from ranks import BACKEND, FIRST_TIMEOUT_S, Ranks, context, fresh, worlds

import iris
from iris.bench.cases.operands import problem_of
from iris.ops import FusedConfig, new_workspace
from iris.ops.candidates import candidates, variations
from iris.ops.config import min_block_size_k
from iris.ops.exchange import FLAGS
from iris.ops.problem import DTYPES
from iris.ops.target import target_of

REPLAYS = int(os.environ.get("IRIS_REPLAYS") or (3 if BACKEND == "sim" else 300))
REPLAYED = ways()[::9] if BACKEND == "sim" else ways()
"""In the simulator, which captures nothing, only enough ways to show that the test works."""
SOAK = int(os.environ.get("IRIS_SOAK") or (24 if BACKEND == "sim" else 600))
CALL_LIMIT_S = 0.5 if BACKEND == "sim" else 0.05
COMPILE_LIMIT_S = 2
"""Time to compile each way, if none was compiled before."""
REPLAYS_LIMIT_S = 60 + REPLAYS * CALL_LIMIT_S
SOAK_LIMIT_S = 60 + len(ways()) * COMPILE_LIMIT_S + SOAK * CALL_LIMIT_S
ALIGNED: Shape = (32, 32, 32)
RAGGED: Shape = (17, 33, 24)
LATE_S = 0.002
MOST: Shape = (40, 40, 80) if BACKEND == "sim" else (256, 384, 640)
"""The most rows, columns and depth of drawn matrices."""
MIXED_HEAP = 1 << (26 if BACKEND == "sim" else 31)
AT_A_TIME, CALLS_PER_CONFIG = 8, 3 if BACKEND == "sim" else 30


class Calls:
    """One way to run an op again and again in the same memory, each time with one of several sets of numbers."""

    def __init__(
        self,
        ctx: iris.Iris,
        way: Way,
        shape: Shape,
        dtype: torch.dtype,
        config: FusedConfig,
        seed: int,
        captured: bool,
        by_flags: bool = False,
        layout: str = "plain",
    ) -> None:
        made = [trial(ctx, way, shape, dtype, seed + index, "column", layout, whole=True) for index in range(3)]
        self.live, *self.numbers = made
        self.expected = [expected(one) for one in self.numbers]
        self.wrong = torch.zeros(len(self.numbers), dtype=torch.int64, device=ctx.device)
        self._workspace = new_workspace(ctx, way.op, way.algorithm, 1 << 20, FLAGS) if by_flags else None  # to live on
        self.call: Callable[[], object] = lambda: self.live.run(config, self._workspace)
        if captured:
            self.call = recorded(self.call)

    def next(self, which: int) -> None:
        """Make a call on the numbers ``which``; all ranks must choose the same ones."""
        numbers = self.numbers[which]
        self.live.a.copy_(numbers.a)
        self.live.b.copy_(numbers.b)
        assert self.live.bias is not None and numbers.bias is not None
        self.live.bias.copy_(numbers.bias)
        self.live.spoil()
        self.call()
        self.wrong[which] += (self.live.output != self.expected[which]).sum()


def expected(one: Trial) -> torch.Tensor:
    """The exact result, on the device."""
    return one.reference.to(one.output.device, one.output.dtype)


def recorded(call: Callable[[], object]) -> Callable[[], object]:
    """A function that replays ``call`` from a CUDA graph; ``call`` itself if there are no such graphs."""
    if BACKEND == "sim":
        return call
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def linger(chance: random.Random, ranks: int) -> None:
    """Make the host or the device late now and then. With more ``ranks`` each is late less often, so that calls without
    delays, directly after each other, are also tested."""
    kind = chance.randrange(3 * ranks)
    if kind == 0:
        time.sleep(LATE_S * chance.random())
    elif kind == 1 and BACKEND != "sim":
        torch.cuda._sleep(chance.randrange(2_000_000))


def replays(way: Way, dtype: torch.dtype, count: int, seed: int, by_flags: bool = False) -> list[int]:
    ctx = context()
    together, alone = random.Random(seed), random.Random(seed + ctx.rank)
    config = replace(SMALL, num_chunks=2)
    kept = [
        Calls(ctx, way, shape, dtype, config, seed + index, True, by_flags)
        for index, shape in enumerate((ALIGNED, RAGGED))
    ]
    for _ in range(count):
        linger(alone, ctx.world_size)
        together.choice(kept).next(together.randrange(2))
    ctx.synchronize()
    return [wrong for calls in kept for wrong in calls.wrong.tolist()]


@pytest.mark.timeout(REPLAYS_LIMIT_S + 30)
@pytest.mark.parametrize("ranks", worlds(2, 8) if BACKEND != "sim" else worlds(2, 2), indirect=True)
@pytest.mark.parametrize("way", REPLAYED, ids=str)
def test_replays(ranks: Ranks, way: Way, seed: int) -> None:
    dtype = DTYPES[ways().index(way) % len(DTYPES)]
    for wrong in ranks.run(replays, way, dtype, REPLAYS, seed, limit_s=REPLAYS_LIMIT_S):
        assert wrong == [0] * 4


@pytest.mark.timeout(REPLAYS_LIMIT_S + 30)
@pytest.mark.parametrize("ranks", worlds(2, 8) if BACKEND != "sim" else worlds(2, 2), indirect=True)
@pytest.mark.parametrize("way", IN_WORDS if BACKEND != "sim" else IN_WORDS[::3], ids=str)
def test_replays_by_flags(ranks: Ranks, way: Way, seed: int) -> None:
    """This is how large amounts, too large for words, are sent."""
    dtype = DTYPES[IN_WORDS.index(way) % len(DTYPES)]
    for wrong in ranks.run(replays, way, dtype, REPLAYS, seed, True, limit_s=REPLAYS_LIMIT_S):
        assert wrong == [0] * 4


def soak(count: int, seed: int) -> dict[str, list[int]]:
    """Wrong calls among calls of all ways in random order; half of the ways are captured, half have split tiles, and
    there is no barrier."""
    ctx = context()
    together, alone = random.Random(seed), random.Random(seed + 1 + ctx.rank)
    kept: dict[str, Calls] = {}
    for index, way in enumerate(ways()):
        dtype, shape = DTYPES[index % len(DTYPES)], (ALIGNED, RAGGED)[index // 2 % 2]
        config = replace(
            SMALL, stream_k=index % 2 == 1, two_tiles=index % 4 == 3, num_chunks=1 + index % 3,
            block_size_k=min_block_size_k(dtype),
        )  # fmt: skip
        kept[f"{way} {dtype} {shape}"] = Calls(ctx, way, shape, dtype, config, seed + index, index % 4 < 2)
    ctx.barrier()
    names = list(kept)
    for _ in range(count):
        linger(alone, ctx.world_size)
        kept[together.choice(names)].next(together.randrange(2))
    ctx.synchronize()
    return {name: calls.wrong.tolist() for name, calls in kept.items()}


def none_is_wrong(ranks: Ranks, calls: Callable[[int, int], dict[str, list[int]]], seed: int) -> None:
    """Assert that no rank has found a wrong result in ``SOAK`` of ``calls``."""
    for rank, found in enumerate(ranks.run(calls, SOAK, seed, limit_s=SOAK_LIMIT_S)):
        for name, wrong in found.items():
            assert wrong == [0, 0], (rank, name)


@pytest.mark.timeout(SOAK_LIMIT_S + 30)
@pytest.mark.parametrize("ranks", worlds(2, 8) if BACKEND != "sim" else worlds(3, 3), indirect=True)
def test_soak(ranks: Ranks, seed: int) -> None:
    none_is_wrong(ranks, soak, seed)


def drawn(ctx: iris.Iris, chance: random.Random) -> tuple[str, Calls]:
    """Calls of any way on matrices of any sizes, with a config that tuning might try there, and what they are."""
    target = target_of(ctx)
    while True:
        way, dtype, layout = chance.choice(ways()), chance.choice(DTYPES), chance.choice(LAYOUTS)
        rows, n, depth = (chance.choice((chance.randrange(1, most), most)) for most in MOST)
        rows = -(-rows // ctx.world_size) * ctx.world_size if way.even_rows else rows
        multiplied = {GATHER: (1 - way.gather_dim, way.gather_dim), REDUCE_SCATTER: (1, 0)}.get(way.op, (0, 0))
        m, k = (size * ctx.world_size**more for size, more in zip((rows, depth), multiplied, strict=True))
        problem = problem_of(way.op, (m, n, k), dtype, ctx.world_size, way.gather_dim)
        if configs := list(candidates(problem, target, wide=True, algorithm=way.algorithm)):
            break
    config = chance.choice(configs)
    config = chance.choice([config, *variations(problem, config, target)])
    calls = Calls(ctx, way, (rows, n, depth), dtype, config, chance.randrange(1 << 30), False, layout=layout)
    return f"{way}, {rows} x {n} x {depth}, {dtype}, {layout}: {config}", calls


def mixed_configs(count: int, seed: int) -> dict[str, list[int]]:
    """Wrong calls among ``count`` of drawn ones in random order, a few kinds at a time, without barriers."""
    wrong: dict[str, list[int]] = {}
    with fresh(MIXED_HEAP, FIRST_TIMEOUT_S) as ctx:  # kernels are compiled all along, for workspaces that exist, too
        together, alone = random.Random(seed), random.Random(seed + 1 + ctx.rank)
        kept: dict[str, Calls] = {}

        def forget(left: int) -> None:
            while len(kept) > left:
                name = next(iter(kept))
                wrong[name] = kept.pop(name).wrong.tolist()

        for call in range(count):
            if call % CALLS_PER_CONFIG == 0:
                name, calls = drawn(ctx, together)
                kept[name] = calls
                forget(AT_A_TIME)
            linger(alone, ctx.world_size)
            kept[together.choice([*kept])].next(together.randrange(2))
        forget(0)
        ctx.synchronize()
    return wrong


@pytest.mark.timeout(SOAK_LIMIT_S + 30)
@pytest.mark.parametrize("ranks", worlds(2, 8) if BACKEND != "sim" else worlds(2, 2), indirect=True)
def test_any_config(ranks: Ranks, seed: int) -> None:
    """The other tests use small tiles only."""
    none_is_wrong(ranks, mixed_configs, seed)


def small_large_small(way: Way, seed: int) -> list[float]:
    """Errors of a captured call, of a larger one that needs more memory of every kind, and of the captured one
    again."""
    ctx = context()
    config = replace(SMALL, stream_k=True, two_tiles=True, block_size_k=16, num_chunks=3)
    small = trial(ctx, way, (20, 20, 40), torch.float16, seed)
    again = recorded(lambda: small.run(config))
    again()
    excesses = [small.excess()]
    large = trial(ctx, way, (90, 70, 40), torch.float16, seed)
    large.run(replace(config, block_size_m=32, block_size_n=32))
    excesses.append(large.excess())
    sizes = (16, 64, 256, 1024, 4096, 1 << 16)
    trash = [torch.full((size,), -1, dtype=torch.int32, device=ctx.device) for size in sizes]
    small.spoil()
    ctx.barrier()
    again()
    excesses.append(small.excess())
    del trash
    return excesses


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("way", [Way(GATHER, "push"), Way(ALL_REDUCE, "copy_engine"), Way(LOCAL, "local")], ids=str)
def test_a_captured_call_keeps_its_memory(ranks: Ranks, way: Way, seed: int) -> None:
    for excesses in ranks.run(small_large_small, way, seed):
        assert max(excesses) <= 1


def notices(seed: int) -> list[list[int]]:
    """Calls in which one element is spoilt with the second set of numbers."""
    ctx = context()
    calls = Calls(ctx, Way(LOCAL, "local"), RAGGED, torch.bfloat16, SMALL, seed, captured=False)
    calls.expected[1][3, 4] += 1
    found = []
    for which in (0, 1):
        calls.next(which)
        found.append(calls.wrong.tolist())
    return found


@pytest.mark.parametrize("ranks", worlds(1, 2), indirect=True)
def test_one_wrong_element_is_noticed(ranks: Ranks, seed: int) -> None:
    assert ranks.run(notices, seed) == [[[0, 0], [0, 1]]] * ranks.world_size
