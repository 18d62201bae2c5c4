"""The registers of exchanges: programs that wait for peers must leave room for programs that peers wait for."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from case import compile_case, in_turn
from compiler import tensor
from kernels import CASES
from matmuls import word_arguments
from triton import knobs

from iris.device.tile import Matrix
from iris.ops.exchange import Blocks, _programs_per_sm, blocks_of, registers

REGISTERS, THREADS, ALLOCATED = 1 << 16, 2048, 8
"""Registers and threads of an SM of compute capability 9.0; a thread gets a multiple of ALLOCATED registers, on gfx942,
too."""
VECTOR_REGISTERS, WAVES, SIMDS = 512, 8, 4
"""Registers and waves of each SIMD, and SIMDs of a CU."""


def taken(ptx: str, tmp_path: Path) -> tuple[int, int]:
    """The registers of a thread, and the bytes that it spills, by the newest of the assemblers that come with
    Triton."""
    source = tmp_path / "kernel.ptx"
    source.write_text(ptx)
    assembler, written = knobs.nvidia.ptxas_blackwell.path, source.with_suffix(".cubin")
    command = [assembler, "-arch=sm_90a", "-v", str(source), "-o", str(written)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    counts = [
        re.findall(pattern, done.stderr)[-1] for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    ]
    return int(counts[0]), int(counts[1])


def waves(listing: str) -> int:
    """How many waves a SIMD has room for, by the vector registers that an AMD listing requests."""
    (count,) = re.findall(r"\.vgpr_count:\s+(\d+)", listing)
    return min(VECTOR_REGISTERS // (-(-int(count) // ALLOCATED) * ALLOCATED), WAVES)


def strided(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """Strides of matrices whose elements cannot be accessed as vectors."""
    handle, epochs, inbox, half, *_, bias = word_arguments(dtype, sizes)[:7]
    mine, result = Matrix(tensor(dtype), 4097, 1), Matrix(tensor(dtype), 4097, 3)
    rows, cols, *others = sizes
    return handle, epochs, inbox, half, mine, result, bias, rows, cols - 1, *others, cols * dtype.itemsize // 4, 1056


OPERANDS = {"vectors": word_arguments, "strided": strided}
EXCHANGES = (
    ("twice", torch.float16, "vectors"),
    ("twice", torch.float32, "vectors"),
    ("twice", torch.int32, "vectors"),
    ("total", torch.float16, "vectors"),
    ("gather", torch.float32, "vectors"),
    ("twice", torch.float16, "strided"),
    ("gather", torch.float8_e4m3fn, "strided"),
)


def exchange_of(
    kind: str, dtype: torch.dtype, operands: str, world_size: int
) -> tuple[Callable[[], tuple[Any, ...]], Blocks, dict[str, Any]]:
    """Arguments, blocks and constants of an exchange with the largest blocks."""
    part = ((16 if dtype == torch.int32 else 400 // dtype.itemsize) // world_size, 8192)
    blocks = blocks_of(part, dtype, world_size, 132, hops=2 if kind == "twice" else 1)
    assert blocks.words
    assert blocks.num_warps == 4 or dtype == torch.int32, "the largest blocks take the most"
    constants = {
        "WORLD": world_size, "SOURCES": world_size, "PACK": 4 // dtype.itemsize, "BLOCK_M": blocks.block_m,
        "BLOCK_N": blocks.block_n, "num_warps": blocks.num_warps,
    }  # fmt: skip
    return partial(OPERANDS[operands], dtype, (*part, blocks.count, world_size * part[0])), blocks, constants


@pytest.mark.parametrize(
    ("kind", "dtype", "operands", "world_size"),
    in_turn([(*exchange, world_size) for exchange in EXCHANGES for world_size in (2, 4, 8)]),
    ids=str,
)
def test_an_exchange_in_words_leaves_room_for_another(
    kind: str, dtype: torch.dtype, operands: str, world_size: int, tmp_path: Path
) -> None:
    """Two exchanges on two streams may run at the same time. If one took whole SMs, each rank could have begun another
    one first, and would wait for its peers for ever. (With more than eight ranks there is one program on an SM,
    whatever it takes.)"""
    arguments, blocks, constants = exchange_of(kind, dtype, operands, world_size)
    constants["maxnreg"] = registers(blocks.num_warps, world_size)
    case = CASES[f"exchange_words-{kind}"]
    ptx = compile_case(replace(case, constants=case.constants | constants, arguments=arguments), "sm_90")
    threads = 32 * blocks.num_warps * (_programs_per_sm(world_size) + 1)
    assert threads <= THREADS
    each, spilt = taken(ptx, tmp_path)
    assert threads * -(-each // ALLOCATED) * ALLOCATED <= REGISTERS
    assert operands == "strided" or spilt == 0


@pytest.mark.parametrize(
    ("kind", "dtype", "operands", "world_size", "target_name"),
    in_turn(
        [
            (*exchange, world_size, target_name)
            for exchange in EXCHANGES[:1] + EXCHANGES[-2:]
            for world_size in (2, 4, 8)
            for target_name in ("gfx942", "gfx950")
        ]
    ),
    ids=str,
)
def test_an_exchange_leaves_room_for_another_on_amd(
    kind: str, dtype: torch.dtype, operands: str, world_size: int, target_name: str
) -> None:
    arguments, blocks, constants = exchange_of(kind, dtype, operands, world_size)
    case = CASES[f"exchange_words-{kind}"]
    listing = compile_case(replace(case, constants=case.constants | constants, arguments=arguments), target_name)
    each = -(-blocks.num_warps // SIMDS)
    assert each * (_programs_per_sm(world_size, "hip") + 1) <= waves(listing)
