"""Status messages: datagrams that ranks send, while they work, to the process that started them, which shows them. No
rank waits for the reader: a message that is not read in time is lost.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_MAX_BYTES = 1 << 10
"""The most bytes of a message; longer ones are cut."""


@contextmanager
def receiving(show: Callable[[str], None]) -> Iterator[bytes]:
    """Pass status messages to ``show``, from a thread, while the block runs. Yields the address to send them to."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind("")  # Linux chooses a name that is in no file system
        address: bytes = inbox.getsockname()

        def listen() -> None:
            while message := inbox.recv(_MAX_BYTES):
                show(message.decode(errors="replace"))

        thread = threading.Thread(target=listen, name="iris-status", daemon=True)
        thread.start()
        try:
            yield address
        finally:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
                while thread.is_alive():  # the inbox may be full, or ``show`` may have failed
                    with suppress(BlockingIOError):
                        last.sendto(b"", socket.MSG_DONTWAIT, address)
                    thread.join(0.05)


class StatusSender:
    """Sends one rank's status messages to ``address``; None drops them."""

    def __init__(self, address: bytes | None) -> None:
        self._address = address
        self._socket = None if address is None else socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def __call__(self, message: str) -> None:
        if self._socket is not None and self._address is not None:
            with suppress(OSError):
                self._socket.sendto(message.encode()[:_MAX_BYTES], socket.MSG_DONTWAIT, self._address)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
