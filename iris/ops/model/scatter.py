"""Matmul + all-scatter: how long each algorithm takes."""

from __future__ import annotations

from collections.abc import Callable

from iris.ops.config import RELAY_TEAM
from iris.ops.model.machine import FLAG_S, LAUNCH_S, MEET_S, WORD_S
from iris.ops.model.matmul import Call, Deal, library_s
from iris.ops.model.terms import AWAITED_STEP_S, KEEP_S, STEP_S, beside_s, exchange_s, multiplied_s

_CONTENTION = 0.12
"""How much longer storing tiles to all peers takes on 8 ranks because of incast (:meth:`.Call.contention`)."""
_BLOCKS_CONTENTION = 0.08
"""How much longer programs that only send take to store finished blocks to all peers on 8 ranks. In ``streams``, where
these programs are a kernel of their own, no such effect is seen."""
_COPIES_CONTENTION = 0.13
"""How much longer the copies of a chunk to all peers take on 8 ranks, although ranks are made level before them."""
_DRIFTING, _CHUNK_DRIFTING = 0.05, 0.06
"""How much longer copies take on 8 ranks, and how much more for each further chunk, if nothing makes the ranks level
again between chunks."""
_RELAYED_S = 2e-6
"""A team's flag behind a chunk that it has passed on (4 × H200, and 2 that stand for 8, 2026-11-26)."""


def _pushed(call: Call) -> float:
    deal = call.deal(call.rows * call.columns, crowded=True)
    storing = call.machine.store_s((call.world - 1) * call.output_nbytes, call.programs(), call.world)
    storing *= call.contention(_CONTENTION)
    return LAUNCH_S + beside_s(deal, storing) + MEET_S


def _behind(deal: Deal, chunks: int, each_s: float) -> float:
    """Chunks of the output that are sent as they are finished; sending one takes ``each_s``."""
    sent = 0.0
    for chunk in range(chunks):
        sent = max(sent, deal.done_s((chunk + 1) / chunks)) + each_s
    return LAUNCH_S + sent + MEET_S


def _copied(call: Call) -> float:
    deal = call.deal(call.rows * call.columns, tile_s=KEEP_S)
    chunks, _ = call.config.cut_in_groups(call.problem.m, call.config.num_chunks)
    drifting = call.contention(_DRIFTING + (chunks - 1) * _CHUNK_DRIFTING)
    each = (call.world - 1) * call.machine.copy_s(drifting * call.output_nbytes / chunks) + 2 * WORD_S
    return _behind(deal, chunks, each) + LAUNCH_S


def _with_senders(call: Call) -> tuple[int, Deal, int]:
    """The number of programs that only send, the deal of the others, and the number of chunks that are sent."""
    senders = max(1, min(call.config.senders_among(call.programs()), call.programs() - 1))
    deal = call.deal(call.rows * call.columns, senders, tile_s=KEEP_S)
    return senders, deal, call.config.groups(call.problem.m)


def _split(call: Call, contention: float = _BLOCKS_CONTENTION) -> float:
    senders, deal, chunks = _with_senders(call)
    nbytes = (call.world - 1) * call.output_nbytes / chunks
    storing = call.contention(contention) * call.machine.store_s(nbytes, senders, call.world)
    return _behind(deal, chunks, storing + FLAG_S)


def _relayed(call: Call) -> float:
    """A team of senders passes each chunk from neighbour to neighbour, while other teams pass other chunks; the last
    chunk travels alone."""
    senders, deal, chunks = _with_senders(call)
    teams = max(1, senders // RELAY_TEAM)
    nbytes, hops = call.output_nbytes / chunks, call.world - 1
    alone = hops * call.machine.send_s(nbytes * teams / senders)
    each = max(hops * (call.machine.pass_s(nbytes, senders) + _RELAYED_S / teams), alone / teams)
    return _behind(deal, chunks, each) + max(0.0, alone - each)


def _streams(call: Call) -> float:
    return _split(call, contention=0.0) + LAUNCH_S


def _decomposed(call: Call) -> float:
    """The library's matmul of each chunk of rows, with copies to all peers behind it; a kernel stores the last
    chunk."""
    *shares, last = call.shares(call.problem.m)
    contention, levelling = call.contention(_COPIES_CONTENTION), WORD_S if call.world > 2 else 0.0
    computed = sent = 0.0
    for share in shares:
        computed += share * library_s(call, 1 / share) + AWAITED_STEP_S
        each = call.machine.copy_s(contention * share * call.output_nbytes)
        sent = max(sent, computed) + (call.world - 1) * each + levelling
    computed += last * library_s(call, 1 / last) + STEP_S
    storing = call.machine.store_s((call.world - 1) * last * call.output_nbytes, call.programs(), call.world)
    return 2 * LAUNCH_S + max(sent, computed) + storing + MEET_S


def _then(call: Call) -> float:
    storing = call.machine.store_s((call.world - 1) * call.output_nbytes, call.programs(), call.world)
    return library_s(call) + LAUNCH_S + storing + 2 * MEET_S


def _exchanged(call: Call) -> float:
    """Every rank's columns go to all."""
    return multiplied_s(call) + exchange_s(call, (call.world - 1) * call.output_nbytes, call.world * call.output_nbytes)


ALGORITHMS: dict[str, Callable[[Call], float]] = {
    "push": _pushed,
    "split": _split,
    "streams": _streams,
    "relay": _relayed,
    "copy_engine": _copied,
    "decomposed": _decomposed,
    "low_latency": _exchanged,
    "baseline": _then,
}
