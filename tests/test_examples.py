"""Every example, on live ranks and from the command line, and the matrix helpers that they share."""

from __future__ import annotations

import io
import os
import re
import runpy
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ops_inputs import some
from ranks import BACKEND, Failure, Ranks, context, failure_of, worlds
from warm import python

from iris.bench.draws import random_bits, require, same_bits
from iris.bench.matrix import (
    draw_matrix,
    format_rate,
    measure_all,
    measure_pairs,
    parse_options,
    print_matrix,
    report,
)
from iris.bench.options import DTYPES, ranks_to_start
from iris.bench.timing import of_all

ROOT = Path(__file__).parents[1]
BANDWIDTH = {
    "01_load": "load",
    "02_store": "store",
    "03_all_load": "all-load",
    "04_all_store": "all-store",
    "05_atomic_add": "atomic_add",
}
SMALL = ["--buffer_size", "4096", "--block_size", "1024"]
OTHERS = {
    "06_message_passing": ["--messages", "3"],
    "07_all_gather_matmul": ["--rows", "24", "--n", "40", "--k", "48"],
}
EXAMPLES = [*BANDWIDTH, *OTHERS]
LARGEST = 8
WORLDS = [*worlds(), LARGEST] if BACKEND == "sim" else worlds()
MATRIX: list[list[float]] = [[2100.4, 330.06], [0.0123456, 1.0]]


@pytest.fixture(scope="module", autouse=True)
def _end_largest_pool(pools: dict[int, Ranks]) -> Iterator[None]:
    """End the largest pool after this module's tests: no others need so many simulated ranks."""
    yield
    if BACKEND == "sim" and LARGEST in pools:
        pools.pop(LARGEST).end()


def printed_by(name: str, arguments: list[str]) -> str:
    """The output of the example on this rank, run like a script under a launcher."""
    printed = io.StringIO()
    with redirect_stdout(printed), mock.patch.object(sys, "argv", [f"{name}.py", *arguments]):
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


def command_line(name: str, arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [python(), str(ROOT / "examples" / f"{name}.py"), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def printed_matrix(text: str) -> list[list[float]]:
    """The numbers of the rows ``rank 0``, ``rank 1``, …, which must come in order."""
    rows = re.findall(r"^\W*rank (\d+)(.*)$", text, flags=re.MULTILINE)
    assert [int(rank) for rank, _ in rows] == list(range(len(rows)))
    return [[float(number) for number in re.findall(r"[\d.]+(?:e[+-]\d+)?", cells)] for _, cells in rows]


def assert_measured(name: str, text: str, world_size: int) -> None:
    assert "validation passed" in text
    assert f"{BANDWIDTH[name]}, GB/s, {world_size} rank" in text
    matrix = printed_matrix(text)
    assert [len(row) for row in matrix] == [world_size] * world_size
    assert all(rate > 0 for row in matrix for rate in row)


def assert_svg(path: Path) -> None:
    assert xml.etree.ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize("ranks", WORLDS, indirect=True)
@pytest.mark.parametrize("name", some(list(BANDWIDTH)))
def test_bandwidth_example(name: str, ranks: Ranks, tmp_path: Path) -> None:
    picture, drawn = tmp_path / "picture.svg", ranks.world_size in (2, LARGEST)
    first, *others = ranks.run(printed_by, name, [*SMALL, *(["--plot", str(picture)] if drawn else [])])
    assert_measured(name, first, ranks.world_size)
    assert (f"picture: {picture}" in first) == drawn
    assert others == [""] * (ranks.world_size - 1)
    if drawn:
        assert_svg(picture)


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
@pytest.mark.parametrize("name", BANDWIDTH)
def test_ragged_buffers_of_every_dtype_are_validated(name: str, ranks: Ranks) -> None:
    """3003 elements in blocks of 512 are several blocks per program in the simulator, the last of which is ragged."""
    for dtype, element in DTYPES.items():
        if name == "05_atomic_add" and dtype in ("fp8", "int8", "int16"):
            continue
        arguments = ["-v", "--dtype", dtype, "--block_size", "512", "--buffer_size", str(3003 * element.itemsize)]
        first, _ = ranks.run(printed_by, name, arguments)
        assert "validation passed" in first
        assert "GB/s" not in first


@pytest.mark.parametrize("ranks", WORLDS, indirect=True)
def test_message_passing(ranks: Ranks) -> None:
    first, *_ = ranks.run(printed_by, "06_message_passing", ["--messages", "3"])
    assert first.splitlines() == [
        f"launch {launch}: every rank received 3 messages, {3 * (launch + 1)} so far" for launch in range(3)
    ]


@pytest.mark.parametrize("ranks", WORLDS, indirect=True)
def test_all_gather_matmul(ranks: Ranks) -> None:
    first, *_ = ranks.run(printed_by, "07_all_gather_matmul", OTHERS["07_all_gather_matmul"])
    assert "validation passed: 3 calls, relative error at most" in first
    assert f"{24 * ranks.world_size} x 40 x 48 torch.float16" in first
    assert re.search(r"median \d+\.\d+ ms", first)


@pytest.mark.parametrize("ranks", worlds(2, 2), indirect=True)
def test_png_picture(ranks: Ranks, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    picture = tmp_path / "picture.png"
    ranks.run(printed_by, "01_load", [*SMALL, "--plot", str(picture)])
    height, width, _ = image.imread(picture).shape
    assert min(height, width) > 100


COMMAND_LINE_WORLDS: list[Any] = [2] if BACKEND == "sim" else worlds(2, 8)


@pytest.mark.parametrize("world_size", COMMAND_LINE_WORLDS)
@pytest.mark.parametrize("name", EXAMPLES if BACKEND != "sim" else some(["01_load", *OTHERS]))
def test_command_line(name: str, world_size: int, tmp_path: Path) -> None:
    sizes = OTHERS.get(name, SMALL) if BACKEND == "sim" else []
    done = command_line(name, ["--num_ranks", str(world_size), *sizes], tmp_path)
    assert done.returncode == 0, done.stderr
    if name not in BANDWIDTH:
        assert f"{world_size} ranks" in done.stdout or "launch 2: every rank received" in done.stdout
        return
    assert_measured(name, done.stdout, world_size)
    assert [path.name for path in tmp_path.iterdir()] == [f"{name[3:]}_bandwidth.svg"]
    assert_svg(next(tmp_path.iterdir()))


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_shows_the_docstring(name: str) -> None:
    source = (ROOT / "examples" / f"{name}.py").read_text()
    printed = io.StringIO()
    with (
        pytest.raises(SystemExit) as exit_info,
        mock.patch.object(sys, "argv", [name, "--help"]),
        redirect_stdout(printed),
    ):
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert exit_info.value.code == 0
    assert source.split('"""')[1].strip() in printed.getvalue()
    assert "--num_ranks" in printed.getvalue()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_short(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 100


def test_examples_are_all_tested() -> None:
    assert sorted(path.stem for path in (ROOT / "examples").glob("*.py")) == EXAMPLES


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--block_size", "1000"], "--block_size: 1000 is not a power of two"),
        (["--block_size", "2097152"], "--block_size: 2097152 is not a power of two of at most 1048576"),
        (["--buffer_size", "4097"], "--buffer_size: 4097 is no multiple of the 2 bytes of fp16"),
        (["--buffer_size", "0"], "0 is not a positive number"),
        (["--num_ranks", "-1"], "-1 is not a positive number"),
        (["--plot", "load.txt"], "--plot: load.txt should end in .svg or .png"),
        (["--plot", "/dev/null/x.svg"], "--plot: there is no directory /dev/null (--no_plot draws none)"),
        (["--plot", "/"], "--plot: / should end in .svg or .png"),
        (["--dtype", "fp4"], "invalid choice: 'fp4'"),
    ],
)
def test_bad_options(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info, mock.patch.object(sys, "argv", ["01_load.py", *arguments]):
        runpy.run_path(str(ROOT / "examples" / "01_load.py"), run_name="__main__")
    assert exit_info.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "option"),
    [("06_message_passing", "--messages"), *(("07_all_gather_matmul", option) for option in ("--rows", "--n", "--k"))],
)
def test_a_size_that_is_none(name: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info, mock.patch.object(sys, "argv", [name, option, "0"]):
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert exit_info.value.code == 2 and f"{option}: 0 is not a positive number" in capsys.readouterr().err


@pytest.mark.parametrize("name", BANDWIDTH)
def test_a_folder_without_permission_is_found_before_measuring(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so a fake answers for the system."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with (
        pytest.raises(SystemExit, match="2"),
        mock.patch.object(sys, "argv", [name]),
        mock.patch("iris.launch", side_effect=AssertionError("it measures")),
    ):
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert f"--plot: {tmp_path / name[3:]}_bandwidth.svg cannot be written (--no_plot" in capsys.readouterr().err
    with mock.patch.object(sys, "argv", [name, "--validate"]):  # draws nothing
        assert parse_options(None, name).plot is None


@pytest.mark.parametrize(
    ("backend", "gpus", "given", "expected"),
    [("sim", 0, None, 4), ("sim", 8, None, 4), ("cuda", 8, None, 8), ("cuda", 2, None, 2), ("cuda", 8, 3, 3)],
)
def test_ranks_to_start(backend: str, gpus: int, given: int | None, expected: int) -> None:
    with (
        mock.patch("iris.backends.detect") as detect,
        mock.patch("torch.cuda.device_count", return_value=gpus),
    ):
        detect.return_value.name = backend
        assert ranks_to_start(given) == expected


@pytest.mark.parametrize(("shared", "backend"), [("0", "sim"), ("1", "cuda")])
def test_one_gpu_is_not_enough_unless_ranks_share_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shared: str, backend: str
) -> None:
    monkeypatch.setenv("IRIS_BACKEND", "cuda")
    monkeypatch.setenv("IRIS_OVERSUBSCRIBE", shared)
    with (
        mock.patch("iris.backends.detect") as detect,
        mock.patch("torch.cuda.device_count", return_value=1),
    ):
        detect.return_value.name = "cuda"
        assert ranks_to_start(None) == 4
        told = capsys.readouterr().err
        assert ranks_to_start(1) == 1
    assert os.environ["IRIS_BACKEND"] == backend
    assert ("4 are simulated; --num_ranks 1 takes the GPU\n" in told) == (backend == "sim")
    assert capsys.readouterr().err == ""


def random_bits_of_all_ranks() -> bool:
    """Whether all ranks drew the same bits, and no two streams are equal, for every dtype."""
    ctx = context()
    for dtype in DTYPES.values():
        streams = [random_bits(ctx, stream, 1001, dtype) for stream in range(3)]
        agreed = [same_bits(ctx.broadcast(one, 0), one) for one in streams]
        require(ctx, all(agreed), f"random bits of {dtype}")
        if same_bits(streams[0], streams[1]) or same_bits(streams[1], streams[2]):
            return False
    return True


def test_random_bits(ranks: Ranks) -> None:
    assert ranks.run(random_bits_of_all_ranks) == [True] * ranks.world_size


def test_same_bits_sees_one_bit_and_accepts_nan() -> None:
    left = torch.full((7,), float("nan"), dtype=torch.float16)
    right = left.clone()
    assert same_bits(left, right)
    right.view(torch.int16)[6] ^= 1
    assert not same_bits(left, right)


def failure_of_requirement() -> Failure:
    ctx = context()
    return failure_of(require, ctx, ctx.rank not in (0, 2), "sums")


@pytest.mark.parametrize("ranks", worlds(3, 4), indirect=True)
def test_require_raises_on_every_rank(ranks: Ranks) -> None:
    for failure in ranks.run(failure_of_requirement):
        assert failure.kind == "IrisError"
        assert failure.message == f"sums: wrong result on ranks 0, 2 of {ranks.world_size}"


def calls_and_rows() -> tuple[list[int], list[int], list[list[float]]]:
    """The peers that each measurement visits, in order, and the rows that it gathers."""
    ctx = context()
    pairs: list[int] = []
    together: list[int] = []
    shapes = [len(measure(ctx, seen.append, 64)) for measure, seen in ((measure_pairs, pairs), (measure_all, together))]
    assert shapes == [ctx.world_size, ctx.world_size]
    return list(dict.fromkeys(pairs)), list(dict.fromkeys(together)), of_all(ctx, [float(ctx.rank)] * 2)


def test_measurements_visit_every_pair(ranks: Ranks) -> None:
    everyone = list(range(ranks.world_size))
    for rank, (pairs, together, rows) in enumerate(ranks.run(calls_and_rows)):
        assert pairs == everyone
        assert together == everyone[rank:] + everyone[:rank]
        assert rows == [[float(one)] * 2 for one in everyone]


def test_format_rate() -> None:
    assert [format_rate(rate) for rate in (2100.4, 330.06, 33.33, 1.0, 0.0123456)] == [
        "2100",
        "330",
        "33.3",
        "1.00",
        "0.0123",
    ]


@pytest.mark.parametrize("missing", [None, "rich.console"])
def test_print_matrix(missing: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.dict(sys.modules, {missing: None} if missing else {}):
        print_matrix("load, GB/s", MATRIX)
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == "load, GB/s"
    assert "peer 0" in printed
    assert "peer 1" in printed
    assert printed_matrix(printed) == [[2100, 330], [0.0123, 1.0]]


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_picture_that_cannot_be_written(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"a.{suffix}"
    picture.symlink_to("/dev/full")
    report(mock.Mock(rank=0, world_size=1, backend_name="sim"), "load", [[1.0]], str(picture))
    first, *_, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("load, GB/s, 1 rank simulated", f"no picture: {picture}: No space left on device")


def test_picture_without_matplotlib(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ctx = mock.Mock(rank=0, world_size=2, backend_name="sim")
    with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
        assert not draw_matrix("load", MATRIX, str(tmp_path / "a.svg"))
        report(ctx, "load", MATRIX, str(tmp_path / "a.svg"))
    assert "no picture: pip install matplotlib" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
