"""The rules can fail: each finds the error in a kernel, or a listing, that breaks it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import rules
import torch
import triton
import triton.language as tl
from case import CUDA, HIP, Case, compile_case, described, handle, in_turn, of, with_handle
from compiler import TARGETS, VERSION
from kernels import CASES, compile_named
from listing import Event, Listing, UnknownAssembly, read

from iris.device import bounds, control, sync
from iris.device.arch import clock_ns, load_fresh, meet_to_publish, wait_bulk_stores

everywhere = pytest.mark.parametrize("target_name", (*in_turn(CUDA), *in_turn(HIP)))
on_amd = pytest.mark.parametrize("target_name", in_turn(HIP))
on_cuda = pytest.mark.parametrize("target_name", in_turn(CUDA))

CTA_BARRIER = re.compile(r"^\s*(bar\.sync\s.*|s_barrier)$", re.M)
SUMS = "argument 33"
"""The argument of the matmul kernel with TMA that points to the memory where sums are added up, and from which the
owner of a tile takes them."""


def assembly_of(kernel: Any, target_name: str, *arguments: Any, **constants: Any) -> str:
    return compile_case(Case("", kernel, of(*arguments), constants), target_name)


def without(text: str, pattern: str | re.Pattern[str], instead: str = "") -> str:
    """``text`` with all matches replaced; there must be one."""
    new, count = re.subn(pattern, instead, text, flags=0 if isinstance(pattern, re.Pattern) else re.M)
    assert count
    return new


@triton.jit
def bare_release(data, flag, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(data + offsets, offsets.to(tl.float32))
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")


@triton.jit
def late_store(data, flag, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    meet_to_publish()
    tl.store(data + offsets, offsets.to(tl.float32))
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")


@triton.jit
def release_behind_a_plain_barrier(data, flag, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(data + offsets, offsets.to(tl.float32))
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")


@triton.jit
def one_path_without_barrier(data, flag, count, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    if count > 3:
        tl.store(data + offsets, offsets.to(tl.float32))
        meet_to_publish()
    else:
        meet_to_publish()
        tl.store(data + offsets, offsets.to(tl.float32))
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")


@pytest.mark.parametrize(
    "kernel", [bare_release, late_store, one_path_without_barrier], ids=lambda one: one.fn.__name__
)
@everywhere
def test_release_without_barrier(kernel: Any, target_name: str) -> None:
    """From Triton 3.9 on the compiler puts a barrier before each release; on AMD it does not wait for waves' stores."""
    count = (7,) if kernel is one_path_without_barrier else ()
    wrong = rules.publication(read(assembly_of(kernel, target_name, torch.float32, torch.int32, *count, BLOCK=1024)))
    if VERSION < (3, 9):
        assert [words for words in wrong if words.startswith(("no barrier before", "a store between the barrier and"))]
    elif target_name in HIP:
        assert [words for words in wrong if words.startswith("a wave may still have stores in flight")]
    else:
        assert wrong == []


@on_amd
def test_barrier_that_waits_for_no_stores(target_name: str) -> None:
    text = assembly_of(release_behind_a_plain_barrier, target_name, torch.float32, torch.int32, BLOCK=1024)
    [words] = rules.publication(read(text))
    assert words.startswith("a wave may still have stores in flight")


@on_amd
def test_writeback_that_is_not_waited_for(target_name: str) -> None:
    text = compile_named("signals", target_name)
    assert rules.publication(read(text)) == []
    dropped = without(text, r"^buffer_wbl2 sc0 sc1$|^\s*s_waitcnt vmcnt\(0\)$")
    assert rules.publication(read(dropped))


@everywhere
def test_dropped_barriers(target_name: str) -> None:
    text = compile_named("signals", target_name)
    wrong = rules.publication(read(without(text, CTA_BARRIER)))
    assert [words for words in wrong if words.startswith("no barrier before")]
    wrong = rules.consumption(read(without(compile_named("waits", target_name), CTA_BARRIER)))
    assert [words for words in wrong if words.startswith("no barrier between an acquire and")]


@on_cuda
def test_barriers_of_single_warps_among_several(target_name: str) -> None:
    text = without(compile_named("signals", target_name), CTA_BARRIER, "bar.warp.sync 0xffffffff;")
    assert rules.publication(read(text))
    assert rules.publication(read(without(text, r"\.reqntid\s+\d+", ".reqntid 32"))) == []


@pytest.mark.timeout(300)
def test_dropped_barriers_of_a_large_kernel() -> None:
    """LLVM moves the address of its arguments to other registers."""
    text = compile_named("matmul-atomic-float16-hip", CASES["matmul-atomic-float16-hip"].targets[0])
    assert rules.consumption(read(text)) == []
    assert rules.consumption(read(without(text, CTA_BARRIER)))


@pytest.mark.timeout(300)
def test_sums_that_are_taken_away_before_all_threads_have_loaded_them() -> None:
    text = compile_named("matmul-atomic-float16-tma-cuda", CASES["matmul-atomic-float16-tma-cuda"].targets[0])
    assert rules.taking(read(text), SUMS) == []
    [words, *_] = rules.taking(read(without(text, CTA_BARRIER)), SUMS)
    assert words.startswith("no barrier between a load and st.global")


@everywhere
def test_barriers_of_one_kernel(target_name: str) -> None:
    """One thread stores the count of barriers, and all threads load it again."""
    twice = compile_named("whole_barrier", target_name)
    assert rules.counting(read(twice)) == []
    [words, *_] = rules.counting(read(without(twice, CTA_BARRIER)))
    assert words.startswith("no barrier between a store and")


@triton.jit
def counted_in(counter, out):
    if sync.arrive(counter, 4):
        tl.store(out, 1)


@triton.jit
def recorded(handle):
    bounds._record(control.CODE_EXPIRED, control.SITE_USER, 1, 2, 3, 4, 5, 6, handle)


@pytest.mark.parametrize("target_name", ["sm_90", "gfx942"])
def test_every_signal_releases(target_name: str) -> None:
    """There are the three kinds of signals; programs that count each other in, which also acquire; and writes that tell
    the host, or other programs, that a record is complete. No rule can know what a relaxed atomic should have been."""
    made = (
        CASES["signals"],
        Case("counted_in", counted_in, of(torch.int32, torch.int32)),
        Case("recorded", recorded, with_handle()),
    )
    listings = [read(compile_case(case, target_name)) for case in made]
    numbers = [
        tuple(sum(bool(one.events & event) for one in listing) for event in (Event.RELEASE, Event.ACQUIRE))
        for listing in listings
    ]
    assert numbers == [(3, 0), (1, 1), (2, 1)]


@on_amd
def test_single_wave_without_writeback(target_name: str) -> None:
    """One wave needs no barrier, and LLVM leaves none, but its own stores must be written back."""
    case = CASES["signals"]
    text = compile_case(replace(case, constants={**case.constants, "num_warps": 1}), target_name)
    listing = read(text)
    assert listing.single
    assert not any(Event.BARRIER in one.events for one in listing)
    assert rules.publication(listing) == []
    assert rules.publication(read(without(text, r"^\s*s_waitcnt vmcnt\(0\).*$")))


@triton.jit
def scoped_atomic(word, SEM: tl.constexpr, SCOPE: tl.constexpr):
    tl.store(word + 1, tl.atomic_add(word, 1, sem=SEM, scope=SCOPE))


@pytest.mark.parametrize("sem", ["relaxed", "acquire", "release", "acq_rel"])
@pytest.mark.parametrize("scope", ["cta", "gpu"])
@everywhere
def test_less_than_system_scope(sem: str, scope: str, target_name: str) -> None:
    assert rules.scope(read(assembly_of(scoped_atomic, target_name, torch.int32, SEM=sem, SCOPE=scope)))
    assert rules.scope(read(assembly_of(scoped_atomic, target_name, torch.int32, SEM=sem, SCOPE="sys"))) == []


@triton.jit
def load_behind_acquire(flags, data, out, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    seen = tl.atomic_add(flags + offsets, 0, sem="acquire", scope="sys")
    tl.store(out + offsets, tl.load(data + offsets) + seen)


@on_cuda
def test_acquire_without_barrier(target_name: str) -> None:
    """From Triton 3.9 on the compiler puts a barrier after each acquire."""
    types = (torch.int32, torch.int32, torch.int32)
    text = assembly_of(load_behind_acquire, target_name, *types, BLOCK=128)
    if VERSION >= (3, 9):
        assert rules.consumption(read(text), frozenset()) == []
        text = without(text, CTA_BARRIER)
    assert rules.consumption(read(text), frozenset())


@triton.jit
def endless_poll(flag, out):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.debug_barrier()
    tl.store(out, 1)


@triton.jit
def poll_that_sets_a_mark(flag, out):
    found = 0
    turns = 0
    while found == 0:
        if tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 7:
            tl.store(out, turns)
            found = 1
        turns += 1
    tl.store(out + 1, turns)


@triton.jit
def poll_of_many(flags, out, BLOCK: tl.constexpr):
    seen = 0
    while seen < 1:
        seen = tl.min(tl.atomic_add(flags + tl.arange(0, BLOCK), 0, sem="acquire", scope="sys"))
    tl.store(out, seen)


@triton.jit
def poll_of_one_after_the_other(flags, out, count):
    missing = count
    while missing > 0:
        missing = 0
        for index in range(count):
            if tl.atomic_add(flags + index, 0, sem="acquire", scope="sys") < 1:
                missing += 1
    tl.store(out, missing)


@triton.jit
def poll_that_returns_early(flag, out, limit):
    left = limit
    while left > 0:
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        left = tl.where(seen == 3, 0, left + seen - 1)
    tl.store(out, left)


@triton.jit
def poll_of_words(words, out, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    seen = load_fresh(words + offsets, offsets < BLOCK)
    while tl.min(seen) < 1:
        seen = load_fresh(words + offsets, offsets < BLOCK)
    tl.store(out, tl.min(seen))


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (endless_poll, {}),
        (poll_of_words, {"BLOCK": 512}),
        (poll_that_sets_a_mark, {}),
        (poll_of_many, {"BLOCK": 16}),
        (poll_of_many, {"BLOCK": 512}),
        (poll_of_one_after_the_other, {"count": 9}),
        (poll_that_returns_early, {"limit": 9}),
    ],
)
@everywhere
def test_poll_without_bound(kernel: Any, constants: dict[str, int], target_name: str) -> None:
    """It is found whichever way the value reaches the end of the loop."""
    [words, *_] = rules.bounds(read(assembly_of(kernel, target_name, torch.int32, torch.int32, **constants)))
    assert words.startswith("no clock in the loop around")


@pytest.mark.parametrize("name", ["waits", "turnstile", "exchange_words-total", "06_pass_messages"])
@everywhere
def test_wait_without_its_clock(name: str, target_name: str) -> None:
    timed = compile_named(name, target_name)
    assert rules.bounds(read(timed)) == []
    assert rules.bounds(read(without(timed, r"s_memrealtime.*$|^.*%globaltimer;$")))


@triton.jit
def poll_until_a_time(handle, flag, out, until):
    seen = sync._poll(flag)
    while (seen < 1) & (clock_ns() < until):
        seen = sync._poll(flag)
    tl.store(out, seen)


@on_cuda
def test_a_thread_that_goes_by_its_own_clock(target_name: str) -> None:
    arguments = (handle(), torch.int32, torch.int32, 1 << 40)
    [words, *_] = rules.agreement(read(assembly_of(poll_until_a_time, target_name, *arguments)))
    assert words.startswith("its own look decides about")


@triton.jit
def stopwatch(out):
    started = clock_ns()
    tl.store(out, clock_ns() - started)


@on_amd
def test_a_clock_that_is_not_waited_for(target_name: str) -> None:
    text = assembly_of(stopwatch, target_name, torch.int64)
    assert rules.timing(read(text)) == []
    [words, *_] = rules.timing(read(without(text, r"^\s*s_waitcnt lgkmcnt\(0\)$")))
    assert words.startswith("no wait between s_memrealtime")


@pytest.mark.parametrize("block", [16, 32, 512])
@on_cuda
def test_a_warp_that_goes_by_its_own_words(block: int, target_name: str) -> None:
    """If one warp holds all words, others hold copies, and none asks another."""
    listing = read(assembly_of(poll_of_words, target_name, torch.int32, torch.int32, BLOCK=block))
    assert bool(rules.agreement(listing)) == (block <= 32)


@triton.jit
def count_in_each_block(handle, counters, data, flags, blocks, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        tl.store(data + block * BLOCK + offsets, offsets)
        if sync.arrive(counters + block // 3, 3):
            sync.signal(flags + block // 3, block, 1, handle)


@triton.jit
def count_and_go_by_it(counter, data, blocks, BLOCK: tl.constexpr):
    """Programs take one block after the other from a common counter. The loop may or may not wait, as the rule cannot
    know who counts."""
    block = tl.atomic_add(counter, 1, sem="acq_rel", scope="sys")
    while block < blocks:
        tl.store(data + block * BLOCK + tl.arange(0, BLOCK), block)
        block = tl.atomic_add(counter, 1, sem="acq_rel", scope="sys")


@everywhere
def test_a_count_is_no_poll(target_name: str) -> None:
    """A program that only counts itself in needs no clock; one that goes on depending on the count does."""
    types = (torch.int32, torch.int32)
    arguments = (handle(), *types, torch.int32, 100)
    assert rules.bounds(read(assembly_of(count_in_each_block, target_name, *arguments, BLOCK=512))) == []
    assert rules.bounds(read(assembly_of(count_and_go_by_it, target_name, *types, 100, BLOCK=512)))


def amd_kernel(*lines: str) -> Listing:
    return read("\n".join([".amdgcn_target", "kernel:", *lines, "s_endpgm", ".Lfunc_end0:"]))


COUNTED = (
    "v_readlane_b32 s1, v9, 5", "s_sub_u32 s1, s1, 1", "v_writelane_b32 v9, s1, 5",
    "global_atomic_add v4, v3, v4, s[2:3] sc0 sc1", "buffer_inv sc0 sc1",
    "v_cmp_ne_u32_e32 vcc, 1, v4", "s_cbranch_vccnz .LBB0_2",
)  # fmt: skip
NEXT_TURN = (".LBB0_2:", "v_readlane_b32 s4, v9, 5", "s_cmp_lg_u32 s4, 0", "s_cbranch_scc1 .LBB0_1")


@pytest.mark.parametrize(
    ("lines", "polls"),
    [
        (("v_writelane_b32 v9, s5, 6",), False),
        (("v_writelane_b32 v9, s5, 5",), True),
        (("v_mov_b32_e32 v9, v8",), True),
        (("v_writelane_b32 v9, s5, 6", "v_mov_b32_e32 v9, v9"), True),
    ],
)
def test_scalars_that_are_spilled_under_a_count(lines: tuple[str, ...], polls: bool) -> None:
    """What decides about the loop lies in another lane of the vector register to which a scalar is spilled only by the
    program that was counted last."""
    assert bool(rules.bounds(amd_kernel(".LBB0_1:", *COUNTED, *lines, *NEXT_TURN))) == polls


@pytest.mark.parametrize(
    ("lines", "polls"),
    [
        (("v_writelane_b32 v9, s5, 5",), True),
        (("v_writelane_b32 v9, s5, 5", "v_writelane_b32 v9, s6, 5"), False),
        (("v_writelane_b32 v9, s5, 5", "v_mov_b32_e32 v9, v8"), False),
        (("v_writelane_b32 v9, s5, 6", "v_mov_b32_e32 v9, v9"), True),
    ],
)
def test_a_count_that_is_spilled(lines: tuple[str, ...], polls: bool) -> None:
    """The count itself is spilled, to the lane that decides about the loop, or to another one."""
    body = (*COUNTED[:5], "v_readfirstlane_b32 s5, v4", *lines, *COUNTED[5:], *NEXT_TURN)
    assert bool(rules.bounds(amd_kernel(".LBB0_1:", *body))) == polls


@pytest.mark.parametrize(
    ("lines", "polls"),
    [
        ((), False),
        (("s_mov_b32 s7, 1",), True),
        (("s_mov_b32 s7, 1", "v_readlane_b32 s7, v9, 5"), False),
        (("s_mov_b32 s7, 1", "v_readlane_b32 s7, v9, 6"), True),
        (("s_mov_b32 s7, 1", "v_writelane_b32 v9, s7, 5", "v_readlane_b32 s7, v9, 5"), True),
        (("s_mov_b32 s7, 1", "v_mov_b32_e32 v9, v8", "v_readlane_b32 s7, v9, 5"), True),
    ],
)
def test_a_scalar_that_is_restored_under_a_count(lines: tuple[str, ...], polls: bool) -> None:
    """The scalar that decides about the loop is changed by the program that was counted last, and restored."""
    body = (*COUNTED[:3], "v_readlane_b32 s7, v9, 5", *COUNTED[3:], *lines)
    turn = (".LBB0_2:", "s_cmp_lg_u32 s7, 0", "s_cbranch_scc1 .LBB0_1")
    assert bool(rules.bounds(amd_kernel(".LBB0_1:", *body, *turn))) == polls


NARROWED = ("s_mov_b64 s[10:11], exec", "s_and_b64 exec, s[10:11], s[12:13]")


@pytest.mark.parametrize(
    ("lines", "polls"),
    [
        ((), False),
        (NARROWED, True),
        ((*NARROWED, "s_or_b64 exec, exec, s[10:11]"), False),
        (("s_and_saveexec_b64 s[10:11], s[12:13]", "s_mov_b64 exec, s[10:11]"), False),
        ((*NARROWED, "s_or_b64 exec, exec, s[12:13]"), True),
        ((*NARROWED, "s_mov_b32 s11, 1", "s_or_b64 exec, exec, s[10:11]"), True),
        ((*NARROWED, *NARROWED, "s_or_b64 exec, exec, s[10:11]"), True),
        ((*NARROWED, "v_mad_u64_u32 v[0:1], s[10:11], v2, v3, v[0:1]", "s_or_b64 exec, exec, s[10:11]"), True),
        (("v_cmpx_ne_u32_e32 1, v4", "s_mov_b64 s[10:11], exec", "s_or_b64 exec, exec, s[10:11]"), True),
    ],
)
def test_a_mask_that_is_restored_under_a_count(lines: tuple[str, ...], polls: bool) -> None:
    """What decides about the loop is read under the execution mask, which the program that was counted last narrows,
    and restores."""
    turn = (".LBB0_2:", "v_readfirstlane_b32 s4, v7", "s_cmp_lg_u32 s4, 0", "s_cbranch_scc1 .LBB0_1")
    assert bool(rules.bounds(amd_kernel(".LBB0_1:", *COUNTED[3:], *lines, *turn))) == polls


@triton.jit
def bulk_store_then_signal(handle, result, flag, BLOCK: tl.constexpr):
    result.store([0, 0], tl.full((BLOCK, BLOCK), 1.0, tl.float16))
    sync.signal(flag, 1, 1, handle)


@triton.jit
def wait_behind_the_barrier(handle, result, flag, BLOCK: tl.constexpr):
    result.store([0, 0], tl.full((BLOCK, BLOCK), 1.0, tl.float16))
    tl.debug_barrier()
    wait_bulk_stores()
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")


@on_cuda
def test_bulk_store_read_but_not_complete(target_name: str) -> None:
    """Up to Triton 3.7 a TMA store is waited for only until its shared memory may be used again."""
    arguments = (handle(), described(torch.float16, 64), torch.int32)
    wrong = rules.publication(read(assembly_of(bulk_store_then_signal, target_name, *arguments, BLOCK=64)))
    assert [one.split(" is ")[0] for one in wrong] == (["a bulk store"] if VERSION < (3, 8) else [])
    only_read = without(compile_named("bulk_signal", target_name), r"wait_group\s+0", "wait_group.read 0")
    assert rules.publication(read(only_read))
    if VERSION < (3, 8):
        assert rules.publication(read(assembly_of(wait_behind_the_barrier, target_name, *arguments, BLOCK=64)))


FENCE = "fence.proxy.async.global;"
BULK_LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
GATHERED = "matmul-put_rows-float16-tma-cuda"


@pytest.mark.parametrize("name", ["bulk_consume", GATHERED])
@on_cuda
def test_a_fence_out_of_its_place(name: str, target_name: str) -> None:
    """The fence is after each load, before each look at a flag, or nowhere."""
    text = compile_named(name, target_name)
    unwritten = CASES[name].unwritten_in(read(text))
    assert rules.proxy(read(text), unwritten) == []
    unfenced = without(text, FENCE)
    late = without(unfenced, r"^(.*\bcp\.async\.bulk\.tensor.*)$", rf"\1\n{FENCE}")
    early = without(unfenced, r"^(.*\b(?:ld|atom)\.global\.sys\.acquire.*)$", rf"{FENCE}\n\1")
    for moved in (late, early, unfenced):
        [words, *_] = rules.proxy(read(moved), unwritten)
        assert words.startswith("no fence between an acquire and")


@on_cuda
def test_operands_that_need_no_fence(target_name: str) -> None:
    """These are all except the gathered one."""
    listing = read(without(compile_named(GATHERED, target_name), FENCE))
    unwritten = CASES[GATHERED].unwritten_in(listing)
    [gathered] = {*listing.descriptors} - unwritten
    assert 0 < len(rules.proxy(listing, unwritten)) < len(rules.proxy(listing))
    assert rules.proxy(listing, unwritten | {gathered}) == []


@on_cuda
def test_a_bulk_load_without_barrier(target_name: str) -> None:
    wrong = rules.consumption(read(without(compile_named("bulk_consume", target_name), CTA_BARRIER)))
    assert [words for words in wrong if "cp.async.bulk" in words]


def bulk_loads(*statements: str) -> list[str]:
    """The errors in a kernel of ``statements``; argument 3 describes memory that nobody writes."""
    known = {
        "acquire": "@%p1 ld.global.sys.acquire.b32 %r1, [%rd1]; st.shared.b32 [%r2], %r1;",
        "barrier": "bar.sync 0;",
        "fence": FENCE,
        "load": f"@%p2 {BULK_LOAD} [%r3], [%rd2, {{%r4, %r5}}], [%r6];",
        "load B": f"@%p2 {BULK_LOAD} [%r3], [%rd3, {{%r4, %r5}}], [%r6];",
    }
    arguments = "mov.b64 %rd2, kernel_param_2;\nmov.b32 %r7, kernel_param_3;\ncvt.u64.u32 %rd3, %r7;"
    lines = [arguments, *(known.get(one, one) for one in statements), "ret;"]
    return rules.proxy(read("\n{\n" + "\n".join(lines) + "\n}"), frozenset({"argument 3"}))


@pytest.mark.parametrize(
    "statements",
    [
        ("acquire", "fence", "load"),
        ("acquire", "fence", "barrier", "load"),
        ("acquire", "barrier", "fence.proxy.async;", "load", "load"),
        ("load", "acquire"),
        ("ld.global.sys.acquire.b32 %r9, [%rd1];", "load"),
        ("acquire", "load B"),
        ("again:", "acquire", "fence", "load", "load B", "@%p3 bra again;"),
        ("acquire", "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd2, {%r4, %r5}], [%r3];"),
        ("acquire", "cp.async.cg.shared.global [%r3], [%rd2], 16;"),
    ],
)
def test_bulk_loads_in_order(statements: tuple[str, ...]) -> None:
    assert bulk_loads(*statements) == []


@pytest.mark.parametrize(
    "statements",
    [
        ("acquire", "load"),
        ("acquire", "barrier", "load", "fence"),
        ("fence", "acquire", "barrier", "load"),
        ("acquire", f"@%p1 {FENCE}", "barrier", "load"),
        ("acquire", "fence.proxy.async.shared::cta;", "load"),
        ("acquire", "@%p3 bra around;", "fence", "around:", "load"),
        ("fence", "again:", "load", "acquire", "@%p3 bra again;"),
        ("acquire", "selp.b64 %rd3, %rd2, %rd3, %p3;", "load B"),
        ("ld.shared.b64 %rd3, [%r8];", "acquire", "load B"),
        ("acquire", "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%rd2], 512, [%r6];"),
    ],
)
def test_bulk_loads_out_of_order(statements: tuple[str, ...]) -> None:
    [words] = bulk_loads(*statements)
    assert words.startswith("no fence between an acquire and")


@triton.jit
def swap_few(words, out):
    lanes = tl.arange(0, 16)
    tl.store(out + lanes, tl.atomic_cas(words + lanes, lanes * 0, lanes * 0 + 1, sem="relaxed", scope="sys"))


@on_amd
def test_a_word_that_several_threads_swap(target_name: str) -> None:
    """Up to Triton 3.7 several threads do, as docs/memory-model.md says."""
    instructions = list(read(assembly_of(swap_few, target_name, torch.int32, torch.int32)))
    first = next(place for place, one in enumerate(instructions) if Event.CAS in one.events)
    chosen = any("saveexec" in one.op for one in instructions[:first])
    assert chosen == (VERSION > (3, 7))


@triton.jit
def crooked_move(source, target, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(target + offsets, tl.load(source + offsets + 1))


@everywhere
def test_narrow_moves(target_name: str) -> None:
    listing = read(assembly_of(crooked_move, target_name, torch.float32, torch.float32, BLOCK=1024))
    assert rules.width(listing, frozenset({"argument 0"}))
    assert rules.width(listing, frozenset({"argument 9"})) == ["no LOAD of data at all", "no STORE of data at all"]


@on_cuda
@pytest.mark.parametrize(("kind", "words"), [("total", "v4.b32"), ("scatter", "v2.b64")])
def test_words_one_by_one_or_in_two_halves(target_name: str, kind: str, words: str) -> None:
    """They are stored and read whole, as many at a time as 16 bytes hold; words of integers have 64 bits."""
    text = compile_named(f"exchange_words-{kind}", target_name)
    assert rules.width(read(text), frozenset({"argument 3"})) == []
    for whole in (r"st\.global\.wt\.", r"ld\.volatile\.global\."):
        torn = without(text, whole + re.escape(words), whole.replace("\\", "") + "b32")
        assert rules.width(read(torn), frozenset({"argument 3"}))


@everywhere
def test_events_are_read(target_name: str) -> None:
    """In a signal the reader finds one store of a block, one release, and nothing that the kernel lacks."""
    listing = read(assembly_of(bare_release, target_name, torch.float32, torch.int32, BLOCK=512))
    count = {event: sum(event in one.events for one in listing) for event in Event}
    assert count[Event.STORE] == count[Event.RELEASE] == count[Event.ATOMIC] == 1
    assert count[Event.LOAD] == count[Event.ACQUIRE] == count[Event.CLOCK] == count[Event.NARROW] == 0


def test_a_jump_goes_to_the_label_of_its_own_braces() -> None:
    """Waits for bulk loads have such labels, all with one name."""
    loop = "again:\nadd.s32 %r1, %r1, 1;\n@%p1 bra again;\n"
    listing = read(f"\n{{\n{loop}{loop}ret;\n}}")
    assert [block.after for block in listing.blocks[:3]] == [[0, 1], [1, 2], []]


@on_amd
def test_a_far_jump_goes_to_its_label(target_name: str) -> None:
    """LLVM writes such a jump if the label is too far for a branch."""
    text = assembly_of(one_path_without_barrier, target_name, torch.float32, torch.int32, 7, BLOCK=512)
    far = r"s_add_u32 s98, s98, (\1-.Lpost_getpc0)&4294967295\n\ts_setpc_b64 s[98:99]"
    listing, there = (read(one) for one in (text, without(text, r"s_branch (\.LBB\w+)", far)))
    assert [block.after for block in listing.blocks] == [block.after for block in there.blocks]


def arguments_read(*lines: str) -> list[str]:
    """For each scalar load of these lines: the argument that it reads, or ``memory``."""
    loads = [one for one in amd_kernel(*lines) if one.op.startswith("s_load")]
    return ["memory" if Event.LOAD in one.events else one.argument[0] for one in loads]


SPILLED = ("v_writelane_b32 v9, s0, 5", "v_writelane_b32 v9, s1, 6", "s_load_dwordx2 s[0:1], s[0:1], 0x8")
RESTORED = ("v_readlane_b32 s6, v9, 5", "v_readlane_b32 s7, v9, 6", "s_load_dword s4, s[6:7], 0x10")


@pytest.mark.parametrize(
    ("lines", "read_there"),
    [
        ((*SPILLED, "s_load_dword s4, s[0:1], 0x10"), "memory"),
        ((*SPILLED, *RESTORED), "argument 2"),
        (("s_mov_b64 s[8:9], s[0:1]", *SPILLED, "s_load_dword s4, s[8:9], 0x1c"), "argument 3"),
        ((*SPILLED, "v_writelane_b32 v9, s4, 6", *RESTORED), "memory"),
        ((*SPILLED, "v_mov_b32_e32 v9, v8", *RESTORED), "memory"),
        ((*SPILLED, "s_cbranch_scc1 .LBB0_1", "v_writelane_b32 v9, s4, 5", ".LBB0_1:", *RESTORED), "memory"),
        ((*SPILLED, ".LBB0_1:", *RESTORED, "v_writelane_b32 v9, s4, 5", "s_cbranch_scc1 .LBB0_1"), "memory"),
        ((*SPILLED, "v_readlane_b32 s6, v9, 6", "s_load_dword s4, s[6:7], 0x10"), "memory"),
    ],
)
def test_arguments_are_where_their_address_has_been_moved_to(lines: tuple[str, ...], read_there: str) -> None:
    assert arguments_read(*lines) == ["argument 1", read_there]


@everywhere
def test_a_computed_jump_is_refused(target_name: str) -> None:
    text = assembly_of(bare_release, target_name, torch.float32, torch.int32, BLOCK=512)
    jump = "s_setpc_b64 s[0:1]" if target_name in HIP else "brx.idx %r1, table;"
    end = "s_endpgm" if target_name in HIP else "ret;"
    with pytest.raises(UnknownAssembly, match=jump.split()[0]):
        read(without(text, rf"^\s*{end}", jump))


def test_targets_are_all_here() -> None:
    assert {*CUDA, *HIP} == set(TARGETS)
