"""Where a listing's control and values go: its loops, and what decides whether one of them goes on."""

from __future__ import annotations

from listing import Instruction, Listing


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


def decides(source: Instruction, loop: set[int], listing: Listing, behind: list[set[int]]) -> bool:
    """Whether the value that ``source``, in ``loop``, gets has a part in whether the loop goes on; ``behind``: of each
    block, those of :func:`all_behind`.

    Its value is followed within the loop through registers, shared memory and spills, through the conditions that are
    computed from it, and through all that is written where such a condition says so. What is written anew from other
    values is free of it. Vector registers of AMD count as written whole, whatever the execution mask.
    """
    branches = _Branches(listing, loop, behind)
    tainted: dict[int, frozenset[str]] = dict.fromkeys(loop, frozenset())
    under: set[int] = set()
    todo = sorted(loop)
    while todo:
        number = todo.pop()
        block = listing.blocks[number]
        state = set(tainted[number])
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
    """For each block, those that every way from it to the end leads through, itself included."""
    after = [block.after for block in listing.blocks]
    return _dominators(after, {number for number, one in enumerate(after) if not one})


def _step(one: Instruction, state: set[str], certain: bool, amd: bool) -> None:
    """Change ``state``, the registers that depend on the value followed, as ``one`` does; ``certain``: what it writes
    does depend on it."""
    if amd and "saveexec" in one.op:
        saved, new = "exec" in state, bool(state & {"exec", *one.reads})
        _write(one.writes, saved or certain, False, state)
        _write(("exec", "scc"), new or certain, False, state)
        return
    reads = {*one.reads, *one.decided_by}
    if amd and one.op.startswith("s_or_b") and one.writes == ("exec",):
        # The mask from before a branch comes back: what it was since then does not matter.
        reads -= {"exec"}
    _write((*one.writes, *one.decides), certain or bool(state & reads), one.guarded, state)


def _write(registers: tuple[str, ...], dependent: bool, partly: bool, state: set[str]) -> None:
    if dependent:
        state.update(registers)
    elif not partly:
        state.difference_update(registers)


class _Branches:
    """The blocks of a loop that run, or do not, because of a branch: those before its ways meet again."""

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
    """For each block, those that every way from one of ``first`` to it leads through, itself included."""
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
