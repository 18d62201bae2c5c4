"""Pass messages between running kernels: ``iris.signal`` and ``iris.wait``.

Every rank produces messages for the next rank and consumes those of the previous one, in a single kernel of two
programs, without the host in between. A message goes through one of two slots in the consumer's heap:

    producer   wait until the slot is free  ->  store the message  ->  signal "message m is there"
    consumer   wait for message m           ->  read it            ->  signal "message m is done"

``signal`` publishes everything that the program stored before it; after ``wait`` the program's reads see what was
published. Flags only grow: the count of messages is the epoch. So nothing is reset, not even between launches, and
a message can neither be missed nor read twice. A wait for a message that never comes ends in ``iris.WaitTimeout``,
which names the rank that did not send it.

    python examples/06_message_passing.py
    python examples/06_message_passing.py --num_ranks 8 --messages 20

It launches the kernel three times and checks every message exactly.
"""

import torch
import triton
import triton.language as tl

import iris
from iris.bench.draws import random_bits, require, same_bits
from iris.bench.options import positive, rank_parser, ranks_to_start

LENGTH = 1024
LAUNCHES = 3
SLOTS = tl.constexpr(2)  # a power of two, so that the count of messages may wrap around


@triton.jit
def produce(handle, outbox, slots, ready, done, sent, messages, LENGTH: tl.constexpr):
    """Send ``messages`` messages to the next rank. ``sent`` counts those of all launches."""
    peer = (iris.rank(handle) + 1) % iris.world_size(handle)
    offsets = tl.arange(0, LENGTH)
    before = tl.load(sent)
    for message in range(messages):
        epoch = before + message + 1
        slot = epoch & (SLOTS - 1)
        data = tl.load(outbox + message * LENGTH + offsets)
        iris.wait(done, epoch - SLOTS, peer, handle)
        iris.peer.store(handle, slots + slot * LENGTH + offsets, data, peer)
        iris.signal(ready, epoch, peer, handle)
    tl.store(sent, before + messages)


@triton.jit
def consume(handle, inbox, slots, ready, done, received, messages, LENGTH: tl.constexpr):
    """Put ``messages`` messages of the previous rank in ``inbox``. ``received`` counts those of all launches."""
    world_size = iris.world_size(handle)
    peer = (iris.rank(handle) + world_size - 1) % world_size
    offsets = tl.arange(0, LENGTH)
    before = tl.load(received)
    for message in range(messages):
        epoch = before + message + 1
        slot = epoch & (SLOTS - 1)
        iris.wait(ready, epoch, peer, handle)
        tl.store(inbox + message * LENGTH + offsets, tl.load(slots + slot * LENGTH + offsets))
        iris.signal(done, epoch, peer, handle)
    tl.store(received, before + messages)


@triton.jit
def pass_messages(handle, outbox, inbox, slots, flags, counts, messages, LENGTH: tl.constexpr):
    """Program 0 produces, program 1 consumes; both run at the same time."""
    if tl.program_id(0) == 0:
        produce(handle, outbox, slots, flags, flags + 1, counts, messages, LENGTH)
    else:
        consume(handle, inbox, slots, flags, flags + 1, counts + 1, messages, LENGTH)


def main(messages: int) -> None:
    """What each rank runs."""
    with iris.iris(1 << 20) as ctx:
        slots = ctx.empty(SLOTS.value, LENGTH, dtype=torch.float32)
        flags = ctx.zeros(2, dtype=torch.int32)  # written by peers: ready, done
        counts = torch.zeros(2, dtype=torch.int32, device=ctx.device)  # this rank's own: sent, received
        ctx.barrier()
        pair = ctx.rank, (ctx.rank - 1) % ctx.world_size
        for launch in range(LAUNCHES):
            outbox, expected = [
                random_bits(ctx, LAUNCHES * rank + launch, messages * LENGTH, torch.float32) for rank in pair
            ]
            inbox = torch.empty_like(outbox)
            pass_messages[(2,)](ctx.handle, outbox, inbox, slots, flags, counts, messages, LENGTH, num_warps=4)
            ctx.synchronize()
            require(ctx, same_bits(inbox, expected), f"messages of launch {launch}")
            if ctx.rank == 0:
                print(f"launch {launch}: every rank received {messages} messages, {counts[1].item()} so far")


if __name__ == "__main__":
    parser = rank_parser(__doc__)
    parser.add_argument("--messages", type=positive, default=5, help="messages per launch (default: %(default)s)")
    given = parser.parse_args()
    iris.launch(main, ranks_to_start(given.num_ranks), (given.messages,))
