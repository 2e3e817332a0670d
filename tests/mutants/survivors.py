"""The mutants that may live, each with the reason, from ``survivors.yaml``.

Mutants that live for one reason stand together. A mutant is known by its file, its function and its change, the lines
of a diff.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fault_list import read_list

if TYPE_CHECKING:
    from operators import Mutant

Key = tuple[str, str, str]
"""File, function and change."""
LIST = Path(__file__).parent / "survivors.yaml"


def load() -> dict[Key, str]:
    """The reason by file, function and change."""
    reasons = {}
    for group in read_list(LIST):
        if set(group) != {"reason", "mutants"}:
            raise ValueError(f"{LIST.name}: expected reason and mutants, not {', '.join(group)}")
        for mutant in group["mutants"]:
            key = mutant["file"], mutant["function"], mutant["change"].strip()
            if key in reasons:
                raise ValueError(f"{LIST.name}: twice: {key}")
            reasons[key] = group["reason"]
    return reasons


def key(mutant: Mutant) -> Key:
    return mutant.file, mutant.function, mutant.change
