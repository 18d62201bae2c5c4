"""Command lines: options that several programs share, checks of their values, and how many ranks to start."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

import torch

from iris import backends
from iris.console import Parser
from iris.context import MAX_RANKS, MIN_HEAP_BYTES
from iris.errors import BackendError
from iris.identity import identity
from iris.ops.tuned import DTYPE_NAMES

SIMULATED_RANKS = 4
MAX_SECONDS = 1e5
"""More than a day; system calls that wait accept at most some weeks."""
PICTURES = (".svg", ".png")
DTYPES = DTYPE_NAMES | {
    "fp64": torch.float64,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
}
"""Dtypes, by their names on command lines and in results."""


def rank_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with ``--num_ranks`` and ``--help``, which shows ``doc``, the program's own docstring."""
    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_num_ranks(parser)
    return parser


def add_num_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--num_ranks``; its default None means the number that :func:`ranks_to_start` returns."""
    about = "ranks (default: all GPUs if two or more, else 4 simulated)"
    parser.add_argument("--num_ranks", type=rank_count, help=about)


def add_heap_size(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--heap_size``; its default None means :func:`iris.bench.contexts.default_heap_size`."""
    parser.add_argument(
        "--heap_size",
        type=heap_bytes,
        help="bytes of symmetric heap (default: a quarter of the GPU's memory, 32 GiB at most; simulated 256 MiB)",
    )


def by_option(text: str) -> str:
    """The text of an error for users of a program that makes the context itself: they can only give ``--heap_size``."""
    return text.replace("create the context with heap_size=", "give --heap_size=")


def ranks_to_start(num_ranks: int | None) -> int:
    """The number of ranks: ``num_ranks``, or if that is None, that of the GPUs if there are two or more, else 4. With
    one GPU, which ranks may not share, the 4 are simulated, and a line on stderr says so.

    Under torchrun, mpirun or srun the ranks already run, and :func:`iris.launch` ignores the number.
    """
    if num_ranks is not None:
        return num_ranks
    gpus = torch.cuda.device_count() if backends.detect().name in backends.GPU_BACKENDS else 0
    if gpus > 1:
        return gpus
    if gpus == 1 and identity() is None and not backends.oversubscribed():
        os.environ["IRIS_BACKEND"] = "sim"
        said = f"one GPU is too few for several ranks: {SIMULATED_RANKS} are simulated; --num_ranks 1 takes the GPU"
        print(said, file=sys.stderr)
    return SIMULATED_RANKS


def world_size_of(num_ranks: int) -> int:
    """The number of ranks of the job: a launcher's, or the ``num_ranks`` to start."""
    who = identity()
    return who.world_size if who is not None else num_ranks


def several_gpus() -> bool:
    """Whether there are two or more GPUs to measure on; False if the backend that was asked for is missing."""
    try:
        return backends.detect().name != "sim" and torch.cuda.device_count() > 1
    except BackendError:
        return False


def share_evenly(parser: argparse.ArgumentParser, given: argparse.Namespace, names: str, num_ranks: int) -> None:
    """End the program with one line if the ranks cannot share a size evenly. ``names``: the options, a letter each; the
    ranks: a launcher's, or the ``num_ranks`` to start."""
    world_size = world_size_of(num_ranks)
    for name in names:
        size = getattr(given, name)
        if size is not None and size % world_size:
            parser.error(f"-{name}: {size} is no multiple of {world_size} ranks")


def positive(text: str) -> int:
    """A number on the command line that must be at least 1."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def tile_size(text: str) -> int:
    """The side of a tile on the command line: a power of two of at least 16."""
    value = positive(text)
    if value < 16 or value & (value - 1):
        raise argparse.ArgumentTypeError(f"{value} is not a power of two of at least 16")
    return value


def not_negative(text: str) -> int:
    """A number on the command line that must be at least 0."""
    value = _whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is less than 0")
    return value


def rank_count(text: str) -> int:
    """A number of ranks on the command line."""
    value = positive(text)
    if value > MAX_RANKS:
        raise argparse.ArgumentTypeError(f"{value} is more than the {MAX_RANKS} ranks that there can be")
    return value


def heap_bytes(text: str) -> int:
    """The size of a symmetric heap on the command line: bytes, or KiB, MiB or GiB with K, M or G after the number."""
    unit = "KMG".find(text[-1:].upper()) + 1 if text else 0
    value = _whole(text[:-1] if unit else text, "a number of bytes, such as 1073741824 or 1G") << 10 * unit
    if value < MIN_HEAP_BYTES:
        raise argparse.ArgumentTypeError(f"{value} is less than {MIN_HEAP_BYTES} bytes")
    return value


def _whole(text: str, expected: str = "a whole number") -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not {expected}") from None


def seconds(text: str) -> float:
    """A time on the command line."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds, at most {MAX_SECONDS:.0f}")
    return value


def output_file(text: str) -> str:
    """A file on the command line that can be written."""
    file = Path(text).absolute()
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory, not a file")
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{file} cannot be written")
    return text


def picture(text: str) -> str:
    """A picture on the command line that can be written."""
    if Path(text).suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text} should end in {' or '.join(PICTURES)}")
    return output_file(text)


def no_picture(file: str | Path, error: OSError) -> str:
    """The text to print if a picture cannot be written; that is no error, as the results count without it."""
    return f"no picture: {file}: {error.strerror or error}"


def folder_trouble(folder: Path) -> str:
    """Make ``folder``; returns why no file can be written there, or empty text."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        return "it is not a folder"
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(folder, os.W_OK) else "no file can be written there"
