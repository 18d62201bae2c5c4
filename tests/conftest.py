"""Fixtures. See :mod:`ranks` for how tests run on several ranks."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from ranks import BACKEND, Ranks, worlds

import iris

# Ranks and scripts that tests start import the same Iris as the tests, installed or not.
_ROOT = str(Path(iris.__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))

# Where several test processes share the cores, threads of PyTorch's wait for each other, and ranks are many.
if BACKEND == "sim":
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# They import it hundreds of times: let them keep its bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell without job control has what runs in its background ignore Ctrl-C, and what that starts: tests send it some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Ranks import the tests' modules, and with them pytest; Triton imports the other as soon as a kernel gets an argument.
# Let the server that they are forked from do that, once, and what else each of them would.
_preload = ForkServerContext.set_forkserver_preload


def _preload_more(context: ForkServerContext, names: list[str]) -> None:
    _preload(context, [*names, "pytest", "triton.experimental.gluon.nvidia.hopper", "tests.rewritten"])


ForkServerContext.set_forkserver_preload = _preload_more  # type: ignore[method-assign,assignment]

# What looks into the simulator cannot be imported where it cannot run.
collect_ignore = [] if importlib.util.find_spec("greenlet") else ["test_ordering.py"]

# No developer's own rows shall steer what tests pick.
os.environ["IRIS_TUNED"] = os.devnull

# Processes that pytest-xdist starts take the number of the one that starts them.
SEED = int(os.environ.get("IRIS_TEST_SEED") or secrets.randbelow(1 << 31))
os.environ["IRIS_TEST_SEED"] = str(SEED)


def pytest_report_header() -> str:
    return f"iris: backend {BACKEND}, IRIS_TEST_SEED={SEED}"


@pytest.fixture
def seed() -> int:
    """Seeds a test's random data; set IRIS_TEST_SEED to repeat a run."""
    return SEED


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Ranks]]:
    """Live ranks by world size."""
    started: dict[int, Ranks] = {}
    yield started
    for ranks in started.values():
        ranks.end()


@pytest.fixture(params=worlds())
def ranks(request: pytest.FixtureRequest, pools: dict[int, Ranks]) -> Ranks:
    """Live ranks, for every world size; choose others with ``parametrize("ranks", worlds(2, 2), indirect=True)``."""
    size: int = request.param
    return pools.setdefault(size, Ranks(size))
