"""Plain reward maximisation, without a baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdpg.methods.base import State, Style, WeightedMethod, register

if TYPE_CHECKING:
    from torch import Tensor

    from cdpg.rollout.rollout import Rollout


@register
class Reinforce(WeightedMethod):
    """w = b(x,c); the factor π/q, detached, keeps it right after the first step on an epoch's samples."""

    name = label = "reinforce"
    description = "Reinforce, which maximises the constraint alone"
    style = Style("#075a38", "#43e5ae", "^", (3.0, 1.2, 1.0, 1.2))
    follows_policy = True

    def weights(self, rollout: Rollout, state: State) -> Tensor:
        return rollout.b.where(rollout.valid, rollout.b.new_zeros(()))
