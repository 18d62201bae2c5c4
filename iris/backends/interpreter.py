"""Triton's interpreter, extended for programs that wait for each other.

What changes while Iris simulates:

* **Co-residency.** The programs of a launch run as greenlets. They switch at every atomic and every load that is
  volatile or ``.cv``, so a consumer may precede its producer in program order, as on a GPU. They also switch at every
  fiftieth load in a row, because plain loads may be a poll, too, and at every two-thousandth load in any case. When all
  programs of the launch only poll, the process sleeps a moment and its core goes to the other ranks; when all have read
  the same values for too long, the launch ends.
* **Threads.** Kernels that two threads of a process launch run one after the other.
* **Narrow floats.** Triton computes on the bit patterns of bfloat16; see :mod:`iris.backends.floats`.
* **Language.** ``and``, ``min``, ``libdevice`` and the like; see :mod:`iris.backends.language`.
* **Addresses.** An access to an address without memory raises in the kernel; it does not end the process.
* **Failures.** A launch that is given a context's handle runs inside the context manager that the context has put into
  :data:`surroundings`, so that the context learns how the kernel has ended.
* **Refusals.** What Triton refuses on GPUs is refused here, too, as far as it can be detected: keywords that neither
  kernel nor compiler knows, arguments that are neither tensors nor numbers (:mod:`iris.backends.arguments`),
  compare-and-swaps of mixed types.
* **Tuning.** ``triton.autotune`` takes its first config, because simulated times mean nothing.
* **Speed.** Triton patches its language module at each call of a device function (about 1 ms); here that is done once
  per launch, and what to patch is found only once. Triton calls each function of its language through two others; here
  it is called directly. Triton computes every integer sum and product again in 64 bits, to check for overflows if
  ``debug`` is set; here only if it is set. And Triton works out types anew for every number; see
  :mod:`iris.backends.memos`.
"""

from __future__ import annotations

import contextvars
import inspect
import itertools
import linecache
import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as upstream
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import JITFunction

from iris.backends import arguments, floats, language, memos
from iris.backends.base import Surroundings
from iris.backends.memory import Memory
from iris.errors import AddressError, ArgumentError, BackendError, DTypeError, IrisError, ShapeError, WaitTimeout

try:
    import greenlet
except ImportError as error:
    raise BackendError("the simulator needs greenlet: pip install greenlet") from error

_Builder = upstream.InterpreterBuilder
_Handle = upstream.TensorHandle
_IRIS = f"{Path(__file__).parents[1]}{os.sep}"
_IDLE_SLEEP_S, _MOST_IDLE_SLEEP_S = 50e-6, 2e-3
"""How long a launch sleeps, at least and at most, when all of its programs poll: a quarter of the time for which they
have done so, since polls take the CPU from the ranks that they wait for."""
_LOADS_IN_A_ROW = 50
"""After so many loads without a store or product, a program may be polling."""
_LOADS_AT_MOST = 2000
"""After so many loads a program may be polling in any case: it may count its polls in memory."""
_MOST_PLACES = 4096
"""The number of places for which a launch remembers what a program has read there."""
_ROUNDS_IN_VAIN = 256
"""How many rounds in which all programs read the same are left to a launch whose time is over: more than a wait of
Iris's own needs to see that its own time is over, so that it is the wait that ends."""
_USUAL_LIMIT_S = 300.0
limits_s: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
"""By open backend, how long a launch may poll its heaps in vain: as long as any of its waits."""
surroundings: dict[int, Surroundings] = {}
"""Functions that make the context manager around a launch, by the ``id`` of a tensor among its arguments."""


def install() -> None:
    """Put the changes in place; once per process."""
    if getattr(upstream.GridExecutor, "_iris", False):
        return
    upstream.GridExecutor._iris = True
    upstream.GridExecutor.__call__ = _run_grid
    upstream.InterpretedFunction.__call__ = _call_device_function
    options = upstream.interpreter_builder.options
    precisions = dict.fromkeys((*options.allowed_dot_input_precisions, "bf16x3", "bf16x6"))
    upstream.interpreter_builder.options = replace(
        options, sanitize_overflow=options.debug, allowed_dot_input_precisions=tuple(precisions)
    )
    upstream._interpreter = Memory(upstream._interpreter, lambda: upstream.interpreter_builder.grid_idx, _off_heap)
    Autotuner.do_bench = staticmethod(_untimed)
    _install_switches()
    _install_refusals()
    language.install()
    floats.install()
    memos.install()


def _untimed(call: Callable[[], object], quantiles: object = None) -> list[float]:
    """The time that ``triton.autotune`` gets for each config: always 0, so that it takes the first one, because
    simulated times mean nothing."""
    call()
    return [0.0, 0.0, 0.0]


class _Launch:
    """One kernel launch: what its programs have read, and what has been patched for it."""

    def __init__(self) -> None:
        self.scheduler = greenlet.getcurrent()
        self.scopes: list[Any] = []
        self.patched: set[int] = set()
        self.found: dict[Any, dict[int, int]] = {}
        self.polled: dict[Any, int] = {}
        self.worked = self.found_new = False
        self.loads = self.all_loads = 0

    def patch(self, fn: Callable[..., Any]) -> None:
        """Redirect ``triton.language``, as the module of ``fn`` sees it, to the interpreter; once per launch and
        module."""
        if id(fn.__globals__) in self.patched:
            return
        self.patched.add(id(fn.__globals__))
        languages = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if languages <= self.patched and (languages or self.patched):
            return
        key = frozenset(languages), id(tl) in self.patched, id(tl.core) in self.patched
        self.patched |= languages
        if key in _changes:
            scope = upstream._LangPatchScope()
            for change in _changes[key]:
                scope.set_attr(*change)
        else:
            scope = upstream._patch_lang(fn)
            scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.squeeze()))
            for module in (tl, tl.core):
                if id(module) in languages:
                    scope.set_attr(module, "static_assert", language.static_assert)
            for owner, name, _ in scope._changes:
                direct = _direct(getattr(owner, name))
                setattr(owner, name, memos.at_once(name, direct) if owner is tl.tensor else direct)
            _changes[key] = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
        self.scopes.append(scope)

    def find(self, pointers: Any, values: Any, polls: bool = True) -> None:
        """Note what the running program has read, and where, at a point where it lets others run: it may look at
        several places in turn. ``polls``: others write there, so the error of a wait in vain may name this place."""
        program, addresses = greenlet.getcurrent(), pointers.data.tobytes()
        places, place, found = self.found.setdefault(program, {}), hash(addresses), hash(values.data.tobytes())
        if places.get(place) != found:
            self.found_new = True
            if len(places) == _MOST_PLACES:
                places.clear()
            places[place] = found
        if polls or program not in self.polled:
            self.polled[program] = int.from_bytes(addresses[:8], sys.byteorder)

    def forget(self, program: Any) -> None:
        """Forget ``program``, which has ended."""
        self.found.pop(program, None)
        self.polled.pop(program, None)

    def may_poll(self) -> bool:
        """Count a plain load, one that does not say that others write there; return whether it may be a poll."""
        self.loads, self.all_loads = (self.loads + 1) % _LOADS_IN_A_ROW, (self.all_loads + 1) % _LOADS_AT_MOST
        return not (self.loads and self.all_loads)

    def restore(self) -> None:
        for scope in reversed(self.scopes):
            scope.restore()


_BUILTIN = tl.core.add.__code__
"""The code of the wrapper around each builtin function of Triton, which refuses calls on the host."""


def _direct(patched: Any) -> Any:
    """A direct call of the builtin function that ``patched``, Triton's redirection, calls through wrappers."""
    member: Any = (getattr(patched, "__kwdefaults__", None) or {}).get("member")
    if getattr(member, "__code__", None) is not _BUILTIN:
        return patched
    function, semantic = member.__wrapped__, upstream.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return call


_changes: dict[Any, list[tuple[Any, str, Any]]] = {}
"""What :meth:`_Launch.patch` changes, by the language modules that a function sees and those patched before."""
_current: _Launch | None = None
_turn = threading.RLock()


def _run_grid(self: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces Triton's serial grid loop. Threads take turns, because a launch patches the whole process."""
    global _current
    with _turn:
        upstream._interpreter.forget()
        kwargs = arguments.keywords_of(self.fn, kwargs)
        for hook in self.pre_run_hooks:
            hook(*args, **kwargs)
        outer, _current = _current, _Launch()
        launch, threads = _current, torch.get_num_threads()
        torch.set_num_threads(1)  # products of tiles are too small to share
        try:
            launch.patch(self.fn)
            bound = inspect.getcallargs(self.fn, *args, **kwargs)
            grid = self.grid(bound) if callable(self.grid) else self.grid  # given what the caller gave
            around = _surroundings(bound.values())
            bound = arguments.values_of(self.fn, bound)
            grid = arguments.sizes_of(self.fn, grid)
            upstream.interpreter_builder.set_grid_dim(*grid)
            with ExitStack() as entered:
                for one in around:
                    entered.enter_context(one())
                entered.enter_context(np.errstate(all="ignore"))  # kernels overflow, and make NaN, without a warning
                _run_programs(launch, lambda: self.fn(**bound), grid)
        finally:
            torch.set_num_threads(threads)
            launch.restore()
            _current = outer


def _surroundings(given: Iterable[object]) -> set[Surroundings]:
    """The surroundings of a launch with the arguments ``given``. A handle among them is a tuple of tensors, which may
    be inside another tuple."""
    found: set[Surroundings] = set()
    for one in given:
        if isinstance(one, tuple):
            found |= _surroundings(one)
        elif id(one) in surroundings:
            found.add(surroundings[id(one)])
    return found


def _run_programs(launch: _Launch, body: Callable[[], None], grid: tuple[int, ...]) -> None:
    builder = upstream.interpreter_builder
    waiting = deque((_program(body), index) for index in itertools.product(*(range(size) for size in grid)))
    went_on, in_vain = math.inf, 0
    try:
        while waiting:
            launch.worked = launch.found_new = False
            for _ in range(len(waiting)):
                program, index = waiting.popleft()
                builder.set_grid_idx(*index)
                program.switch()
                if program.dead:
                    launch.worked = True
                    launch.forget(program)
                else:
                    waiting.append((program, index))
            if launch.worked or launch.found_new:
                went_on, in_vain, idle_s = time.monotonic(), 0, 0.0
            elif (idle_s := time.monotonic() - went_on) > _limit_s(launch, waiting[0][0]):
                in_vain += 1
                if in_vain > _ROUNDS_IN_VAIN:
                    raise _waited_in_vain(launch, *waiting[0])
            if not launch.worked:
                time.sleep(min(max(_IDLE_SLEEP_S, idle_s / 4), _MOST_IDLE_SLEEP_S))
    except Exception as error:
        for program, _ in waiting:
            program.throw()
        place = _place(error, launch)
        if isinstance(error, ArgumentError):
            fix = f"{error.fix}{place}".strip()
            raise type(error)(error.op, error.argument, error.expected, error.got, fix) from error
        if isinstance(error, AddressError):
            raise AddressError(f"{error}{place}") from error
        if isinstance(error, (IrisError, InterpreterError)):
            raise
        raise InterpreterError(f"{_described(error)}.{place}") from error


def _program(body: Callable[[], None]) -> Any:
    """A program of a launch; in it, NumPy's settings and other variables of the context are as around the launch."""
    program = greenlet.greenlet(body)
    program.gr_context = contextvars.copy_context()
    return program


def _described(error: Exception) -> str:
    """As ``repr``, with what Triton has wrapped as a constant of the kernel as it is."""
    return f"{type(error).__name__}({', '.join(repr(tl.core._unwrap_if_constexpr(one)) for one in error.args)})"


def _place(error: Exception, launch: _Launch) -> str:
    """Where in a kernel the error is: the innermost line of the user's, or of a kernel of Iris's own."""
    kernels = [one for one in traceback.walk_tb(error.__traceback__) if id(one[0].f_globals) in launch.patched]
    users = [one for one in kernels if not one[0].f_code.co_filename.startswith(_IRIS)]
    for frame, number in (users or kernels)[-1:]:
        file = frame.f_code.co_filename
        return f" At {file}:{number}, in {frame.f_code.co_name}: {linecache.getline(file, number).strip()}"
    return ""


def _limit_s(launch: _Launch, program: Any) -> float:
    """How long ``program`` may poll in vain: as its heap's backend says; elsewhere, what any of them allows counts."""
    polled = launch.polled.get(program, 0)
    held = [limit_s for backend, limit_s in limits_s.items() if backend.holds(polled)]
    return max(held or limits_s.values(), default=_USUAL_LIMIT_S)


def _waited_in_vain(launch: _Launch, program: Any, index: tuple[int, ...]) -> WaitTimeout:
    return WaitTimeout(
        f"program {index} polls address {launch.polled[program]:#x} and finds the same, and no other program of the "
        "kernel goes on. Did the rank that should store there make the same call? A slow but healthy one needs a "
        "larger first_timeout_s, or IRIS_TIMEOUT_S if that sets it. On a GPU this polls for ever; iris.wait is bounded "
        "there, too."
    )


def _off_heap(address: int, is_there: Callable[[int], bool]) -> str:
    """If ``address`` is that of a tensor off the heap, as it comes out at a peer: what to say."""
    for backend in limits_s:
        for peer, home in backend.homes(address):
            if is_there(home) and not any(other.holds(home) for other in limits_s):
                return (
                    f"It is that of a tensor off the symmetric heap, moved to rank {peer}'s: make the tensor by "
                    "ctx.empty, ctx.zeros or ctx.as_symmetric, and keep what is computed from it there, too (out=)."
                )
    return ""


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``InterpretedFunction.__call__``, the call of a ``@triton.jit`` function from a kernel."""
    if _current is None:
        name = self.fn.__name__
        raise InterpreterError(
            f"{name}: launch a kernel with a grid, {name}[grid](…), and call a device function from a kernel; on the "
            "host, ask the context: ctx.rank, ctx.barrier(), ctx.peer_view(…)"
        )
    _current.patch(self.fn)
    return self.rewrite()(*args, **kwargs)


def _switch() -> None:
    """Let the other programs of this launch go on, and if they all poll, the other ranks."""
    if _current is not None and greenlet.getcurrent() is not _current.scheduler:
        _current.scheduler.switch()


def _install_switches() -> None:
    def switching(name: str, at: int) -> None:
        original = getattr(_Builder, name, None)
        if original is None:
            return

        def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
            _switch()
            return _found(args[at], original(self, *args, **kwargs))

        setattr(_Builder, name, replacement)

    for name, at in (("create_atomic_cas", 0), ("create_atomic_rmw", 1), ("create_atomic_store", 0)):
        switching(name, at)
    swap = _Builder.create_atomic_cas

    def create_atomic_cas(self: Any, ptr: Any, cmp: Any, val: Any, *rest: Any) -> Any:
        _require_like(ptr, cmp=cmp, val=val)
        return swap(self, ptr, cmp, val, *rest)

    _Builder.create_atomic_cas = create_atomic_cas
    for name in ("create_masked_store", "create_dot"):
        _mark_as_work(name)

    load = _Builder.create_masked_load
    uncached = "cv", upstream._ir.CACHE_MODIFIER.CV

    def masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **options: Any) -> Any:
        volatile = options.get("is_volatile", rest[-1] if rest else False)
        fresh = volatile or any(option in uncached for option in (*rest, *options.values()))
        if not fresh and not (_current is not None and _current.may_poll()):
            return load(self, ptrs, mask, other, *rest, **options)
        _switch()
        return _found(ptrs, load(self, ptrs, mask, other, *rest, **options), fresh)

    _Builder.create_masked_load = masked_load  # atomic loads are volatile loads
    _Builder.get_cache_policy = lambda self, modifier, eviction: modifier  # Triton's own forgets it

    if hasattr(_Builder, "create_atomic_poll"):
        _Builder.create_atomic_poll = _atomic_poll


def _require_like(pointers: Any, **operands: Any) -> None:
    """Raise if the operands of a compare-and-swap do not match the memory, which no compiler accepts. Unlike in other
    atomics, Triton's interpreter converts neither operand, and would read beyond the end of one that is too short."""
    wanted, shape = pointers.dtype.scalar.element_ty, pointers.data.shape
    for name, operand in operands.items():
        dtype = operand.dtype.scalar
        if dtype.name.lstrip("u") != wanted.name.lstrip("u"):
            raise DTypeError("tl.atomic_cas", name, wanted.name, dtype.name, "tl.cast it; iris.atomic_cas does that.")
        if operand.data.shape != shape:
            fix = "tl.broadcast_to it; iris.atomic_cas does that."
            raise ShapeError("tl.atomic_cas", name, str(shape), operand.data.shape, fix)


def _found(pointers: Any, values: Any, polls: bool = True) -> Any:
    if _current is not None and values is not None:
        _current.find(pointers, values, polls)
    return values


def _mark_as_work(name: str) -> None:
    original = getattr(_Builder, name)

    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _current is not None:
            _current.worked, _current.loads = True, 0
        return original(self, *args, **kwargs)

    setattr(_Builder, name, replacement)


def _atomic_poll(self: Any, ptr: Any, expected: Any, timeout_ns: Any, sem: Any, scope: Any) -> Any:
    """Replaces Triton's version, which spins and never lets the awaited program run."""
    start, limit = time.monotonic_ns(), getattr(timeout_ns, "data", None)  # without a limit: an empty value
    while True:
        value = self.create_load(ptr, None, True)
        matched = value.data == expected.data
        expired = limit is not None and time.monotonic_ns() - start >= limit.item()
        if matched.all() or expired:
            return _Handle(matched, tl.int1)


def _install_refusals() -> None:
    """Explain why Triton would compile a kernel, if it finds no GPU to do so, or if a simulated kernel calls it."""
    run, call = JITFunction.run, JITFunction.__call__

    def refused(kernel: Any) -> BackendError:
        if type(kernel) is not JITFunction:
            return BackendError(
                f"{kernel.__name__} is a {type(kernel).__name__}, which cannot be simulated: use @triton.jit."
            )
        return BackendError(
            f"{kernel.__name__} was decorated with @triton.jit before iris was imported, so Triton would compile it, "
            "and here kernels are simulated. Import iris before kernels are decorated."
        )

    def running(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(self, *args, **kwargs)
        except RuntimeError as error:
            if "active drivers" not in str(error):
                raise
            raise refused(self) from None

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _current is not None:
            raise refused(self)
        return call(self, *args, **kwargs)

    JITFunction.run, JITFunction.__call__ = running, called


def interpret_standard_library() -> None:
    """Turn Triton's own device functions (``tl.sum``, ``tl.cdiv``, …) into interpreted ones.

    Triton has made them for its compiler if it was imported before Iris chose the simulator.
    """
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
