"""Fixtures of the checks of compiled kernels. These run in a separate process, ``IRIS_BACKEND=compile pytest
tests/assembly``, as interpreted and compiled Triton cannot share one; ``scripts/assembly`` runs them on each supported
Triton."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import pytest

COMPILING = os.environ.get("IRIS_BACKEND") == "compile"
collect_ignore_glob = [] if COMPILING else ["test_*.py"]

if COMPILING:
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9's default, but it warns if this is not set
    os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # two thirds of a listing's text, and no rule reads it
    os.environ.setdefault("MLIR_DISABLE_MULTITHREADING", "1")  # there is a compiler for each core


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPoolExecutor]:
    """A pool of compilers, one process per core."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as made:
        yield made
        made.shutdown(cancel_futures=True)


def asking(request: pytest.FixtureRequest, fixture: str) -> Iterator[dict[str, Any]]:
    """The parameters of all tests of this session that use ``fixture``."""
    for item in request.session.items:
        if isinstance(item, pytest.Function) and fixture in item.fixturenames:
            yield item.callspec.params


@pytest.fixture(scope="session")
def compiled(request: pytest.FixtureRequest, pool: ProcessPoolExecutor) -> dict[tuple[str, str], Future[str]]:
    """Assembly by case and target, for those that tests of this session use."""
    from kernels import compile_named

    wanted = [(str(one["name"]), str(one["target_name"])) for one in asking(request, "compiled")]
    return {one: pool.submit(compile_named, *one) for one in wanted}


@pytest.fixture(scope="session")
def launched(request: pytest.FixtureRequest, pool: ProcessPoolExecutor) -> dict[tuple[str, str], Future[list[str]]]:
    """Errors in what a call launches, by call and target, for those that tests of this session use."""
    from launches import wrong_with

    wanted = [(one["call"], str(one["target_name"])) for one in asking(request, "launched")]
    return {(str(call), name): pool.submit(wrong_with, call, name) for call, name in wanted}
