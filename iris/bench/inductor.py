"""TorchInductor where there is no compiler of C++, which it needs to generate code for CPUs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch


def without_code(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """A backend of ``torch.compile``: what TorchInductor makes of a graph before it generates code is run as it is.
    Collectives and matmuls are fused (``_micro_pipeline_tp``) without NCCL, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of PyTorch's own imports
        from torch._inductor.compile_fx import compile_fx

    inner: Any = _as_it_is
    return compile_fx(graph, inputs, inner_compile=inner)


def _as_it_is(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[[list[Any]], Any]:
    from torch._guards import detect_fake_mode
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V

    there = mock.patch("torch.distributed.is_nccl_available", return_value=True)  # else nothing is fused
    with V.set_fake_mode(detect_fake_mode(inputs)), there:
        view_to_reshape(graph)
        post_grad_passes(graph, options.get("is_inference", False))
    graph.recompile()

    def run(arguments: list[Any]) -> Any:
        return graph(*arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
