"""Warnings on runs with next to nothing to learn from, or nothing to gain; during the run and at its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

LEAST_COVERAGE = 0.1
"""Coverage below which there is next to nothing to learn from an epoch."""
NEARLY_ALWAYS = 0.99
"""Satisfaction of the base from which there is nothing to gain; mean Z estimates it in every epoch."""
_SAMPLES = 100
"""Samples from which a share is meaningful; smaller epochs are counted together."""
_EPOCHS = 3
"""Epochs that the first warning looks at."""


class PlentyWatch:
    """Warns once, after the first epochs, when the base satisfies the constraint nearly always."""

    def __init__(self) -> None:
        self._z: list[float] = []
        self._samples = 0

    def warning(self, record: Mapping[str, Any]) -> str | None:
        """The warning after an epoch with these metrics, or None."""
        if self._samples >= _SAMPLES or record["z_mean"] is None:
            return None
        self._z.append(record["z_mean"])
        self._samples += record["samples"]
        last = record["epoch"]
        return None if self._samples < _SAMPLES else _plenty(self._z, f"by epoch {last}, ", "there is nothing to gain")

    def verdict(self, records: Sequence[Mapping[str, Any]]) -> str | None:
        """The warning at the end of a run with these metrics, or None."""
        judged = [record for record in records if record["z_mean"] is not None]  # None: no verdict, or not finite
        if sum(record["samples"] for record in judged) < _SAMPLES:
            return None
        return _plenty([record["z_mean"] for record in judged], "", "there was nothing to gain")


def _plenty(z: Sequence[float], when: str, what: str) -> str | None:
    share = sum(z) / len(z) if z else 0.0
    if share < NEARLY_ALWAYS:
        return None
    return (
        f"{when}the base satisfies the constraint in {min(share, 1.0):.0%} of its samples: {what}; drop the contexts "
        "where it always does, or ask for more (`cdpg check` shows what the base does)"
    )


class StarvationWatch:
    """Warns once when hardly any context of the latest epochs had a satisfying sample."""

    def __init__(self, samples_per_context: int) -> None:
        self._samples = samples_per_context
        self._recent: deque[float] = deque(maxlen=_EPOCHS)
        self._warned = False

    def warning(self, record: Mapping[str, Any]) -> str | None:
        """The warning after an epoch with these metrics, or None."""
        self._recent.append(record["coverage"])
        share = sum(self._recent) / len(self._recent)
        if self._warned or len(self._recent) < _EPOCHS or share >= LEAST_COVERAGE:
            return None
        self._warned = True
        return (
            f"there is hardly anything to learn from: {_covered(share, f'the last {_EPOCHS} epochs')}; {self._cure()}"
        )

    def verdict(self, records: Sequence[Mapping[str, Any]]) -> str | None:
        """The warning at the end of a run with these metrics, or None."""
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
