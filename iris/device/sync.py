"""Flags between ranks: signal, wait, barrier, with the memory order built in.

A *flag* is one aligned int32 word on the symmetric heap. It only grows: each use of it announces the next *epoch*, so
no flag has to be reset, and a captured graph replays correctly. Values are compared by their difference, so epochs may
wrap around. An op's flag is never more than a few epochs ahead of a wait. If it seems further ahead, it was last set
before epochs wrapped; if it is 0, it was never set. In both cases the wait goes on.

Publishing: all stores → CTA barrier → one release at ``sys`` scope (:func:`signal`).
Consuming: acquire at ``sys`` scope → CTA barrier → loads (:func:`wait`).

Every wait is bounded (:mod:`iris.device.bounds`). When one expires, all ranks' kernels stop waiting and go on with
whatever is in memory, and the host raises ``WaitTimeout`` at its next check: call ``synchronize``, ``check`` or the
next op of the context before you use a result. In the simulator, every launch is such a check.
"""

import triton
import triton.language as tl

from iris.device.arch import clock_ns, meet_to_publish
from iris.device.bounds import POLLS_PER_CHECK, check_bounds, require_site
from iris.device.control import BARRIER_EPOCHS, BARRIER_FLAGS, SITE_BARRIER, SITE_USER, control_word, own_base
from iris.device.handle import MAX_RANKS, rank, require_handle, world_size
from iris.device.rma import EXPECTED_RANKS, is_whole, points_to, translate

COPIED: tl.constexpr = tl.constexpr(2)
"""The value of a word in this rank's own memory once the copies before it are done. It is neither 0 nor 1, as waits for
these have the longer limit of a first call, in which ranks may still be compiling."""
_MOST_AHEAD: tl.constexpr = tl.constexpr(32)
"""A flag of an op counts as reached only if it is less than this ahead of the value waited for. Epochs are ahead by a
few at most, counts by less than twice the number of ranks."""


@triton.jit
def _require_flag(flag_ptr):
    """Flags are int32, so that they wrap around: a wait on a flag of another dtype could end at once, or never."""
    tl.static_assert(
        points_to(flag_ptr),
        "expected a pointer to a flag: the first argument, as in iris.signal(flag_ptr, value, peer, handle)",
    )
    tl.static_assert(points_to(flag_ptr, tl.int32), "a flag is int32: ctx.zeros(n, dtype=torch.int32)")


@triton.jit
def _as_epoch(value):
    """``value`` as flags hold it: the low 32 bits, which wrap around as flags do."""
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
    """A late flag can be found and named only in a block of one dimension."""
    _require_flag(flag_ptrs)
    tl.static_assert(len(flag_ptrs.shape) == 1, "flags are a block of one dimension: tl.ravel(block); or wait()")


@triton.jit
def signal(flag_ptr, value, peer, handle):
    """Set ``flag_ptr`` at rank ``peer`` to ``value``, after everything this program has stored so far.

    Args:
        flag_ptr: int32 flag, as a pointer into this rank's heap.
        value: the epoch to announce, int32; of a wider integer, the low 32 bits.
        peer: the rank whose flag to set; may be this rank.

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
def signal_all(flag_ptr, values, peers, valid, handle):
    """:func:`signal` to several peers at once: ``peers`` is a block, masked by ``valid``; ``values`` is a block of the
    same shape, or one epoch for all."""
    _require_flag(flag_ptr)
    _require_peers(peers, handle)
    remote = translate(flag_ptr + peers * 0, rank(handle), peers, handle.bases)
    meet_to_publish()
    tl.atomic_xchg(remote, _as_epoch(values), mask=valid, sem="release", scope="sys")


@triton.jit
def wait(flag_ptr, value, peer, handle, site: tl.constexpr = SITE_USER, counted: tl.constexpr = False):
    """Wait until this rank's flag at ``flag_ptr`` has reached ``value``. Returns the flag's value, int32.

    Args:
        flag_ptr: int32 flag in this rank's heap; one, not a block.
        value: the epoch to wait for, int32; of a wider integer, the low 32 bits. Reached when ``flag - value >= 0``
            and, for an op's flags, less than 32.
        peer: the rank expected to signal, named if the wait expires.
        site: what to call this wait in the error, a key of :data:`SITES`.
        counted: for an op's flag: several ranks count it up together, and ``peer`` is one of them.

    Sync: acquires at sys scope, for all threads of this program, what the signaller released.
    Bounded: by the context's ``timeout_s``, or ``first_timeout_s`` if ``value`` is 0 or 1. The wait also ends when all
        other ranks have closed their contexts, or, for an op's flag that is not ``counted``, when ``peer`` has.
    """
    _require_flag(flag_ptr)
    _require_one(flag_ptr)
    _require_peers(peer, handle)
    require_site(site)
    value = _as_epoch(value)
    seen = _poll(flag_ptr)
    if _ahead(seen, value, site) < 0:
        started = clock_ns()
        stopped = 0
        polls = 0
        gone = 0
        while (_ahead(seen, value, site) < 0) & (stopped == 0):
            if polls == POLLS_PER_CHECK:
                offset = flag_ptr.to(tl.int64) - own_base(handle)
                stopped, gone = check_bounds(offset, value, seen, peer, gone, started, handle, site, counted)
                polls = 0
            seen = _poll(flag_ptr)
            polls += 1
    tl.debug_barrier()
    return seen


@triton.jit
def reached(flag_ptr, value):
    """Whether this rank's flag at ``flag_ptr`` has reached ``value``. It does not wait: for programs that have
    something else to do meanwhile. Arguments as for :func:`wait`.

    Sync: if so, acquires at sys scope, for all threads of this program, what the signaller released.
    Bounded: a loop around it is not bounded. When nothing else is left to do, call :func:`wait`.
    """
    _require_flag(flag_ptr)
    _require_one(flag_ptr)
    seen = _poll(flag_ptr)
    tl.debug_barrier()
    return _ahead(seen, _as_epoch(value), SITE_USER) >= 0


@triton.jit
def wait_all(flag_ptrs, values, peers, valid, handle, site: tl.constexpr = SITE_USER):
    """:func:`wait` for several flags at once: ``flag_ptrs`` is a block of one dimension, masked by ``valid``;
    ``values`` and ``peers`` are blocks of the same shape, or one number for all. Returns whether all were reached;
    False only if the wait expired."""
    return _wait_row(flag_ptrs, values, peers, valid, handle, site, True) == flag_ptrs.shape[0]


@triton.jit
def wait_leading(flag_ptrs, values, peers, valid, handle, site: tl.constexpr = SITE_USER):
    """Wait until the first of several flags is reached. Returns how many flags, from the first on, are reached, int32.

    Arguments as for :func:`wait_all`; the first lane must be valid.

    Sync: acquires what the signallers of the flags counted released. Bounded: as :func:`wait`.
    """
    return max(_wait_row(flag_ptrs, values, peers, valid, handle, site, False), 1)


@triton.jit
def _wait_row(flag_ptrs, values, peers, valid, handle, site: tl.constexpr, ALL: tl.constexpr):
    """Wait until the first flag is reached, or ``ALL``. Returns how many are, from the first on. Flags that are not
    valid count as reached if ``ALL``, else as not reached."""
    _require_row(flag_ptrs)
    _require_peers(peers, handle)
    require_site(site)
    values = _as_epoch(values)
    lanes = tl.arange(0, flag_ptrs.shape[0])
    least: tl.constexpr = flag_ptrs.shape[0] if ALL else 1
    leading = _leading(flag_ptrs, values, valid, lanes, site, ALL)
    if leading < least:
        started = clock_ns()
        stopped = 0
        polls = 0
        gone = 0
        while (leading < least) & (stopped == 0):
            if polls == POLLS_PER_CHECK:
                late = lanes == leading
                stopped, gone = _check_lane(late, flag_ptrs, values, peers, gone, started, handle, site)
                polls = 0
            leading = _leading(flag_ptrs, values, valid, lanes, site, ALL)
            polls += 1
    tl.debug_barrier()
    return leading


@triton.jit
def _poll(flag_ptr):
    """One look at a flag, with acquire at sys scope."""
    return tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")


@triton.jit
def _leading(flag_ptrs, values, valid, lanes, site: tl.constexpr, ALL: tl.constexpr):
    """One look at all flags: how many, from the first on, are reached; see :func:`_wait_row`."""
    seen = tl.atomic_add(flag_ptrs, 0, mask=valid, sem="acquire", scope="sys")
    reached = _ahead(seen, values, site) >= 0
    reached = ~valid | reached if ALL else valid & reached
    return tl.min(tl.where(reached, lanes.shape[0], lanes))


@triton.jit
def _ahead(seen, value, site: tl.constexpr):
    """How far a flag is ahead of ``value``; negative if it must still be waited for."""
    ahead = seen - value
    if site != SITE_USER:
        set_lately = (ahead < _MOST_AHEAD) & ((seen != 0) | (value == 0))
        ahead = tl.where(set_lately, ahead, -1)
    return ahead


@triton.jit
def _check_lane(late, flag_ptrs, values, peers, gone, started, handle, site: tl.constexpr):
    """:func:`check_bounds` for the one flag that the mask ``late`` picks."""
    address = tl.sum(tl.where(late, flag_ptrs.to(tl.int64), 0))
    value = tl.sum(tl.where(late, values, 0))
    peer = tl.sum(tl.where(late, peers, 0))
    seen = _poll(address.to(tl.pointer_type(tl.int32)))
    return check_bounds(address - own_base(handle), value, seen, peer, gone, started, handle, site)


@triton.jit
def everyone(handle):
    """All ranks as a block of ``MAX_RANKS`` lanes, and which lanes are valid; the others hold this rank."""
    lanes = tl.arange(0, MAX_RANKS)
    valid = lanes < world_size(handle)
    return tl.where(valid, lanes, rank(handle)), valid


@triton.jit
def others(handle):
    """As :func:`everyone`, but this rank's lane is not valid."""
    lanes, me = tl.arange(0, MAX_RANKS), rank(handle)
    valid = (lanes < world_size(handle)) & (lanes != me)
    return tl.where(valid, lanes, me), valid


@triton.jit
def barrier(handle):
    """A barrier of all ranks of the job. Run by ONE program per rank.

    Sync: what each rank's program stored before the barrier, and what ran before that program's kernel on its stream,
    is visible to every rank's program after the barrier, and to what runs after that program's kernel.
    """
    peers, valid = everyone(handle)
    _meet(peers, valid, handle)


@triton.jit
def barrier_among(members_ptr, count, handle):
    """:func:`barrier` of the ``count`` ranks listed at ``members_ptr`` (int32), this rank among them."""
    tl.static_assert(
        points_to(members_ptr, tl.int32) and is_whole(count),
        "expected a pointer to int32 ranks, and their number: iris.barrier_among(members_ptr, count, handle)",
    )
    lanes = tl.arange(0, MAX_RANKS)
    valid = lanes < count
    _meet(tl.load(members_ptr + lanes, mask=valid, other=rank(handle)), valid, handle)


@triton.jit
def barrier_kernel(handle, members_ptr, count):
    """:func:`barrier_among` as a kernel of one program; launched by ``ctx.device_barrier``."""
    barrier_among(members_ptr, count, handle)


@triton.jit
def _meet(peers, valid, handle):
    """Signal all ``peers`` and wait for them. Each pair of ranks counts the barriers that both took part in, so any mix
    of groups can share one set of flags."""
    flags, epochs = control_word(handle, BARRIER_FLAGS), control_word(handle, BARRIER_EPOCHS)
    wanted = following(tl.load(epochs + peers, mask=valid, other=0))
    signal_all(flags + rank(handle), wanted, peers, valid, handle)
    wait_all(flags + peers, wanted, peers, valid, handle, SITE_BARRIER)
    tl.store(epochs + peers, wanted, mask=valid)
    tl.debug_barrier()  # one thread stores each epoch, and all load it in the kernel's next barrier


@triton.jit
def following(epoch):
    """The epoch after this one. No epoch is 0: a flag that was never set holds 0, and so does a word of the copy
    engine's when there is nothing to do. After -1 comes 2, not 1, as the halves of an inbox need odd and even epochs to
    alternate."""
    return tl.where(epoch == -1, 2, epoch + 1)


@triton.jit
def arrive(counter_ptr, count):
    """Count this program in. Returns whether it is the last of ``count``; the last one resets the counter to zero.

    Args:
        counter_ptr: int32 in this rank's memory, initially zero; for programs of one kernel.

    Sync: a signal that the last program sends after this covers what all ``count`` programs stored before.
    """
    meet_to_publish()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="sys") == count - 1
    if last:
        tl.debug_barrier()
        tl.store(counter_ptr, 0)
    return last
