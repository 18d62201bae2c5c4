"""The charts of a study, and what each of them shows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from iris import files
from iris.console import counted
from iris.report.study import Problem, Section, Study, grouped
from iris.results import OPPONENTS

KINDS = {
    "speedups": "Speed-up by M",
    "times": "Times",
    "shares": "Share of the floor",
    "scaling": "Scaling over ranks",
    "crossover": "Crossover in M",
}
_SHARES_PER_CHART = 12


@dataclass(frozen=True)
class Chart:
    """One picture: of one problem (times), or of several that differ in one thing (the other kinds)."""

    kind: str
    title: str
    subtitle: str
    problems: Sequence[Problem]

    @property
    def section(self) -> Section:
        return self.problems[0].section

    @property
    def case(self) -> str:
        return self.problems[0].case

    @property
    def alt(self) -> str:
        """What the chart shows, in words, for readers who cannot see it."""
        return f"{self.case}, {KINDS[self.kind].lower()}: {self.title}; {self.subtitle}; {self.section.title}"


def charts(study: Study) -> dict[str, Chart]:
    """All charts by name, in the order of a page: by section, case and kind."""
    found = [*_speedups(study), *_times(study), *_shares(study), *_scalings(study), *_crossovers(study)]
    kinds = list(KINDS)
    named: dict[str, Chart] = {}
    for chart in sorted(found, key=lambda chart: (chart.section, chart.case, kinds.index(chart.kind))):
        name = _name(chart)
        count = sum(other == name or other.startswith(f"{name}--") for other in named)
        named[f"{name}--{count + 1}" if count else name] = chart
    return named


def _name(chart: Chart) -> str:
    """The name of a chart's file, without a suffix."""
    where = "simulated" if chart.section.simulated else chart.section.hardware
    title = "" if chart.kind == "speedups" else f"{chart.title.replace('×', 'x')} {chart.subtitle}"
    return files.name_of(f"{chart.case} {chart.kind} {title} {where}")


def _speedups(study: Study) -> Iterator[Chart]:
    sweeps = [sweep for sweep in study.sweeps if not sweep[0].section.simulated]
    compared = [
        problem
        for sweep in sweeps
        for problem in sweep
        if problem.representative and any(study.speedup(problem.representative, one) for one in OPPONENTS)
    ]
    for problems in grouped(compared, lambda p: (p.section, p.kind)).values():
        count = len({(problem.names, problem.setting, problem.shape and problem.shape[1:]) for problem in problems})
        if count > 1:
            yield Chart(
                "speedups", problems[0].kind, f"{count} layers by M, a dot each; line: geometric mean", problems
            )


def _times(study: Study) -> Iterator[Chart]:
    for problem in study.outstanding:
        if problem.timed:
            yield Chart("times", problem.label, _said(_ranks(problem), problem.setting, problem.names), [problem])


def _shares(study: Study) -> Iterator[Chart]:
    shared = [p for p in study.outstanding if any(r.floor_share is not None for r in p.timed.values())]
    for problems in grouped(shared, lambda p: (p.section, p.case, p.world_size, p.setting)).values():
        size = math.ceil(len(problems) / math.ceil(len(problems) / _SHARES_PER_CHART))  # charts of similar length
        for start in range(0, len(problems), size):
            part = problems[start : start + size]
            page = f"{start + 1} to {start + len(part)} of {len(problems)}" if len(part) < len(problems) else ""
            yield Chart("shares", _ranks(part[0]), _said(part[0].setting, page), part)


def _scalings(study: Study) -> Iterator[Chart]:
    for problems in study.scalings:
        first = problems[0]
        yield Chart("scaling", first.label, _said(first.setting, first.names), problems)


def _crossovers(study: Study) -> Iterator[Chart]:
    for problems in study.sweeps:
        first = problems[0]
        assert first.shape is not None
        _, n, k = first.shape
        yield Chart("crossover", f"M×{n}×{k}", _said(_ranks(first), first.setting, first.names), problems)


def _ranks(problem: Problem) -> str:
    return counted(problem.world_size, "rank")


def _said(*parts: str) -> str:
    return ", ".join(filter(None, parts))
