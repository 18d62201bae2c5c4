"""Figures in texts that summarise whole sets of results agree with the results in the repository."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from iris.bench.dataset import Dataset
from iris.ops import tuned
from iris.ops.hardware import hardware
from iris.report.study import Problem, Study, verdict
from iris.results import OPPONENTS, read

ROOT = Path(__file__).parent.parent
README, PERFORMANCE, OF_MATMUL = (
    (ROOT / name).read_text() for name in ("README.md", "docs/performance.md", "docs/performance-matmul.md")
)
OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_scatter")
COUNTS = (2, 4, 8)
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


@pytest.fixture(scope="module")
def study() -> Study:
    return Study(read(ROOT / "results"))


def of_op(study: Study, op: str, world_size: int, hardware: str = H200) -> list[Problem]:
    wanted = op, world_size, hardware
    return [one for one in study.problems if (one.case, one.world_size, one.section.hardware) == wanted]


def layers(study: Study, world_size: int) -> list[Problem]:
    """The problems of dataset/llm.json."""
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
    """For each opponent: the number of problems, the mean of the speed-ups, how many are slower, and the worst."""
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


@pytest.mark.parametrize("op", OPS)
def test_the_readme_has_the_speed_ups_of_the_hardware_that_nothing_was_tuned_for(study: Study, op: str) -> None:
    nccl, torch = cells(study, of_op(study, op, 2, H100))
    assert f"\n| `{op}` | {' | '.join([*nccl, *torch[1:]])} |\n" in README


@pytest.mark.parametrize(
    ("title", "fewest", "most"), [("1 to 128 (decoding)", 1, 128), ("256 to 2048", 256, 2048), ("4096 to", 4096, 16384)]
)
def test_the_speed_ups_by_rows_are_those_of_the_results(study: Study, title: str, fewest: int, most: int) -> None:
    at = PERFORMANCE.index(f"\n| {title}")
    rows = re.findall(r"^\|[^|]*\| (\d \|.*) \|$", PERFORMANCE[at : at + 400], re.MULTILINE)
    assert len(rows) >= len(COUNTS)
    for world_size, row in zip(COUNTS, rows, strict=False):
        mine = [one for one in layers(study, world_size) if one.shape and fewest <= one.shape[0] <= most]
        nccl, torch = cells(study, mine)
        rates = [in_a_row(mine, opponent) for opponent in OPPONENTS]
        assert row == " | ".join([str(world_size), *nccl, *torch[1:], *rates])


@pytest.mark.parametrize(("name", "op"), [("gather", OPS[0]), ("reduce-scatter", OPS[1]), ("all-reduce", OPS[2])])
def test_the_speed_ups_by_layout_are_those_of_the_results(study: Study, name: str, op: str) -> None:
    mine = [one for one in layers(study, 2) if one.case == op]
    told = []
    for fewest, most in ((1, 128), (256, 4096)):
        for transposed in (False, True):
            here = [one for one in mine if one.shape and fewest <= one.shape[0] <= most]
            nccl, torch = cells(study, [one for one in here if ("transposed" in one.setting) == transposed])
            told.append(f"{nccl[1]} / {torch[1]}")
    assert f"\n| {name} | {' | '.join(told)} |\n" in OF_MATMUL


@pytest.mark.parametrize("world_size", COUNTS)
def test_calls_in_a_row_that_take_longer_are_counted(study: Study, world_size: int) -> None:
    counts = {limit: [0, 0] for limit in (0.1, 0.3, 1.0, math.inf)}
    for one in [one for op in OPS for one in of_op(study, op, world_size)]:
        if "auto" not in one.timed or (took := one.timed["auto"].time) is None:
            continue
        limit = next(limit for limit in counts if took.median <= limit)
        counts[limit][0] += (one.timed["auto"].back_to_back_ms or 0) > 1.05 * took.median
        counts[limit][1] += 1
    row = " | ".join(f"{longer} of {calls}" for longer, calls in counts.values())
    assert f"\n| {world_size} | {row} |\n" in PERFORMANCE


@pytest.mark.parametrize("world_size", COUNTS)
def test_all_reduces_in_a_row_are_those_of_the_results(study: Study, world_size: int) -> None:
    mine = [one for one in layers(study, world_size) if one.case == OPS[2] and one.shape and one.shape[0] <= 128]
    table_row = next(row for row in table(PERFORMANCE, "| GPUs | mean, older Python |") if row[0] == str(world_size))
    assert table_row[2].split(";")[0] == in_a_row(mine, OPPONENTS[1])


def test_no_gpu_is_said_to_be_faster_than_its_data_sheet(study: Study) -> None:
    rated = [one for one in study.results if one.tflops_per_gpu is not None and not one.simulated]
    assert len(rated) > 5000
    for one in rated:
        known = hardware(one.hardware)
        assert known is not None and one.tflops_per_gpu is not None
        peak = known.peak_flops[str(one.params.get("dtype", "bf16"))]
        assert one.tflops_per_gpu < peak / 1e12, one


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


WAYS = "\n".join(
    (
        *(
            (ROOT / f"results/2026-11-26/ways-h200-x8{again}.txt").read_text().split("\nPart 6")[0]
            for again in ("", "-again")
        ),  # of part 6 only what is in other parts, too, is in the code
        (ROOT / "results/2026-11-26/level-gathers-h200-x8.txt").read_text().split("\nAs they are")[1],
    )
)
MIRRORED = "\n".join((ROOT / f"results/2026-11-{day}/mirrored-h200-x2.txt").read_text() for day in (23, 25, 26))
COLUMNS = ROOT / "results/2026-11-30/columns-mirrored-h200-x2.txt"
SHORT = {
    "all-gather, rows": "ag-rows", "all-gather, columns": "ag-columns", "reduce-scatter": "rs", "all-reduce": "ar",
    "all-scatter": "as",
}  # fmt: skip
"""Ops in the text, and in the raw results of two GPUs."""
OF_OP = {
    "all-gather, rows": ("all_gather_matmul", 0), "all-gather, columns": ("all_gather_matmul", 1),
    "reduce-scatter": ("matmul_reduce_scatter", None), "all-reduce": ("matmul_all_reduce", None),
    "all-scatter": ("matmul_all_scatter", None),
}  # fmt: skip
"""Ops in the text, and in records: the case, and along which dimension A is sharded."""
SHARDED = {None: "", 0: " rows", 1: " columns"}
"""The text after the case in the raw results of 8 GPUs."""
OTHERS = ("nccl", "torch_symm_mem", "matmul")


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the table in a page whose first line begins with ``heading``."""
    lines = page[page.index(f"\n{heading}") :].strip().split("\n\n")[0].split("\n")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def on_8_gpus() -> dict[tuple[str, str], list[str]]:
    """The rows of the table by op and shape: fastest, goal, auto, alone, wire, and fastest by two."""
    found, op = {}, ""
    for name, shape, _, *rest in table(PERFORMANCE, "| Op | M×N×K | Fastest way |"):
        op = name or op
        found[op, shape.replace("×", "x")] = rest
    return found


RUNS = ("2026-11-26/ops-h200-x8", "2026-11-26/ops-h200-x8-again", "2026-11-27/ops-h200-x8")
"""Runs of all of dataset/ag_gemm.json on 8 GPUs."""


@cache
def taken(run: str = RUNS[-1]) -> dict[tuple[str, int | None, str, str], float]:
    """The times of a run of dataset/ag_gemm.json on 8 GPUs, by default the last, by case, dimension, shape and way."""
    records = map(json.loads, (ROOT / f"results/{run}.jsonl").read_text().splitlines())
    return {
        (one["case"], told.get("gather_dim"), told["shape"], told["algorithm"]): one["time_ms"]["median"]
        for one in records
        for told in [one["params"]]
        if one["time_ms"] is not None
    }


def fastest(op: str, shape: str) -> float:
    """The fastest time of all ways that ran on 8 GPUs with one queue of copies."""
    case, dim = OF_OP[op]
    lines = re.findall(rf"^{case} {shape}{SHARDED[dim]}: (.*)", WAYS, re.MULTILINE)
    told = [pair for line in lines for pair in re.findall(r"(\S+) (\d+\.\d+) \(", line)]
    ways = [float(ms) for way, ms in told if way not in OTHERS and "kpack" not in way]
    return min([*(taken(run)[case, dim, shape, "auto"] for run in RUNS), *ways])


def fastest_by_two() -> dict[tuple[str, str], float]:
    least: dict[tuple[str, str], float] = {}
    for part in re.split(r"^Part \d+: ", MIRRORED, flags=re.MULTILINE)[1:]:
        if not part.startswith("8 ranks"):
            continue
        for op, shape, times in re.findall(r"^(\S+) (\d+x\d+x\d+): (.*)", part, re.MULTILINE):
            ours = [float(ms) for way, ms in re.findall(r"(\S+) (\d+\.\d+)", times) if way != "matmul"]
            least[op, shape] = min([*ours, least.get((op, shape), math.inf)])
    for one in map(json.loads, COLUMNS.read_text().splitlines()):
        told, of = one["params"], (SHORT["all-gather, columns"], one["params"]["shape"])
        if told["ranks"] == 8 and told["way"] != "matmul":
            least[of] = min(one["time_ms"]["median"], least[of])
    return least


def test_the_fastest_on_8_gpus_is_that_of_the_results() -> None:
    told, by_two = on_8_gpus(), fastest_by_two()
    assert len(told) == 27
    for (op, shape), (ms, _, auto, alone, _, two) in told.items():
        case, dim = OF_OP[op]
        assert float(ms.strip("*")) == pytest.approx(fastest(op, shape), abs=0.00051), (op, shape)
        assert float(auto) == pytest.approx(taken()[case, dim, shape, "auto"], abs=0.00051), (op, shape)
        assert float(alone) == pytest.approx(taken()[case, dim, shape, "matmul"], abs=0.00051), (op, shape)
        assert float(two) == pytest.approx(by_two[SHORT[op], shape], abs=0.00051), (op, shape)


def test_goals_that_are_reached_are_those_in_bold() -> None:
    reached, told = 0, on_8_gpus()
    for (op, shape), (ms, goal, *_) in told.items():
        there = fastest(op, shape) <= float(goal)
        assert ("**" in ms) == there, (op, shape)
        reached += there
    assert f"{reached} of {len(told)} are there" in " ".join(PERFORMANCE.split())


def test_what_stream_k_gains_is_that_of_the_results() -> None:
    times: dict[str, dict[str, float]] = {}
    for line in (ROOT / "results/2026-11-23/stream-k-strips-h200-x1-again.jsonl").read_text().splitlines():
        result = json.loads(line)
        times.setdefault(result["params"]["shape"], {})[result["params"]["algorithm"]] = result["time_ms"]["median"]
    rows = table(OF_MATMUL, "| M×N×K | Tiles | Whole tiles only |")
    assert len(rows) == len(times)
    for shape, _, *told, cost, gained in rows:
        m, n, k = map(int, shape.split("×"))
        ms, tiles = times[f"{m}x{n}x{k}"], -(-m // 128) * -(-n // 256)
        whole, one, two = ms["local"], ms["stream_k_one_tile"], ms["stream_k_two_tiles"]
        waves = whole * (1 - tiles / 132 / -(-tiles // 132))
        assert [cell.strip("*") for cell in told] == [f"{each:.3f}" for each in (whole, one, two, ms["matmul"])]
        assert (cost, gained) == (f"{waves:.3f}", f"{100 * (whole - min(one, two)) / waves:.0f} %")
        assert whole - min(one, two) >= waves / 2


def test_the_readme_counts_tuned_rows() -> None:
    files = (ROOT / "iris" / "ops" / "tuned").glob("*.json")
    counts = Counter((row.hardware, row.world_size) for file in files for row in tuned.read(file))
    eight, of_h100 = counts.pop(("H200 SXM", 8)), counts.pop(("H100 SXM", 8))
    four = counts.pop(("H100 SXM", 4))
    words = " ".join(README.split())
    assert f"*Tuned rows* beyond the {counts.total()} that come with it" in words
    assert {hardware for hardware, _ in counts} == {"H200 SXM"} and {size for _, size in counts} == {1, 2, 4}
    assert f"{eight} for 8 × H200, {of_h100} for 8 × H100, and {four} for 4 × H100" in words
