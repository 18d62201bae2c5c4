"""Calls under ``torch.compile``: they are not traced. A graph breaks at them, or calls another function instead."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
_frames: Any = getattr(torch._C._dynamo, "eval_frame", None)
_compiled_by: Callable[[], object] = getattr(_frames, "get_eval_frame_callback", lambda: "unknown")
"""Returns the compiler of the frames that are called now; None outside of compiled code."""
_traced = torch.compiler.is_dynamo_compiling
"""Asked first, as the compiler knows this function: it would warn about the other, and recompile for each compiler."""
_REASON = "Iris's calls are not traced: a graph breaks at them, so leave out fullgraph=True"


def eager(function: Callable[P, T], in_graph: Callable[P, T] | None = None) -> Callable[P, T]:
    """``function``, never traced by ``torch.compile``; ``in_graph``, if given, is traced in its place. PyTorch's own
    decorator for this imports the compiler, which takes longer than the import of all of Iris, and costs microseconds
    in every call. So it is applied only inside compiled code."""
    disabled: list[Callable[P, T]] = []

    @wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules or (not _traced() and _compiled_by() is None):
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function, reason=_REASON))
        return disabled[0](*args, **kwargs)

    untraced(alone)
    if in_graph is None:
        return alone

    @wraps(function)
    def either(*args: P.args, **kwargs: P.kwargs) -> T:
        return in_graph(*args, **kwargs) if _traced() else alone(*args, **kwargs)

    return either


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, marked for ``torch.compile`` to break a graph at it, and not to compile it by itself either."""
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, _REASON  # type: ignore[attr-defined]
    with suppress(AttributeError, TypeError):  # PyTorch's own, and may change
        skip = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
        _frames.set_code_exec_strategy(function.__code__, skip)
    return function
