"""How long waits for peers may take: as the program says, else as the environment says, else a default."""

from __future__ import annotations

import numbers
import os
from typing import Any, NamedTuple

from iris.errors import ArgumentError

Limits = tuple[str, str]
"""The names of the arguments or variables that set the limits: of first waits, and of other waits."""
GIVEN: Limits = ("first_timeout_s", "timeout_s")
STEADY_S = 60.0
FIRST_S = 300.0
MAX_WAIT_S = 3600.0
"""The most that the operating system is asked to wait at once: it cannot wait for more than 24 days."""
VARIABLE = "IRIS_TIMEOUT_S"
_MAX_S = 365 * 24 * 3600


class Timeouts(NamedTuple):
    """Seconds after which a wait gives up: ``first_s`` for first waits, when peers may still be compiling, and
    ``steady_s`` for others; and what has set the limits."""

    steady_s: float
    first_s: float
    set_by: Limits


def timeouts(timeout_s: float | None, first_timeout_s: float | None) -> Timeouts:
    """The limits that the arguments of :func:`iris.iris`, and the environment, result in.

    Raises:
        ArgumentError: an argument, or the variable, is no valid time.
    """
    told = timeout_set() if timeout_s is None else None
    given = timeout_s if told is None else told
    steady = STEADY_S if given is None else given
    first = first_timeout_s if first_timeout_s is not None else (FIRST_S if given is None else given)
    for name, seconds in (("timeout_s", steady), ("first_timeout_s", first)):
        _check(name, seconds)
    if told is None:
        return Timeouts(steady, first, GIVEN)
    return Timeouts(steady, first, (VARIABLE if first_timeout_s is None else GIVEN[0], VARIABLE))


def timeout_set() -> float | None:
    """The seconds in IRIS_TIMEOUT_S; None if it is not set."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError as error:
        raise ArgumentError("iris", VARIABLE, "a number of seconds", repr(text)) from error
    _check(VARIABLE, seconds)
    return seconds


def _check(name: str, seconds: Any) -> None:
    number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if not (number and 0 < seconds <= _MAX_S):
        raise ArgumentError("iris", name, f"a number of seconds, more than 0 and at most {_MAX_S}", repr(seconds))
