"""How long a call takes on this rank's device: CUDA events on GPUs, the host's clock in the simulator."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from iris.context import Iris

_GPU_WARMUP, _GPU_ITERATIONS = 3, 11
_SIM_WARMUP, _SIM_ITERATIONS = 1, 3


def call_seconds(
    ctx: Iris,
    call: Callable[[], object],
    *,
    together: bool = False,
    warmup: int | None = None,
    iterations: int | None = None,
) -> list[float]:
    """Seconds that each of ``iterations`` calls of ``call`` took on this rank, after ``warmup`` untimed ones.

    Args:
        ctx: this rank's context.
        call: launches work on the current stream; in the simulator, does it.
        together: all ranks call this function, and meet before every call, so that they work at the same time.
            Otherwise a single rank may time its call while the others are idle.
        warmup: untimed calls (default 3 on GPUs, 1 in the simulator).
        iterations: timed calls (default 11 on GPUs, 3 in the simulator).
    """
    simulated = ctx.backend_name == "sim"
    untimed = warmup if warmup is not None else _SIM_WARMUP if simulated else _GPU_WARMUP
    timed = iterations if iterations is not None else _SIM_ITERATIONS if simulated else _GPU_ITERATIONS
    for _ in range(untimed):
        call()
    measure = _by_host_clock if simulated else _by_events
    return measure(ctx, call, together, timed)


def median_seconds(
    ctx: Iris,
    call: Callable[[], object],
    *,
    together: bool = False,
    warmup: int | None = None,
    iterations: int | None = None,
) -> float:
    """The median of :func:`call_seconds`."""
    return statistics.median(call_seconds(ctx, call, together=together, warmup=warmup, iterations=iterations))


def _by_events(ctx: Iris, call: Callable[[], object], together: bool, iterations: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(iterations)]
    for begin, end in events:
        if together:
            ctx.device_barrier()
        begin.record()
        call()
        end.record()
    ctx.synchronize()
    return [float(begin.elapsed_time(end)) / 1e3 for begin, end in events]


def _by_host_clock(ctx: Iris, call: Callable[[], object], together: bool, iterations: int) -> list[float]:
    seconds = []
    for _ in range(iterations):
        if together:
            ctx.barrier()
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return seconds
