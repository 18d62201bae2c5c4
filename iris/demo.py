"""``python -m iris demo``: two fused ops on fresh random data, checked, timed, and drawn.

Runs on all GPUs if there are two or more, else on four simulated ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from iris import backends, ops
from iris.context import Iris, iris
from iris.errors import BackendError
from iris.launch import RankPool
from iris.trace import Event, Trace, draw

OPS = ("all_gather_matmul", "matmul_all_scatter")
_CALLS = 5


@dataclass(frozen=True)
class Result:
    """One rank's account of one op."""

    backend: str
    error: float
    time_s: float
    waited_s: float
    events: list[Event]


class _Case:
    """One op's tensors on one rank, and its float64 reference."""

    def __init__(self, ctx: Iris, op: str, shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> None:
        (m, n, k), world = shape, ctx.world_size
        generator = torch.Generator(ctx.device).manual_seed(seed)

        def random(rows: int, cols: int) -> torch.Tensor:
            return torch.randn(rows, cols, generator=generator, device=ctx.device).to(dtype)

        self.ctx, self.op = ctx, op
        a, b = random(m, k), random(k, n)
        columns = b.chunk(world, dim=1)[ctx.rank].contiguous()
        if op == "all_gather_matmul":
            self.a, self.b = ctx.as_symmetric(a.chunk(world)[ctx.rank].contiguous()), columns
            self.output = torch.full((m, n // world), float("nan"), dtype=dtype, device=ctx.device)
            self.reference = a.double() @ columns.double()
        else:
            self.a, self.b = a, columns
            self.output = ctx.full((m, n), float("nan"), dtype=dtype)
            self.reference = a.double() @ b.double()

    def call(self, trace: Trace | bool = False) -> None:
        getattr(ops, self.op)(self.ctx, self.output, self.a, self.b, trace=trace)

    def error(self) -> float:
        """Relative error in the Frobenius norm."""
        return float((self.output.double() - self.reference).norm() / self.reference.norm())


_ctx: Iris | None = None
_case: _Case | None = None


def _start(heap_size: int) -> str:
    global _ctx
    _ctx = iris(heap_size)
    return _ctx.backend_name


def _prepare(op: str, shape: tuple[int, int, int], dtype: str, seed: int) -> None:
    global _case
    assert _ctx is not None
    _case = _Case(_ctx, op, shape, getattr(torch, dtype), seed)
    _ctx.barrier()


def _check() -> float:
    assert _ctx is not None and _case is not None
    _case.call()
    _ctx.synchronize()
    return _case.error()


def _time() -> float:
    assert _ctx is not None and _case is not None
    times = []
    for _ in range(_CALLS):
        _ctx.barrier()
        started = time.perf_counter()
        _case.call()
        _ctx.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _trace() -> tuple[float, list[Event]]:
    assert _ctx is not None and _case is not None
    trace = Trace()
    _case.call(trace)
    _ctx.barrier()
    _case.call(trace)
    return trace.waited_s(_ctx), trace.gather(_ctx)


def _stop() -> None:
    global _case
    _case = None
    if _ctx is not None:
        _ctx.close()


def _bound(dtype: str, k: int) -> float:
    """How far a right result may be off: one rounding of the output, and float32 sums of ``k`` products."""
    return float(torch.finfo(getattr(torch, dtype)).eps + k**0.5 * torch.finfo(torch.float32).eps)


def main(argv: Sequence[str]) -> int:
    """Run the demo; returns the exit status: 0 if every result is right."""
    options = _parser().parse_args(argv)
    choice = backends.detect()
    gpus = torch.cuda.device_count() if choice.name in backends.GPU_BACKENDS else 0
    num_ranks = options.num_ranks or (gpus if gpus > 1 else 4)
    if choice.name != "sim" and num_ranks > gpus:
        os.environ["IRIS_BACKEND"] = "sim"
        os.execv(sys.executable, [sys.executable, "-m", "iris", "demo", *argv])
    shape = tuple(options.shape or ((512, 512, 512) if choice.name == "sim" else (8192, 8192, 8192)))
    if shape[0] % num_ranks or shape[1] % num_ranks:
        raise SystemExit(f"demo: M={shape[0]} and N={shape[1]} must be multiples of the {num_ranks} ranks")
    return _run(num_ranks, shape, options, choice.name)


def _run(num_ranks: int, shape: tuple[int, ...], options: argparse.Namespace, backend: str) -> int:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.table import Table
    except ImportError as error:
        raise BackendError("the demo needs rich: pip install 'iris[cli]'") from error
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 100)
    m, n, k = shape
    table = Table(
        box=None, pad_edge=False, padding=(0, 1, 0, 0), title=f"fresh random {options.dtype}, checked on every rank"
    )
    for heading in ("op", "ranks", "M×N×K", "backend", "error", "time", "waited"):
        table.add_column(heading, justify="left" if heading in ("op", "backend") else "right", no_wrap=True)
    item = getattr(torch, options.dtype).itemsize
    heap_size = (64 << 20) + 2 * item * (m * k + m * n)
    right, pictures = True, []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with RankPool(num_ranks) as pool, Progress(*columns, console=console) as progress:
        task = progress.add_task(f"starting {num_ranks} ranks", total=1 + 4 * len(OPS))

        def step(description: str, fn: Any, *arguments: Any) -> list[Any]:
            progress.update(task, description=description)
            values = pool.run(fn, arguments, timeout_s=options.timeout_s)
            progress.advance(task)
            return values

        step(f"starting {num_ranks} ranks", _start, heap_size)
        for op in OPS:
            step(f"{op}: inputs", _prepare, op, shape, options.dtype, int.from_bytes(os.urandom(4), "little"))
            worst = max(step(f"{op}: check", _check))
            time_s = max(step(f"{op}: time", _time))
            traces = step(f"{op}: trace", _trace)
            ok = worst <= _bound(options.dtype, k)
            right &= ok
            waited = max(waited_s for waited_s, _ in traces)
            verdict = "" if ok else " WRONG"
            row = (f"{worst:.1e}{verdict}", _seconds(time_s), _seconds(waited))
            table.add_row(op, str(num_ranks), f"{m}×{n}×{k}", backend, *row)
            title = f"{op}, {num_ranks} ranks, {backend}, {m}×{n}×{k} {options.dtype}"
            pictures.append(draw(traces[0][1], Path(options.picture_dir) / f"demo-{op}.svg", title))
        pool.run(_stop, timeout_s=options.timeout_s)
    console.print(table)
    console.print("error: relative to a float64 reference, worst rank. time: median call, slowest rank.")
    console.print("waited: for data of other ranks, mean over a rank's programs, slowest rank.")
    for picture in pictures:
        console.print(f"who computed and waited when: {picture}")
    return 0 if right else 1


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="iris demo", description="Run two fused ops on fresh random data: checked, timed and drawn."
    )
    parser.add_argument("--num_ranks", type=int, help="ranks (default: all GPUs if two or more, else 4 simulated)")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("M", "N", "K"), help="sizes of the whole problem")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--picture_dir", default=".", help="where the pictures go (default: here)")
    parser.add_argument("--timeout_s", type=float, default=120.0, help="bound on each step, in seconds")
    return parser
