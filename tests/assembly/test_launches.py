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
from iris.ops.exchange import registers


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
@pytest.mark.parametrize(("algorithm", "gather_dim"), in_turn([("hbm_buffer", 1), ("push", 0), ("copy_engine", 1)]))
def test_another_number_of_chunks_compiles_nothing(algorithm: str, gather_dim: int) -> None:
    ctx: Any = Context("sm_90", 4)
    config = ops.FusedConfig(algorithm, block_size_m=64, block_size_n=256, block_size_k=64)
    with launches("sm_90") as found:
        for rows in (64, 1024, 1028):
            a = torch.empty(*((rows, 1024) if gather_dim else (rows // 4, 4096)), dtype=torch.bfloat16)
            b, output = (torch.empty(high, 4096, dtype=torch.bfloat16) for high in (4096, rows))
            ops.all_gather_matmul(ctx, output, a, b, config=config, gather_dim=gather_dim)
    assert [launch.compiled.name for launch in found.values()] == ["matmul_kernel"]


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_an_exchange_in_words_is_told_its_limit_of_registers(world_size: int) -> None:
    way, kind = Way("matmul_all_reduce", "low_latency", None), Kind(torch.float16, torch.float16)
    with launches("sm_90") as found:
        Call(*way, (), kind, Size(16, 4096, 4096, world_size), False, "").make(Context("sm_90", world_size))
    (constants,) = (one.constants for one in found.values() if one.compiled.name == "exchange_words_kernel")
    assert constants["maxnreg"] == registers(constants["num_warps"], world_size)


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
