"""What the host and the kernels of a rank tell each other: the control block at the start of every heap, which peers
write to, too, and the status words, host memory in which a kernel leaves word of a wait that was given up."""

import triton
import triton.language as tl

from iris.device.handle import STATUS_ADDRESS, rank

CONTROL_BYTES: tl.constexpr = tl.constexpr(4096)
"""The control block at the start of every heap: the abort word, then how far the two records in the status words are,
barrier flags, barrier epochs, and which ranks have closed their contexts."""
ABORT_WORD: tl.constexpr = tl.constexpr(0)
RECORDS: tl.constexpr = tl.constexpr(128)
BARRIER_FLAGS: tl.constexpr = tl.constexpr(256)
BARRIER_EPOCHS: tl.constexpr = tl.constexpr(512)
CLOSED_WORDS: tl.constexpr = tl.constexpr(768)
"""An int32 word for each rank, which its host sets at all peers when all that it was to send has been sent."""

STATUS_WORDS: tl.constexpr = tl.constexpr(16)
RECORD_WORDS: tl.constexpr = tl.constexpr(8)
"""Of the two records in the status words, that of a wait of this rank's that expired, and that of what another one said
when it gave up: programs that are only told to stop must not write over the first."""
STATUS_CODE: tl.constexpr = tl.constexpr(0)
STATUS_SITE: tl.constexpr = tl.constexpr(1)
STATUS_RANK: tl.constexpr = tl.constexpr(2)
STATUS_PEER: tl.constexpr = tl.constexpr(3)
"""Who was waited for. In the record of what another rank said: in the lowest byte for whom that one waited, and above
it for whom this rank did."""
STATUS_FLAG: tl.constexpr = tl.constexpr(4)
STATUS_WANTED: tl.constexpr = tl.constexpr(5)
STATUS_SEEN: tl.constexpr = tl.constexpr(6)
STATUS_WAITED: tl.constexpr = tl.constexpr(7)
"""In ns; negative if the wait ended because the peer has closed its context."""
CODE_EXPIRED: tl.constexpr = tl.constexpr(1)
CODE_RELAYED: tl.constexpr = tl.constexpr(2)
NO_FLAG: tl.constexpr = tl.constexpr(1 << 32)
"""What a record has for what was seen, where data was waited for that comes without a flag: no int32."""

SITES = {
    0: "a user kernel",
    1: "device_barrier",
    2: "all_gather_matmul",
    3: "matmul_all_scatter",
    4: "matmul",
    5: "matmul_reduce_scatter",
    6: "matmul_all_reduce",
}
"""What a wait belongs to, for the error message: pass the number as ``site``."""
SITE_USER: tl.constexpr = tl.constexpr(0)
SITE_BARRIER: tl.constexpr = tl.constexpr(1)
SITE_MATMUL: tl.constexpr = tl.constexpr(4)


def abort_code(waiting: int, peer: int) -> int:
    """What the abort word holds when the host of rank ``waiting`` gives up on rank ``peer``; if a program does, its
    number plus two is on top, so that it does not take the host's word for its own. Kernels only read their own heap's
    word while they wait, since reading host memory would hold them up for milliseconds."""
    return (1 << 16) | (waiting << 8) | peer


@triton.jit
def own_base(handle):
    return tl.load(handle.bases + rank(handle))


@triton.jit
def control_word(handle, offset: tl.constexpr):
    return (own_base(handle) + offset).to(tl.pointer_type(tl.int32))


@triton.jit
def abort_word(handle):
    return (own_base(handle) + ABORT_WORD).to(tl.pointer_type(tl.int64))


@triton.jit
def status_words(handle):
    return tl.load(handle.info + STATUS_ADDRESS).to(tl.pointer_type(tl.int64))
