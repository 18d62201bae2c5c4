"""What became of each candidate, written beside the rows as it happens, a JSON line for each event.

A candidate is ``right`` or ``dropped`` when it has been checked, and ``measured`` in the end. It is ``started`` while
it is compiled, checked or timed, and no longer. One that has ended its ranks, by a crash or by never coming back, still
is, and dropped by who started them. Where several were compiled at a time none is dropped: each is compiled alone then.
One that still is when somebody has killed the run, perhaps by no fault of its own, is tried once more. The best of a
search that ended early beside a finished row, which stays, is ``left``: ``--resume`` goes on with that problem, too.

Where an event cannot be written, the search goes on without: what counts are rows.

Events name their run. A run without ``--resume`` forgets a problem's events when it comes to that problem, unless they
are its own, from before a candidate ended its ranks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from iris.bench.records import sole
from iris.errors import ArgumentError
from iris.files import argument_errors
from iris.ops import FusedConfig
from iris.ops.tuned import changed_fields, config_of, is_time

STARTED, RIGHT, DROPPED, MEASURED, LEFT = "started", "right", "dropped", "measured", "left"
ENDED = "it ended its ranks"
_BEGIN = b'{"key": '
"""How a line of :meth:`Trials.add` begins."""
MAX_STARTS = 2
"""How often a candidate may be started without an answer."""

Place = tuple[str, FusedConfig]
"""A problem, by :func:`problem_name`, and a candidate."""


@dataclass
class History:
    """What is known of a candidate: how often it was started without an answer, why it was dropped, its time; the last
    run that tried it; whether that left it as the best of a search which ended early beside a finished row."""

    unanswered: int = 0
    dropped: str | None = None
    measured_ms: float | None = None
    run: str = ""
    left: bool = False

    @property
    def failed(self) -> str | None:
        """Why the candidate is not to be tried again: it was dropped, or did not come back."""
        return ENDED if self.dropped is None and self.unanswered >= MAX_STARTS else self.dropped


class Trials:
    """The trials that belong to a file of rows, for ``run`` to add to. Problems are told apart by the keys of their
    rows."""

    def __init__(self, rows: Path, run: str = "") -> None:
        self.run = run
        self.path = rows.with_name(f"{rows.name}.trials")  # not .jsonl, which a report would take for results
        self._answered = 0

    @contextmanager
    def own(self) -> Iterator[None]:
        """Keep other runs away while the block runs. What a run that was killed left of a line is taken away first.

        Raises:
            ArgumentError: another run tunes into the same file, or it cannot be written.
        """
        with argument_errors("tune", "--out", "a place that can be written", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = open(self.path, "ab")  # noqa: SIM115 (closed below)
        with file:
            if not sole(file.fileno()):
                fix = "Wait for the other run, or give each its own --out."
                raise ArgumentError("tune", "--out", "a file that no other run tunes into", self.path, fix)
            self.histories()  # of a file that is none of trials, nothing is taken away
            content = self.path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if not (content[whole:].startswith(_BEGIN) or _BEGIN.startswith(content[whole:])):
                raise _no_trial(f"{self.path}: its last line", content[whole:])
            os.truncate(self.path, whole)
            yield

    def forget(self, key: Sequence[Any]) -> None:
        """Forget the candidates of one problem."""
        mine = _BEGIN + f"{problem_name(key)}, ".encode()
        with self._if_possible(), self.path.open("r+b") as file:
            lines = file.readlines()
            file.seek(0)
            file.writelines(line for line in lines if not line.startswith(mine))
            file.truncate()

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
        """Write an event down."""
        event = {
            "key": list(key), "config": changed_fields(config), "state": state, "why": why,
            "measured_ms": measured_ms, "predicted_ms": predicted_ms, "run": self.run,
        }  # fmt: skip
        line = json.dumps(event, allow_nan=False).encode() + b"\n"
        with self._if_possible():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                end = file.tell()
                try:
                    file.write(line[file.write(line) :])  # the rest, if there is one, fails with the reason
                except OSError:
                    file.truncate(end)  # the next line may not stand behind half a one
                    raise

    def start(self, key: Sequence[Any], configs: Iterable[FusedConfig]) -> None:
        """Write down what is run next, until it is :meth:`answered`."""
        self._answered = self.path.stat().st_size if self.path.exists() else 0
        for config in configs:
            self.add(key, config, STARTED)

    def answered(self) -> None:
        """What was started last has come back."""
        with self._if_possible():
            os.truncate(self.path, self._answered)

    @contextmanager
    def _if_possible(self) -> Iterator[None]:
        """Go on if the block cannot write, and say so once."""
        try:
            yield
        except OSError as error:
            _say_once(f"trials are not kept, which --resume goes by: {self.path}: {error.strerror or error}")

    def histories(self) -> dict[Place, History]:
        """What became of every candidate.

        Raises:
            ArgumentError: a line is no event; names it.
        """
        found: dict[Place, History] = {}
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        for number, line in enumerate(lines[:-1], 1):  # the last one is empty, or was not finished
            where = f"{self.path}:{number}"
            try:
                event = json.loads(line)
                key, content, state, why = event["key"], event["config"], event["state"], event["why"]
                place, measured_ms = (problem_name(key), config_of(where, key[2], content)), event["measured_ms"]
                run = event.get("run", "")
                if measured_ms is not None and not is_time(measured_ms):
                    raise ValueError(measured_ms)
            except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
                raise _no_trial(where, line) from error
            before = found.get(place, History())
            if state == STARTED:
                found[place] = replace(before, unanswered=before.unanswered + 1, run=run)
            else:
                found[place] = History(0, why if state == DROPPED else None, measured_ms, run, state == LEFT)
        return found


@cache
def _say_once(words: str) -> None:
    print(words, file=sys.stderr)


def _no_trial(where: str, line: bytes) -> ArgumentError:
    return ArgumentError("tune", where, "a trial", repr(line[:60].decode(errors="replace")), "Delete the file.")


def problem_name(key: Sequence[Any]) -> str:
    """A problem's row key as text."""
    return json.dumps(list(key))
