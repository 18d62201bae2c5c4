"""A rank is killed: every survivor learns which, and in time, and nothing is left behind."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import triton
from ops_inputs import GATHER, Way, trial
from ranks import (
    BACKEND,
    NAMES_SHARED_MEMORY,
    Failure,
    failure_of,
    free_port,
    iris_sockets,
    marks_for,
    open_fds,
    shared_memory_files,
    worlds,
)

import iris
from iris import processes, rendezvous
from iris.backends import gpu
from iris.device.control import abort_code
from iris.identity import identity
from iris.mesh import Mesh
from iris.rendezvous import Rendezvous, address
from iris.watcher import Watcher

pytestmark = pytest.mark.timeout(120)

SIZE = 3
VICTIM = 1
TIMEOUT_S = 1.5
OPENING_S = TIMEOUT_S if BACKEND == "sim" else 20.0
"""A heap takes seconds to open on a GPU if many processes ask its driver for memory at the same time."""
SHARING_S = TIMEOUT_S if BACKEND == "sim" else 6.0
"""How long PyTorch's rendezvous waits for a rank that has died."""
Work = Callable[[], object]


@triton.jit
def wait_kernel(flag, epoch, peer, handle):
    iris.wait(flag, epoch, peer, handle)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in(delay_s: float) -> None:
    timer = threading.Timer(delay_s, die)
    timer.daemon = True
    timer.start()


def die_late(rank: int) -> None:
    if rank == VICTIM:
        time.sleep(0.3)
        die()


def opened(within_s: float = OPENING_S) -> iris.Iris:
    return iris.iris(1 << 20, timeout_s=TIMEOUT_S, first_timeout_s=within_s)


def opened_in_vain() -> iris.Iris:
    """Open a context in vain: no rank has met the victim, so the others wait until their time is over."""
    return opened(TIMEOUT_S)


def before_rendezvous(rank: int) -> Work:
    return die if rank == VICTIM else opened_in_vain


def mid_rendezvous(rank: int) -> Work:
    """The victim dies once it has met one peer; the last rank comes later."""
    if rank == VICTIM:
        hear = Rendezvous._hear

        def hear_and_die(self: Rendezvous, connection: socket.socket) -> None:
            hear(self, connection)
            die()

        Rendezvous._hear = hear_and_die  # type: ignore[method-assign]
    elif rank == SIZE - 1:
        time.sleep(0.5)
    return opened


def while_heaps_are_shared(rank: int) -> Work:
    if rank == VICTIM and BACKEND == "sim":
        Mesh.exchange_fd = lambda self, tag, fd: die()  # type: ignore[method-assign, assignment, return-value]
    elif rank == VICTIM:
        torch_memory = vars(gpu)["_SymmetricMemory"]
        made = SimpleNamespace(empty_strided_p2p=torch_memory.empty_strided_p2p, rendezvous=lambda *heap: die())
        vars(gpu)["_SymmetricMemory"] = made
    return lambda: opened(SHARING_S)


def in_a_host_barrier(rank: int) -> Work:
    ctx = opened()
    ctx.barrier()

    def work() -> None:
        with ctx:
            die_late(rank)
            ctx.barrier()

    return work


def waiting_in_a_host_barrier(rank: int) -> Work:
    """The victim has come to the barrier, but the last rank has not, when the victim dies."""
    ctx = opened()
    ctx.barrier()

    def work() -> None:
        with ctx:
            if rank == VICTIM:
                die_in(0.3)
            elif rank == SIZE - 1:
                time.sleep(0.6)
            ctx.barrier()
            ctx.barrier()

    return work


def in_a_device_barrier(rank: int) -> Work:
    ctx = opened()
    ctx.device_barrier()
    ctx.barrier()

    def work() -> None:
        with ctx:
            die_late(rank)
            ctx.device_barrier()
            ctx.synchronize()

    return work


def in_an_op(rank: int) -> Work:
    """All ranks wait in a kernel, the victim too, when it is killed."""
    ctx = opened()
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()

    def work() -> None:
        with ctx:
            if rank == VICTIM:
                die_in(0.3)
            wait_kernel[(2,)](flag, 5, VICTIM if rank != VICTIM else 0, ctx.handle)
            ctx.synchronize()

    return work


def in_a_fused_op(rank: int) -> Work:
    """The survivors wait for the victim's part of a gather, in the op's own kernel."""
    ctx = opened()
    one = trial(ctx, Way(GATHER, "push"), (16, 16, 32), torch.float16, seed=0)
    one.run()
    ctx.synchronize()
    ctx.barrier()

    def work() -> None:
        with ctx:
            die_late(rank)
            one.run()
            ctx.synchronize()

    return work


def outlive(ctx: iris.Iris) -> None:
    """Make this rank's connections outlive it for as long as the peers wait, as they do on a GPU whose driver has much
    memory to unmap."""
    held = [connection.fileno() for connection in ctx._mesh.peers.values()]
    nothing = subprocess.DEVNULL
    subprocess.Popen(["sleep", f"{TIMEOUT_S + 1}"], pass_fds=held, stdin=nothing, stdout=nothing, stderr=nothing)


def in_a_device_barrier_and_is_held(rank: int) -> Work:
    ctx = opened()
    ctx.device_barrier()
    ctx.barrier()

    def work() -> None:
        with ctx:
            if rank == VICTIM:
                outlive(ctx)
            die_late(rank)
            ctx.device_barrier()
            ctx.synchronize()

    return work


def in_a_host_barrier_and_is_held(rank: int) -> Work:
    ctx = opened()
    ctx.barrier()

    def work() -> None:
        with ctx:
            if rank == VICTIM:
                outlive(ctx)
            die_late(rank)
            ctx.barrier()

    return work


def in_an_allocation(rank: int) -> Work:
    ctx = opened()
    ctx.barrier()

    def work() -> None:
        with ctx:
            die_late(rank)
            ctx.zeros(4)

    return work


def in_teardown(rank: int) -> Work:
    ctx = opened()
    ctx.barrier()
    if rank == VICTIM:
        Mesh.exchange = lambda self, tag, *rest: die()  # type: ignore[method-assign, assignment]
    return ctx.close


POINTS: list[Callable[[int], Work]] = [
    before_rendezvous,
    mid_rendezvous,
    while_heaps_are_shared,
    in_a_host_barrier,
    waiting_in_a_host_barrier,
    in_a_device_barrier,
    in_an_op,
    in_a_fused_op,
    in_a_device_barrier_and_is_held,
    in_a_host_barrier_and_is_held,
    in_an_allocation,
    in_teardown,
]


def survive(point: Callable[[int], Work]) -> tuple[Failure, list[str], int]:
    """What the rank saw, and which descriptors and how many threads it has in addition to those before.

    A GPU's driver keeps descriptors as long as the process lives, so on GPUs a whole context is opened first.
    """
    if BACKEND != "sim":
        with iris.iris(1 << 20) as ctx:
            ctx.device_barrier()
    fds, threads = open_fds(), threading.active_count()
    failure = failure_of(point(int(os.environ["IRIS_RANK"])))
    now = open_fds()
    return failure, sorted({fd for fd in now if now.count(fd) > fds.count(fd)}), threading.active_count() - threads


def job_name() -> str:
    who = identity()
    assert who is not None
    return who.job


@pytest.fixture
def doomed() -> Iterator[iris.RankPool]:
    """Ranks, one of which will be killed."""
    with iris.RankPool(SIZE) as pool:
        pool.run(job_name)
        yield pool


def children() -> set[str]:
    """The running children of this process, and of servers that it started."""
    ours = str(os.getpid())
    parents = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            parents[pid] = parent
    family = {ours}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return family - {ours}


@pytest.mark.parametrize("point", [pytest.param(one, marks=marks_for(SIZE), id=one.__name__) for one in POINTS])
def test_survivors_name_the_killed_rank_in_time(point: Callable[[int], Work], doomed: iris.RankPool) -> None:
    outcomes = doomed.outcomes(survive, (point,), timeout_s=30 if BACKEND == "sim" else 90)  # heaps open late there
    victim = outcomes[VICTIM]
    assert isinstance(victim.error, iris.LaunchError)
    assert str(victim.error) == f"rank {VICTIM}'s process ended: killed by signal 9"
    assert not doomed.alive
    for outcome in outcomes:
        if outcome.rank == VICTIM:
            continue
        assert outcome.error is None, outcome.trace
        failure, fds, threads = outcome.value
        assert failure.kind in ("PeerDied", "WaitTimeout"), failure
        assert failure.ranks == (VICTIM,) and f"rank {VICTIM}" in failure.message, failure
        limit_s = SHARING_S if point is while_heaps_are_shared else TIMEOUT_S
        assert failure.took_s < limit_s + 1, failure
        if point is not before_rendezvous:
            assert failure.kind == "PeerDied" and "closed its connection" not in failure.message, failure
        # If PyTorch's own rendezvous fails, it keeps the descriptor by which it exported a GPU's heap.
        kept = ["/dev/nvidiactl"] if BACKEND != "sim" and point is while_heaps_are_shared else []
        assert fds == kept and threads <= 0, (fds, threads)  # a thread from before may have ended


@NAMES_SHARED_MEMORY
def test_a_kill_leaves_nothing_behind() -> None:
    with iris.RankPool(1) as pool:
        pool.run(os.getpid)
    time.sleep(0.1)
    before = shared_memory_files(), children(), open_fds()
    names = set()
    for point in (mid_rendezvous, in_an_op):
        with iris.RankPool(SIZE) as pool:
            job = pool.run(job_name)[0]
            names |= {address(job, rank, 1).replace("\0", "@") for rank in range(SIZE)}
            pool.outcomes(survive, (point,), timeout_s=30)
    time.sleep(0.1)
    assert (shared_memory_files(), children(), open_fds()) == before
    assert not names & iris_sockets()


def open_with_few_files(spare: int) -> Failure:
    """The victim may only open ``spare`` more files."""
    if int(os.environ["IRIS_RANK"]) != VICTIM:
        return failure_of(opened)
    before, held = resource.getrlimit(resource.RLIMIT_NOFILE), set(map(int, os.listdir("/proc/self/fd")))
    least = next(limit for limit in range(before[0]) if limit - sum(fd < limit for fd in held) == spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, before[1]))
    try:
        return failure_of(opened)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(BACKEND != "sim", reason="a GPU's driver opens files of its own")
def test_a_rank_that_may_open_no_more_files_says_so(doomed: iris.RankPool) -> None:
    for spare in range(1, 4):  # to meet, and to share heaps
        failures = doomed.run(open_with_few_files, (spare,), timeout_s=30)
        assert failures[VICTIM].kind == "BackendError", failures[VICTIM]
        assert "this process has too many open files. Raise the limit, as with ulimit" in failures[VICTIM].message
        assert all(failure.kind == "PeerDied" for rank, failure in enumerate(failures) if rank != VICTIM), failures


def meet_as_known(known: list[tuple[int, bool]]) -> tuple[int, bool]:
    """The meetings that this rank knows of after two more, if rank i knew of ``known[i]`` before."""
    rendezvous._known[job_name()] = known[int(os.environ["IRIS_RANK"])]
    for _ in range(2):
        with opened() as ctx:
            ctx.barrier()
    return rendezvous._known[job_name()]


def test_ranks_meet_again_after_a_meeting_that_failed_for_some(doomed: iris.RankPool) -> None:
    unsure, counted, never_met = (0, True), (1, False), (0, False)
    states = {*itertools.product((unsure, counted), repeat=SIZE), *itertools.product((unsure, never_met), repeat=SIZE)}
    for number, known in enumerate(sorted(states)):
        before = [(number * 10 + count, maybe_more) for count, maybe_more in known]
        after = max(count for count, _ in before) + 2, False
        assert doomed.run(meet_as_known, (before,), timeout_s=60) == [after] * SIZE


def meet_a_silent_rank(late: int) -> Failure:
    """The victim is stopped, not dead, when its peers meet it; rank ``late`` comes when the other already waits."""
    rank = int(os.environ["IRIS_RANK"])
    if rank == VICTIM:
        Rendezvous._greet = lambda self, *rest: time.sleep(TIMEOUT_S + 1.5)  # type: ignore[method-assign]
    elif rank == late:
        time.sleep(0.5)
    return failure_of(opened_in_vain)


@pytest.mark.skipif(not worlds(), reason="no ranks here")
@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_hangs_while_meeting_is_named_in_time(late: int, doomed: iris.RankPool) -> None:
    the_silent_rank_is_named_in_time(doomed.run(meet_a_silent_rank, (late,), timeout_s=30))


def the_silent_rank_is_named_in_time(failures: list[Failure]) -> None:
    for rank, failure in enumerate(failures):
        if rank != VICTIM:
            assert failure.kind == "WaitTimeout" and failure.ranks == (VICTIM,), failure
            assert failure.took_s < TIMEOUT_S + 1


def share_with_a_silent_rank() -> Failure:
    """The victim is stopped, not dead, when its peers share heaps with it."""
    if int(os.environ["IRIS_RANK"]) == VICTIM:
        Mesh.exchange_fd = lambda *_: time.sleep(TIMEOUT_S + 1.5)  # type: ignore[method-assign,assignment]
    return failure_of(opened_in_vain)


@pytest.mark.skipif(BACKEND != "sim", reason="GPUs share no file")
def test_a_rank_that_hangs_while_heaps_are_shared_is_named_in_time(doomed: iris.RankPool) -> None:
    the_silent_rank_is_named_in_time(doomed.run(share_with_a_silent_rank, timeout_s=30))


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    """The key of a job whose two ranks are both played by this process."""
    monkeypatch.setattr(rendezvous, "_known", {})
    return secrets.token_hex(8)


def meeting(rank: int, key: str) -> tuple[Rendezvous, Failure]:
    """The rendezvous of rank ``rank`` of two after it has met the other one, or waited for it in vain."""
    met = Rendezvous(rank, 2, key, 0.3)
    return met, failure_of(met.meet, lambda _: None)


@contextmanager
def calling(key: str, *said: bytes) -> Iterator[list[socket.socket]]:
    """Connections to rank 0, made as soon as it listens, by callers that send ``said`` and nothing else."""
    made: list[socket.socket] = []

    def call() -> None:
        for words in said:
            connection = socket.socket(socket.AF_UNIX)
            made.append(connection)
            while connection.connect_ex(address(key, 0)):
                time.sleep(0.001)
            with suppress(BrokenPipeError):  # rank 0 may hang up at once
                connection.sendall(words)
            connection.settimeout(5)
            if not words:
                connection.close()

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield made
    finally:
        thread.join()
        for connection in made:
            connection.close()


def hello(rank: int) -> bytes:
    return rendezvous._HELLO.pack(rank, 2, 0)


def test_a_caller_that_goes_without_a_word_is_no_rank_that_died(key: str) -> None:
    with calling(key, b"", hello(1)):
        met, failure = meeting(0, key)
        assert failure.kind == "nothing" and list(met.peers) == [1], failure
        met.peers[1].close()


def test_a_rank_that_goes_without_a_word_when_it_is_called_has_died(key: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address(key, 0))
        listener.listen()
        thread = threading.Thread(target=lambda: listener.accept()[0].close())
        thread.start()
        _, failure = meeting(1, key)
        thread.join()
    assert failure.kind == "PeerDied" and failure.ranks == (0,), failure
    assert failure.message == "rendezvous: rank 0 died while ranks were meeting"


def test_callers_are_let_go_of_when_a_meeting_fails(key: str) -> None:
    with calling(key, hello(1)[:1]) as callers:
        met, failure = meeting(0, key)
        assert failure.kind == "WaitTimeout" and not met.peers, failure
        (caller,) = callers
        assert caller.recv(99) == hello(0) and caller.recv(99) == b""


def test_a_rank_that_listens_and_says_nothing_is_told_of(key: str) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(address(key, 0))
        silent.listen()
        _, failure = meeting(1, key)
    assert failure.kind == "WaitTimeout" and failure.ranks == (0,)
    assert "never arrived (rank 0 can be called but says nothing: a stopped process?)" in failure.message
    _, failure = meeting(1, key)
    assert failure.kind == "WaitTimeout" and "never arrived. " in failure.message, failure


def test_a_process_of_another_user_is_no_rank(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not met when it calls, and it is named in an error when it is called."""
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    with calling(key, hello(1)):
        met, failure = meeting(0, key)
    assert failure.kind == "WaitTimeout" and not met.peers, failure
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address(key, 0))
        listener.listen()
        _, failure = meeting(1, key)
    assert failure.kind == "LaunchError" and failure.message.startswith("rank 0's socket belongs to user "), failure


def watcher_of(dead: Callable[[], set[int]], word: list[int]) -> Watcher:
    """The watcher of rank 0 of 4 ranks, some of which are ``dead``. ``word``: what kernels have been told, before and
    after."""
    mesh = SimpleNamespace(world_size=4, rank=0, dead_ranks=dead)
    backend = SimpleNamespace(peek=lambda _: word[0], poke=lambda _, code: word.append(code))
    return Watcher(cast(Any, mesh), cast(Any, backend))


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not done() and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.parametrize("told", [0, 5])
def test_what_kernels_have_been_told_stands_when_peers_die(told: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be why a peer has gone. If kernels have been told nothing, they are told once, of the first rank that has
    died."""
    monkeypatch.setattr(Watcher, "INTERVAL_S", 0.001)
    word, looks = [told], list[int]()

    def dead() -> set[int]:
        looks.append(len(looks))
        return {3, 1} if looks[-1] else set()

    watcher = watcher_of(dead, word)
    wait_until(lambda: len(looks) >= 2)
    watcher.stop()
    assert watcher.saw_death and looks == [0, 1]
    assert word == ([5] if told else [0, abort_code(0, 1)])


def test_kernels_have_time_to_record_for_whom_they_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have it between being told of a death and the host's look at it: a record says more than the death does."""
    monkeypatch.setattr(Watcher, "INTERVAL_S", 0.001)
    word, pauses, begin = [0], list[tuple[int, bool]](), threading.Event()

    class Noted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if begin.is_set():
                pauses.append((word[-1], watcher.saw_death))
            return super().wait(timeout)

    def dead() -> set[int]:
        assert begin.wait(5)
        return {1}

    monkeypatch.setattr("iris.watcher.threading", SimpleNamespace(Event=Noted, Thread=threading.Thread))
    watcher = watcher_of(dead, word)
    begin.set()
    wait_until(lambda: watcher.saw_death)
    watcher.stop()
    assert watcher.saw_death and pauses[-1] == (abort_code(0, 1), False)


def test_a_watcher_that_is_stopped_looks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that it looks at is then released."""
    monkeypatch.setattr(Watcher, "INTERVAL_S", 0.001)
    looking, looked = threading.Event(), list[int]()

    def look() -> list[int]:
        looking.set()
        time.sleep(0.1)
        looked.append(1)
        return []

    watcher = Watcher(cast(Any, SimpleNamespace(world_size=2, dead_ranks=look)), cast(Any, None))
    assert looking.wait(5)
    watcher.stop()
    assert looked
    looked.clear()
    time.sleep(0.15)
    assert not looked and not watcher.saw_death


def leave_with_an_error() -> Failure:
    rank = int(os.environ["IRIS_RANK"])

    def work() -> None:
        with opened() as ctx:
            ctx.barrier()
            if rank == VICTIM:
                raise KeyError("the cause")
            ctx.barrier()

    return failure_of(work)


class Mute(Exception):
    """An exception whose text cannot be read, and whose ``ranks`` has no meaning."""

    ranks = 7

    def __str__(self) -> str:
        raise ValueError("no words")


def leave_mutely() -> Failure | None:
    with suppress(Mute):
        with opened() as ctx:
            ctx.barrier()
            if ctx.rank == VICTIM:
                raise Mute
            return failure_of(ctx.barrier)
    return None


def test_an_exception_that_cannot_be_said_reaches_the_peers_all_the_same(doomed: iris.RankPool) -> None:
    for rank, failure in enumerate(doomed.run(leave_mutely, timeout_s=30)):
        if rank != VICTIM:
            assert failure.kind == "PeerDied" and failure.took_s < 1
            assert failure.message == f"rank {VICTIM} left with Mute: its words cannot be had"


def test_an_exception_in_a_with_block_reaches_the_peers(doomed: iris.RankPool) -> None:
    for rank, failure in enumerate(doomed.run(leave_with_an_error, timeout_s=30)):
        if rank == VICTIM:
            assert (failure.kind, failure.message) == ("KeyError", "'the cause'")
        else:
            assert failure.kind == "PeerDied" and failure.ranks == (VICTIM,)
            assert failure.message == f"rank {VICTIM} left with KeyError: 'the cause'"
        assert failure.took_s < 1


@pytest.mark.parametrize("hidden", [False, True])
def test_a_process_is_gone_when_nobody_knows_it_any_more(monkeypatch: pytest.MonkeyPatch, hidden: bool) -> None:
    """Also if it disappears between two looks, and if /proc does not show it."""
    if hidden:
        monkeypatch.setattr(processes, "_stat", mock.Mock(side_effect=FileNotFoundError))
    with subprocess.Popen(["sleep", "60"]) as child:
        assert not processes.is_ending(child.pid)
        child.kill()
    assert processes.is_ending(child.pid)
    assert not processes.is_ending(os.getpid())


def test_a_process_may_have_any_name() -> None:
    """Linux cuts names off after 15 bytes, even within a character."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes(b"caf\xc3")
    try:
        assert not processes.is_ending(os.getpid())
    finally:
        name.write_bytes(before)


@pytest.mark.parametrize("dead", [[0], []])
def test_a_rank_that_dies_before_others_have_joined_its_store_is_named(dead: list[int]) -> None:
    """Rank 0 hosts the store by which PyTorch maps heaps."""
    mesh: Any = SimpleNamespace(
        rank=1, world_size=2, timeout_s=1.0, exchange=lambda *_: {0: str(free_port()).encode()},
        dead_ranks=lambda: dead, death=lambda peer, _: iris.PeerDied(f"rank {peer} died", [peer]),
    )  # fmt: skip
    kind, words = (
        (iris.PeerDied, "rank 0 died") if dead else (iris.BackendError, "could not map the heaps of all ranks")
    )
    with pytest.raises(kind, match=words):
        gpu._shared(torch.empty(0), mesh)


def fork_while_ranks_meet() -> float | None:
    """How long rank 0 takes to learn that rank 1 has died, a child of which was forked while it met the others."""
    rank = int(os.environ["IRIS_RANK"])
    if rank == 2:
        time.sleep(1.0)
    if rank == 1:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(8,))
        threading.Timer(0.4, child.start).start()
    ctx = iris.iris(1 << 20, timeout_s=20, first_timeout_s=20)
    ctx.barrier()
    if rank == 1:
        assert child.is_alive()
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(iris.PeerDied, match="rank 1 died"):
        ctx.barrier()
    return time.monotonic() - started


@pytest.mark.skipif(BACKEND != "sim", reason="one backend suffices")
def test_a_child_forked_while_ranks_meet_does_not_hide_their_death() -> None:
    with iris.RankPool(3) as pool:
        first, *_ = pool.outcomes(fork_while_ranks_meet, timeout_s=60)
    assert first.error is None and first.value is not None and first.value < 4, first
