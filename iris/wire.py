"""Values as bytes, for ``broadcast``: a JSON head, a newline, and raw data. Nothing is pickled."""

from __future__ import annotations

import json
from typing import Any

import torch

from iris.errors import ArgumentError


def pack(value: Any) -> bytes:
    """``value`` as bytes: a JSON head, a newline, and raw data."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous()
        head = {"tensor": str(flat.dtype).removeprefix("torch."), "shape": list(flat.shape)}
        return json.dumps(head).encode() + b"\n" + flat.view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, bytes):
        return b'{"bytes": true}\n' + value
    try:
        return json.dumps({"json": value}).encode() + b"\n"
    except TypeError:
        return json.dumps({"unsupported": type(value).__name__}).encode() + b"\n"


def unpack(data: bytes, device: torch.device) -> Any:
    """What :func:`pack` was given; a tensor comes out on ``device``.

    Raises:
        ArgumentError: it was of a kind that cannot be sent.
    """
    head, _, raw = data.partition(b"\n")
    described = json.loads(head)
    if "unsupported" in described:
        expected = "None, bool, number, string, bytes, list or dict of those, or a tensor"
        raise ArgumentError("broadcast", "value", expected, described["unsupported"])
    if "tensor" in described:
        dtype = getattr(torch, described["tensor"])
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        return flat.view(dtype).view(described["shape"]).to(device)
    return raw if "bytes" in described else described["json"]
