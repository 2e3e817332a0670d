"""The mutants that may live, each with the reason, from ``survivors.yaml``.

Mutants that live for one reason stand together. A mutant is known by its file, its function and its change, the lines
of a diff. Instead of ``mutants`` a group may have ``edits``: what any line has and what the mutant has in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fault_list import read_list

if TYPE_CHECKING:
    from operators import Mutant

Key = tuple[str, str, str]
"""File, function and change."""
LIST = Path(__file__).parent / "survivors.yaml"


class Survivors:
    """The reasons why mutants may live."""

    def __init__(self, by_key: Mapping[Key, str], by_edit: Mapping[tuple[str, str], str]) -> None:
        self.by_key, self.by_edit = by_key, by_edit

    def reason(self, mutant: Mutant) -> str | None:
        """Why a mutant may live; None if it may not."""
        found = self.by_key.get((mutant.file, mutant.function, mutant.change))
        return found or next((why for edit, why in self.by_edit.items() if _is_edit(mutant.change, *edit)), None)


def _is_edit(change: str, before: str, after: str) -> bool:
    removed, _, added = change.removeprefix("- ").partition("\n+ ")
    return before in removed and removed.replace(before, after, 1) == added


def load() -> Survivors:
    by_key: dict[Key, str] = {}
    by_edit: dict[tuple[str, str], str] = {}
    for group in read_list(LIST):
        if set(group) not in ({"reason", "mutants"}, {"reason", "edits"}):
            raise ValueError(f"{LIST.name}: expected reason and mutants or edits, not {', '.join(group)}")
        for before, after in group.get("edits", ()):
            by_edit[before, after] = group["reason"]
        for mutant in group.get("mutants", ()):
            key = mutant["file"], mutant["function"], mutant["change"].strip()
            if key in by_key:
                raise ValueError(f"{LIST.name}: twice: {key}")
            by_key[key] = group["reason"]
    return Survivors(by_key, by_edit)
