"""Copies of matrices whose rows are not contiguous."""

from __future__ import annotations

import pytest
import torch
from ranks import BACKEND, Ranks, context, worlds

from iris.ops import new_workspace
from iris.ops.copies import aligned, row_major
from iris.ops.problem import DTYPES


def matrices(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    whole = torch.randint(-100, 100, (150, 132), device=context().device).to(dtype)
    return {
        "rows": whole,
        "some of its columns": whole[:, 3:70],
        "one row": whole[:1].expand(1, 132),
        "transposed": whole.t(),
        "every other column": whole[:, ::2],
        "every other row of the transpose": whole.t()[1::2, 5:],
        "one row, again and again": whole[:1].expand(70, 132),
        "one column, again and again": whole[:, :1].expand(150, 70),
        "rows that overlap": whole.view(-1).as_strided((65, 70), (9, 1)),
        "a column": whole[:, 1:2],
        "one element": whole[:1, :1].t(),
    }


AS_THEY_ARE = ("rows", "some of its columns", "one row", "a column", "one element")


def copies(dtype: torch.dtype) -> dict[str, str]:
    """What is wrong with each copy, by its name."""
    ctx, wrong = context(), {}
    workspace = new_workspace(ctx, "matmul_all_reduce", "two_shot", 1024)
    for name, matrix in matrices(dtype).items():
        result = row_major(workspace, matrix)
        whole_vectors = result.stride(0) * dtype.itemsize % 16 == 0 and result.data_ptr() % 16 == 0
        if not torch.equal(result.double(), matrix.double()):
            wrong[name] = "other elements"
        elif (result is matrix) != (name in AS_THEY_ARE):
            wrong[name] = "copied, or not copied"
        elif result is not matrix and not (result.stride(1) == 1 and whole_vectors):
            wrong[name] = f"strides {result.stride()}"
    return wrong


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_have_contiguous_rows(ranks: Ranks, dtype: torch.dtype) -> None:
    assert ranks.run(copies, dtype) == [{}, {}]


def read_by_fours() -> list[tuple[bool, bool]]:
    """For int8 matrices at each offset of storages at each address: whether both are multiples of 4, and whether the
    matrix is read in place. Checks that elements read by fours are right."""
    found, workspace = [], new_workspace(context(), "all_gather_matmul", "low_latency", 1024)
    memory = bytearray(range(200))
    for address in range(4):
        storage = torch.frombuffer(memory, dtype=torch.int8, offset=address)
        for offset in range(4):
            matrix = storage[offset : offset + 128].view(4, 32)
            result = aligned(workspace, matrix, 4)
            assert torch.equal(result.view(torch.int32).view(torch.int8), matrix)
            found.append((matrix.data_ptr() % 4 == 0 and offset == 0, result is matrix))
    return found


if BACKEND == "sim":

    @pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
    def test_elements_are_read_by_fours_where_pytorch_views_them_so(ranks: Ranks) -> None:
        (found,) = ranks.run(read_by_fours)
        assert {where for where, _ in found} == {True, False}
        assert all(whole == kept for whole, kept in found)
