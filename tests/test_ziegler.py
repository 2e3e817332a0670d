"""PPO: every piece against values worked out by hand, and the whole against its traps."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cdpg import CDPGConfig
from cdpg.methods import EpochLoss
from cdpg.methods.base import of_one_process
from cdpg.methods.ziegler import (
    Ziegler,
    adapted_beta,
    advantages,
    clipped_policy_loss,
    clipped_value_loss,
    old_values,
    token_rewards,
    whiten,
)
from cdpg.models.base import LanguageModel
from cdpg.models.rng import UniformStream
from cdpg.models.scoring import score_samples
from cdpg.models.tabular import TabularModel
from cdpg.rollout.rollout import Rollout
from cdpg.storage.snapshot import Trainable
from cdpg.training.optimization import Updater, accumulate
from enumeration import Universe, contexts_of, flat_gradient, four_token_transformer, relative_error, tabular
from uneven import VALID, Array, B, M, N, completions, log_prob_gradient, prefixes, scored, table, uneven_epoch


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


def make_epoch(policy: LanguageModel, base: LanguageModel) -> tuple[Universe, Rollout]:
    universe = Universe.of(policy, contexts_of(3))
    token_log_q = score_samples(policy, universe.samples, universe.rows, 500)
    token_log_a = score_samples(base, universe.samples, universe.rows, 500)
    samples = universe.samples.with_log_q(token_log_q)
    universe = Universe(samples)
    b = universe.satisfied(lambda prompt, text: "a" in text)
    epoch = Rollout(
        number=1, b=b, valid=torch.ones_like(b, dtype=torch.bool), failed=torch.zeros_like(b, dtype=torch.bool),
        log_q=samples.log_q, log_a=token_log_a.sum(dim=2),
        lengths=samples.lengths, samples=samples, token_log_a=token_log_a, first_context=0,
    )  # fmt: skip
    return universe, epoch


class Run:
    """Epoch after epoch of one run, each from the state that the one before has left."""

    def __init__(self, config: CDPGConfig, policy: LanguageModel) -> None:
        self.method = Ziegler(config)
        self.value_head, self.state = self.method.make_module(policy), self.method.begin()

    def epoch(self, rollout: Rollout, policy: LanguageModel, total: Any = of_one_process) -> EpochLoss:
        found = self.method.epoch_loss(self.state, rollout, policy, self.value_head, total)
        self.state = found.state
        return found


@pytest.mark.parametrize("kind", ["tabular", "llama"])
def test_first_gradient_is_the_policy_gradient_with_whitened_advantages(kind: str) -> None:
    """At the first step the ratio is 1: ∇ = −mean_t A_t ∇log π_t, plus the value head's part."""
    policy = tabular(1) if kind == "tabular" else four_token_transformer(kind, 1)
    base = tabular(2) if kind == "tabular" else four_token_transformer(kind, 2)
    config = CDPGConfig(method="ziegler", ziegler_value_weight=0.0)
    universe, epoch = make_epoch(policy, base)
    loss = Run(config, policy).epoch(epoch, policy).samples
    policy.module.zero_grad(set_to_none=True)
    accumulate(policy, loss, epoch, universe.rows, loss.normalizer, tokens_per_pass=100)
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
        found = Run(config, policy).epoch(epoch, policy).metrics["kl_policy_base"]
        assert math.isclose(found, float((epoch.log_q - epoch.log_a).mean()))
        assert (abs(found) < 1e-12) == (expected == 0.0)


def test_the_value_head_learns_the_return() -> None:
    policy = tabular(1)
    universe, epoch = make_epoch(policy, policy)
    run = Run(CDPGConfig(method="ziegler"), policy)
    loss = run.epoch(epoch, policy).samples
    accumulate(policy, loss, epoch, universe.rows, loss.normalizer, tokens_per_pass=100)
    assert run.value_head.bias.grad is not None
    assert float(run.value_head.bias.grad) < 0, "rewards are positive, so the estimate must rise from 0"


def test_beta_is_carried_over() -> None:
    policy = tabular(1)
    _, epoch = make_epoch(policy, tabular(2))
    run = Run(CDPGConfig(method="ziegler"), policy)
    first, second = (run.epoch(epoch, policy) for _ in range(2))
    assert first.state["beta"] != 0.2
    assert second.metrics["beta"] == first.state["beta"]


SETTINGS: dict[str, Any] = {
    "method": "ziegler", "ziegler_beta": 0.3, "ziegler_gae_lambda": 0.8, "ziegler_clip": 0.15,
    "ziegler_value_weight": 0.7, "ziegler_target_kl": 1.5, "ziegler_horizon": 200, "ziegler_epochs": 3,
    "tokens_per_pass": 11, "contexts_per_epoch": N, "num_generations": M,
}  # fmt: skip
"""No setting has its default, so that one that is ignored shows."""


class PlainPPO:
    """PPO with a value head on a table's rows of logits, in NumPy, token by token."""

    def __init__(self, seed: int = 0, beta: float = 0.3) -> None:
        drawn = completions(seed)
        self.tokens = [x for row in drawn for x in row]
        self.valid = VALID.ravel()
        log_q, log_a = (scored(table(i), drawn).reshape(N * M, -1) for i in (1, 2))
        self.log_q, self.rewards = log_q, -beta * (log_q - log_a)
        for row, tokens in enumerate(self.tokens):
            self.rewards[row, len(tokens) - 1] += B.ravel()[row]

    def sampled(self, policy: TabularModel, head: Array, bias: float) -> None:
        """Fix advantages and returns by the value estimates before the first step."""
        self.old = np.zeros_like(self.rewards)
        self.advantage, self.returns = np.zeros_like(self.rewards), np.zeros_like(self.rewards)
        for row, tokens in enumerate(self.tokens):
            self.old[row, : len(tokens)] = [value for value, _ in self.values(policy, head, bias, row)]
            following = next_value = 0.0
            for t in reversed(range(len(tokens))):
                following = self.rewards[row, t] + next_value - self.old[row, t] + 0.8 * following
                next_value = self.old[row, t]
                self.advantage[row, t], self.returns[row, t] = following, following + self.old[row, t]
        counted = self.counted(range(N * M))
        mean, deviation = np.mean(counted), np.sqrt(np.var(counted) + 1e-8)
        self.advantage = (self.advantage - mean) / deviation

    def counted(self, rows: Sequence[int]) -> list[float]:
        """Advantages of the tokens of some rows whose check succeeded."""
        return [self.advantage[row, t] for row in rows if self.valid[row] for t in range(len(self.tokens[row]))]

    def values(self, policy: TabularModel, head: Array, bias: float, row: int) -> list[tuple[float, Array]]:
        """V at each token of a row, and the state it is read from."""
        states = [policy.table[row // M, prefix].detach().numpy() for prefix in prefixes(self.tokens[row])]
        return [(float(head @ state + bias), state) for state in states]

    def gradient(
        self, policy: TabularModel, head: Array, bias: float, rows: Sequence[int], divisor: float
    ) -> tuple[float, Array, Array, float]:
        """The loss of some rows, and its gradient with respect to the table, the head and the bias."""
        loss, of_table, of_head, of_bias = 0.0, np.zeros(policy.table.shape), np.zeros_like(head), 0.0
        log_pi = scored(policy, [self.tokens[i * M : (i + 1) * M] for i in range(N)]).reshape(N * M, -1)
        for row in rows:
            if not self.valid[row]:
                continue
            tokens, values = self.tokens[row], self.values(policy, head, bias, row)
            for t, (value, state) in enumerate(values):
                ratio, advantage = np.exp(log_pi[row, t] - self.log_q[row, t]), self.advantage[row, t]
                plain, clipped = -advantage * ratio, -advantage * np.clip(ratio, 0.85, 1.15)
                loss += max(plain, clipped)
                if plain >= clipped:
                    before = log_prob_gradient(policy, row // M, tokens[:t]) if t else 0.0
                    of_table += plain * (log_prob_gradient(policy, row // M, tokens[: t + 1]) - before)
                old, returns = self.old[row, t], self.returns[row, t]
                near = old + np.clip(value - old, -0.15, 0.15)
                loss += 0.7 * 0.5 * max((value - returns) ** 2, (near - returns) ** 2)
                if (value - returns) ** 2 >= (near - returns) ** 2:
                    slope = 0.7 * (value - returns)
                    of_head, of_bias = of_head + slope * state, of_bias + slope
                    of_table[row // M, prefixes(tokens)[t]] += slope * head
        return loss / divisor, of_table / divisor, of_head / divisor, of_bias / divisor


def set_head(run: Run, head: Array, bias: float) -> None:
    with torch.no_grad():
        run.value_head.weight.copy_(torch.from_numpy(head)[None])
        run.value_head.bias.fill_(bias)


HEAD, BIAS = np.array([0.2, -0.1, 0.3, 0.15]), 0.25
LATER_HEAD, LATER_BIAS = np.array([0.1, 0.05, 0.2, 0.25]), 0.1
TOKENS = sum(len(completions()[i][j]) for i, j in np.argwhere(VALID))


def test_loss_and_gradient_after_a_step() -> None:
    """π ≠ q, the value head is not 0 and has moved: ratio, clipping, returns and both losses, by value."""
    policy, later = table(0), table(5)
    run, plain = Run(CDPGConfig(**SETTINGS), policy), PlainPPO()
    set_head(run, HEAD, BIAS)
    plain.sampled(policy, HEAD, BIAS)
    epoch = uneven_epoch(table(1), table(2))
    sample_loss = run.epoch(epoch, policy).samples
    assert sample_loss.normalizer == TOKENS
    assert sample_loss.active.tolist() == VALID.ravel().tolist()
    set_head(run, LATER_HEAD, LATER_BIAS)
    rows = [19, 3, 2, 0, 5, 16, 9, 12, 7]
    assert not VALID.ravel()[rows].all()
    loss = accumulate(later, sample_loss, epoch, torch.tensor(rows), 3.0, tokens_per_pass=11)
    expected, of_table, of_head, of_bias = plain.gradient(later, LATER_HEAD, LATER_BIAS, rows, 3.0)
    assert loss == pytest.approx(expected, rel=1e-9)
    assert later.table.grad is not None
    np.testing.assert_allclose(later.table.grad.numpy(), of_table, rtol=1e-8, atol=1e-12)
    weight, bias = run.value_head.weight.grad, run.value_head.bias.grad
    assert weight is not None
    assert bias is not None
    np.testing.assert_allclose(weight[0].numpy(), of_head, rtol=1e-8)
    assert float(bias) == pytest.approx(of_bias, rel=1e-8)


def test_the_value_head_starts_at_0() -> None:
    value_head = Ziegler(CDPGConfig(**SETTINGS)).make_module(table(0))
    assert not value_head.weight.any()
    assert not value_head.bias.any()


def test_a_whole_update() -> None:
    """Three passes over ragged batches, with plain gradient descent: the table and the value head it ends with."""
    policy = table(0)
    config = CDPGConfig(**SETTINGS, batch_size=6, learning_rate=0.3, warmup_epochs=0, seed=3)
    method = Ziegler(config)
    value_head = method.make_module(policy)
    parameters = list(Trainable(policy.module, value_head, torch.optim.SGD([policy.table])).named_parameters().values())
    optimizer = torch.optim.SGD(parameters, lr=99.0)
    updater = Updater(policy, method, value_head, optimizer, parameters, config, Alone())
    summary = updater.update(uneven_epoch(table(1), table(2)), method.begin())

    plain, model, head, bias, steps = PlainPPO(), table(0), np.zeros(4), 0.0, 0
    plain.sampled(model, head, bias)
    for number in range(3):
        order = UniformStream(3, f"shuffle-{number}", 1).permutation(N * M)
        for rows in (order[:6], order[6:12], order[12:18], order[18:]):
            if VALID.ravel()[rows].any():
                steps += 1
                _, of_table, of_head, of_bias = plain.gradient(model, head, bias, rows.tolist(), TOKENS * 6 / 20)
                with torch.no_grad():
                    model.table -= 0.3 * torch.from_numpy(of_table)
                head, bias = head - 0.3 * of_head, bias - 0.3 * of_bias
    assert summary.steps == steps
    np.testing.assert_allclose(policy.table.detach().numpy(), model.table.detach().numpy(), rtol=1e-8)
    np.testing.assert_allclose(value_head.weight[0].detach().numpy(), head, rtol=1e-8)
    assert float(value_head.bias.detach()) == pytest.approx(bias, rel=1e-8)


class Alone:
    """One process."""

    def total(self, tensor: Tensor) -> Tensor:
        return tensor

    def sum_gradients(self, parameters: Any) -> None:
        """There is nothing to add."""


def test_advantages_are_whitened_over_all_processes() -> None:
    """One of two processes, which has the last three contexts; sums of the other's tokens are sent to it."""
    policy, run, plain = table(0), Run(CDPGConfig(**SETTINGS), table(0)), PlainPPO()
    set_head(run, HEAD, BIAS)
    plain.sampled(policy, HEAD, BIAS)
    whole = [plain.returns[row, t] - plain.old[row, t] for row in range(2 * M) if plain.valid[row]
             for t in range(len(plain.tokens[row]))]  # fmt: skip
    others = torch.tensor([float(len(whole)), sum(whole), sum(x * x for x in whole)], dtype=torch.float64)
    epoch = uneven_epoch(table(1), table(2), share=range(2, N))
    sample_loss = run.epoch(epoch, policy, lambda own: own + others).samples
    assert sample_loss.normalizer == TOKENS
    loss = accumulate(policy, sample_loss, epoch, torch.arange(3 * M), 1.0, tokens_per_pass=50)
    expected, *_ = plain.gradient(policy, HEAD, BIAS, range(2 * M, N * M), 1.0)
    assert loss == pytest.approx(expected, rel=1e-9)


def test_beta_follows_the_kl_of_the_samples_whose_check_succeeded() -> None:
    """The β logged is the one that the rewards were paid with; the next follows from the KL."""
    policy, run = table(0), Run(CDPGConfig(**SETTINGS), table(0))
    betas, used = [0.3], []
    for seed in (0, 1):
        drawn = completions(seed)
        gap = scored(table(1), drawn).sum(axis=2) - scored(table(2), drawn).sum(axis=2)
        kl = gap[VALID].mean()
        found = run.epoch(uneven_epoch(table(1), table(2), seed=seed), policy)
        plain = PlainPPO(seed, betas[-1])
        plain.sampled(policy, np.zeros(4), 0.0)
        epoch = uneven_epoch(table(1), table(2), seed=seed)
        loss = accumulate(policy, found.samples, epoch, torch.arange(N * M), 1.0, 50)
        used.append(plain.gradient(policy, np.zeros(4), 0.0, range(N * M), 1.0)[0])
        assert loss == pytest.approx(used[-1], rel=1e-9)
        assert found.metrics == {"beta": pytest.approx(betas[-1]), "kl_policy_base": pytest.approx(kl)}
        assert abs(kl / 1.5 - 1) > 0.2, "the error is clipped"
        betas.append(betas[-1] * (1 + math.copysign(0.2, kl / 1.5 - 1) * VALID.sum() / 200))
        assert found.state == {"beta": pytest.approx(betas[-1], rel=1e-12)}


def test_the_target_of_the_kl_counts() -> None:
    drawn = completions()
    kl = float((scored(table(1), drawn).sum(axis=2) - scored(table(2), drawn).sum(axis=2))[VALID].mean())
    run = Run(CDPGConfig(**(SETTINGS | {"ziegler_target_kl": kl / 1.1})), table(0))
    found = run.epoch(uneven_epoch(table(1), table(2)), table(0))
    assert found.state["beta"] == pytest.approx(0.3 * (1 + 0.1 * VALID.sum() / 200), rel=1e-9)


def test_a_kl_that_is_not_finite_leaves_beta_unchanged() -> None:
    run, epoch = Run(CDPGConfig(**SETTINGS), table(0)), uneven_epoch(table(1), table(2))
    epoch.log_a[0, 0] = math.nan
    found = run.epoch(epoch, table(0))
    assert found.state["beta"] == found.metrics["beta"] == 0.3


def test_values_beyond_the_end_are_0() -> None:
    run, epoch = Run(CDPGConfig(**SETTINGS), table(0)), uneven_epoch(table(1), table(2))
    set_head(run, HEAD, BIAS)
    plain = PlainPPO()
    plain.sampled(table(0), HEAD, BIAS)
    np.testing.assert_allclose(
        old_values(run.value_head, epoch, table(0), tokens_per_pass=11).numpy(), plain.old, rtol=1e-12
    )
