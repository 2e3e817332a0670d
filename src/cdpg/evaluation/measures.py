"""The interface of a task's own metrics, beside satisfaction and the divergences."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from cdpg.contexts.contexts import Context
from cdpg.evaluation.metrics import Count, Metric
from cdpg.evaluation.statistics import Array, Statistic
from cdpg.sandbox.reader import Apply, directly


@dataclass(frozen=True)
class Measured:
    """Figures of outputs, ``outputs[context][output]``."""

    features: Mapping[str, Array] = field(default_factory=dict)
    """``[context, output]``: a number for each output, or NaN; their mean is the metric."""
    corpus: Mapping[str, Statistic] = field(default_factory=dict)
    """Metrics that are not means of features."""
    frequencies: Mapping[str, Counter[str]] = field(default_factory=dict)
    """Counters: how often each name occurred."""
    remarks: Mapping[str, Sequence[Sequence[str | int | None]]] = field(default_factory=dict)
    """``[context][output]``: a word or a number to show with each output."""


class Measure(Protocol):
    """A task's own metrics."""

    @property
    def beams(self) -> int:
        """Beams of the search that makes the outputs; 0 for ancestral samples."""

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """How its own metrics are shown, by name; a metric without an entry is shown by its name."""

    @property
    def counts(self) -> Mapping[str, Count]:
        """How its counts (``Measured.frequencies``) are shown, by name."""

    def __call__(
        self, contexts: Sequence[Context], outputs: Sequence[Sequence[str]], apply: Apply = directly
    ) -> Measured:
        """Measure some outputs for each context; ``apply`` calls functions that a hostile text could break."""


def own_metrics(measure: Measure) -> Mapping[str, Metric]:
    """How a measure's metrics are shown; a user's measure may leave it out."""
    return getattr(measure, "metrics", {})


def own_counts(measure: Measure) -> Mapping[str, Count]:
    """How a measure's counts are shown; a user's measure may leave it out."""
    return getattr(measure, "counts", {})


@dataclass(frozen=True)
class TextMeasure:
    """Distinct-2, for runs without a task."""

    beams: int = 0
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    counts: Mapping[str, Count] = field(default_factory=dict)

    def __call__(
        self, contexts: Sequence[Context], outputs: Sequence[Sequence[str]], apply: Apply = directly
    ) -> Measured:
        return Measured(features={"distinct_2": per_output(outputs, distinct_2)})


def per_output(outputs: Sequence[Sequence[str]], feature: Callable[[str], float]) -> Array:
    """A function of a text applied to each output, ``[context, output]``."""
    return np.array([[feature(text) for text in texts] for texts in outputs], dtype=np.float64)


def table_of(values: Iterable[float | None], outputs: Sequence[Sequence[str]]) -> Array:
    """A number for each output, one after the other, as ``[context, output]``; NaN for None."""
    return np.array(list(values), dtype=np.float64).reshape(len(outputs), -1)  # NumPy makes NaN of None


def distinct_2(text: str) -> float:
    """Distinct bigrams over all bigrams of words; 0 for a text of fewer than two words."""
    words = text.split()
    bigrams = list(itertools.pairwise(words))
    return len(set(bigrams)) / len(bigrams) if bigrams else 0.0
