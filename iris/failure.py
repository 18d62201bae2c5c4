"""What ends a context: the first failure is kept, every later call raises it, and the peers are told why."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from iris.device import control
from iris.errors import ContextError, IrisError, PeerDied, RankMismatch, WaitTimeout, words_of
from iris.heap import HeapTable
from iris.membership import global_names
from iris.mesh import Mesh
from iris.status import CODES, cut_short, expired_wait, gave_up, record_of, stopped_by
from iris.timeouts import Limits
from iris.watcher import Watcher

_OF_GROUP = "barrier("
"""How calls begin that not all ranks take part in."""


class Failure:
    """What has ended a context, once something has.

    Args:
        mesh: the connections to the peers.
        watcher: notices a peer's death.
        status: the words in which this rank's kernels record a wait that expired, or was cut short.
        table: what lies where on the heap.
        of_torch: the context's ranks as ``torch.distributed`` counts them.
        limits: what the user has set to bound waits.

    Attributes:
        first: the first failure; None while there is none.
    """

    def __init__(
        self,
        mesh: Mesh,
        watcher: Watcher,
        status: np.ndarray,
        table: HeapTable,
        of_torch: Sequence[int],
        limits: Limits,
    ) -> None:
        self.first: IrisError | None = None
        self._limits = limits
        self._mesh, self._watcher, self._status, self._table = mesh, watcher, status, table
        self._of_torch = list(of_torch)

    def check(self) -> None:
        """Raise if there is a failure, or if a kernel has recorded one, or a peer has died, since the last look."""
        if self.first is not None:
            raise copy.copy(self.first)
        if self._recorded() or self._watcher.saw_death:
            raise self.keep(self.described())

    def keep(self, error: IrisError) -> IrisError:
        """Keep the first failure, without its traceback: that would keep the caller's tensors alive. Returns it."""
        self.first = self.first or self._for_the_job(copy.copy(error))
        return copy.copy(self.first)

    def _for_the_job(self, error: IrisError) -> IrisError:
        """``error``, which says what launchers call the ranks that it names: their output is found by that."""
        if isinstance(error, PeerDied | WaitTimeout) and (names := global_names(error.ranks, self._of_torch)):
            return type(error)(f"{error} ({names})", error.ranks) if names not in str(error) else error
        return error

    @contextmanager
    def of_meeting(self) -> Iterator[None]:
        """Surrounds a meeting of the hosts: what it raises is kept, if ranks cannot meet any more."""
        try:
            yield
        except RankMismatch as error:
            # Ranks outside a group have not heard: what they sent would answer a later call.
            if any(call.startswith(_OF_GROUP) for call in error.calls):
                raise self.keep(error) from None
            raise
        except WaitTimeout as error:
            raise self.keep(gave_up(self._watcher.told(), error, self._mesh.rank)) from None
        except PeerDied as error:
            raise self.keep(error) from None
        except BaseException as error:  # Ctrl-C: what peers have sent, or still send, would answer a later call
            self.broke_off(error)
            raise

    @contextmanager
    def of_simulated_kernel(self) -> Iterator[None]:
        """Surrounds a simulated kernel that was given the handle. It has run when its launch returns: so the launch
        raises if a wait in it expired, and an exception in it is that of a call that broke off, if there are peers who
        may be waiting for it."""
        if self.first is not None:
            raise copy.copy(self.first)
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) and self._recorded():  # it went on with whatever was in memory
                raise self.keep(self.described()) from error
            if self._mesh.world_size > 1:
                self.broke_off(error)
            raise
        if self._recorded():
            raise self.keep(self.described())

    def broke_off(self, error: BaseException) -> None:
        """Note that ``error`` ended a call of this rank half way, and tell the peers at once. Later calls raise it
        as it is if it is a wait in vain, as of a loop of the user's own."""
        if self.first is None:
            cause = ": ".join(filter(None, (type(error).__name__, words_of(error))))
            broken = ContextError(f"an earlier call broke off half way: {cause}. Make a new context.")
            self.keep(error if isinstance(error, WaitTimeout) else broken)
            self.part(error)

    def part(self, error: BaseException) -> None:
        """Leave the peers, who are told why, and have this rank's kernels wait for none of them any more."""
        for failure in (error, self.first):  # the program may have made another error of it
            if isinstance(failure, PeerDied):
                self._mesh.blame(failure.ranks)
        self._mesh.leave(error)
        self._watcher.tell(self._mesh.rank)

    def _recorded(self) -> bool:
        """Whether a kernel of this rank has recorded that a wait expired, or was cut short."""
        own, told = CODES  # one by one: every op asks
        return bool(self._status[own] or self._status[told])

    def described(self) -> IrisError:
        """Why a kernel stopped: what a peer that is gone said last, if there is one, else what the kernel recorded.
        What a wait of its own recorded has more detail: it is taken, too, if both say that the same rank was waited
        for, or if the peer left because this rank gave up, else added. So is a wait that was cut short, if it is this
        rank that was waited for: it says why it did not come."""
        mesh = self._mesh
        record = record_of(self._status)
        own = expired_wait(record, mesh.rank, mesh.world_size, self._table, self._limits)
        dead = mesh.dead_ranks() or mesh.ending(own.ranks)
        if not dead:
            if isinstance(own, PeerDied):
                return own
            calls = {rank: mesh.call_of(rank) for rank in own.ranks}
            told = [_other_call(rank, call, str(own)) for rank, call in calls.items() if call]
            return WaitTimeout(" ".join([str(own), *told]), own.ranks)
        said = mesh.death(min(dead), "kernel")
        if not isinstance(said, PeerDied | WaitTimeout):
            return said
        more = str(own)
        if record.code == control.CODE_EXPIRED.value:
            if (isinstance(said, WaitTimeout) and said.ranks == own.ranks) or stopped_by(mesh.rank, str(said)):
                return own
        elif record.relayed and mesh.rank in said.ranks:
            more = f"{cut_short(record, mesh.rank, self._table)}."
        else:
            return said
        return type(said)(f"{said} On this rank: {more}", said.ranks)


def _other_call(rank: int, call: str, own: str) -> str:
    """That ``rank`` is in ``call``, for the words about this rank's ``own``."""
    if own.startswith(f"{call}:"):
        return (
            f"Rank {rank} compares a new call of {call} with the other ranks: shapes, bias, config, workspace or "
            "trace are others there."
        )
    return f"Rank {rank} is in another call: {call}."
