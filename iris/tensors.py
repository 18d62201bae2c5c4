"""Tensors on the symmetric heap, made with the signatures that torch has.

Every one of these calls is collective: all ranks call it, with the same arguments, in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from iris.errors import ArgumentError, DTypeError, PlacementError, ShapeError

Size = int | Sequence[int] | torch.Size
Device = str | int | torch.device | None


def _flat(size: tuple[Any, ...]) -> tuple[int, ...]:
    """``(2, 3)`` from either ``f(2, 3)`` or ``f((2, 3))``."""
    if len(size) == 1 and isinstance(size[0], (tuple, list, torch.Size)):
        size = tuple(size[0])
    return tuple(int(extent) for extent in size)


class SymmetricTensors(ABC):
    """The tensor-making half of the context."""

    device: torch.device

    @abstractmethod
    def _allocate(self, op: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised symmetric memory. Collective."""

    @abstractmethod
    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies on this context's symmetric heap."""

    def _make(
        self,
        op: str,
        factory: Callable[..., torch.Tensor],
        arguments: tuple[Any, ...],
        *,
        out: torch.Tensor | None,
        dtype: torch.dtype | None,
        device: Device,
        requires_grad: bool,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Ask ``factory`` on torch's meta device for shape and dtype, allocate, and let it fill the memory."""
        self._check_device(op, device)
        wanted = dtype if dtype is not None or out is None else out.dtype
        try:
            like = factory(*arguments, dtype=wanted, device="meta")
        except (RuntimeError, TypeError, ValueError) as error:
            raise ArgumentError(op, "arguments", f"what torch.{op} accepts", f"{arguments}: {error}") from error
        target = (
            self._check_out(op, out, like) if out is not None else self._allocate(op, tuple(like.shape), like.dtype)
        )
        random = {} if generator is None else {"generator": generator}
        with torch.no_grad():
            factory(*arguments, dtype=like.dtype, out=target, **random)
        return target.requires_grad_(requires_grad) if requires_grad else target

    def _check_device(self, op: str, device: Device) -> None:
        if device is None:
            return
        wanted = torch.device(device)
        if wanted.type != self.device.type or wanted.index not in (None, self.device.index):
            raise PlacementError(
                op, "device", str(self.device), wanted, "The heap of a rank lives on that rank's own device."
            )

    def _check_out(self, op: str, out: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if not self.is_symmetric(out):
            raise PlacementError(
                op, "out", "a tensor on the symmetric heap", f"one on {out.device}", "Make it with ctx.empty(...)."
            )
        if out.dtype != like.dtype:
            raise DTypeError(op, "out", str(like.dtype), out.dtype)
        if out.shape != like.shape:
            raise ShapeError(op, "out", str(tuple(like.shape)), tuple(out.shape))
        return out

    def _check_floating(self, op: str, dtype: torch.dtype | None, out: torch.Tensor | None) -> None:
        """Torch itself notices only when it fills the memory."""
        wanted = dtype if dtype is not None or out is None else out.dtype
        if wanted is not None and not (wanted.is_floating_point or wanted.is_complex):
            raise DTypeError(op, "dtype", "a floating dtype", wanted)

    def empty(
        self,
        *size: Any,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """As :func:`torch.empty`, on the symmetric heap. Collective."""
        shape = _flat(size)
        return self._make(
            "empty", torch.empty, (shape,), out=out, dtype=dtype, device=device, requires_grad=requires_grad
        )

    def zeros(
        self,
        *size: Any,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """As :func:`torch.zeros`, on the symmetric heap. Collective."""
        shape = _flat(size)
        return self._make(
            "zeros", torch.zeros, (shape,), out=out, dtype=dtype, device=device, requires_grad=requires_grad
        )

    def ones(
        self,
        *size: Any,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """As :func:`torch.ones`, on the symmetric heap. Collective."""
        shape = _flat(size)
        return self._make(
            "ones", torch.ones, (shape,), out=out, dtype=dtype, device=device, requires_grad=requires_grad
        )

    def full(
        self,
        size: Size,
        fill_value: float | int | bool,
        *,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """As :func:`torch.full`, on the symmetric heap. Collective."""
        arguments = (_flat((size,)), fill_value)
        return self._make(
            "full", torch.full, arguments, out=out, dtype=dtype, device=device, requires_grad=requires_grad
        )

    def rand(
        self,
        *size: Any,
        generator: torch.Generator | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """As :func:`torch.rand`, on the symmetric heap. Collective; the values are each rank's own."""
        self._check_floating("rand", dtype, out)
        return self._make(
            "rand",
            torch.rand,
            (_flat(size),),
            out=out,
            dtype=dtype,
            device=device,
            requires_grad=requires_grad,
            generator=generator,
        )

    def randn(
        self,
        *size: Any,
        generator: torch.Generator | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """As :func:`torch.randn`, on the symmetric heap. Collective; the values are each rank's own."""
        self._check_floating("randn", dtype, out)
        return self._make(
            "randn",
            torch.randn,
            (_flat(size),),
            out=out,
            dtype=dtype,
            device=device,
            requires_grad=requires_grad,
            generator=generator,
        )

    def randint(
        self,
        low: int,
        high: int | Size,
        size: Size | None = None,
        *,
        generator: torch.Generator | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """As :func:`torch.randint`: ``randint(high, size)`` or ``randint(low, high, size)``. Collective."""
        bounds = (low, high) if size is not None else (0, low)
        shape = _flat((size if size is not None else high,))
        return self._make(
            "randint",
            torch.randint,
            (*bounds, shape),
            out=out,
            dtype=dtype or torch.int64 if out is None else dtype,
            device=device,
            requires_grad=requires_grad,
            generator=generator,
        )

    def uniform(
        self,
        *size: Any,
        low: float = 0.0,
        high: float = 1.0,
        generator: torch.Generator | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """Values drawn evenly from ``[low, high)``, as :meth:`torch.Tensor.uniform_`. Collective."""
        self._check_floating("uniform", dtype, out)
        if not low <= high:
            raise ArgumentError("uniform", "low", f"at most high, {high}", low)
        tensor = self._make(
            "uniform", torch.empty, (_flat(size),), out=out, dtype=dtype, device=device, requires_grad=False
        )
        with torch.no_grad():
            tensor.uniform_(low, high, generator=generator)
        return tensor.requires_grad_(requires_grad) if requires_grad else tensor

    def arange(
        self,
        start: float,
        end: float | None = None,
        step: float = 1,
        *,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """As :func:`torch.arange`, on the symmetric heap. Collective."""
        arguments = (0, start, step) if end is None else (start, end, step)
        return self._make(
            "arange", torch.arange, arguments, out=out, dtype=dtype, device=device, requires_grad=requires_grad
        )

    def linspace(
        self,
        start: float,
        end: float,
        steps: int,
        *,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """As :func:`torch.linspace`, on the symmetric heap. Collective."""
        arguments = (start, end, steps)
        return self._make(
            "linspace", torch.linspace, arguments, out=out, dtype=dtype, device=device, requires_grad=requires_grad
        )

    def zeros_like(
        self,
        input: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """As :func:`torch.zeros_like`, on the symmetric heap, contiguous. Collective."""
        return self.zeros(tuple(input.shape), dtype=dtype or input.dtype, device=device, requires_grad=requires_grad)

    def as_symmetric(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` itself if it is on the symmetric heap, else a contiguous copy that is.

        Collective when it copies: either all ranks pass a symmetric tensor, or none does.
        """
        if self.is_symmetric(tensor):
            return tensor
        copy = self._allocate("as_symmetric", tuple(tensor.shape), tensor.dtype)
        with torch.no_grad():
            copy.copy_(tensor)
        return copy.requires_grad_(tensor.requires_grad)
