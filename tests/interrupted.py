"""Commands that get Ctrl-C as from a terminal: all their processes do."""

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
    """``python -m iris`` with ``arguments``, simulated, interrupted ``wait_s`` after it has printed ``word`` to stderr:
    the process, which has ended, and what it printed to stdout, and to stderr from then on."""
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
