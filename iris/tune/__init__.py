"""``python -m iris tune``: measure configs on this machine, and keep the fastest for ``pick_config`` to take."""

from __future__ import annotations

from iris.tune.command import main

__all__ = ["main"]
