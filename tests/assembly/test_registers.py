"""Programs that wait for peers' must leave room for those that others wait for: the registers that exchanges take."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from case import compile_case
from kernels import CASES
from triton import knobs

from iris.ops.exchange import _MAX_WORDS, _programs_per_sm, blocks_of

REGISTERS, THREADS = 1 << 16, 2048
"""Of an SM of compute capability 9.0."""


def registers(ptx: str, tmp_path: Path) -> int:
    """What a thread takes, by the newer of the assemblers that come with Triton."""
    source = tmp_path / "kernel.ptx"
    source.write_text(ptx)
    assembler, written = knobs.nvidia.ptxas_blackwell.path, source.with_suffix(".cubin")
    command = [assembler, "-arch=sm_90a", "-v", str(source), "-o", str(written)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(re.findall(r"Used (\d+) registers", done.stderr)[-1])


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_an_exchange_in_words_leaves_room_for_another(world_size: int, tmp_path: Path) -> None:
    """Two streams may run two at a time: if one took whole SMs, each rank could have begun another one, and wait for
    its peers for ever."""
    blocks = blocks_of((192 // world_size, 8192), torch.float16, world_size, 132, hops=2)
    assert blocks.words and blocks.block_n == 2 * _MAX_WORDS, "the largest blocks take the most"
    case = CASES["exchange_words-twice"]
    sizes = {
        "WORLD": world_size, "SOURCES": world_size, "BLOCK_M": blocks.block_m, "BLOCK_N": blocks.block_n,
        "num_warps": blocks.num_warps,
    }  # fmt: skip
    case = replace(case, constants=case.constants | sizes)
    threads = (_programs_per_sm(world_size) + 1) * 32 * blocks.num_warps
    assert threads <= THREADS
    assert threads * registers(compile_case(case, "sm_90"), tmp_path) <= REGISTERS
