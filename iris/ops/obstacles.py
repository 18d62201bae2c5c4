"""Reasons why a config cannot run a problem. Pure: no GPU."""

from __future__ import annotations

from iris.ops.algorithms import ALL_REDUCE, GATHER, LIBRARY, TRAITS, algorithms
from iris.ops.config import MI300_SHARED_NBYTES, FusedConfig, Target, most_warps
from iris.ops.problem import QUANTISED, Problem
from iris.ops.rows import MAX_CHUNKS
from iris.ops.words import sent_in_words, words_nbytes

SHARED_NBYTES = {"cuda": 227 << 10, "hip": MI300_SHARED_NBYTES}
"""Shared memory of one program if a target does not say: that of sm_90 and sm_100, and of gfx942."""
_SUM_NBYTES = 4
"""Bytes of a float32 sum. Before a tile is added by atomics, threads exchange its sums through shared memory."""
_WORDS_SHARED = 0.25
"""The share of a tile's words that is in shared memory at a time when threads exchange them (gfx942)."""
SUMS_PER_THREAD = 128
"""float32 sums that a thread keeps in registers, half of the 255 that it can have; more are spilled to memory."""


def obstacle(problem: Problem, config: FusedConfig, target: Target) -> str | None:
    """Why ``config`` cannot run ``problem`` on ``target``, or would run just as another config does; None if
    neither."""
    algorithm, programs = config.algorithm, config.num_sms or target.num_sms
    if algorithm not in algorithms(problem.op):
        return f"{problem.op} has no algorithm {algorithm}"
    if algorithm in target.excluded:
        return f"{algorithm} is excluded"
    if programs > target.num_sms:
        return f"{programs} programs on {target.num_sms} SMs"
    if algorithm == "relay" and problem.world_size < 3:
        return "relay passes data on from rank to rank, which takes 3 ranks or more"
    moving = min_comm_programs(problem.op, config)
    if moving >= programs:
        return f"{moving} of {programs} programs would only move data"
    if (config.first_stage_fetch_sms or 0) > programs:
        return f"{config.first_stage_fetch_sms} programs to move the first stage, of {programs}"
    if config.num_chunks > MAX_CHUNKS:
        return f"{config.num_chunks} chunks: {MAX_CHUNKS} at most"
    rows = -(-problem.m // config.block_size_m)
    if config.num_chunks > max(1, rows):
        return f"{config.num_chunks} chunks of {rows} block rows"
    if problem.op == GATHER and config.num_rounds > 1 and (problem.gather_dim == 1 or problem.world_size < 3):
        return f"{config.num_rounds} rounds, where no two other ranks' rows take turns"
    together = problem.world_size - 1  # in one chunk: with all ranks' rows at once, nothing would overlap
    if config.num_chunks > 1:
        together = problem.world_size if problem.op == ALL_REDUCE else 1
    if problem.gather_dim == 1 and problem.dtype in QUANTISED:  # always all ranks' columns
        together = 1
    elif problem.gather_dim == 1 and config.owners_per_matmul == problem.world_size:
        together = problem.world_size
    if config.owners_per_matmul > max(1, together):
        return f"parts of {config.owners_per_matmul} of {problem.world_size} ranks in {config.num_chunks} chunks"
    if problem.op == ALL_REDUCE and algorithm == "copy_engine" and problem.m % problem.world_size:
        return f"{problem.m} rows cannot be shared evenly by {problem.world_size} ranks"
    return None if has_no_tile(config) else too_large(problem, config, target)


def too_large(problem: Problem, config: FusedConfig, target: Target) -> str | None:
    """Which resource of a program a tile exceeds, in words; None if it fits."""
    backend = target.backend
    if backend not in SHARED_NBYTES:
        return None
    most = target.shared_nbytes or SHARED_NBYTES[backend]
    m, n = config.block_size_m, config.block_size_n
    shared = target.nbytes_of_stages(config, problem.dtype.itemsize)
    if TRAITS[problem.op][config.algorithm].atomic:
        shared = max(shared, m * n * _SUM_NBYTES)
    if sent_in_words(problem, config):
        shared = max(shared, int(words_nbytes(m * n, problem.output_dtype) * _WORDS_SHARED))
    if shared > most:
        return f"{shared} bytes of shared memory: {most} at most"
    if config.num_warps > most_warps(backend):
        return f"{config.num_warps} warps: {most_warps(backend)} at most"
    threads = config.num_warps * (32 if backend == "cuda" else 64)
    if m * n > SUMS_PER_THREAD * threads:
        return f"{m * n // threads} sums per thread: {SUMS_PER_THREAD} at most"
    return None


def min_comm_programs(op: str, config: FusedConfig) -> int:
    """The least number of programs that only move data."""
    return config.comm_sms or int(TRAITS[op][config.algorithm].comm_programs)


def has_no_tile(config: FusedConfig) -> bool:
    """Whether the tile does not matter, because the matmul is the library's."""
    return config.algorithm in LIBRARY and not config.own_matmul
