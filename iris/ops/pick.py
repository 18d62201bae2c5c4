"""The choice of a config for a problem: a measured one, else the one that the model predicts to be the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

from iris.context import MAX_RANKS
from iris.errors import ArgumentError
from iris.ops import tuned
from iris.ops.algorithms import ALL_REDUCE, EXCHANGING, GATHER, LOCAL, REDUCE_SCATTER, SCATTER, algorithms
from iris.ops.candidates import ALGORITHMS, TILES, candidates, plain
from iris.ops.config import FusedConfig, Target
from iris.ops.hardware import HARDWARE, Hardware, hardware, number_format
from iris.ops.model import predicted_s
from iris.ops.model.machine import machine
from iris.ops.obstacles import obstacle
from iris.ops.problem import DTYPES, MAX_EXTENT, Problem

_BACKENDS = ("cuda", "hip", "sim")
_REMEMBERED = 1 << 15
"""The number of problems whose config is remembered: finding a config takes the host milliseconds, and a server may see
any number of rows with each of its layers."""
_EQUAL = 1.01
"""Predictions within this factor count as equal: the first config among them is taken."""
_SPLIT = 1.05
"""The factor that Stream-K must gain to be taken: its predictions are the least certain."""
_WORSE = 1.15
"""A row for another shape is not taken if the model predicts that its config loses by more than this factor here."""
_GAINED = 1.05
"""A row for another shape is not taken if it gained less than this factor where it was measured."""
_STAND_INS = {"cuda": HARDWARE["H200 SXM"], "hip": HARDWARE["MI300X"]}
"""The hardware whose figures are taken for unknown hardware."""
_SIMULATED = {LOCAL: "local", GATHER: "push", SCATTER: "push", REDUCE_SCATTER: "push", ALL_REDUCE: "two_shot"}


def pick_config(problem: Problem, target: Target, algorithm: str | None = None) -> FusedConfig:
    """A config for ``problem`` on ``target``. It is the same on all ranks, as long as all read the same rows.

    These are tried in order:

    1. the user's rows, made by ``python -m iris tune``: the file that ``IRIS_TUNED`` names, else
       ``~/.cache/iris/tuned.json``; read once per process;
    2. rows that come with Iris;
    3. the config that :func:`iris.ops.model.predict_ms` expects to be the fastest of all that can run.

    But a row of exactly this shape, from either source, comes before rows of shapes near it.

    A row counts for its hardware, op, world size and dtype (float16 and bfloat16 count as one), and for shapes near its
    own; see :mod:`iris.ops.tuned`. In the simulator, where no model holds, the config without a row is one small tile
    and ``push``, or ``two_shot`` for ``matmul_all_reduce``, or another algorithm if that one cannot run.

    ``algorithm``: choose only among configs of this algorithm, even if it is excluded or cannot run; the op then says
    why.

    Raises:
        ArgumentError: there is no such op, dtype or backend; no call can have such sizes; the op has no such algorithm,
            or all are excluded and none is named; or a file of rows is broken: the error names it and what is wrong.
    """
    for name, given, kind in (("problem", problem, Problem), ("target", target, Target)):
        if not isinstance(given, kind):
            raise ArgumentError("pick_config", name, f"an iris.ops.{kind.__name__}", repr(given))
    if problem.op not in ALGORITHMS:
        raise ArgumentError("pick_config", "problem.op", f"one of {', '.join(ALGORITHMS)}", repr(problem.op))
    if problem.dtype not in DTYPES:
        raise ArgumentError("pick_config", "problem.dtype", f"one of {', '.join(map(str, DTYPES))}", problem.dtype)
    _check_sizes(problem)
    _check_target(target)
    if algorithm is not None and algorithm not in algorithms(problem.op):
        expected = f"None, or one of {', '.join(algorithms(problem.op))}"
        raise ArgumentError("pick_config", "algorithm", expected, repr(algorithm))
    return _picked(problem, target, algorithm, tuned.user_path(), number_format(problem.dtype))


def _check_target(target: Target) -> None:
    """Raise ArgumentError if there is no such device."""
    if target.backend not in _BACKENDS:
        raise ArgumentError("pick_config", "target.backend", f"one of {', '.join(_BACKENDS)}", repr(target.backend))
    _check_count("target.num_sms", target.num_sms)
    if target.shared_nbytes is not None:
        _check_count("target.shared_nbytes", target.shared_nbytes)
    if not isinstance(target.hardware, str):
        raise ArgumentError("pick_config", "target.hardware", "a name, as PyTorch gives it", repr(target.hardware))
    if not isinstance(target.excluded, tuple) or not all(isinstance(one, str) for one in target.excluded):
        raise ArgumentError("pick_config", "target.excluded", "a tuple of algorithms", repr(target.excluded))


def _check_sizes(problem: Problem) -> None:
    """Raise ArgumentError if no call can have these sizes."""
    for name in ("m", "n", "k", "world_size"):
        _check_count(f"problem.{name}", getattr(problem, name))
        if getattr(problem, name) > MAX_EXTENT:
            raise ArgumentError("pick_config", f"problem.{name}", f"at most {MAX_EXTENT}", getattr(problem, name))
    if problem.gather_dim not in ((0, 1) if problem.op == GATHER else (None,)):
        expected = "0 or 1" if problem.op == GATHER else "None, as nothing is gathered"
        raise ArgumentError("pick_config", "problem.gather_dim", expected, repr(problem.gather_dim))
    if problem.world_size > MAX_RANKS:
        raise ArgumentError("pick_config", "problem.world_size", f"at most {MAX_RANKS}", problem.world_size)
    if problem.op in (GATHER, REDUCE_SCATTER):
        shared = "k" if problem.gather_dim == 1 else "m"
        if getattr(problem, shared) % problem.world_size:
            expected = f"a multiple of the {problem.world_size} ranks"
            raise ArgumentError("pick_config", f"problem.{shared}", expected, getattr(problem, shared))


def _check_count(argument: str, count: object) -> None:
    """Raise ArgumentError unless ``count`` is a whole number, at least 1."""
    if type(count) is not int or count < 1:
        raise ArgumentError("pick_config", argument, "a whole number, at least 1", repr(count))


def has_row(problem: Problem, target: Target, config: FusedConfig) -> bool:
    """Whether a row that counts for ``problem`` has this ``config``."""
    return any(row.config == config for row in _near(problem, target, tuned.user_path()))


def can_run(problem: Problem, target: Target) -> bool:
    """Whether "auto" has an algorithm left that can run and is not excluded."""
    return next(candidates(problem, target), None) is not None


def forget() -> None:
    """Forget all rows and choices, so that the next choice reads the files again."""
    _picked.cache_clear()
    tuned.forget()


def figures(target: Target) -> Hardware | None:
    """The hardware's figures. For unknown hardware, those of another GPU of the vendor, scaled to the number of SMs.
    None in the simulator."""
    known = hardware(target.hardware) or _STAND_INS.get(target.backend)
    if known is None or known.num_sms == target.num_sms:
        return known
    share = target.num_sms / known.num_sms
    peaks = {name: rate * share for name, rate in known.peak_flops.items()}
    kept = {name: rate * share for name, rate in known.sustained_flops.items()}
    return replace(known, num_sms=target.num_sms, peak_flops=peaks, sustained_flops=kept)


def predictions(problem: Problem, target: Target, configs: Iterable[FusedConfig]) -> dict[FusedConfig, float]:
    """The predicted seconds of each of ``configs``; 0 for all in the simulator, where no model holds."""
    known = figures(target)
    if known is None:
        return dict.fromkeys(configs, 0.0)
    rates = machine(known, problem.dtype)
    return {config: predicted_s(problem, config, rates) for config in configs}


def expected_ms(problem: Problem, known: Hardware) -> float:
    """The milliseconds that the model expects for its own choice on ``known``, whatever this machine is: a figure to
    record beside a measurement."""
    target = Target(known.backend, known.num_sms, hardware=known.name)
    config = model_pick(problem, target)
    return 1e3 * predictions(problem, target, (config,))[config]


def model_pick(problem: Problem, target: Target, algorithm: str | None = None) -> FusedConfig:
    """The config that is picked if there is no row."""
    if target.backend == "sim":
        wanted = (_SIMULATED[problem.op], *ALGORITHMS[problem.op]) if algorithm is None else (algorithm,)
        configs = [FusedConfig(one, **TILES["sim", 0][0]) for one in wanted]
        return next((one for one in configs if obstacle(problem, one, target) is None), configs[0])
    times = predictions(problem, target, candidates(problem, target, algorithm=algorithm))
    if not times and algorithm is not None:  # the op says why it cannot run; a relay between two ranks does run
        return plain(problem, algorithm, target)
    costs = {config: time_s * (_SPLIT if config.stream_k else 1.0) for config, time_s in times.items()}
    cheapest = min(costs.values())
    return next(config for config, cost in costs.items() if cost <= _EQUAL * cheapest)


@lru_cache(maxsize=_REMEMBERED)
def _picked(
    problem: Problem, target: Target, algorithm: str | None, user_path: Path | None, numbers: str
) -> FusedConfig:
    """:func:`pick_config`, remembered. ``numbers``: the format in which the dtype is multiplied, which may change."""
    if algorithm is None and not can_run(problem, target):
        raise ArgumentError("pick_config", "target.excluded", "an algorithm left that can run", target.excluded)
    # It takes milliseconds, and is not needed for a row of exactly this shape.
    best = cache(lambda: model_pick(problem, target, algorithm))
    for row in _near(problem, target, user_path):
        if algorithm not in (None, row.config.algorithm) or obstacle(problem, row.config, target) is not None:
            continue
        if _counts(row, row.config, best, problem, target):
            return row.config
    exchanging = best().algorithm in EXCHANGING
    return _with_measured_matmul(best(), problem, target, user_path) if exchanging else best()


def _with_measured_matmul(config: FusedConfig, problem: Problem, target: Target, user_path: Path | None) -> FusedConfig:
    """``config``, an exchange, with the matmul (Iris's or the library's) that a row says is faster beside an exchange,
    for whatever op and number of ranks it was measured."""
    for row in _near(problem, target, user_path, local=True):
        measured = _beside_exchange(row, config)
        if measured is None or obstacle(problem, measured, target) is not None:
            continue
        if row.library_ms is not None or _counts(row, measured, lambda: config, problem, target):
            return measured
    return config


def _beside_exchange(row: tuned.Row, config: FusedConfig) -> FusedConfig | None:
    """``config`` with the matmul that ``row`` says is faster; None if the row does not say."""
    if row.config.algorithm in EXCHANGING:
        return replace(row.config, algorithm=config.algorithm)
    if row.library_ms is None:
        return None
    return replace(row.config, algorithm=config.algorithm, own_matmul=True) if row.beats_library else config


def _near(problem: Problem, target: Target, user_path: Path | None, *, local: bool = False) -> list[tuned.Row]:
    """The rows to try, in order: those of exactly this shape first, and among equals the user's; the others as
    :meth:`iris.ops.tuned.TunedRows.near` has them. If a finished search was of a shape, its unfinished ones come last.
    """
    sources = tuned.user_rows(user_path), tuned.shipped_rows()
    near = [row for rows in sources for row in rows.near(problem, target.hardware, local=local)]
    finished = {row.shape for row in near if not row.unfinished}
    return sorted(near, key=lambda row: (row.unfinished and row.shape in finished, not row.exact(problem)))


def _counts(
    row: tuned.Row, measured: FusedConfig, other: Callable[[], FusedConfig], problem: Problem, target: Target
) -> bool:
    """Whether to take ``measured``, from ``row``, instead of ``other()``, which is computed only if needed."""
    if row.own or not any(row.distances(problem)):
        return True
    if row.untuned_ms is not None and row.untuned_ms < _GAINED * row.measured_ms:
        return False
    times = predictions(problem, target, (measured, other()))
    return times[measured] <= _WORSE * times[other()]
