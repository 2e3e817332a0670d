"""Plain reward maximisation, without a baseline."""

from __future__ import annotations

from torch import Tensor

from cdpg.methods.base import Epoch, WeightedObjective


class Reinforce(WeightedObjective):
    """w = b(x,c); the factor π/q, detached, keeps it right after the first step on an epoch's samples."""

    follows_policy = True

    def weights(self, epoch: Epoch) -> Tensor:
        return epoch.b.where(epoch.valid, epoch.b.new_zeros(()))
