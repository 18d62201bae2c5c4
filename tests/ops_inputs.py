"""The common parts of the tests of ops: the ways to run them, random operands, and the test of a right result.

A *way* is an op with an algorithm and, for a gather, a dimension: :func:`ways` lists them from
``iris.ops.ALGORITHMS``, so that a new algorithm is tested as soon as it exists. A :class:`Trial` is one rank's part of
one call: all ranks draw the same matrices from a seed, so each knows the right result of every rank.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from ranks import BACKEND
from torch.autograd import forward_ad

import iris
from iris.ops import ALGORITHMS, FusedConfig
from iris.ops.algorithms import EXCHANGING
from iris.ops.problem import FLOATS, output_dtype

T = TypeVar("T")

GATHER, SCATTER = "all_gather_matmul", "matmul_all_scatter"
REDUCE_SCATTER, ALL_REDUCE, LOCAL = "matmul_reduce_scatter", "matmul_all_reduce", "matmul"
SMALL = FusedConfig(
    block_size_m=16, block_size_n=16, block_size_k=32, comm_block_m=16, comm_block_n=32, num_warps=4, num_stages=2
)


Shape = tuple[int, int, int]
"""Rows, columns and depth of one rank's part of the whole."""

SHAPES: tuple[Shape, ...] = (
    (15, 17, 31),
    (17, 15, 33),
    (1, 1, 1),
    (16, 16, 32),
    (3, 31, 8),
    (19, 29, 37),
    (16, 33, 24),
)
"""Sizes relative to the blocks of SMALL: one less and one more than a block, whole blocks, primes, far less than a
block, and depths that are whole blocks only together with those of the other ranks (four times 8, or 24)."""
BIASES = (None, "column", "row")
SCALES = (("each", "each"), ("one", "one"), (None, "each"), ("each", None), ("one", "each"), (None, None))
"""Kinds of scales of A (one for all, or one for each row) and of B (one for all, or one for each column); for int8 some
of them, with float outputs."""
LAYOUTS = ("plain", "transposed", "strided")
"""Layouts of all three matrices: rows contiguous; columns contiguous; neither, and nothing aligned."""

# By default torch.matmul, in the baselines, adds up parts of a long sum in 16 bits on GPUs.
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


class Way(NamedTuple):
    """An op, one of its algorithms, and which dimension of A is gathered (0 for ops that gather nothing)."""

    op: str
    algorithm: str
    gather_dim: int = 0

    def __str__(self) -> str:
        sharded = ("-rows", "-columns")[self.gather_dim] if self.op == GATHER else ""
        return f"{self.op}-{self.algorithm}{sharded}"

    @property
    def deterministic(self) -> bool:
        return self.algorithm != "atomic"

    @property
    def even_rows(self) -> bool:
        """Whether ranks must be able to share the rows evenly, although the op itself does not require it."""
        return (self.op, self.algorithm) == (ALL_REDUCE, "copy_engine")

    @property
    def contiguous_rows(self) -> bool:
        """Whether the output's rows must be contiguous, as the copy engine copies them."""
        return self.op in (SCATTER, ALL_REDUCE) and self.algorithm in ("copy_engine", "decomposed", "ring")

    @property
    def ring(self) -> bool:
        """Whether sums travel from rank to rank, and are rounded at each."""
        return self.algorithm == "ring"

    @property
    def adds_columns(self) -> bool:
        """Whether products of one rank's columns are added up in the output, and rounded each time; not if they are of
        8 bits."""
        return (self.op, self.algorithm, self.gather_dim) == (GATHER, "decomposed", 1)

    @property
    def least_programs(self) -> int:
        """The fewest programs of a launch: one that computes, and one more if some programs only move data."""
        return 2 if self.algorithm in ("split", "streams", "relay", "hbm_buffer") else 1


def ways(*ops: str) -> list[Way]:
    """All ways to run ``ops``, or every op."""
    return [
        Way(op, algorithm, gather_dim)
        for op, algorithms in ALGORITHMS.items()
        if op in (ops or ALGORITHMS)
        for algorithm in algorithms
        for gather_dim in ((0, 1) if op == GATHER else (0,))
    ]


def some(values: Sequence[T], one_of: int = 2) -> list[T]:
    """All ``values`` on GPUs, or if IRIS_TEST_ALL is 1; with simulated ranks, which take about a second for each value,
    one in ``one_of``. The seed decides which, so that several runs cover all. If the values are all combinations of
    some lists, ``one_of`` is best no divisor of a list's length."""
    turn = int(os.environ.get("IRIS_TEST_SEED", "0")) % one_of
    every = BACKEND != "sim" or os.environ.get("IRIS_TEST_ALL") == "1"
    return list(values) if every else list(values)[turn::one_of]


IN_WORDS = [way for way in ways() if way.algorithm in (*EXCHANGING, "one_shot", "two_shot")]
"""Ways that send small amounts as words, each of which shows that it has arrived, and larger amounts with flags."""
each_way = pytest.mark.parametrize("way", ways(), ids=str)


def rotated(values: tuple[Any, ...], turn: int, count: int) -> list[Any]:
    """``count`` of ``values``; each ``turn`` takes the next ones."""
    return [values[(turn * count + index) % len(values)] for index in range(count)]


class Inputs:
    """The same random matrices on every rank, drawn from ``seed``; with ``whole`` numbers, products and sums are exact
    in every dtype."""

    def __init__(self, seed: int, whole: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.whole = whole

    def matrix(self, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        if self.whole:
            return torch.randint(-1, 2, (rows, cols), generator=self.generator).to(dtype)
        if dtype in (torch.int8, torch.int32):
            return torch.randint(-128, 128, (rows, cols), generator=self.generator).to(dtype)
        return torch.randn(rows, cols, generator=self.generator, dtype=torch.float64).to(dtype)

    def scale(self, kind: str | None, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Scales for ``dtype``: one number, or one for ``each`` of ``rows`` or ``cols``, or one for each ``block``, of
        which there are ``rows`` × ``cols``. They are so small that float16 holds the sums."""
        if kind is None:
            return None
        shape = (1, 1) if kind == "one" else (rows, cols)
        return (0.5 + torch.rand(shape, generator=self.generator)) / (128 if dtype == torch.int8 else 1)

    def bias(self, kind: str | None, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor | None:
        if kind is None:
            return None
        return self.matrix(rows, 1, dtype) if kind == "row" else self.matrix(1, cols, dtype)[0]


def half_ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The most that rounding to ``dtype`` changes each value."""
    info = torch.finfo(dtype)
    return values.abs().clamp(min=info.tiny) * info.eps / 2


@dataclass
class Trial:
    """One rank's part of one call.

    Attributes:
        a, b, bias, scale_a, scale_b, output: the op's operands, on the device.
        frame: the memory that ``output`` is a part of.
        reference: what ``output`` should be, float64.
        allowance: how far off it may be, as a Frobenius norm; see :func:`allowed`.
    """

    ctx: iris.Iris
    way: Way
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    output: torch.Tensor
    frame: torch.Tensor
    reference: torch.Tensor
    allowance: float
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None

    def run(self, config: FusedConfig | None = SMALL, workspace: Any = None, trace: Any = False) -> torch.Tensor:
        """Call the op by this trial's algorithm, whatever ``config`` names; with None the op picks."""
        op = getattr(iris.ops, self.way.op)
        chosen = None if config is None else replace(config, algorithm=self.way.algorithm)
        options: dict[str, Any] = {"gather_dim": self.way.gather_dim} if self.way.op == GATHER else {}
        if self.scale_a is not None or self.scale_b is not None:
            options |= {"scale_a": self.scale_a, "scale_b": self.scale_b}
        result: torch.Tensor = op(
            self.ctx, self.output, self.a, self.b, self.bias, config=chosen, workspace=workspace, trace=trace, **options
        )
        return result

    def excess(self) -> float:
        """The error of ``output`` divided by the allowed one: at most 1 if it is right and nothing around it has
        changed. Waits for the stream."""
        self.ctx.synchronize()
        result = self.output.to("cpu", copy=True)  # a simulated output is on the CPU already
        error = float((result.double() - self.reference).norm())
        self.output.copy_(self._nothing.expand_as(self.output))
        untouched = torch.equal(_bits(self.frame), _bits(self._nothing.expand_as(self.frame)))
        self.output.copy_(result)
        if not untouched or math.isnan(error):  # a NaN would pass every comparison
            return math.inf
        return error / self.allowance if self.allowance else 0.0 if error == 0 else math.inf

    def digest(self) -> str:
        """A digest of the bits of ``output``, for ranks to compare."""
        self.ctx.synchronize()
        return hashlib.sha256(_bits(self.output).numpy().tobytes()).hexdigest()

    def spoil(self) -> None:
        """Fill the output, and the memory around it, with values that no right result has."""
        self.frame.copy_(self._nothing.expand_as(self.frame))

    @property
    def _nothing(self) -> torch.Tensor:
        value = float("nan") if self.output.dtype.is_floating_point else -(2**31)
        return torch.tensor(value, dtype=self.output.dtype, device=self.output.device)


def _bits(matrix: torch.Tensor) -> torch.Tensor:
    return torch.empty(matrix.shape, dtype=matrix.dtype).copy_(matrix).view(torch.uint8)


def allowed(
    result: torch.Tensor, typical: torch.Tensor, parts: list[torch.Tensor], depth: int, dtype: torch.dtype
) -> float:
    """How far a right result may be from ``result``, as a Frobenius norm; 0 for integers. It is the sum of:

    - ½ ulp of the output's dtype for rounding the result, and for rounding each of the ``parts`` that ranks send each
      other: one more rounding per hop. By the triangle inequality this holds for any signs.
    - float32 sums over K, ``depth``, and the bias, which is one more term wherever it is added: each addition
      rounds a partial sum of about √K · s, with s² the mean square of a term, by ½ ulp. K such roundings add up like a
      random walk, to ½ eps · √K · ``typical``, where ``typical`` is √K · s. Four times that, for the luck of small
      matrices.
    """
    if not dtype.is_floating_point:
        return 0.0
    rounded = sum(float(half_ulp(one, dtype).norm()) for one in (result, *parts))
    summed = 2 * float(torch.finfo(torch.float32).eps) * float(depth) ** 0.5 * float(typical.norm())
    return float(rounded + summed)


def lost_in_fp8(dtype: torch.dtype, typical: torch.Tensor, depth: int, out: torch.dtype) -> float:
    """What Hopper's tensor cores may lose in sums of ``depth`` fp8 products, which they keep in 14 bits: each step of
    32 products changes a sum by 2^-13 of it, at random, as on H200 (docs/performance-matmul.md); twice that is allowed.
    Sums for float32 outputs are kept in 14 bits only within blocks of K; a block of the tests is one step."""
    if dtype != torch.float8_e4m3fn or BACKEND == "sim":
        return 0.0
    steps = 1 if out == torch.float32 else -(-depth // 32)
    return 2 * 2**-13 * float(steps**0.5 * typical.norm())


def _for_all(scale: torch.Tensor | None) -> torch.Tensor:
    return torch.ones(1, 1) if scale is None else scale.double()


def _widened(scale: torch.Tensor, cols: int, parts: int = 1) -> torch.Tensor:
    """``scale`` of blocks, repeated to have a number for each of ``cols`` columns; they consist of ``parts`` parts of
    ranks, side by side."""
    return torch.cat([one.repeat_interleave(128, 1)[:, : cols // parts] for one in scale.chunk(parts, 1)], 1)


def ring_sums(parts: list[torch.Tensor], bias: torch.Tensor) -> list[torch.Tensor]:
    """The values that are rounded when sums of ``parts`` travel around the ring: those of a rank's rows begin at the
    next rank and end at itself, where the bias is added before the last part."""
    owners = [one.chunk(len(parts)) for one in parts]
    sums = []
    for hop in range(1, len(parts)):
        rows = [
            torch.stack([owners[(owner + step) % len(parts)][owner] for step in range(1, hop + 1)]).sum(0)
            for owner in range(len(owners[0]))
        ]
        sums.append(torch.cat(rows))
    return [*sums, sums[-1] + bias] if sums else []


def columns_at_once(config: FusedConfig, way: Way) -> FusedConfig:
    """``config``, with all ranks' columns in one matmul, however many ranks there are, if they could be added up."""
    return replace(config, owners_per_matmul=1 << 10) if way.adds_columns else config


def column_products(a: torch.Tensor, b: torch.Tensor, world: int, rank: int) -> list[torch.Tensor]:
    """The products of one rank's columns each, in the order in which ``rank`` adds them up, beginning with its own."""
    pairs = list(zip(a.double().chunk(world, 1), b.double().chunk(world), strict=True))
    return [left @ right for left, right in (*pairs[rank:], *pairs[:rank])]


def trial(
    ctx: iris.Iris,
    way: Way,
    shape: Shape,
    dtype: torch.dtype,
    seed: int,
    bias: str | None = None,
    layout: str = "plain",
    whole: bool = False,
    scaled: bool | None = None,
    blocks: bool = False,
) -> Trial:
    """This rank's part of a call on random matrices, with a spoilt output. Collective. ``scaled``: the product has
    scales, and the seed chooses their kinds and the output's dtype; None: it has them if it is of fp8, but not with
    ``whole`` numbers. ``blocks``: it is of fp8, and blocks have scales."""
    inputs, world, rank, (rows, n, depth) = Inputs(seed, whole), ctx.world_size, ctx.rank, shape
    scaled = dtype == torch.float8_e4m3fn and not whole if scaled is None else scaled
    out = FLOATS[seed % 3] if scaled else output_dtype(dtype)
    gathers = (way.op == GATHER and way.gather_dim == 0, way.op == GATHER and way.gather_dim == 1)
    reduces = way.op in (REDUCE_SCATTER, ALL_REDUCE)
    if way.even_rows:
        rows = -(-rows // world) * world
    m = rows * (world if gathers[0] or way.op == REDUCE_SCATTER else 1)
    k = depth * (world if gathers[1] or reduces else 1)
    n *= world if way.op in (GATHER, SCATTER) else 1
    a, b = inputs.matrix(m, k, dtype), inputs.matrix(k, n, dtype)
    added = inputs.bias(bias, m, n, out)

    def columns(matrix: torch.Tensor) -> torch.Tensor:
        return matrix.chunk(world, -1)[rank]

    def share(matrix: torch.Tensor) -> torch.Tensor:
        """This rank's share of a result."""
        if way.op == GATHER:
            return columns(matrix)
        return matrix.chunk(world)[rank] if way.op == REDUCE_SCATTER else matrix

    kinds = SCALES[seed // 3 % (len(SCALES) - (dtype == torch.int8))] if scaled else (None, None)
    if blocks:
        kinds = ("block", "block")
    sums, cuts = (world if reduces else 1), world if way.op in (GATHER, SCATTER) else 1
    deep, across = (-(-k // sums // 128), cuts * -(-n // cuts // 128)) if blocks else (1, n)
    drawn = [(inputs.scale(kinds[0], m, deep, dtype), inputs.scale(kinds[1], deep, across, dtype)) for _ in range(sums)]
    own_scales = drawn[rank if reduces else 0]
    factors = [(_for_all(by_a), _for_all(by_b)) for by_a, by_b in drawn]
    if blocks:
        factors = [
            (_widened(of_a, k // sums), _widened(_widened(of_b, n, cuts).T, k // sums).T) for of_a, of_b in factors
        ]
    own_a, own_b, pairs = a, b, [(a, b)]
    if way.op in (GATHER, SCATTER):
        own_a = a.chunk(world, way.gather_dim)[rank] if way.op == GATHER else a
        own_b = columns(b)
        by_row, by_column = own_scales
        if by_row is not None and kinds[0] in ("each", "block") and gathers[0]:
            by_row = by_row.chunk(world)[rank]
        if by_column is not None and kinds[1] in ("each", "block"):
            by_column = columns(by_column)
        own_scales = by_row, by_column
    elif reduces:
        own_a, own_b = columns(a), b.chunk(world)[rank]
        pairs = list(zip(a.chunk(world, 1), b.chunk(world), strict=True))
    own_bias = added
    if added is not None and bias == "column" and way.op in (GATHER, SCATTER):
        own_bias = columns(added)
    elif added is not None and bias == "row":
        own_bias = added.chunk(world)[rank] if way.op == REDUCE_SCATTER else added
    shift = torch.zeros(()) if added is None else added.double()
    terms = [
        (left.double() * of_left, right.double() * of_right)
        for (left, right), (of_left, of_right) in zip(pairs, factors, strict=True)
    ]
    products = [left @ right for left, right in terms]
    squares = sum((left**2 @ right**2 for left, right in terms), shift**2)
    result = share(sum(products, shift))
    rounded: list[torch.Tensor] = []
    added_up: list[torch.Tensor] = []
    if reduces and way.algorithm != "atomic":
        rounded = ring_sums(products, shift) if way.ring else products
        added_up = products if way.ring else []
    elif way.adds_columns and dtype in FLOATS:
        own, *added_up = column_products(a, b, world, rank)
        rounded = list(itertools.accumulate([own, *added_up], initial=shift))[1:-1]
    if BACKEND != "sim" and dtype.itemsize == 2:
        rounded = [*rounded, *added_up]  # cuBLAS mostly rounds a product before it adds it to what the output holds
    parts = [share(one) for one in rounded]
    frame, output = _empty(
        ctx, tuple(result.shape), out, _output_layout(way, layout), way.op in (SCATTER, ALL_REDUCE)
    )  # fmt: skip
    made = Trial(
        ctx, way, _laid_out(ctx, own_a, layout, symmetric=way.op == GATHER), _laid_out(ctx, own_b, layout),
        None if own_bias is None else own_bias.to(ctx.device).contiguous(), output, frame, result,
        allowed(result, share(squares).sqrt(), parts, k + (added is not None), out)
        + lost_in_fp8(dtype, share(squares).sqrt(), min(k, 128) if blocks else k, out),
        *(None if one is None else one.to(ctx.device).contiguous() for one in own_scales),
    )  # fmt: skip
    made.spoil()
    ctx.barrier()
    return made


def _laid_out(ctx: iris.Iris, matrix: torch.Tensor, layout: str, symmetric: bool = False) -> torch.Tensor:
    """A copy of ``matrix`` on the device, with the strides of ``layout``."""
    _, here = _empty(ctx, tuple(matrix.shape), matrix.dtype, layout, symmetric)
    return here.copy_(matrix)


def _output_layout(way: Way, layout: str) -> str:
    return "plain" if layout == "transposed" and way.contiguous_rows else layout


def _empty(
    ctx: iris.Iris, shape: tuple[int, ...], dtype: torch.dtype, layout: str, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory, and the part of it that is a matrix of ``shape`` with the strides of ``layout``."""
    rows, cols = shape
    sizes = {"plain": shape, "transposed": (cols, rows), "strided": (2 * rows, cols + 3)}[layout]
    frame = ctx.empty(*sizes, dtype=dtype) if symmetric else torch.empty(sizes, dtype=dtype, device=ctx.device)
    return frame, {"plain": frame, "transposed": frame.T, "strided": frame[::2, 1:-2]}[layout]


def dual(tensor: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """``tensor`` with a tangent, in forward mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch then imports users of torch.jit.script
        made: torch.Tensor = forward_ad.make_dual(tensor, tangent)
    return made


def given_back(matrix: torch.Tensor) -> torch.Tensor:
    """A tensor like ``matrix``, in the middle of memory that was freed, as FSDP frees that of its parameters."""
    memory = matrix.new_empty(matrix.numel() + 8)
    view = memory[8:].view(matrix.shape)
    memory.untyped_storage().resize_(0)
    return view


class Wrapper(torch.Tensor):
    """A tensor that stands for others, as a DTensor does."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> None:
        raise AssertionError("no operation is expected")


def in_vmap(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` as a function that ``torch.vmap`` calls sees it."""
    seen: list[torch.Tensor] = []

    def look(one: torch.Tensor) -> torch.Tensor:
        seen.append(one)
        return one

    torch.vmap(look)(matrix[None])
    return seen[0]
