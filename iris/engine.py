"""The copy engine: bulk copies between ranks that use no SM and run beside the kernels of the current stream.

    engine = CopyEngine(ctx)
    engine.beside(kernel, copies)       # two functions: one launches, the other asks for copies

    with engine.running():              # the same, step by step
        first_kernel()
        engine.follow()                 # later copies wait for what was launched before
        engine.put(source, target, peer)
        second_kernel()

``copies`` calls :meth:`put`, and :meth:`wait` where a copy must not run ahead of the kernel. Copies run in the order in
which they are asked for. The current stream goes on when both kernel and copies are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from iris.capture import stream_beside
from iris.context import Iris
from iris.errors import CaptureError


class CopyEngine:
    """One stream of copies, which run in the order in which they are asked for. A graph can capture them."""

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
        """Run what ``kernel`` launches on the current stream, and ``copies`` beside it. Both run behind the current
        stream's work so far; ``last`` runs behind both.

        The kernel is launched first, so that a copy that waits for it cannot block it, however few queues the driver
        has. If it is the kernel that waits, for copies that wait for nothing, use :meth:`running` and ask for the
        copies first.
        """
        # In the simulator a kernel has finished when its launch returns, so the copies are asked for first.
        first, second = (kernel, copies) if self._on_gpu else (copies, kernel)
        with self.running(last=last):
            first()
            self._begun |= self._on_gpu  # the kernel waits for copies now
            second()

    @contextmanager
    def running(
        self, lanes: int = 1, last: Callable[[], None] | None = None, *, announced: bool = False
    ) -> Iterator[None]:
        """Inside this block, copies run beside the kernels of the current stream, both behind the stream's work so far.
        Later work of the stream, beginning with what ``last`` launches, waits for the copies, and for the second lane
        if there are two; see :meth:`lane`.

        An exception in the block ends the context if a copy has been asked for, if a kernel waits for one, or if the
        call was ``announced`` before: the peers then rely on a call that this rank does not finish."""
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
        before, or if the exception is Ctrl-C, which may come right behind a launch. Yields whether a graph captures the
        block: if so, nothing has run when it raises, and the context goes on."""
        self._begun = announced
        recorded = self._on_gpu and torch.cuda.is_current_stream_capturing()
        try:
            yield recorded
        except BaseException as error:
            begun = announced or self._begun or not isinstance(error, Exception)  # a nested block resets _begun
            if begun and not recorded and not isinstance(error, CaptureError):
                self._ctx.broke_off(error)
            raise

    @contextmanager
    def lane(self, number: int) -> Iterator[None]:
        """Launch the kernels of this block, while the engine is :meth:`running`, in one of its lanes: the current
        stream, or a second stream. Successive values of ``number`` take the lanes in turns. A kernel in one lane can
        use the SMs that the last wave of a kernel in the other lane leaves idle."""
        if self._on_gpu:
            with torch.cuda.stream(self._lanes[number % len(self._lanes)]):
                yield
        else:
            yield

    def follow(self) -> None:
        """Make later copies wait for all work launched so far on the current stream, or in the current lane."""
        if isinstance(self._stream, torch.cuda.Stream):
            self._stream.wait_stream(torch.cuda.current_stream(self._ctx.device))

    def then(self, producer: Callable[[], None], consumer: Callable[[], None]) -> None:
        """Run the kernels that ``producer`` launches on the current stream, and beside them, on this engine's stream,
        those that ``consumer`` launches. The consumer's kernels wait for flags that the producer's kernels set."""
        with self.running():
            producer()
            self._begun = True
            with torch.cuda.stream(self._stream) if self._on_gpu else nullcontext():
                consumer()

    def put(self, source: torch.Tensor, target: torch.Tensor, peer: int) -> None:
        """Copy ``source`` to the place of the symmetric ``target`` on rank ``peer``. Both have the same shape, one or
        two dimensions, and contiguous rows.

        Sync: runs behind earlier copies of this engine; a rank that sees this copy also sees those.
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
        """Copy the symmetric ``part`` to its place on all other ranks, beginning with the next rank."""
        for step in range(1, self._ctx.world_size):
            self.put(part, part, (self._ctx.rank + step) % self._ctx.world_size)

    def wait(self, word: torch.Tensor) -> None:
        """Make later copies wait until this rank's int32 ``word`` is not zero; see :meth:`clear`."""
        self._backend.wait_word(word.data_ptr(), self._stream)

    def set(self, word: torch.Tensor, value: int) -> None:
        """Set this rank's int32 ``word`` to ``value``, behind the copies so far."""
        self._backend.write_word(word.data_ptr(), value, self._stream)

    def clear(self, word: torch.Tensor) -> None:
        """Set this rank's int32 ``word`` to zero, behind the copies so far."""
        self.set(word, 0)
