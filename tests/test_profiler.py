"""What profilers learn about launches of the matmul kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ops_inputs import LOCAL, Way, trial
from ranks import BACKEND, Ranks, context, worlds

from iris.device.matmul import work_of


@pytest.mark.parametrize(("sharded", "shards", "segments"), [(True, 4, 1), (False, 4, 1), (False, 1, 4)])
def test_the_work_of_a_launch(sharded: bool, shards: int, segments: int) -> None:
    half, whole = torch.empty(0, dtype=torch.bfloat16), torch.empty(0)
    told = work_of(
        (132,), SimpleNamespace(name="matmul_kernel"),
        {
            "M": 100, "N": 30, "K": 20, "SHARDED": sharded, "SHARDS": shards, "SEGMENTS": segments,
            "own": SimpleNamespace(ptr=half), "c": SimpleNamespace(ptr=whole),
        },
    )  # fmt: skip
    m, n, k = 400 if sharded else 100, 30, 20 * segments
    assert told == {
        "name": f"matmul_kernel_{m}x{n}x{k}", "flops16": 2 * m * n * k, "bytes": 2 * (m * k + n * k) + 4 * m * n,
    }  # fmt: skip


def told_of_a_matmul(seed: int) -> dict[str, Any]:
    import triton

    told: list[dict[str, Any]] = []

    def hear(metadata: Any) -> None:
        told.append(dict(metadata.get()))

    one = trial(context(), Way(LOCAL, "local"), (48, 32, 64), torch.float16, seed)
    triton.knobs.runtime.launch_enter_hook.add(hear)
    try:
        one.run()
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hear)
    (matmul,) = (launch for launch in told if launch["name"].startswith("matmul_kernel"))
    return {name: matmul[name] for name in ("name", "flops16", "bytes")}


if BACKEND != "sim":

    @pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
    def test_a_hook_of_tritons_is_told(ranks: Ranks, seed: int) -> None:
        """Proton uses such a hook."""
        expected = {"name": "matmul_kernel_48x32x64", "flops16": 2 * 48 * 32 * 64, "bytes": 2 * (80 * 64 + 48 * 32)}
        assert ranks.run(told_of_a_matmul, seed) == [expected] * 2
