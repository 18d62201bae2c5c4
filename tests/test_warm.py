"""The replacement for Python in other tests (tests/warm.py) does what Python does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import NAMES_SHARED_MEMORY
from warm import python

TELL = """
import os, sys
main = sys.modules["__main__"]
print(__name__, getattr(main, "__file__", None), getattr(main.__spec__, "name", None), sys.argv, sys.orig_argv)
print(sys.path, os.getcwd(), os.environ.get("TOLD"), sys.warnoptions, sorted(os.listdir("/proc/self/fd"))[:-1])
print(sys.stdin.read(), sys.stdout.line_buffering, sys.stdout.write_through, sys.stderr.errors, file=sys.stderr)
"""
WAYS = {
    "command": ["-c", TELL, "one", "two"],
    "script": ["told/__main__.py", "one", "two"],
    "module": ["-m", "told", "one", "two"],
    "folder": ["told", "one"],
    "unbuffered": ["-u", "-Wignore", "told/__main__.py"],
    "a status": ["-c", "raise SystemExit(3)"],
    "words": ["-c", "raise SystemExit('no luck')"],
    "a signal": ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"],
    "at exit": ["-c", "import atexit; atexit.register(print, 'late'); print('early')"],
    "options of Python": ["-I", "-c", "import sys; print(sys.flags.isolated)"],
    "standard input": ["-", "one"],
    "nothing": ["told/no_such_script.py"],
}


@pytest.fixture
def told(tmp_path: Path) -> Path:
    (tmp_path / "told").mkdir()
    (tmp_path / "told" / "__main__.py").write_text(TELL)
    return tmp_path


@pytest.mark.parametrize("words", WAYS.values(), ids=WAYS)
def test_it_runs_what_python_runs(words: list[str], told: Path) -> None:
    reader, writer = os.pipe()
    environment = {
        **os.environ,
        "TOLD": "yes",
        "PYTHONPATH": "told:.",
        "PYTHONUNBUFFERED": "",
        "PYTHONWARNINGS": "once",
    }
    real, warm = (
        subprocess.run(
            [program, *words],
            cwd=told,
            env=environment,
            pass_fds=[reader],
            input="print('given')",
            capture_output=True,
            text=True,
        )
        for program in (sys.executable, python())
    )
    os.close(reader)
    os.close(writer)
    assert (warm.returncode, warm.stdout, warm.stderr) == (real.returncode, real.stdout, real.stderr)


def test_it_has_pytorch_and_nothing_of_ours() -> None:
    told = "import sys; print(*(name in sys.modules for name in ('torch', 'triton', 'iris', 'pytest', 'warm')))"
    done = subprocess.run([python(), "-c", told], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False", "False", "False", "False"]


@NAMES_SHARED_MEMORY
def test_a_group_of_tests_has_one_process(request: pytest.FixtureRequest) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER") is None:
        pytest.skip("all tests run in one process")
    told = "this pytest-xdist heeds no groups: take the versions in requirements/dev.txt"
    assert request.node.nodeid.endswith("@names of shared memory"), told


def test_an_error_is_told_by_its_traceback() -> None:
    done = subprocess.run([python(), "-c", "def f():\n    1 / 0\nf()"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("in f\nZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_on_to_the_program(sent: signal.Signals) -> None:
    # Many short sleeps: Python sees a signal that comes just before a sleep only after it.
    lines = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.1)"
    with subprocess.Popen([python(), "-c", lines], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(sent)
        assert process.wait(20) == -sent


def test_the_program_ends_with_what_stands_in_for_it() -> None:
    lines = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    process = subprocess.Popen([python(), "-c", lines], stdout=subprocess.PIPE)
    assert process.stdout is not None
    program = int(process.stdout.readline())
    process.kill()
    process.wait()
    assert process.stdout.read() == b""  # returns when no process has the pipe open any more
    process.stdout.close()
    assert not Path(f"/proc/{program}/exe").exists()  # as of a process that is gone, or waited for by its keeper


def test_a_keeper_that_has_gone_is_no_success() -> None:
    lines = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
    done = subprocess.run([python(), "-c", lines], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "tests/warm.py: the server, or the keeper of this program, has ended\n"
