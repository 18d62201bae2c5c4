"""Files that a report is read from and written to; what the file system refuses is an :class:`ArgumentError`."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from iris.errors import ArgumentError


@contextmanager
def told(argument: str, expected: str, path: Path) -> Iterator[None]:
    """Tell an error of the file system as one of ``argument``, which names ``path``."""
    try:
        yield
    except OSError as error:
        raise ArgumentError("report", argument, expected, f"{path}: {error.strerror or error}") from error


def write(argument: str, file: Path, text: str) -> None:
    """Put ``text`` into ``file`` whole, or leave the file as it was. A link stays one: what it points to is replaced,
    and keeps its mode. A pipe or device is written to as it is.

    Raises:
        ArgumentError: nothing can be written there; names ``argument`` and the file.
    """
    content = text.encode(errors="backslashreplace")  # names of files need not be UTF-8
    with told(argument, "a file that can be written", file):
        if file.exists() and not file.is_file():
            file.write_bytes(content)
        else:
            _replace(Path(os.path.realpath(file)), content)


def _replace(file: Path, content: bytes) -> None:
    unfinished = file.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        unfinished.write_bytes(content)
        if file.exists():
            with file.open("r+b") as old:  # one that may not be written may not be replaced either
                before = os.fstat(old.fileno())
            with suppress(OSError):  # only root can give a file away
                os.chown(unfinished, before.st_uid, before.st_gid)
            unfinished.chmod(stat.S_IMODE(before.st_mode))
        unfinished.replace(file)
    finally:
        with suppress(OSError):
            unfinished.unlink()
