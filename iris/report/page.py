"""A study as one HTML page that needs no network: pictures and style are part of it."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence

from iris.console import counted
from iris.report import tables
from iris.report.charts import KINDS, Chart
from iris.report.palette import Palette
from iris.report.study import Section, Study, grouped, period
from iris.report.style import css
from iris.report.tables import Column, Table
from iris.results import COMPARATORS, MATMUL, Result

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_EXPLAINED = {
    "speedups": "What auto, or the fastest algorithm of Iris, gains on all shapes that were measured at several M. In "
    "the shaded part it is slower.",
    "times": "Milliseconds of one call, the shorter the better.",
    "shares": "The floor's time over the time taken. At 100 % nothing is left to gain.",
    "scaling": "The same problem on more ranks. Dashed: the floor.",
    "crossover": "Where one way overtakes another as M grows. In the shaded part it is slower than NCCL + matmul.",
}
_FLOOR = " Dashed: the floor, what the hardware allows."
_LARGEST = " Of shapes that differ in nothing but M only the largest is here; the others are under crossover."
_SIMULATED = (
    "Simulated ranks are processes on a CPU: their results are right or wrong as on GPUs, but their times say nothing "
    "about a GPU: they are wall time, and nothing else is made of them. They are never in a chart with GPU results."
)


def render(study: Study, pictures: Mapping[str, Sequence[tuple[Chart, str]]], palette: Palette) -> str:
    """The page.

    Args:
        study: the results.
        pictures: for each section's title its charts, with their inline SVG, in order.
        palette: colours of the algorithms.
    """
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            "<title>Iris benchmark report</title>",
            f"<style>{css(palette)}</style>",
            "</head>",
            "<body>",
            *_head(study),
            "<main>",
            *(
                line
                for place, section in enumerate(study.sections)
                for line in _section(study, section, place, pictures, palette)
            ),
            *_appendix(study),
            "</main>",
            f"<footer>Made by <code>python -m iris report</code> from {_files(study)}.</footer>",
            "</body>",
            "</html>",
            "",
        )
    )


def _head(study: Study) -> Iterator[str]:
    hardware = ", ".join(_escaped(section.title) for section in study.sections)
    commits = sorted({result.environment["commit"] for result in study.results if "commit" in result.environment})
    said = [hardware, period(study.results)]
    said += [f"commit {', '.join(f'<code>{_escaped(commit)}</code>' for commit in commits)}"] if commits else []
    yield f"<header><h1>Iris benchmark report</h1><p class=lead>{' · '.join(said)}</p>"
    yield f"<p>{_counted(study.results)}</p></header>"
    yield "<nav><div>"
    for place, section in enumerate(study.sections):
        yield f'<a href="#s{place}">{_escaped(section.title)}</a>'
        for case in _cases(study, section):
            yield f'<a href="#s{place}-{_escaped(case)}"><code>{_escaped(case)}</code></a>'
    yield '<a href="#environment">Environment</a><a href="#columns">Columns</a></div></nav>'


def _counted(results: Sequence[Result]) -> str:
    failures = [result for result in results if result.failure is not None]
    wrong = sum(result.wrong for result in failures)
    skipped = sum(result.skipped is not None for result in failures)
    counts = {"skipped": skipped, "failed": len(failures) - skipped - wrong, "wrong": wrong}
    rest = ", ".join(f"{count} {word}" for word, count in counts.items())
    return f"{counted(len(results), 'result')}: {len(results) - len(failures)} timed, {rest}."


def _section(
    study: Study,
    section: Section,
    place: int,
    pictures: Mapping[str, Sequence[tuple[Chart, str]]],
    palette: Palette,
) -> Iterator[str]:
    yield f'<section id="s{place}"><h2>{_escaped(section.title)}</h2>'
    if section.simulated:
        yield f"<p class=simulated>{_SIMULATED}</p>"
    for table in tables.summary(study, section):
        yield f"<h3>{_escaped(table.title)}</h3>"
        yield f"<p class=note>{_escaped(table.note)}</p>{_table(table)}" if table.rows else "<p>None.</p>"
    cases = grouped(pictures.get(section.title, ()), lambda pair: pair[0].case)
    for case in _cases(study, section):
        simulated = " (simulated)" if section.simulated else ""
        yield f'<section id="s{place}-{_escaped(case)}"><h3><code>{_escaped(case)}</code>{simulated}</h3>'
        yield _key(study, section, case, palette)
        kinds = grouped(cases.get(case, ()), lambda pair: pair[0].kind)
        for kind, drawn in kinds.items():
            more = ""
            if kind == "times":
                more += "" if section.simulated else _FLOOR
                more += _LARGEST if "crossover" in kinds else ""
            yield f"<h4>{KINDS[kind]}</h4><p class=note>{_EXPLAINED[kind]}{more}</p>"
            for pairs in grouped(drawn, _shelf).values():
                yield f'<div class="charts {kind}">'
                yield from (f"<figure>{picture}</figure>" for _, picture in pairs)
                yield "</div>"
        yield "<h4>All results</h4>"
        problems = study.of(section, case)
        for table in (*tables.measurements(study, problems), *tables.matrices(problems)):
            rows = counted(len(table.rows), "row")
            yield f"<details open><summary>{_escaped(table.title)}<span>{rows}</span></summary>"
            yield f"<p class=note>{_escaped(table.note)}</p>" if table.note else ""
            yield f"{_table(table)}</details>"
        yield "</section>"
    yield "</section>"


def _key(study: Study, section: Section, case: str, palette: Palette) -> str:
    names = palette.ordered(name for problem in study.of(section, case) for name in problem.results)
    what = {
        "nccl": f"{'gloo' if section.simulated else 'NCCL'} + torch.matmul",
        "torch_symm_mem": "torch.ops.symm_mem",
        MATMUL: "torch.matmul alone, no communication",
    }
    items = (
        f'<li><i style="background:var(--{palette.tones[name].name})"></i>{_escaped(name)}'
        f"{f' <span class=lead>{what[name]}</span>' if name in COMPARATORS else ''}</li>"
        for name in names
    )
    return f"<ul class=key>{''.join(items)}</ul>"


def _appendix(study: Study) -> Iterator[str]:
    environment = tables.environments(study)
    yield f'<section id="environment"><h2>{environment.title}</h2>'
    yield f"<p class=note>{_escaped(environment.note)}</p>{_table(environment)}</section>"
    yield '<section id="columns"><h2>Columns</h2><dl>'
    yield from (f"<dt>{_escaped(name)}</dt><dd>{_escaped(text)}</dd>" for name, text in tables.EXPLANATIONS.items())
    yield "</dl></section>"


def _table(table: Table) -> str:
    heads = "".join(f"<th{_classes(column)}>{_escaped(column.name)}</th>" for column in table.columns)
    lines = [f"<div class=scroll><table><thead><tr>{heads}</tr></thead><tbody>"]
    for place, row in enumerate(table.rows):
        cells = (
            f"<td{_classes(column, cell.mark)}>{_escaped(cell.text)}</td>"
            for column, cell in zip(table.columns, row, strict=True)
        )
        lines.append(f"<tr{' class=g' if place in table.breaks else ''}>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</tbody></table></div>"])


def _classes(column: Column, mark: str = "") -> str:
    names = ["" if column.numeric else "l", "w" if column.name == "why" else "", mark]
    joined = " ".join(filter(None, names))
    return f' class="{joined}"' if joined else ""


def _shelf(pair: tuple[Chart, str]) -> object:
    """A key for pictures that form one grid: charts of times with the same number of ranks and the same setting; of
    other kinds, all charts."""
    chart, _ = pair
    first = chart.problems[0]
    return (first.world_size, first.setting) if chart.kind == "times" else None


def _cases(study: Study, section: Section) -> list[str]:
    return sorted({problem.case for problem in study.problems if problem.section == section})


def _files(study: Study) -> str:
    names = sorted({result.file.name for result in study.results})
    shown = ", ".join(f"<code>{_escaped(name)}</code>" for name in names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more files"


def _escaped(text: str) -> str:
    return html.escape(text)
