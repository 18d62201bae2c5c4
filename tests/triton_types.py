"""What Triton says of types; printed where this is run, so that Triton can be asked in a process without Iris."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

NUMBERS = (tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.uint64, tl.float16, tl.bfloat16, tl.float32)
POINTERS = (tl.pointer_type(tl.float16), tl.pointer_type(tl.float16, const=True), tl.pointer_type(tl.int64))
SHAPES = ([1], [4, 8], [8, 4], [tl.constexpr(2), 2, 2])
WRONG_SHAPES: tuple[list[object], ...] = ([], ["4"], [3], [tl.constexpr(5)], [None])


def said(fn: Callable[..., object], *arguments: object) -> str:
    """The result in words, or what the error says."""
    try:
        return str(fn(*arguments))
    except Exception as error:  # noqa: BLE001 (whatever Triton raises)
        return repr(error)


def types() -> list[str]:
    """Of numbers, pointers, blocks and tensors of them; twice, in case somebody remembers the first time."""
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


if __name__ == "__main__":
    print("\n".join(types() + types()))
