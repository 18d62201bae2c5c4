"""Compiles kernels for GPUs that the machine lacks, through the same JIT path that a launch takes."""

from __future__ import annotations

from typing import Any

import triton
from addresses import distances
from triton import knobs

from iris.compiling import compiling_for, stand_in, target_named

target, tensor = compiling_for, stand_in
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
"""The version of the Triton that compiles."""
TARGETS = {name: target_named(name) for name in ("sm_90", "sm_100", "gfx942", "gfx950")}


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
