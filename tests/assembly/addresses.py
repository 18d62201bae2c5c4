"""Addresses of peers' memory on AMD. If a tensor has no more than 2 GiB, Triton computes offsets to its pointer in 31
bits there, and cuts off the rest; but the distance from one heap to another is larger."""

from __future__ import annotations

import re

_VALUE = re.compile(r"%[\w.$-]+(?:#\d+)?")
_MADE = re.compile(r"^\s*((?:%[\w.$-]+(?::\d+)?(?:, )?)+) = \"?([\w.]+)")
_CARRIED = re.compile(r"(%[\w.$-]+) = (%[\w.$-]+(?:#\d+)?)")
_LOADS = ("tt.load", "amdg.buffer_load", "amdgpu.buffer_load")
_OTHERS = (*_LOADS, "arith.cmpi", "tt.atomic_rmw", "tt.atomic_cas", "scf.if", "scf.while")
"""Operations that turn an address into another kind of value, or whose results are not followed."""


def distances(ttgir: str) -> tuple[int, list[str]]:
    """How many distances between heaps a kernel computes, each as the difference of two addresses that it has loaded;
    and the lines that cut off half of a value computed from such a distance."""
    loaded: set[str] = set()
    far: set[str] = set()
    found, cut = 0, []
    for line in ttgir.splitlines():
        text = line.split(" loc(")[0]
        if (made := _MADE.match(text)) is None:
            continue
        names, operation, rest = [name.split(":")[0] for name in made[1].split(", ")], made[2], text[made.end() :]
        read = _VALUE.findall(rest)
        both_loaded, of_far = loaded.issuperset(read), far.intersection(read)
        for known in (loaded, far):  # values of another branch may have the same names
            known.difference_update([value for value in known if value.split("#")[0] in names])
        if operation in _LOADS and "i64" in text:
            loaded.update(names)
        elif operation == "arith.subi" and both_loaded:
            found += 1
            far.update(names)
        elif operation == "scf.for":
            carried = _CARRIED.findall(rest.partition("iter_args(")[2])
            for index, (inside, before) in enumerate(carried):
                if before in of_far:
                    far.update((inside, names[0] if len(carried) == 1 else f"{names[0]}#{index}"))
        elif operation not in _OTHERS and of_far:
            if operation == "arith.trunci":
                cut.append(text.strip())
            far.update(names)
    return found, cut
