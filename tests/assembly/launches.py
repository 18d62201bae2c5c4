"""The launches of ops: ops are called on a stand-in for a context, and each launch is only compiled, for a GPU that the
machine lacks. So kernels are compiled with what ops pass to them, not with what a case says."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import rules
import torch
from case import Case, short
from compiler import TARGETS, target, text_of
from listing import read
from matmuls import unwritten
from triton.runtime.jit import JITFunction

from iris import ops
from iris.device.handle import Handle
from iris.ops.algorithms import TRAITS
from iris.ops.choice import Adjusted
from iris.symmetric import SymmetricHeap

T = TypeVar("T")


class Device(NamedTuple):
    """A GPU as PyTorch describes it, and what a program may have there: bytes of shared memory, and columns of
    Blackwell's tensor memory."""

    name: str
    num_sms: int
    capability: tuple[int, int]
    shared_nbytes: int
    tensor_columns: int = 0


DEVICES = {
    "sm_90": Device("NVIDIA H200", 132, (9, 0), 227 << 10),
    "sm_100": Device("NVIDIA B200", 148, (10, 0), 227 << 10, 512),
    "gfx942": Device("AMD Instinct MI300X", 304, (9, 4), 64 << 10),
    "gfx950": Device("AMD Instinct MI355X", 256, (9, 5), 160 << 10),
}


class Backend:
    """A backend, as far as the copy engine uses it; it copies nothing."""

    without_atomics = ()

    def __init__(self, world_size: int) -> None:
        self.bases = [0] * world_size

    def side_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, *_: object) -> None: ...

    copy_rows = wait_word = write_word = copy


class Context:
    """A context, as far as ops use it, on rank 1. All that ranks do together succeeds; its memory is never read."""

    def __init__(self, target_name: str, world_size: int) -> None:
        self.rank, self.world_size, self.device = 1, world_size, torch.device("cpu")
        self.backend_name, self.num_sms = TARGETS[target_name].backend, DEVICES[target_name].num_sms
        self.handle = self.alone = Handle(*(torch.zeros(8, dtype=torch.int64) for _ in Handle._fields))
        self._backend = Backend(world_size)
        self._kept: dict[Hashable, Any] = {}

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
        made: T = self._kept[key]
        return made

    workspace = kept

    def has_workspace(self, key: Hashable) -> bool:
        return key in self._kept

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        return True

    heap_offset = SymmetricHeap.heap_offset

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def check(self, *_: object) -> None: ...

    agree = barrier = broke_off = check


class Launch(NamedTuple):
    """A kernel, its arguments, and the result of the compiler."""

    kernel: JITFunction[Any]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    compiled: Any


@contextmanager
def launches(target_name: str) -> Iterator[dict[str, Launch]]:
    """The different kernels that are launched in the block, compiled for ``target_name``, by their hash. PyTorch
    describes this GPU, and its library multiplies nothing."""
    device, found = DEVICES[target_name], dict[str, Launch]()
    amd = TARGETS[target_name].backend == "hip"
    run = JITFunction.run

    def compiled(self: JITFunction[Any], *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        made = run(self, *arguments, grid=grid, warmup=True, **constants)
        found[made.hash] = Launch(self, arguments, constants, made)

    def nothing(*_: object, **__: object) -> None: ...

    replaced = {
        "iris.ops.target._device_name": lambda _: device.name,
        "iris.ops.target._shared_nbytes": lambda _: None if amd else device.shared_nbytes,  # unknown to PyTorch
        "iris.ops.target._capability": lambda _: device.capability,
        "torch.cuda.is_current_stream_capturing": lambda: False,
        "torch.version.hip": "7.0" if amd else None,
        "torch.zeros": torch.empty,  # large, and never read
        **dict.fromkeys(("torch.matmul", "torch.addmm", "torch._scaled_mm"), nothing),
    }
    with ExitStack() as stack:
        stack.enter_context(target(target_name))
        stack.enter_context(patch.dict(os.environ, {"IRIS_TUNED": os.devnull}))  # no rows of the user who runs this
        stack.enter_context(patch.object(JITFunction, "run", compiled))
        for name, value in replaced.items():
            stack.enter_context(patch(name, value))
        yield found


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid PyTorch to round float32 to TF32 in the block."""
    switch = torch.backends.cuda.matmul
    before, switch.fp32_precision = switch.fp32_precision, "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        switch.fp32_precision = before


class Kind(NamedTuple):
    """Dtypes of the operands and the output; ``scales``: ``one``, of ``rows`` and columns, or of ``blocks``."""

    dtype: torch.dtype
    made: torch.dtype
    scales: str = ""
    tf32: bool = False


class Size(NamedTuple):
    """The sizes of one rank's matmul, as in :class:`iris.ops.Problem`, and the number of ranks."""

    m: int
    n: int
    k: int
    world_size: int


FP8 = torch.float8_e4m3fn
KINDS = (
    Kind(torch.float32, torch.float32, tf32=True),
    Kind(FP8, torch.float32, "rows"),
    Kind(torch.int8, torch.int32),
    Kind(FP8, torch.bfloat16, "one"),
    Kind(torch.float16, torch.float16),
    Kind(FP8, torch.bfloat16, "blocks"),
    Kind(torch.bfloat16, torch.bfloat16),
    Kind(torch.int8, torch.bfloat16, "rows"),
    Kind(torch.float32, torch.float32),
)
FEW_ROWS, RAGGED, LARGE = SIZES = Size(64, 4096, 4096, 4), Size(1000, 1000, 1000, 5), Size(8192, 8192, 28672, 8)
"""With few rows parts travel as words; 1000 is no multiple of a block; for the last, the largest tiles are picked."""
BIASES = "", "column", "row"


@dataclass(frozen=True)
class Call:
    """A call of an op by an algorithm's name, or by the algorithm's best known config, changed by ``options``."""

    op: str
    algorithm: str
    gather_dim: int | None
    options: tuple[tuple[str, Any], ...]
    kind: Kind
    size: Size
    transposed: bool
    bias: str

    def __str__(self) -> str:
        kind = self.kind
        words = [self.op, self.algorithm, *(() if self.gather_dim is None else (("rows", "columns")[self.gather_dim],))]
        words += [name if value is True else f"{name}={value}" for name, value in self.options]
        words += [short(kind.dtype), short(kind.made), kind.scales, "tf32" if kind.tf32 else ""]
        words += [f"{self.size.m}x{self.size.world_size}", "transposed" if self.transposed else "", self.bias]
        return "-".join(filter(None, words))

    def make(self, ctx: Any) -> None:
        """Call the op. The operands are never read, so they take no memory."""
        (m, n, k, world), (dtype, made, scales, _) = self.size, self.kind
        by_rows, by_columns = self.gather_dim == 0, self.gather_dim == 1
        a = torch.empty(m // world if by_rows else m, k // world if by_columns else k, dtype=dtype)
        b = torch.empty(n, k, dtype=dtype).t() if self.transposed else torch.empty(k, n, dtype=dtype)
        rows = m // world if self.op == "matmul_reduce_scatter" else m
        output = torch.empty(rows, n * world if self.op == "matmul_all_scatter" else n, dtype=made)
        bias_shape = {"": None, "column": (n,), "row": (rows, 1)}[self.bias]
        bias = None if bias_shape is None else torch.empty(bias_shape, dtype=made)
        high, deep, across = a.shape[0], -(-k // 128), -(-n // 128)
        of = {"": (), "one": ((1,), (1,)), "rows": ((high,), (n,)), "blocks": ((high, deep), (deep, across))}
        given = zip(("scale_a", "scale_b"), of[scales], strict=False)
        named: dict[str, Any] = {name: torch.empty(shape, dtype=torch.float32) for name, shape in given}
        if self.gather_dim is not None:
            named["gather_dim"] = self.gather_dim
        config = Adjusted(self.algorithm, self.options) if self.options else self.algorithm
        getattr(ops, self.op)(ctx, output, a, b, bias, config=config, **named)


def wrong_with(call: Call, target_name: str) -> list[str]:
    """The errors in what ``call`` launches on the GPU ``target_name``."""
    try:
        with launches(target_name) as found, tf32(call.kind.tf32):
            call.make(Context(target_name, call.size.world_size))
    except Exception:  # noqa: BLE001 (whatever the compiler raises; not all of it can pass to another process)
        return [traceback.format_exc()]
    wrong = [words for launch in found.values() for words in _wrong_with_launch(launch, target_name)]
    return wrong if found else ["nothing is launched"]


def _wrong_with_launch(launch: Launch, target_name: str) -> list[str]:
    made, device = launch.compiled, DEVICES[target_name]
    listing = read(text_of(made))
    source = launch.constants.get("SOURCE")
    names = frozenset[str]() if source is None else unwritten(source)
    case = Case(made.name, launch.kernel, lambda: launch.arguments, unwritten=names)
    wrong = rules.broken(listing, case.unwritten_in(listing))
    if made.metadata.shared > device.shared_nbytes:
        wrong.append(f"{made.metadata.shared} bytes of shared memory: {device.shared_nbytes} at most")
    if (columns := getattr(made.metadata, "tmem_size", 0)) > device.tensor_columns:
        wrong.append(f"{columns} columns of tensor memory: {device.tensor_columns} at most")
    return [f"{case.name}: {words}" for words in wrong]


class Way(NamedTuple):
    """An op, its algorithm, and for a gather the sharded dimension of A."""

    op: str
    algorithm: str
    gather_dim: int | None


WAYS = tuple(
    Way(op, algorithm, gather_dim)
    for op, of_op in TRAITS.items()
    for algorithm in of_op
    for gather_dim in ((0, 1) if op == "all_gather_matmul" else (None,))
)


def options_of(way: Way, split: bool) -> list[dict[str, Any]]:
    """No options, and those that change the compiled code; ``split``: with Stream-K, too, which takes twice as long."""
    traits = TRAITS[way.op][way.algorithm]
    options: list[dict[str, Any]] = [{}]
    if traits.exchange:
        options.append({"own_matmul": True})
    elif traits.comm_programs or way[:2] == ("all_gather_matmul", "push"):
        options.append({"comm_sms": 16})
    elif traits.library and way.algorithm != "baseline":
        options.append({"num_chunks": 2})
    if split and (traits.exchange or not traits.library):
        options.append({"stream_k": True, **({"own_matmul": True} if traits.exchange else {})})
    return options


CALLS_EACH = 3
"""The number of calls of each way on each target. Over all targets each way has all kinds of dtypes."""


def call_of(number: int, target_name: str, turn: int, split: bool) -> Call:
    """Call number ``turn`` of way number ``number``: sizes, dtypes and other options take turns; ``split``: as for
    :func:`options_of`."""
    way, here = WAYS[number], list(TARGETS).index(target_name)
    kind = KINDS[(number + CALLS_EACH * here + turn) % len(KINDS)]
    options, size = options_of(way, split), SIZES[(number + here) % len(SIZES)]
    if kind.scales == "blocks" and way.gather_dim == 1 and size == RAGGED:  # ranks cut K within blocks
        size = LARGE
    others = number // (2 * len(TARGETS)) + turn
    taken = options[(here + turn) % len(options)]
    return Call(*way, tuple(taken.items()), kind, size, bool(others % 2), BIASES[others % len(BIASES)])
