"""The host's half of :mod:`iris.device.matmul`: check arguments, choose a config, launch the one kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl

from iris.context import Iris
from iris.device import matmul as kernels
from iris.device.matmul import Matrix
from iris.errors import DTypeError, PlacementError, ShapeError
from iris.ops.config import FusedConfig, Target, pick_algorithm, pick_config
from iris.ops.problem import DTYPES, Problem, output_dtype
from iris.ops.workspace import FusedWorkspace
from iris.trace import Trace


@dataclass(frozen=True)
class Plan:
    """Everything about a launch that the op decides: how A is cut, where tiles come from and go to."""

    site: int
    source: Any
    sink: Any
    shards: int = 1
    segments: int = 1
    ring: int = 1
    chunks: int = 1
    blocks_per_chunk: int = 1


def target_of(ctx: Iris, staging_fits: bool = True) -> Target:
    """The hardware under ``ctx``, as configs are picked for."""
    tma = ctx.backend_name == "cuda" and torch.cuda.get_device_capability(ctx.device) >= (9, 0)
    return Target(ctx.backend_name, ctx.num_sms, tma, staging_fits)


def check_operands(
    ctx: Iris, op: str, output: torch.Tensor, a: tuple[str, torch.Tensor], b: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raise, before anything is launched, if dtypes, devices or dimensions cannot work."""
    name, tensor = a
    matrices = {"output": output, name: tensor, "B": b}
    for argument, matrix in matrices.items():
        if not isinstance(matrix, torch.Tensor):
            raise DTypeError(op, argument, "a tensor", type(matrix).__name__)
        if matrix.dim() != 2:
            raise ShapeError(op, argument, "2 dimensions", f"{matrix.dim()}: {tuple(matrix.shape)}")
        if 0 in matrix.shape:
            raise ShapeError(op, argument, "at least one row and column", tuple(matrix.shape))
        if matrix.device != ctx.device:
            raise PlacementError(op, argument, f"a tensor on {ctx.device}", matrix.device)
    if tensor.dtype not in DTYPES:
        raise DTypeError(op, name, f"one of {', '.join(map(str, DTYPES))}", tensor.dtype)
    if b.dtype != tensor.dtype:
        raise DTypeError(op, "B", f"{tensor.dtype}, as {name}", b.dtype)
    if output.dtype != output_dtype(tensor.dtype):
        raise DTypeError(op, "output", str(output_dtype(tensor.dtype)), output.dtype)
    if bias is not None:
        if bias.device != ctx.device:
            raise PlacementError(op, "bias", f"a tensor on {ctx.device}", bias.device)
        if bias.dtype != output.dtype:
            raise DTypeError(op, "bias", str(output.dtype), bias.dtype)
        if not bias.is_contiguous():
            raise ShapeError(op, "bias", "a contiguous tensor", f"strides {bias.stride()}", "Pass bias.contiguous().")


def check_shape(op: str, argument: str, tensor: torch.Tensor, expected: tuple[int, ...], why: str) -> None:
    """Raise ShapeError unless ``tensor`` has the shape ``expected``."""
    if tuple(tensor.shape) != expected:
        raise ShapeError(op, argument, f"{expected} ({why})", tuple(tensor.shape))


def check_symmetric(ctx: Iris, op: str, argument: str, tensor: torch.Tensor, fix: str) -> None:
    """Raise PlacementError unless ``tensor`` is on the symmetric heap."""
    if not ctx.is_symmetric(tensor):
        raise PlacementError(op, argument, "a tensor on the symmetric heap", f"one on {tensor.device} outside it", fix)


def bias_kind(op: str, bias: torch.Tensor | None, rows: int, cols: int) -> int:
    """Whether ``bias`` is per column (shape [N] or [1, N]), per row ([M, 1]), or absent.

    A 1-D bias of length M ≠ N is per row, too.
    """
    if bias is None:
        return int(kernels.BIAS_NONE.value)
    shape = tuple(bias.shape)
    if shape in ((cols,), (1, cols)):
        return int(kernels.BIAS_COLUMN.value)
    if shape in ((rows, 1), (rows,)):
        return int(kernels.BIAS_ROW.value)
    raise ShapeError(op, "bias", f"[{cols}] (per column) or [{rows}, 1] (per row)", shape)


def run(
    ctx: Iris,
    problem: Problem,
    plan: Plan,
    output: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    bias_is: int,
    config: FusedConfig,
    workspace: FusedWorkspace,
    trace: Trace | None,
    staged: torch.Tensor | None = None,
) -> None:
    """Launch the matmul kernel for ``problem`` as ``plan`` and ``config`` say.

    ``a`` is this rank's part; the others' parts arrive in ``staged``, if it is given, else the source finds them.
    """
    target = target_of(ctx)
    rows, k = problem.m // plan.shards, problem.k // plan.segments
    blocks = plan.shards * -(-rows // config.block_size_m) * -(-problem.n // config.block_size_n)
    even_k = k % config.block_size_k == 0
    b_block, a_block = [config.block_size_k, config.block_size_n], [config.block_size_m, config.block_size_k]
    b_desc = _describe(b, b_block) if target.tma else None
    whole = staged is not None or plan.source is kernels.local_source
    own_desc = _describe(a, a_block) if target.tma and whole else None
    gathered = a if staged is None else staged
    gathered_desc = own_desc if staged is None else _describe(staged, a_block) if own_desc is not None else None
    programs = min(blocks, config.num_sms or ctx.num_sms)
    if trace is not None:
        trace.begin(ctx, programs)
    kernels.matmul_kernel[(programs,)](
        ctx.handle,
        workspace.flags(plan.chunks, plan.blocks_per_chunk),
        Matrix(a, *a.stride()),
        own_desc,
        Matrix(gathered, *gathered.stride()),
        gathered_desc,
        Matrix(b, *b.stride()),
        b_desc,
        Matrix(output, *output.stride()),
        bias,
        trace.buffer if trace is not None else None,
        rows,
        problem.n,
        k,
        SOURCE=plan.source,
        SINK=plan.sink,
        SITE=plan.site,
        SHARDS=plan.shards,
        SEGMENTS=plan.segments,
        RING=plan.ring,
        STACKED=staged is not None,
        BIAS=bias_is,
        BLOCK_M=config.block_size_m,
        BLOCK_N=config.block_size_n,
        BLOCK_K=config.block_size_k,
        GROUP_M=config.group_size_m,
        EVEN_K=even_k,
        PRECISION=_precision(problem.dtype),
        ACC_DTYPE=tl.int32 if problem.dtype == torch.int8 else tl.float32,
        TRACE=trace is not None,
        **config.launch_options(target),
    )


def resolve(
    ctx: Iris, problem: Problem, config: FusedConfig | None, algorithms: tuple[str, ...], staging_fits: bool = True
) -> FusedConfig:
    """The config to run with, its algorithm settled: the caller's, checked, or the picked one."""
    target = target_of(ctx, staging_fits)
    if config is None:
        return pick_config(problem, target)
    config.check(problem.op, ("auto", *algorithms), ctx.num_sms)
    return config if config.algorithm != "auto" else replace(config, algorithm=pick_algorithm(problem, target))


def _describe(matrix: torch.Tensor, block: list[int]) -> Any:
    """A TMA descriptor, or None where TMA cannot read the matrix: it needs unit column stride and 16-byte rows."""
    if matrix.stride(1) != 1 or matrix.data_ptr() % 16 or matrix.stride(0) * matrix.element_size() % 16:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, block)


def _precision(dtype: torch.dtype) -> str:
    """What torch.matmul would use: full float32 unless the user allows TF32."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"
