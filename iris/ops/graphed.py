"""Calls in the graphs that ``torch.compile`` makes.

A call is one node of the graph, ``torch.ops.iris.<op>``, which makes a new tensor. The graph copies that to ``output``,
unless ``output`` was made in the graph, or is written again. For outputs that peers write, a context has a buffer on
the symmetric heap, which all its nodes share.

A node that writes ``output`` itself would not work. Some compilers pass it a copy, which no peer sees; and if two such
nodes write the same input of a graph, TorchInductor (PyTorch 2.11, 2.13) reads the first one's result only after the
second has written.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from triton import next_power_of_2

from iris.context import Iris, context_by_key
from iris.ops.algorithms import ALL_REDUCE, SCATTER
from iris.ops.config import FusedConfig
from iris.ops.operands import check_no_gradient

Op = Callable[..., torch.Tensor]
PEERS_WRITE = (ALL_REDUCE, SCATTER)
"""Ops whose output must be on the symmetric heap."""
_LIBRARY = torch.library.Library("iris", "FRAGMENT")
_SCHEMA = (
    "(str ctx, SymInt[] shape, ScalarType dtype, Tensor A, Tensor B, Tensor? bias, Tensor? scale_a, Tensor? scale_b, "
    "int? gather_dim, str config) -> Tensor"
)
_FIELDS = tuple(FusedConfig.__dataclass_fields__)
_NO_LITERALS: dict[str, Any] = {text: float(text) for text in ("nan", "inf", "-inf")}
"""Floats that are no literals as Python writes them."""


class _Buffer:
    """A buffer of ``ctx`` on the symmetric heap, for the result of one node at a time. When a larger one is made, the
    smaller ones are kept, as captured CUDA graphs may use them."""

    def __init__(self, ctx: Iris) -> None:
        self._ctx, self._made = ctx, list[torch.Tensor]()

    def matrix(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        nbytes = shape[0] * shape[1] * dtype.itemsize
        if not self._made or self._made[-1].numel() < nbytes:
            self._made.append(self._ctx.empty(next_power_of_2(nbytes), dtype=torch.uint8))
        return self._made[-1][:nbytes].view(dtype).view(shape)


def in_graph(op: Op, untraced: Op) -> Op:
    """The function that ``torch.compile`` traces in place of ``op``. ``untraced``: the same op, but the graph breaks at
    it; for calls that no node can make."""
    name, names = op.__name__, list(inspect.signature(op).parameters)
    operands = names[: names.index("bias") + 1]
    gathers, peers_write = "gather_dim" in names, name in PEERS_WRITE

    def run(
        key: str, shape: list[int], dtype: torch.dtype, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None,
        scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, gather_dim: int | None, config: str,
    ) -> torch.Tensor:  # fmt: skip
        ctx = context_by_key(name, key)
        ctx.check(name)
        made = torch.empty(shape, dtype=dtype, device=a.device)
        output = ctx.kept(_Buffer, lambda: _Buffer(ctx)).matrix(shape, dtype) if peers_write else made
        dim = {"gather_dim": gather_dim} if gathers else {}
        op(ctx, output, a, b, bias, scale_a=scale_a, scale_b=scale_b, config=_config_of(config), **dim)
        return made.copy_(output) if peers_write else made

    def fake(key: str, shape: list[int], dtype: torch.dtype, a: torch.Tensor, *_: object) -> torch.Tensor:
        return a.new_empty(shape, dtype=dtype)

    def refuse_gradients(
        key: str, shape: list[int], dtype: torch.dtype, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None,
        scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, *others: Any,
    ) -> torch.Tensor:  # fmt: skip
        given = {**dict(zip(operands[2:], (a, b, bias), strict=True)), "scale_a": scale_a, "scale_b": scale_b}
        for argument, tensor in given.items():
            if tensor is not None:
                check_no_gradient(name, argument, tensor)
        with torch._C._AutoDispatchBelowAutograd():
            made: torch.Tensor = node(key, shape, dtype, a, b, bias, scale_a, scale_b, *others)
        return made

    _LIBRARY.define(name + _SCHEMA)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, refuse_gradients, "Autograd")
    torch.library.register_fake(f"iris::{name}", fake, lib=_LIBRARY)
    node = getattr(torch.ops.iris, name).default

    def traced(*args: Any, **kwargs: Any) -> torch.Tensor:
        given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        values: list[Any] = [given.get(argument) for argument in operands]
        ctx, output, a, b, bias = values
        config, plain = given.get("config"), given.get("workspace") is None and given.get("trace", False) is False
        plain &= given.get("gathered") is None
        mistaken = len(args) > len(operands) or not all(argument in names for argument in given)
        mistaken |= not isinstance(ctx, Iris) or not isinstance(config, str | FusedConfig | None)
        if mistaken or not plain or not isinstance(output, torch.Tensor) or output.dim() != 2:
            return untraced(*args, **kwargs)
        others = bias, given.get("scale_a"), given.get("scale_b"), given.get("gather_dim"), _text_of(config)
        made = node(ctx._key, output.shape, output.dtype, a, b, *others)
        result: torch.Tensor = output
        result[...] = made  # not copy_: its result, returned by a Function, has no gradients in PyTorch 2.11
        return result

    return traced


def _text_of(config: FusedConfig | str | None) -> str:
    """``config`` as the text that a node takes."""
    if config is None or isinstance(config, str):
        return config or "auto"
    return ",".join([f"{name}={getattr(config, name)!r}" for name in _FIELDS])


@cache
def _config_of(text: str) -> FusedConfig | str:
    if not text.startswith(f"{_FIELDS[0]}="):
        return text
    pairs = [field.split("=") for field in text.split(",")]
    return FusedConfig(**{name: _NO_LITERALS.get(value) or ast.literal_eval(value) for name, value in pairs})
