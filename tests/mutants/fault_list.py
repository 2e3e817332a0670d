"""The hand-made faults: small edits of the source, each with the tests that must notice it.

They stand in ``faults/*.yaml``, a file for each area of the source. ``find`` must occur exactly once in ``file``;
``replace`` takes its place. ``tests/test_mutants.py`` keeps the list up to date with the source.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as quick, where it was built
ROOT = Path(__file__).parents[2]
LISTS = Path(__file__).parent / "faults"


@dataclass(frozen=True)
class Fault:
    """One edit, as the list has it."""

    area: str
    """The name of its list."""
    name: str
    file: str
    """The path of the source file from the root of the project."""
    find: str
    replace: str
    why: str
    """What is wrong with the result."""
    tests: tuple[str, ...]
    """Test files or node ids, from the root of the project."""

    def applied(self) -> str:
        """The whole file with the fault in it; ValueError if the list does not fit the file."""
        source = (ROOT / self.file).read_text(encoding="utf-8")
        found = source.count(self.find)
        if found != 1:
            raise ValueError(f"{self.name}: find occurs {found} times in {self.file}, expected once: {self.find!r}")
        faulty = source.replace(self.find, self.replace)
        if "".join(self.find.split()) == "".join(self.replace.split()):
            raise ValueError(f"{self.name}: replace means the same as find in {self.file}")
        try:
            ast.parse(faulty)
        except SyntaxError as error:
            raise ValueError(f"{self.name}: {self.file} does not parse with the fault in it: {error}") from error
        return faulty


def load(areas: Collection[str] = (), names: Collection[str] = ()) -> list[Fault]:
    """The faults of all lists, or of some areas and those of some names."""
    faults = [fault for path in sorted(LISTS.glob("*.yaml")) for fault in _read(path)]
    for kind, given, known in (
        ("area", areas, {path.stem for path in LISTS.glob("*.yaml")}),
        ("fault", names, {fault.name for fault in faults}),
    ):
        unknown = sorted(set(given) - known)
        if unknown:
            raise ValueError(f"no {kind} is called {', '.join(unknown)}; expected some of {', '.join(sorted(known))}")
    return [fault for fault in faults if not (areas or names) or fault.area in areas or fault.name in names]


def read_list(path: Path) -> list[Any]:
    """The entries of a YAML file, read by the safe loader."""
    loader = _LOADER(path.read_text(encoding="utf-8"))
    try:
        return loader.get_single_data() or []
    finally:
        loader.dispose()


def _read(path: Path) -> list[Fault]:
    keys = {field.name for field in fields(Fault)} - {"area"}
    faults = []
    for entry in read_list(path):
        if set(entry) != keys or not all(isinstance(entry[key], str) for key in keys - {"tests"}):
            raise ValueError(f"{path.name}: {entry.get('name')}: expected exactly the keys {', '.join(sorted(keys))}")
        faults.append(Fault(area=path.stem, **(entry | {"tests": tuple(entry["tests"])})))
    return faults
