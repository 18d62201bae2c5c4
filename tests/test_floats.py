"""bfloat16 and 8-bit floats in the simulator, against torch. No kernel here needs a context."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from ranks import BACKEND, TRITON, assert_close
from triton.runtime import interpreter as upstream
from warm import python

import iris

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(BACKEND != "sim", reason="tests the simulator"),
]
M, N = 4, 16


def equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close(got, expected)


def eighths(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Numbers of both signs whose sums and products are exact in float32, in any order."""
    return (torch.randint(-40, 41, shape, generator=torch.Generator().manual_seed(seed)) / 8).to(dtype)


@triton.jit
def larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def larger_with_index(a, i, b, j):
    return tl.where(a >= b, a, b), tl.where(a >= b, i, j)


@triton.jit
def reduce_kernel(source, target, OP: tl.constexpr, AXIS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(source + at)
    if OP == "sum":
        y = tl.sum(x, AXIS, keep_dims=True)
    elif OP == "max":
        y = tl.max(x, AXIS, keep_dims=True)
    elif OP == "min":
        y = tl.min(x, AXIS, keep_dims=True)
    elif OP == "reduce max":
        y = tl.reduce(x, AXIS, larger, keep_dims=True)
    elif OP == "reduce sum":
        y = tl.reduce(x, AXIS, plus, keep_dims=True)
    elif OP == "argmax":
        y = tl.argmax(x, AXIS, keep_dims=True)
    elif OP == "argmin":
        y = tl.argmin(x, AXIS, keep_dims=True)
    elif OP == "max of indices":
        y = tl.max(x, AXIS, return_indices=True, keep_dims=True)[0]
    elif OP == "min of indices":
        y = tl.min(x, AXIS, return_indices=True, keep_dims=True)[0]
    else:
        tl.static_assert(OP == "reduce argmax")
        places = tl.broadcast_to(tl.arange(0, N)[None, :] if AXIS == 1 else tl.arange(0, M)[:, None], (M, N))
        y = tl.reduce((x, places), AXIS, larger_with_index, keep_dims=True)[1]
    if AXIS == 1:
        tl.store(target + tl.arange(0, M)[:, None], y)
    elif AXIS == 0:
        tl.store(target + tl.arange(0, N)[None, :], y)
    else:
        tl.store(target + tl.zeros((1, 1), tl.int32), y)


REDUCTIONS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": lambda x, axis: x.float().sum(axis).bfloat16(),
    "max": lambda x, axis: x.amax(axis),
    "min": lambda x, axis: x.amin(axis),
    "reduce max": lambda x, axis: x.amax(axis),
    "reduce sum": lambda x, axis: added_up(x, axis).select(axis, -1),
    "argmax": lambda x, axis: x.argmax(axis).int(),
    "argmin": lambda x, axis: x.argmin(axis).int(),
    "max of indices": lambda x, axis: x.amax(axis),
    "min of indices": lambda x, axis: x.amin(axis),
    "reduce argmax": lambda x, axis: x.argmax(axis).int(),
}


def added_up(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Partial sums, each rounded to the dtype of ``x``, as by a scan with a user's function."""
    sums = [x.select(axis, 0)]
    for index in range(1, x.shape[axis]):
        sums.append(sums[-1] + x.select(axis, index))
    return torch.stack(sums, axis)


@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions(op: str, axis: int | None, seed: int) -> None:
    if axis is None and ("arg" in op or "indices" in op):
        pytest.skip("an index is along an axis")
    x = eighths(seed, M, N)
    x = torch.where(x == x.amax(), x.amax() + torch.arange(M * N).view(M, N), x)  # extremes are unique
    x = torch.where(x == x.amin(), x.amin() - torch.arange(M * N).view(M, N), x).bfloat16()
    expected = REDUCTIONS[op](x, axis) if axis is not None else REDUCTIONS[op](x.flatten(), 0)
    target = torch.empty(expected.shape or 1, dtype=expected.dtype)
    reduce_kernel[(1,)](x, target, op, axis, M, N)
    equal(target, expected.view(target.shape))


@triton.jit
def sum_kernel(source, target, N: tl.constexpr):
    total = tl.sum(tl.load(source + tl.arange(0, N)))
    tl.static_assert(total.dtype == tl.bfloat16)
    tl.store(target, total)


def test_a_sum_is_rounded_once_and_to_even() -> None:
    for ones, expected in ((257, 256.0), (259, 260.0), (1000, 1000.0)):
        x, total = torch.zeros(1024), torch.empty(1, dtype=torch.bfloat16)
        x[:ones] = 1
        sum_kernel[(1,)](x.bfloat16(), total, 1024)
        assert total.item() == expected


@triton.jit
def scan_kernel(source, target, OP: tl.constexpr, REVERSE: tl.constexpr, AXIS: tl.constexpr, M: tl.constexpr,
                N: tl.constexpr):  # fmt: skip
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(source + at)
    if OP == "cumsum":
        y = tl.cumsum(x, AXIS, reverse=REVERSE)
    elif OP == "cumprod":
        y = tl.cumprod(x, AXIS, reverse=REVERSE)
    elif OP == "cummax":
        y = tl.associative_scan(x, AXIS, larger, reverse=REVERSE)
    else:
        tl.static_assert(OP == "sums")
        y = tl.associative_scan(x, AXIS, plus, reverse=REVERSE)
    tl.store(target + at, y)


SCANS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "cumsum": lambda x, axis: x.float().cumsum(axis).bfloat16(),
    "cumprod": lambda x, axis: x.float().cumprod(axis).bfloat16(),
    "cummax": lambda x, axis: x.cummax(axis).values,
    "sums": added_up,
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("op", SCANS)
def test_scans(op: str, reverse: bool, axis: int, seed: int) -> None:
    x = eighths(seed, M, N)
    if op == "cumprod":
        x = (torch.randint(0, 2, (M, N), generator=torch.Generator().manual_seed(seed)) * 3 - 1.5).bfloat16()
    target = torch.empty_like(x)
    scan_kernel[(1,)](x, target, op, reverse, axis, M, N)
    expected = SCANS[op](x.flip(axis), axis).flip(axis) if reverse else SCANS[op](x, axis)
    equal(target, expected)


@triton.jit
def elementwise_kernel(a, b, c, target, OP: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y, z = tl.load(a + at), tl.load(b + at), tl.load(c + at)
    if OP == "fma":
        r = tl.fma(x, y, z)
    elif OP == "div":
        r = (x / y).to(tl.bfloat16)
    elif OP == "mod":
        r = x % y
    elif OP == "clamp":
        r = tl.clamp(x, tl.minimum(y, z), tl.maximum(y, z))
    elif OP == "sort":
        r = tl.sort(x)
    elif OP == "gather":
        r = tl.gather(x, N - 1 - at, 0)
    else:
        tl.static_assert(OP == "softmax")
        r = tl.softmax(x.to(tl.float32)).to(tl.bfloat16)
    tl.store(target + at, r)


ELEMENTWISE: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "fma": lambda x, y, z: (x.double() * y.double() + z.double()).bfloat16(),
    "div": lambda x, y, z: (x.float() / y.float()).bfloat16(),
    "mod": lambda x, y, z: x.fmod(y),
    "clamp": lambda x, y, z: x.clamp(torch.minimum(y, z), torch.maximum(y, z)),
    "sort": lambda x, y, z: x.sort().values,
    "gather": lambda x, y, z: x.flip(0),
    "softmax": lambda x, y, z: x.float().softmax(0).bfloat16(),
}


@pytest.mark.parametrize("op", ELEMENTWISE)
def test_elementwise(op: str, seed: int) -> None:
    x, y, z = (eighths(seed + i, 64) for i in range(3))
    y[y == 0] = 0.375
    target = torch.empty_like(x)
    elementwise_kernel[(1,)](x, y, z, target, op, 64)
    rounding = 0.01 if op == "softmax" else 0
    assert_close(target, ELEMENTWISE[op](x, y, z), rtol=rounding, atol=0)


def test_an_fma_is_rounded_once() -> None:
    """If the product, 1.015625 squared, were rounded by itself, it would lose half of the final result."""
    x, target = torch.full((64,), 1.015625).bfloat16(), torch.empty(64, dtype=torch.bfloat16)
    elementwise_kernel[(1,)](x, x, -x, target, "fma", 64)
    equal(target, torch.full((64,), 1.015625**2 - 1.015625).bfloat16())


@triton.jit
def cast_kernel(source, target, ROUNDING: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty, fp_downcast_rounding=ROUNDING))


FLOAT8 = (torch.float8_e5m2, torch.float8_e4m3fn)
EVERY = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
"""All bfloat16 numbers."""


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32, torch.float16])
def test_casts_to_8_bits(dtype: torch.dtype, wide: torch.dtype) -> None:
    """Numbers that are too large become the largest one, as by a GPU's instructions; torch gives infinity."""
    source, target = EVERY.to(wide), torch.empty(1 << 16, dtype=dtype)
    cast_kernel[(1,)](source, target, None, 1 << 16)
    limit = torch.finfo(dtype).max
    equal(target.float(), source.float().clamp(-limit, limit).to(dtype).float())


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32, torch.float16])
def test_casts_from_8_bits(dtype: torch.dtype, wide: torch.dtype) -> None:
    source, target = torch.arange(256).to(torch.uint8).view(dtype), torch.empty(256, dtype=wide)
    cast_kernel[(1,)](source, target, None, 256)
    equal(target, source.to(wide))


@triton.jit
def float8_kernel(a, b, target, OP: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(a + at), tl.load(b + at)
    if OP == "add":
        r = x + y
    elif OP == "multiply":
        r = 2.0 * x
    elif OP == "negative":
        r = -x
    elif OP == "less":
        r = x < y
    elif OP == "equal":
        r = x == y
    elif OP == "maximum":
        r = tl.maximum(x, y)
    elif OP == "fma":
        r = tl.fma(x, y, x)
    elif OP == "sum":
        r = tl.sum(x)
    elif OP == "cumsum":
        r = tl.cumsum(x)
    elif OP == "min_max":
        r = tl.argmax(x, 0)
    elif OP == "widened":
        r = x.to(tl.float32) + y.to(tl.bfloat16)
    elif OP == "one widened":
        r = x + y.to(tl.float32)
    elif OP == "div":
        r = x / y
    elif OP == "half":
        r = x / 2.0
    elif OP == "where":
        r = tl.where(at % 2 == 0, x, y)
    elif OP == "or one":
        r = tl.where(at % 2 == 0, x, 1.0)
    elif OP == "or zero":
        r = tl.where(at % 2 == 0, x, 0.0)
    elif OP == "abs":
        r = tl.abs(x)
    else:
        tl.static_assert(OP == "max")
        r = tl.max(x)
    tl.store(target + at, r)


FLOAT8_ARITHMETIC: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "widened": lambda x, y: x + y,
    "one widened": lambda x, y: x + y,
    "div": lambda x, y: x / y,
    "half": lambda x, y: x / 2,
    "where": lambda x, y: torch.where(torch.arange(len(x)) % 2 == 0, x, y),
    "or one": lambda x, y: torch.where(torch.arange(len(x)) % 2 == 0, x, 1),
    "or zero": lambda x, y: torch.where(torch.arange(len(x)) % 2 == 0, x, 0),
    "abs": lambda x, y: x.abs(),
    "max": lambda x, y: x.max().expand(len(x)),
}
TAKEN_SINCE = {"or one": (3, 7), "div": (3, 9), "half": (3, 9)}
"""Before 3.7 Triton's compilers make no 8-bit constant except 0; before 3.9 they do not widen operands of divisions."""
REFUSED = [op for op, since in TAKEN_SINCE.items() if TRITON < since]


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("op", [op for op in FLOAT8_ARITHMETIC if op not in REFUSED])
def test_what_compilers_take_of_8_bits(op: str, dtype: torch.dtype, seed: int) -> None:
    x, y = eighths(seed, 64), eighths(seed + 1, 64)
    y[y == 0] = 0.375
    x, y = x.to(dtype), y.to(dtype)
    target = torch.empty(64)
    float8_kernel[(1,)](x, y, target, op, 64)
    equal(target, FLOAT8_ARITHMETIC[op](x.float(), y.float()))


@pytest.mark.parametrize(
    "op", ["add", "multiply", "negative", "less", "equal", "maximum", "fma", "sum", "cumsum", "min_max", *REFUSED]
)
def test_arithmetic_on_8_bits_is_refused_as_by_compilers(op: str) -> None:
    x = torch.ones(64).to(torch.float8_e5m2)
    with pytest.raises(
        iris.DTypeError, match=r"operand: expected .*16 bits or more, got fp8e5\. .*x\.to\(tl\.float32\)"
    ):
        float8_kernel[(1,)](x, x, torch.empty(64), op, 64)


def test_rounding_toward_zero(seed: int) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    target = torch.empty(64, dtype=torch.bfloat16)
    cast_kernel[(1,)](x, target, "rtz", 64)
    equal(target, (x.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16())


@triton.jit
def print_kernel(source):
    tl.device_print("x", tl.load(source + tl.arange(0, 2)))


def test_prints_are_of_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    print_kernel[(1,)](torch.tensor([1.5, -2.0]).bfloat16())
    assert "[ 1.5 -2. ]" in capsys.readouterr().out


@triton.jit
def padded_kernel(source, target, rows, N: tl.constexpr):
    tile = tl.make_tensor_descriptor(source, [rows, N], [N, 1], [4, N], padding_option="nan").load([0, 0])
    tl.store(target + tl.arange(0, 4)[:, None] * N + tl.arange(0, N)[None, :], tile)


def test_a_descriptor_pads_with_nan() -> None:
    target = torch.empty(4, 16, dtype=torch.bfloat16)
    padded_kernel[(1,)](torch.ones(3, 16, dtype=torch.bfloat16), target, 3, 16)
    equal(target, torch.tensor([1.0, 1.0, 1.0, torch.nan]).bfloat16()[:, None].expand(4, 16))


@triton.jit
def scaled_kernel(a, b, c, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c + at, tl.dot_scaled(tl.load(a + at), None, "bf16", tl.load(b + at), None, "bf16"))


@pytest.mark.skipif(
    not hasattr(upstream, "_mxfp_value_handle_to_float32"), reason="older Triton does not interpret dot_scaled"
)
def test_scaled_dots_keep_what_float16_cannot_hold(seed: int) -> None:
    a, b = eighths(seed, 32, 32) * 2.0**40, eighths(seed + 1, 32, 32) * 2.0**-40
    c = torch.empty(32, 32)
    scaled_kernel[(1,)](a, b, c, 32)
    equal(c, a.float() @ b.float())


SCRIPT = """
import iris, torch, triton, triton.language as tl

@triton.jit
def kernel(x, out):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, 4)) + 1))

x, out = torch.tensor([1, 2, -3, 4]).bfloat16(), torch.zeros(1, dtype=torch.bfloat16)
kernel[(1,)](x, out)
print(out.item())
try:
    kernel[(1,)](torch.empty(0, dtype=torch.bfloat16), out)
except Exception as error:
    print(type(error).__name__)
"""


def run_script(script: str) -> list[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [python(), "-c", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_kernels_without_a_context_are_simulated_as_any() -> None:
    assert run_script(SCRIPT) == ["8.0", "AddressError"]


def test_what_needs_no_simulation_needs_no_greenlet() -> None:
    script = (
        "import sys; sys.modules['greenlet'] = None\n"
        "import iris\n"
        "try: iris.iris(1 << 20)\n"
        "except iris.BackendError as error: print(error)"
    )
    assert "needs greenlet" in run_script(script)[0]


@triton.jit
def toward_zero_kernel(source, target, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty, fp_downcast_rounding="rtz"))


@pytest.mark.parametrize(
    ("dtype", "largest", "least"),
    [
        (torch.float16, 65504.0, 2.0**-24),
        (torch.bfloat16, float(torch.finfo(torch.bfloat16).max), 2.0**-133),
        (torch.float8_e5m2, 57344.0, 2.0**-16),
    ],
    ids=str,
)
def test_numbers_rounded_toward_zero_do_not_grow(dtype: torch.dtype, largest: float, least: float, seed: int) -> None:
    """No number grows, none is two steps away, and finite numbers stay finite."""
    drawn = torch.randn(1016, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).exp().float()
    odd = torch.tensor([0.0, 3.4e38, 1e-40, 65536.0, 1e6, 1.0, least, float("inf")])
    for sign in (1, -1):
        source, target = torch.cat([odd, drawn]) * sign, torch.empty(1024, dtype=dtype)
        toward_zero_kernel[(1,)](source, target, 1024)
        got, bits = target.double().abs(), torch.int8 if dtype.itemsize == 1 else torch.int16
        following = (target.view(bits) + 1).view(dtype).double().abs()
        size = source.double().abs()
        finite = size.isfinite()
        assert (got <= size).all() and (got[finite] <= largest).all() and got[~finite].isinf().all()
        assert ((following > size) | (got == largest) | ~finite).all()
        assert (target.float().signbit() == source.signbit()).all()


@triton.jit
def nothing_known_kernel(source, best, place, N: tl.constexpr):
    x = tl.load(source + tl.arange(0, N))
    tl.store(best, tl.max(x, 0))
    tl.store(best + 1, tl.min(x, 0))
    tl.store(place, tl.argmax(x, 0))
    tl.store(place + 1, tl.argmin(x, 0))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extremes_of_nothing_but_nans(dtype: torch.dtype) -> None:
    """Triton's interpreter fails here, or warns."""
    best, place = torch.zeros(2, dtype=dtype), torch.full((2,), 9, dtype=torch.int32)
    nothing_known_kernel[(1,)](torch.full((4,), float("nan"), dtype=dtype), best, place, 4)
    assert best.isnan().all() and place.tolist() == [0, 0]
    nothing_known_kernel[(1,)](torch.tensor([float("nan"), 2, 1, 2], dtype=dtype), best, place, 4)
    assert best.tolist() == [2, 1] and place.tolist() == [1, 2]


@triton.jit
def poll_kernel(flag, seen):
    if tl.program_id(0) == 0:
        tl.store(seen, tl.atomic_poll(flag, 7, sem="acquire", scope="sys"))
        tl.store(seen + 1, tl.atomic_poll(flag, 8, timeout_ns=1000000))
    else:
        tl.atomic_xchg(flag, 7)


@pytest.mark.skipif(not hasattr(tl, "atomic_poll"), reason="this Triton has no atomic_poll")
def test_tritons_own_poll_waits_with_and_without_a_limit() -> None:
    flag, seen = torch.zeros(1, dtype=torch.int32), torch.full((2,), 9, dtype=torch.int32)
    poll_kernel[(2,)](flag, seen)
    assert seen.tolist() == [1, 0]


@triton.jit
def product_kernel(a, b, c, PRECISION: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision=PRECISION))


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "ieee", "bf16x3", "bf16x6"])
def test_precisions_of_products(precision: str, seed: int) -> None:
    a, b, c = eighths(seed, 16, 16).float(), eighths(seed + 1, 16, 16).float(), torch.empty(16, 16)
    product_kernel[(1,)](a, b, c, precision)
    equal(c, a @ b)
