"""What the reference programs share: the command line, the process group, fresh data, the check, the clock.

A program brings a :class:`Steps`: torch.matmul and a collective, in their order, on buffers that it has made. Times are
of each step by itself and of both in a row, with all ranks at work, and of each the slowest rank's median.
"""

import argparse
import os
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone

import torch
import torch.distributed as dist

import iris
from iris import backends
from iris.bench.accuracy import Accuracy, accuracy, worst
from iris.bench.options import output_file, positive, rank_parser, ranks_to_start, world_size_of
from iris.bench.programs.gemm_cli import recorded_status, write_result
from iris.bench.programs.gemm_options import DATATYPES
from iris.console import counted
from iris.errors import ArgumentError
from iris.identity import Identity, identity
from iris.mesh import Mesh

Shape = tuple[int, int, int]
VALIDATED_CALLS = 3
WARMUP, ITERATIONS = 3, 11
MEETING_S = 60.0
GPU_SHAPE, CPU_SHAPE = (4864, 4096, 8256), (608, 512, 1032)


@dataclass(frozen=True)
class Job:
    """One rank of the job, and the whole problem: C [m, n] = A [m, k] @ B [k, n]."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    rank: int
    world_size: int
    device: torch.device

    def empty(self, rows: int, cols: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(rows, cols, dtype=dtype or self.dtype, device=self.device)

    def right(self, rows: int, cols: int) -> torch.Tensor:
        """B; of int8 with contiguous columns, as cuBLAS wants it."""
        return self.empty(cols, rows).T if self.dtype == torch.int8 else self.empty(rows, cols)

    def part(self, matrix: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a matrix that is cut along ``dim``."""
        return matrix.chunk(self.world_size, dim)[self.rank]

    @property
    def product_dtype(self) -> torch.dtype:
        return torch.int32 if self.dtype == torch.int8 else self.dtype


@dataclass(frozen=True)
class Steps:
    """A reference op.

    Attributes:
        load: takes all of A and B, and fills this rank's inputs.
        steps: what to time, by name, in the order in which the op does it.
        output: this rank's result.
        expected: takes all of C, and returns what ``output`` should be.
        roundings: how often a sum is rounded to the output's dtype on its way (:func:`iris.bench.accuracy.accuracy`).
    """

    load: Callable[[torch.Tensor, torch.Tensor], None]
    steps: dict[str, Callable[[], object]]
    output: torch.Tensor
    expected: Callable[[torch.Tensor], torch.Tensor]
    roundings: float

    def run(self) -> None:
        for step in self.steps.values():
            step()


def checked(job: Job, op: Steps, calls: int) -> Accuracy:
    """The worst of all ranks over ``calls`` calls on fresh random data. Collective."""
    found = []
    for _ in range(calls):
        seed = [secrets.randbelow(1 << 32)]
        dist.broadcast_object_list(seed, src=0)
        generator = torch.Generator(job.device).manual_seed(seed[0])
        a, b = random(job, job.m, job.k, generator), random(job, job.k, job.n, generator)
        op.load(a, b)
        op.run()
        found.append(accuracy(op.output, op.expected(a.double() @ b.double()), job.k, op.roundings))
    gathered: list[Accuracy] = [worst(found)] * job.world_size
    dist.all_gather_object(gathered, worst(found))
    return worst(gathered)


def random(job: Job, rows: int, cols: int, generator: torch.Generator) -> torch.Tensor:
    if job.dtype == torch.int8:
        return torch.randint(-128, 128, (rows, cols), generator=generator, dtype=job.dtype, device=job.device)
    return torch.randn(rows, cols, generator=generator, device=job.device).to(job.dtype)


def slowest(job: Job, value: float) -> float:
    """The largest of all ranks' values. Collective."""
    held = torch.tensor(value, dtype=torch.float64, device=job.device)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return float(held)


def median_ms(job: Job, call: Callable[[], object]) -> float:
    """The slowest rank's median time of ``call``, before each of which the ranks meet. Collective."""
    for _ in range(WARMUP):
        call()
    meeting = torch.zeros(1, device=job.device)
    if job.device.type == "cpu":
        times = []
        for _ in range(ITERATIONS):
            dist.all_reduce(meeting)
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e3)
        return slowest(job, statistics.median(times))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(ITERATIONS)]
    for begin, end in events:
        dist.all_reduce(meeting)
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(job.device)
    return slowest(job, statistics.median(float(begin.elapsed_time(end)) for begin, end in events))


def report(job: Job, name: str, op: Steps, options: argparse.Namespace) -> bool:
    """Check, time, print and write; whether the result is right. Collective."""
    found = checked(job, op, VALIDATED_CALLS if options.validate else 1)
    success = found.right
    times = {}
    if options.benchmark and success:
        times = {step: median_ms(job, call) for step, call in op.steps.items()}
        times["total"] = median_ms(job, op.run)
    if job.rank != 0:
        return success
    flops = 2 * job.m * job.n * job.k / job.world_size
    rates = {step: {"ms": ms, "tflops_per_gpu": flops / ms / 1e9} for step, ms in times.items()}
    hardware = "CPU" if job.device.type == "cpu" else torch.cuda.get_device_name(job.device)
    print(f"{name} ({dist.get_backend()}) and torch.matmul, {counted(job.world_size, 'rank')}, {hardware}: "
          f"M={job.m} N={job.n} K={job.k} {options.datatype}")  # fmt: skip
    print(f"validation {'passed' if success else 'FAILED'}: {found}")
    for step, rate in rates.items():
        print(f"{step:13}  {rate['ms']:9.4g} ms  {rate['tflops_per_gpu']:9.4g} TFLOP/s per GPU")
    record = {
        "op": name,
        "backend": dist.get_backend(),
        "world_size": job.world_size,
        "hardware": hardware,
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "arguments": vars(options) | {"m": job.m, "n": job.n, "k": job.k},
        **{step: rates.get(step) for step in ("matmul", "communication", "total")},
        **found.record(),
    }
    write_result(options.output_file, record)
    return success


def in_rank(
    name: str, build: Callable[[Job], Steps], shape: Shape, options: argparse.Namespace, meet: str | None
) -> bool:
    """What each rank runs; whether the result is right."""
    who = identity()
    assert who is not None
    gpus = on_gpus(who.world_size)
    device = torch.device("cuda", who.local_rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // who.world_size))
    dist.init_process_group(
        "nccl" if gpus else "gloo", init_method=meet or loopback(who), rank=who.rank, world_size=who.world_size,
        device_id=device if gpus else None,
    )  # fmt: skip
    try:
        job = Job(*shape, DATATYPES[options.datatype], who.rank, who.world_size, device)
        return report(job, name, build(job), options)
    finally:
        dist.destroy_process_group()


def loopback(who: Identity) -> str:
    """Where ranks can meet that nobody told: at a port of this host that rank 0 finds free. Collective."""
    mesh = Mesh(who.rank, who.world_size, f"{who.job};reference", MEETING_S)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        ports = mesh.exchange("port", str(probe.getsockname()[1]).encode())
    mesh.leave()
    return f"tcp://127.0.0.1:{int(ports[0])}"


def on_gpus(world_size: int) -> bool:
    """Whether each rank has a GPU of its own."""
    return backends.detect().name in backends.GPU_BACKENDS and torch.cuda.device_count() >= world_size


def shape_of(options: argparse.Namespace, cut: str, world_size: int) -> Shape:
    """M, N, K as asked for, or by default, where an extent that ranks share is rounded down to equal parts.

    Raises:
        ArgumentError: the ranks cannot share an extent evenly.
    """
    shape = []
    for extent, default in zip("mnk", GPU_SHAPE if on_gpus(world_size) else CPU_SHAPE, strict=True):
        parts = world_size if extent in cut else 1
        size = getattr(options, extent) or default // parts * parts
        if size % parts:
            raise ArgumentError("reference", f"-{extent}", f"a multiple of the {parts} ranks", size)
        shape.append(size)
    return shape[0], shape[1], shape[2]


def main(doc: str | None, name: str, build: Callable[[Job], Steps], cut: str) -> int:
    """The whole program; returns its exit status.

    Args:
        doc: what ``--help`` shows first.
        name: of the collective.
        build: makes the op on one rank.
        cut: those of the extents ``m``, ``n`` and ``k`` that the ranks share evenly.
    """
    parser = rank_parser(doc)
    for extent, gpu, cpu in zip("mnk", GPU_SHAPE, CPU_SHAPE, strict=True):
        parser.add_argument(f"-{extent}", type=positive, help=f"over all ranks (default: {gpu}, without GPUs {cpu})")
    parser.add_argument("--datatype", choices=DATATYPES, default="fp32", help="of A and B (default: %(default)s)")
    parser.add_argument("--validate", action="store_true", help="check three calls on fresh data against float64")
    parser.add_argument("--benchmark", action="store_true", help="check one call, then time the op and its two parts")
    parser.add_argument(
        "--output_file", type=output_file, default="log.json", help="JSON of the result (default: %(default)s)"
    )
    options = parser.parse_args()
    if not (options.validate or options.benchmark):
        print("nothing to do: say --validate to check, --benchmark to time", file=sys.stderr)
        return 1

    def launched(who: Identity | None) -> int:
        num_ranks = ranks_to_start(options.num_ranks)
        shape = shape_of(options, cut, world_size_of(num_ranks))
        told = {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
        with tempfile.TemporaryDirectory() as folder:
            meet = f"file://{folder}/meet" if who is None else "env://" if told else None
            right = iris.launch(in_rank, num_ranks, (name, build, shape, options, meet))
        return 0 if all(right) else 1

    return recorded_status(name, options.output_file, launched)
