"""benchmark/training_step.py: gradients of layers that are made of the ops; benchmark/compiled_layers.py: layers in
graphs."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import BACKEND, USES_NCCL, Ranks, context, worlds
from warm import python

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmark" / "training_step.py"
SIZES = (48, 40, 72)
WAYS = ("auto", "nccl", "nccl_overlapped")


def records_of(script: Path, num_ranks: int, *options: str) -> list[dict[str, Any]]:
    """The records that ``script`` writes; checks that all results are right."""
    heap = ["--heap_size", str(1 << 26)]
    done = subprocess.run(
        [python(), script, "--num_ranks", str(num_ranks), "--benchmark_format", "json", *options, *heap],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert all(one["validated"] and one["error"] is None for one in records), records
    return records


@USES_NCCL
@pytest.mark.parametrize("num_ranks", worlds(2, 2))
def test_gradients_of_every_way_are_right(num_ranks: int) -> None:
    options = [f"--axis_{name}={size}" for name, size in zip(("tokens", "hidden", "inner"), SIZES, strict=True)]
    records = records_of(SCRIPT, num_ranks, *options)
    assert [one["params"]["algorithm"] for one in records] == list(WAYS)


@USES_NCCL
@pytest.mark.parametrize("num_ranks", worlds(2, 2))
def test_compiled_layers_are_right(num_ranks: int) -> None:
    ways = "compiled", "broken", "nccl+graphs", "compiled+graphs"
    sizes = "--axis_rows=6", "--axis_hidden=64", "--axis_inner=128"
    records = records_of(SCRIPT.with_name("compiled_layers.py"), num_ranks, f"--axis_way={','.join(ways)}", *sizes)
    assert [one["params"]["way"] for one in records] == list(ways)


@USES_NCCL
@pytest.mark.parametrize("num_ranks", worlds(2, 2))
def test_fused_layers_are_right(num_ranks: int) -> None:
    ways = ["sequence", *(["sequence+torch"] if BACKEND != "sim" else []), "sequence+iris"]
    sizes = "--axis_rows=6", "--axis_hidden=64", "--axis_inner=128"
    records = records_of(SCRIPT.with_name("compiled_layers.py"), num_ranks, f"--axis_way={','.join(ways)}", *sizes)
    assert [one["params"]["way"] for one in records] == ways


def complaints(dtype: torch.dtype) -> list[str]:
    ctx, script = context(), runpy.run_path(str(SCRIPT))
    step = script["Step"](ctx, SIZES, dtype)
    columns, rows = script["IrisColumns"], script["IrisRows"]
    step.run(lambda *of: columns.apply(ctx, *of), lambda *of: rows.apply(ctx, *of))
    found = [step.complaint()]
    for leaf in (step.x, step.up, step.down):
        right = leaf.grad.clone()
        leaf.grad[: -(-leaf.shape[0] // 8)].zero_()
        found.append(step.complaint())
        leaf.grad.copy_(right)
    return found


@pytest.mark.parametrize("ranks", worlds(2, 2 if BACKEND == "sim" else 8), indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_wrong_gradient_is_noticed(ranks: Ranks, dtype: torch.dtype) -> None:
    for fine, *wrong in ranks.run(complaints, dtype):
        assert fine == ""
        for name, found in zip(("x", "up", "down"), wrong, strict=True):
            assert f"gradient of {name}: relative error" in found and found.count("gradient") == 1
