"""The tuner: what it tries next, what it keeps, and that runs that end early, or fail, lose nothing."""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from ranks import BACKEND, Ranks, context, worlds
from test_model import problem_of

from iris import cli
from iris.bench.cases.operands import Operands
from iris.console import STOPPED
from iris.device import matmul as kernels
from iris.engine import CopyEngine
from iris.errors import ArgumentError, LaunchError, PeerDied
from iris.ops import ALGORITHMS, FusedConfig, Target, pick, pick_config, tuned
from iris.ops.algorithms import EXCHANGING, LIBRARY
from iris.ops.workspace import FusedWorkspace
from iris.tune import command, session
from iris.tune.findings import Finding, described_config, print_findings
from iris.tune.search import Search, Step, Trial, by_turns
from iris.tune.session import Coordinator, Options, Past, Runner, Shape
from iris.tune.trials import DROPPED, ENDED, LEFT, MAX_STARTS, MEASURED, RIGHT, STARTED, Place, Trials, problem_name

pytestmark = [] if BACKEND == "sim" else [pytest.mark.gpu]
simulated_only = pytest.mark.skipif(BACKEND != "sim", reason="tells of the simulator")
TINY = ["matmul_reduce_scatter", "-m", "32", "-n", "16", "-k", "32", "--num_ranks", "2"]
CONFIGS = [FusedConfig("push", group_size_m=size) for size in range(1, 9)]


@pytest.fixture(autouse=True)
def _own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("IRIS_TUNED", str(tmp_path / "user.json"))
    pick.forget()
    yield
    pick.forget()


class World:
    """The results that a search gets: the time of each config in ms, by its ``group_size_m``; configs without a time
    are wrong. Every step takes a second."""

    def __init__(self, times: dict[int, float], budget_s: float = 1000.0, library_ms: float | None = None) -> None:
        self.times, self.left_s, self.library_ms = times, budget_s, library_ms
        self.steps: list[Step] = []
        self.spoiled: set[int] = set()

    def take(self, step: Step) -> Any:
        self.steps.append(step)
        self.left_s -= 1
        if step.kind == "compile":
            return ["does not compile" if config.group_size_m == 99 else None for config in step.configs]
        if step.kind == "library":
            return [self.library_ms] * step.calls
        size = step.configs[0].group_size_m
        if step.kind == "check":
            return None if size in self.times and size not in self.spoiled else f"wrong {size}"
        return [self.times[size]] * step.calls

    def search(
        self,
        configs: list[FusedConfig],
        more: Callable[[FusedConfig], list[FusedConfig]],
        batch: int,
        known: dict[FusedConfig, float] | None = None,
    ) -> Search:
        beside = self.library_ms is not None
        found = Search(configs, configs[0], more, lambda: self.left_s, batch, 3, known, beside)
        steps = found.steps()
        step = next(steps, None)
        while step is not None:
            try:
                step = steps.send(self.take(step))
            except StopIteration:
                break
        return found

    def calls(self) -> Counter[int]:
        return Counter(step.configs[0].group_size_m for step in self.steps if step.kind == "time")


def nothing_more(_: FusedConfig) -> list[FusedConfig]:
    return []


def test_the_fastest_is_found_and_the_slower_half_left_out() -> None:
    world = World({size: 1 + abs(size - 5) / 30 for size in range(1, 9)})
    found = world.search(CONFIGS, nothing_more, 0)
    assert found.best == FusedConfig("push", group_size_m=5)
    assert found.measured_ms(found.best) == 1.0
    calls = world.calls()
    assert calls[5] > calls[4] > calls[2] >= 2
    assert found.measured_ms(CONFIGS[0]) == pytest.approx(1 + 4 / 30)
    assert found.calls_of(CONFIGS[0]) == found.calls_of(found.best) == 15  # the untuned one, too


def test_the_library_is_measured_beside_the_best_where_that_is_asked_for() -> None:
    times = {size: float(size) for size in range(1, 9)}
    asked, other, late = World(times, library_ms=0.5), World(times), World(times, budget_s=20.0, library_ms=0.5)
    assert asked.search(CONFIGS, nothing_more, 0).library_ms == 0.5
    assert [step.kind for step in asked.steps[-3:]] == ["time", "time", "library"]
    assert other.search(CONFIGS, nothing_more, 0).library_ms is None
    assert late.search(CONFIGS, nothing_more, 0).library_ms is None


def test_each_algorithm_has_its_turn_before_another_has_a_second() -> None:
    names = ["ring", "ring", "push", "ring", "push", "atomic"]
    configs = [FusedConfig(name, group_size_m=1 + index) for index, name in enumerate(names)]
    assert [one.group_size_m - 1 for one in by_turns(configs)] == [0, 2, 5, 1, 4, 3]


def test_a_search_begins_with_each_algorithm_and_each_matmul() -> None:
    library, pushes = FusedConfig("low_latency"), [FusedConfig("push", num_chunks=count) for count in (1, 2)]
    own = replace(library, own_matmul=True)
    assert by_turns([library, *pushes, own]) == [library, pushes[0], own, pushes[1]]


def test_candidates_are_timed_in_turns() -> None:
    world = World({1: 1.0, 2: 1.1})
    world.search(CONFIGS[:2], nothing_more, 0)
    timed = [step.configs[0].group_size_m for step in world.steps if step.kind == "time"]
    first, last = timed[:4], timed[-10:]  # in between only the faster one is left
    turns = {(first[0], first[1]), (first[2], first[3]), *zip(last[::2], last[1::2], strict=True)}
    assert turns == {(1, 2), (2, 1)}, "neither is always the one behind the other"


def test_what_may_end_the_ranks_is_compiled_alone() -> None:
    world = World(dict.fromkeys(range(1, 9), 1.0))
    search = Search(CONFIGS, CONFIGS[0], nothing_more, lambda: 1.0, 4, 3, suspects={CONFIGS[1], CONFIGS[4]})
    batches = [[one.group_size_m for one in batch] for batch in search._batches(CONFIGS)]
    assert batches == [[1], [2], [3, 4], [5], [6, 7, 8]]
    world.search(CONFIGS, nothing_more, 3)
    assert [len(step.configs) for step in world.steps if step.kind == "compile"] == [3, 3, 2]


def test_what_is_far_off_is_left_out_at_once() -> None:
    world = World(dict.fromkeys(range(1, 9), 2.0) | {1: 1.0, 4: 1.01})
    world.search(CONFIGS, nothing_more, 0)
    assert {size for size, calls in world.calls().items() if calls == 2} == {2, 3, 5, 6, 7, 8}


def test_what_is_wrong_or_does_not_compile_is_never_timed() -> None:
    broken = FusedConfig("push", group_size_m=99)
    world = World({1: 5.0, 3: 1.0})
    found = world.search([CONFIGS[0], broken, CONFIGS[1], CONFIGS[2]], nothing_more, 2)
    assert found.best == CONFIGS[2]
    assert {config: trial.dropped for config, trial in found.trials.items() if trial.dropped} == {
        broken: "does not compile",
        CONFIGS[1]: "wrong 2",
    }
    assert set(world.calls()) == {1, 3}
    assert [len(step.configs) for step in world.steps if step.kind == "compile"] == [2, 2]


def test_fields_of_the_best_are_varied_as_long_as_it_helps() -> None:
    world = World({size: 20.0 - size for size in range(1, 13)})

    def next_two(config: FusedConfig) -> list[FusedConfig]:
        return [replace(config, group_size_m=config.group_size_m + step) for step in (1, 2)]

    found = world.search(CONFIGS[:1], next_two, 0)
    assert found.best is not None
    assert found.best.group_size_m == 7  # three steps of two
    assert found.measured_ms(CONFIGS[0]) == 19.0  # the config picked without rows is also measured at the end


def test_what_was_tried_is_no_variation_again_and_a_wrong_one_is_not_timed() -> None:
    world = World({1: 3.0, 2: 2.0, 3: 1.0})

    def beside(config: FusedConfig) -> list[FusedConfig]:
        return [replace(config, group_size_m=config.group_size_m + step) for step in (-1, 1)]

    world.search(CONFIGS[:1], beside, 0)
    checked = [step.configs[0].group_size_m for step in world.steps if step.kind == "check"]
    assert checked == [1, 0, 2, 3, 4, 3]  # the last time at the end
    assert set(world.calls()) == {1, 2, 3}


def test_a_variation_is_timed_before_the_best_is_timed_again() -> None:
    """So little time is enough to find out whether it is better."""
    world = World({1: 2.0, 2: 1.0, 3: 3.0})
    world.search(CONFIGS[:1], lambda config: [replace(config, group_size_m=config.group_size_m + 1)], 0)
    steps = [(step.kind, step.configs[0].group_size_m) for step in world.steps]
    assert all(steps[steps.index(("check", size)) + 1] == ("time", size) for size in (1, 2, 3))


def test_a_result_that_is_wrong_after_many_calls_loses_to_the_next() -> None:
    world = World({1: 2.0, 2: 1.0})
    take = world.take

    def late(step: Step) -> Any:
        if step.kind == "time" and len(world.steps) > 4:
            world.spoiled = {2}
        return take(step)

    world.take = late  # type: ignore[method-assign]
    found = world.search(CONFIGS[:2], nothing_more, 0)
    assert found.best == CONFIGS[0]
    assert "after many calls: wrong 2" in str(found.trials[CONFIGS[1]].dropped)


def test_what_is_fastest_side_by_side_in_the_end_is_the_best() -> None:
    world = World({1: 1.1, 2: 1.0})
    take = world.take

    def turning(step: Step) -> Any:
        if step.kind == "check" and world.calls():
            world.times = {1: 1.0, 2: 1.1}
        return take(step)

    world.take = turning  # type: ignore[method-assign]
    found = world.search(CONFIGS[:2], nothing_more, 0)
    assert found.best == CONFIGS[0] and found.measured_ms(CONFIGS[1]) == 1.1


def test_the_budget_ends_the_search_and_what_there_is_counts() -> None:
    for budget_s in range(60):
        world = World({size: 10.0 - size for size in range(1, 9)}, budget_s)
        found = world.search(CONFIGS, nothing_more, 0)
        # It looks at the clock before every step except the last check, and lets a checked config be timed once.
        assert len(world.steps) <= budget_s + 2 + 2
        assert (found.best is not None) == (budget_s > 0)
    assert found.best == CONFIGS[7]


def test_what_is_best_was_compared_with_what_is_picked_without_rows() -> None:
    for budget_s in range(2, 60):
        world = World({size: 10.0 - size for size in range(1, 9)}, budget_s)
        world.search(CONFIGS, nothing_more, 4)
        first = next(step for step in world.steps if step.kind == "time")
        assert first.configs == (CONFIGS[0],), budget_s


def test_a_search_that_time_has_ended_is_unfinished_and_goes_on_with_what_is_known() -> None:
    times = {size: 10.0 - size for size in range(1, 9)}
    cut = World(times, 8).search(CONFIGS, nothing_more, 0)
    assert cut.unfinished and not World(times).search(CONFIGS, nothing_more, 0).unfinished
    world, known = World(times), {config: times[config.group_size_m] for config in CONFIGS[:6]}
    assert world.search(CONFIGS, nothing_more, 0, known).best == CONFIGS[7]
    checked = [step.configs[0].group_size_m for step in world.steps if step.kind == "check"]
    assert checked == [7, 8, 8, 1]  # at the end the best again, and of the others what is known only
    assert set(world.calls()) == {1, 5, 6, 7, 8}  # the others are too slow; the first is what is picked without rows


def test_what_is_known_is_checked_before_it_can_be_the_best() -> None:
    """An earlier search may have found it right with other versions."""
    for known in ({}, dict.fromkeys(CONFIGS[:3], 1.0)):
        world = World({1: 1.0, 2: 1.1, 3: 1.2})
        world.spoiled = {1, 2} if known else set()
        found = world.search(CONFIGS[:3], nothing_more, 0, known)
        checked = {step.configs[0] for step in world.steps if step.kind == "check"}
        assert found.best in checked and found.best == CONFIGS[2 if known else 0]


def test_a_search_that_is_not_unfinished_has_done_all() -> None:
    times = {size: 10.0 - size for size in range(1, 9)}
    whole = World(times)
    whole.search(CONFIGS, nothing_more, 0)
    for budget_s in range(1, 2 * len(whole.steps)):
        world = World(times, budget_s)
        assert world.search(CONFIGS, nothing_more, 0).unfinished or world.steps == whole.steps, budget_s


def test_what_was_checked_last_is_timed_even_if_that_took_all_of_the_time() -> None:
    times = {size: 10.0 - size for size in range(1, 9)}
    known = {config: times[config.group_size_m] for config in CONFIGS[:7]}
    world = World(times, 2)
    found = world.search(CONFIGS, nothing_more, 0, known)
    assert [step.kind for step in world.steps] == ["check", "time", "time", "time", "check"]
    assert found.best == CONFIGS[7] and found.unfinished


def test_what_an_earlier_search_has_timed_is_timed_again() -> None:
    """The earlier search may have run on another day, with other versions."""
    now = {size: 10.0 - size for size in range(1, 9)}
    known = {config: 0.1 + config.group_size_m / 1000 for config in CONFIGS}
    for budget_s in (1, 3, 1000):
        world = World(now, budget_s)
        found = world.search(CONFIGS, nothing_more, 0, known)
        assert found.best is not None and found.measured_ms(found.best) == now[found.best.group_size_m]
        assert world.steps[0].configs == (CONFIGS[0],) and world.steps[1].configs == (CONFIGS[1],)
    assert found.best == CONFIGS[7]


class StoppedInTheFirstStep(World):
    def take(self, step: Step) -> Any:
        result = super().take(step)
        self.left_s = -math.inf
        return result


def test_a_search_that_is_told_to_stop_stops_at_once() -> None:
    world = StoppedInTheFirstStep(dict.fromkeys(range(1, 9), 1.0), 4)
    assert world.search(CONFIGS, nothing_more, 0).best is not None
    assert [step.kind for step in world.steps] == ["check", "time", "check"]


def test_checks_take_half_of_the_time_at_most() -> None:
    world = World(dict.fromkeys(range(1, 9), 1.0), 8)
    world.search(CONFIGS, nothing_more, 0)
    kinds = Counter(step.kind for step in world.steps)
    assert kinds["check"] <= 5
    assert kinds["time"] >= 3


def test_checks_take_more_only_until_one_is_right() -> None:
    world = World({7: 1.0, 8: 1.0}, 12)
    assert world.search(CONFIGS, nothing_more, 0).best == CONFIGS[6]
    assert [step.configs for step in world.steps if step.kind == "check"] == [*zip(CONFIGS[:7]), (CONFIGS[6],)]


def test_a_search_that_has_left_out_checks_is_unfinished_though_there_was_time_for_all_else() -> None:
    world = World({1: 1.0}, 24)
    found = world.search([FusedConfig("push", group_size_m=size) for size in range(1, 15)], nothing_more, 0)
    assert world.left_s > 0 and found.unfinished and len(found.trials) == 12


def test_nothing_right_is_nothing_found() -> None:
    found = World({}).search(CONFIGS, nothing_more, 0)
    assert found.best is None
    assert found.measured_ms(CONFIGS[0]) is None
    assert len(found.trials) == 8


def failed(trials: Trials) -> dict[Place, str]:
    """The candidates that are not to be tried again, and why."""
    return {place: history.failed for place, history in trials.histories().items() if history.failed is not None}


def runner_for(op: str) -> Runner:
    sizes = {"matmul": (32, 16, 32), "all_gather_matmul": (32, 8, 32), "matmul_all_scatter": (32, 8, 32)}
    ctx = context()
    return Runner(ctx, Operands(ctx, op, sizes.get(op, (32, 16, 16)), torch.float32, 0))


def verdicts(op: str) -> list[str | None]:
    """The verdicts on a right config, on one that raises, and on ops that leave the output, or the result for other
    numbers, unchanged."""
    runner = runner_for(op)
    small = pick.model_pick(runner.problem, runner.target)
    found = [runner.take(Step("check", (small,))), runner.take(Step("check", (replace(small, block_size_m=17),)))]
    times = runner.take(Step("time", (small,), 2))
    assert len(times) == 2 and all(0 < ms < 60e3 for ms in times)
    operands: Any = runner.operands
    real, kept = operands.call, list[torch.Tensor]()

    def lazy(config: FusedConfig) -> None:
        if not kept:
            real(config)
            kept.append(operands.output.clone())
        operands.output.copy_(kept[0])

    for wrong in (lambda config: None, lazy):
        operands.call = wrong
        found.append(runner.take(Step("check", (small,))))
    return found


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("op", ALGORITHMS)
def test_results_are_checked(ranks: Ranks, op: str) -> None:
    first, second = ranks.run(verdicts, op)
    assert first == second
    right, raising, silent, stale = first
    assert right is None
    assert "ArgumentError" in raising and "block_size_m" in raising
    assert "too far off" in silent and "ranks 0, 1 of 2" in silent
    assert "too far off" in stale


def test_a_call_takes_as_long_as_on_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [[1e-3, 4e-3], [2e-3, 3e-3]]
    ctx = SimpleNamespace(backend_name="sim", world_size=2, broadcast=lambda own, rank: seconds[rank])
    monkeypatch.setattr(session, "call_seconds", lambda *_, **__: seconds[0])
    runner: Any = SimpleNamespace(ctx=ctx)
    assert Runner._time(runner, lambda: None, 2) == pytest.approx([2, 4])


class Recorded:
    """Stands in for the kernel: compilations are recorded, launching fails."""

    def __init__(self) -> None:
        self.compiled: list[int] = []

    def warmup(self, *_: Any, grid: tuple[int, ...], **constants: Any) -> None:
        self.compiled.append(constants["BLOCK_M"])

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        raise AssertionError("launched")


def kernels_of(op: str, config: FusedConfig) -> list[FusedConfig]:
    """``config`` with every algorithm of Iris's kernel, and with those that may have it."""
    return [
        replace(config, algorithm=name, own_matmul=name in EXCHANGING)
        for name in ALGORITHMS[op]
        if name in EXCHANGING or name not in LIBRARY
    ]


def compiled_share(op: str) -> tuple[list[int], bool]:
    """The tiles that this rank compiles, out of those of all algorithms; whether the op still works afterwards."""
    runner, ctx = runner_for(op), context()
    config = pick.model_pick(runner.problem, runner.target)
    every = [replace(one, block_size_m=16 << (number % 3)) for number, one in enumerate(kernels_of(op, config))]
    real, recorded = kernels.matmul_kernel, Recorded()
    moves = {name: getattr(CopyEngine, name) for name in ("put", "wait", "clear")}
    kernels.matmul_kernel = recorded
    for name in moves:
        setattr(CopyEngine, name, None)
    try:
        complaints = runner.take(Step("compile", tuple(every)))
    finally:
        kernels.matmul_kernel = real
        for name, move in moves.items():
            setattr(CopyEngine, name, move)
    assert complaints == [None] * len(every)
    assert all(made.ctx is ctx for made in ctx._workspaces.values() if isinstance(made, FusedWorkspace))
    assert recorded.compiled == [one.block_size_m for one in every][ctx.rank :: ctx.world_size]
    return recorded.compiled, all(runner.take(Step("check", (one,))) is None for one in every)


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("op", [op for op in ALGORITHMS if op != "matmul"])
def test_ranks_share_compiling_and_launch_nothing_meanwhile(ranks: Ranks, op: str) -> None:
    shares = ranks.run(compiled_share, op)
    assert sum(len(share) for share, _ in shares) == len(kernels_of(op, FusedConfig()))
    assert all(works for _, works in shares)


class Uncompilable(Recorded):
    """A kernel that fails to compile for lack of room."""

    def warmup(self, *_: Any, grid: tuple[int, ...], **constants: Any) -> None:
        raise RuntimeError("out of registers")


def uncompilable(op: str) -> tuple[list[str], bool]:
    """The complaints about one config of each kind that does not compile, and whether the op works afterwards."""
    runner = runner_for(op)
    every = kernels_of(op, pick.model_pick(runner.problem, runner.target))
    with mock.patch.object(kernels, "matmul_kernel", Uncompilable()):
        complaints = runner.take(Step("compile", tuple(every)))
    return complaints, all(runner.take(Step("check", (one,))) is None for one in every)


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("op", [op for op in ALGORITHMS if op != "matmul"])
def test_nobody_waits_for_a_rank_whose_config_does_not_compile(ranks: Ranks, op: str) -> None:
    """Only one rank compiles it; the others run the call's other kernels, which wait for all ranks."""
    for complaints, works in ranks.run(uncompilable, op):
        assert all("out of registers" in complaint for complaint in complaints) and works


def complaint_of_compiling() -> Any:
    runner = runner_for("matmul")
    config = pick.model_pick(runner.problem, runner.target)
    return runner.take(Step("compile", (config, replace(config, block_size_m=17))))


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_what_does_not_compile_is_told_to_all(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    for complaints in ranks.run(partial(with_recorder, complaint_of_compiling)):
        assert complaints[0] is None
        assert "block_size_m" in complaints[1]


def with_recorder(fn: Callable[[], Any]) -> Any:
    real = kernels.matmul_kernel
    kernels.matmul_kernel = Recorded()
    try:
        return fn()
    finally:
        kernels.matmul_kernel = real


@simulated_only
def test_a_run_writes_a_row_that_auto_takes_and_resume_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "user.json"
    given = [*TINY, "--dtype", "fp32", "--b_layout", "transposed"]
    assert cli.main(["tune", *given, "--budget_s", "9"]) == 0
    (row,) = tuned.read(out)
    problem = replace(problem_of("matmul_reduce_scatter", 32, 16, 16, 2, torch.float32), transposed_b=True)
    target = Target("sim", 4, hardware="simulated")
    assert row.key == tuned.row_key(problem, "simulated")
    assert row.measured_ms > 0 and row.predicted_ms is None and row.untuned_ms is not None
    assert row.versions["torch"] == torch.__version__ and row.date.startswith("20")
    pick.forget()
    assert pick_config(problem, target) == row.config
    assert pick_config(problem, Target("cuda", 132, hardware="NVIDIA H200")) != row.config
    events = [json.loads(line) for line in (tmp_path / "user.json.trials").read_text().splitlines()]
    states = Counter(event["state"] for event in events)
    assert states[RIGHT] >= states[MEASURED] >= 2
    told = capsys.readouterr()
    assert (
        "matmul_reduce_scatter 32x16x32 fp32 b_layout=transposed" in told.out
        and described_config(row.config)[:4] in told.out
    )
    assert told.out.splitlines()[0].strip() == "2 × simulated, wall time"
    assert f"rows: {out}, which count for simulated ranks only\n" in told.out
    assert "The best time that progress shows may be lower" in told.out

    # Again: a finished row stays unchanged.
    tuned.write(out, [replace(row, unfinished=False)])
    assert cli.main(["tune", *given, "--budget_s", "30", "--resume"]) == 0
    assert tuned.read(out) == [replace(row, unfinished=False)]


@simulated_only
def test_a_row_of_a_local_matmul_tells_the_librarys_time(tmp_path: Path) -> None:
    given = ["tune", "matmul", "-m", "64", "-n", "64", "-k", "64", "--num_ranks", "1"]
    rows: dict[str, tuned.Row] = {}
    for dtype, budget_s in itertools.product(("fp32", "int8", "fp8"), (2, 20)):
        if dtype not in rows or (dtype == "fp32" and rows[dtype].library_ms is None):  # busy machines take longer
            assert cli.main([*given, "--dtype", dtype, f"--budget_s={budget_s}"]) in (0, 1)
            rows = {row.dtype: row for row in tuned.read(tmp_path / "user.json")}
    library_ms = rows["fp32"].library_ms
    assert library_ms is not None and 0 < library_ms != rows["fp32"].measured_ms, rows
    assert rows["int8"].library_ms is rows["fp8"].library_ms is None  # torch.matmul takes neither


def tried(out: Path) -> set[tuple[int, ...]]:
    """gather_dim, m, n and k of the problems whose candidates were run."""
    events = [json.loads(line) for line in Trials(out).path.read_text().splitlines()]
    return {(event["key"][3], *event["key"][5:]) for event in events}


@simulated_only
def test_a_data_set_of_shapes_within_a_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [{"m": 8, "n": 16, "k": 8, "gather_dim": 1}, {"m": 9, "n": 16, "k": 8, "gather_dim": 0}]
    (tmp_path / "shapes.json").write_text(json.dumps(entries))
    out = tmp_path / "rows.json"
    given = ["all_gather_matmul", "--dataset", str(tmp_path / "shapes.json"), "--num_ranks=2", "--budget_s=3"]
    status, rows = cli.main(["tune", *given, "--out", str(out)]), tuned.read(out)
    assert status == (0 if rows else 1)  # on a slow machine there is time for the untuned config only
    assert tried(out) == {(1, 8, 8, 8, False)} >= {row.key[3:4] + row.key[5:] for row in rows}
    assert "M=9: no multiple of 2 ranks" in capsys.readouterr().out


@simulated_only
def test_a_run_without_a_shape_that_ranks_can_share_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["matmul_reduce_scatter", "-m", "9", "-n", "8", "-k", "8", "--num_ranks=2", "--out", str(tmp_path / "rows")]
    assert cli.main(["tune", *given]) == 1
    assert "M=9: no multiple of 2 ranks" in capsys.readouterr().out


def test_a_run_needs_shapes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for given, words in (
        (["matmul"], "which shapes?"),
        (["matmul", "-m", "3", "-n", "3"], "which shapes?"),
        (["matmul", "-m", "3", "--dataset", "x.json"], "leave -m, -n and -k out"),
        (["matmul", "-m", "0", "-n", "1", "-k", "1"], "0 is not a positive number"),
        (["matmul", "-m", "1", "-n", "1", "-k", "1", "--budget_s", "0"], "not a positive number of seconds"),
        (["multiply", "-m", "1"], "invalid choice"),
        ([], "required: OP"),
        (["matmul", "-m", "1", "-n", "1", "-k", "1", "--gather_dim", "0"], "--gather_dim is for all_gather_matmul"),
        (["matmul", "-m", "1", "-n", "1", "-k", "1", "--out", str(tmp_path)], f"--out: name a file: {tmp_path} is a"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command.main(given)
        assert words in capsys.readouterr().err


def test_a_gather_among_several_ops_may_have_its_dim() -> None:
    parser = command.make_parser()
    given = parser.parse_args(["matmul", "all_gather_matmul", "-m8", "-n8", "-k8", "--gather_dim=1"])
    assert [one.gather_dim for one in command._shapes(parser, given, 2)] == [None, 1]


def test_a_broken_file_is_found_before_anything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (("user.json.trials", "user.json.trials:1: expected a trial"), ("user.json", "an object with")):
        (tmp_path / name).write_text("{}\n")
        assert cli.main(["tune", *TINY]) == 2
        assert words in capsys.readouterr().err
        assert (tmp_path / name).read_text() == "{}\n"


def test_a_broken_file_is_put_right_by_the_option_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (out := tmp_path / "user.json").write_text("[")
    for option, name in (([], "IRIS_TUNED"), ([f"--out={out}"], "--out")):
        assert cli.main(["tune", *TINY, *option]) == 2
        assert capsys.readouterr().err.endswith(
            f"Have {name} name another file, or delete this one if it is a damaged file of tuned rows.\n"
        )


def test_a_device_is_not_taken_for_a_file_of_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Path, "read_bytes", None)
    assert cli.main(["tune", *TINY, "--out=/dev/zero"]) == 2
    assert capsys.readouterr().err.endswith("expected a file, got a pipe or device. Have --out name a file.\n")


@simulated_only
@pytest.mark.parametrize("rows", [1 << 44, 10**20])
def test_a_shape_too_large_for_memory_fails_alone(
    tmp_path: Path, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (dataset := tmp_path / "shapes.json").write_text(json.dumps([{"m": [rows, 16], "n": 16, "k": 16}]))
    arguments = ["matmul_all_reduce", f"--dataset={dataset}", "--num_ranks=2", "--budget_s=5"]
    assert cli.main(["tune", *arguments, f"--out={tmp_path / 'rows.json'}"]) == 1
    found = capsys.readouterr().out
    assert "Error: " in found and "16x16x16" in found


@pytest.mark.parametrize("content", ["", "\n"])
def test_an_empty_file_has_no_rows(tmp_path: Path, content: str) -> None:
    (file := tmp_path / "rows.json").write_text(content)
    assert tuned.read(file) == []
    tuned.write(file, [])
    assert json.loads(file.read_text())["rows"] == []


@simulated_only
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    script = [sys.executable, "-m", "iris", "tune", *TINY, "--budget_s", "300", "--out", str(out)]
    process = subprocess.Popen(
        script, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        trials = Trials(out).path
        give_up = time.monotonic() + 60
        while not (trials.exists() and trials.read_text().count(RIGHT) >= 3) and time.monotonic() < give_up:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        printed, told = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == STOPPED, told
    assert "stopping: what was measured is kept" in told and "--resume goes on" in told
    assert "tried, " in told and " s left" in told
    assert trials.read_text().count(MEASURED) >= 1
    assert all(row.unfinished for row in tuned.read(out))  # there is none if only the untuned config was timed
    assert "no time" not in printed
    assert ("stopped: nothing " in printed) == (not tuned.read(out))


@simulated_only
def test_ctrl_c_while_ranks_import_says_no_more_than_that(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    script = [sys.executable, "-m", "iris", "tune", *TINY, "--out", str(out)]
    process = subprocess.Popen(script, stderr=subprocess.PIPE, text=True, start_new_session=True)
    give_up = time.monotonic() + 60
    while not Trials(out).path.exists() and time.monotonic() < give_up:
        time.sleep(0.05)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (STOPPED, "stopped; --resume goes on\n")


@simulated_only
def test_two_runs_do_not_share_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    with Trials(out).own():
        Trials(out).add(["kept"], CONFIGS[0], STARTED)
        assert cli.main(["tune", *TINY, "--out", str(out)]) == 2
    assert "--out: expected a file that no other run tunes into" in capsys.readouterr().err
    assert '"kept"' in Trials(out).path.read_text()


@simulated_only
@pytest.mark.parametrize("named", [True, False])
def test_a_file_that_cannot_be_written_is_told_by_the_name_that_it_came_by(
    named: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/proc/rows.json"
    monkeypatch.setenv("IRIS_TUNED", os.devnull if named else path)
    assert cli.main(["tune", *TINY, *(["--out", path] if named else [])]) == 2
    told = capsys.readouterr().err
    assert f"{path}.trials: expected a file that can be written" in told
    assert f"Have {'--out' if named else 'IRIS_TUNED'} name another file." in told


LOCALS = [FusedConfig("local", group_size_m=size) for size in range(1, 4)]


def dying(options: Options) -> tuple[list[Finding], bool]:
    """A run whose second candidate ends rank 0, and so all ranks, when it is compiled together with others."""
    trials, key = Trials(options.out, options.run), ["simulated", 2, "matmul", None, "fp32", 1, 1, 1]
    suspects = {config for (_, config), one in trials.histories().items() if one.run == options.run and one.unanswered}
    if not failed(trials):
        if os.environ["IRIS_RANK"] == "0":
            if suspects:
                assert suspects == set(LOCALS[:3])
                trials.start(key, LOCALS[:1])
                trials.answered()
            trials.start(key, LOCALS[1:2] if suspects else LOCALS[:3])
            os._exit(3)
        raise PeerDied("rank 0 is gone", [0])
    assert failed(trials) == {(problem_name(key), LOCALS[1]): ENDED}
    return [Finding("tuned", FINISHED)], False


def always_dying(options: Options) -> tuple[list[Finding], bool]:
    os._exit(3)


@simulated_only
def test_a_candidate_that_ends_its_ranks_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "run", dying)
    earlier = Trials(tmp_path / "rows.json", "earlier")
    earlier.add(
        ["simulated", 2, "matmul", None, "fp32", 8, 8, 8, False], FusedConfig("local"), STARTED
    )  # is not to blame
    assert command.main([*TINY, "--out", str(tmp_path / "rows.json")]) == 0
    told = capsys.readouterr()
    assert "a candidate ended its ranks, one of 3: each of these is compiled alone from now on" in told.err
    assert "a candidate ended its ranks, and is left out from now on" in told.err
    assert "tuned" in told.out
    monkeypatch.setattr(session, "run", always_dying)
    with pytest.raises(LaunchError, match="exit code 3"):
        command.main([*TINY, "--out", str(tmp_path / "rows.json")])


REDUCE = problem_of("matmul_reduce_scatter", 32, 16, 16, 2, torch.float32)
FINISHED = tuned.Row(*tuned.row_key(REDUCE, "simulated"), FusedConfig("push"), 0.01)  # type: ignore[call-arg]


def options_for(out: Path, *, resume: bool = False) -> Options:
    return Options((Shape("matmul_reduce_scatter", 32, 16, 32, "fp32"),), out, 1.0, resume)


def coordinator_for(runner: Any, options: Options, stop: Any, left_s: float = 1e6) -> Coordinator:
    past = Past(runner.problem, runner.target, options)
    return Coordinator(runner, options.shapes[0], past, time.monotonic() + left_s, stop, session._quiet)


def tune_alone(options: Options, *, steps: int | None = None, left_s: float = 1e6) -> tuple[Finding, int]:
    """The finding of rank 0 if each candidate takes a millisecond, and the number of steps. ``steps``: press Ctrl-C
    after this many."""
    stop, count = SimpleNamespace(asked=steps == 0), 0
    target = Target("sim", 4, hardware="simulated")
    runner: Any = SimpleNamespace(problem=REDUCE, target=target, ctx=SimpleNamespace(world_size=2))
    if (kept := Past(REDUCE, target, options).kept_row()) is not None:
        return Finding(options.shapes[0].name, kept), 0
    coordinator = coordinator_for(runner, options, stop, left_s)
    order = coordinator.first()
    while order is not None:
        step = Step(order["kind"], tuple(FusedConfig(**one) for one in order["configs"]), order["calls"])
        count += 1
        stop.asked |= count == steps
        order = coordinator.next(step, [1.0] * step.calls if step.kind == "time" else None)
    return coordinator.finding(), count


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of rows, for :func:`tune_alone`."""
    known = dict.fromkeys(session._VERSIONS) | {"date": "now"}
    monkeypatch.setattr(session, "environment", lambda *_: known)
    return tmp_path / "rows.json"


@pytest.mark.parametrize("steps", [1, 20], ids=["stopped with the untuned timed", "stopped later"])
def test_a_search_that_ends_early_leaves_a_finished_row_and_resume_goes_on(out: Path, steps: int) -> None:
    tuned.write(out, [FINISHED])
    finding, _ = tune_alone(options_for(out), steps=steps)
    assert tuned.read(out) == [FINISHED]
    assert finding.row == FINISHED and not finding.failed
    assert finding.why == "stopped, 1 ms so far: the finished row from before is kept"
    finding, _ = tune_alone(options_for(out, resume=True))
    assert finding.row is not None and not finding.why
    assert (finding.row.date, finding.row.unfinished, tuned.read(out)) == ("now", False, [finding.row])
    assert tune_alone(options_for(out, resume=True)) == (finding, 0)


def test_a_faster_unfinished_row_from_before_is_kept_and_told(out: Path) -> None:
    faster = replace(FINISHED, measured_ms=0.5, unfinished=True)
    tuned.write(out, [faster])
    finding, _ = tune_alone(options_for(out), steps=40)
    assert finding.row == faster and tuned.read(out) == [faster] and finding.unfinished
    assert finding.why == "stopped, 1 ms so far: the faster row from before is kept"
    tuned.write(out, [replace(FINISHED, measured_ms=0.5, unfinished=True, versions={"iris": "0"})])
    assert tune_alone(options_for(out), steps=40)[0].why == ""  # that of other versions is not


def test_rows_that_can_no_longer_be_read_are_written_again_after_the_table(out: Path) -> None:
    out.write_text('{"schema": 1, "rows": [')
    finding, steps = tune_alone(options_for(out))
    assert steps > 0 and finding.row is not None and finding.unwritten


@pytest.mark.parametrize("resume", [False, True])
def test_a_shape_whose_turn_does_not_come_has_the_row_that_it_had(out: Path, resume: bool) -> None:
    options, ctx = options_for(out, resume=resume), cast(Any, SimpleNamespace(rank=0, world_size=2, num_sms=4))
    with mock.patch.object(session, "target_of", return_value=Target("sim", 4, hardware="simulated")):
        finding = session._unreached(ctx, options.shapes[0], options, "no time left")
        assert (finding.row, finding.why, finding.failed) == (None, "no time left", True)
        tuned.write(out, [FINISHED])
        finding = session._unreached(ctx, options.shapes[0], options, "no time left")
        assert finding.row == FINISHED and not finding.failed and finding.unfinished != resume
        assert finding.why == ("" if resume else "no time left: the finished row from before is kept")
        Trials(out).add(FINISHED.key, CONFIGS[0], LEFT, measured_ms=0.5)
        assert session._unreached(ctx, options.shapes[0], options, "no time left").unfinished


def test_a_row_from_before_that_is_kept_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        command, "_supervised", lambda *_: ([Finding("some", FINISHED, "no time left: kept", unfinished=True)], False)
    )
    assert command.main(TINY) == 0
    told = capsys.readouterr()
    assert "some: no time left: kept\n" in told.out
    assert "--resume goes on" in told.err


def test_a_run_begins_anew_what_it_tunes_and_only_that(out: Path) -> None:
    other, trials = [*FINISHED.key[:-1], True], Trials(out, "earlier")
    for key in (FINISHED.key, other):
        trials.add(key, CONFIGS[0], MEASURED, measured_ms=0.5)
        trials.add(key, CONFIGS[1], DROPPED, why="wrong")
    tune_alone(options_for(out), steps=3)
    histories = {place: history for place, history in trials.histories().items() if history.run == "earlier"}
    assert list(histories) == [(problem_name(other), CONFIGS[0]), (problem_name(other), CONFIGS[1])]


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_a_run_that_is_stopped_before_its_ranks_are_up_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = Trials(tmp_path / "user.json", "earlier")
    trials.add(FINISHED.key, CONFIGS[0], MEASURED, measured_ms=0.5)
    before = trials.path.read_text()
    monkeypatch.setattr(command, "_supervised", interrupted)
    assert command.main(TINY) == STOPPED
    assert trials.path.read_text() == before


def test_a_run_whose_ranks_a_candidate_ended_goes_on_with_what_is_its_own(out: Path) -> None:
    tuned.write(out, [FINISHED])
    options = options_for(out)
    Trials(out, options.run).add(FINISHED.key, CONFIGS[1], DROPPED, why=ENDED)
    finding, steps = tune_alone(options)  # the earlier row does not count as its own
    assert steps > 0 and finding.row is not None and finding.row.date == "now"
    assert (problem_name(FINISHED.key), CONFIGS[1]) in failed(Trials(out))
    assert tune_alone(options) == (finding, 0)
    assert tune_alone(options_for(out))[1] > 0  # another run begins anew


def test_what_an_earlier_run_did_not_come_back_from_is_compiled_alone(out: Path) -> None:
    target = Target("cuda", 132, hardware="NVIDIA H200")
    runner: Any = SimpleNamespace(problem=REDUCE, target=target, ctx=SimpleNamespace(world_size=2))
    suspect, stop = session.promising(REDUCE, target)[3], SimpleNamespace(asked=False)
    Trials(out).add(tuned.row_key(REDUCE, target.hardware), suspect, STARTED)
    coordinator = coordinator_for(runner, options_for(out, resume=True), stop)
    order, compiled = coordinator.first(), list[tuple[FusedConfig, ...]]()
    while order is not None and order["kind"] != "time":
        step = Step(order["kind"], tuple(FusedConfig(**one) for one in order["configs"]), order["calls"])
        compiled += [step.configs] if step.kind == "compile" else []
        order = coordinator.next(step, [None] * len(step.configs) if step.kind == "compile" else None)
    assert {len(configs) for configs in compiled if suspect in configs} == {1}
    assert max(map(len, compiled)) == 2


def test_what_an_earlier_run_has_timed_is_checked_no_more_until_it_is_the_best(out: Path) -> None:
    target = Target("sim", 4, hardware="simulated")
    runner: Any = SimpleNamespace(problem=REDUCE, target=target, ctx=SimpleNamespace(world_size=2))
    known = session.promising(REDUCE, target)[-1]
    Trials(out).add(FINISHED.key, known, MEASURED, measured_ms=0.5)
    coordinator = coordinator_for(runner, options_for(out, resume=True), SimpleNamespace(asked=False))
    order, checked = coordinator.first(), list[FusedConfig]()
    while order is not None and order["kind"] != "time":
        step = Step(order["kind"], tuple(FusedConfig(**one) for one in order["configs"]), order["calls"])
        checked += step.configs
        order = coordinator.next(step, None)
    assert checked and known not in checked


def test_what_has_failed_since_it_was_timed_is_not_tried_again(out: Path) -> None:
    known = session.promising(REDUCE, Target("sim", 4, hardware="simulated"))[-1]
    Trials(out).add(FINISHED.key, known, MEASURED, measured_ms=1e-3)
    for _ in range(MAX_STARTS):
        Trials(out).add(FINISHED.key, known, STARTED)
    before = Trials(out).path.read_text()
    finding, _ = tune_alone(options_for(out, resume=True))
    assert finding.row is not None and finding.row.config != known
    assert json.dumps(tuned.changed_fields(known)) not in Trials(out).path.read_text().removeprefix(before)


def test_rows_and_trials_lie_beside_each_other_where_a_link_leads(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "there" / "rows.json")
    assert Trials(tmp_path / "link.json").path == Trials(tmp_path / "there" / "rows.json").path


def test_a_row_has_what_the_model_expects_in_milliseconds(out: Path) -> None:
    target, config = Target("cuda", 132, hardware="NVIDIA H200"), FusedConfig("push")
    row = session.measured_row(cast(Any, None), REDUCE, target, config, 1.0, None, None)
    seconds = pick.predictions(REDUCE, target, [config])[config]
    assert seconds > 0 and row.predicted_ms == pytest.approx(1e3 * seconds, rel=1e-3)


def test_what_went_before_ranks_were_lost_is_off_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, now, budgets = replace(options_for(tmp_path / "rows.json"), budget_s=25.0), [0.0], list[float]()
    Trials(options.out, options.run).add(FINISHED.key, CONFIGS[0], STARTED)

    def run(fn: Any, args: Any, timeout_s: float) -> list[Any]:
        budgets.append(args[0].budget_s)
        now[0] += 10
        if len(budgets) < 2:
            raise LaunchError("a rank is gone")
        return [([], False)]

    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(command, "sheltered", lambda _: mock.Mock(run=run))
    monkeypatch.setattr(command, "_interrupts_to", lambda *_: nullcontext())
    assert command._supervised(2, options) == ([], False)
    assert budgets == [25, 15]


def test_ctrl_c_counts_even_if_a_candidate_then_ends_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"

    def run(fn: Any, args: Any, timeout_s: float) -> list[Any]:
        Trials(out, args[0].run).add(FINISHED.key, CONFIGS[0], STARTED)
        os.kill(os.getpid(), signal.SIGINT)
        raise LaunchError("a rank is gone")

    pool = mock.Mock(run=run, processes=[mock.Mock(pid=None)])
    monkeypatch.setattr(command, "sheltered", lambda _: pool)
    assert command.main([*TINY, "--out", str(out)]) == STOPPED
    assert capsys.readouterr().err.endswith("stopped; --resume goes on\n")
    assert failed(Trials(out)) == {(problem_name(FINISHED.key), CONFIGS[0]): ENDED}


def test_why_there_is_no_row_is_told_as_it_was(out: Path) -> None:
    rest = "nothing timed but what is picked without rows"
    assert tune_alone(options_for(out), steps=0)[0].why == "stopped: nothing measured"
    assert tune_alone(options_for(out), steps=1)[0].why == f"stopped: {rest}"
    assert tune_alone(options_for(out), left_s=0.0)[0].why == "no time left"
    assert tuned.read(out) == []


@contextmanager
def no_file_larger_than(nbytes: int) -> Iterator[None]:
    """Simulate a full disk: no file can become larger than ``nbytes``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("nbytes", [0, 280], ids=["full at once", "full in the middle of a line"])
def test_a_search_goes_on_where_trials_and_rows_cannot_be_written(
    out: Path, nbytes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = Trials(out)
    with no_file_larger_than(nbytes):
        finding, steps = tune_alone(options_for(out))
    assert steps > 1 and finding.row is not None and finding.unwritten and not out.exists()
    assert capsys.readouterr().err == f"trials are not kept, which --resume goes by: {earlier.path}: File too large\n"
    assert (len(earlier.histories()) > 0) == (nbytes > 0)
    assert earlier.path.read_bytes()[-1:] in (b"", b"\n")


def test_broken_rows_of_the_users_are_found_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "tuned.json"
    broken.write_text("{}")
    monkeypatch.setenv(tuned.ENVIRONMENT_VARIABLE, str(broken))
    monkeypatch.setattr(command, "_supervised", None)
    assert cli.main(["tune", *TINY, f"--out={tmp_path / 'rows.json'}"]) == 2
    assert capsys.readouterr().err.startswith(f"iris tune: error: tuned rows: {broken}: expected an object")


def test_an_error_of_one_rank_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("IRIS_LOG_LEVEL", "loud")
    assert cli.main(["tune", *TINY, f"--out={tmp_path / 'rows.json'}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("iris tune: LaunchError: rank ") and "ArgumentError: " in line and "loud" in line


def test_a_run_has_failed_if_one_of_its_shapes_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, lost = Finding("one", FINISHED), Finding("two", why="no memory", failed=True)
    for findings, status in (([found], 0), ([found, lost], 1), ([lost, found], 1)):
        monkeypatch.setattr(command, "_supervised", lambda *_, findings=findings: (findings, False))
        assert command.main([*TINY, f"--out={tmp_path / 'rows.json'}"]) == status


def test_rows_that_were_not_written_are_printed_before_they_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    monkeypatch.setattr(command, "_supervised", lambda *_: ([Finding("some", FINISHED, unwritten=True)], False))
    with no_file_larger_than(0):
        assert cli.main(["tune", *TINY, f"--out={out}"]) == 1
    told = capsys.readouterr()
    assert described_config(FINISHED.config) in told.out and "rows:" not in told.out
    expected = f"{out}: expected a file that can be written, got File too large. Have --out name another file."
    assert told.err == f"iris tune: IrisError: tuned rows: {expected}\n"
    assert cli.main(["tune", *TINY, f"--out={out}"]) == 0
    assert tuned.read(out) == [FINISHED]


def test_rows_written_at_the_same_time_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, read = tuned.Row("H", 2, "matmul", None, "bf16", 8, 8, 8, False, FusedConfig("local"), 0.5), tuned.read

    def slow(path: Path) -> list[tuned.Row]:
        found = read(path)
        time.sleep(0.05)
        return found

    monkeypatch.setattr(tuned, "read", slow)
    rows = [replace(row, m=8 << number) for number in range(4)]
    writers = [threading.Thread(target=tuned.write, args=(tmp_path / "rows.json", [one])) for one in rows]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(one.m for one in read(tmp_path / "rows.json")) == [8, 16, 32, 64]


def test_trials_tell_what_failed(tmp_path: Path) -> None:
    trials = Trials(tmp_path / "rows.json")
    assert failed(trials) == {}
    key = ["NVIDIA H200", 2, "matmul_all_scatter", None, "bf16", 8, 8, 8, False]
    for config, states in zip(
        CONFIGS,
        (
            *((RIGHT, STARTED, STARTED), (STARTED, RIGHT), (STARTED, DROPPED), (STARTED, RIGHT, MEASURED)),
            *((STARTED, RIGHT, STARTED), (STARTED,)),
        ),
        strict=False,
    ):
        for state in states:
            why, ms = "wrong" if state == DROPPED else None, 0.5 if state == MEASURED else None
            trials.add(key, config, state, why=why, measured_ms=ms)
    with trials.path.open("a") as file:
        file.write('{"key": ["cut off')
    name = problem_name(key)
    assert failed(trials) == {
        (name, CONFIGS[0]): ENDED,
        (name, CONFIGS[2]): "wrong",
    }  # the last two are tried once more
    assert {place: history.measured_ms for place, history in trials.histories().items() if history.measured_ms} == {
        (name, CONFIGS[3]): 0.5
    }
    with trials.own():
        assert trials.path.read_text().endswith("}\n")
    trials.add([*key[:-1], True], CONFIGS[3], DROPPED, why="another problem")
    trials.forget(key)
    assert failed(trials) == {(problem_name([*key[:-1], True]), CONFIGS[3]): "another problem"}


def test_a_candidate_is_to_blame_while_it_runs_and_no_longer(out: Path) -> None:
    """It may be compiled, checked or timed, and may have been right before."""
    options, blamed = options_for(out), []

    def look(_: str, __: int) -> None:
        blamed.append({config for (_, config), one in Trials(out).histories().items() if one.unanswered})

    with mock.patch.object(session, "_STATUS_S", -1.0), mock.patch.object(session, "_quiet", look):
        finding, steps = tune_alone(options, steps=40)
    assert finding.row is not None and len(blamed) == steps
    assert all(len(found) == 1 for found in blamed) and len(set(map(frozenset, blamed))) < steps
    assert not any(one.unanswered for one in Trials(out).histories().values())


@pytest.mark.parametrize(
    "broken",
    [
        *(b"{}", b"[1]", b"\xff\xfe", pytest.param(b"[" * 100_000, id="deep")),
        *({"config": 3}, {"measured_ms": "0.5"}, {"measured_ms": 0}, {"measured_ms": 10**400}),
    ],
)
def test_what_is_no_trial_is_named(tmp_path: Path, broken: bytes | dict[str, Any]) -> None:
    trials = Trials(tmp_path / "rows.json")
    trials.add(["NVIDIA H200", 2, "matmul_all_scatter", None, "bf16", 8, 8, 8, False], CONFIGS[0], RIGHT)
    if isinstance(broken, dict):
        broken = json.dumps(json.loads(trials.path.read_text()) | broken).encode()
    trials.path.write_bytes(broken + b"\n")
    with pytest.raises(ArgumentError, match=r"rows\.json\.trials:1: expected a trial"):
        failed(trials)


@pytest.mark.parametrize("notes", ["my notes", "my notes\nmore"])
def test_what_is_no_file_of_trials_is_left_as_it_is(tmp_path: Path, notes: str) -> None:
    trials = Trials(tmp_path / "rows.json")
    trials.path.write_text(notes)
    with pytest.raises(ArgumentError, match=r"rows\.json\.trials:.*expected a trial, got 'my notes'"), trials.own():
        pass
    assert trials.path.read_text() == notes


def test_findings_as_plain_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    config = FusedConfig("local", num_chunks=3)
    row = tuned.Row("H", 2, "matmul", None, "bf16", 8, 8, 8, False, config, 0.51234, 0.6, None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    print_findings([Finding("one", row), Finding("two", why="no time left")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["one", "local", "128x128x64", "w8", "s3", "num_chunks=3", "0.5123", "0.6"]
    assert lines[2].split() == ["two", "no", "time", "left"]


def test_times_have_a_unit_and_end_below_each_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        tuned.Row("H", 2, "matmul", None, "bf16", 8, 8, 8, False, CONFIGS[0], measured, predicted, untuned)
        for measured, untuned, predicted in ((0.51234, 1024.0, 0.6), (12.0, 3.25, None))
    ]
    monkeypatch.setitem(sys.modules, "rich.console", None)
    print_findings([Finding("one", row) for row in rows])
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.endswith("      ms  untuned ms  predicted ms")
    assert lines[0].endswith("  0.5123        1024           0.6")
    assert lines[1].endswith("      12        3.25")


def test_findings_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets in an error are not taken for markup of rich."""
    print_findings([Finding("one", why="dropped: no kernel [/mnt/cache]")])
    assert "no kernel [/mnt/cache]" in capsys.readouterr().out


@pytest.mark.parametrize("hardware", ["simulated", "NVIDIA H200"])
def test_where_rows_are_from_and_count_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hardware: str
) -> None:
    row = replace(FINISHED, hardware=hardware)
    monkeypatch.setattr(command, "_supervised", lambda *_: ([Finding("some", row)], False))
    assert command.main(TINY) == 0
    told, simulated = capsys.readouterr().out.splitlines(), hardware == "simulated"
    assert told[0].strip() == f"2 × {hardware}" + ", wall time" * simulated
    assert told[-1] == f"rows: {tuned.user_path()}" + ", which count for simulated ranks only" * simulated


def test_progress_tells_how_many_calls_the_best_had(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(session, "_STATUS_S", 0.0)
    monkeypatch.setattr(session, "_quiet", lambda words, finished: told.append(words))
    tune_alone(options_for(out))
    bests = [words.split(", ")[2] for words in told if ", best " in words]
    assert bests[0] == "best 1 ms in 1 call" and "best 1 ms in 2 calls" in bests, bests


def test_an_untimed_trial_is_slower_than_any() -> None:
    assert Trial().median_ms > Trial([1e9]).median_ms


def test_the_first_shape_of_a_kind_gets_more_time() -> None:
    shapes = [Shape(op, m, 8, 8, "bf16") for op in ("matmul", "matmul_all_reduce") for m in (8, 16)]
    left, given = 80.0, []
    for number in range(4):
        given.append(left * session._share(shapes, number))
        left -= given[-1]
    assert given == pytest.approx([30, 10, 30, 10])


@simulated_only
def test_a_shape_that_does_not_fit_is_told_and_the_next_is_tuned(tmp_path: Path) -> None:
    shapes = [{"m": m, "n": 16, "k": 8, "gather_dim": 0} for m in (1 << 17, 8)]
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    out = tmp_path / "rows.json"
    given = ["--dataset", str(tmp_path / "shapes.json"), "--num_ranks=2", "--budget_s=9", "--heap_size", str(1 << 19)]
    assert command.main(["all_gather_matmul", *given, "--out", str(out)]) == 1
    assert tried(out) == {(0, 8, 8, 8, False)}
