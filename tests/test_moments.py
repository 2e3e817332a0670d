"""λ of moments, on models that can be enumerated: every outcome is a sample with weight log a + log b."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cdpg.target.moments import MomentSamples, Unreachable, fit_multipliers, summarize
from cdpg.target.target import log_target
from enumeration import Universe, contexts_of, tabular


class World:
    """All outcomes of three contexts, with a constraint and two features."""

    def __init__(self, seed: int = 0, contexts: int = 3) -> None:
        model = tabular(seed, contexts)
        self.universe = Universe.of(model, contexts_of(contexts))
        self.log_a = self.universe.log_prob(model)
        self.b = self.universe.satisfied(lambda prompt, text: text.count("c") < 2)
        starts = self.universe.satisfied(lambda prompt, text: text.startswith("a"))
        texts = self.universe.samples.texts
        length = torch.tensor([[float(len(text)) for text in row] for row in texts], dtype=torch.float64)
        self.phi = torch.stack([starts, length], dim=2)

    def samples(self, features: list[int], b: Tensor | None = None) -> MomentSamples:
        log_weight = log_target(self.log_a, torch.ones_like(self.b) if b is None else b)
        return MomentSamples(log_weight, self.phi[..., features], torch.ones_like(self.b, dtype=torch.bool))

    def moments(self, multipliers: tuple[float, ...], features: list[int], b: Tensor | None = None) -> Tensor:
        """E_c E_{p_c}[φ], straight from the definition."""
        tilt = (self.phi[..., features] * torch.tensor(multipliers, dtype=torch.float64)).sum(dim=2)
        weight = self.log_a.exp() * (torch.ones_like(self.b) if b is None else b) * tilt.exp()
        ideal = weight / weight.sum(dim=1, keepdim=True)
        return (ideal[..., None] * self.phi[..., features]).sum(dim=1).mean(dim=0)


def means(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_binary_moment_in_one_context_has_a_closed_form() -> None:
    world = World(contexts=1)
    natural = float(world.moments((0.0,), [0]))
    fit = fit_multipliers(world.samples([0]), means(0.5))
    logit = math.log(0.5 / 0.5) - math.log(natural / (1 - natural))
    assert fit.multipliers[0] == pytest.approx(logit, abs=1e-9)
    assert fit.natural[0] == pytest.approx(natural, abs=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize(("features", "asked"), [([0], (0.5,)), ([1], (1.3,)), ([0, 1], (0.6, 2.2))])
def test_the_moments_of_the_fit_are_those_asked_for(
    seed: int, hard: bool, features: list[int], asked: tuple[float, ...]
) -> None:
    world = World(seed)
    b = world.b if hard else None
    fit = fit_multipliers(world.samples(features, b), means(*asked))
    assert torch.allclose(world.moments(fit.multipliers, features, b), means(*asked), atol=1e-9, rtol=0)
    assert fit.reached == pytest.approx(asked, abs=1e-9)
    moved = [value + 1e-6 for value in fit.multipliers]  # λ itself is right to 1e-6: so small a change is seen
    assert not torch.allclose(world.moments(tuple(moved), features, b), means(*asked), atol=1e-9, rtol=0)


def test_contexts_count_equally_whatever_their_z() -> None:
    """With unnormalised weights over all contexts together, those with a large Z would decide."""
    world = World()
    scaled = world.samples([0])
    scale = means(0.0, 50.0, -400.0)
    scaled = dataclasses.replace(scaled, log_weight=scaled.log_weight + scale[:, None])
    assert fit_multipliers(scaled, means(0.5)).multipliers == pytest.approx(
        fit_multipliers(world.samples([0]), means(0.5)).multipliers, abs=1e-9
    )


@pytest.mark.parametrize(("unit", "shift"), [(1e7, -5e6), (1e-7, 0.0)])
def test_the_unit_of_a_feature_does_not_matter(unit: float, shift: float) -> None:
    """λ·φ stays what it is, and a moment is as near to what was asked for as φ's range lets one tell."""
    world = World()
    plain = world.samples([0])
    scaled = dataclasses.replace(plain, phi=unit * plain.phi + shift)
    found = fit_multipliers(scaled, means(0.5 * unit + shift))
    assert found.multipliers[0] * unit == pytest.approx(fit_multipliers(plain, means(0.5)).multipliers[0], abs=1e-8)
    assert found.reached[0] == pytest.approx(0.5 * unit + shift, abs=1e-8 * unit)


def test_few_evaluations_of_the_dual_are_needed() -> None:
    """Newton's method with the true Hessian doubles the right digits with every step."""
    evaluations = 0

    class Counting(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal evaluations
            evaluations += func is Tensor.logsumexp
            return func(*args, **(kwargs or {}))

    samples = World().samples([0, 1])
    with Counting():
        fit_multipliers(samples, means(0.6, 2.2))
    assert 0 < evaluations <= 6


def test_a_moment_given_twice_is_one() -> None:
    world = World()
    alone = fit_multipliers(world.samples([0]), means(0.5)).multipliers[0]
    twice = fit_multipliers(world.samples([0, 0]), means(0.5, 0.5)).multipliers
    assert sum(twice) == pytest.approx(alone, abs=1e-9)


def test_near_the_edge_of_what_can_be_reached() -> None:
    world = World()
    fit = fit_multipliers(world.samples([0]), means(1 - 1e-7))
    assert fit.reached[0] == pytest.approx(1 - 1e-7, abs=1e-11)
    assert fit.multipliers[0] > 15


@pytest.mark.parametrize("asked", [-0.1, 0.0, 1.0, 1.5])
def test_outside_of_what_can_be_reached(asked: float) -> None:
    with pytest.raises(Unreachable) as error:
        fit_multipliers(World().samples([0]), means(asked))
    assert (error.value.fit.lowest, error.value.fit.highest) == ((0.0,), (1.0,))


def test_the_range_is_that_of_samples_within_contexts() -> None:
    """Of three contexts, one has no sample with φ = 1: it stays at 0, and 2/3 is the most that can be had."""
    phi = means(0, 1, 0, 1, 0, 0).view(3, 2, 1)
    samples = MomentSamples(torch.zeros(3, 2).double(), phi, torch.ones(3, 2, dtype=torch.bool))
    assert fit_multipliers(samples, means(0.5)).reached[0] == pytest.approx(0.5)
    with pytest.raises(Unreachable) as error:
        fit_multipliers(samples, means(0.7))
    assert error.value.fit.highest[0] == pytest.approx(2 / 3)


def test_a_constant_cannot_be_moved() -> None:
    samples = World().samples([0])
    constant = dataclasses.replace(samples, phi=torch.full_like(samples.phi, 0.3))
    with pytest.raises(Unreachable) as error:
        fit_multipliers(constant, means(0.5))
    assert error.value.fit.lowest == error.value.fit.highest == (pytest.approx(0.3),)


def test_moments_that_exclude_each_other() -> None:
    """Each by itself can be had; together φ_1 + φ_2 ≤ 1 cannot have the means 0.8 and 0.8."""
    phi = means(1, 0, 0, 1, 0, 0).view(1, 3, 2)
    samples = MomentSamples(torch.zeros(1, 3).double(), phi, torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(Unreachable) as error:
        fit_multipliers(samples, means(0.8, 0.8))
    assert error.value.fit.reached == pytest.approx((0.5, 0.5), abs=1e-3)
    assert fit_multipliers(samples, means(0.45, 0.5)).reached == pytest.approx((0.45, 0.5))


def test_samples_without_weight_do_not_widen_the_range() -> None:
    """The third sample does not satisfy, and φ is not known of it."""
    phi = means(2, 3, math.nan).view(1, 3, 1)
    log_weight = torch.tensor([[0.0, 0.0, -math.inf]], dtype=torch.float64)
    samples = MomentSamples(log_weight, phi, torch.ones(1, 3, dtype=torch.bool))
    fit = fit_multipliers(samples, means(2.25))
    assert (fit.lowest, fit.highest, fit.natural) == ((2.0,), (3.0,), (2.5,))
    assert fit.multipliers[0] == pytest.approx(-math.log(3))
    with pytest.raises(Unreachable, match=r"^no multipliers give these moments$") as error:
        fit_multipliers(samples, means(1.5))
    assert error.value.fit.multipliers == (0.0,)


def test_contexts_without_a_satisfying_sample_do_not_count() -> None:
    world = World()
    some = fit_multipliers(world.samples([0]), means(0.5))
    extra = torch.cat([world.samples([0]).log_weight, torch.full_like(world.log_a[:1], -math.inf)])
    phi = torch.cat([world.phi[..., :1], torch.full_like(world.phi[:1, :, :1], math.nan)])
    samples = MomentSamples(extra, phi, torch.ones_like(extra, dtype=torch.bool))
    assert fit_multipliers(samples, means(0.5)) == some


def test_the_effective_sample_size_is_a_share_of_the_samples() -> None:
    phi = means(1, 0, 0, 0).view(1, 4, 1)
    samples = MomentSamples(torch.zeros(1, 4).double(), phi, torch.ones(1, 4, dtype=torch.bool))
    weight = means(3.0, 1.0, 1.0, 1.0)
    found = summarize(samples, means(math.log(3.0)))
    assert found.ess == pytest.approx(float(weight.sum() ** 2 / (weight**2).sum()) / 4)
    assert found.reached[0] == pytest.approx(0.5)
    assert (found.contexts, found.samples) == (1, 4)


def test_contexts_that_show_nothing_do_not_raise_the_effective_sample_size() -> None:
    """Their weights are even: a plain mean over contexts would be the larger, the fewer contexts show φ at all."""
    phi = torch.zeros(10, 4, 1, dtype=torch.float64)
    phi[0, 0] = 1.0
    samples = MomentSamples(torch.zeros(10, 4).double(), phi, torch.ones(10, 4, dtype=torch.bool))
    found = summarize(samples, means(math.log(1000.0)))
    uneven = 4 * (1000.0**2 + 3) / (1000.0 + 3) ** 2
    assert found.ess == pytest.approx(1 / ((uneven + 9) / 10))
