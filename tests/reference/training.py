"""The loop: contexts, samples, verdicts, Ẑ_c, weights, optimiser steps, a line of figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reference.methods import Method, Settings, Ziegler
from reference.model import Context, Parameters
from reference.randomness import drawn_contexts, shuffled
from reference.target import (
    Judge,
    Judged,
    effective_samples,
    kl_target_policy,
    mean_of_known,
    noise_of_z,
    normalised_deviation,
    sampled,
)


@dataclass
class Adam:
    """Kingma and Ba (2015), betas 0.9 and 0.999, ε 1e-8, in place."""

    first: Parameters
    second: Parameters
    steps: int = 0

    def step(self, parameters: Parameters, gradient: Parameters, rate: float) -> None:
        self.steps += 1
        for name, g in gradient.items():
            self.first[name] = 0.9 * self.first[name] + 0.1 * g
            self.second[name] = 0.999 * self.second[name] + 0.001 * g**2
            unbiased = self.first[name] / (1 - 0.9**self.steps), self.second[name] / (1 - 0.999**self.steps)
            parameters[name] = parameters[name] - rate * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)


@dataclass
class Run:
    """What a run leaves behind."""

    settings: Settings
    base: Parameters
    policy: Parameters
    adam: Adam
    epochs: list[Judged] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    along: dict[int, Parameters] = field(default_factory=dict)
    """The policy at the evaluations during the run, by epoch."""
    ragged: list[bool] = field(default_factory=list)
    """Of each epoch: whether its ragged last batch had a gradient."""
    norms: list[float] = field(default_factory=list)
    """Of each step, before clipping."""
    state: dict[str, float] = field(default_factory=dict)
    """What the method carries from epoch to epoch."""


def learning_rate(settings: Settings, epoch: int) -> float:
    """A linear rise over the warm-up, a plateau, and a linear fall that would reach 0 after the last epoch."""
    rise = epoch / max(1, settings.warmup_epochs)
    fall = (settings.epochs + 1 - epoch) / (settings.decay_epochs + 1)
    return settings.learning_rate * min(1.0, rise, fall)


def train(base: Parameters, contexts: Sequence[Context], judge: Judge, settings: Settings) -> Run:
    """Every epoch: contexts, samples, verdicts, Ẑ_c, weights, steps."""
    policy = dict(base)
    method = Method(settings)
    if settings.method == "ziegler":
        policy |= {"value": np.zeros(base["head"].shape[1]), "bias": np.zeros(1)}
        method = Ziegler(settings, base=base, beta=settings.ziegler_beta)
    zeros = {name: np.zeros_like(values) for name, values in policy.items()}
    run = Run(settings, base, policy, Adam(dict(zeros), dict(zeros)))
    for number in range(1, settings.epochs + 1):
        chosen = drawn_contexts(settings.seed, number, settings.contexts_per_epoch, len(contexts))
        epoch = sampled(
            policy, base, [contexts[i] for i in chosen], judge, settings.seed, "train", number,
            settings.num_generations, settings.max_completion_length,
        )  # fmt: skip
        run.epochs.append(epoch)
        logged = method.begin(epoch, policy)
        run.metrics.append({**_measured(epoch, settings), "epoch": number, **_steps(run, method, number), **logged})
        if number % settings.evaluate_every == 0 or number == settings.epochs:
            run.along[number] = dict(policy)
    run.state = method.state
    return run


def _steps(run: Run, method: Method, number: int) -> dict[str, Any]:
    """Shuffled batches; the divisor is the same for all, so that a sample weighs the same in a ragged last one."""
    settings, samples, rate = run.settings, len(method.active), learning_rate(run.settings, number)
    divisor = method.units * settings.batch_size / samples
    losses, norms, skipped = [], [], 0
    for part in range(method.passes):
        order = shuffled(settings.seed, f"shuffle-{part}", number, samples)
        for start in range(0, samples, settings.batch_size):
            rows = [row for row in order[start : start + settings.batch_size] if method.active[row]]
            if start + settings.batch_size > samples:
                run.ragged.append(bool(rows))
            if not rows:
                skipped += 1
                continue
            loss, gradient = method.gradient(run.policy, rows, divisor)
            norm = math.sqrt(sum(float((g**2).sum()) for g in gradient.values()))
            scale = min(1.0, settings.max_grad_norm / (norm + 1e-6))  # with PyTorch's guard
            run.adam.step(run.policy, {name: scale * g for name, g in gradient.items()}, rate)
            losses.append(loss)
            norms.append(norm)
    run.norms += norms
    return {
        "loss": float(np.mean(losses)) if losses else None,
        "grad_norm": float(np.mean(norms)) if norms else None,
        "learning_rate": rate,
        "steps": len(losses),
        "steps_skipped": skipped,
        "steps_nonfinite": 0,
        "steps_replayed": 0,
        "pruned": 0.0,
    }


def _measured(epoch: Judged, settings: Settings) -> dict[str, Any]:
    """A line of ``metrics.jsonl``; means over samples are over those that were judged, zeros included."""
    judged = epoch.valid.any(axis=1)
    kinds = {kind: list(epoch.failures.values()).count(kind) for kind in set(epoch.failures.values())}
    return {
        "satisfaction": float(epoch.b[epoch.valid].mean()),
        "coverage": float((epoch.b > 0)[judged].any(axis=1).mean()),
        "z_mean": mean_of_known(epoch.z),
        "z_nstd": normalised_deviation(epoch.z),
        "z_nstd_corrected": normalised_deviation(epoch.z, noise_of_z(epoch)),
        "ess": mean_of_known(effective_samples(epoch)),
        "kl_target_policy": mean_of_known(kl_target_policy(epoch, settings.partition_epsilon)),
        "length": float(epoch.lengths[epoch.valid].mean()),
        "samples": epoch.b.size,
        "tokens": int(epoch.lengths.sum()),
        "not_applicable": int((~epoch.applies).sum()),
        "checks_failed": len(epoch.failures),
        "checks_exhausted": 0,
        **{f"checks_failed_{kind}": count for kind, count in kinds.items()},
    }
