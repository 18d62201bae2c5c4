"""``iris.assembly``: a kernel of the user's, compiled for GPUs that the machine lacks."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

import iris


@triton.jit
def greet(handle, box, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    iris.peer.store(handle, box + offsets, iris.rank(handle) + offsets, 1)
    iris.barrier(handle)


@triton.jit
def changing(box):
    total = 0
    for i in range(4):
        total = total + tl.load(box + i) * 1.5
    tl.store(box, total)


@pytest.mark.parametrize(
    ("target", "store"),
    [("sm_90", "st.global"), ("sm_100", "st.global"), ("gfx942", "global_store"), ("gfx950", "global_store")],
)
def test_a_kernel_is_compiled_for_a_gpu_that_is_not_there(target: str, store: str) -> None:
    text = iris.assembly(greet, iris.Handle, torch.int32, target=target, BLOCK=8)
    assert target in text and "greet" in text and store in text


@triton.jit
def fetch(handle, source, target, BLOCK: tl.constexpr, MODIFIER: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    value = iris.load(source + offsets, 0, 1, handle.bases, None, None, MODIFIER, True)
    tl.store(target + offsets, value)


@pytest.mark.parametrize("modifier", [None, "", ".ca", ".cg", ".cv"])
@pytest.mark.parametrize(("target", "load"), [("sm_90", "ld.volatile.global"), ("gfx942", "_load_dword")])
def test_a_volatile_load_takes_any_cache_modifier(target: str, load: str, modifier: str | None) -> None:
    """PTX has none for volatile loads, which ptxas used to say, and no one else."""
    text = iris.assembly(fetch, iris.Handle, torch.int32, torch.int32, target=target, BLOCK=64, MODIFIER=modifier)
    assert load in text


class Pair(NamedTuple):
    handle: object
    boxes: tuple[object, ...]


@triton.jit
def greet_in(pair, count, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    iris.peer.store(pair.handle, pair.boxes[0] + offsets, offsets, 1, mask=offsets < count)


def test_arguments_are_those_of_a_launch() -> None:
    def greeting(**named: object) -> str:
        return iris.assembly(greet, target="sm_90a", BLOCK=8, **named)

    assert greeting(handle=iris.Handle, box=torch.int32) == greeting(box=torch.int32, handle=iris.Handle)
    pair = Pair(iris.Handle, (torch.int32,))
    assert "st.global" in iris.assembly(greet_in, pair, count=5, target="sm_90", BLOCK=8)


def test_what_does_not_compile_is_an_error() -> None:
    with pytest.raises(triton.CompilationError, match="Loop-carried variable total"):
        iris.assembly(changing, torch.float32, target="sm_90")


@pytest.mark.parametrize("target", ["h200", "sm90", "", 90])
def test_an_unknown_gpu_is_an_error(target: str) -> None:
    with pytest.raises(iris.ArgumentError, match="assembly: target: expected sm_ and a number, or gfx"):
        iris.assembly(greet, iris.Handle, torch.int32, target=target, BLOCK=8)


def test_what_is_no_kernel_is_an_error() -> None:
    with pytest.raises(iris.ArgumentError, match=r"assembly: kernel: expected a @triton\.jit function"):
        iris.assembly(print, target="sm_90")
    tuned = triton.autotune([triton.Config({"BLOCK": 8})], key=[])(greet)
    with pytest.raises(iris.ArgumentError, match=r"of an autotuned one, its \.fn"):
        iris.assembly(tuned, iris.Handle, torch.int32, target="sm_90")
