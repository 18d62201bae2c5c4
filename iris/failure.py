"""What ends a context: the first failure is kept, every later call raises it again, and the peers are told why."""

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
"""How the tags of calls begin in which not all ranks take part."""


class Failure:
    """The failure that has ended a context, once there is one.

    Args:
        mesh: the connections to the peers.
        watcher: notices a peer's death.
        status: the words in which this rank's kernels record a wait that expired, or was cut short.
        table: which blocks of the heap are in use.
        of_torch: the ``torch.distributed`` ranks of the context's ranks.
        limits: the names of the settings that bound waits, for error texts.

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
        """Raise the failure, if there is one, or if since the last look a kernel has recorded one or a peer has
        died."""
        if self.first is not None:
            raise copy.copy(self.first)
        if self._recorded() or self._watcher.saw_death:
            raise self.keep(self.described())

    def keep(self, error: IrisError) -> IrisError:
        """Keep ``error`` unless there is a failure already; return the first one. It is kept without its traceback,
        which would keep the caller's tensors alive."""
        self.first = self.first or self._for_the_job(copy.copy(error))
        return copy.copy(self.first)

    def _for_the_job(self, error: IrisError) -> IrisError:
        """``error``, with the ``torch.distributed`` numbers of the ranks that it names: users need them to find these
        ranks' output."""
        if isinstance(error, PeerDied | WaitTimeout) and (names := global_names(error.ranks, self._of_torch)):
            return type(error)(f"{error} ({names})", error.ranks) if names not in str(error) else error
        return error

    @contextmanager
    def of_meeting(self) -> Iterator[None]:
        """Surrounds a meeting of the hosts: an error in it is kept if the ranks cannot meet again after it."""
        try:
            yield
        except RankMismatch as error:
            # Ranks outside the group know nothing of the mismatch: what they have sent would answer a later call.
            # And one that comes from a rank that has left is the end of the context, too.
            if self._mesh.told or any(call.startswith(_OF_GROUP) for call in error.calls):
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
        """Surrounds a simulated kernel that was given the handle. The kernel has finished when its launch returns, so
        the launch raises if a wait in it expired. If there are peers, who may be waiting for it, any other exception in
        it counts as a call that broke off."""
        if self.first is not None:
            raise copy.copy(self.first)
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) and self._recorded():  # after a failed wait it read whatever was in memory
                raise self.keep(self.described()) from error
            if self._mesh.world_size > 1:
                self.broke_off(error)
            raise
        if self._recorded():
            raise self.keep(self.described())

    def broke_off(self, error: BaseException) -> None:
        """Note that ``error`` ended a call of this rank half way, and tell the peers at once. Later calls raise a
        ContextError that quotes it, or ``error`` itself if that is a WaitTimeout, as from a user's own polling loop."""
        if self.first is None:
            cause = ": ".join(filter(None, (type(error).__name__, words_of(error))))
            broken = ContextError(f"an earlier call broke off half way: {cause}. Make a new context.")
            self.keep(error if isinstance(error, WaitTimeout) else broken)
            self.part(error)

    def part(self, error: BaseException) -> None:
        """Tell the peers why this rank leaves, leave them, and let this rank's kernels wait for none of them."""
        for failure in (error, self.first):  # the program may have raised another error in place of the first
            if isinstance(failure, PeerDied):
                self._mesh.blame(failure.ranks)
        self._mesh.leave(error)
        self._watcher.tell(self._mesh.rank)

    def _recorded(self) -> bool:
        """Whether a kernel of this rank has recorded that a wait expired, or was cut short."""
        own, told = CODES  # without a loop, since every op comes here
        return bool(self._status[own] or self._status[told])

    def described(self) -> IrisError:
        """Why a kernel stopped: the error that a peer sent before it left, if one has left, else the kernel's record.

        A record of an expired wait has more detail than the peer's error. It replaces that error if both name the same
        rank as waited for, or if the peer left because this rank gave up; otherwise it is added to it. A record of a
        wait that was cut short is added if the peer waited for this rank: it shows why this rank did not come."""
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
    """The sentence that ``rank`` is in ``call``, to be added to this rank's ``own`` error text."""
    if own.startswith(f"{call}:"):
        return (
            f"Rank {rank} compares a new call of {call} with the other ranks: shapes, bias, config, workspace or "
            "trace are others there."
        )
    return f"Rank {rank} is in another call: {call}."
