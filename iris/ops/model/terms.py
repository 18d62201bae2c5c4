"""Terms that the predictions of several ops share: matmuls, exchanges, and programs that store while they compute."""

from __future__ import annotations

from iris.ops.config import flagged_one_by_one
from iris.ops.model.machine import FLAG_S, LAUNCH_S, WORD_S
from iris.ops.model.matmul import Call, Deal, library_s
from iris.ops.words import in_words, word_dtype

_EXCHANGE_S = 2.2e-6
"""The time of an exchange behind (or before) the library's matmul, beside that for bytes and flags."""
_FLAGGING_S = 2e-6
"""The fence behind the data of the first hop, and the flag's way to a peer."""
_HOP_S, _FLAGGED_HOP_S = 1.2e-6, 4e-6
"""The time of a second hop beside that for its bytes: with words, and with flags (2, 4 and 8 × H200, 2026-11-26)."""
_HIDDEN, _HIDDEN_FROM = 0.5, 4 << 20
"""With two hops of words: the share of the traffic with local memory, beyond so many bytes, that the links hide,
because blocks that arrive early are summed and sent on while others arrive (2 and 4 × H200, 2026-11-27)."""
_BESIDE, _BESIDE_WAVES = 0.6, 16
"""If programs store to peers between their tiles: the share of the shorter of both (computing, storing) that overlaps
with the other, after so many waves. Before that, all programs compute at the same time, and store at the same time."""
KEEP_S = 4.5e-6
"""A tile stored for the copy engine, and counted."""
STEP_S, AWAITED_STEP_S = 1.5e-6, 3e-6
"""From one matmul of the library's to the next: without and with a waiting kernel between them on the same lane."""
_SOONER_S = 2.2e-6
"""``decomposed``: how much less time a copy takes if it follows a copy to another peer."""
_CONTENTION, _LATE_S = 0.17, 7e-6
"""How much longer the transfers of an exchange take on 8 ranks because of incast (:meth:`.Call.contention`): the
factor, and the most that it adds (8 × H200, 2026-11-26, like all figures of contention)."""
_TOLD_S = 6e-6
"""From the end of the last of several copies until all ranks know of it, if copies have no flags (2 × H100 that stand
for 8, 2026-11-25)."""


def local_s(call: Call) -> float:
    """The matmul by Iris's kernel, alone."""
    return LAUNCH_S + call.deal(call.rows * call.columns, crowded=True).total_s


def exchange_s(call: Call, sent_nbytes: float, kept_nbytes: float, hops: int = 1, exposed: float = 1.0) -> float:
    """The time of an exchange through inboxes, which peers write and this rank reads; as words if little data is sent.

    ``sent_nbytes``: bytes sent in each hop; without words, a second hop does not go through inboxes. ``kept_nbytes``:
    bytes of results that are then stored. ``exposed``: without words, the share of the traffic with local memory that
    the links do not hide."""
    dtype = call.problem.exchanged_dtype
    words = in_words(sent_nbytes, dtype, call.world, hops)
    carried_nbytes, inboxes = (sent_nbytes * word_dtype(dtype).itemsize / 4, hops) if words else (sent_nbytes, 1)
    waiting = (hops - 1) * _HOP_S if words else _FLAGGING_S + (hops - 1) * _FLAGGED_HOP_S
    crossing = hops * call.machine.store_s(carried_nbytes, call.programs(), call.world)
    crossing = min(crossing * call.contention(_CONTENTION), crossing + _LATE_S)
    moved_nbytes = 2 * inboxes * carried_nbytes + kept_nbytes
    if not words:
        moved_nbytes *= exposed
    elif hops == 2:
        moved_nbytes -= _HIDDEN * max(0.0, moved_nbytes - _HIDDEN_FROM)
    return _EXCHANGE_S + waiting + crossing + moved_nbytes / call.machine.memory_rate


def next_copy_s(call: Call, nbytes: float) -> float:
    """``decomposed``: a copy right behind a copy to another peer."""
    return call.machine.copy_s(nbytes) - _SOONER_S


def flag_s(call: Call) -> float:
    """The flag behind a copy, if there is one, where the copies of all ranks are waited for together."""
    return WORD_S if flagged_one_by_one(call.world) else 0.0


def landing_s(call: Call) -> float:
    """From the end of the last of such copies until all ranks know of it."""
    return FLAG_S if flagged_one_by_one(call.world) else _TOLD_S


def multiplied_s(call: Call) -> float:
    """The matmul before or behind an exchange, by Iris's kernel or the library, as the config says."""
    return local_s(call) if call.config.own_matmul else library_s(call)


def beside_s(deal: Deal, storing_s: float, apart: float = 0.0, waiting_s: float = 0.0) -> float:
    """The time of programs that compute tiles and store them to peers. ``apart``: how far the programs have drifted
    apart from the start, up to 1; ``waiting_s``: how long each program waits between tiles."""
    drifted = min(1.0, max(0.0, deal.left(0) - 1) / _BESIDE_WAVES + apart)
    computing = deal.total_s + waiting_s
    longer, shorter = max(computing, storing_s), min(computing, storing_s)
    share = _BESIDE
    if storing_s > computing:  # the links are never idle: most of the matmul runs beside them
        share += (1 - share) * (1 - computing / storing_s)
    return longer + (1 - share * drifted) * shorter
