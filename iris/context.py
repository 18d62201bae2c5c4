"""The context: one rank's view of the job, its symmetric heap, and its peers."""

from __future__ import annotations

import atexit
import itertools
import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import torch

from iris import backends
from iris.aliases import Aliases
from iris.backends.base import between_traps
from iris.device import control, handle, sync
from iris.device.handle import Handle
from iris.eager import eager
from iris.errors import (
    ArgumentError,
    CaptureError,
    ContextError,
    IrisError,
    RankMismatch,
    explaining_too_many_files,
    ranks_text,
    whole_number,
)
from iris.failure import Failure
from iris.heap import HeapTable, format_bytes
from iris.identity import Identity
from iris.leases import Leases
from iris.live import OPEN, Live, Opened, end_all, ending, forget_all, hold, real_error
from iris.log import RankLogger
from iris.membership import Group, global_ranks, group_name, identify, members
from iris.mesh import Mesh
from iris.symmetric import SymmetricHeap
from iris.timeouts import Timeouts, timeouts
from iris.watcher import Watcher
from iris.wire import pack, unpack

if TYPE_CHECKING:
    from iris.ops import BoundOps

T = TypeVar("T")

DEFAULT_HEAP_SIZE = 1 << 30
MIN_HEAP_BYTES = 1 << 16
_MAX_HEAP_BYTES = 1 << 46
"""Upper limit for the bytes of a heap: no address space has room for more on all ranks."""
MAX_RANKS = handle.MAX_RANKS.value
_never_freed: list[object] = []
_numbers = itertools.count()
_BY_KEY = WeakValueDictionary[str, "Iris"]()


def iris(
    heap_size: int = DEFAULT_HEAP_SIZE,
    group: Group = None,
    backend: str | None = None,
    *,
    device: Any = None,
    timeout_s: float | None = None,
    first_timeout_s: float | None = None,
    log_level: str | int | None = None,
) -> Iris:
    """Join the job and return this rank's context. Collective.

    Args:
        heap_size: bytes of symmetric memory per rank, beside 4 KiB that Iris keeps; equal on all ranks.
        group: a torch ProcessGroup whose ranks form the job (all on this host). None takes the default
            group if ``torch.distributed`` is initialised, else what the launcher's environment says, else
            a job of one rank.
        backend: ``"cuda"``, ``"hip"`` or ``"sim"``; None takes what :func:`iris.backends.detect` chose.
        device: this rank's GPU, in any form that torch.device takes. None takes the launcher's local rank. Under
            ``torch.distributed`` without ``LOCAL_RANK``, None takes the current device if no two ranks share one, else
            this process's rank in ``torch.distributed``.
        timeout_s: seconds after which a wait for a peer gives up (default 60, or ``IRIS_TIMEOUT_S``).
        first_timeout_s: the same limit while ranks meet, and for the first use of a flag, when peers may still be
            compiling (default ``timeout_s`` or ``IRIS_TIMEOUT_S`` if one is given, else 300).
        log_level: for :meth:`Iris.info` and its siblings (default ``IRIS_LOG_LEVEL`` or ``"warning"``).

    Raises:
        WaitTimeout: some ranks did not arrive.
        PeerDied: a rank died while the ranks were meeting.
        RankMismatch: the ranks disagree about ``heap_size``, the number of ranks, the backend or IRIS_CHECK_CALLS, or
            their devices differ in their number of SMs.
        BackendError: the backend lacks something; the error says what, and how to get it.
        ArgumentError: an argument or an environment variable has an impossible value.
    """
    return Iris(
        heap_size, group, backend, device=device, timeout_s=timeout_s, first_timeout_s=first_timeout_s,
        log_level=log_level,
    )  # fmt: skip


class Iris(Live, SymmetricHeap, RankLogger, Aliases):
    """One rank's context; make it with :func:`iris.iris`, which takes the same arguments, and end it with :meth:`close`
    or ``with``.

    Attributes:
        rank: this rank.
        world_size: the number of ranks.
        device: the torch device of this rank's heap.
        num_sms: SMs (compute units) of that device.
        backend_name: ``"cuda"``, ``"hip"`` or ``"sim"``.
    """

    _ops_factory: Callable[[Iris], BoundOps]
    """Set by :mod:`iris.ops`, which imports this module."""
    last_trace: Any = None
    """The Trace of the last op that was called with one, or with ``trace=True``."""

    def __init__(
        self,
        heap_size: int = DEFAULT_HEAP_SIZE,
        group: Group = None,
        backend: str | None = None,
        *,
        device: Any = None,
        timeout_s: float | None = None,
        first_timeout_s: float | None = None,
        log_level: str | int | None = None,
    ) -> None:
        nbytes = whole_number(heap_size)
        if not MIN_HEAP_BYTES <= nbytes <= _MAX_HEAP_BYTES:
            expected = f"a whole number of bytes from {MIN_HEAP_BYTES} to {_MAX_HEAP_BYTES}"
            raise ArgumentError("iris", "heap_size", expected, repr(heap_size))
        limits = timeouts(timeout_s, first_timeout_s)
        for switch in (backends.oversubscribed, backends.replays, backends.compares_calls):
            switch()  # an error if its variable is neither 0 nor 1, whatever the backend
        self._pid, self._open, self._key = os.getpid(), False, str(next(_numbers))
        choice = _choice(backend)
        who = identify(group, device, limits.first_s)
        if who.world_size > MAX_RANKS:
            raise ArgumentError("iris", "world size", f"at most {MAX_RANKS} ranks", who.world_size)
        self.rank, self.world_size, self.timeout_s = who.rank, who.world_size, limits.steady_s
        self.backend_name = choice.name
        self._global_ranks, self._group_name = global_ranks(group), group_name(group)
        self._start_logging(self.rank, log_level)
        self._mesh = Mesh(who.rank, who.world_size, who.job, limits.first_s)
        try:
            with explaining_too_many_files("making a context"):
                self._start(choice, who, nbytes, limits)
        except BaseException as error:
            self._mesh.leave(error)
            raise
        self._open = True
        _BY_KEY[self._key] = self
        hold(self, Opened(f"rank {self.rank}", self.close, self._release))
        handles = [self._heap_bases, self._alone.bases]
        self._backend.surround_launches(
            handles, self._failure.of_simulated_kernel, max(limits.first_s, limits.steady_s)
        )

    def _start(self, choice: backends.Choice, who: Identity, heap_size: int, limits: Timeouts) -> None:
        self._compares_calls = backends.compares_calls()
        compared = ", IRIS_CHECK_CALLS=1" if self._compares_calls else ""
        self._mesh.exchange(f"iris(heap_size={heap_size}, backend={choice.name}{compared})")
        self._table = HeapTable(heap_size + control.CONTROL_BYTES.value)
        self._backend = backends.open_backend(choice, self._mesh, who.local_rank, self._table.size)
        self._mesh.timeout_s = limits.steady_s
        try:
            self._set_up(limits)
        except BaseException as error:
            self._mesh.leave(error)  # first: peers wait for this rank
            if not self._backend.close(limits.steady_s if isinstance(error, Exception) else 0.0):
                _never_freed.append(self)
            raise
        self.info(f"rank {self.rank} of {self.world_size} on {self.device} ({choice.reason})")

    def _set_up(self, limits: Timeouts) -> None:
        if self._backend.without_atomics:
            peers = ranks_text(self._backend.without_atomics)
            self.warning(
                f"the link to {peers} has no native atomics (PCIe?): where several ranks count or add at one word, "
                'some is lost. Ops by "auto" need none; iris.signal_add and your own atomics on peers\' memory do.'
            )
        if self._backend.name == "hip" and self.rank == 0:
            self.warning(
                "nobody has run Iris on AMD hardware yet. What a peer has stored may not be seen: run "
                "`pytest -m gpu tests/test_litmus.py` first, and read docs/memory-model.md."
            )
        self.device, self.num_sms = self._backend.device, self._backend.num_sms
        self.heap_size = self._table.size - control.CONTROL_BYTES.value
        self._leases = Leases(self._table, self.world_size)
        self._workspaces: dict[Hashable, Any] = {}
        self._kept: dict[Hashable, Any] = {}
        self._agreed: set[Hashable] = set()
        self._group_tensors: dict[tuple[int, ...], torch.Tensor] = {}
        block = self._table.allocate(control.CONTROL_BYTES.value, "control block")
        assert not block.offset, "kernels take it to be at the start of the heap"
        self._backend.bytes_at(0, block.nbytes, None).zero_()
        self._status = self._backend.status_words(control.STATUS_WORDS.value)
        self._heap_bases = between_traps(self._backend.bases, self.device)
        nanoseconds = [int(limits.steady_s * 1e9), int(limits.first_s * 1e9)]
        info = [self.rank, self.world_size, *nanoseconds, self._status.data_ptr()]
        self._handle = Handle(self._heap_bases, torch.tensor(info, dtype=torch.int64, device=self.device))
        own_base = self._heap_bases[self.rank : self.rank + 1].clone()
        self._alone = Handle(own_base, torch.tensor([0, 1, *info[2:]], dtype=torch.int64, device=self.device))
        self._keep_group(tuple(range(self.world_size)))
        self._backend.synchronize(None, lambda: None)
        self._require_as_many_sms(self._mesh.exchange("iris", str(self.num_sms).encode()))
        self._watcher = Watcher(self._mesh, self._backend)
        status = self._status.numpy()
        self._failure = Failure(self._mesh, self._watcher, status, self._table, self._global_ranks, limits.set_by)

    def _require_as_many_sms(self, counts: dict[int, bytes]) -> None:
        """Raise RankMismatch unless all ranks' devices have the same number of SMs: ops split their work by it."""
        if len(set(counts.values())) > 1:
            said = ", ".join(f"rank {rank}: {count.decode()}" for rank, count in sorted(counts.items()))
            fix = "Choose like devices, as by CUDA_VISIBLE_DEVICES"
            raise RankMismatch(f"iris: the ranks' devices differ in their number of SMs ({said}). {fix}.")

    @property
    @eager
    def heap_bases(self) -> torch.Tensor:
        """int64 tensor with the address of every rank's heap in this rank's address space; pass it to kernels."""
        self._require_open("heap_bases")
        return self._heap_bases

    @property
    @eager
    def handle(self) -> Handle:
        """The device handle: an argument of kernels, for the functions of :mod:`iris.peer` and
        :mod:`iris.device.sync`."""
        self._require_open("handle")
        return self._handle

    @property
    @eager
    def alone(self) -> Handle:
        """A handle like :attr:`handle`, but of a job with this rank only: for kernels in which no peer takes part."""
        self._require_open("alone")
        return self._alone

    @property
    def ops(self) -> BoundOps:
        """Every op of :mod:`iris.ops`, bound to this context: ``ctx.ops.all_gather_matmul(output, A, B)``."""
        return Iris._ops_factory(self)

    def workspace(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make()`` returned the first time ``key`` was asked for. Collective on first use: ``str(key)`` must be
        the same on all ranks, so use numbers, names, and tuples of these.

        Ops keep their flags and staging buffers here: made once, reused, never zeroed again.
        """
        self._require_open("workspace")
        if key not in self._workspaces:
            self._exchange(f"workspace({key})")
            self._workspaces[key] = make()
        made: T = self._workspaces[key]
        return made

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """As :meth:`workspace`, for objects of this rank alone; not collective."""
        self._require_open("kept")
        if key not in self._kept:
            self._kept[key] = make()
        made: T = self._kept[key]
        return made

    def agree(self, op: str, what: Hashable) -> None:
        """Check that all ranks call ``op`` with the same ``what``. Collective the first time for each ``op`` and
        ``what``, or every time with ``IRIS_CHECK_CALLS=1``; otherwise it does nothing.

        Raises:
            RankMismatch: the ranks differ; the error says what each rank passed.
        """
        key = op, what
        if self._compares_calls or key not in self._agreed:
            self._exchange(f"{op}({what})")
            self._agreed.add(key)

    def collect(self, op: str) -> None:
        """Free the heap blocks that all ranks have released; errors name ``op``. Collective."""
        self._leases.collect(f"{op}(frees memory)", self._exchange)

    def has_workspace(self, key: Hashable) -> bool:
        """Whether :meth:`workspace` has made the object for ``key``; the same on all ranks."""
        return key in self._workspaces

    @eager
    def barrier(self, stream: Any = None, group: Group = None) -> None:
        """Wait until this rank's ``stream`` is done and all ranks of ``group`` have made this call.

        Args:
            stream: the stream to wait for (default: the current one).
            group: the ranks that take part (default: all).

        Sync: all participating ranks see afterwards what any of them wrote on its stream before.

        Raises:
            WaitTimeout, PeerDied: a rank did not come, or died; the error names it.
            RankMismatch: a participating rank makes another call.
        """
        self._require_open("barrier")
        _check_stream("barrier", stream, "Pass group=… by name.")
        ranks = self._ranks_of("barrier", group)
        self.synchronize(stream)
        self._exchange(f"barrier{ranks if len(ranks) < self.world_size else ''}", ranks=ranks)

    @eager
    def device_barrier(self, group: Group = None) -> None:
        """A barrier of ``group`` on the current stream: the host does not wait, and a graph can capture the barrier.

        Args:
            group: the ranks that take part (default: all).

        Sync: work behind the barrier, on all participating ranks, sees the work that any of them had on its stream
        before it. All ranks of ``group`` must launch the barrier, in the same order among their device barriers.

        Raises:
            ArgumentError: ``group`` is no group, or this rank is not in it.
            CaptureError: the first barrier of a group is captured.
            ContextError, WaitTimeout, PeerDied: as :meth:`check` raises.
        """
        self.check("device_barrier")
        ranks = self._ranks_of("device_barrier", group)
        if ranks not in self._group_tensors:
            if self.backend_name != "sim" and torch.cuda.is_current_stream_capturing():
                raise CaptureError(
                    "device_barrier: the first one of a group cannot be captured in a graph. Call it once before."
                )
            self._keep_group(ranks)
        with self.on_device():
            sync.barrier_kernel[(1,)](self.handle, self._group_tensors[ranks], len(ranks), num_warps=1)

    def on_device(self) -> AbstractContextManager[object]:
        """A context manager that makes this rank's GPU the thread's current device, on which kernels are launched."""
        return nullcontext() if self._is_on_device else torch.cuda.device(self.device)

    @property
    def _is_on_device(self) -> bool:
        """Whether this rank's GPU is the current one."""
        return self.backend_name == "sim" or torch.cuda.current_device() == self.device.index

    def _keep_group(self, ranks: tuple[int, ...]) -> None:
        self._group_tensors[ranks] = torch.tensor(ranks, dtype=torch.int32, device=self.device)

    @eager
    def synchronize(self, stream: Any = None) -> None:
        """Wait for ``stream`` (default: the current one), noticing meanwhile when a peer dies or a wait expires.

        Raises:
            ArgumentError: ``stream`` is no stream.
            WaitTimeout, PeerDied: a kernel waited for ranks in vain, or ranks have left; the error names them.
        """
        self._require_open("synchronize")
        _check_stream("synchronize", stream)
        try:
            self._backend.synchronize(stream, self.check)
        except IrisError as error:
            raise self._failure.keep(error) from None

    @eager
    def broadcast(self, value: Any, source: int) -> Any:
        """``value`` of rank ``source``, on every rank. Collective.

        Args:
            value: None, a bool, number, string, list or dict (with strings as keys) of those, bytes, or a dense tensor
                (any device); only ``source``'s counts. NumPy numbers arrive as Python numbers.
            source: the rank whose value is sent.

        Raises:
            ArgumentError: the value cannot be sent; every rank raises it.
            RankMismatch: a rank makes another call, or names another source.
        """
        self._require_open("broadcast")
        source = self._rank_of("broadcast", "source", source)
        payload = pack(value) if self.rank == source else b""
        return unpack(self._exchange(f"broadcast(source={source})", payload)[source], self.device)

    def _ranks_of(self, op: str, group: Group) -> tuple[int, ...]:
        return members(op, group, self.rank, self.world_size, self._global_ranks)

    def _rank_of(self, op: str, argument: str, rank: object) -> int:
        found = whole_number(rank)
        if not 0 <= found < self.world_size:
            got = "a tensor" if isinstance(rank, torch.Tensor) else repr(rank)
            raise ArgumentError(op, argument, f"a rank from 0 to {self.world_size - 1}", got)
        return found

    def _exchange(self, tag: str, payload: bytes = b"", ranks: Sequence[int] | None = None) -> dict[int, bytes]:
        self.check()
        with self._failure.of_meeting():
            return self._mesh.exchange(tag, payload, ranks)

    @eager
    def check(self, op: str = "check") -> None:
        """Raise if a kernel's wait expired or a peer died since the last look. Costs no synchronisation.

        Args:
            op: the call that the error names if the context is closed.

        Raises:
            ContextError: the context is closed, belongs to a parent process, or a call on it broke off half way.
            WaitTimeout: a wait expired; the error names op, rank, the rank waited for, the flag, and the values wanted
                and seen.
            PeerDied: a rank's process is gone; the error names the rank.
        """
        self._check(op)

    def _check(self, op: str) -> None:
        """:meth:`check` for what is never traced, such as every call of an op, on which a look for a tracer would be
        lost."""
        self._require_open(op)
        self._failure.check()

    def broke_off(self, error: BaseException) -> None:
        """Note that ``error``, which may be Ctrl-C, ended a call of this rank half way. All later use raises, because
        messages of that call could be taken for those of a later one. The peers, who may be waiting for this rank, are
        told at once."""
        self._failure.broke_off(error)

    def _require_open(self, op: str) -> None:
        if self._pid != os.getpid():
            raise ContextError(
                f"{op}: this context belongs to process {self._pid}; {os.getpid()} is a forked child. "
                "Create contexts after forking, or start processes with 'spawn' or iris.launch."
            )
        if not self._open:
            raise ContextError(f"{op}: this context is closed. Create a new one with iris.iris(...).")

    def close(self) -> None:
        """Wait for all ranks to be done, then give back all memory, sockets and threads. Collective.

        Closing twice is harmless. After a failure, ``close`` waits for no peer and raises nothing, but it waits for
        kernels that still run on this device. Those that wait for peers by Iris's functions end at once. It waits for
        others, such as NCCL's, up to ``timeout_s``, or not at all at interpreter exit; if a kernel runs longer, the
        memory is kept until the process ends.

        If a program ends without closing its context, the context is closed then, and waits for peers just as long: up
        to ``timeout_s``, after which the job ends on all ranks.

        Raises:
            PeerDied, WaitTimeout, RankMismatch: a peer did not come, or makes another call; this rank releases
                everything all the same.
        """
        if not self._open or self._pid != os.getpid():
            return
        error: BaseException | None = self._failure.first
        try:
            if error is None:
                self.synchronize()
                self._say_closed()
                self._exchange("close")
        except BaseException as raised:  # Ctrl-C, too: peers are told, and nothing more is waited for
            error = raised
            raise
        finally:
            self._release(error)

    def _say_closed(self) -> None:
        """Once this rank has sent everything, tell the peers' kernels not to wait for more from it."""
        self._backend.finish(self.check)
        place = control.CLOSED_WORDS.value + 4 * self.rank
        closed = torch.tensor([1, 0, 0, 0], dtype=torch.uint8, device="cpu")
        for peer in range(self.world_size):
            if peer != self.rank:
                self._backend.peer_bytes(peer, place, 4).copy_(closed)

    def _release(self, error: BaseException | None) -> None:
        self._open = done = False
        OPEN.pop(self, None)
        try:
            if error is not None:  # before the device is waited for: its kernels may be waiting for peers
                self._failure.part(error)
            self._watcher.stop()
            limit_s = None if error is None else 0.0 if ending() else self.timeout_s
            done = self._backend.close(limit_s)
            if not done and limit_s:
                self.warning(
                    f"{self.device} is not done {limit_s:g} s after the failure. Does a kernel of others, such as "
                    "NCCL's, wait for a rank that is gone? The heap is kept until this process ends."
                )
            if error is None:
                self._mesh.exchange("released")  # memory is free once no peer maps it
        finally:
            if done:  # graphs are kept, too, and their streams may be another context's next
                for made in (self._workspaces, self._group_tensors, self._kept):
                    made.clear()
            else:
                _never_freed.append(self)  # the device may be using all of it
            self._mesh.leave(error)

    def __enter__(self) -> Iris:
        self._require_open("with")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = real_error(error)
        if failed is None:
            self.close()
        elif self._open and self._pid == os.getpid():
            self._release(failed)

    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return (
            f"Iris(rank={self.rank}, world_size={self.world_size}, device={self.device}, "
            f"heap={format_bytes(self.heap_size)}, {state})"
        )


def _check_stream(op: str, stream: object, fix: str = "") -> None:
    if stream is not None and not isinstance(stream, torch.Stream | torch.cuda.Stream):
        raise ArgumentError(op, "stream", "a stream, or None", type(stream).__name__, fix)


def _choice(backend: str | None) -> backends.Choice:
    choice = backends.chosen()
    if backend is None:
        return choice
    if not isinstance(backend, str) or backend not in backends.NAMES:
        raise ArgumentError("iris", "backend", f"one of {', '.join(backends.NAMES)}", repr(backend))
    return choice if backend == choice.name else backends.Choice(backend, "asked for by the caller")


def context_by_key(op: str, key: str) -> Iris:
    """The context that has ``key``; ContextError, of ``op``, if it is gone."""
    ctx = _BY_KEY.get(key)
    if ctx is None:
        raise ContextError(f"{op}: the context that this graph was compiled with is gone: keep it, or compile again.")
    return ctx


def require_context(op: str, ctx: object) -> None:
    """Raise ArgumentError unless ``ctx`` is a context, or its stand-in while kernels are only compiled."""
    if not hasattr(ctx, "backend_name"):
        kind = "nothing" if ctx is None else type(ctx).__name__
        raise ArgumentError(op, "ctx", "a context, as iris.iris() returns it", kind)


atexit.register(end_all)
os.register_at_fork(after_in_child=forget_all)
