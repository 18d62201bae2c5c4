"""Caches for Triton's interpreter, which works out the same things again for every number that a kernel touches: types,
how operands are converted to match, masks of accesses without one. With these caches simulated ops take less than half
the time."""

from __future__ import annotations

import ast
import functools
import inspect
import math
from collections.abc import Callable, Set
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as upstream

from iris.backends.indices import Index
from iris.backends.language import refuse_variables
from iris.backends.memory import everywhere

_ALIKE = frozenset({"int32", "int64", "fp16", "fp32", "fp64"})
"""Types of operands with which a 32-bit loop variable gives the same result as a constant."""
_MOST_CONSTANTS = 4096
"""The largest number of converted constants that are remembered at a time; each is a view of a single number."""
_NATIVE = frozenset(
    {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)} | {"fp16", "fp32", "fp64"}
)
"""Types that NumPy has, too."""
_SIGNED = frozenset({"int32", "int64"})
"""Types in which a constant of 32 bits stays as it is."""
_BITWISE = {"__and__": np.bitwise_and, "__or__": np.bitwise_or, "__xor__": np.bitwise_xor}
OPERATORS = {
    "__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply, "__lt__": np.less, "__le__": np.less_equal,
    "__gt__": np.greater, "__ge__": np.greater_equal, "__eq__": np.equal, "__ne__": np.not_equal, **_BITWISE,
}  # fmt: skip
_results: dict[tuple[str, str, str], Any] = {}
"""The types of what operators yield where NumPy's function yields the same, by operator and types of operands."""


def install() -> None:
    """Put the caches in place; once per process."""
    _remember_shapes()
    _remember_block_types()
    _remember_numpy_types()
    _remember_promotions()
    _remember_agreements()
    _remember_scalars()
    _operate_on_what_fits(_remember_sizes())
    _remember_pointed_sizes()
    _remember_masks()
    _read_sources_once()
    _unwrap_what_is_wrapped()
    _compare_by_identity_first()


def _remember_shapes() -> None:
    """Remember the shapes of tensors in Triton's form, in which each size is a constant."""
    known: dict[str, tuple[Any, Any]] = {}

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            shape = tuple(type.shape) if type.is_block() else ()
            known[type.name] = tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[type.name]

    tl.tensor.__init__ = init_tensor


def _remember_block_types() -> None:
    original: Callable[[Any, Any, Any], None] = tl.block_type.__init__
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *shape, *map(type, shape)
        try:
            fields = known.get(key)
        except TypeError:  # a size is no number
            fields = None
        if fields is None:
            original(self, element_ty, shape)
            known[key] = dict(vars(self))
        else:
            vars(self).update(fields, element_ty=element_ty, scalar=element_ty)

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


def _remember_agreements() -> None:
    """Remember how the operands of ``+``, ``<``, loads and the like are converted to match, and the result for an
    integer as the second operand. This depends only on types, and for an integer on its value."""
    for name in ("binary_op_type_checking_impl", "broadcast_impl_value"):
        setattr(TritonSemantic, name, _agreeing(getattr(TritonSemantic, name)))


def _agreeing(original: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """``original``, which converts two operands so that they match, with a cache of the conversions."""
    changes: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    constants: dict[tuple[Any, ...], Any] = {}

    def agree(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> tuple[Any, Any]:
        if isinstance(rhs, Index) and not (type(lhs) is tl.tensor and type(rhs) is Index and lhs.dtype.name in _ALIKE):
            rhs = rhs.tensor()
        if isinstance(lhs, Index):
            lhs = lhs.tensor()
        if type(lhs) is not tl.tensor or type(rhs) not in (tl.tensor, int, Index):
            return original(self, lhs, rhs, *options, **named)
        if type(rhs) is not tl.tensor:
            key = lhs.type.name, rhs, options, *named.items()
            if key in constants:
                return lhs, constants[key]
            left, right = original(self, lhs, rhs, *options, **named)
            if left is lhs:
                if len(constants) == _MOST_CONSTANTS:
                    constants.clear()
                constants[key] = right
            return left, right
        key = lhs.type.name, rhs.type.name, options, *named.items()
        if key in changes:
            left, right = changes[key]
            return lhs if left is None else left(self, lhs), rhs if right is None else right(self, rhs)
        left, right = original(self, lhs, rhs, *options, **named)
        if _ranks_agree(lhs, left) and _ranks_agree(rhs, right):
            changes[key] = _change(lhs, left), _change(rhs, right)
        return left, right

    return agree


def _ranks_agree(operand: Any, result: Any) -> bool:
    return not operand.type.is_block() or len(operand.shape) == len(result.shape)


def _change(operand: Any, result: Any) -> Callable[[Any, Any], Any] | None:
    """The conversion from such an ``operand`` to such a ``result``: first the dtype, then the shape, as in Triton. None
    if there is nothing to convert."""
    if result is operand:
        return None
    dtype = None if operand.dtype.name == result.dtype.name else result.dtype
    type = None if operand.shape == result.shape else result.type
    block = operand.type.is_block()

    def change(semantic: Any, operand: Any) -> Any:
        if dtype is not None:
            operand = semantic.cast(operand, dtype)
        if type is None:
            return operand
        builder = semantic.builder
        spread = (
            builder.create_broadcast(operand.handle, type.shape)
            if block
            else builder.create_splat(type, operand.handle)
        )
        return tl.tensor(spread, type)

    return change


def _remember_scalars() -> None:
    """Remember the scalar type of each type."""
    for kind, found in (tl.dtype, lambda self: self), (tl.block_type, lambda self: self.element_ty):
        kind.scalar = functools.cached_property(found)
        kind.scalar.__set_name__(kind, "scalar")


def _remember_sizes() -> set[tuple[int, str]]:
    """Remember which NumPy item sizes fit which type. Returns the set of those known so far."""
    check: Callable[[Any], None] = upstream.TensorHandle.__post_init__
    fitting: set[tuple[int, str]] = set()

    def init_handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        key = data.itemsize, dtype.name
        if key not in fitting:
            check(self)
            fitting.add(key)

    upstream.TensorHandle.__init__ = init_handle
    return fitting


def _operate_on_what_fits(fitting: Set[tuple[int, str]]) -> None:
    """Take NumPy's result of an operation as it is if NumPy has both types, and the result fits the type."""
    builder, handle = upstream.InterpreterBuilder, upstream.TensorHandle
    original: Callable[..., Any] = builder.binary_op
    arithmetic = {np.add, np.subtract, np.multiply}

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        dtype = lhs.dtype
        if dtype.name in _NATIVE and rhs.dtype.name in _NATIVE:
            result = op(lhs.data, rhs.data)
            if result.dtype.kind == "b":
                return handle(result, tl.int1)
            if (result.itemsize, dtype.name) in fitting:
                return handle(result, dtype)
        elif op in arithmetic and lhs.data.dtype == rhs.data.dtype == np.bool_:  # 1-bit sums, which older Triton lacks
            return handle((op(lhs.data.view(np.int8), rhs.data.view(np.int8)) & 1).astype(np.bool_), tl.int1)
        return original(self, lhs, rhs, op)

    builder.binary_op = binary_op


def at_once(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, the operator ``name`` of a tensor. For operands of types that it has had before it is one of
    NumPy's functions, if that yields the same: for operands of one dtype, constants, and offsets of pointers."""
    compute, handle = OPERATORS.get(name), upstream.TensorHandle
    if compute is None or upstream.interpreter_builder.options.sanitize_overflow:
        return original

    def operate(self: Any, other: Any) -> Any:
        if type(other) is tl.tensor:
            kind, operand = other.type.name, other.handle.data
        elif type(other) is int and self.dtype.name in _SIGNED and -(1 << 31) <= other < 1 << 31:
            kind, operand = "int", other
        else:
            return original(self, other)
        result = _results.get((name, self.type.name, kind))
        if result is None:
            made = original(self, other)
            if type(other) is int or _same_in_numpy(name, self, other, made):
                _results[name, self.type.name, kind] = made.type
            return made
        if result.scalar.is_ptr():
            return tl.tensor(upstream.interpreter_builder.create_addptr(self.handle, other.handle), result)
        return tl.tensor(handle(compute(self.handle.data, operand), result.scalar), result)

    return operate


def _same_in_numpy(name: str, left: Any, right: Any, result: Any) -> bool:
    """Whether NumPy yields for operands of these types, as they are, what the operator ``name`` has yielded."""
    mine, theirs = left.dtype, right.dtype
    moves = name == "__add__" and mine.is_ptr() and theirs.name in _SIGNED
    if not moves and (mine.name != theirs.name or not (mine.name in _NATIVE or (mine.is_int1() and name in _BITWISE))):
        return False
    shapes = (one.handle.data.shape for one in (left, right))
    return bool(np.broadcast_shapes(*shapes) == result.handle.data.shape)


def _remember_pointed_sizes() -> None:
    """Remember the size of what pointers point to."""
    builder, handle = upstream.InterpreterBuilder, upstream.TensorHandle
    known: dict[str, int] = {}

    def create_addptr(self: Any, ptr: Any, offset: Any) -> Any:
        name = ptr.dtype.name
        if name not in known:
            known[name] = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        return handle(ptr.data + known[name] * offset.data.astype(np.uint64), ptr.dtype)

    builder.create_addptr = create_addptr


def _remember_masks() -> None:
    """Remember the masks of accesses without one, and the zeros of masked loads without ``other``."""
    builder, handle = upstream.InterpreterBuilder, upstream.TensorHandle
    load: Callable[..., Any] = builder.create_masked_load

    @functools.cache
    def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
        block = np.zeros(shape, upstream._get_np_dtype(dtype))
        block.flags.writeable = False
        return handle(block, dtype)

    @functools.cache
    def mask(shape: tuple[int, ...]) -> Any:
        return handle(everywhere(shape), tl.int1)

    def create_load(self: Any, ptr: Any, *options: Any) -> Any:
        return self.create_masked_load(ptr, mask(ptr.data.shape), None, *options)

    def create_store(self: Any, ptr: Any, value: Any, *options: Any) -> Any:
        return self.create_masked_store(ptr, value, mask(ptr.data.shape), *options)

    def create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *options: Any, **named: Any) -> Any:
        if other is None:
            other = zeros(ptrs.data.shape, ptrs.get_element_ty())
        return load(self, ptrs, mask, other, *options, **named)

    builder.create_load, builder.create_store = create_load, create_store
    builder.create_masked_load = create_masked_load


def _read_sources_once() -> None:
    """Read the source of a function once when it is rewritten for the interpreter: Triton reads it twice."""
    rewriter = upstream.FunctionRewriter

    def rewrite_ast(self: Any) -> Any:
        try:
            lines, first = inspect.getsourcelines(self.fn)
        except (OSError, TypeError):  # a function without source
            return self.fn
        self.filename = self.fn.__code__.co_filename
        at = next(at for at, line in enumerate(lines) if line.strip().startswith("def "))
        self.def_file_lineno, self.def_lineno = first + at, at + 1
        made = _as_defined(self.fn, self._transform_ast(self._prepare_source(lines)), self._compile_and_exec)
        made.do_not_specialize = self.kwargs.get("do_not_specialize") or ()
        return made

    rewriter.rewrite_ast = rewrite_ast


def _as_defined(fn: Any, tree: Any, execute: Callable[[Any], Any]) -> Any:
    """The function of ``tree``, the rewritten ``fn``, with the defaults and annotations of ``fn``. They are not
    evaluated again, since their names may be unknown where the new function is made, or mean something unknown to
    Triton."""
    arguments = tree.body[0].args
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [one and ast.Constant(None) for one in arguments.kw_defaults]
    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        one.annotation = None
    made = _with_variables_of(fn, ast.fix_missing_locations(refuse_variables(fn, tree)), execute)
    made.__defaults__, made.__kwdefaults__ = fn.__defaults__, fn.__kwdefaults__
    made.__annotations__ = fn.__annotations__
    return made


def _with_variables_of(fn: Any, tree: Any, execute: Callable[[Any], Any]) -> Any:
    """The function that ``execute`` makes of ``tree``, the rewritten ``fn``, with access to the variables of enclosing
    functions, which Triton's interpreter does not give it."""
    names = fn.__code__.co_freevars
    if not names:
        return execute(tree)
    (inner,) = tree.body
    around = ast.parse(f"def {inner.name}({', '.join(names)}):\n    return {inner.name}")
    around.body[0].body.insert(0, inner)  # type: ignore[attr-defined]
    made = execute(ast.fix_missing_locations(around))(*names)
    cells = dict(zip(names, fn.__closure__, strict=True))
    closure = tuple(
        cells.get(name, cell) for name, cell in zip(made.__code__.co_freevars, made.__closure__ or (), strict=True)
    )
    return FunctionType(made.__code__, made.__globals__, made.__name__, None, closure)


def _unwrap_what_is_wrapped() -> None:
    """Skip the search for a constant in values of types that hold none, which most values are."""
    original: Callable[[Any], Any] = tl.core._unwrap_if_constexpr
    plain = {tl.tensor, int, float, bool, str, type(None)}

    def unwrap_if_constexpr(value: Any) -> Any:
        return value if type(value) in plain else original(value)

    tl.core._unwrap_if_constexpr = unwrap_if_constexpr


def _compare_by_identity_first() -> None:
    """Compare types by identity first: except after unpickling, each type of numbers exists only once."""
    original: Callable[[Any, Any], bool] = tl.dtype.__eq__
    tl.dtype.__eq__ = lambda self, other: self is other or original(self, other)
