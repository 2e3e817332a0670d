"""Reads the rows of a file or a Python object, without interpreting them."""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdpg.errors import UserError
from cdpg.messages.nearest import nearest
from cdpg.messages.terms import for_caller

_log = logging.getLogger(__name__)

_ENCODING_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_SEPARATORS = {
    ";": ("semicolons", "save it with commas, as .csv"),
    "\t": ("tabs", "end its name in .tsv"),
    ",": ("commas", "end its name in .csv"),
}
"""Separators of columns, their names, and what to do if a file was expected to have another one."""
_LARGEST_FIELD = 2**31 - 1  # the largest that the csv module takes on every platform


@dataclass(frozen=True)
class SourceRow:
    """One row: its number, its place for messages, and its values by column."""

    number: int
    where: str
    values: Mapping[str, Any]


def read_rows(
    source: str | os.PathLike[str] | Iterable[Any], text_column: str, limit: int | None
) -> tuple[str, list[SourceRow]]:
    """The source's name for messages, and its first ``limit`` rows.

    A row that is a plain text, as in a text file, is the value of ``text_column``.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        return repr(str(path)), _file_rows(path, text_column, limit)
    name = "the list of contexts" if isinstance(source, Sequence) else f"the {type(source).__name__}"
    return name, list(itertools.islice(_object_rows(source, name, text_column), limit))


def kind(value: Any) -> str:
    """The type of a value, in the words of JSON."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
    if value is None:
        return "null"
    return names.get(type(value)) or ("an object" if isinstance(value, dict) else f"a {type(value).__name__}")


def _file_rows(path: Path, text_column: str, limit: int | None) -> list[SourceRow]:
    readers: dict[str, Callable[[Path, str], Iterator[SourceRow | None]]] = {
        ".csv": lambda path, text: _csv_rows(path, text, ",", text_column),
        ".tsv": lambda path, text: _csv_rows(path, text, "\t", text_column),
        ".jsonl": _jsonl_rows,
        ".ndjson": _jsonl_rows,
        ".json": _json_rows,
        ".txt": lambda path, text: _text_rows(path, text, text_column),
    }
    if not path.exists():
        raise UserError(_missing_file(path))
    if path.is_dir():
        raise UserError(f"{str(path)!r} is a folder: name the file with the contexts in it")
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UserError(
            f"{str(path)!r}: the format of a contexts file follows from its suffix, one of {', '.join(readers)}; "
            f"{path.suffix or 'no suffix'!r} is not one of them: rename or convert the file"
        )
    text = _decoded(path)
    rows: list[SourceRow] = []
    blank = pending = 0
    for row in reader(path, text):
        if row is None:
            pending += 1
            continue
        blank, pending = blank + pending, 0  # blank lines at the end of a file are not counted
        rows.append(row)
        if len(rows) == limit:
            break
    if blank:
        _log.warning(f"{blank:,} blank line{'s' if blank > 1 else ''} in {str(path)!r} skipped")
    return rows


def _missing_file(path: Path) -> str:
    near = nearest(path.name, sorted(os.listdir(path.parent))) if path.parent.is_dir() else None
    if near:
        return f"there is no file {str(path)!r}; did you mean {str(path.parent / near)!r}?"
    found = f"there is no file {str(path)!r}: give the path of a file with contexts (seen from {str(Path.cwd())!r})"
    if path.suffix or len(path.parts) > 2:
        return found
    saved = for_caller("its to_json('prompts.jsonl') makes a file of it", "give the object that load_dataset returns")
    return f"{found}; if it is a data set of the hub, {saved}"


def _decoded(path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    if not raw.strip(b" \t\r\n\xef\xbb\xbf"):
        raise UserError(f"{str(path)!r} is empty: give at least one context")
    encoding = next((name for mark, name in _ENCODING_MARKS if raw.startswith(mark)), None)
    head = raw[:4096]
    if encoding is None and head.count(0) > len(head) // 4:  # Latin text in UTF-16 without a mark is half zeros
        encoding = "UTF-16"
    if encoding:
        raise UserError(f"{str(path)!r} is encoded in {encoding}, UTF-8 was expected: save it as UTF-8")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The decoder counts from after the byte order mark.
        start = error.start + (3 if raw.startswith(b"\xef\xbb\xbf") else 0)
        raise UserError(
            f"{str(path)!r}, line {raw.count(10, 0, start) + 1}: byte 0x{raw[start]:02x} is not UTF-8 text "
            f"(the file may be in Latin-1 or Windows-1252): save it as UTF-8"
        ) from error
    nul = text.find("\0")
    if nul >= 0:
        line = text.count("\n", 0, nul) + 1
        raise UserError(f"{str(path)!r}, line {line}: a NUL character, where text was expected: remove it")
    return text


def _csv_rows(path: Path, text: str, delimiter: str, text_column: str) -> Iterator[SourceRow | None]:
    _refuse_other_separator(path, text, delimiter, text_column)
    records = _csv_records(path, text, delimiter)
    header: list[str] = next((fields for _, fields in records if fields), [])
    repeated = sorted({name for name in header if name and header.count(name) > 1})
    if repeated:
        raise UserError(f"{str(path)!r}: the header names the column {repeated[0]!r} twice: rename one of them")
    if "" in header:
        _log.warning(f"column {header.index('') + 1} of {str(path)!r} has no name in the header: left out")
    number = 0
    for line, fields in records:
        if not fields:
            yield None
            continue
        number += 1
        where = f"{str(path)!r}, row {number} (line {line})"
        if len(fields) != len(header):
            raise UserError(
                f"{where}: {len(fields)} fields, where the header has {len(header)}: "
                f"put a field that holds a {'tab' if delimiter == chr(9) else 'comma'} or a line break in double quotes"
            )
        yield SourceRow(number, where, {name: value for name, value in zip(header, fields, strict=True) if name})
    if not number:
        raise UserError(f"{str(path)!r} has a header and no rows below it: give at least one context")


def _refuse_other_separator(path: Path, text: str, delimiter: str, text_column: str) -> None:
    """Refuse a header of one column whose name holds another separator, as some spreadsheets write it."""
    header = next(io.StringIO(text.lstrip("\r\n"), newline=None), "").strip("\n")
    if delimiter in header or header.strip('"') == text_column:
        return
    for other, (called, remedy) in _SEPARATORS.items():
        if other in header:
            raise UserError(
                f"{str(path)!r} has one column, {header!r}, and seems to be separated by {called}, where "
                f"{_SEPARATORS[delimiter][0]} were expected: {remedy}"
            )


def _csv_records(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Each record with the number of its first line."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 1
        # The csv module has one limit for the whole process, so it is raised for one record at a time.
        previous = csv.field_size_limit(_LARGEST_FIELD)
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(
                f"{str(path)!r}, line {line}: not valid CSV ({error}): write a double quote within a quoted field twice"
            ) from error
        finally:
            csv.field_size_limit(previous)
        yield line, fields


def _jsonl_rows(path: Path, text: str) -> Iterator[SourceRow | None]:
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        if not line.strip():
            yield None
            continue
        where = f"{str(path)!r}, line {number}"
        yield SourceRow(number, where, _json_object(_parsed(line, where, "one JSON object a line was expected"), where))


def _json_rows(path: Path, text: str) -> Iterator[SourceRow | None]:
    name = str(path)
    content = _parsed(text, repr(name), "a list of objects was expected; for one object a line, end the name in .jsonl")
    if not isinstance(content, list):
        raise UserError(f"{name!r} must hold a list of objects, [{{...}}, {{...}}], not {kind(content)}")
    for number, value in enumerate(content, start=1):
        where = f"{name!r}, item {number}"
        yield SourceRow(number, where, _json_object(value, where))


def _parsed(text: str, where: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UserError(f"{where}: not valid JSON ({problem}): {expected}") from error


def _json_object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f'{where}: {kind(value)}, where an object was expected, such as {{"prompt": "..."}}')
    return value


def _text_rows(path: Path, text: str, text_column: str) -> Iterator[SourceRow | None]:
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        prompt = line.removesuffix("\n")  # a space at the end of a prompt is the user's own
        yield SourceRow(number, f"{str(path)!r}, line {number}", {text_column: prompt}) if prompt.strip() else None


def _object_rows(source: Iterable[Any], name: str, text_column: str) -> Iterator[SourceRow]:
    names = getattr(source, "column_names", None)
    if isinstance(names, Mapping):
        raise UserError(f"{name} has several splits: choose one, such as dataset[{next(iter(names), 'train')!r}]")
    is_list = isinstance(source, Sequence) and not isinstance(source, (bytes, bytearray))
    if not is_list and not (hasattr(source, "column_names") and hasattr(source, "__iter__")):
        raise UserError(
            f"contexts must be the path of a file, a list of texts or of dictionaries, or a data set, not "
            f"{type(source).__name__!r}: for a data frame, give frame.to_dict('records')"
        )
    for number, item in enumerate(source, start=1):
        where = f"row {number} of {name}"
        if isinstance(item, str):
            item = {text_column: item}
        elif not isinstance(item, Mapping) or not all(isinstance(key, str) for key in item):
            raise UserError(f"{where}: {kind(item)}, where a text or a dictionary by column name was expected")
        yield SourceRow(number, where, item)
