"""Ways to compute an op: Iris's algorithms, and those that they are compared with.

* ``nccl``: a collective of ``torch.distributed`` (NCCL, RCCL, or gloo in the simulator) and ``torch.matmul``;
* ``torch_symm_mem``: PyTorch's own fused ops on symmetric memory, on GPUs; there is none for an all-reduce, so that is
  ``torch.matmul`` and PyTorch's one-shot or two-shot all-reduce, chosen by size as torch.compile does;
* ``matmul``: the local matmul alone, by ``torch.matmul``, without communication.

An algorithm of Iris runs with the best options known for it. Other options follow its name, as the fields of
:class:`iris.ops.FusedConfig` that it uses: ``hbm_buffer+comm_sms=32+k_per_flag=8``. ``untuned``, which runs only on
request, is what ``auto`` takes without tuned rows: next to ``auto`` it shows what these gain.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from iris import ops
from iris.bench.accuracy import roundings_of_sum
from iris.bench.axes import parse_values
from iris.bench.cases.operands import ROUNDINGS_OF_A_MATMUL, Operands
from iris.bench.distributed import all_gather, process_group, reduce_scatter
from iris.bench.state import State
from iris.context import Iris
from iris.errors import ArgumentError
from iris.ops import FusedConfig, pick_config
from iris.ops.algorithms import ALL_REDUCE, GATHER, LOCAL, REDUCE_SCATTER, SCATTER
from iris.ops.candidates import options_of
from iris.ops.config import OF_TILE
from iris.ops.obstacles import obstacle
from iris.ops.pick import model_pick
from iris.ops.target import target_of
from iris.results import COMPARATORS, MATMUL, OPPONENTS, PICKED

NCCL = OPPONENTS[0]
AUTO, UNTUNED = PICKED
STREAM_K = {"stream_k_one_tile": False, "stream_k_two_tiles": True}
"""Ways of the local matmul with Stream-K, and whether they split up to two tiles per program."""
_ONE_SHOT_NBYTES = 128 << 10
"""The most that PyTorch sums in one shot: ``one_shot_all_reduce_threshold_bytes`` of ``torch._inductor.config``."""


@dataclass(frozen=True)
class Way:
    """How an op is computed.

    Attributes:
        call: launches it.
        result: returns what it has computed.
        roundings: how often it may round a sum to the dtype of the output.
        local: whether the result is the local matmul's, not the op's.
        refresh: copies A to where the way needs it; call it after A has been drawn anew.
        config: the config of an op of Iris, as far as it is known before a call; None for others.
        a: the copy of A that the way reads; None: the operands' own.
    """

    call: Callable[[], object]
    result: Callable[[], torch.Tensor]
    roundings: float
    local: bool = False
    refresh: Callable[[], object] = lambda: None
    config: FusedConfig | None = None
    a: torch.Tensor | None = None


def ways_of(op: str) -> tuple[str, ...]:
    """The names of all ways to compute ``op``, Iris's own first."""
    own = (AUTO, *ops.ALGORITHMS[op])
    return (*own, *STREAM_K, MATMUL) if op == LOCAL else (*own, *COMPARATORS)


def with_options(op: str, config: FusedConfig, options: str, unsettled: Collection[str] = ()) -> FusedConfig:
    """``config`` with fields replaced as ``options`` says: ``comm_sms=32+k_per_flag=8``.

    Raises:
        ArgumentError: ``options`` has another form; or it changes the value of a field that the algorithm does not use
            and that is not ``unsettled``: times would differ by noise only.
    """
    known = [field.name for field in fields(FusedConfig) if field.name != "algorithm"]
    used = options_of(op, config.algorithm) if config.algorithm in ops.ALGORITHMS[op] else known
    given: dict[str, Any] = {}
    for option in filter(None, options.split("+")):
        name, _, text = option.partition("=")
        if name not in known or not text:
            fix = f"FIELD is one of {', '.join(used)}."
            raise ArgumentError(op, "options behind an algorithm", "FIELD=VALUE, of FusedConfig", option, fix)
        given[name] = None if text == "None" else parse_values(name, text)[0]
        if name not in (*used, *unsettled) and given[name] != getattr(config, name):
            argument, fix = f"options behind {config.algorithm}", f"It has {', '.join(used)}."
            raise ArgumentError(op, argument, f"what {config.algorithm} has a use for", option, fix)
    return config.with_fields(given)


def check_options(name: str, options: str, *, op: str) -> None:
    """Refuse options that the algorithm ``name`` of ``op`` takes on no device.

    Raises:
        ArgumentError: there is no such field or value, or the algorithm does not use the field. Fields of the tile pass
            here: they may repeat the values of the best config, which is not known yet.
    """
    plain = FusedConfig(ops.ALGORITHMS[LOCAL][0] if name in STREAM_K else name)
    config = with_options(op, plain, options, OF_TILE)
    config.check(op, (config.algorithm,), sys.maxsize)


def way(state: State, operands: Operands, name: str) -> Way:
    """The way called ``name``; skips the point if there is none."""
    known = (*ways_of(operands.op), UNTUNED)
    named, _, options = name.partition("+")
    if named not in known:
        state.skip(f"{operands.op} has no algorithm {named}; it has {', '.join(known)}")
    if options and named in (AUTO, UNTUNED, *COMPARATORS):
        state.skip(f"{named} has no options")
    if name in COMPARATORS:
        if operands.dtype == torch.int8 and (reason := _int8_obstacle(operands, name)):
            state.skip(f"{name}: {reason}")
        if name == MATMUL:
            return _matmul(operands)
        return _nccl(operands) if name == NCCL else _symm_mem(state, operands)
    return _iris(state, operands, name)


def _int8_obstacle(operands: Operands, name: str) -> str:
    """Why the library does not multiply these int8 matrices; empty text if it does."""
    if name not in (NCCL, MATMUL):
        return "takes no int8"
    on_gpu = operands.ctx.backend_name != "sim"
    if on_gpu and (operands.m <= 16 or operands.n % 8 or operands.k % 8):
        return "torch._int_mm takes more than 16 rows, and N and K that are multiples of 8"
    return ""


def _iris(state: State, operands: Operands, name: str) -> Way:
    config = None if name == AUTO else _config(operands, name)
    if config is not None:
        config.check(operands.op, ops.ALGORITHMS[operands.op], operands.ctx.num_sms, operands.dtype)
    if config is not None and (reason := obstacle(operands.problem, config, target_of(operands.ctx))) is not None:
        state.skip(f"{name}: {reason}")
    used = config or pick_config(operands.problem, target_of(operands.ctx))
    return Way(partial(operands.call, config), lambda: operands.output, operands.roundings_by(used), config=used)


def _config(operands: Operands, name: str) -> FusedConfig:
    """The best config that is known for the algorithm in ``name``, changed by the options that follow it there."""
    target, (name, _, options) = target_of(operands.ctx), name.partition("+")
    if name == UNTUNED:
        return model_pick(operands.problem, target)
    if operands.op != LOCAL:
        return with_options(operands.op, pick_config(operands.problem, target, name), options)
    picked = pick_config(operands.problem, target, ops.ALGORITHMS[LOCAL][0])
    split: dict[str, Any] = {"stream_k": name in STREAM_K}
    if name in STREAM_K:
        split["two_tiles"] = STREAM_K[name]
    return with_options(operands.op, replace(picked, **split), options)


def _matmul(operands: Operands) -> Way:
    a, out = operands.gathered(), operands.local_output
    return Way(lambda: operands.multiply(a, out), lambda: out, ROUNDINGS_OF_A_MATMUL, local=True, a=a)


def _nccl(operands: Operands) -> Way:
    process_group(operands.ctx)
    calls = {
        GATHER: _nccl_gather,
        SCATTER: _nccl_scatter,
        REDUCE_SCATTER: _nccl_reduce_scatter,
        ALL_REDUCE: _nccl_all_reduce,
    }
    return Way(calls[operands.op](operands), lambda: operands.output, operands.roundings)


def _nccl_gather(operands: Operands) -> Callable[[], None]:
    full = operands.a.new_empty(operands.m, operands.k)
    shard, whole = _sent(operands.a), _sent(full)
    gather = _gather_columns(shard, whole) if operands.gather_dim == 1 else partial(all_gather, whole, shard)

    def call() -> None:
        gather()
        operands.multiply(full, operands.output)

    return call


def _gather_columns(shard: torch.Tensor, full: torch.Tensor) -> Callable[[], None]:
    """A function that gathers all ranks' ``shard`` side by side in ``full``. The collective puts them one below the
    other first. (``torch.distributed.all_gather``, which takes a list, would also do that with NCCL, and then copy.)"""
    rows, world_size = len(shard), full.shape[1] // shard.shape[1]
    below = shard.new_empty(world_size * rows, shard.shape[1])
    parts = below.split(rows)

    def call() -> None:
        all_gather(below, shard)
        torch.cat(parts, dim=1, out=full)

    return call


def _sent(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` as collectives take it: fp8 is sent as bytes, as not all collectives know it."""
    return matrix.view(torch.uint8) if matrix.dtype == torch.float8_e4m3fn else matrix


def _nccl_scatter(operands: Operands) -> Callable[[], None]:
    columns = operands.output.new_empty(operands.m, operands.n)
    gather = _gather_columns(columns, operands.output)

    def call() -> None:
        operands.multiply(operands.a, columns)
        gather()

    return call


def _nccl_reduce_scatter(operands: Operands) -> Callable[[], None]:
    product = operands.output.new_empty(operands.m, operands.n)

    def call() -> None:
        operands.multiply(operands.a, product)
        reduce_scatter(operands.output, product)

    return call


def _nccl_all_reduce(operands: Operands) -> Callable[[], None]:
    def call() -> None:
        operands.multiply(operands.a, operands.output)
        dist.all_reduce(operands.output)

    return call


def _symm_mem(state: State, operands: Operands) -> Way:
    if operands.ctx.backend_name == "sim":
        state.skip("torch.ops.symm_mem needs GPUs")
    if operands.op == SCATTER:
        state.skip("torch.ops.symm_mem has no matmul + gather of columns")
    from torch.distributed import _symmetric_memory  # noqa: F401  (registers torch.ops.symm_mem)

    group = process_group(operands.ctx).group_name
    made: list[torch.Tensor] = []
    if operands.op == GATHER:
        a = _symmetric(operands.ctx, operands.a.shape, operands.dtype)
        fused_gather = _fused_gather(operands, a, group)

        def gather() -> None:
            made[:] = fused_gather()[1]

        sums = roundings_of_sum(operands.ctx.world_size) if operands.gather_dim == 1 else 0  # parts are added in turn
        return Way(gather, lambda: made[0], operands.roundings + sums, refresh=lambda: a.copy_(operands.a), a=a)
    if operands.op == REDUCE_SCATTER:
        fused_sum = _fused_reduce_scatter(operands, group)

        def scatter() -> None:
            made[:] = [fused_sum()]

        return Way(scatter, lambda: made[0], operands.roundings)
    total = _symmetric(operands.ctx, (operands.m, operands.n), operands.output.dtype)
    one_shot = total.nbytes <= _ONE_SHOT_NBYTES

    def all_reduce() -> None:
        operands.multiply(operands.a, total)
        if one_shot:
            torch.ops.symm_mem.one_shot_all_reduce_out(total, "sum", group, operands.output)
        else:
            torch.ops.symm_mem.two_shot_all_reduce_(total, "sum", group)

    return Way(all_reduce, lambda: operands.output if one_shot else total, operands.roundings)


def _fused_gather(operands: Operands, a: torch.Tensor, group: str) -> Callable[[], Any]:
    """PyTorch's fused gather of ``a`` and matmul, with scales if the operands have them."""
    fused, b, dim = torch.ops.symm_mem, [operands.b], operands.gather_dim
    if not operands.scales:
        return partial(fused.fused_all_gather_matmul, a, b, dim, group)
    scale_a, scale_b = operands.scales.values()
    no_bias, no_scale, made, fast = [None], [None], [operands.output.dtype], [True]
    return partial(
        fused.fused_all_gather_scaled_matmul, a, b, scale_a, [scale_b], dim, group, no_bias, no_scale, made, fast
    )


def _fused_reduce_scatter(operands: Operands, group: str) -> Callable[[], Any]:
    """PyTorch's fused matmul and reduce-scatter, with scales if the operands have them."""
    fused, a, b = torch.ops.symm_mem, operands.a, operands.b
    if not operands.scales:
        return partial(fused.fused_matmul_reduce_scatter, a, b, "sum", 0, group)
    return partial(
        fused.fused_scaled_matmul_reduce_scatter, a, b, *operands.scales.values(), "sum", 0, 0, group,
        [operands.m, operands.n], out_dtype=operands.output.dtype, use_fast_accum=True,
    )  # fmt: skip


_buffers: dict[int, torch.Tensor] = {}


def _symmetric(ctx: Iris, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Symmetric memory of PyTorch, kept by power-of-two sizes, as PyTorch does not always release it when it is
    freed."""
    from torch.distributed import _symmetric_memory as symm_mem

    nbytes = math.prod(shape) * dtype.itemsize
    size = 1 << max(16, (nbytes - 1).bit_length())
    if size not in _buffers:
        _buffers[size] = symm_mem.empty(size, dtype=torch.uint8, device=ctx.device)
        symm_mem.rendezvous(_buffers[size], process_group(ctx).group_name)
    return _buffers[size][:nbytes].view(dtype).view(*shape)
