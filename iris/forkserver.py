"""The process that ranks are forked from, and checks that it and the ranks can be started."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

from iris.errors import LaunchError
from iris.worker import INTERPRET, described

RANK_NAME = "iris-rank-"
"""The name of a rank's process, before its number."""
_server_sockets: list[int] = []
"""A descriptor of the socket of the process that ranks are forked from, if one has been started."""
_starting = threading.Lock()
"""Held while the server is started: this changes settings of the whole process."""
NO_GUARD = 93
"""Exit code of a rank whose script would start ranks while it is imported."""
GUARD = (
    'iris.launch was called while a new rank imported the script. Call it under `if __name__ == "__main__":`, so that '
    "only the first process starts ranks."
)


def start_server() -> ForkServerContext:
    """Start the server that ranks are forked from: a clean process that imports torch once, so that a rank starts in a
    tenth of a second."""
    _check_not_importing()
    _check_not_daemonic()
    _occupy_standard_streams()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["iris"])
    set_here = os.environ.pop(INTERPRET, None) if _interpret_is_ours() else None
    try:
        with launch_errors(), _starting, _no_folder_left():
            forkserver.ensure_running()
    finally:
        if set_here is not None:
            os.environ[INTERPRET] = set_here
    return context


def _occupy_standard_streams() -> None:
    """Open closed standard streams: else the server's pipes get their numbers, and ranks print into the pipes."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


@contextlib.contextmanager
def _no_folder_left() -> Iterator[None]:
    """Leave no socket of a server that the block starts in a folder, however this process ends: it is deleted at once,
    and reached through a descriptor (Linux). Multiprocessing would delete it only at a normal end of this process."""
    server: Any = forkserver._forkserver
    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before, folder = settings.get("tempdir"), tempfile.mkdtemp(prefix="iris-")
    settings["tempdir"] = folder
    try:
        yield
        if os.path.dirname(server._forkserver_address) == folder:
            while _server_sockets:
                os.close(_server_sockets.pop())
            _server_sockets.append(os.open(server._forkserver_address, os.O_PATH | os.O_CLOEXEC))
            server._forkserver_address = f"/proc/self/fd/{_server_sockets[0]}"
    finally:
        settings["tempdir"] = before
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))
            os.rmdir(folder)


@contextlib.contextmanager
def launch_errors() -> Iterator[None]:
    """Turn errors of the operating system while ranks are started into a :class:`LaunchError`."""
    try:
        yield
    except ChildProcessError as error:
        raise LaunchError(
            "this process was forked from one that has started ranks, and cannot start any itself. Start it with "
            "'spawn', or start the ranks in its parent."
        ) from error
    except (OSError, EOFError) as error:
        raise LaunchError(
            f"ranks cannot be started: {described(error)}. The limits on open files and processes (ulimit -n, -u) must "
            "leave room for them, and TMPDIR must be a folder with a short path that can be written."
        ) from error


def _interpret_is_ours() -> bool:
    """Whether Iris itself set TRITON_INTERPRET, as there is no GPU: new ranks then set it themselves, and know why."""
    given = Path("/proc/self/environ").read_bytes().split(b"\0")
    return not any(one.startswith(f"{INTERPRET}=".encode()) for one in given) and torch.cuda.device_count() == 0


def _check_not_importing() -> None:
    """Raise if this process still imports the main script: multiprocessing then cannot start others."""
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):
        return
    if process.name.startswith(RANK_NAME):
        os._exit(NO_GUARD)  # the process that started this one says why
    raise LaunchError(GUARD)


def _check_not_daemonic() -> None:
    """Raise if this process is a daemon: multiprocessing lets these have no children."""
    process = multiprocessing.current_process()
    if process.daemon:
        raise LaunchError(
            f"{process.name} is a daemon of multiprocessing, such as a worker of a Pool or a DataLoader, and may not "
            "start ranks. Start them in the process that made it."
        )


def _main_can_be_imported() -> bool:
    """Whether other processes can import ``__main__``. Not if it is no file, as with ``python -c``, standard input and
    notebooks; and not if it is a ``__main__.py``, which multiprocessing does not import in other processes."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return main.__spec__.name.rpartition(".")[2] != "__main__"
    return os.path.isfile(getattr(main, "__file__", None) or "")


@contextlib.contextmanager
def no_false_main() -> Iterator[None]:
    """Hide a ``__file__`` such as ``<stdin>``: multiprocessing takes it for a file that new processes must import."""
    main = vars(sys.modules["__main__"])
    hidden = {} if _main_can_be_imported() or "__file__" not in main else {"__file__": main.pop("__file__")}
    try:
        yield
    finally:
        main.update(hidden)


def check_importable(fn: Callable[..., Any]) -> None:
    inner = fn.func if isinstance(fn, functools.partial) else fn
    if getattr(inner, "__module__", None) == "__main__" and not _main_can_be_imported():
        raise LaunchError(
            f"{inner!r} is defined in a session, standard input, `python -c` or a __main__.py, from which no other "
            "process can import it. Put it in a module, a file of its own, and import it from there."
        )
