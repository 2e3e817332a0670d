"""What a task is: contexts, prompt format, base model, constraint, metrics and settings under one name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cdpg.contexts import Context
from cdpg.evaluation.measures import Measure
from cdpg.rows import Notify

if TYPE_CHECKING:  # it brings torch, and a task's name must be checked before that is loaded
    from cdpg.sampling import StopRule


Row = Mapping[str, Any]
"""The columns of a context before it has a prompt."""


class FileRow(dict[str, Any]):
    """A row that knows its place in the user's file, where blank lines and what was left out count too."""

    def __init__(self, columns: Mapping[str, Any], number: int) -> None:
        super().__init__(columns)
        self.number = number


@dataclass(frozen=True)
class Preset:
    """One scale of a task: which model, which data, which settings."""

    model: str
    """An embedded model, a hub id or a folder."""
    rows: Callable[[int], tuple[list[Row], list[Row]]]
    """Rows to tune on and rows held out, from a seed."""
    settings: Mapping[str, Any]
    """Settings of ``CDPGConfig`` that differ from its defaults."""
    prefix: str = ""
    """What stands before the text in every prompt."""


@dataclass(frozen=True)
class Task:
    """An experiment of the paper."""

    name: str
    summary: str
    """One line."""
    constraint: str
    """``module:function``."""
    measure: Measure
    column: str
    """The column that is put into the prompt."""
    presets: Mapping[str, Preset]
    read: Callable[[str, str, Notify], list[Row]]
    """Rows of a user's file or folder, from its path and the column to use."""
    stop: StopRule | None = None
    usable: Callable[[Sequence[Row]], list[bool]] = lambda rows: [True] * len(rows)
    """Whether some output can satisfy the constraint, for each row; rows where none can are left out."""

    def contexts(self, rows: Sequence[Row], prefix: str) -> list[Context]:
        """Rows as contexts, the prefix and the task's column being the prompt."""
        return [
            Context(prefix + str(row[self.column]), dict(row), row.number if isinstance(row, FileRow) else place)
            for place, (row, usable) in enumerate(zip(rows, self.usable(rows), strict=True), start=1)
            if usable
        ]
