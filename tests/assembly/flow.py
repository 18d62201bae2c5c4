"""Control and data flow of a listing: its loops, and the values that decide whether a loop goes on."""

from __future__ import annotations

from listing import Instruction, Listing, on_every_path


def loops(listing: Listing) -> list[set[int]]:
    """The blocks of every natural loop: for each jump back to a block that dominates it, all blocks between."""
    before = [block.before for block in listing.blocks]
    dominators = _dominators(before, {0})
    found: dict[int, set[int]] = {}
    for number, block in enumerate(listing.blocks):
        for head in block.after:
            if head in dominators[number]:
                loop, todo = found.setdefault(head, {head}), [number]
                while todo:
                    one = todo.pop()
                    if one not in loop:
                        loop.add(one)
                        todo += before[one]
    return list(found.values())


def decides(
    source: Instruction, loop: set[int], listing: Listing, behind: list[set[int]], spilled: list[dict[str, str]]
) -> bool:
    """Whether the value that ``source``, in ``loop``, gets influences whether the loop goes on; ``behind`` and
    ``spilled``: the results of :func:`all_behind` and :func:`all_spilled`.

    The value is followed within the loop through registers, shared memory and spills, through conditions that are
    computed from it, and through all that is written under such conditions. A place that is overwritten with other
    values no longer depends on it. Vector registers of AMD count as written whole, whatever the execution mask, except
    that lanes in which scalars are spilled are followed one by one. A register that was changed under a condition, and
    then got back what it had held before from such a lane, does not depend on the condition; nor does the execution
    mask, once it has all threads again.
    """
    branches = _Branches(listing, loop, behind)
    tainted: dict[int, frozenset[str]] = dict.fromkeys(loop, frozenset())
    under: set[int] = set()
    todo = sorted(loop)
    while todo:
        number = todo.pop()
        block = listing.blocks[number]
        state = set(tainted[number])
        state -= {name for name, lane in spilled[number].items() if not state & {lane, _register(lane)}}
        for one in block.instructions:
            _step(one, state, one is source or number in under, listing.amd)
        last = block.instructions[-1] if block.instructions else None
        if len(block.after) > 1 and last is not None and (number in under or state & set(last.decided_by)):
            if any(after not in loop for after in block.after):
                return True
            more = branches.region(number) - under
            under |= more
            todo += more
        for after in block.after:
            if after in loop and not state <= tainted[after]:
                tainted[after] |= state
                todo.append(after)
    return False


def all_behind(listing: Listing) -> list[set[int]]:
    """For each block, the blocks that every path from it to the end leads through, itself included."""
    after = [block.after for block in listing.blocks]
    return _dominators(after, {number for number, one in enumerate(after) if not one})


ALL_THREADS = "all threads"
"""The execution mask at the entry of a kernel."""


def all_spilled(listing: Listing) -> list[dict[str, str]]:
    """For each block, the registers that hold what a lane does where the block begins, on every path to it, and that
    lane: they were spilled to it, or restored from it, and neither has changed since. Or registers, the execution mask
    among them, hold ``ALL_THREADS``."""
    begin = on_every_path(listing.blocks, {"exec": ALL_THREADS}, _hold) if listing.amd else {}
    return [begin.get(number, {}) for number in range(len(listing.blocks))]


def _hold(one: Instruction, held: dict[str, str]) -> None:
    """Update ``held``, the registers that hold what a lane does, and that lane, for the instruction ``one``."""
    masked = _holds_all_threads(one, held)
    if one.spills:
        lost = {name for name, lane in held.items() if lane == one.lane}
    else:
        changed = {*one.writes, *one.decides}
        lost = {name for name, lane in held.items() if name in changed or _register(lane) in changed}
    for name in lost:
        del held[name]
    held.update(dict.fromkeys(one.writes if masked else (), ALL_THREADS))
    if one.lane:
        held.update(dict.fromkeys(one.reads[:1] if one.spills else one.writes, one.lane))


def _holds_all_threads(one: Instruction, held: dict[str, str]) -> bool:
    """Whether what ``one`` writes is the mask of all threads: a copy of it, or of what it is added to."""
    if "saveexec" in one.op:
        sources = ["exec"]
    elif one.op == "s_mov_b64":
        sources = [*one.reads]
    elif one.op == "s_or_b64":
        sources = [name for name in one.reads if name != "exec"]
    else:
        return False
    return bool(sources) and all(held.get(name) == ALL_THREADS for name in sources)


def _step(one: Instruction, state: set[str], certain: bool, amd: bool) -> None:
    """Update ``state``, the registers that depend on the followed value, for the instruction ``one``; ``certain``: all
    that it writes depends on the value."""
    if one.spills:
        _write((one.lane,), certain or bool(state & {*one.reads}), False, state)
        return
    if one.lane:
        _write(one.writes, certain or bool(state & {one.lane, _register(one.lane)}), False, state)
        return
    if amd and "saveexec" in one.op:
        saved, new = "exec" in state, bool(state & {"exec", *one.reads})
        _write(one.writes, saved or certain, False, state)
        _write(("exec", "scc"), new or certain, False, state)
        return
    reads = {*one.reads, *one.decided_by}
    if amd and one.op.startswith("s_or_b") and one.writes == ("exec",):
        # This restores the mask from before a branch: its values since then do not matter.
        reads -= {"exec"}
    dependent = bool(state & reads) or any(_register(held) in reads for held in state if "," in held)
    _write((*one.writes, *one.decides), certain or dependent, one.guarded, state)


def _write(registers: tuple[str, ...], dependent: bool, partly: bool, state: set[str]) -> None:
    if dependent:
        state.update(registers)
    elif not partly:
        state.difference_update(registers)
        state.difference_update([held for held in state if "," in held and _register(held) in registers])


def _register(lane: str) -> str:
    return lane.partition(",")[0]


class _Branches:
    """The blocks of a loop that run or not depending on a branch: those before its paths meet again."""

    def __init__(self, listing: Listing, loop: set[int], behind: list[set[int]]) -> None:
        self._listing, self._loop, self._behind = listing, loop, behind

    def region(self, number: int) -> set[int]:
        meeting = self._behind[number] - {number}
        found: set[int] = set()
        todo = list(self._listing.blocks[number].after)
        while todo:
            one = todo.pop()
            if one in self._loop and one not in found and one not in meeting:
                found.add(one)
                todo += self._listing.blocks[one].after
        return found


def _dominators(before: list[list[int]], first: set[int]) -> list[set[int]]:
    """For each block, the blocks that every path from one of ``first`` to it leads through, itself included."""
    everything = set(range(len(before)))
    found = [{number} if number in first else everything.copy() for number in everything]
    changed = True
    while changed:
        changed = False
        for number in sorted(everything - first):
            ways = [found[one] for one in before[number]]
            new = ({number} | set.intersection(*ways)) if ways else {number}
            if new != found[number]:
                found[number], changed = new, True
    return found
