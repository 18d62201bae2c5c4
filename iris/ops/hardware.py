"""Rates and sizes of hardware, from vendors' data sheets and from measurement. Pure data: no GPU is needed to look.

Rates are per GPU. Compute rates are dense, in FLOP (or integer operations) per second; links are payload or raw
bytes per second and direction. Other hardware has no entry rather than a guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from iris.ops.problem import Problem

_TERA, _GIGA, _MIB = 10**12, 10**9, 1 << 20


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU.

    Attributes:
        name: its usual name.
        num_sms: SMs (compute units).
        peak_flops: dense peak by number format, per second, at boost clock; ``"fp32"`` is without tensor cores on
            NVIDIA, on AMD the matrix cores' rate.
        memory_bytes_per_s: bandwidth of the GPU's own memory.
        l2_bytes: L2 cache of the whole GPU.
        link_bytes_per_s: bandwidth to all peers together, per direction, by the data sheet.
        backend: the backend that runs on it.
        link_peers: the number of peers that share that rate, each with links of its own; 0 if a switch gives any one
            peer all of it.
        sustained_flops: the rate that a large matmul was measured to sustain on random data, by number format.
        copy_bytes_per_s, store_bytes_per_s, load_bytes_per_s: payload measured in a ring, all ranks at once: by copy
            engine, by SMs' stores to peers, and by their loads; None if it was not measured.
    """

    name: str
    num_sms: int
    peak_flops: Mapping[str, float]
    memory_bytes_per_s: float
    l2_bytes: int
    link_bytes_per_s: float
    backend: str = "cuda"
    link_peers: int = 0
    sustained_flops: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    copy_bytes_per_s: float | None = None
    store_bytes_per_s: float | None = None
    load_bytes_per_s: float | None = None

    def format_of(self, dtype: torch.dtype) -> str:
        """The number format in which it multiplies ``dtype``: hardware without TF32 multiplies float32 unrounded."""
        name = number_format(dtype)
        return "fp32" if name == "tf32" and name not in self.peak_flops else name

    def matmul_flops(self, dtype: torch.dtype) -> float | None:
        """The rate that a local matmul of ``dtype`` can have, per second: measured if known, else the peak."""
        name = self.format_of(dtype)
        return self.sustained_flops.get(name, self.peak_flops.get(name))

    def received_bytes_per_s(self, world_size: int) -> float:
        """The most payload that can reach a GPU from ``world_size`` - 1 peers at once, per second."""
        whole = self.copy_bytes_per_s or self.link_bytes_per_s
        return whole if not self.link_peers else whole * min(world_size - 1, self.link_peers) / self.link_peers


def number_format(dtype: torch.dtype) -> str:
    """The key of ``dtype`` in a table of rates: ``bf16``, ``fp16``, ``fp8``, ``int8``, ``tf32``, ``fp32``, …"""
    if dtype == torch.float32:
        return "tf32" if allows_tf32() else "fp32"
    name = str(dtype).removeprefix("torch.")
    return "fp8" if name.startswith("float8") else _FORMATS.get(name, name)


def allows_tf32() -> bool:
    """Whether torch.matmul may round float32 to TF32. This reads PyTorch's newer switch, which the older one also sets;
    the older one cannot be read once the newer has been set."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


_FORMATS = {"bfloat16": "bf16", "float16": "fp16"}


def _rates(**tera: float) -> Mapping[str, float]:
    return MappingProxyType({name: rate * _TERA for name, rate in tera.items()})


# NVIDIA H100 Tensor Core GPU data sheet and H100 architecture white paper (SXM5; sparse figures halved).
_HOPPER = _rates(bf16=989.4, fp16=989.4, fp8=1978.9, int8=1978.9, tf32=494.7, fp32=66.9)
_H100 = Hardware("H100 SXM", 132, _HOPPER, 3.35 * _TERA, 50 * _MIB, 450 * _GIGA)

# NVIDIA H200 Tensor Core GPU data sheet (SXM); L2 as the H100's. Measured: docs/performance.md, 2026-11-21; fp8:
# docs/performance-matmul.md, 2026-11-30.
_H200 = Hardware(
    "H200 SXM", 132, _HOPPER, 4.8 * _TERA, 50 * _MIB, 450 * _GIGA,
    sustained_flops=_rates(bf16=800, fp8=1500),
    copy_bytes_per_s=389 * _GIGA, store_bytes_per_s=364 * _GIGA, load_bytes_per_s=335 * _GIGA,
)  # fmt: skip

# NVIDIA HGX B200 data sheet (one of eight GPUs, sparse figures halved); SMs and L2 as the driver reports them.
_B200 = Hardware(
    "B200",
    148,
    _rates(bf16=2250, fp16=2250, fp8=4500, int8=4500, tf32=1125, fp32=75),
    8 * _TERA,
    126 * _MIB,
    900 * _GIGA,
)

# AMD Instinct MI300X and MI325X data sheets and the CDNA 3 white paper: eight dies with 4 MiB of L2 each, seven
# links of 64 GB/s per direction to seven peers. Their fp8 is another one, e4m3fnuz; Triton multiplies e4m3fn as fp16.
_CDNA3 = _rates(bf16=1307.4, fp16=1307.4, fp8=1307.4, int8=2614.9, tf32=653.7, fp32=163.4)
_MI300X = Hardware("MI300X", 304, _CDNA3, 5.3 * _TERA, 32 * _MIB, 7 * 64 * _GIGA, "hip", link_peers=7)
_MI325X = Hardware("MI325X", 304, _CDNA3, 6.0 * _TERA, 32 * _MIB, 7 * 64 * _GIGA, "hip", link_peers=7)

# AMD Instinct MI355X data sheet and the CDNA 4 white paper: no TF32; seven links of 76.8 GB/s per direction.
_MI355X = Hardware(
    "MI355X", 256, _rates(bf16=2516.6, fp16=2516.6, fp8=5033.2, int8=5033.2, fp32=157.3),
    8 * _TERA, 32 * _MIB, 7 * 76.8 * _GIGA, "hip", link_peers=7,
)  # fmt: skip

HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {one.name: one for one in (_H100, _H200, _B200, _MI300X, _MI325X, _MI355X)}
)
"""All known hardware, by name."""

_PATTERNS = {name: re.compile(rf"\b{name.split()[0]}\b") for name in HARDWARE}
_OTHERS = re.compile(r"\b(PCIe|NVL|MIG)\b")
"""Words in the names of variants whose rates differ from those of the SXM or OAM module."""


def hardware(device_name: str) -> Hardware | None:
    """The entry of the device that PyTorch calls ``device_name``, e.g. ``NVIDIA H200``; None if there is none."""
    if _OTHERS.search(device_name):
        return None
    return next((HARDWARE[name] for name, pattern in _PATTERNS.items() if pattern.search(device_name)), None)


def floor_s(problem: Problem, known: Hardware | None, *, cold: bool = False) -> float | None:
    """The time, in seconds, that no schedule of ``problem`` beats on ``known``; None if a rate is not known.

    It is the largest of three times: that of the matmul at the rate of a local matmul, that of the bytes that must
    arrive over the links, and that of the bytes that must pass the GPU's memory, if L2 holds as much as it can of the
    last call. ``cold``: it holds nothing of B.
    """
    if known is None or (rate := known.matmul_flops(problem.dtype)) is None:
        return None
    arriving = (
        problem.received_bytes / known.received_bytes_per_s(problem.world_size) if problem.received_bytes else 0.0
    )
    passing = max(problem.hbm_bytes - known.l2_bytes, problem.weight_bytes if cold else 0)
    return max(problem.flops / rate, arriving, passing / known.memory_bytes_per_s)
