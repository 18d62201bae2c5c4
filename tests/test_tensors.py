"""Tensors on the symmetric heap: torch's signatures, torch's answers, and memory that comes back."""

from __future__ import annotations

import gc
import random
import subprocess
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from ops_inputs import Wrapper, dual, given_back, in_vmap
from ranks import Failure, Ranks, assert_close, context, failure_of, fresh, worlds
from torch.autograd import forward_ad
from warm import python

import iris
from iris import wire

pytestmark = pytest.mark.timeout(120)

TWO = pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)

DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
Call = tuple[str, tuple[Any, ...], dict[str, Any]]

SAME_AS_TORCH: list[Call] = [
    ("zeros", (2, 3), {}),
    ("zeros", ((2, 3),), {}),
    ("zeros", ([4],), {}),
    ("zeros", (torch.Size([2, 1, 2]),), {}),
    ("zeros", (0,), {}),
    ("zeros", ((3, 0, 2),), {}),
    ("zeros", ((),), {}),
    *((name, (), {"size": size}) for name in ("zeros", "ones") for size in ((2, 3), [4], torch.Size([5]))),
    ("zeros", (torch.tensor(2), 3), {}),
    ("full", (), {"size": (2,), "fill_value": 3}),
    *(("zeros", (5,), {"dtype": dtype}) for dtype in DTYPES),
    ("ones", (2, 3), {}),
    *(("ones", ((7,),), {"dtype": dtype}) for dtype in DTYPES),
    ("full", ((2, 3), 7), {}),
    ("full", ((2, 3), 7.5), {}),
    ("full", ((2, 3), True), {}),
    ("full", ((), -1), {}),
    ("full", ((2,), float("nan")), {"dtype": torch.bfloat16}),
    *(("full", ((3,), 1), {"dtype": dtype}) for dtype in DTYPES),
    ("arange", (7,), {}),
    ("arange", (), {"end": 5}),
    ("arange", (), {"start": 2, "end": 5.5, "step": 2}),
    ("arange", (7.0,), {}),
    ("arange", (2, 9), {}),
    ("arange", (9, 2, -3), {}),
    ("arange", (0, 1, 0.1), {}),
    ("arange", (0,), {}),
    ("arange", (1, 6, 2), {"dtype": torch.float16}),
    ("arange", (5,), {"dtype": torch.int32}),
    ("linspace", (0, 1, 7), {}),
    ("linspace", (-2.5, 2.5, 10), {"dtype": torch.float64}),
    ("linspace", (3, 3, 1), {}),
    ("linspace", (0, 10, 0), {}),
    ("linspace", (0, 10, 6), {"dtype": torch.int32}),
]
RANDOM: list[Call] = [
    ("rand", (17,), {}),
    ("rand", ((3, 5),), {"dtype": torch.float16}),
    ("rand", (0,), {}),
    ("randn", (4, 4), {}),
    ("randn", ((33,),), {"dtype": torch.bfloat16}),
    ("randint", (9, (3, 4)), {}),
    ("randint", (-5, 5, (64,)), {}),
    ("randint", (-5, 5, (64,)), {"dtype": torch.int8}),
    ("randint", (3, [6]), {"dtype": torch.float32}),
    ("randint", (), {"high": 10, "size": (3,)}),
    ("randint", (10,), {"size": (3,)}),
    ("randint", (), {"low": 5, "high": 10, "size": (3,)}),
    ("rand", (), {"size": (2, 2)}),
    ("randn", (), {"size": (2, 2)}),
]


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in every respect that torch promises."""
    assert_close(got, expected)
    assert got.is_contiguous() and got.requires_grad == expected.requires_grad


def run_same_as_torch() -> None:
    ctx = context()
    for name, args, options in SAME_AS_TORCH:
        got = getattr(ctx, name)(*args, **options)
        same(got, getattr(torch, name)(*args, **options, device=ctx.device))
        assert ctx.is_symmetric(got), (name, args)


def run_random_as_torch(seed: int) -> None:
    ctx = context()
    for name, args, options in RANDOM:
        ours, theirs = (torch.Generator(ctx.device).manual_seed(seed) for _ in range(2))
        got = getattr(ctx, name)(*args, **options, generator=ours)
        same(got, getattr(torch, name)(*args, **options, generator=theirs, device=ctx.device))
        again = getattr(ctx, name)(*args, **options, generator=torch.Generator(ctx.device).manual_seed(seed))
        same(again, got)
        torch.manual_seed(seed)
        default = getattr(ctx, name)(*args, **options)
        torch.manual_seed(seed)
        same(default, getattr(torch, name)(*args, **options, device=ctx.device))


def run_uniform(seed: int) -> None:
    ctx = context()
    generators = [torch.Generator(ctx.device).manual_seed(seed) for _ in range(2)]
    got = ctx.uniform((50, 2), -3.0, -1.0, generator=generators[0])
    same(got, torch.empty(50, 2, device=ctx.device).uniform_(-3.0, -1.0, generator=generators[1]))
    assert -3 <= got.min() and got.max() < -1 and got.unique().numel() > 50
    assert ctx.uniform(3, 2, 4, torch.float64).shape == (3,)
    half = ctx.uniform((8,), dtype=torch.float16, requires_grad=True)
    assert half.dtype == torch.float16 and half.requires_grad and half.is_leaf
    assert 0 <= half.min() and half.max() <= 1


def run_default_dtype() -> None:
    ctx = context()
    torch.set_default_dtype(torch.float64)
    try:
        made = [ctx.zeros(2), ctx.ones(2), ctx.empty(2), ctx.rand(2), ctx.randn(2), ctx.uniform(2)]
        made += [ctx.full((2,), 1.0), ctx.arange(0.0, 2.0), ctx.linspace(0, 1, 2)]
        assert [one.dtype for one in made] == [torch.float64] * len(made)
        assert ctx.full((2,), 1).dtype == ctx.arange(3).dtype == ctx.randint(3, (2,)).dtype == torch.int64
    finally:
        torch.set_default_dtype(torch.float32)


def run_empty_and_zeros_like() -> None:
    ctx = context()
    for dtype in DTYPES:
        made = ctx.empty(3, 2, dtype=dtype)
        assert (made.shape, made.dtype, made.stride()) == ((3, 2), dtype, (2, 1))
    assert ctx.zeros(2, device=f"{ctx.device.type}:{ctx.device.index or 0}").device == ctx.device
    original = torch.ones(4, 6, dtype=torch.int16, device=ctx.device).t()
    same(ctx.zeros_like(original), torch.zeros(6, 4, dtype=torch.int16, device=ctx.device))
    same(ctx.zeros_like(original, dtype=torch.float16), torch.zeros(6, 4, dtype=torch.float16, device=ctx.device))
    assert ctx.zeros_like(torch.ones(2, device=ctx.device), requires_grad=True).requires_grad


def run_out() -> None:
    ctx = context()
    target = ctx.full((2, 3), 9.0)
    address = target.data_ptr()
    for fill, value in ((ctx.zeros, 0.0), (ctx.ones, 1.0)):
        got = fill((2, 3), out=target)
        assert got.data_ptr() == address
        same(target.cpu(), torch.full((2, 3), value))
    assert ctx.full((2, 3), 4.0, out=target).data_ptr() == address
    same(target.cpu(), torch.full((2, 3), 4.0))
    for got in (ctx.empty(2, 3, out=target), ctx.rand(2, 3, out=target), ctx.randn(2, 3, out=target)):
        assert got.data_ptr() == address
    assert ctx.uniform((2, 3), out=target).data_ptr() == address
    whole = ctx.zeros(6, dtype=torch.int32)
    same(ctx.arange(0, 12, 2, out=whole).cpu(), torch.arange(0, 12, 2, dtype=torch.int32))
    same(ctx.linspace(0, 10, 6, out=whole, dtype=torch.int32).cpu(), torch.linspace(0, 10, 6, dtype=torch.int32))
    drawn = ctx.randint(3, 4, (6,), out=whole)
    assert drawn.data_ptr() == whole.data_ptr() and drawn.tolist() == [3] * 6
    part = ctx.zeros(10)[2:6]
    same(ctx.ones(4, out=part).cpu(), torch.ones(4))


def run_requires_grad(seed: int) -> None:
    ctx = context()
    weight = ctx.randn(4, 3, requires_grad=True)
    inputs = torch.randn(2, 4, device=ctx.device, generator=torch.Generator(ctx.device).manual_seed(seed))
    (inputs @ weight).sum().backward()
    assert weight.is_leaf and weight.grad is not None
    assert_close(weight.grad, inputs.sum(0)[:, None].expand(4, 3), rtol=1e-6, atol=1e-5)
    same(ctx.zeros(2, requires_grad=True), torch.zeros(2, device=ctx.device, requires_grad=True))


@TWO
def test_values_shapes_and_dtypes_are_those_of_torch(ranks: Ranks) -> None:
    ranks.run(run_same_as_torch)


@TWO
def test_random_values_are_those_of_torch_for_the_same_generator(ranks: Ranks, seed: int) -> None:
    ranks.run(run_random_as_torch, seed)


@TWO
def test_uniform(ranks: Ranks, seed: int) -> None:
    ranks.run(run_uniform, seed)


@TWO
def test_the_default_dtype_is_followed(ranks: Ranks) -> None:
    ranks.run(run_default_dtype)


@TWO
def test_empty_and_zeros_like(ranks: Ranks) -> None:
    ranks.run(run_empty_and_zeros_like)


@TWO
def test_out_is_filled_in_place(ranks: Ranks) -> None:
    ranks.run(run_out)


@TWO
def test_requires_grad(ranks: Ranks, seed: int) -> None:
    ranks.run(run_requires_grad, seed)


def run_same_generator_apart() -> list[float]:
    ctx = context()
    values: list[float] = ctx.rand(4, generator=torch.Generator(ctx.device).manual_seed(100 + ctx.rank)).tolist()
    return values


@TWO
def test_ranks_may_draw_different_values(ranks: Ranks) -> None:
    drawn = ranks.run(run_same_generator_apart)
    assert drawn[0] != drawn[1]


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)


def test_a_tensor_that_would_arrive_as_another_is_not_sent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        odd = {"quantized": quantised(), "nested": torch.nested.nested_tensor([torch.ones(2)])}
    for kind, value in odd.items():
        with pytest.raises(iris.ArgumentError, match=f"broadcast: value: expected None, bool.* got a {kind} tensor"):
            wire.unpack(wire.pack(value), torch.device("cpu"))


WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], str, str]] = [
    ("zeros", (2,), {"device": "meta"}, "PlacementError", "zeros: device: expected"),
    ("zeros", (2,), {"device": "nonsense"}, "ArgumentError", "zeros: device: expected None or"),
    ("zeros", (2,), {"device": 2.5}, "ArgumentError", "zeros: device: expected None or"),
    ("zeros", (2.7,), {}, "ArgumentError", "zeros: size: expected whole numbers, got (2.7,)"),
    ("ones", ((2, True),), {}, "ArgumentError", "ones: size: expected whole numbers"),
    ("empty", (), {}, "ArgumentError", "empty: size: expected one size, by position or by name, got none"),
    ("rand", (2,), {"size": 2}, "ArgumentError", "rand: size: expected one size, by position or by name, got both"),
    ("randint", (), {"high": 3}, "ArgumentError", "randint: "),
    ("arange", (), {}, "ArgumentError", "arange: arguments"),
    ("randint", (0, 1000, (3,)), {"dtype": torch.int8}, "ArgumentError", "randint: arguments"),
    ("zeros", (2,), {"out": "x"}, "ArgumentError", "zeros: out: expected a tensor, got str"),
    ("zeros", (2,), {"dtype": "float32"}, "ArgumentError", "zeros: arguments"),
    ("rand", (2,), {"dtype": "float32"}, "ArgumentError", "rand: arguments"),
    ("rand", (2,), {"generator": 3}, "ArgumentError", "rand: generator: expected None or a torch.Generator, got 3"),
    (
        "ones",
        (2,),
        {"dtype": torch.int32, "requires_grad": True},
        "DTypeError",
        "ones: requires_grad: expected a float",
    ),
    ("zeros_like", (None,), {}, "ArgumentError", "zeros_like: input: expected a tensor, got NoneType"),
    (
        "zeros_like",
        (torch.ones(2, dtype=torch.int8),),
        {"requires_grad": True},
        "DTypeError",
        "zeros_like: requires_grad: expected a float",
    ),
    ("as_symmetric", ([1.0],), {}, "ArgumentError", "as_symmetric: tensor: expected a tensor, got list"),
    ("is_symmetric", ([1.0],), {}, "ArgumentError", "is_symmetric: tensor: expected a tensor, got list"),
    ("free", ([1.0],), {}, "ArgumentError", "free: tensor: expected a tensor, got list"),
    ("peer_view", ([1.0], 0), {}, "ArgumentError", "peer_view: tensor: expected a tensor, got list"),
    ("as_symmetric", (torch.eye(2).to_sparse(),), {}, "ArgumentError", "Make it dense with .to_dense()."),
    ("as_symmetric", (torch.empty(2, device="meta"),), {}, "ArgumentError", "expected a tensor with data"),
    ("arange", (1j,), {}, "ArgumentError", "arange: arguments"),
    ("barrier", (3,), {}, "ArgumentError", "barrier: stream: expected a stream, or None, got int"),
    ("synchronize", ("x",), {}, "ArgumentError", "synchronize: stream: expected a stream, or None, got str"),
    ("uniform", (3, "a"), {}, "ArgumentError", "uniform: low and high: expected two numbers"),
    ("ones", (2,), {"device": "cuda:77"}, "PlacementError", "lives on that rank's own device: leave device out"),
    ("zeros", (2, -3), {}, "ArgumentError", "zeros: "),
    ("zeros", (1 << 80,), {}, "ArgumentError", "zeros: "),  # PyTorch would show its stack
    ("arange", (1, 5, -1), {}, "ArgumentError", "arange: arguments: expected what torch.arange accepts"),
    ("linspace", (0, 1, -1), {}, "ArgumentError", "linspace: arguments"),
    ("randint", (5, 5, (2,)), {}, "ArgumentError", "randint: arguments"),
    ("rand", (3,), {"dtype": torch.int32}, "DTypeError", "rand: dtype: expected a floating dtype, got torch.int32"),
    ("randn", (3,), {"dtype": torch.bool}, "DTypeError", "randn: dtype: expected a floating dtype, got torch.bool"),
    ("uniform", (3,), {"dtype": torch.int64}, "DTypeError", "uniform: dtype: expected a floating dtype"),
    ("uniform", (3,), {"low": 2.0, "high": 1.0}, "ArgumentError", "uniform: low: expected at most high, 1.0, got 2.0"),
    ("uniform", (3,), {"device": "meta"}, "PlacementError", "uniform: device: expected"),
    *(
        (name, args, {"requires_grad": odd}, "ArgumentError", f"{name}: requires_grad: expected True or False, got ")
        for name, args in (("zeros", (2,)), ("full", ((2,), 1.0)), ("uniform", (3,)), ("linspace", (0, 1, 3)))
        for odd in (1, "yes")
    ),
    ("zeros", (torch.empty((), dtype=torch.int64, device="meta"),), {}, "ArgumentError", "zeros: size: expected whole"),
    ("ones", (2,), {"dtype": torch.float4_e2m1fn_x2}, "ArgumentError", "ones: arguments"),
    ("full", ((2,), 300), {"dtype": torch.int8}, "ArgumentError", "full: arguments"),
    ("full", ((2,), 1e300), {"dtype": torch.float16}, "ArgumentError", "full: arguments"),
    ("full", ((2,), float("nan")), {"dtype": torch.int32}, "ArgumentError", "full: arguments"),
    ("full", ((2,), 1 << 70), {}, "ArgumentError", "full: arguments"),
    ("full", ((2,), (1, 2)), {}, "ArgumentError", "what torch.full accepts, got ((2,), (1, 2)): "),
    ("rand", (2,), {"dtype": torch.float8_e4m3fn}, "ArgumentError", "rand: arguments"),
    ("randint", (-1, 5, (2,)), {"dtype": torch.uint8}, "ArgumentError", "randint: arguments"),
    ("randint", (5, (2,)), {"dtype": torch.complex64}, "ArgumentError", "randint: arguments"),
    ("randint", (1 << 70, (2,)), {}, "ArgumentError", "randint: arguments"),
    ("uniform", (3, float("nan"), 1), {}, "ArgumentError", "uniform: low"),
    ("uniform", (3, 0, float("inf")), {}, "ArgumentError", "uniform: arguments"),
    ("uniform", (3, 0, 70000), {"dtype": torch.float16}, "ArgumentError", "uniform: arguments"),
    ("uniform", (3, 0, 1 << 2000), {}, "ArgumentError", "uniform: low and high: expected two numbers"),
    ("arange", (float("nan"),), {}, "ArgumentError", "arange: arguments"),
    ("arange", (5,), {"dtype": torch.bool}, "ArgumentError", "arange: arguments"),
    ("arange", (5,), {"dtype": torch.uint16}, "ArgumentError", "arange: arguments"),
    ("linspace", (0, 1, 5), {"dtype": torch.bool}, "ArgumentError", "linspace: arguments"),
    ("linspace", (0, 1e10, 3), {"dtype": torch.int8}, "ArgumentError", "linspace: arguments"),
    ("linspace", (0, float("inf"), 3), {"dtype": torch.int32}, "ArgumentError", "linspace: arguments"),
    ("zeros_like", (torch.eye(2).to_sparse(),), {}, "ArgumentError", "zeros_like: input: expected a dense tensor"),
    ("as_symmetric", (quantised(),), {}, "DTypeError", "Pass tensor.dequantize()."),
]


def run_wrong(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Failure, list[float]]:
    ctx = context()
    ones = ctx.ones(2)  # also frees all that was let go of before
    free = ctx.heap_free_bytes
    failure = failure_of(lambda: getattr(ctx, name)(*args, **options))
    assert ctx.heap_free_bytes == free, "allocated before the error"
    return failure, ctx.ones(2, out=ones).tolist()


@TWO
@pytest.mark.parametrize(("name", "args", "options", "kind", "words"), WRONG, ids=[f"{w[0]}-{w[3]}" for w in WRONG])
def test_a_wrong_argument_is_named_on_every_rank_and_the_context_lives_on(
    ranks: Ranks, name: str, args: tuple[Any, ...], options: dict[str, Any], kind: str, words: str
) -> None:
    for failure, after in ranks.run(run_wrong, name, args, options):
        assert failure.kind == kind and words in failure.message and "ValueError" in failure.bases
        assert "frame #0" not in failure.message, "without PyTorch's stack"
        assert failure.took_s < 5 and after == [1.0, 1.0]


def run_given_back() -> Failure:
    ctx = context()
    ones = ctx.ones(2, 2)
    free = ctx.heap_free_bytes
    failure = failure_of(ctx.as_symmetric, given_back(ones))
    assert ctx.heap_free_bytes == free
    return failure


@TWO
def test_a_tensor_whose_memory_was_given_back_is_not_copied(ranks: Ranks) -> None:
    for failure in ranks.run(run_given_back):
        assert failure.kind == "ArgumentError" and "expected a tensor with data, got a Tensor" in failure.message


def run_wrong_out() -> list[Failure]:
    ctx = context()
    here = ctx.zeros(4)
    gone = ctx.zeros(4)
    ctx.free(gone)
    return [
        failure_of(lambda: ctx.zeros(4, out=torch.zeros(4, device=ctx.device))),
        failure_of(lambda: ctx.zeros(4, out=gone)),
        failure_of(lambda: ctx.zeros(5, out=here)),
        failure_of(lambda: ctx.zeros(4, out=here, dtype=torch.float16)),
        failure_of(lambda: ctx.uniform(5, out=here)),
        failure_of(lambda: ctx.ones(4, out=ctx.zeros(4, requires_grad=True))),
    ]


@TWO
def test_an_out_that_does_not_fit_is_named(ranks: Ranks) -> None:
    expected = [
        ("PlacementError", "zeros: out: expected a tensor on the symmetric heap"),
        ("PlacementError", "Make it with ctx.empty(...)."),
        ("ShapeError", "zeros: out: expected (5,), got (4,)"),
        ("DTypeError", "zeros: out: expected torch.float16, got torch.float32"),
        ("ShapeError", "uniform: out: expected (5,), got (4,)"),
        ("ArgumentError", "ones: out: expected a tensor that needs no gradient"),
    ]
    for failures in ranks.run(run_wrong_out):
        for failure, (kind, words) in zip(failures, expected, strict=True):
            assert failure.kind == kind and words in failure.message


def run_is_symmetric() -> None:
    ctx = context()
    made = ctx.rand(8, 6)
    views = (made, made[3:], made[:, 2], made.t(), made.view(-1)[5:9], made.view(torch.int32), made[0:0], made.detach())
    assert all(ctx.is_symmetric(view) for view in views)
    assert ctx.is_symmetric(ctx.zeros(0))
    others = (
        ctx.peer_view(made, ctx.rank),
        ctx.peer_view(made[3:], ctx.rank),
        torch.utils.dlpack.from_dlpack(made[3:]),
    )
    assert all(ctx.is_symmetric(one) for one in others)
    assert failure_of(ctx.free, others[0]).kind == "PlacementError"
    elsewhere = (torch.zeros(3), torch.zeros(0), torch.empty(3, device="meta"), made.cpu().clone())
    outside = (made.clone(), made + 1, *elsewhere, Wrapper(made), in_vmap(made))
    assert not any(ctx.is_symmetric(tensor) for tensor in outside)
    assert {failure_of(ctx.free, tensor).kind for tensor in outside} == {"PlacementError"}
    assert "to_local()" in failure_of(ctx.as_symmetric, Wrapper(made)).message
    begin = ctx.heap_offset(made)
    assert [ctx.heap_offset(one) - begin for one in (made[0:0], made[8:], others[1])] == [0, 192, 72]
    ctx.free(made)
    assert not any(ctx.is_symmetric(view) for view in (*views, *others))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(call: Any, x: torch.Tensor) -> torch.Tensor:
        return context().as_symmetric(2 * x.detach())

    @staticmethod
    def backward(call: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


def gradients_of_what_is_on_the_heap() -> list[list[float]]:
    """Through memory that was made without gradients and then written, through what a Function returns and another
    changes in place, and of a tensor that is taken out of the graph."""
    ctx, w = context(), torch.tensor([3.0, -4.0], requires_grad=True)
    ctx_device = w.to(ctx.device)
    with torch.no_grad():
        memory = ctx.zeros(3)
    memory[1:] = ctx_device * 2
    torch.relu_(Doubled.apply(ctx_device)).sum().backward(retain_graph=True)
    first = w.grad.tolist() if w.grad is not None else []
    (memory.sum() + memory.detach_().sum()).backward()  # the second adds nothing
    return [first, w.grad.tolist() if w.grad is not None else [], memory.tolist()]


def test_to_autograd_a_tensor_of_the_heap_is_no_view(ranks: Ranks) -> None:
    assert (
        ranks.run(gradients_of_what_is_on_the_heap) == [[[2.0, 0.0], [4.0, 2.0], [0.0, 6.0, -8.0]]] * ranks.world_size
    )


def views_that_change_values() -> list[Failure]:
    ctx = context()
    made = ctx.ones(2, dtype=torch.complex64)
    return [failure_of(ctx.peer_view, one, 0) for one in (made.conj(), torch._neg_view(made))]


def test_a_peer_has_no_view_of_what_memory_does_not_hold(ranks: Ranks) -> None:
    for failures in ranks.run(views_that_change_values):
        for failure in failures:
            assert failure.kind == "PlacementError" and "whose memory holds its values" in failure.message


def tangents_of_copies() -> tuple[Failure, bool]:
    ctx, plain = context(), torch.ones(3, device=context().device)
    with forward_ad.dual_level():
        with_tangent = dual(plain, plain)
        return failure_of(ctx.as_symmetric, with_tangent), ctx.is_symmetric(ctx.as_symmetric(with_tangent.detach()))


@TWO
def test_a_copy_does_not_lose_a_tangent_without_a_word(ranks: Ranks) -> None:
    for refused, copied in ranks.run(tangents_of_copies):
        assert refused.kind == "ArgumentError" and "pass tensor.detach()" in refused.message and copied


def registered_copies() -> list[bool]:
    """Whether a module has its parameters again after they have been put on the heap."""
    ctx, layer = context(), torch.nn.Linear(3, 2, bias=False)
    layer.weight = ctx.as_symmetric(layer.weight)
    layer.frozen = ctx.as_symmetric(torch.nn.Parameter(torch.ones(2), requires_grad=False))
    gc.collect()  # the original parameters
    ctx.ones(2), ctx.ones(2)
    assert layer.frozen.eq(1).all() and all(map(ctx.is_symmetric, layer.parameters()))
    return [one.requires_grad for one in layer.parameters()]


@TWO
def test_a_copy_of_a_parameter_is_a_parameter(ranks: Ranks) -> None:
    assert ranks.run(registered_copies) == [[True, False]] * ranks.world_size


def gradients_of_copies() -> tuple[Failure, bool, bool]:
    ctx, weight = context(), torch.ones(3, device=context().device, requires_grad=True)
    doubled = weight * 2
    refused = failure_of(ctx.as_symmetric, doubled)
    leaf = ctx.as_symmetric(weight)
    with torch.no_grad():
        return refused, leaf.requires_grad and leaf.is_leaf, ctx.as_symmetric(doubled).requires_grad


@TWO
def test_a_copy_does_not_cut_a_gradient_without_a_word(ranks: Ranks) -> None:
    for refused, leaf, without in ranks.run(gradients_of_copies):
        assert refused.kind == "ArgumentError" and "pass tensor.detach()" in refused.message
        assert leaf and not without


def run_as_symmetric() -> None:
    ctx = context()
    here = ctx.rand(4, 3)
    assert ctx.as_symmetric(here) is here
    assert ctx.as_symmetric(view := here[1:]) is view
    for original in (
        torch.randn(3, 5),
        torch.randn(5, 3).t(),
        torch.arange(6, dtype=torch.int8)[::2],
        torch.zeros(0, 4),
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.ones(2, requires_grad=True),
    ):
        copy = ctx.as_symmetric(original)
        same(copy.cpu() if not copy.requires_grad else copy.detach().cpu(), original.detach().contiguous())
        assert ctx.is_symmetric(copy) and copy.requires_grad == original.requires_grad and copy.is_leaf


def symmetric_on_rank_0_only() -> tuple[Failure, list[float]]:
    ctx = context()
    tensor = ctx.ones(2)
    failure = failure_of(ctx.as_symmetric, tensor if ctx.rank == 0 else tensor.clone())
    return failure, ctx.as_symmetric(torch.ones(2, device=ctx.device)).tolist()


def offsets_of_many(seed: int) -> list[int]:
    """Offsets of tensors from the same random calls on all ranks; ranks drop tensors at different times."""
    ctx = context()
    dice, own = random.Random(seed), random.Random(seed + 1 + ctx.rank)
    held: list[torch.Tensor] = []
    offsets = []
    for _ in range(60):
        tensor = ctx.empty(dice.randint(0, 5000), dtype=dice.choice(DTYPES))
        offsets.append(tensor.untyped_storage().data_ptr() - int(ctx.heap_bases[ctx.rank]))
        held.append(tensor)
        while held and own.random() < 0.4:
            held.pop(own.randrange(len(held)))
    return offsets


@TWO
def test_is_symmetric(ranks: Ranks) -> None:
    ranks.run(run_is_symmetric)


@TWO
def test_as_symmetric(ranks: Ranks) -> None:
    ranks.run(run_as_symmetric)


@pytest.mark.parametrize("ranks", worlds(3, 4), indirect=True)
def test_a_tensor_that_is_symmetric_on_some_ranks_only(ranks: Ranks) -> None:
    for failure, after in ranks.run(symmetric_on_rank_0_only):
        assert failure.kind == "RankMismatch" and failure.took_s < 5 and after == [1.0, 1.0]
        assert "as_symmetric: the tensor is on the symmetric heap of ranks [0] only. On all ranks" in failure.message


def test_offsets_are_equal_on_all_ranks_and_aligned(ranks: Ranks, seed: int) -> None:
    offsets = ranks.run(offsets_of_many, seed)
    assert all(one == offsets[0] for one in offsets)
    assert all(offset % 1024 == 0 for offset in offsets[0])
    assert len(set(offsets[0])) < len(offsets[0]), "no block was reused"


def fill_again_and_again(how: str) -> int:
    """Allocate four times the heap, a third of it at a time."""
    with fresh(heap_size=3 << 20) as ctx:
        start = ctx.heap_free_bytes
        for turn in range(12):
            tensor = ctx.full(((1 << 20) - 8192,), turn, dtype=torch.uint8)
            view = tensor[100:]
            assert int(view.max()) == turn
            if how == "free":
                ctx.free(tensor)
            elif how == "free a view":
                ctx.free(view)
            elif how == "cycle":
                loop: list[Any] = [tensor]
                loop.append(loop)
            del tensor, view
        if how == "cycle":
            del loop
            gc.collect()
        ctx.free(ctx.empty(1))
        ctx.empty(1)
        return start - ctx.heap_free_bytes


def garbage_in_a_capture(who: Sequence[int]) -> tuple[Failure, bool, Failure]:
    """The failure of an allocation that needs memory held by a cycle, while the ranks ``who`` capture a graph; whether
    this rank's cycle then still exists; and the failure of one while no rank captures."""
    with fresh(heap_size=3 << 20) as ctx:
        take: Callable[[], torch.Tensor] = lambda: ctx.empty(2 << 20, dtype=torch.uint8)  # noqa: E731
        gc.disable()
        try:
            loop: list[Any] = [take()]
            loop.append(loop)
            block = weakref.ref(loop[0])
            del loop
            with (
                mock.patch("torch.cuda.is_initialized", return_value=True),
                mock.patch("torch.cuda.is_current_stream_capturing", return_value=ctx.rank in who),
            ):
                refused = failure_of(take)
            return refused, block() is not None, failure_of(take)
        finally:
            gc.enable()


class Slow:
    """Garbage that takes a while to collect."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        time.sleep(0.2)


def garbage_while_a_thread_collects() -> bool:
    with fresh(heap_size=3 << 20) as ctx:
        gc.disable()
        try:
            Slow()
            collecting = threading.Thread(target=gc.collect)
            collecting.start()
            time.sleep(0.05)
            loop: list[Any] = [ctx.empty(2 << 20, dtype=torch.uint8)]
            loop.append(loop)
            del loop
            return ctx.empty(2 << 20, dtype=torch.uint8).numel() == 2 << 20
        finally:
            gc.enable()
            collecting.join()


def test_garbage_is_collected_even_if_a_thread_is_about_it(ranks: Ranks) -> None:
    assert all(ranks.run(garbage_while_a_thread_collects))


def hold_on_one_rank() -> tuple[list[int], int]:
    """Rank 0 drops a tensor at once, the others one allocation later."""
    with fresh() as ctx:
        offset_of: Callable[[torch.Tensor], int] = lambda tensor: tensor.data_ptr() - int(ctx.heap_bases[ctx.rank])  # noqa: E731
        first = ctx.empty(1000, dtype=torch.uint8)
        offsets = [offset_of(first)]
        if ctx.rank == 0:
            ctx.free(first)
        second = ctx.empty(1000, dtype=torch.uint8)
        offsets.append(offset_of(second))
        if ctx.rank != 0:
            del first
        third = ctx.empty(1000, dtype=torch.uint8)
        offsets.append(offset_of(third))
        return offsets, ctx.world_size


def views_keep_a_block() -> None:
    with fresh() as ctx:
        tensor = ctx.full((1000,), 3.0)
        view = tensor[10:12]
        del tensor
        others = [ctx.full((1000,), 5.0) for _ in range(4)]
        assert view.tolist() == [3.0, 3.0]
        assert all(one.data_ptr() != view.data_ptr() - 40 for one in others)


def free_what_cannot_be() -> list[Failure]:
    ctx = context()
    tensor = ctx.zeros(4)
    ctx.free(tensor)
    another = ctx.ones(4)
    assert another.data_ptr() == tensor.data_ptr()
    found = [failure_of(ctx.free, wrong) for wrong in (tensor, torch.zeros(3), torch.empty(2, device="meta"))]
    assert ctx.zeros(4).data_ptr() != another.data_ptr() and another.tolist() == [1.0] * 4
    return found


def free_around_a_block() -> tuple[int, int]:
    """The free bytes of a full heap, and the largest free block, after all but a block in the middle was dropped."""
    with fresh() as ctx:
        first, between, last = (ctx.empty(nbytes, dtype=torch.uint8) for nbytes in (4096, 1024, 3072))
        rest = ctx.empty(ctx.heap_free_bytes, dtype=torch.uint8)
        ctx.free(first)
        ctx.free(last)
        teller = ctx.empty(1024, dtype=torch.uint8)  # gets the block of the first, whose release it tells
        found = ctx.heap_free_bytes, ctx.heap_largest_free_bytes
        del between, rest, teller
        return found


def tensors_outlive_the_context() -> Sequence[float]:
    with fresh() as ctx:
        tensor = ctx.full((4,), 2.5)
        ctx.barrier()
    values: list[float] = tensor.tolist()
    return values


@TWO
@pytest.mark.parametrize("who", [(0,), (0, 1)])
def test_no_garbage_is_collected_in_a_capture(ranks: Ranks, who: Sequence[int]) -> None:
    """Garbage may hold graphs or streams, which cannot be freed in a capture; ranks still agree on what is free."""
    for rank, (refused, kept, taken) in enumerate(ranks.run(garbage_in_a_capture, who)):
        assert refused.kind == "HeapError" and kept is (rank in who), refused
        assert taken.kind == "nothing", taken


@pytest.mark.parametrize("how", ["del", "free", "free a view", "cycle"])
@pytest.mark.parametrize("ranks", worlds(1, 2), indirect=True)
def test_freed_memory_is_used_again(ranks: Ranks, how: str) -> None:
    assert ranks.run(fill_again_and_again, how) == [1024] * ranks.world_size


@pytest.mark.parametrize("ranks", worlds(2), indirect=True)
def test_a_block_is_used_again_only_when_every_rank_has_let_go(ranks: Ranks) -> None:
    for (first, second, third), _ in ranks.run(hold_on_one_rank):
        assert second != first and third == first


@TWO
def test_a_view_keeps_its_block(ranks: Ranks) -> None:
    ranks.run(views_keep_a_block)


@TWO
def test_freeing_twice_or_freeing_what_is_elsewhere_is_an_error(ranks: Ranks) -> None:
    for failures in ranks.run(free_what_cannot_be):
        for failure in failures:
            assert failure.kind == "PlacementError"
            assert "free: tensor: expected one that lives on this heap" in failure.message
            assert "Only tensors made by this context, and not freed yet, can be freed." in failure.message


@TWO
def test_what_is_free_need_not_lie_together(ranks: Ranks) -> None:
    assert ranks.run(free_around_a_block) == [(6144, 3072)] * ranks.world_size


@pytest.mark.skipif(iris.backends.detect().name != "sim", reason="a closed GPU heap is unmapped")
@TWO
def test_a_tensor_kept_past_close_is_still_readable_in_the_simulator(ranks: Ranks) -> None:
    assert ranks.run(tensors_outlive_the_context) == [[2.5] * 4] * 2


def fill_a_heap() -> tuple[int, int]:
    with fresh(1 << 17) as ctx:
        halves = [ctx.empty(1 << 16, dtype=torch.uint8) for _ in range(2)]
        assert len(halves) == 2
        return ctx.heap_size, ctx.heap_free_bytes


@TWO
def test_all_of_the_heap_is_for_tensors(ranks: Ranks) -> None:
    """As in AMD's Iris; what Iris needs itself comes on top."""
    assert ranks.run(fill_a_heap) == [(1 << 17, 0)] * 2


MAKERS = """
import sys, iris

with iris.iris(1 << 20, backend="sim") as ctx:
    made = [ctx.zeros(2), ctx.ones(2), ctx.empty(2), ctx.full((2,), 3), ctx.rand(2), ctx.randn(2), ctx.randint(2, (2,))]
    made += [ctx.uniform(2), ctx.arange(2), ctx.arange(0, 1, 0.5), ctx.linspace(0, 1, 2), ctx.zeros_like(made[0])]
    print([tuple(one.shape) for one in made], sorted({"sympy", "torch._dynamo"} & set(sys.modules)))
"""


def test_makers_import_neither_sympy_nor_dynamo() -> None:
    """These take seconds, in each rank."""
    done = subprocess.run([python(), "-c", MAKERS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == (f"{[(2,)] * 12} []\n", "")


def long_range() -> tuple[int, ...]:
    """One that would take 16 GiB of host memory as an example."""
    ctx = context()
    failure = failure_of(lambda: ctx.arange(1 << 31))
    assert failure.kind == "HeapError", failure
    long = torch.arange(0, 1 << 18, 3, dtype=torch.int32)
    assert torch.equal(ctx.arange(0, 1 << 18, 3, dtype=torch.int32).cpu(), long)
    return tuple(long.shape)


@TWO
def test_a_long_range(ranks: Ranks) -> None:
    assert ranks.run(long_range) == [((1 << 18) // 3 + 1,)] * 2


def test_a_name_that_iris_lacks_leads_to_the_page_on_porting() -> None:
    assert getattr(iris, "bench").register  # noqa: B009 (type checkers want an import)
    with pytest.raises(AttributeError, match=r"'iris' has no attribute 'TritonContext'.*docs/porting\.md"):
        getattr(iris, "TritonContext")  # noqa: B009
