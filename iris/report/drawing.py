"""Charts as matplotlib figures, each as wide as the screen of a phone or a column of a page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from iris.console import counted
from iris.report.charts import Chart
from iris.report.palette import INK, LOSS, MUTED, PAPER, RULE, Palette, Tone
from iris.report.study import Problem, Study, grouped, time_of
from iris.report.svg import SETTINGS
from iris.results import COMPARATORS, MATMUL, OPPONENTS, Result

WIDTH = 4.7
"""The width of every figure, in inches."""

_MARGIN, _LABELS, _END = 0.03, 1.2, 0.12
_HEAD, _ROW, _LEGEND_ROW = 0.52, 0.225, 0.2
_PLOT, _AXIS, _GAP = 1.75, 0.36, 0.34
_LEGEND_COLUMNS = 4
_RATIOS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 8, 12, 20, 32)
_OPPONENT = {"nccl": "NCCL + matmul", "torch_symm_mem": "PyTorch"}
_NEAR_RATIOS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3)
_MARKER_SIZES = {"*": 8.5, "P": 6.8, "X": 6.5, "d": 6.5}
"""Sizes of markers that would look too small at the size of the others."""

Curve = list[tuple[float, float]]


def draw(chart: Chart, study: Study, palette: Palette) -> Figure:
    """The figure of a chart."""
    with matplotlib.rc_context(SETTINGS):
        return _DRAWN[chart.kind](chart, study, palette)


def _speedups(chart: Chart, study: Study, palette: Palette) -> Figure:
    sizes = sorted({problem.world_size for problem in chart.problems})
    found = {name: _ratios(chart.problems, study, name) for name in OPPONENTS}
    drawn = {name: by_size for name, by_size in found.items() if by_size}
    legend = [counted(size, "rank") for size in sizes]
    figure, plots = _figure(chart, [_PLOT] * len(drawn), _AXIS + 0.12, legend, palette)
    for axes, (name, by_size) in zip(plots, drawn.items(), strict=True):
        for place, (size, points) in enumerate(sorted(by_size.items())):
            apart = 2 ** (0.16 * (place - (len(by_size) - 1) / 2))
            tone = palette.of_ranks(size)
            axes.plot(*_columns([(m * apart, ratio) for m, ratio in points]), marker=tone.marker, markersize=2.6,
                      linewidth=0, color=tone.light, alpha=0.4, markeredgewidth=0)  # fmt: skip
            means = [
                (m * apart, math.exp(statistics.fmean(math.log(ratio) for _, ratio in group)))
                for m, group in grouped(sorted(points), lambda point: point[0]).items()
            ]
            (line,) = axes.plot(*_columns(means), color=tone.light, linewidth=1.7, zorder=3)
            _mark(line, tone)
        _ratio_axis(axes)
        axes.grid(axis="y", color=RULE.light, linewidth=0.7)
        _unit(axes, f"speed-up over {_OPPONENT[name]} (shaded: slower)")
    _m_axis(plots, [_m(problem) for problem in chart.problems])
    return figure


def _ratios(problems: Sequence[Problem], study: Study, opponent: str) -> dict[int, Curve]:
    """For each number of ranks, M and the speed-up of every problem."""
    found: dict[int, Curve] = {}
    for problem in problems:
        ratio = study.speedup(problem.representative, opponent) if problem.representative else None
        if ratio is not None:
            found.setdefault(problem.world_size, []).append((_m(problem), ratio))
    return found


def _times(chart: Chart, study: Study, palette: Palette) -> Figure:
    (problem,) = chart.problems
    algorithms = palette.ordered(problem.results)
    figure, (axes,) = _figure(chart, [_ROW * (len(algorithms) + 0.6)], foot=0.06)
    floor = problem.floor_ms
    longest = max([floor or 0.0, *map(time_of, problem.timed.values())]) or 1.0
    for place, algorithm in enumerate(algorithms):
        result = problem.results[algorithm]
        if result.time is None:
            axes.text(0.01 * longest, place, result.outcome, va="center", color=LOSS.light, style="italic")
            continue
        time = time_of(result)
        axes.barh(place, time, 0.66, color=palette.tones[algorithm].light)
        weight = "bold" if time == problem.best_ms else "normal"
        label = axes.text(time + 0.015 * longest, place, f"{time:.3f}", va="center", color=INK.light, weight=weight)
        if floor is not None and time < floor < time + 0.2 * longest:  # else the floor's line crosses the number
            label.set_bbox({"facecolor": PAPER.light, "edgecolor": "none", "pad": 0.5})
    axes.set_yticks(range(len(algorithms)), map(_label, algorithms))
    axes.set_ylim(len(algorithms) - 0.5, -1.1)
    axes.set_xlim(0, longest * 1.2)
    axes.set_xticks([])
    axes.spines["left"].set_visible(True)
    if floor is not None:
        axes.vlines(floor, -0.55, len(algorithms) - 0.5, color=INK.light, linestyle=(0, (3, 2)), linewidth=1)
        axes.text(floor, -0.62, f"floor {floor:.3f}", ha="center", va="bottom", color=MUTED.light, size=7.5)
    figure.text(1 - _END / WIDTH, 1 - 0.2 / figure.get_figheight(), "ms", ha="right", color=MUTED.light)
    return figure


def _shares(chart: Chart, study: Study, palette: Palette) -> Figure:
    problems = chart.problems
    algorithms = palette.ordered(
        name for problem in problems for name, result in problem.complete.items() if result.floor_share is not None
    )
    names = [_two_lines(problem) for problem in problems]
    longest = max(len(line) for name in names for line in name.split("\n"))
    row = 0.36 if any("\n" in name for name in names) else 0.3
    labels = max(_LABELS, 0.2 + 0.076 * longest)
    figure, (axes,) = _figure(chart, [row * len(problems) + 0.1], _AXIS, algorithms, palette, labels)
    highest = 1.0
    for place, problem in enumerate(problems):
        for algorithm in reversed(algorithms):
            share = problem.timed[algorithm].floor_share if algorithm in problem.timed else None
            if share is not None:
                _plot(axes, [(share, place)], algorithm, palette, joined=False)
                highest = max(highest, share)
    axes.set_yticks(range(len(problems)), names)
    axes.set_ylim(len(problems) - 0.5, -0.5)
    axes.set_xlim(0, highest * 1.08)
    axes.xaxis.set_major_formatter(_percent())
    axes.xaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    axes.grid(axis="both", color=RULE.light, linewidth=0.7)
    axes.axvline(1, color=INK.light, linestyle=(0, (3, 2)), linewidth=1)
    return figure


def _scaling(chart: Chart, study: Study, palette: Palette) -> Figure:
    problems = chart.problems
    algorithms = palette.ordered(name for problem in problems for name in problem.timed)
    rates = all(result.tflops_per_gpu is not None for problem in problems for result in problem.timed.values())

    def height(result: Result) -> float | None:
        return result.tflops_per_gpu if rates else time_of(result)

    floor = [point for problem in problems for point in _floor_point(problem, rates)]
    figure, (axes,) = _figure(chart, [_PLOT], _AXIS + 0.12, [*algorithms, *(["floor"] if floor else [])], palette)
    _curves(axes, problems, algorithms, palette, lambda problem: problem.world_size, height)
    axes.plot(*_columns(floor), color=INK.light, linestyle=(0, (3, 2)), linewidth=1)
    sizes = sorted({problem.world_size for problem in problems})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    axes.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.15)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks", color=MUTED.light)
    _unit(axes, "TFLOP/s per GPU (level: perfect scaling)" if rates else "ms")
    return figure


def _floor_point(problem: Problem, rates: bool) -> Curve:
    floor = problem.floor_ms
    if not floor:
        return []
    first = next(iter(problem.complete.values()))
    rate = (first.tflops_per_gpu or 0.0) * time_of(first) / floor
    return [(problem.world_size, rate if rates else floor)]


def _crossover(chart: Chart, study: Study, palette: Palette) -> Figure:
    problems = chart.problems
    everyone = palette.ordered(name for problem in problems for name in problem.complete)
    shared = any(result.floor_share is not None for problem in problems for result in problem.timed.values())
    ratio = any(study.speedup(result, "nccl") is not None for p in problems for result in p.timed.values())
    algorithms = [name for name in everyone if not (ratio and name == "nccl" and not shared)]
    figure, plots = _figure(chart, [_PLOT, 1.2] if shared else [_PLOT], _AXIS + 0.12, algorithms, palette)
    above = plots[0]
    if ratio:
        rivals = [name for name in algorithms if name != "nccl"]
        _curves(above, problems, rivals, palette, _m, lambda result: study.speedup(result, "nccl"))
        _ratio_axis(above)
        _unit(above, "speed-up over NCCL + matmul (shaded: slower)")
    else:
        _curves(above, problems, algorithms, palette, _m, time_of)
        above.set_yscale("log")
        above.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        above.yaxis.set_minor_locator(NullLocator())
        _unit(above, "ms")
    if shared:
        _curves(plots[1], problems, algorithms, palette, _m, lambda result: result.floor_share)
        plots[1].set_ylim(0, max(1.05, plots[1].get_ylim()[1]))
        plots[1].yaxis.set_major_formatter(_percent())
        plots[1].yaxis.set_major_locator(FixedLocator([0, 0.5, 1]))
        plots[1].axhline(1, color=INK.light, linestyle=(0, (3, 2)), linewidth=1)
        _unit(plots[1], "share of the floor")
    _m_axis(plots, [_m(problem) for problem in problems])
    return figure


def _m_axis(plots: Sequence[Axes], values: Sequence[float]) -> None:
    """Label M below the last plot, on a scale of powers of two."""
    for axes in plots:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(_thinned(values)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
        axes.set_xlim(min(values) / 1.3, max(values) * 1.3)
    for axes in plots[:-1]:
        axes.tick_params(labelbottom=False)
    plots[-1].set_xlabel("M (rows of A over all ranks)", color=MUTED.light)


def _ratio_axis(axes: Axes) -> None:
    """Make the axis logarithmic, so that twice as fast is as far above 1 as half as fast is below. Below 1, where Iris
    is slower, it is shaded. The axis ends at a tick."""
    low, high = axes.get_ylim()
    low, high = min(low, 0.8), max(high, 1.25)
    axes.set_yscale("log")
    ratios = _NEAR_RATIOS if high < 4 * low else _RATIOS
    low = max((ratio for ratio in ratios if ratio <= low), default=low)
    high = min((ratio for ratio in ratios if ratio >= high), default=high)
    axes.yaxis.set_major_locator(FixedLocator([ratio for ratio in ratios if low <= ratio <= high]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}×"))
    axes.set_ylim(low, high)
    axes.axhspan(low, 1, color=LOSS.light, alpha=0.09, linewidth=0)
    axes.axhline(1, color=INK.light, linewidth=1)


def _curves(
    axes: Axes,
    problems: Sequence[Problem],
    algorithms: Sequence[str],
    palette: Palette,
    x: Callable[[Problem], float],
    y: Callable[[Result], float | None],
) -> None:
    for algorithm in reversed(algorithms):
        points: Curve = []
        for problem in problems:
            height = y(problem.timed[algorithm]) if algorithm in problem.timed else None
            if height is not None:
                points.append((x(problem), height))
        _plot(axes, points, algorithm, palette, joined=True)
    axes.grid(axis="y", color=RULE.light, linewidth=0.7)


def _figure(
    chart: Chart,
    heights: Sequence[float],
    foot: float = 0.0,
    legend: Sequence[str] = (),
    palette: Palette | None = None,
    labels: float | None = None,
) -> tuple[Figure, list[Axes]]:
    """A figure with a title, a legend, and one plot of each of ``heights``, from top to bottom; ``foot``: room for the
    ticks of the last plot. Lengths are in inches."""
    left = labels or (0.5 if legend else _LABELS)
    rows = math.ceil(len(legend) / _LEGEND_COLUMNS)
    head = _HEAD + (0.24 if legend and labels is None else 0.0)
    height = head + sum(heights) + _GAP * (len(heights) - 1) + foot + _LEGEND_ROW * rows + (0.06 if rows else 0)
    figure = Figure(figsize=(WIDTH, height), facecolor=PAPER.light)
    figure.text(_MARGIN / WIDTH, 1 - 0.2 / height, _cut(chart.title, 48), weight="bold", size=10, color=INK.light)
    figure.text(_MARGIN / WIDTH, 1 - 0.4 / height, _cut(chart.subtitle, 72), color=MUTED.light)
    plots = []
    top = height - head
    for extent in heights:
        box = (left / WIDTH, (top - extent) / height, 1 - (left + _END) / WIDTH, extent / height)
        plots.append(_bare(figure.add_axes(box)))
        top -= extent + _GAP
    if palette is not None:
        figure.legend(
            handles=[_handle(name, palette) for name in legend],
            loc="lower left",
            bbox_to_anchor=(_MARGIN / WIDTH, 0.02 / height),
            ncols=_LEGEND_COLUMNS,
            frameon=False,
            fontsize=8,
            borderpad=0,
            borderaxespad=0,
            handlelength=1.2,
            handletextpad=0.4,
            columnspacing=1.0,
            labelcolor=INK.light,
        )
    return figure, plots


def _bare(axes: Axes) -> Axes:
    axes.set_facecolor("none")
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
        spine.set_color(MUTED.light)
    axes.tick_params(colors=INK.light, pad=5)
    return axes


def _handle(name: str, palette: Palette) -> Line2D:
    if name == "floor":
        return Line2D([], [], color=INK.light, linestyle=(0, (3, 2)), linewidth=1, label=name)
    handle = Line2D([], [], linewidth=0, label=_label(name))
    _mark(handle, palette.tones[name] if name in palette.tones else palette.of_ranks(int(name.split()[0])))
    return handle


def _plot(axes: Axes, points: Curve, algorithm: str, palette: Palette, joined: bool) -> None:
    """Plot the points of an algorithm, ``joined`` by a line or not; those of Iris lie above those of comparators."""
    theirs = algorithm in COMPARATORS
    (line,) = axes.plot(*_columns(points), zorder=2 if theirs else 3)
    _mark(line, palette.tones[algorithm])
    line.set_linewidth((1.2 if theirs else 1.7) if joined else 0)


def _mark(line: Line2D, tone: Tone) -> None:
    line.set_color(tone.light)
    line.set_marker(tone.marker)
    line.set_markersize(_MARKER_SIZES.get(tone.marker, 5.5))
    line.set_markeredgecolor(PAPER.light)
    line.set_markeredgewidth(0.5)


def _label(algorithm: str) -> str:
    return "torch.matmul" if algorithm == MATMUL else algorithm


def _two_lines(problem: Problem) -> str:
    return "\n".join(_cut(line, 26) for line in (problem.label, problem.names) if line)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _unit(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", size=8.5, color=MUTED.light, pad=5)


def _percent() -> FuncFormatter:
    return FuncFormatter(lambda x, _: f"{100 * x:.0f} %")


def _m(problem: Problem) -> float:
    assert problem.shape is not None
    return problem.shape[0]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _thinned(values: Iterable[float]) -> list[float]:
    """At most seven of the values, evenly spread, including the last."""
    ordered = sorted(set(values))
    step = math.ceil(len(ordered) / 7)
    return ordered[::-1][::step][::-1]


_DRAWN: dict[str, Callable[[Chart, Study, Palette], Figure]] = {
    "speedups": _speedups,
    "times": _times,
    "shares": _shares,
    "scaling": _scaling,
    "crossover": _crossover,
}
