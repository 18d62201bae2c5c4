"""The output of commands while they measure, and afterwards: it fits the terminal, and leaves out what says nothing."""

from __future__ import annotations

import csv
import io
import re
import sys
from pathlib import Path

import pytest

from iris.bench.axes import Params
from iris.bench.case import Case
from iris.bench.cases import fused, transfers
from iris.bench.driver import Group
from iris.bench.records import record
from iris.bench.state import Outcome
from iris.bench.tables import write_csv, write_json, write_table
from iris.progress import progress
from iris.report import tables
from iris.report.study import Study
from iris.results import read

RATES = ["GB/s", "TFLOP/s", "floor ms", "of floor", "× NCCL"]
SIMULATED: dict[str, str | int | None] = {"hardware": "simulated", "backend": "sim", "date": "2026-11-26T12:00:00Z"}
H200 = SIMULATED | {"hardware": "NVIDIA H200", "backend": "cuda"}


class Terminal(io.StringIO):
    """A terminal that keeps what a program writes."""

    def isatty(self) -> bool:
        return True

    @property
    def drawn(self) -> str:
        """The text without the codes for positions and colours."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())


@pytest.mark.parametrize("columns", [80, 200])
def test_a_narrow_terminal_shows_how_far_a_run_is(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    words = "all_gather_matmul shape=8192x8192x29568 dtype=bf16 gather_dim=0 b_layout=transposed"
    with progress(12) as advance:
        advance("starting ranks", 3)
        advance(words, 0)
    shown = words if columns == 200 else r"all_gather_matmul shape=8192x8192x29568 \S*…"
    assert re.search(rf"━  3/12 \S+ {shown}", terminal.drawn)


def test_sizes_are_not_told_beside_the_shape_that_says_them() -> None:
    case = Case("matmul_all_reduce", fused.matmul_all_reduce)
    params: Params = {"shape": "64x96x128", "m": 64, "n": 96, "k": 64, "dtype": "bf16", "algorithm": "auto"}
    assert Group(case, [params]).label == "matmul_all_reduce shape=64x96x128 dtype=bf16"
    others = {name: value for name, value in params.items() if name != "shape"}
    assert Group(case, [others]).label == "matmul_all_reduce m=64 n=96 k=64 dtype=bf16"


def test_what_auto_took_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def measured(shape: str, algorithm: str, took: str | None) -> dict[str, object]:
        config = {"algorithm": took} if took is not None else None
        outcome = Outcome(validated=True, seconds=[3e-3], config=config)
        return record("matmul_all_reduce", {"shape": shape, "algorithm": algorithm}, [outcome], H200, 2, "batch")

    results = [measured("a", "auto", "two_shot"), measured("a", "push", "push"), measured("a", "nccl", None)]
    write_table(results, {}, out := io.StringIO())
    assert [line.split("  ")[0] for line in map(str.strip, out.getvalue().splitlines()) if line.endswith("yes")] == [
        "auto: two_shot",
        "push",
        "nccl",
    ]
    write_csv(results, {}, everything := io.StringIO())
    rows = csv.DictReader(everything.getvalue().splitlines())
    assert [(row["algorithm"], row["picked"]) for row in rows] == [("auto", "two_shot"), ("push", ""), ("nccl", "")]
    write_table([measured("a", "auto", "ring"), measured("b", "auto", "push")], {}, several := io.StringIO())
    assert "auto: ring" in several.getvalue() and "auto: push" in several.getvalue()
    write_table([measured("a", "auto", "ring"), measured("b", "auto", "ring")], {}, same := io.StringIO())
    assert same.getvalue().splitlines()[0].strip().endswith(" algorithm=auto: ring")
    write_table([measured("a", "auto", None)], {}, unknown := io.StringIO())
    assert "auto:" not in unknown.getvalue()


@pytest.mark.parametrize(("environment", "rated"), [(H200, True), (SIMULATED, False)])
def test_what_is_made_of_a_time_is_not_shown_of_simulated_ranks(
    environment: dict[str, str | int | None], rated: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = Outcome(validated=True, flops=10**9, nbytes=10**6, floor_s=1e-4, seconds=[3e-3] * 3)
    results = [
        record("matmul_all_reduce", {"dtype": "bf16", "algorithm": name}, [outcome], environment, 2, "batch")
        for name in ("auto", "nccl")
    ]
    write_table(results, {}, out := io.StringIO())
    headings = next(line for line in out.getvalue().splitlines() if "algorithm" in line)
    assert [rate for rate in RATES if rate in headings] == (RATES if rated else [])
    assert out.getvalue().splitlines()[0].strip() == f"matmul_all_reduce: 2 × {environment['hardware']}" + (
        ", dtype=bf16" if rated else ", wall time, dtype=bf16"
    )
    assert "3" in next(line.split() for line in out.getvalue().splitlines() if line.split()[:1] == ["auto"])
    write_csv(results, {}, everything := io.StringIO())
    assert (",1.0," in everything.getvalue()) == rated  # the speed-up
    transfers.show(
        [one | {"counters": {f"GB/s rank {i} peer {j}": 1.0 for i in (0, 1) for j in (0, 1)}} for one in results]
    )
    assert ("GB/s" in capsys.readouterr().out) == rated


def test_a_table_and_a_report_say_the_same_under_the_same_headings(tmp_path: Path) -> None:
    outcome = Outcome(validated=True, flops=10**9, nbytes=10**6, floor_s=1e-4, seconds=[2e-3, 3e-3, 4e-3])
    outcome.back_to_back_s, outcome.host_s = 2e-3, 1e-4
    results = [
        record("matmul_all_reduce", {"dtype": "bf16", "algorithm": name}, [outcome], H200, 2, "batch")
        for name in ("push", "nccl")
    ]
    write_table(results, {}, out := io.StringIO())
    lines = [re.split(r"\s{2,}", line.strip()) for line in out.getvalue().splitlines()]
    headings, line = (next(line for line in lines if line[0] == word) for word in ("algorithm", "push"))
    mine = dict(zip(headings, line, strict=True))
    write_json(results, {}, file := io.StringIO())
    (tmp_path / "results.jsonl").write_text(file.getvalue())
    study = Study(read(tmp_path / "results.jsonl"))
    (table,) = tables.measurements(study, study.problems)
    names = [column.name for column in table.columns]
    reported = next(dict(zip(names, row, strict=True)) for row in table.rows if row[0].text == "push")
    assert mine.keys() <= reported.keys()
    for name in ("× NCCL", "valid", "of floor", "spread"):
        assert mine[name] == reported[name].text
