"""Atomic changes of files and folders; nothing is written through a symbolic link.

While a folder is replaced it has a name that starts with a dot, so that a kill never leaves a partial folder under the
final name:

- ``.writing-…``: incomplete; removed by the next writer.
- ``.replaced-…``: complete, moved aside for a new one; restored if the new one is missing.
- ``.removing-…``: being removed; removed by the next writer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cdpg.errors import UserError

WRITING, REPLACED, REMOVING = ".writing-", ".replaced-", ".removing-"
_CHUNK = 2**20
_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Refuse to write if one of ``names`` is a link: what is written in a folder must stay in it."""
    for name in names:
        path = folder / name
        if path.is_symlink():
            raise UserError(
                f"{str(path)!r} is a symbolic link, and nothing is written through one: remove it; to keep a run "
                f"elsewhere, let the output folder itself be the link"
            )


# --- single changes: all others are made of these ---


def make_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file, replacing its content; a link in its place is an error."""
    _write(path, data, os.O_TRUNC)


def append_bytes(path: Path, data: bytes) -> None:
    """Append to a file; a link in its place is an error."""
    _write(path, data, os.O_APPEND)


def cut(path: Path, length: int) -> None:
    """Truncate a file to ``length`` bytes; a link in its place is an error."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, length)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    os.rename(source, target)


def remove_tree(path: Path) -> None:
    """Remove a folder with its content, or a file; links are removed, not followed."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _write(path: Path, data: bytes, how: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | how, 0o644)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)


# --- whole files and folders ---


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically: readers see the old content or the new one, even after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_bytes(temporary, data)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def checksum(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, read in pieces."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return {"size": size, "sha256": digest.hexdigest()}


def sync_tree(folder: Path) -> None:
    """Flush all files of a folder, and its entries, to the disk."""
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)


def publish(writing: Path, final: Path) -> None:
    """Give a complete folder its final name. An earlier one of that name can be restored at every moment."""
    if final.exists():
        rename(final, final.with_name(REPLACED + final.name))
    rename(writing, final)
    sync(final.parent)


def discard(path: Path) -> None:
    """Remove a folder. It is renamed first, so that a kill never leaves a partial folder under its name."""
    removing = path.with_name(REMOVING + path.name)
    with contextlib.suppress(OSError):
        rename(path, removing)
        remove_tree(removing)


def tidy(folder: Path, name: str = "") -> None:
    """Clean up after a killed writer, for all names or for one ``name``. Only the folder's writer may call it."""
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            if path.name.startswith((WRITING + name, REMOVING + name, REPLACED + name)):
                _clear_up(path)
            elif not name and _TEMPORARY.fullmatch(path.name):
                path.unlink()


def _clear_up(path: Path) -> None:
    """Complete or undo the interrupted step that ``path``'s name shows."""
    original = path.with_name(path.name.removeprefix(REPLACED))
    if original == path:
        with contextlib.suppress(OSError):
            remove_tree(path)
    elif original.exists():
        discard(path)
    else:
        with contextlib.suppress(OSError):
            rename(path, original)
