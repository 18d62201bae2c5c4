"""The table of hardware, and the floors that follow from it."""

from __future__ import annotations

import pytest
import torch

from iris.ops import Problem
from iris.ops.hardware import HARDWARE, floor_s, hardware


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI355X", "MI355X"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("simulated", None),
    ],
)
def test_hardware_by_its_name(device_name: str, name: str | None) -> None:
    found = hardware(device_name)
    assert (found.name if found is not None else None) == name


def test_the_floor_is_the_slowest_of_matmul_links_and_memory() -> None:
    h200 = HARDWARE["H200 SXM"]
    gathered = Problem("all_gather_matmul", 8192, 1024, 29568, torch.bfloat16, 8, 0)
    assert floor_s(gathered, h200) == pytest.approx(8192 * 29568 * 2 * 7 / 8 / 389e9)
    compute = Problem("matmul", 8192, 8192, 8192, torch.bfloat16, 1)
    assert floor_s(compute, h200) == pytest.approx(2 * 8192**3 / 800e12)
    decode = Problem("matmul", 1, 28672, 8192, torch.bfloat16, 1)
    assert floor_s(decode, h200) == pytest.approx((28672 * 8192 * 2 - (50 << 20)) / 4.8e12, rel=1e-3)
    assert floor_s(decode, h200, cold=True) == pytest.approx(28672 * 8192 * 2 / 4.8e12)
    small = Problem("matmul", 1, 1024, 8192, torch.bfloat16, 1)  # L2 holds all of it
    assert floor_s(small, h200) == pytest.approx(2 * 1024 * 8192 / 800e12)
    assert floor_s(small, h200, cold=True) == pytest.approx(1024 * 8192 * 2 / 4.8e12)
    assert floor_s(compute, h200, cold=True) == floor_s(compute, h200)
    assert floor_s(compute, None) is None
    assert floor_s(Problem("matmul", 8, 8, 8, torch.float64, 1), h200) is None


def test_links_of_a_mesh_count_by_the_peers_that_are_there() -> None:
    mesh, switched = HARDWARE["MI300X"], HARDWARE["H200 SXM"]
    assert mesh.received_bytes_per_s(2) == pytest.approx(64e9)
    assert mesh.received_bytes_per_s(8) == pytest.approx(448e9)
    assert switched.received_bytes_per_s(2) == switched.received_bytes_per_s(8)
