"""The first half of an epoch: contexts → samples and log q → b → log a, put together over all processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cdpg.config import CDPGConfig
from cdpg.constraints.judge import Judge
from cdpg.contexts import Context
from cdpg.models.base import LanguageModel, Prompt
from cdpg.objectives.base import Epoch
from cdpg.parallel import Processes
from cdpg.sampling import Chunk, Samples, StopRule, assemble, sample_chunks
from cdpg.scoring import score_samples
from cdpg.uniforms import UniformStream


@dataclass
class Stopwatch:
    """Seconds spent, by stage."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)

    def lap(self, stage: str) -> None:
        """Book the time since the last lap to a stage."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now


@dataclass(frozen=True)
class Rollout:
    """Draws an epoch's samples and has them judged and scored."""

    policy: LanguageModel
    base: LanguageModel
    judge: Judge
    config: CDPGConfig
    processes: Processes
    stop: StopRule | None = None
    policy_is_base: bool = False
    """The base itself is sampled: log a = log q, and nothing needs to be scored."""

    def collect(
        self,
        number: int,
        contexts: Sequence[Context],
        prompts: Sequence[Prompt],
        every_sample: bool,
        watch: Stopwatch,
        stream: str = "train",
    ) -> Epoch:
        """The record of one epoch; ``contexts`` and ``prompts`` are those of all processes.

        The base scores the satisfying samples alone, unless ``every_sample`` is asked for.
        """
        share = self.processes.share(len(contexts))
        own = [contexts[i] for i in share], [prompts[i] for i in share]
        samples, b = self._sample(number, *own, share.start, watch, stream)
        rows = torch.arange(b.numel())
        if not self.policy.exact_sampling:
            log_q = score_samples(self.policy, samples, rows, self.config.tokens_per_pass)
            samples = samples.with_log_q(log_q)
            watch.lap("sampling")
        if self.policy_is_base:
            token_log_a = samples.token_log_q
        else:
            needed = rows if every_sample else rows[b.flatten() > 0]
            with self.base.as_base():
                token_log_a = score_samples(self.base, samples, needed, self.config.tokens_per_pass)
        watch.lap("base")
        lengths = samples.lengths.double()
        table = torch.stack([b, torch.ones_like(b), samples.log_q, token_log_a.sum(dim=2), lengths], dim=2)
        joined = self.processes.join(table, share, len(contexts)).unbind(dim=2)
        return Epoch(
            number=number,
            b=joined[0],
            valid=joined[1] > 0,
            log_q=joined[2],
            log_a=joined[3],
            lengths=joined[4].long(),
            samples=samples,
            token_log_a=token_log_a,
            first_context=share.start,
            total=self.processes.total,
        )

    def _sample(
        self,
        number: int,
        contexts: Sequence[Context],
        prompts: Sequence[Prompt],
        first_slot: int,
        watch: Stopwatch,
        stream: str,
    ) -> tuple[Samples, Tensor]:
        """Samples of this process's contexts, and b, ``[context, sample]``."""
        chunks: list[Chunk] = []
        per_context = self.config.num_generations
        b = torch.zeros(len(prompts) * per_context, dtype=torch.float64)
        for chunk in sample_chunks(
            self.policy,
            prompts,
            per_context,
            self.config.max_completion_length,
            UniformStream(self.config.seed, stream, number),
            self.config.rows_per_pass,
            self.stop,
            first_slot,
        ):
            chunks.append(chunk)
            watch.lap("sampling")
            verdicts = self.judge([contexts[row // per_context] for row in chunk.row], chunk.texts, chunk.tokens)
            b[torch.tensor(chunk.row)] = torch.tensor(verdicts, dtype=torch.float64)
            watch.lap("constraint")
        samples = assemble(contexts, prompts, chunks, per_context)
        watch.lap("sampling")
        return samples, b.view(len(prompts), per_context)
