"""Flags between ranks: signal, wait, barrier, with the memory order built in.

A *flag* is one aligned int32 word on the symmetric heap. It only grows: each use of it announces the next
*epoch*, so nothing need be reset, and a captured graph replays correctly. Comparison is by difference, so
the count may wrap around. Ops' flags are never more than a few epochs ahead of a wait: one that looks further ahead
was last set before the count wrapped, and one that is 0 was never set; both still have to be waited for.

Publishing: all stores → CTA barrier → one release at ``sys`` scope (:func:`signal`).
Consuming: acquire at ``sys`` scope → CTA barrier → loads (:func:`wait`).

Every wait is bounded. When one expires, the kernel records who waited for whom in the status words that the
host reads, raises the abort word on all ranks so that their kernels stop waiting too, and goes on with
whatever is in memory; the host raises ``WaitTimeout`` at its next look: ask the context (``synchronize``,
``check``, the next op) before a result is used. A simulated launch is such a look.
"""

from typing import Any

import triton
import triton.language as tl

from iris.device.arch import clock_ns, load_fresh, meet_to_publish, repeated
from iris.device.handle import FIRST_TIMEOUT_NS, STATUS_ADDRESS, TIMEOUT_NS, rank, require_handle, world_size
from iris.device.rma import EXPECTED_RANKS, is_whole, points_to, translate

MAX_RANKS: tl.constexpr = tl.constexpr(16)

CONTROL_BYTES: tl.constexpr = tl.constexpr(4096)
"""The control block at the start of every heap: the abort word, then how far the two records in the status words are,
barrier flags, barrier epochs, and which ranks have closed their contexts."""
ABORT_WORD: tl.constexpr = tl.constexpr(0)
_RECORDS: tl.constexpr = tl.constexpr(128)
_BARRIER_FLAGS: tl.constexpr = tl.constexpr(256)
_BARRIER_EPOCHS: tl.constexpr = tl.constexpr(512)
CLOSED_WORDS: tl.constexpr = tl.constexpr(768)
"""An int32 word for each rank, which its host sets at all peers when all that it was to send has been sent."""

TURNSTILE_WORDS: tl.constexpr = tl.constexpr(256)
"""int32 words of a turnstile, on the symmetric heap: epoch, programs that left, the coming epoch, flags. All but the
coming epoch are zero when made."""
_LEFT_COUNT: tl.constexpr = tl.constexpr(1)
NEXT_EPOCH: tl.constexpr = tl.constexpr(2)
"""Word of a turnstile that holds the coming call's epoch, for the copy engine to flag arrivals with; 1 when made."""
_ENTERED: tl.constexpr = tl.constexpr(64)
_LEFT: tl.constexpr = tl.constexpr(128)

COPIED: tl.constexpr = tl.constexpr(2)
"""What a word of the own memory holds once the copies in front of it are done; not 0 or 1, for which waits are longer,
as for ranks that still compile."""

NO_EPOCHS: tl.constexpr = tl.constexpr(0)
TURNSTILE: tl.constexpr = tl.constexpr(-1)
"""How a kernel counts calls: not at all, as nothing in it waits; or by :func:`enter` and :func:`leave`. Any other
number is that of the epochs for :func:`own_epoch`."""

STATUS_WORDS: tl.constexpr = tl.constexpr(16)
RECORD_WORDS: tl.constexpr = tl.constexpr(8)
"""Of the two records in the status words, that of a wait of this rank's that expired, and that of what another one said
when it gave up: programs that are only told to stop must not write over the first."""
STATUS_CODE: tl.constexpr = tl.constexpr(0)
STATUS_SITE: tl.constexpr = tl.constexpr(1)
STATUS_RANK: tl.constexpr = tl.constexpr(2)
STATUS_PEER: tl.constexpr = tl.constexpr(3)
"""Who was waited for. In the record of what another rank said: in the lowest byte for whom that one waited, and above
it for whom this rank did."""
STATUS_FLAG: tl.constexpr = tl.constexpr(4)
STATUS_WANTED: tl.constexpr = tl.constexpr(5)
STATUS_SEEN: tl.constexpr = tl.constexpr(6)
STATUS_WAITED: tl.constexpr = tl.constexpr(7)
"""In ns; negative if the wait ended because the peer has closed its context."""
CODE_EXPIRED: tl.constexpr = tl.constexpr(1)
CODE_RELAYED: tl.constexpr = tl.constexpr(2)
NO_FLAG: tl.constexpr = tl.constexpr(1 << 32)
"""What a record has for what was seen, where data was waited for that comes without a flag: no int32."""
_BEGUN: tl.constexpr = tl.constexpr(1)
_COMPLETE: tl.constexpr = tl.constexpr(2)
"""How far a record is, in the control block: the status words are host memory, for which not all atomics are made."""

SITES = {
    0: "a user kernel",
    1: "device_barrier",
    2: "all_gather_matmul",
    3: "matmul_all_scatter",
    4: "matmul",
    5: "matmul_reduce_scatter",
    6: "matmul_all_reduce",
}
"""What a wait belongs to, for the error message: pass the number as ``site``."""
SITE_USER: tl.constexpr = tl.constexpr(0)
SITE_BARRIER: tl.constexpr = tl.constexpr(1)
SITE_MATMUL: tl.constexpr = tl.constexpr(4)


def abort_code(waiting: int, peer: int) -> int:
    """What the abort word holds when the host of rank ``waiting`` gives up on rank ``peer``; if a program does, its
    number plus two is on top, so that it does not take the host's word for its own. Kernels only read their own heap's
    word while they wait, since reading host memory would hold them up for milliseconds."""
    return (1 << 16) | (waiting << 8) | peer


_LEAST_WORDS: tl.constexpr = tl.constexpr(128)
"""Words that are waited for together: more than the lanes of a warp, or of AMD's wave."""
NO_WORD: tl.constexpr = tl.constexpr(-1)
"""What stands where a word is waited for, in 32 or 64 bits."""
_ANOTHER_NAN: tl.constexpr = tl.constexpr(0x7FFFFFFF)
"""One float32, two of 16 bits, or four e4m3: NaNs all, as those of :data:`NO_WORD` are."""
_POLLS_PER_CHECK: tl.constexpr = tl.constexpr(64)
_MOST_AHEAD: tl.constexpr = tl.constexpr(32)
"""A flag of an op counts as reached only if it is less than this ahead of the value waited for. Epochs are ahead by a
few at most, counts by no more than the number of ranks."""


@triton.constexpr_function
def _is_site(site: Any) -> bool:
    return site in SITES


@triton.jit
def _require_site(site: tl.constexpr):
    tl.static_assert(_is_site(site), "site: expected a key of iris.device.sync.SITES")


@triton.jit
def _own_base(handle):
    return tl.load(handle.bases + rank(handle))


@triton.jit
def _control_word(handle, offset: tl.constexpr):
    return (_own_base(handle) + offset).to(tl.pointer_type(tl.int32))


@triton.jit
def _abort_word(handle):
    return (_own_base(handle) + ABORT_WORD).to(tl.pointer_type(tl.int64))


@triton.jit
def _status(handle):
    return tl.load(handle.info + STATUS_ADDRESS).to(tl.pointer_type(tl.int64))


@triton.jit
def _require_flag(flag_ptr):
    """Flags are int32, so that they may wrap around: of other dtypes a wait could end at once, or never."""
    tl.static_assert(
        points_to(flag_ptr),
        "expected a pointer to a flag: the first argument, as in iris.signal(flag_ptr, value, peer, handle)",
    )
    tl.static_assert(points_to(flag_ptr, tl.int32), "a flag is int32: ctx.zeros(n, dtype=torch.int32)")


@triton.jit
def _as_epoch(value):
    """``value`` as flags hold it: of a count in more bits, the low 32, which wrap around as flags do."""
    tl.static_assert(is_whole(value), "value: expected whole numbers, as flags are int32; in front of peer and handle")
    return tl.cast(value, tl.int32)


@triton.jit
def _require_peers(peers, handle):
    tl.static_assert(is_whole(peers), EXPECTED_RANKS)
    require_handle(handle)


@triton.jit
def _require_one(flag_ptr):
    tl.static_assert(not flag_ptr.type.is_block(), "wait() takes one flag: for a block of them there is wait_all()")


@triton.jit
def _require_row(flag_ptrs):
    """Only of a block of one dimension can the late flag be picked out and named."""
    _require_flag(flag_ptrs)
    tl.static_assert(len(flag_ptrs.shape) == 1, "flags are a block of one dimension: tl.ravel(block); or wait()")


@triton.jit
def _require_warps(word_ptrs):
    """Threads learn from each other whether all words have come; of words that one warp holds, each warp would keep to
    what it has seen itself, and some would go on to another CTA barrier than the rest."""
    tl.static_assert(word_ptrs.numel >= _LEAST_WORDS, "words are waited for in blocks of at least 128")


@triton.jit
def _poll(flag_ptr):
    """One look at a flag, with acquire at sys scope."""
    return tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")


@triton.jit
def signal(flag_ptr, value, peer, handle):
    """Set ``flag_ptr`` at rank ``peer`` to ``value``, after everything this program has stored so far.

    Args:
        flag_ptr: int32 flag, as a pointer into this rank's heap.
        value: the epoch to announce, int32; of a count in more bits the low 32.
        peer: whose flag to set; may be this rank.

    Sync: releases at sys scope all earlier stores of all threads of this program, to any rank.
    """
    _require_flag(flag_ptr)
    epoch = _as_epoch(value)
    meet_to_publish()
    tl.atomic_xchg(translate(flag_ptr, rank(handle), peer, handle.bases), epoch, sem="release", scope="sys")


@triton.jit
def signal_add(flag_ptr, value, peer, handle):
    """As :func:`signal`, but adds ``value``: for a flag that several programs or ranks count up together."""
    _require_flag(flag_ptr)
    count = _as_epoch(value)
    meet_to_publish()
    tl.atomic_add(translate(flag_ptr, rank(handle), peer, handle.bases), count, sem="release", scope="sys")


@triton.jit
def wait(flag_ptr, value, peer, handle, site: tl.constexpr = SITE_USER, counted: tl.constexpr = False):
    """Wait until this rank's flag at ``flag_ptr`` has reached ``value``. Returns what it holds, int32.

    Args:
        flag_ptr: int32 flag in this rank's heap; one, not a block.
        value: the epoch to wait for, int32; of a count in more bits the low 32. Reached when ``flag - value >= 0`` and,
            for an op's flags, less than 32.
        peer: the rank expected to signal, named if the wait expires.
        site: what to call this wait in the error, a key of :data:`SITES`.
        counted: of an op's flag: several ranks count it up, of which ``peer`` is one.

    Sync: acquires at sys scope, for all threads of this program, what the signaller released.
    Bounded: by the context's ``timeout_s``, or ``first_timeout_s`` where ``value`` is 0 or 1; and by the end of all
        other ranks' contexts, or, of an op's flag, of the peer's.
    """
    _require_flag(flag_ptr)
    _require_one(flag_ptr)
    _require_peers(peer, handle)
    _require_site(site)
    value = _as_epoch(value)
    seen = _poll(flag_ptr)
    if _ahead(seen, value, site) < 0:
        started = clock_ns()
        stopped = 0
        polls = 0
        gone = 0
        while (_ahead(seen, value, site) < 0) & (stopped == 0):
            seen = _poll(flag_ptr)
            polls += 1
            if polls % _POLLS_PER_CHECK == 0 and _ahead(seen, value, site) < 0:
                offset = flag_ptr.to(tl.int64) - _own_base(handle)
                stopped, gone = _check_bounds(offset, value, seen, peer, gone, started, handle, site, counted)
    tl.debug_barrier()
    return seen


@triton.jit
def reached(flag_ptr, value):
    """Whether this rank's flag at ``flag_ptr`` has reached ``value`` by now: a look that does not wait, for programs
    that have something else to do until then. Arguments as for :func:`wait`.

    Sync: if so, acquires at sys scope, for all threads of this program, what the signaller released.
    Bounded: a loop around it is not. Let the last thing that is left to do be a :func:`wait`.
    """
    _require_flag(flag_ptr)
    _require_one(flag_ptr)
    seen = _poll(flag_ptr)
    tl.debug_barrier()
    return _ahead(seen, _as_epoch(value), SITE_USER) >= 0


@triton.jit
def signal_all(flag_ptr, values, peers, valid, handle):
    """:func:`signal` to several peers at once: ``peers`` is a block, masked by ``valid``; ``values`` is such a block,
    too, or one epoch for all."""
    _require_flag(flag_ptr)
    _require_peers(peers, handle)
    remote = translate(flag_ptr + peers * 0, rank(handle), peers, handle.bases)
    meet_to_publish()
    tl.atomic_xchg(remote, _as_epoch(values), mask=valid, sem="release", scope="sys")


@triton.jit
def wait_all(flag_ptrs, values, peers, valid, handle, site: tl.constexpr = SITE_USER):
    """:func:`wait` for several flags at once: ``flag_ptrs`` is a block of one dimension, masked by ``valid``;
    ``values`` and ``peers`` are such blocks, too, or one for all. Returns whether all were reached: not, if the wait
    expired."""
    _require_row(flag_ptrs)
    _require_peers(peers, handle)
    _require_site(site)
    values = _as_epoch(values)
    ahead = _poll_all(flag_ptrs, values, valid, site)
    if tl.min(ahead) < 0:
        started = clock_ns()
        stopped = 0
        polls = 0
        gone = 0
        while (tl.min(ahead) < 0) & (stopped == 0):
            ahead = _poll_all(flag_ptrs, values, valid, site)
            polls += 1
            if polls % _POLLS_PER_CHECK == 0 and tl.min(ahead) < 0:
                late = tl.arange(0, ahead.shape[0]) == tl.argmin(ahead, 0)
                stopped, gone = _check_lane(late, flag_ptrs, values, peers, gone, started, handle, site)
    tl.debug_barrier()
    return tl.min(ahead) >= 0


@triton.jit
def wait_leading(flag_ptrs, values, peers, valid, handle, site: tl.constexpr = SITE_USER):
    """Wait until the first of several flags is reached; returns how many of the leading ones are, int32.

    Arguments as for :func:`wait_all`; the first lane is valid.

    Sync: acquires for all that are counted. Bounded: as :func:`wait`.
    """
    _require_row(flag_ptrs)
    _require_peers(peers, handle)
    _require_site(site)
    values = _as_epoch(values)
    lanes = tl.arange(0, valid.shape[0])
    leading = _leading(flag_ptrs, values, valid, lanes, site)
    if leading == 0:
        started = clock_ns()
        stopped = 0
        polls = 0
        gone = 0
        while (leading == 0) & (stopped == 0):
            leading = _leading(flag_ptrs, values, valid, lanes, site)
            polls += 1
            if polls % _POLLS_PER_CHECK == 0 and leading == 0:
                stopped, gone = _check_lane(lanes == 0, flag_ptrs, values, peers, gone, started, handle, site)
        leading = max(leading, 1)
    tl.debug_barrier()
    return leading


@triton.jit
def store_words(word_ptrs, data, mask=None):
    """Store a block of int32, to any rank, as *words*: each says by itself that it has come, as where it lies there was
    :data:`NO_WORD` before. So no flag follows the data, and no fence waits for it. (The custom all-reduces of
    TensorRT-LLM and FlashInfer do so with zeros of negative sign, Lamport's way.)

    Args:
        word_ptrs: where; memory of which each word is stored to, and then taken by :func:`take_words`, by turns. Of
            int32, for data that is floats: of these :data:`NO_WORD` is nothing but NaNs, and such NaNs become others.
            Of int64 for any other data, of which no bits are left for that.
        data: int32.
        mask: which of the words are stored.

    Sync: orders nothing, not even one word and the next.
    """
    if word_ptrs.dtype.element_ty == tl.int64:
        words = data.to(tl.int64) & 0xFFFFFFFF
    else:
        words = tl.where(data == NO_WORD, _ANOTHER_NAN, data)
    tl.store(word_ptrs, words, mask=mask, cache_modifier=".wt")


@triton.jit
def take_words(word_ptrs, epoch, peers, mask, handle, site: tl.constexpr = SITE_USER):
    """Wait until words stand at all of ``word_ptrs``, in this rank's heap, and take them away: :data:`NO_WORD` stands
    there then. Returns the data, int32.

    Args:
        word_ptrs: a block of three dimensions, of which the first is the peer; at least 128 words, of int32 or int64 as
            they were stored.
        epoch: of the call, int32; named if the wait expires.
        peers: the ranks expected to store the words, named if the wait expires.
        mask: which of the words come, broadcast to the block; of others the data is 0.

    Sync: orders nothing. Who stores there again must have had something that this rank sent in a later kernel.
        Bounded as :func:`wait`.
    """
    _require_warps(word_ptrs)
    _require_site(site)
    mask = tl.broadcast_to(mask, word_ptrs.shape)
    seen = load_fresh(word_ptrs, mask, 0)
    if _words_missing(seen) > 0:
        started = clock_ns()
        stopped = 0
        polls = 0
        gone = 0
        while (_words_missing(seen) > 0) & (stopped == 0):
            seen = load_fresh(word_ptrs, mask, 0)
            polls += 1
            if polls % _POLLS_PER_CHECK == 0 and _words_missing(seen) > 0:
                late = seen == NO_WORD
                first = tl.min(tl.where(late, word_ptrs.to(tl.int64), 1 << 62))
                peer = tl.min(tl.where(late, peers[:, None, None], MAX_RANKS))
                offset = first - _own_base(handle)
                stopped, gone = _check_bounds(offset, epoch, NO_FLAG, peer, gone, started, handle, site)
    if repeated(word_ptrs):
        # One thread saw a word come, and all go by that; another that holds the same word may have looked before.
        seen = load_fresh(word_ptrs, mask, 0)
        tl.debug_barrier()
    tl.store(word_ptrs, tl.zeros_like(seen) + NO_WORD, mask=mask)
    return seen.to(tl.int32)


@triton.jit
def _words_missing(words):
    """Whether any word has not come, int32."""
    return tl.max((words == NO_WORD).to(tl.int32))


@triton.jit
def _leading(flag_ptrs, values, valid, lanes, site: tl.constexpr):
    """How many flags from the first on are reached."""
    reached = valid & (_poll_all(flag_ptrs, values, valid, site) >= 0)
    return tl.min(tl.where(reached, valid.shape[0], lanes))


@triton.jit
def _poll_all(flag_ptrs, values, valid, site: tl.constexpr):
    """How far each flag is ahead of its value; negative where it must still be waited for."""
    seen = tl.atomic_add(flag_ptrs, 0, mask=valid, sem="acquire", scope="sys")
    return tl.where(valid, _ahead(seen, values, site), 0)


@triton.jit
def _ahead(seen, value, site: tl.constexpr):
    """How far a flag is ahead of a value; negative where it must still be waited for."""
    ahead = seen - value
    if site != SITE_USER:
        set_lately = (ahead < _MOST_AHEAD) & ((seen != 0) | (value == 0))
        ahead = tl.where(set_lately, ahead, -1)
    return ahead


@triton.jit
def _check_lane(late, flag_ptrs, values, peers, gone, started, handle, site: tl.constexpr):
    """:func:`_check_bounds` for the one flag of several that ``late`` picks."""
    address = tl.sum(tl.where(late, flag_ptrs.to(tl.int64), 0))
    value = tl.sum(tl.where(late, values, 0))
    peer = tl.sum(tl.where(late, peers, 0))
    seen = _poll(address.to(tl.pointer_type(tl.int32)))
    return _check_bounds(address - _own_base(handle), value, seen, peer, gone, started, handle, site)


@triton.jit
def _check_bounds(
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
    told = tl.atomic_add(_abort_word(handle), 0, sem="acquire", scope="sys")
    if told == 0:
        me = rank(handle).to(tl.int64)
        code = ((tl.program_id(0).to(tl.int64) + 2) << 16) | (me << 8) | (peer & 255)
        # Threads have read the clock one after the other: it is one's that decides, and all learn from the word how.
        # Not a compare-and-swap: Triton 3.6 compiles that to agent scope on AMD, whatever scope is asked for.
        tl.atomic_max(_abort_word(handle), tl.where(waited > limit, code, 0), sem="relaxed", scope="sys")
        told = tl.atomic_add(_abort_word(handle), 0, sem="acquire", scope="sys")
        if told == code:
            waited = tl.where(limit < 0, -waited, waited)
            stopped = _record(CODE_EXPIRED, site, me, peer, offset, value, seen, waited, handle)
            for other in range(world_size(handle)):
                theirs = translate(_abort_word(handle), rank(handle), other, handle.bases)
                tl.atomic_max(theirs, code, sem="relaxed", scope="sys")
    if (told != 0) & (stopped == 0):  # also if another rank, or program, has been faster by so little
        both = (peer.to(tl.int64) << 8) | (told & 255)
        stopped = _record(CODE_RELAYED, site, (told >> 8) & 255, both, offset, value, seen, waited, handle)
    return stopped, tl.where(_has_closed(peer, handle, counted or site == SITE_USER), peer + 1, 0)


@triton.jit
def _has_closed(peer, handle, counted: tl.constexpr):
    """Whether ``peer``, if there is such a rank, has closed its context; of a flag that is ``counted``, all others. Not
    if it is this rank, whose word in a job of its own is another's."""
    lanes = tl.arange(0, MAX_RANKS)
    closed = tl.atomic_add(_control_word(handle, CLOSED_WORDS) + lanes, 0, sem="acquire", scope="sys") != 0
    senders = (lanes < world_size(handle)) if counted else lanes == peer
    senders &= (lanes != rank(handle)) & (peer != rank(handle))
    return tl.sum((senders & closed).to(tl.int32)) == max(tl.sum(senders.to(tl.int32)), 1)


@triton.jit
def _record(code: tl.constexpr, site: tl.constexpr, me, peer, offset, wanted, seen, waited, handle):
    """Write the status words of ``code``'s record; the code last, so that the host never reads half a record.

    Of all programs that give up, on any stream of this rank's, only the first writes. Returns whether the record is
    complete, int32: until it is, no other may stop, or its stream could be done and the host find nothing.
    """
    progress_ptr = _control_word(handle, _RECORDS) + (code - CODE_EXPIRED)
    progress = tl.atomic_max(progress_ptr, _BEGUN, sem="acquire", scope="sys")
    if progress == 0:
        words = _status(handle) + (code - CODE_EXPIRED) * RECORD_WORDS
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


@triton.jit
def everyone(handle):
    """All ranks as a block of ``MAX_RANKS`` lanes, and which lanes are real."""
    lanes = tl.arange(0, MAX_RANKS)
    valid = lanes < world_size(handle)
    return tl.where(valid, lanes, rank(handle)), valid


@triton.jit
def others(handle):
    """All ranks but this one as a block of ``MAX_RANKS`` lanes, and which lanes are real."""
    lanes, me = tl.arange(0, MAX_RANKS), rank(handle)
    valid = (lanes < world_size(handle)) & (lanes != me)
    return tl.where(valid, lanes, me), valid


@triton.jit
def _following(epoch):
    """The epoch after this one. None is 0, which a flag holds that was never set, and a word of the copy engine's when
    there is nothing to do; behind -1, odd, comes 2, even, as halves of inboxes take turns."""
    return tl.where(epoch == -1, 2, epoch + 1)


@triton.jit
def _meet(peers, valid, handle, site: tl.constexpr):
    """Signal all ``peers`` and wait for them. Each pair of ranks counts the barriers it has been in together,
    so that any mix of groups shares one set of flags."""
    flags, epochs = _control_word(handle, _BARRIER_FLAGS), _control_word(handle, _BARRIER_EPOCHS)
    wanted = _following(tl.load(epochs + peers, mask=valid, other=0))
    signal_all(flags + rank(handle), wanted, peers, valid, handle)
    wait_all(flags + peers, wanted, peers, valid, handle, site)
    tl.store(epochs + peers, wanted, mask=valid)
    tl.debug_barrier()  # one thread has stored it, and all load it in the kernel's next barrier


@triton.jit
def barrier(handle, site: tl.constexpr = SITE_BARRIER):
    """A barrier of all ranks of the job. Run by ONE program per rank.

    Sync: what each rank's program stored before, and what ran before its kernel on the stream, is seen by every
    rank's program, and by what runs after its kernel.
    """
    peers, valid = everyone(handle)
    _meet(peers, valid, handle, site)


@triton.jit
def barrier_among(members_ptr, count, handle, site: tl.constexpr = SITE_BARRIER):
    """:func:`barrier` of the ``count`` ranks listed at ``members_ptr`` (int32), this rank among them."""
    tl.static_assert(
        points_to(members_ptr, tl.int32) and is_whole(count),
        "expected a pointer to int32 ranks, and their number: iris.barrier_among(members_ptr, count, handle)",
    )
    lanes = tl.arange(0, MAX_RANKS)
    valid = lanes < count
    _meet(tl.load(members_ptr + lanes, mask=valid, other=rank(handle)), valid, handle, site)


@triton.jit
def barrier_kernel(handle, members_ptr, count):
    """:func:`barrier_among` as a kernel of one program; launched by ``ctx.device_barrier``."""
    barrier_among(members_ptr, count, handle)


@triton.jit
def coming_epoch(turnstile_ptr):
    """The epoch of the call that begins."""
    return _following(tl.load(turnstile_ptr))


@triton.jit
def enter(turnstile_ptr, handle):
    """Begin a kernel that touches peers' memory: tell all ranks that this one has come so far. Returns the epoch.

    Called once by every program of the kernel. After :func:`wait_entered` for a peer, what ran on that peer's
    stream before its kernel is visible, and its buffers may be read and written.
    """
    epoch = coming_epoch(turnstile_ptr)
    if tl.program_id(0) == 0:
        peers, valid = everyone(handle)
        signal_all(turnstile_ptr + _ENTERED + rank(handle), epoch, peers, valid, handle)
    return epoch


@triton.jit
def wait_entered(turnstile_ptr, epoch, peer, handle, site: tl.constexpr = SITE_USER):
    """Wait until ``peer`` has entered the kernel of the same epoch."""
    wait(turnstile_ptr + _ENTERED + peer, epoch, peer, handle, site)


@triton.jit
def wait_all_entered(turnstile_ptr, epoch, handle, site: tl.constexpr = SITE_USER):
    """Wait until all ranks have entered the kernel of the same epoch."""
    peers, valid = everyone(handle)
    wait_all(turnstile_ptr + _ENTERED + peers, epoch, peers, valid, handle, site)


@triton.jit
def arrive(counter_ptr, count):
    """Count this program in. Returns whether it is the last of ``count``, and then sets the counter back to zero.

    Args:
        counter_ptr: int32 in this rank's memory, zero when made; for programs of one kernel.

    Sync: what the last one signals after this covers what all of them stored before.
    """
    meet_to_publish()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="sys") == count - 1
    if last:
        tl.debug_barrier()
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def own_epoch(epochs_ptr):
    """The epoch of the call that begins, where each program of a kernel counts calls for itself.

    Args:
        epochs_ptr: int32 in this rank's memory, one for each program that any call may have, zero when made.
    """
    return _following(tl.load(epochs_ptr + tl.program_id(0)))


@triton.jit
def end_own_epoch(epochs_ptr, epoch, count):
    """End a kernel that began with :func:`own_epoch`, and has at most ``count`` programs, for which there are epochs.
    Called once by every program, which counts for those, too, that this call does not have.

    Sync: orders nothing. For kernels whose programs wait for all that they need, and that nobody waits for at the end.
    No program waits for another one's count: an atomic count of them all takes 0.5 µs.
    """
    tl.debug_barrier()  # all threads have read it
    for program in range(tl.program_id(0), count, tl.num_programs(0)):
        tl.store(epochs_ptr + program, epoch)


@triton.jit
def leave(turnstile_ptr, epoch, handle, site: tl.constexpr = SITE_USER, meet: tl.constexpr = True):
    """End a kernel begun with :func:`enter`: it completes on no rank before all ranks are done with it.

    Called once by every program. The last one to come meets the other ranks, and starts the next epoch; the
    others end at once. Behind the kernel, every rank may overwrite what peers read and use what they wrote.

    Without ``meet`` only the epoch ends. That suffices where each program waits for what it needs, and peers' memory
    is written only after :func:`wait_entered`, which they pass when they have finished the call before.
    """
    if arrive(turnstile_ptr + _LEFT_COUNT, tl.num_programs(0)):
        if meet:
            peers, valid = everyone(handle)
            signal_all(turnstile_ptr + _LEFT + rank(handle), epoch, peers, valid, handle)
            wait_all(turnstile_ptr + _LEFT + peers, epoch, peers, valid, handle, site)
        tl.store(turnstile_ptr, epoch)
        tl.store(turnstile_ptr + NEXT_EPOCH, _following(epoch))
