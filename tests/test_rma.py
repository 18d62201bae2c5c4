"""Remote loads, stores, copies and atomics: every dtype, by explicit ranks and by the device handle, values exact.

Rank r works on the memory of rank (r + 1) % world_size, so a swapped pair of ranks shows from three ranks on, and
a swapped pair of heap bases on two.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from ranks import TRITON, Ranks, context, fresh, poison, worlds

import iris

pytestmark = pytest.mark.timeout(120)

N = 8
ACTIVE = 5
"""A block has N elements, of which the mask lets ACTIVE through."""

INTS = ("int32", "int64", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
WIDE_FLOATS = ("float32", "float64")
ATOMICS: dict[str, tuple[str, ...]] = {
    "add": INTS + FLOATS,
    "sub": INTS + FLOATS,
    "xchg": INTS + WIDE_FLOATS,
    "cas": ("int16", "uint16", *INTS, *FLOATS),
    "and": INTS,
    "or": INTS,
    "xor": INTS,
    "min": INTS + WIDE_FLOATS,
    "max": INTS + WIDE_FLOATS,
}
"""The dtypes that Triton compiles for both vendors (3.9; float compare-and-swaps on AMD need 3.8 or newer)."""
WRONG_RETURN = {("min", "float64")} if TRITON < (3, 8) else set()
"""Before 3.8 Triton returns a wrong old value for a minimum of negative numbers; memory is right."""
PLAIN = ("int8", "uint8", "int16", "uint16", *INTS, *FLOATS)

EXPECTED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda old, value, cmp: old + value,
    "sub": lambda old, value, cmp: old - value,
    "xchg": lambda old, value, cmp: value,
    "cas": lambda old, value, cmp: np.where(old == cmp, value, old),
    "and": lambda old, value, cmp: old & value,
    "or": lambda old, value, cmp: old | value,
    "xor": lambda old, value, cmp: old ^ value,
    "min": lambda old, value, cmp: np.minimum(old, value),
    "max": lambda old, value, cmp: np.maximum(old, value),
}


def draw(dtype: str, seed: int, rank: int, salt: int) -> np.ndarray:
    """Whole numbers that every dtype holds exactly; for unsigned types with the highest bit set and not."""
    dice = np.random.default_rng([seed, rank, salt])
    values = dice.integers(0 if dtype.startswith("uint") else -60, 60, N)
    if dtype == "bfloat16":
        return values.astype(np.float32)
    wide = values.astype(dtype)
    if dtype in ("uint32", "uint64"):
        wide += dice.integers(0, 2, N).astype(dtype) << np.dtype(dtype).type(np.iinfo(dtype).bits - 1)
    return wide


def tensor_of(values: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(values.copy()).to(getattr(torch, dtype))


def values_of(tensor: torch.Tensor) -> np.ndarray:
    local = tensor.cpu()
    return (local.float() if local.dtype == torch.bfloat16 else local).numpy()


def placed(ctx: iris.Iris, values: np.ndarray, dtype: str) -> torch.Tensor:
    return ctx.as_symmetric(tensor_of(values, dtype).to(ctx.device))


@triton.jit
def atomic_by_ranks(OP: tl.constexpr, ptr, value, cmp, mask, me, peer, bases):
    if OP == "add":
        old = iris.atomic_add(ptr, value, me, peer, bases, mask)
    elif OP == "sub":
        old = iris.atomic_sub(ptr, value, me, peer, bases, mask)
    elif OP == "xchg":
        old = iris.atomic_xchg(ptr, value, me, peer, bases, mask)
    elif OP == "cas":
        old = iris.atomic_cas(ptr, cmp, value, me, peer, bases)
    elif OP == "and":
        old = iris.atomic_and(ptr, value, me, peer, bases, mask)
    elif OP == "or":
        old = iris.atomic_or(ptr, value, me, peer, bases, mask)
    elif OP == "xor":
        old = iris.atomic_xor(ptr, value, me, peer, bases, mask)
    elif OP == "min":
        old = iris.atomic_min(ptr, value, me, peer, bases, mask)
    else:
        tl.static_assert(OP == "max")
        old = iris.atomic_max(ptr, value, me, peer, bases, mask)
    return old


@triton.jit
def atomic_by_handle(OP: tl.constexpr, ptr, value, cmp, mask, peer, handle):
    if OP == "add":
        old = iris.peer.atomic_add(handle, ptr, value, peer, mask)
    elif OP == "sub":
        old = iris.peer.atomic_sub(handle, ptr, value, peer, mask)
    elif OP == "xchg":
        old = iris.peer.atomic_xchg(handle, ptr, value, peer, mask)
    elif OP == "cas":
        old = iris.peer.atomic_cas(handle, ptr, cmp, value, peer)
    elif OP == "and":
        old = iris.peer.atomic_and(handle, ptr, value, peer, mask)
    elif OP == "or":
        old = iris.peer.atomic_or(handle, ptr, value, peer, mask)
    elif OP == "xor":
        old = iris.peer.atomic_xor(handle, ptr, value, peer, mask)
    elif OP == "min":
        old = iris.peer.atomic_min(handle, ptr, value, peer, mask)
    else:
        tl.static_assert(OP == "max")
        old = iris.peer.atomic_max(handle, ptr, value, peer, mask)
    return old


@triton.jit
def atomic_kernel(
    memory, values, cmps, out, active, me, peer, handle, OP: tl.constexpr, BY_HANDLE: tl.constexpr, BLOCK: tl.constexpr
):
    """Access memory: with BLOCK = 1 by one scalar access per program, else by one block access."""
    if BLOCK == 1:
        offsets = tl.program_id(0)
    else:
        offsets = tl.arange(0, BLOCK)
    mask = offsets < active
    value, cmp = tl.load(values + offsets), tl.load(cmps + offsets)
    if BY_HANDLE:
        old = atomic_by_handle(OP, memory + offsets, value, cmp, mask, peer, handle)
    else:
        old = atomic_by_ranks(OP, memory + offsets, value, cmp, mask, me, peer, handle.bases)
    tl.store(out + offsets, old, mask=mask)


@triton.jit
def move_kernel(
    source,
    target,
    active,
    me,
    peer,
    third,
    other,
    handle,
    OP: tl.constexpr,
    BY_HANDLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if BLOCK == 1:
        offsets = tl.program_id(0)
    else:
        offsets = tl.arange(0, BLOCK)
    mask = offsets < active
    bases = handle.bases
    if OP == "load":
        if BY_HANDLE:
            data = iris.peer.load(handle, source + offsets, peer, mask, other)
        else:
            data = iris.load(source + offsets, me, peer, bases, mask, other)
        tl.store(target + offsets, data)
    elif OP == "store":
        data = tl.load(source + offsets)
        if BY_HANDLE:
            iris.peer.store(handle, target + offsets, data, peer, mask)
        else:
            iris.store(target + offsets, data, me, peer, bases, mask)
    elif OP == "get":
        if BY_HANDLE:
            iris.peer.get(handle, source + offsets, target + offsets, peer, mask)
        else:
            iris.get(source + offsets, target + offsets, me, peer, bases, mask)
    elif OP == "put":
        if BY_HANDLE:
            iris.peer.put(handle, source + offsets, target + offsets, peer, mask)
        else:
            iris.put(source + offsets, target + offsets, me, peer, bases, mask)
    else:
        tl.static_assert(OP == "copy")
        if BY_HANDLE:
            iris.peer.copy(handle, source + offsets, target + offsets, peer, third, mask)
        else:
            iris.copy(source + offsets, target + offsets, peer, third, me, bases, mask)


@triton.jit
def options_kernel(source, target, me, peer, handle, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    data = iris.load(source + offsets, me, peer, handle.bases, cache_modifier=".cg", hint=BLOCK)
    iris.store(target + offsets, data, me, peer, handle.bases, cache_modifier=".cs", hint=BLOCK)
    again = target + BLOCK + offsets
    iris.get(
        source + offsets,
        again,
        me,
        peer,
        handle.bases,
        offsets < 3,
        7,
        load_cache_modifier=".ca",
        store_cache_modifier=".wb",
        hint=4,
    )
    data = iris.load(source + offsets, me, peer, handle.bases, volatile=True)
    tl.store(target + 2 * BLOCK + offsets, data)
    tl.store(target + 3 * BLOCK + offsets, tl.load(iris.peer.translate(handle, source + offsets, peer)))


@triton.jit
def hinted_rows_kernel(
    source, target, places, peer, handle, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HINT: tl.constexpr
):
    """Load the peer's rows in another order; only the hint says that they are contiguous and aligned."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    data = iris.peer.load(handle, source + tl.load(places + rows * COLUMNS + columns), peer, hint=HINT)
    tl.store(target + rows * COLUMNS + columns, data)


@triton.jit
def plain_swap_kernel(words, out, me, peer, bases, BLOCK: tl.constexpr):
    """Compare-and-swap with plain numbers, which other atomics also take."""
    offsets = tl.arange(0, BLOCK)
    tl.store(out + offsets, iris.atomic_cas(words + offsets, 3, BLOCK, me, peer, bases))


@triton.jit
def contend_kernel(counter, tickets, handle, ROUNDS: tl.constexpr, SEM: tl.constexpr):
    """Every program of every rank draws tickets from rank 0's counter."""
    first = tl.program_id(0) * ROUNDS
    for turn in range(ROUNDS):
        ticket = iris.peer.atomic_add(handle, counter, 1, 0, sem=SEM)
        tl.store(tickets + first + turn, ticket)


@triton.jit
def lock_kernel(lock, shared, handle, ROUNDS: tl.constexpr):
    """A plain add to rank 0's memory under a spin lock in rank 0's memory."""
    for _ in range(ROUNDS):
        while iris.peer.atomic_cas(handle, lock, 0, 1, 0, sem="acquire") != 0:
            pass
        tl.debug_barrier()
        iris.peer.store(handle, shared, iris.peer.load(handle, shared, 0, volatile=True) + 1, 0)
        iris.peer.atomic_xchg(handle, lock, 0, 0, sem="release")


@triton.jit
def contended_add_kernel(memory, values, handle, BLOCK: tl.constexpr):
    """Every program of every rank adds to the same block of rank 0."""
    offsets = tl.arange(0, BLOCK)
    iris.peer.atomic_add(handle, memory + offsets, tl.load(values + offsets), 0, sem="relaxed", hint=BLOCK)


def run_atomic(op: str, dtype: str, by_handle: bool, block: int, seed: int) -> None:
    ctx = context()
    size, me = ctx.world_size, ctx.rank
    peer, previous = (me + 1) % size, (me - 1) % size
    memory = placed(ctx, draw(dtype, seed, me, 0), dtype)
    values = placed(ctx, draw(dtype, seed, me, 1), dtype)
    their_memory = draw(dtype, seed, peer, 0)
    cmps = their_memory.copy()
    cmps[::2] += 1
    expected_from = placed(ctx, cmps, dtype)
    out = ctx.zeros(N, dtype=getattr(torch, dtype))
    active = N if op == "cas" else ACTIVE
    ctx.barrier()
    grid = (N,) if block == 1 else (1,)
    atomic_kernel[grid](memory, values, expected_from, out, active, me, peer, ctx.handle, op, by_handle, block)
    ctx.barrier()

    seen = np.where(np.arange(N) < active, their_memory, 0)
    if (op, dtype) not in WRONG_RETURN:
        np.testing.assert_array_equal(values_of(out), seen, err_msg="returned")
    mine = draw(dtype, seed, me, 0)
    cmps = mine.copy()
    cmps[::2] += 1
    new = EXPECTED[op](mine, draw(dtype, seed, previous, 1), cmps)
    np.testing.assert_array_equal(values_of(memory), np.where(np.arange(N) < active, new, mine), err_msg="memory")
    ctx.barrier()


def run_move(op: str, dtype: str, by_handle: bool, block: int, seed: int) -> None:
    ctx = context()
    size, me = ctx.world_size, ctx.rank
    poison(ctx)
    peer, third = (me + 1) % size, (me + 2) % size
    source = placed(ctx, draw(dtype, seed, me, 0), dtype)
    target = ctx.full((N,), 5, dtype=getattr(torch, dtype))
    ctx.barrier()
    grid = (N,) if block == 1 else (1,)
    move_kernel[grid](source, target, ACTIVE, me, peer, third, 9, ctx.handle, op, by_handle, block)
    ctx.barrier()

    origin = {"load": peer, "get": peer, "store": (me - 1) % size, "put": (me - 1) % size, "copy": (me - 1) % size}[op]
    beyond = 9 if op == "load" else 5
    expected = np.where(np.arange(N) < ACTIVE, draw(dtype, seed, origin, 0), beyond)
    np.testing.assert_array_equal(values_of(target), expected)
    np.testing.assert_array_equal(values_of(source), draw(dtype, seed, me, 0))
    ctx.barrier()


def run_options(seed: int) -> None:
    ctx = context()
    peer = (ctx.rank + 1) % ctx.world_size
    source = placed(ctx, draw("float32", seed, ctx.rank, 0), "float32")
    target = ctx.zeros(4, N)
    ctx.barrier()
    options_kernel[(1,)](source, target, ctx.rank, peer, ctx.handle, N)
    ctx.barrier()
    theirs, rows = draw("float32", seed, peer, 0), values_of(target)
    np.testing.assert_array_equal(rows[1], np.where(np.arange(N) < 3, theirs, 0))
    np.testing.assert_array_equal(rows[2], theirs)
    np.testing.assert_array_equal(rows[3], theirs)
    # The previous rank loaded this rank's source and stored it back into this rank's target.
    np.testing.assert_array_equal(rows[0], values_of(source))
    ctx.barrier()


def run_hinted_rows(hint: Any, seed: int) -> None:
    ctx = context()
    peer, rows, columns = (ctx.rank + 1) % ctx.world_size, 16, 64
    matrices = [np.random.default_rng([seed, rank]).standard_normal((rows, columns), np.float32) for rank in range(8)]
    source, target = placed(ctx, matrices[ctx.rank], "float32"), ctx.empty(rows, columns)
    order = np.random.default_rng(seed).permutation(rows)
    places = torch.from_numpy(order[:, None] * columns + np.arange(columns)).to(ctx.device)
    ctx.barrier()
    hinted_rows_kernel[(1,)](source, target, places, peer, ctx.handle, rows, columns, hint)
    np.testing.assert_array_equal(values_of(target), matrices[peer][order])
    for wrong, words in (
        ((1, 1, 4), "one number, or one for each of 2 axes, got 3"),
        (3, "powers of two, got 3"),
        (".cg", "numbers, got '.cg'. Name what comes after mask: cache_modifier='.cg'"),
    ):
        with fresh() as other, pytest.raises(Exception) as caught:  # in the simulator this ends a context
            hinted_rows_kernel[(1,)](source, target, places, peer, other.handle, rows, columns, wrong)
        error: BaseException | None = caught.value
        while error and f"hint: expected {words}" not in str(error):
            error = error.__cause__
        assert error
    ctx.barrier()


def run_plain_swap(dtype: torch.dtype) -> None:
    ctx = context()
    peer = (ctx.rank + 1) % ctx.world_size
    words, out = ctx.arange(N, dtype=dtype), ctx.zeros(N, dtype=dtype)
    ctx.barrier()
    plain_swap_kernel[(1,)](words, out, ctx.rank, peer, ctx.heap_bases, N)
    ctx.barrier()
    assert out.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert words.tolist() == [0, 1, 2, 8, 4, 5, 6, 7]
    ctx.barrier()


def run_contention(programs: int, rounds: int, sem: str) -> tuple[list[int], int]:
    ctx = context()
    counter = ctx.zeros(1, dtype=torch.int32)
    tickets = ctx.zeros(programs * rounds, dtype=torch.int32)
    ctx.barrier()
    contend_kernel[(programs,)](counter, tickets, ctx.handle, rounds, sem)
    ctx.barrier()
    return tickets.tolist(), int(counter.item())


def run_contended_add(dtype: str, programs: int) -> list[float]:
    ctx = context()
    memory = ctx.zeros(N, dtype=getattr(torch, dtype))
    values = placed(ctx, np.arange(N) % 3 + 1, dtype)
    ctx.barrier()
    contended_add_kernel[(programs,)](memory, values, ctx.handle, N)
    ctx.barrier()
    sums: list[float] = memory.cpu().to(torch.float64).tolist()
    return sums


def run_lock(programs: int, rounds: int) -> int:
    ctx = context()
    lock, shared = ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    lock_kernel[(programs,)](lock, shared, ctx.handle, rounds)
    ctx.barrier()
    return int(shared.item())


THREE_OR_MORE = worlds(3, 3) or worlds(4, 4)


BY = pytest.mark.parametrize("by_handle", [False, True], ids=["ranks", "handle"])
BLOCKS = pytest.mark.parametrize("block", [1, N], ids=["scalar", "block"])


def keywords(fn: Any) -> dict[str, Any]:
    """A device function's keyword arguments with their defaults."""
    parameters = inspect.signature(fn.fn).parameters.values()
    return {one.name: getattr(one.default, "value", one.default) for one in parameters if one.default is not one.empty}


@pytest.mark.parametrize("name", ["load", "store", "get", "put", "copy", *(f"atomic_{op}" for op in ATOMICS)])
def test_both_modules_take_the_same_keywords(name: str) -> None:
    assert keywords(getattr(iris.peer, name)) == keywords(getattr(iris, name))
    assert "hint" in keywords(getattr(iris.peer, name))


@BLOCKS
@pytest.mark.parametrize(("op", "dtype"), [(op, dtype) for op, dtypes in ATOMICS.items() for dtype in dtypes])
@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_atomic(ranks: Ranks, op: str, dtype: str, block: int, seed: int) -> None:
    """This is through the handle, whose functions call those with explicit ranks; below are both forms, with one
    dtype."""
    ranks.run(run_atomic, op, dtype, True, block, seed)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_compare_and_swap_takes_plain_numbers(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks.run(run_plain_swap, dtype)


@BLOCKS
@pytest.mark.parametrize("op", ["load", "store", "get", "put", "copy"])
@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("ranks", THREE_OR_MORE, indirect=True)
def test_move(ranks: Ranks, op: str, dtype: str, block: int, seed: int) -> None:
    ranks.run(run_move, op, dtype, True, block, seed)


@BY
@pytest.mark.parametrize("op", ["load", "store", "get", "put", "copy"])
def test_move_at_every_world_size(ranks: Ranks, op: str, by_handle: bool, seed: int) -> None:
    ranks.run(run_move, op, "float16", by_handle, N, seed)


@BY
@pytest.mark.parametrize("op", list(ATOMICS))
def test_atomic_at_every_world_size(ranks: Ranks, op: str, by_handle: bool, seed: int) -> None:
    ranks.run(run_atomic, op, "int32", by_handle, N, seed)


def test_cache_modifiers_volatile_hint_and_other(ranks: Ranks, seed: int) -> None:
    ranks.run(run_options, seed)


@pytest.mark.parametrize("hint", [4, (1, 4), (1, 1)], ids=str)
def test_a_hint_of_one_or_two_axes(ranks: Ranks, hint: Any, seed: int) -> None:
    ranks.run(run_hinted_rows, hint, seed)


@pytest.mark.parametrize("sem", ["relaxed", "acquire", "release", "acq_rel"])
def test_tickets_drawn_by_all_programs_of_all_ranks_are_all_different(ranks: Ranks, sem: str) -> None:
    programs, rounds = 3, 10
    drawn = ranks.run(run_contention, programs, rounds, sem)
    total = programs * rounds * ranks.world_size
    assert sorted(ticket for tickets, _ in drawn for ticket in tickets) == list(range(total))
    assert [counter for _, counter in drawn] == [total] + [0] * (ranks.world_size - 1)


@pytest.mark.parametrize("dtype", ATOMICS["add"])
@pytest.mark.parametrize("ranks", worlds(4), indirect=True)
def test_no_contended_add_is_lost(ranks: Ranks, dtype: str) -> None:
    exact = 256 if dtype == "bfloat16" else 2048
    programs = exact // 3 // ranks.world_size
    per_unit = programs * ranks.world_size
    sums = ranks.run(run_contended_add, dtype, programs)
    assert sums[0] == [float(per_unit * (index % 3 + 1)) for index in range(N)]
    assert all(not any(others) for others in sums[1:])


def test_a_spin_lock_in_a_peers_memory_excludes(ranks: Ranks) -> None:
    programs, rounds = 2, 5
    counted = ranks.run(run_lock, programs, rounds)
    assert counted == [programs * rounds * ranks.world_size] + [0] * (ranks.world_size - 1)


@triton.jit
def narrow_sub_kernel(memory, values, handle):
    at = tl.arange(0, 4)
    iris.peer.atomic_sub(handle, memory + at, tl.load(values + at), 0)


def subtract_narrow() -> list[int]:
    ctx = context()
    memory = ctx.full((4,), 10, dtype=torch.int32)
    ctx.barrier()
    if ctx.rank == 0:
        narrow_sub_kernel[(1,)](memory, torch.arange(1, 5, dtype=torch.uint8, device=ctx.device), ctx.handle)
    ctx.synchronize()
    found: list[int] = memory.tolist()
    return found


@pytest.mark.parametrize("ranks", worlds(1, 2), indirect=True)
def test_a_narrow_unsigned_value_is_subtracted(ranks: Ranks) -> None:
    assert ranks.run(subtract_narrow)[0] == [9, 8, 7, 6]
