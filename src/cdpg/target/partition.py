"""The partition function Z_c: its estimate, importance weights, and statistics over contexts.

Everything is a function of the importance ratio P_c(x)/q(x|c) of M samples for each of N contexts,
``log_ratio[context, sample]``. Samples without a verdict are not ``valid`` and count nowhere; a context without any
valid sample is left out of every mean over contexts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdpg.target.noise import sampling_noise, without_noise

if TYPE_CHECKING:
    from torch import Tensor


def log_partition(log_ratio: Tensor, valid: Tensor) -> Tensor:
    """log Ẑ_c with Ẑ_c = mean_j P_c(x_j)/q(x_j|c), unbiased for Z_c; ``[context]``, −∞ where no sample satisfies."""
    return log_ratio.masked_fill(~valid, -math.inf).logsumexp(dim=1) - valid.sum(dim=1).to(log_ratio).log()


def weights(log_ratio: Tensor, log_z: Tensor, epsilon: float) -> Tensor:
    """P_c(x) / ((Z + ε) q(x|c)), ``[context, sample]``, for Z per sample, per context (``[context]``) or one for all.

    A context without a satisfying sample has weights 0 and stays in the mean. With ε = 0 everything stays in log space:
    Z may have any scale, as with moments and rewards.
    """
    if epsilon == 0:
        log_weight = log_ratio - (log_z[:, None] if log_z.dim() == 1 else log_z)
        return log_weight.exp().masked_fill(log_ratio == -math.inf, 0.0)
    z = log_z.exp() + epsilon
    weight = log_ratio.exp() / (z[:, None] if z.dim() == 1 else z)
    return weight.masked_fill(log_ratio == -math.inf, 0.0)


def effective_numbers(log_ratio: Tensor, valid: Tensor) -> Tensor:
    """(Σw)²/Σw² of each context, ``[context]``; NaN where no sample satisfies."""
    log_w = log_ratio.masked_fill(~valid, -math.inf)
    weight = (log_w - log_w.amax(dim=1, keepdim=True)).exp()  # of any scale
    return weight.sum(dim=1).square() / weight.square().sum(dim=1)


@dataclass(frozen=True)
class PartitionSummary:
    """Statistics of the partition estimates of some contexts."""

    mean: float
    """Mean of Ẑ_c over contexts."""
    nstd: float | None
    """std_c(Ẑ_c) / mean_c(Ẑ_c), raw: sampling noise inflates it."""
    nstd_corrected: float | None
    """The same with the within-context variance s²/M subtracted, its mean over the contexts with two valid samples or
    more; None where there is none."""
    coverage: float
    """Share of contexts with at least one satisfying sample."""
    ess: float | None
    """Effective sample size (Σw)²/Σw² of the covered contexts, divided by the samples they had; their mean."""


def summarize_partition(log_ratio: Tensor, valid: Tensor) -> PartitionSummary:
    """Mean, normalised deviation, coverage and effective sample size of ``[context, sample]`` importance ratios.

    The normalised deviation is that of the paper's appendix A.5.
    """
    judged = valid.any(dim=1)
    ratio = log_ratio.exp().masked_fill(~valid, 0.0)[judged]
    valid = valid[judged]
    if not len(ratio):
        return PartitionSummary(mean=0.0, nstd=None, nstd_corrected=None, coverage=0.0, ess=None)
    count = valid.sum(dim=1)
    z = ratio.sum(dim=1) / count
    covered = ratio.sum(dim=1) > 0
    mean = float(z.mean())
    variance = float(z.var(correction=0))
    several = count > 1
    noise = sampling_noise(ratio[several], valid[several], z[several], count[several])
    within = float(noise.mean()) if len(noise) else None
    between = None if within is None else float(without_noise(variance, within))
    ess = effective_numbers(log_ratio[judged][covered], valid[covered]) / count[covered]
    return PartitionSummary(
        mean=mean,
        nstd=variance**0.5 / mean if mean > 0 else None,
        nstd_corrected=between**0.5 / mean if mean > 0 and between is not None else None,
        coverage=float(covered.double().mean()),
        ess=float(ess.mean()) if len(ess) else None,
    )
