"""The ops, their algorithms and the traits of each: the one table for all of Iris. Pure: it imports nothing of Iris."""

from __future__ import annotations

from typing import NamedTuple

GATHER, SCATTER, LOCAL = "all_gather_matmul", "matmul_all_scatter", "matmul"
REDUCE_SCATTER, ALL_REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
"""The names of the ops; ``LOCAL`` is a matmul of one rank."""


class Traits(NamedTuple):
    """What other code must know about an algorithm.

    Attributes:
        library: its matmul is the library's, unless ``own_matmul`` is set.
        exchange: it runs a short collective before or after a whole matmul.
        words: it sends small amounts as words.
        accumulates: its matmuls add to a sum; for 8-bit operands only Iris's kernel can do that.
        comm_programs: some programs of its kernels only move data.
        reads_peers: programs load A from peers, so A must be on the symmetric heap.
        contiguous_rows: copies take whole rows of the output, so these must be contiguous.
        atomic: parts of a sum are added by atomics, in the order in which they arrive.
        stream_waits: copies wait, on their stream, for a word that a concurrent kernel writes. In a graph that runs in
            a single queue the wait could come first; the kernel would then never run.
        async_launch: its kernel waits for copies that peers issue only after the launch of their own kernel has
            returned.
        beside: copies, or a second kernel, run concurrently with a kernel that may fill the device.
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
"""The traits of each algorithm of each op."""
OPS = tuple(TRAITS)
"""All ops."""
_NAMED = {name: one for of_op in TRAITS.values() for name, one in of_op.items()}
"""By name alone, for traits that an algorithm has in every op."""
LIBRARY = tuple(name for name, one in _NAMED.items() if one.library)
"""Algorithms whose matmul is the library's, in every op that has them."""
EXCHANGING = tuple(name for name, one in _NAMED.items() if one.exchange)
"""Algorithms with an exchange, in every op that has them."""


def algorithms(op: str) -> tuple[str, ...]:
    """The algorithms of ``op``; none if it is not one of Iris's."""
    return tuple(TRAITS.get(op, ()))
