"""What the fault tests share: runs in processes of their own, which can be killed."""

from __future__ import annotations

import pytest
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
