"""Triton's interpreter works out the same types over and over, for every number that a kernel touches. What depends on
nothing else is remembered here: simulated ops take half the time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as upstream


def install() -> None:
    """Put the memories in place; once per process."""
    _remember_shapes()
    _remember_block_types()
    _remember_numpy_types()
    _remember_promotions()
    _compare_by_identity_first()


def _remember_shapes() -> None:
    """Of tensors, as Triton wants them: each size a constant."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in known:
            known[shape] = tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[shape]

    tl.tensor.__init__ = init_tensor


def _remember_block_types() -> None:
    original: Callable[[Any, Any, Any], None] = tl.block_type.__init__
    known: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        key = element_ty.name, sizes
        if not all(isinstance(size, int) for size in sizes):
            original(self, element_ty, shape)  # which says what is wrong with it
        elif key in known:
            vars(self).update(known[key], element_ty=element_ty)
        else:
            original(self, element_ty, shape)
            known[key] = dict(vars(self))

    tl.block_type.__init__ = init_block_type


def _remember_numpy_types() -> None:
    original: Callable[[Any], Any] = upstream._get_np_dtype
    known: dict[str, Any] = {}

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = original(dtype)
        return known[name]

    upstream._get_np_dtype = get_np_dtype


def _remember_promotions() -> None:
    original: Callable[..., Any] = TritonSemantic.computation_type_impl
    known: dict[tuple[Any, ...], Any] = {}

    def computation_type_impl(
        self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool
    ) -> Any:
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in known:
            known[key] = original(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return known[key]

    TritonSemantic.computation_type_impl = computation_type_impl


def _compare_by_identity_first() -> None:
    """Types of numbers exist once each, except in what was unpickled."""
    original: Callable[[Any, Any], bool] = tl.dtype.__eq__
    tl.dtype.__eq__ = lambda self, other: self is other or original(self, other)
