"""Contexts: read from files or Python objects, and checked.

Errors in the data are found here, before a model is loaded, and are reported with their row.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from cdpg.contexts.canonical import canonical_line, in_plain_types
from cdpg.contexts.reading import SourceRow, kind, read_rows
from cdpg.errors import UserError
from cdpg.messages.nearest import nearest
from cdpg.messages.terms import for_caller

_log = logging.getLogger(__name__)

Prompt: TypeAlias = str | tuple[Mapping[str, Any], ...]
"""Text, or the messages of a chat: ``{"role": ..., "content": ...}``."""

DEFAULT_COLUMN = "prompt"

_OTHER_USUAL_COLUMNS = ("source", "text", "input", "instruction", "question", "query", "document", "article")
_RESERVED_COLUMNS = ("prompts", "completions", "completion_ids", "\0")
_DEEPEST = 100


@dataclass(frozen=True)
class Context:
    """One context c: the prompt, and the columns that constraints get with it."""

    prompt: Prompt
    columns: Mapping[str, Any]
    """The other columns of the row; constraints get them as keyword lists."""
    row: int
    """Its position in the source, from 1: the row below the header of a CSV file, the line of other files, the item of
    a list."""
    group: str | None = None
    """Contexts of one group (a source file, a repository) stay together when some are held out. Constraints do not get
    it."""

    @property
    def reference(self) -> str | None:
        """The reference output for metrics: the column ``reference``; None if it is blank or not a text."""
        text = self.columns.get("reference")
        return text if isinstance(text, str) and text.strip() else None


def load_contexts(
    source: str | os.PathLike[str] | Iterable[Any],
    *,
    prompt_column: str = DEFAULT_COLUMN,
    limit: int | None = None,
) -> list[Context]:
    """The contexts of a CSV, TSV, JSONL, JSON or text file, of a list of rows or texts, or of a data set.

    A list of contexts is checked and returned. ``limit`` keeps the first so many and leaves the rest unread. Data that
    are allowed but unusual are logged. Every context has the same columns: one that a row lacks is None.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise UserError(f"the limit on the number of contexts must be a whole number of at least 1, not {limit!r}")
    if isinstance(source, (list, tuple)) and source and all(isinstance(item, Context) for item in source):
        return _loaded_before(source[:limit])
    name, rows = read_rows(source, prompt_column, limit)
    if not rows:
        raise UserError(f"{name} holds no contexts: give at least one")
    columns = list(dict.fromkeys(key for row in rows for key in row.values))
    if prompt_column not in columns:
        raise UserError(_missing_column(name, prompt_column, columns))
    others = [key for key in columns if key != prompt_column]
    _check_columns(name, others)
    contexts = [_context(row, prompt_column, others) for row in rows]
    for column in others:
        lacking = sum(column not in row.values for row in rows)
        if lacking:
            _log.warning(
                f"the column {column!r} is missing in {lacking:,} of {len(rows):,} contexts; constraints see None there"
            )
    _log_duplicates(contexts)
    return contexts


def _loaded_before(contexts: Sequence[Context]) -> list[Context]:
    """Contexts that were loaded before: checked again, without notices."""
    checked = []
    for context in contexts:
        where = f"context of row {context.row}"
        _check_columns(where, context.columns)
        _check_strings(context.columns, f"{where}, columns")
        checked.append(replace(context, prompt=_checked_prompt(context.prompt, where)))
    return checked


# Checking.


def _missing_column(name: str, wanted: str, columns: Sequence[str]) -> str:
    lowered = {column.strip().lower(): column for column in columns}
    usual = [column for column in _OTHER_USUAL_COLUMNS if column in lowered]
    likely = nearest(wanted, columns) or (columns[0] if len(columns) == 1 else lowered[usual[0]] if usual else None)
    perhaps, aside = (f", perhaps {likely!r}", f", perhaps {likely!r},") if likely is not None else ("", "")
    has = ", ".join(map(repr, columns)) or "none"
    cure = for_caller(
        f"name the one to use with --prompt-column{perhaps}", f"rename the one to use{aside} to {wanted!r}"
    )
    return f"{name} has no column {wanted!r}; its columns are {has}: {cure}"


def _check_columns(name: str, columns: Iterable[str]) -> None:
    for column in columns:
        _check_strings(column, f"{name}, column {column!r}")
        if column in _RESERVED_COLUMNS:
            raise UserError(
                f"{name} has a column {column!r}, which is what constraints get from the program itself: rename it"
            )


def _context(row: SourceRow, prompt_column: str, others: Sequence[str]) -> Context:
    if prompt_column not in row.values:
        raise UserError(f"{row.where}: no {prompt_column!r} here, though other rows have it: add it, or drop the row")
    prompt = _checked_prompt(row.values[prompt_column], f"{row.where}, {prompt_column!r}")
    columns = {key: row.values.get(key) for key in others}
    for key, value in columns.items():
        _check_strings(value, f"{row.where}, {key!r}")
    return Context(prompt, columns, row.number)


def _checked_prompt(value: Any, where: str) -> Prompt:
    _check_strings(value, where)
    if isinstance(value, str):
        if not value.strip():
            what = "only white space" if value else "an empty text"
            raise UserError(f"{where}: {what}, where a prompt was expected: fill it in, or drop the row")
        return str(value)
    if isinstance(value, (list, tuple)):
        return _checked_chat(value, where)
    raise UserError(f"{where}: {kind(value)}, where a text or a list of chat messages was expected")


def _checked_chat(messages: Sequence[Any], where: str) -> tuple[Mapping[str, Any], ...]:
    expected = 'each message must be {"role": "user", "content": "..."}'
    if not messages:
        raise UserError(f"{where}: a chat without messages: {expected}")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise UserError(f"{where}, message {number}: {kind(message)}: {expected}")
        for key in ("role", "content"):
            if key not in message:
                raise UserError(f"{where}, message {number}: has no {key!r}: {expected}")
            if not isinstance(message[key], str):
                raise UserError(f"{where}, message {number}: its {key!r} is {kind(message[key])}: {expected}")
        if not message["role"].strip():
            raise UserError(f"{where}, message {number}: its 'role' is an empty text: {expected}")
    if not any(message["content"].strip() for message in messages):
        raise UserError(f"{where}: all messages are empty, where a prompt was expected: fill it in, or drop the row")
    return tuple(
        {key: _plain(inner, f"{where}, message {number}, {key!r}") for key, inner in message.items()}
        for number, message in enumerate(messages, start=1)
    )


def _plain(value: Any, where: str) -> Any:
    """A value in a message as JSON types, since it is logged with the prompt."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(inner, where) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, where) for inner in value]
    converted = in_plain_types(value)
    if converted is not None:
        return _plain(converted, where)
    raise UserError(f"{where}: {kind(value)}, which cannot be logged: make it a text or a number, or leave it out")


def _check_strings(value: Any, where: str, depth: int = 0) -> None:
    """Refuse text that no tokenizer or file can hold, at any depth within the value."""
    if depth > _DEEPEST:
        raise UserError(f"{where}: nested more than {_DEEPEST} levels deep: make it flatter")
    if isinstance(value, str):
        if "\0" in value:
            raise UserError(f"{where}: a NUL character, where text was expected: remove it")
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise UserError(f"{where}: half of a surrogate pair (\\ud800 to \\udfff), which is not text: remove it")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _check_strings(key, where, depth + 1)
            _check_strings(inner, where, depth + 1)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_strings(inner, where, depth + 1)


def _log_duplicates(contexts: Sequence[Context]) -> None:
    seen: dict[bytes, int] = {}
    pairs = []
    for context in contexts:
        digest = hashlib.sha256(canonical_line(context.prompt, context.columns)).digest()
        if digest in seen:
            pairs.append((context.row, seen[digest]))
        seen.setdefault(digest, context.row)
    if pairs:
        one = len(pairs) == 1
        what = "is a duplicate of an earlier one; it is" if one else "are duplicates of earlier ones; they are"
        _log.warning(
            f"{len(pairs):,} of {len(contexts):,} contexts {what} kept and drawn more often "
            f"(the first: row {pairs[0][0]}, the same as row {pairs[0][1]})"
        )
