"""Runs scripts of the documentation as users would."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from warm import python


def run_together(script: Path, environments: Sequence[dict[str, str]], timeout_s: float) -> list[tuple[int, str]]:
    """Start ``script`` once in each of ``environments``; returns the exit status and the output of each."""
    running = [
        subprocess.Popen(
            [python(), str(script)],
            env=environment,
            cwd=script.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in environments
    ]
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [(process.returncode, output) for process, output in zip(running, outputs, strict=True)]
