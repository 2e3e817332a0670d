"""Plain reward maximisation, without a baseline."""

from __future__ import annotations

from torch import Tensor

from cdpg.methods.base import WeightedObjective
from cdpg.rollout.rollout import Rollout


class Reinforce(WeightedObjective):
    """w = b(x,c); the factor π/q, detached, keeps it right after the first step on an epoch's samples."""

    follows_policy = True

    def weights(self, rollout: Rollout) -> Tensor:
        return rollout.b.where(rollout.valid, rollout.b.new_zeros(()))
