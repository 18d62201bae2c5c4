"""What differs between NVIDIA, AMD and the simulator. All inline assembly of Iris is here."""

import os
import time
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer, num_warps
from triton.language.target_info import cuda_capability_geq, is_hip, is_hip_cdna3


def _host_clock_ns() -> int:
    """The simulator's clock, the same for all ranks of the host."""
    return time.monotonic_ns()


_host_clock_ns.__triton_builtin__ = True  # type: ignore[attr-defined]

SIMULATED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
MEMREALTIME_TICK_NS: tl.constexpr = tl.constexpr(10)
"""AMD's real-time counter runs at 100 MHz on gfx9 (CDNA 3 ISA guide, S_MEMREALTIME)."""


@triton.constexpr_function
def on_amd() -> bool:
    """Whether the kernel is compiled for an AMD GPU."""
    return not SIMULATED and is_hip()


@triton.constexpr_function
def takes_modifiers(volatile: bool) -> bool:
    """Whether a load takes a cache modifier. NVIDIA has none for volatile loads."""
    return on_amd() or not volatile


@triton.constexpr_function
def has_tma() -> bool:
    """Whether the kernel is compiled for a GPU that has TMA."""
    return not SIMULATED and cuda_capability_geq(9)


@triton.jit
def clock_ns():
    """Nanoseconds of a clock that all programs of this GPU share, int64. Resolution: about 1 µs or better."""
    if SIMULATED:
        return tl.full((), _host_clock_ns(), tl.int64)
    elif is_hip():
        # Triton's memrealtime() waits for vector memory, but this is a scalar instruction, whose wait is lgkmcnt. LLVM
        # adds no wait for inline assembly.
        ticks = tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
        )
        return ticks * MEMREALTIME_TICK_NS
    else:
        return globaltimer()


@triton.jit
def beyond(ptr, steps, STEP: tl.constexpr):
    """A pointer ``steps`` times ``STEP`` bytes after ``ptr``, or before it, however far that is.

    On AMD Triton assumes that a sum of a pointer to a tensor of up to 2 GiB and an offset stays within that tensor: it
    keeps 32 bits of the offset, and accesses beyond 2 GiB, or in front of the tensor, do nothing. After a cast it no
    longer knows which tensor the pointer belongs to, but still knows its alignment and contiguity.
    """
    STRIDE: tl.constexpr = STEP * 8 // _bits(ptr)
    if on_amd():
        return ptr.to(_other_pointer(ptr), bitcast=True).to(ptr.dtype, bitcast=True) + steps * STRIDE
    else:
        return ptr + steps * STRIDE


@triton.jit
def store_own(ptr, value, mask=None):
    """Store to this rank's memory, where peers store, too. On AMD it is written through: else the L2 of one of the dies
    could keep it, and write it back later, over what a peer has stored by then."""
    if on_amd():
        tl.store(ptr, value, mask=mask, cache_modifier=".wt")
    else:
        tl.store(ptr, value, mask=mask)


@triton.constexpr_function
def _bits(ptr: Any) -> int:
    """Bits that an element takes in memory."""
    return max(8, int(ptr.dtype.element_ty.primitive_bitwidth))


@triton.constexpr_function
def _other_pointer(ptr: Any) -> Any:
    """Another type of pointer, to elements of the same size; a cast to the same type would do nothing."""
    element = ptr.dtype.element_ty
    integers = {8: tl.int8, 16: tl.int16, 32: tl.int32, 64: tl.int64}
    floats = {8: tl.float8e5, 16: tl.float16, 32: tl.float32, 64: tl.float64}
    return tl.pointer_type((integers if element.is_floating() else floats)[max(8, element.primitive_bitwidth)])


@triton.jit
def repeated(block):
    """Whether a program has more threads than ``block`` has elements, so that several hold the same one; constexpr."""
    if SIMULATED:
        return False
    else:
        return block.numel < num_warps() * (64 if is_hip() else 32)


_AHEAD_BITS = 8 * (96 << 10)
_MOST_BLOCKS = 7


@triton.constexpr_function
def copy_stages(dtype: tl.dtype, numel: int) -> int:
    """Stages of a loop that copies blocks of ``numel`` elements. On NVIDIA up to seven blocks are loaded ahead, if 96
    KiB of shared memory hold them: a program that waits for each block copies 11 GB/s over NVLink, one that loads ahead
    20 to 24 (2 × H200, 2026-11-23)."""
    if is_hip():
        return 1
    return 1 + min(_AHEAD_BITS // int(numel * dtype.primitive_bitwidth), _MOST_BLOCKS)


@triton.constexpr_function
def dot_precision(precision: str) -> str:
    """The ``input_precision`` to give ``tl.dot``. Of AMD's GPUs only CDNA 3 has TF32; others refuse "tf32" for any
    dtype."""
    return "ieee" if precision == "tf32" and is_hip() and not is_hip_cdna3() else precision


@triton.jit
def meet_to_publish():
    """The CTA barrier between this program's stores and the release at sys scope that announces them.

    On NVIDIA, where releases are cumulative, a CTA barrier alone suffices. On AMD every wave first writes back its own
    stores and waits for that (LLVM AMDGPU memory model, gfx942: release at system scope), as neither the barrier nor
    a release by one wave waits for the stores of other waves.
    """
    if on_amd():
        tl.inline_asm_elementwise(
            "buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)\nv_mov_b32 $0, 0", "=v", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def wait_bulk_stores():
    """Wait until this thread's TMA stores are complete, not only read out of shared memory.

    Needed between a TMA store and the flag that announces it on Triton 3.7 and older, whose own wait is
    ``.read`` only (PTX ISA, cp.async.bulk.wait_group). Does nothing where there is no TMA.
    """
    if has_tma():
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def fence_async_proxy():
    """Order this thread's earlier acquire before its later TMA loads of data that a peer stored.

    Ordinary accesses and TMA go through different proxies (PTX ISA, fence.proxy.async). Does nothing where there is no
    TMA.
    """
    if has_tma():
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def load_fresh(pointers, mask):
    """Load the current value from memory, whichever rank wrote it, or 0 where masked; for words that are polled. Orders
    nothing."""
    if on_amd():
        return tl.load(pointers, mask=mask, other=0, cache_modifier=".cv")
    else:
        return tl.load(pointers, mask=mask, other=0, volatile=True)
