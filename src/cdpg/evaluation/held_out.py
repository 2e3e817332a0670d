"""Describes an evaluation's contexts in words for tables, report and model card: how many, held out or tuned on.

A record is the content of ``evaluation.json``, ``comparison.json`` or a line of ``evaluations.jsonl``. Nothing is
claimed for a record without the number of contexts tuned on, such as an older one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TUNED_ON = "contexts_tuned_on"
"""Key of a record: how many of its ``contexts`` have a prompt that was tuned on; null if it is not known."""
APPLIED = "contexts_applied"
"""Key of a record: to how many of its ``contexts`` a constraint applies, for one sample of one model at least."""
WITH_GAIN = "contexts_with_gain"
"""Key of a record: how many of its ``contexts`` have a sample of the ideal model; absent if no gain was measured."""
MODEL_NOTICES = "model_notices"
"""Key of a record: for each model the notices on it alone."""
FEW = 20
"""Contexts below which intervals are called rough."""
_MOST = 10**15
"""A larger number of contexts is treated as damage."""


def contexts_in_words(record: Mapping[str, Any]) -> str:
    """``200 held-out contexts``, ``12 contexts that the model was tuned on``; ``200 contexts`` if nothing is known.

    If no constraint applies to some of them, the number of the others is added.
    """
    applied = _applied(record)
    return _tuning_in_words(record) + ("" if applied is None else f" (a constraint applies to {applied:,} of them)")


def _tuning_in_words(record: Mapping[str, Any]) -> str:
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
    """A warning on figures of contexts that were tuned on; empty if all are held out."""
    count, tuned_on = _counts(record)
    if not count or not tuned_on:
        return ""
    which = "the" if tuned_on == count else f"{tuned_on:,} of the {count:,}"
    return f"{which} contexts of this evaluation were tuned on: the figures may be better than on new contexts"


def on_gain(record: Mapping[str, Any]) -> str:
    """Says over which contexts the gain is a mean, if these are not all; empty otherwise."""
    count, counted = _whole(record.get("contexts")), _whole(record.get(WITH_GAIN))
    if count is None or counted is None or counted >= count:
        return ""
    return f"the gain is that of {counted:,} of the {count:,} contexts, those with a sample of the ideal model"


def on_few(record: Mapping[str, Any]) -> str:
    """A warning on intervals from few contexts; empty for enough contexts, and for one, which has no interval."""
    applied = _applied(record)
    count = _whole(record.get("contexts")) if applied is None else applied
    if count is None or not 1 < count < FEW:
        return ""
    return f"intervals from so few contexts ({count}) are rough: evaluate on {FEW} or more to rely on them"


def _applied(record: Mapping[str, Any]) -> int | None:
    """Number of contexts to which a constraint applies, if it is known and fewer than all."""
    count, applied = _whole(record.get("contexts")), _whole(record.get(APPLIED))
    return applied if count is not None and applied is not None and applied < count else None


def _counts(record: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Number of contexts and of those tuned on, if the record has valid numbers."""
    count, tuned_on = _whole(record.get("contexts")), _whole(record.get(TUNED_ON))
    return count, tuned_on if count is not None and tuned_on is not None and tuned_on <= count else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST else None


def _models(record: Mapping[str, Any]) -> str:
    """One tuned model, or those of a comparison."""
    models = record.get("models")
    several = isinstance(models, Mapping) and len(models) > 2  # the base is one of them
    return "the models were" if several else "the model was"
