"""How an op runs: block sizes and launch options, and the choice of them from the problem alone."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from iris.errors import ArgumentError
from iris.ops.problem import Problem

LAYOUTS = ("k_contiguous", "m_contiguous")
"""How A is staged: row by row, or column by column."""


@dataclass(frozen=True)
class FusedConfig:
    """Options of a fused op. ``config=None`` picks them (:func:`pick_config`).

    Attributes:
        algorithm: how data and compute meet; each op names its own, and ``"auto"`` picks.
        block_size_m, block_size_n, block_size_k: the tile of one program; powers of two, at least 16.
        group_size_m: rows of tiles computed together, for L2 reuse.
        num_sms: programs launched; at most the device's SMs, since waiting programs must all be resident.
            None takes all.
        num_chunks: chunks in which a rank's part of A, or of the output, travels.
        stream_k: split the tiles of the last waves evenly over all programs, along K (Stream-K).
        two_tiles: with ``stream_k``, leave each program between one and two tiles' worth to split, not less than one.
        num_rounds: where ranks take turns in a tile order: rounds in which each rank's tiles are divided.
        comm_sms: programs that only move data, where the algorithm has such; None picks a number.
        comm_block_m, comm_block_n: the tile that those programs move at a time.
        k_per_flag: blocks of K that one ready flag of ``hbm_buffer`` announces.
        staged_a_layout: how ``hbm_buffer`` stages A: ``"k_contiguous"`` (row by row) or ``"m_contiguous"``.
        num_fetch_stages: stages, of equal rows, in which ``hbm_buffer`` fetches A.
        first_stage_fetch_sms: programs that fetch the first stage, those beyond ``comm_sms`` then computing; None: the
            same as later.
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
    stream_k: bool = False
    two_tiles: bool = True
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

    def check(self, op: str, algorithms: tuple[str, ...], num_sms: int) -> None:
        """Raise ArgumentError, naming the field, if this config cannot run ``op`` on ``num_sms`` SMs."""
        if self.algorithm not in algorithms:
            raise ArgumentError(op, "config.algorithm", f"one of {', '.join(algorithms)}", repr(self.algorithm))
        for name in ("block_size_m", "block_size_n", "block_size_k", "comm_block_m", "comm_block_n"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ArgumentError(op, f"config.{name}", "a power of two, at least 16", size)
        for field in fields(self):
            value = getattr(self, field.name)
            if (
                isinstance(value, int)
                and not isinstance(value, bool)
                and value < (0 if field.name == "waves_per_eu" else 1)
            ):
                raise ArgumentError(op, f"config.{field.name}", "a positive number", value)
        for name in ("num_sms", "comm_sms", "first_stage_fetch_sms"):
            given = getattr(self, name)
            if given is not None and given > num_sms:
                raise ArgumentError(
                    op, f"config.{name}", f"at most {num_sms}, the SMs of this device", given,
                    "Programs that wait for peers must all be resident at once.",
                )  # fmt: skip
        if self.comm_sms is not None and self.comm_sms >= (self.num_sms or num_sms):
            raise ArgumentError(
                op, "config.comm_sms", f"less than the {self.num_sms or num_sms} programs of the launch", self.comm_sms,
                "Some must be left to compute.",
            )  # fmt: skip
        if self.staged_a_layout not in LAYOUTS:
            raise ArgumentError(
                op, "config.staged_a_layout", f"one of {', '.join(LAYOUTS)}", repr(self.staged_a_layout)
            )

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
    """The hardware that a config is picked for, and whether the heap has room to stage what peers send."""

    backend: str
    num_sms: int
    tma: bool = False
    staging_fits: bool = True


COPY_ENGINE_FROM_BYTES = 4 << 20
"""Parts smaller than this are pulled: a copy costs several microseconds however short it is (H200, 2026-11-21)."""


def pick_algorithm(problem: Problem, target: Target) -> str:
    """What ``"auto"`` stands for; a pure function, the same on every rank."""
    if problem.op != "all_gather_matmul":
        return DEFAULT_ALGORITHMS[problem.op]
    if not target.staging_fits:
        return "pull"
    part = problem.received_bytes // max(1, problem.world_size - 1)
    on_gpus = target.backend in ("cuda", "hip")
    return "copy_engine" if on_gpus and part >= COPY_ENGINE_FROM_BYTES else "push"


DEFAULT_ALGORITHMS = {
    "matmul": "local",
    "matmul_all_scatter": "push",
    "matmul_reduce_scatter": "push",
    "matmul_all_reduce": "two_shot",
}


def pick_config(problem: Problem, target: Target) -> FusedConfig:
    """A config for ``problem`` on ``target``; a pure function, the same on every rank.

    Large 16-bit problems take the tile that reaches cuBLAS's rate on H200 (128×256×64, 8 warps, 3 stages;
    2026-11-21); smaller ones shrink it until the tiles fill the SMs.
    """
    if target.backend == "sim":
        return FusedConfig(pick_algorithm(problem, target), block_size_m=64, block_size_n=64, block_size_k=128)
    block_m, block_n, block_k = 128, 256, 64
    if problem.dtype == torch.float32:
        block_m, block_n, block_k = 64, 64, 32
    elif problem.dtype == torch.int8:
        block_k = 128

    def tiles() -> int:
        return -(-problem.m // block_m) * -(-problem.n // block_n)

    while block_n > 64 and tiles() < target.num_sms:
        block_n //= 2
    while block_m > 64 and tiles() < target.num_sms:
        block_m //= 2
    small = block_m * block_n <= 64 * 128
    return FusedConfig(
        algorithm=pick_algorithm(problem, target),
        block_size_m=block_m,
        block_size_n=block_n,
        block_size_k=block_k,
        num_warps=4 if small else 8,
        num_stages=2 if target.backend == "hip" else 4 if small else 3,
    )
