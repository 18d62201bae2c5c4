"""Simulated kernels that access invalid memory: beyond heaps, off heaps, and memory that was freed."""

from __future__ import annotations

import gc
import itertools
import os
import resource
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from ranks import BACKEND, Failure, Ranks, context, failure_of, fresh, map_count, worlds

import iris
from iris.backends import mapping

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(BACKEND != "sim", reason="tests the simulator"),
]
ONE = pytest.mark.parametrize("ranks", [1], indirect=True)
TWO = pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
FOUR = pytest.mark.parametrize("ranks", worlds(4, 4), indirect=True)
HEAP = 1 << 20


@triton.jit
def store_kernel(pointer, offset, handle, TO: tl.constexpr):
    iris.store(pointer + offset + tl.arange(0, 4), 1, iris.rank(handle), TO, handle.bases)


@triton.jit
def load_kernel(address, out, handle, FROM: tl.constexpr):
    pointer = tl.cast(address, tl.int64).to(tl.pointer_type(tl.int32))
    tl.store(out, iris.load(pointer, iris.rank(handle), FROM, handle.bases))


@triton.jit
def increment_kernel(address):
    pointer = tl.cast(address, tl.int64).to(tl.pointer_type(tl.int32))
    tl.store(pointer, tl.load(pointer) + 1)


def assert_none_there(failure: Failure) -> None:
    assert failure.kind == "AddressError" and "where this process has no memory" in failure.message


def store_off_heap() -> list[Failure]:
    """A tensor that was computed from one on the heap, and is not on it itself."""

    def launch(ctx: iris.Iris, rank: int) -> None:
        there = ctx.zeros(1024, dtype=torch.int32) + 1
        store_kernel[(1,)](there, 0, ctx.handle, TO=rank)

    return failures_by_rank(launch)


def store_elsewhere() -> list[Failure]:
    """A tensor on the heap of another context, and a pointer that has been moved before."""
    failures = []
    with iris.iris(HEAP) as other:
        away = other.zeros(4, dtype=torch.int32)
        peer = (other.rank + 1) % other.world_size
        with fresh(HEAP) as ctx:
            failures.append(failure_of(lambda: store_kernel[(1,)](away, 0, ctx.handle, TO=peer)))
        with fresh(HEAP) as ctx:
            here = ctx.zeros(4, dtype=torch.int32)
            moved = here.data_ptr() + int(ctx.heap_bases[peer]) - int(ctx.heap_bases[ctx.rank])
            out = ctx.zeros(1, dtype=torch.int32)
            failures.append(failure_of(lambda: load_kernel[(1,)](moved, out, ctx.handle, FROM=peer)))
    return failures


@TWO
def test_a_tensor_on_another_heap_is_not_said_to_be_off_the_heap(ranks: Ranks) -> None:
    for failures in ranks.run(store_elsewhere):
        for failure in failures:
            assert_none_there(failure)
            assert "Usual causes" in failure.message and "that of a tensor off" not in failure.message


@FOUR
def test_a_tensor_off_the_heap_is_told(ranks: Ranks) -> None:
    for rank, failures in enumerate(ranks.run(store_off_heap)):
        for step, failure in enumerate(failures, 1):
            assert_none_there(failure)
            peer = (rank + step) % ranks.world_size
            assert f"a tensor off the symmetric heap, moved to rank {peer}'s" in failure.message, failure
            assert f"{__file__}:" in failure.message and "in store_kernel" in failure.message


def failures_by_rank(launch: Callable[[iris.Iris, int], object], *more: int) -> list[Failure]:
    """The failures of ``launch(ctx, rank)`` for every other rank, and ``more``. Each ends its context."""
    own, world_size, failures = context().rank, context().world_size, []
    for rank in [*((own + step) % world_size for step in range(1, world_size)), *more]:
        with fresh(HEAP) as ctx:
            failures.append(failure_of(launch, ctx, rank))
    return failures


def store_beyond(nbytes: int) -> list[Failure]:
    """Failures of stores to every rank, ``nbytes`` from the end of the heap or before its start; the rank in between
    must stay unchanged."""

    def store(ctx: iris.Iris, to: int) -> None:
        out = ctx.zeros(4, dtype=torch.int32)
        size = ctx._table.size
        left = size - (out.data_ptr() - ctx._backend.bases[ctx.rank])
        offset = (left + nbytes if nbytes >= 0 else left - size + nbytes) // 4
        store_kernel[(1,)](out, offset, ctx.handle, TO=to)

    return failures_by_rank(store, context().rank)


@TWO
@pytest.mark.parametrize(
    "nbytes", [0, 4096, HEAP, 1 << 24, 1 << 32, 1 << 36, -16, -4096, -HEAP, -(1 << 32), -(1 << 36)]
)
def test_what_runs_over_a_heap_finds_no_memory(ranks: Ranks, nbytes: int) -> None:
    for failures in ranks.run(store_beyond, nbytes):
        for failure in failures:
            assert_none_there(failure)


def store_off_the_heap(size: int) -> list[Failure]:
    own = torch.zeros(size, dtype=torch.int32)
    return failures_by_rank(lambda ctx, to: store_kernel[(1,)](own, 0, ctx.handle, TO=to))


@FOUR
@pytest.mark.parametrize("size", [4, 1 << 16, 1 << 24])
def test_a_tensor_off_the_heap_is_on_no_other_rank(ranks: Ranks, size: int) -> None:
    for failures in ranks.run(store_off_the_heap, size):
        assert len(failures) == 3
        for failure in failures:
            assert_none_there(failure)


@triton.jit
def mixed_up_kernel(pointer, out, peer, handle):
    """Confuse the peer with this rank."""
    tl.store(out, iris.load(pointer, peer, iris.rank(handle), handle.bases))


def load_with_ranks_mixed_up() -> list[Failure]:
    out = torch.zeros(1)
    return failures_by_rank(lambda ctx, peer: mixed_up_kernel[(1,)](ctx.zeros(4), out, peer, ctx.handle))


@FOUR
def test_ranks_mixed_up_lead_to_no_third_rank(ranks: Ranks) -> None:
    for failures in ranks.run(load_with_ranks_mixed_up):
        assert len(failures) == 3
        for failure in failures:
            assert_none_there(failure)
            assert "ranks mixed up" in failure.message


def store_by_another_context() -> list[Failure]:
    with fresh(HEAP) as another:
        own = another.zeros(4, dtype=torch.int32)
        return failures_by_rank(lambda ctx, to: store_kernel[(1,)](own, 0, ctx.handle, TO=to))


@FOUR
def test_the_handle_of_another_context_leads_nowhere(ranks: Ranks) -> None:
    for failures in ranks.run(store_by_another_context):
        assert len(failures) == 3
        for failure in failures:
            assert_none_there(failure)


def reach_for_a_freed_tensor() -> Failure:
    context()
    values = torch.zeros(1 << 24, dtype=torch.int32)  # so large that its memory goes back to the system
    address = values.data_ptr()
    increment_kernel[(1,)](address)
    assert values[0] == 1
    del values
    return failure_of(lambda: increment_kernel[(1,)](address))


@ONE
def test_a_freed_tensor_is_not_there(ranks: Ranks) -> None:
    (failure,) = ranks.run(reach_for_a_freed_tensor)
    assert_none_there(failure)


def reach_after_close() -> tuple[Failure, Failure, list[int]]:
    """Failures of accesses to a peer's closed heap, with all of its tensors gone, and with one of this rank's own still
    held."""
    out = torch.zeros(1, dtype=torch.int32)
    with fresh(HEAP) as ctx:
        shared = ctx.full((4,), ctx.rank + 5, dtype=torch.int32)
        address, handle, rank = shared.data_ptr(), ctx.handle, ctx.rank
        ctx.barrier()
        load_kernel[(1,)](address, out, handle, FROM=1 - rank)
        assert out.item() == 6 - rank
        ctx.barrier()
    gone = failure_of(lambda: load_kernel[(1,)](address, out, handle, FROM=1 - rank))
    kept = shared.tolist()
    del shared
    gc.collect()
    return gone, failure_of(lambda: increment_kernel[(1,)](address)), kept


@TWO
def test_a_heap_is_not_there_after_close(ranks: Ranks) -> None:
    for rank, (of_peer, own, kept) in enumerate(ranks.run(reach_after_close)):
        assert_none_there(of_peer)
        assert_none_there(own)
        assert kept == [rank + 5] * 4


def map_files(count: int, nbytes: int) -> list[int]:
    """Map files of zeros and unmap them; returns their addresses."""
    fds = [os.memfd_create("test") for _ in range(count)]
    try:
        for fd in fds:
            os.ftruncate(fd, nbytes)
        files = mapping.map_apart(fds, nbytes)
        again = mapping.map_apart(fds, nbytes)
    finally:
        for fd in fds:
            os.close(fd)
    for index, file in enumerate(files):
        file[-1] = index + 1
    assert [int(file[-1]) for file in again] == [*range(1, count + 1)]
    assert not any(file[:-1].any() for file in again)
    return [file.ctypes.data for file in files]


def test_files_are_apart_and_let_go() -> None:
    map_files(1, 5000)
    before = map_count()
    addresses = map_files(3, 5000)
    distances = [b - a for a, b in itertools.pairwise(addresses)]
    assert all(3 << 36 < distance < 5 << 36 for distance in distances) and len(set(distances)) == 2
    assert map_count() <= before + 1


def map_with_few_addresses(limit: int) -> tuple[int, list[str]]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + limit, before[1]))
    try:
        first, second = map_files(2, 1 << 20)
        failure = failure_of(map_files, 2, 1 << 44)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return second - first, [failure.kind, failure.message]


@ONE
@pytest.mark.parametrize(("limit", "gap"), [(1 << 36, 1 << 32), (1 << 28, 8192)])
def test_gaps_are_smaller_where_addresses_are_few(ranks: Ranks, limit: int, gap: int) -> None:
    ((distance, failure),) = ranks.run(map_with_few_addresses, limit)
    assert abs(distance - gap - (1 << 20)) <= gap // 4
    assert failure == ["OSError", "[Errno 12] Cannot allocate memory"]
