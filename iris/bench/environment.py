"""Where and with what a figure was measured."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import torch
import triton

import iris
from iris import backends
from iris.context import Iris
from iris.ops.target import target_of
from iris.ops.tuned import SIMULATED

_VARIABLES = (
    "IRIS_CHECK_CALLS",
    "IRIS_REPLAY",
    "NCCL_ALGO",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NVSHMEM_DISABLE_NVLS",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
)
"""Environment variables that change how fast Iris and other libraries are."""


def environment(ctx: Iris, commit: str | None) -> dict[str, str | int | None]:
    """Hardware, versions and date of this rank's process; if ``commit`` is None, git is asked for it."""
    return {
        "hardware": target_of(ctx).hardware,
        "backend": ctx.backend_name,
        **versions(ctx.backend_name, commit),
        "date": now(),
        "host_ranks": ctx.world_size,
        "variables": variables(),
    }


def variables() -> str | None:
    """The environment variables that records name, with their values; None if none is set."""
    return " ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ) or None


def versions(backend: str, commit: str | None) -> dict[str, str | None]:
    """What is measured, and with what; ``commit`` as for :func:`environment`."""
    nccl = backend != "sim" and torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "iris": iris.__version__,
        "commit": commit or checked_out_commit(),
    }


def here() -> tuple[str, str]:
    """Hardware and backend that ranks started here will have."""
    backend = backends.detect().name
    return (torch.cuda.get_device_name(0) if backend in backends.GPU_BACKENDS else SIMULATED), backend


def dated(known: Mapping[str, str | int | None]) -> dict[str, str | int | None]:
    """``known`` with the present date."""
    return {**known, "date": now()}


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def checked_out_commit() -> str | None:
    """The commit of the checkout that Iris is imported from, ``-dirty`` if files differ; None outside one."""
    root = Path(iris.__file__).resolve().parents[1]
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    command = [git, "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None
