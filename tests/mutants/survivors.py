"""The mutants that may live, each with the reason, from ``survivors.yaml``.

Mutants that live for one reason stand together: a file, a function, the reason and the changes, each as the lines of a
diff. A change that the source no longer has is reported, so that the list shrinks with the mutants.
"""

from __future__ import annotations

from pathlib import Path

import yaml
from operators import Mutant

LIST = Path(__file__).parent / "survivors.yaml"


def load() -> dict[tuple[str, str, str], str]:
    """The reason by file, function and change."""
    reasons = {}
    for entry in yaml.safe_load(LIST.read_text(encoding="utf-8")) or []:
        if set(entry) != {"file", "function", "reason", "changes"}:
            raise ValueError(f"{LIST.name}: expected file, function, reason and changes in {entry}")
        for change in entry["changes"]:
            reasons[entry["file"], entry["function"], change.strip()] = entry["reason"]
    return reasons


def key(mutant: Mutant) -> tuple[str, str, str]:
    return mutant.file, mutant.function, mutant.change
