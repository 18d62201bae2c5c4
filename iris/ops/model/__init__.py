"""How long an op takes with a config, from the hardware's figures: arithmetic only, no GPU.

A matmul is tiles, dealt round to programs; what moves is bytes over a rate and a time per copy and flag. Each
algorithm puts the two together as it does: one after the other, side by side, or tile by tile as parts arrive. A
program that waits for a part ends no sooner than the part is there plus its tiles from then on; the latest end counts.

How far off it is: beside 747 calls measured on 1, 2 and 4 × H200 (tests/data/h200_measured.json: all ops, bf16, 512 to
16384 rows, 2026-11-21 to 23) a prediction is 4 % off in the median, and between 0.70 and 1.37 times the measured time;
nine of ten are within 0.90 and 1.12. Clocks alone make 10 % between two measurements of the same. Of the configs
measured for a shape, the one that it predicts to be fastest took 2 % more than the fastest on average, and 20 % more at
worst, over 161 shapes. Calls of ``hbm_buffer``, of all-scatters by ``decomposed`` and of ``two_shot`` in rounds are not
among them, as these fetch, send and take turns otherwise since; gathers by ``push``, which no longer wait for peers to
enter, are, and the model still counts that wait where all programs send. With ``own_matmul`` it is less sure: 25 calls
of 16 to 128 rows lie between 0.70 and 1.40.

Beside 725 calls of later ops on 2 and 4 × H200 (tests/data/h200_again.json: all ops, 32 to 16384 rows, 2026-11-26), to
some of which it was fitted, it is 4 % off in the median, and nine of ten are within 0.90 and 1.12; of the configs of
186 shapes the one that it prefers took 1 % more than the fastest on average, and 17 % at worst. What is furthest off is
slow: ``two_shot`` with several tiles of 64 × 64 for each program takes twice as long as predicted.

Beside 730 calls whose data travel as words on 2 and 4 × H200 (tests/data/h200_words.json: 1 to 512 rows, 2026-11-27),
to which it was fitted, it is 5 % off in the median, and nine of ten are within 0.89 and 1.15; of the configs of 132
shapes the one that it prefers took 0.2 % more than the fastest on average, and 11 % at worst. What is furthest off is
slow: tiles of twice as many rows as there are. Words had twice as many bytes before, so no calls that travel as such
are in the other sets; on 8 GPUs they have not been measured since.

Beside 565 calls measured on 8 × H200 (tests/data/h200_eight.json: all ops, 128 to 16384 rows, 2026-11-26), to most of
which it was fitted, it is 4 % off in the median, nine of ten are within 0.90 and 1.12, and all but one within 0.75 and
1.26; of the configs of 81 shapes the one that it prefers took 1.4 % more than the fastest on average, and 11 % at
worst. What is furthest off is slow: ``push`` of an all-scatter with four tiles of 64 × 64 for each program takes 1.6
times as long as predicted.

Nobody has measured AMD GPUs beside it. Beside 831 calls as one of 8 or 4 ranks for which two H200s stand
(tests/data/h200_mirrored.json: all ops, 16 to 16384 rows, benchmark/mirrored.py), where there is no incast, which the
model is told (``Machine.contention``), it is 4 % off in the median, nine of ten are within 0.91 and 1.23, and of the
configs of 196 shapes the one that it prefers took 1.5 % more than the fastest on average, and 46 % at worst; some of
the shapes were measured as H100s had said that it is wrong there. Most are of 2026-11-23: the sums of tiles of when
programs waited for each part that they add up; they now load the next ones ahead, and take up to 5 % less, which the
model counts. Of sums and gathers of columns by ``decomposed`` of 8 ranks, whose copies have no flags any more, there
are those of two days later. What is furthest off is slow: ``one_shot`` of wide matrices, and many chunks.

Of H100 it has the rates that data sheets say; some constants are fitted to what follows. Beside 2261 calls on two H100s
that stand for 8, 4 or 2 ranks (tests/data/h100_mirrored.json, 2026-11-24 and 25) it is 3 % off in the median, and nine
of ten are within 0.91 and 1.12; of the configs of 377 shapes the one that it prefers took 2 % more than the fastest on
average, one in seven more than 5 %, and one 81 %: where the library takes twice as long for 512×2304×16384 as for
others of this size. The calls of ``decomposed`` with several ranks' rows in one matmul among them were predicted before
any of them had been measured; those of all-reduces in several chunks, but for about 100, are of when a chunk was summed
later.
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
"""By op and algorithm: what predicts seconds."""


def predict_ms(problem: Problem, config: FusedConfig, hardware: Hardware) -> float:
    """Milliseconds from when all ranks have begun a call until the last has finished, on the device.

    Args:
        problem: the call.
        config: with one of the op's algorithms, not ``"auto"``.
        hardware: whose figures to take.

    Raises:
        KeyError: the op has no such algorithm, or the hardware no rate for the dtype.
    """
    return 1e3 * predicted_s(problem, config, machine(hardware, problem.dtype))


def predicted_s(problem: Problem, config: FusedConfig, rates: Machine) -> float:
    """As :func:`predict_ms`, in seconds, for one who asks for many configs."""
    return _PREDICTORS[problem.op][config.algorithm](Call(problem, config, rates))
