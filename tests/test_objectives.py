"""The coefficients of the methods, and the gradients they give, against plain NumPy; soft b, failed checks, shares."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cdpg import CDPGConfig
from cdpg.methods import CDPG, DPG, Reinforce, WeightedObjective, Ziegler, make_objective
from cdpg.rollout.rollout import Rollout
from cdpg.training.optimization import accumulate
from uneven import VALID, Array, B, M, N, completions, log_prob_gradient, scored, table, uneven_epoch

EPSILON = 0.03
"""Large enough to see where it enters."""


def ratios(seed: int = 0) -> Array:
    """P_c(x)/q(x|c) = a·b/q; 0 where the check failed."""
    drawn = completions(seed)
    log_q, log_a = scored(table(1), drawn).sum(axis=2), scored(table(2), drawn).sum(axis=2)
    return np.where(VALID, np.exp(log_a) * B / np.exp(log_q), 0.0)


def partition(ratio: Array) -> Array:
    """Ẑ_c: the mean over the samples whose check succeeded; 0 where there is none."""
    return ratio.sum(axis=1) / np.maximum(VALID.sum(axis=1), 1)


def epoch(seed: int = 0, share: range = range(N)) -> Rollout:
    return uneven_epoch(table(1), table(2), seed=seed, share=share)


EXPECTED = {
    "cdpg": ratios() / (partition(ratios())[:, None] + EPSILON),
    "dpg": ratios() / (ratios().sum() / VALID.sum() + EPSILON),
    "reinforce": np.where(VALID, B, 0.0),
}


def make(method: str) -> WeightedObjective:
    objective = make_objective(CDPGConfig(method=method, partition_epsilon=EPSILON), table(0))  # type: ignore[arg-type]
    assert isinstance(objective, WeightedObjective)
    return objective


@pytest.mark.parametrize("method", list(EXPECTED))
def test_the_coefficient_of_every_sample(method: str) -> None:
    """Section 3 of the specification: a·b/((Ẑ_c+ε)q), a·b/((Z̄+ε)q), b; failed checks count nowhere."""
    np.testing.assert_allclose(make(method).weights(epoch()).numpy(), EXPECTED[method], rtol=1e-12)


@pytest.mark.parametrize("method", list(EXPECTED))
def test_credit_holds_the_rows_of_this_process_and_the_divisor_of_all(method: str) -> None:
    share = range(1, 3)
    credit = make(method).credit(epoch(share=share), table(0))
    assert credit.weights is not None
    np.testing.assert_allclose(credit.weights.numpy(), EXPECTED[method][1:3].ravel(), rtol=1e-12)
    assert credit.units == VALID.sum()
    assert credit.active.tolist() == (EXPECTED[method] != 0).ravel().tolist()


@pytest.mark.parametrize("method", list(EXPECTED))
def test_loss_and_gradient_after_a_step(method: str) -> None:
    """−Σ w log π, where π is no longer q: ``reinforce`` multiplies w by π/q, the others do not; w is a constant."""
    policy, rows = table(0), [2 * M + 3, 4, 0, 1, 4 * M + 2, M + 3]
    credit = make(method).credit(epoch(), policy)
    drawn = [x for row in completions() for x in row]
    log_pi = scored(policy, completions()).sum(axis=2).ravel()
    log_q = scored(table(1), completions()).sum(axis=2).ravel()
    weight = EXPECTED[method].ravel() * (np.exp(log_pi - log_q) if method == "reinforce" else 1.0)
    divisor = 7.0
    loss = accumulate(policy, credit, epoch(), torch.tensor(rows), divisor, tokens_per_pass=9)
    assert loss == pytest.approx(-(weight * log_pi)[rows].sum() / divisor, rel=1e-12)
    expected = -sum(weight[row] * log_prob_gradient(policy, row // M, drawn[row]) for row in rows) / divisor
    np.testing.assert_allclose(policy.table.grad.numpy(), expected, rtol=1e-9, atol=1e-14)


def test_the_running_mean_of_dpg() -> None:
    """Z̄ is over the valid samples of all epochs so far, this one included."""
    objective, first, second = make("dpg"), ratios(0), ratios(1)
    objective.weights(epoch(0))
    assert objective.metrics() == {"z_running": pytest.approx(first.sum() / VALID.sum(), rel=1e-12)}
    z = (first.sum() + second.sum()) / (2 * VALID.sum())
    twin = make("dpg")
    twin.load_state(objective.state())
    for one in (objective, twin):  # a resumed run goes on as the other does
        np.testing.assert_allclose(one.weights(epoch(1)).numpy(), second / (z + EPSILON), rtol=1e-12)
        assert one.metrics() == {"z_running": pytest.approx(z, rel=1e-12)}


def test_an_infinite_ratio_does_not_spoil_the_running_mean() -> None:
    objective, spoilt = DPG(EPSILON), epoch(0)
    spoilt.log_a[0, 0] = math.inf
    objective.weights(spoilt)
    assert objective.state() == {"ratio_sum": 0.0, "count": 0}
    np.testing.assert_allclose(objective.weights(epoch()).numpy(), EXPECTED["dpg"], rtol=1e-12)


def test_the_log_partition_of_an_epoch() -> None:
    found = epoch().log_z.numpy()
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(found[[0, 1, 2, 4]], np.log(partition(ratios()))[[0, 1, 2, 4]], rtol=1e-12)
    assert np.isneginf(found[2])


def test_a_method_s_name_makes_its_objective() -> None:
    for method, kind in (("cdpg", CDPG), ("dpg", DPG), ("reinforce", Reinforce), ("ziegler", Ziegler)):
        objective = make_objective(CDPGConfig(method=method, ziegler_epochs=3), table(0))  # type: ignore[arg-type]
        assert type(objective) is kind
        assert objective.passes == (3 if method == "ziegler" else 1)
        assert objective.scores_every_sample == (method == "ziegler")
        assert (objective.module is not None) == (method == "ziegler")
