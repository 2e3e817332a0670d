"""The samples of one model on the held-out contexts, and its metrics as statistics over contexts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdpg.contexts.contexts import Context
from cdpg.evaluation.measures import Measured
from cdpg.evaluation.statistics import Array, Statistic, context_means, deviation_statistic, mean_statistic, quotient
from cdpg.rollout.rollout import Rollout
from cdpg.target.divergence import kl_policy_base, kl_target_policy
from cdpg.target.noise import sampling_noise
from cdpg.target.partition import exp, log_largest

SHOWN = 4
"""Outputs of a context that are shown in an example."""


@dataclass(frozen=True)
class Outcome:
    """Ancestral samples of a model with verdicts, scores and measurements; contexts are those of all processes."""

    contexts: tuple[Context, ...]
    blocks: tuple[Rollout, ...]
    """The samples, some contexts at a time, in the order of the contexts; every sample is scored by the base."""
    texts: tuple[tuple[str, ...], ...]
    """``[context][sample]``."""
    beams: tuple[str, ...] | None
    """The output of beam search for each context, if the task uses it."""
    beam_b: tuple[float, ...] | None
    """The constraint's verdict on each of them; NaN without one."""
    shown_ids: tuple[tuple[list[int], ...], ...]
    """``[context][output]``: the token ids of the outputs that may be shown, the beam's first if there is one."""
    measured: Measured
    """The task's own figures, of the beams if there are any, else of the samples."""
    tokens: Counter[int]
    """How often each token was sampled."""
    ended: Tensor
    """``[context, sample]``: 1 where an end token or the stop rule ended a sample, 0 where the limit cut it."""
    unmeasured: Counter[str] = field(default_factory=Counter)
    """How often measuring an output failed for a reason other than the text, by kind."""

    def table(self, name: str) -> Tensor:
        """A ``[context, sample]`` tensor of all blocks."""
        return torch.cat([getattr(block, name) for block in self.blocks])

    def features(self) -> dict[str, Array]:
        """The task's features, ``[context, output]``; of samples, those without a verdict have none (NaN)."""
        if self.beams is not None:
            return dict(self.measured.features)
        valid = self.table("valid").numpy()
        return {name: np.where(valid, values, np.nan) for name, values in self.measured.features.items()}

    def factors(self) -> dict[str, Array]:
        """The values of the target's moments and rewards, ``[context, sample]``; NaN without a verdict."""
        blocks = [block.by_factor() for block in self.blocks]
        valid = self.table("valid")
        return {
            name: torch.cat([block[name] for block in blocks]).masked_fill(~valid, math.nan).numpy()
            for name in (blocks[0] if blocks else ())
        }


def without_token_scores(block: Rollout) -> Rollout:
    """A rollout without the log-probabilities of single tokens, which are large and no longer needed.

    They are replaced by NaN, so that a later use shows.
    """
    nothing = torch.full((1, 1, 1), math.nan, dtype=torch.float64).expand(block.samples.tokens.shape)
    return replace(block, samples=replace(block.samples, token_log_q=nothing), token_log_a=nothing)


def statistics_of(outcome: Outcome, epsilon: float) -> dict[str, Statistic]:
    """All metrics of one model that depend on its own samples only."""
    b, valid, log_q, log_a, log_p = (outcome.table(name) for name in ("b", "valid", "log_q", "log_a", "log_p"))
    is_tilted = bool(outcome.blocks) and outcome.blocks[0].is_tilted
    epsilon = outcome.blocks[0].epsilon(epsilon) if outcome.blocks else epsilon
    none = ~valid.any(dim=1)

    def over_samples(values: Tensor) -> Statistic:
        return mean_statistic(context_means(values.double().masked_fill(~valid, math.nan).numpy()))

    def over_contexts(values: Tensor) -> Statistic:
        return mean_statistic(values.double().masked_fill(none, math.nan).numpy())

    ratio = (log_p - log_q).exp().where(valid, torch.zeros_like(log_q))
    of_z = (
        partition_of_any_scale(log_p - log_q, valid)
        if is_tilted
        else partition_statistics(ratio.numpy(), valid.numpy())
    )
    failed, inapplicable = outcome.table("failed"), outcome.table("inapplicable")
    found = {
        "satisfaction": over_samples(b),
        "kl_target_policy": over_contexts(kl_target_policy(log_p, log_q, valid, epsilon)),
        "kl_policy_base": over_contexts(kl_policy_base(log_q, log_a, valid)),
        "coverage": over_contexts(((b > 0) & valid).any(dim=1)),
        **of_z,
        "length": over_samples(outcome.table("lengths")),
        "ended": over_samples(outcome.ended),
        "checks_failed": mean_statistic(context_means(failed.double().masked_fill(inapplicable, math.nan).numpy())),
        "not_applicable": mean_statistic(inapplicable.double().mean(dim=1).numpy()),
    }
    if outcome.beam_b is not None:
        found["satisfaction_beam"] = mean_statistic(np.array(outcome.beam_b, dtype=np.float64))
    for name, values in (outcome.factors() | outcome.features()).items():
        found[name] = mean_statistic(context_means(values))
    return {**found, **outcome.measured.corpus}


def partition_estimates(outcome: Outcome) -> list[float]:
    """Ẑ_c of each context from the model's samples; NaN if none has a verdict."""
    ratio = torch.cat([block.log_ratio for block in outcome.blocks]).exp()
    valid = outcome.table("valid")
    estimates: list[float] = (ratio.where(valid, torch.zeros_like(ratio)).sum(dim=1) / valid.sum(dim=1)).tolist()
    return estimates


def ideal_means(outcomes: Sequence[Outcome], weight: Array) -> dict[str, Array]:
    """E_{p_c}[f] of features of samples, ``[context]``, from weighted samples of one or more models.

    ``weight`` is ``[context, sample]``, of the samples of all ``outcomes``; NaN for a context without a weight.
    """
    tables = [_features_of_samples(outcome) for outcome in outcomes]
    return {
        name: context_means(np.concatenate([table[name] for table in tables], axis=1), weight) for name in tables[0]
    }


def model_means(outcome: Outcome) -> dict[str, Array]:
    """The same features of a model's own samples, ``[context]``."""
    return {name: context_means(values) for name, values in _features_of_samples(outcome).items()}


def _features_of_samples(outcome: Outcome) -> dict[str, Array]:
    """What is known of single samples, ``[context, sample]``; NaN without a verdict."""
    lengths = outcome.table("lengths").double().masked_fill(~outcome.table("valid"), math.nan)
    features = outcome.factors() | {"length": lengths.numpy()}
    return features | outcome.features() if outcome.beams is None else features


def partition_statistics(ratio: Array, valid: Array) -> dict[str, Statistic]:
    """Of Ẑ_c = mean_j P_c(x_j)/q(x_j|c): mean, deviation raw and corrected, effective sample size."""
    count = valid.sum(axis=1)
    judged = count > 0
    ratio, count, kept = ratio[judged], count[judged], valid[judged]
    total, squares = ratio.sum(axis=1), (ratio**2).sum(axis=1)
    z = total / count
    several, noise = count > 1, np.full(len(z), np.nan)
    noise[several] = sampling_noise(ratio[several], kept[several], z[several], count[several])
    ess = quotient(np.stack([total**2 / count, squares], axis=1))
    found = {
        "z_mean": mean_statistic(z),
        "z_nstd": deviation_statistic(z, np.zeros_like(z)),
        "z_nstd_corrected": deviation_statistic(z, noise),
        "ess": mean_statistic(ess),
    }
    return {name: _spread_out(statistic, judged) for name, statistic in found.items()}


def partition_of_any_scale(log_ratio: Tensor, valid: Tensor) -> dict[str, Statistic]:
    """The same where Z_c may be too large or too small for a number, as with moments and rewards.

    Only the mean of Z is then unknown, or 0.
    """
    log_ratio = log_ratio.masked_fill(~valid, -math.inf)
    own = log_ratio.amax(dim=1, keepdim=True).nan_to_num(neginf=0.0)
    by_context = partition_statistics((log_ratio - own).exp().numpy(), valid.numpy())
    log_scale = log_largest(log_ratio)
    found = partition_statistics((log_ratio - log_scale).exp().numpy(), valid.numpy())
    scale, terms = exp(log_scale), found["z_mean"].terms
    scaled = terms * [scale, 1.0] if math.isfinite(scale) else np.zeros_like(terms)
    return found | {"ess": by_context["ess"], "z_mean": Statistic(scaled, found["z_mean"].of)}


def _spread_out(statistic: Statistic, judged: Array) -> Statistic:
    """Rows of zeros for the contexts that were left out; they add nothing to the sums."""
    terms = np.zeros((len(judged), statistic.terms.shape[1]))
    terms[judged] = statistic.terms
    return Statistic(terms, statistic.of)


def token_ranks(outcome: Outcome) -> list[int]:
    """Counts of the tokens that occurred, the most frequent first."""
    return sorted(outcome.tokens.values(), reverse=True)


def outputs_of(outcome: Outcome, context: int) -> list[dict[str, Any]]:
    """Outputs of a context to show: the beam's, then samples, each with its verdict, or None, and its remarks."""
    beams: list[dict[str, Any]] = []
    if outcome.beams is not None and outcome.beam_b is not None:
        b_of_beam = outcome.beam_b[context]
        known = None if math.isnan(b_of_beam) else b_of_beam
        beams = [{"text": outcome.beams[context], "b": known, "decoding": "beam"}]
    b, valid = outcome.table("b")[context].tolist(), outcome.table("valid")[context].tolist()
    samples = [
        {"text": text, "b": verdict if known else None, "decoding": "ancestral"}
        for text, verdict, known in zip(outcome.texts[context], b, valid, strict=True)
    ]
    measured = samples if outcome.beams is None else beams
    for name, remarks in outcome.measured.remarks.items():
        for shown, remark in zip(measured, remarks[context], strict=True):
            shown[name] = remark
    with_ids = zip(beams + samples, outcome.shown_ids[context], strict=False)
    return [{**output, "token_ids": ids} for output, ids in with_ids]
