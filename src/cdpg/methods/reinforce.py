"""Plain reward maximisation, without a baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdpg.methods.base import State, WeightedMethod

if TYPE_CHECKING:
    from torch import Tensor

    from cdpg.rollout.rollout import Rollout


class Reinforce(WeightedMethod):
    """w = b(x,c); the factor π/q, detached, keeps it right after the first step on an epoch's samples."""

    follows_policy = True

    def weights(self, rollout: Rollout, state: State) -> Tensor:
        return rollout.b.where(rollout.valid, rollout.b.new_zeros(()))
