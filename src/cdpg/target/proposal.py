"""Estimates for the policy from samples of another model: mathematics alone."""

from __future__ import annotations

from torch import Tensor


def mean_under_policy(values: Tensor, log_policy: Tensor, log_q: Tensor, valid: Tensor) -> Tensor:
    """E_π of ``values`` from samples of q, without bias: the mean of (π/q) · value over the valid samples.

    All are ``[context, sample]``. ``log_policy`` may hold anything where the value is 0.
    """
    weighted = ((log_policy - log_q).exp() * values).where(valid & (values != 0), values.new_zeros(()))
    return weighted.sum() / valid.sum()


def log_ratio_quantiles(log_q: Tensor, log_recomputed: Tensor) -> tuple[float, float, float]:
    """The quantiles 0.05, 0.5 and 0.95 of log q/q′ over ``[sample]``: q as an engine gives it, q′ computed again."""
    levels = log_q.new_tensor([0.05, 0.5, 0.95])
    low, median, high = (log_q - log_recomputed).quantile(levels).tolist()
    return low, median, high
