"""Where a run may be stopped: at stated places, the same on every process."""

from __future__ import annotations

from dataclasses import dataclass

from cdpg.system.distributed import Processes
from cdpg.system.signals import StopSignal


@dataclass(frozen=True)
class StopCheck:
    """Ends the work of all processes if a signal has come to any of them.

    To check is to communicate: every process must check at the same places, and nowhere else.
    """

    signal: StopSignal
    processes: Processes
    how_to_resume: str
    """What to type, or to call."""

    def is_stopped(self) -> bool:
        """Whether any process has received a signal."""
        return self.processes.any(self.signal.received is not None)

    def raise_if_stopped(self, situation: str) -> None:
        """End here if any process has received a signal; ``situation`` says what is done and what is not."""
        if self.is_stopped():
            raise self.signal.interruption(situation, self.how_to_resume)


def never_stop() -> None:
    """The check of a place where nobody asks to stop."""
