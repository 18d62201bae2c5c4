"""What ends a wait that goes on for too long: its time limit, its peer's end, or another rank that gave up.

The kernel then records who waited for whom in the status words that the host reads, raises the abort word on all ranks
so that their kernels stop waiting too, and goes on with whatever is in memory.
"""

from typing import Any

import triton
import triton.language as tl

from iris.device.arch import clock_ns, meet_to_publish
from iris.device.control import (
    CLOSED_WORDS,
    CODE_EXPIRED,
    CODE_RELAYED,
    RECORD_WORDS,
    RECORDS,
    SITE_USER,
    SITES,
    STATUS_CODE,
    STATUS_FLAG,
    STATUS_PEER,
    STATUS_RANK,
    STATUS_SEEN,
    STATUS_SITE,
    STATUS_WAITED,
    STATUS_WANTED,
    abort_word,
    control_word,
    status_words,
)
from iris.device.handle import FIRST_TIMEOUT_NS, MAX_RANKS, TIMEOUT_NS, rank, world_size
from iris.device.rma import translate

POLLS_PER_CHECK: tl.constexpr = tl.constexpr(64)
"""How often a wait looks at what it waits for, before it looks at what may end it."""
_BEGUN: tl.constexpr = tl.constexpr(1)
_COMPLETE: tl.constexpr = tl.constexpr(2)
"""How far a record is, in the control block: the status words are host memory, for which not all atomics are made."""


@triton.constexpr_function
def _is_site(site: Any) -> bool:
    return site in SITES


@triton.jit
def require_site(site: tl.constexpr):
    tl.static_assert(_is_site(site), "site: expected a key of iris.device.control.SITES")


@triton.jit
def check_bounds(
    offset, value, seen, peer, gone, started, handle, site: tl.constexpr, counted: tl.constexpr = False
):  # fmt: skip
    """Whether to give up this wait: its time is over, the peer is dead, another rank gave up, or ``gone`` is the peer,
    plus one. And what ``gone`` is now: that, if those who may signal have closed their contexts. In kernels of users,
    whose flags several ranks may count up, these are all others. What they sent before is seen from then on, so only
    the next check knows that no more will come."""
    stopped = 0
    limit = tl.load(handle.info + TIMEOUT_NS)
    if (value == 0) | (value == 1):
        limit = tl.load(handle.info + FIRST_TIMEOUT_NS)
    peer = tl.cast(peer, tl.int32)
    limit = tl.where((gone != 0) & (gone == peer + 1), -1, limit)
    waited = clock_ns() - started
    told = tl.atomic_add(abort_word(handle), 0, sem="acquire", scope="sys")
    if told == 0:
        me = rank(handle).to(tl.int64)
        code = ((tl.program_id(0).to(tl.int64) + 2) << 16) | (me << 8) | (peer & 255)
        # Threads have read the clock one after the other: it is one's that decides, and all learn from the word how.
        # Not a compare-and-swap: Triton 3.6 compiles that to agent scope on AMD, whatever scope is asked for.
        tl.atomic_max(abort_word(handle), tl.where(waited > limit, code, 0), sem="relaxed", scope="sys")
        told = tl.atomic_add(abort_word(handle), 0, sem="acquire", scope="sys")
        if told == code:
            waited = tl.where(limit < 0, -waited, waited)
            stopped = _record(CODE_EXPIRED, site, me, peer, offset, value, seen, waited, handle)
            for other in range(world_size(handle)):
                theirs = translate(abort_word(handle), rank(handle), other, handle.bases)
                tl.atomic_xchg(theirs, code, sem="relaxed", scope="sys")  # over another's, too: any ends the waits
    if (told != 0) & (stopped == 0):  # also if another rank, or program, has been faster by so little
        both = (peer.to(tl.int64) << 8) | (told & 255)
        stopped = _record(CODE_RELAYED, site, (told >> 8) & 255, both, offset, value, seen, waited, handle)
    return stopped, tl.where(_has_closed(peer, handle, counted or site == SITE_USER), peer + 1, 0)


@triton.jit
def _has_closed(peer, handle, counted: tl.constexpr):
    """Whether ``peer``, if there is such a rank, has closed its context; of a flag that is ``counted``, all others. Not
    if it is this rank, whose word in a job of its own is another's."""
    lanes = tl.arange(0, MAX_RANKS)
    closed = tl.atomic_add(control_word(handle, CLOSED_WORDS) + lanes, 0, sem="acquire", scope="sys") != 0
    senders = (lanes < world_size(handle)) if counted else lanes == peer
    senders &= (lanes != rank(handle)) & (peer != rank(handle))
    return tl.sum((senders & closed).to(tl.int32)) == max(tl.sum(senders.to(tl.int32)), 1)


@triton.jit
def _record(code: tl.constexpr, site: tl.constexpr, me, peer, offset, wanted, seen, waited, handle):
    """Write the status words of ``code``'s record; the code last, so that the host never reads half a record.

    Of all programs that give up, on any stream of this rank's, only the first writes. Returns whether the record is
    complete, int32: until it is, no other may stop, or its stream could be done and the host find nothing.
    """
    progress_ptr = control_word(handle, RECORDS) + (code - CODE_EXPIRED)
    progress = tl.atomic_max(progress_ptr, _BEGUN, sem="acquire", scope="sys")
    if progress == 0:
        words = status_words(handle) + (code - CODE_EXPIRED) * RECORD_WORDS
        tl.store(words + STATUS_SITE, tl.full((), site, tl.int64))
        tl.store(words + STATUS_RANK, me)
        tl.store(words + STATUS_PEER, peer)
        tl.store(words + STATUS_FLAG, offset)
        tl.store(words + STATUS_WANTED, wanted)
        tl.store(words + STATUS_SEEN, seen)
        tl.store(words + STATUS_WAITED, waited)
        meet_to_publish()
        tl.atomic_xchg(words + STATUS_CODE, tl.full((), code, tl.int64), sem="release", scope="sys")
        tl.atomic_xchg(progress_ptr, _COMPLETE, sem="release", scope="sys")
    return (progress != _BEGUN).to(tl.int32)
