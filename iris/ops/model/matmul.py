"""How long a call's matmul takes: with tiles dealt out to programs in turn, or with a library's choice of tiles.

The constants were fitted to the measurements that :mod:`iris.ops.model` names."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from iris.ops.algorithms import EXCHANGING, GATHER, LOCAL, SCATTER
from iris.ops.config import FusedConfig
from iris.ops.model.machine import LAUNCH_S, Machine
from iris.ops.problem import Problem
from iris.ops.stream_k import sharers_of, split_tiles, strips_of

_BOOST_S, _BOOST, _THROTTLED_S, _THROTTLED = 0.25e-3, 1.05, 1.2e-3, 0.91
"""Matmuls of up to ``_BOOST_S`` run at a higher clock than that of the sustained rate, those of ``_THROTTLED_S`` or
more at a lower clock, because power is limited. The factors are ``_BOOST`` and ``_THROTTLED``."""
_TILE_S = 1.5e-6
"""From one tile to the next: its epilogue, and filling the pipeline again."""
_SPLIT_S, _SPLIT_TILE_S = 3.7e-6, 16e-6
"""Stream-K: a fixed time for handing over parts of tiles, and an additional one for a tile of 128 × 256; for other
tiles the latter is scaled by the root of their elements."""
_UNSPLIT_S = 2e-6
"""The cost of Stream-K if each program then has a tile, or a strip, of its own."""
_APART_SLOWER = 0.5
"""How much slower split tiles are if programs have parts of two: neighbours then work at different columns of K, and
share nothing in L2."""
_REREAD = 0.8
"""The share of B that the next rank's rows read from memory again, if L2 cannot hold B."""
_CONTENDING = 4
"""If B is read more than once, computing and reading slow each other down: the total time is the norm of both of this
order."""
_DRIFTED_WAVES = 2
"""After so many waves beyond the first, programs no longer end their tiles at the same time."""
_LIBRARY_TILES = tuple((128, n, 8) for n in (256, 192, 160, 128, 112)) + tuple(
    (64, n, 8) for n in (256, 192, 160, 128, 64)
)
"""The tiles (with their warps) among which a library's matmul seems to choose. Without those of 160 columns,
predictions for shapes of 5120 columns would be 10 to 50 % too long on 132 SMs; without 64 × 256, those for 9216
columns."""
_LIBRARY_SPLIT = 0.6
"""The share of the best rate that the library reaches when it splits K."""
_LIBRARY_SPLIT_S = 3e-6
"""The fixed cost for the library of splitting K."""


@dataclass(frozen=True)
class Deal:
    """Tiles dealt out to ``workers`` in turn. One program each computes ``whole`` tiles; of the tiles that Stream-K
    splits, each program computes ``share`` tiles' worth. A tile takes ``tile_s``; the call takes ``extra_s`` more."""

    workers: int
    whole: int
    share: float
    tile_s: float
    extra_s: float

    def left(self, first: int) -> float:
        """The number of tiles that the program of tile number ``first`` computes from that tile on."""
        return max(0, -(-(self.whole - first) // self.workers)) + self.share

    @property
    def total_s(self) -> float:
        return self.left(0) * self.tile_s + self.extra_s

    def done_s(self, share: float) -> float:
        """When the first ``share`` of the tiles is done. With few waves, that is when the wave of the last of them
        ends. Split tiles end last, and all at the same time."""
        steady = share * self.total_s
        if self.share and share * (self.whole + self.share * self.workers) > self.whole:
            return self.total_s
        wave = math.ceil(share * self.whole / self.workers) * self.tile_s
        drifted = min(1.0, (self.left(0) - 1) / _DRIFTED_WAVES)
        return max(steady, drifted * steady + (1 - drifted) * wave)

    def end_s(self, arrivals: Iterable[tuple[float, int, float]]) -> float:
        """When the last program is done. Each of ``arrivals`` is: when data arrives, the first tile that waits for it,
        and the share of that tile that has been computed by then. The share holds for whole tiles only: the parts of a
        split tile are computed at the same time, so those that wait have not begun."""
        end = self.left(0) * self.tile_s
        for ready_s, first, done in arrivals:
            whole = self.left(first) - self.share
            end = max(end, ready_s + (max(0.0, whole - done) + self.share) * self.tile_s)
        return end + self.extra_s


@dataclass(frozen=True)
class Call:
    """A call, and numbers derived from it."""

    problem: Problem
    config: FusedConfig
    machine: Machine

    @cached_property
    def world(self) -> int:
        return self.problem.world_size

    def contention(self, extra: float) -> float:
        """The factor by which transfers to one peer after the other take longer because several ranks send to the same
        peer at once (incast). It is 1 + ``extra`` on 8 ranks, 1 on 2 ranks, and linear in the number of
        ranks, which was not fitted. It is 1 if each link goes to one peer only."""
        rates = self.machine
        return 1 + extra * max(0, self.world - 2) / 6 if rates.contention and not rates.links else 1.0

    @cached_property
    def columns(self) -> int:
        """Columns of tiles."""
        return -(-self.problem.n // self.config.block_size_n)

    @cached_property
    def rows(self) -> int:
        """Block rows of the whole output."""
        return -(-self.problem.m // self.config.block_size_m)

    @cached_property
    def shard_rows(self) -> int:
        """Block rows of one rank's part of the rows."""
        return -(-(self.problem.m // self.world or 1) // self.config.block_size_m)

    @cached_property
    def part_nbytes(self) -> int:
        """Bytes of one rank's part of A, before a gather."""
        return self.problem.m * self.problem.k * self.problem.dtype.itemsize // self.world

    @cached_property
    def output_nbytes(self) -> int:
        """Bytes of the local matmul's output, in the dtype in which it is sent."""
        return self.problem.m * self.problem.n * self.problem.output_dtype.itemsize

    @cached_property
    def sliced(self) -> bool:
        """Whether programs that share a tile each store some of it (:class:`iris.ops.plan.Plan`)."""
        op, algorithm = self.problem.op, self.config.algorithm
        whole = op in (LOCAL, GATHER) or algorithm in EXCHANGING  # an exchange has a matmul of one rank
        return whole or (op, algorithm) == (SCATTER, "push")

    @cached_property
    def passes(self) -> float:
        """How often B is read at least, if the ranks' rows are computed one rank after the other."""
        return 1 + _REREAD * (self.world - 1)

    def passes_in(self, waves: float) -> float:
        """How often B is read at least, if ranks take turns in rounds of this many ``waves``. Each wave reads B once,
        since its tiles share columns."""
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
        """``tiles`` dealt out to all programs except ``reserved`` ones; Stream-K begins after the ``first`` tiles.
        ``tile_s``: additional time for each tile. ``passes``: how often B is read at least, if L2 cannot hold it.
        ``crowded``: see :meth:`Machine.tile_s`."""
        config, workers = self.config, self.programs(reserved)
        whole_s = self.machine.tile_s(config, self.problem, crowded)
        loading_s = self.machine.memory_s(config, self.problem, passes)
        each = _loaded_s(whole_s, loading_s, tiles / workers, passes) + tile_s
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
        deal = Deal(workers, tiles - split, share, each, extra_s)
        # Splitting shortens what programs compute, not the traffic with memory.
        return replace(deal, extra_s=extra_s + max(0.0, loading_s - deal.left(0) * each))

    def shares(self, rows: int) -> list[float]:
        """The chunks into which ``decomposed`` cuts ``rows``, as shares of all rows."""
        return [chunk.count / rows for chunk in self.config.cut(rows)]

    def first_tile(self, row: int) -> int:
        """The number of the first tile in block row ``row``, in grouped order."""
        group = row // self.config.group_size_m * self.config.group_size_m
        return group * self.columns + row - group


def _loaded_s(computing_s: float, loading_s: float, waves: float, passes: float) -> float:
    """The time of a tile, of ``waves`` that follow each other, with its epilogue: ``computing_s`` is that of its
    products, ``loading_s`` that of the matmul's traffic with memory; ``passes``: see :meth:`Call.deal`."""
    waves = max(1.0, waves)
    loading_s /= waves
    if passes > 1:
        computing_s = (computing_s**_CONTENDING + loading_s**_CONTENDING) ** (1 / _CONTENDING)
    computing_s = max(computing_s, loading_s)
    return computing_s / _clock(computing_s * waves) + _TILE_S


def _clock(matmul_s: float) -> float:
    """The rate of a matmul of this duration, relative to that of :class:`Machine`."""
    throttled = min(1.0, max(0.0, (matmul_s - _BOOST_S) / (_THROTTLED_S - _BOOST_S)))
    return _BOOST + (_THROTTLED - _BOOST) * throttled


def library_s(call: Call, parts: float = 1) -> float:
    """The time of a library's matmul of the local problem, in ``parts`` calls of equally many rows: the best of some
    tiles, or of splitting K over all programs. If calls differ in size, ask for each as if all had its size, and take
    its share of the time."""
    problem, config, rates = call.problem, call.config, call.machine
    computing = problem.flops / (_LIBRARY_SPLIT * rates.num_sms * rates.flops)
    split = max(computing, rates.memory_s(config, problem, parts)) + parts * _LIBRARY_SPLIT_S
    return LAUNCH_S + min(split, _library_whole_s(problem, rates, config.block_size_k, config.group_size_m, parts))


@lru_cache(maxsize=256)
def _library_whole_s(problem: Problem, rates: Machine, block_k: int, group_m: int, parts: float) -> float:
    """:func:`library_s` without splitting K. Cached, as most chunks of a call, and of one with other options, are
    alike."""
    best = float("inf")
    for config, tile_s in _library_tiles(problem, rates, block_k, group_m):
        tiles = math.ceil(problem.m / parts / config.block_size_m) * -(-problem.n // config.block_size_n)
        loading_s = rates.memory_s(config, problem, parts)
        each = _loaded_s(tile_s, loading_s, round(parts * tiles) / rates.num_sms, parts)
        best = min(best, parts * -(-tiles // rates.num_sms) * each)
    return best


@lru_cache(maxsize=16)
def _library_tiles(
    problem: Problem, rates: Machine, block_k: int, group_m: int
) -> tuple[tuple[FusedConfig, float], ...]:
    """The tiles among which a library chooses, and a program's time for the products of one."""
    found = []
    for m, n, warps in _LIBRARY_TILES:
        config = FusedConfig(
            block_size_m=m, block_size_n=n, block_size_k=block_k, group_size_m=group_m, num_warps=warps
        )
        found.append((config, rates.tile_s(config, problem)))
    return tuple(found)
