"""Corrections where Triton's interpreter leaves to Python, or does not do at all, what the compiler does.

* **Truth.** ``and``, ``or`` and ``not`` of tensors are ``&``, ``|`` and ``~`` of each element, whichever operand comes
  first; ``min`` and ``max`` are taken element by element, too. A block is neither true nor false.
* **Conditions.** A single truth value that is spread over a block is a mask like any other.
* **Constants.** ``N.value`` of a constexpr argument is its value, as in compiled kernels, although here ``N`` itself is
  the value. A ``tl.constexpr`` in an operation with a tensor is its value.
* **Loops.** A loop variable is a number of 32 or 64 bits (:mod:`iris.backends.indices`).
* **Assignments.** Numbers in a tuple that is assigned become tensors, as a number that is assigned alone does.
* **Choices.** A number that a condition known only when the kernel runs has chosen, by ``x if c else y`` or as one of a
  function's results, is a tensor.
* **Assertions.** ``assert`` and ``tl.device_assert`` are checked for each element, whether ``debug`` is set or not.
* **Axes.** A reduction or scan with a user's function takes negative axes, which count from the last one.
* **Libraries.** Functions of ``libdevice`` are computed by PyTorch if it has them.
* **Refusals.** An error says what cannot be simulated. ``break``, ``continue``, ``return`` in a loop, ``raise``,
  ``try``, ``del``, ``import``, ``match``, loops over what is no call, ``else`` behind a loop, bounds and steps of
  ``range`` that compile to something else, ``static_assert``, ``static_range`` and elements of tuples by what is not
  known when the kernel is compiled, and reading variables outside the kernel that are no ``tl.constexpr`` raise errors
  that say that they cannot be compiled. The variable of a loop over a range is unset behind the loop.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import cuda, hip, libdevice
from triton.runtime import interpreter as upstream

from iris.backends.indices import Index, Truth, indices

_Builder = upstream.InterpreterBuilder
_Handle = upstream.TensorHandle

_SAME_NAME = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "copysign", "cos", "cosh", "erf", "erfc",
    "erfinv", "exp", "exp2", "expm1", "floor", "fmax", "fmin", "fmod", "hypot", "lgamma", "log", "log10", "log1p",
    "log2", "nextafter", "pow", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
_OTHER_NAME = {
    "abs": "abs", "fabs": "abs", "rint": "round", "nearbyint": "round", "sqrt_rn": "sqrt", "add_rn": "add",
    "mul_rn": "mul", "div_rn": "div", "fast_expf": "exp", "fast_logf": "log",
    "fast_sinf": "sin", "fast_cosf": "cos", "fast_tanf": "tan", "fast_tanhf": "tanh", "fast_powf": "pow",
    "fast_log2f": "log2", "fast_log10f": "log10", "fast_dividef": "div",
}  # fmt: skip
_PREDICATES = {"isnan": "isnan", "isinf": "isinf", "finitef": "isfinite", "isfinited": "isfinite"}
"""Functions whose result is true or false."""
_PLAIN = {bool, int, float, str, bytes, tuple, list, dict, set, type(None)}
"""Types of variables outside a kernel that it may not read."""
_COMPILED = {builtins.min: tl.core.builtin_min, builtins.max: tl.core.builtin_max}
"""Triton's functions that the compiler takes in place of Python's."""
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
_COMPARISONS = {"__gt__": "__lt__", "__ge__": "__le__", "__eq__": "__eq__", "__ne__": "__ne__"}
_STATIC_RANGE = tl.static_range
"""Of the compiler, as Triton redirects the attribute of its module only."""
_ELSE_END = "let the condition of a while loop, or a mask, say what is still to be done"
"""What to do where a loop cannot be left."""
_UNCOMPILED = {
    ast.Break: ("break", _ELSE_END),
    ast.Continue: ("continue", _ELSE_END),
    ast.Raise: ("raise", "take assert, or tl.device_assert"),
    ast.Try: ("try", "let conditions say what to do"),
    ast.Delete: ("del", "leave it out"),
    ast.Import: ("import", "put it in front of the kernel"),
    ast.ImportFrom: ("import", "put it in front of the kernel"),
    ast.Match: ("match", "take if"),
}
"""Statements that the compiler does not take at all, by their names, and what to do instead."""
_DECIDED = "_iris_decided"
"""The variable of a function that holds the conditions which have decided about its result."""
_NUMBERS = (tl.tensor, Index)
"""Types of what is known only when the kernel runs."""
_FLOATS = (tl.float32, tl.float64)
"""The dtypes that functions of ``libdevice`` accept."""


def install() -> None:
    """Put the changes in place; once per process."""
    upstream.FunctionRewriter.ast_transformer = _Rewriter()
    # Names that the rewritten code uses:
    upstream._unwrap_if_constexpr = tl.core._unwrap_if_constexpr
    upstream._iris_logical, upstream._iris_not = _logical, _not
    upstream._iris_condition, upstream._iris_call = _condition, _call
    upstream._iris_indices, upstream._iris_unrolled, upstream._iris_assigned = indices, _unrolled, _assigned
    upstream._iris_refused, upstream._iris_variable = _refused_statement, _refused_variable
    upstream._iris_place, upstream._iris_assert = _place, _assert
    upstream._iris_choice, upstream._iris_returned = _choice, _returned
    _install_constants()
    _install_axes()
    semantic = type(upstream.interpreter_semantic)
    semantic.to_tensor = _with_indices(semantic.to_tensor)
    semantic.device_assert = _device_assert
    _install_masks()
    _install_libraries()
    _Builder.create_descriptor_reduce = _descriptor_reduce
    _Builder.__getattr__ = _missing


class _Rewriter(upstream.ASTTransformer):  # type: ignore[misc]
    """Rewrites the parts of a kernel to which Python gives another meaning than the compiler."""

    _constants: frozenset[str] = frozenset()
    _loops = 0
    """The number of loops around the visited statement, without unrolled ones."""
    _several_results = False
    """Whether the function returns one value here and another there."""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.stmt) and (told := _UNCOMPILED.get(type(node))) is not None:
            return self._refused(node, *told)
        return super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:  # noqa: N802
        annotated = [one for one in ast.walk(node) if isinstance(one, ast.arg | ast.AnnAssign)]
        self._constants = frozenset(
            one.arg if isinstance(one, ast.arg) else ast.unparse(one.target)
            for one in annotated
            if one.annotation and ast.unparse(one.annotation).strip("'\"").endswith("constexpr")
        )
        results = {ast.dump(one.value) for one in ast.walk(node) if isinstance(one, ast.Return) and one.value}
        self._several_results = len(results) > 1
        self.generic_visit(node)
        if self._several_results:
            begin = ast.Assign([ast.Name(_DECIDED, ast.Store())], ast.List([], ast.Load()))
            node.body.insert(0, ast.fix_missing_locations(ast.copy_location(begin, node.body[0])))
        return node

    def visit_Attribute(self, node: ast.Attribute) -> Any:  # noqa: N802
        owner = node.value
        if node.attr != "value" or not isinstance(owner, ast.Name) or owner.id not in self._constants:
            return self.generic_visit(node)
        return _calling(node, "_unwrap_if_constexpr", owner)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:  # noqa: N802
        self.generic_visit(node)
        return _calling(node, "_iris_logical", ast.Constant(isinstance(node.op, ast.And)), *map(_later, node.values))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:  # noqa: N802
        self.generic_visit(node)
        return _calling(node, "_iris_not", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_For(self, node: ast.For) -> Any:  # noqa: N802
        called = _last_name(node.iter.func) if isinstance(node.iter, ast.Call) else ""
        self._visit_loop(node, unrolled=called == "static_range")
        loop = node.iter
        if not isinstance(loop, ast.Call):
            return self._refused(node, "for over anything but range or static_range", "loop over places in it")
        if node.orelse and called == "range":
            return self._refused(node, "else behind for", "put it behind the loop")
        if called in ("range", "static_range"):
            made = "_iris_indices" if called == "range" else "_iris_unrolled"
            node.iter = _calling(loop, made, loop.func, *loop.args, keywords=loop.keywords)
        if called == "range" and isinstance(node.target, ast.Name):
            return [node, *_forgotten(node.target.id, node)]
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:  # noqa: N802
        if not isinstance(node.target, ast.Name):
            return self.generic_visit(node)
        value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return self.visit(ast.fix_missing_locations(ast.copy_location(ast.Assign([node.target], value), node)))

    def visit_Subscript(self, node: ast.Subscript) -> Any:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load) and not isinstance(node.slice, ast.Slice | ast.Tuple | ast.Constant):
            node.slice = _calling(node.slice, "_iris_place", node.slice)
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:  # noqa: N802
        self.generic_visit(node)
        if len(node.targets) > 1:
            raise ValueError("Multiple assignments are not supported")
        if isinstance(node.value, ast.Tuple):
            node.value.elts = [
                one if isinstance(one, ast.Starred) else _calling(one, "_iris_assigned", one) for one in node.value.elts
            ]
        else:
            node.value = _calling(node.value, "_iris_assigned", node.value)
        return node

    def visit_While(self, node: ast.While) -> Any:  # noqa: N802
        if node.orelse:
            return self._refused(node, "else behind while", "put it behind the loop")
        self._visit_loop(node)
        node.test = _calling(node.test, "_iris_condition", node.test)
        return node

    def _visit_loop(self, node: ast.For | ast.While, unrolled: bool = False) -> None:
        self._loops += not unrolled
        self.generic_visit(node)
        self._loops -= not unrolled

    def visit_Return(self, node: ast.Return) -> Any:  # noqa: N802
        self.generic_visit(node)
        if self._loops:
            return self._refused(node, "return in a loop", _ELSE_END)
        if self._several_results and node.value is not None:
            node.value = _calling(node.value, "_iris_returned", node.value, ast.Name(_DECIDED, ast.Load()))
        return node

    def _refused(self, node: ast.stmt, what: str, fix: str) -> ast.stmt:
        return ast.copy_location(ast.Expr(_calling(node, "_iris_refused", ast.Constant(what), ast.Constant(fix))), node)

    def visit_If(self, node: ast.If) -> Any:  # noqa: N802
        returns = self._several_results and any(isinstance(one, ast.Return) for one in ast.walk(node))
        self.generic_visit(node)
        decided = [ast.Name(_DECIDED, ast.Load())] if returns else []
        node.test = _calling(node.test, "_iris_condition", node.test, *decided)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> Any:  # noqa: N802
        self.generic_visit(node)
        return _calling(node, "_iris_choice", node.test, _later(node.body), _later(node.orelse))

    def visit_Assert(self, node: ast.Assert) -> Any:  # noqa: N802
        self.generic_visit(node)
        checked = _calling(node, "_iris_assert", node.test, node.msg or ast.Constant(""))
        return ast.copy_location(ast.Expr(checked), node)

    def visit_Call(self, node: ast.Call) -> Any:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            return _calling(node, "_iris_call", node.func, *node.args, keywords=node.keywords)
        return node


def _calling(node: ast.AST, name: str, *arguments: ast.expr, keywords: Sequence[ast.keyword] = ()) -> ast.expr:
    """A call of ``name``, to be put in the place of ``node``."""
    return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), [*arguments], [*keywords]), node)


def _later(value: ast.expr) -> ast.expr:
    """A function that computes ``value``."""
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.copy_location(ast.Lambda(nothing, value), value)


def _forgotten(name: str, node: ast.For) -> list[ast.stmt]:
    """Statements behind a loop that leave its variable ``name`` unset: compiled, it holds anything there."""
    made = [ast.Assign([ast.Name(name, ast.Store())], ast.Constant(None)), ast.Delete([ast.Name(name, ast.Del())])]
    return [ast.fix_missing_locations(ast.copy_location(one, node)) for one in made]


def _unrolled(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The iterable of a loop over ``function(…)``, which is ``static_range``, or a function of the kernel's own."""
    if function not in (tl.static_range, _STATIC_RANGE):
        return function(*arguments, **options)
    if any(isinstance(one, _NUMBERS) for one in (*arguments, *options.values())):
        raise ValueError("static_range: expected numbers that are known when the kernel is compiled; else take range")
    return tl.static_range(*arguments, **options)  # of the interpreter, also if imported by name


def _place(value: Any) -> Any:
    """``value``, the index of an element of a tuple or shape."""
    if isinstance(value, _NUMBERS):
        raise ValueError(
            "the index of a tuple's element must be known when the kernel is compiled: loop by tl.static_range, or "
            "compare with it in an if for each element."
        )
    return value


def _last_name(function: ast.expr) -> str:
    """``range`` of ``range`` and of ``tl.range``."""
    return getattr(function, "attr", getattr(function, "id", ""))


def _assigned(value: Any) -> Any:
    """The value of a name after ``value`` is assigned to it: numbers become tensors."""
    if isinstance(value, tuple):
        return upstream._tuple_create(value, map(_assigned, value))
    return upstream.interpreter_semantic.to_tensor(value, False)


def refuse_variables(fn: Callable[..., Any], tree: ast.Module) -> ast.Module:
    """Make ``tree``, the rewritten ``fn``, raise when it reads a variable that the compiler does not accept as a
    constant: a number, text or the like of the surrounding module or function (Triton's
    ``CodeGenerator.global_lookup``). Returns the new tree."""
    if triton.knobs.compilation.allow_non_constexpr_globals:
        return tree
    read, own = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else own).add(node.id)
    around: dict[str, Any] = {name: fn.__globals__[name] for name in read if name in fn.__globals__}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not set yet, such as the function's own name
            around[name] = cell.cell_contents
    plain = {name for name in around.keys() - own if type(around[name]) in _PLAIN}
    return _Variables(plain).visit(tree) if plain else tree


class _Variables(ast.NodeTransformer):
    def __init__(self, plain: Set[str]) -> None:
        self.plain = plain

    def visit_Name(self, node: ast.Name) -> Any:
        return _calling(node, "_iris_variable", ast.Constant(node.id)) if node.id in self.plain else node


def _refused_variable(name: str) -> Any:
    raise NameError(
        f"{name} is a variable of the module or function around the kernel, and no constant: the compiler takes only "
        f"{name} = tl.constexpr(…), or an argument."
    )


def _refused_statement(what: str, fix: str) -> Any:
    raise NotImplementedError(f"{what} cannot be compiled: {fix}.")


def _logical(both: bool, *operands: Callable[[], Any]) -> Any:
    """``and`` (``both``) or ``or`` as the compiler has it: a constant may decide at once, and all tensors are
    computed."""
    value, tensors = None, []
    for operand in operands:
        value = operand()
        if isinstance(value, tl.tensor):
            tensors.append(value)
        elif bool(value) != both:
            return value
    semantic = upstream.interpreter_semantic
    combine = semantic.logical_and if both else semantic.logical_or
    return functools.reduce(combine, tensors) if tensors else value


def _not(value: Any) -> Any:
    if isinstance(value, tl.tensor):
        return upstream.interpreter_semantic.not_(value)
    return Truth(not value) if isinstance(value, Index) else not value


def _condition(value: Any, decided: list[Any] | None = None) -> Any:
    """``value``, the condition of an ``if`` or ``while``, unless it is a block: the interpreter takes all blocks for
    true. ``decided`` takes note of one that is known only when the kernel runs."""
    if isinstance(value, tl.tensor) and value.handle.data.size != 1:
        raise ValueError(
            "a block is neither true nor false, so no condition for if or while. Use a mask, tl.where, or tl.max of it."
        )
    if decided is not None and isinstance(value, _NUMBERS):
        decided.append(value)
    return value


def _choice(condition: Any, one: Callable[[], Any], other: Callable[[], Any]) -> Any:
    """``one() if condition else other()``."""
    chosen = one() if _condition(condition) else other()
    return _assigned(chosen) if isinstance(condition, _NUMBERS) else chosen


def _returned(value: Any, decided: list[Any]) -> Any:
    """One of several results of a function; the conditions in ``decided`` have led there."""
    return _assigned(value) if decided else value


def _assert(condition: Any, message: Any) -> None:
    """``assert condition, message``."""
    if isinstance(condition, tl.tensor):
        upstream.interpreter_semantic.device_assert(condition, message)
    else:
        assert condition, message


def _call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """A call of ``min`` or ``max``: Triton's if the name is Python's function and an operand is a tensor."""
    if function in _COMPILED and any(isinstance(one, tl.tensor) for one in arguments):
        return _COMPILED[function](*arguments, _semantic=upstream.interpreter_semantic, **options)
    return function(*arguments, **options)


def _install_constants() -> None:
    """Make operations of a ``tl.constexpr`` and a tensor, or loop variable, yield what two of these yield; in Python
    they would yield a constexpr."""
    sides = {f"__{name}__": f"__r{name}__" for name in _ARITHMETIC} | _COMPARISONS
    for name, swapped in (sides | {theirs: mine for mine, theirs in sides.items()}).items():
        if hasattr(tl.constexpr, name):
            setattr(tl.constexpr, name, _beside_tensors(name, swapped))


def _beside_tensors(name: str, swapped: str) -> Callable[[Any, Any], Any]:
    original = getattr(tl.constexpr, name)

    def operate(self: Any, other: Any) -> Any:
        if isinstance(self.value, _NUMBERS):
            return getattr(self.value, name)(other)
        return getattr(other, swapped)(self.value) if isinstance(other, _NUMBERS) else original(self, other)

    return operate


def _with_indices(to_tensor: Callable[..., Any]) -> Callable[..., Any]:
    """``to_tensor``, for which a loop variable is no constant."""

    def replacement(self: Any, value: Any, *options: Any, **named: Any) -> Any:
        return value.tensor() if isinstance(value, Index) else to_tensor(self, value, *options, **named)

    return replacement


def _install_masks() -> None:
    """Correct the dtype of spread truth values: the interpreter gives the result of a comparison the dtype of its
    operands. Also spread numbers faster: the interpreter fills a block where a view of one number suffices, and makes
    views by a NumPy function that takes several times as long."""
    broadcast = _Builder.create_broadcast

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        number = arg.data.reshape(-1)[:1]
        dtype = tl.int1 if number.dtype == np.bool_ else arg.dtype.scalar
        return _Handle(_view(number, ret_ty.shape, (0,) * len(ret_ty.shape)), dtype)

    def create_broadcast(self: Any, arg: Any, shape: Any) -> Any:
        data = arg.data
        if not data.flags.c_contiguous or data.ndim != len(shape):
            return broadcast(self, arg, shape)
        strides = tuple(
            stride if size == wanted else 0
            for size, wanted, stride in zip(data.shape, shape, data.strides, strict=True)
        )
        return _Handle(_view(data, tuple(shape), strides), arg.dtype.scalar)

    _Builder.create_splat, _Builder.create_broadcast = create_splat, create_broadcast


def _view(numbers: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    view: np.ndarray = np.ndarray(shape, numbers.dtype, numbers, strides=strides)
    view.flags.writeable = False
    return view


def _device_assert(self: Any, condition: Any, message: str, mask: Any = None) -> None:
    """Check in any case, as ``assert`` does. Compiled kernels check both only if ``debug`` is set."""
    if mask is not None:
        condition = self.or_(condition, self.not_(mask))
    self.builder.create_assert(condition.handle, message)


def static_assert(condition: Any, message: str = "") -> None:
    """Replaces the interpreter's, which takes what is known only when the kernel runs, too."""
    if isinstance(condition, _NUMBERS):
        raise ValueError(
            "static_assert: expected what is known when the kernel is compiled; else take tl.device_assert"
        )
    assert condition, message


def _install_axes() -> None:
    """Make negative axes work, and reductions of several operands without an axis. The interpreter uses a negative axis
    as an index, and without an axis it flattens only the first operand."""
    check = upstream.ReduceScanOpInterface.check_tensor

    def check_tensor(self: Any, operands: Any) -> None:
        check(self, operands)
        if self.axis is not None and self.axis < 0:
            self.axis += len(operands[0].shape)

    def unravel(self: Any, operands: Any, axis: int | None) -> tuple[tuple[Any, ...], int]:
        if axis is not None:
            return tuple(operands), axis
        return tuple(self.to_tensor(one.handle.data.flatten(), one.dtype) for one in operands), 0

    upstream.ReduceScanOpInterface.check_tensor = check_tensor
    upstream.ReduceOps.unravel = unravel


def _descriptor_reduce(self: Any, kind: Any, desc: Any, value: Any, indices: Any) -> None:
    """The atomics of tensor descriptors, which Triton's interpreter lacks, done by pointers."""
    pointers, mask = desc.materialize_pointers(indices)
    dtype, operations = value.dtype.scalar, upstream._ir.ATOMIC_OP
    name = str(kind).rpartition(".")[2]
    if dtype.is_floating() and name != "ADD":
        raise NotImplementedError(f"a descriptor's atomic_{name.lower()} of {dtype} cannot be simulated")
    if name in ("MIN", "MAX") and dtype.is_int_unsigned():
        name = f"U{name}"
    operation = getattr(operations, "FADD" if dtype.is_floating() else name)
    relaxed, device = upstream._ir.MEM_SEMANTIC.RELAXED, upstream._ir.MEM_SYNC_SCOPE.GPU
    self.create_atomic_rmw(operation, pointers, value, mask, relaxed, device)


def _missing(self: Any, name: str) -> Any:
    """Raise for a missing method of Triton's builder; the method's name alone would not help the author of a kernel."""
    raise AttributeError(f"{name.removeprefix('create_')} cannot be simulated: Triton's interpreter has no {name}")


def _install_libraries() -> None:
    """Replace functions from vendors' libraries, which have no body, or one that can only be compiled."""
    known = {name: name for name in _SAME_NAME} | _OTHER_NAME | _PREDICATES
    for module in (libdevice, cuda.libdevice, hip.libdevice, cuda, hip):
        for name, function in list(vars(module).items()):
            public = callable(function) and not name.startswith("_")
            if public and (module is libdevice or tl.core.is_builtin(function)):
                replacement = _from_torch(name, known[name]) if name in known else _refused(module.__name__, name)
                setattr(module, name, replacement)


def _from_torch(name: str, of_torch: str) -> Callable[..., Any]:
    """The function ``name`` of ``libdevice``, computed by PyTorch's ``of_torch``."""
    function = getattr(torch, of_torch)

    def simulated(*arguments: Any, _semantic: Any = None) -> Any:
        tensors = [upstream.interpreter_semantic.to_tensor(one) for one in arguments]
        first = tensors[0]
        if first.dtype not in _FLOATS:
            raise TypeError(f"libdevice.{name} takes float32 or float64, got {first.dtype}")
        operands = np.broadcast_arrays(*(one.handle.data for one in tensors))
        result = function(*(torch.from_numpy(np.ascontiguousarray(one)) for one in operands)).numpy()
        dtype = tl.int1 if name in _PREDICATES else first.dtype
        block = next((one.type for one in tensors if one.type.is_block()), None)
        kind = dtype if block is None else block.with_element_ty(dtype)
        return tl.tensor(_Handle(result, dtype), kind)

    return simulated


def _refused(module: str, name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{module.removeprefix('triton.language.')}.{name} cannot be simulated")

    return refuse
