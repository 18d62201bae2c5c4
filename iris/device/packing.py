"""Blocks of any dtype as blocks of int32, which words carry (:func:`iris.device.words.store_words`)."""

import triton
import triton.language as tl


@triton.jit
def _paired(block, dtype: tl.constexpr):
    """Pairs of neighbours in a row as one integer of twice the size, the left one in the low half."""
    low, high = tl.split(tl.reshape(block, (block.shape[0], block.shape[1] // 2, 2)))
    half: tl.constexpr = block.dtype.primitive_bitwidth
    return (low.to(dtype) & ((1 << half) - 1)) | (high.to(dtype) << half)


@triton.jit
def packed(block):
    """A block as int32, several elements in one if they are smaller."""
    if block.dtype.primitive_bitwidth == 32:
        return block.to(tl.int32, bitcast=True)
    elif block.dtype.primitive_bitwidth == 16:
        return _paired(block.to(tl.int16, bitcast=True), tl.int32)
    else:
        return _paired(_paired(block.to(tl.int8, bitcast=True), tl.int16), tl.int32)


@triton.jit
def _parted(block, dtype: tl.constexpr):
    """The inverse of :func:`_paired`, for blocks of three dimensions."""
    half: tl.constexpr = dtype.primitive_bitwidth
    pairs = tl.join(block.to(dtype), (block >> half).to(dtype))
    return tl.reshape(pairs, (block.shape[0], block.shape[1], block.shape[2] * 2))


@triton.jit
def unpacked(block, dtype: tl.constexpr):
    """The inverse of :func:`packed`, for blocks of three dimensions."""
    if dtype.primitive_bitwidth == 32:
        return block.to(dtype, bitcast=True)
    elif dtype.primitive_bitwidth == 16:
        return _parted(block, tl.int16).to(dtype, bitcast=True)
    else:
        return _parted(_parted(block, tl.int16), tl.int8).to(dtype, bitcast=True)
