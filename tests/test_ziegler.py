"""PPO: every piece against values worked out by hand, and the whole against its traps."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from cdpg import CDPGConfig
from cdpg.models.base import LanguageModel
from cdpg.objectives.base import Epoch
from cdpg.objectives.ziegler import (
    Ziegler,
    adapted_beta,
    advantages,
    clipped_policy_loss,
    clipped_value_loss,
    token_rewards,
    whiten,
)
from cdpg.optimization import accumulate
from cdpg.scoring import score_samples
from enumeration import Universe, contexts_of, flat_gradient, four_token_transformer, relative_error, tabular


def test_the_reward_is_paid_at_the_last_real_token() -> None:
    """Not on padding; the KL is paid at every token."""
    b = torch.tensor([1.0, 0.5])
    log_q = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, -1.0, -1.0]])
    log_a = torch.tensor([[-1.5, -1.0, 0.0], [-1.0, -2.0, -1.0]])
    rewards = token_rewards(b, log_q, log_a, torch.tensor([2, 3]), beta=0.1)
    assert torch.allclose(rewards, torch.tensor([[-0.05, 0.1 + 1.0, 0.0], [0.0, -0.1, 0.5]]))


def test_generalised_advantages_by_hand() -> None:
    rewards = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 99.0]])
    values = torch.tensor([[0.5, 0.25, 0.125], [0.5, 0.25, 99.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    result = advantages(rewards, values, mask, decay=0.5)
    last = 3 - 0.125
    middle = 2 + 0.125 - 0.25 + 0.5 * last
    assert torch.allclose(result[0], torch.tensor([1 + 0.25 - 0.5 + 0.5 * middle, middle, last]))
    assert torch.allclose(result[1], torch.tensor([1 + 0.25 - 0.5 + 0.5 * 1.75, 1.75, 0.0]))


def test_with_decay_1_and_no_values_the_advantage_is_the_reward_to_go() -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert torch.equal(advantages(rewards, torch.zeros(1, 3), mask, 1.0), torch.tensor([[7.0, 6.0, 4.0]]))


def test_whitening_is_over_the_tokens_that_count() -> None:
    values = torch.tensor([[1.0, 3.0, 100.0]], dtype=torch.float64)
    white = whiten(values, torch.tensor([[True, True, False]]), lambda tensor: tensor)
    assert torch.allclose(white, torch.tensor([[-1.0, 1.0, 0.0]], dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.0, 2.0, -2.0), (1.5, 2.0, -2.4), (0.5, 2.0, -1.0), (0.5, -2.0, 1.6), (1.5, -2.0, 3.0)],
)
def test_the_ratio_is_clipped_only_where_it_flatters(ratio: float, advantage: float, expected: float) -> None:
    loss = clipped_policy_loss(torch.tensor(math.log(ratio)), torch.tensor(advantage), clip=0.2)
    assert math.isclose(float(loss), expected, rel_tol=1e-6)


def test_the_value_is_clipped_around_its_old_estimate() -> None:
    loss = clipped_value_loss(torch.tensor(1.0), torch.tensor(0.0), torch.tensor(1.0), clip=0.2)
    assert math.isclose(float(loss), 0.5 * 0.8**2, rel_tol=1e-6)


def test_beta_follows_the_kl_with_clipped_error() -> None:
    assert math.isclose(adapted_beta(0.2, 6.6, 6.0, 1000, 10_000), 0.2 * (1 + 0.1 * 0.1))
    assert math.isclose(adapted_beta(0.2, 60.0, 6.0, 1000, 10_000), 0.2 * (1 + 0.2 * 0.1))
    assert math.isclose(adapted_beta(0.2, 0.0, 6.0, 1000, 10_000), 0.2 * (1 - 0.2 * 0.1))


def make_epoch(policy: LanguageModel, base: LanguageModel) -> tuple[Universe, Epoch]:
    universe = Universe.of(policy, contexts_of(3))
    token_log_q = score_samples(policy, universe.samples, universe.rows, 500)
    token_log_a = score_samples(base, universe.samples, universe.rows, 500)
    samples = universe.samples.with_log_q(token_log_q)
    universe = Universe(samples)
    b = universe.satisfied(lambda prompt, text: "a" in text)
    epoch = Epoch(
        number=1, b=b, valid=torch.ones_like(b, dtype=torch.bool), failed=torch.zeros_like(b, dtype=torch.bool),
        log_q=samples.log_q, log_a=token_log_a.sum(dim=2),
        lengths=samples.lengths, samples=samples, token_log_a=token_log_a, first_context=0, total=lambda t: t,
    )  # fmt: skip
    return universe, epoch


@pytest.mark.parametrize("kind", ["tabular", "llama"])
def test_first_gradient_is_the_policy_gradient_with_whitened_advantages(kind: str) -> None:
    """At the first step the ratio is 1: ∇ = −mean_t A_t ∇log π_t, plus the value head's part."""
    policy = tabular(1) if kind == "tabular" else four_token_transformer(kind, 1)
    base = tabular(2) if kind == "tabular" else four_token_transformer(kind, 2)
    config = CDPGConfig(method="ziegler", ziegler_value_weight=0.0)
    universe, epoch = make_epoch(policy, base)
    objective = Ziegler(config, policy)
    credit = objective.credit(epoch, policy)
    policy.module.zero_grad(set_to_none=True)
    accumulate(policy, credit, epoch, universe.rows, credit.units, tokens_per_pass=100)
    actual = flat_gradient(policy)

    samples = epoch.samples
    log_q, log_a = samples.token_log_q.flatten(0, 1), epoch.token_log_a.flatten(0, 1)
    lengths = samples.lengths.flatten()
    mask = torch.arange(3) < lengths[:, None]
    rewards = token_rewards(epoch.b.flatten(), log_q, log_a, lengths, beta=0.2)
    advantage = advantages(rewards, torch.zeros_like(rewards), mask, 0.95)
    advantage = (advantage - advantage[mask].mean()) / advantage[mask].std(correction=0) * mask
    scores = policy.score(list(samples.prompts), samples.rows(universe.rows))
    policy.module.zero_grad(set_to_none=True)
    (-(advantage * scores.log_probs).sum() / mask.sum()).backward()
    assert relative_error(actual, flat_gradient(policy)) < 1e-5


def test_the_penalty_is_to_the_real_base() -> None:
    """A policy that has moved from its base pays; one that has not pays nothing."""
    policy = tabular(1)
    same, other = copy.deepcopy(policy), tabular(2)
    config = CDPGConfig(method="ziegler")
    for base, expected in ((same, 0.0), (other, None)):
        _, epoch = make_epoch(policy, base)
        objective = Ziegler(config, policy)
        objective.credit(epoch, policy)
        kl = float((epoch.log_q - epoch.log_a).mean())
        assert math.isclose(objective.kl, kl)
        assert (abs(objective.kl) < 1e-12) == (expected == 0.0)


def test_the_value_head_learns_the_return() -> None:
    policy = tabular(1)
    universe, epoch = make_epoch(policy, policy)
    objective = Ziegler(CDPGConfig(method="ziegler"), policy)
    credit = objective.credit(epoch, policy)
    accumulate(policy, credit, epoch, universe.rows, credit.units, tokens_per_pass=100)
    assert objective.value_head.bias.grad is not None
    assert float(objective.value_head.bias.grad) < 0, "rewards are positive, so the estimate must rise from 0"


def test_beta_is_carried_over() -> None:
    policy = tabular(1)
    _, epoch = make_epoch(policy, tabular(2))
    objective, twin = (Ziegler(CDPGConfig(method="ziegler"), policy) for _ in range(2))
    objective.credit(epoch, policy)
    assert objective.beta != 0.2
    twin.load_state(objective.state())
    assert twin.beta == objective.beta
