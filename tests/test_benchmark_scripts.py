"""The parts of the benchmarks that no other test runs, at the smallest size."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

import cdpg
from cdpg import CDPGConfig
from cdpg.jobs.job import Job

SMALL = {"contexts_per_epoch": 2, "num_generations": 4, "max_completion_length": 12, "check_workers": 0}


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module(name)


def shrink(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Every job has these settings instead of its preset's."""
    whole = Job.from_mapping
    monkeypatch.setattr(Job, "from_mapping", lambda values: whole({**values, **SMALL, **settings}))


def test_soundness_is_looked_at_on_whole_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    pruning = script("pruning", monkeypatch)
    shrink(monkeypatch, max_completion_length=32)
    given = Namespace(
        task="code-compilability", model=None, contexts=8, samples=4, rare=False, control_variate=False, sound=1
    )
    found = pruning.check_soundness(given)
    assert found["satisfying"] >= 1 and found["prefixes"] > 1
    assert found["called hopeless"] == 0


def test_an_epoch_of_a_version_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = script("versions", monkeypatch)
    shrink(monkeypatch, replay=2, validation_contexts=24, gain_draws=16)
    side = versions.Side(Namespace(task="code-compilability", model=None, prune=False, what="epoch"))
    steps = [side.epoch(turn) for turn in (0, 1)]
    assert all(found["seconds"] > 0 and "seconds_gradient" in found for found in steps)
    assert side.state.best.epoch == 2 and side.state.may_replay
    assert len(side.state.replay) == 2 * SMALL["contexts_per_epoch"]
    side.close()


def test_every_racer_has_a_constant_rate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    race, trained = script("race", monkeypatch), []

    class Trainer:
        def __init__(self, model: Any, constraints: Any, settings: CDPGConfig, *rest: Any, **options: Any) -> None:
            trained.append(settings)

        def train(self) -> None:
            pass

    monkeypatch.setattr(cdpg, "CDPGTrainer", Trainer)
    inputs = Namespace(constraints=[], tuning=[], stop=None)
    task = Namespace(settings=CDPGConfig(warmup_epochs=5, decay_epochs=3), inputs=inputs, model="")
    clock = race.Clock(Namespace(minutes=1.0, snapshots=1), tmp_path)
    race.train_cdpg(task, clock, tmp_path)
    (settings,) = trained
    assert {settings.rate(epoch) for epoch in (1, 2, 50, 500)} == {settings.learning_rate}


def test_a_rate_of_an_unknown_racer_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    race = script("race", monkeypatch)
    monkeypatch.setattr(race, "race", lambda *given: pytest.fail("nothing is trained"))
    monkeypatch.setattr(sys, "argv", ["race.py", "--folder", str(tmp_path), "--rate", "cdgp=1e-4"])
    with pytest.raises(SystemExit):
        race.main()
    assert "no racer is called cdgp" in capsys.readouterr().err
