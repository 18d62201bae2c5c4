"""What the simulator's interpreter does beyond Triton's: co-resident programs, right bfloat16, and a memory of
types."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton_types
from ranks import BACKEND, Failure, Ranks, assert_close, context, failure_of, fresh, worlds
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as upstream
from warm import python

import iris
from iris.backends import memos
from iris.device import control, sync
from iris.device.words import NO_WORD, take_words

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(BACKEND != "sim", reason="tests the simulator"),
]
ONE = pytest.mark.parametrize("ranks", [1], indirect=True)
TWO = pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
KINDS_OF_POLL = ["plain", "ca", "volatile", "cv", "cv, masked", "add", "cas", "two places", "peer", "peer's cas"]


@triton.autotune([triton.Config({"BLOCK": 4}), triton.Config({"BLOCK": 8})], key=["count"])
@triton.jit
def autotuned_kernel(values, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(values + at, BLOCK, mask=at < count)


@triton.jit
def product_kernel(a, b, c):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def autotuned() -> list[int]:
    ctx = context()
    values = ctx.zeros(10, dtype=torch.int32)
    autotuned_kernel[lambda meta: (triton.cdiv(meta["values"].numel(), meta["BLOCK"]),)](values, 10)
    found: list[int] = values.tolist()
    return found


def float8_products() -> list[int]:
    """How many products of one and an 8-bit pattern, of all patterns, differ from PyTorch's."""
    wrong = []
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        a = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).reshape(16, 16)
        c = torch.zeros(16, 16)
        product_kernel[(1,)](a, torch.eye(16).to(dtype), c)
        right = a.float().nan_to_num(7, 7, 7)  # one NaN makes all of its row NaN
        rows = torch.isfinite(a.float()).all(1)
        wrong.append(int((c != right)[rows].sum() + torch.isfinite(c[~rows]).sum()))
    return wrong


@ONE
def test_an_autotuned_kernel_takes_its_first_config(ranks: Ranks) -> None:
    assert ranks.run(autotuned) == [[4] * 10]


@ONE
def test_products_of_every_8_bit_float(ranks: Ranks) -> None:
    assert ranks.run(float8_products) == [[0, 0]]


@triton.jit
def five_kernel(out, *, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), 5)


def launch_with(keywords: dict[str, int]) -> tuple[Failure, int]:
    out = torch.zeros(4, dtype=torch.int32)
    return failure_of(lambda: five_kernel[(1,)](out, **keywords)), int(out.sum())


@ONE
@pytest.mark.parametrize(
    ("misspelt", "words"),
    [
        ("num_warp", "Keyword argument num_warp was specified but unrecognised: did you mean num_warps?"),
        ("BLOCKS", "Keyword argument BLOCKS was specified but unrecognised: did you mean BLOCK?"),
        ("colour", "Keyword argument colour was specified but unrecognised'"),
    ],
)
def test_a_misspelt_keyword_is_refused_as_on_a_gpu(ranks: Ranks, misspelt: str, words: str) -> None:
    ((failure, total),) = ranks.run(launch_with, {"BLOCK": 4, misspelt: 8})
    assert failure.kind == "KeyError" and words in failure.message and total == 0


def launch_in(grid: object) -> tuple[Failure, int]:
    """The failure of a launch, and how many programs ran."""
    count = context().zeros(1, dtype=torch.int32)
    return failure_of(lambda: counting_kernel[grid](count)), int(count.item())


@triton.jit
def counting_kernel(count):
    tl.atomic_add(count, 1)


@ONE
@pytest.mark.parametrize("grid", [(2.5,), (40 / 20,), ("2",), (1, 1, 1, 1), (), 2], ids=str)
def test_a_grid_is_of_whole_numbers(ranks: Ranks, grid: object) -> None:
    """If M / BLOCK were cut off, the last program would be missing."""
    ((failure, programs),) = ranks.run(launch_in, grid)
    assert failure.kind == "TypeError" and programs == 0
    assert failure.message == f"counting_kernel: grid: expected one to three whole numbers, got {grid!r}"


@ONE
def test_sizes_of_a_grid_may_be_of_any_whole_kind(ranks: Ranks) -> None:
    for grid, programs in (((np.int64(2), 3), 6), ([torch.tensor(2)], 2), ((2, 1, 2), 4), ((0,), 0)):
        ((failure, ran),) = ranks.run(launch_in, grid)
        assert (failure.kind, ran) == ("nothing", programs)


@triton.jit
def taking_kernel(out, value):
    tl.store(out, 1)


@triton.jit
def taking_a_handle_kernel(out, handle):
    tl.store(out, iris.rank(handle))


def launch_taking(values: list[object]) -> list[tuple[Failure, int]]:
    """The failure of a launch with each of ``values``, and with the context, and what it stores."""
    ctx, outcomes = context(), []
    for value in [*values, ctx]:
        out = ctx.zeros(1, dtype=torch.int32)
        kernel = taking_a_handle_kernel if value is ctx else taking_kernel
        failure = failure_of(lambda out=out, value=value, kernel=kernel: kernel[(1,)](out, value))
        outcomes.append((failure, int(out.item())))
    return outcomes


@ONE
def test_an_argument_that_no_compiler_takes_is_refused_as_on_a_gpu(ranks: Ranks) -> None:
    (outcomes,) = ranks.run(launch_taking, [[1, 2], "text", np.float32(1), np.zeros(3), torch.float32])
    for (failure, total), kind in zip(outcomes, ("list", "str", "float32", "ndarray", "dtype", "Iris"), strict=True):
        assert failure.kind == "TypeError" and total == 0
        assert re.search(rf"failed to specialize argument of type: ([\w.]+\.)?{kind}\b", failure.message)
    assert outcomes[-1][0].message.startswith("taking_a_handle_kernel: argument handle: ")
    assert outcomes[-1][0].message.endswith("Of a context pass ctx.handle, or as heap_bases ctx.heap_bases")


@ONE
def test_arguments_that_compilers_take_are_taken(ranks: Ranks) -> None:
    (outcomes,) = ranks.run(launch_taking, [1, 1.5, True, None, np.float64(1), (1, 2.5, None), torch.zeros(1)])
    assert [(failure.kind, total) for failure, total in outcomes[:-1]] == [("nothing", 1)] * 7


@ONE
def test_options_of_both_vendors_are_taken(ranks: Ranks) -> None:
    options = {"num_warps": 8, "num_stages": 2, "num_ctas": 1, "maxnreg": 64, "waves_per_eu": 2, "debug": False}
    ((failure, total),) = ranks.run(launch_with, {"BLOCK": 4, **options})
    assert failure.kind == "nothing" and total == 20


THREE: tl.constexpr = tl.constexpr(3)


@triton.jit
def add_value(out, at, N: tl.constexpr):
    tl.store(out + at, N.value + THREE.value)


@triton.jit
def values_kernel(out, N: tl.constexpr, DTYPE: tl.constexpr = tl.int32):
    DOUBLE: tl.constexpr = N * 2
    tl.store(out, DOUBLE.value)
    for at in range(1, N.value):
        add_value(out, at, N)
    add_value(out, N.value, 10)
    tl.store(out + 5, tl.full((), 7.5, tl.float32).to(DTYPE.value))


@triton.jit
def value_of_tensor_kernel(out, count):
    tl.store(out, count.value)


def values() -> tuple[list[list[int]], Failure]:
    found = []
    for constant in (4, tl.constexpr(4)):
        out = torch.zeros(6, dtype=torch.int32)
        values_kernel[(1,)](out, N=constant)
        found.append(out.tolist())
    return found, failure_of(lambda: value_of_tensor_kernel[(1,)](torch.zeros(1), 4))


@ONE
def test_constants_have_values_as_where_kernels_are_compiled(ranks: Ranks) -> None:
    (((of_number, of_constexpr), failure),) = ranks.run(values)
    assert of_number == of_constexpr == [8, 7, 7, 7, 13, 7]
    assert "has no attribute 'value'" in failure.message


@triton.jit
def chain_kernel(flags, values, handle, LAST: tl.constexpr):
    """Program i waits for program i + 1, so the programs finish in reverse order."""
    program = tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)
    if program < LAST:
        iris.wait(flags + program + 1, 1, 0, handle)
        tl.store(values + program, tl.load(values + program + 1) + 1)
    else:
        tl.store(values + program, 1)
    iris.signal(flags + program, 1, 0, handle)


@triton.jit
def look(word, handle, KIND: tl.constexpr):
    if KIND == "plain":
        value = tl.load(word)
    elif KIND == "ca":
        value = tl.load(word, cache_modifier=".ca")
    elif KIND == "volatile":
        value = tl.load(word, volatile=True)
    elif KIND == "cv":
        value = tl.load(word, cache_modifier=".cv")
    elif KIND == "cv, masked":
        value = tl.max(tl.load(word + tl.arange(0, 2), mask=tl.arange(0, 2) == 0, other=0, cache_modifier=".cv"))
    elif KIND == "add":
        value = tl.atomic_add(word, 0)
    elif KIND == "two places":
        value = tl.load(word, volatile=True) | tl.load(word + 1, volatile=True)
    elif KIND == "peer":
        value = iris.peer.load(handle, word, 0, volatile=True)
    elif KIND == "peer's cas":
        value = iris.peer.atomic_cas(handle, word, 7, 7, 0)
    else:
        tl.static_assert(KIND == "cas")
        value = tl.atomic_cas(word, 7, 7)
    return value


@triton.jit
def poll_kernel(word, seen, steps, handle, KIND: tl.constexpr):
    """Program 0 polls for a value that program 1, if there is one, stores after ``steps`` steps."""
    if tl.program_id(0) == 0:
        value = look(word, handle, KIND)
        while value == 0:
            value = look(word, handle, KIND)
        tl.store(seen, value)
    else:
        for _ in range(steps):
            tl.atomic_add(seen, 1)
        tl.store(word, 7)


@triton.jit
def ids_kernel(turns, out, handle, WIDTH: tl.constexpr, HEIGHT: tl.constexpr):
    """Each program writes its ids after the simulator has switched to others several times."""
    for _ in range(3):
        tl.atomic_add(turns, 1)
    index = tl.program_id(0) + WIDTH * (tl.program_id(1) + HEIGHT * tl.program_id(2))
    tl.store(out + index, index + 100 * tl.num_programs(0))


@triton.jit
def ping_pong_kernel(flags, handle, ROUNDS: tl.constexpr):
    """Programs 0 and 1 of this rank, and the same two of the peer, take turns."""
    me, program = iris.rank(handle), tl.program_id(0)
    peer = 1 - me
    for turn in range(ROUNDS):
        if (turn + me) % 2 == 0:
            iris.signal(flags + program, turn + 1, peer, handle)
        else:
            iris.wait(flags + program, turn + 1, peer, handle)


def run_chain() -> list[int]:
    ctx = context()
    flags, values = ctx.zeros(12, dtype=torch.int32), ctx.zeros(12, dtype=torch.int32)
    chain_kernel[(4, 3)](flags, values, ctx.handle, 11)
    ctx.synchronize()
    result: list[int] = values.tolist()
    return result


def run_poll(kind: str, programs: int, steps: int, limit_s: float) -> tuple[Failure, int]:
    from iris.backends import interpreter

    ctx = context()
    word, seen = ctx.zeros(2, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    with mock.patch.object(interpreter, "limits_s", {ctx._backend: limit_s}):
        failure = failure_of(lambda: poll_kernel[(programs,)](word, seen, steps, ctx.handle, KIND=kind))
    if kind != "plain" and failure.kind == "WaitTimeout":
        assert f"polls address {word.data_ptr():#x} " in failure.message or kind == "two places"
    return failure, int(seen.item())


def run_ids() -> tuple[list[int], int]:
    ctx = context()
    turns, out = ctx.zeros(1, dtype=torch.int32), ctx.zeros(24, dtype=torch.int32)
    ids_kernel[(2, 3, 4)](turns, out, ctx.handle, 2, 3)
    return out.tolist(), int(turns.item())


def run_ping_pong(rounds: int) -> None:
    ctx = context()
    flags = ctx.zeros(2, dtype=torch.int32)
    ctx.barrier()
    ping_pong_kernel[(2,)](flags, ctx.handle, rounds)
    ctx.barrier()


def limits_counted() -> tuple[int, int, int]:
    from iris.backends import interpreter

    before = len(interpreter.limits_s)
    with fresh() as closed:
        meanwhile = len(interpreter.limits_s)
    after = len(interpreter.limits_s)
    del closed  # it was referenced until now
    return before, meanwhile, after


@ONE
def test_a_context_limits_polls_until_it_is_closed(ranks: Ranks) -> None:
    [(before, meanwhile, after)] = ranks.run(limits_counted)
    assert (meanwhile, after) == (before + 1, before)


@ONE
def test_a_consumer_may_precede_its_producer(ranks: Ranks) -> None:
    assert ranks.run(run_chain)[0] == list(range(12, 0, -1))


@ONE
@pytest.mark.parametrize("kind", KINDS_OF_POLL)
def test_a_poll_lets_the_others_run(ranks: Ranks, kind: str) -> None:
    ((failure, seen),) = ranks.run(run_poll, kind, 2, 0, 60.0)
    assert (failure.kind, seen) == ("nothing", 7)


@ONE
@pytest.mark.parametrize("kind", KINDS_OF_POLL)
def test_a_poll_for_what_never_comes_ends(ranks: Ranks, kind: str) -> None:
    ((failure, seen),) = ranks.run(run_poll, kind, 1, 0, 0.2)
    assert (failure.kind, seen) == ("WaitTimeout", 0)
    assert "program (0, 0, 0) polls address 0x" in failure.message
    assert "larger first_timeout_s" in failure.message
    assert 0.2 < failure.took_s < 20  # immediately on an idle machine; otherwise never


@ONE
def test_a_poll_goes_on_while_another_program_does(ranks: Ranks) -> None:
    ((failure, seen),) = ranks.run(run_poll, "cv", 2, 2000, 0.1)
    assert (failure.kind, seen) == ("nothing", 7) and failure.took_s > 0.2


@ONE
def test_a_program_knows_who_it_is_after_a_switch(ranks: Ranks) -> None:
    assert ranks.run(run_ids) == [([200 + index for index in range(24)], 3 * 24)]


@TWO
def test_programs_of_two_ranks_take_turns(ranks: Ranks) -> None:
    ranks.run(run_ping_pong, 50)


@triton.jit
def wait_kernel(flag, epoch, peer, handle):
    iris.wait(flag, epoch, peer, handle)


@triton.jit
def wait_all_kernel(flags, epoch, came, handle, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    here = iris.wait_all(flags + lanes, lanes * 0 + epoch, lanes, lanes < iris.world_size(handle), handle)
    tl.store(came, here.to(tl.int32))


@triton.jit
def wait_leading_kernel(flags, epoch, peer, handle, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    sync.wait_leading(flags + lanes, lanes * 0 + epoch, lanes + peer, lanes == 0, handle)


@triton.jit
def take_words_kernel(words, epoch, handle, RANKS: tl.constexpr):
    ranks = tl.arange(0, RANKS)
    block = ranks[:, None, None] * 128 + tl.arange(0, 8)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    here = (ranks < iris.world_size(handle))[:, None, None]
    take_words(words + block, tl.cast(epoch, tl.int32), ranks, here, handle)


def run_hopeless_wait(missing: int, timeout_s: float, kind: str) -> tuple[Failure, Failure, int]:
    """All ranks except ``missing``, which is busy with something else, wait for it."""
    with contextlib.suppress(iris.WaitTimeout), fresh(timeout_s=timeout_s) as ctx:
        flags = ctx.zeros(16, dtype=torch.int32)
        flags[: ctx.world_size] = 4
        flags[missing] = 2
        came = torch.zeros(1, dtype=torch.int32, device=ctx.device)
        words = ctx.zeros((4, 128), dtype=torch.int64)
        words[missing] = NO_WORD.value
        waited_for = words if kind == "take_words" else flags
        offset = waited_for.data_ptr() - int(ctx.heap_bases[ctx.rank])
        ctx.device_barrier()
        ctx.barrier()

        def work() -> None:
            if ctx.rank == missing:
                pass
            elif kind.startswith("wait by"):
                wait_kernel[(int(kind.split()[-1]),)](flags[missing:], 4, missing, ctx.handle)
            elif kind == "wait_all":
                wait_all_kernel[(1,)](flags, 4, came, ctx.handle, 16)
            elif kind == "wait_leading":
                wait_leading_kernel[(1,)](flags[missing:], 4, missing, ctx.handle, 8)
            elif kind == "take_words":
                take_words_kernel[(1,)](words, 4, ctx.handle, 4)
            else:
                ctx.device_barrier()
            ctx.barrier()

        if ctx.rank == missing:
            time.sleep(timeout_s + 1.5)  # on a busy machine the others may start late
        first = failure_of(work)
        again = failure_of(ctx.barrier)
        assert came.item() == 0
        ctx.synchronize()
        pytest.fail("synchronize went on after a failure")
    return first, again, offset


@pytest.mark.parametrize("kind", ["wait by 1", "wait by 4", "wait_all", "wait_leading", "take_words", "device_barrier"])
@pytest.mark.parametrize("ranks", worlds(2, 2) if BACKEND != "sim" else worlds(3, 3), indirect=True)
def test_a_wait_for_what_never_comes_ends_on_every_rank_and_names_everything(ranks: Ranks, kind: str) -> None:
    timeout_s = 0.7
    outcomes = ranks.run(run_hopeless_wait, 1, timeout_s, kind)
    for failure, again, _ in outcomes:
        assert failure.kind == "WaitTimeout" and "TimeoutError" in failure.bases, failure
        assert failure.took_s < timeout_s + 1
        assert again.kind == "WaitTimeout" and again.message == failure.message and again.took_s < 0.1
        assert failure.ranks == (1,) and "Did rank 1 make the same call?" in failure.message
        assert "needs a larger timeout_s" in failure.message
    if kind == "device_barrier":
        site, flag = "device_barrier", r"flag at heap offset \d+ should reach 2, holds 1"
    else:
        at, one = outcomes[0][2], 256 if kind == "take_words" else 1
        part = f"byte {4 * one}" if kind == "take_words" else rf"flag\[{one}\]"
        place = rf"heap offset {at + 4 * one} \({part} of the tensor at {at}\)"
        words = f"data at {place} of call 4 has not come"
        site, flag = "a user kernel", words if kind == "take_words" else f"flag at {place} should reach 4, holds 2"
    waiters = "0" if ranks.world_size == 2 else "(0|2)"
    # If two ranks wait, the first to give up tells the other one, which may then have no record of its own.
    firsthand = rf"{site}: rank {waiters} waited (0\.[7-9]|1\.\d) s for rank 1: {flag}"
    assert any(re.match(firsthand, failure.message) for failure, _, _ in outcomes), outcomes


def causes() -> list[str]:
    """The errors of this rank, whose wait for rank 1 expired or was cut short, after rank 2 has left with an error."""
    found = []
    with fresh() as ctx:
        for code in (control.CODE_EXPIRED, control.CODE_RELAYED):
            for said in (iris.WaitTimeout("said of 1", [1]), iris.WaitTimeout("said of 2", [2]), iris.PeerDied("dead")):
                words = [code.value, 0, 0, 1, 0, 4, 2, 10**9] + [0] * 8
                mesh = SimpleNamespace(
                    rank=ctx.rank,
                    world_size=ctx.world_size,
                    dead_ranks=lambda: {2},
                    death=lambda rank, tag, said=said: said,
                )
                with mock.patch.multiple(ctx._failure, _status=words, _mesh=mesh):
                    found.append(str(ctx._failure.described()))
    return found


@ONE
def test_what_a_rank_has_seen_itself_counts_more_than_the_same_from_another(ranks: Ranks) -> None:
    """It is also added to reports about other ranks."""
    ((same, other, dead, *relayed),) = ranks.run(causes)
    assert same.startswith("a user kernel: rank 0 waited 1.0 s for rank 1: ")
    assert other == f"said of 2 On this rank: {same}" and dead == f"dead On this rank: {same}"
    assert relayed == ["said of 1", "said of 2", "dead"]


@triton.jit
def turns_kernel(words, N: tl.constexpr):
    """Every program adds up how often the simulator has switched away from each program."""
    for _ in range(N):
        tl.atomic_add(words, tl.sum(tl.full((4,), 1, tl.int32)))


def run_in_threads() -> tuple[list[int], list[str]]:
    """Three threads launch kernels at once: the first also one that fails, the second also from within a launch."""
    context()
    words = torch.zeros(3, dtype=torch.int32)
    kinds = []

    def launch(index: int) -> None:
        def grid(_: object) -> tuple[int]:
            if index == 1:
                turns_kernel[(1,)](words[1:], N=2)
            return (4,)

        for _ in range(10):
            kinds.append(failure_of(lambda: turns_kernel[grid](words[index:], N=3)).kind)
            if index == 0:
                kinds.append(failure_of(lambda: failing_kernel[(3,)](words[0:])).kind)

    threads = [threading.Thread(target=launch, args=(index,), daemon=True) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    turns_kernel[(1,)](words[2:], N=1)
    return words.tolist(), sorted(kinds)


@ONE
def test_kernels_of_two_threads_take_turns(ranks: Ranks) -> None:
    ((words, kinds),) = ranks.run(run_in_threads)
    assert kinds == ["InterpreterError"] * 10 + ["nothing"] * 30
    assert words[1:] == [10 * (48 + 8), 10 * 48 + 4]


@triton.jit
def dot_kernel(a, b, c, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    product = tl.dot(tl.load(a + rows * N + columns), tl.load(b + rows * N + columns))
    tl.store(c + rows * N + columns, product)


@triton.jit
def arithmetic_kernel(a, b, out, OP: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x, y = tl.load(a + offsets), tl.load(b + offsets)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    elif OP == "neg":
        z = -x
    elif OP == "abs":
        z = tl.abs(x)
    elif OP == "maximum":
        z = tl.maximum(x, y)
    elif OP == "minimum":
        z = tl.minimum(x, y)
    elif OP == "where":
        z = tl.where(x > y, x, y)
    elif OP == "scale":
        z = x * 0.5 + 1.0
    else:
        tl.static_assert(OP == "sum")
        z = x * 0 + tl.sum(x.to(tl.float32)).to(tl.bfloat16)
    tl.store(out + offsets, z)


@triton.jit
def cast_kernel(source, target, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(target + offsets, tl.load(source + offsets).to(target.dtype.element_ty))


@triton.jit
def compare_kernel(a, b, out, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x, y = tl.load(a + offsets), tl.load(b + offsets)
    bits = (x < y).to(tl.int32) + 2 * (x == y).to(tl.int32) + 4 * (x >= y).to(tl.int32) + 8 * (x != y).to(tl.int32)
    tl.store(out + offsets, bits)


@triton.jit
def add_kernel(memory, values, returned, N: tl.constexpr):
    offsets = tl.arange(0, N)
    old = tl.atomic_add(memory + offsets, tl.load(values + offsets), mask=offsets < N - 1)
    tl.store(returned + offsets, old, mask=offsets < N - 1)


REFERENCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda x, y: torch.where(x > y, x, y),
    "scale": lambda x, y: x * 0.5 + 1.0,
}


def draws(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two bfloat16 vectors over a wide range of magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, count, generator=generator)
    scale = torch.randint(-10, 10, (2, count), generator=generator).float().exp2()
    return (x * scale[0]).bfloat16(), (y * scale[1]).bfloat16()


def equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close(got, expected)


def run_arithmetic(seed: int) -> None:
    context()
    x, y = draws(seed, 1024)
    for op, reference in REFERENCE.items():
        out = torch.empty_like(x)
        arithmetic_kernel[(1,)](x, y, out, op, 1024)
        equal(out, reference(x, y))
    small, out = torch.arange(16).bfloat16(), torch.empty(16, dtype=torch.bfloat16)
    arithmetic_kernel[(1,)](small, small, out, "sum", 16)
    equal(out, torch.full((16,), 120.0).bfloat16())
    pairs, bits = (torch.cat([x, x]), torch.cat([y, x])), torch.empty(2048, dtype=torch.int32)
    compare_kernel[(1,)](*pairs, bits, 2048)
    a, b = pairs
    equal(bits, (a < b).int() + 2 * (a == b).int() + 4 * (a >= b).int() + 8 * (a != b).int())


def run_casts(seed: int) -> None:
    context()
    special = torch.tensor([0.0, -0.0, 1.00390625, 1.01171875, 3.3895e38, -3.4028235e38, float("inf"), float("-inf")])
    special = torch.cat(
        [special, torch.tensor([float("nan"), 1e-40, 9.2e-41, 65504.0, 65520.0, 1.9960938, 255.5, -7.5])]
    )
    values = torch.cat([torch.randn(496, generator=torch.Generator().manual_seed(seed)) * 100, special])
    for dtype in (torch.float32, torch.float64, torch.float16):
        source, target = values.to(dtype), torch.empty(512, dtype=torch.bfloat16)
        cast_kernel[(1,)](source, target, 512)
        equal(target, source.bfloat16())
    for dtype in (torch.float32, torch.float64, torch.float16):
        source, target = values.bfloat16(), torch.empty(512, dtype=dtype)
        cast_kernel[(1,)](source, target, 512)
        equal(target, source.to(dtype))
    for dtype in (torch.int8, torch.int32, torch.int64, torch.uint8):
        whole = torch.randint(0, 127, (512,), generator=torch.Generator().manual_seed(seed))
        target, back = torch.empty(512, dtype=torch.bfloat16), torch.empty(512, dtype=dtype)
        cast_kernel[(1,)](whole.to(dtype), target, 512)
        equal(target, whole.bfloat16())
        cast_kernel[(1,)](whole.bfloat16(), back, 512)
        equal(back, whole.to(dtype))


def run_every_pattern() -> None:
    """All 65536 bfloat16 patterns survive a trip through float32 and back; odd mantissas round to even."""
    context()
    count = 1 << 16
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    wide, back = torch.empty(count), torch.empty(count, dtype=torch.bfloat16)
    cast_kernel[(1,)](patterns, wide, count)
    equal(wide, patterns.float())
    cast_kernel[(1,)](wide, back, count)
    number = ~patterns.isnan()
    equal(back[number].view(torch.int16), patterns[number].view(torch.int16))
    assert back[~number].isnan().all()
    for step in (0x7FFF, 0x8000, 0x8001):
        between = (patterns[number].float().view(torch.int32) + step).view(torch.float32).contiguous()
        between = torch.cat([between, torch.zeros(count - between.numel())])
        cast_kernel[(1,)](between, back, count)
        equal(back, between.bfloat16())


def run_dots(seed: int) -> None:
    context()
    generator = torch.Generator().manual_seed(seed)
    for dtype, out in itertools.product((torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)):
        a, b = (torch.randint(-9, 9, (32, 32), generator=generator).to(dtype) for _ in range(2))
        c = torch.empty(32, 32, dtype=out)
        dot_kernel[(1,)](a, b, c, 32)
        equal(c, (a.double() @ b.double()).to(out))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        a, b = (torch.randn(64, 64, generator=generator).to(dtype) for _ in range(2))
        c = torch.empty(64, 64)
        dot_kernel[(1,)](a, b, c, 64)
        assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def run_atomic_add(seed: int) -> None:
    """The start is odd and even, so that both halves of a 32-bit word are changed; neighbours stay unchanged."""
    context()
    x, y = draws(seed, 34)
    for start in (0, 1):
        memory, returned = x.clone(), torch.zeros(32, dtype=torch.bfloat16)
        add_kernel[(1,)](memory[start:], y, returned, 32)
        expected = x.clone()
        expected[start : start + 31] += y[:31]
        equal(memory, expected)
        equal(returned[:31], x[start : start + 31])


@ONE
def test_bfloat16_arithmetic_is_that_of_torch(ranks: Ranks, seed: int) -> None:
    ranks.run(run_arithmetic, seed)


@ONE
def test_bfloat16_casts_are_those_of_torch(ranks: Ranks, seed: int) -> None:
    ranks.run(run_casts, seed)


@ONE
def test_every_bfloat16_pattern(ranks: Ranks) -> None:
    ranks.run(run_every_pattern)


@ONE
def test_dot(ranks: Ranks, seed: int) -> None:
    ranks.run(run_dots, seed)


@ONE
def test_bfloat16_atomic_add_is_that_of_torch(ranks: Ranks, seed: int) -> None:
    ranks.run(run_atomic_add, seed)


@triton.jit
def failing_kernel(out):
    tl.store(out, 1)
    tl.store(out + tl.arange(0, 3), 1)


def run_failing_kernel() -> tuple[Failure, int]:
    ctx = context()
    out = ctx.zeros(1, dtype=torch.int32)
    failure = failure_of(lambda: failing_kernel[(3,)](out))
    return failure, int(run_chain()[0])


@ONE
def test_an_error_in_a_kernel_is_raised_and_the_next_launch_works(ranks: Ranks) -> None:
    ((failure, after),) = ranks.run(run_failing_kernel)
    assert failure.kind == "InterpreterError" and "power of 2" in failure.message
    assert after == 12


@triton.jit
def reaching_kernel(out, address, KIND: tl.constexpr, MASKED: tl.constexpr):
    """Program 1 accesses ``address``, after two valid words."""
    at = tl.arange(0, 4)
    reached = tl.where(at < 2, out.to(tl.int64) + 4 * at, address).to(tl.pointer_type(tl.int32))
    mask = (at < 2) if MASKED else (at < 4)
    if tl.program_id(0) == 1:
        if KIND == "load":
            tl.store(out + at, tl.load(reached, mask=mask, other=5), mask=at < 2)
        elif KIND == "store":
            tl.store(reached, at, mask=mask)
        elif KIND == "atomic_add":
            tl.atomic_add(reached, 1, mask=mask)
        else:
            tl.atomic_cas(tl.cast(address, tl.int64).to(tl.pointer_type(tl.int32)), 0, 1)


@triton.jit
def from_a_rank_kernel(out, handle, RANK: tl.constexpr):
    tl.store(out, iris.load(out, 0, RANK, handle.bases))


KINDS = {
    "load": "loads from",
    "store": "stores to",
    "atomic_add": "does an atomic at",
    "atomic_cas": "does an atomic at",
}


def reach(address: int, kind: str, masked: bool) -> tuple[Failure, list[int]]:
    ctx = context()
    out = ctx.zeros(4, dtype=torch.int32)
    failure = failure_of(lambda: reaching_kernel[(2,)](out, address, KIND=kind, MASKED=masked))
    return failure, out.tolist()


def reach_for_code(kind: str) -> Failure:
    """Access an address that can be read, but not written: code of the Python interpreter itself."""
    with open("/proc/self/maps") as file:
        line = next(line for line in file if " r-xp " in line)
    return reach(int(line.split("-")[0], 16), kind, False)[0]


@ONE
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("address", [0, 64, 1 << 62, -8])
def test_an_address_without_memory_is_an_error(ranks: Ranks, kind: str, address: int) -> None:
    ((failure, _),) = ranks.run(reach, address, kind, False)
    assert failure.kind == "AddressError"
    assert f"program (1, 0, 0) {KINDS[kind]} address {address % (1 << 64):#x}" in failure.message
    assert "illegal memory access" in failure.message


@ONE
@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_read_is_not_therefore_written(ranks: Ranks, kind: str) -> None:
    (failure,) = ranks.run(reach_for_code, kind)
    assert failure.kind == ("nothing" if kind == "load" else "AddressError")


@ONE
@pytest.mark.parametrize("kind", ["load", "store", "atomic_add"])
def test_addresses_behind_a_mask_do_not_count(ranks: Ranks, kind: str) -> None:
    ((failure, out),) = ranks.run(reach, 64, kind, True)
    assert failure.kind == "nothing"
    assert out == {"load": [0, 0, 0, 0], "store": [0, 1, 0, 0], "atomic_add": [1, 1, 0, 0]}[kind]


def memory_of_later() -> list[float]:
    """Values of tensors that are made after the memory map was read, with sizes that the system maps one by one."""
    ctx, found = context(), []
    for size in (4, 1 << 16, 1 << 22):
        out = torch.full((size,), 3.0)
        failing = failure_of(lambda out=out: last_kernel[(1,)](out, out.numel()))
        assert failing.kind == "nothing", failing
        found.append(float(out[-1]))
    ctx.synchronize()
    return found


@triton.jit
def last_kernel(out, size):
    tl.store(out + size - 1, tl.load(out) + 1)


@ONE
def test_memory_that_is_made_later_is_found(ranks: Ranks) -> None:
    assert ranks.run(memory_of_later) == [[4.0, 4.0, 4.0]]


def load_from_no_rank(rank: int) -> Failure:
    with fresh(1 << 16) as ctx:
        out = ctx.zeros(1)
        return failure_of(lambda: from_a_rank_kernel[(1,)](out, ctx.handle, RANK=rank))


@TWO
@pytest.mark.parametrize("rank", [2, 1000, -1])
def test_a_rank_out_of_range_is_an_error(ranks: Ranks, rank: int) -> None:
    for failure in ranks.run(load_from_no_rank, rank):
        assert failure.kind == "AddressError" and "a rank out of range" in failure.message


@triton.jit
def swap_kernel(words, cmp, value, N: tl.constexpr):
    tl.atomic_cas(words + tl.arange(0, N), cmp, value)


@ONE
@pytest.mark.parametrize(
    ("dtype", "kind", "words"),
    [
        (torch.int64, "DTypeError", "tl.atomic_cas: cmp: expected int64, got int32. tl.cast it"),
        (torch.int32, "ShapeError", "tl.atomic_cas: cmp: expected (4,), got (1,). tl.broadcast_to it"),
    ],
)
def test_a_compare_and_swap_that_no_compiler_takes_is_refused(
    ranks: Ranks, dtype: torch.dtype, kind: str, words: str
) -> None:
    (failure,) = ranks.run(swap, dtype)
    assert failure.kind == kind and words in failure.message


def swap(dtype: torch.dtype) -> Failure:
    return failure_of(lambda: swap_kernel[(1,)](torch.zeros(4, dtype=dtype), 0, 1, 4))


@triton.jit
def one_number_kernel(row, rows, n):
    """Store one number into a row, and into each of two rows."""
    offsets = tl.arange(0, 8)
    tl.atomic_xchg(row + offsets, n, mask=n > 0)
    tl.store(row + 8 + offsets, n + 1, mask=n > 0)
    tl.atomic_cas(row + 16 + offsets, tl.full((8,), 0, tl.int32), tl.full((8,), 9, tl.int32))
    column = tl.broadcast_to(tl.arange(0, 2)[:, None], (2, 8))
    tl.atomic_add(rows + 8 * column + offsets[None, :], column)


def test_one_number_goes_to_all_of_a_block() -> None:
    row, rows = torch.zeros(24, dtype=torch.int32), torch.zeros(2, 8, dtype=torch.int32)
    one_number_kernel[(1,)](row, rows, 7)
    assert row.tolist() == [7] * 8 + [8] * 8 + [9] * 8
    assert rows.tolist() == [[0] * 8, [1] * 8]


def test_what_is_remembered_of_types_is_what_triton_works_out() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, triton_types.__file__], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert vars(tl.tensor)["__init__"].__module__ == "iris.backends.memos"
    told = [line for _ in range(2) for line in (*triton_types.types(), *triton_types.operands())]
    assert told == done.stdout.splitlines()


@pytest.mark.parametrize("name", memos.OPERATORS)
def test_an_operator_that_is_remembered_yields_what_triton_makes_of_it(name: str) -> None:
    """For operands of all types and shapes, and beside constants: types, values and errors."""
    semantic = TritonSemantic(upstream.interpreter_builder)

    def original(left: tl.tensor, right: object) -> tl.tensor:
        return getattr(tl.tensor, name)(left, right, _semantic=semantic)

    def told(operate: Callable[..., tl.tensor], left: tl.tensor, right: object) -> str:
        with np.errstate(all="ignore"):
            one = operate(left, right)
        return (
            f"{one.type} {one.handle.dtype} {one.handle.data.dtype} {one.handle.data.shape} {one.handle.data.tolist()}"
        )

    kinds = (*triton_types.NUMBERS, triton_types.POINTERS[0])
    lefts = [triton_types.block(kind, shape) for kind in kinds for shape in triton_types.OPERANDS]
    with mock.patch.dict(memos._results, clear=True):
        operate = memos.at_once(name, original)
        for left in lefts:
            left.handle.data = (left.handle.data * 3 + 125).astype(left.handle.data.dtype)
            near = [right for right in lefts if right.dtype == left.dtype or right.dtype.name in ("int32", "int64")]
            for right in (*near, *triton_types.VALUES):
                expected = triton_types.said(told, original, left, right)
                assert [triton_types.said(told, operate, left, right) for _ in range(2)] == [expected] * 2
        assert memos._results


SCRIPT = """
import {first}
import {second}
import torch, triton, triton.language as tl

@triton.jit
def kernel(x, out, handle, N: tl.constexpr):
    offsets = tl.arange(0, N)
    values = tl.load(x + offsets).to(tl.float32)
    total = tl.sum(values) + tl.max(values, 0) + tl.cdiv(N, 3) + tl.zeros((1,), tl.float32).sum()
    tl.store(out, total + iris.rank(handle))

with iris.iris(1 << 20) as ctx:
    x, out = ctx.arange(8), ctx.zeros(1)
    kernel[(1,)](x, out, ctx.handle, 8)
    print(out.item())
"""


@pytest.mark.parametrize(("first", "second"), [("iris", "triton"), ("triton", "iris"), ("triton.language", "iris")])
def test_triton_may_be_imported_before_iris(first: str, second: str, tmp_path: os.PathLike[str]) -> None:
    script = os.path.join(tmp_path, "script.py")
    with open(script, "w") as file:
        file.write(SCRIPT.format(first=first, second=second))
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([python(), script], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("38.0\n", "")


EARLY = """
import torch, triton, triton.language as tl

@triton.jit
def early(x):
    tl.store(x, tl.load(x) + 1)

import iris

@triton.jit
def late(x):
    early(x)

for kernel in (early, late):
    try:
        kernel[(1,)](torch.zeros(1))
    except iris.BackendError as error:
        print(error)
try:
    early(torch.zeros(1))
except RuntimeError as error:
    print(error)

from triton.experimental import gluon

@gluon.jit
def other(x):
    pass

try:
    other[(1,)](torch.zeros(1))
except iris.BackendError as error:
    print(error)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it is compiled, and runs")
def test_a_kernel_decorated_before_iris_was_imported_is_said_to_be(tmp_path: os.PathLike[str]) -> None:
    script = os.path.join(tmp_path, "script.py")
    with open(script, "w") as file:
        file.write(EARLY)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([python(), script], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    of_kernel, of_device_function, outside, of_another_language = done.stdout.splitlines()
    assert of_kernel == of_device_function
    assert of_kernel.startswith("early was decorated with @triton.jit before iris was imported")
    assert "Import iris before" in of_kernel and "outside of the scope of a kernel" in outside
    assert of_another_language == "other is a GluonJITFunction, which cannot be simulated: use @triton.jit."
