"""SIGKILL at random moments, and at every change of the file system: what is resumed is the uninterrupted run."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aftermath import finish, result
from victim import EPOCHS, Keeper, events_of, log_of

import warm

Note = Callable[[str, object], None]
KILLS_OF_A_RUN = 5
"""After so many a run is let go on to its end."""


def test_the_comparison_can_fail(keeper: Keeper, tmp_path: Path) -> None:
    one, two = (finish(keeper, tmp_path / str(i), method=m) for i, m in enumerate(["dpg", "cdpg"]))
    assert [record["epoch"] for record in one["metrics"]] == list(range(1, EPOCHS + 1))
    assert one["evaluations"][0]["epoch"] == 0 and one["evaluations"][-1]["epoch"] == EPOCHS
    assert one["files"]["samples.jsonl"].count(b"\n") == 2 * EPOCHS
    assert all(one[part] != two[part] for part in ("files", "model", "metrics", "evaluations", "evaluation", "state"))


# --- at random moments ---


def kill_at_random(keeper: Keeper, tmp_path: Path, kills: int, seed: int, **request: Any) -> tuple[int, int]:
    """Kill runs until so many kills have hit; each run is resumed until it ends, and then compared. Kills and runs."""
    generator = random.Random(seed)
    request["check_workers"] = 1  # such a process is orphaned
    warm.python()  # does not count in the time that a run takes
    started = time.monotonic()
    expected = finish(keeper, tmp_path / "whole", **request)
    seconds = time.monotonic() - started
    hits = finished = 0
    while hits < kills:
        folder = tmp_path / f"run-{finished}"
        for attempt in range(KILLS_OF_A_RUN):
            started = time.monotonic()
            status = keeper.run(folder, kill_after=generator.uniform(0, seconds), **request)
            if status == 0:
                if attempt == 0:  # nobody killed it: that is how long a run takes by now
                    seconds = time.monotonic() - started
                break
            assert status == -signal.SIGKILL, log_of(folder).read_text()
            hits += 1
        else:  # a machine that has become slower must not keep a run from ever ending
            assert keeper.run(folder, **request) == 0, log_of(folder).read_text()
        assert result(folder) == expected
        shutil.rmtree(folder)
        finished += 1
    return hits, finished


def test_some_kills_at_random_moments(keeper: Keeper, tmp_path: Path) -> None:
    kills, runs = kill_at_random(keeper, tmp_path, kills=3, seed=1)
    assert kills >= 3 and runs >= 1


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("method", ["cdpg", "ziegler"])
@pytest.mark.parametrize(("kind", "kills"), [("tabular", 100), ("llama", 25), ("t5", 25)])
def test_many_kills_at_random_moments(
    keeper: Keeper, tmp_path: Path, kind: str, kills: int, method: str, record_property: Note
) -> None:
    hit, runs = kill_at_random(keeper, tmp_path, kills, seed=2, kind=kind, method=method)
    assert hit >= kills and runs >= 3
    record_property("kills", hit)
    record_property("runs compared", runs)


# --- at every change of the file system ---

Prepare = Callable[[Keeper, Path], None]


def fresh(keeper: Keeper, folder: Path) -> None:
    """A run from the start."""


def interrupted(keeper: Keeper, folder: Path) -> None:
    """A run that goes on after epoch 2, with lines of later epochs to cut and a save that was not finished."""
    assert keeper.run(folder, watch=True) == 0
    saves = [i for i, event in enumerate(events_of(folder), start=1) if event.startswith("save weights")]
    shutil.rmtree(folder)
    assert keeper.run(folder, at=saves[1], half=True) == -signal.SIGKILL


def strike_everywhere(keeper: Keeper, finished: Path, tmp_path: Path, prepare: Prepare, every: int) -> list[str]:
    """Kill a run before each ``every``-th change, and in the midst of each write; the changes struck at."""
    expected = result(finished)
    template = tmp_path / "template"
    prepare(keeper, template)
    folder = tmp_path / "run"

    def start(**request: Any) -> int:
        shutil.rmtree(folder, ignore_errors=True)
        if template.exists():
            shutil.copytree(template, folder)
        return keeper.run(folder, **request)

    assert start(watch=True) == 0
    events = events_of(folder)
    struck = []
    for number in range(1, len(events) + 1, every):
        for half in (False, True) if "in pieces" in events[number - 1] else (False,):
            assert start(at=number, half=half) == -signal.SIGKILL, events[number - 1]
            assert finish(keeper, folder) == expected, f"killed {'in' if half else 'before'} {events[number - 1]}"
            struck.append(events[number - 1].split()[0])
    return struck


def test_kills_at_some_changes(keeper: Keeper, finished: Path, tmp_path: Path) -> None:
    struck = strike_everywhere(keeper, finished, tmp_path, interrupted, every=40)
    assert len(struck) >= 4


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("prepare", [fresh, interrupted])
def test_kills_at_every_change(
    keeper: Keeper, finished: Path, tmp_path: Path, prepare: Prepare, record_property: Note
) -> None:
    struck = strike_everywhere(keeper, finished, tmp_path, prepare, every=1)
    expected = {"open", "write", "pwrite", "save", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir"}
    assert expected <= set(struck)
    assert len(struck) > 100
    record_property("kills", len(struck))
