"""Counts what became of faults and mutants, and shows it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from forks import Result


@dataclass
class Score:
    """What became of a group."""

    killed: int = 0
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
    """A word for how it ended, and the seconds."""
    state = "LIVES" if result.passed else "time is up" if result.status is None else "killed"
    return f"{state:<10} {result.seconds:5.1f} s"


def report(scores: dict[str, Score], title: str, seconds: float) -> Score:
    """Show a line for each group and one for all, which is returned."""
    whole = Score(
        sum(score.killed for score in scores.values()),
        sum(score.slow for score in scores.values()),
        [name for score in scores.values() for name in score.living],
    )
    width = max(map(len, [*scores, title]))
    say(f"\n{title:<{width}}  faults  killed  living")
    for group, score in [*scores.items(), ("all", whole)]:
        end = f"   {seconds / 60:.1f} minutes" if score is whole else ""
        say(f"{group:<{width}}  {score.total:6}  {score.killed:6}  {len(score.living):6}{end}")
    if whole.slow:
        say(f"{whole.slow} of the killed took many times as long as their tests do, and were ended")
    return whole
