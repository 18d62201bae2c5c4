"""The backends, on which the heap lives and kernels run: GPUs, or a simulator on the CPU. :func:`choose` picks one.

Triton decides when a kernel is *decorated* whether it will be compiled or interpreted, so the choice is
made once, when ``iris`` is first imported.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from iris.errors import ArgumentError, BackendError

if TYPE_CHECKING:
    from iris.backends.base import Backend
    from iris.mesh import Mesh

GPU_BACKENDS = ("cuda", "hip")
NAMES = (*GPU_BACKENDS, "sim", "compile")
_TRUE = ("1", "true", "on", "yes", "y")
"""Values of an environment variable that Triton takes for yes."""


@dataclass(frozen=True)
class Choice:
    """A backend's name and why it was chosen, in words."""

    name: str
    reason: str


def _gpus_of_torch() -> tuple[str | None, int]:
    import torch

    kind = "hip" if torch.version.hip else "cuda" if torch.version.cuda else None
    return kind, torch.cuda.device_count() if kind else 0


def detect() -> Choice:
    """The backend for this process: ``IRIS_BACKEND`` if set, else the simulator if ``TRITON_INTERPRET=1``, else GPUs if
    PyTorch sees any, else the simulator.

    ``IRIS_BACKEND=compile`` keeps Triton's compiler on a machine without a GPU: kernels can be compiled for any target
    and their assembly read, but no context can be made.
    """
    wanted = os.environ.get("IRIS_BACKEND", "").lower()
    if wanted in ("sim", "compile"):
        return Choice(wanted, f"IRIS_BACKEND={wanted}")
    kind, count = _gpus_of_torch()
    if wanted in (*GPU_BACKENDS, "gpu"):
        if not kind or not count or wanted not in (kind, "gpu"):
            raise BackendError(
                f"IRIS_BACKEND={wanted}, but PyTorch here is built for {kind or 'the CPU only'} and sees {count} GPUs. "
                "Install a PyTorch built for your GPU, or unset IRIS_BACKEND to use the simulator."
            )
        return Choice(kind, f"IRIS_BACKEND={wanted}")
    if wanted:
        raise BackendError(f"IRIS_BACKEND={wanted} is not one of {', '.join((*NAMES, 'gpu'))}")
    interpret = os.environ.get("TRITON_INTERPRET", "")
    if interpret.lower() in _TRUE:
        return Choice("sim", f"TRITON_INTERPRET={interpret} was set")
    if kind and count:
        return Choice(kind, f"PyTorch sees {count} GPU{'s' if count > 1 else ''}")
    return Choice("sim", f"PyTorch is built for {kind or 'the CPU only'} and sees no GPU")


def oversubscribed() -> bool:
    """Whether ranks may share a GPU (``IRIS_OVERSUBSCRIBE=1``). Their processes then take turns on it: results are
    right, but times mean nothing."""
    return _switched_on("IRIS_OVERSUBSCRIBE", False)


def replays() -> bool:
    """Whether repeated calls may be replayed from a graph; ``IRIS_REPLAY=0`` forbids it."""
    return _switched_on("IRIS_REPLAY", True)


def compares_calls() -> bool:
    """Whether ranks compare every call of an op, known or not, before it is launched (``IRIS_CHECK_CALLS=1``)."""
    return _switched_on("IRIS_CHECK_CALLS", False)


def _switched_on(variable: str, unset: bool) -> bool:
    text = os.environ.get(variable)
    if text not in (None, "", "0", "1"):
        raise ArgumentError("iris", variable, "0 or 1", repr(text))
    return text == "1" if text else unset


_chosen: Choice | None = None


def chosen() -> Choice:
    """What :func:`choose` chose. Detecting again would find the TRITON_INTERPRET that ``choose`` set, not its
    reason."""
    return _chosen or detect()


def choose() -> None:
    """Detect the backend. For the simulator, make Triton interpret kernels that are decorated from now on, with the
    changes of :mod:`iris.backends.interpreter`, which also hold before there is a context.

    If the environment asks for a backend that is not available, :func:`iris.iris` raises, not the import.
    """
    global _chosen
    try:
        _chosen = detect()
    except BackendError:
        return
    if _chosen.name == "sim":
        os.environ["TRITON_INTERPRET"] = "1"
        late = "triton" in sys.modules
        try:
            from iris.backends import interpreter
        except BackendError:
            return
        interpreter.install()
        if late:
            interpreter.interpret_standard_library()


def open_backend(choice: Choice, mesh: Mesh, local_rank: int, heap_size: int) -> Backend:
    """Start the chosen backend on this rank. Collective."""
    if choice.name == "compile":
        raise BackendError("IRIS_BACKEND=compile only compiles kernels; unset it to run them")
    if choice.name == "sim":
        from iris.backends.sim import SimBackend

        return SimBackend(mesh, heap_size)
    from iris.backends.gpu import GpuBackend

    return GpuBackend(choice.name, mesh, local_rank, heap_size)
