"""Calls that repeat are replayed from a CUDA graph, so that the host spends microseconds on them, not fractions of a
millisecond.

A call of an op launches kernels with many arguments and, on some paths, dozens of copies: 0.1 to 0.3 ms of host time,
longer than a small op runs. The second call with the same arguments (the same memory, shapes, strides, dtypes and
config) is captured instead, and later ones replay that. Flags carry epochs that the device counts, so a replay is a
call like any other, and ranks need not agree on when they capture. Calls with a trace, and those that the user
captures, run as they are.

Set IRIS_REPLAY=0 to launch every call anew; so are they where CUDA_DEVICE_MAX_CONNECTIONS=1.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, cast

import torch

from iris import backends
from iris.capture import Place, borrow_place, return_places
from iris.context import Iris
from iris.eager import eager
from iris.errors import ArgumentError, CaptureError
from iris.ops.hardware import allows_tf32
from iris.ops.workspace import FusedWorkspace
from iris.tensors import address_of, has_tangent

P = ParamSpec("P")
_KEPT = 4096
"""Calls remembered per context: a model of 100 layers makes 400 with each number of rows."""
_SWITCHES: dict[torch.dtype | None, tuple[str, ...]] = {
    torch.bfloat16: ("allow_bf16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction_split_k"),
    torch.float16: (
        "allow_fp16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction_split_k",
        "allow_fp16_accumulation",
    ),
}
"""Of PyTorch, where a version has them: how matmuls that give a dtype may round."""


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    stream: torch.cuda.Stream
    """That it is replayed on."""


class Replays:
    """The calls of one context: how often each was seen, or its graph.

    Calls of one stream are captured in one place, and those of several streams, which may run at the same time, in
    several: what is captured in one shares scratch memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._calls: dict[Hashable, _Captured | None] = {}
        self._places: dict[torch.cuda.Stream, Place] = {}
        self._leaving: list[tuple[list[torch.cuda.Event], list[_Captured]]] = []
        weakref.finalize(self, lambda places: return_places(list(places.values())), self._places)
        self._device = device

    def run(self, key: Hashable, call: Callable[[], object]) -> None:
        """``call`` it the first time, capture it the second, replay it from then on."""
        try:
            known = key in self._calls
        except TypeError:  # a list, say, among the options: no op takes that, and the op says so
            call()
            return
        if not known:
            call()
            self._forget_if_full()
            self._calls[key] = None
            return
        captured = self._calls[key] = self._calls.pop(key)  # the last to be forgotten now
        if captured is None:
            try:
                captured = self._calls[key] = self._capture(call)
            except (CaptureError, torch.OutOfMemoryError):  # memory for a graph is not the memory that is cached
                call()
                return
        captured.graph.replay()

    def _capture(self, call: Callable[[], object]) -> _Captured:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        if current not in self._places:
            self._places[current] = borrow_place(self._device)
        place = self._places[current]
        torch.cuda.current_blas_handle()  # cannot be made in a capture; each thread has its own
        place.stream.wait_stream(current)
        with torch.cuda.stream(place.stream), _no_collection():
            graph.capture_begin(pool=place.memory.pool(), capture_error_mode="thread_local")
            try:
                call()
            except BaseException:
                with suppress(CaptureError):
                    self._end(graph, current)
                raise
            self._end(graph, current)
        return _Captured(graph, current)

    def _end(self, graph: torch.cuda.CUDAGraph, current: torch.cuda.Stream) -> None:
        """End a capture. If that fails, no other is made in the same place: PyTorch takes it for one that goes on.

        Raises:
            CaptureError: it failed, so nothing was done.
        """
        try:
            graph.capture_end()
        except RuntimeError as error:
            pool = self._places.pop(current).memory.pool()
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, pool)
            raise CaptureError(f"a capture did not end: {error}") from error

    def _forget_if_full(self) -> None:
        """Forget half of the calls: those that came only once first, as of each prompt's length, then those that have
        not come for the longest time. Their graphs are let go when no stream runs them any more."""
        self._leaving = [one for one in self._leaving if not all(event.query() for event in one[0])]
        if len(self._calls) < _KEPT:
            return
        keys = sorted(self._calls, key=lambda key: self._calls[key] is not None)[: -(-_KEPT // 2)]
        if gone := [captured for key in keys if (captured := self._calls.pop(key)) is not None]:
            self._leaving.append(([stream.record_event() for stream in {one.stream for one in gone}], gone))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing is destroyed in here that nobody refers to any more: some of it would synchronise, which no capture may,
    as memory of PyTorch's that other GPUs see does, from a destructor that ends the process then."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def replayed(op: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
    """``op``, with repeated calls replayed; its first two arguments are ``ctx`` and ``output``."""

    @wraps(op)
    def call(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        ctx: Any = args[0] if args else kwargs.get("ctx")
        if not hasattr(ctx, "backend_name"):
            kind = "nothing" if ctx is None else type(ctx).__name__
            raise ArgumentError(op.__name__, "ctx", "a context, as iris.iris() returns it", kind)
        if not isinstance(ctx, Iris):  # what stands in for one while kernels are only compiled
            return op(*args, **kwargs)
        ctx.check(op.__name__)  # first: in a forked child nothing can be asked of CUDA
        with ctx.on_device():
            output = on_device(ctx, *args, **kwargs)
        torch.autograd.graph.increment_version(output)  # so that a backward pass which needs what was there says so
        return output

    def on_device(ctx: Iris, /, *args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        output: Any = args[1] if len(args) > 1 else kwargs.get("output")
        if not _applies(ctx) or kwargs.get("trace") or output is None:
            return op(*args, **kwargs)
        named = ((name, _identity(kwargs[name])) for name in sorted(kwargs) if name != "ctx")
        key = (op, *map(_identity, args[1:]), *named)
        replays = ctx.kept(Replays, lambda: Replays(ctx.device))
        rounding = _rounding(getattr(output, "dtype", None))
        stream = torch.cuda.current_stream(ctx.device).cuda_stream
        deterministic = torch.are_deterministic_algorithms_enabled()
        mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), deterministic, _library()
        replays.run((stream, rounding, mode, key), lambda: op(*args, **kwargs))
        return cast("torch.Tensor", output)

    return eager(call)


def _applies(ctx: Iris) -> bool:
    return (
        ctx.backend_name == "cuda"
        and not ctx._compares_calls
        and backends.replays()
        # With one queue, a stream's wait for a word could come before the kernel that writes it.
        and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"
        and not torch.cuda.is_current_stream_capturing()
    )


def _library() -> Hashable:
    """Which of its libraries PyTorch is told to multiply with."""
    preferred = getattr(torch.backends.cuda, "preferred_blas_library", None)
    return None if preferred is None else preferred()


def _rounding(dtype: torch.dtype | None) -> Hashable:
    """How PyTorch is told to round in matmuls that give ``dtype``."""
    if dtype is torch.float32:
        return allows_tf32()
    return tuple(getattr(torch.backends.cuda.matmul, switch, None) for switch in _SWITCHES.get(dtype, ()))


def _identity(value: Any) -> Hashable:
    """What of an argument makes a call another one. For a tensor that no op takes, an object that equals no other: then
    the op is called, and raises."""
    if isinstance(value, FusedWorkspace):
        return weakref.ref(value)  # its memory may go before its calls are forgotten
    if isinstance(value, torch.Tensor):
        if value.is_nested or value.layout != torch.strided or not (address := address_of(value)):
            return object()
        memory = address, value.shape, value.stride(), value.dtype, value.device
        return *memory, value.requires_grad, has_tangent(value), value.is_neg(), value.is_inference()
    return cast("Hashable", value)
