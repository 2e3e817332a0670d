"""Whether an evaluation's contexts were held out or tuned on, and how tables, report and model card say it.

All of them take the words from here. A record is what ``evaluation.json``, ``comparison.json`` or a line of
``evaluations.jsonl`` holds; one that does not say what was tuned on, such as an older one, claims nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TUNED_ON = "contexts_tuned_on"
"""Key of a record: how many of its ``contexts`` have a prompt that was tuned on; null where that is not known."""
_MOST = 10**15
"""A larger number of contexts is taken for damage."""


def contexts_in_words(record: Mapping[str, Any]) -> str:
    """``200 held-out contexts``, ``12 contexts that the model was tuned on``; ``200 contexts`` if nothing is known."""
    count, tuned_on = _counts(record)
    if count is None:
        return "contexts"
    noun = "context" if count == 1 else "contexts"
    if tuned_on is None:
        return f"{count:,} {noun}"
    if tuned_on == 0:
        return f"{count:,} held-out {noun}"
    if tuned_on == count:
        return f"{count:,} {noun} that {_models(record)} tuned on"
    return f"{count:,} contexts, {tuned_on:,} of which {_models(record)} tuned on"


def warning(record: Mapping[str, Any]) -> str:
    """What to think of figures that are not of held-out contexts alone; empty for all others."""
    count, tuned_on = _counts(record)
    if not count or not tuned_on:
        return ""
    which = "the" if tuned_on == count else f"{tuned_on:,} of the {count:,}"
    return f"{which} contexts of this evaluation were tuned on: the figures may be better than on new contexts"


def _counts(record: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """How many contexts there are and how many of them were tuned on, as far as the record says it in sound numbers."""
    count, tuned_on = _whole(record.get("contexts")), _whole(record.get(TUNED_ON))
    return count, tuned_on if count is not None and tuned_on is not None and tuned_on <= count else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST else None


def _models(record: Mapping[str, Any]) -> str:
    """One tuned model, or those of a comparison."""
    models = record.get("models")
    several = isinstance(models, Mapping) and len(models) > 2  # the base is one of them
    return "the models were" if several else "the model was"
