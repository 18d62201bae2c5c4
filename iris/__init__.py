"""Iris: Triton kernels that read, write and signal the memory of every GPU of the job.

    import iris
    ctx = iris.iris(heap_size=1 << 30)

Import Iris before decorating kernels: where there is no GPU, Iris makes Triton interpret them (see
:mod:`iris.backends`), and the same program then runs on any number of simulated ranks.
"""

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from iris.startup import guard as _guard

_guard()

from iris.backends import choose as _choose  # noqa: E402

_choose()

from iris import ops  # noqa: E402
from iris.compiling import assembly  # noqa: E402
from iris.context import Iris, iris  # noqa: E402
from iris.device import peer  # noqa: E402
from iris.device.handle import Handle, rank, world_size  # noqa: E402
from iris.device.rma import (  # noqa: E402
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_sub,
    atomic_xchg,
    atomic_xor,
    copy,
    get,
    load,
    put,
    store,
    translate,
)
from iris.device.sync import (  # noqa: E402
    barrier,
    barrier_among,
    reached,
    signal,
    signal_add,
    signal_all,
    wait,
    wait_all,
)
from iris.errors import (  # noqa: E402
    AddressError,
    ArgumentError,
    BackendError,
    CaptureError,
    ContextError,
    DTypeError,
    HeapError,
    IrisError,
    LaunchError,
    PeerDied,
    PlacementError,
    RankMismatch,
    ShapeError,
    WaitTimeout,
)
from iris.launch import RankPool, launch  # noqa: E402
from iris.timing import do_bench  # noqa: E402
from iris.trace import Trace  # noqa: E402

__version__ = "0.1.0"

if not _TYPE_CHECKING:  # type checkers then still know which names there are

    def __getattr__(name: str) -> object:
        """The benchmark's framework, once it is asked for: ``iris.bench`` needs no import of its own."""
        if name == "bench":
            return _import_module("iris.bench")
        raise AttributeError(
            f"module 'iris' has no attribute {name!r}. If it is one of AMD's Iris, docs/porting.md says what to take.",
            name=name,
            obj=_sys.modules[__name__],
        )


__all__ = [
    "AddressError",
    "ArgumentError",
    "BackendError",
    "CaptureError",
    "ContextError",
    "DTypeError",
    "Handle",
    "HeapError",
    "Iris",
    "IrisError",
    "LaunchError",
    "PeerDied",
    "PlacementError",
    "RankMismatch",
    "RankPool",
    "ShapeError",
    "Trace",
    "WaitTimeout",
    "assembly",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_sub",
    "atomic_xchg",
    "atomic_xor",
    "barrier",
    "barrier_among",
    "copy",
    "do_bench",
    "get",
    "iris",
    "launch",
    "load",
    "ops",
    "peer",
    "put",
    "rank",
    "reached",
    "signal",
    "signal_add",
    "signal_all",
    "store",
    "translate",
    "wait",
    "wait_all",
    "world_size",
]
