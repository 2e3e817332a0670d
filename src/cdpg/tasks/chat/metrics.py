"""Metrics of the chat task: valid JSON, and whether the fields say what the sentence says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cdpg.contexts.contexts import Context
from cdpg.evaluation.measures import Measured, distinct_2, per_output, table_of
from cdpg.evaluation.metrics import Count, Metric
from cdpg.sandbox.functions import text_check
from cdpg.sandbox.reader import Apply, directly
from cdpg.tasks.chat.constraint import NOT_JSON, VALID, outcome, read_json

METRICS = {
    "valid_json": Metric(
        "valid JSON", "Share of answers that are JSON and follow their schema.", better="higher", group="requirement"
    ),
    "fields_right": Metric(
        "fields right",
        "Share of a record's fields that the answer has right; 0 for an answer that is not a JSON object.",
        better="higher",
    ),
    "fields_right_valid": Metric(
        "fields right, valid answers", "The same, of the answers that follow their schema.", better="higher"
    ),
}
COUNTS = {"json_outcome": Count("Outcomes of the schema's check", "share of answers", exclusive=True)}


@dataclass(frozen=True)
class RecordMeasure:
    """Each answer is compared with the column ``record``, if there is one."""

    beams: int = 0
    metrics: Mapping[str, Metric] = field(default_factory=lambda: METRICS)
    counts: Mapping[str, Count] = field(default_factory=lambda: COUNTS)

    def __call__(
        self, contexts: Sequence[Context], outputs: Sequence[Sequence[str]], apply: Apply = directly
    ) -> Measured:
        packed = [
            json.dumps([context.columns.get("schema"), context.columns.get("record"), text])
            for context, texts in zip(contexts, outputs, strict=True)
            for text in texts
        ]
        found = [(None, None) if one is None else one for one in apply(judged_answers, packed, (NOT_JSON, 0.0))]
        outcomes = [kind for kind, _ in found]
        valid = table_of((None if kind is None else kind == VALID for kind in outcomes), outputs)
        right = table_of((share for _, share in found), outputs)
        features = {"valid_json": valid, "distinct_2": per_output(outputs, distinct_2)}
        if not np.isnan(right).all():
            features["fields_right"] = right
            features["fields_right_valid"] = np.where(valid > 0, right, np.nan)
        return Measured(
            features=features,
            frequencies={"json_outcome": Counter(kind for kind in outcomes if kind is not None)},
            remarks={"outcome": np.array(outcomes, dtype=object).reshape(len(outputs), -1).tolist()},
        )


@text_check()
def judged_answers(packed: Sequence[str]) -> list[tuple[str, float | None]]:
    """The outcome of each answer, and its share of right fields; None for a context without a record."""
    found = []
    for text in packed:
        schema, record, answer = json.loads(text)
        found.append((outcome(answer, schema), fields_right(answer, record) if isinstance(record, dict) else None))
    return found


def fields_right(answer: str, record: Mapping[str, Any]) -> float:
    """The share of the record's fields that a JSON answer has right. Case and space around a text do not matter."""
    try:
        value = read_json(answer)
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(value, dict) or not record:
        return 0.0
    return sum(name in value and _same(value[name], right) for name, right in record.items()) / len(record)


def _same(value: Any, right: Any) -> bool:
    if isinstance(value, str) and isinstance(right, str):
        return " ".join(value.split()).casefold() == " ".join(right.split()).casefold()
    return isinstance(value, bool) == isinstance(right, bool) and bool(value == right)
