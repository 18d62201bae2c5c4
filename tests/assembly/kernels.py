"""Every kernel of Iris with arguments to compile it with: the ops' kernel in its variants, the barrier, the benchmarks'
and examples' kernels, and a small kernel around each device function that no other kernel reaches in that form."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from compiler import TARGETS, assembly, target, tensor
from listing import Event
from triton.tools.tensor_descriptor import TensorDescriptor

from iris.bench import rma as bench
from iris.device import arch, matmul, peer, rma, schedule, sync, tile
from iris.device.handle import Handle
from iris.ops import reduction
from iris.ops.all_gather_matmul import (
    arrived_source,
    fetch_courier,
    gather_kernel,
    keep_courier,
    pull_source,
    push_courier,
)
from iris.ops.matmul_all_reduce import atomic_sink, one_shot_sink, two_shot_sink
from iris.ops.matmul_all_scatter import push_sink
from iris.ops.matmul_reduce_scatter import add_rows_sink, scatter_rows_sink

ROOT = Path(__file__).resolve().parents[2]
EVERYWHERE = tuple(TARGETS)
CUDA = ("sm_90", "sm_100")
WAITS = Event.ACQUIRE | Event.BARRIER | Event.CLOCK
SIGNALS = Event.RELEASE | Event.BARRIER
FIRST_TWO = frozenset({"argument 0", "argument 1"})
BEHIND_HANDLE = frozenset({"argument 2", "argument 3"})


@dataclass(frozen=True)
class Case:
    """A kernel and what to compile it with. Names of a case: ``kernel`` or ``kernel-variant``.

    Attributes:
        arguments: makes them; dtypes stand in for tensors.
        constants: constexpr arguments and launch options, by name.
        has: what its assembly must contain, so that no rule passes for want of anything to look at.
        wide: arguments, as :mod:`listing` calls them, that point to data which moves 16 bytes at a time.
    """

    name: str
    kernel: Any
    arguments: Callable[[], tuple[Any, ...]]
    constants: dict[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = EVERYWHERE
    has: Event = Event.NONE
    wide: frozenset[str] = frozenset()


def short(dtype: torch.dtype) -> str:
    """A dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def of(*dtypes: Any) -> Callable[[], tuple[Any, ...]]:
    """Arguments: a tensor for each dtype; anything else as it is."""
    return lambda: tuple(tensor(one) if isinstance(one, torch.dtype) else one for one in dtypes)


def handle() -> Handle:
    """A device handle to compile with."""
    return Handle(tensor(torch.int64), tensor(torch.int64))


def with_handle(*dtypes: Any) -> Callable[[], tuple[Any, ...]]:
    """As :func:`of`, behind a device handle."""
    return lambda: (handle(), *of(*dtypes)())


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
"""Elements of a block: 16 bytes for each of 128 threads, and more, of any dtype of two bytes or more."""


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
    """All atomics of a dtype on a block; on 32-bit integers, on one word as well."""
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
def compare_and_swap(handle, words, values, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    value = tl.load(values + offsets)
    tl.store(values + offsets, peer.atomic_cas(handle, words + offsets, value, value + 1, 1))


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
def turnstile(handle, data, result, words, BLOCK: tl.constexpr):
    """A kernel that reads a peer's data between entering and leaving."""
    epoch = sync.enter(words, handle)
    offsets = tl.arange(0, BLOCK)
    sync.wait_entered(words, epoch, 1, handle)
    tl.store(result + offsets, peer.load(handle, data + offsets, 1))
    sync.wait_all_entered(words, epoch, handle)
    tl.store(result + BLOCK + offsets, peer.load(handle, data + BLOCK + offsets, 2))
    sync.leave(words, epoch, handle)


@triton.jit
def whole_barrier(handle, data, result, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    peer.store(handle, data + offsets, offsets.to(data.dtype.element_ty), 1)
    sync.barrier(handle)
    tl.store(result + offsets, tl.load(data + offsets))


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


def described(dtype: torch.dtype, block: int) -> TensorDescriptor:
    """A descriptor of a matrix to compile with."""
    return TensorDescriptor(tensor(dtype), [4096, 4096], [4096, 1], [block, block])


OPS: dict[str, dict[str, Any]] = {
    "local": {},
    "pull_rows": {"SOURCE": pull_source, "SHARDS": 8, "SHARDED": True, "OWN": True},
    "pull_columns": {"SOURCE": pull_source, "SEGMENTS": 8, "PIECEWISE": True},
    "copied_rows": {"SOURCE": arrived_source, "SHARDS": 8, "SHARDED": True, "OWN": True},
    "copied_columns": {"SOURCE": arrived_source, "COURIER": keep_courier, "SEGMENTS": 8, "PIECEWISE": True},
    "push_rows": {
        "SOURCE": arrived_source, "COURIER": push_courier, "SHARDS": 8, "SHARDED": True, "OWN": True, "MEET": False,
    },
    "push_columns": {
        "SOURCE": arrived_source, "COURIER": push_courier, "SEGMENTS": 8, "PIECEWISE": True, "MEET": False,
    },
    "hbm_rows": {
        "SOURCE": arrived_source, "COURIER": fetch_courier, "SHARDS": 8, "SHARDED": True, "OWN": True, "PIECEWISE":
        True,
    },
    "hbm_columns": {
        "SOURCE": arrived_source, "COURIER": fetch_courier, "SEGMENTS": 8, "PIECEWISE": True,
    },
    "all_scatter": {"SINK": push_sink},
    "scatter_rows": {
        "SCHEDULE": schedule.own_last, "SINK": scatter_rows_sink, "SHARDS": 8, "SHARDED": True, "MEET": False,
    },
    "add_rows": {"SCHEDULE": schedule.own_last, "SINK": add_rows_sink, "SHARDS": 8, "SHARDED": True, "MEET": False},
    "one_shot": {"SINK": one_shot_sink},
    "two_shot": {"SCHEDULE": schedule.dealt, "SINK": two_shot_sink, "SHARDS": 8},
    "atomic": {"SCHEDULE": schedule.dealt, "SINK": atomic_sink, "SHARDS": 8},
    "both": {"SOURCE": pull_source, "SINK": push_sink, "SHARDS": 8, "SHARDED": True},
}  # fmt: skip
"""What each op passes to the kernel, where it differs from :data:`PLAIN`; ``both`` is what a user's own op could be."""

PLAIN = {
    "SCHEDULE": schedule.own_first, "SOURCE": matmul.local_source, "SINK": tile.local_sink, "AFTER": None, "EAGER":
    False, "GATE": False, "COURIER": None, "SITE": 2, "SHARDS": 1, "SHARDED": False, "SEGMENTS": 1, "OWN": False,
    "PIECEWISE": False, "MEET": True, "TWO_TILES": True, "GROUP_M": 8, "COURIER_M": 32, "COURIER_N": 64, "PRECISION":
    "ieee",
}  # fmt: skip

VARIANTS: tuple[tuple[str, torch.dtype, bool, bool, int, bool, bool], ...] = (
    ("local", torch.float16, True, False, 0, True, True),
    ("local", torch.int8, True, True, 1, True, True),
    ("pull_rows", torch.bfloat16, True, True, 0, False, False),
    ("pull_rows", torch.float32, False, False, 1, True, True),
    ("pull_columns", torch.float16, False, True, 1, False, True),
    ("pull_columns", torch.int8, False, False, 2, False, False),
    ("copied_rows", torch.float16, True, False, 0, True, False),
    ("copied_rows", torch.bfloat16, False, True, 1, False, True),
    ("copied_rows", torch.int8, True, True, 0, False, False),
    ("copied_columns", torch.float16, False, False, 2, True, True),
    ("copied_columns", torch.bfloat16, True, True, 0, True, False),
    ("copied_columns", torch.float32, True, False, 1, False, False),
    ("push_rows", torch.bfloat16, True, False, 2, True, True),
    ("push_columns", torch.float16, True, True, 0, False, False),
    ("hbm_rows", torch.float16, True, True, 0, True, False),
    ("hbm_columns", torch.bfloat16, True, False, 1, True, True),
    ("all_scatter", torch.float16, True, True, 0, True, False),
    ("all_scatter", torch.bfloat16, True, False, 2, True, True),
    ("all_scatter", torch.float32, False, True, 0, False, False),
    ("scatter_rows", torch.bfloat16, True, False, 2, True, True),
    ("scatter_rows", torch.int8, False, True, 0, False, False),
    ("add_rows", torch.float16, True, False, 1, True, False),
    ("one_shot", torch.bfloat16, True, True, 2, True, True),
    ("two_shot", torch.bfloat16, True, False, 0, True, True),
    ("two_shot", torch.float32, False, True, 2, False, False),
    ("atomic", torch.float16, True, False, 0, True, False),
    ("both", torch.bfloat16, False, False, 0, True, False),
)
"""Op, dtype, operands by TMA, traced, kind of bias, whole blocks of K, Stream-K. Every op, and every value of each of
the
others: what they add to each other is outside the waits."""


def matmul_arguments(op: str, dtype: torch.dtype, tma: bool, traced: bool, bias: int, split: bool, block: int) -> Any:
    constants = PLAIN | OPS[op]
    out = torch.int32 if dtype == torch.int8 else dtype
    total = torch.int32 if dtype == torch.int8 else torch.float32
    own, a, b, c = (tile.Matrix(tensor(one), 4096, 1) for one in (dtype, dtype, dtype, out))
    counters = tensor(torch.int32) if constants["COURIER"] is not None else None
    flags = tile.Flags(
        tensor(torch.int32), tensor(torch.int32), tensor(torch.int32) if split else None, counters, 3, 2, 3, 512
    )
    described_a = described(dtype, block) if tma else None
    own_desc = described_a if constants["OWN"] or constants["SOURCE"] is matmul.local_source else None
    a_desc = None if constants["SOURCE"] is pull_source else described_a
    slots = {"add_rows": total, "atomic": total}.get(op, out)
    return (
        handle(), flags, own, own_desc, a, a_desc, b, described_a, c, tensor(out) if bias else None, tensor(slots),
        tensor(total) if split else None, tensor(torch.int64) if traced else None, *SIZES, 40, 20,
        matmul.Crew(16, 8, 100), 256,
    )  # fmt: skip


SIZES = (1024, 4096, 8192)
"""M, N and K."""


def matmul_case(
    op: str, dtype: torch.dtype, tma: bool, traced: bool, bias: int, even_k: bool, split: bool, cuda: bool
) -> Case:
    block = 32 if dtype in (torch.float32, torch.int8) else 64
    words = [op, short(dtype), *(["tma"] if tma else []), *(["trace"] if traced else []), *(["split"] if split else [])]
    constants = PLAIN | OPS[op] | {
        "BIAS": bias, "BLOCK_M": block, "BLOCK_N": block, "BLOCK_K": block, "EVEN_K": even_k, "STREAM_K": split,
        "ACC_DTYPE": tl.int32 if dtype == torch.int8 else tl.float32, "TRACE": traced,
        "num_warps": 4, "num_stages": 3 if cuda else 2,
    }  # fmt: skip
    arguments = partial(matmul_arguments, op, dtype, tma, traced, bias, split, block)
    name = f"matmul-{'-'.join(words)}-{'cuda' if cuda else 'hip'}"
    targets = CUDA if cuda else tuple(one for one in EVERYWHERE if one not in CUDA)
    return Case(name, matmul.matmul_kernel, arguments, constants, targets, WAITS | SIGNALS)


def _matmuls() -> list[Case]:
    nvidia = [matmul_case(*variant, cuda=True) for variant in VARIANTS]
    amd = [
        matmul_case(op, dtype, False, traced, bias, even_k, split, cuda=False)
        for op, dtype, _, traced, bias, even_k, split in VARIANTS
    ]
    return nvidia + amd


def _collectives() -> list[Case]:
    half = torch.float16
    return [
        Case(
            f"gather-{kind}",
            gather_kernel,
            partial(gather_arguments, half),
            {"SITE": 2, "SEGMENTS": segments, "COURIER_M": 32, "COURIER_N": 64},
            has=WAITS | SIGNALS,
        )
        for kind, segments in (("rows", 1), ("columns", 8))
    ] + [
        Case(
            f"sum-{'everywhere' if everywhere else 'rows'}",
            reduction.sum_kernel,
            partial(sum_arguments, half),
            {
                "SITE": 5, "EVERYWHERE": everywhere, "BIAS": 2, "ACC_DTYPE": tl.float32, "BLOCK_M": 32, "BLOCK_N": 64,
            },
            has=WAITS | SIGNALS,
        )
        for everywhere in (False, True)
    ]  # fmt: skip


def gather_arguments(dtype: torch.dtype) -> Any:
    flags = tile.Flags(tensor(torch.int32), tensor(torch.int32), None, tensor(torch.int32), 1, 1, 1, 512)
    own, a = (tile.Matrix(tensor(dtype), 4096, 1) for _ in range(2))
    return handle(), flags, own, a, 1024, 4096, matmul.Crew(16, 8, 100), 1024


def sum_arguments(dtype: torch.dtype) -> Any:
    partial_sum, output = (tile.Matrix(tensor(dtype), 4096, 1) for _ in range(2))
    return handle(), tensor(torch.int32), partial_sum, output, tensor(dtype), 1024, 4096, 512


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
    ]


def _compare_and_swaps() -> list[Case]:
    word = with_handle(torch.int32, torch.int32)
    blocks = [
        Case(
            f"compare_and_swap-{short(dtype)}",
            compare_and_swap,
            with_handle(dtype, dtype),
            {"BLOCK": 128},
            has=Event.CAS,
        )
        for dtype in (torch.int32, torch.int64)
    ]
    return [Case("compare_and_swap_word", compare_and_swap_word, word, has=Event.CAS), *blocks]


def _syncs() -> list[Case]:
    small = {"BLOCK": BLOCK}
    data, flags = torch.float32, torch.int32
    one_warp = {"num_warps": 1}
    return [
        Case("signals", signals, with_handle(data, flags), small, has=SIGNALS),
        Case("waits", waits, with_handle(data, data, flags), small, has=WAITS),
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
            Event.PROXY_FENCE | WAITS,
        ),
    ]


def _benchmarks() -> list[Case]:
    types, options = of(torch.int32, torch.int32, 1 << 26, 3), {"BLOCK": bench.BLOCK, "num_warps": 16}
    return [
        Case(f"bench-{kernel.fn.__name__}", kernel, lambda: (*types(), handle()), options, wide=FIRST_TWO)
        for kernel in (bench.put_kernel, bench.get_kernel)
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
        *_matmuls(),
        *_collectives(),
        *_movers(),
        *_atomics(),
        *_compare_and_swaps(),
        *_syncs(),
        *_benchmarks(),
        *_examples(),
    ]
}
"""Every case by name."""


def compile_case(case: Case, target_name: str) -> str:
    """The assembly of ``case``."""
    with target(target_name):
        return assembly(case.kernel, *case.arguments(), **case.constants)


def compile_named(name: str, target_name: str) -> str:
    """As :func:`compile_case`, for another process."""
    return compile_case(CASES[name], target_name)
