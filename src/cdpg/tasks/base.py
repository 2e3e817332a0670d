"""The definition of a task: contexts, prompt format, base model, constraint, metrics and settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.evaluation.measures import Measure

if TYPE_CHECKING:  # it imports torch, and a task's name is checked before torch is loaded
    from cdpg.models.sampling import StopRule

_log = logging.getLogger(__name__)

PAPER = {"partition": "batch", "control_variate": False, "replay": 0, "keep": "last"}
"""The estimator of the paper, for its presets."""

Row = Mapping[str, Any]
"""The columns of a context before it has a prompt."""


class OriginRow(dict[str, Any]):
    """A row with its origin.

    ``number`` is its row in the user's file, blank and skipped rows included. ``group``, such as a source file, names
    rows that stay together when some are held out.
    """

    def __init__(self, columns: Mapping[str, Any], number: int | None = None, group: str | None = None) -> None:
        super().__init__(columns)
        self.number, self.group = number, group


@dataclass(frozen=True)
class Draw:
    """How a preset's rows are drawn."""

    seed: int
    usable: Callable[[Sequence[Row]], list[bool]]
    """As the task has it."""


@dataclass(frozen=True)
class Preset:
    """One scale of a task: model, data and settings."""

    model: str
    """An embedded model, a hub id or a folder."""
    rows: Callable[[Draw], tuple[list[Row], list[Row]]]
    """Rows to tune on and rows held out; the constraint can be satisfied for all of them."""
    settings: Mapping[str, Any]
    """Settings of ``CDPGConfig`` that differ from its defaults."""
    prefix: str = ""
    """The text before every prompt."""


@dataclass(frozen=True)
class Task:
    """A name for all that an experiment takes."""

    name: str
    summary: str
    """One line."""
    constraint: str
    """``module:function``."""
    measure: Measure
    column: str
    """The column that is put into the prompt."""
    presets: Mapping[str, Preset]
    read: Callable[[str, str], list[Row]]
    """Rows of a user's file or folder, from its path and the column to use."""
    stop: StopRule | None = None
    usable: Callable[[Sequence[Row]], list[bool]] = lambda rows: [True] * len(rows)
    """For each row, whether some output can satisfy the constraint; other rows are left out."""

    def contexts(self, rows: Sequence[Row], prefix: str) -> list[Context]:
        """Rows as contexts; the prompt is the prefix and the task's column, or the chat in that column."""
        found = []
        for place, row in enumerate(rows, start=1):
            origin = row if isinstance(row, OriginRow) else OriginRow({})
            number, text = origin.number or place, row[self.column]
            if prefix and not isinstance(text, str):
                raise UserError(
                    f"row {number} is a chat, and prompt_prefix goes before a text: put it into the "
                    "messages, or leave it out"
                )
            prompt = prefix + text if isinstance(text, str) else tuple(text)
            found.append(Context(prompt, dict(row), number, origin.group))
        return found


def satisfiable(rows: Sequence[Row], draw: Draw) -> list[Row]:
    """The usable rows; a warning says how many are left out."""
    found = [row for row, usable in zip(rows, draw.usable(rows), strict=True) if usable]
    if len(found) < len(rows):
        _log.warning(f"{len(rows) - len(found):,} of {len(rows):,} contexts cannot be satisfied and are left out")
    return found
