"""The command line that ``examples/gemm/benchmark.py`` and ``examples/stream-k/benchmark.py`` share.

Defaults are those that users of the Iris model know from larger GPUs. :func:`fit` reduces them to what this machine can
run, and says what it changed. Nothing in this module needs a GPU or a context.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from iris.bench.options import add_num_ranks, heap_bytes, not_negative, output_file, picture, positive, tile_size
from iris.console import Parser
from iris.heap import format_bytes
from iris.ops.algorithms import ALL_REDUCE, SCATTER
from iris.ops.config import MAX_BLOCK_ELEMENTS, MAX_GROUP_M, WARPS, FusedConfig, min_block_size_k, most_warps
from iris.ops.obstacles import SUMS_PER_THREAD

DATATYPES = {"fp16": torch.float16, "fp32": torch.float32, "int8": torch.int8, "bf16": torch.bfloat16}
OPS = {"all_reduce": ALL_REDUCE, "all_scatter": SCATTER, "one_shot": ALL_REDUCE}
"""``--algorithm``, and the op that it stands for."""
AMD_ONLY = ("waves_per_eu", "mfmaInstrSize", "kpack")
SIMULATED_SHAPE = (608, 512, 1032)
"""M, N, K if kernels are interpreted and no other shape is given: an eighth of the default one."""
BLOCKS = (
    ("BLK_M", "BLK_N"), ("BLK_M", "BLK_K"), ("BLK_K", "BLK_N"), ("COMMUNICATION_TILE_M", "COMMUNICATION_TILE_N"),
)  # fmt: skip
HEAP_SHARE = 0.8
"""The share of free memory that heaps may take; operands and the reference need the rest."""


@dataclass(frozen=True)
class Arguments:
    """Every flag, by its own name, with its default."""

    m: int = 4864
    n: int = 4096
    k: int = 8256
    debug: bool = False
    validate: bool = False
    benchmark: bool = False
    datatype: str = "fp32"
    algorithm: str = "all_reduce"
    output_file: str = "log.json"
    BLK_M: int = 256
    BLK_N: int = 256
    BLK_K: int = 32
    COMMUNICATION_TILE_M: int = 128
    COMMUNICATION_TILE_N: int = 128
    gsize_m: int = 8
    two_tiles: bool = True
    num_stages: int = 1
    num_warps: int = 8
    waves_per_eu: int = 0
    mfmaInstrSize: int = 16  # noqa: N815 (the name of the flag)
    kpack: int = 2
    heap_size: int = 1 << 32
    gemm_sms: int = 256
    total_sms: int = 304
    communication_block_size: int = 256
    num_ranks: int | None = None
    trace: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        return DATATYPES[self.datatype]

    @property
    def split(self) -> bool:
        """Whether some programs only communicate."""
        return self.algorithm == "all_scatter" and self.gemm_sms < self.total_sms


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The parser of all flags; ``--help`` shows ``doc``, the program's own docstring, first.

    Its result holds only the flags that were given: :class:`Arguments` has the defaults.
    """
    made = Parser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )

    def add(flag: str, kind: Callable[[str], object], about: str, choices: Collection[object] | None = None) -> None:
        default = getattr(Arguments, flag.lstrip("-"))
        listed = "{" + ",".join(map(str, choices)) + "}" if choices else flag.lstrip("-").upper()
        made.add_argument(flag, type=kind, choices=choices, metavar=listed, help=f"{about} (default: {default})")

    add("-m", positive, "rows of A and of C")
    add("-n", positive, "columns of B and of C, over all ranks")
    add("-k", positive, "columns of A, rows of B, over all ranks")
    made.add_argument("--debug", action="store_true", help="check the result; show config, shapes, worst elements")
    made.add_argument("--validate", action="store_true", help="check three calls on fresh data against float64")
    made.add_argument("--benchmark", action="store_true", help="check one call, then time the op and its two parts")
    add("--datatype", str, "of A and B; int8 gives an int32 C", DATATYPES)
    add("--algorithm", str, "how ranks share C; see above", OPS)
    add("--output_file", output_file, "JSON of arguments and results, written by rank 0")
    add("--BLK_M", tile_size, "rows of a tile")
    add("--BLK_N", tile_size, "columns of a tile")
    add("--BLK_K", tile_size, "depth of a step")
    add("--COMMUNICATION_TILE_M", tile_size, "rows that a communicating program moves at a time")
    add("--COMMUNICATION_TILE_N", tile_size, "columns that a communicating program moves at a time")
    add("--gsize_m", positive, "rows of tiles computed together, for L2 reuse")
    add("--two_tiles", _truth, "Stream-K splits one to two tiles per program (True), or less than one, mostly faster")
    add("--num_stages", positive, "steps whose loads are in flight, as Triton has it")
    add("--num_warps", positive, "warps of a program", WARPS)
    add("--waves_per_eu", not_negative, "AMD only, as Triton has it")
    add("--mfmaInstrSize", positive, "AMD only: Triton's matrix_instr_nonkdim")
    add("--kpack", positive, "AMD only, as Triton has it")
    add("--heap_size", heap_bytes, "bytes of symmetric heap on each rank")
    add("--gemm_sms", positive, "programs that multiply")
    add("--total_sms", positive, "programs in all; the others communicate (all_scatter)")
    add("--communication_block_size", positive, "accepted, and ignored: the communication tile says what is moved")
    add_num_ranks(made)
    made.add_argument(
        "--trace", type=picture, metavar="FILE", help="draw who computed and waited when into FILE, .svg or .png"
    )
    return made


def parse(doc: str | None, argv: Sequence[str] | None = None) -> tuple[Arguments, frozenset[str]]:
    """The arguments on the command line, and the names of the flags given; a bad value ends the program."""
    made = parser(doc)
    given = vars(made.parse_args(argv))
    arguments = Arguments(**given)
    depth, least = arguments.BLK_K, min_block_size_k(arguments.dtype)
    if depth < least:
        made.error(f"argument --BLK_K: {depth} is less than {least}, which {arguments.datatype} needs")
    return arguments, frozenset(given)


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() in ("true", "1")


@dataclass(frozen=True)
class Device:
    """The device that arguments are fitted to, with the least of each that any of the job's devices has.

    Attributes:
        backend: ``"cuda"``, ``"hip"`` or ``"sim"``.
        world_size: the number of ranks.
        num_sms: SMs (compute units).
        shared_bytes: shared memory (LDS) of a block; 0: there is no limit.
        free_bytes: memory free for a rank's heap and everything else.
    """

    backend: str
    world_size: int
    num_sms: int
    shared_bytes: int
    free_bytes: int

    @property
    def warp_size(self) -> int:
        return 64 if self.backend == "hip" else 32


Changes = dict[str, int]


def fit(asked: Arguments, given: Collection[str], device: Device) -> tuple[Arguments, list[str]]:
    """``asked``, reduced to what ``device`` can run, and a line for every change. Pure, so the same on every rank.

    Args:
        asked: the arguments.
        given: names of the flags on the command line; sizes among them are never changed.
        device: where to run.
    """
    fitted, notes = asked, []
    for find, why in (
        (_small_shape, "kernels are interpreted here; give -m, -n or -k to choose"),
        (_shares, f"a multiple of the {device.world_size} ranks"),
        (_sms, f"the device has {device.num_sms} SMs"),
        (_blocks, f"Triton's blocks have at most {MAX_BLOCK_ELEMENTS} elements"),
        (_group, f"at most {MAX_GROUP_M} rows of tiles can be counted as one group"),
        (_warps, "a block has at most 1024 threads"),
        (_registers, f"a thread holds at most {SUMS_PER_THREAD} sums of its tile"),
        (_shared_memory, f"a block has {format_bytes(device.shared_bytes)} of shared memory"),
        (_heap, f"{format_bytes(device.free_bytes)} are free for each rank, {HEAP_SHARE:.0%} of that for its heap"),
    ):
        for name, value in find(fitted, given, device).items():
            if value != getattr(fitted, name):
                notes.append(f"{name} {getattr(fitted, name)} → {value}: {why}")
                fitted = replace(fitted, **{name: value})  # type: ignore[arg-type]
    return fitted, notes


def _small_shape(asked: Arguments, given: Collection[str], device: Device) -> Changes:
    if device.backend != "sim" or {"m", "n", "k"} & set(given):
        return {}
    return dict(zip("mnk", SIMULATED_SHAPE, strict=True))


def _shares(asked: Arguments, given: Collection[str], device: Device) -> Changes:
    """Make the shared extent a multiple of the ranks, unless it was given."""
    name = shared_extent(asked)
    extent: int = getattr(asked, name)
    return {} if name in given else {name: max(1, extent // device.world_size) * device.world_size}


def _sms(asked: Arguments, given: Collection[str], device: Device) -> Changes:
    """Reduce ``gemm_sms`` and ``total_sms``; if some programs only communicate, their share stays about the same."""
    gemm, total = min(asked.gemm_sms, device.num_sms), min(asked.total_sms, device.num_sms)
    if asked.algorithm == "all_scatter" and (asked.split or "gemm_sms" not in given) and 1 < total <= asked.gemm_sms:
        like = asked if asked.split else Arguments
        gemm = min(max(total * like.gemm_sms // like.total_sms, 1), total - 1)
    return {"total_sms": total, "gemm_sms": gemm}


def _blocks(asked: Arguments, given: Collection[str], device: Device) -> Changes:
    sizes = {name: int(getattr(asked, name)) for pair in BLOCKS for name in pair}
    for pair in BLOCKS:
        while sizes[pair[0]] * sizes[pair[1]] > MAX_BLOCK_ELEMENTS:
            sizes[max(pair, key=sizes.__getitem__)] //= 2
    return sizes


def _group(asked: Arguments, given: Collection[str], device: Device) -> Changes:
    return {"gsize_m": min(asked.gsize_m, MAX_GROUP_M)}


def _warps(asked: Arguments, given: Collection[str], device: Device) -> Changes:
    return {"num_warps": min(asked.num_warps, most_warps(device.backend))}


def _registers(asked: Arguments, given: Collection[str], device: Device) -> Changes:
    m, n = asked.BLK_M, asked.BLK_N
    while device.backend != "sim" and m * n > SUMS_PER_THREAD * asked.num_warps * device.warp_size:
        m, n = (m // 2, n) if m >= n else (m, n // 2)
    return {"BLK_M": m, "BLK_N": n}


def _shared_memory(asked: Arguments, given: Collection[str], device: Device) -> Changes:
    """Reduce the stages first, then the depth of a step, then the tile."""
    m, n, k, stages = asked.BLK_M, asked.BLK_N, asked.BLK_K, asked.num_stages
    while device.shared_bytes and stages * (m + n) * k * asked.dtype.itemsize > device.shared_bytes:
        if stages > 1:
            stages -= 1
        elif k > min_block_size_k(asked.dtype):
            k //= 2
        else:
            m, n = (m // 2, n) if m >= n else (m, n // 2)
    return {"BLK_M": m, "BLK_N": n, "BLK_K": k, "num_stages": stages}


def _heap(asked: Arguments, given: Collection[str], device: Device) -> Changes:
    room = int(device.free_bytes * HEAP_SHARE) >> 20 << 20
    return {"heap_size": min(asked.heap_size, room)}


def shared_extent(arguments: Arguments) -> str:
    """The extent that ranks share: N, the columns of B, for all_scatter, else K."""
    return "n" if arguments.algorithm == "all_scatter" else "k"


def ignored(arguments: Arguments, given: Collection[str], device: Device, stream_k: bool) -> list[str]:
    """Lines about the flags that were ``given`` and have no effect on this run."""
    unused: dict[str, Sequence[str]] = {}
    if device.backend != "hip":
        unused[f"for AMD GPUs only, this is {device.backend}"] = AMD_ONLY
    if not arguments.split:
        unused["no programs only communicate"] = ("COMMUNICATION_TILE_M", "COMMUNICATION_TILE_N", "total_sms")
    if not stream_k:
        unused["it belongs to Stream-K (examples/stream-k/benchmark.py)"] = ("two_tiles",)
    unused["the communication tile says what is moved at a time"] = ("communication_block_size",)
    lines = []
    for why, flags in unused.items():
        if names := [flag for flag in flags if flag in given]:
            lines.append(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} ignored: {why}")
    return lines


def config_of(arguments: Arguments, stream_k: bool) -> FusedConfig:
    """The config that the fitted arguments stand for."""
    algorithms = {"all_reduce": "atomic", "one_shot": "one_shot", "all_scatter": "split" if arguments.split else "push"}
    return FusedConfig(
        algorithm=algorithms[arguments.algorithm],
        block_size_m=arguments.BLK_M,
        block_size_n=arguments.BLK_N,
        block_size_k=arguments.BLK_K,
        group_size_m=arguments.gsize_m,
        num_sms=arguments.total_sms if arguments.split else arguments.gemm_sms,
        comm_sms=arguments.total_sms - arguments.gemm_sms if arguments.split else None,
        comm_block_m=arguments.COMMUNICATION_TILE_M,
        comm_block_n=arguments.COMMUNICATION_TILE_N,
        stream_k=stream_k,
        two_tiles=arguments.two_tiles,
        num_warps=arguments.num_warps,
        num_stages=arguments.num_stages,
        waves_per_eu=arguments.waves_per_eu,
        matrix_instr_nonkdim=arguments.mfmaInstrSize,
        kpack=arguments.kpack,
    )
