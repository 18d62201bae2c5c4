"""The command line of the tuner."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event

from iris import ops
from iris.bench.cases.operands import B_LAYOUTS, ROW_MAJOR
from iris.bench.dataset import Dataset
from iris.bench.driver import as_failure, sheltered
from iris.bench.options import add_heap_size, add_num_ranks, positive, ranks_to_start, seconds, world_size_of
from iris.bench.tables import place
from iris.console import STOPPED, Parser
from iris.errors import ArgumentError, IrisError, LaunchError
from iris.identity import identity
from iris.launch import RankPool, in_full
from iris.ops import tuned
from iris.ops.algorithms import GATHER
from iris.tune import session
from iris.tune.findings import Finding, print_findings
from iris.tune.session import Options, Shape
from iris.tune.trials import DROPPED, ENDED, Trials

_START_S = 300.0
"""The most seconds that ranks may take to start and to end, in addition to the budget."""
_TIMES = (
    "config: the algorithm, its tile (M×N×K), w: num_warps, s: num_stages, then all else that is no default.\n"
    "ms: of that config. untuned ms: of what auto takes without rows. Both are medians. If there is time, they are "
    "measured once more at the end of a search, in turns. The best time that progress shows may be lower: it is the "
    "luckiest of many, of fewer calls.\n"
    "predicted ms: of that config, by the model of the hardware; none of simulated ranks."
)
_RESTARTS = 3
"""How many times the ranks may be started again in one run."""

ABOUT = """\
Measure configs of ops on this machine and keep the fastest, for algorithm "auto" to take.

For each shape rank 0 chooses candidates: those that can run, and that the model does not expect to take 1.6 times as
long as the fastest, each algorithm's most promising first. All ranks compile a share, check each result, and time them
in turns; slower ones are left out until one is left, whose fields are then varied. The row of a shape is written when
it is done. A run that is stopped by Ctrl-C or its budget keeps what it has, in rows that are marked as unfinished and
never replace finished ones; --resume goes on. What became of each candidate is kept beside the rows, in a file of their
name and .trials. Without --resume each shape is begun anew when its turn comes, and all others are left as they are.

Sizes are of the whole problem, over all ranks: A is [m, k], B is [k, n]."""


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="iris tune", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("op", nargs="+", choices=tuple(ops.ALGORITHMS), metavar="OP", help=", ".join(ops.ALGORITHMS))
    parser.add_argument("--dataset", type=Path, metavar="FILE", help="tune the shapes in FILE (see dataset/README.md)")
    for name, about in (("m", "rows of A"), ("n", "columns of B"), ("k", "columns of A")):
        parser.add_argument(f"-{name}", type=positive, metavar=name.upper(), help=f"{about}, over all ranks")
    parser.add_argument(
        "--gather_dim", type=int, choices=(0, 1), help=f"for {GATHER}: A sharded by rows or by columns (default: both)"
    )
    parser.add_argument("--dtype", choices=tuple(tuned.DTYPE_NAMES), help="of A and B (default: bf16)")
    parser.add_argument("--b_layout", choices=B_LAYOUTS, default=ROW_MAJOR, help="of B (default: %(default)s)")
    add_num_ranks(parser)
    parser.add_argument(
        "--budget_s", type=seconds, default=300.0, help="seconds, beside starting ranks (default: %(default)s)"
    )
    where = f"the file of rows (default: what auto reads: ${tuned.ENVIRONMENT_VARIABLE}, else ~/.cache/iris/tuned.json)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=where)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="leave out shapes that --out has a finished row for. A shape whose later search ended early is continued. "
        "Candidates that failed are not tried again; those that were timed are checked again only if they are among "
        "the last",
    )
    add_heap_size(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """``iris tune``. Returns the exit status: 0 if every shape that the ranks can share evenly has a row; 1 if not, or
    if there is no such shape; 130 after Ctrl-C."""
    parser = make_parser()
    given = parser.parse_args(argv)
    out = given.out or tuned.user_path()
    if out is None:
        parser.error("--out: name a file: there is no home directory to keep one in, or IRIS_TUNED is /dev/null")
    if given.out is not None and os.path.isdir(given.out):
        parser.error(f"--out: name a file: {given.out} is a folder")
    with _put_right_by(given.out):
        tuned.read(out)  # finds a broken file before the search, not after
    if given.out is not None and (users := tuned.user_path()) is not None:
        tuned.read(users)  # picked configs come from there, whatever --out says
    who, num_ranks = identity(), ranks_to_start(given.num_ranks)
    world_size = world_size_of(num_ranks)
    shapes = _shapes(parser, given, world_size)
    options = Options(tuple(shapes), out.absolute(), given.budget_s, given.resume, given.heap_size)
    if who is not None and who.rank != 0:
        session.run(options)
        return 0
    trials = Trials(options.out)
    with ExitStack() as owned:
        with _put_right_by(given.out):
            owned.enter_context(trials.own())
        try:
            findings, stopped = session.run(options) if who is not None else _supervised(num_ranks, options)
        except KeyboardInterrupt:  # before there were ranks to tell, or a second time, or a candidate ended the ranks
            findings, stopped = [], True
    found = [(finding, finding.row) for finding in findings if finding.row is not None]
    simulated = any(row.hardware == tuned.SIMULATED for _, row in found)
    if findings:
        print_findings(findings, place(world_size, found[0][1].hardware, simulated) if found else "")
    if found:
        print(_TIMES)
    for finding, _ in found:
        if finding.why:
            print(f"{finding.name}: {finding.why}")
    if unwritten := [row for finding, row in found if finding.unwritten]:
        with as_failure(), _put_right_by(given.out):
            tuned.write(options.out, unwritten)
    if found:
        print(f"rows: {options.out}{', which count for simulated ranks only' if simulated else ''}")
    if any(finding.unfinished for finding in findings) and not stopped:
        print("there was no time to try all: --resume goes on, with a new --budget_s", file=sys.stderr)
    if stopped:
        print("stopped; --resume goes on", file=sys.stderr)
        return STOPPED
    return 0 if found and not any(finding.failed for finding in findings) else 1


@contextmanager
def _put_right_by(out: Path | None) -> Iterator[None]:
    """If ``--out`` names the file of rows, make errors tell the user to change that option."""
    try:
        yield
    except ArgumentError as error:
        fix = error.fix.replace(tuned.ENVIRONMENT_VARIABLE, "--out") if out is not None else error.fix
        raise ArgumentError(error.op, error.argument, error.expected, error.got, fix) from error


def _shapes(parser: argparse.ArgumentParser, given: argparse.Namespace, world_size: int) -> list[Shape]:
    if given.gather_dim is not None and GATHER not in given.op:
        parser.error(f"--gather_dim is for {GATHER}")
    sizes = given.m, given.n, given.k
    if given.dataset is None and None in sizes:
        parser.error("which shapes? -m M -n N -k K, or --dataset FILE")
    if given.dataset is not None and sizes != (None, None, None):
        parser.error("--dataset FILE has the sizes: leave -m, -n and -k out")
    found: dict[Shape, None] = {}
    for op in given.op:
        points = [{"M": given.m, "N": given.n, "K": given.k}]
        if given.dataset is not None:
            points = [dict(point) for point in Dataset.read(given.dataset).shapes(op, world_size)]
        for point in points:
            m, n, k = (int(point[name]) for name in ("M", "N", "K"))
            dtype = given.dtype or str(point.get("dtype", "bf16"))
            if dtype not in tuned.DTYPE_NAMES:
                raise ArgumentError("tune", f"{given.dataset}, dtype", f"one of {', '.join(tuned.DTYPE_NAMES)}", dtype)
            dims: tuple[int | None, ...] = (None,)
            if op == GATHER:
                fixed = given.gather_dim if given.gather_dim is not None else point.get("gather_dim")
                dims = (0, 1) if fixed is None else (int(fixed),)
            found |= dict.fromkeys(Shape(op, m, n, k, dtype, dim, given.b_layout) for dim in dims)
    return list(found)


def _supervised(num_ranks: int, options: Options) -> tuple[list[Finding], bool]:
    """Start ranks and have them tune. If a candidate ends them, start new ranks and go on without it.

    Raises:
        KeyboardInterrupt: a candidate ended the ranks after Ctrl-C.
    """
    trials, stopping = Trials(options.out, options.run), Event()
    for attempt in range(_RESTARTS + 1):
        pool, began = sheltered(num_ranks), time.monotonic()
        try:
            with _interrupts_to(pool, stopping):
                outcome: tuple[list[Finding], bool] = pool.run(
                    session.run, (options,), timeout_s=options.budget_s + _START_S
                )[0]
            pool.close()
            return outcome
        except LaunchError as error:
            starts = {at: one.unanswered for at, one in trials.histories().items() if one.run == options.run}
            most = max(starts.values(), default=0)
            lost = [at for at, count in starts.items() if most and count == most]
            if len(lost) == 1:
                ((name, config),) = lost
                trials.add(json.loads(name), config, DROPPED, why=ENDED)
            if stopping.is_set() and lost:
                print(f"a candidate ended its ranks: {error}", file=sys.stderr)
                raise KeyboardInterrupt from error
            if not lost or attempt == _RESTARTS:
                if isinstance(error.__cause__, IrisError):
                    raise  # says all, without a rank's traceback
                raise in_full(error) from error.__cause__
            what = "and is left out" if len(lost) == 1 else f"one of {len(lost)}: each of these is compiled alone"
            print(f"a candidate ended its ranks, {what} from now on: {error}", file=sys.stderr)
            left_s = max(1.0, options.budget_s - (time.monotonic() - began))
            options = replace(options, budget_s=left_s)
        finally:
            pool.kill()
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def _interrupts_to(pool: RankPool, stopping: Event) -> Iterator[None]:
    """Pass the first Ctrl-C on to rank 0, which stops the search and keeps its results, and set ``stopping``; the
    second ends all."""

    def first(number: int, frame: object) -> None:
        print("stopping: what was measured is kept; once more to stop at once", file=sys.stderr)
        stopping.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pid = pool.processes[0].pid
        if pid is not None:
            os.kill(pid, signal.SIGINT)

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
