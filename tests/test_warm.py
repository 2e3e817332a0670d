"""The quick start of processes is like the interpreter's own: words, folder, environment, streams, signals, status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from execnet.gateway_io import popen_args
from execnet.xspec import XSpec

import warm

SCRIPT = """
import os, random, signal, sys, time
print(sys.argv[1:], os.getcwd(), os.environ.get("MARK"), __name__, sys.stdin.read(), random.random(), flush=True)
print("é", file=sys.stderr)
if "wait" in sys.argv:
    open("pid", "w").write(str(os.getpid()))
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(5)
os.kill(os.getpid(), signal.SIGKILL) if "die" in sys.argv else sys.exit(3)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path / "script.py"


def run(python: str, script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MARK": "x", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [python, str(script), *words], cwd=script.parent, input="given", env=environment, capture_output=True,
        text=True, encoding="utf-8", check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("words", [["a b", "c"], ["die"]])
def test_a_script_runs_as_it_would(script: Path, words: list[str]) -> None:
    real, quick, other = (run(python, script, *words) for python in (sys.executable, warm.python(), warm.python()))
    assert real.returncode == quick.returncode == (-signal.SIGKILL if words == ["die"] else 3)
    assert real.stderr == quick.stderr == "é\n"
    assert real.stdout.split()[:-1] == quick.stdout.split()[:-1]
    assert "given" in quick.stdout
    assert quick.stdout != other.stdout, "forks draw their own random numbers"


def begin(script: Path) -> tuple[subprocess.Popen[bytes], int]:
    process = subprocess.Popen(
        [warm.python(), str(script), "wait"], cwd=script.parent, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    written, deadline = script.with_name("pid"), time.monotonic() + 60
    while not (written.exists() and written.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process, int(written.read_text())


def test_a_signal_is_passed_on(script: Path) -> None:
    process, _ = begin(script)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 5


def test_a_process_ends_with_whoever_started_it(script: Path) -> None:
    process, pid = begin(script)
    process.kill()
    process.wait(60)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert run(warm.python(), script).returncode == 3, "the server goes on"


def test_a_test_process_has_everything_imported_and_is_otherwise_new(tmp_path: Path) -> None:
    """The words are execnet's, whose process reads what to do."""
    says = """
import gc, os, signal, sys, threading
print(__name__, sys.argv, sys.executable, os.getcwd(), os.environ.get("MARK"), sys.path[0] == "")
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGCHLD), gc.isenabled())
print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
print(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), sys.stdin.read())
print({"torch", "cdpg", "hypothesis", "pytest"} <= set(sys.modules), os.getpgid(0))
"""
    real, quick = (
        subprocess.run(
            popen_args(XSpec(f"popen//python={python}")),
            cwd=tmp_path, env={**os.environ, "MARK": "x"}, input=f"{says!r}\nmore", capture_output=True, text=True,
            check=True, timeout=60,
        )
        for python in (sys.executable, warm.python())
    )  # fmt: skip
    assert real.stdout.replace("False", "True") == quick.stdout.replace("False", "True")
    assert quick.stdout.count("True") == 4 and not quick.stderr
    assert "more" in quick.stdout


def test_a_test_process_that_dies_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os, sys\n"
        "def test_that_dies(): os.kill(os.getpid(), 9)\n"
        "def test_that_passes(): assert 'torch' in sys.modules\n",
        encoding="utf-8",
    )
    words = ["-p", "no:cacheprovider", "-p", "xdist.plugin", "--dist", "load", "--tx", f"popen//python={warm.python()}"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "test_it.py"], cwd=tmp_path, env=environment, capture_output=True,
        text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "worker 'gw0' crashed while running 'test_it.py::test_that_dies'" in done.stdout
    assert "1 failed, 1 passed" in done.stdout


def test_only_processes_here_that_nobody_asked_to_be_otherwise_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDPG_TESTS_PYTHON", "/a folder/python")
    specs = [XSpec("popen"), XSpec("popen//python=other"), XSpec("ssh=there")]
    warm.use(specs)
    assert [spec.python for spec in specs] == ["'/a folder/python'", "other", None]
    assert popen_args(specs[0]) == ["/a folder/python", *warm.TEST_PROCESS], "as execnet starts it"


def test_without_its_server_the_interpreter_is_used(script: Path) -> None:
    program = f"import sys, warm; warm.client('/nowhere', sys.executable, [{str(script)!r}, 'a'])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=script.parent, env={**os.environ, "PYTHONPATH": warm.TESTS}, input="given",
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 3 and "given" in done.stdout


def test_what_is_no_script_is_left_to_the_interpreter() -> None:
    program = "import sys; print(sys.executable, 'torch' in sys.modules)"
    done = subprocess.run([warm.python(), "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [sys.executable, "False"]
