"""The quick start of processes is like the interpreter's own: words, folder, environment, streams, signals, status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


def test_what_is_no_script_is_left_to_the_interpreter() -> None:
    program = "import sys; print(sys.executable, 'torch' in sys.modules)"
    done = subprocess.run([warm.python(), "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [sys.executable, "False"]
