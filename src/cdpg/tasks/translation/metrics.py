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
    """sacreBLEU's formula on ``[..., 2·order + 2]`` sums; NaN if there is no reference."""
    compute = _sacrebleu().BLEU.compute_bleu
    flat = sums.reshape(-1, sums.shape[-1])
    values = []
    for row in flat:
        counts = [round(value) for value in row]
        matches, totals = counts[:_ORDER], counts[_ORDER : 2 * _ORDER]
        score = compute(matches, totals, counts[-2], counts[-1], smooth_method="exp", max_ngram_order=_ORDER)
        values.append(score.score if counts[-1] else np.nan)
    return np.array(values, dtype=np.float64).reshape(sums.shape[:-1])


def _sacrebleu() -> Any:
    try:
        from sacrebleu.metrics import bleu
    except ImportError as error:
        raise UserError("BLEU needs sacreBLEU, which is not installed: pip install 'cdpg[tasks]'") from error
    return bleu
