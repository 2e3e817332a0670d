"""Samples of another model than the policy: the gradient, the figures of the policy, and what a run keeps, exactly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

import tiny
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.config import FIELDS
from cdpg.errors import UserError
from cdpg.methods import METHODS, make_method
from cdpg.methods.base import WeightedLoss
from cdpg.models.loading import load_base
from cdpg.models.scoring import score_samples
from cdpg.models.tabular import TabularModel
from cdpg.rollout.rescoring import recomputed, rescored
from cdpg.rollout.rollout import Rollout
from cdpg.rollout.sampler import Sampler, Stopwatch
from cdpg.storage.checkpoints import latest_checkpoint
from cdpg.storage.jsonl import read_jsonl
from cdpg.system.distributed import Processes
from cdpg.target import partition
from cdpg.target.divergence import kl_target_policy
from cdpg.target.proposal import mean_under_policy
from cdpg.target.target import log_target
from enumeration import Universe, contexts_of, exact_cross_entropy_gradient, flat_gradient, relative_error, tabular
from side_by_side import side_by_side

TIMES = "seconds"


def has_a(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return ["a" in completion for completion in completions]


def trainer_of(folder: Path, seeds: tuple[int, int] = (1, 2), **settings: Any) -> CDPGTrainer:
    values: dict[str, Any] = {
        "epochs": 5, "contexts_per_epoch": 3, "num_generations": 16, "max_completion_length": 3, "save_every": 100,
        "learning_rate": 0.3, "warmup_epochs": 0, "device": "cpu", "check_workers": 0, "log_samples": 48,
        "evaluate_every": 0, "evaluate_at_end": False, "output_dir": str(folder),
    }  # fmt: skip
    model = tabular(seeds[0])
    return CDPGTrainer(
        model, has_a, CDPGConfig(**(values | settings)), train_dataset=[{"prompt": c.prompt} for c in contexts_of(3)]
    )


def log_probs_of(model: TabularModel) -> Tensor:
    with torch.no_grad():
        return model.log_prob_table()


# The gradient.


class Enumerated:
    """A policy that has moved away from the base, and what may draw samples for it."""

    def __init__(self, folder: Path) -> None:
        made = trainer_of(folder, epochs=3, sync_every=4)
        made.train()
        self.policy: Any = made.policy
        self.universe = Universe.of(self.policy, contexts_of(3))
        self.b = self.universe.satisfied(lambda prompt, text: "a" in text)
        stored = latest_checkpoint(folder / "checkpoints")
        assert stored is not None
        assert stored.state["proposal"] == {"epoch": 0}
        stale = tabular(9)
        stale.table.data = stored.tensors["proposal"]["policy.table"]
        self.models = {"base": made.base, "folder": tabular(7), "stale": stale, "policy": self.policy}
        self.log_q = {name: self.universe.log_prob(model) for name, model in self.models.items()}
        self.log_target = log_target(self.log_q["base"], self.b)
        self.log_z = self.log_target.logsumexp(dim=1)

    def epoch(self, source: str) -> Rollout:
        return self.universe.epoch(self.b, self.log_q[source], self.log_q["base"])


@pytest.fixture(scope="module")
def enumerated(tmp_path_factory: pytest.TempPathFactory) -> Enumerated:
    return Enumerated(tmp_path_factory.mktemp("moved"))


@pytest.mark.parametrize("control_variate", [False, True])
@pytest.mark.parametrize("source", ["base", "folder", "stale"])
def test_the_expected_gradient_is_the_true_one(enumerated: Enumerated, source: str, control_variate: bool) -> None:
    """E_{x~q} [P/(Z q) − π/q] ∇log π by the production loss, one outcome at a time, weighted by its q."""
    case, log_q = enumerated, enumerated.log_q[source]
    assert (log_q - case.log_q["policy"]).abs().max() > 0.3, "the proposal is another model"
    epoch = case.epoch(source)
    weights = partition.weights(epoch.log_ratio, case.log_z, epsilon=0.0)
    loss = WeightedLoss(epoch, weights, follows_policy=False, subtracts_control_variate=control_variate)
    expected = torch.zeros(sum(p.numel() for p in case.policy.module.parameters()), dtype=torch.float64)
    for row in case.universe.rows[loss.active].tolist():
        case.policy.module.zero_grad(set_to_none=True)
        index = torch.tensor([row])
        samples = epoch.samples
        scores = case.policy.score([samples.prompts[row // samples.shape[1]]], _alone(samples.rows(index)))
        (loss.loss(index, scores) * log_q.flatten()[row].exp() / 3).backward()
        expected += flat_gradient(case.policy)
    true = exact_cross_entropy_gradient(case.policy, case.universe, case.log_target)
    assert relative_error(expected, true) < 1e-10


def _alone(rows: Any) -> Any:
    rows.context.zero_()
    return rows


# The figures of the policy.


@pytest.mark.parametrize("source", ["base", "folder", "stale", "policy"])
def test_the_policy_s_satisfaction_is_unbiased(enumerated: Enumerated, source: str) -> None:
    log_q, log_pi = enumerated.log_q[source], enumerated.log_q["policy"]
    everywhere = torch.ones_like(enumerated.b, dtype=torch.bool)
    count = enumerated.b.shape[1]
    scored = log_pi.masked_fill(enumerated.b == 0, math.nan)  # those are not scored
    found = mean_under_policy(enumerated.b * log_q.exp() * count, scored, log_q, everywhere)
    assert float(found) == pytest.approx(float((log_pi.exp() * enumerated.b).sum(dim=1).mean()), rel=1e-12)


def test_kl_is_that_of_the_policy_whatever_drew_the_samples(enumerated: Enumerated) -> None:
    """With every outcome drawn once from the uniform distribution, each mean is the exact sum."""
    log_pi, b = enumerated.log_q["policy"], enumerated.b
    uniform = torch.full_like(log_pi, -math.log(b.shape[1]))
    everywhere = torch.ones_like(b, dtype=torch.bool)
    scored = log_pi.masked_fill(b == 0, math.nan)
    found = kl_target_policy(enumerated.log_target, scored, everywhere, 0.0, uniform)
    log_ideal = enumerated.log_target.log_softmax(dim=1)
    gap = (log_ideal - log_pi).masked_fill(b == 0, 0.0)
    torch.testing.assert_close(found, (log_ideal.exp() * gap).sum(dim=1), rtol=1e-12, atol=1e-12)


def rollout_of(processes: Processes, models: dict[str, Any]) -> Rollout:
    config = CDPGConfig(num_generations=8, max_completion_length=3, device="cpu", check_workers=0)
    judge = trainer_judge()
    sampler = Sampler(models["folder"], models["base"], judge, config, processes)
    contexts = contexts_of(3)
    drawn = sampler.draw(1, contexts, models["folder"].encode(contexts, 3), False, Stopwatch())
    return rescored(recomputed(drawn, models["folder"], processes, 100), models["policy"], processes, 100)


def trainer_judge() -> Any:
    from cdpg.constraints.judge import Judge

    return Judge(has_a)


def test_satisfying_samples_are_scored_by_the_policy_in_any_number_of_processes(enumerated: Enumerated) -> None:
    alone = side_by_side(1, lambda processes: rollout_of(processes, enumerated.models))[0]
    assert torch.equal(alone.rescored, alone.b > 0)
    assert alone.log_policy is not None
    outcomes = {outcome: place for place, outcome in enumerate(enumerated.policy.outcomes())}
    for context in range(3):
        for sample in range(8):
            place = context, outcomes[tuple(alone.samples.token_ids(context, sample))]
            expected = enumerated.log_q["policy"][place] if alone.b[context, sample] else 0.0
            assert float(alone.log_policy[context, sample]) == pytest.approx(float(expected), abs=1e-12)
    for found in side_by_side(2, lambda processes: rollout_of(processes, enumerated.models)):
        assert torch.equal(found.rescored, alone.rescored)
        torch.testing.assert_close(found.log_policy, alone.log_policy, rtol=1e-12, atol=0.0)
        assert bool(found.recomputed.all()), "there are fewer than are compared"
        torch.testing.assert_close(found.log_recomputed, alone.log_q, rtol=1e-12, atol=1e-12)


# Runs.


def test_samples_are_of_the_policy_as_it_was_at_the_last_copy(tmp_path: Path) -> None:
    made = trainer_of(tmp_path, epochs=5, sync_every=2)
    tables = [log_probs_of(made.policy)]  # type: ignore[arg-type]

    class Tables(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            tables.append(log_probs_of(made.policy))  # type: ignore[arg-type]

    made.add_callback(Tables())
    made.train()
    outcomes = {outcome: place for place, outcome in enumerate(made.policy.outcomes())}  # type: ignore[attr-defined]
    copied = {1: 0, 2: 0, 3: 2, 4: 2, 5: 4}
    samples = list(read_jsonl(tmp_path / "samples.jsonl"))
    for sample in samples:
        drawn_with = tables[copied[sample["epoch"]]][sample["row"] - 1, outcomes[tuple(sample["token_ids"])]]
        assert sample["log_q"] == pytest.approx(float(drawn_with), rel=1e-12)
    assert (tables[1] - tables[0]).abs().max() > 0.1
    records = list(read_jsonl(tmp_path / "metrics.jsonl"))
    assert [record["proposal_age"] for record in records] == [0, 1, 0, 1, 0]
    for record in records:
        assert ("satisfaction_policy" in record) == (record["proposal_age"] > 0)
        own = [sample for sample in samples if sample["epoch"] == record["epoch"]]
        now = tables[record["epoch"] - 1]
        moved = [float(now[s["row"] - 1, outcomes[tuple(s["token_ids"])]]) - s["log_q"] for s in own]
        mean = sum(math.exp(gap) * s["b"] for gap, s in zip(moved, own, strict=True)) / len(own)
        assert record.get("satisfaction_policy", record["satisfaction"]) == pytest.approx(mean, rel=1e-9)


def test_a_resumed_run_samples_with_the_same_copy_bit_for_bit(tmp_path: Path) -> None:
    straight = trainer_of(tmp_path / "straight", sync_every=3)
    straight.train()
    trainer_of(tmp_path / "parts", epochs=2, sync_every=3).train()
    parts = trainer_of(tmp_path / "parts", sync_every=3)
    parts.train(resume_from_checkpoint=True)
    assert torch.equal(straight.policy.table, parts.policy.table)  # type: ignore[arg-type]
    for log in ("metrics.jsonl", "samples.jsonl"):
        one, other = (
            [{key: value for key, value in line.items() if not key.startswith(TIMES)} for line in read_jsonl(path)]
            for path in (tmp_path / "straight" / log, tmp_path / "parts" / log)
        )
        assert one == other


def test_with_the_base_as_proposal_the_figures_are_the_policy_s(tmp_path: Path, capsys: Any) -> None:
    made = trainer_of(tmp_path, proposal="base", num_generations=512, epochs=8, learning_rate=0.2)
    made.train()
    records = list(read_jsonl(tmp_path / "metrics.jsonl"))
    b = Universe.of(made.policy, contexts_of(3)).satisfied(lambda prompt, text: "a" in text)
    with torch.no_grad():
        base = float((log_probs_of(made.base).exp() * b).sum(dim=1).mean())  # type: ignore[arg-type]
        end = float((log_probs_of(made.policy).exp() * b).sum(dim=1).mean())  # type: ignore[arg-type]
    assert end > base + 0.05
    assert all(record["samples_of_base"] is True for record in records)
    assert all(abs(record["satisfaction"] - base) < 0.04 for record in records)
    assert records[0]["satisfaction_policy"] == pytest.approx(records[0]["satisfaction"], rel=1e-9)
    assert records[-1]["satisfaction_policy"] > records[0]["satisfaction_policy"] + 0.05
    assert records[-1]["kl_target_policy"] < records[0]["kl_target_policy"]
    assert "satisfaction of the base" in (shown := capsys.readouterr().err)
    assert f"of the policy {records[-1]['satisfaction_policy']:.3f}" in shown


def test_a_third_model_draws_the_samples(tmp_path: Path) -> None:
    other = tiny.save(tmp_path / "other", "llama", seed=5)

    def made(**settings: Any) -> CDPGTrainer:
        config = CDPGConfig(
            output_dir=str(tmp_path / "run"), epochs=2, contexts_per_epoch=2, num_generations=4, device="cpu",
            max_completion_length=5, check_workers=0, evaluate_every=0, proposal=str(other), **settings,
        )  # fmt: skip
        data = [{"prompt": "two dogs"}, {"prompt": "three cats"}]
        tokenizer = tiny.tokenizer_for("llama")
        return CDPGTrainer(tiny.make_model("llama"), short, config, train_dataset=data, processing_class=tokenizer)

    made().train()
    records = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert all(record["samples_of"] == str(other) and "satisfaction_policy" in record for record in records)
    model: Any = load_base(str(other), CDPGConfig(device="cpu"))
    contexts = made().contexts
    prompts = dict(zip([c.prompt for c in contexts], model.encode(contexts, 5), strict=True))
    from cdpg.models.base import Rows

    for sample in read_jsonl(tmp_path / "run" / "samples.jsonl"):
        ids = sample["token_ids"]
        rows = Rows(torch.tensor([0]), torch.tensor([ids]), torch.tensor([len(ids)]))
        with torch.no_grad():
            expected = float(model.score([prompts[sample["prompt"]]], rows).log_prob())
        assert sample["log_q"] == pytest.approx(expected, abs=1e-3)
    tiny.save(tmp_path / "other", "llama", seed=6)
    with pytest.raises(UserError, match="the proposal changed from"):
        made().train(resume_from_checkpoint=True)


def short(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return [len(completion) % 2 == 0 for completion in completions]


def test_a_third_model_must_have_the_base_s_tokens(tmp_path: Path) -> None:
    other = tiny.save(tmp_path / "other", "llama", vocabulary=310)
    config = CDPGConfig(
        output_dir=str(tmp_path / "run"), device="cpu", check_workers=0, proposal=str(other), max_completion_length=5
    )
    with pytest.raises(UserError, match=r"'.*other' cannot draw samples that the base scores: it predicts"):
        CDPGTrainer(
            tiny.make_model("llama"), short, config, train_dataset=[{"prompt": "two"}],
            processing_class=tiny.tokenizer_for("llama"),
        )  # fmt: skip
    with pytest.raises(UserError, match="only one of Transformers can be loaded beside it"):
        trainer_of(tmp_path / "run", proposal=str(other))


# What does not apply.


def test_who_may_learn_from_any_proposal() -> None:
    free = {name for name, method in METHODS.items() if method.divides_by_q}
    assert free == {"cdpg", "cdpg-paper", "dpg"}
    for name in set(METHODS) - free:
        own = METHODS[name].proposal
        make_method(CDPGConfig(method=name, proposal=own))
        other = "base" if own == "policy" else "policy"
        only = f"but {name} can learn only from samples of the present {own}"
        advice = "or set method: cdpg, whose weights divide by the probability under the model that drew the sample"
        with pytest.raises(UserError, match=f"^proposal is '{other}', {only}.* {advice}$"):
            make_method(CDPGConfig(method=name, proposal=other))
        with pytest.raises(UserError, match=f"sync_every is 2, {only}"):
            make_method(CDPGConfig(method=name, sync_every=2))
    for name in free:
        assert make_method(CDPGConfig(method=name, proposal="base")).source == "base"
        with pytest.raises(UserError, match="sync_every is 2, but proposal is 'base', which does not change"):
            make_method(CDPGConfig(method=name, proposal="base", sync_every=2))
        assert make_method(CDPGConfig(method=name, proposal="policy", sync_every=2)).source == "policy"


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(UserError, match="sync_every must be at least 1, not 0"):
        CDPGConfig(sync_every=0)
    assert {"proposal", "sync_every"} <= set(FIELDS)


def test_scores_of_the_policy_are_not_those_of_the_proposal(enumerated: Enumerated) -> None:
    """With adapters or not, log q stays what drew the sample when the policy's own score is added."""
    alone = side_by_side(1, lambda processes: rollout_of(processes, enumerated.models))[0]
    rows = torch.arange(alone.b.numel())
    drawn = score_samples(enumerated.models["folder"], alone.samples, rows, 100).sum(dim=2)
    torch.testing.assert_close(alone.log_q, drawn, rtol=1e-12, atol=1e-12)
