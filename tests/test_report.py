"""Reports from generated results: numbers, charts, a page in a real browser, Markdown, comparisons."""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from ranks import NAMES_SHARED_MEMORY
from result_lines import ALGORITHMS, LARGE, SIMULATED, SIZES_OF_SWEEP, Record, dataset, record, without_time, write

import iris
from iris import cli, files
from iris.ops.algorithms import OPS, TRAITS
from iris.report import _tracked, comparison, drawing, markdown, tables
from iris.report.charts import charts
from iris.report.palette import PAPER, Palette
from iris.report.study import Section, Study, in_words
from iris.results import read

H200_SECTION, SIM_SECTION = Section(False, "NVIDIA H200"), Section(True, "x86_64 CPU")


def report(*arguments: object) -> int:
    return cli.main(["report", *map(str, arguments)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with results of 2 and 4 ranks and of simulated ones, and files that are no results."""
    made = tmp_path_factory.mktemp("results")
    lines = list(dataset((2, 4)))
    write(made / "2026-11-21" / "one.jsonl", [line for line in lines if line["world_size"] == 2])
    write(made / "2026-11-21" / "two.jsonl", [line for line in lines if line["world_size"] == 4])
    (made / "2026-11-21" / "rma-h200.json").write_text("{not json")
    (made / "2026-11-21" / "log.txt").write_text("a log\n")
    return made


@pytest.fixture(scope="module")
def study(folder: Path) -> Study:
    return Study(read(folder))


@pytest.fixture(scope="module")
def drawn(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page and the pictures that the command makes of ``folder``."""
    out = tmp_path_factory.mktemp("drawn")
    assert report(folder, "--out", out / "page" / "report.html", "--svg_dir", out / "svg") == 0
    return out


def test_all_lines_below_a_folder_are_read_and_nothing_else(folder: Path) -> None:
    results = read(folder)
    assert len(results) == len(list(dataset((2, 4))))
    assert {result.file.name for result in results} == {"one.jsonl", "two.jsonl"}
    assert read(folder / "2026-11-21" / "one.jsonl") == [result for result in results if result.world_size == 2]


def broken(change: Callable[[Record], object]) -> str:
    line = record("all_gather_matmul", "push", LARGE[0], 4)
    change(line)
    return json.dumps(line)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"schema": 1, "case": "all_ga', r"expected a JSON object, got \{\"schema.*if a run was stopped.*delete it"),
        ("[1, 2]", "expected a JSON object"),
        ('"\udcff"', "expected a JSON object, got .*is broken"),
        (broken(lambda line: line.update(schema=2)), "expected schema 1, got schema 2.*another version of Iris"),
        (broken(lambda line: line.pop("schema")), "expected schema 1, got schema none"),
        (broken(lambda line: line.pop("case")), "expected case: text, got nothing"),
        (broken(lambda line: line.update(params=None)), "a JSON object as params"),
        (broken(lambda line: line.update(world_size="4")), "expected world_size: a whole number from 1 to .*, got '4'"),
        (broken(lambda line: line.update(world_size=10**400)), r"expected world_size: a whole number.*, got 10{56}…$"),
        (
            broken(lambda line: line.update(world_size=True)),
            "expected world_size: a whole number from 1 to .*, got True",
        ),
        (broken(lambda line: line.update(world_size=-3)), "expected world_size: a whole number from 1 to .*, got -3"),
        (broken(lambda line: line.update(world_size=2.7)), "expected world_size: a whole number from 1 to .*, got 2.7"),
        (broken(lambda line: line.update(floor_ms=-1)), r"expected floor_ms: a number from 0 to 1e\+30, got -1"),
        (broken(lambda line: line.update(floor_ms=True)), r"expected floor_ms: a number from 0 to 1e\+30, got True"),
        (broken(lambda line: line.update(host_us=10**400)), "expected host_us: a number from 0 to"),
        (
            broken(lambda line: line["params"].update(x="HUGE")).replace('"HUGE"', "1e999"),
            "params.x: .*a number.*got inf",
        ),
        (broken(lambda line: line["params"].update(model="\udcff")), "expected a JSON object.*surrogates not allowed"),
        ('{"schema": 1, "params": ' + "[" * 10**5 + "]" * 10**5 + "}", "expected a JSON object.*recursion"),
        (f'{{"schema": 1, "environment": [{"9" * 100}]}}', f"a JSON object as environment, got .{'9' * 56}…$"),
        (broken(lambda line: line.update(validated=1)), "expected validated: true, false or null, got 1"),
        (broken(lambda line: line.update(skipped=True)), "expected skipped: text, got True"),
        (broken(lambda line: line["time_ms"].pop("p90")), "expected time_ms.p90: a number, got nothing"),
        (
            broken(lambda line: line["time_ms"].update(median=float("nan"))),
            "expected a JSON object, got .*NaN is no number",
        ),
        (broken(lambda line: line["time_ms"].update(median=0)), "expected time_ms.median: 1e-09 or more, got 0.0"),
        (
            broken(lambda line: line["time_ms"].update(median=9e-10)),
            "expected time_ms.median: 1e-09 or more, got 9e-10",
        ),
        (broken(lambda line: line["environment"].pop("hardware")), "expected environment.hardware: text, got nothing"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    good = json.dumps(record("all_gather_matmul", "auto", LARGE[0], 4))
    file = tmp_path / "a" / "some.jsonl"
    file.parent.mkdir()
    file.write_bytes(f"{good}\n\n{line}\n{good}\n".encode(errors="surrogateescape"))
    with pytest.raises(iris.ArgumentError, match=rf"^report: {re.escape(str(file))}:3: .*{words}"):
        read(tmp_path)
    assert report(tmp_path) == 2
    assert f"{file}:3" in capsys.readouterr().err


def test_compressed_results_are_read(tmp_path: Path) -> None:
    lines = [record("all_gather_matmul", "auto", shape, 4) for shape in LARGE]
    whole = write(tmp_path / "some.jsonl", lines).read_bytes()
    file = tmp_path / "more" / "some.jsonl.gz"
    file.parent.mkdir()
    file.write_bytes(gzip.compress(whole))
    assert len(read(file)) == len(lines)
    assert len(read(tmp_path)) == 2 * len(lines)
    for broken in (whole, gzip.compress(whole)[:-20], gzip.compress(whole)[:-1] + b"x"):
        file.write_bytes(broken)
        with pytest.raises(iris.ArgumentError, match=r"expected a file compressed by gzip, got .*some\.jsonl\.gz: "):
            read(tmp_path)


@pytest.mark.parametrize("text", ["\\udcff", "[" * 10**5 + "]" * 10**5])
def test_a_whole_line_at_the_end_is_not_taken_for_half_a_one(tmp_path: Path, text: str) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text(f'{{"schema": 1, "case": "{text}"}}' if text[0] == "\\" else f'{{"schema": {text}}}')
    with pytest.raises(iris.ArgumentError, match=r"some\.jsonl:1: expected a JSON object"):
        read(file)


def test_a_folder_is_no_file_of_results_whatever_its_name(tmp_path: Path) -> None:
    write(tmp_path / "x.jsonl" / "y.jsonl", [record("all_gather_matmul", "push", LARGE[0], 4)])
    assert len(read(tmp_path)) == 1
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    with pytest.raises(iris.ArgumentError, match=r"gone\.jsonl: No such file"):
        read(tmp_path)
    with pytest.raises(iris.ArgumentError, match=r"results: expected a file or folder that can be read.*too long"):
        read(tmp_path / ("x" * 300))


def test_half_a_record_at_the_end_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = json.dumps(record("all_gather_matmul", "auto", LARGE[0], 4))
    file = tmp_path / "some.jsonl"
    for tail, number in (('{"schema": 1, "case": "all_ga', 1), ('{"s', 1), (good, 2)):
        file.write_text(f"{good}\n{tail}")
        assert len(read(file)) == number
        assert (f"{file}:2 is left out" in capsys.readouterr().err) == (number == 1)
    file.write_text(f"{good}\nnotes")
    with pytest.raises(iris.ArgumentError, match=r"some\.jsonl:2: expected a JSON object, got notes"):
        read(file)


def test_no_results_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(iris.ArgumentError, match=r"results in \*\.jsonl files, got none in"):
        read(tmp_path)
    with pytest.raises(iris.ArgumentError, match=r"There is no .*nowhere"):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("why", "outcome", "failure"),
    [
        ({"validated": False}, "wrong result", "wrong result"),
        ({"error": "no luck"}, "failed", "failed: no luck"),
        ({"validated": False, "skipped": "no room"}, "skipped", "skipped: no room"),
    ],
    ids=["wrong", "failed", "skipped"],
)
def test_what_did_not_succeed_has_no_time_and_no_figure_made_from_it(
    tmp_path: Path, why: Record, outcome: str, failure: str
) -> None:
    line = record("all_gather_matmul", "copy_engine", LARGE[0], 4) | why
    (result,) = read(write(tmp_path / "x.jsonl", [line]))
    figures = (result.time, result.back_to_back_ms, result.floor_share, result.tflops_per_gpu, result.gbytes_per_s)
    assert figures == (None,) * 5 and not result.counters
    assert (result.outcome, result.failure, result.wrong) == (outcome, failure, outcome == "wrong result")


def test_a_wrong_result_of_bench_counts_as_wrong(tmp_path: Path) -> None:
    """``bench`` writes how wrong it is into the error of a record without a time."""
    line = without_time(record("all_gather_matmul", "push", LARGE[0], 4), error="wrong result: off by 3 (rank 1 of 4)")
    write(tmp_path / "x.jsonl", [line | {"validated": False}])
    (result,) = read(tmp_path)
    assert result.wrong and result.failure == "wrong result: off by 3 (rank 1 of 4)"
    assert report(tmp_path, "--out", tmp_path / "x.html") == 0
    page = (tmp_path / "x.html").read_text()
    assert "0 failed, 1 wrong" in page and "failed: wrong" not in page


def test_the_newest_result_of_a_case_counts(tmp_path: Path) -> None:
    new = record("all_gather_matmul", "push", LARGE[0], 4, seed=1)
    old = record("all_gather_matmul", "push", LARGE[0], 4, seed=2)
    old["environment"] = old["environment"] | {"date": "2026-11-20T00:00:00Z"}
    write(tmp_path / "a.jsonl", [new])
    write(tmp_path / "b.jsonl", [old])
    study = Study(read(tmp_path))
    assert [result.file.name for result in study.results] == ["a.jsonl"]
    assert tables.environments(study).note == "1 older results of the same cases are left out."


def test_simulated_ranks_are_another_case_than_gpus_of_the_same_name(tmp_path: Path) -> None:
    line = record("all_gather_matmul", "push", LARGE[0], 4)
    simulated = line | {"environment": line["environment"] | {"backend": "sim"}}
    assert len(Study(read(write(tmp_path / "x.jsonl", [line, simulated]))).results) == 2


def test_a_counter_may_be_below_0(tmp_path: Path) -> None:
    line = record("all_gather_matmul", "push", LARGE[0], 4) | {"counters": {"drift": -2}}
    (result,) = read(write(tmp_path / "x.jsonl", [line]))
    assert result.counters == {"drift": -2}


def test_of_results_of_one_moment_the_later_line_counts(tmp_path: Path) -> None:
    lines = [record("all_gather_matmul", "push", LARGE[0], 4, seed) for seed in (1, 2)]
    (result,) = Study(read(write(tmp_path / "x.jsonl", lines))).results
    assert result.time is not None and result.time.median == lines[1]["time_ms"]["median"]


def medians(opponent: str, case: str, algorithm: str, world_size: int) -> list[float]:
    """Speed-ups, computed directly from the generated lines."""
    found: dict[tuple[str, str], float] = {}
    for line in dataset((world_size,)):
        if line["time_ms"] and line["validated"] and line["case"] == case and line["environment"] is not SIMULATED:
            found[line["params"]["algorithm"], line["params"]["shape"]] = line["time_ms"]["median"]
    ours = {shape: time for (name, shape), time in found.items() if name == algorithm}
    return [found[opponent, shape] / time for shape, time in ours.items() if (opponent, shape) in found]


def rows_of(table: tables.Table) -> list[dict[str, str]]:
    """Rows as dictionaries by heading; if headings are equal, the first counts."""
    heads = [column.name for column in table.columns]
    return [{name: row[heads.index(name)].text for name in heads} for row in table.rows]


@pytest.mark.parametrize("algorithm", ["auto", "pull"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_geometric_means_say_over_how_many_rows(study: Study, algorithm: str, world_size: int) -> None:
    table = tables.means(study, H200_SECTION)
    place = ("all_gather_matmul", str(world_size), algorithm)
    (row,) = [row for row in table.rows if tuple(cell.text for cell in row[:3]) == place]
    for opponent, cells in (("nccl", row[3:8]), ("torch_symm_mem", row[8:13])):
        ratios = medians(opponent, "all_gather_matmul", algorithm, world_size)
        product = 1.0
        for ratio in ratios:
            product *= ratio
        mean, rows, faster, slower, worst = (cell.text for cell in cells)
        assert mean.split()[-1] == f"{product ** (1 / len(ratios)):.2f}"
        assert rows == ("9" if len(ratios) == 9 else f"{len(ratios)} of 9")
        assert int(faster) == sum(round(ratio, 2) > 1 for ratio in ratios)
        assert int(slower) == sum(round(ratio, 2) < 1 for ratio in ratios)
        assert worst.split()[-1] == f"{min(ratios):.2f}"


def test_calls_that_find_a_cold_l2_have_means_of_their_own(tmp_path: Path) -> None:
    lines = []
    for l2, factor in (("warm", 2.0), ("cold", 3.0)):
        for algorithm, ms in (("auto", 1.0), ("nccl", factor)):
            line = record("all_gather_matmul", algorithm, LARGE[0], 4)
            line["params"] = line["params"] | ({"l2": l2} if l2 == "cold" else {})
            line["time_ms"]["median"] = ms
            lines.append(line)
    table = tables.means(Study(read(write(tmp_path / "x.jsonl", lines))), H200_SECTION)
    found = [(row["op"], row["× NCCL"], row["rows"]) for row in rows_of(table)]
    assert found == [("all_gather_matmul", "▲ 2.00", "1"), ("all_gather_matmul, l2 cold", "▲ 3.00", "1")]


def test_speedups_are_within_one_run(tmp_path: Path) -> None:
    ours = record("all_gather_matmul", "push", LARGE[0], 4)
    theirs = record("all_gather_matmul", "nccl", LARGE[0], 4)
    write(tmp_path / "a.jsonl", [ours])
    write(tmp_path / "b.jsonl", [theirs])
    study = Study(read(tmp_path))
    assert [study.speedup(result, "nccl") for result in study.results] == [None, None]
    write(tmp_path / "a.jsonl", [ours, theirs])
    study = Study(read(tmp_path / "a.jsonl"))
    expected = theirs["time_ms"]["median"] / ours["time_ms"]["median"]
    assert study.speedup(study.results[0], "nccl") == pytest.approx(expected)


def test_speedups_are_within_one_batch(tmp_path: Path) -> None:
    """Lines without a batch, which are older, count as one batch."""
    ours = record("all_gather_matmul", "push", LARGE[0], 4)
    theirs = record("all_gather_matmul", "nccl", LARGE[0], 4)
    again = record("all_gather_matmul", "nccl", LARGE[0], 4, seed=1)
    ratio = theirs["time_ms"]["median"] / ours["time_ms"]["median"]
    for mine, batch, later, expected in ((None, None, "2", ratio), ("1", "1", "2", ratio), ("1", "2", None, None)):
        written = [theirs | {"batch": batch}, ours | {"batch": mine}, again | {"batch": later}]
        (_, result) = Study(read(write(tmp_path / "a.jsonl", written))).results
        assert Study(read(tmp_path)).speedup(result, "nccl") == (expected and pytest.approx(expected))


def test_a_matmul_alone_has_no_speedup(tmp_path: Path) -> None:
    """It does only a part of the work."""
    lines = [record("all_gather_matmul", way, LARGE[0], 4) for way in ("push", "matmul", "nccl")]
    study = Study(read(write(tmp_path / "x.jsonl", lines)))
    assert [study.speedup(result, "nccl") is None for result in study.results] == [False, True, True]


def test_problems_that_differ_in_m_alone_follow_each_other(tmp_path: Path) -> None:
    shapes = [(16, 64, 32), (16, 32, 64), (8, 64, 32), (8, 32, 64)]
    lines = [record("all_gather_matmul", "push", shape, 4) for shape in shapes]
    problems = Study(read(write(tmp_path / "x.jsonl", lines))).problems
    assert [problem.shape for problem in problems] == [(8, 32, 64), (16, 32, 64), (8, 64, 32), (16, 64, 32)]


def test_problems_without_a_shape_go_by_their_numbers(tmp_path: Path) -> None:
    """These are such as a user's own case has, whose axes are not sizes of a matmul."""
    line = record("matmul_all_reduce", "two_shot", LARGE[0], 2)
    lines = [line | {"case": "own", "params": {"rows": rows}} for rows in (33, 5, 128, 1)]
    problems = Study(read(write(tmp_path / "own.jsonl", lines))).problems
    assert [problem.label for problem in problems] == ["rows 1", "rows 5", "rows 33", "rows 128"]


def test_an_axis_of_ones_own_may_have_any_name(tmp_path: Path) -> None:
    """Also the name of one size of a matmul without the others, or of what stands for the algorithm in another case."""
    line, axes = record("matmul_all_reduce", "two_shot", LARGE[0], 2), {"n": (64, 8), "phase": ("late",), "k": (True,)}
    points = [
        {"n": n, "m": 1, "k": True, "phase": "late", "algorithm": algorithm, "way": way}
        for n in axes["n"]
        for algorithm in ("auto", "nccl")
        for way in ("put", "get")
    ]
    lines = [line | {"case": "own", "params": point, "world_size": size} for point in points for size in (2, 4)]
    study = Study(read(write(tmp_path / "own.jsonl", lines)))
    two = [problem for problem in study.problems if problem.world_size == 2]
    assert [problem.label for problem in two] == [
        f"n {n}, m 1, k True, phase late, way {way}" for n in (8, 64) for way in ("get", "put")
    ]
    assert [list(problem.results) for problem in two] == [["auto", "nccl"]] * 4
    assert [[problem.world_size for problem in group] for group in study.scalings] == [[2, 4]] * 4
    measured = tables.measurements(study, two)[0]
    assert [column.name for column in measured.columns][:3] == ["n", "way", "algorithm"] and len(measured.rows) == 8


def test_a_config_of_ones_own_may_say_anything(tmp_path: Path) -> None:
    line = record("matmul_all_reduce", "auto", LARGE[0], 2)
    lines = [line | {"config": config} for config in ({"algorithm": 3}, {"tile": [1, 2]}, None)]
    assert [result.way for result in read(write(tmp_path / "own.jsonl", lines))] == ["auto: 3", "auto", "auto"]


@pytest.mark.parametrize(
    ("ms", "words"),
    [
        (12.34567, "12.346"),
        (0.1, "0.100"),
        (0.04567, "0.0457"),
        (0.0021, "0.00210"),
        (0.00012345, "0.000123"),
        (0, "0.000"),
    ],
)
def test_short_times_have_three_digits(ms: float, words: str) -> None:
    assert in_words(ms) == words


def test_every_loss_is_listed_the_worst_first(study: Study) -> None:
    expected = []
    for case, algorithms in ALGORITHMS.items():
        for world_size in (2, 4):
            ours = "auto" if "auto" in algorithms else None
            if ours:
                expected += [ratio for ratio in medians("nccl", case, ours, world_size) if round(ratio, 2) < 1]
    rows = rows_of(tables.losses(study, H200_SECTION))
    assert expected and [row["× NCCL"] for row in rows] == [f"▼ {ratio:.2f}" for ratio in sorted(expected)]
    assert {row["algorithm"] for row in rows} == {"auto: push"}


def test_without_auto_the_fastest_algorithm_speaks_for_iris(study: Study) -> None:
    (problem, *_) = [p for p in study.problems if p.case == "matmul_all_reduce" and p.label == "8192×8192×29568"]
    chosen = problem.representative
    assert chosen is not None and chosen.time is not None
    times = {name: result.time for name, result in problem.results.items() if name in ("one_shot", "two_shot")}
    assert chosen.time.median == min(time.median for time in times.values() if time is not None)


def test_where_auto_has_no_time_nothing_speaks_for_iris(tmp_path: Path) -> None:
    auto, push = (record("all_gather_matmul", way, LARGE[0], 4) for way in ("auto", "push"))
    lines = [without_time(auto, error="no luck"), push]
    (problem,) = Study(read(write(tmp_path / "x.jsonl", lines))).problems
    assert problem.timed and problem.representative is None


def test_what_has_no_time_is_listed_with_its_reason(study: Study) -> None:
    rows = rows_of(tables.unmeasured(study, H200_SECTION))
    reasons = [(row["op"], row["algorithm"], row["ranks"], row["why"]) for row in rows]
    assert ("all_gather_matmul", "pull", "4", "failed: WaitTimeout: rank 2 waited 60 s for rank 3, flag 17") in reasons
    assert ("all_gather_matmul", "torch_symm_mem", "4", "skipped: M = 1 is not divided by 4 ranks") in reasons
    assert sum(int(row["results"]) for row in rows) == sum(line["time_ms"] is None for line in dataset((2, 4)))


def test_what_was_skipped_for_one_reason_is_one_row(tmp_path: Path) -> None:
    reason = "M=1: no multiple of 4 ranks"
    shapes = [(1, n, 64) for n in (32, 64)]
    lines = [
        without_time(record("all_gather_matmul", way, shape, 4), **why)
        for shape in shapes
        for way, why in (("auto", {"skipped": reason}), ("push", {"error": "no luck"}), ("nccl", {"skipped": reason}))
    ]
    write(tmp_path / "some.jsonl", lines)
    study = Study(read(tmp_path))
    rows = rows_of(tables.unmeasured(study, study.problems[0].section))
    told = [(row["algorithm"], row["M×N×K"], row["results"], row["why"]) for row in rows]
    assert told == [
        ("push", "1×32×64", "1", "failed: no luck"),
        ("push", "1×64×64", "1", "failed: no luck"),
        ("auto, nccl", "2 problems", "4", f"skipped: {reason}"),
    ]


def test_losses_are_among_what_a_comparator_solved_too(tmp_path: Path) -> None:
    ways = ((LARGE[0], "push"), (LARGE[0], "nccl"), (LARGE[1], "push"))
    study = Study(
        read(write(tmp_path / "x.jsonl", [record("all_gather_matmul", way, shape, 4) for shape, way in ways]))
    )
    assert tables.losses(study, H200_SECTION).note.startswith("0 of 1 problems ")


def test_what_failed_has_a_floor(tmp_path: Path) -> None:
    line = record("all_gather_matmul", "push", LARGE[0], 4)
    (failed,) = read(write(tmp_path / "x.jsonl", [without_time(line, error="no luck")]))
    assert failed.floor_ms == line["floor_ms"] and failed.floor_share is None


def test_what_was_skipped_is_told_for_each_number_of_ranks(tmp_path: Path) -> None:
    sizes = (2, 4)
    lines = [without_time(record("all_gather_matmul", "push", LARGE[0], size), skipped="too small") for size in sizes]
    study = Study(read(write(tmp_path / "some.jsonl", lines)))
    rows = rows_of(tables.unmeasured(study, H200_SECTION))
    assert [(row["ranks"], row["results"]) for row in rows] == [("2", "1"), ("4", "1")]


def test_tables_have_every_result(study: Study) -> None:
    (few, many) = tables.measurements(study, study.of(H200_SECTION, "all_gather_matmul"))
    assert [few.title, many.title] == ["all_gather_matmul, 2 ranks", "all_gather_matmul, 4 ranks"]
    assert many.note == "All rows: bf16."
    rows = rows_of(many)
    assert len(rows) == 9 * len(ALGORITHMS["all_gather_matmul"])
    at = {(row["m"], row["n"], row["algorithm"]): row for row in rows}
    line = record("all_gather_matmul", "copy_engine", LARGE[0], 4)
    row = at["8192", "8192", "copy_engine"]
    assert row["ms"] == f"{line['time_ms']['median']:.3f}"
    assert row["of floor"] == f"{100 * line['floor_share']:.0f} %"
    assert row["TFLOP/s"] == f"{line['tflops_per_gpu']:.1f}"
    assert row["skew µs"] == f"{1e3 * line['time_ms']['rank_skew']:.1f}"
    assert (row["valid"], row["host µs"], row["chunks"]) == ("yes", "33", "4")
    assert at["8192", "8192", "pull"]["ms"] == "failed"
    assert at["1", "28672", "torch_symm_mem"]["ms"] == "skipped"


def test_one_call_has_no_spread(tmp_path: Path) -> None:
    lines = [record("all_gather_matmul", way, LARGE[0], 4) for way in ("push", "nccl")]
    lines[0]["time_ms"]["calls"] = 1
    study = Study(read(write(tmp_path / "x.jsonl", lines)))
    (table,) = tables.measurements(study, study.problems)
    assert [bool(row["spread"].strip("–")) for row in rows_of(table)] == [False, True]


def test_an_overview_has_all_times_of_a_problem_in_a_row(study: Study) -> None:
    (_, table) = tables.overview(study, study.of(H200_SECTION, "all_gather_matmul"))
    assert (table.title, table.note) == ("all_gather_matmul, 4 ranks", "All rows: bf16.")
    rows = {row["M×N×K"]: row for row in rows_of(table)}
    assert len(rows) == len(table.rows) == 9
    row = rows["8192×8192×29568"]
    times = {way: record("all_gather_matmul", way, LARGE[0], 4)["time_ms"]["median"] for way in ("auto", "nccl")}
    assert {way: row[f"{way} ms"] for way in times} == {way: f"{time:.3f}" for way, time in times.items()}
    assert row["× NCCL"].endswith(f"{times['nccl'] / times['auto']:.2f}")
    assert (row["Iris takes"], row["pull ms"], row["host µs"]) == ("push", "failed", "33")
    assert tables.overview(study, study.of(H200_SECTION, "rma")) == []


def test_an_overview_begins_anew_with_each_layer(tmp_path: Path) -> None:
    lines = [record("all_gather_matmul", "push", (m, 512, 512), 4) for m in (16, 32) for _ in "ab"]
    for line, layer in zip(lines, ("gate", "down") * 2, strict=True):
        line["params"] = line["params"] | {"layer": layer}
    study = Study(read(write(tmp_path / "x.jsonl", lines)))
    (table,) = tables.overview(study, study.problems)
    assert [row["model, layer"] for row in rows_of(table)] == ["down", "down", "gate", "gate"]
    assert table.breaks == [0, 2]


def test_columns_of_sizes_come_first(tmp_path: Path) -> None:
    lines = [timed(1) | {"case": "own", "params": {"side": "left", "m": m, "model": str(m)}} for m in (1, 2)]
    lines[0]["params"]["side"] = "right"
    study = Study(read(write(tmp_path / "x.jsonl", lines)))
    (table,) = tables.measurements(study, study.problems)
    assert [column.name for column in table.columns[:3]] == ["model", "m", "side"]


def test_comparators_neither_win_nor_lose(tmp_path: Path) -> None:
    """Their figures have neither a sign nor a colour."""
    lines = [timed(ms) for ms in (1, 2, 3)]
    for line, way in zip(lines, ("push", "torch_symm_mem", "nccl"), strict=True):
        line["params"] = line["params"] | {"algorithm": way}
    study = Study(read(write(tmp_path / "x.jsonl", lines)))
    (table,) = tables.measurements(study, study.problems)
    at = [column.name for column in table.columns].index("× NCCL")
    assert [(row[at].text, row[at].mark) for row in table.rows] == [("▲ 3.00", "faster"), ("–", ""), ("1.50", "")]


def test_bold_is_the_fastest_even_if_it_is_not_ours(study: Study) -> None:
    (table, _) = tables.measurements(study, study.of(H200_SECTION, "matmul_reduce_scatter"))
    names = [column.name for column in table.columns]
    groups: dict[tuple[str, ...], list[tuple[float, str, bool]]] = {}
    for row in table.rows:
        cell, algorithm = row[names.index("ms")], row[names.index("algorithm")].text
        if cell.text != "skipped" and algorithm != "matmul":
            shape = tuple(one.text for one in row[:3])
            groups.setdefault(shape, []).append((float(cell.text), algorithm, cell.mark == "best"))
    for group in groups.values():
        fastest, *others = sorted(group)
        assert fastest[2] and not any(best for *_, best in others)


def test_the_spread_is_over_the_median(tmp_path: Path) -> None:
    study = Study(read(write(tmp_path / "x.jsonl", [timed(1, 0.25)])))
    (table,) = tables.measurements(study, study.problems)
    assert [row["spread"] for row in rows_of(table)] == ["50.0 %"]


@pytest.mark.parametrize("ways", [("local", "matmul"), ("matmul", "local")], ids=" before ".join)
def test_a_matmul_alone_is_all_the_work_of_the_case_of_this_name(tmp_path: Path, ways: tuple[str, str]) -> None:
    lines = [timed(ms) | {"case": "matmul", "world_size": 1} for ms in (1, 2)]
    for line, way in zip(lines, ways, strict=True):
        line["params"] = line["params"] | {"algorithm": way}
    study = Study(read(write(tmp_path / "x.jsonl", lines)))
    (table,) = tables.measurements(study, study.problems)
    assert [row[0].text for row in table.rows if any(cell.mark == "best" for cell in row)] == [ways[0]]


def test_what_was_timed_alone_is_not_the_fastest(tmp_path: Path) -> None:
    """Not even next to a torch.matmul alone, which does only a part of the work."""
    lines = [record("all_gather_matmul", way, LARGE[0], 4) for way in ("push", "matmul")]
    study = Study(read(write(tmp_path / "x.jsonl", lines)))
    (table,) = tables.measurements(study, study.problems)
    assert not any(cell.mark for row in table.rows for cell in row)


def test_layers_of_one_shape_are_scalings_of_their_own(tmp_path: Path) -> None:
    lines = [record("all_gather_matmul", "push", LARGE[0], size) for size in (2, 4) for _ in "ab"]
    for line, layer in zip(lines, ("gate", "down") * 2, strict=True):
        line["params"] = line["params"] | {"layer": layer}
    scalings = Study(read(write(tmp_path / "x.jsonl", lines))).scalings
    assert [[(one.names, one.world_size) for one in some] for some in scalings] == [
        [(layer, size) for size in (2, 4)] for layer in ("down", "gate")
    ]


def test_of_a_sweep_the_largest_stands_out(study: Study) -> None:
    shown = set(map(id, study.outstanding))
    assert study.sweeps
    assert all([problem for problem in sweep if id(problem) in shown] == sweep[-1:] for sweep in study.sweeps)


def test_a_sweep_is_of_sizes_that_were_timed(tmp_path: Path) -> None:
    *lines, last = [record("all_gather_matmul", "push", (m, 512, 512), 4) for m in (16, 32, 64, 128)]
    for fourth, count in ((last, 1), (without_time(last, error="no luck"), 0)):
        assert len(Study(read(write(tmp_path / "x.jsonl", [*lines, fourth]))).sweeps) == count


def test_charts_show_times_shares_scaling_and_crossover(study: Study) -> None:
    made = charts(study)
    kinds = [chart.kind for chart in made.values() if not chart.section.simulated]
    cases, sizes, outstanding = len(ALGORITHMS), 2, len(LARGE) + 1
    assert kinds.count("times") == cases * sizes * outstanding
    assert kinds.count("shares") == cases * sizes
    assert kinds.count("scaling") == cases * outstanding
    assert kinds.count("crossover") == cases * sizes
    assert kinds.count("speedups") == 0  # each case has one layer of several M: under crossover
    swept = [chart for chart in made.values() if chart.kind == "crossover"]
    assert all([p.shape and p.shape[0] for p in chart.problems] == list(SIZES_OF_SWEEP) for chart in swept)


def test_what_nothing_has_solved_has_no_chart(tmp_path: Path) -> None:
    solved = record("all_gather_matmul", "auto", LARGE[0], 4)
    skipped = without_time(record("all_gather_matmul", "auto", LARGE[1], 4), skipped="too small")
    both = charts(Study(read(write(tmp_path / "x.jsonl", [solved, skipped]))))
    assert both.keys() == charts(Study(read(write(tmp_path / "y.jsonl", [solved])))).keys()


def layers_by_m(folder: Path) -> Path:
    """Two layers, on 2 and on 4 ranks; Iris is 1.2 and 1.5 times the number of ranks as fast as NCCL."""
    lines = []
    for n, gain in ((1024, 1.2), (2048, 1.5)):
        for m in (16, 32, 64, 128):
            for size in (2, 4):
                for algorithm, ms in (("nccl", 1.0), ("auto", 1 / (gain * size))):
                    line = record("all_gather_matmul", algorithm, (m, n, 512), size)
                    line["time_ms"]["median"] = ms
                    lines.append(line)
    return write(folder / "layers.jsonl", lines)


def test_the_speed_up_by_m_is_a_geometric_mean_over_layers(tmp_path: Path) -> None:
    study = Study(read(layers_by_m(tmp_path)))
    (chart,) = [chart for chart in charts(study).values() if chart.kind == "speedups"]
    figure = drawing.draw(chart, study, Palette(["auto", "nccl"]))
    (axes,) = figure.axes
    curves = {line.get_color(): line.get_ydata() for line in axes.lines if line.get_linewidth() == 1.7}
    for size in (2, 4):
        tone = Palette([]).of_ranks(size)
        assert np.asarray(curves[tone.light]).tolist() == pytest.approx([size * math.sqrt(1.2 * 1.5)] * 4)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["2 ranks", "4 ranks"]


def test_what_was_drawn_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, out = layers_by_m(tmp_path), tmp_path / "page.html"
    assert report(results, "--out", out, "--svg_dir", tmp_path / "svg", "--charts", "speedups") == 0
    told = capsys.readouterr()
    assert told.out.splitlines() == [f"1 chart: {tmp_path / 'svg'}", f"32 results, 1 chart: {out}"]


def test_progress_is_shown_where_drawing_takes_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(_tracked(range(30))) == list(range(30))
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("iris.report._STATUS_S", 0.0)
    assert list(_tracked(range(2))) == [0, 1]
    assert capsys.readouterr() == ("", "[1/2, 0 s left] drawing\n[2/2, 0 s left] drawing\n")


def test_a_page_that_cannot_be_written_is_told_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(tmp_path / "none.jsonl", "--out", "/sys/report.html") == 2
    assert "--out: expected a file that can be written, got /sys/report.html: " in capsys.readouterr().err
    assert report(tmp_path / "none.jsonl", "--out", page := tmp_path / "page.html") == 2
    assert "none.jsonl" in capsys.readouterr().err and not page.exists() and not list(tmp_path.iterdir())


def test_charts_of_one_kind_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = layers_by_m(tmp_path)
    assert report(results, "--svg_dir", tmp_path / "svg", "--charts", "speedups") == 0
    assert not (tmp_path / "report.html").exists()  # no page was asked for
    assert [file.name for file in (tmp_path / "svg").iterdir()] == ["all_gather_matmul-speedups-nvidia-h200.svg"]
    assert report(results, "--out", tmp_path / "page.html", "--charts", "speedups", "--charts", "times") == 0
    headings = [
        heading
        for heading in ("Speed-up by M", "Times", "Crossover in M")
        if heading in (tmp_path / "page.html").read_text()
    ]
    assert headings == ["Speed-up by M", "Times"]


@pytest.mark.parametrize("of", ["one.jsonl", "."])
def test_a_page_does_not_replace_its_results(of: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = write(tmp_path / "one.jsonl", [record("all_gather_matmul", "auto", LARGE[0], 4)])
    before = results.read_bytes()
    (tmp_path / "link").symlink_to(results)
    assert report(tmp_path / of, "--out", tmp_path / "link") == 2
    assert "--out: expected a file that no results are read from, got" in capsys.readouterr().err
    assert results.read_bytes() == before


def test_kinds_without_charts_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = write(tmp_path / "one.jsonl", [record("all_gather_matmul", "auto", LARGE[0], 4)])
    page = tmp_path / "page.html"
    assert report(results, "--out", page, "--charts", "scaling", "--charts", "crossover") == 2
    expected = "--charts: expected a kind that there are charts of (times, shares), got scaling, crossover"
    assert expected in capsys.readouterr().err and not page.exists()
    assert report(results, "--out", page, "--charts", "scaling", "--charts", "times") == 0


def test_simulated_ranks_and_gpus_are_never_in_one_chart(study: Study) -> None:
    made = charts(study).values()
    assert {chart.section for chart in made} == {H200_SECTION, SIM_SECTION}
    for chart in made:
        results = [result for problem in chart.problems for result in problem.results.values()]
        assert {result.simulated for result in results} == {chart.section.simulated}
        assert chart.section.simulated == ("Simulated" in chart.alt)


def test_charts_of_the_same_words_have_names_of_their_own(tmp_path: Path) -> None:
    lines = [record("all_gather_matmul", "push", LARGE[0], 4) for _ in "abc"]
    alike = ({"x": 1, "y": 2, "z": 3}, {"x": "1, y 2", "z": 3}, {"x": "1, y 2, z 3"})
    for line, more in zip(lines, alike, strict=True):
        line["params"] |= more
    names = list(charts(Study(read(write(tmp_path / "x.jsonl", lines)))))
    assert len(names) == 4 and sum("times" in name for name in names) == 3


def test_each_algorithm_has_one_colour_and_strangers_get_their_own() -> None:
    palette = Palette(["push", "nccl", "zeta", "beta"])
    light = [tone.light for tone in palette.tones.values()]
    dark = [tone.dark for tone in palette.tones.values()]
    ranks = [palette.of_ranks(size).light for size in (2, 4, 8, 16)]
    assert len(set(light)) == len(light) == len(set(dark)) == len(palette.variables) - 6 - len(set(ranks))
    assert len({*light, *ranks}) == len(light) + 4
    assert palette.ordered(["nccl", "zeta", "push", "beta"]) == ["push", "beta", "zeta", "nccl"]


def test_five_strangers_have_tones_of_their_own_and_more_are_grey() -> None:
    tones = [Palette("abcdef").tones[name] for name in "abcdef"]
    assert len({(tone.light, tone.marker) for tone in tones}) == 6
    assert [tone.name for tone in tones] == [*(f"other-{index}" for index in range(5)), "muted"]


def test_algorithms_of_one_chart_have_different_markers() -> None:
    palette = Palette([f"strange-{place}" for place in range(6)])
    compared = ("auto", "nccl", "torch_symm_mem", "matmul")
    for op in OPS:
        markers = [palette.tones[name].marker for name in (*compared, *TRAITS[op])]
        assert len(set(markers)) == len(markers), op
    assert all(tone.marker for tone in palette.tones.values())


def test_shares_of_each_setting_have_a_chart(tmp_path: Path) -> None:
    lines = [record("all_gather_matmul", "push", LARGE[0], 4) for _ in "ab"]
    lines[1]["params"] |= {"dtype": "fp16"}
    made = charts(Study(read(write(tmp_path / "x.jsonl", lines)))).values()
    assert [chart.subtitle for chart in made if chart.kind == "shares"] == ["bf16", "fp16"]


def test_charts_of_shares_are_about_as_long(tmp_path: Path) -> None:
    lines = [record("all_gather_matmul", "auto", (16, n, 512), 4) for n in range(1024, 1037)]
    parts = [
        chart for chart in charts(Study(read(write(tmp_path / "x.jsonl", lines)))).values() if chart.kind == "shares"
    ]
    assert [len(chart.problems) for chart in parts] == [7, 6]


def test_the_line_of_the_floor_does_not_cross_a_number(tmp_path: Path) -> None:
    lines = [record("all_gather_matmul", name, LARGE[0], 4) for name in ("auto", "nccl")]
    for line, ms in zip(lines, (0.9, 2.0), strict=True):
        line["time_ms"] |= {"median": ms}
        line["floor_ms"] = 1.0
    study = Study(read(write(tmp_path / "x.jsonl", lines)))
    (chart,) = [chart for chart in charts(study).values() if chart.kind == "times"]
    (axes,) = drawing.draw(chart, study, Palette(["auto", "nccl"])).axes
    grounds = {text.get_text(): text.get_bbox_patch() for text in axes.texts}
    assert grounds["0.900"] is not None and grounds["2.000"] is None


def figure_of(kind: str, file: Path, lines: list[Record]) -> Figure:
    """The only chart of this kind."""
    study = Study(read(write(file, lines)))
    (chart,) = [chart for chart in charts(study).values() if chart.kind == kind]
    return drawing.draw(chart, study, Palette(result.algorithm for result in study.results))


def test_the_floor_is_that_of_the_whole_work(tmp_path: Path) -> None:
    """The matmul alone has no bytes to move, and a lower floor. It may be the first that was measured."""
    lines = [record("all_gather_matmul", way, LARGE[0], size) for way in ("matmul", "auto") for size in (2, 4)]
    for line in lines[:2]:
        line["floor_ms"] = 0.5 * line["floor_ms"]
    (axes,) = figure_of("scaling", tmp_path / "x.jsonl", lines).axes
    floors = [line["flops"] / line["floor_ms"] / 1e9 for line in lines[2:]]
    assert np.asarray(axes.lines[-1].get_ydata()).tolist() == pytest.approx(floors)
    (axes,) = figure_of("times", tmp_path / "x.jsonl", lines[1::2]).axes
    assert f"floor {lines[-1]['floor_ms']:.3f}" in [text.get_text() for text in axes.texts]


def test_the_fastest_is_bold_in_the_chart_of_times(tmp_path: Path) -> None:
    lines = [record("all_gather_matmul", way, LARGE[0], 4) for way in ("push", "nccl")]
    for line, ms in zip(lines, (2.0, 1.0), strict=True):
        line["time_ms"] |= {"median": ms}
    (axes,) = figure_of("times", tmp_path / "x.jsonl", lines).axes
    weights = {text.get_text(): text.get_fontweight() for text in axes.texts}
    assert (weights["1.000"], weights["2.000"]) == ("bold", "normal")


@pytest.mark.parametrize("rated", [True, False])
def test_scaling_is_in_rates_if_all_have_one(tmp_path: Path, rated: bool) -> None:
    """The floor is, too, as a dashed line; Iris is drawn above what it is compared with."""
    lines = [record("all_gather_matmul", way, LARGE[0], size) for way in ("push", "nccl") for size in (2, 4)]
    if not rated:
        lines[-1]["tflops_per_gpu"] = None
    (axes,) = figure_of("scaling", tmp_path / "x.jsonl", lines).axes
    nccl, push, floor = axes.lines
    assert axes.get_title("left") == ("TFLOP/s per GPU (level: perfect scaling)" if rated else "ms")
    for line, of in ((push, lines[:2]), (nccl, lines[2:])):
        heights = [one["tflops_per_gpu"] if rated else one["time_ms"]["median"] for one in of]
        assert np.asarray(line.get_ydata()).tolist() == pytest.approx(heights)
    floors = [one["flops"] / one["floor_ms"] / 1e9 if rated else one["floor_ms"] for one in lines[:2]]
    assert np.asarray(floor.get_ydata()).tolist() == pytest.approx(floors)
    assert push.get_zorder() > nccl.get_zorder()


@pytest.mark.parametrize("with_floor", [True, False])
def test_nccl_has_a_curve_of_its_own_among_shares_only(tmp_path: Path, with_floor: bool) -> None:
    """All speed-ups are relative to it."""
    sizes = [(m, 512, 512) for m in (16, 32, 64, 128)]
    lines = [record("all_gather_matmul", way, size, 4) for way in ("push", "nccl") for size in sizes]
    if not with_floor:
        lines = [line | {"floor_ms": None, "floor_share": None} for line in lines]
    figure = figure_of("crossover", tmp_path / "x.jsonl", lines)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["push", "nccl"][: 1 + with_floor]


@pytest.mark.parametrize("count", [7, 8, 20])
def test_an_axis_names_few_sizes_and_the_largest(count: int) -> None:
    shown = drawing._thinned(range(count))
    assert 3 < len(shown) <= 7 and shown[-1] == count - 1 and len(set(np.diff(shown))) == 1


def test_axes_of_speed_ups_end_at_ticks(tmp_path: Path) -> None:
    study = Study(read(layers_by_m(tmp_path)))
    for chart in charts(study).values():
        if chart.kind == "speedups":
            for axes in drawing.draw(chart, study, Palette(["auto", "nccl"])).axes:
                ticks = axes.get_yticks()
                assert (ticks[0], ticks[-1]) == axes.get_ylim()


def test_pictures_stand_alone(drawn: Path, study: Study) -> None:
    files = sorted((drawn / "svg").glob("*.svg"))
    assert {file.stem for file in files} == set(charts(study))
    for file in files:
        text = file.read_text()
        assert text.startswith("<?xml") and "var(--" not in text
    times = (drawn / "svg" / "all_gather_matmul-times-8192x8192x29568-4-ranks-bf16-nvidia-h200.svg").read_text()
    line = record("all_gather_matmul", "push", LARGE[0], 4)
    for word in ("8192×8192×29568", f"{line['time_ms']['median']:.3f}", f"floor {line['floor_ms']:.3f}", "failed"):
        assert f">{word}</text>" in times


class Page(HTMLParser):
    """Tags, attributes and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.values: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.values += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.words.append(data.strip())

    def check(self, study: Study) -> None:
        """Everything is there, and nothing leads out of the page."""
        rows = sum(
            len(table.rows)
            for section in study.sections
            for case in {p.case for p in study.problems if p.section == section}
            for table in tables.measurements(study, study.of(section, case))
        )
        assert rows == len(study.results) and self.tags.count("tr") > rows
        assert self.tags.count("svg") == len(charts(study))
        for kind in ("times", "shares", "scaling", "crossover"):
            assert f"charts {kind}" in [value for name, value in self.values if name == "class"]
        for word in ("Geometric-mean speed-up", "Where Iris loses", "Skipped, failed, wrong", "Environment", "abc1234"):
            assert word in self.words
        assert not {"script", "link", "img", "iframe", "object", "embed"} & set(self.tags)
        outside = [value for _, value in self.values if re.search(r"https?:|//|url\((?!\"?#)", value)]
        assert outside == []
        assert not any("@import" in word or "url(" in word for word in self.words)
        ids = [value for name, value in self.values if name == "id"]
        assert len(ids) == len(set(ids))
        targets = [value for name, value in self.values if name == "href"]
        targets += [f"#{name}" for _, value in self.values for name in re.findall(r"url\(\"?#([^)\"]+)", value)]
        assert {target[1:] for target in targets} <= set(ids) and targets


def test_the_page_holds_all_and_needs_nothing(drawn: Path, study: Study) -> None:
    text = (drawn / "page" / "report.html").read_text()
    page = Page(text)
    page.check(study)
    assert "http" not in text.replace("http-equiv", "")
    assert any("their times say nothing about a GPU" in word for word in page.words)


def test_the_same_results_give_the_same_page(tmp_path: Path) -> None:
    write(tmp_path / "x.jsonl", [record("all_gather_matmul", name, LARGE[0], 4) for name in ("push", "nccl")])
    for name in ("one.html", "two.html"):
        assert report(tmp_path, "--out", tmp_path / name) == 0
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_a_page_of_simulated_ranks_speaks_of_what_is_there(tmp_path: Path) -> None:
    for name, hardware in (("gpu", {}), ("sim", SIMULATED)):
        lines = [record("all_gather_matmul", one, LARGE[0], 4) for one in ("auto", "nccl")]
        write(tmp_path / f"{name}.jsonl", [line | {"environment": line["environment"] | hardware} for line in lines])
        assert report(tmp_path / f"{name}.jsonl", "--out", tmp_path / f"{name}.html") == 0
        words = " ".join(Page((tmp_path / f"{name}.html").read_text()).words)
        assert ("gloo + torch.matmul" in words, "Dashed" in words) == ((True, False) if hardware else (False, True))


def test_text_from_results_stays_text(tmp_path: Path) -> None:
    line = record("all_gather_matmul", "push", LARGE[0], 4)
    line["params"]["model"] = '<script>alert(1)</script> $x$ & "y"'
    write(tmp_path / "x.jsonl", [line, without_time(line, error="<img src=http://x>", world_size=2)])
    assert report(tmp_path, "--out", tmp_path / "x.html") == 0
    page = Page((tmp_path / "x.html").read_text())
    assert not {"script", "img"} & set(page.tags)
    assert any("$x$" in word for word in page.words) and "failed: <img src=http://x>" in page.words


@pytest.mark.filterwarnings("ignore:Glyph")
def test_text_and_sizes_that_no_picture_can_hold_are_drawn(tmp_path: Path) -> None:
    """There are control characters, an M of 0 and one beyond all numbers, and names that leave no room for the plot."""
    lines = [record("all_gather_matmul", name, (m, 8, 8), 4) for name in ("push", "nccl") for m in SIZES_OF_SWEEP]
    for line in lines:
        line["params"]["model"] = "\0\x1b[31mred"
    lines[0]["params"] |= {"m": 10**400, "shape": None}
    lines[1]["params"] |= {"m": 0, "shape": "0x8x8"}
    lines[2]["params"]["shape"] = f"{'9' * 5000}x8x8"
    lines[3]["params"]["algorithm"] = "9" * 60
    write(tmp_path / "x.jsonl", lines)
    assert report(tmp_path, "--out", tmp_path / "x.html") == 0


def test_a_case_without_shape_algorithm_or_floor_is_drawn(tmp_path: Path) -> None:
    lines = []
    for way in ("put", "get"):
        line = record("all_gather_matmul", "push", LARGE[0], 4)
        line |= {"case": "rma", "params": {"direction": way, "nbytes": 1 << 28}, "floor_ms": None, "floor_share": None}
        lines.append(line | {"tflops_per_gpu": None, "validated": None})
    study = Study(read(write(tmp_path / "x.jsonl", lines)))
    assert [chart.title for chart in charts(study).values()] == [
        "direction get, nbytes 268435456",
        "direction put, nbytes 268435456",
    ]
    (table,) = tables.measurements(study, study.of(H200_SECTION, "rma"))
    assert [row["valid"] for row in rows_of(table)] == ["not checked"] * 2
    assert report(tmp_path, "--out", tmp_path / "x.html") == 0


def test_a_plain_matmul_is_compared_with_torch_matmul(tmp_path: Path) -> None:
    lines = [record("all_gather_matmul", name, LARGE[0], 4) | {"case": "matmul"} for name in ("stream_k", "matmul")]
    lines[0]["time_ms"]["median"], lines[1]["time_ms"]["median"] = 2.0, 1.0
    study = Study(read(write(tmp_path / "x.jsonl", lines)))
    (row, fastest) = rows_of(tables.measurements(study, study.of(H200_SECTION, "matmul"))[0])
    assert (row["algorithm"], row["× NCCL"], row["× torch"]) == ("stream_k", "–", "▼ 0.50")
    assert (fastest["ms"], fastest["× torch"]) == ("1.000", "–")
    assert [row["× torch"] for row in rows_of(tables.losses(study, H200_SECTION))] == ["▼ 0.50"]
    assert rows_of(tables.means(study, H200_SECTION))[0]["× torch"] == "▼ 0.50"


def test_counters_of_every_two_ranks_are_a_matrix(tmp_path: Path) -> None:
    line = record("all_gather_matmul", "push", LARGE[0], 2)
    rates = {f"GB/s rank {rank} peer {peer}": 100.0 * rank + peer for rank in range(2) for peer in range(2)}
    line |= {"case": "rma_matrix", "params": {"direction": "put", "way": "kernel"}, "counters": rates | {"tries": 3}}
    study = Study(read(write(tmp_path / "x.jsonl", [line])))
    (matrix,) = tables.matrices(study.of(H200_SECTION, "rma_matrix"))
    assert [[cell.text for cell in row] for row in matrix.rows] == [
        ["rank 0", "0.0", "1.0"],
        ["rank 1", "100.0", "101.0"],
    ]
    (row,) = rows_of(tables.measurements(study, study.of(H200_SECTION, "rma_matrix"))[0])
    assert row["algorithm"] == "kernel" and row["tries"] == "3" and not any("peer" in name for name in row)
    page = tmp_path / "x.md"
    page.write_text(f"{markdown.BEGIN}{markdown.END}")
    markdown.write(study, page)
    written = (tmp_path / "x" / "rma_matrix-2-ranks-nvidia-h200.md").read_text()
    assert f"\n## {matrix.title}\n\n{markdown.grid(matrix)}" in written
    assert "[rma_matrix, 2 ranks](x/rma_matrix-2-ranks-nvidia-h200.md): 1 row\n" in page.read_text()


def test_times_of_simulated_ranks_are_not_compared(study: Study, tmp_path: Path) -> None:
    titles = [table.title for table in tables.summary(study, SIM_SECTION)]
    assert titles == ["Skipped, failed, wrong"]
    assert len(tables.summary(study, H200_SECTION)) == 3
    rates = {"× NCCL", "× torch", "of floor", "floor ms", "TFLOP/s", "GB/s"}
    for section, shown in ((SIM_SECTION, set[str]()), (H200_SECTION, rates)):
        problems = study.of(section, "all_gather_matmul")
        (every, *_), (each, *_) = tables.measurements(study, problems), tables.overview(study, problems)
        assert {column.name for column in every.columns} & rates == shown
        assert {column.name for column in each.columns} & rates == shown & {"× NCCL", "× torch", "of floor"}
        marks = {cell.mark for table in (every, each) for row in table.rows for cell in row}
        assert bool(marks & {"best", "slower", "faster"}) == bool(shown)
    (sim,) = study.of(SIM_SECTION, "all_gather_matmul")
    assert sim.timed.keys() == {"push", "nccl"}
    line = record("matmul_all_reduce", "one_shot", LARGE[0], 2) | {"counters": {"GB/s rank 0 peer 1": 1e-3, "tries": 3}}
    write(tmp_path / "sim.jsonl", [line | {"environment": SIMULATED}])
    (simulated,) = read(tmp_path / "sim.jsonl")
    assert simulated.counters == {"tries": 3} and simulated.time is not None


def test_without_matplotlib_the_message_says_how_to_get_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("drawing", "svg"):
        monkeypatch.delitem(sys.modules, f"iris.report.{name}", raising=False)
        monkeypatch.delattr(iris.report, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report(folder, "--out", tmp_path / "x.html") == 1
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--window-size=1280,5000"),
)


@pytest.fixture
def browser(tmp_path: Path) -> Callable[..., str]:
    """A function that opens a file in a real browser without a window, and returns the browser's output."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        assert not os.environ.get("CI"), f"none of {', '.join(BROWSERS)} is here, where CI is set"
        pytest.skip("no browser: apt-get install chromium")
    program = found

    def open_page(page: Path, *flags: str) -> str:
        command = [program, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return open_page


def colours(png: Path) -> dict[str, float]:
    """The colours of a picture, each with its share of the pixels."""
    image = Image.open(png).convert("RGB")
    counted: list[Any] = image.getcolors(maxcolors=1 << 24) or []
    return {"#{:02x}{:02x}{:02x}".format(*colour): count / (image.width * image.height) for count, colour in counted}


@NAMES_SHARED_MEMORY
@pytest.mark.timeout(300)
def test_a_browser_shows_the_page_from_disk(
    browser: Callable[..., str], drawn: Path, study: Study, tmp_path: Path
) -> None:
    page = drawn / "page" / "report.html"
    Page(browser(page, "--dump-dom", f"--screenshot={tmp_path / 'light.png'}")).check(study)
    browser(page, f"--screenshot={tmp_path / 'dark.png'}", "--blink-settings=preferredColorScheme=0")
    tones = Palette(()).tones
    used = [tones[name] for name in ALGORITHMS["all_gather_matmul"]]
    for name in ("light", "dark"):
        seen = colours(tmp_path / f"{name}.png")
        assert max(seen, key=lambda colour: seen[colour]) == getattr(PAPER, name)
        for tone in used:
            assert seen.get(getattr(tone, name), 0) > 0.0005, (name, tone.name)


def test_markdown_replaces_what_is_between_the_markers(folder: Path, study: Study, tmp_path: Path) -> None:
    file = tmp_path / "performance.md"
    before, after = "# Performance\r\n\nwords  \n" + markdown.BEGIN, markdown.END + "\n\ntail without newline"
    file.write_bytes(f"{before}\nold figures\n{after}".encode())
    for _ in range(2):
        assert report(folder, "--markdown", file) == 0
    text = file.read_bytes().decode()
    assert text.startswith(before) and text.endswith(after) and "old figures" not in text
    for section in study.sections:
        for table in tables.summary(study, section):
            assert markdown.grid(table) in text if table.rows else f"**{table.title}:** none" in text
    assert markdown.grid(tables.environments(study)) in text
    assert not (tmp_path / "report.html").exists()


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A file that a report can be written into."""
    made = tmp_path / "page.md"
    made.write_text(f"{markdown.BEGIN}{markdown.END}\nwords behind")
    return made


def contents(folder: Path) -> dict[str, bytes]:
    """The contents of the files below a folder, by name."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_grid_reads_as_it_shows() -> None:
    """It is padded, with numbers to the right; best and wrong cells are bold, and characters of Markdown escaped."""
    columns = [tables.Column("a|b", False), tables.Column("ms")]
    rows = [
        [tables.Cell("x\\|y*"), tables.Cell("1.5", "best")],
        [tables.Cell("z\n<i>"), tables.Cell("no", "wrong")],
        [tables.Cell(""), tables.Cell("10", "slower")],
    ]
    assert markdown.grid(tables.Table("", "", columns, rows)).splitlines() == [
        r"| a\|b     |      ms |",
        r"| -------- | ------: |",
        r"| x\\\|y\* | **1.5** |",
        r"| z \<i\>  |  **no** |",
        r"|          |      10 |",
    ]


def test_tables_of_many_rows_are_folded(folder: Path, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for most, folded in ((150, False), (3, True)):
        monkeypatch.setattr(markdown, "_LONG", most)
        assert report(folder, "--markdown", page) == 0
        text = page.read_text()
        assert ("<details><summary>Where Iris loses. " in text) == folded
        assert ("**Where Iris loses.** " in text) != folded


@pytest.mark.parametrize(("count", "words"), [(1, "1 row"), (2, "2 rows")])
def test_rows_of_measurements_are_counted(page: Path, count: int, words: str) -> None:
    lines = [record("all_gather_matmul", "push", shape, 4) for shape in LARGE[:count]]
    assert report(write(page.parent / "x.jsonl", lines), "--markdown", page) == 0
    assert re.findall(r"\.md\): (.*)$", page.read_text(), re.MULTILINE) == [words]


def test_text_of_markdown_is_in_lines_of_120(folder: Path, page: Path) -> None:
    assert report(folder, "--markdown", page) == 0
    lines = [line for line in page.read_text().splitlines() if not line.startswith(("|", "<details>", "- ["))]
    assert max(map(len, lines)) <= 120


def test_measurements_have_a_file_for_each_op_and_number_of_ranks(folder: Path, study: Study, page: Path) -> None:
    assert report(folder, "--markdown", page) == 0
    listed = re.findall(r"^- \[(.*)\]\((page/.*)\): (\d+) rows?$", page.read_text(), re.MULTILINE)
    texts = {name: (page.parent / name).read_text() for _, name, _ in listed}
    assert len(texts) == len(listed)
    assert {file.relative_to(page.parent) for file in (page.parent / "page").iterdir()} == set(map(Path, texts))
    assert sum(int(rows) for *_, rows in listed) == len(study.problems)
    assert "page/matmul_all_reduce-4-ranks-nvidia-h200.md" in texts
    for title, name, rows in listed:
        first, _, heading, *_ = texts[name].splitlines()
        assert first == markdown.MARK and heading.startswith(f"# {title}: ")
        assert "](../page.md#columns)" in texts[name] and ("Simulated ranks show" in texts[name]) == ("x86" in name)
        (grid,) = re.findall(r"(?:^\|.*\|\n)+", texts[name], re.MULTILINE)
        assert len(grid.splitlines()) - 2 == int(rows)
        assert len({row.replace("\\|", "").count("|") for row in grid.splitlines()}) == 1
    assert "\n### Columns\n" in page.read_text()
    groups = [tables.overview(study, study.of(section, case)) for section in study.sections for case in ALGORITHMS]
    shown = [markdown.grid(table) for group in groups for table in group]
    assert len(shown) == len(texts)
    assert all(any(grid in text for text in texts.values()) for grid in shown)


def test_measurements_of_an_earlier_report_go_and_other_files_stay(
    folder: Path, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(folder, "--markdown", page) == 0
    measured = page.with_suffix("")
    stale = sorted(measured.glob("*-4-ranks-*"))
    own = measured / "notes.md"
    own.write_text(f"# Notes\n\n{markdown.MARK}\n")
    assert stale
    capsys.readouterr()
    assert report(folder / "2026-11-21" / "one.jsonl", "--markdown", page) == 0
    told = capsys.readouterr().out
    assert all(f"{file} is removed" in told and not file.exists() for file in stale)
    assert told.count("is removed") == len(stale) and own.exists()
    assert "4-ranks" not in page.read_text() and len(list(measured.glob("*-2-ranks-*"))) > 2


@pytest.mark.parametrize("first", ["# Mine", ""])
def test_a_file_that_no_report_wrote_is_not_replaced(
    folder: Path, page: Path, capsys: pytest.CaptureFixture[str], first: str
) -> None:
    own = page.with_suffix("") / "matmul_all_reduce-4-ranks-nvidia-h200.md"
    own.parent.mkdir()
    own.write_text(f"{first}\n")
    before = contents(page.parent)
    assert report(folder, "--markdown", page) == 2
    assert f"--markdown: expected no file of yours where measurements go, got {own}. Move" in capsys.readouterr().err
    assert contents(page.parent) == before


def test_measurements_whose_names_differ_in_signs_only_share_a_file(tmp_path: Path, page: Path) -> None:
    lines = [timed(1) | {"case": case} for case in ("../a b", "a-b")]
    markdown.write(Study(read(write(tmp_path / "x.jsonl", lines))), page)
    (file,) = page.with_suffix("").iterdir()
    assert file.name == "a-b-4-ranks-nvidia-h200.md"
    assert re.findall(r"^# (.*), 4 ranks: NVIDIA H200$", file.read_text(), re.MULTILINE) == ["../a b", "a-b"]
    assert page.read_text().count(f"(page/{file.name}): 1 row\n") == 2


@pytest.mark.parametrize("name", ["performance", ".md"])
def test_a_page_whose_name_has_no_suffix_is_refused(page: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    other = page.rename(page.parent / name)
    assert report(page.parent / "no-results", "--markdown", other) == 2
    assert f"--markdown: expected a name with a suffix, such as .md, got {other}. The folder" in capsys.readouterr().err


def test_a_page_may_have_any_name(folder: Path, page: Path) -> None:
    other = page.rename(page.parent / os.fsdecode(b"\xff a).md"))
    markdown.write(Study(read(folder)), other)
    assert "](%FF%20a%29/matmul_all_reduce-4-ranks-nvidia-h200.md): " in other.read_text()
    file = other.with_suffix("") / "matmul_all_reduce-4-ranks-nvidia-h200.md"
    assert "](../%FF%20a%29.md#columns)" in file.read_text()


@pytest.mark.parametrize(
    "text",
    [
        "no markers",
        markdown.BEGIN,
        f"{markdown.END}\n{markdown.BEGIN}",
        f"{markdown.BEGIN}{markdown.END}{markdown.END}",
    ],
)
def test_a_file_without_its_two_markers_is_refused_and_kept(folder: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.md"
    file.write_text(text)
    with pytest.raises(iris.ArgumentError, match=r"each marker once, in order.*Put the lines <!-- report:begin -->"):
        markdown.write(Study(read(folder)), file)
    assert report(folder, "--markdown", file) == 2
    assert file.read_text() == text
    assert report(folder, "--markdown", tmp_path / "none.md") == 2


@pytest.mark.parametrize("failing", ["write_bytes", "replace"])
def test_a_full_disk_leaves_the_file_as_it_was_and_nothing_beside_it(
    folder: Path, page: Path, failing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page.read_text()
    write_bytes = Path.write_bytes

    def full(path: Path, content: Any) -> None:
        if failing == "write_bytes":
            write_bytes(path, content[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, failing, full)
    assert report(folder, "--markdown", page) == 2
    first = page.parent / "page" / "all_gather_matmul-2-ranks-nvidia-h200.md"
    told = f"--markdown: expected a file that can be written, got {first}: No space left on device"
    assert told in capsys.readouterr().err
    assert page.read_text() == text and list(page.parent.iterdir()) == [page]


def test_if_one_file_cannot_be_written_all_stay_as_they_were(
    folder: Path, page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(folder / "2026-11-21" / "one.jsonl", "--markdown", page) == 0
    before = contents(page.parent)
    write_bytes, written = Path.write_bytes, []

    def full(path: Path, content: bytes) -> int:
        written.append(path)
        if len(written) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    assert report(folder, "--markdown", page) == 2
    fourth = page.parent / "page" / "matmul_all_reduce-4-ranks-nvidia-h200.md"
    assert f"got {fourth}: No space left on device" in capsys.readouterr().err
    assert contents(page.parent) == before


def test_a_file_that_is_replaced_keeps_its_mode_and_a_link_its_target(folder: Path, tmp_path: Path) -> None:
    file, link = tmp_path / "docs" / "x.md", tmp_path / "link.md"
    file.parent.mkdir()
    file.write_text(f"{markdown.BEGIN}{markdown.END}")
    file.chmod(0o640)
    link.symlink_to("docs/x.md")
    assert report(folder, "--markdown", link) == 0
    assert link.is_symlink() and sorted(file.parent.iterdir()) == [file.with_suffix(""), file]
    assert len(file.read_text()) > 1000 and file.stat().st_mode & 0o7777 == 0o640
    assert all("](../x.md)" in one.read_text() for one in file.with_suffix("").iterdir())


def test_what_may_not_be_written_is_not_replaced() -> None:
    user, nobody = os.geteuid(), 65534
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "x.html")
        file.write_text("kept")
        file.chmod(0o444)
        Path(folder).chmod(0o777)
        os.seteuid(user or nobody)
        try:
            with pytest.raises(iris.ArgumentError, match=r"--out: .*got .*x\.html: Permission denied"):
                files.write("report", "--out", file, "new")
        finally:
            os.seteuid(user)
        assert file.read_text() == "kept" and list(Path(folder).iterdir()) == [file]


def test_markdown_in_another_encoding_is_refused(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.md"
    file.write_bytes(b"\xff" + f"{markdown.BEGIN}{markdown.END}".encode())
    with pytest.raises(iris.ArgumentError, match=r"--markdown: expected text in UTF-8, got .*x\.md: .*byte 0xff"):
        markdown.parts(file)


@pytest.mark.parametrize(
    ("option", "path", "words"),
    [
        ("--out", "/dev/full", "a file that can be written, got /dev/full: No space left"),
        ("--out", "/sys/report.html", "a file that can be written, got /sys/report.html: "),
        ("--out", "/proc/foo/report.html", "a folder to write into, got /proc/foo: No such file"),
        ("--svg_dir", "/proc/foo", "a folder to write into, got /proc/foo: No such file"),
        ("--svg_dir", __file__, f"a folder to write into, got {__file__}: File exists"),
        ("--out", "x" * 300, f"a file that can be written, got {'x' * 300}: File name too long"),
        ("--markdown", "x" * 300, f"a file that can be read, got {'x' * 300}: File name too long"),
    ],
)
def test_what_the_file_system_refuses_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, path: str, words: str
) -> None:
    results = write(tmp_path / "x.jsonl", [timed(1)])
    assert report(results, option, path) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"iris report: error: {option}: expected {words}")


def test_a_page_can_go_into_a_device_and_be_of_files_of_any_name(tmp_path: Path) -> None:
    results = write(tmp_path / os.fsdecode(b"\xff.jsonl"), [timed(1)])
    assert report(results, "--out", "/dev/null") == 0
    assert not Path("/dev/null").is_file()
    assert report(results, "--out", tmp_path / "x.html") == 0
    assert "\\udcff.jsonl" in (tmp_path / "x.html").read_text()


def test_a_page_can_go_into_a_pipe() -> None:
    """Also into a shell's ``>(gzip > page.gz)``, whose only name is /dev/fd/63."""
    reading, writing = os.pipe()
    pipe = Path(f"/dev/fd/{writing}")
    files.require_writable("report", "--out", pipe)
    files.write("report", "--out", pipe, "a page")
    assert os.read(reading, 100) == b"a page"
    for end in (reading, writing):
        os.close(end)


def timed(
    median: float, spread: float = 0.01, shape: tuple[int, int, int] = LARGE[0], calls: int | None = None
) -> Record:
    line = record("all_gather_matmul", "push", shape, 4)
    line["time_ms"] = {
        "median": median,
        "min": median,
        "p10": median - spread,
        "p90": median + spread,
        "rank_skew": 0.0,
        "calls": calls,
    }
    return line


def simulated(median: float) -> Record:
    return timed(median) | {"environment": SIMULATED}


WRONG = timed(1) | {"validated": False}
FAILED = without_time(timed(1), error="LaunchError: rank 1 died")


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (timed(1), timed(1.2), "slower"),
        (timed(1), timed(0.8), "faster"),
        (timed(1), timed(1.021, 0.001), "same"),
        (timed(1), timed(0.9705, 0.0001), "same"),
        (timed(1, 0.15), timed(1.2, 0.15), "same"),
        (timed(1), WRONG, "broken"),
        (timed(1), FAILED, "broken"),
        (FAILED, timed(1), "mended"),
        (FAILED, WRONG, "untimed"),
        (timed(1), timed(2, calls=2), "unsure"),
        (timed(1, calls=3), timed(2, calls=3), "slower"),
        (simulated(1), simulated(2), "simulated"),
        (simulated(1), WRONG | {"environment": SIMULATED}, "broken"),
    ],
)
def test_only_what_is_beyond_noise_has_changed(tmp_path: Path, before: Record, after: Record, kind: str) -> None:
    old, new = (read(write(tmp_path / f"{name}.jsonl", [line])) for name, line in (("a", before), ("b", after)))
    assert [change.kind for change in comparison.compare(old, new, 3.0)] == [kind]


@pytest.mark.parametrize("after", [1.25, 0.75])
def test_medians_must_differ_by_more_than_the_threshold(tmp_path: Path, after: float) -> None:
    old, new = (read(write(tmp_path / name, [timed(ms)])) for name, ms in (("a.jsonl", 1), ("b.jsonl", after)))
    kinds = [comparison.compare(old, new, percent)[0].kind for percent in (24.0, 25.0)]
    assert kinds == ["slower" if after > 1 else "faster", "same"]


@pytest.mark.parametrize("with_rich", [True, False])
def test_compare_prints_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], with_rich: bool
) -> None:
    if not with_rich:
        for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, "rich", None)
    other = timed(0.5, shape=LARGE[2])
    other["environment"] = other["environment"] | {"hardware": "NVIDIA B200"}
    before = write(tmp_path / "a" / "x.jsonl", [timed(1), timed(2, shape=LARGE[1]), timed(0.5, shape=LARGE[2])])
    after = write(tmp_path / "b" / "y.jsonl", [timed(1.25), timed(2.01, shape=LARGE[1]), other])
    assert report("--compare", before.parent, after, "--each") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (slower,) = [line for line in lines if line[:1] == ["slower"]]
    assert slower[1:3] == ["all_gather_matmul", "4"] and slower[-4:] == ["1.000", "1.250", "+25.0", "%"]
    assert [line[0] for line in lines if line[:1] in (["new"], ["gone"])] == ["new", "gone"]
    assert lines[-1] == "1 slower, 1 new, 1 gone, 1 the same within noise".split()
    assert ["before:", "NVIDIA", "H200,"] == lines[0][:3]


def test_compare_counts_what_is_new_or_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sets that overlap little would have thousands of rows; all else is as with ``--each``."""
    shapes = [(64 * number, 512, 512) for number in range(1, 31)]
    wide = [timed(1, shape=shape) | {"world_size": 8} for shape in shapes[:2]]
    a = write(tmp_path / "a.jsonl", [timed(1), *(timed(1, shape=shape) for shape in shapes[:12])])
    b = write(tmp_path / "b.jsonl", [timed(2), *(timed(1, shape=shape) for shape in shapes[12:]), *wide])
    assert report("--compare", a, b) == 0
    counts = capsys.readouterr().out.splitlines()
    assert report("--compare", a, b, "--each") == 0
    cases = capsys.readouterr().out.splitlines()
    alone, listed = ([line.split() for line in told if re.match(" *(new|gone) ", line)] for told in (counts, cases))
    assert alone == [
        ["new", "all_gather_matmul", "4", "18", "cases"],
        ["new", "all_gather_matmul", "8", "2", "cases"],
        ["gone", "all_gather_matmul", "4", "12", "cases"],
    ]
    assert len(listed) == 32 and len(cases) - len(counts) == 32 - 3
    assert counts[-1] == cases[-1] == "1 slower, 20 new, 12 gone, 0 the same within noise"
    assert next(line for line in counts if "slower" in line).split()[:3] == ["slower", "all_gather_matmul", "4"]


def test_compare_says_once_where_and_in_its_last_column_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = without_time(timed(1, shape=LARGE[1]), error="out of memory")
    skipped = without_time(timed(1, shape=LARGE[2]), skipped="a long story")
    whole = timed(1)
    whole["environment"] = whole["environment"] | {"commit": "0123456789" * 4}
    before = write(tmp_path / "a.jsonl", [whole, timed(1, shape=LARGE[1])])
    after = write(tmp_path / "b.jsonl", [timed(1.25), failed, skipped])
    assert report("--compare", before, after, "--each") == 0
    printed = capsys.readouterr().out
    assert "commit 0123456 and abc1234," in printed
    table = printed[printed.index("before ms") :]
    assert "8192x" in table and ", m " not in table
    assert "NVIDIA H200" not in table and "a long story" not in table and "failed: out of memory" in table


def test_compare_tells_sizes_where_there_is_no_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = (timed(ms) for ms in (1, 1.25))
    for line in (before, after):
        del line["params"]["shape"]
    sets = [write(tmp_path / name, [line]) for name, line in (("a.jsonl", before), ("b.jsonl", after))]
    assert report("--compare", *sets) == 0
    assert ", m 8192" in capsys.readouterr().out


def test_compare_tells_variables_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lines(variables: str) -> list[Record]:
        one = timed(1)
        return [one | {"environment": one["environment"] | {"variables": variables}}]

    before = write(tmp_path / "a.jsonl", lines("NCCL_ALGO=Ring"))
    for variables, told in (("NCCL_ALGO=Ring", False), ("NCCL_ALGO=Tree", True)):
        assert report("--compare", before, write(tmp_path / "b.jsonl", lines(variables))) == 0
        assert ("variables NCCL_ALGO=Ring" in capsys.readouterr().out) == told


def test_a_regression_fails_only_if_asked(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [timed(1)])
    b = write(tmp_path / "b.jsonl", [timed(1.1)])
    assert report("--compare", a, b) == 0
    assert report("--compare", a, b, "--fail_on_regression") == 1
    assert report("--compare", b, a, "--fail_on_regression") == 0
    assert report("--compare", a, b, "--fail_on_regression", "--threshold", "12") == 0
    both = write(tmp_path / "both.jsonl", [timed(1), timed(1, shape=LARGE[1])])
    assert report("--compare", both, a) == 0
    assert report("--compare", both, a, "--fail_on_regression") == 1


def test_a_threshold_may_be_0(tmp_path: Path) -> None:
    a, b = (write(tmp_path / name, [timed(ms, 0.001)]) for name, ms in (("a.jsonl", 1), ("b.jsonl", 1.02)))
    assert report("--compare", a, b, "--fail_on_regression") == 0
    assert report("--compare", a, b, "--fail_on_regression", "--threshold", "0") == 1


def test_why_there_was_no_time_before_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report("--compare", write(tmp_path / "a.jsonl", [FAILED]), write(tmp_path / "b.jsonl", [timed(1)])) == 0
    (mended,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["mended"]]
    assert "failed: LaunchError: rank 1 died" in mended


def test_sets_without_a_case_in_common_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (write(tmp_path / f"{n}.jsonl", [timed(1, shape=LARGE[n])]) for n in (0, 1))
    assert report("--compare", a, b) == 2
    assert "--compare: expected a case that is in both sets, got none" in capsys.readouterr().err


def test_what_is_measured_beside_iris_is_no_regression_of_its(tmp_path: Path) -> None:
    def lines(ours: float, theirs: float) -> list[Record]:
        beside = [timed(theirs), timed(theirs)]
        for one, name in zip(beside, ("nccl", "matmul"), strict=True):
            one["params"] = {**one["params"], "algorithm": name}
        return [timed(ours), *beside]

    before = write(tmp_path / "a.jsonl", lines(1, 2))
    for ours, theirs, status in ((1, 2.4, 0), (1.25, 2, 1)):
        after = write(tmp_path / "b.jsonl", lines(ours, theirs))
        assert report("--compare", before, after, "--fail_on_regression") == status


def test_what_moved_with_its_opponent_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lines(ours: float, nccl: float) -> list[Record]:
        rival = timed(nccl)
        rival["params"] = {**rival["params"], "algorithm": "nccl"}
        return [timed(ours), rival]

    before = write(tmp_path / "a.jsonl", lines(1, 2))
    for nccl, percent, told in ((2.4, "+20.0 %", True), (2.1, "+5.0 %", False), (1.0, "-50.0 %", False)):
        assert report("--compare", before, write(tmp_path / "b.jsonl", lines(1.25, nccl))) == 0
        printed = capsys.readouterr().out
        (ours,) = [line for line in printed.splitlines() if "slower" in line and "+25.0 %" in line]
        assert percent in ours
        assert printed.count(percent) == 2  # once in its own row: it is no rival of itself
        assert ("slower: so is nccl, by half as much or more" in printed) == told


def test_an_opponent_that_was_timed_too_seldom_explains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(ours: float, nccl: float) -> list[Record]:
        rival = timed(nccl, calls=2)
        return [timed(ours), rival | {"params": {**rival["params"], "algorithm": "nccl"}}]

    before, after = (write(tmp_path / f"{one}.jsonl", lines(one, 2 * one)) for one in (1, 2))
    assert report("--compare", before, after) == 0
    printed = capsys.readouterr().out
    assert printed.count("+100.0 %") == 1 and "so is nccl" not in printed


@pytest.mark.parametrize("factors", [(1.2, 3, 2), (0.8, 0.3, 0.5)], ids=["slower", "faster"])
def test_what_changed_most_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], factors: tuple[float, ...]
) -> None:
    before, after = (
        write(tmp_path / name, [timed(time, shape=shape) for time, shape in zip(times, LARGE, strict=True)])
        for name, times in (("a.jsonl", (1, 1, 1)), ("b.jsonl", factors))
    )
    assert report("--compare", before, after) == 0
    changes = re.findall(r"[+-][\d.]+ %", capsys.readouterr().out)
    assert changes == [f"{100 * (factor - 1):+.1f} %" for factor in (factors[1], factors[2], factors[0])]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give one file or folder of results, or --compare A B"),
        (["results", "--threshold", "2"], "belong to --compare A B"),
        (["results", "--fail_on_regression"], "belong to --compare A B"),
        (["results", "--each"], "belong to --compare A B"),
        (["--compare", "a", "b", "--threshold", "nan"], "nan is not a number of percent, 0 or more"),
        (["--compare", "a", "b", "--threshold", "3%"], "3% is not a number of percent, 0 or more"),
        (["results", "--compare", "a", "b"], "give one file or folder of results, or --compare A B"),
        (["--compare", "a", "b", "--out", "x.html"], "--compare only prints"),
        (["results", "--markdown", "x.md", "--charts", "times"], "--charts needs --out or --svg_dir"),
        (["--compare", "a", "b", "--charts", "times"], "--compare only prints"),
    ],
)
def test_contradicting_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        report(*arguments)
    assert stopped.value.code == 2 and words in capsys.readouterr().err
