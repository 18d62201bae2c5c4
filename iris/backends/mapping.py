"""Files mapped into memory far from everything else."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import weakref

import numpy as np

from iris.heap import align_up

_GAPS = (1 << 38, 1 << 32, mmap.PAGESIZE * 2)
"""Candidates for the bytes between two files; the first is taken for which the address space (``ulimit -v``)
suffices."""
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_PROT_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def map_apart(fds: list[int], nbytes: int) -> list[np.ndarray]:
    """The first ``nbytes`` of each file as writable bytes, with a gap without memory before and behind each.

    An access that runs over the end of a file falls into a gap. So does an address, inside or outside of the files, to
    which the distance between two other files is added: the lengths of the gaps are random, so that no two pairs of
    files are equally far apart, and there is half a gap before the first file and behind the last.
    """
    length = align_up(nbytes, mmap.PAGESIZE)
    start, gap = _reserve(len(fds), length)
    files = []
    for index, fd in enumerate(fds):
        place = start + index * (length + gap)
        before = _part_of(gap)
        try:
            at = _map(place + before, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
        except OSError:
            _libc.munmap(place, (len(fds) - index) * (length + gap))
            raise
        files.append(np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(at)), np.uint8))
        weakref.finalize(files[-1], _libc.munmap, place, length + gap).atexit = False
    return files


def _reserve(count: int, length: int) -> tuple[int, int]:
    """Reserve addresses, without memory, for ``count`` files of ``length`` bytes with a gap each; return the first
    address and the length of a gap."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    for gap in _GAPS[:-1]:
        try:
            return _map(None, count * (length + gap), _PROT_NONE, flags, -1), gap
        except OSError:
            continue
    return _map(None, count * (length + _GAPS[-1]), _PROT_NONE, flags, -1), _GAPS[-1]


def _part_of(gap: int) -> int:
    """A random part of ``gap``, from three to five eighths, in whole pages."""
    pages = gap // mmap.PAGESIZE
    return (pages // 2 - pages // 8 + secrets.randbelow(max(pages // 4, 1))) * mmap.PAGESIZE


def _map(address: int | None, length: int, protection: int, flags: int, fd: int) -> int:
    mapped: int = _libc.mmap(address, length, protection, flags, fd, 0)
    if mapped == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return mapped
