"""Conditional Distributional Policy Gradients: each context is normalised by its own partition estimate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from cdpg.config import MethodSettings
from cdpg.methods.base import State, Style, WeightedMethod, register
from cdpg.target import partition
from cdpg.target.pooled import PooledPartition, Prior
from cdpg.values import too_small

if TYPE_CHECKING:
    from torch import Tensor

    from cdpg.rollout.rollout import Rollout


OFTEN = 0.2
"""Share of satisfying samples from which on the control variate is worth its gradients: it takes away about this share
of the noise, since the second moment of the weights falls from 1/ESS to 1/ESS − 1."""


@dataclass(frozen=True)
class CDPGSettings(MethodSettings):
    """The settings of CDPG."""

    partition: Literal["batch", "pooled"] = "batch"
    """How Ẑ_c is estimated: ``batch`` is the mean over the epoch's own samples of the context, as in the paper;
    ``pooled`` takes for each sample all others ever drawn for its context, together with the mean over contexts."""
    control_variate: bool = True
    """Subtract π/q from the weights: the same expectation with less noise, but every sample needs a gradient. An epoch
    does so if at least a fifth of the samples of the epoch before satisfied: of rarer ones it removes little noise."""
    replay: int = 3
    """Further steps on samples of this and earlier epochs, for each step on an epoch's own samples. An epoch replays
    only if the model of the epoch before is the one to keep, by the gain on the contexts set aside
    (``validation_contexts``), so that samples are not learnt by heart."""
    replay_samples: int = 65536
    """Samples of the latest epochs that are kept for replay. A sample that does not satisfy takes 40 bytes, one that
    does 4 more for each token."""

    def problems(self) -> Iterable[str]:
        yield from too_small(self, {"replay": 0, "replay_samples": 1})


@register
class CDPG(WeightedMethod):
    """w = P_c(x) / ((Ẑ_c + ε) q(x|c)), Algorithm 1 of the paper.

    With the exact Z_c the gradient is unbiased; with Ẑ_c from the same M samples its expectation at q = a is
    κ_c = 1 − (1 − Z_c)^M times the true gradient of the context. With ``partition: pooled``, Ẑ_c does not depend on the
    sample that it divides (:mod:`cdpg.target.pooled`).
    """

    name = label = "cdpg"
    description = "conditional distributional policy gradients"
    style = Style("#0b6fd8", "#5a97fa", "o")
    Settings: ClassVar[type[MethodSettings]] = CDPGSettings
    targets_p = True
    chooses_epoch = True
    normalizes_per_context = True

    @property
    def settings(self) -> CDPGSettings:
        return self.config.settings_of(CDPGSettings)

    @property
    def differentiates_every_sample(self) -> bool:
        return self.settings.control_variate

    def subtracts_control_variate(self, state: State) -> bool:
        return self.settings.control_variate and state.get("satisfying", 0.0) >= OFTEN

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
        ratio = rollout.log_ratio.exp()
        if not bool(ratio.isfinite().all()):  # such an epoch has no step
            return state
        satisfying = int((rollout.log_ratio > -math.inf).sum()) / max(1, int(rollout.valid.sum()))
        if not self._pools:
            return {"satisfying": satisfying}
        pool = PooledPartition.from_mapping(state["pool"])
        prior = pool.prior()  # before this epoch's samples, so that a weight depends on its own sample in P/q alone
        return {
            "satisfying": satisfying,
            "pool": pool.add(rollout.indices, ratio, rollout.valid).to_mapping(),
            "prior": None if prior is None else {"mean": prior.mean, "strength": prior.strength},
        }

    def weights(self, rollout: Rollout, state: State) -> Tensor:
        epsilon = rollout.epsilon(self.config.partition_epsilon)
        return partition.weights(rollout.log_ratio, self._log_z(rollout, state), epsilon)

    def _log_z(self, rollout: Rollout, state: State) -> Tensor:
        """log Ẑ_c, ``[context]``, or for ``pooled`` of each sample, ``[context, sample]``."""
        if not self._pools:
            return rollout.log_z
        prior = None if state["prior"] is None else Prior(**state["prior"])
        return PooledPartition.from_mapping(state["pool"]).log_z(rollout.indices, rollout.log_ratio, prior)

    def metrics(self, state: State) -> Mapping[str, float]:
        prior = state.get("prior")
        return {} if prior is None or prior["strength"] is None else {"prior_strength": prior["strength"]}
