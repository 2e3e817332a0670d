"""Evaluation on held-out contexts: sample, decode and measure models, one after the other, on the same contexts."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdpg.config import CDPGConfig
from cdpg.constraints.judge import Judge
from cdpg.contexts.contexts import Context, count_tuned_on
from cdpg.contexts.reading import ignore_message
from cdpg.errors import UserError
from cdpg.evaluation.catalogue import POOLED
from cdpg.evaluation.measures import Measure, Measured
from cdpg.evaluation.outcome import SHOWN, Outcome, without_token_scores
from cdpg.evaluation.plan import BLOCK
from cdpg.evaluation.results import BASE, Evaluation
from cdpg.evaluation.statistics import Array, Statistic
from cdpg.evaluation.unseen import TUNED_ON
from cdpg.models.base import LanguageModel, Prompt
from cdpg.models.beams import beam_search
from cdpg.models.sampling import Samples, StopRule
from cdpg.models.scoring import score_samples
from cdpg.models.transformer import digest
from cdpg.rollout.rollout import Rollout
from cdpg.rollout.sampler import Sampler, Stopwatch
from cdpg.sandbox.reader import Reader
from cdpg.system.distributed import Processes

TUNED = "tuned"

Tell = Callable[[str], None]
"""Hears how far an evaluation has come."""


@dataclass(frozen=True)
class Known:
    """What was found out on blocks of contexts. An evaluation that is handed it finds out the rest alone."""

    parts: dict[tuple[str, int, int], _Part] = field(default_factory=dict)
    """By model, number of the block and its contexts."""
    scores: dict[tuple[str, str, int, int], Tensor] = field(default_factory=dict)
    """By model, model whose samples are scored, number of the block and its contexts."""

    def forget(self, name: str) -> None:
        """Drop what is known of a model, for its weights have changed."""
        for part in [key for key in self.parts if key[0] == name]:
            del self.parts[part]
        for scored in [key for key in self.scores if name in key[:2]]:
            del self.scores[scored]


@dataclass(frozen=True)
class HeldOut:
    """Contexts to evaluate on and how they are judged and measured; the same for every model."""

    contexts: Sequence[Context]
    prompts: Sequence[Prompt]
    base: LanguageModel
    judge: Judge
    measure: Measure
    config: CDPGConfig
    processes: Processes
    read: Reader
    stop: StopRule | None = None
    tuned_on: frozenset[str] | None = None
    """Digests of the prompts that the models were tuned on; None where that is not known."""

    def evaluate(
        self,
        models: Mapping[str, Callable[[], LanguageModel]],
        about: Mapping[str, Any],
        tell: Tell,
        limit: int | None = None,
        known: Known | None = None,
    ) -> Evaluation | None:
        """The base and some models, each loaded when it is needed, on the first ``limit`` contexts or all.

        Every model is asked twice: for samples of its own, and for the probabilities of the others' samples; what is
        ``known`` of a block of contexts already is not asked again. Every process takes part in the work; only the
        main one measures, so that it alone has an evaluation, and the others None.
        """
        known = Known() if known is None else known
        outcomes = {BASE: self.outcome(BASE, self.base, tell, limit, known)}
        for name, load in models.items():
            outcomes[name] = self.outcome(name, load(), tell, limit, known)
        scores: dict[tuple[str, str], Tensor] = {}
        for name, load in models.items():
            model = load()
            tell(f"comparing: what {name} makes of the others' samples")
            for source, outcome in outcomes.items():
                if source != name:
                    scores[name, source] = self._scores(name, model, source, outcome, known)
        if not self.processes.is_main:
            return None
        return Evaluation.of(outcomes, scores, self.config, about, self.count_tuned_on(limit))

    def count_tuned_on(self, limit: int | None = None) -> int | None:
        """How many of the first ``limit`` contexts, or of all, have a prompt that was tuned on; None: not known."""
        return None if self.tuned_on is None else count_tuned_on(self.contexts[:limit], self.tuned_on)

    def outcome(
        self, name: str, model: LanguageModel, tell: Tell, limit: int | None = None, known: Known | None = None
    ) -> Outcome:
        """Samples, beams and, on the main process, measurements of one model; ``base`` is the name of the base."""
        known, is_base = Known() if known is None else known, name == BASE
        contexts, prompts = list(self.contexts[:limit]), list(self.prompts[:limit])
        settings = self.config.replace(num_generations=self.config.evaluation_samples, batch_size=None)
        sampler = Sampler(model, self.base, self.judge, settings, self.processes, self.stop, is_base)
        parts: list[_Part] = []
        for number, start in enumerate(range(0, len(contexts), BLOCK)):
            tell(f"evaluating {name}: {start} of {len(contexts)} contexts")
            block = slice(start, start + BLOCK)
            key = name, number, len(contexts[block])
            if key not in known.parts:
                with model.as_base() if is_base else nullcontext():
                    known.parts[key] = self._part(sampler, number, contexts[block], prompts[block])
            parts.append(known.parts[key])
        beamed = self.measure.beams > 0
        return Outcome(
            contexts=tuple(contexts),
            blocks=tuple(part.rollout for part in parts),
            texts=tuple(texts for part in parts for texts in part.texts),
            beams=tuple(text for part in parts for text in part.beams) if beamed else None,
            beam_b=tuple(b for part in parts for b in part.beam_b) if beamed else None,
            shown_ids=tuple(ids for part in parts for ids in part.shown_ids),
            measured=_together(parts),
            tokens=sum((part.tokens for part in parts), Counter()),
            ended=torch.cat([part.ended for part in parts]),
            unmeasured=sum((part.unmeasured for part in parts), Counter()),
        )

    def _part(self, sampler: Sampler, number: int, contexts: list[Context], prompts: list[Prompt]) -> _Part:
        """A block of contexts. Only the main process measures; the others send it their texts."""
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
        """End the worker processes; the next evaluation starts them anew."""
        self.judge.close()
        self.read.close()

    def _judged(self, contexts: list[Context], texts: list[str], tokens: list[tuple[int, ...]]) -> list[float]:
        """The verdict on each text, NaN where there is none."""
        found = self.judge.collect(self.judge.submit(contexts, texts, tokens))
        without = found.failures.keys() | found.inapplicable
        return [math.nan if place in without else b for place, b in enumerate(found.b)]

    def _scores(self, name: str, model: LanguageModel, source: str, outcome: Outcome, known: Known) -> Tensor:
        """``[context, sample]``: log-probabilities of the source's satisfying samples, 0 elsewhere."""
        found = []
        for number, block in enumerate(outcome.blocks):
            key = name, source, number, len(block.b)
            if key not in known.scores:
                known.scores[key] = self._block_scores(model, block)
            found.append(known.scores[key])
        return torch.cat(found)

    def _block_scores(self, model: LanguageModel, block: Rollout) -> Tensor:
        satisfying = (block.own(block.b) > 0).nonzero()[:, 0]
        scores = score_samples(model, block.samples, satisfying, self.config.tokens_per_pass).sum(dim=2)
        share = range(block.first_context, block.first_context + len(block.samples.contexts))
        return self.processes.join(scores, share, len(block.b))


def refuse_stopped_beams(measure: Measure, stop: StopRule | None) -> None:
    """Beam search knows no stop rule: its outputs would be other outcomes than those that the models are tuned on."""
    if stop is not None and measure.beams:
        raise UserError(
            f"a stop rule ends samples, not the outputs of beam search, and {type(measure).__name__} measures those of "
            f"{measure.beams} beams: give a measure with beams = 0, or no stop"
        )


class Examination:
    """The evaluations of one run: some contexts along the way, all of them at the end."""

    def __init__(self, held_out: HeldOut, policy: LanguageModel, about: Mapping[str, Any]) -> None:
        self._held_out, self._policy, self._about = held_out, policy, about
        self._known, self._weights = Known(), ""
        self.seconds_per_context: float | None = None
        """What the last evaluation along the way took; None before the first."""

    def along(self, epoch: int, tell: Tell = ignore_message) -> dict[str, Any]:
        """The line of ``evaluations.jsonl`` after an epoch, on a part of the contexts; epoch 0 is the base.

        The same on every process: callbacks may decide by it. The base alone makes no pool, and its KL(p, a) from its
        own samples is another estimate than the pooled one of later lines: these have the base's from the same pool.
        """
        started, config = time.perf_counter(), self._held_out.config
        limit, contexts = config.evaluation_contexts, len(self._held_out.contexts[: config.evaluation_contexts])
        models = {TUNED: lambda: self._policy} if epoch else {}
        found = self._held_out.evaluate(models, {}, tell, limit, self._up_to_date())
        seconds = time.perf_counter() - started
        self.seconds_per_context = seconds / contexts
        metrics: dict[str, dict[str, Any]] = {BASE: {}, TUNED: {}}
        metrics.update({} if found is None else found.metrics())
        pooled = metrics[BASE].pop(POOLED, None)
        record = {
            "epoch": epoch,
            "samples": epoch * config.samples_per_epoch,
            "contexts": contexts,
            TUNED_ON: self._held_out.count_tuned_on(limit),
            "samples_per_context": config.evaluation_samples,
            "metrics": metrics[TUNED if epoch else BASE],
            **({"base": {POOLED: pooled}} if epoch else {}),
            "seconds": seconds,
        }
        return self._held_out.processes.from_main(record)

    def final(self, tell: Tell) -> Evaluation | None:
        """The base and the tuned model, as it is in memory, on all contexts; None but on the main process.

        Contexts that were evaluated after the last epoch, in whole blocks, are not evaluated again.
        """
        about = {**self._about, "of_saved_model": False}
        return self._held_out.evaluate({TUNED: lambda: self._policy}, about, tell, known=self._up_to_date())

    def _up_to_date(self) -> Known:
        """What is known of the base, and of the policy unless its weights have changed since, by whomever."""
        weights = digest(p for p in self._policy.module.parameters() if p.requires_grad)
        if self._held_out.processes.any(weights != self._weights):  # or processes would part ways
            self._known.forget(TUNED)
            self._weights = weights
        return self._known


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
    """Blocks of contexts, one below the other.

    A block whose contexts all lack a reference has no figures that need one: there it counts nothing.
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
        remarks={name: [row for block in blocks for row in block.remarks[name]] for name in blocks[0].remarks}
        if blocks
        else {},
        frequencies={name: sum((block.frequencies[name] for block in blocks), Counter()) for name in counters},
    )


def _stacked(tables: Sequence[Array | None], counts: Sequence[int], absent: float) -> Array:
    """``[context, ...]`` tables one below the other, with ``absent`` for the contexts of those that are missing."""
    width = next(table.shape[1] for table in tables if table is not None)
    blanks = (np.full((count, width), absent) for count in counts)
    return np.concatenate([blank if table is None else table for table, blank in zip(tables, blanks, strict=True)])
