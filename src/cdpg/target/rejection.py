"""Quasi-rejection sampling (Eikema et al., 2022): samples of p_c from samples of a proposal that comes near it.

A sample x ~ π is accepted with probability min(1, P_c(x)/(β π(x|c))). What is accepted is distributed as
p_β ∝ min(P_c, β π): the larger β, the nearer to p_c, and the fewer are accepted. Where β is at least the largest
P_c/π, it is p_c itself.

Everything is a function of the importance ratios P_c(x)/π(x|c) of samples of π, ``log_ratio[sample]``, −∞ where b = 0;
at least one is above it. The figures are estimated from the samples: they converge to the true ones, except that they
cannot include outputs that π leaves out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdpg.target.partition import exp

if TYPE_CHECKING:
    from torch import Tensor

BOUND = 0.05
"""The total variation to p that is allowed by default."""
_PLAIN = 100.0
"""β is shown by its logarithm if that is larger than this, or smaller than its negative."""
_HALVINGS = 60
"""Steps in which β is found, each of which halves the interval of log β."""


@dataclass(frozen=True)
class RejectionSummary:
    """Estimates for one β."""

    log_beta: float
    acceptance: float
    """Z_β/β, with Z_β = E_π min(P_c/π, β): the probability that a sample of π is accepted."""
    total_variation: float
    """TV(p_c, p_β) = ½ Σ_x |p_c(x) − p_β(x)|."""
    kl: float
    """KL(p_c, p_β) = E_p[max(0, log P_c/(β π))] + log Z_β/Z_c."""
    z: float
    """Ẑ_c, the mean of P_c/π: the share of the base's samples that would be accepted. With moments or rewards it may
    have any scale, and be 0 or infinite where a number cannot hold it."""

    @property
    def beta(self) -> float:
        """β; 0 or infinite where a number cannot hold it."""
        return exp(self.log_beta)


def beta_as_text(log_beta: float) -> str:
    """β for the user: with moments or rewards it may have any scale."""
    return f"{exp(log_beta):.4g}" if abs(log_beta) < _PLAIN else f"exp({log_beta:.1f})"


def log_acceptance(log_ratio: Tensor, log_beta: float) -> Tensor:
    """log min(1, P_c/(β π)), ``[sample]``."""
    return (log_ratio - log_beta).clamp(max=0.0)


def total_variation(log_ratio: Tensor, log_beta: float) -> float:
    """TV(p_c, p_β), estimated with self-normalised weights for both."""
    ideal, accepted = log_ratio.softmax(dim=0), log_ratio.clamp(max=log_beta).softmax(dim=0)
    return float((ideal - accepted).abs().sum()) / 2


def summarize_rejection(log_ratio: Tensor, log_beta: float) -> RejectionSummary:
    """All estimates for one β."""
    log_count = math.log(len(log_ratio))
    log_z = float(log_ratio.logsumexp(dim=0)) - log_count
    log_z_beta = float(log_ratio.clamp(max=log_beta).logsumexp(dim=0)) - log_count
    cut = (log_ratio - log_beta).clamp(min=0.0)
    return RejectionSummary(
        log_beta=log_beta,
        acceptance=math.exp(log_z_beta - log_beta),
        total_variation=total_variation(log_ratio, log_beta),
        kl=max(0.0, float((log_ratio.softmax(dim=0) * cut).sum()) + log_z_beta - log_z),
        z=exp(log_z),
    )


def choose_log_beta(log_ratio: Tensor, bound: float) -> float:
    """log of the smallest β whose estimated total variation is at most ``bound``.

    The total variation falls with β: p_c/p_β rises with P_c/π, and a larger β moves mass to where P_c/π is larger.
    Below the smallest ratio of a satisfying sample it is constant, above the largest it is 0.
    """
    ratios = log_ratio[log_ratio > -math.inf]
    low, high = float(ratios.min()), float(ratios.max())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if total_variation(log_ratio, middle) <= bound:
            high = middle
        else:
            low = middle
    return high
