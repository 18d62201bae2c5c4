"""benchmark/mirrored.py and benchmark/fetchers.py, which emulate ranks of larger jobs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ops_inputs import some
from ranks import worlds
from warm import python

from iris.ops import ALGORITHMS

ROOT = Path(__file__).parents[1]
UNCHECKED = ("atomic", "two_shot")
"""Algorithms of an all-reduce whose results are in part those of another rank."""


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python(), ROOT / "benchmark" / f"{script}.py", *options],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def records(script: str, num_ranks: int, *options: str) -> list[dict[str, Any]]:
    done = run(script, *options, f"--num_ranks={num_ranks}", "--benchmark_format=json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("num_ranks", worlds(2, 2))
def test_two_stand_for_four_in_every_way(num_ranks: int) -> None:
    """Results are right, so all that peers send arrives in the right place, and is waited for."""
    sizes = ("--axis_M=64", "--axis_N=32", "--axis_K=32", "--axis_ranks=4")
    ops = some([op for op in ALGORITHMS if op != "matmul"], 4)
    measured = records("mirrored", num_ranks, *(f"{op}_mirrored" for op in ops), *sizes, "--repeat=1")
    for op in ops:
        mine = [one for one in measured if one["case"] == f"{op}_mirrored"]
        assert all(bool(one["nbytes"]) == (one["params"]["way"] != "matmul") for one in mine), mine
        for algorithm in ALGORITHMS[op]:
            found = [one for one in mine if one["params"]["way"] == algorithm]
            assert len(found) == (2 if op == "all_gather_matmul" else 1), (op, algorithm)
            checked = None if op == "matmul_all_reduce" and algorithm in UNCHECKED else True
            assert [(one["validated"], one["error"]) for one in found] == [(checked, None)] * len(found), found


@pytest.mark.parametrize("num_ranks", worlds(2, 2))
def test_two_that_stand_for_four_are_made_level(num_ranks: int) -> None:
    sizes = ("--axis_M=256", "--axis_N=64", "--axis_K=64", "--axis_ranks=4")
    cases = ("matmul_all_scatter_mirrored", "matmul_all_reduce_mirrored")
    way = "--axis_way=decomposed+num_chunks=4+block_size_m=16"
    measured = records("mirrored", num_ranks, *cases, *sizes, way, "--repeat=1")
    assert [(one["case"], one["validated"], one["error"]) for one in measured] == [(case, True, None) for case in cases]


@pytest.mark.parametrize("num_ranks", worlds(1, 1))
def test_one_rank_gathers_alone(num_ranks: int) -> None:
    sizes = ("--axis_M=288", "--axis_N=64", "--axis_K=384", "--axis_ranks=3")
    measured = records("fetchers", num_ranks, *sizes, "--axis_way=2x1+split", "--repeat=1")
    assert [one["params"]["gather_dim"] for one in measured] == [1, 0], measured
    assert all(one["validated"] and one["error"] is None for one in measured), measured


@pytest.mark.parametrize(("script", "ranks"), some([("mirrored", 17), ("fetchers", 1)]))
def test_no_other_number_of_ranks_is_begun_with(script: str, ranks: int) -> None:
    """More than 16 would wait for each other in vain."""
    done = run(script, "--benchmark_list", f"--axis_ranks={ranks}")
    assert done.returncode != 0
    assert done.stderr.startswith(f"{script}.py"), done
    assert ": error: bench: --axis_ranks: expected one of 8, 2, 3," in done.stderr, done
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("script", "words", "program"),
    some(
        [
            ("training_step", [], "training_step.py"),
            ("mirrored", [], "mirrored.py [CASE …]"),
            ("mirrored", ["matmul_all_reduce_mirrored"], "mirrored.py matmul_all_reduce_mirrored"),
        ]
    ),
)
def test_an_error_calls_a_script_by_its_name(script: str, words: list[str], program: str) -> None:
    done = run(script, *words, "--no_such_option")
    assert done.returncode == 2
    assert done.stderr.startswith(f"{program}: error: unrecognized arguments: --no_such_option\n"), done
