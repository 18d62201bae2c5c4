"""Calls that break off half way, by an error or by Ctrl-C that the program survives: nothing is trusted after them, as
peers' answers might belong to another call."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from ops_inputs import ALL_REDUCE, GATHER, REDUCE_SCATTER, SCATTER, SMALL, Way, trial, ways
from ranks import BACKEND, Failure, Ranks, context, failure_of, fresh, worlds

import iris
from iris.device import control
from iris.engine import CopyEngine
from iris.failure import Failure as Ending
from iris.mesh import _DATA, _frame
from iris.ops import Problem, pick_config
from iris.ops.choice import _settled
from iris.ops.matmul_all_scatter import _Call
from iris.ops.target import target_of

TWO = pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
SIMULATED = pytest.mark.skipif(BACKEND != "sim", reason="there a launch returns before its kernel has run")


class Late(Exception):
    """Raised by the handler of an alarm."""


def ring(*_: object) -> None:
    raise Late


def outcome(call: Callable[[], object]) -> Failure:
    """As :func:`failure_of`, but for Ctrl-C, too."""
    try:
        return failure_of(call)
    except KeyboardInterrupt:
        return Failure("KeyboardInterrupt")


def interrupted_meeting() -> list[Failure]:
    """Rank 0 gives up waiting for a value that rank 1 sends late, and then asks for the next one."""
    with iris.iris(1 << 20, timeout_s=20) as ctx:
        ctx.barrier()
        if ctx.rank == 1:
            time.sleep(0.5)
            return [failure_of(ctx.broadcast, f"batch {step}", 1) for step in range(3)]
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            return [failure_of(ctx.broadcast, None, 1) for _ in range(3)]
        finally:
            signal.signal(signal.SIGALRM, before)


@TWO
def test_after_an_interrupted_meeting_no_answer_is_taken_for_another(ranks: Ranks) -> None:
    interrupted, peer = ranks.run(interrupted_meeting)
    assert [failure.kind for failure in interrupted] == ["Late", "ContextError", "ContextError"]
    assert interrupted[1].message == "an earlier call broke off half way: Late. Make a new context."
    assert peer[-1].kind == "PeerDied" and "rank 0 left with Late" in peer[-1].message


def assert_peers_were_told(peers: list[tuple[Failure, Failure]], error: str) -> None:
    """Check that peers learn of the ``error``. If their call needs nothing more from the rank that fails, their next
    call waits for it."""
    for first, second in peers:
        assert first.kind in ("PeerDied", "nothing"), first
        assert second.kind == "PeerDied" and second.ranks == (0,) and second.took_s < 5, second
        assert second.message == f"rank 0 left with {error}"


def broken_off(way: Way, number: int, error: type[BaseException], seed: int) -> tuple[Failure, Failure]:
    """The failures of a call whose matmul ``number`` fails on rank 0 after peers have heard of the call, and of the
    next call. Rank 0 stays until its peers have been told of the failure."""
    shared = context()
    with fresh(1 << 21) as ctx, mock.patch.dict("os.environ", IRIS_REPLAY="0"):
        one = trial(ctx, way, (16, 16, 32), torch.float32, seed)
        one.run()
        matmul, calls = torch.matmul, []

        def fails_once(*args: Any, **kwargs: Any) -> torch.Tensor:
            calls.append(1)
            if len(calls) == number:
                raise error("out of memory")
            return matmul(*args, **kwargs)

        with mock.patch("torch.matmul", fails_once) if ctx.rank == 0 else nullcontext():
            first = outcome(lambda: (one.run(), ctx.synchronize()))
        second = failure_of(lambda: (one.run(), ctx.synchronize()))
        assert ctx.rank or ctx._watcher.told()  # its own kernel would wait for peers who no longer come
        shared.barrier()
        return first, second


def mismatch_of_a_group() -> list[Failure]:
    """Rank 0 calls a barrier of two ranks, the others one of all ranks; then all call one of all."""
    with iris.iris(1 << 20, timeout_s=20) as ctx:
        first = failure_of(ctx.barrier, None, [0, 1] if ctx.rank == 0 else None)
        return [first, failure_of(ctx.barrier)]


@pytest.mark.parametrize("ranks", worlds(3, 3), indirect=True)
def test_a_mismatch_that_not_all_have_heard_is_the_end(ranks: Ranks) -> None:
    """The message of rank 2 for the first barrier must not count for the second."""
    for failures in ranks.run(mismatch_of_a_group):
        assert [failure.kind for failure in failures] == ["RankMismatch"] * 2, failures
        assert all("barrier(0, 1)" in failure.message for failure in failures), failures


def interrupted_allocation(name: str) -> list[Failure]:
    """Failures of an allocation whose bookkeeping, behind the ranks' meeting, is interrupted on rank 0, and of later
    ones."""
    shared = context()
    with iris.iris(1 << 20, timeout_s=20) as ctx:
        owner = ctx._table if name == "allocate" else ctx._backend
        interrupted = mock.patch.object(owner, name, side_effect=KeyboardInterrupt)
        with interrupted if ctx.rank == 0 else nullcontext():
            failures = [outcome(partial(ctx.zeros, 100))]
        failures += [failure_of(ctx.zeros, 100) for _ in range(2)]
        shared.barrier()
        return failures


@TWO
@pytest.mark.parametrize("name", ["allocate", "bytes_at"])
def test_after_an_interrupted_allocation_nothing_is_trusted(ranks: Ranks, name: str) -> None:
    """Else the ranks' blocks would lie at different offsets, and nothing would tell."""
    interrupted, peer = ranks.run(interrupted_allocation, name)
    assert [failure.kind for failure in interrupted] == ["KeyboardInterrupt", "ContextError", "ContextError"]
    assert peer[-1].kind == "PeerDied" and "rank 0 left with KeyboardInterrupt" in peer[-1].message


def left_on_a_mismatch() -> list[Failure]:
    """Rank 2 leaves with an error of that kind while rank 0 waits for it; then ranks 0 and 1 meet."""
    with suppress(iris.RankMismatch), iris.iris(1 << 20, timeout_s=20) as ctx:
        ctx.barrier()
        if ctx.rank == 2:
            raise iris.RankMismatch("other batches")
        return [failure_of(ctx.broadcast, None, 2), failure_of(ctx.barrier, None, [0, 1])]
    return []


@pytest.mark.parametrize("ranks", worlds(3, 3), indirect=True)
def test_a_mismatch_on_which_a_rank_left_is_the_end(ranks: Ranks) -> None:
    *others, _ = ranks.run(left_on_a_mismatch)
    for failures in others:
        assert [failure.kind for failure in failures] == ["RankMismatch"] * 2, failures
        assert max(failure.took_s for failure in failures) < 5


@TWO
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("way", "number"),
    [
        (Way(GATHER, "decomposed"), 2),
        (Way(REDUCE_SCATTER, "decomposed"), 2),
        # In these, peers may write to a rank that has begun.
        (Way(SCATTER, "decomposed"), 1),
        (Way(REDUCE_SCATTER, "ring"), 1),
        (Way(ALL_REDUCE, "ring"), 1),
        (Way(ALL_REDUCE, "decomposed"), 2),
        # In these, peers have already taken the part that this rank had to send.
        (Way(GATHER, "low_latency"), 1),
        (Way(GATHER, "baseline"), 1),
    ],
    ids=str,
)
def test_after_a_call_that_broke_off_nothing_is_trusted(
    ranks: Ranks, way: Way, number: int, error: type[BaseException], seed: int
) -> None:
    (first, second), *peers = ranks.run(broken_off, way, number, error, seed)
    assert first.kind == error.__name__
    assert second.kind == "ContextError" and f"broke off half way: {error.__name__}: out of" in second.message
    assert_peers_were_told(peers, f"{error.__name__}: out of memory")


def after_its_scales(algorithm: str) -> tuple[Failure, Failure]:
    """A gather with a scale for each row; its matmul cannot be launched on rank 0 after the scales have been sent."""
    shared = context()
    with fresh(1 << 21) as ctx, mock.patch.dict("os.environ", IRIS_REPLAY="0"):
        a, b = ctx.ones(16, 32, dtype=torch.int8), torch.ones(32, 16, dtype=torch.int8, device=ctx.device)
        output, of_rows = torch.empty(16 * ctx.world_size, 16, device=ctx.device), torch.ones(16, device=ctx.device)

        def gather() -> None:
            config = replace(SMALL, algorithm=algorithm)
            ctx.ops.all_gather_matmul(output, a, b, gather_dim=0, scale_a=of_rows, config=config)
            ctx.synchronize()

        gather()
        fails = mock.patch("iris.ops.call.run", side_effect=RuntimeError("out of registers"))
        with fails if ctx.rank == 0 else nullcontext():
            first = outcome(gather)
        second = failure_of(gather)
        assert ctx.rank or ctx._watcher.told()
        shared.barrier()
        return first, second


@TWO
@pytest.mark.parametrize("algorithm", ["push", "copy_engine"])
def test_a_gather_whose_scales_were_sent_is_the_end(ranks: Ranks, algorithm: str) -> None:
    """In a second try its scales would be one call ahead of its peers' scales."""
    (first, second), *peers = ranks.run(after_its_scales, algorithm)
    assert first.kind == "RuntimeError"
    assert second.kind == "ContextError" and "broke off half way: RuntimeError: out of registers" in second.message
    assert_peers_were_told(peers, "RuntimeError: out of registers")


def without_senders(seed: int) -> tuple[Failure, Failure]:
    """The second of the two kernels of ``streams`` cannot be launched on rank 0."""
    shared = context()
    with fresh(1 << 21) as ctx, mock.patch.dict("os.environ", IRIS_REPLAY="0"):
        one = trial(ctx, Way(SCATTER, "streams"), (16, 16, 32), torch.float32, seed)
        one.run()
        fails = mock.patch.object(_Call, "_send", side_effect=RuntimeError("out of registers"))
        with fails if ctx.rank == 0 else nullcontext():
            first = failure_of(lambda: (one.run(), ctx.synchronize()))
        second = failure_of(lambda: (one.run(), ctx.synchronize()))
        shared.barrier()
        return first, second


@TWO
def test_after_one_kernel_of_two_nothing_is_trusted(ranks: Ranks, seed: int) -> None:
    (first, second), *peers = ranks.run(without_senders, seed)
    assert first.kind == "RuntimeError"
    assert second.kind == "ContextError" and "out of registers" in second.message
    assert_peers_were_told(peers, "RuntimeError: out of registers")


def before_anything_is_asked_for(seed: int) -> list[str]:
    """The matmul of a rank's own part of a gather fails before peers hear of the call; the next call then works."""
    with fresh(1 << 21) as ctx, mock.patch.dict("os.environ", IRIS_REPLAY="0"):
        one = trial(ctx, Way(GATHER, "decomposed"), (16, 16, 32), torch.float32, seed)
        one.run()
        with mock.patch("torch.matmul", side_effect=RuntimeError("out of memory")):
            first = failure_of(one.run)
        one.run()
        assert one.excess() <= 1
        return [first.kind, failure_of(one.run).kind]


@TWO
def test_a_call_that_fails_before_it_has_begun_does_no_harm(ranks: Ranks, seed: int) -> None:
    assert ranks.run(before_anything_is_asked_for, seed) == [["RuntimeError", "nothing"]] * 2


@triton.jit
def waiting_kernel(flag, peer, handle, DEMANDS: tl.constexpr):
    """Wait for a flag, which reads as 0 if the wait was given up."""
    seen = iris.wait(flag, 2, peer, handle)
    if DEMANDS:
        tl.load(flag + (2 - tl.load(flag)) * (1 << 50))
    tl.store(flag + 1, seen + 7)


@triton.jit
def failing_kernel(flag, peer, handle_or_bases, KIND: tl.constexpr):
    tl.store(flag + 1, 1)
    if KIND == "assertion":
        tl.static_assert(flag.type.is_block(), "expected a block")
    elif KIND == "address":
        tl.load(flag + (1 << 50))
    else:
        tl.load(unknown)  # type: ignore[name-defined]  # noqa: F821


def expired_launch(demands: bool) -> tuple[list[Failure], int]:
    """The failures of a launch that waits in vain and of the next call, and the value left in memory."""
    with fresh(timeout_s=0.4) as ctx:
        flag = ctx.zeros(2, dtype=torch.int32)
        calls = [
            lambda: waiting_kernel[(1,)](flag, ctx.world_size - 1 - ctx.rank, ctx.handle, DEMANDS=demands),
            ctx.check,
        ]
        return [failure_of(call) for call in (*calls, *calls)], int(flag[1])


@SIMULATED
@pytest.mark.parametrize("ranks", worlds(1, 2), indirect=True)
@pytest.mark.parametrize("demands", [False, True])
def test_a_simulated_launch_raises_if_a_wait_in_it_expired(ranks: Ranks, demands: bool) -> None:
    """It raises even if the kernel itself goes on, or fails, with what is in memory."""
    for failures, left in ranks.run(expired_launch, demands):
        first = failures[0]
        assert first.kind == "WaitTimeout" and first.took_s < 2 and left == (0 if demands else 7)
        assert re.match(r"a user kernel: rank \d (waited|gave up waiting)", first.message), first
        assert {(one.kind, one.message) for one in failures} == {(first.kind, first.message)}


class Given(NamedTuple):
    """Several arguments that a kernel takes as one."""

    flag: Any
    handle: Any


@triton.jit
def given_kernel(given, peer):
    waiting_kernel(given.flag, peer, given.handle, False)


def expired_launch_of_a_tuple() -> Failure:
    with fresh(timeout_s=0.4) as ctx:
        given = Given(ctx.zeros(2, dtype=torch.int32), ctx.handle)
        return failure_of(lambda: given_kernel[(1,)](given, ctx.world_size - 1 - ctx.rank))


@SIMULATED
@TWO
def test_a_handle_in_a_tuple_is_one(ranks: Ranks) -> None:
    assert [failure.kind for failure in ranks.run(expired_launch_of_a_tuple)] == ["WaitTimeout"] * 2


def failed_launch(kind: str, bases_alone: bool) -> list[Failure]:
    """The kernel of rank 0 fails, and that of its peer waits for it."""
    shared = context()
    with fresh() as ctx:
        flag = ctx.zeros(2, dtype=torch.int32)
        given = ctx.heap_bases if bases_alone else ctx.handle
        ctx.barrier()
        if ctx.rank == 0:
            launch = lambda: failing_kernel[(1,)](flag, 1, given, KIND=kind)  # noqa: E731
        else:
            launch = lambda: waiting_kernel[(1,)](flag, 0, ctx.handle, DEMANDS=False)  # noqa: E731
        failures = [failure_of(call) for call in (launch, launch, ctx.check, ctx.close)]
        shared.barrier()
        return failures


@SIMULATED
@TWO
@pytest.mark.parametrize("bases_alone", [False, True])
@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("assertion", "InterpreterError", "AssertionError('expected a block')"),
        ("address", "AddressError", "where this process has no memory"),
        ("name", "InterpreterError", "name 'unknown' is not defined"),
    ],
)
def test_an_exception_in_a_simulated_kernel_is_the_end_and_peers_are_told(
    ranks: Ranks, kind: str, error: str, words: str, bases_alone: bool
) -> None:
    (first, *later, closed), (*told, peer_closed) = ranks.run(failed_launch, kind, bases_alone)
    assert first.kind == error and words in first.message
    assert re.search(rf" At {re.escape(__file__)}:\d+, in failing_kernel: ", first.message), first
    for failure in later:
        assert failure.kind == "ContextError" and f"broke off half way: {error}: " in failure.message, failure
        assert words in failure.message
    for failure in told:
        assert failure.kind == "PeerDied" and failure.ranks == (0,) and failure.took_s < 5, failure
        assert failure.message.startswith(f"rank 0 left with {error}: ") and words in failure.message
    assert closed.kind == peer_closed.kind == "nothing"


def failed_alone() -> list[str]:
    with fresh() as ctx:
        flag = ctx.zeros(2, dtype=torch.int32)
        calls = lambda: failing_kernel[(1,)](flag, 1, ctx.handle, KIND="name"), ctx.check, ctx.barrier
        return [failure_of(call).kind for call in calls]


@SIMULATED
@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_an_exception_in_a_simulated_kernel_of_a_single_rank_ends_nothing(ranks: Ranks) -> None:
    """No other rank waits for what it did not do."""
    assert ranks.run(failed_alone) == [["InterpreterError", "nothing", "nothing"]]


@triton.jit
def polling_kernel(flag, handle):
    while not iris.reached(flag, 1):
        pass


def polled_in_vain() -> list[Failure]:
    with fresh(timeout_s=0.4, first_timeout_s=0.5) as ctx:
        flag = ctx.zeros(1, dtype=torch.int32)
        if ctx.rank == 1:
            return [failure_of(ctx.barrier)]
        return [failure_of(call) for call in (lambda: polling_kernel[(1,)](flag, ctx.handle), ctx.check, ctx.barrier)]


@SIMULATED
@TWO
def test_after_a_poll_in_vain_every_later_call_raises_the_same(ranks: Ranks) -> None:
    (first, *later), _ = ranks.run(polled_in_vain)
    assert first.kind == "WaitTimeout" and " polls address 0x" in first.message
    assert first.took_s < 20  # the limit of another context, which is open, is 30 s
    assert [(one.kind, one.message) for one in later] == [(first.kind, first.message)] * 2


def failed_elsewhere() -> Failure:
    """A kernel that does not use the context fails, and one that gets an argument that it cannot take."""
    with fresh() as ctx:
        flag = ctx.zeros(2, dtype=torch.int32)
        for given, peer in ((0, 1), (ctx.handle, ctx)):
            failing = failure_of(lambda: failing_kernel[(1,)](flag, peer, given, KIND="name"))  # noqa: B023
            assert failing.kind == ("TypeError" if peer is ctx else "InterpreterError"), failing
        return failure_of(ctx.barrier)


@SIMULATED
@TWO
def test_a_kernel_that_was_given_no_handle_or_never_ran_ends_nothing(ranks: Ranks) -> None:
    assert [failure.kind for failure in ranks.run(failed_elsewhere)] == ["nothing"] * 2


def ending(mesh: mock.Mock, status: int = 0) -> Ending:
    """The ending of rank 1 of 3, whose status words are all ``status``."""
    words = np.full(control.STATUS_WORDS.value, status)
    return Ending(mesh, mock.Mock(), words, mock.Mock(), [0, 1, 2], mock.Mock())


def test_the_first_failure_is_kept() -> None:
    failure = ending(mock.Mock(rank=1))
    for words in ("the cause", "what came of it"):
        assert str(failure.keep(iris.ContextError(words))) == str(failure.first) == "the cause"


def test_ctrl_c_in_a_simulated_kernel_is_no_wait_in_vain_even_if_there_was_one() -> None:
    failure = ending(mock.Mock(rank=1, world_size=3), status=1)
    with pytest.raises(KeyboardInterrupt), failure.of_simulated_kernel():
        raise KeyboardInterrupt
    assert "broke off half way: KeyboardInterrupt" in str(failure.first)


def test_a_rank_that_died_is_to_blame_whatever_the_program_has_made_of_it() -> None:
    """Launchers report processes that are to blame before those that ended because of others."""
    for died, blamed in ((iris.PeerDied("rank 2 died", [2]), [mock.call((2,))]), (None, [])):
        mesh = mock.Mock(rank=1)
        failure = ending(mesh)
        if died is not None:
            failure.keep(died)
        error = RuntimeError("no luck")
        failure.part(error)
        assert mesh.blame.mock_calls == blamed
        mesh.leave.assert_called_once_with(error)


def leave_while_a_kernel_waits() -> tuple[Failure, float]:
    """Rank 0 leaves with an error, while its device, for which ``close`` waits, is busy for some time."""
    took = 0.0

    def slow_close(limit_s: float | None) -> bool:
        time.sleep(1.5)
        return True

    def work() -> None:
        nonlocal took
        with iris.iris(1 << 20, timeout_s=20) as ctx:
            ctx.barrier()
            started = time.monotonic()
            if ctx.rank == 0:
                ctx._backend.close = slow_close  # type: ignore[method-assign]
                raise ValueError("the real cause")
            try:
                ctx.barrier()
            finally:
                took = time.monotonic() - started

    return failure_of(work), took


@TWO
def test_peers_hear_why_a_rank_leaves_before_its_device_is_done(ranks: Ranks) -> None:
    (left, _), (told, took_s) = ranks.run(leave_while_a_kernel_waits)
    assert left.message == "the real cause" and told.message == "rank 0 left with ValueError: the real cause"
    assert took_s < 1.4


@pytest.mark.gpu
@pytest.mark.skipif(BACKEND == "sim", reason="its launches always block")
def test_launches_that_block(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with iris.RankPool(2) as pool:
        for refused, excess in pool.run(with_launches_that_block, (seed,), timeout_s=90):
            assert set(refused) == {f"{op}-copy_engine" for op in (ALL_REDUCE, REDUCE_SCATTER)}
            assert all("as CUDA_LAUNCH_BLOCKING is set" in message for message in refused.values())
            assert excess <= 1


def with_launches_that_block(seed: int) -> tuple[dict[str, str], float]:
    """The errors of the refused calls, and the largest error of the results of the others."""
    refused, excesses = {}, []
    with iris.iris(1 << 25, timeout_s=10) as ctx:
        for way in [*ways(), Way(ALL_REDUCE, "auto"), Way(REDUCE_SCATTER, "auto")]:
            one = trial(ctx, way, (64, 96, 64), torch.float16, seed)
            failures = [failure_of(one.run) for _ in range(3)]
            if failures[0].kind == "nothing":
                excesses.append(one.excess())
            else:
                refused[str(way)] = failures[-1].message
    return refused, max(excesses)


@pytest.mark.parametrize(
    ("launched", "error", "ended"), [(True, Late, True), (False, Late, False), (False, KeyboardInterrupt, True)]
)
def test_a_gpu_kernel_that_waits_for_copies_nobody_asks_for_any_more_ends_the_context(
    launched: bool, error: type[BaseException], ended: bool
) -> None:
    """Ctrl-C that seems to come during a launch may have come after it."""
    ctx = mock.MagicMock()
    ctx._backend.side_stream.return_value = nullcontext()
    engine = CopyEngine(ctx)
    engine._on_gpu = True
    kernel, copies = mock.Mock(side_effect=None if launched else error), mock.Mock(side_effect=error)
    with (
        mock.patch("torch.cuda.current_stream"),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
        pytest.raises(error),
    ):
        engine.beside(kernel, copies)
    assert (ctx.broke_off.called, copies.called) == (ended, launched)


def interrupted_close() -> Failure:
    """Rank 1 closes its context late, and rank 0, which waits for it there, gives up."""
    ctx = iris.iris(1 << 20, timeout_s=20)
    ctx.barrier()
    if ctx.rank == 1:
        time.sleep(1)
        return failure_of(ctx.close)
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        return failure_of(ctx.close)
    finally:
        signal.signal(signal.SIGALRM, before)


@TWO
def test_an_interrupted_close_ends_at_once_and_tells_why(ranks: Ranks) -> None:
    first, second = ranks.run(interrupted_close)
    assert first.kind == "Late" and first.took_s < 0.9
    assert second.kind == "PeerDied" and "rank 0 left with Late" in second.message


def broadcast_by(send: Callable[..., memoryview], ctx: iris.Iris, value: object, outlived_s: float) -> Failure:
    """How rank 1 fails to broadcast by ``send``; its process outlives its connection by ``outlived_s``."""
    ctx._mesh._send_some = send  # type: ignore[method-assign]
    try:
        return failure_of(ctx.broadcast, value, 1)
    finally:
        time.sleep(outlived_s)


def interrupted_message() -> Failure:
    """Rank 1 is interrupted while it sends a large value, which rank 0 takes too late."""
    ctx = iris.iris(1 << 20, timeout_s=20)
    value = torch.zeros(32 << 20, dtype=torch.uint8) if ctx.rank == 1 else None
    ctx.barrier()
    if ctx.rank == 0:
        time.sleep(1)
        return failure_of(ctx.broadcast, value, 1)
    before, send = signal.signal(signal.SIGALRM, ring), ctx._mesh._send_some

    def send_and_set_the_alarm(*sent: Any) -> memoryview:
        """Set the alarm only now, as packing the value may take long."""
        ctx._mesh._send_some = send  # type: ignore[method-assign]
        rest = send(*sent)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        return rest

    try:
        return broadcast_by(send_and_set_the_alarm, ctx, value, outlived_s=2)
    finally:
        signal.signal(signal.SIGALRM, before)


@TWO
def test_a_message_that_broke_off_is_not_told_as_a_death(ranks: Ranks) -> None:
    first, second = ranks.run(interrupted_message)
    assert (second.kind, first.kind, first.ranks) == ("Late", "PeerDied", (1,))
    assert ": rank 1 closed its connection in the middle of a message. Look at that rank's output" in first.message


def cut_short() -> Failure:
    """Rank 1 is interrupted when it has sent all but a few bytes of a value, which rank 0 begins to read late."""
    ctx = iris.iris(1 << 20, timeout_s=20)
    ctx.barrier()
    if ctx.rank == 0:
        time.sleep(0.1)
        return failure_of(ctx.broadcast, None, 1)
    send = ctx._mesh._send_some

    def send_all_but_ten(peer: int, data: memoryview, *rest: Any) -> memoryview:
        if len(data) == 10:
            raise Late
        send(peer, data[:-10], *rest)
        return data[-10:]

    return broadcast_by(send_all_but_ten, ctx, b"value" * 20, outlived_s=0.5)


@TWO
def test_what_a_rank_says_last_is_not_taken_for_the_end_of_a_value(ranks: Ranks) -> None:
    first, second = ranks.run(cut_short)
    assert (second.kind, first.kind, first.ranks) == ("Late", "PeerDied", (1,))
    assert "rank 1 closed its connection in the middle of a message" in first.message


def sends_and_does_not_read() -> Failure:
    """Rank 1 sends its part of an exchange, and why it leaves, but reads nothing of what rank 0 sends."""
    with fresh(timeout_s=1) as ctx:
        mesh = ctx._mesh
        failure = Failure()
        if ctx.rank == 0:
            failure = failure_of(lambda: mesh.exchange("late", bytes(64 << 20)))
        else:
            mesh.peers[0].setblocking(True)
            mesh.peers[0].sendall(_frame(_DATA, "late", b""))
            time.sleep(0.3)
            mesh._say_why(ValueError("said"))
            time.sleep(3)
        ctx.broke_off(Late())
    return failure


@TWO
def test_an_exchange_is_bounded_whatever_the_peer_sends(ranks: Ranks) -> None:
    first, _ = ranks.run(sends_and_does_not_read)
    assert first.kind in ("WaitTimeout", "PeerDied") and first.took_s < 2.5, first


def auto_behind_a_full_heap() -> tuple[str, str]:
    """The algorithms that "auto" takes when all ranks have just released most of the heap, and when they hold it."""
    with fresh(4 << 20) as ctx:
        output, a, b = ctx.empty(512, 64), torch.ones(512, 16), torch.ones(16, 64)
        operands = output, a.to(ctx.device), b.to(ctx.device)
        problem = Problem(ALL_REDUCE, 512, 64, 16, torch.float32, ctx.world_size)
        best = pick_config(problem, target_of(ctx)).algorithm
        hold = ctx.empty(ctx.heap_largest_free_bytes - (16 << 10), dtype=torch.uint8)
        del hold
        ctx.ops.matmul_all_reduce(*operands)
        return best, next(iter(_settled(ctx).values())).algorithm


@TWO
def test_auto_sees_memory_that_all_have_let_go_of(ranks: Ranks) -> None:
    for best, taken in ranks.run(auto_behind_a_full_heap):
        assert best == taken != "ring"


def auto_of_one_program() -> float:
    """The best algorithm needs two programs, but the caller allows one."""
    ctx = context()
    one = trial(ctx, Way(SCATTER, "push"), (32, 16, 24), torch.float32, 3)

    def picks(problem: Problem, target: Any, *named: str) -> Any:
        return pick_config(problem, target, *(named or (() if "streams" in target.excluded else ("streams",))))

    with mock.patch("iris.ops.choice.pick_config", picks):
        ctx.ops.matmul_all_scatter(one.output, one.a, one.b, config=replace(SMALL, algorithm="auto", num_sms=1))
    return one.excess()


@TWO
def test_auto_takes_what_the_given_programs_can_run(ranks: Ranks) -> None:
    assert max(ranks.run(auto_of_one_program)) <= 1
