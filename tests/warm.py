"""Interpreters that have imported PyTorch already.

A test that runs a program waits 2 s for ``import torch``, and as long again if the program starts ranks.
:func:`python` is a replacement for ``sys.executable``: it runs a script, a module or a command as Python does, with the
same arguments, environment, folder and files, in a process forked from one that has imported PyTorch, but nothing of
Iris or Triton. If the program starts ranks, these are forked from another such process.

Four processes take part. The *server* imports PyTorch; there is one for each test process, and it ends with that. The
*stand-in* is the process that a test has started; it sends its files to a *keeper*, a fork of the server. The keeper
forks the *program*, waits for it, and kills it if the stand-in has been killed; the stand-in passes signals on to it.

Tests of launchers, of Ctrl-C, and of what outlives a process start real ones.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from functools import cache

_ADDRESS = "IRIS_TEST_WARM"
"""The variable with the address of the server."""
_HEEDED = {"PYTHONUTF8", "PYTHONCOERCECLOCALE", "PYTHONIOENCODING", "PYTHONHASHSEED"}
"""Variables that Python reads when it starts: with these, or with options unknown here, a real Python is started."""
_MOST_FDS = 64
_FAR = 512
"""More than the number of any file that a stand-in has open."""


@cache
def python() -> str:
    """The path of a program that stands in for ``sys.executable``."""
    import atexit
    import shlex
    import subprocess
    import tempfile
    from pathlib import Path

    folder = tempfile.TemporaryDirectory(prefix="iris-warm-")
    address, program = Path(folder.name, "server"), Path(folder.name, "python")
    words = ["env", f"{_ADDRESS}={address}", sys.executable, "-IS", __file__]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(_MOST_FDS)
        server = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno()), str(program)],
            env={name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "IRIS_"))},
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    atexit.register(folder.cleanup)
    atexit.register(server.communicate)
    return str(program)


def _stand_in(words: list[str]) -> None:
    """Have the server run ``words``, and end in the same way as that program."""
    address = os.environ.pop(_ADDRESS)
    fds = [fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")]
    parts = _parts(words)
    if parts is None or _HEEDED & set(os.environ) or "from multiprocessing.resource_tracker import main" in words[-1]:
        os.execv(sys.executable, [sys.executable, *words])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        request = json.dumps([*parts, dict(os.environ), os.getcwd(), fds]).encode()
        socket.send_fds(connection, [_number(len(request))], fds)
        connection.sendall(request)
        program = _received(connection)

        def pass_on(sort: int, _: object) -> None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(program, sort)

        for sort in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(sort, pass_on)
        while not select.select([connection], [], [], 0.1)[0]:
            pass  # Python sees a signal that comes just before it waits only after that
        ended = _received(connection)
    if ended < 0:
        if -ended != signal.SIGKILL:
            signal.signal(-ended, signal.SIG_DFL)
        os.kill(os.getpid(), -ended)
    os._exit(ended)


def _parts(words: list[str]) -> tuple[list[str], list[str]] | None:
    """The options in ``words``, and the program to run with its arguments. None: there is no program, or an option is
    unknown here."""
    for number, word in enumerate(words):
        if word in ("-c", "-m") or os.path.exists(word):
            return words[:number], words[number:]
        if word != "-u" and not word.startswith("-W"):
            return None
    return None


def _number(value: int) -> bytes:
    return value.to_bytes(4, "little", signed=True)


def _received(connection: socket.socket) -> int:
    told = connection.recv(4, socket.MSG_WAITALL)
    if len(told) < 4:
        sys.exit("tests/warm.py: the server, or the keeper of this program, has ended")
    return int.from_bytes(told, "little", signed=True)


def _serve(listener: socket.socket) -> tuple[list[str], list[str]]:
    """Fork a keeper for each stand-in, which forks a program. Returns only in the program: its :func:`_parts`."""
    import select

    while True:
        ready, _, _ = select.select([listener.fileno(), 0], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.detach()  # as below
            return _keep(connection)
        connection.close()
        while _reaped():
            pass


def _reaped() -> int:
    try:
        return os.waitpid(-1, os.WNOHANG)[0]
    except ChildProcessError:
        return 0


def _keep(connection: socket.socket) -> tuple[list[str], list[str]]:
    import select

    size, files, _, _ = socket.recv_fds(connection, 4, _MOST_FDS)
    request = connection.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
    options, words, environment, folder, fds = json.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    program = os.fork()
    if program == 0:
        connection.detach()  # its number may be one of the program's
        os.chdir(folder)
        _take(files, fds, "-u" in options or bool(os.environ.get("PYTHONUNBUFFERED")))
        return options, words
    for file in files:
        os.close(file)
    connection.sendall(_number(program))
    ended = os.pidfd_open(program)
    ready, _, _ = select.select([ended, connection.fileno()], [], [])
    if ended not in ready:
        os.kill(program, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    if ended in ready:
        connection.sendall(_number(status))
    os._exit(0)


def _take(files: list[int], fds: list[int], unbuffered: bool) -> None:
    """Make ``files``, with the numbers ``fds``, the only open files of this process."""
    import fcntl
    import io

    far = [fcntl.fcntl(file, fcntl.F_DUPFD, _FAR) for file in files]
    os.closerange(0, _FAR)
    for moved, fd in zip(far, fds, strict=True):
        os.dup2(moved, fd)
        os.close(moved)
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream = None
        if fd in fds:
            file = io.FileIO(fd, "w" if fd else "r", closefd=False)
            stream = io.TextIOWrapper(
                io.BufferedWriter(file) if fd else io.BufferedReader(file),
                errors="backslashreplace" if fd == 2 else "strict",
                line_buffering=fd == 2 or file.isatty(),
                write_through=unbuffered and fd > 0,
            )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(options: list[str], words: list[str], stand_in: str, beyond: list[str]) -> None:
    """Do what Python does with ``words``. ``stand_in``: the executable with which it starts ranks; ``beyond``: the end
    of its path."""
    import multiprocessing
    import runpy
    import types
    import warnings

    sys.warnoptions = [one for one in os.environ.get("PYTHONWARNINGS", "").split(",") if one]
    sys.warnoptions += [option.removeprefix("-W") for option in options if option != "-u"]
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    multiprocessing.set_executable(stand_in)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    named = [os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.orig_argv = [sys.executable, *options, *words]
    if words[0] == "-m":
        sys.argv, sys.path = ["-m", *words[2:]], [os.getcwd(), *named, *beyond]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    elif words[0] == "-c":
        sys.argv, sys.path = ["-c", *words[2:]], ["", *named, *beyond]
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        path = os.path.abspath(words[0])
        sys.argv, sys.path = words, [path if os.path.isdir(path) else os.path.dirname(path), *named, *beyond]
        if os.path.isdir(path):
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        else:
            main.__file__ = path
            with open(path, "rb") as script:
                code = compile(script.read(), path, "exec")
            exec(code, vars(main))


if __name__ == "__main__" and sys.flags.isolated:
    _stand_in(sys.argv[1:])
elif __name__ == "__main__":
    import gc

    import torch  # noqa: F401 (the purpose of the server)

    gc.freeze()
    listening, stand_in = sys.argv[1:]
    _run(*_serve(socket.socket(fileno=int(listening))), stand_in, sys.path[1:])
