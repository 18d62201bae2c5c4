"""The process that starts ranks, has them measure point after point, and makes records of their outcomes.

The variants of a point are measured together. If that fails (a rank dies, hangs or raises), the ranks are replaced and
each variant is measured alone, so that only the one at fault is lost; the others are then measured together.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

from iris.bench import records, session
from iris.bench.axes import Params
from iris.bench.case import Case
from iris.bench.environment import dated
from iris.bench.records import Record
from iris.bench.session import Settings
from iris.bench.state import Outcome, one_line
from iris.errors import ArgumentError, IrisError, LaunchError, PeerDied, RankMismatch, WaitTimeout, ranks_text
from iris.forkserver import start_server
from iris.identity import identity
from iris.launch import RankPool
from iris.results import without_sizes

START_S = 300.0
"""The most seconds that ranks may take to start, which is to import PyTorch, make heaps and meet, or to close."""
_CONSEQUENCES = (PeerDied, WaitTimeout, RankMismatch)


@dataclass(frozen=True)
class Group:
    """Points of a case that differ in their variant only."""

    case: Case
    variants: Sequence[Params]

    @property
    def label(self) -> str:
        """One line for what the variants have in common; m, n and k are left out if there is a ``shape``."""
        first = self.variants[0]
        told = {name: first[name] for name in without_sizes(first)}
        return label(self.case, told, self.case.variant_names)

    @property
    def names(self) -> list[str]:
        """A name for each variant: its values that differ between variants."""
        told = [[str(one[name]) for name in one if name in self.case.variant_names] for one in self.variants]
        return [" ".join(values) for values in told]

    def keys(self, num_ranks: int) -> list[str]:
        """The keys of the variants' records."""
        return [records.key(self.case.name, params, num_ranks) for params in self.variants]


def label(case: Case, params: Params, without: frozenset[str] | set[str] = frozenset()) -> str:
    """One line for a point; the filter is matched with it."""
    parts = [f"{name}={value}" for name, value in params.items() if name not in without]
    return " ".join([case.name, *parts])


def grouped(case: Case, points: Sequence[Params]) -> list[Group]:
    """``points`` in groups that differ in their variant only, in the order in which the groups first appear."""
    groups: dict[tuple[Any, ...], list[Params]] = {}
    for params in points:
        common = tuple((name, value) for name, value in params.items() if name not in case.variant_names)
        groups.setdefault(common, []).append(params)
    return [Group(case, variants) for variants in groups.values()]


def sheltered(num_ranks: int) -> RankPool:
    """Ranks that block Ctrl-C, which a terminal sends to all processes, until they set a handler or unblock it.

    Ranks inherit the blocking from the server that they are forked from, so only the first start of ranks by this
    process decides it.
    """
    resource_tracker.ensure_running()  # starting it later would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        start_server()  # ranks are forked from it, and inherit what it blocks
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return RankPool(num_ranks)


def refuse_launcher(program: str) -> None:
    """Refuse to start ranks if a launcher has started some: each of its processes would start as many again.

    Raises:
        LaunchError: this process is one of a launcher's ranks.
    """
    if identity() is not None:
        raise LaunchError(f"{program} starts its own ranks: run it without torchrun, mpirun or srun")


@contextmanager
def as_failure() -> Iterator[None]:
    """Turn an ArgumentError into a failure with exit status 1, as ranks have run already: a file is full, say."""
    try:
        yield
    except ArgumentError as error:
        raise IrisError(str(error)) from error


class Ranks:
    """Live ranks with an open context; all are replaced when one has failed."""

    def __init__(self, num_ranks: int, settings: Settings) -> None:
        self.num_ranks, self.settings = num_ranks, settings
        self.environment: dict[str, str | int | None] = {}
        self._pool: RankPool | None = None

    def start(self) -> None:
        """Start the ranks, if they are not running.

        Raises:
            LaunchError: they cannot be started.
        """
        if self._pool is not None and not self._pool.alive:
            self.kill()
        if self._pool is None:
            self._pool = sheltered(self.num_ranks)
            self.environment = self._run(session.open_rank, (self.settings,), START_S)[0]

    def measure(self, group: Group) -> list[list[Outcome]]:
        """Every rank's outcomes of the variants of ``group``.

        Raises:
            LaunchError: a rank failed; the ranks are gone.
        """
        self.start()
        timeout_s = self.settings.timeout_s * len(group.variants)
        outcomes: list[list[Outcome] | None] = self._run(
            session.measure, (group.case.fn, group.variants, self.settings, group.names), timeout_s
        )
        if left := [rank for rank, outcome in enumerate(outcomes) if outcome is None]:
            self.kill()
            raise LaunchError(f"{ranks_text(left)}: the case has called sys.exit()")
        return [outcome for outcome in outcomes if outcome is not None]

    def _run(self, fn: Callable[..., Any], args: Sequence[Any], timeout_s: float) -> list[Any]:
        assert self._pool is not None
        try:
            outcomes = self._pool.outcomes(fn, args, timeout_s=timeout_s)
        except LaunchError:
            self.kill()
            raise
        failures = [one for one in outcomes if one.error is not None]
        if not failures:
            return [one.value for one in outcomes]
        self.kill()
        first = min(failures, key=lambda one: (isinstance(one.error, _CONSEQUENCES), one.at))
        assert first.error is not None
        said = one_line(first.error)
        raise LaunchError(said if said.startswith("rank") else f"rank {first.rank}: {said}") from first.error

    def kill(self) -> None:
        if self._pool is not None:
            self._pool.kill()
        self._pool = None

    def close(self) -> None:
        if self._pool is not None and self._pool.alive:
            self._run(session.close_rank, (), START_S)
        if self._pool is not None:
            self._pool.close()
        self._pool = None


@contextmanager
def live(num_ranks: int, settings: Settings) -> Iterator[Ranks]:
    """Ranks for a run: closed at its end, killed if it ends by an exception (Ctrl-C included)."""
    ranks = Ranks(num_ranks, settings)
    try:
        yield ranks
    except BaseException:
        ranks.kill()
        raise
    ranks.close()


def measured(ranks: Ranks, group: Group) -> Iterator[list[Record]]:
    """Measure ``group`` and yield its records: all at once, or if a rank failed, those of variants at fault first."""
    ranks.start()
    name, world = group.case.name, ranks.num_ranks
    try:
        by_rank = ranks.measure(group)
    except LaunchError as error:
        if len(group.variants) > 1:
            yield from _measured_apart(ranks, group)
            return
        text = " ".join(str(error).split())
        yield [records.record(name, group.variants[0], [Outcome(error=text)], dated(ranks.environment), world)]
        return
    environment: Mapping[str, str | int | None] = dated(ranks.environment)
    by_variant = zip(group.variants, zip(*by_rank, strict=True), strict=True)
    batch = records.new_batch()
    yield [records.record(name, params, outcomes, environment, world, batch) for params, outcomes in by_variant]


def _measured_apart(ranks: Ranks, group: Group) -> Iterator[list[Record]]:
    """The records of a group that failed as a whole. Each variant is measured alone, then those that did not fail
    together. If none failed alone, or fewer than two are left, the records are those of each alone."""
    apart = [Group(group.case, [params]) for params in group.variants]
    alone = [one for single in apart for found in measured(ranks, single) for one in found]
    lost = [one for one in alone if not records.succeeded(one)]
    left = [one["params"] for one in alone if records.succeeded(one)]
    if not lost or len(left) < 2:
        yield alone
        return
    yield lost
    yield from measured(ranks, Group(group.case, left))
