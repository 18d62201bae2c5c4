"""Tiles split over programs along K: results are right and repeatable with few programs, with many, and with more
programs than tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from ops_inputs import LOCAL, SMALL, Shape, Way, rotated, some, trial, ways
from ranks import BACKEND, Ranks, context, worlds

import iris
from iris.ops.algorithms import LIBRARY
from iris.ops.candidates import TILES
from iris.ops.config import FusedConfig, Target, min_block_size_k
from iris.ops.hardware import HARDWARE
from iris.ops.launching import start_kernel
from iris.ops.model.machine import machine
from iris.ops.model.matmul import Call
from iris.ops.problem import DTYPES, QUANTISED, Problem
from iris.ops.stream_k import strip_stages, strips_of
from iris.trace import Event

LONG: tuple[Shape, ...] = ((20, 35, 150), (9, 11, 200), (40, 17, 90), (33, 33, 65))
"""Six tiles, one, three … of 16 × 16, and K much longer than a block."""
NARROW = replace(SMALL, stream_k=True, group_size_m=2)
H200 = machine(HARDWARE["H200 SXM"], torch.bfloat16)
SPLITS = [(two_tiles, programs) for programs in (1, 3, 4) for two_tiles in (False, True)]


def split(way: Way, turn: int, count: int, seed: int) -> list[tuple[tuple[bool, int], Shape, float]]:
    ctx, found = context(), []
    for index, (two_tiles, programs) in enumerate(rotated(tuple(SPLITS), turn, count), turn * count):
        shape, dtype = LONG[index % len(LONG)], DTYPES[index // 2 % len(DTYPES)]
        one = trial(ctx, way, shape, dtype, seed + index, "column")
        least = max(programs, way.least_programs)
        one.run(replace(NARROW, block_size_k=min_block_size_k(dtype), two_tiles=two_tiles, num_sms=least))
        found.append(((two_tiles, programs), shape, one.excess()))
    return found


OWN_MATMUL = [
    way for turn, way in enumerate(ways()) if way.algorithm not in LIBRARY or DTYPES[turn % len(DTYPES)] in QUANTISED
]
"""Ways whose matmul runs on Iris's kernel; those of the library do so for 8 bits only."""


@pytest.mark.parametrize("ranks", worlds(2, 4) if BACKEND != "sim" else worlds(2, 2), indirect=True)
@pytest.mark.parametrize("way", some(OWN_MATMUL), ids=str)
def test_split_tiles_of_every_op(ranks: Ranks, way: Way, seed: int) -> None:
    for found in ranks.run(split, way, ways().index(way), 2, seed):
        for options, shape, excess in found:
            assert excess <= 1, (options, shape)


@pytest.mark.parametrize("ranks", worlds(1, 2), indirect=True)
@pytest.mark.parametrize("turn", range(4))
def test_split_tiles_of_one_rank(ranks: Ranks, turn: int, seed: int) -> None:
    """Over all turns every split is tested with every shape."""
    for found in ranks.run(split, Way(LOCAL, "local"), turn, 6, seed):
        for options, shape, excess in found:
            assert excess <= 1, (options, shape)


def traced_events() -> list[Event]:
    ctx, trace = context(), iris.Trace()
    one = trial(ctx, Way(LOCAL, "local"), (32, 32, 400), torch.float32, seed=1)
    one.run(replace(NARROW, num_sms=3), trace=trace)
    assert one.excess() <= 1
    return trace.events(ctx)


@pytest.mark.skipif(BACKEND != "sim", reason="programs take turns")
@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_a_trace_has_no_gap_where_parts_of_a_tile_come_together(ranks: Ranks) -> None:
    (events,) = ranks.run(traced_events)
    multiplied, moved = (
        {(one.program, one.detail): one for one in events if one.kind == kind} for kind in ("wg_gemm", "wg_fetch")
    )
    assert multiplied.keys() == moved.keys() and len({tile for _, tile in multiplied}) < len(multiplied)
    for (program, tile), own in multiplied.items():
        for (other, shared), part in multiplied.items():
            if shared == tile and other > program:  # which multiplies while this one waits for its part
                assert own.end_ns <= moved[program, tile].start_ns < part.end_ns


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two ranks; if simulated, they run nine programs each, or as many as the test says."""
    monkeypatch.setenv("IRIS_SIM_SMS", str(getattr(request, "param", 9)))
    ranks = Ranks(2)
    yield ranks
    ranks.end()


def crowded(seed: int) -> list[tuple[Way, Shape, float]]:
    ctx, found = context(), []
    assert ctx.num_sms == 9
    shapes = ((16, 16, 300), (16, 32, 200), (33, 17, 140), (32, 48, 70), (9, 5, 70))
    for turn, way in enumerate(one for one in ways() if one.algorithm in ("local", "push", "two_shot")):
        for index in range(5) if way.algorithm == "local" else (turn % 5, (turn + 2) % 5):
            shape = shapes[index]
            dtype = DTYPES[(turn + index) % len(DTYPES)]
            one = trial(ctx, way, shape, dtype, seed + index)
            one.run(replace(NARROW, block_size_k=min_block_size_k(dtype), two_tiles=index % 2 == 1))
            found.append((way, shape, one.excess()))
    return found


@pytest.mark.skipif(BACKEND != "sim", reason="GPUs have their own number of programs")
def test_many_programs_share_a_tile(crowd: Ranks, seed: int) -> None:
    """There are one, two, three and six tiles for nine programs: tiles of many parts are next to each other, and a
    program has the last part of one and the first of the next. Finally, a tile has fewer blocks than programs."""
    for found in crowd.run(crowded, seed):
        for way, shape, excess in found:
            assert excess <= 1, (str(way), shape)


@contextmanager
def launches() -> Iterator[list[dict[str, Any]]]:
    """The arguments of launches of the matmul kernel in the block."""
    found: list[dict[str, Any]] = []

    def start(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
        def launch(*arguments: Any, **constants: Any) -> object:
            found.append(constants)
            return kernel[grid](*arguments, **constants)

        return launch

    token = start_kernel.set(start)
    try:
        yield found
    finally:
        start_kernel.reset(token)


IN_STRIPS = replace(NARROW, two_tiles=False, num_sms=17)
OWN_KERNEL = [way for way in ways() if way.algorithm not in LIBRARY]


def in_strips(way: Way, turn: int, widths: tuple[int, ...], seed: int) -> list[tuple[Shape, int, float, int]]:
    ctx, found = context(), []
    shapes = ((16, 200, 300), (20, 300, 150), (33, 520, 70))
    for index, width in enumerate(widths, turn):
        shape, dtype = shapes[index % 3], DTYPES[(turn + index) % len(DTYPES)]
        one = trial(ctx, way, shape, dtype, seed + index, "row" if turn % 2 else None)
        config = replace(IN_STRIPS, block_size_n=width, block_size_k=min_block_size_k(dtype))
        with launches() as seen:
            one.run(config)
        (launch,) = seen
        found.append((shape, width, one.excess(), launch["STRIPS"]))
    return found


@pytest.mark.parametrize("crowd", [17], indirect=True)
@pytest.mark.parametrize("way", some(OWN_KERNEL, 4), ids=str)
@pytest.mark.parametrize("ranks", worlds(2, 2))
def test_split_tiles_in_strips(crowd: Ranks, way: Way, ranks: int, seed: int) -> None:
    """One tile is cut into four strips, some into two, some not at all; the last strip of some is outside the output.
    The model knows which are cut."""
    problem = Problem(way.op, 16, 16, 16, torch.float16, ranks, way.gather_dim)
    sliced = Call(problem, replace(IN_STRIPS, algorithm=way.algorithm), H200).sliced
    widths = (256, 128) if sliced else (256,)
    for found in crowd.run(in_strips, way, OWN_KERNEL.index(way), widths, seed):
        for shape, width, excess, _ in found:
            assert excess <= 1, (shape, width)
        assert any(strips > 1 for *_, strips in found) == sliced


@pytest.mark.parametrize(
    ("backend", "shared_nbytes", "others"),
    [("cuda", None, 0), ("hip", None, 1), ("hip", 64 << 10, 1), ("hip", 160 << 10, 0)],
)
def test_stages_of_strips_fit_where_those_of_whole_tiles_do(
    backend: str, shared_nbytes: int | None, others: int
) -> None:
    """On AMD GPUs, except the newest, one stage is in registers."""
    target = Target(backend, 132, shared_nbytes=shared_nbytes)
    for one in [tile for (of, _), tiles in TILES.items() if of == backend for tile in tiles]:
        config = FusedConfig(**one)
        for strips in (1, 2, 4):
            stages = strip_stages(config, strips, target) - others
            width, whole = (
                config.block_size_m + config.block_size_n // strips,
                config.block_size_m + config.block_size_n,
            )
            assert stages * width <= (config.num_stages - others) * whole < (stages + 1) * width


def test_strips_of() -> None:
    config = FusedConfig(stream_k=True, two_tiles=False, block_size_n=256)
    narrow, two = replace(config, block_size_n=128), replace(config, two_tiles=True)
    of = {tiles: strips_of(tiles, 132, config) for tiles in (0, 132, 4, 140, 141, 66, 198, 199, 250)}
    assert of == {0: 1, 132: 1, 4: 4, 140: 4, 141: 2, 66: 2, 198: 2, 199: 1, 250: 1}
    assert [strips_of(tiles, 132, narrow) for tiles in (8, 66, 67)] == [2, 2, 1]
    assert [strips_of(tiles, 132, two) for tiles in (8, 140, 272)] == [4, 1, 1]
    assert strips_of(8, 132, replace(config, block_size_n=64)) == 1
