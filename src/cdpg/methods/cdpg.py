"""Conditional Distributional Policy Gradients: each context is normalised by its own partition estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdpg.methods.base import State, Style, WeightedMethod, register
from cdpg.target import partition

if TYPE_CHECKING:
    from torch import Tensor

    from cdpg.rollout.rollout import Rollout


@register
class CDPG(WeightedMethod):
    """w = P_c(x) / ((Ẑ_c + ε) q(x|c)), Algorithm 1 of the paper.

    With the exact Z_c the gradient is unbiased; with Ẑ_c from the same M samples its expectation at q = a is
    κ_c = 1 − (1 − Z_c)^M times the true gradient of the context.
    """

    name = label = "cdpg"
    description = "conditional distributional policy gradients"
    style = Style("#0b6fd8", "#5a97fa", "o")
    targets_p = True
    normalizes_per_context = True

    def weights(self, rollout: Rollout, state: State) -> Tensor:
        return partition.weights(rollout.log_ratio, rollout.log_z, self.config.partition_epsilon)
