"""Forecasts the duration of a run from the durations of its parts."""

from __future__ import annotations

from dataclasses import dataclass

from cdpg.config import CDPGConfig
from cdpg.evaluation.plan import evaluated_contexts
from cdpg.methods import make_method


@dataclass(frozen=True)
class Pace:
    """Seconds for one sample, by stage."""

    sampling: float
    constraint: float
    """With all workers running. Checks run during sampling, so only the excess is waited for."""
    scoring: float
    gradient: float


def epoch_seconds(config: CDPGConfig, pace: Pace, satisfying: float) -> float:
    """Seconds of one epoch, if that share of its samples satisfies; only those are scored and differentiated.

    The method says which, and how often it goes over them.
    """
    samples, method = config.samples_per_epoch, make_method(config)
    used = samples if method.scores_every_sample else samples * satisfying
    waiting = max(pace.sampling, pace.constraint)
    return samples * waiting + used * (pace.scoring + method.passes * pace.gradient)


def context_seconds(config: CDPGConfig, pace: Pace, beams: int) -> float:
    """Seconds to evaluate one held-out context: its samples, their scores and beam search."""
    sample = max(pace.sampling, pace.constraint) + pace.scoring
    return config.evaluation_samples * sample + beams * pace.sampling


def guessed_context(config: CDPGConfig, epoch: float) -> float:
    """Seconds to evaluate a context before any was evaluated, by those of an epoch: as many for a sample."""
    return epoch / config.samples_per_epoch * config.evaluation_samples


def run_seconds(config: CDPGConfig, epoch: float, context: float, held_out: int, done: int = 0) -> float:
    """Seconds left after ``done`` epochs, from the seconds of an epoch and of an evaluated context."""
    return (config.epochs - done) * epoch + context * evaluated_contexts(config, held_out, done)
