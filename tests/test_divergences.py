"""Divergences other than KL(p, π): their gradients against autograd through the enumerated ones, and whole runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import factor_rules
from cdpg import CDPGConfig, CDPGTrainer, Reward
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.methods.base import SampleLoss
from cdpg.methods.cdpg import CDPG
from cdpg.methods.f_divergence import DivergenceLoss, mean_of_others, normalised, refuse_zeros
from cdpg.target.f_divergences import Divergence, amari, pseudo_reward
from cdpg.target.target import log_target
from enumeration import MAX_LENGTH, Universe, contexts_of, flat_gradient, relative_error, shared, tabular
from uneven import table, uneven_epoch

ALPHA = 0.3


def _js(log_p: Tensor, log_pi: Tensor) -> Tensor:
    p, pi = log_p.exp(), log_pi.exp()
    middle = (p + pi) / 2
    of_p = torch.where(p > 0, p * (log_p.clamp(min=-1e9) - middle.log()), torch.zeros_like(p))
    return (pi * (log_pi - middle.log()) + of_p).sum(dim=1)


EXACT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": lambda log_p, log_pi: -(log_p.exp() * log_pi).sum(dim=1),  # the entropy of p has no gradient
    "js": _js,
    "tv": lambda log_p, log_pi: 0.5 * (log_pi.exp() - log_p.exp()).abs().sum(dim=1),
    "chi2": lambda log_p, log_pi: ((2 * log_p - log_pi).exp()).sum(dim=1),
    "alpha": lambda log_p, log_pi: (
        (1 - ((1 - ALPHA) * log_p + ALPHA * log_pi).exp().sum(dim=1)) / (ALPHA * (1 - ALPHA))
    ),
    "reverse_kl": lambda log_p, log_pi: (log_pi.exp() * (log_pi - log_p)).sum(dim=1),
}
"""D_f(π‖p_c), ``[context]``, from its definition, differentiable in π."""


class Case:
    def __init__(self, hard: bool = True) -> None:
        self.policy, self.base, self.other = (tabular(seed) for seed in (1, 2, 3))
        self.universe = Universe.of(self.policy, contexts_of(3))
        self.b = self.universe.satisfied(lambda prompt, text: text.count("a") >= len(prompt.split()))
        if not hard:
            self.b = self.b.clamp(min=0.1)
        self.log_a = self.universe.log_prob(self.base)
        self.log_pi, self.log_other = self.universe.log_prob(self.policy), self.universe.log_prob(self.other)
        self.log_p = log_target(self.log_a, self.b)
        self.log_z = self.log_p.logsumexp(dim=1)

    def exact(self, divergence: str) -> Tensor:
        self.policy.module.zero_grad(set_to_none=True)
        log_pi = self.universe.differentiable_log_prob(self.policy)
        EXACT[divergence](self.log_p - self.log_z[:, None], log_pi).mean().backward()
        return flat_gradient(self.policy)

    def expected(self, divergence: Any, log_q: Tensor, centred: bool) -> Tensor:
        """The expectation over x ~ q of the production loss's gradient, with the exact Z_c; B is any number."""
        rollout = self.universe.epoch(self.b, log_q, self.log_a)
        baseline = torch.full_like(self.b, 0.7) if centred else None
        loss = DivergenceLoss(rollout, self.log_z, pseudo_reward(divergence, ALPHA), baseline)
        return self.universe.gradient_of(self.policy, _TimesQ(loss, log_q.exp().flatten()), rollout)


class _TimesQ(SampleLoss):
    """A loss whose rows are weighted by their probability."""

    def __init__(self, loss: DivergenceLoss, q: Tensor) -> None:
        self.loss_of, self.q, self.active, self.normalizer = loss, q, loss.active, loss.normalizer

    def loss(self, rows: Tensor, scores: Any) -> Tensor:
        return sum(  # type: ignore[return-value]
            self.q[row] * self.loss_of.loss(row[None], _Row(scores.log_prob()[place])) for place, row in enumerate(rows)
        )


class _Row:
    def __init__(self, log_prob: Tensor) -> None:
        self._log_prob = log_prob

    def log_prob(self) -> Tensor:
        return self._log_prob[None]


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("proposal", ["policy", "other"])
@pytest.mark.parametrize("divergence", ["kl", "js", "tv", "chi2", "alpha"])
def test_the_expected_gradient_is_exact(divergence: str, proposal: str, centred: bool) -> None:
    case = Case()
    log_q = case.log_pi if proposal == "policy" else case.log_other
    assert relative_error(case.expected(divergence, log_q, centred), case.exact(divergence)) < 1e-10


def test_each_sample_may_have_a_partition_of_its_own() -> None:
    """As pooled estimates have, which leave the sample out."""
    case = Case()
    rollout = case.universe.epoch(case.b, case.log_pi, case.log_a)
    one = normalised(rollout, case.log_z)
    assert one.shape == case.b.shape
    assert torch.equal(normalised(rollout, case.log_z[:, None].expand_as(case.b)), one)
    shifts = torch.arange(case.b.numel()).view_as(case.b).double()
    assert torch.allclose(normalised(rollout, case.log_z[:, None] + shifts), one - shifts, atol=1e-12, rtol=0)


@pytest.mark.parametrize("proposal", ["policy", "other"])
def test_the_reverse_kl_is_exact_where_b_is_never_0(proposal: str) -> None:
    case = Case(hard=False)
    log_q = case.log_pi if proposal == "policy" else case.log_other
    assert relative_error(case.expected("reverse_kl", log_q, True), case.exact("reverse_kl")) < 1e-10


@pytest.mark.parametrize(
    ("divergence", "at_zero", "at_one", "at_e"),
    [
        ("kl", 0.0, 1.0, math.e),
        ("js", -math.log(2), 0.0, math.log(1 + math.e) - math.log(2)),
        ("tv", -0.5, 0.0, 0.5),
        ("chi2", 0.0, 1.0, math.e**2),
        ("alpha", -1 / (1 - ALPHA), 0.0, (math.exp(1 - ALPHA) - 1) / (1 - ALPHA)),
        ("reverse_kl", -math.inf, -1.0, 0.0),
    ],
)
def test_pseudo_rewards(divergence: Any, at_zero: float, at_one: float, at_e: float) -> None:
    log_t = torch.tensor([-math.inf, 0.0, 1.0]).double()
    assert pseudo_reward(divergence, ALPHA)(log_t).tolist() == pytest.approx([at_zero, at_one, at_e])


def test_alpha_goes_from_one_kl_to_the_other() -> None:
    log_t = torch.linspace(-3, 3, 7).double()
    assert torch.allclose(amari(1e-9)(log_t), log_t.exp() - 1, atol=1e-6)
    assert torch.allclose(amari(1 - 1e-9)(log_t), log_t, atol=1e-6)


def test_without_a_satisfying_sample_a_context_has_no_gradient() -> None:
    case = Case()
    rollout = case.universe.epoch(torch.zeros_like(case.b), case.log_pi, case.log_a)
    names: list[Divergence] = ["js", "tv", "chi2", "alpha"]
    for name in names:
        reward = pseudo_reward(name, ALPHA)
        loss = DivergenceLoss(rollout, rollout.log_z, reward, mean_of_others(rollout, rollout.log_z, reward))
        assert torch.allclose(loss.weights, torch.zeros_like(loss.weights), atol=1e-14), name


def test_the_baseline_is_the_mean_of_the_others() -> None:
    case = Case()
    rollout = case.universe.epoch(case.b, case.log_pi, case.log_a)
    reward = pseudo_reward("js", ALPHA)
    loss = DivergenceLoss(rollout, case.log_z, reward, mean_of_others(rollout, case.log_z, reward))
    rewards = reward(case.log_p - case.log_z[:, None] - case.log_pi)
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
    assert torch.allclose(loss.weights.view_as(case.b), rewards - others, atol=1e-12)


def settings(folder: Path, **changes: Any) -> CDPGConfig:
    values: dict[str, Any] = {
        "epochs": 100, "contexts_per_epoch": 3, "num_generations": 64, "max_completion_length": MAX_LENGTH,
        "learning_rate": 0.1, "device": "cpu", "warmup_epochs": 0, "check_workers": 0, "decay_epochs": 50,
        "evaluate_every": 0, "evaluate_at_end": False, "save_every": 1000,
    }  # fmt: skip
    return CDPGConfig(output_dir=str(folder), **(values | changes))


def has_a(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return ["a" in text for text in completions]


CONTEXTS = [{"prompt": str(context.prompt)} for context in contexts_of(3)]


ALONE = {"control_variate": False, "replay": 0, "epochs": 60, "decay_epochs": 30}
REPLAYED = {"validation_contexts": 5, "epochs": 20, "decay_epochs": 10}
"""Replay makes more steps of an epoch."""


@pytest.mark.parametrize(
    ("divergence", "changes"),
    [
        ("tv", ALONE),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("js", REPLAYED), ("js", ALONE), ("tv", REPLAYED), ("alpha", REPLAYED), ("alpha", ALONE))
        ),
    ],
)
def test_a_run_lowers_its_divergence(tmp_path: Path, divergence: str, changes: dict[str, Any]) -> None:
    """With and without the mean of the others, replay, and batches that are smaller than an epoch."""
    config = settings(tmp_path, divergence=divergence, alpha=ALPHA, batch_size=96, **changes)
    contexts = [Context(prompt=f"prompt {i}", columns={}, row=i + 1) for i in range(8)]
    trainer = CDPGTrainer(shared(4), has_a, config, contexts)
    universe = Universe.of(trainer.policy, contexts[:1])
    b = universe.satisfied(lambda prompt, text: "a" in text)
    log_a = universe.log_prob(trainer.base)
    log_p = log_target(log_a, b).log_softmax(dim=1)
    trainer.train()
    before, after = (
        float(EXACT[divergence](log_p, log_pi).mean()) for log_pi in (log_a, universe.log_prob(trainer.policy))
    )
    assert after < 0.2 * before


@pytest.mark.exhaustive
def test_the_reverse_kl_comes_to_a_target_with_a_reward(tmp_path: Path) -> None:
    config = settings(tmp_path, divergence="reverse_kl")
    trainer = CDPGTrainer(tabular(4), Reward(factor_rules.minus_length, 0.8), config, CONTEXTS)
    universe = Universe.of(trainer.policy, contexts_of(3))
    log_a = universe.log_prob(trainer.base)
    reward = torch.tensor([[-float(len(text)) for text in row] for row in universe.samples.texts]).double()
    log_p = (log_a + reward / 0.8).log_softmax(dim=1)
    trainer.train()
    before, after = (
        float(EXACT["reverse_kl"](log_p, one).mean()) for one in (log_a, universe.log_prob(trainer.policy))
    )
    assert after < 0.1 * before


def test_zeros_are_counted_where_there_is_a_verdict() -> None:
    """Of thirteen samples with a verdict seven have b = 0; a sample whose check failed may have any b."""
    rollout = uneven_epoch(table(1), table(2))
    with pytest.raises(UserError, match="and 7 of 13 samples have"):
        refuse_zeros(rollout)
    refuse_zeros(replace(rollout, b=rollout.b.where(~rollout.valid, 0.5)))
    refuse_zeros(replace(rollout, b=rollout.b.where(~rollout.valid, 1.0).where(rollout.valid, 0.0)))


def test_the_reverse_kl_is_refused_where_b_can_be_0(tmp_path: Path) -> None:
    trainer = CDPGTrainer(tabular(4), has_a, settings(tmp_path / "run", divergence="reverse_kl"), CONTEXTS)
    with pytest.raises(
        UserError, match=r"infinite if a sample has b = 0.*output\), or divergence: alpha with alpha: 0.9$"
    ):
        trainer.train()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.5, 2.0, math.nan])
def test_alpha_lies_between_0_and_1(alpha: float) -> None:
    with pytest.raises(UserError, match="alpha must lie between 0 and 1"):
        CDPGConfig(alpha=alpha)


def test_an_unknown_divergence_is_refused() -> None:
    with pytest.raises(UserError, match="divergence takes"):
        CDPGConfig.from_mapping({"divergence": "hellinger"})


def test_which_model_is_kept() -> None:
    """The gain is of KL(p, π): it does not choose the model of another divergence."""
    assert CDPG(CDPGConfig()).chooses_epoch
    assert not CDPG(CDPGConfig(divergence="tv")).chooses_epoch
