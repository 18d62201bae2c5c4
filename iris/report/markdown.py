"""A study as GitHub Markdown: a summary between two markers of a file, and measurements in separate files."""

from __future__ import annotations

import html
import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from iris import files
from iris.console import counted
from iris.errors import ArgumentError
from iris.report import tables
from iris.report.study import Section, Study, grouped
from iris.report.tables import Cell, Table

_LONG = 150
"""Tables of a summary with more rows than this are folded."""
_WIDTH = 120
"""The width of a line of text."""
BEGIN, END = "<!-- report:begin -->", "<!-- report:end -->"
MARK = "<!-- Written by python -m iris report, which replaces or removes this file when it writes again. -->"
"""The first line of a file of measurements."""
_SIMULATED = "Simulated ranks show that results are right; their times are wall time, and say nothing about a GPU.\n"


@dataclass(frozen=True)
class _Sheet:
    """The measurements of one op on one number of ranks: the table of all results, and counters of every two ranks."""

    section: Section
    tables: Sequence[Table]

    @property
    def name(self) -> str:
        return f"{files.name_of(f'{self.tables[0].title} {self.section.title}')}.md"


def parts(file: Path) -> tuple[str, str]:
    """The text before and after the report in ``file``, including the markers.

    Raises:
        ArgumentError: there is no such file, it cannot be read, or it does not have each marker once and in order.
    """
    fix = f"Put the lines {BEGIN} and {END} where the summary belongs."
    with files.argument_errors("report", "--markdown", "a file that can be read", file):
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


def folder_of(file: Path) -> Path:
    """The folder for the measurements: next to ``file``, or to its target if it is a link, with the same name without
    the suffix.

    Raises:
        ArgumentError: there is no suffix.
    """
    page = _page_of(file)
    if not page.suffix:
        fix = "The folder of the measurements is named as the file, without the suffix."
        raise ArgumentError("report", "--markdown", "a name with a suffix, such as .md", page, fix)
    return page.with_suffix("")


def _page_of(file: Path) -> Path:
    return file.resolve() if file.is_symlink() else file


def write(study: Study, file: Path) -> list[Path]:
    """Write the summary between the markers of ``file``, and the measurements into its folder. If one of these files
    cannot be written, all stay as they are. Files there that an earlier report has written, and this one has not, are
    removed, and returned; no other file is touched.

    Raises:
        ArgumentError: ``file`` lacks its markers or a suffix; a file that no report has written is in the place of
            measurements; or a file cannot be written or removed. The text names the file.
    """
    before, after = parts(file)
    folder = folder_of(file)
    sheets = list(_sheets(study))
    named = grouped(sheets, lambda sheet: folder / sheet.name)
    with files.argument_errors("report", "--markdown", "a folder that can be read", folder):
        earlier = [other for other in sorted(folder.glob("*.md")) if other.is_file() and _is_ours(other)]
        foreign = [other for other in named if other.exists() and other not in earlier]
    if foreign:
        fix = f"Move it elsewhere: its first line is not {MARK}"
        raise ArgumentError("report", "--markdown", "no file of yours where measurements go", foreign[0], fix)
    texts = {other: _joined(_measurements(some, _address(_page_of(file)))) for other, some in named.items()}
    texts[file] = f"{before}\n\n{_joined(_summary(study, sheets, _address(folder)))}\n{after}"
    with files.argument_errors("report", "--markdown", "a folder to write into", folder):
        folder.mkdir(exist_ok=True)
    try:
        files.write_all("report", "--markdown", texts)
    finally:
        with suppress(OSError):
            folder.rmdir()  # removes the folder only if it is empty
    gone = [other for other in earlier if other not in named]
    for other in gone:
        with files.argument_errors("report", "--markdown", "a file that can be removed", other):
            other.unlink()
    return gone


def _is_ours(file: Path) -> bool:
    with files.argument_errors("report", "--markdown", "a file that can be read", file), file.open("rb") as opened:
        return opened.readline().strip() == MARK.encode()


def _sheets(study: Study) -> Iterator[_Sheet]:
    for (section, _, _), problems in grouped(study.problems, lambda p: (p.section, p.case, p.world_size)).items():
        measured = tables.overview(study, problems) or tables.measurements(study, problems)
        yield _Sheet(section, [*measured, *tables.matrices(problems)])


def _measurements(sheets: Sequence[_Sheet], page: str) -> Iterator[str]:
    """A file of measurements: of one sheet, or of several with the same file name, as that leaves characters out."""
    yield f"{MARK}\n"
    for sheet in sheets:
        yield f"# {_escaped(f'{sheet.tables[0].title}: {sheet.section.title}')}\n"
        if sheet.section.simulated:
            yield _SIMULATED
        yield f"[Summary](../{page}) and [what the columns are](../{page}#columns).\n"
        for table in sheet.tables:
            if table is not sheet.tables[0]:
                yield f"## {_escaped(table.title)}\n"
            if table.note:
                yield f"{_wrapped(table.note)}\n"
            yield grid(table)


def _summary(study: Study, sheets: Sequence[_Sheet], folder: str) -> Iterator[str]:
    """Links to the measurements, and the tables over several ops. Long tables are folded."""
    for section in study.sections:
        yield f"### {_escaped(section.title)}\n"
        if section.simulated:
            yield _SIMULATED
        yield "**Measurements.** A row is a problem, or a result where no algorithms compete.\n"
        yield "".join(f"{_link(sheet, folder)}\n" for sheet in sheets if sheet.section == section)
        for table in tables.summary(study, section):
            if len(table.rows) > _LONG:
                yield _folded(f"{table.title}. {table.note}", grid(table))
            elif table.rows:
                yield f"{_wrapped(f'**{table.title}.** {table.note}')}\n\n{grid(table)}"
            else:
                yield f"**{table.title}:** none.\n"
    environment = tables.environments(study)
    yield f"### {environment.title}\n"
    if environment.note:
        yield f"{_wrapped(environment.note)}\n"
    yield grid(environment)
    yield "### Columns\n"
    yield "\n".join(_wrapped(f"- *{name}*: {text}", "  ") for name, text in tables.EXPLANATIONS.items()) + "\n"


def _link(sheet: _Sheet, folder: str) -> str:
    table = sheet.tables[0]
    rows = counted(len(table.rows), "row")
    return f"- [{_escaped(table.title)}]({folder}/{sheet.name}): {rows}"


def _address(path: Path) -> str:
    """The address of a file or folder in the same folder, for a link."""
    return quote(os.fsencode(path.name))


def _joined(blocks: Iterator[str]) -> str:
    return "\n".join(blocks)


def _wrapped(text: str, indent: str = "") -> str:
    """The text in lines of the same width as in this project's pages; ``indent`` is for all lines but the first."""
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


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
