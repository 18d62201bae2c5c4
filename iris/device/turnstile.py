"""How successive calls of a kernel are kept apart: by a turnstile, where all ranks meet, or by epochs per program."""

import triton
import triton.language as tl

from iris.device.control import SITE_USER
from iris.device.handle import rank
from iris.device.sync import arrive, everyone, following, signal_all, wait, wait_all

TURNSTILE_WORDS: tl.constexpr = tl.constexpr(256)
"""int32 words of a turnstile, on the symmetric heap: epoch, programs that left, the next epoch, flags. All but the next
epoch are initially zero."""
_LEFT_COUNT: tl.constexpr = tl.constexpr(1)
NEXT_EPOCH: tl.constexpr = tl.constexpr(2)
"""The word of a turnstile that holds the next call's epoch, with which the copy engine flags arrivals; initially 1."""
_ENTERED: tl.constexpr = tl.constexpr(64)
_LEFT: tl.constexpr = tl.constexpr(128)

NO_EPOCHS: tl.constexpr = tl.constexpr(0)
TURNSTILE: tl.constexpr = tl.constexpr(-1)
"""How a kernel counts calls: not at all, as nothing in it waits; or by :func:`enter` and :func:`leave`. Any other value
is the number of epochs that :func:`own_epoch` and :func:`end_own_epoch` share."""


@triton.jit
def coming_epoch(turnstile_ptr):
    """The epoch of the current call, until :func:`leave` ends it."""
    return following(tl.load(turnstile_ptr))


@triton.jit
def enter(turnstile_ptr, handle):
    """Begin a kernel that touches peers' memory: tell all ranks that this one has entered. Returns the epoch.

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
def leave(turnstile_ptr, epoch, handle, site: tl.constexpr = SITE_USER, meet: tl.constexpr = True):
    """End a kernel begun with :func:`enter`: it completes on no rank before all ranks are done with it.

    Called once by every program. The last program to call it meets the other ranks, and starts the next epoch; the
    others return at once. After the kernel, a rank may overwrite what peers read, and use what they wrote.

    Without ``meet`` only the epoch ends. That suffices if each program waits for what it needs, and writes a peer's
    memory only after :func:`wait_entered`: a peer that has entered has finished the call before.
    """
    if arrive(turnstile_ptr + _LEFT_COUNT, tl.num_programs(0)):
        if meet:
            peers, valid = everyone(handle)
            signal_all(turnstile_ptr + _LEFT + rank(handle), epoch, peers, valid, handle)
            wait_all(turnstile_ptr + _LEFT + peers, epoch, peers, valid, handle, site)
        tl.store(turnstile_ptr, epoch)
        tl.store(turnstile_ptr + NEXT_EPOCH, following(epoch))


@triton.jit
def own_epoch(epochs_ptr):
    """The epoch of the current call, where each program of a kernel counts calls for itself.

    Args:
        epochs_ptr: int32 in this rank's memory, one for each program that any call may have, initially zero.
    """
    return following(tl.load(epochs_ptr + tl.program_id(0)))


@triton.jit
def end_own_epoch(epochs_ptr, epoch, count):
    """End a kernel that began with :func:`own_epoch`. ``count``: how many epochs there are, one for each program that
    any call may have. Called once by every program; together they also count for programs that this call lacks.

    Sync: orders nothing. For kernels whose programs wait for all that they need, and at whose end no rank waits.
    Programs do not count together: an atomic count of all programs takes 0.5 µs.
    """
    tl.debug_barrier()  # all threads have read the epoch
    for program in range(tl.program_id(0), count, tl.num_programs(0)):
        tl.store(epochs_ptr + program, epoch)
