"""The name that was probably meant by one that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

ALIKE = 0.6
"""Similarity from which names are alike, by difflib's measure."""
NEARLY_EQUAL = 0.8
"""The same where most names that are not known mean something else: 'logging_steps' is not 'long_contexts'."""


def nearest(name: str, known: Iterable[str], similarity: float = ALIKE) -> str | None:
    """The one of some names that is most like a name, whatever its case; None if none is alike."""
    by_lower = {one.strip().lower(): one for one in known}
    near = difflib.get_close_matches(name.strip().lower(), by_lower, n=1, cutoff=similarity)
    return by_lower[near[0]] if near else None


def nearest_folder(path: Path) -> Path | None:
    """The folder beside ``path``, which does not exist, whose name is most like its own; None if none is alike."""
    try:
        beside = sorted(found.name for found in path.parent.iterdir() if found.is_dir())
    except OSError:
        return None
    near = nearest(path.name, beside)
    return path.parent / near if near else None
