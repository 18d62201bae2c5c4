"""``python -m iris report``: draw results as a page with charts, write them as Markdown tables, or compare two sets."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from iris import files
from iris.console import Parser, counted
from iris.errors import ArgumentError, BackendError
from iris.progress import progress
from iris.report import comparison, markdown, page
from iris.report.charts import KINDS, Chart, charts
from iris.report.palette import Palette
from iris.report.study import Study, grouped
from iris.results import read

T = TypeVar("T")
THRESHOLD_PERCENT = 3.0
_STATUS_S = 2.0


def main(arguments: Sequence[str]) -> int:
    """The ``report`` command."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if (given.results is None) == (given.compare is None):
        parser.error("give one file or folder of results, or --compare A B")
    if given.compare is not None and (given.out or given.svg_dir or given.markdown or given.charts):
        parser.error("--compare only prints: leave out --out, --svg_dir, --charts and --markdown")
    if given.charts and given.out is None and given.svg_dir is None and given.markdown is not None:
        parser.error("--charts needs --out or --svg_dir: --markdown writes tables only")
    if given.compare is None and (given.threshold is not None or given.fail_on_regression or given.each):
        parser.error("--threshold, --fail_on_regression and --each belong to --compare A B")
    if given.compare is not None:
        threshold = THRESHOLD_PERCENT if given.threshold is None else given.threshold
        return _compare(given.compare[0], given.compare[1], threshold, given.fail_on_regression, given.each)
    if given.markdown is not None:
        markdown.parts(given.markdown)
        markdown.folder_of(given.markdown)
    out = given.out
    if out is None and given.markdown is None and given.svg_dir is None:
        out = Path("report.html")
    if out is not None:
        _check_page(out)
    results = read(given.results)
    study = Study(results)
    if out is not None and os.path.realpath(out) in {os.path.realpath(result.file) for result in results}:
        raise ArgumentError("report", "--out", "a file that no results are read from", out)
    if out is not None or given.svg_dir is not None:
        _draw(study, out, given.svg_dir, given.charts)
    if given.markdown is not None:
        gone = markdown.write(study, given.markdown)
        into = f"{given.markdown}, {markdown.folder_of(given.markdown)}"
        print(f"tables of {counted(len(study.results), 'result')}: {into}")
        for file in gone:
            print(f"{file} is removed: there is no table for it any more")
    return 0


def _compare(before: Path, after: Path, threshold_percent: float, fail_on_regression: bool, each: bool) -> int:
    old, new = read(before), read(after)
    changes = comparison.compare(old, new, threshold_percent)
    comparison.show(changes, old, new, each)
    worse = any(change.regression for change in changes)
    return 1 if worse and fail_on_regression else 0


def _draw(study: Study, out: Path | None, svg_dir: Path | None, kinds: Sequence[str] | None) -> None:
    """Write the page ``out`` and pictures into ``svg_dir``, if these are given. ``kinds``: the kinds of charts; None:
    all."""
    try:
        from iris.report import drawing, svg
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise BackendError("charts need matplotlib: pip install matplotlib (--markdown does without)") from error
    known = charts(study)
    wanted = [(name, chart) for name, chart in known.items() if kinds is None or chart.kind in kinds]
    if kinds is not None and not wanted:
        there = [kind for kind in KINDS if any(chart.kind == kind for chart in known.values())]
        expected = f"a kind that there are charts of ({', '.join(there) or 'there are none'})"
        raise ArgumentError("report", "--charts", expected, ", ".join(kinds))
    if svg_dir is not None:
        _make("--svg_dir", svg_dir)
    if out is not None:
        _make("--out", out.parent)
    palette = Palette(result.algorithm for result in study.results)
    pictures: list[tuple[Chart, str]] = []
    for name, chart in _tracked(wanted):
        text = svg.text_of(drawing.draw(chart, study, palette), name)
        if svg_dir is not None:
            files.write("report", "--svg_dir", svg_dir / f"{name}.svg", text)
        pictures.append((chart, svg.inlined(text, chart.alt, palette.variables)))
    if svg_dir is not None:
        print(f"{counted(len(pictures), 'chart')}: {svg_dir}")
    if out is not None:
        sections = grouped(pictures, lambda pair: pair[0].section.title)
        files.write("report", "--out", out, page.render(study, sections, palette))
        print(f"{counted(len(study.results), 'result')}, {counted(len(pictures), 'chart')}: {out}")


def _check_page(out: Path) -> None:
    """Raise if the page cannot be written: before, not after all is drawn."""
    with files.argument_errors("report", "--out", "a file that can be written", out):
        is_folder = out.is_dir()
    if is_folder:
        fix = f"Try --out {out / 'report.html'}."
        raise ArgumentError("report", "--out", "a file", f"{out}, which is a folder", fix)
    files.require_writable("report", "--out", out)


def _make(option: str, folder: Path) -> None:
    with files.argument_errors("report", option, "a folder to write into", folder):
        folder.mkdir(parents=True, exist_ok=True)


def _tracked(items: Sequence[T]) -> Iterator[T]:
    """The items, with progress on stderr if they take a while."""
    with progress(len(items), "drawing") as advance:
        said = time.monotonic()
        for item in items:
            yield item
            words = ""
            if time.monotonic() - said >= _STATUS_S:
                words, said = "drawing", time.monotonic()
            advance(words, 1)


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of percent, 0 or more")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="iris report",
        description="Draw benchmark results into one HTML page that needs no network, write them as Markdown tables, "
        "or compare two sets of them.",
    )
    parser.add_argument(
        "results", type=Path, nargs="?", help="a file, or a folder: all *.jsonl and *.jsonl.gz files below it are read"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page (default: report.html, unless --svg_dir or --markdown is given)",
    )
    parser.add_argument("--svg_dir", type=Path, metavar="DIR", help="write each chart into this folder as an SVG file")
    parser.add_argument(
        "--charts",
        action="append",
        choices=tuple(KINDS),
        help="draw charts of this kind only; may be given several times (default: all kinds)",
    )
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help=f"replace what stands between {markdown.BEGIN} and {markdown.END} in this file by a summary, and write a "
        "file of measurements for each op and number of ranks into the folder beside it that is named as it is, "
        "without the suffix; files of an earlier report that are not written again are removed there",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("A", "B"),
        help="two files or folders, A before and B after: say what is faster or slower beyond noise, and how many "
        "cases of each op and number of ranks are new or gone",
    )
    parser.add_argument(
        "--each", action="store_true", help="with --compare: print each case that is new or gone, not only how many"
    )
    parser.add_argument(
        "--threshold",
        type=_percent,
        metavar="PERCENT",
        help="with --compare: medians must differ by more than this, and the p10 to p90 ranges must not overlap "
        f"(default: {THRESHOLD_PERCENT:g})",
    )
    parser.add_argument(
        "--fail_on_regression",
        action="store_true",
        help="with --compare: exit with 1 if anything of Iris got slower, or has no valid time any more, or is gone",
    )
    return parser
