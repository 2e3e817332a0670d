"""REINFORCE with a leave-one-out baseline and a penalty on the distance from the base (RLOO; Ahmadian et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdpg.config import MethodSettings
from cdpg.methods.base import EpochLoss, Method, SampleLoss, State, Style, of_one_process, register
from cdpg.target.baseline import leave_one_out
from cdpg.values import negative_or_infinite

if TYPE_CHECKING:
    from torch import Tensor, nn

    from cdpg.methods.base import Total
    from cdpg.models.base import LanguageModel, TokenScores
    from cdpg.rollout.rollout import Rollout


@dataclass(frozen=True)
class RLOOSettings(MethodSettings):
    """The settings of RLOO."""

    rloo_beta: float = 0.1
    """β of ``rloo``: the weight of the penalty log(π/a), in nats, in a sample's reward. The optimum is a·exp(b/β),
    normalised."""

    def problems(self) -> Iterator[str]:
        return negative_or_infinite(self, "rloo_beta")


@register
class RLOO(Method):
    """Maximises E_π[b − β log(π/a)]: its optimum is a·exp(b/β), normalised; for a small β nearly p."""

    name = label = "rloo"
    description = "Reinforce with a leave-one-out baseline and a penalty on the distance from the base"
    style = Style("#7800fa", "#e6befa", "<", (4.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    Settings = RLOOSettings
    scores_every_sample = True

    def epoch_loss(
        self,
        state: State,
        rollout: Rollout,
        policy: LanguageModel,
        module: nn.Module | None = None,
        total: Total = of_one_process,
    ) -> EpochLoss:
        beta = self.config.settings_of(RLOOSettings).rloo_beta
        log_moved = rollout.log_q - rollout.log_a
        rewards = rollout.b - beta * log_moved
        advantages = (rewards - leave_one_out(rewards, rollout.valid)).where(rollout.valid, rewards.new_zeros(()))
        kl = float(log_moved[rollout.valid].mean())
        return EpochLoss(RLOOLoss(rollout, advantages, beta), state, metrics={"kl_policy_base": kl})


class RLOOLoss(SampleLoss):
    """−(π/q) (A − β log(π/q)) · log π for each sample, the factors before log π being constants.

    A holds the sample's reward and its baseline, both with q for π. What the sample's own reward changes by since then
    is β log(π/q). So the expected gradient is that of E_π[b − β log(π/a)] at every step on an epoch's samples, not at
    the first alone.
    """

    def __init__(self, rollout: Rollout, advantages: Tensor, beta: float) -> None:
        self.active = rollout.valid.flatten()
        self.normalizer = float(rollout.valid.sum())
        self.weights: Tensor = rollout.own(advantages)
        self._log_q, self._beta = rollout.own(rollout.log_q), beta

    def loss(self, rows: Tensor, scores: TokenScores) -> Tensor:
        log_policy = scores.log_prob()
        log_moved = log_policy.detach() - self._log_q[rows].to(log_policy)  # log π/q
        weights = log_moved.exp() * (self.weights[rows].to(log_policy) - self._beta * log_moved)
        return -(weights * log_policy).sum()
