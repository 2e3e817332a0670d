"""Partition, divergences and their summaries against exact values."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from cdpg.evaluation.outcome import partition_statistics
from cdpg.target.baseline import leave_one_out
from cdpg.target.divergence import kl_policy_base, kl_target_policy, mean_over_covered
from cdpg.target.partition import effective_numbers, log_partition, summarize_partition, weights
from cdpg.target.target import log_target
from enumeration import Universe, contexts_of, tabular
from uneven import VALID, Array, B, completions, scored, table


def all_valid(tensor: Tensor) -> Tensor:
    return torch.ones_like(tensor, dtype=torch.bool)


class World:
    """A policy whose probabilities are multiples of 1/64, a base, and a constraint."""

    def __init__(self) -> None:
        self.policy, self.base = tabular(seed=1), tabular(seed=2)
        with torch.no_grad():
            self.policy.table.zero_()
        self.universe = Universe.of(self.policy, contexts_of(3))
        self.log_pi, self.log_a = self.universe.log_prob(self.policy), self.universe.log_prob(self.base)
        self.b = self.universe.satisfied(lambda prompt, text: "a" in text)
        self.log_target = log_target(self.log_a, self.b)
        self.log_z = self.log_target.logsumexp(dim=1)

    def exact_kl_target_policy(self) -> Tensor:
        ideal = (self.log_target - self.log_z[:, None]).exp()
        gap = (self.log_target - self.log_z[:, None] - self.log_pi).masked_fill(self.b == 0, 0.0)
        return (ideal * gap).sum(dim=1)

    def exact_kl_policy_base(self) -> Tensor:
        return (self.log_pi.exp() * (self.log_pi - self.log_a)).sum(dim=1)


def test_kl_estimators_equal_the_truth_on_a_sample_that_mirrors_the_policy() -> None:
    """64 samples in which every outcome occurs exactly as often as it is probable: both estimators are consistent."""
    world = World()
    counts = (world.log_pi[0].exp() * 64).round().long()
    assert counts.sum() == 64
    index = torch.repeat_interleave(torch.arange(len(counts)), counts)
    log_p, log_pi, log_a = (table[:, index] for table in (world.log_target, world.log_pi, world.log_a))
    valid = all_valid(log_pi)
    assert torch.allclose(log_partition(log_p - log_pi, valid), world.log_z, rtol=1e-12)
    assert torch.allclose(kl_target_policy(log_p, log_pi, valid, 0.0), world.exact_kl_target_policy(), rtol=1e-10)
    assert torch.allclose(kl_policy_base(log_pi, log_a, valid), world.exact_kl_policy_base(), rtol=1e-10)


@pytest.mark.parametrize("samples", [1, 2])
def test_kl_policy_base_is_unbiased(samples: int) -> None:
    world = World()
    tuples = torch.tensor(list(product(range(world.b.shape[1]), repeat=samples)))
    for context in range(3):
        log_pi, log_a = world.log_pi[context][tuples], world.log_a[context][tuples]
        estimates = kl_policy_base(log_pi, log_a, all_valid(log_pi))
        expectation = float((log_pi.sum(dim=1).exp() * estimates).sum())
        assert math.isclose(expectation, float(world.exact_kl_policy_base()[context]), rel_tol=1e-9)


def test_kl_target_policy_approaches_the_truth_as_m_grows_and_never_passes_log_m() -> None:
    world = World()
    errors = []
    for samples in (4, 64, 4096):
        generator = torch.Generator().manual_seed(0)
        index = torch.multinomial(world.log_pi[0].exp(), 200_000 // samples * samples, True, generator=generator)
        index = index.view(-1, samples)
        log_p, log_pi = world.log_target[0][index], world.log_pi[0][index]
        estimates = kl_target_policy(log_p, log_pi, all_valid(log_p))
        assert estimates[~estimates.isnan()].max() <= math.log(samples) + 1e-9
        mean, _ = mean_over_covered(estimates)
        assert mean is not None
        errors.append(abs(mean - float(world.exact_kl_target_policy()[0])))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.01


def test_nothing_covered_is_null() -> None:
    never = torch.full((2, 3), -math.inf, dtype=torch.float64)
    estimates = kl_target_policy(never, torch.zeros_like(never), all_valid(never))
    assert mean_over_covered(estimates) == (None, 0.0)
    summary = summarize_partition(never, all_valid(never))
    assert (summary.mean, summary.coverage, summary.nstd, summary.ess) == (0.0, 0.0, None, None)
    assert torch.equal(weights(never, log_partition(never, all_valid(never)), 1e-8), torch.zeros_like(never))


def test_failed_samples_count_nowhere() -> None:
    """Estimates with some samples invalid equal those of the others alone; a context with none left leaves the mean."""
    generator = torch.Generator().manual_seed(0)
    log_ratio = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    valid = all_valid(log_ratio)
    valid[0, 4:] = False
    valid[2] = False
    assert torch.allclose(log_partition(log_ratio, valid)[0], log_ratio[0, :4].logsumexp(0) - math.log(4))
    kept = summarize_partition(log_ratio, valid)
    first, second = log_ratio[0, :4].exp().mean(), log_ratio[1].exp().mean()
    assert math.isclose(kept.mean, float((first + second) / 2), rel_tol=1e-12)
    assert kept.coverage == 1.0


def test_noise_alone_is_subtracted_from_the_spread_of_z() -> None:
    """Every context has the same Z: the raw nstd is all noise, the corrected one is near 0."""
    generator = torch.Generator().manual_seed(0)
    hits = torch.rand(4000, 32, generator=generator, dtype=torch.float64) < 0.02
    summary = summarize_partition(hits.double().log(), all_valid(hits))
    expected = (0.02 * 0.98 / 32) ** 0.5 / 0.02
    assert summary.nstd is not None
    assert abs(summary.nstd - expected) < 0.1
    assert summary.nstd_corrected is not None
    assert summary.nstd_corrected < 0.35


def test_the_noise_of_a_single_sample_is_unknown() -> None:
    log_ratio = torch.tensor([[0.1, 0.4], [0.3, 0.9], [0.5, 0.2]], dtype=torch.float64).log()
    valid = all_valid(log_ratio)
    single = summarize_partition(log_ratio[:, :1], valid[:, :1])
    assert single.nstd is not None
    assert single.nstd_corrected is None
    valid[2, 1] = False
    z = torch.tensor([0.25, 0.6, 0.5], dtype=torch.float64)
    within = (0.3**2 / 4 + 0.6**2 / 4) / 2  # s²/M of the two contexts that have two samples
    expected = max(0.0, float(z.var(correction=0)) - within) ** 0.5 / float(z.mean())
    assert summarize_partition(log_ratio, valid).nstd_corrected == pytest.approx(expected, abs=1e-12)
    spread = log_ratio * 4
    mixed = summarize_partition(spread, valid)
    found = partition_statistics(spread.exp().where(valid, torch.zeros(())).numpy(), valid.numpy())
    assert found["z_nstd_corrected"].value() == pytest.approx(mixed.nstd_corrected, abs=1e-12)
    alone = partition_statistics(log_ratio[:, :1].exp().numpy(), valid[:, :1].numpy())
    assert math.isnan(alone["z_nstd_corrected"].value())
    assert alone["z_nstd"].value() == pytest.approx(single.nstd)


def test_effective_sample_size() -> None:
    equal = torch.zeros(1, 8, dtype=torch.float64)
    assert summarize_partition(equal, all_valid(equal)).ess == 1.0
    single = torch.full((1, 8), -math.inf, dtype=torch.float64)
    single[0, 3] = 0.0
    assert summarize_partition(single, all_valid(single)).ess == 1 / 8


def test_soft_constraints_scale_the_target() -> None:
    log_a = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64)
    b = torch.tensor([[0.5, 0.0, 1.0]], dtype=torch.float64)
    expected = torch.tensor([[-1.0 + math.log(0.5), -math.inf, -3.0]], dtype=torch.float64)
    assert torch.equal(log_target(log_a, b), expected)
    unscored = torch.tensor([[-1.0, math.nan, -3.0]], dtype=torch.float64)
    assert torch.equal(log_target(unscored, b), expected)


EPSILON = 0.03


class Uneven:
    """Ratios with soft b and failed checks, context by context in NumPy; ``nan`` stands where a check failed."""

    def __init__(self) -> None:
        drawn = completions()
        self.log_pi, self.log_a = scored(table(1), drawn).sum(axis=2), scored(table(2), drawn).sum(axis=2)
        self.target = np.exp(self.log_a) * B
        self.ratio = [
            (self.target[c] / np.exp(self.log_pi[c]))[VALID[c]] for c in range(len(B)) if VALID[c].any()
        ]  # fmt: skip
        self.z = np.array([ratio.mean() for ratio in self.ratio])

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """log P, log π, log a, valid."""
        log_target_ = log_target(torch.from_numpy(self.log_a), torch.from_numpy(B))
        return log_target_, torch.from_numpy(self.log_pi), torch.from_numpy(self.log_a), torch.from_numpy(VALID)

    def kl_target_policy(self) -> list[float]:
        """Algorithm 2 of the paper, for the contexts with a valid sample; NaN where none satisfies."""
        found = []
        for ratio, z in zip(self.ratio, self.z, strict=True):
            terms = [x / (z + EPSILON) * (np.log(x) - np.log(z)) for x in ratio if x > 0]
            found.append(sum(terms) / len(ratio) if terms else math.nan)
        return found

    def kl_policy_base(self) -> list[float]:
        return [float((self.log_pi[c] - self.log_a[c])[VALID[c]].mean()) for c in range(len(B)) if VALID[c].any()]


def test_divergences_with_failed_checks_and_a_soft_constraint() -> None:
    world = Uneven()
    log_p, log_pi, log_a, valid = world.tensors()
    kl = kl_target_policy(log_p, log_pi, valid, EPSILON).numpy()
    judged = VALID.any(axis=1)
    np.testing.assert_allclose(kl[judged], world.kl_target_policy(), rtol=1e-10)
    assert np.isnan(kl[2])
    assert np.isnan(kl[~judged]).all()
    covered = [value for value in world.kl_target_policy() if not math.isnan(value)]
    assert mean_over_covered(torch.from_numpy(kl)) == (pytest.approx(np.mean(covered)), pytest.approx(3 / 5))
    assert mean_over_covered(torch.zeros(0)) == (None, 0.0)
    base = kl_policy_base(log_pi, log_a, valid).numpy()
    np.testing.assert_allclose(base[judged], world.kl_policy_base(), rtol=1e-10)
    assert np.isnan(base[~judged]).all()
    default = kl_target_policy(log_p, log_pi, valid)
    exact = kl_target_policy(log_p, log_pi, valid, 0.0)
    assert torch.allclose(default[[0, 1, 4]], exact[[0, 1, 4]], rtol=1e-5)


def test_the_summary_of_the_partition_by_value() -> None:
    """Spread over contexts with the divisor N, noise s²/M with M − 1 inside, effective sample size as a share."""
    world = Uneven()
    log_p, log_pi, _, valid = world.tensors()
    summary = summarize_partition(log_p - log_pi, valid)
    z, mean = world.z, world.z.mean()
    assert summary.mean == pytest.approx(mean, rel=1e-12)
    assert summary.nstd == pytest.approx(z.std() / mean, rel=1e-12)
    noise = np.mean([ratio.var(ddof=1) / len(ratio) for ratio in world.ratio])
    assert summary.nstd_corrected == pytest.approx(math.sqrt(max(0.0, z.var() - noise)) / mean, rel=1e-10)
    assert summary.coverage == 3 / 4
    ess = [ratio.sum() ** 2 / (ratio**2).sum() / len(ratio) for ratio in world.ratio if ratio.any()]
    assert summary.ess == pytest.approx(np.mean(ess), rel=1e-12)


def test_the_log_partition_and_the_weights_by_value() -> None:
    world = Uneven()
    log_p, log_pi, _, valid = world.tensors()
    log_z = log_partition(log_p - log_pi, valid)
    judged = VALID.any(axis=1)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(log_z.numpy()[judged], np.log(world.z), rtol=1e-12)
    ratio: Array = world.target / np.exp(world.log_pi)
    found = weights((log_p - log_pi)[judged], log_z[judged], EPSILON).numpy()
    np.testing.assert_allclose(found, ratio[judged] / (world.z[:, None] + EPSILON), rtol=1e-12)
    one = weights(log_p - log_pi, torch.tensor(0.2, dtype=torch.float64).log(), EPSILON).numpy()
    np.testing.assert_allclose(one, ratio / (0.2 + EPSILON), rtol=1e-12)
    nothing = torch.full((1, 2), -math.inf, dtype=torch.float64)
    assert weights(nothing, torch.tensor([-math.inf]).double(), 0.0).tolist() == [[0.0, 0.0]], "not 0/0"


def test_ratios_of_any_scale_have_weights_and_effective_numbers() -> None:
    log_ratio = torch.tensor([[1000.0, 1000.0 + math.log(3)], [-2000.0, -math.inf]], dtype=torch.float64)
    log_z = torch.tensor([1000.0, -2000.0], dtype=torch.float64)
    np.testing.assert_allclose(weights(log_ratio, log_z, 0.0).numpy(), [[1, 3], [1, 0]], rtol=1e-12)
    np.testing.assert_allclose(effective_numbers(log_ratio, all_valid(log_ratio)).numpy(), [16 / 10, 1], rtol=1e-12)
    ordinary = torch.tensor([[2.0]], dtype=torch.float64).log()
    assert float(weights(ordinary, ordinary[0], 1.0)) == pytest.approx(2 / 3), "any ε but 0 is added"


def test_a_context_without_a_verdict_leaves_the_summary() -> None:
    log_ratio = torch.zeros(2, 3, dtype=torch.float64)
    summary = summarize_partition(log_ratio, torch.zeros(2, 3, dtype=torch.bool))
    assert (summary.mean, summary.nstd, summary.nstd_corrected, summary.coverage, summary.ess) == (
        0,
        None,
        None,
        0,
        None,
    )


def test_the_baseline_of_a_sample_is_the_mean_of_the_other_valid_ones() -> None:
    rewards = torch.tensor([[1.0, 3.0, math.nan], [5.0, 7.0, math.inf], [1.0, 2.0, 6.0]], dtype=torch.float64)
    valid = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    assert leave_one_out(rewards, valid).tolist() == [[3.0, 1.0, 2.0], [0.0, 5.0, 5.0], [4.0, 3.5, 1.5]]


def test_the_divergence_from_samples_of_another_model_by_value() -> None:
    """KL(p, π) from samples of q: weights P/(Ẑ q), and log P/π. The policy's scores count where P > 0 alone."""
    generator = np.random.default_rng(1)
    log_p, log_policy, log_q = generator.normal(size=(3, 2, 5))
    log_p[0, 1] = -math.inf
    ratio = np.exp(log_p - log_q)
    z = ratio.mean(axis=1, keepdims=True)
    gap = np.where(ratio > 0, log_p - log_policy, 0.0) - np.log(z)
    expected = (ratio / z * gap).mean(axis=1)
    log_policy[0, 1] = math.nan
    given = [torch.from_numpy(numbers) for numbers in (log_p, log_policy, log_q)]
    found = kl_target_policy(given[0], given[1], torch.ones(2, 5, dtype=torch.bool), 0.0, given[2])
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-12)
