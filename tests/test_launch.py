"""How ranks are started: by Iris, or by torchrun, mpirun (Open MPI, MPICH) and srun."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ops_inputs import some
from ranks import BACKEND, NAMES_SHARED_MEMORY
from warm import python

import iris
from iris import backends
from iris.backends import gpu
from iris.identity import identity
from iris.launch import in_full
from iris.membership import _index

pytestmark = pytest.mark.timeout(120)

LAUNCHER_PREFIXES = ("IRIS_RANK", "IRIS_WORLD", "IRIS_JOB", "OMPI_", "PMI", "MPI_", "SLURM_", "TORCHELASTIC", "LOCAL_")
LAUNCHER_NAMES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"}


def without_launcher(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name not in LAUNCHER_NAMES and not name.startswith(LAUNCHER_PREFIXES)
    }


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without variables of a launcher."""
    kept = without_launcher(dict(os.environ))
    for name in set(os.environ) - set(kept):
        monkeypatch.delenv(name)
    return monkeypatch


IRIS = {"IRIS_RANK": "2", "IRIS_WORLD_SIZE": "4", "IRIS_JOB": "abc"}
TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_MCA_ess_base_jobid": "77",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}
SRUN = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_ID": "1",
}
LAUNCHERS = {
    "iris.launch": IRIS,
    "torchrun": TORCHRUN,
    "mpirun (Open MPI)": OPEN_MPI,
    "mpirun (MPICH)": MPICH,
    "srun": SRUN,
}
EACH = pytest.mark.parametrize(("source", "variables"), LAUNCHERS.items(), ids=LAUNCHERS)


def setenv(env: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        env.setenv(name, value)


def renamed(variables: dict[str, str], old: str, new: str, *names: str) -> dict[str, str]:
    """``variables``; if a variable's name contains one of ``names``, ``new`` replaces ``old`` in it."""
    return {
        key: new if value == old and any(name in key for name in names) else value for key, value in variables.items()
    }


def test_without_a_launcher_there_is_no_identity(env: pytest.MonkeyPatch) -> None:
    assert identity() is None


@EACH
def test_each_launcher_says_who_this_is(env: pytest.MonkeyPatch, source: str, variables: dict[str, str]) -> None:
    setenv(env, variables)
    who = identity()
    assert who is not None
    assert (who.rank, who.world_size, who.local_rank, who.source) == (2, 4, 2, source)


@pytest.mark.parametrize("source", [source for source in LAUNCHERS if source != "iris.launch"])
def test_a_launcher_may_number_local_ranks_otherwise(env: pytest.MonkeyPatch, source: str) -> None:
    """It does so if ranks are dealt out to sockets; the launcher decides which rank has which GPU."""
    setenv(env, renamed(LAUNCHERS[source], "2", "1", "LOCAL"))
    who = identity()
    assert who is not None and (who.rank, who.local_rank) == (2, 1)


@EACH
def test_ranks_of_a_job_share_its_name(env: pytest.MonkeyPatch, source: str, variables: dict[str, str]) -> None:
    names = set()
    for rank in "0123":
        setenv(env, renamed(variables, "2", rank, "RANK", "PROCID", "LOCALID"))
        who = identity()
        assert who is not None and who.rank == int(rank)
        names.add(who.job)
    assert len(names) == 1


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("iris.launch", "IRIS_JOB"),
        ("torchrun", "MASTER_ADDR"),
        ("torchrun", "MASTER_PORT"),
        ("torchrun", "TORCHELASTIC_RUN_ID"),
        ("torchrun", "TORCHELASTIC_RESTART_COUNT"),
        ("mpirun (Open MPI)", "OMPI_MCA_ess_base_jobid"),
        ("mpirun (Open MPI)", "OMPI_MCA_orte_hnp_uri"),
        ("mpirun (Open MPI)", "PMIX_NAMESPACE"),
        ("mpirun (MPICH)", "IRIS_JOB"),
        ("srun", "SLURM_JOB_ID"),
        ("srun", "SLURM_STEP_ID"),
    ],
)
def test_other_jobs_have_other_names(env: pytest.MonkeyPatch, source: str, name: str) -> None:
    setenv(env, LAUNCHERS[source])
    one = identity()
    env.setenv(name, "another")
    other = identity()
    assert one is not None and other is not None and one.job != other.job


def test_a_slurm_allocation_without_srun_is_no_launch(env: pytest.MonkeyPatch) -> None:
    setenv(env, {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"})
    assert identity() is None


def test_a_shell_in_a_slurm_step_of_one_task_is_no_launch(env: pytest.MonkeyPatch) -> None:
    """As of ``srun --pty bash``: scripts started there start their ranks themselves."""
    setenv(env, {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"})
    assert identity() is None


def test_an_empty_name_of_a_job_is_none(env: pytest.MonkeyPatch) -> None:
    setenv(env, renamed(MPICH, "2", "2", "RANK"))
    unnamed = identity()
    env.setenv("IRIS_JOB", "")
    assert unnamed == identity() and unnamed is not None and "parent=" in unnamed.job


def test_srun_that_speaks_pmi_is_srun(env: pytest.MonkeyPatch) -> None:
    setenv(env, {**SRUN, "PMI_RANK": "2", "PMI_SIZE": "4"})
    who = identity()
    assert who is not None and (who.source, who.local_rank) == ("srun", 2)


@pytest.mark.parametrize("rank", ["0", "2"])
def test_mpirun_within_a_step_of_slurm_is_mpirun(env: pytest.MonkeyPatch, rank: str) -> None:
    one_task = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    setenv(env, {**one_task, **renamed(MPICH, "2", rank, "RANK")})
    who = identity()
    assert who is not None and (who.source, who.rank, who.world_size) == ("mpirun (MPICH)", int(rank), 4)


def test_iris_launch_counts_inside_another_launcher(env: pytest.MonkeyPatch) -> None:
    setenv(env, {**renamed(SRUN, "2", "0", "PROCID", "LOCALID"), **IRIS})
    who = identity()
    assert who is not None and (who.rank, who.source) == (2, "iris.launch")


@EACH
def test_a_rank_beyond_the_world_is_a_contradiction(
    env: pytest.MonkeyPatch, source: str, variables: dict[str, str]
) -> None:
    for rank in ("4", "-1"):
        setenv(env, renamed(variables, "2", rank, "RANK", "PROCID"))
        with pytest.raises(iris.LaunchError) as caught:
            identity()
        assert f"{source} says rank {rank} of 4 ranks: " in str(caught.value)
        assert re.search(rf"(RANK|PROCID)='{rank}'.* contradict each other$", str(caught.value))


@pytest.mark.parametrize("alone", [{"IRIS_RANK": "0"}, {"IRIS_RANK": "x"}, {"IRIS_WORLD_SIZE": "4"}], ids=str)
def test_half_of_what_iris_sets_is_refused(env: pytest.MonkeyPatch, alone: dict[str, str]) -> None:
    setenv(env, alone)
    with pytest.raises(iris.LaunchError, match=r"^IRIS_\w+='\w', but no IRIS_\w+: set both, or neither$"):
        identity()


def test_a_local_rank_below_0_is_none(env: pytest.MonkeyPatch) -> None:
    """Old launchers set it if they do not know the local rank; PyTorch does not report such a GPU clearly."""
    setenv(env, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "-1"})
    with pytest.raises(iris.LaunchError, match=r"LOCAL_RANK='-1' contradict each other$"):
        identity()


@EACH
def test_a_rank_without_a_number_of_ranks_is_refused(
    env: pytest.MonkeyPatch, source: str, variables: dict[str, str]
) -> None:
    alone = {name: value for name, value in variables.items() if "SIZE" not in name and "NTASKS" not in name}
    setenv(env, {name: value for name, value in alone.items() if "NUM_TASKS" not in name})
    with pytest.raises(iris.LaunchError, match=r"(RANK|PROCID)='2'.*, but no \w+"):
        identity()


@EACH
def test_a_rank_that_is_no_number_is_named(env: pytest.MonkeyPatch, source: str, variables: dict[str, str]) -> None:
    setenv(env, renamed(variables, "2", "two", "RANK", "PROCID"))
    with pytest.raises(iris.LaunchError, match=r"that is not a number: .*(RANK|PROCID)='two'"):
        identity()


@pytest.mark.parametrize(
    ("source", "variables"),
    [
        ("torchrun", {**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}),
        ("mpirun (Open MPI)", {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}),
        ("mpirun (MPICH)", {**MPICH, "MPI_LOCALNRANKS": "2"}),
        ("srun", {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}),
    ],
)
def test_ranks_on_several_hosts_are_refused(env: pytest.MonkeyPatch, source: str, variables: dict[str, str]) -> None:
    setenv(env, variables)
    who = identity()
    assert who is not None and who.num_here == 2
    with pytest.raises(iris.LaunchError) as caught:
        iris.iris(1 << 20)
    assert f"{source} started 4 ranks, 2 of them on this host." in str(caught.value)
    assert "start all ranks on one, or pass group=" in str(caught.value)


def product(a: int, b: int) -> tuple[int, int]:
    who = identity()
    assert who is not None
    return who.rank, a * b


def fail_on(rank: int, kind: type[Exception]) -> int:
    who = identity()
    assert who is not None
    if who.rank == rank:
        raise kind(f"rank {rank} had enough")
    return who.rank


def fail_together() -> None:
    with iris.iris(1 << 20, timeout_s=20) as ctx:
        if ctx.rank == 1:
            time.sleep(0.2)
            raise ZeroDivisionError("the first failure")
        ctx.barrier()


def exit_on(rank: int) -> None:
    who = identity()
    assert who is not None
    if who.rank == rank:
        os._exit(3)


def linger() -> None:
    time.sleep(60)


def unsendable() -> Any:
    return threading.Lock()


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raise_unpicklable() -> None:
    raise Unpicklable(1, 2)


@pytest.fixture
def pool(env: pytest.MonkeyPatch) -> Any:
    with iris.RankPool(2) as ranks:
        yield ranks


def test_launch_returns_results_in_rank_order(env: pytest.MonkeyPatch) -> None:
    assert iris.launch(product, 3, (6, 7)) == [(0, 42), (1, 42), (2, 42)]


def test_launch_inside_a_rank_just_calls(env: pytest.MonkeyPatch) -> None:
    setenv(env, IRIS)
    assert iris.launch(product, 7, (2, 3)) == [(2, 6)]


def test_launch_raises_with_the_ranks_traceback(env: pytest.MonkeyPatch) -> None:
    with pytest.raises(iris.LaunchError) as caught:
        iris.launch(fail_on, 2, (1, KeyError))
    assert str(caught.value) == "rank 1 failed: KeyError: 'rank 1 had enough'"
    assert isinstance(caught.value.__cause__, KeyError)
    assert "in fail_on" in str(caught.value.__cause__.__cause__)
    told = str(in_full(caught.value))
    assert told.startswith(f"{caught.value}\nrank 1:\nTraceback") and "in fail_on" in told


def test_what_a_rank_raised_is_printed_with_one_traceback_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    lines = ["import iris", "def main():", "    raise ValueError('too much')", "if __name__ == '__main__':"]
    script.write_text("\n".join([*lines, "    iris.launch(main, 2)\n"]))
    done = subprocess.run([python(), str(script)], capture_output=True, text=True, timeout=60, check=False)
    told = done.stderr.splitlines()
    assert done.returncode == 1 and len(told) < 30, done.stderr
    assert told[0] in [f"iris.launch.RankTraceback: rank {rank}:" for rank in range(2)]
    assert told[1] == "Traceback (most recent call last):" and told[2].endswith("line 3, in main")
    assert sum(line.startswith("Traceback") for line in told) == 2 and "worker.py" not in done.stderr
    assert re.fullmatch(
        r"iris\.errors\.LaunchError: rank [01] failed \(also failed: [01]\): ValueError: too much", told[-1]
    )
    assert done.stderr.count("ValueError: too much") == 2


@dataclass(frozen=True)
class Frozen(Exception):
    """An exception that refuses a cause."""

    words: str


def test_an_error_that_is_frozen_has_its_traceback(env: pytest.MonkeyPatch) -> None:
    with pytest.raises(iris.LaunchError, match=r"rank 0 failed: .*Frozen: rank 0 had enough") as caught:
        iris.launch(fail_on, 1, (0, Frozen))
    assert "in fail_on" in "".join(traceback.format_exception(caught.value))


def nested() -> None:
    with iris.RankPool(1, {"IRIS_RANK": ""}) as pool:
        pool.run(fail_on, (0, KeyError))


def test_what_a_rank_of_a_rank_raised_is_named_by_both(env: pytest.MonkeyPatch) -> None:
    with pytest.raises(iris.LaunchError) as caught:
        iris.launch(nested, 1)
    assert str(caught.value) == "rank 0 failed: rank 0 failed: KeyError: 'rank 0 had enough'"
    assert type(caught.value.__cause__) is iris.LaunchError
    trace = str(caught.value.__cause__.__cause__)
    assert "in fail_on" in trace and "in nested" in trace and trace.endswith("raise error")


def test_ranks_share_gpus_only_if_asked(env: pytest.MonkeyPatch) -> None:
    env.delenv("IRIS_OVERSUBSCRIBE", raising=False)
    assert [gpu.gpu_of(rank, rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    with pytest.raises(iris.BackendError, match=r"rank 4 needs GPU 4, but PyTorch sees 4\. .* IRIS_OVERSUBSCRIBE=1"):
        gpu.gpu_of(4, 4, 4)
    env.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "0")
    env.setenv("IRIS_OVERSUBSCRIBE", "1")
    assert [gpu.gpu_of(rank, rank, 3) for rank in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"
    with pytest.raises(iris.BackendError, match="sees no GPU, or is built for the CPU only"):
        gpu.gpu_of(0, 0, 0)


@pytest.mark.parametrize("number", [0, -1, "4", 2.0, True, torch.tensor(2)])
def test_a_number_of_ranks_that_cannot_be(env: pytest.MonkeyPatch, number: Any) -> None:
    with pytest.raises(
        iris.LaunchError, match=f"num_ranks must be a whole number, at least 1, got {re.escape(repr(number))}"
    ):
        iris.launch(product, number)


@pytest.mark.parametrize("number", [17, 1 << 63])
def test_more_ranks_than_a_job_may_have_are_not_started(env: pytest.MonkeyPatch, number: int) -> None:
    with pytest.raises(iris.LaunchError, match=f"num_ranks must be at most 16, .* got {number}"):
        iris.launch(product, number)


def test_the_first_failure_is_reported_not_its_consequence(pool: iris.RankPool) -> None:
    with pytest.raises(iris.LaunchError) as caught:
        pool.run(fail_together, timeout_s=30)
    assert "rank 1 failed (also failed: 0)" in str(caught.value)
    assert "ZeroDivisionError: the first failure" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_rank_that_raised_lives_on(pool: iris.RankPool) -> None:
    with pytest.raises(iris.LaunchError, match="rank 0 failed"):
        pool.run(fail_on, (0, iris.HeapError))
    assert pool.alive and pool.run(product, (1, 1)) == [(0, 1), (1, 1)]


def test_a_rank_whose_process_ends_is_named(pool: iris.RankPool) -> None:
    with pytest.raises(iris.LaunchError, match=r"^rank 1 failed: process ended: exit code 3$"):
        pool.run(exit_on, (1,))
    assert not pool.alive


def test_a_function_that_leaves_without_an_error_is_done(pool: iris.RankPool) -> None:
    """It is like a program that calls sys.exit() at its end, which other launchers take for a success."""
    assert pool.run(sys.exit, ()) == [None, None] and pool.run(sys.exit, (0,)) == [None, None]
    assert pool.alive


def test_ranks_that_take_too_long_are_ended(pool: iris.RankPool) -> None:
    processes = list(pool.processes)
    started = time.monotonic()
    with pytest.raises(iris.LaunchError, match=r"ranks \[0, 1\] did not finish within 0.5 s and were ended"):
        pool.run(linger, timeout_s=0.5)
    assert time.monotonic() - started < 3 and not pool.alive
    assert pool.processes == [] and len(processes) == 2


def test_what_cannot_be_sent_is_named(pool: iris.RankPool) -> None:
    with pytest.raises(
        iris.LaunchError, match=r"cannot be sent to ranks: .*Define what is sent at the top level of a module"
    ):
        pool.run(lambda: 1)
    with pytest.raises(iris.LaunchError, match=r"rank \d failed.*: its result cannot be sent back: "):
        pool.run(unsendable)
    with pytest.raises(iris.LaunchError, match="Unpicklable: 1 and 2"):
        pool.run(raise_unpicklable)
    assert pool.run(product, (2, 2)) == [(0, 4), (1, 4)]


def test_what_a_session_defines_cannot_be_launched(pool: iris.RankPool, env: pytest.MonkeyPatch) -> None:
    env.setattr(sys, "modules", {**sys.modules, "__main__": ModuleType("__main__")})
    env.setattr(product, "__module__", "__main__")
    for fn in (product, functools.partial(product, 2)):
        with pytest.raises(iris.LaunchError, match=r"defined in a session, .*`python -c`.*Put it in a module"):
            pool.run(fn, (1,))


def test_a_script_from_standard_input_starts_what_ranks_can_import(env: pytest.MonkeyPatch) -> None:
    script = "import iris, os\ndef own(): pass\nprint(iris.launch(os.getppid, 2), __file__)\niris.launch(own, 2)\n"
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=60, check=False)
    assert re.fullmatch(r"\[(\d+), \1\] <stdin>\n", done.stdout), done.stderr
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1
    assert "own at 0x" in done.stderr and "is defined in a session, standard input, `python -c`" in done.stderr


@pytest.mark.parametrize("named", [True, False], ids=["-m package", "folder"])
def test_what_a_main_module_defines_is_not_taken_for_another(
    env: pytest.MonkeyPatch, tmp_path: Path, named: bool
) -> None:
    """In a rank, ``__main__`` is then that of the server, which has its own ``main``."""
    package = tmp_path / "package"
    package.mkdir()
    text = 'import iris\ndef main(): print("here")\nif __name__ == "__main__":\n    iris.launch(main, 1)\n'
    (package / "__main__.py").write_text(text)
    words = ["-m", "package"] if named else ["package"]
    command = [python(), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert "main at 0x" in done.stderr and "or a __main__.py, from which no other process can import it" in done.stderr


@pytest.mark.parametrize(
    "content",
    [
        "import iris\niris.launch(print, 2)\n",
        "import sys\nfrom iris.cli import main\n"
        "words = 'bench matmul --axis_M=8 --axis_N=8 --axis_K=8 --axis_algorithm=matmul --num_ranks=2'\n"
        "sys.exit(main(words.split()))\n",
    ],
    ids=["launch", "bench"],
)
def test_a_script_without_guard_is_told_so(env: pytest.MonkeyPatch, tmp_path: Path, content: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(content)
    done = subprocess.run([python(), str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    said = r"LaunchError: rank [01].*: iris\.launch was called while a new rank"
    assert re.search(said, done.stderr), done.stderr
    assert 'Call it under `if __name__ == "__main__":`' in done.stderr
    assert "bootstrapping" not in done.stderr


def reason() -> str:
    return backends.chosen().reason


@pytest.mark.skipif(BACKEND != "sim" or torch.cuda.is_available(), reason="about machines without a GPU")
def test_ranks_know_why_they_are_simulated(pool: iris.RankPool) -> None:
    assert pool.run(reason) == [backends.chosen().reason] * 2


def test_a_closed_pool_holds_nothing(pool: iris.RankPool) -> None:
    pool.run(product, (1, 1))
    pids = [process.pid for process in pool.processes]
    pool.close()
    pool.close()
    assert not pool.alive
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


SCRIPT = """
    import json, os, sys
    import torch, triton, triton.language as tl
    import iris
    from iris.identity import identity

    @triton.jit
    def tell(slots, handle):
        for peer in range(iris.world_size(handle)):
            iris.peer.store(handle, slots + iris.rank(handle), iris.rank(handle) + 10, peer)
        iris.barrier(handle)

    def main():
        with iris.iris(1 << 20, timeout_s=30) as ctx:
            slots = ctx.zeros(16, dtype=torch.int32)
            ctx.barrier()
            tell[(1,)](slots, ctx.handle)
            ctx.barrier()
            seen = slots[: ctx.world_size].tolist()
            said = ctx.broadcast({"from": ctx.rank}, ctx.world_size - 1)
            line = {"rank": ctx.rank, "size": ctx.world_size, "by": identity().source, "seen": seen, "said": said}
            with open(f"{sys.argv[1]}/{ctx.rank}.json", "w") as file:
                json.dump(line, file)

    if __name__ == "__main__":
        iris.launch(main, num_ranks=2)
"""
COMMANDS: dict[str, list[str]] = {
    "iris.launch": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "mpirun (Open MPI)": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable],
    "mpirun (MPICH)": ["mpirun.mpich", "-np", "2", sys.executable],
    "srun": ["srun", "--ntasks", "2", "--overcommit", sys.executable],
}


@pytest.mark.gpu if BACKEND != "sim" else pytest.mark.timeout(120)
@NAMES_SHARED_MEMORY
@pytest.mark.parametrize("source", COMMANDS)
def test_one_script_runs_under_every_launcher(env: pytest.MonkeyPatch, source: str, tmp_path: Path) -> None:
    command = COMMANDS[source]
    if shutil.which(command[0]) is None:
        assert source == "srun" or not os.environ.get("CI"), f"{command[0]} is missing here, where CI is set"
        pytest.skip(f"{command[0]} is not installed")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    # MPICH sets no name of the job: its ranks have to find mpirun's process, above any shell in between.
    # Open MPI looks for ssh even if all ranks are on this host, unless it is told that there is no other.
    environment = without_launcher(dict(os.environ)) | {"OMP_NUM_THREADS": "1", "OMPI_MCA_plm": "isolated"}
    wrapper = ["bash", "-c", '"$@"; exit $?', "wrapper"] if source == "mpirun (MPICH)" else []
    done = subprocess.run(
        [*command[:-1], *wrapper, command[-1], str(script), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told == {"rank": rank, "size": 2, "by": source, "seen": [10, 11], "said": {"from": 1}}


FAILING = """
    import atexit, os, sys, time
    import iris

    with iris.iris(1 << 20, timeout_s=30) as ctx:
        ctx.barrier()
        if ctx.rank == 1:
            atexit.register(time.sleep, 1)
            raise ValueError("the cause")
        ctx.barrier()
"""
BLAMED = {
    "torchrun": r"Root Cause \(first observed failure\):\s*\[\d\]:\s*time .*\s*host .*\s*rank +: (\d)",
    "mpirun (Open MPI)": r"Process name: \[\[\d+,\d+\],(\d)\]",
}


@pytest.mark.skipif(BACKEND != "sim", reason="the same where there are GPUs")
@NAMES_SHARED_MEMORY
@pytest.mark.parametrize("source", some(list(BLAMED)))
def test_launchers_blame_the_rank_that_failed_though_its_process_ends_late(
    env: pytest.MonkeyPatch, source: str, tmp_path: Path
) -> None:
    command = COMMANDS[source]
    if shutil.which(command[0]) is None:
        assert not os.environ.get("CI"), f"{command[0]} is missing here, where CI is set"
        pytest.skip(f"{command[0]} is not installed")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(FAILING))
    environment = without_launcher(dict(os.environ)) | {"OMP_NUM_THREADS": "1", "OMPI_MCA_plm": "isolated"}
    done = subprocess.run(
        [*command, str(script)], env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    blamed = re.search(BLAMED[source], done.stdout + done.stderr)
    assert done.returncode == 1 and blamed is not None and blamed[1] == "1", done.stderr
    assert "PeerDied: rank 1 left with ValueError: the cause" in done.stderr


def stuck_behind_a_failure(seconds: float) -> None:
    """Rank 0 raises while its context is open; rank 1 waits for it, and is then busy for a long time."""
    ctx = iris.iris(1 << 20, timeout_s=30)
    ctx.zeros(4)
    ctx.barrier()
    if ctx.rank == 0:
        raise ValueError("boom")
    try:
        ctx.barrier()
    except iris.PeerDied:
        time.sleep(seconds)
        raise


def test_peers_of_a_rank_that_raised_with_an_open_context_are_told(env: pytest.MonkeyPatch) -> None:
    started = time.monotonic()
    with pytest.raises(iris.LaunchError, match=r"rank 0 failed \(also failed: 1\): ValueError: boom"):
        iris.launch(stuck_behind_a_failure, 2, (0.0,))
    assert time.monotonic() - started < 25


def leaves_early(how: str) -> int:
    """Rank 1 returns while its context is open and rank 0 waits for it."""
    ctx = iris.iris(1 << 20, timeout_s=30)
    ctx.barrier()
    if ctx.rank == 1 and how == "exit":
        sys.exit(0)
    if ctx.rank == 0 and how != "together":
        ctx.barrier()
    return int(ctx.full((1,), 7, dtype=torch.int32).item()) if how == "together" else 0


@pytest.mark.parametrize("how", ["return", "exit"])
def test_peers_of_a_rank_that_returned_with_an_open_context_are_told(env: pytest.MonkeyPatch, how: str) -> None:
    started = time.monotonic()
    with pytest.raises(iris.LaunchError, match=r"RankMismatch: .*rank 0: barrier; rank 1: close"):
        iris.launch(leaves_early, 2, (how,))
    assert time.monotonic() - started < 25


def test_what_ranks_leave_open_is_closed_when_all_return(env: pytest.MonkeyPatch) -> None:
    assert iris.launch(leaves_early, 2, ("together",)) == [7, 7]


def test_ranks_that_go_on_for_long_behind_a_failure_are_ended(env: pytest.MonkeyPatch) -> None:
    env.setattr(sys.modules["iris.launch"], "_GRACE_S", 1.0)
    late = r"ranks \[1\] did not finish within 1 s of the failure of rank 0 and were ended"
    with pytest.raises(iris.LaunchError, match=rf"^rank 0 failed: ValueError: boom\n{late}$") as raised:
        iris.launch(stuck_behind_a_failure, 2, (600.0,))
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    found = [_index(device) for device in (2, "cuda:1", torch.device("cuda", 4), "cuda")]
    assert found == [2, 1, 4, 3]
    for device in ("cpu", "meta", "gpu", 1.5):
        with pytest.raises(iris.ArgumentError, match=r"device: expected a GPU: its number, name or torch\.device"):
            _index(device)
