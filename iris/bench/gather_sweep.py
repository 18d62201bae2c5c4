"""All-gather + matmul over a list of shapes: check, time, and write down.

A program brings a function ``prepare`` that returns what is called, such as :func:`fused`. What is here makes fresh
random operands, compares with float64, times, and writes one JSON file per configuration.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch

from iris.bench import records, session
from iris.bench.axes import Params
from iris.bench.environment import dated, environment
from iris.bench.gather_options import Options, Shape
from iris.bench.records import Record
from iris.bench.session import Settings
from iris.bench.state import Outcome, State
from iris.context import Iris, iris
from iris.ops import FusedConfig, Problem, pick_config
from iris.ops.hardware import floor_s, hardware
from iris.ops.matmul import target_of
from iris.ops.problem import output_dtype

OP = "all_gather_matmul"
LIMIT_S = 120.0
"""The most that a shape may take."""
_TALK_BYTES = 1 << 16


class Operands:
    """Fresh random A and B on one rank, and where the result goes.

    Attributes:
        A_sharded: this rank's part of A, on the symmetric heap.
        B: [k, n / world_size], this rank's own.
        output: [m, n / world_size].
        problem: what a rank is asked to compute.
    """

    def __init__(self, ctx: Iris, shape: Shape, dtype: torch.dtype, gather_dim: int) -> None:
        self._ctx, self.dtype, self.gather_dim = ctx, dtype, gather_dim
        world = ctx.world_size
        n = shape.n // world
        self._part = (shape.m // world, shape.k) if gather_dim == 0 else (shape.m, shape.k // world)
        self._seed = int(ctx.broadcast(secrets.randbelow(1 << 31), 0))
        received = self._part[0] * self._part[1] * dtype.itemsize * (world - 1)
        self.problem = Problem(OP, shape.m, n, shape.k, dtype, world, received)
        self.A_sharded = ctx.empty(*self._part, dtype=dtype)
        self.A_sharded.copy_(self._random(*self._part, ctx.rank))
        self.B = self._random(shape.k, n, world + ctx.rank)
        self.output = torch.empty(shape.m, n, dtype=output_dtype(dtype), device=ctx.device)

    def _random(self, rows: int, cols: int, stream: int) -> torch.Tensor:
        """The same numbers on every rank that asks for ``stream``."""
        device = self._ctx.device
        generator = torch.Generator(device).manual_seed(self._seed + stream)
        if self.dtype == torch.int8:
            return torch.randint(-128, 128, (rows, cols), dtype=torch.int8, device=device, generator=generator)
        return torch.randn(rows, cols, dtype=self.dtype, device=device, generator=generator)

    def spoil(self) -> None:
        """Fill ``output`` with values that no right result has."""
        self.output.fill_(float("nan") if self.output.is_floating_point() else -(2**31))

    def error(self) -> float:
        """The largest error in ``output``, relative to the largest value, against the unfused op in float64.

        Every rank's part of A is drawn anew for that.
        """
        parts = [self._random(*self._part, rank) for rank in range(self._ctx.world_size)]
        reference = torch.cat(parts, dim=self.gather_dim).double() @ self.B.double()
        return float((self.output.double() - reference).abs().max() / reference.abs().max())

    def complaint(self, roundings: int) -> str:
        """How wrong ``output`` is; empty if it is right.

        A right one is off by half an ulp for each of its ``roundings``, and by float32 sums of k products; int8 is exact.
        """
        allowed = 0.0
        if self.dtype.is_floating_point:
            sums = self.problem.k**0.5 * torch.finfo(torch.float32).eps
            allowed = roundings * torch.finfo(self.dtype).eps / 2 + sums
        error = self.error()
        return "" if error <= allowed else f"relative error {error:.1e}, a right result has {allowed:.1e} at most"


@dataclass(frozen=True)
class Prepared:
    """What is checked and timed: a call on the current stream, and the config it uses, if it has one.

    ``roundings``: how often the call may round a sum to the output's dtype.
    """

    call: Callable[[], object]
    config: FusedConfig | None = None
    roundings: int = 1


Prepare = Callable[[Iris, Operands, Options], Prepared]


def fused(ctx: Iris, operands: Operands, options: Options) -> Prepared:
    """The fused op, by the algorithm that the options name; config fields that they do not give are picked."""
    picked = pick_config(operands.problem, target_of(ctx))
    config = replace(picked, algorithm=options.algorithm, **options.fields)  # type: ignore[arg-type]

    def call() -> None:
        ctx.ops.all_gather_matmul(
            operands.output, operands.A_sharded, operands.B, gather_dim=operands.gather_dim, config=config
        )

    return Prepared(call, config)


# -- one shape after another --------------------------------------------------------------------------------


def sweep(options: Options, prepare: Prepare) -> int:
    """Check, and if asked time, every shape; returns 0 if some could run and all that could were right. Runs in a rank.

    Rank 0 prints a line for each, and writes its file.
    """
    with iris(_TALK_BYTES) as ctx:
        known = environment(ctx, None)
        shapes = [shape.shrunk(ctx.world_size) if options.shrink else shape for shape in options.shapes]
        if ctx.rank == 0:
            options.output_dir.mkdir(parents=True, exist_ok=True)
            print(f"{OP} by {options.algorithm}: {len(shapes)} shapes, {ctx.world_size} ranks, {known['hardware']}")
        right = wrong = 0
        for number, shape in enumerate(shapes, 1):
            if ctx.rank == 0:
                print(
                    f"[{number}/{len(shapes)}] {shape} {options.dtype} gather_dim {options.gather_dim}",
                    end=": ",
                    flush=True,
                )
            record = _record(ctx, shape, options, prepare, dated(known))
            right += record["validated"] is True
            wrong += not records.succeeded(record)
            if ctx.rank == 0:
                print(_told(record), flush=True)
                (options.output_dir / _file_name(record)).write_text(json.dumps(record) + "\n")
        session.close_rank()
        if ctx.rank == 0:
            skipped = len(shapes) - right - wrong
            print(
                f"{right} right, {wrong} wrong or failed, {skipped} skipped; files in {options.output_dir}", flush=True
            )
    return 0 if right and not wrong else 1


def _record(ctx: Iris, shape: Shape, options: Options, prepare: Prepare, known: dict[str, str | int | None]) -> Record:
    """Measure one shape on this rank; what all ranks saw, on every rank. Collective."""
    configs: list[FusedConfig | None] = []

    def case(state: State, inner: Iris) -> None:
        obstacle = shape.obstacle(inner.world_size, options.gather_dim)
        if obstacle is not None:
            state.skip(obstacle)
        operands = Operands(inner, shape, options.element, options.gather_dim)
        state.set_flops(operands.problem.flops)
        state.set_bytes(operands.problem.received_bytes)
        state.set_floor(floor_s(operands.problem, hardware(str(known["hardware"]))))
        prepared = prepare(inner, operands, options)
        configs.append(prepared.config)
        operands.spoil()
        state.exec(prepared.call, validate_fn=lambda: operands.complaint(prepared.roundings))
        state.add_counter("relative_error", operands.error())
        if not options.benchmark:
            state.call = None  # nothing is left to time

    params: Params = {
        "algorithm": options.algorithm,
        "m": shape.m,
        "n": shape.n // ctx.world_size,
        "k": shape.k,
        "dtype": options.dtype,
        "gather_dim": options.gather_dim,
        "shape": str(shape),
    }
    if shape.note:
        params["model"] = shape.note
    (mine,) = session.measure(case, [params], Settings(LIMIT_S, options.heap_size))
    outcomes = [Outcome(**ctx.broadcast(asdict(mine), rank)) for rank in range(ctx.world_size)]
    config = asdict(configs[0]) if configs and configs[0] is not None else None
    return records.record(OP, params, outcomes, known, ctx.world_size) | {"config": config}


def _file_name(record: Record) -> str:
    params = record["params"]
    return f"{params['shape']}_{params['dtype']}_dim{params['gather_dim']}_ranks{record['world_size']}.json"


def _told(record: Record) -> str:
    """A line about a record."""
    if record["skipped"] is not None:
        return f"skipped: {record['skipped']}"
    if record["error"] is not None:
        return f"FAILED: {record['error']}"
    told = f"right, relative error {record['counters']['relative_error']:.1e}"
    if record["time_ms"] is not None:
        told += f", {record['time_ms']['median']:.4g} ms, {record['tflops_per_gpu']:.4g} TFLOP/s per rank"
    if record["floor_share"] is not None:
        told += f", {record['floor_share']:.0%} of the floor"
    return told
