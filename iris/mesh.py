"""The control plane: one Unix socket between every pair of ranks of a job.

It carries what must not travel over the heap: allocation checks, host barriers, small broadcasts, file descriptors, and
the news that a rank has died: its sockets close, so every peer knows at once.

Frames are length-prefixed bytes; nothing is unpickled.
"""

from __future__ import annotations

import array
import itertools
import json
import os
import select
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from iris.errors import (
    IrisError,
    PeerDied,
    RankMismatch,
    WaitTimeout,
    ranks_text,
    too_many_files,
    words_of,
)
from iris.mismatch import told
from iris.processes import blame, in_children, is_ending
from iris.rendezvous import Rendezvous
from iris.timeouts import MAX_WAIT_S

_HEADER = struct.Struct("!cIQ")
_DATA, _ABORT = b"D", b"A"
_ERRORS: dict[str, Callable[[str, Sequence[Any]], IrisError]] = {
    "PeerDied": PeerDied,
    "WaitTimeout": WaitTimeout,
    "RankMismatch": RankMismatch,
}
"""Errors that peers raise just as this rank does. Each takes a text, and the ranks or calls that it is about."""
_AFTER_KERNELS_S = 1.0
"""How much longer than a kernel a host waits for its peers, at most a quarter of the limit. So a kernel's wait expires
before that of a host, and its error says more."""


class Mesh:
    """Connections from this rank to all others of the job ``key``.

    Args:
        rank: this rank, ``0 <= rank < world_size``.
        world_size: the number of ranks; all must be on this host.
        key: names the job; equal on all its ranks and on no other job's.
        timeout_s: how long to wait for peers, both here and in :meth:`exchange`.

    Raises:
        WaitTimeout: peers did not arrive within ``timeout_s``; the error names them.
        PeerDied: a peer arrived and died before all had arrived.
        LaunchError: another job already uses this key.
    """

    def __init__(self, rank: int, world_size: int, key: str, timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        rendezvous = Rendezvous(rank, world_size, key, timeout_s)
        self.peers, self.pids = rendezvous.peers, rendezvous.pids
        self._received = {peer: bytearray() for peer in range(world_size)}
        self._fds: dict[int, list[int]] = {peer: [] for peer in range(world_size)}
        self._unfinished: set[int] = set()
        self._rendezvous: Rendezvous | None = rendezvous
        self.told = False  # by a peer why it leaves
        in_children(self, Mesh.abandon)
        try:
            rendezvous.meet(self._check_alive)
            self.exchange("rendezvous")
        except BaseException as error:
            self.leave(error)
            raise
        self._rendezvous = None
        rendezvous.count()

    def _check_alive(self, peer: int) -> None:
        """Raise if ``peer`` has closed its connection during rendezvous, or has said why it leaves."""
        try:
            data = self.peers[peer].recv(65536)
        except OSError:
            data = b""
        if not data:
            raise PeerDied(f"rendezvous: rank {peer} died while ranks were meeting", [peer])
        self._received[peer] += data
        self._take_frame(peer, only_abort=True)

    def exchange(
        self,
        tag: str,
        payload: bytes = b"",
        ranks: Sequence[int] | None = None,
        fd: int | None = None,
    ) -> dict[int, bytes]:
        """Send ``payload`` to every rank of ``ranks``; return by rank what each sent, including this rank's own.

        Args:
            tag: names the call; must be equal on all ranks.
            ranks: the ranks that take part (all by default); this rank must be one of them.
            fd: a file descriptor to send along; see :meth:`exchange_fd`.

        Raises:
            RankMismatch: some rank made another call; the error names each rank's call.
            PeerDied: a participating rank's process ended.
            WaitTimeout: a participating rank did not make the call in time.
        """
        group = set(range(self.world_size)) if ranks is None else set(ranks)
        frame = _frame(_DATA, tag, payload)
        rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        outgoing = {peer: memoryview(frame) for peer in sorted(group) if peer != self.rank}
        tags, payloads = {self.rank: tag}, {self.rank: payload}
        deadline = time.monotonic() + self.timeout_s + min(_AFTER_KERNELS_S, self.timeout_s / 4)
        with selectors.PollSelector() as selector:
            for peer in outgoing:
                selector.register(self._socket(peer), selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
            while True:
                for peer in group - tags.keys():
                    taken = self._take_frame(peer)
                    if taken is not None:
                        tags[peer], payloads[peer] = taken
                if not group - tags.keys() and not outgoing:
                    break
                left = deadline - time.monotonic()
                if left <= 0:  # even if there is something to read: a peer may send without reading
                    late = sorted(group - tags.keys() | outgoing.keys())
                    for peer in self.ending(late):
                        raise self.death(peer, tag)
                    raise WaitTimeout(
                        f"{tag.split('(')[0]}: rank {self.rank} waited {self.timeout_s:g} s for {ranks_text(late)}, "
                        "which did not make the call. Is it in other work, or stuck before this point? Or is one of "
                        "its kernels waiting for a signal?",
                        late,
                    )
                for selected, mask in selector.select(min(left, MAX_WAIT_S)):
                    peer = selected.data
                    if mask & selectors.EVENT_WRITE and peer in outgoing:
                        data = outgoing[peer]
                        self._unfinished.add(peer)
                        outgoing[peer] = self._send_some(peer, data, rights if len(data) == len(frame) else [], tag)
                        if len(outgoing[peer]) in (0, len(frame)):
                            self._unfinished.discard(peer)
                    if mask & selectors.EVENT_READ and (peer not in tags or peer in outgoing):
                        self._receive_some(peer, tag)
                    if peer in outgoing and not outgoing[peer]:
                        del outgoing[peer]
                        selector.modify(self._socket(peer), selectors.EVENT_READ, peer)
                    if peer in tags and peer not in outgoing:
                        selector.unregister(self._socket(peer))
        if len(set(tags.values())) > 1:
            raise RankMismatch(told(tags), tags.values())
        return payloads

    def exchange_fd(self, tag: str, fd: int) -> dict[int, int]:
        """Give ``fd`` to every peer; return the descriptors they gave, open in this process."""
        self.exchange(tag, fd=fd)
        return {peer: self._fds[peer].pop(0) for peer in self.peers}

    def _socket(self, peer: int) -> socket.socket:
        if peer not in self.peers:
            raise PeerDied(f"rank {peer} has left the job", [peer])
        return self.peers[peer]

    def _send_some(
        self, peer: int, data: memoryview, rights: list[tuple[int, int, array.array[int]]], tag: str
    ) -> memoryview:
        try:
            return data[self.peers[peer].sendmsg([data], rights, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            return data
        except OSError:
            raise self.death(peer, tag) from None

    def _receive_some(self, peer: int, tag: str) -> None:
        try:
            data, ancillary, flags, _ = self.peers[peer].recvmsg(1 << 20, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
            if flags & socket.MSG_CTRUNC:
                raise too_many_files(f"taking the heap of rank {peer}")
            for _, _, rights in ancillary:
                self._fds[peer].append(int.from_bytes(rights[:4], sys.byteorder))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            raise self.death(peer, tag)
        self._received[peer] += data

    def _drain(self, peer: int) -> None:
        """Read the last message of a dead peer: it may name another culprit."""
        try:
            while data := self.peers[peer].recv(1 << 20):
                self._received[peer] += data
        except OSError:
            pass
        while self._take_frame(peer) is not None:
            pass

    def death(self, peer: int, tag: str) -> IrisError:
        """The error to raise because ``peer`` has closed its connection: the one that it sent last, if it sent one."""
        named = sorted({peer} | self.dead_ranks())
        for rank in named:
            try:
                self._drain(rank)
            except IrisError as error:
                return error
        ended = [rank for rank in named if is_ending(self.pids[rank])]
        if ended:
            how = f"{ranks_text(ended)} died (process {self.pids[ended[0]]} is gone)"
        else:
            inside = " in the middle of a message" if any(self._received.get(rank) for rank in named) else ""
            how = f"{ranks_text(named)} closed {'its connection' if len(named) == 1 else 'their connections'}{inside}"
        return PeerDied(
            f"{tag.split('(')[0]}: {how}. Look at that rank's output for the cause; this context can only be closed.",
            ended or named,
        )

    def call_of(self, peer: int) -> str:
        """The call that ``peer`` has made and this rank has not, as far as this rank knows; "" if there is none."""
        if peer not in self.peers:
            return ""
        try:
            self._receive_some(peer, "look")
        except IrisError:
            return ""
        frame = self._next_frame(peer)
        return frame[1].split("(")[0] if frame is not None and frame[0] == _DATA else ""

    def _take_frame(self, peer: int, only_abort: bool = False) -> tuple[str, bytes] | None:
        """The next frame from ``peer``, if all of it has arrived; an abort frame raises the peer's error."""
        frame = self._next_frame(peer)
        if frame is None or (only_abort and frame[0] == _DATA):
            return None
        kind, tag, place = frame
        payload = bytes(self._received[peer][place])
        del self._received[peer][: place.stop]
        if kind == _ABORT:
            self.told = True
            report = json.loads(payload)
            raise _ERRORS[report["error"]](report["message"], report["about"])
        return tag, payload

    def _next_frame(self, peer: int) -> tuple[bytes, str, slice] | None:
        """Kind, tag and place of the payload of the next frame from ``peer``, if all of it has arrived."""
        buffer = self._received.get(peer, bytearray())
        if len(buffer) < _HEADER.size:
            return None
        kind, tag_length, length = _HEADER.unpack_from(buffer)
        place = slice(_HEADER.size + tag_length, _HEADER.size + tag_length + length)
        if len(buffer) < place.stop:
            return None
        return kind, bytes(buffer[_HEADER.size : place.start]).decode(errors="surrogateescape"), place

    def dead_ranks(self) -> set[int]:
        """Peers that have closed their end of the connection; reads nothing from it. Thread-safe."""
        poller = select.poll()
        owners: dict[int, int] = {}
        for peer, connection in list(self.peers.items()):
            fd = connection.fileno()
            if fd >= 0:
                owners[fd] = peer
                poller.register(fd, select.POLLRDHUP)
        dead = (select.POLLRDHUP, select.POLLHUP, select.POLLERR)
        return {owners[fd] for fd, event in poller.poll(0) if any(event & bit for bit in dead)}

    def ending(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` whose processes have ended or are ending, even if their connections are still open: when a
        process is killed, a driver may unmap its memory before its sockets are closed."""
        return [rank for rank in sorted(ranks) if rank in self.peers and is_ending(self.pids[rank])]

    def _say_why(self, error: BaseException) -> None:
        """Tell the peers why this rank ends, so that their calls that wait for it can raise the same error."""
        about: list[Any] = list(error.ranks) if isinstance(error, PeerDied | WaitTimeout) else []
        if isinstance(error, RankMismatch):
            about = list(error.calls)
        kind, message = type(error).__name__, words_of(error)
        if kind not in _ERRORS or (kind != "RankMismatch" and about in ([], [self.rank])):
            kind, message, about = "PeerDied", f"rank {self.rank} left with {kind}: {message}", [self.rank]
        report = json.dumps({"error": kind, "message": message[:4000], "about": about}).encode()
        frame = _frame(_ABORT, "abort", report)
        for peer, connection in self.peers.items():
            if peer in self._unfinished:  # it would take this frame for the rest of an unfinished message
                continue
            try:
                connection.settimeout(0.2)
                connection.sendall(frame, socket.MSG_NOSIGNAL)
            except OSError:
                continue

    def blame(self, ranks: Iterable[int]) -> None:
        """Note that this process ends because ``ranks`` failed; those that have left are ignored."""
        for rank in self.peers.keys() & set(ranks):
            blame(self.pids[rank])

    def leave(self, error: BaseException | None = None) -> None:
        """Close all connections; with ``error``, first tell the peers why."""
        if error is not None:
            self._say_why(error)
        for connection in self.peers.values():
            connection.close()
        self.peers.clear()
        self._close_descriptors()

    def abandon(self) -> None:
        """In a forked child: drop the inherited descriptors without a word to the peers, so that the parent's death
        stays visible to them."""
        if self._rendezvous is not None:
            self._rendezvous.abandon()
        self.leave()

    def _close_descriptors(self) -> None:
        """Close the descriptors that peers have sent and nobody has asked for."""
        for fd in itertools.chain.from_iterable(self._fds.values()):
            os.close(fd)
        self._fds.clear()


def _frame(kind: bytes, tag: str, payload: bytes) -> bytes:
    name = tag.encode(errors="surrogateescape")
    return _HEADER.pack(kind, len(name), len(payload)) + name + payload
