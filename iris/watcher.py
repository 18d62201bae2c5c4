"""A thread per context that notices when a peer's process has died."""

from __future__ import annotations

import threading
from contextlib import suppress

from iris.backends.base import Backend
from iris.device import control
from iris.mesh import Mesh


class Watcher:
    """Watches the peers from a thread; when a peer's process has died, it tells this rank's waiting kernels."""

    INTERVAL_S = 0.02

    def __init__(self, mesh: Mesh, backend: Backend) -> None:
        self._mesh, self._backend, self._stop = mesh, backend, threading.Event()
        self.saw_death = False
        self._thread: threading.Thread | None = None
        if mesh.world_size > 1:
            self._thread = threading.Thread(target=self._watch, name="iris-watcher", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(self.INTERVAL_S):
            dead = self._mesh.dead_ranks()
            if dead:
                if not self.told():  # a kernel's message is kept: it may say why the peer has gone
                    self.tell(min(dead))
                self._stop.wait(self.INTERVAL_S)  # kernels record for whom they waited before the host looks
                self.saw_death = True
                return

    def tell(self, peer: int) -> None:
        """Make this rank's waiting kernels give up, because of ``peer``."""
        with suppress(RuntimeError):  # CUDA has failed, so no kernels run
            self._backend.poke(control.ABORT_WORD.value, control.abort_code(self._mesh.rank, peer))

    def told(self) -> int:
        """The abort word that made this rank's kernels give up (:func:`iris.device.control.abort_code`); 0 if none."""
        try:
            return self._backend.peek(control.ABORT_WORD.value)
        except RuntimeError:  # CUDA has failed
            return 0

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
