"""What the fault tests share: runs in processes of their own, which can be killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from aftermath import finish
from victim import Keeper


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The figures that tests have noted (``record_property``), for docs/reliability.md."""
    for report in terminalreporter.stats.get("passed", []):
        figures = ", ".join(f"{name} {value}" for name, value in report.user_properties)
        if figures:
            terminalreporter.write_line(f"{report.nodeid.rpartition('/')[2]}: {figures}")


@pytest.fixture(scope="session")
def keeper() -> Keeper:
    return Keeper()


@pytest.fixture(scope="session")
def finished(keeper: Keeper, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run and, beside it, its changes of the file system (``events_of``); it is not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    finish(keeper, folder, watch=True)
    return folder
