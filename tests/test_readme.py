"""Every ``python`` block of the README runs unchanged, on four simulated ranks; its tables agree with the code."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

import pytest
from doc_scripts import run_together

import iris

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RANKS = 4
TIMEOUT_S = 100


def blocks(text: str) -> list[str]:
    """The ``python`` blocks of a Markdown text."""
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def starts_ranks(source: str) -> bool:
    return "launch(" in source


def run(script: Path) -> list[tuple[int, str]]:
    """Run ``script``: once if it starts its own ranks, else once as each of four. Exit codes and output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("IRIS_")}
    env |= {"IRIS_BACKEND": "sim", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    ranks: list[dict[str, str]] = [{}]
    if not starts_ranks(script.read_text()):
        job = secrets.token_hex(8)
        ranks = [{"IRIS_RANK": str(rank), "IRIS_WORLD_SIZE": str(RANKS), "IRIS_JOB": job} for rank in range(RANKS)]
    return run_together(script, [env | rank for rank in ranks], TIMEOUT_S)


BLOCKS = blocks(README.read_text()) if README.exists() else []


def test_readme_has_blocks() -> None:
    assert BLOCKS, f"{README} has no python block"


@pytest.mark.parametrize("source", BLOCKS, ids=[f"block{number}" for number in range(1, len(BLOCKS) + 1)])
def test_block_runs(source: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(source)
    for rank, (code, output) in enumerate(run(script)):
        assert code == 0, f"process {rank} ended with {code}:\n{output}"


def test_a_failing_block_is_seen(tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text("import os\nraise SystemExit(int(os.environ['IRIS_RANK']) + 7)\n")
    assert [code for code, _ in run(script)] == [7, 8, 9, 10]


def test_only_python_blocks_are_taken() -> None:
    text = "```sh\nmake demo\n```\n\n```python\nx = 1\n```\n\n```\nplain\n```\n\n```python\ny = 2\n\nz = 3\n```\n"
    assert blocks(text) == ["x = 1\n", "y = 2\n\nz = 3\n"]


def algorithms_in(text: str) -> dict[str, tuple[str, ...]]:
    """By op, which is the heading of a section in a Markdown text, the algorithms that begin the rows of its table."""
    sections = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    return {
        op.strip("`"): found
        for op, body in zip(sections[1::2], sections[2::2], strict=True)
        if (found := tuple(re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE)))
    }


def test_the_page_of_algorithms_names_every_one() -> None:
    named = algorithms_in((ROOT / "docs" / "algorithms.md").read_text())
    assert {op: sorted(algorithms) for op, algorithms in named.items()} == {
        op: sorted(algorithms) for op, algorithms in iris.ops.ALGORITHMS.items()
    }


def test_the_table_of_ops_names_every_one() -> None:
    (table,) = re.findall(r"^\| Op of `iris.ops` .*?\n\n", README.read_text(), re.DOTALL | re.MULTILINE)
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(iris.ops.ALGORITHMS)


def test_algorithms_are_read_from_tables() -> None:
    text = "# A\n\n## `sum`\n\n| Way |\n|---|\n| `ring` | a |\n| `tree` | b |\n\n## `max`\n\n| `ring` | c |\n\n## End\n"
    assert algorithms_in(text) == {"sum": ("ring", "tree"), "max": ("ring",)}
