"""Generated results: lines as ``iris bench`` would write them on machines that the tests do not have."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]

ALGORITHMS = {
    "all_gather_matmul": ("auto", "copy_engine", "push", "pull", "nccl", "torch_symm_mem", "matmul"),
    "matmul_reduce_scatter": ("auto", "push", "atomic", "nccl", "torch_symm_mem", "matmul"),
    "matmul_all_reduce": ("one_shot", "two_shot", "nccl", "matmul"),
}
PARTS = {"all_gather_matmul": 1, "matmul_reduce_scatter": 1, "matmul_all_reduce": 2}
"""How often the gathered or reduced matrix crosses the links."""
OVERHEAD_US = {
    "nccl": 38,
    "torch_symm_mem": 75,
    "matmul": 6,
    "auto": 48,
    "one_shot": 9,
    "two_shot": 16,
    "copy_engine": 45,
}
LARGE = ((8192, 8192, 29568), (8192, 29568, 8192), (4096, 4096, 14336))
SWEPT = (28672, 8192)
SIZES_OF_SWEEP = (1, 16, 128, 1024, 4096, 16384)
H200 = {
    "hardware": "NVIDIA H200",
    "backend": "cuda",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "cuda": "13.0",
    "nccl": "2.28.9",
    "iris": "0.1.0",
    "commit": "abc1234",
    "date": "2026-11-21T04:40:00Z",
    "host_ranks": 4,
}
SIMULATED = H200 | {"hardware": "x86_64 CPU", "backend": "sim", "cuda": None, "nccl": None}


def record(case: str, algorithm: str, shape: tuple[int, int, int], world_size: int, seed: int = 0) -> Record:
    """A record as ``iris bench`` writes it, from a simple model of the hardware and some noise."""
    m, n, k = shape
    rng = random.Random(f"{seed} {case} {algorithm} {shape} {world_size}")
    flops, moved = 2 * m * n * k // world_size, 2 * m * (k if case == "all_gather_matmul" else n)
    nbytes = PARTS[case] * moved * (world_size - 1) // world_size
    matmul_ms, wire_ms = max(flops / 780e9, n * k * 2 / world_size / 4e9), nbytes / 375e6
    floor_ms = max(matmul_ms, wire_ms)
    work_ms = {
        "matmul": matmul_ms,
        "nccl": matmul_ms + 1.15 * wire_ms,
        "torch_symm_mem": 1.05 * max(matmul_ms, wire_ms) + 0.2 * min(matmul_ms, wire_ms),
        "pull": 2.2 * floor_ms,
        "atomic": 1.25 * floor_ms,
        "push": 1.12 * floor_ms,
    }.get(algorithm, 1.06 * floor_ms)
    median = (work_ms + OVERHEAD_US.get(algorithm, 14) / 1e3) * rng.uniform(0.99, 1.01)
    return {
        "schema": 1,
        "case": case,
        "params": {"algorithm": algorithm, "m": m, "n": n, "k": k, "dtype": "bf16", "shape": f"{m}x{n}x{k}"},
        "world_size": world_size,
        "validated": True,
        "skipped": None,
        "error": None,
        "time_ms": {
            "median": median,
            "min": median * 0.985,
            "p10": median * 0.992,
            "p90": median * rng.uniform(1.008, 1.02),
            "rank_skew": median * 0.004,
            "calls": 30,
        },
        "back_to_back_ms": median * 1.01,
        "host_us": 33.0,
        "flops": flops,
        "nbytes": nbytes,
        "floor_ms": floor_ms,
        "floor_share": floor_ms / median,
        "tflops_per_gpu": flops / median / 1e9,
        "gbytes_per_s": nbytes / median / 1e6,
        "predicted_ms": floor_ms * 1.1,
        "config": {"algorithm": "push"} if algorithm == "auto" else None,
        "counters": {"chunks": 4} if algorithm == "copy_engine" else {},
        "environment": H200 | {"host_ranks": world_size},
    }


def without_time(line: Record, **why: Any) -> Record:
    figures = ("time_ms", "back_to_back_ms", "host_us", "floor_share", "tflops_per_gpu", "gbytes_per_s")
    return line | dict.fromkeys(figures) | {"validated": None} | why


def dataset(world_sizes: tuple[int, ...] = (2, 4, 8), seed: int = 0) -> Iterator[Record]:
    """Three shapes and a sweep over M on each number of ranks, some failed, skipped or wrong; one simulated case."""
    shapes = [*LARGE, *((m, *SWEPT) for m in SIZES_OF_SWEEP)]
    for world_size in world_sizes:
        for case, algorithms in ALGORITHMS.items():
            for shape in shapes:
                for algorithm in algorithms:
                    line = record(case, algorithm, shape, world_size, seed)
                    at = (case, algorithm, shape, world_size)
                    if at == ("all_gather_matmul", "pull", LARGE[0], 4):
                        line = without_time(line, error="WaitTimeout: rank 2 waited 60 s for rank 3, flag 17")
                    elif algorithm == "torch_symm_mem" and shape[0] < world_size:
                        line = without_time(line, skipped=f"M = {shape[0]} is not divided by {world_size} ranks")
                    elif at == ("matmul_reduce_scatter", "atomic", LARGE[1], 8):
                        line["validated"] = False
                    yield line
    for algorithm in ("push", "nccl"):
        line = record("all_gather_matmul", algorithm, LARGE[2], 4, seed)
        line["time_ms"] = {name: 1000 * value for name, value in line["time_ms"].items()}
        yield line | {"environment": SIMULATED}


def write(file: Path, lines: Iterator[Record] | list[Record]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
