"""The device handle: all that a kernel needs to reach its peers, as one argument.

It is a ``NamedTuple`` of two small device tensors, so the JIT, a captured graph and the interpreter all take it, and
no rank number is compiled into a kernel.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

MAX_RANKS: tl.constexpr = tl.constexpr(16)

RANK: tl.constexpr = tl.constexpr(0)
WORLD_SIZE: tl.constexpr = tl.constexpr(1)
TIMEOUT_NS: tl.constexpr = tl.constexpr(2)
FIRST_TIMEOUT_NS: tl.constexpr = tl.constexpr(3)
STATUS_ADDRESS: tl.constexpr = tl.constexpr(4)


class Handle(NamedTuple):
    """``ctx.handle``. ``bases``: int64, the address of every rank's heap. ``info``: int64, indexed by this module's
    constants."""

    bases: Any
    info: Any


@triton.constexpr_function
def _is_handle(value: Any) -> bool:
    """Whether an argument of a device function is a handle."""
    return isinstance(value, tl.tuple | tuple)


@triton.jit
def require_handle(handle):
    tl.static_assert(
        _is_handle(handle),
        "expected ctx.handle: the first argument of iris.peer's functions, the last of iris.signal, wait and barrier",
    )


@triton.jit
def rank(handle):
    """This rank, int32."""
    require_handle(handle)
    return tl.load(handle.info + RANK).to(tl.int32)


@triton.jit
def world_size(handle):
    """The number of ranks, int32."""
    require_handle(handle)
    return tl.load(handle.info + WORLD_SIZE).to(tl.int32)
