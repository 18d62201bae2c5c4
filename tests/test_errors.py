"""Mistakes: each raises a typed error that says how to fix it, on every rank, in under two seconds."""

from __future__ import annotations

import os
import pickle
import re
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from ranks import BACKEND, TIMEOUT_S, Failure, Ranks, context, failure_of, fresh, worlds

import iris
from iris import errors, mismatch
from iris.backends import oversubscribed
from iris.device import bounds, control
from iris.device.arch import clock_ns
from iris.device.control import ABORT_WORD, CLOSED_WORDS
from iris.device.trace import WAIT, record
from iris.errors import ranks_text
from iris.failure import _other_call
from iris.trace import Event, draw, trace_of

pytestmark = pytest.mark.timeout(120)
TWO = pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
TWO_OR_MORE = pytest.mark.parametrize("ranks", worlds(2), indirect=True)


def on_time(failures: list[Failure]) -> list[Failure]:
    assert all(failure.took_s < (4 if oversubscribed() else 2) for failure in failures), failures
    return failures


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ArgumentError("op", "argument", "a", "b", "Do c."), ValueError),
        (errors.ShapeError("op", "argument", "a", (1, 2)), ValueError),
        (errors.DTypeError("op", "argument", "a", torch.int8), TypeError),
        (errors.PlacementError("op", "argument", "a", "b"), ValueError),
        (errors.HeapError("full"), MemoryError),
        (errors.RankMismatch("differ"), Exception),
        (errors.BackendError("lacks"), Exception),
        (errors.ContextError("closed"), Exception),
        (errors.AddressError("nothing there"), Exception),
        (errors.LaunchError("failed"), Exception),
        (errors.WaitTimeout("late", [2, 3]), TimeoutError),
        (errors.PeerDied("gone", [1]), Exception),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_error_is_an_iris_error_and_a_builtin_and_survives_pickling(error: Exception, builtin: type) -> None:
    assert isinstance(error, errors.IrisError) and isinstance(error, builtin)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert getattr(again, "ranks", ()) == getattr(error, "ranks", ())
    assert getattr(iris, type(error).__name__) is type(error)


def test_an_argument_error_says_op_argument_expected_got_and_the_fix() -> None:
    error = errors.ShapeError("all_gather_matmul", "A", "(4, 8)", (4, 9), "Transpose it.")
    assert str(error) == "all_gather_matmul: A: expected (4, 8), got (4, 9). Transpose it."
    assert (error.op, error.argument, error.expected, error.got) == ("all_gather_matmul", "A", "(4, 8)", (4, 9))


def allocate_different_sizes() -> tuple[Failure, list[float]]:
    ctx = context()
    failure = failure_of(lambda: ctx.zeros(4 if ctx.rank else 8))
    return failure, ctx.full((2,), 3.0).tolist()


def allocate_by_different_ops() -> Failure:
    ctx = context()
    return failure_of(lambda: ctx.zeros(4) if ctx.rank else ctx.ones(4))


def allocate_different_dtypes() -> Failure:
    ctx = context()
    return failure_of(lambda: ctx.zeros(4, dtype=torch.int32 if ctx.rank else torch.float32))


def call_different_things() -> Failure:
    ctx = context()
    return failure_of(ctx.barrier if ctx.rank else lambda: ctx.broadcast(1, 0))


def broadcast_from_different_ranks() -> Failure:
    ctx = context()
    return failure_of(ctx.broadcast, 1, min(ctx.rank, 1))


def mismatch_loses_no_memory() -> int:
    with fresh() as ctx:
        start = ctx.heap_free_bytes
        tensor = ctx.zeros(100)
        del tensor
        failure = failure_of(lambda: ctx.zeros(4 if ctx.rank else 8))
        assert failure.kind == "RankMismatch"
        ctx.free(ctx.zeros(1))
        ctx.zeros(1)
        return start - ctx.heap_free_bytes


MISMATCHES = [
    (allocate_by_different_ops, "rank 0: ones(16 bytes of torch.float32); rank 1: zeros(16 bytes of torch.float32)"),
    (allocate_different_dtypes, "rank 0: zeros(16 bytes of torch.float32); rank 1: zeros(16 bytes of torch.int32)"),
    (call_different_things, "rank 0: broadcast(source=0); rank 1: barrier"),
    (broadcast_from_different_ranks, "rank 0: broadcast(source=0); rank 1: broadcast(source=1)"),
]
FIX = "Every rank must make the same Iris calls, with the same sizes, in the same order."


@TWO_OR_MORE
def test_allocations_of_different_sizes(ranks: Ranks) -> None:
    results = ranks.run(allocate_different_sizes)
    for failure in on_time([failure for failure, _ in results]):
        assert failure.kind == "RankMismatch"
        others = ranks_text(range(1, ranks.world_size))
        calls = f"rank 0: zeros(32 bytes of torch.float32); {others}: zeros(16 bytes of torch.float32)"
        assert failure.message.startswith(f"ranks made different calls: {calls}")
        assert failure.message.endswith(FIX)
    assert all(after == [3.0, 3.0] for _, after in results)


@TWO_OR_MORE
@pytest.mark.parametrize(("fn", "words"), MISMATCHES, ids=[fn.__name__ for fn, _ in MISMATCHES])
def test_calls_that_differ(ranks: Ranks, fn: object, words: str) -> None:
    for failure in on_time(ranks.run(fn)):  # type: ignore[arg-type]
        told = words.replace("rank 1", ranks_text(range(1, ranks.world_size)))
        assert failure.kind == "RankMismatch" and told in failure.message and failure.message.endswith(FIX)


def long_call(**changed: object) -> str:
    """The text of an op's call that is too long to be shown whole."""
    arguments = {"op": "'mine'", "m": 16, "n": 24, "k": 8, "dtype": "fp32", **{f"field_{i}": i for i in range(20)}}
    return f"mine({', '.join(f'{name}={value}' for name, value in (arguments | changed).items())})"


def test_long_calls_of_which_one_has_more_arguments_are_told_whole() -> None:
    calls = long_call(), long_call(bias="column")
    assert mismatch.told(dict(enumerate(calls))) == (
        f"ranks made different calls: rank 0: {calls[0]}; rank 1: {calls[1]}. {FIX}"
    )


@TWO_OR_MORE
def test_a_mismatch_loses_no_freed_memory(ranks: Ranks) -> None:
    assert ranks.run(mismatch_loses_no_memory) == [1024] * ranks.world_size


def exhaust() -> tuple[Failure, str, list[float]]:
    with fresh(heap_size=1 << 20) as ctx:
        kept = ctx.zeros(100 << 10, dtype=torch.uint8)
        failure = failure_of(lambda: ctx.empty(1 << 20, dtype=torch.uint8))
        kept.fill_(1)
        advised = failure.message.split("heap_size=")[1].rstrip(".")
        after = ctx.ones(2).tolist()
    with fresh(heap_size=int(advised)) as ctx:
        kept = ctx.zeros(100 << 10, dtype=torch.uint8)
        ctx.empty(1 << 20, dtype=torch.uint8)
    with fresh(heap_size=np.int64(1 << 20)) as ctx:
        assert ctx.heap_size == 1 << 20
    return failure, advised, after


def test_heap_exhaustion(ranks: Ranks) -> None:
    results = ranks.run(exhaust)
    for failure in on_time([failure for failure, _, _ in results]):
        assert failure.kind == "HeapError" and "MemoryError" in failure.bases
        assert "empty: symmetric heap exhausted: requested 1.0 MiB (1048576 bytes)" in failure.message
        assert "largest free block" in failure.message and "Free tensors you no longer need" in failure.message
    assert all(after == [1.0, 1.0] for _, _, after in results)


def heap_sizes_differ() -> Failure:
    rank = int(os.environ["IRIS_RANK"])
    return failure_of(lambda: iris.iris((1 << 20) + (rank == 1) * 4096, timeout_s=20))


def world_sizes_differ(who: int) -> Failure:
    """Rank ``who`` was given another number of ranks; a later rank comes when the mismatch is already known."""
    rank, size = int(os.environ["IRIS_RANK"]), int(os.environ["IRIS_WORLD_SIZE"])
    if rank == size - 1 and size > 2:
        time.sleep(0.4)
    os.environ["IRIS_WORLD_SIZE"] = str(size + (rank == who))
    try:
        return failure_of(lambda: iris.iris(1 << 20, timeout_s=20))
    finally:
        os.environ["IRIS_WORLD_SIZE"] = str(size)


def bad_arguments() -> list[Failure]:
    ctx = context()  # now: opening one is not timed
    return [
        failure_of(iris.iris, 100),
        failure_of(iris.iris, 1.5e9),
        failure_of(iris.Iris, True),
        failure_of(lambda: iris.Iris(1 << 20, timeout_s=0)),
        failure_of(lambda: iris.iris(1 << 20, backend="tpu")),
        failure_of(lambda: iris.iris(1 << 20, backend=np.array(["sim", "cuda"]))),  # type: ignore[arg-type]
        failure_of(lambda: iris.iris(1 << 20, group=[0, 1])),
        failure_of(lambda: with_variable("IRIS_TIMEOUT_S", "soon")),
        failure_of(lambda: with_variable("IRIS_TIMEOUT_S", "-1")),
        failure_of(lambda: with_variable("IRIS_REPLAY", "off")),
        failure_of(lambda: with_variable("IRIS_OVERSUBSCRIBE", "yes")),
        failure_of(lambda: with_variable("IRIS_CHECK_CALLS", "all")),
        failure_of(lambda: iris.iris(1 << 20, log_level="loud")),
        failure_of(lambda: with_variable("IRIS_LOG_LEVEL", "loud")),
        failure_of(ctx.set_log_level, "loud"),
        failure_of(lambda: iris.iris(1 << 20, backend="cuda" if BACKEND == "sim" else "sim")),
    ]


def with_variable(name: str, value: str) -> iris.Iris:
    with mock.patch.dict(os.environ, {name: value}):
        return iris.iris(1 << 20)


@TWO_OR_MORE
def test_heap_sizes_that_differ(ranks: Ranks) -> None:
    for failure in on_time(ranks.run(heap_sizes_differ)):
        assert failure.kind == "RankMismatch"
        others = ranks_text([0, *range(2, ranks.world_size)])
        assert f"{others}: iris(heap_size={1 << 20}" in failure.message
        assert f"rank 1: iris(heap_size={(1 << 20) + 4096}" in failure.message


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("ranks", worlds(2, 3), indirect=True)
def test_world_sizes_that_differ(ranks: Ranks, who: int) -> None:
    size = ranks.world_size
    for failure in on_time(ranks.run(world_sizes_differ, who)):
        assert failure.kind == "RankMismatch", failure
        assert f"rank {who} expects {size + 1} ranks" in failure.message or f"expects {size} ranks" in failure.message
        assert failure.message.endswith("Start all ranks with the same world size.")


def test_arguments_of_iris(ranks: Ranks) -> None:
    expected = [
        ("ArgumentError", "iris: heap_size: expected a whole number of bytes from 65536 to 70368744177664, got 100"),
        (
            "ArgumentError",
            "iris: heap_size: expected a whole number of bytes from 65536 to 70368744177664, got 1500000000.0",
        ),
        ("ArgumentError", "iris: heap_size: expected a whole number of bytes from 65536 to 70368744177664, got True"),
        ("ArgumentError", "iris: timeout_s: expected a number of seconds, more than 0"),
        ("ArgumentError", "iris: backend: expected one of cuda, hip, sim, compile, got 'tpu'"),
        ("ArgumentError", "iris: backend: expected one of cuda, hip, sim, compile, got array("),
        ("ArgumentError", "iris: group: expected None, as torch.distributed is not initialised, got list"),
        ("ArgumentError", "iris: IRIS_TIMEOUT_S: expected a number of seconds, got 'soon'"),
        ("ArgumentError", "iris: IRIS_TIMEOUT_S: expected a number of seconds, more than 0 and at most 31536000, got"),
        ("ArgumentError", "iris: IRIS_REPLAY: expected 0 or 1, got 'off'"),
        ("ArgumentError", "iris: IRIS_OVERSUBSCRIBE: expected 0 or 1, got 'yes'"),
        ("ArgumentError", "iris: IRIS_CHECK_CALLS: expected 0 or 1, got 'all'"),
        ("ArgumentError", "iris: log_level: expected one of debug, info, warning, error, critical, or a number"),
        ("ArgumentError", "got 'loud'. It is an argument, or IRIS_LOG_LEVEL in the environment."),
        ("ArgumentError", "set_log_level: log_level: expected one of debug"),
        ("BackendError", ""),
    ]
    for failures in ranks.run(bad_arguments):
        for failure, (kind, words) in zip(on_time(failures), expected, strict=True):
            assert failure.kind == kind and words in failure.message, failure


def simulated_sms(text: str) -> Failure:
    return failure_of(with_variable, "IRIS_SIM_SMS", text)


@pytest.mark.skipif(BACKEND != "sim", reason="about the simulator")
@pytest.mark.parametrize("text", ["x", "0", "-1", "2.5"])
@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_number_of_simulated_sms_that_cannot_be(ranks: Ranks, text: str) -> None:
    for failure in on_time(ranks.run(simulated_sms, text)):
        assert failure.kind == "ArgumentError", failure
        assert failure.message == f"iris: IRIS_SIM_SMS: expected a whole number of SMs, 1 or more, got {text!r}"


def unlike_sms() -> Failure:
    return failure_of(with_variable, "IRIS_SIM_SMS", str(3 + context().rank))


@pytest.mark.skipif(BACKEND != "sim", reason="GPUs have what they have")
@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_ranks_with_different_gpus(ranks: Ranks) -> None:
    for failure in on_time(ranks.run(unlike_sms)):
        assert failure.kind == "RankMismatch", failure
        assert "devices differ in their number of SMs (rank 0: 3, rank 1: 4)" in failure.message


def meet_oddly(how: str) -> Failure:
    """Meet in an unusual way that must work."""

    def work() -> None:
        job = os.environ.get("IRIS_JOB", "")
        env = {"IRIS_JOB": job + os.fsdecode(b"gr\xf6\xdfe")} if how == "a job's name in Latin-1" else {}
        with mock.patch.dict(os.environ, env), fresh(timeout_s=365 * 86400 if how == "a year" else 5) as ctx:
            if how == "a group of all":
                ctx.barrier(group=list(range(ctx.world_size)) if ctx.rank % 2 else None)
            if how == "a mismatch in my_barrier(":
                with suppress(iris.RankMismatch):
                    ctx.agree("my_barrier", ctx.rank)
            ctx.barrier()

    return failure_of(work)


@TWO_OR_MORE
@pytest.mark.parametrize("how", ["a year", "a group of all", "a mismatch in my_barrier(", "a job's name in Latin-1"])
def test_odd_but_right(ranks: Ranks, how: str) -> None:
    for failure in ranks.run(meet_oddly, how):
        assert failure.kind == "nothing", failure


def threads_of_pytorch() -> list[int]:
    torch.set_num_threads(7)
    with fresh(), fresh():
        within = torch.get_num_threads()
    return [within, torch.get_num_threads()]


@pytest.mark.skipif(BACKEND != "sim", reason="only simulated ranks share the cores")
@TWO
def test_a_closed_simulator_leaves_pytorch_its_threads(ranks: Ranks) -> None:
    for within, after in ranks.run(threads_of_pytorch):
        assert within < 7 and after == 7


def same_job_twice() -> tuple[Failure, Failure]:
    """A second process claims this rank of this job while the first still waits for its peers."""
    read, write = os.pipe()
    os.environ["IRIS_JOB"], name = f"taken-{os.getpid()}", os.environ["IRIS_JOB"]
    os.environ["IRIS_WORLD_SIZE"], size = "2", os.environ["IRIS_WORLD_SIZE"]
    try:
        child = os.fork()
        if child == 0:
            os.write(write, pickle.dumps(failure_of(lambda: iris.iris(1 << 20, timeout_s=1.5))))
            os._exit(0)
        time.sleep(0.5)
        second = failure_of(lambda: iris.iris(1 << 20, timeout_s=1.5))
        os.waitpid(child, 0)
        return pickle.loads(os.read(read, 1 << 16)), second
    finally:
        os.environ["IRIS_JOB"], os.environ["IRIS_WORLD_SIZE"] = name, size
        os.close(read)
        os.close(write)


@pytest.mark.skipif(BACKEND != "sim", reason="forks, which CUDA does not allow")
@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_a_job_name_that_is_taken(ranks: Ranks) -> None:
    ((first, second),) = ranks.run(same_job_twice)
    assert first.kind == "WaitTimeout" and first.ranks == (1,)
    assert second.kind == "LaunchError" and second.took_s < 0.5
    assert second.message.startswith("rank 0 of this job is already running in another process.")
    assert "IRIS_JOB=<name>" in second.message


def ranks_out_of_range() -> list[Failure]:
    ctx = context()
    size = ctx.world_size
    return [failure_of(ctx.broadcast, 1, wrong) for wrong in (size, -1, 1.0, "0", None)] + [
        failure_of(ctx.barrier, None, [ctx.rank, size]),
        failure_of(ctx.device_barrier, [ctx.rank, size]),
    ]


def test_a_rank_out_of_range(ranks: Ranks) -> None:
    for failures in ranks.run(ranks_out_of_range):
        for failure in on_time(failures):
            assert failure.kind == "ArgumentError", failure
            assert re.search(rf"(a rank|distinct ranks) from 0 to {ranks.world_size - 1}\b.*, got", failure.message)


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("said nothing")


class Unreadable(list[str]):
    error: Exception = OSError("no such page")

    def __iter__(self) -> Any:
        raise self.error

    def __reduce__(self) -> Any:
        return type(self), ()


class Unspeakable(Unreadable):
    error = Mute()


UNSENDABLE = [
    ((1, 2), "got tuple"),
    ([0, {"a": [1, (2, 3)]}], "got tuple at value[1]['a'][1]"),
    ({"a": {3: 4}}, "got int as key 3 at value['a']"),
    ([b"raw"], "got bytes at value[0]"),
    (torch.eye(2).to_sparse(), "got a tensor of torch.sparse_coo on cpu"),
    ([2**14_000], "got a number of 14001 bits, more than 14000 at value[0]"),
    (10**5000, "got a number of 16610 bits, more than 14000"),
    (Unreadable(), "got Unreadable that cannot be read: OSError: no such page"),
    (Unspeakable(), "got Unspeakable that cannot be read: Mute: its words cannot be had"),
]


def send(value: object) -> tuple[Failure, object]:
    """What a broadcast of ``value`` raises, and what the next broadcast returns."""
    ctx = context()
    return failure_of(ctx.broadcast, value, 0), ctx.broadcast("next", 0)


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize(("value", "words"), UNSENDABLE, ids=[words for _, words in UNSENDABLE])
def test_a_value_that_would_not_arrive_as_it_was(ranks: Ranks, value: object, words: str) -> None:
    told = ranks.run(send, value)
    assert [after for _, after in told] == ["next"] * ranks.world_size
    for failure in on_time([failure for failure, _ in told]):
        assert failure.kind == "ArgumentError", failure
        assert failure.message.startswith("broadcast: value: expected None, bool") and failure.message.endswith(words)


@pytest.mark.parametrize("wrong", [1, "yes", [True]])
def test_a_trace_that_is_none(wrong: Any) -> None:
    with pytest.raises(iris.ArgumentError, match=r"matmul: trace: expected True, False or an iris\.Trace, got "):
        trace_of(mock.Mock(), "matmul", wrong)


@pytest.mark.parametrize("off", [None, 0, False])
def test_a_trace_that_is_off(off: Any) -> None:
    ctx = mock.Mock(last_trace="earlier")
    assert trace_of(ctx, "matmul", off) is None and ctx.last_trace == "earlier"
    assert isinstance(trace_of(ctx, "matmul", True), iris.Trace)


def test_leaving_a_kernel_is_no_wait_for_data() -> None:
    trace = iris.Trace()
    trace.programs = 2
    spans = [("wg_gemm", 0, 50, 3), ("wg_gemm_wait", 50, 1_050, 3), ("wg_gemm_wait", 2_000, 9_000, -1)]
    events = [Event(0, 0, kind, start, end, detail) for kind, start, end, detail in spans]
    with mock.patch.object(trace, "events", return_value=events):
        assert trace.waited_s(mock.Mock()) == 500e-9


def test_times_of_a_trace_are_by_the_clock_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of several barriers, which ranks leave at the same time, counts: a rank may be held up in one."""
    said = {0: [[10, 20, 30], [[0, "wg_gemm", 15, 25, 3]]], 1: [[1010, 1020, 1999], [[2, "wg_gemm", 1012, 1022, 4]]]}
    ctx: Any = SimpleNamespace(backend_name="cuda", world_size=2, broadcast=lambda own, source: said[source])
    monkeypatch.setattr("iris.trace._meetings", lambda _: [])
    trace = iris.Trace()
    with mock.patch.object(trace, "events", return_value=[]):
        assert trace.gather(ctx) == [Event(0, 0, "wg_gemm", 3, 13, 3), Event(1, 2, "wg_gemm", 0, 10, 4)]


def test_intervals_of_an_unknown_kind_are_drawn(tmp_path: Path) -> None:
    events = [Event(0, 0, "wg_gemm", 0, 50, 3), Event(0, 0, "7", 50, 90, 3)]
    picture = draw(events, tmp_path / "trace.svg").read_text()
    assert "#3b7dd8" in picture and "#9467bd" in picture and "#e4572e" not in picture


@pytest.mark.parametrize("count", [1023, 1024, 1025, 5000])
def test_a_trace_that_lacks_events_says_so(count: int) -> None:
    """Once for each call."""
    ctx, trace = mock.Mock(rank=0, device="cpu"), iris.Trace()
    trace_of(ctx, "matmul", trace)
    for times, (name, begin) in enumerate([("the trace of matmul", trace._make_room), ("a trace", trace.begin)], 1):
        begin(ctx, 2)
        assert trace.buffer is not None
        trace.buffer.view(2, -1)[1, 0] = count
        for _ in range(2):
            assert len(trace.events(ctx)) == min(count, 1024)
        told = [call.args[0] for call in ctx.warning.call_args_list]
        assert len(told) == times * (count > 1024)
        words = f"{name} lacks events: a program had {count}, and the first 1024 are kept"
        assert count <= 1024 or told[-1].startswith(words)


@triton.jit
def recording_kernel(trace_ptr, EVENTS: tl.constexpr):
    for event in range(EVENTS):
        record(trace_ptr, WAIT, event, event + 1, event)


def recorded_by_more_programs() -> tuple[int, bool, list[str]]:
    """The number of events kept of a kernel with more programs than there is room for, whether the memory after the
    trace is unchanged, and the warnings."""
    ctx, trace = context(), iris.Trace()
    trace.begin(ctx, programs=2)
    assert trace.buffer is not None
    room = trace.buffer.numel()
    memory = torch.zeros(2 * room, dtype=torch.int64, device=ctx.device)
    memory[:room] = trace.buffer
    trace.buffer = memory[:room]
    with mock.patch.object(ctx, "warning") as warning:
        recording_kernel[(4,)](trace.buffer, 3)
        kept = len(trace.events(ctx))
    return kept, not memory[room:].any(), [call.args[0] for call in warning.call_args_list]


@TWO
def test_programs_without_room_in_a_trace_write_nowhere(ranks: Ranks) -> None:
    for kept, untouched, told in ranks.run(recorded_by_more_programs):
        assert kept == 6 and untouched
        assert told == [
            "a trace lacks events: it began for 2 programs, and the kernel has more. Give Trace.begin the size of the "
            "grid's first axis."
        ]


def recorded_nowhere() -> Failure:
    with fresh() as ctx:
        ctx.barrier()
        return failure_of(lambda: recording_kernel[(1,)](iris.Trace().buffer, 3))


@pytest.mark.skipif(BACKEND != "sim", reason="compiled, the error names the kernel's line, and this is its cause")
@TWO
def test_a_trace_that_has_not_begun_is_named(ranks: Ranks) -> None:
    for failure in ranks.run(recorded_nowhere):
        assert "trace_ptr: expected the buffer of an iris.Trace, behind begin()" in failure.message


def late_to_a_barrier() -> Failure:
    """Rank 1 comes late: the others report it in time, and rank 1 learns of that when it comes."""

    def work() -> None:
        with fresh(timeout_s=0.5, first_timeout_s=TIMEOUT_S) as ctx:
            ctx.barrier()
            if ctx.rank == 1:
                time.sleep(1)
            ctx.barrier()

    return failure_of(work)


def late_to_an_op() -> Failure:
    """Rank 1 comes late to the first call."""
    shared = context()
    opened = 0.0

    def work() -> None:
        nonlocal opened
        with fresh(timeout_s=0.5) as ctx:
            output, a, b = ctx.zeros(16, 16), *(torch.ones(*size, device=ctx.device) for size in ((16, 8), (8, 16)))
            shared.barrier()  # its limit is longer: no other rank may be late
            opened = time.monotonic()  # that took seconds on a busy machine with 8 GPUs
            if ctx.rank == 1:
                time.sleep(1.2)
            ctx.ops.matmul_all_reduce(output, a, b)

    failure = failure_of(work)
    return replace(failure, took_s=time.monotonic() - opened)


@triton.jit
def unanswered_kernel(handle, flag):
    iris.wait(flag, 2, 1, handle)


def unset_flag(ctx: iris.Iris) -> torch.Tensor:
    """The flag that the kernel, which is compiled here, will wait for."""
    flag = ctx.full((1,), 2, dtype=torch.int32)
    unanswered_kernel[(1,)](ctx.handle, flag)
    flag.zero_()
    context().barrier()  # its limit is longer: some ranks may have compiled longer
    return flag


def late_signal() -> Failure:
    """A kernel of rank 0 waits for what rank 1 never signals, and rank 0's host is busy; the others wait for it."""

    def work() -> None:
        with fresh(timeout_s=0.5, first_timeout_s=TIMEOUT_S) as ctx:
            flag = unset_flag(ctx)
            if ctx.rank == 0:
                with suppress(iris.WaitTimeout):  # which the simulator raises here
                    unanswered_kernel[(1,)](ctx.handle, flag)
                time.sleep(2.5)
            elif BACKEND == "sim":
                while not ctx._backend.peek(ABORT_WORD.value):
                    time.sleep(0.01)
            else:
                time.sleep(1)
            ctx.barrier()

    return failure_of(work)


@TWO_OR_MORE
def test_a_kernel_that_waits_in_vain_is_named_on_all_ranks(ranks: Ranks) -> None:
    """It is named although hosts, which wait for its rank, give up first."""
    first, *others = ranks.run(late_signal)
    assert re.search(r"a user kernel: rank 0 waited \d\.\d s for rank 1: flag at heap offset", first.message), first
    for failure in others:
        assert failure.kind == "WaitTimeout" and failure.ranks == (1,), failure
        assert failure.message.startswith(
            "a kernel of rank 0 gave up waiting for rank 1, so all ranks stopped. barrier: "
        )


@triton.jit
def first_wait_kernel(flag, peer, handle):
    iris.wait(flag, 1, peer, handle)


def held_up_by_a_wait() -> Failure:
    """Rank 0 waits longer for a flag than the others wait for rank 0 in a barrier."""
    with fresh(timeout_s=1, first_timeout_s=TIMEOUT_S) as ctx:
        flag = ctx.ones(1, dtype=torch.int32)
        first_wait_kernel[(1,)](flag, 1, ctx.handle)  # compiled now
        flag.zero_()
        context().barrier()

        def work() -> None:
            if ctx.rank == 0:
                first_wait_kernel[(1,)](flag, 1, ctx.handle)
            ctx.barrier()

        return failure_of(work)


@TWO_OR_MORE
def test_a_rank_that_others_wait_for_says_what_holds_it_up(ranks: Ranks) -> None:
    """It does so although its own wait has not expired."""
    first, *others = ranks.run(held_up_by_a_wait)
    for failure in (first, *others):
        assert failure.kind == "WaitTimeout" and failure.ranks == (0,), failure
        assert " waited 1 s for rank 0, which did not make the call." in failure.message
    assert re.search(
        r"On this rank: a user kernel: rank 0 waited \d+\.\d s for rank 1: flag at heap offset \d+ \(flag\[0\] of the "
        r"tensor at \d+\) should reach 1, holds 0",
        first.message,
    ), first


def barriers_behind_a_failure() -> list[Failure]:
    with fresh(timeout_s=0.5, first_timeout_s=TIMEOUT_S) as ctx:
        flag = unset_flag(ctx)
        if ctx.rank == 0:
            with suppress(iris.WaitTimeout):  # which the simulator raises here
                unanswered_kernel[(1,)](ctx.handle, flag)
        return [failure_of(call) for call in (ctx.barrier, ctx.barrier, ctx.device_barrier)]


@TWO_OR_MORE
def test_a_device_barrier_is_not_launched_behind_a_failure(ranks: Ranks) -> None:
    for first, again, launched in ranks.run(barriers_behind_a_failure):
        assert first.kind == "WaitTimeout" and first.message == again.message == launched.message


def given_up_in_another_op() -> Failure:
    """Rank 0 waits in another op than rank 1, gives up first, and looks for the reason after rank 1 has left."""
    shared = context()

    def work() -> None:
        with fresh(timeout_s=0.5 if shared.rank == 0 else 30) as ctx:
            a, b = (torch.ones(*size, device=ctx.device) for size in ((4, 16), (16, 8)))
            gathered, scattered = (torch.ones(rows, 8, device=ctx.device) for rows in (8, 2))
            for _ in range(2):
                ctx.ops.all_gather_matmul(gathered, a, b, gather_dim=0)
                ctx.ops.matmul_reduce_scatter(scattered, a, b)
            ctx.synchronize()
            shared.barrier()
            if ctx.rank == 0:
                described = ctx._failure.described

                def described_late() -> iris.IrisError:
                    time.sleep(1)
                    return described()

                ctx._failure.described = described_late  # type: ignore[method-assign]
                ctx.ops.matmul_reduce_scatter(scattered, a, b)
            else:
                ctx.ops.all_gather_matmul(gathered, a, b, gather_dim=0)
            ctx.synchronize()

    return failure_of(work)


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_who_gave_up_does_not_blame_the_one_that_left_for_that(ranks: Ranks) -> None:
    first, second = ranks.run(given_up_in_another_op)
    assert first.kind == second.kind == "WaitTimeout" and first.ranks == second.ranks == (1,), (first, second)
    assert first.message.startswith("matmul_reduce_scatter: rank 0 waited 0."), first
    assert "With IRIS_CHECK_CALLS=1 ranks compare their calls" in first.message
    assert second.message.startswith("all_gather_matmul: rank 0 gave up waiting for rank 1"), second


def another_call() -> Failure:
    """A kernel of rank 0 waits for rank 1, which, like the others, makes a call that rank 0 does not make."""

    def work() -> None:
        with fresh(timeout_s=0.5 if context().rank == 0 else 30) as ctx:
            flag = unset_flag(ctx)
            if ctx.rank == 0:
                unanswered_kernel[(1,)](ctx.handle, flag)
                ctx.synchronize()
            else:
                ctx.barrier()

    return failure_of(work)


@TWO_OR_MORE
def test_a_rank_that_is_in_another_call_is_told(ranks: Ranks) -> None:
    first, *_ = ranks.run(another_call)
    assert re.search(
        r"a user kernel: rank 0 waited \d\.\d s for rank 1: .* Rank 1 is in another call: barrier\.$", first.message
    )


def closed_too_early(config: str | None) -> Failure:
    """Other ranks close their contexts; a kernel of rank 0 waits for them: in an op with ``config``, or for a flag."""

    def work() -> None:
        with fresh(timeout_s=30) as ctx:
            flag = unset_flag(ctx)
            a, b = (torch.ones(*size, device=ctx.device) for size in ((4, 16), (16, 8)))
            gathered = torch.ones(4 * ctx.world_size, 8, device=ctx.device)
            for _ in range(2):
                ctx.ops.all_gather_matmul(gathered, a, b, gather_dim=0, config=config or "push")
            ctx.synchronize()
            context().barrier()
            if ctx.rank == 0 and config is not None:
                ctx.ops.all_gather_matmul(gathered, a, b, gather_dim=0, config=config)
            elif ctx.rank == 0:
                unanswered_kernel[(1,)](ctx.handle, flag)
            ctx.synchronize()

    return failure_of(work)


@pytest.mark.parametrize("config", [None, "push", "low_latency"])
@TWO_OR_MORE
def test_who_waits_for_a_rank_that_has_closed_is_told_at_once(ranks: Ranks, config: str | None) -> None:
    first, second, *_ = ranks.run(closed_too_early, config)
    site = "a user kernel" if config is None else "all_gather_matmul"
    lacking = "data at heap offset .* has not come" if config == "low_latency" else "flag at heap offset .*"
    assert first.kind == "PeerDied" and first.took_s < 20, first
    (peer,) = first.ranks
    assert re.match(
        rf"{site}: rank 0 waited \d\.\d s for rank {peer}: {lacking}, and rank {peer} has closed its context\. Has it "
        r"left out a call, or ended early, as by sys\.exit\(\)\?",
        first.message,
    ), first
    assert second.kind == "PeerDied" and f"rank {peer} has closed its context" in second.message, second


@triton.jit
def two_checks_kernel(handle, stopped):
    """Check twice a wait for rank 1, which has closed its context."""
    now = clock_ns()
    first, gone = bounds.check_bounds(1024, 6, 4, 1, 0, now, handle, control.SITE_USER)
    tl.store(stopped, first)
    for_another, _ = bounds.check_bounds(1024, 6, 4, 0, gone, now, handle, control.SITE_USER)
    tl.store(stopped + 1, for_another)
    second, _ = bounds.check_bounds(1024, 6, 4, 1, gone, now, handle, control.SITE_USER)
    tl.store(stopped + 2, second)


def two_checks() -> tuple[list[int], Failure]:
    with suppress(iris.PeerDied), fresh(timeout_s=30) as ctx:
        stopped, failure = torch.full((3,), -1, dtype=torch.int32, device=ctx.device), Failure()
        closed_words(ctx)[1] = 1
        ctx.barrier()
        if ctx.rank == 0:
            failure = failure_of(lambda: (two_checks_kernel[(1,)](ctx.handle, stopped), ctx.synchronize()))
    return stopped.tolist(), failure


def closed_words(ctx: iris.Iris) -> torch.Tensor:
    return ctx._backend.bytes_at(CLOSED_WORDS.value, 64, None).view(torch.int32)


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_wait_looks_again_when_a_rank_has_closed(ranks: Ranks) -> None:
    """A signal that this rank sent before it closed may have arrived since the last look."""
    (stopped, failure), _ = ranks.run(two_checks)
    assert stopped == [0, 0, 1]
    assert failure.kind == "PeerDied" and "should reach 6, holds 4, and rank 1 has closed" in failure.message, failure


def wait_for_no_rank(peer: int) -> Failure:
    failure = Failure()
    with suppress(iris.WaitTimeout), fresh(timeout_s=0.5) as ctx:
        flag = ctx.zeros(1, dtype=torch.int32)
        failure = failure_of(lambda: (first_wait_kernel[(1,)](flag, peer, ctx.handle), ctx.synchronize()))
    return failure


@pytest.mark.parametrize("peer", [-1, 16])
@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_a_wait_for_what_is_no_rank_lasts_until_its_limit_and_says_so(ranks: Ranks, peer: int) -> None:
    (failure,) = ranks.run(wait_for_no_rank, peer)
    assert failure.kind == "WaitTimeout" and failure.ranks == (peer,), failure
    assert "There is no such rank, only 0 to 0: the order is wait(" in failure.message


@triton.jit
def gone_kernel(handle, gone_of, SITE: tl.constexpr, COUNTED: tl.constexpr):
    """For waits for each rank, store which rank is gone."""
    for peer in range(3):
        _, gone = bounds.check_bounds(1024, 6, 4, peer, 0, clock_ns(), handle, SITE, COUNTED)
        tl.store(gone_of + peer, gone)


def gone_ranks() -> list[list[int]]:
    """The ranks that are gone on rank 0, when rank 1 has closed its context: for an op, for a counted flag, for a user;
    and again when rank 2 has closed its context, too. And in a job of rank 2 alone, when all others have."""
    found = []
    with fresh(timeout_s=30) as ctx:
        gone_of = torch.zeros(3, dtype=torch.int32, device=ctx.device)
        for closed in (1, 2) if ctx.rank == 0 else ():
            closed_words(ctx)[closed] = 1
            op, user = control.SITE_MATMUL, control.SITE_USER
            for site, counted in ((op, False), (op, True), (user, False)):
                gone_kernel[(1,)](ctx.handle, gone_of, SITE=site.value, COUNTED=counted)
                found.append(gone_of.tolist())
        if ctx.rank == 2:
            closed_words(ctx)[:2] = 1
            gone_kernel[(1,)](ctx.alone, gone_of, SITE=control.SITE_MATMUL.value, COUNTED=False)
            found.append(gone_of.tolist())
        closed_words(ctx).zero_()
        ctx.barrier()
    return found


@pytest.mark.parametrize("ranks", worlds(3, 3), indirect=True)
def test_a_flag_that_several_count_up_is_waited_for_until_all_have_closed(ranks: Ranks) -> None:
    of_first, _, of_last = ranks.run(gone_ranks)
    assert of_first == [[0, 2, 0], [0, 0, 0], [0, 0, 0], [0, 2, 3], [0, 2, 3], [0, 2, 3]]
    assert of_last[0][0] == 0


@TWO_OR_MORE
def test_a_rank_that_does_not_come_to_a_barrier_is_named(ranks: Ranks) -> None:
    for failure in on_time(ranks.run(late_to_a_barrier)):
        assert failure.kind == "WaitTimeout" and failure.ranks == (1,), failure
        assert "waited 0.5 s for rank 1, which did not make the call. Is it in other work" in failure.message


@TWO_OR_MORE
def test_the_op_that_a_rank_does_not_come_to_is_named(ranks: Ranks) -> None:
    for failure in on_time(ranks.run(late_to_an_op)):
        assert failure.kind == "WaitTimeout" and failure.ranks == (1,), failure
        assert failure.message.startswith("matmul_all_reduce: rank ")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("close", "Rank 0 is in another call: close."),
        ("matmul_all_reduce", "Rank 0 compares a new call of matmul_all_reduce with the other ranks: shapes, bias, "),
    ],
)
def test_another_call_may_be_of_the_same_op(call: str, told: str) -> None:
    assert _other_call(0, call, "matmul_all_reduce: rank 1 waited 0.5 s for rank 0: …").startswith(told)


@pytest.mark.parametrize("name", ["trace", "trace.xyz", ".svg"])
def test_a_picture_of_no_known_format(name: str, tmp_path: Path) -> None:
    with pytest.raises(iris.ArgumentError, match=r"draw: path: expected a file whose name ends in \.svg or \.png, got"):
        draw([], tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_picture_of_what_is_no_events(tmp_path: Path) -> None:
    with pytest.raises(
        iris.ArgumentError, match=r"draw: events: expected what trace\.gather\(ctx\) returns, got Trace"
    ):
        draw(iris.Trace(), tmp_path / "trace.svg")  # type: ignore[arg-type]
    for wrong in ([1, 2], "events"):
        with pytest.raises(iris.ArgumentError, match=rf"draw: events: .*, got {type(wrong).__name__}"):
            draw(wrong, tmp_path / "trace.svg")  # type: ignore[arg-type]


@pytest.mark.parametrize("function", ["begin", "events", "gather", "waited_s"])
@pytest.mark.parametrize(("wrong", "kind"), [(None, "nothing"), ("cuda", "str")])
def test_a_trace_needs_a_context(function: str, wrong: Any, kind: str) -> None:
    words = rf"Trace\.{function}: ctx: expected a context, as iris\.iris\(\) returns it, got {kind}"
    with pytest.raises(iris.ArgumentError, match=words):
        getattr(iris.Trace(), function)(wrong, *[3] * (function == "begin"))


@pytest.mark.parametrize("programs", [0, -1, 2.5])
def test_a_trace_of_no_programs(programs: Any) -> None:
    with pytest.raises(iris.ArgumentError, match=r"Trace.begin: programs: expected a positive whole number, got"):
        iris.Trace().begin(mock.Mock(device="cpu"), programs)
