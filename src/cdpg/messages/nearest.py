"""Suggestions for unknown names: the known name that is most similar."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

ALIKE = 0.6
"""The least similarity of a suggestion, by difflib's measure."""
NEARLY_EQUAL = 0.8
"""The same where most unknown names mean something else: 'logging_steps' does not mean 'long_contexts'."""


def nearest(name: str, known: Iterable[str], similarity: float = ALIKE) -> str | None:
    """The known name that is most similar to ``name``, ignoring case; None if none is similar enough."""
    by_lower = {one.strip().lower(): one for one in known}
    near = difflib.get_close_matches(name.strip().lower(), by_lower, n=1, cutoff=similarity)
    return by_lower[near[0]] if near else None


def nearest_folder(path: Path) -> Path | None:
    """The folder next to ``path``, which does not exist, with the most similar name; None if none is similar enough."""
    try:
        beside = sorted(found.name for found in path.parent.iterdir() if found.is_dir())
    except OSError:
        return None
    near = nearest(path.name, beside)
    return path.parent / near if near else None
