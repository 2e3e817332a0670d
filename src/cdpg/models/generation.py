"""The generation settings that come with a model: nothing decodes by them here, but they are saved along with it.

Transformers refuses to save settings that contradict each other, such as a temperature without sampling, though it
loads them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def saveable_generation(model: Any) -> Iterator[None]:
    """Within it, a Hugging Face model has no generation setting that would keep it from being saved."""
    given = getattr(model, "generation_config", None)
    if given is None or _is_valid(given):
        yield
        return
    model.generation_config = _mended(given)[0]
    try:
        yield
    finally:
        model.generation_config = given


def generation_notices(model: Any) -> list[str]:
    """What the user should know of the settings that are not saved."""
    given = getattr(model, "generation_config", None)
    left_out = [] if given is None or _is_valid(given) else _mended(given)[1]
    if not left_out:
        return []
    settings = ", ".join(f"{name} = {getattr(given, name)}" for name in left_out)
    return [f"the tuned model is saved without generation settings that contradict the model's others: {settings}"]


def _mended(given: Any) -> tuple[Any, list[str]]:
    """The settings as far as they go together, and the names of the others.

    Each is added to the defaults if the result is valid, and tried again when another has been added: a temperature is
    valid once sampling is on.
    """
    kept, left_out = type(given)(), sorted(vars(given))
    while True:
        refused = [name for name in left_out if not _added(kept, name, getattr(given, name))]
        if refused == left_out:
            return kept, refused
        left_out = refused


def _added(kept: Any, name: str, value: Any) -> bool:
    before = getattr(kept, name, None)
    setattr(kept, name, copy.deepcopy(value))
    if _is_valid(kept):
        return True
    setattr(kept, name, before)
    return False


def _is_valid(settings: Any) -> bool:
    try:
        settings.validate(strict=True)
    except (ValueError, TypeError):
        return False
    return True
