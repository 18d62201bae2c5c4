"""Without TMA, tiles move 16 bytes at a time."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from case import Case, compile_case, in_turn, of
from compiler import TARGETS, target
from matmuls import matmul_case

from iris.device import arch
from iris.ops import FusedConfig, Problem, Target
from iris.ops.candidates import plain
from iris.ops.config import MI350_SHARED_NBYTES
from iris.ops.obstacles import SHARED_NBYTES
from iris.ops.words import sent_in_words

WIDE = {"sm_90": r"cp\.async\.cg\.", "gfx942": r"buffer_load_dwordx4\b"}
NARROW = {"sm_90": r"ld\.global\.b(8|16)\b", "gfx942": r"(buffer|global)_load_(u|s)(short|byte)\w*"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target_name", WIDE)
def test_tiles_by_pointers_move_16_bytes_at_a_time(target_name: str) -> None:
    case = matmul_case("local", torch.bfloat16, False, False, 0, True, False, (target_name,))
    listing = compile_case(replace(case, constants=case.constants | {"BLOCK_M": 128, "BLOCK_N": 128}), target_name)
    assert re.search(WIDE[target_name], listing)
    assert not re.findall(NARROW[target_name], listing)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("op", in_turn(["hbm_rows", "hbm_columns"]))
def test_fetchers_load_ahead(op: str) -> None:
    """A block of 64 × 128 takes four accesses of each thread; the first six blocks are requested before the loop."""
    case = matmul_case(op, torch.bfloat16, True, False, 0, True, False, ("sm_90",))
    constants = case.constants | {"COURIER_M": 64, "COURIER_N": 128, "num_warps": 8}
    listing = compile_case(replace(case, constants=constants), "sm_90")
    assert len(re.findall(WIDE["sm_90"], listing)) == 2 * 4 * (6 + 1)  # loops of the first stage, and of the rest
    assert not re.findall(NARROW["sm_90"], listing)


@triton.jit
def fences(out):
    arch.fence_async_proxy()
    arch.wait_bulk_stores()
    tl.store(out, 1)


@pytest.mark.parametrize(("target_name", "times"), [("sm_80", 0), ("sm_90", 1), ("gfx942", 0)])
def test_what_orders_tma_is_only_where_there_is_tma(target_name: str, times: int) -> None:
    listing = compile_case(Case("fences", fences, of(torch.int32), targets=(target_name,)), target_name)
    for instruction in ("fence.proxy.async", "cp.async.bulk.wait_group"):
        assert listing.count(instruction) == times


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("target_name", TARGETS)
def test_full_precision_is_taken_where_there_is_no_tf32(target_name: str, dtype: torch.dtype) -> None:
    """Ops request TF32 if PyTorch allows it, and for products of fp8 that are kept in 16 bits."""
    case = matmul_case("local", dtype, False, False, 0, True, False, (target_name,))
    listing = compile_case(replace(case, constants=case.constants | {"PRECISION": "tf32"}), target_name)
    there = dtype == torch.float32 and target_name != "gfx950"
    assert bool(re.search(r"\bmma\.\S+\.tf32|v_mfma\S+_xf32", listing)) == there


SUMS = Problem("matmul_reduce_scatter", 8192, 8192, 8192, torch.bfloat16, 8)
OF_INTEGERS = Problem("matmul_all_reduce", 256, 1024, 8192, torch.int8, 2)
"""A problem whose tiles travel as words of eight bytes."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("target_name", "backend", "kernel", "algorithm", "asked"),
    in_turn(
        [
            *(
                (target_name, backend, kernel, algorithm, SUMS)
                for kernel, algorithm in (("scatter_rows", "push"), ("add_rows", "atomic"))
                for target_name, backend in (("sm_90", "cuda"), ("sm_100", "cuda"), ("gfx942", "hip"))
            ),
            ("gfx942", "hip", "two_shot_words", "two_shot", OF_INTEGERS),
        ]
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_largest_tile_fits_into_shared_memory(
    target_name: str, backend: str, kernel: str, algorithm: str, asked: Problem
) -> None:
    here = Target(backend, 132)
    config = plain(asked, algorithm, here)
    assert sent_in_words(asked, config) == (asked is OF_INTEGERS)
    case = matmul_case(kernel, asked.dtype, False, False, 0, True, False, (target_name,))
    tile = {"BLOCK_M": config.block_size_m, "BLOCK_N": config.block_size_n, "BLOCK_K": config.block_size_k}
    with target(target_name):
        compiled = case.kernel.warmup(
            *case.arguments(), grid=(1,), **case.constants | tile | config.launch_options(here)
        )
    assert compiled.metadata.shared <= SHARED_NBYTES[backend]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sizes", in_turn([(256, 256, 64, 8, 2), (128, 128, 64, 8, 4), (64, 128, 128, 4, 3)]), ids=str)
def test_stages_on_the_newest_of_amd_take_no_more_than_is_counted(sizes: tuple[int, ...]) -> None:
    """Triton 3.9 keeps all stages in LDS there, and pads them; 3.6 keeps one in registers."""
    here = Target("hip", 256, shared_nbytes=MI350_SHARED_NBYTES)
    names = "block_size_m", "block_size_n", "block_size_k", "num_warps", "num_stages"
    fields: dict[str, Any] = dict(zip(names, sizes, strict=True))
    config = FusedConfig("push", **fields)
    case = matmul_case("scatter_rows", torch.bfloat16, False, False, 0, True, False, ("gfx950",))
    tile = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), sizes, strict=False))
    with target("gfx950"):
        compiled = case.kernel.warmup(
            *case.arguments(), grid=(1,), **case.constants | tile | config.launch_options(here)
        )
    assert compiled.metadata.shared <= here.nbytes_of_stages(config, 2) <= MI350_SHARED_NBYTES
