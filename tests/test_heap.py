"""The heap's table of blocks, and who holds them: offsets only, so no rank is needed. Also heaps that cannot be
allocated."""

from __future__ import annotations

import random

import pytest
from ranks import BACKEND, Failure, Ranks, failure_of, worlds

import iris
from iris import HeapError
from iris.heap import ALIGNMENT, HeapTable, align_up, format_bytes
from iris.leases import Leases


def test_a_block_is_aligned_and_never_empty() -> None:
    table = HeapTable(10 * ALIGNMENT)
    sizes = [table.allocate(nbytes).nbytes for nbytes in (0, 1, ALIGNMENT, ALIGNMENT + 1)]
    assert sizes == [ALIGNMENT, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT]


def test_the_heap_size_is_rounded_up() -> None:
    assert HeapTable(1).size == ALIGNMENT
    assert HeapTable(ALIGNMENT + 1).size == 2 * ALIGNMENT


def test_first_fit_takes_the_lowest_hole_that_is_large_enough() -> None:
    table = HeapTable(10 * ALIGNMENT)
    a, b, c, d, _ = (table.allocate(n * ALIGNMENT) for n in (1, 1, 2, 1, 1))
    table.free(a.offset)
    table.free(c.offset)
    assert table.allocate(2 * ALIGNMENT).offset == c.offset
    assert table.allocate(ALIGNMENT).offset == a.offset
    assert table.allocate(ALIGNMENT).offset == d.end + ALIGNMENT
    assert b.offset == ALIGNMENT


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)])
def test_neighbours_merge_in_whatever_order_they_are_freed(order: tuple[int, ...]) -> None:
    table = HeapTable(3 * ALIGNMENT)
    blocks = [table.allocate(ALIGNMENT) for _ in range(3)]
    for index in order:
        table.free(blocks[index].offset)
    assert table.largest_free == table.free_bytes == 3 * ALIGNMENT
    assert table.allocate(3 * ALIGNMENT).offset == 0


def test_exhaustion_names_what_was_asked_what_is_free_and_what_would_do() -> None:
    table = HeapTable(1 << 20)
    table.allocate(700 << 10)
    with pytest.raises(HeapError) as caught:
        table.allocate(500 << 10, "zeros")
    assert isinstance(caught.value, MemoryError)
    message = str(caught.value)
    assert message.startswith("zeros: symmetric heap exhausted: requested 500.0 KiB (512000 bytes)")
    assert "free 324.0 KiB of 1.0 MiB, largest free block 324.0 KiB" in message
    assert f"heap_size={2 << 20}" in message


def test_the_heap_size_that_exhaustion_advises_suffices() -> None:
    """Also for blocks that are large compared with the MiB to which it is rounded up."""
    unit = 64 * ALIGNMENT
    table = HeapTable(64 * unit)
    blocks = [table.allocate(unit) for _ in range(64)]
    for block in blocks[::2]:
        table.free(block.offset)
    with pytest.raises(HeapError) as caught:
        table.allocate(2 * unit)
    assert "free 2.0 MiB of 4.0 MiB, largest free block 64.0 KiB" in str(caught.value)
    larger = HeapTable(int(str(caught.value).split("heap_size=")[1].rstrip(".")))
    for block in [larger.allocate(unit) for _ in range(64)][::2]:
        larger.free(block.offset)
    larger.allocate(2 * unit)


def test_the_heap_size_that_is_advised_counts_no_holes() -> None:
    """The same program would also have them on a larger heap."""
    mib = 1 << 20
    sizes, size = [], 16 * mib
    while size not in sizes:
        sizes.append(size)
        table = HeapTable(size)
        for block in [table.allocate(mib) for _ in range(14)][::2]:
            table.free(block.offset)
        try:
            table.allocate(12 * mib)
        except HeapError as error:
            size = int(str(error).split("heap_size=")[1].rstrip("."))
    assert sizes == [16 * mib, 26 * mib]


def test_freeing_what_is_no_block_is_an_error() -> None:
    table = HeapTable(4 * ALIGNMENT)
    block = table.allocate(2 * ALIGNMENT)
    with pytest.raises(HeapError, match="no block starts at offset 1024"):
        table.free(block.offset + ALIGNMENT)
    table.free(block.offset)
    with pytest.raises(HeapError, match="no block starts at offset 0"):
        table.free(block.offset)


def test_a_byte_is_held_by_the_block_that_it_lies_in() -> None:
    table = HeapTable(8 * ALIGNMENT)
    first, second, third = (table.allocate(2 * ALIGNMENT) for _ in range(3))
    table.free(second.offset)
    for block in (first, third):
        assert table.holding(block.offset) == table.holding(block.end - 1) == block
    assert table.holding(second.offset) is table.holding(third.offset - 1) is table.holding(third.end) is None


def test_a_failed_request_changes_nothing() -> None:
    table = HeapTable(4 * ALIGNMENT)
    table.allocate(ALIGNMENT)
    with pytest.raises(HeapError):
        table.allocate(4 * ALIGNMENT)
    assert (table.free_bytes, table.largest_free) == (3072, 3072)


def test_a_random_sequence_agrees_with_a_map_of_every_unit(seed: int) -> None:
    """The model: one cell per alignment unit, first fit by scanning all cells."""
    units = 96
    dice, table, cells = random.Random(seed), HeapTable(units * ALIGNMENT), [False] * units
    held: list[tuple[int, int]] = []

    def hole_for(count: int) -> int | None:
        return next((i for i in range(units - count + 1) if not any(cells[i : i + count])), None)

    for _ in range(4000):
        if held and dice.random() < 0.48:
            start, count = held.pop(dice.randrange(len(held)))
            table.free(start * ALIGNMENT)
            cells[start : start + count] = [False] * count
        else:
            count = dice.randint(1, 12)
            nbytes = (count - 1) * ALIGNMENT + dice.randint(1, ALIGNMENT)
            expected = hole_for(count)
            if expected is None:
                with pytest.raises(HeapError):
                    table.allocate(nbytes)
                continue
            block = table.allocate(nbytes)
            assert (block.offset, block.nbytes) == (expected * ALIGNMENT, count * ALIGNMENT)
            cells[expected : expected + count] = [True] * count
            held.append((expected, count))
        longest = max(len(run) for run in "".join("x" if cell else "." for cell in cells).split("x"))
        assert table.free_bytes == cells.count(False) * ALIGNMENT
        assert table.largest_free == longest * ALIGNMENT


def test_two_tables_given_the_same_calls_hold_the_same_offsets(seed: int) -> None:
    tables = (HeapTable(1 << 20), HeapTable(1 << 20))
    offsets: tuple[list[int], list[int]] = ([], [])
    for table, seen in zip(tables, offsets, strict=True):
        dice = random.Random(seed)
        for _ in range(300):
            if seen and dice.random() < 0.5:
                table.free(seen.pop(dice.randrange(len(seen))))
            else:
                seen.append(table.allocate(dice.randint(1, 4096)).offset)
    assert offsets[0] == offsets[1]


def test_sizes_in_words() -> None:
    assert [align_up(n) for n in (0, 1, 1024, 1025)] == [0, 1024, 1024, 2048]
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 << 20, 5 << 30, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
        "5120.0 GiB",
    ]


def test_what_is_let_go_of_while_ranks_tell_each_other_is_told_the_next_time() -> None:
    """Another thread may do so, and a block that is never told is never used again."""
    table = HeapTable(4 * ALIGNMENT)
    leases = Leases(table, 2)

    def exchange(tag: str, mine: bytes) -> dict[int, bytes]:
        if tag == "meanwhile":
            late.release()
        return {0: mine, 1: mine}

    early, late = (leases.take(ALIGNMENT, "zeros", "zeros", exchange) for _ in range(2))
    early.release()
    leases.collect("meanwhile", exchange)
    assert table.free_bytes == table.size - ALIGNMENT
    leases.collect("later", exchange)
    assert table.free_bytes == table.size


def too_large() -> Failure:
    return failure_of(iris.iris, 1 << 42)


@pytest.mark.skipif(BACKEND == "sim", reason="simulated memory is promised, not taken")
@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_a_heap_that_does_not_fit_is_named_on_every_rank(ranks: Ranks) -> None:
    for failure in ranks.run(too_large):
        assert failure.kind == "BackendError"
        assert "a heap of 4096.0 GiB does not fit (rank 0: " in failure.message
        assert "rank 1: " in failure.message and "Choose a smaller heap_size" in failure.message
