"""What an objective is: it turns an epoch's samples into a loss for each, and knows nothing of the trainer.

Every method is one loop with a different coefficient, ``θ ← θ + α · w(x,c) · ∇log π(x|c)``. A new one of that kind is
a subclass of :class:`WeightedObjective` with one method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cdpg.models.base import LanguageModel, TokenScores
from cdpg.rollout.rollout import Rollout


class Credit(ABC):
    """What each sample of an epoch is worth, ready to be turned into losses."""

    active: Tensor
    """``[row]`` over all processes: whether the row has any gradient."""
    weights: Tensor | None = None
    """``[row]`` of this process: the coefficient of each sample; None where a sample has no single one."""
    units: float
    """What the epoch's summed loss is divided by to make it a mean: valid samples, or their tokens."""

    @abstractmethod
    def loss(self, rows: Tensor, scores: TokenScores) -> Tensor:
        """The summed loss of some of this process's rows."""


class Objective(ABC):
    """One way to spend an epoch's samples."""

    scores_every_sample = False
    """Whether the base must score the samples with b = 0 too."""
    passes = 1
    """How often each epoch's samples are gone through."""
    module: nn.Module | None = None
    """Parameters of its own, trained along with the policy's."""

    @abstractmethod
    def credit(self, rollout: Rollout, policy: LanguageModel) -> Credit:
        """Assign credit to the epoch's samples; called once an epoch."""

    def metrics(self) -> dict[str, float]:
        """What it wants logged for the epoch."""
        return {}

    def state(self) -> dict[str, float]:
        """What a resumed run needs, beside the parameters."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`."""


class WeightedObjective(Objective):
    """``−w(x,c) · log π(x|c)`` summed over samples, w a constant."""

    @abstractmethod
    def weights(self, rollout: Rollout) -> Tensor:
        """w, ``[context, sample]``; 0 means that the sample needs no gradient."""

    follows_policy = False
    """Whether w is owed to the policy of each step rather than to q: then it is multiplied by π/q."""

    def credit(self, rollout: Rollout, policy: LanguageModel) -> Credit:
        return WeightedCredit(rollout, self.weights(rollout), self.follows_policy)


class WeightedCredit(Credit):
    """Constant weights, with the factor π/q where the objective follows the policy."""

    def __init__(self, rollout: Rollout, weights: Tensor, follows_policy: bool) -> None:
        self.active = (weights != 0).flatten()
        self.units = float(rollout.valid.sum())
        self.weights: Tensor = rollout.own(weights.detach())
        self._log_q = rollout.own(rollout.log_q) if follows_policy else None

    def loss(self, rows: Tensor, scores: TokenScores) -> Tensor:
        """−Σ w · log π, no gradient through w."""
        log_policy = scores.log_prob()
        weights = self.weights[rows].to(log_policy)
        if self._log_q is not None:
            weights = weights * torch.exp(log_policy.detach() - self._log_q[rows].to(log_policy))
        return -(weights * log_policy).sum()
