"""Shell completion; without torch, so that it answers at once."""

from __future__ import annotations

from pathlib import Path

from cdpg.config import FIELDS
from cdpg.methods import METHODS
from cdpg.tasks import TASKS

ALL = "all"
"""Every method, where several may be named."""
Offers = list[tuple[str, str]]
"""Completions, each with a description for shells that show one."""


def complete_task_name(incomplete: str) -> Offers:
    """The tasks that come with the package."""
    return [(task.name, task.summary) for task in TASKS.values() if task.name.startswith(incomplete)]


def complete_task(incomplete: str) -> Offers:
    """A task, or a YAML file in the typed folder."""
    files = [path for ending in ("yaml", "yml") for path in _below(incomplete, f"*.{ending}") if path.is_file()]
    return complete_task_name(incomplete) + [(str(path), "settings") for path in sorted(files)]


def complete_method(incomplete: str) -> list[str]:
    """A method."""
    return [name for name in METHODS if name.startswith(incomplete)]


def complete_methods(incomplete: str) -> list[str]:
    """The last of several methods, without those already typed."""
    before, _, last = incomplete.rpartition(",")
    given = before.split(",") if before else []
    everything = [ALL] if not given and ALL.startswith(last) else []
    return [",".join([*given, name]) for name in complete_method(last) if name not in given] + everything


def complete_preset(incomplete: str) -> list[str]:
    """A preset of any task."""
    names = dict.fromkeys(name for task in TASKS.values() for name in task.presets)
    return [name for name in names if name.startswith(incomplete)]


def complete_setting(incomplete: str) -> list[str]:
    """The name of a setting."""
    return [f"{name}=" for name in FIELDS if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """The folder of a run, or a folder that may contain runs."""
    return sorted(str(path) for path in _below(incomplete, "*") if path.is_dir() and not path.name.startswith("."))


def _below(incomplete: str, pattern: str) -> list[Path]:
    """Paths that start with the typed text and match the pattern."""
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    try:
        return [path for path in folder.glob(pattern) if str(path).startswith(incomplete.removeprefix("./"))]
    except (OSError, ValueError):
        return []
