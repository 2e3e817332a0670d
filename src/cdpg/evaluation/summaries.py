"""Metrics of the summarisation task: entities of the summary against source and reference, Distinct-2, ROUGE-L."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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


@dataclass(frozen=True)
class SummaryMeasure:
    """The source is the column ``source``, else the prompt; recall and ROUGE-L need the column ``reference``.

    A summary without entities has precision 0; a reference without entities is recalled in full.
    """

    beams: int = 4

    def __call__(
        self, contexts: Sequence[Context], outputs: Sequence[Sequence[str]], apply: Apply = directly
    ) -> Measured:
        flat = [text for texts in outputs for text in texts]
        labelled = [entities or [] for entities in apply(labelled_entities, flat)]
        found = [frozenset(name.lower() for name, _ in entities) for entities in labelled]
        owner = [context for context, texts in zip(contexts, outputs, strict=True) for _ in texts]
        sources = _entity_sets([as_text(context.columns.get("source") or context.prompt) for context in owner], apply)

        def table(values: Sequence[float]) -> Array:
            return np.array(values, dtype=np.float64).reshape(len(outputs), -1)

        features = {
            "entities": table([len(entities) for entities in found]),
            "precision_source": table(
                [precision_source(ours, theirs) for ours, theirs in zip(found, sources, strict=True)]
            ),
            "distinct_2": per_output(outputs, distinct_2),
        }
        references = [context.columns.get("reference") for context in owner]
        if references and all(isinstance(reference, str) for reference in references):
            targets = _entity_sets(references, apply)  # type: ignore[arg-type]
            features["recall_target"] = table(
                [recall_target(ours, target) for ours, target in zip(found, targets, strict=True)]
            )
            features["rouge_l"] = table(_rouge_l(references, flat))  # type: ignore[arg-type]
        labels = Counter(label for entities in labelled for _, label in entities)
        return Measured(features=features, frequencies={"entity_label": labels})


def _entity_sets(texts: Sequence[str], apply: Apply) -> list[frozenset[str]]:
    """E(text) of each text; texts that stand there several times are read once."""
    plain = [text.removeprefix(PROMPT_PREFIX) for text in texts]
    distinct = list(dict.fromkeys(plain))
    found = apply(labelled_entities, distinct)
    sets = {
        text: frozenset(name.lower() for name, _ in entities or [])
        for text, entities in zip(distinct, found, strict=True)
    }
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
