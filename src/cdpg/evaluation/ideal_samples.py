"""Exact samples of the ideal model, and the gain: how much nearer to it a model is than the base.

A sample of the base that is accepted with probability b(x,c) is an exact sample of p_c ∝ a·b. On such samples

    gain = E_p[log π(x|c) − log a(x|c)] = KL(p, a) − KL(p, π)

has an unbiased estimate, whichever model π is. The samples are drawn once, so that the gains of different models,
epochs and methods are comparable and their differences have little noise.

With moments and rewards the target has a factor exp(λφ + r/β) without a known bound, so rejection sampling is not
possible. The accepted samples are then weighted by this factor, normalised in each context. The estimate is consistent,
with a bias towards 0 of the order of one over the effective number of a context's samples. All ``draws`` are made for
every context, so that which samples there are does not depend on λ, which may be fitted again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdpg.contexts.contexts import Context
from cdpg.models.base import LanguageModel, PromptTokens
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import Samples
from cdpg.models.scoring import score_samples
from cdpg.rollout.rollout import Rollout
from cdpg.rollout.sampler import Sampler, Stopwatch
from cdpg.system.distributed import Processes
from cdpg.system.stopping import never_stop
from cdpg.target.divergence import mean_by_context, weighted_mean_by_context
from cdpg.target.partition import effective_numbers

ENOUGH = 4
"""Accepted samples after which a context is not sampled again."""
TENTH = 10.0
"""A sample of p counts as covered by a model that gives it at least its probability under p, divided by this."""
ROUND = 8
"""Draws for each context in a round; after it, contexts with enough accepted samples are not sampled again."""


@dataclass(frozen=True)
class IdealSamples:
    """Exact samples of p_c for some contexts. Those of every process are its own; the counts are of all."""

    contexts: int
    """Number of contexts."""
    owners: Tensor
    """``[sample]``: the index of the context of each of this process's samples."""
    samples: Samples
    """This process's samples, ``[sample, 1, token]``."""
    log_a: Tensor
    """``[sample]``, float64: log-probabilities under the base."""
    draws: int
    """Samples of the base that were drawn."""
    log_b: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """``[sample]``: log b, of this process's samples."""
    judged: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """``[context]``: samples of the base with a verdict, accepted or not."""
    features: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))
    """``[sample, factor]``: the values of the target's moments and rewards, of this process's samples."""
    every_owner: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """``owners`` of the samples of all processes."""
    every_feature: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))
    """``features`` of the samples of all processes."""

    def gain(
        self,
        model: LanguageModel,
        processes: Processes,
        tokens_per_pass: int,
        coefficients: tuple[float, ...] = (),
    ) -> Tensor:
        """``[context]``: the mean of log π(x|c) − log a(x|c) over the context's samples; NaN without any.

        With ``coefficients``, those of the target's moments and rewards, it is weighted by their factor.
        """
        log_policy = self.log_policy(model, tokens_per_pass)
        return self._mean(log_policy - self.log_a, processes, coefficients)

    def figures(self, log_policy: Tensor, processes: Processes, coefficients: tuple[float, ...] = ()) -> Tensor:
        """``[2, context]``: gain and recall of a model with these log-probabilities."""
        gain = self._mean(log_policy - self.log_a, processes, coefficients)
        return torch.stack([gain, self.recall(log_policy, processes, coefficients)])

    def log_policy(self, model: LanguageModel, tokens_per_pass: int) -> Tensor:
        """``[sample]``: log π(x|c) of this process's samples."""
        rows = torch.arange(len(self.owners))
        return score_samples(model, self.samples, rows, tokens_per_pass).sum(dim=2)[:, 0]

    def recall(self, log_policy: Tensor, processes: Processes, coefficients: tuple[float, ...] = ()) -> Tensor:
        """``[context]``: the share of samples of p with π(x|c) ≥ p(x|c)/10; NaN without any.

        p = P/Ẑ_c, with Ẑ_c estimated from the same draws of the base: the sum of the accepted samples' weights over the
        number of draws.
        """
        every = self._log_weight(self.every_feature, coefficients)
        log_z = torch.full((self.contexts,), -math.inf, dtype=torch.float64)
        for context in self.every_owner.unique().tolist():
            log_z[context] = every[self.every_owner == context].logsumexp(dim=0) - self.judged[context].double().log()
        tilt = self._log_weight(self.features, coefficients)
        log_p = self.log_a + self.log_b + tilt - log_z[self.owners]
        return self._mean((log_policy >= log_p - math.log(TENTH)).double(), processes, coefficients)

    def _mean(self, values: Tensor, processes: Processes, coefficients: tuple[float, ...]) -> Tensor:
        """The mean over samples of p, ``[context]``."""
        if not coefficients:
            return mean_by_context(values, self.owners, self.contexts, processes.total)
        every = self._log_weight(self.every_feature, coefficients), self.every_owner
        own = self._log_weight(self.features, coefficients)
        return weighted_mean_by_context(values, own, self.owners, every, self.contexts, processes.total)

    def effective_numbers(self, coefficients: tuple[float, ...]) -> Tensor:
        """``[context]``: (Σw)²/Σw² of its samples, weighted by the factor of moments and rewards; 0 without any."""
        log_weight, found = self._log_weight(self.every_feature, coefficients), torch.zeros(self.contexts).double()
        for context in self.every_owner.unique().tolist():
            own = log_weight[None, self.every_owner == context]
            found[context] = effective_numbers(own, own > -math.inf)[0]
        return found

    @staticmethod
    def _log_weight(features: Tensor, coefficients: tuple[float, ...]) -> Tensor:
        return features @ features.new_tensor(coefficients) if coefficients else features.new_zeros(len(features))

    def records(self, processes: Processes) -> list[dict[str, Any]]:
        """The samples of all processes, with their log-probabilities under the base, in the order of the contexts."""
        own = [
            (owner, self._record(row, log_a))
            for row, (owner, log_a) in enumerate(zip(self.owners.tolist(), self.log_a.tolist(), strict=True))
        ]
        return [record for _, record in sorted(processes.gather(own), key=lambda found: found[0])]

    def _record(self, row: int, log_a: float) -> dict[str, Any]:
        context = self.samples.contexts[row]
        return {
            "row": context.row,
            "prompt": context.prompt,
            "completion": self.samples.texts[row][0],
            "token_ids": self.samples.token_ids(row, 0),
            "log_a": log_a,
        }

    def counts(self, processes: Processes) -> Tensor:
        """``[context]``: how many samples each context has."""
        return processes.total(torch.bincount(self.owners, minlength=self.contexts))


def draw_ideal_samples(
    sampler: Sampler,
    contexts: Sequence[Context],
    prompts: Sequence[PromptTokens],
    draws: int,
    number: int,
    stream: str,
    known: Rollout | None = None,
    check_stop: Callable[[], None] = never_stop,
) -> IdealSamples:
    """Sample the base until every context has some accepted samples, with at most ``draws`` draws for each.

    ``sampler`` samples the base. ``known`` are earlier samples of the base for all contexts, which count. ``number``
    and ``stream`` identify a set of contexts: each set has its own random numbers. Every process takes part, and calls
    ``check_stop`` before every round.
    """
    settings, is_tilted = sampler.config, bool(sampler.judge.tilt.factors)
    parts: list[IdealSamples] = []
    missing, done = list(range(len(contexts))), 0
    counts = torch.zeros(len(contexts), dtype=torch.long)
    rollout, name = known, stream
    while missing and (rollout is not None or done < draws):
        if rollout is None:
            check_stop()
            name = f"{stream}-{done}"
            size = min(ROUND, draws - done)
            drawing = replace(sampler, config=settings.replace(num_generations=size, batch_size=None))
            chosen = [contexts[i] for i in missing], [prompts[i] for i in missing]
            rollout = drawing.draw(number, *chosen, False, Stopwatch(), name)  # samples that fail may be pruned
        accepted = accepts(rollout, UniformStream(settings.seed, f"{name}-accept", number))
        parts.append(_accepted(rollout, accepted, missing, len(contexts)))
        counts[torch.tensor(missing)] += accepted.sum(dim=1)
        missing = [index for index in missing if is_tilted or counts[index] < ENOUGH]
        done, rollout = done + rollout.b.shape[1], None
    return _joined(parts, len(contexts))


def accepts(rollout: Rollout, uniforms: UniformStream) -> Tensor:
    """``[context, sample]``: whether a sample of the base is accepted, which has probability b(x,c)."""
    contexts, samples = rollout.b.shape
    slots, places = np.divmod(np.arange(contexts * samples), samples)
    drawn = torch.from_numpy(uniforms.draw(slots, places, position=0)).view(contexts, samples)
    return (drawn < rollout.b) & rollout.valid


def _accepted(rollout: Rollout, accepted: Tensor, indices: Sequence[int], contexts: int) -> IdealSamples:
    """This process's accepted samples; ``indices`` has the index of each context of the rollout."""
    samples, per_context = rollout.samples, rollout.b.shape[1]
    rows = rollout.own(accepted).nonzero()[:, 0]
    own = (rows // per_context).tolist()
    first = rollout.first_context
    features = rollout.features if rollout.is_tilted else rollout.b.new_zeros(*rollout.b.shape, 0)
    every = torch.tensor(indices, dtype=torch.long)[accepted.nonzero()[:, 0]]
    return IdealSamples(
        contexts=contexts,
        owners=torch.tensor([indices[first + place] for place in own], dtype=torch.long),
        samples=Samples(
            contexts=tuple(samples.contexts[place] for place in own),
            prompts=tuple(samples.prompts[place] for place in own),
            texts=tuple((samples.texts[row // per_context][row % per_context],) for row in rows.tolist()),
            tokens=samples.tokens.flatten(0, 1)[rows][:, None],
            lengths=samples.lengths.flatten()[rows][:, None],
            token_log_q=samples.token_log_q.flatten(0, 1)[rows][:, None],
            ended=samples.ended.flatten()[rows][:, None],
        ),
        log_a=rollout.own(rollout.log_a)[rows],
        draws=rollout.b.numel(),
        log_b=rollout.own(rollout.b)[rows].log(),
        judged=_by_context(rollout.valid.sum(dim=1), indices, contexts),
        features=features[first : first + samples.shape[0]].flatten(0, 1)[rows],
        every_owner=every,
        every_feature=features[accepted],
    )


def _by_context(counts: Tensor, indices: Sequence[int], contexts: int) -> Tensor:
    """Counts of the contexts of a rollout as counts of all contexts."""
    return torch.zeros(contexts, dtype=torch.long).index_add_(0, torch.tensor(indices, dtype=torch.long), counts)


def _joined(parts: Sequence[IdealSamples], contexts: int) -> IdealSamples:
    width = max((part.samples.tokens.shape[2] for part in parts), default=0)

    def wide(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        padded = [torch.nn.functional.pad(tensor, (0, width - tensor.shape[2])) for tensor in tensors]
        return torch.cat([torch.zeros(0, 1, width, dtype=dtype), *padded])

    def flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
        return torch.cat([like, *tensors])

    joined = [part.samples for part in parts]
    return IdealSamples(
        contexts=contexts,
        owners=flat([part.owners for part in parts], torch.zeros(0, dtype=torch.long)),
        samples=Samples(
            contexts=tuple(context for samples in joined for context in samples.contexts),
            prompts=tuple(prompt for samples in joined for prompt in samples.prompts),
            texts=tuple(texts for samples in joined for texts in samples.texts),
            tokens=wide([samples.tokens for samples in joined], torch.long),
            lengths=flat([samples.lengths for samples in joined], torch.zeros(0, 1, dtype=torch.long)),
            token_log_q=wide([samples.token_log_q for samples in joined], torch.float64),
            ended=flat([samples.ended for samples in joined], torch.zeros(0, 1, dtype=torch.bool)),
        ),
        log_a=flat([part.log_a for part in parts], torch.zeros(0, dtype=torch.float64)),
        draws=sum(part.draws for part in parts),
        log_b=flat([part.log_b for part in parts], torch.zeros(0, dtype=torch.float64)),
        judged=sum((part.judged for part in parts), torch.zeros(contexts, dtype=torch.long)),
        features=torch.cat([part.features for part in parts]) if parts else torch.zeros(0, 0).double(),
        every_owner=flat([part.every_owner for part in parts], torch.zeros(0, dtype=torch.long)),
        every_feature=torch.cat([part.every_feature for part in parts]) if parts else torch.zeros(0, 0).double(),
    )
