"""Failed checks of a run: examples in ``failures.jsonl``, a notice, and an error if there are too many."""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdpg.errors import CDPGError, RunError, UserError
from cdpg.messages.terms import term
from cdpg.rollout.rollout import Rollout, example_of
from cdpg.storage.jsonl import JsonlFile, read_jsonl
from cdpg.system.distributed import Processes
from cdpg.training.records import failure_records

_log = logging.getLogger(__name__)

_NO_WORKER = "if it needs a GPU or what only the training process has, set check_workers: 0"
_CURES = {
    "timeout": "make it quicker or raise check_seconds",
    "cpu": "make it quicker or raise check_seconds",
    "memory": "let it take less memory or raise check_memory",
    "died": _NO_WORKER,
    "crashed": _NO_WORKER,
}
"""Advice on failed checks, by kind; for other kinds, the constraint must be fixed."""
_OUTSIDE = re.compile(r"\b(ImportError|ModuleNotFoundError)\b|\bCUDA\b|\bcuda\b")
"""Exceptions of a function that needs something a worker does not have."""
_FEWEST = 100
"""Samples from which a share is meaningful: one hanging sample among eight is no reason to stop. Smaller epochs are
counted together with those before them."""


_NONE_APPLIES = "none_applies"


class FailureLog:
    """Handles an epoch's failed checks; the same on every process, since it depends on joint counts only."""

    def __init__(self, path: Path, share: float, processes: Processes) -> None:
        self.file = JsonlFile(path)
        self._share, self._processes = share, processes
        self._reported: set[str] = set()
        self._counts: deque[tuple[int, int]] = deque()

    def append(self, rollout: Rollout) -> None:
        """Write one example of each kind, from the first process that has one; called by all processes."""
        if not rollout.failed.any():  # the same on every process
            return
        examples: dict[tuple[str, str], dict[str, Any]] = {}
        for record in self._processes.gather(failure_records(rollout)):
            examples.setdefault((record["constraint"], record["kind"]), record)
        for record in examples.values() if self._processes.is_main else ():
            self.file.append(record)

    def problem(self, rollout: Rollout) -> CDPGError | None:
        """The error if the run cannot continue with this epoch, or None."""
        if rollout.number == 1 and bool(rollout.inapplicable.all()):  # in a later epoch it may be chance
            return UserError(
                f"no constraint applies to any of the {rollout.inapplicable.numel():,} samples of epoch "
                f"{rollout.number}: each returned None for all of them, so there is nothing to learn from; return "
                "True, False or a number between 0 and 1 where a constraint applies, and None only elsewhere"
            )
        too_many = self.too_many(rollout)
        return None if too_many is None else RunError(too_many)

    def too_many(self, rollout: Rollout) -> str | None:
        """The error if too many checks failed, or None."""
        failed, total = int(rollout.failed.sum()), int((~rollout.inapplicable).sum())
        recently, among = self._recently(failed, total)
        if not failed or (failed < total and recently <= self._share * max(among, _FEWEST)):
            return None
        example = example_of(rollout.failures)
        if failed == total:
            return (
                f"the check of every sample of epoch {rollout.number} failed ({_kinds(rollout.checks)}){example}; "
                f"examples are in {str(self.file.path)!r}: {_cure(rollout)}, and continue with {term('resume')}"
            )
        last = f" ({recently:,} of the last {among:,})" if among > total else ""
        return (
            f"the checks of {failed:,} of {total:,} samples of epoch {rollout.number} failed "
            f"({_kinds(rollout.checks)}), more than the {self._share:.0%} that check_failures allows{last}{example}; "
            f"examples are in {str(self.file.path)!r}: {_cure(rollout)}, or raise check_failures, and continue with "
            f"{term('resume')}"
        )

    def _recently(self, failed: int, total: int) -> tuple[int, int]:
        """Failed and all samples of this epoch; if it has few, together with epochs before it."""
        self._counts.append((failed, total))
        while sum(total for _, total in self._counts) - self._counts[0][1] >= _FEWEST:
            self._counts.popleft()
        return sum(failed for failed, _ in self._counts), sum(total for _, total in self._counts)

    def log(self, record: Mapping[str, Any]) -> None:
        """Log that checks failed, once for each kind."""
        kinds = {key for key in record if key.startswith(("checks_failed_", "checks_exhausted_"))}
        if record.get("not_applicable"):
            kinds.add(_NONE_APPLIES if none_applies(record) else "not_applicable")
        new = kinds - self._reported
        self._reported |= kinds
        if _NONE_APPLIES in new:
            _log.warning(
                f"epoch {record['epoch']}: no constraint applies to any of its {record['samples']:,} samples, so "
                "nothing is learnt from it; the run continues: raise contexts_per_epoch, or leave out contexts to "
                "which none applies"
            )
        elif new:
            _log.warning(f"epoch {record['epoch']}: {summary([record])}")

    def log_total(self, metrics: Path) -> None:
        """Log how many checks failed in the whole run, if any."""
        records = list(read_jsonl(metrics)) if metrics.exists() else []
        text = summary(records)
        if text:
            failed = any(record.get("checks_failed") for record in records)
            where = f"; examples of failures are in {str(self.file.path)!r}" if failed else ""
            _log.warning(f"in all, {text}{where}")


def _cure(rollout: Rollout) -> str:
    """Advice on the failures of an epoch, by their kinds."""
    kinds = {
        key.removeprefix("failed_") for key, count in rollout.checks.items() if key.startswith("failed_") and count
    }
    found = [cure for kind, cure in _CURES.items() if kind in kinds]
    if any(_OUTSIDE.search(failure.detail) for failure in rollout.failures.values() if failure.kind == "exception"):
        found.append(_NO_WORKER)
    fix = ["fix the constraint"] if kinds - {"timeout", "cpu", "memory"} else []
    return ", or ".join([*fix, *dict.fromkeys(found)])


def none_applies(record: Mapping[str, Any]) -> bool:
    """Whether no constraint applies to any sample of an epoch, by its line of ``metrics.jsonl``."""
    return bool(record.get("not_applicable")) and record["not_applicable"] == record["samples"]


def summary(records: Sequence[Mapping[str, Any]]) -> str:
    """``3 checks failed (timeout 2, died 1) …`` for lines of ``metrics.jsonl``; empty if there is nothing to say."""
    counts: Counter[str] = Counter()
    for record in records:
        counts.update({key.removeprefix("checks_"): n for key, n in record.items() if key.startswith("checks_") and n})
        counts["not_applicable"] += record.get("not_applicable") or 0
    parts = []
    if counts["failed"]:
        parts.append(f"{counts['failed']:,} checks failed ({_kinds(counts)}) and their samples were left out")
    if counts["exhausted"]:
        kinds = _kinds(counts, "exhausted_")
        parts.append(f"{counts['exhausted']:,} texts exhausted a built-in check ({kinds}) and count as not satisfying")
    if counts["not_applicable"]:
        idle = sum(map(none_applies, records))
        whole = f", among them all of {idle:,} {'epoch' if idle == 1 else 'epochs'}" if idle else ""
        parts.append(f"no constraint applies to {counts['not_applicable']:,} samples{whole}, which were left out")
    return "; ".join(parts)


def _kinds(counts: Mapping[str, int], prefix: str = "failed_") -> str:
    return ", ".join(f"{key.removeprefix(prefix)} {n:,}" for key, n in counts.items() if key.startswith(prefix))
