"""The partition function of a context from all samples ever drawn for it, shrunk towards the mean over contexts.

The mean of P_c(x)/q(x|c) over the M samples of an epoch is a poor divisor for these same samples: it is noisy, and it
is large where the sample itself is likely under the target, which pulls the gradient towards q. Two things reduce this.

- *Leave one out*: the divisor of a sample is estimated from the others. Given these, the expected weight is the exact
  one times a factor that is the same for all outcomes of the context. So the direction of the context's gradient is
  right whatever M is.
- *Shrinkage*: the others may be few, or none of them may satisfy. So ``strength`` samples are added whose ratio is the
  mean over contexts. This is the empirical Bayes estimate: ``strength`` is the variance of a ratio within a context
  over the variance of Z_c between contexts.

Ratios of earlier epochs count like those of this one, since each is unbiased for Z_c whatever q was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cdpg.target.noise import sampling_noise

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_STRENGTH = 1.0
"""The mean over contexts counts as one sample at least: a context none of whose other samples satisfies needs it."""


@dataclass(frozen=True)
class Prior:
    """What is known of a context before it is sampled."""

    mean: float
    """Z over all contexts."""
    strength: float | None
    """How many samples of the context the mean is worth; None while nothing is known of how contexts differ."""


@dataclass(frozen=True)
class PooledPartition:
    """Sums of P_c(x)/q(x|c) over all samples so far, by context; immutable."""

    sums: Mapping[int, tuple[float, int]] = field(default_factory=dict)
    """By index of the context: the sum of its ratios, and how many they are."""
    within: float | None = None
    """Variance of a ratio within a context, in the latest epoch."""
    between: tuple[float, int] = (0.0, 0)
    """Sum over epochs of the variance of Z_c between contexts, sampling noise subtracted, and the number of epochs."""

    def add(self, contexts: Sequence[int], ratio: Tensor, valid: Tensor) -> PooledPartition:
        """With the samples of an epoch, ``[context, sample]``; ``contexts`` has the index of each context.

        Those that are not ``valid`` count nowhere, but every context has its sums then.
        """
        sums = dict(self.sums)
        for index, total, count in zip(contexts, _sums(ratio, valid).tolist(), valid.sum(dim=1).tolist(), strict=True):
            before, number = sums.get(index, (0.0, 0))
            sums[index] = (before + total, number + int(count))
        several = valid.sum(dim=1) > 1  # of a single sample the variance within its context is undefined
        if int(several.sum()) < 2:
            return PooledPartition(sums, self.within, self.between)
        within, between = _variances(ratio[several], valid[several])
        return PooledPartition(sums, within, (self.between[0] + between, self.between[1] + 1))

    def prior(self) -> Prior | None:
        """The prior for a new context, from the samples so far; None before any satisfied."""
        total, count = (sum(column) for column in zip(*self.sums.values(), strict=True)) if self.sums else (0.0, 0)
        if not total > 0:
            return None
        spread = self.between[0] / self.between[1] if self.between[1] else 0.0
        if self.within is None or not spread > 0:
            return Prior(total / count, None)
        return Prior(total / count, max(_LEAST_STRENGTH, self.within / spread))

    def log_z(self, contexts: Sequence[int], log_ratio: Tensor, prior: Prior | None) -> Tensor:
        """log Ẑ_c for each sample, ``[context, sample]``, from the others of its context and the prior.

        The samples are among those that were added. Without a prior it is that of all of these, this one included.
        """
        ratio = log_ratio.exp()
        prior = prior or self.prior() or Prior(0.0, None)
        if prior.strength is None:
            return ratio.new_full(ratio.shape, prior.mean).log()
        total = ratio.new_tensor([self.sums[index][0] for index in contexts])[:, None]
        count = ratio.new_tensor([self.sums[index][1] for index in contexts])[:, None]
        others = (total - ratio).clamp(min=0.0)  # rounding may make it negative
        return ((others + prior.strength * prior.mean) / (count - 1 + prior.strength)).log()

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        sums = {str(index): list(value) for index, value in self.sums.items()}
        return {"sums": sums, "within": self.within, "between": list(self.between)}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> PooledPartition:
        """What :meth:`to_mapping` gave."""
        sums = {int(index): (float(total), int(count)) for index, (total, count) in values["sums"].items()}
        spread, epochs = values["between"]
        return cls(sums, values["within"], (float(spread), int(epochs)))


def _sums(ratio: Tensor, valid: Tensor) -> Tensor:
    return ratio.masked_fill(~valid, 0.0).sum(dim=1)


def _variances(ratio: Tensor, valid: Tensor) -> tuple[float, float]:
    """The mean variance of a ratio within a context, and the variance of Z_c between contexts without that noise."""
    count = valid.sum(dim=1).to(ratio)
    z = _sums(ratio, valid) / count
    noise = sampling_noise(ratio, valid, z, count)
    return float((noise * count).mean()), float(z.var() - noise.mean())
