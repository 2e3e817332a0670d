"""Metrics of the summarisation task: entities of the summary against source and reference, Distinct-2, ROUGE-L."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdpg.constraints.entities import (
    PROMPT_PREFIX,
    distinct_2,
    labelled_entities,
    precision_source,
    recall_target,
)
from cdpg.constraints.texts import as_text
from cdpg.contexts import Context
from cdpg.errors import UserError
from cdpg.evaluation.measures import Measured, per_output
from cdpg.evaluation.statistics import Array
from cdpg.workers.reader import Apply, directly

_Labelled = list[tuple[str, str]]


@dataclass(frozen=True)
class SummaryMeasure:
    """The source is the column ``source``, else the prompt; recall and ROUGE-L need the column ``reference``.

    A summary without entities, or one that exhausts the recogniser, has precision 0; a reference without entities is
    recalled in full.
    """

    beams: int = 4

    def __call__(
        self, contexts: Sequence[Context], outputs: Sequence[Sequence[str]], apply: Apply = directly
    ) -> Measured:
        flat = [text for texts in outputs for text in texts]
        labelled: list[_Labelled | None] = apply(labelled_entities, flat, [])
        found = [_names(entities) for entities in labelled]
        owner = [context for context, texts in zip(contexts, outputs, strict=True) for _ in texts]
        sources = _entity_sets([as_text(context.columns.get("source") or context.prompt) for context in owner], apply)

        def table(values: Sequence[float]) -> Array:
            return np.array(values, dtype=np.float64).reshape(len(outputs), -1)

        features = {
            "entities": table([np.nan if entities is None else len(entities) for entities in found]),
            "precision_source": table(_compared(precision_source, found, sources)),
            "distinct_2": per_output(outputs, distinct_2),
        }
        references = [context.columns.get("reference") for context in owner]
        if references and all(isinstance(reference, str) for reference in references):
            targets = _entity_sets(references, apply)  # type: ignore[arg-type]
            features["recall_target"] = table(_compared(recall_target, found, targets))
            features["rouge_l"] = table(_rouge_l(references, flat))  # type: ignore[arg-type]
        labels = Counter(label for entities in labelled for _, label in entities or ())
        return Measured(features=features, frequencies={"entity_label": labels})


def _names(entities: _Labelled | None) -> frozenset[str] | None:
    """E(text); None where reading the text failed."""
    return None if entities is None else frozenset(name.lower() for name, _ in entities)


def _compared(
    share: Callable[[frozenset[str], frozenset[str]], float],
    ours: Sequence[frozenset[str] | None],
    theirs: Sequence[frozenset[str] | None],
) -> list[float]:
    """A share of each output's entities in another set, or the reverse; NaN where one of the two is not known."""
    pairs = zip(ours, theirs, strict=True)
    return [np.nan if own is None or other is None else share(own, other) for own, other in pairs]


def _entity_sets(texts: Sequence[str], apply: Apply) -> list[frozenset[str] | None]:
    """E(text) of each text; texts that stand there several times are read once."""
    plain = [text.removeprefix(PROMPT_PREFIX) for text in texts]
    distinct = list(dict.fromkeys(plain))
    found = apply(labelled_entities, distinct, [])
    sets = {text: _names(entities) for text, entities in zip(distinct, found, strict=True)}
    return [sets[text] for text in plain]


def _rouge_l(references: Sequence[str], texts: Sequence[str]) -> list[float]:
    """F-measures without stemming."""
    scorer: Any = _rouge_scorer().RougeScorer(["rougeL"])
    pairs = zip(references, texts, strict=True)
    return [scorer.score(reference, text)["rougeL"].fmeasure for reference, text in pairs]


def _rouge_scorer() -> Any:
    try:
        from rouge_score import rouge_scorer
    except ImportError as error:
        raise UserError("ROUGE needs rouge-score, which is not installed: pip install 'cdpg[tasks]'") from error
    return rouge_scorer
