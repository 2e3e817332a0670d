"""Divergences of a policy from the target and from the base (the paper's appendix A.1)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from cdpg.target.partition import log_partition, weights


def kl_target_policy(
    log_target: Tensor, log_policy: Tensor, valid: Tensor, epsilon: float = 1e-8, log_q: Tensor | None = None
) -> Tensor:
    """KL(p_c, π) of each context by the paper's Algorithm 2, from samples of q; NaN if no sample satisfies.

    ``mean_j w_j (log P_c(x_j)/π(x_j|c) − log Ẑ_c)`` with ``w = P_c / ((Ẑ_c + ε) q)``; ``[context, sample]`` to
    ``[context]``. By default q is π; then it cannot exceed log M. Samples with P_c = 0 contribute 0; ``log_policy`` may
    hold anything there, if ``log_q`` is given.
    """
    log_ratio = log_target - (log_policy if log_q is None else log_q)
    log_z = log_partition(log_ratio, valid)
    weight = weights(log_ratio, log_z, epsilon)
    gap = torch.where((weight > 0) & valid, log_target - log_policy - log_z[:, None], torch.zeros_like(log_ratio))
    return (weight * gap).sum(dim=1).div(valid.sum(dim=1)).masked_fill(log_z == -math.inf, math.nan)


def kl_policy_base(log_policy: Tensor, log_base: Tensor, valid: Tensor) -> Tensor:
    """KL(π, a) of each context from samples of π: mean_j log π(x_j|c) − log a(x_j|c); NaN if none is valid."""
    gap = (log_policy - log_base).where(valid, torch.zeros_like(log_policy))
    return gap.sum(dim=1) / valid.sum(dim=1)


def mean_over_covered(per_context: Tensor) -> tuple[float | None, float]:
    """The mean over contexts that have a value, or None if none has, and their share (coverage)."""
    covered = ~per_context.isnan()
    share = float(covered.double().mean()) if len(per_context) else 0.0
    return (float(per_context[covered].mean()) if covered.any() else None), share


def mean_by_context(
    values: Tensor, owners: Tensor, contexts: int, total: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Tensor:
    """The mean of ``[sample]`` values over the samples of each context, ``[context]``; NaN for a context without any.

    ``owners`` has the context of each sample; ``total`` sums a tensor over all processes. With values
    log π(x|c) − log a(x|c) on exact samples of p_c this is the gain, KL(p_c, a) − KL(p_c, π), without bias.
    """
    sums = values.new_zeros(2, contexts)
    sums.index_add_(1, owners, torch.stack([values, torch.ones_like(values)]))
    sums = total(sums)
    return sums[0] / sums[1]


def weighted_mean_by_context(
    values: Tensor,
    log_weight: Tensor,
    owners: Tensor,
    every: tuple[Tensor, Tensor],
    contexts: int,
    total: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Tensor:
    """The same with self-normalised weights, exp(``log_weight``) over their sum in the context.

    ``every`` has log weights and owners of the samples of all processes. With samples of the base that were accepted
    with probability b and the weights exp(λφ + r/β) it estimates the mean under p_c, with a bias of order 1/n.
    """
    log_sums = torch.full((contexts,), -math.inf, dtype=values.dtype)
    for context in every[1].unique().tolist():
        log_sums[context] = every[0][every[1] == context].logsumexp(dim=0)
    sums = values.new_zeros(contexts).index_add_(0, owners, values * (log_weight - log_sums[owners]).exp())
    return total(sums).masked_fill(log_sums == -math.inf, math.nan)


def kl_target_policy_pooled(log_target: Tensor, log_models: Tensor, valid: Tensor) -> Tensor:
    """KL(p_c, π_k) of each model k from one pool of samples of all models; NaN if no sample of the pool satisfies.

    The pool holds equally many samples of every model, so that it is drawn from the mixture q̄ = mean_k π_k (balance
    heuristic). With w ∝ P_c/q̄ normalised over the pool, KL(p_c, π_k) = Σ_j w_j (log P_c(x_j) − log Ẑ_c − log π_k(x_j)).
    ``log_target`` and ``valid`` are ``[context, pool]``, ``log_models`` is ``[model, context, pool]`` and may hold
    anything where P_c = 0; the result is ``[model, context]``.
    """
    log_ratio = _log_ratio_to_mixture(log_target, log_models, valid)
    log_z = log_partition(log_ratio, valid)
    gap = (log_target - log_z[:, None] - log_models).where(log_ratio > -math.inf, torch.zeros_like(log_models))
    return (log_ratio.softmax(dim=1) * gap).sum(dim=2)  # softmax is NaN where no sample satisfies


def pool_weights(log_target: Tensor, log_models: Tensor, valid: Tensor) -> Tensor:
    """P_c/q̄ of each sample of such a pool, normalised in each context, ``[context, pool]``; NaN if none satisfies."""
    return _log_ratio_to_mixture(log_target, log_models, valid).softmax(dim=1)


def _log_ratio_to_mixture(log_target: Tensor, log_models: Tensor, valid: Tensor) -> Tensor:
    """log P_c/q̄, ``[context, pool]``; −∞ where P_c = 0."""
    log_mixture = log_models.logsumexp(dim=0) - torch.tensor(float(len(log_models)), dtype=log_models.dtype).log()
    counts = valid & (log_target > -math.inf)
    return (log_target - log_mixture).masked_fill(~counts, -math.inf)
