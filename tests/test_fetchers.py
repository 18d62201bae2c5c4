"""benchmark/fetchers.py: hbm_buffer of one rank of several, alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import worlds

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("num_ranks", worlds(1, 1))
def test_one_rank_gathers_alone(num_ranks: int) -> None:
    options = [
        "--axis_M=288",
        "--axis_N=64",
        "--axis_K=384",
        "--axis_ranks=3",
        "--axis_way=2x1",
        "--benchmark_format",
        "json",
    ]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmark" / "fetchers.py", "--num_ranks", str(num_ranks), *options],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [one["params"]["gather_dim"] for one in records] == [1, 0], done.stdout
    assert all(one["validated"] and one["error"] is None for one in records), records
