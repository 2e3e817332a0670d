"""Metrics of the translation task: BLEU-4 against the references, plain and with numbers masked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdpg.constraints.entities import distinct_2
from cdpg.constraints.numerals import mask_numbers
from cdpg.contexts import Context
from cdpg.errors import UserError
from cdpg.evaluation.measures import Measured, per_output
from cdpg.evaluation.statistics import Array, Statistic
from cdpg.workers.reader import Apply, directly

_ORDER = 4


@dataclass(frozen=True)
class TranslationMeasure:
    """BLEU needs the column ``reference``; without it only Distinct-2 is measured."""

    beams: int = 4

    def __call__(
        self, contexts: Sequence[Context], outputs: Sequence[Sequence[str]], apply: Apply = directly
    ) -> Measured:
        distinct = per_output(outputs, distinct_2)
        references = [context.columns.get("reference") for context in contexts]
        if not contexts or not all(isinstance(reference, str) for reference in references):
            return Measured(features={"distinct_2": distinct})
        return Measured(
            features={"distinct_2": distinct},
            corpus={
                "bleu": bleu_statistic(outputs, references, lambda text: text),  # type: ignore[arg-type]
                "bleu_masked": bleu_statistic(outputs, references, mask_numbers),  # type: ignore[arg-type]
            },
        )


def bleu_statistic(
    outputs: Sequence[Sequence[str]], references: Sequence[str], prepare: Callable[[str], str]
) -> Statistic:
    """Corpus BLEU as a function of summed n-gram counts: matches and totals of each order, both lengths."""
    bleu = _sacrebleu().BLEU(max_ngram_order=_ORDER, effective_order=True)
    rows = []
    for texts, reference in zip(outputs, references, strict=True):
        scores = [bleu.sentence_score(prepare(text), [prepare(reference)]) for text in texts]
        parts = [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores]
        rows.append(np.sum(parts, axis=0, dtype=np.float64))
    return Statistic(np.array(rows), _bleu)


def _bleu(sums: Array) -> Array:
    """sacreBLEU's own formula on ``[..., 2·order + 2]`` sums."""
    compute = _sacrebleu().BLEU.compute_bleu
    flat = sums.reshape(-1, sums.shape[-1])
    values = []
    for row in flat:
        counts = [round(value) for value in row]
        matches, totals = counts[:_ORDER], counts[_ORDER : 2 * _ORDER]
        score = compute(matches, totals, counts[-2], counts[-1], smooth_method="exp", max_ngram_order=_ORDER)
        values.append(score.score)
    return np.array(values, dtype=np.float64).reshape(sums.shape[:-1])


def _sacrebleu() -> Any:
    try:
        from sacrebleu.metrics import bleu
    except ImportError as error:
        raise UserError("BLEU needs sacreBLEU, which is not installed: pip install 'cdpg[tasks]'") from error
    return bleu
