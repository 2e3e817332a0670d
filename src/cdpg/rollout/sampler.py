"""The first half of an epoch: draws samples with log q, judges them (b), scores the base (log a), joins processes."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cdpg.config import CDPGConfig
from cdpg.constraints.judge import CheckFailure, Judge, Pending
from cdpg.contexts.contexts import Context
from cdpg.models.base import LanguageModel, PromptTokens
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import Chunk, Engine, Samples, StopRule, draw_samples
from cdpg.models.scoring import score_samples
from cdpg.rollout.pruning import Pruner
from cdpg.rollout.rollout import Rollout
from cdpg.sandbox.pool import KINDS
from cdpg.system.distributed import Processes


class Stopwatch:
    """Seconds spent, by stage."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock, self._since = clock, clock()

    def lap(self, stage: str) -> None:
        """Add the time since the last lap to a stage."""
        now = self._clock()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now


@dataclass(frozen=True)
class Checked:
    """The verdicts on this process's samples."""

    b: Tensor
    """``[context, sample]``: 0 without a verdict."""
    failures: dict[int, CheckFailure]
    """By row of the flattened ``b``."""
    inapplicable: list[int]
    """Rows of the flattened ``b`` to which no constraint applies."""
    exhausted: Counter[str]
    features: Tensor
    """``[context, sample, factor]``: the values of moments and rewards; NaN without one."""

    @property
    def failed(self) -> Tensor:
        """``[context, sample]``: whether the check failed."""
        return self._at(list(self.failures))

    @property
    def valid(self) -> Tensor:
        """``[context, sample]``: whether there is a verdict."""
        return ~self._at([*self.failures, *self.inapplicable])

    def _at(self, rows: list[int]) -> Tensor:
        marked = torch.zeros(self.b.numel(), dtype=torch.bool)
        marked[rows] = True
        return marked.view_as(self.b)


@dataclass(frozen=True)
class Sampler:
    """Draws an epoch's samples, judges and scores them."""

    policy: LanguageModel
    """The model that is sampled: the policy, or another proposal."""
    base: LanguageModel
    judge: Judge
    config: CDPGConfig
    processes: Processes
    stop: StopRule | None = None
    policy_is_base: bool = False
    """The base itself is sampled: log a = log q, and nothing needs to be scored."""
    engine: Engine | None = None
    """Draws the samples in place of the model itself; log q is the engine's own."""
    token_texts: dict[int, str] = field(default_factory=dict, repr=False)
    """The texts of single tokens, cached for pruning."""

    def of_base(self, config: CDPGConfig) -> Sampler:
        """A sampler of the base instead."""
        return replace(self, policy=self.base, policy_is_base=True, config=config, engine=None)

    def draw(
        self,
        number: int,
        contexts: Sequence[Context],
        prompts: Sequence[PromptTokens],
        every_sample: bool,
        watch: Stopwatch,
        stream: str = "train",
        indices: Sequence[int] = (),
    ) -> Rollout:
        """The rollout of one epoch; ``contexts`` and ``prompts`` are those of all processes.

        ``indices`` has the index of each context among those of the run. The base scores only the satisfying samples,
        and samples that can no longer satisfy are ended (setting ``prune``), unless ``every_sample`` is set.
        """
        share = self.processes.share(len(contexts))
        own = [contexts[i] for i in share], [prompts[i] for i in share]
        prunes = self.config.prune and not every_sample
        with self.base.as_base() if self.policy_is_base else nullcontext():
            samples, checked = self._sample(number, *own, share.start, watch, stream, prunes)
            b = checked.b
            rows = torch.arange(b.numel())
            if self.engine is None and not self.policy.exact_sampling:
                log_q = score_samples(self.policy, samples, rows, self.config.tokens_per_pass)
                samples = samples.with_log_q(log_q)
                watch.lap("sampling")
        if self.policy_is_base and self.engine is None:
            token_log_a = samples.token_log_q
        else:
            needed = rows if every_sample else rows[b.flatten() > 0]
            with self.base.as_base():
                token_log_a = score_samples(self.base, samples, needed, self.config.tokens_per_pass)
        watch.lap("base")
        lengths = samples.lengths.double()
        verdicts = [b, checked.valid.to(b), checked.failed.to(b)]
        numbers = [samples.log_q, token_log_a.sum(dim=2), lengths, samples.pruned.double()]
        table = torch.stack([*verdicts, *numbers, *checked.features.unbind(dim=2)], dim=2)
        joined = self.processes.join(table, share, len(contexts)).unbind(dim=2)
        features = torch.stack(joined[7:], dim=2) if len(joined) > 7 else torch.zeros(0, dtype=torch.float64)
        return Rollout(
            number=number,
            b=joined[0],
            valid=joined[1] > 0,
            failed=joined[2] > 0,
            log_q=joined[3],
            log_a=joined[4],
            lengths=joined[5].long(),
            pruned=joined[6] > 0,
            samples=samples,
            token_log_a=token_log_a,
            first_context=share.start,
            indices=tuple(indices),
            checks=self._counted(checked),
            failures=checked.failures,
            features=features,
            coefficients=self.judge.tilt.coefficients,
            factor_names=tuple(self.judge.tilt.names),
        )

    def _sample(
        self,
        number: int,
        contexts: Sequence[Context],
        prompts: Sequence[PromptTokens],
        first_slot: int,
        watch: Stopwatch,
        stream: str,
        prunes: bool,
    ) -> tuple[Samples, Checked]:
        """Samples of this process's contexts, and their verdicts; workers judge one chunk while the next is drawn."""
        chunks: list[Chunk] = []
        pending: list[Pending] = []
        per_context = self.config.num_generations

        def submit(chunk: Chunk) -> None:
            chunk = chunk.whole()
            chunks.append(chunk)
            watch.lap("sampling")
            owners = [contexts[row // per_context] for row in chunk.row]
            pending.append(self.judge.submit(owners, chunk.texts, chunk.tokens))
            watch.lap("constraint")

        uniforms = UniformStream(self.config.seed, stream, number)
        owners = [context for context in contexts for _ in range(per_context)]
        checks = self.judge.prefix_checks if prunes else []
        pruner = Pruner(checks, owners, first_slot * per_context, self.token_texts) if checks else None
        samples = draw_samples(
            self.engine or self.policy, contexts, prompts, per_context, self.config, uniforms, self.stop, first_slot,
            submit, pruner,
        )  # fmt: skip
        watch.lap("sampling")
        checked = self._tabulate(chunks, pending, len(prompts))
        if pruner is not None:
            pruner.refuse_wrong_answers(checked.b.flatten().tolist(), samples.text)
        watch.lap("constraint")
        return samples, checked

    def _tabulate(self, chunks: Sequence[Chunk], pending: Sequence[Pending], contexts: int) -> Checked:
        factors = len(self.judge.tilt.factors)
        b = torch.zeros(contexts * self.config.num_generations, dtype=torch.float64)
        features = torch.full((len(b), factors), math.nan, dtype=torch.float64)
        failures: dict[int, CheckFailure] = {}
        inapplicable: list[int] = []
        exhausted: Counter[str] = Counter()
        for chunk, verdicts in zip(chunks, self.judge.collect_all(pending), strict=True):
            rows = torch.tensor(chunk.row, dtype=torch.long)
            b[rows] = torch.tensor(verdicts.b, dtype=torch.float64)
            if factors:
                features[rows] = torch.tensor(verdicts.features, dtype=torch.float64).view(len(rows), factors)
            failures |= {chunk.row[place]: failure for place, failure in verdicts.failures.items()}
            inapplicable += [chunk.row[place] for place in verdicts.inapplicable]
            exhausted += verdicts.exhausted
        table = b.view(contexts, self.config.num_generations)
        by_context = features.view(contexts, self.config.num_generations, factors)
        return Checked(table, dict(sorted(failures.items())), sorted(inapplicable), exhausted, by_context)

    def _counted(self, checked: Checked) -> dict[str, int]:
        """Failed and exhausted checks by kind, over all processes; kinds that did not occur are left out."""
        failed = Counter(failure.kind for failure in checked.failures.values())
        names = [*(f"failed_{kind}" for kind in KINDS), *(f"exhausted_{kind}" for kind in KINDS)]
        own = [*(failed[kind] for kind in KINDS), *(checked.exhausted[kind] for kind in KINDS)]
        counts = self.processes.total(torch.tensor(own)).tolist()
        return {name: count for name, count in zip(names, counts, strict=True) if count}
