"""The loss of a sample for divergences other than KL(p, π)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cdpg.errors import UserError
from cdpg.methods.base import SampleLoss
from cdpg.target.baseline import leave_one_out

if TYPE_CHECKING:
    from torch import Tensor

    from cdpg.models.base import TokenScores
    from cdpg.rollout.rollout import Rollout
    from cdpg.target.f_divergences import PseudoReward


def refuse_zeros(rollout: Rollout) -> None:
    """KL(π, p) is infinite as soon as the policy draws a sample with b = 0."""
    zeros = int(((rollout.b == 0) & rollout.valid).sum())
    if zeros:
        raise UserError(
            f"divergence: reverse_kl is KL(π, p), which is infinite if a sample has b = 0, and {zeros:,} of "
            f"{int(rollout.valid.sum()):,} samples have: use moments, rewards or a constraint that is never 0 (such "
            "as 0.01 for a failing output), or divergence: alpha with alpha: 0.9"
        )


def normalised(rollout: Rollout, log_z: Tensor) -> Tensor:
    """log P_c/Ẑ_c, ``[context, sample]``, −∞ where b = 0; ``log_z`` is ``[context]`` or ``[context, sample]``."""
    log_z = log_z[:, None] if log_z.dim() == 1 else log_z
    satisfying = rollout.log_ratio > -math.inf
    return (rollout.log_p - log_z).where(satisfying, rollout.log_q.new_full((), -math.inf))


def mean_of_others(rollout: Rollout, log_z: Tensor, reward: PseudoReward) -> Tensor:
    """The mean of r_f over the other samples of the context, at π = q, ``[context, sample]``."""
    return leave_one_out(reward(normalised(rollout, log_z) - rollout.log_q), rollout.valid)


class DivergenceLoss(SampleLoss):
    """−(π/q) (r_f(t) − B) · log π for each sample, the factors before log π being constants, t = P/(Ẑ_c π).

    π in t and in π/q is the policy of each step, so that the expected gradient is right after the first step, too. B
    must not depend on the sample; its expected gradient is then 0.
    """

    def __init__(self, rollout: Rollout, log_z: Tensor, reward: PseudoReward, baseline: Tensor | None = None) -> None:
        """``baseline`` is B, ``[context, sample]``.

        Without it B is r_f(0), with which samples that do not satisfy have no gradient.
        """
        log_p = normalised(rollout, log_z)
        self.active = (rollout.valid if baseline is not None else log_p > -math.inf).flatten()
        if baseline is None:
            baseline = reward(log_p.new_full((), -math.inf)).expand_as(log_p)
        self.normalizer = float(rollout.valid.sum())
        weights = reward(log_p - rollout.log_q) - baseline
        self.weights: Tensor = rollout.own(weights.where(rollout.valid, weights.new_zeros(())))
        self._log_p, self._log_q = rollout.own(log_p), rollout.own(rollout.log_q)
        self._baseline, self._reward = rollout.own(baseline), reward

    def loss(self, rows: Tensor, scores: TokenScores) -> Tensor:
        log_policy = scores.log_prob()
        fixed = log_policy.detach().double()
        moved = (fixed - self._log_q[rows].to(fixed)).exp()  # π/q
        weights = moved * (self._reward(self._log_p[rows].to(fixed) - fixed) - self._baseline[rows].to(fixed))
        return -(weights.to(log_policy) * log_policy).sum()
