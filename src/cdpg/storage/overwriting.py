"""Replaces an earlier run in its folder, on request: the run's own files are removed, other files stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from cdpg.config import read_yaml
from cdpg.errors import RunError, UserError
from cdpg.messages.terms import term
from cdpg.storage.json_files import mapping
from cdpg.storage.run_folder import RunFolder
from cdpg.system import files


def require_place(folder: RunFolder, overwrite: bool, sources: Iterable[object] = ()) -> None:
    """Refuse a folder in which a new run must not be started.

    A folder with a run is refused, unless it may be overwritten. Then the run must be one of this program, and none of
    the new run's ``sources`` (names or paths) may be among the files to remove.
    """
    if not overwrite:
        folder.require_fresh()
    if not folder.holds_run():
        return
    if not _is_ours(folder):
        raise UserError(
            f"the folder {str(folder.path)!r} holds metrics or checkpoints but no config.yaml of a run of cdpg, so "
            f"nothing in it is overwritten: choose another folder with {term('output_dir')}"
        )
    removed = [path.resolve() for path in _left_behind(folder)]
    for source in sources:
        if not isinstance(source, (str, Path)) or not Path(source).exists():
            continue
        path = Path(source).resolve()
        if any(path == gone or gone in path.parents for gone in removed):
            raise UserError(
                f"{str(source)!r} is part of the run that would be overwritten: copy it elsewhere first, or choose "
                f"another folder with {term('output_dir')}"
            )


def remove_run(folder: RunFolder) -> None:
    """Remove an earlier run's files; the folder must be locked, so that no run is writing in it."""
    if not folder.holds_run():
        return
    for path in _left_behind(folder):
        files.discard(path)
    for part in (folder.checkpoints, folder.nonfinite):
        with contextlib.suppress(OSError):  # it is not empty, or does not exist
            part.rmdir()
    if folder.holds_run():
        raise RunError(
            f"the earlier run in {str(folder.path)!r} could not be removed: make the folder writable, or choose "
            f"another with {term('output_dir')}"
        )


def _is_ours(folder: RunFolder) -> bool:
    try:
        origin = mapping(read_yaml(folder.config).get("origin"))
    except UserError:
        return False
    return "cdpg" in mapping(origin.get("versions"))


def _left_behind(folder: RunFolder) -> Iterator[Path]:
    """The files of a run. The configuration is last: without it nothing is overwritten."""
    yield from folder.checkpoints.glob("epoch-*")
    yield from folder.nonfinite.glob("epoch-*.json")
    yield from (folder.metrics, folder.samples, folder.evaluations, folder.failures, folder.moments)
    yield from (folder.evaluation, folder.ideal_samples, folder.model, folder.engine, folder.kept, folder.report)
    yield from (folder.tuned_on, folder.config)
