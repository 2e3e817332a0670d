"""Further steps of an epoch, on samples of this and earlier epochs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cdpg.config import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.methods.base import Method, State
from cdpg.models.base import PromptTokens
from cdpg.models.rng import UniformStream
from cdpg.rollout.replay import ReplayBuffer
from cdpg.rollout.rollout import Rollout
from cdpg.system.distributed import Processes
from cdpg.training.optimization import Batch

SMALLER = 4
"""How many times smaller a replayed batch is than one of the epoch's own samples: at equal cost, several small steps
lead further than one large step."""


def replayed_steps(method: Method, config: CDPGConfig, epoch: int) -> int:
    """Replayed steps of an epoch, for each step on its own samples: fewer where the learning rate is lower.

    A step at a low rate moves the model little, but takes as long as one at the full rate.
    """
    return round(method.replay * config.rate_share(epoch))


@dataclass(frozen=True)
class Replay:
    """Batches of visits from the buffer."""

    buffer: ReplayBuffer
    """It also holds the epoch's own samples."""
    steps: int
    """Steps for each step on the epoch's own samples."""
    method: Method
    contexts: Sequence[Context]
    prompts: Sequence[PromptTokens]
    config: CDPGConfig
    processes: Processes
    coefficients: tuple[float, ...] = ()
    """Those of the target's moments and rewards."""

    def batches(self, rollout: Rollout, state: State) -> Iterator[Batch]:
        """Batches of visits with a satisfying sample, with a quarter as many contexts as an ordinary batch.

        ``state`` is the method's after the epoch. The mean over these visits, times their share of the samples, is an
        estimate of the mean over all visits, since the others have no gradient.
        """
        per_context = rollout.b.shape[1]
        batch_size = self.config.batch_size or rollout.b.numel()
        visits = max(1, batch_size // per_context // SMALLER)
        for number in range(self.steps * -(-rollout.b.numel() // batch_size)):
            uniforms = UniformStream(self.config.seed, f"replay-{number}", rollout.number)
            chosen = self.buffer.choose(visits, uniforms)
            if not len(chosen):
                return
            target = self.coefficients, rollout.factor_names
            past = self.buffer.rollout(chosen, self.contexts, self.prompts, self.processes, *target)
            loss = self.method.replay_loss(past, state)
            divisor = loss.normalizer / self.buffer.covered_share
            yield Batch(loss, past, torch.arange(past.b.numel()), divisor, replayed=True)
