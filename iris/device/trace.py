"""Record what a program did when; see :mod:`iris.trace` for the host's half. ``GEMM``, ``WAIT`` and ``FETCH`` are the
kinds of events: a program computes, waits for data, or moves it."""

import triton
import triton.language as tl

from iris.device.arch import clock_ns
from iris.device.sync import barrier

CAPACITY: tl.constexpr = tl.constexpr(1024)
"""Events that each program can record; later ones are counted, not kept."""
FIELDS: tl.constexpr = tl.constexpr(4)
WORDS_PER_PROGRAM: tl.constexpr = tl.constexpr((CAPACITY.value + 1) * FIELDS.value)

KINDS = {0: "wg_gemm", 1: "wg_gemm_wait", 2: "wg_fetch"}
GEMM: tl.constexpr = tl.constexpr(0)
WAIT: tl.constexpr = tl.constexpr(1)
FETCH: tl.constexpr = tl.constexpr(2)


@triton.jit
def record(trace_ptr, kind, start_ns, end_ns, detail):
    """Append one event of this program.

    Args:
        trace_ptr: the ``buffer`` of an :class:`iris.Trace`.
        kind: ``GEMM``, ``WAIT`` or ``FETCH`` of this module.
        start_ns, end_ns: as :func:`iris.device.arch.clock_ns` told them.
        detail: a number of one's own, such as the tile's; waits of -1 are left out of :meth:`iris.Trace.waited_s`.
    """
    mine = trace_ptr + tl.program_id(0).to(tl.int64) * WORDS_PER_PROGRAM
    count = tl.load(mine)
    if count < CAPACITY:
        slot = mine + FIELDS * (count + 1)
        tl.store(slot, kind)
        tl.store(slot + 1, start_ns)
        tl.store(slot + 2, end_ns)
        tl.store(slot + 3, detail)
    tl.debug_barrier()
    tl.store(mine, count + 1)
    tl.debug_barrier()


@triton.jit
def meeting_kernel(handle, times, MEETINGS: tl.constexpr):
    """When this rank has met all others, again and again. Run by one program."""
    for meeting in range(MEETINGS):
        barrier(handle)
        tl.store(times + meeting, clock_ns())
