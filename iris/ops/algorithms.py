"""The ops, the algorithms of each and what they are: the one table that all ask. Pure: it imports nothing of Iris."""

from __future__ import annotations

from typing import NamedTuple

GATHER, SCATTER, LOCAL = "all_gather_matmul", "matmul_all_scatter", "matmul"
REDUCE_SCATTER, ALL_REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
"""The names of the ops; ``LOCAL`` is a matmul of one rank."""


class Traits(NamedTuple):
    """What an algorithm is, as far as code that is not its own must know.

    Attributes:
        library: its matmul is the library's, unless ``own_matmul`` is set.
        exchange: it puts a short collective before or behind a whole matmul.
        words: what it sends travels as words if it is little.
        accumulates: its matmuls add to a sum, which in 8 bits only Iris's kernel does.
        comm_programs: some programs of its kernels only move data.
        reads_peers: programs load A from peers, so it must be on the symmetric heap.
        contiguous_rows: copies take whole rows of the output, so these must be contiguous.
        atomic: parts of a sum are added by atomics, in the order in which they arrive.
        stream_waits: copies wait, on their stream, for a word that the kernel beside them writes. In a graph that runs
            in a single queue that wait could come first, and the kernel never.
        async_launch: its kernel waits for copies that peers ask for when their own kernel's launch has returned.
        beside: it has copies, or a second kernel, run beside a kernel that may fill the device.
    """

    library: bool = False
    exchange: bool = False
    words: bool = False
    accumulates: bool = False
    comm_programs: bool = False
    reads_peers: bool = False
    contiguous_rows: bool = False
    atomic: bool = False
    stream_waits: bool = False
    async_launch: bool = False
    beside: bool = False


_PLAIN, _LIBRARY, _EXCHANGE = Traits(), Traits(library=True), Traits(library=True, exchange=True, words=True)
_COMM, _ATOMIC, _WORDS = Traits(comm_programs=True), Traits(atomic=True), Traits(words=True)

TRAITS: dict[str, dict[str, Traits]] = {
    GATHER: {
        "pull": Traits(reads_peers=True),
        "push": _PLAIN,
        "hbm_buffer": Traits(comm_programs=True, reads_peers=True),
        "copy_engine": Traits(beside=True),
        "decomposed": Traits(library=True, beside=True),
        "low_latency": _EXCHANGE,
        "baseline": _LIBRARY,
    },
    SCATTER: {
        "push": _PLAIN,
        "split": _COMM,
        "streams": Traits(comm_programs=True, beside=True),
        "relay": _COMM,
        "copy_engine": Traits(contiguous_rows=True, stream_waits=True, beside=True),
        "decomposed": Traits(library=True, contiguous_rows=True, beside=True),
        "low_latency": _EXCHANGE,
        "baseline": _LIBRARY,
    },
    REDUCE_SCATTER: {
        "push": _PLAIN,
        "copy_engine": Traits(stream_waits=True, async_launch=True, beside=True),
        "decomposed": Traits(library=True, beside=True),
        "ring": Traits(library=True, accumulates=True, beside=True),
        "low_latency": _EXCHANGE,
        "atomic": _ATOMIC,
        "baseline": _LIBRARY,
    },
    ALL_REDUCE: {
        "atomic": _ATOMIC,
        "one_shot": _WORDS,
        "two_shot": _WORDS,
        "copy_engine": Traits(contiguous_rows=True, stream_waits=True, async_launch=True, beside=True),
        "decomposed": Traits(library=True, contiguous_rows=True, beside=True),
        "ring": Traits(library=True, accumulates=True, contiguous_rows=True, beside=True),
        "low_latency": _EXCHANGE,
        "low_latency_two_shot": _EXCHANGE,
        "baseline": _LIBRARY,
    },
    LOCAL: {"local": _PLAIN},
}
"""By op and algorithm."""
OPS = tuple(TRAITS)
"""All ops."""
_NAMED = {name: one for of_op in TRAITS.values() for name, one in of_op.items()}
"""By name alone, for what is so in every op that has it."""
LIBRARY = tuple(name for name, one in _NAMED.items() if one.library)
"""Algorithms that are of the library in any op, and so in every op that has them."""
EXCHANGING = tuple(name for name, one in _NAMED.items() if one.exchange)
"""The same, of those with an exchange."""


def algorithms(op: str) -> tuple[str, ...]:
    """The algorithms of ``op``; none if it is not one of Iris's."""
    return tuple(TRAITS.get(op, ()))
