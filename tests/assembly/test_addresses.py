"""On AMD distances to peers' memory are not cut off."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from addresses import distances
from case import HIP, with_handle
from compiler import target

import iris


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
