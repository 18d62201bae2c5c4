"""Variants of the ops' kernels: the matmul with each op's parts, and the collectives of the baselines."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton.language as tl
from case import CUDA, EVERYWHERE, HIP, SIGNALS, TURN, WAITS, Case, described, handle, short, turns_of
from compiler import tensor
from listing import Event

from iris.device import chunk, matmul, schedule, tile, turnstile
from iris.ops import reduction
from iris.ops.copies import copy_kernel
from iris.ops.decomposed import arrival_kernel, entered_kernel, entry_kernel, exit_kernel, landing_kernel
from iris.ops.exchange import exchange_kernel, exchange_words_kernel
from iris.ops.gathering import (
    arrived_source,
    fetch_courier,
    gather_kernel,
    keep_courier,
    pull_source,
    push_courier,
    put_courier,
)
from iris.ops.launching import accumulator_of
from iris.ops.local_matmul import add_sink
from iris.ops.matmul_all_reduce import (
    Inbox,
    atomic_sink,
    copied_sink,
    one_shot_sink,
    one_shot_words_sink,
    two_shot_sink,
    two_shot_words_sink,
)
from iris.ops.matmul_all_scatter import push_sink, relay_courier, send_courier, send_kernel
from iris.ops.matmul_reduce_scatter import add_rows_sink, scatter_rows_sink
from iris.ops.problem import output_dtype
from iris.ops.words import word_dtype

ROWS = {"SCHEDULE": schedule.own_last, "GATE": True, "SHARDS": 8, "SHARDED": True, "MEET": False}
DEALT = {"SCHEDULE": schedule.dealt, "GATE": True, "SHARDS": 8}
HALVED = {"EPOCHS": 148, "HALF_FLAGS": 1 << 15}
PARTS = {"": (16, 4096, 64, 128), "_of_one": (1, 1, 1, 1)}
"""Rows, columns, blocks and all rows of an exchange. Triton compiles numbers that are 1 into the kernel, as numbers of
Python; one target is enough to check that this works."""
OPERANDS = frozenset({"own_desc", "a_desc", "b_desc", "bt_desc", "b_strip_desc", "bt_strip_desc"})
"""Descriptors that the matmul kernel takes. Only a gathered A is written while the kernel runs."""
COUNTING = (chunk.counted_after, reduction.kept_after)
"""The parts that count tiles."""

OPS: dict[str, dict[str, Any]] = {
    "local": {},
    "local_transposed": {},
    "local_adding": {"SINK": add_sink},
    "pull_rows": {"SOURCE": pull_source, "SHARDS": 8, "SHARDED": True, "OWN": True},
    "pull_columns": {"SOURCE": pull_source, "SEGMENTS": 8, "PIECEWISE": True},
    "copied_rows": {"SOURCE": arrived_source, "SHARDS": 8, "SHARDED": True, "OWN": True},
    "copied_columns": {"SOURCE": arrived_source, "COURIER": keep_courier, "SEGMENTS": 8, "PIECEWISE": True},
    "push_rows": HALVED | {
        "SOURCE": arrived_source, "COURIER": push_courier, "SHARDS": 8, "SHARDED": True, "OWN": True,
    },
    "push_columns": HALVED | {
        "SOURCE": arrived_source, "COURIER": push_courier, "SEGMENTS": 8, "PIECEWISE": True,
    },
    "put_rows": HALVED | {
        "SOURCE": arrived_source, "COURIER": put_courier, "SHARDS": 8, "SHARDED": True, "OWN": True, "PIECEWISE": True,
    },
    "put_columns": HALVED | {
        "SOURCE": arrived_source, "COURIER": put_courier, "SEGMENTS": 8, "PIECEWISE": True,
    },
    "hbm_rows": {
        "SOURCE": arrived_source, "COURIER": fetch_courier, "SHARDS": 8, "SHARDED": True, "OWN": True,
        "PIECEWISE": True,
    },
    "hbm_columns": {
        "SOURCE": arrived_source, "COURIER": fetch_courier, "SEGMENTS": 8, "PIECEWISE": True,
    },
    "all_scatter": {"SINK": push_sink, "GATE": True},
    "send_columns": {"AFTER": chunk.counted_after, "EAGER": True, "GATE": True, "COURIER": send_courier},
    "relay_columns": {"AFTER": chunk.counted_after, "EAGER": True, "GATE": True, "COURIER": relay_courier},
    "copy_columns": {"AFTER": chunk.counted_after, "EAGER": True, "GATE": True},
    "scatter_rows": ROWS | {"SINK": scatter_rows_sink, "AFTER": reduction.delivered_after},
    "keep_rows": ROWS | {"SINK": scatter_rows_sink, "AFTER": reduction.kept_after, "EAGER": True},
    "add_rows": ROWS | {"SINK": add_rows_sink, "AFTER": reduction.added_after},
    "one_shot": {"SINK": one_shot_sink},
    "one_shot_words": {"SINK": one_shot_words_sink, "EPOCHS": 148},
    "two_shot_words": {"SINK": two_shot_words_sink, "EPOCHS": 148},
    "two_shot": DEALT | {"SINK": two_shot_sink, "AFTER": reduction.delivered_after},
    "atomic": DEALT | {"SINK": atomic_sink, "AFTER": reduction.added_after, "EAGER": True},
    "copied": ROWS | {"SINK": copied_sink, "AFTER": chunk.counted_after, "EAGER": True},
    "both": {"SOURCE": pull_source, "SINK": push_sink, "GATE": True, "SHARDS": 8, "SHARDED": True},
}  # fmt: skip
"""What each op passes to the kernel, if it differs from :data:`PLAIN`; ``both`` could be a user's own op.
``local_transposed`` has a descriptor of B's transpose."""

PLAIN = {
    "SCHEDULE": schedule.own_first, "SOURCE": matmul.local_source, "SINK": tile.local_sink, "AFTER": None,
    "EAGER": False, "GATE": False, "COURIER": None, "SITE": 2, "SHARDS": 1, "SHARDED": False, "SEGMENTS": 1,
    "OWN": False, "PIECEWISE": False, "MEET": True, "TWO_TILES": True, "GROUP_M": 8, "COURIER_M": 32, "COURIER_N": 64,
    "M_IN_VECTORS": False, "PRECISION": "ieee", "EPOCHS": turnstile.TURNSTILE.value, "HALF_FLAGS": 0,
}  # fmt: skip

FP8 = torch.float8_e4m3fn

VARIANTS: tuple[tuple[str, torch.dtype, bool, bool, int, bool, bool], ...] = (
    ("local", torch.float16, True, False, 0, True, True),
    ("local", torch.int8, True, True, 1, True, True),
    ("local", FP8, True, False, 2, True, True),
    ("local_adding", torch.int8, True, False, 0, True, False),
    ("local_transposed", torch.bfloat16, True, False, 0, False, False),
    ("local_transposed", torch.int8, True, False, 0, True, False),
    ("pull_rows", torch.bfloat16, True, True, 0, False, False),
    ("pull_rows", torch.float32, False, False, 1, True, True),
    ("pull_columns", torch.float16, False, True, 1, False, False),
    ("pull_columns", FP8, False, False, 2, False, False),
    ("copied_rows", torch.float16, True, False, 0, True, False),
    ("copied_rows", torch.bfloat16, False, True, 1, False, False),
    ("copied_rows", FP8, True, True, 0, False, False),
    ("copied_columns", torch.bfloat16, True, True, 0, True, False),
    ("copied_columns", torch.float16, False, False, 2, True, True),
    ("copied_columns", torch.float32, True, False, 1, False, False),
    ("push_rows", torch.bfloat16, True, False, 2, True, False),
    ("push_columns", torch.float16, True, True, 0, False, False),
    ("put_rows", torch.float16, True, False, 1, True, False),
    ("put_columns", torch.bfloat16, False, True, 0, True, False),
    ("hbm_rows", torch.float16, True, True, 0, True, False),
    ("hbm_columns", torch.bfloat16, True, False, 1, True, False),
    ("all_scatter", torch.float16, True, True, 0, True, False),
    ("all_scatter", torch.bfloat16, True, False, 2, True, False),
    ("all_scatter", torch.float32, False, True, 0, False, False),
    ("send_columns", torch.int8, False, False, 0, False, False),
    ("send_columns", torch.bfloat16, True, True, 1, True, True),
    ("relay_columns", torch.float16, True, False, 1, True, False),
    ("copy_columns", torch.float16, True, False, 2, False, False),
    ("scatter_rows", FP8, False, True, 0, False, False),
    ("scatter_rows", torch.bfloat16, True, False, 2, True, True),
    ("keep_rows", torch.float32, False, False, 0, False, False),
    ("keep_rows", torch.bfloat16, True, True, 1, True, True),
    ("add_rows", torch.float16, True, False, 1, True, False),
    ("one_shot", torch.bfloat16, True, True, 2, True, False),
    ("one_shot_words", torch.bfloat16, True, False, 2, True, False),
    ("one_shot_words", torch.int8, False, True, 1, False, True),
    ("two_shot_words", torch.bfloat16, True, False, 2, True, False),
    ("two_shot_words", torch.int8, False, True, 1, False, False),
    ("two_shot", torch.bfloat16, True, False, 0, True, False),
    ("two_shot", torch.float32, False, True, 2, False, False),
    ("atomic", torch.float16, True, False, 0, True, False),
    ("atomic", torch.int8, False, True, 1, False, True),
    ("copied", torch.bfloat16, True, False, 2, True, False),
    ("copied", torch.float16, False, True, 0, False, True),
    ("both", torch.bfloat16, False, False, 0, True, False),
)
"""Op, dtype, operands by TMA, traced, kind of bias, whole blocks of K, Stream-K. There is every op, and every value of
the others; not every combination, as these differ outside the waits only. Stream-K doubles the time to compile; there
is one with every source, and with everything that announces a tile. They are mostly last, as the first variants are
compiled for AMD, too."""


def unwritten(source: Any) -> frozenset[str]:
    """The descriptors of memory that nobody writes while the kernel runs, with this ``SOURCE``."""
    return OPERANDS if source is matmul.local_source else OPERANDS - {"a_desc"}


def sliced(constants: dict[str, Any]) -> bool:
    """Whether the sink takes some rows or columns of a tile as well as a whole one."""
    return constants["AFTER"] is None and constants["SINK"] in (tile.local_sink, add_sink, push_sink)


def matmul_arguments(op: str, dtype: torch.dtype, tma: bool, traced: bool, bias: int, split: bool, block: int) -> Any:
    constants = PLAIN | OPS[op]
    # One of each kind of scales: one for each row and one for all columns; one for each block; or none.
    scales = tile.ScalePointers(None, 0, None, 0)
    if dtype == FP8 and op in ("copied_rows", "pull_columns"):
        scales = tile.ScalePointers(None, 0, None, 0, tensor(torch.float32), 64, 1, tensor(torch.float32), 32, 1)
    elif dtype == FP8:
        scales = tile.ScalePointers(tensor(torch.float32), 1, tensor(torch.float32) if bias else None, 0)
    out, total = output_dtype(dtype), accumulator_of(dtype)
    own, a, b, c = (tile.Matrix(tensor(one), 4096, 1) for one in (dtype, dtype, dtype, out))
    counts = constants["COURIER"] is not None or constants["AFTER"] in COUNTING
    counters = tensor(torch.int32) if counts else None
    described_a = described(dtype, block) if tma else None
    own_desc = described_a if constants["OWN"] or constants["SOURCE"] is matmul.local_source else None
    a_desc = None if constants["SOURCE"] is pull_source else described_a
    turned = op == "local_transposed"
    strip = described(dtype, block, block // 2) if tma and split and sliced(constants) else None
    return (
        handle(), tensor(torch.int32), tensor(torch.int32), tensor(torch.int32) if split else None, counters,
        own, own_desc, a, a_desc, b, None if turned else described_a, described_a if turned else None,
        strip, None, c, scales, tensor(out) if bias else None,
        _slots(constants, out, total),
        tensor(total) if split else None, tensor(torch.int64) if traced else None, *SIZES, 40, 20,
        3, 2, 256, 3, 512, 16, 8, 100, 2, 4000,
    )  # fmt: skip


def _slots(constants: dict[str, Any], out: torch.dtype, total: torch.dtype) -> Any:
    """The ``slots`` of the op's sink, and of the part that announces its tiles."""
    if constants["SINK"] in (one_shot_words_sink, two_shot_words_sink):
        return Inbox(tensor(word_dtype(out)), 1 << 20)
    if constants["AFTER"] is None and constants["SINK"] is not one_shot_sink:
        return None
    copied = constants["AFTER"] in COUNTING
    return tile.Slots(
        tensor(total if constants["AFTER"] is reduction.added_after else out),
        tensor(out) if copied else None,
        tensor(torch.int32) if copied else None,
    )


SIZES = (1024, 4096, 8192)
"""M, N and K."""


def matmul_case(
    op: str, dtype: torch.dtype, tma: bool, traced: bool, bias: int, even_k: bool, split: bool, targets: tuple[str, ...]
) -> Case:
    cuda = targets[0] in CUDA
    block = 32 if dtype in (torch.float32, torch.int8, FP8) else 64
    words = [op, short(dtype), *(["tma"] if tma else []), *(["trace"] if traced else []), *(["split"] if split else [])]
    constants = PLAIN | OPS[op] | {
        "BIAS": bias, "BLOCK_M": block, "BLOCK_N": block, "BLOCK_K": block, "EVEN_K": even_k, "STREAM_K": split,
        "ACC_DTYPE": tl.int32 if dtype == torch.int8 else tl.float32, "TRACE": traced,
        "num_warps": 4, "num_stages": 3 if cuda else 2,
    }  # fmt: skip
    constants["SLICED"] = sliced(constants)
    constants["STRIPS"] = 2 if split and constants["SLICED"] else 1
    constants["STRIP_STAGES"] = 4
    has = WAITS | SIGNALS
    if op.startswith("local"):
        constants["EPOCHS"] = 148 if split else turnstile.NO_EPOCHS.value
    if op.startswith("local") and not split:
        has = Event.NONE
    if cuda and tma:
        has |= Event.BULK_LOAD
    if cuda and constants["SOURCE"] is arrived_source:
        has |= Event.PROXY_FENCE
    arguments = partial(matmul_arguments, op, dtype, tma, traced, bias, split, block)
    name = f"matmul-{'-'.join(words)}-{'cuda' if cuda else 'hip'}"
    return Case(
        name, matmul.matmul_kernel, arguments, constants, targets, has, unwritten=unwritten(constants["SOURCE"])
    )


def matmuls(old: int | None = None, turn: int = TURN) -> list[Case]:
    """For every op, its first variant for sm_90 and gfx942, and one without Stream-K, if there is one, for the other
    two GPUs; and all variants for sm_90. With ``old``, those that one of the two Tritons compiles in this ``turn``: an
    op for one GPU, and an eighth of the other variants."""
    first = {variant[0]: variant for variant in reversed(VARIANTS)}
    light = {variant[0]: variant for variant in sorted(VARIANTS, key=lambda variant: not variant[-1])}
    others = [variant for variant in VARIANTS if variant != first[variant[0]]]
    cases = []
    for variant in VARIANTS:
        op, dtype, tma, traced, bias, even_k, split = variant
        picked = {CUDA[0]: first[op], CUDA[1]: light[op], HIP[0]: first[op], HIP[1]: light[op]}
        mine = EVERYWHERE if old is None else turns_of(list(OPS).index(op), EVERYWHERE, old, turn)
        here = {one for one in mine if picked[one] == variant}
        if variant in others and (old is None or (others.index(variant) + old + turn) % 8 == 0):
            here.add(CUDA[0])
        for targets, described_a in ((CUDA, tma), (HIP, False)):
            those = tuple(one for one in targets if one in here)
            if those:
                cases.append(matmul_case(op, dtype, described_a, traced, bias, even_k, split, those))
    return cases


def collectives() -> list[Case]:
    """The collectives of the baselines, and the kernel that sends concurrently with the matmul."""
    tile_of = {"COURIER_M": 32, "COURIER_N": 64}
    gathers = [
        Case(f"gather-{kind}", gather_kernel, gather_arguments, {"SITE": 2, "SEGMENTS": segments, **tile_of})
        for kind, segments in (("rows", 1), ("columns", 8))
    ]
    total = {"SITE": 5, "BIAS": 2, "ACC_DTYPE": tl.float32, "BLOCK_M": 32, "BLOCK_N": 64}

    def summing(kind: str, landed: bool, everywhere: bool, last: bool = True) -> Case:
        constants = total | {"LANDED": landed, "LAST": last, "WHOLE": everywhere, "EVERYWHERE": everywhere and last}
        return Case(f"sum-{kind}", reduction.sum_kernel, sum_arguments, constants)

    kinds = {"rows": (False, False), "landed": (True, False), "everywhere": (False, True), "finish": (True, True)}
    sums = [summing(kind, *flags) for kind, flags in kinds.items()]
    summed = summing("chunk", True, True, last=False)
    sends = [
        Case(f"send-{kind}", send_kernel, send_arguments, {"SITE": 3, "BESIDE": kind == "beside", **tile_of})
        for kind in ("beside", "alone")
    ]
    exchanged = {
        "SITE": 2, "WORLD": 4, "BIAS": 2, "ACC_DTYPE": tl.float32, "ROWS_IN_VECTORS": False,
        "BLOCK_M": 16, "BLOCK_N": 64,
    }  # fmt: skip
    carried = {
        "gather": (FP8, 4),
        "scatter": (torch.int32, 1),
        "total": (torch.float16, 2),
        "twice": (torch.float16, 2),
    }
    in_words = [
        Case(
            f"exchange_words-{kind}{of}",
            exchange_words_kernel,
            partial(word_arguments, dtype, sizes),
            {
                **exchanged,
                "SPLIT": kind in ("scatter", "twice"),
                "TOTAL": kind != "gather",
                "EVERYWHERE": kind == "twice",
                "BY_ROWS": kind == "gather",
                "ACC_DTYPE": tl.int32 if dtype == torch.int32 else tl.float32,
                "SOURCES": 4,
                "PACK": pack,
                "BLOCK_M": 1,
                "BLOCK_N": 1024 * pack,
            },
            targets=CUDA[:1] if of else EVERYWHERE,
            has=Event.CLOCK,
            wide=frozenset({"argument 3"}),
        )
        for of, sizes in PARTS.items()
        for kind, (dtype, pack) in carried.items()
    ]
    exchanges = [
        Case(
            f"exchange-{kind}{of}",
            exchange_kernel,
            partial(exchange_arguments, sizes),
            {
                **exchanged,
                "SPLIT": kind in ("scatter", "twice"),
                "TOTAL": kind != "gather",
                "EVERYWHERE": kind == "twice",
                "BY_ROWS": kind == "gather",
            },
            targets=CUDA[:1] if of else EVERYWHERE,
        )
        for of, sizes in PARTS.items()
        for kind in carried
    ]
    site, one_warp = {"SITE": 2}, {"num_warps": 1}
    small = [
        Case("entry", entry_kernel, turnstile_arguments, one_warp, has=SIGNALS),
        Case("entered", entered_kernel, lambda: (*turnstile_arguments(), 3, 2), site | one_warp, has=WAITS),
        Case("arrival", arrival_kernel, arrival_arguments, site | one_warp, has=WAITS),
        Case("landing", landing_kernel, landing_arguments, site | one_warp, has=WAITS | SIGNALS),
        Case("exit", exit_kernel, turnstile_arguments, site | one_warp | {"MEET": True}, has=WAITS | SIGNALS),
        Case("copy", copy_kernel, copy_arguments, {"BLOCK": 128}),
        Case("copy-half", copy_kernel, copy_half_arguments, {"BLOCK": 128}),
    ]
    return [
        *small,
        summed,
        *in_words,
        *(replace(one, has=WAITS | SIGNALS) for one in (*gathers, *sums, *sends, *exchanges)),
    ]


def exchange_arguments(sizes: tuple[int, ...]) -> Any:
    flags = tensor(torch.int32), tensor(torch.int32)
    bias = tensor(torch.float16)
    return handle(), *flags, tensor(torch.float16), 65536, half_matrix(), half_matrix(), bias, *sizes


def word_arguments(dtype: torch.dtype, sizes: tuple[int, ...]) -> Any:
    matrix = tile.Matrix(tensor(dtype), 4096, 1)
    words, inbox = max(16, sizes[1] * dtype.itemsize // 4), tensor(word_dtype(dtype))
    return handle(), tensor(torch.int32), inbox, 65536, matrix, matrix, tensor(dtype), *sizes, words, 1056


def copy_arguments() -> Any:
    return tile.Matrix(tensor(torch.float16), 1, 4096), half_matrix(), 100, 200, None, 0


def copy_half_arguments() -> Any:
    return half_matrix(), half_matrix(), 100, 200, tensor(torch.int32), 112


def turnstile_arguments() -> Any:
    return handle(), tensor(torch.int32)


def arrival_arguments() -> Any:
    return *turnstile_arguments(), tensor(torch.int32), 5, 3


def landing_arguments() -> Any:
    return *turnstile_arguments(), tensor(torch.int32), tensor(torch.int32), 5


def gather_arguments() -> Any:
    return handle(), tile.Flags(tensor(torch.int32)), half_matrix(), half_matrix(), 1024, 4096


def sum_arguments() -> Any:
    matrices = half_matrix(), half_matrix(), half_matrix()
    return *landing_arguments(), *matrices, tensor(torch.float16), 512, 512, 1024, 4096, 512


def send_arguments() -> Any:
    flags = tile.Flags(tensor(torch.int32), tensor(torch.int32))
    return handle(), flags, half_matrix(), 0, 1024, 4096, 256


def half_matrix() -> tile.Matrix:
    return tile.Matrix(tensor(torch.float16), 4096, 1)
