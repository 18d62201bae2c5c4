"""How the ranks of a job find each other: each pair of ranks ends up connected by a socket.

The sockets have names in Linux's abstract namespace: no file is ever made, so none can be left behind. Each end checks
the other's user id.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from iris.errors import (
    IrisError,
    LaunchError,
    PeerDied,
    RankMismatch,
    WaitTimeout,
    explaining_too_many_files,
    ranks_text,
)

_HELLO = struct.Struct("!III")  # rank, world size, meeting
_LATE_S = 1.0
"""How long a rank that gives up goes on meeting others, in order to tell them."""
_known: dict[str, tuple[int, bool]] = {}
"""By job, the number of meetings that have succeeded, as far as this rank knows; and whether there may be one more, in
which this rank met all others, but failed before it heard that all ranks had met all."""


def address(key: str, rank: int, meeting: int = 0) -> str:
    """The abstract socket name on which ``rank`` of job ``key`` listens for the others in this ``meeting``."""
    digest = hashlib.sha256(f"{os.getuid()}:{key};#{meeting}".encode(errors="surrogateescape")).hexdigest()[:24]
    return f"\0iris-{digest}-{rank}"


@dataclass
class _Stranger:
    """The other end of a connection, as long as it has not said its rank."""

    pid: int
    expected: int | None
    said: bytearray = field(default_factory=bytearray)


class Rendezvous:
    """Connections from this rank to all others of the job ``key``; complete once :meth:`meet` returns.

    Args:
        rank: this rank, ``0 <= rank < world_size``.
        world_size: the number of ranks; all must be on this host.
        key: names the job; equal on all its ranks and on no other job's.
        timeout_s: how long to wait for the others.

    Attributes:
        peers: the connections, by rank.
        pids: the processes, by rank, this one's among them.
    """

    def __init__(self, rank: int, world_size: int, key: str, timeout_s: float) -> None:
        self._rank, self._world_size, self._key, self._timeout_s = rank, world_size, key, timeout_s
        self._meeting, unsure = _known.get(key, (0, False))
        self._places = [self._meeting + 1, self._meeting] if unsure else [self._meeting]
        self.peers: dict[int, socket.socket] = {}
        self.pids: dict[int, int] = {rank: os.getpid()}
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._listeners: list[socket.socket] = []

    @explaining_too_many_files("meeting the other ranks")
    def meet(self, check: Callable[[int], None]) -> None:
        """Wait until all ranks are connected. When a connected rank sends something meanwhile, ``check(rank)`` reads
        it, and raises if the rank leaves.

        Raises:
            WaitTimeout: ranks did not come in time.
            LaunchError, RankMismatch, BackendError, and what ``check`` raises.
        """
        if self._world_size == 1:
            return
        deadline = time.monotonic() + self._timeout_s
        with contextlib.ExitStack() as opened:
            for place in self._places:
                self._listeners.append(opened.enter_context(self._listener(place)))
            try:
                self._meet(deadline, check)
            except IrisError:
                self._meet_late(deadline)
                raise
            finally:
                self._listeners.clear()
                for connection in self._strangers:
                    connection.close()
                self._strangers.clear()
        _known[self._key] = self._meeting, True

    def abandon(self) -> None:
        """In a forked child: close the sockets of a meeting that goes on in the parent."""
        for one in (*self._listeners, *self._strangers):
            one.close()

    def count(self) -> None:
        """Note that this meeting has succeeded: every rank has said that it has met all others."""
        _known[self._key] = self._meeting + 1, False

    def _meet(self, deadline: float, check: Callable[[int], None]) -> None:
        while self._missing():
            for peer in self._admit(watched=set(self.peers)):
                check(peer)
            if time.monotonic() > deadline and (missing := self._missing()):
                silent = missing & {stranger.expected for stranger in self._strangers.values()}
                hint = f" ({ranks_text(silent)} can be called but says nothing: a stopped process?)" if silent else ""
                raise WaitTimeout(
                    f"rendezvous: rank {self._rank} waited {self._timeout_s:g} s for {ranks_text(missing)} "
                    f"of {self._world_size}, which never arrived{hint}. Were all {self._world_size} ranks "
                    "started on this host, and are they still running? Ranks that take long to start need a larger "
                    "IRIS_TIMEOUT_S.",
                    missing,
                )

    def _meet_late(self, deadline: float) -> None:
        """After a failure: connect to ranks that are still coming, so that they hear of it and do not wait in vain."""
        until = min(deadline, time.monotonic() + _LATE_S)
        while self._missing() and time.monotonic() < until:
            with contextlib.suppress(IrisError):
                self._admit(watched=set())

    def _missing(self) -> set[int]:
        return set(range(self._world_size)) - self.peers.keys() - {self._rank}

    def _admit(self, watched: set[int]) -> list[int]:
        """Call the lower ranks that are still missing, accept calls, read what strangers say, and return those of the
        ``watched`` ranks that have sent something.

        It never waits for a single rank, which could hang and keep this rank from the others.
        """
        called = {stranger.expected for stranger in self._strangers.values()}
        for peer in sorted(self._missing() & set(range(self._rank)) - called):
            connection = self._dial(peer)
            if connection is not None:
                self._greet(connection, peer)
        ready = _readable([*self._listeners, *self._strangers, *(self.peers[peer] for peer in watched)], 0.01)
        spoke = [peer for peer in watched if self.peers[peer] in ready]
        for connection in ready:
            if connection in self._listeners:
                self._greet(connection.accept()[0])
            elif connection in self._strangers:
                self._hear(connection)
        return spoke

    def _listener(self, meeting: int) -> socket.socket:
        """The socket on which the others reach this rank in this meeting."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(address(self._key, self._rank, meeting))
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
            raise LaunchError(
                f"rank {self._rank} of this job is already running in another process. Start the second "
                "job with another IRIS_JOB=<name> in its environment, or end the first."
            ) from error
        listener.listen(self._world_size)
        return listener

    def _dial(self, peer: int) -> socket.socket | None:
        """Call ``peer``. If two ranks disagree about the number of the meeting, at least one is unsure, and that rank
        listens and calls under both numbers."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        for place in self._places:
            with contextlib.suppress(ConnectionRefusedError, FileNotFoundError, BlockingIOError):
                connection.connect(address(self._key, peer, place))
                return connection
        connection.close()
        return None

    def _greet(self, connection: socket.socket, expected: int | None = None) -> None:
        """Send this rank's number on a new connection; the other end is a stranger until it has sent its own."""
        connection.setblocking(False)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        if uid != os.getuid():
            connection.close()
            if expected is None:
                return
            raise LaunchError(f"rank {expected}'s socket belongs to user {uid}, not to you ({os.getuid()})")
        self._strangers[connection] = _Stranger(pid, expected)
        with contextlib.suppress(OSError):  # the other end is gone, which reading shows
            connection.sendall(_HELLO.pack(self._rank, self._world_size, self._meeting), socket.MSG_NOSIGNAL)

    def _hear(self, connection: socket.socket) -> None:
        """Read from a stranger; once its greeting is complete, file the connection under its rank."""
        stranger = self._strangers[connection]
        try:
            part = connection.recv(_HELLO.size - len(stranger.said))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        stranger.said += part
        if part and len(stranger.said) < _HELLO.size:
            return
        del self._strangers[connection]
        if not part:
            connection.close()
            if stranger.expected is None:
                return
            raise PeerDied(f"rendezvous: rank {stranger.expected} died while ranks were meeting", [stranger.expected])
        rank, world_size, meeting = _HELLO.unpack(stranger.said)
        if world_size != self._world_size:
            connection.close()
            raise RankMismatch(
                f"rendezvous: rank {rank} expects {world_size} ranks, "
                f"rank {self._rank} expects {self._world_size}. Start all ranks with the same world size."
            )
        self._meeting = max(self._meeting, meeting)
        self.peers[rank] = connection
        self.pids[rank] = stranger.pid


def _readable(connections: Iterable[socket.socket], timeout_s: float) -> list[socket.socket]:
    """The connections that have something to read, or have ended. It uses poll, because a process may have more
    descriptors open than select takes."""
    with selectors.PollSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(timeout_s) if isinstance(key.fileobj, socket.socket)]
