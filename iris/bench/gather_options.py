"""The command line and the data sets of the programs that check and time all-gather + matmul.

Sizes are those of the whole problem: A is [m, k], sharded over the ranks, and of B, [k, n], every rank multiplies its
own n / world_size columns. Nothing in this module needs a context.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from iris import backends
from iris.bench.matrix import DTYPES, rank_parser, ranks_to_start

SIM_SHRINK = 64
"""The simulator divides the sizes of the project's own data set by this, so that a sweep takes seconds."""
KERNEL_FLAGS = {
    "BLK_M": ("block_size_m", "rows of a tile"),
    "BLK_N": ("block_size_n", "columns of a tile"),
    "BLK_K": ("block_size_k", "depth of a step"),
    "gsize_m": ("group_size_m", "rows of tiles computed together, for L2 reuse"),
    "num_sms": ("num_sms", "programs of the launch, at most the SMs of the device"),
    "num_stages": ("num_stages", "steps whose loads are in flight, as Triton has it"),
    "num_warps": ("num_warps", "warps of a program"),
}
"""Flags, the fields of FusedConfig that they set, and what those are."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a whole problem, and what it is."""

    m: int
    n: int
    k: int
    note: str = ""

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    def shrunk(self, multiple: int) -> Shape:
        """The shape with sizes divided by SIM_SHRINK, rounded up to multiples of ``multiple``."""
        m, n, k = (-(-size // (SIM_SHRINK * multiple)) * multiple for size in (self.m, self.n, self.k))
        return Shape(m, n, k, f"{self.note}; sizes divided by {SIM_SHRINK} for the simulator")

    def obstacle(self, world_size: int, gather_dim: int) -> str | None:
        """Why ``world_size`` ranks cannot share this problem, or None if they can."""
        shared = {"n": self.n, "m": self.m} if gather_dim == 0 else {"n": self.n, "k": self.k}
        uneven = [f"{name}={size}" for name, size in shared.items() if size % world_size]
        return f"{' and '.join(uneven)}: no multiple of {world_size} ranks" if uneven else None


@dataclass(frozen=True)
class Options:
    """What the command line of a program says.

    Attributes:
        algorithm: the program's own: one of the op's, or "nccl".
        shrink: divide the sizes of ``shapes``; see :meth:`Shape.shrunk`.
        heap_size: None for what ``iris bench`` takes.
        fields: those of FusedConfig that were given; the others are picked.
    """

    algorithm: str
    num_ranks: int
    benchmark: bool
    shapes: tuple[Shape, ...]
    shrink: bool
    dtype: str
    gather_dim: int
    output_dir: Path
    heap_size: int | None
    fields: Mapping[str, int]

    @property
    def element(self) -> torch.dtype:
        return DTYPES[self.dtype]


def parse_options(
    doc: str | None, algorithm: str, data_set: Path, dtypes: Sequence[str], argv: Sequence[str] | None = None
) -> Options:
    """Read the command line of the program that runs ``algorithm``, by default on ``data_set``.

    A bad value ends the program with a usage line and status 2; no order to do anything, with status 1.
    """
    parser = rank_parser(doc)
    parser.add_argument("-v", "--validate", action="store_true", help="check every configuration, without timing it")
    parser.add_argument("-b", "--benchmark", action="store_true", help="check every configuration, and time it")
    for name, meaning in (("m", "rows of A"), ("n", "columns of B, over all ranks"), ("k", "columns of A, rows of B")):
        parser.add_argument(f"-{name}", type=_positive, help=f"{meaning}; m, n and k replace the data set")
    parser.add_argument("--dataset", type=Path, help=f'JSON list of {{"m", "n", "k"}} (default: {data_set.name})')
    parser.add_argument("--datatype", choices=dtypes, default="bf16", help="of A and B (default: %(default)s)")
    parser.add_argument(
        "--gather_dim", type=int, choices=(0, 1), default=1, help="A is sharded by rows (0) or by columns (1, default)"
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("results") / f"all_gather_gemm_{algorithm}",
        help="where to write a JSON file per configuration (default: %(default)s)",
    )
    parser.add_argument("--heap_size", type=_positive, help="bytes of symmetric heap (default: as iris bench has it)")
    for flag, (_, meaning) in KERNEL_FLAGS.items():
        parser.add_argument(f"--{flag}", type=_positive, help=f"{meaning} (default: picked for each shape)")
    given = parser.parse_args(argv)
    if not (given.validate or given.benchmark):
        parser.exit(
            1, f"{parser.prog}: nothing to do: give -v to check results, -b to check and time them; see --help\n"
        )
    num_ranks = ranks_to_start(given.num_ranks)
    sizes = (given.m, given.n, given.k)
    if any(sizes) and (given.dataset or not all(sizes)):
        parser.error("-m, -n and -k: give all three, and no --dataset, or none of them")
    try:
        shapes = (Shape(*sizes),) if all(sizes) else read_data_set(given.dataset or data_set)
    except (OSError, ValueError) as error:
        parser.error(f"--dataset: {error}")
    return Options(
        algorithm=algorithm,
        num_ranks=num_ranks,
        benchmark=given.benchmark,
        shapes=shapes,
        shrink=backends.detect().name == "sim" and not (any(sizes) or given.dataset),
        dtype=given.datatype,
        gather_dim=given.gather_dim,
        output_dir=given.output_dir,
        heap_size=given.heap_size,
        fields={
            field: value for flag, (field, _) in KERNEL_FLAGS.items() if (value := getattr(given, flag)) is not None
        },
    )


def read_data_set(file: Path) -> tuple[Shape, ...]:
    """The shapes of ``file``: a JSON list of objects with m, n, k, and a note if there is something to say.

    Raises:
        OSError: there is no such file.
        ValueError: it is not JSON, or not such a list; names the entry.
    """
    entries = json.loads(file.read_text())
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{file} should hold a list of shapes")
    return tuple(_shape(f"{file}, entry {number}", entry) for number, entry in enumerate(entries, 1))


def _shape(where: str, entry: Any) -> Shape:
    sizes = [entry.get(name) for name in "mnk"] if isinstance(entry, dict) else []
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f'{where} should be {{"m": …, "n": …, "k": …}} with positive numbers, is {json.dumps(entry)}')
    return Shape(*sizes, note=str(entry.get("note", "")))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value
