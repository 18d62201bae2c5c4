"""Threads that hold the same word may see it arrive at different times: all agree, and all use the arrived value."""

from __future__ import annotations

import re

import pytest
import rules
import torch
import triton
import triton.language as tl
from case import CUDA, Case, compile_case, with_handle
from listing import Event, Listing, read

from iris.device.words import take_words


@triton.jit
def words(handle, ptr, out, ROWS: tl.constexpr, COLS: tl.constexpr):
    lanes = tl.arange(0, 1)
    offsets = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    seen = take_words((ptr + offsets)[None, :, :], lanes.sum() + 7, lanes, (lanes == 0)[:, None, None], handle)
    tl.store(out + offsets, tl.reshape(seen, (ROWS, COLS)))


def compiled(target_name: str, cols: int, threads: int) -> Listing:
    lanes = 32 if target_name in CUDA else 64
    constants = {"ROWS": 16, "COLS": cols, "num_warps": threads // lanes}
    case = Case("words", words, with_handle(torch.int64, torch.int32), constants, (target_name,))
    return read(compile_case(case, target_name))


def looks(target_name: str, threads: int) -> int:
    """How many blocks of the assembly look at words, or at the abort word."""
    listing = compiled(target_name, 16, threads)
    fresh = {"sc0", "sc1"} if listing.amd else {"volatile"}
    looking = [
        [one for one in block.instructions if Event.LOAD in one.events and fresh <= set(re.split(r"[. ]", one.text))]
        for block in listing.blocks
    ]
    return sum(map(bool, looking))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target_name", ["sm_90", "gfx942"])
def test_words_of_several_threads_are_looked_at_again(target_name: str) -> None:
    """They are looked at after the loop, too, if there are fewer words than threads."""
    assert looks(target_name, 512) == looks(target_name, 256) + 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target_name", ["sm_90", "gfx942"])
def test_words_are_taken_when_all_threads_have_looked(target_name: str) -> None:
    assert rules.taking(compiled(target_name, 16, 512), "argument 2") == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("threads", [128, 512])
def test_threads_agree_whether_words_have_come(threads: int) -> None:
    """They agree even about the fewest words that can be waited for."""
    assert rules.agreement(compiled("sm_90", 8, threads)) == []
