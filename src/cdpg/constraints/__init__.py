"""Short names of the built-in constraints, such as ``cdpg.constraints:compiles``.

Each takes ``(prompts, completions, **columns)`` and returns a verdict for each completion. They are defined with their
tasks, where their edge cases are documented.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdpg.tasks.code.constraint import FunctionEnd, compiles, pep8_clean
    from cdpg.tasks.summarization.constraint import entities_from_source
    from cdpg.tasks.translation.constraint import numerals_as_digits

__all__ = ["FunctionEnd", "compiles", "entities_from_source", "numerals_as_digits", "pep8_clean"]

_TASKS = {
    "FunctionEnd": "code",
    "compiles": "code",
    "entities_from_source": "summarization",
    "numerals_as_digits": "translation",
    "pep8_clean": "code",
}


def __getattr__(name: str) -> Any:
    # Imported on demand, since this folder comes before the tasks.
    if name in _TASKS:
        return getattr(importlib.import_module(f"cdpg.tasks.{_TASKS[name]}.constraint"), name)
    raise AttributeError(f"module 'cdpg.constraints' has no attribute {name!r}")
