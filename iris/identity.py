"""Who this process is, by its environment: its rank, and the job for which torchrun, mpirun, srun or Iris started
it."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from iris.errors import LaunchError


@dataclass(frozen=True)
class Identity:
    """A process's rank, and the job that it belongs to."""

    rank: int
    world_size: int
    local_rank: int
    job: str
    source: str
    num_here: int | None = None
    """The number of ranks on this host, if the launcher says it."""


_RANK, _WORLD, _LOCAL_RANK, _LOCAL_WORLD = "rank", "world size", "local rank", "local world size"
_LAUNCHERS: dict[str, dict[str, tuple[str, ...]]] = {
    "iris.launch": {_RANK: ("IRIS_RANK",), _WORLD: ("IRIS_WORLD_SIZE",), _LOCAL_RANK: ("IRIS_RANK",)},
    "torchrun": {
        _RANK: ("RANK",),
        _WORLD: ("WORLD_SIZE",),
        _LOCAL_RANK: ("LOCAL_RANK",),
        _LOCAL_WORLD: ("LOCAL_WORLD_SIZE",),
    },
    "mpirun (Open MPI)": {
        _RANK: ("OMPI_COMM_WORLD_RANK",),
        _WORLD: ("OMPI_COMM_WORLD_SIZE",),
        _LOCAL_RANK: ("OMPI_COMM_WORLD_LOCAL_RANK",),
        _LOCAL_WORLD: ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    },
    "mpirun (MPICH)": {
        _RANK: ("PMI_RANK",),
        _WORLD: ("PMI_SIZE",),
        _LOCAL_RANK: ("MPI_LOCALRANKID", "PMI_RANK"),
        _LOCAL_WORLD: ("MPI_LOCALNRANKS",),
    },
    "srun": {
        _RANK: ("SLURM_PROCID",),
        _WORLD: ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        _LOCAL_RANK: ("SLURM_LOCALID",),
        _LOCAL_WORLD: ("SLURM_STEP_TASKS_PER_NODE",),
    },
}
_JOB_NAMES = (
    "IRIS_JOB",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "OMPI_MCA_orte_hnp_uri",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)


def _first(names: Sequence[str]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _said(names: Mapping[str, Sequence[str]]) -> str:
    """Those of a launcher's variables that are set, with their values."""
    known = dict.fromkeys(itertools.chain.from_iterable(names.values()))
    return ", ".join(f"{name}={os.environ[name]!r}" for name in known if os.environ.get(name))


def identity() -> Identity | None:
    """This process's identity by the environment; None if no launcher has started it.

    A shell in an allocation of Slurm (``salloc``, ``srun --pty bash``) has the variables of a single task, or of a step
    of one task; that is no launch.

    Raises:
        LaunchError: the launcher's variables contradict each other; a rank above 0 comes without the number of ranks;
            or only one of IRIS_RANK and IRIS_WORLD_SIZE is set.
    """
    for source, names in _LAUNCHERS.items():
        rank, world = _first(names[_RANK]), _first(names[_WORLD])
        if source == "iris.launch" and (rank is None) != (world is None):  # only Iris sets these
            missing = names[_RANK if rank is None else _WORLD][0]
            raise LaunchError(f"{_said(names)}, but no {missing}: set both, or neither")
        if rank is None or (source == "srun" and ("SLURM_STEP_ID" not in os.environ or world == "1")):
            continue
        if world is None:
            if rank.isdecimal() and int(rank) > 0:
                size = " or ".join(names[_WORLD])
                raise LaunchError(f"{_said(names)}, but no {size}: set that, or nothing that {source} sets")
            continue
        if source == "mpirun (MPICH)" and _srun_speaks_pmi(world):
            continue
        here = re.match(r"\d+", _first(names.get(_LOCAL_WORLD, ())) or "")
        num_here = int(here.group()) if here is not None else None
        try:
            local_rank = int(_first(names[_LOCAL_RANK]) or rank)
            found = Identity(int(rank), int(world), local_rank, _job(source), source, num_here)
        except ValueError as error:
            raise LaunchError(f"{source} set a rank variable that is not a number: {_said(names)}") from error
        if not 0 <= found.rank < found.world_size or found.local_rank < 0:
            ranks = f"{source} says rank {found.rank} of {found.world_size} ranks"
            raise LaunchError(f"{ranks}: {_said(names)} contradict each other")
        return found
    return None


def require_one_host(who: Identity) -> None:
    """Raise LaunchError if the launcher says that there are also ranks on other hosts."""
    if who.num_here not in (None, who.world_size):
        raise LaunchError(
            f"{who.source} started {who.world_size} ranks, {who.num_here} of them on this host. A symmetric heap spans "
            "one host: start all ranks on one, or pass group=<a ProcessGroup of this host's ranks>."
        )


def _job(source: str) -> str:
    """A name that all ranks of this job have, and no other job."""
    values = [f"{name}={os.environ[name]}" for name in _JOB_NAMES if os.environ.get(name)]
    if "MPICH" in source and not os.environ.get("IRIS_JOB"):
        values.append(f"parent={_first_ancestor_without('PMI_RANK')}")
    return ";".join([source, *values])


def _srun_speaks_pmi(world: str) -> bool:
    """Whether srun itself has set PMI's variables (PMI-2), not an mpirun that runs within a step of Slurm."""
    srun = _LAUNCHERS["srun"]
    in_a_step = "SLURM_STEP_ID" in os.environ and _first(srun[_RANK]) == os.environ["PMI_RANK"]
    return in_a_step and _first(srun[_WORLD]) == world


def _first_ancestor_without(variable: str) -> int:
    """The launcher's process: the nearest ancestor without ``variable``, which wrapper scripts pass on."""
    pid = os.getppid()
    while pid > 1:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        except OSError:  # another user's, or gone
            break
        if not any(one.startswith(f"{variable}=".encode()) for one in environment.split(b"\0")):
            break
        pid = int(status.split("PPid:")[1].split()[0])
    return pid
