"""Traces: when each program of each rank computed and waited.

Give an op a trace, gather it, draw it::

    from iris.trace import draw

    trace = iris.Trace()
    iris.ops.all_gather_matmul(ctx, output, A, B, trace=trace)
    ctx.barrier()
    events = trace.gather(ctx)             # on every rank: all ranks' events
    draw(events, "trace.svg")

With ``trace=True`` an op makes a trace itself: ``ctx.last_trace``. For a kernel of your own, call
``trace.begin(ctx, programs)``, pass ``trace.buffer`` to it, and have it call :func:`iris.device.trace.record`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from iris.context import Iris, require_context
from iris.device import trace as device_trace
from iris.errors import ArgumentError, BackendError, whole_number

_WAIT = "wg_gemm_wait"
_MEETINGS = 33
"""How often ranks meet to compare their clocks."""
COLORS = {"wg_gemm": "#3b7dd8", "wg_gemm_wait": "#e4572e", "wg_fetch": "#f2b134"}
LABELS = {"wg_gemm": "computes", "wg_gemm_wait": "waits for data", "wg_fetch": "moves data"}


@dataclass(frozen=True)
class Event:
    """One interval of one program, in nanoseconds: from :meth:`Trace.gather` since the trace's first event on any rank,
    from :meth:`Trace.events` by the rank's own clock."""

    rank: int
    program: int
    kind: str
    start_ns: int
    end_ns: int
    detail: int
    """The tile that the event belongs to; -1: none, as for leaving the kernel."""


class Trace:
    """The events of the last call that got this trace, the first 1024 of each program. Kernels write ``buffer``."""

    def __init__(self) -> None:
        self.op = ""
        self.programs = 0
        self.buffer: torch.Tensor | None = None
        self._told: set[str] = set()

    def begin(self, ctx: Iris, programs: int) -> None:
        """Make room for a call with ``programs`` programs, counted along the grid's first axis, and forget earlier
        calls.

        Raises:
            ArgumentError: ``programs`` is no positive whole number, or ``ctx`` no context.
        """
        require_context("Trace.begin", ctx)
        if whole_number(programs) < 1:
            raise ArgumentError("Trace.begin", "programs", "a positive whole number", repr(programs))
        self._forget("")
        self._make_room(ctx, int(programs))

    def _forget(self, op: str) -> None:
        """Forget earlier calls; the next one is of ``op``."""
        self.op, self.programs, self.buffer = op, 0, None

    def _make_room(self, ctx: Iris, programs: int) -> None:
        """Make room for a call with ``programs`` programs."""
        self.programs = programs
        self._told.clear()
        words = programs * device_trace.WORDS_PER_PROGRAM.value
        self.buffer = torch.zeros(words, dtype=torch.int64, device=ctx.device)
        self.buffer[device_trace.PROGRAMS.value] = programs

    def events(self, ctx: Iris) -> list[Event]:
        """This rank's events, by program and time. Warns if there were more events than are kept, or more programs than
        :meth:`begin` was told. Waits for the current stream."""
        require_context("Trace.events", ctx)
        ctx.synchronize()
        if self.buffer is None:
            return []
        programs = self.buffer.cpu().view(self.programs, -1, device_trace.FIELDS.value)
        most, kept = int(programs[:, 0, 0].max()), device_trace.CAPACITY.value
        name = f"the trace of {self.op}" if self.op else "a trace"
        if most > kept:
            self._tell(
                ctx,
                f"{name} lacks events: a program had {most}, and the first {kept} are kept. Times and waits are of "
                "these alone. Trace a smaller problem, or larger tiles.",
            )
        if programs[0, 0, device_trace.LACKING.value]:
            self._tell(
                ctx,
                f"{name} lacks events: it began for {self.programs} programs, and the kernel has more. Give "
                "Trace.begin the size of the grid's first axis.",
            )
        return _decode(programs, ctx.rank)

    def _tell(self, ctx: Iris, words: str) -> None:
        """Warn once for each call."""
        if words not in self._told:
            self._told.add(words)
            ctx.warning(words)

    def gather(self, ctx: Iris) -> list[Event]:
        """All ranks' events, on every rank. Collective; runs a kernel on the current stream.

        On GPUs ranks' clocks differ. The difference is measured here, to some microseconds: all ranks leave a barrier
        at the same time, and the median of 33 barriers counts. Times are by rank 0's clock.
        """
        require_context("Trace.gather", ctx)
        mine = [[e.program, e.kind, e.start_ns, e.end_ns, e.detail] for e in self.events(ctx)]
        meetings = _meetings(ctx)
        everyone: list[Event] = []
        first: list[int] = []
        for rank in range(ctx.world_size):
            times, rows = ctx.broadcast([meetings, mine], source=rank)
            first = first or times
            ahead = statistics.median_low(there - here for there, here in zip(times, first, strict=True))
            everyone += [
                Event(rank, program, kind, start - ahead, end - ahead, detail)
                for program, kind, start, end, detail in rows
            ]
        return _from_zero(everyone)

    def waited_s(self, ctx: Iris) -> float:
        """Seconds that this rank's programs waited for tiles to multiply, averaged over them.

        Two kinds of waits do not count: those while programs move or sum data, which are part of ``wg_fetch``, and the
        one in which ranks leave the kernel together, which is for no tile.
        """
        require_context("Trace.waited_s", ctx)
        waits = [e.end_ns - e.start_ns for e in self.events(ctx) if e.kind == _WAIT and e.detail >= 0]
        return sum(waits) / max(1, self.programs) / 1e9


def is_wanted(op: str, trace: object) -> bool:
    """Whether a call with ``trace`` is to be recorded.

    Raises:
        ArgumentError: ``trace`` is neither a Trace nor True, nor False, None or 0.
    """
    if trace is None or (isinstance(trace, int) and not trace):
        return False
    if trace is not True and not isinstance(trace, Trace):
        raise ArgumentError(op, "trace", "True, False or an iris.Trace", repr(trace))
    return True


def trace_of(ctx: Iris, op: str, trace: bool | Trace | None) -> Trace | None:
    """The Trace to record into, if any, without what it has recorded before; also kept as ``ctx.last_trace``.

    Raises:
        ArgumentError: ``trace`` is not one of the values that :func:`is_wanted` accepts.
    """
    if not is_wanted(op, trace):
        return None
    chosen = trace if isinstance(trace, Trace) else Trace()
    chosen._forget(op)
    ctx.last_trace = chosen
    return chosen


def _decode(programs: torch.Tensor, rank: int) -> list[Event]:
    events: list[Event] = []
    for program, row in enumerate(programs.tolist()):
        for kind, start, end, detail in row[1 : 1 + min(row[0][0], device_trace.CAPACITY.value)]:
            events.append(Event(rank, program, device_trace.KINDS.get(kind, str(kind)), start, end, detail))
    return events


def _meetings(ctx: Iris) -> list[int]:
    """The times at which the ranks met, by this rank's clock; 0 in the simulator, where all ranks have one clock."""
    if ctx.backend_name == "sim":
        return [0]
    times = torch.zeros(_MEETINGS, dtype=torch.int64, device=ctx.device)
    device_trace.meeting_kernel[(1,)](ctx.handle, times, MEETINGS=_MEETINGS, num_warps=1)
    ctx.synchronize()
    met: list[int] = times.tolist()
    return met


def _from_zero(events: Sequence[Event]) -> list[Event]:
    """``events`` with the first one's start at 0."""
    zero = min((event.start_ns for event in events), default=0)
    return [replace(event, start_ns=event.start_ns - zero, end_ns=event.end_ns - zero) for event in events]


def draw(events: Sequence[Event], path: str | Path, title: str = "") -> Path:
    """Draw a timeline, one line per program, grouped by rank; the suffix of ``path`` (.svg, .png) is the format. Kinds
    of your own get colours, too, and are labelled by their names.

    Raises:
        BackendError: matplotlib is missing.
        ArgumentError: ``events`` is no sequence of events, or ``path`` has no suffix that matplotlib knows as a format.
        OSError: ``path`` cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise BackendError("drawing needs matplotlib: pip install matplotlib") from error
    if not isinstance(events, Sequence) or not all(isinstance(one, Event) for one in events):
        raise ArgumentError("draw", "events", "what trace.gather(ctx) returns", type(events).__name__)
    if Path(path).suffix[1:].lower() not in Figure().canvas.get_supported_filetypes():
        raise ArgumentError("draw", "path", "a file whose name ends in .svg or .png", repr(str(path)))
    lines = sorted({(event.rank, event.program) for event in events})
    place = {line: index for index, line in enumerate(lines)}
    longest = max((event.end_ns for event in events), default=1)
    scale, unit = (1e6, "ms") if longest > 1e6 else (1e3, "µs")
    with matplotlib.rc_context({"svg.hashsalt": "iris"}):
        figure = Figure(figsize=(10, min(14.0, 1.5 + 0.16 * len(lines))), layout="constrained")
        axes = figure.add_subplot()
        bars: dict[tuple[str, tuple[int, int]], list[tuple[float, float]]] = {}
        for e in events:
            bar = e.start_ns / scale, (e.end_ns - e.start_ns) / scale
            bars.setdefault((e.kind, (e.rank, e.program)), []).append(bar)
        own = sorted({event.kind for event in events} - COLORS.keys())
        colors = COLORS | {kind: f"C{4 + number}" for number, kind in enumerate(own)}
        for kind, color in colors.items():
            for line in lines:
                if mine := bars.get((kind, line)):
                    axes.broken_barh(mine, (place[line] - 0.4, 0.8), facecolors=color, linewidth=0)
        ranks = sorted({rank for rank, _ in lines})
        for rank in ranks:
            last = max(place[line] for line in lines if line[0] == rank)
            axes.axhline(last + 0.5, color="#cccccc", linewidth=0.6)
        middles = [statistics.mean(place[line] for line in lines if line[0] == rank) for rank in ranks]
        axes.set_yticks(middles, [f"rank {rank}" for rank in ranks])
        axes.invert_yaxis()
        axes.set_xlabel(f"time [{unit}]")
        axes.set_title(title)
        used = [kind for kind in colors if any(event.kind == kind for event in events)]
        patches = [Patch(color=colors[kind], label=LABELS.get(kind, kind)) for kind in used]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(used), frameon=False)
        figure.savefig(path)
    return Path(path)
