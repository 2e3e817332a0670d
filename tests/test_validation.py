"""Contexts that are set aside, and the model that is kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cdpg import CDPGConfig, CDPGTrainer
from cdpg.contexts.contexts import Context
from cdpg.contexts.digests import prompt_digests
from cdpg.errors import UserError
from cdpg.methods import METHODS, make_method
from cdpg.storage.jsonl import read_jsonl
from cdpg.training.validation import Best, keeps_best, set_aside
from enumeration import LETTERS, MAX_LENGTH, SharedTable, contexts_of
from noticed import noticed


def many(count: int, group: bool = False) -> list[Context]:
    return [
        Context(prompt=f"prompt {i // 2 if group else i}", columns={}, row=i + 1, group=f"g{i // 4}" if group else None)
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("contexts", "asked", "expected"),
    [(49, None, 0), (50, None, 5), (639, None, 63), (2000, None, 64), (2000, 100, 100), (12, 3, 3)],
)
def test_how_many_contexts_are_set_aside(contexts: int, asked: int | None, expected: int) -> None:
    tuning, aside = set_aside(many(contexts), CDPGConfig(validation_contexts=asked), decides=True)
    assert len(aside) == expected
    assert sorted([*tuning, *aside]) == list(range(contexts))
    other_seed = set_aside(many(contexts), CDPGConfig(validation_contexts=asked, seed=7, method="dpg"), decides=True)
    assert other_seed == (tuning, aside), "the same for every method and seed"


def test_groups_and_equal_prompts_are_on_one_side() -> None:
    contexts = many(200, group=True)
    tuning, aside = set_aside(contexts, CDPGConfig(), decides=True)
    assert len(aside) == 20
    assert not {contexts[i].group for i in tuning} & {contexts[i].group for i in aside}
    assert not set(prompt_digests([contexts[i] for i in tuning])) & set(prompt_digests([contexts[i] for i in aside]))


def test_nothing_is_set_aside_if_nothing_is_decided_or_all_is_one_group() -> None:
    assert set_aside(many(100), CDPGConfig(), decides=False) == (list(range(100)), [])
    same = [Context(prompt="one", columns={}, row=i + 1) for i in range(100)]
    assert set_aside(same, CDPGConfig(), decides=True) == (list(range(100)), [])


def test_the_best_model_is_kept_by_default_by_cdpg_alone() -> None:
    for name in METHODS:
        config = CDPGConfig(method=name)
        method = make_method(config)
        expected = name == "cdpg"  # the others are what the paper compares with
        assert keeps_best(config, method, held_out=1) == expected, name
        assert not keeps_best(config, method, held_out=0)
        assert keeps_best(config.replace(keep="best"), method, held_out=0)
        assert not keeps_best(config.replace(keep="last"), method, held_out=5)


def test_keep_takes_two_values() -> None:
    with pytest.raises(UserError, match="keep takes 'last' or 'best' or null, not 'first'"):
        CDPGConfig(keep="first")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="validation_contexts must be at least 1"):
        CDPGConfig(validation_contexts=0)


def has_a(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
    return ["a" in text for text in completions]


def trainer(folder: Path, rate: float = 0.1, check: Any = has_a, **changes: Any) -> CDPGTrainer:
    settings: dict[str, Any] = {
        "epochs": 6, "contexts_per_epoch": 2, "num_generations": 20, "max_completion_length": MAX_LENGTH,
        "learning_rate": rate, "warmup_epochs": 0, "device": "cpu", "check_workers": 0, "save_every": 1,
        "keep_checkpoints": 9, "evaluate_every": 0, "keep": "best", "validation_contexts": 1, "gain_draws": 200,
        "evaluation_samples": 20,
    }  # fmt: skip
    model = SharedTable(["a", "a b"], LETTERS, MAX_LENGTH, seed=2)
    held_out = [Context(prompt="a b", columns={}, row=9)]
    config = CDPGConfig(output_dir=str(folder), **(settings | changes))
    return CDPGTrainer(model, check, config, contexts_of(2), held_out)


def kept(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "kept.json").read_text())
    return found


def chosen(gains: list[list[float]]) -> int:
    """The epoch that is kept, by an independent computation: gains by epoch, of each context, the base's first."""
    peak, kept_epoch = np.array(gains[0]), 0
    for epoch, values in enumerate(gains[1:], start=1):
        gap = np.array(values) - peak
        noise = gap.std(ddof=1) / math.sqrt(len(gap)) if len(gap) > 1 else 0.0
        if gap.mean() >= -noise:
            kept_epoch = epoch
        if gap.mean() > 0:
            peak = np.array(values)
    return kept_epoch


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([[0, 0], [1, 1], [2, 2]], 2),
        ([[0, 0], [1, 1], [0.5, 0.5]], 1),  # surely worse, in both contexts alike
        ([[0, 0], [1, 1], [0.5, 1.4]], 2),  # worse by less than its noise
        ([[0, 0], [3, 3], [2.9, 2.98], [2.5, 3.1], [2.55, 2.7]], 3),  # compared with the largest, not the one before
        ([[0, 0], [-1, -1.1], [-2, -2.1]], 0),
        ([[0.0], [1.0], [0.9], [1.0]], 3),  # a single context has no noise that is known
    ],
)
def test_the_latest_model_that_is_not_surely_worse_is_kept(
    tmp_path: Path, gains: list[list[float]], expected: int
) -> None:
    validation = trainer(tmp_path).validation
    best = Best(0, 0.0, {}, tuple(gains[0]))
    for epoch, values in enumerate(gains[1:], start=1):
        best = validation.better(best, epoch, torch.tensor(values, dtype=torch.float64))
    assert best.epoch == expected == chosen(gains)
    assert best.gain == pytest.approx(np.mean(gains[expected]))


def test_the_model_that_is_kept_is_that_of_its_epoch(tmp_path: Path) -> None:
    """With a rate that is far too large later epochs are worse. One context decides: the largest gain is kept."""
    made = trainer(tmp_path, rate=1.5)
    made.train()
    lines = list(read_jsonl(tmp_path / "metrics.jsonl"))
    gains = [0.0, *(line["gain_validation"] for line in lines)]
    best = chosen([[gain] for gain in gains])
    assert best < 6, "the last is not the best, or this shows nothing"
    assert kept(tmp_path) == {"keep": "best", "epoch": best, "gain_validation": gains[best]}
    weights = load_file(tmp_path / "model" / "model.safetensors")["table"]
    if best:
        saved = load_file(tmp_path / "checkpoints" / f"epoch-{best:06d}" / "weights.safetensors")["policy.table"]
        assert torch.equal(weights, saved)
    assert torch.equal(made.policy.module["table"].detach(), weights), "the trainer's model is the kept one"  # type: ignore[index]
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert result["kept"]["epoch"] == best
    last = load_file(tmp_path / "checkpoints" / "epoch-000006" / "weights.safetensors")["policy.table"]
    assert not torch.equal(weights, last)


def test_the_last_model_is_kept_where_that_is_asked(tmp_path: Path) -> None:
    trainer(tmp_path, rate=1.5, keep="last", replay=0).train()
    last = load_file(tmp_path / "checkpoints" / "epoch-000006" / "weights.safetensors")["policy.table"]
    assert torch.equal(load_file(tmp_path / "model" / "model.safetensors")["table"], last)
    assert kept(tmp_path) == {"keep": "last", "epoch": 6, "gain_validation": None}
    assert all("gain_validation" not in line for line in read_jsonl(tmp_path / "metrics.jsonl"))


def test_the_base_is_kept_with_a_warning_if_nothing_was_gained(tmp_path: Path) -> None:
    made = trainer(tmp_path, rate=30.0, epochs=1)
    base = made.base.module["table"].detach().clone()  # type: ignore[index]
    with noticed() as told:
        made.train()
    assert kept(tmp_path)["epoch"] == 0
    assert torch.equal(load_file(tmp_path / "model" / "model.safetensors")["table"], base)
    assert "the model that is kept is the base; lower learning_rate (now 30)" in " ".join(told)


def test_contexts_set_aside_are_not_tuned_on(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.train()
    sampled = {sample["prompt"] for sample in read_jsonl(tmp_path / "samples.jsonl")}
    assert len(made.contexts) == 1
    assert sampled == {made.contexts[0].prompt}
    digests = (tmp_path / "tuned_on.txt").read_text().split()
    assert digests == sorted(prompt_digests(made.contexts))


def test_without_a_satisfying_sample_the_last_model_is_kept(tmp_path: Path) -> None:
    calls = [0]

    def never_at_first(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
        calls[0] += 1
        return ["a" in text and calls[0] > 1 for text in completions]

    with noticed() as told:
        trainer(tmp_path, check=never_at_first, gain_draws=8).train()
    assert (
        "none of 8 samples of the base satisfies on them: the last model is kept, and nothing is replayed"
        in " ".join(told)
    )
    assert kept(tmp_path)["keep"] == "last"


@pytest.mark.parametrize("stopped", [1, 3, 5])
def test_a_resumed_run_keeps_the_same_model(tmp_path: Path, stopped: int) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    trainer(whole, rate=1.5).train()
    trainer(parted, rate=1.5, epochs=stopped).train()
    trainer(parted, rate=1.5).train(resume_from_checkpoint=True)
    assert kept(whole) == kept(parted)
    models = [(folder / "model" / "model.safetensors").read_bytes() for folder in (whole, parted)]
    assert models[0] == models[1]
