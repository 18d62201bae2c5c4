"""The figures that texts draw from whole sets of results are those of the results that are there."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from iris.bench.dataset import Dataset
from iris.report.records import read
from iris.report.study import OPPONENTS, Problem, Study, verdict

ROOT = Path(__file__).parent.parent
README, PERFORMANCE = ((ROOT / name).read_text() for name in ("README.md", "docs/performance.md"))
OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_scatter")
COUNTS = (2, 4)


@pytest.fixture(scope="module")
def study() -> Study:
    return Study(read(ROOT / "results"))


def of_op(study: Study, op: str, world_size: int) -> list[Problem]:
    return [one for one in study.problems if (one.case, one.world_size) == (op, world_size)]


def layers(study: Study, world_size: int) -> list[Problem]:
    """Those of dataset/llm.json."""
    dataset = Dataset.read(ROOT / "dataset" / "llm.json")
    wanted = {
        (op, *(shape[name] for name in ("M", "N", "K")), f"{shape['model']} {shape['layer']}")
        for op in OPS
        if dataset.has(op, world_size)
        for shape in dataset.shapes(op, world_size)
    }
    every = [one for op in OPS for one in of_op(study, op, world_size) if "gather_dim 1" not in one.setting]
    return [one for one in every if one.shape and (one.case, *one.shape, one.names) in wanted]


def cells(study: Study, problems: Sequence[Problem]) -> list[list[str]]:
    """For each opponent: over how many problems, the mean of the speed-ups, how many are slower, and the worst."""
    found = []
    for opponent in OPPONENTS:
        mean = study.means([one.results["auto"] for one in problems if "auto" in one.timed], opponent)
        found.append(["–"] * 4 if mean is None else [
            str(mean.count), f"{mean.speedup:.2f}", str(mean.slower), f"{mean.worst:.2f}",
        ])  # fmt: skip
    return found


def in_a_row(problems: Sequence[Problem], opponent: str) -> str:
    ratios = [
        theirs / ours
        for one in problems
        if "auto" in one.timed and opponent in one.timed
        for ours, theirs in [(one.timed["auto"].back_to_back_ms, one.timed[opponent].back_to_back_ms)]
        if ours and theirs
    ]
    return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world_size", COUNTS)
def test_the_readme_has_the_speed_ups_of_the_results(study: Study, op: str, world_size: int) -> None:
    nccl, torch = cells(study, of_op(study, op, world_size))
    row = f"| {world_size} | {' | '.join([*nccl, *torch[1:]])} |"
    name = f"| `{op}` " if world_size == COUNTS[0] else "| "
    assert f"\n{name}{row}\n" in README


@pytest.mark.parametrize(
    ("title", "fewest", "most"), [("1 to 128 (decoding)", 1, 128), ("256 to 2048", 256, 2048), ("4096 to", 4096, 16384)]
)
def test_the_speed_ups_by_rows_are_those_of_the_results(study: Study, title: str, fewest: int, most: int) -> None:
    at = PERFORMANCE.index(f"\n| {title}")
    rows = re.findall(r"^\|[^|]*\| (\d \|.*) \|$", PERFORMANCE[at : at + 300], re.MULTILINE)
    for world_size, row in zip(COUNTS, rows, strict=False):
        mine = [one for one in layers(study, world_size) if one.shape and fewest <= one.shape[0] <= most]
        nccl, torch = cells(study, mine)
        rates = [in_a_row(mine, opponent) for opponent in OPPONENTS]
        assert row == " | ".join([str(world_size), *nccl, *torch[1:], *rates])


def test_results_and_losses_are_counted(study: Study) -> None:
    mine = [one for op in OPS for count in COUNTS for one in of_op(study, op, count)]
    every = [result for one in mine for result in one.results.values()]
    words = " ".join(PERFORMANCE.split())
    timed = sum(result.time is not None for result in every)
    assert f"{len(every)} results, of which {timed} were measured" in words
    assert all(result.skipped for result in every if result.time is None)
    losses = []
    for opponent in OPPONENTS:
        found = [study.speedup(one.results["auto"], opponent) for one in mine if "auto" in one.timed]
        ratios = [ratio for ratio in found if ratio is not None]
        losses.append((sum(verdict(ratio) == "slower" for ratio in ratios), len(ratios)))
    (nccl, of_nccl), (torch, of_torch) = losses
    assert f"Against NCCL + matmul it is {nccl} of {of_nccl}" in words
    assert f"Against PyTorch it is {torch} of {of_torch}" in words
