"""The simulated kernels' way to memory. An address where there is none ends them with an error that says so; in C it
would end the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from iris.backends.base import NOWHERE
from iris.errors import AddressError

_MAPS = "/proc/self/maps"


class Memory:
    """Stands for the module by which Triton's interpreter reads and writes memory.

    Args:
        module: that module.
        program: which program of the launch is running.
    """

    def __init__(self, module: Any, program: Callable[[], object]) -> None:
        self._module, self._program = module, program
        self._readable, self._writable = _Ranges("r"), _Ranges("w")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def load(self, pointers: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: Any) -> Any:
        self._require(self._readable, pointers[mask], np.dtype(dtype).itemsize, "loads from")
        return self._module.load(pointers, mask, other, dtype)

    def store(self, pointers: np.ndarray, values: np.ndarray, mask: np.ndarray) -> Any:
        self._require(self._writable, pointers[mask], values.itemsize, "stores to")
        return self._module.store(pointers, values, mask)

    def atomic_rmw(self, op: Any, pointers: np.ndarray, values: np.ndarray, mask: np.ndarray, order: Any) -> Any:
        self._require(self._writable, pointers[mask], values.itemsize, "does an atomic at")
        return self._module.atomic_rmw(op, pointers, values, mask, order)

    def atomic_cas(self, pointers: np.ndarray, expected: np.ndarray, values: np.ndarray, order: Any) -> Any:
        self._require(self._writable, pointers, values.itemsize, "does an atomic at")
        return self._module.atomic_cas(pointers, expected, values, order)

    def _require(self, ranges: _Ranges, addresses: np.ndarray, nbytes: int, does: str) -> None:
        if not addresses.size or (wrong := ranges.first_outside(addresses, nbytes)) is None:
            return
        fix = "Is a mask missing, or a tensor gone?"
        if NOWHERE // 2 < min(wrong, (1 << 64) - wrong) < 2 * NOWHERE:
            fix = "That is how a rank out of range comes out: ranks are counted from 0."
        raise AddressError(
            f"program {self._program()} {does} address {wrong:#x}, where this process has no memory. {fix} "
            "On a GPU this is an illegal memory access."
        )


class _Ranges:
    """Addresses that this process may read, or write, as of when one was last missed."""

    def __init__(self, permission: str) -> None:
        self._permission = permission
        self._begins, self._ends = np.zeros(0, np.uint64), np.zeros(1, np.uint64)  # ends: of the range before, too
        self._begin = self._end = 0  # the range that was asked for last

    def first_outside(self, addresses: np.ndarray, nbytes: int) -> int | None:
        """The lowest of ``addresses`` at which there are not ``nbytes`` bytes of memory."""
        low, high = int(addresses.min()), int(addresses.max()) + nbytes
        if self._begin <= low and high <= self._end:
            return None
        outside = self._outside(addresses, nbytes)
        if outside.size:
            self._look()
            outside = self._outside(addresses, nbytes)
        if outside.size:
            return int(outside.min())
        index = int(np.searchsorted(self._begins, np.uint64(low), "right"))
        self._begin, self._end = int(self._begins[index - 1]), int(self._ends[index])
        return None

    def _outside(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        asked = addresses.astype(np.uint64, copy=False).ravel()
        ends = self._ends[np.searchsorted(self._begins, asked, "right")]
        room: np.ndarray = np.where(ends >= asked, ends - asked, np.uint64(0))
        return asked[room < nbytes]

    def _look(self) -> None:
        begins: list[int] = []
        ends = [0]
        with open(_MAPS) as file:
            for line in file:
                span, permissions = line.split(maxsplit=2)[:2]
                if self._permission not in permissions:
                    continue
                begin, end = (int(bound, 16) for bound in span.split("-"))
                if ends[-1] == begin:
                    ends[-1] = end
                else:
                    begins.append(begin)
                    ends.append(end)
        self._begins, self._ends = np.array(begins, np.uint64), np.array(ends, np.uint64)
