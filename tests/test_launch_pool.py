"""Live ranks from call to call: what breaks off a call, the ranks' environment, their children, and their end."""

from __future__ import annotations

import io
import multiprocessing.forkserver
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ops_inputs import some
from ranks import BACKEND
from torch.utils.data import DataLoader, TensorDataset
from warm import python

import iris
from iris import forkserver

pytestmark = pytest.mark.timeout(120)

IN_A_RANK = "IRIS_WORLD_SIZE"


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[iris.RankPool]:
    monkeypatch.delenv(IN_A_RANK, raising=False)
    with iris.RankPool(2) as ranks:
        yield ranks


def same(value: Any) -> Any:
    return value


kept: list[Any] = []


def keep_and_give() -> torch.Tensor:
    """A tensor on the heap that the rank keeps, and returns to the process that started it."""
    ctx = iris.iris(1 << 20)
    kept[:] = ctx, ctx.full((4,), 1.0 + ctx.rank)
    ctx.barrier()
    made: torch.Tensor = kept[1]
    return made


def still_symmetric() -> bool:
    ctx, tensor = kept
    with ctx:
        return bool(ctx.is_symmetric(tensor) and ctx.peer_view(tensor, 1).tolist() == [2.0] * 4)


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def only_in_a_rank(*_: object) -> None:
    if IN_A_RANK not in os.environ:
        raise RuntimeError("this is no rank")


class Homesick(Exception):
    """An exception that can be unpickled in a rank only."""

    def __reduce__(self) -> Any:
        return only_or_homesick, ()


def only_or_homesick() -> Homesick:
    only_in_a_rank()
    return Homesick("far away")


def give_homesick(raised: bool) -> Homesick:
    if raised:
        raise Homesick("far away")
    return Homesick("far away")


class Once:
    """Can be pickled once only."""

    def __init__(self) -> None:
        self.times = 0

    def __reduce__(self) -> Any:
        self.times += 1
        if self.times > 1:
            raise ValueError("not again")
        return Once, ()


class Nowhere:
    """Cannot be unpickled in a rank."""

    def __reduce__(self) -> Any:
        return refuse_rank, ()


def refuse_rank() -> None:
    if IN_A_RANK in os.environ:
        raise EOFError("no rank takes this")


class Flat(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")

    def __reduce__(self) -> Any:
        raise ValueError("no pickle")


def raise_flat() -> None:
    raise Flat


class Numbered(Exception):
    """An exception that can be pickled, but not unpickled anywhere: only its text is kept."""

    def __init__(self, number: int, words: str) -> None:
        super().__init__(f"{words}, {number}")


class Renamed(Exception):
    """An exception that unpickles as something else."""

    def __reduce__(self) -> Any:
        return str, ("no error",)


def raise_one(kind: type[Exception], *args: Any) -> None:
    raise kind(*args)


def test_an_interrupted_call_ends_the_pool(pool: iris.RankPool) -> None:
    pids = [process.pid for process in pool.processes]
    main = threading.main_thread().ident
    assert main is not None and pool.run(same, (0,)) == [0, 0]
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pool.run(sleep, (30,))
    assert not pool.alive and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(iris.LaunchError, match=r"no ranks any more: .*KeyboardInterrupt\)\. Make a new iris\.RankPool"):
        pool.run(same, (1,))


class Cancelled(BaseException):
    """Like asyncio's error, and what pytest.fail raises, this is no Exception."""


def cancel() -> None:
    raise Cancelled("by the program")


def test_whatever_a_rank_raises_is_told(pool: iris.RankPool) -> None:
    with pytest.raises(iris.LaunchError, match=r"failed.*Cancelled: by the program$") as raised:
        pool.run(cancel)
    assert isinstance(raised.value.__cause__, Cancelled)
    assert pool.run(same, (1,)) == [1, 1]


def test_a_rank_that_leaves_early_is_told(pool: iris.RankPool) -> None:
    with pytest.raises(iris.LaunchError, match=r"failed.*process ended: exit code 0, before its function returned$"):
        pool.run(os._exit, (0,))


def interruptible() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ranks_without_a_call_live_through_ctrl_c(pool: iris.RankPool) -> None:
    """A terminal sends it to all its processes."""
    pool.run(interruptible)
    time.sleep(0.2)  # the answer is sent before a rank waits again
    for process in pool.processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
    assert pool.run(same, (1,)) == [1, 1]


@pytest.mark.parametrize("end", [iris.RankPool.kill, iris.RankPool.close])
def test_a_pool_that_the_handler_of_a_signal_ends(pool: iris.RankPool, end: Callable[[iris.RankPool], None]) -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: end(pool))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(iris.LaunchError, match=r"^the call was broken off: it was (killed|closed)$"):
            pool.run(sleep, (1.5,))
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_call_after_one_that_took_too_long_says_so(pool: iris.RankPool) -> None:
    with pytest.raises(iris.LaunchError, match=r"did not finish within 0\.2 s and were ended$"):
        pool.run(sleep, (30,), timeout_s=0.2)
    with pytest.raises(iris.LaunchError, match=r"no ranks any more: .*within 0\.2 s.*Make a new iris\.RankPool"):
        pool.run(same, (1,))


def test_a_call_that_a_rank_does_not_read_ends_in_time(pool: iris.RankPool) -> None:
    """The call is larger than a pipe holds, and the rank has been stopped."""
    pid = pool.processes[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(iris.LaunchError, match=r"ranks \[1\] did not finish within 2 s and were ended$"):
        pool.run(same, (bytes(8 << 20),), timeout_s=2)
    assert time.monotonic() - started < 10 and not any(sender.is_alive() for sender in pool._senders)


def fail_on(rank: int, others_s: float, why: str = "wrong") -> float:
    if os.environ["IRIS_RANK"] == str(rank):
        raise ValueError(why)
    return sleep(others_s)


def test_who_is_waited_for_when_a_rank_has_failed_is_told(
    pool: iris.RankPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["iris.launch"], "_TOLD_AFTER_S", 0.2)
    for timeout_s, at_most in ((None, 9), (8.4, 8)):
        outcomes = pool.outcomes(fail_on, (0, 1.0), timeout_s=timeout_s, grace_s=9)
        assert outcomes[1].value == 1.0
        told = capsys.readouterr().err
        assert told == f"rank 0 failed: ValueError: wrong\nwaiting for ranks [1], {at_most} s at most\n"
    pool.outcomes(fail_on, (1, 0.0), grace_s=9)
    assert capsys.readouterr().err == "", "others that end at once need no words"


@pytest.mark.parametrize("stream", ["ascii", "closed", None])
def test_words_that_cannot_be_printed_end_nothing(
    pool: iris.RankPool, monkeypatch: pytest.MonkeyPatch, stream: str | None
) -> None:
    monkeypatch.setattr(sys.modules["iris.launch"], "_TOLD_AFTER_S", 0.1)
    errors = None if stream is None else io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    if errors is not None and stream == "closed":
        errors.close()
    with monkeypatch.context() as change:
        change.setattr(sys, "stderr", errors)
        outcomes = pool.outcomes(fail_on, (0, 0.5, "é"), grace_s=9)
    assert str(outcomes[0].error) == "é" and outcomes[1].value == 0.5


def test_a_server_that_is_started_anew_is_met_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before may have been killed. Other servers of this process make their own folders as before."""
    server, settings = SimpleNamespace(), vars(multiprocessing.current_process())["_config"]
    before, folders = settings.get("tempdir"), list[Path]()
    monkeypatch.setattr(multiprocessing.forkserver, "_forkserver", server)
    monkeypatch.setattr(forkserver, "_server_sockets", [])
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
            with forkserver._no_folder_left():
                folders.append(Path(settings["tempdir"]))
                server._forkserver_address = str(folders[-1] / "listener")
                listener.bind(server._forkserver_address)
                listener.listen()
            caller.connect(server._forkserver_address)
        assert settings.get("tempdir") == before and not folders[-1].exists()
    (left,) = forkserver._server_sockets
    os.close(left)


@pytest.mark.parametrize("descriptor", some([1, 2]))
def test_ranks_print_into_nothing_where_nothing_is_open(descriptor: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        import iris

        def speak():
            for stream in (sys.stdout, sys.stderr):
                stream.write("hello\\n")  # at once, as another rank may write between two writes
                stream.flush()

        if __name__ == "__main__":
            iris.launch(speak, 2)
    """)
    )
    done = subprocess.run(
        ["bash", "-c", f'exec "$0" "$1" {descriptor}>&-', sys.executable, str(script)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).split() == ["hello"] * 2


@pytest.mark.parametrize("raised", [False, True])
def test_what_cannot_be_unpickled_here_is_an_error_of_its_rank(pool: iris.RankPool, raised: bool) -> None:
    with pytest.raises(iris.LaunchError) as caught:
        pool.run(give_homesick, (raised,))
    said = str(caught.value)
    assert "cannot be unpickled where the rank was started: RuntimeError: this is no rank" in said
    told = "".join(traceback.format_exception(caught.value))
    assert ("in give_homesick" in told and "Homesick: far away" in said) == raised
    assert pool.run(same, (1,)) == [1, 1]


@pytest.mark.parametrize("given", [(Numbered, 3, "no luck"), (Renamed, "no luck, 3")], ids=["args", "kind"])
def test_an_exception_that_is_none_behind_its_pickle_says_the_same(pool: iris.RankPool, given: tuple[Any, ...]) -> None:
    with pytest.raises(iris.LaunchError) as caught:
        pool.run(raise_one, given)
    said, cause = str(caught.value), caught.value.__cause__
    assert f"{given[0].__name__}: no luck, 3" in said and "cannot be unpickled" not in said
    assert type(cause) is iris.LaunchError and pool.alive


def test_an_exception_without_words_is_reported(pool: iris.RankPool) -> None:
    with pytest.raises(iris.LaunchError, match=r"^rank \d failed") as caught:
        pool.run(raise_flat)
    assert "in raise_flat" in "".join(traceback.format_exception(caught.value))
    assert pool.alive and pool.run(same, (1,)) == [1, 1]


def test_what_cannot_be_pickled_for_every_rank_goes_to_none(pool: iris.RankPool) -> None:
    with pytest.raises(iris.LaunchError, match="cannot be sent to ranks: ValueError: not again"):
        pool.run(same, (Once(),))
    assert pool.run(same, (1,)) == [1, 1]


def test_tensors_reach_every_rank(pool: iris.RankPool) -> None:
    assert [one.tolist() for one in pool.run(same, (torch.arange(3),))] == [[0, 1, 2]] * 2


def test_what_a_rank_cannot_unpickle_comes_with_its_traceback(pool: iris.RankPool) -> None:
    with pytest.raises(iris.LaunchError) as caught:
        pool.run(same, (Nowhere(),))
    said = str(caught.value)
    assert "a rank cannot unpickle the function, or its arguments: EOFError: no rank" in said
    assert "in refuse_rank" in "".join(traceback.format_exception(caught.value))
    assert "Define them at the top level of a module" in said and isinstance(caught.value.__cause__, iris.LaunchError)
    assert pool.alive and pool.run(same, (1,)) == [1, 1]


def test_a_function_under_the_guard_is_explained(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text('import iris\nif __name__ == "__main__":\n    def f(): pass\n    iris.launch(f, 1)\n')
    done = subprocess.run([python(), str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert "Can't get attribute 'f'" in done.stderr
    assert 'not under `if __name__ == "__main__":` or in a function' in done.stderr


def test_calls_of_several_threads_take_turns(pool: iris.RankPool) -> None:
    with ThreadPoolExecutor(8) as threads:
        numbers = list(range(200))
        assert list(threads.map(lambda number: pool.run(same, (number,)), numbers)) == [[one, one] for one in numbers]


@pytest.mark.parametrize(
    ("end", "how"), [(iris.RankPool.close, "it was closed"), (iris.RankPool.kill, "it was killed")]
)
def test_a_call_of_a_pool_that_ended(pool: iris.RankPool, end: Any, how: str) -> None:
    end(pool)
    end(pool)
    with pytest.raises(iris.LaunchError, match=f"this pool has no ranks any more: {how}. Make a new iris.RankPool"):
        pool.run(same, (1,))


def test_a_kill_by_another_thread_ends_the_call(pool: iris.RankPool) -> None:
    threading.Timer(0.3, pool.kill).start()
    with pytest.raises(iris.LaunchError, match="killed by signal 9"):
        pool.run(sleep, (30,))


def test_what_is_no_function_is_an_error(pool: iris.RankPool) -> None:
    calls: tuple[Callable[[Any], object], ...] = pool.run, partial(iris.launch, num_ranks=2)
    for call in calls:
        with pytest.raises(iris.ArgumentError, match=r"fn: expected a function, got None\. Pass the function itself"):
            call(None)


@pytest.mark.parametrize(
    "args",
    [3, None, "run.json", b"x", {"x": 5}, {7}, (i for i in [7]), torch.ones(2)],
    ids=lambda value: type(value).__name__,
)
def test_arguments_that_are_no_list(pool: iris.RankPool, args: Any) -> None:
    for call in (pool.run, pool.outcomes, partial(iris.launch, num_ranks=2)):
        with pytest.raises(iris.ArgumentError, match=r"args: expected a tuple or list, got .*\(argument,\)"):
            call(same, args=args)


@pytest.mark.parametrize("env", [{"FOO": 5}, {5: "x"}, [1]])
def test_variables_that_are_no_texts(env: Any) -> None:
    with pytest.raises(iris.ArgumentError, match="RankPool: env: expected a dict of texts, got"):
        iris.RankPool(1, env=env)


@pytest.mark.parametrize("timeout_s", ["x", 0, -1.0, float("nan"), True, [1]])
def test_a_timeout_that_is_no_time(pool: iris.RankPool, timeout_s: Any) -> None:
    for call in (pool.run, pool.outcomes, lambda *args, **more: iris.launch(same, 1, *args[1:], **more)):
        with pytest.raises(iris.ArgumentError, match=r"timeout_s: expected more than 0 seconds, or None"):
            call(same, (1,), timeout_s=timeout_s)
    assert pool.run(same, (1,)) == [1, 1]


@pytest.mark.parametrize(
    "timeout_s",
    [float("inf"), 1e300, 10**400, 1e8, None, np.float32(60), np.int64(60)],
    ids=["inf", "1e300", "huge", "1e8", "none", "float32", "int64"],
)
def test_a_timeout_of_any_length(pool: iris.RankPool, timeout_s: Any) -> None:
    assert pool.run(sleep, (0.01,), timeout_s=timeout_s) == [0.01, 0.01]


def test_a_long_wait_is_made_of_shorter_ones(pool: iris.RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["iris.launch"], "MAX_WAIT_S", 0.05)
    assert pool.run(sleep, (0.3,), timeout_s=20) == [0.3, 0.3]
    with pytest.raises(iris.LaunchError, match=r"did not finish within 0\.3 s"):
        pool.run(sleep, (30,), timeout_s=0.3)


def environment() -> dict[str, str]:
    return dict(os.environ)


def ranks_environment() -> dict[str, str]:
    with iris.RankPool(1) as pool:
        found: dict[str, str] = pool.run(environment)[0]
    return found


def test_ranks_have_the_environment_of_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"IRIS_RANK", IN_A_RANK, "IRIS_JOB"}
    for value in ("one", "two", None):
        if value is None:
            monkeypatch.delenv("SOME_VARIABLE")
        else:
            monkeypatch.setenv("SOME_VARIABLE", value)
        found = ranks_environment()
        assert {name: text for name, text in found.items() if name not in own} == {
            name: text for name, text in os.environ.items() if name not in own
        }
        assert (found["IRIS_RANK"], found[IN_A_RANK]) == ("0", "1")


def test_a_pools_own_variables_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRIS_LOG_LEVEL", "error")
    with iris.RankPool(1, {"IRIS_LOG_LEVEL": "info", "IRIS_RANK": "7"}) as pool:
        found = pool.run(environment)[0]
    assert (found["IRIS_LOG_LEVEL"], found["IRIS_RANK"]) == ("info", "0")


def gpus() -> int:
    return torch.cuda.device_count()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="about GPUs")
def test_ranks_see_the_gpus_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    here, all_gpus = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    for visible, count in ((here, all_gpus), ("0", 1), ("", 0), (here, all_gpus)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with iris.RankPool(1) as pool:
            assert pool.run(gpus) == [count]


def load() -> list[list[float]]:
    loader = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2, num_workers=2)
    return [batch.tolist() for (batch,) in loader]


def fork_one() -> int | None:
    child = multiprocessing.Process(target=os._exit, args=(5,))
    child.start()
    child.join()
    return child.exitcode


def nest() -> list[int]:
    with iris.RankPool(2) as inner:
        return inner.run(same, (3,))


def start_method() -> str:
    return multiprocessing.get_start_method()


def fork_and_die(by_a_shell: bool) -> None:
    """Leave a child that lives much longer than this rank."""
    if os.environ["IRIS_RANK"] == "1":
        if by_a_shell:
            os.system("sleep 20 >/dev/null 2>&1 &")
        elif os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_can_have_children(pool: iris.RankPool) -> None:
    assert pool.run(fork_one) == [5, 5]
    assert pool.run(load) == [[[0.0, 1.0], [2.0, 3.0]]] * 2
    assert pool.run(nest) == [[3, 3]] * 2
    assert pool.run(start_method) == [multiprocessing.get_start_method()] * 2


@pytest.mark.parametrize("by_a_shell", [False, True])
def test_a_rank_that_dies_is_noticed_whatever_it_forked(pool: iris.RankPool, by_a_shell: bool) -> None:
    started = time.monotonic()
    with pytest.raises(iris.LaunchError, match=r"^rank 1 failed: process ended: killed by signal 9$"):
        pool.run(fork_and_die, (by_a_shell,))
    assert time.monotonic() - started < 10
    with pytest.raises(iris.LaunchError, match="this pool has no ranks any more: rank 1's process ended: killed by"):
        pool.run(start_method)


def test_a_forked_child_does_not_end_its_parents_ranks() -> None:
    script = """
        import os, sys
        import iris

        if __name__ == "__main__":
            with iris.RankPool(2) as pool:
                if os.fork() == 0:
                    try:
                        pool.run(os.getpid)
                    except iris.LaunchError as error:
                        print(error, flush=True)
                    sys.exit(0)
                os.wait()
                print(pool.alive, len(pool.run(os.getpid)))
    """
    done = subprocess.run([python(), "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    told = "this pool has no ranks any more: they belong to the process that this one was forked from. Make a new"
    assert told in done.stdout and done.stdout.endswith("True 2\n"), done.stdout + done.stderr


def stop_in_the_middle_of_the_answer() -> None:
    from multiprocessing.connection import Connection

    send = Connection._send  # type: ignore[attr-defined]

    def send_half(self: Any, content: bytes, *options: Any) -> None:
        send(self, content[: len(content) // 2], *options)
        os.kill(os.getpid(), signal.SIGSTOP)

    Connection._send = send_half  # type: ignore[attr-defined]


def test_a_rank_that_stops_in_the_middle_of_its_answer_is_ended(pool: iris.RankPool) -> None:
    started = time.monotonic()
    with pytest.raises(iris.LaunchError, match="did not finish sending its result within 2 s and was ended"):
        pool.run(stop_in_the_middle_of_the_answer, timeout_s=2)
    assert time.monotonic() - started < 8


def test_pools_that_two_threads_start_leave_the_settings_of_multiprocessing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before, seen = settings.get("tempdir"), []

    def run() -> None:
        seen.append(settings["tempdir"])
        time.sleep(0.1)

    monkeypatch.setattr(multiprocessing.forkserver, "ensure_running", run)
    threads = [threading.Thread(target=forkserver.start_server) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert settings.get("tempdir") == before and len(set(seen)) == 2


def test_a_pool_closes_at_once_whatever_was_forked_meanwhile(pool: iris.RankPool) -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()  # it also has the pipes of the pool
    try:
        started = time.monotonic()
        pool.close()
        assert time.monotonic() - started < 8
    finally:
        child.kill()
        child.join()


REFUSED = """
    import multiprocessing, os, resource, sys, tempfile
    import iris

    def say():
        try:
            iris.launch(os.getpid, 2)
        except iris.LaunchError as error:
            print(error)

    if __name__ == "__main__":
        case = sys.argv[1]
        if case == "files":
            free = os.dup(0)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, free + 1))  # one file, but no pipe
        if case == "folder":
            tempfile.tempdir = os.path.join(os.path.dirname(sys.argv[0]), "d" * 120)
            os.mkdir(tempfile.tempdir)
        if case in ("daemon", "forked"):
            if case == "forked":
                iris.launch(os.getpid, 1)
            child = multiprocessing.get_context("fork").Process(target=say, daemon=case == "daemon")
            child.start()
            child.join()
        else:
            say()
"""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("files", r"ranks cannot be started: OSError: .* Too many open files\. The limits on open files .*ulimit -n"),
        ("folder", r"ranks cannot be started: OSError: AF_UNIX path too long\. .*TMPDIR must be a folder with a short"),
        (
            "daemon",
            r"ForkProcess-1 is a daemon of multiprocessing, .* may not start ranks\. Start them in the process that",
        ),
        ("forked", r"this process was forked from one that has started ranks, .* or start the ranks in its parent"),
    ],
    ids=["files", "folder", "daemon", "forked"],
)
def test_ranks_that_cannot_be_started(case: str, words: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(REFUSED))
    environment = {name: value for name, value in os.environ.items() if name != IN_A_RANK}
    done = subprocess.run(
        [python(), str(script), case], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert re.match(words, done.stdout), done.stdout + done.stderr


def test_a_full_shared_memory_is_told(pool: iris.RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(ForkingPickler, "dumps", refuse)
    with pytest.raises(iris.LaunchError, match=r"No space left on device \(28\)\. Tensors go through shared memory"):
        pool.run(same, (torch.zeros(4),))


PARENT = """
    import multiprocessing, os, sys, time
    import iris

    def rest():
        time.sleep(600)

    def have_children():
        children = [multiprocessing.Process(target=rest, daemon=daemon) for daemon in (False, True)]
        for child in children:
            child.start()

    def nest():
        global inner
        inner = iris.RankPool(1)
        inner.run(os.getpid)

    if __name__ == "__main__":
        pool = iris.RankPool(2)
        pool.run(have_children)
        if "nest" in sys.argv:
            pool.run(nest)
        print("ready", flush=True)
        if "busy" in sys.argv:
            pool.run(rest)
        rest()
"""


def marked(marker: str) -> set[int]:
    """Running processes that were started with ``marker`` in their environment."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            zombie = (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if not zombie and marker.encode() in (process / "environ").read_bytes():
                found.add(int(process.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("words", some([["idle"], ["busy", "nest"]]), ids=" ".join)
def test_nothing_outlives_a_parent_that_is_killed(words: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(PARENT))
    marker = f"{tmp_path}-{os.getpid()}"
    temporary = Path(tempfile.mkdtemp())  # tmp_path is too long for a socket
    parent = subprocess.Popen(
        [sys.executable, str(script), *words],
        env={**os.environ, "IRIS_TEST": marker, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
    time.sleep(0.3)
    assert len(marked(marker)) >= 1 + 1 + 2 + 4, "the parent, the server, ranks and their children"
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while (left := marked(marker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == set()
    left_there = list(temporary.iterdir())
    shutil.rmtree(temporary)
    assert BACKEND != "sim" or left_there == []  # compilers leave theirs


FORKING = """
    import os, signal, time
    import iris

    if __name__ == "__main__":
        pool = iris.RankPool(2)
        print(*pool.run(os.getpid), flush=True)
        if os.fork() == 0:
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_end_with_their_parent_though_its_children_live(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(FORKING))
    marker = f"{tmp_path}-{os.getpid()}"
    environment = {**os.environ, "IRIS_TEST": marker}
    with subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        ranks = {int(pid) for pid in parent.stdout.readline().split()}
        parent.wait()
        deadline = time.monotonic() + 10
        while (left := ranks & marked(marker)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in marked(marker):
            os.kill(pid, signal.SIGKILL)
    assert len(ranks) == 2 and left == set()


def test_a_tensor_that_is_given_away_stays_where_it_is(pool: iris.RankPool) -> None:
    assert [given.tolist() for given in pool.run(keep_and_give)] == [[1.0] * 4, [2.0] * 4]
    assert pool.run(still_symmetric) == [True, True]


def raise_in_turn() -> None:
    """Ranks 1 and 2 have waited for rank 0; rank 0 itself adds what it waited for, and raises last."""
    rank = int(os.environ["IRIS_RANK"])
    time.sleep(0.0 if rank else 0.3)
    raise iris.WaitTimeout(f"rank 1 waited for rank 0.{'' if rank else ' On this rank: flag[3]'}", [0])


def test_of_waits_in_vain_that_of_the_rank_which_others_waited_for_is_told() -> None:
    with pytest.raises(iris.LaunchError, match=r"^rank 0 failed \(also failed: .*rank 0\. On this rank: flag\[3\]"):
        iris.launch(raise_in_turn, num_ranks=3)
