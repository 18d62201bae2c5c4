"""Record what a program did when; see :mod:`iris.trace` for the host's half. ``GEMM``, ``WAIT`` and ``FETCH`` are the
kinds of events: a program computes, waits for data, or moves it."""

import triton
import triton.language as tl

from iris.device.arch import clock_ns
from iris.device.rma import points_to
from iris.device.sync import barrier

CAPACITY: tl.constexpr = tl.constexpr(1024)
"""Events that each program can record; later ones are counted, not kept."""
FIELDS: tl.constexpr = tl.constexpr(4)
WORDS_PER_PROGRAM: tl.constexpr = tl.constexpr((CAPACITY.value + 1) * FIELDS.value)

PROGRAMS: tl.constexpr = tl.constexpr(1)
"""Which word says for how many programs there is room."""
LACKING: tl.constexpr = tl.constexpr(2)
"""Which word says that there were more."""

KINDS = {0: "wg_gemm", 1: "wg_gemm_wait", 2: "wg_fetch"}
GEMM: tl.constexpr = tl.constexpr(0)
WAIT: tl.constexpr = tl.constexpr(1)
FETCH: tl.constexpr = tl.constexpr(2)


@triton.jit
def record(trace_ptr, kind, start_ns, end_ns, detail):
    """Append one event of this program.

    Args:
        trace_ptr: the ``buffer`` of an :class:`iris.Trace`, behind its ``begin``. Events of programs for which that has
            made no room are lost, and ``events`` says so.
        kind: ``GEMM``, ``WAIT`` or ``FETCH`` of this module.
        start_ns, end_ns: as :func:`iris.device.arch.clock_ns` told them.
        detail: a number of one's own, such as the tile's; waits of -1 are left out of :meth:`iris.Trace.waited_s`.
    """
    tl.static_assert(points_to(trace_ptr, tl.int64), "trace_ptr: expected the buffer of an iris.Trace, behind begin()")
    if tl.program_id(0) >= tl.load(trace_ptr + PROGRAMS):
        tl.store(trace_ptr + LACKING, 1)
    else:
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
