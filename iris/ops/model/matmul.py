"""How long a call's matmul takes: tiles dealt round to programs, waves of them, or a library's choice of tiles.

The constants are those of :mod:`iris.ops.model`, fitted with it to the same measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from iris.ops.algorithms import EXCHANGING, GATHER, LOCAL, SCATTER
from iris.ops.config import FusedConfig
from iris.ops.model.machine import LAUNCH_S, Machine
from iris.ops.problem import Problem
from iris.ops.rows import evenly
from iris.ops.split import sharers_of, split_tiles, strips_of

_BOOST_S, _BOOST, _THROTTLED_S, _THROTTLED = 0.25e-3, 1.05, 1.2e-3, 0.91
"""Matmuls of up to ``_BOOST_S`` run at a higher clock than the sustained rate's, those from ``_THROTTLED_S`` on at a
lower one, as power is limited."""
_TILE_S = 1.5e-6
"""From one tile to the next: its epilogue, and filling the pipeline again."""
_SPLIT_S, _SPLIT_TILE_S = 3.7e-6, 16e-6
"""Stream-K: handing parts of tiles over, and as much more for a tile of 128 × 256; for others by the root of their
elements."""
_UNSPLIT_S = 2e-6
"""What it costs where each program then has a tile, or a strip, of its own."""
_APART_SLOWER = 0.5
"""Split tiles are this much slower where programs have parts of two: neighbours then work at different columns of K,
and share nothing in L2."""
_REREAD = 0.8
"""The share of B that the next rank's rows read from memory again, where L2 cannot hold it."""
_CONTENDING = 4
"""Where B is read more than once, products and reading slow each other down: together they take this norm of both."""
_DRIFTED_WAVES = 2
"""From one wave more than this on, programs no longer end their tiles at the same time."""
_LIBRARY_TILES = tuple((128, n, 8) for n in (256, 192, 160, 128, 112)) + tuple(
    (64, n, 8) for n in (256, 192, 160, 128, 64)
)
"""What a library's matmul seems to choose among. Without those of 160 columns shapes of 5120 columns would take 10 to
50 % longer than they do, on 132 SMs; without 64 rows by 256, those of 9216."""
_LIBRARY_SPLIT = 0.6
"""The share of the best rate that it has when it splits K."""
_LIBRARY_SPLIT_S = 3e-6
"""What splitting K costs it."""


@dataclass(frozen=True)
class Deal:
    """Tiles dealt out to ``workers`` in turn: ``whole`` tiles are computed by one program each; of those that Stream-K
    splits, each program computes ``share`` tiles' worth. A tile takes ``tile_s``, the call ``extra_s`` more."""

    workers: int
    whole: int
    share: float
    tile_s: float
    extra_s: float

    def left(self, first: int) -> float:
        """Tiles that the program of tile number ``first`` computes from that one on."""
        return max(0, -(-(self.whole - first) // self.workers)) + self.share

    @property
    def total_s(self) -> float:
        return self.left(0) * self.tile_s + self.extra_s

    def done_s(self, share: float) -> float:
        """When the first ``share`` of the tiles is done: with few waves, when the wave of the last of them is. Split
        tiles come last, and all at the same time."""
        steady = share * self.total_s
        if self.share and share * (self.whole + self.share * self.workers) > self.whole:
            return self.total_s
        wave = math.ceil(share * self.whole / self.workers) * self.tile_s
        drifted = min(1.0, (self.left(0) - 1) / _DRIFTED_WAVES)
        return max(steady, drifted * steady + (1 - drifted) * wave)

    def end_s(self, arrivals: Iterable[tuple[float, int, float]]) -> float:
        """When the last program is done. Arrivals: when something is there, the first tile that waits for it, and the
        share of that tile that is computed by then, if it is a whole one: of a split tile, which has all its parts
        computed at the same time, those that wait have yet to begin."""
        end = self.left(0) * self.tile_s
        for ready_s, first, done in arrivals:
            whole = self.left(first) - self.share
            end = max(end, ready_s + (max(0.0, whole - done) + self.share) * self.tile_s)
        return end + self.extra_s


@dataclass(frozen=True)
class Call:
    """A call, its numbers worked out when they are asked for."""

    problem: Problem
    config: FusedConfig
    machine: Machine

    @cached_property
    def world(self) -> int:
        return self.problem.world_size

    def contention(self, extra: float) -> float:
        """How many times as long transfers to one peer after the other take where several ranks send to the same peer
        at once (incast): 1 + ``extra`` on 8 ranks, linear in the number of ranks from 1 on 2, which was not fitted; 1
        where each link goes to one peer."""
        rates = self.machine
        return 1 + extra * max(0, self.world - 2) / 6 if rates.contention and not rates.links else 1.0

    @cached_property
    def columns(self) -> int:
        """Tiles side by side."""
        return -(-self.problem.n // self.config.block_size_n)

    @cached_property
    def rows(self) -> int:
        """Block rows of the whole output."""
        return -(-self.problem.m // self.config.block_size_m)

    @cached_property
    def shard_rows(self) -> int:
        """Block rows of one rank's rows."""
        return -(-(self.problem.m // self.world or 1) // self.config.block_size_m)

    @cached_property
    def part_nbytes(self) -> int:
        """One rank's part of A, before a gather."""
        return self.problem.m * self.problem.k * self.problem.dtype.itemsize // self.world

    @cached_property
    def output_nbytes(self) -> int:
        """Bytes of the local matmul's output, in the dtype in which it is sent."""
        return self.problem.m * self.problem.n * self.problem.output_dtype.itemsize

    @cached_property
    def sliced(self) -> bool:
        """Whether programs that share a tile each store some of it (:class:`iris.ops.plan.Plan`)."""
        op, algorithm = self.problem.op, self.config.algorithm
        whole = op in (LOCAL, GATHER) or algorithm in EXCHANGING  # of these a rank's own matmul
        return whole or (op, algorithm) == (SCATTER, "push")

    @cached_property
    def passes(self) -> float:
        """How often B is read at least where one rank's rows are computed after the other's."""
        return 1 + _REREAD * (self.world - 1)

    def passes_in(self, waves: float) -> float:
        """How often B is read at least where ranks take turns in rounds of so many ``waves``, each of which reads it
        once: its tiles share columns."""
        return min(self.passes, max(1.0, waves))

    def programs(self, reserved: int = 0) -> int:
        return max(1, (self.config.num_sms or self.machine.num_sms) - reserved)

    def deal(
        self,
        tiles: int,
        reserved: int = 0,
        first: int = 0,
        tile_s: float = 0.0,
        passes: float = 1.0,
        crowded: bool = False,
    ) -> Deal:
        """``tiles`` to all programs but ``reserved``; Stream-K begins behind ``first``. ``tile_s``: more for each.
        ``passes``: how often B is read at least, where L2 cannot hold it. ``crowded``: see :meth:`Machine.tile_s`."""
        config, workers = self.config, self.programs(reserved)
        computing = whole_s = self.machine.tile_s(config, self.problem, crowded)
        waves = max(1.0, tiles / workers)
        loading = self.machine.memory_s(config, self.problem, passes) / waves
        if passes > 1:
            computing = (computing**_CONTENDING + loading**_CONTENDING) ** (1 / _CONTENDING)
        computing = max(computing, loading)
        computing /= _clock(computing * waves)
        each = computing + _TILE_S + tile_s
        rest = tiles - first
        if not config.stream_k or rest % workers == 0:
            return Deal(workers, tiles, 0.0, each, 0.0)
        split = split_tiles(rest, workers, config)
        strips = strips_of(rest, workers, config) if self.sliced else 1
        per_tile = -(-self.problem.k // config.block_size_k)
        sharers = sharers_of(split * strips, per_tile, workers)
        share = split / sharers
        if strips > 1:
            strip = replace(config, block_size_n=config.block_size_n // strips)
            share *= strips * self.machine.tile_s(strip, self.problem, crowded) / whole_s
        if sharers % (split * strips):
            share *= 1 + _APART_SLOWER * min(1.0, split * strips / workers)
        extra_s = _UNSPLIT_S
        if sharers > split * strips:
            extra_s = _SPLIT_S + _SPLIT_TILE_S * math.sqrt(config.tile_elements / strips / (128 * 256))
        return Deal(workers, first + rest - split, share, each, extra_s)

    def shares(self, rows: int) -> list[float]:
        """The chunks in which ``decomposed`` cuts ``rows``, as shares of all."""
        return [chunk.count / rows for chunk in self.config.cut(rows)]

    def chunks_of_groups(self, rows: int) -> int:
        """How many chunks ``rows`` rows travel in, where each is of whole groups of block rows."""
        return evenly(self.config.groups(rows), self.config.num_chunks)[0]

    def first_tile(self, row: int) -> int:
        """Number of the first tile in block row ``row``, in grouped order."""
        group = row // self.config.group_size_m * self.config.group_size_m
        return group * self.columns + row - group


def _clock(matmul_s: float) -> float:
    """The rate of a matmul this long over that of :class:`Machine`."""
    throttled = min(1.0, max(0.0, (matmul_s - _BOOST_S) / (_THROTTLED_S - _BOOST_S)))
    return _BOOST + (_THROTTLED - _BOOST) * throttled


@lru_cache(maxsize=256)
def library_s(call: Call, parts: float = 1) -> float:
    """A library's matmul of the local problem, in ``parts`` calls of some rows each: the best of some tiles, or of
    splitting K over all programs. Of calls of several sizes, ask for each as for so many of its size, and take its
    share. Kept, as most chunks of a call are alike."""
    best = float("inf")
    for m, n, warps in _LIBRARY_TILES:
        config = replace(call.config, block_size_m=m, block_size_n=n, num_warps=warps, stream_k=False, num_sms=None)
        one = Call(call.problem, config, call.machine)
        tiles = math.ceil(call.problem.m / parts / m) * one.columns
        deal = one.deal(round(parts * tiles), passes=parts)
        best = min(best, parts * -(-tiles // deal.workers) * deal.tile_s)
    rates = call.machine
    computing = call.problem.flops / (_LIBRARY_SPLIT * rates.num_sms * rates.flops)
    return LAUNCH_S + min(
        best, max(computing, rates.memory_s(call.config, call.problem, parts)) + parts * _LIBRARY_SPLIT_S
    )
