"""Every kernel of Iris, with arguments to compile it: those of the ops, the barrier, the benchmarks and the examples,
and a small kernel around each device function that no other kernel reaches in that form."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import matmuls
import torch
import triton
import triton.language as tl
from case import CUDA, EVERYWHERE, SIGNALS, WAITS, Case, compile_case, described, handle, of, short, with_handle
from compiler import VERSION, tensor
from listing import Event

from iris.bench.cases import transfers
from iris.device import arch, peer, rma, sync, trace
from iris.device.turnstile import enter, leave, wait_all_entered, wait_entered

ROOT = Path(__file__).resolve().parents[2]
FIRST_TWO = frozenset({"argument 0", "argument 1"})
BEHIND_HANDLE = frozenset({"argument 2", "argument 3"})


def example(name: str) -> ModuleType:
    """The module of ``examples/name.py``."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(name)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLES = {path.stem: example(path.stem) for path in sorted((ROOT / "examples").glob("[0-9]*.py"))}

BLOCK = 2048
"""Elements of a block: at least 16 bytes for each of 128 threads, for any dtype of one byte or more."""


@triton.jit
def load_store(handle, source, target, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    peer.store(handle, target + offsets, peer.load(handle, source + offsets, 1), 2)


@triton.jit
def masked_load_store(source, target, count, here, there, bases, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    data = rma.load(source + offsets, here, there, bases, mask, other=0, hint=16)
    rma.store(target + offsets, data, here, there, bases, mask, hint=16)


@triton.jit
def hinted_load_store(source, target, places, here, there, bases, BLOCK: tl.constexpr, HINT: tl.constexpr):
    """Load and store at places about which Triton can prove nothing."""
    where = tl.load(places + tl.arange(0, BLOCK))
    rma.store(target + where, rma.load(source + where, here, there, bases, hint=HINT), here, there, bases, hint=HINT)


@triton.jit
def hinted_rows(source, target, places, here, there, bases, BLOCK: tl.constexpr, HINT: tl.constexpr):
    """The same with blocks of two axes."""
    where = tl.load(places + tl.arange(0, 8))[:, None] + tl.load(places + tl.arange(0, BLOCK // 8))[None, :]
    rma.store(target + where, rma.load(source + where, here, there, bases, hint=HINT), here, there, bases, hint=HINT)


@triton.jit
def get(handle, source, target, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    peer.get(handle, source + offsets, target + offsets, 1)


@triton.jit
def put(handle, source, target, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    peer.put(handle, source + offsets, target + offsets, 1)


@triton.jit
def copy(handle, source, target, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    peer.copy(handle, source + offsets, target + offsets, 1, 2)


@triton.jit
def atomics(handle, words, values, BLOCK: tl.constexpr, BITS: tl.constexpr, SEM: tl.constexpr):
    """All atomics of a dtype on a block; for 32-bit integers also on one word."""
    offsets = tl.arange(0, BLOCK)
    value = tl.load(values + offsets)
    old = peer.atomic_add(handle, words + offsets, value, 1, sem=SEM)
    old = peer.atomic_sub(handle, words + offsets, old, 1, sem=SEM)
    if BITS != 16:
        old = peer.atomic_xchg(handle, words + offsets, old, 1, sem=SEM)
        old = peer.atomic_min(handle, words + offsets, old, 1, sem=SEM)
        old = peer.atomic_max(handle, words + offsets, old, 1, sem=SEM)
    if BITS == 1:
        old = peer.atomic_and(handle, words + offsets, old, 1, sem=SEM)
        old = peer.atomic_or(handle, words + offsets, old, 1, sem=SEM)
        old = peer.atomic_xor(handle, words + offsets, old, 1, sem=SEM)
        one = peer.atomic_add(handle, words, 1, 1, sem=SEM)
        one = peer.atomic_xchg(handle, words, one, 1, sem=SEM)
        old += one
    tl.store(values + offsets, old)


@triton.jit
def atomics_without_scope(words, values, bases, BLOCK: tl.constexpr):
    """Atomics as called by a function that forwards ``sem`` and ``scope``, but was given neither."""
    offsets = tl.arange(0, BLOCK)
    old = rma.atomic_add(words + offsets, tl.load(values + offsets), 0, 1, bases, sem=None, scope=None)
    tl.store(values + offsets, rma.atomic_cas(words + offsets, old, 2, 0, 1, bases, sem=None, scope=None))


@triton.jit
def compare_and_swap(handle, words, values, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    value = tl.load(values + offsets)
    tl.store(values + offsets, peer.atomic_cas(handle, words + offsets, value, 2, 1))


@triton.jit
def compare_and_swap_word(handle, word, result):
    tl.store(result, peer.atomic_cas(handle, word, 0, 1, 1))


@triton.jit
def signals(handle, data, flags, BLOCK: tl.constexpr):
    """Data for a peer, then each kind of signal about it."""
    offsets = tl.arange(0, BLOCK)
    peer.store(handle, data + offsets, offsets.to(data.dtype.element_ty), 1)
    sync.signal(flags, 1, 1, handle)
    peer.store(handle, data + BLOCK + offsets, offsets.to(data.dtype.element_ty), 1)
    sync.signal_add(flags + 1, 1, 1, handle)
    peer.store(handle, data + 2 * BLOCK + offsets, offsets.to(data.dtype.element_ty), 1)
    lanes = tl.arange(0, 16)
    sync.signal_all(flags + 2 + lanes, lanes, lanes, lanes < 3, handle)


@triton.jit
def waits(handle, data, result, flags, BLOCK: tl.constexpr):
    """Each kind of wait, and data that it protects."""
    offsets = tl.arange(0, BLOCK)
    sync.wait(flags, 5, 1, handle)
    tl.store(result + offsets, tl.load(data + offsets))
    lanes = tl.arange(0, 16)
    sync.wait_all(flags + 2 + lanes, lanes, lanes, lanes < 3, handle)
    tl.store(result + BLOCK + offsets, tl.load(data + BLOCK + offsets))


@triton.jit
def looks(handle, data, result, flag, BLOCK: tl.constexpr):
    """A look at a flag, and the data that it announces."""
    offsets = tl.arange(0, BLOCK)
    if sync.reached(flag, 5):
        tl.store(result + offsets, tl.load(data + offsets))


@triton.jit
def turnstile(handle, data, result, words, BLOCK: tl.constexpr):
    """A kernel that reads a peer's data between entering and leaving."""
    epoch = enter(words, handle)
    offsets = tl.arange(0, BLOCK)
    wait_entered(words, epoch, 1, handle)
    tl.store(result + offsets, peer.load(handle, data + offsets, 1))
    wait_all_entered(words, epoch, handle)
    tl.store(result + BLOCK + offsets, peer.load(handle, data + BLOCK + offsets, 2))
    leave(words, epoch, handle)


@triton.jit
def whole_barrier(handle, data, result, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    peer.store(handle, data + offsets, offsets.to(data.dtype.element_ty), 1)
    sync.barrier(handle)
    tl.store(result + offsets, tl.load(data + offsets))
    sync.barrier(handle)


@triton.jit
def bulk_signal(handle, result, flag, BLOCK: tl.constexpr):
    """A TMA store and the signal that announces it."""
    result.store([0, 0], tl.full((BLOCK, BLOCK), 1.0, tl.float16))
    arch.wait_bulk_stores()
    sync.signal(flag, 1, 1, handle)


@triton.jit
def bulk_consume(handle, source, result, flag, BLOCK: tl.constexpr):
    """A TMA load of what a peer announced."""
    sync.wait(flag, 1, 1, handle)
    arch.fence_async_proxy()
    tile = source.load([0, 0])
    tl.store(result + tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], tile)


def _movers() -> list[Case]:
    small = {"BLOCK": BLOCK}
    cases = [
        Case(f"{kernel.fn.__name__}-{short(dtype)}", kernel, with_handle(dtype, dtype), small, wide=BEHIND_HANDLE)
        for kernel in (load_store, get, put, copy)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    ranks = (1 << 20, 3, 5)
    for dtype in (torch.float16, torch.int32):
        arguments = of(dtype, dtype, *ranks, torch.int64)
        cases.append(Case(f"masked_load_store-{short(dtype)}", masked_load_store, arguments, small, wide=FIRST_TWO))
    for dtype in (torch.float16, torch.float64):
        places = of(dtype, dtype, torch.int64, *ranks[1:], torch.int64)
        run = 16 // dtype.itemsize
        for kernel, hint in ((hinted_load_store, run), (hinted_rows, run), (hinted_rows, (1, run))):
            name = f"{kernel.fn.__name__}-{short(dtype)}{'-axes' if hint != run else ''}"
            cases.append(Case(name, kernel, places, {**small, "HINT": hint}, wide=FIRST_TWO))
    return cases


def _atomics() -> list[Case]:
    bits = dict.fromkeys((torch.int32, torch.int64, torch.uint32, torch.uint64), 1)
    bits |= {torch.float16: 16, torch.bfloat16: 16, torch.float32: 0, torch.float64: 0}
    return [
        Case(
            f"atomics-{short(dtype)}-{sem}",
            atomics,
            with_handle(dtype, dtype),
            {"BLOCK": 128, "BITS": kind, "SEM": sem},
            has=Event.ATOMIC | (Event.RELEASE | Event.BARRIER if sem in ("release", "acq_rel") else Event.NONE),
        )
        for dtype, kind in bits.items()
        for sem in (("relaxed", "acquire", "release", "acq_rel") if dtype == torch.int32 else ("acq_rel",))
    ] + [
        Case(
            "atomics_without_scope",
            atomics_without_scope,
            of(torch.int32, torch.int32, torch.uint64),
            {"BLOCK": 128},
            has=Event.ATOMIC | Event.CAS | Event.RELEASE | Event.BARRIER,
        )
    ]


def _compare_and_swaps() -> list[Case]:
    """Cases of compare-and-swap for every dtype for which Triton has it; for floats on AMD from 3.8 on."""
    word = with_handle(torch.int32, torch.int32)
    whole = torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64
    floats = torch.float16, torch.bfloat16, torch.float32, torch.float64
    blocks = [
        Case(
            f"compare_and_swap-{short(dtype)}",
            compare_and_swap,
            with_handle(dtype, dtype),
            {"BLOCK": 128},
            EVERYWHERE if dtype in whole or VERSION >= (3, 8) else CUDA,
            has=Event.CAS,
        )
        for dtype in (*whole, *floats)
    ]
    return [Case("compare_and_swap_word", compare_and_swap_word, word, has=Event.CAS), *blocks]


def _syncs() -> list[Case]:
    small = {"BLOCK": BLOCK}
    data, flags = torch.float32, torch.int32
    one_warp = {"num_warps": 1}
    return [
        Case("signals", signals, with_handle(data, flags), small, has=SIGNALS),
        Case("waits", waits, with_handle(data, data, flags), small, has=WAITS),
        Case("looks", looks, with_handle(data, data, flags), small, has=Event.ACQUIRE | Event.BARRIER),
        Case("turnstile", turnstile, with_handle(data, data, flags), small, has=WAITS | SIGNALS),
        Case("whole_barrier", whole_barrier, with_handle(data, data), small, has=WAITS | SIGNALS),
        Case(
            "barrier_kernel",
            sync.barrier_kernel,
            with_handle(flags, 8),
            one_warp,
            has=Event.ACQUIRE | Event.RELEASE | Event.CLOCK,
        ),
        Case(
            "meeting",
            trace.meeting_kernel,
            lambda: (handle(), tensor(torch.int64)),
            {"MEETINGS": 33},
            has=WAITS | SIGNALS,
        ),
        Case(
            "bulk_signal",
            bulk_signal,
            lambda: (handle(), described(torch.float16, 64), tensor(flags)),
            {"BLOCK": 64},
            CUDA,
            Event.BULK_STORE | Event.BULK_WAIT | SIGNALS,
        ),
        Case(
            "bulk_consume",
            bulk_consume,
            lambda: (handle(), described(torch.float16, 64), tensor(torch.float16), tensor(flags)),
            {"BLOCK": 64},
            CUDA,
            Event.BULK_LOAD | Event.PROXY_FENCE | WAITS,
        ),
    ]


def _benchmarks() -> list[Case]:
    types, options = of(torch.int32, torch.int32, 1 << 26, 3), {"BLOCK": transfers.BLOCK, "num_warps": 16}
    return [
        Case(
            f"bench-{name}",
            transfers.move_kernel,
            lambda: (*types(), handle()),
            {**options, "PUT": put},
            wide=FIRST_TWO,
        )
        for name, put in (("put_kernel", True), ("get_kernel", False))
    ]


def _examples() -> list[Case]:
    f, bases, count = torch.float16, torch.int64, 1 << 20
    block = {"BLOCK": 8192, "num_warps": 8}
    load, store, add = EXAMPLES["01_load"], EXAMPLES["02_store"], EXAMPLES["05_atomic_add"]
    all_load, all_store, messages = EXAMPLES["03_all_load"], EXAMPLES["04_all_store"], EXAMPLES["06_message_passing"]
    words = with_handle(f, f, count, 3)
    passing = with_handle(torch.float32, torch.float32, torch.float32, torch.int32, torch.int32, 5)
    counted = of(f, f, count, 3, 5, bases)
    return [
        Case("01_load", load.load_kernel, counted, block, wide=FIRST_TWO),
        Case("02_store", store.store_kernel, counted, block, wide=FIRST_TWO),
        Case("03_all_load", all_load.all_load_kernel, words, block, wide=BEHIND_HANDLE),
        Case("04_all_store", all_store.all_store_kernel, words, block, wide=BEHIND_HANDLE),
        Case("05_all_kinds", add.all_kinds_kernel, of(torch.int32, torch.int32, 3, 8, bases), has=SIGNALS),
        Case("05_add", add.add_kernel, counted, block, has=Event.ATOMIC),
        Case("06_pass_messages", messages.pass_messages, passing, {"LENGTH": 1024}, has=WAITS | SIGNALS),
    ]


CASES = {
    case.name: case
    for case in [
        *matmuls.matmuls(),
        *matmuls.collectives(),
        *_movers(),
        *_atomics(),
        *_compare_and_swaps(),
        *_syncs(),
        *_benchmarks(),
        *_examples(),
    ]
}
"""Every case by name."""


def compile_named(name: str, target_name: str) -> str:
    """As :func:`compile_case`, for another process."""
    return compile_case(CASES[name], target_name)
