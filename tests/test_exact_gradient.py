"""The gradients are what the mathematics says, on models small enough to enumerate (float64)."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from cdpg import CDPGConfig
from cdpg.methods import EpochLoss, WeightedMethod
from cdpg.methods.cdpg import CDPG
from cdpg.methods.dpg import DPG
from cdpg.methods.reinforce import Reinforce
from cdpg.models.base import LanguageModel
from cdpg.rollout.rollout import Rollout
from cdpg.target import partition
from cdpg.target.target import log_target
from enumeration import (
    Universe,
    contexts_of,
    exact_cross_entropy_gradient,
    flat_gradient,
    four_token_transformer,
    relative_error,
    tabular,
)

KINDS = ("tabular", "llama", "t5")
TOLERANCE = 1e-6
"""Llama and T5 normalise in float32 whatever the dtype; the table agrees to 1e-14."""


def make(kind: str, seed: int) -> LanguageModel:
    return tabular(seed) if kind == "tabular" else four_token_transformer(kind, seed)


def check(prompt: str, text: str) -> bool:
    """Its share of the base's mass differs a lot between the contexts."""
    return text.count("a") >= len(prompt.split())


def weights_in(found: EpochLoss, rollout: Rollout) -> Tensor:
    """``[context, sample]``."""
    assert found.samples.weights is not None
    return found.samples.weights.view_as(rollout.b)


def weights_of(kind: type[WeightedMethod], rollout: Rollout, epsilon: float = 0.0) -> Tensor:
    """``[context, sample]``, in a first epoch."""
    method = kind(CDPGConfig(partition_epsilon=epsilon))
    return weights_in(method.epoch_loss(method.begin(), rollout, tabular(1)), rollout)


class Case:
    """Policy π, base a and another proposal q, three different models; exact Z_c."""

    def __init__(self, kind: str) -> None:
        self.policy, self.base, self.other = (make(kind, seed) for seed in (1, 2, 3))
        self.universe = Universe.of(self.policy, contexts_of(3))
        self.b = self.universe.satisfied(check)
        self.log_a = self.universe.log_prob(self.base)
        self.log_target = log_target(self.log_a, self.b)
        self.log_z = self.log_target.logsumexp(dim=1)
        self.log_pi = self.universe.log_prob(self.policy)
        self.log_other = self.universe.log_prob(self.other)

    def exact(self) -> Tensor:
        return exact_cross_entropy_gradient(self.policy, self.universe, self.log_target)


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_the_universe_is_whole(case: Case) -> None:
    for log_prob in (case.log_pi, case.log_a, case.log_other):
        assert torch.allclose(log_prob.exp().sum(dim=1), torch.ones(3, dtype=torch.float64), atol=1e-12)
    z = case.log_z.exp()
    assert z.max() / z.min() > 3  # otherwise dpg's bias would not show


@pytest.mark.parametrize("proposal", ["policy", "other"])
def test_expected_cdpg_gradient_is_the_cross_entropy_gradient(case: Case, proposal: str) -> None:
    """E_{x~q} [P/(Z q)] ∇log π is unbiased for any proposal that covers the target, ε = 0 and Z_c exact."""
    log_q = case.log_pi if proposal == "policy" else case.log_other
    weights = partition.weights(case.log_target - log_q, case.log_z, epsilon=0.0)
    expected = case.universe.gradient(case.policy, log_q.exp() * weights)
    assert relative_error(expected, case.exact()) < TOLERANCE


def test_cdpg_normalises_by_the_sampled_partition(case: Case) -> None:
    """With every outcome as a sample, the method's own weights are M · p_c(x) times the exact 1/q factor."""
    epoch = case.universe.epoch(case.b, case.log_pi, case.log_a)
    count = case.b.shape[1]
    ratio = (case.log_target - case.log_pi).exp()
    weights = weights_of(CDPG, epoch)
    assert torch.allclose(weights, ratio / ratio.mean(dim=1, keepdim=True), rtol=1e-12)
    assert torch.allclose(weights.sum(dim=1), torch.full((3,), float(count), dtype=torch.float64))


def test_weights_carry_no_gradient_and_survive_one_that_does(case: Case) -> None:
    """A weight that depends on θ must still be treated as a constant."""
    log_pi = case.universe.differentiable_log_prob(case.policy)
    attached = partition.weights(case.log_target - log_pi, case.log_z, 0.0) * log_pi.exp().detach()
    assert attached.requires_grad
    through_loss = case.universe.gradient(case.policy, attached)
    assert relative_error(through_loss, case.exact()) < TOLERANCE


def test_with_one_sample_a_context_cdpg_is_reinforce(case: Case) -> None:
    """The estimate then equals the ratio, so that every satisfying sample counts 1, wherever the policy has gone."""
    for outcome in range(case.b.shape[1]):
        one = slice(outcome, outcome + 1)
        epoch = case.universe.epoch(case.b[:, one], case.log_pi[:, one], case.log_a[:, one])
        assert torch.allclose(weights_of(CDPG, epoch), weights_of(Reinforce, epoch), rtol=1e-12)


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_self_normalised_gradient_is_kappa_times_the_true_one(samples: int) -> None:
    """At q = a with binary b, the mean over all M-tuples is κ_c = 1 − (1 − Z_c)^M times context c's gradient."""
    case = Case("tabular")
    coefficients = torch.zeros_like(case.b)
    for context in range(3):
        coefficients[context] = expected_coefficients(case, context, samples)
        kappa = 1 - (1 - case.log_z[context].exp()) ** samples
        ideal = (case.log_target[context] - case.log_z[context]).exp()
        assert torch.allclose(coefficients[context], kappa * ideal, rtol=1e-9, atol=1e-15)
    kappas = 1 - (1 - case.log_z.exp()) ** samples
    scaled = (case.log_target - case.log_z[:, None]).exp() * kappas[:, None]
    assert relative_error(
        case.universe.gradient(case.policy, coefficients), case.universe.gradient(case.policy, scaled)
    ) < 1e-9  # fmt: skip


def expected_coefficients(case: Case, context: int, samples: int) -> Tensor:
    """Expected coefficient of ∇log π(x) for each outcome, over all M-tuples drawn from q = a."""
    log_q = case.log_a[context]
    tuples = torch.tensor(list(product(range(len(log_q)), repeat=samples)))  # [tuple, sample]
    log_ratio = (case.log_target[context] - log_q)[tuples]
    log_z = partition.log_partition(log_ratio, torch.ones_like(log_ratio, dtype=torch.bool))
    weights = partition.weights(log_ratio, log_z, epsilon=0.0)
    probability = log_q[tuples].sum(dim=1).exp()
    share = probability[:, None] * weights / samples
    return torch.zeros_like(log_q).index_add(0, tuples.flatten(), share.flatten())


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_the_partition_estimate_is_unbiased(samples: int) -> None:
    case = Case("tabular")
    for context in range(3):
        log_q = case.log_other[context]
        tuples = torch.tensor(list(product(range(len(log_q)), repeat=samples)))
        log_ratio = (case.log_target[context] - log_q)[tuples]
        estimate = partition.log_partition(log_ratio, torch.ones_like(log_ratio, dtype=torch.bool)).exp()
        expectation = (log_q[tuples].sum(dim=1).exp() * estimate).sum()
        assert math.isclose(float(expectation), float(case.log_z[context].exp()), rel_tol=1e-10)


def test_dpg_is_biased_exactly_as_predicted(case: Case) -> None:
    """Its expected gradient is that of each context times Z_c/Z̄: right only where Z_c does not vary."""
    z_bar = case.log_z.exp().mean()
    weights = partition.weights(case.log_target - case.log_pi, z_bar.log(), epsilon=0.0)
    dpg = case.universe.gradient(case.policy, case.log_pi.exp() * weights)
    ideal = (case.log_target - case.log_z[:, None]).exp()
    predicted = case.universe.gradient(case.policy, ideal * (case.log_z.exp() / z_bar)[:, None])
    assert relative_error(dpg, predicted) < TOLERANCE
    assert relative_error(dpg, case.exact()) > 0.05


def test_dpg_keeps_one_running_mean_over_contexts_and_epochs(case: Case) -> None:
    method = DPG(CDPGConfig(partition_epsilon=0.0))
    ratio = (case.log_target - case.log_pi).exp()
    first = case.universe.epoch(case.b, case.log_pi, case.log_a)
    one = method.epoch_loss(method.begin(), first, case.policy)
    assert torch.allclose(weights_in(one, first), ratio / ratio.mean(), rtol=1e-12)
    second_ratio = (case.log_target - case.log_other).exp()
    second = case.universe.epoch(case.b, case.log_other, case.log_a)
    expected = second_ratio / torch.cat([ratio, second_ratio]).mean()
    assert torch.allclose(weights_in(method.epoch_loss(one.state, second, case.policy), second), expected, rtol=1e-12)


@pytest.mark.parametrize("proposal", ["policy", "other"])
def test_expected_reinforce_gradient_is_that_of_the_expected_reward(case: Case, proposal: str) -> None:
    """∇E_π[b], whatever the samples came from: after the first step the factor π/q makes up for it."""
    log_q = case.log_pi if proposal == "policy" else case.log_other
    case.policy.module.zero_grad(set_to_none=True)
    (-(case.universe.differentiable_log_prob(case.policy).exp() * case.b).sum(dim=1).mean()).backward()
    exact = flat_gradient(case.policy)
    epoch = case.universe.epoch(case.b, log_q, case.log_a)
    loss = Reinforce(CDPGConfig()).epoch_loss({}, epoch, case.policy).samples
    assert loss.weights is not None
    loss.weights = loss.weights * log_q.exp().flatten()
    assert relative_error(case.universe.gradient_of(case.policy, loss, epoch), exact) < TOLERANCE


def test_epsilon_enters_once(case: Case) -> None:
    """w = P/((Z + ε) q), with an ε large enough to see."""
    epsilon = 0.25
    log_ratio = case.log_target - case.log_pi
    epoch = case.universe.epoch(case.b, case.log_pi, case.log_a)
    z = log_ratio.exp().mean(dim=1, keepdim=True)
    assert torch.allclose(weights_of(CDPG, epoch, epsilon), log_ratio.exp() / (z + epsilon), rtol=1e-12)
    z_bar = log_ratio.exp().mean()
    assert torch.allclose(weights_of(DPG, epoch, epsilon), log_ratio.exp() / (z_bar + epsilon), rtol=1e-12)


def test_a_context_without_a_satisfying_sample_stays_in_the_mean(case: Case) -> None:
    """Its weight is 0, and the divisor counts it."""
    b = case.b.clone()
    b[1] = 0.0
    epoch = case.universe.epoch(b, case.log_pi, case.log_a)
    for kind in (CDPG, DPG, Reinforce):
        method = kind(CDPGConfig())
        loss = method.epoch_loss(method.begin(), epoch, case.policy).samples
        assert loss.normalizer == b.numel()
        assert not loss.active.view_as(b)[1].any()
        assert loss.active.view_as(b)[0].any()


@pytest.mark.parametrize("tokens_per_pass", [pytest.param(1, marks=pytest.mark.exhaustive), 17, 10_000])
def test_the_gradient_does_not_depend_on_micro_batches(case: Case, tokens_per_pass: int) -> None:
    coefficients = torch.rand(case.b.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = case.universe.gradient(case.policy, coefficients, tokens_per_pass=10**6)
    assert relative_error(case.universe.gradient(case.policy, coefficients, tokens_per_pass), whole) < 1e-6
