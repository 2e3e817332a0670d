"""f-divergences between policy and target: the pseudo-reward r_f of each, a function of t = p_c(x)/π(x|c).

``∇D_f(π‖p_c) = −E_π[r_f(t) ∇log π]`` (Go et al., 2023). A constant may be added to r_f without a change of the
expectation. Everything is given by log t, −∞ where b = 0. Nothing here loads torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Divergence = Literal["kl", "js", "tv", "chi2", "alpha", "reverse_kl"]
PseudoReward = Callable[["Tensor"], "Tensor"]


def kl(log_t: Tensor) -> Tensor:
    """KL(p, π): t."""
    return log_t.exp()


def jensen_shannon(log_t: Tensor) -> Tensor:
    """Jensen-Shannon, KL(π, m) + KL(p, m) with m = (π + p)/2: log(1 + t) − log 2."""
    return log_t.clamp(min=0.0) + (-log_t.abs()).exp().log1p() - math.log(2)


def total_variation(log_t: Tensor) -> Tensor:
    """Total variation, ½ Σ |π − p|: ½ sign(t − 1)."""
    return 0.5 * log_t.sign()


def chi_squared(log_t: Tensor) -> Tensor:
    """χ²(p, π) = Σ (p − π)²/π: t²."""
    return (2 * log_t).exp()


def amari(alpha: float) -> PseudoReward:
    """The α-divergence of Amari, (1 − Σ p^(1−α) π^α)/(α(1−α)): (t^(1−α) − 1)/(1 − α).

    α → 0 is KL(p, π), α → 1 is KL(π, p).
    """
    return lambda log_t: ((1 - alpha) * log_t).expm1() / (1 - alpha)


def reverse_kl(log_t: Tensor) -> Tensor:
    """KL(π, p): log t − 1; −∞ where b = 0."""
    return log_t - 1


def pseudo_reward(divergence: Divergence, alpha: float) -> PseudoReward:
    """r_f of a divergence; ``alpha`` is that of ``alpha``."""
    known: dict[str, PseudoReward] = {
        "kl": kl,
        "js": jensen_shannon,
        "tv": total_variation,
        "chi2": chi_squared,
        "alpha": amari(alpha),
        "reverse_kl": reverse_kl,
    }
    return known[divergence]
