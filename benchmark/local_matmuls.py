"""Measure on one GPU whether Iris's matmul or the library's is faster for the part of a layer that one rank has.

    python benchmark/local_matmuls.py --world_sizes 2 4 8 --rows 16 128 512 --rows_out rows.json > local-matmuls.jsonl

Each problem of a data set is cut as that number of ranks would share it. Its local matmul is computed in turns by
``torch.matmul`` and by Iris's kernel, with every tile that the model does not rule out, with Stream-K and without. It
is timed in two ways: with so many different weights in a row that they do not stay in the L2 cache, as in the layers of
a model (``us``), and as many times on the same weights (``warm_us``). Every result is checked first, and each problem's
times go to stdout as a JSON line. If Iris's kernel is faster by 3 % or more, and no slower on the same weights, a row
goes to ``--rows_out``. ``"auto"`` then uses the row for algorithms that exchange parts before or after a matmul, in any
op and on any number of ranks (iris/ops/tuned.py).

``torch.matmul`` multiplies neither int8 nor fp8, so Iris is compared with ``torch._int_mm`` and ``torch._scaled_mm``
there, if they take the sizes. There are no rows for 8-bit dtypes: whatever is faster, ops leave fp8 to the library if
it takes the operands, and otherwise use Iris's kernel.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

import torch

import iris
from iris import ops
from iris.bench.accuracy import accuracy
from iris.bench.cases.fused import local_params
from iris.bench.cases.operands import B_LAYOUTS, ROUNDINGS_OF_A_MATMUL, ROW_MAJOR, TRANSPOSED, problem_of
from iris.bench.dataset import Dataset
from iris.bench.environment import checked_out_commit
from iris.bench.options import DTYPES, positive
from iris.bench.timing import call_seconds
from iris.console import Parser, exit_status
from iris.ops import FusedConfig, Problem, tuned
from iris.ops.algorithms import LOCAL
from iris.ops.pick import model_pick
from iris.ops.problem import QUANTISED
from iris.ops.target import target_of
from iris.ops.tuned import Row
from iris.progress import progress
from iris.tune.compilation import compile_only
from iris.tune.findings import described_config
from iris.tune.session import measured_row, promising

DATA_SET = Path(__file__).parents[1] / "dataset" / "llm.json"
ROWS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
ENOUGH_NBYTES = 250 << 20
"""Weights of this many bytes in all do not stay in the L2 cache of any GPU."""
MAX_CALLS, MIN_CALLS = 16, 4
_TURNS, _SIMULATED_TURNS = 6, 2
_LEAD_S = 100e-6
_HEAP_NBYTES = 1 << 26


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, default=DATA_SET, help="(default: %(default)s)")
    parser.add_argument("--world_sizes", type=positive, nargs="+", default=(2, 4, 8), help="(default: 2 4 8)")
    parser.add_argument(
        "--rows", type=positive, nargs="+", default=ROWS, help=f"of A (default: {' '.join(map(str, ROWS))})"
    )
    parser.add_argument("--b_layout", choices=B_LAYOUTS, nargs="+", default=B_LAYOUTS, help="of B (default: both)")
    parser.add_argument("--dtype", choices=tuple(tuned.DTYPE_NAMES), default="bf16", help="(default: %(default)s)")
    parser.add_argument("--only", type=positive, nargs=2, metavar=("N", "K"), help="weights of this size, local, only")
    parser.add_argument("--rows_out", type=Path, help="the file of rows to add to (default: none)")
    parser.add_argument("--commit", help="for the rows (default: what git says)")
    parser.add_argument(
        "--compilers", type=positive, default=os.cpu_count() or 1, help="processes (default: all cores)"
    )
    return parser


def problems(given: argparse.Namespace) -> list[Problem]:
    """The local matmuls, as problems of one rank; those with the same weights are adjacent."""
    data, dtype = Dataset.read(given.dataset), DTYPES[given.dtype]
    weights: dict[tuple[int, int], None] = {}
    for op in ops.ALGORITHMS:
        for world_size in given.world_sizes if op != LOCAL else ():
            if not data.has(op, world_size):
                continue
            for point in data.shapes(op, world_size):
                local = local_params({name: point[name] for name in ("M", "N", "K")}, world_size, op=op)
                weights[int(local["n"]), int(local["k"])] = None
    if given.only is not None:
        weights = {(given.only[0], given.only[1]): None}
    return [
        problem_of(LOCAL, (m, n, k), dtype, 1, 0, layout)
        for layout in given.b_layout for n, k in weights for m in given.rows
    ]  # fmt: skip


def configs_of(problem: Problem, target: ops.Target) -> list[FusedConfig]:
    """The configs worth measuring; with Stream-K only those that split one tile per program, as two never won."""
    found = [one for one in promising(problem, target) if not (one.stream_k and one.two_tiles)]
    untuned = model_pick(problem, target)
    return found if untuned in found else [untuned, *found]


def compile_share(given: argparse.Namespace, share: int) -> None:
    """Compile one of ``given.compilers`` shares of the kernels; a kernel is in the same share for all problems."""
    with iris.iris(_HEAP_NBYTES) as ctx:
        target, asked = target_of(ctx), problems(given)
        shares: dict[tuple[FusedConfig, bool], int] = {}
        most = max(sum(_sizes(problem)) for problem in asked)
        memory = torch.empty(most, dtype=DTYPES[given.dtype], device=ctx.device)  # with any content
        for problem in asked:
            a, b, c = _operands(problem, memory)
            for config in configs_of(problem, target):
                kernel = config, problem.transposed_b
                if shares.setdefault(kernel, len(shares)) % given.compilers == share:
                    compile_only(ctx, partial(ops.matmul, output=c, A=a, B=b, config=config), True)


def _sizes(problem: Problem) -> list[int]:
    """The elements of A and of B, and how many such elements the output takes."""
    wider = problem.output_dtype.itemsize // problem.dtype.itemsize
    return [problem.m * problem.k, problem.n * problem.k, problem.m * problem.n * wider]


def _operands(problem: Problem, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, B and the output, in ``memory``."""
    sizes = _sizes(problem)
    a, b, c = memory[: sum(sizes)].split(sizes)
    b, c = b.view(_shape_of_b(problem)), c.view(problem.output_dtype)
    return a.view(problem.m, problem.k), b.t() if problem.transposed_b else b, c.view(problem.m, problem.n)


def _shape_of_b(problem: Problem) -> tuple[int, int]:
    return (problem.n, problem.k) if problem.transposed_b else (problem.k, problem.n)


def weights_of(ctx: iris.Iris, problem: Problem) -> list[torch.Tensor]:
    """Enough matrices B that they do not stay in L2, but no more than MAX_CALLS: the L2 of a B200, or the cache of an
    MI300X, may hold that many small ones."""
    nbytes = problem.n * problem.k * problem.dtype.itemsize
    most = MIN_CALLS if ctx.backend_name == "sim" else MAX_CALLS
    count = max(MIN_CALLS, min(most, -(-ENOUGH_NBYTES // nbytes)))
    made = [_random(ctx, problem, *_shape_of_b(problem)) for _ in range(count)]
    return [one.t() if problem.transposed_b else one for one in made]


def _random(ctx: iris.Iris, problem: Problem, *shape: int) -> torch.Tensor:
    if problem.dtype == torch.int8:
        return torch.randint(-128, 128, shape, dtype=torch.int8, device=ctx.device)
    wide = torch.float32 if problem.dtype in QUANTISED else problem.dtype
    return torch.randn(shape, dtype=wide, device=ctx.device).to(problem.dtype)


class Trial:
    """One way to compute a problem."""

    def __init__(self, ctx: iris.Iris, problem: Problem, a: torch.Tensor, config: FusedConfig | None) -> None:
        self._ctx, self._problem, self._a, self._config = ctx, problem, a, config
        dtype = problem.output_dtype
        nothing = float("nan") if dtype.is_floating_point else -1
        self._c = torch.full((problem.m, problem.n), nothing, dtype=dtype, device=ctx.device)
        self._cold: Callable[[], object]
        self._warm: Callable[[], object]
        self.cold_us: list[float] = []
        self.warm_us: list[float] = []

    def check(self, b: torch.Tensor, right: torch.Tensor) -> None:
        """Raise RuntimeError if the product with ``b`` is off by more than its rounding, or, for int8, at all."""
        self._call(b)
        found = accuracy(self._c, right, self._problem.k, ROUNDINGS_OF_A_MATMUL, self._problem.dtype)
        if not found.right:
            raise RuntimeError(f"{_name(self._config, self._a.dtype)}: {found}")

    def prepare(self, weights: Sequence[torch.Tensor]) -> None:
        self._cold, self._warm = self._graph(weights), self._graph([weights[0]] * len(weights))

    def take_turn(self, calls: int) -> None:
        self.cold_us.append(self._us(self._cold) / calls)
        self.warm_us.append(self._us(self._warm) / calls)

    def _call(self, b: torch.Tensor) -> None:
        if self._config is None:
            library_of(self._a.dtype)(self._a, b, out=self._c)
        else:
            self._ctx.ops.matmul(self._c, self._a, b, config=self._config)

    def _graph(self, weights: Sequence[torch.Tensor]) -> Callable[[], object]:
        def all_calls() -> None:
            for b in weights:
                self._call(b)

        if self._ctx.backend_name == "sim":
            return all_calls
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_calls()
        return graph.replay

    def _us(self, calls: Callable[[], object]) -> float:
        return 1e6 * call_seconds(self._ctx, calls, warmup=0, iterations=1, lead_s=_LEAD_S)[0]


def _scaled_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The library's product of fp8 matrices, with its fastest way to accumulate."""
    one = _one(a.device)
    return torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True, out=out)


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)


def library_of(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    eight_bits: dict[torch.dtype, Callable[..., torch.Tensor]]
    eight_bits = {torch.int8: torch._int_mm, torch.float8_e4m3fn: _scaled_mm}
    return eight_bits.get(dtype, torch.matmul)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """A dtype in which products of ``dtype`` are exact enough as a reference."""
    return torch.float64 if dtype in (torch.int8, torch.float32) else torch.float32


def library_takes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the library multiplies these. It refuses some sizes and layouts of 8-bit matrices, which depend on the
    GPU and the library's version, so it is tried; with any other dtype a refusal is an error."""
    if a.dtype not in QUANTISED:
        return True
    try:
        library_of(a.dtype)(a, b)
    except RuntimeError:
        return False
    return True


def measured(ctx: iris.Iris, problem: Problem, weights: Sequence[torch.Tensor]) -> dict[FusedConfig | None, Trial]:
    """Trials of all ways to compute ``problem``; the key None is the library's, if it takes the problem."""
    a, wide = _random(ctx, problem, problem.m, problem.k), _wide(problem.dtype)
    right = a.to(wide) @ weights[0].to(wide)
    ways: list[FusedConfig | None] = [None] if library_takes(a, weights[0]) else []
    trials = {config: Trial(ctx, problem, a, config) for config in ways + configs_of(problem, target_of(ctx))}
    for trial in trials.values():
        trial.check(weights[0], right)
        trial.prepare(weights)
    for _ in range(_SIMULATED_TURNS if ctx.backend_name == "sim" else _TURNS):
        for trial in trials.values():
            trial.take_turn(len(weights))
    return trials


def row(ctx: iris.Iris, problem: Problem, trials: dict[FusedConfig | None, Trial], commit: str | None) -> Row | None:
    """The row of a problem, if Iris's kernel is the faster one and ops may choose; else None."""
    if problem.dtype in QUANTISED:
        return None
    target = target_of(ctx)
    us = {config: statistics.median(trial.cold_us) for config, trial in trials.items()}
    warm_us = {config: statistics.median(trial.warm_us) for config, trial in trials.items()}
    best = min((config for config in us if config is not None), key=lambda one: us[one])
    if warm_us[best] > warm_us[None]:
        return None
    found = measured_row(
        ctx, problem, target, best, us[best] / 1e3, us[model_pick(problem, target)] / 1e3, us[None] / 1e3, commit=commit
    )
    return found if found.beats_library else None


def line(problem: Problem, trials: dict[FusedConfig | None, Trial]) -> str:
    """The JSON line of a problem: its sizes, and the medians of all trials."""

    def medians(name: str) -> dict[str, float]:
        return {
            _name(config, problem.dtype): round(statistics.median(getattr(one, name)), 2)
            for config, one in trials.items()
        }

    layout = TRANSPOSED if problem.transposed_b else ROW_MAJOR
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k, "b_layout": layout}
    return json.dumps({**sizes, "us": medians("cold_us"), "warm_us": medians("warm_us")})


def _name(config: FusedConfig | None, dtype: torch.dtype) -> str:
    return f"torch.{library_of(dtype).__name__}" if config is None else described_config(config)


def run(given: argparse.Namespace) -> int:
    faster, commit, asked = 0, given.commit or checked_out_commit(), problems(given)
    if given.rows_out is not None:
        tuned.write(given.rows_out, [])  # finds a file that cannot be written before the run, not after
    if given.compilers > 1 and iris.backends.chosen().name != "sim":
        with ProcessPoolExecutor(given.compilers, mp_context=get_context("spawn")) as pool:
            list(pool.map(compile_share, [given] * given.compilers, range(given.compilers)))
    with iris.iris(_HEAP_NBYTES) as ctx, progress(len(asked)) as advance:
        for _, same_weights in groupby(asked, lambda problem: replace(problem, m=0)):
            group = list(same_weights)
            weights, found = weights_of(ctx, group[0]), []
            for problem in group:
                trials = measured(ctx, problem, weights)
                print(line(problem, trials), flush=True)
                if (one := row(ctx, problem, trials, commit)) is not None:
                    found.append(one)
                advance(f"{problem.m}x{problem.n}x{problem.k}", 1)
                del trials
            del weights
            faster += len(found)
            if given.rows_out is not None:
                tuned.write(given.rows_out, found)
    if DTYPES[given.dtype] not in QUANTISED:
        print(f"Iris's matmul is the faster one in {faster} of {len(asked)}", file=sys.stderr)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    given = parser.parse_args(argv)
    if DTYPES[given.dtype] in QUANTISED and given.rows_out is not None:
        parser.error(f"argument --rows_out: no row is of {given.dtype}, of which ops do not ask who is faster")
    return exit_status("local_matmuls", lambda: run(given))


if __name__ == "__main__":
    sys.exit(main())
