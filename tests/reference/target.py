"""Samples, their target P_c(x) = a(x|c) · b(x,c), the estimate Ẑ_c, and the figures that come from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference.model import END, LETTERS, Array, Context, Parameters, Sequences, distribution, token_log_probs
from reference.randomness import uniform

Judge = Callable[[Context, str], float | str | None]
"""The constraint's verdict on a text, the kind of its failure, or None where it does not apply."""


@dataclass(frozen=True)
class Judged:
    """Samples with all that is known of them, ``[context, sample]``."""

    contexts: Sequence[Context]
    completions: Sequence[Sequence[int]]
    """By row, the end token included."""
    texts: Sequence[str]
    x: Sequences
    b: Array
    """0 where there is no verdict."""
    valid: Array
    """False where there is no verdict, since the check failed or does not apply: such a sample counts nowhere."""
    applies: Array
    """False where the constraint does not apply."""
    failures: Mapping[int, str]
    """Kinds of failure, by row."""
    log_q: Array
    log_a: Array

    @property
    def lengths(self) -> Array:
        return np.array([len(x) for x in self.completions]).reshape(self.b.shape)

    @property
    def ended(self) -> Array:
        return np.array([x[-1] == END for x in self.completions]).reshape(self.b.shape)

    @property
    def ratio(self) -> Array:
        """P_c(x) / q(x|c)."""
        return np.where(self.valid, np.exp(self.log_a - self.log_q) * self.b, 0.0)

    @property
    def log_ratio(self) -> Array:
        with np.errstate(divide="ignore"):
            return np.log(self.ratio)

    @property
    def z(self) -> Array:
        """Ẑ_c = mean_j P_c(x_j)/q(x_j|c) over the valid samples; NaN in a context that has none."""
        return divided(self.ratio.sum(axis=1), self.valid.sum(axis=1))


def divided(above: Any, below: Any) -> Array:
    """NaN where the divisor is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.asarray(below) == 0, np.nan, np.asarray(above) / below)


def sampled(
    policy: Parameters, base: Parameters, contexts: Sequence[Context], judge: Judge, seed: int, stream: str, epoch: int,
    samples: int, longest: int,
) -> Judged:  # fmt: skip
    """Ancestral samples by inverse transform: the first token whose cumulative probability is above the number."""
    slot, sample, position = np.arange(len(contexts)), np.arange(samples), np.arange(longest)
    numbers = uniform(seed, stream, epoch, slot[:, None, None], sample[None, :, None], position)
    completions = []
    for context, of_context in zip(contexts, numbers, strict=True):
        for row in of_context:
            x: list[int] = []
            while len(x) < longest and END not in x:
                so_far = context.tokens + x
                state = policy["tokens"][so_far[-1]] + policy["positions"][len(so_far) - 1]
                x.append(int(np.searchsorted(np.cumsum(distribution(policy, state)), row[len(x)], side="right")))
            completions.append(x)
    return judged(policy, base, contexts, completions, judge)


def text(completion: Sequence[int]) -> str:
    """What the constraint sees: the letters, each after a blank."""
    return "".join(f" {LETTERS[token - 1]}" for token in completion if token != END)


def judged(
    policy: Parameters,
    base: Parameters,
    contexts: Sequence[Context],
    completions: Sequence[Sequence[int]],
    judge: Judge,
) -> Judged:
    """Samples of the policy, equally many for each context, with verdicts and scores."""
    shape = (len(contexts), len(completions) // len(contexts))
    owners = [context for context in contexts for _ in range(shape[1])]
    texts = list(map(text, completions))
    verdicts = [judge(context, x) for context, x in zip(owners, texts, strict=True)]
    x = Sequences.of([context.tokens for context in owners], completions)
    return Judged(
        contexts, completions, texts, x,
        b=np.array([v if isinstance(v, float) else 0.0 for v in verdicts]).reshape(shape),
        valid=np.array([isinstance(v, float) for v in verdicts]).reshape(shape),
        applies=np.array([v is not None for v in verdicts]).reshape(shape),
        failures={row: v for row, v in enumerate(verdicts) if isinstance(v, str)},
        log_q=token_log_probs(policy, x).sum(axis=1).reshape(shape),
        log_a=token_log_probs(base, x).sum(axis=1).reshape(shape),
    )  # fmt: skip


def kl_target_policy(of: Judged, epsilon: float) -> Array:
    """KL(p_c, π), Algorithm 2: mean_j w_j (log P/π − log Ẑ_c), w = P/((Ẑ_c + ε) π); NaN where nothing satisfies."""
    with np.errstate(divide="ignore", invalid="ignore"):
        w = of.ratio / (of.z[:, None] + epsilon)
        terms = np.where(of.ratio > 0, w * (of.log_ratio - np.log(of.z)[:, None]), 0.0)
    return np.where(of.z > 0, divided(terms.sum(axis=1), of.valid.sum(axis=1)), np.nan)


def kl_policy_base(of: Judged) -> Array:
    """KL(π, a) = mean_j log π(x_j|c) − log a(x_j|c)."""
    return divided(((of.log_q - of.log_a) * of.valid).sum(axis=1), of.valid.sum(axis=1))


def effective_samples(of: Judged) -> Array:
    """(Σw)²/Σw² of a context, divided by its valid samples; NaN where nothing satisfies."""
    return divided(divided(of.ratio.sum(axis=1) ** 2, (of.ratio**2).sum(axis=1)), of.valid.sum(axis=1))


def noise_of_z(of: Judged) -> Array:
    """s²/M: the variance of Ẑ_c from within its context; NaN where a single sample leaves it undefined."""
    count = of.valid.sum(axis=1)
    squares = (np.where(of.valid, of.ratio - of.z[:, None], 0.0) ** 2).sum(axis=1)
    return np.where(count > 1, divided(squares, (count - 1) * count), np.nan)


def normalised_deviation(z: Array, noise: Array | float = 0.0) -> float | None:
    """std_c(Z_c)/mean_c(Z_c), with the mean of the sampling noise subtracted from the variance."""
    z, noise = z[~np.isnan(z)], np.asarray(noise)
    within = float(noise[~np.isnan(noise)].mean())
    return float(np.sqrt(max(0.0, z.var() - within)) / z.mean())


def mean_of_known(values: Array) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
