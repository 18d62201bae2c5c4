"""One call of an op, checked and about to run: the part that all ops over ranks share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from iris.context import Iris
from iris.device.control import SITES
from iris.device.tile import BIAS_ROW
from iris.ops.config import FusedConfig
from iris.ops.decomposed import Decomposition
from iris.ops.exchange import Blocks
from iris.ops.launching import run
from iris.ops.local_matmul import add_product, plain_matmul
from iris.ops.plan import Plan
from iris.ops.problem import Problem
from iris.ops.room import exchanged_blocks
from iris.ops.rows import Rows
from iris.ops.scales import Scales
from iris.ops.workspace import FusedWorkspace
from iris.trace import Trace

_SITES = {op: site for site, op in SITES.items()}


@dataclass(frozen=True)
class OpCall:
    """One call. Each op has a subclass with a method per algorithm, and calls the method that ``config`` names.

    Attributes:
        ctx, problem: where the call runs, and what it computes.
        output: the tensor that this rank's matmul fills.
        a, b, bias, bias_is, scales: this rank's operands, and the kind of the bias.
        config: the options, with the algorithm that runs.
        trace: where to record what programs do; None: nowhere.
        workspace: the workspace of the algorithm.
    """

    ctx: Iris
    problem: Problem
    output: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    bias_is: int
    scales: Scales
    config: FusedConfig
    trace: Trace | None
    workspace: FusedWorkspace

    @property
    def site(self) -> int:
        """The op's number, for errors of waits."""
        return _SITES[self.problem.op]

    @property
    def programs(self) -> int:
        """The most programs that run at once."""
        return self.config.num_sms or self.ctx.num_sms

    @property
    def comm_programs(self) -> int:
        """How many of them only communicate, for an algorithm that has such programs."""
        return self.config.comm_programs(self.problem.op, self.ctx.num_sms)

    def launch(
        self,
        plan: Plan,
        *,
        a: torch.Tensor | None = None,
        gathered: torch.Tensor | None = None,
        slots: object = None,
        config: FusedConfig | None = None,
    ) -> None:
        """Launch Iris's matmul kernel as ``plan`` says; see :func:`iris.ops.launching.run`."""
        run(
            self.ctx, self.problem, plan, self.output, self.a if a is None else a, self.b,
            config=config or self.config, workspace=self.workspace, bias=self.bias, bias_is=self.bias_is,
            trace=self.trace, gathered=gathered, slots=slots, scales=self.scales,
        )  # fmt: skip

    def multiply(
        self,
        product: torch.Tensor,
        a: torch.Tensor,
        bias: torch.Tensor | None = None,
        rows: Rows | None = None,
        b: torch.Tensor | None = None,
    ) -> None:
        """``product = a @ b * scales + bias`` by the library's matmul. ``rows``: the rows of A that ``a`` holds; None:
        all. ``b``: the rows of B that belong to its columns; None: all."""
        scales, b = self.scales if rows is None else self.scales.of(rows), self.b if b is None else b
        plain_matmul(self.workspace, product, a, b, bias, scales, self.config, self.trace)

    def add(self, total: torch.Tensor, a: torch.Tensor, rows: Rows, b: torch.Tensor | None = None) -> None:
        """``total += a @ b * scales``, rounded; see :meth:`multiply`."""
        b = self.b if b is None else b
        add_product(self.workspace, total, a, b, self.scales.of(rows), self.config)

    def fill(self, a: torch.Tensor, rows: Rows | None = None) -> None:
        """``output = a @ b * scales + bias`` by the library's matmul; ``rows``: only these rows, which ``a`` holds;
        None: all."""
        if rows is None:
            self.multiply(self.output, a, self.bias)
        else:
            self.multiply(rows.of(self.output), a, self.bias_of(rows), rows)

    def bias_of(self, rows: Rows) -> torch.Tensor | None:
        """The bias for ``rows``: their part of it if there is one per row, else all of it."""
        return self.bias if self.bias is None or self.bias_is != BIAS_ROW.value else rows.of(self.bias)

    def decomposition(self) -> Decomposition:
        """The small kernels and copies of this call."""
        return Decomposition(self.ctx, self.workspace, self.site)

    def blocks(self) -> Blocks:
        """How this rank's part is cut into blocks for an exchange."""
        return exchanged_blocks(self.problem, self.config.algorithm, self.ctx.num_sms, self.workspace.flagged)
