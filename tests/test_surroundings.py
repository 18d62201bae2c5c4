"""Ops in different surroundings: inference mode, autocast, another default or current device, other streams and graphs,
a heap that has room only later."""

from __future__ import annotations

import gc
import importlib
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ops_inputs import ALL_REDUCE, GATHER, REDUCE_SCATTER, SMALL, Way, trial, ways
from ranks import BACKEND, Failure, Ranks, context, failure_of, fresh, worlds

import iris
from iris import capture
from iris.backends import runtime
from iris.capture import Place
from iris.eager import eager
from iris.ops.replay import Replays

GPU = pytest.mark.gpu
TWO = pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
each_way = pytest.mark.parametrize(
    "way", ways() if BACKEND != "sim" else {way.algorithm: way for way in ways()}.values(), ids=str
)


def modes(way: Way, seed: int) -> list[float]:
    """Errors of a first call in inference mode, whose memory is kept, and of one with the same sizes outside; both
    under autocast."""
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


def still_on_their_way(seed: int) -> list[float]:
    """Errors with operands that PyTorch's functional collectives have returned."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    found = []
    with fresh(1 << 22) as ctx:
        for way in ways():
            one = trial(ctx, way, (16, 16, 32), torch.float32, seed)
            one = replace(one, a=AsyncCollectiveTensor(one.a), b=AsyncCollectiveTensor(one.b))
            one.run()
            found.append(one.excess())
        assert ctx.is_symmetric(ctx.as_symmetric(AsyncCollectiveTensor(torch.ones(3, device=ctx.device))))
    return found


@TWO
def test_operands_that_are_still_on_their_way(ranks: Ranks, seed: int) -> None:
    assert max(excess for found in ranks.run(still_on_their_way, seed) for excess in found) <= 1


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


def choices() -> list[str]:
    """The algorithms that "auto" takes while the heap has little room, and after room was made."""
    found = []
    module = importlib.import_module("iris.ops.all_gather_matmul")
    resolve = module.resolve

    def noted(*args: Any, **options: Any) -> Any:
        chosen = resolve(*args, **options)
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
    """Otherwise a rank could replay its graph of the first call while another, with other memory, chooses anew."""
    for found in ranks.run(choices):
        assert found == ["pull", "pull"]


def compiled_calls() -> tuple[list[float], list[str]]:
    """Results of calls of the context in code that ``torch.compile`` compiles, and its warnings."""
    with fresh(1 << 20) as ctx, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")

        def step(x: torch.Tensor) -> torch.Tensor:
            mine = ctx.full((4,), 2.0)
            mine += x
            ctx.device_barrier()
            ctx.barrier()
            ctx.check()
            bases, free = ctx.heap_bases, ctx.heap_free_bytes
            known: torch.Tensor = (bases == ctx.handle.bases).all() & (free < ctx.heap_size_for(1 << 30))
            return (mine + ctx.zeros_like(mine)) * known

        step = torch.compile(step, backend="eager")
        found = [step(torch.full((4,), 1.0 + turn, device=ctx.device)).sum().item() for turn in range(2)]
        return found, [str(one.message) for one in told]


@TWO
def test_compiled_code_breaks_at_calls_of_the_context(ranks: Ranks) -> None:
    assert ranks.run(compiled_calls) == [([12, 16], [])] * 2


def compiled_whole() -> list[Failure]:
    """Errors of calls of the context in code that must become one graph."""
    with fresh(1 << 20) as ctx:
        calls = [lambda: ctx.barrier(), lambda: ctx.check(), lambda: ctx.handle, lambda: ctx.heap_free_bytes]
        return [failure_of(torch.compile(call, backend="eager", fullgraph=True)) for call in calls]


@TWO
def test_what_must_not_break_says_why_it_does(ranks: Ranks) -> None:
    for failure in (one for failures in ranks.run(compiled_whole) for one in failures):
        assert failure.kind == "Unsupported" and "leave out fullgraph=True" in failure.message, failure


def compiled_before() -> tuple[list[str], list[float]]:
    """PyTorch's warnings if compiled code calls something that it does not trace, and the errors of the results; the
    third time nothing may be compiled any more."""
    double = eager(lambda a: a + a)
    layer = torch.compile(lambda a: double(a * 2) + 1, backend="eager")
    with warnings.catch_warnings(record=True) as told, mock.patch("torch._dynamo.utils.warn_once_cache", set()):
        warnings.simplefilter("always")
        found = [float(layer(torch.ones(2)).sum()) for _ in range(2)]
        with torch.compiler.set_stance("fail_on_recompile"):
            found.append(float(layer(torch.ones(2)).sum()))
    return [str(one.message) for one in told], found


@TWO
def test_code_that_was_compiled_before_is_complete(ranks: Ranks) -> None:
    """Once the code before a call that is not traced was compiled for one compiler only, and PyTorch warned about one
    of its own builtins there."""
    for told, found in ranks.run(compiled_before):
        assert not any("get_eval_frame_callback" in one for one in told), told
        assert found == [10.0] * 3


def own_streams() -> tuple[list[int], list[int]]:
    """Addresses of two streams, and of three that are made when the first of these is gone."""
    device = context().device
    first, second = runtime.new_stream(device), runtime.new_stream(device)
    made = [first.cuda_stream, second.cuda_stream]
    del first
    return made, [
        runtime.new_stream(device).cuda_stream,
        *(one.cuda_stream for one in map(runtime.new_stream, [device] * 2)),
    ]


@GPU
@TWO
def test_a_stream_of_its_own(ranks: Ranks) -> None:
    """Each workspace has another stream; one that is gone leaves its stream to the next."""
    for (first, second), later in ranks.run(own_streams):
        assert first != second
        assert later[0] == first and second not in later


GPU_0 = torch.device("cuda", 0)


def place_of(names: Iterator[int]) -> Place:
    name = next(names)
    stream = mock.MagicMock(name=f"stream {name}", device=GPU_0)
    return Place(stream, mock.Mock(**{"pool.return_value": f"pool {name}"}))


class Recorded(Replays):
    """Replays without a GPU: notes the pool that each capture gets."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.pools: list[Any] = []
        self.names = itertools.count()

    def record(
        self, key: int, call: Callable[[], object] = lambda: None, stream: str = "a", at_end: object = None
    ) -> None:
        graph = mock.Mock()
        graph.capture_begin.side_effect = lambda pool, **mode: self.pools.append(pool)
        graph.capture_end.side_effect = at_end
        cuda = dict.fromkeys(("stream", "current_stream", "current_blas_handle"), mock.DEFAULT)
        with (
            mock.patch("torch.cuda.CUDAGraph", return_value=graph),
            mock.patch("iris.ops.replay.borrow_place", side_effect=lambda device: place_of(self.names)),
            mock.patch.multiple("torch.cuda", **cuda) as fakes,
        ):
            fakes["current_stream"].return_value = stream
            self.run((stream, key), call)
            self.run((stream, key), call)


def test_graphs_of_a_stream_share_memory_that_lasts() -> None:
    replays, calls = Recorded(), []

    def call() -> None:
        calls.append(len(replays.pools))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory for a graph")

    replays.record(0, call)
    assert calls == [0, 1, 1]  # the capture failed, so the call was made again
    for key in (1, 2, 3):
        replays.record(key)
    replays.record(4, stream="b")
    replays.record(5)
    assert replays.pools == ["pool 0"] * 4 + ["pool 1", "pool 0"]


@pytest.mark.parametrize("raises", [True, False])
def test_where_a_capture_does_not_end_there_is_no_other(raises: bool) -> None:
    replays, calls = Recorded(), []

    def call() -> None:
        calls.append(1)
        if len(calls) == 2 and raises:
            raise iris.CaptureError("not in a capture")

    with mock.patch("torch._C._cuda_endAllocateToPool", create=True) as told:
        replays.record(0, call, at_end=RuntimeError("capture was invalidated"))
    assert len(calls) == 3  # made again, as a capture does not run anything
    assert [one.args[1] for one in told.call_args_list] == ["pool 0"]
    replays.record(1)
    assert replays.pools == ["pool 0", "pool 1"]


def test_a_small_graph_for_which_there_is_no_memory_begins_no_capture() -> None:
    no_memory = torch.OutOfMemoryError("no memory")
    with mock.patch("torch.zeros", side_effect=no_memory), mock.patch("iris.capture.new_stream") as made:
        with pytest.raises(torch.OutOfMemoryError):
            capture.borrow_place(torch.device("cuda", 7))
        assert not made.called
    graph = mock.Mock()
    word = mock.Mock(**{"zero_.side_effect": RuntimeError("no")})
    with mock.patch("torch.cuda.CUDAGraph", return_value=graph), mock.patch("torch.cuda.stream"):
        with pytest.raises(RuntimeError, match="no"):
            capture._small_graph(mock.MagicMock(), word)
    assert graph.capture_end.called


def test_a_second_stream_is_nobody_elses() -> None:
    names = itertools.count()
    new_stream = mock.patch("iris.capture.new_stream", side_effect=lambda device: f"stream {next(names)}")
    with new_stream, mock.patch.dict("iris.capture._beside", clear=True):
        streams: list[Any] = [mock.MagicMock(device=GPU_0) for _ in range(40)]
        found = [capture.stream_beside(one, recorded) for one in streams for recorded in (False, True)]
        assert len(set(found)) == 80
        assert capture.stream_beside(streams[7], True) == found[15]


def test_places_go_from_context_to_context() -> None:
    gc.collect()  # garbage of other tests
    with mock.patch.dict("iris.capture._free", clear=True):
        replays = Recorded()
        replays.record(0)
        (place,) = replays._places.values()
        del replays
        with capture._lock:  # as if garbage collection began while it is held
            gc.collect()
        assert capture._free == {GPU_0: [place]}
        assert capture.borrow_place(GPU_0) is place
        assert capture._free == {GPU_0: []}


def test_places_are_given_back_when_the_device_is_idle() -> None:
    class Given:
        def __init__(self) -> None:
            weakref.finalize(self, lambda: order.append("given back"))

    order: list[str] = []
    with iris.iris(1 << 20) as ctx:
        ctx.kept("what a call keeps", Given)
        close = ctx._backend.close

        def close_and_tell(limit_s: float | None) -> bool:
            order.append("idle")
            return close(limit_s)

        with mock.patch.object(ctx._backend, "close", side_effect=close_and_tell):
            ctx.close()
    assert order == ["idle", "given back"]


def on_many_streams(way: Way, seed: int) -> list[float]:
    """Errors with more streams than PyTorch has: one of them is the copy engine's."""
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
    """The error of a call in a thread, which begins with device 0 as its current one."""
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
    """Errors of replays after PyTorch has dropped the library's scratch memory, as ``torch.compile`` makes it do."""
    ctx, found = context(), []
    for _ in range(32):  # all of PyTorch's streams: each now has its own scratch memory
        with torch.cuda.stream(torch.cuda.Stream(ctx.device)):
            torch.ones(64, 64, device=ctx.device) @ torch.ones(64, 64, device=ctx.device)
    ctx.synchronize()
    torch.cuda.synchronize(ctx.device)
    trials = [
        trial(ctx, Way(GATHER, "low_latency"), (4, 256, 4096), torch.bfloat16, seed),
        trial(ctx, Way(GATHER, "decomposed"), (256, 256, 8192), torch.bfloat16, seed + 1),
        trial(ctx, Way(GATHER, "low_latency"), (4, 256, 4096), torch.bfloat16, seed + 2),
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
