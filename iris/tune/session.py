"""The tuner on every rank: open a context, and take the steps that rank 0 chooses, problem after problem."""

from __future__ import annotations

import math
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from triton.errors import TritonError

from iris.bench.cases.fused import local_params, uneven
from iris.bench.cases.operands import ROW_MAJOR, Operands, problem_of
from iris.bench.contexts import default_heap_size, roomy
from iris.bench.environment import environment
from iris.bench.options import DTYPES
from iris.bench.state import FATAL, agreed, one_line
from iris.bench.timing import call_seconds, of_all
from iris.console import counted
from iris.context import Iris, iris
from iris.errors import ArgumentError, IrisError
from iris.ops import FusedConfig, Problem, Target, tuned
from iris.ops.algorithms import LOCAL
from iris.ops.candidates import candidates, variations
from iris.ops.obstacles import has_no_tile
from iris.ops.pick import model_pick, pick_config, predictions
from iris.ops.problem import QUANTISED
from iris.ops.target import target_of
from iris.ops.tuned import Row, changed_fields, row_key
from iris.progress import Advance, progress
from iris.tune.compilation import compile_only
from iris.tune.findings import Finding, described_config
from iris.tune.search import Search, Step, by_turns
from iris.tune.trials import DROPPED, LEFT, MEASURED, RIGHT, History, Trials, problem_name

PROMISING = 1.6
"""Candidates predicted to take this much longer than the fastest are not tried."""
_GPU_CALLS, _SIM_CALLS = 4, 1
_LEAD_S = 100e-6
"""The device idles this long before a timed call, so that the host is ahead of it."""
_TIMEOUT_S, _FIRST_TIMEOUT_S = 30.0, 60.0
"""Time limits of waits between ranks: longer than a kernel takes to compile; a candidate that hangs costs as much."""
_STATUS_S = 2.0
_FIRST = 3.0
"""How many times as much time as others the first shape of a kind gets."""
_VERSIONS = ("iris", "commit", "torch", "triton", "cuda")
_DROPPED_FOR = (IrisError, TritonError, RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""Errors of a candidate, or of making operands, after which all ranks can go on, except the fatal ones among them."""


@dataclass(frozen=True)
class Shape:
    """A problem over all ranks, A[m, k] @ B[k, n], in the form of command lines and data sets."""

    op: str
    m: int
    n: int
    k: int
    dtype: str
    gather_dim: int | None = None
    b_layout: str = ROW_MAJOR

    @property
    def kind(self) -> tuple[str, str, int | None, str]:
        """All that its kernels depend on, besides the config."""
        return self.op, self.dtype, self.gather_dim, self.b_layout

    @property
    def name(self) -> str:
        dim = f" gather_dim={self.gather_dim}" if self.gather_dim is not None else ""
        layout = f" b_layout={self.b_layout}" if self.b_layout != ROW_MAJOR else ""
        return f"{self.op}{dim} {self.m}x{self.n}x{self.k} {self.dtype}{layout}"


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
        shapes: the shapes to tune.
        out: the file of rows.
        budget_s: seconds for all shapes, counted from when the ranks have met.
        resume: leave out problems that have a finished row, and candidates that failed before.
        heap_size: bytes of symmetric heap; None: a quarter of the GPU's memory, 32 GiB at most; simulated 256 MiB.
        run: the run's name in trials; it stays the same when new ranks are started.
    """

    shapes: tuple[Shape, ...]
    out: Path
    budget_s: float
    resume: bool
    heap_size: int | None = None
    run: str = field(default_factory=lambda: secrets.token_hex(8))


class Stop:
    """Whether Ctrl-C was pressed. Only rank 0 looks at this, and tells the others."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGINT, self._ask)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked since the rank's start

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True


def run(options: Options) -> tuple[list[Finding], bool]:
    """Tune all shapes until time is up. Returns, on rank 0, what was found, and whether Ctrl-C ended the run. All ranks
    call this."""
    stop = Stop()
    findings: list[Finding] = []
    size = options.heap_size or default_heap_size()

    def open_new() -> Iris:
        return iris(size, timeout_s=_TIMEOUT_S, first_timeout_s=_FIRST_TIMEOUT_S)

    ctx = open_new()
    deadline = time.monotonic() + options.budget_s
    try:
        with progress(len(options.shapes)) if ctx.rank == 0 else nullcontext(_quiet) as advance:
            for number, shape in enumerate(options.shapes):
                ctx = roomy(ctx, open_new)
                now = time.monotonic()
                share = 0.0 if stop.asked else (deadline - now) * _share(options.shapes, number)
                if ctx.broadcast(share, 0) <= 0:
                    why = "stopped before its turn" if stop.asked else "no time left"
                    findings += [
                        _uneven(ctx, one) or _unreached(ctx, one, options, why) for one in options.shapes[number:]
                    ]
                    break
                findings.append(_uneven(ctx, shape) or _tune(ctx, shape, options, now + share, stop, advance))
                advance("", 1)
    except BaseException as error:
        ctx.__exit__(type(error), error, error.__traceback__)  # as ``with`` does: other ranks may be in another call
        raise
    ctx.close()
    return findings, stop.asked


def _share(shapes: Sequence[Shape], number: int) -> float:
    """The share of the time left that shape ``number`` gets. The first of a kind gets more: its kernels have to be
    compiled, and the others of the kind then find them."""
    weights = [
        1.0 if one.kind in {other.kind for other in shapes[:place]} else _FIRST for place, one in enumerate(shapes)
    ]
    return weights[number] / sum(weights[number:])


def _quiet(following: str, finished: int) -> None:
    pass


def _uneven(ctx: Iris, shape: Shape) -> Finding | None:
    """The finding for a shape that the ranks cannot share evenly; None if they can."""
    why = uneven(shape.op, f"{shape.m}x{shape.n}x{shape.k}", shape.gather_dim or 0, ctx.world_size)
    return Finding(shape.name, why=why) if why is not None else None


def _problem(ctx: Iris, shape: Shape) -> Problem:
    """The problem of each rank."""
    params = local_params({"M": shape.m, "N": shape.n, "K": shape.k}, ctx.world_size, op=shape.op)
    sizes = int(params["m"]), int(params["n"]), int(params["k"])
    return problem_of(shape.op, sizes, DTYPES[shape.dtype], ctx.world_size, shape.gather_dim or 0, shape.b_layout)


def _unreached(ctx: Iris, shape: Shape, options: Options, why: str) -> Finding:
    """The finding for a shape whose turn has not come. On ranks other than 0 it is not looked at."""
    past = Past(_problem(ctx, shape), target_of(ctx), options) if ctx.rank == 0 else None
    row = past.finished_row() if past is not None else None
    if past is None or row is None:
        return Finding(shape.name, why=why, failed=True, unfinished=True)
    if past.done:
        return Finding(shape.name, row)
    return Finding(shape.name, row, f"{why}: the finished row from before is kept", unfinished=True)


def _tune(ctx: Iris, shape: Shape, options: Options, deadline: float, stop: Stop, advance: Advance) -> Finding:
    """Tune one shape and write its row. On ranks other than 0 the finding has the shape's name only."""
    problem = _problem(ctx, shape)
    past = Past(problem, target_of(ctx), options) if ctx.rank == 0 else None
    kept = past.kept_row() if past is not None else None
    if ctx.broadcast(kept is not None, 0):
        return Finding(shape.name, kept)
    lacking = ""
    try:
        sizes = problem.m, problem.n, problem.k
        operands = Operands(ctx, shape.op, sizes, problem.dtype, shape.gather_dim or 0, shape.b_layout)
        runner = Runner(ctx, operands)
    except FATAL:
        raise
    except _DROPPED_FOR as error:  # no memory, or impossible sizes
        lacking = one_line(error)
    if (why := agreed(ctx, lacking)) is not None:
        return Finding(shape.name, why=why, failed=True)
    coordinator = Coordinator(runner, shape, past, deadline, stop, advance) if past is not None else None
    message: Any = coordinator.first() if coordinator is not None else None
    while (order := ctx.broadcast(message, 0)) is not None:
        step = Step(order["kind"], tuple(FusedConfig(**fields) for fields in order["configs"]), order["calls"])
        result = runner.take(step)
        message = coordinator.next(step, result) if coordinator is not None else None
    return coordinator.finding() if coordinator is not None else Finding(shape.name)


class Runner:
    """One problem on one rank; it takes the steps of a :class:`Search`."""

    def __init__(self, ctx: Iris, operands: Operands) -> None:
        self.ctx, self.operands, self.problem, self.target = ctx, operands, operands.problem, target_of(ctx)

    def take(self, step: Step) -> Any:
        """Take a step, and return its result, which is the same on all ranks. Collective."""
        if step.kind == "compile":
            return self._compile(step.configs)
        if step.kind == "library":
            of = self.operands
            return self._time(partial(of.multiply, of.a, of.local_output), step.calls)
        (config,) = step.configs
        if step.kind == "check":
            return self._check(config)
        return self._time(partial(self.operands.call, config), step.calls)

    def _compile(self, configs: Sequence[FusedConfig]) -> list[str | None]:
        """Compile ``configs``, each rank its share; returns a complaint or None for each."""
        complaints = []
        for number, config in enumerate(configs):
            complaint = ""
            if not has_no_tile(config):
                try:
                    mine = number % self.ctx.world_size == self.ctx.rank
                    compile_only(self.ctx, partial(self.operands.call, config), mine)
                except FATAL:
                    raise
                except _DROPPED_FOR as error:
                    complaint = one_line(error)
            complaints.append(complaint)
        return [agreed(self.ctx, complaint) for complaint in complaints]

    def _check(self, config: FusedConfig) -> str | None:
        """Run on other numbers first, so that every buffer holds wrong data, then on those that count."""
        operands, complaint = self.operands, ""
        try:
            operands.fill(decoy=True)
            operands.call(config)
            operands.fill()
            operands.spoil()
            operands.call(config)
            complaint = operands.complaint(operands.output, operands.roundings_by(config))
        except FATAL:
            raise
        except _DROPPED_FOR as error:
            complaint = one_line(error)
            self.ctx.synchronize()
        return agreed(self.ctx, complaint)

    def _time(self, call: Callable[[], object], calls: int) -> list[float]:
        """Milliseconds of ``calls`` calls on the slowest rank: events on GPUs, the host's clock in the simulator."""
        simulated = self.ctx.backend_name == "sim"
        seconds = call_seconds(
            self.ctx, call, together=True, warmup=0 if simulated else 1, iterations=calls, lead_s=_LEAD_S
        )
        return [1e3 * max(call) for call in zip(*of_all(self.ctx, seconds), strict=True)]


class Past:
    """What earlier searches have left of one problem: rows, and what became of its candidates.

    Attributes:
        key: the key of the problem's rows.
        trials: the trials that belong to the file of rows.
        histories: those of the problem's candidates.
    """

    def __init__(self, problem: Problem, target: Target, options: Options) -> None:
        self.key, self.options = row_key(problem, target.hardware), options
        self.trials = Trials(options.out, options.run)
        name, histories = problem_name(self.key), self.trials.histories()
        self.histories = {config: history for (of, config), history in histories.items() if of == name}

    def finished_row(self) -> Row | None:
        """The finished row of this problem. None, too, if the file cannot be read: whoever writes to it next says
        why."""
        try:
            rows = tuned.read(self.options.out)
        except ArgumentError:
            return None
        return next((row for row in rows if row.key == self.key and not row.unfinished), None)

    @property
    def done(self) -> bool:
        """Whether the problem need not be tuned again if it has a finished row."""
        kept = self.options.resume or any(history.measured_ms is not None for history in self._own())
        return kept and not any(history.left for history in self.histories.values())

    def kept_row(self) -> Row | None:
        """The finished row of this problem, if it need not be tuned again."""
        return self.finished_row() if self.done else None

    def begin(self) -> None:
        """Forget the candidates, unless the run goes on with them."""
        if self.histories and not self.options.resume and not self._own():
            self.trials.forget(self.key)
            self.histories = {}

    def _own(self) -> list[History]:
        """The histories that this run has written before a candidate ended its ranks."""
        return [history for history in self.histories.values() if history.run == self.options.run]


class Coordinator:
    """Rank 0's part: runs the search, records what became of each candidate, and writes the row."""

    def __init__(self, runner: Runner, shape: Shape, past: Past, deadline: float, stop: Stop, advance: Advance) -> None:
        self._runner, self._shape, self._past, self._advance = runner, shape, past, advance
        self._deadline, self._stop, self._said = deadline, stop, 0.0
        self._key, self._trials = past.key, past.trials
        past.begin()
        self._search = self._new_search(runner.problem, runner.target)
        self._steps = self._search.steps()

    def first(self) -> dict[str, Any] | None:
        """The first thing to do; None if there is nothing."""
        return self._order(next(self._steps, None))

    def next(self, step: Step, result: Any) -> dict[str, Any] | None:
        """The next thing to do after ``step`` gave ``result``; None if that was all."""
        self._note(step, result)
        try:
            return self._order(self._steps.send(result))
        except StopIteration:
            return None

    def finding(self) -> Finding:
        """Write the row, if anything was measured; an unfinished row never replaces a finished one."""
        timed = {config: trial.median_ms for config, trial in self._search.trials.items() if trial.times_ms}
        for config, ms in timed.items():
            self._trials.add(self._key, config, MEASURED, measured_ms=ms, predicted_ms=self._ms(config))
        best = self._search.best
        unfinished = self._search.unfinished
        if best is None:
            return Finding(self._shape.name, why=self._why_nothing(), failed=True, unfinished=unfinished)
        row, finished = self._row(best), self._past.finished_row()
        ended = "stopped" if self._stop.asked else "no time left"
        so_far = f"{ended}, {row.measured_ms:.4g} ms so far"
        if unfinished and finished is not None:
            self._trials.add(self._key, best, LEFT, measured_ms=row.measured_ms)
            why = f"{so_far}: the finished row from before is kept"
            return Finding(self._shape.name, finished, why, unfinished=True)
        if unfinished and timed.keys() == {self._search.untuned}:
            why = f"{ended}: nothing timed but what is picked without rows"
            return Finding(self._shape.name, why=why, failed=True, unfinished=True)
        try:
            (now,) = tuned.write(self._past.options.out, [row])
        except ArgumentError:  # the command writes it again, after the table, and raises then
            return Finding(self._shape.name, row, unfinished=unfinished, unwritten=True)
        why = "" if now is row else f"{so_far}: the faster row from before is kept"
        return Finding(self._shape.name, now, why, unfinished=unfinished)

    def _new_search(self, problem: Problem, target: Target) -> Search:
        def may(config: FusedConfig) -> bool:
            return config not in self._past.histories or self._past.histories[config].failed is None

        untuned = model_pick(problem, target)
        gpu = target.backend != "sim"
        known = self._past.histories.items()
        measured = {config: one.measured_ms for config, one in known if one.measured_ms is not None and may(config)}
        return Search(
            filter(may, [untuned, pick_config(problem, target), *by_turns(promising(problem, target, may))]), untuned,
            lambda config: filter(may, variations(problem, config, target)), self._left_s,
            self._runner.ctx.world_size if gpu else 0, _GPU_CALLS if gpu else _SIM_CALLS,
            measured, problem.op == LOCAL and problem.dtype not in QUANTISED,
            {config for config, one in known if one.unanswered},
        )  # fmt: skip

    def _left_s(self) -> float:
        return -math.inf if self._stop.asked else self._deadline - time.monotonic()

    def _order(self, step: Step | None) -> dict[str, Any] | None:
        if step is None:
            return None
        self._trials.start(self._key, step.configs)
        self._say(step)
        return {"kind": step.kind, "configs": [changed_fields(one) for one in step.configs], "calls": step.calls}

    def _note(self, step: Step, result: Any) -> None:
        """Write down what became of candidates, and tell the user of those that are dropped."""
        self._trials.answered()
        found = {"compile": result, "check": [result]}.get(step.kind, [])
        for config, complaint in zip(step.configs, found, strict=False):
            if complaint is not None:
                self._trials.add(self._key, config, DROPPED, why=complaint)
                print(f"dropped: {self._shape.name}: {described_config(config)}: {complaint}", file=sys.stderr)
            elif step.kind == "check":
                self._trials.add(self._key, config, RIGHT)

    def _say(self, step: Step) -> None:
        if time.monotonic() - self._said < _STATUS_S:
            return
        self._said = time.monotonic()
        best = self._search.best
        fastest = ""
        if best is not None:
            ms, calls = self._search.measured_ms(best), self._search.calls_of(best)
            fastest = f", best {ms:.4g} ms in {counted(calls, 'call')}"
        doing = {"compile": "compiling", "check": "checking"}.get(step.kind, "timing")
        left = f"{max(0.0, self._left_s()):.0f} s left"
        found = f"{doing}, {len(self._search.trials)} tried{fastest}, {left}"
        self._advance(f"{found}: {self._shape.name}", 0)  # what changes comes first: narrow terminals cut the end

    def _why_nothing(self) -> str:
        if self._stop.asked:
            return "stopped: nothing measured"
        dropped = sum(trial.dropped is not None for trial in self._search.trials.values())
        if dropped:
            return f"nothing measured: {counted(dropped, 'candidate')} dropped"
        return "no time left" if self._left_s() <= 0 else "all candidates failed before"

    def _ms(self, config: FusedConfig) -> float | None:
        """The prediction; None in the simulator."""
        return 1e3 * predictions(self._runner.problem, self._runner.target, (config,))[config] or None

    def _row(self, best: FusedConfig) -> Row:
        search, measured_ms = self._search, self._search.measured_ms(best)
        assert measured_ms is not None
        return measured_row(
            self._runner.ctx, self._runner.problem, self._runner.target, best, measured_ms,
            search.measured_ms(search.untuned), search.library_ms, unfinished=search.unfinished,
        )  # fmt: skip


def promising(
    problem: Problem, target: Target, may: Callable[[FusedConfig], bool] = lambda _: True
) -> list[FusedConfig]:
    """The candidates that ``may`` be tried and that the model does not rule out, the fastest by the model first."""
    times = predictions(problem, target, filter(may, candidates(problem, target, wide=True)))
    limit = PROMISING * min(times.values(), default=0.0)
    return sorted((one for one in times if times[one] <= limit), key=lambda one: times[one])


def measured_row(
    ctx: Iris,
    problem: Problem,
    target: Target,
    best: FusedConfig,
    measured_ms: float,
    untuned_ms: float | None,
    library_ms: float | None,
    *,
    commit: str | None = None,
    unfinished: bool = False,
) -> Row:
    """The row for what was just measured here; see :class:`Row`. ``commit``: None: what git says."""
    known, predicted_s = environment(ctx, commit), predictions(problem, target, (best,))[best]
    hardware, world_size, op, gather_dim, dtype, m, n, k, transposed_b = row_key(problem, target.hardware)
    return Row(
        hardware, world_size, op, gather_dim, dtype, m, n, k, transposed_b, best, round(measured_ms, 5),
        predicted_ms=_rounded(1e3 * predicted_s or None),
        untuned_ms=_rounded(untuned_ms),
        library_ms=_rounded(library_ms),
        versions={name: str(known[name]) for name in _VERSIONS if known[name] is not None},
        date=str(known["date"]),
        unfinished=unfinished,
    )  # fmt: skip


def _rounded(ms: float | None) -> float | None:
    return round(ms, 5) if ms is not None else None
