"""``iris info``: what Iris sees on this machine. It reports what is missing, but does not fail because of it."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch

import iris
from iris import backends, log, timeouts
from iris.backends import sim
from iris.backends.runtime import has_native_atomics
from iris.console import Parser, counted, print_table
from iris.errors import ArgumentError, BackendError, LaunchError
from iris.heap import format_bytes
from iris.identity import identity, require_one_host
from iris.ops import tuned

LIBRARIES = ("torch", "triton", "numpy", "greenlet", "rich", "matplotlib")
LAUNCHERS = ("torchrun", "mpirun", "srun")
OLDEST_TRITON = (3, 6)
NO_ACCESS = "none"


@dataclass(frozen=True)
class Gpu:
    """One GPU that PyTorch sees."""

    index: int
    name: str
    memory_bytes: int
    num_sms: int
    architecture: str


@dataclass(frozen=True)
class Missing:
    """Something that is missing, what it is needed for, and how to get it."""

    what: str
    needed_for: str
    fix: str


@dataclass(frozen=True)
class Info:
    """All that ``iris info`` prints. ``links[i][j]`` is the link from GPU i to GPU j."""

    versions: dict[str, str | None]
    machine: dict[str, str]
    gpus: list[Gpu]
    links: list[list[str]]
    backend: str | None
    backend_reason: str
    launcher: str
    launchers: dict[str, str | None]
    tuned_rows: str
    variables: dict[str, str]
    missing: list[Missing]


def collect() -> Info:
    """Look at this machine."""
    versions = {"python": platform.python_version(), "iris": iris.__version__, **library_versions(), **gpu_versions()}
    gpus, complaint = visible_gpus()
    try:
        choice = backends.chosen()
        backend, reason = choice.name, choice.reason
    except BackendError as error:
        backend, reason = None, str(error)
    try:
        who = identity()
        launcher = "none: this process is alone"
        if who is not None:
            require_one_host(who)
            launcher = f"{who.source}: rank {who.rank} of {who.world_size}"
    except LaunchError as error:
        launcher = str(error)
    beside_python = os.path.dirname(sys.executable)
    launchers = {name: shutil.which(name) or shutil.which(name, path=beside_python) for name in LAUNCHERS}
    return Info(
        versions=versions,
        machine=machine(),
        gpus=gpus,
        links=links(len(gpus)),
        backend=backend,
        backend_reason=reason,
        launcher=launcher,
        launchers=launchers,
        tuned_rows=tuned_rows(),
        variables=variables(),
        missing=missing(versions, launchers, gpus, has_gpu_device(), complaint),
    )


def tuned_rows() -> str:
    """The file of the user's rows, where ``"auto"`` looks first, and how many rows it has."""
    path = tuned.user_path()
    if path is None:
        named = os.environ.get(tuned.ENVIRONMENT_VARIABLE)
        why = f"{tuned.ENVIRONMENT_VARIABLE} is {named}" if named else "there is no home directory"
        return f"none but those that come with Iris, as {why}"
    try:
        rows, there = tuned.read(path), path.exists()
    except ArgumentError as error:
        return str(error)
    yours = counted(len(rows), "row") if there else "no such file"
    named = f", named by {tuned.ENVIRONMENT_VARIABLE}" if os.environ.get(tuned.ENVIRONMENT_VARIABLE) else ""
    return f"{path}{named}: {yours}"


def variables() -> dict[str, str]:
    """Other environment variables that are set: their values, or what is wrong with them."""
    found = {}
    readers: dict[str, Callable[[], object]] = {
        timeouts.VARIABLE: timeouts.timeout_set,
        "IRIS_REPLAY": backends.replays,
        "IRIS_CHECK_CALLS": backends.compares_calls,
        "IRIS_OVERSUBSCRIBE": backends.oversubscribed,
        "IRIS_SIM_SMS": sim.claimed_sms,
        log.VARIABLE: log.level_set,
    }
    for name, reader in readers.items():
        if value := os.environ.get(name):
            try:
                reader()
            except ArgumentError as error:
                value = str(error)
            found[name] = value
    return found


def library_versions() -> dict[str, str | None]:
    """Versions of the libraries that Iris uses; None for those that cannot be imported."""
    found: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            found[name] = None
        else:
            with suppress(importlib.metadata.PackageNotFoundError):  # a folder on the path, say
                found[name] = getattr(module, "__version__", None) or importlib.metadata.version(name)
            found.setdefault(name, "of unknown version")
    return found


def gpu_versions() -> dict[str, str | None]:
    """Versions of the software between PyTorch and the GPUs."""
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else None
    if torch.version.hip:
        build = f"HIP {torch.version.hip}"
    nccl = None
    if build and torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"torch built for": build or "CPU only", "NCCL or RCCL": nccl, "GPU driver": driver_version()}


def driver_version() -> str | None:
    said = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if said and re.match(r"\d", said):
        return f"NVIDIA {said.splitlines()[0]}"
    try:
        with open("/sys/module/amdgpu/version") as file:
            return f"amdgpu {file.read().strip()}"
    except OSError:
        return None


def machine() -> dict[str, str]:
    """The host: system, cores and memory, which matter to the simulator."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": format_bytes(memory),
    }


def has_gpu_device() -> bool:
    """Whether a GPU's device file exists, whatever PyTorch says."""
    return any(os.path.exists(path) for path in ("/dev/nvidia0", "/dev/kfd"))


def visible_gpus() -> tuple[list[Gpu], str]:
    """The GPUs that PyTorch sees, and its warnings or error while it looked for them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            gpus = [describe(index) for index in range(count)]
        except RuntimeError as error:
            return [], str(error)
    return gpus, "; ".join(str(one.message) for one in caught)


def describe(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    architecture = f"sm_{properties.major}{properties.minor}"
    if torch.version.hip:
        architecture = properties.gcnArchName.split(":")[0]
    return Gpu(index, properties.name, properties.total_memory, properties.multi_processor_count, architecture)


def links(count: int) -> list[list[str]]:
    """How each GPU reaches each other one: ``NV18`` (NVLinks), ``PIX``, ``SYS`` … as nvidia-smi names them, or
    ``peer`` if only PyTorch can be asked. ``, no atomics`` means that updates are lost when several GPUs use atomics on
    one word. ``none`` means that peers' memory cannot be accessed, as Iris requires."""
    topology: list[list[str]] = []
    if count > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        topology = parse_topology(output_of("nvidia-smi", "topo", "-m") or "")
    known = len(topology) == count
    return [[link(a, b, topology[a][b] if known else "peer") for b in range(count)] for a in range(count)]


def link(a: int, b: int, name: str) -> str:
    if a == b:
        return "self"
    if not torch.cuda.can_device_access_peer(a, b):
        return NO_ACCESS
    return name if has_native_atomics(a, b) else f"{name}, no atomics"


def parse_topology(text: str) -> list[list[str]]:
    """The GPU part of the output of ``nvidia-smi topo -m``; empty if ``text`` is not such output."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line.split() for line in plain.splitlines() if line.strip()]
    if not lines:
        return []
    count = sum(bool(re.fullmatch(r"GPU\d+", word)) for word in lines[0])
    rows = [words[1 : 1 + count] for words in lines[1:] if re.fullmatch(r"GPU\d+", words[0])]
    return rows if len(rows) == count and all(len(row) == count for row in rows) else []


def missing(
    versions: Mapping[str, str | None],
    launchers: Mapping[str, str | None],
    gpus: Sequence[Gpu],
    gpu_device: bool,
    complaint: str,
) -> list[Missing]:
    """What is missing, most important first."""
    found: list[Missing] = []
    if not gpus and (gpu_device or complaint):
        why = f" PyTorch says: {complaint}" if complaint else ""
        fix = "install the PyTorch that fits your driver (its site says which), or a newer driver." + why
        found.append(Missing("PyTorch for your GPU", "running on it", fix))
    elif not gpus:
        fix = "use a machine with NVIDIA or AMD GPUs and a PyTorch built for them; the simulator needs none"
        found.append(Missing("GPU", "speed", fix))
    if major_minor(versions["triton"]) < OLDEST_TRITON:
        found.append(Missing("Triton 3.6 or newer", "everything", "pip install --upgrade triton"))
    elif major_minor(versions["triton"]) == (3, 6) and major_minor(versions["numpy"]) >= (2, 3):
        found.append(Missing("NumPy older than 2.3", "the simulator with Triton 3.6", 'pip install "numpy<2.3"'))
    purposes = {
        "numpy": "the simulator",
        "greenlet": "the simulator",
        "rich": "tables and progress bars",
        "matplotlib": "pictures",
    }
    for name, purpose in purposes.items():
        if versions[name] is None:
            found.append(Missing(name, purpose, f"pip install {name}"))
    if launchers["mpirun"] is None:
        fix = "install Open MPI or MPICH, e.g. apt-get install openmpi-bin; iris.launch and torchrun do without"
        found.append(Missing("mpirun", "starting ranks with MPI", fix))
    return found


def major_minor(version: str | None) -> tuple[int, ...]:
    """Major and minor version."""
    return tuple(map(int, re.findall(r"\d+", version or "")[:2]))


def output_of(*command: str) -> str | None:
    """The output of a program; None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@dataclass(frozen=True)
class Table:
    """A titled table of text."""

    title: str
    headers: list[str]
    rows: list[list[str]]


def tables(info: Info) -> list[Table]:
    """``info`` as tables for people."""
    chosen_here = [
        ["backend", info.backend or "none"], ["why", info.backend_reason], ["started by", info.launcher],
        ["tuned rows", info.tuned_rows], *map(list, info.variables.items()),
    ]  # fmt: skip
    shown = [Table("Iris", ["", ""], chosen_here)]
    if info.gpus:
        rows = [
            [str(gpu.index), gpu.name, format_bytes(gpu.memory_bytes), str(gpu.num_sms), gpu.architecture]
            for gpu in info.gpus
        ]
        shown.append(Table("GPUs", ["GPU", "name", "memory", "SMs", "architecture"], rows))
    if len(info.gpus) > 1:
        names = [f"GPU{gpu.index}" for gpu in info.gpus]
        rows = [[name, *row] for name, row in zip(names, info.links, strict=True)]
        shown.append(Table("Links", ["", *names], rows))
    programs = {f"{name} (program)": path for name, path in info.launchers.items()}
    versions = {**info.versions, **info.machine, **programs}
    shown.append(Table("Versions", ["", ""], [[name, value or "not found"] for name, value in versions.items()]))
    if info.missing:
        rows = [[one.what, one.needed_for, one.fix] for one in info.missing]
        shown.append(Table("Missing", ["what", "needed for", "how to get it"], rows))
    return shown


def print_tables(shown: Sequence[Table]) -> None:
    for table in shown:
        print_table(table.headers, table.rows, title=table.title)


def main(arguments: Sequence[str]) -> int:
    """The ``info`` command."""
    parser = Parser(prog="iris info", description="Say what Iris sees on this machine.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    given = parser.parse_args(arguments)
    info = collect()
    if given.json:
        print(json.dumps(asdict(info), indent=2))
    else:
        print_tables(tables(info))
    return 0
