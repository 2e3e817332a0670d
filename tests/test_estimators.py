"""The study of estimators: its gradients by enumeration, and its quick form from end to end."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cdpg.target.pooled import PooledPartition
from enumeration import relative_error

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CONTEXT, M = 1, 2


@pytest.fixture(scope="module")
def modules() -> Any:
    """``estimators``, ``small_training`` and ``small_world``, which are scripts and in no package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import estimators
        import small_training
        import small_world
    finally:
        sys.path.remove(str(BENCHMARKS))
    return estimators, small_training, small_world


@pytest.fixture(scope="module")
def world(modules: Any) -> Any:
    sizes = modules[2].Sizes(
        training=3, set_aside=2, held_out=4, outcomes=5, attributes=4, shared=1, kinds=2, noise=2, dropped=0.0
    )
    return modules[2].make_world(0.3, 1, sizes)


def random_matrix(world: Any, seed: int) -> Tensor:
    shape = (1, 1, world.features.shape[2], world.attributes.shape[2])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact_gradient(world: Any, matrix: Tensor) -> Tensor:
    """Autograd through −Σ_x p(x) log π(x|c) for the one context."""
    matrix = matrix.clone().requires_grad_()
    log_pi = world.log_policy(matrix, torch.tensor([[[CONTEXT]]]))[0, 0, 0]
    (-(world.log_p[0, CONTEXT].exp() * log_pi).sum()).backward()
    assert matrix.grad is not None
    return matrix.grad


def expected_gradient(
    modules: Any, world: Any, matrix: Tensor, proposal: Tensor, kind: str = "exact", share: float = 1.0
) -> Tensor:
    """The estimate's expectation over all M-tuples of outcomes, and over which failing samples the variate keeps.

    What the tuples are is laid along the axis of rates.
    """
    training = modules[1]
    contexts = torch.tensor([[[CONTEXT]]])
    log_q = world.log_policy(proposal, contexts)[0, 0, 0]
    satisfies = world.log_p[0, CONTEXT].isfinite()
    kept_of = {True: [(1.0, 1.0)], False: [(share, 1 / share), (1 - share, 0.0)]} if share else {}
    probabilities, rows, variates = [], [], []
    for outcomes in product(range(len(log_q)), repeat=M):
        choices = [kept_of.get(bool(satisfies[x]), [(1.0, 0.0)]) for x in outcomes]
        for kept in product(*choices):
            chance = log_q[list(outcomes)].sum().exp()
            probabilities.append(chance * torch.tensor([c for c, _ in kept]).prod())
            rows.append(outcomes)
            variates.append([multiplier for _, multiplier in kept])
    outcomes = torch.tensor(rows)[:, None, None]
    many = contexts.expand(len(rows), -1, -1)
    log_ratio = (world.log_target(many)[:, :, 0] - log_q)[:, :, None].gather(3, outcomes)
    ones = torch.ones_like(log_ratio)
    variate = torch.tensor(variates, dtype=torch.float64)[:, None, None]
    visits = training.Visits(many, outcomes, log_q[outcomes], log_ratio, ones / M, variate)
    earlier = PooledPartition().add(
        (CONTEXT, 7), torch.tensor([[0.2, 0.0], [0.9, 0.4]]).double(), torch.ones(2, 2, dtype=torch.bool)
    )
    pools = training.Pools(kind, world, [[earlier]] * len(rows))
    pools.add(visits)
    weights = pools.weights(visits, replayed=False)
    found = training.estimate(
        world, matrix.expand(len(rows), -1, -1, -1), visits, weights, visits.variate, float("inf")
    )
    return (torch.stack(probabilities)[:, None, None, None] * found).sum(dim=0, keepdim=True)


@pytest.mark.parametrize("share", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("moved", [False, True])
def test_the_control_variate_leaves_the_expected_gradient(modules: Any, world: Any, share: float, moved: bool) -> None:
    """With all failing samples, with half of them at random, and for a policy that has left the proposal."""
    matrix = random_matrix(world, 0)
    proposal = random_matrix(world, 1) if moved else matrix
    found = expected_gradient(modules, world, matrix, proposal, share=share)
    assert relative_error(found, exact_gradient(world, matrix)) < 1e-12


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_pooled_gradient_has_the_exact_direction_and_the_batch_one_has_not(
    modules: Any, world: Any, share: float
) -> None:
    """With the control variate, whose expectation is 0, and without it."""
    matrix = random_matrix(world, 0)
    exact = exact_gradient(world, matrix)

    def off(kind: str) -> float:
        found = expected_gradient(modules, world, matrix, matrix, kind, share)
        return relative_error(found / found.norm(), exact / exact.norm())

    assert off("pooled") < 1e-12
    assert off("batch") > 0.01


def test_truncating_the_ratio_leaves_the_ideal_model_where_it_is_and_clipping_the_weight_does_not(modules: Any) -> None:
    ideal = torch.tensor([0.7, 0.3, 0.0], dtype=torch.float64)
    q = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    weight, log_rho = ideal / q, (ideal / q).log()
    coefficients = modules[1].coefficients
    assert coefficients(weight, log_rho, 1.0, 2.0).abs().max() < 1e-15
    assert coefficients(weight.clamp(max=2.0), log_rho, 1.0, float("inf")).abs().max() > 4


def test_a_world_has_the_z_that_was_asked_for_and_its_floor_is_a_minimum(modules: Any, world: Any) -> None:
    assert float(world.log_z.exp().mean()) == pytest.approx(0.3, abs=1e-9)
    for name in world.sets:
        for seed in range(5):
            assert float(world.excess(random_matrix(world, seed), name)) > 0


def test_adam_is_that_of_torch(modules: Any, world: Any) -> None:
    policy = modules[1].Policy(world, 1, modules[1].Variant(width=0, betas=(0.8, 0.97)))
    parameter = torch.nn.Parameter(policy.matrix().clone())
    optimizer = torch.optim.Adam([parameter], lr=0.1, betas=(0.8, 0.97))
    for seed in range(4):
        parameter.grad = random_matrix(world, seed)
        optimizer.step()
        policy.step(random_matrix(world, seed), torch.tensor([[0.1]], dtype=torch.float64))
    torch.testing.assert_close(policy.matrix(), parameter.detach())


def test_the_gradient_of_the_two_matrices_is_that_of_their_product(modules: Any, world: Any) -> None:
    """One step with a small rate moves along the sign of the gradient, as Adam does at first."""
    policy = modules[1].Policy(world, 1, modules[1].Variant(width=3))
    features, attributes = world.features.shape[2], world.attributes.shape[2]
    parts = policy.state[0, 0, 0].clone()
    first = parts[: features * 3].view(features, 3).requires_grad_()
    second = parts[features * 3 :].view(3, attributes).requires_grad_()
    gradient = random_matrix(world, 2)
    (first @ second * gradient[0, 0]).sum().backward()
    assert first.grad is not None and second.grad is not None
    policy.step(gradient, torch.tensor([[1e-3]], dtype=torch.float64))
    expected = 0.1 * torch.cat([first.grad.flatten(), second.grad.flatten()])
    torch.testing.assert_close(policy.state[1, 0, 0], expected)


@pytest.mark.exhaustive
def test_the_quick_form_prints_a_line_for_every_variant(modules: Any, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        modules[0].main(["--quick"])
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
    lines = capsys.readouterr().out.splitlines()
    for block in modules[0].BLOCKS.values():
        for name in block:
            first, second = (line for line in lines if line.startswith(f"| {name} |"))
            assert "nan" not in first + second
            assert float(first.split("|")[2].split("±")[0]) < 1.0
