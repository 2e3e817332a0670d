"""The ways in which files and folders are changed: whole or not at all, and never through a link.

A folder that is being replaced passes through names that start with a dot, so that a kill leaves nothing that could be
taken for a whole one:

- ``.writing-…``: not finished; removed by the next writer.
- ``.replaced-…``: whole, moved aside while a new one takes its name; used if that one is missing.
- ``.removing-…``: given up; removed by the next writer.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from cdpg.errors import UserError

WRITING, REPLACED, REMOVING = ".writing-", ".replaced-", ".removing-"
_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Refuse to write where one of ``names`` is a link: what is written in a folder must stay in it."""
    for name in names:
        path = folder / name
        if path.is_symlink():
            raise UserError(
                f"{str(path)!r} is a symbolic link, and nothing is written through one: remove it; to keep a run "
                f"elsewhere, let the output folder itself be the link"
            )


# --- single changes: every one of them goes through one of these ---


def make_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file anew; a link in its place is an error."""
    _write(path, data, os.O_TRUNC)


def append_bytes(path: Path, data: bytes) -> None:
    """Add to the end of a file; a link in its place is an error."""
    _write(path, data, os.O_APPEND)


def cut(path: Path, length: int) -> None:
    """Drop what comes after the first ``length`` bytes of a file; a link in its place is an error."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, length)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    os.rename(source, target)


def remove_tree(path: Path) -> None:
    """Remove a folder and all in it, or whatever else bears its name; links are removed, not followed."""
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
    """Readers see the old content or the new, also after a crash."""
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


def sync_tree(folder: Path) -> None:
    """Wait until all files of a folder, and their names, are on the disk."""
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)


def publish(writing: Path, final: Path) -> None:
    """Give a written folder its name. At every moment one of that name, if there was one, can be found."""
    if final.exists():
        rename(final, final.with_name(REPLACED + final.name))
    rename(writing, final)
    sync(final.parent)


def discard(path: Path) -> None:
    """Remove a folder, renamed first: a kill half-way leaves nothing that could be taken for a whole one."""
    removing = path.with_name(REMOVING + path.name)
    with contextlib.suppress(OSError):
        rename(path, removing)
        remove_tree(removing)


def tidy(folder: Path, name: str = "") -> None:
    """Remove what a killed writer left behind, of all or of one ``name``. For the folder's writer only."""
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            if path.name.startswith((WRITING + name, REMOVING + name, REPLACED + name)):
                _clear_up(path)
            elif not name and _TEMPORARY.fullmatch(path.name):
                path.unlink()


def _clear_up(path: Path) -> None:
    """Finish or undo the step that ``path``'s name stands for."""
    original = path.with_name(path.name.removeprefix(REPLACED))
    if original == path:
        with contextlib.suppress(OSError):
            remove_tree(path)
    elif original.exists():
        discard(path)
    else:
        with contextlib.suppress(OSError):
            rename(path, original)
