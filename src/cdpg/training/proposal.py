"""What a run's samples are drawn from: the present policy, a copy of it from some epochs ago, the base or a third
model.

The weight of a sample is P_c(x) / (Ẑ_c q(x|c)), where q is what the sample was drawn from. So the gradient is right for
any proposal. The figures of the policy are computed from its own scores (:mod:`cdpg.rollout.rescoring`). If an engine
draws the samples, it is sent the proposal's weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from cdpg.config import CDPGConfig
from cdpg.methods.base import Method
from cdpg.models.base import LanguageModel
from cdpg.rollout.rescoring import recomputed, rescored
from cdpg.rollout.rollout import Rollout
from cdpg.rollout.sampler import Sampler
from cdpg.storage.snapshot import Trainable
from cdpg.target.proposal import log_ratio_quantiles, mean_under_policy
from cdpg.training.engine import EngineLink


@dataclass(frozen=True)
class HeldWeights:
    """The policy's weights after an earlier epoch, with which samples are drawn."""

    epoch: int
    weights: Mapping[str, Tensor]
    """Copies on the CPU, by the parameters' names."""


@dataclass(frozen=True)
class Proposal:
    """Gives the sampler the weights it samples with, and records which model they are of."""

    method: Method
    policy: LanguageModel
    sampler: Sampler
    trainable: Trainable
    engine: EngineLink | None = None

    def synchronised(self, done: int, held: HeldWeights | None, config: CDPGConfig) -> HeldWeights | None:
        """The weights to sample with after ``done`` epochs: new ones if due, None for the policy's. They are sent to an
        engine.
        """
        if config.sync_every == 1 or self.method.source != "policy":
            held = None
        elif held is None or done - held.epoch >= config.sync_every:
            held = HeldWeights(done, self.trainable.copied_weights())
        if self.engine is not None:
            moves = self.method.source == "policy"
            with self.in_use(held, done):
                self.engine.send(held.epoch if held is not None else done if moves else 0, config)
        return held

    @contextmanager
    def in_use(self, held: HeldWeights | None, done: int) -> Iterator[None]:
        """Context in which the policy has the weights to sample with."""
        if held is None or held.epoch == done:
            yield
            return
        present = self.trainable.copied_weights()
        self.trainable.set_weights(held.weights)
        try:
            yield
        finally:
            self.trainable.set_weights(present)

    def compared(self, rollout: Rollout, config: CDPGConfig) -> Rollout:
        """The rollout with scores, by the same weights, of what an engine has drawn; called while these weights are in
        use."""
        if self.engine is None:
            return rollout
        self.engine.require_unchanged()
        sampler = self.sampler
        with sampler.base.as_base() if sampler.policy_is_base else nullcontext():
            return recomputed(rollout, sampler.policy, sampler.processes, config.tokens_per_pass)

    def completed(self, rollout: Rollout, held: HeldWeights | None, config: CDPGConfig) -> Rollout:
        """The rollout with the policy's scores of the satisfying samples, if they are not log q."""
        of_now = held is None or held.epoch == rollout.number - 1
        if not of_now or self.method.source != self.method.proposal:
            return rescored(rollout, self.policy, self.sampler.processes, config.tokens_per_pass)
        if rollout.log_recomputed is not None and self.method.source == "policy":
            return replace(rollout, log_policy=rollout.log_recomputed, rescored=rollout.recomputed)
        return rollout

    def close(self) -> None:
        """End the engine, if there is one."""
        if self.engine is not None:
            self.engine.close()

    def facts(self, rollout: Rollout, held: HeldWeights | None) -> dict[str, Any]:
        """The fields of an epoch's record on the model that drew the samples, and on the policy if it did not."""
        found: dict[str, Any] = {} if held is None else {"proposal_age": rollout.number - 1 - held.epoch}
        if self.method.source == "base":
            found["samples_of_base"] = True
        elif self.method.source != "policy":
            found["samples_of"] = self.method.source
        if rollout.log_policy is not None:
            mean = float(mean_under_policy(rollout.b, rollout.log_policy, rollout.log_q, rollout.valid))
            found["satisfaction_policy"] = mean if math.isfinite(mean) else None
        elif self.method.source == "base":
            found["kl_target_policy"] = None  # the samples say nothing of how far the policy is from p
        if rollout.log_recomputed is not None:
            chosen = rollout.recomputed
            quantiles = log_ratio_quantiles(rollout.log_q[chosen], rollout.log_recomputed[chosen])
            names = (f"engine_log_ratio_{name}" for name in ("low", "median", "high"))
            found |= dict(zip(names, quantiles, strict=True))
        return found
