"""What an objective is: it turns an epoch's samples into a loss for each, and knows nothing of the trainer.

Every method is one loop with a different coefficient, ``θ ← θ + α · w(x,c) · ∇log π(x|c)``. A new one of that kind is
a subclass of :class:`WeightedObjective` with one method.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from cdpg.target import partition
from cdpg.constraints.judge import CheckFailure
from cdpg.models.base import LanguageModel, TokenScores
from cdpg.models.sampling import Samples
from cdpg.target.target import log_target


@dataclass(frozen=True)
class Epoch:
    """All that is known of an epoch's samples before the gradient; float64 on the CPU.

    ``[context, sample]`` tensors cover the contexts of all processes, so that every decision is the same everywhere;
    ``samples`` and ``[context, sample, token]`` tensors are this process's own.
    """

    number: int
    b: Tensor
    """``[context, sample]``: the constraint's verdict in [0, 1]."""
    valid: Tensor
    """``[context, sample]``: false where there is no verdict, because the check failed or no constraint applies; such a
    sample counts nowhere."""
    failed: Tensor
    """``[context, sample]``: whether the check failed."""
    log_q: Tensor
    """``[context, sample]``: log-probability under the distribution the samples came from."""
    log_a: Tensor
    """``[context, sample]``: log-probability under the base; 0 where it was not needed."""
    lengths: Tensor
    """``[context, sample]``: tokens, the end token included."""
    samples: Samples
    token_log_a: Tensor
    """``[context, sample, token]``: the base's log-probabilities of this process's tokens."""
    first_context: int
    """Where this process's contexts start among all."""
    total: Callable[[Tensor], Tensor]
    """Sum of a tensor over all processes."""
    checks: Mapping[str, int] = field(default_factory=dict)
    """``failed_timeout`` and its like: samples whose check failed or, built-in, was exhausted, over all processes."""
    failures: Mapping[int, CheckFailure] = field(default_factory=dict)
    """Why a check failed, by this process's own rows."""

    @property
    def inapplicable(self) -> Tensor:
        """``[context, sample]``: whether no constraint applies."""
        return ~self.valid & ~self.failed

    @cached_property
    def log_ratio(self) -> Tensor:
        """log P_c(x)/q(x|c), ``[context, sample]``; −∞ where b = 0 or there is no verdict."""
        ratio = log_target(self.log_a, self.b) - self.log_q
        return ratio.masked_fill(~self.valid, -math.inf)

    @cached_property
    def log_z(self) -> Tensor:
        """log Ẑ_c, ``[context]``."""
        return partition.log_partition(self.log_ratio, self.valid)

    def own(self, tensor: Tensor) -> Tensor:
        """This process's rows of a ``[context, sample]`` tensor, flat."""
        first = self.first_context
        return tensor[first : first + len(self.samples.contexts)].flatten()


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
    def credit(self, epoch: Epoch, policy: LanguageModel) -> Credit:
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
    def weights(self, epoch: Epoch) -> Tensor:
        """w, ``[context, sample]``; 0 means that the sample needs no gradient."""

    follows_policy = False
    """Whether w is owed to the policy of each step rather than to q: then it is multiplied by π/q."""

    def credit(self, epoch: Epoch, policy: LanguageModel) -> Credit:
        return WeightedCredit(epoch, self.weights(epoch), self.follows_policy)


class WeightedCredit(Credit):
    """Constant weights, with the factor π/q where the objective follows the policy."""

    def __init__(self, epoch: Epoch, weights: Tensor, follows_policy: bool) -> None:
        self.active = (weights != 0).flatten()
        self.units = float(epoch.valid.sum())
        self.weights: Tensor = epoch.own(weights.detach())
        self._log_q = epoch.own(epoch.log_q) if follows_policy else None

    def loss(self, rows: Tensor, scores: TokenScores) -> Tensor:
        """−Σ w · log π, no gradient through w."""
        log_policy = scores.log_prob()
        weights = self.weights[rows].to(log_policy)
        if self._log_q is not None:
            weights = weights * torch.exp(log_policy.detach() - self._log_q[rows].to(log_policy))
        return -(weights * log_policy).sum()
