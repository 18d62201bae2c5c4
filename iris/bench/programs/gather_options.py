"""The command line of the programs that check and time all-gather + matmul by one algorithm.

Its sizes, as in a data set, are those of the whole problem: A is [m, k], sharded over the ranks, and B is [k, n], of
which every rank multiplies its own n / world_size columns. Nothing in this module needs a context.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from iris import backends
from iris.bench.axes import Params
from iris.bench.dataset import Dataset
from iris.bench.options import (
    add_heap_size,
    folder_trouble,
    positive,
    rank_parser,
    ranks_to_start,
    tile_size,
    world_size_of,
)
from iris.errors import ArgumentError
from iris.ops.algorithms import GATHER
from iris.ops.config import WARPS

OP = GATHER
_DATATYPES = ("fp16", "bf16", "fp32", "int8")
SIM_SHRINK = 128
"""The simulator divides the sizes of the project's own data set by this, so that a sweep takes seconds."""
KERNEL_FLAGS = {
    "BLK_M": ("block_size_m", "rows of a tile, a power of two from 16 on"),
    "BLK_N": ("block_size_n", "columns of a tile, likewise"),
    "BLK_K": ("block_size_k", "depth of a step, likewise"),
    "gsize_m": ("group_size_m", "rows of tiles computed together, for L2 reuse"),
    "num_sms": ("num_sms", "programs of the launch, at most the SMs of the device"),
    "num_stages": ("num_stages", "steps whose loads are in flight, as Triton has it"),
    "num_warps": ("num_warps", f"warps of a program: {', '.join(map(str, WARPS))}"),
}
"""Flags, the fields of FusedConfig that they set, and descriptions of these fields."""


@dataclass(frozen=True)
class Options:
    """What the command line of a program says.

    Attributes:
        algorithm: the program's algorithm, by its name in ``iris bench all_gather_matmul``.
        num_ranks: the number of ranks to start, if no launcher has started them.
        benchmark: whether to time right results, too.
        shapes: M, N and K of the whole problem, dtype, gather_dim and labels of each configuration.
        output_dir: where files go, an existing folder.
        heap_size: bytes; None: the default of ``iris bench``.
        fields: the fields of FusedConfig that were given; the others are picked.
    """

    algorithm: str
    num_ranks: int
    benchmark: bool
    shapes: Sequence[Params]
    output_dir: Path
    heap_size: int | None
    fields: Mapping[str, int]


def parse_options(doc: str | None, algorithm: str, data_set: Path, argv: Sequence[str] | None = None) -> Options:
    """Read the command line of the program that runs ``algorithm``, by default on ``data_set``; make the output folder.

    A bad value ends the program with one line and status 2; a command line that asks for nothing, with status 1.
    """
    parser = _parser(doc, algorithm, data_set)
    given = parser.parse_args(argv)
    if not (given.validate or given.benchmark):
        parser.exit(
            1, f"{parser.prog}: nothing to do: give -v to check results, -b to check and time them; see --help\n"
        )
    sizes = {"M": given.m, "N": given.n, "K": given.k}
    alone = all(sizes.values())
    if any(sizes.values()) and (given.dataset or not alone):
        parser.error("-m, -n and -k: give all three and no --dataset, or none of them")
    num_ranks = ranks_to_start(given.num_ranks)
    world_size = world_size_of(num_ranks)
    try:
        shapes = [sizes] if alone else Dataset.read(given.dataset or data_set).shapes(OP, world_size)
    except ArgumentError as error:
        parser.error(str(error))
    if trouble := folder_trouble(given.output_dir):
        parser.error(f"--output_dir {given.output_dir}: {trouble}")
    if backends.detect().name == "sim" and not (alone or given.dataset):
        shapes = [_shrunk(shape, world_size) for shape in shapes]
    return Options(
        algorithm=algorithm,
        num_ranks=num_ranks,
        benchmark=given.benchmark,
        shapes=[{"dtype": given.datatype, "gather_dim": given.gather_dim, **shape} for shape in shapes],
        output_dir=given.output_dir,
        heap_size=given.heap_size,
        fields={
            field: getattr(given, flag) for flag, (field, _) in KERNEL_FLAGS.items() if getattr(given, flag) is not None
        },
    )


def _parser(doc: str | None, algorithm: str, data_set: Path) -> argparse.ArgumentParser:
    parser = rank_parser(doc)
    parser.add_argument("-v", "--validate", action="store_true", help="check every configuration, without timing it")
    parser.add_argument("-b", "--benchmark", action="store_true", help="check every configuration, and time it")
    for name, meaning in (("m", "rows of A"), ("n", "columns of B, over all ranks"), ("k", "columns of A, rows of B")):
        parser.add_argument(f"-{name}", type=positive, help=f"{meaning}; with the other two, instead of a data set")
    parser.add_argument(
        "--dataset",
        type=Path,
        help=f"shapes, as for iris bench (default: {data_set.name}; its sizes / {SIM_SHRINK} if simulated)",
    )
    parser.add_argument("--datatype", choices=_DATATYPES, default="bf16", help="of A and B (default: %(default)s)")
    parser.add_argument(
        "--gather_dim",
        type=int,
        choices=(0, 1),
        default=1,
        help="A is sharded by rows (0) or by columns, that is K (1) (default: %(default)s)",
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("results", f"all_gather_gemm_{algorithm}"),
        help="where to write a file of JSON for each configuration (default: %(default)s)",
    )
    add_heap_size(parser)
    for flag, (field, meaning) in KERNEL_FLAGS.items():
        kind = tile_size if field.startswith("block_size") else positive
        chosen = f"{meaning} (default: picked for each shape)"
        parser.add_argument(f"--{flag}", type=kind, choices=WARPS if flag == "num_warps" else None, help=chosen)
    return parser


def _shrunk(shape: Params, multiple: int) -> Params:
    """The shape with its sizes divided by SIM_SHRINK, rounded up to multiples of ``multiple``."""
    sizes = {name: -(-int(shape[name]) // (SIM_SHRINK * multiple)) * multiple for name in ("M", "N", "K")}
    return {**shape, **sizes, "divided_by": SIM_SHRINK}
