"""Times of calls on this rank's device: by CUDA events on GPUs, by the host's clock in the simulator."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

from iris.context import Iris

T = TypeVar("T")

_GPU_WARMUP, _GPU_ITERATIONS = 3, 11
_SIM_WARMUP, _SIM_ITERATIONS = 1, 3
MAX_LEAD_S = 2e-3
"""The longest that a device idles before a call."""
WARM_S, WARM_CALLS = 0.15, 100
"""Before calls in a row are timed, untimed calls run for this long, but no more than this many."""
ROW_S, ROW_CALLS = 0.02, (10, 100)
"""How long calls in a row are timed, and the fewest and most calls."""
_LATE = 0.25
"""The share of calls that the host may launch too late: the median is still the device's time."""


def call_seconds(
    ctx: Iris,
    call: Callable[[], object],
    *,
    together: bool = False,
    warmup: int | None = None,
    iterations: int | None = None,
    preamble: Callable[[], object] | None = None,
    lead_s: float = 0.0,
) -> list[float]:
    """Seconds that each of ``iterations`` calls of ``call`` took on this rank, after ``warmup`` untimed ones.

    Args:
        ctx: this rank's context.
        call: launches work on the current stream; in the simulator it does the work.
        together: all ranks call this function, and meet before every call, so that they work at the same time.
            Otherwise a single rank may time its call while the others are idle.
        warmup: untimed calls (default 3 on GPUs, 1 in the simulator).
        iterations: timed calls (default 11 on GPUs, 3 in the simulator).
        preamble: runs before every call, untimed.
        lead_s: on GPUs, seconds that the device idles before every call, so that the host has launched all of the
            call when it begins. Without it a call that takes the host longer than the device is timed at the host's
            pace. If more than a quarter of the calls still began too early, on any rank if ``together``, all are timed
            again with twice the lead, up to :data:`MAX_LEAD_S`.
    """
    simulated = ctx.backend_name == "sim"
    untimed = warmup if warmup is not None else _SIM_WARMUP if simulated else _GPU_WARMUP
    timed = iterations if iterations is not None else _SIM_ITERATIONS if simulated else _GPU_ITERATIONS
    before = preamble if preamble is not None else _nothing
    for _ in range(untimed):
        before()
        call()
    if simulated:
        return _by_host_clock(ctx, call, together, timed, before)
    while True:
        seconds, late = _by_events(ctx, call, together, timed, before, lead_s)
        if not 0 < lead_s < MAX_LEAD_S or (slowest(ctx, late) if together else late) <= _LATE * timed:
            return seconds
        lead_s = min(2 * lead_s, MAX_LEAD_S)


def median_seconds(ctx: Iris, call: Callable[[], object], *, together: bool = False) -> float:
    """The median of :func:`call_seconds`."""
    return statistics.median(call_seconds(ctx, call, together=together))


def back_to_back_seconds(ctx: Iris, call: Callable[[], object], call_s: float) -> float:
    """Seconds per call of many calls in a row on this rank's GPU, the host's part included. Collective.

    Timing starts once the clock has settled: the controller of a power-bound GPU takes 0.15 s on H200 to find the clock
    that it can sustain.

    Args:
        ctx: this rank's context.
        call: launches work on the current stream.
        call_s: about how long one call takes, the same on all ranks.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    ctx.barrier()
    for _ in range(min(math.ceil(WARM_S / call_s), WARM_CALLS)):
        call()
    fewest, most = ROW_CALLS
    calls = min(max(math.ceil(ROW_S / call_s), fewest), most)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    ctx.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls


def host_seconds(ctx: Iris, call: Callable[[], object], calls: int) -> float:
    """The median time that the host takes to issue one call to an idle GPU, in seconds. Collective."""
    taken = []
    for _ in range(calls):
        ctx.barrier()
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    ctx.synchronize()
    return statistics.median(taken)


def of_all(ctx: Iris, value: T) -> list[T]:
    """Every rank's ``value``, in rank order. Collective."""
    return [ctx.broadcast(value, rank) for rank in range(ctx.world_size)]


def slowest(ctx: Iris, value: float) -> float:
    """The largest of all ranks' values. Collective."""
    return max(map(float, of_all(ctx, value)))


def _nothing() -> None:
    pass


def _by_events(
    ctx: Iris,
    call: Callable[[], object],
    together: bool,
    iterations: int,
    before: Callable[[], object],
    lead_s: float,
) -> tuple[list[float], int]:
    """Seconds of each call, and how many calls the device had begun before the host had launched all of them."""
    late = 0
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(iterations)]
    for begin, end in events:
        before()
        if lead_s > 0:
            torch.cuda._sleep(int(lead_s * _cycles_per_s(ctx.device)))
        if together:
            ctx.device_barrier()
        begin.record()
        call()
        end.record()
        late += begin.query()
    ctx.synchronize()
    return [float(begin.elapsed_time(end)) / 1e3 for begin, end in events], late


@cache
def _cycles_per_s(device: torch.device) -> float:
    """How many cycles of ``torch.cuda._sleep`` a second has: of the GPU's clock on NVIDIA, of a slower one on AMD."""
    begin, end, cycles = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), 100_000
    with torch.cuda.device(device):
        torch.cuda._sleep(cycles)
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
    return cycles * 1e3 / float(begin.elapsed_time(end))


def _by_host_clock(
    ctx: Iris, call: Callable[[], object], together: bool, iterations: int, before: Callable[[], object]
) -> list[float]:
    seconds = []
    for _ in range(iterations):
        before()
        if together:
            ctx.barrier()
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return seconds
