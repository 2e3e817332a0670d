"""Which runs a comparison makes, and what it puts together, worked out by hand; no model is trained here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cdpg.evaluation.measures import TextMeasure
from cdpg.jobs import comparison
from cdpg.jobs.comparison import ComparisonRun, compare, comparison_runs
from cdpg.jobs.job import Inputs, Job
from cdpg.system.signals import StopSignal
from report_runs import write_lines

SATISFACTION = {"cdpg-seed0": 0.25, "cdpg-seed1": 0.75, "dpg-seed0": None, "dpg-seed1": 0.5}
"""Of each run; None stands for a figure that is not known."""


def job_in(folder: Path) -> Job:
    return Job.from_mapping({"task": "code-pep8", "model": "m", "seed": 7, "output_dir": str(folder)})


def runs_of(folder: Path) -> list[ComparisonRun]:
    return list(comparison_runs(job_in(folder), ["cdpg", "dpg"], 2))


def test_every_method_runs_with_every_seed_in_a_folder_of_its_own(tmp_path: Path) -> None:
    found = [
        (run.name, run.method, run.job.settings.method, run.job.settings.seed, run.folder.path)
        for run in runs_of(tmp_path)
    ]
    assert found == [
        ("cdpg-seed0", "cdpg", "cdpg", 7, tmp_path / "cdpg-seed0"),
        ("cdpg-seed1", "cdpg", "cdpg", 8, tmp_path / "cdpg-seed1"),
        ("dpg-seed0", "dpg", "dpg", 7, tmp_path / "dpg-seed0"),
        ("dpg-seed1", "dpg", "dpg", 8, tmp_path / "dpg-seed1"),
    ]


class Figures:
    """Stands for an evaluation of these runs."""

    ideal_samples = ({"row": 3},)

    def to_mapping(self, names: dict[str, str] | None = None) -> dict[str, Any]:
        models: dict[str, Any] = {"base": {"satisfaction": {"mean": 0.125}}}
        models |= {name: {"satisfaction": {"mean": value}} for name, value in SATISFACTION.items()}
        if names is None:
            return {"models": models, "notices": []}
        return {"notices": [], **{shown: models[name] for name, shown in names.items()}}


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The files of a comparison of four runs in ``tmp_path``; gives the folder that each name loads its model from."""
    runs, loaded = runs_of(tmp_path), {}
    for place, run in enumerate(runs, start=1):
        run.folder.path.mkdir()
        lines = [{"epoch": n, "samples": 10, "tokens": 100 * place, "seconds": 0.5 * place} for n in (1, 2)]
        write_lines(run.folder.metrics, lines)

    def evaluated(evaluator: Any, models: Any, *rest: Any) -> Figures:
        loaded.update({name: str(load()) for name, load in models.items()})
        return Figures()

    monkeypatch.setattr(comparison, "make_evaluator", lambda *given: None)
    monkeypatch.setattr(comparison, "load_model", lambda path, settings: path)
    monkeypatch.setattr(comparison, "evaluate_saved", evaluated)
    inputs = Inputs([], [], [lambda prompts, completions: []], TextMeasure(), None)  # nothing is evaluated
    assert compare(job_in(tmp_path), inputs, runs, None, StopSignal()) is not None
    return loaded


def test_a_comparison_loads_and_writes_each_run_under_its_own_name(tmp_path: Path, compared: dict[str, str]) -> None:
    assert compared == {name: str(tmp_path / name / "model") for name in SATISFACTION}
    costs = {
        name: {"epochs": 2, "samples": 20, "tokens": 200 * place, "seconds": 1.0 * place}
        for place, name in enumerate(SATISFACTION, start=1)
    }
    whole = json.loads((tmp_path / "comparison.json").read_text())
    assert whole["costs"] == costs
    for name, value in SATISFACTION.items():
        own = json.loads((tmp_path / name / "evaluation.json").read_text())
        assert (tmp_path / name / "ideal_samples.jsonl").read_text() == '{"row": 3}\n'
        assert own["base"] == {"satisfaction": {"mean": 0.125}}
        assert own["tuned"] == {"satisfaction": {"mean": value}}
        assert own["costs"] == {"tuned": costs[name]}


def test_a_metric_over_seeds(tmp_path: Path, compared: dict[str, str]) -> None:
    whole = json.loads((tmp_path / "comparison.json").read_text())
    assert whole["seeds"] == {
        "cdpg": {"satisfaction": {"mean": 0.5, "low": 0.25, "high": 0.75, "values": [0.25, 0.75]}},
        "dpg": {"satisfaction": {"mean": 0.5, "low": 0.5, "high": 0.5, "values": [None, 0.5]}},
    }
