"""Messages that say which rank they come from."""

from __future__ import annotations

import logging
import os

from iris.errors import ArgumentError

VARIABLE = "IRIS_LOG_LEVEL"
_LEVELS = ("debug", "info", "warning", "error", "critical")


def level_set() -> str | int:
    """The lowest level of messages to show, from the environment; ``warning`` if that says nothing."""
    return _level_of("iris", os.environ.get(VARIABLE) or "warning")


def _level_of(op: str, level: str | int) -> str | int:
    """``level`` in the form that ``logging`` takes."""
    if isinstance(level, str) and level.isdecimal():  # a number in the environment is text
        level = int(level)
    number = isinstance(level, int) and not isinstance(level, bool)
    if not number and not (isinstance(level, str) and level.lower() in _LEVELS):
        fix = f"It is an argument, or {VARIABLE} in the environment." if op == "iris" else ""
        raise ArgumentError(op, "log_level", f"one of {', '.join(_LEVELS)}, or a number", repr(level), fix)
    return level.upper() if isinstance(level, str) else level


class RankLogger:
    """The logging part of the context: each context has its own logger, which goes with it."""

    def _start_logging(self, rank: int, level: str | int | None) -> None:
        shown = level_set() if level is None else _level_of("iris", level)
        self._log = logging.Logger(f"iris.rank{rank}", level=1)  # the handler decides
        self._handler = logging.StreamHandler()
        self._handler.setFormatter(logging.Formatter(f"[iris %(levelname)s rank {rank}] %(message)s"))
        self._handler.setLevel(shown)
        self._log.addHandler(self._handler)

    def set_log_level(self, level: str | int) -> None:
        """Show messages of ``level`` and above: ``"debug"``, ``"info"``, ``"warning"``, ``"error"``, ``"critical"``, or
        a level's number in Python's ``logging``."""
        self._handler.setLevel(_level_of("set_log_level", level))

    def debug(self, message: str) -> None:
        """Log ``message`` with this rank's number, at level debug."""
        self._log.debug(message)

    def info(self, message: str) -> None:
        """Log ``message`` with this rank's number, at level info."""
        self._log.info(message)

    def warning(self, message: str) -> None:
        """Log ``message`` with this rank's number, at level warning."""
        self._log.warning(message)

    def error(self, message: str) -> None:
        """Log ``message`` with this rank's number, at level error."""
        self._log.error(message)
