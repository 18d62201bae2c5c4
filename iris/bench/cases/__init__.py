"""The cases that come with Iris: the fused ops and other libraries, and transfers between every two ranks."""

from __future__ import annotations

import importlib

_MODULES = ("iris.bench.cases.fused", "iris.bench.cases.transfers")


def load() -> None:
    """Register the cases."""
    for module in _MODULES:
        importlib.import_module(module)
