"""Words: small pieces of data whose arrival can be seen in the data itself, so that no flag has to follow."""

from typing import Any

import triton
import triton.language as tl

from iris.device.arch import clock_ns, load_fresh, repeated, store_own
from iris.device.bounds import POLLS_PER_CHECK, check_bounds, require_site
from iris.device.control import NO_FLAG, SITE_USER, own_base
from iris.device.handle import MAX_RANKS, require_handle
from iris.device.rma import is_whole, points_to

NO_WORD: tl.constexpr = tl.constexpr(-1)
"""The content of a word that has not arrived yet, in 32 or 64 bits."""
_ANOTHER_NAN: tl.constexpr = tl.constexpr(0x7FFFFFFF)
"""Read as one float32, two 16-bit floats or four e4m3, it is all NaNs, as :data:`NO_WORD` is."""
_LEAST_WORDS: tl.constexpr = tl.constexpr(128)
"""The fewest words that may be waited for together: more than the lanes of a warp, or of AMD's wave."""


@triton.constexpr_function
def _is_int32(data: Any) -> bool:
    return isinstance(data, tl.tensor) and data.dtype == tl.int32


@triton.constexpr_function
def _names_each(peers: Any, word_ptrs: Any) -> bool:
    """Whether ``peers`` is a block of one rank for each peer of ``word_ptrs``."""
    return isinstance(peers, tl.tensor) and list(peers.shape) == list(word_ptrs.shape)[:1]


@triton.jit
def _require_words(word_ptrs):
    """Words that have not arrived are known by their bits, so words of floats would all have arrived."""
    tl.static_assert(
        points_to(word_ptrs, tl.int32) or points_to(word_ptrs, tl.int64),
        "words are int32, or int64 for data that is not floats: expected a block of pointers to them as first argument",
    )


@triton.jit
def _require_block(word_ptrs, peers):
    """All warps must agree on whether all words have arrived. Of a block that fits into one warp, every warp would hold
    a copy and decide by what it saw itself, so that some warps would go on to another CTA barrier than the rest."""
    tl.static_assert(len(word_ptrs.shape) == 3, "words are taken in blocks of three dimensions, the first for the peer")
    tl.static_assert(word_ptrs.numel >= _LEAST_WORDS, "words are waited for in blocks of at least 128")
    tl.static_assert(
        is_whole(peers) and _names_each(peers, word_ptrs),
        "peers: expected a block with a rank for each peer of the words",
    )


@triton.jit
def store_words(word_ptrs, data, mask=None):
    """Store a block of int32, to any rank, as *words*. A word has arrived once its place no longer holds
    :data:`NO_WORD`, so no flag follows the data, and no fence waits for it. (The custom all-reduces of TensorRT-LLM and
    FlashInfer do this with negative zeros, in Lamport's way.)

    Args:
        word_ptrs: where to store; each place is alternately stored to, and taken from by :func:`take_words`. Of int32
            if the data is floats: the bits of :data:`NO_WORD` are then NaNs, and such data is stored as other NaNs. Of
            int64 for any other data, in which every pattern of 32 bits may occur. At first all ranks fill this memory
            with :data:`NO_WORD`, which is -1, and meet at a barrier.
        data: int32; of another dtype, its bits as int32.
        mask: which of the words are stored.

    Sync: orders nothing, not even one word before the next.
    """
    _require_words(word_ptrs)
    tl.static_assert(_is_int32(data), "data: expected int32; of other dtypes its bits: data.to(tl.int32, bitcast=True)")
    if word_ptrs.dtype.element_ty == tl.int64:
        words = data.to(tl.int64) & 0xFFFFFFFF
    else:
        words = tl.where(data == NO_WORD, _ANOTHER_NAN, data)
    tl.store(word_ptrs, words, mask=mask, cache_modifier=".wt")


@triton.jit
def take_words(word_ptrs, epoch, peers, mask, handle, site: tl.constexpr = SITE_USER):
    """Wait until words have arrived at all of ``word_ptrs``, in this rank's heap, and replace them by :data:`NO_WORD`.
    Returns the data, int32.

    Args:
        word_ptrs: a block of three dimensions, the first of which is the peer; at least 128 words, of int32 or int64 as
            they were stored.
        epoch: the call's, int32; named if the wait expires.
        peers: the ranks expected to store the words, one for each place of the first dimension; named if the wait
            expires.
        mask: which words to wait for, broadcast to the block; the data of the others is 0.

    Sync: orders nothing. Before a peer stores to these places again, it must have received something that this rank
        sent in a later kernel. Bounded as :func:`wait`.
    """
    _require_words(word_ptrs)
    _require_block(word_ptrs, peers)
    require_handle(handle)
    require_site(site)
    mask = tl.broadcast_to(mask, word_ptrs.shape)
    seen = load_fresh(word_ptrs, mask)
    missing = _words_missing(seen)
    if missing > 0:
        started = clock_ns()
        stopped = 0
        polls = 0
        gone = 0
        while (missing > 0) & (stopped == 0):
            if polls == POLLS_PER_CHECK:
                late = seen == NO_WORD
                first = tl.min(tl.where(late, word_ptrs.to(tl.int64), 1 << 62))
                peer = tl.min(tl.where(late, peers[:, None, None], MAX_RANKS))
                offset = first - own_base(handle)
                stopped, gone = check_bounds(offset, epoch, NO_FLAG, peer, gone, started, handle, site)
                polls = 0
            seen = load_fresh(word_ptrs, mask)
            missing = _words_missing(seen)
            polls += 1
    if repeated(word_ptrs):
        # Several threads hold the same word: the one that counts saw it arrive, the others may have looked earlier.
        seen = load_fresh(word_ptrs, mask)
        tl.debug_barrier()
    store_own(word_ptrs, tl.zeros_like(seen) + NO_WORD, mask)
    return seen.to(tl.int32)


@triton.jit
def _words_missing(words):
    """Whether any word is missing, int32."""
    return tl.max((words == NO_WORD).to(tl.int32))
