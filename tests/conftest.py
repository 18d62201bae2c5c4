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

# Ranks and scripts that tests start must import the same Iris as the tests, installed or not.
_ROOT = str(Path(iris.__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))

# Several test processes share the cores, and each has many ranks: more threads of PyTorch would wait for each other.
if BACKEND == "sim":
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ranks and scripts import Iris hundreds of times: let them keep its bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell without job control makes its background processes, and their children, ignore Ctrl-C, which tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Ranks import the tests' modules, and with them pytest; some compile models; Triton imports the last one for a kernel's
# first argument. The server that ranks are forked from does these imports once, and others that each rank would do.
_preload = ForkServerContext.set_forkserver_preload


def _preload_more(context: ForkServerContext, names: list[str]) -> None:
    more = ["pytest", "torch._dynamo", "triton.experimental.gluon.nvidia.hopper", "tests.rewritten"]
    _preload(context, [*names, *more])


ForkServerContext.set_forkserver_preload = _preload_more  # type: ignore[method-assign,assignment]

# Tests of the simulator's internals cannot be imported where it cannot run.
collect_ignore = [] if importlib.util.find_spec("greenlet") else ["test_ordering.py"]

# A developer's own rows must not influence what tests pick.
os.environ["IRIS_TUNED"] = os.devnull

# Processes that pytest-xdist starts take the seed of the process that starts them.
SEED = int(os.environ.get("IRIS_TEST_SEED") or secrets.randbelow(1 << 31))
os.environ["IRIS_TEST_SEED"] = str(SEED)


_SHARED = {"drawn", "measured", "study"}
"""Fixtures of modules that take seconds."""


def pytest_report_header() -> str:
    return f"iris: backend {BACKEND}, IRIS_TEST_SEED={SEED}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make tests of a module that share what takes seconds to make a group, for one process."""
    for item in items:
        if _SHARED & set(getattr(item, "fixturenames", ())) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


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
