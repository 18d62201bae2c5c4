"""Rules that every compiled kernel must obey, checked on its assembly. Each rule returns the violations that it found.

The rules follow all paths through a kernel, loops included, and join facts where paths meet: a fact that may hold on
any path counts. So they prove, for the listing at hand and for any run of it:

- :func:`publication`: before each release all threads have met at a barrier, after their last store to global memory,
  and bulk stores, and on AMD every wave's own stores, have been waited for before that.
- :func:`consumption`: after each acquire all threads meet before any of them touches memory other than the control
  words that the device handle leads to.
- :func:`proxy`: after each acquire the fence for TMA comes before any bulk load of memory that may be written while the
  kernel runs (NVIDIA).
- :func:`scope`: nothing is atomic or ordered at less than system scope.
- :func:`bounds`: every loop that waits until an acquire, or a look at a word, inside it finds a value also reads the
  clock.
- :func:`agreement`: no jump depends on a thread's own look at the clock, or at a word that others change (NVIDIA only:
  registers of AMD serve many values).
- :func:`counting`: what is stored in the control words is loaded again only after a barrier; checked for barriers only.
- :func:`taking`: what is loaded is overwritten only after a barrier; checked for memory from which data is taken.
- :func:`timing`: the result of reading the clock is waited for before it is used (AMD).
- :func:`width`: contiguous data moves 16 bytes per thread and instruction.

They do not prove that the clock decides when the loop ends, that a flag belongs to the data it announces, or that the
hardware keeps its promises; the tests on GPUs are for that. The memory of an access is identified by the kernel
argument that its address was computed from. A vector register that AMD writes under a partial execution mask counts as
written whole, so a pointer chosen between two arguments without a branch counts as the later one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Flag, auto
from functools import partial
from itertools import pairwise

from flow import all_behind, all_spilled, decides, loops
from listing import Event, Instruction, Listing

HANDLE = frozenset({"argument 0", "argument 1"})
"""Kernel arguments that a leading device handle becomes: heap bases and info."""


_ACCESSES = Event.LOAD | Event.STORE | Event.ATOMIC | Event.BULK_LOAD | Event.BULK_STORE
"""All accesses to global memory."""


class Fact(Flag):
    """A fact that may hold at a point of the program."""

    NONE = 0
    NEVER_MET = auto()
    STORED = auto()
    """A store since the threads last met."""
    IN_FLIGHT = auto()
    """AMD: a store of this wave that has not been written back."""
    WRITING_BACK = auto()
    """AMD: a write-back that has not been waited for."""
    LEFT_BEHIND = auto()
    """AMD: some wave came to the last barrier with stores in flight."""
    BULK_IN_FLIGHT = auto()
    ACQUIRED = auto()
    """An acquire since the threads last met."""
    UNFENCED = auto()
    """NVIDIA: an acquire since the last fence for TMA."""


WORDS = {
    Fact.NEVER_MET: "no barrier before",
    Fact.STORED: "a store between the barrier and",
    Fact.LEFT_BEHIND: "a wave may still have stores in flight since before the barrier that precedes",
    Fact.BULK_IN_FLIGHT: "a bulk store is not waited for before",
}
AGAINST_RELEASE = Fact.NEVER_MET | Fact.STORED | Fact.LEFT_BEHIND | Fact.BULK_IN_FLIGHT


def publication(listing: Listing) -> list[str]:
    """Stores → complete → barrier → release. A program of one warp or wave needs no barrier on AMD, where LLVM
    removes it; there its own write-back must be waited for."""
    wrong = []
    for events, facts in _facts(listing):
        for index, one in enumerate(events):
            if Event.RELEASE in one.events:
                bad = facts & AGAINST_RELEASE
                if listing.amd and listing.single:
                    complete = _drained_next(events[index + 1 :])
                    bad = (
                        Fact.LEFT_BEHIND if facts & (Fact.IN_FLIGHT | Fact.WRITING_BACK) and not complete else Fact.NONE
                    )
                wrong += [f"{WORDS[fact]} {one.text}" for fact in WORDS if fact in bad]
            facts = _after(one, facts, listing)
    return wrong


def _drained_next(following: list[Instruction]) -> bool:
    """Whether memory operations are waited for before the next access to memory in ``following``."""
    for one in following:
        if Event.DRAIN in one.events:
            return True
        if one.events & (Event.ATOMIC | Event.STORE):
            return False
    return False


def consumption(listing: Listing, private: frozenset[str] = HANDLE) -> list[str]:
    """Acquire → barrier → any access, except at addresses computed from the arguments ``private`` alone."""
    suspects = []
    used = {register for one in listing for register in one.reads}
    guesses = _guesses(listing)
    for events, facts in _facts(listing, used):
        for one in events:
            plain = one.events & (Event.LOAD | Event.STORE | Event.BULK_LOAD | Event.BULK_STORE)
            if plain and Fact.ACQUIRED in facts and not _ordered(one, listing) and id(one) not in guesses:
                suspects.append(one)
            facts = _after(one, facts, listing, used)
    if not suspects or (listing.single and listing.amd):
        return []
    origin = origins(listing)
    return [f"no barrier between an acquire and {one.text}" for one in suspects if not origin[id(one)] <= private]


def proxy(listing: Listing, unwritten: frozenset[str] = frozenset()) -> list[str]:
    """Acquire → fence → bulk load of any memory, except that of the descriptors ``unwritten``, which are arguments.

    No acquire is about memory that nobody writes while the kernel runs, such as an op's own operands; kernels load that
    by TMA after waits for other things, without a fence in between. An address of unknown origin counts as written.
    What the program itself stored before, without an acquire in between, is not checked.

    The fence may be on either side of the barrier that :func:`consumption` requires: all threads execute it, the one
    that acquired and the one that loads. Under a predicate, where some threads may not, it does not count.
    """
    used = {register for one in listing for register in one.reads}
    suspects = []
    for events, facts in _facts(listing, used):
        for one in events:
            if Event.BULK_LOAD in one.events and Fact.UNFENCED in facts:
                suspects.append(one)
            facts = _after(one, facts, listing, used)
    origin = origins(listing, Event.BULK_LOAD) if suspects else {}
    written = [one for one in suspects if not origin[id(one)] or origin[id(one)] - unwritten]
    return [f"no fence between an acquire and {one.text}" for one in written]


def scope(listing: Listing) -> list[str]:
    """System scope everywhere."""
    return [f"less than system scope: {one.text}" for one in listing if Event.NARROW in one.events]


def bounds(listing: Listing) -> list[str]:
    """Every loop that polls reads the clock. A loop polls if it goes on, or ends, depending on the value of an acquire,
    or of a load that reads memory anew each time, inside it. An acquire whose value decides about no loop around it, as
    when a program only counts itself in, is no poll; nor is a compare-and-swap, which is repeated only when another
    thread has made progress."""
    wrong: dict[str, None] = {}
    behind, spilled = all_behind(listing), all_spilled(listing)
    for loop in loops(listing):
        inside = [one for number in sorted(loop) for one in listing.blocks[number].instructions]
        if any(Event.CLOCK in one.events for one in inside):
            continue
        for one in inside:
            if _acquires(one, listing) and decides(one, loop, listing, behind, spilled):
                wrong[f"no clock in the loop around {one.text}"] = None
    return list(wrong)


def agreement(listing: Listing) -> list[str]:
    """A look at the clock, or at a word that is read repeatedly → atomic, or shared memory → jump. The threads of a
    program look one after the other; the result of an atomic, or a value in shared memory, is the same for all."""
    if listing.amd or listing.single:
        return []
    own: set[str] = set()
    known = -1
    while known < len(own):
        known = len(own)
        for one in listing:
            looks = Event.CLOCK in one.events or (Event.LOAD in one.events and "volatile" in one.op.split("."))
            asks = looks or (own & set(one.reads) and not one.events & (Event.ATOMIC | Event.LOAD))
            own |= {*one.writes, *one.decides} - {"shared"} if asks else set()
    return [f"its own look decides about {one.text}" for one in listing if one.jumps_to and own & set(one.decided_by)]


def counting(listing: Listing, private: frozenset[str] = HANDLE) -> list[str]:
    """A word whose address was computed from all of the arguments ``private``: stored → barrier → loaded. One thread
    stores the count of barriers, and all threads load it, and must agree on it."""
    if listing.single:
        return []
    origin = origins(listing)
    control = {where for where, arguments in origin.items() if arguments == private}
    return _met(
        listing,
        lambda one: Event.STORE in one.events and id(one) in control,
        lambda one: Event.LOAD in one.events and not _ordered(one, listing) and id(one) in control,
        "no barrier between a store and",
    )


def taking(listing: Listing, memory: str) -> list[str]:
    """The memory that the argument ``memory`` points to: loaded → barrier → overwritten, as another thread may not have
    loaded it yet. Checked for memory from which kernels take what others have put there."""
    origin = origins(listing)

    def there(one: Instruction) -> bool:
        return memory in origin.get(id(one), ())

    return _met(
        listing,
        lambda one: Event.LOAD in one.events and there(one),
        lambda one: Event.STORE in one.events and there(one),
        "no barrier between a load and",
    )


def _met(
    listing: Listing, begins: Callable[[Instruction], bool], ends: Callable[[Instruction], bool], words: str
) -> list[str]:
    """The instructions that ``ends`` selects on a path without a barrier from one that ``begins`` selects."""
    wrong: dict[str, None] = {}
    todo = [
        (number, index + 1)
        for number, block in enumerate(listing.blocks)
        for index, one in enumerate(block.instructions)
        if begins(one)
    ]
    for place in todo:  # grows
        number, first = place
        block = listing.blocks[number]
        for one in block.instructions[first:]:
            if Event.BARRIER in one.events:
                break
            if ends(one):
                wrong[f"{words} {one.text}"] = None
        else:
            todo += [(after, 0) for after in block.after if (after, 0) not in todo]
    return list(wrong)


def timing(listing: Listing) -> list[str]:
    """AMD: a look at the clock → a wait for scalar loads → any use of the registers that it fills. LLVM ensures this
    for its own instructions, not for inline assembly."""
    wrong: dict[str, None] = {}
    if not listing.amd:
        return []
    for start, block in enumerate(listing.blocks):
        for index, clock in enumerate(block.instructions):
            if Event.CLOCK not in clock.events:
                continue
            todo = [(start, index + 1)]
            for number, first in todo:  # grows
                for one in listing.blocks[number].instructions[first:]:
                    if Event.SCALAR_DRAIN in one.events:
                        break
                    if set(clock.writes) & {*one.reads, *one.writes}:
                        wrong[f"no wait between {clock.text} and {one.text}"] = None
                        break
                else:
                    todo += [(after, 0) for after in listing.blocks[number].after if (after, 0) not in todo]
    return list(wrong)


def width(listing: Listing, data: frozenset[str]) -> list[str]:
    """Every access whose address was computed from one of the arguments ``data`` is of 16 bytes."""
    origin = origins(listing)
    plain = [one for one in listing if one.events & (Event.LOAD | Event.STORE) and origin[id(one)] & data]
    wrong = [f"not 16 bytes: {one.text}" for one in plain if Event.WIDE not in one.events]
    absent = [kind for kind in (Event.LOAD, Event.STORE) if not any(kind in one.events for one in plain)]
    return wrong + [f"no {kind.name} of data at all" for kind in absent]


def _acquires(one: Instruction, listing: Listing) -> bool:
    """Whether ``one`` gets a value that others may have just written."""
    if Event.CAS in one.events:
        return False
    if listing.amd:
        system_load = Event.LOAD in one.events and {"sc0", "sc1"} <= set(one.text.split())
        return system_load or (Event.ATOMIC in one.events and bool(one.writes))
    fresh = Event.LOAD in one.events and "volatile" in one.op.split(".")
    return fresh or (Event.ACQUIRE in one.events and bool(one.writes))


def _guesses(listing: Listing) -> set[int]:
    """Loads, by ``id``, that only give the first guess for a compare-and-swap at the same address, which checks the
    guess. LLVM makes them for AMD if the hardware lacks an atomic."""
    accesses = [one for one in listing if one.events & (Event.LOAD | Event.STORE | Event.ATOMIC)]
    return {
        id(one)
        for one, following in pairwise(accesses)
        if Event.LOAD in one.events and Event.CAS in following.events and set(one.address) <= set(following.reads)
    }


def _ordered(one: Instruction, listing: Listing) -> bool:
    """Whether a load or store has an order of its own: it reads or writes a flag, not data."""
    words = set(one.text.split()) if listing.amd else set(one.op.split("."))
    return {"sc0", "sc1"} <= words if listing.amd else bool(words & {"acquire", "release", "relaxed", "volatile"})


def _after(one: Instruction, facts: Fact, listing: Listing, used: set[str] | None = None) -> Fact:
    """The facts after the instruction ``one``."""
    events = one.events
    if events & (Event.STORE | Event.ATOMIC | Event.BULK_STORE) and Event.RELEASE not in events:
        orders = listing.amd and Event.ATOMIC in events
        if not orders:
            facts |= Fact.STORED
            facts |= Fact.IN_FLIGHT if listing.amd else Fact.NONE
    if Event.BULK_STORE in events:
        facts |= Fact.BULK_IN_FLIGHT
    if Event.BULK_WAIT in events and Fact.BULK_IN_FLIGHT in facts:
        facts = facts & ~Fact.BULK_IN_FLIGHT | Fact.STORED
    if Event.WRITEBACK in events and Event.NARROW not in events and Fact.IN_FLIGHT in facts:
        facts = facts & ~Fact.IN_FLIGHT | Fact.WRITING_BACK
    if Event.DRAIN in events:
        facts &= ~Fact.WRITING_BACK
    if Event.ACQUIRE in events and (used is None or listing.amd or any(name in used for name in one.writes)):
        facts |= Fact.ACQUIRED | Fact.UNFENCED
    if Event.PROXY_FENCE in events and not one.guarded:
        facts &= ~Fact.UNFENCED
    if Event.BARRIER in events:
        behind = facts & (Fact.IN_FLIGHT | Fact.WRITING_BACK)
        facts &= ~(Fact.NEVER_MET | Fact.STORED | Fact.ACQUIRED | Fact.LEFT_BEHIND)
        facts |= Fact.LEFT_BEHIND if behind else Fact.NONE
    return facts


def _facts(listing: Listing, used: set[str] | None = None) -> Iterator[tuple[list[Instruction], Fact]]:
    """For each reachable block, its instructions that are events, and the facts that may hold at its beginning. No
    other instruction changes facts."""
    acting = [[one for one in block.instructions if one.events] for block in listing.blocks]
    begin: dict[int, Fact] = {0: Fact.NEVER_MET}
    todo = [0]
    while todo:
        number = todo.pop()
        facts = begin[number]
        for one in acting[number]:
            facts = _after(one, facts, listing, used)
        for after in listing.blocks[number].after:
            joined = begin.get(after, Fact.NONE) | facts
            if after not in begin or joined != begin[after]:
                begin[after] = joined
                todo.append(after)
    for number in sorted(begin):
        yield acting[number], begin[number]


def origins(listing: Listing, kinds: Event = _ACCESSES) -> dict[int, frozenset[str]]:
    """For every access of these ``kinds`` to global memory, by ``id``: the kernel arguments that its address was
    computed from. With fewer kinds, fewer registers are followed.

    A loaded value counts as computed from the same arguments as its address; a value from shared memory or a spill, as
    computed from all that was ever put there.
    """
    begin: dict[int, dict[str, frozenset[str]]] = {0: {}}
    found: dict[int, frozenset[str]] = {}
    nothing: frozenset[str] = frozenset()
    feeding = _feeding(listing, kinds)
    todo = [0]
    while todo:
        number = todo.pop()
        state = dict(begin[number])
        for one in listing.blocks[number].instructions:
            if one.events & kinds:
                found[id(one)] = nothing.union(*(state.get(name, nothing) for name in one.address))
            if not feeding & set(one.writes):
                continue
            if one.argument:
                for name, argument in zip(one.writes, one.argument, strict=True):
                    state[name] = frozenset({argument})
                continue
            value = nothing.union(*(state.get(name, nothing) for name in one.reads))
            for name in one.writes:
                state[name] = value | state.get(name, nothing) if one.guarded else value
        for after in listing.blocks[number].after:
            known = begin.get(after)
            joined = dict(known or {})
            for name, value in state.items():
                joined[name] = joined.get(name, nothing) | value
            if known is None or joined != known:
                begin[after] = joined
                todo.append(after)
    return found


def _feeding(listing: Listing, kinds: Event) -> set[str]:
    """Registers that the addresses of accesses of these ``kinds`` are computed from, on whatever path."""
    made: dict[str, set[str]] = {}
    for one in listing:
        for name in one.writes:
            made.setdefault(name, set()).update(one.reads)
    found: set[str] = set()
    todo = [name for one in listing if one.events & kinds for name in one.address]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += made.get(name, ())
    return found


ALL = {
    "publication": publication,
    "consumption": consumption,
    "proxy": proxy,
    "scope": scope,
    "bounds": bounds,
    "agreement": agreement,
    "timing": timing,
}
"""The rules that hold for every kernel; ``proxy`` must also be told what nobody writes."""


def broken(listing: Listing, unwritten: frozenset[str]) -> list[str]:
    """The violations of any of these rules; ``unwritten``: see :func:`proxy`."""
    checks = ALL | {"proxy": partial(proxy, unwritten=unwritten)}
    return [f"{rule}: {words}" for rule, check in checks.items() for words in check(listing)]
