"""Pools of live ranks, which run the tests' functions: one per world size, kept from test to test.

A test sends a function of its module to all ranks of a pool::

    def offsets() -> list[int]:
        ctx = context()
        ...

    def test_offsets(ranks: Ranks) -> None:
        assert ranks.run(offsets) == ...

The backend is the one that ``import iris`` picks: GPUs if there are any, unless ``IRIS_BACKEND=sim``. Tests that run on
GPUs then have the marker ``gpu``.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton

import iris
from iris import backends

BACKEND = backends.detect().name
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
HEAP_SIZE = 24 << 20
TIMEOUT_S = 30.0
RUN_LIMIT_S = 90.0
FIRST_TIMEOUT_S = TIMEOUT_S if BACKEND == "sim" else RUN_LIMIT_S - 10
"""One rank may take that much longer than another to compile a kernel for a GPU, beside tests that also compile."""
_POISONED = 4 << 20
"""How many bytes of a simulated heap are filled: more than small problems take, as filling all takes longer than these
take to run."""

NAMES_SHARED_MEMORY = pytest.mark.xdist_group("names of shared memory")
"""For tests that count files in /dev/shm, or run programs that make some: never two of them at a time."""

USES_NCCL = pytest.mark.skipif(
    BACKEND != "sim" and backends.oversubscribed(), reason="NCCL refuses ranks that share a GPU"
)

_SIM_WORLD_SIZES = (1, 2, 3, 4)
_GPU_WORLD_SIZES = (2, 4, 8)


def _sizes(at_least: int, at_most: int) -> list[int]:
    """World sizes to run a test with: on GPUs no more than there are, unless ranks may share them."""
    known = _SIM_WORLD_SIZES if BACKEND == "sim" else _GPU_WORLD_SIZES
    bounded = BACKEND != "sim" and not backends.oversubscribed()
    limit = min(at_most, torch.cuda.device_count()) if bounded else at_most
    return [size for size in known if at_least <= size <= limit]


def worlds(at_least: int = 1, at_most: int = 16) -> list[Any]:
    """World sizes to run a test with, as parameters of the fixture ``ranks``."""
    sizes = _sizes(at_least, at_most)
    return sizes if BACKEND == "sim" else [pytest.param(size, marks=pytest.mark.gpu) for size in sizes]


def in_worlds(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Each of ``cases`` in every world size, which comes first, as parameters of tests that take ``ranks``."""
    return [
        pytest.param(size, *case, marks=marks_for(size), id="-".join(map(str, (size, *case))).replace("torch.", ""))
        for case in cases
        for size in _sizes(1, 16)
    ]


def marks_for(size: int) -> list[pytest.MarkDecorator]:
    """Marks of a test on ``size`` ranks: on GPUs it is skipped if there are too few of them."""
    if BACKEND == "sim":
        return []
    few = not backends.oversubscribed() and torch.cuda.device_count() < size
    return [pytest.mark.gpu, pytest.mark.skipif(few, reason=f"fewer than {size} GPUs")]


class Ranks:
    """``world_size`` live ranks; new ones replace them when a test has failed on one or killed one."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._pool: iris.RankPool | None = None

    def run(self, fn: Callable[..., Any], *args: Any, limit_s: float = RUN_LIMIT_S) -> list[Any]:
        """Run ``fn(*args)`` on every rank; returns the results in rank order."""
        if self._pool is None or not self._pool.alive:
            self.end()
            with mock.patch.dict(os.environ, IRIS_TUNED=os.devnull):  # ranks outlive a test that sets it
                self._pool = iris.RankPool(self.world_size)
        try:
            return self._pool.run(fn, args, timeout_s=limit_s)
        except iris.LaunchError:
            self._pool.kill()
            self._pool = None
            raise

    def end(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


_context: iris.Iris | None = None


def context() -> iris.Iris:
    """This rank's context: opened for the first test that asks for it, and kept for the others."""
    global _context
    if _context is None:
        _context = iris.iris(HEAP_SIZE, timeout_s=TIMEOUT_S, first_timeout_s=FIRST_TIMEOUT_S)
    return _context


def poison(ctx: iris.Iris) -> None:
    """Fill free heap memory with 0xFF bytes, from the lowest address on, where the next allocations are: that is NaN in
    every float type, and -1 in every signed integer type."""
    ctx.free(ctx.empty(1, dtype=torch.uint8))
    size = ctx._table.largest_free
    rest = ctx.empty(size if BACKEND != "sim" else min(size, _POISONED), dtype=torch.uint8)
    rest.fill_(0xFF)
    ctx.barrier()
    ctx.free(rest)


@dataclass
class Failure:
    """An exception in a form that can be sent back, and how long it took to be raised."""

    kind: str = "nothing"
    bases: tuple[str, ...] = ()
    message: str = ""
    ranks: tuple[int, ...] = ()
    took_s: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)


def failure_of(fn: Callable[..., Any], *args: Any) -> Failure:
    """Call ``fn`` and describe the exception it raised."""
    started = time.monotonic()
    try:
        fn(*args)
    except Exception as error:  # noqa: BLE001 (tests look at whatever was raised)
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        ranks = tuple(getattr(error, "ranks", ()))
        return Failure(kinds[0], kinds, str(error), ranks, time.monotonic() - started)
    return Failure(took_s=time.monotonic() - started)


@contextmanager
def fresh(
    heap_size: int = 1 << 20, timeout_s: float = TIMEOUT_S, first_timeout_s: float | None = None
) -> Iterator[iris.Iris]:
    """A new context, for tests that break it or count its parts."""
    with iris.iris(heap_size, timeout_s=timeout_s, first_timeout_s=first_timeout_s) as ctx:
        yield ctx


def assert_close(got: torch.Tensor, expected: torch.Tensor, rtol: float = 0.0, atol: float = 0.0) -> None:
    """As ``torch.testing.assert_close``, whose imports take a second in each rank; NaN is equal to NaN."""
    kinds = [(one.dtype, one.shape, one.device, one.layout) for one in (got, expected)]
    assert kinds[0] == kinds[1]
    if got.dtype.is_floating_point and got.itemsize == 1:
        got, expected = got.float(), expected.float()
    near = (got == expected) | ((got != got) & (expected != expected))
    if rtol or atol:
        near |= (got - expected).abs() <= atol + rtol * expected.abs()
    far = ~near
    assert not bool(far.any()), f"{int(far.sum())} of {far.numel()} differ: {got[far][:9]}, not {expected[far][:9]}"


def open_fds() -> list[str]:
    """The targets of this process's file descriptors, without the numbers that differ each time."""
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
        except FileNotFoundError:
            continue
    return sorted(targets)


def map_count() -> int:
    """The number of lines of this process's memory map."""
    return len(Path("/proc/self/maps").read_text().splitlines())


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def shared_memory_files() -> set[str]:
    """The machine's named shared memory; tests that count it have the mark :data:`NAMES_SHARED_MEMORY`. Without the
    semaphores of the pools that compile kernels at the same time in CI (``tests/assembly/conftest.py``)."""
    found = set(os.listdir("/dev/shm"))
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if b"IRIS_BACKEND=compile\0" in (process / "environ").read_bytes():
                maps = (process / "maps").read_text()
                found -= {name for name in found if f"/dev/shm/{name}" in maps}
    return found


def iris_sockets() -> set[str]:
    """Names of abstract sockets of Iris that some process has bound."""
    names = (line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return {name for name in names if name.startswith("@iris-")}


def free_port() -> int:
    """A port that, until it is used, neither another worker of pytest takes nor the system for a connection."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    for port in random.sample(range(10000 + 1000 * worker, 11000 + 1000 * worker), 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
