"""Picking configs: the user's rows, rows that come with Iris, the model; what rules a config out; files of rows."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import BACKEND, Ranks, assert_close, fresh, worlds
from test_model import problem_of

from iris.errors import ArgumentError
from iris.ops import ALGORITHMS, FusedConfig, Problem, Target, choice, pick, pick_config, tuned
from iris.ops.algorithms import EXCHANGING
from iris.ops.candidates import ALGORITHMS as PICKED
from iris.ops.candidates import candidates, variations
from iris.ops.hardware import HARDWARE, Hardware, floor_s
from iris.ops.model import predict_ms
from iris.ops.obstacles import has_no_tile, obstacle
from iris.ops.pick import expected_ms, model_pick, predictions
from iris.ops.problem import DTYPES
from iris.ops.tuned import Row

H200 = Target("cuda", 132, tma=True, hardware="NVIDIA H200")
MI300X = Target("hip", 304, hardware="AMD Instinct MI300X")
UNKNOWN = Target("cuda", 80, hardware="NVIDIA Something")
SIM = Target("sim", 4, hardware="simulated")
TARGETS = [H200, MI300X, UNKNOWN, SIM]
GATHER = problem_of("all_gather_matmul", 8192, 4096, 8192, 8)
ODD = FusedConfig("push", block_size_m=64, block_size_n=64, group_size_m=3)
"""A config that neither a rule nor the model would choose."""


@pytest.fixture(autouse=True)
def _no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """There are neither rows of the user nor rows that come with Iris, unless a test adds some."""
    monkeypatch.setenv("IRIS_TUNED", str(tmp_path / "user.json"))
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    pick.forget()
    yield
    pick.forget()


def row_for(problem: Problem, config: FusedConfig = ODD, target: Target = H200) -> Row:
    return Row(*tuned.row_key(problem, target.hardware), config, 1.0)  # type: ignore[call-arg]


def user_rows(*rows: Row) -> None:
    tuned.write(Path(str(tuned.user_path())), rows)
    pick.forget()


def shipped_rows(*rows: Row) -> None:
    tuned.write(tuned.SHIPPED / "some.json", rows)
    pick.forget()


def test_the_model_knows_of_tf32() -> None:
    """It may be allowed or forbidden between two calls."""
    problem = replace(problem_of("matmul_all_reduce", 2048, 4096, 4096, 8), dtype=torch.float32)
    before = torch.backends.cuda.matmul.allow_tf32
    found = []
    try:
        for allowed in (False, True, False):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            config = pick_config(problem, H200)
            assert config == model_pick(problem, H200)
            found.append((config, predictions(problem, H200, [config])[config]))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    slow, fast, again = found
    assert slow == again and fast[1] < slow[1] / 3
    assert predictions(problem, replace(H200, hardware="AMD Instinct MI355X"), [fast[0]])[fast[0]] > 0  # has none


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.hardware)
def test_users_rows_come_first_then_shipped_ones_then_the_model(target: Target) -> None:
    free = pick_config(GATHER, target)
    assert free == model_pick(GATHER, target) != ODD
    shipped_rows(row_for(GATHER, target=target))
    assert pick_config(GATHER, target) == ODD
    other = replace(ODD, group_size_m=5)
    user_rows(row_for(GATHER, other, target))
    assert pick_config(GATHER, target) == other


def test_a_row_of_just_this_shape_comes_before_the_users_of_another() -> None:
    near, good = replace(GATHER, m=GATHER.m + 512), model_pick(GATHER, H200)
    user_rows(row_for(near, mine := replace(good, group_size_m=5)))
    shipped_rows(row_for(GATHER))
    assert pick_config(near, H200) == pick_config(replace(GATHER, m=GATHER.m + 256), H200) == mine
    assert pick_config(GATHER, H200) == ODD


def test_a_row_counts_for_its_own_kind_of_problem_only() -> None:
    user_rows(row_for(GATHER))
    for other in (
        replace(GATHER, gather_dim=1),
        replace(GATHER, dtype=torch.float32),
        replace(GATHER, world_size=4),
        problem_of("matmul_all_scatter", 8192, 4096, 8192, 8),
    ):
        assert pick_config(other, H200) == model_pick(other, H200)
    assert pick_config(GATHER, replace(H200, hardware="NVIDIA H100 80GB HBM3")) != ODD
    assert pick_config(GATHER, replace(H200, hardware="NVIDIA H200 141GB")) == ODD  # another name of the same


def test_rows_of_bfloat16_count_for_float16_and_the_other_way_round() -> None:
    """If both have a row for the same shape, that of the dtype itself is taken."""
    half = replace(GATHER, dtype=torch.float16)
    shipped_rows(row_for(GATHER))
    assert pick_config(half, H200) == pick_config(GATHER, H200) == ODD
    other = replace(ODD, group_size_m=5)
    shipped_rows(row_for(half, other))
    assert len(tuned.read(tuned.SHIPPED / "some.json")) == 2
    assert pick_config(half, H200) == other and pick_config(GATHER, H200) == ODD
    user_rows(row_for(replace(GATHER, gather_dim=1, dtype=torch.float16)))
    assert pick_config(replace(GATHER, gather_dim=1), H200) == ODD


def test_rows_of_the_simulator_count_nowhere_else() -> None:
    user_rows(row_for(GATHER, target=SIM))
    assert pick_config(GATHER, SIM) == ODD
    assert pick_config(GATHER, H200) == model_pick(GATHER, H200)


def test_a_row_counts_for_shapes_within_a_factor_of_the_square_root_of_two() -> None:
    good = replace(model_pick(GATHER, H200), group_size_m=16)  # the model sees no difference
    user_rows(row_for(GATHER, good))
    for size in ("m", "n", "k"):
        sizes: list[dict[str, Any]] = [{size: getattr(GATHER, size) * 14 // 80 * 8}, {size: 5800}]
        near = [replace(GATHER, **changed) for changed in sizes]
        if size == "n":
            near[1] = replace(GATHER, n=2900)
        for problem in near:
            assert pick_config(problem, H200).group_size_m == 16, (size, problem)
        for far in (getattr(GATHER, size) * 3 // 2, getattr(GATHER, size) * 2 // 24 * 8):
            assert pick_config(replace(GATHER, **{size: far}), H200).group_size_m == 8, (size, far)


def test_a_row_counts_for_a_shape_that_is_as_far_off_in_each_size() -> None:
    problem = problem_of("all_gather_matmul", 8192, 4096, 4096, 8)
    near = replace(problem, m=problem.m * 11 // 8, n=problem.n * 11 // 8, k=problem.k * 11 // 8)
    assert row_for(problem).counts_for(near) and not row_for(problem).counts_for(replace(near, k=problem.k * 12 // 8))


@pytest.mark.parametrize(("untuned_ms", "there"), ((1.04, 8), (1.06, 16), (None, 16)))
def test_a_row_that_gained_little_counts_for_its_own_shape_only(untuned_ms: float | None, there: int) -> None:
    """A few percent are easily lost: a library's matmul can take twice as long for neighbouring numbers of rows."""
    row = row_for(GATHER, replace(model_pick(GATHER, H200), group_size_m=16))
    user_rows(replace(row, untuned_ms=untuned_ms))
    assert pick_config(GATHER, H200).group_size_m == 16
    assert pick_config(replace(GATHER, m=7168), H200).group_size_m == there


def test_whose_matmul_goes_with_an_exchange_is_known_from_any_op_and_number_of_ranks() -> None:
    few, four = (problem_of("all_gather_matmul", 64, 8192, 8192, world) for world in (2, 4))
    own = FusedConfig("low_latency", own_matmul=True, block_size_m=64, num_warps=4)
    assert [pick_config(one, H200).own_matmul for one in (few, four)] == [False, False]
    shipped_rows(row_for(few, own))
    assert pick_config(few, H200) == pick_config(four, H200) == own
    for op in ("matmul_reduce_scatter", "matmul_all_scatter", "matmul_all_reduce"):
        assert pick_config(problem_of(op, 64, 8192, 8192, 4), H200, "low_latency") == own, op
    assert pick_config(replace(four, m=8192), H200) == model_pick(replace(four, m=8192), H200)
    user_rows(row_for(four, replace(own, own_matmul=False)))
    assert pick_config(four, H200).own_matmul is False
    twice = problem_of("matmul_all_reduce", 64, 16384, 4096, 4)
    assert model_pick(twice, H200).algorithm == "low_latency_two_shot"
    shipped_rows(row_for(problem_of("matmul_all_reduce", 64, 16384, 4096, 2), own))
    assert pick_config(twice, H200) == replace(own, algorithm="low_latency_two_shot")
    assert not pick_config(replace(twice, n=12288), H200).own_matmul  # not measured: the library may be faster
    assert pick_config(replace(twice, m=60), H200).own_matmul
    assert not pick_config(replace(twice, m=80), H200).own_matmul  # two rows of tiles


def test_one_shot_of_few_rows_is_taken_for_weights_of_the_measured_size_only() -> None:
    measured = problem_of("matmul_all_reduce", 16, 7168, 8192, 2)
    row = replace(model_pick(measured, H200), group_size_m=4)
    assert row.algorithm == "one_shot" and pick_config(measured, H200) != row
    shipped_rows(row_for(measured, row))
    assert pick_config(measured, H200) == pick_config(replace(measured, m=12), H200) == row
    for other in (
        replace(measured, n=7680),
        replace(measured, k=7680),
        replace(measured, m=17),
        replace(measured, m=8),
    ):
        assert pick_config(other, H200) == model_pick(other, H200) != row
    assert pick_config(replace(measured, m=9), H200) == row  # between powers of two no row is missing


@pytest.mark.parametrize("m", (1, 8, 16, 17, 32, 33, 64))
def test_few_rows_are_summed_by_one_shot_in_a_row_of_tiles(m: int) -> None:
    """This holds without tuned rows, on two ranks; not on eight, where each rank takes the parts of all others."""
    for n, k in ((4608, 18432), (7168, 4096)):
        config = model_pick(problem_of("matmul_all_reduce", m, n, k, 2), H200)
        assert config.algorithm == "one_shot" and m <= config.block_size_m < max(2 * m, 17)
        assert model_pick(problem_of("matmul_all_reduce", m, n, k, 8), H200).algorithm in EXCHANGING


@pytest.mark.parametrize("m", (1, 2, 4))
def test_on_four_ranks_very_few_rows_are_summed_by_one_shot_if_the_weights_are_large(m: int) -> None:
    """So it was measured (4 × H200, 2026-11-29): an exchange would wait for the end of a long matmul."""
    for n, k in ((5120, 6400), (7168, 4096), (7168, 4608), (8192, 7168)):
        assert model_pick(problem_of("matmul_all_reduce", m, n, k, 4), H200).algorithm == "one_shot"
    assert model_pick(problem_of("matmul_all_reduce", m, 8192, 2048, 4), H200).algorithm == "low_latency"


def test_rows_of_few_rows_count_for_the_layout_of_b_they_were_measured_with() -> None:
    measured = problem_of("matmul_all_reduce", 16, 7168, 8192, 2)
    transposed, own = replace(measured, transposed_b=True), FusedConfig("low_latency", own_matmul=True)
    row = replace(model_pick(measured, H200), group_size_m=4)
    for mine, other in ((measured, transposed), (transposed, measured)):
        shipped_rows(row_for(mine, row))
        assert pick_config(mine, H200) == row and pick_config(other, H200).group_size_m == 8
        shipped_rows(row_for(other, own))
        assert pick_config(mine, H200) == row and pick_config(other, H200) == own
        for path in tuned.SHIPPED.iterdir():
            path.unlink()


def test_other_rows_count_for_any_layout_of_b_but_sooner_for_their_own() -> None:
    transposed, other = replace(GATHER, transposed_b=True), replace(ODD, group_size_m=5)
    user_rows(row_for(GATHER))
    assert pick_config(GATHER, H200) == pick_config(transposed, H200) == ODD
    user_rows(row_for(transposed, other))
    assert (pick_config(GATHER, H200), pick_config(transposed, H200)) == (ODD, other)
    assert {row.transposed_b for row in tuned.read(Path(str(tuned.user_path())))} == {False, True}
    ours, theirs = (replace(model_pick(GATHER, H200), group_size_m=rows) for rows in (5, 6))
    user_rows(row_for(GATHER, ours), row_for(transposed, theirs))
    near = [pick_config(replace(problem, m=problem.m + 128), H200) for problem in (GATHER, transposed)]
    assert near == [ours, theirs]


def test_the_nearest_row_is_that_with_the_least_sum_of_squares() -> None:
    rows = [replace(row_for(GATHER), m=int(GATHER.m * 2**0.4)), replace(row_for(GATHER), m=9410, n=4871)]
    near = tuned.TunedRows(rows).near(GATHER, H200.hardware)
    assert near == rows[::-1] and sum(rows[1].distances(GATHER)) > sum(rows[0].distances(GATHER))


def test_a_row_that_does_not_count_hides_no_other() -> None:
    asked, own = problem_of("matmul_all_reduce", 64, 16384, 4096, 4), FusedConfig("low_latency", own_matmul=True)
    shipped_rows(row_for(problem_of("matmul_all_reduce", 60, 16384, 4096, 2), own))
    user_rows(row_for(problem_of("matmul_all_reduce", 64, 16000, 4096, 2), own))  # nearer, but of other weights
    assert pick_config(replace(asked, m=60), H200).own_matmul


def test_whose_matmul_goes_with_an_exchange_is_known_from_one_gpu() -> None:
    asked = problem_of("matmul_all_reduce", 512, 16384, 8192, 4)
    alone = replace(asked, op="matmul", world_size=1)
    local = FusedConfig("local", block_size_n=256, stream_k=True, two_tiles=False)
    row = replace(row_for(alone, local), measured_ms=0.2, library_ms=0.21)
    picked = {name: pick_config(asked, H200, name) for name in ("low_latency", "low_latency_two_shot")}
    shipped_rows(row)
    for name in picked:
        assert pick_config(asked, H200, name) == replace(local, algorithm=name, own_matmul=True)
    few, more, others = replace(asked, m=385), replace(asked, m=384), replace(asked, n=12288)
    for near, own in ((few, True), (more, False), (others, False), (replace(asked, transposed_b=True), False)):
        assert pick_config(near, H200, "low_latency").own_matmul is own, near
    shipped_rows(replace(row, untuned_ms=0.2))  # as fast as what is picked, which is faster than the library's, too
    assert pick_config(few, H200, "low_latency").own_matmul
    for library_ms in (0.205, 0.1, None):
        shipped_rows(replace(row, library_ms=library_ms))
        assert {name: pick_config(asked, H200, name) for name in picked} == picked


def test_no_row_that_comes_with_iris_says_in_vain_whose_matmul_goes_with_an_exchange(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row that gains 3 % counts, although its times are rounded."""
    monkeypatch.setattr(tuned, "SHIPPED", Path(str(tuned.__file__)).parent / "tuned")
    pick.forget()
    rows = [row for path in tuned.SHIPPED.iterdir() for row in tuned.read(path) if row.library_ms is not None]
    assert rows
    for row in rows:
        problem = problem_of("matmul_all_reduce", row.m, row.n, row.k, 16, tuned.DTYPE_NAMES[row.dtype])
        config = pick_config(replace(problem, transposed_b=row.transposed_b), H200, "low_latency")
        assert config == replace(row.config, algorithm="low_latency", own_matmul=True), row


@pytest.mark.parametrize("m", (1, 16, 17, 32))
def test_few_rows_have_flat_tiles(m: int) -> None:
    """With 16 rows a tile of 128 rows takes half as long again as one of 16, and both read as much of B."""
    wide, narrow = (problem_of("matmul", m, n, 8192, 1) for n in (16384, 1024))
    logits = problem_of("matmul_all_scatter", m, 16032, 8192, 8)
    for problem in (wide, narrow, logits):
        assert model_pick(problem, H200, "push" if problem is logits else None).block_size_m < max(2 * m, 32)
    assert model_pick(narrow, H200).stream_k and not model_pick(wide, H200).stream_k


def test_own_matmul_has_a_tile() -> None:
    problem = problem_of("all_gather_matmul", 64, 8192, 8192, 2)
    own = FusedConfig("low_latency", own_matmul=True, block_size_m=64, num_warps=4)
    assert {one.num_stages for one in variations(problem, own, H200)} > {own.num_stages}
    assert obstacle(problem, replace(own, block_size_n=256, num_stages=8), H200) is not None
    assert any(one.own_matmul and one.stream_k for one in candidates(problem, H200, wide=True))
    narrow, wide = (predict_ms(problem, replace(own, block_size_n=n), HARDWARE["H200 SXM"]) for n in (64, 256))
    assert narrow != wide


def test_only_a_measurement_chooses_whose_matmul_it_is() -> None:
    problem = problem_of("all_gather_matmul", 64, 8192, 8192, 2)
    asked = [
        candidates(problem, H200), candidates(problem, H200, algorithm="low_latency"),
        candidates(problem, H200, wide=True),
    ]  # fmt: skip
    assert [any(config.own_matmul for config in found) for found in asked] == [False, False, True]


def test_the_nearest_row_counts() -> None:
    good = model_pick(GATHER, H200)
    rows = [row_for(replace(GATHER, m=m), replace(good, group_size_m=group)) for m, group in ((8192, 3), (10240, 5))]
    user_rows(*rows)
    groups = [pick_config(replace(GATHER, m=m), H200).group_size_m for m in (7000, 8192, 9000, 9400, 10240, 12000)]
    assert groups == [3, 3, 3, 5, 5, 5]


def test_a_row_of_a_neighbour_is_left_if_the_model_sees_it_lose_here() -> None:
    user_rows(row_for(GATHER))
    assert pick_config(GATHER, H200) == ODD
    assert pick_config(replace(GATHER, m=8200), H200) == model_pick(replace(GATHER, m=8200), H200)


def test_a_row_that_cannot_run_here_is_passed_over() -> None:
    reduce = problem_of("matmul_all_reduce", 8192, 4096, 8192, 8)
    copied = replace(model_pick(reduce, H200), algorithm="copy_engine", group_size_m=7)
    user_rows(row_for(reduce, copied))
    assert pick_config(reduce, H200) == copied
    assert pick_config(replace(reduce, m=8191), H200).algorithm != "copy_engine"  # rows that 8 ranks cannot share
    assert pick_config(reduce, replace(H200, excluded=("copy_engine",))).algorithm != "copy_engine"


def test_algorithms_that_cannot_run_are_not_picked() -> None:
    for op, names in PICKED.items():
        problem = problem_of(op, 4096, 4096, 4096, 4)
        left = list(names)
        for target in TARGETS:
            while len(left) > 1:
                name = pick_config(problem, replace(target, excluded=tuple(set(names) - set(left)))).algorithm
                assert name in left
                left.remove(name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("m", [1, 100, 16384])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.hardware)
@pytest.mark.parametrize("op", ALGORITHMS)
def test_every_pick_can_run(op: str, target: Target, m: int, dtype: torch.dtype) -> None:
    for world_size in (1, 3, 8):
        problem = problem_of(op, m * world_size, 1000, 2048, world_size, dtype)
        config = pick_config(problem, target)
        config.check(op, ALGORITHMS[op], target.num_sms)
        assert obstacle(problem, config, target) is None


def test_what_is_picked_is_deterministic_and_runs_by_itself() -> None:
    assert all("atomic" not in names for names in PICKED.values())
    assert all(set(names) <= set(ALGORITHMS[op]) for op, names in PICKED.items())


@pytest.mark.parametrize("op", ALGORITHMS)
def test_nothing_that_can_run_is_predicted_to_be_much_faster_than_the_pick(op: str) -> None:
    problem = problem_of(op, 8192, 4096, 4096, 8)
    times = predictions(problem, H200, candidates(problem, H200))
    assert min(times.values()) > 0
    assert times[model_pick(problem, H200)] <= 1.02 * 1.05 * min(times.values())
    config = model_pick(problem, H200)
    assert times[config] == pytest.approx(predict_ms(problem, config, HARDWARE["H200 SXM"]) / 1e3)


@pytest.mark.parametrize("known", HARDWARE.values(), ids=lambda known: known.name)
def test_other_hardware_is_expected_to_take_its_own_time(known: Hardware) -> None:
    floor = floor_s(GATHER, known)
    assert floor is not None
    assert 0.9e3 * floor < expected_ms(GATHER, known) < 4e3 * floor


def test_large_gathers_leave_the_copies_to_the_copy_engine_and_small_ones_use_inboxes() -> None:
    assert pick_config(GATHER, H200).algorithm in ("copy_engine", "decomposed")
    assert pick_config(problem_of("all_gather_matmul", 16, 1024, 8192, 8), H200).algorithm == "low_latency"
    # One copy at a time would use one of an MI300X's seven links.
    assert pick_config(GATHER, MI300X).algorithm not in ("copy_engine", "decomposed")
    assert (
        pick_config(
            GATHER,
            replace(H200, excluded=("copy_engine", "push", "hbm_buffer", "decomposed", "low_latency", "baseline")),
        ).algorithm
        == "pull"
    )


def test_a_tile_more_than_a_wave_is_split() -> None:
    assert pick_config(problem_of("matmul", 133 * 128, 256, 8192, 1), H200).stream_k
    assert not pick_config(problem_of("matmul", 132 * 128, 256, 8192, 1), H200).stream_k


def test_simulated_tiles_are_small_and_algorithms_quick() -> None:
    for op in ALGORITHMS:
        config = pick_config(problem_of(op, 256, 192, 128, 2), SIM)
        assert config.tile_elements == 64 * 64
        assert config.algorithm in ("local", "push", "two_shot")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.hardware)
def test_what_is_picked_where_algorithms_are_excluded_can_run(target: Target) -> None:
    """Rows that three ranks cannot share evenly rule out one more algorithm."""
    problem, excluded = problem_of("matmul_all_reduce", 100, 64, 96, 3), list[str]()
    while len(excluded) < len(PICKED[problem.op]) - 1:  # copy_engine must be left out
        left = replace(target, excluded=tuple(excluded))
        picked = pick_config(problem, left)
        assert obstacle(problem, picked, left) is None
        excluded.append(picked.algorithm)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.hardware)
def test_a_named_algorithm_is_picked_even_if_excluded(target: Target) -> None:
    """The op then reports why it cannot run."""
    for op, algorithms in ALGORITHMS.items():
        excluding = replace(target, excluded=algorithms)
        assert pick_config(problem_of(op, 64, 64, 64, 2), excluding, algorithms[-1]).algorithm == algorithms[-1]


def test_a_search_that_ended_early_counts_behind_a_finished_one_of_just_this_shape() -> None:
    users, ours = replace(ODD, group_size_m=5), replace(row_for(GATHER), measured_ms=1.0)
    tuned.write(Path(os.environ["IRIS_TUNED"]), [replace(ours, config=users, unfinished=True)])
    shipped_rows(ours)
    assert pick_config(GATHER, H200) == ODD
    shipped_rows(replace(ours, m=ours.m + 128))
    assert pick_config(GATHER, H200) == ODD
    tuned.write(Path(os.environ["IRIS_TUNED"]), [replace(ours, config=users)])
    pick.forget()
    assert pick_config(GATHER, H200) == users


def test_a_search_that_ended_early_does_not_count_near_a_shape_that_a_finished_one_was_of() -> None:
    near, good = replace(GATHER, m=GATHER.m + 128), replace(model_pick(GATHER, H200), group_size_m=6)
    early, ours = replace(good, group_size_m=5), row_for(GATHER, good)
    user_rows(replace(ours, config=early, unfinished=True))
    assert pick_config(near, H200) == early
    shipped_rows(ours)
    assert pick_config(near, H200) == good
    other = next(name for name in ALGORITHMS[GATHER.op] if name != good.algorithm)
    shipped_rows(replace(ours, config=FusedConfig(other)))  # says nothing of this algorithm
    assert pick_config(GATHER, H200, good.algorithm) == early


def test_a_search_that_ended_early_counts_before_a_finished_one_of_a_shape_near() -> None:
    early = replace(ODD, group_size_m=5)
    user_rows(replace(row_for(GATHER, early), unfinished=True))
    near, good = replace(GATHER, m=GATHER.m + 128), replace(model_pick(GATHER, H200), group_size_m=6)
    shipped_rows(row_for(near, good))
    assert (pick_config(GATHER, H200), pick_config(near, H200)) == (early, good)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_part_of_a_gpu_has_its_share_of_the_rates(dtype: torch.dtype) -> None:
    whole, half = pick.figures(H200), pick.figures(replace(H200, num_sms=66))
    assert whole is not None and half is not None and (whole.num_sms, half.num_sms) == (132, 66)
    rate = whole.matmul_flops(dtype)
    assert rate is not None and half.matmul_flops(dtype) == pytest.approx(rate / 2)


def test_an_op_or_algorithm_that_is_none_is_an_error() -> None:
    target, problem = Target("cuda", 132), problem_of("matmul_all_reduce", 64, 64, 64, 2)
    with pytest.raises(ArgumentError, match=r"pick_config: algorithm: expected None, or one of .*ring.*, got 'rign'"):
        pick_config(problem, target, "rign")
    with pytest.raises(ArgumentError, match=r"pick_config: problem.op: expected one of matmul, .*, got 'mm'"):
        pick_config(replace(problem, op="mm"), target)
    with pytest.raises(ArgumentError, match=r"pick_config: target: expected an iris\.ops\.Target, got None"):
        pick_config(problem, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["cuda", "hip", "sim"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_cannot_be_picked_for_is_an_error(backend: str, world_size: int) -> None:
    target, problem = Target(backend, 132), problem_of("matmul_all_reduce", 64, 64, 64, world_size)
    with pytest.raises(ArgumentError, match=r"pick_config: problem.dtype: expected one of .*, got torch.float64"):
        pick_config(replace(problem, dtype=torch.float64), target)
    with pytest.raises(ArgumentError, match=r"pick_config: target.backend: expected one of cuda, .*, got 'rocm'"):
        pick_config(problem, replace(target, backend="rocm"))
    odd: list[dict[str, Any]] = [{"num_sms": 0}, {"num_sms": "132"}, {"shared_nbytes": 1.5}, {"excluded": ["push"]}]
    for wrong in [*odd, {"excluded": (1,)}, {"hardware": None}]:
        with pytest.raises(ArgumentError, match=f"pick_config: target.{min(wrong)}: expected a"):
            pick_config(problem, replace(target, **wrong))
    nothing: list[dict[str, Any]] = [{"m": 0}, {"n": 0}, {"k": 0}, {"world_size": 0}]
    for empty in nothing:
        with pytest.raises(ArgumentError, match=f"problem.{min(empty)}: expected a whole number, at least 1, got 0"):
            pick_config(replace(problem, **empty), target)
    with pytest.raises(ArgumentError, match=r"problem\.n: expected a whole number, at least 1, got nan"):
        pick_config(replace(problem, n=math.nan), target)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"problem\.m: expected at most 1073741824, got 1073741825"):
        pick_config(replace(problem, m=(1 << 30) + 1), target)
    with pytest.raises(ArgumentError, match=r"problem\.gather_dim: expected None, as nothing is gathered, got 0"):
        pick_config(replace(problem, gather_dim=0), target)
    with pytest.raises(ArgumentError, match=r"problem\.gather_dim: expected 0 or 1, got None"):
        pick_config(replace(problem, op=GATHER.op), target)
    with pytest.raises(ArgumentError, match=r"problem\.world_size: expected at most 16, got 32"):
        pick_config(replace(problem, world_size=32), target)
    for op, shared, gather_dim in ((GATHER.op, "m", 0), (GATHER.op, "k", 1), ("matmul_reduce_scatter", "m", None)):
        sizes: dict[str, Any] = {shared: 4}
        ragged = replace(problem, op=op, world_size=8, gather_dim=gather_dim, **sizes)
        with pytest.raises(ArgumentError, match=f"problem.{shared}: expected a multiple of the 8 ranks, got 4"):
            pick_config(ragged, target)
    with pytest.raises(ArgumentError, match=r"target.excluded: expected an algorithm left that can run, got .*ring"):
        pick_config(problem, replace(target, excluded=ALGORITHMS["matmul_all_reduce"]))


def test_a_pick_is_quick() -> None:
    taken = []
    for m in range(4096, 4106):
        for op in ALGORITHMS:
            problem = problem_of(op, 8 * m, 4096, 4096, 8)
            started = time.thread_time()
            pick_config(problem, H200)
            first = time.thread_time()
            pick_config(problem, H200)
            taken.append((first - started, time.thread_time() - first))
    # It takes 1 to 3 ms, and 2 us; the limits leave room for slow machines.
    assert statistics.median(first for first, _ in taken) < 50e-3
    assert statistics.median(again for _, again in taken) < 100e-6


PLAIN = FusedConfig("push", block_size_n=256)
REFUSED: list[tuple[str, dict[str, Any], Target, str]] = [
    ("algorithm", {"algorithm": "none"}, H200, "has no algorithm none"),
    ("excluded", {}, replace(H200, excluded=("push",)), "push is excluded"),
    ("block_size_m", {"block_size_m": 256}, H200, "256 sums per thread"),
    ("block_size_n", {"block_size_n": 512}, H200, "bytes of shared memory"),
    ("block_size_k", {"block_size_k": 128}, H200, "294912 bytes|295168 bytes of shared memory: 232448 at most"),
    ("num_stages", {"num_stages": 5}, H200, "bytes of shared memory"),
    ("num_warps", {"num_warps": 4}, H200, "256 sums per thread: 128 at most"),
    ("num_sms", {"num_sms": 133}, H200, "133 programs on 132 SMs"),
    ("comm_sms", {"algorithm": "hbm_buffer", "comm_sms": 132}, H200, "132 of 132 programs would only move data"),
    ("few_sms", {"algorithm": "hbm_buffer", "num_sms": 1}, H200, "1 of 1 programs would only move data"),
    ("first", {"first_stage_fetch_sms": 133}, H200, "133 programs to move the first stage, of 132"),
    ("num_chunks", {"num_chunks": 65}, H200, "65 chunks: 64 at most"),
    ("amd stages", {"num_stages": 3}, MI300X, "bytes of shared memory: 65536 at most"),
    ("amd tile", {"block_size_m": 512, "block_size_n": 512, "block_size_k": 16}, MI300X, "sums per thread"),
    ("amd warps", {"num_warps": 32}, MI300X, "32 warps: 16 at most"),
]


@pytest.mark.parametrize(("changes", "target", "why"), [one[1:] for one in REFUSED], ids=[one[0] for one in REFUSED])
def test_what_cannot_run_is_ruled_out(changes: dict[str, Any], target: Target, why: str) -> None:
    assert obstacle(GATHER, PLAIN, H200) is None
    assert obstacle(GATHER, replace(PLAIN, num_stages=2), MI300X) is None
    config = replace(PLAIN, **({"num_stages": 2} if target is MI300X else {}) | changes)
    reason = obstacle(GATHER, config, target)
    assert reason is not None
    assert any(part in reason for part in why.split("|"))


@pytest.mark.parametrize("shared_nbytes", [163 << 10, 99 << 10, 48 << 10], ids=["A100", "RTX 4090", "48 KiB"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ALGORITHMS)
def test_gpus_with_less_shared_memory(op: str, dtype: torch.dtype, shared_nbytes: int) -> None:
    target = replace(UNKNOWN, shared_nbytes=shared_nbytes)
    problem = problem_of(op, 4096, 4096, 4096, 1 if op == "matmul" else 4, dtype)
    found = list(candidates(problem, target))
    assert pick_config(problem, target) in found
    for config in found:
        needed = config.num_stages * (config.block_size_m + config.block_size_n) * config.block_size_k * dtype.itemsize
        assert needed < shared_nbytes or has_no_tile(config)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_runs_by_its_name_alone_fits_into_less_shared_memory(world_size: int, dtype: torch.dtype) -> None:
    """This is a relay that passes nothing on, which "auto" does not take."""
    target = replace(UNKNOWN, shared_nbytes=99 << 10)
    problem = problem_of("matmul_all_scatter", 4096, 4096, 4096, world_size, dtype)
    taken = pick_config(problem, target, "relay")
    assert taken.num_stages * (taken.block_size_m + taken.block_size_n) * taken.block_size_k * dtype.itemsize < 99 << 10


def test_a_wave_has_64_threads_that_keep_sums() -> None:
    """With 256 x 256 sums, each thread of 8 AMD waves keeps 128 of them, and each of 8 warps 256."""
    large = FusedConfig("push", 256, 256, 32, num_warps=8, num_stages=2)
    assert obstacle(GATHER, large, MI300X) is None
    assert "256 sums per thread" in str(obstacle(GATHER, large, H200))


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_words_that_threads_exchange_fit_into_shared_memory(algorithm: str) -> None:
    """A quarter of a tile's words is there at a time: 8 bytes for each int32."""
    half, whole = (FusedConfig(algorithm, 256, n, 32, num_warps=16, num_stages=2) for n in (128, 256))
    problem = problem_of("matmul_all_reduce", 256, 256, 4096, 2, torch.int8)
    assert obstacle(problem, half, MI300X) is None
    assert obstacle(problem, whole, MI300X) == "131072 bytes of shared memory: 65536 at most"
    assert obstacle(replace(problem, dtype=torch.bfloat16), whole, MI300X) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("m", [512, 8192])
def test_sums_that_are_added_by_atomics_fit_into_shared_memory(m: int, op: str, dtype: torch.dtype) -> None:
    taken = pick_config(problem_of(op, m, 8192, 29568, 8, dtype), MI300X, "atomic")
    assert 4 * taken.tile_elements <= 64 << 10


def test_rules_of_single_ops() -> None:
    reduce = problem_of("matmul_all_reduce", 8190, 4096, 4096, 8)
    assert "cannot be shared evenly" in str(obstacle(reduce, replace(PLAIN, algorithm="copy_engine"), H200))
    assert obstacle(reduce, replace(PLAIN, algorithm="two_shot"), H200) is None
    short = problem_of("all_gather_matmul", 256, 256, 256, 2)
    two = replace(PLAIN, algorithm="decomposed", owners_per_matmul=2)
    assert obstacle(reduce, two, H200) is None
    gather, scatter = (problem_of(op, 4096, 4096, 4096, 8) for op in ("all_gather_matmul", "matmul_reduce_scatter"))
    for one in (gather, scatter):
        assert obstacle(one, two, H200) is None
        assert "2 of 8 ranks in 2 chunks" in str(obstacle(one, replace(two, num_chunks=2), H200))
    assert obstacle(reduce, replace(two, num_chunks=2, owners_per_matmul=8), H200) is None
    assert "9 of 8 ranks in 2 chunks" in str(obstacle(reduce, replace(two, num_chunks=2, owners_per_matmul=9), H200))
    columns = replace(gather, gather_dim=1)
    for chunks, owners in itertools.product((1, 2), (1, 2, 7, 8, 9)):
        config = replace(two, num_chunks=chunks, owners_per_matmul=owners)
        assert (obstacle(columns, config, H200) is None) == (owners in ((1, 8) if chunks > 1 else (1, 2, 7, 8)))
        assert (obstacle(replace(columns, dtype=torch.int8), config, H200) is None) == (owners == 1)
    assert "8 of 8 ranks in 1 chunks" in str(obstacle(reduce, replace(two, owners_per_matmul=8), H200))
    assert "3 chunks of 2 block rows" in str(obstacle(short, replace(PLAIN, num_chunks=3), H200))
    assert obstacle(replace(short, m=257), replace(PLAIN, num_chunks=3), H200) is None
    rounds = replace(PLAIN, num_rounds=2)
    for one in (short, replace(gather, gather_dim=1)):
        assert "2 rounds, where no two other ranks' rows take turns" in str(obstacle(one, rounds, H200))
    assert obstacle(replace(short, world_size=3), rounds, H200) is None
    relay = replace(PLAIN, algorithm="relay")
    assert "takes 3 ranks" in str(obstacle(problem_of("matmul_all_scatter", 4096, 4096, 4096, 2), relay, H200))
    assert obstacle(problem_of("matmul_all_scatter", 4096, 4096, 4096, 3), relay, H200) is None


def test_what_is_as_large_as_it_can_be_is_not_ruled_out() -> None:
    """Compiled for sm_90 by Triton 3.6.0 and 3.9.0, the kernel takes the bytes of all stages, and up to 64 more."""
    for m, n, k, warps, stages in (
        (128, 256, 64, 8, 4),
        (128, 128, 128, 8, 3),
        (64, 128, 128, 4, 4),
        (64, 256, 64, 4, 4),
    ):
        config = FusedConfig("push", m, n, k, num_warps=warps, num_stages=stages)
        assert obstacle(GATHER, config, H200) is None


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.hardware)
@pytest.mark.parametrize("op", ALGORITHMS)
def test_candidates_can_run_and_differ(op: str, target: Target) -> None:
    problem = problem_of(op, 4096, 4096, 4096, 4)
    few, many = list(candidates(problem, target)), list(candidates(problem, target, wide=True))
    for found in (few, many):
        assert len(found) == len(set(found)) > 0
        assert all(obstacle(problem, config, target) is None for config in found)
    assert set(few) <= set(many)
    varied = [one for config in many[:5] for one in variations(problem, config, target)]
    assert all(obstacle(problem, config, target) is None for config in varied)
    for config in many[:5]:
        for changed in variations(problem, config, target):
            names = {one.name for one in fields(config) if getattr(config, one.name) != getattr(changed, one.name)}
            assert len(names - {"two_tiles"}) == 1 or names == {"two_tiles"}


def test_what_counts_with_stream_k_only_goes_with_it() -> None:
    problem = problem_of("matmul_all_scatter", 4096, 4096, 4096, 4)
    varied = list(variations(problem, FusedConfig("push", stream_k=True, two_tiles=True), H200))
    assert {one.stream_k for one in varied} == {True, False}
    assert all(one.stream_k or not one.two_tiles for one in varied)


def test_fetch_stages_vary_only_where_the_first_has_programs_of_its_own() -> None:
    problem = problem_of("all_gather_matmul", 16384, 3584, 8192, 8)
    for first, counts in ((None, {4}), (32, {2, 4, 8})):
        config = FusedConfig("hbm_buffer", comm_sms=12, num_fetch_stages=4, first_stage_fetch_sms=first)
        assert {one.num_fetch_stages for one in variations(problem, config, H200)} == counts


def test_what_only_programs_that_send_use_varies_with_them_alone() -> None:
    problem = problem_of("all_gather_matmul", 1024, 3584, 8192, 8)
    for senders, varied in ((None, {"num_chunks"}), (16, {"comm_sms", "k_per_flag"})):
        config = FusedConfig("push", comm_sms=senders)
        changed = {
            field.name
            for one in variations(problem, config, H200)
            for field in fields(config)
            if getattr(one, field.name) != getattr(config, field.name)
        }
        assert changed & {"num_chunks", "comm_sms", "k_per_flag"} == varied


@pytest.mark.parametrize("gather_dim", [0, 1])
def test_few_programs_send_where_many_ranks_gather_some_rows(gather_dim: int) -> None:
    """They do with 1024 to 2048 rows on 8 ranks; on 2, where the library's matmul in chunks is as good, no program only
    sends."""
    for m, n, k in ((1024, 28672, 8192), (1024, 10240, 8192), (2048, 10240, 8192), (2048, 6144, 4096)):
        for world_size in (2, 8):
            config = model_pick(
                problem_of("all_gather_matmul", m, n // world_size, k, world_size, gather_dim=gather_dim), H200
            )
            assert (config.algorithm == "push" and config.comm_sms is not None) == (world_size == 8), (m, n, k)


@pytest.mark.parametrize(("n", "k", "chunked"), [(28672, 8192, True), (8192, 29568, False)])
def test_large_sums_of_a_short_k_travel_in_chunks(n: int, k: int, chunked: bool) -> None:
    config = model_pick(problem_of("matmul_reduce_scatter", 16384, n, k // 8, 8), H200)
    assert config.algorithm in ("decomposed", "ring") and (config.num_chunks > 1) == chunked


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.json"
    config = replace(ODD, comm_sms=16, stream_k=True, staged_a_layout="m_contiguous", chunk_growth=2)
    row = replace(row_for(GATHER, config), predicted_ms=1.25, untuned_ms=2.5, versions={"iris": "1"}, date="2026-11-21")
    row = replace(row, emulated=True)
    assert tuned.read(path) == []
    tuned.write(path, [row])
    assert tuned.read(path) == [row]
    other = row_for(replace(GATHER, m=64))
    tuned.write(path, [other])
    tuned.write(path, [replace(row, measured_ms=0.5)])
    assert sorted(tuned.read(path), key=lambda one: one.m) == [other, replace(row, measured_ms=0.5)]
    assert [one.name for one in path.parent.iterdir()] == ["rows.json"]


def test_an_unfinished_row_replaces_no_finished_one(tmp_path: Path) -> None:
    path, finished = tmp_path / "rows.json", row_for(GATHER)
    unfinished = replace(finished, measured_ms=0.5, unfinished=True)
    tuned.write(path, [slower := replace(unfinished, measured_ms=2.0)])
    tuned.write(path, [unfinished])
    tuned.write(path, [slower])
    assert tuned.read(path) == [unfinished], "a longer search had found a faster one"
    tuned.write(path, [other := replace(slower, versions={"triton": "99"})])
    assert tuned.read(path) == [other]
    tuned.write(path, [finished])
    tuned.write(path, [unfinished])
    assert tuned.read(path) == [finished]


def test_only_what_differs_from_the_defaults_is_kept(tmp_path: Path) -> None:
    tuned.write(tmp_path / "rows.json", [row_for(GATHER, FusedConfig("push", group_size_m=4))])
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["config"] == {"algorithm": "push", "group_size_m": 4}


def test_no_file_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("IRIS_TUNED")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuned.user_path() == tmp_path / ".cache" / "iris" / "tuned.json"
    monkeypatch.setenv("IRIS_TUNED", "/dev/null")
    assert tuned.user_path() is None
    assert pick_config(GATHER, H200) == model_pick(GATHER, H200)


def broken(change: Callable[[dict[str, Any]], object]) -> str:
    content = {"schema": 1, "rows": [row_for(GATHER).as_json(), row_for(replace(GATHER, m=64)).as_json()]}
    change(content)
    return json.dumps(content)


COUNT = f"a positive whole number, at most {sys.maxsize}"
BROKEN: list[tuple[str, str, str]] = [
    ("cut", '{"schema": 1, "rows": [', "JSON"),
    ("nested", "[" * 100_000, "JSON"),
    ("list", "[]", 'an object with "schema": 1 and a list "rows"'),
    ("schema", broken(lambda all: all.update(schema=2)), 'an object with "schema": 1'),
    ("rows", broken(lambda all: all.update(rows={})), 'a list "rows"'),
    ("row", broken(lambda all: all["rows"].append(3)), "row 3: expected an object, got 3"),
    ("missing", broken(lambda all: all["rows"][1].pop("m")), f"row 2, m: expected {COUNT}, got nothing"),
    ("size", broken(lambda all: all["rows"][1].update(k=0)), f"row 2, k: expected {COUNT}, got 0"),
    ("huge", broken(lambda all: all["rows"][1].update(m=10**400)), f"row 2, m: expected {COUNT}, got 1000"),
    ("bool", broken(lambda all: all["rows"][0].update(n=True)), f"row 1, n: expected {COUNT}, got True"),
    ("op", broken(lambda all: all["rows"][0].update(op="add")), "row 1, op: expected an op with algorithms, got 'add'"),
    ("dtype", broken(lambda all: all["rows"][0].update(dtype="fp4")), "row 1, dtype: expected one of fp16"),
    ("dim", broken(lambda all: all["rows"][0].update(gather_dim=2)), "row 1, gather_dim: expected 0, 1 or null, got 2"),
    (
        "time",
        broken(lambda all: all["rows"][0].update(measured_ms="1")),
        "row 1, measured_ms: expected a positive number",
    ),
    (
        "eternity",
        broken(lambda all: all["rows"][0].update(untuned_ms=10**400)),
        "row 1, untuned_ms: expected a positive number or null",
    ),
    ("more", broken(lambda all: all["rows"][0].update(colour="red")), "row 1, colour: expected no other fields than"),
    (
        "algorithm",
        broken(lambda all: all["rows"][0]["config"].update(algorithm="x")),
        "row 1, config, algorithm: expected one of",
    ),
    ("field", broken(lambda all: all["rows"][0]["config"].update(size=1)), "row 1, config, size: expected one of"),
    ("type", broken(lambda all: all["rows"][0]["config"].update(stream_k=1)), "config, stream_k: expected bool, got 1"),
    (
        "value",
        broken(lambda all: all["rows"][0]["config"].update(block_size_m=17)),
        "block_size_m: expected a power of two",
    ),
    (
        "sms",
        broken(lambda all: all["rows"][0]["config"].update(comm_sms="x")),
        "comm_sms: expected int or null, got 'x'",
    ),
    (
        "depth",
        broken(lambda all: all["rows"][1].update(dtype="int8", config={"algorithm": "push", "block_size_k": 16})),
        "row 2, config, block_size_k: expected at least 32 for torch.int8, as tl.dot needs, got 16. Have IRIS_",
    ),
    (
        "library",
        broken(lambda all: all["rows"][0].update(library_ms=2.0)),
        "row 1, library_ms: expected a time in rows of matmul only, got 2.0",
    ),
]


@pytest.mark.parametrize(("text", "words"), [one[1:] for one in BROKEN], ids=[one[0] for one in BROKEN])
def test_a_broken_file_is_an_error_that_names_it(text: str, words: str) -> None:
    path = Path(str(tuned.user_path()))
    path.write_text(text)
    with pytest.raises(ArgumentError) as caught:
        pick_config(GATHER, H200)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("name", "what"), [("", "a folder"), ("pipe", "a pipe or device"), ("/dev/zero", "a pipe or device")]
)
def test_what_is_no_file_is_not_read_and_an_error_that_says_to_name_one(
    name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("IRIS_TUNED", str(tmp_path / name))
    monkeypatch.setattr(Path, "read_bytes", None)
    with pytest.raises(ArgumentError, match=rf"expected a file, got {what}\. Have IRIS_TUNED name a file\.$"):
        pick_config(GATHER, H200)


def test_a_broken_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("[")
    with pytest.raises(ArgumentError, match=r"rows\.json: expected JSON"):
        tuned.write(path, [row_for(GATHER)])
    assert path.read_text() == "["


def test_a_link_to_rows_stays_one_and_their_file_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    path, link = tmp_path / "shared" / "rows.json", tmp_path / "link.json"
    tuned.write(path, [row_for(GATHER)])
    path.chmod(0o664)
    link.symlink_to(path)
    tuned.write(link, [row_for(replace(GATHER, m=64))])
    assert link.is_symlink() and len(tuned.read(path)) == 2
    assert path.stat().st_mode & 0o777 == 0o664 and list(path.parent.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"file/rows\.json: expected a file that can be (read|written)"):
        tuned.write(tmp_path / "file" / "rows.json", [row_for(GATHER)])


def test_shipped_rows_are_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pick.forget()
    monkeypatch.setenv("IRIS_TUNED", "/nonexistent")
    rows = [row for path in sorted(tuned.SHIPPED.glob("*.json")) for row in tuned.read(path)]
    assert {row.hardware for row in rows} == {"H100 SXM", "H200 SXM"}
    assert len({row.key for row in rows}) == len(rows) > 0
    for row in rows:
        target = replace(H200, hardware=f"NVIDIA {row.hardware.removesuffix(' SXM')}")
        dtype = tuned.DTYPE_NAMES[row.dtype]
        problem = problem_of(row.op, row.m, row.n, row.k, row.world_size, dtype, row.gather_dim)
        problem = replace(problem, transposed_b=row.transposed_b)
        assert obstacle(problem, row.config, target) is None
        assert any(row.config.algorithm == one.algorithm for one in candidates(problem, target, wide=True))
        assert row.date and row.versions
        assert pick_config(problem, target) == row.config


def algorithms_run(path: str) -> list[set[str]]:
    """The algorithms of a gather without a config, without the user's rows and with those in ``path``."""
    found = []
    for file in ("/nonexistent", path):
        os.environ["IRIS_TUNED"] = file
        pick.forget()
        with fresh() as ctx:
            a, b = ctx.randn(32, 64), torch.randn(64, 32, device=ctx.device)
            output = torch.empty(32 * ctx.world_size, 32, device=ctx.device)
            ctx.ops.all_gather_matmul(output, a, b)
            ctx.synchronize()
            whole = torch.cat([ctx.broadcast(a, rank) for rank in range(ctx.world_size)])
            assert_close(output, whole @ b, rtol=1e-4, atol=1e-4)
            keys: list[Any] = list(ctx._workspaces)
            found.append({key[1] for key in keys if key[0] == "all_gather_matmul"})
    del os.environ["IRIS_TUNED"]
    pick.forget()
    return found


def warned_of(file: str) -> list[str]:
    """The warnings of a context in three calls while ``IRIS_TUNED`` names ``file``: one with a config, two without."""
    said = mock.Mock()
    with mock.patch.dict("os.environ", IRIS_TUNED=file), fresh() as ctx, mock.patch.object(ctx, "warning", said):
        output, a, b = ctx.zeros(16, 16), torch.ones(16, 16, device=ctx.device), torch.ones(16, 16, device=ctx.device)
        found = []
        for config in (FusedConfig("one_shot", 16, 16, 16), None, "ring"):
            ctx.ops.matmul_all_reduce(output, a, b, config=config)
            found.append(said.call_count)
        ctx.synchronize()
    return [f"{found}", *(call.args[0] for call in said.call_args_list)]


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_file_of_rows_that_is_not_there_is_told_once(ranks: Ranks, tmp_path: Path) -> None:
    missing, there = tmp_path / "missing.json", tmp_path / "there.json"
    tuned.write(there, [])
    first, *others = ranks.run(warned_of, str(missing))
    said = (
        f"IRIS_TUNED: there is no file {missing}, so no rows of yours are used. Name the one that iris tune has written"
    )
    assert first[0] == "[0, 1, 1]" and len(first) == 2 and first[1].startswith(said)
    for silent in (*others, *ranks.run(warned_of, str(there)), *ranks.run(warned_of, "/dev/null")):
        assert silent == ["[0, 0, 0]"]


@pytest.mark.skipif(BACKEND != "sim", reason="the row is for the simulator")
@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_an_op_without_a_config_takes_the_row(ranks: Ranks, tmp_path: Path) -> None:
    problem = problem_of("all_gather_matmul", 64, 32, 64, 2, torch.float32)
    tuned.write(tmp_path / "rows.json", [row_for(problem, replace(ODD, algorithm="pull"), SIM)])
    assert ranks.run(algorithms_run, str(tmp_path / "rows.json")) == [[{"push"}, {"pull"}]] * 2


@pytest.mark.parametrize("op", [op for op in ALGORITHMS if op != "matmul"])
def test_a_named_algorithm_gets_its_own_best_options(op: str) -> None:
    problem = problem_of(op, 8192, 4096, 7392, 4)
    for name in ALGORITHMS[op]:
        config = pick_config(problem, H200, name)
        assert config.algorithm == name and obstacle(problem, config, H200) is None
        rivals = predictions(problem, H200, candidates(problem, H200, algorithm=name))
        assert predictions(problem, H200, [config])[config] <= 1.2 * min(rivals.values())


def test_options_that_are_given_replace_those_of_the_best_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """If they do not fit the best config, as too many stages do not fit a large tile, they apply to the plain one."""
    problem = Problem("all_gather_matmul", 16384, 3584, 8192, torch.bfloat16, 8, 1)
    monkeypatch.setattr(choice, "target_of", lambda ctx: H200)
    ctx: Any = SimpleNamespace(num_sms=132)

    def chosen(**options: int | str) -> FusedConfig:
        wanted = choice.Adjusted("hbm_buffer", tuple(options.items()))
        return choice._adjusted(ctx, problem, wanted)

    best = pick_config(problem, H200, "hbm_buffer")
    assert chosen() == best and (best.block_size_m, best.block_size_n) == (128, 256)
    assert chosen(k_per_flag=3, staged_a_layout="m_contiguous") == replace(
        best, k_per_flag=3, staged_a_layout="m_contiguous"
    )
    assert chosen(num_stages=6) == FusedConfig("hbm_buffer", num_stages=6)
    with pytest.raises(ArgumentError, match=r"config\.comm_sms"):
        chosen(comm_sms=132)
