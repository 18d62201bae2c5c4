"""A call without a trace costs nothing: its kernel has no code that records."""

from __future__ import annotations

import pytest
import torch
from case import compile_case
from listing import Event, read
from matmuls import matmul_case


def clocks(op: str, traced: bool, target_name: str) -> int:
    """How often the kernel of ``op`` reads the clock."""
    listing = read(
        compile_case(matmul_case(op, torch.bfloat16, False, traced, 0, True, False, (target_name,)), target_name)
    )
    return sum(bool(one.events & Event.CLOCK) for one in listing)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target_name", ["sm_90", "gfx942"])
def test_no_clock_without_a_trace(target_name: str) -> None:
    """This is about kernels that wait for nothing, as waits read the clock themselves."""
    assert clocks("local", False, target_name) == 0
    assert clocks("local", True, target_name) > 0
