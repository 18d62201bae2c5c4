"""Configs: the pick is pure, every field reaches the launch, and nonsense is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from iris.errors import ArgumentError
from iris.ops import FusedConfig, Problem, Target, pick_config
from iris.ops import matmul as host

H200 = Target("cuda", 132, tma=True)
MI300X = Target("hip", 304)


def problem(m: int = 8192, n: int = 4096, k: int = 8192, dtype: torch.dtype = torch.bfloat16) -> Problem:
    return Problem("all_gather_matmul", m, n, k, dtype, 8, m * k * dtype.itemsize * 7 // 8)


def test_auto_stages_large_parts_where_there_is_room() -> None:
    large, small = problem(), problem(m=64)
    assert pick_config(large, H200).algorithm == "copy_engine"
    assert pick_config(large, replace(H200, staging_fits=False)).algorithm == "pull"
    assert pick_config(small, H200).algorithm == "pull"
    assert pick_config(large, Target("sim", 4)).algorithm == "pull"
    assert pick_config(replace(large, op="matmul_all_scatter"), H200).algorithm == "push"


def test_pick_is_a_function_of_its_arguments() -> None:
    assert pick_config(problem(), H200) == pick_config(problem(), H200)
    large, small = pick_config(problem(), H200), pick_config(problem(m=64, n=256), H200)
    assert large.block_size_m * large.block_size_n > small.block_size_m * small.block_size_n


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("m", [1, 100, 16384])
@pytest.mark.parametrize("target", [H200, MI300X, Target("sim", 4)], ids=lambda target: target.backend)
def test_every_pick_is_valid(target: Target, m: int, dtype: torch.dtype) -> None:
    config = pick_config(problem(m=m, dtype=dtype), target)
    config.check("all_gather_matmul", ("pull", "copy_engine"), target.num_sms)
    stage = (config.block_size_m + config.block_size_n) * config.block_size_k * dtype.itemsize
    limit = {"cuda": 227 << 10, "hip": 64 << 10, "sim": 1 << 30}[target.backend]
    assert stage * (config.num_stages - (target.backend == "hip")) <= limit


def with_value(config: FusedConfig, field: str, value: int) -> FusedConfig:
    values: dict[str, Any] = {field: value}
    return replace(config, **values)


def launches_of(monkeypatch: pytest.MonkeyPatch, config: FusedConfig, target: Target) -> dict[str, Any]:
    """The grid and keyword arguments that a launch with ``config`` would have."""
    seen: dict[str, Any] = {}

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            seen["grid"] = grid
            return lambda *args, **options: seen.update(options)

    class Context:
        handle = (None, None)
        num_sms = target.num_sms

    class Workspace:
        def flags(self, chunks: int, blocks_per_chunk: int) -> None:
            return None

    monkeypatch.setattr("iris.device.matmul.matmul_kernel", Kernel())
    monkeypatch.setattr(host, "target_of", lambda ctx: target)
    a, b, c = torch.zeros(2048, 64), torch.zeros(64, 2048), torch.zeros(2048, 2048)
    small = Problem("all_gather_matmul", 2048, 2048, 64, torch.float32, 1, 0)
    plan = host.Plan(0, None, None)
    host.run(Context(), small, plan, c, a, b, None, 0, config, Workspace(), None)  # type: ignore[arg-type]
    return seen


# "algorithm" chooses the launch, and tests of the ops run each; "num_chunks" is proved by tests/test_ops.py.
CHANGES = {
    "block_size_m": 32,
    "block_size_n": 32,
    "block_size_k": 32,
    "group_size_m": 3,
    "num_sms": 5,
    "num_warps": 2,
    "num_stages": 5,
    "waves_per_eu": 2,
    "matrix_instr_nonkdim": 32,
    "kpack": 2,
}


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_reaches_the_launch(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    base = FusedConfig()
    changed = with_value(base, field, CHANGES[field])
    assert launches_of(monkeypatch, base, MI300X) != launches_of(monkeypatch, changed, MI300X)


def test_no_field_is_left_out() -> None:
    assert {field.name for field in fields(FusedConfig)} == {*CHANGES, "algorithm", "num_chunks"}


def test_amd_options_stay_on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "kpack" in launches_of(monkeypatch, FusedConfig(), MI300X)
    assert "kpack" not in launches_of(monkeypatch, FusedConfig(), replace(H200, tma=False))


@pytest.mark.parametrize("field", [field.name for field in fields(FusedConfig) if field.name != "algorithm"])
def test_nonsense_is_refused_by_name(field: str) -> None:
    with pytest.raises(ArgumentError, match=rf"some_op: config\.{field}: expected"):
        with_value(FusedConfig(), field, -1).check("some_op", ("auto",), 132)


def test_floor_is_the_larger_term() -> None:
    one = problem()
    assert one.floor_s(1e12, 1e30) == one.flops / 1e12
    assert one.floor_s(1e30, 1e9) == one.received_bytes / 1e9
