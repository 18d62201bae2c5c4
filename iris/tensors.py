"""Tensors on the symmetric heap, made with the signatures that torch has.

Each of these calls is collective: all ranks make it, with the same arguments, in the same order. A call with ``out``
allocates nothing, and ranks exchange nothing in it.
"""

from __future__ import annotations

import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from iris.eager import eager
from iris.errors import ArgumentError, DTypeError, PlacementError, RankMismatch, ShapeError

Size = int | Sequence[int] | torch.Size
Device = str | int | torch.device | None


def _flat(op: str, sizes: tuple[Any, ...], size: Size | None = None) -> tuple[int, ...]:
    """``(2, 3)`` from ``f(2, 3)``, ``f((2, 3))`` or ``f(size=(2, 3))``."""
    if bool(sizes) == (size is not None):
        raise ArgumentError(op, "size", "one size, by position or by name", "both" if sizes else "none")
    if size is not None:
        sizes = (size,)
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    if any(isinstance(extent, bool) for extent in sizes):
        raise ArgumentError(op, "size", "whole numbers", sizes)
    try:
        return tuple(operator.index(extent) for extent in sizes)
    except (TypeError, RuntimeError) as error:
        raise ArgumentError(op, "size", "whole numbers", sizes) from error


def _uniform(
    size: tuple[int, ...],
    low: float,
    high: float,
    *,
    dtype: torch.dtype | None,
    device: Device = None,
    out: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """What ``torch.uniform`` would do; torch has no such function."""
    target = torch.empty(size, dtype=dtype, device=device) if out is None else out
    return target.uniform_(low, high, generator=generator)


_OWN: dict[str, Callable[..., torch.Tensor]] = {"uniform": _uniform, "zeros_like": torch.zeros}
"""Functions that make the values where torch has no function of that name, or one with other arguments."""
_DRAWN = ("rand", "randn", "randint", "uniform")
_REFUSED = (RuntimeError, TypeError, ValueError, AssertionError, OverflowError)
"""What torch raises for arguments that cannot work."""


_SHORT = 1 << 16
"""The largest number of elements that are made in host memory to learn their number."""


def _example(
    op: str, factory: Callable[..., torch.Tensor], arguments: tuple[Any, ...], dtype: torch.dtype | None
) -> torch.Tensor:
    """A tensor with the shape and dtype of ``factory(*arguments, dtype=dtype)``, mostly without memory. What that would
    raise is raised here.

    Torch refuses some arguments only if it makes values, and checks less for a single one. So ``factory`` makes two, in
    host memory. On torch's meta device many factories import SymPy at first, and ``arange`` TorchDynamo, which takes
    1 to 3 s.
    """
    if op == "arange":  # only torch knows how many elements it makes
        example = factory(*arguments, dtype=dtype, device="cpu" if _is_short(*arguments) else "meta")
        factory(0, 2, 1, dtype=example.dtype, device="cpu")
        return example
    if op == "linspace":
        size, two = (operator.index(arguments[2]),), (*arguments[:2], 2)
    else:
        size = next(one for one in arguments if isinstance(one, tuple))
        two = tuple((2,) if one is size else one for one in arguments)
    drawn = {"generator": torch.Generator()} if op in _DRAWN else {}
    made = factory(*two, dtype=dtype, device="cpu", **drawn)
    return torch.empty(size, dtype=made.dtype, device="meta")


def _is_short(start: Any, end: Any, step: Any) -> bool:
    try:
        return bool(abs(end - start) <= _SHORT * abs(step))
    except _REFUSED:
        return False


def check_dense(op: str, argument: str, tensor: torch.Tensor) -> None:
    """Raise ArgumentError unless ``tensor`` is dense: strided, and not nested."""
    if tensor.is_nested:
        raise ArgumentError(op, argument, "a dense tensor", "a nested one")
    if tensor.layout != torch.strided:
        raise ArgumentError(op, argument, "a dense tensor", tensor.layout, "Make it dense with .to_dense().")


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it is a FakeTensor, as tracers make them: it has no memory, and warns when asked for it."""
    return type(tensor).__name__ == "FakeTensor"


def address_of(tensor: torch.Tensor) -> int:
    """Where the first element is; 0 for a tensor without memory, as ``torch.vmap`` and tracers make them."""
    if is_fake(tensor):
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def has_memory(tensor: torch.Tensor) -> bool:
    """False for a tensor without storage of its own, such as a DTensor, or with storage resized to 0, as FSDP does."""
    return bool(address_of(tensor)) and tensor.untyped_storage().nbytes() > 0


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` carries a tangent, that is, takes part in forward-mode differentiation."""
    level: int = forward_ad._current_level  # looking at this first takes a tenth of the time
    return level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def waited(value: Any) -> Any:
    """The result of a functional collective of PyTorch, once it is complete; any other value unchanged."""
    functional = sys.modules.get("torch.distributed._functional_collectives")
    return value.wait() if functional and isinstance(value, functional.AsyncCollectiveTensor) else value


def _check_given(op: str, argument: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(op, argument, "a tensor", type(tensor).__name__)
    check_dense(op, argument, tensor)
    if tensor.is_meta:
        raise ArgumentError(op, argument, "a tensor with data", "one on the meta device")
    if tensor.numel() and not has_memory(tensor):
        fix = "Of a DTensor pass to_local()."
        raise ArgumentError(op, argument, "a tensor with data", f"a {type(tensor).__name__} without", fix)
    if tensor.is_quantized:
        raise DTypeError(op, argument, "a tensor of plain numbers", tensor.dtype, "Pass tensor.dequantize().")


def _refused(op: str, arguments: tuple[Any, ...], error: Exception) -> ArgumentError:
    said = str(error).partition("\nException raised from ")[0]  # PyTorch's stack trace follows
    return ArgumentError(op, "arguments", f"what torch.{op} accepts", f"{arguments}: {said}")


class SymmetricTensors(ABC):
    """The tensor-making part of the context."""

    device: torch.device

    @abstractmethod
    def _require_open(self, op: str) -> None:
        """Raise unless the context may be used, here and now."""

    @abstractmethod
    def _allocate(self, op: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised symmetric memory. Collective."""

    @abstractmethod
    def _exchange(self, tag: str, payload: bytes = b"", ranks: Sequence[int] | None = None) -> dict[int, bytes]:
        """Every rank's ``payload``. Collective."""

    @abstractmethod
    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies on this context's symmetric heap."""

    def _make(
        self,
        op: str,
        arguments: tuple[Any, ...],
        out: torch.Tensor | None,
        dtype: torch.dtype | None,
        device: Device,
        requires_grad: bool,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """What ``torch.<op>(*arguments)`` returns, on the heap or in ``out``.

        An example gives shape and dtype; then torch fills the memory.
        """
        factory: Callable[..., torch.Tensor] = _OWN.get(op) or getattr(torch, op)
        self._check_device(op, device)
        self._check_generator(op, generator)
        if out is not None:
            self._check_symmetric(op, out)
        wanted = dtype if dtype is not None or out is None else out.dtype
        try:
            like = _example(op, factory, arguments, wanted)
        except _REFUSED as error:
            raise _refused(op, arguments, error) from error
        if not isinstance(requires_grad, bool | None):
            raise ArgumentError(op, "requires_grad", "True or False", repr(requires_grad))
        if requires_grad and not (like.is_floating_point() or like.is_complex()):
            raise DTypeError(op, "requires_grad", "a floating dtype", like.dtype)
        shape = tuple(like.shape)
        target = self._check_out(op, out, like) if out is not None else self._allocate(op, shape, like.dtype)
        random = {} if generator is None else {"generator": generator}
        try:
            with torch.no_grad():
                factory(*arguments, dtype=like.dtype, out=target, device=target.device, **random)
        except _REFUSED as error:
            raise _refused(op, arguments, error) from error
        return target.requires_grad_(requires_grad) if requires_grad else target

    def _check_device(self, op: str, device: Device) -> None:
        if device is None:
            return
        try:
            wanted = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(op, "device", f"None or {self.device}", repr(device)) from error
        numbers = (None, self.device.index) if self.device.type != "cpu" else (None, 0)
        if wanted.type != self.device.type or wanted.index not in numbers:
            fix = "The heap of a rank lives on that rank's own device: leave device out."
            raise PlacementError(op, "device", str(self.device), wanted, fix)

    def _check_generator(self, op: str, generator: torch.Generator | None) -> None:
        if generator is None:
            return
        if not isinstance(generator, torch.Generator):
            raise ArgumentError(op, "generator", "None or a torch.Generator", repr(generator))
        if generator.device.type != self.device.type:
            fix = f"Make it with torch.Generator({str(self.device)!r})."
            raise PlacementError(op, "generator", f"one on {self.device}", f"one on {generator.device}", fix)

    def _check_symmetric(self, op: str, out: torch.Tensor) -> None:
        _check_given(op, "out", out)
        if not self.is_symmetric(out):
            raise PlacementError(
                op, "out", "a tensor on the symmetric heap", f"one on {out.device}", "Make it with ctx.empty(...)."
            )

    def _check_out(self, op: str, out: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if out.dtype != like.dtype:
            raise DTypeError(op, "out", str(like.dtype), out.dtype)
        if out.shape != like.shape:
            raise ShapeError(op, "out", str(tuple(like.shape)), tuple(out.shape))
        if out.requires_grad and torch.is_grad_enabled():
            fix = "Call it under torch.no_grad(), or pass out.detach()."
            raise ArgumentError(op, "out", "a tensor that needs no gradient", "one with requires_grad=True", fix)
        return out

    def _check_floating(self, op: str, dtype: torch.dtype | None, out: torch.Tensor | None) -> None:
        """Raise DTypeError unless the dtype is floating: torch's own error does not say that the dtype is wrong."""
        wanted = dtype if dtype is not None or out is None else getattr(out, "dtype", None)
        if isinstance(wanted, torch.dtype) and not (wanted.is_floating_point or wanted.is_complex):
            raise DTypeError(op, "dtype", "a floating dtype", wanted)

    @eager
    def empty(
        self,
        *sizes: Any,
        size: Size | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """As :func:`torch.empty`, on the symmetric heap. Collective."""
        return self._make("empty", (_flat("empty", sizes, size),), out, dtype, device, requires_grad)

    @eager
    def zeros(
        self,
        *sizes: Any,
        size: Size | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """As :func:`torch.zeros`, on the symmetric heap. Collective."""
        return self._make("zeros", (_flat("zeros", sizes, size),), out, dtype, device, requires_grad)

    @eager
    def ones(
        self,
        *sizes: Any,
        size: Size | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """As :func:`torch.ones`, on the symmetric heap. Collective."""
        return self._make("ones", (_flat("ones", sizes, size),), out, dtype, device, requires_grad)

    @eager
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
        arguments = (_flat("full", (size,)), fill_value)
        return self._make("full", arguments, out, dtype, device, requires_grad)

    @eager
    def rand(
        self,
        *sizes: Any,
        size: Size | None = None,
        generator: torch.Generator | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """As :func:`torch.rand`, on the symmetric heap. Collective; the values are each rank's own."""
        self._check_floating("rand", dtype, out)
        return self._make("rand", (_flat("rand", sizes, size),), out, dtype, device, requires_grad, generator)

    @eager
    def randn(
        self,
        *sizes: Any,
        size: Size | None = None,
        generator: torch.Generator | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """As :func:`torch.randn`, on the symmetric heap. Collective; the values are each rank's own."""
        self._check_floating("randn", dtype, out)
        return self._make("randn", (_flat("randn", sizes, size),), out, dtype, device, requires_grad, generator)

    @eager
    def randint(
        self,
        low: int | None = None,
        high: int | Size | None = None,
        size: Size | None = None,
        *,
        generator: torch.Generator | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """As :func:`torch.randint`: ``randint(high, size)`` or ``randint(low, high, size)``. Collective."""
        if size is None:  # randint(high, size)
            low, high, size = None, low, high
        if high is None:  # randint(high, size=size)
            low, high = None, low
        arguments = (0 if low is None else low, high, _flat("randint", (), size))
        wanted = torch.int64 if dtype is None and out is None else dtype
        return self._make("randint", arguments, out, wanted, device, requires_grad, generator)

    @eager
    def uniform(
        self,
        size: Size,
        low: float = 0.0,
        high: float = 1.0,
        dtype: torch.dtype | None = None,
        *,
        generator: torch.Generator | None = None,
        out: torch.Tensor | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """Values drawn evenly from ``[low, high)``, as :meth:`torch.Tensor.uniform_`. Collective."""
        self._check_floating("uniform", dtype, out)
        try:
            ordered = float(low) <= float(high)
        except _REFUSED as error:
            raise ArgumentError("uniform", "low and high", "two numbers", f"{low!r} and {high!r}") from error
        if not ordered:
            raise ArgumentError("uniform", "low", f"at most high, {high}", low)
        arguments = (_flat("uniform", (size,)), low, high)
        return self._make("uniform", arguments, out, dtype, device, requires_grad, generator)

    @eager
    def arange(
        self,
        start: float | None = None,
        end: float | None = None,
        step: float = 1,
        *,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """As :func:`torch.arange`, on the symmetric heap: ``arange(end)`` or ``arange(start, end)``. Collective."""
        if end is None:
            start, end = None, start
        arguments = (0 if start is None else start, end, step)
        return self._make("arange", arguments, out, dtype, device, requires_grad)

    @eager
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
        return self._make("linspace", (start, end, steps), out, dtype, device, requires_grad)

    @eager
    def zeros_like(
        self,
        input: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """As :func:`torch.zeros_like`, on the symmetric heap, contiguous. Collective."""
        if not isinstance(input, torch.Tensor):
            raise ArgumentError("zeros_like", "input", "a tensor", type(input).__name__)
        check_dense("zeros_like", "input", input)
        return self._make("zeros_like", (tuple(input.shape),), None, dtype or input.dtype, device, requires_grad)

    @eager
    def as_symmetric(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` itself if it is on the symmetric heap, else a contiguous copy of it on the heap. Collective.

        The copy of a leaf that requires a gradient is a leaf that requires one, too; the copy of a Parameter is a
        Parameter. No gradient flows back through a copy, and a copy has no forward-mode tangent.

        Raises:
            RankMismatch: the tensor is on the symmetric heap of some ranks only.
            ArgumentError: the tensor would have to be copied, but it has a tangent, or it is the result of a
                computation through which gradients flow back, and gradients are enabled.
        """
        self._require_open("as_symmetric")
        tensor = waited(tensor)
        _check_given("as_symmetric", "tensor", tensor)
        here = self.is_symmetric(tensor)
        if not here and tensor.grad_fn is not None and torch.is_grad_enabled():
            raise ArgumentError(
                "as_symmetric", "tensor", "one whose gradient goes nowhere else", "the result of a computation",
                "No gradient flows back through a copy: pass tensor.detach().",
            )  # fmt: skip
        if not here and has_tangent(tensor):
            raise ArgumentError(
                "as_symmetric", "tensor", "one without a tangent", "a dual tensor of torch.autograd.forward_ad",
                "A copy has none: pass tensor.detach().",
            )  # fmt: skip
        answers = self._exchange("as_symmetric", bytes([here]))
        with_it = [rank for rank in sorted(answers) if answers[rank] == b"\1"]
        if with_it and len(with_it) < len(answers):
            raise RankMismatch(
                f"as_symmetric: the tensor is on the symmetric heap of ranks {with_it} only. "
                "On all ranks pass a tensor that is, or on none."
            )
        if here:
            return tensor
        copy = self._allocate("as_symmetric", tuple(tensor.shape), tensor.dtype)
        with torch.no_grad():
            copy.copy_(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(copy, tensor.requires_grad)
        return copy.requires_grad_(tensor.requires_grad and tensor.is_leaf)
