"""What ends a wait that takes too long: its time limit, its peer's end, or another rank that gave up.

The kernel then records in the status words, which the host reads, who waited for whom. It sets the abort word on all
ranks, so that their kernels stop waiting too, and goes on with whatever is in memory.
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
"""How many times a wait polls before it checks whether something ends it."""
_BEGUN: tl.constexpr = tl.constexpr(1)
_COMPLETE: tl.constexpr = tl.constexpr(2)
"""The progress of a record. It is kept in the control block, as the status words are host memory, where not all atomics
work."""


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
    """Returns whether to give up this wait, and the new ``gone``. A wait is given up when its time is over, when the
    abort word says that a host or another program gave up, or when ``gone`` is already the peer's number plus one.

    ``gone`` becomes that once every rank that may signal has closed its context: the peer, or, of a ``counted`` flag
    and in kernels of users, all other ranks. What they sent before they closed is visible only from this check on, so
    only the next check can tell that nothing more will come.
    """
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
        # Threads read the clock at different times. One thread's atomic decides, and all read its decision in the word.
        # Not a compare-and-swap: Triton 3.6 compiles that to agent scope on AMD, whatever scope is asked for.
        tl.atomic_max(abort_word(handle), tl.where(waited > limit, code, 0), sem="relaxed", scope="sys")
        told = tl.atomic_add(abort_word(handle), 0, sem="acquire", scope="sys")
        if told == code:
            waited = tl.where(limit < 0, -waited, waited)
            stopped = _record(CODE_EXPIRED, site, me, peer, offset, value, seen, waited, handle)
            for other in range(world_size(handle)):
                theirs = translate(abort_word(handle), rank(handle), other, handle.bases)
                tl.atomic_xchg(theirs, code, sem="relaxed", scope="sys")  # may replace a code: any code ends the waits
    if (told != 0) & (stopped == 0):  # also if another rank or program gave up just before this one
        both = (peer.to(tl.int64) << 8) | (told & 255)
        stopped = _record(CODE_RELAYED, site, (told >> 8) & 255, both, offset, value, seen, waited, handle)
    return stopped, tl.where(_has_closed(peer, handle, counted or site == SITE_USER), peer + 1, 0)


@triton.jit
def _has_closed(peer, handle, counted: tl.constexpr):
    """Whether ``peer`` has closed its context, or, of a ``counted`` flag, all other ranks have. False if ``peer`` is no
    rank, or this one: under ``ctx.alone`` this rank's number is 0, and word 0 belongs to the job's rank 0."""
    lanes = tl.arange(0, MAX_RANKS)
    closed = tl.atomic_add(control_word(handle, CLOSED_WORDS) + lanes, 0, sem="acquire", scope="sys") != 0
    senders = (lanes < world_size(handle)) if counted else lanes == peer
    senders &= (lanes != rank(handle)) & (peer != rank(handle))
    return tl.sum((senders & closed).to(tl.int32)) == max(tl.sum(senders.to(tl.int32)), 1)


@triton.jit
def _record(code: tl.constexpr, site: tl.constexpr, me, peer, offset, wanted, seen, waited, handle):
    """Write the status words of ``code``'s record; the code last, so that the host never reads half a record.

    Of all programs that give up, on any of this rank's streams, only the first writes. Returns whether the record is
    complete, int32. Until it is, no other program may stop: its stream could end, and the host would find no record.
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
