"""One call of ``train``: the lock on the run's folder, the progress on the screen, and where the run may be stopped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass

from cdpg.errors import RunError
from cdpg.storage.provenance import how_to_resume
from cdpg.system.distributed import is_lost_process
from cdpg.system.signals import StopSignal
from cdpg.system.stopping import StopCheck
from cdpg.training.progress import RunProgress
from cdpg.training.setup import Parts

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Session:
    """What lasts as long as one call of ``train``."""

    progress: RunProgress
    stop_check: StopCheck

    def raise_if_stopped_after(self, epoch: int) -> None:
        """End the run if any process has received a signal; all processes call it at the same place."""
        self.stop_check.raise_if_stopped(f"stopped after epoch {epoch}" if epoch else "stopped before the first epoch")


@contextmanager
def open_session(parts: Parts, epochs: int, seconds_left: Callable[[int, float], float]) -> Iterator[Session]:
    """Lock the folder, catch signals and show progress; worker processes are ended at the end."""
    with (
        parts.folder if parts.is_main else nullcontext(),  # the other processes write nothing
        closing(parts.evaluator),
        StopSignal() as signal,
        RunProgress(epochs, silent=not parts.is_main, seconds_left=seconds_left) as progress,
    ):
        resume = how_to_resume(parts.origin["command"])
        try:
            yield Session(progress, StopCheck(signal, parts.processes, resume))
        except RuntimeError as error:
            if parts.processes.count == 1 or not is_lost_process(error):
                raise
            # At once: a launcher is about to end this process, too, maybe before the exception is shown.
            _log.error(
                "another process of this run has ended or cannot be reached, and this one cannot continue without it: "
                "look at the message of that process, whether the system killed it for lack of memory, and whether the "
                f"network is up; continue with: {resume}"
            )
            raise RunError("the run has lost one of its processes") from error
