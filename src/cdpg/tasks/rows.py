"""Rows of a task from a user's file: CSV, JSONL, JSON or text, with the columns that the task knows."""

from __future__ import annotations

from cdpg.contexts import load_contexts
from cdpg.rows import Notify
from cdpg.tasks.base import OriginRow, Row


def read_pairs(path: str, column: str, notify: Notify) -> list[Row]:
    """Texts and, where there is a column ``reference``, what they should become; other columns are kept."""
    contexts = load_contexts(path, prompt_column=column, notify=notify)
    return [OriginRow({**context.columns, "source": context.prompt}, context.row) for context in contexts]
