"""Memory accesses of simulated kernels. An access to an address without memory raises an error; unchecked, it would end
the process."""

from __future__ import annotations

import functools
import itertools
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from iris.backends.base import NOWHERE
from iris.errors import AddressError

_MAPS = Path("/proc/self/maps")
_LINE = re.compile(rb"^(\w+)-(\w+) (..)", re.MULTILINE)


@functools.cache
def everywhere(shape: tuple[int, ...]) -> np.ndarray:
    """The mask of an access without one."""
    mask = np.ones(shape, np.bool_)
    mask.flags.writeable = False
    return mask


class Memory:
    """Stands in for the module by which Triton's interpreter reads and writes memory.

    Args:
        module: that module.
        program: which program of the launch is running.
        off_heap: what to say of an address if it is that of a tensor off the heap, moved to a peer's heap; else "". It
            is given the address, and a function that says whether there is memory at another one.
    """

    def __init__(
        self, module: Any, program: Callable[[], object], off_heap: Callable[[int, Callable[[int], bool]], str]
    ) -> None:
        self._module, self._program, self._off_heap = module, program, off_heap
        self._readable, self._writable = _Ranges(), _Ranges()
        self._maps, self._current = b"", False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def forget(self) -> None:
        """Look up the process's memory again before the next access: some may be gone, such as a freed tensor's."""
        self._current = False
        self._readable.forget()
        self._writable.forget()

    def load(self, pointers: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: Any) -> Any:
        self._require(self._readable, _active(pointers, mask), np.dtype(dtype).itemsize, "loads from")
        return self._module.load(*_packed(pointers, mask, other), dtype)

    def store(self, pointers: np.ndarray, values: np.ndarray, mask: np.ndarray) -> Any:
        self._require(self._writable, _active(pointers, mask), values.itemsize, "stores to")
        return self._module.store(*_packed(pointers, values, mask))

    def atomic_rmw(self, op: Any, pointers: np.ndarray, values: np.ndarray, mask: np.ndarray, order: Any) -> Any:
        self._require(self._writable, _active(pointers, mask), values.itemsize, "does an atomic at")
        return self._module.atomic_rmw(op, *_packed(pointers, values, mask), order)

    def atomic_cas(self, pointers: np.ndarray, expected: np.ndarray, values: np.ndarray, order: Any) -> Any:
        self._require(self._writable, pointers, values.itemsize, "does an atomic at")
        return self._module.atomic_cas(*_packed(pointers, expected, values), order)

    def _require(self, ranges: _Ranges, addresses: np.ndarray, nbytes: int, does: str) -> None:
        if not addresses.size or ranges.hold(addresses, nbytes):
            return
        if not self._current:
            self._look()
        outside = ranges.outside(addresses, nbytes)
        if outside.size:
            self._look()
            outside = ranges.outside(addresses, nbytes)
        if not outside.size:
            return
        wrong = int(outside.min())
        fix = (
            "Usual causes: a missing mask; a tensor that was freed, or whose context is closed; one that is not on the "
            "symmetric heap of this context (ctx.empty); a pointer that was translated before; ranks mixed up, or far "
            "out of range."
        )
        fix = self._off_heap(wrong, self._is_there) or fix
        if NOWHERE // 2 < min(wrong, (1 << 64) - wrong) < 2 * NOWHERE:
            fix = "That is how a rank out of range comes out: ranks are counted from 0."
        raise AddressError(
            f"program {self._program()} {does} address {wrong:#x}, where this process has no memory. {fix} "
            "On a GPU this is an illegal memory access."
        )

    def _is_there(self, address: int) -> bool:
        return 0 <= address < 1 << 64 and not self._readable.outside(np.array([address], np.uint64), 1).size

    def _look(self) -> None:
        self._current = True
        maps = _MAPS.read_bytes()
        if maps == self._maps:
            return
        self._maps = maps
        spans = [(int(begin, 16), int(end, 16), permissions) for begin, end, permissions in _LINE.findall(maps)]
        self._readable.learn([(begin, end) for begin, end, permissions in spans if b"r" in permissions])
        self._writable.learn([(begin, end) for begin, end, permissions in spans if b"w" in permissions])


def _active(pointers: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return pointers if mask is everywhere(pointers.shape) else pointers[mask]


def _packed(*arrays: np.ndarray) -> list[np.ndarray]:
    """``arrays`` as contiguous arrays. Triton 3.6 assumes that arrays of one dimension are contiguous, but a view that
    repeats a single number is not."""
    return [np.asarray(array, order="C") for array in arrays]


_REMEMBERED = 4
"""The number of recently used ranges that are checked before all others: a kernel's operands lie in few ranges."""


class _Ranges:
    """Addresses that this process may read, or write."""

    def __init__(self) -> None:
        self.learn([])

    def learn(self, spans: list[tuple[int, int]]) -> None:
        """Replace the known ranges by ``spans``: the first and the last address + 1 of each, in ascending order."""
        begins = [begin for begin, _ in spans]
        ends = [0, *(end for _, end in spans)]
        apart = [begin != end for begin, end in itertools.zip_longest(begins, ends)]
        self._begins = np.array([*itertools.compress(begins, apart)], np.uint64)
        self._ends = np.array([*itertools.compress(ends, apart)], np.uint64)  # of the range before
        self.forget()

    def forget(self) -> None:
        """Forget the recently used ranges, so that the next accesses are looked up among all."""
        self._last: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)

    def hold(self, addresses: np.ndarray, nbytes: int) -> bool:
        """Whether one of the recently used ranges holds ``nbytes`` at each of ``addresses``."""
        first = last = addresses.item(0)
        if addresses.size > 1:
            first, last = int(np.minimum.reduce(addresses, None)), int(np.maximum.reduce(addresses, None))
        last += nbytes
        return any(begin <= first and last <= end for begin, end in self._last)

    def outside(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """Those of ``addresses`` at which there are fewer than ``nbytes`` bytes of memory."""
        asked = addresses.astype(np.uint64, copy=False).ravel()
        indices = np.searchsorted(self._begins, asked, "right")
        ends = self._ends[indices]
        room: np.ndarray = np.where(ends >= asked, ends - asked, np.uint64(0))
        outside: np.ndarray = asked[room < nbytes]
        if not outside.size:
            self._last.appendleft((int(self._begins[indices[0] - 1]), int(ends[0])))
        return outside
