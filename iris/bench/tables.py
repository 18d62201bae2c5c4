"""Output of records for people and programs: a table, JSON lines, or CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from iris.bench import records
from iris.bench.case import Case
from iris.bench.records import Record
from iris.console import print_table
from iris.results import without_sizes

REFERENCE = "nccl"
"""The algorithm that speed-ups are relative to."""
FIGURES = ("flops", "nbytes", "back_to_back_ms", "host_us", "floor_ms", "floor_share", "tflops_per_gpu", "gbytes_per_s")
RATES = ("floor_share", "tflops_per_gpu", "gbytes_per_s")
"""Figures that mean nothing in the simulator."""
TIMES = ("median", "min", "p10", "p90", "rank_skew", "calls")
WHERE = ("hardware", "backend", "commit", "date")
VARIES = "*"
_Common = tuple[str, str | None]


def write_json(results: Sequence[Record], cases: Mapping[str, Case], file: TextIO) -> None:
    """One JSON object per line: the record, and its speed-up over the reference."""
    for one, speedup in zip(results, _speedups(results, cases), strict=True):
        file.write(records.line_of({**one, "speedup": speedup}))


def write_csv(results: Sequence[Record], cases: Mapping[str, Case], file: TextIO) -> None:
    """One line per record, after a line of names. A counter or parameter with the name of another column gets the
    prefix ``counter_`` or ``axis_``."""
    names = list(dict.fromkeys(name for one in results for name in one["params"]))
    counters = _counters(results)
    known = ["picked", "world_size", "validated", "deterministic", "skipped", "error"]
    known += [*(f"time_ms_{name}" for name in TIMES), *FIGURES, "speedup"]
    counted = [f"counter_{name}" if name in ("case", *known, *WHERE) else name for name in counters]
    known += [*counted, *WHERE]
    axes = [f"axis_{name}" if name in ("case", *known) else name for name in names]
    out = csv.writer(file, lineterminator="\n")
    out.writerow(["case", *axes, *known])
    for one, speedup in zip(results, _speedups(results, cases), strict=True):
        time = one["time_ms"] or {}
        row = [one["case"], *(one["params"].get(name) for name in names), records.picked(one), one["world_size"]]
        row += [one["validated"], one.get("deterministic"), one["skipped"], one["error"]]
        row += [time.get(name) for name in TIMES]
        row += [None if name in RATES and records.simulated(one) else one[name] for name in FIGURES]
        row += [speedup]
        row += [*(one["counters"].get(name) for name in counters), *(one["environment"].get(name) for name in WHERE)]
        out.writerow(row)


def write_table(results: Sequence[Record], cases: Mapping[str, Case], file: TextIO) -> None:
    """A table per case, then what the case itself has to show."""
    for name in dict.fromkeys(one["case"] for one in results):
        mine = [one for one in results if one["case"] == name]
        show = cases[name].show if name in cases else None
        counters = _counters(mine) if show is None else []
        names = _names(mine)
        rows = [
            _cells(one, speedup, names, counters) for one, speedup in zip(mine, _speedups(mine, cases), strict=True)
        ]
        headers = _headers(mine, counters)
        print_table(headers, rows, title=_title(mine), right=range(len(headers)), whole=True, used=True, file=file)
        file.writelines(_remarks(mine))
        if show is not None:
            show(mine)


FORMATS: Mapping[str, Callable[[Sequence[Record], Mapping[str, Case], TextIO], None]] = {
    "console": write_table,
    "json": write_json,
    "csv": write_csv,
}


def _remarks(results: Sequence[Record]) -> list[str]:
    """A line for each reason why points have no time, with those points, and notes on the table."""
    points: dict[str, list[str]] = {}
    differing = _names(results)
    for one in results:
        if one["skipped"] or one["error"]:
            why = f"skipped: {one['skipped']}" if one["skipped"] else f"ERROR: {one['error']}"
            told = [f"{name}={one['params'][name]}" for name in differing if name in one["params"]]
            points.setdefault(why, []).append(" ".join(told))
    lines = [f"{_some(names)}: {why}\n" for why, names in points.items()]
    if any(_varies(one) for one in results):
        lines.append(f"{VARIES} right, but two calls may differ in their last bits: sums in the order of arrival\n")
    if any(one["params"].get("algorithm") == REFERENCE and records.simulated(one) for one in results):
        lines.append(f"{REFERENCE}: gloo, in the simulator\n")
    return lines


def _varies(one: Record) -> bool:
    """Whether the result is right but may differ from call to call."""
    return one["validated"] is True and one.get("deterministic") is False


def _some(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 3 else [*names[:2], f"and {len(names) - 2} more"])


def _names(results: Sequence[Record]) -> list[str]:
    """Parameters that differ between ``results``, or all if none does; without m, n and k if there is a ``shape``."""
    names = without_sizes(dict.fromkeys(name for one in results for name in one["params"]))
    several = [name for name in names if len({_value(one, name) for one in results}) > 1]
    return several or names


def _value(one: Record, name: str) -> str:
    """A parameter as the table shows it: after ``auto``, as in reports, the algorithm that it took."""
    picked = records.picked(one) if name == "algorithm" else None
    return str(one["params"].get(name, "")) + (f": {picked}" if picked is not None else "")


def _title(results: Sequence[Record]) -> str:
    first, shown = results[0], _names(results)
    fixed = [f"{name}={_value(first, name)}" for name in without_sizes(first["params"]) if name not in shown]
    where = place(first["world_size"], first["environment"].get("hardware"), records.simulated(first))
    return f"{first['case']}: {where}{', ' if fixed else ''}{' '.join(fixed)}"


def place(world_size: int, hardware: str | None, simulated: bool) -> str:
    """Where times were measured, for the title of a table."""
    return f"{world_size} × {hardware or 'unknown hardware'}{', wall time' if simulated else ''}"


def _counters(results: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(name for one in results for name in one["counters"]))


def _headers(results: Sequence[Record], counters: Sequence[str]) -> list[str]:
    """Columns have the names that they have in reports, which explain each."""
    times = ["ms", "spread", "skew µs", "back-to-back ms", "host µs"]
    rates = ["GB/s", "TFLOP/s", "floor ms", "of floor", "× NCCL"]
    return [*_names(results), *times, *rates, *counters, "valid"]


def _cells(one: Record, speedup: float | None, names: Sequence[str], counters: Sequence[str]) -> list[str]:
    time = one["time_ms"]
    several = time is not None and time.get("calls") != 1
    spread = f"{100 * (time['p90'] - time['p10']) / time['median']:.1f} %" if several else ""
    rated = not records.simulated(one)
    verdict = {
        True: "yes",
        False: "NO",
        None: "skipped" if one["skipped"] else "error" if one["error"] else "not checked",
    }
    return [
        *(_value(one, name) for name in names),
        _short(time["median"]) if time else "",
        spread,
        _short(time["rank_skew"] * 1e3) if time else "",
        _short(one["back_to_back_ms"]),
        _short(one["host_us"]),
        *(_short(one[name]) if rated else "" for name in ("gbytes_per_s", "tflops_per_gpu", "floor_ms")),
        f"{100 * one['floor_share']:.0f} %" if rated and one["floor_share"] is not None else "",
        f"{speedup:.2f}" if speedup is not None else "",
        *(_counter(one["counters"].get(name)) for name in counters),
        verdict[one["validated"]] + VARIES * _varies(one),
    ]


def _short(value: float | None) -> str:
    """Four digits, or all before the point."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _counter(value: float | None) -> str:
    """Like other figures, but numbers from a million on keep six digits only."""
    return _short(value) if value is None or abs(value) < 1e6 else f"{value:.6g}"


def _speedups(results: Sequence[Record], cases: Mapping[str, Case]) -> list[float | None]:
    """How many times as fast as the reference that was timed in turns with it each result is; None where there is none,
    and in the simulator, where times mean nothing."""
    rated = [None if one["time_ms"] is None or records.simulated(one) else one["time_ms"]["median"] for one in results]
    common = [_common(one, cases) for one in results]
    base = {
        key: ms
        for one, key, ms in zip(results, common, rated, strict=True)
        if one["params"].get("algorithm") == REFERENCE and ms is not None
    }
    return [base[key] / ms if ms is not None and key in base else None for key, ms in zip(common, rated, strict=True)]


def _common(one: Record, cases: Mapping[str, Case]) -> _Common:
    variants = cases[one["case"]].variant_names if one["case"] in cases else {"algorithm"}
    common = {name: value for name, value in one["params"].items() if name not in variants}
    return records.key(one["case"], common, one["world_size"]), one.get("batch")
