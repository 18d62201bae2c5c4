"""Timing calls on GPUs, with a fake device: the effects of a late host. And ``do_bench``."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch

import iris
from iris import backends
from iris.bench import session, timing

CTX: Any = SimpleNamespace(backend_name="cuda", world_size=2, rank=0, broadcast=lambda value, rank: value)


class Device:
    """A fake device whose host takes ``host_s`` to launch a call: calls with a shorter lead begin too early, and take
    as long as the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host_s: float, hiccups: int = 0) -> None:
        self.host_s, self.hiccups, self.leads = host_s, hiccups, list[float]()
        monkeypatch.setattr(timing, "_by_events", self.by_events)

    def by_events(
        self, ctx: Any, call: Any, together: bool, iterations: int, before: Any, lead_s: float
    ) -> tuple[list[float], int]:
        self.leads.append(lead_s)
        late = iterations if lead_s < self.host_s else self.hiccups
        return [self.host_s] * late + [1e-5] * (iterations - late), late


def seconds(together: bool, lead_s: float) -> list[float]:
    return timing.call_seconds(CTX, lambda: None, together=together, warmup=0, iterations=8, lead_s=lead_s)


@pytest.mark.parametrize("together", [False, True])
def test_calls_that_a_host_launched_too_late_are_timed_again(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    device = Device(monkeypatch, host_s=350e-6)
    assert seconds(together, 100e-6) == [1e-5] * 8
    assert device.leads == pytest.approx([100e-6, 200e-6, 400e-6])


def test_a_peer_whose_host_was_late_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, host_s=0)
    late = iter([0, 8, 0, 0])
    monkeypatch.setattr(CTX, "broadcast", lambda value, rank: next(late))
    assert len(seconds(together=True, lead_s=1e-4)) == 8
    assert device.leads == pytest.approx([1e-4, 2e-4])


def test_a_host_that_is_always_late_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, host_s=1)
    assert seconds(together=True, lead_s=6e-4) == [1] * 8
    assert device.leads == pytest.approx([6e-4, 12e-4, timing.MAX_LEAD_S])


@pytest.mark.parametrize("hiccups", [1, 2])
def test_a_few_late_calls_leave_the_median_as_it_is(monkeypatch: pytest.MonkeyPatch, hiccups: int) -> None:
    device = Device(monkeypatch, host_s=1e-5, hiccups=hiccups)
    assert len(seconds(together=True, lead_s=1e-4)) == 8
    assert device.leads == [1e-4]


def test_without_a_lead_the_hosts_pace_is_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, host_s=1)
    assert seconds(together=True, lead_s=0) == [1] * 8
    assert device.leads == [0]


@pytest.mark.parametrize(("cool_s", "calls"), [(2e-5, 200), (2.4e-3, 63 + 10), (4e-2, 4 + 10)])
def test_calls_in_a_row_are_timed_on_a_device_that_they_have_warmed(
    monkeypatch: pytest.MonkeyPatch, cool_s: float, calls: int
) -> None:
    """Each call takes a quarter longer once all have taken 0.15 s, as on a power-bound GPU."""
    clock, made = [0.0], list[float]()

    def call() -> None:
        made.append(cool_s * (1.25 if clock[0] >= 0.15 else 1))
        clock[0] += made[-1]

    class Mark:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, end: Mark) -> float:
            return (end.at - self.at) * 1e3

    ctx = SimpleNamespace(barrier=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    assert timing.back_to_back_seconds(cast(Any, ctx), call, cool_s) == pytest.approx(made[-1])
    assert len(made) == calls and made[-1] == cool_s * (1 if cool_s < 1e-3 else 1.25)


def test_the_device_idles_as_long_before_each_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes variants whose host is fast: otherwise the device would be hotter there, and slower."""
    hosts, leads = {"fast": 2e-5, "slow": 8e-4}, list[tuple[str, float]]()
    states = [SimpleNamespace(call=name, preamble=None, outcome=SimpleNamespace(seconds=[])) for name in hosts]

    def call_seconds(ctx: Any, call: str, *, lead_s: float, **_: Any) -> list[float]:
        leads.append((call, lead_s))
        return []

    def plan(ctx: Any, state: Any, settings: Any) -> session._Plan:
        return session._Plan(10, 5e-3, hosts[state.call], 2 * hosts[state.call])

    monkeypatch.setattr(session, "_plan", plan)
    monkeypatch.setattr(session, "call_seconds", call_seconds)
    monkeypatch.setattr(session, "_finish", lambda *_: None)
    session._time(CTX, cast(Any, states), cast(Any, None), lambda *_: None)
    assert sorted(set(leads)) == [("fast", 1.6e-3), ("slow", 1.6e-3)] and len(leads) == 2 * session.ROUNDS


@pytest.mark.parametrize(
    ("device_s", "calls"), [(2e-5, 30), (9e-4, 30), (1e-3, 100), (5e-3, 100), (1e-2, 60), (0.06, 10), (2.0, 10)]
)
def test_long_calls_are_timed_more_often_but_not_for_long(
    monkeypatch: pytest.MonkeyPatch, device_s: float, calls: int
) -> None:
    assert _planned(monkeypatch, device_s=device_s).calls == calls


@pytest.mark.parametrize(("host_s", "lead_s"), [(0.0, 50e-6), (2e-4, 450e-6), (5e-3, timing.MAX_LEAD_S)])
def test_the_device_idles_for_twice_as_long_as_the_host_takes(
    monkeypatch: pytest.MonkeyPatch, host_s: float, lead_s: float
) -> None:
    assert _planned(monkeypatch, host_s=host_s).lead_s == pytest.approx(lead_s)


def _planned(monkeypatch: pytest.MonkeyPatch, device_s: float = 1e-5, host_s: float = 1e-5) -> session._Plan:
    """The plan if this rank is the slowest."""
    ctx = SimpleNamespace(barrier=lambda: None, backend_name="cuda", world_size=2, broadcast=lambda value, rank: value)
    state = SimpleNamespace(call=lambda: None, preamble=None, warmup=None, repeat=None)
    monkeypatch.setattr(session, "host_seconds", lambda *_: host_s)
    monkeypatch.setattr(session, "call_seconds", lambda *_, **__: [2 * device_s, device_s, 3 * device_s])
    return session._plan(cast(Any, ctx), cast(Any, state), session.Settings(60))


class Busy:
    """A host with a fake clock: a call takes 0.25 s to launch if all ranks have met and are idle, else 8 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.met, self.prepared, self.backend_name = 0.0, False, 0, "sim"
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def barrier(self) -> None:
        self.now, self.met = self.now + 1, True

    def synchronize(self) -> None: ...

    def prepare(self) -> None:
        self.now, self.prepared = self.now + 64, self.prepared + 1

    def call(self) -> None:
        self.now, self.met = self.now + (0.25 if self.met else 8), False


def test_a_host_is_timed_as_it_issues_calls_to_an_idle_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    busy: Any = Busy(monkeypatch)
    assert timing.host_seconds(busy, busy.call, 3) == 0.25


@pytest.mark.parametrize(("together", "call_s"), [(True, 0.25), (False, 8)])
def test_simulated_ranks_meet_before_every_call_if_they_work_together(
    monkeypatch: pytest.MonkeyPatch, together: bool, call_s: float
) -> None:
    busy: Any = Busy(monkeypatch)
    options: dict[str, Any] = {"together": together, "warmup": 1, "iterations": 3, "preamble": busy.prepare}
    assert timing.call_seconds(busy, busy.call, **options) == [call_s] * 3
    assert busy.prepared == 4


@pytest.mark.parametrize(("lead_s", "late"), [(2e-4, 0), (5e-5, 3), (0, 3)])
def test_a_call_begins_when_the_device_has_idled(monkeypatch: pytest.MonkeyPatch, lead_s: float, late: int) -> None:
    """The GPU is a fake, which idles by its own clock while the host launches."""
    host, device, host_s, hertz = [0.0], [0.0], 1e-4, 1.5e9

    class Mark:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = device[0] = max(host[0], device[0])

        def query(self) -> bool:
            return host[0] > self.at

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Mark) -> float:
            return (end.at - self.at) * 1e3

    def idle(cycles: int) -> None:
        device[0] = max(host[0], device[0]) + cycles / hertz

    def call() -> None:
        host[0] += host_s
        device[0] = max(host[0], device[0]) + 1e-5

    def meet() -> None:
        host[0] = device[0] = max(host[0], device[0])

    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "_sleep", idle)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    ctx = SimpleNamespace(device=torch.device("cuda", 0), synchronize=lambda: None)
    found = timing._cycles_per_s.__wrapped__(ctx.device)
    assert found == pytest.approx(hertz)
    monkeypatch.setattr(timing, "_cycles_per_s", lambda _: found)
    seconds, begun = timing._by_events(cast(Any, ctx), call, False, 3, meet, lead_s)
    assert begun == late
    assert seconds == pytest.approx([1e-5 + max(host_s - lead_s, 0)] * 3)


@pytest.mark.parametrize("together", [False, True])
def test_ranks_meet_on_their_devices_before_every_call_if_they_work_together(
    monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    log = list[str]()
    mark = SimpleNamespace(
        record=lambda: log.append("mark"), query=lambda: False, elapsed_time=lambda end: log.count("mark")
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: mark)
    ctx = SimpleNamespace(device_barrier=lambda: log.append("meet"), synchronize=lambda: None)
    timing._by_events(cast(Any, ctx), lambda: log.append("call"), together, 3, lambda: log.append("prepare"), 0)
    assert log == ["prepare", *["meet"] * together, "mark", "call", "mark"] * 3


class Event:
    """A fake CUDA event: the time between two is that of the calls recorded between them, in ms."""

    log: ClassVar[list[str]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = len(self.log)
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def elapsed_time(self, end: Event) -> float:
        return float(self.log[self.at : end.at].count("fn"))


@pytest.fixture(params=["sim", "cuda"])
def log(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls in their order, in the simulator and on a fake GPU."""
    calls: list[str] = []
    cache = SimpleNamespace(zero_=lambda: calls.append("zero_"))
    monkeypatch.setattr(Event, "log", calls)
    monkeypatch.setattr(backends, "chosen", lambda: SimpleNamespace(name=request.param))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    if request.param == "cuda":
        monkeypatch.setattr(torch, "empty", lambda *sizes, **options: cache)
    return calls


def test_do_bench_meets_before_every_call_and_times_the_call_alone(log: list[str]) -> None:
    times = iris.do_bench(
        lambda: log.append("fn"), lambda: log.append("barrier"), lambda: log.append("preamble"), 2, 3, return_mode="all"
    )
    assert isinstance(times, list) and len(times) == 3
    on_gpu = "record" in log
    assert not on_gpu or times == [1.0] * 3
    round_ = ["barrier", "preamble", *["zero_"] * on_gpu, "barrier", *["record"] * on_gpu, "fn", *["record"] * on_gpu]
    assert log == [*round_ * 6, "barrier", *["synchronize"] * 3 * on_gpu]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 3.2),
        ({"return_mode": "median"}, 2.0),
        ({"return_mode": "min"}, 1.0),
        ({"return_mode": "max"}, 8.0),
        ({"return_mode": "all"}, [2.0, 1.0, 8.0, 4.0, 1.0]),
        ({"quantiles": [0.5]}, 2.0),
        ({"quantiles": (0, 0.625, 1)}, [1.0, 3.0, 8.0]),
    ],
)
def test_do_bench_sums_times_up(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: float | list[float]
) -> None:
    spans = iter([9.0, 7.0, 2.0, 1.0, 8.0, 4.0, 1.0])
    now = [0.0]

    def call() -> None:
        now[0] += next(spans) / 1e3

    monkeypatch.setattr(backends, "chosen", lambda: SimpleNamespace(name="sim"))
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    counts: dict[str, Any] = {"n_warmup": np.int64(1), "n_repeat": 5}
    assert iris.do_bench(call, **counts, **options) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_repeat": 0}, "do_bench: n_repeat: expected a whole number of calls, at least 1, got 0"),
        ({"n_warmup": -1}, "do_bench: n_warmup: expected a whole number of calls, at least 0, got -1"),
        ({"n_repeat": 2.0}, "do_bench: n_repeat: expected a whole number of calls, at least 1, got 2.0"),
        (
            {"return_mode": "average"},
            "do_bench: return_mode: expected one of mean, median, min, max, all, got 'average'",
        ),
        ({"barrier_fn": None}, "do_bench: barrier_fn: expected a function to call without arguments, got None"),
        ({"preamble_fn": 0.5}, "do_bench: preamble_fn: expected a function to call without arguments, got 0.5"),
        ({"fn": 3}, "do_bench: fn: expected a function to call without arguments, got 3"),
        ({"return_mode": ["mean"]}, r"do_bench: return_mode: expected one of mean, .*, got \['mean'\]"),
        ({"quantiles": [0.5, 90]}, r"do_bench: quantiles: expected a list of numbers from 0 to 1, got \[0.5, 90\]"),
        ({"quantiles": 0.5}, "do_bench: quantiles: expected a list of numbers from 0 to 1, got 0.5"),
        ({"quantiles": ["half"]}, r"do_bench: quantiles: expected a list of numbers from 0 to 1, got \['half'\]"),
    ],
)
def test_do_bench_refuses(options: dict[str, Any], words: str) -> None:
    with pytest.raises(iris.ArgumentError, match=words):
        iris.do_bench(**{"fn": lambda: pytest.fail("it was called"), **options})
