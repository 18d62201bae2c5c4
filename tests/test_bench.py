"""The benchmark framework: axes, data sets, gating, crashes, resuming, formats, and the cases that come with Iris."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import triton
from interrupted import interrupted
from ops_inputs import some
from ranks import BACKEND, USES_NCCL, Ranks, context, fresh, marks_for, worlds
from trials import WAYS, ranges, trial
from warm import python

from iris import bench
from iris import results as report
from iris.bench import cases, command, contexts, driver, environment, messages, records, session, tables
from iris.bench.axes import Axis, Params, axes_of, expand, parse_values
from iris.bench.case import registered
from iris.bench.cases import fused, l2, ways
from iris.bench.cases.fused import local_params
from iris.bench.cases.operands import TRANSPOSED, Operands
from iris.bench.dataset import Dataset
from iris.bench.driver import Group
from iris.bench.options import heap_bytes
from iris.bench.records import Record
from iris.bench.session import Settings
from iris.bench.state import Outcome, Skipped, State, agreed
from iris.console import STOPPED
from iris.context import Iris
from iris.errors import ArgumentError, LaunchError
from iris.ops import FusedConfig, pick, tuned
from iris.ops.algorithms import OPS
from iris.ops.choice import _Choice, settled
from iris.ops.problem import Problem
from iris.ops.target import target_of
from iris.report.palette import ALGORITHMS as ALGORITHM_TONES

ROOT = Path(__file__).parent.parent
DATASETS = sorted((ROOT / "dataset").glob("*.json"))
QUICK = ",".join(way for way in WAYS if way != "hangs")
ON_TWO = ("--num_ranks=2", f"--heap_size={256 << 20}")
"""On GPUs the heap has the size of simulated ones: the default, a quarter of the memory, is not free beside others."""
TWO = ["trial", *ON_TWO, "--axis_count=8"]
SIMULATED = BACKEND == "sim"
pytestmark = marks_for(2)


@pytest.fixture(scope="module", autouse=True)
def _cases() -> None:
    cases.load()


def lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def device_name() -> str:
    return "simulated" if SIMULATED else torch.cuda.get_device_name(0)


def by_way(results: Sequence[Record]) -> dict[str, Record]:
    return {one["params"]["way"]: one for one in results}


def test_the_case_in_the_docstring_is_a_program(tmp_path: Path) -> None:
    program, command_line = [textwrap.dedent(block) for block in re.findall(r"::\n\n((?:    .*\n|\n)+)", bench.__doc__)]
    script = tmp_path / "my_cases.py"
    script.write_text(program)
    program, name, *arguments = command_line.split()
    assert (program, name) == ("python", script.name)
    done = subprocess.run([python(), name, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    results = lines(tmp_path / "copies.jsonl")
    assert [(one["params"]["dtype"], one["params"]["count"]) for one in results] == [
        (dtype, 1 << power) for dtype in ("fp16", "fp32") for power in (10, 11, 12)
    ]
    assert all(one["validated"] for one in results)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("pow2:10:13", [1024, 2048, 4096, 8192]),
        ("linear:1024:4096:1024", [1024, 2048, 3072, 4096]),
        ("linear:1:6:2", [1, 3, 5]),
        ("pull,push", ["pull", "push"]),
        ("bf16", ["bf16"]),
        ("3, 1.5,x", [3, 1.5, "x"]),
    ],
)
def test_values_on_the_command_line(text: str, values: list[object]) -> None:
    assert parse_values("M", text) == values


@pytest.mark.parametrize(
    "text", ["", "1,,2", "pow2:3", "pow2:4:3", "pow2:a:b", "linear:1:2", "linear:5:1:1", "linear:1:5:0"]
)
def test_values_of_no_form_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"--axis_M: expected .*(pow2:LO:HI|START:STOP:STEP)"):
        parse_values("M", text)


def test_words_that_look_like_numbers_stay_words() -> None:
    assert parse_values("triton", "3.6,3.7", ["3.6", "3.9"]) == ["3.6", 3.7]


def test_numbers_of_an_axis_of_fractions_are_fractions(capsys: pytest.CaptureFixture[str]) -> None:
    """Records have them as fractions, too, so that ``--resume`` finds them again."""
    with mock.patch.dict("iris.bench.case._cases"):

        @bench.register
        @bench.axis("scale", (0.5, 1.0))
        @bench.axis("triton", ("3.6", "3.9"))
        def scaled(state: State, ctx: Iris) -> None: ...

        assert (
            bench.main(["scaled", "--num_ranks=2", "--benchmark_list", "--axis_scale=1,2.5", "--axis_triton=3.9"]) == 0
        )
        assert bench.main(["scaled", "--num_ranks=2", "--benchmark_list", "--axis_scale=pow2:1:2"]) == 0
    scales = [line.split("scale=")[1].split()[0] for line in capsys.readouterr().out.splitlines()]
    assert scales == ["1.0", "2.5", "2.0", "2.0", "4.0", "4.0"]


def with_a_list(params: Any, world_size: int) -> Any:
    return params | {"tile": [1, 2]}


def test_what_a_case_makes_of_its_parameters_is_checked() -> None:
    with mock.patch.dict("iris.bench.case._cases"):

        @bench.register(localize=with_a_list)
        @bench.axis("rows", (8,))
        def tiled(state: State, ctx: Iris) -> None: ...

        expected = r"bench\.register: localize: tile: expected words or finite numbers, .* got \[1, 2\]"
        with pytest.raises(ArgumentError, match=expected):
            bench._run(["tiled", "--num_ranks=2", "--benchmark_list"])


def test_values_and_points_are_counted_before_they_are_made() -> None:
    assert len(parse_values("M", "linear:1:100000:1")) == 100_000
    many = r"expected at most 100000 values or points, got "
    for text, count in (
        ("linear:1:1000000000:1", 10**9),
        ("linear:0:100000:1", 100_001),
        (f"linear:1:{10**30}:1", 10**30),
    ):
        with pytest.raises(ArgumentError, match=rf"M: {many}{count}$"):
            parse_values("M", text)
    thousands = {name: range(10_000) for name in ("M", "N", "count")}
    with pytest.raises(ArgumentError, match=rf"M,N: {many}{10**8}$"):
        Axis(("M", "N"), ((1, 2),)).overridden(thousands)
    with pytest.raises(ArgumentError, match=rf"axes: {many}{10**5 + 10**4}$"):
        expand([Axis(("count",), ((1,),)), Axis(("way",), tuple((way,) for way in range(11)))], thousands)


def test_decorators_make_axes_in_the_order_written() -> None:
    assert [(axis.names, axis.variant) for axis in axes_of(trial)] == [(("count",), False), (("way",), True)]
    assert [axis.rows for axis in axes_of(ranges)] == [((8,), (16,), (32,)), ((10,), (20,), (30,))]
    points = expand(axes_of(ranges), {"step": [7]})
    assert points == [{"count": 8, "step": 7}, {"count": 16, "step": 7}, {"count": 32, "step": 7}]


def test_an_axis_of_several_names_is_overridden_in_part() -> None:
    shapes = Axis(("M", "N"), ((1, 10), (2, 10), (3, 30)))
    assert shapes.overridden({"M": [5, 6]}).rows == ((5, 10), (6, 10), (5, 30), (6, 30))
    assert shapes.overridden({}).rows == shapes.rows


def test_an_axis_without_values_is_refused() -> None:
    with pytest.raises(ArgumentError, match="M,N: expected values, each with 2 parts"):
        bench.axis("M,N", [(1, 2), (3,)])


def test_a_word_is_no_list_of_values() -> None:
    with pytest.raises(ArgumentError, match=r"dtype: expected several values, such as a tuple, got 'fp16'\. One is"):
        bench.axis("dtype", "fp16")


def test_the_number_of_ranks_is_no_axis() -> None:
    """Its values used to be recorded beside times of another number of ranks."""
    with pytest.raises(
        ArgumentError, match=r"axis: M,num_ranks: expected another name, got num_ranks\. .*--num_ranks N"
    ):
        bench.axis("M,num_ranks", [(1, 2)])


def test_an_axis_that_a_case_lacks_has_a_default() -> None:
    state = bench.State(cast(Any, None), {"M": 8}, {})
    assert (state.get("M", 1), state.get("N", 2), state.get("K")) == (8, 2, None)


def test_an_axis_may_have_the_small_name_of_another_cases(capsys: pytest.CaptureFixture[str]) -> None:
    """Without such an axis ``--axis_m`` means ``--axis_M``."""
    with mock.patch.dict("iris.bench.case._cases"):

        @bench.register
        @bench.axis("m", (16, 32))
        def small(state: State, ctx: Iris) -> None: ...

        given = ["--num_ranks=2", "--benchmark_list", "--benchmark_filter=small|matmul shape=8x", "--axis_m=3"]
        assert bench.main(["small", "matmul", *given, "--axis_M=8"]) == 0
    assert {"small m=3"} < set(capsys.readouterr().out.splitlines())


def test_two_axes_of_one_name_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"bench\.axis: x,y: expected a name that no other axis has, got x"):
        bench.axis("x,y", [(1, 2)])(bench.axis("x", [3])(lambda state, ctx: None))


def test_a_case_without_axes_has_no_parameters() -> None:
    with pytest.raises(ArgumentError, match="state: 'x': expected nothing, as the case has no axes, got a name"):
        State(mock.Mock(), {}, {})["x"]


@pytest.mark.parametrize("value", [torch.float16, None, float("nan"), [1, 2]])
def test_values_that_no_record_can_hold_are_refused(value: object) -> None:
    with pytest.raises(ArgumentError, match=r"^bench.axis: x: expected words or finite numbers, .* got "):
        bench.axis("x", [1, value])


def test_list_and_filter(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--benchmark_filter", "count=(8|32) step=.0", "--axis_step=10,25,30"]
    assert bench.main(["ranges", "--num_ranks=2", "--benchmark_list", *chosen]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed == [f"ranges count={count} step={step}" for count in (8, 32) for step in (10, 30)]


def test_an_axis_of_true_and_false_takes_these_and_no_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["switch", "--num_ranks=2", "--axis_on=False", "--benchmark_list"]) == 0
    assert capsys.readouterr().out == "switch on=False\n"
    for arguments in (["switch", "--axis_on=0"], ["ranges", "--axis_step=True"]):
        with pytest.raises(ArgumentError, match=r"expected (one of True, False, got 0|whole numbers, got True)$"):
            bench._run([*arguments, "--num_ranks=2", "--benchmark_list"])


def test_help_names_cases_and_axes(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        (["--help"], ["all_gather_matmul", "rma", "--resume FILE", "iris bench CASE --help", "skew µs  "]),
        (["trial", "--help"], ["all that can go wrong", "--axis_way LIST", "default: 8, 16", "simulated 3)"]),
    ):
        with pytest.raises(SystemExit, match="0"):
            bench.main(arguments)
        printed = capsys.readouterr().out
        assert [text for text in expected if text not in printed] == []


def test_mistakes_on_the_command_line_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArgumentError, match=r"case: expected one of .*trial.*, got painting"):
        bench._run(["painting"])
    with pytest.raises(SystemExit, match="2"):
        bench._run(["--num_ranks", "2", "trial"])
    assert "unrecognized arguments: trial; cases come before all options" in capsys.readouterr().err
    with pytest.raises(ArgumentError, match="--dataset: expected a case with an axis M,N,K, got trial"):
        bench._run(["trial", f"--dataset={DATASETS[0]}"])
    with pytest.raises(SystemExit, match="2"):
        bench._run([*TWO, "--benchmark_filter=zzz"])
    assert "no point's name matches 'zzz'; --benchmark_list lists them" in capsys.readouterr().err
    for axis, complaint in (
        ("algorithm=pul", "--axis_algorithm: expected one of auto, .*pull.*, got pul"),
        ("algorithm=pul+num_sms=1", r"--axis_algorithm: expected one of auto, .*pull.*, got pul\+num_sms=1"),
        ("b_layout=transposed+k=1", r"--axis_b_layout: expected one of row_major, transposed, got transposed\+k=1"),
        ("dtype=fp64", "--axis_dtype: expected one of bf16, fp16, fp32, int8, fp8, got fp64$"),
        ("m=12x", "--axis_M: expected whole numbers, got 12x"),
        ("n=1.5", "--axis_N: expected whole numbers, got 1.5"),
        ("k=-8", "--axis_K: expected positive numbers, got -8"),
        ("b_layout=sideways", "--axis_b_layout: expected one of row_major, transposed, got sideways"),
        ("gather_dim=0,2", "--axis_gather_dim: expected one of 0, 1, got 2"),
        ("gather_dim=1.0", "--axis_gather_dim: expected whole numbers, got 1.0"),
        ("algorithm=push+size=3", "options behind an algorithm: expected FIELD=VALUE, of FusedConfig, got size=3"),
        (
            "algorithm=push+comm_sms",
            "expected FIELD=VALUE, of FusedConfig, got comm_sms. FIELD is one of block_size_m,",
        ),
        ("algorithm=push+algorithm=pull", "expected FIELD=VALUE, of FusedConfig, got algorithm=pull"),
        ("algorithm=push+comm_sms=few", "comm_sms: expected of type int, got 'few'"),
        (
            "algorithm=pull+num_rounds=2+k_per_flag=2",
            "behind pull: expected what pull has a use for, got k_per_flag=2. It has block_size_m,.* num_rounds, num_w",
        ),
        ("algorithm=push+kpack=2,decomposed+num_sms=4", "behind decomposed: .* got num_sms=4. It has block_size_m"),
    ):
        with pytest.raises(ArgumentError, match=complaint):
            bench._run(["all_gather_matmul", "--num_ranks=2", f"--axis_{axis}", "--benchmark_list"])
    with pytest.raises(ArgumentError, match=r"--resume: .* got .*none: there is no such file"):
        bench._run([*TWO, f"--resume={tmp_path / 'none'}"])
    with pytest.raises(ArgumentError, match="--resume: expected a file of results"):
        bench._run([*TWO, f"--resume={tmp_path / 'none'}", "--benchmark_list"])
    with pytest.raises(ArgumentError, match=f"^bench: {tmp_path}: expected a file that can be written, got a folder$"):
        bench._run([*TWO, f"--benchmark_out={tmp_path}"])
    wrong = ["--benchmark_filter=(", "--timeout_s=0", "--timeout_s=inf", "--timeout_s=nan", "--timeout_s=x",
             "--num_ranks=0", "--num_ranks=17", "--warmup=-1"]  # fmt: skip
    for arguments in ([], *([*TWO, one] for one in wrong), [*TWO, "--resume=a", "--benchmark_out=b"]):
        with pytest.raises(SystemExit, match="2"):
            bench.main(arguments)


@pytest.mark.parametrize("arguments", [["painting"], [*TWO, "--axis_way=rigt"], [*TWO, "--axis_count=x"]])
def test_a_mistake_is_one_line_in_a_script_of_ones_own(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py", *arguments])
    assert bench.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("iris bench: error: ")


def test_a_data_set_leaves_out_cases_that_nobody_named_and_that_take_no_shapes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    dataset = tmp_path / "one.json"
    dataset.write_text('[{"m": 8, "n": 8, "k": 8, "op": ["matmul_all_reduce"]}]')
    assert bench.main(["--num_ranks=2", f"--dataset={dataset}", "--benchmark_filter=auto", "--benchmark_list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["matmul_all_reduce"]


def test_what_no_record_can_hold_is_refused() -> None:
    state = bench.State(cast(Any, None), {}, {})
    for call in (
        lambda: state.add_counter("rate", float("nan")),
        lambda: state.add_counter("huge", 1.01 * report.MAX_NUMBER),
        lambda: state.add_counter("huge", -1.01 * report.MAX_NUMBER),
        lambda: state.set_floor(float("inf")),
        lambda: state.set_flops(cast(int, float("nan"))),
        lambda: state.set_repeat(0),
        lambda: state.set_warmup(-1),
    ):
        with pytest.raises(ArgumentError, match=r"expected a (finite|whole) number.*, got"):
            call()
    state.add_counter("huge", -report.MAX_NUMBER)  # the limit of a report
    for call in (
        lambda: state.set_bytes(-1),
        lambda: state.set_floor(-1e-3),
        lambda: state.add_counter(cast(str, 3), 3),
        lambda: state.set_config({"dtype": torch.float16}),
    ):
        with pytest.raises(ArgumentError, match=r"^state: .* expected .*, got"):
            call()


def test_any_kind_of_number_can_be_recorded() -> None:
    state = bench.State(cast(Any, None), {}, {})
    state.set_flops(cast(int, np.int64(2**60 + 1)))
    state.set_bytes(cast(int, 2e9))
    state.set_deterministic(cast(bool, torch.tensor(True)))
    assert json.dumps([state.outcome.flops, state.outcome.nbytes]) == f"[{2**60 + 1}, 2000000000]"
    assert state.outcome.deterministic is True


def test_a_case_may_skip_without_a_reason() -> None:
    with pytest.raises(Exception, match="says so"):
        bench.State(cast(Any, None), {}, {}).skip()


def test_what_is_skipped_is_not_timed() -> None:
    state = bench.State(cast(Any, None), {}, {})
    state.call = lambda: None
    with pytest.raises(Exception, match="late"):
        state.skip("late")
    assert state.call is None


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a run in which many things go wrong, including the death of rank 1."""
    out = tmp_path_factory.mktemp("bench") / "results.jsonl"
    assert bench.main([*TWO, f"--axis_way={QUICK}", f"--benchmark_out={out}", "--commit=abc"]) == 1
    return out


def test_a_right_result_has_times(measured: Path) -> None:
    right = by_way(lines(measured))["right"]
    time_ms = right["time_ms"]
    assert right["validated"] is True
    assert right["error"] is None
    assert (right["world_size"], right["nbytes"], right["flops"], right["counters"]) == (2, 32, 1000, {"answer": 42})
    assert 0 < time_ms["min"] <= time_ms["p10"] <= time_ms["median"] <= time_ms["p90"]
    assert time_ms["calls"] >= 3
    assert right["gbytes_per_s"] == pytest.approx(32 / time_ms["median"] / 1e6)
    assert right["tflops_per_gpu"] == pytest.approx(1e3 / time_ms["median"] / 1e9)
    assert right["floor_share"] == pytest.approx(1e-6 / time_ms["median"])
    told = right["environment"]
    assert (told["hardware"], told["backend"], told["commit"], told["host_ranks"]) == (device_name(), BACKEND, "abc", 2)
    assert (right["back_to_back_ms"] is None, right["host_us"] is None) == (SIMULATED, SIMULATED)


@pytest.mark.parametrize(
    ("way", "validated", "error"),
    [
        ("wrong", False, "wrong result: another vector (rank 0 of 2)"),
        ("drifts", False, " more calls: another vector (rank 0 of 2)"),
        ("stops", False, " more calls: another vector (ranks 0, 1 of 2)"),
        ("doubts", False, "validate_fn raised AssertionError: no vector at all (rank 1 of 2)"),
        ("says_yes", False, "validate_fn must return a str, empty if the result is right; it returned True"),
        ("idles", None, "the case ended without state.exec(...) or state.skip(...)"),
        ("raises", None, "RuntimeError: no luck today"),
        ("dies", None, "rank 1's process ended: exit code 3"),
    ],
)
def test_what_fails_has_no_time(measured: Path, way: str, validated: bool | None, error: str) -> None:
    one = by_way(lines(measured))[way]
    assert one["validated"] is validated
    assert error in one["error"]
    assert [one[name] for name in ("time_ms", "gbytes_per_s", "tflops_per_gpu", "floor_share")] == [None] * 4


def test_a_skipped_point_says_why(measured: Path) -> None:
    skipped = by_way(lines(measured))["skips"]
    assert (skipped["skipped"], skipped["error"], skipped["validated"]) == ("nobody needs it", None, None)


def test_a_broken_file_of_rows_is_told_before_ranks_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("{")
    monkeypatch.setenv("IRIS_TUNED", str(tmp_path / "rows.json"))
    with pytest.raises(ArgumentError, match=r"rows\.json: expected"):
        bench._run([*TWO, "--axis_way=right"])


def test_a_run_in_which_all_was_skipped_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*TWO, "--axis_way=skips"]) == 1
    told = capsys.readouterr()
    assert "nobody needs it" in told.out
    assert told.err.splitlines()[-1] == "nothing was measured: 1 point skipped"


def test_an_error_at_the_end_does_not_hide_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*TWO, "--axis_way=right", "--benchmark_format=json", "--benchmark_out=/dev/full"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["validated"] is True
    assert "/dev/full: expected a file that can be written, got No space left on device" in told.err


@pytest.mark.parametrize("redrawn", [True, False])
def test_what_is_done_within_a_point_is_shown_where_it_is_redrawn(
    monkeypatch: pytest.MonkeyPatch, redrawn: bool
) -> None:
    shown: list[str] = []
    progress = contextmanager(lambda total: iter([lambda following, finished: shown.append(following)]))
    monkeypatch.setattr(command, "progress", progress)
    monkeypatch.setattr(command, "redrawn", lambda: redrawn)
    assert bench.main([*TWO, "--axis_way=wrong,right", "--repeat=1"]) == 1
    within = [
        "checking wrong, 1 of 2: trial count=8",
        "checking right, 2 of 2: trial count=8",
        "timing right, round 5 of 5: trial count=8",
    ]
    assert shown.count("") == 1  # at the end; the last message may be read only then
    assert [one for one in shown if one] == ["starting 2 ranks", "trial count=8", *(within if redrawn else [])]


def test_a_status_message_that_nobody_reads_is_lost() -> None:
    received: list[str] = []
    with messages.receiving(received.append) as address, closing(messages.StatusSender(address)) as send:
        send("something")
    with closing(send):
        send("too late")
    with closing(messages.StatusSender(None)) as send:
        send("to nobody")
    assert received == ["something"]


def test_a_rank_that_hangs_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*TWO, "--axis_way=hangs", "--timeout_s=1", "--benchmark_format=json"]) == 1
    told = capsys.readouterr()
    assert told.out.count("\n") == 1, told.err
    one = json.loads(told.out)
    assert "did not finish within 1 s" in one["error"] and "Traceback" not in one["error"]


def test_variants_that_are_timed_in_turns_share_the_time_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def run(fn: object, args: object, timeout_s: float) -> list[list[Outcome]]:
        limits.append(timeout_s)
        return [[], []]

    ranks = driver.Ranks(2, Settings(timeout_s=7))
    monkeypatch.setattr(ranks, "start", lambda: None)
    monkeypatch.setattr(ranks, "_run", run)
    variants: list[Params] = [{"way": way} for way in ("right", "wrong", "slow")]
    for several in (variants[:1], variants):
        assert ranks.measure(Group(registered()["trial"], several)) == [[], []]
    assert limits == [7, 21]


@pytest.mark.parametrize(("free", "stays"), [(49, False), (50, True)])
def test_a_context_is_replaced_when_half_of_its_heap_is_taken(free: int, stays: bool) -> None:
    ctx, new = mock.Mock(heap_size=100, heap_largest_free_bytes=free, backend_name="sim"), mock.Mock()
    assert contexts.roomy(ctx, lambda: new) is (ctx if stays else new)
    assert ctx.close.called is not stays


@pytest.mark.parametrize(("timeout_s", "waits_s"), [(7, 3.5), (1000, 60)])
def test_waits_end_before_the_time_of_a_point(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, waits_s: float
) -> None:
    """The error then names the rank that was waited for."""
    opened = mock.Mock()
    monkeypatch.setattr(session, "iris", opened)
    monkeypatch.setattr(session, "_ctx", None)
    session._context(Settings(timeout_s))
    assert opened.call_args.kwargs == {"timeout_s": waits_s}


@pytest.mark.parametrize(("text", "nbytes"), [("65537", 65537), ("64K", 1 << 16), ("3m", 3 << 20), ("2G", 2 << 30)])
def test_sizes_of_heaps_have_units(text: str, nbytes: int) -> None:
    assert heap_bytes(text) == nbytes


def test_of_several_complaints_the_first_ranks_is_told() -> None:
    said = ["", "no luck", "", "no memory"]
    ctx = SimpleNamespace(world_size=4, broadcast=lambda complaint, rank: said[rank])
    assert agreed(cast(Any, ctx), "no luck") == "no luck (ranks 1, 3 of 4)"


def test_a_case_that_exits_is_lost_alone() -> None:
    """It counts as if it had raised; the points after it are measured."""
    ranks = driver.Ranks(2, Settings(1.0))
    with (
        mock.patch.object(ranks, "start"),
        mock.patch.object(ranks, "kill") as kill,
        mock.patch.object(ranks, "_run", return_value=[[Outcome()], None]),
        pytest.raises(LaunchError, match=r"^rank 1: the case has called sys.exit\(\)$"),
    ):
        ranks.measure(Group(registered()["trial"], [{"way": "right"}]))
    kill.assert_called_once()


def test_what_a_case_says_of_a_file_with_an_odd_name_can_be_read_again(tmp_path: Path) -> None:
    """Names of files need not be UTF-8; Python reads other bytes as lone surrogates."""
    said = Outcome(error="FileNotFoundError: " + os.fsdecode("café".encode("latin-1") + " ×".encode()))
    where: dict[str, str | int | None] = {"hardware": "simulated", "backend": "sim", "date": "2026-11-26T12:00:00Z"}
    one = records.record("trial", {"way": "raises"}, [said], where, 2, "batch")
    with records.appending(tmp_path / "a.jsonl") as append:
        append([one])
    with open(tmp_path / "b.jsonl", "w") as printed:
        tables.FORMATS["json"]([one], {}, printed)
    for name in ("a.jsonl", "b.jsonl"):
        (read,), (reported,) = records.load(tmp_path / name), report.read(tmp_path / name)
        assert read["error"] == reported.error == "FileNotFoundError: caf? ×"


def test_a_resumed_run_measures_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C comes after the first point; the run goes on in the same file, in which a kill has left half a line."""
    out = tmp_path / "results.jsonl"
    arguments = ["trial", *ON_TWO, "--axis_way=right"]
    measured = driver.measured

    def interrupted(ranks: Any, group: Group) -> Iterator[list[Record]]:
        if group.variants[0]["count"] == 16:
            raise KeyboardInterrupt
        yield from measured(ranks, group)

    monkeypatch.setattr(command, "measured", interrupted)
    assert bench.main([*arguments, f"--benchmark_out={out}"]) == STOPPED
    assert f"stopped after 1 of 2 points; --resume {out} goes on" in capsys.readouterr().err
    monkeypatch.undo()
    (first,) = lines(out)
    with open(out, "a") as file:
        file.write('{"schema": 1, "case": "tri')
    assert bench.main([*arguments, f"--resume={out}", "--benchmark_list"]) == 0
    (left,) = capsys.readouterr().out.splitlines()
    assert "count=16" in left
    assert bench.main([*arguments, f"--resume={out}"]) == 0
    assert [one["params"]["count"] for one in lines(out)] == [8, 16]
    assert lines(out)[0] == first
    printed = capsys.readouterr().out
    assert all(f" {count} " in printed for count in (8, 16))
    assert bench.main([*arguments, f"--resume={out}", "--benchmark_list"]) == 0
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "nothing is missing\n")
    foreign = [{**one, "counters": None, "time_ms": {**one["time_ms"], "calls": None}} for one in lines(out)]
    out.write_text("".join(f"{json.dumps(one)}\n" for one in foreign))
    assert bench.main([*arguments, f"--resume={out}", "--repeat=3"]) == 0
    assert "kept" not in capsys.readouterr().err


def test_a_resumed_run_measures_a_group_in_turns_as_a_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.jsonl"
    assert bench.main([*TWO, "--axis_way=right", f"--benchmark_out={out}"]) == 0
    both = [*TWO, "--axis_way=right,skips", f"--resume={out}"]
    assert bench.main(both) == 0
    assert "measured again, in turns with others of their problem: 1 point\n" in capsys.readouterr().err
    old, *new = lines(out)
    assert [one["params"]["way"] for one in new] == ["right", "skips"]
    assert new[0]["batch"] == new[1]["batch"] != old["batch"]
    assert bench.main(both) == 0
    assert lines(out) == [old, *new]
    out.write_text("".join(json.dumps(one) + "\n" for one in (old, new[1])))
    assert bench.main(both) == 0  # both are there, from two batches
    assert len({one["batch"] for one in lines(out)[2:]}) == 1


def test_what_ends_no_rank_is_timed_in_turns_without_what_does(measured: Path) -> None:
    found = by_way(lines(measured))
    batches = [one["batch"] for one in found.values()]
    assert found["right"]["batch"] == found["skips"]["batch"]
    assert len(set(batches)) == len(batches) - 1


def test_other_hardware_and_failures_are_measured_again(
    measured: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = by_way(lines(measured))
    elsewhere = {**found["skips"], "environment": {**found["skips"]["environment"], "hardware": "NVIDIA H200"}}
    known = [found["skips"], found["right"], found["wrong"], elsewhere, found["dies"]]
    keys = list(map(records.key_of, known[:3]))
    groups = [[key] for key in keys]
    assert list(command._done(known, groups, "abc")) == keys[:2]
    assert capsys.readouterr().err == "measured again after a failure: 1 point\n"
    monkeypatch.setattr(command, "here", lambda: ("NVIDIA B200", "cuda"))
    assert command._done(known, groups, "abc") == {}
    assert "not counted, as measured on other hardware than NVIDIA B200: 3 points\n" in capsys.readouterr().err


def test_points_of_another_commit_or_other_versions_are_kept_and_counted(
    measured: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = by_way(lines(measured))
    old = {**found["skips"], "environment": {**found["skips"]["environment"], "commit": None, "triton": "3.0"}}
    keys = list(map(records.key_of, (found["right"], old)))
    assert list(command._done([found["right"], old], [keys], "def")) == keys
    assert capsys.readouterr().err.splitlines() == [
        "kept, though measured with commit abc (now def): 1 point",
        f"kept, though measured with triton 3.0 (now {triton.__version__}), commit unknown (now def): 1 point",
    ]
    calls = found["right"]["time_ms"]["calls"]
    assert list(command._done([found["right"]], [keys[:1]], "abc", calls)) == keys[:1]
    assert capsys.readouterr().err == ""
    assert list(command._done([found["right"], old], [keys], "abc", 99)) == keys
    assert f"kept, though measured with {calls} calls (now 99): 1 point\n" in capsys.readouterr().err
    monkeypatch.setattr(environment, "_VARIABLES", ("NCCL_ALGO",))  # others may be set on this machine
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    plain = {**found["right"], "environment": {**found["right"]["environment"], "variables": None}}
    assert list(command._done([plain], [keys[:1]], "abc")) == keys[:1]
    assert capsys.readouterr().err == "kept, though measured with variables none (now NCCL_ALGO=Ring): 1 point\n"


@pytest.mark.parametrize(
    ("tail", "kept"),
    [(b"", b""), (b'{"schema": 1, "ca', b""), (b'{"sch', b""), (b"WHOLE", b"WHOLE\n")],
)
def test_only_the_half_of_a_record_is_cut_off(measured: Path, tmp_path: Path, tail: bytes, kept: bytes) -> None:
    line, file = measured.read_bytes().splitlines(keepends=True)[0], tmp_path / "some.jsonl"
    file.write_bytes(line + tail.replace(b"WHOLE", line.rstrip()))
    with records.appending(file) as append:
        append([json.loads(line)])
    whole = line + kept.replace(b"WHOLE", line.rstrip())
    assert file.read_bytes().startswith(whole) and len(records.load(file)) == whole.count(b"\n") + 1


@pytest.mark.parametrize("content", ["a note", "a,b\n1,2\n", '{"a": 1}', '{"rows": [\n{"schema": 1'])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(content)
    with pytest.raises(ArgumentError, match=r"mine.txt:1: expected (a JSON object|schema 1)"):
        bench._run([*TWO, "--axis_way=right", f"--benchmark_out={file}"])
    assert file.read_text() == content


def test_two_runs_do_not_share_a_file(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    with (
        records.appending(out),
        pytest.raises(ArgumentError, match=r"results\.jsonl: expected a file that no other run writes"),
    ):
        bench._run([*TWO, "--axis_way=right", f"--benchmark_out={out}"])
    with records.appending(out):
        pass


def test_a_broken_line_is_named(measured: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text(measured.read_text().splitlines()[0] + '\n{"schema": 7}\n')
    with pytest.raises(ArgumentError, match=r"broken.jsonl:2: expected schema 1, got schema 7"):
        records.load(broken)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one.pop("case"), "case: text, got nothing"),
        (lambda one: one.update(batch=7), "batch: text, got 7"),
        (lambda one: one.update(environment="x"), "a JSON object as environment, got 'x'"),
        (lambda one: one.update(params=[["count", 8]]), r"a JSON object as params, got \[\["),
        (lambda one: one["params"].update(count=[8]), r"params.count: text, a number, a flag or null, got \[8\]"),
        (lambda one: one.update(host_us="1"), "host_us: a number from 0 to .*, got '1'"),
        (lambda one: one["counters"].update(answer=None), "counters.answer: a number, got nothing"),
        (lambda one: one["time_ms"].pop("p90"), "time_ms.p90: a number, got nothing"),
        (lambda one: one["time_ms"].pop("rank_skew"), "time_ms.rank_skew: a number, got nothing"),
        (lambda one: one["time_ms"].update(median=0), "time_ms.median: 1e-09 or more, got 0"),
        (lambda one: one.update(flops=10**400), "flops: a number from 0 to .*, got 10"),
        (lambda one: one.update(config={"x": float("nan")}), "a JSON object, got .*NaN is no number"),
        (lambda one: one.update(case="\udcff"), "a JSON object, got .*surrogates not allowed"),
    ],
)
def test_a_thin_or_odd_record_is_named(
    measured: Path, tmp_path: Path, change: Callable[[Record], object], words: str
) -> None:
    one, file = by_way(lines(measured))["right"], tmp_path / "odd.jsonl"
    change(one)
    file.write_text(f"{measured.read_text()}\n{json.dumps(one)}\n")
    place = len(lines(measured)) + 2
    with pytest.raises(ArgumentError, match=rf"odd\.jsonl:{place}: expected {words}"):
        bench._run([*TWO, "--axis_way=right", f"--resume={file}"])


@pytest.mark.parametrize("end", ["", "\n"])
def test_deep_nesting_is_named_and_kept(tmp_path: Path, end: str) -> None:
    file, line = tmp_path / "deep.jsonl", '{"schema":' + "[" * 10**5 + end
    file.write_text(line)
    with pytest.raises(ArgumentError, match=r"deep\.jsonl:1: expected a JSON object, got .*recursion"):
        bench._run([*TWO, "--axis_way=right", f"--benchmark_out={file}"])
    assert file.read_text() == line


def test_records_go_into_a_pipe() -> None:
    reader, writer = os.pipe()
    assert bench.main([*TWO, "--axis_way=right", f"--benchmark_out=/dev/fd/{writer}"]) == 0
    os.close(writer)
    with open(reader, "rb") as file:
        assert [one["params"]["count"] for one in map(json.loads, file)] == [8]


def test_a_device_is_neither_read_nor_locked(measured: Path) -> None:
    (one, *_) = lines(measured)
    for _ in range(2):
        with records.appending(Path("/dev/null")) as append, records.appending(Path("/dev/null")):
            append([one])
    with (
        records.appending(Path("/dev/full")) as append,
        pytest.raises(ArgumentError, match="/dev/full: expected a file that can be written, got No space left"),
    ):
        append([one])
    with pytest.raises(ArgumentError, match="--resume: expected a file of results, got /dev/null, which is none"):
        records.load(Path("/dev/null"))


def test_what_is_printed_stands_behind_records_in_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        arguments = ["--axis_way=right", "--benchmark_format=json", f"--benchmark_out=/dev/fd/{out.fileno()}"]
        assert bench.main([*TWO, *arguments]) == 0
    record, printed = lines(tmp_path / "out")
    assert printed == {**record, "speedup": None}


def test_a_file_of_records_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refused)
    (file := tmp_path / "x.jsonl").touch()
    with (
        pytest.raises(ArgumentError, match=r"x\.jsonl: expected a file that can be read, got Permission denied"),
        records.appending(file),
    ):
        pass
    with pytest.raises(ArgumentError, match=r"x\.jsonl: expected a file that can be read, got Permission denied"):
        records.load(file)


def has_processes(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("wait_s", some([pytest.param(0.5, id="importing"), pytest.param(5.0, id="measuring")]))
def test_ctrl_c_stops_a_run_and_all_ranks(tmp_path: Path, wait_s: float) -> None:
    out = tmp_path / "results.jsonl"
    arguments = ["bench", "rma", "--num_ranks=2", "--repeat=1000000", f"--benchmark_out={out}"]
    run, _, told = interrupted(arguments, "rma", wait_s)
    assert run.returncode == STOPPED
    assert told.splitlines()[-1] == f"stopped after 0 of 4 points; --resume {out} goes on"
    assert "Traceback" not in told
    until = time.monotonic() + 10
    while has_processes(run.pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not has_processes(run.pid)


def shown(measured: Path, name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The output at the end of a run."""
    found = by_way(lines(measured))
    tables.FORMATS[name]([found[way] for way in QUICK.split(",")], registered(), sys.stdout)
    return capsys.readouterr().out


def test_json_lines(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = [json.loads(line) for line in shown(measured, "json", capsys).splitlines()]
    assert [one.pop("speedup") for one in printed] == [None] * len(printed)
    assert by_way(printed) == by_way(lines(measured))


def test_csv(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["way"]: row for row in csv.DictReader(io.StringIO(shown(measured, "csv", capsys)))}
    assert list(rows) == QUICK.split(",")
    right = by_way(lines(measured))["right"]
    assert float(rows["right"]["time_ms_median"]) == right["time_ms"]["median"]
    assert (rows["right"]["answer"], rows["right"]["count"], rows["wrong"]["time_ms_median"]) == ("42.0", "8", "")
    rated = right["environment"]["backend"] != "sim"  # else no rate means anything
    assert [bool(rows["right"][name]) for name in tables.RATES] == [
        rated and right[name] is not None for name in tables.RATES
    ]


def test_csv_of_what_is_called_as_other_columns(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = by_way(lines(measured))["right"]
    one["params"] = {"case": "upper", "error": 3, "count": 8}
    one["counters"] = {"error": 5.0, "date": 7.0, "tries": 9.0}
    tables.FORMATS["csv"]([one], registered(), sys.stdout)
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert [row[name] for name in ("case", "axis_case", "error", "axis_error", "count")] == [
        one["case"], "upper", "", "3", "8",
    ]  # fmt: skip
    assert [row[name] for name in ("counter_error", "counter_date", "tries")] == ["5.0", "7.0", "9.0"]
    assert row["date"] == one["environment"]["date"]


@pytest.mark.parametrize("with_rich", [True, False])
def test_table(
    measured: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, with_rich: bool
) -> None:
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    printed = shown(measured, "console", capsys)
    assert f"trial: 2 × {device_name()}{', wall time' if SIMULATED else ''}, count=8" in printed
    assert "wrong: ERROR: wrong result: another vector (rank 0 of 2)" in printed
    assert "way=skips: skipped: nobody needs it" in printed
    rows = [line.split() for line in printed.splitlines()]
    verdicts = {row[0]: row[-1] for row in rows if row and row[0] in WAYS}
    expected = dict.fromkeys(("wrong", "drifts", "stops", "doubts", "says_yes"), "NO")
    expected |= {"right": "yes", "skips": "skipped"} | dict.fromkeys(("raises", "dies", "idles"), "error")
    assert verdicts == expected
    assert any("answer" in row for row in rows)
    assert next(row for row in rows if row[:1] == ["right"])[-2] == "42"


def test_counters_are_shown_with_six_digits_at_most(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = by_way(lines(measured))["right"]
    counted = {**right, "counters": {"large": -1.23456789e29, "long": 123456.7, "small": 1.23456789e-7}}
    tables.write_table([counted], registered(), sys.stdout)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[-4:-1] for row in rows if row[-1:] == ["yes"]] == [["-1.23457e+29", "123457", "1.235e-07"]]


def test_speed_up_is_over_nccl_on_the_same_shape_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    known = registered()
    made = [
        records.record(
            "matmul_all_reduce",
            {"shape": shape, "algorithm": algorithm},
            [Outcome(validated=True, seconds=[seconds])],
            {"hardware": "NVIDIA H200"},
            8,
            batch,
        )
        for shape, algorithm, seconds, batch in (
            ("a", "two_shot", 2.0, "1"),
            ("a", "nccl", 3.0, "1"),
            ("b", "nccl", 9.0, "2"),
            ("b", "push", 4.5, "2"),
            ("b", "ring", 4.5, "3"),
            ("b", "atomic", 4.5, None),
        )
    ]
    made[0]["deterministic"] = False
    tables.FORMATS["json"](made, known, sys.stdout)
    speedups = [json.loads(line)["speedup"] for line in capsys.readouterr().out.splitlines()]
    assert speedups == [1.5, 1, 1, 2, None, None]
    tables.FORMATS["console"](made, known, sys.stdout)
    printed = capsys.readouterr().out
    assert printed.count("yes*") == 1 and "* right, but two calls may differ" in printed
    assert "matmul_all_reduce: 8 × NVIDIA H200" in printed
    rows = [line.split() for line in printed.splitlines() if line.strip().startswith(("a ", "b "))]
    assert [row[-2] for row in rows if len(row) == len(rows[0])] == ["1.50", "1.00", "1.00", "2.00"]
    assert "gloo" not in printed
    simulated = [one | {"environment": {"hardware": "simulated", "backend": "sim"}} for one in made]
    tables.FORMATS["console"](simulated, known, sys.stdout)
    assert "nccl: gloo, in the simulator\n" in capsys.readouterr().out


def test_times_are_of_the_slowest_rank_of_each_call() -> None:
    outcomes = [
        Outcome(seconds=[0.020, 0.010, 0.011], back_to_back_s=0.6, host_s=1e-6),
        Outcome(seconds=[0.010, 0.030, 0.010], back_to_back_s=0.5, host_s=3e-6),
    ]
    one = records.record("trial", {}, outcomes, {}, 2)
    assert one["time_ms"] == {
        "median": pytest.approx(20),
        "min": pytest.approx(11),
        "p10": pytest.approx(12.8),
        "p90": pytest.approx(28),
        "rank_skew": pytest.approx(1),
        "calls": 3,
    }
    assert (one["back_to_back_ms"], one["host_us"]) == (pytest.approx(600), pytest.approx(3))


def test_a_wrong_result_is_no_success_whether_a_record_says_why_or_not() -> None:
    for validated, error, right in ((True, None, True), (None, None, True), (False, None, False), (None, "why", False)):
        one = records.record("trial", {}, [Outcome(validated=validated, error=error)], {}, 1)
        assert records.succeeded(one) == right


@pytest.mark.parametrize("path", DATASETS, ids=[path.stem for path in DATASETS])
def test_shipped_data_sets_are_valid(path: Path) -> None:
    assert Dataset.read(path).shapes("matmul" if path.stem == "stream_k" else "all_gather_matmul", 4)


def test_llm_shapes_are_shared_evenly_and_have_sources() -> None:
    content = json.loads((ROOT / "dataset" / "llm.json").read_text())
    assert set(content["models"]) == {entry["model"] for entry in content["entries"]}
    assert all("config.json of " in source for source in content["models"].values())
    for entry in content["entries"]:
        assert entry["source"]
        assert (entry["n"] if entry["op"] == "all_gather_matmul" else entry["k"]) % 8 == 0
    dataset = Dataset.read(ROOT / "dataset" / "llm.json")
    sizes = {int(shape["M"]) for shape in dataset.shapes("matmul_all_reduce", 8)}
    assert sizes == {1 << exponent for exponent in range(15)}
    with pytest.raises(ArgumentError, match="expected an entry for matmul_all_reduce at 3 ranks, got entries for"):
        dataset.shapes("matmul_all_reduce", 3)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("x", r"bad.json: expected JSON, got no JSON \(line 1, column 1: Expecting value\)$"),
        ("[]", r"bad.json, field 'entries': expected a list of at least one entry"),
        ("7", "bad.json, top level: expected an object, got 7"),
        ('[{"m": 1, "n": 2}]', "bad.json, entry 1, field 'k': expected a positive whole number, got nothing"),
        ('[{"m": 1, "n": 2, "k": 3}, {"m": "x", "n": 2, "k": 3}]', "entry 2, field 'm': expected a positive whole"),
        ('[{"m": 1, "n": true, "k": 3}]', "entry 1, field 'n': .* got True"),
        ('[{"m": 1, "n": 2, "k": 3, "q": 4}]', "entry 1, field 'q': expected no other fields than"),
        ('[{"m": 1, "n": 2, "k": 3, "dtype": "bf17"}]', "entry 1, field 'dtype': expected one of fp16"),
        ('[{"m": 1, "n": 2, "k": 3, "gather_dim": 2}]', "entry 1, field 'gather_dim': expected 0 or 1"),
        ('[{"m": 1, "n": 2, "k": 3, "gather_dim": 1.0}]', "entry 1, field 'gather_dim': expected 0 or 1, got 1.0"),
        ('[{"m": 1, "n": 2, "k": 3, "op": [4]}]', "entry 1, field 'op': expected the name of an op"),
        ('[{"m": 1, "n": 2, "k": 3, "op": "matmul_allreduce"}]', "entry 1, field 'op': expected matmul_all_reduce.?"),
        (
            '[{"m": 1, "n": 2, "k": 3, "op": "gather"}]',
            "entry 1, field 'op': expected one of .*all_gather_matmul, ",
        ),
        ('[{"m": 1, "n": 2, "k": 3, "op": []}]', "entry 1, field 'op': expected the name of an op"),
        (
            '{"models": {"a": "b"}, "m": 1, "entries": [{"n": 2, "k": 3}, {"n": 2, "k": 3, "model": "c"}]}',
            "entry 2, field 'model': expected one of a",
        ),
    ],
)
def test_a_wrong_data_set_names_file_entry_and_field(tmp_path: Path, content: str, complaint: str) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(content)
    with pytest.raises(ArgumentError, match=complaint):
        Dataset.read(bad)


def test_a_data_set_replaces_shapes_and_the_command_line_both(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    dataset = tmp_path / "shapes.json"
    dataset.write_text('{"m": [8, 16], "entries": [{"n": 6, "k": 4, "gather_dim": 1, "model": "x", "layer": "y"}]}')
    arguments = [
        "all_gather_matmul",
        "--num_ranks=2",
        f"--dataset={dataset}",
        "--axis_algorithm=pull",
        "--benchmark_list",
    ]
    assert bench.main([*arguments, "--axis_m=16,32"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"all_gather_matmul shape={m}x6x4 m={m} n=3 k=4 model=x layer=y dtype=bf16 gather_dim=1 algorithm=pull"
        for m in (16, 32)
    ]


def test_sizes_of_the_local_matmul() -> None:
    whole: dict[str, Any] = {"M": 8, "N": 12, "K": 16, "algorithm": "x"}
    cut = {op: local_params(whole, 4, op=op) for op in OPS}
    sizes = {op: (params["m"], params["n"], params["k"]) for op, params in cut.items()}
    assert sizes == {
        "all_gather_matmul": (8, 3, 16),
        "matmul_all_scatter": (8, 3, 16),
        "matmul_reduce_scatter": (8, 12, 4),
        "matmul_all_reduce": (8, 12, 4),
        "matmul": (8, 12, 16),
    }
    assert {params["shape"] for params in cut.values()} == {"8x12x16"}


def ways_of_matmul() -> list[tuple[bool, bool]]:
    operands = Operands(context(), "matmul", (24, 20, 16), torch.float32, 0)
    found = [ways._config(operands, name) for name in ("local", *ways.STREAM_K)]
    return [(config.stream_k, config.two_tiles) for config in found]


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_each_way_to_schedule_a_local_matmul_is_what_its_name_says(ranks: Ranks) -> None:
    ((local, *stream_k),) = ranks.run(ways_of_matmul)
    assert local[0] is False and stream_k == [(True, False), (True, True)]
    assert set(ways.ways_of("matmul")) <= {tone.name for tone in ALGORITHM_TONES}


def configs_beside_rows(op: str, rows: Path) -> tuple[FusedConfig, FusedConfig | None, FusedConfig | None]:
    """The config of a row, and those that the ways ``auto`` and ``untuned`` run with."""
    operands = Operands(context(), op, (24, 20, 16), torch.float32, 0)
    tuned_config = FusedConfig(
        "local" if op == "matmul" else "ring", block_size_m=16, block_size_n=16, block_size_k=16, group_size_m=3
    )
    if context().rank == 0:
        key = tuned.row_key(operands.problem, target_of(context()).hardware)
        tuned.write(rows, [tuned.Row(*key, tuned_config, 1.0)])  # type: ignore[call-arg]
    context().barrier()
    with mock.patch.dict(os.environ, {"IRIS_TUNED": str(rows)}):
        pick.forget()
        state = State(context(), {}, {})
        auto, untuned = (ways.way(state, operands, name).config for name in (ways.AUTO, ways.UNTUNED))
    pick.forget()
    return tuned_config, auto, untuned


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("op", ["matmul", "matmul_all_reduce"])
def test_untuned_leaves_rows_out(ranks: Ranks, op: str, tmp_path: Path) -> None:
    for tuned_config, auto, untuned in ranks.run(configs_beside_rows, op, tmp_path / "rows.json"):
        assert auto == tuned_config != untuned and untuned is not None


def complaints(op: str, dtype: torch.dtype) -> dict[str, str]:
    """The complaints about a right result, and about results that are wrong in various ways."""
    ctx = context()
    operands = Operands(ctx, op, (24, 20, 16), dtype, 0)
    operands.fill(decoy=True)
    stale = operands._product([(operands.gathered(), operands.b)])
    operands._kept.clear()
    operands.fill()
    right = operands.reference().to(operands.output.dtype)
    said = {"right": operands.complaint(right, 1)}
    for name, value in (("one element", right[2, 3] + 1), ("not a number", float("nan"))):
        if value == value or dtype.is_floating_point:
            spoilt = right.clone()
            spoilt[2, 3] = value
            said[name] = operands.complaint(spoilt, 1)
    said["noise"] = operands.complaint((right * 1.02).to(right.dtype), 1)
    if stale.shape == right.shape:
        said["an earlier call's"] = operands.complaint(stale.to(right.dtype), 1)
    said["shape"] = operands.complaint(right[:-1], 1)
    return said


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_wrong_results_are_found(ranks: Ranks, op: str, dtype: torch.dtype) -> None:
    for said in ranks.run(complaints, op, dtype):
        assert said.pop("right") == ""
        assert [name for name, complaint in said.items() if not complaint] == []


def transposed(op: str) -> tuple[tuple[int, ...], bool, str]:
    """The strides of a transposed B, whether the problem says that it is transposed, and the complaint about the
    product with it."""
    operands = Operands(context(), op, (24, 20, 16), torch.float32, 0, TRANSPOSED)
    operands.fill()
    right = operands.gathered() @ operands.b
    return operands.b.stride(), operands.problem.transposed_b, operands.complaint(right, 1, local=True)


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("op", OPS)
def test_a_b_that_is_transposed(ranks: Ranks, op: str) -> None:
    assert ranks.run(transposed, op) == [((1, 16), True, "")] * 2


def knows_what_auto_took(op: str, sizes: tuple[int, int, int]) -> bool:
    with fresh(1 << 22) as ctx:
        operands = Operands(ctx, op, sizes, torch.float32, 0)
        operands.fill()
        ways.way(State(ctx, {}, {}), operands, ways.AUTO).call()
        ctx.synchronize()
        return settled(ctx, operands.problem) is not None


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("op", OPS)
def test_what_auto_took_is_known(ranks: Ranks, op: str) -> None:
    for sizes in ((24, 20, 16), *([(3, 5, 7)] if op == "matmul_all_reduce" else [])):
        assert ranks.run(knows_what_auto_took, op, sizes) == [True] * 2


def test_what_auto_took_with_options_or_a_workspace_is_not_what_it_takes_without() -> None:
    problem = Problem("all_gather_matmul", 64, 64, 64, torch.float16, 2)
    pull, push = FusedConfig("pull"), FusedConfig("push")
    plain = _Choice(problem, pull, None, (), (), False, 0)
    known = {plain._replace(made=("pull",)): pull, plain._replace(given=FusedConfig("auto", num_sms=1)): pull}
    ctx: Any = SimpleNamespace(kept=lambda *_: known)
    assert settled(ctx, problem) is None
    known[plain] = push
    assert settled(ctx, problem) == push


@pytest.mark.skipif(not SIMULATED, reason="on GPUs another algorithm is picked, which this heap has room for")
def test_a_record_has_what_auto_took_where_the_heap_is_short(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    axes = ["M=256", "N=32", "K=64", "gather_dim=0", "algorithm=auto,pull"]
    arguments = ["all_gather_matmul", "--num_ranks=2", *(f"--axis_{one}" for one in axes), "--repeat=1"]
    assert bench.main([*arguments, f"--heap_size={1 << 17}", f"--benchmark_out={out}"]) == 0
    assert [one["config"]["algorithm"] for one in lines(out)] == ["pull", "pull"]


@pytest.mark.skipif(not SIMULATED, reason="the heap that is too short is the simulator's")
def test_a_variant_that_fails_leaves_the_others_their_numbers(tmp_path: Path) -> None:
    """It fails in its call on decoys; the variant before it is checked again after that."""
    out = tmp_path / "results.jsonl"
    axes = ["M=512", "N=512", "K=8", "algorithm=auto,two_shot"]
    arguments = ["matmul_all_reduce", "--num_ranks=2", *(f"--axis_{one}" for one in axes), "--repeat=1"]
    assert bench.main([*arguments, "--heap_size=600000", f"--benchmark_out={out}"]) == 1
    auto, two_shot = lines(out)
    assert "HeapError: matmul_all_reduce by two_shot keeps" in two_shot["error"]
    assert "Free tensors you no longer need, or give --heap_size=3145728. (ranks 0, 1 of 2)" in two_shot["error"]
    assert (auto["validated"], auto["error"]) == (True, None)


def skips_and_has_its_numbers() -> bool:
    """Whether A has its own numbers again after PyTorch has refused the call on decoys."""

    def refuses(*_: object) -> ways.Way:
        return ways.Way(mock.Mock(side_effect=RuntimeError("not this one")), lambda: torch.empty(0), 1)

    sizes: dict[str, Any] = {"shape": "24x20x16", "m": 24, "n": 20, "k": 16, "dtype": "fp32"}
    shared: dict[Any, Any] = {}
    state = State(context(), {**sizes, "algorithm": "torch_symm_mem"}, shared)
    with mock.patch.object(fused, "way", refuses), pytest.raises(Skipped, match=r"take this: .* not this one"):
        fused.run(state, context(), "matmul_all_reduce")
    operands = shared["operands"]
    return torch.equal(operands.a, operands._random(0, context().rank))


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_variant_that_is_skipped_leaves_the_others_their_numbers(ranks: Ranks) -> None:
    assert ranks.run(skips_and_has_its_numbers) == [True] * 2


@USES_NCCL
def test_what_an_algorithm_cannot_run_is_skipped(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    axes = ["M=7", "N=8", "K=10", "algorithm=copy_engine,nccl"]
    arguments = ["matmul_all_reduce", *ON_TWO, *(f"--axis_{one}" for one in axes), "--repeat=1"]
    assert bench.main([*arguments, f"--benchmark_out={out}"]) == 0
    uneven, nccl = lines(out)
    assert uneven["skipped"] == "copy_engine: 7 rows cannot be shared evenly by 2 ranks" and nccl["validated"]


def test_options_behind_an_algorithm(tmp_path: Path) -> None:
    """They replace fields of the best config known."""
    out = tmp_path / "results.jsonl"
    programs = 4 if BACKEND == "sim" else torch.cuda.get_device_properties(0).multi_processor_count
    ways = {
        "push": None,
        "push+comm_sms=2+stream_k=True": None,
        f"push+comm_sms={programs}": f"comm_sms: expected less than the {programs} programs",
        "auto+num_sms=1": "auto has no options",
        "nccl+num_sms=1": "nccl has no options",
        "decomposed+num_warps=16": "options behind decomposed: expected what decomposed has a use for, got num_war",
    }
    axes = ["M=32", "N=32", "K=64", "gather_dim=0", f"algorithm={','.join(ways)}"]
    arguments = ["all_gather_matmul", *ON_TWO, *(f"--axis_{one}" for one in axes), "--repeat=1"]
    assert bench.main([*arguments, f"--benchmark_out={out}"]) == 1
    found = {one["params"]["algorithm"]: one for one in lines(out)}
    assert found.keys() == ways.keys()
    for name, complaint in ways.items():
        one = found[name]
        assert (complaint or "None") in str(one["error"] or one["skipped"]), one
        assert one["validated"] is (True if complaint is None else None)
    plain, told = found["push"]["config"], found["push+comm_sms=2+stream_k=True"]["config"]
    assert told == {**plain, "comm_sms": 2, "stream_k": True}


def test_a_tile_that_has_no_use_may_be_told_as_it_is() -> None:
    """Records have all fields of a config, and users may give these back."""
    best = FusedConfig("decomposed", block_size_n=256, num_chunks=4)
    told = "block_size_n=256+num_chunks=2"
    ways.check_options("decomposed", told, op="matmul_all_reduce")
    assert ways.with_options("matmul_all_reduce", best, told) == replace(best, num_chunks=2)
    with pytest.raises(ArgumentError, match=r"behind decomposed: .* got block_size_n=64\. It has block_size_m,"):
        ways.with_options("matmul_all_reduce", best, "block_size_n=64")


@USES_NCCL
@pytest.mark.parametrize(
    ("case", "name", "usual", "other"),
    [("matmul_all_reduce", "b_layout", "row_major", "transposed"), ("matmul_reduce_scatter", "l2", "warm", "cold")],
)
def test_only_a_transposed_b_and_a_cold_l2_are_told(
    tmp_path: Path, case: str, name: str, usual: str, other: str
) -> None:
    out = tmp_path / "results.jsonl"
    axes = ["M=6", "N=8", "K=10", f"{name}={usual},{other}", "algorithm=auto,nccl,matmul"]
    arguments = [case, *ON_TWO, *(f"--axis_{one}" for one in axes), "--repeat=1"]
    assert bench.main([*arguments, f"--benchmark_out={out}"]) == 0
    found = lines(out)
    assert [one["params"].get(name) for one in found] == [None] * 3 + [other] * 3
    assert all(one["validated"] for one in found)
    if BACKEND != "sim":  # with a cold L2, calls do not follow each other directly
        assert [one["back_to_back_ms"] is None for one in found] == [False] * 3 + [other == "cold"] * 3


def test_l2_is_emptied_by_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough memory to fill it is read, and at last the operands that a call should find there."""
    read: list[int] = []
    monkeypatch.setattr(l2, "_EVICTING_NBYTES", 1 << 10)
    monkeypatch.setattr(l2, "_scratch", {})
    monkeypatch.setattr(torch.Tensor, "amax", lambda self: read.append(self.nbytes))
    kept = torch.ones(3, 5, dtype=torch.bfloat16)
    assert l2.evict(mock.Mock(backend_name="sim"), [kept]) is None
    run = l2.evict(mock.Mock(backend_name="cuda", device=torch.device("cpu")), [kept])
    assert run is not None and read == []
    run()
    assert read == [1 << 10, kept.nbytes]


@USES_NCCL
def test_fused_ops_are_checked_and_timed_beside_others(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    dataset = tmp_path / "small.json"
    dataset.write_text('[{"m": 6, "n": 8, "k": 10}, {"m": 5, "n": 8, "k": 10, "op": "matmul_reduce_scatter"}]')
    arguments = ["matmul_reduce_scatter", "all_gather_matmul", *ON_TWO, f"--dataset={dataset}", "--repeat=1"]
    algorithms = "auto,baseline,nccl,torch_symm_mem,matmul,atomic"
    assert (
        bench.main([*arguments, f"--axis_algorithm={algorithms}", "--axis_gather_dim=1", f"--benchmark_out={out}"]) == 0
    )
    found = lines(out)
    for one in found:
        algorithm = one["params"]["algorithm"]
        assert one["error"] is None
        if one["params"]["shape"] == "5x8x10":
            assert one["skipped"] == "M=5: no multiple of 2 ranks"
        elif algorithm == "torch_symm_mem" and SIMULATED:
            assert one["skipped"] == "torch.ops.symm_mem needs GPUs"
        elif algorithm == "torch_symm_mem":
            assert one["validated"] or "torch_symm_mem does not take this" in one["skipped"]
        elif algorithm == "atomic" and one["case"] == "all_gather_matmul":
            assert one["skipped"].startswith("all_gather_matmul has no algorithm atomic; it has auto, ")
        else:
            assert one["deterministic"] is {"atomic": False, "baseline": True}.get(algorithm, one["deterministic"])
            assert (one["validated"], one["time_ms"]["calls"]) == (True, 1)
            assert one["flops"] == 2 * 6 * 8 * 10 / 2
            assert one["nbytes"] == (0 if algorithm == "matmul" else 6 * 8 if "scatter" in one["case"] else 6 * 10)
    assert len(found) == 18


def test_a_launcher_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert bench.main(TWO) == 1
    told = "iris bench: LaunchError: iris bench starts its own ranks: run it without torchrun, mpirun or srun\n"
    assert capsys.readouterr() == ("", told)


def test_two_cases_of_one_name_in_one_file_are_refused() -> None:
    """Otherwise the second would silently replace the first."""
    with mock.patch.dict("iris.bench.case._cases"):

        def register_twin() -> None:
            @bench.register
            def twin(state: State, ctx: Iris) -> None: ...

        register_twin()
        register_twin()  # the same lines, as when ranks import a script

        line = rf"one in {__file__}:\d+"
        with pytest.raises(ArgumentError, match=rf"twin: expected a name that one case has, got {line}, {line}"):

            @bench.register
            def twin(state: State, ctx: Iris) -> None: ...
