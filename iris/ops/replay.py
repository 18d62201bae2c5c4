"""Repeated calls are replayed from a CUDA graph, so that the host spends microseconds on them, not fractions of a
millisecond.

A call of an op launches kernels with many arguments and, on some paths, dozens of copies. This takes 0.1 to 0.3 ms of
host time, longer than a small op runs. So the second call with the same arguments (the same memory, shapes, strides,
dtypes and config) is captured in a graph, which it and later calls replay. Flags carry epochs that the device counts,
so a replay is a call like any other, and ranks need not capture at the same time. Calls with a trace, and calls that
the user captures, are launched without a graph.

With IRIS_REPLAY=0, IRIS_CHECK_CALLS=1 or CUDA_DEVICE_MAX_CONNECTIONS=1, every call is launched anew.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, NamedTuple, NoReturn, ParamSpec, cast

import torch

from iris import backends
from iris.capture import Place, borrow_place, return_places
from iris.context import Iris, require_context
from iris.eager import eager
from iris.errors import CaptureError
from iris.ops.graphed import in_graph
from iris.ops.hardware import allows_tf32
from iris.ops.workspace import FusedWorkspace
from iris.tensors import has_tangent, waited
from iris.trace import is_wanted

P = ParamSpec("P")
_KEPT = 4096
"""The number of calls remembered per context: a model of 100 layers makes 400 different ones for each number of
rows."""


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    stream: torch.cuda.Stream
    """The stream on which the graph is replayed."""


class _Seen:
    """A call that has been made: its graph, once there is one, and the turn in which it came last."""

    __slots__ = ("captured", "last")

    def __init__(self, last: int) -> None:
        self.captured: _Captured | None = None
        self.last = last


class Replays:
    """The calls that one context has made.

    Each stream has a place of its own in which its calls are captured: graphs captured in one place share scratch
    memory, and calls on different streams may run at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self._calls: dict[Hashable, _Seen] = {}
        self._turn = 0
        self._places: dict[torch.cuda.Stream, Place] = {}
        self._leaving: list[tuple[list[torch.cuda.Event], list[_Captured]]] = []
        weakref.finalize(self, lambda places: return_places(list(places.values())), self._places)
        self._device = device

    def run(self, key: Hashable, call: Callable[[], object]) -> None:
        """Make the ``call`` the first time, capture it the second time, and replay it from then on."""
        try:
            seen = self._calls.get(key)
        except TypeError:  # an unhashable option, such as a list, which the op refuses
            call()
            return
        self._turn += 1
        if seen is None:
            call()
            self._forget_if_full()
            self._calls[key] = _Seen(self._turn)
            return
        seen.last = self._turn
        if seen.captured is None:
            try:
                seen.captured = self._capture(call)
            except (CaptureError, torch.OutOfMemoryError):  # a graph cannot use the memory that PyTorch has cached
                call()
                return
        seen.captured.graph.replay()

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
        """End a capture. If that fails, the place is not used again, because PyTorch takes the capture for unfinished.

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
        """If as many calls are remembered as may be, forget half of them: first those that came only once, such as
        those for the length of one prompt, then those that have not come for the longest time. Their graphs are
        destroyed when no stream runs them any more."""
        self._leaving = [one for one in self._leaving if not all(event.query() for event in one[0])]
        if len(self._calls) < _KEPT:
            return
        by_use = sorted(self._calls, key=lambda key: (self._calls[key].captured is not None, self._calls[key].last))
        forgotten = [self._calls.pop(key).captured for key in by_use[: -(-_KEPT // 2)]]
        if gone := [captured for captured in forgotten if captured is not None]:
            self._leaving.append(([stream.record_event() for stream in {one.stream for one in gone}], gone))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage in this block: destroying some objects synchronises, which is forbidden in a capture. Memory
    of PyTorch's that other GPUs see is one of them; its destructor would end the process."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def replayed(op: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
    """``op``, with repeated calls replayed; its first two arguments are ``ctx`` and ``output``. In a graph of
    ``torch.compile`` a node stands for the call (:mod:`iris.ops.graphed`).

    The Python code that runs before a replay takes longer than the replay itself, so it is kept short.
    """

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        ctx, *others = args or (kwargs.pop("ctx", None),)
        if not isinstance(ctx, Iris):
            return not_on_a_context(ctx, *others, **kwargs)
        ctx._check(op.__name__)  # first: in a forked child CUDA must not be called
        if not ctx._is_on_device:
            with ctx.on_device():
                return call(ctx, *others, **kwargs)
        output: Any = others[0] if others else kwargs.get("output")
        replays, trace = _replays_of(ctx), kwargs.get("trace", False)
        traced = trace is not False and is_wanted(op.__name__, trace)
        key = None if replays is None or traced else _key(ctx, output, others, kwargs)
        if replays is None or key is None:
            others, kwargs = [*map(waited, others)], {name: waited(value) for name, value in kwargs.items()}
            output = called(ctx, *others, **kwargs)
        else:
            replays.run((op, *key), lambda: called(ctx, *others, **kwargs))
        for written in (output, kwargs.get("gathered")):
            if written is not None:  # a backward pass that needs the old contents then raises
                torch.autograd.graph.increment_version(written)
        return cast("torch.Tensor", output)

    def not_on_a_context(ctx: Any, /, *others: Any, **kwargs: Any) -> torch.Tensor:
        require_context(op.__name__, ctx)
        return called(ctx, *others, **kwargs)  # on a context's stand-in, while kernels are only compiled

    called: Callable[..., torch.Tensor] = op
    whole = cast("Callable[P, torch.Tensor]", wraps(op)(call))
    return eager(whole, in_graph=in_graph(whole, eager(whole)))


def _replays_of(ctx: Iris) -> Replays | None:
    """The remembered calls of ``ctx``; None if the current call is not to be replayed."""
    if ctx.backend_name != "cuda":
        return None
    replays: Replays | None = ctx.kept(Replays, lambda: Replays(ctx.device) if _switched_on(ctx) else None)
    return None if torch.cuda.is_current_stream_capturing() else replays


def _switched_on(ctx: Iris) -> bool:
    # With one queue, a stream's wait for a word could come before the kernel that writes it.
    return not ctx._compares_calls and backends.replays() and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"


def _stream_of(ctx: Iris) -> int:
    """The address of the current stream, in a tenth of the time that ``torch.cuda.current_stream`` takes."""
    return torch._C._cuda_getCurrentRawStream(ctx.device.index)


def _key(ctx: Iris, output: Any, others: list[Any], named: dict[str, Any]) -> tuple[Hashable, ...] | None:
    """Everything that a call depends on; None if the call is not to be replayed, because the op will refuse its
    operands."""
    try:
        return (
            _stream_of(ctx), torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.get_deterministic_debug_mode(), _library(), _rounding(output.dtype),
            *map(_identity, others), ..., *named, *map(_identity, named.values()),  # "bias" may be one of the others
        )  # fmt: skip
    except (AttributeError, RuntimeError):  # no tensor, or one without memory, as torch.vmap and tracers make them
        return None


def _asked(function: str, otherwise: Callable[[], Hashable]) -> Callable[[], Hashable]:
    """The function that reads a switch of PyTorch: the internal ``function`` itself, which takes a tenth of the time of
    the public one, or ``otherwise``, if this version of PyTorch has no such function."""
    direct: Callable[[], Hashable] = getattr(torch._C, function, otherwise)
    return direct


def _switches(*names: str) -> Hashable:
    return tuple(getattr(torch.backends.cuda.matmul, name, None) for name in names)


_library = _asked("_get_blas_preferred_backend", lambda: torch.backends.cuda.preferred_blas_library())
"""Reads which library PyTorch is set to multiply with."""
_fp16_accumulation = _asked("_get_cublas_allow_fp16_accumulation", lambda: _switches("allow_fp16_accumulation"))
_fp16_reduction = _asked(
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    lambda: _switches("allow_fp16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction_split_k"),
)
_bf16_reduction = _asked(
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    lambda: _switches("allow_bf16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction_split_k"),
)


def _rounding(dtype: torch.dtype) -> Hashable:
    """PyTorch's switches that affect rounding in matmuls with ``dtype`` as output."""
    if dtype is torch.bfloat16:
        return _bf16_reduction()
    if dtype is torch.float16:
        return _fp16_reduction(), _fp16_accumulation()
    return allows_tf32() if dtype is torch.float32 else None


def _identity(value: Any) -> Hashable:
    """The properties of an argument that tell two calls apart.

    Raises:
        RuntimeError: the argument is a tensor without memory of its own.
    """
    if isinstance(value, torch.Tensor):
        return (
            value.data_ptr() or _refuse(), value.shape, value.stride(), value.dtype, value.requires_grad,
            value.is_neg(), value.is_inference(), has_tangent(value),
        )  # fmt: skip
    if isinstance(value, FusedWorkspace):
        return weakref.ref(value)  # its memory may be freed before its calls are forgotten
    return cast("Hashable", value)


def _refuse() -> NoReturn:
    """Raise before more is asked of a tensor without memory, since its class may raise anything."""
    raise RuntimeError("a tensor without memory")
