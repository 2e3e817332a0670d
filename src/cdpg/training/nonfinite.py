"""Gradients that are not finite: writes their batches for inspection, and ends a run that has too many."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cdpg.errors import RunError
from cdpg.rollout.rollout import Rollout
from cdpg.storage.json_files import write_json
from cdpg.system import files
from cdpg.training.optimization import RefusedStep, StepSummary
from cdpg.training.records import describe_sample, numbers_of_sample

MOST_EPOCHS = 5
"""Epochs in a row without a finite gradient after which a run ends."""
MOST_FILES = 20
"""Largest number of epochs written, so that a long run does not fill the disk."""


class NonfiniteWatch:
    """Ends a run whose gradients are not finite, epoch after epoch."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._epochs = folder, 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Count an epoch, by its metrics."""
        self._epochs = self._epochs + 1 if record["steps_nonfinite"] and not record["steps"] else 0

    def is_hopeless(self) -> bool:
        """Whether so many epochs in a row had no finite gradient that the run should end."""
        return self._epochs == MOST_EPOCHS

    def raise_if_hopeless(self, epoch: int) -> None:
        """End the run, of which the last checkpoint is of ``epoch``."""
        if self.is_hopeless():
            raise RunError(
                f"no finite gradient in {MOST_EPOCHS} epochs: lower learning_rate or set max_grad_norm; the last "
                f"checkpoint is of epoch {epoch}, the batches are in {str(self._folder)!r}"
            )


def keep_refused(folder: Path, rollout: Rollout, summary: StepSummary) -> Path | None:
    """Write the batches of the epoch's refused steps to ``folder/epoch-000007.json``; None when there are enough.

    With several processes, it holds the samples of the one that writes.
    """
    path = folder / f"epoch-{rollout.number:06d}.json"
    try:
        files.make_folder(folder)
    except OSError as error:
        raise RunError(f"cannot make the folder {str(folder)!r}: {error.strerror or error}") from error
    if not path.exists() and len(list(folder.glob("epoch-*.json"))) >= MOST_FILES:
        return None
    write_json(path, {"epoch": rollout.number, "steps": [_step(step) for step in summary.refused]})
    return path


def _step(step: RefusedStep) -> dict[str, Any]:
    rollout = step.rollout
    first = rollout.first_context * rollout.b.shape[1]
    count = rollout.samples.lengths.numel()
    own = [row - first for row in step.rows.tolist() if first <= row < first + count]
    if step.replayed:  # of the others the tokens are not stored
        satisfying = rollout.own((rollout.b > 0) & rollout.valid).tolist()
        own = [row for row in own if satisfying[row]]
    return {
        "replayed": step.replayed,
        "loss": _json_number(step.loss),
        "grad_norm": _json_number(step.grad_norm),
        "weights_finite": step.weights_finite,
        "samples": [_sample(step, row) for row in own],
    }


def _sample(step: RefusedStep, row: int) -> dict[str, Any]:
    return {
        **describe_sample(step.rollout, row),
        **({"completion": None} if step.replayed else {}),  # its text is not stored; its tokens are
        **{name: _json_number(value) for name, value in numbers_of_sample(step.rollout, row).items()},
        "weight": None if step.weights is None else _json_number(float(step.weights[row])),
    }


def _json_number(number: float) -> float | str:
    """A number, or NaN and infinities as text, since JSON does not have them."""
    return number if math.isfinite(number) else str(number)
