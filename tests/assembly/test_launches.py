"""All that ops launch compiles for every target, fits there, and obeys the rules that hold for any kernel."""

from __future__ import annotations

import re
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from case import EVERYTHING, OLD, TURN, in_turn
from compiler import TARGETS, text_of
from launches import CALLS_EACH, WAYS, Call, Context, Kind, Size, Way, call_of, launches

from iris import ops


def taking_turns(old: int, turn: int = TURN) -> list[tuple[int, str]]:
    """The numbers of ways, each with the target of its first call, for one of the two Tritons, which ``old`` chooses.
    After eight turns each Triton has compiled each way for all targets."""
    names = list(TARGETS)
    there = len(names)
    mine = (old + turn // there) % 2
    return [(way, names[(way + turn) % there]) for way in range(len(WAYS)) if way // there % 2 == mine]


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
    for old in (0, 1):
        calls = [call for turn in range(8) for call in taking_turns(old, turn)]
        assert sorted(calls) == sorted((way, name) for way in range(len(WAYS)) for name in TARGETS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "way",
    in_turn(
        [
            Way("matmul_all_reduce", "low_latency", None),
            Way("matmul_all_reduce", "one_shot", None),
            Way("all_gather_matmul", "low_latency", 1),
            Way("matmul_all_reduce", "low_latency_two_shot", None),
        ]
    ),
    ids=lambda way: way.algorithm,
)
def test_another_number_of_rows_compiles_nothing(way: Way) -> None:
    """A server meets any number of rows, and a kernel takes seconds to compile."""
    with launches("sm_90") as found:
        for rows in (1, 3, 16):
            call = Call(*way, (), Kind(torch.float16, torch.float16), Size(rows, 4096, 4096, 4), False, "")
            call.make(Context("sm_90", 4))
    names = [launch.compiled.name for launch in found.values()]
    assert names and len(set(names)) == len(names)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("op", "algorithm"),
    in_turn(
        [
            ("matmul_reduce_scatter", "push"),
            ("matmul_reduce_scatter", "low_latency"),
            ("matmul_all_scatter", "split"),
            ("matmul_all_scatter", "streams"),
            ("all_gather_matmul", "hbm_buffer"),
            ("all_gather_matmul", "baseline"),
        ]
    ),
)
def test_contiguous_columns_move_in_vectors(op: str, algorithm: str) -> None:
    """Those of a gathered A and of an output do, if the number of rows allows it."""
    ctx: Any = Context("sm_90", 4)
    rows, k, n = 4096, 1024, 2048
    a = torch.empty(k, rows, dtype=torch.bfloat16).t()
    b = torch.empty(4 * k if op == "all_gather_matmul" else k, n, dtype=torch.bfloat16)
    columns = {"gather_dim": 1} if op == "all_gather_matmul" else {}
    high, wide = rows // 4 if op == "matmul_reduce_scatter" else rows, 4 * n if op == "matmul_all_scatter" else n
    output = torch.empty(wide, high, dtype=torch.bfloat16).t()
    with launches("sm_90") as found:
        getattr(ops, op)(ctx, output, a, b, config=algorithm, **columns)
    assert found
    for launch in found.values():
        assert not re.findall(r"(?:ld|st)\.global\.b16", text_of(launch.compiled)), launch.compiled.name
