"""The state that a case function is given: the parameters of one point, and methods to say what is to be timed."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from triton.errors import TritonError

from iris.bench.axes import Value
from iris.bench.options import by_option
from iris.bench.timing import of_all
from iris.context import Iris
from iris.errors import ArgumentError, IrisError, LaunchError, PeerDied, RankMismatch, WaitTimeout, ranks_text
from iris.results import MAX_NUMBER

T = TypeVar("T")
Call = Callable[[], object]
Check = Callable[[], str]
"""Checks a result: returns empty text if it is right, else how wrong it is."""
MAX_ERROR_LENGTH = 400
FATAL = (WaitTimeout, PeerDied, RankMismatch)
"""Errors after which the ranks cannot go on."""
REPORTED = (
    IrisError, TritonError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, ImportError,
    AssertionError, ArithmeticError,
)  # fmt: skip
"""Errors of a case that become its record's error, if they are not fatal."""


class Skipped(Exception):
    """Raised by :meth:`State.skip`."""


@dataclass
class Outcome:
    """The result of one point on one rank. Times are in seconds."""

    skipped: str | None = None
    error: str | None = None
    validated: bool | None = None
    seconds: list[float] = field(default_factory=list)
    back_to_back_s: float | None = None
    host_s: float | None = None
    flops: int | None = None
    nbytes: int | None = None
    floor_s: float | None = None
    predicted_s: float | None = None
    config: dict[str, Any] | None = None
    deterministic: bool | None = None
    counters: dict[str, float] = field(default_factory=dict)


class State:
    """One point of a case on one rank.

    ``state["M"]`` is the value of a parameter. A case function tells what a call costs, prepares data, and ends with
    :meth:`exec`. It runs on all ranks; records take costs and counters from rank 0.
    """

    def __init__(self, ctx: Iris, params: Mapping[str, Value], shared: dict[Hashable, Any]) -> None:
        self.params = dict(params)
        self.outcome = Outcome()
        self.warmup: int | None = None
        self.repeat: int | None = None
        self.call: Call | None = None
        self.preamble: Call | None = None
        self.check: Check | None = None
        self.spoil: Call | None = None
        self._ctx, self._shared = ctx, shared

    def __getitem__(self, name: str) -> Any:
        if name not in self.params:
            known = f"one of {', '.join(self.params)}" if self.params else "nothing, as the case has no axes"
            raise ArgumentError("state", repr(name), known, "a name that is no axis")
        return self.params[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The value of the axis ``name``; ``default`` if the case has no such axis."""
        return self.params.get(name, default)

    def skip(self, reason: str = "the case says so") -> NoReturn:
        """Leave this point out; its record says why. All ranks must skip it, or none."""
        self.call = self.outcome.validated = None  # a call that exec has got is not timed, either
        raise Skipped(reason)

    def set_flops(self, flops: int) -> None:
        """Floating-point (or integer) operations of one call on one rank."""
        self.outcome.flops = _count("set_flops", flops)

    def set_bytes(self, nbytes: int) -> None:
        """Bytes that one rank must receive over the links in one call."""
        self.outcome.nbytes = _count("set_bytes", nbytes)

    def set_floor(self, seconds: float | None) -> None:
        """The least time that the hardware's sustained rates allow; None if a rate is not known."""
        self.outcome.floor_s = None if seconds is None else _amount("set_floor", seconds)

    def set_predicted(self, seconds: float | None) -> None:
        """The time that a model predicts."""
        self.outcome.predicted_s = None if seconds is None else _amount("set_predicted", seconds)

    def set_config(self, fields: Mapping[str, Any]) -> None:
        """The config that the call runs with; for ``auto``, the one that it has picked. JSON must hold the values."""
        config = dict(fields)
        try:
            json.dumps(config, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ArgumentError("state", "set_config", "values that JSON holds", fields) from error
        self.outcome.config = config

    def add_counter(self, name: str, value: float) -> None:
        """A further figure for the record: a finite number from -1e30 to 1e30."""
        if not isinstance(name, str):
            raise ArgumentError("state", "add_counter", "a name", name)
        self.outcome.counters[name] = _finite(f"add_counter({name!r})", value)

    def set_deterministic(self, same_bits: bool) -> None:
        """Whether two calls on the same data give the same bits."""
        self.outcome.deterministic = bool(same_bits)

    def set_warmup(self, calls: int) -> None:
        """Untimed calls before the timed ones (default 5, simulated 0)."""
        self.warmup = _at_least(0, "set_warmup", calls)

    def set_repeat(self, calls: int) -> None:
        """Timed calls (default 30; for calls of 1 ms or more as many as take 0.6 s, from 10 to 100; simulated 3)."""
        self.repeat = _at_least(1, "set_repeat", calls)

    def share(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make()`` returned for the first variant of this point that asked for ``key``.

        Data that all variants work on is so made once, and takes memory once.
        """
        if key not in self._shared:
            self._shared[key] = make()
        made: T = self._shared[key]
        return made

    def exec(
        self, fn: Call, preamble_fn: Call | None = None, validate_fn: Check | None = None, spoil_fn: Call | None = None
    ) -> None:
        """Call ``fn`` once and check the result; if it is right on all ranks, ``fn`` is timed later, in turns with the
        other variants. What ``fn`` uses must live until then.

        Args:
            fn: launches work on the current stream; in the simulator it does the work. All ranks call it together.
            preamble_fn: runs before every call, untimed. Calls then do not follow each other directly, so that there is
                no back-to-back time.
            validate_fn: says how wrong the result is; empty text if it is right. After all timed calls ``fn`` is called
                and checked once more. Without it a point is timed, but its record says that its result was not checked.
            spoil_fn: overwrites the place of the result before a call that is checked, so that what an earlier call,
                or another variant, has left there does not pass for its result.
        """
        self.call, self.preamble, self.check, self.spoil = fn, preamble_fn, validate_fn, spoil_fn
        self.call_and_check("")

    def call_and_check(self, when: str) -> None:
        """Make one call on a spoiled result, and ask ``validate_fn``; a wrong result on any rank is an error on all,
        and removes the times. Collective."""
        assert self.call is not None
        if self.spoil is not None:
            self.spoil()
        self._ctx.barrier()  # peers may write into what was spoiled
        if self.preamble is not None:
            self.preamble()
        self.call()
        self._ctx.barrier()
        if self.check is None:
            return
        wrong = agreed(self._ctx, _asked(self.check, when))
        self.outcome.validated = wrong is None
        if wrong is not None:
            self.outcome.error = wrong
            self.outcome.seconds, self.outcome.back_to_back_s, self.outcome.host_s = [], None, None


def _asked(check: Check, when: str) -> str:
    """What ``check`` says, or a complaint about what it raised or returned; empty text if the result is right."""
    try:
        said: object = check()
    except FATAL:
        raise
    except REPORTED as error:
        return f"validate_fn{when} raised {one_line(error)}"
    if not isinstance(said, str):
        return f"validate_fn must return a str, empty if the result is right; it returned {said!r}"
    return f"wrong result{when}: {said}" if said else ""


def _finite(what: str, value: float) -> float:
    number = float(value)
    if not abs(number) <= MAX_NUMBER:
        raise ArgumentError("state", what, f"a finite number, at most {MAX_NUMBER:g} either way", value)
    return number


def _amount(what: str, value: float) -> float:
    number = _finite(what, value)
    if number < 0:
        raise ArgumentError("state", what, "0 or more", value)
    return number


def _count(what: str, value: float) -> int:
    """``value``, any kind of number, as the int that a record has."""
    _amount(what, value)
    return int(value)


def _at_least(least: int, what: str, calls: int) -> int:
    if isinstance(calls, bool) or not isinstance(calls, int) or calls < least:
        raise ArgumentError("state", what, f"a whole number of calls, at least {least}", calls)
    return calls


def agreed(ctx: Iris, complaint: str) -> str | None:
    """The complaint of the lowest rank that has one, with all ranks that have one; None if there is none. Collective.

    Raises:
        LaunchError: this rank's complaint, if the others can no longer be asked.
    """
    try:
        complaints = of_all(ctx, complaint)
    except IrisError as lost:
        if complaint:
            raise LaunchError(complaint) from lost
        raise
    complaining = [rank for rank, text in enumerate(complaints) if text]
    if not complaining:
        return None
    return f"{complaints[complaining[0]]} ({ranks_text(complaining)} of {ctx.world_size})"


def one_line(error: BaseException) -> str:
    """An error on one line of bounded length."""
    kind = "" if isinstance(error, LaunchError) else f"{type(error).__name__}: "
    text = by_option(f"{kind}{' '.join(str(error).split())}")
    return text if len(text) <= MAX_ERROR_LENGTH else f"{text[: MAX_ERROR_LENGTH - 1]}…"
