"""The model: close to measurements, monotonic where it must be, and defined for every algorithm and hardware."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from iris.bench.cases import operands
from iris.ops import FusedConfig, Problem, Target, candidates, model
from iris.ops.algorithms import EXCHANGING, LIBRARY, OPS, TRAITS, algorithms
from iris.ops.hardware import HARDWARE, Hardware, floor_s
from iris.ops.model import predict_ms, predicted_s
from iris.ops.model.machine import machine
from iris.ops.pick import model_pick
from iris.ops.problem import DTYPES, TRANSPOSED_FROM_ROWS

H100, H200, MI300X = HARDWARE["H100 SXM"], HARDWARE["H200 SXM"], HARDWARE["MI300X"]
TARGET = Target("cuda", H200.num_sms, tma=True, hardware="NVIDIA H200")
MEASURED, AGAIN, WORDS, EIGHT, MIRRORED, LOCAL, LOCAL_INT8, MIRRORED_H100 = (
    json.loads((Path(__file__).parent / "data" / f"{name}.json").read_text())["measurements"]
    for name in (
        "h200_measured",
        "h200_again",
        "h200_words",
        "h200_eight",
        "h200_mirrored",
        "h200_local",
        "h200_local_int8",
        "h100_mirrored",
    )
)
"""Measured calls: on as many GPUs as ranks, up to 4, also of later ops and of words, and 8; on two GPUs that emulate 4
or 8 ranks; local matmuls on one GPU; and on two GPUs of another kind that emulate more ranks."""
EVERY = [(op, algorithm) for op in OPS for algorithm in algorithms(op)]
TILE = FusedConfig(block_size_n=256, comm_block_n=256)


def problem_of(
    op: str, m: int, n: int, k: int, world_size: int, dtype: torch.dtype = torch.bfloat16, gather_dim: int | None = None
) -> Problem:
    """A problem, by the sizes of the local matmul."""
    return operands.problem_of(op, (m, n, k), dtype, world_size, gather_dim or 0)


def measured(calls: list[dict[str, Any]] = MEASURED) -> list[tuple[Problem, FusedConfig, float]]:
    """Each measured call: the problem, the config, and milliseconds."""
    return [
        (
            problem_of(one["op"], one["m"], one["n"], one["k"], one["world_size"], gather_dim=one["gather_dim"]),
            FusedConfig(**one["config"]),
            one["measured_ms"],
        )
        for one in calls
    ]


def predicted(problem: Problem, config: FusedConfig, known: Hardware, calls: list[dict[str, Any]]) -> float:
    """Predicted milliseconds; if two GPUs emulate all ranks, without contention between ranks."""
    contention = calls not in (MIRRORED, MIRRORED_H100)
    return 1e3 * predicted_s(problem, config, replace(machine(known, problem.dtype), contention=contention))


def test_the_model_and_the_choice_know_the_algorithms_that_there_are() -> None:
    assert {op: set(known) for op, known in model._PREDICTORS.items()} == {
        op: set(known) for op, known in TRAITS.items()
    }
    assert candidates._STREAM_K | candidates._OF_FEW_ROWS <= {*EVERY}


def test_an_algorithm_of_the_library_is_one_in_every_op() -> None:
    """Code looks these algorithms up by name alone."""
    for op, name in EVERY:
        assert (TRAITS[op][name].library, TRAITS[op][name].exchange) == (name in LIBRARY, name in EXCHANGING)


def test_predictions_are_as_close_as_the_model_says() -> None:
    off = [abs(math.log(predict_ms(problem, config, H200) / ms)) for problem, config, ms in measured()]
    assert len(off) > 700
    assert math.exp(statistics.median(off)) < 1.05
    assert math.exp(max(off)) < 1.43


@pytest.mark.parametrize(
    ("calls", "ranks", "most", "at_worst"),
    [
        (AGAIN, {2, 4}, (0.90, 1.12), (0.45, 1.34)),
        (WORDS, {2, 4}, (0.89, 1.15), (0.53, 1.38)),
        (EIGHT, {8}, (0.90, 1.12), (0.62, 1.27)),
    ],
    ids=["later ops", "words", "8 ranks"],
)
def test_predictions_are_off_to_either_side_as_the_model_says(
    calls: list[dict[str, Any]], ranks: set[int], most: tuple[float, float], at_worst: tuple[float, float]
) -> None:
    off = [math.log(predict_ms(problem, config, H200) / ms) for problem, config, ms in measured(calls)]
    assert {problem.world_size for problem, _, _ in measured(calls)} == ranks
    assert math.exp(statistics.median(map(abs, off))) < 1.05
    first, *_, last = statistics.quantiles(off, n=20)
    assert most[0] < math.exp(first) < math.exp(last) < most[1]
    assert at_worst[0] < math.exp(min(off)) < math.exp(max(off)) < at_worst[1]


def accuracy(known: Hardware, calls: list[dict[str, Any]]) -> list[str]:
    """What docs/performance.md says about these calls, by column."""
    off: list[float] = []
    by_problem: dict[Problem, list[tuple[float, float]]] = defaultdict(list)
    for problem, config, ms in measured(calls):
        foreseen = predicted(problem, config, known, calls)
        off.append(foreseen / ms)
        by_problem[problem].append((foreseen, ms))
    first, *_, last = statistics.quantiles(off, n=20)
    lost = [min(times)[1] / min(ms for _, ms in times) - 1 for times in by_problem.values() if len(times) > 1]
    rows = [problem.m for problem in by_problem]
    median = math.exp(statistics.median(abs(math.log(one)) for one in off)) - 1
    return [
        str(len(calls)), f"{min(rows)} to {max(rows)}", f"{median:.1%}", f"{first:.2f} to {last:.2f}",
        f"{min(off):.2f} to {max(off):.2f}", f"{statistics.mean(lost):.1%}", f"{max(lost):.0%}", str(len(lost)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "known", "calls"),
    [
        ("h200_measured", H200, MEASURED),
        ("h200_again", H200, AGAIN),
        ("h200_words", H200, WORDS),
        ("h200_eight", H200, EIGHT),
        ("h200_mirrored", H200, MIRRORED),
        ("h100_mirrored", H100, MIRRORED_H100),
    ],
)
def test_the_docs_say_how_accurate_the_model_is(name: str, known: Hardware, calls: list[dict[str, Any]]) -> None:
    page = (Path(__file__).parent.parent / "docs" / "performance.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}`"))
    said = [cell.strip().replace(" %", "%") for cell in row.strip("|").split("|")]
    assert said[2:] == accuracy(known, calls)


@pytest.mark.parametrize("op", OPS)
def test_no_op_is_predicted_too_fast_or_too_slow_throughout(op: str) -> None:
    ratios = [predict_ms(problem, config, H200) / ms for problem, config, ms in measured() if problem.op == op]
    assert 0.92 < statistics.median(ratios) < 1.08


@pytest.mark.parametrize(
    ("known", "calls", "fewest", "on_average", "at_worst"),
    [
        (H200, MEASURED, 100, 1.03, 1.21),
        (H200, AGAIN, 150, 1.011, 1.18),
        (H200, WORDS, 100, 1.005, 1.12),
        (H200, EIGHT, 80, 1.014, 1.11),
        (H200, MIRRORED, 150, 1.016, 1.47),
        (H100, MIRRORED_H100, 200, 1.025, 1.82),
    ],
)
def test_the_config_that_the_model_prefers_is_among_the_fastest_measured(
    known: Hardware, calls: list[dict[str, Any]], fewest: int, on_average: float, at_worst: float
) -> None:
    by_problem: dict[Problem, dict[FusedConfig, float]] = defaultdict(dict)
    for problem, config, ms in measured(calls):
        by_problem[problem][config] = ms
    lost = []
    for problem, times in by_problem.items():
        if len(times) < 2:
            continue
        preferred = min(times, key=lambda config: predicted(problem, config, known, calls))
        lost.append(times[preferred] / min(times.values()))
    assert len(lost) > fewest
    assert statistics.mean(lost) < on_average
    assert max(lost) < at_worst


@pytest.mark.parametrize(
    ("known", "world_size", "met"), [(H200, 8, True), (H200, 4, True), (H200, 2, False), (MI300X, 8, False)]
)
def test_ranks_meet_at_a_peer_if_there_are_several_behind_a_switch(known: Hardware, world_size: int, met: bool) -> None:
    problem = problem_of("matmul_all_reduce", 8192, 8192, 1024, world_size)
    rates, config = machine(known, problem.dtype), FusedConfig("decomposed", block_size_n=256)
    alone = predicted_s(problem, config, replace(rates, contention=False))
    assert (predicted_s(problem, config, rates) > alone) is met


def test_as_one_of_many_ranks_predictions_are_as_close_as_the_model_says() -> None:
    off = [math.log(predicted(problem, config, H200, MIRRORED) / ms) for problem, config, ms in measured(MIRRORED)]
    assert {problem.world_size for problem, _, _ in measured(MIRRORED)} == {4, 8}
    assert math.exp(statistics.median(map(abs, off))) < 1.065
    first, *_, last = statistics.quantiles(off, n=20)
    assert 0.90 < math.exp(first) < math.exp(last) < 1.27


def test_of_hardware_that_is_known_from_data_sheets_predictions_are_as_close_as_the_model_says() -> None:
    assert not H100.sustained_flops
    calls = measured(MIRRORED_H100)
    ratios = [predicted(problem, config, H100, MIRRORED_H100) / ms for problem, config, ms in calls]
    assert {problem.world_size for problem, _, _ in calls} == {2, 4, 8}
    assert math.exp(statistics.median(abs(math.log(ratio)) for ratio in ratios)) < 1.06
    assert 0.44 < min(ratios) < max(ratios) < 1.6
    sent = [
        predicted(problem, config, H100, MIRRORED_H100) / ms
        for problem, config, ms in calls
        if (problem.op, config.algorithm) == ("all_gather_matmul", "push")
    ]
    assert len(sent) > 200
    for those, nine_of_ten in ((ratios, (0.89, 1.13)), (sent, (0.87, 1.14))):
        first, *_, last = statistics.quantiles(those, n=20)
        assert nine_of_ten[0] < first < last < nine_of_ten[1]


@pytest.mark.parametrize(
    ("m", "on_average", "at_worst"),
    [(4, 1.02, 1.1), (8, 1.03, 1.15), (16, 1.03, 1.15), (32, 1.04, 1.1), (64, 1.06, 1.2), (128, 1.04, 1.15),
     (256, 1.05, 1.25), (512, 1.02, 1.1), (1024, 1.02, 1.1)],
)  # fmt: skip
def test_the_tile_of_a_local_matmul_is_among_the_fastest_measured(m: int, on_average: float, at_worst: float) -> None:
    lost = []
    for one in LOCAL:
        if one["m"] != m:
            continue
        times = {local_config(*fields): us for *fields, us in one["us"]}
        picked = model_pick(problem_of("matmul", m, one["n"], one["k"], 1), TARGET)
        if picked in times:
            lost.append(times[picked] / min(times.values()))
    assert len(lost) > 8
    assert statistics.mean(lost) < on_average
    assert max(lost) < at_worst


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [(4, 16, 32), (64, 256)], ids=["few", "more"])
def test_the_tile_of_a_local_matmul_of_int8_is_among_the_fastest_measured(
    transposed: bool, rows: tuple[int, ...]
) -> None:
    lost, library = [], []
    for one in LOCAL_INT8:
        if one["m"] not in rows or one["transposed_b"] != transposed:
            continue
        if not transposed and one["m"] >= TRANSPOSED_FROM_ROWS:  # transposed first since this was measured
            continue
        times = {local_config(*fields): us for *fields, us in one["us"]}
        problem = problem_of("matmul", one["m"], one["n"], one["k"], 1, torch.int8)
        picked = model_pick(replace(problem, transposed_b=transposed), TARGET)
        if picked in times:
            lost.append(times[picked] / min(times.values()))
            library.append(times[picked] / one.get("library_us", math.inf))
    assert len(lost) >= 6 * len(rows) - (3 if transposed else 6 * (256 in rows))
    assert statistics.mean(lost) < 1.08
    assert max(lost) < 1.35
    assert max(library) < 1.05


def local_config(m: int, n: int, k: int, warps: int, stages: int, split: bool) -> FusedConfig:
    return FusedConfig("local", m, n, k, num_warps=warps, num_stages=stages, stream_k=split)


def test_an_unknown_algorithm_is_an_error() -> None:
    with pytest.raises(KeyError):
        predict_ms(problem_of("matmul", 64, 64, 64, 1), replace(TILE, algorithm="auto"), H200)


def test_a_dtype_that_is_never_multiplied_is_an_error() -> None:
    with pytest.raises(KeyError, match="float64"):
        predict_ms(
            replace(problem_of("matmul", 64, 64, 64, 1), dtype=torch.float64),
            local_config(64, 64, 64, 4, 3, False),
            H200,
        )


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=lambda one: one.name)
@pytest.mark.parametrize(("op", "algorithm"), EVERY)
def test_every_prediction_is_a_time(op: str, algorithm: str, hardware: Hardware) -> None:
    split = FusedConfig(stream_k=True, num_chunks=64, num_sms=2, comm_sms=1, num_rounds=99)
    for turn, dtype in enumerate(DTYPES, EVERY.index((op, algorithm))):
        world_size = (1, 2, 7, 16)[turn % 4]
        for m, n, k in ((world_size, 1, 1), (1000 * world_size, 1000, 72)):
            problem = problem_of(op, m, n, k, world_size, dtype)
            for config in (TILE, split, FusedConfig(num_sms=1, comm_sms=16)):
                ms = predict_ms(problem, replace(config, algorithm=algorithm), hardware)
                assert 0.005 < ms < 1e6


@pytest.mark.parametrize(("op", "algorithm"), EVERY)
def test_more_work_never_takes_less_time(op: str, algorithm: str) -> None:
    config = replace(TILE, algorithm=algorithm, num_chunks=2)
    for size in ("m", "n", "k"):
        sizes = {"m": 1024, "n": 1024, "k": 1024}
        times = []
        for factor in (1, 2, 4, 16, 64, 65):
            grown: dict[str, Any] = {**sizes, size: sizes[size] * factor}
            times.append(predict_ms(problem_of(op, **grown, world_size=4), config, H200))
        # The loads of a wave are a mean over all waves: with one wave more they are less by a hundred-thousandth.
        assert all(less < 1.0001 * more for less, more in itertools.pairwise(times)), size
        assert times[-1] > 2 * times[0], size


FIGURES: list[dict[str, Any]] = [
    {"copy_bytes_per_s": 1e10, "store_bytes_per_s": 1e10, "load_bytes_per_s": 1e10},
    {"memory_bytes_per_s": 1e11},
    {"sustained_flops": {"bf16": 1e14}},
    {"num_sms": 33, "sustained_flops": {"bf16": 2e14}},
]


@pytest.mark.parametrize("worse", FIGURES, ids=lambda figures: next(iter(figures)))
@pytest.mark.parametrize(("op", "algorithm"), EVERY)
def test_worse_hardware_never_takes_less_time(op: str, algorithm: str, worse: dict[str, Any]) -> None:
    problem = problem_of(op, 4096, 4096, 4096, 4)
    config = replace(TILE, algorithm=algorithm, comm_sms=16)
    assert predict_ms(problem, config, replace(H200, **worse)) >= predict_ms(problem, config, H200)
    if op != "matmul" and "copy_bytes_per_s" in worse:
        assert predict_ms(problem, config, replace(H200, **worse)) > 2 * predict_ms(problem, config, H200)


@pytest.mark.parametrize(("op", "algorithm"), EVERY)
def test_nothing_is_predicted_to_beat_the_floor(op: str, algorithm: str) -> None:
    for world_size in (2, 4, 8):
        problem = problem_of(op, 8192, 4096, 8192, world_size)
        floor = floor_s(problem, H200)
        assert floor is not None
        assert predict_ms(problem, replace(TILE, algorithm=algorithm), H200) > 0.9e3 * floor


def test_splitting_does_not_shorten_the_traffic_with_memory() -> None:
    problem = problem_of("matmul", 8448, 128, 28672, 1)
    for hardware in (HARDWARE["H100 SXM"], H200):
        floor = floor_s(problem, hardware)
        split = replace(TILE, algorithm="local", stream_k=True, two_tiles=False)
        assert floor is not None and predict_ms(problem, split, hardware) > 1e3 * floor


def test_waves_are_counted() -> None:
    """One tile more than the programs can compute at once takes as long as one more tile for each of them."""
    whole, more = (problem_of("matmul", 128 * tiles, 256, 8192, 1) for tiles in (132, 133))
    config = replace(TILE, algorithm="local")
    assert predict_ms(more, config, H200) > 1.8 * predict_ms(whole, config, H200)
    split = replace(config, stream_k=True, two_tiles=False)
    assert predict_ms(more, split, H200) < 0.9 * predict_ms(more, config, H200)
    assert predict_ms(whole, split, H200) == predict_ms(whole, config, H200)


def test_chunks_let_a_gather_by_columns_begin_earlier() -> None:
    problem = problem_of("all_gather_matmul", 8192, 2048, 29568, 4, gather_dim=1)
    times = [predict_ms(problem, replace(TILE, algorithm="copy_engine", num_chunks=count), H200) for count in (1, 2, 4)]
    assert times == sorted(times, reverse=True)


def test_one_copy_at_a_time_uses_one_link_of_seven() -> None:
    problem = problem_of("all_gather_matmul", 8192, 1024, 29568, 8)
    pushed, copied = (predict_ms(problem, replace(TILE, algorithm=one), MI300X) for one in ("push", "copy_engine"))
    assert copied > 2 * pushed
    assert predict_ms(problem, replace(TILE, algorithm="copy_engine"), H200) < predict_ms(
        problem, replace(TILE, algorithm="push"), H200
    )


def test_fetchers_and_senders_count() -> None:
    gather = problem_of("all_gather_matmul", 8192, 1024, 29568, 8)
    few, many = (replace(TILE, algorithm="hbm_buffer", comm_sms=count) for count in (4, 16))
    assert predict_ms(gather, few, H200) > 2 * predict_ms(gather, many, H200)
    first = replace(few, num_fetch_stages=4, first_stage_fetch_sms=32)
    assert predict_ms(gather, many, H200) < predict_ms(gather, first, H200) < predict_ms(gather, few, H200)
    flat = problem_of("all_gather_matmul", 128, 1024, 29568, 8)  # 16 rows of each rank: pieces of an eighth of a tile
    assert predict_ms(flat, few, H200) > predict_ms(gather, few, H200) / 16
    scatter = problem_of("matmul_all_scatter", 8192, 4096, 2048, 8)
    few, many = (replace(one, algorithm="split") for one in (few, many))
    assert predict_ms(scatter, few, H200) > 1.5 * predict_ms(scatter, many, H200)
