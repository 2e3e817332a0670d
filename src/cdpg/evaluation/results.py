"""Several models on the same held-out contexts: the content of ``evaluation.json`` and ``comparison.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdpg.config import CDPGConfig
from cdpg.evaluation.held_out import APPLIED, MODEL_NOTICES, TUNED_ON, WITH_GAIN, warning
from cdpg.evaluation.metrics import (
    COUNT_INFO,
    GAIN,
    GAIN_ESS,
    LEFT_OUT,
    METRIC_INFO,
    METRICS,
    POOLED,
    RECALL,
    Count,
    Metric,
)
from cdpg.evaluation.outcome import (
    Outcome,
    ideal_means,
    model_means,
    outputs_of,
    partition_estimates,
    statistics_of,
    token_ranks,
)
from cdpg.evaluation.pass_at_k import pass_at_k
from cdpg.evaluation.statistics import (
    CONFIDENCE,
    RESAMPLES,
    Array,
    Statistic,
    difference,
    interval,
    mean_statistic,
    quotient,
    ratio,
    resample,
)
from cdpg.messages.terms import term
from cdpg.target.divergence import kl_target_policy_pooled, pool_weights

BASE, TUNED = "base", "tuned"
"""The names of a run's two models in ``evaluation.json``."""
_EXAMPLES = 8

Scores = Mapping[tuple[str, str], Tensor]
"""``[context, sample]`` log-probabilities under the first model of samples of the second, where they satisfy."""


@dataclass(frozen=True)
class Evaluation:
    """Models on the same contexts, the base first."""

    outcomes: Mapping[str, Outcome]
    statistics: Mapping[str, Mapping[str, Statistic]]
    ideal: Mapping[str, Array]
    """Means of features of samples under the ideal model, ``[context]`` each."""
    seed: int
    failures_allowed: float
    """Share of failed checks above which the figures are unreliable."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Facts for the files beside the figures: task, command, versions."""
    tuned_on: int | None = None
    """How many of the contexts have a prompt that was tuned on; None if it is not known."""
    own_metrics: Mapping[str, Metric] = field(default_factory=dict)
    """How the measure's own metrics are shown."""
    own_counts: Mapping[str, Count] = field(default_factory=dict)
    """How its counts are shown."""
    ideal_samples: Sequence[Mapping[str, Any]] = ()
    """The samples of the ideal model that the gain was measured on."""

    @classmethod
    def of(
        cls,
        outcomes: Mapping[str, Outcome],
        scores: Scores,
        config: CDPGConfig,
        about: Mapping[str, Any],
        tuned_on: int | None = None,
        own_metrics: Mapping[str, Metric] | None = None,
        own_counts: Mapping[str, Count] | None = None,
        gains: Mapping[str, Tensor] | None = None,
    ) -> Evaluation:
        """Metrics of every model; ``scores`` has an entry for each pair of models, except those scored by the base.

        ``gains`` has the gain of every model over the base and its recall, ``[2, context]``, if they were measured.
        """
        statistics = {name: statistics_of(outcome, config.partition_epsilon) for name, outcome in outcomes.items()}
        absent = [name for name in LEFT_OUT if not any(found[name].terms[:, 0].any() for found in statistics.values())]
        for found in statistics.values():
            for name in absent:
                del found[name]
        pool = _pool(outcomes, scores)
        for name, values in zip(outcomes, kl_target_policy_pooled(*pool), strict=True):
            statistics[name][POOLED] = mean_statistic(values.numpy())
        for name, gain in (gains or {}).items():
            statistics[name][GAIN] = mean_statistic(gain[0].numpy())
            statistics[name][RECALL] = mean_statistic(gain[1].numpy())
        own = (own_metrics or {}, own_counts or {})
        ideal = _ideal_means(outcomes, pool)
        return cls(outcomes, statistics, ideal, config.seed, config.check_failures, about, tuned_on, *own)

    def metrics(self) -> dict[str, dict[str, dict[str, float | None]]]:
        """Every metric of every model with its interval."""
        resamples = self._resamples()
        return {
            name: {metric: interval(statistic, resamples).to_mapping() for metric, statistic in found.items()}
            for name, found in self.statistics.items()
        }

    def to_mapping(self, models: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The content of the file. ``models`` maps names to those in the file; the base's name is ``base``.

        Without it, the file has the models under ``models``.
        """
        names = models or {name: name for name in self.outcomes}
        metrics = {names[name]: values for name, values in self.metrics().items() if name in names}
        base = self.outcomes[BASE]
        tuned = {name: shown for name, shown in names.items() if name != BASE}
        return {
            **self.about,
            "decoding": "ancestral" if base.beams is None else "beam",
            **self._on_contexts(),
            "samples_per_context": base.table("b").shape[1],
            "resamples": RESAMPLES,
            "confidence": CONFIDENCE,
            "seed": self.seed,
            **(metrics if models else {"models": metrics}),
            **self._info(),
            "changes": {shown: self._changes(name, BASE) for name, shown in tuned.items()},
            **self._between(tuned),
            **self._against_ideal(names),
            **self._pass_at_k(names),
            "frequencies": {shown: _frequencies(self.outcomes[name]) for name, shown in names.items()},
            "partition": partition_estimates(base),
            **self._all_notices(names, tuned),
            "examples": [self._example(index, names) for index in example_indices(len(base.contexts))],
        }

    def _info(self) -> dict[str, Any]:
        """How the task's own metrics and counts are shown."""
        found, counted = self.statistics[BASE], self.outcomes[BASE].measured.frequencies
        metrics = {name: metric.to_mapping() for name, metric in self.own_metrics.items() if name in found}
        counts = {name: count.to_mapping() for name, count in self.own_counts.items() if name in counted}
        return {METRIC_INFO: metrics, COUNT_INFO: counts}

    def _on_contexts(self) -> dict[str, Any]:
        applies = torch.stack([~outcome.table("inapplicable").all(dim=1) for outcome in self.outcomes.values()])
        return {
            "contexts": len(self.outcomes[BASE].contexts),
            TUNED_ON: self.tuned_on,
            APPLIED: int(applies.any(dim=0).sum()),
            **({} if self._with_gain() is None else {WITH_GAIN: self._with_gain()}),
        }

    def _with_gain(self) -> int | None:
        """How many contexts have a sample of the ideal model; None if the gain was not measured."""
        gain = self.statistics[BASE].get(GAIN)
        return None if gain is None else int(gain.terms[:, 1].sum())

    def _all_notices(self, names: Mapping[str, str], tuned: Mapping[str, str]) -> dict[str, Any]:
        """All of them for the user, and those on a model by its name in the file."""
        distances = {shown: list(self._on_distance(name, shown)) for name, shown in tuned.items()}
        losses = {shown: list(self._notices(name, shown)) for name, shown in names.items()}
        return {
            "notices": [
                *(self._on_tuned_contexts() if tuned else ()),
                *(notice for found in distances.values() for notice in found),
                *(self._on_gain() if tuned else ()),
                *self._on_references(),
                *(notice for found in losses.values() for notice in found),
            ],
            MODEL_NOTICES: {shown: [*distances.get(shown, ()), *found] for shown, found in losses.items()},
        }

    def _on_tuned_contexts(self) -> Iterator[str]:
        problem = warning(self._on_contexts())
        if problem:
            yield f"{problem}; give others to evaluate on with {term('eval_contexts')}"

    def _on_gain(self) -> Iterator[str]:
        """A notice on contexts that do not count in the gain."""
        gain = self.statistics[BASE].get(GAIN)
        if gain is None:
            return
        judged = self.outcomes[BASE].table("valid").any(dim=1).numpy()  # no draw helps where no sample has a verdict
        lacking = int((judged & (gain.terms[:, 1] == 0)).sum())
        if lacking:
            yield (
                f"{lacking:,} of {judged.sum():,} contexts have no satisfying sample of the base and do not count in "
                "the gain; raise gain_draws to find more"
            )
        weighted = self.about.get(GAIN_ESS)
        if weighted is not None:
            yield (
                f"with moments or rewards the gain is estimated from weighted samples of the base: {weighted:.1f} "
                "effective samples for each context; with few of them it is biased towards 0, and a larger "
                "gain_draws improves it"
            )

    def ideal_factors(self) -> dict[str, dict[str, float | None]]:
        """The means of the target's moments and rewards under the ideal model."""
        resamples, names = self._resamples(), self.outcomes[BASE].factors()
        return {name: interval(mean_statistic(self.ideal[name]), resamples).to_mapping() for name in names}

    def _on_references(self) -> Iterator[str]:
        """A notice on contexts without a reference, if others have one."""
        contexts = self.outcomes[BASE].contexts
        lacking = sum(context.reference is None for context in contexts)
        measured = self.statistics[BASE]
        partial = [name for name, metric in self.own_metrics.items() if metric.of_reference and name in measured]
        if lacking and partial:
            yield (
                f"{lacking:,} of {len(contexts):,} contexts have no reference, and do not count in {', '.join(partial)}"
            )

    def _on_distance(self, name: str, shown: str) -> Iterator[str]:
        """A notice if a tuned model is no nearer to the ideal model than the base, by the pooled estimate."""
        base, tuned = self.statistics[BASE].get(POOLED), self.statistics[name].get(POOLED)
        if base is None or tuned is None:
            return
        change = difference(tuned, base, self._resamples())
        if change.mean is None or change.mean <= 0:
            return
        ends = "" if change.low is None or change.high is None else f" [{change.low:+.2f}, {change.high:+.2f}]"
        yield (
            f"{shown}: no nearer to the ideal model than the base: pooled KL(p, π) {base.value():.2f} → "
            f"{tuned.value():.2f} nats, {change.mean:+.2f}{ends}"
        )

    def _notices(self, name: str, shown: str) -> Iterator[str]:
        """Notices on a model's figures."""
        inapplicable = self.outcomes[name].table("inapplicable")
        skipped, total = int(inapplicable.sum()), int((~inapplicable).sum())
        failed = int(self.outcomes[name].table("failed").sum())
        if failed:
            many = ": too many for the figures to be relied upon" if failed > self.failures_allowed * total else ""
            yield f"{shown}: the check failed on {failed:,} of {total:,} samples, which are left out{many}"
        if skipped:
            yield f"{shown}: no constraint applies to {skipped:,} of {skipped + total:,} samples, which are left out"
        unmeasured = self.outcomes[name].unmeasured
        if unmeasured:
            kinds = ", ".join(f"{kind} {count:,}" for kind, count in unmeasured.most_common())
            yield (
                f"{shown}: measuring the outputs failed {unmeasured.total():,} times ({kinds}), and these "
                "measurements are left out"
            )

    def _resamples(self) -> Array:
        return resample(len(self.outcomes[BASE].contexts), self.seed)

    def _between(self, tuned: Mapping[str, str]) -> dict[str, Any]:
        """Every other tuned model against the first, if there are several."""
        if len(tuned) < 2:
            return {}
        first, *others = tuned
        return {"between": {tuned[first]: {tuned[name]: self._changes(name, first) for name in others}}}

    def _changes(self, name: str, reference: str) -> dict[str, Any]:
        """Difference from and ratio to another model, paired by context, for all metrics in which models may differ."""
        resamples, before = self._resamples(), self.statistics[reference]
        known = {**self.own_metrics, **METRICS}
        return {
            metric: {
                "difference": difference(statistic, before[metric], resamples).to_mapping(),
                "ratio": ratio(statistic, before[metric], resamples).to_mapping(),
            }
            for metric, statistic in self.statistics[name].items()
            if metric in before and not (metric in known and known[metric].of_base)
        }

    def _against_ideal(self, names: Mapping[str, str]) -> dict[str, Any]:
        resamples = self._resamples()
        versus: dict[str, Any] = {}
        for name, shown in names.items():
            means = model_means(self.outcomes[name])
            versus[shown] = {
                metric: interval(_ratio_where_both(means[metric], values), resamples).to_mapping()
                for metric, values in self.ideal.items()
            }
        figures = {name: interval(mean_statistic(mean), resamples).to_mapping() for name, mean in self.ideal.items()}
        return {"ideal": figures, "versus_ideal": versus}

    def _pass_at_k(self, names: Mapping[str, str]) -> dict[str, Any]:
        """pass@k of every model, by k, if contexts have several samples."""
        if self.outcomes[BASE].table("b").shape[1] < 2:
            return {}
        resamples, found = self._resamples(), dict[str, Any]()
        for name, shown in names.items():
            b, valid = (self.outcomes[name].table(key).double().numpy() for key in ("b", "valid"))
            shares = pass_at_k((b > 0).astype(np.float64), valid)
            found[shown] = {str(k): interval(mean_statistic(v), resamples).to_mapping() for k, v in shares.items()}
        return {"pass_at_k": found}

    def _example(self, index: int, names: Mapping[str, str]) -> dict[str, Any]:
        context = self.outcomes[BASE].contexts[index]
        return {
            "row": context.row,
            "prompt": context.prompt,
            "columns": {key: value for key, value in context.columns.items() if isinstance(value, (str, int, float))},
            "outputs": {shown: outputs_of(self.outcomes[name], index) for name, shown in names.items()},
        }


def example_indices(count: int) -> list[int]:
    """Indices of the contexts that are shown as examples, spread over all ``count`` contexts."""
    shown = min(_EXAMPLES, count)
    return [index * count // shown for index in range(shown)]


def _frequencies(outcome: Outcome) -> dict[str, Any]:
    counters = {name: dict(counter.most_common()) for name, counter in outcome.measured.frequencies.items()}
    return {**counters, "token_rank": token_ranks(outcome)}


def _ratio_where_both(model: Array, ideal: Array) -> Statistic:
    """Mean of the model over mean of the ideal, over the contexts that have both."""
    both = ~(np.isnan(model) | np.isnan(ideal))
    return Statistic(np.where(both[:, None], np.stack([model, ideal], axis=1), 0.0), quotient)


def _ideal_means(outcomes: Mapping[str, Outcome], pool: tuple[Tensor, Tensor, Tensor]) -> dict[str, Array]:
    """Means under the ideal model: from the base's satisfying samples, which are exact samples of it.

    With moments or rewards they are not, and the outputs that become frequent may be rare in the base. Then the pool's
    samples are weighted.
    """
    base = outcomes[BASE]
    if any(block.is_tilted for block in base.blocks):
        return ideal_means(list(outcomes.values()), pool_weights(*pool).numpy())
    return ideal_means([base], base.table("b").double().numpy())  # features are NaN where there is no verdict


def _pool(outcomes: Mapping[str, Outcome], scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
    """All samples of all models: log P_c ``[context, pool]``, log π_k ``[model, context, pool]``, who has a verdict."""
    log_p, valid = [], []
    log_models: dict[str, list[Tensor]] = {name: [] for name in outcomes}
    for source, outcome in outcomes.items():
        log_a, log_q = outcome.table("log_a"), outcome.table("log_q")
        log_p.append(outcome.table("log_p"))
        valid.append(outcome.table("valid"))
        for name in outcomes:
            own = log_q if name == source else log_a if name == BASE else scores[name, source]
            log_models[name].append(own)
    table = torch.stack([torch.cat(parts, dim=1) for parts in log_models.values()])
    return torch.cat(log_p, dim=1), table, torch.cat(valid, dim=1)
