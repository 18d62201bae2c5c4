"""``python -m iris demo``: two fused ops on fresh random data, checked, timed, and drawn.

Runs on all GPUs if there are two or more, else on four simulated ranks.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from iris import backends
from iris.bench.accuracy import Accuracy, worst
from iris.bench.cases.operands import Operands
from iris.bench.driver import as_failure, refuse_launcher, sheltered
from iris.bench.options import (
    DTYPES,
    SIMULATED_RANKS,
    add_num_ranks,
    folder_trouble,
    no_picture,
    positive,
    seconds,
)
from iris.bench.timing import median_seconds
from iris.console import Parser, counted, print_table
from iris.context import Iris, iris
from iris.errors import BackendError, IrisError, LaunchError
from iris.launch import in_full
from iris.ops.algorithms import GATHER, SCATTER
from iris.ops.choice import resolve
from iris.progress import progress
from iris.trace import Event, Trace, draw

OPS = (GATHER, SCATTER)
_DTYPES = ("fp16", "bf16", "fp32")
_GPU_SIZE, _SIM_SIZE = 8192, 512
_HEADINGS = ("op", "algorithm", "ranks", "M×N×K", "backend", "error", "time", "waited")


_ctx: Iris | None = None
_operands: Operands | None = None


def _start(heap_size: int) -> str:
    global _ctx
    # A terminal sends Ctrl-C to all its processes; the one that started the ranks ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _ctx = iris(heap_size)
    return _ctx.backend_name


def _prepare(op: str, shape: tuple[int, int, int], dtype: str) -> None:
    global _operands
    assert _ctx is not None
    m, n, k = shape
    _operands = Operands(_ctx, op, (m, n // _ctx.world_size, k), DTYPES[dtype], gather_dim=0)
    _operands.fill()
    _operands.spoil()


def _check() -> Accuracy:
    assert _ctx is not None and _operands is not None
    _operands.call()
    _ctx.synchronize()
    return _operands.accuracy_of(_operands.output, _operands.roundings)


def _time() -> float:
    assert _ctx is not None and _operands is not None
    return median_seconds(_ctx, _operands.call, together=True)


def _algorithms() -> tuple[str, str]:
    """The algorithms that "auto" takes for the timed calls, and for the traced call: never one with torch's matmul."""
    assert _ctx is not None and _operands is not None
    timed, traced = (resolve(_ctx, _operands.problem, None, None, trace).algorithm for trace in (False, True))
    return timed, traced


def _trace() -> tuple[float, float, list[Event]]:
    """Seconds of waiting in a traced call, seconds of that call, and all events of it."""
    assert _ctx is not None and _operands is not None
    trace = Trace()
    _operands.call(trace=trace)
    _ctx.barrier()
    started = time.perf_counter()
    _operands.call(trace=trace)
    _ctx.synchronize()
    taken_s = time.perf_counter() - started
    return trace.waited_s(_ctx), taken_s, trace.gather(_ctx)


def _stop() -> None:
    global _operands
    _operands = None
    if _ctx is not None:
        _ctx.close()


def main(argv: Sequence[str]) -> int:
    """Run the demo; returns the exit status: 0 if every result is right, 1 if not."""
    parser = _parser()
    options = parser.parse_args(argv)
    refuse_launcher("iris demo")
    choice = backends.detect()
    gpus = torch.cuda.device_count() if choice.name in backends.GPU_BACKENDS else 0
    num_ranks = options.num_ranks or (gpus if gpus > 1 else SIMULATED_RANKS)
    if choice.name != "sim" and num_ranks > gpus and not backends.oversubscribed():
        os.environ["IRIS_BACKEND"] = "sim"  # for the ranks, too
        choice = backends.detect()
    if trouble := folder_trouble(options.picture_dir):
        parser.error(f"--picture_dir {options.picture_dir}: {trouble}")
    usual = -(-(_SIM_SIZE if choice.name == "sim" else _GPU_SIZE) // num_ranks) * num_ranks
    shape = tuple(options.shape or (usual, usual, usual))
    if shape[0] % num_ranks or shape[1] % num_ranks:
        parser.error(f"--shape: M={shape[0]} and N={shape[1]} must be multiples of the {num_ranks} ranks")
    try:
        return _run(num_ranks, shape, options, choice.name)
    except LaunchError as error:
        if isinstance(error.__cause__, IrisError):
            with as_failure():
                raise error.__cause__ from None  # says all, without a rank's traceback
        raise in_full(error) from error.__cause__


def _run(num_ranks: int, shape: tuple[int, ...], options: argparse.Namespace, backend: str) -> int:
    m, n, k = shape
    item = DTYPES[options.dtype].itemsize
    heap_size = (64 << 20) + 2 * item * (m * k + m * n)
    right, notes = True, []
    rows: list[tuple[str, ...]] = []
    with sheltered(num_ranks) as pool, progress(1 + 4 * len(OPS)) as advance:

        def step(description: str, fn: Any, *arguments: Any) -> list[Any]:
            advance(description, 0)
            values = pool.run(fn, arguments, timeout_s=options.timeout_s)
            advance("", 1)
            return values

        step(f"starting {counted(num_ranks, 'rank')}", _start, heap_size)
        for op in OPS:
            step(f"{op}: inputs", _prepare, op, shape, options.dtype)
            found = worst(step(f"{op}: check", _check))
            time_s = max(step(f"{op}: time", _time))
            traces = step(f"{op}: trace", _trace)
            timed, traced = pool.run(_algorithms, timeout_s=options.timeout_s)[0]
            right &= found.right
            waited_s, of_s, _ = max(traces, key=lambda one: one[0])
            waited = f"{_time_text(waited_s)} of {_time_text(of_s)}{'' if traced == timed else f' ({traced})'}"
            error = f"{found.error:.1e}{'' if found.right else ' WRONG'}"
            rows.append((op, timed, str(num_ranks), f"{m}×{n}×{k}", backend, error, _time_text(time_s), waited))
            title = f"{op} by {traced}, {counted(num_ranks, 'rank')}, {backend}, {m}×{n}×{k} {options.dtype}"
            notes.append(_picture(traces[0][2], options.picture_dir / f"demo-{op}.svg", title))
        advance("ending ranks", 0)
        pool.run(_stop, timeout_s=options.timeout_s)
    print(f"fresh random {options.dtype}, checked on every rank")
    print_table(_HEADINGS, rows, whole=True)
    print("error: relative to a float64 reference, worst rank. time: median call, slowest rank.")
    print("waited: how long a program waited for data of other ranks, and how long its call took; the mean over the")
    print("programs of the rank that waited longest. This is of one more call, which is traced and not timed.")
    if any("(" in row[-1] for row in rows):
        print("(algorithm): this call is by another algorithm than the timed ones, as torch's matmul records no trace.")
    for note in notes:
        print(note)
    return 0 if right else 1


def _picture(events: list[Event], path: Path, title: str) -> str:
    """Draw ``events``; returns a line about the picture, or why there is none."""
    try:
        return f"picture of who computed and waited when: {draw(events, path, title)}"
    except BackendError as error:
        return f"no picture: {error}"
    except OSError as error:
        return no_picture(path, error)


def _time_text(time_s: float) -> str:
    return f"{time_s:.2f} s" if time_s >= 1 else f"{time_s * 1e3:.3g} ms"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="iris demo", description="Run two fused ops on fresh random data: checked, timed and drawn.")
    add_num_ranks(parser)
    parser.add_argument(
        "--shape",
        type=positive,
        nargs=3,
        metavar=("M", "N", "K"),
        help=f"sizes of the whole problem (default: {_GPU_SIZE} each, simulated {_SIM_SIZE}, up to a multiple of the "
        "ranks)",
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="fp16",
        help="of A and B (default: %(default)s)",
    )
    parser.add_argument("--picture_dir", type=Path, default=".", help="where the pictures go (default: here)")
    parser.add_argument(
        "--timeout_s", type=seconds, default=120.0, help="most seconds for a step (default: %(default)s)"
    )
    return parser
