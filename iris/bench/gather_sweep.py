"""All-gather + matmul by one algorithm, over a list of shapes: check, time, and write one JSON file for each.

A file holds one record on one line, as :mod:`iris.bench.records` describes it, and the config that was run.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace

import torch

from iris import ops
from iris.bench import records, session
from iris.bench.axes import Params
from iris.bench.cases.fused import local_params, obstacle
from iris.bench.cases.operands import Operands
from iris.bench.cases.ways import Way, way
from iris.bench.environment import dated, environment
from iris.bench.gather_options import OP, Options
from iris.bench.options import DTYPES
from iris.bench.records import Record
from iris.bench.session import Settings
from iris.bench.state import Outcome, State
from iris.console import STOPPED
from iris.context import Iris, iris
from iris.launch import launch
from iris.ops import FusedConfig, Problem, pick_config
from iris.ops.hardware import HARDWARE, floor_s, hardware
from iris.ops.model import predict_ms
from iris.ops.pick import expected_ms
from iris.ops.target import target_of

LIMIT_S = 120.0
"""The most that a configuration may take."""
_TALK_BYTES = 1 << 16


def run(options: Options) -> int:
    """The whole program, behind its options; returns its exit status."""
    try:
        return int(max(launch(sweep, options.num_ranks, (options,))))
    except KeyboardInterrupt:
        print(f"\nstopped; files of what was done are in {options.output_dir}", file=sys.stderr)
        return STOPPED


def sweep(options: Options) -> int:
    """Check, and if asked time, every shape; returns 0 if some could run and all that could were right. Runs in a rank.

    Rank 0 prints a line for each, and writes its file.
    """
    with iris(_TALK_BYTES) as ctx:
        known, total, first = environment(ctx, None), len(options.shapes), ctx.rank == 0
        if first:
            print(f"{OP} by {options.algorithm}, {ctx.world_size} ranks, {known['hardware']}, configurations: {total}")
        right = wrong = 0
        for number, shape in enumerate(options.shapes, 1):
            params = local_params({"algorithm": options.algorithm, **shape}, ctx.world_size, op=OP)
            if first:
                title = f"{params['shape']} {params['dtype']} gather_dim {params['gather_dim']}"
                print(f"[{number}/{total}] {title}: ", end="", flush=True)
            record = _record(ctx, params, options, dated(known))
            right += record["validated"] is True
            wrong += not records.succeeded(record)
            if first:
                print(_told(record), flush=True)
                (options.output_dir / _file_name(record)).write_text(json.dumps(record) + "\n")
        session.close_rank()
        if first:
            print(f"{right} right, {wrong} failed, {total - right - wrong} skipped; files in {options.output_dir}")
    return 0 if right and not wrong else 1


def _record(ctx: Iris, params: Params, options: Options, known: Mapping[str, str | int | None]) -> Record:
    """Measure one configuration; the record of what all ranks saw, on every rank. Collective."""
    configs: list[FusedConfig] = []

    def case(state: State, inner: Iris) -> None:
        reason = obstacle(OP, state["shape"], state["gather_dim"], inner.world_size)
        if reason is not None:
            state.skip(reason)
        sizes = (state["m"], state["n"], state["k"])
        operands = Operands(inner, OP, sizes, DTYPES[state["dtype"]], state["gather_dim"])
        state.set_flops(operands.problem.flops)
        state.set_bytes(operands.problem.received_bytes)
        chosen = way(state, operands, options.algorithm)
        if options.algorithm in ops.ALGORITHMS[OP]:
            configs.append(_config(operands, options))
            chosen = _with_config(chosen, operands, configs[0])
        if inner.backend_name != "sim":
            config = configs[0] if configs else None
            _expect(state, operands.problem, config, torch.cuda.get_device_name(inner.device))
        operands.fill(decoy=True)
        chosen.call()
        operands.fill()
        operands.spoil()
        state.exec(chosen.call, validate_fn=lambda: operands.complaint(chosen.result(), chosen.roundings))
        if not options.benchmark:
            state.call = _nothing  # is timed instead

    (mine,) = session.measure(case, [params], Settings(LIMIT_S, options.heap_size))
    if not options.benchmark:
        mine = replace(mine, seconds=[], back_to_back_s=None, host_s=None)
    outcomes = [Outcome(**ctx.broadcast(asdict(mine), rank)) for rank in range(ctx.world_size)]
    config = asdict(configs[0]) if configs else None
    return records.record(OP, params, outcomes, known, ctx.world_size) | {"config": config}


def _nothing() -> None:
    pass


def _expect(state: State, problem: Problem, config: FusedConfig | None, device_name: str) -> None:
    """The least time on the device, and what the model expects of ``config`` there and of a good one on an MI300X."""
    known = hardware(device_name)
    state.set_floor(floor_s(problem, known))
    if config is not None and known is not None:
        state.set_predicted(predict_ms(problem, config, known) / 1e3)
        state.add_counter("mi300x_predicted_ms", expected_ms(problem, HARDWARE["MI300X"]))


def _config(operands: Operands, options: Options) -> FusedConfig:
    """The best that is known of the algorithm, but for the fields that the options name."""
    picked = pick_config(operands.problem, target_of(operands.ctx), options.algorithm)
    return picked.with_fields(options.fields)


def _with_config(chosen: Way, operands: Operands, config: FusedConfig) -> Way:
    def call() -> None:
        operands.ctx.ops.all_gather_matmul(
            operands.output, operands.a, operands.b, gather_dim=operands.gather_dim, config=config
        )

    return replace(chosen, call=call)


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
        told += f", {record['floor_share']:.0%} of the floor's speed"
    return told
