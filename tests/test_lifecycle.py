"""Contexts come and go: nothing grows, nothing is left, and use at the wrong time raises a clear error."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import resource
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from ops_inputs import ALL_REDUCE, GATHER, Way, trial
from ranks import (
    BACKEND,
    NAMES_SHARED_MEMORY,
    Failure,
    Ranks,
    context,
    failure_of,
    map_count,
    marks_for,
    open_fds,
    resident_kib,
    shared_memory_files,
    thread_count,
    worlds,
)
from warm import python

import iris
from iris import live
from iris.backends import gpu, runtime
from iris.log import RankLogger

pytestmark = pytest.mark.timeout(120)
FEW = pytest.mark.parametrize("ranks", worlds(1, 2), indirect=True)
TWO = pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)

ALONE = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1"
CYCLES = 100
LIVES = int(os.environ.get("IRIS_LIVES") or 10)
"""The number of lives across processes, whose starts take most of the time."""
HEAP_SIZE = 4 << 20


@triton.jit
def work_kernel(data, handle, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    peer = (iris.rank(handle) + 1) % iris.world_size(handle)
    iris.peer.atomic_add(handle, data + offsets, 1.0, peer)
    iris.barrier(handle)


def one_life(turn: int) -> None:
    """Open, allocate, run a kernel, close: by ``with``, by ``close``, or with tensors still held."""
    ctx = iris.iris(HEAP_SIZE, timeout_s=30)
    data, more = ctx.full((16,), float(turn)), ctx.zeros(1000)
    ctx.barrier()
    work_kernel[(1,)](data, ctx.handle, 16)
    ctx.barrier()
    assert data.tolist() == [turn + 1.0] * 16
    if turn % 3 == 0:
        with ctx:
            del data, more
    elif turn % 3 == 1:
        del data, more
        ctx.close()
    else:
        ctx.close()


def measures() -> dict[str, Any]:
    gc.collect()
    return {
        "fds": open_fds(),
        "threads": thread_count(),
        "maps": map_count(),
        "rss_kib": resident_kib(),
        # This is memory of the whole device, so it counts only if no other worker of pytest uses it.
        "gpu": torch.cuda.mem_get_info()[0] if BACKEND != "sim" and ALONE else 0,
    }


def many_lives() -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The resources that the process holds after ten lives, and after a hundred more."""
    files = shared_memory_files()
    for turn in range(10):
        one_life(turn)
    early = measures()
    for turn in range(CYCLES):
        one_life(turn)
    return early, measures(), sorted(shared_memory_files() - files)


@NAMES_SHARED_MEMORY
@TWO
def test_a_hundred_lives_in_one_process_leave_it_as_it_was(ranks: Ranks) -> None:
    for early, late, files in ranks.run(many_lives):
        assert late["fds"] == early["fds"]
        assert late["threads"] == early["threads"]
        assert abs(late["maps"] - early["maps"]) < 10, "a leak by one way of three to close would be 33"
        assert late["rss_kib"] - early["rss_kib"] < 4096, "a leak of one heap page table a life would be more"
        assert late["gpu"] == early["gpu"]
        assert files == []


def lives_with_ops(seed: int) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """The resources that the process holds after two lives, and after eight more, each with replayed calls on two
    lanes."""
    early: dict[str, Any] = {}
    excesses = []
    for turn in range(10):
        with iris.iris(HEAP_SIZE, timeout_s=30) as ctx:
            ways = Way(ALL_REDUCE, "low_latency"), Way(GATHER, "decomposed")
            trials = [trial(ctx, way, (32, 32, 64), torch.float16, seed + turn) for way in ways]
            for one in trials:
                for _ in range(3):
                    one.run()
                excesses.append(one.excess())
            del trials, one
        early = early or (measures() if turn == 1 else {})
    return early, measures(), excesses


@pytest.mark.gpu
@TWO
def test_graphs_of_one_life_are_not_the_next_ones(ranks: Ranks, seed: int) -> None:
    for early, late, excesses in ranks.run(lives_with_ops, seed):
        assert max(excesses) <= 1
        assert late["fds"] == early["fds"] and late["threads"] == early["threads"]
        assert late["gpu"] == early["gpu"]


def free_memory() -> int:
    """The free memory of this rank's GPU, if no other worker of pytest uses it."""
    return torch.cuda.mem_get_info()[0] if BACKEND != "sim" and ALONE else 0


@NAMES_SHARED_MEMORY
@pytest.mark.timeout(60 + 10 * LIVES)
def test_lives_across_processes_leave_the_machine_as_it_was() -> None:
    size = 2 if BACKEND == "sim" else torch.cuda.device_count()
    before, fds, free = (shared_memory_files(), thread_count()), [], []
    for turn in range(LIVES):
        with iris.RankPool(size) as pool:
            free.append(pool.run(free_memory))
            pool.run(one_life, (turn,), timeout_s=60)
        fds.append(open_fds())
    assert (shared_memory_files(), thread_count()) == before
    assert fds[-1] == fds[0]  # the first pool opens things that outlive it, such as Python's resource tracker
    assert free[-1] == free[0]


def with_many_files_open() -> int:
    """Open a context while 1100 descriptors are in use, as in a server; returns the largest descriptor of the
    context."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with iris.iris(1 << 20, timeout_s=30) as ctx:
            ctx.barrier()
            return max(int(fd) for fd in os.listdir("/proc/self/fd"))
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@TWO
def test_descriptors_above_1024(ranks: Ranks) -> None:
    assert min(ranks.run(with_many_files_open)) > 1100


def uses_of(ctx: iris.Iris, tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Uses of a context, by the name that an error must give; ``tensor``: a matrix on its heap."""
    uses: dict[str, Callable[[], object]] = {
        "zeros": lambda: ctx.zeros(3),
        "as_symmetric": lambda: ctx.as_symmetric(torch.zeros(3)),
        "free": lambda: ctx.free(tensor),
        "is_symmetric": lambda: ctx.is_symmetric(tensor),
        "barrier": lambda: ctx.barrier(),
        "device_barrier": lambda: ctx.device_barrier(),
        "synchronize": lambda: ctx.synchronize(),
        "broadcast": lambda: ctx.broadcast(1, 0),
        "workspace": lambda: ctx.workspace("key", dict),
        "handle": lambda: ctx.handle,
        "heap_bases": lambda: ctx.heap_bases,
        "peer_view": lambda: ctx.peer_view(tensor, 0),
        "heap_free_bytes": lambda: ctx.heap_free_bytes,
        "heap_largest_free_bytes": lambda: ctx.heap_largest_free_bytes,
        "new_workspace": lambda: iris.ops.new_workspace(ctx, GATHER, "push"),
        "all_gather_matmul_hbm_buffer_preamble": lambda: ctx.ops.all_gather_matmul_hbm_buffer_preamble(tensor, tensor),
    }
    return uses | {op: partial(getattr(ctx.ops, op), tensor, tensor, tensor) for op in iris.ops.ALGORITHMS}


def use_after_close() -> tuple[dict[str, Failure], str]:
    ctx = iris.iris(HEAP_SIZE, timeout_s=30)
    tensor = ctx.zeros(3, 3)
    ctx.close()
    ctx.close()
    return {name: failure_of(use) for name, use in uses_of(ctx, tensor).items()}, repr(ctx)


def leave_in_success(at: int) -> int:
    """Leave the block by ``sys.exit()``, on all ranks; one comes later."""
    with iris.iris(HEAP_SIZE, timeout_s=30) as ctx:
        ctx.barrier()
        if ctx.rank == at:
            time.sleep(0.5)
            ctx.check()
        sys.exit()


def with_statement() -> tuple[str, str, Failure]:
    with iris.iris(HEAP_SIZE, timeout_s=30) as ctx:
        inside = repr(ctx)
    return inside, repr(ctx), failure_of(ctx.__enter__)


def several_at_once() -> None:
    """Contexts are independent: their heaps, their order of closing."""
    a, b = (iris.iris(HEAP_SIZE, timeout_s=30) for _ in range(2))
    x, y = a.full((4,), 1.0), b.full((4,), 2.0)
    assert a.is_symmetric(x) and not a.is_symmetric(y)
    a.close()
    b.barrier()
    assert y.tolist() == [2.0] * 4
    b.close()


@FEW
def test_use_after_close(ranks: Ranks) -> None:
    for failures, text in ranks.run(use_after_close):
        for operation, failure in failures.items():
            assert failure.kind == "ContextError" and failure.took_s < 2
            assert failure.message == f"{operation}: this context is closed. Create a new one with iris.iris(...)."
        assert text.endswith("heap=4.0 MiB, closed)")


def busy_devices() -> list[tuple[float | None, bool, bool]]:
    """For a healthy end, a failed one, and one at exit, on a device that is not done: how long the end waits for it,
    whether the memory that graphs and kernels write is kept, and whether the context is closed."""
    found = []
    for error, at_exit in ((None, False), (ValueError("the program's"), False), (ValueError("the program's"), True)):
        ctx = iris.iris(HEAP_SIZE, timeout_s=20, log_level="error")
        graphs, memory = ctx.kept("graphs", lambda: [1]), ctx.workspace("memory", lambda: [2])
        close, limits = ctx._backend.close, list[float | None]()

        def busy(limit_s: float | None, limits: list[float | None] = limits) -> bool:
            limits.append(limit_s)
            return limit_s is None

        with mock.patch.object(ctx._backend, "close", busy), mock.patch.object(live, "_ending", at_exit):
            with suppress(ValueError), ctx:
                if error is not None:
                    raise error
            kept = graphs in ctx._kept.values() and memory in ctx._workspaces.values()
            found.append((limits[0], kept, "closed" in repr(ctx)))
        close(None)
    return found


@FEW
def test_a_device_that_is_not_done_after_a_failure_is_not_waited_for_without_end(ranks: Ranks) -> None:
    """The memory that it uses is kept."""
    assert ranks.run(busy_devices) == [[(None, False, True), (20, True, True), (0.0, True, True)]] * ranks.world_size


@pytest.mark.parametrize("fails", [False, True])
def test_a_gpu_lets_go_of_its_heap_when_it_is_done_or_has_failed(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    def synchronize(device: object) -> None:
        done.wait()
        if fails:
            raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    backend = gpu.GpuBackend.__new__(gpu.GpuBackend)
    device = torch.device("cuda", 0)
    vars(backend).update(device=device, _idleness=gpu._Idleness(device), _heap="heap", _handle="handle")
    assert not backend.close(0.0) and not backend.close(0.05) and backend._heap == "heap"
    done.set()
    assert backend.close(60.0) and not hasattr(backend, "_heap")


@pytest.mark.parametrize("name", ["cuda", "hip"])
def test_hip_puts_no_word_of_a_stream_into_a_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, calls = gpu.GpuBackend.__new__(gpu.GpuBackend), list[tuple[object, ...]]()

    def ask(*given: object) -> int:
        calls.append(given)
        return 0

    vars(backend).update(name=name, _wait_value=ask, _write_value=ask)
    stream: Any = mock.Mock(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for call in (lambda: backend.wait_word(64, stream), lambda: backend.write_word(64, 1, stream)):
        with (
            pytest.raises(iris.CaptureError, match="HIP does not put into a graph") if name == "hip" else nullcontext()
        ):
            call()
    assert len(calls) == (0 if name == "hip" else 2)


def test_a_library_that_is_loaded_already_is_found_by_its_name() -> None:
    found = runtime._mapped("libtorch_cpu.so")
    assert found is not None and Path(found).name.startswith("libtorch_cpu.so") and Path(found).exists()
    assert runtime._mapped("libamdhip64.so.99") is None


@FEW
def test_a_with_block_closes(ranks: Ranks) -> None:
    for rank, (inside, after, again) in enumerate(ranks.run(with_statement)):
        assert inside.startswith(f"Iris(rank={rank}, world_size={ranks.world_size}, device=")
        assert inside.endswith("open)") and after.endswith("closed)")
        assert again.kind == "ContextError" and "this context is closed" in again.message


@TWO
def test_to_exit_without_an_error_closes(ranks: Ranks) -> None:
    assert ranks.run(leave_in_success, 1) == [None, None]


@FEW
def test_several_contexts_at_once(ranks: Ranks) -> None:
    ranks.run(several_at_once)


def all_but_one() -> Failure:
    """Rank 0 leaves before it makes a context; the others wait for it in vain."""
    if os.environ["IRIS_RANK"] == "0":
        return Failure()
    return failure_of(lambda: iris.iris(HEAP_SIZE, timeout_s=0.5))


def meet() -> list[int]:
    met = []
    for source in range(2):
        with iris.iris(HEAP_SIZE, timeout_s=20) as ctx:
            met.append(ctx.broadcast(ctx.rank, source))
    return met


@pytest.mark.parametrize("ranks", worlds(2, 3) if BACKEND == "sim" else worlds(2, 2), indirect=True)
def test_ranks_that_waited_for_one_in_vain_meet_it_the_next_time(ranks: Ranks) -> None:
    first, *others = ranks.run(all_but_one)
    assert first.kind == "nothing"
    assert {(one.kind, one.ranks) for one in others} == {("WaitTimeout", (0,))}
    assert ranks.run(meet) == [[0, 1]] * ranks.world_size


def close_without_the_others() -> Failure:
    """Rank 0 closes its context; the others do something else, and then nothing."""
    ctx = iris.iris(HEAP_SIZE, timeout_s=1)
    ctx.barrier()
    return failure_of(ctx.close if ctx.rank == 0 else lambda: ctx.zeros(3))


@TWO
def test_closing_on_one_rank_only_is_a_mismatch(ranks: Ranks) -> None:
    for failure in ranks.run(close_without_the_others):
        assert failure.kind == "RankMismatch"
        assert "rank 0: close; rank 1: zeros(12 bytes of torch.float32)" in failure.message


def use_in_a_forked_child() -> tuple[list[tuple[str, Failure]], int, int]:
    """The child reports what it got; the parent goes on."""
    ctx = context()
    tensor = ctx.full((2, 2), 2.0)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        failures = [(name, failure_of(use)) for name, use in {**uses_of(ctx, tensor), "close": ctx.close}.items()]
        os.write(write, pickle.dumps(failures))
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        told: list[tuple[str, Failure]] = pickle.load(pipe)
    _, status = os.waitpid(child, 0)
    ctx.barrier()
    assert ctx.broadcast(ctx.rank, 0) == 0
    assert tensor.tolist() == [[2.0, 2.0]] * 2 and ctx.zeros(2).tolist() == [0.0, 0.0]
    ctx.device_barrier()
    ctx.synchronize()
    return told, status, os.getpid()


@FEW
def test_use_in_a_forked_child_is_an_error_and_the_parent_goes_on(ranks: Ranks) -> None:
    for told, status, parent in ranks.run(use_in_a_forked_child):
        assert status == 0
        *refused, (_, closed) = told
        for operation, failure in refused:
            assert failure.kind == "ContextError" and failure.took_s < 2, (operation, failure)
            assert failure.message.startswith(f"{operation}: this context belongs to process {parent}; ")
            assert (
                "is a forked child. Create contexts after forking, or start processes with 'spawn'" in failure.message
            )
        assert closed.kind == "nothing"


FORGOTTEN = """
    import sys, time, iris
    ctx = iris.iris(1 << 20, timeout_s=10)
    tensor = ctx.full((4,), 3.0)
    ctx.barrier()
    {last}
"""


def run_ranks(source: str, tmp_path: Path, size: int = 2) -> list[tuple[int, str, str]]:
    """Run ``source`` as ``size`` ranks, started as by a launcher. Returns exit code, stdout and stderr of each."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source))
    job = {"IRIS_WORLD_SIZE": str(size), "IRIS_JOB": f"{tmp_path.name}-{os.getpid()}"}
    started = [
        subprocess.Popen(
            [python(), str(script)],
            env={**os.environ, **job, "IRIS_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    outcomes = []
    try:
        for process in started:
            out, err = process.communicate(timeout=60)
            outcomes.append((process.returncode, out, err))
    finally:
        for process in started:
            process.kill()
    return outcomes


@NAMES_SHARED_MEMORY
def test_a_forgotten_close_is_made_up_for_at_exit(tmp_path: Path) -> None:
    files = shared_memory_files()
    source = FORGOTTEN.format(last="time.sleep(0.5 * ctx.rank); print('done', tensor.sum().item())")
    assert run_ranks(source, tmp_path) == [(0, "done 12.0\n", "")] * 2
    assert shared_memory_files() <= files


def test_a_peer_that_exits_is_not_waited_for(tmp_path: Path) -> None:
    """No handler learns of ``sys.exit(3)``: to an open context it looks like the end of the program."""
    last = "if ctx.rank == 1: sys.exit(3)\n    ctx.device_barrier(); ctx.synchronize()"
    source = FORGOTTEN.format(last=last).replace("timeout_s=10", "timeout_s=100")
    (code, _, errors), (their_code, _, their_errors) = run_ranks(source, tmp_path)
    assert (code, their_code) == (1, 3), (errors, their_errors)
    assert "iris.errors.PeerDied: device_barrier: rank 0 waited" in errors and "rank 1 has closed its context" in errors
    assert their_errors.startswith("iris: rank 1 was not closed cleanly: ")


def test_a_rank_that_has_ended_waits_for_a_slower_one(tmp_path: Path) -> None:
    source = FORGOTTEN.format(last="time.sleep(6.5 * ctx.rank); ctx.check(); print('done')")
    assert run_ranks(source, tmp_path) == [(0, "done\n", "")] * 2


def test_a_rank_that_has_ended_waits_no_longer_than_the_limit(tmp_path: Path) -> None:
    limits = "timeout_s=2, first_timeout_s=30"  # a busy machine takes its time to start two processes
    source = FORGOTTEN.format(last="time.sleep(6 * ctx.rank); ctx.check()").replace("timeout_s=10", limits)
    (code, _, errors), (their_code, _, their_errors) = run_ranks(source, tmp_path)
    assert (code, their_code) == (0, 1), (errors, their_errors)
    waited = "close: rank 0 waited 2 s for rank 1, which did not make the call."
    assert errors.startswith(f"iris: rank 0 was not closed cleanly: {waited}")
    assert f"iris.errors.WaitTimeout: {waited}" in their_errors


SEVERAL_FORGOTTEN = """
    import iris
    contexts = [iris.iris(1 << 20, timeout_s=10) for _ in range(6)]
    contexts[0].barrier()
"""


def test_all_ranks_close_what_they_forgot_in_the_same_order(tmp_path: Path) -> None:
    assert run_ranks(SEVERAL_FORGOTTEN, tmp_path, size=3) == [(0, "", "")] * 3


def test_a_rank_that_ends_on_an_error_tells_its_peers(tmp_path: Path) -> None:
    last = "if ctx.rank == 1: raise KeyError('the cause')\n    ctx.barrier()"
    (code, _, errors), (their_code, _, their_errors) = run_ranks(FORGOTTEN.format(last=last), tmp_path)
    assert (code, their_code) == (1, 1)
    assert their_errors.rstrip().endswith("KeyError: 'the cause'")
    assert errors.rstrip().endswith("iris.errors.PeerDied: rank 1 left with KeyError: 'the cause'")


def forget_to_close(rank: int, job: str, pipe: Any, fails: str) -> None:
    """A rank in a process of multiprocessing. The one that fails does so like one of ``torch.multiprocessing``."""
    os.environ |= {"IRIS_WORLD_SIZE": "2", "IRIS_JOB": job, "IRIS_RANK": str(rank)}
    ctx = iris.iris(1 << 20, timeout_s=10)
    ctx.barrier()
    try:
        if rank == 0 and fails:
            raise ValueError(fails)
        if rank == 1:
            time.sleep(0.5)
            ctx.barrier() if fails else ctx.check()
        pipe.send("done")
    except ValueError:
        sys.exit(1)
    except iris.PeerDied as error:
        pipe.send(str(error))


@pytest.mark.parametrize("fails", [pytest.param(why, marks=marks_for(2)) for why in ("", "the cause")])
def test_a_process_of_multiprocessing_ends_as_any_other(fails: str) -> None:
    """Such processes run no exit handlers, or run them when the exception is already forgotten."""
    here, there = multiprocessing.Pipe(duplex=False)
    job = f"{os.getpid()} {fails}"
    server = multiprocessing.get_context("forkserver")
    started = [server.Process(target=forget_to_close, args=(rank, job, there, fails)) for rank in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(30)
    assert [process.exitcode for process in started] == [1 if fails else 0, 0]
    assert [here.recv() for _ in started[bool(fails) :]] == (
        [f"rank 0 left with ValueError: {fails}"] if fails else ["done"] * 2
    )


LOGGING = """
    import iris
    for level in ("warning", "debug"):
        with iris.iris(1 << 20, timeout_s=10, log_level=level) as ctx:
            for tell in (ctx.debug, ctx.info, ctx.warning, ctx.error):
                tell(f"{level}-{tell.__name__}")
            ctx.set_log_level("error")
            ctx.warning("never")
"""


@pytest.mark.parametrize(("error", "ended"), [(None, "closed"), (ValueError("of the program"), "given up")])
def test_a_context_that_cannot_be_ended_keeps_no_other_open_at_exit(
    error: Exception | None, ended: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is like one whose GPU has failed. It does not end before the processes that are to blame."""

    def broken(*_: object) -> None:
        raise RuntimeError("an illegal memory access")

    said: list[str] = []
    opened = {
        live.Live(): live.Opened("rank 0", broken, broken),
        live.Live(): live.Opened("rank 1", lambda: said.append("closed"), lambda _: said.append("given up")),
    }
    monkeypatch.setattr(sys, "last_exc", error, raising=False)
    monkeypatch.setattr(live, "_ending", False)
    monkeypatch.setattr(live, "let_culprits_go_first", lambda: said.append("waited"))
    with mock.patch.dict(live.OPEN, opened, clear=True):
        live.end_all()
        assert live.ending()
    assert said == [ended, *(["waited"] if error else [])]
    assert capsys.readouterr().err == "iris: rank 0 was not closed cleanly: an illegal memory access\n"


def test_an_interactive_session_does_not_end_on_its_last_error(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    opened = live.Opened("rank 0", lambda: said.append("closed"), lambda _: said.append("given up"))
    monkeypatch.setattr(sys, "last_exc", NameError("mistyped, long ago"), raising=False)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(live, "_ending", False)
    with mock.patch.dict(live.OPEN, {live.Live(): opened}, clear=True):
        live.end_all()
    assert said == ["closed"]


@pytest.mark.parametrize("level", ["30", 30, "Warning"])
def test_a_log_level_may_be_a_number(level: str | int, capsys: pytest.CaptureFixture[str]) -> None:
    """In the environment such a number is text."""
    log = RankLogger()
    log._start_logging(3, level)
    log.info("too little")
    log.warning("enough")
    assert capsys.readouterr().err == "[iris WARNING rank 3] enough\n"


def test_a_log_level_of_0_shows_all(capsys: pytest.CaptureFixture[str]) -> None:
    log = RankLogger()
    log._start_logging(3, 0)
    log.debug("all")
    assert capsys.readouterr().err == "[iris DEBUG rank 3] all\n"


def test_log_lines_name_the_rank_and_appear_once(tmp_path: Path) -> None:
    for rank, (code, out, errors) in enumerate(run_ranks(LOGGING, tmp_path)):
        lines = [line for line in errors.splitlines() if "-" in line and " on " not in line]
        assert (code, out) == (0, "") and "never" not in errors
        assert lines == [
            f"[iris WARNING rank {rank}] warning-warning",
            f"[iris ERROR rank {rank}] warning-error",
            f"[iris DEBUG rank {rank}] debug-debug",
            f"[iris INFO rank {rank}] debug-info",
            f"[iris WARNING rank {rank}] debug-warning",
            f"[iris ERROR rank {rank}] debug-error",
        ]


def names_of_the_same() -> list[bool]:
    ctx = context()
    return [
        ctx.rank == ctx.cur_rank == ctx.get_rank(),
        ctx.world_size == ctx.num_ranks == ctx.get_num_ranks(),
        ctx.num_sms == ctx.get_cu_count(),
        ctx.device == ctx.get_device(),
        ctx.heap_bases is ctx.get_heap_bases(),
    ]


@TWO
def test_what_users_know_by_other_names_is_the_same(ranks: Ranks) -> None:
    assert ranks.run(names_of_the_same) == [[True] * 5] * 2
