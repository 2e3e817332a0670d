"""The second half of an epoch: shuffled optimiser steps; the gradient does not depend on the micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from cdpg.config import CDPGConfig
from cdpg.methods.base import EpochLoss, Method, SampleLoss, State
from cdpg.models.base import LanguageModel
from cdpg.models.rng import UniformStream
from cdpg.models.scoring import plan_passes, prompts_and_rows
from cdpg.rollout.rollout import Rollout
from cdpg.system import memory, shards
from cdpg.system.distributed import Processes


@dataclass(frozen=True)
class RefusedStep:
    """A step that was skipped, or that left parameters that are not finite."""

    rollout: Rollout
    """The samples that its rows are of."""
    rows: Tensor
    """``[row]``: its flat rows, of all processes."""
    loss: float
    grad_norm: float
    weights: Tensor | None
    """``[row]``: the coefficient of each of this process's samples in the epoch; None if there is no single one."""
    weights_finite: bool
    """Whether the model's parameters are still finite."""
    replayed: bool = False
    """Whether its samples are of the replay buffer, which holds no texts."""


@dataclass(frozen=True)
class StepSummary:
    """What the optimiser did in an epoch."""

    loss: float | None
    """Mean loss of the steps taken; None when there was none."""
    grad_norm: float | None
    """Mean norm of their gradients, before clipping."""
    steps: int
    skipped: int
    """Skipped steps, without a satisfying sample: parameters and moments do not change."""
    replayed: int = 0
    """Steps on samples that are replayed; the figures above leave them out."""
    refused: tuple[RefusedStep, ...] = ()
    """Skipped steps, whose loss or gradient was not finite or too large to be squared."""
    state: State = field(default_factory=dict)
    """The method's, for the next epoch."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the method logs for the epoch."""

    @property
    def nonfinite(self) -> int:
        """How many steps on the epoch's own samples were refused."""
        return sum(not step.replayed for step in self.refused)

    @property
    def replayed_nonfinite(self) -> int:
        """How many others were refused."""
        return len(self.refused) - self.nonfinite

    @property
    def broken(self) -> bool:
        """Whether a step left parameters that are not finite."""
        return any(not step.weights_finite for step in self.refused)


def trainable_parameters(policy: LanguageModel, module: nn.Module | None) -> list[nn.Parameter]:
    """The trained parameters of the policy and of the method's own module."""
    modules = [policy.module, *([module] if module is not None else [])]
    return [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]


def make_optimizer(parameters: Sequence[nn.Parameter], config: CDPGConfig) -> torch.optim.Adam:
    """Adam without weight decay, fused if the device supports it."""
    fused = parameters[0].device.type in ("cpu", "cuda", "mps", "xpu")
    groups = [{"params": kind} for kind in shards.split(parameters) if kind]
    return torch.optim.Adam(
        groups, lr=config.learning_rate, betas=config.adam_betas, eps=config.adam_epsilon, fused=fused
    )


def accumulate(
    policy: LanguageModel, sample_loss: SampleLoss, rollout: Rollout, rows: Tensor, divisor: float, tokens_per_pass: int
) -> float:
    """Add the gradient of ``Σ loss / divisor`` over this process's flat rows; returns that sum."""
    loss_sum = 0.0
    passes = plan_passes(rollout.samples, rows, tokens_per_pass)
    with policy.gradient_passes(len(passes)):
        for part in passes:
            loss = sample_loss.loss(part, policy.score(*prompts_and_rows(rollout.samples, part))) / divisor
            policy.backward(loss)
            loss_sum += float(loss.detach())
    return loss_sum


@dataclass(frozen=True)
class Batch:
    """The samples of one optimiser step."""

    samples: SampleLoss
    rollout: Rollout
    rows: Tensor
    """``[row]``: flat rows of all processes."""
    divisor: float
    """Of the summed loss."""
    replayed: bool = False

    @property
    def active(self) -> Tensor:
        """Its rows that have any gradient."""
        return self.rows[self.samples.active[self.rows]]


@dataclass(frozen=True)
class _Taken:
    """A step that was taken."""

    loss: float
    grad_norm: float
    replayed: bool


class FurtherBatches(Protocol):
    """Batches of samples of this and earlier epochs that follow an epoch's own."""

    def batches(self, rollout: Rollout, state: State) -> Iterator[Batch]:
        """The batches after the epoch's; ``state`` is the method's after the epoch."""


@dataclass(frozen=True)
class Updater:
    """Takes an epoch's optimiser steps."""

    policy: LanguageModel
    method: Method
    module: nn.Module | None
    """The method's own parameters."""
    optimizer: torch.optim.Optimizer
    parameters: Sequence[nn.Parameter]
    config: CDPGConfig
    processes: Processes
    call_callbacks: Callable[[str], None] = lambda event: None
    """Called with ``on_pre_optimizer_step`` and ``on_optimizer_step``, around each step that is taken."""

    def update(
        self,
        rollout: Rollout,
        state: State,
        rescue: Callable[[], None] = lambda: None,
        replay: FurtherBatches | None = None,
    ) -> StepSummary:
        """Make the method's passes over the epoch's samples, shuffled anew each time, then replay earlier ones.

        ``state`` is the method's after the epoch before. If it fails before the first step, ``rescue`` is called;
        nothing has changed since the epoch began.
        """
        taken = list[_Taken]()
        try:
            return self._steps(rollout, state, replay, taken)
        except Exception:
            if not taken:
                rescue()
            raise

    def _steps(self, rollout: Rollout, state: State, replay: FurtherBatches | None, taken: list[_Taken]) -> StepSummary:
        """Take the steps; ``taken`` gets each, before it is taken."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate(rollout.number)
        with self._memory():
            epoch = self.method.epoch_loss(state, rollout, self.policy, self.module, self.processes.total)
        skipped, refused = 0, list[RefusedStep]()
        for batch in self._batches(rollout, epoch, replay):
            if not len(batch.active):
                skipped += not batch.replayed
                continue
            with self._memory():
                loss, norm = self.gradient(batch)
            safe = self.is_safe(loss, norm)
            if safe:
                taken.append(_Taken(loss, norm, batch.replayed))
                if self._step():
                    continue
                taken.pop()
            weights = batch.samples.weights
            refused.append(RefusedStep(batch.rollout, batch.rows, loss, norm, weights, not safe, batch.replayed))
            if safe:
                break  # the parameters are not finite, and no further step can repair them
        own = [step for step in taken if not step.replayed]
        return StepSummary(
            loss=sum(step.loss for step in own) / len(own) if own else None,
            grad_norm=sum(step.grad_norm for step in own) / len(own) if own else None,
            steps=len(own),
            skipped=skipped,
            replayed=len(taken) - len(own),
            refused=tuple(refused),
            state=epoch.state,
            metrics=epoch.metrics,
        )

    def is_safe(self, loss: float, norm: float) -> bool:
        """Whether a step keeps Adam's moments finite; they hold squares of the clipped gradient."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return False
        largest = torch.finfo(self.parameters[0].dtype).max ** 0.5
        return bool(min(norm, self.config.max_grad_norm or math.inf) < largest)

    def _step(self) -> bool:
        """Take the step; returns whether all parameters are finite after it."""
        self.call_callbacks("on_pre_optimizer_step")
        with memory.needed_for("taking the optimiser's first step", "use a smaller model, or adapters (lora_rank)"):
            self.optimizer.step()
        self.call_callbacks("on_optimizer_step")
        return bool(shards.total_norm([p.detach() for p in self.parameters]).isfinite())

    def _memory(self) -> AbstractContextManager[None]:
        tokens = self.config.tokens_per_pass
        return memory.needed_for(
            "computing the gradient",
            f"lower tokens_per_pass (now {tokens}) or max_completion_length, or shorten the longest contexts",
        )

    def _batches(self, rollout: Rollout, epoch: EpochLoss, replay: FurtherBatches | None) -> Iterator[Batch]:
        """The epoch's samples in shuffled batches, then those that are replayed.

        The divisor is the same for all batches of the epoch, so that a sample has the same weight in a smaller last
        batch.
        """
        samples = rollout.b.numel()
        batch_size = self.config.batch_size or samples
        divisor = epoch.samples.normalizer * batch_size / samples
        for number in range(self.method.passes):
            stream = UniformStream(self.config.seed, f"shuffle-{number}", rollout.number)
            for rows in torch.from_numpy(stream.permutation(samples)).split(batch_size):
                yield Batch(epoch.samples, rollout, rows, divisor)
        if replay is not None:
            yield from replay.batches(rollout, epoch.state)

    def gradient(self, batch: Batch) -> tuple[float, float]:
        """The batch's gradient, summed over processes and clipped; its loss and its norm before clipping."""
        # The buffers are kept, so that a short trial already needs the memory of the real run.
        self._zero_gradients()
        rollout, rows = batch.rollout, batch.active
        first, count = rollout.first_context * rollout.b.shape[1], rollout.samples.lengths.numel()
        own = rows[(rows >= first) & (rows < first + count)] - first
        loss = accumulate(self.policy, batch.samples, rollout, own, batch.divisor, self.config.tokens_per_pass)
        kinds = shards.split(self.parameters)
        self.processes.sum_gradients(kinds[0])  # those of divided weights are summed as they are computed
        loss = float(self.processes.total(torch.tensor(loss, dtype=torch.float64)))
        norm = shards.total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.config.max_grad_norm is not None:
            for kind in kinds:
                nn.utils.clip_grads_with_norm_(kind, self.config.max_grad_norm, norm)
        return loss, float(norm)

    def _zero_gradients(self) -> None:
        if not any(map(shards.is_shard, self.parameters)):
            self.optimizer.zero_grad(set_to_none=False)
            return
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
