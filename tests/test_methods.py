"""The coefficients of the methods, and the gradients they give, against plain NumPy; soft b, failed checks, shares."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from cdpg import CDPGConfig
from cdpg.methods import METHODS, State, WeightedMethod, label_of, make_method, targets_p
from cdpg.methods.cdpg import CDPG, OFTEN, CDPGSettings
from cdpg.methods.dpg import DPG, running_mean
from cdpg.methods.reinforce import Reinforce
from cdpg.methods.ziegler import Ziegler, ZieglerSettings
from cdpg.rollout.rollout import Rollout
from cdpg.target.pooled import PooledPartition
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


def make(name: str) -> WeightedMethod:
    method = make_method(CDPGConfig(method=name, partition_epsilon=EPSILON))
    assert isinstance(method, WeightedMethod)
    return method


def weights(method: WeightedMethod, rollout: Rollout, state: State | None = None) -> Array:
    """``[context, sample]``, by the whole way from a state to a loss."""
    loss = method.epoch_loss(method.begin() if state is None else state, rollout, table(0)).samples
    assert loss.weights is not None
    return loss.weights.view_as(rollout.b).numpy()


@pytest.mark.parametrize("method", list(EXPECTED))
def test_the_coefficient_of_every_sample(method: str) -> None:
    """w is a·b/((Ẑ_c+ε)q), a·b/((Z̄+ε)q) or b; failed checks count nowhere."""
    np.testing.assert_allclose(weights(make(method), epoch()), EXPECTED[method], rtol=1e-12)


@pytest.mark.parametrize("method", list(EXPECTED))
def test_a_loss_holds_the_rows_of_this_process_and_the_divisor_of_all(method: str) -> None:
    made = make(method)
    loss = made.epoch_loss(made.begin(), epoch(share=range(1, 3)), table(0)).samples
    assert loss.weights is not None
    np.testing.assert_allclose(loss.weights.numpy(), EXPECTED[method][1:3].ravel(), rtol=1e-12)
    assert loss.normalizer == VALID.sum()
    assert loss.active.tolist() == (EXPECTED[method] != 0).ravel().tolist()


@pytest.mark.parametrize("method", list(EXPECTED))
def test_loss_and_gradient_after_a_step(method: str) -> None:
    """−Σ w log π, where π is no longer q: ``reinforce`` multiplies w by π/q, the others do not; w is a constant."""
    policy, rows = table(0), [2 * M + 3, 4, 0, 1, 4 * M + 2, M + 3]
    made = make(method)
    sample_loss = made.epoch_loss(made.begin(), epoch(), policy).samples
    drawn = [x for row in completions() for x in row]
    log_pi = scored(policy, completions()).sum(axis=2).ravel()
    log_q = scored(table(1), completions()).sum(axis=2).ravel()
    weight = EXPECTED[method].ravel() * (np.exp(log_pi - log_q) if method == "reinforce" else 1.0)
    divisor = 7.0
    loss = accumulate(policy, sample_loss, epoch(), torch.tensor(rows), divisor, tokens_per_pass=9)
    assert loss == pytest.approx(-(weight * log_pi)[rows].sum() / divisor, rel=1e-12)
    expected = -sum(weight[row] * log_prob_gradient(policy, row // M, drawn[row]) for row in rows) / divisor
    np.testing.assert_allclose(policy.table.grad.numpy(), expected, rtol=1e-9, atol=1e-14)


def test_the_running_mean_of_dpg() -> None:
    """Z̄ is over the valid samples of all epochs so far, this one included."""
    method, first, second = make("dpg"), ratios(0), ratios(1)
    one = method.epoch_loss(method.begin(), epoch(0), table(0))
    assert one.metrics == {"z_running": pytest.approx(first.sum() / VALID.sum(), rel=1e-12)}
    z = (first.sum() + second.sum()) / (2 * VALID.sum())
    read = json.loads(json.dumps(one.state))
    for state in (one.state, read):  # a resumed run goes on as the other does
        np.testing.assert_allclose(weights(make("dpg"), epoch(1), state), second / (z + EPSILON), rtol=1e-12)
        two = make("dpg").epoch_loss(state, epoch(1), table(0))
        assert two.metrics == {"z_running": pytest.approx(z, rel=1e-12)}


def test_an_infinite_ratio_does_not_spoil_the_running_mean() -> None:
    method, spoilt = make("dpg"), epoch(0)
    spoilt.log_a[0, 0] = math.inf
    state = method.epoch_loss(method.begin(), spoilt, table(0)).state
    assert state == {"ratio_sum": 0.0, "count": 0}
    np.testing.assert_allclose(weights(method, epoch(), state), EXPECTED["dpg"], rtol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_changes_nothing(name: str) -> None:
    """The same state and samples give the same loss, state and metrics, however often they are asked for."""
    method = make_method(CDPGConfig(method=name))
    state, policy = method.begin(), table(0)
    before, module = dict(state), method.make_module(policy)
    first, second = (method.epoch_loss(state, epoch(), policy, module) for _ in range(2))
    assert dict(state) == before
    assert (first.state, first.metrics) == (second.state, second.metrics)
    losses = [accumulate(policy, found.samples, epoch(), torch.arange(N * M), 1.0, 50) for found in (first, second)]
    assert losses[0] == losses[1]


def test_the_log_partition_of_an_epoch() -> None:
    found = epoch().log_z.numpy()
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(found[[0, 1, 2, 4]], np.log(partition(ratios()))[[0, 1, 2, 4]], rtol=1e-12)
    assert np.isneginf(found[2])


def test_a_method_is_made_by_its_name() -> None:
    for name, kind in (("cdpg", CDPG), ("dpg", DPG), ("reinforce", Reinforce), ("ziegler", Ziegler)):
        method = make_method(CDPGConfig(method=name, ziegler_epochs=3))
        assert type(method) is kind
        assert method.passes == (3 if name == "ziegler" else 1)
        assert method.scores_every_sample == (name == "ziegler")
        assert (method.make_module(table(0)) is not None) == (name == "ziegler")


def test_labels_and_optima_are_those_of_known_methods() -> None:
    assert [label_of(name) for name in ("cdpg", "cdpg-paper", "no-such")] == ["cdpg", "cdpg (paper)", "no-such"]
    assert [targets_p(name) for name in ("cdpg", "reinforce", "no-such")] == [True, False, False]


def test_a_method_that_does_not_replay_says_so() -> None:
    with pytest.raises(TypeError, match=r"^ziegler does not replay$"):
        make_method(CDPGConfig(method="ziegler")).replay_loss(epoch(), {})


@pytest.mark.parametrize(
    ("kind", "name", "accepted", "refused"),
    [
        (CDPGSettings, "replay", 0, -1),
        (CDPGSettings, "replay_samples", 1, 0),
        (CDPGSettings, "alpha", 0.001, 0.0),
        (CDPGSettings, "alpha", 0.999, 1.0),
        (ZieglerSettings, "ziegler_horizon", 1, 0),
        (ZieglerSettings, "ziegler_epochs", 1, 0),
        (ZieglerSettings, "ziegler_beta", 0.0, -0.1),
        (ZieglerSettings, "ziegler_value_weight", 0.0, math.inf),
        (ZieglerSettings, "ziegler_target_kl", 0.001, 0.0),
        (ZieglerSettings, "ziegler_clip", 0.001, 0.0),
        (ZieglerSettings, "ziegler_gae_lambda", 1.0, 1.1),
    ],
)
def test_settings_are_refused_from_their_bound_on(
    kind: type[CDPGSettings] | type[ZieglerSettings], name: str, accepted: float, refused: float
) -> None:
    assert list(kind(**{name: accepted}).problems()) == []
    (problem,) = kind(**{name: refused}).problems()
    assert problem.startswith(f"{name} must ")


def test_what_cdpg_keeps_from_epoch_to_epoch() -> None:
    batch, pooled = (make_method(CDPGConfig(partition=kind)) for kind in ("batch", "pooled"))
    assert isinstance(batch, CDPG) and isinstance(pooled, CDPG)
    assert batch.begin() == {"satisfying": 0.0}
    assert pooled.begin() == {"satisfying": 0.0, "pool": PooledPartition().to_mapping(), "prior": None}
    assert batch.advance(batch.begin(), epoch())["satisfying"] == (B[VALID] > 0).mean()
    one = np.zeros_like(VALID)
    one[0, 0] = True
    assert batch.advance(batch.begin(), uneven_epoch(table(1), table(2), valid=one))["satisfying"] == 1
    assert [batch.subtracts_control_variate({"satisfying": share}) for share in (OFTEN, 0.99 * OFTEN)] == [True, False]
    assert not batch.subtracts_control_variate({}), "the state of a run before the share was kept"


def test_the_strength_of_the_prior_is_logged() -> None:
    method = make_method(CDPGConfig(partition="pooled"))
    assert isinstance(method, CDPG)
    assert method.metrics({"prior": {"mean": 0.5, "strength": 2.5}}) == {"prior_strength": 2.5}
    for unknown in ({}, {"prior": None}, {"prior": {"mean": 0.5, "strength": None}}):
        assert method.metrics(unknown) == {}


def test_the_running_mean_of_no_samples() -> None:
    assert [running_mean({"ratio_sum": total, "count": count}) for total, count in ((0.0, 0), (3.0, 2))] == [0.0, 1.5]


def test_rft_weighs_rewards_of_any_scale() -> None:
    noise = np.random.default_rng(0).normal(size=(N, M))
    reward = torch.from_numpy(noise + np.array([[0.0], [2000.0], [-2000.0], [0.0], [900.0]]))[..., None]
    found = weights(make("rft"), replace(epoch(), features=reward, coefficients=(1.0,), factor_names=("reward",)))
    tilted = np.where(VALID, B * np.exp(noise), 0.0)
    covered = tilted.sum(axis=1) > 0
    expected = tilted[covered] / tilted[covered].sum(axis=1, keepdims=True) * VALID.sum() / covered.sum()
    np.testing.assert_allclose(found[covered], expected, rtol=1e-10)
    assert not found[~covered].any()


def test_other_divergences_subtract_a_baseline_where_samples_often_satisfy() -> None:
    """A baseline gives every valid sample a gradient; without it those with b = 0 have none."""
    method = make_method(CDPGConfig(divergence="js"))
    often, rarely = ({**method.begin(), "satisfying": share} for share in (OFTEN, 0.0))
    satisfying = ((B > 0) & VALID).ravel().tolist()

    def active(state: State) -> list[bool]:
        found: list[bool] = method.epoch_loss(state, epoch(), table(0)).samples.active.tolist()
        return found

    assert active(often) == VALID.ravel().tolist()
    assert active(rarely) == satisfying
    assert method.replay_loss(epoch(), often).active.tolist() == satisfying, "never where samples are replayed"


def test_a_new_target_leaves_the_share_of_satisfying_samples() -> None:
    for partition in ("batch", "pooled"):
        method = make_method(CDPGConfig(partition=partition))
        after = method.epoch_loss(method.begin(), replace(epoch(), indices=tuple(range(N))), table(0)).state
        assert after["satisfying"] > 0
        assert method.retargeted(after) == {**method.begin(), "satisfying": after["satisfying"]}
