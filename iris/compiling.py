"""Kernels compiled for GPUs that the machine need not have: their assembly can be read, and what does not compile is
found without a GPU, as in continuous integration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor

from iris import backends
from iris.device.handle import Handle
from iris.errors import ArgumentError, BackendError

_TARGET = re.compile(r"sm_(\d{2,3})a?|(gfx[0-9a-f]{3,5})")


class _Driver:
    """A driver, as far as Triton uses it before it launches anything."""

    def __init__(self, name: str, target: GPUTarget) -> None:
        self._name, self._target = name, target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        """The name, as Triton keeps one compiler for each device."""
        return self._name

    def get_current_stream(self, device: object) -> int:
        return 0


def target_named(name: str) -> GPUTarget:
    """The target ``sm_…`` or ``gfx…``, as Triton describes it."""
    found = _TARGET.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        raise ArgumentError("assembly", "target", "sm_ and a number, or gfx…, such as sm_90 or gfx942", repr(name))
    return GPUTarget("hip", found[2], 64) if found[2] else GPUTarget("cuda", int(found[1]), 32)


@contextmanager
def compiling_for(name: str) -> Iterator[None]:
    """Inside this block Triton takes a GPU of this name for the current device."""
    driver = triton.runtime.driver
    before = driver._active  # may be None, while a look at driver.active, or reset_active, would ask for a GPU
    driver.set_active(_Driver(name, target_named(name)))
    try:
        yield
    finally:
        driver._active = before


def stand_in(argument: Any) -> Any:
    """What a kernel is compiled with for ``argument``; see :func:`assembly`."""
    if argument is Handle:
        argument = Handle(torch.int64, torch.int64)
    if isinstance(argument, tuple):
        parts = map(stand_in, argument)
        return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
    return MockTensor(argument) if isinstance(argument, torch.dtype) else argument


def assembly(kernel: Any, *arguments: Any, target: str, **options: Any) -> str:
    """The assembly of a kernel for a GPU that the machine need not have: PTX, or AMD's.

    ::

        IRIS_BACKEND=compile python -c '
        import torch, iris
        from greet import greet
        print(iris.assembly(greet, iris.Handle, torch.int32, target="sm_90", BLOCK=8))'

    Args:
        kernel: a ``@triton.jit`` function that is not interpreted: on a machine without a GPU, set
            ``IRIS_BACKEND=compile``.
        arguments: as at a launch. A dtype stands for a tensor of it, ``iris.Handle`` for ``ctx.handle``, and
            ``torch.int64`` for ``ctx.heap_bases``, also inside tuples.
        target: the GPU, such as ``"sm_90"`` (H100, H200), ``"sm_100"`` (B200), ``"gfx942"`` (MI300X) or ``"gfx950"``
            (MI355X).
        options: arguments by name, and launch options such as ``num_warps``.

    Meanwhile no other thread of the process may launch or compile a kernel: Triton has one driver.

    Raises:
        ArgumentError: ``kernel`` is no kernel, or ``target`` no GPU's name.
        BackendError: kernels are interpreted in this process.
        triton.CompilationError: the kernel does not compile; its cause says why.
    """
    if not isinstance(kernel, JITFunction):
        if backends.chosen().name == "sim":
            raise BackendError("assembly: kernels are interpreted in this process; start it with IRIS_BACKEND=compile")
        raise ArgumentError("assembly", "kernel", "a @triton.jit function (of an autotuned one, its .fn)", repr(kernel))
    runtime = {one.name for one in kernel.params if not one.is_constexpr}
    named = {name: stand_in(value) if name in runtime else value for name, value in options.items()}
    with compiling_for(target):
        compiled = kernel.warmup(*map(stand_in, arguments), grid=(1,), **named)
    return str(compiled.asm["ptx" if "ptx" in compiled.asm else "amdgcn"])
