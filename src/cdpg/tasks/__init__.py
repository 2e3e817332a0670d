"""The tasks, by name: those of the folders here, and those that a program registers.

A folder is one task or several of a kind: ``constraint.py``, ``metrics.py``, ``task.py`` with the list ``TASKS``, and
``data/``. A new folder is found without being named anywhere else.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

from cdpg.errors import UserError
from cdpg.evaluation.measures import own_counts, own_metrics
from cdpg.evaluation.metrics import METRICS, Count, Metric, count_info, metric_info
from cdpg.messages.nearest import nearest
from cdpg.tasks.base import Preset, Task

DEFAULT_PRESET = "tiny"


def _in_folders() -> Iterator[Task]:
    """The tasks of every folder here."""
    for folder in pkgutil.iter_modules(__path__):
        if folder.ispkg:
            yield from importlib.import_module(f"{__name__}.{folder.name}.task").TASKS


TASKS: dict[str, Task] = {task.name: task for task in _in_folders()}
"""Every task there is. To add one, use :func:`register_task`."""


def register_task(task: Task) -> None:
    """Make a task known by its name, to every command of this process."""
    if task.name in TASKS:
        raise UserError(f"there is a task {task.name!r} already: give the new one another name")
    TASKS[task.name] = task


def unregister_task(name: str) -> None:
    """Forget a task."""
    TASKS.pop(find_task(name).name)


def find_task(name: str) -> Task:
    """The task of that name."""
    if name in TASKS:
        return TASKS[name]
    near = nearest(name, TASKS)
    hint = f"did you mean {near!r}?" if near else f"the tasks are {', '.join(TASKS)}"
    raise UserError(f"there is no task {name!r}; {hint}")


def find_preset(task: Task, name: str) -> Preset:
    """A task's preset of that name."""
    if name not in task.presets:
        near = nearest(name, task.presets)
        hint = f"did you mean {near!r}?" if near else f"{task.name} has {', '.join(task.presets)}"
        raise UserError(f"there is no preset {name!r}; {hint}")
    return task.presets[name]


def known_metrics(record: Mapping[str, Any]) -> dict[str, Metric]:
    """Every metric that a file of an evaluation may have: those of all, its own, then the tasks' for an older file."""
    found = dict(METRICS)
    for source in (metric_info(record), *(own_metrics(task.measure) for task in TASKS.values())):
        found |= {name: metric for name, metric in source.items() if name not in found}
    return found


def known_counts(record: Mapping[str, Any]) -> dict[str, Count]:
    """The counts that a file of an evaluation may have: its own, then the tasks' for an older file."""
    found: dict[str, Count] = {}
    for source in (count_info(record), *(own_counts(task.measure) for task in TASKS.values())):
        found |= {name: count for name, count in source.items() if name not in found}
    return found
