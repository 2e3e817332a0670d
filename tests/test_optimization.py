"""An epoch's optimiser steps against the same steps in plain NumPy: rate, divisor, order, clipping, what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cdpg import CDPGConfig
from cdpg.errors import RunError
from cdpg.methods import EpochLoss, Method, State, WeightedMethod, make_method
from cdpg.methods.cdpg import CDPG
from cdpg.models.base import LanguageModel, Rows, TokenScores
from cdpg.models.rng import UniformStream
from cdpg.models.tabular import TabularModel
from cdpg.rollout.rollout import Rollout
from cdpg.training.optimization import Batch, StepSummary, Updater, make_optimizer, trainable_parameters
from uneven import VALID, Array, M, N, completions, log_prob_gradient, scored, table, uneven_epoch

RATE = 0.1
DRAWN = [x for row in completions() for x in row]
BATCHES = (6, 6, 6, 2)
"""Twenty samples in batches of six: the last is ragged."""


class Alone:
    """One process."""

    def total(self, tensor: Tensor) -> Tensor:
        return tensor

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """There is nothing to add."""


def make_updater(
    policy: LanguageModel, method: Method, processes: Any = None, optimizer: Any = None, **settings: Any
) -> Updater:
    values = {"contexts_per_epoch": N, "num_generations": M, "learning_rate": RATE, "warmup_epochs": 0, "epochs": 9}
    config = CDPGConfig(**(values | {"tokens_per_pass": 11} | settings))
    parameters = list(policy.module.parameters())
    sgd = torch.optim.SGD(parameters, lr=99.0)
    return Updater(policy, method, None, optimizer or sgd, parameters, config, processes or Alone())


def make_epoch(number: int = 1, share: range = range(N)) -> Rollout:
    return uneven_epoch(table(1), table(2), number=number, share=share)


def method(name: str, **settings: Any) -> WeightedMethod:
    made = make_method(CDPGConfig(method=name, **settings))
    assert isinstance(made, WeightedMethod)
    return made


def weights(name: str, epoch: Rollout) -> Array:
    """``[context, sample]``, in a first epoch."""
    made = method(name)
    return made.weights(epoch, made.advance(made.begin(), epoch)).numpy()


def update(updater: Updater, epoch: Rollout) -> StepSummary:
    """The steps of a first epoch."""
    return updater.update(epoch, updater.method.begin())


def shuffled(number: int, seed: int, passes: int, sizes: Iterable[int] = BATCHES) -> list[list[int]]:
    """The rows of each batch: a permutation of the epoch's samples for each pass, cut into batches."""
    batches = []
    for i in range(passes):
        order = iter(UniformStream(seed, f"shuffle-{i}", number).permutation(N * M).tolist())
        batches += [[next(order) for _ in range(size)] for size in sizes]
    return batches


class Steps:
    """Plain gradient descent on the weighted loss, in NumPy."""

    def __init__(self, weights: Array, follows_policy: bool = False) -> None:
        self.policy, self.weights, self.follows_policy = table(0), weights.ravel(), follows_policy
        self.log_q = scored(table(1), completions()).sum(axis=2).ravel()
        self.losses: list[float] = []
        self.norms: list[float] = []

    def gradient(self, rows: list[int], divisor: float) -> tuple[float, Array]:
        log_pi = scored(self.policy, completions()).sum(axis=2).ravel()
        weights = self.weights * (np.exp(log_pi - self.log_q) if self.follows_policy else 1.0)
        parts = [weights[row] * log_prob_gradient(self.policy, row // M, DRAWN[row]) for row in rows]
        return -float((weights * log_pi)[rows].sum()) / divisor, -np.sum(parts, axis=0) / divisor

    def take(self, batches: list[list[int]], divisor: float, rate: float = RATE) -> None:
        for rows in batches:
            if not self.weights[rows].any():
                continue
            loss, gradient = self.gradient(rows, divisor)
            self.losses.append(loss)
            self.norms.append(float(np.sqrt((gradient**2).sum())))
            with torch.no_grad():
                self.policy.table -= rate * torch.from_numpy(gradient)

    def assert_agrees(self, policy: TabularModel, summary: StepSummary) -> None:
        np.testing.assert_allclose(policy.table.detach().numpy(), self.policy.table.detach().numpy(), rtol=1e-9)
        assert summary.steps == len(self.losses)
        assert summary.loss == pytest.approx(np.mean(self.losses), rel=1e-9)
        assert summary.grad_norm == pytest.approx(np.mean(self.norms), rel=1e-9)


@pytest.mark.parametrize("name", ["cdpg", "dpg", "reinforce"])
@pytest.mark.parametrize("number", [1, 2])
def test_steps_on_ragged_batches(name: str, number: int) -> None:
    """Every sample weighs 1/(valid samples · batch/samples) in its step, also in the ragged last batch."""
    policy, epoch = table(0), make_epoch(number)
    weighted = weights(name, epoch)
    batches = shuffled(number, seed=3, passes=1)
    assert weighted.ravel()[batches[-1]].any(), "the ragged batch must take a step"
    steps = Steps(weighted, follows_policy=name == "reinforce")
    steps.take(batches, VALID.sum() * 6 / 20)
    summary = update(make_updater(policy, method(name), batch_size=6, seed=3), epoch)
    steps.assert_agrees(policy, summary)
    assert (summary.skipped, summary.nonfinite, summary.broken) == (0, 0, False)


def test_by_default_one_step_takes_all() -> None:
    policy, epoch = table(0), make_epoch()
    steps = Steps(weights("cdpg", epoch))
    steps.take([list(range(20))], VALID.sum())
    steps.assert_agrees(policy, update(make_updater(policy, method("cdpg")), epoch))


class ThreePasses(CDPG):
    """It goes through the samples three times."""

    passes = 3


def test_every_pass_has_an_order_of_its_own() -> None:
    policy, epoch = table(0), make_epoch(2)
    batches = shuffled(2, seed=5, passes=3)
    assert len({tuple(batch) for batch in batches}) == len(batches)
    steps = Steps(weights("cdpg", epoch))
    steps.take(batches, VALID.sum() * 6 / 20)
    steps.assert_agrees(policy, update(make_updater(policy, ThreePasses(CDPGConfig()), batch_size=6, seed=5), epoch))


def test_a_batch_without_a_satisfying_sample_is_skipped() -> None:
    """With one satisfying sample and four batches, one step is taken; momentum would move the others."""
    policy, epoch = table(0), make_epoch()
    epoch.b.zero_()
    epoch.b[1, 3] = 1.0
    optimizer = torch.optim.SGD(policy.module.parameters(), lr=99.0, momentum=0.9)
    steps = Steps(weights("cdpg", epoch))
    steps.take(shuffled(1, seed=0, passes=1), VALID.sum() * 6 / 20)
    summary = update(make_updater(policy, method("cdpg"), optimizer=optimizer, batch_size=6), epoch)
    steps.assert_agrees(policy, summary)
    assert (summary.steps, summary.skipped) == (1, 3)


def test_nothing_satisfies_and_nothing_changes() -> None:
    policy, epoch = table(0), make_epoch()
    epoch.b.zero_()
    summary = update(make_updater(policy, method("cdpg"), batch_size=6), epoch)
    assert torch.equal(policy.table, table(0).table)
    assert (summary.loss, summary.grad_norm, summary.steps, summary.skipped) == (None, None, 0, 4)


def test_samples_of_weight_0_are_not_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_scored, original = [0], TabularModel.score

    def counting(self: TabularModel, prompts: Any, rows: Rows) -> TokenScores:
        rows_scored[0] += len(rows.lengths)
        return original(self, prompts, rows)

    monkeypatch.setattr(TabularModel, "score", counting)
    weighted = weights("cdpg", make_epoch())
    update(make_updater(table(0), method("cdpg"), batch_size=6), make_epoch())
    assert rows_scored[0] == int((weighted != 0).sum()) == 6


def test_the_schedule_reaches_every_group_of_parameters_each_epoch() -> None:
    """A rise over two epochs, a plateau, a fall over two towards 0; and the step is as long as the rate says."""
    policy = table(0)
    optimizer = torch.optim.SGD([{"params": [policy.table]}, {"params": [nn.Parameter(torch.zeros(1))]}], lr=99.0)
    updater = make_updater(policy, method("cdpg"), optimizer=optimizer, warmup_epochs=2, decay_epochs=2, epochs=6)
    for number, share in enumerate((1 / 2, 1, 1, 1, 2 / 3, 1 / 3), start=1):
        before = policy.table.detach().clone()
        update(updater, make_epoch(number))
        assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(RATE * share, rel=1e-12)] * 2
        assert policy.table.grad is not None
        torch.testing.assert_close(before - policy.table, RATE * share * policy.table.grad, rtol=1e-9, atol=1e-14)


def test_the_gradient_is_clipped_to_its_norm() -> None:
    """The step has the length rate · norm and its direction; what is logged is the norm before."""
    policy, epoch = table(0), make_epoch()
    steps = Steps(weights("cdpg", epoch))
    _, gradient = steps.gradient(list(range(20)), VALID.sum())
    norm = np.sqrt((gradient**2).sum())
    summary = update(make_updater(policy, method("cdpg"), max_grad_norm=norm / 3), epoch)
    moved = (table(0).table - policy.table).detach().numpy()
    np.testing.assert_allclose(moved, RATE * gradient / 3, rtol=1e-5, atol=1e-12)
    assert summary.grad_norm == pytest.approx(norm, rel=1e-9)
    loose = table(0)
    update(make_updater(loose, method("cdpg"), max_grad_norm=norm * 3), epoch)
    np.testing.assert_allclose((table(0).table - loose.table).detach().numpy(), RATE * gradient, rtol=1e-9)


class OneOfTwo:
    """One process of two: the other's share of loss and gradient is added as it would send it."""

    def __init__(self, other: Steps, share: range, divisor: float) -> None:
        self.other, self.share, self.divisor = other, share, divisor
        self.rows: list[list[int]] = []
        self.sent = 0.0

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        rows = [row for row in self.rows.pop(0) if row // M in self.share]
        self.sent, gradient = self.other.gradient(rows, self.divisor) if rows else (0.0, np.zeros(()))
        for parameter in parameters:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = own + torch.from_numpy(np.asarray(gradient))

    def total(self, tensor: Tensor) -> Tensor:
        return tensor + self.sent


@pytest.mark.parametrize("share", [range(1), range(1, N), range(2), range(2, N)])
def test_two_processes_take_the_steps_of_one(share: range) -> None:
    epoch, batches = make_epoch(), shuffled(1, seed=3, passes=1)
    weighted, divisor = weights("cdpg", epoch), VALID.sum() * 6 / 20
    steps = Steps(weighted)
    steps.take(batches, divisor)
    policy, other = table(0), Steps(weighted)
    other.policy = policy
    rest = range(share.stop, N) if share.start == 0 else range(share.start)
    processes = OneOfTwo(other, rest, divisor)
    processes.rows = [[row for row in batch if weighted.ravel()[row] != 0] for batch in batches]
    updater = make_updater(policy, method("cdpg"), processes, batch_size=6, seed=3)
    steps.assert_agrees(policy, update(updater, make_epoch(share=share)))


def test_every_setting_of_adam_counts() -> None:
    """Two steps of Adam, written out: m and v with their decay rates, both corrected, no weight decay."""
    config = CDPGConfig(learning_rate=0.5, adam_betas=(0.6, 0.7), adam_epsilon=0.25)
    parameter = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = make_optimizer([parameter], config)
    value, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    for step, gradient in enumerate((np.array([0.3, -1.0]), np.array([-0.7, 0.2])), start=1):
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        m, v = 0.6 * m + 0.4 * gradient, 0.7 * v + 0.3 * gradient**2
        value = value - 0.5 * (m / (1 - 0.6**step)) / (np.sqrt(v / (1 - 0.7**step)) + 0.25)
        np.testing.assert_allclose(parameter.detach().numpy(), value, rtol=1e-12)


@dataclass(frozen=True)
class Scaled(WeightedMethod):
    """b times a factor, by which its gradient can be made as large as one likes."""

    config: CDPGConfig
    factor: float

    def begin(self) -> State:
        return {"epochs": 0}

    def advance(self, state: State, rollout: Rollout) -> State:
        return {"epochs": state["epochs"] + 1}

    def weights(self, rollout: Rollout, state: State) -> Tensor:
        return rollout.b * self.factor

    def metrics(self, state: State) -> dict[str, float]:
        return {"seen": state["epochs"]}


def scaled(factor: float) -> Scaled:
    return Scaled(CDPGConfig(), factor)


@pytest.mark.parametrize("factor", [math.inf, math.nan, 1e200])
def test_a_step_that_is_not_finite_is_refused(factor: float) -> None:
    """1e200 is finite, but the norm of such a gradient is not."""
    policy = table(0)
    summary = update(make_updater(policy, scaled(factor), batch_size=6, seed=3), make_epoch())
    assert torch.equal(policy.table, table(0).table)
    assert (summary.steps, summary.nonfinite, summary.broken, summary.loss) == (0, 4, False, None)
    refused, batches = summary.refused, shuffled(1, seed=3, passes=1)
    assert [step.rows.tolist() for step in refused] == batches
    assert all(step.weights_finite for step in refused)
    assert refused[0].weights is not None
    np.testing.assert_array_equal(refused[0].weights.numpy(), (make_epoch().b * factor).flatten().numpy())


@pytest.mark.parametrize(
    ("loss", "norm", "clip", "safe"),
    [
        (1.0, 1.0, None, True),
        (math.nan, 1.0, None, False),
        (1.0, math.inf, None, False),
        (1.0, math.inf, 1.0, False),
        (1.0, 1.8e19, None, True),
        (1.0, 1.9e19, None, False),
        (1.0, 1.9e19, 1e19, True),
        (1.0, 1.9e19, 1e20, False),
    ],
)
def test_a_step_is_safe_if_the_square_of_what_clipping_leaves_is_finite(
    loss: float, norm: float, clip: float | None, safe: bool
) -> None:
    """The largest number in float32 is 3.4e38, the square of 1.84e19."""
    policy = table(0)
    policy.module.float()
    assert make_updater(policy, scaled(1.0), max_grad_norm=clip).is_safe(loss, norm) == safe


def test_parameters_that_a_step_made_infinite_end_the_epoch() -> None:
    summary = update(make_updater(table(0), scaled(1e10), batch_size=6, learning_rate=1e300, seed=3), make_epoch())
    assert (summary.steps, summary.nonfinite, summary.broken) == (0, 1, True)
    assert summary.refused[0].rows.tolist() == shuffled(1, seed=3, passes=1)[0]
    assert math.isfinite(summary.refused[0].loss)
    assert math.isfinite(summary.refused[0].grad_norm)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_before_the_first_step_a_failed_epoch_is_saved_as_it_began(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rescued, left = list[bool](), [steps]
    policy = table(0)
    updater = make_updater(policy, scaled(1.0), batch_size=6)
    original = Updater.gradient

    def failing(self: Updater, *given: Any) -> tuple[float, float]:
        if not left[0]:
            raise RuntimeError("it fails")
        left[0] -= 1
        return original(self, *given)

    monkeypatch.setattr(Updater, "gradient", failing)
    with pytest.raises(RuntimeError, match="it fails"):
        updater.update(make_epoch(), updater.method.begin(), lambda: rescued.append(True))
    assert rescued == ([True] if steps == 0 else [])
    assert torch.equal(policy.table, table(0).table) == (steps == 0)


def test_the_events_around_each_step_that_is_taken() -> None:
    events: list[str] = []
    updater = replace(make_updater(table(0), method("cdpg"), batch_size=6), call_callbacks=events.append)
    steps = update(updater, make_epoch()).steps
    assert steps > 1
    assert events == ["on_pre_optimizer_step", "on_optimizer_step"] * steps


def test_the_state_and_the_metrics_of_the_method_come_out() -> None:
    updater = make_updater(table(0), scaled(1.0), batch_size=6)
    summary = updater.update(make_epoch(), {"epochs": 6})
    assert (summary.state, summary.metrics) == ({"epochs": 7}, {"seen": 7})


def test_a_method_s_own_parameters_are_trained_along_with_the_policy() -> None:
    policy = table(0)
    module = make_method(CDPGConfig(method="ziegler")).make_module(policy)
    assert module is not None
    frozen = next(module.parameters())
    frozen.requires_grad_(False)
    expected = [*policy.module.parameters(), *(p for p in module.parameters() if p is not frozen)]
    found = trainable_parameters(policy, module)
    assert [id(p) for p in found] == [id(p) for p in expected]
    assert [id(p) for p in trainable_parameters(policy, None)] == [id(p) for p in policy.module.parameters()]


def test_adam_is_fused_where_the_device_has_it() -> None:
    optimizer = make_optimizer(list(table(0).module.parameters()), CDPGConfig())
    assert optimizer.defaults["fused"] is True


def test_a_method_may_sum_over_all_processes() -> None:
    summed = []

    class Summing(CDPG):
        def epoch_loss(self, *given: Any) -> EpochLoss:
            summed.append(given[4](torch.tensor([1.0, 2.0])).tolist())
            return super().epoch_loss(*given)

    class Four(Alone):
        def total(self, tensor: Tensor) -> Tensor:
            return 4 * tensor

    update(make_updater(table(0), Summing(CDPGConfig()), Four()), make_epoch())
    assert summed == [[4.0, 8.0]]


def test_a_process_takes_the_gradient_of_its_own_rows_alone() -> None:
    """The first row of the next process has the place after the last of one's own."""
    seen: list[int] = []
    policy, epoch = table(0), make_epoch(share=range(2))
    updater = make_updater(policy, method("cdpg"))
    sample_loss = updater.method.epoch_loss({}, epoch, policy).samples
    loss = sample_loss.loss

    def spy(rows: Tensor, scores: TokenScores) -> Tensor:
        seen.extend(rows.tolist())
        return loss(rows, scores)

    sample_loss.loss = spy  # type: ignore[method-assign]
    batch = Batch(sample_loss, epoch, torch.arange(N * M), 1.0)
    updater.gradient(batch)
    assert sorted(seen) == [row for row in batch.active.tolist() if row < 2 * M]
    assert len(batch.active) > len(seen) > 3


def test_memory_that_runs_out_is_reported_with_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*arguments: Any, **options: Any) -> Any:
        raise MemoryError

    end = "What was saved is intact: such a change is allowed when a run is resumed"
    updater = make_updater(table(0), method("cdpg"))
    with monkeypatch.context() as patch, pytest.raises(RunError) as error:
        patch.setattr(updater.optimizer, "step", no_memory)
        update(updater, make_epoch())
    assert str(error.value) == (
        f"out of memory while taking the optimiser's first step: use a smaller model, or adapters (lora_rank). {end}"
    )
    with monkeypatch.context() as patch, pytest.raises(RunError) as error:
        patch.setattr(updater.policy, "score", no_memory)
        update(updater, make_epoch())
    assert str(error.value) == (
        "out of memory while computing the gradient: lower tokens_per_pass (now 11) or max_completion_length, or "
        f"shorten the longest contexts. {end}"
    )


def test_replayed_steps_are_counted_apart() -> None:
    updater, epoch = make_updater(table(0), method("cdpg")), make_epoch()

    class Twice:
        def batches(self, rollout: Rollout, state: State) -> Iterator[Batch]:
            for _ in range(2):
                loss = updater.method.replay_loss(rollout, state)
                yield Batch(loss, rollout, torch.arange(rollout.b.numel()), 1.0, replayed=True)

    summary = updater.update(epoch, updater.method.begin(), replay=Twice())
    assert (summary.steps, summary.replayed) == (1, 2)
    assert summary.loss == update(make_updater(table(0), method("cdpg")), epoch).loss, "of the epoch's own step"
