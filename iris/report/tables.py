"""All figures of a study as tables, for a page or for Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from iris.console import counted
from iris.report.palette import Palette
from iris.report.study import Mean, Problem, Section, Study, describe, grouped, in_words, period, time_of, verdict
from iris.results import COMPARATORS, OPPONENTS, Result, Value

NOTHING = "–"
SIGNS = {"faster": "▲", "slower": "▼"}
_PAIR = re.compile(r"(?P<kind>.+) rank (?P<rank>\d+) peer (?P<peer>\d+)")


@dataclass(frozen=True)
class Cell:
    """Text, and a mark that shows at a glance: ``best``, ``faster``, ``slower``, ``wrong`` or none."""

    text: str
    mark: str = ""


@dataclass(frozen=True)
class Column:
    """A heading; numbers are aligned to the right."""

    name: str
    numeric: bool = True


@dataclass(frozen=True)
class Table:
    """Cells below headings, the subject of the table, and a note for readers."""

    title: str
    note: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    breaks: Collection[int] = ()
    """The first rows of groups, by number."""


EXPLANATIONS = {
    "ms": "median time of one call on the slowest rank, in milliseconds; of simulated ranks, wall time. Bold: the "
    "fastest of its problem, the torch.matmul alone not counted.",
    "× NCCL, × torch": "speed-up over NCCL (RCCL, gloo) + torch.matmul and over torch.ops.symm_mem (of a matmul "
    "without communication: over torch.matmul), measured in the same run. ▲ faster, ▼ slower, by what two decimals "
    "show.",
    "valid": "whether the result was compared with a reference before it was timed. A wrong result has no time.",
    "of floor": "floor / ms (floor_share in the records).",
    "floor ms": "what the hardware allows (floor_ms in the records): the longest of the local matmul at the rate "
    "that large ones were seen to reach (bf16 and fp8 on H200), or else at that of the data sheet, of the bytes "
    "received at the full rate of the links, and of the operands, less what L2 may hold of them (with `l2=cold`, "
    "nothing of B), at the rate of the GPU's memory.",
    "TFLOP/s": "floating-point operations of one GPU, per time.",
    "GB/s": "bytes that must reach a rank over the links, per time.",
    "spread": "where 80 % of the calls lie: (p90 − p10) / median.",
    "skew µs": "median of the slowest rank minus that of the fastest.",
    "back-to-back ms": "time per call of calls issued back to back, host included, once the device is as warm as "
    "they make it; until 2026-11-27 of 10 to 30 calls, behind whatever was timed before.",
    "host µs": "the host's time to issue one call.",
    "model ms": "what the analytical model predicted.",
}
"""The meaning of the columns of the measurements."""


def summary(study: Study, section: Section) -> list[Table]:
    """Tables of speed-ups and losses, unless ranks are simulated, and of results without a time."""
    speed = [] if section.simulated else [means(study, section), losses(study, section)]
    return [*speed, unmeasured(study, section)]


def means(study: Study, section: Section) -> Table:
    """Geometric-mean speed-ups, for each op, number of ranks and algorithm; apart with a cold L2."""
    rows: list[list[Cell]] = []
    breaks = []
    palette = Palette(result.algorithm for result in study.results)
    mine = [problem for problem in study.problems if problem.section == section]
    for (kind, world_size), problems in grouped(mine, lambda p: (p.kind, p.world_size)).items():
        breaks.append(len(rows))
        for algorithm in palette.ordered(name for problem in problems for name in problem.results):
            if algorithm in COMPARATORS:
                continue
            results = [problem.results[algorithm] for problem in problems if algorithm in problem.results]
            found = [study.means(results, opponent) for opponent in OPPONENTS]
            if any(found):
                cells = [cell for mean in found for cell in _mean_cells(mean)]
                rows.append([Cell(kind), Cell(str(world_size)), Cell(algorithm), *cells])
    columns = [Column("op", False), Column("ranks"), Column("algorithm", False)]
    for over in ("× NCCL", "× torch"):
        columns += [Column(over), Column("rows"), Column("▲"), Column("▼"), Column("worst")]
    note = (
        "Geometric means of the speed-ups over NCCL + torch.matmul and over torch.ops.symm_mem in the same run. Rows: "
        "over how many of the rows measured; ▲ faster, ▼ slower, worst: the lowest speed-up among them."
    )
    return Table("Geometric-mean speed-up", note, columns, rows, breaks)


def _mean_cells(mean: Mean | None) -> list[Cell]:
    if mean is None:
        return [Cell(NOTHING)] * 5
    rows = str(mean.count) if mean.count == mean.of else f"{mean.count} of {mean.of}"
    counts = [Cell(rows), Cell(str(mean.faster)), Cell(str(mean.slower), "slower" if mean.slower else "")]
    return [_ratio(mean.speedup), *counts, _ratio(mean.worst)]


def losses(study: Study, section: Section) -> Table:
    """The problems on which Iris is slower than a comparator, the worst first."""
    found: list[tuple[float, list[Cell]]] = []
    compared = 0
    for problem in study.problems:
        ours = problem.representative
        if problem.section != section or ours is None:
            continue
        ratios = [study.speedup(ours, opponent) for opponent in OPPONENTS]
        known = [ratio for ratio in ratios if ratio is not None]
        compared += bool(known)
        if any(verdict(ratio) == "slower" for ratio in known):
            found.append((min(known), [*_place(problem, ours), Cell(in_words(time_of(ours))), *map(_ratio, ratios)]))
    columns = [*_PLACE, Column("ms"), Column("× NCCL"), Column("× torch")]
    note = (
        f"{len(found)} of {compared} problems that a comparator solved too. The algorithm is auto where it was "
        "measured, else the fastest of Iris."
    )
    return Table("Where Iris loses", note, columns, [cells for _, cells in sorted(found, key=lambda pair: pair[0])])


def unmeasured(study: Study, section: Section) -> Table:
    """Results without a time, and why: each that is wrong or failed, then those that were skipped, by reason."""
    without = [
        (problem, result)
        for problem in study.problems
        for result in problem.results.values()
        if problem.section == section and result.failure
    ]
    bad = [[one] for one in without if one[1].skipped is None]
    skipped = [one for one in without if one[1].skipped is not None]
    by_reason = grouped(skipped, lambda one: (one[1].case, one[1].world_size, one[1].skipped)).values()
    rows = [_alike(some) for some in (*bad, *by_reason)]
    columns = [*_PLACE, Column("results"), Column("why", False)]
    return Table("Skipped, failed, wrong", f"{counted(len(without), 'result')} without a time.", columns, rows)


def _alike(some: Sequence[tuple[Problem, Result]]) -> list[Cell]:
    """A row for results of one op and number of ranks that have no time for the same reason."""
    problem, result = some[0]
    op, ranks, algorithm, label, setting = _place(problem, result)
    if len(some) > 1:
        algorithm = Cell(", ".join(dict.fromkeys(one.algorithm or one.way for _, one in some)))
    if (problems := len({id(one) for one, _ in some})) > 1:
        label, setting = Cell(f"{problems} problems"), Cell("")
    return [op, ranks, algorithm, label, setting, Cell(str(len(some))), Cell(result.failure or "", _wrong(result))]


def _wrong(result: Result) -> str:
    return "" if result.skipped is not None else "wrong"


def environments(study: Study) -> Table:
    """The machines and versions that the results come from."""
    names = list(dict.fromkeys(name for result in study.results for name in result.environment))
    names = [name for name in names if name not in ("hardware", "date")]
    groups = grouped(
        study.results, lambda r: (r.hardware, r.world_size, *(r.environment.get(name, NOTHING) for name in names))
    )
    rows = []
    for (hardware, world_size, *values), results in sorted(groups.items(), key=str):
        cells = [hardware, world_size, *values, period(results), len(results)]
        rows.append([Cell(str(cell)) for cell in cells])
    columns = [Column("hardware", False), Column("ranks"), *(Column(name.replace("_", " "), False) for name in names)]
    note = f"{study.replaced} older results of the same cases are left out." if study.replaced else ""
    return Table("Environment", note, [*columns, Column("measured", False), Column("results")], rows)


def overview(study: Study, problems: Sequence[Problem]) -> list[Table]:
    """One row for every problem of one case, with the times of all algorithms: one table for each number of ranks.
    Empty if results have no algorithm."""
    palette = Palette(result.algorithm for result in study.results)
    if not any("algorithm" in result.params for problem in problems for result in problem.results.values()):
        return []
    return [_overview(study, palette, some) for some in grouped(problems, lambda problem: problem.world_size).values()]


def _overview(study: Study, palette: Palette, problems: Sequence[Problem]) -> Table:
    ways = palette.ordered(dict.fromkeys(name for problem in problems for name in problem.results))
    settings = {problem.setting for problem in problems}
    named, many = any(problem.names for problem in problems), len(settings) > 1
    shown = [Column(name, False) for name, wanted in (("model, layer", named), ("setting", many)) if wanted]
    columns = [Column("M×N×K", False), *shown, Column("Iris takes", False)]
    columns += [Column(f"{way} ms") for way in ways]
    shown_figures = () if problems[0].section.simulated else _OF_IRIS  # simulated ranks have none of these
    figures = [(name, cell_of) for name, cell_of, _ in _FIGURES if name in shown_figures]
    rows = []
    for problem in problems:
        ours = problem.representative
        cells = [Cell(problem.label)]
        cells += [Cell(text or NOTHING) for text, wanted in ((problem.names, named), (problem.setting, many)) if wanted]
        cells.append(Cell(ours.way.removeprefix("auto: ") if ours else NOTHING))
        cells += [
            _time_cell(problem, problem.results[way]) if way in problem.results else Cell(NOTHING) for way in ways
        ]
        cells += [cell_of(study, ours) if ours else Cell(NOTHING) for _, cell_of in figures]
        rows.append(cells)
    columns += [Column(name) for name, _ in figures]
    first = problems[0]
    title = f"{first.case}, {counted(first.world_size, 'rank')}"
    note = "" if many or not first.setting else f"All rows: {first.setting}."
    starts = [at for at, one in enumerate(problems) if at == 0 or one.names != problems[at - 1].names]
    return Table(title, note, columns, rows, starts)


def measurements(study: Study, problems: Sequence[Problem]) -> list[Table]:
    """Every result of one case, one table for each number of ranks."""
    palette = Palette(result.algorithm for result in study.results)
    return [_measured(study, palette, some) for some in grouped(problems, lambda problem: problem.world_size).values()]


def _measured(study: Study, palette: Palette, problems: Sequence[Problem]) -> Table:
    lines = [(problem, problem.results[name]) for problem in problems for name in palette.ordered(problem.results)]
    results = [result for _, result in lines]
    series = {result.series for result in results}
    names = [name for name in _names(results) if name not in series]
    if all(_shape_is_told(result) for result in results):
        names.remove("shape")
    varying = [name for name in names if len({str(result.params.get(name)) for result in results}) > 1]
    fixed = {name: results[0].params.get(name) for name in names if name not in varying}
    columns = [Column(name, not _is_text(name, results)) for name in varying]
    rows = [[Cell(_plain(result.params.get(name))) for name in varying] for result in results]
    if series != {None}:
        columns.append(Column("algorithm", False))
        for row, result in zip(rows, results, strict=True):
            row.append(Cell(result.way))
    columns.append(Column("ms"))
    for row, (problem, result) in zip(rows, lines, strict=True):
        row.append(_time_cell(problem, result))
    for name, cell_of, optional in _FIGURES:
        cells = [cell_of(study, result) for result in results]
        if (optional or problems[0].section.simulated) and all(cell.text == NOTHING for cell in cells):
            continue
        columns.append(Column(name))
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell)
    for name in dict.fromkeys(name for result in results for name in result.counters if not _PAIR.fullmatch(name)):
        columns.append(Column(name))
        for row, result in zip(rows, results, strict=True):
            row.append(Cell(f"{result.counters[name]:g}" if name in result.counters else NOTHING))
    first = problems[0]
    title = f"{first.case}, {counted(first.world_size, 'rank')}"
    starts = [index for index, (problem, _) in enumerate(lines) if index == 0 or problem is not lines[index - 1][0]]
    return Table(title, f"All rows: {describe(fixed)}." if fixed else "", columns, rows, starts)


def _shape_is_told(result: Result) -> bool:
    """Whether the shape follows from m, n and k."""
    extents = "x".join(str(result.params.get(name)) for name in ("m", "n", "k"))
    return result.params.get("shape") == extents


def matrices(problems: Sequence[Problem]) -> list[Table]:
    """Counters of every two ranks, such as ``GB/s rank 0 peer 1``: one table for each result and kind of counter."""
    found = []
    for problem in problems:
        for result in problem.results.values():
            pairs = [(match, value) for name, value in result.counters.items() if (match := _PAIR.fullmatch(name))]
            for kind, cells in grouped(pairs, lambda pair: pair[0]["kind"]).items():
                values = {(int(match["rank"]), int(match["peer"])): value for match, value in cells}
                title = f"{problem.case}, {describe(result.params)}, {counted(result.world_size, 'rank')}: {kind}"
                found.append(_matrix(title, values))
    return found


def _matrix(title: str, values: Mapping[tuple[int, int], float]) -> Table:
    ranks, peers = (sorted(set(ends)) for ends in zip(*values, strict=True))
    rows = [
        [
            Cell(f"rank {rank}"),
            *(Cell(f"{values[rank, peer]:.1f}" if (rank, peer) in values else NOTHING) for peer in peers),
        ]
        for rank in ranks
    ]
    return Table(title, "", [Column("", False), *(Column(f"peer {peer}") for peer in peers)], rows)


def _names(results: Sequence[Result]) -> list[str]:
    """Names of all parameters: shapes and models first."""
    names = dict.fromkeys(name for result in results for name in result.params)
    first = [name for name in ("model", "layer", "shape", "m", "n", "k") if name in names]
    return [*first, *(name for name in names if name not in first)]


def _is_text(name: str, results: Sequence[Result]) -> bool:
    return any(isinstance(result.params.get(name), str) for result in results)


def _plain(value: Value) -> str:
    if value is None:
        return NOTHING
    return str(value).replace("x", "×") if isinstance(value, str) and value[:1].isdigit() else str(value)


def _time_cell(problem: Problem, result: Result) -> Cell:
    if result.time is None:
        return Cell(result.outcome, _wrong(result))
    best = result.algorithm in problem.complete and time_of(result) == problem.best_ms
    return Cell(in_words(time_of(result)), "best" if best else "")


def _ratio(ratio: float | None) -> Cell:
    if ratio is None:
        return Cell(NOTHING)
    word = verdict(ratio)
    return Cell(f"{SIGNS.get(word, '')} {ratio:.2f}".strip(), word if word != "even" else "")


def _number(take: Callable[[Result], float | None], form: Callable[[float], str]) -> Callable[[Study, Result], Cell]:
    def cell(_: Study, result: Result) -> Cell:
        value = take(result)
        return Cell(NOTHING if value is None else form(value))

    return cell


def _speedup(opponent: str) -> Callable[[Study, Result], Cell]:
    def cell(study: Study, result: Result) -> Cell:
        shown = _ratio(study.speedup(result, opponent))
        return Cell(shown.text.lstrip("▲▼ ")) if result.algorithm in COMPARATORS else shown

    return cell


def _spread(result: Result) -> float | None:
    if result.time is None or result.time.calls == 1:
        return None
    return 100 * (result.time.p90 - result.time.p10) / result.time.median


def _skew(result: Result) -> float | None:
    return None if result.time is None else 1e3 * result.time.rank_skew


def _share(result: Result) -> float | None:
    return None if result.floor_share is None else 100 * result.floor_share


def _valid(_: Study, result: Result) -> Cell:
    if result.validated is None:
        return Cell("not checked" if result.time is not None else NOTHING)
    return Cell("yes") if result.validated else Cell("no", "wrong")


_FIGURES: Sequence[tuple[str, Callable[[Study, Result], Cell], bool]] = (
    ("× NCCL", _speedup("nccl"), False),
    ("× torch", _speedup("torch_symm_mem"), False),
    ("valid", _valid, False),
    ("of floor", _number(_share, "{:.0f} %".format), False),
    ("floor ms", _number(lambda result: result.floor_ms, in_words), False),
    ("TFLOP/s", _number(lambda result: result.tflops_per_gpu, "{:.1f}".format), False),
    ("GB/s", _number(lambda result: result.gbytes_per_s, "{:.1f}".format), False),
    ("spread", _number(_spread, "{:.1f} %".format), False),
    ("skew µs", _number(_skew, "{:.1f}".format), False),
    ("back-to-back ms", _number(lambda result: result.back_to_back_ms, in_words), True),
    ("host µs", _number(lambda result: result.host_us, "{:.0f}".format), True),
    ("model ms", _number(lambda result: result.predicted_ms, in_words), True),
)
"""Columns of the measurements: heading, cell, and whether the column is left out if it is empty."""
_OF_IRIS = ("× NCCL", "× torch", "of floor", "back-to-back ms", "host µs")
"""The columns that an overview shows for Iris's own results."""


_PLACE = (
    *(Column("op", False), Column("ranks"), Column("algorithm", False)),
    *(Column("M×N×K", False), Column("setting", False)),
)


def _place(problem: Problem, result: Result) -> list[Cell]:
    """Cells for the columns ``_PLACE``: what was measured, on how many ranks and by which algorithm."""
    setting = ", ".join(filter(None, (problem.names, problem.setting)))
    texts = (problem.case, str(problem.world_size), result.way, problem.label, setting or NOTHING)
    return [Cell(text) for text in texts]
