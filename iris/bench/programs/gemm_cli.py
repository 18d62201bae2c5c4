"""The program of ``examples/gemm/benchmark.py`` and ``examples/stream-k/benchmark.py``: check and time a fused op.

Three times are measured with all ranks at work; each is the slowest rank's median:

    total          the op
    matmul         ``iris.ops.matmul`` on this rank's operands: the same kernel and schedule, without communication
    communication  the op with K cut to one block: the same bytes along the same way, with next to no arithmetic

TFLOP/s count the op's 2·M·N·K / ranks operations on each rank. Those operations over the time of communication alone
are a rate that the op cannot exceed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from iris import files, ops
from iris.bench.accuracy import Accuracy, worst
from iris.bench.cases.operands import Operands
from iris.bench.environment import environment
from iris.bench.options import by_option, no_picture, ranks_to_start, world_size_of
from iris.bench.programs.gemm_options import (
    OPS,
    Arguments,
    Device,
    config_of,
    fit,
    ignored,
    parse,
    shared_extent,
)
from iris.bench.timing import median_seconds, of_all, slowest
from iris.console import STOPPED, counted, error_line, tell
from iris.context import Iris, iris
from iris.device.matmul import matmul_kernel
from iris.errors import ArgumentError, IrisError
from iris.identity import Identity, identity
from iris.launch import in_full, launch
from iris.ops.config import FusedConfig
from iris.trace import Trace, draw

PROBE_BYTES = 1 << 20
VALIDATED_CALLS = 3
WORST_SHOWN = 5
NOT_OVER = "the run has not come to its end"
ROUNDINGS = {"atomic": 1, "one_shot": 2, "split": 1, "push": 1}
"""How often a sum is rounded to C's dtype: at the end, and also before if ranks' parts are sent in that dtype."""


class Work(Operands):
    """This rank's operands, and the op's config by the fitted arguments."""

    def __init__(self, ctx: Iris, arguments: Arguments, config: FusedConfig) -> None:
        sizes = {name: getattr(arguments, name) for name in ("m", "n", "k")}
        sizes[shared_extent(arguments)] //= ctx.world_size
        shape = (sizes["m"], sizes["n"], sizes["k"])
        super().__init__(ctx, OPS[arguments.algorithm], shape, arguments.dtype, gather_dim=0, exact=torch.float64)
        self.arguments, self.config = arguments, config

    def communicate(self) -> None:
        """The op on the first block of this rank's K."""
        depth = self.arguments.BLK_K
        getattr(ops, self.op)(self.ctx, self.output, self.a[:, :depth], self.b[:depth], config=self.config)


@dataclass(frozen=True)
class Rate:
    """How long something takes on the slowest rank, and the op's operations over that time, on each GPU."""

    ms: float
    tflops_per_gpu: float
    gbytes_per_s: float | None = None


def timed(work: Work) -> dict[str, Rate]:
    """Time the op and its two parts: see the module. Collective."""
    local = replace(
        work.config, algorithm="auto", comm_sms=None, num_sms=min(work.arguments.gemm_sms, work.ctx.num_sms)
    )
    calls: dict[str, Callable[[], object]] = {
        "total": partial(work.call, work.config),
        "matmul": partial(ops.matmul, work.ctx, work.local_output, work.a, work.b, config=local),
        "communication": work.communicate,
    }
    rates = {}
    for name, call in calls.items():
        say(work.ctx, f"timing: {name} …")
        seconds = slowest(work.ctx, median_seconds(work.ctx, call, together=True))
        moved = None if name == "matmul" else work.problem.received_bytes / seconds / 1e9
        rates[name] = Rate(seconds * 1e3, work.problem.flops / seconds / 1e12, moved)
    return rates


def checked(work: Work) -> Accuracy:
    """The worst accuracy of all ranks, and of all calls on fresh inputs. Collective."""
    found, roundings = [], ROUNDINGS[work.config.algorithm]
    for _ in range(VALIDATED_CALLS if work.arguments.validate else 1):
        work.redraw()
        work.spoil()
        work.call(work.config)
        work.ctx.barrier()
        found.append(work.accuracy_of(work.output, roundings))
        if work.arguments.debug:
            show_worst(work)
    own: list[Any] = [*worst(found)]
    return worst(Accuracy(*each) for each in of_all(work.ctx, own))


def registers_of(kernel: Any, device: torch.device) -> tuple[int | None, int | None]:
    """The registers per thread, and those spilled to memory, of ``kernel`` as it was last compiled; None if it is
    interpreted, or has not run."""
    compiled = list(kernel.device_caches[device.index][0].values()) if hasattr(kernel, "device_caches") else []
    return (compiled[-1].n_regs, compiled[-1].n_spills) if compiled else (None, None)


def device_of(ctx: Iris) -> Device:
    """The weakest device of the job. Collective."""
    if ctx.backend_name == "sim":
        shared, free = 0, free_memory_bytes() // ctx.world_size
    else:
        properties = triton.runtime.driver.active.utils.get_device_properties(ctx.device.index)
        shared, free = int(properties["max_shared_mem"]), torch.cuda.mem_get_info(ctx.device)[0]
    own = [ctx.num_sms, shared, free]
    return Device(ctx.backend_name, ctx.world_size, *map(min, zip(*of_all(ctx, own), strict=True)))


def free_memory_bytes() -> int:
    """Bytes of main memory that are free, by the kernel, and if the container has a limit, within that."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) << 10
    limit, taken = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    text = limit.read_text().strip() if limit.exists() else "max"
    return free if text == "max" else min(free, max(0, int(text) - int(taken.read_text())))


def say(ctx: Iris, text: str) -> None:
    """Print on rank 0."""
    if ctx.rank == 0:
        tell(text)


def show_worst(work: Work) -> None:
    """Print the elements of this rank's output that are furthest off."""
    reference, lines = work.reference(), []
    difference = (work.output.double() - reference).abs().nan_to_num(math.inf).flatten()
    for index in difference.topk(min(WORST_SHOWN, difference.numel())).indices.tolist():
        row, col = divmod(index, work.arguments.n)
        got, expected = work.output[row, col].item(), reference[row, col].item()
        lines.append(f"debug: rank {work.ctx.rank}: C[{row}, {col}] is {got:.9g}, float64 {expected:.9g}\n")
    tell("".join(lines), end="")


def show_details(work: Work) -> None:
    """Print on rank 0 the config, shapes and bytes of the run."""
    tiles = work.config.tiles(work.arguments.m, work.n)
    nbytes = work.problem.received_bytes
    for line in (
        str(work.config),
        f"on each rank: A {tuple(work.a.shape)} @ B {tuple(work.b.shape)}, {tiles} tiles",
        f"output {tuple(work.output.shape)} {work.output.dtype}, at least {nbytes} bytes from peers",
        f"heap {work.ctx.heap_size} bytes, {work.ctx.heap_free_bytes} free",
    ):
        say(work.ctx, f"debug: {line}")


def show_rates(ctx: Iris, rates: dict[str, Rate]) -> None:
    """Print on rank 0 one line for each time taken."""
    say(ctx, f"{'':13}  {'ms':>9}  {'TFLOP/s per GPU':>15}  {'GB/s received':>13}")
    for name, rate in rates.items():
        moved = "" if rate.gbytes_per_s is None else f"{rate.gbytes_per_s:.4g}"
        say(ctx, f"{name:13}  {rate.ms:9.4g}  {rate.tflops_per_gpu:15.4g}  {moved:>13}".rstrip())


def write_result(file: str, record: dict[str, Any]) -> None:
    """Write the result of a run into its output file, in place of what :func:`write_failure` wrote.

    Raises:
        ArgumentError: the file cannot be written.
    """
    _write(file, record)
    tell(f"written: {file}")


def write_failure(file: str, why: str) -> None:
    """Write a failure into an output file, so that no earlier run's success stays there.

    Raises:
        ArgumentError: the file cannot be written, or holds something else.
    """
    files.require_own("benchmark", "--output_file", Path(file), lambda found: "success" in found)
    _write(file, {"success": False, "failure": why})


def _write(file: str, record: dict[str, Any]) -> None:
    files.write("benchmark", "--output_file", Path(file), json.dumps(record, indent=1) + "\n")


def draw_trace(work: Work, path: str) -> None:
    """Draw one call of the op on all ranks into ``path``; print why if that cannot be written. Collective."""
    trace = Trace()
    work.call(work.config, trace=trace)
    events = trace.gather(work.ctx)
    if work.ctx.rank == 0:
        title = f"{work.op}, {counted(work.ctx.world_size, 'rank')}, {work.ctx.backend_name}"
        try:
            tell(f"trace: {draw(events, path, title)}")
        except OSError as error:
            tell(no_picture(path, error))


def run(asked: Arguments, given: frozenset[str], stream_k: bool) -> int:
    """The program of each rank; returns the exit status, the same on all ranks."""
    with iris(PROBE_BYTES) as probe:
        device = device_of(probe)
    fitted, fits = fit(asked, given, device)
    unused = ignored(fitted, given, device, stream_k)
    with iris(fitted.heap_size) as ctx:
        for line in (*fits, *unused):
            say(ctx, line)
        work = Work(ctx, fitted, config_of(fitted, stream_k))
        where = environment(ctx, None)
        schedule = "Stream-K" if stream_k else "data-parallel"
        ranks = counted(ctx.world_size, "rank")
        say(ctx, f"{work.op} ({work.config.algorithm}, {schedule}), {ranks}, {where['hardware']}: "
            f"M={fitted.m} N={fitted.n} K={fitted.k} {fitted.datatype}")  # fmt: skip
        if fitted.debug:
            show_details(work)
        say(ctx, "checking …")
        found = checked(work)
        success = found.right
        say(ctx, f"validation {'passed' if success else 'FAILED'}: {found}")
        registers, spills = registers_of(matmul_kernel, ctx.device)
        if fitted.trace is not None:
            draw_trace(work, fitted.trace)
        rates = timed(work) if fitted.benchmark and success else {}
        if rates:
            show_rates(ctx, rates)
        if ctx.rank == 0:
            record = {
                "op": work.op,
                "stream_k": stream_k,
                "world_size": ctx.world_size,
                "environment": where,
                "asked": asdict(asked),
                "fitted": asdict(fitted),
                "fits": fits,
                "ignored": unused,
                "config": asdict(work.config),
                "registers": registers,
                "spills": spills,
                **{name: asdict(rates[name]) if rates else None for name in ("matmul", "communication", "total")},
                **found.record(),
            }
            write_result(fitted.output_file, record)
    return 0 if success else 1


def main(doc: str | None, stream_k: bool, argv: Sequence[str] | None = None) -> int:
    """The whole program; returns its exit status: 1 if the result is wrong or there is nothing to do."""
    asked, given = parse(doc, argv)
    if not (asked.validate or asked.benchmark or asked.debug):
        print("nothing to do: say --validate to check, --benchmark to time, --debug for details", file=sys.stderr)
        return 1

    def launched(_: Identity | None) -> int:
        num_ranks = ranks_to_start(asked.num_ranks)
        name, world = shared_extent(asked), world_size_of(num_ranks)
        if name in given and getattr(asked, name) % world:
            raise ArgumentError("benchmark", f"-{name}", f"a multiple of the {world} ranks", getattr(asked, name))
        return int(max(launch(run, num_ranks, (asked, given, stream_k))))

    return recorded_status("benchmark", asked.output_file, launched)


def recorded_status(program: str, output_file: str, launched: Callable[[Identity | None], int]) -> int:
    """Call ``launched`` with this process's identity, and return what it returns; 1 if it raises an Iris error, and
    ``STOPPED`` after Ctrl-C, both without a traceback. Until the result is written, ``output_file`` says that the run
    has not come to its end, or why it failed."""
    who = None
    try:
        who = identity()
        if who is None or who.rank == 0:
            write_failure(output_file, NOT_OVER)
        return launched(who)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return STOPPED
    except IrisError as error:
        why = in_full(error)
        if who is None or who.rank == 0:
            with suppress(ArgumentError):  # said below
                write_failure(output_file, by_option(f"{type(why).__name__}: {why}"))
        print(by_option(error_line(f"{program}{f', rank {who.rank}' if who else ''}", why)), file=sys.stderr)
        return 1
