"""Timing calls on GPUs: what a late host makes of it, with a device that is made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from iris.bench import timing

CTX: Any = SimpleNamespace(backend_name="cuda", world_size=2, rank=0, broadcast=lambda value, rank: value)


class Device:
    """Takes ``host_s`` to launch a call; calls whose lead is shorter begin too early, and take as long as that."""

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
    assert device.leads == pytest.approx([6e-4, 12e-4, timing.MOST_LEAD_S])


@pytest.mark.parametrize("hiccups", [1, 2])
def test_a_few_late_calls_leave_the_median_as_it_is(monkeypatch: pytest.MonkeyPatch, hiccups: int) -> None:
    device = Device(monkeypatch, host_s=1e-5, hiccups=hiccups)
    assert len(seconds(together=True, lead_s=1e-4)) == 8
    assert device.leads == [1e-4]


def test_without_a_lead_the_hosts_pace_is_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, host_s=1)
    assert seconds(together=True, lead_s=0) == [1] * 8
    assert device.leads == [0]
