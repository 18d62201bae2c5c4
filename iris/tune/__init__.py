"""``python -m iris tune``: measure configs on this machine, and keep the fastest for ``pick_config``."""

from __future__ import annotations

from iris.tune.command import main

__all__ = ["main"]
