"""The gain on the validation contexts, after every epoch: it decides which model is kept.

Validation contexts are taken from the training data, not from the held-out set: metrics on contexts by which the model
was chosen would be too good.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cdpg.config import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.contexts.splitting import split
from cdpg.evaluation.ideal_samples import IdealSamples, draw_ideal_samples
from cdpg.methods import make_method
from cdpg.methods.base import Method
from cdpg.models.base import LanguageModel, PromptTokens
from cdpg.models.rng import UniformStream
from cdpg.rollout.sampler import Sampler
from cdpg.storage.snapshot import Trainable

_log = logging.getLogger(__name__)

FEW = 50
"""With fewer training contexts there are no validation contexts by default."""
LEAST = 5
"""Contexts with a sample of the ideal model below which nothing is decided: with fewer the noise cannot be estimated
well."""
_SHARE, _MOST = 10, 64
_SURELY = 2.0
"""Standard errors by which a later model must be worse to be rejected."""


def keeps_best(config: CDPGConfig, method: Method, held_out: int) -> bool:
    """Whether the model with the largest gain is kept, with the default applied."""
    return (held_out > 0 and method.chooses_epoch) if config.keep is None else config.keep == "best"


def split_validation(contexts: Sequence[Context], config: CDPGConfig, decides: bool) -> tuple[list[int], list[int]]:
    """Indices of the training and of the validation contexts; the same for every method and seed.

    ``decides`` says whether anything is decided on them. No prompt and no group is on both sides.
    """
    everything = list(range(len(contexts)))
    count = config.validation_contexts
    if count is None:
        count = min(_MOST, len(contexts) // _SHARE) if len(contexts) >= FEW else 0
    if not decides or not count or not config.gain_draws:
        return everything, []
    tuning, validation = split(contexts, count, UniformStream(0, "validation", 0).permutation)
    return (tuning, validation) if tuning else (everything, [])


def validation_indices(contexts: Sequence[Context], config: CDPGConfig, held_out: int) -> list[int]:
    """Indices of the validation contexts of a run with these settings."""
    method = make_method(config)
    return split_validation(contexts, config, keeps_best(config, method, held_out) or method.replay > 0)[1]


def why_no_validation(contexts: int, config: CDPGConfig) -> str:
    """Why there are no validation contexts although something is to be decided on them, and what to do."""
    if not config.gain_draws:
        return "gain_draws is 0, so no gain is measured; raise it"
    if config.validation_contexts is None and contexts < FEW:
        return (
            f"{contexts:,} training contexts are too few to use some for validation by default, which needs {FEW}; "
            f"set validation_contexts to {LEAST} or more"
        )
    return (
        f"the {contexts:,} training contexts cannot be split like this: some must remain for training, and no prompt "
        "or group may be on both sides; lower validation_contexts, or give more contexts"
    )


@dataclass(frozen=True)
class Best:
    """The model to keep so far: the latest whose gain is not below the largest by more than twice its noise.

    The noise is the standard error of the difference, paired by context. Without this margin the choice would follow
    the noise of a small set of contexts, and prefer an early model to a later one that is as good and satisfies more
    often.
    """

    epoch: int
    gain: float
    weights: Mapping[str, Tensor]
    """Copies on the CPU, by the parameters' names."""
    peak: tuple[float, ...]
    """The gain of each context after the epoch with the largest mean; NaN without a sample of the ideal model."""


class Validation:
    """Measures the gain after every epoch.

    Nothing is measured without contexts, or if too few of them have a sample of the ideal model.
    """

    def __init__(
        self,
        sampler: Sampler,
        policy: LanguageModel,
        trainable: Trainable,
        contexts: Sequence[Context],
        prompts: Sequence[PromptTokens],
    ) -> None:
        self._sampler, self._policy, self._trainable = sampler, policy, trainable
        self._contexts, self._prompts = contexts, prompts
        self._ideal: IdealSamples | None = None
        self._covered = torch.zeros(len(contexts), dtype=torch.bool)  # [context]: has a sample of the ideal model
        self.cost: dict[str, float] = {}
        """The cost of drawing samples of the base, for the first epoch's record."""

    @property
    def is_measured(self) -> bool:
        """Whether enough of the validation contexts have a sample of the ideal model."""
        return int(self._covered.sum()) >= LEAST

    def begin(self, config: CDPGConfig, check_stop: Callable[[], None]) -> None:
        """Draw the samples of the ideal model, which stay the same for the whole run."""
        if not self._contexts or self._ideal is not None:
            return
        started = time.perf_counter()
        sampler = self._sampler.of_base(config)
        self._ideal = draw_ideal_samples(
            sampler, self._contexts, self._prompts, config.gain_draws, 0, "validation-ideal", check_stop=check_stop
        )
        self._covered = self._ideal.counts(sampler.processes) > 0
        self.cost = {"samples_aside": self._ideal.draws, "seconds_aside": time.perf_counter() - started}
        covered = int(self._covered.sum())
        where = f"{len(self._contexts):,} contexts are used for validation"
        if self.is_measured:
            _log.info(f"{where}; {covered:,} of them have a sample of the ideal model, on which the gain is measured")
        else:
            _log.warning(
                f"{where}, but {self._ideal.draws:,} samples of the base contain a satisfying one for only "
                f"{covered:,} of them, and {LEAST} are needed: the last model is kept, and nothing is replayed; raise "
                "gain_draws or validation_contexts to find more"
            )

    def gains(self, tokens_per_pass: int) -> Tensor | None:
        """``[context]``: the policy's gain; NaN without a sample of the ideal model, −∞ if it is not finite.

        None if nothing is measured.
        """
        if self._ideal is None or not self.is_measured:
            return None
        found = self._ideal.gain(
            self._policy, self._sampler.processes, tokens_per_pass, self._sampler.judge.tilt.coefficients
        )
        return found.masked_fill(self._covered & ~found.isfinite(), -math.inf)

    def of_base(self) -> Best:
        """The base, which is the best model before the first epoch: its gain is 0."""
        return Best(0, 0.0, self._trainable.copied_weights(), self._by_context(0.0))

    def resumed(self, best: Best) -> Best:
        """The best model of a checkpoint; an earlier version stored the gains of the covered contexts alone."""
        if len(best.peak) == len(self._contexts):
            return best
        paired = len(best.peak) == int(self._covered.sum())
        return replace(best, peak=self._by_context(best.peak if paired else best.gain))

    def _by_context(self, covered: float | Sequence[float]) -> tuple[float, ...]:
        """A value for each context, from those of the covered ones, or one for all of these."""
        found = torch.full((len(self._contexts),), math.nan, dtype=torch.float64)
        found[self._covered] = torch.tensor(covered, dtype=torch.float64)
        return tuple(found.tolist())

    @staticmethod
    def is_below(gains: Tensor, earlier: Sequence[float], errors: float = 1.0) -> bool:
        """Whether some gains are below earlier ones by more than so many standard errors of the difference.

        An earlier one of −∞ does not count: a checkpoint cannot tell it from one that is missing.
        """
        then = gains.new_tensor(earlier)
        gap = gains - then
        gap = gap[then.isfinite() & ~gap.isnan()]
        return not gap.mean() >= -errors * gap.std() / len(gap) ** 0.5

    def better(self, best: Best, epoch: int, gains: Tensor) -> Best:
        """The model to keep after ``epoch``: the policy, whose gains are given, or the best one so far.

        Only contexts that had a sample of the ideal model both times are compared. A gain that is not finite is never
        better.
        """
        if self.is_below(gains, best.peak, _SURELY):
            return best
        higher = (gains - gains.new_tensor(best.peak)).nanmean() > 0
        peak = tuple(gains.tolist()) if higher else best.peak
        return Best(epoch, float(gains.nanmean()), self._trainable.copied_weights(), peak)

    def of_policy(self, epoch: int, gains: Tensor) -> Best:
        """The policy after ``epoch``, whatever came before: the target has changed, so the choice starts again."""
        return Best(epoch, float(gains.nanmean()), self._trainable.copied_weights(), tuple(gains.tolist()))

    def use(self, best: Best) -> None:
        """Give the policy the weights of the best model."""
        self._trainable.set_weights(best.weights)
