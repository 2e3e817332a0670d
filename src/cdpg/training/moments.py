"""Fits λ of a run's moments before the run, and again during it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cdpg.config import CDPGConfig
from cdpg.constraints.factors import Tilt
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.messages.terms import term
from cdpg.methods import METHODS
from cdpg.methods.base import Method
from cdpg.methods.f_divergence import refuse_zeros
from cdpg.models.base import PromptTokens
from cdpg.rollout.moments import (
    REFIT_BELOW,
    ROUND,
    Fitted,
    describe_fits,
    fit_to_base,
    moment_samples,
    refit,
    refuse_failing,
)
from cdpg.rollout.replay import ReplayBuffer
from cdpg.rollout.rollout import Rollout
from cdpg.rollout.sampler import Sampler, Stopwatch
from cdpg.storage.journal import Journal
from cdpg.target.moments import summarize
from cdpg.training.state import RunState

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetFit:
    """Fits the multipliers of the target's moments."""

    sampler: Sampler
    """The run's sampler."""
    method: Method
    contexts: Sequence[Context]
    """Training and validation contexts: the same for every method."""
    prompts: Sequence[PromptTokens]
    journal: Journal

    def __post_init__(self) -> None:
        if self.sampler.judge.tilt.factors:
            require_target([self.method.name])

    @property
    def looks_first(self) -> bool:
        """Whether samples of the base are drawn before the run."""
        return bool(self.sampler.judge.tilt.factors) or self.method.needs_positive_b

    def begin(self, config: CDPGConfig) -> tuple[Fitted, ...]:
        """λ from samples of the base, before anything is written; functions that fail on these are refused."""
        tilt = self.sampler.judge.tilt
        fits = bool(tilt.moments) and not tilt.is_fitted
        seen = self._look(config) if self.method.needs_positive_b or (tilt.factors and not fits) else None
        if not fits:
            return () if seen is None or not tilt.moments else (_given(seen, tilt),)
        _log.info("fitting the multipliers of the moments to samples of the base")
        fitted = fit_to_base(self.sampler.of_base(config), self.contexts, self.prompts)
        self._use(fitted, config)
        return (fitted,)

    def _look(self, config: CDPGConfig) -> Rollout:
        """A few samples of the base; an error if too many functions fail on them."""
        few = slice(config.contexts_per_epoch)
        settings = config.replace(num_generations=ROUND, batch_size=None, seed=0)
        base = self.sampler.of_base(settings)
        rollout = base.draw(0, self.contexts[few], self.prompts[few], False, Stopwatch(), "moments")
        refuse_failing(rollout, config.check_failures)
        if self.method.needs_positive_b:
            refuse_zeros(rollout)
        return rollout

    def after_epoch(self, rollout: Rollout, state: RunState, config: CDPGConfig) -> RunState:
        """The state after an epoch, with another λ if its samples give a better one."""
        last = state.moments[-1] if state.moments else None
        if last is None or last.source == "given" or last.fit.ess >= REFIT_BELOW or self.method.source == "base":
            return state
        tilt, capacity = self.sampler.judge.tilt, _visits_to_fit(config)
        recent = state.recent.add(rollout, tilt, capacity)
        state = replace(state, recent=recent)
        found = refit(recent, last, tilt, rollout.number) if len(recent) == capacity else None
        if found is None:
            return state
        self._use(found, config)
        changed = replace(
            state,
            method=self.method.retargeted(state.method),
            replay=ReplayBuffer(state.replay.capacity),  # a pooled Ẑ_c of the new target knows no earlier visit
            moments=(*state.moments, found),
        )
        self.describe(changed)
        return changed

    def restore(self, state: RunState) -> None:
        """Use the λ of a run that is continued."""
        if state.moments:
            self.sampler.judge.tilt.set_multipliers(state.moments[-1].fit.multipliers)

    def describe(self, state: RunState) -> None:
        """Write ``moments.json``, if there are moments."""
        if state.moments and self.sampler.processes.is_main:
            self.journal.describe_moments(describe_fits(self.sampler.judge.tilt, state.moments))

    def _refits(self, config: CDPGConfig) -> bool:
        """Whether the run has samples to fit λ to again: enough of them, and of another model than the base."""
        return self.method.source != "base" and config.epochs * config.contexts_per_epoch >= _visits_to_fit(config)

    def _use(self, found: Fitted, config: CDPGConfig) -> None:
        """Use a fit from now on, and log it."""
        tilt, fit = self.sampler.judge.tilt, found.fit
        tilt.set_multipliers(fit.multipliers)
        parts = [
            f"{name}: λ = {value:.4g} for {moment.mean:g}, without it {natural:.4g}"
            for name, moment, value, natural in zip(
                [tilt.names[place] for place in tilt.moment_places], tilt.moments, fit.multipliers, fit.natural,
                strict=True,
            )
        ]  # fmt: skip
        source = "the base" if found.source == "base" else f"the policy after epoch {found.epoch}"
        cure = ", and may be fitted again during the run" if self._refits(config) else ": raise moment_draws"
        few = f"; λ is rough{cure}" if fit.ess < REFIT_BELOW else ""
        _log.info(
            f"{'; '.join(parts)}; by {fit.samples:,} samples of {source} in {fit.contexts:,} contexts, effective "
            f"sample size {fit.ess:.0%}{few}"
        )


def _visits_to_fit(config: CDPGConfig) -> int:
    """How many visits of contexts λ is fitted to during a run."""
    return max(config.moment_contexts, config.contexts_per_epoch)


def require_target(names: Sequence[str]) -> None:
    """Refuse methods whose optimum is not p, for a target with moments or rewards."""
    others = [name for name in names if not METHODS[name].targets_p]
    if others:
        known = ", ".join(name for name, method in METHODS.items() if method.targets_p)
        raise UserError(
            f"moments and rewards need a method whose optimum is the target, not {', '.join(others)}: choose "
            f"{term('method')} among {known}, or leave them out"
        )


def _given(rollout: Rollout, tilt: Tilt) -> Fitted:
    """Statistics of a few samples of the base under multipliers that were given."""
    multipliers = torch.tensor([moment.coefficient for moment in tilt.moments], dtype=torch.float64)
    return Fitted(summarize(moment_samples(rollout, tilt).covered(), multipliers), "given", 0)
