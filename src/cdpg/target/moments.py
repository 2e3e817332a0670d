"""The multipliers λ of moments: E_c E_{p_c}[φ] = μ̄ with p_c ∝ a·b·exp(λ·φ), one λ for all contexts.

λ minimises the dual D(λ) = mean_c log Z_c(λ) − λ·μ̄, which is convex. Its gradient is mean_c E_{p_c}[φ] − μ̄, its Hessian
mean_c Cov_{p_c}(φ). Z_c(λ) is estimated from samples of each context with log weights log P_c/q at λ = 0, so that every
context counts equally, whatever its Z_c. Newton's method with a line search finds λ.

The moments that some λ reaches lie inside the mean over contexts of the convex hulls of φ: for one moment, strictly
between the means over contexts of its least and its largest value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cdpg.target.partition import effective_numbers

_STEPS = 200
_HALVINGS = 40
_EXACT, _NEAR = 1e-12, 1e-6
"""Newton's method ends when the moments are off by less than the first share of their range; they are reached if they
are off by less than the second."""
_NOTHING = 1e-13
"""A step that lowers the dual by no more than this is taken without a search: rounding hides the difference."""
_FAR = 300.0
"""λ·φ of the samples of a context that are this far apart: the moments are not reached by any λ."""
_FLAT = 1e-12
"""Eigenvalues of the Hessian below this share of the largest count as 0: no λ moves φ in their direction."""


@dataclass(frozen=True)
class MomentSamples:
    """Samples of some contexts, weighted for λ = 0."""

    log_weight: Tensor
    """``[context, sample]``: log P_c/q without the factors of the moments; −∞ where b = 0 or there is no verdict."""
    phi: Tensor
    """``[context, sample, moment]``; any number where the weight is 0."""
    valid: Tensor
    """``[context, sample]``: whether there is a verdict."""

    def covered(self) -> MomentSamples:
        """Without the contexts that have no weight at all; φ is 0 where the weight is."""
        kept = (self.log_weight > -math.inf).any(dim=1)
        log_weight, valid = self.log_weight[kept], self.valid[kept]
        phi = self.phi[kept].where(log_weight[..., None] > -math.inf, self.phi.new_zeros(()))
        return MomentSamples(log_weight, phi, valid)


@dataclass(frozen=True)
class MomentFit:
    """λ, and statistics of the samples that it was fitted to."""

    multipliers: tuple[float, ...]
    reached: tuple[float, ...]
    """The moments under λ."""
    natural: tuple[float, ...]
    """The moments at λ = 0: those of the base, filtered by the constraints and weighted by the rewards."""
    lowest: tuple[float, ...]
    highest: tuple[float, ...]
    """Between these some λ reaches every value, of each moment by itself."""
    ess: float
    """Effective sample size of the weights under λ, as a share of a context's samples; the harmonic mean over contexts.
    A context without any of the outputs that must become frequent has even weights, and should not count much."""
    contexts: int
    """Contexts with a sample of weight above 0."""
    samples: int
    """Samples with a verdict in these contexts."""


class Unreachable(Exception):
    """No λ gives these moments; ``fit`` has the nearest that were reached."""

    def __init__(self, fit: MomentFit) -> None:
        super().__init__("no multipliers give these moments")
        self.fit = fit


def fit_multipliers(samples: MomentSamples, means: Tensor) -> MomentFit:
    """λ for the given means, ``[moment]``; :class:`Unreachable` if there is none.

    At least one context has a sample of weight above 0.
    """
    found = samples.covered()
    lowest, highest = reachable(found)
    scale = (highest - lowest).where(highest > lowest, torch.ones_like(lowest))
    inside = bool(((means > lowest) & (means < highest)).all())
    multipliers = _newton(found, means, scale) if inside else torch.zeros_like(means)
    fit = summarize(found, multipliers)
    gap = (torch.tensor(fit.reached, dtype=means.dtype) - means).abs() / scale
    if not inside or bool((gap > _NEAR).any()):
        raise Unreachable(fit)
    return fit


def reachable(samples: MomentSamples) -> tuple[Tensor, Tensor]:
    """The infimum and the supremum of each moment over λ, ``[moment]``: means over contexts of min φ and max φ."""
    weighted = (samples.log_weight > -math.inf)[..., None]
    lowest = samples.phi.masked_fill(~weighted, math.inf).amin(dim=1).mean(dim=0)
    highest = samples.phi.masked_fill(~weighted, -math.inf).amax(dim=1).mean(dim=0)
    return lowest, highest


def summarize(samples: MomentSamples, multipliers: Tensor) -> MomentFit:
    """Statistics of the samples under some λ; every context has a sample of weight above 0."""
    lowest, highest = reachable(samples)
    log_w = samples.log_weight + samples.phi @ multipliers
    counts = samples.valid.sum(dim=1)
    return MomentFit(
        multipliers=tuple(multipliers.tolist()),
        reached=tuple(_moments(log_w, samples.phi)[0].mean(dim=0).tolist()),
        natural=tuple(_moments(samples.log_weight, samples.phi)[0].mean(dim=0).tolist()),
        lowest=tuple(lowest.tolist()),
        highest=tuple(highest.tolist()),
        ess=1 / float((counts / effective_numbers(log_w, samples.valid)).mean()),
        contexts=len(counts),
        samples=int(counts.sum()),
    )


def _newton(samples: MomentSamples, means: Tensor, scale: Tensor) -> Tensor:
    """The minimum of the dual, or a λ far out where it has none; φ is measured from the means, in ``scale``."""
    phi = (samples.phi - means) / scale
    multipliers = torch.zeros_like(means)
    value = _dual(samples.log_weight, phi, multipliers)
    for _ in range(_STEPS):
        expected, probability = _moments(samples.log_weight + phi @ multipliers, phi)
        gradient = expected.mean(dim=0)
        spread = (phi @ multipliers).abs().where(probability > 0, 0.0).max()
        if float(gradient.abs().max()) < _EXACT or float(spread) > _FAR:
            break
        step = -_pseudo_inverse(_covariance(phi, expected, probability)) @ gradient
        slope, size = float(gradient @ step), 1.0
        if -slope < _NOTHING:
            multipliers = multipliers + step
            value = _dual(samples.log_weight, phi, multipliers)
            continue
        for _ in range(_HALVINGS):
            new = _dual(samples.log_weight, phi, multipliers + size * step)
            if new <= value + 1e-4 * size * slope:
                break
            size /= 2
        else:
            break  # rounding hides what is left to gain
        multipliers, value = multipliers + size * step, new
    return multipliers / scale


def _dual(log_weight: Tensor, phi: Tensor, multipliers: Tensor) -> float:
    """mean_c log Z_c(λ), with the given means subtracted from φ."""
    return float((log_weight + phi @ multipliers).logsumexp(dim=1).mean())


def _moments(log_w: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
    """E_{p_c}[φ], ``[context, moment]``, and the probability of each sample, ``[context, sample]``."""
    probability = log_w.softmax(dim=1)
    return (probability[..., None] * phi).sum(dim=1), probability


def _covariance(phi: Tensor, expected: Tensor, probability: Tensor) -> Tensor:
    """mean_c Cov_{p_c}(φ), ``[moment, moment]``."""
    centred = phi - expected[:, None]
    return torch.einsum("cs,csi,csj->ij", probability, centred, centred) / len(phi)


def _pseudo_inverse(hessian: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(hessian)
    kept = values > _FLAT * values.max().clamp(min=torch.finfo(values.dtype).tiny)
    inverse = torch.where(kept, 1 / values.where(kept, torch.ones_like(values)), torch.zeros_like(values))
    found: Tensor = vectors @ torch.diag(inverse) @ vectors.T
    return found
