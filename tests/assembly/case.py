"""A kernel to compile and what to compile it with."""

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
"""Whether each Triton compiles each kernel for each GPU (``scripts/assembly --all``); else they take turns."""
OLD = int(VERSION < (3, 9))
"""Whether this is not the newest Triton; scripts/assembly runs two."""
TURN = int(os.environ.get("IRIS_TEST_SEED", "0"))
"""Which part of what is too much for each run is this one's: with another number it is another part."""
EVERYWHERE = tuple(TARGETS)
CUDA = ("sm_90", "sm_100")
HIP = ("gfx942", "gfx950")
WAITS = Event.ACQUIRE | Event.BARRIER | Event.CLOCK
SIGNALS = Event.RELEASE | Event.BARRIER
T = TypeVar("T")


def in_turn(values: Sequence[T]) -> Sequence[T]:
    """Those of ``values`` that this Triton compiles; the other one compiles the others."""
    return values if EVERYTHING else values[(OLD + TURN) % 2 :: 2]


def turns_of(number: int, targets: Sequence[str], old: int = OLD, turn: int = TURN) -> Sequence[str]:
    """For which of ``targets`` kernel ``number`` is compiled: for one GPU of each vendor's, the other Triton compiling
    it for the others; after two turns each has compiled it for all."""
    mine = (number + old + turn) % 2
    return targets if len(targets) == 1 else [one for one in (CUDA[mine], HIP[mine]) if one in targets]


@dataclass(frozen=True)
class Case:
    """A kernel and what to compile it with. Names of a case: ``kernel`` or ``kernel-variant``.

    Attributes:
        arguments: makes them; dtypes stand in for tensors.
        constants: constexpr arguments and launch options, by name.
        has: what its assembly must contain, so that no rule passes for want of anything to look at.
        wide: arguments, as :mod:`listing` calls them, that point to data which moves 16 bytes at a time.
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
        """``unwritten`` as ``listing``, this case's, calls them."""
        passed = zip(self.kernel.arg_names, self.arguments(), strict=False)  # constants are not among the latter
        names = [name for name, value in passed if isinstance(value, TensorDescriptor)]
        here = zip(names, listing.descriptors, strict=True)
        return frozenset(argument for name, argument in here if name in self.unwritten)


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


def described(dtype: torch.dtype, rows: int, cols: int | None = None) -> TensorDescriptor:
    """A descriptor of a matrix to compile with."""
    return TensorDescriptor(tensor(dtype), [4096, 4096], [4096, 1], [rows, cols or rows])


def compile_case(case: Case, target_name: str) -> str:
    """The assembly of ``case``. NVIDIA's assembler, which alone finds what is wrong in inline assembly, takes long for
    the many variants of the matmul kernel, and is given what ops launch of it."""
    assembled = EVERYTHING or case.kernel is not matmul_kernel
    with target(target_name):
        return assembly(case.kernel, *case.arguments(), assembled=assembled, **case.constants)
