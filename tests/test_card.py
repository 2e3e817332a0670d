"""The tuned model as others get it: it loads with plain Transformers, and its card says what it is."""

from __future__ import annotations

import copy
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

import tiny
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.card import card, hub_name, write_card
from cdpg.models.generation import saveable_generation
from cdpg.runlog import RunFolder, read_json, write_json

PROMPTS = [{"prompt": text} for text in ("two dogs", "the quick brown fox", "a")]
SPENT = {"epochs": 2, "samples": 1234, "tokens": 5000, "seconds": 60.0}


def even(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
    return [len(completion) % 2 == 0 for completion in completions]


def make_trainer(folder: Path, family: str = "llama", **changes: Any) -> CDPGTrainer:
    model = tiny.save(folder / "base" / family, family)
    settings: dict[str, Any] = {
        "epochs": 2, "contexts_per_epoch": 2, "num_generations": 4, "max_completion_length": 5, "device": "cpu",
        "evaluation_samples": 4, "check_workers": 0,
    }  # fmt: skip
    config = CDPGConfig(output_dir=str(folder / "run"), **(settings | changes))
    return CDPGTrainer(str(model), even, config, PROMPTS, PROMPTS, command="cdpg run short.yaml --epochs 2")


@pytest.mark.parametrize("adapters", [False, True])
def test_generation_settings_that_cannot_be_saved_are_left_out_and_told(
    tmp_path: Path, adapters: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformers loads settings that contradict each other, and will not save them."""
    peft = pytest.importorskip("peft") if adapters else None
    model = tiny.make_model("llama")
    model.generation_config.update(temperature=0.6, top_p=0.9, length_penalty=2.0, max_new_tokens=7)
    given = copy.deepcopy(model.generation_config)
    config = CDPGConfig(
        output_dir=str(tmp_path / "run"), epochs=1, contexts_per_epoch=2, num_generations=4, max_completion_length=5,
        device="cpu", check_workers=0,
    )  # fmt: skip
    CDPGTrainer(
        model, even, config, PROMPTS, processing_class=tiny.tokenizer_for("llama"),
        peft_config=peft and peft.LoraConfig(r=2, target_modules=["q_proj"]),
    ).train()  # fmt: skip
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("the model's others: length_penalty = 2.0, temperature = 0.6, top_p = 0.9") == 1
    saved = GenerationConfig.from_pretrained(tmp_path / "run" / "model")
    assert (saved.max_new_tokens, saved.eos_token_id, saved.temperature) == (7, tiny.EOS, None)
    assert model.generation_config == given


def test_settings_that_go_together_are_kept() -> None:
    given = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, length_penalty=2.0, eos_token_id=[1, 2])
    model = types.SimpleNamespace(generation_config=given)
    with saveable_generation(model):
        kept = model.generation_config.to_diff_dict()
    assert {**kept, "length_penalty": 2.0} == given.to_diff_dict()
    assert model.generation_config is given


def test_an_evaluation_before_any_training_is_written(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    found = trainer.evaluate()
    assert read_json(tmp_path / "run" / "evaluation.json")["base"] == json.loads(json.dumps(found["base"]))
    trainer.train()


def front_matter(text: str) -> dict[str, Any]:
    _, head, _ = text.split("---\n", 2)
    found: dict[str, Any] = yaml.safe_load(head)
    return found


@pytest.mark.parametrize(("family", "auto"), [("llama", AutoModelForCausalLM), ("t5", AutoModelForSeq2SeqLM)])
def test_the_model_loads_with_plain_transformers_and_has_its_card(tmp_path: Path, family: str, auto: Any) -> None:
    trainer = make_trainer(tmp_path, family)
    trainer.train()
    folder = RunFolder(tmp_path / "run")
    loaded = auto.from_pretrained(folder.model)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, trainer.model.state_dict()[name]), name
    tokenizer = AutoTokenizer.from_pretrained(folder.model)
    inputs = tokenizer("two dogs", return_tensors="pt")
    outputs = loaded.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=5)
    assert outputs.shape[0] == 1

    text = (folder.model / "README.md").read_text(encoding="utf-8")
    facts = front_matter(text)
    assert facts["base_model"] == family
    assert facts["library_name"] == "transformers"
    assert {"cdpg", "controlled-generation"} <= set(facts["tags"])
    assert facts.get("pipeline_tag") == ("text-generation" if family == "llama" else None)
    assert auto.__name__ in text
    assert "test_card:even" in text
    assert "cdpg run short.yaml --epochs 2" in text
    assert "## Limits" in text
    evaluation = read_json(folder.evaluation)
    for model in ("base", "tuned"):
        mean, low, high = (f"{evaluation[model]['satisfaction'][key]:.3f}" for key in ("mean", "low", "high"))
        assert f"{mean} ({low} to {high})" in text
    assert not list(folder.model.glob(".*"))


def test_without_an_evaluation_the_card_says_so(tmp_path: Path) -> None:
    make_trainer(tmp_path, evaluate_at_end=False).train()
    text = (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")
    assert "has not been evaluated" in text
    assert "evaluate the model before relying on it" in text


def test_figures_of_an_earlier_model_are_not_shown(tmp_path: Path) -> None:
    make_trainer(tmp_path).train()
    run = RunFolder(tmp_path / "run")
    evaluation = read_json(run.evaluation)
    assert evaluation["costs"]["tuned"]["epochs"] == 2
    evaluation["costs"]["tuned"]["epochs"] = 1
    write_json(run.evaluation, evaluation)
    write_card(run.model, run)
    assert "has not been evaluated" in (run.model / "README.md").read_text(encoding="utf-8")


def test_a_damaged_file_does_not_cost_the_model(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, epochs=1, evaluate_at_end=False)
    trainer.train()
    trainer.folder.evaluation.write_text("{", encoding="utf-8")
    assert (trainer.save_model() / "model.safetensors").is_file()


def test_a_card_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, epochs=1, evaluate_at_end=False)
    trainer.train()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "README.md").write_text("mine")
    trainer.save_model(elsewhere)
    assert (elsewhere / "README.md").read_text() == "mine"
    assert "base_model" in (trainer.save_model(tmp_path / "third") / "README.md").read_text(encoding="utf-8")


HOSTILE = "```\n---\n# owned\x1b[2J | `x` | <script>\u202e"


def test_text_from_outside_stays_text() -> None:
    settings = {
        "origin": {"model": f"../{HOSTILE}", "command": f"cdpg run {HOSTILE}", "versions": {HOSTILE: HOSTILE}},
        "constraint": [f"checks:{HOSTILE}"], "task": HOSTILE, "method": HOSTILE, "prompt_prefix": HOSTILE,
    }  # fmt: skip
    evaluation = {"base": {HOSTILE: {}}, "tuned": {HOSTILE: {"mean": 1.0, "low": 0.5, "high": 2.0}}}
    text = card(settings, evaluation, SPENT, {"is_encoder_decoder": False})
    assert not any(character in text for character in "\x1b\u202e")
    facts = front_matter(text)
    assert set(facts) == {"base_model", "base_model_relation", "library_name", "tags", "pipeline_tag"}
    lines = text.split("---\n", 2)[2].splitlines()
    assert not any(line.startswith(("# owned", "---")) for line in lines)
    assert [line for line in lines if line.startswith("# ")] == [lines[1]]
    table = [line for line in lines if line.startswith("| ") and "1.000 (0.500 to 2.000)" in line]
    assert len(table) == 1
    assert table[0].count("|") == 5  # four cells, as the header has
    assert "````\ncdpg run ``` --- # owned" in text  # the fence is longer than what it holds


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("t5-small", "t5-small"),
        ("EleutherAI/gpt-neo-125M", "EleutherAI/gpt-neo-125M"),
        ("/home/me/models/my model", "my-model"),
        ("../x", "x"),
        ("..", "local-model"),
        ("", "local-model"),
        ("a/b/c", "c"),
        ("x\nlicense: mit", "x-license-mit"),
    ],
)
def test_the_base_is_named_as_the_hub_takes_it(name: str, shown: str) -> None:
    assert hub_name(name) == shown


def test_a_folder_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "me" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_name("me/model") == "model"


def test_a_model_that_is_no_runs_gets_no_card(tmp_path: Path) -> None:
    write_card(tmp_path, RunFolder(tmp_path / "none"))
    assert list(tmp_path.iterdir()) == []


def test_strange_files_make_a_card_nevertheless() -> None:
    for evaluation in ({"tuned": 3}, {"tuned": {"satisfaction": "x"}}, {"confidence": "y", "tuned": {"length": None}}):
        text = card({"origin": 5, "constraint": "a:b"}, json.loads(json.dumps(evaluation)), SPENT, [])
        assert front_matter(text)["base_model"] == "unknown"
        assert "1,234" in text
