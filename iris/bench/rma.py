"""Bulk put and get, all ranks at once in a ring, beside the copy engine in the same run.

Every rank moves a buffer to (put) or from (get) the next rank, so every link direction is busy. The device-side
rates are those of ``iris.peer.put`` and ``iris.peer.get`` in a persistent kernel. Rates are of payload, 10⁹ bytes
per second and direction, of the slowest rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
import triton
import triton.language as tl

from iris import backends, files
from iris.bench.driver import as_failure, refuse_launcher, sheltered
from iris.bench.matrix import random_bits, require, same_bits
from iris.bench.options import add_num_ranks, output_file, positive, ranks_to_start
from iris.bench.timing import median_seconds, slowest
from iris.console import Parser, counted
from iris.context import Iris, iris
from iris.device import peer as peers

CASE = "rma"
"""What records of this program say that they are of."""

BLOCK = 16384
"""4-byte elements that a program moves per step: 64 KiB. Rates are flat from 16 to 64 KiB (H200, 2026-11-21)."""
PROGRAMS_PER_SM = 2
COPIES = 4
"""Copies between two time stamps, so that the launch (about 10 µs) does not count."""


@triton.jit
def put_kernel(source_ptr, target_ptr, count, peer, handle, BLOCK: tl.constexpr):
    """This rank's ``count`` elements at ``source_ptr`` → ``peer``'s ``target_ptr``."""
    offsets = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + offsets
        peers.put(handle, source_ptr + at, target_ptr + at, peer, mask=at < count)


@triton.jit
def get_kernel(source_ptr, target_ptr, count, peer, handle, BLOCK: tl.constexpr):
    """``peer``'s ``count`` elements at ``source_ptr`` → this rank's ``target_ptr``."""
    offsets = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + offsets
        peers.get(handle, source_ptr + at, target_ptr + at, peer, mask=at < count)


@dataclass(frozen=True)
class Row:
    """One measured way of moving the buffer."""

    way: str
    direction: str
    gb_per_s: float
    share_of_copy_engine: float


def measure(nbytes: int) -> list[Row]:
    """All rows, on every rank. Runs in a rank."""
    with iris(2 * nbytes + (1 << 20)) as ctx:
        count = nbytes // 4
        data = [random_bits(ctx, rank, count, torch.int32) for rank in range(ctx.world_size)]
        source, target = ctx.empty(count, dtype=torch.int32), ctx.empty(count, dtype=torch.int32)
        source.copy_(data[ctx.rank])
        following, preceding = (ctx.rank + 1) % ctx.world_size, (ctx.rank - 1) % ctx.world_size
        programs = min(PROGRAMS_PER_SM * ctx.num_sms, -(-count // BLOCK))
        target_there, source_there = ctx.peer_view(target, following), ctx.peer_view(source, following)

        def device(kernel: Callable[..., object]) -> Callable[[], object]:
            run = kernel[(programs,)]  # type: ignore[index]
            return lambda: run(source, target, count, following, ctx.handle, BLOCK=BLOCK, num_warps=16)

        rows: list[Row] = []
        for direction, giver, engine, kernel in (
            ("put", preceding, lambda: target_there.copy_(source), put_kernel),
            ("get", following, lambda: target.copy_(source_there), get_kernel),
        ):
            engine_rate = _rate(ctx, f"copy engine {direction}", engine, nbytes, target, data[giver])
            device_rate = _rate(ctx, f"iris.peer.{direction}", device(kernel), nbytes, target, data[giver])
            rows.append(Row("copy engine", direction, engine_rate, 1.0))
            rows.append(Row(f"iris.peer.{direction}", direction, device_rate, device_rate / engine_rate))
        return rows


def _rate(
    ctx: Iris, what: str, move: Callable[[], object], nbytes: int, target: torch.Tensor, expected: torch.Tensor
) -> float:
    """GB/s of the slowest rank, once the result has been found right."""
    target.fill_(-1)
    ctx.barrier()
    move()
    ctx.barrier()
    require(ctx, same_bits(target, expected), what)

    copies = COPIES if ctx.backend_name != "sim" else 1

    def several() -> None:
        for _ in range(copies):
            move()

    seconds = median_seconds(ctx, several, together=True)
    return copies * nbytes / slowest(ctx, seconds) / 1e9


def main(argv: Sequence[str]) -> int:
    """``iris bench rma``; returns the exit status: 130 after Ctrl-C."""
    parser = Parser(prog="iris bench rma", description=__doc__)
    add_num_ranks(parser)
    parser.add_argument("--buffer_size", type=positive, help="bytes (default: 256 MiB, simulated 256 KiB)")
    parser.add_argument("--output", type=output_file, help="also write the result as JSON to this file")
    options = parser.parse_args(argv)
    num_ranks = ranks_to_start(options.num_ranks)
    simulated = backends.detect().name == "sim"
    nbytes = options.buffer_size or (256 << 10 if simulated else 256 << 20)
    if nbytes % 4:
        parser.error(f"--buffer_size: {nbytes} is no multiple of the 4 bytes of an element")
    refuse_launcher("iris bench")
    if options.output is not None:
        files.require_own("bench rma", "--output", Path(options.output), lambda found: found.get("case") == CASE)
    with sheltered(num_ranks) as pool:
        rows: list[Row] = pool.run(measure, (nbytes,))[0]
    print(f"{counted(num_ranks, 'rank')} in a ring, {nbytes / 2**20:g} MiB each, GB/s per rank and direction")
    for row in rows:
        print(f"{row.way:<16} {row.direction}  {row.gb_per_s:8.4g}  {row.share_of_copy_engine:6.1%} of the copy engine")
    if options.output is not None:
        text = json.dumps(_record(num_ranks, nbytes, rows), indent=1) + "\n"
        with as_failure():
            files.write("bench rma", "--output", Path(options.output), text)
    return 0


def _record(num_ranks: int, nbytes: int, rows: Sequence[Row]) -> dict[str, object]:
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "simulated"
    return {
        "case": CASE,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": f"{num_ranks} × {gpu}",
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__},
        "buffer_bytes": nbytes,
        "rows": [asdict(row) for row in rows],
    }
