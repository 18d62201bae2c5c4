"""Where ranks come from: torchrun, mpirun, srun, or processes that Iris starts itself.

:func:`identity` reads who this process is from its environment; :func:`launch` runs a function on N ranks,
or, inside a process that already is a rank, just calls it. So one script works under every launcher::

    if __name__ == "__main__":
        iris.launch(main, num_ranks=4)
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import secrets
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess
from typing import Any

from iris.errors import LaunchError, PeerDied, WaitTimeout


@dataclass(frozen=True)
class Identity:
    """Who this process is: its rank, and the job it belongs to."""

    rank: int
    world_size: int
    local_rank: int
    job: str
    source: str


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


def identity() -> Identity | None:
    """Who the environment says this process is, or None where no launcher is at work.

    An allocation shell of Slurm (``salloc``) sets ``SLURM_PROCID`` for a single task; that is no launch.

    Raises:
        LaunchError: the launcher's variables contradict each other, or ranks span several hosts.
    """
    for source, names in _LAUNCHERS.items():
        rank, world = _first(names[_RANK]), _first(names[_WORLD])
        if rank is None or world is None:
            continue
        if source == "srun" and "SLURM_STEP_ID" not in os.environ:
            continue
        try:
            found = Identity(int(rank), int(world), int(_first(names[_LOCAL_RANK]) or rank), _job(source), source)
        except ValueError as error:
            raise LaunchError(f"{source} set a rank variable that is not a number: {error}") from error
        if not 0 <= found.rank < found.world_size:
            raise LaunchError(f"{source} says rank {found.rank} of {found.world_size} ranks: {names} contradict")
        local_world = _first(names.get(_LOCAL_WORLD, ()))
        here = re.match(r"\d+", local_world or "")
        if here is not None and int(here.group()) != found.world_size:
            raise LaunchError(
                f"{source} started {found.world_size} ranks, {here.group()} of them on this host. A symmetric heap "
                "spans one host: start all ranks on one, or pass group=<a ProcessGroup of this host's ranks>."
            )
        return found
    return None


def _job(source: str) -> str:
    """A name that all ranks of this job share, and other jobs do not."""
    values = [f"{name}={os.environ[name]}" for name in _JOB_NAMES if os.environ.get(name)]
    if "MPICH" in source and "IRIS_JOB" not in os.environ:
        values.append(f"parent={os.getppid()}")
    return ";".join([source, *values])


# -- starting ranks here ----------------------------------------------------------------------------------


def launch(
    fn: Callable[..., Any], num_ranks: int, args: Sequence[Any] = (), *, timeout_s: float | None = None
) -> list[Any]:
    """Run ``fn(*args)`` on ``num_ranks`` ranks of this host and return their results in rank order.

    Where this process already is a rank (torchrun, mpirun, srun, or an outer ``launch``), ``fn`` is called
    once, here, and the list holds that one result; the launcher's world size then counts, not ``num_ranks``.

    Args:
        fn: a function importable by name (defined at the top level of a module or script).
        args: passed to every rank; must be picklable.
        timeout_s: end the ranks and raise if they take longer; None waits as long as it takes.

    Raises:
        LaunchError: a rank failed, with the traceback of the first to fail and its error as ``__cause__``; or
            time ran out.
    """
    if identity() is not None:
        return [fn(*args)]
    with RankPool(num_ranks) as pool:
        return pool.run(fn, args, timeout_s=timeout_s)


@dataclass(frozen=True)
class _Outcome:
    """What one rank sent back."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    at: float = 0.0


class RankPool:
    """Live ranks that run one function after another, so that many short jobs need one start.

    A rank whose function raises stays alive; one that dies makes the pool unusable (``alive`` is False).
    """

    def __init__(self, num_ranks: int, env: dict[str, str] | None = None) -> None:
        if num_ranks < 1:
            raise LaunchError(f"num_ranks must be at least 1, got {num_ranks}")
        context = _start_method()
        self.num_ranks = num_ranks
        self._pipes: list[multiprocessing.connection.Connection] = []
        self.processes: list[ForkServerProcess | SpawnProcess] = []
        job = secrets.token_hex(8)
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            variables = {
                **(env or {}),
                **{name: os.environ[name] for name in os.environ if name.startswith(("IRIS_", "TRITON_"))},
                "IRIS_RANK": str(rank),
                "IRIS_WORLD_SIZE": str(num_ranks),
                "IRIS_JOB": job,
            }
            process = context.Process(target=_serve, args=(theirs, variables), name=f"iris-rank-{rank}", daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    @property
    def alive(self) -> bool:
        """Whether the processes of all ranks are running."""
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), *, timeout_s: float | None = None) -> list[Any]:
        """Run ``fn(*args)`` on every rank; results in rank order. Errors as for :func:`launch`."""
        outcomes = self.outcomes(fn, args, timeout_s=timeout_s)
        consequences = (PeerDied, WaitTimeout)
        failed = [one for one in outcomes if one.error is not None]
        failed.sort(key=lambda one: (isinstance(one.error, consequences), one.at))
        if failed:
            first = failed[0]
            assert first.error is not None
            others = f" (also failed: {', '.join(str(one.rank) for one in failed[1:])})" if failed[1:] else ""
            raise LaunchError(f"rank {first.rank} failed{others}\n{first.trace}") from first.error
        return [one.value for one in outcomes]

    def outcomes(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), *, timeout_s: float | None = None
    ) -> list[_Outcome]:
        """As :meth:`run`, but every rank's outcome, error or not."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((fn, tuple(args)))
            except OSError:
                continue
            except Exception as error:
                raise LaunchError(
                    f"{fn!r} cannot be sent to rank {rank}: {error}. Define it at the top level of a module."
                ) from error
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pending = dict(enumerate(self._pipes))
        outcomes: dict[int, _Outcome] = {}
        while pending:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait(list(pending.values()), left)
            if not ready:
                self.kill()
                raise LaunchError(f"ranks {sorted(pending)} did not finish within {timeout_s:g} s and were ended")
            for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
                outcomes[rank] = self._collect(rank)
                del pending[rank]
        return [outcomes[rank] for rank in range(self.num_ranks)]

    def _collect(self, rank: int) -> _Outcome:
        try:
            value, error, trace = self._pipes[rank].recv()
        except (EOFError, OSError):
            self.processes[rank].join(5)
            code = self.processes[rank].exitcode
            how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            error, trace, value = LaunchError(f"rank {rank}'s process ended: {how}"), f"process ended: {how}", None
        return _Outcome(rank, value, error, trace, time.monotonic())

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        self.close()

    def close(self) -> None:
        """End the ranks: each leaves when its pipe closes, and is killed if it does not within 10 s."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + 10
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._pipes, self.processes = [], []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _start_method() -> ForkServerContext | SpawnContext:
    """Fork from a clean server that has imported torch once: ranks start in a tenth of a second."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["iris"])
    return context


def _serve(pipe: multiprocessing.connection.Connection, variables: dict[str, str]) -> None:
    """A rank's life: run what comes down the pipe until it closes."""
    os.environ.update(variables)
    while True:
        try:
            fn, args = pipe.recv()
        except (EOFError, OSError):
            return
        reply: tuple[Any, BaseException | None, str]
        try:
            reply = (fn(*args), None, "")
        except Exception as error:  # noqa: BLE001 (whatever a rank raises is sent back)
            reply = (None, _portable(error), traceback.format_exc())
        try:
            pipe.send(reply)
        except OSError:
            return
        except Exception as error:  # noqa: BLE001 (pickling runs any code)
            text = f"its result cannot be sent back: {error}"
            pipe.send((None, LaunchError(text), text))


def _portable(error: Exception) -> Exception:
    """``error`` if it survives pickling, else an error that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 (pickling runs any code)
        return LaunchError(f"{type(error).__name__}: {error}")
    return error
