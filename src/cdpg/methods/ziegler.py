"""PPO with a KL penalty to the base, after Ziegler et al. (2019).

Choices where the description leaves them open: a minibatch is ``batch_size`` samples (all of the epoch's by default);
advantages are whitened over the epoch's tokens, rewards are not; value estimates are clipped like the ratio; the value
head is a linear map of the policy's states that starts at 0 and shares the policy's trunk and learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from cdpg.config import MethodSettings
from cdpg.methods.base import EpochLoss, Method, SampleLoss, State, Style, of_one_process, register
from cdpg.values import negative_or_infinite, not_a_share, not_positive, too_small

if TYPE_CHECKING:
    from torch import Tensor, nn

    from cdpg.methods.base import Total
    from cdpg.models.base import LanguageModel, TokenScores
    from cdpg.rollout.rollout import Rollout

_LARGEST_ERROR = 0.2
"""β changes by at most this share of the samples over the horizon."""


@dataclass(frozen=True)
class ZieglerSettings(MethodSettings):
    """The settings of PPO."""

    ziegler_beta: float = 0.2
    """β at the start: the weight of the penalty KL(π, a), in nats."""
    ziegler_target_kl: float = 6.0
    """The KL(π, a), in nats, to which β is adapted."""
    ziegler_horizon: int = 10_000
    """Samples over which β adapts."""
    ziegler_epochs: int = 4
    """Passes over each epoch's samples."""
    ziegler_clip: float = 0.2
    """Clip range of the probability ratio, and of the change of the value estimate."""
    ziegler_value_weight: float = 0.1
    """Weight of the value loss."""
    ziegler_gae_lambda: float = 0.95
    """λ of the generalised advantage estimate (γ is 1)."""

    def problems(self) -> Iterator[str]:
        yield from too_small(self, {"ziegler_horizon": 1, "ziegler_epochs": 1})
        yield from negative_or_infinite(self, "ziegler_beta", "ziegler_value_weight")
        yield from not_positive(self, "ziegler_target_kl", "ziegler_clip")
        yield from not_a_share(self, "ziegler_gae_lambda")


def token_rewards(b: Tensor, log_q: Tensor, log_a: Tensor, lengths: Tensor, beta: float) -> Tensor:
    """−β (log q_t − log a_t) at every token, plus b at the last, ``[row, token]``."""
    rewards = -beta * (log_q - log_a)
    return rewards.scatter_add(1, lengths[:, None] - 1, b[:, None])


def advantages(rewards: Tensor, values: Tensor, mask: Tensor, decay: float) -> Tensor:
    """Generalised advantage estimates, γ = 1, ``[row, token]``: A_t = δ_t + λ A_{t+1}, δ_t = r_t + V_{t+1} − V_t."""
    result = rewards.new_zeros(rewards.shape)
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
    import torch

    count, first, second = total(torch.stack([mask.sum().to(values), (values * mask).sum(), (values**2 * mask).sum()]))
    mean = first / count
    variance = (second / count - mean**2).clamp(min=0.0)
    white: Tensor = (values - mean) * (variance + 1e-8).rsqrt() * mask
    return white


def clipped_policy_loss(log_ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """−min(r A, clip(r, 1 ± clip) A) for each token, r = π/q."""
    ratio = log_ratio.exp()
    return (-advantage * ratio).maximum(-advantage * ratio.clamp(1 - clip, 1 + clip))


def clipped_value_loss(value: Tensor, old_value: Tensor, returns: Tensor, clip: float) -> Tensor:
    """½ max((V − R)², (V_clipped − R)²) for each token, V_clipped within ``clip`` of the estimate at sampling time."""
    clipped = old_value + (value - old_value).clamp(-clip, clip)
    return 0.5 * ((value - returns) ** 2).maximum((clipped - returns) ** 2)


def adapted_beta(beta: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """β (1 + clip(KL/target − 1, ±0.2) · samples/horizon)."""
    error = min(max(kl / target - 1.0, -_LARGEST_ERROR), _LARGEST_ERROR)
    return beta * (1.0 + error * samples / horizon)


@register
class Ziegler(Method):
    """Reward b − β KL(π, a), with the KL penalty at each token and β adapted to a target KL."""

    name = label = "ziegler"
    description = "PPO with a penalty on the distance from the base"
    style = Style("#86368c", "#da79c6", "D", (2.0, 1.0))
    Settings = ZieglerSettings
    scores_every_sample = True

    @property
    def settings(self) -> ZieglerSettings:
        return self.config.settings_of(ZieglerSettings)

    @property
    def passes(self) -> int:
        return self.settings.ziegler_epochs

    def begin(self) -> State:
        return {"beta": self.settings.ziegler_beta}

    def make_module(self, policy: LanguageModel) -> nn.Linear:
        """The value head: estimates of the remaining reward, from the policy's hidden states."""
        from torch import nn

        parameter = next(policy.module.parameters())
        value_head = nn.Linear(policy.hidden_size, 1, device=parameter.device, dtype=parameter.dtype)
        nn.init.zeros_(value_head.weight)
        nn.init.zeros_(value_head.bias)
        return value_head

    def epoch_loss(
        self,
        state: State,
        rollout: Rollout,
        policy: LanguageModel,
        module: nn.Module | None = None,
        total: Total = of_one_process,
    ) -> EpochLoss:
        import torch

        beta, value_head = state["beta"], cast("nn.Linear", module)
        samples = rollout.samples
        lengths = samples.lengths.flatten()
        log_q, log_a = (tensor.flatten(0, 1) for tensor in (samples.token_log_q, rollout.token_log_a))
        mask = (torch.arange(log_q.shape[1]) < lengths[:, None]) & rollout.own(rollout.valid)[:, None]
        values = old_values(value_head, rollout, policy, self.config.tokens_per_pass)
        rewards = token_rewards(rollout.own(rollout.b), log_q, log_a, lengths, beta)
        advantage = advantages(rewards, values, mask, self.settings.ziegler_gae_lambda)
        white = whiten(advantage, mask, total)
        kl = float((rollout.log_q - rollout.log_a)[rollout.valid].mean())
        return EpochLoss(
            PPOLoss(self.settings, value_head, rollout, Tokens(log_q, values, advantage + values, white, mask)),
            state={"beta": self._next_beta(beta, kl, rollout)},
            metrics={"beta": beta, "kl_policy_base": kl},
        )

    def _next_beta(self, beta: float, kl: float, rollout: Rollout) -> float:
        if math.isnan(kl):
            return beta  # the epoch has no step, and must not change β
        samples = int(rollout.valid.sum())
        return adapted_beta(beta, kl, self.settings.ziegler_target_kl, samples, self.settings.ziegler_horizon)


def estimates(value_head: nn.Linear, hidden: Tensor) -> Tensor:
    """``[row, token]`` estimates of the remaining reward."""
    values: Tensor = value_head(hidden.to(value_head.weight.dtype))[..., 0]
    return values


def old_values(value_head: nn.Linear, rollout: Rollout, policy: LanguageModel, tokens_per_pass: int) -> Tensor:
    """``[row, token]``: the value head's estimates before the first step."""
    import torch

    from cdpg.models.scoring import plan_passes, prompts_and_rows

    samples = rollout.samples
    values = samples.token_log_q.new_zeros(samples.token_log_q.flatten(0, 1).shape)
    with torch.no_grad(), policy.in_step():
        for part in plan_passes(samples, torch.arange(len(values)), tokens_per_pass):
            scores = policy.score(*prompts_and_rows(samples, part))
            found = estimates(value_head, scores.hidden) * scores.mask
            values[part, : scores.mask.shape[1]] = found.to("cpu", torch.float64)
    return values


@dataclass(frozen=True)
class Tokens:
    """``[row, token]`` of this process, fixed for the epoch's passes."""

    log_q: Tensor
    values: Tensor
    """Estimates before the first step."""
    returns: Tensor
    advantage: Tensor
    """Whitened."""
    mask: Tensor
    """Whether the token counts: it is not padding, and its sample has a verdict."""


class PPOLoss(SampleLoss):
    """The clipped losses of the policy and of the value head, token by token."""

    def __init__(self, settings: ZieglerSettings, value_head: nn.Linear, rollout: Rollout, tokens: Tokens) -> None:
        self.active = rollout.valid.flatten()
        self.normalizer = float(rollout.lengths[rollout.valid].sum())
        self._settings, self._value_head, self._tokens = settings, value_head, tokens

    def loss(self, rows: Tensor, scores: TokenScores) -> Tensor:
        """Σ_t [policy loss + weight · value loss] over the tokens that count."""
        settings, tokens, log_probs = self._settings, self._tokens, scores.log_probs
        width = log_probs.shape[1]
        log_q, old_value, returns, advantage, mask = (
            tensor[rows, :width].to(log_probs)
            for tensor in (tokens.log_q, tokens.values, tokens.returns, tokens.advantage, tokens.mask)
        )
        policy = clipped_policy_loss(log_probs - log_q, advantage, settings.ziegler_clip)
        estimate = estimates(self._value_head, scores.hidden)
        value = clipped_value_loss(estimate, old_value, returns, settings.ziegler_clip)
        return ((policy + settings.ziegler_value_weight * value) * mask).sum()
