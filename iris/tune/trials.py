"""What became of each candidate: a file next to the rows, with a JSON line for each event as it happens.

A candidate is ``right`` or ``dropped`` after its check, and ``measured`` at the end of the search. While it is
compiled, checked or timed, it is ``started``; that event is removed afterwards. If a candidate ends its ranks, by a
crash or a hang, it stays ``started``, and the process that started the ranks drops it. If several were being compiled,
none is dropped: each is then compiled alone. If the whole run was killed, perhaps by no fault of the candidate, one
that stayed ``started`` is tried once more. If a search ends early and the problem has a finished row, that row stays,
and the best candidate of the search is ``left``: ``--resume`` then goes on with that problem, too.

If an event cannot be written, the search goes on without it: only rows count.

Events name their run. A run without ``--resume`` deletes a problem's events when it comes to that problem, unless they
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
from iris.ops import FusedConfig
from iris.ops.tuned import changed_fields, config_of, is_time, write_errors

STARTED, RIGHT, DROPPED, MEASURED, LEFT = "started", "right", "dropped", "measured", "left"
ENDED = "it ended its ranks"
_BEGIN = b'{"key": '
"""The beginning of every line of :meth:`Trials.add`."""
MAX_STARTS = 2
"""A candidate that was started this often without an answer is not tried again."""

Place = tuple[str, FusedConfig]
"""A problem, by :func:`problem_name`, and a candidate."""


@dataclass
class History:
    """What is known of a candidate: how often it was started without an answer, why it was dropped, its time, the last
    run that tried it, and whether that run ``left`` it (see the module)."""

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
    """The trials that belong to a file of rows; ``run`` adds to them. The key of a row identifies its problem."""

    def __init__(self, rows: Path, run: str = "") -> None:
        self.run = run
        rows = Path(os.path.realpath(rows))  # rows are written to where links lead
        self.path = rows.with_name(f"{rows.name}.trials")  # not .jsonl, which a report would take for results
        self._answered = 0

    @contextmanager
    def own(self) -> Iterator[None]:
        """Keep other runs away while the block runs. A partial last line, of a run that was killed, is removed first.

        Raises:
            ArgumentError: another run tunes into the same file, or it cannot be written.
        """
        with write_errors("tune", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = open(self.path, "ab")  # noqa: SIM115 (closed below)
        with file:
            if not sole(file.fileno()):
                fix = "Wait for the other run, or give each its own --out."
                raise ArgumentError("tune", "--out", "a file that no other run tunes into", self.path, fix)
            self.histories()  # raises if the file holds no trials, before it is cut
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
                    file.write(line[file.write(line) :])  # if a part is left, writing it fails with the reason
                except OSError:
                    file.truncate(end)  # no line may follow half a line
                    raise

    def start(self, key: Sequence[Any], configs: Iterable[FusedConfig]) -> None:
        """Write down which candidates run next; :meth:`answered` removes that."""
        self._answered = self.path.stat().st_size if self.path.exists() else 0
        for config in configs:
            self.add(key, config, STARTED)

    def answered(self) -> None:
        """Note that the candidates started last have come back."""
        with self._if_possible():
            os.truncate(self.path, self._answered)

    @contextmanager
    def _if_possible(self) -> Iterator[None]:
        """Go on if the block cannot write, and print that once."""
        try:
            yield
        except OSError as error:
            _say_once(f"trials are not kept, which --resume goes by: {self.path}: {error.strerror or error}")

    def histories(self) -> dict[Place, History]:
        """What became of every candidate.

        Raises:
            ArgumentError: a line is no event; the text names the line.
        """
        found: dict[Place, History] = {}
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        for number, line in enumerate(lines[:-1], 1):  # the last one is empty or unfinished
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
