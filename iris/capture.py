"""Streams that nothing else uses, for captured calls and for second lanes, and memory for captures.

The library (cuBLAS) writes to scratch memory. PyTorch allocates it for a stream when that stream first needs some, and
may free all of it later, as ``torch.compile`` does. A graph goes on writing to the scratch memory with which it was
captured, so this memory must never be given to anything else: it has to be allocated during a capture, from a memory
pool that lasts. So captures need streams that have no scratch memory yet. PyTorch's own streams do not guarantee that:
there are 32, handed out in turn, so any of them may have been used before.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from iris.backends.runtime import new_stream


@dataclass(frozen=True)
class Place:
    """A stream for one capture at a time, and a graph whose memory pool serves all captures on that stream. Both last
    as long as the process."""

    stream: torch.cuda.Stream
    memory: torch.cuda.CUDAGraph


_lock = threading.RLock()  # re-entrant: a finalizer, which may run at any time, gives places back
_free: dict[torch.device, list[Place]] = {}
_beside: dict[tuple[torch.cuda.Stream, bool], torch.cuda.Stream] = {}


def borrow_place(device: torch.device) -> Place:
    """A place that nobody else has."""
    with _lock:
        if _free.get(device):
            return _free[device].pop()
    word = torch.zeros(1, device=device)  # first, because it fails if there is no memory
    stream = new_stream(device)
    return Place(stream, _small_graph(stream, word))


def return_places(places: list[Place]) -> None:
    """Give back places from :func:`borrow_place`. The graphs captured there must not run or be replayed any more."""
    with _lock:
        for each in places:
            _free.setdefault(each.stream.device, []).append(each)


def stream_beside(stream: torch.cuda.Stream, recorded: bool) -> torch.cuda.Stream:
    """A second stream that is used beside ``stream`` only; for work that is ``recorded`` in a graph, another one."""
    with _lock:
        if (stream, recorded) not in _beside:
            _beside[stream, recorded] = new_stream(stream.device)
        return _beside[stream, recorded]


def _small_graph(stream: torch.cuda.Stream, word: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph that allocates nothing, made for the sake of its memory pool."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            word.zero_()
        finally:
            graph.capture_end()
    return graph
