"""Files of a report on the disk, whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from cdpg.errors import RunError, UserError


def make_folder(folder: Path) -> Path:
    """The folder, made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write in the folder {str(folder)!r}: {error.strerror or error}; make it writable, or name another"
        ) from error
    return folder


def write_whole(path: Path, data: bytes) -> None:
    """Readers see the old file or the new one."""
    if path.is_dir():
        raise UserError(f"{str(path)!r} is a folder: name the HTML file to write")
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise RunError(
            f"cannot write {str(path)!r}: {error.strerror or error}; free some space or make it writable"
        ) from error
