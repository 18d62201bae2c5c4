"""The rank × rank bandwidth matrix of the load, store and atomic examples, and of ``iris bench rma``.

A program brings a ``move(peer)`` that moves ``nbytes`` between this rank and a peer. This module reads the command
line, measures every pair, and shows the matrix: rows are the rank that runs the kernel, columns its peer, values GB/s
(10⁹ bytes per second) of payload.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from iris import backends
from iris.bench.options import DTYPES, heap_bytes, no_picture, picture, positive, rank_parser, ranks_to_start
from iris.bench.timing import median_seconds, of_all
from iris.console import counted, print_table
from iris.context import Iris
from iris.ops.config import MAX_BLOCK_ELEMENTS

Matrix = list[list[float]]
Move = Callable[[int], object]

GPU_BUFFER_BYTES, SIM_BUFFER_BYTES = 256 << 20, 64 << 10
BLOCK_BYTES = 16 << 10


@dataclass(frozen=True)
class Options:
    """What the command line of a bandwidth example says."""

    num_ranks: int
    buffer_size: int
    dtype: torch.dtype
    block_size: int
    heap_size: int
    plot: str | None
    validate: bool

    @property
    def count(self) -> int:
        """Elements of ``dtype`` in a buffer."""
        return self.buffer_size // self.dtype.itemsize

    def grid(self, ctx: Iris) -> tuple[int]:
        """One program per SM, fewer if the buffer has fewer blocks."""
        return (min(ctx.num_sms, -(-self.count // self.block_size)),)


def parse_options(doc: str | None, name: str, dtype: str = "fp16", dtypes: Sequence[str] = tuple(DTYPES)) -> Options:
    """Read the command line of the example called ``name``; a bad value ends the program with one line about it."""
    parser = rank_parser(doc)
    parser.add_argument("--buffer_size", type=positive, help="bytes to move (default: 256 MiB, simulated 64 KiB)")
    parser.add_argument("--dtype", choices=dtypes, default=dtype, help="element type (default: %(default)s)")
    parser.add_argument(
        "--block_size", type=positive, help="elements per program and step, a power of two (default: 16 KiB of them)"
    )
    parser.add_argument("--heap_size", type=heap_bytes, help="bytes of symmetric heap (default: what is needed)")
    drawn = parser.add_mutually_exclusive_group()
    drawn.add_argument("--plot", default=f"{name}_bandwidth.svg", help="picture (default: %(default)s)")
    drawn.add_argument("--no_plot", action="store_true", help="draw no picture")
    parser.add_argument("-v", "--validate", action="store_true", help="check the result and stop, without measuring")
    given = parser.parse_args()
    element = DTYPES[given.dtype]
    num_ranks = ranks_to_start(given.num_ranks)
    simulated = backends.detect().name == "sim"
    buffer_size = given.buffer_size or (SIM_BUFFER_BYTES if simulated else GPU_BUFFER_BYTES)
    block_size = given.block_size or BLOCK_BYTES // element.itemsize
    if buffer_size % element.itemsize:
        parser.error(f"--buffer_size: {buffer_size} is no multiple of the {element.itemsize} bytes of {given.dtype}")
    if block_size & (block_size - 1) or block_size > MAX_BLOCK_ELEMENTS:
        parser.error(f"--block_size: {block_size} is not a power of two of at most {MAX_BLOCK_ELEMENTS}")
    plot = None
    if not (given.no_plot or given.validate):
        try:
            plot = str(Path(picture(given.plot)).absolute())
        except argparse.ArgumentTypeError as error:
            parser.error(f"--plot: {error} (--no_plot draws none)")
    heap_size = given.heap_size or 2 * buffer_size + (1 << 20)
    return Options(num_ranks, buffer_size, element, block_size, heap_size, plot, given.validate)


def measure_pairs(ctx: Iris, move: Move, nbytes: int) -> Matrix:
    """GB/s of every pair, one pair at a time while all other ranks are idle. Collective."""
    row: list[float] = []
    for rank in range(ctx.world_size):
        ctx.barrier()
        if rank == ctx.rank:
            row = [nbytes / median_seconds(ctx, partial(move, peer)) / 1e9 for peer in range(ctx.world_size)]
    ctx.barrier()
    return of_all(ctx, row)


def measure_all(ctx: Iris, move: Move, nbytes: int) -> Matrix:
    """GB/s of every pair while all ranks work at once. Collective.

    In turn ``shift`` every rank works on the peer ``shift`` places further, so no two ranks share a peer.
    """
    row = [0.0] * ctx.world_size
    for shift in range(ctx.world_size):
        peer = (ctx.rank + shift) % ctx.world_size
        row[peer] = nbytes / median_seconds(ctx, partial(move, peer), together=True) / 1e9
        ctx.barrier()
    return of_all(ctx, row)


def report(ctx: Iris, title: str, matrix: Matrix, plot: str | None) -> None:
    """On rank 0, print the matrix and draw it into the file ``plot``, if one is named; print why if that fails."""
    if ctx.rank != 0:
        return
    where = "simulated" if ctx.backend_name == "sim" else f"on {torch.cuda.get_device_name(ctx.device)}"
    heading = f"{title}, GB/s, {counted(ctx.world_size, 'rank')} {where}"
    print_matrix(heading, matrix)
    if plot is not None:
        try:
            print(f"picture: {plot}" if draw_matrix(heading, matrix, plot) else "no picture: pip install matplotlib")
        except OSError as error:
            print(no_picture(plot, error))


def format_rate(rate: float) -> str:
    """Three digits, or all before the point: ``1234``, ``33.3``, ``0.0123``."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:#.3g}"


def print_matrix(heading: str, matrix: Matrix) -> None:
    """Print ``heading`` and a table."""
    headings = ["", *(f"peer {peer}" for peer in range(len(matrix)))]
    rows = [[f"rank {rank}", *map(format_rate, row)] for rank, row in enumerate(matrix)]
    print_table(headings, rows, title=heading, right=range(len(headings)), whole=True)


def draw_matrix(heading: str, matrix: Matrix, path: str) -> bool:
    """Draw a heat map into ``path``, an SVG or PNG file. False if matplotlib is not installed.

    Colours run from zero to the fastest pair of different ranks. The diagonal is left grey: a rank's rate to
    itself is that of its own memory, which is often ten times as high.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    size = len(matrix)
    cells = [(rank, peer, rate) for rank, row in enumerate(matrix) for peer, rate in enumerate(row)]
    between = [rate if rank != peer or size == 1 else float("nan") for rank, peer, rate in cells]
    high = max(rate for rate in between if rate == rate)
    figure = Figure(figsize=(3 + 0.7 * size, 2 + 0.6 * size), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor("lightgrey")
    colours = [between[start : start + size] for start in range(0, size * size, size)]
    image = axes.imshow(colours, cmap="viridis", vmin=0, vmax=high)
    for rank, peer, rate in cells:
        dark = (rank != peer or size == 1) and rate < high / 2
        text = format_rate(rate)
        axes.text(peer, rank, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axes.set_xticks(range(size))
    axes.set_yticks(range(size))
    axes.set_xlabel("peer")
    axes.set_ylabel("rank that runs the kernel")
    axes.set_title(heading, fontsize=9, wrap=True)
    figure.colorbar(image, ax=axes, label="GB/s")
    figure.savefig(path)
    return True
