"""Predicted times of ops: how long a call takes with a config, from the hardware's figures. Arithmetic only, no GPU.

A matmul is a number of tiles, dealt out to programs in turn. A transfer takes its bytes over a rate, and a time for
each copy and flag. Each algorithm combines the two as it runs them: one after the other, side by side, or tile by tile
as parts arrive. A program that waits for a part cannot end before the part is there and the program's remaining tiles
are computed after that; the latest end counts.

How accurate it is: beside 747 calls measured on 1, 2 and 4 × H200 (tests/data/h200_measured.json: all ops, bf16, 512 to
16384 rows, 2026-11-21 to 23), a prediction is 4 % off in the median, and between 0.70 and 1.37 times the measured time;
nine of ten are within 0.90 and 1.12. Two measurements of the same call differ by 10 % because of clocks alone. Of the
configs measured for a shape, the one predicted to be the fastest took 2 % more than the fastest on average, and 20 %
more at worst, over 161 shapes. The set has no calls of ``hbm_buffer``, of all-scatters by ``decomposed``, or of
``two_shot`` in rounds, which have since changed how they fetch, send and take turns. It has gathers by ``push``, which
no longer wait for peers to enter; the model still counts that wait where all programs send. With ``own_matmul``
predictions are less accurate: 25 calls of 16 to 128 rows lie between 0.70 and 1.40.

Beside 725 calls of later ops on 2 and 4 × H200 (tests/data/h200_again.json: all ops, 32 to 16384 rows, 2026-11-26), to
some of which the model was fitted, it is 4 % off in the median, and nine of ten are within 0.90 and 1.12; of the
configs of 186 shapes the one that it prefers took 1 % more than the fastest on average, and 17 % at worst. The worst
predictions are too fast: ``two_shot`` with several tiles of 64 × 64 for each program takes twice as long as predicted.

Beside 730 calls whose data travel as words on 2 and 4 × H200 (tests/data/h200_words.json: 1 to 512 rows, 2026-11-27),
to which the model was fitted, it is 5 % off in the median, and nine of ten are within 0.89 and 1.15; of the configs of
132 shapes the one that it prefers took 0.2 % more than the fastest on average, and 11 % at worst. The worst predictions
are too fast: for tiles of twice as many rows as the problem has. Before this date, words had twice as many bytes, so
the other sets have no calls that use words; on 8 GPUs such calls have not been measured since.

Beside 565 calls measured on 8 × H200 (tests/data/h200_eight.json: all ops, 128 to 16384 rows, 2026-11-26), to most of
which the model was fitted, it is 4 % off in the median, nine of ten are within 0.90 and 1.12, and all but one within
0.75 and 1.26; of the configs of 81 shapes the one that it prefers took 1.4 % more than the fastest on average, and 11 %
at worst. The worst prediction is too fast: ``push`` of an all-scatter with four tiles of 64 × 64 for each program takes
1.6 times as long as predicted.

It has not been compared with AMD GPUs. Beside 831 calls as one of 8 or 4 ranks for which two H200s stand
(tests/data/h200_mirrored.json: all ops, 16 to 16384 rows, benchmark/mirrored.py), it is 4 % off in the median, nine of
ten are within 0.91 and 1.23, and of the configs of 196 shapes the one that it prefers took 1.5 % more than the fastest
on average, and 46 % at worst. There is no incast in these calls, which the model is told (``Machine.contention``). Some
of the shapes were measured because results of H100s had shown that the model is wrong there. Most calls are of
2026-11-23. In those that sum tiles, programs still waited for each part that they add up; programs now load the next
parts ahead and take up to 5 % less, which the model counts. The sums by ``decomposed`` on 8 ranks, and its gathers of
all ranks' columns at once, whose copies have no flags any more, are of two days later. The worst predictions are too
fast: for ``one_shot`` of wide matrices, and for many chunks.

For H100 the model has the rates of data sheets; some constants are fitted to the following calls. Beside 2261 calls on
two H100s that stand for 8, 4 or 2 ranks (tests/data/h100_mirrored.json, 2026-11-24 and 25) it is 3 % off in the median,
and nine of ten are within 0.91 and 1.12. Of the configs of 377 shapes the one that it prefers took 2 % more than the
fastest on average, one in seven more than 5 %, and one 81 %: the library takes twice as long for 512×2304×16384 as for
other shapes of this size. The calls of ``decomposed`` with several ranks' rows in one matmul were predicted before any
of them had been measured. Those of all-reduces in several chunks, except about 100, were measured when a chunk was
still summed later.
"""

from __future__ import annotations

from collections.abc import Callable

from iris.ops.algorithms import ALL_REDUCE, GATHER, LOCAL, REDUCE_SCATTER, SCATTER
from iris.ops.config import FusedConfig
from iris.ops.hardware import Hardware
from iris.ops.model import gather, scatter, sums
from iris.ops.model.machine import Machine, machine
from iris.ops.model.matmul import Call
from iris.ops.model.parts import local_s
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
    return _PREDICTORS[problem.op][config.algorithm](Call(problem, config, rates)) + rates.turning_s(problem)
