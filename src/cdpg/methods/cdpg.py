"""Conditional Distributional Policy Gradients: each context is normalised by its own partition estimate."""

from __future__ import annotations

from torch import Tensor

from cdpg.methods.base import WeightedObjective
from cdpg.rollout.rollout import Rollout
from cdpg.target import partition


class CDPG(WeightedObjective):
    """w = P_c(x) / ((Ẑ_c + ε) q(x|c)), Algorithm 1 of the paper.

    With the exact Z_c the gradient is unbiased; with Ẑ_c from the same M samples its expectation at q = a is
    κ_c = 1 − (1 − Z_c)^M times the true gradient of the context.
    """

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon

    def weights(self, rollout: Rollout) -> Tensor:
        return partition.weights(rollout.log_ratio, rollout.log_z, self.epsilon)
