"""The tuned model as others get it: it loads with plain Transformers, and its card says what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

import tiny
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.storage.card import base_on_hub, card, write_card
from cdpg.storage.json_files import read_json, write_json
from cdpg.storage.run_folder import RunFolder

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


def quick(folder: Path, model: Any, **changes: Any) -> CDPGTrainer:
    """A trainer of a loaded model, for one epoch."""
    settings = {"epochs": 1, "contexts_per_epoch": 2, "num_generations": 4, "max_completion_length": 5}
    config = CDPGConfig(output_dir=str(folder / "run"), device="cpu", check_workers=0, **settings, **changes)  # type: ignore[arg-type]
    return CDPGTrainer(model, even, config, PROMPTS, processing_class=tiny.tokenizer_for("llama"))


@pytest.mark.parametrize(
    ("given", "saved", "told"),
    [
        ("trained", torch.float32, "are bfloat16, and the tuned ones are saved as float32"),
        ("original", torch.bfloat16, None),
    ],
)
@pytest.mark.parametrize("adapters", [False, True])
def test_the_type_of_the_weights_is_said_or_kept(
    tmp_path: Path, given: str, saved: torch.dtype, told: str | None, adapters: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is computed in bfloat16 here, which some processors cannot."""
    peft = pytest.importorskip("peft") if adapters else None
    tiny.tokenizer_for("llama").save_pretrained(tmp_path / "base")
    tiny.make_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "base")
    config = CDPGConfig(
        output_dir=str(tmp_path / "run"), epochs=1, contexts_per_epoch=2, num_generations=4, max_completion_length=5,
        device="cpu", check_workers=0, save_dtype=given, learning_rate=1e-2, warmup_epochs=0,
    )  # fmt: skip
    trainer = CDPGTrainer(
        str(tmp_path / "base"), even, config, PROMPTS,
        peft_config=peft and peft.LoraConfig(r=2, target_modules=["q_proj"]),
    )  # fmt: skip
    trainer.train()
    folder = trainer.folder.model
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {saved}
    assert read_json(folder / "config.json")["dtype"] == str(saved).removeprefix("torch.")
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters()), "training goes on in it"
    if not adapters:
        for name, tensor in weights.items():
            assert torch.equal(tensor, trainer.model.state_dict()[name].to(saved)), name
    else:
        kept = load_file(folder / "adapter" / "adapter_model.safetensors")
        assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    said = " ".join(capsys.readouterr().err.split())
    text = (folder / "README.md").read_text(encoding="utf-8")
    if told:
        assert f"the model's weights {told}, in which they are trained; save_dtype: original rounds" in said
        assert "The base's weights are `bfloat16`; these are saved as `float32`" in text
    else:
        assert "save_dtype" not in said
        assert "saved in the base's type, `bfloat16`.\n" in text, "there are no figures"


@pytest.mark.parametrize(
    ("evaluation", "told"),
    [
        ({"of_saved_model": False}, "; the figures are of the weights before rounding."),
        ({"of_saved_model": True}, "; the figures are of the saved weights."),
        ({}, "."),
    ],
)
def test_rounded_weights_are_the_measured_ones_if_they_were_loaded(evaluation: dict[str, Any], told: str) -> None:
    weights = {"original": "bfloat16", "saved": "bfloat16"}
    settings = {"origin": {"sampling": {"seq2seq": False, "weights": weights}}}
    text = card(settings, evaluation, SPENT, {"is_encoder_decoder": False})
    assert f"trained in float32 and are saved in the base's type, `bfloat16`{told}\n" in text


def test_a_loaded_model_has_the_type_that_it_was_given_in(tmp_path: Path) -> None:
    trainer = quick(tmp_path, tiny.make_model("llama").to(torch.float16), save_dtype="original")
    trainer.train()
    assert {t.dtype for t in load_file(trainer.folder.model / "model.safetensors").values()} == {torch.float16}
    plain = quick(tmp_path / "plain", tiny.make_model("llama"))
    plain.train()
    text = (plain.folder.model / "README.md").read_text(encoding="utf-8")
    assert "weights are" not in text and "base_model" not in text


def test_an_evaluation_before_any_training_is_written(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    found = trainer.evaluate()
    assert read_json(tmp_path / "run" / "evaluation.json")["base"] == json.loads(json.dumps(found["base"]))
    trainer.train()


def front_matter(text: str) -> dict[str, Any]:
    _, head, _ = text.split("---\n", 2)
    found: dict[str, Any] = yaml.safe_load(head)
    return found


@pytest.mark.parametrize(
    ("changes", "asked", "adapters"),
    [
        ({}, None, None),
        ({"lora_rank": 2}, None, "`LORA`, rank `2`, alpha `4`"),
        ({"lora_rank": 3, "lora_alpha": 5}, None, "`LORA`, rank `3`, alpha `5.0`"),
        ({}, {"r": 8, "lora_alpha": 8}, "`LORA`, rank `8`, alpha `8`"),
    ],
)
def test_the_card_says_how_many_samples_were_drawn_and_what_was_tuned(
    tmp_path: Path, changes: dict[str, Any], asked: dict[str, Any] | None, adapters: str | None
) -> None:
    if changes or asked:
        peft = pytest.importorskip("peft")
    config = CDPGConfig(
        output_dir=str(tmp_path), epochs=1, contexts_per_epoch=3, num_generations=4, max_completion_length=5,
        device="cpu", check_workers=0, learning_rate=1e-3, **changes,
    )  # fmt: skip
    CDPGTrainer(
        tiny.make_model("llama"), even, config, PROMPTS, processing_class=tiny.tokenizer_for("llama"),
        peft_config=asked and peft.LoraConfig(target_modules=["q_proj"], **asked),
    ).train()  # fmt: skip
    lines = (tmp_path / "model" / "README.md").read_text(encoding="utf-8").splitlines()
    cells = [line.strip("|").split("|") for line in lines if line.startswith("| ") and line.count("|") == 3]
    rows = {name.strip(): value.strip() for name, value in cells}
    assert (rows["contexts per epoch (N)"], rows["samples per context (M)"]) == ("`3`", "`4`")
    assert (rows["epochs"], rows["samples drawn"], rows["learning rate"]) == ("1", "12", "`0.001`")
    assert rows.get("adapters") == adapters


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
    assert "base_model" not in facts and "base_model_relation" not in facts  # which was a folder
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


def test_the_card_tells_what_was_tuned_on_and_which_model_it_is() -> None:
    settings = {"origin": {"contexts": {"count": 1000}, "tuned_on": {"count": 936}}}
    evaluation = {"contexts": 300, "contexts_with_gain": 114, "tuned": {"gain": 1.0}}
    text = card(settings, evaluation, SPENT, None, {"keep": "best", "epoch": 1, "gain_validation": 0.5})
    for row in ("contexts to tune on | 936", "validation contexts | 64", "epochs | 2", "model of epoch | `1`"):
        assert f"| {row} |" in text
    assert "The gain is that of 114 of the 300 contexts, those with a sample of the ideal model." in text
    earlier = card({"origin": {"contexts": {"count": 1000}}}, {}, SPENT, None, {"keep": "last", "epoch": 2})
    assert "| contexts to tune on | 1,000 |" in earlier
    assert "validation contexts" not in earlier
    assert "model of epoch" not in earlier


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
    assert "library_name" in (trainer.save_model(tmp_path / "third") / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        ("/home/me/venv/lib/cdpg/__main__.py run a.yaml", "python -m cdpg run a.yaml"),
        ("/home/me/venv/bin/cdpg run /data/a.yaml", "cdpg run /data/a.yaml"),
        ("'/home/my files/bin/cdpg' run 'a b.yaml'", "cdpg run 'a b.yaml'"),
        ("cdpg run a/b.yaml", "cdpg run a/b.yaml"),
    ],
)
def test_the_command_is_shown_as_it_is_typed(recorded: str, shown: str) -> None:
    text = card({"origin": {"command": recorded}}, {}, SPENT, {"is_encoder_decoder": False})
    assert f"```\n{shown}\n```" in text


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
    assert set(facts) == {"library_name", "tags", "pipeline_tag"}
    lines = text.split("---\n", 2)[2].splitlines()
    assert not any(line.startswith(("# owned", "---")) for line in lines)
    assert [line for line in lines if line.startswith("# ")] == [lines[1]]
    table = [line for line in lines if line.startswith("| ") and "1.000 (0.500 to 2.000)" in line]
    assert len(table) == 1
    assert table[0].count("|") == 5  # four cells, as the header has
    assert "````\ncdpg run ``` --- # owned" in text  # the fence is longer than what it holds


def test_what_the_evaluation_says_of_the_model_is_a_warning() -> None:
    notices = ["no nearer to the ideal model than the base: 1.64 → 2.41 nats\n# owned", 3]
    told = {"base": ["so what"], "tuned": notices}
    evaluation = {"base": {}, "tuned": {"satisfaction": {"mean": 0.5}}, "notices": ["tuned: x"], "model_notices": told}
    text = card({}, evaluation, SPENT, {"is_encoder_decoder": False})
    assert "> **Warning:** no nearer to the ideal model than the base: 1.64 → 2.41 nats # owned.\n" in text
    assert text.count("**Warning:**") == 1


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("t5-small", True),
        ("EleutherAI/gpt-neo-125M", True),
        ("/home/me/models/my model", False),
        ("../x", False),
        ("", False),
        ("a/b/c", False),
        ("me/my--model", False),
        ("me/model.git", False),
        ("me/model-", False),
        ("code-tiny", False),
        ("x\nlicense: mit", False),
    ],
)
def test_only_a_name_on_the_hub_is_a_base_there(name: str, known: bool) -> None:
    recorded = {"origin": {"sampling": {"hub_id": name}}}
    assert base_on_hub("x", recorded) == (name if known or name == "code-tiny" else None)
    assert base_on_hub(name, {"origin": {"sampling": {"hub_id": None}}}) is None
    assert base_on_hub(name, {}) == (name if known else None), "of a run that did not record it"


def test_a_folder_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "me" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert base_on_hub("me/model", {}) is None


def test_a_model_from_the_hub_has_its_base_on_the_card(tmp_path: Path) -> None:
    """From the hub's cache, as offline."""
    commit = "1" * 40
    cached = tmp_path / "cache" / "models--me--tiny"
    tiny.save(cached / "snapshots" / commit, "llama")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    trainer = quick(tmp_path, AutoModelForCausalLM.from_pretrained("me/tiny", cache_dir=tmp_path / "cache"))
    trainer.train()
    facts = front_matter((trainer.folder.model / "README.md").read_text(encoding="utf-8"))
    assert (facts["base_model"], facts["base_model_relation"]) == ("me/tiny", "finetune")


def test_a_model_that_is_no_runs_gets_no_card(tmp_path: Path) -> None:
    write_card(tmp_path, RunFolder(tmp_path / "none"))
    assert list(tmp_path.iterdir()) == []


def test_strange_files_make_a_card_nevertheless() -> None:
    for evaluation in ({"tuned": 3}, {"tuned": {"satisfaction": "x"}}, {"confidence": "y", "tuned": {"length": None}}):
        text = card({"origin": 5, "constraint": "a:b"}, json.loads(json.dumps(evaluation)), SPENT, [])
        assert "base_model" not in front_matter(text)
        assert "1,234" in text
