"""Every kernel of Iris, compiled for every target, obeys the rules; and no kernel is left out."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import rules
from case import CUDA, EVERYTHING, EVERYWHERE, HIP, OLD, Case, turns_of
from compiler import TARGETS, VERSION
from kernels import CASES, EXAMPLES, ROOT
from listing import Event, read
from matmuls import matmuls
from triton.runtime.jit import JITFunction

from iris.device.matmul import matmul_kernel


def pairs(cases: Iterable[Case]) -> set[tuple[str, str]]:
    """Names of cases, and the targets of each."""
    return {(case.name, one) for case in cases for one in case.targets}


MATMULS = pairs(matmuls(OLD))
PAIRS = [
    (name, one)
    for number, (name, case) in enumerate(CASES.items())
    for one in case.targets
    if EVERYTHING or ((name, one) in MATMULS if case.kernel is matmul_kernel else one in turns_of(number, case.targets))
]
"""With ``scripts/assembly --all`` all kernels on all targets. Otherwise one of its two Tritons compiles a kernel for a
GPU of NVIDIA's, and the other for one of AMD's. Cases of the matmul kernel take turns separately."""

COMPARES_ONE_WORD = {"compare_and_swap_word", "05_all_kinds"}


def limits(name: str, target_name: str) -> list[str]:
    """Errors of the compiler itself in a case: Triton 3.6 compiles the compare-and-swap of a single word to agent scope
    on AMD, whatever the requested scope."""
    if VERSION == (3, 6) and target_name.startswith("gfx") and name in COMPARES_ONE_WORD:
        return ["buffer_wbl2 sc1", "global_atomic_cmpswap", "buffer_inv sc1"]
    return []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "target_name"), PAIRS, ids=[f"{name}-{one}" for name, one in PAIRS])
def test_rules(name: str, target_name: str, compiled: dict[tuple[str, str], Future[str]]) -> None:
    case = CASES[name]
    listing = read(compiled[name, target_name].result())
    found = Event.NONE
    for one in listing:
        found |= one.events
    missing = case.has & ~found
    if listing.amd and listing.single:
        missing &= ~Event.BARRIER
    assert not missing
    assert not listing.amd or any(one.argument for one in listing)
    wrong = rules.broken(listing, case.unwritten_in(listing))
    if case.wide:
        wrong += rules.width(listing, case.wide)
    known = limits(name, target_name)
    assert len(wrong) == len(known)
    for words, part in zip(wrong, known, strict=True):
        assert words.startswith(f"scope: less than system scope: {part}")


def defined(source: str) -> set[str]:
    """Names of the functions in ``source`` that are decorated with ``triton.jit``."""
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    return {one.name for one in functions if any("jit" in ast.unparse(decorator) for decorator in one.decorator_list)}


def calls(kernel: JITFunction[Any]) -> Iterator[JITFunction[Any]]:
    """The device functions that ``kernel`` names."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))):
        if isinstance(node, ast.Name | ast.Attribute):
            value: Any = kernel.fn.__globals__.get(ast.unparse(node).split(".")[0])
            for part in ast.unparse(node).split(".")[1:]:
                value = getattr(value, part, None)
            if isinstance(value, JITFunction):
                yield value


def reached(names: Iterable[str]) -> set[tuple[str, str]]:
    """Module and name of every function that the cases ``names`` compile, themselves or by calling it."""
    found: set[tuple[str, str]] = set()
    todo = [one for name in names for one in (CASES[name].kernel, *CASES[name].constants.values())]
    while todo:
        one = todo.pop()
        if isinstance(one, JITFunction) and (one.fn.__module__, one.fn.__name__) not in found:
            found.add((one.fn.__module__, one.fn.__name__))
            todo += calls(one)
    return found


def modules() -> dict[str, Path]:
    """Every module that may define device functions, by name."""
    ours = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "iris").rglob("*.py")}
    return ours | {f"example_{name}": ROOT / "examples" / f"{name}.py" for name in EXAMPLES}


@cache
def there() -> set[tuple[str, str]]:
    """Module and name of every device function."""
    return {(module, name) for module, path in modules().items() for name in defined(path.read_text())}


def escaped(names: Iterable[str]) -> set[tuple[str, str]]:
    """Device functions that the cases ``names`` do not reach."""
    return there() - reached(names)


def test_no_function_escapes() -> None:
    assert escaped(CASES) == set()


def test_an_escape_is_found() -> None:
    without = [name for name in CASES if name not in ("bulk_signal", "06_pass_messages")]
    assert escaped(without) == {
        ("iris.device.arch", "wait_bulk_stores"),
        *(("example_06_message_passing", name) for name in ("produce", "consume", "pass_messages")),
    }


def test_every_example_is_looked_at() -> None:
    assert set(EXAMPLES) == {path.stem for path in (ROOT / "examples").glob("*.py")}


def test_every_target_is_compiled_for() -> None:
    assert {one for _, one in PAIRS} == set(TARGETS)


def test_two_tritons_compile_a_kernel_for_both_vendors_and_each_does_for_all_gpus_by_turns() -> None:
    for number in range(8):
        for turn in range(4):
            (one,), (other,) = (turns_of(number, EVERYWHERE, old, turn) for old in (0, 1))
            assert (one in HIP) != (other in HIP)
        for old in (0, 1):
            assert {one for turn in range(4) for one in turns_of(number, EVERYWHERE, old, turn)} == set(TARGETS)
            assert {one for turn in range(4) for one in turns_of(number, CUDA, old, turn)} == set(CUDA)
    assert all(len(turns_of(0, case.targets, old)) == 1 for case in CASES.values() for old in (0, 1))


def test_every_matmul_has_its_turn() -> None:
    """It has one with each Triton; and each op is compiled for both vendors in every turn."""
    for old in (0, 1):
        by_turns = [pairs(matmuls(old, turn)) for turn in range(8)]
        assert set().union(*by_turns) == pairs(matmuls())
        assert max(map(len, by_turns)) < len(pairs(matmuls())) * 0.4
    ops = {name.split("-")[1] for name, _ in pairs(matmuls())}
    for turn in range(4):
        both = {(name.split("-")[1], one in HIP) for name, one in pairs(matmuls(0, turn)) | pairs(matmuls(1, turn))}
        assert both == {(op, amd) for op in ops for amd in (False, True)}
