"""Where there is no TMA, tiles move 16 bytes at a time."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from case import compile_case
from matmuls import matmul_case

WIDE = {"sm_90": r"cp\.async\.cg\.", "gfx942": r"buffer_load_dwordx4\b"}
NARROW = {"sm_90": r"ld\.global\.b(8|16)\b", "gfx942": r"(buffer|global)_load_(u|s)(short|byte)\w*"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target_name", WIDE)
def test_tiles_by_pointers_move_16_bytes_at_a_time(target_name: str) -> None:
    case = matmul_case("local", torch.bfloat16, False, False, 0, True, False, (target_name,))
    listing = compile_case(replace(case, constants=case.constants | {"BLOCK_M": 128, "BLOCK_N": 128}), target_name)
    assert re.search(WIDE[target_name], listing)
    assert not re.findall(NARROW[target_name], listing)
