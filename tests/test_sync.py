"""Signals, waits, barriers and broadcasts between ranks, one of them late, all of them or some of them."""

from __future__ import annotations

import itertools
import math
import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from mistakes import MISTAKES, mistaken_kernel
from ops_inputs import some
from ranks import BACKEND, Failure, Ranks, assert_close, context, failure_of, fresh, poison, worlds

import iris
from iris.device import control, sync, turnstile
from iris.device.words import take_words

pytestmark = pytest.mark.timeout(120)

N = 32
TWO_OR_MORE = pytest.mark.parametrize("ranks", worlds(2), indirect=True)


@triton.jit
def send(inbox, outbox, flag, peer, epoch, handle, BLOCK: tl.constexpr):
    offsets = epoch * BLOCK + tl.arange(0, BLOCK)
    iris.peer.store(handle, inbox + offsets, tl.load(outbox + offsets), peer)
    iris.signal(flag, epoch + 1, peer, handle)


@triton.jit
def receive(inbox, result, flag, peer, epoch, handle, BLOCK: tl.constexpr):
    offsets = epoch * BLOCK + tl.arange(0, BLOCK)
    iris.wait(flag, epoch + 1, peer, handle)
    tl.store(result + offsets, tl.load(inbox + offsets))


@triton.jit
def message_kernel(
    inbox, outbox, result, flag, following, previous, epoch, handle, RECEIVE_FIRST: tl.constexpr, BLOCK: tl.constexpr
):
    """Of two programs one sends to the next rank, and one receives from the previous rank."""
    receives = tl.program_id(0) == (0 if RECEIVE_FIRST else 1)
    if receives:
        receive(inbox, result, flag, previous, epoch, handle, BLOCK)
    else:
        send(inbox, outbox, flag, following, epoch, handle, BLOCK)


@triton.jit
def count_kernel(counter, total, seen, handle, PROGRAMS: tl.constexpr):
    """All programs of all ranks increment a flag of rank 0; the last program of rank 0 waits for the total."""
    if tl.program_id(0) < PROGRAMS:
        iris.signal_add(counter, 1, 0, handle)
    elif iris.rank(handle) == 0:
        tl.store(seen, iris.wait(counter, total, 0, handle))


@triton.jit
def look_kernel(inbox, flag, result, epoch, handle, BLOCK: tl.constexpr):
    """Send a message to the next rank, then look for that of the previous one, and count the looks."""
    offsets = tl.arange(0, BLOCK)
    peer = (iris.rank(handle) + 1) % iris.world_size(handle)
    tl.store(result + BLOCK, iris.reached(flag, epoch).to(tl.int32))  # not yet: the host waits on all ranks first
    iris.barrier(handle)
    iris.peer.store(handle, inbox + offsets, epoch * 1000 + offsets, peer)
    iris.signal(flag, epoch, peer, handle)
    here = iris.reached(flag, epoch)
    while here == 0:
        here = iris.reached(flag, epoch)
    tl.store(result + offsets, tl.load(inbox + offsets))


@triton.jit
def all_to_all_kernel(inbox, flags, result, epoch, handle, LANES: tl.constexpr):
    """Every rank writes one word to every rank, signals all at once, and waits for all at once."""
    me, size = iris.rank(handle), iris.world_size(handle)
    lanes = tl.arange(0, LANES)
    valid = lanes < size
    for peer in range(size):
        iris.peer.store(handle, inbox + me, epoch * 1000 + me * 10 + peer, peer)
    iris.signal_all(flags + me, lanes * 0 + epoch, lanes, valid, handle)
    here = iris.wait_all(flags + lanes, epoch, lanes, valid, handle)
    tl.store(result + lanes, tl.load(inbox + lanes, mask=valid & here, other=-1), mask=valid)


@triton.jit
def rounds_kernel(slots, seen, first, handle, ROUNDS: tl.constexpr, LANES: tl.constexpr):
    """Do ROUNDS times: write the round, meet, read that of every peer, meet."""
    lanes = tl.arange(0, LANES)
    valid = lanes < iris.world_size(handle)
    for turn in range(ROUNDS):
        tl.store(slots, first + turn)
        iris.barrier(handle)
        theirs = tl.load(iris.peer.translate(handle, slots + lanes * 0, tl.where(valid, lanes, 0)), mask=valid, other=0)
        tl.store(seen + turn * LANES + lanes, theirs, mask=valid)
        iris.barrier(handle)


@triton.jit
def tell_kernel(slots, value, members, count, handle):
    """Write ``value`` into this rank's slot in the memory of every member."""
    for index in range(count):
        iris.peer.store(handle, slots + iris.rank(handle), value, tl.load(members + index))


def run_messages(receive_first: bool, late: int | None, seed: int) -> None:
    ctx = context()
    poison(ctx)
    epochs, me, size = 6, ctx.rank, ctx.world_size
    previous, following = (me - 1) % size, (me + 1) % size
    sent = [torch.randn(epochs * N, generator=torch.Generator().manual_seed(seed + rank)) for rank in range(size)]
    inbox, outbox = ctx.empty(epochs * N), ctx.as_symmetric(sent[me])
    result, flag = ctx.empty(epochs * N), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    for epoch in range(epochs):
        if late == me:
            time.sleep(0.15)
        message_kernel[(2,)](
            inbox, outbox, result, flag, following, previous, epoch, ctx.handle, receive_first, N, num_warps=1
        )
    ctx.barrier()
    assert_close(result.cpu(), sent[previous])


def run_count(programs: int) -> int:
    ctx = context()
    counter, seen = ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    count_kernel[(programs + 1,)](counter, programs * ctx.world_size, seen, ctx.handle, programs)
    ctx.barrier()
    assert int(counter.item()) == (programs * ctx.world_size if ctx.rank == 0 else 0)
    return int(seen.item())


def run_all_to_all(epochs: int) -> list[list[int]]:
    ctx = context()
    inbox, flags = ctx.zeros(16, dtype=torch.int32), ctx.zeros(16, dtype=torch.int32)
    results = ctx.zeros(epochs, 16, dtype=torch.int32)
    ctx.barrier()
    for epoch in range(epochs):
        if ctx.rank == epoch % ctx.world_size:
            time.sleep(0.02)
        all_to_all_kernel[(1,)](inbox, flags, results[epoch], epoch + 1, ctx.handle, 16)
        ctx.device_barrier()
    ctx.barrier()
    rows: list[list[int]] = results[:, : ctx.world_size].tolist()
    return rows


def run_looks(epochs: int) -> list[list[int]]:
    ctx = context()
    inbox, flag = ctx.zeros(64, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    results = torch.zeros(epochs, 65, dtype=torch.int32, device=ctx.device)
    for epoch in range(epochs):
        ctx.barrier()
        look_kernel[(1,)](inbox, flag, results[epoch], epoch + 1, ctx.handle, 64)
    ctx.barrier()
    return results.tolist()


def run_wrap_around() -> list[int]:
    """A flag that has counted past the largest int32."""
    ctx = context()
    last = 2**31 - 1
    flag, seen = ctx.full((1,), last, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    count_kernel[(2,)](flag, -(2**31) + ctx.world_size - 1, seen, ctx.handle, 1)
    ctx.barrier()
    return [int(flag.item()), int(seen.item())]


@pytest.mark.parametrize("receive_first", [False, True], ids=["send-first", "receive-first"])
def test_messages_arrive_whole_and_in_order(ranks: Ranks, receive_first: bool, seed: int) -> None:
    ranks.run(run_messages, receive_first, None, seed)


@TWO_OR_MORE
@pytest.mark.parametrize("late", [0, 1])
def test_messages_arrive_when_one_rank_is_late(ranks: Ranks, late: int, seed: int) -> None:
    ranks.run(run_messages, True, late, seed)


def test_signal_add_counts_every_program_of_every_rank(ranks: Ranks) -> None:
    seen = ranks.run(run_count, 5)
    assert seen == [5 * ranks.world_size] + [0] * (ranks.world_size - 1)


def test_a_look_tells_whether_a_message_is_there(ranks: Ranks) -> None:
    for rows in ranks.run(run_looks, 4):
        assert rows == [[epoch * 1000 + i for i in range(64)] + [0] for epoch in range(1, 5)]


def test_signal_all_and_wait_all(ranks: Ranks) -> None:
    for rank, rows in enumerate(ranks.run(run_all_to_all, 8)):
        expected = [[epoch * 1000 + peer * 10 + rank for peer in range(ranks.world_size)] for epoch in range(1, 9)]
        assert rows == expected


def test_a_flag_may_wrap_around(ranks: Ranks) -> None:
    wrapped = -(2**31) + ranks.world_size - 1
    assert ranks.run(run_wrap_around)[0] == [wrapped, wrapped]


def run_barrier_in_kernel(rounds: int) -> None:
    ctx = context()
    slots, seen = ctx.zeros(1, dtype=torch.int32), ctx.zeros(rounds, 16, dtype=torch.int32)
    for first in (1, 1001):
        ctx.barrier()
        rounds_kernel[(1,)](slots, seen, first, ctx.handle, rounds, 16)
        ctx.barrier()
        expected = torch.arange(first, first + rounds, dtype=torch.int32)[:, None].expand(rounds, ctx.world_size)
        assert_close(seen[:, : ctx.world_size].cpu(), expected)


def run_groups(on_device: bool, turns: int, late: int | None, seed: int) -> int:
    """Run a random sequence of groups, the same on all ranks: each member tells the others, they meet, and look."""
    ctx = context()
    dice = random.Random(seed)
    every = range(ctx.world_size)
    groups = [list(group) for count in every for group in itertools.combinations(every, count + 1)]
    slots = ctx.zeros(16, dtype=torch.int32)
    ctx.barrier()
    met = 0
    for turn in range(1, turns + 1):
        group = dice.choice(groups)
        dice.shuffle(group)
        if ctx.rank not in group:
            continue
        if late == ctx.rank:
            time.sleep(0.02)
        members = torch.tensor(group, dtype=torch.int32, device=ctx.device)
        tell_kernel[(1,)](slots, turn, members, len(group), ctx.handle)
        if on_device:
            ctx.device_barrier(group=group)
            got = slots.clone()
            ctx.device_barrier(group=group)
            ctx.synchronize()
        else:
            ctx.barrier(group=group)
            got = slots.clone()
            ctx.barrier(group=group)
        assert [int(got[member]) for member in group] == [turn] * len(group), (turn, group)
        met += 1
    ctx.barrier()
    return met


def run_host_barrier_holds_back() -> tuple[float, float]:
    """When each rank came to the barrier, and when it left."""
    ctx = context()
    if ctx.rank == ctx.world_size - 1:
        time.sleep(0.4)
    came = time.monotonic()
    ctx.barrier()
    return came, time.monotonic()


def run_process_groups(path: str) -> dict[str, Any]:
    """Use sub-groups that torch makes: for a barrier, and for a context of their own."""
    rank, size = context().rank, context().world_size
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    try:
        even, odd = dist.new_group(range(0, size, 2)), dist.new_group(range(1, size, 2))
        mine = odd if rank % 2 else even
        with iris.iris(1 << 20, timeout_s=20) as whole:
            whole.barrier(group=mine)
            whole.device_barrier(group=mine)
            whole.synchronize()
            wrong = failure_of(whole.barrier, None, even if rank % 2 else odd)
        other = dist.new_group([0])
        strange = failure_of(iris.iris, 1 << 20, other) if rank else None
        with iris.iris(1 << 20, group=mine, timeout_s=20) as part:
            told = part.broadcast(f"from {rank}", part.world_size - 1)
            seen = {"rank": part.rank, "size": part.world_size, "told": told, "whole": whole.world_size}
            part.barrier(group=mine)
            part.barrier(group=[0, part.world_size - 1] if part.rank in (0, part.world_size - 1) else [part.rank])
        return {**seen, "wrong": wrong, "strange": strange}
    finally:
        dist.destroy_process_group()


def run_a_wait_in_a_group(path: str) -> Failure:
    """The failure of the last rank but one if the last does not make its call in a context of just these two."""
    rank, size = context().rank, context().world_size
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    failure = Failure()
    try:
        group = dist.new_group([size - 2, size - 1])
        if rank >= size - 2:
            with suppress(iris.IrisError), iris.iris(1 << 20, group=group, timeout_s=0.2) as pair:
                if rank == size - 2:
                    failure = failure_of(pair.broadcast, None, 0)
                dist.barrier(group)
        dist.barrier()
        return failure
    finally:
        dist.destroy_process_group()


def run_a_context_that_comes_late(path: str, missing: int) -> list[Failure]:
    """Failures of contexts of a process group, for which one rank comes too late, and then all in time."""
    rank, size = context().rank, context().world_size
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    try:
        failures = []
        for first_timeout_s in (0.3, 30.0):
            if rank != missing or first_timeout_s > 1:
                failures.append(
                    failure_of(lambda limit=first_timeout_s: iris.iris(1 << 20, first_timeout_s=limit).close())
                )
            dist.barrier()
        return failures
    finally:
        dist.destroy_process_group()


def meet_anew() -> None:
    with fresh(timeout_s=5) as ctx:
        ctx.barrier()


def run_wrong_local_ranks(path: str) -> list[Failure]:
    rank, size = int(os.environ["IRIS_RANK"]), int(os.environ["IRIS_WORLD_SIZE"])
    before = os.environ.get("LOCAL_RANK")
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    try:
        failures = []
        for text in ("abc", "-1", "1.0"):
            os.environ["LOCAL_RANK"] = text
            failures.append(failure_of(iris.iris, 1 << 20))
        dist.barrier()  # else a rank that is done closes connections that another is still opening
        return failures
    finally:
        dist.destroy_process_group()
        os.environ.pop("LOCAL_RANK")
        if before is not None:
            os.environ["LOCAL_RANK"] = before


def run_wrong_groups() -> list[Failure]:
    ctx = context()
    others = [rank for rank in range(ctx.world_size) if rank != ctx.rank]
    wrong: tuple[list[int], ...] = ([], others, [ctx.rank, ctx.world_size], [ctx.rank, -1], [ctx.rank, ctx.rank])
    found = [failure_of(ctx.barrier, None, group) for group in wrong]
    found += [failure_of(ctx.device_barrier, group) for group in (*wrong, {"rank": 0}, 3, "0", np.array(0))]
    found += [failure_of(ctx.barrier, None, group) for group in ([True, False], [0.0], np.eye(2), np.array([0.0, 1.0]))]
    return [*found, failure_of(ctx.barrier, [ctx.rank])]


def run_groups_of_numpy() -> None:
    ctx = context()
    whole = np.arange(ctx.world_size)
    for group in (whole, list(whole), whole[::-1].astype(np.int8)):
        ctx.barrier(group=group)
        ctx.device_barrier(group)
    ctx.barrier()


def test_a_group_may_be_an_array(ranks: Ranks) -> None:
    ranks.run(run_groups_of_numpy)


def test_a_barrier_in_a_kernel_many_times(ranks: Ranks) -> None:
    ranks.run(run_barrier_in_kernel, 12)


@pytest.mark.parametrize(
    ("on_device", "late"),
    some(
        [
            pytest.param(False, None, id="host"),
            pytest.param(False, 0, id="host-rank-0-late"),
            pytest.param(True, 0, id="device-rank-0-late"),
            pytest.param(True, None, id="device"),
        ]
    ),
)
def test_barriers_of_any_mix_of_groups(ranks: Ranks, on_device: bool, late: int | None, seed: int) -> None:
    turns = 20 if on_device and BACKEND == "sim" else 40
    assert all(met > 0 for met in ranks.run(run_groups, on_device, turns, late, seed))


@TWO_OR_MORE
def test_nobody_leaves_a_barrier_before_the_last_has_come(ranks: Ranks) -> None:
    times = ranks.run(run_host_barrier_holds_back)
    assert min(left for _, left in times) >= max(came for came, _ in times)
    assert times[-1][0] - times[0][0] > 0.3


@pytest.mark.parametrize("ranks", worlds(4, 4), indirect=True)
def test_process_groups(ranks: Ranks, tmp_path: Path) -> None:
    for rank, seen in enumerate(ranks.run(run_process_groups, str(tmp_path / "store"))):
        assert (seen["rank"], seen["size"], seen["whole"]) == (rank // 2, 2, 4)
        assert seen["told"] == f"from {2 + rank % 2}"
        assert seen["wrong"].kind == "ArgumentError"
        assert f"with this rank, {rank}, among them, got a group without this rank" in seen["wrong"].message
        told = "iris: group: expected a group that this rank belongs to, got a group without this rank"
        assert rank == 0 or seen["strange"].message == told
    ranks.run(meet_anew)  # although some ranks were refused a context in between


@pytest.mark.parametrize("ranks", worlds(3, 3), indirect=True)
def test_a_rank_of_a_group_is_named_as_launchers_name_it(ranks: Ranks, tmp_path: Path) -> None:
    failure = ranks.run(run_a_wait_in_a_group, str(tmp_path / "store"))[1]
    assert failure.kind == "WaitTimeout" and failure.ranks == (1,)
    assert failure.message.endswith("(rank 1 is rank 2 of torch.distributed)"), failure


@pytest.mark.parametrize("ranks", worlds(3, 4), indirect=True)
def test_a_rank_that_does_not_make_the_context_of_its_group_is_named(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks.run(run_a_context_that_comes_late, str(tmp_path / "store"), 1)
    for rank, failures in enumerate(outcomes):
        assert failures[-1].kind == "nothing", failures
        if rank != 1:
            assert failures[0].kind == "WaitTimeout" and failures[0].took_s < 1.3, failures
            assert failures[0].ranks == (1,) and f"rank {rank} waited 0.3 s for rank 1 of" in failures[0].message


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_local_rank_that_is_no_number_is_named(ranks: Ranks, tmp_path: Path) -> None:
    for failures in ranks.run(run_wrong_local_ranks, str(tmp_path / "store")):
        for text, failure in zip(("abc", "-1", "1.0"), failures, strict=True):
            assert failure.kind == "ArgumentError" and f"got '{text}'. Set it, or pass device=" in failure.message


def test_a_group_that_cannot_be_is_named(ranks: Ranks) -> None:
    for failures in ranks.run(run_wrong_groups):
        for failure in failures:
            assert failure.kind == "ArgumentError" and failure.took_s < 2
            assert "barrier: group: expected" in failure.message or "Pass group=" in failure.message
        assert f"ranks from 0 to {ranks.world_size - 1} " in failures[2].message
        assert f", {ranks.world_size}]" in failures[2].message and ", -1]" in failures[3].message


VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -(2**70),
    2**14_000 - 1,
    2.5,
    math.inf,
    "",
    "Grüße, 世界\n",
    b"",
    bytes(range(256)),
    [],
    [1, "two", None, [3.0, False]],
    {"a": 1, "b": {"c": [None]}},
    "x" * 3_000_000,
]


def tensors_to_send(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(3, 5, generator=generator)
    dtypes = (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool)
    complex_one = torch.complex(drawn, drawn + 1)
    odd = [drawn.t(), drawn[:, 1:4], torch.tensor(3.5), torch.zeros(0, 4), complex_one, complex_one.conj()]
    odd += [drawn[:1, :1].expand(1, 1).T, torch.tensor(1.0).expand(1, 1)]
    return [drawn, *odd, complex_one.conj().imag, *(drawn.to(d) for d in dtypes)]


def run_ranks_of_numpy() -> tuple[Any, list[int]]:
    ctx = context()
    last = np.int64(ctx.world_size - 1)
    mine = ctx.full((2,), ctx.rank, dtype=torch.int32)
    ctx.barrier()
    seen = ctx.broadcast(ctx.rank, last), ctx.peer_view(mine, last).tolist()
    ctx.barrier()
    return seen


def run_broadcasts(source: int, seed: int) -> None:
    ctx = context()
    mine = ctx.rank == source
    for value in VALUES:
        got = ctx.broadcast(value if mine else "ignored", source)
        assert got == value and type(got) is type(value)
    numbers = [np.float32(0.1), np.int64(1) << 62, {"yes": np.bool_(True), "half": [np.float16(0.5)]}]
    got = [ctx.broadcast(value if mine else None, source) for value in numbers]
    assert got == [float(np.float32(0.1)), 1 << 62, {"yes": True, "half": [0.5]}]
    assert [type(one) for one in got] == [float, int, dict] and got[2]["yes"] is True
    for tensor in tensors_to_send(seed):
        got = ctx.broadcast(tensor if mine else object(), source)
        assert got.device == ctx.device
        assert_close(got.cpu(), tensor)
    symmetric = ctx.full((4,), float(ctx.rank))
    assert ctx.broadcast(symmetric, source).tolist() == [float(source)] * 4


def run_wrong_broadcasts() -> list[Failure]:
    ctx = context()
    return [
        failure_of(ctx.broadcast, 1, ctx.world_size),
        failure_of(ctx.broadcast, 1, -1),
        failure_of(ctx.broadcast, 1, True),
        failure_of(ctx.broadcast, object(), 0),
        failure_of(ctx.broadcast, {3, 4}, ctx.world_size - 1),
        failure_of(ctx.broadcast, [np.complex64(1)], 0),
        failure_of(ctx.broadcast, np.longdouble(1), 0),
    ]


def test_a_rank_may_be_numpys(ranks: Ranks) -> None:
    last = ranks.world_size - 1
    assert ranks.run(run_ranks_of_numpy) == [(last, [last, last])] * ranks.world_size


def test_broadcast_of_every_kind_of_value(ranks: Ranks, seed: int) -> None:
    for source in {0, ranks.world_size - 1}:
        ranks.run(run_broadcasts, source, seed)


def test_a_broadcast_that_cannot_be_is_the_same_error_on_every_rank(ranks: Ranks) -> None:
    for failures in ranks.run(run_wrong_broadcasts):
        assert [failure.kind for failure in failures] == ["ArgumentError"] * 7
        assert all(failure.took_s < 2 for failure in failures)
        assert f"broadcast: source: expected a rank from 0 to {ranks.world_size - 1}" in failures[0].message
        assert "broadcast: value: expected None, bool, number, string" in failures[3].message
        gotten = [failure.message.split("got ")[-1] for failure in failures[3:]]
        assert gotten == ["object", "set", "complex at value[0]", "longdouble"]


@triton.jit
def wait_kernel(flag, handle):
    iris.wait(flag, 1, 0, handle)


@triton.jit
def signal_kernel(flag, handle):
    iris.signal_all(flag + tl.arange(0, 2), tl.zeros((2,), tl.int32), tl.zeros((2,), tl.int32), True, handle)


def flags_of(dtype: torch.dtype) -> list[Failure]:
    ctx = context()
    flag = ctx.ones(2, dtype=dtype)
    kernels: tuple[Any, ...] = (wait_kernel, signal_kernel)
    return [failure_of(lambda: kernel[(1,)](flag, ctx.handle)) for kernel in kernels]  # noqa: B023


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
@pytest.mark.parametrize("dtype", [torch.uint32, torch.int64, torch.float32], ids=str)
def test_flags_are_int32(ranks: Ranks, dtype: torch.dtype) -> None:
    for failures in ranks.run(flags_of, dtype):
        assert all("a flag is int32" in failure.message for failure in failures), failures


def mistakes_of(kinds: list[str]) -> list[Failure]:
    ctx = context()
    flag, data = ctx.zeros(2, dtype=torch.int32), ctx.zeros(1)
    return [failure_of(lambda: mistaken_kernel[(1,)](flag, data, ctx.handle, KIND=kind)) for kind in kinds]  # noqa: B023


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_mistaken_arguments_are_refused_with_what_belongs_there(ranks: Ranks) -> None:
    for failures in ranks.run(mistakes_of, list(MISTAKES)):
        for failure, (kind, words) in zip(failures, MISTAKES.items(), strict=True):
            assert words in failure.message, (kind, failure)


@triton.jit
def counted_kernel(flag, counts, seen, handle):
    """Signals and waits for a count of 64 bits, and for a block of them."""
    count = tl.load(counts)
    iris.signal(flag, count, iris.rank(handle), handle)
    tl.store(seen, iris.wait(flag, count, iris.rank(handle), handle))
    lanes = tl.arange(0, 2)
    peers = lanes * 0 + iris.rank(handle)
    iris.signal_all(flag + lanes, tl.load(counts + lanes), peers, lanes < 2, handle)
    iris.wait_all(flag + lanes, tl.load(counts + lanes), peers, lanes < 2, handle)
    iris.signal_add(flag, tl.load(counts) + 1, iris.rank(handle), handle)


@triton.jit
def given_count_kernel(flag, count, seen, handle, COUNT: tl.constexpr):
    iris.signal(flag, count, iris.rank(handle), handle)
    tl.store(seen, iris.wait(flag, count, iris.rank(handle), handle))
    iris.signal(flag, COUNT, iris.rank(handle), handle)
    iris.wait(flag, COUNT, iris.rank(handle), handle)


def run_counts(count: int) -> list[int]:
    ctx = context()
    flag, seen = ctx.zeros(2, dtype=torch.int32), ctx.zeros(2, dtype=torch.int32)
    counts = ctx.full((2,), count, dtype=torch.int64)
    counted_kernel[(1,)](flag, counts, seen, ctx.handle)
    given_count_kernel[(1,)](flag[1:], count, seen[1:], ctx.handle, COUNT=count + 1)
    ctx.synchronize()
    return [*seen.tolist(), *flag.tolist()]


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
@pytest.mark.parametrize("count", [7, (1 << 31) - 1, 1 << 31, (1 << 31) + 5, (1 << 40) + 3])
def test_counts_of_more_bits_wrap_as_flags_do(ranks: Ranks, count: int) -> None:
    def wrapped(number: int) -> int:
        return (number + (1 << 31)) % (1 << 32) - (1 << 31)

    for found in ranks.run(run_counts, count):
        assert found == [wrapped(count), wrapped(count), wrapped(2 * count + 1), wrapped(count + 1)]


@triton.jit
def take_words_kernel(words, handle, WORDS: tl.constexpr):
    lanes = tl.arange(0, 1)
    take_words(
        (words + tl.arange(0, WORDS))[None, None, :], lanes.sum() + 1, lanes, (lanes == 0)[:, None, None], handle
    )


def words_of(count: int) -> Failure:
    ctx = context()
    words = ctx.zeros((count,), dtype=torch.int32)
    return failure_of(lambda: take_words_kernel[(1,)](words, ctx.handle, count))


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_few_words_are_refused(ranks: Ranks) -> None:
    """If one warp can hold all words, the warps of a program might not agree."""
    assert ranks.run(words_of, 128)[0].kind == "nothing"
    assert "at least 128" in ranks.run(words_of, 64)[0].message


@triton.jit
def wait_square_kernel(flags, handle, KIND: tl.constexpr):
    square = tl.arange(0, 2)[:, None] * 4 + tl.arange(0, 4)[None, :]
    if KIND == "wait_all":
        iris.wait_all(flags + square, square * 0 + 1, square * 0, square < 7, handle)
    elif KIND == "wait_leading":
        sync.wait_leading(flags + square, square * 0 + 1, square * 0, square < 7, handle)
    elif KIND == "one":
        iris.wait_all(flags, 1, 0, True, handle)
    else:
        tl.static_assert(KIND == "raveled row")
        row = tl.ravel(square)
        iris.wait_all(tl.ravel(flags + square), row * 0 + 1, row * 0, row < 7, handle)


def waits_of_squares(kind: str) -> Failure:
    ctx = context()
    flags = ctx.ones(8, dtype=torch.int32)
    return failure_of(lambda: wait_square_kernel[(1,)](flags, ctx.handle, KIND=kind))


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
@pytest.mark.parametrize("kind", ["wait_all", "wait_leading", "one", "raveled row"])
def test_several_flags_are_a_row(ranks: Ranks, kind: str) -> None:
    for failure in ranks.run(waits_of_squares, kind):
        if kind == "raveled row":
            assert failure.kind == "nothing"
        else:
            assert "flags are a block of one dimension" in failure.message


@triton.jit
def reached_kernel(pairs, found, count, SITE: tl.constexpr):
    for pair in range(count):
        ahead = sync._ahead(tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1), SITE)
        tl.store(found + pair, (ahead >= 0).to(tl.int32))


def which_are_reached(pairs: tuple[tuple[int, int], ...]) -> list[list[int]]:
    device = context().device
    given, found = torch.tensor(pairs, dtype=torch.int32, device=device), torch.zeros(2, len(pairs), dtype=torch.int32)
    found = found.to(device)
    for row, site in zip(found, (control.SITE_MATMUL, control.SITE_USER), strict=True):
        reached_kernel[(1,)](given, row, len(pairs), SITE=site)
    return [[int(one) for one in row] for row in found.cpu()]


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_what_looks_too_far_ahead_of_an_ops_wait_is_still_waited_for(ranks: Ranks) -> None:
    """Its flag was set before the count wrapped, or never; users' flags may have any count."""
    last = (1 << 31) - 1
    pairs = ((4, 5), (5, 5), (36, 5), (37, 5), (0, 0), (0, -3), (-3, -3), (1, -3), (last, -last - 1), (-last - 1, last))
    of_op, of_user = [0, 1, 1, 0, 1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 1, 1, 1, 0, 1]
    assert ranks.run(which_are_reached, pairs) == [[of_op, of_user]]


@triton.jit
def following_kernel(words):
    tl.store(words + 1, sync.following(tl.load(words)))


def epochs_after(epochs: tuple[int, ...]) -> list[int]:
    words, found = context().zeros(2, dtype=torch.int32), []
    for epoch in epochs:
        words[0] = epoch
        following_kernel[(1,)](words)
        found.append(int(words[1]))
    return found


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_halves_take_turns_also_where_the_count_wraps(ranks: Ranks) -> None:
    """After -1, which is odd, comes an even epoch, but not 0."""
    before = (0, 1, (1 << 31) - 1, -2, -1)
    (after,) = ranks.run(epochs_after, before)
    assert 0 not in after
    assert all((one ^ other) & 1 for one, other in zip(before, after, strict=True)), after


@triton.jit
def counting_kernel(epochs, seen, COUNT: tl.constexpr):
    epoch = turnstile.own_epoch(epochs)
    tl.store(seen + tl.program_id(0), epoch)
    turnstile.end_own_epoch(epochs, epoch, COUNT)


def epochs_of_programs(before: int) -> list[list[int]]:
    """The epochs that programs count, in calls with few programs and with many, after ``before`` calls."""
    device, found = context().device, []
    epochs = torch.full((5,), before, dtype=torch.int32, device=device)
    for programs in (2, 5, 3, 1, 4):
        seen = torch.zeros(programs, dtype=torch.int32, device=device)
        counting_kernel[(programs,)](epochs, seen, COUNT=5)
        found.append(seen.tolist())
    return found


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_programs_count_calls_that_they_have_no_part_in(ranks: Ranks) -> None:
    (found,) = ranks.run(epochs_of_programs, 0)
    assert found == [[1] * 2, [2] * 5, [3] * 3, [4], [5] * 4]
    (found,) = ranks.run(epochs_of_programs, -3)  # the count wraps, and skips 0
    assert found == [[-2] * 2, [-1] * 5, [2] * 3, [3], [4] * 4]


@triton.jit
def passing_kernel(words, seen, handle):
    epoch = turnstile.enter(words, handle)
    tl.store(seen, epoch)
    turnstile.leave(words, epoch, handle)


def epochs_of_a_turnstile() -> list[list[int]]:
    """The epoch of each call, and what is stored of it and of the next, while the count wraps."""
    ctx, found = context(), []
    words, seen = ctx.zeros(turnstile.TURNSTILE_WORDS.value, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    words[0] = -3
    for _ in range(3):
        passing_kernel[(1,)](words, seen, ctx.handle)
        found.append([int(seen[0]), int(words[0]), int(words[turnstile.NEXT_EPOCH.value])])
    return found


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_a_turnstile_tells_the_copy_engine_the_coming_epoch(ranks: Ranks) -> None:
    assert ranks.run(epochs_of_a_turnstile) == [[[-2, -2, -1], [-1, -1, 2], [2, 2, 3]]]
