"""Ops whatever surrounds the call: inference mode, autocast, another default or current device, other streams and
graphs, room on the heap that comes later."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ops_inputs import ALL_REDUCE, GATHER, REDUCE_SCATTER, SMALL, Way, trial, ways
from ranks import BACKEND, Failure, Ranks, context, failure_of, fresh, worlds

import iris
from iris.engine import stream_apart
from iris.ops.replay import Replays

GPU = pytest.mark.gpu
TWO = pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
each_way = pytest.mark.parametrize(
    "way", ways() if BACKEND != "sim" else {way.algorithm: way for way in ways()}.values(), ids=str
)


# -- modes --------------------------------------------------------------------------------------------------


def modes(way: Way, seed: int) -> list[float]:
    """A first call in inference mode, whose memory is kept, and one of the same sizes without; both under autocast."""
    found = []
    around: tuple[Callable[[], AbstractContextManager[object]], ...] = (torch.inference_mode, torch.no_grad)
    with fresh(1 << 22) as ctx:
        for index, mode in enumerate(around):
            with mode(), torch.autocast(ctx.device.type, dtype=torch.bfloat16):
                one = trial(ctx, way, (16, 16, 32), torch.float32, seed + index)
                one.run(replace(SMALL, num_chunks=2))
            with mode():
                found.append(one.excess())
    return found


@TWO
@each_way
def test_inference_mode_and_autocast(ranks: Ranks, way: Way, seed: int) -> None:
    for excesses in ranks.run(modes, way, seed):
        assert max(excesses) <= 1


def with_default_device(name: str) -> tuple[str, list[float]]:
    with torch.device(name), iris.iris(1 << 20) as ctx:
        made = ctx.ones(3)
        ctx.device_barrier()
        ctx.barrier()
        return made.device.type, [float(one) for one in made.cpu()]


@TWO
@pytest.mark.parametrize("name", ["meta", "cpu"] if BACKEND == "sim" else ["cpu", "cuda"])
def test_another_default_device(ranks: Ranks, name: str) -> None:
    expected = "cpu" if BACKEND == "sim" else "cuda"
    assert ranks.run(with_default_device, name) == [(expected, [1.0, 1.0, 1.0])] * 2


# -- room that comes later ----------------------------------------------------------------------------------


def choices() -> list[str]:
    """What "auto" takes while the heap is short, and after room was made."""
    found = []
    module = importlib.import_module("iris.ops.all_gather_matmul")
    resolve = module.resolve

    def noted(*args: Any) -> Any:
        chosen = resolve(*args)
        found.append(chosen.algorithm)
        return chosen

    with fresh(1 << 20) as ctx, mock.patch.object(module, "resolve", noted):
        a, b = ctx.zeros(64, 128), torch.zeros(128, 64, device=ctx.device)
        output = torch.zeros(128, 64, device=ctx.device)
        filler = ctx.empty(ctx.heap_largest_free_bytes - (40 << 10), dtype=torch.uint8)
        iris.ops.all_gather_matmul(ctx, output, a, b)
        ctx.free(filler)
        ctx.empty(1)
        iris.ops.all_gather_matmul(ctx, output, a, b.clone())
        ctx.synchronize()
    return found


@pytest.mark.skipif(BACKEND != "sim", reason="replayed on GPUs")
@TWO
def test_a_choice_stands(ranks: Ranks) -> None:
    """A rank may replay its graph of the first call where another, with other memory, chooses anew."""
    for found in ranks.run(choices):
        assert found == ["pull", "pull"]


# -- streams ------------------------------------------------------------------------------------------------


def test_a_stream_of_its_own() -> None:
    streams = iter([1, 2, 1, 3])
    assert stream_apart(lambda: next(streams), 1, 2) == 3
    assert stream_apart(lambda: 1, 1) == 1  # better one that is shared than none


class Recorded(Replays):
    """Replays without a GPU: notes the pool that each capture is given."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.pools: list[Any] = []

    def record(self, key: int, call: Callable[[], object] = lambda: None) -> None:
        graph = mock.Mock(**{"pool.return_value": f"pool {key}"})
        graph.capture_begin.side_effect = lambda pool, **mode: self.pools.append(pool)
        cuda = dict.fromkeys(("Stream", "stream", "current_stream", "current_blas_handle"), mock.DEFAULT)
        with mock.patch("torch.cuda.CUDAGraph", return_value=graph), mock.patch.multiple("torch.cuda", **cuda) as fakes:
            fakes["current_stream"].return_value = "current"
            fakes["Stream"].return_value = mock.MagicMock(name="capture")
            self.run(key, call)
            self.run(key, call)


def test_graphs_of_a_stream_share_the_pool_of_the_first_that_lives() -> None:
    replays = Recorded()

    calls: list[int] = []

    def call() -> None:
        calls.append(len(replays.pools))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory for a graph")

    replays.record(0, call)
    assert calls == [0, 1, 1]  # the capture failed: done anew, and not replayed
    for key in (1, 2, 3):
        replays.record(key)
    assert replays.pools == [None, None, "pool 1", "pool 1"]
    with mock.patch("iris.ops.replay._KEPT", 1), mock.patch("torch.cuda.synchronize"):
        replays.record(4)
    assert replays.pools[-1] is None


def on_many_streams(way: Way, seed: int) -> list[float]:
    """More streams than PyTorch has: one of them is the copy engine's."""
    ctx, found = context(), []
    one = trial(ctx, way, (32, 32, 64), torch.float16, seed)
    for _ in range(34):
        stream = torch.cuda.Stream(ctx.device)
        stream.wait_stream(torch.cuda.current_stream(ctx.device))
        with torch.cuda.stream(stream):
            one.spoil()
            for _ in range(3):
                one.run()
        torch.cuda.current_stream(ctx.device).wait_stream(stream)
        found.append(one.excess())
    return found


@GPU
@TWO
@pytest.mark.parametrize("way", [Way(REDUCE_SCATTER, "copy_engine"), Way(ALL_REDUCE, "copy_engine")], ids=str)
def test_a_stream_that_is_the_copy_engines(ranks: Ranks, way: Way, seed: int) -> None:
    for excesses in ranks.run(on_many_streams, way, seed):
        assert max(excesses) <= 1


def in_another_thread(way: Way, seed: int) -> float:
    """A thread begins with device 0 as its current one."""
    ctx = context()
    one = trial(ctx, way, (16, 16, 32), torch.float16, seed)
    failures: list[Failure] = []

    def work() -> None:
        torch.cuda.set_device(0)
        for _ in range(3):
            one.run()
        ctx.device_barrier()
        torch.cuda.current_stream(ctx.device).synchronize()

    thread = threading.Thread(target=lambda: failures.append(failure_of(work)))
    thread.start()
    thread.join()
    assert [failure.kind for failure in failures] == ["nothing"], failures
    return one.excess()


@GPU
@TWO
@pytest.mark.parametrize("way", ways(), ids=str)
def test_a_thread_whose_current_device_is_another(ranks: Ranks, way: Way, seed: int) -> None:
    assert max(ranks.run(in_another_thread, way, seed)) <= 1


def after_pytorch_let_go(seed: int) -> list[float]:
    """Replays after PyTorch has dropped the library's scratch memory, as ``torch.compile`` has it do."""
    ctx, found = context(), []
    trials = [
        trial(ctx, Way(GATHER, "low_latency"), (4, 256, 4096), torch.bfloat16, seed + index) for index in range(2)
    ]
    for one in trials:
        for _ in range(2):
            one.run()
    ctx.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    taken = [torch.full((1 << 24,), float("nan"), device=ctx.device) for _ in range(8)]
    for one in trials:
        one.spoil()
        one.run()
        found.append(one.excess())
    assert all(bool(block.isnan().all()) for block in taken)
    return found


@GPU
@TWO
def test_scratch_memory_that_pytorch_lets_go_of(ranks: Ranks, seed: int) -> None:
    for excesses in ranks.run(after_pytorch_let_go, seed):
        assert max(excesses) <= 1


def barrier_in_a_graph() -> None:
    with fresh(1 << 20) as ctx:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ctx.device_barrier()
        for _ in range(3):
            graph.replay()
        ctx.synchronize()
        with pytest.raises(iris.CaptureError, match="device_barrier"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            ctx.device_barrier([ctx.rank])
        torch.cuda.synchronize(ctx.device)


@GPU
@TWO
def test_a_first_barrier_in_a_graph(ranks: Ranks) -> None:
    ranks.run(barrier_in_a_graph)
