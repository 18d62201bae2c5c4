"""Values as bytes, for ``broadcast``: a JSON head, a newline, and raw data. Nothing is pickled."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from iris.errors import ArgumentError, words_of

_TAKEN = "None, bool, number, string, list or dict (with strings as keys) of those, bytes, or a dense tensor"
_MAX_INT_BITS = 14_000
"""The most bits of a whole number that is sent: Python refuses to write or read more than 4300 digits."""


def pack(value: Any) -> bytes:
    """``value`` as bytes: a JSON head, a newline, and raw data. A value that cannot be sent becomes bytes as well; from
    these :func:`unpack` raises the same error on every rank."""
    try:
        refused = _refused(value, "")
        if not refused:
            return _packed(value)
    except RecursionError:
        refused = f"{type(value).__name__} that holds itself, or is nested too deep"
    except Exception as error:  # noqa: BLE001 (a failure here alone would leave the peers waiting)
        refused = f"{type(value).__name__} that cannot be read: {type(error).__name__}: {words_of(error)}"
    return json.dumps({"unsupported": refused}).encode() + b"\n"


def _packed(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        head = {"tensor": str(flat.dtype).removeprefix("torch."), "shape": list(flat.shape)}
        numbers = flat.as_strided((flat.numel(),), (1,))  # one element may keep odd strides
        return json.dumps(head).encode() + b"\n" + numbers.view(torch.uint8).numpy().tobytes()
    if isinstance(value, bytes):
        return b'{"bytes": true}\n' + value
    return json.dumps({"json": value}, default=np.generic.item).encode() + b"\n"


def _refused(value: object, place: str) -> str:
    """Which part of ``value`` cannot be sent unchanged, and where it is; empty if there is none. ``place``: the place
    of ``value`` within all that is sent, such as ``[3]['key']``."""
    where = f" at value{place}" if place else ""
    if isinstance(value, bytes) and not place:
        return ""
    if isinstance(value, np.generic) and not isinstance(plain := value.item(), np.generic):  # a longdouble stays one
        return _refused(plain, place)
    if isinstance(value, torch.Tensor) and not place:
        if value.is_quantized or value.is_nested:
            return f"a {'quantized' if value.is_quantized else 'nested'} tensor"
        dense = value.layout == torch.strided and not value.is_meta
        return "" if dense else f"a tensor of {value.layout} on {value.device}"
    if isinstance(value, list):
        return next((bad for i, one in enumerate(value) if (bad := _refused(one, f"{place}[{i}]"))), "")
    if isinstance(value, dict):
        odd = next((f"{type(key).__name__} as key {key!r}{where}" for key in value if not isinstance(key, str)), "")
        return odd or next((bad for key, one in value.items() if (bad := _refused(one, f"{place}[{key!r}]"))), "")
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        return f"a number of {value.bit_length()} bits, more than {_MAX_INT_BITS}{where}"
    known = value is None or isinstance(value, (bool, int, float, str))
    return "" if known else f"{type(value).__name__}{where}"


def unpack(data: bytes, device: torch.device) -> Any:
    """The value that :func:`pack` was given; a tensor is put on ``device``.

    Raises:
        ArgumentError: that value cannot be sent.
    """
    head, _, raw = data.partition(b"\n")
    described = json.loads(head)
    if "unsupported" in described:
        raise ArgumentError("broadcast", "value", _TAKEN, described["unsupported"])
    if "tensor" in described:
        dtype = getattr(torch, described["tensor"])
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else nothing
        return flat.view(dtype).view(described["shape"]).to(device)
    return raw if "bytes" in described else described["json"]
