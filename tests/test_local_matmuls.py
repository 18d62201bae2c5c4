"""benchmark/local_matmuls.py: which matmul is the faster one, Iris's or the library's."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import BACKEND, Ranks, context, worlds
from warm import python

from iris.bench.cases.operands import problem_of
from iris.ops import FusedConfig, tuned

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmark" / "local_matmuls.py"

pytestmark = [] if BACKEND == "sim" else [pytest.mark.gpu]


def test_each_share_of_a_layer_is_measured(tmp_path: Path) -> None:
    entries = [
        {"m": 64, "n": 64, "k": 48, "op": "all_gather_matmul"},
        {"m": 64, "n": 32, "k": 96, "op": ["matmul_all_reduce", "matmul_reduce_scatter"]},
    ]
    data, rows = tmp_path / "layers.json", tmp_path / "rows.json"
    data.write_text(json.dumps(entries))
    options = ["--dataset", data, "--world_sizes", "2", "--rows", "8", "--rows_out", rows, "--dtype", "fp16"]
    done = script(*options, "--b_layout", "transposed", "--compilers", "2")
    assert done.returncode == 0, done.stderr
    (found,) = [json.loads(line) for line in done.stdout.splitlines()]  # the shares of both layers have the same sizes
    assert {name: found[name] for name in ("m", "n", "k", "b_layout")} == {"m": 8, "n": 32, "k": 48} | {
        "b_layout": "transposed"
    }
    assert len(found["us"]) > 2 and found["us"].keys() == found["warm_us"].keys() and "torch.matmul" in found["us"]
    faster = len(tuned.read(rows))
    assert f"Iris's matmul is the faster one in {faster} of 1" in done.stderr
    if BACKEND == "sim":
        assert faster == 0


def test_int8_is_multiplied_beside_the_library_where_that_takes_it(tmp_path: Path) -> None:
    data = tmp_path / "layers.json"
    data.write_text(json.dumps([{"m": 64, "n": 128, "k": 128, "op": "all_gather_matmul"}]))
    options = ["--dataset", data, "--world_sizes", "2", "--rows", "8", "24", "--dtype", "int8", "--compilers", "1"]
    done = script(*options, "--b_layout", "row_major")
    assert done.returncode == 0, done.stderr
    few, more = [json.loads(line)["us"] for line in done.stdout.splitlines()]
    assert "torch._int_mm" in more and len(few) > 1
    assert ("torch._int_mm" in few) == (BACKEND == "sim")  # a GPU's library takes no fewer than 17 rows
    refused = script(*options, "--rows_out", tmp_path / "rows.json")
    assert refused.returncode == 2 and "no row is of int8" in refused.stderr


def test_what_cannot_be_read_or_written_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("[]")
    for options, status, words in (
        (["--dataset", tmp_path / "none.json"], 2, "local_matmuls: error: dataset: "),
        (["--rows_out", tmp_path / "rows.json"], 2, "local_matmuls: error: tuned rows: "),
        (["--dtype", "fp64"], 2, "local_matmuls.py: error: argument --dtype: invalid choice: 'fp64'"),
    ):
        refused = script(*options, "--compilers", "1")
        assert refused.returncode == status and not refused.stdout, refused
        assert any(line.startswith(words) for line in refused.stderr.splitlines()[-2:])
        assert "Traceback" not in refused.stderr


def test_float32_is_checked_in_float64(tmp_path: Path) -> None:
    data = tmp_path / "layers.json"
    data.write_text(json.dumps([{"m": 64, "n": 64, "k": 480, "op": "all_gather_matmul"}]))
    options = ["--dataset", data, "--world_sizes", "2", "--rows", "8", "--dtype", "fp32", "--compilers", "1"]
    done = script(*options, "--b_layout", "row_major")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["us"]) > 1


def script(*options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python(), SCRIPT, *map(str, options)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def rows_by_times(times: list[tuple[float, float, float]]) -> list[tuned.Row | None]:
    """The row for each triple of µs: of the library's matmul, of Iris's, and of Iris's on the same weights."""
    ctx, script = context(), runpy.run_path(str(SCRIPT))
    problem = problem_of("matmul", (16, 32, 64), torch.float16, 1, 0)
    weights = [torch.randn(64, 32, dtype=torch.float16, device=ctx.device) for _ in range(2)]
    trials: dict[FusedConfig | None, Any] = script["measured"](ctx, problem, weights)
    best = next(config for config in trials if config is not None)
    found = []
    for library, cold, warm in times:
        for config, trial in trials.items():
            own, same = (cold, warm) if config == best else (library, library)
            trial.cold_us, trial.warm_us = [own] * 3, [same] * 3
        found.append(script["row"](ctx, problem, trials, "abc"))
    return found


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_a_row_is_made_where_iris_is_the_faster_one(ranks: Ranks) -> None:
    times = [(10.0, 9.0, 9.0), (10.0, 9.9, 9.0), (10.0, 9.0, 10.5), (19.594, 19.022, 19.0)]
    ((row, *others, barely),) = ranks.run(rows_by_times, times)
    assert others == [None, None]
    assert barely.library_ms < 1.03 * barely.measured_ms and barely.beats_library  # as its times are rounded
    assert (row.op, row.world_size, row.m, row.n, row.k) == ("matmul", 1, 16, 32, 64)
    assert (row.measured_ms, row.library_ms) == (0.009, 0.01) and row.versions["commit"] == "abc"


def wrong_product() -> str:
    ctx, script = context(), runpy.run_path(str(SCRIPT))
    problem = problem_of("matmul", (16, 32, 64), torch.float16, 1, 0)
    a, b = (torch.randn(*shape, dtype=torch.float16, device=ctx.device) for shape in ((16, 64), (64, 32)))
    try:
        script["Trial"](ctx, problem, a, None).check(b, a.float() @ b.float() + 0.1)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_a_wrong_product_has_no_time(ranks: Ranks) -> None:
    (complaint,) = ranks.run(wrong_product)
    assert "relative error" in complaint
