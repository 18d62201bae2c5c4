"""Record what a program does, and when; :mod:`iris.trace` is the host's half. There are three kinds of events: the
program computes (``GEMM``), waits for data (``WAIT``), or moves it (``FETCH``)."""

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
"""The word that says for how many programs there is room."""
LACKING: tl.constexpr = tl.constexpr(2)
"""The word that says that there were more programs."""

KINDS = {0: "wg_gemm", 1: "wg_gemm_wait", 2: "wg_fetch"}
GEMM: tl.constexpr = tl.constexpr(0)
WAIT: tl.constexpr = tl.constexpr(1)
FETCH: tl.constexpr = tl.constexpr(2)


@triton.jit
def record(trace_ptr, kind, start_ns, end_ns, detail):
    """Append one event of this program.

    Args:
        trace_ptr: the ``buffer`` of an :class:`iris.Trace`, after its ``begin``. Events of programs for which ``begin``
            made no room are lost, and ``events`` says so.
        kind: ``GEMM``, ``WAIT`` or ``FETCH`` of this module.
        start_ns, end_ns: times from :func:`iris.device.arch.clock_ns`.
        detail: any number, such as the tile's; :meth:`iris.Trace.waited_s` leaves out waits whose detail is negative.
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
    """Record the time after each of ``MEETINGS`` barriers with all ranks. Run by one program."""
    for meeting in range(MEETINGS):
        barrier(handle)
        tl.store(times + meeting, clock_ns())
