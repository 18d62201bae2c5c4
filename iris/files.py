"""Files that commands read and write; errors of the file system become an :class:`ArgumentError`."""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from iris.errors import ArgumentError

_MAX_NAME_LENGTH = 160


def name_of(words: str) -> str:
    """A file name made of ``words``, joined by hyphens."""
    return re.sub(r"[^a-z0-9_.]+", "-", words.lower()).strip("-.")[:_MAX_NAME_LENGTH]


@contextmanager
def argument_errors(program: str, argument: str, expected: str, path: Path) -> Iterator[None]:
    """Raise an error of the file system as an ArgumentError about ``program``'s ``argument`` and ``path``."""
    try:
        yield
    except OSError as error:
        raise ArgumentError(program, argument, expected, f"{path}: {error.strerror or error}") from error


def no_json(error: Exception) -> str:
    """Text for an error about a file that is not JSON: where and why."""
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON (line {error.lineno}, column {error.colno}: {error.msg})"
    return f"no JSON ({error})"


def write(program: str, argument: str, file: Path, text: str) -> None:
    """Write all of ``text`` to ``file``, or leave the file as it was. A link stays a link: its target is replaced, and
    keeps its mode. A pipe or device is written directly.

    Raises:
        ArgumentError: nothing can be written there; the text names ``argument`` and the file.
    """
    with _write_errors(program, argument, file):
        if _is_no_file(file):
            file.write_bytes(_encoded(text))
        else:
            replace(file, text)


def _is_no_file(file: Path) -> bool:
    """Whether ``file`` exists but is no regular file: a pipe, a device, a folder."""
    return file.exists() and not file.is_file()


def replace(file: Path, text: str) -> None:
    """As :func:`write`, but raises the file system's OSError; for regular files only."""
    target = Path(os.path.realpath(file))
    with _beside(target, _encoded(text)) as unfinished:
        unfinished.replace(target)


def require_writable(program: str, argument: str, file: Path) -> None:
    """Raise early if :func:`write` would fail later; a folder that does not exist yet is not checked.

    Raises:
        ArgumentError: nothing can be written there; the text names ``argument`` and the file.
    """
    with _write_errors(program, argument, file):
        if _is_no_file(file):  # a pipe needs no folder; writing to a folder fails later
            return
        target = Path(os.path.realpath(file))
        if target.parent.exists():
            with _beside(target, b""):
                pass


def require_own(program: str, argument: str, file: Path, own: Callable[[dict[str, Any]], bool]) -> None:
    """Refuse to replace a file that ``program`` has not written.

    Args:
        own: returns whether the program has written a JSON object.

    Raises:
        ArgumentError: there is something else in ``file``.
    """
    with argument_errors(program, argument, "a file that can be read", file):
        text = file.read_bytes() if file.is_file() else b""
    try:
        content = json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        content = text
    if content is not None and not (isinstance(content, dict) and own(content)):
        expected = "a new file, or one that this program has written"
        raise ArgumentError(program, argument, expected, file, "It would be replaced: choose another name.")


def write_all(program: str, argument: str, texts: Mapping[Path, str]) -> None:
    """Write texts to files. All texts are written to temporary files before any file is replaced, so that one that
    cannot be written leaves all files as they were.

    Raises:
        ArgumentError: a file cannot be written; the text names ``argument`` and the file.
    """
    with ExitStack() as prepared:
        ready = []
        for file, text in texts.items():
            with _write_errors(program, argument, file):
                target = Path(os.path.realpath(file))
                ready.append((file, target, prepared.enter_context(_beside(target, _encoded(text)))))
        for file, target, unfinished in ready:
            with _write_errors(program, argument, file):
                unfinished.replace(target)


def _write_errors(program: str, argument: str, file: Path) -> AbstractContextManager[None]:
    return argument_errors(program, argument, "a file that can be written", file)


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # names of files need not be UTF-8


@contextmanager
def _beside(file: Path, content: bytes) -> Iterator[Path]:
    """A temporary file with this content, to replace ``file``; deleted at the end if it is still there."""
    unfinished = file.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        unfinished.write_bytes(content)
        if file.exists():
            with file.open("r+b") as old:  # a file that may not be written may not be replaced
                before = os.fstat(old.fileno())
            with suppress(OSError):  # only root can give a file away
                os.chown(unfinished, before.st_uid, before.st_gid)
            unfinished.chmod(stat.S_IMODE(before.st_mode))
        yield unfinished
    finally:
        with suppress(OSError):
            unfinished.unlink()
