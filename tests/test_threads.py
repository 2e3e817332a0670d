"""Threads beside other programs: the way they wait is set before torch is loaded, and busy cores are noticed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from cdpg.system.threads import CoreWatch, limit_spinning

CHILD = """
import os, sys

def tell():
    print(os.environ.get("GOMP_SPINCOUNT", "unset"), flush=True)

class Torch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            tell()
            os._exit(0)

sys.meta_path.insert(0, Torch())
{first}
print("without torch", end=" ")
tell()
"""
"""It ends where torch would be loaded, which takes seconds."""


def spins(first: str, **environment: str) -> list[str]:
    """How a new interpreter's threads wait when torch is to be loaded, or after some code that loads none."""
    code = [sys.executable, "-c", CHILD.format(first=first)]
    path = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(code, env=path | environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


COMMAND = "from cdpg.cli import main\ntry: main(['tasks'])\nexcept SystemExit: pass"


def test_the_command_line_sets_how_threads_wait_before_torch_is_loaded() -> None:
    assert spins(COMMAND)[-1].split()[-1] == "1000"


def test_the_library_sets_it_when_the_trainer_is_asked_for_and_not_at_import() -> None:
    assert spins("import cdpg; tell()\nfrom cdpg import CDPGTrainer") == ["unset", "1000"]


def test_what_the_user_chose_stays() -> None:
    chosen = {"GOMP_SPINCOUNT": "7"}
    assert not limit_spinning(chosen)
    assert chosen == {"GOMP_SPINCOUNT": "7"}
    assert spins(COMMAND, OMP_WAIT_POLICY="active")[-1].split()[-1] == "unset"


def test_nothing_is_set_once_torch_is_loaded() -> None:
    environment: dict[str, str] = {}
    assert "torch" in sys.modules
    assert not limit_spinning(environment)
    assert environment == {}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Two threads, as the kernel lists them, that have waited for nothing so far."""
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text("5000 0 3\n")
    return tmp_path


def wait(tasks: Path, seconds: float) -> None:
    """Let each of the two threads have waited so long."""
    for name in ("1", "2"):
        (tasks / name / "schedstat").write_text(f"5000 {round(seconds * 1e9)} 3\n")


def test_the_share_of_the_time_spent_waiting_for_a_core_is_reported(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([100.0, 110.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    watch = CoreWatch(tasks)
    wait(tasks, 4.0)  # of 10 seconds, in each of 2 threads
    notice = watch.notice(threads=2)
    assert notice is not None
    assert "in 40% of the epoch" in notice
    assert "OMP_NUM_THREADS=1" in notice


def test_free_cores_and_systems_that_do_not_count_are_silent(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 110.0, 100.0, 110.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    watch = CoreWatch(tasks)
    wait(tasks, 2.4)
    assert watch.notice(threads=2) is None
    missing = CoreWatch(tasks / "nowhere")
    assert missing.notice(threads=2) is None


def test_one_thread_is_given_no_cure_that_it_has_taken(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 110.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    watch = CoreWatch(tasks)
    wait(tasks, 4.0)
    notice = watch.notice(threads=1)
    assert notice is not None
    assert "in 80% of the epoch" in notice
    assert "OMP_NUM_THREADS" not in notice
