"""Targets with moments and rewards: weights, gradient and whole runs, against enumeration."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

import factor_rules
from cdpg import CDPGConfig, CDPGTrainer, ExactSampler, Moment, Reward
from cdpg.constraints.factors import Tilt
from cdpg.errors import RunError, UserError
from cdpg.methods.cdpg import CDPG
from cdpg.methods.dpg import DPG
from cdpg.methods.rft import likelihood_weights
from cdpg.rollout.moments import moment_samples
from cdpg.rollout.rollout import Rollout
from cdpg.storage.jsonl import read_jsonl
from cdpg.target import partition
from cdpg.target.divergence import weighted_mean_by_context
from cdpg.target.moments import MomentSamples, fit_multipliers
from enumeration import MAX_LENGTH, Universe, contexts_of, exact_cross_entropy_gradient, relative_error, shared, tabular

CONTEXTS = [{"prompt": str(context.prompt)} for context in contexts_of(3)]
HYBRID = [factor_rules.few_c, Moment(factor_rules.starts_with_a, 0.5), Reward(factor_rules.minus_length, 2.0)]
SEED = 4


class World:
    """p_c ∝ a·b·exp(λφ + r/β) on all outcomes: b, φ and r are those of ``HYBRID``, λ is the exact one."""

    def __init__(self, mean: float = 0.5, beta: float = 2.0, hard: bool = True) -> None:
        self.base = tabular(SEED)
        self.universe = Universe.of(self.base, contexts_of(3))
        self.log_a = self.universe.log_prob(self.base)
        self.b = self.universe.satisfied(lambda prompt, text: not hard or text.count("c") < 2)
        self.phi = self.universe.satisfied(lambda prompt, text: text.startswith("a"))
        self.reward = torch.tensor(
            [[-float(len(text)) for text in row] for row in self.universe.samples.texts]
        ).double()
        self.beta = beta
        plain = (self.log_a + self.b.log() + self.reward / beta).masked_fill(self.b == 0, -math.inf)
        everything = torch.ones_like(self.b, dtype=torch.bool)
        fit = fit_multipliers(MomentSamples(plain, self.phi[..., None], everything), torch.tensor([mean]).double())
        self.multiplier = fit.multipliers[0]
        self.log_target = plain + self.multiplier * self.phi
        self.ideal = self.log_target.softmax(dim=1)

    def rollout(self, log_q: Tensor) -> Rollout:
        """Every outcome as if it had been drawn once."""
        features = torch.stack([self.phi, self.reward], dim=2)
        features[self.b == 0] = math.nan  # not needed there
        found = self.universe.epoch(self.b, log_q, self.log_a.where(self.b > 0, -1e9))
        coefficients = (self.multiplier, 1 / self.beta)
        names = ("moment_starts_with_a", "reward_minus_length")
        return dataclasses.replace(found, features=features, coefficients=coefficients, factor_names=names)

    def mean(self, values: Tensor, probability: Tensor) -> float:
        return float((probability * values).sum(dim=1).mean())

    def kl(self, log_pi: Tensor) -> float:
        """KL(p, π)."""
        gap = (self.ideal.log() - log_pi).masked_fill(self.b == 0, 0.0)
        return self.mean(gap, self.ideal)


def test_the_exact_multiplier_gives_the_moment() -> None:
    world = World()
    assert world.mean(world.phi, world.ideal) == pytest.approx(0.5, abs=1e-9)


def test_the_weights_are_those_of_the_whole_target() -> None:
    world = World()
    log_q = world.universe.log_prob(tabular(1))
    rollout = world.rollout(log_q)
    assert torch.allclose(rollout.log_ratio, world.log_target - log_q)
    assert rollout.by_factor().keys() == {"moment_starts_with_a", "reward_minus_length"}


@pytest.mark.parametrize("proposal", [SEED, 1, 2])
def test_the_expected_gradient_is_that_of_the_cross_entropy(proposal: int) -> None:
    """E_q[w ∇log π] with w = P/(Z q), for the base, the policy and another model as q; a reward and a moment."""
    world, policy = World(), tabular(1)
    log_q = world.universe.log_prob(tabular(proposal))
    log_z = world.log_target.logsumexp(dim=1)
    weights = partition.weights(world.rollout(log_q).log_ratio, log_z, epsilon=0.0)
    gradient = world.universe.gradient(policy, weights * log_q.exp())
    assert relative_error(gradient, exact_cross_entropy_gradient(policy, world.universe, world.log_target)) < 1e-12


def test_the_control_variate_has_the_same_expectation() -> None:
    world, policy = World(), tabular(1)
    log_q = world.universe.log_prob(policy)
    weights = partition.weights(world.rollout(log_q).log_ratio, world.log_target.logsumexp(dim=1), epsilon=0.0)
    gradient = world.universe.gradient(policy, (weights - 1) * log_q.exp())
    assert relative_error(gradient, exact_cross_entropy_gradient(policy, world.universe, world.log_target)) < 1e-12


def test_a_fit_begins_without_the_present_multipliers() -> None:
    """λ is fitted anew, from 0; the rewards stay."""
    world = World()
    log_q = world.universe.log_prob(tabular(1))
    tilt = Tilt([factor for factor in HYBRID if isinstance(factor, (Moment, Reward))])
    samples = moment_samples(world.rollout(log_q), tilt)
    plain = (world.log_a + world.b.log() + world.reward / world.beta - log_q).masked_fill(world.b == 0, -math.inf)
    assert torch.allclose(samples.log_weight, plain)
    weighted = world.b > 0
    assert torch.equal(samples.phi[..., 0][weighted], world.phi[weighted])


@pytest.mark.parametrize("method", [CDPG, DPG])
def test_weights_do_not_depend_on_the_scale_of_the_target(method: type[CDPG] | type[DPG]) -> None:
    """ε, which is far larger than a tiny Z, must not take the weights away."""
    world, made = World(), method(CDPGConfig())
    rollout = world.rollout(world.log_a)
    moved = dataclasses.replace(rollout, features=rollout.features - torch.tensor([0.0, 80.0]).double())
    weights = [made.weights(one, made.advance(made.begin(), one)) for one in (rollout, moved)]
    assert float(weights[0].sum()) > 0
    assert torch.allclose(weights[0], weights[1])


def test_rft_weighs_samples_of_the_base_by_the_tilt() -> None:
    world = World()
    rollout = world.rollout(world.log_a)
    expected = (rollout.log_ratio).softmax(dim=1)
    found = likelihood_weights(rollout)
    assert torch.allclose(found / found.sum(dim=1, keepdim=True), expected)


def test_the_gain_with_weights_is_the_mean_under_p() -> None:
    """With outcomes in the place of samples, weighted by a·b as if drawn and accepted so often, it is exact."""
    world = World()
    log_pi = world.universe.log_prob(tabular(1))
    owners = torch.arange(3).repeat_interleave(world.b.shape[1])
    log_weight = world.log_target.flatten()
    values = (log_pi - world.log_a).flatten()
    found = weighted_mean_by_context(values, log_weight, owners, (log_weight, owners), 4)
    assert torch.allclose(found[:3], (world.ideal * (log_pi - world.log_a)).sum(dim=1))
    assert found[3].isnan()


def settings(folder: Path, **changes: Any) -> CDPGConfig:
    values: dict[str, Any] = {
        "epochs": 4, "contexts_per_epoch": 3, "num_generations": 32, "max_completion_length": MAX_LENGTH,
        "learning_rate": 0.05, "save_every": 2, "device": "cpu", "warmup_epochs": 0, "check_workers": 0,
        "evaluate_every": 2, "evaluation_samples": 32, "partition": "batch",
    }  # fmt: skip
    return CDPGConfig(output_dir=str(folder), **(values | changes))


def trainer(folder: Path, factors: Any = HYBRID, callbacks: Any = (), **changes: Any) -> CDPGTrainer:
    config = settings(folder, **changes)
    return CDPGTrainer(tabular(SEED), factors, config, CONTEXTS, CONTEXTS, callbacks=callbacks)


MANY = [{"prompt": f"prompt {i}"} for i in range(9)]
"""So many that some can be used for validation."""


@pytest.mark.exhaustive
def test_a_run_comes_to_the_target(tmp_path: Path) -> None:
    """λ is estimated, so the moment and KL(p, π) are compared with those of the exact target, within its noise."""
    made = trainer(
        tmp_path, epochs=150, num_generations=96, learning_rate=0.15, decay_epochs=80, evaluate_every=0, save_every=1000
    )
    made.train()
    world = World()
    fits = json.loads((tmp_path / "moments.json").read_text())
    moment = fits["moments"][0]
    assert moment["function"] == "factor_rules:starts_with_a"
    assert moment["multiplier"] == pytest.approx(world.multiplier, abs=0.1)
    assert moment["reached"] == pytest.approx(0.5, abs=1e-9)
    assert fits["samples"] > 5000
    log_pi = world.universe.log_prob(made.policy)
    log_a = world.universe.log_prob(made.base)
    assert world.kl(log_a) > 0.5
    assert world.kl(log_pi) < 0.02
    assert world.mean(world.phi, log_pi.exp()) == pytest.approx(0.5, abs=0.03)
    assert world.mean(world.b, log_pi.exp()) > 0.97


@pytest.mark.exhaustive
def test_a_reward_gives_the_mean_and_the_distance_of_the_ideal_model(tmp_path: Path) -> None:
    beta = 0.8
    made = trainer(
        tmp_path, [Reward(factor_rules.minus_length, beta)], epochs=120, num_generations=96, learning_rate=0.15,
        decay_epochs=60, evaluate_every=0, save_every=1000,
    )  # fmt: skip
    made.train()
    base = tabular(SEED)
    universe = Universe.of(base, contexts_of(3))
    log_a, log_pi = universe.log_prob(base), universe.log_prob(made.policy)
    reward = torch.tensor([[-float(len(text)) for text in row] for row in universe.samples.texts]).double()
    ideal = (log_a + reward / beta).softmax(dim=1)

    def figures(log_model: Tensor) -> tuple[float, float]:
        mean = (log_model.exp() * reward).sum(dim=1).mean()
        return float(mean), float((log_model.exp() * (log_model - log_a)).sum(dim=1).mean())

    assert figures(log_a)[0] < figures(ideal.log())[0] - 0.5
    assert figures(log_pi) == pytest.approx(figures(ideal.log()), abs=0.03)
    assert not (tmp_path / "moments.json").exists()


class Killed(TrainerCallback):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.epoch:
            raise RuntimeError("killed")


RARE = [factor_rules.few_c, Moment(factor_rules.starts_with_a, 0.97)]


@pytest.mark.parametrize(
    "changes",
    [{"partition": "pooled"}, *(pytest.param(some, marks=pytest.mark.exhaustive) for some in ({}, {"method": "dpg"}))],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    """With λ fitted again, both before and after the interruption."""

    def make(folder: str, *callbacks: TrainerCallback) -> CDPGTrainer:
        how = {"epochs": 12, "moment_contexts": 6, "learning_rate": 0.3, "validation_contexts": 5, **changes}
        config = settings(tmp_path / folder, **how)
        return CDPGTrainer(shared(3), RARE, config, MANY, MANY, callbacks=callbacks)

    whole = make("whole")
    whole.train()
    fits = json.loads((tmp_path / "whole" / "moments.json").read_text())
    assert fits["fitted_to"] == "policy"
    epochs = [fit["epoch"] for fit in (*fits["earlier"], fits)]
    assert epochs[0] == 0
    assert len(epochs) > 1
    kill = max(3, epochs[1] + 1)
    with pytest.raises(RuntimeError, match="killed"):
        make("part", Killed(kill)).train()
    resumed = make("part")
    resumed.train(resume_from_checkpoint=True)
    for name in ("moments.json", "samples.jsonl", "kept.json"):
        assert (tmp_path / "part" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    tensors = [torch.cat([p.detach().flatten() for p in one.model.parameters()]) for one in (whole, resumed)]
    assert torch.equal(*tensors)
    assert untimed(tmp_path / "part") == untimed(tmp_path / "whole")


def untimed(folder: Path) -> list[Any]:
    records = [*read_jsonl(folder / "metrics.jsonl"), *read_jsonl(folder / "evaluations.jsonl")]
    return [{k: v for k, v in record.items() if not k.startswith("seconds")} for record in records]


def test_figures_and_files_of_a_run(tmp_path: Path) -> None:
    made = trainer(tmp_path, evaluation_samples=400, gain_draws=1500, keep="last")
    made.train()
    world = World()
    found = json.loads((tmp_path / "evaluation.json").read_text())
    log_pi = world.universe.log_prob(made.policy)
    expected = world.mean(world.phi, log_pi.exp())
    assert found["tuned"]["moment_starts_with_a"]["mean"] == pytest.approx(expected, abs=0.05)
    assert found["base"]["reward_minus_length"]["mean"] == pytest.approx(
        world.mean(world.reward, world.log_a.exp()), abs=0.1
    )
    assert found["ideal"]["moment_starts_with_a"]["mean"] == pytest.approx(0.5, abs=0.05)
    assert found["ideal"]["reward_minus_length"]["mean"] == pytest.approx(
        world.mean(world.reward, world.ideal), abs=0.1
    )
    assert found["tuned"]["gain"]["mean"] == pytest.approx(world.kl(world.log_a) - world.kl(log_pi), abs=0.03)
    assert found["tuned"]["kl_target_policy_pooled"]["mean"] == pytest.approx(world.kl(log_pi), abs=0.1)
    assert found["metric_info"]["moment_starts_with_a"]["group"] == "requirement"
    assert any("weighted samples of the base" in notice for notice in found["notices"])
    line = next(iter(read_jsonl(tmp_path / "evaluations.jsonl")))
    assert set(line["ideal"]) == {"moment_starts_with_a", "reward_minus_length"}
    sample = next(iter(read_jsonl(tmp_path / "samples.jsonl")))
    assert sample["moment_starts_with_a"] == float(sample["completion"].startswith("a"))
    assert sample["reward_minus_length"] == -len(sample["completion"])
    metrics = list(read_jsonl(tmp_path / "metrics.jsonl"))
    assert 0 < metrics[0]["moment_starts_with_a"] < 1
    config = (tmp_path / "config.yaml").read_text()
    assert "moment factor_rules:starts_with_a=0.5" in config
    assert "reward factor_rules:minus_length=2" in config


def test_another_moment_cannot_be_resumed(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    other = [factor_rules.few_c, Moment(factor_rules.starts_with_a, 0.4), HYBRID[2]]
    with pytest.raises(UserError, match="cannot be continued as asked"):
        trainer(tmp_path, other, epochs=6).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("factors", "changes", "words"),
    [
        ([Moment(factor_rules.starts_with_a, 1.5)], {}, "strictly between 0 and 1 can be reached"),
        ([Moment(factor_rules.length, -2)], {}, "any mean strictly between 0 and 3 can be reached"),
        ([Moment(factor_rules.constant, 0.5)], {}, "its mean is 0.3 whatever λ is"),
        (
            [Moment(factor_rules.starts_with_a, 0.9), Moment(factor_rules.length, 0.1)],
            {},
            "but not all together",
        ),
        ([Reward(factor_rules.always_nan, 1.0)], {}, "the check of every one of 48 samples of the base failed (value)"),
        ([Moment(factor_rules.always_nan, 1.0)], {}, "it returned nan, and a finite number is expected"),
        (HYBRID, {"method": "reinforce"}, "need a method whose optimum is the target, not reinforce"),
    ],
)
def test_what_cannot_be_had_is_refused_and_nothing_is_written(
    tmp_path: Path, factors: Any, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises((UserError, RunError)) as error:
        trainer(tmp_path / "run", factors, moment_contexts=3, **changes).train()
    assert words in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_known_multiplier_is_not_fitted(tmp_path: Path) -> None:
    factors = [Moment(factor_rules.starts_with_a, 0.5, multiplier=0.25)]
    made = trainer(tmp_path, factors, epochs=2)
    made.train()
    fits = json.loads((tmp_path / "moments.json").read_text())
    assert (fits["fitted_to"], fits["moments"][0]["multiplier"]) == ("given", 0.25)
    assert made.judge.tilt.coefficients == (0.25,)


def test_exact_samples_follow_the_tilted_target() -> None:
    world = World(hard=False)
    factors = [Moment(factor_rules.starts_with_a, 0.5, multiplier=world.multiplier), HYBRID[2]]
    config = {"max_completion_length": MAX_LENGTH, "device": "cpu", "check_workers": 0}
    sampler = ExactSampler(tabular(1), tabular(SEED), factors, config)
    found = sampler.sample(CONTEXTS[0], number=600, bound=0.02, pilot=1024)
    share = sum(text.startswith("a") for text in found.texts) / 600
    assert share == pytest.approx(float((world.ideal * world.phi).sum(dim=1)[0]), abs=0.07)
    with pytest.raises(UserError, match="λ of the moment"):
        ExactSampler(tabular(1), tabular(SEED), [Moment(factor_rules.starts_with_a, 0.5)], config)
