"""``do_bench``: the time of a call, with the name and arguments that users of the Iris model know.

``python -m iris bench`` measures with more care: variants in turns, results checked first, the slowest rank's time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from iris import backends
from iris.errors import ArgumentError, whole_number

_CACHE_BYTES = 256 << 20
"""Writing this much empties the L2 cache of any GPU."""
_SUMMARIES: dict[str, Callable[[list[float]], float | list[float]]] = {
    "mean": statistics.mean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "all": list,
}


def do_bench(
    fn: Callable[[], object],
    barrier_fn: Callable[[], object] = lambda: None,
    preamble_fn: Callable[[], object] = lambda: None,
    n_warmup: int = 25,
    n_repeat: int = 100,
    quantiles: Sequence[float] | None = None,
    return_mode: str = "mean",
) -> float | list[float]:
    """Milliseconds that a call of ``fn`` takes on this rank: on GPUs by events on the current stream, with an empty L2
    cache; in the simulator by the host's clock, which says nothing about a GPU.

    Args:
        fn: launches work on the current stream.
        barrier_fn: called before and after the preamble, and at the end; ``ctx.barrier`` if ``fn`` needs all ranks.
        preamble_fn: called before every call, untimed.
        n_warmup, n_repeat: untimed calls after the first one, which compiles kernels, and timed calls.
        quantiles: return these quantiles of the times, from 0 to 1: a list, or a number if there is only one.
        return_mode: what to return otherwise: ``"mean"``, ``"median"``, ``"min"``, ``"max"``, or ``"all"`` times.

    Raises:
        ArgumentError: a function cannot be called, or a number of calls, a quantile or ``return_mode`` is invalid.
    """
    for name, called in (("fn", fn), ("barrier_fn", barrier_fn), ("preamble_fn", preamble_fn)):
        if not callable(called):
            raise ArgumentError("do_bench", name, "a function to call without arguments", repr(called))
    for name, count, least in (("n_warmup", n_warmup, 0), ("n_repeat", n_repeat, 1)):
        if whole_number(count) < least:
            raise ArgumentError("do_bench", name, f"a whole number of calls, at least {least}", repr(count))
    if not isinstance(return_mode, str) or return_mode not in _SUMMARIES:
        raise ArgumentError("do_bench", "return_mode", f"one of {', '.join(_SUMMARIES)}", repr(return_mode))
    shares = None if quantiles is None else _shares(quantiles)
    on_gpu = backends.chosen().name in backends.GPU_BACKENDS
    cache = torch.empty(_CACHE_BYTES, dtype=torch.int8, device="cuda") if on_gpu else None
    timed = [_timed(fn, barrier_fn, preamble_fn, cache) for _ in range(1 + n_warmup + n_repeat)][-n_repeat:]
    barrier_fn()
    spans = [span() for span in timed]
    if shares is None:
        return _SUMMARIES[return_mode](spans)
    measured, wanted = (torch.tensor(one, dtype=torch.float64, device="cpu") for one in (spans, shares))
    at = measured.quantile(wanted).tolist()
    return float(at[0]) if len(at) == 1 else [float(one) for one in at]


def _shares(quantiles: Iterable[float]) -> list[float]:
    try:
        shares = [float(one) for one in quantiles]
    except (TypeError, ValueError):
        shares = [math.nan]
    if not all(0 <= one <= 1 for one in shares):
        raise ArgumentError("do_bench", "quantiles", "a list of numbers from 0 to 1", repr(quantiles))
    return shares


def _timed(
    fn: Callable[[], object],
    barrier_fn: Callable[[], object],
    preamble_fn: Callable[[], object],
    cache: torch.Tensor | None,
) -> Callable[[], float]:
    """Call ``fn`` once. Returns a function that waits until the device is done with it, and returns its
    milliseconds."""
    barrier_fn()
    preamble_fn()
    if cache is None:
        barrier_fn()
        begun = time.perf_counter()
        fn()
        taken = (time.perf_counter() - begun) * 1e3
        return lambda: taken
    cache.zero_()
    barrier_fn()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    fn()
    end.record()

    def elapsed() -> float:
        end.synchronize()
        return float(begin.elapsed_time(end))

    return elapsed
