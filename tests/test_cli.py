"""The command line, and ``iris info`` on machines that lack things."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from interrupted import interrupted
from ops_inputs import some
from warm import python

import iris
from iris import backends, cli, console, demo, info, report, startup
from iris.bench import cases, command
from iris.bench.accuracy import Accuracy
from iris.bench.case import registered
from iris.tune import command as tuning

ROOT = Path(__file__).parent.parent

TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tNODE\t0-47\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tPIX\tNODE\t0-47\t0\t\tN/A\n"
    "GPU2\tSYS\tPIX\t X \tSYS\t48-95\t1\t\tN/A\n"
    "NIC0\tNODE\tNODE\tSYS\t X \n\nLegend:\n\n  X    = Self\n"
)
EVERYTHING = dict.fromkeys(info.LIBRARIES, "9.9.9")
ALL_LAUNCHERS = {name: f"/usr/bin/{name}" for name in info.LAUNCHERS}
GPUS = [info.Gpu(0, "H200", 150 << 30, 132, "sm_90"), info.Gpu(1, "H200", 150 << 30, 132, "sm_90")]


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("IRIS_", "TRITON_"))}
    return subprocess.run(
        [python(), "-m", "iris", *arguments],
        env=clean | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parsers of the commands that have their own options."""
    cases.load()
    known = registered()
    benches = {name: command.make_parser([case], known) for name, case in known.items()}
    return {"demo": demo._parser(), "tune": tuning.make_parser(), "report": report._parser(), **benches}


@pytest.mark.parametrize("name", parsers())
def test_help_says_what_each_option_is_and_its_default(name: str) -> None:
    for option in parsers()[name]._actions:
        if option.option_strings:
            assert option.help, option.option_strings
            assert option.default in (None, False, argparse.SUPPRESS) or "default:" in option.help, (
                option.option_strings
            )


def test_help_names_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    for name, (_, about) in cli.COMMANDS.items():
        assert f"{name} " in done.stdout
        assert about in done.stdout
    assert re.findall(r"^  (\d+) ", done.stdout, re.MULTILINE) == ["0", "1", "2", "130", "141"]


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["paint"])
    assert stopped.value.code == 2
    assert "invalid choice: 'paint'" in capsys.readouterr().err


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    said = capsys.readouterr()
    assert said.out == "" and all(about in said.err for _, about in cli.COMMANDS.values())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"iris {iris.__version__}\n"


@pytest.mark.parametrize("command", ["demo", "bench"])
@pytest.mark.parametrize("arguments", [[], ["--help"], ["rma", "--num-ranks", "4", "--json"]])
def test_a_command_gets_its_own_arguments(monkeypatch: pytest.MonkeyPatch, command: str, arguments: list[str]) -> None:
    seen: list[list[str]] = []
    fake = ModuleType(f"iris.{command}")

    def main(given: list[str]) -> int:
        seen.append(given)
        return 3

    vars(fake)["main"] = main
    monkeypatch.setitem(sys.modules, f"iris.{command}", fake)
    assert cli.main([command, *arguments]) == 3
    assert seen == [arguments]


def test_an_iris_error_is_printed_without_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(_: list[str]) -> int:
        raise iris.BackendError("no such GPU: buy one")

    monkeypatch.setitem(sys.modules, "iris.demo", SimpleNamespace(main=main))
    assert cli.main(["demo"]) == 1
    assert capsys.readouterr().err == "iris demo: BackendError: no such GPU: buy one\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["bench", "nosuch"], "iris bench: error: case: expected one of "),
        (
            ["bench", "all_gather_matmul", "--axis_M=abc"],
            "iris bench: error: --axis_M: expected whole numbers, got abc",
        ),
        (["bench", "all_gather_matmul", "--axis_dtype=fp4"], "iris bench: error: --axis_dtype: expected one of bf16, "),
        (["report", "nofolder"], "iris report: error: results: expected "),
    ],
)
def test_an_argument_that_cannot_work_exits_with_2(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith(told)


@pytest.mark.parametrize(
    ("words", "program", "told"),
    [
        (["bnch"], "iris", "argument COMMAND: invalid choice: 'bnch'"),
        (["bench"], "iris bench", "name a case, or choose among all with --benchmark_filter"),
        (["bench", "matmul", "--no_such"], "iris bench matmul", "unrecognized arguments: --no_such"),
        (["bench", "matmul", "--num_ranks=99"], "iris bench matmul", "argument --num_ranks: 99 is more than the 16"),
        (["tune"], "iris tune", "the following arguments are required: OP"),
        (["report"], "iris report", "give one file or folder of results, or --compare A B"),
        (["demo", "--shape=1"], "iris demo", "argument --shape: expected 3 arguments"),
        (["info", "now"], "iris info", "unrecognized arguments: now"),
    ],
)
def test_what_is_wrong_with_a_command_line_is_said_in_a_line_and_where_to_read_on(
    words: list[str], program: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    wrong, pointer = capsys.readouterr().err.splitlines()
    assert wrong.startswith(f"{program}: error: {told}")
    assert pointer == f"`{program} --help` says what it takes"


@pytest.mark.parametrize(
    ("program", "error", "told"),
    [
        (
            "iris bench",
            iris.ArgumentError("bench", "case", "a, b", "c", "Fix."),
            "error: case: expected a, b, got c. Fix.",
        ),
        ("mine.py", iris.ArgumentError("bench", "case", "a", "b"), "error: bench: case: expected a, got b"),
        ("iris tune", iris.ShapeError("matmul", "A", "a", "b"), "error: matmul: A: expected a, got b"),
        ("benchmark, rank 1", iris.ArgumentError("benchmark", "-k", "a", "b"), "error: -k: expected a, got b"),
        ("iris bench", iris.PeerDied("rank 1 is gone"), "PeerDied: rank 1 is gone"),
        ("iris bench", iris.WaitTimeout("rank 1 did not come"), "WaitTimeout: rank 1 did not come"),
    ],
)
def test_a_wrong_argument_is_told_as_argparse_does_and_others_with_what_they_are(
    program: str, error: iris.IrisError, told: str
) -> None:
    assert console.error_line(program, error) == f"{program}: {told}"


@pytest.mark.parametrize(
    ("words", "backend"), [(["bench"], "cuda"), (["bench", "rma"], "nonsense"), (["tune"], "nonsense")]
)
def test_help_comes_without_the_backend_that_is_asked_for(words: list[str], backend: str) -> None:
    done = run(*words, "--help", IRIS_BACKEND=backend)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: iris ")


OF_OWN_CASES = "from iris import bench; raise SystemExit(bench.main(['rma', '--benchmark_list']))"


@pytest.mark.parametrize(
    ("words", "both"),
    [
        (["-m", "iris", "info"], False), (["-m", "iris", "bench", "--benchmark_list"], True),
        (["-m", "iris", "--help"], True), (["-c", OF_OWN_CASES], False),
    ],
)  # fmt: skip
def test_a_reader_that_has_gone_ends_a_command_quietly(words: list[str], both: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [python(), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
        stdout=writer,
        stderr=writer if both else subprocess.PIPE,
        timeout=60,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (console.UNREAD, None if both else b"")


@pytest.mark.parametrize(
    "words", [["-m", "iris", "info"], ["-m", "iris", "bench", "--benchmark_list"], ["-m", "iris", "bench", "--help"]]
)
def test_output_that_cannot_be_written_is_an_error_that_says_so(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [python(), *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "", "IRIS_BACKEND": "sim"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == f"iris {words[2]}: standard output: No space left on device\n"


def test_what_standard_output_has_no_code_for_is_a_question_mark() -> None:
    script = "from iris import console; raise SystemExit(console.exit_status('iris', lambda: print('2 \\xd7 3')))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"2 ? 3\n", b"")


def test_what_is_printed_while_standard_output_is_closed_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert console.exit_status("iris", lambda: int(sys.stdout.write("a") != 1)) == 0
    sys.stdout.close()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("variables", "plain"),
    [
        ({}, False), ({"NO_COLOR": "1"}, True), ({"NO_COLOR": ""}, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True), (MPIRUN, True), ({**MPIRUN, "NO_COLOR": "1"}, True),
        ({**MPIRUN, "FORCE_COLOR": "1"}, False),
        ({"IRIS_RANK": "1", "IRIS_WORLD_SIZE": "2"}, False), ({"RANK": "no number", "WORLD_SIZE": "2"}, True),
    ],
)  # fmt: skip
def test_text_is_plain_where_it_is_asked_for_and_on_ranks_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], plain: bool
) -> None:
    said = {"TERM": "xterm-256color"} | variables
    monkeypatch.setattr(os, "environ", said)
    file = Terminal()
    console.print_table(("name", "value"), [("one", "1")], title="title", styles={"one": "bold red"}, file=file)
    assert ("\x1b" not in file.getvalue()) == plain and "title" in file.getvalue()


def test_ctrl_c_is_said_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "iris.report", SimpleNamespace(main=main))
    assert cli.main(["report"]) == console.STOPPED
    assert capsys.readouterr().err == "stopped\n"


def test_another_pipe_that_broke_is_not_kept_quiet(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def main(_: list[str]) -> int:
        raise BrokenPipeError("of a rank")

    monkeypatch.setitem(sys.modules, "iris.demo", SimpleNamespace(main=main))
    with pytest.raises(BrokenPipeError, match="of a rank"):
        cli.main(["demo"])


def test_info_as_json_in_a_fresh_process() -> None:
    done = run("info", "--json", IRIS_BACKEND="sim")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["backend"] == "sim"
    assert told["backend_reason"] == "IRIS_BACKEND=sim"
    assert told["launcher"] == "none: this process is alone"
    assert told["versions"]["iris"] == iris.__version__
    assert told["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(info.LIBRARIES) <= set(told["versions"])
    assert set(told["launchers"]) == set(info.LAUNCHERS)


def test_info_gives_the_reason_and_not_what_iris_set_itself() -> None:
    told = json.loads(run("info", "--json").stdout)
    assert told["backend_reason"].startswith("PyTorch ")
    assert "TRITON_INTERPRET" not in told["backend_reason"]


@pytest.mark.parametrize("yes", ["1", "True"])
def test_triton_interpret_asks_for_the_simulator(yes: str) -> None:
    told = json.loads(run("info", "--json", TRITON_INTERPRET=yes).stdout)
    assert (told["backend"], told["backend_reason"]) == ("sim", f"TRITON_INTERPRET={yes} was set")


def test_info_names_the_launcher() -> None:
    told = json.loads(run("info", "--json", RANK="1", WORLD_SIZE="2", LOCAL_RANK="1").stdout)
    assert told["launcher"] == "torchrun: rank 1 of 2"


def test_info_reports_contradicting_launcher_variables() -> None:
    done = run("info", "--json", RANK="5", WORLD_SIZE="2", LOCAL_RANK="1")
    assert done.returncode == 0, done.stderr
    assert "rank 5 of 2 ranks" in json.loads(done.stdout)["launcher"]


def test_info_tells_what_is_wrong_with_a_variable() -> None:
    set_wrong = {"IRIS_TIMEOUT_S": "abc", "IRIS_REPLAY": "x", "IRIS_SIM_SMS": "no", "IRIS_LOG_LEVEL": "loud"}
    wrong = json.loads(run("info", "--json", **set_wrong).stdout)["variables"]
    assert wrong.pop("IRIS_LOG_LEVEL").startswith("iris: log_level: expected one of debug, info,")
    assert wrong == {
        "IRIS_TIMEOUT_S": "iris: IRIS_TIMEOUT_S: expected a number of seconds, got 'abc'",
        "IRIS_REPLAY": "iris: IRIS_REPLAY: expected 0 or 1, got 'x'",
        "IRIS_SIM_SMS": "iris: IRIS_SIM_SMS: expected a whole number of SMs, 1 or more, got 'no'",
    }
    done = run("info", IRIS_TIMEOUT_S="-1", IRIS_REPLAY="0")
    assert "IRIS_TIMEOUT_S: expected a number of seconds, more than 0" in done.stdout
    assert ["IRIS_REPLAY", "0"] in [line.split() for line in done.stdout.splitlines()]


def test_info_without_optional_libraries(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("greenlet", "rich", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("PATH", "")
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    for line in ("greenlet", "rich", "matplotlib"):
        assert f"pip install {line}" in printed
    assert "apt-get install openmpi-bin" in printed
    assert "─" not in printed, "tables were drawn by rich"


def test_topology_is_read() -> None:
    assert info.parse_topology(TOPOLOGY) == [["X", "NV18", "SYS"], ["NV18", "X", "PIX"], ["SYS", "PIX", "X"]]


@pytest.mark.parametrize("text", ["", "command not found\n", "GPU0 GPU1\nGPU0 X\n", "GPU0 GPU1\nGPU0 X NV1\n"])
def test_anything_else_is_no_topology(text: str) -> None:
    assert info.parse_topology(text) == []


def test_links_fall_back_on_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "output_of", lambda *_: None)
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    monkeypatch.setattr(info, "has_native_atomics", lambda *_: True)
    assert info.links(3) == [["self", "peer", "none"], ["peer", "self", "peer"], ["none", "peer", "self"]]


def test_links_take_names_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(info, "output_of", lambda *_: TOPOLOGY)
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    monkeypatch.setattr(info, "has_native_atomics", lambda a, b: {a, b} != {1, 2})
    found = info.links(3)
    assert found[0] == ["self", "NV18", "none"] and found[2] == ["none", "PIX, no atomics", "self"]


def test_links_do_not_trust_the_driver_about_renumbered_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1,0")
    monkeypatch.setattr(info, "output_of", lambda *_: TOPOLOGY)
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr(info, "has_native_atomics", lambda *_: True)
    assert info.links(3)[0] == ["self", "peer", "peer"]


def test_nothing_is_missing_where_all_is_there() -> None:
    assert info.missing(dict(EVERYTHING), ALL_LAUNCHERS, GPUS, True, "") == []


def test_a_gpu_that_pytorch_cannot_use_is_named() -> None:
    (one,) = info.missing(dict(EVERYTHING), ALL_LAUNCHERS, [], True, "driver too old")
    assert one.what == "PyTorch for your GPU"
    assert "driver too old" in one.fix


def test_old_triton_and_new_numpy_are_named() -> None:
    old = info.missing(EVERYTHING | {"triton": "3.5.1"}, ALL_LAUNCHERS, GPUS, True, "")
    clash = info.missing(EVERYTHING | {"triton": "3.6.0", "numpy": "2.4.6"}, ALL_LAUNCHERS, GPUS, True, "")
    fine = info.missing(EVERYTHING | {"triton": "3.6.0", "numpy": "2.2.6"}, ALL_LAUNCHERS, GPUS, True, "")
    assert [one.what for one in old] == ["Triton 3.6 or newer"]
    assert [one.fix for one in clash] == ['pip install "numpy<2.3"']
    assert fine == []


@pytest.mark.parametrize("with_rich", [True, False])
def test_tables_show_gpus_and_links(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], with_rich: bool
) -> None:
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    told = info.Info(
        versions={"torch": "9.9", "greenlet": None},
        machine={"cores": "2"},
        gpus=GPUS,
        links=[["self", "NV18"], ["NV18", "self"]],
        backend="cuda",
        backend_reason="PyTorch sees 2 GPUs",
        launcher="none",
        tuned_rows="none",
        variables={},
        launchers={"srun": None},
        missing=[],
    )
    info.print_tables(info.tables(told))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0", "H200", "150.0", "GiB", "132", "sm_90"] in lines
    assert ["GPU0", "self", "NV18"] in lines
    assert ["greenlet", "not", "found"] in lines
    assert ["Missing"] not in lines


@pytest.mark.parametrize("module", ["torch.", "triton."])
def test_ctrl_c_while_modules_are_imported_ends_quietly(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # a line on stderr for each
    process, out, err = interrupted(["info"], module, 0)
    told = [line for line in err.splitlines() if not line.startswith("import time:")]
    assert (process.returncode, out, told) == (console.STOPPED, "", ["stopped"])


@pytest.mark.parametrize(
    ("arguments", "name", "guarded"),
    [
        (["-m", "iris", "info"], "-m", True),
        (["-X", "dev", "-m", "iris"], "-m", True),
        (["-m", "other", "-m", "iris"], "-m", False),
        (["-m", "iris", "info"], "/iris/__main__.py", False),
        (["script.py", "-m", "iris"], "script.py", False),
    ],
)
def test_only_the_command_ends_quietly_while_modules_are_imported(
    arguments: list[str], name: str, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", *arguments])
    monkeypatch.setattr(sys, "argv", [name])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        startup.guard()
        assert (signal.getsignal(signal.SIGINT) is startup._stop) == guarded
        startup.started()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


SIM = pytest.mark.skipif(backends.detect().name != "sim", reason="sizes are the simulator's")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "0", "4", "4"], "argument --shape: 0 is not a positive number"),
        (["--num_ranks", "0"], "argument --num_ranks: 0 is not a positive number"),
        (["--num_ranks", "99"], "argument --num_ranks: 99 is more than"),
        (["--timeout_s", "0"], "argument --timeout_s: 0 is not a positive number"),
    ],
)
def test_the_demo_refuses_bad_numbers(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        demo.main(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_the_demo_looks_first_whether_it_can_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(demo, "sheltered", None)
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--num_ranks", "1", "--picture_dir", str(tmp_path / "file")])
    assert re.search(r"iris demo: error: --picture_dir .*file: it is not a folder", capsys.readouterr().err)


@SIM
def test_the_demo_refuses_a_shape_that_ranks_cannot_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--num_ranks", "4", "--shape", "7", "11", "13", "--picture_dir", str(tmp_path)])
    assert "--shape: M=7 and N=11 must be multiples of the 4 ranks" in capsys.readouterr().err


def test_the_demo_starts_its_own_ranks_only(tmp_path: Path) -> None:
    ran = run("demo", "--picture_dir", str(tmp_path), RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    words = "iris demo: LaunchError: iris demo starts its own ranks: run it without torchrun, mpirun or srun"
    assert ran.returncode == 1 and ran.stderr.splitlines() == [words] and not ran.stdout


@pytest.mark.parametrize("step", some(["starting", "check"]))
def test_ctrl_c_stops_the_demo(step: str, tmp_path: Path) -> None:
    arguments = ["demo", "--num_ranks", "2", "--shape", "1024", "1024", "1024", "--picture_dir", str(tmp_path)]
    process, out, err = interrupted(arguments, step, 0.5)
    assert (process.returncode, out, err.splitlines()[-1]) == (130, "", "stopped")
    assert "Traceback" not in err


@SIM
def test_the_demo_without_rich_or_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("rich.console", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(demo, "_algorithms", algorithms_that_differ)
    folder = tmp_path / "new" / "folder"
    assert demo.main(["--num_ranks", "2", "--shape", "64", "64", "64", "--picture_dir", str(folder)]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert ["op", "algorithm", "ranks", "M×N×K", "backend", "error", "time", "waited"] in rows
    for op in demo.OPS:
        (row,) = (row for row in rows if row and row[0] == op)
        assert row[1:5] == ["low_latency", "2", "64×64×64", "sim"] and row[-1] == "(push)"
    assert "this call is by another algorithm than the timed ones" in printed
    assert printed.count("no picture: drawing needs matplotlib") == 2
    assert folder.is_dir()


def test_the_demo_without_greenlet_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "greenlet.py").write_text("raise ImportError")
    arguments = ["demo", "--num_ranks", "2", "--shape", "64", "64", "64", "--picture_dir", str(tmp_path)]
    done = run(*arguments, IRIS_BACKEND="sim", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last == "iris demo: BackendError: the simulator needs greenlet: pip install greenlet"


def algorithms_that_differ() -> tuple[str, str]:
    return "low_latency", "push"


def not_written_on_rank_1() -> Accuracy:
    """The accuracy that the demo finds if an op has written nothing on rank 1."""
    ctx, operands = demo._ctx, demo._operands
    assert ctx is not None and operands is not None
    operands.call()
    ctx.barrier()
    if ctx.rank == 1:
        operands.output.fill_(float("nan"))
    return operands.accuracy_of(operands.output, operands.roundings)


@SIM
def test_the_demo_tells_of_an_output_that_was_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_check", not_written_on_rank_1)
    assert demo.main(["--num_ranks", "2", "--shape", "64", "64", "64", "--picture_dir", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("WRONG") == 2


@SIM
def test_the_demo_says_what_it_has_found_where_no_picture_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = [tmp_path / f"demo-{op}.svg" for op in demo.OPS]
    for picture in pictures:
        picture.symlink_to("/dev/full")
    assert demo.main(["--num_ranks", "1", "--shape", "64", "64", "64", "--picture_dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2:] == [f"no picture: {picture}: No space left on device" for picture in pictures]
    assert all(any(line.split()[:1] == [op] for line in printed) for op in demo.OPS)


@SIM
def test_the_demo_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--num_ranks", "2", "--shape", "64", "64", "64", "--picture_dir", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "another algorithm" not in told.out and "one more call, which is traced and not timed" in told.out
    assert re.fullmatch(r"\[9/9, 0 s left\] ending ranks", told.err.splitlines()[-1])
    for op in demo.OPS:
        (row,) = (line for line in told.out.splitlines() if line.split()[:1] == [op])
        found = re.search(r"([\d.]+) (m?s) of ([\d.]+) (m?s)$", row.strip())
        assert found is not None, row
        waited, taken = (float(found[i]) * (1e-3 if found[i + 1] == "ms" else 1) for i in (1, 3))
        assert 0 < waited <= taken
        assert "waits for data" in (tmp_path / f"demo-{op}.svg").read_text()
