"""A matrix product on one rank, by the kernel of the fused ops.

Unfused::

    output = A @ B * scale_a * scale_b + bias

It measures the kernel by itself. Algorithms that call the library's matmul call it instead with ``own_matmul``, and for
8-bit operands that the library does not multiply.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from iris.context import Iris
from iris.device.control import SITE_MATMUL
from iris.device.tile import local_sink, tile_mask, tile_pointers
from iris.ops.algorithms import LOCAL
from iris.ops.choice import resolve
from iris.ops.config import FusedConfig
from iris.ops.launching import run
from iris.ops.operands import bias_kind, check_operands, check_rows_of_b, check_shape, has_contiguous_rows
from iris.ops.plan import Plan
from iris.ops.problem import QUANTISED, Problem
from iris.ops.replay import replayed
from iris.ops.scaled_mm import library_takes, scaled_mm
from iris.ops.scales import Scales
from iris.ops.workspace import FusedWorkspace, kept_local_workspace, workspace_for
from iris.trace import Trace, trace_of

OP = LOCAL


@triton.jit
def add_sink(handle, c, slots, acc, bias_ptr, tile, flags, epoch, SITE: tl.constexpr, BIAS: tl.constexpr):
    """Add the tile to what the output holds, and round the sum once."""
    pointers = tile_pointers(c, c.ptr, tile.rows, tile.cols)
    acc += tl.load(pointers, mask=tile_mask(tile), other=0).to(acc.dtype)
    local_sink(handle, c, slots, acc, bias_ptr, tile, flags, epoch, SITE, BIAS)


@replayed
def matmul(
    ctx: Iris,
    output: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    config: FusedConfig | str | None = None,
    workspace: FusedWorkspace | None = None,
    trace: bool | Trace = False,
) -> torch.Tensor:
    """``output = A @ B * scale_a * scale_b + bias`` on this rank alone.

    Args:
        output: [M, N], any strides, not in memory of another operand; in A's dtype, or for 8-bit A as for
            :func:`iris.ops.all_gather_matmul`.
        A: [M, K], any strides; copied first if its rows are not contiguous.
        B: [K, N] in A's dtype, any strides; with 8 bits calls are the fastest if its columns are contiguous.
        bias: [N] per column, or [M, 1] per row; in output's dtype, added in float32 (in int32 to an int32 output).
        scale_a: for int8 and fp8: float32, one number, or one for each row of A, [M] or [M, 1]. For fp8, both may be
            scales of blocks as for :func:`iris.ops.all_gather_matmul`, this one [M, K / 128].
        scale_b: the same for the columns of B: one number, or [N], or [1, N]; or for blocks [K / 128, N / 128].
        config, workspace, trace: as for :func:`iris.ops.all_gather_matmul`.

    Returns:
        ``output``.

    Raises:
        ShapeError, DTypeError, PlacementError, ArgumentError: before anything is launched.
        ContextError: the context is closed, belongs to a parent process, or a call on it broke off.
        CaptureError: the call needs new memory, but a graph is being captured.
        WaitTimeout, PeerDied: from an earlier kernel of this context.

    Sync: on the current stream; no other rank takes part.
    """
    ctx.check(OP)
    scales = check_operands(ctx, OP, output, ("A", A), B, bias, scale_a, scale_b)
    _multiply(ctx, output, A, B, bias, scales, config, workspace, trace)
    return output


def _multiply(
    ctx: Iris,
    output: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    scales: Scales,
    config: FusedConfig | str | None,
    workspace: FusedWorkspace | None,
    trace: bool | Trace,
    op: str = OP,
    sink: Any = local_sink,
) -> None:
    """``op``: the op that the matmul is a part of, or the matmul itself, as traces call it."""
    (m, k), n = A.shape, B.shape[1]
    check_rows_of_b(OP, B, k, output.shape[1])
    check_shape(OP, "output", output, (m, n), "rows of A, columns of B")
    bias_is = bias_kind(OP, bias, m, n)
    problem = Problem(OP, m, n, k, A.dtype, 1, None, not has_contiguous_rows(B), output.dtype)
    chosen = resolve(ctx, problem, config, workspace, trace, scales=scales)
    plan = Plan(SITE_MATMUL.value, alone=True, sink=sink, sliced=True)
    if workspace is None:
        flags = kept_local_workspace(ctx)
    else:
        flags = workspace_for(ctx, OP, chosen.algorithm, workspace)
    run(
        ctx, problem, plan, output, A, B, config=chosen, workspace=flags, bias=bias, bias_is=bias_is,
        trace=trace_of(ctx, op, trace), scales=scales,
    )  # fmt: skip


def plain_matmul(
    workspace: FusedWorkspace,
    output: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    scales: Scales,
    config: FusedConfig,
    trace: Trace | None,
) -> None:
    """``output = a @ b * scales + bias`` by PyTorch's library. Iris's kernel computes it instead, with flags from the
    call's ``workspace``, if ``config.own_matmul`` is set; and for 8-bit dtypes if ``config.num_sms`` is set, or, with a
    tile picked for this product, if the library does not take the operands."""
    if bias is not None and tuple(bias.shape) == (1, output.shape[1]):
        bias = bias[0]  # the library adds only a bias of one dimension while it stores the product
    if config.own_matmul or a.dtype in QUANTISED:
        tile = _own_tile(config)
        if tile is None and library_takes(output, a, b, bias, scales):
            scaled_mm(workspace, output, a, b, bias, scales)
        else:
            traced, op = (trace, trace.op) if trace is not None else (False, OP)
            _multiply(workspace.ctx, output, a, b, bias, scales, tile, workspace.alone, traced, op)
    elif bias is None:
        torch.matmul(_contiguous_on_cpu(a), b, out=output)
    else:
        torch.addmm(bias, _contiguous_on_cpu(a), b, out=output)


def add_product(
    workspace: FusedWorkspace,
    total: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scales: Scales,
    config: FusedConfig,
) -> None:
    """``total += a @ b * scales``: by PyTorch, or for 8-bit dtypes, where PyTorch cannot add, by Iris. Iris rounds only
    the sum; cuBLAS mostly rounds a 16-bit product, too, before it adds it."""
    if a.dtype in QUANTISED:
        _multiply(workspace.ctx, total, a, b, None, scales, _own_tile(config), workspace.alone, False, sink=add_sink)
    else:
        torch.addmm(total, _contiguous_on_cpu(a), b, out=total)


def _own_tile(config: FusedConfig) -> FusedConfig | None:
    """The config of Iris's kernel within the algorithm that ``config`` names; None: pick one."""
    as_given = config.own_matmul or config.num_sms is not None
    return replace(config, algorithm="local", own_matmul=False) if as_given else None


def _contiguous_on_cpu(a: torch.Tensor) -> torch.Tensor:
    """``a``, or, on the CPU for 16-bit dtypes, a contiguous copy if it is not contiguous: for an odd number of columns
    oneDNN's AMX matmul reads one element past the end of each row and multiplies it by zero, so a NaN there spoils the
    result (PyTorch 2.13)."""
    return a.contiguous() if a.device.type == "cpu" and a.element_size() == 2 else a
