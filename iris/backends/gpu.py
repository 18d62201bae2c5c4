"""GPUs of one host: the heap is one PyTorch symmetric-memory allocation, mapped by every rank.

The same code serves CUDA and HIP builds of PyTorch. The HIP branch is compiled and reviewed, but has not
yet been run on AMD hardware.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._C._distributed_c10d import (
    ProcessGroup,
    Store,
    TCPStore,
    _register_process_group,
    _SymmetricMemory,
    _unregister_process_group,
)

from iris.backends import oversubscribed
from iris.backends.base import Backend, Surroundings, call_on_release
from iris.backends.runtime import (
    ALL_BITS,
    MEMCPY_DEFAULT,
    has_native_atomics,
    load_copies,
    load_word_operations,
    new_stream,
)
from iris.errors import BackendError, CaptureError
from iris.heap import format_bytes
from iris.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName


_LINK = {"cuda": "NVLink", "hip": "xGMI"}
_TOPOLOGY = {"cuda": "nvidia-smi topo -p2p r", "hip": "rocm-smi --showtopoaccess"}
_PROCESSES = {"cuda": "nvidia-smi", "hip": "rocm-smi --showpids"}


class _DeviceBytes:
    """A range of the heap in the form that ``torch.as_tensor`` adopts without copying."""

    def __init__(self, heap: torch.Tensor, offset: int, nbytes: int) -> None:
        self._heap = heap
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (heap.data_ptr() + offset, False),
            "version": 2,
        }


class GpuBackend(Backend):
    """See :class:`~iris.backends.base.Backend`."""

    def __init__(self, name: str, mesh: Mesh, local_rank: int, heap_size: int) -> None:
        self.name = name
        self.device = torch.device("cuda", gpu_of(mesh.rank, local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(self.device)
        properties = torch.cuda.get_device_properties(self.device)
        self.num_sms = properties.multi_processor_count
        self._require_peer_access(mesh)
        self._poke_stream = torch.cuda.Stream(
            self.device, priority=-1
        )  # PyTorch's pool of this priority: users rarely have its streams
        self._memcpy_async, self._memcpy_2d_async = load_copies(name)
        self._wait_value, self._write_value = load_word_operations(name)
        self._heap = self._allocate(mesh, heap_size)
        self._handle = _shared(self._heap, mesh)
        self.bases = [int(pointer) for pointer in self._handle.buffer_ptrs]
        self._idleness = _Idleness(self.device)

    def _require_peer_access(self, mesh: Mesh) -> None:
        ours = self.device.index
        gpus = {rank: int(index) for rank, index in mesh.exchange("GPU", str(ours).encode()).items()}
        peers = [(rank, index) for rank, index in sorted(gpus.items()) if index != ours]
        self.without_atomics = tuple(rank for rank, index in peers if not has_native_atomics(ours, index))
        for rank, peer in sorted(gpus.items()):
            if rank != mesh.rank and peer == ours and not oversubscribed():
                raise BackendError(
                    f"ranks {mesh.rank} and {rank} would share GPU {ours}. Give each its own: LOCAL_RANK, or "
                    "iris.iris(device=…); all must be visible to every rank (CUDA_VISIBLE_DEVICES). Or let them take "
                    "turns: IRIS_OVERSUBSCRIBE=1."
                )
            if peer != ours and not torch.cuda.can_device_access_peer(ours, peer):
                raise BackendError(
                    f"GPU {ours} cannot reach the memory of GPU {peer}: no peer access over {_LINK[self.name]} or "
                    f"PCIe. `{_TOPOLOGY[self.name]}` shows which pairs can; choose those with CUDA_VISIBLE_DEVICES."
                )

    def _allocate(self, mesh: Mesh, heap_size: int) -> torch.Tensor:
        """Allocate this rank's heap; raise if any rank lacks the memory for its own."""
        heap, complaint = None, ""
        try:
            heap = _SymmetricMemory.empty_strided_p2p((heap_size,), (1,), torch.uint8, self.device)
        except RuntimeError as error:  # PyTorch does not turn the driver's own error into an OutOfMemoryError
            if "out of memory" not in str(error):
                raise
            free, total = torch.cuda.mem_get_info(self.device)
            complaint = f"{format_bytes(free)} of {format_bytes(total)} are free on {self.device}"
        answers = mesh.exchange("allocate heap", complaint.encode())
        short = [f"rank {rank}: {answer.decode()}" for rank, answer in sorted(answers.items()) if answer]
        if short or heap is None:
            raise BackendError(
                f"a heap of {format_bytes(heap_size)} does not fit ({'; '.join(short)}). Choose a smaller heap_size, "
                f"or end what else runs on these GPUs ({_PROCESSES[self.name]} lists it)."
            )
        return heap

    def bytes_at(self, offset: int, nbytes: int, on_release: Callable[[], None] | None) -> torch.Tensor:
        block = _DeviceBytes(self._heap, offset, nbytes)
        call_on_release(block, on_release)
        return torch.as_tensor(block, device=self.device)

    def peer_bytes(self, rank: int, offset: int, nbytes: int) -> torch.Tensor:
        view: torch.Tensor = self._handle.get_buffer(rank, (nbytes,), torch.uint8, offset)
        return view

    def poke(self, offset: int, value: int) -> None:
        with torch.cuda.device(self.device), torch.cuda.stream(self._poke_stream):
            self.bytes_at(offset, 8, None).view(torch.int64).copy_(
                torch.tensor([value], device="cpu"), non_blocking=True
            )

    def peek(self, offset: int) -> int:
        with torch.cuda.device(self.device), torch.cuda.stream(self._poke_stream):
            return int(self.bytes_at(offset, 8, None).view(torch.int64).item())

    def side_stream(self) -> torch.cuda.Stream:
        return new_stream(self.device)

    def copy(self, target: int, source: int, nbytes: int, stream: torch.cuda.Stream) -> None:
        code = self._memcpy_async(target, source, nbytes, MEMCPY_DEFAULT, stream.cuda_stream)
        self._require_success(code, f"a copy of {nbytes} bytes between heaps")

    def copy_rows(
        self, target: int, source: int, pitches: tuple[int, int], width: int, rows: int, stream: torch.cuda.Stream
    ) -> None:
        code = self._memcpy_2d_async(
            target, pitches[0], source, pitches[1], width, rows, MEMCPY_DEFAULT, stream.cuda_stream
        )
        self._require_success(code, f"a copy of {rows} rows of {width} bytes between heaps")

    def wait_word(self, address: int, stream: torch.cuda.Stream) -> None:
        self._require_no_capture("waits for")
        self._require_success(self._wait_value(stream.cuda_stream, address, ALL_BITS), "a stream that waits for a word")

    def write_word(self, address: int, value: int, stream: torch.cuda.Stream) -> None:
        self._require_no_capture("writes")
        self._require_success(self._write_value(stream.cuda_stream, address, value), "a stream that writes a word")

    def _require_no_capture(self, does: str) -> None:
        if self.name == "hip" and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"HIP does not put into a graph that a stream {does} a word: it would do so at once. Take config=None, "
                "which on AMD chooses nothing that needs it."
            )

    def _require_success(self, code: int, what: str) -> None:
        if code:
            raise BackendError(f"{what} failed with {self.name} error {code}")

    def status_words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device="cpu", pin_memory=True)

    def synchronize(self, stream: Any, check: Callable[[], None]) -> None:
        event = torch.cuda.Event()
        event.record(stream if stream is not None else torch.cuda.current_stream(self.device))
        started = time.monotonic()
        while not event.query():
            if time.monotonic() - started > 1e-3:
                check()
                time.sleep(1e-4)
        check()

    def finish(self, check: Callable[[], None]) -> None:
        done = self._idleness.asked()
        while not done.wait(1e-3):
            check()
        check()

    def surround_launches(self, given: Iterable[torch.Tensor], around: Surroundings, limit_s: float) -> None:
        """Do nothing: a launch returns before its kernel has run."""

    def close(self, limit_s: float | None) -> bool:
        if limit_s is None:
            torch.cuda.synchronize(self.device)
        elif not limit_s or not self._idleness.asked().wait(limit_s):
            return False
        self._idleness.stop()
        del self._handle, self._heap
        return True


class _Idleness:
    """A thread that waits until a device has finished all its work, or has failed, so that other threads can do
    something else meanwhile. It is started early, because no thread can be started when the interpreter exits."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._questions = device, SimpleQueue[threading.Event | None]()
        self._thread = threading.Thread(target=self._answer, name="iris-idleness", daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        while (done := self._questions.get()) is not None:
            with suppress(RuntimeError):  # the device has failed, so nothing runs on it any more
                torch.cuda.synchronize(self._device)
            done.set()

    def asked(self) -> threading.Event:
        """An event that is set when the device has finished all work that it has been given so far."""
        done = threading.Event()
        self._questions.put(done)
        return done

    def stop(self) -> None:
        """End the thread. The device is idle, so nothing holds it up."""
        self._questions.put(None)
        self._thread.join()


def gpu_of(rank: int, local_rank: int, count: int) -> int:
    """The index of this rank's GPU, one of ``count``."""
    if not count:
        raise BackendError(
            "PyTorch here sees no GPU, or is built for the CPU only. Install a PyTorch built for your GPU, or leave "
            "backend and IRIS_BACKEND unset to use the simulator."
        )
    if oversubscribed():
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        return local_rank % count
    if local_rank >= count:
        raise BackendError(
            f"rank {rank} needs GPU {local_rank}, but PyTorch sees {count}. Start at most {count} ranks, set "
            "IRIS_OVERSUBSCRIBE=1 to let ranks take turns on a GPU, or IRIS_BACKEND=sim to simulate any number."
        )
    return local_rank


def _shared(heap: torch.Tensor, mesh: Mesh) -> Any:
    """PyTorch's symmetric-memory handle for all ranks' heaps."""
    try:
        return _map(heap, mesh)
    except torch.distributed.DistError as error:
        dead = mesh.dead_ranks()
        if dead:
            raise mesh.death(min(dead), "share heaps") from None
        raise BackendError(f"PyTorch could not map the heaps of all ranks: {error}") from error


def _map(heap: torch.Tensor, mesh: Mesh) -> Any:
    """Map all ranks' heaps. The store that PyTorch needs for this lives at rank 0, until all ranks have mapped them."""
    store = _shared_store(mesh)
    name = mesh.exchange("name heap", f"iris-{secrets.token_hex(8)}".encode())[0].decode()
    group = cast("GroupName", name)
    members = ProcessGroup(store, mesh.rank, mesh.world_size)
    _register_process_group(group, members)
    try:
        handle = _SymmetricMemory.rendezvous(heap, group)
    finally:
        _unregister_process_group(group)
    mesh.exchange("heap mapped")
    return handle


def _shared_store(mesh: Mesh) -> Store:
    """A TCP store on loopback, hosted by rank 0 at a port that the system chooses."""
    timeout = timedelta(seconds=mesh.timeout_s)
    store = None
    if mesh.rank == 0:
        store = TCPStore("127.0.0.1", 0, mesh.world_size, True, timeout, wait_for_workers=False)
    port = mesh.exchange("store", str(store.port if store else 0).encode())[0]
    if store is None:
        store = TCPStore("127.0.0.1", int(port), mesh.world_size, False, timeout)
    mesh.exchange("store joined")
    return store
