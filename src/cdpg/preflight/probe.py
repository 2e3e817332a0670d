"""The preflight probe: draws samples of the base for a few contexts, judges them and measures the time."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from cdpg.config import CDPGConfig
from cdpg.constraints.judge import CheckFailure, Judge, Verdicts
from cdpg.contexts.chats import warn_of_prompts
from cdpg.contexts.contexts import Context
from cdpg.contexts.stream import ContextStream
from cdpg.evaluation.plan import evaluated_contexts
from cdpg.jobs.job import Inputs, Job
from cdpg.methods import make_method
from cdpg.models.base import LanguageModel
from cdpg.models.devices import choose_device
from cdpg.models.loading import load_model, load_policy_and_base
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import Samples, draw_samples
from cdpg.models.scoring import plan_passes, prompts_and_rows, score_samples
from cdpg.preflight.advice import ProbeStatistics
from cdpg.preflight.memory_use import MemoryUse, differentiate_largest_pass, used
from cdpg.sandbox.limits import Limits
from cdpg.system import memory
from cdpg.training.forecast import Pace, context_seconds, epoch_seconds, ideal_seconds, run_seconds
from cdpg.training.validation import keeps_best, validation_indices

_log = logging.getLogger(__name__)

_TIMED_ROWS = 32
"""Samples that are scored and differentiated to measure the time."""


@dataclass(frozen=True)
class ShownSample:
    """A sample to print."""

    prompt: str
    text: str
    b: float


@dataclass(frozen=True)
class ProbeResult:
    """What the probe found."""

    contexts: int
    """Contexts that were sampled; ``stats`` covers those with a verdict."""
    stats: ProbeStatistics
    pace: Pace
    tokens: float
    """Mean length of a completion."""
    satisfying: Sequence[ShownSample]
    failing: Sequence[ShownSample]
    inapplicable: int
    """Samples to which no constraint applies."""
    failures: Counter[str]
    """Failed checks by kind."""
    failure: CheckFailure | None
    """One of the failed checks."""
    seconds: tuple[float, float]
    """For the whole run: if satisfaction stays as it is, and if every sample satisfied."""
    seconds_evaluating: float
    """For the evaluations, a part of ``seconds``."""
    memory: MemoryUse
    """Memory that the probe used, from which the memory of a run is estimated."""
    keeps_best: bool
    """Whether the run keeps copies of the best model."""


def probe(job: Job, inputs: Inputs, count: int) -> ProbeResult:
    """Draw M samples of the base for ``count`` contexts, the first that the run would draw."""
    with closing(Judge(inputs.constraints, Limits.of(job.settings))) as judge:  # first: it may fork
        return _probe(job, inputs, count, judge)


def _probe(job: Job, inputs: Inputs, count: int, judge: Judge) -> ProbeResult:
    config = job.settings
    judge.require_columns(inputs.tuning)
    judge.require_columns(inputs.held_out)
    # With new adapters the model is still the base, and its gradient takes as long as the run's.
    device = choose_device(config)
    start = used(device)
    base = load_policy_and_base(job.model, config)[0] if config.lora_rank else load_model(job.model, config)
    warn_of_prompts(base.tokenizer, [*inputs.tuning, *inputs.held_out])
    prompts = base.encode(inputs.tuning, config.max_completion_length)  # all of them, to refuse one that is too long
    base.encode(inputs.held_out, config.max_completion_length)
    chosen = ContextStream(inputs.tuning, config.seed).draw(0, min(count, len(inputs.tuning)))
    contexts = [inputs.tuning[i] for i in chosen]
    _log.info(f"drawing {config.num_generations} samples of {job.model} for each of {len(contexts)} contexts")
    started = time.perf_counter()
    stream = UniformStream(config.seed, "check", 0)
    own_prompts = [prompts[i] for i in chosen]
    samples = draw_samples(base, contexts, own_prompts, config.num_generations, config, stream, inputs.stop)
    sampling = (time.perf_counter() - started) / samples.lengths.numel()
    peak = used(device)
    _log.info("judging them")
    verdicts, constraint = _judge(judge, samples)
    _log.info("timing a gradient")
    pace = Pace(sampling, constraint, *_time_scoring(base, samples, verdicts, config))
    differentiate_largest_pass(base, prompts, config)
    memory_use = MemoryUse.of(base, start, peak, config)
    found = _result(samples, verdicts, pace, Limits.of(config).workers, config, inputs, memory_use)
    stats = dataclasses.replace(found.stats, factors=_factor_means(judge, verdicts))
    return dataclasses.replace(found, stats=stats)


def _factor_means(judge: Judge, verdicts: Verdicts) -> dict[str, float]:
    """The means of moments and rewards over the satisfying samples, by name; empty if there are none."""
    rows = [row for row, b in enumerate(verdicts.b) if b > 0]
    return {
        name: sum(verdicts.features[row][place] for row in rows) / len(rows)
        for place, name in enumerate(judge.tilt.names if rows else ())
    }


def _judge(judge: Judge, samples: Samples) -> tuple[Verdicts, float]:
    """Verdicts on all samples, and the seconds for one, without the start of the workers."""
    owners = [context for context in samples.contexts for _ in range(samples.shape[1])]
    texts = [text for row in samples.texts for text in row]
    tokens = [samples.token_ids(*divmod(row, samples.shape[1])) for row in range(len(texts))]
    judge.collect(judge.submit(owners[:1], texts[:1], tokens[:1]))
    started = time.perf_counter()
    verdicts = judge.collect(judge.submit(owners, texts, tokens))
    return verdicts, (time.perf_counter() - started) / len(texts)


def _time_scoring(base: LanguageModel, samples: Samples, verdicts: Verdicts, config: CDPGConfig) -> tuple[float, float]:
    """Seconds to score a sample, and to compute its gradient; satisfying samples come first."""
    order = sorted(range(len(verdicts.b)), key=lambda row: verdicts.b[row] == 0)
    rows = torch.tensor(order[:_TIMED_ROWS])
    started = time.perf_counter()
    score_samples(base, samples, rows, config.tokens_per_pass)
    scored = time.perf_counter()
    with memory.needed_for("computing the gradient", f"lower tokens_per_pass (now {config.tokens_per_pass})"):
        for part in plan_passes(samples, rows, config.tokens_per_pass):
            base.score(*prompts_and_rows(samples, part)).log_prob().sum().backward()
    done = time.perf_counter()
    base.module.zero_grad()
    return (scored - started) / len(rows), (done - scored) / len(rows)


def _result(
    samples: Samples,
    verdicts: Verdicts,
    pace: Pace,
    workers: int,
    config: CDPGConfig,
    inputs: Inputs,
    memory_use: MemoryUse,
) -> ProbeResult:
    per_context = samples.shape[1]
    without = verdicts.failures.keys() | verdicts.inapplicable
    applicable = len(verdicts.b) - len(verdicts.inapplicable)
    z, hits = [], []
    for start in range(0, len(verdicts.b), per_context):
        judged = [verdicts.b[row] for row in range(start, start + per_context) if row not in without]
        if judged:
            z.append(sum(judged) / len(judged))
            hits.append(sum(b > 0 for b in judged) / len(judged))
    stats = ProbeStatistics(
        method=config.method,
        contexts_per_epoch=config.contexts_per_epoch,
        samples=per_context,
        z=z,
        hits=hits,
        failed=len(verdicts.failures) / max(1, applicable),
        failed_allowed=config.check_failures,
        ended=float(samples.ended.double().mean()),
        seconds_sampling=pace.sampling,
        seconds_constraint=pace.constraint,
        workers=workers,
    )
    context = context_seconds(config, pace, inputs.measure.beams)
    share = sum(hits) / len(hits) if hits else 0.0
    most = share if make_method(config).source == "base" else 1.0  # the base's satisfaction stays as it is
    held_out, validation = len(inputs.held_out), len(validation_indices(inputs.tuning, config, len(inputs.held_out)))
    finding = ideal_seconds(config, pace, share, validation, held_out)
    low, high = (
        finding + run_seconds(config, epoch_seconds(config, pace, satisfying, validation), context, held_out)
        for satisfying in (share, most)
    )
    evaluating = context * evaluated_contexts(config, held_out)
    stats = dataclasses.replace(stats, evaluations=evaluating / low if low else 0.0)
    rows = [row for row in range(len(verdicts.b)) if row not in without]
    return ProbeResult(
        contexts=samples.shape[0],
        stats=stats,
        pace=pace,
        tokens=float(samples.lengths.double().mean()),
        satisfying=_examples(samples, verdicts, [row for row in rows if verdicts.b[row] > 0]),
        failing=_examples(samples, verdicts, [row for row in rows if verdicts.b[row] == 0]),
        inapplicable=len(verdicts.inapplicable),
        failures=Counter(failure.kind for failure in verdicts.failures.values()),
        failure=next(iter(verdicts.failures.values()), None),
        seconds=(low, high),
        seconds_evaluating=evaluating,
        memory=memory_use,
        keeps_best=keeps_best(config, make_method(config), len(inputs.held_out)),
    )


def _examples(samples: Samples, verdicts: Verdicts, rows: Iterable[int], count: int = 3) -> list[ShownSample]:
    """A few of the rows, of different contexts if possible."""
    per_context = samples.shape[1]
    spread = sorted(rows, key=lambda row: (row % per_context, row // per_context))
    first: dict[int, int] = {}
    for row in spread:
        first.setdefault(row // per_context, row)
    chosen = [*first.values(), *(row for row in spread if row not in first.values())][:count]
    return [
        ShownSample(
            _prompt(samples.contexts[row // per_context]), samples.texts[row // per_context][row % per_context], b
        )
        for row, b in ((row, verdicts.b[row]) for row in chosen)
    ]


def _prompt(context: Context) -> str:
    """The prompt's text, or the last message of a chat."""
    return context.prompt if isinstance(context.prompt, str) else str(context.prompt[-1].get("content", ""))
