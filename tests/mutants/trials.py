"""Tries edits of functions in forks of a process that has the package imported and the tests collected."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import forks
from collected import Collected, Deadline
from coverage_map import CoverageMap, Recorder
from fork_server import Failed, failed_in
from forks import Call, Result
from patching import Edit, patch
from scores import say


@dataclass(frozen=True)
class Trial:
    """Some edits and the tests that may notice them."""

    name: str
    edits: tuple[Edit, ...]
    tests: Mapping[str, float]
    """With the seconds that each takes without the edits."""


class Noticing:
    """How often each test noticed an edit: those that often do, for their time, go first.

    What counts is how often it noticed one of the same function and, before that is known, of the same file.
    """

    def __init__(self) -> None:
        self._tried: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._noticed: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def order(self, trial: Trial) -> list[str]:
        def promise(test: str) -> float:
            share = 0.3
            for place in self._places(trial):
                share = (self._noticed[place][test] + share) / (self._tried[place][test] + 1)
            return share / (trial.tests[test] + 0.1)

        return sorted(trial.tests, key=lambda test: (-promise(test), test))

    def count(self, trial: Trial, order: Sequence[str], failed: str | None) -> None:
        for place in self._places(trial):
            for test in order:
                self._tried[place][test] += 1
                if test == failed:
                    self._noticed[place][test] += 1
                    break

    @staticmethod
    def _places(trial: Trial) -> tuple[str, str]:
        edit = trial.edits[0]
        return edit.file, f"{edit.file} {edit.function}"


def run_trials(collected: Collected, trials: Iterable[Trial], workers: int) -> Iterator[tuple[Result, str | None]]:
    """Each trial's result as it comes, and the test that noticed."""
    noticing = Noticing()
    running: dict[str, tuple[Trial, list[str]]] = {}

    def calls() -> Iterator[Call]:
        for trial in trials:
            running[trial.name] = trial, noticing.order(trial)
            yield _call(collected, *running[trial.name])

    for result in forks.run(calls(), workers):
        trial, order = running.pop(result.name)
        failed = next(iter(failed_in(result)), None)
        noticing.count(trial, order, failed)
        yield result, failed


def _call(collected: Collected, trial: Trial, order: Sequence[str]) -> Call:
    def run(folder: Path) -> int:
        for edit in trial.edits:
            patch(edit)
        failed = Failed()
        try:
            return collected.run(order, folder, [Deadline(trial.tests), failed])
        finally:
            failed.tell()

    return Call(trial.name, run, limit=60 + 10 * sum(trial.tests.values()))


def map_tests(collected: Collected, files: Iterable[str], workers: int) -> CoverageMap | None:
    """Run the tests once, without an edit, to see which lines each one runs; None if one fails."""
    whole = CoverageMap()
    with TemporaryDirectory() as folder:

        def record(file: str) -> Call:
            def run(place: Path) -> int:
                recorder = Recorder()
                with recorder.recording():
                    status = collected.run(collected.names(file), place, [recorder])
                (Path(folder) / f"{Path(file).stem}.json").write_text(recorder.map.to_json(), encoding="utf-8")
                return status

            return Call(file, run, limit=3600)

        for result in forks.run(map(record, files), workers):
            if not result.passed:
                say(f"{result.name} fails without a mutant:\n{result.output}")
                return None
        for path in Path(folder).glob("*.json"):
            whole.merge(CoverageMap.from_json(path.read_text(encoding="utf-8")))
    return whole


def tests_for(lines: CoverageMap, file: str, numbers: Sequence[int], limit: float = math.inf) -> dict[str, float]:
    """The tests that run some lines of a file, with their seconds."""
    return {test: lines.cost(lines.contexts[test]) for test in lines.tests_of(file, numbers, limit)}
