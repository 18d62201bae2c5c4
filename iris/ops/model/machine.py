"""The rates of one kind of GPU that the model of :mod:`iris.ops.model` needs: for tiles, stores to peers, copies.

Rates of links, memory and tensor cores are those of :mod:`iris.ops.hardware`. The times of one program or one launch
are taken to be the same on any hardware: those measured on 4 × H200 (Triton 3.6, 2026-11-21 and 22), unless something
else is named. Apart from H200, only H100 was measured. On other hardware predictions serve to rank configs, and their
milliseconds are estimates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from iris.ops.config import FusedConfig
from iris.ops.hardware import Hardware
from iris.ops.problem import QUANTISED, Problem

LAUNCH_S = 6e-6
"""A kernel's start and end."""
FLAG_S = 1.2e-6
"""A flag's way to a peer."""
MEET_S = 5e-6
"""From when a rank has flagged its peers until it sees that all have."""
COPY_S = 6e-6
"""The time of a copy by the copy engine beside that for its bytes."""
WORD_S = 2e-6
"""The time in which the copy engine writes a flag behind a copy, or waits for one before it."""

_STORE_BYTES_PER_S, _STORE_HALF = 28e9, 3.0
_LOAD_BYTES_PER_S, _LOAD_HALF = 13e9, 1.5
"""The rate at which one program moves data to (from) peers, and the number of programs that together reach half of what
the links carry."""
_FETCH_S, _FETCH_BYTES_PER_S = 1.6e-6, 15.5e9
"""One tile loaded from a peer into local memory, by one program that waits for it: a fixed time, and a rate."""
_PIECE_S, _AHEAD_BYTES_PER_S = 3.9e-6, 29e9
"""One piece of many tiles, loaded ahead, and its flag: a fixed time, and a rate (2 × H200, 2026-11-23)."""
_SEND_S, _SEND_BYTES_PER_S = 5.6e-6, 30e9
"""One piece stored at a peer, and its flag: a fixed time, and a rate (2 × H100 that stand for 8 and 4, 2026-11-24)."""
_COPY_SHARE, _STORE_SHARE, _LOAD_SHARE = 0.86, 0.81, 0.74
"""The shares of the links' raw rate that H200 reaches, for hardware whose payload rates have not been measured."""
_FLOPS_SHARE, _FLOPS_SHARE_OF_AMD, _FLOAT32_SHARE = 0.81, 0.5, 0.6
"""The share of the peak that a large matmul reaches, where it has not been measured: that of H200; a guess for AMD
GPUs, whose data sheets are further from what compilers reach; and that without tensor cores."""
_MEMORY_SHARE = 0.84
"""The share of memory's nominal rate that kernels reach."""

_REFERENCE = 128 * 256 / (128 + 256)
_LOST = 30.0
"""A tile of m × n makes m · n / (m + n) products with every element that it loads; with this many products it runs at
half the rate of the largest tiles. Rates are relative to 128 × 256."""
_ONE_WARPGROUP = 0.945
"""The relative rate of four warps on NVIDIA GPUs: no other warpgroup computes while they do anything else."""
_NARROW = 0.94
"""The relative rate of two warpgroups with 64 × 128 each: shared memory is read more often for each product."""
_L2_BYTES_PER_S, _COLD_BYTES_PER_S = 130e9, 60e9
"""The rate at which one program can load from L2, and from memory if no other program loads the same."""
_CROWDED_BYTES_PER_S = 47e9
"""The rate at which each program loads A and B in the latter case while all others load, too (local matmuls of 4 to 128
rows, 2026-11-23)."""
_STEP_S, _STEP_FLOPS = 0.45e-6, 4.3e12
"""A step of a loop over K whose tile has fewer than 64 rows, too few for warpgroups: a fixed time, and a rate of its
products (the same matmuls)."""
_TURNED_BYTES_PER_S, _TURNED_FEW_BYTES_PER_S = 12e9, 19e9
"""The rate at which one program transposes a row-major B of 8 bits, which no tensor core takes as it is: with tiles of
32 columns, and lower by the root for wider ones; and with tiles of fewer than 64 rows, where not every warp needs all
of B (local matmuls of 4 to 256 rows of int8, 2026-11-24)."""


@dataclass(frozen=True)
class Machine:
    """Rates of one GPU for one dtype, per second; ``flops`` is that of one program with a tile of 128 × 256.

    ``copy_rate`` is to one peer at a time. ``store_rate`` and ``load_rate`` are to and from all peers together, by all
    programs. ``links``: the number of peers among which separate links divide these rates equally; 0 behind a switch.
    ``contention``: whether, behind a switch, ranks that are out of step send to the same peer at once and share its
    links, while those of another peer are idle (incast). It is False if two GPUs stand for all
    (benchmark/mirrored.py).
    """

    num_sms: int
    flops: float
    memory_rate: float
    l2_bytes: int
    copy_rate: float
    store_rate: float
    load_rate: float
    links: int
    warpgroups: bool
    contention: bool = True

    def copy_s(self, nbytes: float) -> float:
        """The time of one copy by the copy engine, among many."""
        return COPY_S + nbytes / self.copy_rate

    def store_s(self, nbytes: float, programs: int, world_size: int) -> float:
        """The time in which ``programs`` store ``nbytes`` in all to all peers."""
        most = self.store_rate * self._links_used(world_size) * programs / (programs + _STORE_HALF)
        return nbytes / min(programs * _STORE_BYTES_PER_S, most)

    def pass_s(self, nbytes: float, programs: int) -> float:
        """The time in which ``programs`` store ``nbytes`` at one peer, a different one for each rank."""
        return nbytes / min(programs * _STORE_BYTES_PER_S, self.store_rate * self._links_used(2))

    def load_s(self, nbytes: float, programs: int, world_size: int) -> float:
        """The time in which ``programs`` load ``nbytes`` in all from all peers."""
        most = self.load_rate * self._links_used(world_size) * programs / (programs + _LOAD_HALF)
        return nbytes / min(programs * _LOAD_BYTES_PER_S, most)

    def send_s(self, nbytes: float) -> float:
        """The time in which one program sends one flagged piece to a peer."""
        return _SEND_S + nbytes / _SEND_BYTES_PER_S

    def fetch_s(self, nbytes: float, programs: int, tile_nbytes: int, piece_nbytes: int, world_size: int) -> float:
        """The time in which ``programs`` fetch ``nbytes`` from all peers into local memory, in flagged pieces of tiles;
        tiles are loaded ahead on NVIDIA only."""
        if self.warpgroups:
            each = piece_nbytes / (_PIECE_S + piece_nbytes / _AHEAD_BYTES_PER_S)
        else:
            each = tile_nbytes / (_FETCH_S + tile_nbytes / _FETCH_BYTES_PER_S)
        return nbytes / min(programs * each, self.load_rate * self._links_used(world_size))

    def tile_s(self, config: FusedConfig, problem: Problem, crowded: bool = False) -> float:
        """One program's time for the products of one tile of the output; ``crowded``: by the figures measured where
        only the matmul loads."""
        m, n, step = config.block_size_m, config.block_size_n, config.block_size_k
        intensity = m * n / (m + n)
        share = min(1.0, intensity / (intensity + _LOST) * (_REFERENCE + _LOST) / _REFERENCE)
        if self.warpgroups and config.num_warps < 8:
            share *= _ONE_WARPGROUP
        elif self.warpgroups and m <= 128 and n <= 128:
            share *= _NARROW
        computing = 2 * m * n * (-(-problem.k // step) * step) / (self.flops * share)
        depth = problem.k * problem.dtype.itemsize
        cold = n * depth / _COLD_BYTES_PER_S if problem.m <= m else 0.0  # no other program needs these columns of B
        if cold and crowded:
            crowd = 1.0 if config.stream_k else min(1.0, -(-problem.n // n) / self.num_sms)
            cold = max(cold, crowd * (m + n) * depth / _CROWDED_BYTES_PER_S)
        if crowded and m < 64 and self.warpgroups:
            computing = max(computing, -(-problem.k // step) * (_STEP_S + 2 * m * n * step / _STEP_FLOPS))
        if self.warpgroups and problem.dtype in QUANTISED and not (problem.transposed_b or problem.wants_transposed_b):
            rate = _TURNED_FEW_BYTES_PER_S if m < 64 else _TURNED_BYTES_PER_S * math.sqrt(32 / n)
            computing = max(computing, n * depth / rate)
        return max(computing, (m + n) * depth / _L2_BYTES_PER_S, cold)

    def memory_s(self, config: FusedConfig, problem: Problem, passes: float = 1.0) -> float:
        """The time of the local matmul's traffic with local memory. If L2 cannot hold B, B is read once for every group
        of tile rows, and at least ``passes`` times."""
        item, out_item = problem.dtype.itemsize, problem.output_dtype.itemsize
        a, b, c = problem.m * problem.k * item, problem.k * problem.n * item, problem.m * problem.n * out_item
        groups = config.groups(problem.m)
        passes = 1.0 if b < self.l2_bytes // 2 else max(passes, groups)
        return (a + b * passes + c) / self.memory_rate

    def transposing_s(self, problem: Problem) -> float:
        """The time in which a row-major B of 8 bits is transposed before the call, if it is."""
        if not (self.warpgroups and problem.wants_transposed_b):
            return 0.0
        return LAUNCH_S + 2 * problem.weight_bytes / self.memory_rate

    def _links_used(self, world_size: int) -> float:
        return min(1.0, max(1, world_size - 1) / self.links) if self.links else 1.0


def machine(known: Hardware, dtype: torch.dtype) -> Machine:
    """The rates of ``known`` for matrices of ``dtype``."""
    amd = known.backend == "hip"
    raw, links = known.link_bytes_per_s, known.link_peers
    return Machine(
        known.num_sms,
        _flops(known, dtype, amd) / known.num_sms,
        known.memory_bytes_per_s * _MEMORY_SHARE,
        known.l2_bytes,
        (known.copy_bytes_per_s or raw * _COPY_SHARE) / (links or 1),
        known.store_bytes_per_s or raw * _STORE_SHARE,
        known.load_bytes_per_s or raw * _LOAD_SHARE,
        links,
        not amd,
    )


def _flops(known: Hardware, dtype: torch.dtype, amd: bool) -> float:
    """The sustained rate of a large matmul of ``dtype`` on the whole GPU: measured, else a share of the peak."""
    name = known.format_of(dtype)
    if name in known.sustained_flops:
        return known.sustained_flops[name]
    share = _FLOPS_SHARE_OF_AMD if amd else _FLOAT32_SHARE if name == "fp32" else _FLOPS_SHARE
    return known.peak_flops[name] * share
