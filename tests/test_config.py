"""Configs: picking is pure and gives configs that can run, every field reaches the launch, nonsense is refused."""

from __future__ import annotations

import importlib
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from ops_inputs import ALL_REDUCE, GATHER, LOCAL, SCATTER, SMALL, Way, some, trial, ways
from ranks import BACKEND, Ranks, context, worlds

from iris.errors import ArgumentError
from iris.ops import ALGORITHMS, FusedConfig, Problem, Target, pick, pick_config
from iris.ops.algorithms import EXCHANGING
from iris.ops.candidates import options_of

H200 = Target("cuda", 132, tma=True)
MI300X = Target("hip", 304)
SIMULATED = Target("sim", 4)


def problem(op: str = GATHER, m: int = 8192, n: int = 4096, dtype: torch.dtype = torch.bfloat16) -> Problem:
    return Problem(op, m, n, 8192, dtype, 8, 0 if op == GATHER else None)


@pytest.mark.parametrize("op", ALGORITHMS)
def test_the_pick_is_a_function_of_its_arguments(op: str) -> None:
    picks = []
    for _ in range(2):
        pick.forget()
        picks.append([pick_config(problem(op, m), H200) for m in (64, 8192)])
    assert picks[0] == picks[1]
    assert "atomic" not in {one.algorithm for one in picks[0]}


def test_smaller_problems_get_smaller_tiles() -> None:
    large, small = pick_config(problem(LOCAL), H200), pick_config(problem(LOCAL, m=64, n=256), H200)
    assert large.block_size_m * large.block_size_n > small.block_size_m * small.block_size_n


@pytest.mark.parametrize("target", [H200, MI300X, SIMULATED], ids=lambda target: target.backend)
def test_what_cannot_run_is_not_picked(target: Target) -> None:
    others = tuple(one for one in ALGORITHMS[GATHER] if one != "pull")
    assert pick_config(problem(), replace(target, excluded=others)).algorithm == "pull"


PUSH, HBM_BUFFER, LOW_LATENCY = Way(GATHER, "push"), Way(GATHER, "hbm_buffer", 1), Way(GATHER, "low_latency")
MATMUL, SPLIT, TWO_SHOT = Way(LOCAL, "local"), Way(SCATTER, "split"), Way(ALL_REDUCE, "two_shot")
CHANGES: dict[str, tuple[Way, Any]] = {
    "block_size_m": (MATMUL, 32),
    "block_size_n": (MATMUL, 32),
    "block_size_k": (MATMUL, 16),
    "group_size_m": (MATMUL, 3),
    "num_sms": (MATMUL, 1),
    "num_chunks": (PUSH, 2),
    "stream_k": (MATMUL, True),
    "two_tiles": (MATMUL, True),
    "own_matmul": (LOW_LATENCY, True),
    "num_rounds": (TWO_SHOT, 2),
    "comm_sms": (SPLIT, 2),
    "comm_block_m": (PUSH, 32),
    "comm_block_n": (PUSH, 16),
    "k_per_flag": (HBM_BUFFER, 1),
    "staged_a_layout": (HBM_BUFFER, "m_contiguous"),
    "num_fetch_stages": (HBM_BUFFER, 2),
    "first_stage_fetch_sms": (HBM_BUFFER, 2),
    "num_warps": (MATMUL, 2),
    "num_stages": (MATMUL, 5),
    "waves_per_eu": (MATMUL, 2),
    "matrix_instr_nonkdim": (MATMUL, 32),
    "kpack": (MATMUL, 2),
}
"""Another value for each field, and a way to run an op that uses the field; ``algorithm`` chooses among these."""


def with_value(config: FusedConfig, field: str, value: Any) -> FusedConfig:
    values: dict[str, Any] = {field: value}
    return replace(config, **values)


def numbers(argument: Any) -> Any:
    """An argument of a launch, with ``None`` for everything that is not a number."""
    if isinstance(argument, tuple):
        return tuple(map(numbers, argument))
    return argument if isinstance(argument, int | str) else None


class Recorder:
    """Stands in for a kernel: keeps the arguments that it would have been launched with."""

    def __init__(self) -> None:
        self.launch: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.launch = grid, numbers(arguments), options

        return launch


def launches(way: Way, target: Target, configs: list[FusedConfig]) -> list[Any]:
    """The arguments that the matmul kernel would be launched with on ``target``, for each config; None: it would not
    be launched."""
    ctx = context()
    found: list[Any] = []
    one = trial(ctx, way, (40, 40, 80), torch.float32, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder()
        patch.setattr(importlib.import_module("iris.ops.replay"), "_replays_of", lambda _: None)  # each call launches
        patch.setattr("iris.device.matmul.matmul_kernel", recorder)
        patch.setattr(importlib.import_module("iris.ops.launching"), "target_of", lambda *_: target)
        for config in configs:
            recorder.launch = None
            one.run(config)
            if recorder.launch is None:
                found.append(None)
                continue
            grid, arguments, options = recorder.launch
            found.append((grid, arguments, {name: str(value) for name, value in options.items()}))
    return found


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("field", CHANGES)
def test_every_field_reaches_the_launch(ranks: Ranks, field: str) -> None:
    way, value = CHANGES[field]
    base = replace(SMALL, stream_k=field == "two_tiles", num_sms=4)
    target = replace(MI300X, num_sms=4)
    for before, again, after in ranks.run(launches, way, target, [base, base, with_value(base, field, value)]):
        assert before == again
        assert before != after


def test_no_field_is_left_out() -> None:
    others = {"algorithm", "chunk_growth", "owners_per_matmul"}  # the library's matmul: tests/test_rows.py
    assert {field.name for field in fields(FusedConfig)} == {*CHANGES, *others}
    assert all(getattr(SMALL, field) != value for field, (_, value) in CHANGES.items())


class Noting(FusedConfig):
    """A config that notes which of its fields an op reads in order to run, not to check or to choose."""

    noted: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        if name in FusedConfig.__dataclass_fields__:
            reader = sys._getframe(1).f_code
            of_ops = Path(reader.co_filename).parent.name == "ops" and reader.co_name != "check"
            if of_ops and Path(reader.co_filename).name not in ("obstacles.py", "choice.py"):
                self.noted.add(name)
        return super().__getattribute__(name)


def fields_read(way: Way) -> set[str]:
    """The fields that one rank reads in calls of all kinds."""
    base: dict[str, Any] = {**SMALL.__dict__, "stream_k": True}
    kinds: list[dict[str, Any]] = [{}, {"comm_sms": 1}]
    if way.algorithm in EXCHANGING:
        kinds.append({"own_matmul": True})
    one = trial(context(), way, (20, 20, 40), torch.float32, seed=0)
    Noting.noted.clear()
    for kind in kinds:
        one.run(Noting(**base | kind))
    return set(Noting.noted)


@pytest.mark.skipif(BACKEND != "sim", reason="a replay of a call reads no config")
@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize(("op", "algorithm"), some(sorted({(way.op, way.algorithm) for way in ways()})))
def test_an_algorithm_reads_what_it_is_said_to_have_a_use_for(ranks: Ranks, op: str, algorithm: str) -> None:
    read = set[str]().union(*(ranks.run(fields_read, way)[0] for way in ways(op) if way.algorithm == algorithm))
    read -= {"algorithm"}
    if algorithm not in EXCHANGING:
        read -= {"own_matmul"}  # True is refused there
    amd = {"waves_per_eu", "matrix_instr_nonkdim", "kpack"}
    assert set(options_of(op, algorithm)) == read | amd


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_amd_options_stay_on_amd(ranks: Ranks) -> None:
    for target, there in ((MI300X, True), (replace(H200, tma=False), False)):
        [[(_, _, options)], _] = ranks.run(launches, MATMUL, target, [SMALL])
        assert ("kpack" in options) == there


@pytest.mark.parametrize("field", [field.name for field in fields(FusedConfig) if field.name != "algorithm"])
def test_nonsense_is_refused_by_name(field: str) -> None:
    with pytest.raises(ArgumentError, match=rf"some_op: config\.{field}: expected"):
        with_value(FusedConfig(), field, -1).check("some_op", ("auto",), 132)


def test_waves_per_eu_may_be_0_and_not_less() -> None:
    FusedConfig(waves_per_eu=0).check("some_op", ("auto",), 132)
    with pytest.raises(ArgumentError, match=r"config\.waves_per_eu: expected a positive number or 0, got -1"):
        FusedConfig(waves_per_eu=-1).check("some_op", ("auto",), 132)


def test_fewer_programs_leave_fewer_to_move_data() -> None:
    picked = FusedConfig("push", comm_sms=16, first_stage_fetch_sms=64)
    few = picked.with_fields({"num_sms": 16})
    assert (few.num_sms, few.comm_sms, few.first_stage_fetch_sms) == (16, None, None)
    some = picked.with_fields({"num_sms": 17})
    assert (some.comm_sms, some.first_stage_fetch_sms) == (16, None)
    assert picked.with_fields({"num_sms": 64, "block_size_m": 64}) == replace(picked, num_sms=64, block_size_m=64)
    with pytest.raises(ArgumentError, match=r"comm_sms: expected less than the 16 programs"):
        picked.with_fields({"num_sms": 16, "comm_sms": 16}).check(GATHER, ALGORITHMS[GATHER], 132)
