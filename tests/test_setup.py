"""The decisions of scripts/setup, which must never install a GPU build on a machine without a GPU."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "setup"
TORCH = "torch==2.13.0"


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("iris_setup", str(SCRIPT))
    loader_spec = importlib.util.spec_from_loader("iris_setup", loader)
    assert loader_spec is not None
    module = importlib.util.module_from_spec(loader_spec)
    keep, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = keep
    return module


def report(*names: str) -> dict[str, Any]:
    return {"install": [{"metadata": {"name": name}} for name in names]}


class Commands:
    """Stands in for ``subprocess.run``: keeps the commands, and answers a dry run with ``plan``."""

    def __init__(self, plan: str, fail: str = "") -> None:
        self.plan, self.fail, self.ran = plan, fail, list[str]()

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        line = " ".join(command)
        self.ran.append(line)
        failed = bool(self.fail) and self.fail in line
        return subprocess.CompletedProcess(command, int(failed), self.plan if "--dry-run" in line else "", "said why")


@pytest.mark.parametrize(
    ("torch_kind", "gpu", "case"),
    [
        ("CUDA", True, "base"),
        ("CUDA", False, "base"),
        ("HIP", True, "base"),
        ("CPU", False, "cpu"),
        ("", False, "cpu"),
        ("CPU", True, "gpu"),
        ("", True, "gpu"),
    ],
)
def test_case(setup: ModuleType, torch_kind: str, gpu: bool, case: str) -> None:
    assert setup.choose_case(torch_kind, gpu) == case


def test_gpu_payload_is_recognised(setup: ModuleType) -> None:
    plan = report("torch", "nvidia-cublas", "cuda_bindings", "triton", "sympy", "numpy", "pytorch-triton-rocm")
    assert setup.gpu_payload(plan) == ["cuda-bindings", "nvidia-cublas", "pytorch-triton-rocm", "triton"]
    assert setup.gpu_payload(report("torch", "filelock", "fsspec", "sympy", "tritonclient")) == []
    assert setup.gpu_payload({}) == []


def install(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, commands: Commands, case: str) -> list[str]:
    monkeypatch.setattr(setup.subprocess, "run", commands)
    setup.Environment(Path("env")).install_torch(case, TORCH)
    return [line.partition(" -m ")[2] for line in commands.ran]


def test_pip_installs_a_cpu_build(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = '{"install": [{"metadata": {"name": "torch"}}]}'
    ran = install(setup, monkeypatch, Commands(plan), "cpu")
    assert len(ran) == 2
    assert "--dry-run" in ran[0]
    assert ran[1].endswith(f"install --no-compile --quiet {TORCH}")


def test_uv_takes_the_cpu_build_where_pip_would_bring_cuda(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = '{"install": [{"metadata": {"name": "torch"}}, {"metadata": {"name": "nvidia-cublas"}}]}'
    ran = install(setup, monkeypatch, Commands(plan), "cpu")
    assert len(ran) == 3
    assert "--dry-run" in ran[0]
    assert ran[1].endswith("requirements/uv.txt")
    assert ran[2] == f"uv pip install --python env/bin/python --torch-backend=cpu {TORCH}"


def test_uv_fits_the_build_to_a_gpu(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = install(setup, monkeypatch, Commands(""), "gpu")
    assert ran[-1] == f"uv pip install --python env/bin/python --torch-backend=auto {TORCH}"
    assert not any("--dry-run" in line for line in ran)


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        ("--dry-run", f"pip finds no {TORCH} for Python"),
        ("uv.txt", "Is a package index reachable"),
        ("--torch-backend", "PyTorch's own package index, which must be reachable"),
    ],
)
def test_a_failure_says_what_to_do(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, fail: str, words: str) -> None:
    plan = '{"install": [{"metadata": {"name": "triton"}}]}'
    with pytest.raises(setup.SetupError) as error:
        install(setup, monkeypatch, Commands(plan, fail), "cpu")
    assert words in str(error.value)
    assert "said why" in str(error.value)


def test_an_old_python_is_refused(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.sys, "version_info", (3, 9, 18))
    with pytest.raises(setup.SetupError, match=r"Python 3\.10 or newer is needed.*\n.*make PYTHON=python3\.10"):
        setup.require_python()


def test_every_requirement_is_pinned(setup: ModuleType) -> None:
    for path in (setup.REQUIREMENTS, setup.UV_REQUIREMENTS):
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert lines
        assert all("==" in line for line in lines)
    assert setup.requirement_names(setup.REQUIREMENTS)[:3] == ["torch", "triton", "numpy"]


def test_old_tools_count_as_missing(setup: ModuleType) -> None:
    assert setup.too_old("greenlet", None)
    assert setup.too_old("setuptools", "65.5.0")
    assert not setup.too_old("setuptools", "84.2.1")
    assert not setup.too_old("rich", "1.0")
