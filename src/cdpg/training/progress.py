"""The progress display of a run: one live line in a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich import progress as rich_progress
from rich.console import Console

from cdpg.messages.text import duration, plain_text, whose_samples

_WINDOW = 20
"""Epochs over which the rate is averaged for the time left."""
_SECONDS_BETWEEN_LINES = 5.0
_LINES_PER_RUN = 20


class RunProgress:
    """Shows one metrics record an epoch on standard error. Output that fails is dropped, so it never stops a run."""

    def __init__(
        self,
        total_epochs: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        seconds_left: Callable[[int, float], float] | None = None,
        silent: bool = False,
    ) -> None:
        """``seconds_left(done, epoch)``: the time left after ``done`` epochs of ``epoch`` seconds each; by default that
        of the epochs."""
        self._total = total_epochs
        self._left = seconds_left or (lambda done, epoch: max(0, total_epochs - done) * epoch)
        self._console = console or (Console(file=io.StringIO()) if silent else Console(stderr=True))
        self._clock = clock
        self._seconds: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._unshown: str | None = None
        self._shown_epoch: int | None = None
        self._shown_at = 0.0
        self._stage_at = clock()
        self._bar: rich_progress.Progress | None = None
        self._task = rich_progress.TaskID(0)

    def __enter__(self) -> RunProgress:
        if self._console.is_interactive and self._console.file.isatty():  # settings can force is_interactive
            # No refresh thread: workers are forked while the bar is shown, and a fork must not copy a held lock. Other
            # output to standard error, such as notices, appears above the bar.
            self._bar = rich_progress.Progress(
                rich_progress.BarColumn(bar_width=20),
                rich_progress.TextColumn("{task.description}", markup=False),
                console=self._console,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=True,
            )
            self._task = self._bar.add_task("starting", total=self._total)
            with contextlib.suppress(OSError, ValueError):
                self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.stop()
            self._bar = None
        elif self._unshown is not None:
            self._write(self._unshown)
            self._unshown = None

    def update(self, record: Mapping[str, Any]) -> None:
        """Show the metrics of the epoch that has just ended; ``record["epoch"]`` counts from 1."""
        epoch, now = int(record["epoch"]), self._clock()
        self._seconds.extend([record["seconds"]] if record.get("seconds") is not None else [])
        line = _status(record, self._total, self._seconds_left(epoch))
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.update(self._task, completed=epoch, description=line, refresh=True)
        elif self._is_due(epoch, now):
            self._write(line)
            self._unshown, self._shown_epoch, self._shown_at = None, epoch, now
        else:
            self._unshown = line

    def working(self, message: str) -> None:
        """Show the current activity between epochs or after the last: on the live line, else now and then."""
        text, now = plain_text(message), self._clock()
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.update(self._task, description=text, refresh=True)
        elif now - self._stage_at >= _SECONDS_BETWEEN_LINES:
            self._write(text)
            self._stage_at = now

    def prefixed(self, prefix: str) -> StageProgress:
        """The progress of a part of the run, whose messages begin with ``prefix``."""
        return StageProgress(self, prefix)

    def stage(self, message: str) -> None:
        """Show the result of a run after its last epoch; always shown."""
        self._stage_at = -math.inf
        self.working(message)

    def _is_due(self, epoch: int, now: float) -> bool:
        """Whether to show a line: the first, the last, others every 5 s or every twentieth of the run, the rarer."""
        if self._shown_epoch is None or epoch >= self._total:
            return True
        epochs_due = epoch - self._shown_epoch >= self._total / _LINES_PER_RUN
        return epochs_due and now - self._shown_at >= _SECONDS_BETWEEN_LINES

    def _seconds_left(self, done: int) -> float | None:
        """Seconds left, from the mean of the latest epochs; None before the first. At least 1 until the run is over."""
        return max(1.0, self._left(done, sum(self._seconds) / len(self._seconds))) if self._seconds else None

    def _write(self, line: str) -> None:
        # Not console.print: it wraps lines, and ends the program if a pipe's reader has closed it.
        with contextlib.suppress(OSError, ValueError):
            self._console.file.write(line + "\n")
            self._console.file.flush()


@dataclasses.dataclass(frozen=True)
class StageProgress:
    """The progress of a part of a run."""

    whole: RunProgress
    prefix: str

    def working(self, message: str) -> None:
        self.whole.working(self.prefix + message)


def _status(record: Mapping[str, Any], total: int, seconds_left: float | None) -> str:
    """``epoch 12/1000, satisfaction 0.412, …`` in plain ASCII, for any log file.

    The KL is called rough: it comes from the epoch's own samples, cannot exceed log M and tends to be too low.
    """
    tokens, seconds = record.get("tokens"), record.get("seconds")
    rate = tokens / seconds if tokens is not None and seconds else None
    whose = whose_samples(record)
    own = f", of the policy {_number(record['satisfaction_policy'], '.3f')}" if whose and _knows_policy(record) else ""
    parts = [
        f"epoch {record['epoch']}/{total}",
        f"satisfaction{whose} {_number(record.get('satisfaction'), '.3f')}{own}",
        f"coverage {_number(record.get('coverage'), '.2f')}",
        f"rough KL(p,pi) {_number(record.get('kl_target_policy'), '.2f')}",
        f"{_number(rate, ',.0f')} tokens/s",
        f"{'-' if seconds_left is None else duration(seconds_left)} left",
    ]
    return ", ".join(parts)


def _knows_policy(record: Mapping[str, Any]) -> bool:
    return record.get("satisfaction_policy") is not None


def _number(value: float | None, form: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, form)
