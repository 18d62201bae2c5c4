"""How the host and the kernels of a rank communicate: by the control block at the start of every heap, to which peers
write, too, and by the status words, host memory in which a kernel reports a wait that was given up."""

import triton
import triton.language as tl

from iris.device.handle import STATUS_ADDRESS, rank

CONTROL_BYTES: tl.constexpr = tl.constexpr(4096)
"""The size of the control block at the start of every heap: the abort word, the progress of the two records in the
status words, barrier flags, barrier epochs, and which ranks have closed their contexts."""
ABORT_WORD: tl.constexpr = tl.constexpr(0)
RECORDS: tl.constexpr = tl.constexpr(128)
BARRIER_FLAGS: tl.constexpr = tl.constexpr(256)
BARRIER_EPOCHS: tl.constexpr = tl.constexpr(512)
CLOSED_WORDS: tl.constexpr = tl.constexpr(768)
"""An int32 word for each rank, which that rank's host sets at all peers once everything it had to send is sent."""

STATUS_WORDS: tl.constexpr = tl.constexpr(16)
RECORD_WORDS: tl.constexpr = tl.constexpr(8)
"""The size of each of the two records in the status words: of a wait of this rank that expired, and of a wait that was
told to stop, as another had given up. There are two, so that the second kind never overwrites the first."""
STATUS_CODE: tl.constexpr = tl.constexpr(0)
STATUS_SITE: tl.constexpr = tl.constexpr(1)
STATUS_RANK: tl.constexpr = tl.constexpr(2)
STATUS_PEER: tl.constexpr = tl.constexpr(3)
"""The rank waited for. In the second record: in the lowest byte the rank that the one which gave up waited for, and
above it the rank that this one waited for."""
STATUS_FLAG: tl.constexpr = tl.constexpr(4)
STATUS_WANTED: tl.constexpr = tl.constexpr(5)
STATUS_SEEN: tl.constexpr = tl.constexpr(6)
STATUS_WAITED: tl.constexpr = tl.constexpr(7)
"""In ns; negative if the wait ended because the peer has closed its context."""
CODE_EXPIRED: tl.constexpr = tl.constexpr(1)
CODE_RELAYED: tl.constexpr = tl.constexpr(2)
NO_FLAG: tl.constexpr = tl.constexpr(1 << 32)
"""``STATUS_SEEN`` of a wait for words, which have no flag; it is larger than any int32."""

SITES = {
    0: "a user kernel",
    1: "device_barrier",
    2: "all_gather_matmul",
    3: "matmul_all_scatter",
    4: "matmul",
    5: "matmul_reduce_scatter",
    6: "matmul_all_reduce",
}
"""The op or function that a wait belongs to, for the error message: pass the number as ``site``."""
SITE_USER: tl.constexpr = tl.constexpr(0)
SITE_BARRIER: tl.constexpr = tl.constexpr(1)
SITE_MATMUL: tl.constexpr = tl.constexpr(4)


def abort_code(waiting: int, peer: int) -> int:
    """The abort word's value when the host of rank ``waiting`` gives up on rank ``peer``. If a program gives up, its
    number plus two stands in place of the 1, so that no program takes the host's code for its own. While kernels wait,
    they read the word in their own heap only: reading host memory would hold them up for milliseconds."""
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
