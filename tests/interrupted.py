"""Commands that get Ctrl-C as from a terminal, which sends it to all their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def interrupted(arguments: list[str], word: str, wait_s: float) -> tuple[subprocess.Popen[str], str, str]:
    """Run ``python -m iris`` with ``arguments`` in the simulator, and interrupt it ``wait_s`` after it has printed
    ``word`` to stderr. Returns the ended process, what it printed to stdout, and what it then printed to stderr."""
    pytest.importorskip("greenlet")  # else the simulator ends the run before it can be stopped
    process = subprocess.Popen(
        [sys.executable, "-m", "iris", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "IRIS_BACKEND": "sim"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    while word not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(wait_s)
    os.killpg(process.pid, signal.SIGINT)
    return process, *process.communicate(timeout=30)
