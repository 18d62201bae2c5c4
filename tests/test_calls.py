"""The effects of a call on the next one, and on peers: counts that wrap, ranks that disagree, memory of peers that have
not come yet, chunks and rows that do not divide evenly."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import pydoc
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from ops_inputs import ALL_REDUCE, GATHER, LOCAL, REDUCE_SCATTER, SCATTER, SMALL, Way, Wrapper, dual, some, trial, ways
from ranks import BACKEND, TIMEOUT_S, Failure, Ranks, context, failure_of, fresh, worlds
from torch.autograd import forward_ad

import iris
from iris.device import bounds, control, sync
from iris.device.arch import clock_ns
from iris.device.turnstile import _LEFT_COUNT
from iris.ops import ALGORITHMS, BoundOps, FusedConfig, new_workspace
from iris.ops.algorithms import LIBRARY
from iris.ops.choice import _settled
from iris.ops.replay import Replays, _identity, _rounding, _switched_on
from iris.ops.room import GATHER_FLAGS
from iris.ops.workspace import FusedWorkspace

SOME_WAYS = ways() if BACKEND != "sim" else list({way.algorithm: way for way in ways()}.values())
LATE_S = 0.5


def ragged_chunks(seed: int) -> list[float]:
    """Owners' rows are cut into chunks, the last of which is shorter."""
    ctx, found = context(), []
    for rows, group, chunks in ((48, 2, 2), (80, 2, 3)):
        one = trial(ctx, Way(ALL_REDUCE, "copy_engine"), (rows * ctx.world_size, 16, 32), torch.float16, seed)
        one.run(replace(SMALL, group_size_m=group, num_chunks=chunks))
        found.append(one.excess())
    return found


@pytest.mark.parametrize("ranks", worlds(3, 8) if BACKEND != "sim" else worlds(3, 3), indirect=True)
def test_chunks_that_do_not_come_out_even(ranks: Ranks, seed: int) -> None:
    for excesses in ranks.run(ragged_chunks, seed):
        assert max(excesses) <= 1


def early_writes(rows: int, seed: int) -> tuple[bool, float]:
    """Whether rank 1's output stays unchanged until rank 1 calls the op, and its error after that."""
    ctx = context()
    one = trial(ctx, Way(ALL_REDUCE, "ring"), (rows, 24, 32), torch.float32, seed)
    one.run()
    one.excess()
    one.spoil()
    ctx.barrier()
    untouched = True
    if ctx.rank == 1:
        time.sleep(0.3)
        untouched = bool(one.output.isnan().all())
    one.run()
    return untouched, one.excess()


@pytest.mark.parametrize("ranks", worlds(4, 4), indirect=True)
@pytest.mark.parametrize("rows", [3, 5, 8])
def test_a_ring_writes_to_ranks_that_have_come(ranks: Ranks, rows: int, seed: int) -> None:
    """With few rows, some ranks own none, and a sum begins at a later rank."""
    for untouched, excess in ranks.run(early_writes, rows, seed):
        assert untouched and excess <= 1


def first_of_int8(rows: int, seed: int) -> float:
    with fresh(1 << 21) as ctx:
        one = trial(ctx, Way(ALL_REDUCE, "ring"), (rows, 24, 32), torch.int8, seed)
        one.run()
        return one.excess()


@pytest.mark.parametrize("ranks", worlds(4, 4), indirect=True)
def test_the_first_call_needs_no_rank_that_waits(ranks: Ranks, seed: int) -> None:
    assert ranks.run(first_of_int8, 5, seed) == [0.0] * 4


def all_workspaces(ctx: Any) -> Iterator[FusedWorkspace]:
    for one in (*ctx._workspaces.values(), *ctx._kept.values()):
        if isinstance(one, FusedWorkspace):
            yield one
            yield one.alone


def advance(workspaces: Iterable[FusedWorkspace], calls: int) -> None:
    """Put workspaces in the state that they would have after ``calls`` more calls: all epochs are advanced, and wrap.
    Flags that were never set are still 0."""

    def on(words: torch.Tensor) -> None:
        later = (words.long() + calls + (1 << 31)) % (1 << 32) - (1 << 31)
        words.copy_(torch.where(words == 0, 0, later).int())

    for one in workspaces:
        for turnstile in (one.turnstile, one.second_turnstile):
            left = turnstile[_LEFT_COUNT.value :][:1]  # a matmul of one rank has none
            before = left.clone()
            on(turnstile)
            left.copy_(before)
        if one.algorithm != "atomic":
            on(one.ready)
        for key, memory in one.local.items():
            if isinstance(key, tuple) and key[0] in ("split", "epochs"):
                on(memory)


def wrapping(way: Way, seed: int) -> list[float]:
    """Errors of calls around the largest epoch, and around the one that would be 0."""
    excesses = []
    with fresh(1 << 22) as ctx:
        one = trial(ctx, way, (17, 33, 24), torch.float16, seed)
        config = replace(SMALL, stream_k=way.algorithm not in LIBRARY, num_chunks=2)
        one.run(config)
        excesses.append(one.excess())
        for calls, more in (((1 << 31) - 3, 3), ((1 << 31) - 4, 4)):
            ctx.barrier()
            advance(all_workspaces(ctx), calls)
            ctx.barrier()
            for _ in range(more):
                one.spoil()
                ctx.barrier()
                one.run(config)
                excesses.append(one.excess())
    return excesses


def first_large_call(way: Way, seed: int) -> list[float]:
    """Errors of a small call, of one almost 2³² calls later, and of a larger one after that, in the same workspace:
    many of the flags that the last one waits for were never set. The last rank comes late."""
    with fresh(1 << 22) as ctx:
        workspace = new_workspace(ctx, way.op, way.algorithm, 1 << 18, 1 << 16)
        small = trial(ctx, way, (16, 16, 32), torch.float32, seed)
        large = trial(ctx, way, (33, 40, 48), torch.float32, seed)
        excesses = []
        for one, calls in ((small, (1 << 32) - 20), (small, 0), (large, 0)):
            one.spoil()
            ctx.barrier()
            if one is large and ctx.rank == ctx.world_size - 1:
                time.sleep(LATE_S)
            one.run(SMALL, workspace=workspace)
            excesses.append(one.excess())
            ctx.barrier()
            advance([workspace, workspace.alone], calls)
            ctx.barrier()
        return excesses


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("calls", [wrapping, first_large_call])
@pytest.mark.parametrize("way", some(SOME_WAYS, 3), ids=str)
def test_counts_of_calls_wrap(ranks: Ranks, way: Way, calls: Callable[[Way, int], list[float]], seed: int) -> None:
    for excesses in ranks.run(calls, way, seed):
        assert max(excesses) <= 1, excesses


@triton.jit
def wait_kernel(handle, flag, value, SITE: tl.constexpr):
    sync.wait(flag, value, 0, handle, SITE)


def wait_and_look(ctx: iris.Iris, flags: torch.Tensor, value: int, site: int) -> None:
    wait_kernel[(1,)](ctx.handle, flags, value, SITE=site)
    ctx.synchronize()


def flag_of_long_ago() -> tuple[Failure, Failure]:
    """Waits of an op and of a user for epoch 5 - 2³¹ on a flag that was never set."""
    found = []
    for site in (control.SITE_MATMUL.value, control.SITE_USER.value):
        made = iris.iris(1 << 20, timeout_s=0.4, first_timeout_s=TIMEOUT_S)
        with suppress(iris.PeerDied), made as ctx:  # a peer may have left when this rank does
            flags = ctx.zeros(16, dtype=torch.int32)
            found.append(failure_of(wait_and_look, ctx, flags, 5 - 2**31, site))
            ctx.check = lambda *_: None  # type: ignore[method-assign]
    return found[0], found[1]


@pytest.mark.parametrize("ranks", worlds(1, 2), indirect=True)
def test_an_ops_flag_from_before_the_count_wrapped_is_waited_for(ranks: Ranks) -> None:
    for of_op, of_user in ranks.run(flag_of_long_ago):
        # A rank whose peer gave up first may see it leave.
        assert of_op.kind in ("WaitTimeout", "PeerDied") and of_user.kind == "nothing", (of_op, of_user)


@triton.jit
def outrun_kernel(handle, SITE: tl.constexpr):
    """A wait expires between two looks at the abort word, while another rank, played by program 1, gives up."""
    if tl.program_id(0) == 0:
        bounds.check_bounds(0, 5, 0, 0, 0, clock_ns() - 3600 * 1_000_000_000, handle, SITE)
    else:
        tl.atomic_max(control.abort_word(handle), (1 << 16) | (1 << 8), sem="relaxed", scope="sys")


def outrun() -> Failure:
    with suppress(iris.PeerDied), iris.iris(1 << 20, timeout_s=0.3) as ctx:
        ctx.barrier()
        failure = failure_of(lambda: (outrun_kernel[(2,)](ctx.handle, SITE=control.SITE_USER.value), ctx.synchronize()))
        ctx.check = lambda *_: None  # type: ignore[method-assign]
    return failure


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_wait_that_another_rank_outruns_says_so(ranks: Ranks) -> None:
    for failure in ranks.run(outrun):
        assert failure.kind in ("WaitTimeout", "PeerDied"), failure  # the other one may have left by then


def waits_apart() -> Failure:
    """The failure of a wait that rank 1 begins after rank 0 has given up the same one, and while rank 0 still lives."""
    made = iris.iris(1 << 20, timeout_s=0.3, first_timeout_s=TIMEOUT_S)
    with suppress(iris.PeerDied), made as ctx:
        flags = ctx.zeros(16, dtype=torch.int32)
        ctx.barrier()
        time.sleep(ctx.rank * 3 * LATE_S)
        failure = failure_of(wait_and_look, ctx, flags, 5, control.SITE_USER.value)
        time.sleep((1 - ctx.rank) * 4 * LATE_S)
    return failure


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_wait_that_begins_when_another_rank_has_given_up_says_so(ranks: Ranks) -> None:
    first, late = ranks.run(waits_apart)
    assert first.kind == late.kind == "WaitTimeout", (first, late)
    assert re.search(r"rank 0 waited (0\.[3-9]|1\.\d) s for rank 0", first.message), first
    assert "rank 0 gave up waiting for rank 0" in late.message


def with_gradients(way: Way) -> list[Failure]:
    ctx, found = context(), []
    for name in ("a", "b", "output"):
        one = trial(ctx, way, (16, 16, 32), torch.float32, seed=1)
        getattr(one, name).requires_grad_()
        found.append(failure_of(one.run))
        with torch.no_grad():
            found.append(failure_of(one.run))
    return found


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("way", some([way for way in ways() if way.gather_dim == 0]), ids=str)
def test_gradients_are_not_lost_without_a_word(ranks: Ranks, way: Way) -> None:
    for found in ranks.run(with_gradients, way):
        for refused, run in zip(found[::2], found[1::2], strict=True):
            assert refused.kind == "ArgumentError" and "torch.no_grad()" in refused.message
            assert run.kind == "nothing", run


def returned_uncopied() -> Failure:
    """The failure of an op whose output is a tensor that an autograd Function has returned."""
    one = trial(context(), Way(ALL_REDUCE, "two_shot"), (16, 16, 32), torch.float32, seed=1)

    class Uncopied(torch.autograd.Function):
        @staticmethod
        def forward(call: Any, x: torch.Tensor) -> torch.Tensor:
            return one.run()

    Uncopied.apply(torch.ones(1, requires_grad=True))
    return failure_of(one.run)


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_an_output_that_is_part_of_a_graph_says_how(ranks: Ranks) -> None:
    for refused in ranks.run(returned_uncopied):
        assert refused.kind == "ArgumentError" and refused.message.endswith("Return a copy, output.clone().")


def kept_for_backward(way: Way) -> list[Failure]:
    """A layer keeps the output of a call for its backward pass, and the next call, or its replay, overwrites it."""
    ctx, found = context(), []
    one = trial(ctx, way, (16, 16, 32), torch.float32, seed=1)
    weight = torch.ones(5, one.output.shape[1], device=ctx.device, requires_grad=True)
    for _ in range(3):
        with torch.no_grad():
            one.run()
        loss = torch.nn.functional.linear(one.output, weight).sum()
        with torch.inference_mode():
            one.run()
        found.append(failure_of(loss.backward))
    return found


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("way", [Way(op, next(iter(ALGORITHMS[op]))) for op in ALGORITHMS], ids=str)
def test_a_backward_pass_that_needs_what_was_there_says_so(ranks: Ranks, way: Way) -> None:
    for failures in ranks.run(kept_for_backward, way):
        assert all("modified by an inplace operation" in failure.message for failure in failures), failures


def copies_of_a_module() -> tuple[bool, Failure, Failure]:
    ctx = context()
    layer = torch.nn.Linear(2, 2)
    held: dict[str, Any] = {"ctx": ctx, "workspace": new_workspace(ctx, GATHER, "push", 64)}
    layer.__dict__ |= held
    again = copy.deepcopy(layer)
    assert copy.copy(ctx) is ctx
    same = all(again.__dict__[name] is one for name, one in held.items()) and again.weight is not layer.weight
    return same, failure_of(pickle.dumps, ctx), failure_of(pickle.dumps, layer)


@pytest.mark.parametrize("ranks", worlds(1, 2), indirect=True)
def test_a_module_that_holds_a_context_can_be_copied(ranks: Ranks) -> None:
    for same, of_context, of_module in ranks.run(copies_of_a_module):
        assert same and of_context.kind == of_module.kind == "ContextError"
        assert "Iris cannot be pickled" in of_context.message and "state_dict()" in of_module.message


def short_heap(seed: int) -> dict[str, float]:
    """The algorithms that "auto" runs if the heap has no room for its first choice, and their errors."""
    excesses = {}
    with fresh(1 << 20) as ctx:
        for op in (ALL_REDUCE, SCATTER):
            one = trial(ctx, Way(op, "auto"), (100, 200, 32), torch.float32, seed)
            filler = ctx.empty(ctx.heap_largest_free_bytes - (100 << 10), dtype=torch.uint8)
            for config in (None, FusedConfig()):
                one.spoil()
                one.run(config)
                excesses[f"{op} {config}"] = one.excess()
            ctx.free(filler)
    return excesses


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_short_heap_has_auto_take_what_fits(ranks: Ranks, seed: int) -> None:
    for excesses in ranks.run(short_heap, seed):
        assert max(excesses.values()) <= 1


def ruled_out_told() -> list[tuple[str, str]]:
    """The log of a call by "auto" whose output the best algorithm does not take."""
    log, picks = mock.Mock(), [FusedConfig("ring"), FusedConfig("two_shot")]
    with fresh(64 << 20) as ctx, mock.patch.multiple(ctx, debug=log.debug, warning=log.warning):
        a, b = (torch.ones(shape, device=ctx.device) for shape in ((16, 32), (32, 200)))
        with mock.patch("iris.ops.choice.pick_config", side_effect=picks):
            ctx.ops.matmul_all_reduce(ctx.empty(200, 16).t(), a, b)
        ctx.synchronize()
    return [(name, *args) for name, args, _ in log.mock_calls]


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_what_rules_out_the_best_is_told(ranks: Ranks) -> None:
    expected = (
        "matmul_all_reduce: m=16, n=200, k=32, torch.float32: auto takes two_shot, tile 128 x 128 x 64, "
        "as this call's operands, trace or workspace rule out ring"
    )
    assert ranks.run(ruled_out_told) == [[("debug", expected)], []]


def ruled_out_alone() -> str:
    """The algorithm that "auto" takes on one rank if the best algorithm does not take the output."""
    log = mock.Mock()

    def pick(problem: object, target: object, algorithm: str = "ring") -> FusedConfig:
        return FusedConfig(algorithm)

    with fresh(64 << 20) as ctx, mock.patch.multiple(ctx, debug=log.debug):
        a, b = (torch.ones(shape, device=ctx.device) for shape in ((16, 32), (32, 200)))
        with mock.patch("iris.ops.choice.pick_config", pick):
            ctx.ops.matmul_all_reduce(ctx.empty(200, 16).t(), a, b)
        ctx.synchronize()
    told: str = log.debug.call_args.args[0]
    return told


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_a_single_rank_adds_nothing_by_atomics(ranks: Ranks) -> None:
    assert "auto takes one_shot" in ranks.run(ruled_out_alone)[0]


def choices_told(heap_size: int, filled: int | None = None) -> tuple[list[tuple[str, str]], int]:
    """The log of calls by "auto", and the bytes of the heap that are allocated in the last two: ``filled``, or all but
    100 KiB."""
    log = mock.Mock()
    with fresh(heap_size) as ctx, mock.patch.multiple(ctx, debug=log.debug, warning=log.warning):
        output, a, b = ctx.empty(500, 201)[:, :200], torch.ones(500, 32), torch.ones(32, 200)
        a, b = a.to(ctx.device), b.to(ctx.device)
        for rows, config in ((16, None), (16, None), (16, "ring"), (17, FusedConfig(block_size_k=32))):
            ctx.ops.matmul_all_reduce(output[:rows], a[:rows], b, config=config)
        filler = ctx.empty(filled or ctx.heap_largest_free_bytes - (100 << 10), dtype=torch.uint8)
        for rows in (499, 500):
            ctx.ops.matmul_all_reduce(output[:rows], a[:rows], b)
        ctx.synchronize()
        ctx.free(filler)
        return [(name, *args) for name, args, _ in log.mock_calls], filler.numel()


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_what_auto_takes_is_told_once(ranks: Ranks) -> None:
    (told, filled), (others, _) = ranks.run(choices_told, 4 << 20)
    assert others == []
    levels, lines = zip(*told, strict=True)
    assert levels == ("debug", "debug", "warning", "debug")
    expected = [
        r"m=16, n=200, k=32, torch.float32: auto takes \w+(, tile \d+ x \d+ x \d+)?, by the (simulator's list|model)",
        r"m=17, n=200, k=32, torch.float32: auto takes \w+(, tile 128 x 128 x 32)?, by what is given",
        *[rf"m={m}, .* takes \w+, as the heap has no room for (\w+): heap_size=(\d+) would have" for m in (499, 500)],
    ]
    found = [re.match(f"matmul_all_reduce: {one}", line) for one, line in zip(expected, lines, strict=True)]
    assert all(found), lines
    last = cast("re.Match[str]", found[-2])
    (enough, _), _ = ranks.run(choices_told, int(last[2]), filled)
    assert f"auto takes {last[1]}" in enough[-2][1] and {level for level, _ in enough} == {"debug"}


def after_a_call_of_some_ranks(seed: int) -> tuple[Failure, float]:
    """Rank 0 makes a call with wrong arguments, and the same call with right ones when less of the heap is free."""
    with fresh(1 << 20) as ctx:
        one = trial(ctx, Way(ALL_REDUCE, "auto"), (100, 200, 32), torch.float32, seed)
        if ctx.rank == 0:
            failure_of(lambda: ctx.ops.matmul_all_reduce(one.output, one.a, one.b[:-1]))
            failure = failure_of(ctx.barrier)
        else:
            failure = failure_of(one.run, None)
        filler = ctx.empty(ctx.heap_largest_free_bytes - (100 << 10), dtype=torch.uint8)
        one.run(None)
        ctx.free(filler)
        return failure, one.excess()


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_what_ranks_did_not_agree_on_is_chosen_anew(ranks: Ranks, seed: int) -> None:
    for failure, excess in ranks.run(after_a_call_of_some_ranks, seed):
        assert failure.kind == "RankMismatch" and excess <= 1


def chosen_where_all_fit(seed: int, fails_first: bool) -> tuple[list[str], list[str], float]:
    """How a first call failed, the algorithms of "auto" in the next one, when the heap is free again, and the error."""
    failures = []
    with fresh(4 << 20) as ctx:
        one = trial(ctx, Way(GATHER, "auto"), (32, 16, 128), torch.float32, seed)
        elsewhere = one.a.clone()

        def call() -> None:
            ctx.ops.all_gather_matmul(one.output, elsewhere, one.b, one.bias)

        if fails_first:
            filler = ctx.empty(ctx.heap_largest_free_bytes - (16 << 10), dtype=torch.uint8)
            failures.append(failure_of(call).kind)
            ctx.free(filler)
        call()
        return failures, [config.algorithm for config in _settled(ctx).values()], one.excess()


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_call_that_finds_no_memory_settles_nothing(ranks: Ranks, seed: int) -> None:
    for (none, expected, _), (failed, chosen, excess) in zip(
        ranks.run(chosen_where_all_fit, seed, False), ranks.run(chosen_where_all_fit, seed, True), strict=True
    ):
        assert (none, failed, len(chosen)) == ([], ["HeapError"], 1)
        assert chosen == expected and excess <= 1


def sums_where_all_fit(seed: int, fails_first: bool) -> tuple[list[str], list[str], float]:
    """As :func:`chosen_where_all_fit`, for an op with an algorithm that needs far less of the heap than the best."""
    failures = []
    with fresh(4 << 20) as ctx:
        one = trial(ctx, Way(ALL_REDUCE, "auto"), (32, 16, 128), torch.float32, seed)
        if fails_first:
            filler = ctx.empty(ctx.heap_largest_free_bytes - (4 << 10), dtype=torch.uint8)
            failures.append(failure_of(one.run, None).kind)
            ctx.free(filler)
        one.run(None)
        return failures, [config.algorithm for config in _settled(ctx).values()], one.excess()


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_what_was_let_go_of_is_room_for_the_best_though_an_earlier_call_found_none(ranks: Ranks, seed: int) -> None:
    for (_, expected, _), (failed, chosen, excess) in zip(
        ranks.run(sums_where_all_fit, seed, False), ranks.run(sums_where_all_fit, seed, True), strict=True
    ):
        assert (failed, chosen) == (["HeapError"], expected) and excess <= 1


def excesses_in_workspaces(seed: int) -> dict[str, float]:
    """Errors of calls by "auto" with workspaces for each algorithm of a gather."""
    found = {}
    with fresh(16 << 20) as ctx:
        one = trial(ctx, Way(GATHER, "auto"), (16, 32, 32), torch.float32, seed)
        on_heap = ctx.as_symmetric(one.a)
        for algorithm in ALGORITHMS[GATHER]:
            workspace = new_workspace(ctx, GATHER, algorithm, 1 << 20, GATHER_FLAGS)
            one.spoil()
            ctx.ops.all_gather_matmul(one.output, on_heap, one.b, one.bias, workspace=workspace)
            found[algorithm] = one.excess()
    return found


@pytest.mark.parametrize("ranks", worlds(1, 2), indirect=True)
def test_auto_takes_the_algorithm_of_the_workspace(ranks: Ranks, seed: int) -> None:
    """It does so on one rank, too."""
    for excesses in ranks.run(excesses_in_workspaces, seed):
        assert max(excesses.values()) <= 1


def a_workspace_of_another_op() -> tuple[Failure, str]:
    """The failure of a call with it, and the algorithm that "auto" takes without one."""
    log = mock.Mock()
    with fresh(4 << 20) as ctx:
        output, a, b = (torch.ones(shape, device=ctx.device) for shape in ((2, 16), (4, 8), (8, 16)))
        other = new_workspace(ctx, ALL_REDUCE, "two_shot", 1 << 14)
        with mock.patch.multiple(ctx, debug=log.debug):
            failure = failure_of(lambda: ctx.ops.matmul_reduce_scatter(output, a, b, workspace=other))
            ctx.ops.matmul_reduce_scatter(output, a, b)
        ctx.synchronize()
    return failure, log.debug.call_args.args[0] if ctx.rank == 0 else ""


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_workspace_of_another_op_does_not_tell_what_auto_takes(ranks: Ranks) -> None:
    (failure, told), (other, _) = ranks.run(a_workspace_of_another_op)
    found = re.search(r"auto takes (\w+)", told)
    assert found and failure.message == other.message
    assert f"workspace: expected one made for matmul_reduce_scatter, {found[1]}, " in failure.message


def layouts_asked_for(seed: int) -> dict[str, list[bool]]:
    """Whether each op's problem has a transposed B, by the layout of its operands."""
    ctx, asked = context(), dict[str, list[bool]]()

    def pick(problem: Any, target: Any, algorithm: str | None = None) -> FusedConfig:
        asked[layout].append(problem.transposed_b)
        return replace(SMALL, algorithm="baseline" if problem.op in (SCATTER, ALL_REDUCE) else "push")

    for layout in ("plain", "transposed"):
        asked[layout] = []
        for op in (GATHER, SCATTER, REDUCE_SCATTER, ALL_REDUCE):
            one = trial(ctx, Way(op, "auto"), (20, 24, 32), torch.float16, seed, layout=layout)
            with mock.patch("iris.ops.choice.pick_config", pick):
                one.run(None)
            assert one.excess() <= 1
    return asked


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_choice_is_made_for_the_layout_of_b(ranks: Ranks, seed: int) -> None:
    for asked in ranks.run(layouts_asked_for, seed):
        assert {layout: set(found) for layout, found in asked.items()} == {
            "plain": {False}, "transposed": {True},
        }  # fmt: skip
        assert all(len(found) >= 4 for found in asked.values())


def shown_workspace() -> str:
    with fresh(1 << 20) as ctx:
        return repr(new_workspace(ctx, GATHER, "push", 4096))


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_workspace_is_shown_on_a_line(ranks: Ranks) -> None:
    for shown in ranks.run(shown_workspace):
        assert shown.startswith("FusedWorkspace(all_gather_matmul, push, 4.0 KiB of staging memory, 1024 flags, Iris(")
        assert "\n" not in shown


def by_name(seed: int) -> tuple[list[float], Failure, Failure]:
    ctx, excesses = context(), []
    for op, algorithms in ALGORITHMS.items():
        for name in algorithms:
            one = trial(ctx, Way(op, name), (16, 16, 32), torch.float16, seed)
            getattr(ctx.ops, op)(one.output, one.a, one.b, config=name)
            excesses.append(one.excess())
    one = trial(ctx, Way(GATHER, "push"), (16, 16, 32), torch.float16, seed)
    unknown = failure_of(lambda: ctx.ops.all_gather_matmul(one.output, one.a, one.b, config="magic"))
    wrong = {"num_chunks": 2}
    odd = failure_of(lambda: ctx.ops.all_gather_matmul(one.output, one.a, one.b, config=wrong))  # type: ignore[arg-type]
    return excesses, unknown, odd


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_an_algorithm_by_its_name(ranks: Ranks, seed: int) -> None:
    for excesses, unknown, odd in ranks.run(by_name, seed):
        assert max(excesses) <= 1
        assert unknown.kind == odd.kind == "ArgumentError"
        assert "'magic'" in unknown.message and "copy_engine" in unknown.message and "dict" in odd.message


BOUND = [name for name in vars(BoundOps) if name[0] != "_"]


def test_every_op_is_bound() -> None:
    assert set(BOUND) > set(ALGORITHMS)


@pytest.mark.parametrize("name", BOUND)
def test_a_bound_op_says_what_it_is(name: str) -> None:
    op, bound = getattr(iris.ops, name), getattr(BoundOps(cast(Any, "a context")), name)
    assert bound.__name__ == name and bound.__doc__ == op.__doc__
    first, *others = inspect.signature(op).parameters.values()
    assert first.name == "ctx" and list(inspect.signature(bound).parameters.values()) == others
    told = pydoc.plain(pydoc.render_doc(bound))
    assert f"{name}({others[0].name}: " in told and "Raises:" in told


def of_other_sizes() -> tuple[Failure, ...]:
    """Calls in which rank 1 has one row less, another config, a workspace, or as the only rank no bias."""
    with fresh(1 << 21, timeout_s=5) as ctx:
        a, b = ctx.zeros(17, 32)[ctx.rank :], torch.zeros(32, 16, device=ctx.device)
        rows = ctx.world_size * a.shape[0]
        uneven = failure_of(lambda: ctx.ops.all_gather_matmul(torch.zeros(rows, 16, device=ctx.device), a, b))
    with fresh(1 << 21, timeout_s=5) as ctx:
        one = trial(ctx, Way(ALL_REDUCE, "two_shot"), (16, 16, 32), torch.float32, seed=1)
        configured = failure_of(one.run, replace(SMALL, num_rounds=1 + ctx.rank))
        workspace = new_workspace(ctx, ALL_REDUCE, "two_shot", 1 << 16, 1 << 10)
        equipped = failure_of(one.run, SMALL, workspace if ctx.rank else None)
    biased = []
    for op in (ALL_REDUCE, REDUCE_SCATTER):
        with fresh(1 << 21, timeout_s=5) as ctx:
            one = trial(ctx, Way(op, "low_latency"), (16, 16, 32), torch.float32, 1, None if ctx.rank else "column")
            biased.append(failure_of(one.run))
    return uneven, configured, equipped, *biased


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_ranks_that_disagree_are_told(ranks: Ranks) -> None:
    said = (
        ("m=34", "m=32"), ("num_rounds=1", "num_rounds=2"),
        ("workspace of the context", "workspace given at heap offset "),
        *[("bias per column", "no bias")] * 2,
    )  # fmt: skip
    for failures in ranks.run(of_other_sizes):
        for failure, words in zip(failures, said, strict=True):
            assert failure.kind == "RankMismatch" and failure.took_s < 2, failure
            assert all(one in failure.message for one in words) and len(failure.message) < 300


def known_calls_that_differ(op: str) -> tuple[Failure, float]:
    """Rank 1 makes another call than rank 0, both of which were made before; then both make the same one."""
    with mock.patch.dict("os.environ", IRIS_CHECK_CALLS="1"), fresh(1 << 21) as ctx:
        trials = [trial(ctx, Way(op, "auto"), (rows, 16, 32), torch.float32, seed=1) for rows in (16, 8)]
        for one in (*trials, *trials):
            one.run(None)
        failure = failure_of(trials[ctx.rank].run, None)
        trials[0].spoil()
        trials[0].run(None)
        return failure, trials[0].excess()


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize(("op", "said"), [(ALL_REDUCE, ("m=16", "m=8")), (GATHER, ("m=32", "m=16"))])
def test_known_calls_that_differ_are_told_if_all_are_compared(ranks: Ranks, op: str, said: tuple[str, str]) -> None:
    for failure, excess in ranks.run(known_calls_that_differ, op):
        assert failure.kind == "RankMismatch" and all(one in failure.message for one in said)
        assert excess <= 1


def comparisons(compared: str) -> list[int]:
    """How often ranks meet in the first call and in three more; on GPUs the last would otherwise be replayed."""
    with mock.patch.dict("os.environ", IRIS_CHECK_CALLS=compared), fresh(1 << 21) as ctx:
        one, found = trial(ctx, Way(ALL_REDUCE, "two_shot"), (16, 16, 32), torch.float32, seed=1), []
        for _ in range(4):
            with mock.patch.object(ctx._mesh, "exchange", wraps=ctx._mesh.exchange) as met:
                one.run()
            found.append(len([None for call in met.call_args_list if call.args[0].startswith(ALL_REDUCE)]))
        return found


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize(("compared", "met"), [("0", [1, 0, 0, 0]), ("1", [1, 1, 1, 1])])
def test_known_calls_are_compared_only_if_asked_for(ranks: Ranks, compared: str, met: list[int]) -> None:
    assert ranks.run(comparisons, compared) == [met] * 2


def compared_by_one_rank() -> Failure:
    with mock.patch.dict("os.environ", IRIS_CHECK_CALLS=os.environ["IRIS_RANK"]):
        return failure_of(lambda: iris.iris(1 << 20, timeout_s=20))


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_all_ranks_compare_calls_or_none(ranks: Ranks) -> None:
    for failure in ranks.run(compared_by_one_rank):
        assert failure.kind == "RankMismatch"
        assert re.search(r"rank 0: iris\([^;]*=\w+\); rank 1: iris\([^;]*, IRIS_CHECK_CALLS=1\)", failure.message)


def traced_by_name() -> tuple[Failure, list[int], set[str]]:
    ctx, events, ops = context(), list[int](), set[str]()
    one = trial(ctx, Way(ALL_REDUCE, "low_latency"), (16, 16, 32), torch.float32, seed=1)
    failure = failure_of(lambda: one.run(trace=True))
    for config in (None, replace(SMALL, own_matmul=True)):
        one.run(config, trace=True)
        events.append(len(ctx.last_trace.events(ctx)))
        ops.add(ctx.last_trace.op)
    return failure, events, ops


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_what_cannot_be_traced_says_so(ranks: Ranks) -> None:
    for failure, events, ops in ranks.run(traced_by_name):
        assert failure.message.startswith("matmul_all_reduce: trace") and "low_latency" in failure.message
        assert min(events) > 0 and ops == {ALL_REDUCE}


def traced_with_a_workspace(picked: str) -> tuple[Failure, int]:
    """A traced call by the algorithm that is picked, with a workspace of ``decomposed``; and the number of events that
    the trace of the call before has then."""
    ctx = context()
    one = trial(ctx, Way(ALL_REDUCE, "auto"), (16, 16, 32), torch.float32, seed=1)
    one.run(trace=True)
    workspace = iris.ops.new_workspace(ctx, ALL_REDUCE, "decomposed", 1 << 16)

    def pick(problem: Any, target: Any, algorithm: str | None = None) -> FusedConfig:
        return replace(SMALL, algorithm=next(one for one in order if one not in target.excluded))

    order = picked, *ALGORITHMS[ALL_REDUCE]
    with mock.patch("iris.ops.choice.pick_config", pick):
        failure = failure_of(lambda: one.run(None, workspace, trace=True))
    return failure, len(ctx.last_trace.events(ctx))


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize(("picked", "argument"), [("decomposed", "trace"), ("two_shot", "workspace")])
def test_a_call_that_is_refused_is_no_call_that_was_traced(ranks: Ranks, picked: str, argument: str) -> None:
    for failure, events in ranks.run(traced_with_a_workspace, picked):
        assert failure.message.startswith(f"{ALL_REDUCE}: {argument}") and events > 0


def traced_without_room() -> Failure:
    """A traced call: the best algorithm needs no memory, but records nothing, and none that records has room."""

    def pick(problem: Any, target: Any, algorithm: str | None = None) -> FusedConfig:
        order = "ring", *ALGORITHMS[problem.op]
        return replace(SMALL, algorithm=next(one for one in order if one not in target.excluded))

    with fresh(1 << 20) as ctx, mock.patch("iris.ops.choice.pick_config", pick):
        one = trial(ctx, Way(ALL_REDUCE, "auto"), (100, 200, 32), torch.float32, seed=1)
        filler = ctx.empty(ctx.heap_largest_free_bytes - (30 << 10), dtype=torch.uint8)
        failure = failure_of(lambda: one.run(None, trace=True))
        ctx.free(filler)
        return failure


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_trace_without_room_says_so(ranks: Ranks) -> None:
    for failure in ranks.run(traced_without_room):
        assert failure.kind == "HeapError", failure


class Counted(Replays):
    """Replays without a GPU: counts what it would capture and replay."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.captured = self.replayed = 0

    def _capture(self, call: Any) -> Any:
        self.captured += 1
        call()
        captured = mock.Mock()
        captured.graph.replay.side_effect = lambda: setattr(self, "replayed", self.replayed + 1)
        captured.stream.record_event.return_value.query.return_value = False
        self.last = captured
        return captured


@contextmanager
def counting() -> Iterator[Counted]:
    """In the block ops believe that calls are replayed, for contexts that have not made a call before."""
    counted = Counted()
    with (
        mock.patch("iris.ops.replay._replays_of", return_value=counted),
        mock.patch("iris.ops.replay._stream_of", return_value=0),
    ):
        yield counted


def calls_by_name() -> tuple[int, int, list[float]]:
    """How many of four calls, with all arguments by name, were captured, and how many replayed, and their errors."""
    with fresh(1 << 20) as ctx, counting() as counted:
        output, a, b = torch.zeros(2, 2), torch.ones(2, 3), torch.ones(3, 2)
        for _ in range(4):
            iris.ops.matmul(ctx=ctx, output=output, A=a, B=b)
        return counted.captured, counted.replayed, output.flatten().tolist()


@pytest.mark.skipif(BACKEND != "sim", reason="streams of the simulator are made up")
@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_arguments_may_be_given_by_name(ranks: Ranks) -> None:
    """Once the context was not found by its name, and such calls were never replayed."""
    assert ranks.run(calls_by_name) == [(1, 3, [3.0] * 4)]


def outside_of_inference_mode() -> tuple[int, Failure, Failure]:
    """Calls in inference mode, with an output made there, and the same call outside; then calls outside with an output
    made outside, and one with an inference tensor in the same memory."""
    with fresh(1 << 20) as ctx, counting() as counted, torch.no_grad():
        a, b, plain = torch.ones(2, 3), torch.ones(3, 2), torch.zeros(2, 2)
        with torch.inference_mode():
            output = torch.zeros(2, 2)
            again = torch.from_numpy(plain.numpy())
            for _ in range(3):
                iris.ops.matmul(ctx, output, a, b)
        first = failure_of(iris.ops.matmul, ctx, output, a, b)
        for _ in range(3):
            iris.ops.matmul(ctx, plain, a, b)
        return counted.replayed, first, failure_of(iris.ops.matmul, ctx, again, a, b)


@pytest.mark.skipif(BACKEND != "sim", reason="streams of the simulator are made up")
@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_a_tensor_of_inference_mode_is_refused_outside_whatever_was_called_before(ranks: Ranks) -> None:
    """Once a call made in inference mode was replayed outside of it, and overwrote a tensor that may not be written."""
    ((replayed, *failures),) = ranks.run(outside_of_inference_mode)
    assert replayed == 4
    for failure in failures:
        assert failure.kind == "ArgumentError" and "outside of inference mode" in failure.message, failure


def name_for_an_argument() -> Failure:
    """A call with B by its name, while calls are replayed, and one with that name as B, and B as the bias."""
    with fresh(1 << 20) as ctx, counting():
        output, a, b = torch.zeros(2, 2), torch.ones(2, 3), torch.ones(3, 2)
        for _ in range(3):
            iris.ops.matmul(ctx, output, a, B=b)
        return failure_of(iris.ops.matmul, ctx, output, a, "B", b)


@pytest.mark.skipif(BACKEND != "sim", reason="streams of the simulator are made up")
@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_a_name_is_no_argument(ranks: Ranks) -> None:
    """Once such a call replayed the one with the argument by name."""
    (failure,) = ranks.run(name_for_an_argument)
    assert failure.kind == "DTypeError" and failure.message.startswith("matmul: B: expected a tensor"), failure


def without_a_hash() -> list[Failure]:
    """Failures of calls with lists as options, while calls are replayed."""
    with fresh(1 << 20) as ctx, counting():
        operands = ctx, torch.zeros(2, 2), torch.ones(2, 3), torch.ones(3, 2)
        return [
            failure_of(lambda: iris.ops.matmul(*operands, config=FusedConfig(num_sms=[1]))),  # type: ignore[arg-type]
            failure_of(lambda: iris.ops.all_gather_matmul_hbm_buffer(*operands, num_fetch_sms=[1])),  # type: ignore[arg-type]
        ]


@pytest.mark.skipif(BACKEND != "sim", reason="streams of the simulator are made up")
@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_options_without_a_hash_are_refused_by_name(ranks: Ranks) -> None:
    """Once they were a TypeError of Python, when calls are replayed."""
    ((matmul, gather),) = ranks.run(without_a_hash)
    assert matmul.kind == "ArgumentError" and "config.num_sms: expected of type int, got [1]" in matmul.message, matmul
    assert gather.kind == "ArgumentError" and "config.comm_sms: expected of type int" in gather.message


def traced_by_a_tensor() -> tuple[list[Failure], int]:
    """Calls with various values as trace, while calls are replayed; and how many of those without one were replayed."""
    with fresh(1 << 20) as ctx, counting() as counted:
        operands = ctx, torch.zeros(2, 2), torch.ones(2, 3), torch.ones(3, 2)
        traces: list[Any] = [torch.ones(1), torch.ones(2), np.ones(2), *([False, None, 0] * 3)]
        found = [failure_of(lambda: iris.ops.matmul(*operands, trace=trace)) for trace in traces]  # noqa: B023
        return found, counted.replayed


@pytest.mark.skipif(BACKEND != "sim", reason="streams of the simulator are made up")
@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_a_trace_that_is_a_tensor_is_refused_by_name(ranks: Ranks) -> None:
    """Once its bool() raised PyTorch's RuntimeError, and on a GPU waited for the device."""
    ((found, replayed),) = ranks.run(traced_by_a_tensor)
    for failure in found[:3]:
        assert failure.kind == "ArgumentError" and "matmul: trace: expected True, False" in failure.message, failure
    assert [failure.kind for failure in found[3:]] == ["nothing"] * 9 and replayed > 0


def without_cuda() -> Failure:
    """An op on a context that can no longer be used, and neither can PyTorch's CUDA."""
    lost = RuntimeError("Cannot re-initialize CUDA in forked subprocess")
    ctx = iris.iris(1 << 20)
    ctx.close()
    with mock.patch.object(ctx, "on_device", side_effect=lost):
        return failure_of(iris.ops.matmul, ctx, torch.zeros(2, 2), torch.ones(2, 3), torch.ones(3, 2))


@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_the_context_is_looked_at_before_its_gpu(ranks: Ranks) -> None:
    """Once an op in a forked child of a process that uses GPUs raised PyTorch's RuntimeError, not a ContextError."""
    (failure,) = ranks.run(without_cuda)
    assert failure.kind == "ContextError" and failure.message.startswith("matmul: this context"), failure


def test_a_view_that_negates_is_another_call() -> None:
    one = torch.zeros(3, dtype=torch.complex64)
    plain, negated = one.imag, one.conj().imag
    assert plain.data_ptr() == negated.data_ptr() and _identity(plain) != _identity(negated)


def test_memory_that_is_read_otherwise_is_another_call() -> None:
    """It may be read in another shape, with other strides, as another dtype, or with a gradient."""
    one = torch.zeros(4, 4)
    views = [one, one.T, one[:2], one.view(torch.int32), one.detach().requires_grad_()]
    assert {view.data_ptr() for view in views} == {one.data_ptr()}
    assert len({_identity(view) for view in views}) == len(views)


def epochs_of_halves(seed: int) -> list[set[int]]:
    """The values of the flags of each half of a gather's workspace after three calls."""
    ctx = context()
    workspace = new_workspace(ctx, GATHER, "push", 1 << 16, GATHER_FLAGS)
    for turn in range(3):
        trial(ctx, Way(GATHER, "push"), (20, 16, 16), torch.float32, seed + turn).run(SMALL, workspace)
    ctx.barrier()
    return [set(half.tolist()) for half in workspace.ready[:GATHER_FLAGS].view(2, -1)]


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_calls_of_a_gather_take_halves_of_the_flags_in_turns(ranks: Ranks, seed: int) -> None:
    """If the shape changes, a flag belongs to another rank's part in the next call, which some ranks may have begun."""
    assert ranks.run(epochs_of_halves, seed) == [[{0, 2}, {0, 3}]] * ranks.world_size


def numbers_of_named_calls() -> list[int]:
    """For calls that differ only in arguments given by name, the number of each call's key."""
    ctx, keys = context(), []
    one = trial(ctx, Way(LOCAL, "local"), (16, 16, 16), torch.float32, 1)
    numbers, others = torch.zeros(2, 16)
    given: list[dict[str, Any]] = [{"config": SMALL}, {"config": replace(SMALL)}, {"config": replace(SMALL, num_sms=1)}]
    given += [{"bias": numbers}, {"bias": others}, {"scale_a": numbers}, {"scale_b": numbers}]
    recorder = mock.Mock(run=lambda key, call: keys.append(key))
    with (
        mock.patch("iris.ops.replay._replays_of", return_value=recorder),
        mock.patch("iris.ops.replay._stream_of", return_value=0),
    ):
        for named in given:
            iris.ops.matmul(ctx, one.output, one.a, one.b, **named)
    return [list(dict.fromkeys(keys)).index(key) for key in keys]


@pytest.mark.skipif(BACKEND != "sim", reason="needs no GPU")
@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_a_call_with_other_options_or_under_other_names_is_another_one(ranks: Ranks) -> None:
    """Only the first two calls are the same."""
    assert ranks.run(numbers_of_named_calls) == [[0, 0, 1, 2, 3, 4, 5]]


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def tf32() -> Iterator[None]:
    kept = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = kept


def keys_of_calls() -> list[object]:
    """The keys of the same call on one stream, on another, without gradients, in inference mode, and when PyTorch is
    told to be deterministic, to round float32 to TF32, and to multiply with another library."""
    ctx, keys = context(), []
    recorder = mock.Mock(run=lambda key, call: keys.append(key))
    one = trial(ctx, Way(GATHER, "push"), (16, 16, 16), torch.float32, 1)
    with (
        mock.patch("iris.ops.replay._replays_of", return_value=recorder),
        mock.patch("iris.ops.replay._stream_of") as stream,
    ):
        library = mock.patch("iris.ops.replay._library", return_value="another")
        modes = torch.no_grad(), torch.inference_mode(), deterministic(), tf32(), library
        for number, mode in (
            (1, nullcontext()),
            (1, nullcontext()),
            (2, nullcontext()),
            *((1, mode) for mode in modes),
        ):
            stream.return_value = number
            with mode:
                iris.ops.all_gather_matmul(ctx, one.output, one.a, one.b, gather_dim=0, config=SMALL)
    return keys


def numbers_of_different_calls() -> list[int]:
    keys = keys_of_calls()
    return [list(dict.fromkeys(keys)).index(key) for key in keys]


@pytest.mark.skipif(BACKEND != "sim", reason="needs no GPU")
@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_a_call_on_another_stream_or_in_another_mode_is_another_one(ranks: Ranks) -> None:
    """Of which only the first two are the same."""
    for same in ranks.run(numbers_of_different_calls):
        assert same == [0, 0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("compares", "variables", "on"),
    [
        (False, {}, True),
        (True, {}, False),
        (False, {"IRIS_REPLAY": "0"}, False),
        (False, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, False),
        (False, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, True),
    ],
    ids=str,
)
def test_calls_are_replayed_where_ranks_compare_none_and_streams_may_wait(
    compares: bool, variables: dict[str, str], on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("IRIS_REPLAY", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert _switched_on(cast(Any, SimpleNamespace(_compares_calls=compares))) is on


def test_a_tensor_with_a_tangent_is_another_call() -> None:
    """Otherwise a call made without a tangent would be replayed with one, instead of being refused."""
    plain = torch.zeros(3)
    with forward_ad.dual_level():
        other = dual(plain, torch.ones(3))
        assert plain.data_ptr() == other.data_ptr() and _identity(plain) != _identity(other)


def test_a_context_given_twice_is_refused_as_any_other() -> None:
    """Once it was a TypeError that named an internal function of Iris."""
    failure = failure_of(lambda: vars(iris.ops)["matmul"](None, ctx=None))
    assert failure.kind == "ArgumentError" and failure.message.startswith("matmul: ctx: expected a context"), failure


def stand_in_among_duals() -> list[Failure]:
    """Calls with a stand-in for a tensor as each operand, while tangents are looked for and calls are replayed."""
    with fresh(1 << 20) as ctx, counting(), forward_ad.dual_level():
        operands = {"output": torch.zeros(2, 2), "A": torch.ones(2, 3), "B": torch.ones(3, 2), "bias": torch.ones(2)}
        return [
            failure_of(lambda given: iris.ops.matmul(ctx, **given), operands | {name: Wrapper(one)})
            for name, one in operands.items()
        ]


@pytest.mark.skipif(BACKEND != "sim", reason="streams of the simulator are made up")
@pytest.mark.parametrize("ranks", worlds(1, 1), indirect=True)
def test_a_stand_in_is_not_asked_for_its_tangent(ranks: Ranks) -> None:
    """Once the stand-in itself raised, as it does for any operation, before the op could say what is wrong."""
    for failure in ranks.run(stand_in_among_duals)[0]:
        assert failure.kind == "ArgumentError" and "a tensor that has memory" in failure.message, failure


def test_a_call_that_may_add_up_in_fp16_is_another_one() -> None:
    switches, found = torch.backends.cuda.matmul, []
    kept = switches.allow_fp16_accumulation
    try:
        for allowed in (False, True):
            switches.allow_fp16_accumulation = allowed
            found.append((_rounding(torch.float16), _rounding(torch.bfloat16)))
    finally:
        switches.allow_fp16_accumulation = kept
    assert found[0][0] != found[1][0] and found[0][1] == found[1][1]


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_call_that_may_round_otherwise_is_another_one(name: str, dtype: torch.dtype) -> None:
    """Settings of PyTorch say whether partial sums may be rounded, and whether K may be split for that."""
    switches, switch = torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction"
    if not hasattr(switches, f"{switch}_split_k"):
        pytest.skip("this PyTorch has no such switch")
    kept = getattr(switches, switch), getattr(switches, f"{switch}_split_k")
    found = []
    try:
        for allowed in ((True, True), (False, True), (False, False)):
            setattr(switches, switch, allowed)
            found.append((_rounding(dtype), _rounding(torch.int32)))
    finally:
        setattr(switches, switch, kept)
    assert len({here for here, _ in found}) == 3 and len({other for _, other in found}) == 1


def test_all_calls_of_a_large_model_are_replayed() -> None:
    replays, calls = Counted(), []
    for _ in range(4):
        for layer in range(640):
            replays.run(layer, lambda: calls.append(1))
    assert (replays.captured, replays.replayed, len(calls)) == (640, 3 * 640, 2 * 640)


def test_of_too_many_calls_those_that_came_longest_ago_are_forgotten() -> None:
    with mock.patch("iris.ops.replay._KEPT", 8), mock.patch("torch.cuda.synchronize") as synchronize:
        replays = Counted()
        for _ in range(2):
            for layer in range(8):
                replays.run(layer, lambda: None)
        replays.run(1, lambda: None)
        replays.run("one more", lambda: None)
        assert set(replays._calls) == {1, 5, 6, 7, "one more"} and not synchronize.called


def test_calls_that_came_once_are_forgotten_before_those_that_are_replayed() -> None:
    with mock.patch("iris.ops.replay._KEPT", 8):
        replays = Counted()
        for _ in range(2):
            for layer in range(3):
                replays.run(layer, lambda: None)
        for prompt in range(5):
            replays.run(f"prompt {prompt}", lambda: None)
        replays.run("one more", lambda: None)
        assert set(replays._calls) == {0, 1, 2, "prompt 4", "one more"}


def test_a_forgotten_graph_is_kept_while_its_stream_may_run_it() -> None:
    with mock.patch("iris.ops.replay._KEPT", 1):
        replays = Counted()
        for _ in range(2):
            replays.run("first", lambda: None)
        running = replays.last.stream.record_event.return_value.query
        replays.run("second", lambda: None)
        assert len(replays._leaving) == 1
        replays.run("third", lambda: None)
        assert len(replays._leaving) == 1
        running.return_value = True
        replays.run("fourth", lambda: None)
        assert replays._leaving == []


def first_call_with_late_zeros(way: Way, seed: int) -> float:
    """The last rank zeroes each part of a new workspace late."""
    with fresh(1 << 21) as ctx:
        one = trial(ctx, way, (16, 16, 32), torch.float32, seed)
        allocate = iris.Iris._allocate

        def late(ctx, *of):
            memory = allocate(ctx, *of)
            time.sleep(0.05 * (ctx.rank == ctx.world_size - 1))
            return memory

        with mock.patch.object(iris.Iris, "_allocate", late):
            one.run(SMALL)
        return one.excess()


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize(
    "way", [one for one in ways() if one.algorithm in ("low_latency", "push", "copy_engine")], ids=str
)
def test_nobody_writes_into_a_workspace_before_it_is_zeroed(ranks: Ranks, way: Way, seed: int) -> None:
    assert max(ranks.run(first_call_with_late_zeros, way, seed)) <= 1
