"""How long an op takes with a config, from the hardware's figures: arithmetic only, no GPU.

The matmul is waves of tiles over programs, at a rate per program that depends on the tile. What moves is bytes over a
rate that depends on the engine, plus a time per copy, flag or launch. Each algorithm puts the two together as it does: one
after the other, side by side, or tile by tile as parts arrive; see :mod:`iris.ops` for what each does.

Constants are what 4 × H200 took (Triton 3.6, 2026-11-21), scaled by the figures of :mod:`iris.ops.hardware` to
other hardware. There nobody has measured, so a prediction for it orders configs, and its milliseconds are an estimate.

How far off it is: tests/data/h200_measured.json holds {COUNT} of those measurements, all ops, 2 to 16 thousand rows. The
predicted time is {MEDIAN} off in the median, and between {LOW} and {HIGH} times the measured one; clocks alone make 10 %
between two measurements of the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from iris.ops.config import FusedConfig
from iris.ops.hardware import Hardware
from iris.ops.problem import Problem, output_dtype

_LAUNCH_S = 6e-6
"""A kernel's start and end, its entry's flags among them."""
_FLAG_S = 1.2e-6
"""A flag's way to a peer."""
_MEET_S = 6e-6
"""All ranks' flags, from when a rank has done its part until it sees that all have."""
_COPY_S = 3.6e-6
"""A copy by the copy engine, however short; a flag behind it, or a wait before it, counts about half."""
_COPY_RATES = ((64 << 10, 0.05), (1 << 20, 0.42), (4 << 20, 0.50), (16 << 20, 0.72), (32 << 20, 0.97), (64 << 20, 1.0))
"""Bytes of a copy among others to other peers, and its rate as a share of the best."""
_PROGRAM_STORE_BYTES_PER_S = 20e9
_PROGRAM_LOAD_BYTES_PER_S = 12e9
"""What one program moves to or from a peer at most."""
_FETCH_S, _FETCH_BYTES_PER_S = 1.6e-6, 15.5e9
"""A fetcher's turn, however small its tile, and the rate at which it then loads and stores."""
_SHARE_OF_PEAK = {"store": 0.81, "load": 0.74, "copy": 0.86, "flops": 0.81, "memory": 0.8}
"""What H200 reaches of its data sheet, for rates of other hardware that nobody has measured."""
_SPREAD_MATMUL = 0.6
"""The share of its peak that a matmul reaches on MI300X, as published for Triton; not measured here."""

_REFERENCE_INTENSITY = 128 * 256 / (128 + 256)
_INTENSITY_LOST = 30.0
"""A tile of m × n works off m · n / (m + n) products per element loaded into shared memory; half of the best possible
rate is reached at this many."""
_ONE_WARPGROUP = 0.945
"""Four warps have nothing to do while they wait: their rate against eight's."""
_BURST_S, _BURST, _TIRED_S, _TIRED = 0.25e-3, 1.05, 1.2e-3, 0.90
"""Short matmuls run at a higher clock than the sustained one, long ones in a row at a lower one."""
_PROGRAM_L2_BYTES_PER_S = 130e9
_TILE_S = 2e-6
"""From one tile to the next: its epilogue, and filling the pipeline again."""
_SPLIT_S, _SPLIT_TILE_S = 0.018e-3, 0.02e-3 / (128 * 256)
_SPLIT_SLOWDOWN = 0.35
"""Stream-K: programs handing parts over, and more for larger tiles; and how much slower the split tiles run, as programs
no longer share what L2 holds."""
_OVERLAP, _OVERLAP_WAVES = 0.45, 14
"""Where programs store to peers between tiles: the share of the shorter of both that runs beside the longer one, once
programs have drifted apart for this many waves."""
_COLLECT_BYTES_PER_S = 32e9
"""At which one program reads what peers have sent for its tile."""


def predict_ms(problem: Problem, config: FusedConfig, hardware: Hardware) -> float:
    """Milliseconds that a call takes on the device, between ranks that begin together.

    Args:
        problem: the call.
        config: with an algorithm of the op's, not "auto".
        hardware: its figures.

    Raises:
        KeyError: the op has no such algorithm.
    """
    return 1e3 * _ALGORITHMS[problem.op, config.algorithm](_Call(problem, config, _machine(hardware, problem.dtype)))
