"""Metrics as functions of sums over contexts, with bootstrap intervals and paired comparisons.

A mean is a ratio of two sums, BLEU a function of sums of n-gram counts, the deviation of the partition one of sums of
Z and Z². So a resample of the contexts is a weighted sum of the same rows, whatever the metric.

Intervals are expanded percentile intervals (T. Hesterberg, "What Teachers Should Know About the Bootstrap", 2015):
plain percentiles are too narrow where there are few contexts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from cdpg.target.noise import without_noise

Array = npt.NDArray[np.float64]

RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Statistic:
    """A statistic ``of(sum over contexts of terms)``; NaN if it is undefined."""

    terms: Array
    """``[context, term]``."""
    of: Callable[[Array], Array]
    """Sums ``[..., term]`` to values ``[...]``."""

    def value(self) -> float:
        """Its value on the given contexts."""
        return float(self.of(self.terms.sum(axis=0)))

    def on(self, resamples: Array) -> Array:
        """Its value on every resample; ``[resample, context]`` multiplicities to ``[resample]``."""
        return self.of(resamples @ self.terms)


@dataclass(frozen=True)
class Estimate:
    """A figure and its interval; None if undefined. A single context gives no interval."""

    mean: float | None
    low: float | None
    high: float | None

    def to_mapping(self) -> dict[str, float | None]:
        """As the files have it."""
        return {"mean": self.mean, "low": self.low, "high": self.high}


def quotient(sums: Array) -> Array:
    """First term over second; NaN where the second is 0."""
    below = sums[..., 1]
    defined = below != 0
    values: Array = np.where(defined, sums[..., 0] / np.where(defined, below, 1.0), np.nan)
    return values


def mean_statistic(values: Array) -> Statistic:
    """The mean of ``[context]`` values over the contexts that have one (not NaN)."""
    defined = ~np.isnan(values)
    return Statistic(np.stack([np.where(defined, values, 0.0), defined.astype(np.float64)], axis=1), quotient)


def context_means(values: Array, weights: Array | None = None) -> Array:
    """Means over outputs, ``[context, output]`` to ``[context]``, without NaN values; NaN if nothing is left."""
    weights = np.ones_like(values) if weights is None else weights
    counted = np.where(np.isnan(values), 0.0, weights)
    sums = np.stack([(np.nan_to_num(values) * counted).sum(axis=1), counted.sum(axis=1)], axis=1)
    return quotient(sums)


def deviation_statistic(z: Array, noise: Array) -> Statistic:
    """std_c(Z_c)/mean_c(Z_c) with the mean of ``noise``, the variance of each Ẑ_c, subtracted from the variance.

    Contexts with unknown noise (NaN) are left out of that mean; if all are unknown, the figure is NaN.
    """
    known = ~np.isnan(noise)
    terms = np.stack([z, z * z, np.where(known, noise, 0.0), np.ones_like(z), known.astype(np.float64)], axis=1)

    def of(sums: Array) -> Array:
        count = np.maximum(sums[..., 3], 1.0)
        mean = sums[..., 0] / count
        within = quotient(np.stack([sums[..., 2], sums[..., 4]], axis=-1))
        variance = without_noise(sums[..., 1] / count - mean**2, within)
        return quotient(np.stack([np.sqrt(variance), mean], axis=-1))

    return Statistic(terms, of)


def resample(contexts: int, seed: int, resamples: int = RESAMPLES) -> Array:
    """How often each context is drawn in each resample, ``[resample, context]``; the same for every model."""
    if not contexts:
        return np.zeros((resamples, 0))
    drawn = np.random.Generator(np.random.PCG64(seed)).integers(contexts, size=(resamples, contexts))
    counts = np.zeros((resamples, contexts))
    np.add.at(counts, (np.arange(resamples)[:, None], drawn), 1.0)
    return counts


def interval(statistic: Statistic, resamples: Array) -> Estimate:
    """A metric with its expanded percentile interval."""
    return _interval(statistic.value(), statistic.on(resamples), resamples)


def difference(after: Statistic, before: Statistic, resamples: Array) -> Estimate:
    """after − before, both on the same resamples: paired by context."""
    return _interval(after.value() - before.value(), after.on(resamples) - before.on(resamples), resamples)


def ratio(after: Statistic, before: Statistic, resamples: Array) -> Estimate:
    """after / before, paired by context; undefined unless both, and the interval of ``before``, are positive."""
    divisor = interval(before, resamples)
    least = divisor.mean if divisor.low is None else divisor.low
    if least is None or least <= 0 or not after.value() > 0:
        return Estimate(None, None, None)
    both = np.stack([after.on(resamples), before.on(resamples)], axis=1)
    value = float(quotient(np.array([after.value(), before.value()])))
    return _interval(value, quotient(both), resamples)


def expanded_tail(contexts: int) -> float:
    """Share of the resamples below the interval, and above it: Φ(-√(n/(n-1)) t) for n contexts.

    t is the quantile of Student's law with n - 1 degrees of freedom that an interval of the mean would take; the root
    makes up for the resamples' variance, which is that of the contexts divided by n and not by n - 1.
    """
    quantile = student_quantile(contexts - 1, CONFIDENCE)
    return NormalDist().cdf(-math.sqrt(contexts / (contexts - 1)) * quantile)


@lru_cache(maxsize=64)
def student_quantile(freedom: int, confidence: float) -> float:
    """t with P(|T| ≤ t) = ``confidence`` for Student's t with ``freedom`` degrees of freedom, by bisection."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # more than the precision of a double
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(freedom, middle) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _student_within(freedom: int, angle: float) -> float:
    """P(|T| ≤ √freedom · tan(angle)), by the series of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    odd = freedom % 2
    steps = np.arange(2 + odd, freedom - 1, 2)  # each term is the one before, times (k - 1) / k and cos²
    terms = np.concatenate([[1.0], np.cumprod((steps - 1) / steps * math.cos(angle) ** 2)])
    if odd:
        beyond = math.sin(angle) * math.cos(angle) * terms.sum() if freedom > 1 else 0.0
        return float(2 / math.pi * (angle + beyond))
    return float(math.sin(angle) * terms.sum())


def _interval(value: float, values: Array, resamples: Array) -> Estimate:
    """Percentiles of the resamples that have a value, around the value itself."""
    if not np.isfinite(value):
        return Estimate(None, None, None)
    kept, contexts = values[np.isfinite(values)], resamples.shape[1]
    if contexts < 2 or not len(kept):
        return Estimate(value, None, None)
    tail = 100 * expanded_tail(contexts)
    low, high = np.percentile(kept, [tail, 100 - tail])
    return Estimate(value, float(low), float(high))
