"""The pooled partition estimate and the control variate, by enumeration."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from cdpg import CDPGConfig
from cdpg.methods.base import WeightedLoss
from cdpg.methods.cdpg import CDPG
from cdpg.target import partition
from cdpg.target.pooled import PooledPartition, Prior
from enumeration import Universe, contexts_of, exact_cross_entropy_gradient, relative_error, tabular

A = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
Q = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
B = torch.tensor([[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
"""``[context, outcome]``: base, proposal and constraint of two contexts with four outcomes each."""
M = 3


@dataclass(frozen=True)
class Ratios:
    """As much of a rollout as weights are made of."""

    log_ratio: Tensor
    indices: tuple[int, ...]
    is_tilted = False

    @property
    def valid(self) -> Tensor:
        return torch.ones_like(self.log_ratio, dtype=torch.bool)

    @property
    def log_z(self) -> Tensor:
        return partition.log_partition(self.log_ratio, self.valid)

    def epsilon(self, epsilon: float) -> float:
        return epsilon


def method(**settings: object) -> CDPG:
    return CDPG(CDPGConfig(partition_epsilon=0.0, **settings))  # type: ignore[arg-type]


def ratios(context: int, outcomes: tuple[int, ...], other: tuple[int, ...]) -> Ratios:
    """Outcomes of one context, beside fixed ones of the other."""
    chosen = [outcomes, other] if context == 0 else [other, outcomes]
    log_ratio = (A * B / Q).log()
    return Ratios(torch.stack([log_ratio[c, list(rows)] for c, rows in enumerate(chosen)]), (0, 1))


def expected_coefficient(made: CDPG, state: object, context: int, m: int = M) -> Tensor:
    """E[mean_j w_j · 1(x_j = x)], ``[outcome]``, over every m-tuple of samples of a context."""
    found = torch.zeros(4, dtype=torch.float64)
    for outcomes in product(range(4), repeat=m):
        rollout = ratios(context, outcomes, ((1, 3, 0) if context else (0, 2, 1))[:m])
        weights = made.weights(rollout, made.advance(state, rollout))[context]  # type: ignore[arg-type]
        probability = math.prod(float(Q[context, x]) for x in outcomes)
        for outcome, weight in zip(outcomes, weights.tolist(), strict=True):
            found[outcome] += probability * weight / m
    return found


def direction_error(coefficient: Tensor, context: int) -> float:
    """How far a coefficient is from a multiple of p_c."""
    ideal = A[context] * B[context]
    return relative_error(coefficient / coefficient.sum(), ideal / ideal.sum())


def earlier(made: CDPG) -> object:
    """The state after one epoch with satisfying samples in both contexts."""
    state = made.begin()
    for outcomes in ((1, 0, 3), (2, 1, 0)):
        state = made.advance(state, ratios(0, outcomes, (0, 2, 1)))
    return state


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("context", [0, 1])
def test_the_pooled_gradient_of_a_context_has_the_exact_direction_whatever_m_is(context: int, m: int) -> None:
    made = method(partition="pooled")
    assert direction_error(expected_coefficient(made, earlier(made), context, m), context) < 1e-12


@pytest.mark.parametrize("context", [0, 1])
def test_the_batch_gradient_of_a_context_leans_towards_the_proposal(context: int) -> None:
    made = method(partition="batch")
    assert direction_error(expected_coefficient(made, {}, context), context) > 0.02


@pytest.mark.parametrize(("outcomes", "other", "differ"), [((1, 0, 3), (0, 2, 1), False), ((2, 0, 2), (0, 1, 0), True)])
def test_the_first_epoch_has_the_prior_of_its_own_samples(
    outcomes: tuple[int, ...], other: tuple[int, ...], differ: bool
) -> None:
    """The divisor is the mean over contexts only where these do not differ by more than noise."""
    made = method(partition="pooled")
    rollout = ratios(0, outcomes, other)
    ratio = rollout.log_ratio.exp()
    prior = PooledPartition().add((0, 1), ratio, rollout.valid).prior()
    assert prior is not None and (prior.strength is not None) == differ
    assert prior.mean == pytest.approx(float(ratio.mean()))
    z = ratio.mean()
    if prior.strength is not None:
        z = (ratio.sum(dim=1, keepdim=True) - ratio + prior.strength * ratio.mean()) / (M - 1 + prior.strength)
    weights = made.weights(rollout, made.advance(made.begin(), rollout))  # type: ignore[arg-type]
    torch.testing.assert_close(weights, ratio / z)


def test_the_bias_of_a_context_falls_with_its_visits() -> None:
    """E[Z/Ẑ] − 1, by which a context's gradient is too long, over every count of outcomes of 1, 4 and 16 visits."""
    share, ratio = 0.6, 0.5  # of the outcomes that satisfy, and their P/q
    z = share * ratio
    biases = []
    for visits in (1, 4, 16):
        others, bias = visits * M, 0.0
        for satisfied in range(others + 1):
            pool = PooledPartition({0: (ratio * (satisfied + 1), others + 1)})
            log_z = pool.log_z((0,), torch.tensor([[math.log(ratio)]], dtype=torch.float64), Prior(0.2, 2.0))
            probability = math.comb(others, satisfied) * share**satisfied * (1 - share) ** (others - satisfied)
            bias += probability * (z / math.exp(float(log_z)) - 1)
        biases.append(bias)
    assert biases == pytest.approx([0.3534, 0.1072, 0.0275], abs=1e-4)


def test_strength_and_estimate_by_hand() -> None:
    """Two contexts of two samples: Ẑ = 0.5 and 2, s² = 0.5 and 2, so that within = 1.25 and between = 1.125 − 0.625."""
    ratio = torch.tensor([[0.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    pool = PooledPartition().add((7, 9), ratio, torch.ones_like(ratio, dtype=torch.bool))
    assert pool.sums == {7: (1.0, 2), 9: (4.0, 2)}
    assert pool.within == pytest.approx(1.25)
    assert pool.between == (pytest.approx(0.5), 1)
    prior = pool.prior()
    assert prior == Prior(mean=pytest.approx(1.25), strength=pytest.approx(2.5))
    later = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    pool = pool.add((9,), later, torch.ones_like(later, dtype=torch.bool))
    expected = [[(6 - 2 + 2.5 * 1.25) / (4 - 1 + 2.5), (6 - 0 + 2.5 * 1.25) / (4 - 1 + 2.5)]]
    torch.testing.assert_close(pool.log_z((9,), later.log(), prior).exp().tolist(), expected)


EPOCHS = (
    ((3, 5, 8, 2), [[0.5, 0.0, 0.1], [0.2, 0.7, 0.3], [0.9, 0.4, 0.6], [0.1, 0.3, 0.0]], [3, 2, 3, 1]),
    ((5, 6, 2), [[0.4, 0.1, 0.2], [0.05, 0.0, 0.0], [0.3, 0.6, 0.1]], [3, 2, 3]),
    ((8, 3), [[0.8, 0.2, 0.5], [0.6, 0.0, 0.0]], [3, 1]),
)
"""Indices of contexts, ratios, and how many samples of each context have a verdict: the first ones."""


def pooled(epochs: int) -> PooledPartition:
    pool = PooledPartition()
    for contexts, ratio, counts in EPOCHS[:epochs]:
        valid = torch.arange(3) < torch.tensor(counts)[:, None]
        pool = pool.add(contexts, torch.tensor(ratio, dtype=torch.float64), valid)
    return pool


def test_sums_variances_and_prior_over_epochs_by_value() -> None:
    """Against NumPy; contexts with a single verdict are in the sums, not in the variances."""
    sums: dict[int, list[float]] = {}
    between = []
    for number, (contexts, table, counts) in enumerate(EPOCHS, start=1):
        rows = [row[:count] for row, count in zip(table, counts, strict=True)]
        for index, row in zip(contexts, rows, strict=True):
            sums[index] = [*sums.get(index, []), *row]
        several = [row for row in rows if len(row) > 1]
        if len(several) > 1:
            within = np.mean([np.var(row, ddof=1) for row in several])
            noise = np.mean([np.var(row, ddof=1) / len(row) for row in several])
            between.append(np.var([np.mean(row) for row in several], ddof=1) - noise)
        pool = pooled(number)
        assert pool.sums == {index: (pytest.approx(sum(row)), len(row)) for index, row in sums.items()}
        assert pool.within == pytest.approx(within, rel=1e-12)
        assert pool.between == (pytest.approx(sum(between), rel=1e-12), len(between))
        every = [x for row in sums.values() for x in row]
        strength = max(1.0, within / np.mean(between))
        assert pool.prior() == Prior(pytest.approx(np.mean(every)), pytest.approx(strength))
    assert len(between) == 2, "the last epoch has one context with two verdicts"
    assert strength > 2
    ratio = torch.tensor(EPOCHS[-1][1], dtype=torch.float64)
    found = pool.log_z(EPOCHS[-1][0], ratio.log(), None).exp()
    prior = strength * np.mean(every)
    for place, index in enumerate(EPOCHS[-1][0]):
        expected = [(sum(sums[index]) - x + prior) / (len(sums[index]) - 1 + strength) for x in ratio[place].tolist()]
        np.testing.assert_allclose(found[place], expected, rtol=1e-12)


def test_a_pool_in_which_nothing_satisfied_has_no_prior() -> None:
    nothing = torch.zeros(2, 2, dtype=torch.float64)
    for pool in (PooledPartition(), PooledPartition().add((0, 1), nothing, torch.ones(2, 2, dtype=torch.bool))):
        assert pool.prior() is None
        assert pool.log_z((0, 1), nothing.log(), None).tolist() == [[-math.inf] * 2] * 2


@pytest.mark.parametrize(("within", "between"), [(None, (0.0, 0)), (0.5, (0.0, 0)), (0.5, (0.0, 1)), (0.5, (-0.2, 2))])
def test_a_mean_has_no_strength_while_contexts_are_not_known_to_differ(
    within: float | None, between: tuple[float, int]
) -> None:
    assert PooledPartition({1: (0.5, 4), 2: (0.25, 2)}, within, between).prior() == Prior(0.125, None)


def test_samples_without_a_verdict_count_nowhere() -> None:
    ratio = torch.tensor([[0.5, 1.0, 9.0], [1.0, 3.0, 9.0]], dtype=torch.float64)
    valid = torch.tensor([[True, True, False]] * 2)
    assert PooledPartition().add((0, 1), ratio, valid) == PooledPartition().add((0, 1), ratio[:, :2], valid[:, :2])


def test_a_context_seen_twice_in_an_epoch_is_one_context() -> None:
    ratio = torch.tensor([[0.5, 1.0], [1.0, 3.0]], dtype=torch.float64)
    pool = PooledPartition().add((4, 4), ratio, torch.ones_like(ratio, dtype=torch.bool))
    assert pool.sums == {4: (5.5, 4)}


def test_contexts_that_do_not_differ_share_one_z() -> None:
    ratio = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    pool = PooledPartition().add((0, 1), ratio, torch.ones_like(ratio, dtype=torch.bool))
    assert pool.prior() == Prior(mean=0.5, strength=None)
    assert pool.log_z((0, 1), ratio.log(), pool.prior()).exp().unique().tolist() == [0.5]


def test_the_prior_counts_as_one_sample_at_least() -> None:
    """Contexts without noise: the strength would be 0, and a context whose other samples all fail would have Ẑ = 0."""
    ratio = torch.tensor([[1.0, 1.0], [3.0, 3.0]], dtype=torch.float64)
    prior = PooledPartition().add((0, 1), ratio, torch.ones_like(ratio, dtype=torch.bool)).prior()
    assert prior == Prior(mean=2.0, strength=1.0)
    alone = torch.tensor([[4.0, 0.0]], dtype=torch.float64)
    pool = PooledPartition().add((5,), alone, torch.ones_like(alone, dtype=torch.bool))
    assert pool.log_z((5,), alone.log(), prior).exp()[0].tolist() == pytest.approx([1.0, 3.0])


def test_the_state_survives_a_checkpoint() -> None:
    made = method(partition="pooled")
    state = earlier(made)
    assert json.loads(json.dumps(state)) == state
    assert PooledPartition.from_mapping(state["pool"]).to_mapping() == state["pool"]  # type: ignore[index]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_ratios_that_are_not_finite_count_nowhere(bad: float) -> None:
    """The step of such a sample is refused. Those of other batches are taken, also in contexts that are new."""
    made = method(partition="pooled")
    state = earlier(made)
    broken = Ratios(torch.tensor([[bad, 0.0, -1.0], [0.5, -2.0, 0.0]], dtype=torch.float64), (5, 1))
    after = made.advance(state, broken)  # type: ignore[arg-type]
    before, pool = (PooledPartition.from_mapping(found["pool"]) for found in (state, after))  # type: ignore[index]
    assert pool.sums[5] == (pytest.approx(1 + math.exp(-1)), 2)
    assert pool.sums[1][1] == before.sums[1][1] + 3
    assert after["satisfying"] == 1.0
    kept = torch.tensor([[0.0, -1.0, 9.0], [0.5, -2.0, 0.0]], dtype=torch.float64).exp()
    valid = torch.tensor([[True, True, False], [True, True, True]])
    assert pool == before.add((5, 1), kept.masked_fill(~valid, 0.0), valid), "as if it had not been drawn"
    weights = made.weights(broken, {**after, "prior": {"mean": 0.3, "strength": 2.0}})  # type: ignore[arg-type]
    assert weights.isfinite().tolist() == [[False, True, True], [True, True, True]]
    assert float(weights[0, 1]) == pytest.approx((2 - 1 + 2.0) / (math.exp(-1) + 2.0 * 0.3), rel=1e-12)


def test_the_control_variate_leaves_the_expected_gradient_and_takes_noise_away() -> None:
    """On a tabular model, every outcome once, weighted by q: with the policy where the samples came from, and moved."""
    policy, base = tabular(1), tabular(2)
    universe = Universe.of(policy, contexts_of(3))
    b = universe.satisfied(lambda prompt, text: "a" in text)
    log_a, log_q = universe.log_prob(base), universe.log_prob(policy)
    log_p = (log_a + b.log()).log_softmax(dim=1)
    moved = tabular(3)
    for model in (policy, moved):
        exact = exact_cross_entropy_gradient(model, universe, log_p)
        rollout = universe.epoch(b, log_q, log_a)
        weights = (log_p - log_q).exp()
        with_variate = WeightedLoss(rollout, weights, follows_policy=False, subtracts_control_variate=True)
        gradient = _expected(universe, model, weights, log_q, subtract=True)
        assert relative_error(gradient, exact) < 1e-9
        assert relative_error(_expected(universe, model, weights, log_q, subtract=False), exact) < 1e-9
        assert bool(with_variate.active.all())
    second = (log_q.exp() * weights.square()).sum(dim=1)
    noise = (log_q.exp() * (weights - 1).square()).sum(dim=1)
    torch.testing.assert_close(noise, second - 1)  # 1/ESS becomes 1/ESS − 1


def test_the_control_variate_has_no_gradient_of_its_own_where_checks_fail() -> None:
    """Some outcomes have no verdict: their weight is 0, and π/q is subtracted from it as from any other."""
    policy = tabular(1)
    universe = Universe.of(policy, contexts_of(3))
    log_q = universe.log_prob(policy)
    weights = universe.satisfied(lambda prompt, text: "a" in text) * 2.0
    valid = universe.satisfied(lambda prompt, text: "b" not in text) > 0
    valid[2] = False  # nothing is known of this context
    weights = weights.masked_fill(~valid, 0.0)
    for model in (policy, tabular(3)):
        gradients = [_expected(universe, model, weights, log_q, subtract, valid) for subtract in (True, False)]
        assert relative_error(*gradients) < 1e-9
    loss = WeightedLoss(universe.epoch(weights, log_q, log_q, valid), weights, False, subtracts_control_variate=True)
    assert loss.active.view_as(valid).all(dim=1).tolist() == [True, True, False]
    assert not loss.active.view_as(valid)[2].any()


def test_the_setting_turns_the_control_variate_on() -> None:
    """From the epoch on before which three quarters of the samples satisfied: they do not decide about themselves."""
    on, off = method(control_variate=True), method(control_variate=False)
    for share, expected in ((0.0, False), (0.74, False), (0.75, True), (1.0, True)):
        assert on.subtracts_control_variate({"satisfying": share}) == expected
        assert not off.subtracts_control_variate({"satisfying": share})
    assert on.begin()["satisfying"] == 0.0
    assert method(control_variate=True).advance(on.begin(), ratios(0, (1, 0, 3), (0, 2, 1)))["satisfying"] == 4 / 6


def _expected(
    universe: Universe, model: object, weights: Tensor, log_q: Tensor, subtract: bool, valid: Tensor | None = None
) -> Tensor:
    """−E_c E_q[(w − π/q) ∇log π] by the production loss: every outcome once, with the share q."""
    rollout = universe.epoch((weights > 0).double(), log_q, torch.zeros_like(log_q), valid)

    class Shares(WeightedLoss):
        def loss(self, rows: Tensor, scores: object) -> Tensor:
            share = log_q.exp().flatten()[rows]
            parts = [super(Shares, self).loss(rows[i : i + 1], _Row(scores, i)) for i in range(len(rows))]
            return (torch.stack(parts) * share).sum()

    loss = Shares(rollout, weights, follows_policy=False, subtracts_control_variate=subtract)
    return universe.gradient_of(model, loss, rollout)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Row:
    """The scores of one row."""

    scores: object
    row: int

    def log_prob(self) -> Tensor:
        return self.scores.log_prob()[self.row : self.row + 1]  # type: ignore[attr-defined,no-any-return]


def test_the_samples_of_an_epoch_do_not_decide_about_their_own_control_variate() -> None:
    """All samples satisfy, and none of the epoch before: nothing is subtracted yet."""
    base = tabular(3)
    universe = Universe.of(base, contexts_of(3))
    log_a = universe.log_prob(base)
    rollout = universe.epoch(torch.ones_like(log_a), log_a, log_a)
    made = method(control_variate=True)
    first = made.epoch_loss(made.begin(), rollout, base)
    second = made.epoch_loss(first.state, rollout, base)
    rows = universe.samples.rows(universe.rows)
    scores = base.score(list(universe.samples.prompts), rows)
    assert float(first.samples.loss(universe.rows, scores)) > 1.0
    assert abs(float(second.samples.loss(universe.rows, scores))) < 1e-9, "w − π/q is 0 where the policy is p"
