"""Compiles kernels for GPUs that the machine lacks, through the same JIT path that a launch takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton
from addresses import distances
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import MockTensor

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
"""The version of the Triton that compiles."""
TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}

_ALL = TARGETS | {"sm_80": GPUTarget("cuda", 80, 32)}
"""The targets, and a GPU without TMA, for which few kernels are compiled."""


class _Driver:
    """A driver, as far as the JIT uses it before it launches anything."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        """A number for each target: the JIT keeps one compiler per device."""
        return list(_ALL.values()).index(self._target)

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def target(name: str) -> Iterator[GPUTarget]:
    """Let Triton believe that the GPU ``name`` is the current device."""
    chosen = _ALL[name]
    triton.runtime.driver.set_active(_Driver(chosen))
    yield chosen


def assembly(kernel: Any, *args: Any, assembled: bool = True, **options: Any) -> str:
    """PTX or AMD assembly of ``kernel`` for the current :func:`target`. Dtypes stand for tensors of that dtype.
    ``assembled``: NVIDIA's assembler gets the PTX, too, which takes a sixth of the time."""
    with knobs.runtime.scope(), knobs.cache.scope():
        if not assembled:
            knobs.runtime.add_stages_inspection_hook = _unassembled
            knobs.cache.dir = f"{knobs.cache.dir}-unassembled"  # 3.6 has one cache key for both
        return text_of(kernel.warmup(*args, grid=(1,), **options))


def _unassembled(backend: object = None, stages: dict[str, Any] | None = None, *_: object) -> tuple[str, str] | None:
    """Triton's hook into the stages of a compilation: it leaves out the last one. Called without stages, it returns
    the key of such compilations in the caches of newer Tritons."""
    if stages is None:
        return "unassembled", "unassembled"
    if "cubin" in stages:
        stages["cubin"] = lambda source, metadata: b""
    return None


def text_of(compiled: Any) -> str:
    """PTX or AMD assembly of a compiled kernel. Raises if the kernel cuts off part of a distance between heaps."""
    if "ptx" in compiled.asm:
        return str(compiled.asm["ptx"])
    if cut := distances(compiled.asm["ttgir"])[1]:
        raise AssertionError("\n".join(["half of the way to a peer's memory is cut off:", *cut]))
    return str(compiled.asm["amdgcn"])


def tensor(dtype: Any) -> MockTensor:
    """A stand-in for a tensor argument."""
    return MockTensor(dtype)
