"""Evaluation on held-out contexts: sample, decode and measure models, one after the other, on the same contexts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdpg.config import CDPGConfig
from cdpg.constraints.judge import Constraints, Judge
from cdpg.contexts.chats import as_chats, warn_of_prompts
from cdpg.contexts.contexts import Context, load_contexts
from cdpg.contexts.digests import count_tuned_on
from cdpg.errors import UserError
from cdpg.evaluation.ideal_samples import IdealSamples, draw_ideal_samples
from cdpg.evaluation.measures import Measure, Measured, TextMeasure, own_counts, own_metrics
from cdpg.evaluation.metrics import GAIN_ESS, factor_metrics
from cdpg.evaluation.outcome import SHOWN, Outcome, without_token_scores
from cdpg.evaluation.plan import BLOCK
from cdpg.evaluation.results import BASE, Evaluation
from cdpg.evaluation.statistics import Array, Statistic
from cdpg.messages.notices import shows_notices
from cdpg.messages.progress import Progress, SilentProgress
from cdpg.models.base import LanguageModel, PromptTokens
from cdpg.models.beams import beam_search
from cdpg.models.loading import load_base
from cdpg.models.sampling import Samples, StopRule
from cdpg.models.scoring import score_samples
from cdpg.rollout.moments import fit_to_base
from cdpg.rollout.rollout import Rollout
from cdpg.rollout.sampler import Sampler, Stopwatch
from cdpg.sandbox.limits import Limits
from cdpg.sandbox.reader import Reader
from cdpg.system.distributed import Processes, make_accelerator, processes_here
from cdpg.system.stopping import never_stop


@dataclass(frozen=True)
class EvaluationCache:
    """Results by block of contexts. An evaluation that gets a cache computes only the rest."""

    parts: dict[tuple[str, int, int], _Part] = field(default_factory=dict)
    """By model, number of the block and its contexts."""
    scores: dict[tuple[str, str, int, int], Tensor] = field(default_factory=dict)
    """By model, model whose samples are scored, number of the block and its contexts."""
    ideal: dict[tuple[int, int], IdealSamples] = field(default_factory=dict)
    """Samples of the ideal model, by number of the block and its contexts."""
    gains: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)
    """By model, number of the block and its contexts."""

    def forget(self, name: str) -> None:
        """Drop a model's results, after its weights have changed."""
        for part in [key for key in self.parts if key[0] == name]:
            del self.parts[part]
        for gain in [key for key in self.gains if key[0] == name]:
            del self.gains[gain]
        for scored in [key for key in self.scores if name in key[:2]]:
            del self.scores[scored]


@dataclass(frozen=True)
class Evaluator:
    """Evaluates models on the same contexts, with the same checks and metrics."""

    contexts: Sequence[Context]
    prompts: Sequence[PromptTokens]
    base: LanguageModel
    judge: Judge
    measure: Measure
    config: CDPGConfig
    processes: Processes
    read: Reader
    stop: StopRule | None = None
    tuned_on: frozenset[str] | None = None
    """Digests of the prompts that the models were tuned on; None if they are not known."""

    @classmethod
    def of(
        cls,
        base: LanguageModel,
        contexts: Sequence[Context],
        judge: Judge,
        measure: Measure,
        config: CDPGConfig,
        processes: Processes,
        stop: StopRule | None = None,
        tuned_on: frozenset[str] | None = None,
    ) -> Evaluator:
        """An evaluator made of loaded parts; a context that exceeds the base's window is refused."""
        prompts = base.encode(contexts, config.max_completion_length)
        read = Reader(Limits.of(config, processes_here()))
        return cls(contexts, prompts, base, judge, measure, config, processes, read, stop, tuned_on)

    @classmethod
    @shows_notices
    def load(
        cls,
        base: str | PathLike[str] | LanguageModel,
        constraints: Constraints,
        contexts: Any,
        config: CDPGConfig,
        measure: Measure | None = None,
        stop: StopRule | None = None,
        tuned_on: frozenset[str] | None = None,
    ) -> Evaluator:
        """A standalone evaluator, without training: it loads the base, once, and the contexts.

        ``contexts`` is anything that :func:`~cdpg.contexts.contexts.load_contexts` takes. λ of moments that do not have
        one is fitted on them.
        """
        measure = measure or TextMeasure()
        refuse_stopped_beams(measure, stop)
        judge = Judge(constraints, Limits.of(config, processes_here()))  # first: it may fork
        loaded = as_chats(load_contexts(contexts), config.chat, config.system)
        judge.require_columns(loaded)
        processes = Processes(make_accelerator(config))
        model = load_base(base, config, processes.accelerator.device if config.device == "auto" else None)
        warn_of_prompts(model.tokenizer, loaded)
        made = cls.of(model, loaded, judge, measure, config, processes, stop, tuned_on)
        if not judge.tilt.is_fitted:
            sampler = Sampler(model, model, judge, config, processes, stop, policy_is_base=True)
            judge.tilt.set_multipliers(fit_to_base(sampler, loaded, made.prompts).fit.multipliers)
        return made

    def evaluate(
        self,
        models: Mapping[str, Callable[[], LanguageModel]],
        about: Mapping[str, Any],
        limit: int | None = None,
        cache: EvaluationCache | None = None,
        progress: Progress | None = None,
        check_stop: Callable[[], None] = never_stop,
    ) -> Evaluation | None:
        """Evaluate the base and some models, each loaded when needed, on the first ``limit`` contexts or all.

        Every model draws its own samples and scores those of the others; results in ``cache`` are reused. Every process
        takes part; only the main one measures and returns an evaluation, the others None. All of them call
        ``check_stop`` before every block of contexts and before every model's scores.
        """
        cache, progress = EvaluationCache() if cache is None else cache, progress or SilentProgress()
        how = (limit, cache, progress, check_stop)
        outcomes = {BASE: self.outcome(BASE, self.base, *how)}
        for name, load in models.items():
            outcomes[name] = self.outcome(name, load(), *how)
        ideal = self._ideal_samples(outcomes[BASE], cache, progress, check_stop)
        scores: dict[tuple[str, str], Tensor] = {}
        gains: dict[str, Tensor] = {}
        for name, load in models.items():
            model = load()
            check_stop()
            progress.working(f"comparing: {name} scores the others' samples")
            for source, outcome in outcomes.items():
                if source != name:
                    scores[name, source] = self._scores(name, model, source, outcome, cache)
            if ideal:
                gains[name] = self._gain(name, model, ideal, cache)
        if ideal:
            gains[BASE] = self._gain(BASE, self.base, ideal, cache)
        # They are written with the figures of all contexts only, and the processes would send all texts each time.
        drawn = [record for part in ideal for record in part.records(self.processes)] if limit is None else []
        if not self.processes.is_main:
            return None
        own = ({**factor_metrics(self.judge.tilt), **own_metrics(self.measure)}, own_counts(self.measure))
        tuned_on = self.count_tuned_on(limit)
        if ideal and self.judge.tilt.factors:
            numbers = torch.cat([part.effective_numbers(self.judge.tilt.coefficients) for part in ideal])
            about = {**about, GAIN_ESS: float(numbers[numbers > 0].mean())} if bool((numbers > 0).any()) else about
        found = Evaluation.of(outcomes, scores, self.config, about, tuned_on, *own, gains=gains)
        return replace(found, ideal_samples=drawn)

    def _ideal_samples(
        self, base: Outcome, cache: EvaluationCache, progress: Progress, check_stop: Callable[[], None]
    ) -> list[IdealSamples]:
        """Samples of the ideal model, block by block: the base's own that are accepted, and more where they are few."""
        if not self.config.gain_draws:
            return []
        sampler = Sampler(self.base, self.base, self.judge, self.config, self.processes, self.stop, policy_is_base=True)
        for number, block in enumerate(base.blocks):
            key, part = (number, len(block.b)), slice(number * BLOCK, number * BLOCK + len(block.b))
            if key not in cache.ideal:
                progress.working(f"sampling the ideal model: {part.start} of {len(base.contexts)} contexts")
                cache.ideal[key] = draw_ideal_samples(
                    sampler, self.contexts[part], self.prompts[part], self.config.gain_draws, number,
                    "evaluation-ideal", block, check_stop,
                )  # fmt: skip
        return [cache.ideal[number, len(block.b)] for number, block in enumerate(base.blocks)]

    def _gain(self, name: str, model: LanguageModel, ideal: Sequence[IdealSamples], cache: EvaluationCache) -> Tensor:
        """``[2, context]``: gain and recall of a model; NaN for a context without a sample of the ideal model."""
        found, coefficients = [], self.judge.tilt.coefficients
        for number, part in enumerate(ideal):
            key = name, number, part.contexts
            if name == BASE:  # nothing has to be scored
                found.append(part.figures(part.log_a, self.processes, coefficients))
                continue
            if key not in cache.gains:
                log_policy = part.log_policy(model, self.config.tokens_per_pass)
                cache.gains[key] = part.figures(log_policy, self.processes, coefficients)
            found.append(cache.gains[key])
        return torch.cat(found, dim=1)

    def count_tuned_on(self, limit: int | None = None) -> int | None:
        """How many of the first ``limit`` contexts, or of all, have a prompt that was tuned on; None if not known."""
        return None if self.tuned_on is None else count_tuned_on(self.contexts[:limit], self.tuned_on)

    def outcome(
        self,
        name: str,
        model: LanguageModel,
        limit: int | None = None,
        cache: EvaluationCache | None = None,
        progress: Progress | None = None,
        check_stop: Callable[[], None] = never_stop,
    ) -> Outcome:
        """Samples, beams and, on the main process, measurements of one model; ``base`` is the name of the base."""
        cache, progress = EvaluationCache() if cache is None else cache, progress or SilentProgress()
        is_base = name == BASE
        contexts, prompts = list(self.contexts[:limit]), list(self.prompts[:limit])
        settings = self.config.replace(num_generations=self.config.evaluation_samples, batch_size=None)
        sampler = Sampler(model, self.base, self.judge, settings, self.processes, self.stop, is_base)
        parts: list[_Part] = []
        beamed = self.measure.beams > 0
        for number, start in enumerate(range(0, len(contexts), BLOCK)):
            check_stop()
            progress.working(f"evaluating {name}: {start} of {len(contexts)} contexts")
            block = slice(start, start + BLOCK)
            key = name, number, len(contexts[block])
            if key not in cache.parts:
                remembering = model.remembering_prompts() if beamed else nullcontext()
                with model.as_base() if is_base else nullcontext(), remembering:
                    cache.parts[key] = self._part(sampler, number, contexts[block], prompts[block])
            parts.append(cache.parts[key])
        return Outcome(
            contexts=tuple(contexts),
            blocks=tuple(self._present(part.rollout) for part in parts),
            texts=tuple(texts for part in parts for texts in part.texts),
            beams=tuple(text for part in parts for text in part.beams) if beamed else None,
            beam_b=tuple(b for part in parts for b in part.beam_b) if beamed else None,
            shown_ids=tuple(ids for part in parts for ids in part.shown_ids),
            measured=_together(parts),
            tokens=sum((part.tokens for part in parts), Counter()),
            ended=torch.cat([part.ended for part in parts]),
            unmeasured=sum((part.unmeasured for part in parts), Counter()),
        )

    def _present(self, block: Rollout) -> Rollout:
        """A block with the present multipliers of the target's moments: it may be of the cache."""
        return replace(block, coefficients=self.judge.tilt.coefficients)

    def _part(self, sampler: Sampler, number: int, contexts: list[Context], prompts: list[PromptTokens]) -> _Part:
        """Sample and measure a block of contexts. Only the main process measures; the others send it their texts."""
        model = sampler.policy
        rollout = sampler.draw(number, contexts, prompts, True, Stopwatch(), stream="evaluation")
        texts = self.processes.gather(rollout.samples.texts)
        shown_ids = self.processes.gather(_first_ids(rollout.samples, SHOWN))
        beams, beam_b = [], []
        if self.measure.beams:
            share = self.processes.share(len(prompts))
            own = prompts[share.start : share.stop]
            found = beam_search(
                model, own, self.config.max_completion_length, self.measure.beams, self.config.rows_per_pass
            )
            decoded = [model.decode(prompt, tokens) for prompt, tokens in zip(own, found, strict=True)]
            tokens = self.processes.gather(found)
            beams = self.processes.gather(decoded)
            beam_b = self._judged(contexts, beams, tokens) if self.processes.is_main else []
            shown_ids = [(list(ids), *others)[:SHOWN] for ids, others in zip(tokens, shown_ids, strict=True)]
        outputs = [[text] for text in beams] if self.measure.beams else texts
        failures: Counter[str] = Counter()
        read = partial(self.read, failures=failures)
        measured = self.measure(contexts, outputs, read) if self.processes.is_main else Measured()
        share = range(rollout.first_context, rollout.first_context + len(rollout.samples.contexts))
        ended = self.processes.join(rollout.samples.ended.double(), share, len(contexts))
        tokens_drawn = sum(self.processes.gather([_tokens(rollout.samples)]), Counter())
        return _Part(
            without_token_scores(rollout), texts, beams, beam_b, shown_ids, measured, tokens_drawn, ended, failures
        )

    def close(self) -> None:
        """End the worker processes; the next evaluation starts new ones."""
        self.judge.close()
        self.read.close()

    def _judged(self, contexts: list[Context], texts: list[str], tokens: list[tuple[int, ...]]) -> list[float]:
        """The verdict on each text; NaN without one."""
        found = self.judge.collect(self.judge.submit(contexts, texts, tokens))
        without = found.failures.keys() | found.inapplicable
        return [math.nan if place in without else b for place, b in enumerate(found.b)]

    def _scores(self, name: str, model: LanguageModel, source: str, outcome: Outcome, cache: EvaluationCache) -> Tensor:
        """``[context, sample]``: log-probabilities of the source's satisfying samples, 0 elsewhere."""
        found = []
        for number, block in enumerate(outcome.blocks):
            key = name, source, number, len(block.b)
            if key not in cache.scores:
                cache.scores[key] = self._block_scores(model, block)
            found.append(cache.scores[key])
        return torch.cat(found)

    def _block_scores(self, model: LanguageModel, block: Rollout) -> Tensor:
        satisfying = (block.own(block.b) > 0).nonzero()[:, 0]
        scores = score_samples(model, block.samples, satisfying, self.config.tokens_per_pass).sum(dim=2)
        share = range(block.first_context, block.first_context + len(block.samples.contexts))
        return self.processes.join(scores, share, len(block.b))


def refuse_stopped_beams(measure: Measure, stop: StopRule | None) -> None:
    """Refuse beam search with a stop rule, which it does not apply: its outputs would differ from those tuned on."""
    if stop is not None and measure.beams:
        raise UserError(
            f"a stop rule ends samples, not the outputs of beam search, and {type(measure).__name__} measures those of "
            f"{measure.beams} beams: give a measure with beams = 0, or no stop"
        )


@dataclass(frozen=True)
class _Part:
    """A block of contexts, sampled and measured."""

    rollout: Rollout
    texts: Sequence[tuple[str, ...]]
    beams: Sequence[str]
    beam_b: Sequence[float]
    shown_ids: Sequence[tuple[list[int], ...]]
    measured: Measured
    tokens: Counter[int]
    ended: Tensor
    unmeasured: Counter[str]


def _first_ids(samples: Samples, count: int) -> list[tuple[list[int], ...]]:
    """``[context][sample]``: the token ids of the first samples of each context."""
    contexts, drawn = samples.shape
    return [tuple(samples.token_ids(i, j) for j in range(min(count, drawn))) for i in range(contexts)]


def _tokens(samples: Samples) -> Counter[int]:
    """How often each token was drawn."""
    counted = torch.arange(samples.tokens.shape[2]) < samples.lengths[:, :, None]
    return Counter(samples.tokens[counted].tolist())


def _together(parts: Sequence[_Part]) -> Measured:
    """Blocks of contexts, concatenated.

    A block without references has no figures that need one, and adds nothing to them.
    """
    blocks, counts = [part.measured for part in parts], [len(part.texts) for part in parts]
    names = dict.fromkeys(name for block in blocks for name in block.features)
    counters = dict.fromkeys(name for block in blocks for name in block.frequencies)
    statistics = {name: statistic for block in reversed(blocks) for name, statistic in block.corpus.items()}

    def features(name: str) -> Array:
        return _stacked([block.features.get(name) for block in blocks], counts, np.nan)

    def terms(name: str) -> Array:
        return _stacked([block.corpus[name].terms if name in block.corpus else None for block in blocks], counts, 0.0)

    return Measured(
        features={name: features(name) for name in names},
        corpus={name: Statistic(terms(name), statistic.of) for name, statistic in statistics.items()},
        remarks={name: [row for block in blocks for row in block.remarks[name]] for name in blocks[0].remarks},
        frequencies={name: sum((block.frequencies[name] for block in blocks), Counter()) for name in counters},
    )


def _stacked(tables: Sequence[Array | None], counts: Sequence[int], absent: float) -> Array:
    """``[context, ...]`` tables, concatenated, with ``absent`` for the contexts of missing tables."""
    width = next(table.shape[1] for table in tables if table is not None)
    blanks = (np.full((count, width), absent) for count in counts)
    return np.concatenate([blank if table is None else table for table, blank in zip(tables, blanks, strict=True)])
