"""Trains the policies of ``small_world.py``: many rates and seeds at once, one variant of the estimator.

The partition estimates and the weights are those of the package (:mod:`cdpg.target`). Axes are
``[rate, seed, visit, sample]``; a visit is a context in one epoch with its M samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from small_world import World
from torch import Tensor

from cdpg.target import partition
from cdpg.target.pooled import PooledPartition, Prior

EPSILON = 1e-8


@dataclass(frozen=True)
class Variant:
    """One way to turn samples into steps."""

    partition: str = "batch"
    """``batch`` and ``pooled`` as in the package; ``exact`` is the true Z_c, which no program has."""
    variate: float = 0.0
    """The control variate: the share of the failing samples that have a gradient, weighted by its inverse; 0: none."""
    variate_on_replay: bool = True
    """Whether replayed samples have it too."""
    truncate: float = math.inf
    """Bound c of ρ = π/q in the coefficient ρ·(P/(Zπ) − 1)."""
    steps: int = 1
    """Optimiser steps on the fresh samples of an epoch, each on its share of the contexts."""
    replay: int = 0
    """Steps on samples of earlier epochs after those, each on as many visits as a step on fresh samples."""
    visits: str = "all"
    """Which visits are replayed: ``all`` alike, those of the ``last`` epochs, or by ``ess``, effective sample size."""
    last: int = 10
    merged: bool = False
    """Every step takes the mean over all visits so far, fresh ones included; ``replay`` steps more in each epoch."""
    guard: str = ""
    """What the gain on contexts set aside does, each epoch: ``keep`` the best weights; go ``back`` to them and halve
    the rate when it falls; halve the replays (``fewer``). The best weights are the result in each case."""
    patience: float = 0.0
    """A fall counts beyond so many standard errors of the paired difference."""
    decay: float = 2 / 3
    """Share of the epochs, at the end, over which the rate falls linearly to 0."""
    average: float = 0.0
    """Decay of an exponential moving average over epochs, which is the result; 1 for the mean of the last half."""
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = math.inf
    largest_weight: float = math.inf
    """w is clipped here."""
    spread: float = 0.0
    """Samples of a context in proportion to this power of 1/ESS − 1, known exactly, as no program knows it."""
    epochs: int = 30
    contexts: int = 32
    """N."""
    samples: int = 16
    """M."""
    width: int = 32
    """W is a product of two matrices with this inner dimension, the second 0 at first; 0 for W itself."""


@dataclass(frozen=True)
class Visits:
    """Some visits, ``[rate, seed, visit, sample]``; contexts are ``[rate, seed, visit]``."""

    contexts: Tensor
    outcomes: Tensor
    log_q: Tensor
    log_ratio: Tensor
    """log P/q, −∞ where the sample fails."""
    counted: Tensor
    """1/M_c, or 0 for no sample: what a mean over the samples of a context multiplies by."""
    variate: Tensor
    """What the control variate is multiplied by, 1 in expectation."""

    def among(self, chosen: Tensor) -> Visits:
        """Those of the indices ``[rate, seed, visit]``."""
        wide = chosen[..., None].expand(*chosen.shape, self.outcomes.shape[-1])
        return self._map(lambda tensor: tensor.gather(2, chosen if tensor.dim() == 3 else wide))

    def part(self, rows: slice) -> Visits:
        return self._map(lambda tensor: tensor[:, :, rows])

    def _map(self, function: object) -> Visits:
        return Visits(*(function(getattr(self, entry.name)) for entry in fields(self)))  # type: ignore[operator]

    @property
    def valid(self) -> Tensor:
        return self.counted > 0

    @property
    def satisfying(self) -> Tensor:
        return self.log_ratio > -math.inf

    def gradients(self, variant: Variant, replayed: bool) -> Tensor:
        """Samples that need a gradient in a step on all of these, ``[rate, seed]``."""
        needed = self.satisfying
        if variant.variate and (variant.variate_on_replay or not replayed):
            needed = needed | (self.variate > 0)
        return (needed & self.valid).sum(dim=(2, 3)).double()


def join(parts: Sequence[Visits]) -> Visits:
    return Visits(*(torch.cat([getattr(part, entry.name) for part in parts], dim=2) for entry in fields(Visits)))


def coefficients(weight: Tensor, log_rho: Tensor, variate: Tensor | float, truncate: float) -> Tensor:
    """The coefficient of ∇log π for each sample: w − π/q, or w where ``variate`` is 0, with π/q truncated.

    w − ρ = ρ·(P/(Zπ) − 1) for ρ = π/q. Truncating ρ in the product leaves the policy π = p where it is: there the
    second factor is 0 for every outcome. Clipping w does not.
    """
    rho = log_rho.exp()
    return weight * (truncate / rho).clamp(max=1.0) - variate * rho.clamp(max=truncate)


def estimate(
    world: World, matrix: Tensor, visits: Visits, weights: Tensor, variate: Tensor | float, truncate: float
) -> Tensor:
    """The gradient with respect to W, a mean over visits of the means over their samples."""
    log_pi = world.log_policy(matrix, visits.contexts)
    log_rho = log_pi.gather(3, visits.outcomes) - visits.log_q
    coefficient = coefficients(weights, log_rho, variate, truncate) * visits.counted
    summed = torch.zeros_like(log_pi).scatter_add_(3, visits.outcomes, coefficient)
    return world.gradient(visits.contexts, log_pi, summed)


class Policy:
    """Parameters for every rate and seed, ``[rate, seed, parameter]``, stepped by Adam."""

    def __init__(self, world: World, rates: int, variant: Variant) -> None:
        seeds, features, attributes = len(world.features), world.features.shape[2], world.attributes.shape[2]
        self._shapes = ((features, variant.width), (variant.width, attributes))
        self._variant = variant
        generator = torch.Generator().manual_seed(5)
        first = torch.randn(seeds, *self._shapes[0], generator=generator, dtype=torch.float64)
        second = torch.zeros(seeds, variant.width * attributes, dtype=torch.float64)
        if variant.width:
            start = torch.cat([first.flatten(1) / variant.width**0.5, second], dim=1)
        else:
            start = torch.zeros(seeds, features * attributes, dtype=torch.float64)
            self._shapes = ((features, attributes),)
        # [3, rate, seed, parameter]: the parameters and the two moments
        nothing = torch.zeros_like(start)
        self.state = torch.stack([start, nothing, nothing])[:, None].repeat(1, rates, 1, 1)
        self._taken = torch.zeros(rates, seeds, 1, dtype=torch.float64)

    def matrix(self) -> Tensor:
        """W, ``[rate, seed, feature, attribute]``."""
        parts = self._parts()
        return parts[0] @ parts[1] if len(parts) == 2 else parts[0]

    def step(self, gradient: Tensor, rate: Tensor) -> None:
        """One step of Adam where the rate is above 0; ``gradient`` is that of W."""
        parts = self._parts()
        flat = gradient.flatten(2)
        if len(parts) == 2:
            flat = torch.cat([(gradient @ parts[1].mT).flatten(2), (parts[0].mT @ gradient).flatten(2)], dim=2)
        if self._variant.max_grad_norm < math.inf:
            flat = flat * (self._variant.max_grad_norm / flat.norm(dim=2, keepdim=True)).clamp(max=1.0)
        first, second = self._variant.betas
        taken = self._taken + 1
        mean = first * self.state[1] + (1 - first) * flat
        square = second * self.state[2] + (1 - second) * flat.square()
        move = mean / (1 - first**taken) / ((square / (1 - second**taken)).sqrt() + 1e-8)
        new = torch.stack([self.state[0] - rate[..., None] * move, mean, square])
        moving = (rate > 0)[..., None]
        self.state = new if bool(moving.all()) else torch.where(moving, new, self.state)
        self._taken = torch.where(moving, taken, self._taken)

    def _parts(self) -> list[Tensor]:
        parts, start = [], 0
        for shape in self._shapes:
            size = math.prod(shape)
            parts.append(self.state[0, ..., start : start + size].unflatten(2, shape))
            start += size
        return parts


@dataclass
class Pools:
    """The partition estimates of every rate and seed."""

    kind: str
    world: World
    pools: list[list[PooledPartition]]
    priors: list[list[Prior | None]] = field(default_factory=list)

    def add(self, fresh: Visits) -> None:
        if self.kind != "pooled":
            return
        self.priors = self._priors()  # before the epoch's samples, as the package has it
        ratio = fresh.log_ratio.exp()
        self.pools = [
            [pool.add(fresh.contexts[r, s].tolist(), ratio[r, s], fresh.valid[r, s]) for s, pool in enumerate(row)]
            for r, row in enumerate(self.pools)
        ]

    def weights(self, visits: Visits, replayed: bool) -> Tensor:
        """P/(Ẑ_c q), ``[rate, seed, visit, sample]``; replayed samples take the prior that has seen them all."""
        log_ratio = visits.log_ratio
        if self.kind == "batch":
            flat, valid = log_ratio.flatten(0, 2), visits.valid.flatten(0, 2)
            return partition.weights(flat, partition.log_partition(flat, valid), EPSILON).view_as(log_ratio)
        if self.kind == "exact":
            log_z = self.world.log_z[torch.arange(log_ratio.shape[1])[:, None], visits.contexts]
            return partition.weights(log_ratio.flatten(0, 2), log_z.flatten(), 0.0).view_as(log_ratio)
        weights = torch.empty_like(log_ratio)
        priors = self._priors() if replayed else self.priors
        for r, row in enumerate(self.pools):
            for s, pool in enumerate(row):
                log_z = pool.log_z(visits.contexts[r, s].tolist(), log_ratio[r, s], priors[r][s])
                weights[r, s] = partition.weights(log_ratio[r, s], log_z, EPSILON)
        return weights

    def _priors(self) -> list[list[Prior | None]]:
        return [[pool.prior() for pool in row] for row in self.pools]


@dataclass(frozen=True)
class Outcome:
    """What a variant reached, ``[rate, seed]``."""

    held_out: Tensor
    training: Tensor
    work: Tensor
    """Two units for each sample drawn, one for each gradient of a sample."""


class Training:
    """The training of one variant."""

    def __init__(self, world: World, variant: Variant, rates: Sequence[float]) -> None:
        self.world, self.variant = world, variant
        self.seeds = len(world.features)
        self.policy = Policy(world, len(rates), variant)
        self.rate = torch.tensor(rates, dtype=torch.float64)[:, None].repeat(1, self.seeds)
        self.pools = Pools(variant.partition, world, [[PooledPartition()] * self.seeds for _ in rates])
        self.replays = torch.full_like(self.rate, variant.replay)
        self.work = torch.zeros_like(self.rate)
        self.seen: list[Visits] = []
        self.choice = torch.Generator().manual_seed(7)
        self.best = (
            torch.full_like(world.gains(self.policy.matrix()), -math.inf),
            self.policy.state,
            self.policy.matrix(),
        )
        self.mean = torch.zeros_like(self.policy.matrix())
        self._draw_order()

    def run(self) -> Outcome:
        for epoch in range(self.variant.epochs):
            self._epoch(epoch)
        matrix = self.best[2] if self.variant.guard else self.mean if self.variant.average else self.policy.matrix()
        work = self.work + 2 * self.variant.epochs * self.variant.contexts * self.variant.samples
        return Outcome(self.world.excess(matrix, "held out"), self.world.excess(matrix, "training"), work)

    def _draw_order(self) -> None:
        """Contexts and uniform numbers, the same for every variant with the same N and M."""
        variant, training = self.variant, self.world.sizes.training
        visits = variant.epochs * variant.contexts
        generators = [torch.Generator().manual_seed(1000 + seed) for seed in range(self.seeds)]
        passes = math.ceil(visits / training)
        orders = [
            torch.cat([torch.randperm(training, generator=g) for _ in range(passes)])[:visits] for g in generators
        ]
        self.order = torch.stack(orders).view(self.seeds, variant.epochs, variant.contexts)
        drawn = variant.samples * (4 if variant.spread else 1)
        shape = (variant.epochs, variant.contexts, drawn)
        self.uniform = torch.stack([torch.rand(*shape, generator=g, dtype=torch.float64) for g in generators])

    def _sample(self, epoch: int) -> Visits:
        rates = len(self.rate)
        contexts = self.order[:, epoch].expand(rates, -1, -1)
        log_pi = self.world.log_policy(self.policy.matrix(), contexts)
        uniform = self.uniform[:, epoch].expand(rates, -1, -1, -1).contiguous()
        outcomes = torch.searchsorted(log_pi.exp().cumsum(dim=-1), uniform).clamp(max=log_pi.shape[-1] - 1)
        log_q = log_pi.gather(3, outcomes)
        log_ratio = self.world.log_target(contexts).gather(3, outcomes) - log_q
        counted = torch.full_like(log_q, 1 / self.variant.samples)
        if self.variant.spread:
            counted = self._spread(contexts, log_pi, outcomes.shape[-1])
            log_ratio = log_ratio.masked_fill(counted == 0, -math.inf)
        share = self.variant.variate
        variate = (torch.rand(log_q.shape[1:], generator=self.choice) < share).double() / max(share, 1e-9)
        variate = torch.where(log_ratio > -math.inf, float(share > 0), variate.expand_as(log_q))
        return Visits(contexts, outcomes, log_q, log_ratio, counted, variate)

    def _spread(self, contexts: Tensor, log_pi: Tensor, most: int) -> Tensor:
        """1/M_c with M_c in proportion to a power of the noise of a context's weights."""
        log_p = self.world.log_target(contexts).log_softmax(dim=-1)
        noise = ((2 * log_p - log_pi).exp().sum(dim=-1) - 1).clamp(min=1e-3) ** self.variant.spread
        for _ in range(5):
            noise = (noise / noise.mean(dim=-1, keepdim=True)).clamp(0.25, 4.0)
        number = (noise * self.variant.samples).round().clamp(2, most)[..., None]
        return (torch.arange(most) < number) / number

    def _rate(self, epoch: int) -> Tensor:
        """As :meth:`cdpg.config.CDPGConfig.rate` has it, with the warm-up by default."""
        epochs = self.variant.epochs
        rise = (epoch + 1) / max(1, epochs // 10)
        fall = (epochs - epoch) / (int(self.variant.decay * epochs) + 1)
        return self.rate * min(1.0, rise, fall)

    def _epoch(self, epoch: int) -> None:
        variant, rate = self.variant, self._rate(epoch)
        fresh = self._sample(epoch)
        self.pools.add(fresh)
        if variant.merged:
            self.seen.append(fresh)
            self._merged_steps(rate)
        else:
            weights = self._weights(fresh, replayed=False)
            size = variant.contexts // variant.steps
            for start in range(0, variant.contexts, size):
                rows = slice(start, start + size)
                self._step(fresh.part(rows), weights[:, :, rows], rate, replayed=False)
            if variant.replay:
                self._replay(rate, size)
                self.seen.append(fresh)
        self._average(epoch)
        if variant.guard:
            self._guard()

    def _weights(self, visits: Visits, replayed: bool) -> Tensor:
        return self.pools.weights(visits, replayed).clamp(max=self.variant.largest_weight)

    def _step(self, visits: Visits, weights: Tensor, rate: Tensor, replayed: bool) -> None:
        variate = visits.variate if self.variant.variate_on_replay or not replayed else 0.0
        gradient = estimate(self.world, self.policy.matrix(), visits, weights, variate, self.variant.truncate)
        self.policy.step(gradient, rate)
        self.work += (rate > 0) * visits.gradients(self.variant, replayed)

    def _replay(self, rate: Tensor, size: int) -> None:
        """Steps on earlier visits, with their own q and the present Ẑ_c."""
        if not self.seen:
            return
        past = join(self.seen[-self.variant.last :] if self.variant.visits == "last" else self.seen)
        weights = self._weights(past, replayed=True)
        count = past.contexts.shape[2]
        ratio = past.log_ratio.exp()
        ess = ratio.sum(dim=3).square() / ratio.square().sum(dim=3).clamp(min=1e-300) + 1e-6
        for number in range(self.variant.replay):
            going = self.replays > number
            if not bool(going.any()):
                return
            if self.variant.visits == "ess":
                chosen = torch.multinomial(ess.flatten(0, 1), size, generator=self.choice).view(*ess.shape[:2], size)
            else:
                picks = [torch.randperm(count, generator=self.choice)[:size] for _ in range(self.seeds)]
                chosen = torch.stack(picks).expand(len(rate), -1, -1)
            wide = chosen[..., None].expand(*chosen.shape, weights.shape[3])
            self._step(past.among(chosen), weights.gather(2, wide), torch.where(going, rate, 0.0), replayed=True)

    def _merged_steps(self, rate: Tensor) -> None:
        """Steps on the mean over all visits so far, each with its own q and the present Ẑ_c; no control variate.

        The coefficients do not change from step to step, so that they can be summed for each context.
        """
        past, training = join(self.seen), slice(0, self.world.sizes.training)
        coefficient = self._weights(past, replayed=True) * past.counted
        outcomes = self.world.log_a.shape[2]
        summed = torch.zeros(*rate.shape, training.stop * outcomes, dtype=torch.float64)
        places = past.contexts[..., None] * outcomes + past.outcomes
        summed.scatter_add_(2, places.flatten(2), coefficient.flatten(2) * training.stop / past.contexts.shape[2])
        for _ in range(1 + self.variant.replay):
            log_pi = self.world.log_policy(self.policy.matrix(), training)
            gradient = self.world.gradient(training, log_pi, summed.view_as(log_pi))
            self.policy.step(gradient, rate)
            self.work += past.gradients(self.variant, replayed=True)

    def _average(self, epoch: int) -> None:
        """A moving average over epochs, started at the first, or the mean of the last half."""
        average, epochs = self.variant.average, self.variant.epochs
        share = max(1 - average, 1 / (epoch + 1))
        if average == 1:
            share = 1 / max(1, epoch + 1 - epochs // 2)
        self.mean = self.mean + share * (self.policy.matrix() - self.mean)

    def _guard(self) -> None:
        """Compare the gain with the best so far, context by context."""
        variant, state = self.variant, self.policy.state
        matrix = self.mean if variant.average else self.policy.matrix()
        gains, (best, best_state, best_matrix) = self.world.gains(matrix), self.best
        change = gains - best
        better = change.mean(dim=2) > 0
        error = change.std(dim=2) / change.shape[2] ** 0.5
        worse = change.mean(dim=2) < -variant.patience * error
        wide = better[..., None]
        self.best = (
            torch.where(wide, gains, best),
            torch.where(wide, state, best_state),
            torch.where(wide[..., None], matrix, best_matrix),
        )
        if variant.guard == "back":
            self.policy.state = torch.where(worse[..., None], self.best[1], state)
            self.rate = torch.where(worse, self.rate / 2, self.rate)
        if variant.guard == "fewer":
            self.replays = torch.where(worse, (self.replays / 2).floor(), self.replays)


def train(world: World, variant: Variant, rates: Sequence[float]) -> Outcome:
    """Train one variant with every rate on every seed."""
    return Training(world, variant, rates).run()
