"""The part of the context that allocates memory of the symmetric heap, and frees it."""

from __future__ import annotations

from abc import abstractmethod

import torch

from iris.backends.base import Backend
from iris.eager import eager
from iris.errors import ArgumentError, IrisError, PlacementError
from iris.heap import HeapTable
from iris.leases import Lease, Leases
from iris.live import OPEN
from iris.tensors import SymmetricTensors, is_fake


class SymmetricHeap(SymmetricTensors):
    """Blocks of one rank's heap as tensors, and where they lie."""

    rank: int
    device: torch.device
    _table: HeapTable
    _leases: Leases
    _backend: Backend

    @abstractmethod
    def broke_off(self, error: BaseException) -> None:
        """End the context: ``error`` ended a call of this rank half way."""

    @abstractmethod
    def _rank_of(self, op: str, argument: str, rank: object) -> int:
        """``rank`` as a number; ArgumentError if there is no such rank."""

    def heap_offset(self, tensor: torch.Tensor) -> int:
        """The offset, in bytes, at which ``tensor`` begins in this rank's heap, where it must lie. For a symmetric
        tensor, the offset is the same in every heap."""
        start = tensor.data_ptr()
        if not tensor.numel():  # PyTorch gives no address
            start = tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()
        return start - self._backend.bases[self.rank]

    @property
    @eager
    def heap_free_bytes(self) -> int:
        """Bytes of the symmetric heap that were free on all ranks at the last allocation. ContextError if the context
        is closed."""
        self._require_open("heap_free_bytes")
        return self._table.free_bytes

    @property
    @eager
    def heap_largest_free_bytes(self) -> int:
        """Bytes of the largest free block of the symmetric heap; the same on all ranks. ContextError if the context is
        closed."""
        self._require_open("heap_largest_free_bytes")
        return self._table.largest_free

    @eager
    def heap_size_for(self, nbytes: int) -> int:
        """The ``heap_size`` that would hold a block of ``nbytes`` in addition to what is in use now."""
        return self._table.would_do(nbytes)

    def _allocate(self, op: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._require_open(op)
        count = 1
        for extent in shape:
            if extent < 0:
                raise ArgumentError(op, "size", "extents of 0 or more", shape)
            count *= extent
        nbytes = count * dtype.itemsize
        try:
            lease = self._leases.take(nbytes, op, f"{op}({nbytes} bytes of {dtype})", self._exchange)
            memory = self._backend.bytes_at(lease.offset, max(nbytes, 1), lease.release)
            lease.storage = _storage_of(memory)
        except IrisError:  # on all ranks alike
            raise
        except BaseException as error:  # Ctrl-C: this rank's table may differ from the others' now
            self.broke_off(error)
            raise
        return memory[:nbytes].view(dtype).view(shape).detach()  # else a view to autograd, which torch's are not

    @eager
    def free(self, tensor: torch.Tensor) -> None:
        """Release ``tensor``'s block now, rather than when its last reference goes.

        The block is reused once all ranks have released it. Using the tensor, or another view of its block, after this
        is an error that nothing detects.

        Raises:
            PlacementError: the tensor is not on the symmetric heap, or was freed before.
        """
        self._require_open("free")
        lease = self._lease_of("free", tensor)
        if lease is None or lease.storage != _storage_of(tensor):
            raise PlacementError(
                "free",
                "tensor",
                "one that lives on this heap",
                f"{tuple(tensor.shape)} on {tensor.device}",
                "Only tensors made by this context, and not freed yet, can be freed.",
            )
        lease.release()

    def _lease_of(self, op: str, tensor: torch.Tensor) -> Lease | None:
        """This rank's lease of the block that holds ``tensor``, or the tensor of which it is a view."""
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(op, "tensor", "a tensor", type(tensor).__name__)
        if tensor.layout != torch.strided or tensor.device != self.device or is_fake(tensor):
            return None
        try:
            start = tensor.untyped_storage().data_ptr()
        except RuntimeError:  # without storage of its own, such as a DTensor, or one that torch.vmap made
            return None
        return self._leases.holding(start - self._backend.bases[self.rank])

    @eager
    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lives on this context's symmetric heap, as a whole block or a view of one."""
        self._require_open("is_symmetric")
        return self._lease_of("is_symmetric", tensor) is not None

    @eager
    def peer_view(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """``rank``'s copy of ``tensor``: a tensor over the same place in that rank's heap, for ``copy_``.

        Copies between this view and this rank's tensors go through the copy engine. The view stays valid until
        ``close()``.

        Raises:
            PlacementError: the tensor is not contiguous on the symmetric heap, or its memory does not hold its values,
                as it is negated or conjugated.
        """
        self._require_open("peer_view")
        rank = self._rank_of("peer_view", "rank", rank)
        if self._lease_of("peer_view", tensor) is None:
            expected = "a contiguous tensor on the symmetric heap"
            raise PlacementError("peer_view", "tensor", expected, whereabouts(self, tensor))
        if not tensor.is_contiguous():
            got = f"one of shape {tuple(tensor.shape)} with strides {tensor.stride()}"
            raise PlacementError("peer_view", "tensor", "a contiguous tensor on the symmetric heap", got)
        if tensor.is_neg() or tensor.is_conj():
            expected, got = "a tensor whose memory holds its values", "a view that negates or conjugates them"
            raise PlacementError("peer_view", "tensor", expected, got, "Take the view of the tensor it is made from.")
        if not tensor.numel():
            return torch.empty_like(tensor)
        raw = self._backend.peer_bytes(rank, self.heap_offset(tensor), tensor.numel() * tensor.element_size())
        return raw.view(tensor.dtype).view(tensor.shape).detach()


def _storage_of(tensor: torch.Tensor) -> int:
    """A number that identifies the storage of ``tensor`` and its views among all storages that exist now."""
    return int(tensor.untyped_storage()._cdata)


def whereabouts(ctx: SymmetricHeap, tensor: torch.Tensor) -> str:
    """Words for an error about a ``tensor`` that is not on the heap of ``ctx``: where it is instead."""
    others = (one for one in OPEN if isinstance(one, SymmetricHeap) and one is not ctx)
    place = "on the heap of another context" if any(one.is_symmetric(tensor) for one in others) else "outside it"
    return f"one on {tensor.device} {place}"
