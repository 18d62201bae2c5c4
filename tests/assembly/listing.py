"""Reads PTX and AMD assembly into basic blocks of instructions, each with what it does to memory.

The reader knows the instructions that Triton 3.6 to 3.9 emits for our targets. It refuses control flow that it does
not know (computed jumps), and assumes that every branch can go both ways. On AMD a branch over code with an empty
execution mask is a branch like any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import TypeVar

T = TypeVar("T")


class Event(Flag):
    """What an instruction does, as far as it matters to the rules. ``LOAD`` and ``STORE`` are of global memory."""

    NONE = 0
    LOAD = auto()
    STORE = auto()
    WIDE = auto()
    """A load or store of 16 bytes per thread."""
    ATOMIC = auto()
    CAS = auto()
    ACQUIRE = auto()
    RELEASE = auto()
    NARROW = auto()
    """An atomic, acquire, release or fence at less than system scope."""
    BARRIER = auto()
    """Waits for all threads of the program."""
    CLOCK = auto()
    BULK_LOAD = auto()
    """A load by TMA, from global to shared memory."""
    BULK_STORE = auto()
    BULK_WAIT = auto()
    """Waits for whole bulk stores, not only until their source has been read."""
    PROXY_FENCE = auto()
    """Orders accesses to global memory before the bulk loads after it."""
    WRITEBACK = auto()
    """AMD: writes this wave's stores back through L2 to system scope."""
    DRAIN = auto()
    """AMD: waits for this wave's memory operations, including write-backs."""
    SCALAR_DRAIN = auto()
    """AMD: waits for this wave's scalar loads, including reads of the clock."""


@dataclass
class Instruction:
    """One instruction: registers written and read (for stores and loads, of address and data).

    Kept apart are ``decided_by``, which decides whether or where it acts (a predicate, condition codes, the execution
    mask), and ``decides``, the condition codes and mask that it sets besides its result.
    """

    text: str
    op: str
    events: Event
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    address: tuple[str, ...] = ()
    guarded: bool = False
    jumps_to: str | None = None
    falls_through: bool = True
    decided_by: tuple[str, ...] = ()
    decides: tuple[str, ...] = ()
    argument: tuple[str, ...] = ()
    """The kernel argument in each written register, if this reads arguments."""
    lane: str = ""
    """AMD: the lane of a vector register, as ``v9, 5``, to which this spills a scalar, or from which it restores one,
    whatever the execution mask."""

    @property
    def spills(self) -> bool:
        """Whether this writes ``lane``."""
        return bool(self.lane) and self.op.startswith("v_writelane")


@dataclass
class Block:
    """Instructions that run one after the other."""

    instructions: list[Instruction] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)


@dataclass
class Listing:
    """A kernel's blocks, beginning with its entry; whether the program is one warp or wave; and the arguments that are
    TMA descriptors, in their order."""

    amd: bool
    blocks: list[Block]
    single: bool
    descriptors: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Instruction]:
        for block in self.blocks:
            yield from block.instructions


AMD_BEFORE_ARGUMENTS = {
    ".amdhsa_user_sgpr_private_segment_buffer": 4,
    ".amdhsa_user_sgpr_dispatch_ptr": 2,
    ".amdhsa_user_sgpr_queue_ptr": 2,
}
"""Inputs that a kernel may request, and the number of registers that each takes before those of the arguments'
address."""


class UnknownAssembly(Exception):
    """The reader found something that it does not know."""


def read(text: str) -> Listing:
    """The listing of a kernel, PTX or AMD."""
    if ".amdgcn_target" in text:
        size = re.search(r"max_flat_workgroup_size:\s*(\d+)", text)
        blocks = _blocks(_amd_lines(text))
        _find_arguments(blocks, sum(size for one, size in AMD_BEFORE_ARGUMENTS.items() if f"{one} 1\n" in text))
        return Listing(True, blocks, size is not None and int(size[1]) <= 64)
    size = re.search(r"\.reqntid\s+(\d+)", text)
    descriptors = tuple(f"argument {number}" for number in PTX_DESCRIPTOR.findall(text))
    one_warp = size is not None and int(size[1]) <= 32
    return Listing(False, _blocks(_ptx_statements(text, one_warp)), one_warp, descriptors)


def _blocks(items: Iterator[str | Instruction]) -> list[Block]:
    """Blocks made of labels (strings) and instructions, linked by jumps. A label may occur several times, as in braces
    of PTX: a jump goes to the last one before it, if there is one."""
    blocks, labels = [Block()], dict[str, list[int]]()
    for item in items:
        if isinstance(item, str):
            if blocks[-1].instructions:
                blocks.append(Block())
            labels.setdefault(item, []).append(len(blocks) - 1)
        else:
            blocks[-1].instructions.append(item)
            if item.jumps_to is not None or not item.falls_through:
                blocks.append(Block())
    for number, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else None
        if last is not None and last.jumps_to is not None:
            places = labels[last.jumps_to]
            block.after.append(max((place for place in places if place <= number), default=places[0]))
        if (last is None or last.falls_through) and number + 1 < len(blocks):
            block.after.append(number + 1)
    for number, block in enumerate(blocks):
        for after in block.after:
            blocks[after].before.append(number)
    return blocks


PTX_REGISTER = re.compile(r"%[a-z_]\w*(?:\.\w+)?")
PTX_DESCRIPTOR = re.compile(r"\.param \.align 64 \.b8 \w+_param_(\d+)\[128\]")
PTX_LABEL = re.compile(r"^(\$?\w+):\s*")
PTX_NO_RESULT = {
    "st",
    "red",
    "bar",
    "barrier",
    "cp",
    "bra",
    "ret",
    "fence",
    "membar",
    "mbarrier",
    "prefetch",
    "stmatrix",
}


def _ptx_statements(text: str, one_warp: bool) -> Iterator[str | Instruction]:
    body = text[text.index("\n{") + 2 :].split("$L__func_end0")[0]
    statement = ""
    for raw in body.splitlines():
        line = raw.split("//")[0].strip()
        if line.startswith("."):
            continue
        label = PTX_LABEL.match(line)
        if label and not statement:
            yield label[1]
            line = line[label.end() :]
        *whole, rest = (statement + " " + line).split(";")
        for one in whole:
            one = one.strip().lstrip("{}").strip()
            if one and not one.startswith("."):
                yield _ptx_instruction(one, one_warp)
        statement = rest.strip().lstrip("{}").strip() if rest.strip() in ("{", "}") else rest.strip()


def _ptx_instruction(text: str, one_warp: bool) -> Instruction:
    text = " ".join(text.split())
    guard, rest = text.split(" ", 1) if text.startswith("@") else ("", text)
    op, _, operands = rest.partition(" ")
    parts = op.split(".")
    if parts[0] == "brx":
        raise UnknownAssembly(text)
    found = Instruction(text, op, _ptx_events(parts, operands, one_warp), guarded=bool(guard))
    found.decided_by = tuple(PTX_REGISTER.findall(guard))
    if parts[0] == "bra":
        found.jumps_to, found.falls_through = operands.strip(), bool(guard)
        return found
    if parts[0] in ("ret", "exit", "trap"):
        found.falls_through = bool(guard)
        return found
    first, others = _split_result(operands)
    if parts[0] in PTX_NO_RESULT:
        first, others = "", operands
    found.writes = tuple(PTX_REGISTER.findall(first))
    found.reads = tuple(PTX_REGISTER.findall(others))
    found.address = tuple(PTX_REGISTER.findall(" ".join(re.findall(r"\[([^\]]*)\]", others))))
    if found.events & (Event.BULK_LOAD | Event.BULK_STORE):
        found.address = _bulk_address(others, Event.BULK_LOAD in found.events)
    shared = any(part.startswith("shared") for part in parts) or parts[0] in ("ldmatrix", "stmatrix")
    if shared and parts[0] in ("st", "stmatrix"):
        found.writes, found.guarded = ("shared",), True
    elif shared and parts[0] in ("ld", "ldmatrix"):
        found.reads += ("shared",)
    number = re.search(r"param_(\d+)", others)
    if parts[:2] == ["ld", "param"] or (parts[0] == "mov" and number):  # for a descriptor this is its address
        found.argument = tuple(f"argument {number[1]}" if number else "argument" for _ in found.writes)
    return found


def _bulk_address(operands: str, load: bool) -> tuple[str, ...]:
    """The register with the address of global memory, or of a descriptor; coordinates are left out."""
    places = re.findall(r"\[([^\]]*)\]", operands)
    return tuple(PTX_REGISTER.findall(places[1 if load else 0])[:1])


def _split_result(operands: str) -> tuple[str, str]:
    """The first operand, which may be a vector in braces, and the others."""
    if operands.startswith("{"):
        end = operands.index("}") + 1
        return operands[:end], operands[end:]
    first, _, others = operands.partition(",")
    return first, others


def _ptx_events(parts: list[str], operands: str, one_warp: bool) -> Event:
    kind, words = parts[0], set(parts[1:])
    shared = any(part.startswith("shared") for part in parts)
    events = Event.NONE
    if kind in ("bar", "barrier"):
        whole = operands.strip() == "0" and "sync" in words
        return Event.BARRIER if whole or ("warp" in words and one_warp) else events
    if "%globaltimer" in operands:
        return Event.CLOCK
    if parts[:3] == ["cp", "async", "bulk"]:
        if "wait_group" in words:
            return Event.BULK_WAIT if "read" not in words and operands.strip() == "0" else events
        if "tensor" in words or "global" in words:
            to_global = parts.index("global") < min(i for i, part in enumerate(parts) if part.startswith("shared"))
            return Event.BULK_STORE if to_global else Event.BULK_LOAD
        return events
    if parts[:2] == ["cp", "async"]:
        return Event.LOAD if "global" in words else events
    if kind in ("fence", "membar"):
        if "proxy" in words:
            return Event.PROXY_FENCE if "async" in words and not shared else events
        return Event.NARROW if words & {"gpu", "cta", "cluster", "gl"} and "mbarrier_init" not in words else events
    if shared or kind not in ("ld", "st", "atom", "red") or words & {"param", "local", "const"}:
        return events
    if kind in ("atom", "red"):
        events |= Event.ATOMIC
        if "cas" in words:
            events |= Event.CAS
    else:
        events |= Event.LOAD if kind == "ld" else Event.STORE
        width = next((int(part[1:]) for part in parts if re.fullmatch(r"v\d", part)), 1)
        bits = int(re.sub(r"\D", "", parts[-1]) or 0)
        if width * bits == 128:
            events |= Event.WIDE
    ordered = kind in ("atom", "red") or words & {"acquire", "release", "relaxed", "acq_rel"}
    if ordered and "sys" not in words:
        events |= Event.NARROW
    if words & {"acquire", "acq_rel"}:
        events |= Event.ACQUIRE
    if words & {"release", "acq_rel"}:
        events |= Event.RELEASE
    return events


AMD_REGISTER = re.compile(r"\b([vsa])(\d+)\b|\b([vsa])\[(\d+):(\d+)\]|\b(vcc|exec|m0)(?:_lo|_hi)?\b")
AMD_SETS_SCC = re.compile(
    r"s_(add|sub|min|max|and|or|xor|not|nand|nor|xnor|lshl|lshr|ashr|bfe|abs|bcnt|cmp|bitcmp|quadmask|wqm)"
)
AMD_READS_SCC = re.compile(r"s_(cbranch_scc|cselect|cmov|addc|subb)")
AMD_NO_RESULT = re.compile(
    r"s_(barrier|waitcnt|nop|endpgm|cbranch|branch|cmp|bitcmp|setprio|sleep|sethalt)|ds_write|buffer_(wbl2|inv)"
)
AMD_TWO_RESULTS = re.compile(r"_(add|sub|subb|addc)\w*_co_|^v_mad_[iu]64|^v_div_scale")
AMD_FAR = re.compile(r"\((\.LBB\w+)-\.Lpost_getpc\d+\)")
"""The distance of a label: LLVM adds it to the program counter for a jump of more than 128 KiB."""


def _amd_lines(text: str) -> Iterator[str | Instruction]:
    body = text[re.search(r"^\w+:", text, re.M).end() :].split(".Lfunc_end0:")[0]  # type: ignore[union-attr]
    inline, far = False, ""
    for raw in body.splitlines():
        inline = (inline or "#ASMSTART" in raw) and "#ASMEND" not in raw
        for line in raw.split("//")[0].split(";")[0].split("\\n"):
            label = re.match(r"^(\.LBB\w+):", line)
            if distance := AMD_FAR.search(line):
                far = distance[1]
            if label:
                yield label[1]
            elif far and line.strip().startswith("s_setpc_b64"):
                yield _amd_instruction(f"s_branch {far}", inline)
                far = ""
            elif line.strip() and not line.strip().startswith(".") and not line.strip().endswith(":"):
                yield _amd_instruction(line.strip(), inline)


def _amd_registers(text: str) -> tuple[str, ...]:
    found: list[str] = []
    for one, number, many, low, high, special in AMD_REGISTER.findall(text):
        if one:
            found.append(one + number)
        elif many:
            found += [f"{many}{index}" for index in range(int(low), int(high) + 1)]
        else:
            found.append(special)
    return tuple(found)


def _amd_instruction(text: str, inline: bool) -> Instruction:
    text = " ".join(text.split())
    op, _, operands = text.partition(" ")
    if op.startswith(("s_setpc", "s_swappc", "s_call")):
        raise UnknownAssembly(text)
    found = Instruction(text, op, _amd_events(op, text, inline))
    found.decided_by, found.decides = _amd_conditions(op)
    if op.startswith(("s_branch", "s_cbranch")):
        found.jumps_to, found.falls_through = operands.strip(), op != "s_branch"
        return found
    if op == "s_endpgm":
        found.falls_through = False
        return found
    words = [word.strip() for word in operands.split(",")]
    memory = op.startswith(("global_", "buffer_", "flat_", "scratch_"))
    no_result = bool(AMD_NO_RESULT.match(op)) or "_store" in op or ("_atomic" in op and "sc0" not in text.split())
    into_shared = memory and "_load" in op and "lds" in text.split()
    results = 0 if no_result or into_shared else 2 if AMD_TWO_RESULTS.search(op) else 1
    found.writes = _amd_registers(" , ".join(words[:results]))
    found.reads = _amd_registers(" , ".join(words[results:]))
    found.address = found.reads
    if "_store" in op and op.startswith("buffer_"):
        found.address = _amd_registers(" , ".join(words[1:]))
    elif "_store" in op:
        found.address = _amd_registers(" , ".join([words[0], *words[2:]]))
    if op.startswith("ds_write") or into_shared:
        found.writes, found.guarded = ("shared",), True
    elif op.startswith("ds_"):
        found.reads += ("shared",)
    elif op.startswith("scratch_store"):
        found.writes, found.guarded = ("scratch",), True
    elif op.startswith("scratch_load"):
        found.reads += ("scratch",)
    if op.startswith("v_writelane"):
        found.guarded = True
    if op.startswith(("v_readlane", "v_writelane")) and words[2].isdecimal():
        found.lane = f"{words[0 if found.guarded else 1]}, {words[2]}"
    return found


def _amd_conditions(op: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The conditions that decide about an instruction, and those that it sets, without naming them."""
    if AMD_READS_SCC.match(op):
        reads = ["scc"]
    elif op.startswith("s_cbranch_"):
        reads = ["vcc" if "vcc" in op else "exec"]
    else:
        reads = [] if op.startswith("s_") else ["exec"]
    writes = ["scc"] if AMD_SETS_SCC.match(op) else []
    if "saveexec" in op or op.startswith("v_cmpx"):
        writes.append("exec")
    return tuple(reads), tuple(writes)


def _amd_events(op: str, text: str, inline: bool) -> Event:
    bits = set(text.split()) & {"sc0", "sc1"}
    if op == "s_barrier":
        return Event.BARRIER
    if op == "s_memrealtime":
        return Event.CLOCK
    if op == "s_waitcnt":
        events = Event.DRAIN if "vmcnt(0)" in text else Event.NONE
        return events | (Event.SCALAR_DRAIN if "lgkmcnt(0)" in text else Event.NONE)
    if op == "buffer_wbl2":
        scope = Event.NONE if len(bits) == 2 else Event.NARROW
        return scope | Event.WRITEBACK | (Event.NONE if inline else Event.RELEASE)
    if op == "buffer_inv":
        return Event.ACQUIRE | (Event.NONE if len(bits) == 2 else Event.NARROW)
    if op.startswith(("s_load", "s_buffer_load")):
        return Event.LOAD  # unless it reads arguments: see _find_arguments
    if not op.startswith(("global_", "buffer_", "flat_")):
        return Event.NONE
    if "_atomic" in op:
        scope = Event.NONE if "sc1" in bits else Event.NARROW
        return scope | Event.ATOMIC | (Event.CAS if "cmpswap" in op else Event.NONE)
    events = Event.LOAD if "_load" in op else Event.STORE
    if op.endswith("dwordx4"):
        events |= Event.WIDE
    return events | (Event.NARROW if len(bits) == 1 else Event.NONE)


def on_every_path(
    blocks: list[Block], entry: dict[str, T], update: Callable[[Instruction, dict[str, T]], None]
) -> dict[int, dict[str, T]]:
    """For each block that is reached, what holds where it begins, by register or lane: what ``update`` has made of
    ``entry`` on every path to it."""
    begin = {0: entry}
    todo = [0]
    while todo:
        number = todo.pop()
        held = dict(begin[number])
        for one in blocks[number].instructions:
            update(one, held)
        for after in blocks[number].after:
            known = begin.get(after, held)
            joined = {name: what for name, what in held.items() if known.get(name) == what}
            if begin.get(after) != joined:
                begin[after] = joined
                todo.append(after)
    return begin


def _find_arguments(blocks: list[Block], first: int) -> None:
    """Distinguish AMD's loads of kernel arguments, which nobody writes, from those of global memory. Their address is
    the value that registers ``first`` and the next one had at the entry, on every path; it may have been copied or
    spilled since."""
    begin = on_every_path(blocks, {f"s{first}": 0, f"s{first + 1}": 1}, _move)
    for number, halves in begin.items():
        for one in blocks[number].instructions:
            if one.op.startswith("s_load") and [halves.get(name) for name in one.reads[:2]] == [0, 1]:
                one.events &= ~Event.LOAD
                offset = one.text.split(",")[2].split()[0]
                if re.match(r"0x|\d", offset):
                    words = (int(offset, 0) // 4 + index for index in range(len(one.writes)))
                    one.argument = tuple(f"argument {word // 2}" for word in words)
            _move(one, halves)


def _move(one: Instruction, halves: dict[str, int]) -> None:
    """Update ``halves`` for the instruction ``one``: which half of the arguments' address a register, or a lane of one,
    holds."""
    sources: tuple[str, ...] = ()
    if one.op.startswith("s_mov_b"):
        sources, targets = one.reads, one.writes
    elif one.spills:
        sources, targets = one.reads[:1], (one.lane,)
    elif one.lane:
        sources, targets = (one.lane,), one.writes
    moved = [halves.get(name) for name in sources]
    for name in one.writes:
        lanes = () if one.spills else [held for held in halves if held.startswith(f"{name}, ")]
        for lost in (name, *lanes):
            halves.pop(lost, None)
    if sources:
        for name, half in zip(targets, moved, strict=False):
            halves.pop(name, None)
            if half is not None:
                halves[name] = half
