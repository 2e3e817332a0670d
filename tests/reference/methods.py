"""The methods: each a loss over an epoch's samples, and its derivative by the log-probability of every token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from reference.model import Array, Parameters, Sequences, backward, states, token_log_probs
from reference.target import Judged


@dataclass(frozen=True)
class Settings:
    """What a run is asked for; the defaults are the documented ones."""

    method: str = "cdpg"
    epochs: int = 1000
    contexts_per_epoch: int = 32
    num_generations: int = 32
    max_completion_length: int = 128
    learning_rate: float = 1e-5
    warmup_epochs: int = 0
    decay_epochs: int = 0
    partition_epsilon: float = 1e-8
    batch_size: int = 1024
    max_grad_norm: float = math.inf
    seed: int = 0
    ziegler_beta: float = 0.2
    ziegler_target_kl: float = 6.0
    ziegler_horizon: int = 10_000
    evaluation_contexts: int = 64
    evaluation_samples: int = 16
    evaluate_every: int = 1
    gain_draws: int = 32
    log_samples: int = 8


@dataclass
class Method:
    """What a method knows of an epoch; ``weights`` are ``[row]``."""

    settings: Settings
    ratio_sum: float = 0.0
    count: int = 0
    """Of ``dpg``: Σ P/q and the samples it is over."""

    def begin(self, epoch: Judged, policy: Parameters) -> dict[str, float]:
        """Assign credit; returns what is logged."""
        epsilon, self.epoch = self.settings.partition_epsilon, epoch
        self.units = float(epoch.valid.sum())
        logged = {}
        if self.settings.method == "cdpg":
            weights = epoch.ratio / (epoch.z[:, None] + epsilon)
        elif self.settings.method == "dpg":
            self.ratio_sum, self.count = self.ratio_sum + epoch.ratio.sum(), self.count + int(epoch.valid.sum())
            z = self.ratio_sum / self.count
            weights, logged = epoch.ratio / (z + epsilon), {"z_running": z}
        else:
            weights = epoch.b
        self.weights = np.where(epoch.b > 0, weights, 0.0).flatten()
        self.active = self.weights != 0
        return logged

    def gradient(self, policy: Parameters, rows: list[int], divisor: float) -> tuple[float, Parameters]:
        """−Σ w log π / divisor; for ``reinforce`` w = b π/q, a constant in the gradient like any weight."""
        x = self.epoch.x.rows(rows)
        log_policy = token_log_probs(policy, x).sum(axis=1)
        w = self.weights[rows]
        if self.settings.method == "reinforce":
            w = w * np.exp(log_policy - self.epoch.log_q.flatten()[rows])
        d_log_prob = np.broadcast_to((-w / divisor)[:, None], x.tokens.shape)
        return float(-(w * log_policy).sum() / divisor), backward(policy, x, d_log_prob)

    @property
    def passes(self) -> int:
        """How often the samples of an epoch are gone through."""
        return 1

    @property
    def state(self) -> dict[str, float]:
        """What a later epoch needs to know."""
        if self.settings.method == "cdpg":
            return {"satisfying": float((self.epoch.ratio > 0).sum() / self.epoch.valid.sum())}
        return {"ratio_sum": self.ratio_sum, "count": self.count} if self.settings.method == "dpg" else {}


@dataclass
class Ziegler(Method):
    """PPO with a penalty for leaving the base: γ = 1, λ = 0.95, clip 0.2, value-loss weight 0.1, 4 passes."""

    base: Parameters = field(default_factory=dict)
    beta: float = 0.0

    passes = 4  # type: ignore[assignment]
    gae_lambda, clip, value_weight = 0.95, 0.2, 0.1

    def begin(self, epoch: Judged, policy: Parameters) -> dict[str, float]:
        self.epoch, x, valid = epoch, epoch.x, epoch.valid.flatten()
        counts = x.counts & valid[:, None]
        self.log_q, log_a = token_log_probs(policy, x), token_log_probs(self.base, x)
        self.old_values = self.values(policy, x)
        rewards = -self.beta * (self.log_q - log_a)
        last = epoch.lengths.flatten() - 1
        rewards[np.arange(len(last)), last] += epoch.b.flatten()
        advantages = np.zeros_like(rewards)
        for row, length in enumerate(last + 1):
            following = next_value = 0.0
            for t in reversed(range(length)):
                delta = rewards[row, t] + next_value - self.old_values[row, t]
                following = advantages[row, t] = delta + self.gae_lambda * following
                next_value = self.old_values[row, t]
        self.returns = advantages + self.old_values
        mean, variance = advantages[counts].mean(), advantages[counts].var()
        self.advantages = (advantages - mean) / np.sqrt(variance + 1e-8)
        self.units, self.active, self.counted = float(counts.sum()), valid, counts
        kl = float((epoch.log_q - epoch.log_a)[epoch.valid].mean())
        logged = {"beta": self.beta, "kl_policy_base": kl}
        error = min(max(kl / self.settings.ziegler_target_kl - 1, -0.2), 0.2)
        self.beta *= 1 + error * valid.sum() / self.settings.ziegler_horizon
        return logged

    @property
    def state(self) -> dict[str, float]:
        return {"beta": self.beta}

    def values(self, policy: Parameters, x: Sequences) -> Array:
        return np.where(x.counts, states(policy, x) @ policy["value"] + policy["bias"], 0.0)

    def gradient(self, policy: Parameters, rows: list[int], divisor: float) -> tuple[float, Parameters]:
        """Σ_t −min(r A, clip(r) A) + 0.1 · ½ max((V−R)², (V_clipped−R)²), over divisor; r = π/q of a token."""
        x, advantage, counted = self.epoch.x.rows(rows), self.advantages[rows], self.counted[rows]
        r = np.exp(token_log_probs(policy, x) - self.log_q[rows])
        free, held = -advantage * r, -advantage * np.clip(r, 1 - self.clip, 1 + self.clip)
        v, old, returns = self.values(policy, x), self.old_values[rows], self.returns[rows]
        near = old + np.clip(v - old, -self.clip, self.clip)
        far, close = 0.5 * (v - returns) ** 2, 0.5 * (near - returns) ** 2
        losses = np.maximum(free, held) + self.value_weight * np.maximum(far, close)
        # Where a clip is at work and its term is the larger one, it is a constant, and so has no gradient.
        flat = (np.abs(r - 1) > self.clip) & (held > free), (np.abs(v - old) > self.clip) & (close > far)
        d_log_prob = np.where(flat[0], 0.0, free) * counted / divisor
        d_value = np.where(flat[1], 0.0, self.value_weight * (v - returns)) * counted / divisor
        return float(losses[counted].sum() / divisor), backward(policy, x, d_log_prob, d_value)
