"""Fused ops as one of 8 ranks runs them, on two GPUs.

    python benchmark/mirrored.py --num_ranks 2
    python benchmark/mirrored.py matmul_reduce_scatter_mirrored --num_ranks 2 --axis_way=auto,ring,ring+num_chunks=4

Both processes are rank 0 of ``ranks`` ranks, and each stands for all of the other's peers. Data that one sends to rank
j are put where the other expects the data of rank -j, which would send the same at the same time. So each GPU computes,
sends, receives and waits as one of 8 does, at the full rate of its links. Four things differ from eight GPUs:

- no two ranks ever send to the same rank at the same time, as ranks do that are out of step (docs/performance.md);
- there are fewer ranks that may be late;
- reads and writes of seven ranks' memory all go to the memory of one;
- kernels take some tenths of a microsecond more to find a peer's memory.

The predicted time of a result is without the first of these; ``auto`` picks as for eight GPUs.

The ranks' parts of A (of B, for a scatter) are the same except for a rotation, so that the right result is known.
``M,N,K`` are those of the whole problem. ``way`` is ``auto``, or an algorithm with the best options known, or one with
other options, as in ``ring+num_chunks=4``; ``matmul`` is the library's local matmul alone. Options are those of
`python -m iris bench`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from emulation import RANKS, Emulated, Region, mirror

import iris
from iris import bench
from iris.bench.cases.fused import GPU_SHAPES, local_params, uneven
from iris.bench.cases.operands import Operands, problem_of
from iris.bench.cases.ways import check_options, way, with_options
from iris.ops import ALGORITHMS, FusedConfig, Problem, exchange, pick_config
from iris.ops.algorithms import ALL_REDUCE, EXCHANGING, GATHER, LOCAL, REDUCE_SCATTER, SCATTER
from iris.ops.hardware import floor_s, hardware
from iris.ops.model import predicted_s
from iris.ops.model.machine import machine
from iris.ops.room import exchanged_blocks, memory_of
from iris.ops.rows import MAX_CHUNKS, Rows, chunks_of, evenly
from iris.ops.target import target_of
from iris.ops.tuned import changed_fields
from iris.ops.words import sent_in_words, tiles_sent, words_nbytes
from iris.ops.workspace import FusedWorkspace
from iris.results import MATMUL

SIMULATED = iris.backends.detect().name == "sim"
SHAPES = ((64, 96, 128),) if SIMULATED else GPU_SHAPES
ONE_HOP = ("low_latency", "one_shot")
UNCHECKED = ((ALL_REDUCE, "two_shot"), (ALL_REDUCE, "atomic"))
"""Algorithms whose results are not checked. They deal tiles to ranks one by one, so a rank's tiles are not those of
another moved to another place, and the result is in part that of another rank."""
FLAG, VECTOR = 4, 16
"""Bytes of a flag, and the bytes of which places of data must be multiples."""

mirror()


class Mirrored(Operands):
    """Operands of rank 0 on both processes. All ranks have the same operands, except for a rotation of A's rows if
    ranks own rows of a sum. ``turned``: the rows of each rank that are adjacent, for each chunk of the sum; in each
    chunk the rows of rank r are rotated by r times that many."""

    def __init__(
        self,
        ctx: Emulated,
        op: str,
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        gather_dim: int,
        turned: tuple[int, ...],
    ) -> None:
        self.turned = turned
        super().__init__(ctx, op, sizes, dtype, gather_dim)

    def _random(self, which: int, rank: int, decoy: bool = False) -> torch.Tensor:
        drawn = super()._random(which, 0, decoy)
        if which == 0 and self.turned:
            parts = drawn.split([rows * self.ctx.world_size for rows in self.turned])
            return torch.cat([part.roll(rank * rows, dims=0) for part, rows in zip(parts, self.turned, strict=True)])
        return drawn


def regions(operands: Mirrored, config: FusedConfig, workspace: FusedWorkspace, num_sms: int) -> list[Region]:
    """The memory where data and flags from peers arrive, and how far apart the ranks' places in it are."""
    problem, algorithm, world = operands.problem, config.algorithm, operands.problem.world_size
    m, n, k, item = problem.m, problem.n, problem.k, operands.output.element_size()
    rows = -(-m // world)
    part, flags, copied = Region(workspace.staging, rows * n * item), 0, list[Region]()
    output = Region(operands.output, rows * n * item if problem.op == ALL_REDUCE else 0)
    if problem.op == ALL_REDUCE and algorithm == "decomposed":
        chunks = owned_chunks(config, rows)
        copied = [
            Region(operands.output[world * one.first :][: world * one.count], one.count * n * item) for one in chunks
        ]
        output = Region(operands.output, chunks[-1].count * n * item)
    if problem.op == SCATTER:
        part, output = Region(workspace.staging, 0), Region(operands.output, n * item, n * world * item)
        flags = FLAG if algorithm == "decomposed" else 0
    if problem.op == GATHER:
        output = Region(operands.output, 0)
        by_rows = problem.gather_dim == 0
        part = Region(workspace.staging, rows * k * item if by_rows else k // world * item, 0 if by_rows else k * item)
        at_once = algorithm == "decomposed" and not by_rows and not config.adds_columns(problem)
        together = algorithm == "baseline" or at_once
        flags = FLAG if together else FLAG * len(owned_chunks(config, operands.a.shape[0]))
        if algorithm == "push" and config.comm_sms is not None:
            flags = FLAG * num_pieces(config, *operands.a.shape)
    if algorithm in EXCHANGING:
        blocks = exchanged_blocks(problem, algorithm, num_sms, workspace.flagged)
        flags = FLAG * exchange.MAX_PROGRAMS.value
        part = Region(workspace.staging, blocks.nbytes(problem.exchanged_dtype))
        if problem.op == SCATTER:
            output = Region(operands.output, 0)
    elif problem.op in (REDUCE_SCATTER, ALL_REDUCE):
        if algorithm in ("push", "copy_engine", "two_shot", "one_shot", "atomic"):
            tiles, slot = tiles_sent(problem, config)[1], config.tile_elements * item
            flags = FLAG * tiles
            part = Region(workspace.staging, tiles * slot)
            if algorithm == "copy_engine":
                flags = FLAG * -(-tiles // tiles_per_chunk(problem, config, tiles))
            elif algorithm == "atomic":
                part, flags = Region(workspace.staging, 0), 0
            elif sent_in_words(problem, config):
                part = Region(workspace.staging, words_nbytes(tiles * config.tile_elements, problem.output_dtype))
            elif algorithm == "one_shot":
                part = Region(workspace.staging, 0)
            if algorithm != "copy_engine":
                output = Region(operands.output, 0)
        elif algorithm == "ring":
            flags = FLAG * len(owned_chunks(config, rows))
        else:
            flags = FLAG
    turnstiles = workspace.turnstile.as_strided((2 * len(workspace.turnstile),), (1,))  # the second follows it
    return [*copied, part, output, Region(workspace.ready, flags), Region(turnstiles, FLAG)]


def owned_chunks(config: FusedConfig, rows: int) -> list[Rows]:
    """The chunks in which a rank's ``rows`` travel, each with a flag."""
    growth = config.chunk_growth if config.algorithm == "decomposed" else 1.0
    return chunks_of(rows, config.num_chunks, config.block_size_m, growth)


def num_pieces(config: FusedConfig, rows: int, cols: int) -> int:
    """The number of pieces of a part of A that programs carry one by one, each with a flag."""
    chunks, _ = evenly(-(-rows // config.block_size_m), MAX_CHUNKS)
    blocks = -(-cols // config.block_size_k)
    return chunks * -(-blocks // min(config.k_per_flag, blocks))


def tiles_per_chunk(problem: Problem, config: FusedConfig, tiles: int) -> int:
    """How many of the ``tiles`` for each rank ``copy_engine`` sends at a time."""
    if problem.op == REDUCE_SCATTER:
        return evenly(tiles, config.num_chunks)[1]
    rows = problem.m // problem.world_size
    _, blocks = config.cut_in_groups(rows, config.num_chunks)
    return config.tiles(min(blocks * config.block_size_m, rows), problem.n)


def run(state: bench.State, ctx: iris.Iris, op: str) -> None:
    """Check one way to compute ``op`` as rank 0 of ``ranks``, and hand it to ``state`` for timing."""
    world, gather_dim = state["ranks"], int(state.params.get("gather_dim", 0))
    if ctx.world_size != 2:
        state.skip(f"two processes stand for {world} ranks, not {ctx.world_size}")
    if (reason := uneven(op, state["shape"], gather_dim, world)) is not None:
        state.skip(reason)
    sizes = state["m"], state["n"], state["k"]
    if sizes[0] % world:
        state.skip(f"{sizes[0]} rows for {world} ranks")
    dtype = torch.float16 if SIMULATED else torch.bfloat16
    problem, target = problem_of(op, sizes, dtype, world, gather_dim), target_of(ctx)
    known = hardware(target.hardware)
    algorithm, _, fields = state["way"].partition("+")
    timed = problem_of(LOCAL, sizes, dtype, world, 0) if algorithm == MATMUL else problem
    state.set_flops(timed.flops)
    state.set_bytes(timed.received_bytes)
    state.set_floor(floor_s(timed, known))
    if algorithm not in ("auto", MATMUL, *ALGORITHMS[op]):
        state.skip(f"{op} has no algorithm {algorithm}")
    picked = pick_config(problem, target, None if algorithm in ("auto", MATMUL) else algorithm)
    config = with_options(op, picked, fields)
    turned: tuple[int, ...] = ()
    if op == REDUCE_SCATTER or (op == ALL_REDUCE and config.algorithm not in ONE_HOP):
        turned = (sizes[0] // world,)
        if op == ALL_REDUCE and config.algorithm == "decomposed":
            turned = tuple(chunk.count for chunk in owned_chunks(config, sizes[0] // world))

    bases = [ctx._backend.bases[ctx.rank], *[ctx._backend.bases[1 - ctx.rank]] * (world - 1)]
    plain, one = Emulated(ctx, bases), Emulated(ctx, bases)
    operands = state.share(("operands", turned), lambda: Mirrored(plain, op, sizes, dtype, gather_dim, turned))
    operands.fill()
    if algorithm == MATMUL:
        alone = way(state, operands, MATMUL)
        state.exec(
            alone.call, None, lambda: operands.complaint(alone.result(), alone.roundings, local=True), operands.spoil
        )
        return
    state.set_config(changed_fields(config))
    if known is not None:
        state.set_predicted(predicted_s(problem, config, replace(machine(known, problem.dtype), contention=False)))
    if config.algorithm == "two_shot" and sent_in_words(problem, config):
        tiles = config.tiles(problem.m, problem.n)
        if tiles % world:
            state.skip(f"{tiles} tiles, of which {world} ranks do not own as many each")
    places = regions(operands, config, memory_of(one, problem, config, None), ctx.num_sms)
    if any(place.stride % VECTOR for place in places[:-2]):
        state.skip(f"ranks' places are no multiple of {VECTOR} bytes apart")
    one.turn(places)
    options: dict[str, Any] = {"gather_dim": gather_dim} if op == GATHER else {}
    roundings = operands.roundings_by(config)

    def call() -> None:
        getattr(one.ops, op)(operands.output, operands.a, operands.b, config=config, **options)

    checked = (op, config.algorithm) not in UNCHECKED
    check = (lambda: operands.complaint(operands.output, roundings)) if checked else None
    state.exec(call, None, check, operands.spoil)


def localized(params: bench.axes.Params, num_ranks: int, *, op: str) -> bench.axes.Params:
    """The parameters as `iris bench` localizes them, but for the emulated number of ranks."""
    return local_params(params, int(params["ranks"]), op=op)


def _mirrored(op: str) -> Callable[[Any], Any]:
    """Registers a case of ``op``, with the axes that all have but :func:`_ways`."""

    def case(fn: Any) -> Any:
        fn = bench.axis("ranks", (8,), closed=True, also=RANKS)(fn)
        return bench.register(localize=partial(localized, op=op))(bench.axis("M,N,K", SHAPES)(fn))

    return case


def _ways(op: str) -> Callable[[Any], Any]:
    names = ("auto", *ALGORITHMS[op], MATMUL)
    return bench.axis("way", names, variant=True, extended=partial(check_options, op=op))


@_mirrored(GATHER)
@bench.axis("gather_dim", (0, 1), closed=True)
@_ways(GATHER)
def all_gather_matmul_mirrored(state: bench.State, ctx: iris.Iris) -> None:
    """all_gather_matmul of one of 8 ranks."""
    run(state, ctx, GATHER)


@_mirrored(SCATTER)
@_ways(SCATTER)
def matmul_all_scatter_mirrored(state: bench.State, ctx: iris.Iris) -> None:
    """matmul_all_scatter of one of 8 ranks."""
    run(state, ctx, SCATTER)


@_mirrored(REDUCE_SCATTER)
@_ways(REDUCE_SCATTER)
def matmul_reduce_scatter_mirrored(state: bench.State, ctx: iris.Iris) -> None:
    """matmul_reduce_scatter of one of 8 ranks."""
    run(state, ctx, REDUCE_SCATTER)


@_mirrored(ALL_REDUCE)
@_ways(ALL_REDUCE)
def matmul_all_reduce_mirrored(state: bench.State, ctx: iris.Iris) -> None:
    """matmul_all_reduce of one of 8 ranks."""
    run(state, ctx, ALL_REDUCE)


CASES = [f"{op}_mirrored" for op in (GATHER, SCATTER, REDUCE_SCATTER, ALL_REDUCE)]

if __name__ == "__main__":
    import sys

    named = [word for word in sys.argv[1:2] if not word.startswith("-")]
    program = " ".join(["mirrored.py", *(named or ["[CASE …]"])])
    raise SystemExit(bench.main([*([] if named else CASES), *sys.argv[1:]], program))
