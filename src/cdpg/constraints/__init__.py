"""Short names of the tasks' constraints, such as ``cdpg.constraints:compiles``.

Each takes ``(prompts, completions, **columns)`` and returns a verdict for each completion. They are defined with their
tasks, in ``constraint.py`` of the task's folder, where their edge cases are documented.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


def __getattr__(name: str) -> Any:
    # Imported on demand, since this folder comes before the tasks.
    for module in () if name.startswith("_") else _modules():
        found = getattr(module, name, None)
        if getattr(found, "__module__", None) == module.__name__:  # not what it has imported itself
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _modules() -> Iterator[ModuleType]:
    """``constraint.py`` of every task's folder."""
    tasks = importlib.import_module("cdpg.tasks")
    for folder in pkgutil.iter_modules(tasks.__path__):
        if folder.ispkg:
            yield importlib.import_module(f"{tasks.__name__}.{folder.name}.constraint")
