"""How the calls of a kernel follow each other: by a turnstile, where all ranks meet, or by epochs of each program."""

import triton
import triton.language as tl

from iris.device.control import SITE_USER
from iris.device.handle import rank
from iris.device.sync import arrive, everyone, following, signal_all, wait, wait_all

TURNSTILE_WORDS: tl.constexpr = tl.constexpr(256)
"""int32 words of a turnstile, on the symmetric heap: epoch, programs that left, the coming epoch, flags. All but the
coming epoch are zero when made."""
_LEFT_COUNT: tl.constexpr = tl.constexpr(1)
NEXT_EPOCH: tl.constexpr = tl.constexpr(2)
"""Word of a turnstile that holds the coming call's epoch, for the copy engine to flag arrivals with; 1 when made."""
_ENTERED: tl.constexpr = tl.constexpr(64)
_LEFT: tl.constexpr = tl.constexpr(128)

NO_EPOCHS: tl.constexpr = tl.constexpr(0)
TURNSTILE: tl.constexpr = tl.constexpr(-1)
"""How a kernel counts calls: not at all, as nothing in it waits; or by :func:`enter` and :func:`leave`. Any other
number is that of the epochs for :func:`own_epoch`."""


@triton.jit
def coming_epoch(turnstile_ptr):
    """The epoch of the call that begins."""
    return following(tl.load(turnstile_ptr))


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
        tl.store(turnstile_ptr + NEXT_EPOCH, following(epoch))


@triton.jit
def own_epoch(epochs_ptr):
    """The epoch of the call that begins, where each program of a kernel counts calls for itself.

    Args:
        epochs_ptr: int32 in this rank's memory, one for each program that any call may have, zero when made.
    """
    return following(tl.load(epochs_ptr + tl.program_id(0)))


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
