"""A row-major B of 8 bits, which is transposed before it is multiplied with many rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from ops_inputs import GATHER, LAYOUTS, LOCAL, REDUCE_SCATTER, SMALL, Way, some, trial, ways
from ranks import Ranks, context, fresh, worlds

from iris import ops
from iris.ops import copies, target
from iris.ops.model import predict_ms
from iris.ops.pick import figures, model_pick
from iris.ops.problem import DTYPES, QUANTISED, TRANSPOSED_FROM_ROWS, Problem
from iris.ops.workspace import FusedWorkspace, new_workspace

ROWS, N, DEPTH = TRANSPOSED_FROM_ROWS, 17, 40


def copied_matrices(dtype: torch.dtype) -> dict[str, str]:
    """What is wrong with what :func:`iris.ops.copies.column_major` returns, by the layout of B and the rows of A."""
    ctx, wrong = context(), {}
    workspace = new_workspace(ctx, "matmul_all_reduce", "two_shot", 1024)
    whole = torch.randint(-100, 100, (70, 150), device=ctx.device).to(dtype)
    layouts = {
        "row-major": whole,
        "some of its columns": whole[:, 3:70],
        "strided": whole[::2, ::3],
        "transposed": whole.t().contiguous().t(),
        "a column": whole[:, 1:2],
        "a row": whole[1:2],
    }
    for layout, b in layouts.items():
        for m in (1, TRANSPOSED_FROM_ROWS - 1, TRANSPOSED_FROM_ROWS, 4096):
            transposed = not (b.stride(1) == 1 or b.shape[1] == 1)
            found = copies.column_major(
                workspace, Problem(LOCAL, m, b.shape[1], b.shape[0], dtype, 1, None, transposed), b
            )
            copied = (
                dtype in QUANTISED
                and m >= TRANSPOSED_FROM_ROWS
                and layout in ("row-major", "some of its columns", "a column")
            )
            if not torch.equal(found.double(), b.double()):
                wrong[f"{layout}, {m}"] = "other elements"
            elif (found is not b) != (copied and target.takes_columns_only(ctx)):
                wrong[f"{layout}, {m}"] = "copied, or not copied"
            elif found is not b and (found.stride(0) != 1 or found.stride(1) % 16 or found.data_ptr() % 16):
                wrong[f"{layout}, {m}"] = f"strides {found.stride()}"
    return wrong


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_has_contiguous_columns(ranks: Ranks, dtype: torch.dtype) -> None:
    assert ranks.run(copied_matrices, dtype) == [{}, {}]


def excess_and_copies(way: Way, dtype: torch.dtype, layout: str, seed: int) -> tuple[float, int, int]:
    """The error of a call, how often it transposed B, and how often it should if B is row-major."""
    ctx, world = context(), context().world_size
    rows = ROWS if way.op != GATHER or way.gather_dim else -(-ROWS // world)
    rows = -(-ROWS // world) if way.op == REDUCE_SCATTER else rows
    one = trial(ctx, way, (rows, N, DEPTH), dtype, seed, layout=layout)
    with mock.patch.object(copies, "_copy", wraps=copies._copy) as copy:
        one.run(replace(SMALL, num_chunks=2))
    copied = [call.args[2] for call in copy.call_args_list].count("columns")
    return one.excess(), copied, int(target.takes_columns_only(ctx))


EIGHT_BITS = [(way, dtype) for way in ways() for dtype in QUANTISED]


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize(("way", "dtype"), some(EIGHT_BITS, 3))
def test_each_way_transposes_b_once(ranks: Ranks, way: Way, dtype: torch.dtype, seed: int) -> None:
    for excess, copied, expected in ranks.run(excess_and_copies, way, dtype, LAYOUTS[seed % 2 * 2], seed):
        assert excess <= 1
        assert copied == expected


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_transposed_b_is_read_in_place(ranks: Ranks, seed: int) -> None:
    for excess, copied, _ in ranks.run(excess_and_copies, Way(LOCAL, "local"), torch.int8, "transposed", seed):
        assert excess <= 1 and copied == 0


def copies_of_b() -> tuple[int, int, int]:
    """How many transposed copies of B are kept: after calls with several numbers of rows, which need workspaces of
    several sizes; then in a workspace of the caller's; and how many there should be if B is transposed."""
    with fresh(1 << 23) as ctx:
        b = torch.ones(64, 48, dtype=torch.int8, device=ctx.device)
        for algorithm, rows in (("push", 128), ("push", 512), ("decomposed", 1024)):
            output = torch.zeros(rows // ctx.world_size, 48, dtype=torch.int32, device=ctx.device)
            a = torch.ones(rows, 64, dtype=torch.int8, device=ctx.device)
            ctx.ops.matmul_reduce_scatter(output, a, b, config=replace(SMALL, algorithm=algorithm))
        own = new_workspace(ctx, REDUCE_SCATTER, "decomposed", 1 << 20)
        ctx.ops.matmul_reduce_scatter(output, a, b, config=replace(SMALL, algorithm="decomposed"), workspace=own)
        ctx.synchronize()
        kept = [*(one for one in ctx._workspaces.values()), *(one for one in ctx._kept.values())]
        found = [one.local for one in kept if isinstance(one, FusedWorkspace)]
        return (
            sum("columns" in str(key) for local in found for key in local),
            sum("columns" in str(key) for key in own.alone.local), int(target.takes_columns_only(ctx)),
        )  # fmt: skip


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_one_copy_serves_all_sizes(ranks: Ranks) -> None:
    for kept, own, expected in ranks.run(copies_of_b):
        assert kept == own == expected


def products_of_new_weights() -> list[bool]:
    """Whether each of some calls in a row, which replay what an earlier one captured, has read the B of its time."""
    ctx, right = context(), []
    a = torch.randint(-9, 9, (ROWS, DEPTH), dtype=torch.int8, device=ctx.device)
    b = torch.empty(DEPTH, N, dtype=torch.int8, device=ctx.device)
    total = ctx.empty(ROWS, N, dtype=torch.int32)
    for _ in range(4):
        b.copy_(torch.randint(-9, 9, b.shape))
        ctx.ops.matmul_all_reduce(total, a, b)
        product = (a.double() @ b.double()).cpu()
        expected = sum(ctx.broadcast(product, rank).cpu() for rank in range(ctx.world_size))
        right.append(torch.equal(total.double().cpu(), cast(torch.Tensor, expected)))
    return right


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_each_call_reads_b_anew(ranks: Ranks) -> None:
    assert ranks.run(products_of_new_weights) == [[True] * 4] * 2


@pytest.mark.parametrize(
    ("backend", "capability", "only"),
    [
        ("sim", (0, 0), True), ("hip", (9, 4), False), ("cuda", (8, 0), True), ("cuda", (9, 0), True),
        ("cuda", (10, 0), False), ("cuda", (10, 3), False), ("cuda", (12, 0), True),
    ],
)  # fmt: skip
def test_whose_tensor_cores_take_contiguous_columns_only(backend: str, capability: tuple[int, int], only: bool) -> None:
    ctx = mock.Mock(backend_name=backend, device=torch.device("cuda", 0))
    with mock.patch.object(target, "_capability", return_value=capability):
        assert target.takes_columns_only(cast(Any, ctx)) is only


H200 = ops.Target("cuda", 132, True, (), "NVIDIA H200")


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@pytest.mark.parametrize("m", [TRANSPOSED_FROM_ROWS, 4096])
def test_the_model_knows_that_b_is_transposed_first(dtype: torch.dtype, m: int) -> None:
    problem = Problem(LOCAL, m, 7168, 4096, dtype, 1)
    transposed = replace(problem, transposed_b=True)
    config = model_pick(problem, H200)
    assert config == model_pick(transposed, H200)
    hardware = figures(H200)
    assert hardware is not None
    extra_ms = predict_ms(problem, config, hardware) - predict_ms(transposed, config, hardware)
    assert 0.015 < extra_ms < 0.025  # 58.7 MB there and back; measured: 14 to 20 µs
