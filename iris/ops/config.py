"""How an op runs: algorithm, block sizes and launch options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from iris.errors import ArgumentError
from iris.ops.algorithms import EXCHANGING
from iris.ops.rows import Rows, chunks_of

LAYOUTS = ("k_contiguous", "m_contiguous")
"""How A is staged: row by row, or column by column."""
_KINDS: dict[str, type] = {
    "algorithm": str, "staged_a_layout": str, "stream_k": bool, "two_tiles": bool, "own_matmul": bool,
    "chunk_growth": float,
}  # fmt: skip
"""Types of fields that are no numbers."""
_BLOCKS = (
    ("block_size_m", "block_size_n"), ("block_size_m", "block_size_k"), ("block_size_k", "block_size_n"),
    ("comm_block_m", "comm_block_n"),
)  # fmt: skip
MAX_BLOCK_ELEMENTS = 1 << 20
"""Of a block, in Triton."""
MAX_GROUP_M = 4096
"""Rows of tiles in a group: tiles are counted in 32 bits."""
_BARRIERS_NBYTES = 256
"""More than the pipeline's barriers take beside its stages."""
_PADDED = 32
"""Of so many bytes of a stage that is loaded into LDS there is one more."""
_MAX_GROWTH = 16
"""Of one chunk beside the one before, either way."""
MI300_SHARED_NBYTES, MI350_SHARED_NBYTES = 64 << 10, 160 << 10
"""LDS that a program may have on gfx942 and on gfx950."""
WARPS = (1, 2, 4, 8, 16, 32)
"""What ``num_warps`` may be."""
OF_TILE = ("block_size_m", "block_size_n", "block_size_k", "num_warps", "num_stages")
"""Fields of a tile, which each candidate has values of its own for, whether its algorithm has a use for them or not."""


FLAGGED_RANKS = 4
"""Ranks that flag each copy. Of 8, one word behind all copies of a chunk is up to 10 µs faster, of 4 it is 1 to 3 µs
slower (2 × H100 that stand for them, 2026-11-25)."""
RELAY_TEAM = 8
"""Programs that carry a chunk round the ring together: of 32 that send, teams of 8 were faster than one of all, or two
of 16 (2 × H200 that stand for 8, 2026-11-26)."""


def flagged_one_by_one(world_size: int) -> bool:
    """Where a rank waits for the copies of a chunk to all ranks together: whether each has a flag of its own behind it,
    rather than all of them one word."""
    return world_size <= FLAGGED_RANKS


def most_warps(backend: str) -> int:
    """Of a program, which has at most 1024 threads. On AMD a warp, or wave, has 64."""
    return max(WARPS) // (2 if backend == "hip" else 1)


def min_block_size_k(dtype: torch.dtype) -> int:
    """The least ``block_size_k`` that tl.dot takes."""
    return 32 if dtype.itemsize == 1 else 16


@dataclass(frozen=True)
class FusedConfig:
    """Options of a fused op. ``config=None`` picks them (:func:`iris.ops.pick_config`). One config may serve several
    algorithms: each ignores the options that it does not use, but what no launch could have is refused for all.

    Attributes:
        algorithm: how communication overlaps with compute; each op has its own names, and ``"auto"`` picks one.
        block_size_m, block_size_n, block_size_k: the tile of one program; powers of two, at least 16;
            ``block_size_k`` at least 32 for int8 and fp8.
        group_size_m: rows of tiles computed together, for L2 reuse; at most 4096.
        num_sms: programs of the matmul kernel; at most the device's SMs, since waiting programs must all be resident.
            None takes all.
        num_chunks: chunks in which a rank's part of A, or of the output, is transferred; with ``decomposed`` and
            ``ring``, and in gathers, more than 64 count as 64.
        chunk_growth: with ``decomposed``, the length of each chunk over that of the one before, 1/16 to 16. Above 1 the
            first chunk is the shortest, so that a transfer that takes longer than the matmul starts early; below 1 the
            last, so that little is left to transfer when the matmul is done.
        owners_per_matmul: how many ranks' rows one matmul computes, with ``decomposed`` of all-reduce, and of
            reduce-scatter and gathers of rows in one chunk; twice as many in a chunk half as long as the first. More
            than 1 fills the device where one rank's rows are too few; but sums are sent later, and a gather waits for
            more rows before it computes.
        stream_k: split the tiles of the last waves evenly over all programs, along K (Stream-K).
        two_tiles: with ``stream_k``, split one to two tiles' worth per program. False, mostly faster, splits less than
            one.
        own_matmul: with ``low_latency`` and ``low_latency_two_shot``, the matmul by Iris's kernel, with this config's
            tile, not by ``torch.matmul``.
        num_rounds: rounds into which each rank's tiles are divided where tiles of different ranks alternate: gathers of
            rows, ``push`` and ``atomic`` of sums, and ``two_shot``.
        comm_sms: programs that only communicate, where the algorithm has such. None: the algorithm picks a number, for
            ``push`` of a gather none: all programs communicate first, then compute.
        comm_block_m, comm_block_n: the tile that a communicating program moves at a time, or a kernel that sums, as in
            ``decomposed``, sums at a time.
        k_per_flag: blocks of K per ready flag, where ``comm_sms`` programs move A.
        staged_a_layout: how ``hbm_buffer`` stages A: ``"k_contiguous"`` (row by row) or ``"m_contiguous"``.
        num_fetch_stages: stages of equal size in which ``comm_sms`` programs move A; the first may have more programs.
        first_stage_fetch_sms: programs that move the first stage; those beyond ``comm_sms`` then compute. None: as many
            as in the other stages.
        num_warps, num_stages: as Triton has them.
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
        """This config with the fields in ``values`` replaced. ``comm_sms`` and ``first_stage_fetch_sms``, where they
        are not among these, become None if they no longer fit the number of programs launched."""
        given_up: dict[str, Any] = {}
        programs = values.get("num_sms", self.num_sms)
        if isinstance(programs, int):
            if (self.comm_sms or 0) >= programs:
                given_up["comm_sms"] = None
            if (self.first_stage_fetch_sms or 0) > programs:
                given_up["first_stage_fetch_sms"] = None
        return replace(self, **{**given_up, **values})

    def groups(self, rows: int) -> int:
        """How many groups of ``group_size_m`` rows of tiles ``rows`` rows make."""
        return -(-rows // (self.block_size_m * self.group_size_m))

    def cut(self, rows: int) -> list[Rows]:
        """``rows`` in chunks, as ``decomposed`` cuts them."""
        return chunks_of(rows, self.num_chunks, self.block_size_m, self.chunk_growth)

    def owners(self, chunks: Sequence[Rows], chunk: int = 0, *, everywhere: bool = False) -> int:
        """How many ranks' rows one matmul computes of chunk number ``chunk``; ``chunks``: how each rank's rows are cut.
        With several chunks more than one rank's only where the sums go ``everywhere``, since only there are rows of
        several ranks adjacent; shorter chunks take more ranks' rows, so that all matmuls are about as long."""
        if len(chunks) == 1:
            return self.owners_per_matmul
        if not everywhere:
            return 1
        return -(-self.owners_per_matmul * chunks[0].count // chunks[chunk].count)

    def comm_programs(self, op: str, num_sms: int) -> int:
        """Programs that only move data, for an algorithm that has such: ``comm_sms``, or an eighth of those launched.

        Raises:
            ArgumentError: none would be left to compute.
        """
        programs = self.num_sms or num_sms
        if programs < 2:
            raise ArgumentError(op, "config.num_sms", f"at least 2 for {self.algorithm}", programs)
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
    """What a config is picked for.

    Attributes:
        backend: ``"cuda"``, ``"hip"`` or ``"sim"``.
        num_sms: SMs (compute units).
        tma: whether tiles are loaded by TMA.
        excluded: algorithms that cannot run, e.g. as the heap has no room for what peers send.
        hardware: the device as PyTorch calls it, ``"simulated"`` in the simulator; tuned rows are looked up by it. Of
            hardware that is not known the model takes figures of the same vendor's.
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
        """How many of a pipelined loop's stages are there, not in shared memory: one on AMD, but where there is more of
        that, and Triton (3.9) has every stage loaded into it."""
        return int(self.backend == "hip" and (self.shared_nbytes or 0) <= MI300_SHARED_NBYTES)

    def nbytes_of_stages(self, config: FusedConfig, itemsize: int) -> int:
        """Shared memory that the loop over K of a tile takes."""
        rows = config.block_size_m + config.block_size_n
        stages = max(1, config.num_stages - self.stages_in_registers)
        nbytes = stages * rows * config.block_size_k * itemsize
        if self.backend == "cuda":
            return nbytes + _BARRIERS_NBYTES
        return nbytes if self.stages_in_registers else nbytes + nbytes // _PADDED
