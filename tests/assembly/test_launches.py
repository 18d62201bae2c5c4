"""Whatever an op launches compiles for every target, has room there, and obeys the rules that hold for any kernel."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from case import EVERYTHING, OLD
from compiler import TARGETS
from launches import CALLS_EACH, WAYS, Call, call_of


def taking_turns(old: int) -> list[tuple[int, str]]:
    """Of each way, by number, the first call on one of the targets, with one of the two Tritons; ``old``: which."""
    names = list(TARGETS)
    there = len(names)
    return [(way, names[way % there - 1]) for way in range(len(WAYS)) if way // there % 2 == old]


CALLS = [
    (call_of(way, name, turn, split=EVERYTHING), name)
    for way, name in (
        [(way, name) for way in range(len(WAYS)) for name in TARGETS] if EVERYTHING else taking_turns(OLD)
    )
    for turn in range(CALLS_EACH if EVERYTHING else 1)
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("call", "target_name"), CALLS, ids=[f"{name}-{call}" for call, name in CALLS])
def test_what_ops_launch(call: Call, target_name: str, launched: dict[tuple[str, str], Future[list[str]]]) -> None:
    wrong = launched[str(call), target_name].result()
    assert not wrong, "\n".join(wrong)


def test_every_algorithm_has_its_turn() -> None:
    assert sorted(way for old in (0, 1) for way, _ in taking_turns(old)) == list(range(len(WAYS)))
    assert {name for way, name in taking_turns(OLD)} == set(TARGETS)
