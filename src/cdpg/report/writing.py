"""Writes a report's files atomically."""

from __future__ import annotations

from pathlib import Path

from cdpg.errors import RunError, UserError
from cdpg.system import files


def make_folder(folder: Path) -> Path:
    """The folder, created if it does not exist."""
    try:
        files.make_folder(folder)
    except OSError as error:
        raise UserError(
            f"cannot write in the folder {str(folder)!r}: {error.strerror or error}; make it writable, or name another"
        ) from error
    return folder


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: readers see the old file or the new one, even after a crash."""
    if path.is_dir():
        raise UserError(f"{str(path)!r} is a folder: name the HTML file to write")
    make_folder(path.parent)
    try:
        files.replace_file(path, data)
    except OSError as error:
        raise RunError(
            f"cannot write {str(path)!r}: {error.strerror or error}; free some space or make it writable"
        ) from error
