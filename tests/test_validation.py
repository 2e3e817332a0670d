"""Validation contexts, and the model that is kept."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import factor_rules
from cdpg import CDPGConfig, CDPGTrainer, Reward
from cdpg.contexts.contexts import Context
from cdpg.contexts.digests import prompt_digests
from cdpg.errors import RunError, UserError
from cdpg.evaluation.ideal_samples import IdealSamples, draw_ideal_samples
from cdpg.methods import METHODS, make_method
from cdpg.methods.cdpg import CDPG
from cdpg.rollout.replay import ReplayBuffer
from cdpg.storage.checkpoints import Checkpoint
from cdpg.storage.jsonl import read_jsonl
from cdpg.storage.run_folder import RunFolder, costs
from cdpg.system.stopping import never_stop
from cdpg.training.epoch import Epoch
from cdpg.training.state import RunState
from cdpg.training.validation import Best, Validation, keeps_best, split_validation
from enumeration import LETTERS, MAX_LENGTH, SharedTable
from noticed import noticed


def many(count: int, group: bool = False) -> list[Context]:
    return [
        Context(prompt=f"prompt {i // 2 if group else i}", columns={}, row=i + 1, group=f"g{i // 4}" if group else None)
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("contexts", "asked", "expected"),
    [(49, None, 0), (50, None, 5), (639, None, 63), (2000, None, 64), (2000, 100, 100), (12, 7, 7)],
)
def test_how_many_contexts_are_set_aside(contexts: int, asked: int | None, expected: int) -> None:
    tuning, aside = split_validation(many(contexts), CDPGConfig(validation_contexts=asked), decides=True)
    assert len(aside) == expected
    assert sorted([*tuning, *aside]) == list(range(contexts))
    other_seed = split_validation(
        many(contexts), CDPGConfig(validation_contexts=asked, seed=7, method="dpg"), decides=True
    )
    assert other_seed == (tuning, aside), "the same for every method and seed"


def test_groups_and_equal_prompts_are_on_one_side() -> None:
    contexts = many(200, group=True)
    tuning, aside = split_validation(contexts, CDPGConfig(), decides=True)
    assert len(aside) == 20
    assert not {contexts[i].group for i in tuning} & {contexts[i].group for i in aside}
    assert not set(prompt_digests([contexts[i] for i in tuning])) & set(prompt_digests([contexts[i] for i in aside]))


def test_nothing_is_set_aside_if_nothing_is_decided_or_all_is_one_group() -> None:
    assert split_validation(many(100), CDPGConfig(), decides=False) == (list(range(100)), [])
    same = [Context(prompt="one", columns={}, row=i + 1) for i in range(100)]
    assert split_validation(same, CDPGConfig(), decides=True) == (list(range(100)), [])
    assert split_validation(many(100), CDPGConfig(gain_draws=0), decides=True) == (list(range(100)), [])
    assert split_validation(many(7), CDPGConfig(validation_contexts=7), decides=True) == (list(range(7)), [])


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
    with pytest.raises(UserError, match="validation_contexts must be at least 5"):
        CDPGConfig(validation_contexts=4)


def always(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
    return [True for _ in completions]


def has_a(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
    return ["a" in text for text in completions]


def trainer(
    folder: Path,
    rate: float = 0.1,
    check: Any = has_a,
    contexts: int = 7,
    held_out: str | None = "held out",
    **changes: Any,
) -> CDPGTrainer:
    """Of seven contexts, with one table for all, five are for validation."""
    settings: dict[str, Any] = {
        "epochs": 6, "contexts_per_epoch": 2, "num_generations": 20, "max_completion_length": MAX_LENGTH,
        "learning_rate": rate, "warmup_epochs": 0, "device": "cpu", "check_workers": 0, "save_every": 1,
        "keep_checkpoints": 9, "evaluate_every": 0, "keep": "best", "validation_contexts": 5, "gain_draws": 200,
        "evaluation_samples": 20,
    }  # fmt: skip
    model = SharedTable(["a"], LETTERS, MAX_LENGTH, seed=2)
    others = None if held_out is None else [Context(prompt=held_out, columns={}, row=9)]
    config = CDPGConfig(output_dir=str(folder), **(settings | changes))
    return CDPGTrainer(model, check, config, many(contexts), others)


def watched(made: CDPGTrainer, monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """The gains of each context after every epoch, as the run goes on; those of the base first."""
    found: list[list[float]] = [[0.0] * 5]
    better = made.validation.better

    def watch(best: Best, epoch: int, gains: torch.Tensor) -> Best:
        found.append(gains.tolist())
        return better(best, epoch, gains)

    monkeypatch.setattr(made.validation, "better", watch)
    return found


def kept(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "kept.json").read_text())
    return found


def chosen(gains: list[list[float]]) -> int:
    """The epoch that is kept, by an independent computation: gains by epoch, of each context, the base's first."""
    peak, kept_epoch = np.array(gains[0]), 0
    for epoch, values in enumerate(gains[1:], start=1):
        gap = np.array(values) - peak
        noise = gap.std(ddof=1) / math.sqrt(len(gap))
        if gap.mean() >= -2 * noise:
            kept_epoch = epoch
        if gap.mean() > 0:
            peak = np.array(values)
    return kept_epoch


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([[0, 0], [1, 1], [2, 2]], 2),
        ([[0, 0], [1, 1], [0.5, 0.5]], 1),  # surely worse, in both contexts alike
        ([[0, 0], [1, 1], [0.3, 0.9]], 2),  # worse by 1.3 standard errors
        ([[0, 0], [1, 1], [0.6, 0.8]], 1),  # worse by 3
        ([[0, 0], [3, 3], [2.9, 2.98], [2.5, 3.1], [2.55, 2.7]], 3),  # compared with the largest, not the one before
        ([[0, 0], [-1, -1.1], [-2, -2.1]], 0),
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


def test_only_contexts_that_had_a_sample_both_times_are_compared(tmp_path: Path) -> None:
    """Gains are paired by context, not by place among those that have a sample."""
    validation, nan = trainer(tmp_path).validation, math.nan
    best = Best(3, 1.5, {}, (nan, 1.0, 2.0, 1.5))
    better = validation.better(best, 4, torch.tensor([9.0, nan, 2.1, 1.6], dtype=torch.float64))
    assert (better.epoch, better.gain) == (4, pytest.approx((9 + 2.1 + 1.6) / 3))
    assert better.peak[0] == 9.0
    assert math.isnan(better.peak[1])
    worse = torch.tensor([9.0, nan, 1.9, 1.4], dtype=torch.float64)
    assert validation.better(best, 4, worse) == best, "by 0.1 in both; the first context is new"


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gain_that_is_not_finite_is_never_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: float) -> None:
    """An outcome of the ideal model that the policy cannot say: its gain is −∞, and the epoch is not kept."""
    made = trainer(tmp_path, epochs=2)
    measured = IdealSamples.gain

    def broken(self: IdealSamples, *given: Any) -> torch.Tensor:
        found = measured(self, *given)
        return found.index_fill(0, torch.tensor([1]), bad) if self.contexts == 5 else found

    monkeypatch.setattr(IdealSamples, "gain", broken)
    found = watched(made, monkeypatch)
    made.train()
    assert all(values[1] == -math.inf and math.isfinite(values[0]) for values in found[1:])
    assert kept(tmp_path)["epoch"] == 0
    assert [line["gain_validation"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [None, None]


def test_the_model_that_is_kept_is_that_of_its_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rate that is far too large later epochs are worse."""
    made = trainer(tmp_path, rate=3.0)
    found = watched(made, monkeypatch)
    made.train()
    lines = list(read_jsonl(tmp_path / "metrics.jsonl"))
    gains = [0.0, *(line["gain_validation"] for line in lines)]
    assert gains == pytest.approx([np.mean(values) for values in found], rel=1e-12)
    best = chosen(found)
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
    trainer(tmp_path, rate=3.0, keep="last", replay=0).train()
    last = load_file(tmp_path / "checkpoints" / "epoch-000006" / "weights.safetensors")["policy.table"]
    assert torch.equal(load_file(tmp_path / "model" / "model.safetensors")["table"], last)
    assert kept(tmp_path) == {"keep": "last", "epoch": 6, "gain_validation": None}
    assert all("gain_validation" not in line for line in read_jsonl(tmp_path / "metrics.jsonl"))


def test_the_gain_of_the_last_model_is_written_where_it_was_measured(tmp_path: Path) -> None:
    trainer(tmp_path, epochs=2, keep="last").train()
    *_, last = read_jsonl(tmp_path / "metrics.jsonl")
    assert kept(tmp_path) == {"keep": "last", "epoch": 2, "gain_validation": last["gain_validation"]}


def test_what_was_drawn_for_the_contexts_set_aside_is_part_of_the_cost(tmp_path: Path) -> None:
    """All samples satisfy: a round of 8 for each of the five."""
    trainer(tmp_path, check=always, epochs=2).train()
    first, second = read_jsonl(tmp_path / "metrics.jsonl")
    assert first["samples_aside"] == 5 * 8
    assert 0 < first["seconds_aside"] < time.perf_counter()
    assert "samples_aside" not in second
    spent = costs(RunFolder(tmp_path))
    assert spent["samples"] == first["samples"] + second["samples"] + 40
    assert spent["seconds"] == pytest.approx(first["seconds"] + second["seconds"] + first["seconds_aside"])


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
    assert len(made.contexts) == 2
    assert sampled == {context.prompt for context in made.contexts}
    digests = (tmp_path / "tuned_on.txt").read_text().split()
    assert digests == sorted(prompt_digests(many(7))), "the validation contexts choose the model"


def test_a_context_that_chooses_the_model_is_not_held_out(tmp_path: Path) -> None:
    tuned = {context.prompt for context in trainer(tmp_path).contexts}
    aside = next(context.prompt for context in many(7) if context.prompt not in tuned)
    trainer(tmp_path, held_out=str(aside), epochs=1).train()
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert (result["contexts"], result["contexts_tuned_on"]) == (1, 1)


def test_without_a_satisfying_sample_the_last_model_is_kept(tmp_path: Path) -> None:
    calls = [0]

    def never_at_first(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
        calls[0] += 1
        return ["a" in text and calls[0] > 1 for text in completions]

    with noticed() as told:
        trainer(tmp_path, check=never_at_first, gain_draws=8).train()
    assert (
        "40 samples of the base contain a satisfying one for only 0 of them, and 5 are needed: the last model is kept, "
        "and nothing is replayed; raise gain_draws or validation_contexts" in " ".join(told)
    )
    assert kept(tmp_path)["keep"] == "last"


def test_one_sample_of_the_ideal_model_is_enough_for_a_context(tmp_path: Path) -> None:
    with noticed() as told:
        trainer(tmp_path, check=always, gain_draws=1, epochs=1).train()
    assert (
        "5 contexts are used for validation; 5 of them have a sample of the ideal model, on which the gain is measured"
        in told
    )
    assert kept(tmp_path)["keep"] == "best"


def test_a_stop_is_looked_for_while_validation_contexts_are_sampled(tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop() -> None:
        raise Stopped

    made = trainer(tmp_path)
    with pytest.raises(Stopped):
        made.validation.begin(made.args, stop)
    made.validation.begin(made.args, never_stop)
    made.validation.begin(made.args, stop)  # they are there already


def test_the_gain_is_that_of_the_target_with_its_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of the base count by exp(r/β) in the gain that chooses the model, too."""
    drawn: list[IdealSamples] = []

    def draw(*args: Any, **options: Any) -> IdealSamples:
        drawn.append(draw_ideal_samples(*args, **options))
        return drawn[-1]

    monkeypatch.setattr("cdpg.training.validation.draw_ideal_samples", draw)
    made = trainer(tmp_path, check=Reward(factor_rules.minus_length, 2.0))
    made.validation.begin(made.args, never_stop)
    with torch.no_grad():
        made.policy.module["table"] *= 1.5  # type: ignore[index]
    found = made.validation.gains(1000)
    assert found is not None
    expected = drawn[0].gain(made.policy, made.processes, 1000, (0.5,))
    assert torch.equal(found, expected)
    assert not torch.allclose(found, drawn[0].gain(made.policy, made.processes, 1000))


def test_with_samples_for_too_few_contexts_nothing_is_decided(tmp_path: Path) -> None:
    """Of four contexts the noise is hardly known."""
    tuned = {context.prompt for context in trainer(tmp_path).contexts}
    hard = next(context.prompt for context in many(7) if context.prompt not in tuned)

    def easy(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
        return [prompt != hard for prompt in prompts]

    with noticed() as told:
        trainer(tmp_path, check=easy, gain_draws=8).train()
    assert "a satisfying one for only 4 of them, and 5 are needed" in " ".join(told)
    assert kept(tmp_path) == {"keep": "last", "epoch": 6, "gain_validation": None}
    assert all(line["steps_replayed"] == 0 for line in read_jsonl(tmp_path / "metrics.jsonl"))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"validation_contexts": None},
            "7 training contexts are too few to use some for validation by default, which needs 50; set",
        ),
        ({"gain_draws": 0}, "gain_draws is 0, so no gain is measured; raise it"),
        ({"validation_contexts": 7}, "the 7 training contexts cannot be split like this"),
    ],
)
def test_settings_without_effect_are_named(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match="there are no validation contexts to choose the model by: " + re.escape(why)):
        trainer(tmp_path, **changes)
    for own in ({"keep": None}, {"keep": "last"}, {"keep": None, "replay": 0}):
        with noticed() as told:
            made = trainer(tmp_path, **changes | own)
        assert f"nothing is replayed and the last model is kept, because {why}" in " ".join(told)
        assert len(made.contexts) == 7
    with noticed() as told:
        trainer(tmp_path, **changes | {"keep": "last", "replay": 0})
        trainer(tmp_path, **changes | {"keep": None, "method": "dpg"})
    assert not any("the last model is kept" in notice for notice in told), "nothing is to be decided"


@pytest.mark.parametrize("stopped", [1, 3, 5])
def test_a_resumed_run_keeps_the_same_model(tmp_path: Path, stopped: int) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    trainer(whole, rate=3.0).train()
    trainer(parted, rate=3.0, epochs=stopped).train()
    trainer(parted, rate=3.0).train(resume_from_checkpoint=True)
    assert kept(whole) == kept(parted)
    models = [(folder / "model" / "model.safetensors").read_bytes() for folder in (whole, parted)]
    assert models[0] == models[1]


def test_the_gains_of_a_checkpoint_belong_to_their_contexts(tmp_path: Path) -> None:
    """Those of a version that stored the covered contexts alone are paired with them, or all count as the mean."""
    state = {"objective": {}, "best": {"epoch": 3, "gain": 0.75, "peak": [0.5, None, 1.0, 0.0, 0.25, 2.0]}}
    checkpoint = Checkpoint(tmp_path, 3, {"best": {}}, state)
    of_run: dict[str, Any] = {"validation_contexts": 6, "gain_draws": 8}
    hard = many(8)[split_validation(many(8), CDPGConfig(**of_run), decides=True)[1][1]].prompt

    def easy(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
        return [prompt != hard for prompt in prompts]

    made = trainer(tmp_path, check=easy, contexts=8, **of_run)
    restored = RunState.of(checkpoint, made.method)
    assert restored.values()["best"] == state["best"]
    best, validation = restored.best, made.validation
    assert best is not None
    assert validation.resumed(best) == best
    validation.begin(made.args, never_stop)
    earlier = [validation.resumed(replace(best, peak=peak)).peak for peak in ((0.5, 1.0, 2.0, 3.0, 4.0), (0.5, 1.0))]
    assert [str(gain) for gain in earlier[0]] == ["0.5", "nan", "1.0", "2.0", "3.0", "4.0"]
    assert [str(gain) for gain in earlier[1]] == ["0.75", "nan", *["0.75"] * 4]


def test_gains_are_below_others_by_more_than_a_standard_error() -> None:
    gains = torch.tensor([0.0, -2.0, math.nan, -1.0])  # a mean of −1, with a standard error of 1/√3
    assert [Validation.is_below(gains + shift, [0.0] * 4) for shift in (0.3, 0.5)] == [True, False]
    assert [Validation.is_below(gains - shift, [0.0] * 4, 2.0) for shift in (0.3, 0.1)] == [True, False]
    assert not Validation.is_below(torch.zeros(4), [0.0] * 4), "equal ones are not"


def test_an_earlier_gain_that_was_not_finite_is_as_one_of_a_checkpoint() -> None:
    state = RunState({}, ReplayBuffer(1), Best(0, 0.0, {}, (0.0,) * 4), gains=(0.0, 0.5, -math.inf, math.nan))
    stored = RunState.of(Checkpoint(Path(), 1, {"best": {}}, state.values()), CDPG(CDPGConfig()))
    for shift in (-1.0, 1.0):
        gains = torch.tensor([0.1, 0.7, 0.2, math.nan]) + shift
        assert [Validation.is_below(gains, one.gains) for one in (state, stored)] == [shift < 0] * 2


def test_a_run_that_goes_on_has_no_results_of_its_earlier_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [tmp_path / name for name in ("evaluation.json", "ideal_samples.jsonl", "kept.json", "model")]
    trainer(tmp_path, epochs=1).train()
    assert all(path.exists() for path in results)

    def fails(self: Epoch, *given: Any) -> None:
        raise RunError("in the second epoch")

    monkeypatch.setattr(Epoch, "sample", fails)
    with pytest.raises(RunError, match="in the second epoch"):
        trainer(tmp_path, epochs=2).train(resume_from_checkpoint=True)
    assert not any(path.exists() for path in results)


def test_a_run_is_not_continued_with_other_contexts_to_tune_on(tmp_path: Path) -> None:
    """Without replay, there are validation contexts only if there are held-out ones."""
    of_run: dict[str, Any] = {"keep": None, "replay": 0}
    trainer(tmp_path, held_out=None, epochs=1, **of_run).train()
    with pytest.raises(UserError) as refused:
        trainer(tmp_path, epochs=2, **of_run).train(resume_from_checkpoint=True)
    assert "keep was 'last' and is 'best'" in str(refused.value)
    assert "7 contexts were tuned on, and 2 others would be now" in str(refused.value)
    trainer(tmp_path, held_out=None, epochs=2, **of_run).train(resume_from_checkpoint=True)
