"""The checks of compiled kernels run in a process of their own, ``IRIS_BACKEND=compile pytest tests/assembly``, since
interpreted and compiled Triton cannot share one; ``scripts/assembly`` runs them on each supported Triton."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest

COMPILING = os.environ.get("IRIS_BACKEND") == "compile"
collect_ignore_glob = [] if COMPILING else ["test_*.py"]

if COMPILING:
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what Triton 3.9 does, but warns about if nothing is said
    os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # two thirds of a listing's text, and no rule reads it


@pytest.fixture(scope="session")
def compiled(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Future[str]]]:
    """Assembly by case and target, for those that this session's tests ask for, compiled by one process per core."""
    from kernels import compile_named

    functions = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asking = [item.callspec.params for item in functions if "compiled" in item.fixturenames]
    wanted = [(str(one["name"]), str(one["target_name"])) for one in asking]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        yield {one: pool.submit(compile_named, *one) for one in wanted}
        pool.shutdown(cancel_futures=True)
