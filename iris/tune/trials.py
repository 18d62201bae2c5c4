"""What became of each candidate, written beside the rows as it happens, a JSON line for each event.

A candidate is ``started`` before it is first run, then ``right`` or ``dropped``, and ``measured`` in the end. One that
was started only has ended its ranks, by a crash or by never coming back, and is not tried again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from iris.errors import ArgumentError
from iris.ops import FusedConfig
from iris.ops.tuned import changed_fields, config_of

STARTED, RIGHT, DROPPED, MEASURED = "started", "right", "dropped", "measured"
ENDED = "it ended its ranks"


class Trials:
    """The trials that belong to a file of rows. Problems are told apart by the keys of their rows."""

    def __init__(self, rows: Path) -> None:
        self.path = rows.with_name(f"{rows.stem}.trials.jsonl")

    def clear(self) -> None:
        """Forget all."""
        self.path.unlink(missing_ok=True)

    def add(
        self,
        key: Sequence[Any],
        config: FusedConfig,
        state: str,
        *,
        why: str | None = None,
        measured_ms: float | None = None,
        predicted_ms: float | None = None,
    ) -> None:
        """Write an event down.

        Raises:
            ArgumentError: the file cannot be written.
        """
        line = {
            "key": list(key), "config": changed_fields(config), "state": state, "why": why,
            "measured_ms": measured_ms, "predicted_ms": predicted_ms,
        }  # fmt: skip
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise ArgumentError("tune", "--out", "a place that can be written", error) from error

    def failed(self) -> dict[tuple[str, FusedConfig], str]:
        """Why candidates were dropped, or did not come back, by :func:`problem_name` and config.

        Raises:
            ArgumentError: a line is no event; names it.
        """
        found: dict[tuple[str, FusedConfig], str] = {}
        lines = self.path.read_text().split("\n") if self.path.exists() else []
        for number, line in enumerate(lines[:-1], 1):  # the last one is empty, or was not finished
            where = f"{self.path}:{number}"
            try:
                event = json.loads(line)
                key, content, state, why = event["key"], event["config"], event["state"], event["why"]
                place = problem_name(key), config_of(where, key[2], content)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ArgumentError("tune", where, "a trial", repr(line[:60]), "Delete the file.") from error
            found.pop(place, None)
            if state in (STARTED, DROPPED):
                found[place] = why if state == DROPPED else ENDED
        return found


def problem_name(key: Sequence[Any]) -> str:
    """A problem's row key as text."""
    return json.dumps(list(key))
