"""All-gather + matmul by one algorithm, over a list of shapes: check, time, and write one JSON file for each.

A file holds one record on one line, as :mod:`iris.bench.records` describes it, and the config that was run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict

from iris import files, ops
from iris.bench import records, session
from iris.bench.axes import Params
from iris.bench.cases import fused
from iris.bench.environment import dated, environment
from iris.bench.programs.gather_options import OP, Options
from iris.bench.records import Record, line_of
from iris.bench.session import Settings
from iris.bench.state import Outcome, State
from iris.bench.timing import of_all
from iris.console import STOPPED, counted, error_line, tell
from iris.context import Iris, iris
from iris.errors import IrisError
from iris.launch import in_full, launch
from iris.ops import FusedConfig

LIMIT_S = 120.0
"""Time limit of a configuration: twice as long as it may wait for a rank."""
_TALK_BYTES = 1 << 16


def run(options: Options) -> int:
    """The whole program after its options are read; returns its exit status."""
    try:
        return int(max(launch(sweep, options.num_ranks, (options,))))
    except KeyboardInterrupt:
        print(f"\nstopped; files of what was done are in {options.output_dir}", file=sys.stderr)
        return STOPPED
    except IrisError as error:
        print(f"\n{error_line('benchmark', in_full(error))}", file=sys.stderr)
        return 1


def sweep(options: Options) -> int:
    """Check every shape, and time it if asked to. Returns 0 if some shape was right, and no other failed. Runs in a
    rank.

    Rank 0 prints a line for each shape, and writes its file.
    """
    with iris(_TALK_BYTES) as ctx:
        known, total, first = environment(ctx, None), len(options.shapes), ctx.rank == 0
        if first:
            ranks = counted(ctx.world_size, "rank")
            tell(f"{OP} by {options.algorithm}, {ranks}, {known['hardware']}, configurations: {total}")
        right = wrong = 0
        for number, shape in enumerate(options.shapes, 1):
            params = fused.local_params({"algorithm": options.algorithm, **shape}, ctx.world_size, op=OP)
            if first:
                title = f"{params['shape']} {params['dtype']} gather_dim {params['gather_dim']}"
                tell(f"[{number}/{total}] {title}: ", end="")
            record = _record(ctx, params, options, dated(known))
            right += record["validated"] is True
            wrong += not records.succeeded(record)
            if first:
                files.write("benchmark", "--output_dir", options.output_dir / _file_name(record), line_of(record))
                tell(_told(record))
        session.close_rank()
        if first:
            tell(f"{right} right, {wrong} failed, {total - right - wrong} skipped; files in {options.output_dir}")
    return 0 if right and not wrong else 1


def _record(ctx: Iris, params: Params, options: Options, known: Mapping[str, str | int | None]) -> Record:
    """Measure one configuration; returns the record, made from all ranks' outcomes, on every rank. Collective."""

    def case(state: State, inner: Iris) -> None:
        fused.run(state, inner, OP, state["gather_dim"])

    settings = Settings(LIMIT_S, options.heap_size, timed=options.benchmark)
    (mine,) = session.measure(case, [{**params, "algorithm": _way(options)}], settings)
    outcomes = [Outcome(**each) for each in of_all(ctx, asdict(mine))]
    config = asdict(FusedConfig(**mine.config)) if mine.config is not None else None
    return records.record(OP, params, outcomes, known, ctx.world_size) | {"config": config}


def _way(options: Options) -> str:
    """The algorithm and the fields that the options give; other fields are the best known for it."""
    fields = options.fields if options.algorithm in ops.ALGORITHMS[OP] else {}
    return "+".join([options.algorithm, *(f"{name}={value}" for name, value in fields.items())])


def _file_name(record: Record) -> str:
    params = record["params"]
    sizes = f"{params['shape']}_{params['dtype']}_dim{params['gather_dim']}_ranks{record['world_size']}"
    labels = [re.sub(r"[^\w.-]+", "-", str(params[name])) for name in ("model", "layer") if name in params]
    return "_".join([sizes, *labels]) + ".json"


def _told(record: Record) -> str:
    """A line about a record."""
    if record["skipped"] is not None:
        return f"skipped: {record['skipped']}"
    if record["error"] is not None:
        return f"FAILED: {record['error']}"
    told = "right"
    if record["time_ms"] is not None:
        told += f", {record['time_ms']['median']:.4g} ms, {record['tflops_per_gpu']:.4g} TFLOP/s per rank"
    if record["floor_share"] is not None:
        told += f", {record['floor_share']:.0%} of the floor"
    return told
