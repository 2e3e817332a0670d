"""How long a run will take, from how long its parts took."""

from __future__ import annotations

from dataclasses import dataclass

from cdpg.config import CDPGConfig


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
    """Held-out contexts that a model is evaluated on after ``done`` epochs until the end of the run.

    Some along the way (before the first epoch, at every interval, at the end), all of them for the base and the tuned
    model when the run has ended.
    """
    if not held_out:
        return 0
    interval = config.evaluation_interval
    along = sum(
        1 for epoch in range(done + 1, config.epochs + 1) if epoch % interval == 0 or epoch == config.epochs
    ) + (done == 0)
    return along * min(held_out, config.evaluation_contexts) + 2 * held_out * config.evaluate_at_end


def run_seconds(config: CDPGConfig, epoch: float, context: float, held_out: int, done: int = 0) -> float:
    """What is left of a run after ``done`` epochs, from the seconds of an epoch and of an evaluated context."""
    return (config.epochs - done) * epoch + context * evaluated_contexts(config, held_out, done)
