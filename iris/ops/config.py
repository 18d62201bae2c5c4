"""How an op runs: algorithm, block sizes and launch options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from iris.errors import ArgumentError
from iris.ops.algorithms import EXCHANGING
from iris.ops.problem import QUANTISED, Problem
from iris.ops.rows import Rows, chunks_of, evenly

LAYOUTS = ("k_contiguous", "m_contiguous")
"""Layouts of staged A: row by row, or column by column."""
_KINDS: dict[str, type] = {
    "algorithm": str, "staged_a_layout": str, "stream_k": bool, "two_tiles": bool, "own_matmul": bool,
    "chunk_growth": float,
}  # fmt: skip
"""Types of the fields that are not ints."""
_BLOCKS = (
    ("block_size_m", "block_size_n"), ("block_size_m", "block_size_k"), ("block_size_k", "block_size_n"),
    ("comm_block_m", "comm_block_n"),
)  # fmt: skip
MAX_BLOCK_ELEMENTS = 1 << 20
"""The most elements that a block may have in Triton."""
MAX_GROUP_M = 4096
"""The most rows of tiles in a group: tiles are counted in 32 bits."""
_BARRIERS_NBYTES = 256
"""An upper bound of the bytes that the pipeline's barriers take beside its stages."""
_PADDED = 32
"""A stage that is loaded into LDS is padded: for each so many bytes it takes one more."""
_MAX_GROWTH = 16
"""The most by which one chunk may be longer, or shorter, than the one before."""
MI300_SHARED_NBYTES, MI350_SHARED_NBYTES = 64 << 10, 160 << 10
"""LDS that a program may have on gfx942 and on gfx950."""
WARPS = (1, 2, 4, 8, 16, 32)
"""Possible values of ``num_warps``."""
OF_TILE = ("block_size_m", "block_size_n", "block_size_k", "num_warps", "num_stages")
"""Fields of a tile. Every candidate sets them, whether its algorithm uses them or not."""


FLAGGED_RANKS = 4
"""The largest number of ranks with which each copy has its own flag. With 8 ranks, one word behind all copies of a
chunk is up to 10 µs faster than a flag for each; with 4 it is 1 to 3 µs slower (2 × H100 that stand for them,
2026-11-25)."""
RELAY_TEAM = 8
"""Programs that carry a chunk round the ring together: with 32 sending programs, teams of 8 were faster than one team
of 32, or two of 16 (2 × H200 that stand for 8, 2026-11-26)."""


def flagged_one_by_one(world_size: int) -> bool:
    """Whether each copy of a chunk has a flag behind it, where a rank waits for the copies from all ranks together;
    otherwise one word follows all copies of the chunk."""
    return world_size <= FLAGGED_RANKS


def most_warps(backend: str) -> int:
    """The most warps of a program, which has at most 1024 threads. On AMD a warp (wave) has 64 threads."""
    return max(WARPS) // (2 if backend == "hip" else 1)


def min_block_size_k(dtype: torch.dtype) -> int:
    """The least ``block_size_k`` that tl.dot takes."""
    return 32 if dtype.itemsize == 1 else 16


@dataclass(frozen=True)
class FusedConfig:
    """Options of a fused op. ``config=None`` picks them (:func:`iris.ops.pick_config`). One config may serve several
    algorithms: each ignores the options that it does not use, but values that no launch could have are refused for all.

    Attributes:
        algorithm: how communication overlaps with compute; each op has its own names, and ``"auto"`` picks one.
        block_size_m, block_size_n, block_size_k: the tile of one program; powers of two, at least 16;
            ``block_size_k`` at least 32 for int8 and fp8.
        group_size_m: rows of tiles computed together, for L2 reuse; at most 4096.
        num_sms: programs of the matmul kernel; at most the device's SMs, since waiting programs must all be resident.
            None takes all SMs.
        num_chunks: chunks in which a rank's part of A, or of the output, is transferred; with ``decomposed`` and
            ``ring``, and in gathers, more than 64 count as 64.
        chunk_growth: with ``decomposed``, the length of each chunk divided by that of the one before, 1/16 to 16. Above
            1 the first chunk is the shortest, so that a transfer that takes longer than the matmul starts early. Below
            1 the last chunk is, so that little is left to transfer when the matmul is done.
        owners_per_matmul: the number of ranks whose rows one matmul computes, with ``decomposed``: in all-reduce, and,
            with one chunk, in reduce-scatter and gathers of rows. A chunk half as long as the first takes twice as many
            ranks' rows. More than 1 fills the device where one rank's rows are too few; but sums are sent later, and a
            gather waits for more rows before it computes. In a gather of columns it is, with one chunk, the number of
            ranks whose columns one matmul multiplies; its product is rounded and added to those before. If it is all
            ranks, or more, nothing is added up: each chunk of rows is multiplied when all its columns are there. So are
            8-bit dtypes.
        stream_k: split the tiles of the last waves evenly over all programs, along K (Stream-K).
        two_tiles: with ``stream_k``, split so many tiles that each program gets one to two tiles' worth. False, which
            is mostly faster, gives each less than one.
        own_matmul: with ``low_latency`` and ``low_latency_two_shot``, compute the matmul by Iris's kernel, with this
            config's tile, not by ``torch.matmul``.
        num_rounds: rounds into which each rank's tiles are divided where tiles of different ranks alternate: in gathers
            of rows, ``push`` and ``atomic`` of sums, and ``two_shot``.
        comm_sms: programs that only communicate, if the algorithm has such programs. None: the algorithm picks a
            number; for a gather's ``push`` it is 0, and all programs communicate first, then compute.
        comm_block_m, comm_block_n: the tile that a communicating program moves at a time, or that a program sums at a
            time in kernels that only sum, as in ``decomposed``.
        k_per_flag: blocks of K for each flag that announces A, where ``comm_sms`` programs move A.
        staged_a_layout: the layout in which ``hbm_buffer`` stages A: ``"k_contiguous"`` (row by row) or
            ``"m_contiguous"``.
        num_fetch_stages: stages of equal size in which ``comm_sms`` programs move A; the first may have more programs.
        first_stage_fetch_sms: programs that move the first stage; those beyond ``comm_sms`` then compute. None: as many
            as in the other stages.
        num_warps, num_stages: Triton's launch options.
        waves_per_eu, matrix_instr_nonkdim, kpack: AMD only, passed to the compiler there.
    """

    algorithm: str = "auto"
    block_size_m: int = 128
    block_size_n: int = 128
    block_size_k: int = 64
    group_size_m: int = 8
    num_sms: int | None = None
    num_chunks: int = 1
    chunk_growth: float = 1.0
    owners_per_matmul: int = 1
    stream_k: bool = False
    two_tiles: bool = False
    own_matmul: bool = False
    num_rounds: int = 1
    comm_sms: int | None = None
    comm_block_m: int = 64
    comm_block_n: int = 128
    k_per_flag: int = 8
    staged_a_layout: str = "k_contiguous"
    num_fetch_stages: int = 1
    first_stage_fetch_sms: int | None = None
    num_warps: int = 8
    num_stages: int = 3
    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 16
    kpack: int = 1

    @property
    def tile_elements(self) -> int:
        """Elements of a tile of the output."""
        return self.block_size_m * self.block_size_n

    def check(self, op: str, algorithms: tuple[str, ...], num_sms: int, dtype: torch.dtype | None = None) -> None:
        """Raise ArgumentError, naming the field, if this config cannot run ``op`` on ``num_sms`` SMs with ``dtype``."""
        for field in fields(self):
            value, kind = getattr(self, field.name), _KINDS.get(field.name, int)
            fits = type(value) is kind or (kind is float and type(value) is int)
            if not fits and not (value is None and field.default is None):
                raise ArgumentError(op, f"config.{field.name}", f"of type {kind.__name__}", repr(value))
        if self.algorithm not in algorithms:
            raise ArgumentError(op, "config.algorithm", f"one of {', '.join(algorithms)}", repr(self.algorithm))
        if self.own_matmul and self.algorithm not in EXCHANGING:
            expected = f"False, or one of {', '.join(EXCHANGING)} as algorithm"
            raise ArgumentError(op, "config.own_matmul", expected, f"True with {self.algorithm}")
        for name in ("block_size_m", "block_size_n", "block_size_k", "comm_block_m", "comm_block_n"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ArgumentError(op, f"config.{name}", "a power of two, at least 16", size)
        for rows, cols in _BLOCKS:
            if (elements := getattr(self, rows) * getattr(self, cols)) > MAX_BLOCK_ELEMENTS:
                expected = f"at most {MAX_BLOCK_ELEMENTS} elements, as Triton takes"
                raise ArgumentError(op, f"config.{rows} x {cols}", expected, elements)
        if dtype is not None and self.block_size_k < min_block_size_k(dtype):
            expected = f"at least {min_block_size_k(dtype)} for {dtype}, as tl.dot needs"
            raise ArgumentError(op, "config.block_size_k", expected, self.block_size_k)
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "waves_per_eu" else 1
            if type(value) is int and value < least:
                expected = f"a positive number{'' if least else ' or 0'}"
                raise ArgumentError(op, f"config.{field.name}", expected, value)
        if self.group_size_m > MAX_GROUP_M:
            raise ArgumentError(op, "config.group_size_m", f"at most {MAX_GROUP_M} rows of tiles", self.group_size_m)
        if not 1 / _MAX_GROWTH <= self.chunk_growth <= _MAX_GROWTH:
            raise ArgumentError(op, "config.chunk_growth", f"1/{_MAX_GROWTH} to {_MAX_GROWTH}", self.chunk_growth)
        if self.num_warps not in WARPS:
            raise ArgumentError(op, "config.num_warps", f"one of {', '.join(map(str, WARPS))}", self.num_warps)
        programs = self.num_sms or num_sms
        if programs > num_sms:
            raise ArgumentError(
                op, "config.num_sms", f"at most {num_sms}, the SMs of this device", programs,
                "Programs that wait for peers must all be resident at once.",
            )  # fmt: skip
        if self.comm_sms is not None and self.comm_sms >= programs:
            raise ArgumentError(
                op, "config.comm_sms", f"less than the {programs} programs of the launch", self.comm_sms,
                "Some must be left to compute.",
            )  # fmt: skip
        if self.first_stage_fetch_sms is not None and self.first_stage_fetch_sms > programs:
            expected = f"at most {programs}, the programs of the launch"
            raise ArgumentError(op, "config.first_stage_fetch_sms", expected, self.first_stage_fetch_sms)
        if self.staged_a_layout not in LAYOUTS:
            raise ArgumentError(
                op, "config.staged_a_layout", f"one of {', '.join(LAYOUTS)}", repr(self.staged_a_layout)
            )

    def with_fields(self, values: Mapping[str, Any]) -> FusedConfig:
        """This config with the fields in ``values`` replaced. If ``values`` has no ``comm_sms`` or
        ``first_stage_fetch_sms``, these become None if they no longer fit the number of programs."""
        given_up: dict[str, Any] = {}
        programs = values.get("num_sms", self.num_sms)
        if isinstance(programs, int):
            if (self.comm_sms or 0) >= programs:
                given_up["comm_sms"] = None
            if (self.first_stage_fetch_sms or 0) > programs:
                given_up["first_stage_fetch_sms"] = None
        return replace(self, **{**given_up, **values})

    def tiles(self, rows: int, cols: int) -> int:
        """The number of tiles in a matrix of ``rows`` × ``cols``."""
        return -(-rows // self.block_size_m) * -(-cols // self.block_size_n)

    def groups(self, rows: int) -> int:
        """The number of groups, of ``group_size_m`` rows of tiles each, in ``rows`` rows."""
        return -(-rows // (self.block_size_m * self.group_size_m))

    def cut_in_groups(self, rows: int, most: int | None = None) -> tuple[int, int]:
        """The number of chunks, at most ``most`` (None: as many as possible), in which ``rows`` travel as their tiles
        are finished, and the rows of tiles in each. A chunk is whole groups, so that its tiles are consecutive and its
        rows complete."""
        groups = self.groups(rows)
        count, each = evenly(groups, most or groups)
        return count, each * self.group_size_m

    def cut(self, rows: int) -> list[Rows]:
        """``rows`` in chunks, as ``decomposed`` cuts them."""
        return chunks_of(rows, self.num_chunks, self.block_size_m, self.chunk_growth)

    def owners(self, chunks: Sequence[Rows], chunk: int = 0, *, everywhere: bool = False) -> int:
        """The number of ranks whose rows, or columns, one matmul takes in chunk number ``chunk``; ``chunks``: those
        into which each rank's rows are cut. With several chunks, it is more than one only if the sums go
        ``everywhere``, since only then are rows of several ranks adjacent. Shorter chunks take more ranks' rows, so
        that all matmuls are about equally long."""
        if len(chunks) == 1:
            return self.owners_per_matmul
        if not everywhere:
            return 1
        return -(-self.owners_per_matmul * chunks[0].count // chunks[chunk].count)

    def adds_columns(self, problem: Problem) -> bool:
        """Whether a gather of columns multiplies some ranks' columns at a time, as they arrive, and adds up the
        products; else it waits for all ranks' columns of a chunk of rows. Products of 8 bits are not added up."""
        by_columns = self.algorithm == "decomposed" and problem.gather_dim == 1
        return by_columns and self.owners_per_matmul < problem.world_size and problem.dtype not in QUANTISED

    def comm_programs(self, op: str, num_sms: int) -> int:
        """The number of programs that only move data, for an algorithm that has such programs.

        Raises:
            ArgumentError: no program would be left to compute.
        """
        programs = self.num_sms or num_sms
        if programs < 2:
            raise ArgumentError(op, "config.num_sms", f"at least 2 for {self.algorithm}", programs)
        return self.senders_among(programs)

    def senders_among(self, programs: int) -> int:
        """How many of ``programs`` only move data: ``comm_sms``, or an eighth."""
        return self.comm_sms or max(1, programs // 8)

    def launch_options(self, target: Target) -> dict[str, int]:
        """Keyword arguments of a kernel launch on ``target``."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if target.backend == "hip":
            options |= {
                "waves_per_eu": self.waves_per_eu,
                "matrix_instr_nonkdim": self.matrix_instr_nonkdim,
                "kpack": self.kpack,
            }
        return options


@dataclass(frozen=True)
class Target:
    """The device that a config is picked for.

    Attributes:
        backend: ``"cuda"``, ``"hip"`` or ``"sim"``.
        num_sms: SMs (compute units).
        tma: whether tiles are loaded by TMA.
        excluded: algorithms that cannot run, for example because the heap has no room for what peers send.
        hardware: PyTorch's name of the device, ``"simulated"`` in the simulator; tuned rows are looked up by it. For
            unknown hardware the model takes the figures of a GPU of the same vendor.
        shared_nbytes: shared memory (LDS) that a program may have; None for what H200 (MI300X) has.
    """

    backend: str
    num_sms: int
    tma: bool = False
    excluded: tuple[str, ...] = ()
    hardware: str = ""
    shared_nbytes: int | None = None

    @property
    def stages_in_registers(self) -> int:
        """The number of a pipelined loop's stages that are in registers, not in shared memory. It is one on AMD, except
        on GPUs with more shared memory, where Triton (3.9) loads every stage into it."""
        return int(self.backend == "hip" and (self.shared_nbytes or 0) <= MI300_SHARED_NBYTES)

    def nbytes_of_stages(self, config: FusedConfig, itemsize: int) -> int:
        """The bytes of shared memory that a tile's loop over K takes."""
        rows = config.block_size_m + config.block_size_n
        stages = max(1, config.num_stages - self.stages_in_registers)
        nbytes = stages * rows * config.block_size_k * itemsize
        if self.backend == "cuda":
            return nbytes + _BARRIERS_NBYTES
        return nbytes if self.stages_in_registers else nbytes + nbytes // _PADDED
