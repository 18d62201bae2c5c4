"""On AMD distances to peers' memory are not cut off, and what lies before a pointer is reached."""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl
from addresses import distances
from case import HIP, handle, with_handle
from compiler import target, tensor, text_of

import iris
from iris.device import control, matmul, tile
from iris.ops.matmul_all_scatter import relay_courier


@triton.jit
def by_distance(handle, source, target_ptr):
    """The obvious way to write it, which is wrong on AMD."""
    offsets = tl.arange(0, 256)
    base = tl.load(handle.bases + 1) - tl.load(handle.bases)
    tl.store(target_ptr + offsets + base // 4, tl.load(source + offsets))


@triton.jit
def by_translate(handle, source, target_ptr, flag, peer):
    offsets = tl.arange(0, 256)
    iris.peer.store(handle, target_ptr + offsets, tl.load(source + offsets), peer)
    for other in range(iris.world_size(handle)):
        there = iris.peer.translate(handle, target_ptr, other)
        tl.store(there + offsets, tl.load(source + offsets))
    iris.signal(flag, 1, peer, handle)


@pytest.mark.parametrize("target_name", HIP)
def test_the_way_to_a_peer_is_whole(target_name: str) -> None:
    f = torch.float32
    with target(target_name):
        for kernel, more, whole in ((by_distance, (), False), (by_translate, (torch.int32, 5), True)):
            compiled = kernel.warmup(*with_handle(f, f, *more)(), grid=(1,))
            found, cut = distances(compiled.asm["ttgir"])
            assert found and bool(cut) != whole


@triton.jit
def relaying(handle, c, flags, crew):
    relay_courier(
        handle, None, None, c, flags, 1, tl.program_id(0), crew, 4096, 512, 1024, 1024, control.SITE_USER, None, 64, 64
    )


@pytest.mark.parametrize("target_name", HIP)
def test_what_lies_before_a_pointer_is_reached(target_name: str) -> None:
    """``relay`` forwards columns to the left of its own. As an offset to a buffer they would be out of its range, and
    loaded as zeros."""
    flags = tile.Flags(tensor(torch.int32), tensor(torch.int32))
    with target(target_name):
        for strides in ((4096, 1), (1, 4096)):
            matrix = tile.Matrix(tensor(torch.bfloat16), *strides)
            text = text_of(relaying.warmup(handle(), matrix, flags, matmul.Crew(8, 8, 0, 1), grid=(1,)))
            loads = re.findall(r"^\s*(buffer|global)_load_(?:dwordx[24]|ushort|short)\w*", text, re.M)
            assert loads and "buffer" not in loads


@triton.jit
def of_all_ranks(handle, source, target, ranks):
    peers = tl.load(ranks + tl.arange(0, 64))
    tl.store(target + tl.arange(0, 64), iris.peer.load(handle, source + tl.arange(0, 64), peers))


@pytest.mark.parametrize("target_name", HIP)
def test_a_rank_below_0_finds_the_trap(target_name: str) -> None:
    """It lies before the table of bases; as an offset to a buffer it would be out of its range, and its base be 0."""
    with target(target_name):
        text = text_of(of_all_ranks.warmup(*with_handle(torch.float32, torch.float32, torch.int32)(), grid=(1,)))
        assert re.search(r"\bglobal_load_dwordx2\b", text) and not re.search(r"\bbuffer_load_dwordx2\b", text)
