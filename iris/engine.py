"""The copy engine: bulk copies between ranks that cost no SM, beside the kernels of the current stream.

    engine = CopyEngine(ctx)
    engine.beside(kernel, copies)       # two functions: one launches, the other asks for copies

    with engine.running():              # the same, step by step
        first_kernel()
        engine.follow()                 # later copies wait for what was launched before
        engine.put(source, target, peer)
        second_kernel()

``copies`` calls :meth:`put`, and where it must not run ahead of the kernel, :meth:`wait`. Copies run in the order in
which they are asked for. The current stream goes on when both are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from iris.capture import stream_beside
from iris.context import Iris
from iris.errors import CaptureError


class CopyEngine:
    """One stream of copies, done in the order in which they are asked for. Can be captured in a graph."""

    def __init__(self, ctx: Iris) -> None:
        self._ctx = ctx
        self._backend = ctx._backend
        self._stream = self._backend.side_stream()
        self._on_gpu = isinstance(self._stream, torch.cuda.Stream)
        self._lanes: list[torch.cuda.Stream] = []
        self._begun = False

    def beside(
        self, kernel: Callable[[], None], copies: Callable[[], None], last: Callable[[], None] | None = None
    ) -> None:
        """Run what ``kernel`` launches on the current stream, and beside it ``copies``, both behind the current
        stream's work so far; behind both, ``last``.

        The kernel is launched first, so that no copy that waits for it can be in its way, however few queues the
        driver has. Where it is the kernel that waits, for copies that do not, ask for these first: :meth:`running`.
        """
        # In the simulator a kernel has run when its launch returns.
        first, second = (kernel, copies) if self._on_gpu else (copies, kernel)
        with self.running(last=last):
            first()
            self._begun |= self._on_gpu  # the kernel waits for copies now
            second()

    @contextmanager
    def running(
        self, lanes: int = 1, last: Callable[[], None] | None = None, *, announced: bool = False
    ) -> Iterator[None]:
        """Copies that are asked for in here run beside what the current stream is given in here, both behind its work
        so far. What it is given afterwards, by ``last`` to begin with, waits for the copies, and for the second of two
        lanes; see :meth:`lane`.

        An exception in here, once a copy has been asked for or a kernel waits for one, or if the call was ``announced``
        before, is the end of the context: peers have been told of a call that this rank does not finish."""
        stream = self._stream
        with self.unbroken(announced) as recorded:
            if isinstance(stream, torch.cuda.Stream):
                current = torch.cuda.current_stream(self._ctx.device)
                self._lanes = [current]
                if lanes > 1:
                    self._lanes.append(stream_beside(current, recorded))
                for other in (stream, *self._lanes[1:]):
                    other.wait_stream(current)
                try:
                    yield
                finally:
                    for other in (stream, *self._lanes[1:]):
                        current.wait_stream(other)
            else:
                with stream:
                    yield
            if last is not None:
                last()

    @contextmanager
    def unbroken(self, announced: bool) -> Iterator[bool]:
        """End the context if the block raises after copies have been asked for, or if the call was ``announced``
        before, or on Ctrl-C, as that may come right behind a launch. Yields whether the block is only captured in a
        graph: then nothing has been done when it raises, and the context goes on."""
        self._begun = announced
        recorded = self._on_gpu and torch.cuda.is_current_stream_capturing()
        try:
            yield recorded
        except BaseException as error:
            begun = announced or self._begun or not isinstance(error, Exception)  # _begun: reset where this is nested
            if begun and not recorded and not isinstance(error, CaptureError):
                self._ctx.broke_off(error)
            raise

    @contextmanager
    def lane(self, number: int) -> Iterator[None]:
        """Kernels launched in here, while the engine is :meth:`running`, go to one of its lanes, taken in turns by
        ``number``: the current stream, or a second one. A kernel of one lane uses the SMs that the last wave of a
        kernel of the other leaves idle."""
        if self._on_gpu:
            with torch.cuda.stream(self._lanes[number % len(self._lanes)]):
                yield
        else:
            yield

    def follow(self) -> None:
        """Have later copies wait for all that has been launched so far on the current stream, or the current lane."""
        if isinstance(self._stream, torch.cuda.Stream):
            self._stream.wait_stream(torch.cuda.current_stream(self._ctx.device))

    def then(self, producer: Callable[[], None], consumer: Callable[[], None]) -> None:
        """Run the kernels that ``producer`` launches on the current stream, and beside them, on this engine's stream,
        those that ``consumer`` launches. The consumer's kernels wait for flags that the producer's set."""
        with self.running():
            producer()
            self._begun = True
            with torch.cuda.stream(self._stream) if self._on_gpu else nullcontext():
                consumer()

    def put(self, source: torch.Tensor, target: torch.Tensor, peer: int) -> None:
        """Copy ``source`` to the place of ``target``, symmetric, on rank ``peer``: both of the same shape, of one
        dimension or two, with rows that are contiguous.

        Sync: behind earlier copies of this engine, which any rank sees no later than this one.
        """
        self._begun = True
        address = self._ctx.heap_offset(target) + self._backend.bases[peer]
        item = source.element_size()
        if source.is_contiguous() and target.is_contiguous():
            self._backend.copy(address, source.data_ptr(), source.numel() * item, self._stream)
        else:
            rows, width = source.shape[0], source.shape[1] * item
            pitches = target.stride(0) * item, source.stride(0) * item
            self._backend.copy_rows(address, source.data_ptr(), pitches, width, rows, self._stream)

    def put_to_all(self, part: torch.Tensor) -> None:
        """Copy ``part``, symmetric, to its place on all other ranks, the next one first."""
        for step in range(1, self._ctx.world_size):
            self.put(part, part, (self._ctx.rank + step) % self._ctx.world_size)

    def wait(self, word: torch.Tensor) -> None:
        """Later copies wait until the int32 ``word`` of this rank is not zero; see :meth:`clear`."""
        self._backend.wait_word(word.data_ptr(), self._stream)

    def set(self, word: torch.Tensor, value: int) -> None:
        """Set the int32 ``word`` of this rank, behind the copies so far."""
        self._backend.write_word(word.data_ptr(), value, self._stream)

    def clear(self, word: torch.Tensor) -> None:
        """Set the int32 ``word`` of this rank to zero, behind the copies so far."""
        self.set(word, 0)
