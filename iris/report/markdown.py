"""The tables of a study as GitHub Markdown, between two markers of a file."""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path

from iris.errors import ArgumentError
from iris.report import files, tables
from iris.report.study import Study
from iris.report.tables import Cell, Table

_LONG = 150
"""Rows of a summary that are too many to be shown unfolded."""
BEGIN, END = "<!-- report:begin -->", "<!-- report:end -->"


def parts(file: Path) -> tuple[str, str]:
    """What stands before and after the report in ``file``, the markers included.

    Raises:
        ArgumentError: there is no such file, it cannot be read, or it has not each marker once and in order.
    """
    fix = f"Put the lines {BEGIN} and {END} where the tables belong."
    with files.told("--markdown", "a file that can be read", file):
        if not file.is_file():
            raise ArgumentError("report", "--markdown", "a file with two marker lines", f"no file {file}", fix)
        content = file.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ArgumentError("report", "--markdown", "text in UTF-8", f"{file}: {error}") from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or text.count(BEGIN) > 1 or text.count(END) > 1:
        counts = f"{text.count(BEGIN)} of {BEGIN} and {text.count(END)} of {END}, or in the other order, in {file}"
        raise ArgumentError("report", "--markdown", "each marker once, in order", counts, fix)
    return before + begin, end + after


def write(study: Study, file: Path) -> None:
    """Put the tables between the markers of ``file``; all else stays as it is, and all if the tables do not fit.

    Raises:
        ArgumentError: the file has not its markers, or cannot be written.
    """
    before, after = parts(file)
    files.write("--markdown", file, f"{before}\n\n{render(study)}\n{after}")


def render(study: Study) -> str:
    """All tables. Those with one row for each problem, or each measurement where no algorithms compete, are folded."""
    return "\n".join(_blocks(study))


def _blocks(study: Study) -> Iterator[str]:
    for section in study.sections:
        yield f"### {section.title}\n"
        if section.simulated:
            yield "Simulated ranks show that results are right; their times say nothing about a GPU.\n"
        for table in tables.summary(study, section):
            if len(table.rows) > _LONG:
                yield _folded(f"{table.title}. {table.note}", f"{grid(table)}")
            elif table.rows:
                yield f"**{table.title}.** {table.note}\n\n{grid(table)}"
            else:
                yield f"**{table.title}:** none.\n"
        for case in sorted({problem.case for problem in study.problems if problem.section == section}):
            problems = study.of(section, case)
            measured = tables.overview(study, problems) or tables.measurements(study, problems)
            for table in (*measured, *tables.matrices(problems)):
                note = f"{table.note}\n\n" if table.note else ""
                yield _folded(f"{table.title}: {len(table.rows)} rows", f"{note}{grid(table)}")
    environment = tables.environments(study)
    yield f"**{environment.title}.** {environment.note}".rstrip() + f"\n\n{grid(environment)}"
    yield "**Columns.**\n"
    yield "\n".join(f"- *{name}*: {text}" for name, text in tables.EXPLANATIONS.items()) + "\n"


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>\n\n{text}\n</details>\n"


def grid(table: Table) -> str:
    """A table in GitHub Markdown, padded so that its source reads well."""
    lines = [
        [_escaped(column.name) for column in table.columns],
        *([_cell(cell) for cell in row] for row in table.rows),
    ]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    numeric = [column.numeric for column in table.columns]
    rule = ["-" * (width - 1) + ":" if right else "-" * width for width, right in zip(widths, numeric, strict=True)]

    def line(cells: list[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    return "\n".join([line(lines[0]), line(rule), *map(line, lines[1:])]) + "\n"


def _cell(cell: Cell) -> str:
    text = _escaped(cell.text)
    return f"**{text}**" if cell.mark in ("best", "wrong") else text


def _escaped(text: str) -> str:
    for character in "\\|*`<>":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
