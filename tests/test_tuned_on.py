"""Contexts that were tuned on are never called held out: by the files, the terminal, the report, or the model card."""

from __future__ import annotations

import html
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tiny
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.cli import app
from cdpg.cli.output import plan
from cdpg.cli.tables import with_interval
from cdpg.evaluation.held_out import contexts_in_words, on_few, on_gain, warning
from cdpg.jobs.job import Job
from cdpg.storage.card import card
from cdpg.storage.json_files import read_json
from cdpg.storage.jsonl import read_jsonl
from unpainted import unpainted

MANY = {"base": {}, "cdpg": {}, "dpg": {}}


@pytest.mark.parametrize(
    ("record", "words", "warned"),
    [
        ({"contexts": 200, "contexts_tuned_on": 0}, "200 held-out contexts", ""),
        ({"contexts": 1, "contexts_tuned_on": 0}, "1 held-out context", ""),
        ({"contexts": 12, "contexts_tuned_on": 12}, "12 contexts that the model was tuned on", "the contexts of"),
        ({"contexts": 1, "contexts_tuned_on": 1}, "1 context that the model was tuned on", "the contexts of"),
        (
            {"contexts": 2000, "contexts_tuned_on": 3},
            "2,000 contexts, 3 of which the model was tuned on",
            "3 of the 2,000 contexts of",
        ),
        (
            {"contexts": 5, "contexts_tuned_on": 5, "models": MANY},
            "5 contexts that the models were tuned on",
            "the contexts of",
        ),
        (
            {"contexts": 5, "contexts_tuned_on": 5, "models": {"base": {}, "tuned": {}}},
            "5 contexts that the model was tuned on",
            "the contexts of",
        ),
        ({"contexts": 200}, "200 contexts", ""),
        ({"contexts": 200, "contexts_tuned_on": None}, "200 contexts", ""),
        ({"contexts": 200, "contexts_tuned_on": 201}, "200 contexts", ""),
        ({"contexts": 200, "contexts_tuned_on": True}, "200 contexts", ""),
        ({"contexts": 0, "contexts_tuned_on": 0}, "0 held-out contexts", ""),
        ({"contexts_tuned_on": 3}, "contexts", ""),
        ({"contexts": 10**5000, "contexts_tuned_on": 0}, "contexts", ""),
        ({"contexts": -1, "contexts_tuned_on": "x"}, "contexts", ""),
        ({"contexts": 6, "contexts_tuned_on": 0, "contexts_applied": 6}, "6 held-out contexts", ""),
        (
            {"contexts": 6, "contexts_tuned_on": 0, "contexts_applied": 5},
            "6 held-out contexts (a constraint applies to 5 of them)",
            "",
        ),
        ({"contexts": 6, "contexts_applied": 7}, "6 contexts", ""),
    ],
)
def test_how_contexts_are_spoken_of(record: dict[str, Any], words: str, warned: str) -> None:
    assert contexts_in_words(record) == words
    told = "this evaluation were tuned on: the figures may be better than on new contexts"
    assert warning(record) == (f"{warned} {told}" if warned else "")


@pytest.mark.parametrize(
    ("record", "count"),
    [
        ({"contexts": 2}, 2),
        ({"contexts": 19}, 19),
        ({"contexts": 20}, 0),
        ({"contexts": 20, "contexts_applied": 19}, 19),
        ({"contexts": 1}, 0),
        ({}, 0),
    ],
)
def test_intervals_from_few_contexts_are_called_rough(record: dict[str, Any], count: int) -> None:
    sentence = f"intervals from so few contexts ({count}) are rough: evaluate on 20 or more to rely on them"
    assert on_few(record) == (sentence if count else "")


def even(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
    return [len(text) % 2 == 0 for text in completions]


SETTINGS = {
    "contexts_per_epoch": 2, "num_generations": 4, "max_completion_length": 4, "evaluation_samples": 2,
    "device": "cpu", "check_workers": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files hold the command that made them: its words must not be those that started the tests."""
    monkeypatch.setattr(sys, "argv", ["cdpg"])


def call(command: str, *words: str) -> str:
    """What a command says, on one line."""
    settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    with unpainted():
        result = CliRunner().invoke(app, [command, *words, *settings], catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_with_few_contexts_everything_says_that_they_were_tuned_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "llama", "llama")
    Path("few.txt").write_text("two dogs\nthree cats\nfour birds\n", encoding="utf-8")
    Path("other.txt").write_text("one fish\ntwo dogs\nsix bees\n", encoding="utf-8")
    Path("new.txt").write_text("one fish\nsix bees\n", encoding="utf-8")
    job = ("--model", "llama", "--contexts", "few.txt", "--constraint", "test_tuned_on:even", "--epochs", "1")
    words, told = "3 contexts that the model was tuned on", "the contexts of this evaluation were tuned on"

    said = call("run", *job, "--output-dir", "run")
    assert f"evaluation on {words}; output in run" in said
    advice = "the figures may be better than on new contexts; give others to evaluate on with --eval-contexts"
    assert f"{told}: {advice}" in said
    assert f"{words}, 2 samples each" in said
    rough = "intervals from so few contexts (3) are rough"
    assert said.count(rough) == 1
    assert said.index("epoch 1/1") < said.index("saving the model") < said.index("final evaluation")
    assert "held-out" not in said
    figures = read_json(Path("run/evaluation.json"))
    assert (figures["contexts"], figures["contexts_tuned_on"], figures["of_saved_model"]) == (3, 3, False)
    assert [line["contexts_tuned_on"] for line in read_jsonl(Path("run/evaluations.jsonl"))] == [3, 3]
    card = Path("run/model/README.md").read_text(encoding="utf-8")
    assert f"> **Warning:** {told}" in card and f"On {words}, 2 samples each" in card
    assert "held" not in card
    assert "I" + rough[1:] in card
    page = html.unescape(Path("run/report.html").read_text(encoding="utf-8"))
    assert f"<strong>Warning:</strong> {told}: the figures" in page
    assert f"Measured on {words}, 2 samples each" in page
    assert f"On {words}. Methods are compared" in page
    assert f"Mean of b over ancestral samples. On {words}." in page
    assert "held-out" not in page
    assert f"<strong>Warning:</strong> {rough}" in page

    said = call("evaluate", "run")
    assert "give others to evaluate on with --contexts" in said
    assert f"run on {words}" in said and rough in said
    figures = read_json(Path("run/evaluation.json"))
    assert (figures["contexts_tuned_on"], figures["of_saved_model"]) == (3, True), "it was loaded from its folder"
    said = call("evaluate", "run", "--contexts", "other.txt")
    assert "run on 3 contexts, 1 of which the model was tuned on" in said
    assert "1 of the 3 contexts of this evaluation were tuned on" in said
    assert "run on 2 held-out contexts" in call("evaluate", "run", "--contexts", "new.txt")
    assert read_json(Path("evaluation.json"))["contexts_tuned_on"] == 0
    nobodys = ("--base", "llama", "--contexts", "new.txt", "--constraint", "test_tuned_on:even")
    assert "run/model on 2 contexts" in call("evaluate", "run/model", *nobodys)
    assert read_json(Path("evaluation.json"))["contexts_tuned_on"] is None

    without = ("--set", "evaluate_at_end=false", "--set", "evaluate_every=0")  # of the runs themselves
    said = call("compare", *job, "--methods", "cdpg,reinforce", "--output-dir", "both", *without)
    assert f"evaluation on {words}; output in both; 2 runs" in said
    assert "llama, 3 contexts that the models were tuned on" in said and rough in said
    assert "held-out" not in said
    assert read_json(Path("both/comparison.json"))["contexts_tuned_on"] == 3
    figures = read_json(Path("both/reinforce/evaluation.json"))
    assert (figures["contexts_tuned_on"], figures["of_saved_model"]) == (3, True)


def test_contexts_that_are_shared_between_the_two_data_sets_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuning = [{"prompt": "two dogs", "place": 1}, {"prompt": "three cats", "place": 2}]
    evaluated = [{"prompt": "three cats", "place": 9}, {"prompt": "one fish", "place": 3}]
    config = CDPGConfig(output_dir=str(tmp_path / "run"), epochs=1, evaluation_contexts=1, **SETTINGS)
    model, tokenizer = tiny.make_model("llama"), tiny.tokenizer_for("llama")
    trainer = CDPGTrainer(model, even, config, tuning, evaluated, tokenizer)
    trainer.train()
    told = " ".join(capsys.readouterr().err.split())
    assert "1 of the 2 contexts of this evaluation were tuned on" in told
    assert "give others to evaluate on with eval_dataset" in told
    figures = read_json(trainer.folder.evaluation)
    assert (figures["contexts"], figures["contexts_tuned_on"]) == (2, 1)
    assert trainer.evaluate()["contexts_tuned_on"] == 1
    along = [(line["contexts"], line["contexts_tuned_on"]) for line in read_jsonl(trainer.folder.evaluations)]
    assert along == [(1, 1), (1, 1)]  # the first context alone
    digests = trainer.folder.tuned_on.read_text(encoding="ascii").split()
    assert len(digests) == 2 and all(len(digest) == 16 for digest in digests)


def test_figures_that_round_to_zero_have_no_sign() -> None:
    assert with_interval({"mean": -0.0004, "low": -0.0006, "high": 0.0}, 3) == "0.000 \\[-0.001, 0.000]"
    assert with_interval({"mean": 0.5, "low": None, "high": None}, 3) == "0.500"
    figures = {"mean": -0.0004, "low": -0.0006, "high": 0.0}
    text = card({}, {"contexts": 30, "base": {}, "tuned": {"ess": figures}}, {"epochs": 1, "samples": 2})
    assert "| 0.000 (-0.001 to 0.000) |" in text


def test_a_plan_without_an_evaluation_mentions_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notices: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("few.txt").write_text("two dogs\nthree cats\n", encoding="utf-8")
    values = {"model": "code-tiny", "contexts": "few.txt", "constraint": "test_tuned_on:even", "output_dir": "run"}

    def said(to_tune: bool = True, **settings: Any) -> tuple[str, str]:
        job = Job.from_mapping({**values, **settings})
        inputs = job.load(to_tune=to_tune)
        return plan(job, inputs).split("; ")[1], notices[-1]

    none: dict[str, Any] = {"evaluate_every": 0, "evaluate_at_end": False}
    same = "only 2 contexts: none are held out, and the evaluation uses the same ones"
    assert said(**none) == ("no evaluation", "only 2 contexts: none are held out")
    for settings in ({"evaluate_every": 0}, {"evaluate_at_end": False}):
        assert said(**settings) == ("evaluation on 2 contexts that the model was tuned on", same)
    assert said(to_tune=False, **none)[1] == same, "cdpg evaluate evaluates all the same"


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"contexts": 9, "contexts_with_gain": 9}, ""),
        ({"contexts": 9, "contexts_with_gain": 10}, ""),
        ({"contexts": 9}, ""),
        ({"contexts_with_gain": 3}, ""),
        (
            {"contexts": 2000, "contexts_with_gain": 1999},
            "the gain is that of 1,999 of the 2,000 contexts, those with a sample of the ideal model",
        ),
    ],
)
def test_over_which_contexts_the_gain_is_a_mean(record: dict[str, int], words: str) -> None:
    assert on_gain(record) == words
