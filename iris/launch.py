"""Ranks that Iris starts itself, on this host.

:func:`launch` starts N ranks and runs a function on each. In a process that already is a rank (under torchrun, mpirun
or srun), it just calls the function. So one script works under every launcher::

    if __name__ == "__main__":
        iris.launch(main, num_ranks=4)

:class:`RankPool` keeps the ranks alive for many short jobs.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import multiprocessing.connection
import numbers
import os
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from iris.device.handle import MAX_RANKS
from iris.errors import ArgumentError, IrisError, LaunchError, PeerDied, WaitTimeout, whole_number, words_of
from iris.forkserver import GUARD, NO_GUARD, RANK_NAME, check_importable, launch_errors, no_false_main, start_server
from iris.identity import identity
from iris.processes import in_children
from iris.timeouts import MAX_WAIT_S
from iris.worker import FAREWELL, INTERPRET, described, serve

_GRACE_S = 30.0
"""How long other ranks may go on after one has failed. Those that wait for it are told at once; the work of the rest
may be worth finishing, or may never end."""
_TOLD_AFTER_S = 2.0
"""How long after a failure the user is told that other ranks are still running."""
_HELD_NBYTES = 32 << 10
"""Bytes of a call that fit in a pipe even if the rank does not read it."""


def launch(
    fn: Callable[..., Any], num_ranks: int, args: Sequence[Any] = (), *, timeout_s: float | None = None
) -> list[Any]:
    """Run ``fn(*args)`` on ``num_ranks`` ranks of this host and return their results in rank order.

    Where this process already is a rank (under torchrun, mpirun, srun, or an outer ``launch``), ``fn`` is called once,
    in this process, and the list holds that one result. The launcher's world size then counts, not ``num_ranks``. (A
    step of Slurm with one task, as of ``srun --pty bash``, is no launch.)

    Args:
        fn: a function importable by name (defined at the top level of a module or script, but not of a
            ``__main__.py``). A script calls ``launch`` under ``if __name__ == "__main__":``, as every rank imports it.
        num_ranks: how many processes to start, 1 to 16.
        args: passed to every rank; must be picklable. Ranks have this process's environment; see :class:`RankPool`.
        timeout_s: end the ranks and raise if they take longer; None waits as long as it takes. It does not apply to
            ranks that another launcher has started.

    If ``fn`` leaves a context open, it is closed when ``fn`` returns, as ``with`` would do, so that peers which still
    wait for this rank are told; if ``fn`` raises, they are told why. When a rank has failed, the others are ended if
    they are not done after 30 s; before that, a line on stderr says which ranks are waited for.

    Raises:
        LaunchError: a rank failed, time ran out, or ranks cannot be started like this. The error names the ranks that
            failed and quotes the first exception, which is its ``__cause__`` and has the rank's traceback.
        ArgumentError: ``fn`` is no function, ``timeout_s`` no time, or ``args`` no tuple or list.
    """
    _check_function("launch", fn)
    _check_number(num_ranks)
    _check_args("launch", args)
    _check_timeout("launch", timeout_s)
    if identity() is not None:
        return [fn(*args)]
    with RankPool(num_ranks) as pool:
        return _results(pool.outcomes(fn, args, timeout_s=timeout_s, grace_s=_GRACE_S, last=True))


@dataclass(frozen=True)
class _Outcome:
    """What one rank sent back."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    at: float = 0.0


class RankTraceback(Exception):
    """A rank's traceback as text, since tracebacks cannot be pickled; set as the cause of the rank's exception."""


def _failure(outcomes: Iterable[_Outcome], late: str = "") -> LaunchError | None:
    """The error that says which ranks failed, what the first one raised, and who was late; None if none failed.

    The first failure is one that is no consequence of another. If there is none, it is that of a rank for which others
    waited, although that rank may itself have waited for another.
    """
    failed = [one for one in outcomes if one.error is not None]
    missed = {rank for one in failed if isinstance(one.error, PeerDied | WaitTimeout) for rank in one.error.ranks}
    failed.sort(key=lambda one: (isinstance(one.error, PeerDied | WaitTimeout), one.rank not in missed, one.at))
    if not failed:
        return None
    first, *others = failed
    assert first.error is not None
    also = f" (also failed: {', '.join(str(one.rank) for one in others)})" if others else ""
    ours = type(first.error) is LaunchError
    what = words_of(first.error).removeprefix(f"rank {first.rank}'s ") if ours else described(first.error)
    error = LaunchError("\n".join([f"rank {first.rank} failed{also}: {what}", *([late] if late else [])]))
    error.__cause__ = first.error
    # Without the error's own text, which is printed below the trace.
    if trace := first.trace.strip().removesuffix(described(first.error)).removesuffix(what).rstrip():
        cause = RankTraceback(f"rank {first.rank}:\n{trace}")
        BaseException.__setattr__(first.error, "__cause__", cause)  # plain assignment may fail for a user's class
    return error


def in_full(error: IrisError) -> IrisError:
    """``error`` for a command that prints no causes. If a rank raised an error of Iris's, that error says enough and is
    returned; otherwise ``error`` with the traceback of the rank that failed first, if there is one."""
    if isinstance(error.__cause__, IrisError):
        return error.__cause__
    trace = error.__cause__ and error.__cause__.__cause__
    return LaunchError(f"{error}\n{trace}") if isinstance(trace, RankTraceback) else error


def _results(outcomes: list[_Outcome]) -> list[Any]:
    """What the ranks returned. Raises if one failed."""
    if error := _failure(outcomes):
        raise error
    return [one.value for one in outcomes]


class RankPool:
    """Live ranks that run one function after another, so that many short jobs need one start.

    A rank whose function raises stays alive. If a rank dies, the pool becomes unusable (``alive`` is False). If a call
    breaks off half way, by Ctrl-C or because time ran out, all ranks are ended; Ctrl-C between calls ends none. Threads
    that call at the same time take turns.

    Ranks have the environment that this process has when the pool is made. But they are forked from a server that
    imports PyTorch and Iris at the first launch. So variables that are read during imports, such as OMP_NUM_THREADS and
    IRIS_BACKEND, have the values of that time; this also holds for those that a script reads while a rank imports it.
    CUDA_VISIBLE_DEVICES is taken from the newer environment, because the server does not initialise CUDA.

    A rank may start processes of its own. A rank ends, whatever it is doing, when the process that started it is gone.
    """

    def __init__(self, num_ranks: int, env: dict[str, str] | None = None) -> None:
        _check_number(num_ranks)
        if num_ranks > MAX_RANKS.value:
            raise LaunchError(
                f"num_ranks must be at most {MAX_RANKS.value}, as many as a job may have, got {num_ranks}"
            )
        _check_env(env)
        context = start_server()
        self.num_ranks = int(num_ranks)
        self._pipes: list[multiprocessing.connection.Connection] = []
        self.processes: list[ForkServerProcess] = []
        self._senders: list[threading.Thread] = []
        self._turn = threading.RLock()
        self._over = ""
        in_children(self, RankPool._disown)
        shared = _passed_on() | (env or {}) | {"IRIS_WORLD_SIZE": str(self.num_ranks), "IRIS_JOB": secrets.token_hex(8)}
        method = multiprocessing.get_start_method(allow_none=True)
        try:
            with launch_errors():
                for rank in range(self.num_ranks):
                    ours, theirs = context.Pipe()
                    self._pipes.append(ours)
                    args = theirs, {**shared, "IRIS_RANK": str(rank)}, method
                    process = context.Process(target=serve, args=args, name=f"{RANK_NAME}{rank}", daemon=True)
                    with no_false_main():
                        process.start()
                    self.processes.append(process)
                    theirs.close()
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        """Whether the processes of all ranks are running."""
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), *, timeout_s: float | None = None) -> list[Any]:
        """Run ``fn(*args)`` on every rank; results in rank order. Errors as for :func:`launch`."""
        return _results(self.outcomes(fn, args, timeout_s=timeout_s))

    def outcomes(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        *,
        timeout_s: float | None = None,
        grace_s: float = math.inf,
        last: bool = False,
    ) -> list[_Outcome]:
        """As :meth:`run`, but returns every rank's outcome, error or not. ``grace_s``: how long the other ranks may go
        on after one has failed. ``last``: close contexts that ``fn`` leaves open, since no later call can use them."""
        _check_function("run", fn)
        _check_args("run", args)
        _check_timeout("run", timeout_s)
        check_importable(fn)
        with self._turn:
            if self._over:
                raise LaunchError(f"this pool has no ranks any more: {self._over}. Make a new iris.RankPool.")
            # Pickled once for each rank: the handle by which a tensor's memory is sent can be used only once.
            calls = [_packed(fn, args, last) for _ in self._pipes]
            try:
                outcomes = self._exchange(calls, timeout_s, grace_s)
            except BaseException as error:
                # Ranks may still be busy, and would answer the next call with the value of this one.
                self._over = f"they were ended when a call broke off ({described(error)})"
                self.kill()
                raise
            self._over = self._lost()
            return outcomes

    def _exchange(self, calls: list[bytes], timeout_s: float | None, grace_s: float) -> list[_Outcome]:
        """Send every rank its call, and collect all outcomes."""
        limit_s = min(math.inf if timeout_s is None else timeout_s, threading.TIMEOUT_MAX)
        deadline, tell_at = time.monotonic() + limit_s, math.inf
        since, failing = "", False
        pending = dict(enumerate(self._pipes))
        outcomes: dict[int, _Outcome] = {}
        self._send(calls)
        while pending:
            now = time.monotonic()
            left = max(0.0, deadline - now)
            if now >= tell_at:
                tell_at = math.inf
                told = f"{_failure(outcomes.values())}\nwaiting for ranks {sorted(pending)}, {left:.0f} s at most"
                # stderr may be closed, have no reader, or not take this text.
                with contextlib.suppress(OSError, ValueError):
                    if sys.stderr is not None:
                        print(told, file=sys.stderr, flush=True)
            limit = min(left, tell_at - now, MAX_WAIT_S)
            ready = multiprocessing.connection.wait(list(pending.values()), limit)
            if not self._pipes:  # a signal handler in this thread has closed the pool
                raise LaunchError(f"the call was broken off: {self._over}")
            if not ready and left <= limit:
                late = f"ranks {sorted(pending)} did not finish within {limit_s:g} s{since} and were ended"
                raise _failure(outcomes.values(), late) or LaunchError(late)
            for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
                answer = self._answer(rank, deadline)
                if not self._pipes:
                    raise LaunchError(f"the call was broken off: {self._over}")
                if answer is None:
                    late = f"rank {rank} did not finish sending its result within {limit_s:g} s{since} and was ended"
                    raise _failure(outcomes.values(), late) or LaunchError(late)
                outcomes[rank] = self._outcome(rank, answer)
                del pending[rank]
                if outcomes[rank].error is None or failing or math.isinf(grace_s):
                    continue
                failing, tell_at = True, time.monotonic() + _TOLD_AFTER_S
                if deadline - time.monotonic() > grace_s:
                    limit_s, since = grace_s, f" of the failure of rank {rank}"
                    deadline = time.monotonic() + grace_s
        return [outcomes[rank] for rank in range(self.num_ranks)]

    def _send(self, calls: list[bytes]) -> None:
        """Send every rank its call. A thread sends one that does not fit in the pipe, since a rank may read it late, or
        never."""
        self._senders = []
        for pipe, call in zip(self._pipes, calls, strict=True):
            if len(call) <= _HELD_NBYTES:
                _send_to(pipe, call)
            else:
                self._senders.append(threading.Thread(target=_send_to, args=(pipe, call), daemon=True))
                self._senders[-1].start()

    def _answer(self, rank: int, deadline: float) -> tuple[str, bytes] | Exception | None:
        """The answer that ``rank`` has begun to send, or the error in which receiving it has ended; None if it is not
        complete by ``deadline``: the rank may have been stopped in between."""
        pipe = self._pipes[rank]
        found: list[tuple[str, bytes] | Exception] = []

        def receive() -> None:
            try:
                found.append(pipe.recv())
            except (EOFError, OSError) as error:
                found.append(error)

        receiver = threading.Thread(target=receive, daemon=True)
        receiver.start()
        receiver.join(float(max(0.0, deadline - time.monotonic())))
        return found[0] if found else None

    def _outcome(self, rank: int, answer: tuple[str, bytes] | Exception) -> _Outcome:
        if isinstance(answer, Exception):
            return self._ended(rank)
        trace, pickled = answer
        try:
            value = ForkingPickler.loads(pickled)
        except Exception as error:  # noqa: BLE001 (unpickling runs any code)
            what = f"its exception ({trace.strip().splitlines()[-1]})" if trace else "its result"
            text = f"{what} cannot be unpickled where the rank was started: {described(error)}"
            return _Outcome(rank, None, LaunchError(text), f"{trace}\n{traceback.format_exc()}", time.monotonic())
        return _Outcome(rank, None if trace else value, value if trace else None, trace, time.monotonic())

    def _ended(self, rank: int) -> _Outcome:
        """The outcome of a rank whose process ended before it answered."""
        self.processes[rank].join(5)
        if self.processes[rank].exitcode == NO_GUARD:
            return _Outcome(rank, None, LaunchError(GUARD), at=time.monotonic())
        early = ", before its function returned" if self.processes[rank].exitcode == 0 else ""
        error = LaunchError(f"rank {rank}'s process ended: {self._end_of(rank)}{early}")
        return _Outcome(rank, None, error, at=time.monotonic())

    def _end_of(self, rank: int) -> str:
        code = self.processes[rank].exitcode
        return f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    def _lost(self) -> str:
        """Which rank's process has ended; "" if all are running."""
        ended = [rank for rank, process in enumerate(self.processes) if not process.is_alive()]
        return f"rank {ended[0]}'s process ended: {self._end_of(ended[0])}" if ended else ""

    def kill(self) -> None:
        """End all ranks at once; a call in another thread then raises."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for sender in self._senders:  # ends soon: no rank is left to send to
            sender.join(1)
        self._over = self._over or "it was killed"
        self.close()

    def close(self) -> None:
        """End the ranks, after another thread's call if there is one. Each rank is told to leave, and is killed if it
        has not left within 10 s."""
        with self._turn:
            self._over = self._over or "it was closed"
            pipes, self._pipes = self._pipes, []
            processes, self.processes = self.processes, []
            for pipe in pipes:
                with contextlib.suppress(OSError):  # the rank has died
                    pipe.send_bytes(FAREWELL)
                pipe.close()
            deadline = time.monotonic() + 10
            try:
                for process in processes:
                    process.join(max(0.0, deadline - time.monotonic()))
            finally:
                for process in processes:
                    if process.is_alive():
                        process.kill()
                        process.join()
                    process.close()

    def _disown(self) -> None:
        """In a forked child: the ranks are the parent's. Multiprocessing would end them together with the child."""
        self._over, self._turn = "they belong to the process that this one was forked from", threading.RLock()
        for pipe in self._pipes:
            pipe.close()
        multiprocessing.process._children.difference_update(self.processes)  # type: ignore[attr-defined]
        self._pipes, self.processes, self._senders = [], [], []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _send_to(pipe: multiprocessing.connection.Connection, call: bytes) -> None:
    with contextlib.suppress(OSError):  # the rank has died, which reading its answer shows
        pipe.send_bytes(call)


def _passed_on() -> dict[str, str]:
    """The environment of this process for its ranks, without TRITON_INTERPRET, for which ranks keep the value of the
    server that they are forked from."""
    return {name: value for name, value in os.environ.items() if name != INTERPRET}


def _packed(fn: Callable[..., Any], args: Sequence[Any], last: bool) -> bytes:
    """A call as bytes."""
    try:
        return bytes(ForkingPickler.dumps((fn, tuple(args), last)))
    except Exception as error:
        fix = "Define what is sent at the top level of a module."
        if isinstance(error, OSError) or "shared memory" in str(error):
            fix = "Tensors go through shared memory: /dev/shm and the limit on open files (ulimit -n) must have room."
        raise LaunchError(f"{fn!r} and its arguments cannot be sent to ranks: {described(error)}. {fix}") from error


def _check_number(num_ranks: object) -> None:
    if whole_number(num_ranks) < 1:
        raise LaunchError(f"num_ranks must be a whole number, at least 1, got {num_ranks!r}")


def _check_env(env: object) -> None:
    if env is None:
        return
    whole = isinstance(env, dict) and all(isinstance(one, str) for pair in env.items() for one in pair)
    if not whole:
        raise ArgumentError("RankPool", "env", "a dict of texts", repr(env))


def _check_function(op: str, fn: object) -> None:
    if not callable(fn):
        raise ArgumentError(op, "fn", "a function", repr(fn), "Pass the function itself, not what it returns.")


def _check_args(op: str, args: object) -> None:
    if not isinstance(args, tuple | list):
        raise ArgumentError(op, "args", "a tuple or list", repr(args), "Of one argument pass (argument,).")


def _check_timeout(op: str, timeout_s: Any) -> None:
    number = isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (number and timeout_s > 0):
        raise ArgumentError(op, "timeout_s", "more than 0 seconds, or None for as long as it takes", repr(timeout_s))
