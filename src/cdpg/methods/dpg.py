"""The ablation: one constant for all contexts in place of Ẑ_c."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cdpg.methods.base import WeightedObjective
from cdpg.rollout.rollout import Rollout
from cdpg.target import partition


class DPG(WeightedObjective):
    """w = P_c(x) / ((Z̄ + ε) q(x|c)), Z̄ the running mean of P_c(x)/q(x|c) over all samples so far.

    Its expected gradient weighs each context by Z_c/Z̄: biased as soon as Z_c varies.
    """

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon
        self.ratio_sum = 0.0
        self.count = 0

    @property
    def z(self) -> float:
        """Z̄."""
        return self.ratio_sum / self.count if self.count else 0.0

    def weights(self, rollout: Rollout) -> Tensor:
        ratio_sum = float(rollout.log_ratio.exp().sum())
        if math.isfinite(ratio_sum):  # else the epoch gives no step, and must not spoil the mean for good
            self.ratio_sum += ratio_sum
            self.count += int(rollout.valid.sum())
        log_z = torch.tensor(math.log(self.z) if self.z > 0 else -math.inf, dtype=torch.float64)
        return partition.weights(rollout.log_ratio, log_z, self.epsilon)

    def metrics(self) -> dict[str, float]:
        return {"z_running": self.z}

    def state(self) -> dict[str, float]:
        return {"ratio_sum": self.ratio_sum, "count": self.count}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.ratio_sum, self.count = float(state["ratio_sum"]), int(state["count"])
