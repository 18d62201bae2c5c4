"""Triton's interpreter, made fit for programs that wait for each other.

Four things change while Iris simulates:

* **Co-residency.** The programs of a launch run as greenlets that switch at every atomic and volatile
  load, so a consumer may precede its producer in program order, as on a GPU. When every program of the
  launch only polls, the process sleeps a moment and its core goes to the other ranks.
* **bfloat16.** Triton stores it as raw 16-bit patterns and computes on the patterns in ``tl.dot``, in
  arithmetic, and in casts other than to float32; its rounding also loses the carry into the exponent.
  Here bfloat16 is widened to float32, computed, and rounded to nearest even.
* **Addresses.** A load from where there is no memory is an error of the kernel's, not the end of the process.
* **Speed.** Triton patches its language module anew at each call of a device function (about 1 ms);
  here once per launch. It also computes every integer sum and product again in 64 bits, for a check of
  overflows that is made only where ``debug`` is set; here only there.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as upstream
from triton.runtime.errors import InterpreterError

from iris.backends.memory import Memory
from iris.errors import BackendError, IrisError

try:
    import greenlet
except ImportError as error:
    raise BackendError("the simulator needs greenlet: pip install 'iris[sim]' (or pip install greenlet)") from error

_Builder = upstream.InterpreterBuilder
_Handle = upstream.TensorHandle
_IDLE_SLEEP_S = 50e-6


def install() -> None:
    """Put the changes in place; once per process."""
    if getattr(upstream.GridExecutor, "_iris", False):
        return
    upstream.GridExecutor._iris = True
    upstream.GridExecutor.__call__ = _run_grid
    upstream.InterpretedFunction.__call__ = _call_device_function
    options = upstream.interpreter_builder.options
    upstream.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
    upstream._interpreter = Memory(upstream._interpreter, lambda: upstream.interpreter_builder.grid_idx)
    _install_switches()
    _install_bfloat16()


# -- co-resident programs -----------------------------------------------------------------------------------


class _Launch:
    """One kernel launch: its programs, and what has been patched for it."""

    def __init__(self) -> None:
        self.scheduler = greenlet.getcurrent()
        self.scopes: list[Any] = []
        self.patched: set[int] = set()
        self.worked = False

    def patch(self, fn: Callable[..., Any]) -> None:
        """Redirect ``triton.language`` as ``fn`` sees it to the interpreter, once per launch and module."""
        if id(fn.__globals__) in self.patched:
            return
        self.patched.add(id(fn.__globals__))
        languages = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if languages and languages <= self.patched:
            return
        self.patched |= languages
        scope = upstream._patch_lang(fn)
        scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.squeeze()))
        self.scopes.append(scope)

    def restore(self) -> None:
        for scope in reversed(self.scopes):
            scope.restore()


_current: _Launch | None = None


def _run_grid(self: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces Triton's serial grid loop."""
    global _current
    specification = inspect.getfullargspec(self.fn)
    names = {*specification.args, *specification.kwonlyargs}
    kwargs = {name: value for name, value in kwargs.items() if name in names}
    for hook in self.pre_run_hooks:
        hook(*args, **kwargs)
    outer, _current = _current, _Launch()
    launch = _current
    try:
        launch.patch(self.fn)
        bound = inspect.getcallargs(self.fn, *args, **kwargs)
        bound = {
            name: value if name in self.constexprs else upstream._implicit_cvt(value) for name, value in bound.items()
        }
        grid = self.grid(bound) if callable(self.grid) else self.grid
        grid = (*(int(size) for size in grid), 1, 1)[:3]
        upstream.interpreter_builder.set_grid_dim(*grid)
        _run_programs(launch, lambda: self.fn(**bound), grid)
    finally:
        launch.restore()
        _current = outer


def _run_programs(launch: _Launch, body: Callable[[], None], grid: tuple[int, ...]) -> None:
    builder = upstream.interpreter_builder
    waiting = deque((greenlet.greenlet(body), index) for index in itertools.product(*(range(size) for size in grid)))
    try:
        while waiting:
            launch.worked = False
            for _ in range(len(waiting)):
                program, index = waiting.popleft()
                builder.set_grid_idx(*index)
                program.switch()
                if program.dead:
                    launch.worked = True
                else:
                    waiting.append((program, index))
            if not launch.worked:
                time.sleep(_IDLE_SLEEP_S)
    except Exception as error:
        for program, _ in waiting:
            program.throw()
        if isinstance(error, (IrisError, InterpreterError)):
            raise
        raise InterpreterError(repr(error)) from error


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``InterpretedFunction.__call__``: a ``@triton.jit`` function called from a kernel."""
    if _current is None:
        raise InterpreterError(f"{self.fn.__name__} is a device function: call it from a kernel")
    _current.patch(self.fn)
    return self.rewrite()(*args, **kwargs)


def _switch() -> None:
    """Let the other programs of this launch, and in the end the other ranks, go on."""
    if _current is not None and greenlet.getcurrent() is not _current.scheduler:
        _current.scheduler.switch()


def _install_switches() -> None:
    def switching(name: str) -> None:
        original = getattr(_Builder, name, None)
        if original is None:
            return

        def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
            _switch()
            return original(self, *args, **kwargs)

        setattr(_Builder, name, replacement)

    for name in ("create_atomic_cas", "create_atomic_rmw", "create_atomic_store"):
        switching(name)
    for name in ("create_masked_store", "create_dot"):
        _mark_as_work(name)

    load = _Builder.create_masked_load

    def masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **options: Any) -> Any:
        if options.get("is_volatile", rest[-1] if rest else False):
            _switch()
        return load(self, ptrs, mask, other, *rest, **options)

    _Builder.create_masked_load = masked_load  # atomic loads are volatile loads

    if hasattr(_Builder, "create_atomic_poll"):
        _Builder.create_atomic_poll = _atomic_poll


def _mark_as_work(name: str) -> None:
    original = getattr(_Builder, name)

    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _current is not None:
            _current.worked = True
        return original(self, *args, **kwargs)

    setattr(_Builder, name, replacement)


def _atomic_poll(self: Any, ptr: Any, expected: Any, timeout_ns: Any, sem: Any, scope: Any) -> Any:
    """Triton's own version spins without letting the program that it waits for run."""
    start = time.monotonic_ns()
    while True:
        value = self.create_load(ptr, None, True)
        matched = value.data == expected.data
        expired = timeout_ns is not None and time.monotonic_ns() - start >= timeout_ns.data.item()
        if matched.all() or expired:
            return _Handle(matched, tl.int1)


# -- bfloat16 -------------------------------------------------------------------------------------------------


def widen(bits: np.ndarray) -> np.ndarray:
    """bfloat16 patterns as float32 values."""
    values: np.ndarray = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values


def narrow(values: np.ndarray) -> np.ndarray:
    """float32 values as bfloat16 patterns, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x0040)
    patterns: np.ndarray = np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)
    return patterns.reshape(np.shape(values))


def _is_bfloat16(handle: Any) -> bool:
    return isinstance(handle, _Handle) and handle.dtype.scalar == tl.bfloat16


def _widened(handle: Any) -> Any:
    return _Handle(widen(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _narrowed(handle: Any) -> Any:
    return _Handle(narrow(handle.data), tl.bfloat16)


def _matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """``a @ b`` accumulated in ``dtype``, by PyTorch, whose thread count can be set (numpy's cannot, once loaded).

    Products of 8-bit integers are summed exactly in float64.
    """
    wide = np.float64 if np.issubdtype(dtype, np.integer) else dtype
    left, right = (torch.from_numpy(np.ascontiguousarray(x, dtype=wide)) for x in (a, b))
    with torch.autocast("cpu", enabled=False):
        return torch.matmul(left, right).numpy().astype(dtype, copy=False)


def _install_bfloat16() -> None:
    cast, convert, dot, rmw = (
        _Builder.cast_impl,
        _Builder.create_fp_to_fp,
        _Builder.create_dot,
        _Builder.create_atomic_rmw,
    )

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target or tl.bfloat16 not in (source, target):
            return cast(self, src, dst_type)
        wide = _widened(src)
        if target == tl.bfloat16:
            return _narrowed(cast(self, wide, tl.float32))
        return wide if target == tl.float32 else cast(self, wide, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
            return cast_impl(self, src, dst_type)
        return convert(self, src, dst_type, rounding_mode)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any, **named: Any) -> Any:
        if a.dtype.primitive_bitwidth == 8 and a.dtype.is_floating():
            return dot(self, a, b, d, *options, **named)
        product = _matmul(_widened(a).data, _widened(b).data, d.data.dtype)
        return _Handle(product + d.data, d.dtype.scalar)

    def widening(name: str) -> None:
        original = getattr(_Builder, name)

        def operate(self: Any, *operands_and_op: Any) -> Any:
            *operands, op = operands_and_op
            if op is np.where or not any(map(_is_bfloat16, operands)):
                return original(self, *operands, op)
            result = original(self, *map(_widened, operands), op)
            return result if result.data.dtype == np.bool_ else _narrowed(result)

        setattr(_Builder, name, operate)

    def create_atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if _is_bfloat16(val):
            return _atomic_add_bfloat16(self, op, ptr, val, mask, sem, scope)
        if op == upstream._ir.ATOMIC_OP.XCHG and val.data.dtype.kind == "f":
            bits = _Handle(val.data.view(f"u{val.data.itemsize}"), val.dtype)
            old = rmw(self, op, ptr, bits, mask, sem, scope)
            return _Handle(old.data.view(val.data.dtype), val.dtype.scalar)
        return rmw(self, op, ptr, val, mask, sem, scope)

    def get_bf16(self: Any, value: float) -> Any:
        return _narrowed(self.get_fp32(value))

    _Builder.get_bf16 = get_bf16
    _Builder.cast_impl = cast_impl
    _Builder.create_fp_to_fp = create_fp_to_fp
    _Builder.create_dot = create_dot
    _Builder.create_atomic_rmw = create_atomic_rmw
    for name in ("binary_op", "unary_op", "ternary_op"):
        widening(name)


def _atomic_add_bfloat16(self: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
    """One compare-and-swap loop per element, on the 32-bit word that holds it."""
    if op != upstream._ir.ATOMIC_OP.FADD:
        raise TypeError("add is the only bfloat16 atomic")
    pointers, values, active = np.broadcast_arrays(ptr.data, val.data, mask.data)
    old = np.zeros(pointers.shape, dtype=np.uint16)
    order = self.ir_sem_to_interpreter_sem[sem]
    word_mask = np.ones(1, dtype=bool)
    for index in np.ndindex(pointers.shape):
        if not active[index]:
            continue
        address = int(pointers[index])
        word = np.array([address & ~3], dtype=np.uint64)
        shift = np.uint32(16 if address & 2 else 0)
        while True:
            seen = upstream._interpreter.load(word, word_mask, np.zeros(1, np.uint32), np.dtype(np.uint32))
            half = (seen >> shift).astype(np.uint16)
            new = narrow(widen(half) + widen(values[index].reshape(1)))
            merged = (seen & ~(np.uint32(0xFFFF) << shift)) | (new.astype(np.uint32) << shift)
            if upstream._interpreter.atomic_cas(word, seen, merged, order)[0] == seen[0]:
                old[index] = half[0]
                break
    return _Handle(old, tl.bfloat16)


# -- imported after Triton --------------------------------------------------------------------------------------


def interpret_standard_library() -> None:
    """Turn Triton's own device functions (``tl.sum``, ``tl.cdiv``, …) into interpreted ones.

    They were compiled-mode functions if Triton was imported before Iris chose the simulator.
    """
    from triton.runtime.jit import JITFunction

    interpreted: dict[int, Any] = {}

    def swap(owner: Any, name: str, value: Any, member: bool) -> None:
        function = interpreted.setdefault(id(value), upstream.InterpretedFunction(value.fn))
        setattr(owner, name, (lambda *a, _f=function, **k: _f(*a, **k)) if member else function)

    modules = [m for n, m in list(sys.modules.items()) if n.startswith("triton.language") and m is not None]
    for module in [triton, *modules]:
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                swap(module, name, value, member=False)
    for name, value in list(vars(tl.tensor).items()):
        if isinstance(value, JITFunction):
            swap(tl.tensor, name, value, member=True)
