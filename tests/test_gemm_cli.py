"""The command lines of examples/gemm and examples/stream-k: flags, fitting to a device, runs, and the references."""

from __future__ import annotations

import io
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from ops_inputs import some
from ranks import BACKEND, NAMES_SHARED_MEMORY, Ranks, free_port, worlds
from warm import python

import iris
from iris import ops
from iris.bench.accuracy import accuracy, roundings_of_sum, worst
from iris.bench.programs import gemm_options
from iris.bench.programs.gemm_cli import main, registers_of, write_result
from iris.bench.programs.gemm_options import Arguments, Device, config_of, fit, ignored, parse
from iris.context import MIN_HEAP_BYTES

ROOT = Path(__file__).parents[1]
SCHEDULES = {"gemm": False, "stream-k": True}
H200 = Device("cuda", 8, 132, 227 << 10, 140 << 30)
MI300X = Device("hip", 8, 304, 64 << 10, 190 << 30)
LAPTOP = Device("sim", 4, 4, 0, 8 << 30)
SMALL = ["-m", "80", "-n", "96", "-k", "72", "--BLK_M", "32", "--BLK_N", "64", "--COMMUNICATION_TILE_M", "32"]
SIZES = ["-m", "48", "-n", "64", "-k", "80"]


FLAGS = {
    "-m": 4864,
    "-n": 4096,
    "-k": 8256,
    "--debug": False,
    "--validate": False,
    "--benchmark": False,
    "--datatype": "fp32",
    "--algorithm": "all_reduce",
    "--output_file": "log.json",
    "--BLK_M": 256,
    "--BLK_N": 256,
    "--BLK_K": 32,
    "--COMMUNICATION_TILE_M": 128,
    "--COMMUNICATION_TILE_N": 128,
    "--gsize_m": 8,
    "--two_tiles": True,
    "--num_stages": 1,
    "--num_warps": 8,
    "--waves_per_eu": 0,
    "--mfmaInstrSize": 16,
    "--kpack": 2,
    "--heap_size": 4294967296,
    "--gemm_sms": 256,
    "--total_sms": 304,
    "--communication_block_size": 256,
    "--num_ranks": None,
    "--trace": None,
}
OTHERS: dict[str, Any] = {
    "--datatype": "bf16",
    "--algorithm": "one_shot",
    "--output_file": "other.json",
    "--two_tiles": False,
    "--num_warps": 4,
    "--heap_size": 1 << 16,
    "--num_ranks": 3,
    "--trace": "other.svg",
}


def name_of(flag: str) -> str:
    return flag.lstrip("-")


def test_flags_and_defaults() -> None:
    arguments, given = parse(None, [])
    assert asdict(arguments) == {name_of(flag): default for flag, default in FLAGS.items()}
    assert given == frozenset()


@pytest.mark.parametrize("flag", FLAGS)
def test_each_flag_sets_its_own_argument(flag: str) -> None:
    default = FLAGS[flag]
    value = OTHERS.get(flag, True if isinstance(default, bool) else 64)
    switch = isinstance(default, bool) and flag != "--two_tiles"
    arguments, given = parse(None, [flag] if switch else [flag, str(value)])
    assert given == {name_of(flag)}
    assert asdict(arguments) == asdict(Arguments()) | {name_of(flag): value}


@pytest.mark.parametrize(
    ("choices", "flag"),
    [(("fp16", "fp32", "int8", "bf16"), "--datatype"), (("all_reduce", "all_scatter", "one_shot"), "--algorithm")],
)
def test_choices(choices: tuple[str, ...], flag: str) -> None:
    action = next(one for one in gemm_options.parser(None)._actions if flag in one.option_strings)
    assert tuple(action.choices or ()) == choices


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--BLK_M", "48"], "48 is not a power of two of at least 16"),
        (["--BLK_K", "8"], "8 is not a power of two of at least 16"),
        (["--BLK_N", "wide"], "argument --BLK_N: wide is not a whole number"),
        (["-m", "0"], "0 is not a positive number"),
        (["--two_tiles", "maybe"], "'maybe' is neither True nor False"),
        (["--datatype", "fp64"], "invalid choice: 'fp64'"),
        (["--output_file", "no/such/place.json"], "there is no directory"),
        (["--output_file", "/tmp"], "/tmp is a directory, not a file"),
        (["--num_ranks", "17"], "17 is more than the 16 ranks that there can be"),
        (["--num_warps", "3"], "argument --num_warps: invalid choice: 3 (choose from 1, 2, 4, 8, 16, 32)"),
        (["--num_warps", "some"], "argument --num_warps: some is not a whole number"),
        (["--waves_per_eu", "-1"], "argument --waves_per_eu: -1 is less than 0"),
        (["--heap_size", "65535"], "argument --heap_size: 65535 is less than 65536 bytes"),
        (["--heap_size", "1T"], "argument --heap_size: 1T is not a number of bytes, such as 1073741824 or 1G"),
        (["--datatype", "int8", "--BLK_K", "16"], "argument --BLK_K: 16 is less than 32, which int8 needs"),
        (["--trace", "trace.txt"], "trace.txt should end in .svg or .png"),
    ],
)
def test_bad_values(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(None, arguments)
    assert exit_info.value.code == 2
    assert words in capsys.readouterr().err


def test_the_least_heap_on_a_command_line_is_what_a_context_takes() -> None:
    with pytest.raises(
        iris.ArgumentError, match=rf"heap_size: expected a whole number of bytes from {MIN_HEAP_BYTES} "
    ):
        iris.iris(MIN_HEAP_BYTES - 1)


def test_help_shows_what_the_program_does_and_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse("What it does.", ["--help"])
    shown = capsys.readouterr().out
    assert exit_info.value.code == 0 and "What it does." in shown
    assert all(flag in shown for flag in FLAGS)
    assert set(re.findall(r"default:\s+(\d+)", shown)) >= {"4864", "4096", "8256", "4294967296", "304"}


def changes(asked: Arguments, device: Device, given: tuple[str, ...] = ()) -> dict[str, Any]:
    """The changed arguments; checks that the notes name exactly these."""
    fitted, notes = fit(asked, given, device)
    before, after = asdict(asked), asdict(fitted)
    changed = {name: after[name] for name in after if after[name] != before[name]}
    assert {note.split()[0] for note in notes} == set(changed)
    for name, value in changed.items():
        mine = [note for note in notes if note.startswith(f"{name} ")]
        assert mine[0].startswith(f"{name} {before[name]} → ") and f" → {value}: " in mine[-1]
    return changed


def test_what_the_defaults_were_made_for_needs_no_fit() -> None:
    for algorithm in ("all_reduce", "one_shot", "all_scatter"):
        assert changes(Arguments(algorithm=algorithm), MI300X) == {}


@pytest.mark.parametrize(
    ("algorithm", "sms"),
    [("all_reduce", {"total_sms": 132, "gemm_sms": 132}), ("all_scatter", {"total_sms": 132, "gemm_sms": 111})],
)
def test_defaults_on_h200(algorithm: str, sms: dict[str, int]) -> None:
    assert changes(Arguments(algorithm=algorithm), H200) == {"BLK_M": 128, **sms}


@pytest.mark.parametrize(
    ("given", "num_sms", "fitted"),
    [
        ({"gemm_sms": 64}, 132, (64, 132)),
        ({"gemm_sms": 200}, 132, (86, 132)),
        ({"gemm_sms": 304}, 132, (132, 132)),
        ({"gemm_sms": 100, "total_sms": 100}, 132, (100, 100)),
        ({"gemm_sms": 200, "total_sms": 100}, 132, (132, 100)),
        ({"total_sms": 100}, 132, (84, 100)),
        ({}, 4, (3, 4)),
        ({}, 2, (1, 2)),
        ({}, 1, (1, 1)),
        ({"gemm_sms": 1, "total_sms": 2}, 132, (1, 2)),
    ],
)
def test_sms_that_multiply_and_sms_that_communicate(
    given: dict[str, int], num_sms: int, fitted: tuple[int, int]
) -> None:
    asked = replace(Arguments(algorithm="all_scatter"), **given)  # type: ignore[arg-type]
    got, _ = fit(asked, tuple(given), replace(H200, num_sms=num_sms))
    assert (got.gemm_sms, got.total_sms) == fitted
    config = config_of(got, stream_k=False)
    config.check("matmul_all_scatter", ("push", "split"), num_sms)


@pytest.mark.parametrize("datatype", ["fp16", "fp32", "int8"])
@pytest.mark.parametrize(("block_k", "stages"), [(32, 1), (64, 3), (256, 8)])
@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize("device", [H200, MI300X], ids=["cuda", "hip"])
def test_tiles_fit_registers_and_shared_memory(
    device: Device, num_warps: int, block_k: int, stages: int, datatype: str
) -> None:
    asked = Arguments(datatype=datatype, BLK_K=block_k, num_stages=stages, num_warps=num_warps)
    fitted, _ = fit(asked, (), device)
    threads = num_warps * (64 if device is MI300X else 32)
    item = fitted.dtype.itemsize
    nbytes = fitted.num_stages * (fitted.BLK_M + fitted.BLK_N) * fitted.BLK_K * item
    assert nbytes <= device.shared_bytes
    assert fitted.BLK_M * fitted.BLK_N <= 128 * threads
    config_of(fitted, stream_k=False).check("matmul_all_reduce", ("atomic",), device.num_sms, fitted.dtype)
    if (fitted.BLK_M, fitted.BLK_N) != (256, 256):
        assert 4 * fitted.BLK_M * fitted.BLK_N > 128 * threads  # no smaller than it has to be
    if fitted.num_stages < stages and fitted.BLK_K == block_k:
        assert (fitted.num_stages + 1) * (fitted.BLK_M + fitted.BLK_N) * fitted.BLK_K * item > device.shared_bytes


def test_a_step_of_int8_is_not_cut_below_what_it_needs() -> None:
    asked = Arguments(datatype="int8", BLK_M=16, BLK_N=8192, BLK_K=64, num_warps=32)
    fitted, _ = fit(asked, (), replace(MI300X, num_sms=304))
    assert (fitted.BLK_M, fitted.BLK_N, fitted.BLK_K) == (16, 1024, 32)


@pytest.mark.parametrize("device", [H200, MI300X, LAPTOP], ids=["cuda", "hip", "sim"])
@pytest.mark.parametrize(
    ("asked", "fitted"),
    [
        ({"COMMUNICATION_TILE_M": 1 << 13, "COMMUNICATION_TILE_N": 1 << 9}, {"COMMUNICATION_TILE_M": 1 << 11}),
        ({"gsize_m": 1 << 14}, {"gsize_m": 1 << 12}),
        ({"BLK_M": 1 << 12, "BLK_N": 1 << 9, "BLK_K": 1 << 10}, {}),
        ({"num_warps": 32}, {}),
    ],
)
def test_what_no_kernel_can_be_is_cut_everywhere(asked: dict[str, int], fitted: dict[str, int], device: Device) -> None:
    here = replace(Arguments(algorithm="all_scatter", m=64), **asked)  # type: ignore[arg-type]
    changed = changes(here, device, ("m",))
    assert changed | fitted == changed
    arguments, _ = fit(here, ("m",), device)
    config_of(arguments, stream_k=True).check("matmul_all_scatter", ("split",), device.num_sms, arguments.dtype)
    assert arguments.num_warps == min(here.num_warps, 16 if device is MI300X else 32)


def test_heap_fits_free_memory() -> None:
    assert changes(Arguments(), replace(MI300X, free_bytes=2 << 30)) == {"heap_size": 1638 << 20}
    assert changes(Arguments(heap_size=1 << 30), replace(MI300X, free_bytes=2 << 30)) == {}


def test_shape_is_fitted_in_the_simulator_unless_given() -> None:
    sms = {"total_sms": 4, "gemm_sms": 4}
    small = {"m": 608, "n": 512, "k": 1032, **sms}
    assert changes(Arguments(), LAPTOP) == small
    assert changes(Arguments(), replace(LAPTOP, world_size=5)) == small | {"k": 1030}
    assert changes(Arguments(m=300), LAPTOP, ("m",)) == sms
    assert changes(Arguments(), LAPTOP, ("k",)) == sms


def test_a_default_extent_is_rounded_to_equal_parts() -> None:
    five = replace(MI300X, world_size=5)
    assert changes(Arguments(), five) == {"k": 8255}
    assert changes(Arguments(algorithm="all_scatter"), five) == {"n": 4095}
    assert changes(Arguments(k=8256), five, ("k",)) == {}


def test_every_argument_reaches_the_config() -> None:
    arguments = Arguments(
        algorithm="all_scatter", BLK_M=16, BLK_N=32, BLK_K=64, COMMUNICATION_TILE_M=128, COMMUNICATION_TILE_N=256,
        gsize_m=5, two_tiles=False, num_stages=6, num_warps=7, waves_per_eu=9, mfmaInstrSize=10, kpack=11, gemm_sms=12,
        total_sms=25,
    )  # fmt: skip
    assert config_of(arguments, stream_k=True) == ops.FusedConfig(
        algorithm="split", block_size_m=16, block_size_n=32, block_size_k=64, comm_block_m=128, comm_block_n=256,
        group_size_m=5, stream_k=True, two_tiles=False, num_stages=6, num_warps=7, waves_per_eu=9,
        matrix_instr_nonkdim=10, kpack=11, num_sms=25, comm_sms=13,
    )  # fmt: skip
    for algorithm, expected in (("all_reduce", "atomic"), ("one_shot", "one_shot")):
        config = config_of(replace(arguments, algorithm=algorithm), stream_k=False)
        assert (config.algorithm, config.stream_k, config.num_sms, config.comm_sms) == (expected, False, 12, None)
    assert config_of(replace(arguments, gemm_sms=25), stream_k=False).algorithm == "push"


@pytest.mark.parametrize(
    ("device", "algorithm", "stream_k", "expected"),
    [
        (MI300X, "all_scatter", True, {"communication_block_size"}),
        (H200, "all_scatter", True, {"waves_per_eu", "mfmaInstrSize", "kpack", "communication_block_size"}),
        (
            MI300X,
            "one_shot",
            False,
            {"COMMUNICATION_TILE_M", "COMMUNICATION_TILE_N", "total_sms", "two_tiles", "communication_block_size"},
        ),
    ],
)
def test_ignored_flags_are_named(device: Device, algorithm: str, stream_k: bool, expected: set[str]) -> None:
    said = ignored(Arguments(algorithm=algorithm), vars(Arguments()), device, stream_k)
    assert {name for line in said for name in re.split(" (?:is|are) ignored: ", line)[0].split(", ")} == expected


def test_flags_that_were_not_given_are_not_told_of() -> None:
    assert ignored(Arguments(), {"validate"}, H200, False) == []
    (line,) = ignored(Arguments(), {"kpack", "gsize_m"}, H200, False)
    assert line == "kpack is ignored: for AMD GPUs only, this is cuda"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_a_right_result_may_be_off_by(dtype: torch.dtype) -> None:
    """Rounding passes, but not a factor, noise, or a few wrong elements."""
    reference = torch.randn(400, 300, dtype=torch.float64)
    rounded, unit = reference.to(dtype), torch.finfo(dtype).eps
    assert accuracy(rounded, reference, 1, 1).right
    assert not accuracy((rounded.double() * (1 + 4 * unit)).to(dtype), reference, 1, 1).right
    assert not accuracy((reference + 3 * unit * torch.randn_like(reference)).to(dtype), reference, 1, 1).right
    for spoilt in (0.0, float("nan")):
        wrong = rounded.clone()
        wrong[7:9, 5:9] = spoilt
        found = accuracy(wrong, reference, 1, 1)
        assert 0 < found.wrong <= 8 and not found.right and "of 120000 elements too far off" in str(found)
    single = reference.clone()
    single[7, 5] += unit * single[7, 5].abs() + 12 * accuracy(rounded, reference, 1, 1).allowed
    found_single = accuracy(single.to(dtype), reference, 1, 1)
    assert found_single.error <= found_single.allowed and found_single.wrong == 1 and not found_single.right
    assert accuracy(rounded * float("nan"), reference, 1, 1).error == math.inf
    assert worst([accuracy(rounded, reference, 1, 1), found]) == (found.error, found.allowed, found.wrong, 240000)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_that_is_rounded_at_each_rank_is_right(dtype: torch.dtype, ranks: int) -> None:
    """It is wrong if a rank, or a block of K, is missing in part of it."""
    m, n, k = 256, 192, 512 * ranks
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    reference, total = a.double() @ b.double(), torch.zeros(m, n, dtype=dtype)
    for part in range(ranks):
        of_part = slice(512 * part, 512 * (part + 1))
        total += (a[:, of_part].double() @ b[of_part].double()).to(dtype)
    roundings = 1 + roundings_of_sum(ranks)
    assert accuracy(total, reference, k, roundings).right
    total[:64, :64] -= (a[:64, :16].double() @ b[:16, :64].double()).to(dtype)
    assert accuracy(total, reference, k, roundings).wrong > 64


def test_sums_of_fp8_may_be_off_by_what_hopper_loses_of_them_and_no_more() -> None:
    reference = torch.randn(200, 300, dtype=torch.float64)
    for off, right in ((2**-12, True), (2**-9, False)):
        found = (reference + off * torch.randn_like(reference)).float()
        assert accuracy(found, reference, 32, 1, torch.float8_e4m3fn).right == right
        assert not accuracy(found, reference, 32, 1).right


def test_whole_numbers_are_equal_or_wrong() -> None:
    exact = torch.randint(-9, 9, (20, 30), dtype=torch.int32)
    assert accuracy(exact, exact.double(), 100, 2).right
    exact_but_one = exact.clone()
    exact_but_one[3, 4] += 1
    found = accuracy(exact_but_one, exact.double(), 100, 2)
    assert (found.wrong, found.right) == (1, False) and found.error < 0.1


def test_registers_are_those_of_the_last_kernel_compiled() -> None:
    kernels = {"first": SimpleNamespace(n_regs=1, n_spills=2), "last": SimpleNamespace(n_regs=168, n_spills=4)}
    kernel = SimpleNamespace(device_caches={0: (kernels,)})
    assert registers_of(kernel, torch.device("cuda", 0)) == (168, 4)
    assert registers_of(SimpleNamespace(device_caches={0: ({},)}), torch.device("cuda", 0)) == (None, None)
    assert registers_of(SimpleNamespace(), torch.device("cpu")) == (None, None)


@pytest.mark.parametrize("arguments", [[], ["-m", "64"], ["--algorithm", "one_shot", "--num_ranks", "2"]])
def test_nothing_to_do(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(None, stream_k=False, argv=arguments) == 1
    said = capsys.readouterr().err
    assert "--validate" in said and "--benchmark" in said


@pytest.mark.parametrize(("algorithm", "extent"), [("all_reduce", "-k"), ("all_scatter", "-n")])
def test_an_extent_that_ranks_cannot_share(algorithm: str, extent: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--validate", "--num_ranks", "3", "--algorithm", algorithm, extent, "64"]
    assert main(None, stream_k=False, argv=arguments) == 1
    assert f"{extent}: expected a multiple of the 3 ranks, got 64" in capsys.readouterr().err


def run_example(name: str, arguments: list[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of an example, run like a script under a launcher."""
    printed, complained = io.StringIO(), io.StringIO()
    path = ROOT / "examples" / name / "benchmark.py"
    with redirect_stdout(printed), redirect_stderr(complained), mock.patch.object(sys, "argv", [path.name, *arguments]):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as left:
            return int(left.code or 0), printed.getvalue(), complained.getvalue()
    return -1, printed.getvalue(), complained.getvalue()


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize(
    ("name", "algorithm", "timed"),
    [
        ("gemm", "all_reduce", False),
        ("gemm", "one_shot", True),
        ("gemm", "all_scatter", False),
        ("stream-k", "all_reduce", True),
        ("stream-k", "one_shot", False),
        ("stream-k", "all_scatter", True),
    ],
)
def test_run(ranks: Ranks, name: str, algorithm: str, timed: bool, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    wanted = "--benchmark" if timed else "--validate"
    arguments = [wanted, "--algorithm", algorithm, "--output_file", str(file), *SMALL]
    (status, printed, complained), *others = ranks.run(run_example, name, arguments)
    assert status == 0, complained
    assert [(code, text) for code, text, _ in others] == [(0, "")]
    assert "validation passed" in printed and f"written: {file}" in printed
    record = json.loads(file.read_text())
    fitted = record["fitted"]
    assert (fitted["m"], fitted["n"], fitted["k"]) == (80, 96, 72)
    assert {name_of(flag) for flag in FLAGS} == set(record["asked"]) == set(fitted)
    assert record["asked"]["gemm_sms"] == 256 > fitted["gemm_sms"]
    assert all(line in printed for line in [*record["fits"], *record["ignored"]])
    assert record["world_size"] == 2 and record["success"] is True
    assert record["environment"]["backend"] == BACKEND
    assert 0 <= record["error"] <= record["tolerance"] < 1e-5
    assert record["config"]["stream_k"] is SCHEDULES[name]
    for part in ("total", "matmul", "communication"):
        assert bool(re.search(rf"^{part} +[\d.]+ +[\d.e-]+", printed, re.MULTILINE)) is timed
        if timed:
            flops = 2 * 80 * 96 * 72 / 2
            assert record[part]["ms"] > 0
            assert record[part]["tflops_per_gpu"] == pytest.approx(flops / record[part]["ms"] / 1e9)
        else:
            assert record[part] is None
    if BACKEND == "sim":
        assert record["registers"] is None and record["spills"] is None
    else:
        assert record["registers"] > 0 and record["spills"] >= 0


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize(("algorithm", "datatype"), [("one_shot", "bf16"), ("all_reduce", "int8")])
def test_debug_and_other_datatypes(ranks: Ranks, algorithm: str, datatype: str, tmp_path: Path) -> None:
    picture, file = tmp_path / "trace.svg", tmp_path / "result.json"
    arguments = ["--debug", "--datatype", datatype, "--algorithm", algorithm, "--output_file", str(file), *SMALL]
    (status, printed, _), (_, other, _) = ranks.run(run_example, "gemm", [*arguments, "--trace", str(picture)])
    assert status == 0, printed
    assert "debug: FusedConfig(" in printed and "debug: on each rank: A (80, 36) @ B (36, 96), 6 tiles" in printed
    assert re.search(r"debug: rank 0: C\[\d+, \d+\] is .*, float64 ", printed)
    assert re.fullmatch(r"(debug: rank 1: C\[.*\n)+", other)
    assert f"trace: {picture}" in printed and picture.exists()
    record = json.loads(file.read_text())
    assert record["success"] is True and record["total"] is None


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_trace_that_cannot_be_drawn_costs_no_result(ranks: Ranks, tmp_path: Path) -> None:
    picture, file = tmp_path / "trace.svg", tmp_path / "result.json"
    picture.symlink_to("/dev/full")
    arguments = ["--validate", "--trace", str(picture), "--output_file", str(file), *SMALL]
    (status, printed, _), _ = ranks.run(run_example, "gemm", arguments)
    assert status == 0 and f"no picture: {picture}: No space left on device" in printed
    assert json.loads(file.read_text())["success"] is True


def run_with_wrong_op(arguments: list[str]) -> tuple[int, str, str]:
    """Run the program with an op that returns one wrong element, on rank 1 only."""
    right = ops.matmul_all_reduce

    def wrong(ctx: Any, output: torch.Tensor, *operands: Any, **options: Any) -> None:
        right(ctx, output, *operands, **options)
        ctx.synchronize()
        if ctx.rank == 1:
            output[3, 5] += 1

    with mock.patch.object(ops, "matmul_all_reduce", wrong):
        return run_example("gemm", arguments)


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_wrong_result_fails_everywhere_and_is_not_timed(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    (status, printed, _), (other, _, _) = ranks.run(
        run_with_wrong_op, ["--benchmark", "--output_file", str(file), *SMALL]
    )
    assert (status, other) == (1, 1)
    assert "validation FAILED" in printed and "timing" not in printed
    record = json.loads(file.read_text())
    assert record["success"] is False and record["total"] is None


def test_a_run_that_fails_leaves_no_earlier_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    file.write_text('{"success": true}')
    arguments = ["--validate", "--num_ranks", "3", "-k", "64", "--output_file", str(file)]
    assert main(None, stream_k=False, argv=arguments) == 1
    assert json.loads(file.read_text()) == {
        "success": False,
        "failure": "ArgumentError: benchmark: -k: expected a multiple of the 3 ranks, got 64",
    }
    assert capsys.readouterr().err == "benchmark: error: -k: expected a multiple of the 3 ranks, got 64\n"
    file.write_text('{"success": true}')
    with mock.patch("iris.bench.programs.gemm_cli.launch", side_effect=KeyboardInterrupt):
        assert main(None, stream_k=False, argv=["--validate", "--num_ranks", "2", "--output_file", str(file)]) == 130
    assert "stopped" in capsys.readouterr().err
    assert json.loads(file.read_text())["success"] is False


def test_a_file_that_is_no_result_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notes.json"
    file.write_text('{"mine": 1}')
    assert main(None, stream_k=False, argv=["--validate", "--num_ranks", "2", "--output_file", str(file)]) == 1
    assert "expected a new file, or one that this program has written" in capsys.readouterr().err
    assert file.read_text() == '{"mine": 1}'


def test_a_full_disk_at_the_end_is_an_error_of_the_output_file() -> None:
    with pytest.raises(iris.ArgumentError, match="--output_file: expected a file that can be written, got /dev/full"):
        write_result("/dev/full", {"success": True})


def test_what_iris_refuses_on_a_rank_is_said_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    arguments = [
        "--validate",
        "--num_ranks",
        "2",
        "--heap_size",
        "65536",
        "--output_file",
        str(file),
        *SIZES,
        "-m",
        "800",
    ]
    assert main(None, stream_k=False, argv=arguments) == 1
    said = capsys.readouterr().err
    assert said.startswith("benchmark: HeapError: empty: symmetric heap exhausted: ") and "Traceback" not in said
    assert "or give --heap_size=" in said
    failure = json.loads(file.read_text())["failure"]
    assert failure.startswith("HeapError: ") and "or give --heap_size=" in failure


def command(path: str, arguments: list[str], cwd: Path, *launcher: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    # Open MPI looks for ssh even if all ranks are on this host, unless it is told that there is no other.
    environment = clean | {"OMP_NUM_THREADS": "1", "OMPI_MCA_plm": "isolated", "PYTHON": python()}
    program = [str(ROOT / path)] if path.endswith(".sh") else [python(), str(ROOT / path)]
    return subprocess.run(
        [*launcher, *program, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=90
    )


@pytest.mark.gpu if BACKEND != "sim" else pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("path", "options", "count"),
    some(
        [
            ("examples/gemm/benchmark.py", ["--benchmark", "--algorithm", "one_shot", *SMALL], 4),
            ("examples/stream-k/benchmark.py", ["--algorithm", "one_shot", *SMALL], 2),
            ("examples/gemm/reference/all_reduce.py", SIZES, 2),
        ]
    ),
)
@NAMES_SHARED_MEMORY
def test_under_mpirun(path: str, options: list[str], count: int, tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        assert not os.environ.get("CI"), "mpirun is missing here, where CI is set"
        pytest.skip("mpirun is not installed")
    count = count if BACKEND == "sim" else min(count, torch.cuda.device_count())
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=20).stdout
    mpirun = ["mpirun", *(["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in said else []), "-np", str(count)]
    done = command(path, ["--validate", *options], tmp_path, *mpirun)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("validation passed") == 1
    assert json.loads((tmp_path / "log.json").read_text())["world_size"] == count


@pytest.mark.skipif(BACKEND != "sim", reason="starts ranks of its own")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("examples/gemm/benchmark.py", SMALL),
        ("benchmark/examples/benchmark_all_gather_gemm_push.py", [*SIZES, "--output_dir", "."]),
    ],
    ids=["benchmark", "sweep"],
)
def test_results_are_written_even_if_nobody_reads_what_is_printed(
    path: str, options: list[str], tmp_path: Path
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [python(), str(ROOT / path), "--validate", "--num_ranks=2", *options],
        cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=90,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    (file,) = tmp_path.glob("*.json")
    result = json.loads(file.read_text())
    assert result.get("success") or result["validated"]


def run_reference(collective: str, arguments: list[str], port: int) -> tuple[int, str]:
    """Exit status and output of a reference program, run as by torchrun."""
    folder, printed = ROOT / "examples" / "gemm" / "reference", io.StringIO()
    path = [str(folder), *sys.path]
    with (
        redirect_stdout(printed),
        mock.patch.object(sys, "argv", [f"{collective}.py", *arguments]),
        mock.patch.object(sys, "path", path),
        mock.patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}),
    ):
        try:
            runpy.run_path(str(folder / f"{collective}.py"), run_name="__main__")
        except SystemExit as left:
            return int(left.code or 0), printed.getvalue()
    return -1, printed.getvalue()


def assert_reference(printed: str, file: Path) -> None:
    assert "validation passed" in printed
    record = json.loads(file.read_text())
    assert record["success"] is True and record["world_size"] == 2
    assert all(record[part]["ms"] > 0 for part in ("matmul", "communication", "total"))


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize(
    ("collective", "datatype"),
    [("all_gather", "int8"), ("all_gather", "fp16"), ("all_reduce", "bf16"), ("reduce_scatter", "fp32")],
)
def test_reference(ranks: Ranks, collective: str, datatype: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    options = ["--validate", "--benchmark", "--datatype", datatype, "--output_file", str(file)]
    outcomes = ranks.run(run_reference, collective, [*options, *SIZES], free_port())
    assert [status for status, _ in outcomes] == [0, 0]
    assert_reference(outcomes[0][1], file)
    assert outcomes[1][1] == ""


@pytest.mark.parametrize("size", ["0", "-4"])
def test_sizes_of_a_reference_are_positive(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_reference("all_gather", ["--validate", "--num_ranks", "2", "-m", size], 1) == (2, "")
    assert f"argument -m: {size} is not a positive number" in capsys.readouterr().err


def test_a_reference_that_is_stopped_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    file.write_text('{"success": true}')
    with mock.patch("iris.launch", side_effect=KeyboardInterrupt):
        options = ["--validate", "--num_ranks", "2", "--output_file", str(file), *SIZES]
        assert run_reference("all_reduce", options, 1) == (130, "")
    assert capsys.readouterr().err == "\nstopped\n"
    assert json.loads(file.read_text())["success"] is False


def test_a_reference_that_is_refused_says_so_as_the_benchmark_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    file.write_text('{"success": true}')
    options = ["--validate", "--num_ranks", "3", "-k", "64", "--output_file", str(file)]
    assert run_reference("all_reduce", options, 1) == (1, "")
    refused = "reference: -k: expected a multiple of the 3 ranks, got 64"
    assert capsys.readouterr().err == f"all_reduce: error: {refused}\n"
    assert json.loads(file.read_text()) == {"success": False, "failure": f"ArgumentError: {refused}"}
    file.write_text('{"mine": 1}')
    assert run_reference("all_reduce", options, 1) == (1, "")
    assert "expected a new file, or one that this program has written" in capsys.readouterr().err
    assert file.read_text() == '{"mine": 1}'


@pytest.mark.gpu if BACKEND != "sim" else pytest.mark.timeout(120)
def test_run_sh(tmp_path: Path) -> None:
    done = command("examples/gemm/reference/run.sh", ["-n", "2", "-c", "reduce_scatter", "--", *SIZES], tmp_path)
    assert done.returncode == 0, done.stderr
    assert_reference(done.stdout, tmp_path / "reduce_scatter.json")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["-h"], 0, "Usage: run.sh [-n NUM] [-c COLLECTIVE] [-h]"),
        (["--help"], 0, "-h, --help     show this"),
        (["-c", "broadcast"], 2, "'broadcast' is not a collective"),
        (["-n", "two"], 2, "'two' is not a positive number"),
        (["-n", "2", "--", "--output_file", "one.json"], 2, "--output_file: one file for 3 collectives"),
        (["--", "-m", "8", "--output_file=one.json"], 2, "choose one of these by -c"),
    ],
)
def test_options_of_run_sh(arguments: list[str], status: int, words: str, tmp_path: Path) -> None:
    done = command("examples/gemm/reference/run.sh", arguments, tmp_path)
    assert done.returncode == status
    assert words in done.stdout + done.stderr
