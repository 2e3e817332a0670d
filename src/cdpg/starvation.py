"""Runs that have next to nothing to learn from: noticed while they run, and said again at their end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

LEAST_COVERAGE = 0.1
"""Share of the contexts with a satisfying sample below which an epoch teaches next to nothing."""
_EPOCHS = 3
"""Epochs that the first warning looks at."""


class StarvationWatch:
    """Warns once when hardly any context of the latest epochs had a satisfying sample."""

    def __init__(self, samples_per_context: int) -> None:
        self._samples = samples_per_context
        self._recent: deque[float] = deque(maxlen=_EPOCHS)
        self._warned = False

    def warning(self, record: Mapping[str, Any]) -> str | None:
        """What to say after an epoch, given its metrics."""
        self._recent.append(record["coverage"])
        share = sum(self._recent) / len(self._recent)
        if self._warned or len(self._recent) < _EPOCHS or share >= LEAST_COVERAGE:
            return None
        self._warned = True
        return (
            f"there is hardly anything to learn from: {_covered(share, f'the last {_EPOCHS} epochs')}; {self._cure()}"
        )

    def verdict(self, records: Sequence[Mapping[str, Any]]) -> str | None:
        """What to say at the end of a run, given the metrics of all its epochs."""
        coverage = [record["coverage"] for record in records]
        share = sum(coverage) / len(coverage) if coverage else 1.0
        if share >= LEAST_COVERAGE:
            return None
        return (
            f"this run has learnt next to nothing: {_covered(share, f'its {len(coverage):,} epochs')}; {self._cure()}"
        )

    def _cure(self) -> str:
        return (
            f"raise num_generations (now {self._samples}), relax the constraint or let it return values between 0 and "
            "1, improve the prompts or the base model, or leave out contexts that it can never satisfy "
            "(`cdpg check` shows what the base does)"
        )


def _covered(share: float, where: str) -> str:
    found = f"only {share:.1%} of the contexts" if share else "no context"
    return f"{found} of {where} had a satisfying sample"
