"""The ablation: one constant for all contexts in place of Ẑ_c."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cdpg.methods.base import State, Style, WeightedMethod, log_scale, register
from cdpg.target import partition

if TYPE_CHECKING:
    from torch import Tensor

    from cdpg.rollout.rollout import Rollout


@register
class DPG(WeightedMethod):
    """w = P_c(x) / ((Z̄ + ε) q(x|c)), Z̄ the running mean of P_c(x)/q(x|c) over all samples so far.

    Its expected gradient weighs each context by Z_c/Z̄: biased as soon as Z_c varies.
    """

    name = label = "dpg"
    description = "distributional policy gradients with one constant for all contexts"
    style = Style("#a85d0c", "#e08a4a", "s", (5.0, 1.5))
    targets_p = True
    divides_by_q = True

    def begin(self) -> State:
        """The sum of P_c(x)/q(x|c), divided by a scale if there is one, and over how many samples."""
        return {"ratio_sum": 0.0, "count": 0}

    def advance(self, state: State, rollout: Rollout) -> State:
        scale = log_scale(state, rollout)
        ratio_sum = float((rollout.log_ratio - scale.get("log_scale", 0.0)).exp().sum())
        if not math.isfinite(ratio_sum):  # the epoch has no step, and must not change the mean
            return state
        return {
            "ratio_sum": state["ratio_sum"] + ratio_sum,
            "count": state["count"] + int(rollout.valid.sum()),
            **scale,
        }

    def retargeted(self, state: State) -> State:
        return self.begin()

    def weights(self, rollout: Rollout, state: State) -> Tensor:
        z = running_mean(state)
        log_z = rollout.log_ratio.new_tensor(math.log(z) if z > 0 else -math.inf)
        log_ratio = rollout.log_ratio - state.get("log_scale", 0.0)
        return partition.weights(log_ratio, log_z, rollout.epsilon(self.config.partition_epsilon))

    def metrics(self, state: State) -> Mapping[str, float]:
        return {"z_running": running_mean(state) * partition.exp(state.get("log_scale", 0.0))}


def running_mean(state: State) -> float:
    """Z̄, divided by the scale of the state if it has one."""
    return state["ratio_sum"] / state["count"] if state["count"] else 0.0
