"""Numbers in simulated kernels have the types, and so the values, that the compiler gives them: constants next to
tensors, numbers of loops, of tuples and of results of functions; sums in 16 bits; floats as integers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language
import triton.language as tl
from ranks import BACKEND, Ranks, context, failure_of, fresh

pytestmark = pytest.mark.skipif(BACKEND != "sim", reason="tests the simulator")
ONE = pytest.mark.parametrize("ranks", [1], indirect=True)
HALF = tl.constexpr(0.5)
TWO = tl.constexpr(2)


def loaded(values: Any, dtype: torch.dtype) -> torch.Tensor:
    tensor = context().empty(len(values), dtype=dtype)
    tensor.copy_(torch.tensor(values, dtype=dtype))
    return tensor


@triton.jit
def scaled_sum(a, b):
    return HALF * (a + b)


@triton.jit
def constants_kernel(x, found, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    a = tl.load(x + at)
    tl.store(found + at, HALF * a)
    tl.store(found + COUNT + at, tl.exp2(TWO * a))
    tl.store(found + 2 * COUNT + at, (TWO - a).to(tl.float32))
    tl.store(found + 3 * COUNT + at, tl.where(TWO > at, a, -(HALF * a)))
    tl.store(found + 4 * COUNT + at, tl.sum((HALF * a)[:, None], 1))
    tl.store(found + 5 * COUNT + at, tl.reduce(tl.join(a, a), 1, scaled_sum))
    tl.store(found + 6 * COUNT + at, (TWO == at).to(tl.float32))


def beside_constants() -> list[list[float]]:
    found = context().empty(7 * 4)
    constants_kernel[(1,)](loaded([1, 2, 3, 4], torch.float32), found, COUNT=4)
    return [list(row) for row in found.view(7, 4).tolist()]


@ONE
def test_a_constant_beside_a_tensor_is_its_value(ranks: Ranks) -> None:
    assert ranks.run(beside_constants)[0] == [
        [0.5, 1, 1.5, 2], [4, 16, 64, 256], [1, 0, -1, -2], [1, 2, -1.5, -2], [0.5, 1, 1.5, 2], [1, 2, 3, 4],
        [0, 0, 1, 0],
    ]  # fmt: skip


@triton.jit
def loops_kernel(small, halves, found, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    a, h = tl.load(small + at), tl.load(halves + at)
    for j in range(3, 4):
        tl.store(found + at, (a * (j + 100)).to(tl.float64))
        tl.store(found + COUNT + at, (a == j + 297).to(tl.float64))
        tl.store(found + 2 * COUNT + at, tl.maximum(a, j + 297).to(tl.float64))
        tl.store(found + 3 * COUNT + at, (h * (j * 0.1)).to(tl.float64))
        tl.store(found + 4 * COUNT + at, (h * (j / 7)).to(tl.float64))
    for j in tl.static_range(3, 4):
        tl.store(found + 5 * COUNT + at, (a * (j + 97)).to(tl.float64))


def beside_loops() -> list[list[float]]:
    found = context().empty(6 * 4, dtype=torch.float64)
    loops_kernel[(1,)](loaded([1, 2, 3, 100], torch.int8), loaded([1, 2, 3, 0.1], torch.float16), found, COUNT=4)
    return [list(row) for row in found.view(6, 4).tolist()]


@ONE
def test_a_number_of_a_loop_beside_tensors_has_32_bits(ranks: Ranks) -> None:
    times, equal, greater, tenths, sevenths, static = ranks.run(beside_loops)[0]
    assert times == [103, 206, 309, 10300] and equal == [0] * 4 and greater == [300] * 4
    halves = np.array([1, 2, 3, 0.1], np.float16).astype(np.float32)
    assert tenths == (halves * (np.float32(3) * np.float32(0.1))).tolist()
    assert sevenths == (halves * (np.float32(3) / np.float32(7))).tolist()
    assert static == [100, -56, 44, 16]  # a constant, which takes the dtype of the tensor


@triton.jit
def bits_kernel(x, y, found, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    a, b = tl.load(x + at) > 0, tl.load(y + at) > 0
    tl.store(found + at, (a + b).to(tl.int32))
    tl.store(found + COUNT + at, (a - b).to(tl.int32))
    tl.store(found + 2 * COUNT + at, (a & b).to(tl.int32))


def of_bits(dtype: torch.dtype) -> list[list[int]]:
    found = context().empty(3 * 4, dtype=torch.int32)
    bits_kernel[(1,)](loaded([0, 0, 1, 1], dtype), loaded([0, 1, 0, 1], dtype), found, COUNT=4)
    return [list(row) for row in found.view(3, 4).tolist()]


@ONE
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bfloat16], ids=str)
def test_comparisons_have_one_bit(ranks: Ranks, dtype: torch.dtype) -> None:
    assert ranks.run(of_bits, dtype)[0] == [[0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]


@triton.jit
def sums_kernel(x, found, ROWS: tl.constexpr, COLS: tl.constexpr):
    a = tl.load(x + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :])
    tl.store(found, tl.max(tl.sum(a, 0), 0).to(tl.float32))
    tl.store(found + 1, tl.max(tl.max(tl.cumsum(a, 0), 0), 0).to(tl.float32))
    tl.store(found + 2, tl.sum(tl.sum(a, 1), 0).to(tl.float32))
    tl.store(found + 3, tl.max(a * 60000).to(tl.float32))


def sums(dtype: torch.dtype) -> list[float]:
    found = context().empty(4)
    sums_kernel[(1,)](loaded([1.0] * 8192, dtype), found, ROWS=4096, COLS=2)
    return list(found.tolist())


@ONE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_are_rounded_once(ranks: Ranks, dtype: torch.dtype) -> None:
    assert ranks.run(sums, dtype)[0] == [4096, 4096, 8192, float(torch.tensor(60000.0, dtype=dtype))]


class Pair(NamedTuple):
    factor: float
    size: Any


@triton.jit
def initial():
    return float("-inf"), 0.1


@triton.jit
def tuples_kernel(halves, found, pair, COUNT: tl.constexpr):
    h = tl.load(halves + tl.arange(0, COUNT))
    low, tenth = initial()
    both = (0.1, 2), 3
    tl.store(found, low.to(tl.float64))
    tl.store(found + 1, tl.max(h * tenth).to(tl.float64))
    tl.store(found + 2, tl.max(h * both[0][0]).to(tl.float64))
    tl.store(found + 3, tl.max(h * pair.factor).to(tl.float64))
    tl.store(found + 4, (pair.size[0] * pair.size[0]).to(tl.float64))


def of_tuples() -> list[float]:
    found = context().empty(5, dtype=torch.float64)
    tuples_kernel[(1,)](loaded([3.0], torch.float16), found, Pair(0.1, (2**32 - 1,)), COUNT=1)
    return list(found.tolist())


@ONE
def test_numbers_of_tuples_have_types(ranks: Ranks) -> None:
    """2³² - 1 has 64 bits, in which its square wraps around."""
    product = float(np.float32(3) * np.float32(0.1))
    assert ranks.run(of_tuples)[0] == [-np.inf, product, product, product, float(1 - 2**33)]


@triton.jit
def integers_kernel(x, found, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(found + at, tl.load(x + at).to(DTYPE))


FLOATS = [3e9, -3e9, 1e20, -1e20, -1.9, 300.7, float("inf"), float("nan")]


def integers(dtype: torch.dtype, of: torch.dtype, kind: tl.dtype) -> list[int]:
    found = context().empty(len(FLOATS), dtype=dtype)
    integers_kernel[(1,)](loaded(FLOATS, of), found, COUNT=len(FLOATS), DTYPE=kind)
    return list(found.tolist())


@ONE
def test_floats_beyond_integers_are_the_nearest(ranks: Ranks) -> None:
    def found(dtype: torch.dtype, kind: tl.dtype, of: torch.dtype = torch.float32) -> list[int]:
        return list(ranks.run(integers, dtype, of, kind)[0])

    least, most = -(2**31), 2**31 - 1
    assert found(torch.int32, tl.int32) == [most, least, most, least, -1, 300, most, 0]
    assert found(torch.int32, tl.int32, torch.float64) == [most, least, most, least, -1, 300, most, least]
    assert found(torch.int16, tl.int16) == [32767, -32768, 32767, -32768, -1, 300, 32767, 0]
    assert found(torch.uint8, tl.uint8) == [255, 0, 255, 0, 0, 300 - 256, 255, 0]
    assert found(torch.int64, tl.int64) == [3 * 10**9, -3 * 10**9, 2**63 - 1, -(2**63), -1, 300, 2**63 - 1, -(2**63)]
    of_16 = found(torch.int32, tl.int32, torch.bfloat16)
    assert of_16[1:] == [least, most, least, -1, int(torch.tensor(300.7).bfloat16()), most, 0]


@triton.jit
def wide_kernel(found, n):
    tl.store(found, n.to(tl.int64) + 1)


@triton.jit
def annotated_number_kernel(found, n: tl.int64):
    tl.store(found, n.to(tl.int64) + 1)


@triton.jit(do_not_specialize=["n"])
def unspecialised_kernel(found, n):
    tl.store(found, n.to(tl.int64) + 1)


def wide(n: int) -> list[Any]:
    """The result of each kernel for ``n``, or its error."""
    results: list[Any] = []
    for kernel in (wide_kernel, annotated_number_kernel, unspecialised_kernel):
        with fresh() as ctx:
            found = ctx.zeros(1, dtype=torch.int64)
            failure = failure_of(lambda kernel=kernel, found=found: kernel[(1,)](found, n))
            results.append(failure.message or found.item())
    return results


@ONE
def test_a_whole_one_is_a_constant_unless_said_otherwise(ranks: Ranks) -> None:
    """It is one when compiled, too: a kernel that casts its rank fails on rank 1."""
    assert ranks.run(wide, 2)[0] == [3] * 3
    constant, *numbers = ranks.run(wide, 1)[0]
    assert "'int' object has no attribute 'to'" in constant and numbers == [2, 2]


PLAIN = 4


@triton.jit
def plain_kernel(found, KIND: tl.constexpr):
    if KIND == "variable":
        tl.store(found, PLAIN)
    elif KIND == "break":
        for i in range(4):
            if i > 2:
                break
            tl.store(found + i, i)
    elif KIND == "continue":
        for i in range(4):
            if i < 2:
                continue
            tl.store(found + i, i)
    elif KIND == "return":
        for i in range(4):
            if i > 2:
                return
            tl.store(found + i, i)
    else:
        PLAIN_TOO = 3
        tl.store(found, PLAIN_TOO)


PLAIN_TOO = 5
KINDS = {
    "variable": "NameError('PLAIN is a variable of the module or function around the kernel, and no constant",
    "break": "NotImplementedError('break cannot be compiled",
    "continue": "NotImplementedError('continue cannot be compiled",
    "return": "NotImplementedError('return in a loop cannot be compiled",
    "own": "",
}


def refused(kind: str) -> str:
    with fresh() as ctx:
        found = ctx.zeros(4, dtype=torch.int32)
        return failure_of(lambda: plain_kernel[(1,)](found, KIND=kind)).message


@ONE
@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_compiled_is_refused(ranks: Ranks, kind: str) -> None:
    said = ranks.run(refused, kind)[0]
    assert said.startswith(KINDS[kind]) and bool(said) == bool(KINDS[kind])


def from_a_module_without_the_language(folder: str) -> list[int]:
    spec = importlib.util.spec_from_file_location("plain", f"{folder}/plain.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plain = module.plain

    @triton.jit
    def calling_kernel(found, COUNT: tl.constexpr):
        at = tl.arange(0, COUNT)
        tl.store(found + at, plain(at, at))

    found = context().zeros(4, dtype=torch.int32)
    calling_kernel[(1,)](found, COUNT=4)
    return list(found.tolist())


@ONE
def test_a_device_functions_module_need_not_import_the_language(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import triton\n\n\n@triton.jit\ndef plain(a, b):\n    return a * b + 1\n")
    assert ranks.run(from_a_module_without_the_language, str(tmp_path))[0] == [1, 2, 5, 10]


@triton.jit
def annotated_kernel(found, COUNT: triton.language.constexpr, VALUE: "tl.constexpr" = 3):  # noqa: UP037
    tl.store(found + tl.arange(0, COUNT), VALUE)


def with_defaults() -> list[list[int]]:
    """Constants that are annotated in another way, and a default that is a variable of the enclosing function."""
    found = context().zeros(4, dtype=torch.int32)
    annotated_kernel[(1,)](found, COUNT=4)
    results = [found.tolist()]
    for size in (2, 4):

        @triton.jit
        def around_kernel(found, COUNT: tl.constexpr = size):
            tl.store(found + tl.arange(0, COUNT), COUNT)

        around_kernel[(1,)](found)
        results.append(found.tolist())
    return results


@ONE
def test_defaults_and_annotations_are_those_of_the_definition(ranks: Ranks) -> None:
    assert ranks.run(with_defaults)[0] == [[3] * 4, [2, 2, 3, 3], [4] * 4]
