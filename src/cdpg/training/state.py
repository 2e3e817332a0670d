"""What a run carries from epoch to epoch, beside the weights and the optimiser's moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cdpg.methods.base import Method, State
from cdpg.rollout.replay import ReplayBuffer
from cdpg.storage.checkpoints import Checkpoint
from cdpg.training.validation import Best


@dataclass(frozen=True)
class RunState:
    """The state of a run between two epochs."""

    method: State
    replay: ReplayBuffer
    best: Best | None = None
    """The model to keep, by the gain on the contexts set aside; None without such contexts."""

    @classmethod
    def begin(cls, method: Method) -> RunState:
        """Before the first epoch."""
        return cls(method.begin(), ReplayBuffer(method.replay_samples))

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        method: Method,
        held: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
    ) -> RunState:
        """The state in a checkpoint; ``held`` takes this process's part of the weights of the best model."""
        kept = checkpoint.state.get("best")
        best = None
        if kept is not None:
            peak = tuple(math.nan if gain is None else gain for gain in kept["peak"])
            best = Best(kept["epoch"], kept["gain"], held(checkpoint.tensors["best"]), peak)
        buffer = ReplayBuffer(method.replay_samples).restored(checkpoint.tensors.get("replay", {}))
        return cls(checkpoint.state["objective"], buffer, best)

    def is_improving(self, epoch: int) -> bool:
        """Whether the model of the epoch before ``epoch`` is the one to keep, by the gain on the contexts set aside.

        False without such contexts: nothing then shows whether more steps on the same samples help on others.
        """
        return self.best is not None and self.best.epoch == epoch - 1

    def values(self) -> dict[str, Any]:
        """What a checkpoint stores as JSON."""
        best = self.best
        if best is None:
            return {"objective": dict(self.method), "best": None}
        peak = [None if math.isnan(gain) else gain for gain in best.peak]  # JSON has no NaN
        return {"objective": dict(self.method), "best": {"epoch": best.epoch, "gain": best.gain, "peak": peak}}

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """What a checkpoint stores as tensors, by file."""
        found: dict[str, Mapping[str, Tensor]] = {"replay": self.replay.tensors()}
        if self.best is not None:
            found["best"] = self.best.weights
        return {name: tensors for name, tensors in found.items() if tensors}
