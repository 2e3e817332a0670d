"""What a run carries from epoch to epoch, beside the weights and the optimiser's moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cdpg.methods.base import Method, State
from cdpg.rollout.moments import Fitted, MomentBuffer
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
    moments: tuple[Fitted, ...] = ()
    """The fits of the target's moments, the present one last; empty if it has none."""
    recent: MomentBuffer = field(default_factory=MomentBuffer)
    """Samples to fit them again."""

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
        best = checkpoint.state.get("best")
        return cls(
            checkpoint.state["objective"],
            ReplayBuffer(method.replay_samples).restored(checkpoint.tensors.get("replay", {})),
            None
            if best is None
            else Best(best["epoch"], best["gain"], held(checkpoint.tensors["best"]), tuple(best["peak"])),
            tuple(map(Fitted.from_mapping, checkpoint.state.get("moments", ()))),
            MomentBuffer(checkpoint.tensors.get("moments", {})),
        )

    def is_improving(self, epoch: int) -> bool:
        """Whether the model of the epoch before ``epoch`` is the one to keep, by the gain on the contexts set aside.

        False without such contexts: nothing then shows whether more steps on the same samples help on others.
        """
        return self.best is not None and self.best.epoch == epoch - 1

    def values(self) -> dict[str, Any]:
        """What a checkpoint stores as JSON."""
        best = self.best
        kept = None if best is None else {"epoch": best.epoch, "gain": best.gain, "peak": list(best.peak)}
        moments = {"moments": [fitted.to_mapping() for fitted in self.moments]} if self.moments else {}
        return {"objective": dict(self.method), "best": kept, **moments}

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """What a checkpoint stores as tensors, by file."""
        found: dict[str, Mapping[str, Tensor]] = {"replay": self.replay.tensors(), "moments": self.recent.tables}
        if self.best is not None:
            found["best"] = self.best.weights
        return {name: tensors for name, tensors in found.items() if tensors}
