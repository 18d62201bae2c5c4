"""Remote memory access with explicit ranks and heap bases, in the argument order that users of Iris know.

A pointer argument always points into *this* rank's heap; a function moves it to the same offset in the other rank's
heap. All functions work on scalars and on blocks of pointers, with ``mask``. :mod:`iris.device.peer` has
the same functions without ``heap_bases`` and without this rank's number.

Sync: loads and stores are plain; order them with :mod:`iris.device.sync`. Atomics default to ``acq_rel`` at
``sys`` scope, the only scope that reaches another GPU. A CTA barrier stands before each atomic that releases, so
that it publishes the stores of all the program's threads, not of one only, and after each that acquires, so that
all threads see what was published.
"""

from typing import Any

import triton
import triton.language as tl

from iris.device.arch import beyond, meet_to_publish, takes_modifiers

HEAP_ALIGNMENT: tl.constexpr = tl.constexpr(1024)

# Defaults are constexpr objects: Triton 3.6 does not wrap the plain strings among a device function's defaults.
DEFAULT_CACHE: tl.constexpr = tl.constexpr("")
ACQ_REL: tl.constexpr = tl.constexpr("acq_rel")
SYS: tl.constexpr = tl.constexpr("sys")
EXPECTED_RANKS: tl.constexpr = tl.constexpr("expected whole numbers as ranks; pointers and values come first")
EXPECTED_POINTER: tl.constexpr = tl.constexpr(
    "expected a pointer: the first argument; in iris.peer's functions the second, after the handle"
)
EXPECTED_POINTERS: tl.constexpr = tl.constexpr(
    "expected two pointers: the first arguments; in iris.peer's functions those after the handle"
)


@triton.constexpr_function
def points_to(pointer: Any, dtype: tl.dtype | None = None) -> bool:
    """Whether an argument of a device function is a pointer, or a block of them; to ``dtype``, if that is given."""
    if not isinstance(pointer, tl.tensor) or not pointer.dtype.is_ptr():
        return False
    return dtype is None or pointer.dtype.element_ty == dtype


@triton.constexpr_function
def _is_number(value: Any) -> bool:
    """Whether ``value`` can be stored: not a pointer, whose address Triton would store, and not a handle."""
    return not value.dtype.is_ptr() if isinstance(value, tl.tensor) else isinstance(value, int | float)


@triton.constexpr_function
def _is_bases(pointer: Any) -> bool:
    """Whether an argument may be ``heap_bases``: a pointer to 64-bit integers, and not a block."""
    return (points_to(pointer, tl.int64) or points_to(pointer, tl.uint64)) and not pointer.type.is_block()


@triton.constexpr_function
def _of_load(modifier: str | None, volatile: bool = False) -> str:
    """``modifier``, checked for a load: the simulator would take any, and a compiler would not say what is wrong. It is
    dropped if such a load takes none."""
    if modifier not in (None, "", ".ca", ".cg", ".cv"):
        raise ValueError(f"cache modifier of a load: expected one of '', .ca, .cg, .cv, got {modifier}")
    return modifier or "" if takes_modifiers(volatile) else ""


@triton.constexpr_function
def _of_store(modifier: str | None) -> str:
    """As :func:`_of_load`, for a store."""
    if modifier not in (None, "", ".wb", ".cg", ".cs", ".wt"):
        raise ValueError(f"cache modifier of a store: expected one of '', .wb, .cg, .cs, .wt, got {modifier}")
    return modifier or ""


@triton.jit
def _require_number(value):
    tl.static_assert(_is_number(value), "value: expected numbers; what a pointer points to, iris.put copies")


@triton.jit
def _require_integers(ptr):
    tl.static_assert(ptr.dtype.element_ty.is_int(), "bitwise atomics are of integers: of floats there are none")


@triton.jit
def translate(ptr, from_rank, to_rank, heap_bases):
    """``ptr``, in ``from_rank``'s heap, moved to the same offset of ``to_rank``'s heap: ptr - bases[from] + bases[to].

    Heaps start at multiples of 1 KiB, so the distance is a whole number of elements and keeps the alignment
    that Triton has proved for ``ptr``: translated accesses vectorise like local ones. (Triton sees this in the
    product that :func:`iris.device.arch.beyond` adds; a ``tl.multiple_of`` on ``distance // ITEMSIZE`` is lost where
    ITEMSIZE is 1 and the division folds away.)
    """
    tl.static_assert(points_to(ptr), EXPECTED_POINTER)
    return beyond(ptr, _distance(from_rank, to_rank, heap_bases) // HEAP_ALIGNMENT, HEAP_ALIGNMENT)


@triton.jit
def _distance(from_rank, to_rank, heap_bases):
    """Bytes from ``from_rank``'s heap to ``to_rank``'s."""
    tl.static_assert(_is_bases(heap_bases), "heap_bases: expected ctx.heap_bases, or handle.bases; behind all ranks")
    tl.static_assert(is_whole(from_rank) and is_whole(to_rank), EXPECTED_RANKS)
    from_base = tl.load(beyond(heap_bases, from_rank, 8)).to(tl.int64)  # ranks may be wrong, and less than 0
    return tl.load(beyond(heap_bases, to_rank, 8)).to(tl.int64) - from_base


@triton.constexpr_function
def _run(hint: Any, axis: int, pointers: Any) -> int:
    """How many elements of one axis ``hint`` says are contiguous and aligned together; a single number is for the last
    axis."""
    axes = len(pointers.shape)
    if isinstance(hint, str):
        raise ValueError(f"hint: expected numbers, got {hint!r}. Name what comes after mask: cache_modifier={hint!r}")
    runs: list[int] = [1] * (axes - 1) + [hint] if isinstance(hint, int) else [int(run) for run in hint]
    if len(runs) != axes:
        raise ValueError(f"hint: expected one number, or one for each of {axes} axes, got {len(runs)}")
    if any(run < 1 or run & (run - 1) for run in runs):  # for 3, Triton would make unaligned accesses of 2 elements
        raise ValueError(f"hint: expected powers of two, got {hint}")
    return runs[axis]


@triton.constexpr_function
def _run_bytes(hint: Any, axis: int, pointers: Any) -> int:
    """:func:`_run` in bytes, in which Triton's ``multiple_of`` counts for pointers."""
    itemsize: int = (pointers.scalar.element_ty.primitive_bitwidth + 7) // 8
    return int(_run(hint, axis, pointers) * itemsize)


@triton.jit
def _remote(ptr, from_rank, to_rank, heap_bases, hint: tl.constexpr):
    """``ptr`` translated; if it is a block, with ``hint`` passed to Triton.

    Triton attaches a hint to the operation that makes a pointer. It loses hints on arguments and results of functions,
    and on AMD also on sums, which it reorders. So the pointers are made here, from integers.
    """
    if hint is None or not ptr.type.is_block():
        return translate(ptr, from_rank, to_rank, heap_bases)
    else:
        TYPE: tl.constexpr = ptr.type
        AXES: tl.constexpr = len(TYPE.shape)
        tl.static_assert(AXES <= 2, "hint: expected pointers of one or two axes")
        remote = (ptr.to(tl.int64) + _distance(from_rank, to_rank, heap_bases)).to(ptr.dtype)
        if AXES == 1:
            aligned = tl.multiple_of(remote, _run_bytes(hint, 0, TYPE))
            return tl.max_contiguous(aligned, _run(hint, 0, TYPE))
        else:
            aligned = tl.multiple_of(remote, (_run_bytes(hint, 0, TYPE), _run_bytes(hint, 1, TYPE)))
            return tl.max_contiguous(aligned, (_run(hint, 0, TYPE), _run(hint, 1, TYPE)))


@triton.jit
def load(
    ptr,
    to_rank,
    from_rank,
    heap_bases,
    mask=None,
    other=None,
    cache_modifier: tl.constexpr = DEFAULT_CACHE,
    volatile: tl.constexpr = False,
    hint: tl.constexpr = None,
):
    """Load from ``from_rank``'s memory.

    Args:
        ptr: where, as a pointer into this rank's heap.
        to_rank: this rank, which receives the value.
        from_rank: the rank whose memory is read.
        mask, other, cache_modifier, volatile: as for ``tl.load``; NVIDIA has no cache modifiers for volatile loads.
        hint: how many elements are contiguous and aligned together, if Triton cannot prove it by itself: a power of
            two for the last axis, or one for each axis. (For local pointers: ``tl.multiple_of``,
            ``tl.max_contiguous``.)
    """
    remote = _remote(ptr, to_rank, from_rank, heap_bases, hint)
    MODIFIER: tl.constexpr = _of_load(cache_modifier, volatile)
    return tl.load(remote, mask=mask, other=other, cache_modifier=MODIFIER, volatile=volatile)


@triton.jit
def store(
    ptr,
    value,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    cache_modifier: tl.constexpr = DEFAULT_CACHE,
    hint: tl.constexpr = None,
):
    """Store ``value`` into ``to_rank``'s memory.

    Args:
        ptr: where, as a pointer into this rank's heap.
        from_rank: this rank.
        to_rank: the rank whose memory is written.
        mask, cache_modifier: as for ``tl.store``.
        hint: as for :func:`load`.
    """
    remote = _remote(ptr, from_rank, to_rank, heap_bases, hint)
    _require_number(value)
    tl.store(remote, value, mask=mask, cache_modifier=_of_store(cache_modifier))


@triton.jit
def get(
    from_ptr,
    to_ptr,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = DEFAULT_CACHE,
    store_cache_modifier: tl.constexpr = DEFAULT_CACHE,
    hint: tl.constexpr = None,
):
    """Copy from ``to_rank``'s memory at ``from_ptr`` to this rank's memory at ``to_ptr``.

    ``from_rank`` is this rank, into whose heap both pointers point; ``to_rank`` is the peer that is read.
    """
    tl.static_assert(points_to(from_ptr) and points_to(to_ptr), EXPECTED_POINTERS)
    remote = _remote(from_ptr, from_rank, to_rank, heap_bases, hint)
    data = tl.load(remote, mask=mask, other=other, cache_modifier=_of_load(load_cache_modifier))
    tl.store(to_ptr, data, mask=mask, cache_modifier=_of_store(store_cache_modifier))


@triton.jit
def put(
    from_ptr,
    to_ptr,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = DEFAULT_CACHE,
    store_cache_modifier: tl.constexpr = DEFAULT_CACHE,
    hint: tl.constexpr = None,
):
    """Copy from this rank's memory at ``from_ptr`` to ``to_rank``'s memory at ``to_ptr``.

    ``from_rank`` is this rank, into whose heap both pointers point; ``to_rank`` is the peer that is written.
    """
    tl.static_assert(points_to(from_ptr) and points_to(to_ptr), EXPECTED_POINTERS)
    data = tl.load(from_ptr, mask=mask, other=other, cache_modifier=_of_load(load_cache_modifier))
    remote = _remote(to_ptr, from_rank, to_rank, heap_bases, hint)
    tl.store(remote, data, mask=mask, cache_modifier=_of_store(store_cache_modifier))


@triton.jit
def copy(
    src_ptr,
    dst_ptr,
    from_rank,
    to_rank,
    cur_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = DEFAULT_CACHE,
    store_cache_modifier: tl.constexpr = DEFAULT_CACHE,
    hint: tl.constexpr = None,
):
    """Copy from ``from_rank``'s memory at ``src_ptr`` to ``to_rank``'s memory at ``dst_ptr``.

    ``cur_rank`` is this rank, into whose heap both pointers point; it need be neither of the other two.
    """
    tl.static_assert(points_to(src_ptr) and points_to(dst_ptr), EXPECTED_POINTERS)
    source = _remote(src_ptr, cur_rank, from_rank, heap_bases, hint)
    data = tl.load(source, mask=mask, other=other, cache_modifier=_of_load(load_cache_modifier))
    target = _remote(dst_ptr, cur_rank, to_rank, heap_bases, hint)
    tl.store(target, data, mask=mask, cache_modifier=_of_store(store_cache_modifier))


@triton.constexpr_function
def _reach(scope: str | None) -> str:
    """``scope``, or "sys" if it is None: Triton's own default is the GPU's scope, which does not reach peers."""
    return "sys" if scope is None else scope


@triton.jit
def _publish_before(sem: tl.constexpr):
    """The CTA barrier that a releasing atomic needs; Triton adds none of its own before version 3.9."""
    if sem is None or sem == "acq_rel" or sem == "release":
        meet_to_publish()


@triton.jit
def _consume_behind(sem: tl.constexpr):
    """The CTA barrier that an acquiring atomic needs; Triton adds none after atomics on blocks before version 3.9."""
    if sem is None or sem == "acq_rel" or sem == "acquire":
        tl.debug_barrier()


@triton.jit
def _atomic(
    OP: tl.constexpr, ptr, value, from_rank, to_rank, heap_bases, mask, sem: tl.constexpr, scope: tl.constexpr,
    hint: tl.constexpr,
):  # fmt: skip
    """``OP``, one of Triton's atomics, on ``to_rank``'s memory; returns what was there."""
    _publish_before(sem)
    remote = _remote(ptr, from_rank, to_rank, heap_bases, hint)
    _require_number(value)
    old = OP(remote, value, mask=mask, sem=sem, scope=_reach(scope))
    _consume_behind(sem)
    return old


@triton.jit
def atomic_add(
    ptr,
    value,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Add ``value`` to ``to_rank``'s memory; returns what was there. Other arguments as for ``tl.atomic_add``.

    dtypes: integers of 32 and 64 bits, float16, bfloat16, float32, float64.
    """
    return _atomic(tl.constexpr(tl.atomic_add), ptr, value, from_rank, to_rank, heap_bases, mask, sem, scope, hint)


@triton.jit
def atomic_sub(
    ptr,
    value,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Subtract ``value`` from ``to_rank``'s memory, as an add of ``-value``; returns what was there.

    Arguments and dtypes as for :func:`atomic_add`.
    """
    tl.static_assert(points_to(ptr), EXPECTED_POINTER)
    _require_number(value)
    value = tl.cast(value, ptr.dtype.scalar.element_ty)  # before negation, in which a narrow unsigned value would wrap
    return atomic_add(ptr, -value, from_rank, to_rank, heap_bases, mask, sem, scope, hint)


@triton.jit
def atomic_xchg(
    ptr,
    value,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Exchange ``to_rank``'s memory for ``value``; returns what was there.

    Arguments as for :func:`atomic_add`. dtypes: integers of 32 and 64 bits, float32, float64.
    """
    return _atomic(tl.constexpr(tl.atomic_xchg), ptr, value, from_rank, to_rank, heap_bases, mask, sem, scope, hint)


@triton.constexpr_function
def is_whole(value: Any) -> bool:
    """Whether ``value`` is made of integers; a mask is not."""
    if isinstance(value, tl.tensor):
        return bool(value.dtype.is_int() and not value.dtype.is_int1())
    return isinstance(value, int) and not isinstance(value, bool)


@triton.jit
def _as_there(value, ptr):
    """``value`` in the dtype and shape of what ``ptr`` points to; Triton's ``atomic_cas`` converts nothing itself."""
    if ptr.dtype.scalar.element_ty.is_int():
        tl.static_assert(is_whole(value), "atomic_cas of integers: expected whole numbers as cmp and value")
    element = tl.cast(value, ptr.dtype.scalar.element_ty)
    if ptr.type.is_block():
        return tl.broadcast_to(element, ptr.shape)
    else:
        return element


@triton.jit
def atomic_cas(
    ptr,
    cmp,
    value,
    from_rank,
    to_rank,
    heap_bases,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Put ``value`` into ``to_rank``'s memory where that equals ``cmp``; returns what was there. Arguments as for
    ``tl.atomic_cas``, which has no mask.

    dtypes: integers and floats of 16, 32 and 64 bits; floats on AMD from Triton 3.8 on.
    """
    _publish_before(sem)
    remote = _remote(ptr, from_rank, to_rank, heap_bases, hint)
    old = tl.atomic_cas(remote, _as_there(cmp, remote), _as_there(value, remote), sem=sem, scope=_reach(scope))
    _consume_behind(sem)
    return old


@triton.jit
def atomic_and(
    ptr,
    value,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Bitwise and of ``value`` into ``to_rank``'s memory; returns what was there.

    Arguments as for :func:`atomic_add`. dtypes: integers of 32 and 64 bits.
    """
    _require_integers(ptr)
    return _atomic(tl.constexpr(tl.atomic_and), ptr, value, from_rank, to_rank, heap_bases, mask, sem, scope, hint)


@triton.jit
def atomic_or(
    ptr,
    value,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Bitwise or of ``value`` into ``to_rank``'s memory; returns what was there.

    Arguments as for :func:`atomic_add`. dtypes: integers of 32 and 64 bits.
    """
    _require_integers(ptr)
    return _atomic(tl.constexpr(tl.atomic_or), ptr, value, from_rank, to_rank, heap_bases, mask, sem, scope, hint)


@triton.jit
def atomic_xor(
    ptr,
    value,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Bitwise exclusive or of ``value`` into ``to_rank``'s memory; returns what was there.

    Arguments as for :func:`atomic_add`. dtypes: integers of 32 and 64 bits.
    """
    _require_integers(ptr)
    return _atomic(tl.constexpr(tl.atomic_xor), ptr, value, from_rank, to_rank, heap_bases, mask, sem, scope, hint)


@triton.jit
def atomic_min(
    ptr,
    value,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Minimum of ``value`` and ``to_rank``'s memory, kept there; returns what was there.

    Arguments as for :func:`atomic_add`. dtypes: integers of 32 and 64 bits, float32, float64.
    """
    return _atomic(tl.constexpr(tl.atomic_min), ptr, value, from_rank, to_rank, heap_bases, mask, sem, scope, hint)


@triton.jit
def atomic_max(
    ptr,
    value,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = ACQ_REL,
    scope: tl.constexpr = SYS,
    hint: tl.constexpr = None,
):
    """Maximum of ``value`` and ``to_rank``'s memory, kept there; returns what was there.

    Arguments as for :func:`atomic_add`. dtypes: integers of 32 and 64 bits, float32, float64.
    """
    return _atomic(tl.constexpr(tl.atomic_max), ptr, value, from_rank, to_rank, heap_bases, mask, sem, scope, hint)
