"""Cases: kernels and the arguments to compile them with."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from compiler import TARGETS, VERSION, assembly, target, tensor
from listing import Event, Listing
from triton.tools.tensor_descriptor import TensorDescriptor

from iris.device.handle import Handle
from iris.device.matmul import matmul_kernel

EVERYTHING = os.environ.get("IRIS_ASSEMBLY") == "all"
"""Whether each Triton compiles each kernel for each GPU (``scripts/assembly --all``); else they share the work."""
OLD = int(VERSION < (3, 9))
"""Whether this is not the newest Triton; scripts/assembly runs two."""
TURN = int(os.environ.get("IRIS_TEST_SEED", "0"))
"""Chooses the part that this run does of all that would be too much for one run; another number is another part."""
EVERYWHERE = tuple(TARGETS)
CUDA = ("sm_90", "sm_100")
HIP = ("gfx942", "gfx950")
WAITS = Event.ACQUIRE | Event.BARRIER | Event.CLOCK
SIGNALS = Event.RELEASE | Event.BARRIER
T = TypeVar("T")


def in_turn(values: Sequence[T]) -> Sequence[T]:
    """The ``values`` that this Triton compiles; the other one compiles the rest."""
    return values if EVERYTHING else values[(OLD + TURN) % 2 :: 2]


def turns_of(number: int, targets: Sequence[str], old: int = OLD, turn: int = TURN) -> Sequence[str]:
    """The one of ``targets`` for which this Triton compiles kernel ``number``: a GPU of one vendor. The other Triton
    compiles it for one of the other vendor's; after four turns each has compiled it for all."""
    vendors = [those for one in (CUDA, HIP) if (those := [target for target in one if target in targets])]
    mine = vendors[(number + old + turn) % len(vendors)]
    return [mine[(number // 2 + turn // 2) % len(mine)]]


@dataclass(frozen=True)
class Case:
    """A kernel and what to compile it with. Names of cases are ``kernel`` or ``kernel-variant``.

    Attributes:
        arguments: makes the arguments; dtypes stand in for tensors.
        constants: constexpr arguments and launch options, by name.
        has: what its assembly must contain, so that no rule passes because it finds nothing to check.
        wide: arguments, by their names in :mod:`listing`, that point to data which moves 16 bytes at a time.
        unwritten: parameters, by name, whose descriptors are of memory that nobody writes while the kernel runs.
    """

    name: str
    kernel: Any
    arguments: Callable[[], tuple[Any, ...]]
    constants: dict[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = EVERYWHERE
    has: Event = Event.NONE
    wide: frozenset[str] = frozenset()
    unwritten: frozenset[str] = frozenset()

    def unwritten_in(self, listing: Listing) -> frozenset[str]:
        """The names that ``unwritten`` have in ``listing``, the listing of this case."""
        passed = zip(self.kernel.arg_names, self.arguments(), strict=False)  # constants are not among the latter
        names = [name for name, value in passed if isinstance(value, TensorDescriptor)]
        here = zip(names, listing.descriptors, strict=True)
        return frozenset(argument for name, argument in here if name in self.unwritten)


def short(dtype: torch.dtype) -> str:
    """A dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def of(*dtypes: Any) -> Callable[[], tuple[Any, ...]]:
    """Arguments: a tensor for each dtype; anything else unchanged."""
    return lambda: tuple(tensor(one) if isinstance(one, torch.dtype) else one for one in dtypes)


def handle() -> Handle:
    """A device handle to compile with."""
    return tensor(Handle)  # type: ignore[no-any-return]


def with_handle(*dtypes: Any) -> Callable[[], tuple[Any, ...]]:
    """As :func:`of`, after a device handle."""
    return lambda: (handle(), *of(*dtypes)())


def described(dtype: torch.dtype, rows: int, cols: int | None = None) -> TensorDescriptor:
    """A descriptor of a matrix to compile with."""
    return TensorDescriptor(tensor(dtype), [4096, 4096], [4096, 1], [rows, cols or rows])


def compile_case(case: Case, target_name: str) -> str:
    """The assembly of ``case``. Only NVIDIA's assembler finds errors in inline assembly, but it takes long for the many
    variants of the matmul kernel, so it only gets those that ops launch."""
    assembled = EVERYTHING or case.kernel is not matmul_kernel
    with target(target_name):
        return assembly(case.kernel, *case.arguments(), assembled=assembled, **case.constants)
