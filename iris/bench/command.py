"""The command line of the framework: ``iris bench CASE … [options]``."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from iris.bench import records
from iris.bench.axes import Axis, Value, parse_values
from iris.bench.case import SHAPE_AXIS, Case
from iris.bench.dataset import Dataset
from iris.bench.driver import Group, as_failure, grouped, label, live, measured, refuse_launcher
from iris.bench.environment import here, variables, versions
from iris.bench.messages import receiving
from iris.bench.options import (
    DTYPES,
    add_heap_size,
    add_num_ranks,
    not_negative,
    positive,
    ranks_to_start,
    seconds,
)
from iris.bench.records import Record
from iris.bench.session import GPU_CALLS, GPU_WARMUP, LONG_CALLS, MIN_CALLS, SIM_CALLS, Settings
from iris.bench.tables import FORMATS
from iris.console import STOPPED, Parser, counted
from iris.errors import ArgumentError, IrisError
from iris.ops import tuned
from iris.progress import progress, redrawn

_AXIS = "axis_"


def run(cases: Sequence[Case], known: Mapping[str, Case], arguments: Sequence[str], program: str | None = None) -> int:
    """Measure ``cases`` as ``arguments`` say. Returns the exit status: 0 if something was measured, and no result was
    wrong and no point failed.

    Args:
        cases: those named on the command line; if empty, ``--benchmark_filter`` chooses among all cases.
        known: all cases, by name.
        arguments: the options.
        program: the program's name in usage; None: ``iris bench`` and the cases.
    """
    parser = make_parser(cases, known, program)
    given, rest = parser.parse_known_args(arguments)
    if rest:
        late = "; cases come before all options" if any(word in known for word in rest) else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{late}")
    if not cases and given.benchmark_filter is None and not given.benchmark_list:
        parser.error("name a case, or choose among all with --benchmark_filter")
    num_ranks = ranks_to_start(given.num_ranks)
    groups = _groups(cases or list(known.values()), bool(cases), given, num_ranks)
    if given.benchmark_list:
        todo = _todo(groups, _before(groups, given, num_ranks), num_ranks)
        for group in todo:
            for params in group.variants:
                print(label(group.case, params))
        if given.resume is not None and not todo:
            print("nothing is missing", file=sys.stderr)
        return 0
    if not groups:
        parser.error(f"no point's name matches {given.benchmark_filter.pattern!r}; --benchmark_list lists them")
    return _measure(groups, known, given, num_ranks)


def _groups(cases: Sequence[Case], named: bool, given: argparse.Namespace, num_ranks: int) -> list[Group]:
    """The points of ``cases``. Unless the cases were ``named``, those without shapes in the data set are left out."""
    overrides = _overrides(cases, given)
    dataset = Dataset.read(given.dataset) if given.dataset is not None else None
    wanted: re.Pattern[str] = given.benchmark_filter or re.compile("")
    groups = []
    for case in cases:
        shapes = None
        if dataset is not None:
            if not named and not (case.takes_shapes and dataset.has(case.name, num_ranks)):
                continue
            if not case.takes_shapes:
                raise ArgumentError("bench", "--dataset", "a case with an axis M,N,K", case.name)
            shapes = dataset.shapes(case.name, num_ranks)
        points = case.points(overrides, shapes, num_ranks)
        groups += grouped(case, [params for params in points if wanted.search(label(case, params))])
    return groups


def _overrides(cases: Sequence[Case], given: argparse.Namespace) -> dict[str, Sequence[Value]]:
    """The values that the options ``--axis_…`` give."""
    overrides: dict[str, Sequence[Value]] = {}
    for option, text in vars(given).items():
        if option.startswith(_AXIS) and text is not None:
            name = option.removeprefix(_AXIS)
            axes = [one for case in cases for one in case.axes if name in one.names]
            known = list(dict.fromkeys(value for one in axes for value in (*one.values_of(name), *one.also)))
            values = parse_values(name, text, known)
            if set(map(type, known)) == {float}:  # records have 1.0, not 1
                values = [float(value) if type(value) is int else value for value in values]
            _check(name, values, known, axes)
            overrides[name] = values
    return overrides


def _check(name: str, values: Sequence[Value], known: Sequence[Value], axes: Sequence[Axis]) -> None:
    """Refuse values that no case can take: on an axis that is closed or has no numbers, any other value; on an axis of
    numbers, words; on an axis of whole numbers, fractions; and matrix sizes that are not positive."""
    closed = all(one.closed for one in axes)
    if name == "dtype" and not closed:
        known = list(dict.fromkeys([*DTYPES, *known]))
    kinds = set(map(type, known))
    wordy = kinds <= {str, bool}
    for value in values:
        expected = None
        words = {one.known(value) for one in axes}
        if (wordy and type(value) not in kinds) or ((wordy or closed) and words.isdisjoint(known)):
            expected = f"one of {', '.join(map(str, known))}"
        elif kinds == {int} and type(value) is not int:
            expected = "whole numbers"
        elif (isinstance(value, str | bool) and type(value) not in kinds) or (
            isinstance(value, float) and not math.isfinite(value)
        ):
            expected = "numbers"
        elif name in SHAPE_AXIS and isinstance(value, int) and value < 1:
            expected = "positive numbers"
        if expected is not None:
            raise ArgumentError("bench", f"--axis_{name}", expected, value)
        for one in axes:
            one.check(value)


def _measure(groups: Sequence[Group], known: Mapping[str, Case], given: argparse.Namespace, num_ranks: int) -> int:
    """Measure the points without a record, write each record as it comes, and show all records."""
    refuse_launcher("iris bench")
    tuned.user_rows(tuned.user_path())  # finds a broken file now, not once per point that needs it
    out: Path | None = given.resume or given.benchmark_out
    done = _before(groups, given, num_ranks)  # before ``appending``, which would create a missing file
    settings = Settings(given.timeout_s, given.heap_size, given.warmup, given.repeat, given.commit)
    keys = [key for group in groups for key in group.keys(num_ranks)]
    ended: KeyboardInterrupt | IrisError | None = None
    with records.appending(out) if out is not None else nullcontext(_nowhere) as append:
        try:
            for found in _found(_todo(groups, done, num_ranks), num_ranks, settings):
                done |= records.newest(found)
                append(found)
        except (KeyboardInterrupt, IrisError) as error:  # the records so far are still shown
            ended = error
    results: list[Record] = [done[key] for key in keys if key in done]
    if sys.stdout.seekable():
        sys.stdout.seek(0, os.SEEK_END)  # after the records, if out is /dev/stdout
    FORMATS[given.benchmark_format](results, known, sys.stdout)
    sys.stdout.flush()
    if isinstance(ended, IrisError):
        with as_failure():
            raise ended
    if ended is not None:
        how = f"; --resume {out} goes on" if out is not None else ""
        print(f"stopped after {len(results)} of {counted(len(keys), 'point')}{how}", file=sys.stderr)
        return STOPPED
    if all(one["skipped"] is not None for one in results):
        print(f"nothing was measured: {counted(len(results), 'point')} skipped", file=sys.stderr)
        return 1
    return 0 if all(map(records.succeeded, results)) else 1


def _found(todo: Sequence[Group], num_ranks: int, settings: Settings) -> Iterator[Sequence[Record]]:
    """Measure ``todo`` and yield records as they come."""
    if not todo:
        return
    with progress(sum(len(group.variants) for group in todo)) as advance:

        def show(words: str) -> None:
            advance(f"{words}: {group.label}", 0)  # what changes comes first: narrow terminals cut the end

        advance(f"starting {counted(num_ranks, 'rank')}", 0)
        with (
            receiving(show) if redrawn() else nullcontext() as address,
            live(num_ranks, replace(settings, status_address=address)) as ranks,
        ):
            for group in todo:
                advance(group.label, 0)
                for found in measured(ranks, group):
                    yield found
                    advance("", len(found))


def _nowhere(found: Sequence[Record]) -> None:
    """Drop records, if there is no output file."""


def _before(groups: Sequence[Group], given: argparse.Namespace, num_ranks: int) -> dict[str, Record]:
    """The records, by key, that a resumed run need not measure again; none without ``--resume``."""
    before = records.load(given.resume) if given.resume is not None else []
    return _done(before, [group.keys(num_ranks) for group in groups], given.commit, given.repeat)


def _todo(groups: Sequence[Group], done: Mapping[str, Record], num_ranks: int) -> list[Group]:
    """The groups that are still to be measured; of a group, either all variants are done or none."""
    return [group for group in groups if done.keys().isdisjoint(group.keys(num_ranks))]


def _done(
    before: Sequence[Record], groups: Sequence[Sequence[str]], commit: str | None, repeat: int | None = None
) -> dict[str, Record]:
    """The records of earlier runs, by key, that need not be measured again. A group, given by its keys, is measured
    again as a whole if one record is missing or was not timed in turns with the others. Prints how many records do not
    count, and how many that count come from another commit than ``commit``, from other versions, or from another number
    of calls than ``repeat``."""
    wanted = {key for keys in groups for key in keys}
    asked = [one for one in before if records.key_of(one) in wanted]
    if not asked:
        return {}
    place = here()
    mine = records.newest(one for one in asked if records.place_of(one) == place)
    right = {key: one for key, one in mine.items() if records.succeeded(one)}
    whole = [
        keys for keys in groups if right.keys() >= set(keys) and len({right[key].get("batch") for key in keys}) == 1
    ]
    done = {key: right[key] for keys in whole for key in keys}
    elsewhere = len(records.newest(asked).keys() - mine.keys())
    if elsewhere:
        print(f"not counted, as measured on other hardware than {place[0]}: {counted(elsewhere, 'point')}",
              file=sys.stderr)  # fmt: skip
    if failed := len(mine) - len(right):
        print(f"measured again after a failure: {counted(failed, 'point')}", file=sys.stderr)
    if apart := len(right) - len(done):
        print(f"measured again, in turns with others of their problem: {counted(apart, 'point')}", file=sys.stderr)
    now = {**versions(place[1], commit), "variables": variables()}
    for difference, count in Counter(_difference(one, now, repeat) for one in done.values()).items():
        if difference:
            print(f"kept, though measured with {difference}: {counted(count, 'point')}", file=sys.stderr)
    return done


def _difference(one: Record, now: Mapping[str, str | None], repeat: int | None) -> str:
    """How a record's versions and variables differ from the present ones, and its number of calls from ``repeat``."""
    then, time = one["environment"], one["time_ms"]

    def told(known: Mapping[str, object], name: str) -> object:
        return known.get(name) or ("none" if name == "variables" else "unknown")

    changed = [
        f"{name} {told(then, name)} (now {told(now, name)})" for name, value in now.items() if then.get(name) != value
    ]
    calls = time.get("calls") if time is not None else None
    if repeat is not None and calls is not None and calls != repeat:
        changed.append(f"{counted(calls, 'call')} (now {repeat})")
    return ", ".join(changed)


def make_parser(
    cases: Sequence[Case], known: Mapping[str, Case], program: str | None = None
) -> argparse.ArgumentParser:
    """The parser of all options, with those for the axes of ``cases``."""
    names = [case.name for case in cases]
    parser = Parser(
        prog=program or " ".join(["iris bench", *names]),
        usage=None if program or names else "%(prog)s CASE … [options]",
        description="\n\n".join(case.fn.__doc__ or "" for case in cases) or _list_of(known),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_num_ranks(parser)
    parser.add_argument(
        "--benchmark_filter", type=_regex, metavar="REGEX", help="only points whose name, as listed, has a match"
    )
    parser.add_argument(
        "--benchmark_list", action="store_true", help="list the points, with --resume those that are missing, and stop"
    )
    parser.add_argument(
        "--benchmark_format",
        choices=tuple(FORMATS),
        default="console",
        help="what is printed at the end; json: an object per line (default: %(default)s)",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--benchmark_out", type=Path, metavar="FILE", help="append each result, as a JSON line, to FILE"
    )
    output.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="skip problems for which FILE has a result of every variant, measured in turns; append the others there",
    )
    parser.add_argument("--dataset", type=Path, metavar="FILE", help="take shapes from FILE (see dataset/README.md)")
    parser.add_argument(
        "--timeout_s",
        type=seconds,
        default=60.0,
        help="most seconds for a point, those that are timed in turns together (default: %(default)s for each)",
    )
    add_heap_size(parser)
    parser.add_argument(
        "--warmup",
        type=not_negative,
        help=f"untimed calls before the timed ones (default: the case's, else {GPU_WARMUP}; simulated 0)",
    )
    parser.add_argument(
        "--repeat",
        type=positive,
        help=f"timed calls (default: the case's, else {GPU_CALLS}, of long calls {MIN_CALLS} to {LONG_CALLS}; "
        f"simulated {SIM_CALLS})",
    )
    parser.add_argument("--commit", help="what was measured, where git cannot tell")
    parser.add_argument_group("columns of the table", _COLUMNS)
    where = "" if cases else ". The axes of a case and their values: iris bench CASE --help"
    axes = parser.add_argument_group(
        "axes", f"LIST is pow2:LO:HI, linear:START:STOP:STEP, or values with commas between{where}"
    )
    shown: dict[str, str] = {}
    for case in cases or known.values():
        for axis in case.axes:
            for name in axis.names:
                values = axis.values_of(name)
                listed = ", ".join(dict.fromkeys(map(str, values)))
                more = [str(value) for value in axis.also if value not in values]
                others = f"; also: {', '.join(more)}" if more else ""
                shown.setdefault(name, f"{listed}{others}" if cases else "")
    for name, listed in shown.items():
        small = name if name.lower() in shown else name.lower()  # a lower-case name may be an axis of another case
        flags = dict.fromkeys((f"--{_AXIS}{name}", f"--{_AXIS}{small}"))
        text = f"default: {listed}".replace("%", "%%") if listed else None
        axes.add_argument(*flags, dest=f"{_AXIS}{name}", metavar="LIST", help=text)
    return parser


_COLUMNS = """\
ms               median time of one call on the slowest rank
spread           where 80 % of the calls lie: (p90 - p10) / median
skew µs          median of the slowest rank minus that of the fastest
back-to-back ms  time per call of calls issued back to back, host included, on a device that they have warmed
host µs          the host's time to issue one call
floor ms         the least that the hardware allows; "of floor" is its share of ms
× NCCL           how many times as fast as NCCL + torch.matmul in the same run
valid            whether the result was right when it was compared with a reference"""


def _list_of(known: Mapping[str, Case]) -> str:
    width = max(map(len, known))
    lines = [f"  {name:{width}}  {case.about}" for name, case in known.items()]
    return "Measure Iris on this machine. Cases:\n\n" + "\n".join(lines)


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
