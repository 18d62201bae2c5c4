"""Calls under ``torch.compile``: they are not traced. A graph breaks at them, or calls another function instead."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
_compiled_by: Callable[[], object] = getattr(
    getattr(torch._C._dynamo, "eval_frame", None), "get_eval_frame_callback", lambda: "unknown"
)
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
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if in_graph is not None and _traced():
            return in_graph(*args, **kwargs)
        if "torch._dynamo" not in sys.modules or (not _traced() and _compiled_by() is None):
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function, reason=_REASON))
        return disabled[0](*args, **kwargs)

    return untraced(call) if in_graph is None else call


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, marked for ``torch.compile`` to break a graph at it."""
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, _REASON  # type: ignore[attr-defined]
    return function
