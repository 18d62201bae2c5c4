"""Benchmarks: ``python -m iris bench CASE``, and the means to write more.

A case is a function of a state and a context::

    import torch
    from iris import bench

    @bench.register
    @bench.axis("dtype", ("fp16", "fp32"))
    @bench.pow2("count", 10, 20)
    def barrier_copy(state, ctx):
        \"\"\"A copy into the next rank's memory.\"\"\"
        dtype = bench.DTYPES[state["dtype"]]
        source, target = ctx.randn(state["count"], dtype=dtype), ctx.empty(state["count"], dtype=dtype)
        there = ctx.peer_view(target, (ctx.rank + 1) % ctx.world_size)
        state.set_bytes(source.nbytes)

        def wrong():
            expected = [ctx.broadcast(source, rank) for rank in range(ctx.world_size)][ctx.rank - 1]
            return "" if torch.equal(target, expected) else "not what the rank before has"

        state.exec(lambda: there.copy_(source), validate_fn=wrong, spoil_fn=target.zero_)

    if __name__ == "__main__":
        raise SystemExit(bench.main())

``validate_fn`` says how wrong the result is, in words; the empty string means that it is right. ``spoil_fn`` overwrites
the result before each call that is checked. Run the file with the name of the case, and the options of ``python -m iris
bench``::

    python my_cases.py barrier_copy --num_ranks 2 --axis_count=pow2:10:12 --benchmark_out copies.jsonl

:class:`iris.bench.state.State` has all that a case can tell, :mod:`iris.bench.records` the form of results, and
:mod:`iris.bench.dataset` the form of data sets.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from iris.bench.axes import axis, linear, pow2
from iris.bench.case import register, registered
from iris.bench.options import DTYPES
from iris.bench.state import State
from iris.console import exit_status
from iris.errors import ArgumentError

__all__ = ["DTYPES", "State", "axis", "linear", "main", "pow2", "register"]


def main(argv: Sequence[str] | None = None, program: str | None = None) -> int:
    """``iris bench``: measure the cases that ``argv`` begins with, as the options after them say. Returns the exit
    status. An Iris error is printed without a traceback.

    Args:
        argv: the arguments; None: those of the command line.
        program: the name in usage and errors, for a script that names the cases itself; None: ``iris bench`` and the
            cases.
    """
    return exit_status(program or "iris bench", lambda: _run(list(sys.argv[1:] if argv is None else argv), program))


def _run(given: list[str], program: str | None = None) -> int:
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), given))
    from iris.bench import cases, command

    cases.load()
    known = registered()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ArgumentError("bench", "case", f"one of {', '.join(known)}", unknown[0])
    return command.run([known[name] for name in names], known, given[len(names) :], program)
