"""What a run says beside its progress line: failed checks, nothing to learn from, busy cores, time and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cdpg.config import CDPGConfig
from cdpg.constraints.judge import Judge
from cdpg.storage.jsonl import read_jsonl
from cdpg.system import memory
from cdpg.system.threads import CoreWatch
from cdpg.training.failures import FailureLog
from cdpg.training.progress import outlook
from cdpg.training.starvation import PlentyWatch, StarvationWatch

_GROWN = 1.2
"""How far the memory in use may exceed what was said of it before it is said again."""


class Notices:
    """Gathers them and hands them to ``note``, which differs from one run to the next."""

    def __init__(self, judge: Judge, failures: FailureLog, samples_per_context: int) -> None:
        self._judge, self._failures = judge, failures
        self._watches = (StarvationWatch(samples_per_context), PlentyWatch())
        self._told_memory: dict[str, int] = {}

    def of_start(self, note: Callable[[str], None]) -> None:
        """What was found while the trainer was made."""
        while self._judge.notices:
            note(self._judge.notices.pop(0))

    def of_epoch(self, record: Mapping[str, Any], note: Callable[[str], None]) -> None:
        """What an epoch's checks and coverage give reason to say."""
        self.of_start(note)
        self._failures.tell(record, note)
        for watch in self._watches:
            if warning := watch.warning(record):
                note(warning)

    def of_first_epoch(
        self,
        config: CDPGConfig,
        record: Mapping[str, Any],
        watch: CoreWatch,
        evaluation: tuple[int, float | None],
        note: Callable[[str], None],
    ) -> None:
        """What the first epoch tells of the machine and of the rest of the run.

        ``evaluation``: how many contexts are evaluated, and the seconds that one takes if that is known.
        """
        if busy := watch.notice(torch.get_num_threads()):
            note(busy)
        self._told_memory = memory.peak()
        note(outlook(config, record["epoch"], record["seconds"], *evaluation, self._told_memory))

    def of_end(self, metrics: Path, note: Callable[[str], None]) -> None:
        """What the whole run gives reason to say."""
        self._failures.tell_all(metrics, note)
        records = list(read_jsonl(metrics))
        for watch in self._watches:
            if verdict := watch.verdict(records):
                note(verdict)
        self.of_memory(note)

    def of_memory(self, note: Callable[[str], None]) -> None:
        """Say the most memory that was in use again, if it has grown by much since it was said."""
        peak = memory.peak()
        if any(count > _GROWN * self._told_memory.get(kind, count) for kind, count in peak.items()):
            self._told_memory = peak
            note(f"in all, at most {memory.listed(peak)} in use")
