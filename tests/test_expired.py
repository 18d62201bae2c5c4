"""Programs of one rank whose waits expire at the same time."""

from __future__ import annotations

import itertools
import math
import os
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from ranks import BACKEND, Ranks

import iris
from iris.device import bounds, control, sync
from iris.device.arch import clock_ns
from iris.device.words import NO_WORD, take_words
from iris.heap import HeapTable
from iris.status import Record, expired_wait, gave_up

pytestmark = pytest.mark.timeout(120)


@triton.jit
def expire_together_kernel(handle, codes_seen):
    """The waits of all programs have expired. Each names its own flag and numbers, and ends when it may; then it looks
    which records are complete. Programs of a row wait for different peers; those of a column raise the same code."""
    one = tl.program_id(0) + tl.program_id(1)
    stopped = 0
    while stopped == 0:
        started = clock_ns() - 3600 * 1_000_000_000
        words = 16 + one, 32 + one, 48 + one, tl.program_id(0)
        stopped, _ = bounds.check_bounds(*words, 0, started, handle, control.SITE_USER)
    codes = tl.load(control.status_words(handle)) + tl.load(control.status_words(handle) + control.RECORD_WORDS)
    tl.store(codes_seen + one, codes.to(tl.int32))


def expire_together(grid: tuple[int, ...], times: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """The status words and what the programs saw, each time; some stores let other programs run."""
    from triton.runtime.interpreter import InterpreterBuilder as builder  # noqa: N813

    from iris.backends import interpreter

    dice = random.Random(seed)
    store, switch = builder.create_masked_store, interpreter._switch

    def store_in_turn(*args: Any, **kwargs: Any) -> Any:
        if dice.random() < 0.5:
            switch()
        return store(*args, **kwargs)

    def switch_or_not() -> None:
        if dice.random() < 0.5:
            switch()

    found = []
    for _ in range(times):
        with iris.iris(1 << 16) as ctx:
            codes_seen = torch.zeros(math.prod(grid), dtype=torch.int32)
            with mock.patch.object(builder, "create_masked_store", store_in_turn):
                with mock.patch.object(interpreter, "_switch", switch_or_not):
                    with suppress(iris.WaitTimeout):
                        expire_together_kernel[grid](ctx.handle, codes_seen)
            found.append((ctx._status.tolist(), codes_seen.tolist()))
            ctx._status.zero_()
    return found


@pytest.mark.skipif(BACKEND != "sim", reason="GPUs switch when they do")
@pytest.mark.parametrize("ranks", [1], indirect=True)
@pytest.mark.parametrize("grid", [(4,), (1, 4)], ids=["row", "column"])
def test_one_program_writes_each_record(ranks: Ranks, grid: tuple[int, ...], seed: int) -> None:
    size = control.RECORD_WORDS.value
    for words, codes_seen in ranks.run(expire_together, grid, 30, seed)[0]:
        own, told = words[:size], words[size:]
        one = own[4] - 16
        assert own[:7] == [control.CODE_EXPIRED.value, 0, 0, one % grid[0], one + 16, one + 32, one + 48], own
        if told[0]:
            one, peer = told[5] - 32, told[3] & 255
            own_peer = one % grid[0]
            assert told[:5] == [control.CODE_RELAYED.value, 0, 0, own_peer << 8 | peer, one + 16], told
            assert told[6] == one + 48 and peer in range(grid[0]), told
        assert min(codes_seen) > 0


@triton.jit
def one_check_kernel(handle):
    """Check once a wait for rank 1 that has not expired."""
    bounds.check_bounds(16, 5, 4, 1, 0, clock_ns(), handle, control.SITE_USER)


def told_during_a_check() -> list[tuple[int, int]]:
    """The records that result if the host says that rank 1 is gone before each access of the check in turn."""
    from iris.backends import interpreter

    found = []
    for before in range(1, 5):
        with iris.iris(1 << 16) as ctx:
            accesses = itertools.count(1)

            def tell(ctx: iris.Iris = ctx, accesses: Iterator[int] = accesses, before: int = before) -> None:
                if next(accesses) == before:
                    ctx._backend.poke(control.ABORT_WORD.value, control.abort_code(0, 1))

            with mock.patch.object(interpreter, "_switch", tell), suppress(iris.WaitTimeout):
                one_check_kernel[(1,)](ctx.handle)
            found.append((int(ctx._status[0]), int(ctx._status[control.RECORD_WORDS.value])))
            ctx._status.zero_()
    return found


@pytest.mark.skipif(BACKEND != "sim", reason="GPUs switch when they do")
@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_a_wait_that_the_host_cuts_short_has_not_expired(ranks: Ranks) -> None:
    """It has not, although host and program wait for the same rank."""
    (found,) = ranks.run(told_during_a_check)
    relayed = 0, control.CODE_RELAYED.value
    assert found[:3] == [relayed] * 3 and found[3] == (0, 0), found


@triton.jit
def wait_for_several_kernel(handle, memory, peers, wanted, KIND: tl.constexpr):
    lanes = tl.arange(0, 4)
    those = tl.load(peers + lanes)
    if KIND == "all":
        sync.wait_all(memory + lanes, wanted, those, lanes < 3, handle)
    elif KIND == "leading":
        sync.wait_leading(memory + lanes, wanted, those, lanes < 4, handle)
    else:
        words = memory + lanes[:, None, None] * 32 + tl.arange(0, 32)[None, None, :]
        take_words(words, wanted, those, (lanes < 4)[:, None, None], handle)


def wait_for_several(kind: str, wanted: int, late: int, seen: int) -> list[int]:
    """The record of a wait for four peers, 1, 3, 0 and 2. The peer at place ``late`` has signalled less than
    ``wanted``: its flag, or one of 32 words, holds ``seen``. Offsets count from the first flag."""
    with iris.iris(1 << 16, timeout_s=0.1, first_timeout_s=0.6) as ctx:
        dtype, each = (torch.int64, 32) if kind == "words" else (torch.int32, 1)
        memory = ctx.full((4 * each,), wanted, dtype=dtype)
        memory[late * each + each // 2] = NO_WORD.value if kind == "words" else seen
        peers = torch.tensor([1, 3, 0, 2], dtype=torch.int32)
        with suppress(iris.WaitTimeout):
            wait_for_several_kernel[(1,)](ctx.handle, memory, peers, wanted, KIND=kind)
        words: list[int] = ctx._status.tolist()
        ctx._status.zero_()
        words[control.STATUS_FLAG.value] -= memory.data_ptr() - int(ctx.heap_bases[0])
        return words[: control.RECORD_WORDS.value]


@pytest.mark.skipif(BACKEND != "sim", reason="one rank suffices")
@pytest.mark.parametrize("ranks", [1], indirect=True)
@pytest.mark.parametrize(
    ("kind", "late", "peer", "offset"),
    [("all", 0, 1, 0), ("all", 2, 0, 8), ("leading", 0, 1, 0), ("words", 0, 1, 128), ("words", 3, 2, 896)],
)
def test_of_several_peers_the_late_one_is_named(ranks: Ranks, kind: str, late: int, peer: int, offset: int) -> None:
    ((*words, _),) = ranks.run(wait_for_several, kind, 5, late, 4)
    held = control.NO_FLAG.value if kind == "words" else 4
    assert words == [control.CODE_EXPIRED.value, 0, 0, peer, offset, 5, held]


@pytest.mark.skipif(BACKEND != "sim", reason="one rank suffices")
@pytest.mark.parametrize("ranks", [1], indirect=True)
@pytest.mark.parametrize("wanted", [0, 1])
def test_a_first_wait_takes_longer(ranks: Ranks, wanted: int) -> None:
    """Peers may still be compiling at that time."""
    (words,) = ranks.run(wait_for_several, "all", wanted, 1, wanted - 1)
    assert words[control.STATUS_WAITED.value] > 0.6e9 and words[control.STATUS_PEER.value] == 3


@pytest.mark.parametrize(
    ("site", "wanted", "seen", "spoilt"),
    [(4, 3834, -456, True), (2, 7, 5000, True), (2, 7, 6, False), (2, 7, 0, False), (2, -5, 2**31 - 9, False),
     (0, 7, -1, False)],
)  # fmt: skip
def test_a_flag_that_holds_no_epoch_was_written_over(site: int, wanted: int, seen: int, spoilt: bool) -> None:
    record = Record(control.CODE_EXPIRED.value, site, 1, 0, 16, wanted, seen, 10**9)
    message = str(expired_wait(record, 1, 2, HeapTable(1 << 16)))
    assert f"should reach {wanted}, holds {seen}" in message
    assert ("something else has written there" in message) == spoilt
    assert ("make the same call?" in message) != spoilt


@triton.jit
def wait_for_epoch_kernel(handle, flag, wanted):
    sync.wait(flag, wanted, 0, handle)


def wait_for_epoch(wanted: int) -> str:
    with iris.iris(1 << 16, timeout_s=0.9, first_timeout_s=0.3) as ctx:
        flag = ctx.zeros(1, dtype=torch.int32)
        try:
            wait_for_epoch_kernel[(1,)](ctx.handle, flag, wanted)
            ctx.synchronize()
        except iris.WaitTimeout as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize("ranks", [1], indirect=True)
@pytest.mark.parametrize(("wanted", "limit_s"), [(1, 0.3), (2, 0.9)])
def test_a_wait_has_its_own_limit_whichever_is_longer(ranks: Ranks, wanted: int, limit_s: float) -> None:
    (message,) = ranks.run(partial(wait_for_epoch, wanted))
    found = re.search(r"waited ([0-9.]+) s", message)
    assert found and limit_s <= float(found[1]) < limit_s + 0.5, message


@pytest.mark.parametrize(("wanted", "limit"), [(0, "first_timeout_s"), (1, "first_timeout_s"), (2, "timeout_s")])
def test_the_limit_that_a_slow_peer_needs_is_named(wanted: int, limit: str) -> None:
    record = Record(control.CODE_EXPIRED.value, control.SITE_USER.value, 1, 0, 16, wanted, -1, 10**9)
    assert str(expired_wait(record, 1, 2, HeapTable(1 << 16))).endswith(f" needs a larger {limit}.")


def limits_named(variable: str, **given: float) -> list[str]:
    """The limits that errors advise for a slow peer: for the first use of a flag, and for later uses."""
    with mock.patch.dict(os.environ, {"IRIS_TIMEOUT_S": variable}), iris.iris(1 << 20, **given) as ctx:  # type: ignore[arg-type]
        found = []
        for wanted in (1, 2):
            words = [control.CODE_EXPIRED.value, control.SITE_USER.value, 0, 0, 16, wanted, -1, 10**9] + [0] * 8
            with mock.patch.object(ctx._failure, "_status", words):
                found.append(re.findall(r"[Aa] larger (\w+)", str(ctx._failure.described()))[0])
        return found


@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_a_variable_that_sets_the_limit_is_named(ranks: Ranks) -> None:
    def named(variable: str, **given: float) -> list[str]:
        found: list[str] = ranks.run(partial(limits_named, variable, **given))[0]
        return found

    assert named("5") == ["IRIS_TIMEOUT_S"] * 2
    assert named("") == named("5", timeout_s=3.0) == ["first_timeout_s", "timeout_s"]
    assert named("5", first_timeout_s=9.0) == ["first_timeout_s", "IRIS_TIMEOUT_S"]


@pytest.mark.parametrize(
    ("peer", "offset", "remedy"),
    [(2, 16, "only 0 to 1: the order is wait(flag_ptr, value, peer, handle), and valid of wait_all leaves out what is "
             "no rank."),
     (0, -8, "Flags are on the symmetric heap: ctx.zeros(n, dtype=torch.int32)."),
     (0, 1 << 16, "Flags are on the symmetric heap: ctx.zeros(n, dtype=torch.int32).")],
)  # fmt: skip
def test_a_wait_that_could_not_end_is_not_blamed_on_a_peer(peer: int, offset: int, remedy: str) -> None:
    record = Record(control.CODE_EXPIRED.value, control.SITE_USER.value, 1, peer, offset, 5, 0, 10**9)
    message = str(expired_wait(record, 1, 2, HeapTable(1 << 16)))
    assert message.endswith(remedy) and "make the same call?" not in message


def test_a_flag_of_this_rank_alone_is_anywhere() -> None:
    """Flags of Stream-K, by which programs of one kernel hand over sums, are such."""
    record = Record(control.CODE_EXPIRED.value, control.SITE_MATMUL.value, 1, 1, -8, 5, 4, 10**9)
    message = str(expired_wait(record, 1, 2, HeapTable(1 << 16)))
    assert "work of its own" in message and "symmetric heap" not in message


def test_what_a_kernel_of_another_rank_said_comes_first() -> None:
    """What the host itself has written when a peer was gone does not, nor what the error says already."""
    late = iris.WaitTimeout("barrier: rank 2 waited 3 s for rank 0", [0])
    assert gave_up(0, late, 2) is late
    assert gave_up(control.abort_code(2, 1), late, 2) is late
    assert gave_up(control.abort_code(1, 0), late, 2) is late
    said = gave_up(control.abort_code(0, 1), late, 2)
    assert said.ranks == (1,)
    assert str(said).startswith("a kernel of rank 0 gave up waiting for rank 1, so all ranks stopped. barrier: ")


def test_no_rank_is_made_up_where_another_waited_for_none() -> None:
    """The abort word has the lowest byte of any number that a kernel took for a rank, such as -1."""
    stopped = "rank 0 gave up waiting for what is no rank, so all ranks stopped. "
    late = gave_up(control.abort_code(0, 255), iris.WaitTimeout("barrier: rank 2 waited 3 s for rank 0", [0]), 2)
    assert str(late).startswith(f"a kernel of {stopped}barrier: ") and late.ranks == ()
    record = Record(control.CODE_RELAYED.value, control.SITE_USER.value, 0, (1 << 8) + 255, 16, 1, 0, 10**9)
    told = expired_wait(record, 2, 3, HeapTable(1 << 16))
    assert str(told) == f"a user kernel: {stopped}The error of rank 0 says more." and told.ranks == ()
