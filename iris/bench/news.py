"""What ranks do within a point, told to the process that started them, for it to show: a datagram for each thing.

Nobody waits for news: where it is not read in time, or nobody listens, it is lost.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_MAX_BYTES = 1 << 10


@contextmanager
def heard(show: Callable[[str], None]) -> Iterator[bytes]:
    """Have a thread hand what is told to ``show`` while the block runs. Yields the address to tell it to."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind("")  # Linux chooses a name that is in no file system
        address: bytes = inbox.getsockname()

        def listen() -> None:
            while words := inbox.recv(_MAX_BYTES):
                show(words.decode(errors="replace"))

        thread = threading.Thread(target=listen, name="iris-news", daemon=True)
        thread.start()
        try:
            yield address
        finally:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
                while thread.is_alive():  # the inbox may be full, or ``show`` have failed
                    with suppress(BlockingIOError):
                        last.sendto(b"", socket.MSG_DONTWAIT, address)
                    thread.join(0.05)


class Teller:
    """Tells one rank's news to ``address``; None tells nobody."""

    def __init__(self, address: bytes | None) -> None:
        self._address = address
        self._socket = None if address is None else socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def __call__(self, words: str) -> None:
        if self._socket is not None and self._address is not None:
            with suppress(OSError):
                self._socket.sendto(words.encode()[:_MAX_BYTES], socket.MSG_DONTWAIT, self._address)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
