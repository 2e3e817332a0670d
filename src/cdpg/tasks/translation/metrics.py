"""Metrics of the translation task: BLEU-4 against the references, plain and with numbers masked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.evaluation.measures import Measured, distinct_2, per_output
from cdpg.evaluation.metrics import Count, Metric
from cdpg.evaluation.statistics import Array, Statistic
from cdpg.sandbox.reader import Apply, directly
from cdpg.tasks.translation.constraint import mask_numbers

_ORDER = 4


METRICS = {
    "bleu": Metric(
        "BLEU-4",
        "sacreBLEU of beam-search outputs against the references.",
        better="higher",
        digits=1,
        of_reference=True,
    ),
    "bleu_masked": Metric(
        "BLEU-4, numbers masked",
        "The same with un, une, deux … neuf and 1 … 9 replaced by one placeholder on both sides.",
        better="higher",
        digits=1,
        of_reference=True,
    ),
}


@dataclass(frozen=True)
class TranslationMeasure:
    """BLEU of the contexts that have a reference, and Distinct-2 of all."""

    beams: int = 4
    metrics: Mapping[str, Metric] = field(default_factory=lambda: METRICS)
    counts: Mapping[str, Count] = field(default_factory=dict)

    def __call__(
        self, contexts: Sequence[Context], outputs: Sequence[Sequence[str]], apply: Apply = directly
    ) -> Measured:
        distinct = per_output(outputs, distinct_2)
        references = [context.reference for context in contexts]
        if not any(references):
            return Measured(features={"distinct_2": distinct})
        return Measured(
            features={"distinct_2": distinct},
            corpus={
                "bleu": bleu_statistic(outputs, references, lambda text: text),
                "bleu_masked": bleu_statistic(outputs, references, mask_numbers),
            },
        )


def bleu_statistic(
    outputs: Sequence[Sequence[str]], references: Sequence[str | None], prepare: Callable[[str], str]
) -> Statistic:
    """Corpus BLEU as a function of summed n-gram counts: matches and totals of each order, and both lengths.

    A context without a reference adds nothing to the sums.
    """
    bleu = _sacrebleu().BLEU(max_ngram_order=_ORDER, effective_order=True)
    terms = np.zeros((len(references), 2 * _ORDER + 2))
    for row, texts, reference in zip(terms, outputs, references, strict=True):
        target = None if reference is None else prepare(reference)
        for text in texts if target is not None else ():
            score = bleu.sentence_score(prepare(text), [target])
            row += [*score.counts, *score.totals, score.sys_len, score.ref_len]
    return Statistic(terms, _bleu)


def _bleu(sums: Array) -> Array:
    """sacreBLEU's formula on ``[..., 2·order + 2]`` sums, all at once; NaN if there is no reference.

    BLEU = 100 · exp(min(0, 1 - r/l)) · (p₁ p₂ p₃ p₄)^(1/4) (Papineni et al. 2002), where the k-th order without a match
    counts 2⁻ᵏ of one (Chen and Cherry 2014, method 3). It is 0 if nothing matches, or an order has no n-gram.
    """
    counts = np.rint(sums)
    matches, totals = counts[..., :_ORDER], counts[..., _ORDER : 2 * _ORDER]
    length, reference = counts[..., -2], counts[..., -1]
    absent = matches == 0
    counted = np.where(absent, 0.5 ** np.cumsum(absent, axis=-1), matches)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_penalty = np.minimum(0.0, 1.0 - reference / length)
        score = 100.0 * np.exp(log_penalty + np.log(counted / totals).mean(axis=-1))
    values: Array = np.where(absent.all(axis=-1) | (totals == 0).any(axis=-1), 0.0, score)
    return np.where(reference > 0, values, np.nan)


def _sacrebleu() -> Any:
    try:
        from sacrebleu.metrics import bleu
    except ImportError as error:
        raise UserError("BLEU needs sacreBLEU, which is not installed: pip install 'cdpg[tasks]'") from error
    return bleu
