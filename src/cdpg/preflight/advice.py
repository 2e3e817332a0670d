"""Advice before a run: what a few samples of the base say about N, M and the constraint.

With samples of the base itself, Ẑ_c is the mean of b over a context's samples. A context has a gradient in an epoch if
one of its M samples satisfies, which has probability κ_c = 1 - (1 - Z_c)^M. The expected self-normalised gradient of
the context is κ_c times the true one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cdpg.methods import METHODS
from cdpg.target.noise import without_noise

ENOUGH = 0.8
"""Share of an epoch's contexts that should have a satisfying sample."""
_TOO_FEW = 0.5
_NEARLY_ALL = 0.95
_MAX_SAMPLES = 4096
_MIN_CONTEXTS = 8
"""Contexts with a satisfying sample that a step should have."""
_MIN_SAMPLES = 8
"""Samples that an estimate Ẑ_c should have."""
_FEW_ENDED = 0.5
_MANY_EVALUATIONS = 0.5

Level = Literal["stop", "careful", "fine"]


@dataclass(frozen=True)
class ProbeStatistics:
    """Statistics of samples of the base, M for each of a few contexts."""

    method: str
    """The run's method."""
    contexts_per_epoch: int
    """N of the run."""
    samples: int
    """M."""
    z: Sequence[float]
    """Ẑ_c of each context that was judged: the mean of b."""
    hits: Sequence[float]
    """The share of samples with b > 0, the same as Ẑ_c unless the constraint is soft."""
    failed: float
    """Share of samples on which the check failed."""
    failed_allowed: float
    """Share at which the run would stop."""
    ended: float
    """Share of samples that ended before the length limit."""
    seconds_sampling: float
    """For one sample."""
    seconds_constraint: float
    """For one sample, with all workers running."""
    workers: int
    evaluations: float = 0.0
    """Share of the run's time spent on evaluations."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Means of the target's moments and rewards over the satisfying samples, by name."""

    @property
    def satisfaction(self) -> float:
        return _mean(self.z)

    @property
    def spread(self) -> float:
        """Standard deviation of Z_c between contexts."""
        return deviation(self.z, self.samples)

    @property
    def coverage(self) -> float:
        """Share of the contexts that had a satisfying sample."""
        return _mean([float(hit > 0) for hit in self.hits])

    def expected_coverage(self, samples: int) -> float:
        """Expected share of contexts with a satisfying sample, for that many samples each."""
        return expected_kappa(_mean(self.hits), deviation(self.hits, self.samples), samples)


@dataclass(frozen=True)
class Advice:
    """A sentence or two for the user."""

    level: Level
    text: str


def kappa(z: float, samples: int) -> float:
    """κ = 1 - (1 - Z)^M."""
    return 1.0 if z >= 1 else -math.expm1(samples * math.log1p(-z))


def deviation(shares: Sequence[float], samples: int) -> float:
    """Standard deviation between contexts of shares estimated from M samples each, sampling noise subtracted.

    With h the estimate of a context, the noise is h(1-h)/(M-1): unbiased for binary b, too large for soft b.
    """
    if len(shares) < 2:
        return 0.0
    mean = _mean(shares)
    raw = math.fsum((share - mean) ** 2 for share in shares) / (len(shares) - 1)
    noise = _mean([share * (1 - share) for share in shares]) / max(1, samples - 1)
    return math.sqrt(without_noise(raw, noise))


def expected_kappa(mean: float, spread: float, samples: int) -> float:
    """E_c[1 - (1 - Z_c)^M] for Z_c that follow the beta distribution of this mean and deviation.

    With parameters α, β it is 1 - B(α, β + M) / B(α, β). Without spread it is κ of the mean. With the largest possible
    spread every Z_c is 0 or 1, and more samples do not help.
    """
    variance = spread**2
    if mean <= 0 or mean >= 1 or variance <= 1e-12:
        return kappa(mean, samples) if mean > 0 else 0.0
    total = mean * (1 - mean) / variance - 1
    if total <= 1e-9:
        return mean
    beta = (1 - mean) * total
    log_missed = math.lgamma(beta + samples) + math.lgamma(total) - math.lgamma(beta) - math.lgamma(total + samples)
    return -math.expm1(log_missed)


def enough_samples(stats: ProbeStatistics, goal: float = ENOUGH) -> int | None:
    """The smallest doubling of M that should cover that share of the contexts; None if none up to 4,096 does."""
    samples = stats.samples
    while samples <= _MAX_SAMPLES:
        if stats.expected_coverage(samples) >= goal:
            return samples
        samples *= 2
    return None


def advise(stats: ProbeStatistics) -> list[Advice]:
    """What to do before the run, the most important first; ``fine`` if N and M suffice."""
    if not stats.z and not stats.failed:
        return [
            Advice(
                "stop",
                "No constraint applies to any of the samples (all returned None): there is nothing to learn from. Give "
                "contexts to which a constraint applies.",
            )
        ]
    if not stats.z:
        return [Advice("stop", "No check succeeded: fix the constraint first.")]
    rules = (_on_failures, _on_partition, _on_speed, _on_length, _on_evaluations)
    found = [advice for rule in rules for advice in rule(stats)]
    order: tuple[Level, ...] = ("stop", "careful", "fine")
    return sorted(found, key=lambda advice: order.index(advice.level))


def _on_failures(stats: ProbeStatistics) -> list[Advice]:
    if stats.failed > stats.failed_allowed:
        return [
            Advice(
                "stop",
                f"The constraint failed on {stats.failed:.0%} of the samples, more than check_failures "
                f"({stats.failed_allowed:.0%}) allows: the run would end. Fix the constraint, or give it more "
                f"check_seconds or check_memory if that is what it lacked.",
            )
        ]
    if stats.failed:
        return [Advice("careful", f"The constraint failed on {stats.failed:.1%} of the samples; they are left out.")]
    return []


def _on_partition(stats: ProbeStatistics) -> list[Advice]:
    if not any(stats.hits):
        return [_nothing_satisfies(stats)]
    if stats.satisfaction >= _NEARLY_ALL and not stats.factors:
        return [
            Advice(
                "careful",
                f"The base satisfies the constraint in {stats.satisfaction:.0%} of its samples already: there is "
                f"little to gain. Drop the contexts where it always does, or ask for more.",
            )
        ]
    expected = stats.expected_coverage(stats.samples)
    contexts = stats.contexts_per_epoch * expected
    if expected < ENOUGH:
        return [_too_few_covered(stats, expected), *_on_contexts(stats, contexts)]
    few = [*_on_samples(stats), *_on_contexts(stats, contexts)]
    if few:
        return few
    samples = stats.contexts_per_epoch * stats.samples * _mean(stats.hits)
    return [
        Advice(
            "fine",
            f"N = {stats.contexts_per_epoch} and M = {stats.samples} suffice: of the {stats.contexts_per_epoch} "
            f"contexts of an epoch about {contexts:.0f} have a satisfying sample at the start, {samples:.0f} samples "
            f"in all (mean κ {expected:.2f}).",
        )
    ]


def _nothing_satisfies(stats: ProbeStatistics) -> Advice:
    count = len(stats.hits) * stats.samples
    bound = min(1.0, 3 / count)  # the 95% bound when none of so many was seen
    return Advice(
        "stop",
        f"None of {count:,} samples satisfies, so Z is probably below {bound:.2g}: there is nothing to learn from. "
        f"Look at the samples: is the prompt in the form that the model knows, and the check what you mean? If so, use "
        f"a model that can do it, give an easier or graded (soft) constraint, or look at more contexts.",
    )


def _too_few_covered(stats: ProbeStatistics, expected: float) -> Advice:
    more = enough_samples(stats)
    remedy = (
        f"Raise num_generations to {more}, which should cover {stats.expected_coverage(more):.0%}"
        if more is not None
        else f"Even {_MAX_SAMPLES:,} samples a context would not cover {ENOUGH:.0%}"
    )
    shrinks = (
        f", its gradient shrinks by κ = 1-(1-Z)^M (here {expected:.2f} on average), and {stats.method} loses its "
        f"advantage over dpg"
        if METHODS[stats.method].normalizes_per_context
        else ""
    )
    return Advice(
        "stop" if expected < _TOO_FEW and more is None else "careful",
        f"With M = {stats.samples} samples only {expected:.0%} of an epoch's contexts should have a satisfying one: "
        f"where M·Z is below 1 a context rarely contributes{shrinks}. {remedy}; or choose contexts in which the base "
        "can satisfy.",
    )


def _on_samples(stats: ProbeStatistics) -> list[Advice]:
    if stats.samples >= _MIN_SAMPLES or not METHODS[stats.method].normalizes_per_context:
        return []
    return [
        Advice(
            "careful",
            f"With M = {stats.samples} each weight of {stats.method} is divided by a mean over {stats.samples} "
            "samples, itself included. The fewer there are, the less the weights reflect how far the policy is from "
            f"the base; with M = 1 {stats.method} is reinforce. Raise num_generations to {_MIN_SAMPLES} or more, and "
            "lower contexts_per_epoch for it.",
        )
    ]


def _on_contexts(stats: ProbeStatistics, covered: float) -> list[Advice]:
    if covered >= min(_MIN_CONTEXTS, stats.contexts_per_epoch * ENOUGH):
        return []
    needed = math.ceil(stats.contexts_per_epoch * _MIN_CONTEXTS / max(covered, 1e-3))
    suggestion = f" to about {needed}" if needed <= _MAX_SAMPLES else ""
    return [
        Advice(
            "careful",
            f"A step would use about {covered:.1f} contexts: its gradient is noisy. Raise "
            f"contexts_per_epoch{suggestion}.",
        )
    ]


def _on_speed(stats: ProbeStatistics) -> list[Advice]:
    if stats.seconds_constraint <= stats.seconds_sampling:
        return []
    remedy = (
        f"raise check_workers (now {stats.workers}) if there are cores left, or make the check faster"
        if stats.workers
        else "make the check faster, or let workers do it (check_workers)"
    )
    return [
        Advice(
            "careful",
            f"The constraint takes {1000 * stats.seconds_constraint:.3g} ms a sample, sampling "
            f"{1000 * stats.seconds_sampling:.3g} ms: the run will wait for the checks. To change that, {remedy}.",
        )
    ]


def _on_length(stats: ProbeStatistics) -> list[Advice]:
    if stats.ended >= _FEW_ENDED:
        return []
    return [
        Advice(
            "careful",
            f"{1 - stats.ended:.0%} of the samples were cut at max_completion_length: raise it if the constraint needs "
            f"to see the end.",
        )
    ]


def _on_evaluations(stats: ProbeStatistics) -> list[Advice]:
    if stats.evaluations <= _MANY_EVALUATIONS:
        return []
    return [
        Advice(
            "careful",
            f"Evaluations take {stats.evaluations:.0%} of the run: raise evaluate_every (0 leaves out those along the "
            f"run), or lower evaluation_contexts or evaluation_samples.",
        )
    ]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
