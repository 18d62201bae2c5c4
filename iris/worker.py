"""A rank in a process that Iris started: it runs the functions that its pipe brings, until it is told to leave."""

from __future__ import annotations

import contextlib
import gc
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
from iris.live import OPEN, close, give_up, real_error

INTERPRET = "TRITON_INTERPRET"
FAREWELL = b""
"""Sent instead of a call: the rank is to leave. Closing the pipe tells it, too, but not while a process that was forked
in the meantime holds the pipe open."""
_NOT_HERE = (
    "a rank cannot unpickle the function, or its arguments: {}. Define them at the top level of a module or script "
    'that a rank can import, not under `if __name__ == "__main__":` or in a function.'
)


def serve(pipe: multiprocessing.connection.Connection, variables: dict[str, str], start_method: str | None) -> None:
    """Be a rank: answer every call that ``pipe`` brings, until the pipe closes or brings the farewell, or the process
    that started the rank is gone.

    Args:
        pipe: brings pickled calls; each is answered by a pair: the traceback, empty if there is none, and the pickled
            value.
        variables: the rank's environment. It replaces that of the server which the rank was forked from, except
            TRITON_INTERPRET, which must agree with the backend that Iris chose when it was imported.
        start_method: how multiprocessing starts processes in this rank: as in the process that started the rank.
    """
    kept = {INTERPRET: os.environ[INTERPRET]} if INTERPRET in os.environ else {}
    os.environ.clear()
    os.environ.update(kept | variables)
    multiprocessing.current_process().daemon = False  # else it could have no children, such as a DataLoader's workers
    multiprocessing.set_start_method(start_method, force=True)
    os.set_inheritable(pipe.fileno(), False)  # nor held by programs that other code than Python starts
    os.register_at_fork(after_in_child=pipe.close)  # the pipe must close with the rank, whatever it forks
    threading.Thread(target=_end_with_parent, name="iris-parent", daemon=True).start()
    gc.freeze()  # what the server has imported stays, and takes a tenth of a second to look through for garbage
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
    """Ignore Ctrl-C, which a terminal sends to all its processes, while the rank waits for its next call. (If SIGINT is
    blocked, it stays pending: some programs handle it later.)"""
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
    """End this process and its children, even if it is busy, when the process that started it is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    signs = [parent.sentinel]  # may outlive the parent, as processes that it forks hold it, too
    with contextlib.suppress(OSError):  # gone already, or Linux before 5.3
        signs.append(os.pidfd_open(parent.pid))
    multiprocessing.connection.wait(signs)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


def _answer(call: bytes) -> tuple[str, bytes]:
    """Run a pickled call. Returns the traceback, empty if it returned, and what it returned or raised, pickled."""
    try:
        fn, args, last = ForkingPickler.loads(call)
    except Exception as error:  # noqa: BLE001 (unpickling runs any code)
        text = _NOT_HERE.format(described(error))
        return f"{traceback.format_exc()}{text}", pickle.dumps(LaunchError(text))
    before = set(OPEN)
    try:
        try:
            value = fn(*args)
        except SystemExit as left:  # handled as if a script or a torchrun rank left by it
            if (failed := real_error(left)) is not None:
                give_up(before, failed)
                raise
            value = None
        sent = _result(value)  # before the memory of the value is freed
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
    """The value that a function returned, pickled."""
    try:
        return pickle.dumps(value)  # ForkingPickler would move a tensor that the rank keeps into other memory
    except Exception as error:  # noqa: BLE001 (pickling runs any code)
        raise LaunchError(f"its result cannot be sent back: {described(error)}") from None


def _portable(error: BaseException) -> bytes:
    """``error``, pickled, if it can be unpickled again; else an error with the same text."""
    with contextlib.suppress(Exception):  # pickling runs any code
        pickled = pickle.dumps(error)
        if isinstance(pickle.loads(pickled), BaseException):
            return pickled
    return pickle.dumps(LaunchError(described(error)))
