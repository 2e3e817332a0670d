"""The notices of a run: failed checks, nothing to learn from, busy cores, time and memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from cdpg.config import CDPGConfig
from cdpg.storage.jsonl import read_jsonl
from cdpg.system import memory
from cdpg.system.threads import CoreWatch
from cdpg.training.engine import DriftWatch
from cdpg.training.failures import FailureLog, none_applies
from cdpg.training.forecast import outlook
from cdpg.training.starvation import PlentyWatch, StarvationWatch

_log = logging.getLogger(__name__)

_GROWN = 1.2
"""Growth of the peak memory after which it is reported again."""


class _Watch(Protocol):
    def warning(self, record: Mapping[str, Any]) -> str | None:
        """The warning after an epoch with these metrics, or None."""

    def verdict(self, records: Sequence[Mapping[str, Any]]) -> str | None:
        """The warning at the end of a run with these metrics, or None."""


class RunNotices:
    """Logs the notices of a run."""

    def __init__(
        self, failures: FailureLog, samples_per_context: int, is_tilted: bool = False, has_engine: bool = False
    ) -> None:
        """``is_tilted``: the target has moments or rewards, so that there is more to gain than satisfaction."""
        self._failures = failures
        starved = StarvationWatch(samples_per_context)
        plenty = () if is_tilted else (PlentyWatch(),)
        self._watches: Sequence[_Watch] = (starved, *plenty, *((DriftWatch(),) if has_engine else ()))
        self._reported_memory: dict[str, int] = {}

    def of_epoch(self, record: Mapping[str, Any]) -> None:
        """Notices on an epoch's checks and coverage."""
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
        """Notices after the first epoch, on the machine and the rest of the run.

        ``evaluation``: how many contexts are evaluated, and the seconds that one takes if that is known.
        """
        if busy := watch.notice(torch.get_num_threads()):
            _log.warning(busy)
        self._reported_memory = memory.peak()
        _log.info(outlook(config, record["epoch"], record["seconds"], *evaluation, self._reported_memory))

    def of_end(self, metrics: Path) -> None:
        """Notices on the whole run."""
        self._failures.log_total(metrics)
        records = [record for record in read_jsonl(metrics) if not none_applies(record)]
        for watch in self._watches:
            if verdict := watch.verdict(records):
                _log.warning(verdict)
        self.of_memory()

    def of_memory(self) -> None:
        """Report the peak memory again if it has grown by much since."""
        peak = memory.peak()
        if any(count > _GROWN * self._reported_memory.get(kind, count) for kind, count in peak.items()):
            self._reported_memory = peak
            _log.info(f"in all, at most {memory.format_memory(peak)} in use")


def log_all(notices: Iterable[str]) -> None:
    """Each a notice of its own."""
    for notice in notices:
        _log.warning(notice)
