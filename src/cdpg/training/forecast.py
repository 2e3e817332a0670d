"""How long a run will take, from how long its parts took."""

from __future__ import annotations

from dataclasses import dataclass

from cdpg.config import CDPGConfig

BLOCK = 64
"""Contexts that an evaluation samples, decodes and measures together."""


@dataclass(frozen=True)
class Pace:
    """Seconds for one sample, by stage."""

    sampling: float
    constraint: float
    """By all workers together: it goes on beside the sampling, and only what exceeds that is waited for."""
    scoring: float
    gradient: float


def epoch_seconds(config: CDPGConfig, pace: Pace, satisfying: float) -> float:
    """One epoch, if that share of its samples satisfies: only those are scored and differentiated.

    Ziegler's PPO takes all samples, and goes over them several times.
    """
    samples = config.samples_per_epoch
    ppo = config.method == "ziegler"
    used = samples if ppo else samples * satisfying
    passes = config.ziegler_epochs if ppo else 1
    waiting = max(pace.sampling, pace.constraint)
    return samples * waiting + used * (pace.scoring + passes * pace.gradient)


def context_seconds(config: CDPGConfig, pace: Pace, beams: int) -> float:
    """One held-out context of an evaluation: its samples, their scores and the outputs of beam search."""
    sample = max(pace.sampling, pace.constraint) + pace.scoring
    return config.evaluation_samples * sample + beams * pace.sampling


def evaluated_contexts(config: CDPGConfig, held_out: int, done: int = 0) -> int:
    """Contexts that a model is evaluated on after ``done`` epochs until the end of the run.

    Some along the way (before the first epoch, at every interval, at the end), the evaluation that follows the epoch
    ``done`` included, and those of the final evaluation.
    """
    along = min(held_out, config.evaluation_contexts)
    times = sum(config.evaluates_after(epoch) for epoch in range(done, config.epochs + 1))
    return times * along + final_contexts(config, held_out)


def final_contexts(config: CDPGConfig, held_out: int) -> int:
    """Contexts of the final evaluation, for the base and the tuned model.

    Those that the last evaluation along the way took, in whole blocks, are not evaluated again.
    """
    along = min(held_out, config.evaluation_contexts)
    known = along if along == held_out else along // BLOCK * BLOCK
    return 2 * (held_out - known * config.evaluates_after(config.epochs)) * config.evaluate_at_end


def guessed_context(config: CDPGConfig, epoch: float) -> float:
    """Seconds to evaluate a context before any was evaluated, by those of an epoch: as many for a sample."""
    return epoch / config.samples_per_epoch * config.evaluation_samples


def run_seconds(config: CDPGConfig, epoch: float, context: float, held_out: int, done: int = 0) -> float:
    """What is left of a run after ``done`` epochs, from the seconds of an epoch and of an evaluated context."""
    return (config.epochs - done) * epoch + context * evaluated_contexts(config, held_out, done)
