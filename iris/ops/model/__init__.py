"""Predicted times of ops: how long a call takes with a config, from the hardware's figures. Arithmetic only, no GPU.

A matmul is a number of tiles, dealt out to programs in turn. A transfer takes its bytes over a rate, and a time for
each copy and flag. Each algorithm combines the two as it runs them: one after the other, side by side, or tile by tile
as parts arrive. A program that waits for a part cannot end before the part is there and the program's remaining tiles
are computed after that; the latest end counts.

How accurate it is: docs/performance.md#how-accurate-the-model-is.
"""

from __future__ import annotations

from collections.abc import Callable

from iris.ops.algorithms import ALL_REDUCE, GATHER, LOCAL, REDUCE_SCATTER, SCATTER
from iris.ops.config import FusedConfig
from iris.ops.hardware import Hardware
from iris.ops.model import gather, scatter, sums
from iris.ops.model.machine import Machine, machine
from iris.ops.model.matmul import Call
from iris.ops.model.terms import local_s
from iris.ops.problem import Problem

_PREDICTORS: dict[str, dict[str, Callable[[Call], float]]] = {
    GATHER: gather.ALGORITHMS,
    SCATTER: scatter.ALGORITHMS,
    REDUCE_SCATTER: sums.SCATTERED,
    ALL_REDUCE: sums.REDUCED,
    LOCAL: {"local": local_s},
}
"""By op and algorithm, the functions that predict seconds."""


def predict_ms(problem: Problem, config: FusedConfig, hardware: Hardware) -> float:
    """Milliseconds on the device from when all ranks have begun a call until the last has finished.

    Args:
        problem: the call.
        config: with one of the op's algorithms, not ``"auto"``.
        hardware: the hardware whose figures are taken.

    Raises:
        KeyError: the op has no such algorithm, or the hardware no rate for the dtype.
    """
    return 1e3 * predicted_s(problem, config, machine(hardware, problem.dtype))


def predicted_s(problem: Problem, config: FusedConfig, rates: Machine) -> float:
    """As :func:`predict_ms`, but in seconds, for callers that compare many configs."""
    return _PREDICTORS[problem.op][config.algorithm](Call(problem, config, rates)) + rates.transposing_s(problem)
