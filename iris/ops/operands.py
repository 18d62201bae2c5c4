"""Checks of an op's operands, before anything is launched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from iris.context import Iris
from iris.device import tile
from iris.errors import ArgumentError, DTypeError, PlacementError, ShapeError
from iris.ops.algorithms import TRAITS
from iris.ops.problem import DTYPES, MAX_EXTENT, QUANTISED, output_dtypes
from iris.ops.scales import Scales, check_contiguous, scales_of
from iris.ops.target import multiplies_fp8
from iris.symmetric import whereabouts
from iris.tensors import check_dense, has_memory, has_tangent

BIAS_KINDS = {
    tile.BIAS_NONE.value: "no bias", tile.BIAS_COLUMN.value: "bias per column", tile.BIAS_ROW.value: "bias per row",
}  # fmt: skip


def check_operands(
    ctx: Iris,
    op: str,
    output: torch.Tensor,
    a: tuple[str, torch.Tensor],
    b: torch.Tensor,
    bias: torch.Tensor | None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> Scales:
    """Raise if dtypes, devices or dimensions cannot work. Returns the scales."""
    name, tensor = a
    tracer = "torch.jit.trace" if torch.jit.is_tracing() else ""  # type: ignore[attr-defined]
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        tracer = "make_fx"
    if tracer:
        fix = "It is not recorded: leave it out of what is traced."
        raise ArgumentError(op, name, f"a call outside of {tracer}", "one that it traces", fix)
    matrices = {"output": output, name: tensor, "B": b}
    for argument, matrix in matrices.items():
        check_matrix(ctx, op, argument, matrix)
    if tensor.dtype not in DTYPES:
        raise DTypeError(op, name, f"one of {', '.join(map(str, DTYPES))}", tensor.dtype)
    if tensor.dtype == torch.float8_e4m3fn and not multiplies_fp8(ctx):
        others = ", ".join(str(dtype) for dtype in DTYPES if dtype != tensor.dtype)
        fix = "fp8 takes a GPU of compute capability 8.9 or newer."
        raise DTypeError(op, name, f"one of {others} on this GPU", tensor.dtype, fix)
    if b.dtype != tensor.dtype:
        raise DTypeError(op, "B", f"{tensor.dtype}, as {name}", b.dtype)
    scaled = scale_a is not None or scale_b is not None
    if scaled and tensor.dtype not in QUANTISED:
        argument, dtypes = "scale_b" if scale_a is None else "scale_a", " and ".join(map(str, QUANTISED))
        raise ArgumentError(op, argument, f"None: only {dtypes} are scaled", "a tensor", "Multiply A, or B, by it.")
    made = output_dtypes(tensor.dtype, scaled=scaled)
    if output.dtype not in made:
        fix = "A float is for products that scale_a or scale_b scales." if made == (torch.int32,) else ""
        raise DTypeError(op, "output", " or ".join(map(str, made)), output.dtype, fix)
    numbers: dict[str, Any] = {"bias": bias, "scale_a": scale_a, "scale_b": scale_b}
    given = {argument: one for argument, one in numbers.items() if one is not None}
    for argument, one in given.items():
        _check_numbers(ctx, op, argument, one, output.dtype if argument == "bias" else torch.float32)
    _check_writable(op, "output", output, {name: tensor, "B": b} | given)
    return scales_of(op, a, b, scale_a, scale_b)


def _check_numbers(ctx: Iris, op: str, argument: str, given: Any, dtype: torch.dtype) -> None:
    """Raise unless ``given`` is a tensor that may be a bias or a scale."""
    if not isinstance(given, torch.Tensor):
        raise DTypeError(op, argument, "a tensor or None", type(given).__name__)
    check_dense(op, argument, given)
    if given.device != ctx.device:
        raise PlacementError(op, argument, f"a tensor on {ctx.device}", given.device)
    if given.dtype != dtype:
        raise DTypeError(op, argument, str(dtype), given.dtype)
    _check_memory(op, argument, given)
    _check_bits(op, argument, given)
    check_no_gradient(op, argument, given)


def check_gathered(
    ctx: Iris, op: str, gathered: torch.Tensor, a: torch.Tensor, shape: tuple[int, int], others: Mapping[str, Any]
) -> None:
    """Raise unless all of A, of ``shape``, can be left in ``gathered``; ``others``: the operands and the output."""
    check_matrix(ctx, op, "gathered", gathered)
    if gathered.dtype != a.dtype:
        raise DTypeError(op, "gathered", f"{a.dtype}, as A_sharded", gathered.dtype)
    check_shape(op, "gathered", gathered, shape, "the gathered A")
    _check_writable(op, "gathered", gathered, {name: one for name, one in others.items() if one is not None})


def _check_writable(op: str, name: str, output: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> None:
    """Raise unless every element of ``output``, the argument ``name``, has memory of its own, which may be written
    now."""
    (rows, cols), (down, across) = output.shape, output.stride()
    common = math.gcd(down, across)
    twice = (rows > 1 and not down) or (cols > 1 and not across)
    if twice or (common and across // common < rows and down // common < cols):
        raise ShapeError(op, name, "elements that do not overlap", f"{rows} x {cols}, strides {(down, across)}")
    if output.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError(
            op, name, "a tensor that may be written outside of inference mode", "one that was made in it",
            "Make it outside of torch.inference_mode(), or call the op in it.",
        )  # fmt: skip
    for argument, tensor in inputs.items():
        if _share_memory(output, tensor):
            raise ArgumentError(
                op, name, "memory of its own", f"some of {argument}'s", f"It is written while {argument} is read."
            )


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors may have memory in common. Disjoint ranges of columns of one matrix, or of its transpose,
    have none."""
    (first, end), (begin, last) = _range_of(one), _range_of(other)
    if end <= begin or last <= first:
        return False
    item = one.element_size()
    alike = one.dim() == other.dim() == 2 and one.stride() == other.stride() and other.element_size() == item
    if not alike or (begin - first) % item:
        return True
    if one.stride(0) < one.stride(1):
        one, other = one.T, other.T
    row, col = one.stride()
    if not col or (max(one.shape[1], other.shape[1]) - 1) * col >= row:
        return True

    def meets(distance: int, columns: int) -> bool:
        return distance % col == 0 and distance // col < columns

    apart = (begin - first) // item % row
    return meets(apart, one.shape[1]) or meets(row - apart, other.shape[1])


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first element and of the end of its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _check_memory(op: str, argument: str, tensor: torch.Tensor) -> None:
    """Raise for a tensor without memory, such as a wrapper or one whose memory was freed: a kernel would read address
    0."""
    if not has_memory(tensor):
        raise ArgumentError(
            op, argument, "a tensor that has memory", f"a {type(tensor).__name__} without",
            "Of a DTensor pass to_local(); gather a parameter that FSDP has freed; leave the op out of what torch.func "
            "transforms or torch.export traces.",
        )  # fmt: skip


def _check_bits(op: str, argument: str, tensor: torch.Tensor) -> None:
    if tensor.is_neg() or tensor.is_conj():
        raise ArgumentError(
            op, argument, "a tensor whose memory holds its values", "a view that negates them",
            "Pass tensor.resolve_neg().",
        )  # fmt: skip


def check_no_gradient(op: str, argument: str, tensor: torch.Tensor) -> None:
    """Raise ArgumentError for a tensor whose gradients or tangents are recorded."""
    if tensor.requires_grad and torch.is_grad_enabled():
        remedy = "Iris records no gradients: call the op under torch.no_grad() or torch.inference_mode()."
        if argument == "output" and not tensor.is_leaf:
            remedy = "It has become part of a graph: an autograd Function returned it. Return a copy, output.clone()."
        raise ArgumentError(op, argument, "a tensor that needs no gradient", "one with requires_grad=True", remedy)
    if has_tangent(tensor):
        raise ArgumentError(
            op, argument, "a tensor without a tangent", "a dual one of torch.autograd.forward_ad",
            "Iris computes no derivatives: pass tensor.detach().",
        )  # fmt: skip


def check_matrix(ctx: Iris, op: str, argument: str, matrix: torch.Tensor) -> None:
    """Raise unless ``matrix`` is one that a kernel can read or write, on the device of ``ctx``."""
    if not isinstance(matrix, torch.Tensor):
        raise DTypeError(op, argument, "a tensor", type(matrix).__name__)
    check_dense(op, argument, matrix)
    if matrix.dim() != 2:
        raise ShapeError(op, argument, "2 dimensions", f"{matrix.dim()}: {tuple(matrix.shape)}")
    if 0 in matrix.shape:
        raise ShapeError(op, argument, "at least one row and column", tuple(matrix.shape))
    if max(matrix.shape) > MAX_EXTENT:
        raise ShapeError(op, argument, f"at most {MAX_EXTENT} rows and columns", tuple(matrix.shape))
    if matrix.device != ctx.device:
        raise PlacementError(op, argument, f"a tensor on {ctx.device}", matrix.device)
    _check_memory(op, argument, matrix)
    _check_bits(op, argument, matrix)
    check_no_gradient(op, argument, matrix)


def check_shape(op: str, argument: str, tensor: torch.Tensor, expected: tuple[int, ...], why: str) -> None:
    """Raise ShapeError unless ``tensor`` has the shape ``expected``."""
    if tuple(tensor.shape) != expected:
        raise ShapeError(op, argument, f"{expected} ({why})", tuple(tensor.shape))


def check_rows_of_b(op: str, b: torch.Tensor, rows: int, cols: int, a: str = "A") -> None:
    """Raise ShapeError unless B has ``rows`` rows, as many as ``a`` has columns; ``cols``: how many columns B should
    have, for the error."""
    if b.shape[0] != rows:
        expected = f"{(rows, cols)}" if tuple(b.shape) == (cols, rows) else f"{rows} rows"
        fix = "B is [K, N]: pass the weight of a torch.nn.Linear as weight.t()." if b.shape[1] == rows else ""
        raise ShapeError(op, "B", f"{expected} (rows of B = columns of {a})", tuple(b.shape), fix)


def not_symmetric(ctx: Iris, op: str, argument: str, tensor: torch.Tensor, fix: str) -> PlacementError | None:
    """The error of a ``tensor`` that is not on the symmetric heap; None if it is."""
    if ctx.is_symmetric(tensor):
        return None
    return PlacementError(op, argument, "a tensor on the symmetric heap", whereabouts(ctx, tensor), fix)


def check_symmetric(ctx: Iris, op: str, argument: str, tensor: torch.Tensor, fix: str) -> None:
    """Raise PlacementError unless ``tensor`` is on the symmetric heap."""
    if error := not_symmetric(ctx, op, argument, tensor, fix):
        raise error


def has_contiguous_rows(matrix: torch.Tensor) -> bool:
    """Whether the rows of ``matrix`` are contiguous, as the copy engine requires."""
    return matrix.shape[1] == 1 or matrix.stride(1) == 1


def without_rows(op: str, algorithm: str, output: torch.Tensor) -> ShapeError | None:
    """The error of an ``output`` whose rows are not contiguous, if ``algorithm`` needs such; else None."""
    if not TRAITS[op][algorithm].contiguous_rows or has_contiguous_rows(output):
        return None
    fix = "Pass config=None, which takes an algorithm that does without."
    return ShapeError(op, "output", f"contiguous rows, for {algorithm}", f"strides {output.stride()}", fix)


def bias_kind(op: str, bias: torch.Tensor | None, rows: int, cols: int) -> int:
    """Whether ``bias`` is per column (shape [N] or [1, N]), per row ([M, 1]), or absent."""
    if bias is None:
        return int(tile.BIAS_NONE.value)
    shape = tuple(bias.shape)
    kind = tile.BIAS_COLUMN if shape in ((cols,), (1, cols)) else tile.BIAS_ROW if shape == (rows, 1) else None
    if kind is None:
        fix = "One number for each row is bias[:, None]." if shape == (rows,) else ""
        raise ShapeError(op, "bias", f"[{cols}] (per column) or [{rows}, 1] (per row)", shape, fix)
    check_contiguous(op, "bias", bias)
    return int(kind.value)


class Place(NamedTuple):
    """An operand's offset in the heap, in bytes, and its strides."""

    argument: str
    heap_offset: int
    strides: str

    def __repr__(self) -> str:
        """Text whose two parts each name the operand: :mod:`iris.mismatch` shows only the parts that differ."""
        return f"{self.argument} at heap offset {self.heap_offset}, {self.argument} with strides {self.strides}"


def place_of(ctx: Iris, argument: str, tensor: torch.Tensor) -> Place:
    """What must be the same on all ranks for an operand that peers touch."""
    return Place(argument, ctx.heap_offset(tensor), "x".join(map(str, tensor.stride())))
