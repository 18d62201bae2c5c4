"""The programs for all-gather + matmul that users run: examples, sweeps, the reference, the benchmark."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import BACKEND, USES_NCCL, Failure, Ranks, context, failure_of, worlds
from warm import python

from iris import ops
from iris.bench.cases import fused, ways
from iris.bench.cases.ways import Way, way
from iris.bench.dataset import Dataset
from iris.bench.programs import gather_sweep
from iris.bench.programs.gather_options import OP, SIM_SHRINK, Options, parse_options
from iris.ops.hardware import HARDWARE, floor_s

ROOT = Path(__file__).parents[1]
EXAMPLES = {name: f"examples/14_all_gather_gemm/example_run_{name}.py" for name in ("pull", "push")}
SWEEPS = {
    "pull": "benchmark/examples/benchmark_all_gather_gemm_pull.py",
    "push": "benchmark/examples/benchmark_all_gather_gemm_push.py",
    "nccl": "examples/benchmark/reference/all_gather_gemm/benchmark_rccl_torch.py",
}
AXES = "benchmark/ops/bench_all_gather_matmul.py"
DATA_SET = ROOT / "dataset" / "ag_gemm.json"
TABLE = {
    (8192, 8192, 29568),
    (8192, 29568, 8192),
    (16384, 28672, 8192),
    (4096, 4096, 14336),
    (1024, 28672, 8192),
    (512, 8192, 8192),
}
SMALL: list[dict[str, Any]] = [
    {"m": 18, "n": 20, "k": 34, "model": "tiny/1", "layer": "up"},
    {"m": 16, "n": 31, "k": 32},
    {"m": 4, "n": 12, "k": 2},
]
SMALL_TILE = ops.FusedConfig(block_size_m=16, block_size_n=16, block_size_k=16)
TWO = pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
SMALL_HEAP = ["--heap_size", str(1 << 24)]  # ranks keep it from test to test, and share GPUs
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def printed(path: str, arguments: Sequence[str]) -> tuple[int | str | None, str, str]:
    """Exit status, stdout and stderr of the program at ``path``, run here like a script under a launcher."""
    out, err, status = io.StringIO(), io.StringIO(), None
    with redirect_stdout(out), redirect_stderr(err), mock.patch.object(sys, "argv", [path, *arguments]):
        try:
            runpy.run_path(str(ROOT / path), run_name="__main__")
        except SystemExit as left:
            status = left.code
    return status, out.getvalue(), err.getvalue()


def command(start: Sequence[str], path: str, arguments: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run ``path`` from the command line."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error",
        "OMP_NUM_THREADS": "1",
        "PYTHON_EXEC": python(),  # torchrun starts ranks with it
    }
    return subprocess.run(
        [python(), *start, str(ROOT / path), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def written(folder: Path) -> dict[str, dict[str, Any]]:
    """The records in ``folder``, by file name; NaN is refused, as it is no JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return {file.name: json.loads(file.read_text(), parse_constant=refuse) for file in sorted(folder.iterdir())}


def small_set(folder: Path) -> str:
    file = folder / "shapes.json"
    file.write_text(json.dumps(SMALL))
    return str(file)


@TWO
@pytest.mark.parametrize(("gather_dim", "dtype"), [(0, "bf16"), (1, "fp32")])
@pytest.mark.parametrize("algorithm", EXAMPLES)
def test_example(ranks: Ranks, algorithm: str, gather_dim: int, dtype: str) -> None:
    arguments = ["-m", "34", "-n", "20", "-k", "36", "--datatype", dtype, "--gather_dim", str(gather_dim)]
    (status, text, _), (_, other, _) = ranks.run(printed, EXAMPLES[algorithm], arguments)
    assert status is None
    assert other == ""
    assert f"all_gather_matmul by {algorithm}, 2 ranks, backend {BACKEND}\nshape 34 x 20 x 36, torch." in text
    found = re.search(r"relative error (\S+), at most (\S+) is right\nmedian (\S+) ms", text)
    assert found is not None
    error, bound, time_ms = map(float, found.groups())
    assert 0 < error <= bound < 0.01
    assert time_ms > 0


@pytest.mark.parametrize("ranks", worlds(3, 3), indirect=True)
@pytest.mark.parametrize("algorithm", EXAMPLES)
def test_usual_sizes_suit_any_number_of_ranks(ranks: Ranks, algorithm: str) -> None:
    status, text, _ = ranks.run(printed, EXAMPLES[algorithm], [])[0]
    assert status is None and "3 ranks" in text
    if BACKEND == "sim":
        assert "shape 66 x 96 x 129" in text


@pytest.mark.parametrize("size", ["-m", "-n", "-k"])
@pytest.mark.parametrize("path", EXAMPLES.values())
def test_sizes_of_examples_are_positive(path: str, size: str) -> None:
    status, _, err = printed(path, [size, "0"])
    assert status == 2 and f"argument {size}: 0 is not a positive number" in err


@pytest.mark.parametrize(("gather_dim", "letter"), [("0", "m"), ("0", "n"), ("1", "n"), ("1", "k")])
@pytest.mark.parametrize("path", EXAMPLES.values())
def test_sizes_that_ranks_cannot_share_are_named_before_ranks_start(path: str, gather_dim: str, letter: str) -> None:
    sizes = [word for name in "mnk" for word in (f"-{name}", "63" if name == letter else "64")]
    with mock.patch("iris.launch") as launch:
        status, _, err = printed(path, ["--num_ranks", "2", "--gather_dim", gather_dim, *sizes])
    assert status == 2 and f"error: -{letter}: 63 is no multiple of 2 ranks" in err
    assert not launch.called


def wrong_calls_by_hbm_buffer() -> tuple[list[Failure], torch.Tensor]:
    ctx = context()
    a, b = ctx.ones(32, 32, dtype=torch.float16), torch.ones(64, 16, dtype=torch.float16, device=ctx.device)
    output = torch.empty(32, 16, dtype=torch.float16, device=ctx.device)
    prepare, call = ops.all_gather_matmul_hbm_buffer_preamble, ops.all_gather_matmul_hbm_buffer
    wrong: Any = {"config": "hbm_buffer"}
    failures = [
        failure_of(lambda: prepare(ctx, wrong, b)),
        failure_of(lambda: prepare(ctx, a, b[:33])),
        failure_of(lambda: prepare(ctx, a, b.float())),
        failure_of(lambda: prepare(ctx, a, b, k_per_flag=0)),
        failure_of(lambda: prepare(ctx, a, b, staged_a_layout="diagonal")),
        failure_of(lambda: prepare(ctx, a, b, **wrong)),
        failure_of(lambda: call(ctx, output, a, b, **wrong)),
        failure_of(lambda: call(ctx, output, a, b, num_warps=3)),
        failure_of(lambda: call(ctx, output, a, b, num_stages=0)),
    ]
    workspace = prepare(ctx, a, b, SMALL_TILE, k_per_flag=1, staged_a_layout="m_contiguous")
    call(ctx, output, a, b)
    call(ctx, output, a, b, None, SMALL_TILE, workspace, k_per_flag=1, num_warps=4, num_stages=2)
    ctx.barrier()
    return failures, output.cpu()


@TWO
def test_hbm_buffer_names_what_is_wrong(ranks: Ranks) -> None:
    op = "all_gather_matmul"
    call, prepare = f"{op}_hbm_buffer", f"{op}_hbm_buffer_preamble"
    expected = [
        ("DTypeError", f"{prepare}: A_sharded: expected a tensor, got dict"),
        ("ShapeError", f"{prepare}: B: expected 32 rows, or 64"),
        ("DTypeError", f"{prepare}: B: expected torch.float16"),
        ("ArgumentError", f"{prepare}: config.k_per_flag: expected a positive number, got 0"),
        ("ArgumentError", f"{prepare}: config.staged_a_layout: expected one of k_contiguous, m_contiguous"),
        ("ArgumentError", f"{prepare}: config: expected a FusedConfig or None, got 'hbm_buffer'"),
        ("ArgumentError", f"{call}: config: expected a FusedConfig or None, got 'hbm_buffer'"),
        ("ArgumentError", f"{op}: config.num_warps: expected one of"),
        ("ArgumentError", f"{op}: config.num_stages: expected a positive number, got 0"),
    ]
    for failures, output in ranks.run(wrong_calls_by_hbm_buffer):
        for failure, (kind, words) in zip(failures, expected, strict=True):
            assert failure.kind == kind and failure.message.startswith(words), failure
        assert (output == 64).all()


@TWO
@pytest.mark.parametrize("gather_dim", [0, 1])
@pytest.mark.parametrize("algorithm", ["pull", "push", pytest.param("nccl", marks=USES_NCCL)])
def test_sweep_of_a_data_set(ranks: Ranks, algorithm: str, gather_dim: int, tmp_path: Path) -> None:
    """There are a line and a file for each of three shapes, one of which two ranks cannot share evenly."""
    folder = tmp_path / "made" / "here"
    arguments = ["-b", "--dataset", small_set(tmp_path), "--gather_dim", str(gather_dim), "--output_dir", str(folder)]
    (status, text, _), (other_status, other, _) = ranks.run(printed, SWEEPS[algorithm], [*arguments, *SMALL_HEAP])
    assert status == other_status == 0, text
    assert other == ""
    assert [line[:6] for line in text.splitlines()[1:4]] == ["[1/3] ", "[2/3] ", "[3/3] "]
    assert f"2 right, 0 failed, 1 skipped; files in {folder}" in text
    records = written(folder)
    tail = f"bf16_dim{gather_dim}_ranks2"
    names = [f"18x20x34_{tail}_tiny-1_up.json", f"16x31x32_{tail}.json", f"4x12x2_{tail}.json"]
    assert set(records) == set(names)
    first, uneven, last = (records[name] for name in names)
    for one, (m, n, k) in ((first, (18, 10, 34)), (last, (4, 6, 2))):
        assert one["schema"] == 1
        assert one["case"] == "all_gather_matmul"
        assert one["validated"] is True
        assert one["error"] is None
        assert one["params"]["algorithm"] == algorithm
        assert [one["params"][name] for name in ("m", "n", "k")] == [m, n, k]
        assert one["flops"] == 2 * m * n * k
        assert one["nbytes"] == m * k * 2 // 2
        assert 0 < one["time_ms"]["min"] <= one["time_ms"]["median"] <= one["time_ms"]["p90"]
        assert one["tflops_per_gpu"] == pytest.approx(one["flops"] / one["time_ms"]["median"] / 1e9)
        assert one["environment"]["backend"] == BACKEND
        assert (one["config"] or {"algorithm": "nccl"})["algorithm"] == algorithm
    assert (first["params"]["model"], first["params"]["layer"]) == ("tiny/1", "up")
    assert uneven["skipped"] == "N=31: no multiple of 2 ranks"
    assert uneven["time_ms"] is None
    assert uneven["validated"] is None


@TWO
@pytest.mark.parametrize("dtype", ["fp16", "fp32", "int8"])
@pytest.mark.parametrize("algorithm", ["pull", "push"])
def test_validate_checks_without_timing(ranks: Ranks, algorithm: str, dtype: str, tmp_path: Path) -> None:
    arguments = ["-v", "-m", "20", "-n", "24", "-k", "40", "--datatype", dtype, "--output_dir", str(tmp_path)]
    flags = ["--BLK_M", "16", "--BLK_N", "32", "--BLK_K", "32", "--gsize_m", "2", "--num_sms", "1"]
    flags += ["--num_stages", "2", "--num_warps", "2", *SMALL_HEAP]
    (status, text, _), _ = ranks.run(printed, SWEEPS[algorithm], [*arguments, *flags])
    assert status == 0, text
    (record,) = written(tmp_path).values()
    assert record["validated"] is True
    assert record["time_ms"] is None
    fields = {"block_size_m": 16, "block_size_n": 32, "block_size_k": 32, "group_size_m": 2, "num_sms": 1}
    fields |= {"num_stages": 2, "num_warps": 2}
    assert {name: record["config"][name] for name in fields} == fields


@TWO
def test_a_config_that_cannot_run_is_recorded_and_fails(ranks: Ranks, tmp_path: Path) -> None:
    arguments = ["-v", "-m", "16", "-n", "16", "-k", "16", "--num_sms", "9999", "--output_dir", str(tmp_path)]
    (status, text, _), (other_status, _, _) = ranks.run(printed, SWEEPS["pull"], [*arguments, *SMALL_HEAP])
    assert status == other_status == 1
    assert "FAILED: ArgumentError: all_gather_matmul: config.num_sms: expected at most" in text
    (record,) = written(tmp_path).values()
    assert "config.num_sms" in record["error"]
    assert record["validated"] is None


def sweep_gone_wrong(folder: Path) -> int:
    """A sweep in which one element on the last rank is off by a hundredth of the largest value."""

    def wrong(state: Any, operands: Any, name: str) -> Way:
        chosen = way(state, operands, name)

        def call() -> None:
            chosen.call()
            if operands.ctx.rank == operands.ctx.world_size - 1:
                operands.output[3, 5] += 0.05 * operands.output.abs().max()

        return Way(call, chosen.result, chosen.roundings)

    shape: dict[str, Any] = {"M": 16, "N": 32, "K": 64, "dtype": "bf16", "gather_dim": 1}
    with mock.patch.object(fused, "way", wrong), redirect_stdout(io.StringIO()):
        return gather_sweep.sweep(Options("nccl", 2, True, [shape], folder, None, {}))


@USES_NCCL
@TWO
def test_a_wrong_result_is_found(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(sweep_gone_wrong, tmp_path) == [1, 1]
    (record,) = written(tmp_path).values()
    assert record["validated"] is False
    assert record["error"].startswith("wrong result")
    assert "1 of 256 elements too far off (rank 1 of 2)" in record["error"]
    assert record["time_ms"] is None


@TWO
def test_nothing_that_could_run_is_no_success(ranks: Ranks, tmp_path: Path) -> None:
    arguments = ["-v", "-m", "16", "-n", "16", "-k", "15", "--output_dir", str(tmp_path)]
    (status, text, _), _ = ranks.run(printed, SWEEPS["nccl"], [*arguments, *SMALL_HEAP])
    assert status == 1
    assert "skipped: K=15: no multiple of 2 ranks" in text


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    taken = tmp_path / "8x8x8_bf16_dim0_ranks1.json"
    taken.mkdir()
    arguments = ["-v", "-m", "8", "-n", "8", "-k", "8", "--gather_dim", "0", "--output_dir", str(tmp_path)]
    status, _, err = printed(SWEEPS["push"], ["--num_ranks", "1", *arguments])
    assert status == 1
    assert (
        err.strip()
        == f"benchmark: error: --output_dir: expected a file that can be written, got {taken}: Is a directory"
    )


def test_sweep_that_starts_ranks(tmp_path: Path) -> None:
    arguments = ["--num_ranks", "2", "-v", "-m", "8", "-n", "8", "-k", "8"]
    done = command([], SWEEPS["push"], arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[1/1] 8x8x8 bf16 gather_dim 1: right\n1 right, 0 failed, 0 skipped" in done.stdout
    (record,) = written(tmp_path / "results" / "all_gather_gemm_push").values()
    assert (record["world_size"], record["validated"]) == (2, True)


def test_every_algorithm_in_one_benchmark_under_torchrun(tmp_path: Path) -> None:
    """One process of a launcher starts its own ranks; every algorithm and comparator has a record."""
    out = tmp_path / "out.jsonl"
    arguments = [
        "--axis_M=16",
        "--axis_N=16",
        "--axis_K=32",
        "--axis_gather_dim=1",
        "--repeat=1",
        f"--benchmark_out={out}",
    ]
    done = command(TORCHRUN, AXES, arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    every = {"auto", *ops.ALGORITHMS["all_gather_matmul"], "nccl", "torch_symm_mem", "matmul"}
    assert {"pull", "push", "hbm_buffer", "copy_engine", "decomposed", "low_latency", "baseline"} < every
    assert sorted(one["params"]["algorithm"] for one in records) == sorted(every)
    for one in records:
        assert one["world_size"] == 2
        if one["params"]["algorithm"] == "torch_symm_mem" and BACKEND == "sim":
            assert "needs GPUs" in one["skipped"]
        else:
            assert one["validated"] is True
            assert one["time_ms"]["median"] > 0


@pytest.mark.parametrize("path", [*SWEEPS.values(), AXES])
def test_without_a_flag_there_is_nothing_to_do(path: str) -> None:
    status, out, err = printed(path, [])
    assert status == 1
    assert out == ""
    assert f"{Path(path).name}: nothing to do: give " in err
    assert "--help" in err


@pytest.mark.parametrize("path", [*EXAMPLES.values(), *SWEEPS.values(), AXES])
def test_help(path: str) -> None:
    status, out, _ = printed(path, ["--help"])
    assert status == 0
    assert "--num_ranks" in out
    if path != AXES:
        assert (ROOT / path).read_text().split('"""')[1].strip() in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-v", "-m", "8"], "-m, -n and -k: give all three and no --dataset, or none of them"),
        (["-v", "-m", "8", "-n", "8", "-k", "8", "--dataset", "x.json"], "give all three and no --dataset"),
        (["-b", "--dataset", "no-such.json"], "no-such.json: expected a file that can be read"),
        (["-b", "--dataset", str(ROOT / "README.md")], "expected JSON"),
        (["-b", "--datatype", "fp8"], "invalid choice: 'fp8'"),
        (["-b", "--gather_dim", "2"], "invalid choice: 2"),
        (["-b", "--BLK_M", "0"], "0 is not a positive number"),
        (["-b", "--BLK_K", "17"], "argument --BLK_K: 17 is not a power of two of at least 16"),
        (["-b", "--num_warps", "3"], "argument --num_warps: invalid choice"),
        (["-b", "--num_ranks", "-1"], "-1 is not a positive number"),
        (["-b", "--num_ranks", "x"], "x is not a whole number"),
    ],
)
@pytest.mark.parametrize("path", SWEEPS.values())
def test_bad_flags(path: str, arguments: list[str], words: str) -> None:
    status, _, err = printed(path, arguments)
    assert status == 2
    assert words in err


@pytest.mark.parametrize("path", SWEEPS.values())
def test_a_folder_that_cannot_be_made_is_named_before_ranks_start(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sizes = ["-m", "8", "-n", "8", "-k", "8"]
    with mock.patch("iris.launch") as launch:
        status, _, err = printed(path, ["-v", "--num_ranks", "2", *sizes, "--output_dir", str(tmp_path / "file" / "x")])
    assert status == 2 and f"error: --output_dir {tmp_path}/file/x: Not a directory" in err
    assert not launch.called


def test_a_record_has_what_the_model_expects_here_and_of_an_mi300x() -> None:
    ctx, known = mock.Mock(num_sms=132), HARDWARE["H200 SXM"]
    problem = ops.Problem("all_gather_matmul", 8192, 1024, 8192, torch.bfloat16, 8, 0)
    fused._tell(state := mock.Mock(), ctx, problem, ops.FusedConfig("pull"), known)
    floor, (predicted,) = floor_s(problem, known), state.set_predicted.call_args.args
    assert floor is not None and 0 < floor < predicted < 0.1
    (name, expected) = state.add_counter.call_args.args
    assert name == "mi300x_predicted_ms" and 0.01 < expected < 100
    fused._tell(state := mock.Mock(), ctx, problem, ops.FusedConfig("pull"), None)
    assert not state.set_predicted.called and not state.add_counter.called


@pytest.mark.parametrize("l2", ["warm", "cold"])
def test_the_floor_is_that_of_the_l2_that_a_call_finds(l2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known, problem = HARDWARE["H200 SXM"], ops.Problem("matmul", 1, 1024, 8192, torch.bfloat16, 1)
    evict = mock.Mock()
    monkeypatch.setattr(fused, "evict", evict)
    monkeypatch.setattr(fused, "way", lambda *_: mock.Mock(config=None, a=None))
    monkeypatch.setattr(fused, "hardware", lambda _: known)
    monkeypatch.setattr(fused, "target_of", mock.Mock())
    state = mock.MagicMock(params={"l2": l2})
    values = {"shape": "1x1024x8192", "m": 1, "n": 1024, "k": 8192, "dtype": "bf16", "algorithm": "local"}
    state.__getitem__.side_effect = values.__getitem__
    state.share.return_value.problem = problem
    fused.run(state, mock.Mock(world_size=1), "matmul")
    state.set_floor.assert_called_once_with(floor_s(problem, known, cold=l2 == "cold"))
    assert evict.called == (l2 == "cold")


@pytest.mark.parametrize("lacking", [torch.OutOfMemoryError, dist.DistBackendError])
def test_what_a_comparator_lacks_is_an_error_and_no_reason_to_skip_it(
    lacking: type[RuntimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = ops.Problem("matmul_all_reduce", 8, 8, 8, torch.bfloat16, 2)
    values = {"shape": "8x8x16", "m": 8, "n": 8, "k": 8, "dtype": "bf16", "algorithm": "nccl"}

    def run(error: RuntimeError) -> mock.MagicMock:
        monkeypatch.setattr(fused, "way", lambda *_: mock.Mock(config=None, a=None, call=mock.Mock(side_effect=error)))
        monkeypatch.setattr(fused, "target_of", lambda _: mock.Mock(hardware="none"))
        state = mock.MagicMock(params={})
        state.__getitem__.side_effect = values.__getitem__
        state.share.return_value.problem = problem
        fused.run(state, mock.Mock(world_size=2), "matmul_all_reduce")
        return state

    assert (
        "nccl does not take this: RuntimeError: another dtype" in run(RuntimeError("another dtype")).skip.call_args[0]
    )
    with pytest.raises(lacking):
        run(lacking("no memory"))


@pytest.mark.parametrize("gather_dim", [0, 1])
@pytest.mark.parametrize("algorithm", EXAMPLES)
def test_a_sweep_takes_the_algorithms_own_best_options(algorithm: str, gather_dim: int) -> None:
    """The options that "auto" would take may belong to another algorithm, and not fit this one."""
    h200 = ops.Target("cuda", 132, tma=True, hardware="NVIDIA H200")
    options = Options(algorithm, 0, False, (), Path(), None, {})
    for ranks in (2, 4, 8):
        for shape in Dataset.read(DATA_SET).shapes(OP, ranks):
            m, n, k = (int(shape[name]) for name in ("M", "N", "K"))
            problem = ops.Problem(OP, m, n // ranks, k, torch.bfloat16, ranks, gather_dim)
            operands: Any = SimpleNamespace(op=OP, problem=problem, ctx=None)
            with mock.patch.object(ways, "target_of", return_value=h200):
                config = ways._config(operands, gather_sweep._way(options))
            config.check(OP, (algorithm,), h200.num_sms, torch.bfloat16)
            assert config == ops.pick_config(problem, h200, algorithm)


@USES_NCCL
@TWO
@pytest.mark.parametrize("gather_dim", ["0", "1"])
def test_the_reference_multiplies_int8(ranks: Ranks, gather_dim: str, tmp_path: Path) -> None:
    arguments = ["-v", "-m", "24", "-n", "32", "-k", "48", "--datatype", "int8", "--output_dir", str(tmp_path)]
    (status, text, _), _ = ranks.run(printed, SWEEPS["nccl"], [*arguments, "--gather_dim", gather_dim, *SMALL_HEAP])
    assert status == 0, text
    (record,) = written(tmp_path).values()
    assert record["validated"] is True


def test_data_set_holds_the_table_and_can_be_shared_by_8_ranks() -> None:
    shapes = Dataset.read(DATA_SET).shapes("all_gather_matmul", 8)
    sizes = [(shape["M"], shape["N"], shape["K"]) for shape in shapes]
    assert set(sizes) > TABLE
    assert len(set(sizes)) == len(sizes)
    assert all(int(size) % 8 == 0 for shape in sizes for size in shape)
    assert all({"model", "layer"} <= set(shape) for shape in shapes)


def test_the_simulator_shrinks_the_projects_data_set_and_no_other(tmp_path: Path) -> None:
    arguments = ["-v", "--num_ranks", "3", "--output_dir", str(tmp_path)]
    with mock.patch("iris.backends.detect") as detect:
        detect.return_value.name = "sim"
        own = parse_options("", "pull", DATA_SET, arguments).shapes
        given = parse_options("", "pull", DATA_SET, [*arguments, "--dataset", small_set(tmp_path)]).shapes
    full = Dataset.read(DATA_SET).shapes("all_gather_matmul", 3)
    assert len(own) == len(full)
    for small, shape in zip(own, full, strict=True):
        assert small["divided_by"] == SIM_SHRINK
        for name in ("M", "N", "K"):
            assert int(small[name]) % 3 == 0
            assert 0 <= int(small[name]) - int(shape[name]) / SIM_SHRINK < 3
    assert [(shape["M"], shape["N"], shape["K"]) for shape in given] == [
        (one["m"], one["n"], one["k"]) for one in SMALL
    ]


def test_examples_are_short() -> None:
    for path in EXAMPLES.values():
        assert len((ROOT / path).read_text().splitlines()) < 100


def test_programs_can_be_imported_without_running() -> None:
    for path in (*EXAMPLES.values(), *SWEEPS.values(), AXES):
        spec = importlib.util.spec_from_file_location("program", ROOT / path)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("path", SWEEPS.values(), ids=SWEEPS)
def test_a_sweep_that_is_stopped_says_so(path: str, tmp_path: Path) -> None:
    with mock.patch.object(gather_sweep, "launch", side_effect=KeyboardInterrupt):
        status, _, err = printed(path, ["-v", "--output_dir", str(tmp_path)])
    assert status == 130 and f"stopped; files of what was done are in {tmp_path}" in err
