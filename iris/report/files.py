"""Files that a report is read from and written to; what the file system refuses is an :class:`ArgumentError`."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from iris.errors import ArgumentError

_LONGEST_NAME = 160


def name_of(words: str) -> str:
    """A name for a file: the words with hyphens."""
    return re.sub(r"[^a-z0-9_.]+", "-", words.lower()).strip("-.")[:_LONGEST_NAME]


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
    with _told_of_writing(argument, file):
        if file.exists() and not file.is_file():
            file.write_bytes(_encoded(text))
        else:
            write_all(argument, {file: text})


def write_all(argument: str, texts: Mapping[Path, str]) -> None:
    """Put texts into files. None is replaced before all texts are on the disk, so that one that cannot be written
    leaves all as they were.

    Raises:
        ArgumentError: a file cannot be written; names ``argument`` and the file.
    """
    with ExitStack() as prepared:
        ready = []
        for file, text in texts.items():
            with _told_of_writing(argument, file):
                target = Path(os.path.realpath(file))
                ready.append((file, target, prepared.enter_context(_beside(target, _encoded(text)))))
        for file, target, unfinished in ready:
            with _told_of_writing(argument, file):
                unfinished.replace(target)


def _told_of_writing(argument: str, file: Path) -> AbstractContextManager[None]:
    return told(argument, "a file that can be written", file)


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # names of files need not be UTF-8


@contextmanager
def _beside(file: Path, content: bytes) -> Iterator[Path]:
    """A file with this content that can take the place of ``file``; what is left of it goes in the end."""
    unfinished = file.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        unfinished.write_bytes(content)
        if file.exists():
            with file.open("r+b") as old:  # one that may not be written may not be replaced either
                before = os.fstat(old.fileno())
            with suppress(OSError):  # only root can give a file away
                os.chown(unfinished, before.st_uid, before.st_gid)
            unfinished.chmod(stat.S_IMODE(before.st_mode))
        yield unfinished
    finally:
        with suppress(OSError):
            unfinished.unlink()
