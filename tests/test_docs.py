"""The docs agree with the code: the reference is current, links lead somewhere, whole scripts run."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from doc_scripts import run_together
from ops_inputs import some
from ranks import NAMES_SHARED_MEMORY, free_port
from warm import python

import iris
from iris.bench.cases.operands import problem_of
from iris.cli import COMMANDS
from iris.ops import FusedConfig
from iris.ops.room import room
from iris.ops.workspace import MIN_FLAGS

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "make_reference"
DOCS = sorted((ROOT / "docs").glob("*.md"))
RESULTS = ROOT / "results"
MEASUREMENTS = sorted((ROOT / "docs" / "performance").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS, *MEASUREMENTS, RESULTS / "README.md"]
FOLDERS = "(?:benchmark|dataset|docs|examples|iris|requirements|results|scripts|tests)"
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
TIMEOUT_S = 100


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """scripts/make_reference as a module."""
    loader = importlib.machinery.SourceFileLoader("iris_make_reference", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    keep, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.modules[loader.name] = module
    loader.exec_module(module)
    sys.dont_write_bytecode = keep
    return module


@pytest.fixture(scope="module")
def reference(maker: ModuleType) -> str:
    """The text that docs/reference.md should have."""
    return str(maker.reference())


def bare(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCED.sub("", page.read_text())


def test_the_reference_is_what_the_docstrings_say(maker: ModuleType, reference: str) -> None:
    assert maker.TARGET.read_text() == reference, "run scripts/make_reference"


def test_check_fails_on_a_reference_that_is_out_of_date(
    maker: ModuleType, reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "reference.md"
    old.write_text(reference + "more\n")
    monkeypatch.setattr(maker, "TARGET", old)
    monkeypatch.setattr(sys, "argv", ["make_reference", "--check"])
    with pytest.raises(SystemExit, match="run scripts/make_reference"):
        maker.main()
    assert old.read_text().endswith("more\n")
    monkeypatch.setattr(sys, "argv", ["make_reference"])
    maker.main()
    assert old.read_text() == reference


@pytest.mark.parametrize("name", [f"iris.{name}" for name in iris.__all__ if name not in ("ops", "peer")])
def test_every_public_name_has_an_entry(reference: str, name: str) -> None:
    assert f"\n### `{name}`\n" in reference


@pytest.mark.parametrize("name", iris.ops.__all__)
def test_every_name_of_ops_has_an_entry(reference: str, name: str) -> None:
    assert f"\n### `iris.ops.{name}`\n" in reference


@pytest.mark.parametrize("module", ["chunk", "schedule", "stream_k", "sync", "tile", "trace", "turnstile", "words"])
def test_every_function_that_a_part_may_call_has_an_entry(maker: ModuleType, reference: str, module: str) -> None:
    tree = maker.tree_of(f"iris.device.{module}")
    called = [node for node in tree.body if isinstance(node, ast.FunctionDef) and maker.is_jit(node)]
    names = [node.name for node in called if not node.name.startswith("_") and not node.name.endswith("_kernel")]
    entries = re.findall(r"^#+ `iris\.(?:device\.\w+\.)?(\w+)`$", reference, re.MULTILINE)
    assert names
    assert set(names) <= set(entries)


def test_an_argument_of_run_is_described(reference: str) -> None:
    """Arguments that cannot be guessed must be: with the wrong kind of bias the kernel reads memory beyond it."""
    (entry,) = re.findall(r"^#### `iris.ops.launching.run`\n(.*?)^##", reference, re.DOTALL | re.MULTILINE)
    assert all(f"- `{name}`: " in entry for name in ("own", "bias_is", "workspace", "gathered", "slots"))


def test_no_heading_of_the_reference_comes_twice(reference: str) -> None:
    titles = re.findall(r"^##+ (.*)$", FENCED.sub("", reference), re.MULTILINE)
    assert [title for title in titles if titles.count(title) > 1] == []


def test_every_method_of_the_context_has_an_entry(reference: str) -> None:
    public = {name for name in dir(iris.Iris) if not name.startswith("_")}
    entries = re.findall(r"^#### `ctx\.(\w+)`$", reference, re.MULTILINE)
    assert len(entries) == len(set(entries))
    assert public <= set(entries)


def test_every_entry_says_something(reference: str) -> None:
    """No heading is followed by a bare signature and the next heading."""
    entries = re.split(r"^(#+ `.*`)$", reference, flags=re.MULTILINE)[1:]
    silent = [
        heading for heading, body in zip(entries[::2], entries[1::2], strict=True) if not FENCED.sub("", body).strip()
    ]
    assert silent == []


def test_every_environment_variable_is_described(maker: ModuleType) -> None:
    read = {
        variable
        for file in maker.PACKAGE.rglob("*.py")
        for variable in re.findall(r"\b(?:IRIS(?:_[A-Z]+)+|(?:NO|FORCE)_COLOR)\b", file.read_text())
    }
    assert read == set(maker.ENVIRONMENT)


def headings(page: Path, maker: ModuleType) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", bare(page), re.MULTILINE)
    return {maker.anchor(title) for title in titles}


def links(text: str) -> list[str]:
    """Targets of the links and pictures in a Markdown text."""
    return re.findall(r"\]\(([^)\s]+)\)", text)


def broken(page: Path, targets: list[str], maker: ModuleType) -> list[str]:
    """The ``targets`` that lead from ``page`` to no file, or to no heading of a file."""
    wrong = []
    for target in targets:
        if target.startswith(("https://", "http://")):
            continue
        name, _, fragment = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (fragment and fragment not in headings(file, maker)):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path, maker: ModuleType) -> None:
    assert broken(page, links(bare(page)), maker) == []


def test_a_broken_link_is_found(maker: ModuleType) -> None:
    text = "[a](no-such.md) [b](design.md) [c](design.md#no-such-heading) [d](https://example.org) [e](#reference)"
    assert broken(ROOT / "docs" / "reference.md", links(text), maker) == ["no-such.md", "design.md#no-such-heading"]


def test_performance_links_to_every_file_of_measurements() -> None:
    page = ROOT / "docs" / "performance.md"
    linked = [page.parent / target for target in links(bare(page)) if target.startswith("performance/")]
    assert MEASUREMENTS and set(MEASUREMENTS) <= set(linked)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_pages_are_of_a_size_that_people_read(page: Path) -> None:
    """GitHub shows no page of much more than twice this size."""
    assert page.stat().st_size < 200_000


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_files_named_in_prose_exist(page: Path) -> None:
    """These are paths in backquotes, such as `iris/mesh.py`."""
    named = re.findall(rf"`({FOLDERS}/[\w./-]*)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_file_of_results_has_a_line() -> None:
    """This is about the folders by date; programs of the README write into others."""
    lines = (RESULTS / "README.md").read_text().splitlines()
    named = [name for line in lines for name in re.findall(r"^\| `([\w.-]+)` \|", line)]
    assert sorted(named) == sorted(file.name for file in RESULTS.glob("20*/*"))


def wrong_commands(text: str) -> list[str]:
    """Paths that lead nowhere, and commands of Iris that do not exist, in the ``sh`` blocks of a Markdown text."""
    wrong = []
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        wrong += [path for path in re.findall(rf"(?<!\S){FOLDERS}/[\w./-]*", block) if not (ROOT / path).exists()]
        wrong += [name for name in re.findall(r"python -m iris (\w+)", block) if name not in COMMANDS]
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_commands_name_what_there_is(page: Path) -> None:
    assert wrong_commands(page.read_text()) == []


def test_a_wrong_command_is_found() -> None:
    text = "```sh\npython examples/no_such.py --flag\npython -m iris swim\npython -m iris info\nls iris/ops\n```\n"
    assert wrong_commands(text) == ["examples/no_such.py", "swim"]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def whole_scripts(page: Path) -> list[str]:
    """The ``python`` blocks of a page that start ranks; the others are excerpts."""
    return [block for block in python_blocks(page) if "iris.launch(" in block]


SCRIPTS = [(f"{page.stem}-{number}", text) for page in DOCS for number, text in enumerate(whole_scripts(page), 1)]


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in some(SCRIPTS)])
def test_a_whole_script_runs(text: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("IRIS_")}
    done = subprocess.run(
        [python(), str(script)],
        env=clean | {"IRIS_BACKEND": "sim", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr


def run_under_torchrun(script: Path, num_ranks: int) -> list[tuple[int, str]]:
    """Run ``script`` as ``num_ranks`` simulated ranks, with the variables that torchrun sets. Returns exit codes and
    output."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = {name: value for name, value in os.environ.items() if not name.startswith("IRIS_")} | address
    env |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "CUDA_VISIBLE_DEVICES": ""}
    env |= {"IRIS_BACKEND": "sim", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    return run_together(
        script, [env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)], TIMEOUT_S
    )


@pytest.mark.parametrize(("page", "num_ranks"), [("serving", 4), ("training", 2)])
def test_the_blocks_of_a_page_are_a_program_that_runs(page: str, num_ranks: int, tmp_path: Path) -> None:
    """What is compiled takes 5 s of each rank, so four leave it out; two run it under mpirun, below."""
    script = tmp_path / f"{page}.py"
    blocks = python_blocks(ROOT / "docs" / f"{page}.md")
    script.write_text("\n\n".join(one for one in blocks if num_ranks == 2 or "torch.compile(" not in one))
    for rank, (code, output) in enumerate(run_under_torchrun(script, num_ranks)):
        assert code == 0, f"rank {rank} ended with {code}:\n{output}"


@NAMES_SHARED_MEMORY
def test_a_page_runs_under_mpirun_as_it_says(tmp_path: Path) -> None:
    if shutil.which("mpirun.openmpi") is None:
        assert not os.environ.get("CI"), "mpirun.openmpi is missing here, where CI is set"
        pytest.skip("mpirun.openmpi is not installed")
    (command,) = re.findall(r"^```sh\n(.*?mpirun.*?)^```", SERVING, re.DOTALL | re.MULTILINE)
    command = command.replace("mpirun", "mpirun.openmpi --allow-run-as-root --oversubscribe")
    command = command.replace("29500", str(free_port()))
    (tmp_path / "serve.py").write_text("\n\n".join(python_blocks(ROOT / "docs" / "serving.md")))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("IRIS_")}
    path = os.pathsep.join([str(Path(python()).parent), os.environ["PATH"]])
    env = clean | {"PATH": path, "IRIS_BACKEND": "sim", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    env |= {"OMPI_MCA_plm": "isolated"}  # it looks for ssh even where all ranks are here
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr


def test_a_failing_rank_is_seen(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nraise SystemExit(int(os.environ['RANK']) + 3)\n")
    assert [code for code, _ in run_under_torchrun(script, 2)] == [3, 4]


def test_the_memory_model_says_how_every_algorithm_ends() -> None:
    """The table of exits says whether ranks meet, and why."""
    _, table = (ROOT / "docs" / "memory-model.md").read_text().split("| Op | Algorithm | On exit | Why |\n")
    named, op = set(), ""
    for above, algorithms in re.findall(r"^\| (?:`(\w+)` )?\| ([^|]+) \|", table.split("\n\n")[0], re.MULTILINE):
        op = above or op
        named |= {(op, one) for one in re.findall(r"`(\w+)`", algorithms)}
    assert named == {(op, one) for op, algorithms in iris.ops.ALGORITHMS.items() for one in algorithms}


PORTING = (ROOT / "docs" / "porting.md").read_text()


def names_in(text: str) -> set[str]:
    """The names of the package, or of a context, in backquotes."""
    return set(re.findall(r"(?<![\w.])(?:iris|ctx)(?:\.\w+)+", " ".join(re.findall("`[^`]+`", text))))


def exists(name: str) -> bool:
    """Whether the package, or a context, has an attribute with this name."""
    first, *path = name.split(".")
    if first == "iris":
        owner: object = iris
        for depth, part in enumerate(path, 1):
            with contextlib.suppress(ImportError):
                importlib.import_module(".".join(["iris", *path[:depth]]))
            if not hasattr(owner, part):
                return False
            owner = getattr(owner, part)
        return True
    if path[0] == "ops":
        return hasattr(iris.ops.BoundOps, path[1])
    described = re.findall(r"^ {8}(\w+): ", iris.Iris.__doc__ or "", re.MULTILINE)
    return hasattr(iris.Iris, path[0]) or path[0] in described


def column(text: str, number: int) -> str:
    """A column of the tables of a text."""
    rows = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in text.splitlines() if line.startswith("| ")]
    return "\n".join(row[number] for row in rows)


def test_names_that_are_said_to_be_known_here_are() -> None:
    same, others = PORTING.split("## What differs")
    differing, missing = others.split("## What there is not")
    named = names_in(same) | names_in(column(differing, 1)) | names_in(column(missing, 1))
    assert len(named) > 60
    assert [name for name in sorted(named) if not exists(name)] == []


def test_names_that_are_said_to_be_unknown_here_are() -> None:
    named = names_in(column(PORTING.split("## What there is not")[1], 0))
    assert {"iris.ccl", "ctx.ccl", "iris.x", "iris.Tile", "iris.gluon"} <= named
    assert [name for name in sorted(named) if exists(name)] == []


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("iris.peer.load", True),
        ("iris.device.trace.record", True),
        ("ctx.num_sms", True),
        ("ctx.ops.matmul", True),
        ("iris.peer.lode", False),
        ("ctx.ranks", False),
        ("iris.no.such", False),
        ("ctx.ops.add", False),
    ],
)
def test_a_name_that_there_is_not_is_found(name: str, there: bool) -> None:
    assert exists(name) is there


SERVING = (ROOT / "docs" / "serving.md").read_text()


def staging_formulas() -> dict[tuple[str, str], str]:
    """By op and algorithm, the bytes of staging memory that a call needs according to serving.md."""
    found: dict[tuple[str, str], str] = {}
    op = ""
    for above, algorithm, formula in re.findall(
        r"^\| (?:`(\w+)`[^|]*)?\| ([\w` ]+) \| ([^|]+) \|$", SERVING, re.MULTILINE
    ):
        op = above or op
        others = [one for one in iris.ops.ALGORITHMS.get(op, ()) if (op, one) not in found]
        for one in others if algorithm == "all others" else [algorithm.strip("`")]:
            found[op, one] = formula
    return found


def problem(op: str, m: int, n: int, k: int) -> iris.ops.Problem:
    """A problem in bf16, on four ranks."""
    return problem_of(op, (m, n, k), torch.bfloat16, 4, 0)


FORMULAS = {key: text for key, text in staging_formulas().items() if key[1] in iris.ops.ALGORITHMS.get(key[0], ())}


def test_serving_names_the_staging_memory_of_every_algorithm() -> None:
    ops = {op: algorithms for op, algorithms in iris.ops.ALGORITHMS.items() if op != "matmul"}
    assert set(FORMULAS) == {(op, one) for op, algorithms in ops.items() for one in algorithms}


@pytest.mark.parametrize(("op", "algorithm"), FORMULAS)
def test_staging_memory_is_as_serving_says(op: str, algorithm: str) -> None:
    sizes = {"M": 8192, "N": 4096, "K": 1024, "W": 4, "s": 2}
    said = FORMULAS[op, algorithm].replace("none", "0").replace("·", "*").replace("/", "//")
    needed = room(problem(op, 8192, 4096, 1024), FusedConfig(algorithm), 132)
    assert needed.staging_nbytes == eval(said, sizes)


def kept_nbytes(op: str, layers: list[tuple[int, int]], fewest: int) -> int:
    """Bytes of all workspaces that "auto" makes on H200 for layers with these N and K, and with up to 8192 rows."""
    target = iris.ops.Target("cuda", 132, True, (), "NVIDIA H200")
    kept: dict[tuple[str, int, int], int] = {}
    for m in (1 << power for power in range(fewest.bit_length() - 1, 14)):
        for n, k in layers:
            asked = problem(op, m, n, k)
            config = iris.ops.pick_config(asked, target)
            staging, flags = (1 << (count - 1).bit_length() if count else 0 for count in room(asked, config, 132))
            flags = max(flags, MIN_FLAGS)
            kept[config.algorithm, staging, flags] = staging + 4 * flags
    return sum(kept.values())


@pytest.mark.parametrize(
    ("op", "layers", "fewest", "beside"),
    [
        ("matmul_all_reduce", [(8192, 2048), (8192, 7168)], 1, 128 << 20),
        ("matmul_reduce_scatter", [(8192, 2048), (8192, 7168)], 4, 0),
        ("all_gather_matmul", [(2560, 8192), (14336, 8192)], 4, 0),
    ],
)
def test_the_example_of_a_heap_adds_up(op: str, layers: list[tuple[int, int]], fewest: int, beside: int) -> None:
    mib = (kept_nbytes(op, layers, fewest) + beside) / (1 << 20)
    assert f"{mib:.1f} MiB" in SERVING


@pytest.mark.parametrize("page", DOCS, ids=[page.stem for page in DOCS])
def test_excerpts_are_python(page: Path) -> None:
    for block in python_blocks(page):
        compile(block, str(page), "exec")
