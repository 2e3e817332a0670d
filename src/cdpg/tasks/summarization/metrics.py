"""Metrics of the summarisation task: entities of the summary against source and reference, Distinct-2, ROUGE-L."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cdpg.constraints.texts import as_text
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.evaluation.measures import Measured, distinct_2, per_output, table_of
from cdpg.evaluation.metrics import Count, Metric
from cdpg.sandbox.reader import Apply, directly
from cdpg.tasks.summarization.constraint import PROMPT_PREFIX, labelled_entities, precision_source, recall_target

_Labelled = list[tuple[str, str]]


METRICS = {
    "precision_source": Metric(
        "precision-source", "Share of the output's entities that are in the source.", better="higher"
    ),
    "recall_target": Metric(
        "recall-target", "Share of the reference's entities that are in the output.", better="higher", of_reference=True
    ),
    "entities": Metric("entities", "Distinct named entities of an output.", "entities", "higher", 2),
    "rouge_l": Metric("ROUGE-L", "F-measure against the reference.", better="higher", of_reference=True),
}
COUNTS = {
    "entity_label": Count("Entities by label", "entities"),
}


@dataclass(frozen=True)
class SummaryMeasure:
    """The source is the column ``source``, else the prompt; recall and ROUGE-L cover contexts with a reference.

    A summary without entities, or one that exhausts the recogniser, has precision 0. A reference without entities has
    recall 1.
    """

    beams: int = 4
    metrics: Mapping[str, Metric] = field(default_factory=lambda: METRICS)
    counts: Mapping[str, Count] = field(default_factory=lambda: COUNTS)

    def __call__(
        self, contexts: Sequence[Context], outputs: Sequence[Sequence[str]], apply: Apply = directly
    ) -> Measured:
        flat = [text for texts in outputs for text in texts]
        labelled: list[_Labelled | None] = apply(labelled_entities, flat, [])
        found = [_names(entities) for entities in labelled]
        owner = [context for context, texts in zip(contexts, outputs, strict=True) for _ in texts]
        sources = _entity_sets([as_text(context.columns.get("source") or context.prompt) for context in owner], apply)

        features = {
            "entities": table_of((None if entities is None else len(entities) for entities in found), outputs),
            "precision_source": table_of(_compared(precision_source, found, sources), outputs),
            "distinct_2": per_output(outputs, distinct_2),
        }
        references = [context.reference for context in owner]
        if any(references):
            targets = _entity_sets(references, apply)
            features["recall_target"] = table_of(_compared(recall_target, found, targets), outputs)
            features["rouge_l"] = table_of(_rouge_l(references, flat), outputs)
        labels = Counter(label for entities in labelled for _, label in entities or ())
        return Measured(features=features, frequencies={"entity_label": labels})


def _names(entities: _Labelled | None) -> frozenset[str] | None:
    """E(text); None if the recogniser failed on the text."""
    return None if entities is None else frozenset(name.lower() for name, _ in entities)


def _compared(
    share: Callable[[frozenset[str], frozenset[str]], float],
    ours: Sequence[frozenset[str] | None],
    theirs: Sequence[frozenset[str] | None],
) -> list[float | None]:
    """``share`` of each output's entities and another set; None if either set is None."""
    pairs = zip(ours, theirs, strict=True)
    return [None if own is None or other is None else share(own, other) for own, other in pairs]


def _entity_sets(texts: Sequence[str | None], apply: Apply) -> list[frozenset[str] | None]:
    """E(text) of each text, None for None; repeated texts are read once."""
    plain = [None if text is None else text.removeprefix(PROMPT_PREFIX) for text in texts]
    distinct = list(dict.fromkeys(text for text in plain if text is not None))
    found = apply(labelled_entities, distinct, [])
    sets = {text: _names(entities) for text, entities in zip(distinct, found, strict=True)}
    return [None if text is None else sets[text] for text in plain]


def _rouge_l(references: Sequence[str | None], texts: Sequence[str]) -> list[float | None]:
    """F-measures without stemming; None without a reference."""
    scorer: Any = _rouge_scorer().RougeScorer(["rougeL"])
    pairs = zip(references, texts, strict=True)
    return [None if to is None else scorer.score(to, text)["rougeL"].fmeasure for to, text in pairs]


def _rouge_scorer() -> Any:
    try:
        from rouge_score import rouge_scorer
    except ImportError as error:
        raise UserError("ROUGE needs rouge-score, which is not installed: pip install 'cdpg[tasks]'") from error
    return rouge_scorer
