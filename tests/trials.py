"""Cases for tests/test_bench.py, in a module of their own: ranks import it, and need not import pytest."""

from __future__ import annotations

import os
import time

import torch

import iris
from iris import bench

WAYS = ("right", "wrong", "drifts", "stops", "doubts", "says_yes", "raises", "dies", "skips", "idles", "hangs")


@bench.register
@bench.axis("count", (8, 16))
@bench.axis("way", WAYS, variant=True)
def trial(state: bench.State, ctx: iris.Iris) -> None:
    """A copy into the next rank's memory, and all that can go wrong with it on the last rank."""
    way, last = state["way"], ctx.rank == ctx.world_size - 1
    # As variants of an op do, they share what they write.
    target = state.share("target", lambda: ctx.zeros(state["count"]))
    source = state.share("source", lambda: ctx.randn(state["count"]))
    there = ctx.peer_view(target, (ctx.rank + 1) % ctx.world_size)
    parts = [ctx.broadcast(source, rank) for rank in range(ctx.world_size)]
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        if way == "stops" and calls > 1:
            return
        there.copy_(source)
        if last and (way == "wrong" or (way == "drifts" and calls > 2)):
            there[3] += 1

    if way == "skips":
        state.skip("nobody needs it")
    if last and way == "raises":
        raise RuntimeError("no luck today")
    if last and way == "dies":
        os._exit(3)
    if last and way == "hangs":
        time.sleep(100)
    state.set_bytes(source.nbytes)
    state.set_flops(1000)
    state.set_floor(1e-9)
    state.add_counter("answer", 42)
    expected = parts[ctx.rank - 1]
    if way == "idles":
        return

    def check() -> str:
        if last and way == "doubts":
            raise AssertionError("no vector at all")
        if way == "says_yes":
            return True  # type: ignore[return-value]
        return "" if torch.equal(target, expected) else "another vector"

    state.exec(call, validate_fn=check, spoil_fn=target.zero_)


@bench.register
@bench.pow2("count", 3, 5)
@bench.linear("step", 10, 30, 10)
def ranges(state: bench.State, ctx: iris.Iris) -> None:
    """Never run."""


@bench.register
@bench.axis("on", (True, False))
def switch(state: bench.State, ctx: iris.Iris) -> None:
    """Never run."""
