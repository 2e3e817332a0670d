"""What the model is conditioned on: contexts read from files or Python objects, checked, and drawn in a seeded order.

Everything that can be wrong with the data is found here, before a model is loaded, and told with its row.
"""

from __future__ import annotations

import datetime
import difflib
import hashlib
import json
import numbers
import os
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from cdpg.contexts.reading import Notify, Row, ignore_message, kind, read_rows
from cdpg.errors import UserError
from cdpg.messages.terms import for_caller

Prompt: TypeAlias = str | tuple[Mapping[str, Any], ...]
"""Text, or the messages of a chat: ``{"role": ..., "content": ...}``."""

DEFAULT_COLUMN = "prompt"

_OTHER_USUAL_COLUMNS = ("source", "text", "input", "instruction", "question", "query", "document", "article")
_RESERVED_COLUMNS = ("prompts", "completions", "completion_ids", "\0")
_DEEPEST = 100


@dataclass(frozen=True)
class Context:
    """One context c: what the model sees, and what the constraint is told beside it."""

    prompt: Prompt
    columns: Mapping[str, Any]
    """The other columns of the row; constraints get them as keyword lists."""
    row: int
    """Where it stands in its source, from 1: the row below the header of a CSV file, the line of other files, the item
    of a list."""
    group: str | None = None
    """What it must not be parted from when some contexts are held out: its source file, its repository. Constraints do
    not see it."""

    @property
    def reference(self) -> str | None:
        """What metrics compare an output with: the text of the column ``reference``; None if it is blank or no text."""
        text = self.columns.get("reference")
        return text if isinstance(text, str) and text.strip() else None


def load_contexts(
    source: str | os.PathLike[str] | Iterable[Any],
    *,
    prompt_column: str = DEFAULT_COLUMN,
    limit: int | None = None,
    notify: Notify | None = None,
) -> list[Context]:
    """The contexts of a CSV, TSV, JSONL, JSON or text file, of a list of rows or texts, or of a data set.

    A list of contexts is checked and given back, so that what takes contexts may take them loaded, too.
    ``limit`` keeps the first so many and leaves the rest unread. ``notify`` is told what is odd but allowed.
    Every context has the same columns: where a row lacks one, it is None.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise UserError(f"the limit on the number of contexts must be a whole number of at least 1, not {limit!r}")
    notify = notify or ignore_message
    if isinstance(source, (list, tuple)) and source and all(isinstance(item, Context) for item in source):
        return _loaded_before(source[:limit])
    name, rows = read_rows(source, prompt_column, limit, notify)
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
            notify(
                f"the column {column!r} is missing in {lacking:,} of {len(rows):,} contexts; constraints see None there"
            )
    _tell_duplicates(contexts, notify)
    return contexts


def fingerprint(contexts: Iterable[Context]) -> str:
    """SHA-256 over all prompts and columns, in order: the same data give the same text, on any machine."""
    digest = hashlib.sha256()
    for context in contexts:
        digest.update(_canonical_line(context))
        digest.update(b"\n")
    return digest.hexdigest()


def groups(contexts: Sequence[Context]) -> list[int]:
    """The number of each context's group, from 0 in the order of appearance.

    Contexts belong together if they name the same group or have the same prompt, and so do those in between.
    """
    parents = list(range(len(contexts)))
    first: dict[tuple[str, str], int] = {}

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = index = parents[parents[index]]
        return index

    for index, context in enumerate(contexts):
        keys = [("prompt", prompt_key(context)), *([] if context.group is None else [("group", context.group)])]
        for key in keys:
            one, other = sorted((root(first.setdefault(key, index)), root(index)))
            parents[other] = one
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(index), len(numbers)) for index in range(len(contexts))]


def whole_groups(numbers: Sequence[int], order: Iterable[int], count: int) -> set[int]:
    """Groups with about ``count`` members in all: in the order given, those that still fit.

    If that makes less than half of ``count``, the smallest of the others is added, unless it is the last one left.
    """
    sizes, room = Counter(numbers), count
    chosen: set[int] = set()
    others: list[int] = []
    for number in order:
        if sizes[number] <= room:
            chosen.add(number)
            room -= sizes[number]
        else:
            others.append(number)
    if 2 * room > count and len(others) > 1:
        chosen.add(min(others, key=lambda number: sizes[number]))
    return chosen


def prompt_key(context: Context) -> str:
    """A text that equal prompts have in common, and no others."""
    return json.dumps(_canonical(context.prompt))


def prompt_digests(contexts: Iterable[Context]) -> list[str]:
    """A short hash of each context's prompt: enough to recognise a prompt, and too little to read it."""
    return [hashlib.sha256(prompt_key(context).encode("ascii")).hexdigest()[:16] for context in contexts]


def count_tuned_on(contexts: Iterable[Context], tuned_on: Container[str]) -> int:
    """How many of the contexts have a prompt that was tuned on; ``tuned_on`` holds the digests of those prompts."""
    return sum(digest in tuned_on for digest in prompt_digests(contexts))


class ContextStream:
    """The order in which contexts are drawn: one seeded permutation after another, cut into epochs.

    Epoch e takes positions e·count … (e+1)·count-1 of the endless sequence, so that a pass is without replacement and
    an epoch may span two passes. The order is a function of the seed alone: nothing needs to be stored for resuming.
    """

    def __init__(self, contexts: Sequence[Context], seed: int) -> None:
        if not contexts:
            raise UserError("there are no contexts to draw from: give at least one")
        if seed < 0:
            raise UserError(f"the seed must be at least 0, not {seed}")
        self._size = len(contexts)
        self._seed = seed
        self._orders: dict[int, list[int]] = {}

    def draw(self, epoch: int, count: int) -> list[int]:
        """Indices of the contexts of ``epoch`` (from 0), ``count`` of them."""
        if epoch < 0 or count < 1:
            raise ValueError(f"epoch must be at least 0 and count at least 1, not {epoch} and {count}")
        position, end = epoch * count, (epoch + 1) * count
        indices: list[int] = []
        while position < end:
            number, offset = divmod(position, self._size)
            piece = self._order(number)[offset : offset + end - position]
            indices += piece
            position += len(piece)
        return indices

    def _order(self, number: int) -> list[int]:
        """The permutation of pass ``number``; the last two used are kept, as an epoch may span two."""
        order = self._orders.pop(number, None)
        if order is None:
            # Sorting raw draws, and not Generator.permutation: numpy promises the former to stay the same for ever.
            generator = np.random.PCG64(np.random.SeedSequence(self._seed, spawn_key=(number,)))
            order = np.argsort(generator.random_raw(self._size), kind="stable").tolist()
        self._orders[number] = order
        while len(self._orders) > 2:
            del self._orders[next(iter(self._orders))]
        return order


def _loaded_before(contexts: Sequence[Context]) -> list[Context]:
    """Contexts whose oddities were told when they were loaded."""
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
    near = difflib.get_close_matches(wanted.strip().lower(), lowered, n=1)
    usual = [column for column in _OTHER_USUAL_COLUMNS if column in lowered]
    likely = lowered[near[0]] if near else columns[0] if len(columns) == 1 else lowered[usual[0]] if usual else None
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


def _context(row: Row, prompt_column: str, others: Sequence[str]) -> Context:
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
    """What a message holds beside its text, in the types of JSON: it is logged with the prompt."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(inner, where) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, where) for inner in value]
    converted = _converted(value)
    if converted is not None:
        return _plain(converted, where)
    raise UserError(f"{where}: {kind(value)}, which cannot be logged: make it a text or a number, or leave it out")


def _converted(value: Any) -> Any:
    """An array, one of its scalars, a date or a time in plain types; None if it is none of these."""
    for method in ("tolist", "isoformat"):
        converted = getattr(value, method, lambda: None)()
        if converted is not None and type(converted) is not type(value):  # numpy's longest float is its own
            return converted
    return None


def _check_strings(value: Any, where: str, depth: int = 0) -> None:
    """Refuse, however deep within the value, text that no tokenizer and no file can carry."""
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


def _tell_duplicates(contexts: Sequence[Context], notify: Notify) -> None:
    seen: dict[bytes, int] = {}
    pairs = []
    for context in contexts:
        digest = hashlib.sha256(_canonical_line(context)).digest()
        if digest in seen:
            pairs.append((context.row, seen[digest]))
        seen.setdefault(digest, context.row)
    if pairs:
        one = len(pairs) == 1
        what = "is a duplicate of an earlier one; it is" if one else "are duplicates of earlier ones; they are"
        notify(
            f"{len(pairs):,} of {len(contexts):,} contexts {what} kept and drawn more often "
            f"(the first: row {pairs[0][0]}, the same as row {pairs[0][1]})"
        )


# A form of any value that is the same on every machine.


def _canonical_line(context: Context) -> bytes:
    return json.dumps([_canonical(context.prompt), _canonical(context.columns)]).encode("ascii")


def _canonical(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {"mapping": sorted(([str(key), _canonical(inner)] for key, inner in value.items()), key=lambda p: p[0])}
    if isinstance(value, (list, tuple)):
        return [_canonical(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(json.dumps(_canonical(inner)) for inner in value)}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": hashlib.sha256(value).hexdigest()}
    converted = _converted(value)
    if converted is None and isinstance(value, (numbers.Number, datetime.timedelta)):
        converted = str(value)  # the other numbers, such as decimals and numpy's longest floats: their text says it all
    if converted is not None:
        return {type(value).__name__: _canonical(converted)}
    return {"type": f"{type(value).__module__}.{type(value).__qualname__}"}  # its text may hold a memory address
