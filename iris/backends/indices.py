"""Loop variables of simulated kernels. In Python they would be ints; in compiled kernels they have 32 or 64 bits: they
wrap, are divided toward zero, and can be cast. What comparisons of them yield has one bit."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as upstream

_NUMBERS = {1: (np.bool_, tl.int1), 32: (np.int32, tl.int32), 64: (np.int64, tl.int64)}


class Index(int):
    """A variable of a loop with 32-bit bounds, or a number computed from such variables."""

    bits = 32

    def tensor(self) -> tl.tensor:
        """This number as a scalar of the interpreter."""
        number, dtype = _NUMBERS[self.bits]
        return tl.tensor(upstream.TensorHandle(np.array([int(self)], number), dtype), dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)


class Wide(Index):
    """An :class:`Index` with 64 bits."""

    bits = 64


class Truth(Index):
    """What a comparison of an :class:`Index` yields."""

    bits = 1

    def __invert__(self) -> Truth:
        return Truth(not self)

    def __neg__(self) -> Any:
        return -self.tensor()


def indices(function: Callable[..., Any], *arguments: Any, **options: Any) -> Iterable[Any]:
    """The iterable of a ``for`` loop over ``function(…)``, which is ``range``, or a function of the kernel's own with
    this name."""
    numbers = function(*arguments, **options)
    if type(numbers) is not range:
        return numbers  # type: ignore[no-any-return]
    for one in arguments:
        if isinstance(one, tl.tensor) and one.dtype.is_floating():
            raise TypeError(f"range: expected whole numbers, got {one}, a float: // divides whole numbers")
    if numbers.step < 0 and isinstance(arguments[2], (tl.tensor, Index)):
        raise ValueError("range: a negative step must be a constant: with another one a compiled loop never runs")
    dtype = _unsigned(arguments)
    if dtype is not None:
        kind = upstream._get_np_dtype(dtype)
        return (tl.tensor(upstream.TensorHandle(np.array([one], kind), dtype), dtype) for one in numbers)
    return map(Wide if any(map(_is_wide, arguments)) else Index, numbers)


def _unsigned(bounds: Iterable[Any]) -> Any:
    """The dtype of a loop's variable if one of its bounds is unsigned, else None."""
    found = [one.dtype for one in bounds if isinstance(one, tl.tensor)]
    for one in found:
        if one.is_int1() or (one.is_int_unsigned() and one.primitive_bitwidth < 32):
            raise TypeError(f"range: a bound of {one}, whose sign compiled loops extend: cast it, .to(tl.int32)")
    return max((one for one in found if one.is_int_unsigned()), key=lambda one: one.primitive_bitwidth, default=None)


def _is_wide(number: Any) -> bool:
    """Whether a bound, or an operand, has 64 bits."""
    if isinstance(number, tl.tensor):
        return bool(number.dtype.primitive_bitwidth == 64)
    return isinstance(number, Wide) or not -(1 << 31) <= int(number) < 1 << 31


def _wrapped(value: int, wide: bool) -> Index:
    half = 1 << (63 if wide else 31)
    if not -half <= value < half:
        value = (value + half) % (2 * half) - half
    return Wide(value) if wide else Index(value)


def _divided(a: int, b: int) -> int:
    return a // b if (a < 0) == (b < 0) else -(-a // b)


def _remainder(a: int, b: int) -> int:
    return a - b * _divided(a, b)


def _method(name: str, compute: Callable[[int, int], int], swapped: bool) -> Callable[[Index, Any], Any]:
    plain = getattr(int, name)

    def method(self: Index, other: Any) -> Any:
        if type(other) is tl.constexpr:
            other = other.value
        if (
            isinstance(self, Truth)
            or isinstance(other, Truth | float)
            or (self.bits == 64 and type(other) is tl.tensor)
        ):
            return getattr(self.tensor(), name)(_as_tensor(other))
        if not isinstance(other, int):
            return plain(self, other)
        mine, theirs = int(self), int(other)
        made = compute(theirs, mine) if swapped else compute(mine, theirs)
        return _wrapped(made, _is_wide(self) or _is_wide(other))

    return method


def _quotient(name: str) -> Callable[[Index, Any], Any]:
    """The method ``name``, a division whose result is a float."""

    def method(self: Index, other: Any) -> Any:
        return getattr(self.tensor(), name)(_as_tensor(other))

    return method


def _as_tensor(number: Any) -> Any:
    return number.tensor() if isinstance(number, Index) else number


def _comparison(name: str) -> Callable[[Index, Any], Any]:
    of_int, of_float = getattr(int, name), getattr(float, name)

    def method(self: Index, other: Any) -> Any:
        if type(other) is tl.constexpr:
            other = other.value
        found = of_float(float(self), other) if isinstance(other, float) else of_int(self, other)
        return found if found is NotImplemented else Truth(found)

    return method


def _add_methods() -> None:
    binary = {
        "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": _divided, "mod": _remainder,
        "and": operator.and_, "or": operator.or_, "xor": operator.xor, "lshift": operator.lshift,
        "rshift": operator.rshift,
    }  # fmt: skip
    for name, compute in binary.items():
        for prefix, swapped in (("", False), ("r", True)):
            full = f"__{prefix}{name}__"
            setattr(Index, full, _method(full, compute, swapped))
    for full in ("__truediv__", "__rtruediv__"):
        setattr(Index, full, _quotient(full))
    for name in ("lt", "le", "eq", "ne", "gt", "ge"):
        setattr(Index, f"__{name}__", _comparison(f"__{name}__"))
    Index.__hash__ = int.__hash__  # type: ignore[method-assign]  # a class with its own == would have none
    for name, negate in (("__neg__", operator.neg), ("__invert__", operator.invert)):
        setattr(Index, name, lambda self, _f=negate: _wrapped(_f(int(self)), self.bits == 64))


_add_methods()
