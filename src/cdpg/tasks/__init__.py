"""The tasks of the package, by name."""

from __future__ import annotations

from cdpg.errors import UserError
from cdpg.messages.nearest import nearest
from cdpg.tasks.base import Preset, Task
from cdpg.tasks.code.task import COMPILABILITY, PEP8
from cdpg.tasks.summarization.task import ENTITIES
from cdpg.tasks.translation.task import NUMBERS

TASKS = {task.name: task for task in (NUMBERS, ENTITIES, COMPILABILITY, PEP8)}
DEFAULT_PRESET = "tiny"


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
