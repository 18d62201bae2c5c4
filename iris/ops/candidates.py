"""Configs worth trying for a problem, and the options that each algorithm has. Pure: no GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from iris.ops.algorithms import ALL_REDUCE, EXCHANGING, GATHER, LIBRARY, LOCAL, REDUCE_SCATTER, SCATTER
from iris.ops.config import OF_TILE, FusedConfig, Target
from iris.ops.obstacles import has_no_tile, obstacle, too_large
from iris.ops.problem import Problem

Fields = Mapping[str, Any]

_STREAM_K_FROM = 1.03
"""Splitting tiles is worth trying if whole waves have room for this many times as many tiles as there are."""


def _tile(m: int, n: int, k: int, warps: int, stages: int) -> Fields:
    return dict(zip(OF_TILE, (m, n, k, warps, stages), strict=True))


TILES: dict[tuple[str, int], tuple[Fields, ...]] = {
    ("cuda", 2): (
        _tile(128, 256, 64, 8, 3),
        _tile(128, 128, 64, 8, 4),
        _tile(64, 256, 64, 4, 4),
        _tile(64, 128, 128, 4, 4),
        _tile(64, 64, 128, 4, 6),
    ),
    ("cuda", 1): (
        _tile(128, 256, 128, 8, 3),
        _tile(128, 128, 128, 8, 4),
        _tile(128, 64, 256, 4, 4),
        _tile(64, 64, 256, 4, 4),
        _tile(64, 32, 512, 4, 4),
    ),
    ("cuda", 4): (_tile(64, 64, 32, 4, 4),),
    ("hip", 2): (
        _tile(256, 256, 64, 8, 2),
        _tile(128, 256, 64, 8, 2),
        _tile(128, 128, 64, 8, 2),
        _tile(64, 128, 64, 4, 2),
        _tile(64, 64, 64, 4, 2),
    ),
    ("hip", 1): (
        _tile(256, 256, 128, 8, 2),
        _tile(128, 128, 128, 8, 2),
        _tile(64, 64, 128, 4, 2),
    ),
    ("hip", 4): (_tile(64, 64, 32, 4, 2),),
    ("sim", 0): (_tile(64, 64, 128, 8, 3), _tile(32, 64, 64, 8, 3)),
}
"""Tiles by backend and bytes of an element (0 in the simulator), the largest first."""

MORE_TILES: dict[tuple[str, int], tuple[Fields, ...]] = {
    ("cuda", 2): (
        _tile(256, 128, 64, 8, 3),
        _tile(128, 256, 64, 8, 4),
        _tile(128, 128, 128, 8, 3),
        _tile(128, 128, 64, 4, 4),
        _tile(128, 64, 128, 4, 4),
        _tile(64, 128, 64, 4, 6),
        _tile(64, 64, 128, 4, 4),
        _tile(64, 32, 128, 4, 8),
        _tile(16, 32, 256, 4, 6),
    ),
    ("cuda", 1): (
        _tile(128, 128, 256, 8, 3),
        _tile(64, 128, 256, 4, 3),
        _tile(64, 128, 128, 4, 4),
        _tile(64, 64, 128, 4, 4),
    ),
    ("cuda", 4): (_tile(128, 64, 32, 4, 4), _tile(128, 128, 32, 8, 3)),
    ("hip", 2): (_tile(256, 128, 64, 8, 2), _tile(128, 64, 64, 4, 2)),
}
"""Tiles that only a measurement can choose: the model sees little difference between them and those above."""

FEW_ROWS: dict[tuple[str, int], tuple[Fields, ...]] = {
    ("cuda", 2): (
        _tile(32, 128, 128, 4, 4),
        _tile(32, 64, 256, 4, 4),
        _tile(16, 256, 64, 4, 5),
        _tile(16, 128, 128, 4, 5),
        _tile(16, 64, 256, 4, 4),
    ),
    ("cuda", 1): (
        _tile(32, 64, 512, 4, 4),
        _tile(16, 64, 512, 4, 4),
        _tile(16, 32, 512, 4, 6),
    ),
}
"""Tiles for problems of few rows, at most as many as the first tile has. There only reading B counts, and these tiles
load more of it at a time than tiles of 64 rows."""

_OF_FEW_ROWS = {
    (LOCAL, "local"),
    (SCATTER, "push"),
    (ALL_REDUCE, "one_shot"),
    (ALL_REDUCE, "two_shot"),
}
"""Ops and algorithms for which ``FEW_ROWS`` replaces ``TILES`` with so few rows; for others only a measurement chooses
them."""

_SMALL_TILE = _tile(64, 64, 32, 4, 2)
"""For GPUs whose shared memory is too small for all other tiles."""


def _chunks(*counts: int) -> tuple[Fields, ...]:
    return tuple({"num_chunks": count} for count in counts)


def _rounds(*counts: int) -> tuple[Fields, ...]:
    return tuple({"num_rounds": count} for count in counts)


def _owners(*counts: int) -> tuple[Fields, ...]:
    return tuple({"owners_per_matmul": count} for count in counts)


def _growing(*choices: tuple[int, float]) -> tuple[Fields, ...]:
    return tuple({"num_chunks": count, "chunk_growth": growth} for count, growth in choices)


def _comm(*programs: int) -> tuple[dict[str, Any], ...]:
    return tuple({"comm_sms": count, "comm_block_n": 256} for count in programs)


ALGORITHMS: dict[str, dict[str, tuple[Fields, ...]]] = {
    LOCAL: {"local": ({},)},
    GATHER: {
        "copy_engine": _chunks(1, 2, 4, 8),
        "decomposed": (*_chunks(1, 2, 4), *_owners(2, 3)),
        "push": (
            {},
            *(fields | {"k_per_flag": blocks} for blocks in (8, 16) for fields in _comm(16, 32, 64)),
            *(fields | {"num_rounds": rounds} for rounds in (2, 4) for fields in _comm(16)),
        ),
        "hbm_buffer": tuple({**fields, "k_per_flag": blocks} for blocks in (32, 16) for fields in _comm(16, 12, 24)),
        "pull": ({},),
        "low_latency": ({},),
        "baseline": ({},),
    },
    SCATTER: {
        "push": ({},),
        "copy_engine": _chunks(1, 2, 4, 8),
        "decomposed": (*_chunks(2, 4, 8), *_growing((4, 0.5), (4, 2.0), (6, 0.5), (6, 1.5))),
        "split": _comm(8, 16, 32),
        "relay": tuple({**fields, "group_size_m": 2} for fields in _comm(48, 32)),
        "low_latency": ({},),
        "baseline": ({},),
    },
    REDUCE_SCATTER: {
        "push": _rounds(1, 2, 4),
        "copy_engine": _chunks(1, 2, 4),
        "decomposed": tuple(
            {**fields, "comm_block_m": 32, "comm_block_n": 64}
            for fields in (*_growing((1, 1.0), (2, 0.5), (4, 0.5)), *_owners(2, 4))
        ),
        "ring": _chunks(2),
        "low_latency": ({},),
        "baseline": ({},),
    },
    ALL_REDUCE: {
        "two_shot": _rounds(1, 2, 4, 8),
        "decomposed": tuple(
            {**fields, "comm_block_m": 32, "comm_block_n": 128}
            for fields in (
                *_chunks(1, 2, 4),
                *_owners(2, 4),
                *({"num_chunks": count, "owners_per_matmul": 2} for count in (2, 4)),
            )
        ),
        "ring": _chunks(2),
        "copy_engine": _chunks(1, 2, 4),
        "one_shot": ({},),
        "low_latency": ({},),
        "low_latency_two_shot": ({},),
        "baseline": ({},),
    },
}
"""What "auto" chooses among: algorithms, each with options to try, without those whose sums depend on timing. If the
model sees no difference, the earlier one is taken."""

_OWN: tuple[Fields, ...] = ({"own_matmul": True},)
_ONLY_MEASURED: dict[str, dict[str, tuple[Fields, ...]]] = {
    GATHER: {"low_latency": _OWN},
    SCATTER: {
        "streams": _comm(16),
        "relay": tuple(
            {**fields, "group_size_m": rows}
            for rows, programs in ((2, (16,)), (4, (32, 16)))
            for fields in _comm(*programs)
        ),
        "low_latency": _OWN,
    },
    REDUCE_SCATTER: {"low_latency": _OWN},
    ALL_REDUCE: {"low_latency": _OWN, "low_latency_two_shot": _OWN},
}
"""Options that only a measurement can choose. The library's matmul is mostly as fast as Iris's, but with few rows it
takes up to 1.9 times as long if it chooses the wrong tile, which cannot be predicted from figures of the hardware."""

_STREAM_K = {
    (LOCAL, "local"), (GATHER, "copy_engine"), (SCATTER, "push"),
    (SCATTER, "copy_engine"),
}  # fmt: skip
"""Ops and algorithms for which Stream-K is tried. With others, tiles wait for peers as well as for each other, and it
was seen to lose. With a single row of tiles it is tried only for those in ``_OF_FEW_ROWS``."""

_VARIATIONS: dict[str, tuple[Any, ...]] = {
    "group_size_m": (4, 8, 16),
    "num_stages": (2, 3, 4, 5),
    "num_warps": (4, 8),
    "stream_k": (False, True),
    "two_tiles": (False, True),
    "waves_per_eu": (0, 2),
    "matrix_instr_nonkdim": (16, 32),
    "kpack": (1, 2),
}
_TILE_VARIATIONS: dict[str, tuple[Any, ...]] = {"comm_block_m": (16, 32, 64, 128), "comm_block_n": (64, 128, 256)}
_COMM_VARIATIONS: dict[str, tuple[Any, ...]] = {"comm_sms": (4, 8, 12, 16, 24, 32, 48, 64)} | _TILE_VARIATIONS
_COURIER_VARIATIONS = _TILE_VARIATIONS | {"num_chunks": (1, 2, 4)}
_CHUNK_VARIATIONS: dict[str, tuple[Any, ...]] = {"num_chunks": (1, 2, 3, 4, 6, 8, 12, 16)}
_ROUND_VARIATIONS: dict[str, tuple[Any, ...]] = {"num_rounds": (1, 2, 4, 8, 16)}
_OWNER_VARIATIONS: dict[str, tuple[Any, ...]] = {"owners_per_matmul": (1, 2, 3, 4)}
_GROWTH_VARIATIONS = _CHUNK_VARIATIONS | {"chunk_growth": (0.5, 1.0, 2.0)}
_PUT_VARIATIONS = _COMM_VARIATIONS | _ROUND_VARIATIONS | {"k_per_flag": (4, 8, 16, 32)}
_FETCH_VARIATIONS = _PUT_VARIATIONS | {
    "num_fetch_stages": (1, 2, 4, 8), "first_stage_fetch_sms": (None, 32, 64),
    "staged_a_layout": ("k_contiguous", "m_contiguous"),
}  # fmt: skip
_OF_ALGORITHM: dict[tuple[str, str], dict[str, tuple[Any, ...]]] = {
    (GATHER, "push"): _COURIER_VARIATIONS,
    (GATHER, "copy_engine"): _CHUNK_VARIATIONS | _ROUND_VARIATIONS,
    (GATHER, "decomposed"): _GROWTH_VARIATIONS | _OWNER_VARIATIONS,
    (GATHER, "hbm_buffer"): _FETCH_VARIATIONS,
    (SCATTER, "copy_engine"): _CHUNK_VARIATIONS,
    (SCATTER, "decomposed"): _GROWTH_VARIATIONS,
    (SCATTER, "split"): _COMM_VARIATIONS,
    (SCATTER, "relay"): _COMM_VARIATIONS | {"group_size_m": (1, 2, 4, 8)},
    (SCATTER, "streams"): _COMM_VARIATIONS,
    (REDUCE_SCATTER, "copy_engine"): _CHUNK_VARIATIONS,
    (REDUCE_SCATTER, "decomposed"): _GROWTH_VARIATIONS | _OWNER_VARIATIONS | _TILE_VARIATIONS,
    (REDUCE_SCATTER, "ring"): _CHUNK_VARIATIONS,
    (ALL_REDUCE, "decomposed"): _GROWTH_VARIATIONS | _OWNER_VARIATIONS | _TILE_VARIATIONS,
    (ALL_REDUCE, "ring"): _CHUNK_VARIATIONS,
    (ALL_REDUCE, "copy_engine"): _CHUNK_VARIATIONS,
    (REDUCE_SCATTER, "push"): _ROUND_VARIATIONS,
    (ALL_REDUCE, "two_shot"): _ROUND_VARIATIONS,
} | {(op, "baseline"): _TILE_VARIATIONS for op, options in ALGORITHMS.items() if "baseline" in options}
_AMD_ONLY = {"waves_per_eu", "matrix_instr_nonkdim", "kpack"}
_OF_KERNEL = {*OF_TILE, "num_sms", *_VARIATIONS}
_CARRYING = {"num_rounds", "comm_sms", "k_per_flag", "num_fetch_stages", "first_stage_fetch_sms"}
_CUTTING = {"num_chunks", "block_size_m"}
_SUMMING = {"num_sms", *_TILE_VARIATIONS}
_UNVARIED: dict[tuple[str, str], set[str]] = {
    (GATHER, "push"): _CARRYING,
    (GATHER, "copy_engine"): set(_TILE_VARIATIONS),
    (GATHER, "pull"): {"num_rounds"},
    (GATHER, "decomposed"): _CUTTING,
    (GATHER, "baseline"): {"num_sms"},
    (SCATTER, "decomposed"): _CUTTING | _SUMMING,
    (SCATTER, "baseline"): {"num_sms"},
    (REDUCE_SCATTER, "atomic"): {"num_rounds"},
    (REDUCE_SCATTER, "decomposed"): _CUTTING | _SUMMING,
    (REDUCE_SCATTER, "ring"): _CUTTING,
    (REDUCE_SCATTER, "baseline"): {"num_sms"},
    (ALL_REDUCE, "atomic"): {"num_rounds"},
    (ALL_REDUCE, "decomposed"): _CUTTING | _SUMMING,
    (ALL_REDUCE, "ring"): _CUTTING,
    (ALL_REDUCE, "baseline"): {"num_sms"},
}
"""Fields that an algorithm uses although they are not varied for it, beside those that the matmul kernel uses."""


def candidates(
    problem: Problem, target: Target, *, wide: bool = False, algorithm: str | None = None
) -> Iterator[FusedConfig]:
    """Configs of ``problem`` that can run on ``target``, in order of preference among equals. For one rank, where
    nothing has to move, they are of one algorithm only. If no algorithm can run with its options, those that can run
    without.

    ``wide``: for measurements; it adds tiles that the model cannot tell apart, Stream-K everywhere, and algorithms that
    "auto" takes only if a row says so. ``algorithm``: only configs of this one, whichever it is.
    """
    options, more = ALGORITHMS[problem.op], _ONLY_MEASURED.get(problem.op, {})
    if algorithm is not None:
        options = {algorithm: options.get(algorithm) or more.get(algorithm, ({},))}
    elif problem.world_size == 1:
        options = dict(list(options.items())[:1])
    elif wide:
        options = {name: options.get(name, ()) + more.get(name, ()) for name in {**options, **more}}
    found = False
    for name, choices in options.items():
        tiles = _tiles(problem, name, target, wide)
        for number, tile in enumerate(tiles):
            for fields in (*choices, *_at_once(problem, name)):
                whole = FusedConfig(name, **tile, **fields)
                if number > 0 and has_no_tile(whole):
                    continue
                for split in _splits(problem, whole, target, wide):
                    config = dataclasses.replace(whole, **split) if split else whole
                    if obstacle(problem, config, target) is None:
                        found = True
                        yield config
    for name in () if found else options:  # for example, a ring with too few rows for two chunks
        config = plain(problem, name, target, wide=wide)
        if obstacle(problem, config, target) is None:
            yield config


def _at_once(problem: Problem, algorithm: str) -> tuple[Fields, ...]:
    """For a gather of columns by ``decomposed``: all ranks' columns of some chunks of rows."""
    if algorithm != "decomposed" or problem.gather_dim != 1:
        return ()
    return tuple({"owners_per_matmul": problem.world_size, "num_chunks": count} for count in (2, 4))


def plain(problem: Problem, algorithm: str, target: Target, *, wide: bool = False) -> FusedConfig:
    """The config of ``algorithm`` without options, with the first tile that fits, whether it can run or not."""
    return FusedConfig(algorithm, **_tiles(problem, algorithm, target, wide)[0])


def options_of(op: str, algorithm: str) -> tuple[str, ...]:
    """The fields of a config that ``algorithm`` of ``op`` uses in some call; other fields make no difference to it.
    Those for AMD are included. Fields that are used only in products that the library does not compute (int8, and fp8
    with some scales) are left out.
    """
    kind = op, algorithm
    used = {*_AMD_ONLY, *_OF_ALGORITHM.get(kind, ()), *_UNVARIED.get(kind, ())}
    if algorithm in EXCHANGING:
        used.add("own_matmul")
    if algorithm in EXCHANGING or algorithm not in LIBRARY:
        used |= _OF_KERNEL
    return tuple(field.name for field in dataclasses.fields(FusedConfig) if field.name in used)


def variations(problem: Problem, config: FusedConfig, target: Target) -> Iterator[FusedConfig]:
    """Configs that differ from ``config`` in one field that its algorithm uses, the nearest values first."""
    kind = problem.op, config.algorithm
    only_send = kind == (GATHER, "push") and config.comm_sms is not None
    own = _PUT_VARIATIONS if only_send else _OF_ALGORITHM.get(kind, {})
    varied = own if has_no_tile(config) else _VARIATIONS | own
    for name, values in varied.items():
        if (name in _AMD_ONLY and target.backend != "hip") or (name == "two_tiles" and not config.stream_k):
            continue
        if name in ("num_warps", "num_stages") and target.backend == "sim":
            continue
        if name == "num_fetch_stages" and config.first_stage_fetch_sms is None:  # the number of stages changes nothing
            continue
        now = getattr(config, name)
        place = values.index(now) if now in values else 0
        for value in sorted((one for one in values if one != now), key=lambda one: abs(values.index(one) - place))[:2]:
            split = {"two_tiles": False} if name == "stream_k" and not value else {}
            changed = FusedConfig(**{**config.__dict__, name: value, **split})
            if obstacle(problem, changed, target) is None:
                yield changed


def _tiles(problem: Problem, algorithm: str, target: Target, wide: bool) -> tuple[Fields, ...]:
    key = (target.backend, 0 if target.backend == "sim" else problem.dtype.itemsize)
    tiles, few = TILES[key], FEW_ROWS.get(key, ())
    if wide:
        tiles += MORE_TILES.get(key, ()) + few
    elif (problem.op, algorithm) in _OF_FEW_ROWS and few and problem.m <= few[0]["block_size_m"]:
        tiles = tuple(tile for tile in few if tile["block_size_m"] < max(2 * problem.m, 32))
    fitting = tuple(tile for tile in tiles if too_large(problem, FusedConfig(algorithm, **tile), target) is None)
    return fitting or (_SMALL_TILE,)


def _splits(problem: Problem, config: FusedConfig, target: Target, wide: bool) -> tuple[Fields, ...]:
    """The Stream-K options to try."""
    kind = problem.op, config.algorithm
    splittable = wide or (kind in _STREAM_K and (problem.m > config.block_size_m or kind in _OF_FEW_ROWS))
    if has_no_tile(config) or config.algorithm == "pull" or not splittable:
        return ({},)
    tiles = config.tiles(problem.m, problem.n)
    if -(-tiles // target.num_sms) * target.num_sms < _STREAM_K_FROM * tiles:
        return ({},)
    return {}, {"stream_k": True}, {"stream_k": True, "two_tiles": True}
