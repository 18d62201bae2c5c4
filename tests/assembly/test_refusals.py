"""Calls of device functions that the simulator refuses, the compiler refuses with the same text."""

from __future__ import annotations

import pytest
import torch
import triton
from compiler import assembly, target, tensor
from mistakes import MISTAKES, mistaken_kernel

from iris.device.handle import Handle


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistaken_arguments_are_refused_with_what_belongs_there(kind: str) -> None:
    with target("sm_90"), pytest.raises(triton.CompilationError) as raised:
        assembly(mistaken_kernel, tensor(torch.int32), tensor(torch.float32), tensor(Handle), KIND=kind)
    error: BaseException | None = raised.value
    while error is not None and MISTAKES[kind] not in str(error):
        error = error.__cause__
    assert error is not None, raised.getrepr(style="short")
