"""Where calls are captured in graphs: streams, and memory, that nothing else uses.

The library (cuBLAS) writes to scratch memory. PyTorch allocates it for a stream when that stream first needs some, and
may free all of it later, as ``torch.compile`` does. A graph goes on writing to the scratch memory it was captured with,
which must therefore never be given to anything else: it has to be allocated within a capture, from a memory pool that
lasts. So captures need streams that have no scratch memory yet. PyTorch's own do not promise that: there are 32, handed
out in turn, so that any of them may have been used before.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from iris.backends.runtime import new_stream


@dataclass(frozen=True)
class Place:
    """A stream for captures, one at a time, and a graph whose pool has the memory of all that is captured there; both
    last as long as the process."""

    stream: torch.cuda.Stream
    memory: torch.cuda.CUDAGraph


_lock = threading.RLock()  # a finalizer gives places back, which may run at any time
_free: dict[torch.device, list[Place]] = {}
_beside: dict[tuple[torch.cuda.Stream, bool], torch.cuda.Stream] = {}


def borrow_place(device: torch.device) -> Place:
    """A place that nobody else has."""
    with _lock:
        if _free.get(device):
            return _free[device].pop()
    word = torch.zeros(1, device=device)  # first: there may be no memory
    stream = new_stream(device)
    return Place(stream, _small_graph(stream, word))


def return_places(places: list[Place]) -> None:
    """Give back what :func:`borrow_place` gave. The graphs that were captured there are over, and never replayed."""
    with _lock:
        for each in places:
            _free.setdefault(each.stream.device, []).append(each)


def stream_beside(stream: torch.cuda.Stream, recorded: bool) -> torch.cuda.Stream:
    """A second stream for what ``stream`` does, and nothing else's; another one for what is ``recorded`` in a graph."""
    with _lock:
        if (stream, recorded) not in _beside:
            _beside[stream, recorded] = new_stream(stream.device)
        return _beside[stream, recorded]


def _small_graph(stream: torch.cuda.Stream, word: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph that allocates nothing, and has a pool."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            word.zero_()
        finally:
            graph.capture_end()
    return graph
