"""Arguments and grid of a simulated kernel: converted as on GPUs, or refused with the error that Triton raises
there."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton._utils import type_canonicalisation_dict
from triton.runtime import interpreter as upstream

_HINTS = {
    "handle": ". Of a context pass ctx.handle, or as heap_bases ctx.heap_bases",
    "buffer": ". Of a trace pass trace.buffer",
}
"""Hints for a wrong argument, by an attribute that it has: what to pass in its place."""
_NUMBERS = ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "fp16", "fp32", "fp64")
"""Types that an annotation may give a number."""


def keywords_of(kernel: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``keywords`` that are arguments of ``kernel``, not launch options. For a keyword that is neither, it
    raises what Triton raises on GPUs."""
    names = _names(kernel)
    known = names | _launch_options()
    for keyword in keywords:
        if keyword not in known:
            nearest = difflib.get_close_matches(keyword, sorted(known), 1)
            hint = f": did you mean {nearest[0]}?" if nearest else ""
            raise KeyError(f"Keyword argument {keyword} was specified but unrecognised{hint}")
    return {name: value for name, value in keywords.items() if name in names}


def values_of(kernel: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values ``given`` for the arguments of ``kernel`` in the interpreter's form; constants unchanged."""
    constants = _constants(kernel)
    return {name: value if name in constants else _taken(kernel, name, value) for name, value in given.items()}


def sizes_of(kernel: Any, grid: Any) -> tuple[int, ...]:
    """All three sizes of ``grid``. Raises TypeError for a size that is no whole number, such as M / 16: int() would
    drop its fraction."""
    try:
        sizes = tuple(operator.index(size) for size in grid)
    except TypeError:
        sizes = ()
    if not 1 <= len(sizes) <= 3:
        raise TypeError(f"{kernel.__name__}: grid: expected one to three whole numbers, got {grid!r}")
    return (*sizes, 1, 1)[:3]


@functools.cache
def _names(fn: Callable[..., Any]) -> frozenset[str]:
    """The names of the arguments of ``fn``."""
    specification = inspect.getfullargspec(fn)
    return frozenset((*specification.args, *specification.kwonlyargs))


@functools.cache
def _launch_options() -> frozenset[str]:
    """Launch options that the compiler of any vendor takes beside a kernel's own arguments, such as ``num_warps``."""
    modules = [vars(sys.modules[backend.compiler.__module__]) for backend in triton.backends.backends.values()]
    options = [kind for module in modules for kind in module.values() if is_dataclass(kind)]
    return frozenset(field.name for kind in options for field in fields(kind))


def _taken(kernel: Any, name: str, value: Any) -> Any:
    """``value`` in the interpreter's form. Raises what Triton raises on GPUs for a value that it cannot compile for."""
    converted = _converted(kernel, name, value)
    if converted is value and not isinstance(value, upstream.InterpretedFunction):
        try:
            triton.runtime.jit.mangle_type(value)
        except TypeError as error:
            hint = next((text for name, text in _HINTS.items() if hasattr(value, name)), "")
            raise TypeError(f"{kernel.__name__}: argument {name}: {error}{hint}") from None
    return converted


def _converted(kernel: Any, name: str, value: Any) -> Any:
    """``value`` in the interpreter's form. Numbers in a tuple are converted as others are, but have no argument
    name."""
    if isinstance(value, bool | int | float):
        return _number(kernel, name, value)
    if isinstance(value, tuple):
        return upstream._tuple_create(value, [_converted(kernel, "", one) for one in value])
    return upstream._implicit_cvt(value)


def _number(kernel: Any, name: str, value: Any) -> Any:
    """A number as a kernel gets it. Its type is that of the argument's annotation; without one, integers are as wide as
    they must be, and floats have 32 bits. The integer 1 becomes a constant, as in Triton, which has no ``.to()``,
    unless the argument is annotated or ``do_not_specialize``."""
    if type(value) is int and value == 1 and name not in _unspecialised(kernel):
        return 1
    kind = _annotated(kernel).get(name) or triton.runtime.jit.mangle_type(value)
    dtype = tl.str_to_ty("i1" if isinstance(value, bool) else kind, None)
    return tl.tensor(upstream.TensorHandle(np.array([value]).astype(upstream._get_np_dtype(dtype)), dtype), dtype)


@functools.cache
def _constants(kernel: Any) -> frozenset[str]:
    """The arguments of ``kernel`` that are constants, in whatever form their annotations say so."""
    return frozenset(name for name, kind in kernel.__annotations__.items() if "constexpr" in str(kind))


@functools.cache
def _unspecialised(kernel: Any) -> frozenset[str]:
    """The arguments of ``kernel`` that never become constants: those with a type, and those in
    ``do_not_specialize``."""
    names, asked = list(inspect.signature(kernel).parameters), getattr(kernel, "do_not_specialize", ())
    return frozenset(_annotated(kernel)) | {one if isinstance(one, str) else names[one] for one in asked}


@functools.cache
def _annotated(kernel: Any) -> dict[str, str]:
    """The number types in the annotations of the arguments of ``kernel``, given as ``tl.int64`` or by name."""
    said = {name: str(kind).rpartition(".")[2].strip("'\"") for name, kind in kernel.__annotations__.items()}
    names = {name: type_canonicalisation_dict.get(kind) for name, kind in said.items()}
    return {name: kind for name, kind in names.items() if kind in _NUMBERS}
