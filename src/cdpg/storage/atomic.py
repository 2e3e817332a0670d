"""Writes files and folders atomically, even if the process is killed or the disk is full."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from cdpg.errors import RunError
from cdpg.system import files


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data``, atomically."""
    try:
        files.replace_file(path, data)
    except OSError as error:
        raise cannot_write(path, error) from error


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines of ASCII, atomically."""
    write_bytes(path, "".join(f"{line}\n" for line in lines).encode("ascii"))


def write_folder(path: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` fill a folder, which gets the name ``path`` once it is complete and flushed to the disk."""
    writing = path.with_name(f"{files.WRITING}{path.name}-{os.getpid()}")
    try:
        files.make_folder(writing)
        write(writing)
        files.sync_tree(writing)
        files.publish(writing, path)
    except (OSError, SafetensorError) as error:  # the latter for a full disk, for example
        raise cannot_write(path, error) from error
    finally:
        files.tidy(path.parent, path.name)


def cannot_write(path: Path, error: Exception) -> RunError:
    """The error for a file or folder that cannot be written."""
    reason = getattr(error, "strerror", None) or error
    return RunError(f"cannot write {str(path)!r}: {reason}; free some space or make it writable")
