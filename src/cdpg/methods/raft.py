"""Reward-ranked fine-tuning (Dong et al., 2023): the log-likelihood of the policy's own satisfying samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdpg.config import MethodSettings
from cdpg.methods.base import State, Style, WeightedMethod, register
from cdpg.methods.rft import likelihood_weights
from cdpg.values import too_small

if TYPE_CHECKING:
    from torch import Tensor

    from cdpg.rollout.rollout import Rollout


@dataclass(frozen=True)
class RAFTSettings(MethodSettings):
    """The settings of reward-ranked fine-tuning."""

    raft_passes: int = 4
    """Passes of ``raft`` over each epoch's samples, shuffled anew each time."""

    def problems(self) -> Iterator[str]:
        return too_small(self, {"raft_passes": 1})


@register
class RAFT(WeightedMethod):
    """w = b(x,c) / Σ_j b(x_j,c) with x ~ q, the policy at the start of the epoch, and no importance weights.

    The loss of a context is CE(q_b, π), with q_b ∝ q·b. At π = q its gradient is that of −log E_π[b]: every policy that
    always satisfies is an optimum, whatever else it does.
    """

    name = label = "raft"
    description = "reward-ranked fine-tuning on the satisfying samples of the policy"
    style = Style("#503c00", "#fad200", ">", (1.5, 1.0))
    Settings = RAFTSettings

    @property
    def passes(self) -> int:
        return self.config.settings_of(RAFTSettings).raft_passes

    def weights(self, rollout: Rollout, state: State) -> Tensor:
        return likelihood_weights(rollout)
