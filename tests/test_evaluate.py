"""``cdpg evaluate``: what counts as a run's own evaluation, and where figures go."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import tiny
from cdpg.cli import app
from cdpg.config import read_yaml
from cdpg.errors import UserError
from cdpg.jobs.job import Job, without_task
from cdpg.storage.json_files import write_yaml
from cdpg.tasks import TASKS

Evaluate = Callable[..., Result]
FIGURES = {"base": {}, "tuned": {}, "changes": {"tuned": {}}, "contexts": 2, "new": True}


def even(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
    return [len(text) % 2 == 0 for text in completions]


def odd(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
    return [len(text) % 2 == 1 for text in completions]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, contexts and a run."""
    folder = tmp_path_factory.mktemp("finished")
    tiny.save(folder / "llama", "llama")
    (folder / "tuning.txt").write_text("two dogs\nthree cats\n", encoding="utf-8")
    (folder / "held_out.txt").write_text("one dog\nfour cats\n", encoding="utf-8")
    options = {
        "--model": "llama", "--contexts": "tuning.txt", "--eval-contexts": "held_out.txt", "--epochs": "1",
        "--constraint": "test_evaluate:even", "--output-dir": "run",
    }  # fmt: skip
    settings = {
        "contexts_per_epoch": 2, "num_generations": 4, "max_completion_length": 6, "evaluation_samples": 2,
        "device": "cpu", "check_workers": 0,
    }  # fmt: skip
    words = [word for option in options.items() for word in option]
    words += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = CliRunner().invoke(app, ["run", *words, "--no-report"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def place(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it to work in."""
    shutil.copytree(finished, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """The command, with nothing measured."""
    monkeypatch.setattr("cdpg.jobs.running.evaluate_model", lambda *arguments: (dict(FIGURES), ()))
    return lambda *words: CliRunner().invoke(app, ["evaluate", *words])


def is_new(path: Path) -> bool:
    return path.is_file() and "new" in json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--set", "evaluation_samples=3", "--seed", "1"],
        ["--set", "rows_per_pass=3", "--set", "tokens_per_pass=64", "--set", "check_workers=1"],
        ["--base", "llama", "--contexts", "held_out.txt", "--set", "constraint=test_evaluate:even"],
    ],
)
def test_what_a_run_was_made_for_is_its_own_evaluation(place: Path, evaluate: Evaluate, options: list[str]) -> None:
    assert evaluate("run", *options).exit_code == 0
    assert is_new(place / "run" / "evaluation.json")
    assert not (place / "evaluation.json").exists()


@pytest.mark.parametrize(
    "option",
    [
        "constraint=test_evaluate:odd",
        "model=./llama",
        "eval_contexts=tuning.txt",
        "prompt_prefix=Say ",
        "max_completion_length=8",
        "long_contexts=cut",
        "check_seconds=1",
        "task=code-compilability",
    ],
)
def test_anything_else_is_written_elsewhere(place: Path, evaluate: Evaluate, option: str) -> None:
    card = (place / "run" / "model" / "README.md").read_text(encoding="utf-8")
    result = evaluate("run", "--set", option)
    assert result.exit_code == 0, result.exception
    assert not is_new(place / "run" / "evaluation.json")
    assert is_new(place / "evaluation.json")
    assert (place / "run" / "model" / "README.md").read_text(encoding="utf-8") == card


def test_within_a_run_s_folder_what_is_not_its_own_needs_a_name(
    place: Path, evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place / "run")
    result = evaluate(".", "--task", "code-compilability")
    assert isinstance(result.exception, UserError)
    assert "--output" in str(result.exception)
    assert not is_new(Path("evaluation.json"))
    assert evaluate(".", "--task", "code-compilability", "--output", "other.json").exit_code == 0
    assert is_new(Path("other.json"))
    assert not is_new(Path("evaluation.json"))


def test_held_out_contexts_that_have_changed_are_reported_and_not_taken_for_the_run_s(
    place: Path, evaluate: Evaluate
) -> None:
    (place / "held_out.txt").write_text("two dogs\nthree cats\nfour cats\n", encoding="utf-8")
    result = evaluate("run")
    told = " ".join(result.output.split())
    assert "the held-out contexts are not those of the run, 2 then and 3 now" in told
    assert "training contexts may be among them" in told
    assert not is_new(place / "run" / "evaluation.json")
    assert is_new(place / "evaluation.json")


NAMED = ["--base", "llama", "--contexts", "held_out.txt", "--constraint", "test_evaluate:even"]


@pytest.mark.parametrize("model", ["run", "llama"])
def test_a_run_made_in_python_and_any_model_need_no_task(place: Path, evaluate: Evaluate, model: str) -> None:
    config = read_yaml(place / "run" / "config.yaml")
    inputs = Job.from_mapping(config).inputs()
    write_yaml(place / "run" / "config.yaml", {key: value for key, value in config.items() if key not in inputs})
    result = evaluate(model, *NAMED)
    assert result.exit_code == 0, result.exception
    assert is_new(place / "evaluation.json")
    assert not is_new(place / "run" / "evaluation.json")
    for given, missing in ((NAMED[:2], "--contexts, --constraint"), (NAMED[2:], "--base")):
        refused = evaluate(model, *given)
        assert isinstance(refused.exception, UserError)
        assert f": give {missing}, or a task with --task" in str(refused.exception)


def test_another_task_s_preset_holds_for_it() -> None:
    run = Job.from_mapping({"task": "translation-numbers", "seed": 3, "evaluation_samples": 5})
    kept = without_task({**run.inputs(), **run.settings.to_mapping()})
    assert kept == {"model": "t5-tiny", "data_seed": 0, "seed": 3, "evaluation_samples": 5}
    assert (
        Job.from_mapping({**kept, "task": "code-pep8"}).settings.max_completion_length
        == (TASKS["code-pep8"].presets["tiny"].settings["max_completion_length"])
    )
    own = Job.from_mapping({"model": "m", "contexts": "c.txt", "constraint": "a:b", "epochs": 7})
    assert without_task({**own.inputs(), **own.settings.to_mapping()}) == {"model": "m", "data_seed": 0, "epochs": 7}


def test_an_evaluation_loads_the_base_and_the_model_once_and_makes_no_optimiser(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = AutoModelForCausalLM.from_pretrained

    def counted(name: str, **options: Any) -> Any:
        loaded.append(Path(name).name)
        return load(name, **options)

    def refused(*given: Any, **options: Any) -> None:
        raise AssertionError("an optimiser was made")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", counted)
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", refused)
    before = json.loads((place / "run" / "evaluation.json").read_text())
    result = CliRunner().invoke(app, ["evaluate", "run"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert loaded == ["llama", "model"]
    after = json.loads((place / "run" / "evaluation.json").read_text())
    assert {name: after[name] for name in ("base", "tuned")} == {name: before[name] for name in ("base", "tuned")}
