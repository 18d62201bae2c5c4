"""A rank's life in a process that Iris started: run the functions that come down its pipe, until it is to leave."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler

from iris.errors import LaunchError
from iris.live import OPEN, close, failure, give_up

INTERPRET = "TRITON_INTERPRET"
FAREWELL = b""
"""Sent instead of a call: leave. A pipe that is closed says so too, but not while a process that was forked in the
meantime holds it."""
_NOT_HERE = (
    "a rank cannot unpickle the function, or its arguments: {}. Define them at the top level of a module or script "
    'that a rank can import, not under `if __name__ == "__main__":` or in a function.'
)


def serve(pipe: multiprocessing.connection.Connection, variables: dict[str, str], start_method: str | None) -> None:
    """Be a rank: answer every call that comes down ``pipe``, until it closes, or brings the farewell, or the process
    that started it is gone.

    Args:
        pipe: brings pickled calls, and takes pairs: the traceback, empty if there is none, and the pickled value.
        variables: the rank's environment. The server that it was forked from may have had another one; of that,
            TRITON_INTERPRET alone stays, as it has to agree with the backend that Iris chose when it was imported.
        start_method: how multiprocessing starts processes of this rank, as where the rank was started.
    """
    kept = {INTERPRET: os.environ[INTERPRET]} if INTERPRET in os.environ else {}
    os.environ.clear()
    os.environ.update(kept | variables)
    multiprocessing.current_process().daemon = False  # else it could have no children, such as a DataLoader's workers
    multiprocessing.set_start_method(start_method, force=True)
    os.set_inheritable(pipe.fileno(), False)  # nor by programs that something else than Python starts
    os.register_at_fork(after_in_child=pipe.close)  # so that the pipe closes with the rank, whoever it has forked
    threading.Thread(target=_end_with_parent, name="iris-parent", daemon=True).start()
    while True:
        try:
            with _undisturbed():
                call = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        if call == FAREWELL:
            return
        answer = _answer(call)
        try:
            pipe.send(answer)
        except OSError:
            return


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C goes to all processes of a terminal, but ends no rank that waits for its next call. (One that is blocked
    stays pending: some programs look at it later.)"""
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def described(error: BaseException) -> str:
    """``error`` as the last line of its traceback."""
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _end_with_parent() -> None:
    """End this process, busy or not, and its children, when the process that started it is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    signs = [parent.sentinel]  # which a process that the parent has forked holds, too, and so may outlive it
    with contextlib.suppress(OSError):  # gone already, or Linux before 5.3
        signs.append(os.pidfd_open(parent.pid))
    multiprocessing.connection.wait(signs)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


def _answer(call: bytes) -> tuple[str, bytes]:
    """The traceback of a pickled call, empty if it returned, and what it returned or raised, pickled."""
    try:
        fn, args, last = ForkingPickler.loads(call)
    except Exception as error:  # noqa: BLE001 (unpickling runs any code)
        text = _NOT_HERE.format(described(error))
        return f"{traceback.format_exc()}{text}", pickle.dumps(LaunchError(text))
    before = set(OPEN)
    try:
        try:
            value = fn(*args)
        except SystemExit as left:  # as a script that returns from its end, and under torchrun
            if (failed := failure(left)) is not None:
                give_up(before, failed)
                raise
            value = None
        sent = _result(value)  # before the memory of what is sent is given back
        if last:
            close(before)
    except (SystemExit, KeyboardInterrupt):
        raise  # the process ends
    except BaseException as error:  # noqa: BLE001 (whatever else a rank raises is sent back)
        below = error.__traceback__ and error.__traceback__.tb_next  # without this function
        trace, sent = "".join(traceback.format_exception(type(error), error, below)), _portable(error)
        give_up(before, error)
        return trace, sent
    return "", sent


def _result(value: object) -> bytes:
    """What a function returned, pickled."""
    try:
        return pickle.dumps(value)  # ForkingPickler would move a tensor that the rank keeps into other memory
    except Exception as error:  # noqa: BLE001 (pickling runs any code)
        raise LaunchError(f"its result cannot be sent back: {described(error)}") from None


def _portable(error: BaseException) -> bytes:
    """``error``, pickled, if it survives that, else an error that says the same."""
    with contextlib.suppress(Exception):  # pickling runs any code
        pickled = pickle.dumps(error)
        if isinstance(pickle.loads(pickled), BaseException):
            return pickled
    return pickle.dumps(LaunchError(described(error)))
