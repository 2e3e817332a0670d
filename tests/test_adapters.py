"""Adapters: what the base is beside them, and what is saved of them."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import tiny
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.cli import app
from cdpg.errors import UserError
from cdpg.models.loading import load_model
from cdpg.models.scoring import score_samples
from cdpg.rollout.sampler import Sampler
from cdpg.storage.provenance import weights_digest
from enumeration import tabular

peft = pytest.importorskip("peft")

IDS = torch.arange(8)[None]
Q = ["q_proj"]


def even(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return [len(text) % 2 == 0 for text in completions]


def make(folder: Path, model: Any, adapters: Any = None, family: str = "llama", **settings: Any) -> CDPGTrainer:
    config = CDPGConfig(
        output_dir=str(folder), device="cpu", contexts_per_epoch=2, num_generations=8, max_completion_length=6,
        learning_rate=1e-2, check_workers=0, warmup_epochs=0, **{"epochs": 3, **settings},
    )  # fmt: skip
    return CDPGTrainer(
        model, even, config, ["two dogs", "a"], processing_class=tiny.tokenizer_for(family), peft_config=adapters
    )


@torch.no_grad()
def logits(module: nn.Module) -> Tensor:
    found: Tensor = module(input_ids=IDS).logits
    return found


def log_a(trainer: CDPGTrainer, samples: Any) -> Tensor:
    with torch.no_grad(), trainer.base.as_base():
        return score_samples(trainer.base, samples, torch.arange(16), 200)


@pytest.mark.parametrize(
    ("family", "settings", "copied"),
    [
        ("llama", {}, False),
        pytest.param("llama", {"init_lora_weights": False}, False, marks=pytest.mark.exhaustive),
        ("llama", {"modules_to_save": ["lm_head"]}, False),
        pytest.param("llama", {"bias": "all"}, False, marks=pytest.mark.exhaustive),  # which has none
        ("llama", {"init_lora_weights": "pissa"}, True),
        pytest.param("llama", {"init_lora_weights": "olora"}, True, marks=pytest.mark.exhaustive),
        ("qwen2", {"bias": "all"}, True),
        pytest.param("qwen2", {"bias": "lora_only"}, True, marks=pytest.mark.exhaustive),
    ],
)
def test_log_a_is_that_of_the_model_before_its_adapters(
    tmp_path: Path, family: str, settings: dict[str, Any], copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.make_model(family)
    original = load_model(copy.deepcopy(model), CDPGConfig(device="cpu"), tiny.tokenizer_for(family))
    trainer = make(tmp_path, model, peft.LoraConfig(r=4, target_modules=Q, **settings), family)
    assert (trainer.base is not trainer.policy) == copied
    seen = []
    draw = Sampler.draw

    def watched(*given: Any, **options: Any) -> Any:
        seen.append(draw(*given, **options))
        return seen[-1]

    monkeypatch.setattr(Sampler, "draw", watched)
    before = logits(trainer.model)
    trainer.train()
    assert len(seen) == 3
    for epoch in seen:
        with torch.no_grad():
            expected = score_samples(original, epoch.samples, torch.arange(16), 200)
        assert torch.equal(log_a(trainer, epoch.samples), expected)
        satisfying = epoch.b > 0
        assert torch.allclose(epoch.log_a[satisfying], expected.sum(dim=2)[satisfying], atol=1e-4)
    assert not torch.allclose(logits(trainer.model), before, atol=1e-3), "the policy is trained"
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.allclose(logits(saved), logits(trainer.model), atol=1e-4)


def test_a_base_that_peft_changes_unforeseen_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapt = peft.get_peft_model

    def changed(module: Any, config: Any) -> Any:
        with torch.no_grad():
            module.lm_head.weight[0, 0] += 1e-3
        return adapt(module, config)

    monkeypatch.setattr(peft, "get_peft_model", changed)
    with pytest.raises(UserError, match="the base is lost"):
        make(tmp_path, tiny.make_model("llama"), peft.LoraConfig(target_modules=Q))


def test_how_adapters_were_asked_for_is_known_beside_a_copied_base(tmp_path: Path) -> None:
    def train(alpha: int, epochs: int, resume: bool) -> None:
        adapters = peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=Q, init_lora_weights="pissa")
        make(tmp_path, tiny.make_model("llama"), adapters, epochs=epochs).train(resume_from_checkpoint=resume)

    train(4, 1, resume=False)
    with pytest.raises(UserError, match="the adapters changed"):
        train(8, 2, resume=True)
    train(4, 2, resume=True)


@pytest.mark.parametrize(
    ("family", "settings", "name"),
    [
        ("llama", {"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ("llama", {"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ("llama", {"target_modules": Q, "layer_replication": [[0, 2], [1, 2]]}, "q_proj"),
        ("bart", {"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ("bart", {"target_modules": Q, "modules_to_save": ["lm_head"]}, "lm_head"),
    ],
)
def test_adapters_of_tied_weights_are_refused(tmp_path: Path, family: str, settings: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError, match=rf"adapters for \S*{name}, whose weights are tied to"):
        make(tmp_path, tiny.make_model(family), peft.LoraConfig(r=4, **settings), family)


@pytest.mark.parametrize(
    "adapters",
    [
        peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]),
        peft.VeraConfig(r=4, target_modules=Q),  # whose layers share their projections
    ],
)
def test_adapters_of_weights_that_are_not_tied_are_saved(tmp_path: Path, adapters: Any) -> None:
    trainer = make(tmp_path, tiny.make_model("qwen2"), adapters, "qwen2", epochs=2)
    trainer.train()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.allclose(logits(saved), logits(trainer.model), atol=1e-4)


def came_with_adapters(seed: int) -> Any:
    """The same model with other adapters for each seed."""
    model = tiny.make_model("llama")
    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=Q, init_lora_weights=False))


def test_a_model_that_came_with_adapters_is_its_own_base_and_saved_whole(tmp_path: Path) -> None:
    model = came_with_adapters(0)
    start = logits(model.eval())
    trainer = make(tmp_path, model)
    trainer.train()
    assert torch.equal(logits(trainer.base.module), start)
    assert not torch.allclose(logits(model), start, atol=1e-3)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.allclose(logits(saved), logits(model), atol=1e-4)
    assert (tmp_path / "model" / "adapter" / "adapter_model.safetensors").is_file()


def test_a_run_is_not_continued_over_other_adapters_that_the_model_came_with(tmp_path: Path) -> None:
    make(tmp_path, came_with_adapters(0), epochs=1).train()
    with pytest.raises(UserError, match="the base changed"):
        make(tmp_path, came_with_adapters(1), epochs=2).train(resume_from_checkpoint=True)
    make(tmp_path, came_with_adapters(0), epochs=2).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("adapters", [None, peft.LoraConfig(target_modules=Q)])
def test_adapters_that_transformers_put_in_are_refused(tmp_path: Path, adapters: Any) -> None:
    model = tiny.make_model("llama")
    model.add_adapter(peft.LoraConfig(target_modules=Q))
    with pytest.raises(UserError, match="adapters that Transformers put in"):
        make(tmp_path, model, adapters)


def test_a_folder_of_a_model_and_an_adapter_is_refused(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "model", "llama")
    adapted = peft.get_peft_model(tiny.make_model("llama"), peft.LoraConfig(target_modules=Q))
    adapted.peft_config["default"].base_model_name_or_path = str(folder)
    adapted.save_pretrained(folder)
    with pytest.raises(UserError, match="adapters that Transformers put in"):
        load_model(str(folder), CDPGConfig(device="cpu"))


def test_the_base_under_new_adapters_has_the_digest_of_the_model_alone(tmp_path: Path) -> None:
    """The parameters' names, which checkpoints contain, stay the same."""
    plain = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in tiny.make_model("llama").parameters()))
    for adapters in (None, peft.LoraConfig(target_modules=Q), peft.LoraConfig(target_modules=Q, use_dora=True)):
        trainer = make(tmp_path, tiny.make_model("llama"), adapters)
        assert weights_digest(trainer.base.module) == plain.hexdigest()


# By settings.


def test_settings_ask_for_the_adapters_that_peft_would_be_given(tmp_path: Path) -> None:
    given = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    by_hand = make(tmp_path / "hand", tiny.make_model("llama"), given)
    by_name = make(tmp_path / "name", tiny.make_model("llama"), lora_rank=4)
    for trainer in (by_hand, by_name):
        trainer.train()
    assert by_name.base is by_name.policy
    assert not by_name.model.training, "or dropout, where there is any, would be on"
    saved = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "model") for name in ("hand", "name")]
    assert torch.equal(logits(saved[0]), logits(saved[1]))
    assert not torch.allclose(logits(saved[1]), logits(tiny.make_model("llama")), atol=1e-4), "it has learnt"
    chosen = make(
        tmp_path, tiny.make_model("llama"), lora_rank=2, lora_alpha=3, lora_target_modules=["q_proj", "v_proj"]
    )
    config = chosen.model.peft_config["default"]  # type: ignore[index, operator]
    assert (config.r, config.lora_alpha, config.target_modules) == (2, 3, {"q_proj", "v_proj"})


@pytest.mark.parametrize(
    ("settings", "adapters", "message"),
    [
        ({"lora_rank": 0}, None, "lora_rank must be at least 1, not 0"),
        ({"lora_alpha": 8}, None, "lora_alpha and lora_target_modules are for adapters: set lora_rank"),
        ({"lora_rank": 4, "lora_alpha": 0}, None, "lora_alpha must be above 0"),
        ({"lora_rank": 4, "lora_target_modules": []}, None, "lora_target_modules must name a layer"),
        ({"lora_rank": 4}, peft.LoraConfig(target_modules=Q), "lora_rank and peft_config both ask for adapters"),
        ({}, {"r": 8}, r"peft_config takes a configuration of PEFT, such as peft.LoraConfig\(r=8\), not {'r': 8}"),
        ({"lora_rank": 4, "lora_target_modules": ["nosuch"]}, None, "the model cannot be given these adapters: Target"),
    ],
)
def test_what_cannot_be_had_is_reported(tmp_path: Path, settings: dict[str, Any], adapters: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(tmp_path, tiny.make_model("llama"), adapters, **settings)


def test_adapters_of_a_table_and_without_peft_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="adapters are for models of Transformers, not for a TabularModel"):
        make(tmp_path, tabular(1), lora_rank=4)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"lora_rank is set, but PEFT is not installed: pip install 'cdpg\[peft\]'"):
        make(tmp_path, tiny.make_model("llama"), lora_rank=4)


def test_commands_on_a_run_with_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "llama", "llama")
    (tmp_path / "contexts.txt").write_text("two dogs\na\n")
    words = [
        "--model", "llama", "--contexts", "contexts.txt", "--constraint", "test_adapters:even", "--output-dir", "out",
        *(word for setting in (
            "lora_rank=4", "epochs=1", "num_generations=4", "contexts_per_epoch=2", "max_completion_length=6",
            "evaluation_samples=2", "check_workers=0", "device=cpu", "learning_rate=0.01", "warmup_epochs=0",
        ) for word in ("--set", setting)),
    ]  # fmt: skip

    def invoked(*command: str) -> str:
        result = CliRunner().invoke(app, list(command))
        assert result.exit_code == 0, (result.output, result.exception)
        return result.output

    assert "memory of a run" in invoked("check", *words)
    invoked("run", *words, "--no-report")
    first = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert "figures: out/evaluation.json" in invoked("evaluate", "out")
    again = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert again["base"]["satisfaction"] == first["base"]["satisfaction"]
    for metric, found in first["tuned"].items():
        assert again["tuned"][metric] == pytest.approx(found, abs=1e-4), "the merged model is the tuned one"
    assert "log-probability" in invoked("sample", "out", "--context", "two dogs", "-n", "1")
    invoked("run", *words, "--no-report", "--resume", "--set", "epochs=2")
    refused = CliRunner().invoke(app, ["run", *words, "--resume", "--set", "epochs=3", "--set", "lora_rank=8"])
    assert "lora_rank was 4 and is 8" in str(refused.exception)
