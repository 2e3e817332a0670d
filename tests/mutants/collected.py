"""Tests that one process has imported and collected, for forks of it to run some of them at once.

Setting up pytest and collecting takes longer than most of the tests that a mutant meets.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from _pytest import main as loop
from fault_list import ROOT

OPTIONS = "-x", "-qq", "-s", "-p", "no:cacheprovider", "--tb=short", "--disable-warnings", "--timeout=0"
"""``-s``: a fork has its output in a file of its own. Limits are set for each fork: a machine may be busy."""


class Collected:
    """A pytest plugin that runs no test itself; ``use`` is given what was collected."""

    def __init__(self, use: Callable[[Collected], int]) -> None:
        self._use = use
        self.status = 1

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._session = session
        self._items = {item.nodeid: item for item in session.items}
        gc.collect()
        gc.freeze()  # a collection in a fork would write to, and so copy, what is shared
        self.status = self._use(self)
        return True

    def run(self, names: Sequence[str], folder: Path, plugins: Sequence[object] = ()) -> int:
        """Run some tests in this process, a fork, with ``folder`` for temporary files; 1 if one fails."""
        temporary = folder / "temporary"
        shutil.rmtree(temporary, ignore_errors=True)  # of a fork that was ended
        temporary.mkdir()
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(temporary)
        session, config = self._session, self._session.config
        for plugin in plugins:
            config.pluginmanager.register(plugin)
        session.items = [self._items[name] for name in names]
        try:
            loop.pytest_runtestloop(session)
        except session.Failed:
            return 1
        finally:
            config.hook.pytest_sessionfinish(session=session, exitstatus=session.testsfailed)
            shutil.rmtree(temporary, ignore_errors=True)
        return 0

    def names(self, given: str) -> list[str]:
        """The tests of a file, or those that a node id names."""
        return [name for name in self._items if name == given or name.startswith((f"{given}::", f"{given}["))]


def collect(files: Sequence[str], use: Callable[[Collected], int]) -> int:
    """What ``use`` returns for the tests of some files; it is called in this process."""
    plugin = Collected(use)
    package = importlib.util.find_spec("cdpg")
    assert package is not None and package.origin == str(ROOT / "src/cdpg/__init__.py"), "another cdpg would be tested"
    status = pytest.main([*OPTIONS, *files], plugins=[plugin])
    assert status == 0, "the tests cannot be collected"
    return plugin.status


class Deadline:
    """A pytest plugin: a test that computes for much longer than it does without a mutant ends this process."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._seconds = seconds

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        # Beside its own work, the first test of a fork may import what another one imported for it.
        signal.setitimer(signal.ITIMER_PROF, 5 + 5 * self._seconds[item.nodeid])
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
