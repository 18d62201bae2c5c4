"""A race detector: do signals order what ranks do to the same memory? It runs in the simulator, where accesses happen
in some order anyway, so that a missing signal need not change a result.

An *agent* does one thing after the other: the current stream of a rank, another lane or stream of it, its copies, a
program. A clock counts what each agent has done. Each agent also has, for every other agent, the time up to which it
knows of its actions: it learns of them when it acquires what the other has released, at a launch, and at the end of a
kernel. For every word on the heaps the detector keeps when each agent last read it, wrote it, or changed it atomically.
An agent that uses a word must know of all that others have done to it; else only luck has put that first. (The theory:
C. Flanagan and S. Freund, FastTrack, PLDI 2009.)

A flag of the copy engine is a copy of one word, which is seen no sooner than earlier copies. Words that show by
themselves that they have arrived (:func:`iris.device.words.store_words`) do not order what their kernel does. But an
agent that has taken such a word knows that the storer's kernel had begun, and so knows of all that was done before, and
of what the storer had learned in the same way. A word may be stored only where no other lies, by an agent that knows
that the one before was taken.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any
from unittest import mock

import greenlet
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import next_power_of_2
from triton.runtime import interpreter as upstream

import iris
from iris.backends import interpreter
from iris.backends.memory import Memory
from iris.backends.sim import SideStream, SimBackend
from iris.device.words import NO_WORD
from iris.engine import CopyEngine
from iris.ops import workspace
from iris.ops.workspace import FusedWorkspace

Clocks = np.ndarray[Any, np.dtype[np.int32]]
Addresses = np.ndarray[Any, Any]

CURRENT, BESIDE, COPIES, FIRST_PROGRAM, _PROGRAMS = 0, 1, 2, 3, 4
_EACH = FIRST_PROGRAM + _PROGRAMS
"""The number of agents of a rank. Every fourth program is the same agent, so their actions count as ordered."""
READ, WRITE, ATOMIC = range(3)
_UNLIKE = {READ: (WRITE, ATOMIC), WRITE: (READ, WRITE, ATOMIC), ATOMIC: (READ, WRITE)}
"""For each kind of access, the kinds of earlier accesses that it must be ordered after."""
_DOES = ("read", "write", "change")
_WORD = 4


def notes_nbytes(heap_nbytes: int, world_size: int) -> int:
    """The size of a heap with room for notes on all words of another heap."""
    return heap_nbytes * _EACH * world_size * (len(_DOES) + world_size) + (1 << 20)


class Watch(TorchDispatchMode):
    """While it is entered, ``unordered`` collects a sentence for each kind of access to heaps that no signal orders.

    Notes are on the heap of ``notes``, a context that nothing else uses. Memory that a workspace keeps for its own rank
    is put on the heap, so that it is watched, too."""

    def __init__(self, ctx: iris.Iris, notes: iris.Iris) -> None:
        super().__init__()
        self.unordered: set[str] = set()
        self._rank, self._bases, self._size = ctx.rank, ctx._backend.bases, ctx.heap_size
        words, world = ctx.heap_size // _WORD, ctx.world_size
        used = notes.empty(len(_DOES), words, world * _EACH, dtype=torch.int32)
        told = notes.empty(words, world, world * _EACH, dtype=torch.int32)
        self._used: list[Clocks] = [notes.peer_view(used, rank).numpy() for rank in range(world)]
        self._told: list[Clocks] = [notes.peer_view(told, rank).numpy() for rank in range(world)]
        self._clock = np.zeros(world * _EACH, np.int32)
        self._known: dict[Hashable, Clocks] = {}
        self._stream, self._paused = CURRENT, False
        self._words: list[range] = []
        self._patches = contextlib.ExitStack()
        for agent in (CURRENT, BESIDE, COPIES):
            self._known[agent] = np.zeros_like(self._clock)
            self._tick(agent, agent)

    def __enter__(self) -> Watch:
        for owner, name, wrap in (
            (Memory, "load", self._load), (Memory, "store", self._store), (Memory, "atomic_rmw", self._atomic),
            (interpreter, "_run_programs", self._run_programs), (SimBackend, "copy", self._copy),
            (SimBackend, "wait_word", self._wait_word), (SimBackend, "write_word", self._write_word),
            (SideStream, "__enter__", self._fork), (SideStream, "__exit__", self._join),
            (CopyEngine, "follow", self._follow), (CopyEngine, "lane", self._lane), (CopyEngine, "then", self._then),
            (workspace, "_made", self._unwatched), (FusedWorkspace, "scratch", self._scratch),
        ):  # fmt: skip
            self._patches.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _running(self) -> tuple[int, Hashable]:
        """The agent that runs now, and the key of what it knows."""
        if threading.current_thread() is not threading.main_thread():
            return COPIES, COPIES
        launch = interpreter._current
        if launch is None or greenlet.getcurrent() is launch.scheduler:
            return self._stream, self._stream
        program = upstream.interpreter_builder.grid_idx[0]
        return FIRST_PROGRAM + program % _PROGRAMS, ("program", program)

    def _tick(self, agent: int, key: Hashable) -> None:
        """Advance the clock of ``agent``: the other agents do not know of what it does from now on."""
        at = self._rank * _EACH + agent
        self._clock[at] += 1
        self._known[key][at] = self._clock[at]

    def _tell(self, giver: int, taker: int) -> None:
        self._learn(taker, self._known[giver])
        self._tick(giver, giver)

    def _learn(self, key: Hashable, clocks: Clocks) -> None:
        np.maximum(self._known[key], clocks, out=self._known[key])

    def _places(self, addresses: Addresses, nbytes: int) -> Iterator[tuple[int, Addresses]]:
        """For each rank, the words of its heap that are at ``addresses``."""
        for rank, base in enumerate(self._bases):
            offsets = addresses.astype(np.int64).ravel() - base
            offsets = offsets[(offsets >= 0) & (offsets < self._size)]
            if offsets.size:
                yield rank, np.unique(offsets[:, None] // _WORD + np.arange(-(-nbytes // _WORD)))

    def _use(self, how: int, addresses: Addresses, nbytes: int, unlike: tuple[int, ...] | None = None) -> None:
        agent, key = self._running()
        known = self._known[key]
        for rank, words in self._places(addresses, nbytes):
            for before in _UNLIKE[how] if unlike is None else unlike:
                for late in np.flatnonzero((self._used[rank][before, words] > known).any(0)):
                    mine, other = self._rank * _EACH + agent, int(late)
                    self.unordered.add(
                        f"{_name(mine)}: {_DOES[how]} what is at rank {rank}; {_name(other)}: {_DOES[before]} it"
                    )
            at = self._rank * _EACH + agent
            self._used[rank][how, words, at] = known[at]

    def _release(self, addresses: Addresses, add: bool) -> None:
        _, key = self._running()
        for rank, words in self._places(addresses, _WORD):
            mine = self._told[rank][words, self._rank]
            self._told[rank][words, self._rank] = np.maximum(mine, self._known[key]) if add else self._known[key]

    def _of_words(self, addresses: Addresses) -> bool:
        """Whether the memory there, on any heap, is for words that show by themselves that they have arrived."""
        offsets = [int(addresses[0]) - base for base in self._bases] if addresses.size else []
        return any(offset in words for words in self._words for offset in offsets)

    def _store_words(self, addresses: Addresses, values: Any) -> None:
        if (values == NO_WORD.value).all():
            self._use(WRITE, addresses, values.itemsize, (READ, WRITE))  # what was stored there has been seen
            return
        self._use(ATOMIC, addresses, values.itemsize)
        word = ctypes.c_int64 if values.itemsize == 8 else ctypes.c_int32
        if any(word.from_address(int(address)).value != NO_WORD.value for address in addresses):
            self.unordered.add("a word is stored where another one lies")
        for rank, words in self._places(addresses, _WORD):
            self._told[rank][words, self._rank] = self._known["words", self._running()[1]]

    def _acquire(self, addresses: Addresses, key: Hashable = None) -> None:
        for rank, words in self._places(addresses, _WORD):
            self._learn(self._running()[1] if key is None else key, self._told[rank][words].max((0, 1)))

    def _run_programs(self, original: Callable[..., None]) -> Callable[..., None]:
        def run(launch: Any, body: Callable[[], None], grid: tuple[int, ...]) -> None:
            programs = [("program", number) for number in range(grid[0])]
            for _, number in programs:
                self._known["program", number] = self._known[self._stream].copy()
                self._known["words", ("program", number)] = self._known[self._stream].copy()
                self._tick(FIRST_PROGRAM + number % _PROGRAMS, ("program", number))
            self._tick(self._stream, self._stream)
            original(launch, body, grid)
            for program in programs:
                self._learn(self._stream, self._known[program])

        return run

    def _load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(memory: Memory, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
            addresses = pointers[mask]
            words = self._of_words(addresses)
            if not words:
                self._use(READ, addresses, np.dtype(dtype).itemsize)
            found = original(memory, pointers, mask, other, dtype)
            if words:
                _, key = self._running()
                for one in (key, ("words", key)):
                    self._acquire(addresses[found[mask] != NO_WORD.value], one)
            return found

        return load

    def _store(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def store(memory: Memory, pointers: Any, values: Any, mask: Any) -> Any:
            addresses = pointers[mask]
            if self._of_words(addresses):
                self._store_words(addresses, values[mask])
            else:
                self._use(WRITE, addresses, values.itemsize)
            return original(memory, pointers, values, mask)

        return store

    def _atomic(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def atomic(memory: Memory, op: Any, pointers: Any, values: Any, mask: Any, order: Any) -> Any:
            addresses, kinds = pointers[mask], memory.MEM_SEMANTIC
            self._use(ATOMIC, addresses, values.itemsize)
            if releases := order in (kinds.RELEASE, kinds.ACQUIRE_RELEASE):
                self._release(addresses, op != memory.RMW_OP.XCHG)
            found = original(memory, op, pointers, values, mask, order)
            if order in (kinds.ACQUIRE, kinds.ACQUIRE_RELEASE):
                self._acquire(addresses)
            if releases:
                self._tick(*self._running())
            return found

        return atomic

    def _fork(self, original: Callable[..., None]) -> Callable[..., None]:
        def enter(stream: SideStream) -> None:
            self._tell(CURRENT, COPIES)
            self._tell(CURRENT, BESIDE)
            original(stream)

        return enter

    def _join(self, original: Callable[..., None]) -> Callable[..., None]:
        def leave(stream: SideStream, *error: Any) -> None:
            original(stream, *error)
            self._tell(COPIES, CURRENT)
            self._tell(BESIDE, CURRENT)

        return leave

    def _follow(self, _: object) -> Callable[[CopyEngine], None]:
        def follow(engine: CopyEngine) -> None:
            known = self._known[self._stream].copy()
            self._tick(self._stream, self._stream)
            engine._stream.add(lambda: self._learn(COPIES, known))

        return follow

    def _lane(self, _: object) -> Callable[..., Any]:
        return lambda engine, number: mock.patch.object(self, "_stream", (CURRENT, BESIDE)[number % 2])

    def _then(self, original: Callable[..., None]) -> Callable[..., None]:
        def then(engine: CopyEngine, producer: Callable[[], None], consumer: Callable[[], None]) -> None:
            def beside() -> None:
                with mock.patch.object(self, "_stream", BESIDE):
                    consumer()

            self._tell(CURRENT, BESIDE)
            original(engine, producer, beside)
            self._tell(BESIDE, CURRENT)

        return then

    def _copy(self, _: object) -> Callable[..., None]:
        def copy(backend: SimBackend, target: int, source: int, nbytes: int, stream: SideStream) -> None:
            def task() -> None:
                flag = nbytes == _WORD
                self._use(READ, np.arange(source, source + nbytes, _WORD), _WORD)
                self._use(ATOMIC if flag else WRITE, np.arange(target, target + nbytes, _WORD), _WORD)
                if flag:
                    self._release(np.array([target]), add=False)
                ctypes.memmove(target, source, nbytes)
                self._tick(COPIES, COPIES)

            stream.add(task)

        return copy

    def _wait_word(self, original: Callable[..., None]) -> Callable[..., None]:
        def wait(backend: SimBackend, address: int, stream: SideStream) -> None:
            original(backend, address, stream)
            stream.add(lambda: self._acquire(np.array([address])))

        return wait

    def _write_word(self, original: Callable[..., None]) -> Callable[..., None]:
        def write(backend: SimBackend, address: int, value: int, stream: SideStream) -> None:
            def task() -> None:
                self._use(ATOMIC if value else WRITE, np.array([address]), _WORD)
                if value:
                    self._release(np.array([address]), add=False)
                    self._tick(COPIES, COPIES)

            stream.add(task)
            original(backend, address, value, stream)

        return write

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in function._schema.returns)
        if not self._paused and not views:
            for place, argument in enumerate(function._schema.arguments):
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                written = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in given if isinstance(given, (list, tuple)) else [given]:
                    if isinstance(tensor, torch.Tensor):
                        self._use(WRITE if written else READ, _addresses(tensor), tensor.element_size())
        return function(*args, **kwargs)

    def _unwatched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what is done after a barrier of the hosts, such as making a workspace: it is not watched."""

        def call(*args: Any) -> Any:
            with mock.patch.object(self, "_paused", True):
                made = original(*args)
                if made.staging.numel() and bool((made.staging == 0xFF).all()):
                    first = made.staging.data_ptr() - self._bases[self._rank]
                    self._words.append(range(first, first + made.staging.numel()))
            return made

        return call

    def _scratch(self, _: object) -> Callable[..., torch.Tensor]:
        def scratch(ours: FusedWorkspace, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
            key = name, next_power_of_2(count), dtype
            if key not in ours.local:
                with mock.patch.object(self, "_paused", True):
                    ours.local[key] = ours.ctx.empty(key[1], dtype=dtype)
                ours.local[key].zero_()  # by the current stream; others need not wait for it
            return ours.local[key]

        return scratch


def _name(agent: int) -> str:
    rank, number = divmod(agent, _EACH)
    names = ("current stream", "lane or stream beside it", "copies")
    return f"{names[number] if number < FIRST_PROGRAM else f'program {number - FIRST_PROGRAM}'} of rank {rank}"


def _addresses(tensor: torch.Tensor) -> Addresses:
    """The addresses of the elements of ``tensor``."""
    offsets = np.zeros((), np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + np.arange(size) * stride * tensor.element_size()
    return offsets.ravel() + tensor.data_ptr()
