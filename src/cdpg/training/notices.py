"""What a run says beside its progress line: failed checks, nothing to learn from, busy cores, time and memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from cdpg.config import CDPGConfig
from cdpg.storage.jsonl import read_jsonl
from cdpg.system import memory
from cdpg.system.threads import CoreWatch
from cdpg.training.failures import FailureLog, none_applies
from cdpg.training.progress import outlook
from cdpg.training.starvation import PlentyWatch, StarvationWatch

_log = logging.getLogger(__name__)

_GROWN = 1.2
"""How far the memory in use may exceed what was said of it before it is said again."""


class Notices:
    """Logs them, each when there is reason to."""

    def __init__(self, failures: FailureLog, samples_per_context: int) -> None:
        self._failures = failures
        self._watches = (StarvationWatch(samples_per_context), PlentyWatch())
        self._reported_memory: dict[str, int] = {}

    def of_epoch(self, record: Mapping[str, Any]) -> None:
        """What an epoch's checks and coverage give reason to say."""
        self._failures.log(record)
        for watch in () if none_applies(record) else self._watches:
            if warning := watch.warning(record):
                _log.warning(warning)

    def of_first_epoch(
        self,
        config: CDPGConfig,
        record: Mapping[str, Any],
        watch: CoreWatch,
        evaluation: tuple[int, float | None],
    ) -> None:
        """What the first epoch tells of the machine and of the rest of the run.

        ``evaluation``: how many contexts are evaluated, and the seconds that one takes if that is known.
        """
        if busy := watch.notice(torch.get_num_threads()):
            _log.warning(busy)
        self._reported_memory = memory.peak()
        _log.info(outlook(config, record["epoch"], record["seconds"], *evaluation, self._reported_memory))

    def of_end(self, metrics: Path) -> None:
        """What the whole run gives reason to say."""
        self._failures.log_total(metrics)
        records = [record for record in read_jsonl(metrics) if not none_applies(record)]
        for watch in self._watches:
            if verdict := watch.verdict(records):
                _log.warning(verdict)
        self.of_memory()

    def of_memory(self) -> None:
        """Say the most memory that was in use again, if it has grown by much since it was said."""
        peak = memory.peak()
        if any(count > _GROWN * self._reported_memory.get(kind, count) for kind, count in peak.items()):
            self._reported_memory = peak
            _log.info(f"in all, at most {memory.format_memory(peak)} in use")


def log_all(notices: Iterable[str]) -> None:
    """Each a notice of its own."""
    for notice in notices:
        _log.warning(notice)
