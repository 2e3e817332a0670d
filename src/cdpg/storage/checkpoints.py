"""Atomic checkpoints: written under a temporary name, flushed, renamed, and verified when read.

A checkpoint is a folder ``epoch-000123`` of safetensors files, ``state.json`` and ``manifest.json``, which holds the
size and SHA-256 of the others and a checksum of itself. Names that start with a dot are temporary (see
:mod:`cdpg.system.files`). A folder has one writer at a time (see ``RunFolder``) and any number of readers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cdpg.errors import RunError, UserError
from cdpg.storage.divided_files import is_divided, take_part, write_divided
from cdpg.system import files

_log = logging.getLogger(__name__)

FORMAT = 1
"""Version of the format; a checkpoint of another version is not read."""

Tensors = Mapping[str, Mapping[str, torch.Tensor]]
"""Named tensors by file stem: ``{"model": {"weight": ...}, "optimizer": ...}``."""

_MANIFEST = "manifest.json"
_STATE = "state.json"
_SUFFIX = ".safetensors"
_STEM = re.compile(r"[A-Za-z0-9_-]+")
_FILE = re.compile(r"[A-Za-z0-9_-]+\.(safetensors|json)")
_READABLE = re.compile(r"(\.replaced-)?epoch-(\d{6,})")


class CorruptCheckpoint(RunError):
    """A checkpoint is damaged; the message names the file and the damage."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    epoch: int
    tensors: Tensors
    state: dict[str, Any]


def save_checkpoint(folder: Path, epoch: int, tensors: Tensors, state: Mapping[str, Any], keep: int) -> Path:
    """Write ``folder/epoch-<epoch>``, then remove all but the ``keep`` latest.

    ``state`` is plain JSON with text keys. Checkpoints of later epochs, from before a run was resumed at an earlier
    one, are removed too. If writing fails, the earlier checkpoints stay.
    """
    if epoch < 0 or keep < 1:
        raise ValueError(f"epoch must be at least 0 and keep at least 1, not {epoch} and {keep}")
    tensor_files = {
        _tensor_file(stem): named if is_divided(named) else _saveable(stem, named) for stem, named in tensors.items()
    }
    state_json = _encode_state(state)
    final = folder / f"epoch-{epoch:06d}"
    writing = folder / f"{files.WRITING}{final.name}-{os.getpid()}"
    try:
        if not folder.is_dir():
            files.make_folder(folder)
            files.sync(folder.parent)
        files.tidy(folder)
        files.make_folder(writing)
        _write_files(writing, epoch, tensor_files, state_json)
        files.publish(writing, final)
    except OSError as error:
        files.tidy(folder)
        raise RunError(
            f"cannot write the checkpoint of epoch {epoch} in {str(folder)!r}: {error.strerror or error}; "
            "the earlier checkpoints are intact: free some space or make the folder writable, then resume the run"
        ) from error
    except BaseException:
        files.tidy(folder)
        raise
    prune(folder, epoch, keep)
    return final


def take_part_in_saving(tensors: Tensors) -> None:
    """What the other processes do while the main one is in :func:`save_checkpoint` with divided tensors."""
    for named in tensors.values():
        take_part(named)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read the checkpoint in folder ``path`` and verify every byte; ``CorruptCheckpoint`` if it is damaged."""
    manifest = _read_manifest(path / _MANIFEST)
    for name, expected in manifest["files"].items():
        _verify(path / name, expected)
    try:
        tensors = {
            name.removesuffix(_SUFFIX): load_file(path / name) for name in manifest["files"] if name.endswith(_SUFFIX)
        }
        state = json.loads((path / _STATE).read_bytes())
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, SafetensorError) as error:
        raise CorruptCheckpoint(f"the checkpoint {str(path)!r} cannot be read: {error}") from error
    return Checkpoint(path, manifest["epoch"], tensors, state)


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that verifies, ``None`` if there is none; those skipped are logged.

    Changes nothing in the folder, so it is safe while a run is writing there.
    """
    for path in reversed(_checkpoints(folder)):
        try:
            return load_checkpoint(path)
        except CorruptCheckpoint as error:
            _log.warning(f"a damaged checkpoint is skipped: {error}")
    return None


def find_checkpoint(folder: Path, which: bool | str | Path) -> Checkpoint | None:
    """The newest valid checkpoint of ``folder``, ``None`` if it has none, or the one whose path is given.

    A checkpoint belongs to the logs of its run, so one of another run's folder is refused.
    """
    if isinstance(which, (str, Path)):
        path = Path(which)
        if not path.is_dir():
            raise UserError(f"there is no checkpoint {str(path)!r}: expected a folder such as checkpoints/epoch-000100")
        if path.resolve().parent != folder.resolve():
            raise UserError(
                f"the checkpoint {str(path)!r} is not one of output_dir {str(folder.parent)!r}: set output_dir to the "
                f"folder it belongs to; to go on elsewhere, copy that whole folder first"
            )
        return load_checkpoint(path)
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None and any(folder.glob("epoch-*")):
        raise RunError(
            f"no checkpoint in {str(folder)!r} is whole: start again in another folder, or remove them to start again "
            f"in this one"
        )
    if checkpoint is None:
        _log.warning(f"there is nothing to resume: {str(folder)!r} has no checkpoint; the run begins at the start")
    return checkpoint


def kept_epochs(folder: Path) -> list[int]:
    """The epochs with checkpoints, valid or not."""
    return sorted({_epoch_of(path) for path in _checkpoints(folder)})


def prune(folder: Path, epoch: int, keep: int) -> None:
    """Keep ``epoch`` and the ``keep - 1`` checkpoints before it; remove those of later epochs too.

    A failure is ignored: the checkpoint of ``epoch`` is already written.
    """
    files.tidy(folder)
    found = _checkpoints(folder)
    earlier = [path for path in found if _epoch_of(path) < epoch]
    later = [path for path in found if _epoch_of(path) > epoch]
    for path in later + earlier[: max(0, len(earlier) - (keep - 1))]:
        files.discard(path)


# --- writing ---


def _write_files(folder: Path, epoch: int, tensor_files: Tensors, state_json: bytes) -> None:
    """Write and flush all files of a checkpoint, the manifest last."""
    for name, named in tensor_files.items():
        _write_tensors(folder / name, named)
        files.sync(folder / name)
    files.write_bytes(folder / _STATE, state_json)
    files.sync(folder / _STATE)
    described = {name: files.checksum(folder / name) for name in sorted([*tensor_files, _STATE])}
    files.write_bytes(folder / _MANIFEST, _manifest_bytes({"format": FORMAT, "epoch": epoch, "files": described}))
    files.sync(folder / _MANIFEST)
    files.sync(folder)


def _write_tensors(path: Path, named: Mapping[str, torch.Tensor]) -> None:
    try:
        if is_divided(named):
            write_divided(path, named)
        else:
            save_file(dict(named), path)
    except SafetensorError as error:  # raised for a full disk, for example
        raise OSError(str(error)) from error


def _tensor_file(stem: str) -> str:
    if not _STEM.fullmatch(stem):
        raise ValueError(f"a tensor file's stem is made of letters, digits, '_' and '-', not {stem!r}")
    return stem + _SUFFIX


def _saveable(stem: str, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors on the CPU, contiguous, finite, without shared memory (the format does not support tied tensors)."""
    result: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in named.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise RunError(f"{name!r} in {stem!r} holds NaN or infinite values: no checkpoint was written")
        saveable = tensor.detach().cpu().contiguous()
        if saveable.untyped_storage().data_ptr() in storages:
            saveable = saveable.clone()
        storages.add(saveable.untyped_storage().data_ptr())
        result[name] = saveable
    return result


def _encode_state(state: Mapping[str, Any]) -> bytes:
    """Strict JSON; Python writes the shortest text that reads back as the same float."""
    try:
        return json.dumps(dict(state), allow_nan=False, indent=1).encode("ascii")
    except ValueError as error:
        raise RunError(
            f"the run's state holds NaN or an infinite value: no checkpoint was written ({error})"
        ) from error


# --- verifying ---


def _manifest_bytes(content: Mapping[str, Any]) -> bytes:
    """The canonical bytes of a manifest, its own checksum included; no other bytes are accepted."""
    checksum = hashlib.sha256(_canonical(content)).hexdigest()
    return _canonical({**content, "sha256": checksum})


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, indent=1).encode("ascii")


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest without its checksum."""
    try:
        raw = path.read_bytes()
        content = json.loads(raw)
        del content["sha256"]
        whole = _manifest_bytes(content) == raw
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptCheckpoint(f"{str(path)!r} is damaged: it is not a checkpoint's manifest") from error
    if not whole:
        raise CorruptCheckpoint(f"{str(path)!r} is damaged: its content does not match its checksum")
    if content.get("format") != FORMAT:
        raise RunError(
            f"{str(path)!r} has format {content.get('format')!r}, and this version of cdpg reads {FORMAT}: continue "
            "with the version that wrote it"
        )
    if not all(_FILE.fullmatch(name) for name in content["files"]):
        raise CorruptCheckpoint(f"{str(path)!r} names files that cannot be a checkpoint's")
    return dict(content)


def _verify(path: Path, expected: Mapping[str, Any]) -> None:
    try:
        found = files.checksum(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if found["size"] != expected["size"]:
        raise CorruptCheckpoint(f"{str(path)!r} is damaged: {found['size']} bytes, {expected['size']} were written")
    if found["sha256"] != expected["sha256"]:
        raise CorruptCheckpoint(f"{str(path)!r} is damaged: its content does not match its checksum")


def _unreadable(path: Path, error: OSError) -> RunError:
    """The error for an unreadable file. A missing file is damage; any other failure may pass, so nothing is skipped."""
    reason = f"{str(path)!r} cannot be read: {error.strerror or error}"
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
        return CorruptCheckpoint(reason)
    return RunError(f"{reason}: make it readable and try again, or remove that checkpoint to go on from the one before")


# --- finding ---


def _checkpoints(folder: Path) -> list[Path]:
    """Checkpoints by epoch, the oldest first; a replaced one comes before its replacement."""
    try:
        found = [path for path in folder.iterdir() if _READABLE.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"cannot look for checkpoints in {str(folder)!r}: {error.strerror or error}") from error
    return sorted(found, key=lambda path: (_epoch_of(path), not path.name.startswith(".")))


def _epoch_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
