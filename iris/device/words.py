"""Words: little data that says by itself that it has come, so that no flag need follow it."""

import triton
import triton.language as tl

from iris.device.arch import clock_ns, load_fresh, repeated
from iris.device.bounds import POLLS_PER_CHECK, check_bounds, require_site
from iris.device.control import NO_FLAG, SITE_USER, own_base
from iris.device.handle import MAX_RANKS

NO_WORD: tl.constexpr = tl.constexpr(-1)
"""What stands where a word is waited for, in 32 or 64 bits."""
_ANOTHER_NAN: tl.constexpr = tl.constexpr(0x7FFFFFFF)
"""One float32, two of 16 bits, or four e4m3: NaNs all, as those of :data:`NO_WORD` are."""
_LEAST_WORDS: tl.constexpr = tl.constexpr(128)
"""Words that are waited for together: more than the lanes of a warp, or of AMD's wave."""


@triton.jit
def _require_warps(word_ptrs):
    """Threads learn from each other whether all words have come; of words that one warp holds, each warp would keep to
    what it has seen itself, and some would go on to another CTA barrier than the rest."""
    tl.static_assert(word_ptrs.numel >= _LEAST_WORDS, "words are waited for in blocks of at least 128")


@triton.jit
def store_words(word_ptrs, data, mask=None):
    """Store a block of int32, to any rank, as *words*: each says by itself that it has come, as where it lies there was
    :data:`NO_WORD` before. So no flag follows the data, and no fence waits for it. (The custom all-reduces of
    TensorRT-LLM and FlashInfer do so with zeros of negative sign, Lamport's way.)

    Args:
        word_ptrs: where; memory of which each word is stored to, and then taken by :func:`take_words`, by turns. Of
            int32, for data that is floats: of these :data:`NO_WORD` is nothing but NaNs, and such NaNs become others.
            Of int64 for any other data, of which no bits are left for that.
        data: int32.
        mask: which of the words are stored.

    Sync: orders nothing, not even one word and the next.
    """
    if word_ptrs.dtype.element_ty == tl.int64:
        words = data.to(tl.int64) & 0xFFFFFFFF
    else:
        words = tl.where(data == NO_WORD, _ANOTHER_NAN, data)
    tl.store(word_ptrs, words, mask=mask, cache_modifier=".wt")


@triton.jit
def take_words(word_ptrs, epoch, peers, mask, handle, site: tl.constexpr = SITE_USER):
    """Wait until words stand at all of ``word_ptrs``, in this rank's heap, and take them away: :data:`NO_WORD` stands
    there then. Returns the data, int32.

    Args:
        word_ptrs: a block of three dimensions, of which the first is the peer; at least 128 words, of int32 or int64 as
            they were stored.
        epoch: of the call, int32; named if the wait expires.
        peers: the ranks expected to store the words, named if the wait expires.
        mask: which of the words come, broadcast to the block; of others the data is 0.

    Sync: orders nothing. Who stores there again must have had something that this rank sent in a later kernel.
        Bounded as :func:`wait`.
    """
    _require_warps(word_ptrs)
    require_site(site)
    mask = tl.broadcast_to(mask, word_ptrs.shape)
    seen = load_fresh(word_ptrs, mask, 0)
    if _words_missing(seen) > 0:
        started = clock_ns()
        stopped = 0
        polls = 0
        gone = 0
        while (_words_missing(seen) > 0) & (stopped == 0):
            seen = load_fresh(word_ptrs, mask, 0)
            polls += 1
            if polls % POLLS_PER_CHECK == 0 and _words_missing(seen) > 0:
                late = seen == NO_WORD
                first = tl.min(tl.where(late, word_ptrs.to(tl.int64), 1 << 62))
                peer = tl.min(tl.where(late, peers[:, None, None], MAX_RANKS))
                offset = first - own_base(handle)
                stopped, gone = check_bounds(offset, epoch, NO_FLAG, peer, gone, started, handle, site)
    if repeated(word_ptrs):
        # One thread saw a word come, and all go by that; another that holds the same word may have looked before.
        seen = load_fresh(word_ptrs, mask, 0)
        tl.debug_barrier()
    tl.store(word_ptrs, tl.zeros_like(seen) + NO_WORD, mask=mask)
    return seen.to(tl.int32)


@triton.jit
def _words_missing(words):
    """Whether any word has not come, int32."""
    return tl.max((words == NO_WORD).to(tl.int32))
