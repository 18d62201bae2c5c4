"""Matmul + reduce-scatter, matmul + all-reduce: how long each algorithm takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from iris.ops.model.machine import FLAG_S, LAUNCH_S, MEET_S, WORD_S
from iris.ops.model.matmul import Call, Deal, library_s
from iris.ops.model.terms import (
    AWAITED_STEP_S,
    KEEP_S,
    STEP_S,
    beside_s,
    exchange_s,
    flag_s,
    landing_s,
    multiplied_s,
    next_copy_s,
)
from iris.ops.problem import QUANTISED
from iris.ops.rows import evenly, owner_groups, summing_step
from iris.ops.words import sent_in_words, words_nbytes

_ROUNDS_APART, _ROUND_TILES = 0.25, 0.05
"""How far programs drift apart with many rounds, because they wait at different times; and the cost of each round, in
tiles, because they wait for each other's tiles (2 × H100 that stand for 8, 4 and 2, 2026-11-25)."""
_SUMS_APART = 0.12
"""How far programs are apart that store sums to all ranks, since each has waited for the parts of its own tile (2, 4
and 8 × H200, 2026-11-26)."""
_SEND_S = 1.5e-6
"""A tile stored at its owner, and flagged there."""
_COLLECT_BYTES_PER_S, _COLLECT_S = 32e9, 1e-6
"""The rate at which a program reads the first peer's part of its tile, and the least time for it."""
_AHEAD_BYTES_PER_S, _AHEAD_S = 60e9, 0.7e-6
"""The rate at which it reads each further peer's part, and the least time for it: NVIDIA GPUs load a part while the one
before is added (2 × H100 that stand for 8, 2026-11-25)."""
_TAKE_S, _TAKE_BYTES_PER_S = 0.4e-6, 16e9
"""For a tile that arrives as words, the time that one peer's part takes in the waiting program: a fixed time, and a
rate."""
_SUM_HOP_S = 1.2e-6
"""From an owner's sum of such a tile until the others see it (2 and 4 × H200, 2026-11-27, as for the figures above)."""
_END, _END_S = 0.08, 1.5e-6
"""The end of a matmul, when some programs are done and others are not, if its weights take longer to read than to
multiply. An exchange behind the matmul waits for this end; tiles that are sent one by one do not. The figures are its
share of the time for reading, and the most that it takes. If sums of such tiles are sent on, half of it remains (2 and
4 × H200, 2026-11-27 and 29)."""
_SUMMED_EXPOSED = 0.6
"""The share of an exchange's traffic with local memory that the links do not hide if a rank sums its rows, some of
which arrive before others. If the sums go on to all ranks, all of it is hidden."""
_ADDED = 1.2
"""How much longer Iris's kernel takes than the library for 8-bit products; it adds them up in a ring (2 × H200,
2026-11-27)."""
_TILES_CONTENTION, _COPIES_CONTENTION, _GROUPS_CONTENTION = 0.1, 0.08, 0.45
"""How much longer transfers to owners take on 8 ranks because of incast (:meth:`.Call.contention`): those of tiles; of
rows; and of several owners' rows, which are sent together, so that a late rank collides with another at each owner."""
_TURNS_CONTENTION = 0.1
"""How much longer transfers of both parts and sums take on 8 ranks, for each chunk after the second, because parts and
sums leave in turn (4 and 8 × H200, 2026-11-26)."""
_CROWDED = 1.15
"""How much longer copies take if the matmul has just written their source, and will read their target."""


def _sent_nbytes(call: Call) -> float:
    """The bytes that a rank sends to the owners of its tiles."""
    return call.output_nbytes * (call.world - 1) / call.world


def _owner_copy_s(call: Call, share: float) -> float:
    """A copy of this share of one owner's rows."""
    return call.machine.copy_s(share * call.output_nbytes / call.world)


def _next_copy_s(call: Call, share: float, owners: int) -> float:
    """A copy of this share of one owner's rows, right behind a copy to another peer, where a matmul computes the rows
    of ``owners`` ranks."""
    contention = call.contention(_COPIES_CONTENTION if owners == 1 else _GROUPS_CONTENTION)
    return next_copy_s(call, contention * share * call.output_nbytes / call.world)


def _collect_s(call: Call) -> float:
    """All peers' parts of one tile, read by the program that has computed its own part."""
    nbytes = call.config.tile_elements * call.problem.output_dtype.itemsize
    first = each = max(_COLLECT_S, nbytes / _COLLECT_BYTES_PER_S)
    if call.machine.warpgroups:
        each = max(_AHEAD_S, nbytes / _AHEAD_BYTES_PER_S)
    return first + (call.world - 2) * each if call.world > 1 else 0.0


def _own_waves(call: Call, deal: Deal) -> int:
    """The number of own tiles of one program."""
    return -(-(deal.whole // call.world or 1) // deal.workers)


def _taken_s(call: Call, parts: int) -> float:
    """The time to take this many parts of a tile, as words."""
    return parts * (_TAKE_S + call.config.tile_elements * call.problem.output_dtype.itemsize / _TAKE_BYTES_PER_S)


def _end_s(call: Call) -> float:
    reading = call.machine.memory_s(call.config, call.problem)
    computing = call.problem.flops / (call.machine.num_sms * call.machine.flops)
    return min(_END * reading, _END_S) if reading > computing else 0.0


def _in_words_s(call: Call, copies: float) -> float:
    """The matmul, and sending each of its tiles ``copies`` times as words. It counts whole tiles, as when they were
    measured: masked rows were sent, too."""
    tiles = call.rows * call.columns
    nbytes = copies * words_nbytes(tiles * call.config.tile_elements, call.problem.output_dtype)
    return LAUNCH_S + call.deal(tiles).total_s + call.machine.store_s(nbytes, call.programs(), call.world)


def _sum_pushed(call: Call, item: float = 1.0, *, everywhere: bool) -> float:
    """Tiles are stored to their owners, ``item`` times as large as tiles of the output; with ``everywhere``, sums are
    stored to all ranks."""
    if sent_in_words(call.problem, call.config):
        waves = -(-call.rows * call.columns // call.programs())
        summing = _taken_s(call, call.world - 1) + _SUM_HOP_S + _taken_s(call, 1)
        return _in_words_s(call, 2 * (call.world - 1) / call.world) + waves * summing + _end_s(call) / 2
    shard = -(-call.columns * call.rows // call.world) if everywhere else call.columns * call.shard_rows
    tiles = call.world * shard  # tiles beyond those of the output are computed in vain
    returned_nbytes = _sent_nbytes(call) if everywhere else 0.0
    rounds = min(call.config.num_rounds, max(1, tiles // call.world))
    if returned_nbytes:  # each rank's tiles are a part of all columns, and own tiles come a round later
        passes, apart = 1.0, _SUMS_APART + _ROUNDS_APART * max(0.0, 1 - 2 / rounds)
    else:
        passes, apart = call.passes_in(tiles / call.programs() / rounds), _ROUNDS_APART * (1 - 1 / rounds)
    deal = call.deal(tiles, tile_s=_SEND_S, passes=passes)
    nbytes = item * _sent_nbytes(call) + returned_nbytes
    storing = call.machine.store_s(nbytes, call.programs(), call.world) * call.contention(_TILES_CONTENTION)
    waiting, own_waves = (rounds - 1) * _ROUND_TILES * deal.tile_s, _own_waves(call, deal)
    if returned_nbytes:  # sums of own tiles are sent while others are still added up
        waiting, own_waves = waiting + own_waves * _collect_s(call), 0
    elif storing > deal.total_s:  # sums of one round are added up while the next ones' tiles are sent
        own_waves = -(-own_waves // rounds)
    moving = beside_s(deal, storing, apart, waiting)
    return LAUNCH_S + moving + own_waves * _collect_s(call) + MEET_S + 2 * FLAG_S


def _scatter_copied(call: Call) -> float:
    """Chunks are copied to their owner when they are finished; own tiles come last and wait for the peers' chunks."""
    shard = call.shard_rows * call.columns
    chunks, _ = evenly(shard, call.config.num_chunks)
    deal = call.deal(call.world * shard, tile_s=KEEP_S, passes=call.passes)
    each = _CROWDED * _owner_copy_s(call, 1 / chunks) + 2 * WORD_S + FLAG_S
    sent, arrivals = 0.0, []
    for step in range(call.world - 1):
        for chunk in range(chunks):
            finished = deal.done_s((step + (chunk + 1) / chunks) / call.world)
            sent = max(sent, finished) + each
            if step == call.world - 2:
                arrivals.append((sent, (call.world - 1) * shard + chunk * shard // chunks, 1.0))
    collecting = _own_waves(call, deal) * _collect_s(call)
    return LAUNCH_S + deal.end_s(arrivals) + collecting + MEET_S


def _reduce_added(call: Call) -> float:
    return _sum_pushed(call, 4.0, everywhere=True) + MEET_S


def _reduce_everywhere(call: Call) -> float:
    """Every rank gets the parts of all ranks."""
    if sent_in_words(call.problem, call.config):
        return _in_words_s(call, call.world - 1) + _taken_s(call, call.world - 1)
    deal = call.deal(call.rows * call.columns)
    loading = call.machine.load_s((call.world - 1) * call.output_nbytes, call.programs(), call.world)
    return LAUNCH_S + deal.total_s + loading + 2 * MEET_S


def _reduce_copied(call: Call) -> float:
    """In rounds: tiles go to their owners, then sums to all; the sums of one round follow the tiles of the next."""
    shard, world = call.shard_rows * call.columns, call.world
    chunks, _ = call.config.cut_in_groups(call.problem.m // world or 1, call.config.num_chunks)
    deal = call.deal(world * shard, tile_s=KEEP_S, passes=call.passes)
    spreading = _CROWDED * _owner_copy_s(call, 1 / chunks)
    each = spreading + 2 * WORD_S
    computing = deal.total_s / chunks
    collecting = _own_waves(call, deal) * _collect_s(call) / chunks
    copied = computed = summed = 0.0
    for chunk in range(chunks + 1):
        before = summed
        if chunk < chunks:
            for step in range(1, world):
                copied = max(copied, computed + computing * step / world) + each + WORD_S
            computed = summed = max(computed + computing, copied + FLAG_S) + collecting
        if chunk > 0:
            copied = max(copied, before) + (world - 1) * spreading + 2 * WORD_S
    return LAUNCH_S + max(copied, computed) + LAUNCH_S + MEET_S


def _beside_copies(call: Call) -> Call:
    """``call`` with a lower memory rate, because its matmul shares memory with copies, which read and write as much as
    the links carry. This was seen only if the links take longer than the matmul."""
    rates = call.machine
    if _sent_nbytes(call) / rates.copy_rate < library_s(call):
        return call
    return replace(call, machine=replace(rates, memory_rate=rates.memory_rate - 2 * rates.copy_rate))


def _decomposed(call: Call, *, everywhere: bool) -> tuple[float, float, float, float]:
    """For each chunk: the library's matmul for each owner, or for several together, with a copy to each behind it. The
    chunk is summed, and with ``everywhere`` the sums are copied to all ranks, beside the next chunk's matmuls. Returns
    when all but the last chunk's sums are computed, sent, and landed, and how long the last sums take."""
    world, summing, spreading = call.world, 0.0, 0.0
    computed = sent = landed = 0.0
    crowded, rows = _beside_copies(call), call.problem.m // world or 1
    chunks = call.config.cut(rows)
    turns = call.contention(_TURNS_CONTENTION * max(0, len(chunks) - 2)) if everywhere else 1.0
    for chunk, those in enumerate(chunks):
        share, before = those.count / rows, landed
        part, copied = share / world, turns * share
        owners = call.config.owners(chunks, chunk, everywhere=everywhere)
        groups = owner_groups(0, world, owners)
        for step, group in enumerate(groups, 1):
            together = len(group) * part
            computed += together * library_s(crowded, 1 / together) + STEP_S
            for _ in range(len(group) - (step == len(groups))):
                sent = max(sent, computed) + _next_copy_s(call, copied, owners) + flag_s(call)
                landed = sent + landing_s(call)
            if chunk > 0 and step == summing_step(len(groups), everywhere=everywhere):  # sum the previous chunk
                computed = max(computed, before) + AWAITED_STEP_S + summing
                sent = max(sent, computed) + (world - 1) * spreading
        summing = (world + 1) * part * call.output_nbytes / call.machine.memory_rate
        spreading = _next_copy_s(call, copied, 1) if everywhere else 0.0
    return computed, sent, landed, summing


def _scatter_decomposed(call: Call) -> float:
    """The last chunk is summed by a kernel at the end."""
    computed, _, landed, summing = _decomposed(call, everywhere=False)
    return max(computed, landed) + LAUNCH_S + summing + MEET_S


def _ring(call: Call, *, everywhere: bool) -> float:
    """Sums travel from rank to rank in chunks; when a chunk arrives, the library's matmul adds to it. At the end the
    sums are copied to their place, or to all ranks."""
    chunks, _ = evenly(call.shard_rows, call.config.num_chunks)
    computing = library_s(call, call.world * chunks) / (call.world * chunks)
    adding = computing * (_ADDED if call.problem.dtype in QUANTISED else 1.0)
    spreading = _owner_copy_s(call, 1 / chunks)
    each = spreading + WORD_S
    owned = call.output_nbytes / call.world / chunks
    arrived = [0.0] * chunks
    computed = sent = 0.0
    for step in range(call.world):
        for chunk in range(chunks):
            computed = max(computed, arrived[chunk]) + (adding if step else computing) + AWAITED_STEP_S
            if step < call.world - 1:
                sent = max(sent, computed) + each
                arrived[chunk] = sent + FLAG_S
            elif everywhere:
                sent = max(sent, computed) + (call.world - 1) * spreading
            else:
                computed += 2 * owned / call.machine.memory_rate + AWAITED_STEP_S
    return 2 * LAUNCH_S + max(computed, sent) + (MEET_S if everywhere else 0.0)


def _reduce_decomposed(call: Call) -> float:
    """The kernel that sums the last chunk stores its sums at all ranks."""
    computed, sent, landed, summing = _decomposed(call, everywhere=True)
    *_, last = call.shares(call.problem.m // call.world or 1)
    stored_nbytes = (call.world - 1) * last / call.world * call.output_nbytes
    storing = call.machine.store_s(stored_nbytes, call.programs(), call.world)
    return 2 * LAUNCH_S + max(sent, computed, landed) + max(AWAITED_STEP_S + summing, storing) + MEET_S


def _multiplied_s(call: Call) -> float:
    """The matmul in front of an exchange."""
    return multiplied_s(call) + _end_s(call)


def _scatter_exchanged(call: Call) -> float:
    return _multiplied_s(call) + exchange_s(
        call, _sent_nbytes(call), call.output_nbytes / call.world, exposed=_SUMMED_EXPOSED
    )


def _scatter_then(call: Call) -> float:
    loading = call.machine.load_s(_sent_nbytes(call), call.programs(), call.world)
    return library_s(call) + LAUNCH_S + loading + 2 * MEET_S


def _reduce_then(call: Call) -> float:
    storing = call.machine.store_s(_sent_nbytes(call), call.programs(), call.world)
    return _scatter_then(call) + storing + MEET_S


def _reduce_exchanged(call: Call) -> float:
    """Every rank's product goes to all."""
    return _multiplied_s(call) + exchange_s(call, (call.world - 1) * call.output_nbytes, call.output_nbytes)


def _reduce_exchanged_twice(call: Call) -> float:
    """Parts of the product go to their owners, and their sums to all ranks."""
    return _multiplied_s(call) + exchange_s(call, _sent_nbytes(call), call.output_nbytes, hops=2, exposed=0.0)


SCATTERED: dict[str, Callable[[Call], float]] = {
    "push": partial(_sum_pushed, everywhere=False),
    "copy_engine": _scatter_copied,
    "decomposed": _scatter_decomposed,
    "ring": partial(_ring, everywhere=False),
    "low_latency": _scatter_exchanged,
    "atomic": partial(_sum_pushed, item=4.0, everywhere=False),
    "baseline": _scatter_then,
}
REDUCED: dict[str, Callable[[Call], float]] = {
    "atomic": _reduce_added,
    "one_shot": _reduce_everywhere,
    "two_shot": partial(_sum_pushed, everywhere=True),
    "copy_engine": _reduce_copied,
    "decomposed": _reduce_decomposed,
    "ring": partial(_ring, everywhere=True),
    "low_latency": _reduce_exchanged,
    "low_latency_two_shot": _reduce_exchanged_twice,
    "baseline": _reduce_then,
}
