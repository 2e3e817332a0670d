"""Conditional Distributional Policy Gradients: each context is normalised by its own partition estimate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from cdpg.config import MethodSettings
from cdpg.methods.base import SampleLoss, State, Style, WeightedMethod, log_scale, register
from cdpg.methods.f_divergence import DivergenceLoss, mean_of_others, refuse_zeros
from cdpg.target import partition
from cdpg.target.f_divergences import Divergence, pseudo_reward
from cdpg.target.pooled import PooledPartition, Prior
from cdpg.values import too_small

if TYPE_CHECKING:
    from torch import Tensor

    from cdpg.rollout.rollout import Rollout


OFTEN = 0.75
"""Share of satisfying samples above which the control variate is worth its cost: it removes about this share of the
noise, since the second moment of the weights falls from 1/ESS to 1/ESS − 1, and adds at most a third to the
gradients."""


@dataclass(frozen=True)
class CDPGSettings(MethodSettings):
    """The settings of CDPG."""

    partition: Literal["batch", "pooled"] = "batch"
    """How Ẑ_c is estimated: ``batch`` is the mean over the epoch's own samples of the context, as in the paper;
    ``pooled`` uses, for each sample, all other samples ever drawn for its context, together with the mean over
    contexts."""
    control_variate: bool = True
    """Subtract π/q from the weights: the same expectation with less noise, but every sample needs a gradient. An epoch
    does so if at least three quarters of the samples of the epoch before satisfied the constraint; with fewer, it costs
    more and removes less noise."""
    replay: int = 8
    """Further steps on samples of this and earlier epochs, for each step on an epoch's own samples; fewer while the
    learning rate is below its peak, in proportion to it. Each takes a quarter as many contexts. An epoch replays only
    if the epoch before has not lowered the gain on the validation contexts (``validation_contexts``) by more than its
    noise, against overfitting. Without validation contexts, as by default with fewer than 50 contexts, nothing is
    replayed."""
    replay_samples: int = 65536
    """Samples of the latest epochs that are kept for replay; the latest epoch is kept whole, however large it is. A
    sample takes 33 bytes and its context 16, a token of a satisfying sample 4 more."""

    divergence: Divergence = "kl"
    """What is minimised: KL(p, π), the default, keeps the diversity of p; Jensen-Shannon (``js``), total variation
    (``tv``), χ²(p, π) (``chi2``), the α-divergence (``alpha``) and KL(π, p) (``reverse_kl``, only where b is never 0)
    weigh precision against diversity differently."""
    alpha: float = 0.5
    """α of ``divergence: alpha``, between 0, which is KL(p, π), and 1, which is KL(π, p)."""

    def problems(self) -> Iterable[str]:
        yield from too_small(self, {"replay": 0, "replay_samples": 1})
        if not 0 < self.alpha < 1:
            yield (
                f"alpha must lie between 0 and 1, not {self.alpha}: for the ends, set divergence to kl or reverse_kl"
            )

    def idle(self) -> Mapping[str, str]:
        return {} if self.divergence == "alpha" else {"alpha": f"divergence is {self.divergence}, not alpha"}


@register
class CDPG(WeightedMethod):
    """w = P_c(x) / ((Ẑ_c + ε) q(x|c)), Algorithm 1 of the paper.

    With the exact Z_c the gradient is unbiased; with Ẑ_c from the same M samples its expectation at q = a is
    κ_c = 1 − (1 − Z_c)^M times the true gradient of the context. With ``partition: pooled``, Ẑ_c does not depend on the
    sample that it divides (:mod:`cdpg.target.pooled`). Divergences other than KL(p, π) have their own loss
    (:mod:`cdpg.methods.f_divergence`).
    """

    name = label = "cdpg"
    description = "conditional distributional policy gradients"
    style = Style("#0b6fd8", "#5a97fa", "o")
    Settings: ClassVar[type[MethodSettings]] = CDPGSettings
    targets_p = True
    normalizes_per_context = True
    divides_by_q = True
    differentiates_from = OFTEN

    @property
    def settings(self) -> CDPGSettings:
        return self.config.settings_of(CDPGSettings)

    @property
    def chooses_epoch(self) -> bool:
        return self.settings.divergence == "kl"  # of which the gain is: another optimum may have a small one

    @property
    def needs_positive_b(self) -> bool:
        return self.settings.divergence == "reverse_kl"

    @property
    def differentiates_every_sample(self) -> bool:
        return self.settings.control_variate or self.needs_positive_b

    def subtracts_control_variate(self, state: State) -> bool:
        return self.settings.control_variate and state.get("satisfying", 0.0) >= OFTEN

    def sample_loss(self, rollout: Rollout, state: State, subtracts: bool) -> SampleLoss:
        if self.settings.divergence == "kl":
            return super().sample_loss(rollout, state, subtracts)
        if self.needs_positive_b:
            refuse_zeros(rollout)
        reward = pseudo_reward(self.settings.divergence, self.settings.alpha)
        log_z = self._log_z(rollout, state)
        centred = subtracts or self.needs_positive_b
        return DivergenceLoss(rollout, log_z, reward, mean_of_others(rollout, log_z, reward) if centred else None)

    @property
    def replay(self) -> int:
        return self.settings.replay

    @property
    def replay_samples(self) -> int:
        return self.settings.replay_samples

    @property
    def _pools(self) -> bool:
        return self.settings.partition == "pooled"

    def begin(self) -> State:
        """The share of satisfying samples in the epoch before, and for ``pooled`` the ratios and the last prior."""
        pooled = {"pool": PooledPartition().to_mapping(), "prior": None} if self._pools else {}
        return {"satisfying": 0.0, **pooled}

    def retargeted(self, state: State) -> State:
        return {**self.begin(), "satisfying": state["satisfying"]}

    def advance(self, state: State, rollout: Rollout) -> State:
        scale = log_scale(state, rollout)
        ratio = (rollout.log_ratio - scale.get("log_scale", 0.0)).exp()
        counted = rollout.valid & ratio.isfinite()  # the step of any other sample is refused
        ratio = ratio.masked_fill(~counted, 0.0)
        satisfying = int((counted & (rollout.log_ratio > -math.inf)).sum()) / max(1, int(counted.sum()))
        if not self._pools:
            return {"satisfying": satisfying, **scale}
        pool = PooledPartition.from_mapping(state["pool"])
        # Before this epoch's samples, so that a weight depends on its own sample in P/q alone. The prior that a
        # replayed sample meets has seen it, as one of all samples.
        prior = pool.prior()
        return {
            "satisfying": satisfying,
            "pool": pool.add(rollout.indices, ratio, counted).to_mapping(),
            "prior": None if prior is None else {"mean": prior.mean, "strength": prior.strength},
            **scale,
        }

    def weights(self, rollout: Rollout, state: State) -> Tensor:
        epsilon = rollout.epsilon(self.config.partition_epsilon)
        return partition.weights(rollout.log_ratio, self._log_z(rollout, state), epsilon)

    def _log_z(self, rollout: Rollout, state: State) -> Tensor:
        """log Ẑ_c, ``[context]``, or for ``pooled`` of each sample, ``[context, sample]``."""
        if not self._pools:
            return rollout.log_z
        prior = None if state["prior"] is None else Prior(**state["prior"])
        pool, scale = PooledPartition.from_mapping(state["pool"]), float(state.get("log_scale", 0.0))
        return pool.log_z(rollout.indices, rollout.log_ratio - scale, prior) + scale

    def metrics(self, state: State) -> Mapping[str, float]:
        prior = state.get("prior")
        return {} if prior is None or prior["strength"] is None else {"prior_strength": prior["strength"]}
