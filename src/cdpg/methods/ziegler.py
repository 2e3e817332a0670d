"""PPO with a KL penalty to the base, after Ziegler et al. (2019).

Choices where the description leaves them open: a minibatch is ``batch_size`` samples (all of the epoch's by default);
advantages are whitened over the epoch's tokens, rewards are not; value estimates are clipped like the ratio; the value
head is a linear map of the policy's states that starts at 0 and shares the policy's trunk and learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cdpg.config import CDPGConfig
from cdpg.methods.base import Credit, Objective
from cdpg.models.base import LanguageModel, TokenScores
from cdpg.models.scoring import plan_passes, prompts_and_rows
from cdpg.rollout.rollout import Rollout

_LARGEST_ERROR = 0.2
"""β changes by at most this share of the samples over the horizon."""


def token_rewards(b: Tensor, log_q: Tensor, log_a: Tensor, lengths: Tensor, beta: float) -> Tensor:
    """−β (log q_t − log a_t) at every token, plus b at the last, ``[row, token]``."""
    rewards = -beta * (log_q - log_a)
    return rewards.scatter_add(1, lengths[:, None] - 1, b[:, None])


def advantages(rewards: Tensor, values: Tensor, mask: Tensor, decay: float) -> Tensor:
    """Generalised advantage estimates, γ = 1, ``[row, token]``: A_t = δ_t + λ A_{t+1}, δ_t = r_t + V_{t+1} − V_t."""
    result = torch.zeros_like(rewards)
    values = values * mask
    following = next_value = rewards.new_zeros(len(rewards))
    for position in reversed(range(rewards.shape[1])):
        delta = rewards[:, position] + next_value - values[:, position]
        following = (delta + decay * following) * mask[:, position]
        next_value = values[:, position]
        result[:, position] = following
    return result


def whiten(values: Tensor, mask: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """Mean 0 and variance 1 over the tokens of all processes; 0 where the mask is false."""
    count, first, second = total(torch.stack([mask.sum().to(values), (values * mask).sum(), (values**2 * mask).sum()]))
    mean = first / count
    variance = (second / count - mean**2).clamp(min=0.0)
    white: Tensor = (values - mean) * (variance + 1e-8).rsqrt() * mask
    return white


def clipped_policy_loss(log_ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """−min(r A, clip(r, 1 ± clip) A) for each token, r = π/q."""
    ratio = log_ratio.exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))


def clipped_value_loss(value: Tensor, old_value: Tensor, returns: Tensor, clip: float) -> Tensor:
    """½ max((V − R)², (V_clipped − R)²) for each token, V_clipped within ``clip`` of the estimate at sampling time."""
    clipped = old_value + (value - old_value).clamp(-clip, clip)
    return 0.5 * torch.maximum((value - returns) ** 2, (clipped - returns) ** 2)


def adapted_beta(beta: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """β (1 + clip(KL/target − 1, ±0.2) · samples/horizon)."""
    error = min(max(kl / target - 1.0, -_LARGEST_ERROR), _LARGEST_ERROR)
    return beta * (1.0 + error * samples / horizon)


class Ziegler(Objective):
    """Reward b − β KL(π, a), the KL paid token by token, β adapted to a target KL."""

    scores_every_sample = True

    def __init__(self, config: CDPGConfig, policy: LanguageModel) -> None:
        self.config, self.passes, self.kl = config, config.ziegler_epochs, 0.0
        self.beta = self.beta_used = config.ziegler_beta
        parameter = next(policy.module.parameters())
        self.value_head = nn.Linear(policy.hidden_size, 1, device=parameter.device, dtype=parameter.dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.module = self.value_head

    def credit(self, rollout: Rollout, policy: LanguageModel) -> Credit:
        samples = rollout.samples
        lengths = samples.lengths.flatten()
        log_q, log_a = (tensor.flatten(0, 1) for tensor in (samples.token_log_q, rollout.token_log_a))
        mask = (torch.arange(log_q.shape[1]) < lengths[:, None]) & rollout.own(rollout.valid)[:, None]
        values = self._values(rollout, policy)
        rewards = token_rewards(rollout.own(rollout.b), log_q, log_a, lengths, self.beta)
        advantage = advantages(rewards, values, mask, self.config.ziegler_gae_lambda)
        credit = PPOCredit(
            self, rollout, log_q, values, advantage + values, whiten(advantage, mask, rollout.total), mask
        )
        self._adapt_beta(rollout)
        return credit

    def value(self, hidden: Tensor) -> Tensor:
        """``[row, token]`` estimates of the reward still to come."""
        values: Tensor = self.value_head(hidden.to(self.value_head.weight.dtype))[..., 0]
        return values

    @torch.no_grad()
    def _values(self, rollout: Rollout, policy: LanguageModel) -> Tensor:
        """``[row, token]``: the value head's estimates before the first step."""
        samples = rollout.samples
        values = samples.token_log_q.new_zeros(samples.token_log_q.flatten(0, 1).shape)
        for part in plan_passes(samples, torch.arange(len(values)), self.config.tokens_per_pass):
            scores = policy.score(*prompts_and_rows(samples, part))
            values[part, : scores.mask.shape[1]] = (self.value(scores.hidden) * scores.mask).to("cpu", torch.float64)
        return values

    def _adapt_beta(self, rollout: Rollout) -> None:
        self.beta_used = self.beta
        self.kl = float((rollout.log_q - rollout.log_a)[rollout.valid].mean())
        if math.isnan(self.kl):
            return  # the epoch gives no step, and must not spoil β for good
        samples = int(rollout.valid.sum())
        self.beta = adapted_beta(
            self.beta, self.kl, self.config.ziegler_target_kl, samples, self.config.ziegler_horizon
        )

    def metrics(self) -> dict[str, float]:
        return {"beta": self.beta_used, "kl_policy_base": self.kl}

    def state(self) -> dict[str, float]:
        return {"beta": self.beta}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.beta = float(state["beta"])


class PPOCredit(Credit):
    """Advantages and returns of every token, ``[row, token]``, fixed for the epoch's passes."""

    def __init__(
        self, objective: Ziegler, rollout: Rollout, log_q: Tensor, values: Tensor, returns: Tensor, advantage: Tensor,
        mask: Tensor,
    ) -> None:  # fmt: skip
        self.active = rollout.valid.flatten()
        self.units = float(rollout.lengths[rollout.valid].sum())
        self._objective = objective
        self._log_q, self._values, self._returns, self._advantage, self._mask = log_q, values, returns, advantage, mask

    def loss(self, rows: Tensor, scores: TokenScores) -> Tensor:
        """Σ_t [policy loss + weight · value loss] over the tokens that count."""
        config, log_probs = self._objective.config, scores.log_probs
        width = log_probs.shape[1]
        log_q, old_value, returns, advantage, mask = (
            tensor[rows, :width].to(log_probs)
            for tensor in (self._log_q, self._values, self._returns, self._advantage, self._mask)
        )
        policy = clipped_policy_loss(log_probs - log_q, advantage, config.ziegler_clip)
        value = clipped_value_loss(self._objective.value(scores.hidden), old_value, returns, config.ziegler_clip)
        return ((policy + config.ziegler_value_weight * value) * mask).sum()
