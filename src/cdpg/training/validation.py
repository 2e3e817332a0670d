"""The gain on contexts that are set aside, after every epoch: it decides which model is kept.

The contexts are taken from those to tune on, not from the held-out ones: figures of a model that was chosen on the
contexts they come from would be too good.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from cdpg.config import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.contexts.splitting import split
from cdpg.evaluation.ideal_samples import IdealSamples, draw_ideal_samples
from cdpg.methods.base import Method
from cdpg.models.base import LanguageModel, PromptTokens
from cdpg.models.rng import UniformStream
from cdpg.rollout.sampler import Sampler
from cdpg.storage.snapshot import Trainable

_log = logging.getLogger(__name__)

FEW = 50
"""Of fewer contexts to tune on, none are set aside by default."""
_SHARE, _MOST = 10, 64


def keeps_best(config: CDPGConfig, method: Method, held_out: int) -> bool:
    """Whether the model with the largest gain is kept, with the default applied."""
    return (held_out > 0 and method.chooses_epoch) if config.keep is None else config.keep == "best"


def set_aside(contexts: Sequence[Context], config: CDPGConfig, decides: bool) -> tuple[list[int], list[int]]:
    """Indices of the contexts to tune on, and of those set aside; the same for every method and seed.

    ``decides`` says whether anything is decided on them. No prompt and no group is on both sides.
    """
    everything = list(range(len(contexts)))
    count = config.validation_contexts
    if count is None:
        count = min(_MOST, len(contexts) // _SHARE) if len(contexts) >= FEW else 0
    if not decides or not count:
        return everything, []
    tuning, aside = split(contexts, count, UniformStream(0, "validation", 0).permutation)
    return (tuning, aside) if tuning else (everything, [])


@dataclass(frozen=True)
class Best:
    """The model to keep so far: the latest whose gain is not below the largest by more than its noise.

    The noise is the standard error of the difference, paired by context. Without it the choice would follow the noise
    of a small set of contexts, and prefer an early model to a later one that is as good and satisfies more often.
    """

    epoch: int
    gain: float
    weights: Mapping[str, Tensor]
    """Copies on the CPU, by the parameters' names."""
    peak: tuple[float, ...]
    """The gain of each context after the epoch with the largest mean."""


class Validation:
    """Measures the gain after every epoch.

    Without contexts, or if no sample of the base satisfies on them, nothing is measured.
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
        self._covered = 0

    @property
    def is_measured(self) -> bool:
        """Whether a context that is set aside has a sample of the ideal model."""
        return self._covered > 0

    def begin(self, config: CDPGConfig, check_stop: Callable[[], None]) -> None:
        """Draw the samples of the ideal model, which stay the same for the whole run."""
        if not self._contexts or self._ideal is not None:
            return
        sampler = replace(self._sampler, policy=self._sampler.base, policy_is_base=True, config=config)
        self._ideal = draw_ideal_samples(
            sampler, self._contexts, self._prompts, config.gain_draws, 0, "validation-ideal", check_stop=check_stop
        )
        self._covered = covered = int((self._ideal.counts(sampler.processes) > 0).sum())
        where = f"{len(self._contexts):,} of the contexts to tune on are set aside"
        if covered:
            _log.info(f"{where}; {covered:,} of them have a sample of the ideal model, on which the gain is measured")
        else:
            _log.warning(
                f"{where}, and none of {self._ideal.draws:,} samples of the base satisfies on them: the last model is "
                "kept, and nothing is replayed; raise gain_draws to find some"
            )

    def gains(self, tokens_per_pass: int) -> Tensor | None:
        """The policy's gain in each context with a sample of the ideal model; None if there is none."""
        if self._ideal is None or not self.is_measured:
            return None
        found = self._ideal.gain(
            self._policy, self._sampler.processes, tokens_per_pass, self._sampler.judge.tilt.coefficients
        )
        return found[~found.isnan()]

    def of_base(self) -> Best:
        """The base, which is the best model before the first epoch: its gain is 0."""
        return Best(0, 0.0, self._trainable.copied_weights(), (0.0,) * self._covered)

    def better(self, best: Best, epoch: int, gains: Tensor) -> Best:
        """The model to keep after ``epoch``: the policy, whose gains are given, or the best one so far."""
        gap = gains - gains.new_tensor(best.peak)
        noise = float(gap.std()) / len(gap) ** 0.5 if len(gap) > 1 else 0.0
        peak = tuple(gains.tolist()) if gap.mean() > 0 else best.peak
        if gap.mean() < -noise:
            return best
        return Best(epoch, float(gains.mean()), self._trainable.copied_weights(), peak)

    def of_policy(self, epoch: int, gains: Tensor) -> Best:
        """The policy after ``epoch``, whatever came before: the choice begins anew, as the target is another."""
        return Best(epoch, float(gains.mean()), self._trainable.copied_weights(), tuple(gains.tolist()))

    def use(self, best: Best) -> None:
        """Give the policy the weights of the best model."""
        self._trainable.set_weights(best.weights)
