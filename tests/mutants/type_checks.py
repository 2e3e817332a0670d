"""The mutants that mypy rejects, and so ``make test``: all of them are judged in one run.

A copy of each file has every mutant as a function of its own beside the original, under another name. mypy reads the
copies in place of the files. A function's mutants have the signature of the function, so no mutant changes what mypy
knows of the rest. A function that is not mutated stands there once more, too: what mypy says of it is due to the copy.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from fault_list import ROOT
from operators import Mutant

OPTIONS = "--output=json", "--soft-error-limit=-1", "--no-error-summary", "--no-warn-unused-configs"
UNCHANGED = ""
"""In place of a mutant's name: the function as it is."""


class TypeCheck:
    """mypy at work beside this process; files are made in ``folder``."""

    def __init__(self, mutants: Iterable[Mutant], folder: Path) -> None:
        by_file: dict[str, list[Mutant]] = defaultdict(list)
        for mutant in mutants:
            if not _sets_attribute(mutant):
                by_file[mutant.file].append(mutant)
        self._copies = {file: _Copy(file, group) for file, group in by_file.items()}
        self._output = folder / "mypy.txt"
        self._process = _start_mypy(self._copies, self._output) if self._copies else None

    def rejected(self) -> set[str]:
        """The names of the mutants that have type errors; waits for mypy."""
        if self._process is None:
            return set()
        status, output = self._process.wait(), self._output.read_text(encoding="utf-8")
        if status not in (0, 1):
            raise RuntimeError(f"mypy ended with {status}:\n{output[-2000:]}")
        errors: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for entry in map(json.loads, output.splitlines()):
            if entry["severity"] == "error":
                errors[entry["file"]].append((entry["line"], entry["message"]))
        return {name for file, copy in self._copies.items() for name in copy.rejected(errors[file])}


def _sets_attribute(mutant: Mutant) -> bool:
    """Whether the changed line may be what an attribute has its type from: in the copy the original is."""
    return re.match(r"- self\.\w+(, self\.\w+)* = ", mutant.change) is not None


class _Copy:
    """The text of a file with mutants added to it, and in which lines each one stands."""

    def __init__(self, file: str, mutants: Sequence[Mutant]) -> None:
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines(keepends=True)
        self._owners: dict[int, tuple[tuple[int, int], str]] = {}
        functions: dict[tuple[int, int], list[Mutant]] = defaultdict(list)
        for mutant in mutants:
            functions[mutant.place].append(mutant)
        parts: list[str] = []
        written = 0
        for place in sorted(functions):
            parts += lines[written : place[1] - 1]
            written = place[1] - 1
            original = "".join(lines[place[0] - 1 : written])
            name = functions[place][0].function.rpartition(".")[2]
            versions = [(UNCHANGED, original), *((mutant.name, mutant.text) for mutant in functions[place])]
            for number, (owner, text) in enumerate(versions):
                added = _renamed(text, name, f"{name}_mutant_{number}").splitlines(keepends=True)
                self._owners |= {len(parts) + 1 + index: (place, owner) for index in range(len(added))}
                parts += added
        self.text = "".join(parts + lines[written:])

    def rejected(self, errors: Iterable[tuple[int, str]]) -> Iterator[str]:
        """The mutants that have errors, given as lines and messages, which the function as it is has not."""
        found: dict[tuple[int, int], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for line, message in errors:
            if line in self._owners:
                place, owner = self._owners[line]
                found[place][owner].add(message)
        for messages in found.values():
            due_to_copy = messages.pop(UNCHANGED, set())
            yield from (name for name, given in messages.items() if given - due_to_copy)


def _renamed(text: str, name: str, other: str) -> str:
    return re.sub(rf"^(\s*(?:async )?def ){name}\b", rf"\g<1>{other}", text, count=1, flags=re.MULTILINE)


def _start_mypy(copies: Mapping[str, _Copy], output: Path) -> subprocess.Popen[bytes]:
    """The results of ``make types`` are used, and left as they are."""
    folder, shadows = output.parent, []
    for number, (file, copy) in enumerate(copies.items()):
        path = folder / f"copy{number}.py"
        path.write_text(copy.text, encoding="utf-8")
        shadows += ["--shadow-file", file, str(path)]
    cache = folder / "types"
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", cache)
    command = [sys.executable, "-m", "mypy", *OPTIONS, f"--cache-dir={cache}", *shadows, *copies]
    with output.open("wb") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
