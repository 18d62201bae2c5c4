"""Calls to the runtime of CUDA or HIP that PyTorch does not offer: streams that nothing else uses, copies that cost the
host little, words that streams wait for, and whether atomics of one GPU on another's memory are atomic."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from iris.errors import BackendError

MEMCPY_DEFAULT = 4
"""``cudaMemcpyDefault`` and ``hipMemcpyDefault``: the runtime finds out where the addresses are."""
_NON_BLOCKING = 1
"""``cudaStreamNonBlocking`` and ``hipStreamNonBlocking``: the stream does not wait for the legacy default stream, which
is forbidden during a capture."""
_idle_streams: dict[torch.device, list[int]] = {}
"""Addresses of streams that :func:`new_stream` has made and that are not in use."""
_WAIT_ANY_BIT, ALL_BITS = 2, 0xFFFFFFFF
"""``CU_STREAM_WAIT_VALUE_AND`` and ``hipStreamWaitValueAnd``, and a mask."""


def has_native_atomics(gpu: int, peer: int) -> bool:
    """Whether atomics of ``gpu`` on the memory of ``peer`` are atomic, as over NVLink and xGMI. Over PCIe they may be a
    read and a write, between which other accesses can come (CUDA C++ Programming Guide, system-wide atomics)."""
    name, attribute = ("cuda", 3) if torch.version.hip is None else ("hip", 2)  # …DevP2PAttrNativeAtomicSupported
    value = ctypes.c_int()
    code = _load_runtime(name)[f"{name}DeviceGetP2PAttribute"](ctypes.byref(value), attribute, gpu, peer)
    return code == 0 and bool(value.value)


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that nothing else uses: not one of the 32 that PyTorch hands out in turn. The stream is never destroyed;
    once the object is gone, a later call may return the same stream."""
    idle = _idle_streams.setdefault(device, [])
    try:
        address = idle.pop()
    except IndexError:
        address = _make_stream(device)
    return _OwnStream(address, device)


class _OwnStream(torch.cuda.ExternalStream):
    """A stream that is given back when the object goes. (A weak reference would not do: PyTorch clears those to streams
    without calling their callbacks.)"""

    def __del__(self, idle: dict[torch.device, list[int]] = _idle_streams) -> None:
        idle[self.device].append(self.cuda_stream)


def _make_stream(device: torch.device) -> int:
    name = "cuda" if torch.version.hip is None else "hip"
    stream = ctypes.c_void_p()
    with torch.cuda.device(device):
        code = _load_runtime(name)[f"{name}StreamCreateWithFlags"](ctypes.byref(stream), _NON_BLOCKING)
    if code or stream.value is None:
        raise BackendError(f"making a stream failed with {name} error {code}")
    return stream.value


def load_copies(name: str) -> tuple[Callable[..., int], Callable[..., int]]:
    """The runtime's asynchronous copies of bytes and of rows. ``Tensor.copy_`` costs the host several times as much."""
    library = _load_runtime(name)
    address, size, kind = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    flat, rows = library[f"{name}MemcpyAsync"], library[f"{name}Memcpy2DAsync"]
    flat.argtypes = [address, address, size, kind, address]
    rows.argtypes = [address, size, address, size, size, size, kind, address]
    flat.restype = rows.restype = kind
    return flat, rows


def load_word_operations(name: str) -> tuple[Callable[[int, int, int], int], Callable[[int, int, int], int]]:
    """Two functions of ``(stream, address, bits)``: one makes a stream wait until a 32-bit word has any of ``bits``
    set, the other writes ``bits`` to the word."""
    stream, address, number = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32
    if name == "cuda":
        library = ctypes.CDLL("libcuda.so.1")
        wait, write = library.cuStreamWaitValue32_v2, library.cuStreamWriteValue32_v2
        wait.argtypes = write.argtypes = [stream, address, number, ctypes.c_uint]
        return (lambda s, a, v: int(wait(s, a, v, _WAIT_ANY_BIT))), (lambda s, a, v: int(write(s, a, v, 0)))
    library = _load_runtime(name)
    wait, write = library.hipStreamWaitValue32, library.hipStreamWriteValue32
    wait.argtypes = [stream, address, number, ctypes.c_uint, number]
    write.argtypes = [stream, address, number, ctypes.c_uint]
    return (lambda s, a, v: int(wait(s, a, v, _WAIT_ANY_BIT, ALL_BITS))), (lambda s, a, v: int(write(s, a, v, 0)))


def _load_runtime(name: str) -> ctypes.CDLL:
    if name == "cuda":
        return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    return ctypes.CDLL(_mapped("libamdhip64.so") or "libamdhip64.so")


def _mapped(name: str) -> str | None:
    """The path of the library whose name starts with ``name`` and that this process has loaded. PyTorch's ROCm packages
    have it in a folder of their own, under its full name only. Another copy of the library would not know this
    process's streams and pointers."""
    with open("/proc/self/maps") as maps:
        paths = (line.split(maxsplit=5)[-1].rstrip() for line in maps)
        return next((path for path in paths if path.rpartition("/")[2].startswith(name)), None)
