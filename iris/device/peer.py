"""The functions of :mod:`iris.device.rma` with the device handle in place of heap bases and this rank's number.

    iris.peer.store(handle, ptr, value, peer)

``ptr`` is a pointer into this rank's heap; the access goes to the same place in ``peer``'s heap. Keyword
arguments, ordering and defaults are those of the function of the same name in :mod:`iris.device.rma`.
"""

import triton
import triton.language as tl

from iris.device import rma
from iris.device.handle import rank
from iris.device.rma import ACQ_REL, DEFAULT_CACHE, SYS


@triton.jit
def translate(handle, ptr, peer):
    """``ptr`` moved to ``peer``'s heap, for use with any ``tl`` function."""
    return rma.translate(ptr, rank(handle), peer, handle.bases)


@triton.jit
def load(
    handle,
    ptr,
    peer,
    mask=None,
    other=None,
    cache_modifier: tl.constexpr = DEFAULT_CACHE,
    volatile: tl.constexpr = False,
    hint: tl.constexpr = None,
):
    """Load from ``peer``'s memory at ``ptr``."""
    return rma.load(ptr, rank(handle), peer, handle.bases, mask, other, cache_modifier, volatile, hint)


@triton.jit
def store(handle, ptr, value, peer, mask=None, cache_modifier: tl.constexpr = DEFAULT_CACHE, hint: tl.constexpr = None):
    """Store ``value`` into ``peer``'s memory at ``ptr``."""
    rma.store(ptr, value, rank(handle), peer, handle.bases, mask, cache_modifier, hint)


@triton.jit
def get(
    handle,
    from_ptr,
    to_ptr,
    peer,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = DEFAULT_CACHE,
    store_cache_modifier: tl.constexpr = DEFAULT_CACHE,
    hint: tl.constexpr = None,
):
    """Copy from ``peer``'s memory at ``from_ptr`` to this rank's at ``to_ptr``."""
    rma.get(
        from_ptr,
        to_ptr,
        rank(handle),
        peer,
        handle.bases,
        mask,
        other,
        load_cache_modifier,
        store_cache_modifier,
        hint,
    )


@triton.jit
def put(
    handle,
    from_ptr,
    to_ptr,
    peer,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = DEFAULT_CACHE,
    store_cache_modifier: tl.constexpr = DEFAULT_CACHE,
    hint: tl.constexpr = None,
):
    """Copy from this rank's memory at ``from_ptr`` to ``peer``'s at ``to_ptr``."""
    rma.put(
        from_ptr,
        to_ptr,
        rank(handle),
        peer,
        handle.bases,
        mask,
        other,
        load_cache_modifier,
        store_cache_modifier,
        hint,
    )


@triton.jit
def copy(
    handle,
    src_ptr,
    dst_ptr,
    from_peer,
    to_peer,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = DEFAULT_CACHE,
    store_cache_modifier: tl.constexpr = DEFAULT_CACHE,
    hint: tl.constexpr = None,
):
    """Copy from ``from_peer``'s memory at ``src_ptr`` to ``to_peer``'s at ``dst_ptr``."""
    rma.copy(
        src_ptr,
        dst_ptr,
        from_peer,
        to_peer,
        rank(handle),
        handle.bases,
        mask,
        other,
        load_cache_modifier,
        store_cache_modifier,
        hint,
    )


@triton.jit
def atomic_add(
    handle,
    ptr,
    value,
    peer,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Add to ``peer``'s memory; returns what was there."""
    return rma.atomic_add(ptr, value, rank(handle), peer, handle.bases, mask, sem, scope, hint)


@triton.jit
def atomic_sub(
    handle,
    ptr,
    value,
    peer,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Subtract from ``peer``'s memory; returns what was there."""
    return rma.atomic_sub(ptr, value, rank(handle), peer, handle.bases, mask, sem, scope, hint)


@triton.jit
def atomic_xchg(
    handle,
    ptr,
    value,
    peer,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Exchange ``peer``'s memory for ``value``; returns what was there."""
    return rma.atomic_xchg(ptr, value, rank(handle), peer, handle.bases, mask, sem, scope, hint)


@triton.jit
def atomic_cas(
    handle,
    ptr,
    cmp,
    value,
    peer,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Put ``value`` into ``peer``'s memory where that equals ``cmp``; returns what was there."""
    return rma.atomic_cas(ptr, cmp, value, rank(handle), peer, handle.bases, sem, scope, hint)


@triton.jit
def atomic_and(
    handle,
    ptr,
    value,
    peer,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Bitwise and into ``peer``'s memory; returns what was there."""
    return rma.atomic_and(ptr, value, rank(handle), peer, handle.bases, mask, sem, scope, hint)


@triton.jit
def atomic_or(
    handle,
    ptr,
    value,
    peer,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Bitwise or into ``peer``'s memory; returns what was there."""
    return rma.atomic_or(ptr, value, rank(handle), peer, handle.bases, mask, sem, scope, hint)


@triton.jit
def atomic_xor(
    handle,
    ptr,
    value,
    peer,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Bitwise exclusive or into ``peer``'s memory; returns what was there."""
    return rma.atomic_xor(ptr, value, rank(handle), peer, handle.bases, mask, sem, scope, hint)


@triton.jit
def atomic_min(
    handle,
    ptr,
    value,
    peer,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Minimum into ``peer``'s memory; returns what was there."""
    return rma.atomic_min(ptr, value, rank(handle), peer, handle.bases, mask, sem, scope, hint)


@triton.jit
def atomic_max(
    handle,
    ptr,
    value,
    peer,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Maximum into ``peer``'s memory; returns what was there."""
    return rma.atomic_max(ptr, value, rank(handle), peer, handle.bases, mask, sem, scope, hint)
