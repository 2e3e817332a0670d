"""Texts with their references, as rows of a task: from a user's file or from the package's own data."""

from __future__ import annotations

import json
from importlib import resources

from cdpg.contexts.contexts import Context, load_contexts
from cdpg.errors import UserError
from cdpg.messages.terms import term
from cdpg.tasks.base import OriginRow, Row


def read_pairs(path: str, column: str) -> list[Row]:
    """Rows of texts and, if there is a column ``reference``, their references; other columns are kept."""
    contexts = load_contexts(path, prompt_column=column)
    return [OriginRow({**context.columns, "source": _text(context, column, path)}, context.row) for context in contexts]


def embedded_pairs(folder: str, kind: str) -> tuple[list[Row], list[Row]]:
    """Rows to tune on and held-out rows, with references, as ``recipes/task_texts.py`` writes them."""
    data = resources.files("cdpg.tasks") / folder / "data"
    parts: list[list[Row]] = []
    for part in ("tuning", "evaluation"):
        with (data / f"{kind}_{part}.jsonl").open(encoding="utf-8") as lines:
            parts.append([json.loads(line) for line in lines])
    return parts[0], parts[1]


def _text(context: Context, column: str, path: str) -> str:
    if not isinstance(context.prompt, str):
        raise UserError(
            f"{path!r}, row {context.row}: a chat in the column {column!r}, where this task takes a text: give the "
            f"text alone, or run without a task, with {term('model')} and {term('constraint')}"
        )
    return context.prompt
