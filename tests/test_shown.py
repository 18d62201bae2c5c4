"""What commands show while they measure, and behind it: no more than there is room for, or than it says anything."""

from __future__ import annotations

import io
import re
import sys

import pytest

from iris.bench.axes import Params
from iris.bench.case import Case
from iris.bench.cases import fused
from iris.bench.driver import Group
from iris.bench.progress import progress


class Terminal(io.StringIO):
    """One that a program writes to."""

    def isatty(self) -> bool:
        return True

    @property
    def drawn(self) -> str:
        """Without the codes that say where and in which colours."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())


@pytest.mark.parametrize("columns", [80, 200])
def test_a_narrow_terminal_shows_how_far_a_run_is(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    words = "all_gather_matmul shape=8192x8192x29568 dtype=bf16 gather_dim=0 b_layout=transposed"
    with progress(12) as advance:
        advance("starting ranks", 3)
        advance(words, 0)
    shown = words if columns == 200 else r"all_gather_matmul shape=8192x8192x29568 \S*…"
    assert re.search(rf"━  3/12 \S+ {shown}", terminal.drawn)


def test_sizes_are_not_told_beside_the_shape_that_says_them() -> None:
    case = Case("matmul_all_reduce", fused.matmul_all_reduce)
    params: Params = {"shape": "64x96x128", "m": 64, "n": 96, "k": 64, "dtype": "bf16", "algorithm": "auto"}
    assert Group(case, [params]).label == "matmul_all_reduce shape=64x96x128 dtype=bf16"
    others = {name: value for name, value in params.items() if name != "shape"}
    assert Group(case, [others]).label == "matmul_all_reduce m=64 n=96 k=64 dtype=bf16"
