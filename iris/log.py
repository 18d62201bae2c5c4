"""Messages that say which rank they come from."""

from __future__ import annotations

import logging

from iris.errors import ArgumentError

_LEVELS = ("debug", "info", "warning", "error", "critical")


class RankLogger:
    """The logging part of the context: a logger of its own, which goes when the context goes."""

    def _start_logging(self, rank: int, level: str | int) -> None:
        self._log = logging.Logger(f"iris.rank{rank}", level=1)  # the handler decides
        self._handler = logging.StreamHandler()
        self._handler.setFormatter(logging.Formatter(f"[iris %(levelname)s rank {rank}] %(message)s"))
        self._log.addHandler(self._handler)
        self._set_level("iris", level)

    def set_log_level(self, level: str | int) -> None:
        """Show messages of ``level`` (``"debug"``, ``"info"``, ``"warning"``, ``"error"``) and above."""
        self._set_level("set_log_level", level)

    def _set_level(self, op: str, level: str | int) -> None:
        if isinstance(level, str) and level.isdecimal():  # the environment has no numbers
            level = int(level)
        number = isinstance(level, int) and not isinstance(level, bool)
        if not number and not (isinstance(level, str) and level.lower() in _LEVELS):
            fix = "It is an argument, or IRIS_LOG_LEVEL in the environment." if op == "iris" else ""
            expected = f"one of {', '.join(_LEVELS)}, or a number"
            raise ArgumentError(op, "log_level", expected, repr(level), fix)
        self._handler.setLevel(level.upper() if isinstance(level, str) else level)

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
