"""Files of records, one line of strict JSON each, that grow during a run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cdpg.errors import RunError, UserError
from cdpg.storage.atomic import cannot_write
from cdpg.storage.json_files import encode, refuse_constant
from cdpg.system import files


@dataclasses.dataclass(frozen=True)
class JsonlFile:
    """An append-only file of records, one line of strict JSON each; nothing is kept open between calls."""

    path: Path

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line, ``epoch`` first and the other keys sorted; a partial line (disk full) is removed."""
        line = encode(_ordered(record)) + b"\n"
        start = self.position()
        try:
            files.append_bytes(self.path, line)
        except OSError as error:
            with contextlib.suppress(OSError):
                files.cut(self.path, start)
            raise cannot_write(self.path, error) from error

    def position(self) -> int:
        """Length in bytes; 0 if there is no file yet."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def truncate(self, position: int) -> None:
        """Cut the file at ``position``, which a checkpoint recorded, so that no line is missing or repeated."""
        size = self.position()
        if size < position or not self._line_ends_at(position):
            raise RunError(
                f"{str(self.path)!r} was changed since the checkpoint was written: it had {position} bytes of whole "
                f"lines then, and does not now (it has {size}): restore the file, or start a new run in another folder"
            )
        if size == position:
            return
        try:
            files.cut(self.path, position)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def sync(self) -> None:
        """Flush all lines to the disk; called before a checkpoint that records the position."""
        if not self.path.exists():
            return
        try:
            files.sync(self.path)
            files.sync(self.path.parent)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def _line_ends_at(self, position: int) -> bool:
        if position == 0:
            return True
        with self.path.open("rb") as file:
            file.seek(position - 1)
            return file.read(1) == b"\n"


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file. An incomplete last line (killed writer) is left out; other damage is a UserError."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = json.loads(line, parse_constant=refuse_constant)
                except (ValueError, RecursionError) as error:
                    if not line.endswith(b"\n"):
                        return
                    raise UserError(f"line {number} of {str(path)!r} is not valid JSON: {error}") from error
                if not isinstance(record, dict):
                    kind = type(record).__name__
                    raise UserError(f"line {number} of {str(path)!r} must hold a JSON object, not a {kind}")
                yield record
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror or error}") from error


def last_record(path: Path) -> dict[str, Any]:
    """The last line of a file of records; empty if there is none."""
    records = list(read_jsonl(path)) if path.exists() else []
    return records[-1] if records else {}


def _ordered(value: Any) -> Any:
    """A record with its keys in order: ``epoch`` first, the others by name."""
    if isinstance(value, Mapping):
        return {key: _ordered(value[key]) for key in sorted(value, key=lambda key: (key != "epoch", str(key)))}
    if isinstance(value, (list, tuple)):
        return [_ordered(item) for item in value]
    return value
