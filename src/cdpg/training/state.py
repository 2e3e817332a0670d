"""What a run carries from epoch to epoch, beside the weights and the optimiser's moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cdpg.methods.base import Method, State
from cdpg.rollout.moments import Fitted, MomentBuffer
from cdpg.rollout.replay import ReplayBuffer
from cdpg.storage.checkpoints import Checkpoint
from cdpg.training.proposal import HeldWeights
from cdpg.training.validation import Best


@dataclass(frozen=True)
class RunState:
    """The state of a run between two epochs."""

    method: State
    replay: ReplayBuffer
    best: Best | None = None
    """The model to keep, by the gain on the validation contexts; None without these."""
    gains: tuple[float, ...] = ()
    """The gain of each validation context after the last epoch; NaN where there is none."""
    fell: bool = False
    """Whether the last epoch lowered it by more than its noise."""
    moments: tuple[Fitted, ...] = ()
    """The fits of the target's moments, the present one last; empty if it has none."""
    recent: MomentBuffer = field(default_factory=MomentBuffer)
    """Samples to fit them again."""
    proposal: HeldWeights | None = None
    """The weights that samples are drawn with, if they differ from the policy's."""

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
        """The state in a checkpoint; ``held`` takes this process's part of weights beside the model's own."""
        kept, drawing = checkpoint.state.get("best"), checkpoint.state.get("proposal")
        best = None
        if kept is not None:
            best = Best(kept["epoch"], kept["gain"], held(checkpoint.tensors["best"]), _read(kept["peak"]))
        return cls(
            checkpoint.state["objective"],
            ReplayBuffer(method.replay_samples).restored(checkpoint.tensors.get("replay", {})),
            best,
            _read(checkpoint.state.get("gains", ())),
            checkpoint.state.get("fell", False),
            tuple(map(Fitted.from_mapping, checkpoint.state.get("moments", ()))),
            MomentBuffer(checkpoint.tensors.get("moments", {})),
            None if drawing is None else HeldWeights(drawing["epoch"], held(checkpoint.tensors["proposal"])),
        )

    @property
    def may_replay(self) -> bool:
        """Whether the next epoch may replay: the last one did not lower the gain on the validation contexts.

        False without validation contexts: nothing then shows whether the policy overfits to the samples.
        """
        return self.best is not None and not self.fell

    def values(self) -> dict[str, Any]:
        """What a checkpoint stores as JSON."""
        best = self.best
        others: dict[str, Any] = {"moments": [one.to_mapping() for one in self.moments]} if self.moments else {}
        if self.proposal is not None:
            others["proposal"] = {"epoch": self.proposal.epoch}
        if best is None:
            return {"objective": dict(self.method), "best": None, **others}
        kept = {"epoch": best.epoch, "gain": best.gain, "peak": _plain(best.peak)}
        gains = {"gains": _plain(self.gains), "fell": self.fell}
        return {"objective": dict(self.method), "best": kept, **gains, **others}

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """What a checkpoint stores as tensors, by file."""
        found: dict[str, Mapping[str, Tensor]] = {"replay": self.replay.tensors(), "moments": self.recent.tables}
        if self.best is not None:
            found["best"] = self.best.weights
        if self.proposal is not None:
            found["proposal"] = self.proposal.weights
        return {name: tensors for name, tensors in found.items() if tensors}


def _plain(gains: tuple[float, ...]) -> list[float | None]:
    """For JSON, which has finite numbers only."""
    return [gain if math.isfinite(gain) else None for gain in gains]


def _read(gains: Sequence[float | None]) -> tuple[float, ...]:
    """What :func:`_plain` gave."""
    return tuple(math.nan if gain is None else gain for gain in gains)
