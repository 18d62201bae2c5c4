"""Where calls are captured in graphs: streams, and memory, that nothing else uses.

The library (cuBLAS) writes to scratch memory that PyTorch makes for each stream when it first needs some, and keeps
until it lets go of all of it, as ``torch.compile`` has it do. A graph goes on writing to the memory it was captured
with. That must therefore never become anything else's: it has to be made in a capture, in a memory pool that lasts.
PyTorch's own streams do not promise that: there are 32, handed out by turns, so any of them may have been used before.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Lanes:
    """Two streams of this process, for one capture at a time; see :meth:`iris.engine.CopyEngine.lane`."""

    first: torch.cuda.Stream
    second: torch.cuda.Stream
    memory: torch.cuda.CUDAGraph
    """Its pool has the memory of all that is captured on the two, and lasts as long as the process."""


_lock = threading.Lock()
_free: dict[torch.device, list[Lanes]] = {}
_second: dict[torch.cuda.Stream, torch.cuda.Stream] = {}


def borrow_lanes(device: torch.device) -> Lanes:
    """Lanes that nobody else has."""
    from iris.backends.gpu import new_stream

    with _lock:
        if _free.get(device):
            return _free[device].pop()
    first, second = new_stream(device), new_stream(device)
    _second[first] = second
    return Lanes(first, second, _small_graph(first, device))


def return_lanes(lanes: list[Lanes]) -> None:
    """Give back what :func:`borrow_lanes` gave; the graphs that were captured there are never replayed again."""
    with _lock:
        for each in lanes:
            _free.setdefault(each.first.device, []).append(each)


def second_lane(first: torch.cuda.Stream) -> torch.cuda.Stream | None:
    """The stream that goes with ``first``, if that is one for captures."""
    return _second.get(first)


def _small_graph(stream: torch.cuda.Stream, device: torch.device) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=device)
        graph.capture_end()
    return graph
