"""Results: one JSON object per line and point, appended as each is finished.

A line says what was measured (``case``, ``params``, ``world_size``), whether the result was right (``validated``), why
there is no figure (``skipped``, ``error``), the figures, and the ``environment``. ``time_ms`` is of the slowest rank:
for each call the longest time of any rank, and of those the median, the smallest, and the 10th and 90th percentile;
``rank_skew`` is the slowest rank's median minus the fastest's. ``back_to_back_ms`` is per call of many in a row, host
included; ``host_us`` the host's time for one call. ``flops`` and ``nbytes`` are per rank and call.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from iris.bench.axes import Params
from iris.bench.state import Outcome
from iris.errors import ArgumentError

SCHEMA = 1
Record = dict[str, Any]


def record(
    case: str,
    params: Params,
    outcomes: Sequence[Outcome],
    environment: Mapping[str, str | int | None],
    world_size: int,
) -> Record:
    """The record of one point from what every rank has to say of it, in rank order."""
    first = outcomes[0]
    time_ms = _time_ms([outcome.seconds for outcome in outcomes])
    seconds = time_ms["median"] / 1e3 if time_ms is not None else None
    return {
        "schema": SCHEMA,
        "case": case,
        "params": params,
        "world_size": world_size,
        "validated": first.validated,
        "skipped": first.skipped,
        "error": first.error,
        "time_ms": time_ms,
        "back_to_back_ms": _slowest([one.back_to_back_s for one in outcomes], 1e3),
        "host_us": _slowest([one.host_s for one in outcomes], 1e6),
        "flops": first.flops,
        "nbytes": first.nbytes,
        "floor_ms": first.floor_s * 1e3 if first.floor_s else None,
        "floor_share": first.floor_s / seconds if first.floor_s and seconds else None,
        "tflops_per_gpu": first.flops / seconds / 1e12 if first.flops and seconds else None,
        "gbytes_per_s": first.nbytes / seconds / 1e9 if first.nbytes and seconds else None,
        "predicted_ms": first.predicted_s * 1e3 if first.predicted_s else None,
        "config": first.config,
        "counters": first.counters,
        "environment": dict(environment),
    }


def failed(
    case: str, params: Params, error: str, environment: Mapping[str, str | int | None], world_size: int
) -> Record:
    """The record of a point that ended its ranks."""
    return record(case, params, [Outcome(error=error)], environment, world_size)


def succeeded(one: Record) -> bool:
    """Whether a record speaks of no failure; a skipped point is none."""
    return one["error"] is None and one["validated"] is not False


def key(case: str, params: Mapping[str, Any], world_size: int) -> str:
    """What two records of the same point have in common."""
    return json.dumps([case, dict(params), world_size], sort_keys=True)


def key_of(one: Record) -> str:
    return key(one["case"], one["params"], one["world_size"])


def _time_ms(seconds: Sequence[Sequence[float]]) -> dict[str, float | int] | None:
    """Times of the slowest rank from every rank's times of the same calls."""
    if not all(seconds):
        return None
    slowest = sorted(1e3 * max(call) for call in zip(*seconds, strict=True))
    medians = [1e3 * statistics.median(rank) for rank in seconds]
    tenths = statistics.quantiles(slowest, n=10, method="inclusive") if len(slowest) > 1 else slowest * 9
    return {
        "median": statistics.median(slowest),
        "min": slowest[0],
        "p10": tenths[0],
        "p90": tenths[-1],
        "rank_skew": max(medians) - min(medians),
        "calls": len(slowest),
    }


def _slowest(seconds: Sequence[float | None], scale: float) -> float | None:
    known = [value for value in seconds if value is not None]
    return scale * max(known) if known else None


# -- files --------------------------------------------------------------------------------------------------


def append(path: Path, records: Sequence[Record]) -> None:
    """Add lines to a file, made if it is not there; what a run that was killed left of a line is taken away first.

    Raises:
        ArgumentError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+b")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ArgumentError("bench", "--benchmark_out", "a file that can be written", error) from error
    with file:
        if file.tell() and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(b"".join(json.dumps(one).encode() + b"\n" for one in records))


def load(path: Path) -> dict[str, Record]:
    """The newest record of each point in a file, by :func:`key`. A last line that was not finished does not count.

    Raises:
        ArgumentError: there is no such file, or a line in it is no record of this schema; names the line.
    """
    if not path.is_file():
        raise ArgumentError("bench", "--resume", "a file of results", path, "Start a run with --benchmark_out first.")
    found: dict[str, Record] = {}
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            one = json.loads(line)
            if one["schema"] != SCHEMA:
                raise KeyError("schema")
            found[key_of(one)] = one
        except (ValueError, KeyError, TypeError) as error:
            expected = f"a JSON object with schema {SCHEMA}, case, params and world_size"
            raise ArgumentError("bench", f"{path}:{number}", expected, line[:60].decode(errors="replace")) from error
    return found
