"""Which tests run which lines of the source, and how long they take."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import coverage
import pytest
from fault_list import ROOT

BY_VALUE = {
    f"src/cdpg/{folder}/": f"tests/test_{name}.py::"
    for folder, name in {
        "evaluation": "results",
        "rollout": "rollout",
        "methods": "methods",
        "target": "target",
    }.items()
}
"""Tests that compare all numbers of a folder, in little time."""


@dataclass
class CoverageMap:
    """What one run of the tests has shown."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Computing time of each context: a test without its shared fixtures, or such a fixture."""
    contexts: dict[str, set[str]] = field(default_factory=dict)
    """Of each test: its own name and those of the shared fixtures that it uses."""
    lines: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    """For a file and a line, the contexts in which it was run."""

    def cost(self, contexts: Collection[str]) -> float:
        return sum(self.seconds.get(context, 0.0) for context in contexts)

    def tests_of(self, file: str, lines: Sequence[int], limit: float) -> list[str]:
        """Tests that run one of the lines: those of ``tests/test_MODULE.py`` and by value first, then others.

        Either may take ``limit`` seconds in all. For half of that time the others are the quickest. The rest are of all
        files of tests in turn: a line that many tests run may be noticed by those of one file alone.
        """
        reached = set().union(*(self.lines.get((file, line), set()) for line in lines))
        running = [test for test, contexts in self.contexts.items() if not reached.isdisjoint(contexts)]
        quick = sorted(running, key=lambda test: (self.cost(self.contexts[test]), test))
        before: Counter[str] = Counter()
        in_turn: list[tuple[int, int, str]] = []
        for place, test in enumerate(quick):
            group = test.partition("::")[0]
            in_turn.append((before[group], place, test))
            before[group] += 1
        own = [test for test in quick if test.startswith(_own_files(file))]
        chosen: dict[str, None] = {}
        paid: set[str] = set()

        def choose(tests: Sequence[str], most: float) -> None:
            nonlocal paid
            for test in tests:
                wanted = paid | self.contexts[test]
                if not chosen or self.cost(wanted) <= most:
                    chosen[test] = None
                    paid = wanted

        choose(own, limit)
        spent = self.cost(paid)
        choose(quick, spent + limit / 2)
        choose([test for *_, test in sorted(in_turn)], spent + limit)
        return list(chosen)

    def merge(self, other: CoverageMap) -> None:
        self.seconds |= other.seconds
        self.contexts |= other.contexts
        for line, contexts in other.lines.items():
            self.lines.setdefault(line, set()).update(contexts)

    def to_json(self) -> str:
        contexts = {test: sorted(names) for test, names in self.contexts.items()}
        lines = [[file, line, sorted(names)] for (file, line), names in self.lines.items()]
        return json.dumps([self.seconds, contexts, lines])

    @classmethod
    def from_json(cls, text: str) -> CoverageMap:
        seconds, contexts, lines = json.loads(text)
        return cls(
            seconds,
            {test: set(names) for test, names in contexts.items()},
            {(file, line): set(names) for file, line, names in lines},
        )


def _own_files(file: str) -> tuple[str, ...]:
    """How the names of tests start that a file's mutants meet first."""
    by_value = (tests for folder, tests in BY_VALUE.items() if file.startswith(folder))
    return (f"tests/test_{Path(file).stem}.py::", *by_value)


class Recorder:
    """A pytest plugin that fills a :class:`CoverageMap`.

    What a fixture of a module or a session runs, it runs for every test that uses it, not for the first one alone.
    """

    def __init__(self) -> None:
        self.map = CoverageMap()
        self._coverage = coverage.Coverage(data_file=None, source=[str(ROOT / "src" / "cdpg")], branch=False)
        self._context, self._since = "", time.process_time()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While tests run."""
        self._coverage.start()
        try:
            yield
        finally:
            self._coverage.stop()
            self._read()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.map.contexts[item.nodeid] = {item.nodeid}
        self._enter(item.nodeid)
        try:
            return (yield)
        finally:
            self._enter("")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        before = self._context
        self._enter(self._name(fixturedef))
        try:
            return (yield)
        finally:
            self._enter(before)

    def pytest_runtest_call(self, item: pytest.Item) -> None:
        definitions = getattr(item, "_fixtureinfo").name2fixturedefs  # no public way to a test's fixtures  # noqa: B009
        for group in definitions.values():
            self.map.contexts[item.nodeid].update(self._name(one) for one in group if one.scope != "function")

    @staticmethod
    def _name(fixture: pytest.FixtureDef[object]) -> str:
        return f"fixture {fixture.baseid} {fixture.argname}"

    def _enter(self, context: str) -> None:
        now = time.process_time()
        self.map.seconds[self._context] = self.map.seconds.get(self._context, 0.0) + now - self._since
        self._context, self._since = context, now
        self._coverage.switch_context(context)

    def _read(self) -> None:
        data = self._coverage.get_data()
        lines: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        for path in data.measured_files():
            file = str(Path(path).relative_to(ROOT))
            for line, contexts in data.contexts_by_lineno(path).items():
                lines[file, line].update(contexts)
        self.map.lines = dict(lines)
