"""The table of what searches have found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from iris.console import print_table
from iris.ops import FusedConfig
from iris.ops.config import OF_TILE
from iris.ops.tuned import Row, changed_fields

_HEADINGS = ("problem", "config", "ms", "untuned ms", "predicted ms")
_TIMES = (2, 3, 4)
"""The columns of times, which are aligned to the right."""


@dataclass(frozen=True)
class Finding:
    """A problem's name, and the row that it has now; or ``why`` it has none, and whether that is a failure. If there is
    a row and ``why``, the search ended early or never began, and the row is an earlier one. ``unfinished``: there was
    no time for all of the search. ``unwritten``: the row could not be written to the file."""

    name: str
    row: Row | None = None
    why: str = ""
    failed: bool = False
    unfinished: bool = False
    unwritten: bool = False


def described_config(config: FusedConfig) -> str:
    """A config on one line: algorithm, tile, warps and stages, then other fields that differ from the defaults."""
    rest = [f"{name}={value}" for name, value in changed_fields(config).items() if name not in ("algorithm", *OF_TILE)]
    tile = f"{config.block_size_m}x{config.block_size_n}x{config.block_size_k}"
    return " ".join([config.algorithm, tile, f"w{config.num_warps}", f"s{config.num_stages}", *rest])


def print_findings(findings: Sequence[Finding], title: str = "") -> None:
    """Print a table with a row for each finding."""
    print_table(_HEADINGS, [_line(finding) for finding in findings], title=title, right=_TIMES)


def _line(finding: Finding) -> tuple[str, ...]:
    row = finding.row
    if row is None:
        return finding.name, finding.why, "", "", ""
    times = [f"{time:.4g}" if time is not None else "" for time in (row.measured_ms, row.untuned_ms, row.predicted_ms)]
    name = f"{finding.name}, unfinished" if row.unfinished else finding.name
    return (name, described_config(row.config), *times)
