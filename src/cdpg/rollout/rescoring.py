"""Scores, computed here, of samples that another model or an engine has drawn.

The gradient does not need the policy's scores. The figures of the *policy* do: KL(p, π), and its satisfaction, the mean
of (π/q) · b. Samples with b = 0 contribute 0 there, and are not scored.

The probabilities that an engine reports are q. Computed here, they differ a little. A large difference means that the
engine has other weights, or computes in low precision.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cdpg.errors import RunError
from cdpg.models.base import LanguageModel
from cdpg.models.scoring import score_samples
from cdpg.rollout.rollout import Rollout
from cdpg.system.distributed import Processes

COMPARED = 64
"""Samples of an epoch, spread evenly, that are compared with the engine's in addition to the satisfying ones."""
ANOTHER_MODEL = 0.2
"""Median difference of a token's log-probability, in nats, above which the engine must be serving another model."""


def rescored(rollout: Rollout, policy: LanguageModel, processes: Processes, tokens_per_pass: int) -> Rollout:
    """The rollout with log π of its satisfying samples."""
    chosen = (rollout.b > 0) & rollout.valid
    return replace(rollout, log_policy=_scores(rollout, policy, processes, tokens_per_pass, chosen), rescored=chosen)


def recomputed(rollout: Rollout, drawn_from: LanguageModel, processes: Processes, tokens_per_pass: int) -> Rollout:
    """The rollout with log q of its satisfying samples and of some others, computed by the model they were drawn from.

    An engine that serves another model is refused.
    """
    chosen = ((rollout.b > 0) & rollout.valid) | _spread(rollout.b, COMPARED)
    log_q = _scores(rollout, drawn_from, processes, tokens_per_pass, chosen)
    by_token = ((rollout.log_q - log_q).abs() / rollout.lengths.clamp(min=1))[chosen].median()
    if not bool(by_token <= ANOTHER_MODEL):
        raise RunError(
            f"the engine's log-probabilities are not those of the model (they differ by {float(by_token):.2g} a "
            f"token, and at most {ANOTHER_MODEL} was expected): let it serve the model that is tuned, and this run "
            "alone"
        )
    return replace(rollout, log_recomputed=log_q, recomputed=chosen)


def _scores(
    rollout: Rollout, model: LanguageModel, processes: Processes, tokens_per_pass: int, chosen: Tensor
) -> Tensor:
    """``[context, sample]``: log-probabilities of the chosen samples of all processes, 0 elsewhere."""
    rows = rollout.own(chosen).nonzero()[:, 0]
    scores = score_samples(model, rollout.samples, rows, tokens_per_pass).sum(dim=2)
    share = range(rollout.first_context, rollout.first_context + len(rollout.samples.contexts))
    return processes.join(scores, share, len(rollout.b))


def _spread(like: Tensor, count: int) -> Tensor:
    """``[context, sample]``: true at ``count`` places of a table, at equal distances, in any number of processes."""
    chosen = torch.zeros(like.numel(), dtype=torch.bool)
    chosen[torch.linspace(0, like.numel() - 1, min(count, like.numel())).long()] = True
    return chosen.view_as(like)
