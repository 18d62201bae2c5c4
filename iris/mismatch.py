"""The text about calls that differ between ranks: which ranks made which call, in short, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from iris.errors import ranks_text

_LONG = 200
"""Calls with more characters than this are shortened."""
_ALIKE = "Every rank must make the same Iris calls, with the same sizes, in the same order."
_PLACED = "Peers touch this operand: pass the same slice of the same ctx.empty on all ranks."
_PADDED = "Ranks' parts must be equally large: pad the shorter ones with zeros."
_SIZES = re.compile(r"\(…(, [mnk]=\d+)+\)$")
_PLACES = re.compile(r"\(…(, \w+ (at heap offset|with strides) \w+)+\)$")
_FIRST = 5
"""How many arguments of a long call are shown; for an op these are its name, sizes and dtype."""


def told(calls: Mapping[int, str]) -> str:
    """Which ranks made which call, and what to do about it."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(calls):
        ranks.setdefault(calls[rank], []).append(rank)
    whose = zip(ranks.values(), _without_the_common(list(ranks)), strict=True)
    said = "; ".join(f"{ranks_text(who)}: {what}" for who, what in whose)
    return f"ranks made different calls: {said}. {_remedy(said)}"


def _without_the_common(calls: Sequence[str]) -> Sequence[str]:
    """``calls``; long calls with only the arguments that differ, or with only the first ones if functions differ."""
    names, parts = {call.split("(")[0] for call in calls}, [call.split(", ") for call in calls]
    if len(names) > 1:
        return [_begun(call) for call in calls]
    if max(map(len, calls)) <= _LONG or len({len(arguments) for arguments in parts}) > 1:
        return calls
    differing = [values for values in zip(*parts, strict=True) if len(set(values)) > 1]
    return [f"{min(names)}(…, {', '.join(map(_of_its_own, row))})" for row in zip(*differing, strict=True)]


def _begun(call: str) -> str:
    """``call``; if it is long, with only its first arguments."""
    if len(call) <= _LONG:
        return call
    name, first = call.split("(")[0], map(_of_its_own, call.split(", ")[:_FIRST])
    return f"{name}({', '.join(one for one in first if one != f'op={name!r}')}, …)"


def _remedy(said: str) -> str:
    """What to do about the differences in ``said``; calls of one op may differ in one respect with its own remedy."""
    for differ, remedy in ((_PLACES, _PLACED), (_SIZES, _PADDED)):
        if all(differ.search(one) for one in said.split("; ")):
            return remedy
    return _ALIKE


def _of_its_own(argument: str) -> str:
    """``argument`` without the brackets that enclose it and the names before these."""
    return argument.rpartition("(")[2].rstrip(")")
