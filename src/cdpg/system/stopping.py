"""Checks for a stop, at the same places on every process."""

from __future__ import annotations

from dataclasses import dataclass

from cdpg.system.distributed import Processes
from cdpg.system.signals import StopSignal


@dataclass(frozen=True)
class StopCheck:
    """Ends the work of all processes if any of them has received a signal.

    A check communicates, so all processes must check at the same places.
    """

    signal: StopSignal
    processes: Processes
    how_to_resume: str
    """The command or the call that resumes the run."""

    def is_stopped(self) -> bool:
        """Whether any process has received a signal."""
        return self.processes.any(self.signal.received is not None)

    def raise_if_stopped(self, situation: str) -> None:
        """End here if any process has received a signal; ``situation`` says what is done and what is not."""
        if self.is_stopped():
            raise self.signal.interruption(situation, self.how_to_resume)


def never_stop() -> None:
    """A check that never stops."""
