"""Parts of Triton's language that the simulator does itself, as Triton's interpreter leaves them to Python or lacks
them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from ranks import BACKEND, Failure, Ranks, context, failure_of
from triton.language import static_range
from triton.language.extra import libdevice

import iris

pytestmark = [
    pytest.mark.skipif(BACKEND != "sim", reason="tests the simulator"),
    pytest.mark.filterwarnings("ignore:Logical operators|builtin m"),
]
ONE = pytest.mark.parametrize("ranks", [1], indirect=True)
LANES, LIMIT = 16, 5
THREE = tl.constexpr(3)
AT = np.arange(LANES)
LESS, MORE = AT < LIMIT, AT > 2


@triton.jit
def truth_kernel(found, limit, yes, no, KIND: tl.constexpr, LANES: tl.constexpr, SMALL: tl.constexpr):
    at = tl.arange(0, LANES)
    less, more, low = at < limit, at > 2, limit < 9
    result = at * 0
    if KIND == "block and block":
        result += (less and more).to(tl.int32)
    elif KIND == "block or block":
        result += (at > limit or at < 2).to(tl.int32)
    elif KIND == "not block":
        result += tl.where(not less, 1, 0)
    elif KIND == "and of three":
        result += (less and more and low).to(tl.int32)
    elif KIND == "constant and block":
        result += (SMALL and less).to(tl.int32)
    elif KIND == "constant or block":
        result += 1 if SMALL or less else 0
    elif KIND == "block & number":
        result += (less & low).to(tl.int32)
    elif KIND == "block & number of floats":
        result += (less & (limit * 1.5 > 100.0)).to(tl.int32)
    elif KIND == "block & loaded":
        result += (less & tl.load(yes)).to(tl.int32) + (less & tl.load(no)).to(tl.int32)
    elif KIND == "number as mask":
        result += tl.load(found + at, mask=limit > 100, other=7)
    elif KIND == "min and max":
        result += min(at, limit) * 100 + max(at, limit)
    elif KIND == "min and max of numbers":
        result += min(limit, 3) * 100 + max(2, SMALL)
    elif KIND == "if of numbers":
        if low and limit > 2:
            result += 3
        while not (limit < 4):
            limit -= 1
            result += 1
    tl.store(found + at, result)


TRUTHS: dict[str, Any] = {
    "block and block": LESS & MORE,
    "block or block": (AT > LIMIT) | (AT < 2),
    "not block": ~LESS,
    "and of three": LESS & MORE,
    "constant and block": LESS,
    "constant or block": AT >= 0,
    "block & number": LESS,
    "block & number of floats": AT < 0,
    "block & loaded": LESS,
    "number as mask": AT * 0 + 7,
    "min and max": np.minimum(AT, LIMIT) * 100 + np.maximum(AT, LIMIT),
    "min and max of numbers": AT * 0 + 302,
    "if of numbers": AT * 0 + 5,
}


def truths() -> dict[str, list[int]]:
    ctx, found = context(), {}
    yes, no = torch.tensor([True]), torch.tensor([False])
    for kind in TRUTHS:
        lanes = ctx.zeros(LANES, dtype=torch.int32)
        truth_kernel[(1,)](lanes, LIMIT, yes, no, KIND=kind, LANES=LANES, SMALL=1)
        found[kind] = lanes.tolist()
    return found


@ONE
def test_truth_of_blocks(ranks: Ranks) -> None:
    (found,) = ranks.run(truths)
    assert found == {kind: np.asarray(right).astype(int).tolist() for kind, right in TRUTHS.items()}


@triton.jit
def no_condition_kernel(found, KIND: tl.constexpr):
    at = tl.arange(0, 16)
    if KIND == "if":
        if at < 3:
            tl.store(found + at, 1)
    elif KIND == "while":
        while at < 3:
            at += 1
    elif KIND == "choice":
        tl.store(found + at, 1 if at < 3 else 2)


def refused(kernel: Any, *arguments: Any, **options: Any) -> Failure:
    return failure_of(lambda: kernel[(1,)](context().zeros(256), *arguments, **options))


def conditions() -> list[Failure]:
    return [refused(no_condition_kernel, KIND=kind) for kind in ("if", "while", "choice")]


@ONE
def test_a_block_is_no_condition(ranks: Ranks) -> None:
    (found,) = ranks.run(conditions)
    for one in found:
        assert one.kind == "InterpreterError"
        assert "a block is neither true nor false" in one.message


@triton.jit
def unrolled_kernel(found, count, KIND: tl.constexpr):
    if KIND == "argument":
        for i in tl.static_range(count):
            tl.store(found + i, i)
    elif KIND == "index":
        for i in range(2):
            for j in tl.static_range(i, 3):
                tl.store(found + j, i)
    elif KIND == "constants":
        for i in tl.static_range(2):
            for j in static_range(i, 3):
                tl.store(found + j, i)


def unrolled() -> list[Failure]:
    return [refused(unrolled_kernel, 3, KIND=kind) for kind in ("argument", "index", "constants")]


@triton.jit
def uncompiled_kernel(found, count, KIND: tl.constexpr):
    if KIND == "raise":
        raise ValueError
    if KIND == "try":
        try:
            tl.store(found, 1)
        finally:
            tl.store(found, 2)
    elif KIND == "else behind for":
        for i in range(2):
            tl.store(found + i, i)
        else:
            tl.store(found, 2)
    elif KIND == "for over":
        for i in (1, 2):
            tl.store(found + i, i)
    elif KIND == "range: expected whole numbers":
        for i in range(count / 2):
            tl.store(found + i, i)
    elif KIND == "static_assert: expected what is known":
        tl.static_assert(count > 2)
    elif KIND == "else behind while":
        while count > 7:
            count -= 1
        else:
            tl.store(found, 2)
    elif KIND == "del cannot be compiled":
        del count
    elif KIND == "import cannot be compiled":
        import math  # noqa: F401
    elif KIND == "match cannot be compiled":
        match count:
            case 7:
                tl.store(found, 1)
    elif KIND == "cannot access local variable 'i'":
        i = 0
        for i in range(count):
            tl.store(found + i, i)
        tl.store(found, i)
    elif KIND == "a negative step must be a constant":
        for i in range(8, 0, count - 9):
            tl.store(found + i, i)
    elif KIND == "a bound of uint8":
        for i in range(tl.load(found).to(tl.uint8)):
            tl.store(found + i, i)
    elif KIND == "the index of a tuple's element":
        for i in range(2):
            tl.store((found, found + 1)[i], 1)


UNCOMPILED = (
    "raise", "try", "else behind for", "for over", "range: expected whole numbers",
    "static_assert: expected what is known", "else behind while", "del cannot be compiled", "import cannot be compiled",
    "match cannot be compiled", "cannot access local variable 'i'", "a negative step must be a constant",
    "a bound of uint8", "the index of a tuple's element",
)  # fmt: skip


def uncompiled() -> list[Failure]:
    return [refused(uncompiled_kernel, 7, KIND=kind) for kind in UNCOMPILED]


@triton.jit
def changed_in_place_kernel(found, count, bound, NUMBER: tl.constexpr):
    count -= 8
    tl.store(found, count // 2)
    tl.store(found + 1, count % 4)
    NUMBER -= 8
    tl.store(found + 2, NUMBER // 2)
    tl.store(found + 3, count.to(tl.float32) / 2 > -3.6)
    for i in range(tl.load(bound).to(tl.uint32)):
        tl.store(found + 4 + i, (i - 5) // 2 > 5)


def changed_in_place() -> list[float]:
    ctx = context()
    found, bound = ctx.zeros(6), ctx.full((1,), 2, dtype=torch.int32)
    changed_in_place_kernel[(1,)](found, 1, bound, 1)
    ctx.synchronize()
    return found.tolist()


@ONE
def test_numbers_that_are_changed_in_place_are_those_of_the_compiler(ranks: Ranks) -> None:
    """Constants become tensors of int32, and variables of unsigned loops are unsigned."""
    assert ranks.run(changed_in_place) == [[-3.0, -3.0, -3.0, 1.0, 1.0, 1.0]]


@ONE
def test_what_does_not_compile_is_refused(ranks: Ranks) -> None:
    (found,) = ranks.run(uncompiled)
    for kind, one in zip(UNCOMPILED, found, strict=True):
        assert one.kind == "InterpreterError" and kind in one.message, one


@ONE
def test_only_a_known_number_of_rounds_is_unrolled(ranks: Ranks) -> None:
    ((argument, index, constants),) = ranks.run(unrolled)
    for one in (argument, index):
        assert one.kind == "InterpreterError"
        assert "static_range: expected numbers that are known when the kernel is compiled" in one.message
    assert constants.kind == "nothing"


@triton.jit
def added(x):
    return (x + x).to(tl.float32)


@triton.jit
def misplaced_kernel(found, KIND: tl.constexpr):
    at = tl.arange(0, 8)
    if KIND == "of NumPy":
        tl.store(found + at, tl.gather(at, at + 8, 0))
    elif KIND == "of Iris":
        tl.store(found + at, added(at.to(tl.float32).to(tl.float8e4nv)))


def misplaced() -> list[Failure]:
    return [refused(misplaced_kernel, KIND=kind) for kind in ("of NumPy", "of Iris")]


@ONE
def test_an_error_is_placed_in_the_kernel(ranks: Ranks) -> None:
    """Not in the library, nor in Iris, that has raised it."""
    ((numpys, own),) = ranks.run(misplaced)
    assert numpys.kind == "InterpreterError" and own.kind == "DTypeError"
    for failure in (numpys, own):
        assert f" At {__file__}:" in failure.message, failure
    assert ", in misplaced_kernel: tl.store(found + at, tl.gather(" in numpys.message
    assert own.message.endswith(", in added: return (x + x).to(tl.float32)")


@triton.jit
def library_kernel(x, y, found, LANES: tl.constexpr):
    at = tl.arange(0, LANES)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(found + at, libdevice.tanh(a))
    tl.store(found + LANES + at, libdevice.atan2(a, b))
    tl.store(found + 2 * LANES + at, libdevice.pow(b, 2.0))
    tl.store(found + 3 * LANES + at, libdevice.fast_expf(a))
    tl.store(found + 4 * LANES, libdevice.erf(tl.load(x)))


@triton.jit
def library_refused_kernel(found, KIND: tl.constexpr):
    if KIND == "unknown":
        tl.store(found, libdevice.cyl_bessel_i0(tl.load(found)))
    elif KIND == "half":
        tl.store(found, libdevice.tanh(tl.load(found).to(tl.float16)))
    elif KIND == "register":
        tl.store(found, tl.extra.cuda.smid())


def libraries(dtype: torch.dtype) -> float:
    ctx = context()
    x, y = ctx.randn(LANES, dtype=dtype), ctx.rand(LANES, dtype=dtype)
    found = ctx.zeros(5 * LANES, dtype=dtype)
    library_kernel[(1,)](x, y, found, LANES=LANES)
    right = torch.cat([x.tanh(), torch.atan2(x, y), y**2, x.exp(), x[:1].erf()])
    return float((found[: len(right)] - right).abs().max())


@ONE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_functions_of_libraries(ranks: Ranks, dtype: torch.dtype) -> None:
    assert ranks.run(libraries, dtype)[0] <= 4 * torch.finfo(dtype).eps


def libraries_refused() -> list[Failure]:
    return [refused(library_refused_kernel, KIND=kind) for kind in ("unknown", "half", "register")]


@ONE
def test_functions_of_libraries_that_cannot_be_simulated_say_so(ranks: Ranks) -> None:
    (found,) = ranks.run(libraries_refused)
    said = [
        "extra.libdevice.cyl_bessel_i0 cannot be simulated",
        "libdevice.tanh takes float32 or float64, got fp16",
        "extra.cuda.smid cannot be simulated",
    ]
    for one, words in zip(found, said, strict=True):
        assert one.kind == "InterpreterError"
        assert words in one.message


@triton.jit
def reduced_kernel(found, value, KIND: tl.constexpr):
    rows = tl.arange(0, 16)[:, None]
    cols = tl.arange(0, 16)[None, :]
    block = tl.make_tensor_descriptor(found, [10, 20], [20, 1], [16, 16])
    values = tl.load(value + rows * 16 + cols)
    if KIND == "add":
        block.atomic_add([0, 8], values)
    elif KIND == "max":
        block.atomic_max([0, 8], values)
    elif KIND == "min":
        block.atomic_min([0, 8], values)
    elif KIND == "xor":
        block.atomic_xor([0, 8], values)


COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add, "max": torch.maximum, "min": torch.minimum, "xor": torch.bitwise_xor,
}  # fmt: skip


def reduced(kind: str, dtype: torch.dtype) -> bool:
    """Whether the result is right of atomics on a descriptor's block that reaches beyond the matrix."""
    ctx = context()
    if dtype.is_floating_point:
        found, value = ctx.randn(10, 20, dtype=dtype), ctx.randn(16, 16, dtype=dtype)
    else:
        found, value = (ctx.randint(0, 200, size, dtype=dtype) for size in ((10, 20), (16, 16)))
    right = found.clone()
    right[:, 8:] = COMBINE[kind](right[:, 8:], value[:10, :12])
    reduced_kernel[(1,)](found, value, KIND=kind)
    return torch.equal(found, right)


@ONE
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("add", torch.float32), ("add", torch.int32), ("max", torch.int32), ("min", torch.int32), ("xor", torch.int32)],
    ids=str,
)
def test_atomics_of_descriptors(ranks: Ranks, kind: str, dtype: torch.dtype) -> None:
    assert ranks.run(reduced, kind, dtype)[0]


def test_what_the_interpreter_lacks_says_so() -> None:
    from triton.runtime.interpreter import interpreter_builder

    with pytest.raises(AttributeError, match=r"^warp_dance cannot be simulated: Triton's interpreter has no create_"):
        interpreter_builder.create_warp_dance()


@triton.jit
def counting_poll_kernel(flag, polls):
    if tl.program_id(0) == 0:
        count = 0
        while tl.load(flag) < 1:
            count += 1
            tl.store(polls, count)
    else:
        tl.atomic_xchg(flag, 1)


def counted_polls() -> int:
    ctx = context()
    flag, polls = ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    counting_poll_kernel[(2,)](flag, polls)
    return int(polls)


@ONE
def test_a_poll_that_counts_in_memory_lets_others_run(ranks: Ranks) -> None:
    assert 0 < ranks.run(counted_polls)[0] < 10_000


@triton.jit
def loop_kernel(found, first, count, KIND: tl.constexpr):
    if KIND == "cast":
        for i in range(first, first + count):
            tl.store(found + i - first, i.to(tl.int64) * 3)  # type: ignore[attr-defined]
    elif KIND == "divided":
        for i in range(first, first + count):
            tl.store(found + i - first, i // 3 * 10 + i % 3)
    elif KIND == "wraps":
        for i in tl.range(100000, 100000 + count):
            tl.store(found + i - 100000, i * i + first)
    elif KIND == "wide":
        start = tl.full((), 100000, tl.int64)
        for i in range(start, start + count):
            tl.store(found + (i - 100000).to(tl.int32), i * i + first)  # type: ignore[attr-defined]
    elif KIND == "constants":
        for i in tl.static_range(3):
            tl.store(found + i, i // 2 - first)
    elif KIND == "global constants":
        for i in range(count):
            tl.store(found + i, added_indices(THREE * i, i - THREE).to(tl.int64))
    elif KIND == "compared":
        for i in range(count):
            tl.store(found + i, tl.where(~(i > 2), 1, 0) + (i < THREE).to(tl.int64) * 2)
    elif KIND == "not":
        for i in range(count):
            if not i > 2:
                tl.store(found + i, (not i == 1).to(tl.int32))  # type: ignore[attr-defined]
    elif KIND == "inverted":
        for i in range(count):
            if ~(i > 2):
                tl.store(found + i, i + 1)
    elif KIND == "one bit":
        for i in range(count):
            tl.store(found + i, (i > 0) + (i > 1))
    elif KIND == "masks":
        at = tl.arange(0, 8)
        for i in range(count):
            tl.store(found + at, i + 1, mask=(at == i) & ~(i == 1))
            tl.atomic_add(found + i, tl.full((), 10, tl.int64), mask=i > 2.5)


@triton.jit
def added_indices(a, b):
    return a.to(tl.int64) + b.to(tl.int64)


def int32(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


LOOPS: dict[str, Callable[[int], int]] = {
    "cast": lambda i: 3 * (i - 4),
    "divided": lambda i: int((i - 4) / 3) * 10 + int(np.fmod(i - 4, 3)),
    "wraps": lambda i: int32(int32((100000 + i) ** 2) - 4),
    "wide": lambda i: (100000 + i) ** 2 - 4,
    "constants": lambda i: i // 2 + 4,
    "global constants": lambda i: 4 * i - 3,
    "compared": lambda i: 3 if i < 3 else 0,
    "not": lambda i: int(i != 1) if i < 3 else 0,
    "inverted": lambda i: i + 1 if i < 3 else 0,
    "one bit": lambda i: int(i == 1),
    "masks": lambda i: (i + 1 if i != 1 else 0) + (10 if i > 2 else 0),
}


def loops() -> dict[str, list[int]]:
    ctx, results = context(), {}
    for kind in LOOPS:
        found = ctx.zeros(8, dtype=torch.int64)
        loop_kernel[(1,)](found, -4, 6, KIND=kind)
        results[kind] = found.tolist()
    return results


@ONE
def test_variables_of_loops_are_numbers_as_compiled(ranks: Ranks) -> None:
    (results,) = ranks.run(loops)
    for kind, value in LOOPS.items():
        count = 3 if kind == "constants" else 6
        assert results[kind][:count] == [value(i) for i in range(count)], kind


@triton.jit
def overflowing_kernel(found):
    large = tl.full((4,), 1e30, tl.float32)
    tl.store(
        found + tl.arange(0, 4), (large * large).to(tl.float16) - large.to(tl.float16) + tl.exp(large) / (large * 0)
    )


def overflowing() -> list[float]:
    found = context().zeros(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        overflowing_kernel[(2,)](found)
    return list(found.tolist())


@ONE
def test_floats_that_overflow_are_no_warnings(ranks: Ranks) -> None:
    (found,) = ranks.run(overflowing)
    assert np.isnan(found).all()


@triton.jit
def arguments_kernel(found, whole, real, wide: tl.int64, exact: tl.float64):
    tl.store(found, (whole + 1).to(tl.float64))
    tl.store(found + 1, (whole * 2).to(tl.float64))
    tl.store(found + 2, real.to(tl.float64))
    tl.store(found + 3, (wide * wide).to(tl.float64))
    tl.store(found + 4, exact)
    a, b = -7, 2
    tl.store(found + 5, (a // b).to(tl.float64))  # type: ignore[attr-defined]


def arguments() -> list[float]:
    found = context().zeros(6, dtype=torch.float64)
    arguments_kernel[(1,)](found, 3_000_000_000, 0.1, 100_000, 0.1)
    return list(found.tolist())


@ONE
def test_numbers_have_types_as_compiled(ranks: Ranks) -> None:
    (found,) = ranks.run(arguments)
    assert found == [3e9 + 1, 6e9, float(np.float32(0.1)), 1e10, 0.1, -3.0]


@triton.jit
def times(a, b):
    return a * b


@triton.jit
def times_both(a, b, c, d):
    return a * c, b * d


@triton.jit
def axes_kernel(found, COLS: tl.constexpr):
    block = tl.arange(0, 2)[:, None] * COLS + tl.arange(0, COLS)[None, :] + 1
    at = tl.arange(0, 2)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(found + at, tl.associative_scan(block, -1, times))
    tl.store(found + 2 * COLS + tl.arange(0, 2), tl.reduce(block, -1, times))
    one, other = tl.reduce((block, block + 1), None, times_both)
    tl.store(found + 2 * COLS + 2, one)
    tl.store(found + 2 * COLS + 3, other)


def axes() -> list[int]:
    found = context().zeros(12, dtype=torch.int32)
    axes_kernel[(1,)](found, COLS=4)
    return list(found.tolist())


@ONE
def test_axes_may_be_counted_from_the_last(ranks: Ranks) -> None:
    (found,) = ranks.run(axes)
    block = np.arange(1, 9).reshape(2, 4)
    rows = np.cumprod(block, axis=1)
    assert found == [*rows.flatten(), *rows[:, -1], block.prod(), (block + 1).prod()]


def captured() -> list[list[int]]:
    """Results of kernels that use variables of the enclosing function."""
    count, results = tl.constexpr(8), []
    for number in (2, 3):
        factor = tl.constexpr(number)

        @triton.jit
        def scaled(x):
            """Not the function that is meant:

            def scaled(x):
                return x
            """
            return factor * x  # noqa: B023

        @triton.jit
        def scaling_kernel(found):
            at = tl.arange(0, count)
            tl.store(found + at, scaled(at))

        found = context().zeros(8, dtype=torch.int32)
        scaling_kernel[(1,)](found)
        results.append(found.tolist())
    return results


@ONE
def test_kernels_see_the_variables_around_them(ranks: Ranks) -> None:
    (results,) = ranks.run(captured)
    assert results == [[factor * i for i in range(8)] for factor in (2, 3)]


@triton.jit
def predicates_kernel(values, found, LANES: tl.constexpr):
    at = tl.arange(0, LANES)
    value = tl.load(values + at)
    tl.store(found + at, tl.where(libdevice.isnan(value), 1, 0) + tl.where(libdevice.isinf(value), 2, 0))


def predicates() -> list[int]:
    ctx = context()
    values, found = ctx.zeros(4), ctx.zeros(4, dtype=torch.int32)
    values.copy_(torch.tensor([1.0, float("nan"), float("-inf"), 0.0]))
    predicates_kernel[(1,)](values, found, LANES=4)
    return list(found.tolist())


@ONE
def test_predicates_of_libraries(ranks: Ranks) -> None:
    assert ranks.run(predicates) == [[0, 1, 2, 0]]


@triton.jit
def asserting_kernel(limit, KIND: tl.constexpr):
    at = tl.arange(0, 4)
    if KIND == "device_assert":
        tl.device_assert(at < limit, "too large")
    elif KIND == "assert of a block":
        assert at < limit, "too large"
    else:
        assert limit > 4, "too large"


def assertions() -> list[Failure]:
    return [
        failure_of(lambda kind=kind, limit=limit: asserting_kernel[(1,)](limit, KIND=kind))
        for kind in ("device_assert", "assert of a block", "assert")
        for limit in (3, 5)
    ]


@ONE
def test_assertions_are_checked(ranks: Ranks) -> None:
    (failures,) = ranks.run(assertions)
    assert [failure.kind for failure in failures] == ["InterpreterError", "nothing"] * 3
    assert all("too large" in failure.message for failure in failures[::2])


@triton.jit
def signed(value):
    if value < 0:
        return -3
    else:
        return 3


@triton.jit
def signed_pair(value):
    if value < 0:
        return -3, 1
    return 3, 2


@triton.jit
def of_kind(KIND: tl.constexpr):
    if KIND == 0:
        return 4
    return 8


@triton.jit
def choosing_kernel(value_ptr, found):
    value = tl.load(value_ptr)
    tl.store(found, signed(value) // 2)
    tl.store(found + 1, (-3 if value < 0 else 3) // 2)
    tl.store(found + 2, signed_pair(value)[0] // 2)
    tl.store(found + 3, (signed(value).to(tl.float32) * 2).to(tl.int32))
    tl.store(found + 4, (value if value > 0 else 7).to(tl.int32))  # type: ignore[union-attr]
    for i in range(2):
        tl.store(found + 5 + i, (-3 if i == 0 else 3) // 2)
    tl.store(found + 7 + tl.arange(0, of_kind(0)), of_kind(1))  # constants as before: the size of a block


def choices() -> list[list[int]]:
    ctx = context()
    found = ctx.zeros(2, 11, dtype=torch.int32)
    for row, value in zip(found, (-1, 1), strict=True):
        choosing_kernel[(1,)](ctx.full((1,), value, dtype=torch.int32), row)
    ctx.synchronize()
    return [list(map(int, row)) for row in found]


@ONE
def test_what_is_chosen_when_a_kernel_runs_is_a_tensor(ranks: Ranks) -> None:
    """It is divided toward zero, and can be cast."""
    (found,) = ranks.run(choices)
    assert found == [[-1, -1, -1, -6, 7, -1, 1, 8, 8, 8, 8], [1, 1, 1, 6, 1, -1, 1, 8, 8, 8, 8]]


def test_an_interpreted_kernel_has_no_assembly() -> None:
    with pytest.raises(iris.BackendError, match="interpreted in this process; start it with IRIS_BACKEND=compile"):
        iris.assembly(library_kernel, target="sm_90")
