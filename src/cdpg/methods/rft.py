"""Rejection-sampling fine-tuning: the log-likelihood of the base's satisfying samples, in several passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdpg.config import MethodSettings
from cdpg.methods.base import State, Style, WeightedMethod, register
from cdpg.values import too_small

if TYPE_CHECKING:
    from torch import Tensor

    from cdpg.rollout.rollout import Rollout


@dataclass(frozen=True)
class RFTSettings(MethodSettings):
    """The settings of rejection-sampling fine-tuning."""

    rft_passes: int = 4
    """Passes of ``rft`` over each epoch's samples, shuffled anew each time."""

    def problems(self) -> Iterator[str]:
        return too_small(self, {"rft_passes": 1})


def likelihood_weights(rollout: Rollout) -> Tensor:
    """w = b(x,c) / Σ_j b(x_j,c), scaled so that the epoch's loss is a mean over contexts; ``[context, sample]``.

    A loss divides by the number V of valid samples. The factor V/C, with C the number of contexts that have a
    satisfying sample, makes of it ``−mean_c Σ_j b_j log π(x_j|c) / Σ_j b_j``, the mean over these C contexts. Moments
    and rewards multiply b; the weights are then importance weights of the base's samples, normalised to sum to 1.
    """
    b = rollout.b.where(rollout.valid, rollout.b.new_zeros(()))
    if rollout.log_tilt is not None:
        log_w = b.log() + rollout.log_tilt
        b = (log_w - log_w.amax(dim=1, keepdim=True).clamp(min=-1e300)).exp()
    total = b.sum(dim=1, keepdim=True)
    covered = total > 0
    scale = int(rollout.valid.sum()) / max(1, int(covered.sum()))
    return b / total.where(covered, total.new_ones(())) * scale


@register
class RFT(WeightedMethod):
    """w = b(x,c) / Σ_j b(x_j,c) with x ~ a: maximum likelihood on what passes a filter.

    The satisfying samples of the base are exact samples of p_c, so that no importance weight is needed, however far the
    policy has moved. Contexts with a satisfying sample count equally: with binary b the expected gradient of each is
    the exact one of CE(p_c, π), times the chance that the context has a satisfying sample at all.
    """

    name = label = "rft"
    description = "rejection-sampling fine-tuning on the satisfying samples of the base"
    style = Style("#c8466e", "#dc5064", "*", (6.0, 1.2, 1.5, 1.2))
    Settings = RFTSettings
    targets_p = True
    proposal = "base"

    @property
    def passes(self) -> int:
        return self.config.settings_of(RFTSettings).rft_passes

    def weights(self, rollout: Rollout, state: State) -> Tensor:
        return likelihood_weights(rollout)
