"""Models on held-out contexts: every figure as a function of the contexts that are drawn, so that it can be resampled.

An interval is made by drawing as many contexts as there are, with replacement, a thousand times, and computing the
figure anew on each draw; a difference or a ratio of two models is computed on the same draws, and so is paired.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from reference.methods import Settings
from reference.model import Array, Context, Parameters, Sequences, token_log_probs
from reference.randomness import uniform
from reference.target import (
    Judge,
    Judged,
    divided,
    effective_samples,
    kl_policy_base,
    kl_target_policy,
    noise_of_z,
    sampled,
)

Figure = Callable[[Array], Array]
"""``[..., draw]`` indices of contexts to ``[...]`` values; NaN where there is none."""

BLOCK = 64
"""Contexts that are sampled together; the block's number takes the place of the epoch's."""
RESAMPLES, CONFIDENCE = 1000, 0.95
EXAMPLES, SHOWN = 8, 4


def outcome(
    policy: Parameters, base: Parameters, contexts: Sequence[Context], judge: Judge, settings: Settings
) -> list[Judged]:
    """A model's samples, block by block."""
    return [
        sampled(
            policy, base, contexts[start : start + BLOCK], judge, settings.seed, "evaluation", number,
            settings.evaluation_samples, settings.max_completion_length,
        )
        for number, start in enumerate(range(0, len(contexts), BLOCK))
    ]  # fmt: skip


def per_context(blocks: Sequence[Judged], of: Callable[[Judged], Array]) -> Array:
    """A figure of each context, or of each of its samples."""
    return np.concatenate([of(block) for block in blocks])


# --- figures ---


def mean_of(values: Array) -> Figure:
    """The mean over the contexts that have a value."""

    def of(drawn: Array) -> Array:
        known = ~np.isnan(values[drawn])
        return divided(np.where(known, values[drawn], 0.0).sum(axis=-1), known.sum(axis=-1))

    return of


def deviation_of(z: Array, noise: Array) -> Figure:
    """std_c(Z_c)/mean_c(Z_c) with the mean noise subtracted from the variance, over contexts with a judged sample."""

    def of(drawn: Array) -> Array:
        mean, within = mean_of(z)(drawn), mean_of(noise)(drawn)
        gaps = (z[drawn] - mean[..., None]) ** 2
        variance = divided(np.nan_to_num(gaps).sum(axis=-1), (~np.isnan(gaps)).sum(axis=-1))
        return divided(np.sqrt(np.maximum(0.0, variance - within)), mean)

    return of


def over_valid(of: Callable[[Judged], Array]) -> Callable[[Judged], Array]:
    """The mean of a figure of samples over the valid samples of each context."""
    return lambda block: divided((of(block) * block.valid).sum(axis=1), block.valid.sum(axis=1))


def distinct_2(block: Judged) -> Array:
    """Distinct bigrams over bigrams of each text; 0 for a text of fewer than two words."""
    shares = []
    for text in block.texts:
        words = text.split()
        bigrams = list(pairwise(words))
        shares.append(len(set(bigrams)) / len(bigrams) if bigrams else 0.0)
    return np.array(shares).reshape(block.b.shape)


def figures(blocks: Sequence[Judged], settings: Settings) -> dict[str, Figure]:
    """Every figure of one model that its own samples give."""
    z, noise = per_context(blocks, lambda block: block.z), per_context(blocks, noise_of_z)
    judged = ~np.isnan(z)
    covered = per_context(blocks, lambda block: (block.b > 0).any(axis=1))
    means = {
        "satisfaction": per_context(blocks, over_valid(lambda block: block.b)),
        "kl_target_policy": per_context(blocks, lambda block: kl_target_policy(block, settings.partition_epsilon)),
        "kl_policy_base": per_context(blocks, kl_policy_base),
        "coverage": np.where(judged, covered, np.nan),
        "z_mean": z,
        "ess": per_context(blocks, effective_samples),
        "length": per_context(blocks, over_valid(lambda block: block.lengths)),
        "ended": per_context(blocks, over_valid(lambda block: block.ended)),
        "distinct_2": per_context(blocks, over_valid(distinct_2)),
    }
    return {
        **{name: mean_of(values) for name, values in means.items()},
        "z_nstd": deviation_of(z, np.zeros_like(z)),
        "z_nstd_corrected": deviation_of(z, noise),
    }


def pooled(models: Mapping[str, Parameters], outcomes: Mapping[str, Sequence[Judged]]) -> dict[str, Array]:
    """KL(p_c, π_k) of each model from one pool of samples of all models, with balance-heuristic weights.

    q̄ = mean_k π_k; Ẑ_c = mean_j P/q̄; w_j = (P/q̄) / Σ (P/q̄); KL = Σ_j w_j (log P − log Ẑ_c − log π_k).
    """
    found: dict[str, list[Array]] = {name: [] for name in models}
    for blocks in zip(*outcomes.values(), strict=True):
        b, valid, log_a = (np.concatenate([getattr(block, name) for block in blocks], axis=1) for name in FIELDS)
        log_models = {
            name: np.concatenate(
                [token_log_probs(model, block.x).sum(axis=1).reshape(block.b.shape) for block in blocks], axis=1
            )
            for name, model in models.items()
        }
        mixture = np.mean([np.exp(log_model) for log_model in log_models.values()], axis=0)
        ratio = np.where(valid, np.exp(log_a) * b / mixture, 0.0)
        z = divided(ratio.sum(axis=1), valid.sum(axis=1))
        with np.errstate(divide="ignore", invalid="ignore"):
            w = ratio / ratio.sum(axis=1, keepdims=True)
            for name, log_model in log_models.items():
                gap = log_a + np.log(b) - np.log(z)[:, None] - log_model
                found[name].append(np.where(z > 0, np.where(ratio > 0, w * gap, 0.0).sum(axis=1), np.nan))
    return {name: np.concatenate(parts) for name, parts in found.items()}


FIELDS = ("b", "valid", "log_a")
ROUND, ENOUGH = 8, 4
"""Draws of a context before it is looked whether it needs more, and the accepted samples that are enough."""


@dataclass
class IdealContext:
    """The exact samples of p_c of one context: prompts, completions and b of those that were accepted."""

    samples: list[tuple[list[int], list[int]]] = field(default_factory=list)
    b: list[float] = field(default_factory=list)
    judged: int = 0
    """Draws of the base with a verdict, accepted or not."""


def ideal_samples(
    base: Parameters, contexts: Sequence[Context], judge: Judge, settings: Settings
) -> list[IdealContext]:
    """Every exact sample of p_c, by context: a sample of the base, accepted if u < b.

    First come the samples of the evaluation. Then the contexts of a block are sampled in rounds, those that have enough
    no longer.
    """
    found = [IdealContext() for _ in contexts]
    for number, start in enumerate(range(0, len(contexts), BLOCK)):
        missing, done = list(range(start, min(start + BLOCK, len(contexts)))), 0
        while missing and (done == 0 or done < settings.gain_draws):
            size = min(ROUND, settings.gain_draws - done) if done else settings.evaluation_samples
            stream, accepting = (f"evaluation-ideal-{done}",) * 2 if done else ("evaluation", "evaluation-ideal")
            chosen = [contexts[i] for i in missing]
            drawn = sampled(
                base, base, chosen, judge, settings.seed, stream, number, size, settings.max_completion_length
            )
            u = uniform(
                settings.seed, f"{accepting}-accept", number, np.arange(len(missing))[:, None], np.arange(size), 0
            )
            for slot, index in enumerate(missing):
                rows = [slot * size + j for j in range(size) if drawn.valid[slot, j] and u[slot, j] < drawn.b[slot, j]]
                found[index].samples += [(contexts[index].tokens, list(drawn.completions[row])) for row in rows]
                found[index].b += [float(drawn.b[slot, row - slot * size]) for row in rows]
                found[index].judged += int(drawn.valid[slot].sum())
            missing, done = [index for index in missing if len(found[index].samples) < ENOUGH], done + size
    return found


def gains(model: Parameters, base: Parameters, ideal: Sequence[IdealContext]) -> tuple[Array, Array]:
    """By context, over its samples of the ideal model: E_p[log π − log a], and the share with π ≥ p/10; else NaN.

    p = a·b/Z, with Z the share of the draws that were accepted.
    """
    found, recalls = [], []
    for context in ideal:
        if not context.samples:
            found.append(np.nan)
            recalls.append(np.nan)
            continue
        x = Sequences.of([prompt for prompt, _ in context.samples], [completion for _, completion in context.samples])
        log_pi, log_a = (token_log_probs(one, x).sum(axis=1) for one in (model, base))
        found.append(float((log_pi - log_a).mean()))
        z = len(context.samples) / context.judged
        recalls.append(float((log_pi >= np.log(np.exp(log_a) * np.array(context.b) / z / 10)).mean()))
    return np.array(found), np.array(recalls)


def pass_at_k(blocks: Sequence[Judged], k: int) -> Array:
    """1 − C(n−c, k)/C(n, k) by context: n samples have a verdict, c of them b > 0; NaN where n < k."""
    found = []
    for block in blocks:
        for b, valid in zip(block.b, block.valid, strict=True):
            n, c = int(valid.sum()), int(((b > 0) & valid).sum())
            found.append(1 - math.comb(n - c, k) / math.comb(n, k) if n >= k else np.nan)
    return np.array(found)


# --- intervals ---


def interval(figure: Figure, contexts: int, seed: int) -> dict[str, float | None]:
    """The figure on the contexts as they are, and the expanded percentile interval of Hesterberg (2015).

    Its ends are the percentiles at Φ(∓√(n/(n−1)) t) of the resamples that have a value, t being the 0.975 quantile of
    Student's law with n − 1 degrees of freedom.
    """
    mean = float(figure(np.arange(contexts)))
    if not np.isfinite(mean):
        return {"mean": None, "low": None, "high": None}
    drawn = np.random.Generator(np.random.PCG64(seed)).integers(contexts, size=(RESAMPLES, contexts))
    values = figure(drawn)
    normal = student_quantile(contexts - 1) * math.sqrt(contexts / (contexts - 1))
    below = math.erfc(normal / math.sqrt(2)) / 2
    low, high = np.quantile(values[np.isfinite(values)], [below, 1 - below])
    return {"mean": mean, "low": float(low), "high": float(high)}


@lru_cache
def student_quantile(freedom: int) -> float:
    """t with ∫_0^t = 0.475 of Student's density, by Gauss-Legendre quadrature and Newton's method."""
    nodes, weights = np.polynomial.legendre.leggauss(400)
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2

    def density(t: Array) -> Array:
        found: Array = np.exp(log_scale - (freedom + 1) / 2 * np.log1p(t**2 / freedom))
        return found

    t = 1.96
    for _ in range(50):
        area = float((weights * density((nodes + 1) * t / 2)).sum() * t / 2)
        t += (CONFIDENCE / 2 - area) / float(density(np.array(t)))
    return t


def difference(after: Figure, before: Figure) -> Figure:
    return lambda drawn: after(drawn) - before(drawn)


def ratio(after: Figure, before: Figure) -> Figure:
    """Undefined where the divisor is 0."""
    return lambda drawn: divided(after(drawn), before(drawn))


# --- what the files hold ---


class Evaluation:
    """The base and some models on the same contexts."""

    def __init__(
        self,
        models: Mapping[str, Parameters],
        contexts: Sequence[Context],
        judge: Judge,
        settings: Settings,
        ideal: Sequence[IdealContext],
    ) -> None:
        base = models["base"]
        self.contexts, self.settings = contexts, settings
        self._metrics: dict[str, dict[str, Any]] = {}
        self._changes: dict[tuple[str, str], dict[str, Any]] = {}
        self.outcomes = {name: outcome(model, base, contexts, judge, settings) for name, model in models.items()}
        self.figures = {name: figures(blocks, settings) for name, blocks in self.outcomes.items()}
        lost: dict[str, Callable[[Judged], Array]] = {
            "checks_failed": lambda block: divided(
                (~block.valid & block.applies).sum(axis=1), block.applies.sum(axis=1)
            ),
            "not_applicable": lambda block: (~block.applies).mean(axis=1),
        }
        for share, of in lost.items():
            shares = {name: per_context(blocks, of) for name, blocks in self.outcomes.items()}
            if any(np.nansum(values) > 0 for values in shares.values()):  # of one model: then of all
                for name, values in shares.items():
                    self.figures[name][share] = mean_of(values)
        self.gains, _ = gains(base, base, ideal)
        for name, model in models.items():
            gain, recall = gains(model, base, ideal)
            self.figures[name] |= {"gain": mean_of(gain), "recall": mean_of(recall)}
        if len(models) > 1:
            for name, values in pooled(models, self.outcomes).items():
                self.figures[name]["kl_target_policy_pooled"] = mean_of(values)

    def interval(self, figure: Figure) -> dict[str, float | None]:
        return interval(figure, len(self.contexts), self.settings.seed)

    def metrics(self, model: str) -> dict[str, Any]:
        """Each figure of a model with its interval."""
        if model not in self._metrics:
            self._metrics[model] = {name: self.interval(figure) for name, figure in self.figures[model].items()}
        return self._metrics[model]

    def changes(self, model: str, reference: str = "base") -> dict[str, Any]:
        """Difference from and ratio to another model, but in what is a quantity of the base whichever is sampled."""
        if (model, reference) not in self._changes:
            mine, other = self.figures[model], self.figures[reference]
            self._changes[model, reference] = {
                name: {
                    "difference": self.interval(difference(mine[name], other[name])),
                    "ratio": self.ratio(mine[name], other[name]),
                }
                for name in mine
                if name not in ("z_mean", "z_nstd", "z_nstd_corrected")
            }
        return self._changes[model, reference]

    def ratio(self, mine: Figure, other: Figure) -> dict[str, float | None]:
        """Of positive figures alone, and where the divisor is surely one: all of its interval."""
        divisor, value = self.interval(other)["low"], self.interval(mine)["mean"]
        if divisor is None or value is None or divisor <= 0 or value <= 0:
            return {"mean": None, "low": None, "high": None}
        return self.interval(ratio(mine, other))

    def ideal(self) -> dict[str, Array]:
        """E_p[f] of each context from the base's samples: Σ b f / Σ b."""
        features: dict[str, Callable[[Judged], Array]] = {
            "length": lambda block: block.lengths,
            "distinct_2": distinct_2,
        }
        return {
            name: per_context(
                self.outcomes["base"],
                lambda block, of=of: divided((of(block) * block.b).sum(axis=1), block.b.sum(axis=1)),  # type: ignore[misc]
            )
            for name, of in features.items()
        }

    def versus_ideal(self, model: str) -> dict[str, Any]:
        """The model's mean over the ideal's, over the contexts where both are known."""
        own = {
            "length": per_context(self.outcomes[model], over_valid(lambda block: block.lengths)),
            "distinct_2": per_context(self.outcomes[model], over_valid(distinct_2)),
        }
        found = {}
        for name, values in self.ideal().items():
            both = np.isnan(own[name]) | np.isnan(values)
            found[name] = self.interval(
                ratio(mean_of(np.where(both, np.nan, own[name])), mean_of(np.where(both, np.nan, values)))
            )
        return found

    def partition(self) -> list[float | None]:
        """Ẑ_c of each context, from the base's samples."""
        z = per_context(self.outcomes["base"], lambda block: block.z)
        return [None if np.isnan(value) else float(value) for value in z]

    def token_rank(self, model: str) -> list[int]:
        counts = Counter(token for block in self.outcomes[model] for x in block.completions for token in x)
        return sorted(counts.values(), reverse=True)

    def lost(self, model: str) -> tuple[int, int]:
        """Samples whose check failed, and those to which the constraint does not apply."""
        blocks = self.outcomes[model]
        return sum(len(block.failures) for block in blocks), sum(int((~block.applies).sum()) for block in blocks)

    def examples(self, models: Mapping[str, str]) -> list[dict[str, Any]]:
        """The first outputs of contexts that are spread over the whole list; ``models`` maps names to the file's."""
        count = len(self.contexts)
        return [self._example(place * count // EXAMPLES, models) for place in range(min(EXAMPLES, count))]

    def _example(self, index: int, models: Mapping[str, str]) -> dict[str, Any]:
        context, outputs = self.contexts[index], {}
        for name, shown in models.items():
            block, row = self.outcomes[name][index // BLOCK], index % BLOCK
            samples = block.b.shape[1]
            outputs[shown] = [
                {
                    "text": block.texts[row * samples + sample],
                    "b": float(block.b[row, sample]) if block.valid[row, sample] else None,
                    "decoding": "ancestral",
                    "token_ids": list(block.completions[row * samples + sample]),
                }
                for sample in range(min(SHOWN, samples))
            ]
        return {"row": context.row, "prompt": context.prompt, "columns": dict(context.columns), "outputs": outputs}

    def _applies(self, model: str) -> Array:
        return np.concatenate([block.applies.any(axis=1) for block in self.outcomes[model]])

    def to_mapping(self, models: Mapping[str, str]) -> dict[str, Any]:
        """``evaluation.json`` but for the models' own figures, which stand beside these or under ``models``."""
        tuned = {name: shown for name, shown in models.items() if name != "base"}
        first, *others = tuned
        between = {tuned[first]: {tuned[name]: self.changes(name, first) for name in others}}
        return {
            "decoding": "ancestral",
            "contexts": len(self.contexts),
            "contexts_tuned_on": 0,
            "contexts_with_gain": int((~np.isnan(self.gains)).sum()),
            "contexts_applied": int(np.any([self._applies(name) for name in self.outcomes], axis=0).sum()),
            "samples_per_context": self.settings.evaluation_samples,
            "resamples": RESAMPLES,
            "confidence": CONFIDENCE,
            "seed": self.settings.seed,
            "changes": {shown: self.changes(name) for name, shown in tuned.items()},
            **({"between": between} if others else {}),
            "ideal": {name: self.interval(mean_of(values)) for name, values in self.ideal().items()},
            "versus_ideal": {shown: self.versus_ideal(name) for name, shown in models.items()},
            "pass_at_k": {
                shown: {
                    str(k): self.interval(mean_of(pass_at_k(self.outcomes[name], k)))
                    for k in (1, 2, 4, 8, 16, 32, 64)
                    if k <= self.settings.evaluation_samples
                }
                for name, shown in models.items()
            },
            "frequencies": {shown: {"token_rank": self.token_rank(name)} for name, shown in models.items()},
            "partition": self.partition(),
            "examples": self.examples(models),
        }
