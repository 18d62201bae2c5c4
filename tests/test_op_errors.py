"""Bad arguments of ops: they are refused before anything is launched, on every rank, by an error that names op,
argument, what was expected and what was got."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from ops_inputs import (
    ALL_REDUCE,
    GATHER,
    LOCAL,
    REDUCE_SCATTER,
    SCATTER,
    SMALL,
    Trial,
    Way,
    Wrapper,
    dual,
    given_back,
    in_vmap,
    trial,
    ways,
)
from ranks import BACKEND, Failure, Ranks, context, failure_of, fresh, worlds
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import iris
from iris.device import tile
from iris.ops import ALGORITHMS, FusedConfig, Problem, choice, new_workspace, target
from iris.ops.gathering import pull_source
from iris.ops.launching import run
from iris.ops.operands import _share_memory, bias_kind
from iris.ops.plan import Plan
from iris.ops.room import GATHER_FLAGS
from iris.ops.scales import Scales

Change = Callable[[Trial], dict[str, Any]]
"""The arguments that a mistake replaces in a right call."""

ALL = tuple(Way(op, algorithms[0]) for op, algorithms in ALGORITHMS.items())
READ_BY_PEERS = (Way(GATHER, "pull"), Way(GATHER, "hbm_buffer", 1))
WRITTEN_BY_PEERS = tuple(way for way in ways(SCATTER, ALL_REDUCE))
TWO_KINDS = tuple(way for way in ways() if way.least_programs == 2)
COPIED = tuple(way for way in ways() if way.contiguous_rows)
STAGED = tuple(
    way
    for way in ways(GATHER, REDUCE_SCATTER, ALL_REDUCE)
    if way.algorithm != "pull" and (way.op, way.algorithm) != (ALL_REDUCE, "ring")
)
FLAGGED = (Way(GATHER, "push"), Way(SCATTER, "split"), Way(REDUCE_SCATTER, "push"), Way(ALL_REDUCE, "copy_engine"))


def configured(**fields: Any) -> Change:
    return lambda one: {"config": replace(SMALL, algorithm=one.way.algorithm, **fields)}


def elsewhere(matrix: torch.Tensor) -> torch.Tensor:
    """A copy off the symmetric heap."""
    return matrix.clone()


def in_b(one: Trial) -> dict[str, Any]:
    """An output in the memory of B."""
    both = one.b.new_empty(max(one.b.numel(), one.output.numel()))
    return {"b": both[: one.b.numel()].view(one.b.shape), "output": both[: one.output.numel()].view(one.output.shape)}


def of_8_bits(dtype: torch.dtype = torch.float8_e4m3fn, **others: Callable[[Trial], Any]) -> Change:
    """Operands of ``dtype``, and ``others``, each made from the trial."""
    return lambda one: {
        "a": one.a.to(dtype), "b": one.b.to(dtype), **{name: make(one) for name, make in others.items()},
    }  # fmt: skip


def in_scale(one: Trial) -> dict[str, Any]:
    """A scale in the memory of the output."""
    return {"scale_b": one.output.view(-1)[:1], **of_8_bits()(one)}


def inference_tensor(one: Trial) -> dict[str, Any]:
    with torch.inference_mode():
        return {"output": torch.empty_like(one.output)}


def nested(matrix: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that it is a prototype
        return torch.nested.nested_tensor([matrix])


@dataclass(frozen=True)
class Mistake:
    """A call that is refused: by which ops, what is wrong with it, and what the error says, with ``argument`` first."""

    ways: tuple[Way, ...]
    change: Change
    kind: str
    argument: str
    words: str
    tall: bool = False
    """Whether M is one more than a size that ranks can share evenly."""


MISTAKES = {
    "off heap": Mistake(
        READ_BY_PEERS, lambda one: {"a": elsewhere(one.a)}, "PlacementError", "A_sharded", "ctx.as_symmetric"
    ),
    "output off heap": Mistake(
        WRITTEN_BY_PEERS, lambda one: {"output": elsewhere(one.output)}, "PlacementError", "output", "ctx.empty"
    ),
    "dtype": Mistake(ALL, lambda one: {"a": one.a.double(), "b": one.b.double()}, "DTypeError", "A", "float64"),
    "dtypes differ": Mistake(ALL, lambda one: {"b": one.b.half()}, "DTypeError", "B", "float16"),
    "output dtype": Mistake(ALL, lambda one: {"output": one.output.half()}, "DTypeError", "output", "float16"),
    "three dimensions": Mistake(ALL, lambda one: {"b": one.b[None]}, "ShapeError", "B", "2 dimensions"),
    "no column": Mistake(ALL, lambda one: {"b": one.b[:, :0]}, "ShapeError", "B", "at least one"),
    "more columns than are counted": Mistake(
        ALL, lambda one: {"b": one.b[:, :1].expand(-1, (1 << 30) + 1)}, "ShapeError", "B", "at most 1073741824 rows"
    ),
    "depth": Mistake(ALL, lambda one: {"b": one.b[:-1]}, "ShapeError", "B", "rows of B"),
    "weight of a linear layer": Mistake(
        ALL, lambda one: {"b": one.b.T.contiguous()}, "ShapeError", "B", "as weight.t()"
    ),
    "unknown name": Mistake(
        ALL, lambda _: {"config": "fastest"}, "ArgumentError", "config", "a FusedConfig, or one of auto, "
    ),
    "config is an array": Mistake(
        ALL, lambda _: {"config": np.ones(2)}, "ArgumentError", "config", "an algorithm's name, or None, got ndarray"
    ),
    "trace is a tensor": Mistake(
        ALL, lambda one: {"trace": one.b}, "ArgumentError", "trace", "True, False or an iris.Trace, got tensor"
    ),
    "trace is an array": Mistake(
        ALL, lambda _: {"trace": np.ones(2)}, "ArgumentError", "trace", "True, False or an iris.Trace, got array"
    ),
    "output shape": Mistake(ALL, lambda one: {"output": one.output[:, :-1]}, "ShapeError", "output", "columns of B"),
    "bias shape": Mistake(ALL, lambda one: {"bias": one.output.new_zeros(5)}, "ShapeError", "bias", "(5,)"),
    "bias dtype": Mistake(
        ALL, lambda one: {"bias": one.output[0].half()}, "DTypeError", "bias", "float16"
    ),
    "bias strides": Mistake(
        ALL, lambda one: {"bias": one.output.new_zeros(2 * one.b.shape[1])[::2]}, "ShapeError", "bias", "contiguous"
    ),
    "bias shape and strides": Mistake(
        ALL, lambda one: {"bias": one.output.new_zeros(1).expand(5, 5)}, "ShapeError", "bias", "(per column) or"
    ),
    "bias is a list": Mistake(ALL, lambda one: {"bias": [1.0]}, "DTypeError", "bias", "list"),
    "scale of floats": Mistake(
        ALL, lambda one: {"scale_a": one.output.new_ones(1)}, "ArgumentError", "scale_a", "None: only torch.int8 and"
    ),
    "scale is a number": Mistake(ALL, of_8_bits(scale_b=lambda _: 0.5), "DTypeError", "scale_b", "float"),
    "scale dtype": Mistake(
        ALL, of_8_bits(scale_a=lambda one: one.output.new_ones(1).half()), "DTypeError", "scale_a", "float16"
    ),
    "scale shape": Mistake(
        ALL, of_8_bits(scale_a=lambda one: one.output.new_ones(5)), "ShapeError", "scale_a", "one for each row of A"
    ),
    "scale across": Mistake(
        ALL, of_8_bits(scale_b=lambda one: one.output.new_ones(one.b.shape[1], 1)), "ShapeError", "scale_b",
        "one for each column of B",
    ),
    "scale strides": Mistake(
        ALL, of_8_bits(scale_b=lambda one: one.output.new_ones(2 * one.b.shape[1])[::2]), "ShapeError", "scale_b",
        "contiguous",
    ),
    "scale in output": Mistake(ALL, in_scale, "ArgumentError", "output", "some of scale_b's"),
    "float of int8": Mistake(ALL, of_8_bits(torch.int8), "DTypeError", "output", "that scale_a or scale_b scales"),
    "whole numbers of fp8": Mistake(
        ALL, of_8_bits(output=lambda one: one.output.int()), "DTypeError", "output", "torch.bfloat16 or torch.float16"
    ),
    "not a tensor": Mistake(ALL, lambda one: {"b": [[1.0]]}, "DTypeError", "B", "list"),
    "gather_dim": Mistake(
        (Way(GATHER, "push"),), lambda _: {"gather_dim": "0"}, "ArgumentError", "gather_dim", "0, 1 or None, got '0'"
    ),
    "no gather_dim fits": Mistake(
        (Way(GATHER, "push"),), lambda one: {"gather_dim": None, "b": one.b[:-1]}, "ShapeError", "A_sharded",
        "columns (sharded by rows)",
    ),
    "gather_dim guessed": Mistake(
        (Way(GATHER, "push"),), lambda one: {"gather_dim": None, "b": one.b.repeat(one.ctx.world_size, 1)},
        "ShapeError", "output", "columns of B, A_sharded being taken as sharded by columns)",
    ),
    "uneven rows": Mistake(
        (*ways(REDUCE_SCATTER), *(way for way in ways() if way.even_rows)), lambda _: {}, "ShapeError", "A",
        "share evenly", tall=True,
    ),
    "rows that cannot be copied": Mistake(
        COPIED, lambda one: {"output": one.ctx.empty(*one.output.T.shape).T}, "ShapeError", "output", "contiguous"
    ),
    "output that overlaps": Mistake(
        ALL, lambda one: {"output": one.output[:1].expand(one.output.shape)}, "ShapeError", "output", "overlap"
    ),
    "output in B": Mistake(ALL, in_b, "ArgumentError", "output", "some of B's"),
    "inference tensor": Mistake(ALL, inference_tensor, "ArgumentError", "output", "inference"),
    "no memory": Mistake(ALL, lambda one: {"b": given_back(one.b)}, "ArgumentError", "B", "that has memory"),
    "wrapper": Mistake(ALL, lambda one: {"b": Wrapper(one.b)}, "ArgumentError", "B", "a Wrapper without"),
    "bias without memory": Mistake(
        ALL, lambda one: {"bias": given_back(one.output[:1])}, "ArgumentError", "bias", "that has memory"
    ),
    "in vmap": Mistake(ALL, lambda one: {"b": in_vmap(one.b)}, "ArgumentError", "B", "torch.func"),
    "bias in vmap": Mistake(
        ALL, lambda one: {"bias": in_vmap(one.output.new_zeros(one.output.shape[1]))}, "ArgumentError", "bias",
        "torch.func",
    ),
    "nested": Mistake(ALL, lambda one: {"b": nested(one.b)}, "ArgumentError", "B", "a nested one"),
    "negated": Mistake(
        ALL, lambda one: {"b": torch.complex(one.b, one.b).conj().imag}, "ArgumentError", "B", "resolve_neg"
    ),
    "sparse": Mistake(ALL, lambda one: {"b": one.b.to_sparse()}, "ArgumentError", "B", "dense"),
    "sparse bias": Mistake(ALL, lambda one: {"bias": one.output[0].to_sparse()}, "ArgumentError", "bias", "dense"),
    "algorithm": Mistake(
        ALL, lambda _: {"config": FusedConfig(algorithm="magic")}, "ArgumentError", "config.algorithm", "'magic'"
    ),
    "block size": Mistake(ALL, configured(block_size_m=48), "ArgumentError", "config.block_size_m", "power of two"),
    "endless groups": Mistake(
        ALL, configured(group_size_m=2**31 - 1), "ArgumentError", "config.group_size_m", "at most 4096"
    ),
    "too many programs": Mistake(
        ALL, lambda one: configured(num_sms=one.ctx.num_sms + 1)(one), "ArgumentError", "config.num_sms", "resident"
    ),
    "nobody computes": Mistake(
        TWO_KINDS, lambda one: configured(comm_sms=one.ctx.num_sms)(one), "ArgumentError", "config.comm_sms", "compute"
    ),
    "one program for two kinds": Mistake(
        TWO_KINDS, configured(num_sms=1), "ArgumentError", "config.num_sms", "at least 2"
    ),
    "more fetchers than programs": Mistake(
        (Way(GATHER, "hbm_buffer"),), configured(num_sms=2, first_stage_fetch_sms=3), "ArgumentError",
        "config.first_stage_fetch_sms", "at most 2",
    ),
    "layout": Mistake(
        (Way(GATHER, "hbm_buffer"),), configured(staged_a_layout="diagonal"), "ArgumentError", "config.staged_a_layout",
        "'diagonal'",
    ),
    "nothing at a time": Mistake(ALL, configured(num_chunks=0), "ArgumentError", "config.num_chunks", "positive"),
    "workspace of another op": Mistake(
        ALL, lambda one: {"workspace": new_workspace(one.ctx, "other", one.way.algorithm)}, "ArgumentError",
        "workspace", "for other",
    ),
    "workspace of another algorithm": Mistake(
        tuple(way for way in ALL if way.op != LOCAL),
        lambda one: {"workspace": new_workspace(one.ctx, one.way.op, "baseline")}, "ArgumentError", "workspace",
        ", baseline",
    ),
    "workspace is a number": Mistake(
        ALL, lambda _: {"workspace": 3, "config": None}, "ArgumentError", "workspace", "got int"
    ),
    "small workspace": Mistake(
        STAGED, lambda one: {"workspace": new_workspace(one.ctx, one.way.op, one.way.algorithm, 64, GATHER_FLAGS)},
        "ArgumentError", "workspace", "64 B",
    ),
    "few flags": Mistake(
        FLAGGED, lambda one: {"workspace": replace(enough(one), ready=enough(one).ready[:0])},
        "ArgumentError", "workspace", "0.",
    ),
}  # fmt: skip


def enough(one: Trial) -> Any:
    """A workspace large enough for any call here."""
    return one.ctx.workspace(
        ("enough", one.way), lambda: new_workspace(one.ctx, one.way.op, one.way.algorithm, 1 << 16, GATHER_FLAGS)
    )


def refused(case: str) -> dict[Way, tuple[Failure, bool]]:
    """The failure of each way's call, and whether the output is unchanged."""
    ctx, mistake, found = context(), MISTAKES[case], {}
    for way in mistake.ways:
        one = trial(ctx, way._replace(algorithm="two_shot") if mistake.tall else way, (8, 8, 16), torch.float32, seed=0)
        one.way = way
        arguments = {"output": one.output, "a": one.a, "b": one.b, "bias": None, **configured()(one)}
        if way.op == GATHER:
            arguments["gather_dim"] = way.gather_dim
        if mistake.tall:
            rows = one.a.shape[0] + 1
            arguments["a"] = one.a.new_zeros(rows, one.a.shape[1])
            arguments["output"] = ctx.empty(rows, one.b.shape[1]) if way.op == ALL_REDUCE else one.output
        arguments |= mistake.change(one)
        positional = [arguments.pop(name) for name in ("output", "a", "b", "bias")]
        failure = failure_of(lambda: getattr(ctx.ops, way.op)(*positional, **arguments))  # noqa: B023
        ctx.synchronize()
        found[way] = failure, bool(one.output.isnan().all())
    return found


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("case", MISTAKES)
def test_mistake(ranks: Ranks, case: str) -> None:
    mistake = MISTAKES[case]
    for found in ranks.run(refused, case):
        assert found
        for way, (failure, untouched) in found.items():
            assert failure.kind == mistake.kind, (str(way), failure)
            assert failure.message.startswith(f"{way.op}: {mistake.argument}"), failure.message
            assert mistake.words in failure.message, failure.message
            assert failure.took_s < 2
            assert untouched, way


def test_a_bias_of_one_dimension_is_one_per_column() -> None:
    """It is so for any number of rows: else at some numbers it would be taken for one per row."""
    assert bias_kind("op", torch.zeros(8), 8, 8) == bias_kind("op", torch.zeros(8), 6, 8) == tile.BIAS_COLUMN.value
    assert bias_kind("op", torch.zeros(6, 1), 6, 8) == tile.BIAS_ROW.value
    with pytest.raises(
        iris.ShapeError, match=r"op: bias: expected \[8\] .* or \[6, 1\] .*, got \(6,\)\. .*bias\[:, None\]"
    ):
        bias_kind("op", torch.zeros(6), 6, 8)


def sums_in_any_order(seed: int) -> list[Failure]:
    """``atomic`` while PyTorch must be deterministic: with floats, with whole numbers, and with a warning only."""
    ctx, found = context(), []
    for dtype, warn_only in ((torch.float32, False), (torch.int8, False), (torch.float32, True)):
        one = trial(ctx, Way(ALL_REDUCE, "atomic"), (8, 8, 16), dtype, seed)
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found.append(failure_of(one.run))
        finally:
            torch.use_deterministic_algorithms(False)
        told = ["atomic sums floats in any order" in str(warning.message) for warning in caught]
        assert any(told) is warn_only
        ctx.barrier()
    return found


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_sums_in_any_order_are_refused_where_pytorch_is_to_be_deterministic(ranks: Ranks, seed: int) -> None:
    for refused_, exact, warned in ranks.run(sums_in_any_order, seed):
        assert refused_.kind == "ArgumentError" and "torch.use_deterministic_algorithms" in refused_.message
        assert exact.kind == warned.kind == "nothing"


def sums_without_native_atomics(seed: int) -> Failure:
    ctx = context()
    one = trial(ctx, Way(ALL_REDUCE, "atomic"), (8, 8, 16), torch.int8, seed)
    with mock.patch.object(ctx._backend, "without_atomics", (1 - ctx.rank,)):
        return failure_of(one.run)


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_sums_at_a_peer_are_refused_where_its_link_loses_some(ranks: Ranks, seed: int) -> None:
    for rank, failure in enumerate(ranks.run(sums_without_native_atomics, seed)):
        assert failure.kind == "ArgumentError" and f"the link to rank {1 - rank} has no native" in failure.message


def fp8_without_units_for_it(seed: int) -> list[Failure]:
    """Failures of each op on a GPU that does not multiply fp8."""
    ctx, found = context(), []
    for way in ALL:
        one = trial(ctx, way, (8, 8, 16), torch.float8_e4m3fn, seed)
        with mock.patch("iris.ops.operands.multiplies_fp8", return_value=False):
            found.append(failure_of(one.run))
    return found


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_fp8_is_refused_where_the_gpu_does_not_multiply_it(ranks: Ranks, seed: int) -> None:
    for failures in ranks.run(fp8_without_units_for_it, seed):
        for way, failure in zip(ALL, failures, strict=True):
            name = "A_sharded" if way.op == GATHER else "A"
            assert failure.kind == "DTypeError"
            assert failure.message.startswith(f"{way.op}: {name}: expected one of torch.float16, ")
            assert "got torch.float8_e4m3fn. fp8 takes a GPU of compute capability 8.9" in failure.message


@pytest.mark.parametrize(
    ("backend", "capability", "there"), [("cuda", (8, 0), False), ("cuda", (8, 9), True), ("hip", (9, 4), True)]
)
def test_which_gpus_multiply_fp8(
    monkeypatch: pytest.MonkeyPatch, backend: str, capability: tuple[int, int], there: bool
) -> None:
    monkeypatch.setattr(target, "_capability", lambda device: capability)
    ctx = SimpleNamespace(backend_name=backend, device=torch.device("cuda", 0))
    assert target.multiplies_fp8(cast(Any, ctx)) is there


def dual_operands() -> list[tuple[str, Failure]]:
    """Failures of each op with each operand that has a tangent, by the name that the error must give."""
    ctx, found = context(), []
    for way in ALL:
        one = trial(ctx, way, (8, 8, 16), torch.float32, seed=0, bias="column")
        names = {"output": "output", "a": "A", "b": "B", "bias": "bias"}
        for name, argument in names.items():
            with forward_ad.dual_level():
                tensor = getattr(one, name)
                change: dict[str, Any] = {name: dual(tensor, torch.ones_like(tensor))}
                found.append((f"{way.op}: {argument}", failure_of(replace(one, **change).run)))
    return found


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_an_operand_with_a_tangent(ranks: Ranks) -> None:
    """Once the tangent was lost silently."""
    for found in ranks.run(dual_operands):
        assert len(found) == 4 * len(ALL)
        for begin, failure in found:
            assert failure.kind == "ArgumentError" and failure.message.startswith(begin), failure
            assert "dual" in failure.message and "pass tensor.detach()" in failure.message


class Product(torch.autograd.Function):
    """A @ B as a Function that supports forward mode."""

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return iris.ops.matmul(context(), a.new_empty(a.shape[0], b.shape[1]), a, b)

    @staticmethod
    def setup_context(call: Any, inputs: Any, output: torch.Tensor) -> None:
        call.save_for_forward(*inputs)

    @staticmethod
    @torch.no_grad()
    def jvp(call: Any, *tangents: Any) -> torch.Tensor:
        _, b = call.saved_tensors
        return iris.ops.matmul(context(), tangents[0].new_empty(tangents[0].shape[0], b.shape[1]), tangents[0], b)


def tangent_of_a_product(seed: int) -> float:
    device, numbers = context().device, torch.Generator().manual_seed(seed)
    a, b, tangent = (torch.randn(8, 8, generator=numbers).to(device) for _ in range(3))
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(Product.apply(dual(a, tangent), torch.nn.Parameter(b))).tangent
    return float((found - tangent @ b).abs().max())


@pytest.mark.parametrize("ranks", worlds(1, 2), indirect=True)
def test_a_function_of_ones_own_may_call_ops_in_forward_mode(ranks: Ranks, seed: int) -> None:
    assert max(ranks.run(tangent_of_a_product, seed)) < 1e-3


class Layer(torch.nn.Module):
    """What a user would trace: a layer that calls an op."""

    def __init__(self, one: Trial) -> None:
        super().__init__()
        self.one = one

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        replace(self.one, a=a).run()
        return self.one.output


def traced() -> list[tuple[str, Failure]]:
    ctx, found = context(), []
    for way in ALL:
        one = trial(ctx, way, (8, 8, 16), torch.float32, seed=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated
            found.append((way.op, failure_of(torch.jit.trace, Layer(one), one.a)))
        found.append((way.op, failure_of(make_fx(lambda a: replace(one, a=a).run()), one.a)))  # noqa: B023
        one.run()
        assert one.excess() <= 1
    return found


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_call_that_is_traced(ranks: Ranks) -> None:
    """A trace would not contain the call, and kernels once got shapes that are tensors."""
    for found in ranks.run(traced):
        for op, failure in found:
            assert failure.kind == "ArgumentError" and failure.message.startswith(f"{op}: A"), failure
            assert (
                re.search("outside of (torch.jit.trace|make_fx)", failure.message)
                and "leave it out of what is traced" in failure.message
            )


def memory_of_refused_calls() -> list[tuple[str, bool]]:
    """For outputs that the copy engine cannot copy: the failure, and whether the call had allocated memory before."""
    found = []
    for way in COPIED:
        with fresh() as ctx:
            one = trial(ctx, way, (8, 8, 16), torch.float32, seed=0)
            one.output = ctx.empty(*one.output.T.shape).T
            before = len(ctx._workspaces)
            found.append((failure_of(one.run).kind, len(ctx._workspaces) > before))
    return found


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_refused_call_makes_no_memory(ranks: Ranks) -> None:
    for found in ranks.run(memory_of_refused_calls):
        assert found == [("ShapeError", False)] * len(COPIED)


def names_algorithms() -> dict[str, str]:
    ctx, said = context(), {}
    for way in ALL:
        one = trial(ctx, way, (8, 8, 16), torch.float32, seed=0)
        one.way = way._replace(algorithm="magic")
        said[way.op] = failure_of(one.run).message
    return said


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_an_unknown_algorithm_is_told_the_known_ones(ranks: Ranks) -> None:
    for op, message in ranks.run(names_algorithms)[0].items():
        assert ", ".join(("auto", *ALGORITHMS[op])) in message


def the_said_workspace_fits(seed: int) -> list[float]:
    """Errors of calls with the workspace that the error about one that is too small says to make."""
    ctx, excesses = context(), []
    for way in (*STAGED, *FLAGGED):
        one = trial(ctx, way, (40, 24, 48), torch.float32, seed)
        failure = failure_of(one.run, SMALL, new_workspace(ctx, way.op, way.algorithm))
        if failure.kind == "nothing":
            continue
        call = failure.message.partition("Make it with ")[2].removesuffix(".")
        one.run(SMALL, eval(call, {"iris": iris, "ctx": ctx}))
        excesses.append(one.excess())
    return excesses


def captured_in_one_queue(seed: int) -> tuple[dict[str, str], float]:
    """The errors of refused calls, and the largest error of what runs instead, as in a capture for a single queue."""
    ctx, refused, excesses = context(), {}, []
    with mock.patch("iris.ops.choice._in_one_queue", return_value=True):
        for way in ways():
            one = trial(ctx, way, (8, 16, 16), torch.float32, seed)
            failure = failure_of(one.run)
            if failure.kind == "CaptureError":
                refused[str(way)] = failure.message
                one.run(None)
            excesses.append(one.excess())
    return refused, max(excesses)


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_copies_that_wait_for_a_kernel_are_not_captured_for_a_single_queue(ranks: Ranks, seed: int) -> None:
    for refused, excess in ranks.run(captured_in_one_queue, seed):
        assert set(refused) == {f"{op}-copy_engine" for op in (ALL_REDUCE, REDUCE_SCATTER, SCATTER)}
        assert all("where CUDA_DEVICE_MAX_CONNECTIONS=1" in message for message in refused.values())
        assert excess <= 1


@pytest.mark.parametrize(("value", "blocks"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_a_variable_that_is_off_blocks_no_launch(
    monkeypatch: pytest.MonkeyPatch, value: str | None, blocks: bool
) -> None:
    ctx: Any = SimpleNamespace(backend_name="cuda")
    for name in choice._BLOCKING:
        monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
    assert choice._blocking(ctx) == ("CUDA_LAUNCH_BLOCKING" if blocks else "")


@pytest.mark.parametrize(
    ("connections", "captured", "single"), [("1", True, True), ("1", False, False), ("8", True, False)]
)
def test_several_queues_take_any_capture(
    monkeypatch: pytest.MonkeyPatch, connections: str, captured: bool, single: bool
) -> None:
    ctx: Any = SimpleNamespace(backend_name="cuda")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    assert choice._in_one_queue(ctx) is single


def said_of_halves(seed: int) -> tuple[str, float]:
    """A gather by push uses halves of its staging memory in turns: some numbers of rows between two that fit do not."""
    ctx = context()
    one = trial(ctx, Way(GATHER, "push", 0), (32, 16, 32), torch.float32, seed)
    nbytes = 2 * 32 * ctx.world_size * 128
    failure = failure_of(one.run, SMALL, new_workspace(ctx, GATHER, "push", nbytes + 8, GATHER_FLAGS))
    call = failure.message.partition("Make it with ")[2].removesuffix(".")
    one.run(SMALL, eval(call, {"iris": iris, "ctx": ctx}))
    excess = one.excess()
    for more in (0, 128, 192, 384):
        one.run(SMALL, new_workspace(ctx, GATHER, "push", nbytes + more, GATHER_FLAGS))
        excess = max(excess, one.excess())
    return failure.message, excess


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_the_error_says_how_to_make_two_halves(ranks: Ranks, seed: int) -> None:
    for message, excess in ranks.run(said_of_halves, seed):
        assert "expected 16.2 KiB of staging memory and 65536 flags, got 16.0 KiB and 65536. Make" in message
        assert excess <= 1


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_the_error_says_how_to_make_the_workspace(ranks: Ranks, seed: int) -> None:
    for excesses in ranks.run(the_said_workspace_fits, seed):
        assert len(excesses) >= len(STAGED)
        assert max(excesses) <= 1


def misspelt() -> list[tuple[str, Failure, int]]:
    ctx, found = context(), []
    for op in ALGORITHMS:
        free = ctx.heap_free_bytes
        failure = failure_of(new_workspace, ctx, op, "two-shot")
        found.append((op, failure, free - ctx.heap_free_bytes))
    return found


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_workspace_of_a_misspelt_algorithm(ranks: Ranks) -> None:
    """Once it was made, and only the first call with it refused it."""
    for found in ranks.run(misspelt):
        for op, failure, lost in found:
            expected = f"new_workspace: algorithm: expected one of {op}: "
            assert failure.kind == "ArgumentError" and failure.message.startswith(expected), failure
            assert all(name in failure.message for name in ALGORITHMS[op]) and "got 'two-shot'" in failure.message
            assert not lost


def odd_workspaces() -> list[Failure]:
    ctx = context()
    sizes = (-1,), (4.5,), (True,), (4, "8"), (4, 2.5)
    return [
        *(failure_of(new_workspace, ctx, LOCAL, "local", *one) for one in sizes),
        *(failure_of(new_workspace, ctx, *names) for names in ((3, "local"), (["mine"], "local"), ("mine", None))),
    ]


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_a_workspace_of_no_size_or_name(ranks: Ranks) -> None:
    names = *["staging_nbytes"] * 3, *["num_flags"] * 2, "op", "op", "algorithm"
    for name, failure in zip(names, ranks.run(odd_workspaces)[0], strict=True):
        assert failure.kind == "ArgumentError" and failure.message.startswith(f"new_workspace: {name}: "), failure


def another_context() -> tuple[Failure, Failure, Failure]:
    """Failures of calls with another context's workspace, its output, and a view of its memory."""
    ctx = context()
    one, reduced = (
        trial(ctx, way, (8, 8, 16), torch.float32, seed=0) for way in (Way(LOCAL, "local"), Way(ALL_REDUCE, "auto"))
    )
    with fresh() as other:
        reduced.output = other.empty(*reduced.output.shape)
        workspace = new_workspace(other, LOCAL, "local")
        return (
            failure_of(one.run, SMALL, workspace),
            failure_of(reduced.run),
            failure_of(ctx.peer_view, reduced.output, 0),
        )


@pytest.mark.parametrize("ranks", worlds(1, 2), indirect=True)
def test_what_belongs_to_another_context(ranks: Ranks) -> None:
    for workspace, output, viewed in ranks.run(another_context):
        assert workspace.kind == "ArgumentError" and "on another context" in workspace.message
        for failure in (output, viewed):
            assert failure.kind == "PlacementError", failure
            assert "on the symmetric heap, got one on" in failure.message
            assert "on the heap of another context" in failure.message


def on_the_cpu() -> list[Failure]:
    ctx = context()
    found = []
    for way in ALL:
        one = trial(ctx, way, (8, 8, 16), torch.float32, seed=0)
        one.b = one.b.cpu()
        found.append(failure_of(one.run))
    return found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="all memory is the CPU's")
@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_matrix_on_another_device(ranks: Ranks) -> None:
    for failures in ranks.run(on_the_cpu):
        assert all(one.kind == "PlacementError" and "cpu" in one.message for one in failures)


def without_room(seed: int) -> tuple[dict[str, Failure], float]:
    """On a heap without room to stage A, an algorithm that is picked still runs; one that the caller names does not."""
    with fresh(1 << 20) as ctx:
        one = trial(ctx, Way(GATHER, "auto"), (100, 8, 700), torch.float32, seed)
        one.run()
        excess = one.excess()
        said = {name: failure_of(replace_way(one, name).run) for name in ALGORITHMS[GATHER] if name != "pull"}
        return said, excess


def replace_way(one: Trial, algorithm: str) -> Trial:
    return replace(one, way=one.way._replace(algorithm=algorithm))


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_heap_without_room_to_stage(ranks: Ranks, seed: int) -> None:
    for said, excess in ranks.run(without_room, seed):
        for name, failure in said.items():
            assert failure.kind == "HeapError"
            assert re.match(
                rf"{GATHER} by {name} keeps .*iB for staging, .*iB for flags\. zeros: .* heap_size=\d+", failure.message
            )
        assert excess <= 1


def advised(algorithm: str, heap_size: int) -> str:
    """The error of a gather, of an A that is not on the heap, about a heap of this size; "" if that is enough."""
    with fresh(heap_size) as ctx:
        rows, k, n = 128, 512, 8
        a, b = (torch.ones(shape, device=ctx.device) for shape in ((rows, k), (k, n)))
        output = torch.zeros(rows * ctx.world_size, n, device=ctx.device)
        failure = failure_of(lambda: ctx.ops.all_gather_matmul(output, a, b, config=algorithm))
        assert failure.message or bool((output == k).all())
        return failure.message


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("algorithm", ["auto", "low_latency", "push", "decomposed"])
def test_the_heap_that_is_advised_is_large_enough(ranks: Ranks, algorithm: str) -> None:
    """This includes "auto", which names the algorithm that needs least."""
    said = ranks.run(advised, algorithm, 1 << 18)[0]
    staging = {"auto": "512.0 KiB", "decomposed": "512.0 KiB"}.get(algorithm, "1.0 MiB")
    assert f"keeps {staging} for staging" in said and algorithm in (*said.split(), "auto")
    assert ranks.run(advised, algorithm, int(said.rpartition("heap_size=")[2].rstrip("."))) == ["", ""]


def test_columns_of_one_matrix_are_apart() -> None:
    whole = torch.zeros(4, 12)
    first, second, across = whole[:, :5], whole[:, 5:], whole[:, 4:]
    assert not _share_memory(first, second) and not _share_memory(second, first)
    assert _share_memory(first, across) and _share_memory(whole, whole[1:]) and _share_memory(whole, whole[:, 3])
    assert not _share_memory(first.T, second.T) and _share_memory(first.T, across.T)
    assert not _share_memory(whole[:, 0:8:2], whole[:, 1:9:2]) and _share_memory(whole[:, 0:8:2], whole[:, 2:10:2])
    assert not _share_memory(whole[:2], whole[2:]) and not _share_memory(whole, torch.zeros(4, 12))


def test_shared_memory_is_never_missed() -> None:
    """Checked for all views of a small matrix, against the elements themselves."""
    numbers = torch.arange(6 * 6)
    strides = (6, 1), (1, 6), (6, 2), (3, 1), (4, 2), (0, 1), (2, 2)
    views = [
        numbers.as_strided((rows, cols), (down, across), at)
        for rows, cols, (down, across), at in itertools.product((1, 2, 3), (1, 2, 4), strides, (0, 1, 2, 5))
        if (rows - 1) * down + (cols - 1) * across + at < len(numbers)
    ]
    for one, other in itertools.product(views, views):
        if set(one.flatten().tolist()) & set(other.flatten().tolist()):
            assert _share_memory(one, other), (one, other)


def places_that_differ(stride: bool) -> list[Failure]:
    """Outputs at the same place with other strides, or with the same strides at another place."""
    failures = []
    for op in (ALL_REDUCE, SCATTER):
        with fresh(1 << 20) as ctx:
            memory, cols = ctx.zeros(64 * 64), 32 if op == ALL_REDUCE else 16
            row = 64 if ctx.rank and stride else 32
            output = memory[0 if stride else 32 * ctx.rank :].as_strided((32, 32), (row, 1))
            a, b = (torch.ones(shape, device=ctx.device) for shape in ((32, 8), (8, cols)))
            failures.append(failure_of(lambda: getattr(ctx.ops, op)(output, a, b)))  # noqa: B023
    return failures


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("stride", [True, False])
def test_outputs_lie_alike_on_all_ranks(ranks: Ranks, stride: bool) -> None:
    for failures in ranks.run(places_that_differ, stride):
        for op, failure in zip((ALL_REDUCE, SCATTER), failures, strict=True):
            assert failure.kind == "RankMismatch" and failure.took_s < 2, failure
            ours, other = (
                ("with strides 32x1", "with strides 64x1") if stride else ("at heap offset 4096", "at heap offset 4224")
            )
            calls = f": rank 0: {op}(…, output {ours}); rank 1: {op}(…, output {other}). "
            assert calls + "Peers touch this operand: pass the same slice of the same ctx.empty on" in failure.message


def another_call_than_the_peers(gather: bool) -> Failure:
    """Rank 0 calls an op while the others call another one, or wait at a barrier."""
    with fresh(1 << 20) as ctx:
        output, rows = ctx.zeros(16, 24), torch.zeros(16 * ctx.world_size, 24, device=ctx.device)
        a, b = torch.ones(16, 8, device=ctx.device), torch.ones(8, 24, device=ctx.device)
        if ctx.rank == 0:
            return failure_of(lambda: ctx.ops.matmul_all_reduce(output, a, b))
        return failure_of((lambda: ctx.ops.all_gather_matmul(rows, a, b)) if gather else ctx.barrier)


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("gather", [False, True])
def test_another_call_than_the_peers_is_told_in_short(ranks: Ranks, gather: bool) -> None:
    """The sizes identify the call; two dozen fields of a config would hide them."""
    reduced = "matmul_all_reduce(m=16, n=24, k=8, dtype=torch.float32, …)"
    gathered = "all_gather_matmul(m=32, n=24, k=8, dtype=torch.float32, …)"
    for failure in ranks.run(another_call_than_the_peers, gather):
        assert failure.kind == "RankMismatch"
        calls = f": rank 0: {reduced}; rank 1: {gathered if gather else 'barrier'}. "
        assert calls + "Every rank must make the same Iris calls" in failure.message


def fake_operands() -> tuple[Failure, int]:
    """The failure with tensors that only stand for others, as for computing a model's shapes; and the number of
    warnings."""
    ctx = context()
    with warnings.catch_warnings(record=True) as told, FakeTensorMode():
        warnings.simplefilter("always")
        output, a, b = (torch.empty(16, 16, device=ctx.device) for _ in range(3))
        assert not ctx.is_symmetric(a)
        return failure_of(lambda: ctx.ops.matmul(output, a, b)), len(told)


@pytest.mark.skipif(BACKEND != "sim", reason="calls on GPUs ask for addresses before they look at operands")
@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_a_tensor_that_only_stands_for_others_is_refused_without_a_warning(ranks: Ranks) -> None:
    ((failure, warned),) = ranks.run(fake_operands)
    assert failure.kind == "ArgumentError" and "got a FakeTensor without" in failure.message and warned == 0


def unequal_parts() -> Failure:
    """Failure of parts with 43 and 42 columns of a matrix of 85."""
    with fresh(1 << 20) as ctx:
        depth = 43 - ctx.rank
        output, a, b = ctx.empty(16, 24), torch.ones(16, depth, device=ctx.device), torch.ones(depth, 24).to(ctx.device)
        return failure_of(lambda: ctx.ops.matmul_all_reduce(output, a, b, config="baseline"))


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_parts_that_are_not_equal_are_told_to_be_padded(ranks: Ranks) -> None:
    for failure in ranks.run(unequal_parts):
        assert failure.kind == "RankMismatch"
        told = (
            "rank 0: matmul_all_reduce(…, k=43); rank 1: matmul_all_reduce(…, k=42). Ranks' parts must be equally large"
        )
        assert told in failure.message


def untransposed_weight() -> list[Failure]:
    """Failures with weights as a Linear has them, if ``output`` says how many columns B should have, and if not."""
    ctx = context()
    a, output, weight = (torch.zeros(shape, device=ctx.device) for shape in ((16, 32), (16, 48), (48, 32)))
    wide, gathered = (torch.zeros(shape, device=ctx.device) for shape in ((16, 96), (32, 48)))
    return [
        failure_of(ctx.ops.matmul_all_reduce, output, a, weight),
        failure_of(ctx.ops.matmul_all_scatter, wide, a, weight),
        failure_of(lambda: ctx.ops.all_gather_matmul(gathered, a, weight, gather_dim=0)),
        failure_of(ctx.ops.matmul_reduce_scatter, output[:8, :40], a, weight),
        failure_of(ctx.ops.matmul_all_reduce, output, a, weight[:, :31].t()),
    ]


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_shape_that_is_asked_for_would_do(ranks: Ranks) -> None:
    fix = ". B is [K, N]: pass the weight of a torch.nn.Linear as weight.t()."
    said = [
        "(32, 48) (rows of B = columns of A), got (48, 32)" + fix,
        "(32, 48) (rows of B = columns of A), got (48, 32)" + fix,
        "(32, 48) (rows of B = columns of the gathered A), got (48, 32)" + fix,
        "32 rows (rows of B = columns of A), got (48, 32)" + fix,
        "32 rows (rows of B = columns of A), got (31, 48)",
    ]
    for failures in ranks.run(untransposed_weight):
        for failure, words in zip(failures, said, strict=True):
            assert failure.kind == "ShapeError" and failure.message.endswith(f": B: expected {words}"), failure


def layouts_that_differ(way: Way, seed: int) -> Failure:
    """B has contiguous rows on rank 0 and contiguous columns on the others."""
    with fresh(1 << 20) as ctx:
        one = trial(ctx, way, (16, 16, 32), torch.float32, seed)
        b = one.b.contiguous() if ctx.rank == 0 else one.b.t().contiguous().t()
        return failure_of(replace(one, b=b).run)


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("way", [Way(GATHER, "push"), Way(SCATTER, "push"), Way(ALL_REDUCE, "ring")], ids=str)
def test_the_rows_of_b_are_contiguous_on_all_ranks_or_on_none(ranks: Ranks, way: Way, seed: int) -> None:
    for failure in ranks.run(layouts_that_differ, way, seed):
        assert failure.kind == "RankMismatch" and "transposed_b=True" in failure.message
    assert "contiguous on all ranks or on none" in " ".join(str(getattr(iris.ops, way.op).__doc__).split())


def a_place_of_another_call() -> list[Failure]:
    """Calls in which rank 0 has its rows at the place where all had them in an earlier call, but rank 1 elsewhere."""
    failures = []
    for algorithm in ("pull", "hbm_buffer"):
        with fresh(1 << 21) as ctx:
            memory, b = ctx.zeros(32 * 8), torch.ones(8, 16, device=ctx.device)
            for rows, first in ((16, 0), (8, 8 * ctx.rank)):
                a = memory[8 * first :][: 8 * rows].view(rows, 8)
                output = torch.zeros(rows * ctx.world_size, 16, device=ctx.device)
                config = replace(SMALL, algorithm=algorithm)
                failures.append(failure_of(lambda: ctx.ops.all_gather_matmul(output, a, b, config=config)))  # noqa: B023
    return failures


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_rows_that_peers_read_lie_alike_on_all_ranks(ranks: Ranks) -> None:
    for failures in ranks.run(a_place_of_another_call):
        assert [failure.kind for failure in failures] == ["nothing", "RankMismatch"] * 2, failures
        assert all("(…, A_sharded at heap offset " in failure.message for failure in failures[1::2])


def many_workspaces() -> int:
    with fresh(1 << 21) as ctx:
        free = ctx.heap_free_bytes
        output, a, b = ctx.zeros(16, 16), torch.ones(16, 8, device=ctx.device), torch.ones(8, 16, device=ctx.device)
        for _ in range(20):  # together more than the heap holds
            workspace = new_workspace(ctx, ALL_REDUCE, "two_shot", 1 << 17)
            for _ in range(3):  # launched, captured, replayed
                ctx.ops.matmul_all_reduce(output, a, b, config="two_shot", workspace=workspace)
            ctx.synchronize()
            del workspace
        return free


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_calls_do_not_keep_the_workspace(ranks: Ranks) -> None:
    ranks.run(many_workspaces)


@pytest.mark.parametrize("op", ALGORITHMS)
def test_an_op_needs_a_context(op: str) -> None:
    with pytest.raises(
        iris.ArgumentError, match=f"{op}: ctx: expected a context, as iris.iris.. returns it, got nothing"
    ):
        getattr(iris.ops, op)(None, torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2))


def test_memory_for_ops_needs_a_context() -> None:
    operands: list[Any] = [torch.ones(2, 2), torch.ones(2, 2)]
    with pytest.raises(
        iris.ArgumentError, match=r"new_workspace: ctx: expected a context, as iris\.iris\(\) returns it"
    ):
        new_workspace(cast(Any, None), "mine", "local")
    with pytest.raises(iris.ArgumentError, match=r"_hbm_buffer_preamble: ctx: expected a context, as iris\.iris\(\) "):
        iris.ops.all_gather_matmul_hbm_buffer_preamble(cast(Any, "cuda"), *operands)


def plain_sink(*_: object) -> None:
    """A part that lacks its decorator."""


@triton.jit
def idle_sink(handle, c, slots, acc, bias_ptr, tile, flags, epoch, SITE: tl.constexpr, BIAS: tl.constexpr):
    """A sink that stores nothing."""


def mistakes_of_an_own_op() -> list[Failure]:
    """Failures of a user's op that gets arguments that do not fit together; the last call is right."""
    ctx = context()
    problem = Problem("mine", 24, 16, 32, torch.float32, ctx.world_size)
    own, b = torch.ones(24, 32, device=ctx.device), torch.ones(32, 16, device=ctx.device)
    of_fp8, of_blocks = replace(problem, dtype=torch.float8_e4m3fn), Scales(own.new_ones(24, 1), own.new_ones(1, 1))
    right: dict[str, Any] = {
        "problem": problem, "plan": Plan(0, meet=False, alone=True), "output": torch.empty(24, 16, device=ctx.device),
        "own": own, "b": b, "bias": None,
        "bias_is": 0, "config": SMALL, "workspace": new_workspace(ctx, "mine", "local"), "trace": None,
    }  # fmt: skip
    other = iris.iris(1 << 16)
    wrong: list[dict[str, Any]] = [
        {"problem": replace(problem, m=99)},
        {"problem": replace(problem, k=64)},
        {"problem": replace(problem, dtype=torch.float16)},
        {"output": torch.empty(3, 16, device=ctx.device)},
        {"b": torch.ones(16, 32, device=ctx.device)},
        {"own": torch.ones(24, 32, device=ctx.device, requires_grad=True)},
        {"bias": torch.ones(5, device=ctx.device), "bias_is": 2},
        {"bias_is": 1},
        {"bias": torch.ones(16, device=ctx.device)},
        {"bias": torch.ones(32, device=ctx.device)[::2], "bias_is": 2},
        {"bias": torch.ones(16, device=ctx.device, dtype=torch.float16), "bias_is": 2},
        {"bias_is": 3},
        {"config": "pull"},
        {"config": replace(SMALL, num_sms=1 << 20)},
        {"workspace": None},
        {"trace": True},
        {"workspace": new_workspace(ctx, "yours", "local")},
        {"workspace": new_workspace(other, "mine", "local")},
        {"plan": replace(right["plan"], sink=plain_sink)},
        {"plan": replace(right["plan"], source="local_source")},
        {"plan": replace(right["plan"], schedule=None)},
        {"plan": replace(right["plan"], sink=idle_sink), "output": own[:3]},
        {"plan": replace(right["plan"], sink=idle_sink), "output": own[0]},
        {"plan": replace(right["plan"], sink=idle_sink), "output": np.empty((24, 16))},
        {"problem": replace(problem, world_size=ctx.world_size + 1)},
        {"plan": replace(right["plan"], source=pull_source)},
        {"plan": replace(right["plan"], source=pull_source, alone=False, own_epochs=True)},
        {"plan": replace(right["plan"], own_epochs=True, gate=True)},
        {"scales": torch.ones(24, device=ctx.device)},
        {"scales": Scales(a=torch.ones(16, device=ctx.device))},
        {"scales": Scales(b=torch.ones(32, device=ctx.device)[::2])},
        {"scales": Scales(b=torch.ones(16, device=ctx.device, dtype=torch.float16))},
        {"scales": Scales(torch.ones(24, device=ctx.device), torch.ones(1, device=ctx.device))},
        {"problem": of_fp8, "own": own.to(of_fp8.dtype), "b": b.to(of_fp8.dtype), "scales": of_blocks},
        {"scales": of_blocks},
        {"problem": of_fp8, "scales": of_blocks, "config": replace(SMALL, block_size_k=256)},
        {"problem": of_fp8, "scales": of_blocks, "plan": replace(right["plan"], segments=2)},
        {"own": own[:12], "plan": replace(right["plan"], shards=2, sharded=True)},
        {"problem": replace(problem, m=25), "own": own[:12], "plan": replace(right["plan"], shards=2, sharded=True)},
        {"problem": replace(problem, k=33), "own": own[:, :16], "plan": replace(right["plan"], segments=2)},
        {},
    ]
    with other:
        return [failure_of(lambda given=given: run(ctx, **{**right, **given})) for given in wrong]


@pytest.mark.parametrize("ranks", worlds(1, 2), indirect=True)
def test_an_own_op_that_is_given_what_does_not_belong_together(ranks: Ranks) -> None:
    expected = [
        ("ShapeError", "mine: own: expected (99, 32)"),
        ("ShapeError", "mine: own: expected (24, 64)"),
        ("DTypeError", "mine: own: expected torch.float16, as problem says, got torch.float32"),
        ("ShapeError", "mine: output: expected (24, 16)"),
        ("ShapeError", "mine: b: expected (32, 16)"),
        ("ArgumentError", "mine: own: expected a tensor that needs no gradient"),
        ("ShapeError", "mine: bias: expected 16 numbers, as bias_is = 2, got 5"),
        ("ShapeError", "mine: bias: expected 24 numbers, as bias_is = 1, got None"),
        ("ShapeError", "mine: bias: expected None, as bias_is = 0, got 16"),
        ("ShapeError", "mine: bias: expected a contiguous tensor, got strides (2,)"),
        ("DTypeError", "mine: bias: expected torch.float32, as output has, got torch.float16"),
        ("ArgumentError", "mine: bias_is: expected 0, 1 or 2, got 3"),
        ("ArgumentError", "mine: config: expected a FusedConfig, got 'pull'"),
        ("ArgumentError", "mine: config.num_sms: expected at most"),
        ("ArgumentError", "mine: workspace: expected a FusedWorkspace, got None"),
        ("ArgumentError", "mine: trace: expected None, or an iris.Trace of one's own, got True"),
        ("ArgumentError", "mine: workspace: expected one made for mine on this context, got FusedWorkspace(yours, "),
        ("ArgumentError", "mine: workspace: expected one made for mine on this context, got FusedWorkspace(mine, "),
        ("ArgumentError", "mine: plan.sink: expected a @triton.jit function, got plain_sink"),
        ("ArgumentError", "mine: plan.source: expected a @triton.jit function, got 'local_source'"),
        ("ArgumentError", "mine: plan.schedule: expected a @triton.jit function, got None"),
        ("nothing", ""),
        ("ShapeError", "mine: output: expected 2 dimensions, got 1: (32,)"),
        ("DTypeError", "mine: output: expected a tensor, got ndarray"),
        ("ArgumentError", "mine: problem.world_size: expected "),
        ("ArgumentError", "mine: plan.alone: expected False with pull_source"),
        ("ArgumentError", "mine: plan.own_epochs: expected False with pull_source"),
        ("ArgumentError", "mine: plan.own_epochs: expected False with gate"),
        ("ArgumentError", "mine: scales: expected a Scales, got tensor("),
        ("ShapeError", "mine: scales.a: expected one number, or 24 that are contiguous, by problem, got (16,)"),
        ("ShapeError", "mine: scales.b: expected one number, or 16 that are contiguous, by problem, got (16,) with"),
        ("DTypeError", "mine: scales.b: expected torch.float32, got torch.float16"),
        ("nothing", ""),
        ("nothing", ""),
        ("DTypeError", "mine: problem.dtype: expected torch.float8_e4m3fn, as blocks have scales, got torch.float32"),
        ("ArgumentError", "mine: config.block_size_k: expected at most 128, as blocks have scales, got 256"),
        ("ShapeError", "mine: problem.k: expected a multiple of 128 columns for each of 2 ranks"),
        ("ShapeError", "mine: own: expected (24, 32) (all rows of A, by problem), got (12, 32)"),
        ("ShapeError", "mine: problem.m: expected a multiple of 2, as ranks share it by plan, got 25"),
        ("ShapeError", "mine: problem.k: expected a multiple of 2, as ranks share it by plan, got 33"),
        ("nothing", ""),
    ]
    for failures in ranks.run(mistakes_of_an_own_op):
        for failure, (kind, words) in zip(failures, expected, strict=True):
            assert failure.kind == kind and failure.message.startswith(words), failure


@pytest.mark.parametrize("op", [op for op in ALGORITHMS if op != "matmul"])
def test_on_amd_auto_leaves_out_what_runs_beside_a_kernel(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in choice._BLOCKING:
        monkeypatch.delenv(name, raising=False)
    here, there = (choice._allowed(cast(Any, SimpleNamespace(backend_name=one)), op, False) for one in ("sim", "hip"))
    assert set(here) - set(there) == set(here) & {"copy_engine", "decomposed", "ring", "streams"}


def test_a_program_on_amd_has_at_most_16_waves() -> None:
    ctx, problem = (
        cast(Any, SimpleNamespace(backend_name="hip", num_sms=304)),
        Problem(ALL_REDUCE, 64, 64, 64, torch.float32, 2),
    )
    for warps in (16, 32):
        config = FusedConfig("two_shot", num_warps=warps)
        failure = failure_of(choice._chosen, ctx, problem, config, None, False, bool, False, 0)
        assert failure.kind == ("nothing" if warps == 16 else "ArgumentError"), failure
    assert "config.num_warps: expected at most 16 on AMD, got 32" in failure.message
