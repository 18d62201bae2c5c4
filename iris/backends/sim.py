"""The simulator: every rank a process, its heap an anonymous memory file that all peers map.

The files have no name in the file system (``memfd_create``), so nothing is left behind however a rank ends. Kernels run
in Triton's interpreter, which :mod:`iris.backends.interpreter` corrects and makes cooperative.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from iris.backends.base import Backend, Surroundings, call_on_release
from iris.backends.mapping import map_apart
from iris.errors import ArgumentError, BackendError, IrisError, explaining_too_many_files
from iris.mesh import Mesh

DEFAULT_SMS = 4


class SideStream:
    """The simulator's counterpart of a stream of copies: a thread that does one task after the other, beside the
    interpreter.

    It is a context manager around a kernel; all tasks are done when the block ends. If a task raises, later ones are
    skipped, and the block raises the error at its end.
    """

    _POLL_S = 2e-4

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._cancelled = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def add(self, task: Callable[[], object]) -> None:
        """Queue ``task``."""
        self._tasks.put(task)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Delay later tasks until ``ready()`` is true, or until the kernel has failed."""
        while not (ready() or self._cancelled):
            time.sleep(self._POLL_S)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                if self._error is None:
                    task()
            except Exception as error:  # noqa: BLE001 (raised again where the kernel was launched)
                self._error = error

    def __enter__(self) -> None:
        self._cancelled, self._error = False, None
        self._thread = threading.Thread(target=self._work, name="iris-side-stream", daemon=True)
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._cancelled = kind is not None
        self._tasks.put(None)
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error  # instead of the kernel's error: the kernel has waited in vain for this task


class SimBackend(Backend):
    """See :class:`~iris.backends.base.Backend`."""

    name = "sim"

    def __init__(self, mesh: Mesh, heap_size: int) -> None:
        _require_interpreter()
        from iris.backends import interpreter

        interpreter.install()
        self.device = torch.device("cpu")
        self.num_sms = claimed_sms()
        self._heaps = self._map_heaps(mesh, heap_size)
        self._surrounded: dict[int, Surroundings] = {}
        self._rank = mesh.rank
        self.bases = [heap.ctypes.data for heap in self._heaps]
        self._threads = torch.get_num_threads()
        torch.set_num_threads(min(self._threads, max(1, len(os.sched_getaffinity(0)) // mesh.world_size)))

    def homes(self, address: int) -> Iterator[tuple[int, int]]:
        """Of each peer, the address here that would be moved to ``address`` on its heap."""
        for peer, base in enumerate(self.bases):
            if peer != self._rank:
                yield peer, address - base + self.bases[self._rank]

    def holds(self, address: int) -> bool:
        """Whether ``address`` is in one of the heaps."""
        return any(0 <= address - base < heap.nbytes for base, heap in zip(self.bases, self._heaps, strict=True))

    @staticmethod
    def _map_heaps(mesh: Mesh, heap_size: int) -> list[np.ndarray]:
        fd = os.memfd_create(f"iris-heap-{mesh.rank}", os.MFD_CLOEXEC)
        fds = {mesh.rank: fd}
        try:
            with explaining_too_many_files("mapping the simulated heaps"):
                os.ftruncate(fd, heap_size)
                fds |= mesh.exchange_fd("share heap", fd)
                return map_apart([fds[rank] for rank in sorted(fds)], heap_size)
        except IrisError:  # a WaitTimeout is an OSError, too
            raise
        except OSError as error:
            raise BackendError(
                f"the simulated heap of {heap_size} bytes cannot be mapped: {error}. Choose a smaller heap_size."
            ) from error
        finally:
            for one in fds.values():
                os.close(one)

    def bytes_at(self, offset: int, nbytes: int, on_release: Callable[[], None] | None) -> torch.Tensor:
        block = self._heaps[self._rank][offset : offset + nbytes]
        call_on_release(block, on_release)
        return torch.from_numpy(block)

    def peer_bytes(self, rank: int, offset: int, nbytes: int) -> torch.Tensor:
        return torch.from_numpy(self._heaps[rank][offset : offset + nbytes])

    def poke(self, offset: int, value: int) -> None:
        self.bytes_at(offset, 8, None).view(torch.int64)[0] = value

    def peek(self, offset: int) -> int:
        return int(self.bytes_at(offset, 8, None).view(torch.int64)[0])

    def side_stream(self) -> SideStream:
        return SideStream()

    def copy(self, target: int, source: int, nbytes: int, stream: SideStream) -> None:
        stream.add(lambda: ctypes.memmove(target, source, nbytes))

    def copy_rows(
        self, target: int, source: int, pitches: tuple[int, int], width: int, rows: int, stream: SideStream
    ) -> None:
        for row in range(rows):
            self.copy(target + row * pitches[0], source + row * pitches[1], width, stream)

    def wait_word(self, address: int, stream: SideStream) -> None:
        stream.add(lambda: stream.wait_until(lambda: ctypes.c_int32.from_address(address).value != 0))

    def write_word(self, address: int, value: int, stream: SideStream) -> None:
        def write() -> None:
            ctypes.c_int32.from_address(address).value = value

        stream.add(write)

    def status_words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device="cpu")

    def synchronize(self, stream: Any, check: Callable[[], None]) -> None:
        check()

    def finish(self, check: Callable[[], None]) -> None:
        check()

    def surround_launches(self, given: Iterable[torch.Tensor], around: Surroundings, limit_s: float) -> None:
        from iris.backends import interpreter

        interpreter.limits_s[self] = limit_s
        self._surrounded = {id(one): around for one in given}
        interpreter.surroundings |= self._surrounded

    def close(self, limit_s: float | None) -> bool:
        from iris.backends import interpreter

        interpreter.limits_s.pop(self, None)
        for key in self._surrounded:
            del interpreter.surroundings[key]
        self._surrounded = {}
        self._heaps = []
        torch.set_num_threads(max(self._threads, torch.get_num_threads()))
        return True


def claimed_sms() -> int:
    """The number of SMs that a simulated rank claims to have."""
    text = os.environ.get("IRIS_SIM_SMS") or str(DEFAULT_SMS)
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError("iris", "IRIS_SIM_SMS", "a whole number of SMs, 1 or more", repr(text))
    return int(text)


def _require_interpreter() -> None:
    import triton

    if not triton.knobs.runtime.interpret:
        raise BackendError(
            'backend="sim" needs Triton to interpret kernels, which must be known before they are decorated. '
            "Set IRIS_BACKEND=sim in the environment before importing iris."
        )
