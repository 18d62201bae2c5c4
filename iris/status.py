"""The status words that a kernel writes when one of its waits expires, turned into an error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, SupportsInt

from iris.device import control, handle
from iris.errors import PeerDied, WaitTimeout
from iris.heap import HeapTable
from iris.timeouts import GIVEN, Limits

_TOLD = control.RECORD_WORDS.value
CODES = control.STATUS_CODE.value, _TOLD + control.STATUS_CODE.value
"""The status words that become non-zero when there is a record: of a wait of this rank that expired; of one that
another rank cut short."""


class Record(NamedTuple):
    """What a kernel recorded about a wait, in the order of the words (:mod:`iris.device.control`). ``offset`` is that
    of the flag from the start of the heap."""

    code: int
    site: int
    rank: int
    peer: int
    offset: int
    wanted: int
    seen: int
    waited_ns: int

    @property
    def relayed(self) -> bool:
        """Whether the wait was cut short because another rank gave up."""
        return bool(self.code == control.CODE_RELAYED.value)

    @property
    def of_user(self) -> bool:
        """Whether a kernel of the user's waited, not one of an op."""
        return bool(self.site == control.SITE_USER.value)

    @property
    def flagged(self) -> bool:
        """Whether the kernel waited for a flag, not for data that comes without one."""
        return bool(self.seen != control.NO_FLAG.value)

    @property
    def name(self) -> str:
        """The name of the op, or other code, that waited."""
        return control.SITES.get(self.site, control.SITES[control.SITE_USER.value])


def record_of(status: Iterable[SupportsInt]) -> Record:
    """The record to report of the two in the status words: that of an expired wait of this rank, if there is one, else
    that of a wait cut short."""
    words = [int(word) for word in status]
    return Record(*(words[:_TOLD] if words[CODES[0]] else words[_TOLD:]))


def gave_up(told: int, late: WaitTimeout, own_rank: int) -> WaitTimeout:
    """``late``, the error of a host that waited too long, or one that also says that a kernel of another rank gave up
    before, if ``told``, the abort word of the host's heap, says so (:func:`iris.device.control.abort_code`). It is
    ``late`` if both waited for the same rank, and if the word is this rank's own, which the host sets itself when a
    peer is gone."""
    rank, peer = told >> 8 & 255, told & 255
    if not told or rank == own_rank or late.ranks == (peer,):
        return late
    return WaitTimeout(f"a kernel of {_stopped(rank, peer)}. {late}", _real(peer))


def stopped_by(rank: int, said: str) -> bool:
    """Whether ``said`` is the error of a rank that stopped because ``rank`` gave up waiting."""
    return _gave_up(rank) in said


def _gave_up(rank: int) -> str:
    return f"rank {rank} gave up waiting for "


def _stopped(rank: int, peer: int) -> str:
    """The words that ``rank`` gave up waiting for ``peer``, which is a number from an abort word."""
    return f"{_gave_up(rank)}{f'rank {peer}' if _real(peer) else 'what is no rank'}, so all ranks stopped"


def _real(peer: int) -> list[int]:
    """``peer`` in a list, or an empty one if no job has such a rank: its byte in an abort word may hold any number."""
    return [peer] if peer < handle.MAX_RANKS.value else []


def expired_wait(
    record: Record, own_rank: int, world_size: int, table: HeapTable, limits: Limits = GIVEN
) -> WaitTimeout | PeerDied:
    """The error for a record of ``own_rank``: which rank waited for which, how long, and for which flag. ``table``:
    that of its heap; ``limits``: the names of the settings that allow longer waits."""
    rank, peer = record.rank, record.peer & 255 if record.relayed else record.peer
    if record.site == control.SITE_MATMUL.value:
        rank = peer = own_rank
    if record.relayed:
        message = f"{record.name}: {_stopped(rank, peer)}"
        if not _real(peer):
            return WaitTimeout(f"{message}. The error of rank {rank} says more.")
    else:
        message = _waited(record, rank, peer, table)
        if record.waited_ns < 0:
            return PeerDied(
                f"{message}, and rank {peer} has closed its context. Has it left out a call, or ended early, as by "
                "sys.exit()?",
                [peer],
            )
        if record.flagged and not record.of_user and record.wanted > 0 and not 0 <= record.seen < record.wanted:
            return WaitTimeout(
                f"{message}, which no call has set: something else has written there. A CUDA graph that is replayed "
                "when a tensor of its calls is gone writes into whatever has the memory now.",
                [peer],
            )
        if not 0 <= peer < world_size:
            order = "the order is wait(flag_ptr, value, peer, handle), and valid of wait_all leaves out what is no rank"
            return WaitTimeout(f"{message}. There is no such rank, only 0 to {world_size - 1}: {order}.", [peer])
        if record.of_user and not _on_heap(record, table):  # ops also have flags outside the heap, for one rank alone
            remedy = "no rank can set it. Flags are on the symmetric heap: ctx.zeros(n, dtype=torch.int32)"
            return WaitTimeout(f"{message}; {remedy}.", [peer])
    first = not record.relayed and record.wanted in (0, 1)
    limit = limits[0 if first else 1]
    if rank == peer:
        return WaitTimeout(
            f"{message}. It waits for work of its own: does anything else on this GPU hold that up? Simulated kernels "
            f"of two threads run one after the other: put both into one. A larger {limit} waits longer.",
            [peer],
        )
    of_op = record.site not in (control.SITE_USER.value, control.SITE_BARRIER.value)
    shown = " With IRIS_CHECK_CALLS=1 ranks compare their calls, and say what differs." if of_op else ""
    return WaitTimeout(
        f"{message}. Did rank {peer} make the same call?{shown} A slow but healthy peer needs a larger {limit}.", [peer]
    )


def cut_short(record: Record, own_rank: int, table: HeapTable) -> str:
    """For which rank, and for which flag, ``own_rank`` waited when another rank's message ended the wait."""
    return _waited(record, own_rank, record.peer >> 8, table)


def _waited(record: Record, rank: int, peer: int, table: HeapTable) -> str:
    """The words that ``rank`` waited for ``peer``, and for what."""
    kind, on_heap = "flag" if record.flagged else "data", _on_heap(record, table)
    place = f"{kind} at heap offset {record.offset}" if on_heap else f"{kind} outside the heap"
    if on_heap and record.of_user:
        place += f" ({_place(record, table)})"
    wanted, waited_s = record.wanted, abs(record.waited_ns) / 1e9
    lacking = f"should reach {wanted}, holds {record.seen}" if record.flagged else f"of call {wanted} has not come"
    return f"{record.name}: rank {rank} waited {waited_s:.1f} s for rank {peer}: {place} {lacking}"


def _on_heap(record: Record, table: HeapTable) -> bool:
    return 0 <= record.offset < table.size


def _place(record: Record, table: HeapTable) -> str:
    """Which part of which tensor was waited for."""
    block = table.holding(record.offset)
    if block is None:
        return "of no tensor: was it freed?"
    within = record.offset - block.offset
    return f"{f'flag[{within // 4}]' if record.flagged else f'byte {within}'} of the tensor at {block.offset}"
