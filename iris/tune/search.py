"""How rank 0 decides which configs to measure next. Pure: it yields steps and is sent their results.

Candidates are compiled and checked, the most promising of each algorithm first, for at most half of the time. The right
ones are timed in turns, A B C B C A, a few calls each, and the slower half is left out, again and again. The config
that is left is varied field by field, as long as that helps and there is time. At the end the best is checked once
more, as is what only an earlier search has checked. The best configs are then timed in turns with the one that is
picked without rows, and a local matmul with the library's.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from iris.ops import FusedConfig

_ADMITTING = 0.5
"""The share of the time in which candidates are compiled and checked."""
_TURNS = 2
_FAR = 1.3
"""A candidate this much slower than the fastest is left out, even if it is in the faster half."""
_FINAL_TURNS = 5
_GRACE_S = 2.0
_ROUNDS_OF_VARIATIONS = 3


@dataclass(frozen=True)
class Step:
    """Work for all ranks: compile some configs, check one, or time ``calls`` calls of one, or of the library's
    matmul."""

    kind: Literal["compile", "check", "time", "library"]
    configs: tuple[FusedConfig, ...]
    calls: int = 0


@dataclass
class Trial:
    """The results of one config: milliseconds of each call on its slowest rank; or why it was dropped. ``known_ms``:
    the time that an earlier search has found."""

    times_ms: list[float] = field(default_factory=list)
    dropped: str | None = None
    known_ms: float = math.inf

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms) if self.times_ms else math.inf


Steps = Generator[Step, Any, None]


def by_turns(configs: Iterable[FusedConfig]) -> list[FusedConfig]:
    """The first config of each algorithm, then the second of each, and so on: predictions are more reliable within an
    algorithm than between two, and a search that ends early should have tried all algorithms. An algorithm with the
    library's matmul and the same with ``own_matmul`` count as two."""
    seen: Counter[tuple[str, bool]] = Counter()
    turns = []
    for config in configs:
        kind = config.algorithm, config.own_matmul
        turns.append((seen[kind], config))
        seen[kind] += 1
    return [config for _, config in sorted(turns, key=lambda one: one[0])]


class Search:
    """The search for one problem.

    Args:
        candidates: the configs to try, the most promising first.
        untuned: the config that is picked without rows; if it is a candidate, it is also measured at the end.
        variations: returns the configs that differ from a given one in one field.
        left_s: returns the seconds left. 0 or less ends the search, but configs that were checked are first timed once,
            for at most 2 s more; minus infinity ends it at once.
        batch: configs to compile at a time; 0 compiles none ahead.
        calls: timed calls of one config in one turn.
        known: milliseconds of candidates that an earlier search has found right and timed, perhaps with other versions.
            They decide which candidates are timed first, and which not at all.
        beside_library: whether the library's matmul is timed in turns with the best configs.
        suspects: configs that are compiled alone, as they may end the ranks.

    Attributes:
        trials: the results of every config that was tried.
        unfinished: whether there was no time to try all.
    """

    def __init__(
        self,
        candidates: Iterable[FusedConfig],
        untuned: FusedConfig,
        variations: Callable[[FusedConfig], Iterable[FusedConfig]],
        left_s: Callable[[], float],
        batch: int,
        calls: int,
        known: Mapping[FusedConfig, float] | None = None,
        beside_library: bool = False,
        suspects: Collection[FusedConfig] = (),
    ) -> None:
        self.untuned, self.unfinished = untuned, False
        self._library, self._beside_library = Trial(), beside_library
        self.trials = {config: Trial(known_ms=ms) for config, ms in (known or {}).items()}
        self._candidates = [config for config in dict.fromkeys(candidates) if config not in self.trials]
        self._variations, self._left_s, self._batch, self._calls = variations, left_s, batch, calls
        self._suspects, self._order = suspects, random.Random(0)
        self._checked: set[FusedConfig] = set()  # those that are known were checked by an earlier search only
        self._final: dict[FusedConfig, Trial] = {}

    def steps(self) -> Steps:
        """The steps to take. Send in the result of each: for ``compile`` a complaint or None for each config, for
        ``check`` a complaint or None, for ``time`` and ``library`` the milliseconds of each call."""
        yield from self._admit(self._candidates, self._left_s() * (1 - _ADMITTING))
        yield from self._halve(self._near(self._right()))
        for _ in range(_ROUNDS_OF_VARIATIONS):
            best = self.best
            if best is None or self._ends():
                break
            fresh = [config for config in self._variations(best) if config not in self.trials]
            yield from self._admit(fresh, self._left_s() * _ADMITTING)
            yield from self._halve([best, *(config for config in fresh if config in self._right())])
            if self.best == best:
                break
        yield from self._finish()

    @property
    def best(self) -> FusedConfig | None:
        """The fastest so far; None if nothing was timed."""
        timed = {config: trial.median_ms for config, trial in (self._final or self.trials).items() if trial.times_ms}
        return min(timed, key=lambda config: timed[config]) if timed else None

    def measured_ms(self, config: FusedConfig) -> float | None:
        """The median time of ``config``: at the end of the search, if it was measured there, else during it."""
        trial = self._trial(config)
        return trial.median_ms if trial.times_ms else None

    def calls_of(self, config: FusedConfig) -> int:
        """The number of calls whose median is :meth:`measured_ms`."""
        return len(self._trial(config).times_ms)

    def _trial(self, config: FusedConfig) -> Trial:
        return self._final.get(config) or self.trials.get(config) or Trial()

    @property
    def library_ms(self) -> float | None:
        """The median time of the library's matmul, if it was measured."""
        return self._library.median_ms if self._library.times_ms else None

    def _ends(self, grace_s: float = 0.0) -> bool:
        """Whether the time, and ``grace_s`` more, is up."""
        left = self._left_s()
        self.unfinished |= left <= 0
        return left <= -grace_s

    def _near(self, configs: Sequence[FusedConfig]) -> list[FusedConfig]:
        """``configs`` without those known to be far slower than the fastest; but the config that is picked without
        rows stays until it has been timed once."""
        limit = _FAR * min(map(self._expected_ms, configs), default=math.inf)

        def stays(config: FusedConfig) -> bool:
            expected_ms, untimed = self._expected_ms(config), not self.trials[config].times_ms
            return expected_ms <= limit or (untimed and (config == self.untuned or expected_ms == math.inf))

        return [config for config in configs if stays(config)]

    def _expected_ms(self, config: FusedConfig) -> float:
        trial = self.trials[config]
        return trial.median_ms if trial.times_ms else trial.known_ms

    def _right(self) -> list[FusedConfig]:
        return [config for config, trial in self.trials.items() if trial.dropped is None]

    def _admit(self, configs: Sequence[FusedConfig], until_s: float) -> Steps:
        """Compile and check ``configs`` until ``until_s`` seconds are left, the first one in any case."""
        for batch in self._batches(configs):
            if self._out_of_time(until_s):
                return
            complaints = (yield Step("compile", batch)) if self._batch else [None] * len(batch)
            for config, complaint in zip(batch, complaints, strict=True):
                if self._out_of_time(until_s):
                    return
                if complaint is None:
                    complaint = yield from self._check(config)
                self.trials[config] = Trial(dropped=complaint)

    def _batches(self, configs: Sequence[FusedConfig]) -> Iterator[tuple[FusedConfig, ...]]:
        """``configs`` in the batches that are compiled together."""
        batch: list[FusedConfig] = []
        for config in configs:
            alone = config in self._suspects
            if batch and (alone or len(batch) >= self._batch):
                yield tuple(batch)
                batch = []
            if alone:
                yield (config,)
            else:
                batch.append(config)
        if batch:
            yield tuple(batch)

    def _out_of_time(self, until_s: float) -> bool:
        left = self._left_s()
        up = left <= 0 or (left <= until_s and bool(self._right()))
        self.unfinished |= up
        return up

    def _halve(self, configs: Sequence[FusedConfig]) -> Steps:
        alive = list(configs)
        while alive:
            for _ in range(_TURNS):
                for config in self._turn(alive):
                    # A checked config is timed once, even if compiling and checking have used up the time.
                    grace_s = 0.0 if self.trials[config].times_ms else _GRACE_S
                    if self.best is not None and self._ends(grace_s):
                        return
                    self.trials[config].times_ms += yield Step("time", (config,), self._calls)
            if len(alive) == 1:
                return
            alive.sort(key=lambda config: self.trials[config].median_ms)
            alive = self._near(alive)[: max(1, len(alive) // 2)]

    def _turn(self, configs: Sequence[FusedConfig]) -> list[FusedConfig]:
        """``configs`` in another order each time, as the call before may make a call faster or slower. Those that were
        never timed come first: of these first the config that is picked without rows, as others are only better if they
        beat that, and then those that an earlier search found to be fast."""

        def place(config: FusedConfig) -> tuple[int, float]:
            if self.trials[config].times_ms:
                return 2, 0.0
            return int(config != self.untuned), self._expected_ms(config)

        return sorted(self._order.sample(configs, len(configs)), key=place)

    def _finish(self) -> Steps:
        while self.best is not None and (complaint := (yield from self._check(self.best))) is not None:
            self.trials[self.best] = Trial(dropped=f"after many calls: {complaint}")
        while unchecked := [config for config in self._last() if config not in self._checked]:
            if self._ends():
                return
            if (complaint := (yield from self._check(unchecked[0]))) is not None:
                self.trials[unchecked[0]] = Trial(dropped=complaint)
        last = self._last()
        final = {config: Trial() for config in last}
        for _ in range(_FINAL_TURNS):
            for config in self._turn(last):
                if self._ends():
                    return
                final[config].times_ms += yield Step("time", (config,), self._calls)
            if self._beside_library:
                self._library.times_ms += yield Step("library", (), self._calls)
            self._final = final

    def _check(self, config: FusedConfig) -> Generator[Step, Any, str | None]:
        self._checked.add(config)
        complaint: str | None = yield Step("check", (config,))
        return complaint

    def _last(self) -> list[FusedConfig]:
        """The configs that are timed at the end: the two fastest, the best first, and the one picked without rows."""
        timed = [config for config in self._right() if self.trials[config].times_ms]
        ranked = sorted(timed, key=lambda one: self.trials[one].median_ms)
        return list(dict.fromkeys([*ranked[:2], *(one for one in ranked if one == self.untuned)]))
