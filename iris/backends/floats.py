"""bfloat16 and 8-bit floats, which Triton's interpreter keeps as bit patterns; and atomic sums of 16-bit floats.

In arithmetic, ``tl.dot``, ``tl.fma``, reductions, scans and most casts, the interpreter computes on the patterns; where
it does convert them, its rounding loses the carry into the exponent. Here operands are widened to float32, and results
are rounded to nearest even.

For 8-bit floats, Triton compiles casts, products (``tl.dot``), choices (``tl.where``), absolute values, from 3.7 on
numbers as the other operand, and from 3.9 on quotients. Everything else is an error here, too.

A sum or scan is rounded once, at its end, like the interpreter's sum of float16. A GPU rounds each partial sum, in an
order that is not specified.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partialmethod
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as upstream

from iris.errors import DTypeError

_Builder = upstream.InterpreterBuilder
_Handle = upstream.TensorHandle

_FLOAT8 = {
    "fp8e5": torch.float8_e5m2,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5b16": torch.float8_e5m2fnuz,
    "fp8e4b8": torch.float8_e4m3fnuz,
}
_NARROW = {"bf16", "fp8e4b15", *_FLOAT8}
_BFLOAT16_NAN = 0x7FC0


def widen(bits: np.ndarray) -> np.ndarray:
    """bfloat16 patterns as float32 values."""
    values: np.ndarray = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values


def narrow(values: np.ndarray) -> np.ndarray:
    """float32 values as bfloat16 patterns, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x0040)
    patterns: np.ndarray = np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)
    return patterns.reshape(np.shape(values))


def _narrow_to_float8(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """float32 values as 8-bit patterns; a value that is too large becomes the largest number, as on a GPU."""
    largest = torch.finfo(dtype).max
    inside = torch.tensor(values, device="cpu").clamp(-largest, largest)
    patterns: np.ndarray = inside.to(dtype).view(torch.uint8).numpy()
    return patterns


def _is_bfloat16(handle: Any) -> bool:
    return isinstance(handle, _Handle) and handle.dtype.scalar.name == "bf16"


def _is_narrow(dtype: Any) -> bool:
    return dtype == tl.bfloat16 or dtype.name in _FLOAT8


def _refuse_float8(op: str, *operands: Any) -> None:
    """Raise if an operand is an 8-bit float, for which no GPU's compiler accepts ``op``."""
    for operand in operands:
        if isinstance(operand, _Handle) and operand.dtype.scalar.name.startswith("fp8"):
            raise _too_narrow(op, operand.dtype.scalar.name, "Triton compiles no such arithmetic, nor comparisons")


def _refuse_number(_: Any, dtype: str, value: float) -> None:
    """Raise for any 8-bit number but 0, as the compiler of Triton 3.6 does; newer versions make no number of 8 bits."""
    raise _too_narrow(f"the number {value}", dtype, "This Triton compiles none of 8 bits but 0")


def _too_narrow(op: str, dtype: str, why: str) -> DTypeError:
    fix = f"{why}: cast to float32 first, x.to(tl.float32)."
    return DTypeError(op, "operand", "a dtype of 16 bits or more", dtype, fix)


def _widened(handle: Any) -> Any:
    """``handle`` in float32 if it holds patterns, else unchanged."""
    if _is_bfloat16(handle):
        return _Handle(widen(handle.data), tl.float32)
    if isinstance(handle, _Handle) and handle.dtype.scalar.name in _FLOAT8:
        patterns = torch.tensor(handle.data, device="cpu").view(_FLOAT8[handle.dtype.scalar.name])
        return _Handle(patterns.float().numpy(), tl.float32)
    return handle


def _narrowed(handle: Any, dtype: Any = tl.bfloat16) -> Any:
    """``handle``, which holds float32, as patterns of ``dtype``."""
    if dtype == tl.bfloat16:
        return _Handle(narrow(handle.data), dtype)
    return _Handle(_narrow_to_float8(handle.data, _FLOAT8[dtype.name]), dtype)


def _truncated(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Floats as integers, as NVIDIA's GPUs convert them (PTX ISA, ``cvt``). A float beyond the integers' range becomes
    the nearest integer; 8-bit integers get the low bits of the result for 16. NaN becomes 0, or, if either type has 64
    bits, the integer with only the highest bit set."""
    bits, kind = max(16, 8 * dtype.itemsize), dtype.kind
    wide = np.dtype(f"{kind}{bits // 8}")
    limits = np.iinfo(wide)
    nothing = 1 << (bits - 1) if 8 in (values.dtype.itemsize, wide.itemsize) else 0
    whole = np.trunc(values.astype(np.float64))
    made = whole.astype(wide)
    made = np.where(whole >= float(limits.max), wide.type(limits.max), made)
    made = np.where(whole <= float(limits.min), wide.type(limits.min), made)
    made = np.where(np.isnan(whole), np.array([nothing], f"u{bits // 8}").view(wide), made)
    return made.astype(dtype)


def _matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """``a @ b`` accumulated in ``dtype``. It uses PyTorch, whose thread count can be set; NumPy's cannot, once loaded.

    Products of 8-bit integers are summed exactly, in float64.
    """
    wide = np.float64 if np.issubdtype(dtype, np.integer) else dtype
    left, right = (torch.from_numpy(np.ascontiguousarray(x, dtype=wide)) for x in (a, b))
    with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
        return torch.matmul(left, right).numpy().astype(dtype, copy=False)


def install() -> None:
    """Put the corrections in place; once per process."""
    _install_casts()
    _install_products()
    _install_memory()
    for name in ("binary_op", "unary_op", "ternary_op"):
        _widen_operands(name)
    upstream.ReduceOps.min_max = _min_max
    for owner, names in ((upstream.ReduceOps, ("sum", "min_max")), (upstream.ScanOps, ("cumsum", "cumprod"))):
        for name in names:
            _widen_reduced(owner, name)


def _install_casts() -> None:
    cast, convert, show = _Builder.cast_impl, _Builder.create_fp_to_fp, _Builder.create_print

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if target.is_int() and target != tl.int1 and source.is_floating():
            return _Handle(_truncated(_widened(src).data, upstream._get_np_dtype(dst_type)), target)
        if source == target or not (_is_narrow(source) or _is_narrow(target)):
            return cast(self, src, dst_type)
        wide = _widened(src)
        if _is_narrow(target):
            return _narrowed(cast(self, wide, tl.float32), target)
        return wide if target == tl.float32 else cast(self, wide, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if rounding_mode == upstream._ir.ROUNDING_MODE.RTZ:
            return _toward_zero(_widened(src), dst_type.scalar)
        if _is_narrow(src.dtype.scalar) or _is_narrow(dst_type.scalar):
            return cast_impl(self, src, dst_type)
        return convert(self, src, dst_type, rounding_mode)

    def get_bf16(self: Any, value: float) -> Any:
        return _narrowed(self.get_fp32(value))

    def create_print(self: Any, prefix: str, hex: bool, values: Any, *signs: Any) -> None:
        show(self, prefix, hex, values if hex else [*map(_widened, values)], *signs)

    _Builder.cast_impl = cast_impl
    _Builder.create_fp_to_fp = create_fp_to_fp
    _Builder.get_bf16 = get_bf16
    for name in _NARROW - {"bf16"}:
        setattr(_Builder, f"get_{name}", partialmethod(_refuse_number, name))
    _Builder.create_print = create_print


def _toward_zero(handle: Any, target: Any) -> Any:
    """``handle`` as float16, bfloat16 or float8e5, rounded toward zero, where Triton's own conversion is wrong for
    small and large numbers."""
    wide = handle.data
    near = narrow(wide) if target == tl.bfloat16 else wide.astype(np.float16).view(np.uint16)
    back = widen(near) if target == tl.bfloat16 else near.view(np.float16).astype(wide.dtype)
    bits = np.where(np.abs(back) > np.abs(wide), near - np.uint16(1), near).astype(np.uint16)
    if target == tl.float8e5:
        return _Handle((bits >> np.uint16(8)).astype(np.uint8), target)
    return _Handle(bits if target == tl.bfloat16 else bits.view(np.float16), target)


def _install_products() -> None:
    dot, fma = _Builder.create_dot, _Builder.create_fma

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any, **named: Any) -> Any:
        if "fp8e4b15" in (a.dtype.scalar.name, b.dtype.scalar.name):  # no such type in NumPy
            return dot(self, a, b, d, *options, **named)
        product = _matmul(_widened(a).data, _widened(b).data, d.data.dtype)
        return _Handle(product + d.data, d.dtype.scalar)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        _refuse_float8("fma", x, y, z)
        if not _is_bfloat16(z):
            return fma(self, x, y, z)
        x, y, z = (_widened(operand).data.astype(np.float64) for operand in (x, y, z))
        return _narrowed(_Handle((x * y + z).astype(np.float32), tl.float32))

    _Builder.create_dot = create_dot
    _Builder.create_fma = create_fma

    if scaled := getattr(upstream, "_mxfp_value_handle_to_float32", None):  # of tl.dot_scaled, by way of float16
        upstream._mxfp_value_handle_to_float32 = lambda handle: (
            widen(handle.data) if _is_bfloat16(handle) else scaled(handle)
        )


def _install_memory() -> None:
    rmw, load = _Builder.create_atomic_rmw, _Builder.create_descriptor_load

    def create_atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if op == upstream._ir.ATOMIC_OP.FADD and val.data.itemsize == 2:
            return _atomic_add_16(self, ptr, val, mask, sem)
        if _is_bfloat16(val):
            raise TypeError("add is the only bfloat16 atomic")
        if op == upstream._ir.ATOMIC_OP.XCHG and val.data.dtype.kind == "f":
            bits = _Handle(val.data.view(f"u{val.data.itemsize}"), val.dtype)
            old = rmw(self, op, ptr, bits, mask, sem, scope)
            return _Handle(old.data.view(val.data.dtype), val.dtype.scalar)
        return rmw(self, op, ptr, val, mask, sem, scope)

    def create_descriptor_load(self: Any, desc: Any, indices: Any, *options: Any, **named: Any) -> Any:
        loaded = load(self, desc, indices, *options, **named)
        if desc.padding == upstream._ir.PADDING_OPTION.PAD_NAN and _is_bfloat16(loaded):
            inside = np.asarray(desc.materialize_pointers(indices)[1].data)
            loaded = _Handle(np.where(inside, loaded.data, np.uint16(_BFLOAT16_NAN)), tl.bfloat16)
        return loaded

    _Builder.create_atomic_rmw = create_atomic_rmw
    _Builder.create_descriptor_load = create_descriptor_load


def _widen_operands(name: str) -> None:
    original = getattr(_Builder, name)

    def operate(self: Any, *operands_and_op: Any) -> Any:
        *operands, op = operands_and_op
        if op is np.where or not any(operand.dtype.scalar.name in _NARROW for operand in operands):
            return original(self, *operands, op)
        _refuse_float8(op.__name__, *operands)
        result = original(self, *map(_widened, operands), op)
        return _Handle(result.data, tl.int1) if result.data.dtype == np.bool_ else _narrowed(result)

    setattr(_Builder, name, operate)


def _min_max(self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
    """Replaces Triton's version, which warns of a row of NaNs, or fails at it."""
    data, options, found = input.handle.data, {"axis": self.axis, "keepdims": self.keep_dims}, []
    least = "min" in (val_reduce_op or idx_reduce_op).__name__
    if val_reduce_op:
        found.append(self.to_tensor((np.fmin if least else np.fmax).reduce(data, **options), input.dtype))
    if idx_reduce_op:
        known = np.where(np.isnan(data), np.inf if least else -np.inf, data) if data.dtype.kind == "f" else data
        found.append(self.to_tensor((np.argmin if least else np.argmax)(known, **options), tl.int32))
    return tuple(found) if len(found) > 1 else found[0]


def _widen_reduced(owner: Any, name: str) -> None:
    """Replace a reduction or scan that Triton computes with NumPy; those with a user's function use the builder."""
    original, cast = getattr(owner, name), upstream.interpreter_builder.cast_impl

    def narrowed(result: Any, dtype: Any) -> Any:
        if isinstance(result, (list, tuple)):
            return type(result)(narrowed(one, dtype) for one in result)
        if result.dtype != tl.float32:  # an index
            return result
        return tl.tensor(cast(result.handle, dtype), result.type.with_element_ty(dtype))

    def reduce(self: Any, input: Any, *options: Any, **named: Any) -> Any:
        _refuse_float8(name, input.handle)
        dtype = input.handle.dtype.scalar
        if dtype not in (tl.bfloat16, tl.float16):
            return original(self, input, *options, **named)
        wide = tl.tensor(cast(input.handle, tl.float32), input.type.with_element_ty(tl.float32))
        return narrowed(original(self, wide, *options, **named), dtype)

    setattr(owner, name, reduce)


def _atomic_add_16(self: Any, ptr: Any, val: Any, mask: Any, sem: Any) -> Any:
    """Add by a loop of compare-and-swaps for each element, on the 32-bit word that holds it. Triton adds float16 under
    a lock of this process, which other ranks do not see, and bfloat16 not at all."""
    pointers, values, active = np.broadcast_arrays(ptr.data, _widened(val).data.astype(np.float32), mask.data)
    old = np.zeros(pointers.shape, dtype=np.uint16)
    order = self.ir_sem_to_interpreter_sem[sem]
    word_mask = np.ones(1, dtype=bool)

    def handle(patterns: np.ndarray) -> Any:
        return _Handle(patterns.view(val.data.dtype), val.dtype.scalar)

    for index in np.ndindex(pointers.shape):
        if not active[index]:
            continue
        address = int(pointers[index])
        word = np.array([address & ~3], dtype=np.uint64)
        shift = np.uint32(16 if address & 2 else 0)
        while True:
            seen = upstream._interpreter.load(word, word_mask, np.zeros(1, np.uint32), np.dtype(np.uint32))
            half = (seen >> shift).astype(np.uint16)
            total = _widened(handle(half)).data.astype(np.float32) + values[index]
            new = (narrow(total) if _is_bfloat16(val) else total.astype(np.float16)).view(np.uint16)
            merged = (seen & ~(np.uint32(0xFFFF) << shift)) | (new.astype(np.uint32) << shift)
            if upstream._interpreter.atomic_cas(word, seen, merged, order)[0] == seen[0]:
                old[index] = half[0]
                break
    return handle(old)
