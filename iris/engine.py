"""The copy engine: bulk copies between ranks that cost no SM, beside the kernels of the current stream.

Between ``begin`` and ``end``, copies run in order, and kernels may wait for the flags that they set::

    engine = CopyEngine(ctx)
    engine.begin()                              # behind what the current stream holds so far
    engine.put(source, target, peer)            # this rank's source → peer's target
    …                                           # launch kernels that wait for flags
    engine.end()                                # the current stream goes on when the copies are done
"""

from __future__ import annotations

import torch

from iris.context import Iris


class CopyEngine:
    """One stream of copies, done in the order in which they are asked for. Can be captured in a graph."""

    def __init__(self, ctx: Iris) -> None:
        self._ctx = ctx
        self._backend = ctx._backend
        self._stream = self._backend.side_stream()

    def begin(self) -> None:
        """Copies asked for from now on start when the current stream's work so far is done."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._ctx.device))

    def put(self, source: torch.Tensor, target: torch.Tensor, peer: int) -> None:
        """Copy ``source`` to the place of ``target``, symmetric, on rank ``peer``: both of the same shape, of one dimension
        or two, with rows that are contiguous.

        Sync: behind earlier copies of this engine, which any rank sees no later than this one.
        """
        bases = self._backend.bases
        address = target.data_ptr() - bases[self._ctx.rank] + bases[peer]
        item = source.element_size()
        if source.is_contiguous() and target.is_contiguous():
            self._backend.copy(address, source.data_ptr(), source.numel() * item, self._stream)
        else:
            rows, width = source.shape[0], source.shape[1] * item
            pitches = target.stride(0) * item, source.stride(0) * item
            self._backend.copy_rows(address, source.data_ptr(), pitches, width, rows, self._stream)

    def end(self) -> None:
        """The current stream's later work waits for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._ctx.device).wait_stream(self._stream)
