"""SIGTERM and Ctrl-C as a shell sends them to the command."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny
import unpainted
import warm
from cdpg.storage.checkpoints import load_checkpoint
from cdpg.storage.jsonl import read_jsonl
from cdpg.system.signals import StopSignal

CHECKS = """
import time
from pathlib import Path

def even(prompts, completions, **columns):
    if Path("slow").exists():
        Path("slow-now").touch()
        time.sleep(600)
    return [len(c) % 2 == 0 for c in completions]
"""
SETTINGS = (
    "max_completion_length=6 num_generations=4 contexts_per_epoch=2 warmup_epochs=0 save_every=1000 check_seconds=600"
).split()


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    tiny.save(tmp_path / "llama", "llama")
    (tmp_path / "contexts.csv").write_text("prompt\ntwo dogs\nthree cats and a dog\n", encoding="utf-8")
    (tmp_path / "checks.py").write_text(CHECKS, encoding="utf-8")
    return tmp_path


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    words = words or ("run", "--no-report")
    command = [warm.python(), "-m", "cdpg", *words, "--model", "llama", "--contexts", "contexts.csv"]
    command += ["--constraint", "checks:even", "--epochs", "1000000", "--output-dir", "a run's folder"]
    for setting in SETTINGS:
        command += ["--set", setting]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=environment())


def environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **unpainted.IN_A_FORK}


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def lines(folder: Path, run: str = "") -> int:
    metrics = folder / "a run's folder" / run / "metrics.jsonl"
    return sum(1 for _ in read_jsonl(metrics)) if metrics.exists() else 0


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.exhaustive)]
)
def test_the_epoch_ends_a_checkpoint_is_written_and_the_command_to_resume_works(
    workplace: Path, number: int, status: int
) -> None:
    process = start(workplace)
    wait_for(lambda: lines(workplace) >= 2, "epochs")
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == status, stderr
    assert "press Ctrl-C again to stop at once" in stderr
    done = lines(workplace)
    (path,) = (workplace / "a run's folder" / "checkpoints").iterdir()
    assert load_checkpoint(path).epoch == done
    assert f"stopped after epoch {done}" in stderr
    command = stderr.partition("continue with: ")[2].strip()
    assert "'a run'\"'\"'s folder'" in command
    resumed = subprocess.run(
        [*shlex.split(command), "--epochs", str(done + 1)],
        cwd=workplace, capture_output=True, text=True, timeout=120, env=environment(),
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    assert f"continuing after epoch {done}" in resumed.stderr
    assert lines(workplace) == done + 1


def test_a_second_ctrl_c_stops_at_once(workplace: Path) -> None:
    process = start(workplace)
    wait_for(lambda: lines(workplace) >= 1, "an epoch")
    (workplace / "slow").touch()
    wait_for((workplace / "slow-now").exists, "a slow check")
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1.5)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=240)  # the check takes longer than this
    assert process.returncode == 130, stderr
    assert "stopped after epoch" not in stderr, "no epoch has ended since"
    assert "Traceback" not in stderr


@pytest.mark.exhaustive
def test_runs_side_by_side_end_together_and_are_resumed_together(workplace: Path) -> None:
    runs = ["cdpg", "reinforce"]
    compare = ["compare", "--methods", ",".join(runs), "--jobs", "2", "--set", "evaluation_samples=2"]
    process = start(workplace, *compare)
    try:
        wait_for(lambda: all(lines(workplace, run) >= 2 for run in runs), "epochs")
    finally:
        process.terminate()
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 143, stderr
    done = [lines(workplace, run) for run in runs]
    for run, epochs in zip(runs, done, strict=True):
        (path,) = (workplace / "a run's folder" / run / "checkpoints").iterdir()
        assert load_checkpoint(path).epoch == epochs
    command = [*shlex.split(stderr.partition("continue with: ")[2]), "--epochs", str(max(done) + 1)]
    resumed = subprocess.run(command, cwd=workplace, capture_output=True, text=True, timeout=280, env=environment())
    assert resumed.returncode == 0, resumed.stderr
    assert [lines(workplace, run) for run in runs] == [max(done) + 1] * 2
    assert (workplace / "a run's folder" / "comparison.json").is_file()


def test_one_within_another_hears_and_leaves_what_was_heard() -> None:
    with StopSignal() as outer:
        with StopSignal() as inner:
            os.kill(os.getpid(), signal.SIGHUP)
        assert inner.received == outer.received == signal.SIGHUP
        with StopSignal() as later:
            assert later.received == signal.SIGHUP
    interruption = outer.interruption("here", "so")
    assert str(interruption) == "here; continue with: so"
    assert interruption.exit_status == 129


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.received is None
    finally:
        signal.signal(signal.SIGHUP, before)
