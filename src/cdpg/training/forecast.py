"""Forecasts the duration of a run from the durations of its parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cdpg.config import CDPGConfig
from cdpg.evaluation.ideal_samples import ENOUGH
from cdpg.evaluation.plan import evaluated_contexts
from cdpg.messages.text import duration
from cdpg.methods import make_method
from cdpg.system import memory
from cdpg.training.replay import SMALLER, replayed_steps


@dataclass(frozen=True)
class Pace:
    """Seconds for one sample, by stage."""

    sampling: float
    constraint: float
    """With all workers running. Checks run during sampling, so only the excess is waited for."""
    scoring: float
    gradient: float


def epoch_seconds(config: CDPGConfig, pace: Pace, satisfying: float, validation: int) -> float:
    """Mean seconds of an epoch, if that share of its samples satisfies; often only those are scored and differentiated.

    The method says which, how many passes it makes, and how many it replays; ``validation`` is the number of validation
    contexts, without which nothing is replayed.
    """
    samples, method = config.samples_per_epoch, make_method(config)
    scored = samples if method.scores_every_sample else samples * satisfying
    scored = 0.0 if method.source == "base" else scored  # log a is known when a token is drawn
    failing_too = method.differentiates_every_sample and satisfying >= method.differentiates_from
    differentiated = (samples if failing_too else samples * satisfying) * method.passes
    if method.replay and satisfying and validation:  # visits without a satisfying sample are not replayed
        covered = 1 - (1 - satisfying) ** config.num_generations
        replayed = sum(replayed_steps(method, config, epoch) for epoch in range(1, config.epochs + 1)) / config.epochs
        differentiated += replayed / SMALLER * samples * satisfying / covered
    waiting = max(pace.sampling, pace.constraint)
    return samples * waiting + scored * pace.scoring + differentiated * pace.gradient


def context_seconds(config: CDPGConfig, pace: Pace, beams: int) -> float:
    """Seconds to evaluate one held-out context: its samples, their scores and beam search."""
    sample = max(pace.sampling, pace.constraint) + pace.scoring
    return config.evaluation_samples * sample + beams * pace.sampling


def ideal_seconds(config: CDPGConfig, pace: Pace, satisfying: float, validation: int, held_out: int) -> float:
    """Seconds to find samples of the ideal model for the validation contexts and the held-out ones.

    Each context is sampled until enough of its samples satisfy, the evaluation's own samples included.
    """
    draws = min(float(config.gain_draws), ENOUGH / satisfying if satisfying else math.inf)
    further = max(0.0, draws - config.evaluation_samples) if config.evaluates else 0.0
    return (validation * draws + held_out * further) * max(pace.sampling, pace.constraint)


def guessed_context(config: CDPGConfig, epoch: float) -> float:
    """Seconds to evaluate a context, guessed from those of an epoch: a sample takes as long in both."""
    return epoch / config.samples_per_epoch * config.evaluation_samples


def run_seconds(config: CDPGConfig, epoch: float, context: float, held_out: int, done: int = 0) -> float:
    """Seconds left after ``done`` epochs, from the seconds of an epoch and of an evaluated context."""
    return (config.epochs - done) * epoch + context * evaluated_contexts(config, held_out, done)


def outlook(
    config: CDPGConfig,
    done: int,
    epoch: float,
    held_out: int,
    evaluated_context: float | None,
    peak: Mapping[str, int],
) -> str:
    """A forecast after the first epoch: seconds of an epoch, share of the evaluations, and peak memory so far.

    ``evaluated_context``: seconds to evaluate a context; None where none has been evaluated yet.
    """
    context = guessed_context(config, epoch) if evaluated_context is None else evaluated_context
    left = run_seconds(config, epoch, context, held_out, done)
    evaluations = left - run_seconds(config, epoch, 0.0, held_out, done)
    share = ""
    if evaluations > 0:
        perhaps = "perhaps " if evaluated_context is None else ""
        share = f"; evaluations are {perhaps}{evaluations / left:.0%} of the time left"
        if evaluations > left / 2 and config.evaluation_interval:
            share += " (evaluate_every=0 leaves out those during the run)"
    seconds = duration(epoch) if epoch >= 1 else f"{epoch:.2f}s"
    return f"an epoch takes about {seconds}{share}; at most {memory.format_memory(peak)} in use so far"
