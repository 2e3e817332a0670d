"""Counts what became of faults and mutants, and shows it."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, field

from forks import Result

_STARTED = time.monotonic()


@dataclass
class Score:
    """What became of a group."""

    killed: int = 0
    rejected: int = 0
    """Those among the killed that have type errors."""
    slow: int = 0
    """Those among the killed whose tests were still running when the time was up."""
    living: list[str] = field(default_factory=list)

    def count(self, result: Result) -> None:
        if result.passed:
            self.living.append(result.name)
        else:
            self.killed += 1
            self.slow += result.status is None

    @property
    def total(self) -> int:
        return self.killed + len(self.living)


def say(text: str = "") -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def describe(result: Result) -> str:
    """A word for how it ended, and the seconds of processor time."""
    state = "LIVES" if result.passed else "time is up" if result.status is None else "killed"
    return f"{state:<10} {result.computing:5.1f} s"


def minutes() -> str:
    """How long this process has been at work, and its processor time with that of its forks."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    computing = sum(usage.ru_utime + usage.ru_stime for usage in used)
    return f"{(time.monotonic() - _STARTED) / 60:.1f} minutes, {computing / 60:.1f} of processor time"


def report(scores: dict[str, Score], title: str) -> Score:
    """Show a line for each group and one for all, which is returned."""
    whole = Score(
        sum(score.killed for score in scores.values()),
        sum(score.rejected for score in scores.values()),
        sum(score.slow for score in scores.values()),
        [name for score in scores.values() for name in score.living],
    )
    width = max(map(len, [*scores, title]))
    say(f"\n{title:<{width}}  faults  killed  living")
    for group, score in [*scores.items(), ("all", whole)]:
        end = f"   {minutes()}" if score is whole else ""
        say(f"{group:<{width}}  {score.total:6}  {score.killed:6}  {len(score.living):6}{end}")
    if whole.rejected:
        say(f"{whole.rejected} of the killed have type errors")
    if whole.slow:
        say(f"{whole.slow} of the killed took many times as long as their tests do, and were ended")
    return whole
