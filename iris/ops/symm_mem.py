"""PyTorch's fused ops ``torch.ops.symm_mem.fused_*``, computed by Iris.

Compilers put these ops in place of a collective and a matmul: TorchInductor with ``_micro_pipeline_tp`` (async tensor
parallelism), and serving engines with passes of their own. So a model that they compile runs on Iris without a change,
once :func:`replace_symm_mem` has been called. The ops keep PyTorch's signatures, shapes and strides.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from iris.context import Iris, require_context
from iris.errors import ArgumentError, IrisError
from iris.ops.all_gather_matmul import all_gather_matmul
from iris.ops.local_matmul import matmul
from iris.ops.matmul_reduce_scatter import matmul_reduce_scatter
from iris.ops.problem import FLOATS

OP = "replace_symm_mem"
_SERVED: dict[str, tuple[weakref.ref[Iris], weakref.ref[Any]]] = {}
"""The context that serves a process group, and the group, by the group's name."""
_SCALAR_TYPES = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
"""Dtypes by their numbers in PyTorch's dispatcher, which passes lists of dtypes so."""


class _Left(Exception):
    """A call that PyTorch's own kernel is to compute, because of its ``kind``; ``more``: what differs from call to
    call."""

    def __init__(self, kind: str, more: str = "") -> None:
        self.kind = kind
        super().__init__(f"{kind}{more}")


def replace_symm_mem(ctx: Iris) -> None:
    """From now on, compute ``torch.ops.symm_mem.fused_*`` by Iris for calls on the process group for which ``ctx`` was
    made, until ``ctx`` is closed.

    These are ``fused_all_gather_matmul``, ``fused_matmul_reduce_scatter`` and the scaled forms of both. Their unfused
    equivalents are those of :func:`iris.ops.all_gather_matmul` and :func:`iris.ops.matmul_reduce_scatter`, for operands
    with any number of leading dimensions. Call this on all ranks of the group, before they run such an op.

    It also enables the group for PyTorch's symmetric memory, without which TorchInductor fuses nothing on it.

    Left to PyTorch's own kernels are dtypes other than fp16, bf16, fp32 and fp8 (e4m3); scatters of columns; averages
    in fp16; and of the scaled ops gathers of columns, a ``result_scale``, no ``out_dtype``, scales of this rank's rows
    with several B, and a bias of a reduce-scatter, which PyTorch adds once for each rank. On CPUs, where PyTorch has no
    kernels, its unfused forms run. This depends on shapes and dtypes only, so all ranks decide alike. What differs:
    each B has the same shape on all ranks, and ``use_fast_accum`` is not looked at, as sums of fp8 are in the ops
    (docs/performance-matmul.md).

    Args:
        ctx: a context made for a process group of ``torch.distributed``: ``iris.iris(heap_size, group)``. Its heap must
            have room for what the ops gather and sum. Of several contexts of a group the last one that was passed
            serves it.

    Raises:
        ArgumentError: ``ctx`` was made without ``torch.distributed``, or its group has been destroyed.
        ContextError: the context is closed, or belongs to a parent process.

    Sync: none. The ops run on the current stream, as :func:`iris.ops.all_gather_matmul` says.
    """
    require_context(OP, ctx)
    ctx.check(OP)
    name = ctx._group_name
    if not name:
        fix = "These ops name their ranks by such a group: call torch.distributed.init_process_group before iris.iris."
        raise ArgumentError(OP, "ctx", "a context for a process group", "one made without torch.distributed", fix)
    group = _group(name)
    if group is None:
        raise ArgumentError(OP, "ctx", "a context whose process group is there", f"one whose group {name!r} is gone")
    _install("CUDA" if ctx.device.type == "cuda" else "CPU")
    enable_symm_mem(name)
    _SERVED[name] = weakref.ref(ctx), weakref.ref(group)


def enable_symm_mem(group_name: str) -> None:
    """Let TorchInductor fuse collectives of this group: PyTorch 2.13 says that it is not needed, but its pass asks."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group_name)  # type: ignore[arg-type]


def _context_of(group_name: str) -> Iris | None:
    """The open context that serves the group of this name. Another group may have had the name before."""
    if group_name not in _SERVED:
        return None
    ctx, group = (one() for one in _SERVED[group_name])
    return ctx if ctx is not None and ctx._open and group is _group(group_name) else None


def _group(name: str) -> Any:
    """The process group of this name; None if there is none."""
    try:
        return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, attr-defined]
    except (RuntimeError, ValueError):
        return None


@cache
def _install(key: str) -> torch.library.Library:
    """Put Iris's kernels in front of PyTorch's, for tensors of the dispatch key ``key``."""
    import torch.distributed._symmetric_memory  # defines the ops

    library = torch.library.Library("symm_mem", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel", UserWarning)
        for kernel in _KERNELS:
            library.impl(kernel.__name__, _in_front(kernel, key), key, with_keyset=True, allow_override=True)
    return library


def _in_front(kernel: Callable[..., Any], key: str) -> Callable[..., Any]:
    """``kernel``, or PyTorch's own where no context serves the group, or where ``kernel`` leaves the call to it."""
    name = kernel.__name__
    op = getattr(torch.ops.symm_mem, name).default
    arguments = [argument.name for argument in op._schema.arguments]
    # The kernels for "Meta" are the unfused forms.
    original = torch.library.get_kernel(op, key if key == "CUDA" else "Meta")

    def call(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(arguments, args, strict=False)) | kwargs
        ctx = _context_of(given["group_name"])
        if ctx is None:
            _warn_of(given["group_name"])
            return original.call_boxed(keyset, *args, **kwargs)
        try:
            with torch.no_grad():  # PyTorch's kernels record no gradients either
                return kernel(ctx, **given)
        except _Left as reason:
            told = ctx.kept((OP, name), set[str])
            if reason.kind not in told:
                told.add(reason.kind)
                ctx.info(f"torch.ops.symm_mem.{name} is left to PyTorch: {reason}")
        except IrisError as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"in torch.ops.symm_mem.{name}, which Iris computes")
            raise
        return original.call_boxed(keyset, *args, **kwargs)

    return call


@cache
def _warn_of(group_name: str) -> None:
    """Warn, once, of a group that no context serves."""
    served = [repr(name) for name in _SERVED if _context_of(name) is not None]
    warnings.warn(
        f"torch.ops.symm_mem on the process group {group_name!r} is left to PyTorch: no open context of Iris serves it "
        f"({', '.join(served) or 'none'} served). Make one by iris.iris(heap_size, group), and call {OP} with it.",
        stacklevel=2,
    )


def fused_all_gather_matmul(
    ctx: Iris, A: torch.Tensor, Bs: list[torch.Tensor], gather_dim: int, group_name: str, return_A: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """``A`` gathered along ``gather_dim``, and its product with each of ``Bs``."""
    if not Bs or A.dtype not in FLOATS:
        raise _Left("a dtype: ", str(A.dtype)) if Bs else _Left("no B")
    for b in Bs:
        _check_operands(ctx, A, b, gather_dim, 1 if gather_dim < A.dim() - 1 else ctx.world_size)
    return _gathered(ctx, A, Bs, gather_dim, return_A, [b.dtype for b in Bs], [{} for _ in Bs])


def fused_all_gather_scaled_matmul(
    ctx: Iris,
    A: torch.Tensor,
    Bs: list[torch.Tensor],
    A_scale: torch.Tensor,
    B_scales: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    biases: list[torch.Tensor | None],
    result_scales: list[torch.Tensor | None],
    out_dtypes: list[torch.dtype | int | None],
    use_fast_accum: list[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """As :func:`fused_all_gather_matmul`, for fp8 with scales of matrices, or of rows and columns."""
    count = len(Bs)
    if not count or any(len(one) != count for one in (B_scales, biases, result_scales, out_dtypes)):
        raise _Left("lists of different lengths")
    if gather_dim == A.dim() - 1:
        raise _Left("a scaled gather of columns")
    for b in Bs:
        _check_operands(ctx, A, b, gather_dim, 1)
    made = [_made(A, one, result_scale) for one, result_scale in zip(out_dtypes, result_scales, strict=True)]
    whole = list(A.shape)
    whole[gather_dim] *= ctx.world_size
    scale = of_all = _numbers(A_scale)
    sharded = list(A_scale.shape) == [*A.shape[:-1], 1]  # as in PyTorch even if it is one number
    if sharded and count > 1 and ctx.world_size > 1:
        raise _Left("several matrices B, and scales of this rank's rows of A")
    if sharded or A_scale.numel() != 1:
        if not sharded and list(A_scale.shape) != [*whole[:-1], 1]:
            raise _Left("A_scale", f" of shape {tuple(A_scale.shape)}")
        of_all = _numbers(_flat(A_scale, gather_dim))
        scale = of_all if sharded else of_all.chunk(ctx.world_size)[ctx.rank]
    others = [
        {"scale_b": _scale_of_b(b, by_b), "bias": None if bias is None else bias.contiguous()}
        for b, by_b, bias in zip(Bs, B_scales, biases, strict=True)
    ]
    return _gathered(ctx, A, Bs, gather_dim, True, made, others, scale, of_all)


def fused_matmul_reduce_scatter(
    ctx: Iris, A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    """``A @ B`` summed over the ranks, of which each keeps its part along ``scatter_dim``."""
    if A.dtype not in FLOATS:
        raise _Left("a dtype: ", str(A.dtype))
    _check_operands(ctx, A, B, scatter_dim, 1)
    if reduce_op == "avg" and A.dtype == torch.float16:
        raise _Left("an average in float16, whose sum may not be finite")
    total = _scattered(ctx, A, B, reduce_op, scatter_dim, A.dtype)
    return total.div_(ctx.world_size) if reduce_op == "avg" else total


def fused_scaled_matmul_reduce_scatter(
    ctx: Iris,
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: list[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | int | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """As :func:`fused_matmul_reduce_scatter`, for fp8 with scales of matrices, or of rows and columns. ``output_shape``
    is that of ``A @ B``, if ``A`` has been flattened."""
    if bias is not None:
        raise _Left("a bias, which PyTorch adds once for each rank")
    made = _made(A, out_dtype, result_scale)
    leading = [*(A.shape if output_shape is None else output_shape)][:-1]
    if math.prod(leading) != math.prod(A.shape[:-1]):
        raise _Left("output_shape", f" {tuple(output_shape or ())} of A {tuple(A.shape)}")
    shaped = A.reshape(*leading, A.shape[-1])
    _check_operands(ctx, shaped, B, orig_scatter_dim, 1)
    rows = A_scale.numel() != 1
    if rows and list(A_scale.shape) != [*A.shape[:-1], 1]:
        raise _Left("A_scale", f" of shape {tuple(A_scale.shape)}")
    by_a = A_scale.reshape(*leading, 1) if rows else _numbers(A_scale)
    by_b = _scale_of_b(B, B_scale)
    if reduce_op == "avg":  # before the sum, which may otherwise not be finite
        by_b = by_b / ctx.world_size
    return _scattered(ctx, shaped, B, reduce_op, orig_scatter_dim, made, by_a, by_b)


_KERNELS = (
    fused_all_gather_matmul, fused_all_gather_scaled_matmul, fused_matmul_reduce_scatter,
    fused_scaled_matmul_reduce_scatter,
)  # fmt: skip


def _check_operands(ctx: Iris, a: torch.Tensor, b: torch.Tensor, dim: int, parts: int) -> None:
    """Leave to PyTorch what it refuses, or what no op of Iris takes. ``parts``: how many parts of K ``a`` is one of."""
    if a.dim() < 2 or not 0 <= dim < a.dim():
        raise _Left("a dimension", f": {dim} of A {tuple(a.shape)}")
    if b.dim() != 2 or a.shape[-1] * parts != b.shape[0] or a.dtype != b.dtype:
        raise _Left("operands: ", f"A {tuple(a.shape)} and B {tuple(b.shape)}, {a.dtype} and {b.dtype}")
    if not (a.numel() and b.numel()):
        raise _Left("an empty matrix")
    if not a.device == b.device == ctx.device:
        raise _Left("devices", f" {a.device} and {b.device}")


def _made(a: torch.Tensor, out_dtype: torch.dtype | int | None, result_scale: torch.Tensor | None) -> torch.dtype:
    """The dtype of a scaled product."""
    made = _SCALAR_TYPES.get(out_dtype) if isinstance(out_dtype, int) else out_dtype
    if result_scale is not None:
        raise _Left("a result_scale")
    if a.dtype != torch.float8_e4m3fn or made not in FLOATS:
        raise _Left("dtypes: ", f"a product of {a.dtype} with out_dtype {made or out_dtype}")
    return made


def _numbers(scale: torch.Tensor) -> torch.Tensor:
    return scale.reshape(-1).contiguous()


def _scale_of_b(b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scale.numel() not in (1, b.shape[1]):
        raise _Left("B_scale", f" of shape {tuple(scale.shape)}")
    return _numbers(scale)


def _flat(a: torch.Tensor, dim: int) -> torch.Tensor:
    """``a`` as a matrix whose rows go along ``dim`` first."""
    return a.movedim(dim, 0).flatten(0, -2)


def _gathered(
    ctx: Iris,
    a: torch.Tensor,
    bs: list[torch.Tensor],
    dim: int,
    return_a: bool,
    dtypes: list[torch.dtype],
    others: list[dict[str, Any]],
    scale: torch.Tensor | None = None,
    scale_of_all: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The gathered A, and the products with ``bs``: the widest is multiplied while A is gathered, the others then."""
    world, columns = ctx.world_size, dim == a.dim() - 1
    own = a.flatten(0, -2) if columns else _flat(a, dim)
    m, k = own.shape[0] * (1 if columns else world), own.shape[1] * (world if columns else 1)
    gathered = own.new_empty(m, k) if return_a or len(bs) > 1 else None
    products = [own.new_empty(m, b.shape[1], dtype=dtype) for b, dtype in zip(bs, dtypes, strict=True)]
    widest = max(range(len(bs)), key=lambda number: bs[number].shape[1])
    all_gather_matmul(
        ctx, products[widest], own, bs[widest], gather_dim=int(columns), gathered=gathered, scale_a=scale,
        **others[widest],
    )  # fmt: skip
    for number, (b, product) in enumerate(zip(bs, products, strict=True)):
        if number == widest:
            continue
        assert gathered is not None
        if scale is None:
            torch.mm(gathered, b, out=product)
        else:
            matmul(ctx, product, gathered, b, scale_a=scale_of_all, **others[number])

    def shaped(matrix: torch.Tensor) -> torch.Tensor:
        if columns:
            return matrix.view(*a.shape[:-1], -1)
        leading = a.movedim(dim, 0).shape[:-1]
        return matrix.view(world * leading[0], *leading[1:], -1).movedim(0, dim)

    return shaped(gathered) if return_a and gathered is not None else None, [*map(shaped, products)]


def _scattered(
    ctx: Iris,
    a: torch.Tensor,
    b: torch.Tensor,
    reduce_op: str,
    dim: int,
    dtype: torch.dtype,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of ``a @ b`` over ranks, of which this rank has its part along ``dim``. ``scale_a``: one number, or with
    the leading dimensions of ``a``."""
    world = ctx.world_size
    if dim == a.dim() - 1:
        raise _Left("a scatter of columns")
    if reduce_op not in ("sum", "avg"):
        raise _Left("a reduction", f": reduce_op {reduce_op!r}")
    if a.shape[dim] % world:
        raise _Left("rows that the ranks cannot share evenly", f": dimension {dim} of {tuple(a.shape)}, {world} ranks")
    if scale_a is not None and scale_a.dim() > 1:
        scale_a = _numbers(_flat(scale_a, dim))
    rows = _flat(a, dim)
    product = a.new_empty(rows.shape[0] // world, b.shape[1], dtype=dtype)
    matmul_reduce_scatter(ctx, product, rows, b, scale_a=scale_a, scale_b=scale_b)
    first, *others = a.movedim(dim, 0).shape[:-1]
    scattered = product.view(first // world, *others, -1).movedim(0, dim).contiguous()
    return scattered.view(scattered.shape)  # strides of dimensions of 1, too
