"""Replacing an earlier run in its folder, on request: what the run wrote goes, whatever else lies there stays."""

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
    """Refuse a folder that a new run must not be made in.

    That is one that holds a run, unless it may be overwritten. Then it must be a run of this program, and none of the
    ``sources`` that the new run is made from (names or paths) may lie in what would be removed.
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
    """Remove what an earlier run has left; the folder must be held, so that no run is at work in it."""
    if not folder.holds_run():
        return
    for path in _left_behind(folder):
        files.discard(path)
    for part in (folder.checkpoints, folder.nonfinite):
        with contextlib.suppress(OSError):  # something else lies in it, or it is not there
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
    """What a run writes in its folder. The configuration comes last: without it nothing is overwritten."""
    yield from folder.checkpoints.glob("epoch-*")
    yield from folder.nonfinite.glob("epoch-*.json")
    yield from (folder.metrics, folder.samples, folder.evaluations, folder.failures)
    yield from (folder.evaluation, folder.model, folder.report, folder.tuned_on, folder.config)
