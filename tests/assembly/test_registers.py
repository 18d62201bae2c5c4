"""Programs that wait for peers' must leave room for those that others wait for: the registers that exchanges take."""

from __future__ import annotations

import re
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
import triton.language as tl
from case import Case, compile_case
from matmuls import PARTS, word_arguments
from triton import knobs

from iris.ops.exchange import _MAX_WORDS, _programs_per_sm, blocks_of, exchange_words_kernel

REGISTERS, THREADS = 1 << 16, 2048
"""Of an SM of compute capability 9.0."""


def registers(ptx: str, tmp_path: Path) -> int:
    """What a thread takes, by the newer of the assemblers that come with Triton."""
    source = tmp_path / "kernel.ptx"
    source.write_text(ptx)
    command = [
        knobs.nvidia.ptxas_blackwell.path,
        "-arch=sm_90a",
        "-v",
        str(source),
        "-o",
        str(tmp_path / "kernel.cubin"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(re.findall(r"Used (\d+) registers", done.stderr)[-1])


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_an_exchange_in_words_leaves_room_for_another(world_size: int, tmp_path: Path) -> None:
    """Two streams may run two at a time: if one took whole SMs, each rank could have begun another one, and wait for
    its peers for ever."""
    blocks = blocks_of((192 // world_size, 8192), torch.bfloat16, world_size, 132, hops=2)
    assert blocks.words and blocks.block_n == 2 * _MAX_WORDS, "the largest blocks take the most"
    constants = {
        "SITE": 6, "WORLD": world_size, "BIAS": 2, "ACC_DTYPE": tl.float32, "SPLIT": True, "TOTAL": True,
        "EVERYWHERE": True, "BY_ROWS": False, "SOURCES": world_size, "PACK": 2, "BLOCK_M": blocks.block_m,
        "BLOCK_N": blocks.block_n, "num_warps": blocks.num_warps,
    }  # fmt: skip
    case = Case("words", exchange_words_kernel, partial(word_arguments, torch.bfloat16, PARTS[""]), constants)
    threads = (_programs_per_sm(world_size) + 1) * 32 * blocks.num_warps
    assert threads <= THREADS
    assert threads * registers(compile_case(case, "sm_90"), tmp_path) <= REGISTERS
