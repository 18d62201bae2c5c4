"""All-gather + matmul by ``hbm_buffer`` as one of several ranks runs it, on one GPU, without peers and links.

    python benchmark/fetchers.py --num_ranks 1
    python benchmark/fetchers.py --num_ranks 1 --axis_peers=host --axis_M=2048 --axis_N=256 --axis_way=1x16

It shows how programs that fetch and programs that compute slow each other down, and how much one fetcher moves. The
heaps of all other ranks are on this GPU (``peers=device``), or in the host's memory (``peers=host``), whose latency is
about that of a peer's memory and whose bandwidth is that of PCIe. The flags by which ranks enter and leave a call are
set before each call.

``M,N,K`` are those of this rank's matmul. ``way`` is ``16x8`` for 16 fetchers and 8 blocks of K per flag, ``matmul``
for Iris's kernel with nothing to wait for, or ``torch`` for the library's. With ``+split`` after one of the first two,
the last tiles are split by Stream-K. Options are those of `python -m iris bench`.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import torch
from emulation import RANKS, Emulated

import iris
from iris import bench
from iris.bench.accuracy import accuracy
from iris.bench.cases.operands import ROUNDINGS_OF_A_MATMUL
from iris.device import turnstile
from iris.ops import FusedConfig, Problem
from iris.ops.room import memory_of
from iris.ops.scales import NO_SCALES

gather = importlib.import_module("iris.ops.all_gather_matmul")

SIMULATED = iris.backends.detect().name == "sim"
SHAPES = ((96, 64, 256),) if SIMULATED else ((16384, 3584, 8192), (8192, 3696, 8192), (8192, 1024, 29568))
WAYS = ("2x1", "2x1+split", "matmul") if SIMULATED else ("12x16", "16x16", "16x8", "12x16+split", "matmul", "torch")
_FETCHING = tuple(f"{fetchers}x{blocks}" for fetchers in (1, 2, 4, 8, 12, 16, 24, 32) for blocks in (1, 4, 8, 16, 32))
OTHER_WAYS = (*_FETCHING, *(f"{way}+split" for way in (*_FETCHING, "matmul")))
TILE = FusedConfig("hbm_buffer", 32, 32, 32) if SIMULATED else FusedConfig("hbm_buffer", 128, 256, comm_block_n=256)
ENTERED, LEFT = turnstile._ENTERED.value, turnstile._LEFT.value
HEAP_ALIGNMENT = 1024


class Operands:
    """A call's tensors, and the memory that stands for its peers'."""

    def __init__(self, ctx: iris.Iris, sizes: tuple[int, int, int], ranks: int, gather_dim: int, on_host: bool) -> None:
        m, n, k = sizes
        dtype = torch.float16 if SIMULATED else torch.bfloat16
        shape = (m // ranks, k) if gather_dim == 0 else (m, k // ranks)
        self.a = ctx.randn(*shape, dtype=dtype)
        self.b = torch.randn(k, n, dtype=dtype, device=ctx.device)
        self.whole = self.a.repeat(*((ranks, 1) if gather_dim == 0 else (1, ranks)))
        self.right = self.whole.float() @ self.b.float()
        self.output = torch.empty(m, n, dtype=dtype, device=ctx.device)
        own = int(ctx.handle.bases[0])
        self.base = own
        if on_host:
            offset, nbytes = self.a.data_ptr() - own, self.a.numel() * self.a.element_size()
            self.pinned = torch.empty(offset + nbytes + HEAP_ALIGNMENT, dtype=torch.uint8, pin_memory=True)
            skipped = -self.pinned.data_ptr() % HEAP_ALIGNMENT
            self.base = self.pinned.data_ptr() + skipped
            self.pinned[skipped + offset :][:nbytes].view(dtype).view(*shape).copy_(self.a)

    def complaint(self) -> str:
        """How wrong the output is, if it is off by more than its rounding explains; else empty text."""
        found = accuracy(self.output, self.right, self.b.shape[0], ROUNDINGS_OF_A_MATMUL)
        return "" if found.right else str(found)

    def spoil(self) -> None:
        self.output.fill_(float("nan"))


@bench.register
@bench.axis("M,N,K", SHAPES)
@bench.axis("gather_dim", (1, 0))
@bench.axis("ranks", (8,), closed=True, also=RANKS)
@bench.axis("peers", ("device",))
@bench.axis("way", WAYS, variant=True, also=OTHER_WAYS)
def fetchers(state: bench.State, ctx: iris.Iris) -> None:
    """hbm_buffer as one of several ranks runs it, alone on its GPU."""
    m, n, k = sizes = state["M"], state["N"], state["K"]
    ranks, dim, on_host = state["ranks"], state["gather_dim"], state["peers"] == "host"
    if (k if dim else m) % ranks:
        state.skip(f"{k if dim else m} {'columns' if dim else 'rows'} for {ranks} ranks")
    operands: Operands = state.share("operands", lambda: Operands(ctx, sizes, ranks, dim, on_host))
    state.set_flops(2 * m * n * k)
    check, spoil = operands.complaint, operands.spoil
    if state["way"] == "torch":
        state.exec(lambda: torch.matmul(operands.whole, operands.b, out=operands.output), None, check, spoil)
        return
    way, _, split = state["way"].partition("+")
    tile = replace(TILE, stream_k=bool(split), two_tiles=False)
    if way == "matmul":
        config = replace(tile, algorithm="local")
        state.exec(
            lambda: ctx.ops.matmul(operands.output, operands.whole, operands.b, config=config), None, check, spoil
        )
        return
    comm_sms, k_per_flag = (int(number) for number in way.split("x"))
    config = replace(tile, comm_sms=comm_sms, k_per_flag=k_per_flag)
    config.check("all_gather_matmul", ("hbm_buffer",), ctx.num_sms, operands.a.dtype)
    problem = Problem("all_gather_matmul", m, n, k, operands.a.dtype, ranks, dim, False)
    emulated = Emulated(ctx, [ctx._backend.bases[0], *[operands.base] * (ranks - 1)])
    memory = memory_of(emulated, problem, config, None)
    call = gather._Call(
        emulated, problem, operands.output, operands.a, operands.b, None, 0, NO_SCALES, config, None, memory
    )
    peers, coming = memory.turnstile, turnstile.NEXT_EPOCH.value

    def before() -> None:
        for first in (ENTERED, LEFT):
            peers[first : first + ranks] = peers[coming]

    state.set_bytes(problem.received_bytes)
    state.exec(call.hbm_buffer, before, check, spoil)


if __name__ == "__main__":
    import sys

    raise SystemExit(bench.main(["fetchers", *sys.argv[1:]], "fetchers.py"))
