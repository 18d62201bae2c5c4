"""The types that Triton itself gives; run as a script, it prints them from a process without Iris."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

NUMBERS = (tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.uint64, tl.float16, tl.bfloat16, tl.float32)
POINTERS = (tl.pointer_type(tl.float16), tl.pointer_type(tl.float16, const=True), tl.pointer_type(tl.int64))
SHAPES = ([1], [4, 8], [8, 4], [tl.constexpr(2), 2, 2])
OPERANDS: tuple[list[int], ...] = ([], [1], [8], [4, 8], [4, 1], [1, 4, 1])
"""Shapes of operands; the first is that of a single number."""
VALUES = (0, 1, -1, 200, 1 << 31, -(1 << 40), 1 << 63, True, 0.5, -0.0, float("nan"))
WRONG_SHAPES: tuple[list[object], ...] = ([], ["4"], [3], [tl.constexpr(5)], [None])


def said(fn: Callable[..., object], *arguments: object) -> str:
    """The result of ``fn`` as text, or the text of its error."""
    try:
        return str(fn(*arguments))
    except Exception as error:  # noqa: BLE001 (whatever Triton raises)
        return repr(error)


def types() -> list[str]:
    """The types of numbers, pointers, blocks and tensors of them; each twice, in case a cache changes the second."""
    promote = TritonSemantic(interpreter.interpreter_builder).computation_type_impl
    flags = (False, True)
    told = [said(promote, *key) for key in itertools.product(NUMBERS, flags, NUMBERS, flags, flags)]
    for element, shape in itertools.product((*NUMBERS, *POINTERS), SHAPES):
        block = tl.block_type(element, shape)
        assert block.element_ty is element
        told.append(f"{list(block.shape)} {block.numel}")
        for one in (element, block):
            tensor = tl.tensor(None, one)
            sizes = [size.value for size in tensor.shape]
            told.append(f"{one} {sizes} {tensor.numel.value} {tensor.dtype} {tensor.type}")
            told.append(f"{interpreter._get_np_dtype(one)} {[one == other for other in (*NUMBERS, *POINTERS)]}")
    return told + [said(tl.block_type, tl.int32, shape) for shape in WRONG_SHAPES]


def operands() -> list[str]:
    """The types and values that result from two operands of ``+``, ``<``, ``//`` and the like, and from a load."""
    semantic = TritonSemantic(interpreter.interpreter_builder)
    agree, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    told = []
    for left, right in itertools.product((*NUMBERS, POINTERS[0]), repeat=2):
        for shapes in itertools.product(OPERANDS, repeat=2) if left is right else [([8], []), ([4, 1], [8])]:
            pair = [block(element, shape) for element, shape in zip((left, right), shapes, strict=True)]
            told += [said(both, agree, *pair, True, True), said(both, agree, *pair, False, False, True, True)]
            told.append(said(both, broadcast, *pair))
    beside = [element for element in (*NUMBERS, POINTERS[0]) if element != tl.bfloat16]  # Triton 3.6 cannot make that
    for element, shape, value in itertools.product(beside, ([], [4, 8]), VALUES):
        one = block(element, shape)
        told += [
            said(both, agree, one, value),
            said(both, agree, value, one),
            said(both, agree, one, value, True, True),
        ]
    return told


def block(element: tl.dtype, shape: list[int]) -> tl.tensor:
    """A block of 0, 1, 0, … of type ``element``; a single number if ``shape`` is empty."""
    numbers = (np.arange(math.prod(shape)) % 2).astype(interpreter._get_np_dtype(element)).reshape(shape or 1)
    return tl.tensor(interpreter.TensorHandle(numbers, element), tl.block_type(element, shape) if shape else element)


def both(agree: Callable[..., tuple[tl.tensor, tl.tensor]], *operands: object) -> list[str]:
    with np.errstate(all="ignore"):
        results = agree(*operands)
    converted = tl.bfloat16 in [one.dtype for one in (*operands, *results) if isinstance(one, tl.tensor)]
    return [  # not the numbers that bfloat16 takes part in, of which Triton converts patterns
        f"{one.type} {one.handle.dtype} {one.handle.data.shape} {None if converted else one.handle.data.tolist()}"
        for one in results
    ]


if __name__ == "__main__":
    print("\n".join((types() + operands()) * 2))
