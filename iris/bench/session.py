"""What every rank does for the driver: open a context, measure the variants of one point, close."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from iris.bench import distributed
from iris.bench.axes import Params
from iris.bench.case import CaseFunction
from iris.bench.contexts import default_heap_size, roomy
from iris.bench.environment import environment
from iris.bench.messages import StatusSender
from iris.bench.state import FATAL, REPORTED, Call, Outcome, Skipped, State, agreed, one_line
from iris.bench.timing import MAX_LEAD_S, back_to_back_seconds, call_seconds, host_seconds, slowest
from iris.context import Iris, iris

ROUNDS = 5
GPU_WARMUP, GPU_CALLS, SIM_CALLS = 5, 30, 3
MIN_CALLS, LONG_CALLS, LONG_CALL_S, LONG_S = 10, 100, 1e-3, 0.6
"""A call of LONG_CALL_S or more is timed LONG_CALLS times, as power-bound GPUs take a while to settle; fewer times if
that would take longer than LONG_S, but at least MIN_CALLS times."""
HOST_CALLS = 10
MAX_WAIT_S = 60.0


@dataclass(frozen=True)
class Settings:
    """What the command line says about how to measure.

    Attributes:
        timeout_s: the most that a point may take; points that are timed in turns share the sum of theirs.
        heap_size: bytes of symmetric heap; None: a quarter of the GPU's memory, 32 GiB at most; simulated 256 MiB.
        warmup, repeat: numbers of calls that replace those of cases and the defaults.
        commit: the commit that records name; None: what git says.
        status_address: where rank 0 sends status messages; None: it sends none.
        timed: whether variants are timed, and not only checked.
    """

    timeout_s: float
    heap_size: int | None = None
    warmup: int | None = None
    repeat: int | None = None
    commit: str | None = None
    status_address: bytes | None = None
    timed: bool = True


_ctx: Iris | None = None


def open_rank(settings: Settings) -> dict[str, str | int | None]:
    """Open the context; returns the environment that records name."""
    # A terminal sends Ctrl-C to all its processes; the driver ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return environment(_context(settings), settings.commit)


def close_rank() -> None:
    global _ctx
    distributed.leave()
    if _ctx is not None:
        _ctx.close()
    _ctx = None


def measure(
    fn: CaseFunction, variants: Sequence[Params], settings: Settings, names: Sequence[str] = ()
) -> list[Outcome]:
    """Set up and check every variant, then time the correct ones in turns. ``names``: the variants' names in status
    messages."""
    ctx, shared = _context(settings), dict[Hashable, Any]()
    states = [State(ctx, params, shared) for params in variants]
    called = dict(zip(states, names, strict=False))
    with closing(StatusSender(settings.status_address if ctx.rank == 0 else None)) as send:
        for number, state in enumerate(states, 1):
            send(_status("checking", called.get(state), number, len(states)))
            _set_up(ctx, fn, state)
        right = [one for one in states if settings.timed and one.call is not None and one.outcome.error is None]
        _time(
            ctx, right, settings, lambda state, turn: send(_status("timing", called.get(state), turn, ROUNDS, "round "))
        )
    ctx.barrier()
    return [state.outcome for state in states]


def _status(doing: str, name: str | None, number: int, of: int, what: str = "") -> str:
    """``checking two_shot, 4 of 13``; without the count if ``of`` is 1."""
    return f"{doing} {name or ''}".rstrip() + (f", {what}{number} of {of}" if of > 1 else "")


def _context(settings: Settings) -> Iris:
    global _ctx
    timeout_s = min(MAX_WAIT_S, settings.timeout_s / 2)
    before, _ctx = _ctx, None  # it may be closed before no other can be opened
    _ctx = roomy(before, lambda: iris(settings.heap_size or default_heap_size(), timeout_s=timeout_s))
    return _ctx


def _set_up(ctx: Iris, fn: CaseFunction, state: State) -> None:
    """Run the case function. Its error goes into the record if this rank can go on, else it is raised."""
    outcome, complaint = state.outcome, ""
    try:
        fn(state, ctx)
        if state.call is None:
            complaint = "the case ended without state.exec(...) or state.skip(...): nothing was timed"
    except Skipped as skipped:
        outcome.skipped = str(skipped)
    except FATAL:
        raise
    except REPORTED as error:
        complaint = one_line(error)
        ctx.synchronize()
    failed = agreed(ctx, complaint)
    if failed is not None:
        outcome.error, outcome.skipped, outcome.validated = failed, None, None


@dataclass(frozen=True)
class _Plan:
    """How often a call is timed; on GPUs also how long it takes the device and the host, and how long the device has to
    wait for the host before it."""

    calls: int
    device_s: float | None = None
    host_s: float | None = None
    lead_s: float = 0.0


def _time(ctx: Iris, states: Sequence[State], settings: Settings, started: Callable[[State, int], None]) -> None:
    """Fill in the times of all states, a few calls of each in turn; ``started`` is called at each turn, from 1 on.

    Each turn has its own order, the same on all ranks, so that no variant always runs after one that leaves the device
    hot. Before every call the device idles as long as the slowest host needs; if each variant had its own lead, the
    device would be cooler, and faster, for those that take the host long. Calls in a row, which leave the device hot,
    are timed after all turns.
    """
    planned = [(state, _plan(ctx, state, settings)) for state in states]
    lead_s = max((plan.lead_s for _, plan in planned), default=0.0)
    for turn in range(ROUNDS):
        for state, plan in random.Random(turn).sample(planned, len(planned)):
            assert state.call is not None
            calls = plan.calls // ROUNDS + (turn >= ROUNDS - plan.calls % ROUNDS)  # at least one in the last turn
            if calls:
                started(state, turn + 1)
                state.outcome.seconds += call_seconds(
                    ctx,
                    state.call,
                    together=True,
                    warmup=0 if plan.device_s is None else 1,
                    iterations=calls,
                    preamble=state.preamble,
                    lead_s=lead_s,
                )
    for state, plan in planned:
        _finish(ctx, state, plan)


def _finish(ctx: Iris, state: State, plan: _Plan) -> None:
    assert state.call is not None
    if plan.device_s is not None and state.preamble is None:
        state.outcome.host_s = plan.host_s
        state.outcome.back_to_back_s = back_to_back_seconds(ctx, state.call, plan.device_s)
    ctx.barrier()
    if state.check is not None:
        state.call_and_check(f" after {plan.calls} more calls")


def _plan(ctx: Iris, state: State, settings: Settings) -> _Plan:
    """Warm up, and measure how long a call takes on the slowest rank."""
    assert state.call is not None
    simulated = ctx.backend_name == "sim"
    call = state.call if state.preamble is None else _both(state.preamble, state.call)
    warmup = _first(settings.warmup, state.warmup, 0 if simulated else GPU_WARMUP)
    for _ in range(warmup):
        call()
    ctx.barrier()
    if simulated:
        return _Plan(_first(settings.repeat, state.repeat, SIM_CALLS))
    host_s = slowest(ctx, host_seconds(ctx, call, HOST_CALLS))
    device_s = slowest(ctx, min(call_seconds(ctx, call, together=True, warmup=0, iterations=3)))
    calls = GPU_CALLS if device_s < LONG_CALL_S else max(MIN_CALLS, min(LONG_CALLS, int(LONG_S / device_s)))
    return _Plan(_first(settings.repeat, state.repeat, calls), device_s, host_s, min(MAX_LEAD_S, 2 * host_s + 50e-6))


def _both(preamble: Call, call: Call) -> Call:
    def run() -> None:
        preamble()
        call()

    return run


def _first(*values: int | None) -> int:
    return next((value for value in values if value is not None), 0)
